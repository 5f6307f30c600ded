"""The program as people start it: real processes under run_train.sh, the launcher, torchrun, and a terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.program import pipeline, rows, run, tiny, values
from tests.launched import LAUNCHER, ROOT, Launched, launched
from tests.test_launch import WRONG
from trainer.errors import ExitCode

pytestmark = pytest.mark.slow

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
@pytest.mark.parametrize("arguments", WRONG[:3])
def test_a_wrong_configuration_ends_with_one_line_and_exit_code_2(
    arguments: str, environment: dict[str, str]
) -> None:
    """Cases O2, O4, P14; all of them without a process of their own in test_launch.py."""
    with launched(arguments.split(), [str(ROOT / "run_train.sh")], **environment) as job:
        code, out, err = job.end(20)
    assert (code, out) == (ExitCode.WRONG_CONFIGURATION, "")
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_a_killed_rank_ends_all_with_exit_code_4(tmp_path: Path) -> None:
    with launched(tiny(tmp_path, pipeline(2), steps=ENDLESS), NGPU="2") as job:
        wait_for_step(job, tmp_path, 2)
        os.kill(job.rank(1), signal.SIGKILL)
        code, _, err = job.end(60)
        assert code == ExitCode.RANK_FAILED
        assert not job.members()
    last = err.splitlines()[-2]
    assert re.match(r"stageline: rank 1 died: rank 0 lost the connection to it in step \d+, ", last), err
    assert err.count("; all ranks ended") == 1
    # The rank that could still write left its last collectives.
    recorded = [path.name for path in (tmp_path / "logs").glob("flight_recorder_rank_*.json")]
    assert recorded == ["flight_recorder_rank_0.json"]


def test_a_stopped_rank_that_shows_no_sign_of_life_ends_all_with_exit_code_4(tmp_path: Path) -> None:
    """As if its host had gone: the process is there, but not even its watchdog runs."""
    with launched(tiny(tmp_path, pipeline(2), steps=ENDLESS), NGPU="2") as job:
        wait_for_step(job, tmp_path, 2)
        os.kill(job.rank(1), signal.SIGSTOP)
        code, _, err = job.end(60)
        assert code == ExitCode.RANK_FAILED
        assert not job.members()
    assert "stageline: rank 1 died (no sign of life for 10 s)" in err


def test_a_loss_that_is_not_finite_ends_with_exit_code_5_where_that_is_the_policy(tmp_path: Path) -> None:
    """Which is not started again: it would come to the same."""
    options = (
        "--optimizer.lr 1e30 --training.warmup_steps 0 --training.nonfinite_policy stop --job.max_restarts 2"
    )
    with launched(tiny(tmp_path, options, pipeline(2), steps=50), NGPU="2") as job:
        code, _, err = job.end(60)
    assert code == ExitCode.TRAINING_FAILED
    assert "training.nonfinite_policy = 'stop'" in err.splitlines()[-1]
    assert "Traceback" not in err


@pytest.mark.parametrize(("number", "ranks"), [(signal.SIGTERM, 4), (signal.SIGUSR1, 1)])
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


# A terminal


def test_control_c_at_a_terminal_stops_the_job_once_with_its_state_saved(tmp_path: Path) -> None:
    ranks = 2
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


# Kills and resumes; at random moments, with forked ranks, in distributed/test_kill_drills.py


def straight(folder: Path, *more: str, steps: int) -> list[dict[str, Any]]:
    """The metrics of a run of the same two ranks that nothing happens to."""
    run(tiny(folder, *more, steps=steps), 2)
    return rows(folder)


def test_a_job_that_loses_a_rank_and_then_its_launcher_is_the_same_run(tmp_path: Path) -> None:
    """The launcher starts it again, once; the same command does so afterwards; and no rank outlives its launcher."""
    arguments = tiny(
        tmp_path / "killed", pipeline(2), "--checkpoint.interval 6 --job.max_restarts 1", steps=150
    )
    failure = tmp_path / "killed" / "failure.json"
    with launched(arguments, NGPU="2", OMP_NUM_THREADS="1") as job:
        wait_for_step(job, tmp_path / "killed", 8)
        os.kill(job.rank(1), signal.SIGKILL)
        job.wait_for(failure.exists, "a failure")
        job.wait_for(lambda: not failure.exists(), "a new attempt")
        before = steps_logged(tmp_path / "killed")
        wait_for_step(job, tmp_path / "killed", before + 1)
        assert len(job.members()) == 3
        job.process.kill()
        deadline = time.monotonic() + 5
        while job.members() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not job.members()
        _, out, err = job.end()
    assert err.count("starting again from the last checkpoint, 1 of 1") == 1
    assert re.search(r"resumed     after step \d+", out)
    assert re.search(r"resumed     after step \d+", finish(arguments, 2, OMP_NUM_THREADS="1"))
    assert rows(tmp_path / "killed") == straight(tmp_path / "straight", pipeline(2), steps=150)


# Other launchers

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(ROOT / "train.py"))


def test_a_signal_to_torchrun_saves_the_state(tmp_path: Path) -> None:
    with launched(tiny(tmp_path, pipeline(2), steps=ENDLESS), TORCHRUN) as job:
        wait_for_step(job, tmp_path, 2)
        job.process.send_signal(signal.SIGTERM)
        _, out, err = job.end(60)
    last = values(tmp_path, "step")[-1]
    assert f"by SIGTERM after step {last} of" in out, err
    assert (tmp_path / "checkpoint" / f"step-{last}" / "manifest.json").is_file()


def test_torchrun_starts_a_job_again_that_lost_a_rank_and_it_is_the_same_run(tmp_path: Path) -> None:
    """The watchdog's keys of the first attempt are still in the store that torchrun keeps."""
    again = (*TORCHRUN[:3], "--max-restarts", "1", *TORCHRUN[3:])
    arguments = tiny(tmp_path / "killed", pipeline(2), "--checkpoint.interval 8", steps=150)
    with launched(arguments, again, OMP_NUM_THREADS="1") as job:
        wait_for_step(job, tmp_path / "killed", 10)
        os.kill(job.rank(1), signal.SIGKILL)
        code, out, err = job.end(120)
    assert code == 0, err
    assert re.search(r"resumed     after step \d+", out)
    assert rows(tmp_path / "killed") == straight(tmp_path / "straight", pipeline(2), steps=150)
