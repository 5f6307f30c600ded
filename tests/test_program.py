"""The program as people start it: real processes under run_train.sh, the launcher, torchrun, and a terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import random
import re
import signal
import subprocess
import sys
import termios
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.distributed.program import pipeline, rows, tiny, values
from tests.launched import LAUNCHER, ROOT, Launched, launched
from tests.test_launch import WRONG
from trainer.errors import ExitCode

pytestmark = pytest.mark.slow

FOUR_RANKS = pipeline(2)  # of which the others are shards
ENDLESS = 1_000_000  # steps


def finish(arguments: list[str], ranks: int = 1, **environment: str) -> str:
    """Run to a good end under the launcher; its standard output."""
    with launched(arguments, NGPU=str(ranks), **environment) as job:
        code, out, err = job.end(120)
        assert code == ExitCode.DONE, err
        return out


def steps_logged(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_step(job: Launched, folder: Path, step: int) -> None:
    job.wait_for(lambda: steps_logged(folder) >= step, f"step {step}")


# Ends


def test_one_command_trains_the_debug_configuration_on_the_cpu(tmp_path: Path) -> None:
    """Case O6: no CPU mode; and O5: what the device can do is not known, so its utilisation is null."""
    options = f"--training.steps 3 --training.seq_len 64 --training.batch_size 2 --job.dump_folder {tmp_path}"
    with launched(options.split(), [str(ROOT / "run_train.sh")], CUDA_VISIBLE_DEVICES="") as job:
        code, out, err = job.end(180)
    assert code == ExitCode.DONE, err
    assert values(tmp_path, "step") == [1, 2, 3]
    assert "stageline generate" in out
    assert all(json.loads(line)["mfu"] is None for line in (tmp_path / "metrics.jsonl").open())


@pytest.mark.parametrize("environment", [{}, {"NGPU": "4"}], ids=["as many as needed", "four"])
@pytest.mark.parametrize("arguments", WRONG)
def test_a_wrong_configuration_ends_with_one_line_and_exit_code_2(
    arguments: str, environment: dict[str, str]
) -> None:
    """Cases O2, O4, P14."""
    with launched(arguments.split(), [str(ROOT / "run_train.sh")], **environment) as job:
        code, out, err = job.end(20)
    assert (code, out) == (ExitCode.WRONG_CONFIGURATION, "")
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_a_killed_rank_ends_all_with_exit_code_4(tmp_path: Path) -> None:
    with launched(tiny(tmp_path, pipeline(4), steps=ENDLESS), NGPU="4") as job:
        wait_for_step(job, tmp_path, 2)
        os.kill(job.rank(2), signal.SIGKILL)
        code, _, err = job.end(60)
        assert code == ExitCode.RANK_FAILED
        assert not job.members()
    last = err.splitlines()[-2]
    assert re.match(r"stageline: rank 2 died: rank \d lost the connection to it in step \d+, ", last), err
    assert err.count("; all ranks ended") == 1
    # Of the ranks that could still write, each left its last collectives.
    recorded = sorted(path.name for path in (tmp_path / "logs").glob("flight_recorder_rank_*.json"))
    assert recorded == [f"flight_recorder_rank_{rank}.json" for rank in (0, 1, 3)]


def test_a_stopped_rank_that_shows_no_sign_of_life_ends_all_with_exit_code_4(tmp_path: Path) -> None:
    """As if its host had gone: the process is there, but not even its watchdog runs."""
    with launched(tiny(tmp_path, pipeline(4), steps=ENDLESS), NGPU="4") as job:
        wait_for_step(job, tmp_path, 2)
        os.kill(job.rank(1), signal.SIGSTOP)
        code, _, err = job.end(60)
        assert code == ExitCode.RANK_FAILED
        assert not job.members()
    assert "stageline: rank 1 died (no sign of life for 10 s)" in err


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_loss_that_is_not_finite_ends_with_exit_code_5_where_that_is_the_policy(
    tmp_path: Path, ranks: int
) -> None:
    options = "--optimizer.lr 1e30 --training.warmup_steps 0 --training.nonfinite_policy stop"
    with launched(tiny(tmp_path, options, pipeline(ranks), steps=50), NGPU=str(ranks)) as job:
        code, _, err = job.end(60)
    assert code == ExitCode.TRAINING_FAILED
    assert "training.nonfinite_policy = 'stop'" in err.splitlines()[-1]
    assert "Traceback" not in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
@pytest.mark.parametrize("ranks", [1, 4])
def test_a_signal_to_the_launcher_stops_the_job_with_its_state_saved(
    tmp_path: Path, number: signal.Signals, ranks: int
) -> None:
    layout = pipeline(2) if ranks == 4 else ""
    with launched(tiny(tmp_path, layout, steps=ENDLESS), NGPU=str(ranks)) as job:
        wait_for_step(job, tmp_path, 2)
        job.process.send_signal(number)
        code, out, err = job.end(60)
        assert not job.members()
    assert code == ExitCode.STOPPED_ON_REQUEST, err
    last = values(tmp_path, "step")[-1]
    assert f"by {number.name} after step {last} of" in out
    assert (tmp_path / "checkpoint" / f"step-{last}" / "manifest.json").is_file()
    assert "Traceback" not in err


def test_a_launcher_that_is_killed_leaves_no_rank_behind(tmp_path: Path) -> None:
    with launched(tiny(tmp_path, pipeline(2), steps=ENDLESS), NGPU="2") as job:
        wait_for_step(job, tmp_path, 2)
        assert len(job.members()) == 3
        job.process.kill()
        deadline = time.monotonic() + 5
        while job.members() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not job.members()


# A terminal


@pytest.mark.parametrize("ranks", [1, 2])
def test_control_c_at_a_terminal_stops_the_job_once_with_its_state_saved(tmp_path: Path, ranks: int) -> None:
    master, slave = pty.openpty()

    def take_terminal() -> None:
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

    arguments = tiny(tmp_path, pipeline(ranks), steps=ENDLESS)
    process = subprocess.Popen(
        [*LAUNCHER, *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NGPU": str(ranks), "TERM": "xterm"},
        start_new_session=True,
        preexec_fn=take_terminal,
    )
    os.close(slave)
    shown, pressed, deadline = b"", False, time.monotonic() + 90
    try:
        os.set_blocking(master, False)
        while process.poll() is None and time.monotonic() < deadline:
            with suppress(BlockingIOError, OSError):
                shown += os.read(master, 65536)
            if not pressed and steps_logged(tmp_path) >= 2:
                os.write(master, b"\x03")
                pressed = True
            time.sleep(0.02)
        with suppress(OSError):
            while more := os.read(master, 65536):
                shown += more
    finally:
        process.kill()
        os.close(master)
    text = shown.decode(errors="replace")
    assert process.wait() == ExitCode.STOPPED_ON_REQUEST, text
    last = values(tmp_path, "step")[-1]
    assert f"by SIGINT after step {last} of" in text
    assert (tmp_path / "checkpoint" / f"step-{last}" / "manifest.json").is_file()
    assert "Traceback" not in text


# Kills and resumes


@pytest.mark.parametrize("ranks", [1, 4])
def test_killed_at_random_moments_and_resumed_it_is_the_same_run(tmp_path: Path, ranks: int) -> None:
    """Also case C2: learning rate and weight decay after a resume. Four ranks are pipeline 2 x shard 2."""
    layout = "--checkpoint.interval 3 " + (FOUR_RANKS if ranks == 4 else "")
    steps = 120
    finish(tiny(tmp_path / "straight", layout, steps=steps), ranks)
    killed = tmp_path / "killed"
    arguments = tiny(killed, layout, steps=steps)
    moments, kills = random.Random(ranks), 0
    while kills < 4:
        with launched(arguments, NGPU=str(ranks)) as job:
            before = steps_logged(killed)
            wait_for_step(job, killed, min(before + 1, steps - 1))
            time.sleep(moments.uniform(0.0, 0.3))
            kills += job.process.poll() is None
            for pid in job.members():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if steps_logged(killed) >= steps:
            break
    assert kills >= 2, "the run is too short to be killed"
    finish(arguments, ranks)
    assert rows(killed) == rows(tmp_path / "straight")


def test_a_checkpoint_of_four_ranks_goes_on_on_one_and_on_two(tmp_path: Path) -> None:
    """Pipeline 2 x shard 2, then one process, then two pipeline ranks, then two shards; against one straight run."""
    batch = "--training.global_batch_size 8 --checkpoint.interval 4 --training.warmup_steps 2"
    one, resumed = tmp_path / "one", tmp_path / "resumed"
    finish(tiny(one, batch, "--training.batch_size 8", steps=16))
    layouts = [(FOUR_RANKS, 4, 4), ("", 1, 8), (pipeline(2), 2, 8), ("", 2, 4)]
    for part, (layout, ranks, batch_size) in enumerate(layouts, 1):
        # Steps of the whole run, which the learning rate follows; each part is stopped by removing what is later.
        arguments = tiny(resumed, batch, layout, f"--training.batch_size {batch_size}", steps=16)
        out = finish(arguments, ranks)
        assert part == 1 or f"resumed     after step {4 * part - 4}" in out
        if part < len(layouts):
            for later in range(part + 1, 5):
                folder = resumed / "checkpoint" / f"step-{4 * later}"
                (folder / "manifest.json").unlink()
    assert [row["step"] for row in rows(resumed)] == list(range(1, 17))
    for row, expected in zip(rows(resumed), rows(one), strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        assert row["lr"] == expected["lr"]


# Other launchers

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(ROOT / "train.py"))


def test_torchrun_is_the_same_as_the_launcher(tmp_path: Path) -> None:
    ours, theirs = (tiny(tmp_path / name, pipeline(2)) for name in ("ours", "theirs"))
    finish(ours, 2)
    with launched(theirs, TORCHRUN) as job:
        code, _, err = job.end(120)
    assert code == 0, err
    assert rows(tmp_path / "theirs") == rows(tmp_path / "ours")
    assert (tmp_path / "theirs" / "checkpoint" / "step-4" / "manifest.json").is_file()


def test_a_signal_to_torchrun_saves_the_state(tmp_path: Path) -> None:
    with launched(tiny(tmp_path, pipeline(2), steps=ENDLESS), TORCHRUN) as job:
        wait_for_step(job, tmp_path, 2)
        job.process.send_signal(signal.SIGTERM)
        _, out, err = job.end(60)
    last = values(tmp_path, "step")[-1]
    assert f"by SIGTERM after step {last} of" in out, err
    assert (tmp_path / "checkpoint" / f"step-{last}" / "manifest.json").is_file()


def test_torchrun_starts_a_job_again_that_lost_a_rank_and_it_goes_on(tmp_path: Path) -> None:
    """The watchdog's keys of the first attempt are still in the store that torchrun keeps."""
    again = (*TORCHRUN[:3], "--max-restarts", "1", *TORCHRUN[3:])
    arguments = tiny(tmp_path, pipeline(2), "--checkpoint.interval 5", steps=400)
    with launched(arguments, again) as job:
        wait_for_step(job, tmp_path, 10)
        os.kill(job.rank(1), signal.SIGKILL)
        code, out, err = job.end(120)
    assert code == 0, err
    assert re.search(r"resumed     after step \d+", out)
    assert values(tmp_path, "step") == list(range(1, 401))
