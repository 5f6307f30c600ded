"""The launcher: exit codes, signals, and that no process is left behind. The ranks are a few lines that behave as told.

What the real program does under it is in test_program.py.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.launched import Launched, launched
from trainer import launch
from trainer.errors import ExitCode
from trainer.stop import SAME_REQUEST

# The launcher with another program in the place of train.py.
START = (
    "import sys, pathlib; from trainer import launch; launch._TRAIN = pathlib.Path(sys.argv[1]); "
    "launch._SECONDS_TO_END, launch._SECONDS_TO_NOTICE = 0.7, 0.3; sys.exit(launch.main([]))"
)
# Every rank says that it is there; rank 1 then does what the test is about.
RANK = """
import os, signal, sys, time
rank, folder = os.environ["RANK"], sys.argv[0].rsplit("/", 1)[0]
def note(word):
    open(f"{{folder}}/{{word}}-{{rank}}", "a").write(word + "\\n")
def stop(number, frame):
    note("asked")
    sys.exit(3)
signal.signal(signal.SIGTERM, {handler})
signal.signal(signal.SIGINT, {handler})
note("there")
if rank == "1":
    {rank_1}
{others}
"""
WAIT = "time.sleep(60)"


def start(folder: Path, rank_1: str = WAIT, others: str = WAIT, handler: str = "stop") -> list[str]:
    """The command of a launcher whose ranks do this."""
    script = folder / "rank.py"
    script.write_text(RANK.format(rank_1=rank_1, others=others, handler=handler))
    return [sys.executable, "-c", START, str(script)]


def wait_for_ranks(job: Launched, folder: Path, count: int) -> None:
    job.wait_for(lambda: len(list(folder.glob("there-*"))) == count, "all ranks", 20)


@pytest.mark.parametrize("count", [2, 4])
def test_ranks_that_all_end_well_give_exit_code_0(tmp_path: Path, count: int) -> None:
    with launched([], start(tmp_path, "sys.exit(0)", ""), NGPU=str(count)) as job:
        assert job.end(20)[0] == ExitCode.DONE
    assert len(list(tmp_path.glob("there-*"))) == count


@pytest.mark.parametrize("code", [1, 5])
def test_the_exit_code_is_that_of_the_rank_that_failed_and_the_others_are_ended(
    tmp_path: Path, code: int
) -> None:
    with launched([], start(tmp_path, f"sys.exit({code})"), NGPU="3") as job:
        assert job.end(20)[0] == code
        assert not job.members()


def test_a_killed_rank_gives_exit_code_4_and_is_named_and_nobody_is_left(tmp_path: Path) -> None:
    with launched([], start(tmp_path), NGPU="3") as job:
        wait_for_ranks(job, tmp_path, 3)
        os.kill(job.rank(2), signal.SIGKILL)
        code, _, err = job.end(20)
        assert (code, err.splitlines()[-1]) == (4, "stageline: rank 2 was killed by SIGKILL")
        assert not job.members()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_to_every_rank_once_and_the_exit_code_is_theirs(
    tmp_path: Path, number: signal.Signals
) -> None:
    with launched([], start(tmp_path), NGPU="3") as job:
        wait_for_ranks(job, tmp_path, 3)
        job.process.send_signal(number)
        assert job.end(20)[0] == ExitCode.STOPPED_ON_REQUEST
    assert [(tmp_path / f"asked-{rank}").read_text() for rank in range(3)] == ["asked\n"] * 3


def test_ranks_that_end_by_the_signal_itself_were_stopped_on_request_too(tmp_path: Path) -> None:
    with launched([], start(tmp_path, handler="signal.SIG_DFL"), NGPU="2") as job:
        wait_for_ranks(job, tmp_path, 2)
        job.process.send_signal(signal.SIGTERM)
        assert job.end(20)[0] == ExitCode.STOPPED_ON_REQUEST


def test_a_second_signal_ends_ranks_that_do_not_listen_at_once(tmp_path: Path) -> None:
    with launched([], start(tmp_path, handler="signal.SIG_IGN"), NGPU="2") as job:
        wait_for_ranks(job, tmp_path, 2)
        job.process.send_signal(signal.SIGINT)
        time.sleep(SAME_REQUEST + 0.1)
        job.process.send_signal(signal.SIGINT)
        code, _, err = job.end(5)
        assert code == ExitCode.OTHER
        assert "Traceback" not in err
        assert "ended at once" in err
        assert not job.members()


def attempts(folder: Path) -> int:
    return (folder / "there-0").read_text().count("there") if (folder / "there-0").exists() else 0


@pytest.mark.parametrize(("code", "expected"), [(4, 3), (5, 1), (3, 1), (2, 1), (0, 1)])
def test_a_job_whose_rank_failed_is_started_again_so_often_and_no_other_is(
    tmp_path: Path, code: int, expected: int
) -> None:
    command = start(tmp_path, f"sys.exit({code})", "")
    command[2] = command[2].replace("main([])", "main(['--job.max_restarts', '2'])")
    with launched([], command, NGPU="2") as job:
        ended, _, err = job.end(30)
    assert (ended, attempts(tmp_path)) == (code, expected), err
    assert err.count("starting again from the last checkpoint") == expected - 1


def test_a_single_process_is_started_again_too(tmp_path: Path) -> None:
    command = start(tmp_path, WAIT, "os.kill(os.getpid(), signal.SIGKILL)")
    command[2] = command[2].replace("main([])", "main(['--job.max_restarts', '1'])")
    with launched([], command, NGPU="1") as job:
        code, _, err = job.end(30)
    assert (code, attempts(tmp_path)) == (4, 2), err


def test_a_launcher_that_is_killed_leaves_no_rank_behind(tmp_path: Path) -> None:
    with launched([], start(tmp_path, handler="signal.SIG_IGN"), NGPU="4") as job:
        wait_for_ranks(job, tmp_path, 4)
        ranks = [job.rank(number) for number in range(4)]
        job.process.kill()
        deadline = time.monotonic() + 5
        while job.members() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not job.members(), ranks


def test_ranks_are_out_of_the_terminals_reach(tmp_path: Path) -> None:
    """Ctrl-C reaches all processes of the terminal's session: the launcher, and not its ranks a second time."""
    with launched([], start(tmp_path), NGPU="2") as job:
        wait_for_ranks(job, tmp_path, 2)
        sessions = {os.getsid(job.rank(number)) for number in range(2)}
        assert os.getsid(job.process.pid) not in sessions


