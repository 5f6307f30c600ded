"""What a Llama model keeps for its backward, in bytes per token.

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
"""

from __future__ import annotations

from models.llama.sizes import LlamaSizes
from models.saved import Saved

_FP32 = 4
_INT64 = 8


def llama_module(sizes: LlamaSizes, module: str, element: int, *, fused_norm: bool) -> Saved:
    """Bytes per token of one module; `element` is those of a number in the compute format."""
    d, f, k = sizes.dim, sizes.ffn_hidden, sizes.n_kv_heads * sizes.head_dim
    norm_input, norm_more = _norm(sizes, element, fused_norm)
    if module == "tok_embeddings":
        return Saved(input=_INT64)
    if module == "norm":
        return Saved(input=norm_input, inside=norm_more, temporary=element * 2 * d)
    if module == "output":
        return Saved(
            input=element * d,
            # log-softmax in fp32, and the labels
            inside=_FP32 * sizes.vocab_size + _INT64,
            deferred=element * (d + sizes.vocab_size),
            # The gradient of the log-softmax and that of its input, both in fp32.
            temporary=2 * _FP32 * sizes.vocab_size,
            # The logits, and a copy of them in fp32 if they are not.
            forward_temporary=(element + (_FP32 if element != _FP32 else 0)) * sizes.vocab_size,
        )
    kept = (d + 2 * k) + 2 * d + d + 4 * f  # q, k, v; normalised x and h; attention's output; feed-forward
    return Saved(
        input=element * d,
        inside=element * kept + _FP32 * sizes.n_heads + 2 * norm_more + 2 * norm_input - element * d,
        deferred=element * (6 * d + 2 * k + 3 * f),
        temporary=element * (3 * f + 2 * d),
        forward_temporary=_FP32 * 2 * d,  # q in fp32 while it is turned
        per_sequence=_FP32 * sizes.head_dim,  # complex numbers for half of the features
        holds_input=norm_input == element * d,
    )


def _norm(sizes: LlamaSizes, element: int, fused: bool) -> tuple[int, int]:
    """Bytes of a norm's input as it keeps it, and of what else it keeps."""
    if sizes.norm_type != "rmsnorm":
        return element * sizes.dim, 2 * _FP32  # mean and deviation; fused everywhere
    if fused:
        return element * sizes.dim, _FP32
    return _FP32 * sizes.dim, _FP32 * (sizes.dim + 1)
