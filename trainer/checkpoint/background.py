"""Saving while training goes on: the tensors are copied to the host, and a thread writes the copy.

The copy is made in the order of the device's own work, so it holds what the tensors were at the call, whatever is
done to them afterwards. On CUDA with page-locked memory nobody waits for it but the thread that writes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.checkpoint.state import StateDict


class HostCopies:
    """Copies of tensors in the host's memory, which is kept from save to save: to get it takes longer than to copy."""

    def __init__(self, device: torch.device, *, pinned: bool) -> None:
        """`pinned`: page-locked memory, if `device` is one that this helps."""
        self._pin = pinned and device.type == "cuda"
        self._kept: dict[tuple[str, str], Tensor] = {}
        self._device = device

    def copy(self, tensors: StateDict) -> tuple[StateDict, Callable[[], None]]:
        """The copies, and what to call before they are read. Overwrites those of the call before."""
        copies = {
            section: {name: self._copy((section, name), tensor) for name, tensor in of_section.items()}
            for section, of_section in tensors.items()
        }
        if self._device.type != "cuda":
            return copies, _nothing
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(self._device))
        return copies, copied.synchronize

    def _copy(self, key: tuple[str, str], tensor: Tensor) -> Tensor:
        if isinstance(tensor, DTensor):
            local = self._copy(key, tensor._local_tensor)
            return DTensor(local, tensor._spec, requires_grad=False)
        source = tensor.detach()
        kept = self._kept.get(key)
        if kept is None or kept.shape != source.shape or kept.dtype != source.dtype:
            kept = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=self._pin)
            self._kept[key] = kept
        return kept.copy_(source, non_blocking=self._pin)


class Background:
    """One piece of work on a thread of its own, at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[], None]) -> None:
        """Begin; only after `wait`."""
        assert self._thread is None, "the work before has not been waited for"
        # A daemon: where a process ends for another reason, it does not stay to write a checkpoint.
        self._thread = threading.Thread(target=self._run, args=(work,), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until the work that was started, if any, is done. Raises what it raised."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, work: Callable[[], None]) -> None:
        try:
            with torch.no_grad():
                work()
        except BaseException as error:  # raised where the work is waited for
            self._error = error


def _nothing() -> None: ...
