"""The first part of the page: how far each run came and how well it does; what failed; what could not be read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainer.errors import ExitCode
from trainer.report.html import Html, element, joined
from trainer.report.ranking import ranking
from trainer.report.run import Run
from trainer.report.series import Series
from trainer.report.widgets import Fact, comparison, opens, section, tiles
from trainer.report.words import UNKNOWN, count, counted, figure, memory, share, time


def failures(runs: Sequence[Run]) -> Html:
    """A box for each run whose last start failed."""
    several = len(runs) > 1
    return joined(_failure(run, several) for run in runs if run.failure.members())


def summary(runs: Sequence[Run]) -> Html:
    """The key figures of the runs, and what could not be read of them."""
    columns = [list(_figures(run)) for run in runs]
    shown = tiles(columns[0]) if len(runs) == 1 else comparison([run.name for run in runs], columns)
    return section("summary", "Summary", shown, ranking(runs), _problems(runs))


def _figures(run: Run) -> Iterator[Fact]:
    curves = run.curves
    yield Fact("Progress", _progress(run))
    yield Fact("Loss", _last(curves.loss))
    if curves.validation_loss.known:
        yield Fact("Validation loss", _lowest(curves.validation_loss))
    yield Fact("Tokens", count(curves.tokens.last[1]) if curves.tokens.last else UNKNOWN)
    yield Fact("Throughput", _with_unit(figure(curves.tokens_per_second.median()), "tokens/s"))
    yield Fact("Time of a step", time(curves.step_seconds.median()))
    if curves.mfu.known:
        yield Fact("MFU", share(curves.mfu.median()))
    peak = max((value for _, value in curves.memory_bytes.known), default=None)
    yield Fact("Peak memory, rank 0", memory(peak))
    if curves.skipped:
        yield Fact("Skipped", counted(curves.skipped, "logged step", "logged steps"))


def _progress(run: Run) -> Html | str:
    last, planned = run.last_step, run.planned_steps
    if last is None:
        return "no step logged"
    return f"step {last:,}" if planned is None else _with_unit(f"{last:,}", f"of {planned:,} steps")


def _last(series: Series) -> Html | str:
    return UNKNOWN if series.last is None else _at(*series.last, word="")


def _lowest(series: Series) -> Html | str:
    return UNKNOWN if series.lowest is None else _at(*series.lowest, word="lowest, ")


def _at(step: int, value: float, word: str) -> Html:
    return joined([figure(value), " ", element("small", f"{word}step {step:,}")])


def _with_unit(value: str, unit: str) -> Html | str:
    return value if value == UNKNOWN else joined([value, " ", element("small", unit)])


def _failure(run: Run, several: bool) -> Html:
    failure = run.failure
    rank, code = failure["rank"].whole(), failure["exit_code"].whole()
    failed_rank = code in (None, ExitCode.RANK_FAILED)
    reason = failure["reason"].string() or "for a reason that its record does not tell"
    said = f"rank {rank} {reason}" if rank is not None and failed_rank else reason
    where = failure["status"].string()
    start = f"The last start of {run.name}" if several else "The last start"
    parts = [
        element(
            "strong",
            start + (" was stopped on request" if code == ExitCode.STOPPED_ON_REQUEST else " failed"),
        ),
        element("p", said + (f" ({where})" if where and failed_rank else "")),
    ]
    stack = failure["stack"].string()
    if stack:
        parts.append(opens("Stack", element("pre", stack)))
    return element("div", *parts, class_="box failed", role="alert")


def _problems(runs: Sequence[Run]) -> Html:
    lines = [
        element("li", f"{run.name}: {problem}" if len(runs) > 1 else problem)
        for run in runs
        for problem in run.problems
    ]
    if not lines:
        return Html()
    title = element("strong", "Not everything could be read")
    return element("div", title, element("ul", *lines), class_="box unread")
