"""Adam and AdamW whose moments are kept in bfloat16: half of their memory.

The update itself is torch's, in float32, on a few parameters at a time: their moments are widened before and rounded
to nearest after. DeepSeek-V3 (arXiv 2412.19437, section 3.3.2) trained so. Rounding to nearest, and not at random, so
that the update does not depend on how parameters are spread over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adam import adam

# Numbers whose moments are in float32 at a time.
_WIDENED = 16 * 2**20


class ReducedAdam(torch.optim.Optimizer):
    """torch's Adam (or AdamW, with `decoupled`), with moments in `state_dtype`. The same names in a checkpoint."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        decoupled: bool,
        state_dtype: torch.dtype,
        fused: bool = False,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._decoupled = decoupled
        self._state_dtype = state_dtype
        self._fused = fused

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of all parameters that have gradients."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameters in _few_at_a_time(each for each in group["params"] if each.grad is not None):
                self._update(parameters, group)
        return loss

    def _update(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        states = [self._state_of(parameter) for parameter in parameters]
        kept = {name: [_local(state[name]) for state in states] for name in ("exp_avg", "exp_avg_sq")}
        wide = {name: [moment.float() for moment in moments] for name, moments in kept.items()}
        adam(
            [_local(parameter) for parameter in parameters],
            [_local(parameter.grad) for parameter in parameters if parameter.grad is not None],
            wide["exp_avg"],
            wide["exp_avg_sq"],
            [],
            [state["step"] for state in states],
            foreach=not self._fused,
            fused=self._fused,
            decoupled_weight_decay=self._decoupled,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for name, moments in kept.items():
            torch._foreach_copy_(moments, wide[name])

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            device = parameter.device if self._fused else torch.device("cpu")
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=self._state_dtype)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=self._state_dtype)
        return state


def _few_at_a_time(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    few: list[nn.Parameter] = []
    numbers = 0
    for parameter in parameters:
        few.append(parameter)
        numbers += _local(parameter).numel()
        if numbers >= _WIDENED:
            yield few
            few, numbers = [], 0
    if few:
        yield few


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
