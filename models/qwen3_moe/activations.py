"""What a layer of a Qwen3 mixture-of-experts model keeps for its backward, in bytes per token.

Attention and norms as in the dense models (see `models.qwen3.activations`), experts as `models.mixture` says: as if
each token's K experts were feed-forward layers of its own, and what the router keeps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from models.activations import Kernels, Saved, norm_saved

if TYPE_CHECKING:
    from models.qwen3_moe.sizes import Qwen3MoESizes


def layer_saved(sizes: Qwen3MoESizes, element: int, kernels: Kernels) -> Saved:
    """Bytes per token of a layer; `element` is those of a number in the compute format."""
    d = sizes.dim
    attention = sizes.attention.saved(element, kernels)
    mixture = sizes.mixture.saved(element)
    norm = norm_saved(d, sizes.norm_type, element, kernels)
    return Saved(
        input=element * d,
        # Beside attention and experts: x and h and what their norms make of them.
        inside=attention.inside + mixture.inside + element * d + 2 * (norm.input + norm.more),
        deferred=attention.deferred + mixture.deferred + element * d,
        temporary=max(mixture.temporary, element * 2 * d),
        forward_temporary=max(attention.forward_temporary, mixture.forward_temporary),
        per_sequence=attention.per_sequence,
        holds_input=norm.input == element * d,
        # Whole sequences of both normalised states, and of the gradient of wo's result.
        undivided=Saved(
            inside=mixture.common.inside + element * 2 * d,
            deferred=mixture.common.deferred + element * 3 * d,
            temporary=mixture.common.temporary,
            forward_temporary=mixture.common.forward_temporary,
        ),
    )
