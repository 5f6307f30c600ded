"""Text from a model: one token after the other, each drawn from the model's distribution.

Temperature, top-k (Fan et al. 2018, arXiv 1805.04833) and top-p (Holtzman et al. 2019, arXiv 1904.09751) are
applied in this order, as is customary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.layers.decoder import Decoder
from trainer.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. Temperature 0 takes the most likely one; None switches a limit off."""

    temperature: float = 0.8
    top_k: int | None = None  # only among this many of the most likely
    top_p: float | None = None  # only among the fewest that together have this probability


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """Draw one token of each sequence.

    Args:
        logits: (B, V).
        sampling: temperature and limits.
        generator: on the device of the logits.

    Returns:
        (B, 1), int64.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1, keepdim=True)
    return torch.multinomial(probabilities(logits, sampling), 1, generator=generator)


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution that tokens are drawn from, (B, V) in fp32; the temperature must be above 0."""
    logits = logits.float() / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    likelihood = logits.softmax(-1)
    if sampling.top_p is None:
        return likelihood
    ordered, order = likelihood.sort(dim=-1, descending=True)
    # A token is superfluous if those before it suffice; so the most likely one always stays.
    superfluous = ordered.cumsum(-1) - ordered >= sampling.top_p
    ordered = ordered.masked_fill(superfluous, 0.0)
    kept = torch.zeros_like(likelihood).scatter(-1, order, ordered)
    return kept / kept.sum(-1, keepdim=True)


def generate(
    model: Decoder,
    prompt: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling,
    seed: int = 0,
    stop: int | None = None,
    *,
    use_cache: bool = True,
) -> Iterator[int]:
    """Yield new tokens as they are drawn.

    Args:
        model: a whole model.
        prompt: at least one token.
        max_new_tokens: how many tokens to yield at most.
        sampling: how tokens are drawn.
        seed: of the draws.
        stop: the token that ends a text; it is not yielded.
        use_cache: keep keys and values; without, every token is computed again for each new one.
    """
    if not prompt:
        raise ValueError("the prompt needs at least one token, if only the begin token")
    parameter = next(model.parameters())
    generator = torch.Generator(parameter.device).manual_seed(seed)
    tokens = torch.tensor([list(prompt)], device=parameter.device)
    cache = None
    if use_cache:
        cache = model.new_cache(1, len(prompt) + max_new_tokens, parameter.dtype, parameter.device)
    for _ in range(max_new_tokens):
        with torch.inference_mode():  # not around the yield, which would leave it on in the caller's code
            token = draw(model(tokens, cache=cache)[:, -1], sampling, generator)
            tokens = token if use_cache else torch.cat((tokens, token), dim=1)
        number = int(token)
        if number == stop:
            return
        yield number


class TextStream:
    """Text of tokens that come one at a time.

    A token need not be whole characters, and its text may depend on the one before it (a leading blank, for
    instance), so the last tokens are decoded again with each new one and the difference is given out. A
    character that is not complete yet is held back.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []  # tokens whose text has been given out; needed before the next ones
        self._held: list[int] = []

    def add(self, token: int) -> str:
        """The text that this token completes; may be empty."""
        self._held.append(token)
        text = self._text()
        if text.endswith("\N{REPLACEMENT CHARACTER}") and len(self._held) < 8:
            return ""  # most likely the first bytes of a character; none has more than 4
        self._context, self._held = self._held, []
        return text

    def rest(self) -> str:
        """The text of what is still held back."""
        text, self._held = self._text(), []
        return text

    def _text(self) -> str:
        given_out = self._tokenizer.decode(self._context)
        return self._tokenizer.decode(self._context + self._held)[len(given_out) :]
