"""Which cores a process runs on: those that are nearest to its GPU, or those of its NUMA domain, in equal parts.

Memory of another domain takes longer to reach, and a process that wanders leaves its memory behind. On a machine with
one domain and no GPU nothing is bound: the system's own choice is as good.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

_FEWEST = 2  # cores; processes whose parts would be smaller share all cores of their domain


@dataclass(frozen=True)
class Domain:
    """A NUMA domain, with those of its cores that this job may use; threads of one core are neighbours."""

    number: int
    cores: tuple[int, ...]


def bind(local_rank: int, local_size: int, pci_address: str | None) -> None:
    """Bind this process, one of `local_size` on this host. `pci_address`: of its GPU, e.g. 0000:17:00.0."""
    if len(os.sched_getaffinity(0)) * local_size <= (os.cpu_count() or 1) and local_size > 1:
        return  # SLURM, or who else started it, has given it its part
    domains = read_domains()
    near = None if pci_address is None else domain_of_device(pci_address)
    chosen = choose_cores(domains, local_rank, local_size, near)
    if not chosen:
        return
    try:
        os.sched_setaffinity(0, chosen)
    except OSError as error:
        logger.warning("not bound to cores %s: %s", chosen, error)
        return
    logger.info("bound to cores %s", ",".join(map(str, chosen)))


def choose_cores(
    domains: Sequence[Domain], local_rank: int, local_size: int, near: int | None
) -> tuple[int, ...]:
    """The cores of a process; none if it is not to be bound.

    Without a GPU, or if its domain is not known, processes are dealt to domains in blocks. Processes of one domain
    divide its cores as if all that can be there were: without talking to the others nobody knows how many are.
    """
    if len(domains) < 2 and near is None:
        return ()
    place = local_rank * len(domains) // local_size
    domain = next((each for each in domains if each.number == near), domains[place])
    first = -(-place * local_size // len(domains))
    here = (
        -(-(place + 1) * local_size // len(domains)) - first
    )  # processes of a domain, if they are dealt in blocks
    if domain is not domains[place] or len(domain.cores) < _FEWEST * here:
        return domain.cores
    share = len(domain.cores) // here
    position = local_rank - first
    return domain.cores[position * share : (position + 1) * share]


def read_domains(system: Path = Path("/sys/devices/system")) -> tuple[Domain, ...]:
    """The NUMA domains that have cores on which this process may run."""
    allowed = os.sched_getaffinity(0)
    found = []
    for folder in sorted((system / "node").glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        cores = [core for core in _read_list(folder / "cpulist") if core in allowed]
        if cores:
            siblings = {core: min(_threads(system, core), default=core) for core in cores}
            found.append(
                Domain(int(folder.name[4:]), tuple(sorted(cores, key=lambda core: (siblings[core], core))))
            )
    return tuple(found)


def domain_of_device(pci_address: str, bus: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """The NUMA domain that a device is attached to; None if that is not known."""
    try:
        number = int((bus / pci_address.lower() / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return number if number >= 0 else None


def _threads(system: Path, core: int) -> list[int]:
    return _read_list(system / "cpu" / f"cpu{core}" / "topology" / "thread_siblings_list")


def _read_list(path: Path) -> list[int]:
    """A list of cores as the kernel writes it, e.g. 0-3,8."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return []
    numbers: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers
