"""What the kernel of attention needs beside the layers' activations."""

from __future__ import annotations

from dataclasses import dataclass

from models.activations import Kernels


@dataclass(frozen=True)
class AttentionPlan:
    """The configured kernel, whether documents that share a sequence are masked, and the model's sliding window."""

    kernel: str
    masks_documents: bool
    window: int | None = None

    def mask_bytes(self, seq_len: int, element: int, kernels: Kernels) -> int:
        """Bytes of a mask, which all layers of a stage share; `element` is those of a number.

        Of documents each sequence has one of its own, of a window all have one. What flash and flex attention are told
        instead of a matrix is too little to count.
        """
        best = "sdpa" if kernels is Kernels.CPU else "flex"
        kernel = best if self.kernel == "auto" else self.kernel
        masked = self.masks_documents or (self.window is not None and self.window < seq_len)
        return element * seq_len**2 if masked and kernel == "sdpa" else 0
