"""A port for the ranks to meet at."""

from __future__ import annotations

import random
import socket

# Below the ports that systems give to outgoing connections (Linux: from 32768): a connection made between the
# choice of a port and its use, by this job or by another, cannot take it.
_CANDIDATES = range(20_000, 32_000)


def free_port() -> int:
    """A port of this host that nobody listens on, drawn at random so that two jobs rarely draw the same."""
    generator = random.SystemRandom()
    while True:
        port = generator.choice(_CANDIDATES)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port


def job_port(job: int, step: int, attempt: int = 0) -> int:
    """A port that all ranks of a scheduler's job can work out by themselves.

    Steps of a job, and jobs whose numbers are less than 750 apart, have different ones. `attempt`: the next choice
    if somebody else listens there.
    """
    return _CANDIDATES[(16 * job + step % 16 + 7919 * attempt) % len(_CANDIDATES)]


def is_free(port: int) -> bool:
    """Whether nobody on this host listens on the port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
