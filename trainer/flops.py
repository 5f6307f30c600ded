"""Peak speeds of known accelerators, for the model FLOPs utilisation."""

from __future__ import annotations

import torch

# Dense bf16 matrix products, FLOPs per second, from the makers' data sheets; by a part of the device's name.
# The first that matches counts, so a special model stands before the general one.
_BF16_PEAKS: tuple[tuple[str, float], ...] = (
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H200", 989e12),
    ("B200", 2250e12),
    ("A100", 312e12),
    ("A10G", 70e12),
    ("L40S", 362e12),
    ("MI300X", 1307e12),
    ("MI250X", 191.5e12),  # one of its two dies, which is what a rank gets
)


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Peak of the device for products of this data type; None where it is not known, never a guess."""
    if device.type != "cuda" or dtype != "bfloat16":
        return None
    return peak_flops_of(torch.cuda.get_device_name(device))


def peak_flops_of(name: str) -> float | None:
    """Peak of a device by its name, in bf16."""
    return next((peak for part, peak in _BF16_PEAKS if part in name), None)
