"""The loss of a model on a text: per token, per byte, and as perplexity.

The text is cut into windows of the length that the model is used with. With a stride below the window, windows
overlap, and each scores only the tokens that the one before did not: these see at least window - stride tokens.

    window 6, stride 2      . context   x scored
    x x x x x x
        . . . . x x
            . . . . x x

With stride = window each token is scored in the window in which the trainer would have it, and the loss is the
trainer's. A stride below gives more context to each token, costs window / stride times as much, and is lower.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from trainer.errors import ConfigurationError
from trainer.inference import InferenceModel
from trainer.scoring import Passage, score


@dataclass(frozen=True)
class TextLoss:
    """What a text costs a model.

    Attributes:
        tokens: of the text, all of which are scored.
        bytes: of the text in UTF-8.
        nats: minus the logarithm of its probability.
    """

    tokens: int
    bytes: int
    nats: float

    @property
    def loss(self) -> float:
        """Nats per token: what the trainer calls the loss."""
        return self.nats / self.tokens

    @property
    def bits_per_byte(self) -> float:
        """Comparable between tokenizers."""
        return self.nats / math.log(2) / self.bytes

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that is beyond all numbers."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


def loss_of_text(
    loaded: InferenceModel,
    text: str,
    window: int,
    stride: int,
    batch_size: int | None = None,
    done: Callable[[int, int], None] = lambda scored, of: None,
) -> TextLoss:
    """Score a text as one document.

    Args:
        loaded: the model and its tokenizer.
        text: not empty.
        window: tokens of a window.
        stride: tokens from one window to the next, 1 to `window`.
        batch_size: windows at a time, see `score`.
        done: told how many windows have been scored since it was called last, and how many there are.

    Raises:
        ConfigurationError: the text has no tokens.
    """
    tokens = loaded.tokenizer.encode(text, bos=False, eos=False)
    if not tokens:
        raise ConfigurationError("the text has no tokens")
    passages = list(windows([loaded.before_text, *tokens], window, stride))
    scores = score(loaded.model, passages, batch_size, lambda scored: done(scored, len(passages)))
    nats = -math.fsum(each.log_likelihood for each in scores)
    return TextLoss(len(tokens), len(text.encode("utf-8", errors="replace")), nats)


def windows(tokens: Sequence[int], window: int, stride: int) -> Iterator[Passage]:
    """Passages that score every token but the first once, each given at most `window` tokens before it."""
    last = len(tokens) - 1
    end = min(window, last)  # the index of the last token that is scored
    yield Passage(tokens[: end + 1], end)
    while end < last:
        scored = min(stride, last - end)
        end += scored
        yield Passage(tokens[max(0, end - window) : end + 1], scored)
