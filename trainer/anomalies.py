"""Losses and gradients that are not as they should be, and what is done about them.

All ranks judge by the same numbers, reduced over all of them, so they decide the same without a word. What is
remembered (the last losses, how often) is among the loop's counters: a checkpoint has it, and a run that was
killed judges again as it did before.

A rollback takes parameters and optimizer from the last checkpoint, and goes on with the next step: the text since
the checkpoint is passed over (Chowdhery et al. 2022, PaLM, arXiv 2204.02311, section 5.1), while steps, learning
rate and the order of the data go on as planned. So no step comes twice, and step k still holds the same text.
"""

from __future__ import annotations

import logging
import math
import statistics
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from trainer.errors import TrainingFailed

if TYPE_CHECKING:
    from trainer.config.schema import Training

logger = logging.getLogger(__name__)


class Policy(StrEnum):
    """What is done about a step, before its update is made."""

    UPDATE = "warn"  # make it
    SKIP = "skip"
    ROLL_BACK = "rollback"
    STOP = "stop"


@dataclass(frozen=True)
class Verdict:
    """What is done about a step, and whether its loss is a spike."""

    policy: Policy
    spike: bool = False


class Anomalies:
    """The judge of each step. Equal on all ranks."""

    def __init__(self, training: Training, counters: dict[str, Any]) -> None:
        """`counters`: of the loop; `skipped_in_a_row`, `rollbacks` and `recent_losses` are kept there."""
        self._training = training
        self._counters = counters

    def judge(self, step: int, loss: float, grad_norm: float) -> Verdict:
        """What to do about a step. Says what is wrong, if anything.

        Raises:
            TrainingFailed: the policy is to stop, or what it tolerates is exceeded. The parameters are those from
                before the step.
        """
        training = self._training
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            what = f"step {step}: loss {loss}, gradient norm {grad_norm}: not finite"
            key, verdict = "nonfinite_policy", Verdict(Policy(training.nonfinite_policy))
        else:
            spike = self._is_spike(loss)
            what = (
                f"step {step}: loss {loss:.4f}, {spike:.2f} times the median of the losses before it: a spike"
            )
            key, verdict = "loss_spike_policy", Verdict(Policy(training.loss_spike_policy), spike=True)
            if not spike:
                verdict = Verdict(Policy.UPDATE)
        self._count(verdict, what, key)
        return verdict

    def _is_spike(self, loss: float) -> float:
        """The loss as a multiple of the usual one if it is a spike, else 0. It is part of what is usual from now on,
        spike or not: what goes on to be so is no spike."""
        threshold, window = self._training.loss_spike_threshold, self._training.loss_spike_window
        if threshold is None:
            return 0.0
        recent: list[float] = self._counters.setdefault("recent_losses", [])
        usual = statistics.median(recent[-window:]) if len(recent) >= window else math.inf
        recent.append(loss)
        del recent[:-window]
        return loss / usual if loss > threshold * usual else 0.0

    def _count(self, verdict: Verdict, what: str, key: str) -> None:
        training, counters = self._training, self._counters
        policy = verdict.policy
        if policy is Policy.UPDATE:
            counters["skipped_in_a_row"] = 0
            if verdict.spike:
                logger.warning("%s", what)
        elif policy is Policy.STOP:
            raise TrainingFailed(f"{what}; training.{key} = 'stop'; the parameters are those before the step")
        elif policy is Policy.SKIP:
            counters["skipped_in_a_row"] += 1
            if counters["skipped_in_a_row"] > training.max_nonfinite_steps:
                raise TrainingFailed(
                    f"{what}, {counters['skipped_in_a_row']} times in a row; "
                    f"training.max_nonfinite_steps = {training.max_nonfinite_steps}"
                )
            logger.warning("%s; the step is skipped", what)
        else:
            counters["rollbacks"] = counters.get("rollbacks", 0) + 1
            if counters["rollbacks"] > training.max_rollbacks:
                raise TrainingFailed(
                    f"{what}, after as many rollbacks as training.max_rollbacks = {training.max_rollbacks}"
                )
            logger.warning("%s; going back to the last checkpoint", what)
