"""Text from a model: prompts are continued one token after the other, several at once.

Prompts of unequal length are padded on the left, so that the next token of all of them is in the last column. Padding
is a document of its own: no prompt sees it, and positions begin at 0 where the prompt begins. So each text of a batch
is the one that its prompt alone would get.

    padding   prompt            continuation
    .  .  .   a0 a1 a2          a3 a4 a5 ...
              b0 b1 b2 b3 b4 b5 b6 b7 b8 ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

import torch
from torch import Tensor

from models.layers.attend import Attend
from models.layers.attention_kernels import Sight
from models.layers.decoder import Decoder
from models.layers.sequences import Sequences
from trainer.sampling import Sampling, draw

_PREFILL_TOKENS = 2048  # of prompts that are computed at once: each has logits, and a row of the mask


class Continuation:
    """A batch of prompts that are being continued.

    Every prompt has draws of its own, which follow from its seed: what is drawn does not depend on the others.
    """

    def __init__(
        self,
        model: Decoder,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: Sampling,
        seeds: Sequence[int],
        stop: Set[int] = frozenset(),
        *,
        use_cache: bool = True,
    ) -> None:
        """
        Args:
            model: a whole model.
            prompts: the tokens of each, at least one.
            max_new_tokens: how many tokens each gets at most.
            sampling: how tokens are drawn.
            seeds: of the draws of each prompt.
            stop: tokens that end a text; they are not part of it.
            use_cache: keep keys and values; without, every token is computed again for each new one.

        Raises:
            ValueError: a prompt has no token.
        """
        if not all(prompts):
            raise ValueError("every prompt needs at least one token, if only the begin token")
        parameter = next(model.parameters())
        self._model = model
        self._sampling = sampling
        self._stop = stop
        self._left = max_new_tokens
        self._going = [True] * len(prompts)
        self._generators = [torch.Generator(parameter.device).manual_seed(seed) for seed in seeds]
        longest = max(map(len, prompts))
        padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=parameter.device)
        padded = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        self._tokens = torch.tensor(padded, device=parameter.device)  # (B, all so far)
        self._padding = padding if longest != min(map(len, prompts)) else None
        self._dtype = parameter.dtype
        self._cache = None
        if use_cache:
            capacity = longest + max_new_tokens
            self._cache = model.new_cache(len(prompts), capacity, parameter.dtype, parameter.device)

    @property
    def done(self) -> bool:
        """Whether no text goes on."""
        return self._left == 0 or not any(self._going)

    def end(self, index: int) -> None:
        """The text of the prompt of this index has ended, for a reason of the caller's."""
        self._going[index] = False

    def step(self) -> list[int | None]:
        """The next token of each prompt; None for those whose text has ended."""
        with torch.inference_mode():
            drawn = self._draw(self._last_logits())
            self._tokens = torch.cat((self._tokens, drawn), dim=1)
        self._left -= 1
        tokens: list[int] = drawn.flatten().tolist()
        self._going = [
            going and token not in self._stop for going, token in zip(self._going, tokens, strict=True)
        ]
        return [token if going else None for going, token in zip(self._going, tokens, strict=True)]

    def _draw(self, logits: Tensor) -> Tensor:
        """(B, V) to (B, 1)."""
        if self._sampling.temperature == 0:
            return draw(logits, self._sampling, self._generators[0])
        rows = zip(logits.split(1), self._generators, strict=True)
        return torch.cat([draw(row, self._sampling, generator) for row, generator in rows])

    def _last_logits(self) -> Tensor:
        """Of the token that comes next, (B, V)."""
        if self._cache is None:
            return self._model(self._tokens, self._sequences(0, self._tokens.shape[1]))[:, -1]
        computed = self._cache.length
        logits = self._tokens
        portion = max(1, _PREFILL_TOKENS // len(self._tokens))
        for tokens in self._tokens[:, computed:].split(portion, dim=1):
            sequences = self._sequences(self._cache.length, tokens.shape[1])
            logits = self._model(tokens, sequences, self._cache)[:, -1]
        return logits

    def _sequences(self, past: int, length: int) -> Sequences:
        """Of the tokens of so many columns after the first `past`."""
        columns = torch.arange(past + length, device=self._tokens.device)
        if self._padding is None:
            return Sequences(columns[past:])
        documents = (columns >= self._padding.unsqueeze(1)).int()  # (B, all of them): 0 is padding
        positions = (columns[past:] - self._padding.unsqueeze(1)).clamp(min=0)
        if self._cache is None:
            return Sequences(positions, documents)
        # With a cache there are more keys than queries: a mask tells what documents cannot.
        rows = len(self._tokens)
        attends = {each.window: each for each in self._model.modules() if isinstance(each, Attend)}
        masks = {
            window: attend.kernel.mask(
                Sight(rows, length, past + length, window, documents, self._dtype, documents.device)
            )
            for window, attend in attends.items()
        }
        return Sequences(positions, masks=masks)


def generate(
    model: Decoder,
    prompt: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling,
    seed: int = 0,
    stop: Set[int] = frozenset(),
    *,
    use_cache: bool = True,
) -> Iterator[int]:
    """Yield the new tokens of one prompt as they are drawn; see `Continuation`."""
    text = Continuation(model, [prompt], max_new_tokens, sampling, [seed], stop, use_cache=use_cache)
    while not text.done:
        (token,) = text.step()
        if token is not None:
            yield token
