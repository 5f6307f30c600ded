"""The learning rate as a pure function of the step: warm-up, stable, decay.

    rate
    1.0        ______________
              /              \\
             /                \\       linear, sqrt or cosine
    min     /                  \\___
            |<- W ->|<-- .. -->|<- D ->|        steps 1 .. N

The shape, its rounding included, is torchtitan's, so that a configuration of it trains with the same rates:
update k of the warm-up has k / (W + 1); the decay would reach its minimum at the step after the last, so that
the last update still moves the weights when the minimum is 0. Warm-up-stable-decay is of Hu et al. 2024
(MiniCPM, arXiv 2404.06395, section 4); the square-root decay of Hägele et al. 2024 (arXiv 2405.18392).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.optim import Optimizer

# What is left of the rate after the fraction x of the decay, from 1 at x = 0 to 0 at x = 1.
_DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda x: 1.0 - x,
    "sqrt": lambda x: 1.0 - math.sqrt(x),
    "cosine": lambda x: 0.5 * (1.0 + math.cos(math.pi * x)),
}


@dataclass(frozen=True)
class LearningRateShape:
    """Warm-up, stable and decay of a run.

    Attributes:
        steps: N, updates of the whole run.
        warmup_steps: W, updates before the full rate.
        decay_ratio: fraction of the steps that decay; None: all after the warm-up. What does not fit
            beside the warm-up is cut off, so warm-up and decay never overlap.
        decay_type: "linear", "sqrt" or "cosine".
        min_factor: factor that the decay tends to, in [0, 1].
    """

    steps: int
    warmup_steps: int = 0
    decay_ratio: float | None = None
    decay_type: str = "linear"
    min_factor: float = 0.0

    @property
    def decay_steps(self) -> int:
        """D: over how many steps the rate falls, the one after the last included."""
        room = max(0, self.steps - self.warmup_steps)
        return room if self.decay_ratio is None else min(room, round(self.steps * self.decay_ratio))


def lr_factor(step: int, shape: LearningRateShape) -> float:
    """What the base rate is multiplied by at update `step`, counted from 1.

    Defined for every step, also beyond the last, where it stays at the minimum.
    """
    if step <= shape.warmup_steps:
        return step / (shape.warmup_steps + 1)
    falling = step - 1 - (shape.steps - shape.decay_steps)
    if falling <= 0:
        return 1.0
    # Without a decay (D = 0) only steps after the last arrive here.
    fraction = min(1.0, falling / shape.decay_steps) if shape.decay_steps else 1.0
    return shape.min_factor + (1.0 - shape.min_factor) * _DECAYS[shape.decay_type](fraction)


class Schedule:
    """Sets the optimizer's learning rates; its only state is the number of steps made.

    The rate of every update follows from that number and the configuration alone, so a resumed run has the
    same rates as one that was never interrupted, bit for bit.
    """

    def __init__(self, optimizer: Optimizer, base_lr: float, shape: LearningRateShape) -> None:
        self._optimizer = optimizer
        self._base_lr = base_lr
        self._shape = shape
        self._steps_made = 0
        self._apply()

    @property
    def lr(self) -> float:
        """The rate of the next update."""
        return self._base_lr * lr_factor(self._steps_made + 1, self._shape)

    def step(self) -> None:
        """Call once after each training step, also after one whose update was skipped."""
        self._steps_made += 1
        self._apply()

    def state_dict(self) -> dict[str, int]:
        return {"steps_made": self._steps_made}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps_made = int(state["steps_made"])
        self._apply()

    def _apply(self) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self.lr
