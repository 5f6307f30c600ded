"""One rank's process: its device, its process group, its watchdog, and how it ends."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from trainer import flight_recorder
from trainer.cluster.affinity import bind
from trainer.cluster.interfaces import interface_variables
from trainer.cluster.meeting import meet, reach
from trainer.cluster.ranks import NODES
from trainer.config.schema import Config
from trainer.errors import ConfigurationError, RankMissing, StoppedOnRequest
from trainer.plan.plan import Plan
from trainer.progress import Progress
from trainer.stop import StopRequest
from trainer.watchdog import Limits, Watchdog

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankIdentity:
    """Who this process is in the job, from the environment that torchrun, srun's wrapper or ours sets."""

    rank: int
    local_rank: int
    world_size: int

    @classmethod
    def from_environment(cls) -> RankIdentity:
        """A process that was started alone is rank 0 of 1. Raises ConfigurationError for half an environment."""
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        values = {name: os.environ.get(name) for name in names}
        if values["WORLD_SIZE"] is None and values["RANK"] is None:
            return cls(0, 0, 1)
        wrong = [name for name, value in values.items() if value is None or not value.isdecimal()]
        if wrong:
            raise ConfigurationError(
                "environment: "
                + ", ".join(f"{name} = {values[name]!r}" for name in wrong)
                + ": expected a number; "
                "start with ./run_train.sh or torchrun, which set RANK, LOCAL_RANK and WORLD_SIZE"
            )
        return cls(*(int(values[name] or 0) for name in names))


class RankProcess:
    """A context in which this process is a rank of the job.

    On entry the process group forms, the ranks compare their plans, and the watchdog starts. An error inside
    ends the process, and through the watchdog all other ranks.
    """

    def __init__(
        self,
        identity: RankIdentity,
        config: Config,
        plan: Plan,
        failure_record: Path,
        stop: StopRequest | None = None,
    ) -> None:
        self.rank = identity.rank
        self.world_size = identity.world_size
        self.device = _device(identity.local_rank)
        self._local_rank = identity.local_rank
        self.progress = Progress()
        self.stop = stop or StopRequest()
        self._comm = config.comm
        self._plan = plan
        self._failure_record = failure_record
        self._watchdog: Watchdog | None = None

    def before_last_words(self, call: Callable[[], None]) -> None:
        """Register what is done before the first cause of a failure is printed, such as clearing a live line."""
        assert self._watchdog is not None
        self._watchdog.before_last_words.append(call)

    def __enter__(self) -> Self:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self._comm.bind_processes:
            local_size = int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))
            bind(self._local_rank, local_size, _pci_address(self.device))
        self._failure_record.unlink(missing_ok=True)
        store = self._connect()
        limits = Limits(self._comm.init_timeout_seconds, self._comm.train_timeout_seconds)
        self._watchdog = Watchdog(
            store, self.rank, self.world_size, self.progress, limits, self._failure_record
        )
        self._watchdog.start()
        self.stop.end_with(self._watchdog.end_with)
        try:
            self._compare_plans()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._watchdog is not None
        if error is not None and not isinstance(error, StoppedOnRequest):
            self._watchdog.end_with(error)
        # All ranks come here together: at the end of training, or since they agreed to stop.
        self.progress.phase("ending", collective=True)
        dist.barrier()
        self._watchdog.stop()
        dist.barrier()  # the store, on rank 0, is there until all watchdogs have taken their leave
        dist.destroy_process_group()
        gc.enable()

    def _connect(self) -> Store:
        """Form the process group; returns a connection to its store for the watchdog alone."""
        host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "0"))
        timeout = timedelta(seconds=self._comm.init_timeout_seconds)
        hosted_elsewhere = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        serve = self.rank == 0 and not hosted_elsewhere
        # A restart under torchrun finds the keys of the attempt before in the same store.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if not (serve or hosted_elsewhere):
            reach(host, port, self._comm.init_timeout_seconds)
        world_size = None if hosted_elsewhere else self.world_size
        try:
            store = TCPStore(host, port, world_size, serve, timeout, wait_for_workers=False)
        except dist.DistNetworkError as error:
            first = str(error).partition("\n")[0]
            raise RankMissing(
                f"rank {self.rank} cannot meet the others at {host}, port {port}: {first}"
            ) from error
        if hosted_elsewhere:
            # Where nodes come or go, torchrun starts the job again without counting that as a restart.
            joined = store.add(f"stageline/joined/{attempt}/{self.world_size}", 1) - 1
            attempt = f"{attempt}.{self.world_size}.{joined // self.world_size}"
        prefixed = PrefixStore(f"stageline/{attempt}", store)
        hosts = [host for host in os.environ.get(NODES, "").split(",") if host]
        meet(prefixed, self.rank, self.world_size, hosts, self._comm.init_timeout_seconds)
        os.environ.update(interface_variables(os.environ, self._comm.interface))
        flight_recorder.enable(self._comm.trace_buf_size)
        backend = "cuda:nccl,cpu:gloo" if self.device.type == "cuda" else "gloo"
        # The watchdog ends a job that stands still long before the backend's own timeout.
        patience = timedelta(
            seconds=2 * max(self._comm.init_timeout_seconds, self._comm.train_timeout_seconds)
        )
        dist.init_process_group(
            backend,
            store=prefixed,
            rank=self.rank,
            world_size=self.world_size,
            timeout=patience,
            device_id=self.device if self.device.type == "cuda" else None,
        )
        own_connection = store.clone()  # type: ignore[attr-defined]
        return PrefixStore(f"watchdog/{attempt}", own_connection)

    def _compare_plans(self) -> None:
        """Raise ConfigurationError on every rank if the ranks' plans differ: which ranks, and in what."""
        mine = dict(self._plan.digests)
        everyone: list[dict[str, str]] = [{} for _ in range(self.world_size)]
        dist.all_gather_object(everyone, mine)
        different = [rank for rank, digests in enumerate(everyone) if digests != everyone[0]]
        if not different:
            return
        sections = [
            name for name in mine if any(everyone[rank].get(name) != everyone[0][name] for rank in different)
        ]
        raise ConfigurationError(
            f"ranks {', '.join(map(str, different))} were started with another configuration than rank 0: their plans "
            f"differ in {', '.join(sections)}; start all ranks with the same file and the same options"
        )


def _device(local_rank: int) -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    return torch.device("cpu")


def _pci_address(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    found: Any = torch.cuda.get_device_properties(device)
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
