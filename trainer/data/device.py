"""Batches that are on the device before they are asked for: copied while the step before computes.

The thread that makes batches also starts their copies, from page-locked memory on a stream of their own; the stream
that computes waits for the copy when the batch is taken, the host never does. Where there is no CUDA device, a batch
is copied when it is taken, which on the CPU is nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.data.loader import Batch


@dataclass(frozen=True)
class Travelling:
    """A batch on its way; `arrived` tells the device when it is there."""

    batch: Batch
    arrived: torch.cuda.Event | None = None


class Transfer:
    """Copies of batches to a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, batch: Batch) -> Travelling:
        """Start to copy; may be called by another thread than the one that computes."""
        if self._stream is None:
            return Travelling(batch)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            # A copy from ordinary memory would make the host wait.
            there = _each(batch, lambda tensor: tensor.pin_memory().to(self._device, non_blocking=True))
            return Travelling(there, self._stream.record_event())

    def take(self, travelling: Travelling) -> Batch:
        """The batch, for the stream that computes now."""
        if travelling.arrived is None:
            return travelling.batch.to(self._device)
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(travelling.arrived)
        for tensor in (travelling.batch.tokens, travelling.batch.labels, travelling.batch.documents):
            if tensor is not None:
                tensor.record_stream(computing)  # not to be reused by a copy before it has been read
        return travelling.batch


def _each(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """A batch of changed tensors."""
    documents = None if batch.documents is None else change(batch.documents)
    return Batch(change(batch.tokens), change(batch.labels), documents)
