"""What the forward of a model's modules keeps for the backward, as plain arithmetic: no torch.

Counted are the tensors that autograd saves and that do not belong to the parameters, each storage once. How many
there are depends on the kernels: accelerators have a fused RMSNorm that keeps its input, the CPU's is
composed of small operations and keeps an fp32 copy of its input and the normalised one as well.
"""

from __future__ import annotations

from enum import Enum

from models.llama.activations import llama_module
from models.llama.sizes import LlamaSizes
from models.saved import Saved
from models.sizes import Sizes

__all__ = ["Kernels", "Saved", "saved_by"]


class Kernels(Enum):
    """Whose kernels run."""

    ACCELERATOR = "accelerator"  # fused norms, flash attention
    CPU = "cpu"  # composed norms, flash attention


def saved_by(sizes: Sizes, module: str, element: int, kernels: Kernels) -> Saved:
    """Bytes per token that a module keeps.

    Args:
        sizes: of the whole model.
        module: out of `sizes.modules()`.
        element: bytes of a number in the format in which the model computes (2 or 4).
        kernels: whose kernels run.

    Raises:
        TypeError: nothing is known of this family.
    """
    if isinstance(sizes, LlamaSizes):
        return llama_module(sizes, module, element, fused_norm=kernels is Kernels.ACCELERATOR)
    raise TypeError(f"what a model of {type(sizes).__name__} keeps for its backward is not known")
