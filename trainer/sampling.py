"""How the next token is drawn from a model's logits.

Temperature, top-k (Fan et al. 2018, arXiv 1805.04833) and top-p (Holtzman et al. 2019, arXiv 1904.09751) are
applied in this order, as is customary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
