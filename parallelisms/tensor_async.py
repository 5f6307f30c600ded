"""Asynchronous tensor parallelism: the compiler cuts matrix products into parts that overlap with what ranks exchange.

A gather of a block's input and the product that follows it, or a product and the sum that scatters it, become one
operation: while a part is multiplied the next one travels (Wang et al. 2023, Overlap Communication with Dependent
Computation via Decomposition, ASPLOS, https://doi.org/10.1145/3567955.3567959). Torch's compiler has this for CUDA,
over memory that the ranks of a group map into each other's address space.
"""

from __future__ import annotations

from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.distributed.device_mesh import DeviceMesh


def overlap_tensor_parallelism(mesh: DeviceMesh) -> None:
    """Let layers that are compiled from now on overlap what the ranks of a tensor group exchange. CUDA only.

    Args:
        mesh: of one dimension, the tensor group.
    """
    import torch._inductor.config

    enable_symm_mem_for_group(mesh.get_group().group_name)
    torch._inductor.config._micro_pipeline_tp = True
