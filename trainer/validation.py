"""Loss on held-out data, forward only, under the same schedule and layout as training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from trainer.build import Pipeline
from trainer.data.loader import Loader
from trainer.loss import counted_tokens, loss_of_microbatches
from trainer.microbatches import cut_into_microbatches
from trainer.plan.plan import ValidationPlan
from trainer.progress import Progress


@dataclass(frozen=True)
class LossSum:
    """The losses of so many tokens, added up."""

    total: float
    tokens: float

    @property
    def mean(self) -> float:
        return self.total / max(self.tokens, 1.0)


def validation_loss(
    pipeline: Pipeline,
    plan: ValidationPlan,
    loader: Loader,
    *,
    batches: int | None,
    device: torch.device,
    progress: Progress,
) -> LossSum:
    """Loss over the counted tokens of the first `batches` batches of every rank (None: all of the data).

    Collective over all ranks: the loader gives every rank the same number of batches, and every pipeline rank
    of one data-parallel rank the same batches. The same on all ranks.
    """
    assert pipeline.evaluator is not None
    # Sum of the losses, and number of tokens, over everything that this rank's pipeline has seen.
    total = torch.zeros(2, dtype=torch.float64, device=device)
    one = torch.ones((), device=device)
    owns_loss = any(stage.is_last for stage in pipeline.stages.values())
    with torch.no_grad():
        for batch in loader.from_start(batches):
            progress.phase("validation")
            cut = cut_into_microbatches(batch.to(device), plan.rows, pipeline.sequence_cut)
            loss = loss_of_microbatches(cut.labels, one, pipeline.vocabulary)
            total[0] += sum(pipeline.evaluator.run(cut.tokens, loss, sequences=cut.sequences))
            if owns_loss:
                total[1] += sum(map(counted_tokens, cut.labels))
    progress.phase("reducing validation loss", collective=True)
    dist.all_reduce(total)
    loss_sum, counted = total.tolist()
    return LossSum(loss_sum, counted)
