"""The network interface on which ranks of several hosts talk: the one by which the other hosts are reached."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Mapping

from trainer.cluster.ranks import NODES

_SIOCGIFADDR = 0x8915  # linux/sockios.h: the address of an interface
_ANYWHERE = "192.0.2.1"  # a documentation address (RFC 5737), to ask for the route by default


def interface_variables(environment: Mapping[str, str], configured: str | None) -> dict[str, str]:
    """GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME for this process, unless they are set or all ranks are on one host.

    `configured`: the interface's name, if it is not to be found out.
    """
    world_size, local = environment.get("WORLD_SIZE", "1"), environment.get("LOCAL_WORLD_SIZE")
    if world_size == "1" or local in (None, world_size):
        return {} if configured is None else _variables(environment, configured)
    name = configured or _interface_to(_peer(environment))
    return {} if name is None else _variables(environment, name)


def _variables(environment: Mapping[str, str], name: str) -> dict[str, str]:
    # NCCL takes any interface whose name begins so, unless told by "=" that this is the whole name.
    wanted = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
    return {key: value for key, value in wanted.items() if key not in environment}


def _peer(environment: Mapping[str, str]) -> str:
    """A host that is not this one, where any is known."""
    here = socket.gethostname().split(".")[0]
    hosts = [*filter(None, environment.get(NODES, "").split(",")), environment.get("MASTER_ADDR", "")]
    return next((host for host in hosts if host and host.split(".")[0] != here), _ANYWHERE)


def _interface_to(host: str) -> str | None:
    """The name of the interface by which packets to a host leave; None if there is no route, or only to oneself."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # of a datagram socket: looks up the route and sends nothing
            own = probe.getsockname()[0]
    except OSError:
        return None
    return next((name for name, address in _addresses().items() if address == own and name != "lo"), None)


def _addresses() -> dict[str, str]:
    """The IPv4 address of each interface that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", os.fsencode(name)[:15])
            try:
                answer = fcntl.ioctl(query.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found
