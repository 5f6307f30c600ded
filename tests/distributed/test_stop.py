"""A signal to one rank stops all of them after the same step, with the state saved and exit code 3."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.program import Forked, pipeline, rows, run, tiny
from tests.distributed.ranks import run_ranks
from trainer.checkpoint import manager
from trainer.errors import ExitCode
from trainer.loop import Loop, StepResult
from trainer.ports import free_port
from trainer.run import Run
from trainer.stop import SAME_REQUEST, Meaning, Requests, StopRequest
from trainer.time_limit import STARTED, TimeLimit

STOPPED = ExitCode.STOPPED_ON_REQUEST


def in_step(step: int, rank: int, *numbers: int, pause: float = 0.0) -> Callable[[int], None]:
    """Sends the signals to a rank while it is in a step, which goes on when the last one has been noted."""

    def before(own: int) -> None:
        train_step = Loop.train_step

        def signalled(loop: Any) -> StepResult:
            if loop.step + 1 == step and own == rank:
                for number in numbers:
                    os.kill(os.getpid(), number)
                    time.sleep(pause)
                while not loop._stop.asked:
                    time.sleep(0.01)
            return train_step(loop)

        Loop.train_step = signalled  # type: ignore[method-assign]

    return before


@pytest.mark.parametrize(
    ("number", "ranks"),
    [
        (signal.SIGTERM, 1),
        (signal.SIGINT, 1),
        (signal.SIGUSR1, 2),
        pytest.param(signal.SIGUSR1, 1, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 2, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 2, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_one_rank_stops_all_after_the_step_and_the_run_can_go_on(
    tmp_path: Path, number: signal.Signals, ranks: int
) -> None:
    straight, stopped = (tiny(tmp_path / name, pipeline(ranks), steps=5) for name in ("straight", "stopped"))
    job = Forked.start(stopped, ranks, in_step(3, ranks - 1, number))
    assert job.wait() == [STOPPED] * ranks, job.said
    assert [row["step"] for row in rows(tmp_path / "stopped")] == [1, 2, 3]
    assert (tmp_path / "stopped" / "checkpoint" / "step-3" / "manifest.json").is_file()
    who = number.name if ranks == 1 else "a signal to another rank"
    assert f"stopped     by {who} after step 3 of 5" in job.said
    assert "Traceback" not in job.said
    assert not (tmp_path / "stopped" / "failure.json").exists()
    run(stopped, ranks)
    run(straight, ranks)
    assert rows(tmp_path / "stopped") == rows(tmp_path / "straight")


def test_pipeline_with_sharding_stops_together(tmp_path: Path) -> None:
    job = Forked.start(tiny(tmp_path, pipeline(2)), 4, in_step(2, 3, signal.SIGTERM))
    assert job.wait() == [STOPPED] * 4, job.said
    assert (tmp_path / "checkpoint" / "step-2" / "manifest.json").is_file()


def test_time_that_is_up_on_one_rank_stops_all_after_the_same_step(tmp_path: Path) -> None:
    def before(rank: int) -> None:
        clock = [1e9]

        def reached(limit: Any) -> bool:
            clock[0] += 10 if rank == 1 else 1
            limit._clock = lambda: clock[0]
            return ask(limit)

        ask = TimeLimit.reached
        TimeLimit.reached = reached  # type: ignore[method-assign]
        os.environ[STARTED] = str(int(clock[0]))

    arguments = tiny(tmp_path, pipeline(2), "--job.time_limit 0:01:40", steps=50)
    job = Forked.start(arguments, 2, before)
    assert job.wait() == [STOPPED] * 2, job.said
    # Of 100 s, 10 are kept for the end and 10 for another step.
    assert "stopped     by job.time_limit after step 8 of 50; the same command goes on from there" in job.said
    assert (tmp_path / "checkpoint" / "step-8" / "manifest.json").is_file()


def test_without_checkpoints_nothing_is_saved_and_that_is_said(tmp_path: Path) -> None:
    arguments = tiny(tmp_path, "--checkpoint.enable_checkpoint false")
    job = Forked.start(arguments, 1, in_step(2, 0, signal.SIGTERM))
    assert job.wait() == [STOPPED]
    assert "after step 2 of 4; checkpoint.enable_checkpoint is false" in job.said
    assert not (tmp_path / "checkpoint").exists()


def test_a_stop_is_saved_whole_where_only_weights_are_kept_at_the_end(tmp_path: Path) -> None:
    arguments = tiny(tmp_path, "--checkpoint.model_weights_only true")
    assert Forked.start(arguments, 1, in_step(2, 0, signal.SIGTERM)).wait() == [STOPPED]
    assert "resumed     after step 2" in run(arguments)


def test_a_request_in_the_last_step_changes_nothing(tmp_path: Path) -> None:
    said = run(tiny(tmp_path, pipeline(2)), 2, in_step(4, 1, signal.SIGTERM))
    assert "done        4 steps" in said


def test_a_state_that_cannot_be_saved_is_not_called_saved(tmp_path: Path) -> None:
    def before(rank: int) -> None:
        in_step(2, 0, signal.SIGTERM)(rank)

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        if rank == 0:
            manager.write_manifest = full  # type: ignore[assignment]

    job = Forked.start(tiny(tmp_path, pipeline(2)), 2, before)
    assert job.wait() == [ExitCode.OTHER] * 2, job.said
    assert "stopped by a signal" in job.said or "stopped by SIGTERM" in job.said
    assert job.said.count("but the state of this step could not be saved") == 1, job.said
    assert "goes on from there" not in job.said


def test_a_second_signal_ends_a_rank_at_once_even_in_a_long_step(tmp_path: Path) -> None:
    sabotage = in_step(2, 0, signal.SIGTERM, signal.SIGINT, pause=SAME_REQUEST + 0.1)
    job = Forked.start(tiny(tmp_path), 1, sabotage)
    assert job.wait() == [ExitCode.OTHER]
    assert "ended at once by a second signal, SIGINT" in job.said


def test_signals_that_come_together_are_one_request(tmp_path: Path) -> None:
    """A terminal and torchrun both send SIGINT."""
    sabotage = in_step(2, 0, signal.SIGINT, signal.SIGINT, signal.SIGTERM)
    assert Forked.start(tiny(tmp_path), 1, sabotage).wait() == [STOPPED]


STOP, NOTHING, AT_ONCE = Meaning.STOP, Meaning.NOTHING_NEW, Meaning.AT_ONCE
TERM, INT, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1


@pytest.mark.parametrize(
    "story",
    [
        [(TERM, 0, STOP), (TERM, 1.9, NOTHING), (TERM, 2.1, AT_ONCE)],
        [(INT, 0, STOP), (TERM, 0.1, NOTHING), (TERM, 3, AT_ONCE)],
        [(USR1, 0, STOP), (USR1, 3, AT_ONCE)],
        [(USR1, 0, STOP), (INT, 3, AT_ONCE)],
        [(TERM, 0, STOP), (USR1, 3, AT_ONCE)],
        # SLURM: ahead of the limit, at the limit to every process and passed on, and somebody who means it.
        [(USR1, 0, STOP), (TERM, 120, NOTHING), (TERM, 120.5, NOTHING), (TERM, 123, AT_ONCE)],
        [(USR1, 0, STOP), (TERM, 60, NOTHING), (INT, 70, AT_ONCE)],
    ],
)
def test_what_a_second_signal_means(story: list[tuple[int, float, Meaning]]) -> None:
    requests = Requests()
    assert [requests.receive(number, 1000 + at) for number, at, _ in story] == [said for *_, said in story]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_request_before_training_ends_all_ranks_at_once(tmp_path: Path, ranks: int) -> None:
    def before(rank: int) -> None:
        def resume(run: Any) -> None:
            if rank == ranks - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(50)

        Run.resume = resume  # type: ignore[method-assign]

    job = Forked.start(tiny(tmp_path, pipeline(ranks)), ranks, before)
    assert job.wait(20) == [STOPPED] * ranks, job.said
    assert job.said.splitlines()[-1] == "stopped by SIGTERM before training began; nothing was to be saved"
    assert not (tmp_path / "failure.json").exists()


def test_a_step_makes_two_reductions_and_no_third_for_stopping(tmp_path: Path) -> None:
    def before(rank: int) -> None:
        train_step, all_reduce = Loop.train_step, dist.all_reduce
        calls: list[int] = []

        def counting(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(tensor.numel())
            return all_reduce(tensor, *args, **kwargs)

        def counted(loop: Any) -> StepResult:
            calls.clear()
            result = train_step(loop)
            assert calls == [1, 4], calls
            return result

        dist.all_reduce = counting  # type: ignore[assignment]
        Loop.train_step = counted  # type: ignore[method-assign]

    run(tiny(tmp_path, pipeline(2), steps=2), 2, before)


def helper_process(_rank: int) -> tuple[int, bool]:
    """A process that listens forks another one and ends it by SIGTERM, as pools of workers do."""
    stop = StopRequest.listen()
    child = os.fork()
    if child == 0:
        time.sleep(50)
        os._exit(0)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    time.sleep(0.1)
    return os.waitstatus_to_exitcode(status), stop.asked


def test_a_forked_helper_is_ended_by_a_signal_and_the_run_is_not() -> None:
    assert run_ranks(helper_process, 1, process_group=False) == [(-signal.SIGTERM, False)]


@pytest.mark.slow
def test_a_job_that_is_started_again_in_the_store_of_a_launcher_finds_nothing_of_the_one_before(
    tmp_path: Path,
) -> None:
    """Elastic torchrun: where a node comes or goes, the store stays, and the count of restarts too."""
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)

    def before(_rank: int) -> None:
        os.environ.update(
            TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0", MASTER_PORT=str(port)
        )

    def stopped(rank: int) -> None:
        before(rank)
        in_step(2, 0, signal.SIGTERM)(rank)

    batch = "--training.global_batch_size 8 --training.batch_size 2"
    assert Forked.start(tiny(tmp_path, batch), 2, stopped).wait() == [STOPPED] * 2
    assert "resumed     after step 2" in run(tiny(tmp_path, batch, steps=6), 4, before)
    assert "resumed     after step 6" in run(tiny(tmp_path, batch, steps=7), 2, before)
    del store
