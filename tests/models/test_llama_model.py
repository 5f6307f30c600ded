"""The Llama module: agreement with its sizes, with a plain reference, with itself cut into stages."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models import registry
from models.initialize import initialize_parameters
from models.layers.sequences import Sequences
from models.llama.model import Transformer
from models.llama.sizes import LlamaSizes
from models.sizes import RopeScaling
from models.tied import held_count, held_shapes

TINY = LlamaSizes(dim=32, n_layers=4, n_heads=4, n_kv_heads=2, ffn_hidden=48, vocab_size=61, max_seq_len=64)
TIED = replace(TINY, tie_embeddings=True)


def build(sizes: LlamaSizes, modules: tuple[str, ...] | None = None, seed: int = 0) -> Transformer:
    model = Transformer(sizes, modules)
    initialize_parameters(model, seed)
    return model


def tokens(rows: int = 2, length: int = 10, seed: int = 0) -> Tensor:
    return torch.randint(TINY.vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", registry.names())
def test_every_module_of_every_flavor_has_the_parameters_that_its_sizes_say(name: str) -> None:
    family = registry.family(name)
    for sizes in family.sizes.values():
        with torch.device("meta"):
            model = family.build(sizes)
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        expected = {n: s for module in sizes.modules() for n, s in sizes.parameter_shapes(module).items()}
        assert shapes == expected
        assert sum(p.numel() for p in model.parameters()) == sizes.parameter_count()


@pytest.mark.parametrize("norm_type", ["rmsnorm", "layernorm", "np_layernorm"])
def test_each_norm_has_the_parameters_that_its_sizes_say(norm_type: str) -> None:
    sizes = replace(TINY, norm_type=norm_type)
    model = build(sizes)
    expected = {n: s for module in sizes.modules() for n, s in sizes.parameter_shapes(module).items()}
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == expected
    assert model(tokens()).isfinite().all()


def test_the_model_has_no_buffers_and_its_state_is_its_parameters() -> None:
    for sizes in (TINY, TIED):
        model = build(sizes)
        assert not list(model.buffers())
        assert list(model.state_dict()) == [name for name, _ in model.named_parameters()]


def reference_logits(model: Transformer, x: Tensor) -> Tensor:
    """Llama written out naively from its paper: explicit softmax, explicit turns, one head at a time."""
    sizes, weights = model.sizes, dict(model.named_parameters())
    length = x.shape[1]
    head = sizes.head_dim

    def norm(h: Tensor, name: str) -> Tensor:
        return h / torch.sqrt((h**2).mean(-1, keepdim=True) + sizes.norm_eps) * weights[name]

    def turn(v: Tensor) -> Tensor:  # (B, T, head)
        out = torch.empty_like(v)
        for position in range(length):
            for i in range(head // 2):
                angle = position * sizes.rope_theta ** (-2 * i / head)
                a, b = v[:, position, 2 * i], v[:, position, 2 * i + 1]
                out[:, position, 2 * i] = a * math.cos(angle) - b * math.sin(angle)
                out[:, position, 2 * i + 1] = a * math.sin(angle) + b * math.cos(angle)
        return out

    h = weights["tok_embeddings.weight"][x]
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    for layer in range(sizes.n_layers):
        prefix = f"layers.{layer}"
        a = norm(h, f"{prefix}.attention_norm.weight")
        q, k, v = (a @ weights[f"{prefix}.attention.{w}.weight"].T for w in ("wq", "wk", "wv"))
        outputs = []
        for i in range(sizes.n_heads):
            j = i // (sizes.n_heads // sizes.n_kv_heads)
            qi = turn(q[..., i * head : (i + 1) * head])
            kj = turn(k[..., j * head : (j + 1) * head])
            scores = (qi @ kj.transpose(1, 2) / math.sqrt(head)).masked_fill(future, -math.inf)
            outputs.append(scores.softmax(-1) @ v[..., j * head : (j + 1) * head])
        h = h + torch.cat(outputs, -1) @ weights[f"{prefix}.attention.wo.weight"].T
        f = norm(h, f"{prefix}.ffn_norm.weight")
        w1, w2, w3 = (weights[f"{prefix}.feed_forward.{w}.weight"] for w in ("w1", "w2", "w3"))
        gate = f @ w1.T
        h = h + ((gate * torch.sigmoid(gate)) * (f @ w3.T)) @ w2.T
    output = weights["tok_embeddings.weight" if sizes.tie_embeddings else "output.weight"]
    return norm(h, "norm.weight") @ output.T


@pytest.mark.parametrize("sizes", [TINY, TIED, replace(TINY, n_kv_heads=4), replace(TINY, n_kv_heads=1)])
def test_logits_equal_those_of_the_paper_written_out(sizes: LlamaSizes) -> None:
    model = build(sizes)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens()), reference_logits(model, tokens()), rtol=1e-4, atol=1e-5)


def test_no_token_sees_those_after_it() -> None:
    model = build(TINY)
    x = tokens(1)
    changed = x.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % TINY.vocab_size
    with torch.no_grad():
        torch.testing.assert_close(model(x)[:, :6], model(changed)[:, :6])


def test_positions_can_be_given_per_sequence() -> None:
    model = build(replace(TINY, rope_scaling=RopeScaling(original_max_seq_len=16)))
    x = tokens()
    with torch.no_grad():
        by_default = model(x)
        assert torch.equal(by_default, model(x, Sequences(torch.arange(10))))
        torch.testing.assert_close(by_default, model(x, Sequences(torch.arange(10).expand(2, 10))))
        # Only distances matter: a sequence that starts later gives the same logits.
        shifted = torch.stack((torch.arange(10), torch.arange(10) + 7))
        torch.testing.assert_close(by_default, model(x, Sequences(shifted)), rtol=1e-4, atol=1e-5)


def gradients(stages: list[Transformer]) -> dict[str, Tensor]:
    return {n: p.grad for stage in stages for n, p in stage.named_parameters() if p.grad is not None}


def run(stages: list[Transformer]) -> tuple[Tensor, dict[str, Tensor]]:
    """Forward and backward through stages, each given a detached input as over a network."""
    x, inputs, outputs = tokens(), [], []
    for stage in stages:
        inputs.append(x)
        outputs.append(stage(x))
        x = outputs[-1].detach().requires_grad_()
    gradient: Tensor | None = None
    loss = F.cross_entropy(outputs[-1].flatten(0, 1), tokens(seed=1).flatten())
    for stage_input, output in zip(reversed(inputs), reversed(outputs), strict=True):
        loss.backward() if gradient is None else output.backward(gradient)
        gradient = stage_input.grad
    return outputs[-1].detach(), gradients(stages)


@settings(max_examples=10, deadline=None)
@given(st.sets(st.integers(1, len(TINY.modules()) - 1), max_size=6))
def test_stages_composed_equal_the_whole_model_bit_for_bit(cuts: set[int]) -> None:
    names = TINY.modules()
    bounds = [0, *sorted(cuts), len(names)]
    stages = [build(TINY, names[a:b]) for a, b in itertools.pairwise(bounds)]
    logits, whole = run([build(TINY)])
    staged_logits, staged = run(stages)
    assert torch.equal(logits, staged_logits)
    assert whole.keys() == staged.keys()
    assert all(torch.equal(whole[name], staged[name]) for name in whole)


@pytest.mark.parametrize(
    "modules", [(), ("layers.1", "layers.0"), ("layers.0", "layers.2"), ("layers.9",), ("norm", "norm")]
)
def test_modules_with_gaps_or_out_of_order_are_refused(modules: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="in order and without gaps"):
        Transformer(TINY, modules)


def test_a_part_with_a_tied_output_holds_a_copy_of_the_embedding_under_its_name() -> None:
    whole = build(TIED)
    first, last = build(TIED, TIED.modules()[:2]), build(TIED, TIED.modules()[2:])
    for part in (first, last):
        assert torch.equal(
            part.get_parameter("tok_embeddings.weight"), whole.get_parameter("tok_embeddings.weight")
        )
    assert last.copied == {"tok_embeddings.weight"}
    assert not first.copied
    assert not whole.copied
    assert {name: tuple(p.shape) for name, p in last.named_parameters()} == held_shapes(
        TIED, TIED.modules()[2:]
    )
    assert held_count(TIED, TIED.modules()[2:]) == sum(p.numel() for p in last.parameters())
    torch.testing.assert_close(last(first(tokens())), whole(tokens()))


def test_a_tied_embedding_gets_both_gradients() -> None:
    model = build(TIED)
    F.cross_entropy(model(tokens()).flatten(0, 1), tokens(seed=1).flatten()).backward()
    gradient = model.get_parameter("tok_embeddings.weight").grad
    assert gradient is not None
    unseen = torch.ones(TINY.vocab_size, dtype=torch.bool)
    unseen[tokens().flatten()] = False
    assert gradient[unseen].abs().max() > 0  # through the output
    assert gradient[~unseen].abs().mean() > gradient[unseen].abs().mean()  # and through the embedding


def test_bf16_logits_are_near_those_of_fp32_at_distant_positions() -> None:
    model = build(TINY)
    positions = torch.arange(5000, 5010)
    with torch.no_grad():
        exact = model(tokens(), Sequences(positions))
        rounded = build(TINY).bfloat16()(tokens(), Sequences(positions))
    assert rounded.dtype == torch.bfloat16
    assert (rounded.float() - exact).norm() / exact.norm() < 0.03


def test_compiled_layers_and_the_compiled_model_give_the_same_gradients() -> None:
    logits, expected = run([build(TINY)])
    by_layer = build(TINY)
    for layer in by_layer.layers.values():
        layer.compile(backend="aot_eager")
    whole = build(TINY)
    whole.compile(backend="aot_eager", fullgraph=True)
    for model in (by_layer, whole):
        compiled_logits, compiled = run([model])
        torch.testing.assert_close(compiled_logits, logits, rtol=1e-4, atol=1e-5)
        assert compiled.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(compiled[name], expected[name], rtol=1e-3, atol=1e-6)


def test_a_step_of_gradient_descent_lowers_the_loss() -> None:
    model = build(registry.family("llama3").sizes["debug"])
    x = tokens(2, 17)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(4):
        loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert abs(losses[0] - math.log(2048)) < 1.0  # an untrained model is near uniform
    assert losses[-1] < losses[0] - 0.5


def test_parameters_come_in_the_order_of_the_forward_pass() -> None:
    modules = [name.rsplit(".", 1)[0] for name, _ in build(TINY).named_parameters()]
    owners = [next(m for m in TINY.modules() if f"{name}.".startswith(f"{m}.")) for name in modules]
    assert list(dict.fromkeys(owners)) == list(TINY.modules())
