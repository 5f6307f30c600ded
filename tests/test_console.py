"""What is shown where: the live line on a terminal only, plain lines elsewhere, and all of it in the rank's log."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from trainer.console import Console, set_up_logging, shown_ranks
from trainer.errors import ConfigurationError


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _kind_of_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers, root.level = handlers, level
    logging.captureWarnings(False)


def train_three_steps(console: Console) -> None:
    console.start_progress(1, 4)
    for step in (2, 3, 4):
        console.advance(step, f"loss {1 / step:.3f}  1,000 tokens/s")
    console.say("step 4  [bold]loss[/bold] 0.25")
    console.stop_progress()
    console.say("done")


def test_without_a_terminal_lines_are_plain(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(silent=False, plain=False)
    train_three_steps(console)
    assert not console.live
    assert capsys.readouterr().out == "step 4  [bold]loss[/bold] 0.25\ndone\n"


def test_on_a_terminal_a_live_line_shows_steps_loss_speed_and_time_left() -> None:
    with redirect_stdout(Terminal()) as terminal:
        train_three_steps(Console(silent=False, plain=False))
    shown = terminal.getvalue()
    for part in ("4/4", "loss 0.250", "1,000 tokens/s", "left", "0:00:00"):
        assert part in shown
    assert "step 4  [bold]loss[/bold] 0.25\n" in shown
    assert shown.endswith("done\n")
    assert "\x1b[" in shown


def test_the_cursor_is_not_left_hidden_by_a_process_that_dies() -> None:
    with redirect_stdout(Terminal()) as terminal:
        console = Console(silent=False, plain=False)
        console.start_progress(0, 4)
        shown = terminal.getvalue()
        console.stop_progress()
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l")


def test_a_long_path_is_not_broken_over_lines_by_the_live_line() -> None:
    with redirect_stdout(Terminal()) as terminal:
        console = Console(silent=False, plain=False)
        console.start_progress(0, 4)
        console.say("x" * 300)
        console.stop_progress()
    assert "x" * 300 in terminal.getvalue()


def test_color_and_the_live_line_can_be_disabled() -> None:
    with redirect_stdout(Terminal()) as terminal:
        train_three_steps(Console(silent=False, plain=True))
    assert terminal.getvalue() == "step 4  [bold]loss[/bold] 0.25\ndone\n"


def test_a_silent_rank_shows_nothing() -> None:
    with redirect_stdout(Terminal()) as terminal:
        train_three_steps(Console(silent=True, plain=False))
    assert terminal.getvalue() == ""


def test_texts_of_the_banner_stand_below_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    Console(silent=False, plain=False).say_all([("model", "llama3 debug"), ("output", "outputs/debug")])
    assert capsys.readouterr().out == "model       llama3 debug\noutput      outputs/debug\n"


def log_of(folder: Path, rank: int) -> str:
    return (folder / "logs" / f"rank_{rank}.log").read_text()


def test_each_rank_has_its_own_log_with_its_lines_and_what_it_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    set_up_logging(tmp_path, 3)
    logging.getLogger("trainer.loop").info("resumed")
    Console(silent=False, plain=False).say("step 1  loss 8.3")
    lines = log_of(tmp_path, 3).splitlines()
    assert [line.split(" rank 3 ")[1] for line in lines] == ["INFO resumed", "INFO step 1  loss 8.3"]
    assert capsys.readouterr().err == ""  # rank 3 is not shown


def test_the_shown_rank_logs_to_standard_error_what_it_did_not_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    set_up_logging(tmp_path, 0)
    logging.getLogger("trainer.checkpoint.manager").info("checkpoint saved")
    Console(silent=False, plain=False).say("step 1  loss 8.3")
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1
    assert "rank 0 INFO checkpoint saved" in shown.err
    assert shown.out == "step 1  loss 8.3\n"


def test_of_other_libraries_only_warnings_are_logged(tmp_path: Path) -> None:
    set_up_logging(tmp_path, 0)
    logging.getLogger("datasets").info("a detail")
    logging.getLogger("datasets").warning("a problem")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("a warning of Python", stacklevel=1)
    text = log_of(tmp_path, 0)
    assert "a detail" not in text
    assert "WARNING a problem" in text
    assert "a warning of Python" in text


def test_a_logged_line_does_not_tear_the_live_line(tmp_path: Path) -> None:
    set_up_logging(tmp_path, 0)
    with redirect_stdout(Terminal()) as terminal:
        console = Console(silent=False, plain=False)
        console.start_progress(0, 4)
        logging.getLogger("trainer").warning("above the line")
        console.stop_progress()
    assert "WARNING above the line" in terminal.getvalue()  # through the live display, not beside it


@pytest.mark.parametrize(("text", "ranks"), [("0", {0}), ("0,1", {0, 1}), (" 2 , 5", {2, 5})])
def test_log_rank_names_the_ranks_that_are_shown(
    monkeypatch: pytest.MonkeyPatch, text: str, ranks: set[int]
) -> None:
    monkeypatch.setenv("LOG_RANK", text)
    assert shown_ranks() == ranks


def test_rank_0_is_shown_unless_others_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOG_RANK", raising=False)
    assert shown_ranks() == {0}


@pytest.mark.parametrize("text", ["", "all", "0;1", "-1", "0,"])
def test_a_log_rank_that_is_no_list_of_ranks_is_an_error(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("LOG_RANK", text)
    with pytest.raises(ConfigurationError, match="expected ranks separated by commas"):
        shown_ranks()