PP = "--experimental.pipeline_parallel_"
WRONG = [
    "--training.batchsize 8",
    "--trianing.batch_size 8",
    "--training.seed 1.5",
    "--training.steps many",
    "--training.seq_len -4",
    "--config debgu.toml",
    f"{PP}degree 2 {PP}microbatches 64",
    f"{PP}degree 4 {PP}schedule 1F2B",
    "--training.dataset jsonl",
    f"{PP}degree 4 {PP}split_points layers.99",
    "--model.flavor 9000B",
    "--model.tokenizer_path /nonexistent/tokenizer.model",
]


@pytest.mark.parametrize("processes", [None, "4"])
@pytest.mark.parametrize("arguments", WRONG)
def test_a_wrong_configuration_is_refused_in_one_line_before_any_process_is_started(
    arguments: str,
    processes: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Cases O2, O4, P14."""
    monkeypatch.delenv("NGPU", raising=False)
    if processes is not None:
        monkeypatch.setenv("NGPU", processes)
    assert launch.main(arguments.split()) == ExitCode.WRONG_CONFIGURATION
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert said.out == ""


@pytest.mark.parametrize("processes", ["0", "-1", "four", "1.5", ""])
def test_a_number_of_processes_that_is_none_is_refused(
    processes: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NGPU", processes)
    assert launch.main([]) == ExitCode.WRONG_CONFIGURATION
    assert f"environment: NGPU = {processes!r}" in capsys.readouterr().err
