"""Well-known accelerators: memory, peak, and how fast data leaves them.

Memory is what the driver reports for the whole device. The peak is that of dense bf16 matrix products. Bandwidths
are per accelerator and direction: to the others of its node (NVLink, Infinity Fabric, else PCIe), and to other
nodes with the network card that such machines usually have for each accelerator. Sources: the makers' data
sheets (dense figures, without sparsity) and the memory that their tools print.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from models.activations import Kernels
from trainer.errors import ConfigurationError

_MIB = 1024**2

# The share of the memory that a plan may fill: driver and libraries keep 1 to 2 GiB, collectives have buffers,
# and the allocator cannot use what lies between its blocks.
USABLE = 0.92


@dataclass(frozen=True)
class Accelerator:
    """One kind of accelerator; bytes, FLOPs per second, bytes per second. None: not known, never a guess."""

    name: str
    memory: int | None
    peak_flops: float | None
    intra_node_bandwidth: float | None
    inter_node_bandwidth: float | None
    aliases: tuple[str, ...] = ()
    kernels: Kernels = Kernels.ACCELERATOR


ACCELERATORS: tuple[Accelerator, ...] = (
    Accelerator("A100-40", 40960 * _MIB, 312e12, 300e9, 25e9, ("A100-40GB", "A100-SXM4-40GB")),
    Accelerator("A100-80", 81920 * _MIB, 312e12, 300e9, 25e9, ("A100", "A100-80GB", "A100-SXM4-80GB")),
    Accelerator("H100-SXM", 81559 * _MIB, 989.4e12, 450e9, 50e9, ("H100", "H100-80GB-HBM3")),
    Accelerator("H100-PCIe", 81559 * _MIB, 756e12, 64e9, 25e9),
    Accelerator("H200", 143771 * _MIB, 989.4e12, 450e9, 50e9),
    Accelerator("B200", 183359 * _MIB, 2250e12, 900e9, 50e9),
    Accelerator("MI300X", 196592 * _MIB, 1307.4e12, 448e9, 50e9),
    Accelerator("L40S", 46068 * _MIB, 362.05e12, 32e9, 25e9),
    Accelerator("A10", 23028 * _MIB, 125e12, 32e9, 12.5e9),
    Accelerator("CPU", None, None, None, None, kernels=Kernels.CPU),
)


def find_accelerator(name: str) -> Accelerator:
    """The accelerator of a name; case, spaces, hyphens and the maker's name do not matter.

    Raises ConfigurationError with the nearest name and all of them.
    """
    known = {_plain(each): item for item in ACCELERATORS for each in (item.name, *item.aliases)}
    wanted = _plain(name)
    if wanted in known:
        return known[wanted]
    nearest = difflib.get_close_matches(wanted, list(known), n=1, cutoff=0.4)
    hint = f"; did you mean {known[nearest[0]].name}?" if nearest else "."
    raise ConfigurationError(
        f"--accelerator {name}: not among those that are known{hint} "
        f"Known: {', '.join(item.name for item in ACCELERATORS)}"
    )


def _plain(name: str) -> str:
    return re.sub(r"[\s_\-]", "", name).lower().removeprefix("nvidia").removeprefix("amd")
