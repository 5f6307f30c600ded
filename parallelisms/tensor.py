"""Tensor parallelism with sequence parallelism, applied to a stage's untouched module.

The ranks of a tensor group hold parts of every matrix (parallelisms/tensor_plan.py says which) and compute on the same
tokens. Between the blocks of a layer each of them has its part of the sequence, (B, T / n, D): Korthikanti et al.
2022, Reducing Activation Recomputation in Large Transformer Models (arXiv 2205.05198), section 4.2.

    tokens (B, T) ─ embedding ─ sum and scatter ─► (B, T / n, D) ─ norm ─ gather ─► (B, T, D) ─ attention, with this
    rank's heads ─ sum and scatter ─► (B, T / n, D) ─ norm ─ gather ─► ... ─ norm ─ gather ─ output ─► (B, T, V / n)

Blocks gather what they get and scatter what they give by hooks, and modules find their rank's part of a parameter
under the parameter's name; so their forwards are the model's own. Every parameter is a DTensor over the tensor group.

What is not cut is used by each rank for its part of the sequence or of the heads: its gradient is a sum over the
group. Ranks add up their own shares through the whole step and exchange them once, at its end
(`sum_gradients_of_whole_parameters`), after data parallelism has reduced them, when they are smallest.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from models.layers.sequences import Sequences
from parallelisms.collectives import Group, gather, gather_same, scatter_sum
from parallelisms.layout import TENSOR
from parallelisms.parts import Rows, find_parts
from parallelisms.tensor_plan import BLOCKS, cut_dimension, is_by_key_heads

_SEQUENCE = 1  # dimension of hidden states (B, T, D)


def apply_tensor_parallelism(module: nn.Module, mesh: DeviceMesh, *, loss_parallel: bool = True) -> None:
    """Cut a stage's module, on the meta device, in place.

    Args:
        module: the model, or a stage of it.
        mesh: of one dimension.
        loss_parallel: logits stay cut by vocabulary, (B, T, V / n); else they are gathered.

    Raises:
        UnknownParameterError: it is not known how a parameter is cut.
    """
    group = Group.of(mesh)
    _cut_parameters(module, mesh)
    for layer in module.layers.values():  # type: ignore[operator]
        for block in (getattr(layer, name, None) for name in BLOCKS):
            if block is not None:
                _join_sequences(block, group)
                block.register_forward_hook(_ScatterSum(group))
    embedding, output = module.tok_embeddings, module.output
    if isinstance(embedding, nn.Embedding):
        _cut_embedding(embedding, group)
    module.register_forward_pre_hook(_WholeSequences(group))
    if isinstance(output, nn.Module):
        output.register_forward_pre_hook(_GatherSequence(group))
        if not loss_parallel:
            output.register_forward_hook(_GatherLogits(group))


def sum_gradients_of_whole_parameters(parameters: Iterable[nn.Parameter], mesh: DeviceMesh) -> None:
    """Sum over the tensor group the gradients of parameters that are not cut. Once a step, after the last backward.

    Collective over the group.
    """
    shares = [p.grad.to_local() for p in parameters if isinstance(p.grad, DTensor) and _is_whole(p.grad)]
    if not shares:
        return
    flat = torch.cat([share.flatten() for share in shares])
    device = flat.device
    flat = flat.to(mesh.device_type)  # gradients may be kept in the host's memory
    dist.all_reduce(flat, group=mesh.get_group())
    sums = flat.to(device).split([share.numel() for share in shares])
    torch._foreach_copy_(shares, [each.view_as(share) for each, share in zip(sums, shares, strict=True)])


def _is_whole(tensor: DTensor) -> bool:
    """Whether every rank of the tensor group holds the same part."""
    names = tensor.device_mesh.mesh_dim_names or ()
    return TENSOR in names and tensor.placements[names.index(TENSOR)].is_replicate()


# Parameters


def _cut_parameters(module: nn.Module, mesh: DeviceMesh) -> None:
    """Make all parameters DTensors, and let each module find its rank's part of them under their names."""
    owners = [(prefix, child) for prefix, child in module.named_modules() if child._parameters]
    for prefix, owner in owners:
        parent = module.get_submodule(prefix.rpartition(".")[0])
        parts: dict[str, Rows | None] = {}
        for name, parameter in owner._parameters.items():
            if parameter is None:
                continue
            heads = _key_heads(parameter, parent)
            cut = cut_dimension(f"{prefix}.{name}", mesh.size(), heads)
            placement: Placement = Replicate() if cut is None else Shard(cut)
            whole = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
            owner._parameters[name] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
            uses_one_head = cut is None and is_by_key_heads(f"{prefix}.{name}")
            parts[name] = _rows_of_head(parameter.shape[0], heads, mesh) if uses_one_head and heads else None
        if parts:
            find_parts(owner, parts)


def _key_heads(parameter: Tensor, attention: nn.Module) -> int | None:
    """How many heads the rows of one of an attention layer's matrices are; None elsewhere."""
    width = getattr(attention, "head_dim", None)
    return parameter.shape[0] // width if isinstance(width, int) and parameter.dim() else None


def _rows_of_head(rows: int, heads: int, mesh: DeviceMesh) -> Rows:
    """First row and number of rows of the key head that this rank's queries meet."""
    width = rows // heads
    return mesh.get_local_rank() * heads // mesh.size() * width, width


# Modules


class _VocabularyEmbedding(nn.Embedding):
    """An embedding of which each rank has some rows: (B, T) to this rank's part of the sequence (B, T / n, D)."""

    group: Group

    def forward(self, tokens: Tensor) -> Tensor:
        weight = self.weight
        place = tokens - self.group.rank * weight.shape[0]
        elsewhere = (place < 0) | (place >= weight.shape[0])
        h = F.embedding(place.masked_fill(elsewhere, 0), weight)
        h = h.masked_fill(elsewhere.unsqueeze(-1), 0)
        return scatter_sum(h, _SEQUENCE, self.group)


def _cut_embedding(embedding: nn.Embedding, group: Group) -> None:
    embedding.__class__ = type("CutVocabularyEmbedding", (_VocabularyEmbedding, type(embedding)), {})
    embedding.group = group  # type: ignore[assignment]


def _join_sequences(block: nn.Module, group: Group) -> None:
    """Let a block work on whole sequences: on what it gets or, in latent attention, on the latent vectors, which are
    smaller. The matrices that make these are not cut, and work on this rank's part of the sequence."""
    children = dict(block.named_children())
    latents = [children[name] for name in ("wq_a", "wkv_a") if name in children]
    if not latents:
        block.register_forward_pre_hook(_GatherSequence(group))
        return
    for child in latents:
        child.register_forward_hook(_GatherLatents(group))
    if "wq" in children:  # queries are made of the hidden state itself
        children["wq"].register_forward_pre_hook(_GatherSequence(group))


class _GatherSequence:
    """Before a module: whole sequences from this rank's part."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def __call__(self, _module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return gather(inputs[0], _SEQUENCE, self._group), *inputs[1:]


class _GatherLatents:
    """After a module: whole sequences of what it makes of this rank's part."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def __call__(self, _module: nn.Module, _inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        return gather(output, _SEQUENCE, self._group)


class _ScatterSum:
    """After a module: of the sum over the ranks, this rank's part of the sequence."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def __call__(self, _module: nn.Module, _inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        return scatter_sum(output, _SEQUENCE, self._group)


class _GatherLogits:
    """After the output: the whole vocabulary."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def __call__(self, _module: nn.Module, _inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        return gather_same(output, -1, self._group)


class _WholeSequences:
    """Before a stage that gets hidden states, a part of each sequence: without word of where tokens stand, they are one
    after the other in the whole of it."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def __call__(self, _module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x, sequences, *rest = (*inputs, None) if len(inputs) == 1 else inputs
        if sequences is None and x.is_floating_point():
            sequences = Sequences.in_order(x.shape[_SEQUENCE] * self._group.size, x.device)
        return x, sequences, *rest
