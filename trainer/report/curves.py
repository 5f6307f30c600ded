"""The curves of the page: loss, throughput, learning rate and gradient norm, over the steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer.report.chart import Chart, Line, Look, chart_data, common_steps, draw, legend
from trainer.report.html import Html, element
from trainer.report.run import Run
from trainer.report.series import Series
from trainer.report.widgets import section


def charts(runs: Sequence[Run]) -> tuple[Chart, ...]:
    """The charts, each with the lines of all runs."""
    names = [run.name if len(runs) > 1 else "" for run in runs]
    validated = any(run.curves.validation_loss.known for run in runs)

    def lines(pick: Sequence[Series]) -> tuple[Line, ...]:
        return tuple(Line(index, names[index], "", series) for index, series in enumerate(pick))

    loss = tuple(
        Line(index, names[index], "training" if validated else "", run.curves.loss)
        for index, run in enumerate(runs)
    )
    validation = tuple(
        Line(index, names[index], "validation", run.curves.validation_loss, Look.DOTTED)
        for index, run in enumerate(runs)
        if run.curves.validation_loss.known
    )
    return (
        Chart("loss", "Loss", "per token", loss + validation),
        Chart(
            "throughput",
            "Throughput",
            "tokens/s",
            lines([run.curves.tokens_per_second for run in runs]),
            from_zero=True,
        ),
        Chart(
            "lr",
            "Learning rate",
            "",
            lines([run.curves.lr for run in runs]),
            from_zero=True,
            noisy=False,
        ),
        Chart(
            "grad_norm",
            "Gradient norm",
            "before clipping",
            lines([run.curves.grad_norm for run in runs]),
            from_zero=True,
        ),
    )


def curves(runs: Sequence[Run], drawn: Sequence[Chart]) -> Html:
    """The section with the charts."""
    validated = any(run.curves.validation_loss.known for run in runs)
    steps = common_steps(drawn)
    return section(
        "curves",
        "Curves",
        legend([run.name for run in runs], validation=validated),
        element("div", *(draw(chart, steps) for chart in drawn), class_="charts"),
    )


def curves_data(drawn: Sequence[Chart]) -> dict[str, Any]:
    """The values behind the charts, for the script."""
    steps = common_steps(drawn)
    return {chart.key: chart_data(chart, steps) for chart in drawn}
