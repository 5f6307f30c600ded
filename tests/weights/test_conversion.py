"""Import and export of every family: bit for bit, whole or not there, and gone on with after an interruption."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.weights.made import SIZES, hugging_face_folder, their_tensors
from trainer.checkpoint.storage import CheckpointReader
from trainer.checkpoint.weights import find_trained_model
from trainer.commands.main import main
from trainer.config.load import load
from trainer.errors import ConfigurationError
from trainer.weights.exporting import Export, plan_export, write_folder
from trainer.weights.hugging_face import open_model
from trainer.weights.importing import Import, from_hugging_face, write_run_folder

SMALL = 20_000  # bytes of a file, so that even these models have several


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {n: t for path in sorted(folder.glob("*.safetensors")) for n, t in load_file(path).items()}


def imported_from(folder: Path) -> Import:
    return from_hugging_face(open_model(folder))


def export_of(run: Path, dtype: torch.dtype | None = None) -> Export:
    return plan_export(find_trained_model(run), dtype)


def weights_in(run: Path) -> dict[str, Tensor]:
    """The tensors of a run's checkpoint, in their own number formats."""
    reader = CheckpointReader(find_trained_model(run).step_folder)
    return {name: reader.read("model", name) for name in reader.names("model")}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Names, number formats and every bit."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, torch.float32) for family in SIZES),
        ("deepseek_v3", torch.bfloat16),
        ("llama tied", torch.float16),
    ],
)
def test_what_is_exported_is_bit_for_bit_what_was_imported(
    tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    """Case C3: and the weights in between are those of the model."""
    model = hugging_face_folder(tmp_path / "theirs", SIZES[family], dtype, files=3)
    write_run_folder(imported_from(tmp_path / "theirs"), tmp_path / "run", file_bytes=SMALL)
    loaded = weights_in(tmp_path / "run")
    expected = model.state_dict()
    assert loaded.keys() == expected.keys()
    for name in expected:
        exact = name.endswith("expert_bias") or dtype == torch.float32
        assert torch.equal(loaded[name], expected[name] if exact else expected[name].to(dtype))
    write_folder(export_of(tmp_path / "run"), tmp_path / "again", SMALL)
    assert same(tensors_of(tmp_path / "again"), tensors_of(tmp_path / "theirs"))
    index = json.loads((tmp_path / "again" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors_of(tmp_path / "theirs").keys()
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config.pop("torch_dtype") == str(dtype).removeprefix("torch.")
    assert config == json.loads((tmp_path / "theirs" / "config.json").read_text())


def test_an_export_in_another_number_format_converts_all_but_what_stays_in_fp32(tmp_path: Path) -> None:
    sizes = SIZES["deepseek_v3"]
    model = hugging_face_folder(tmp_path / "theirs", sizes)
    write_run_folder(imported_from(tmp_path / "theirs"), tmp_path / "run")
    write_folder(export_of(tmp_path / "run", torch.bfloat16), tmp_path / "out")
    assert same(tensors_of(tmp_path / "out"), their_tensors(sizes, model, torch.bfloat16))


def test_the_imported_folder_is_a_run_folder_of_the_same_model(tmp_path: Path) -> None:
    theirs, run = tmp_path / "theirs", tmp_path / "run"
    hugging_face_folder(theirs, SIZES["qwen3"])
    (theirs / "tokenizer.json").write_text("{}")
    (theirs / "generation_config.json").write_text("{}")
    write_run_folder(imported_from(theirs), run)
    trained = find_trained_model(run)
    assert (trained.step, str(trained.step_folder)) == (0, str(run / "checkpoint" / "step-0"))
    assert load(["--config", str(run / "config.toml")]).config.model.name == "qwen3"
    assert (run / "tokenizer" / "tokenizer.json").is_file()
    assert (run / "generation_config.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "theirs"]


class Interrupted(Exception):
    """Stands for whatever ends a process."""


def after(size: int, action: Callable[[], None]) -> Callable[[int], None]:
    """A progress that acts when more than `size` bytes have been written."""
    written = 0

    def progress(count: int) -> None:
        nonlocal written
        written += count
        if written > size:
            action()

    return progress


def interrupt() -> None:
    raise Interrupted


Convert = Callable[[Path, Path, Callable[[int], None]], None]


def convert_in(source: Path, target: Path, progress: Callable[[int], None]) -> None:
    write_run_folder(imported_from(source), target, progress, file_bytes=SMALL)


def convert_out(source: Path, target: Path, progress: Callable[[int], None]) -> None:
    write_folder(export_of(source), target, SMALL, progress)


@pytest.fixture(params=["import", "export"])
def conversion(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Convert, Path]:
    """A conversion and what it converts."""
    hugging_face_folder(tmp_path / "theirs", SIZES["llama"])
    if request.param == "import":
        return convert_in, tmp_path / "theirs"
    write_run_folder(imported_from(tmp_path / "theirs"), tmp_path / "run", file_bytes=SMALL)
    return convert_out, tmp_path / "run"


def written_files(folder: Path) -> dict[Path, tuple[int, bytes]]:
    """Files of weights: their inode, which a file that is written anew changes, and their content."""
    files = [*folder.rglob("*.safetensors"), *folder.rglob("*.distcp")]
    return {path.relative_to(folder): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_an_interrupted_conversion_goes_on_and_keeps_what_was_finished(
    conversion: tuple[Convert, Path], tmp_path: Path
) -> None:
    convert, source = conversion
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    convert(source, tmp_path / "straight", lambda size: None)
    with pytest.raises(Interrupted):
        convert(source, out, after(70_000, interrupt))
    assert not out.exists()
    before = written_files(partial)
    assert len(before) >= 3
    convert(source, out, lambda size: None)
    resumed, straight = written_files(out), written_files(tmp_path / "straight")
    assert {path: content for path, (_, content) in resumed.items()} == {
        path: content for path, (_, content) in straight.items()
    }
    kept = [path for path in before if before[path] == resumed[path]]
    assert len(kept) == len(before) - 1  # all but the one that was being written
    assert not partial.exists()


def test_a_finished_file_that_was_damaged_meanwhile_is_written_again(
    conversion: tuple[Convert, Path], tmp_path: Path
) -> None:
    convert, source = conversion
    convert(source, tmp_path / "straight", lambda size: None)
    with pytest.raises(Interrupted):
        convert(source, tmp_path / "out", after(70_000, interrupt))
    first = tmp_path / "out.partial" / min(written_files(tmp_path / "out.partial"))
    content = bytearray(first.read_bytes())
    content[-1] ^= 1
    first.write_bytes(content)
    convert(source, tmp_path / "out", lambda size: None)
    resumed, straight = written_files(tmp_path / "out"), written_files(tmp_path / "straight")
    assert all(resumed[path][1] == straight[path][1] for path in straight)


def test_what_was_begun_from_another_source_is_not_gone_on_with(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    hugging_face_folder(theirs, SIZES["llama"])
    with pytest.raises(Interrupted):
        convert_in(theirs, tmp_path / "out", after(70_000, interrupt))
    model = hugging_face_folder(theirs, SIZES["llama"], seed=1)
    convert_in(theirs, tmp_path / "out", lambda size: None)
    loaded = weights_in(tmp_path / "out")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())


def test_an_import_that_is_killed_leaves_no_folder_and_goes_on(tmp_path: Path) -> None:
    model = hugging_face_folder(tmp_path / "theirs", SIZES["llama"])

    def killed() -> None:
        convert_in(
            tmp_path / "theirs", tmp_path / "out", after(70_000, lambda: os.kill(os.getpid(), signal.SIGKILL))
        )

    process = multiprocessing.get_context("fork").Process(target=killed)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    assert main(["import-hf", str(tmp_path / "theirs"), str(tmp_path / "out")]) == 0
    loaded = weights_in(tmp_path / "out")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())


def test_what_is_there_already_is_not_touched(conversion: tuple[Convert, Path], tmp_path: Path) -> None:
    convert, source = conversion
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    with pytest.raises(ConfigurationError, match="exists already"):
        convert(source, tmp_path / "out", lambda size: None)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    hugging_face_folder(tmp_path / "theirs", SIZES["llama"])
    write_run_folder(imported_from(tmp_path / "theirs"), tmp_path / "run")
    file = tmp_path / "run" / "checkpoint" / "step-0" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(ConfigurationError, match="checksum differs"):
        export_of(tmp_path / "run")


def run_command(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_commands_convert_there_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs, run, out = tmp_path / "theirs", tmp_path / "run", tmp_path / "out"
    hugging_face_folder(theirs, SIZES["llama"])
    code, said, _ = run_command(capsys, "import-hf", theirs, run)
    assert code == 0
    assert f"{run}: llama" in said
    assert "dim = 32" in said
    code, said, _ = run_command(capsys, "export-hf", run, out, "--shard-size", "20KB", "--dtype", "bfloat16")
    assert code == 0
    assert str(run / "checkpoint" / "step-0") in said
    assert {tensor.dtype for tensor in tensors_of(out).values()} == {torch.bfloat16}
    assert all(path.stat().st_size < 30_000 for path in out.glob("*.safetensors"))


def test_the_commands_say_in_one_line_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("import-hf", "import-meta", "export-hf"):
        code, _, error = run_command(capsys, command, tmp_path / "nowhere", tmp_path / "out")
        assert code == 2
        assert error.startswith((f"stageline {command}: ", str(tmp_path)))
        assert error.count("\n") == 1
