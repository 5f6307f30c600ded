"""The device mesh of a layout."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parallelisms.layout import Layout


def build_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """The mesh of all dimensions, by their names. Collective over all ranks; needs a process group."""
    names, degrees = zip(*layout.dimensions, strict=True)
    return init_device_mesh(device_type, degrees, mesh_dim_names=names)
