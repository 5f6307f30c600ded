"""The states of all random generators of a process as JSON, and back.

JSON rather than pickled objects: reading a checkpoint must not run what somebody wrote into it.
"""

from __future__ import annotations

import base64
import json
import random

import numpy as np
import torch


def random_state_to_json(device: torch.device) -> str:
    """The generators of torch (CPU and `device`), Python and NumPy."""
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return json.dumps(
        {
            "torch": _encode(torch.get_rng_state()),
            "device": _encode(torch.cuda.get_rng_state(device)) if device.type == "cuda" else None,
            "python": random.getstate(),
            "numpy": [kind, [int(key) for key in keys], position, has_gauss, cached],
        }
    )


def restore_random_state(text: str, device: torch.device) -> None:
    """Set the generators to a state written by `random_state_to_json`."""
    state = json.loads(text)
    torch.set_rng_state(_decode(state["torch"]))
    if device.type == "cuda" and state["device"] is not None:
        torch.cuda.set_rng_state(_decode(state["device"]), device)
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode("ascii")


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
