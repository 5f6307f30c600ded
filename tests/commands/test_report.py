"""`stageline report`: where the page goes, what is said, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.config.reports import run_python
from tests.report.folders import assert_harmless, write_run
from trainer.commands.main import main
from trainer.commands.report import run
from trainer.errors import ConfigurationError


def test_the_page_of_one_run_goes_into_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", timelines=[3])
    assert run([str(folder)]) == 0
    assert capsys.readouterr().out == f"wrote {folder / 'report.html'}\n"
    assert_harmless((folder / "report.html").read_text(encoding="utf-8"))
    assert not list(folder.glob(".report*"))


def test_the_page_of_several_runs_goes_into_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folders = [str(write_run(Path(name))) for name in ("a", "b")]
    assert run(folders) == 0
    assert capsys.readouterr().out == "wrote report.html\n"
    assert "2 runs compared" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_output_names_the_page_and_an_earlier_one_is_replaced(tmp_path: Path) -> None:
    folder, page = write_run(tmp_path / "run"), tmp_path / "page.html"
    page.write_text("the former one")
    assert run([str(folder), "--output", str(page)]) == 0
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert not (folder / "report.html").exists()


def test_what_could_not_be_read_is_said_and_the_page_is_written_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "plan.json").unlink()
    assert run([str(folder)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "run: plan.json is missing"


def test_a_folder_that_is_no_run_is_refused_in_one_line_with_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path)]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error == (
        f"{tmp_path} is not the folder of a run: it has neither config.toml, plan.json nor metrics.jsonl\n"
    )
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err == f"there is no folder {tmp_path / 'nowhere'}\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("output", ["taken", "nowhere/page.html"])
def test_a_page_that_cannot_be_written_is_refused_in_one_line(tmp_path: Path, output: str) -> None:
    folder = write_run(tmp_path / "run")
    (tmp_path / "taken").mkdir()
    with pytest.raises(ConfigurationError, match=r"^.*cannot be written: .*$"):
        run([str(folder), "--output", str(tmp_path / output)])
    assert not list(tmp_path.glob(".*"))


def test_without_a_folder_the_command_line_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"RUN_FOLDER \(see stageline report --help\)"):
        run([])


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(["--help"])
    assert ended.value.code == 0
    assert (
        "stageline report outputs/debug outputs/pipeline --output comparison.html" in capsys.readouterr().out
    )


def test_a_name_that_can_be_no_text_is_no_obstacle(tmp_path: Path, capsysbinary: object) -> None:
    if sys.platform != "linux":
        pytest.skip("other systems do not allow such names")
    folder = write_run(tmp_path / "run-\udcff")
    assert run([str(folder), "--output", str(tmp_path / "page.html")]) == 0
    assert "run-\N{REPLACEMENT CHARACTER}" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_report_needs_no_torch(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", timelines=[3])
    code = (
        f"import sys; from trainer.commands.main import main; main(['report', {str(folder)!r}]);"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'matplotlib', 'rich')))"
    )
    assert run_python("-c", code).returncode == 0
