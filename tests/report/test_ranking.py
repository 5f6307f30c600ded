"""Several runs are ranked by their losses, with the settings in which they differ."""

from __future__ import annotations

from pathlib import Path

from tests.report.folders import TakenApart, make_page, row, write_run
from trainer.commands.report import run as report


def test_the_best_run_is_first_with_the_settings_that_differ(tmp_path: Path) -> None:
    for name, rate, loss in (("a", "0.1", 4.0), ("b", "0.2", 2.0), ("c", "0.3", 3.0)):
        write_run(tmp_path / name, options=["--optimizer.lr", rate], rows=[row(1, loss=loss)])
    text = TakenApart(make_page(*(tmp_path / name for name in "abc"))).section("summary")
    ranked = text[text.index("Best first, by last loss") :]
    assert "optimizer.lr" in ranked
    assert ranked.index("0.2") < ranked.index("0.3") < ranked.index("0.1")


def test_a_validation_loss_goes_before_the_training_loss(tmp_path: Path) -> None:
    for name, loss, validation in (("a", 1.0, 9.125), ("b", 5.0, 2.125)):
        write_run(tmp_path / name, rows=[row(1, loss=loss), {"step": 1, "validation_loss": validation}])
    text = TakenApart(make_page(tmp_path / "a", tmp_path / "b")).section("summary")
    ranked = text[text.index("Best first, by validation loss") :]
    assert ranked.index("2.125") < ranked.index("9.125")


def test_the_folder_of_a_study_stands_for_its_runs(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / "study" / name)
    assert report([str(tmp_path / "study"), "--output", str(tmp_path / "page.html")]) == 0
    assert "2 runs compared" in (tmp_path / "page.html").read_text(encoding="utf-8")
