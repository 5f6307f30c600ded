"""What a layer of DeepSeek-V3 keeps for its backward, in bytes per token.

Of the attention of one layer with H heads, latent vectors of Q and C features, keys of N + R and values of V features
a head, in numbers (and what each is kept for):

    latent of the queries, and normalised   Q + Q    its norm, wq_b
    latent of keys and values               C    its norm (with it, in one piece of memory, the R features of the key)
    latent, normalised                      C    wkv_b
    q, k                    2H(N + R)    attention (put together after the turn; what was there before is not kept)
    v                       H(N + R)    attention, which gets values as wide as keys; where they are, H(N + V), since
                                        they are then a part of wkv_b's result
    output of attention     H(N + R)    attention                  and H fp32 sums of its softmax
    the same as wide as v   HV    wo, where that is another width

Where queries are not compressed, wq has the normalised x, which is kept anyway. The rest is as in Llama (see
`models.llama.activations`) with a feed-forward layer, or as `models.mixture` says with experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from models.activations import FP32, Kernels, Saved, norm_saved

if TYPE_CHECKING:
    from models.deepseek_v3.sizes import DeepSeekV3Sizes


def layer_saved(sizes: DeepSeekV3Sizes, dense: bool, element: int, kernels: Kernels) -> Saved:
    """Bytes per token of a layer; `element` is those of a number in the compute format."""
    d = sizes.dim
    attention = _attention_saved(sizes, element, kernels)
    rest = _feed_forward_saved(sizes, element) if dense else sizes.mixture.saved(element)
    norm = norm_saved(d, sizes.norm_type, element, kernels)
    return Saved(
        input=element * d,
        # Beside attention and what follows it: x and h and what their norms make of them.
        inside=attention.inside + rest.inside + element * d + 2 * (norm.input + norm.more),
        deferred=attention.deferred + rest.deferred + element * d,
        temporary=max(attention.temporary, rest.temporary),
        forward_temporary=max(attention.forward_temporary, rest.forward_temporary),
        per_sequence=attention.per_sequence,
        holds_input=norm.input == element * d,
        # Whole sequences of the latent vectors (see `_attention_saved`) and of the normalised h.
        undivided=Saved(
            inside=attention.common.inside + rest.common.inside + element * d,
            deferred=attention.common.deferred + rest.common.deferred + element * d,
            temporary=max(attention.common.temporary, rest.common.temporary),
            forward_temporary=rest.common.forward_temporary,
        ),
    )


def _attention_saved(sizes: DeepSeekV3Sizes, element: int, kernels: Kernels) -> Saved:
    h, n, r, v = sizes.n_heads, sizes.qk_nope_head_dim, sizes.qk_rope_head_dim, sizes.v_head_dim
    q, c = sizes.q_lora_rank, sizes.kv_lora_rank
    latent = norm_saved(c, "rmsnorm", element, kernels)
    # A norm that keeps its input as it is keeps what it is a part of.
    inside = element * c + latent.input + latent.more + (element * r if latent.input == element * c else 0)
    if q:
        of_queries = norm_saved(q, "rmsnorm", element, kernels)
        inside += element * q + of_queries.input + of_queries.more
    whole = inside if q else inside + element * sizes.dim  # wq has whole sequences of the normalised x
    padded = v < n + r
    inside += element * h * (3 * (n + r) + n + r + v if padded else 2 * (n + r) + n + v + v) + FP32 * h
    linear = (2 * q if q else 0) + h * (n + r) + 2 * c + r + h * (n + v) + h * v + 2 * sizes.dim
    return Saved(
        inside=inside,
        deferred=element * linear,
        temporary=element * 2 * h * (2 * n + r + v),
        forward_temporary=element * h * (n + r) + FP32 * 2 * h * r,  # q in two parts while it is turned
        per_sequence=FP32 * r,  # complex numbers for half of the features that turn
        undivided=Saved(inside=whole, deferred=element * ((q or sizes.dim) + c + sizes.dim)),
    )


def _feed_forward_saved(sizes: DeepSeekV3Sizes, element: int) -> Saved:
    d, f = sizes.dim, sizes.ffn_hidden
    return Saved(
        inside=element * 4 * f,
        deferred=element * (d + 3 * f),
        temporary=element * (3 * f + 2 * d),
        undivided=Saved(deferred=element * d, temporary=element * 2 * d),
    )
