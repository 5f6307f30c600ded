"""Ranks find each other, or say within seconds who is missing and why.

A host that is there but where nobody listens yet refuses a connection at once: its rank may still be starting, and
is waited for. A host that does not answer, has no route to it or no address is waited for a few seconds only.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from trainer.errors import RankMissing

_UNREACHABLE = 10.0  # seconds in which a host gives no sign of life, after which it counts as out of reach
_ATTEMPT = 3.0  # seconds for one connection
_PAUSE = 0.25
_AT_A_TIME = 8  # hosts that are asked for a sign of life


class KeyValues(Protocol):
    """What is needed of torch's Store."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...


def reach(host: str, port: int, patience: float) -> None:
    """Until somebody listens there. Raises RankMissing: after `patience` seconds, or soon if the host does not answer."""
    deadline = time.monotonic() + patience
    silent_since: float | None = None
    while True:
        problem = _problem(host, port)
        now = time.monotonic()
        if problem is None:
            return
        if problem == _REFUSED:
            silent_since = None
        elif silent_since is None:
            silent_since = now
        if now > deadline or (silent_since is not None and now - silent_since > _UNREACHABLE):
            raise RankMissing(f"{socket.gethostname()} cannot reach rank 0 on {host}, port {port}: {problem}")
        time.sleep(_PAUSE)


def meet(
    store: KeyValues,
    rank: int,
    world_size: int,
    hosts: Sequence[str],
    patience: float,
    probe: Callable[[str], str | None] | None = None,
) -> None:
    """Until all ranks are here; collective. Raises RankMissing, on rank 0 with who is missing.

    Args:
        store: what the ranks share.
        hosts: of the job, as far as they are known: one from which nobody has come is asked for a sign of life.
        patience: seconds to wait for ranks of which nothing is known.
        probe: says why a host does not answer, or None; for tests.
    """
    store.set(f"here/{rank}", socket.gethostname())
    if rank == 0:
        missing = _Missing(store, world_size, hosts, probe or _silence)
        store.set("met", missing.wait(patience))
    deadline = time.monotonic() + patience + _UNREACHABLE
    while not store.check(["met"]):
        if time.monotonic() > deadline:
            raise RankMissing(f"rank 0 did not hear of all ranks within {patience:.0f} s")
        time.sleep(_PAUSE / 5)
    if reason := store.get("met").decode():
        raise RankMissing(reason if rank == 0 else "")


class _Missing:
    """The ranks that have not come yet, as rank 0 sees it."""

    def __init__(
        self, store: KeyValues, world_size: int, hosts: Sequence[str], probe: Callable[[str], str | None]
    ) -> None:
        self._store = store
        self._ranks = set(range(world_size))
        self._hosts = {_short(host): host for host in hosts}  # from which nobody has come
        self._probe = probe
        self._silent: dict[str, float] = {}  # host -> since when
        self._next_look = 0.0

    def wait(self, patience: float) -> str:
        """Empty when all are here, else a sentence about who is not."""
        deadline = time.monotonic() + patience
        while True:
            self._look()
            if not self._ranks:
                return ""
            now = time.monotonic()
            if reason := self._out_of_reach(now):
                return reason
            if now > deadline:
                return f"{self._who()} within {patience:.0f} s{self._from_where()}"
            time.sleep(_PAUSE / 5)

    def _look(self) -> None:
        for rank in sorted(self._ranks):
            if self._store.check([f"here/{rank}"]):
                self._ranks.discard(rank)
                self._hosts.pop(_short(self._store.get(f"here/{rank}").decode()), None)

    def _out_of_reach(self, now: float) -> str:
        if now < self._next_look:
            return ""
        self._next_look = now + _PAUSE
        for host in list(self._hosts.values())[:_AT_A_TIME]:
            problem = self._probe(host)
            if problem is None:
                self._silent.pop(host, None)
            elif now - self._silent.setdefault(host, now) > _UNREACHABLE:
                return f"{host} cannot be reached from {socket.gethostname()}: {problem}; {self._who()}"
        return ""

    def _who(self) -> str:
        ranks = ", ".join(map(str, sorted(self._ranks)[:8])) + (", ..." if len(self._ranks) > 8 else "")
        return f"rank{'s' * (len(self._ranks) > 1)} {ranks} did not come"

    def _from_where(self) -> str:
        return f", and nobody from {', '.join(self._hosts.values())}" if self._hosts else ""


def _short(host: str) -> str:
    """Without the domain, which some know and others do not; an address as it is."""
    first = host.split(".")[0]
    return host if first.isdecimal() else first


_REFUSED = "nobody listens there"


def _problem(host: str, port: int) -> str | None:
    """Why a connection fails; None if it does not."""
    try:
        socket.create_connection((host, port), timeout=_ATTEMPT).close()
    except ConnectionRefusedError:
        return _REFUSED
    except socket.gaierror as error:
        return f"no address is known for this name ({error.strerror})"
    except TimeoutError:
        return "no answer"
    except OSError as error:
        if error.errno in (errno.ECONNRESET, errno.ECONNABORTED):
            return _REFUSED
        return error.strerror or str(error)
    return None


def _silence(host: str) -> str | None:
    """Why a host gives no sign of life. To refuse a connection is one."""
    problem = _problem(host, 1)
    return None if problem == _REFUSED else problem
