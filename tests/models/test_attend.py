"""Attention: every kernel gives what the formula gives, for every mask, and packed documents are documents alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.initialize import initialize_parameters
from models.layers.attend import Attend, KernelName, use_attention_kernel, with_masks
from models.layers.sequences import Sequences
from models.llama.model import Transformer
from models.llama.sizes import LlamaSizes

CPU = torch.device("cpu")
TINY = LlamaSizes(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_hidden=48, vocab_size=61, max_seq_len=64)


def formula(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None, documents: Tensor | None
) -> Tensor:
    """softmax(q kᵀ · scale) v, one query after the other."""
    (b, h, t, d), s = q.shape, k.shape[2]
    k, v = (each.repeat_interleave(h // k.shape[1], dim=1) for each in (k, v))
    result = torch.zeros(b, h, t, v.shape[-1], dtype=q.dtype)
    for row in range(b):
        for query in range(t):
            place = s - t + query
            seen = [
                key
                for key in range(place + 1)
                if (window is None or place - key < window)
                and (documents is None or documents[row, key] == documents[row, place])
            ]
            products = (k[row, :, seen] @ q[row, :, query, :, None])[..., 0]
            weights = (products * (1 / math.sqrt(d) if scale is None else scale)).softmax(-1)
            result[row, :, query] = (weights[..., None] * v[row, :, seen]).sum(1)
    return result


def random_documents(rows: int, length: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(rows, length, generator=generator) < 0.3).cumsum(1).to(torch.int32)


def inputs(t: int, s: int, value_width: int, kv_heads: int = 2, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (2, 4, t, 16), (2, kv_heads, s, 16), (2, kv_heads, s, value_width)
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kernel", ["sdpa", "flex"])
@settings(max_examples=12, deadline=None)
@given(
    window=st.sampled_from([None, 1, 3, 100]),
    masked=st.booleans(),
    value_width=st.sampled_from([8, 16]),
    kv_heads=st.sampled_from([1, 2, 4]),
    scale=st.sampled_from([None, 0.7]),
    seed=st.integers(0, 99),
)
def test_every_kernel_computes_the_formula(
    kernel: KernelName,
    window: int | None,
    masked: bool,
    value_width: int,
    kv_heads: int,
    scale: float | None,
    seed: int,
) -> None:
    q, k, v = inputs(12, 12, value_width, kv_heads, seed)
    documents = random_documents(2, 12, seed) if masked else None
    attend = Attend(scale, window)
    use_attention_kernel(attend, kernel, CPU, documents_are_masked=masked)
    sequences = Sequences(torch.arange(12), documents)
    with torch.no_grad():
        found = attend(q, k, v, sequences)
        prepared = attend(q, k, v, with_masks(sequences, [attend], 2, torch.float32))
    torch.testing.assert_close(found, formula(q, k, v, scale, window, documents), rtol=1e-5, atol=1e-5)
    assert torch.equal(found, prepared)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("queries", [1, 4, 9])
def test_fewer_queries_than_keys_are_the_last_ones(queries: int, window: int | None) -> None:
    q, k, v = inputs(queries, 9, 16)
    for kernel in ("sdpa", "flex"):
        attend = Attend(window=window)
        use_attention_kernel(attend, kernel, CPU, documents_are_masked=False)  # type: ignore[arg-type]
        with torch.no_grad():
            found = attend(q, k, v, Sequences(torch.arange(9 - queries, 9)))
        torch.testing.assert_close(found, formula(q, k, v, None, window, None), rtol=1e-5, atol=1e-5)


def test_flash_on_a_cpu_computes_causal_order_with_narrower_values() -> None:
    q, k, v = inputs(12, 12, 8)
    attend = Attend()
    use_attention_kernel(attend, "flash", CPU, documents_are_masked=False)
    found = attend(q, k, v, Sequences.in_order(12, CPU))
    torch.testing.assert_close(found, formula(q, k, v, None, None, None), rtol=1e-5, atol=1e-5)


def by_lengths(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_bounds: Tensor,
    key_bounds: Tensor,
    longest_query: int,
    longest_key: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """What torch documents of `varlen_attn`, (tokens, H, D) each: sequences one after the other, each by the formula."""
    assert window_size[1] == 0
    assert enable_gqa == (q.shape[1] != k.shape[1])
    assert query_bounds.dtype == key_bounds.dtype == torch.int32
    assert int(query_bounds.diff().max()) == longest_query
    assert int(key_bounds.diff().max()) == longest_key
    window = None if window_size[0] == -1 else window_size[0] + 1
    parts = [
        each.tensor_split(bounds[1:-1].tolist())
        for each, bounds in ((q, query_bounds), (k, key_bounds), (v, key_bounds))
    ]
    results = [
        formula(*(part.transpose(0, 1)[None] for part in sequence), scale, window, None)[0].transpose(0, 1)
        for sequence in zip(*parts, strict=True)
    ]
    return torch.cat(results)


@settings(max_examples=12, deadline=None)
@given(
    window=st.sampled_from([None, 1, 3]),
    masked=st.booleans(),
    value_width=st.sampled_from([8, 16]),
    scale=st.sampled_from([None, 0.7]),
    seed=st.integers(0, 99),
)
def test_flash_is_told_lengths_that_mean_the_documents_and_the_window(
    window: int | None, masked: bool, value_width: int, scale: float | None, seed: int
) -> None:
    q, k, v = inputs(12, 12, value_width, seed=seed)
    documents = random_documents(2, 12, seed) if masked else None
    attend = Attend(scale, window)
    use_attention_kernel(attend, "flash", CPU, documents_are_masked=masked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.nn.attention.varlen.varlen_attn", by_lengths)
        found = attend(q, k, v, Sequences(torch.arange(12), documents))
    torch.testing.assert_close(found, formula(q, k, v, scale, window, documents), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kernel", ["sdpa", "flash", "flex"])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("value_width", [64, 32])
def test_every_kernel_of_an_accelerator_gives_the_result_and_gradients_of_the_cpu(
    kernel: KernelName, window: int | None, masked: bool, value_width: int
) -> None:
    results = []
    for device, chosen in ((CPU, "sdpa"), (torch.device("cuda"), kernel)):
        generator = torch.Generator().manual_seed(0)
        shapes = (2, 8, 300, 64), (2, 2, 300, 64), (2, 2, 300, value_width)
        leaves = [
            torch.randn(shape, generator=generator).bfloat16().to(device).requires_grad_() for shape in shapes
        ]
        documents = random_documents(2, 300, 0).to(device) if masked else None
        attend = Attend(window=window)
        use_attention_kernel(attend, chosen, device, documents_are_masked=masked)  # type: ignore[arg-type]
        y = attend(*leaves, Sequences(torch.arange(300, device=device), documents))
        y.float().square().sum().backward()
        results.append([each.float().cpu() for each in (y, *(leaf.grad for leaf in leaves))])  # type: ignore[union-attr]
    for expected, found in zip(*results, strict=True):
        assert (found - expected).norm() / expected.norm() < 0.02


def test_auto_is_torchs_choice_on_a_cpu_and_flex_on_an_accelerator_where_there_is_a_mask() -> None:
    from models.layers.attention_kernels import Flex, Sdpa

    for device, window, masked, kernel in (
        ("cpu", None, True, Sdpa()),
        ("cpu", 3, False, Sdpa()),
        ("cuda", None, False, Sdpa()),
        ("cuda", None, True, Flex()),
        ("cuda", 3, False, Flex()),
    ):
        attend = Attend(window=window)
        use_attention_kernel(attend, "auto", torch.device(device), documents_are_masked=masked)
        assert attend.kernel == kernel


def test_the_logits_of_packed_documents_are_those_of_each_document_alone() -> None:
    model = Transformer(TINY)
    initialize_parameters(model, 0)
    lengths = (5, 1, 9, 3)
    tokens = torch.randint(TINY.vocab_size, (1, sum(lengths)), generator=torch.Generator().manual_seed(0))
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None]
    with torch.no_grad():
        alone = torch.cat([model(part) for part in tokens.split(lengths, dim=1)], dim=1)
        packed = Sequences.packed(documents)
        torch.testing.assert_close(model(tokens, packed), alone, rtol=1e-5, atol=1e-5)
        # Rotations only know distances, so documents that are masked need not begin at 0; in floating point they do.
        in_order = replace(packed, positions=torch.arange(sum(lengths)))
        torch.testing.assert_close(model(tokens, in_order), alone, rtol=1e-3, atol=1e-4)
        unmasked = model(tokens)
    torch.testing.assert_close(unmasked[:, :5], alone[:, :5])
    assert (unmasked[:, 5:] - alone[:, 5:]).abs().max() > 0.01


@pytest.mark.slow
def test_compiled_layers_with_masks_give_the_same_gradients() -> None:
    tokens = torch.randint(TINY.vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))
    sizes = replace(TINY, sliding_window=3)

    def gradients(model: Transformer) -> dict[str, Tensor]:
        initialize_parameters(model, 0)
        for seed in (0, 1):  # the second batch has other documents
            model.zero_grad()
            model(tokens, Sequences.packed(random_documents(2, 16, seed))).square().sum().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    compiled = Transformer(sizes)
    for layer in compiled.layers.values():
        layer.compile(backend="aot_eager", fullgraph=True)
    expected, found = gradients(Transformer(sizes)), gradients(compiled)
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)


def test_the_mask_is_made_once_for_all_layers_and_kept_once() -> None:
    rows, length = 2, 48
    kept: dict[str, dict[int, int]] = {"masked": {}, "plain": {}}
    model = Transformer(replace(TINY, n_layers=6))
    initialize_parameters(model, 0)
    tokens = torch.randint(TINY.vocab_size, (rows, length), generator=torch.Generator().manual_seed(0))
    for name, sequences in (("plain", None), ("masked", Sequences.packed(random_documents(rows, length, 0)))):

        def pack(tensor: Tensor, name: str = name) -> Tensor:
            kept[name][tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = model(tokens, sequences)
        del output
    more = sum(kept["masked"].values()) - sum(kept["plain"].values())
    mask, turns = rows * length * length * 4, (rows - 1) * length * TINY.head_dim * 4
    assert more == mask + turns


def test_a_model_with_a_window_generates_with_its_cache_what_it_computes_without() -> None:
    model = Transformer(replace(TINY, sliding_window=4))
    initialize_parameters(model, 0)
    tokens = torch.randint(TINY.vocab_size, (2, 15), generator=torch.Generator().manual_seed(0))
    cache = model.new_cache(2, 15)
    with torch.no_grad():
        pieces = torch.cat([model(part, cache=cache) for part in tokens.split((6, 1, 1, 7), dim=1)], dim=1)
        whole = model(tokens)
        torch.testing.assert_close(pieces, whole, rtol=1e-4, atol=1e-5)
        # What is further back than both layers' windows reach makes no difference, and what is nearer does.
        changed = tokens.clone()
        changed[:, 0] = (changed[:, 0] + 1) % TINY.vocab_size
        difference = (model(changed) - whole).abs().amax(dim=(0, 2))
    assert difference[6] > 1e-6
    assert difference[7:].max() == 0
