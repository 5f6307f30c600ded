"""The watchdog: whatever goes wrong on one rank ends all ranks within seconds, with the first cause said once.

A thread on every rank publishes what the rank is doing, looks after one neighbour's heartbeat, and watches its
own rank's progress. The first failure that is noticed anywhere is recorded in the store that the ranks share;
every rank sees it within half a second and ends itself. Waiting ranks are victims, not causes: the chain
of who waits for whom is followed to the rank that waits for nobody, or around the cycle.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from trainer import flight_recorder
from trainer.errors import ExitCode, StagelineError
from trainer.progress import Progress, Status
from trainer.secrets import redact, redact_all

logger = logging.getLogger(__name__)

_INTERVAL = 0.5  # seconds between two looks
_DEAD_AFTER = 10.0  # seconds without a heartbeat
_GRACE = 4.0  # seconds in which a rank that lost its peer waits for the peer's own word, or for others to end


@dataclass(frozen=True)
class Limits:
    """Seconds without progress after which a rank counts as stuck: at start-up and in patient phases, and else."""

    start_up: float
    training: float


@dataclass(frozen=True)
class Failure:
    """The first cause. `reporter` is the rank that prints it."""

    rank: int
    reporter: int
    reason: str
    status: str
    stack: str
    exit_code: int = ExitCode.RANK_FAILED

    def text(self) -> str:
        """The stack first, the reason last."""
        if self.exit_code != ExitCode.RANK_FAILED:
            return self.reason
        stack = f"{self.stack.rstrip()}\n" if self.stack else ""
        return f"{stack}stageline: rank {self.rank} {self.reason} ({self.status}); all ranks ended"


class Watchdog:
    """Start it right after the process group forms; `stop` it when the work is done."""

    def __init__(
        self, store: Store, rank: int, world_size: int, progress: Progress, limits: Limits, record: Path
    ):
        """`store`: this process's own connection. `record`: a file that receives the first cause as JSON."""
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._progress = progress
        self._limits = limits
        self._record = record
        self.before_last_words: list[Callable[[], None]] = []
        self._stopped = threading.Event()
        self._neighbour_beat: tuple[str, float] = ("", time.monotonic())
        self._main_thread = threading.main_thread().ident
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        # The first sign of life at once: a rank that never gave one is not missed.
        self._publish(0)
        self._thread.start()

    def stop(self) -> None:
        """The rank's work is done; its heartbeat may cease without alarm."""
        self._stopped.set()
        self._thread.join()
        self._store.set(f"done/{self._rank}", "1")

    def end_with(self, error: BaseException) -> None:
        """This rank raised: record it unless another rank was first, and end the process. Does not return.

        A StagelineError ends all ranks with its own exit code, and its message is all that is said.
        """
        self._stopped.set()
        self._thread.join()
        status = self._progress.status
        stack = "".join(traceback.format_exception(error))
        logger.debug("rank %d raised in %s\n%s", self._rank, status.sentence(), stack)
        reason, code = f"raised {type(error).__name__}: {_first_line(error)}", ExitCode.RANK_FAILED
        if isinstance(error, StagelineError):
            reason, stack, code = str(error), "", error.exit_code
        failure = Failure(self._rank, self._rank, reason, status.sentence(), stack, code)
        try:
            if _is_lost_connection(error):
                failure = self._who_died(failure)
            self._claim(failure)
            self._end(self._failure())
        except dist.DistError as lost:
            self._end_without_store(lost)

    def _who_died(self, lost: Failure) -> Failure:
        """This rank lost a connection, which is seldom the first cause: time for the rank that caused it to say
        so, or to show by its silence that it cannot. Otherwise `lost`."""
        self._store.set(f"ending/{self._rank}", "1")
        last = [self._beat_of(rank) for rank in range(self._world_size)]
        if self._wait_for("failure", _GRACE):
            return lost  # which is not the first one
        for rank, beat in enumerate(last):
            leaving = any(self._store.check([f"{word}/{rank}"]) for word in ("ending", "done"))
            if not leaving and self._beat_of(rank) == beat:
                status = self._published(rank)
                reason = f"died: rank {self._rank} lost the connection to it in {lost.status}"
                where = status.sentence() if status is not None else "not heard of"
                return replace(lost, rank=rank, reason=reason, status=where)
        return lost

    def _beat_of(self, rank: int) -> str:
        """What the rank published last; it changes with every beat. Empty if it never did."""
        key = f"status/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    # The thread

    def _watch(self) -> None:
        beats = 0
        while not self._stopped.wait(_INTERVAL):
            beats += 1
            try:
                self._look(beats)
            except dist.DistError as error:
                if not self._stopped.is_set():
                    self._end_without_store(error)
            except Exception as error:  # a rank without a watchdog could wait for ever
                stack = "".join(traceback.format_exception(error))
                reason = f"raised {type(error).__name__} in its watchdog: {_first_line(error)}"
                self._claim(Failure(self._rank, self._rank, reason, self._progress.status.sentence(), stack))
                self._end(self._failure())

    def _publish(self, beats: int) -> tuple[Status, float]:
        """Tell the other ranks what this one does, and for how many seconds."""
        status = self._progress.status
        age = time.monotonic() - status.since
        self._store.set(f"status/{self._rank}", json.dumps({"beat": beats, "age": age, **status.as_dict()}))
        return status, age

    def _look(self, beats: int) -> None:
        status, age = self._publish(beats)
        if self._store.check(["failure"]):
            self._end(self._failure())
        limit = self._limits.start_up if status.patient else self._limits.training
        # A waiting rank gives the rank that it waits for the time to speak first.
        if age > limit + (_GRACE if status.waiting else 0.0):
            self._report_stuck(status, age)
        self._look_after_neighbour()

    def _report_stuck(self, status: Status, age: float) -> None:
        rank, status_of_rank, chain = self._follow(status)
        reason = f"made no progress for {age:.0f} s"
        if chain:
            reason += f" [{chain}]"
        stack = _stack_of(self._main_thread) if rank == self._rank else ""
        self._claim(Failure(rank, rank, reason, status_of_rank.sentence(), stack))

    def _follow(self, status: Status) -> tuple[int, Status, str]:
        """From this rank along who waits for whom: the rank at the end, its status, and the way there."""
        rank, seen, steps = self._rank, {self._rank}, []
        while status.waiting:
            peer, what = status.peer, f"{status.waits_for} with "
            if peer is None:
                peer, what = self._missing_from(status), ""
            if peer is None:
                break
            steps.append(f"rank {rank} in {status.doing} waits for {what}rank {peer}")
            rank = peer
            published = self._published(rank)
            if published is None:
                steps.append(f"rank {rank} is not heard of")
                break
            status = published
            if rank in seen:
                steps.append("a cycle")
                break
            seen.add(rank)
        return rank, status, "; ".join(steps)

    def _missing_from(self, collective: Status) -> int | None:
        """The first rank that does something else in the step of a collective; None: no rank says so."""
        for rank in range(self._world_size):
            published = self._published(rank)
            if published is None or published.step > collective.step or published.doing == collective.doing:
                continue
            return rank
        return None

    def _published(self, rank: int) -> Status | None:
        if not (beat := self._beat_of(rank)):
            return None
        fields = json.loads(beat)
        fields.pop("beat"), fields.pop("age")
        return Status(**fields)

    def _look_after_neighbour(self) -> None:
        neighbour = (self._rank + 1) % self._world_size
        if neighbour == self._rank or not (beat := self._beat_of(neighbour)):
            return
        last, since = self._neighbour_beat
        if beat != last:
            self._neighbour_beat = (beat, time.monotonic())
        elif time.monotonic() - since > _DEAD_AFTER and not self._store.check([f"done/{neighbour}"]):
            status = self._published(neighbour) or self._progress.status
            reason = f"died (no sign of life for {_DEAD_AFTER:.0f} s)"
            self._claim(Failure(neighbour, self._rank, reason, status.sentence(), ""))

    # The end

    def _claim(self, failure: Failure) -> None:
        """Record the first cause; later ones change nothing."""
        self._store.compare_set("failure", "", json.dumps(asdict(failure)))

    def _failure(self) -> Failure:
        return Failure(**json.loads(self._store.get("failure")))

    def _end(self, failure: Failure) -> None:
        """The reporter waits for the others to end and prints; everybody leaves."""
        self._write_flight_recorder(failure)
        self._store.add("ended", 1)
        if self._rank == failure.reporter:
            deadline = time.monotonic() + _GRACE
            able = self._world_size - (failure.rank != self._rank)  # another rank's failure is its death
            while self._store.add("ended", 0) < able and time.monotonic() < deadline:
                time.sleep(0.05)
            if (
                not failure.stack
                and failure.rank == self._rank
                and threading.current_thread() is self._thread
            ):
                failure = replace(failure, stack=_stack_of(self._main_thread))
            self._print(failure)
            self._store.set("printed", "1")
        elif self._rank == 0:
            # Rank 0 may host the store: it stays until the reporter has spoken, and speaks if that one cannot.
            if not self._wait_for("printed", 2 * _GRACE):
                self._print(failure)
        else:
            logger.debug("ending: %s", failure.text())
        _leave(failure.exit_code)

    def _end_without_store(self, error: Exception) -> None:
        """The store is gone, and with it the rank that held it: there is nobody left to agree with."""
        logger.error("the shared store is gone: %s", error)
        status = self._progress.status.sentence()
        time.sleep(0.2 * (self._rank % 5))  # the lowest surviving rank speaks, as far as time can tell
        failure = Failure(0, self._rank, "died: the store that it holds cannot be reached", status, "")
        self._write_flight_recorder(failure)
        if not self._record.exists():
            self._print(failure)
        _leave(ExitCode.RANK_FAILED)

    def _print(self, failure: Failure) -> None:
        logger.debug("ending: %s", failure.text())
        if failure.exit_code != ExitCode.STOPPED_ON_REQUEST:  # which is no failure
            _call_bounded(lambda: self._write_record(failure))
        for call in self.before_last_words:
            _call_bounded(call)
        print(redact(failure.text()), file=sys.stderr, flush=True)

    def _write_record(self, failure: Failure) -> None:
        self._record.parent.mkdir(parents=True, exist_ok=True)
        self._record.write_text(json.dumps(redact_all(asdict(failure)), indent=1) + "\n")

    def _write_flight_recorder(self, failure: Failure) -> None:
        if failure.exit_code == ExitCode.RANK_FAILED:
            _call_bounded(lambda: flight_recorder.write(self._record.parent / "logs", self._rank))

    def _wait_for(self, key: str, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._store.check([key]):
                return True
            time.sleep(0.05)
        return False


def _is_lost_connection(error: BaseException) -> bool:
    """Whether an error is only the echo of another rank's end."""
    text = str(error).lower()
    return isinstance(error, dist.DistError | RuntimeError) and any(
        sign in text
        for sign in ("connection closed", "connection reset", "broken pipe", "remote process exited")
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]


def _stack_of(thread: int | None) -> str:
    frame: Any = sys._current_frames().get(thread) if thread is not None else None
    return "".join(traceback.format_stack(frame)) if frame is not None else ""


def _call_bounded(call: Callable[[], object]) -> None:
    """For at most a second: what is called may need a lock that the stuck main thread holds, or a disk that is
    full or does not answer; maybe that is what went wrong, and it must not keep the cause from being said."""

    def attempt() -> None:
        try:
            call()
        except OSError as error:
            logger.error("at the end: %s", error)

    helper = threading.Thread(target=attempt, daemon=True)
    helper.start()
    helper.join(timeout=1.0)


def _leave(code: int) -> None:
    """End now: other threads may hang in a collective that never returns."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
