"""Who sits where: how the dimensions of a layout lie in nodes of several accelerators."""

from __future__ import annotations

from dataclasses import dataclass

from parallelisms.layout import EXPERT, Layout

_MEANING = {
    "pipeline": "stages, one after the other",
    "replicate": "copies of the model",
    "shard": "parameters cut and gathered (FSDP)",
    "context": "parts of every sequence",
    "tensor": "parts of every layer's matrices",
    "expert": "experts of every layer, over ranks of the above",
}


@dataclass(frozen=True)
class DimensionPlace:
    """Where the ranks of one group of a dimension sit.

    Attributes:
        name, degree: of the dimension.
        stride: neighbours of the group are so many global ranks apart.
        in_node: how many ranks of a group share a node.
    """

    name: str
    degree: int
    stride: int
    in_node: int

    @property
    def crosses_nodes(self) -> bool:
        return self.in_node < self.degree

    @property
    def meaning(self) -> str:
        """What the dimension is for."""
        return _MEANING[self.name]

    @property
    def where(self) -> str:
        """In words."""
        if self.degree == 1:
            return "one rank"
        apart = "neighbours" if self.stride == 1 else f"every {self.stride} ranks"
        if not self.crosses_nodes:
            return f"{apart}, inside a node"
        if self.in_node == 1:
            return f"{apart}, each in another node"
        return f"{apart}, {self.in_node} in a node"


@dataclass(frozen=True)
class Nodes:
    """A job's ranks in nodes of `gpus_per_node`; rank r sits in node r // gpus_per_node."""

    gpus_per_node: int
    count: int
    dimensions: tuple[DimensionPlace, ...]

    def place(self, name: str) -> DimensionPlace:
        """Where a dimension lies. Raises KeyError."""
        for place in self.dimensions:
            if place.name == name:
                return place
        raise KeyError(name)


def place_in_nodes(layout: Layout, gpus_per_node: int) -> Nodes:
    """Lay the ranks out in order, node after node; no list of all ranks is made."""
    stride, places, world = 1, [], layout.world_size
    for name, degree in reversed(layout.dimensions):
        places.append(DimensionPlace(name, degree, stride, _together(stride, degree, gpus_per_node, world)))
        stride *= degree
    if layout.expert > 1:
        in_node = _together(layout.tensor, layout.expert, gpus_per_node, world)
        places.insert(0, DimensionPlace(EXPERT, layout.expert, layout.tensor, in_node))
    return Nodes(gpus_per_node, -(-layout.world_size // gpus_per_node), tuple(reversed(places)))


def _together(stride: int, degree: int, gpus_per_node: int, world_size: int) -> int:
    """Ranks of a group that share a node, in a group that is cut by the end of one, if any is."""
    if world_size <= gpus_per_node or gpus_per_node % (stride * degree) == 0:
        return degree
    return max(1, min(degree - 1, gpus_per_node // stride))


def global_ranks(layout: Layout, pipeline_rank: int) -> tuple[int, int]:
    """First and last global rank at one place of the pipeline."""
    first = pipeline_rank * layout.ranks_of_a_stage
    return first, first + layout.ranks_of_a_stage - 1
