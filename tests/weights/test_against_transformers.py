"""Each family against transformers, which makes tiny random models, saves them, and loads what is exported."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.layers.sequences import Sequences
from models.registry import family
from tests.weights.test_conversion import same, tensors_of
from trainer.checkpoint.storage import CheckpointReader
from trainer.checkpoint.weights import find_trained_model
from trainer.weights.exporting import plan_export, write_folder
from trainer.weights.hugging_face import HuggingFaceModel, open_model
from trainer.weights.importing import from_hugging_face, write_run_folder
from trainer.weights.naming import name_of

pytestmark = pytest.mark.slow  # transformers alone takes seconds to import

_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
_QWEN3 = {**_LLAMA, "head_dim": 12}
_MOE = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
_DEEPSEEK = {
    **_LLAMA,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    "kv_lora_rank": 20,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 16}
_DEEPSEEK_YARN = {**_YARN, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0}

# Class of the configuration, and its arguments.
MODELS: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType(
    {
        "llama 2": ("LlamaConfig", {**_LLAMA, "num_key_value_heads": 4}),
        "llama 3.1": ("LlamaConfig", {**_LLAMA, "rope_parameters": _LLAMA3_ROPE}),
        "llama 3.2": (
            "LlamaConfig",
            {**_LLAMA, "rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": True},
        ),
        "qwen3": ("Qwen3Config", {**_QWEN3, "tie_word_embeddings": True}),
        "qwen3 with yarn": ("Qwen3Config", {**_QWEN3, "rope_parameters": _YARN}),
        "qwen3_moe": ("Qwen3MoeConfig", {**_QWEN3, **_MOE}),
        "deepseek_v3": ("DeepseekV3Config", {**_DEEPSEEK, "rope_parameters": _DEEPSEEK_YARN}),
        "moonlight": ("DeepseekV3Config", {**_DEEPSEEK, "q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    }
)


@dataclass(frozen=True)
class Pair:
    """A model of theirs, the folder that it was saved in, and the run folder that it was imported into."""

    theirs: Any
    folder: Path
    run: Path
    opened: HuggingFaceModel
    ours: nn.Module


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    transformers = importlib.import_module("transformers")
    kind, arguments = MODELS[request.param]
    folder, run = tmp_path_factory.mktemp("theirs"), tmp_path_factory.mktemp("ours") / "run"
    theirs = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**arguments)).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, tensor in theirs.state_dict().items():  # norms and biases too, and large enough to matter
            if not name.endswith("inv_freq"):
                tensor.normal_(1.0 if tensor.ndim == 1 else 0.0, 0.15, generator=generator)
    theirs.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    opened = open_model(folder)
    write_run_folder(from_hugging_face(opened), run)
    ours = family(name_of(opened.sizes).name).build(opened.sizes).eval()
    CheckpointReader(find_trained_model(run).step_folder).read_into("model", ours.state_dict())
    return Pair(theirs, folder, run, opened, ours)


def tokens(rows: int, length: int) -> Tensor:
    return torch.randint(61, (rows, length), generator=torch.Generator().manual_seed(length))


@torch.no_grad()
def test_logits_agree_at_every_position_whatever_the_batch(pair: Pair) -> None:
    """Case C3: the order of rotated features is taken into account."""
    for shape in ((1, 1), (3, 40), (2, 64)):
        x = tokens(*shape)
        expected = pair.theirs(x).logits
        assert expected.std() > 0.3  # so that 1e-4 says something
        torch.testing.assert_close(pair.ours(x), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_logits_of_packed_documents_are_those_of_each_document_alone(pair: Pair) -> None:
    x, lengths = tokens(1, 40), (13, 1, 26)
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).unsqueeze(0)
    positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    alone = torch.cat([pair.theirs(part).logits for part in x.split(lengths, dim=1)], dim=1)
    for numbered in (positions, torch.arange(40)):  # only distances within a document matter
        packed = pair.ours(x, Sequences(numbered, documents))
        torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_what_is_exported_is_bit_for_bit_theirs_and_loads_without_conversion(
    pair: Pair, tmp_path: Path
) -> None:
    transformers = importlib.import_module("transformers")
    write_folder(plan_export(find_trained_model(pair.run), None), tmp_path / "again", 20_000)
    assert same(tensors_of(tmp_path / "again"), tensors_of(pair.folder))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    assert type(again) is type(pair.theirs)
    assert torch.equal(again(tokens(2, 40)).logits, pair.theirs(tokens(2, 40)).logits)


@torch.no_grad()
def test_a_folder_that_was_not_imported_gives_the_same_model(pair: Pair) -> None:
    model = family(name_of(pair.opened.sizes).name).build(pair.opened.sizes)
    pair.opened.reader.read_into("model", model.state_dict())
    for name, tensor in pair.ours.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
