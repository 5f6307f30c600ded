"""One matrix in two stages: an output that is tied to an embedding of another stage.

The last stage holds a copy of the embedding's matrix (models/tied.py), which starts with the same values. The matrix's
gradient is the sum of the gradients of both (Press and Wolf 2017, arXiv 1608.05859; Megatron-LM keeps such copies as
well: Narayanan et al. 2021, arXiv 2104.04473). The optimizer finds that sum at both, so it makes the same update of
both, and they stay equal bit for bit.

The ranks of the two stages that have the same place within their stage hold the same part of the matrix, however it
is sharded: they add what they hold, pair by pair. A rank that has both stages adds for itself.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from models.tied import MATRIX
from parallelisms.pipeline.stage import Stage


class TiedEmbedding:
    """The matrix as one of the ranks has it that own the first or the last stage.

    Attributes:
        peer: the global rank that has the other copy; None if this rank has both.
    """

    def __init__(
        self, first: Stage | None, last: Stage | None, owners: tuple[int, int], device: torch.device
    ) -> None:
        """Collective over the owners.

        Args:
            first: the stage with the embedding, if it is on this rank.
            last: the stage with the output, if it is on this rank.
            owners: the global ranks of this pipeline that own them.
            device: where gradients are.
        """
        self._modules = [stage.module for stage in (first, last) if stage is not None]
        self._has_copy = last is not None
        self.peer: int | None = None
        self._pair: dist.ProcessGroup | None = None
        if owners[0] != owners[1]:
            self.peer = owners[first is not None]
            self._pair = dist.new_group(owners, use_local_synchronization=True)
            # The first message makes the connection, which takes its time: not in the first step.
            dist.all_reduce(torch.zeros(1, device=device), group=self._pair)

    @property
    def copy(self) -> nn.Parameter | None:
        """The last stage's, if it is here: what is counted over the whole model leaves it out."""
        return _matrix(self._modules[-1]) if self._has_copy else None

    @property
    def matrices(self) -> list[nn.Parameter]:
        """The copies that this rank has."""
        return [_matrix(module) for module in self._modules]

    def sum_gradients(self) -> None:
        """Give both copies the sum of their gradients, which are complete and reduced within their stage."""
        gradients = [_gradient(module) for module in self._modules]
        if not gradients[0].numel():  # a rank without a part of the matrix, and so is its peer
            return
        if self._pair is not None:
            dist.all_reduce(gradients[0], group=self._pair)
        else:
            first, last = gradients
            last.copy_(first.add_(last))


def _matrix(module: nn.Module) -> nn.Parameter:
    # Looked up at each use: FSDP exchanges parameters between sharded and gathered. Not by `get_parameter`, which finds
    # what the module computes with: with tensor parallelism, this rank's part.
    return dict(module.named_parameters())[MATRIX]


def _gradient(module: nn.Module) -> Tensor:
    gradient = _matrix(module).grad
    assert gradient is not None, "no microbatch has gone backwards through the stage"
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
