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
