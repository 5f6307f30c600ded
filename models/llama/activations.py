"""What a layer of Llama keeps for its backward, in bytes per token.

Of one layer of width D with H heads, keys and values of width K, feed-forward width F, in numbers (and what
each is kept for):

    x                       D    attention norm, which is also the residual stream
    normalised x            D    wq, wk, wv
    q, k, v                 D + 2K    attention (turned by their positions; what was there before is not kept)
    output of attention     D    attention, wo                    and H fp32 sums of its softmax
    h = x + attention       D    feed-forward norm
    normalised h            D    w1, w3
    w1 h, silu(w1 h), w3 h  3F   silu, and the product
    their product           F    w2

The fused norm keeps one fp32 statistic per token beside its input. The composed one (CPU) keeps its input and the
normalised input in fp32; where the model computes in fp32, its input is the x above and counts once.

The weight gradients need the inputs of the seven linear layers (3D + F) and their output gradients
(D + 2K for q, k, v; D for wo; 2F for w1 and w3; D for w2).

Under checkpointing by operation the results of wq, wv, attention, w1 and w2 stay (2D + K + F, and D with the sums).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from models.activations import FP32, Kernels, Saved, norm_saved

if TYPE_CHECKING:
    from models.llama.sizes import LlamaSizes


def layer_saved(sizes: LlamaSizes, element: int, kernels: Kernels) -> Saved:
    """Bytes per token of a layer; `element` is those of a number in the compute format."""
    d, f, k = sizes.dim, sizes.ffn_hidden, sizes.n_kv_heads * sizes.head_dim
    norm = norm_saved(d, sizes.norm_type, element, kernels)
    kept = (d + 2 * k) + 2 * d + d + 4 * f  # q, k, v; normalised x and h; attention's output; feed-forward
    return Saved(
        input=element * d,
        inside=element * kept + FP32 * sizes.n_heads + 2 * (norm.input + norm.more) - element * d,
        operations=element * (3 * d + k + f) + FP32 * sizes.n_heads,
        deferred=element * (6 * d + 2 * k + 3 * f),
        temporary=element * (3 * f + 2 * d),
        forward_temporary=FP32 * 2 * d,  # q in fp32 while it is turned
        per_sequence=FP32 * sizes.head_dim,  # complex numbers for half of the features
        holds_input=norm.input == element * d,
        # Whole sequences of both normalised states; where weights come later, of the gradients of wo and w2 too.
        undivided=Saved(
            inside=element * 2 * d,
            operations=element * d,
            deferred=element * 4 * d,
            temporary=element * 2 * d,
        ),
    )
