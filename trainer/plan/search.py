"""Searches the best layouts for a number and a kind of accelerators.

Every layout is trained on the same tokens in each step, so the choice changes the speed and nothing else. All are
bounded from below at first, by the least time that their pipeline can take and the least memory; the most
promising are then planned in full, until what is left can be no better than what has been found, or the work
allowed is done. The work is counted in actions, not in time, so the answer is the same everywhere.

Of a step with very many microbatches only some are scheduled: from there on each one more takes as long as the
busiest rank works on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from models.registry import configured_sizes
from models.sizes import Sizes
from parallelisms.layout import Layout
from parallelisms.pipeline.errors import ScheduleError
from parallelisms.pipeline.setting import Costs, Placement
from parallelisms.pipeline.simulate import simulate
from trainer.config.schema import Config
from trainer.errors import ConfigurationError
from trainer.plan.accelerators import Accelerator
from trainer.plan.candidates import Candidate, candidates, divisors
from trainer.plan.floors import Floors
from trainer.plan.formats import Formats
from trainer.plan.memory import forecast_memory, peak_without_checkpointing
from trainer.plan.network import collective_traffic
from trainer.plan.nodes import Nodes, place_in_nodes
from trainer.plan.plan import Plan, make_plan, moments_of, state_of_ranks
from trainer.plan.proposal import Proposal, SearchResult, best, usable_memory
from trainer.plan.resolve import resolve_layout
from trainer.plan.speed import EFFICIENCY, Bandwidths, bandwidths, costs_in_seconds, exposed_collectives
from trainer.plan.splits import Splits

_SCHEDULED = 2048  # microbatches times stages that are scheduled in full
_WORK = 250_000  # actions that are planned in all
_SMALLEST = 4  # candidates that are planned where none can fit


def search_layouts(
    config: Config, world_size: int, accelerator: Accelerator, gpus_per_node: int = 8, top: int = 5
) -> SearchResult:
    """The best layouts, at most `top`, each of another pipeline degree or schedule.

    The model, the sequence length and the sequences of a step are the configuration's. Its own layout is one of
    those that are tried, if it is possible for so many ranks. Raises ConfigurationError if nothing is known of
    the accelerator's speed, or if no layout can have steps of so many sequences.
    """
    if accelerator.memory is None or accelerator.peak_flops is None:
        raise ConfigurationError(f"--accelerator {accelerator.name}: its speed and memory are not known")
    if config.training.mixed_precision_param != "bfloat16":
        raise ConfigurationError(
            f"--search knows how fast {accelerator.name} is in bfloat16 only, and the configuration has "
            f"training.mixed_precision_param = {config.training.mixed_precision_param}"
        )
    inner = {
        "training.tensor_parallel_degree": config.training.tensor_parallel_degree,
        "experimental.context_parallel_degree": config.experimental.context_parallel_degree,
        "experimental.expert_parallel_degree": config.experimental.expert_parallel_degree,
    }
    if wide := [f"{key} = {degree}" for key, degree in inner.items() if degree > 1]:
        raise ConfigurationError(
            f"--search proposes pipelines and data parallelism, and the configuration has {' and '.join(wide)}; "
            "compare plans of such layouts instead (stageline plan --help)"
        )
    return _Search(config, world_size, accelerator, gpus_per_node).run(top)


def sequences_per_step(config: Config, world_size: int) -> int:
    """Sequences of one step as the configuration means them for so many ranks."""
    asked = config.training.global_batch_size
    if asked is not None:
        return asked
    return config.training.batch_size * resolve_layout(config, world_size).data_ranks


@dataclass(frozen=True)
class _Bounded:
    """A candidate, and the seconds and the bytes that it takes at least."""

    candidate: Candidate
    seconds: float
    memory: float


class _Search:
    def __init__(self, config: Config, world_size: int, accelerator: Accelerator, gpus_per_node: int) -> None:
        model, training = config.model, config.training
        self._config = config
        self._world_size = world_size
        self._accelerator = accelerator
        self._gpus_per_node = gpus_per_node
        self._sizes: Sizes = configured_sizes(model.name, model.flavor, model.norm_type, model.override)
        self._sequences = sequences_per_step(config, world_size)
        self._splits = Splits(self._sizes, training.seq_len)
        formats = Formats(training.mixed_precision_param, training.mixed_precision_reduce)
        self._floors = Floors(
            self._sizes,
            self._splits,
            training.seq_len,
            formats,
            world_size,
            moments_of(config),
            training.loss_chunk if training.fused_loss else None,
        )
        self._work = 0
        self._planned = 0

    def run(self, top: int) -> SearchResult:
        bounded = [self._bound(each) for each in self._candidates()]
        usable = usable_memory(self._accelerator)
        promising = [each for each in bounded if each.memory <= usable]
        configured = self._as_configured()
        found = [configured] if configured is not None and configured.peak <= usable else []
        too_large: list[Proposal] = []
        fitting: set[Candidate] = set()
        complete = True
        # Where nothing can fit, the smallest tell how much is missing.
        smallest = sorted(bounded, key=lambda each: each.memory)[:_SMALLEST]
        for each in sorted(promising, key=lambda each: each.seconds) or smallest:
            leading = best(found, top)
            if len(leading) == top and each.seconds > leading[-1].seconds:
                break  # neither this nor what follows can be among the best
            if self._work > _WORK:
                complete = False
                break
            if any(replace(each.candidate, checkpointing=less) in fitting for less in ("none", "selective")):
                continue  # the same layout fits and computes less again
            for proposal in self._plan(each.candidate, usable):
                fits = proposal.peak <= usable
                (found if fits else too_large).append(proposal)
                if fits:
                    fitting.add(each.candidate)
        proposals = best(found, top)
        return SearchResult(
            accelerator=self._accelerator,
            gpus_per_node=self._gpus_per_node,
            world_size=self._world_size,
            sequences=self._sequences,
            seq_len=self._config.training.seq_len,
            proposals=proposals,
            configured=configured,
            nearest=None if proposals else min(too_large, key=lambda each: each.peak, default=None),
            considered=len(bounded),
            planned=self._planned,
            complete=complete,
        )

    def _candidates(self) -> Iterator[Candidate]:
        seq_len, layers = self._config.training.seq_len, self._sizes.n_layers
        every = list(candidates(self._world_size, layers, self._sequences, seq_len, self._splits))
        if not every:
            raise ConfigurationError(
                f"steps of {self._sequences} sequences cannot be shared evenly by the data-parallel ranks of any "
                f"layout of {self._world_size} ranks; training.global_batch_size = {self._world_size} could be"
            )
        yield from every

    def _bound(self, candidate: Candidate) -> _Bounded:
        """What a step takes at least, with kernels as fast as is assumed for all."""
        assert self._accelerator.peak_flops is not None
        floor = self._floors.of(candidate)
        return _Bounded(candidate, floor.flops / (self._accelerator.peak_flops * EFFICIENCY), floor.memory)

    def _plan(self, candidate: Candidate, usable: int) -> Iterator[Proposal]:
        """The candidate with its data-parallel ranks split in the fastest way that fits; where none fits, with
        the most shards."""
        data_ranks = self._world_size // candidate.pipeline
        split = self._splits.of(candidate.placement.stages, candidate.by_parameters)
        scheduled = max(3 * candidate.pipeline, _SCHEDULED // candidate.placement.stages)
        config = candidate.applied_to(self._config, split, 1, data_ranks, scheduled)
        try:
            plan = make_plan(config, self._world_size)
        except ConfigurationError:
            return  # this schedule does not exist for this setting
        self._planned += 1
        laid_out = [_with_shards(plan, data_ranks // shard, shard) for shard in self._shards(data_ranks)]
        laid_out.sort(key=self._exposed)
        for each in laid_out:
            self._work += sum(map(len, plan.schedule.actions))
            proposal = self._propose(each, candidate)
            if proposal.peak <= usable or each.layout.shard == data_ranks:
                yield proposal
                return

    def _shards(self, data_ranks: int) -> list[int]:
        """Shard degrees worth trying: all ranks, those of a node, and a few nodes'."""
        sizes = {self._gpus_per_node * factor for factor in (1, 2, 4, 8)}
        return [each for each in divisors(data_ranks) if each in sizes or each == data_ranks]

    def _exposed(self, plan: Plan) -> float:
        speeds = self._network(plan)[1]
        costs = costs_in_seconds(plan, self._accelerator, speeds)
        return max(exposed_collectives(plan, each, speeds, costs) for each in collective_traffic(plan))

    def _network(self, plan: Plan) -> tuple[Nodes, Bandwidths]:
        nodes = place_in_nodes(plan.layout, self._gpus_per_node)
        speeds = bandwidths(self._accelerator, nodes)
        assert speeds is not None
        return nodes, speeds

    def _as_configured(self) -> Proposal | None:
        """The configuration's own layout; None where so many ranks cannot have it."""
        if resolve_layout(self._config, self._world_size).world_size != self._world_size:
            return None
        try:
            plan = make_plan(self._config, self._world_size)
        except (ConfigurationError, ScheduleError):
            return None
        if plan.global_batch_size != self._sequences:
            return None
        candidate = Candidate(
            pipeline=plan.layout.pipeline,
            schedule=plan.schedule.name,
            stages_per_rank=len(plan.stages) // plan.layout.pipeline,
            rows=max(plan.rows),
            microbatches=plan.microbatches * plan.accumulation,
            checkpointing=plan.parallelism.checkpointing,
        )
        return replace(self._propose(plan, candidate), arguments=())

    def _propose(self, plan: Plan, candidate: Candidate) -> Proposal:
        assert self._accelerator.peak_flops is not None
        nodes, speeds = self._network(plan)
        costs = costs_in_seconds(plan, self._accelerator, speeds)
        work = _work_of_ranks(plan.schedule.placement, costs)
        one_run = simulate(plan.schedule.actions, plan.schedule.placement, costs).step
        more = candidate.microbatches - plan.microbatches * plan.accumulation
        pipeline = one_run * plan.accumulation + more * max(work)
        exposed = self._exposed(plan)
        seconds = pipeline + exposed
        tokens = self._sequences * plan.seq_len
        split = self._splits.of(candidate.placement.stages, candidate.by_parameters)
        return Proposal(
            candidate=candidate,
            replicate=plan.layout.replicate,
            shard=plan.layout.shard,
            seconds=seconds,
            exposed=exposed,
            bubble=max(0.0, 1 - sum(work) * candidate.microbatches / (pipeline * candidate.pipeline)),
            mfu=plan.flops_per_token * tokens / (seconds * self._accelerator.peak_flops * self._world_size),
            tokens_per_second=tokens / seconds,
            peak=max(each.peak.total for each in forecast_memory(plan)),
            peak_without_checkpointing=peak_without_checkpointing(plan),
            places=nodes.dimensions,
            arguments=candidate.arguments(self._config, split, plan.layout.replicate, plan.layout.shard),
        )


def _with_shards(plan: Plan, replicate: int, shard: int) -> Plan:
    """The plan with its data-parallel ranks split otherwise; its schedule does not depend on that."""
    layout = Layout(plan.layout.pipeline, replicate, shard)
    state = state_of_ranks(plan.sizes, plan.stages, plan.schedule.placement, layout, plan.moments)
    return replace(plan, layout=layout, bytes_of_rank=state)


def _work_of_ranks(placement: Placement, costs: Costs) -> Sequence[float]:
    """Seconds that each rank of a pipeline works on one microbatch."""
    work = [0.0] * placement.ranks
    for stage, owner in enumerate(placement.owners):
        work[owner] += costs.forward[stage] + costs.backward_input[stage] + costs.backward_weight[stage]
    return work
