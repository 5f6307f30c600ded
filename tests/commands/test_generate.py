"""`stageline generate`: finds the checkpoint that a path means, and says why there is none."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
import torch

from models import registry
from models.initialize import initialize_parameters
from models.llama.model import Transformer
from trainer.checkpoint.manifest import Contents, Manifest, write_manifest
from trainer.checkpoint.storage import write_tensors
from trainer.checkpoint.weights import find_trained_model
from trainer.commands.generate import run
from trainer.data.tokenizer import train_sentencepiece
from trainer.errors import ConfigurationError, ExitCode
from trainer.inference import find_model

CONFIG = """
[model]
tokenizer_path = "byte"
norm_type = "layernorm"
[model.override]
vocab_size = 258
n_layers = 2
dim = 32
ffn_hidden = 48
[training]
seq_len = 64
[checkpoint]
folder = "saved"
"""
SIZES = registry.configured_sizes(
    "llama3", "debug", "layernorm", {"vocab_size": 258, "n_layers": 2, "dim": 32, "ffn_hidden": 48}
)


def save(root: Path, step: int) -> Transformer:
    """A checkpoint of one rank, its parameters those of seed `step`."""
    model = Transformer(SIZES)
    initialize_parameters(model, step)
    folder = root / f"step-{step}"
    folder.mkdir(parents=True)
    files = write_tensors(folder, {"model": model.state_dict()}, None)
    write_manifest(folder, Manifest(step, Contents.FULL, "1", 1, files))
    return model


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "config.toml").write_text(CONFIG)
    for step in (2, 10):
        save(folder / "saved", step)
    return folder


@pytest.fixture
def run_folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def weights(path: Path) -> dict[str, torch.Tensor]:
    return find_model(path).load().model.state_dict()


@pytest.mark.parametrize(
    ("inside", "step"), [("", 10), ("saved", 10), ("saved/step-2", 2), ("saved/step-10", 10)]
)
def test_the_weights_are_those_of_the_checkpoint_that_the_path_means(
    run_folder: Path, inside: str, step: int
) -> None:
    expected = Transformer(SIZES)
    initialize_parameters(expected, step)
    loaded = weights(run_folder / inside)
    assert loaded.keys() == expected.state_dict().keys()
    assert all(torch.equal(loaded[name], value) for name, value in expected.state_dict().items())


def test_a_path_relative_to_the_working_folder_is_understood(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run_folder / "saved" / "step-2")
    assert find_trained_model(Path()).step == 2


def test_a_damaged_checkpoint_is_passed_over_and_named(run_folder: Path) -> None:
    file = next((run_folder / "saved" / "step-10").glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    found = find_trained_model(run_folder)
    assert found.step == 2
    assert "step-10 is not valid" in found.passed_over[0]
    assert "checksum" in found.passed_over[0]
    with pytest.raises(ConfigurationError, match=r"step-10 is not a valid checkpoint: .*checksum"):
        find_trained_model(run_folder / "saved" / "step-10")


def test_the_text_goes_to_standard_output_and_the_same_seed_gives_the_same(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--checkpoint", str(run_folder), "--prompt", "def ", "--max-new-tokens", "8"]
    texts = []
    for _ in range(2):
        assert run([*arguments, "--seed", "3", "--top-k", "50", "--top-p", "0.95"]) == ExitCode.DONE
        output = capsys.readouterr()
        texts.append(output.out)
        assert "after 10 steps" in output.err
        assert "tokens/s" in output.err
    assert texts[0] == texts[1]
    assert texts[0].startswith("def ")
    assert len(texts[0]) > len("def \n")


def test_several_prompts_come_in_their_order_each_as_it_would_alone(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def written(*arguments: str) -> str:
        always = ["--checkpoint", str(run_folder), "--max-new-tokens", "6", "--temperature", "0.9"]
        assert run([*always, *arguments]) == ExitCode.DONE
        return capsys.readouterr().out

    prompts = ["def main(", "x", "a long prompt of its own"]
    alone = [written("--prompt", prompt, "--seed", str(seed)) for seed, prompt in enumerate(prompts)]
    expected = "".join(f"--- {i} of 3\n{text}" for i, text in enumerate(alone, 1))
    file = tmp_path / "prompts"
    file.write_text("\n".join(prompts[1:]) + "\n")
    assert written("--prompt", prompts[0], "--prompts", str(file)) == expected
    assert written("--prompt", prompts[0], "--prompts", str(file), "--batch-size", "2") == expected
    monkeypatch.setattr("sys.stdin", io.StringIO(file.read_text()))
    lines = [
        json.loads(line) for line in written("--prompt", prompts[0], "--prompts", "-", "--json").splitlines()
    ]
    assert [line["prompt"] for line in lines] == prompts
    assert [line["prompt"] + line["text"] + "\n" for line in lines] == alone
    monkeypatch.setattr("sys.stdin", io.StringIO(prompts[0]))
    assert written("--prompt", "-") == alone[0]


def test_prompts_that_cannot_be_read_are_an_error_in_one_line(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["--checkpoint", str(run_folder), "--prompts", "/nonexistent"]) == ExitCode.WRONG_CONFIGURATION
    assert "--prompts /nonexistent: cannot be read" in capsys.readouterr().err


def test_a_stop_token_of_ones_own_ends_the_text(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--checkpoint",
        str(run_folder),
        "--prompt",
        "x",
        "--temperature",
        "0",
        "--max-new-tokens",
        "9",
    ]
    assert run(arguments) == ExitCode.DONE
    first = capsys.readouterr().out.encode()[1]
    assert run([*arguments, "--stop-token", str(first)]) == ExitCode.DONE
    said = capsys.readouterr()
    assert said.out == "x\n"
    assert "0 tokens" in said.err


def test_parameters_are_in_the_number_format_that_is_asked_for(run_folder: Path) -> None:
    exact = find_model(run_folder).load("float32").model.state_dict()
    for name, value in find_model(run_folder).load("bfloat16").model.state_dict().items():
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, exact[name].bfloat16())


def test_no_prompt_is_needed_and_more_tokens_than_trained_with_are_remarked_on(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["--checkpoint", str(run_folder), "--max-new-tokens", "70", "--temperature", "0"]) == 0
    assert "beyond 64 tokens" in capsys.readouterr().err


def test_the_tokenizer_that_the_run_trained_for_itself_is_found(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_folder / "config.toml").write_text(CONFIG.replace('tokenizer_path = "byte"', ""))
    assert run(["--checkpoint", str(run_folder)]) == ExitCode.WRONG_CONFIGURATION
    assert f"tokenizer {run_folder.resolve()}" in capsys.readouterr().err
    train_sentencepiece(["for each word in the text " * 40], 300, run_folder / "tokenizer", exact_size=False)
    assert run(["--checkpoint", str(run_folder), "--max-new-tokens", "5"]) == ExitCode.DONE


def test_no_checkpoint_ends_with_exit_code_2_and_the_path(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(path: Path) -> str:
        assert run(["--checkpoint", str(path)]) == ExitCode.WRONG_CONFIGURATION
        return capsys.readouterr().err

    assert "nowhere: no such folder" in refused(run_folder / "nowhere")
    outside = run_folder.parent / "outside"
    outside.mkdir()
    assert "outside: neither a run folder nor inside one" in refused(outside)
    (run_folder / "saved" / "step-10" / "manifest.json").unlink()
    assert "step-10 is not a valid checkpoint: no manifest" in refused(run_folder / "saved" / "step-10")
    shutil.rmtree(run_folder / "saved")
    assert "saved holds no valid checkpoint" in refused(run_folder)


@pytest.mark.parametrize(
    "wrong",
    ["--max-new-tokens=0", "--temperature=-1", "--temperature=x", "--top-k=0", "--top-p=1.5", "--seed=x"],
)
def test_impossible_arguments_end_with_exit_code_2(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(["--checkpoint", "anywhere", wrong])
    assert caught.value.code == ExitCode.WRONG_CONFIGURATION
    assert wrong.split("=")[0] in capsys.readouterr().err
