"""The program `stageline`, and `stageline check`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.reports import run_python
from trainer.commands import check
from trainer.commands.main import COMMANDS, main
from trainer.errors import StagelineError, TrainingFailed


def test_help_lists_every_command_with_its_first_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in COMMANDS:
        line = next(line for line in text.splitlines() if line.startswith(f"  {name} "))
        assert line.removeprefix(f"  {name}").strip().endswith(".")
    assert "Example: stageline plan" in text


def test_without_a_command_the_overview_is_shown_and_the_exit_code_is_2() -> None:
    assert main([]) == 2


def test_an_unknown_command_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chekc"]) == 2
    assert "there is no command 'chekc'" in (error := capsys.readouterr().err)
    assert error.endswith("did you mean check?\n")


def test_the_overview_imports_no_command() -> None:
    code = (
        "import sys; from trainer.commands.main import main; main(['--help']);"
        "sys.exit(any(name in sys.modules for name in ('torch', 'trainer.commands.plan', 'pydantic_settings')))"
    )
    assert run_python("-c", code).returncode == 0


@pytest.mark.parametrize(
    ("raised", "code", "says"),
    [
        (StagelineError("why it ended"), 1, "why it ended\n"),
        (TrainingFailed("loss is nan"), 5, "loss is nan\n"),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 0, ""),
    ],
)
def test_errors_become_one_line_and_their_exit_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    raised: BaseException,
    code: int,
    says: str,
) -> None:
    def fail(argv: list[str]) -> int:
        raise raised

    monkeypatch.setattr(check, "run", fail)
    monkeypatch.setattr("sys.stdout", None) if isinstance(raised, BrokenPipeError) else None
    assert main(["check", "debug.toml"]) == code
    assert capsys.readouterr().err == says


def test_check_says_ok_for_every_file_that_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "debug.toml", "llama_8b.toml"]) == 0
    assert capsys.readouterr().out == "debug.toml: ok\nllama_8b.toml: ok\n"


def test_check_reports_every_file_that_is_wrong_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "wrong.toml"
    wrong.write_text('[training]\nstep = 3\n[model]\ntokenizer_path = "nowhere"\n', encoding="utf-8")
    missing = tmp_path / "missing.toml"
    missing.write_text('[model]\ntokenizer_path = "nowhere"\n', encoding="utf-8")
    assert main(["check", str(wrong), str(missing), "debug.toml"]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{wrong}:2: training.step = 3: unknown key; did you mean training.steps?"
    assert lines[1].startswith(f'{missing}:2: model.tokenizer_path = "nowhere": there is no such file')
    assert lines[2] == "debug.toml: ok"


def test_check_knows_the_number_of_processes_if_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--world-size", "512", "llama_405b.toml"]) == 0
    assert main(["check", "--world-size", "100", "llama_405b.toml"]) == 2
    assert "does not divide 100 processes" in capsys.readouterr().out
