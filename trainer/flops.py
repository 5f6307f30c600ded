"""Peak speeds of known accelerators, for the model FLOPs utilisation.

A device is known if its whole name is: a part of a card (MIG), a variant or a successor has other peaks, and a
utilisation that is computed with the peak of another device is worse than none.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_MEMORY = r"( \d+GB)?"

# Dense matrix products in bf16 and fp16 with fp32 accumulation, FLOPs per second, from the makers' data sheets
# (half of the figure "with sparsity" where only that is given), by the full name that the driver reports.
_PEAKS: tuple[tuple[str, float], ...] = (
    # Nvidia data centre
    (r"(NVIDIA )?A100-(SXM4|PCIE)(-\d+GB)?|NVIDIA A100 80GB PCIe|NVIDIA A800-SXM4-80GB", 312e12),
    (rf"NVIDIA H100{_MEMORY} HBM3|NVIDIA H800", 989.4e12),
    (r"NVIDIA H100 PCIe", 756e12),
    (r"NVIDIA H100 NVL|NVIDIA H200 NVL", 835.5e12),
    (r"NVIDIA H200|NVIDIA GH200 (480GB|120GB|144G HBM3e)", 989.4e12),
    (r"NVIDIA B200", 2250e12),
    (r"NVIDIA GB200", 2500e12),
    (r"NVIDIA A10", 125e12),
    (r"NVIDIA A10G", 70e12),
    (r"NVIDIA A30", 165e12),
    (r"NVIDIA A40", 149.7e12),
    (r"NVIDIA L4", 121e12),
    (r"NVIDIA L40", 181.05e12),
    (r"NVIDIA L40S", 362.05e12),
    # Nvidia desktop, from the architecture white papers
    (r"NVIDIA GeForce RTX 3090", 71e12),
    (r"NVIDIA GeForce RTX 4090", 165.2e12),
    (r"NVIDIA GeForce RTX 5090", 209.5e12),
    # AMD; of an MI250X a rank gets one of the two dies
    (r"AMD Instinct MI250X", 191.5e12),
    (r"AMD Instinct MI300A", 980.6e12),
    (r"AMD Instinct MI300X( OAM)?", 1307.4e12),
    (r"AMD Instinct MI325X( OAM)?", 1307.4e12),
    (r"AMD Instinct MI355X( OAM)?", 2516.6e12),
)


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Peak of a device for matrix products of a type ("bfloat16", ...); None where it is not known.

    fp32 has none: whether its products run on the tensor cores depends on settings.
    """
    if device.type != "cuda" or dtype not in {"bfloat16", "float16"}:
        return None
    import torch

    return peak_flops_of(torch.cuda.get_device_name(device))


def peak_flops_of(name: str) -> float | None:
    """Peak of a device for bf16 and fp16 by its full name; None unless the name is one that is known."""
    return next((peak for pattern, peak in _PEAKS if re.fullmatch(pattern, name.strip())), None)
