"""The proposals of a search as text, with the reasons for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainer.plan.nodes import DimensionPlace
from trainer.plan.proposal import Proposal, SearchResult
from trainer.plan.speed import EFFICIENCY
from trainer.plan.tables import seconds, size, table


def render_search(result: SearchResult) -> str:
    """A table, best first, then why each is where it is and how to get it."""
    room = result.accelerator.memory
    assert room is not None
    tokens = result.sequences * result.seq_len
    lines = [
        f"{result.world_size} {result.accelerator.name} in nodes of {result.gpus_per_node}, steps of {result.sequences} "
        f"sequences x {result.seq_len} = {tokens:,} tokens. {result.considered} layouts considered, {result.planned} "
        f"planned in full{'' if result.complete else ' (the most promising ones)'}.",
        f"Times assume that kernels reach {EFFICIENCY:.0%} of the peak; a rank may fill {size(result.usable)} of "
        f"{size(room)}.",
        "",
    ]
    if not result.proposals:
        return "\n".join([*lines, *_nothing(result)]) + "\n"
    lines += _table(result.proposals)
    best = result.proposals[0]
    for number, proposal in enumerate(result.proposals, start=1):
        lines += ["", f"{number}. {_name(proposal)}"]
        lines += [f"   - {reason}" for reason in reasons(proposal, best, result.usable)]
        if not proposal.as_configured:
            lines.append(f"   {_wrapped(proposal.arguments)}")
    lines += _own(result)
    return "\n".join(lines) + "\n"


def reasons(proposal: Proposal, best: Proposal, usable: int) -> Iterator[str]:
    """Why a proposal is as good as it is, and what holds it back from the best."""
    candidate = proposal.candidate
    if candidate.pipeline == 1:
        yield "no pipeline, so no bubble"
    else:
        yield (
            f"{candidate.microbatches} microbatches on {candidate.pipeline} pipeline ranks leave a bubble of "
            f"{proposal.bubble:.1%}"
        )
    if candidate.by_parameters:
        yield "stages balanced by parameters, so that embedding and output do not make their ranks the fullest"
    yield from _sharding(proposal)
    if candidate.checkpointing == "none":
        yield f"nothing is computed again, for {size(proposal.peak)} at the peak"
    elif proposal.peak_without_checkpointing > usable:
        yield (
            f"{candidate.checkpointing} activation checkpointing, since {size(proposal.peak_without_checkpointing)} "
            f"would be needed without; with it {size(proposal.peak)}"
        )
    else:
        yield f"{candidate.checkpointing} activation checkpointing, which is not needed here"
    if proposal is not best:
        yield _behind(proposal, best)


def _sharding(proposal: Proposal) -> Iterator[str]:
    shard, replicate = _place(proposal, "shard"), _place(proposal, "replicate")
    if shard.degree > 1:
        where = "over nodes" if shard.crosses_nodes else "inside a node"
        text = f"parameters cut in {shard.degree}, gathered {where}"
        if proposal.exposed >= 0.01 * proposal.seconds:
            yield f"{text}; {seconds(proposal.exposed)} of gathering and reducing is not hidden"
        else:
            yield f"{text}; computing hides nearly all of it"
    if replicate.degree > 1:
        yield f"{replicate.degree} replicas, of which only gradients are summed"


def _place(proposal: Proposal, name: str) -> DimensionPlace:
    return next(place for place in proposal.places if place.name == name)


def _behind(proposal: Proposal, best: Proposal) -> str:
    slower = proposal.seconds / best.seconds - 1
    if slower < 0.005:
        return "as fast as the first, and less simple"
    causes = []
    if proposal.bubble > best.bubble + 0.01:
        causes.append("its bubble is larger")
    if _recomputes(proposal) > _recomputes(best):
        causes.append("it computes more again")
    if proposal.exposed > best.exposed + 0.005 * best.seconds:
        causes.append("more communication is exposed")
    return f"{slower:.0%} slower than the first: " + (" and ".join(causes) or "its ranks have less even work")


def _recomputes(proposal: Proposal) -> int:
    return ("none", "selective", "full").index(proposal.candidate.checkpointing)


def _table(proposals: Sequence[Proposal]) -> list[str]:
    head = [
        "",
        "pipeline x replicate x shard",
        "schedule",
        "microbatches",
        "checkpointing",
        "peak",
        "bubble",
        "step",
        "tokens/s",
        "MFU",
    ]
    rows = [
        [
            str(number),
            f"{proposal.candidate.pipeline} x {proposal.replicate} x {proposal.shard}",
            _schedule(proposal),
            f"{proposal.candidate.microbatches} of {proposal.candidate.rows}",
            proposal.candidate.checkpointing,
            size(proposal.peak),
            f"{proposal.bubble:.1%}",
            seconds(proposal.seconds),
            f"{proposal.tokens_per_second:,.0f}",
            f"{proposal.mfu:.1%}",
        ]
        for number, proposal in enumerate(proposals, start=1)
    ]
    return table(head, rows, (1, 2, 3, 4))


def _schedule(proposal: Proposal) -> str:
    candidate = proposal.candidate
    if candidate.pipeline == 1:
        return "-"
    return candidate.schedule + (f" x {candidate.stages_per_rank}" if candidate.stages_per_rank > 1 else "")


def _name(proposal: Proposal) -> str:
    candidate = proposal.candidate
    parts = [f"shard {proposal.shard}"]
    if proposal.replicate > 1:
        parts.insert(0, f"replicate {proposal.replicate}")
    if candidate.pipeline > 1:
        parts.insert(0, f"pipeline {candidate.pipeline} ({_schedule(proposal)})")
    return " x ".join(parts) + (": the configuration as it is" if proposal.as_configured else "")


def _wrapped(arguments: Sequence[str]) -> str:
    pairs = [" ".join(arguments[start : start + 2]) for start in range(0, len(arguments), 2)]
    return " ".join(pairs)


def _own(result: SearchResult) -> list[str]:
    """The configuration's own layout, where it is not among the proposals."""
    own = result.configured
    if own is None or any(proposal.as_configured for proposal in result.proposals):
        return []
    text = f"As configured ({_name(own).partition(':')[0]}): {seconds(own.seconds)} a step, {size(own.peak)} at the peak"
    return ["", text if own.peak <= result.usable else f"{text}, which does not fit"]


def _nothing(result: SearchResult) -> list[str]:
    nearest = result.nearest or result.configured
    if nearest is None:
        return ["No layout fits, and none could be planned."]
    missing = nearest.peak / result.usable
    return [
        f"No layout fits. Nearest is {_name(nearest)} with {nearest.candidate.checkpointing} checkpointing: "
        f"{size(nearest.peak)}, {missing:.1f} times what there is. More accelerators, larger ones, a shorter "
        "training.seq_len or training.mixed_precision_reduce = bfloat16 would help.",
    ]
