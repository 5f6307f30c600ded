"""Training that starts from given weights: in every layout the same run, whose first parameters are those weights."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from tests.distributed.program import pipeline, rows, run, tiny, values
from tests.distributed.training_run import assert_same_run, merged, train
from tests.weights.made import SIZES, hugging_face_folder
from tests.weights.test_conversion import tensors_of, weights_in
from trainer.weights.hugging_face import open_model
from trainer.weights.importing import from_hugging_face, write_run_folder
from trainer.weights.naming import name_of


@cache
def folder_of(kind: str) -> Path:
    """A Hugging Face folder in several files, and beside it `run`, into which it was imported."""
    folder = Path(mkdtemp())
    hugging_face_folder(folder / "theirs", SIZES[kind], files=3)
    write_run_folder(from_hugging_face(open_model(folder / "theirs")), folder / "run", file_bytes=20_000)
    return folder


def tables(kind: str, start: str = "theirs", **degrees: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The configuration of a training of the model that starts from one of the two folders."""
    named = name_of(SIZES[kind])
    model = {"name": named.name, "flavor": named.flavor, "override": dict(named.override)}
    checkpoint = {"initial_load_path": str(folder_of(kind) / start)}
    return {"model": model, "checkpoint": checkpoint, **degrees}


@cache
def one_process(kind: str) -> list[dict[str, Any]]:
    return train(Path(mkdtemp()), 1, tables(kind))


PIPELINE = {"experimental": {"pipeline_parallel_degree": 2}}
SHARDED = {"training": {"batch_size": 4, "data_parallel_shard_degree": 2}}
REPLICATED = {
    "training": {"batch_size": 2, "data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2}
}
TENSOR = {"training": {"batch_size": 4, "data_parallel_shard_degree": 2, "tensor_parallel_degree": 2}}
EXPERT = {**SHARDED, "experimental": {"expert_parallel_degree": 2}}

CASES = [
    ("llama", "theirs", {**PIPELINE, **SHARDED}, 4),
    pytest.param("llama", "run", {**PIPELINE, **SHARDED}, 4, marks=pytest.mark.slow),
    pytest.param("llama", "theirs", REPLICATED, 4, marks=pytest.mark.slow),
    pytest.param("llama", "theirs", TENSOR, 4, marks=pytest.mark.slow),
    pytest.param("llama tied", "theirs", PIPELINE, 2, marks=pytest.mark.slow),
    pytest.param("deepseek_v3", "theirs", EXPERT, 2, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "start", "degrees", "ranks"), CASES)
def test_training_from_a_folder_is_the_same_run_in_every_layout(
    tmp_path: Path, kind: str, start: str, degrees: dict[str, Any], ranks: int
) -> None:
    many = train(tmp_path, ranks, tables(kind, start, **degrees))
    assert_same_run(one_process(kind), many)
    given = weights_in(folder_of(kind) / "run")
    for name, tensor in merged(many, "initial").items():
        assert torch.equal(torch.as_tensor(tensor), given[name]), name


def arguments(*more: str) -> str:
    """Arguments that make the program's tiny model the one whose weights are given."""
    scaling = asdict(SIZES["llama"].rope_scaling)
    table = ",".join(f"{key}={value}" for key, value in scaling.items())
    path = folder_of("llama") / "theirs"
    sizes = f"--model.override.n_layers 2 --model.override.rope_scaling {{{table}}} --model.override.max_seq_len 64"
    return " ".join((sizes, f"--checkpoint.initial_load_path {path}", *more))


@pytest.mark.slow
def test_the_run_itself_is_gone_on_with_before_it_starts_from_given_weights(tmp_path: Path) -> None:
    given = arguments("--checkpoint.enable_checkpoint")
    run(tiny(tmp_path / "straight", given, steps=4))
    run(tiny(tmp_path / "resumed", given, steps=2))
    said = run(tiny(tmp_path / "resumed", given, steps=4))
    assert "going on from" in said
    assert values(tmp_path / "resumed", "step") == [1, 2, 3, 4]
    first, straight = rows(tmp_path / "resumed")[0], rows(tmp_path / "straight")[0]
    assert first == straight
    run(tiny(tmp_path / "drawn", given.split(" --checkpoint.initial_load_path")[0], steps=1))
    assert rows(tmp_path / "drawn")[0]["loss"] != first["loss"]


@pytest.mark.slow
def test_a_pipeline_with_shards_exports_what_it_saved_and_a_run_can_start_from_that(tmp_path: Path) -> None:
    layout = f"--training.batch_size 2 --training.data_parallel_shard_degree 2 {pipeline(2)}"
    export = "--checkpoint.enable_checkpoint --checkpoint.last_save_in_hf"
    said = run(tiny(tmp_path, arguments(export, layout), steps=2), 4)
    exported = tmp_path / "huggingface" / "step-2"
    assert f"exported    {exported}" in said
    saved = weights_in(tmp_path)
    opened = open_model(exported)
    assert opened.source.forms.keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(opened.source.read(name, (0,) * tensor.ndim, tensor.shape), tensor)
    assert len(tensors_of(exported)) == len(saved)
    assert (exported / "tokenizer.json").is_file()
    # Nothing is learnt at a rate of 0, so the first loss of another run is that of the weights.
    again = f"--checkpoint.initial_load_path {exported} --checkpoint.initial_load_in_hf --optimizer.lr 1e-30"
    one, other = tmp_path / "one", tmp_path / "other"
    run(tiny(one, arguments(again), steps=1))
    run(
        tiny(
            other,
            arguments(
                again.replace(str(exported), f"{tmp_path}/checkpoint/step-2").replace(
                    " --checkpoint.initial_load_in_hf", ""
                )
            ),
            steps=1,
        )
    )
    assert values(one, "loss") == values(other, "loss")


@pytest.mark.slow
def test_a_whole_checkpoint_of_another_run_is_gone_on_with_or_only_its_weights(tmp_path: Path) -> None:
    first, second, third = tmp_path / "first", tmp_path / "second", tmp_path / "third"
    save = "--checkpoint.enable_checkpoint --checkpoint.interval 2"
    run(tiny(first, arguments(save), steps=4))
    start = f"--checkpoint.initial_load_path {first / 'checkpoint' / 'step-2'}"
    run(tiny(second, arguments(start, "--checkpoint.initial_load_model_only false"), steps=4))
    assert rows(second) == rows(first)[2:]
    run(tiny(third, arguments(start), steps=1))
    assert values(third, "step") == [1]
    assert values(third, "loss") != values(first, "loss")[:1]
