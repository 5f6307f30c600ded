"""How likely a model finds tokens that are given: the basis of every evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from models.layers.decoder import Decoder

_MOST_LOGITS = 2**28  # numbers of the logits that are there at a time, where one passage does not need more
_TOKENS_AT_ONCE = 1024  # whose logits are there in fp32


@dataclass(frozen=True)
class Passage:
    """Tokens, at least two, of which the last `scored` are scored, each given all that stand before it."""

    tokens: Sequence[int]
    scored: int


@dataclass(frozen=True)
class Score:
    """Of the scored tokens of a passage.

    Attributes:
        log_likelihood: the natural logarithm of their joint probability.
        greedy: whether each is the most likely one at its place.
    """

    log_likelihood: float
    greedy: bool


def score(
    model: Decoder,
    passages: Sequence[Passage],
    batch_size: int | None = None,
    done: Callable[[int], None] = lambda passages: None,
) -> list[Score]:
    """The scores of the passages, in their order.

    Args:
        model: a whole model.
        passages: of any lengths; similar ones are computed together.
        batch_size: how many at a time at most; None: as many as keep the logits within a gigabyte in fp32.
        done: told how many passages have been scored since it was called last.
    """
    found: dict[int, Score] = {}
    order = sorted(range(len(passages)), key=lambda index: -len(passages[index].tokens))
    for indices in _batches(order, passages, model.sizes.vocab_size, batch_size):
        with torch.inference_mode():
            scores = _score_batch(model, [passages[index] for index in indices])
        found.update(zip(indices, scores, strict=True))
        done(len(indices))
    return [found[index] for index in range(len(passages))]


def _batches(
    order: Sequence[int], passages: Sequence[Passage], vocabulary: int, batch_size: int | None
) -> Iterator[Sequence[int]]:
    """Runs of `order`, in which the longest come first."""
    start = 0
    while start < len(order):
        length = len(passages[order[start]].tokens) - 1
        size = batch_size or max(1, _MOST_LOGITS // (length * vocabulary))
        yield order[start : start + size]
        start += size


def _score_batch(model: Decoder, passages: Sequence[Passage]) -> list[Score]:
    device = next(model.parameters()).device
    lengths = [len(passage.tokens) - 1 for passage in passages]
    # Padded on the right, where causal order keeps it out of everybody's sight.
    padded = [
        [*passage.tokens[:-1], *[0] * (max(lengths) - n)]
        for passage, n in zip(passages, lengths, strict=True)
    ]
    logits = model(torch.tensor(padded, device=device))  # (B, T, V)
    rows = zip(logits, passages, lengths, strict=True)
    return [_score(row[n - each.scored : n], each.tokens[-each.scored :]) for row, each, n in rows]


def _score(logits: Tensor, tokens: Sequence[int]) -> Score:
    """Of tokens (N,) whose logits are (N, V)."""
    target = torch.tensor(tokens, device=logits.device)
    total, greedy = torch.zeros((), dtype=torch.float64, device=logits.device), True
    for part, wanted in zip(logits.split(_TOKENS_AT_ONCE), target.split(_TOKENS_AT_ONCE), strict=True):
        total -= F.cross_entropy(part.float(), wanted, reduction="none").double().sum()
        greedy = greedy and bool((part.argmax(-1) == wanted).all())
    return Score(float(total), greedy)
