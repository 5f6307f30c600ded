"""Modules that compute with this rank's parts of their parameters, under the parameters' own names.

Where a parameter is divided among ranks that compute with different parts of it (tensor and expert parallelism), the
module keeps it as a DTensor, for the optimizer, the norm and checkpoints, and its forward, which knows nothing of
that, finds a plain tensor: this rank's part, from which autograd leads back to the DTensor.

The compiler follows this too, but not where it also chooses what to recompute (it then takes meshes for tensors,
seen in torch 2.13); so parts are taken before a compiled layer, and it meets plain tensors only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallelisms.layout import EXPERT_SHARD, FSDP, REPLICATE

_DATA_PARALLEL = frozenset({REPLICATE, FSDP, EXPERT_SHARD})

Rows = tuple[int, int]
"""First row, and how many."""


def find_parts(module: nn.Module, parameters: Mapping[str, Rows | None]) -> None:
    """Let `module` find its parts of the named parameters of its own, or only some rows of a part."""
    module.__class__ = _finding(type(module), tuple(parameters.items()))  # type: ignore[arg-type]
    module._taken_parts = dict.fromkeys(parameters)  # type: ignore[assignment]


@cache
def _finding(kind: type[nn.Module], parameters: tuple[tuple[str, Rows | None], ...]) -> type[nn.Module]:
    """The class of modules that find these parts: one for all that are alike, so that they are compiled once."""
    found = {name: property(_PartOf(name, rows)) for name, rows in parameters}
    return type(f"Part{kind.__name__}", (kind,), found)


@contextmanager
def parts_taken(module: nn.Module) -> Iterator[None]:
    """While open, the modules in `module` find the parts that were taken at its beginning."""
    owners = [(child, _taken(child)) for child in module.modules() if hasattr(child, "_taken_parts")]
    for child, taken in owners:
        taken.update({name: getattr(child, name) for name in taken})
    try:
        yield
    finally:
        for _, taken in owners:
            taken.update(dict.fromkeys(taken))


def _taken(module: nn.Module) -> dict[str, Tensor | None]:
    parts: dict[str, Tensor | None] = module._taken_parts  # type: ignore[assignment]
    return parts


class _PartOf:
    """A module's parameter as this rank computes with it: a plain tensor, whose gradient goes to the parameter."""

    def __init__(self, name: str, rows: Rows | None) -> None:
        self._name = name
        self._rows = rows

    def __call__(self, module: nn.Module) -> Tensor:
        taken = _taken(module)[self._name]
        if taken is not None:
            return taken
        parameter = module._parameters[self._name]
        assert isinstance(parameter, DTensor)
        if not _DATA_PARALLEL.isdisjoint(parameter.device_mesh.mesh_dim_names or ()):
            return parameter  # still sharded over data-parallel ranks too: FSDP itself asks
        part = parameter.to_local(grad_placements=parameter.placements)
        return part if self._rows is None else part.narrow(0, *self._rows)
