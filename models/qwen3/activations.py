"""What a layer of Qwen3 keeps for its backward, in bytes per token.

As a layer of Llama (see `models.llama.activations`), but that the width of queries, H · head_dim, is not that of the
hidden state, and that queries and keys are normalised: their norms keep what they normalise. On an accelerator that
is another copy of them and a number for each head, on the CPU fp32 copies of them before and after.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from models.activations import Kernels, Saved, norm_saved

if TYPE_CHECKING:
    from models.qwen3.sizes import Qwen3Sizes


def layer_saved(sizes: Qwen3Sizes, element: int, kernels: Kernels) -> Saved:
    """Bytes per token of a layer; `element` is those of a number in the compute format."""
    d, f = sizes.dim, sizes.ffn_hidden
    attention = sizes.attention.saved(element, kernels)
    norm = norm_saved(d, sizes.norm_type, element, kernels)
    return Saved(
        input=element * d,
        # Beside attention: x and h and what their norms make of them, and four times the feed-forward width.
        inside=attention.inside + element * (d + 4 * f) + 2 * (norm.input + norm.more),
        deferred=attention.deferred + element * (2 * d + 3 * f),
        temporary=element * (3 * f + 2 * d),
        forward_temporary=attention.forward_temporary,
        per_sequence=attention.per_sequence,
        holds_input=norm.input == element * d,
        # Whole sequences of both normalised states; where weights come later, of the gradients of wo and w2 too.
        undivided=Saved(inside=element * 2 * d, deferred=element * 4 * d, temporary=element * 2 * d),
    )
