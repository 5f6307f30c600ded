"""The arithmetic of a layer of experts: shapes, weights that a token goes through, what is kept. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from models.activations import FP32, Saved

_INT64 = 8


@dataclass(frozen=True)
class Balancing:
    """What keeps the experts of a layer equally busy, with the strengths that a family was published with.

    Attributes:
        rate: how much each expert's bias changes after an optimizer step; 0: there is none.
        loss: the factor of the balance loss of each sequence; 0: there is none.
    """

    rate: float = 0.0
    loss: float = 0.0


@dataclass(frozen=True)
class Mixture:
    """A layer of experts, see `models.layers.moe.MoE`.

    Attributes:
        dim: features of a token (D).
        hidden: features within each expert (F).
        n_experts: how many there are (E).
        per_token: how many each token goes through (K).
        shared_hidden: features of the feed-forward layer that all tokens go through (S); 0: there is none.
    """

    dim: int
    hidden: int
    n_experts: int
    per_token: int
    shared_hidden: int = 0

    def shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter, by its full name; `name` is that of the layer of experts."""
        experts = {
            f"{name}.router.gate.weight": (self.n_experts, self.dim),
            f"{name}.experts.w1": (self.n_experts, self.hidden, self.dim),
            f"{name}.experts.w2": (self.n_experts, self.dim, self.hidden),
            f"{name}.experts.w3": (self.n_experts, self.hidden, self.dim),
        }
        if not self.shared_hidden:
            return experts
        return {
            **experts,
            f"{name}.shared_experts.w1.weight": (self.shared_hidden, self.dim),
            f"{name}.shared_experts.w2.weight": (self.dim, self.shared_hidden),
            f"{name}.shared_experts.w3.weight": (self.shared_hidden, self.dim),
        }

    @property
    def active(self) -> int:
        """Weights that a token is multiplied with: the router's, its experts', and the shared ones."""
        each = 3 * self.dim
        return self.n_experts * self.dim + each * (self.per_token * self.hidden + self.shared_hidden)

    @property
    def idle(self) -> int:
        """Weights of the experts that a token does not go through."""
        return 3 * self.dim * self.hidden * (self.n_experts - self.per_token)

    def saved(self, element: int) -> Saved:
        """What it keeps for each token, its input left out; `element` is the bytes of a number in compute.

        In numbers, for each of the K experts of a token: the token (D) for w1 and w3, w1 x, its silu, w3 x and their
        product (4F), and the output (D) for its weight. Of the router, in fp32: the scores (E), and of each of the K
        weights what was divided, and in another format what multiplies the output; in int64 the expert, and where
        its copy of the token is among the sorted ones and the other way round. Of the shared feed-forward layer 4S.

        These are means over the tokens, however uneven the experts are used. Left out is what does not grow with
        the sequence: an int64 for each expert and sequence, and an int32 for each expert.
        """
        d, f, k, s = self.dim, self.hidden, self.per_token, self.shared_hidden
        weights = k * (FP32 + element) + FP32  # what was divided, and by which sum; what multiplies
        router = FP32 * self.n_experts + weights + 3 * _INT64 * k
        return Saved(
            inside=element * (k * (2 * d + 4 * f) + 4 * s) + router,
            # Inputs and output gradients of the gate, of the three matrices of each expert, and of the shared ones.
            deferred=element * (self.n_experts + k * (2 * d + 3 * f) + (d + 3 * s if s else 0)),
            temporary=element * (k * (3 * f + 2 * d) + d),
            forward_temporary=element * k * d,
            # Every rank routes all tokens, and hands each of their copies to its part of the experts.
            undivided=Saved(
                inside=element * k * 2 * d + router,
                deferred=element * (self.n_experts + k * 2 * d + (d if s else 0)),
                temporary=element * (k * 2 * d + d),
                forward_temporary=element * k * d,
            ),
        )

    def problems(self) -> Iterator[str]:
        """Why no model can have it."""
        if not 1 <= self.per_token <= self.n_experts:
            yield (
                f"n_experts_per_token must be at least 1 and at most n_experts {self.n_experts}, "
                f"got {self.per_token}"
            )
