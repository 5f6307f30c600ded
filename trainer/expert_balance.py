"""Keeps the experts of every layer equally busy, the same in every layout.

Two published ways, each with a strength of its own, which `[training]` can change:

- a bias for each expert in the choice of experts, after every optimizer step raised where the expert had fewer tokens
  than the mean and lowered where it had more (Wang et al. 2024, Auxiliary-Loss-Free Load Balancing, arXiv 2408.15664;
  DeepSeek-V3, arXiv 2412.19437, section 2.1.2);
- a loss of each sequence that is least where its tokens are spread evenly (DeepSeek-V3, equations 17 to 20), of which
  only the gradient is brought in: the logged loss is that of the text.

Tokens are counted over the whole global batch: all microbatches, accumulation steps and ranks. Those of a tensor
group all count the same tokens, which multiplies every count alike and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from models.layers.router import Router
from models.mixture import Balancing
from trainer.checkpoint.names import full_name

if TYPE_CHECKING:
    from trainer.config.schema import Config
    from trainer.plan.plan import Plan

_GATE = ".moe.router.gate.weight"


def balancing_of(config: Config, sizes: Any) -> Balancing:
    """What the configuration says, or what the family was published with."""
    published = getattr(sizes, "balancing", Balancing())
    rate, loss = config.training.load_balance_rate, config.training.load_balance_loss
    return Balancing(
        rate=published.rate if rate is None else rate, loss=published.loss if loss is None else loss
    )


@dataclass(frozen=True)
class ExpertLoad:
    """How many tokens of a step the busiest expert of a layer had, over the mean of its experts: 1 is even.

    Attributes:
        mean: over the layers.
        worst: of the layer where it is most.
    """

    mean: float
    worst: float


@dataclass(frozen=True)
class ExpertCounts:
    """How many tokens of one step each expert had; equal on all ranks.

    Attributes:
        tokens: (layers with experts, experts) int64, on the device; rows of layers with fewer experts end with 0.
        experts: how many experts each of the layers has.
    """

    tokens: Tensor
    experts: tuple[int, ...]

    def load(self) -> ExpertLoad:
        """How unevenly the experts were used. Waits for the device."""
        experts = torch.tensor(self.experts, device=self.tokens.device)
        uses = self.tokens.sum(1).clamp(min=1)
        of_layer = self.tokens.max(1).values * experts / uses
        return ExpertLoad(mean=float(of_layer.mean()), worst=float(of_layer.max()))


class ExpertBalance:
    """The routers of this rank's stages, and which layers of the whole model have one."""

    def __init__(self, config: Config, plan: Plan, parts: Sequence[nn.Module], device: torch.device) -> None:
        balancing = balancing_of(config, plan.sizes)
        self._rate = balancing.rate
        self._experts = _experts_of_layers(plan.sizes)
        self._routers = {name: router for part in parts for name, router in _routers(part)}
        self._device = device
        # Each rank of a tensor group brings in the whole gradient, and these are summed.
        brought_in = plan.global_batch_size * plan.layout.tensor
        for router in self._routers.values():
            router.loss_per_sequence = balancing.loss / brought_in
            router.in_turn = config.training.debug_moe_force_load_balance

    @property
    def has_experts(self) -> bool:
        """Whether any layer of the model has."""
        return bool(self._experts)

    def update(self) -> ExpertCounts:
        """After an optimizer step: add up the counts of all ranks, change the biases, begin to count anew.

        Collective over all ranks; for models with experts. Waits for nothing on the device.
        """
        places = {name: place for place, name in enumerate(self._experts)}
        most = max(self._experts.values())
        counts = torch.zeros(len(places), most, dtype=torch.int64, device=self._device)
        for name, router in self._routers.items():
            counts[places[name], : self._experts[name]] = router.tokens_per_expert
        dist.all_reduce(counts)
        for name, router in self._routers.items():
            if router.expert_bias is not None and self._rate:
                own = counts[places[name], : self._experts[name]]
                # mean - count, times the number of experts so that it stays an integer: its sign is exact.
                router.expert_bias.add_((own.sum() - own * len(own)).sign(), alpha=self._rate)
        self.discard()
        return ExpertCounts(counts, tuple(self._experts.values()))

    def discard(self) -> None:
        """Forget what was counted, after a step that changed nothing."""
        for router in self._routers.values():
            router.tokens_per_expert.zero_()


def _experts_of_layers(sizes: Any) -> dict[str, int]:
    """How many experts each layer of the whole model has that has any, in order."""
    return {
        layer: shape[0]
        for layer in sizes.modules()
        for name, shape in sizes.parameter_shapes(layer).items()
        if name == f"{layer}{_GATE}"
    }


def _routers(part: nn.Module) -> Iterator[tuple[str, Router]]:
    """The routers of a stage by the name of their layer."""
    for name, module in part.named_modules():
        if isinstance(module, Router):
            yield full_name(name).removesuffix(".moe.router"), module
