"""`stageline timeline`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from parallelisms.pipeline.setting import Costs
from parallelisms.pipeline.timeline_file import timeline_text
from tests.pipeline.synthetic import measured, schedule_of
from trainer.commands.timeline import run
from trainer.errors import ConfigurationError


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run that measured steps 3 and 10; in step 10 the forward of stage 2 took twice as long."""
    schedule = schedule_of("1F1B", 4, 8, unit=0.01)
    slow = Costs((0.01, 0.01, 0.02, 0.01), (0.01,) * 4, (0.01,) * 4)
    (tmp_path / "timeline").mkdir()
    for step, costs in ((3, None), (10, slow)):
        text = timeline_text(measured(schedule, costs)).replace('"step": 3', f'"step": {step}')
        (tmp_path / "timeline" / f"step-{step}.json").write_text(text)
    # What stands beside them is no timeline.
    (tmp_path / "timeline" / "step-3.trace.json").write_text("{}")
    return tmp_path


def test_a_schedule_is_drawn_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--schedule", "1f1b", "--stages", "4", "--microbatches", "8"]) == 0
    out = capsys.readouterr().out
    assert "1F1B  4 ranks, 4 stages, 8 microbatches" in out
    assert "step 33, bound 33" in out
    assert out.count("rank ") >= 4
    assert "\x1b" not in out


def test_ranks_follow_from_the_stages_that_the_schedule_has_on_each(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(["--schedule", "ZBVZeroBubble", "--stages", "8", "--microbatches", "8"])
    assert "4 ranks, 8 stages" in capsys.readouterr().out
    run(["--schedule", "Interleaved1F1B", "--stages", "12", "--microbatches", "4", "--ranks", "3"])
    assert "3 ranks, 12 stages" in capsys.readouterr().out
    run(["--schedule", "Interleaved1F1B", "--stages", "12", "--microbatches", "4", "--stages-per-rank", "3"])
    assert "4 ranks, 12 stages" in capsys.readouterr().out


def test_costs_are_of_a_ranks_whole_share(capsys: pytest.CaptureFixture[str]) -> None:
    for name, stages in (("1F1B", "4"), ("Interleaved1F1B", "8")):
        run(["--schedule", name, "--stages", stages, "--microbatches", "8", "--costs", "1,2,3"])
    out = capsys.readouterr().out
    assert "step 66," in out  # (4 + 7) x 6
    assert "step 57," in out  # (8 + 3/2) x 6


def test_schedules_are_drawn_beside_each_other(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    svg = tmp_path / "both.svg"
    run(["--schedule", "1F1B", "ZBVZeroBubble", "--ranks", "4", "--microbatches", "8", "--svg", str(svg)])
    out = capsys.readouterr().out
    assert "1F1B: step 33" in out
    assert "ZBVZeroBubble: step 25.5" in out
    assert f"wrote {svg}" in out
    assert svg.read_text().startswith("<svg")


def test_the_latest_step_is_drawn_beside_its_plan_and_what_was_late_is_named(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([str(run_folder), "--width", "140"]) == 0
    out = capsys.readouterr().out
    assert "1F1B, step 10" in out
    assert out.index("planned: step 330 ms") < out.index("measured: step 400 ms")
    assert "stage 2 forward" in out
    assert "(2.00x)" in out
    assert "slow stage: it always takes longer than planned" in out
    assert "late receive from stage 2; lost at forward of stage 2, rank 2" in out
    assert "with the costs just measured" in out
    assert re.search(r"^ *1F1B +400 ms +4 microbatches of activations held, as it is$", out, re.MULTILINE)
    (auto,) = re.findall(r"^ *Auto .*$", out, re.MULTILINE)
    assert re.search(r"(\d+) ms +4 microbatches of activations held, [\d.]+% less$", auto)


def test_a_step_can_be_chosen(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run([str(run_folder), "--step", "3"])
    out = capsys.readouterr().out
    assert "1F1B, step 3" in out
    assert "no action was late" in out
    assert "every stage costs what was planned" in out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "needs either a run folder, or --schedule"),
        (["outputs", "--schedule", "1F1B"], "needs either"),
        (["--schedule", "1F1B"], "--schedule 1F1B needs --microbatches"),
        (["--schedule", "1F1B", "--microbatches", "4"], "needs --stages, or --ranks"),
        (["--schedule", "1F2B", "--stages", "4", "--microbatches", "4"], "did you mean '1F1B'"),
        (
            ["--schedule", "1F1B", "--stages", "0", "--microbatches", "4"],
            "expected a whole number of at least 1, got '0'",
        ),
        (
            ["--schedule", "1F1B", "--stages", "four", "--microbatches", "4"],
            "expected a whole number of at least 1, got 'four'",
        ),
        (
            ["--schedule", "ZBVZeroBubble", "--stages", "7", "--microbatches", "4"],
            "7 is not a multiple of that",
        ),
        (
            ["--schedule", "1F1B", "--stages", "8", "--ranks", "3", "--microbatches", "4"],
            "cannot be shared equally by --ranks 3",
        ),
        (
            ["--schedule", "1F1B", "--stages", "8", "--ranks", "4", "--microbatches", "4"],
            "1F1B has one stage per rank",
        ),
        (
            ["--schedule", "1F1B", "--stages", "4", "--microbatches", "4", "--costs", "1,2"],
            "three numbers F,I,W",
        ),
        (["--schedule", "1F1B", "--stages", "4", "--microbatches", "4", "--costs", "0,0,0"], "more than 0"),
        (
            ["--schedule", "1F1B", "--stages", "4", "--microbatches", "4", "--step", "3"],
            "choose from a run folder",
        ),
        (["--schedule", "GPipe", "--stages", "4", "--microbatches", "999999999"], "too many to draw"),
        (
            ["--schedule", "GPipe", "--stages", "4", "--microbatches", "8", "--memory-limit", "4"],
            "over the limit of 4",
        ),
        (
            ["--schedule", "1F1B", "--stages", "2", "--microbatches", "2", "--svg", "/nowhere/at/all.svg"],
            "cannot be written",
        ),
        (["/nowhere"], "has no measured timeline; train with"),
        (["--colour"], "unrecognized arguments: --colour"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_one_line(arguments: list[str], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^[^\n]*$") as refused:
        run(arguments)
    assert reason in str(refused.value)


def test_a_step_or_pipeline_that_was_not_measured_is_refused(run_folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="no timeline of step 4; there are those of 3, 10"):
        run([str(run_folder), "--step", "4"])
    with pytest.raises(ConfigurationError, match="has no pipeline 2; there are 0"):
        run([str(run_folder), "--pipeline", "2"])


def test_a_broken_file_is_refused(run_folder: Path) -> None:
    (run_folder / "timeline" / "step-10.json").write_text('{"format": 1')
    with pytest.raises(ConfigurationError, match="is not JSON"):
        run([str(run_folder)])


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(["--help"])
    assert ended.value.code == 0
    assert "stageline timeline --schedule 1F1B --stages 4 --microbatches 8" in capsys.readouterr().out


def test_drawing_needs_no_torch() -> None:
    code = (
        "import sys; from trainer.commands.timeline import run; "
        "run(['--schedule', '1F1B', '--stages', '4', '--microbatches', '8']); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
