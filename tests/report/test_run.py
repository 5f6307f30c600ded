"""What is read of run folders, whole, torn or not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.report.folders import row, timeline_of_step, write_run
from trainer.errors import ConfigurationError
from trainer.report.run import read_runs


def test_a_whole_run_is_read_without_complaint(tmp_path: Path) -> None:
    (run,) = read_runs([write_run(tmp_path / "run", timelines=[3, 10])])
    assert run.problems == ()
    assert run.name == "run"
    assert run.last_step == 30
    assert run.planned_steps == 200
    assert run.curves.validation_loss.known == [(15, 4.5), (30, 3.5)]
    assert run.config["training.batch_size"].value == 8
    assert [each.step for each in run.timelines.drawn] == [10, 3]
    assert run.description.startswith("Llama 3 debug")


def test_missing_files_are_said_and_the_rest_is_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "plan.json").unlink()
    (folder / "config.toml").unlink()
    (folder / "environment.json").unlink()
    (run,) = read_runs([folder])
    assert run.problems == ("config.toml is missing", "plan.json is missing")
    assert run.last_step == 30


def test_torn_files_are_said_and_the_rest_is_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    for name in ("plan.json", "config.toml"):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[: len(whole) // 2] + b'"\xff')
    metrics = folder / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-9] + b"\n\xff\n[1]\n\n" + b"[" * 100_000)
    (folder / "failure.json").write_text("")
    (run,) = read_runs([folder])
    said = "\n".join(run.problems)
    assert "config.toml is no whole TOML" in said
    assert "plan.json is no whole JSON" in said
    assert "metrics.jsonl has 4 lines that cannot be read" in said
    assert "failure.json is no whole JSON" in said
    assert run.last_step == 30
    assert run.curves.validation_loss.known == [(15, 4.5)]


def test_files_that_are_no_files_are_said(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "plan.json").unlink()
    os.mkfifo(folder / "plan.json")
    (folder / "config.toml").unlink()
    (folder / "config.toml").mkdir()
    (run,) = read_runs([folder])
    assert run.problems == ("config.toml is not a file", "plan.json is not a file")


def test_a_torn_timeline_is_said_and_its_picture_is_shown_instead(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", timelines=[3, 10])
    timeline = folder / "timeline"
    (timeline / "step-10.json").write_text(timeline_of_step(10)[:-100])
    (timeline / "step-10.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"></svg>\n')
    (timeline / "step-11.json").write_text("{}")
    (timeline / "step-11.svg").write_text("<svg>torn")
    (timeline / "step-3.trace.json").write_text("{}")
    (run,) = read_runs([folder])
    assert [each.step for each in run.timelines.drawn] == [10, 3]
    assert "data:image/svg+xml;base64," in run.timelines.drawn[0].drawing
    said = "\n".join(run.problems)
    assert "timeline/step-10.json cannot be drawn" in said
    assert "timeline/step-10.svg is shown as it is" in said
    assert "timeline/step-11.svg is no whole picture" in said
    assert "timeline/step-11.json cannot be drawn" in said


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        ('"runs": 1', '"runs": 1000000000000'),
        ('"owners": [0, 1, 2, 3]', '"owners": [0, 1, 2, 1000000000000]'),
        ('"owners": [0, 1, 2, 3]', '"owners": []'),
        ('"microbatches": 8', '"microbatches": 0'),
        ('"action": "0F0"', '"action": "99999999F0"'),
        ('"start": 0.0', '"start": "now"'),
        ('"start": 0.0', '"start": NaN'),
        ('"start": 0.0', '"start": 1e999'),
        ('"pipeline_rank": 0', '"pipeline_rank": [0]'),
        ('"transfer": 0.0', '"transfer": {}'),
    ],
)
def test_a_timeline_with_an_impossible_value_is_said_or_drawn_but_never_raises(
    tmp_path: Path, was: str, becomes: str
) -> None:
    folder = write_run(tmp_path / "run", timelines=[3])
    text = timeline_of_step(3)
    assert was in text
    (folder / "timeline" / "step-3.json").write_text(text.replace(was, becomes))
    (run,) = read_runs([folder])
    assert run.timelines.drawn or "step-3.json cannot be drawn" in run.problems[0]


def test_only_the_latest_timelines_are_drawn_and_the_others_counted(tmp_path: Path) -> None:
    (run,) = read_runs([write_run(tmp_path / "run", timelines=range(1, 10))])
    assert [each.step for each in run.timelines.drawn] == [9, 8, 7, 6, 5, 4]
    assert run.timelines.left_out == 3


def test_runs_have_the_shortest_names_that_tell_them_apart(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, rows=[row(1)]) for name in ("a/debug", "b/debug", "b/other")]
    assert [run.name for run in read_runs(folders)] == ["a/debug", "b/debug", "b/other"]
    assert [run.name for run in read_runs(folders[1:])] == ["debug", "other"]


def test_a_folder_that_is_named_twice_is_read_once(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", timelines=[3])
    assert len(read_runs([folder, tmp_path / "." / "run", folder / "timeline" / ".."])) == 1


def test_every_folder_that_is_no_run_is_said_in_a_line(tmp_path: Path) -> None:
    run, other, file = write_run(tmp_path / "run"), tmp_path / "other", tmp_path / "file"
    other.mkdir()
    file.write_text("")
    with pytest.raises(ConfigurationError) as refused:
        read_runs([run, other, file, tmp_path / "nowhere"])
    assert str(refused.value).splitlines() == [
        f"{other} is not the folder of a run: it has neither config.toml, plan.json nor metrics.jsonl",
        f"{file} is not a folder",
        f"there is no folder {tmp_path / 'nowhere'}",
    ]
