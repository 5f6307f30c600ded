"""What the kernel of attention needs beside the layers' activations."""

from __future__ import annotations

from dataclasses import dataclass

from models.activations import Kernels


@dataclass(frozen=True)
class AttentionPlan:
    """The configured kernel, and whether documents that share a sequence are masked."""

    kernel: str
    masks_documents: bool

    def mask_bytes(self, seq_len: int, element: int, kernels: Kernels) -> int:
        """Bytes of the mask of one sequence, which all layers of a stage share; `element` is those of a number.

        What flash and flex attention are told instead of a matrix is too little to count.
        """
        best = "sdpa" if kernels is Kernels.CPU else "flex"
        kernel = best if self.kernel == "auto" else self.kernel
        return element * seq_len**2 if self.masks_documents and kernel == "sdpa" else 0
