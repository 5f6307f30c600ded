"""`stageline evaluate`: the loss of a file, and lm-eval's tasks with the results of lm-eval's own backend."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import pytest

from models import registry
from models.initialize import initialize_parameters
from models.llama.model import Transformer
from trainer.checkpoint.manifest import Contents, Manifest, write_manifest
from trainer.checkpoint.storage import write_tensors
from trainer.commands import export_hf
from trainer.commands.evaluate import run
from trainer.errors import ExitCode

OVERRIDE = {"vocab_size": 258, "n_layers": 2, "dim": 32, "ffn_hidden": 48, "n_heads": 4, "max_seq_len": 256}
CONFIG = f"""
[model]
tokenizer_path = "byte"
[model.override]
{chr(10).join(f"{key} = {value}" for key, value in OVERRIDE.items())}
[training]
seq_len = 128
[data]
add_bos = false
"""


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "config.toml").write_text(CONFIG)
    model = Transformer(registry.configured_sizes("llama3", "debug", "rmsnorm", OVERRIDE))
    initialize_parameters(model, 1)
    step = folder / "checkpoint" / "step-3"
    step.mkdir(parents=True)
    files = write_tensors(step, {"model": model.state_dict()}, None)
    write_manifest(step, Manifest(3, Contents.FULL, "1", 1, files))
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("".join(f"Line {i}, {i * i}.\n" for i in range(60)))
    return file


def test_the_loss_of_a_file_is_printed_in_three_units(
    run_folder: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([str(run_folder), "--file", str(text), "--stride", "64"]) == ExitCode.DONE
    said = capsys.readouterr()
    assert "llama3 debug after 3 steps" in said.err
    printed = dict(line.split(maxsplit=1) for line in said.out.splitlines())
    assert printed["windows"] == "of 128 tokens, 64 from one to the next"
    assert run([str(run_folder), "--file", str(text), "--stride", "64", "--json"]) == ExitCode.DONE
    found = json.loads(capsys.readouterr().out)["file"]
    assert found["bytes"] == found["tokens"] == text.stat().st_size
    assert printed["loss"] == f"{found['loss']:.4f} nats per token"
    assert printed["perplexity"] == f"{found['perplexity']:.4g}"
    assert printed["bits"] == f"per byte  {found['bits_per_byte']:.4f}"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--file", "/nonexistent"], "--file /nonexistent: cannot be read"),
        (["--file", "/dev/null"], "--file /dev/null: is empty"),
        (["--file", __file__, "--stride", "500"], "--stride 500: beyond the window, of 128 tokens"),
        (["--file", __file__, "--window", "5", "--stride", "6"], "allowed: 1 to 5"),
    ],
)
def test_what_cannot_be_evaluated_is_an_error_in_one_line(
    run_folder: Path, arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([str(run_folder), *arguments]) == ExitCode.WRONG_CONFIGURATION
    assert reason in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "arguments", [[], ["--tasks", "a", "--stride", "3"], ["--tasks", "a,,b"], ["--window", "0"]]
)
def test_impossible_arguments_end_with_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        run(["anywhere", *arguments])
    assert caught.value.code == ExitCode.WRONG_CONFIGURATION


def test_without_lm_eval_tasks_are_refused_with_how_to_install_it(
    run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run([str(run_folder), "--tasks", "arc_easy"]) == ExitCode.WRONG_CONFIGURATION
    assert "--tasks needs the package lm-eval: pip install 'stageline[eval]'" in capsys.readouterr().err


CHOICE = """
task: tiny_choice
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
ROLLING = """
task: tiny_rolling
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{passage}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
"""
ANSWER = """
task: tiny_answer
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{reply}}"
generation_kwargs: {until: ["e", "\\n"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
"""
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def write_tasks(folder: Path, replies: list[str] | None = None) -> None:
    """Three tasks on thirty questions. `replies`: the right answers of the third."""
    choose = random.Random(0)

    def some(most: int) -> str:
        return " ".join(choose.choices(WORDS, k=choose.randint(1, most)))

    rows = [
        {
            "question": f"Question {i}: {some(12)}",
            "choices": [f" {some(3)}" for _ in range(3)],
            "answer": choose.randrange(3),
            "passage": some(90),
            "reply": replies[i] if replies else "",
        }
        for i in range(30)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}}}\ntest_split: test\n"
    for name, task in (("choice", CHOICE), ("rolling", ROLLING), ("answer", ANSWER)):
        (folder / f"{name}.yaml").write_text(data + task)


@pytest.mark.slow
def test_tasks_have_the_results_of_lm_evals_own_backend_on_the_exported_model(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    pytest.importorskip("accelerate")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    exported = tmp_path / "exported"
    assert export_hf.run([str(run_folder), str(exported)]) == ExitCode.DONE
    write_tasks(tmp_path)

    def theirs() -> Any:
        return simple_evaluate(
            "hf",
            {"pretrained": str(exported), "dtype": "float32", "max_length": 128, "device": "cpu"},
            tasks=["tiny_choice", "tiny_rolling", "tiny_answer"],
            task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
            bootstrap_iters=0,
            batch_size=4,
        )

    first = theirs()
    answers = [sample["resps"][0][0] for sample in first["samples"]["tiny_answer"]]
    assert len(set(answers)) > 3
    # Half of the answers are right now, so that the match says something.
    write_tasks(tmp_path, [a if i % 2 else "wrong" for i, a in enumerate(answers)])
    expected = theirs()["results"]
    assert expected["tiny_answer"]["exact_match,none"] == 0.5
    capsys.readouterr()
    arguments = ["--tasks", "tiny_*", "--task-path", str(tmp_path), "--window", "128", "--json"]
    for checkpoint in (run_folder, exported):
        assert run([str(checkpoint), *arguments, "--dtype", "float32"]) == ExitCode.DONE
        found = json.loads(capsys.readouterr().out.splitlines()[-1])["tasks"]
        for task, figures in expected.items():
            for name, value in figures.items():
                if isinstance(value, float) and "stderr" not in name:
                    assert found[task][name] == pytest.approx(value, rel=1e-4), (task, name)
    assert run([str(run_folder), "--tasks", "tiny_choices", "--task-path", str(tmp_path)]) == 2
    assert "did you mean tiny_choice?" in capsys.readouterr().err
