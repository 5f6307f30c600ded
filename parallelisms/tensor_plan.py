"""How tensor parallelism cuts parameters, as plain data: what is applied and what the plan counts. No torch here.

Shoeybi et al. 2019, Megatron-LM (arXiv 1909.08053), section 3: of each pair of matrices the first is cut by the
features that come out of it and the second by those that go in, so that a block is computed without communication
between them. Embedding and output are cut by vocabulary. What is not cut is held by every rank of the tensor group.

Parameters are told apart by the names that all families share:

    layers.N.attention.{wq, wk, wv, wq_b, wkv_b}.weight    (out, in): cut along 0, which is by heads
    layers.N.attention.wo.weight                           (out, in): cut along 1
    layers.N.feed_forward.{w1, w3}.weight                  (out, in): cut along 0; w2 along 1
    ...experts.{w1, w3}                                    (experts, out, in): cut along 1; w2 along 2
    tok_embeddings.weight, output.weight                   (vocabulary, D): cut along 0
    norms, routers, wq_a, wkv_a                            whole

Keys and values of grouped queries are cut by heads too. Where there are fewer of their heads than ranks, every rank
holds all of wk and wv and uses the one head that its queries meet.
"""

from __future__ import annotations

from typing import Any

BLOCKS = ("attention", "feed_forward", "moe")
"""Modules of a layer that get whole sequences, and whose outputs are sums over the ranks of the tensor group."""

_OUT = frozenset({"wq", "wk", "wv", "wq_b", "wkv_b", "w1", "w3", "tok_embeddings", "output"})
_IN = frozenset({"wo", "w2"})
_WHOLE = frozenset({"router", "gate", "wq_a", "wkv_a"})
_SHARED_BY_QUERIES = frozenset({"wk", "wv"})
_ENDS = frozenset({"tok_embeddings", "norm", "output"})  # modules that are in no layer


class UnknownParameterError(ValueError):
    """A parameter of which it is not known how it can be cut."""


def cut_dimension(name: str, degree: int, kv_heads: int | None = None) -> int | None:
    """Along which dimension the parameter of this full name is cut over `degree` ranks; None: it is not.

    `kv_heads` is the number of heads of keys and values, None where that does not matter.

    Raises UnknownParameterError for a name that is none of those above.
    """
    parts = name.split(".")
    module = parts[-2] if parts[-1] in ("weight", "bias") else parts[-1]
    known = parts[0] in _ENDS or (parts[0] == "layers" and len(parts) > 3)
    if module.endswith("norm"):
        return None
    if not known or (parts[0] == "layers" and parts[2] not in BLOCKS):
        raise UnknownParameterError(f"tensor parallelism does not know the parameter {name}")
    if module in _WHOLE:
        return None
    if degree > 1 and module in _SHARED_BY_QUERIES and kv_heads is not None and kv_heads < degree:
        return None
    leading = 1 if parts[-2] == "experts" else 0
    if module in _OUT:
        return leading
    if module in _IN and parts[-1] != "bias":
        return leading + 1
    raise UnknownParameterError(f"tensor parallelism does not know the parameter {name}")


def is_by_key_heads(name: str) -> bool:
    """Whether the rows of a parameter are the heads of keys or values, which several queries share."""
    return not _SHARED_BY_QUERIES.isdisjoint(name.split("."))


def local_shape(
    name: str, shape: tuple[int, ...], degree: int, kv_heads: int | None = None
) -> tuple[int, ...]:
    """What one of `degree` ranks holds of the parameter of this full name and shape."""
    if degree == 1:
        return shape
    cut = cut_dimension(name, degree, kv_heads)
    return tuple(size // degree if index == cut else size for index, size in enumerate(shape))


def undivided(sizes: Any, degree: int) -> dict[str, str]:
    """What of a model `degree` ranks cannot share equally: a sentence for each, by the name of the size or parameter.

    Raises UnknownParameterError.
    """
    reasons = {
        name: f"{name} {size} is not divisible by {degree}"
        for name in ("n_heads", "ffn_hidden", "expert_hidden", "vocab_size")
        if (size := getattr(sizes, name, degree)) % degree
    }
    heads = kv_heads(sizes)
    if heads is not None and heads % degree and degree % heads:
        reasons["n_kv_heads"] = f"n_kv_heads {heads} is not divisible by {degree}, nor {degree} by {heads}"
    if reasons:
        return reasons
    for module in sizes.modules():
        for name, shape in sizes.parameter_shapes(module).items():
            cut = cut_dimension(name, degree, heads)
            if cut is not None and shape[cut] % degree:
                return {name: f"{name} {list(shape)} is not divisible by {degree} along dimension {cut}"}
    return {}


def kv_heads(sizes: Any) -> int | None:
    """How many heads of keys and values a model has; None if each query has its own."""
    heads: int | None = getattr(sizes, "n_kv_heads", None)
    return heads


def features_into_attention(sizes: Any) -> int:
    """Numbers for each token that an attention layer gathers: of the hidden state, or of latent vectors."""
    latent = getattr(sizes, "kv_lora_rank", 0)
    if not latent:
        return int(sizes.dim)
    return int((sizes.q_lora_rank or sizes.dim) + latent + sizes.qk_rope_head_dim)
