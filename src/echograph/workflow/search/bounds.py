"""What no plan can be better than: lower bounds of a step's time and memory, before its job is built.

Two of them, the second tighter and dearer; a search asks for it only where the first does not decide.

- `Bounds.first`, from the captured step alone: the FLOPs of its products at the device's peak, with those that are
  computed again and the bubble of the pipeline, and bytes of the step, both as if ranks could share all of it.
- `Bounds.second`, from the step of one rank (`step_cost`), which plans share that differ in their pipeline and
  their data parallelism alone.

**Time.** A stage waits for the ones before it, and what follows its last backward pass begins behind the stages
that feed it. With t_r what stage r has to do for one micro-batch (kernels, what these wait for their layer's own
communication, and adding up gradients), f_i and b_i the forward and backward pass of chunk i until it has what it
sends, m micro-batches, and e_r what stage r does at the end (reducing gradients, gathering parameters),

    step >= max over r of (m t_r + sum over i < r of f_i + max over j <= r of (sum over j <= i < r of b_i + e_j)).

Kernels are those of the slowest board, at the highest clock that its power may leave to a stage (`_stretch`): what
its layers draw is known, and of what may run beside them only what raises the clock is counted.

Nor is a step shorter than what data-parallel ranks exchange in turn. The host, messages between stages and what
else a stage waits for only make a step longer.

**Memory.** Parameters, optimizer state, gradients once they are made, and what the forward passes leave whose
backward pass has not begun, which is counted along the schedule of the first and the last stage; and what never
goes through the allocator.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from operator import attrgetter

import numpy as np

from echograph.errors import EchoError
from echograph.ir.columns import Float64, Int64
from echograph.ir.graph import StepGraph
from echograph.ir.passes.base import split_at_job
from echograph.ir.passes.pipeline.schedules import TURNING, ChunkOrder, order
from echograph.ir.types import Gemm, OpKind
from echograph.models.stacks import load_stack
from echograph.profiler.costs.estimate import DTYPE_NAMES, KnownCosts
from echograph.profiler.costs.power import highest_clock
from echograph.simulator.collectives import CollectiveName
from echograph.simulator.durations import NetworkModel
from echograph.units import PS_PER_S
from echograph.workflow.plan import Plan, passes, schedule_of, with_stack
from echograph.workflow.scenario import Scenario
from echograph.workflow.search.step_cost import (
    LayerPower,
    StepBytes,
    StepCost,
    held_bytes,
    products_cost,
    step_cost,
)
from echograph.workflow.shared import SharedSteps
from echograph.workflow.system import System, runtime_of

_NARROW = ("fp8", "nvfp4", "fp8_block")
_NOT_OF_KERNELS = ("comm", "collective:", "host")
"""Beginnings of selectors of what bounds do not count."""
_BACK_IN_ORDER = ("gpipe", "1f1b", "interleaved")
"""Schedules that run a chunk's backward pass in one piece."""
_FULL_AT_ONCE = ("1f1b", "interleaved", "zb-h1")
"""Schedules that have as much alive after four micro-batches a stage as after any more."""


_USUAL = Plan()
_MAKES_SMALLER = ("stack", "precision", "loss", "capacity_factor", "grad_dtype")
"""Fields of a plan by which a forward pass may leave less for the backward pass than it does as it was
captured."""
_NOT_OF_STEP = frozenset(
    {
        "gpus", "cluster", "dp", "global_batch", "pp", "vpp", "schedule", "stage_layers", "zero", "hsdp_replicas",
        "distributed_optimizer_instances", "reshard_after_forward", "overlap_grad_reduce", "overlap_param_gather",
        "overlap_moe_expert_parallel_comm", "mesh_order", "passes",
    }
)  # fmt: skip
"""Fields of a plan that do not change what one rank's step is, before pipeline and data parallelism."""
_OF_STEP = tuple(f.name for f in fields(Plan) if f.name not in _NOT_OF_STEP)


def of_step(plan: Plan) -> Hashable:
    """What of a plan says what the step of a rank is."""
    plan = with_stack(plan, load_stack(plan.stack)) if plan.stack else plan
    # Where tokens go once to a node, it counts which ranks are on one.
    by_node = () if plan.moe_dispatcher in ("", "alltoall") else (plan.pp, plan.mesh_order)
    # In another order of the mesh, what the ranks of a step exchange takes another way.
    return (*(getattr(plan, name) for name in _OF_STEP), *by_node, _as_usual(plan))


def less(plan: Plan) -> Plan:
    """The plan without computing anything again, which shares its step with fewer."""
    return replace(plan, recompute="none", recompute_early_stop=None)


def _as_usual(plan: Plan) -> bool:
    """Whether ranks lie as they do where nothing is said: those that share a layer are neighbours."""
    return plan.mesh_order == _USUAL.mesh_order


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanBound:
    """What a plan takes at least.

    Attributes:
        step_ps: picoseconds of a step.
        memory_bytes: of the fullest device, with what the framework holds beside.
    """

    step_ps: float
    memory_bytes: float


class Bounds:
    """Lower bounds of the plans of one graph on one system.

    Args:
        graph: the step.
        system: where it runs.
        scenario: what is asked beyond that; where it makes work shorter, bounds are as much lower.
        steps: what passes leave of the graph, for those who predict its plans, too; None: for the bounds alone.
        boards: GPUs that each plan has at least, the slowest of which counts.
    """

    def __init__(
        self,
        graph: StepGraph,
        system: System,
        scenario: Scenario,
        steps: SharedSteps | None = None,
        boards: int = 1,
    ) -> None:
        self.graph, self.system, self.boards = graph, system, boards
        of_kernels = (s.factor for s in scenario.scales if not s.selector.startswith(_NOT_OF_KERNELS))
        self.shorter = min([1.0, *of_kernels])
        # Another network, or communication that is made shorter, may let kernels wait less.
        self._slower = system.slower(boards) if system.profile is None else 1.0
        self.network = NetworkModel(system.cluster)
        self.waits = scenario == Scenario() and not system.profile
        self._shared, self._costs = steps or SharedSteps(graph), KnownCosts()
        self._steps: dict[Hashable, StepCost | EchoError] = {}
        self._stages: dict[Hashable, _Stages] = {}
        self._layers: dict[Hashable, Float64] = {}
        self._held: dict[tuple[int, str], StepBytes] = {}
        self._flops: dict[str, StepCost] = {}
        self._products: dict[Hashable, float] = {}

    def first(self, plan: Plan, gpus: int) -> PlanBound:
        """A bound from the captured step, without the passes that share it among ranks.

        Args:
            plan: the plan, with a global batch.
            gpus: how many it runs on.

        Raises:
            PlanError: its schedule cannot run so many micro-batches.
        """
        micro_batch, count, schedule = self._micro_batch(plan), self._micro_batches(plan, gpus), schedule_of(plan)
        rate, held = self._rate(plan.precision), self._as_captured(micro_batch, plan.recompute)
        seconds = 0.0
        if rate and plan.capacity_factor is None:
            again = "none" if plan.recompute_early_stop is not None or plan.stack else plan.recompute
            key = again, plan.pp, plan.vpp, schedule, plan.stage_layers, _in_pairs(plan), count
            if key not in self._products:
                none = np.zeros(plan.pp)
                stages = _Stages.of(self._of_products(again), plan, count)
                self._products[key] = stages.step_ps(_Exchange(none, none, 0.0))
            # One tensor- and context-parallel rank's part of what a sample takes.
            seconds = self._products[key] * micro_batch / (plan.tp * plan.cp * rate)
        return PlanBound(
            step_ps=self.shorter * PS_PER_S * self._slower * seconds,
            memory_bytes=self._beside(plan, gpus)
            + _memory_bytes(held, _both(_of_ranks(plan), _of_replicas(plan, gpus)), plan, count),
        )

    def second(self, plan: Plan, gpus: int) -> PlanBound:
        """A bound from the step of one rank, which is made when it is asked for first.

        Raises:
            EchoError: the plan does not fit the graph.
        """
        cost, count = self.step(plan), self._micro_batches(plan, gpus)
        return PlanBound(
            step_ps=self._step_ps(plan, gpus),
            memory_bytes=self._beside(plan, gpus)
            + _memory_bytes(cost.held, _of_replicas(plan, gpus), plan, count),
        )

    def by_less(self, plan: Plan, gpus: int) -> float:
        """Picoseconds that a step takes at least, from one that computes nothing again: what is added delays it.

        Raises:
            EchoError: as `second`, of the plan that computes nothing again.
        """
        return self._step_ps(less(plan), gpus)

    def _step_ps(self, plan: Plan, gpus: int) -> float:
        cost, count = self.step(plan), self._micro_batches(plan, gpus)
        pipeline = plan.pp, plan.vpp, schedule_of(plan), plan.stage_layers, _in_pairs(plan)
        key = cost, pipeline, _additions(plan, count), plan.zero, count
        if key not in self._stages:
            self._stages[key] = _Stages.of(cost, plan, count)
        stages = self._stages[key]
        sent = self._communication(cost, plan, gpus, count, stages.stretch)
        return self.shorter * max(stages.step_ps(sent), sent.in_all)

    def _micro_batch(self, plan: Plan) -> int:
        return plan.micro_batch or self.graph.workload.batch_size

    def _micro_batches(self, plan: Plan, gpus: int) -> int:
        ranks, samples = gpus // plan.model_ranks, self._micro_batch(plan)
        return (plan.global_batch or plan.pp * ranks * samples) // (ranks * samples)

    def _beside(self, plan: Plan, gpus: int) -> int:
        """Bytes beside tensors: the CUDA context, and a communicator for each axis that has ranks."""
        runtime = runtime_of(plan.stack or self.graph.workload.stack, self.system.architecture)
        sizes = plan.tp, plan.cp, plan.pp, gpus // plan.model_ranks
        communicators = (runtime.nccl_pair_bytes if n == 2 else runtime.nccl_bytes for n in sizes if n > 1)
        return runtime.cuda_context_bytes + sum(communicators)

    def _communication(self, cost: StepCost, plan: Plan, gpus: int, count: int, stretch: Float64) -> _Exchange:
        """What data-parallel ranks exchange, beside kernels of stages whose clocks stretch them so.

        With ZeRO-1 and 2 parameters are gathered when all is updated. A stage behind the first reduces all of its
        gradients at once, beside no more than a layer: with ZeRO-2 those of every micro-batch, whose copies into
        buckets are kernels as others are. With ZeRO-3 a stage gathers its layers one after the other before it
        first has them all, and reduces those of a chunk behind its last backward pass; without a pipeline all of
        it in each micro-batch. What a group of ranks exchanges follows each other. Buckets take no less than all
        that is in them at once.
        """
        none = np.zeros(plan.pp)
        plan = with_stack(plan, load_stack(plan.stack)) if plan.stack else plan
        stages = _stage_chunks(cost.held.layers, plan)
        if stages is None or not (plan.zero and plan.ep == 1 and self.waits and _as_usual(plan)):
            return _Exchange(none, none, 0.0)
        ranks = range(0, gpus // plan.pp, plan.tp)
        ranks = ranks[: len(ranks) // (plan.distributed_optimizer_instances * plan.hsdp_replicas)]
        if plan.zero == 3:
            return self._of_layers(cost, plan, stages, ranks, count, stretch)
        parameters, _, gradients, _ = stages.of(cost.held.before).sum(axis=-1)
        gather = self._takes_ps("all_gather", parameters, ranks)
        reduce = self._takes_ps("reduce_scatter", gradients, ranks)
        beside = _stretched(cost.backward.kernels_ps[:, stages.first[:, 0]], stretch)
        alone = np.where(np.arange(plan.pp) > 0, np.maximum(0.0, reduce - beside), 0.0)
        ends, within, often = alone, none, 1
        if plan.zero == 2 and len(ranks) > 1:
            copies = np.concatenate([[0.0], np.cumsum(cost.copying_ps)])
            within, often = count * stages.of(copies).sum(axis=-1) + (count - 1) * alone, count
        if not plan.overlap_param_gather:
            ends = ends + gather
        return _Exchange(ends, within, float((gather + often * reduce).max()))

    def _of_layers(
        self, cost: StepCost, plan: Plan, stages: _StageChunks, ranks: range, count: int, stretch: Float64
    ) -> _Exchange:
        """What is exchanged layer by layer, with ZeRO-3."""
        narrow = bool(plan.stack) and load_stack(plan.stack).reduce_dtype in ("bf16", "fp16")
        if (key := (cost, ranks, narrow)) not in self._layers:
            parameters, _, gradients, _ = np.diff(cost.held.before)
            takes = (
                self._takes_ps("all_gather", parameters, ranks),
                self._takes_ps("reduce_scatter", gradients / 2 if narrow else gradients, ranks),
            )
            self._layers[key] = np.stack([np.append(0.0, np.cumsum(column)) for column in takes])
        before = self._layers[key]
        none = np.zeros(plan.pp)
        if plan.pp == 1:
            often = count * (1 if plan.reshard_after_forward is False else 2)
            return _Exchange(none, none, float(often * before[0, -1] + count * before[1, -1]))
        # The first two layers of a chunk may be gathered before there is anything to compute; each of the others
        # behind the one before, while that is waited for.
        least = np.minimum(stages.first + 2, stages.end)
        alone = before[0][stages.end] - before[0][least]
        forward = _stretched(stages.of(_before(cost.forward.whole_ps(waits=True))), stretch)
        slower = np.maximum(0.0, alone - forward)
        ends = stages.of(before[1]).min(axis=-1) if schedule_of(plan) in _FULL_AT_ONCE else none
        later = np.cumsum(slower[:, 0]) - slower[:, 0]
        return _Exchange(ends, later + slower.sum(axis=-1), 0.0)

    def _takes_ps(self, kind: CollectiveName, nbytes: Float64, ranks: range) -> Float64:
        """What collectives of some sizes take."""
        sizes, place = np.unique(nbytes, return_inverse=True)
        takes = [self.network.time(kind, size, ranks).seconds for size in sizes.tolist()]
        return PS_PER_S * np.array(takes)[place]

    def step(self, plan: Plan) -> StepCost:
        """What the step of one rank takes.

        Raises:
            EchoError: the plan does not fit the graph.
        """
        key = of_step(plan)
        if key not in self._steps:
            self._steps[key] = self._made(plan)
        found = self._steps[key]
        if isinstance(found, EchoError):
            raise found
        return found

    def knows(self, plan: Plan) -> bool:
        """Whether a bound of this plan takes no time."""
        return of_step(plan) in self._steps

    def learn(self, plan: Plan, cost: StepCost | EchoError) -> None:
        """Takes what other bounds found of the step of one rank, or why there is none."""
        self._steps[of_step(plan)] = cost

    def _made(self, plan: Plan) -> StepCost | EchoError:
        try:
            network = self.network if _as_usual(plan) else None
            step = self._step_of(plan)
            return step_cost(step, plan, self.system, network, self._costs, self.boards, self.waits)
        except EchoError as error:
            return error

    def _step_of(self, plan: Plan) -> StepGraph:
        before, _ = split_at_job(passes(plan, self.graph.workload, self.system.cluster))
        return self._shared.after(before)

    def _as_captured(self, micro_batch: int, recompute: str) -> StepBytes:
        """What the captured step holds for a whole micro-batch.

        Of each tensor at most one dim is in proportion to the samples, so from two on, where every step has the
        same operations, bytes are a straight line, which two steps say.
        """
        key = micro_batch, recompute
        if key not in self._held:
            few, many = max(2, self.graph.workload.batch_size), 2 * max(2, self.graph.workload.batch_size)
            if micro_batch in (1, few, many):
                self._held[key] = self._held_by(micro_batch, recompute)
            else:
                less, more = self._as_captured(few, recompute), self._as_captured(many, recompute)
                part = (micro_batch - few) / (many - few)
                ends = ((less.before, more.before), (less.rest, more.rest))
                self._held[key] = StepBytes(*(np.maximum(0.0, a + part * (b - a)) for a, b in ends))
        return self._held[key]

    def _held_by(self, micro_batch: int, recompute: str) -> StepBytes:
        try:
            return held_bytes(self._step_of(self._captured_plan(micro_batch, recompute)))
        except EchoError:  # which is said of the plan itself
            held = held_bytes(self.graph)
            return StepBytes(0.0 * held.before, 0.0 * held.rest)

    def _captured_plan(self, micro_batch: int, recompute: str) -> Plan:
        return Plan(micro_batch=micro_batch, recompute=recompute, gpus=1, cluster=self.system.cluster.name)

    def _of_products(self, recompute: str) -> StepCost:
        """FLOPs of the products of a sample, layer by layer, in place of picoseconds.

        None are counted where durations are known already, which may be those of anything.
        """
        if recompute not in self._flops:
            size = self.graph.workload.batch_size
            try:
                step = self._step_of(self._captured_plan(size, recompute))
            except EchoError:  # which is said of the plan itself
                step = self.graph
            ops = step.ops
            of_product = [isinstance(value, Gemm) for value in ops.attribute_values] + [False]  # none is -1
            products = np.array(of_product)[ops.attributes] & (ops.kind == OpKind.COMPUTE)
            known = len(self.graph.ops.duration.rows) > 0
            flops = ops.flops * products * (0.0 if known else 1 / max(1, size))
            self._flops[recompute] = products_cost(step, flops)
        return self._flops[recompute]

    def _rate(self, precision: str) -> float:
        """FLOP/s that no product is beyond; 0 where the device is not known."""
        narrow = precision.startswith(("fp8", "mxfp8", "nvfp4")) or self._captured_narrow
        return self._rates[narrow]

    @cached_property
    def _rates(self) -> tuple[float, float]:
        """FLOP/s that no product is beyond, of the wide types and of all."""
        device = self.system.device
        if device is None:
            return 0.0, 0.0
        peaks = device.datasheet.peak_flops_per_s
        scales = [1.0]
        for model in device.gemm.values():
            scales += [model.batched_scale, *model.transposed_scale.values()]
        wide = max(rate for name, rate in peaks.items() if not name.startswith(_NARROW))
        return wide / min(scales), max(peaks.values()) / min(scales)

    @cached_property
    def _captured_narrow(self) -> bool:
        codes = np.unique(self.graph.tensors.dtype).tolist()
        return any(DTYPE_NAMES.get(code, "").startswith(_NARROW) for code in codes)


# -- stages ---------------------------------------------------------------------------------------------------


def _in_pairs(plan: Plan) -> bool:
    """Whether forward and backward passes run as one."""
    return bool(plan.overlap_moe_expert_parallel_comm)


@dataclass(frozen=True, slots=True, eq=False)
class _StageChunks:
    """The layers of every chunk of every stage.

    Attributes:
        first: [stages, chunks of each], the first layer of each chunk.
        end: the layer behind its last one.
    """

    first: Int64
    end: Int64

    def of(self, before: Float64) -> Float64:
        """[..., stages, chunks of each]: the chunks' part of sums over the layers before each one."""
        return np.asarray(before[..., self.end] - before[..., self.first])


def _stage_chunks(layers: int, plan: Plan) -> _StageChunks | None:
    """The chunks of a plan's stages; None where one has no layer, or they are not those of the model."""
    return _chunks(layers, plan.pp, plan.vpp, plan.stage_layers, schedule_of(plan) in TURNING)


@lru_cache(4096)
def _chunks(layers: int, stages: int, of_each: int, said: str, turns: bool) -> _StageChunks | None:
    chunks = stages * of_each
    least, more = divmod(layers, chunks)
    counts = [int(word) for word in said.split(",")] if said else [least + (k < more) for k in range(chunks)]
    if min(counts) < 1 or sum(counts) != layers:
        return None
    numbers = np.array([ChunkOrder(stages, turns).chunks(stage, chunks) for stage in range(stages)])
    end = np.cumsum(counts)
    return _StageChunks((end - counts)[numbers], end[numbers])


@dataclass(frozen=True, slots=True, eq=False)
class _Exchange:
    """What data-parallel ranks exchange, in picoseconds.

    Attributes:
        ends: by stage, behind its last backward pass.
        within: by stage, what kernels do for it and wait for it before, on the stages before it, too.
        in_all: of a rank, what follows each other.
    """

    ends: Float64
    within: Float64
    in_all: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stages:
    """What the stages of a pipeline take, in picoseconds, less what they do at the end.

    Attributes:
        stretch: by stage, how much longer its clock makes what it paces than a burst's, at least.
        mean: of all stages, which the slowest one is not below.
        done: by stage, until its last backward pass has ended.
        below: from the sends of a stage's last backward pass until those of the first stage.
        left: of that pass, what may follow its sends.
        waits: whether the last passes of a stage are those that the stages before it wait for.
    """

    stretch: Float64
    mean: float
    done: Float64
    below: Float64
    left: Float64
    waits: bool

    @classmethod
    def of(cls, cost: StepCost, plan: Plan, micro_batches: int) -> _Stages:
        """Of a rank's step, divided by a plan; without stages where it has no layers to divide."""
        alone = not _in_pairs(plan)
        in_order = alone and (plan.pp == 1 or schedule_of(plan) in _BACK_IN_ORDER)
        forward, backward = cost.forward.whole_ps(waits=alone), cost.backward.whole_ps(waits=in_order)
        waits = float((forward - cost.forward.kernels_ps + backward - cost.backward.kernels_ps).sum())
        adding = cost.adding_ps * _additions(plan, micro_batches)
        stages = _stage_chunks(cost.held.layers, plan)
        stretch = _stretch(cost, plan, stages, micro_batches, in_order)
        kernels_ps = float(_stretched(cost.all_ps, stretch if plan.pp == 1 else np.ones(1)).sum())
        updates = cost.update_ps if plan.zero == 0 else 0.0
        mean = (micro_batches * (kernels_ps + waits) + float(adding.sum()) + updates) / plan.pp
        if stages is None:
            none = np.empty(0)
            return cls(stretch=stretch, mean=mean, done=none, below=none, left=none, waits=in_order)
        added, *parts = stages.of(_before(np.stack([adding, *forward, *backward])))
        forwards, backwards = (_stretched(its, stretch) for its in (np.stack(parts[:2]), np.stack(parts[2:])))
        work = micro_batches * (forwards + backwards) + added
        # What the first chunk of a stage sends is made by its last layer forward, and by its first one backward.
        up = forwards[:, 0] - _stretched(cost.forward.unsent_ps[:, stages.end[:, 0] - 1], stretch)
        left = _stretched(cost.backward.unsent_ps[:, stages.first[:, 0]], stretch)
        down = backwards[:, 0] - left
        return cls(
            stretch=stretch,
            mean=mean,
            done=np.cumsum(up) - up + work.sum(axis=1),
            below=np.cumsum(down) - down,
            left=left,
            waits=in_order,
        )

    def step_ps(self, sent: _Exchange) -> float:
        """A step, with what data-parallel ranks exchange."""
        if not len(self.done):
            return self.mean
        ends = sent.ends
        if self.waits:
            ends = self.below - self.left + np.maximum.accumulate(ends + self.left - self.below)
        return max(self.mean, float((self.done + sent.within + ends).max()))


def _before(columns: Float64) -> Float64:
    """[..., layers + 1] Sums over the layers before each one."""
    return np.concatenate([np.zeros((*columns.shape[:-1], 1)), np.cumsum(columns, axis=-1)], axis=-1)


def _stretched(ps: Float64, stretch: Float64) -> Float64:
    """[stages, ...] Picoseconds of stages.

    Args:
        ps: [2, stages, ...], what no clock paces, and what it does, at that of a burst.
        stretch: [stages], how much longer that takes.
    """
    return np.asarray(ps[0] + (ps[1].T * stretch).T)


def _stretch(
    cost: StepCost, plan: Plan, stages: _StageChunks | None, micro_batches: int, in_order: bool
) -> Float64:
    """[stages] How much longer what the clock paces takes than in a burst, at least: by the highest clock.

    A stage's clock is that of a micro-batch amid the others. What may run beside its layers' passes raises it
    where it draws less than the limit.
    """
    power, plan = cost.power, with_stack(plan, load_stack(plan.stack)) if plan.stack else plan
    # What data-parallel ranks exchange in each micro-batch, or with ZeRO-3 in the first and the last, kernels may
    # wait for.
    exchange = plan.zero == 2 or (plan.zero == 3 and not (_keeps_gathered(plan) and micro_batches > 2))
    if power is None or (stages is None and plan.pp > 1) or exchange:
        return np.ones(plan.pp)
    return _stretch_of(power, stages, in_order)


@lru_cache(4096)
def _stretch_of(power: LayerPower, stages: _StageChunks | None, in_order: bool) -> Float64:
    """As `_stretch`; without stages, of all layers."""

    def of(columns: Float64) -> Float64:
        """[4, stages] Of the layers of each stage."""
        parts = columns[:, None] if stages is None else stages.of(_before(columns))
        return np.asarray(parts.sum(axis=-1))

    waits = power.waits_s if in_order else power.communication_s
    spent = of(np.stack([*power.spent[:3], power.spent[3] + waits]))
    perhaps = [power.rest[:, None]]
    for each in (power.adding, power.copying):
        perhaps += [of(each[:, :-1]), each[:, -1:]]
    return np.asarray(1.0 / highest_clock(power.model, spent, perhaps))


def _additions(plan: Plan, micro_batches: int) -> int:
    """How often whole gradients are added to those of the micro-batches before, at least."""
    whole = plan.zero < 2 or _adds_whole(plan)
    return max(0, micro_batches - 2) if whole else 0


# -- memory ---------------------------------------------------------------------------------------------------


def _memory_bytes(held: StepBytes, share: Shares, plan: Plan, micro_batches: int) -> float:
    """Bytes of the fullest device: what a step begins with, its gradients and activations.

    Args:
        held: of the step.
        share: what of it is left for a rank at least, but for the pipeline.
        plan: the plan.
        micro_batches: of a step.
    """
    parameters, states, gradients, kept = (own * part for own, part in zip(held.in_all, share, strict=True))
    fullest = (parameters + states + max(gradients, kept)) / plan.pp
    stages, schedule = _stage_chunks(held.layers, plan), schedule_of(plan) or "1f1b"
    if stages is None or _in_pairs(plan):
        return fullest
    if schedule in _FULL_AT_ONCE:  # what follows is more of the same
        micro_batches = min(micro_batches, 4 * plan.pp)
    for end in (0, plan.pp - 1):
        # Without a pipeline micro-batches follow each other, as on a stage that has none behind it.
        its = _end_stage(held, stages, schedule, end, plan.pp, micro_batches, plan.vpp, not _adds_whole(plan))
        alive = max([made * share[2] + kept * share[3] for made, kept in its.alive])
        fullest = max(fullest, its.parameters * share[0] + its.states * share[1] + alive)
    return fullest


Shares = tuple[float, float, float, float]
"""[`HELD`]: of what a step holds, the part of a rank."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _EndStage:
    """What a stage at an end of a pipeline holds, in bytes.

    Attributes:
        parameters: all the time.
        states: of the optimizer, all the time.
        alive: gradients and activations at its points, without those that have no more of either than another.
    """

    parameters: float
    states: float
    alive: list[tuple[float, float]]


@lru_cache(16384)
def _end_stage(
    held: StepBytes, chunks: _StageChunks, schedule: str, stage: int, stages: int, micro_batches: int,
    of_each: int, until_end: bool,
) -> _EndStage:  # fmt: skip
    whole = chunks.of(held.before)[:, stage]
    points = _points(schedule, stage, stages, micro_batches, of_each, until_end)
    made, kept = points[:, :of_each] @ whole[2], points[:, of_each:] @ whole[3]
    order = np.lexsort((-kept, -made))
    most = np.maximum.accumulate(kept[order])
    front = order[np.append(True, most[1:] > most[:-1])]
    return _EndStage(
        parameters=float(whole[0].sum()),
        states=float(whole[1].sum()),
        alive=list(zip(made[front].tolist(), kept[front].tolist(), strict=True)),
    )


_made_smaller = attrgetter(*_MAKES_SMALLER)
_AS_CAPTURED = _made_smaller(_USUAL)


def _both(one: Shares, other: Shares) -> Shares:
    parameters, states, gradients, kept = (a * b for a, b in zip(one, other, strict=True))
    return parameters, states, gradients, kept


def _of_ranks(plan: Plan) -> Shares:
    """The part of a captured step that is left for each of the ranks that share its layers."""
    model = plan.tp * plan.ep
    as_captured = _made_smaller(plan) == _AS_CAPTURED
    return 1 / model, 1 / model, as_captured / model, as_captured / (plan.tp * plan.cp)


def _of_replicas(plan: Plan, gpus: int) -> Shares:
    """The part of a rank's step that is left once data-parallel ranks share what lives through it."""
    ranks = gpus // (plan.tp * plan.pp)
    within = ranks // (plan.hsdp_replicas * plan.distributed_optimizer_instances)
    parameters = (1 / within if plan.zero == 3 else 1) + _keeps_gathered(plan)
    shards = plan.zero > 1 and not _adds_whole(plan)
    return parameters, 1 / within if plan.zero else 1.0, 1 / ranks if shards else 1.0, 1.0


def _adds_whole(plan: Plan) -> bool:
    """Whether whole gradients add up over micro-batches under ZeRO-3, until a chunk's last backward pass."""
    return plan.zero == 3 and plan.pp > 1


def _keeps_gathered(plan: Plan) -> bool:
    """Whether chunks keep their parameters gathered from their first micro-batch to the last."""
    return _adds_whole(plan) and not plan.reshard_after_forward


@lru_cache(4096)
def _points(schedule: str, stage: int, stages: int, micro_batches: int, chunks: int, until_end: bool) -> Float64:
    """What a stage has alive at least after each of its forward passes: [points, 2 chunks].

    For each of its chunks whether an earlier micro-batch has made gradients, then those whose backward pass has
    not begun; where gradients stay until the end, as the last point all of them.
    """
    passes = order(schedule, stage, stages, micro_batches, chunks)
    kinds = np.array([("forward", "backward", "weight").index(kind) for kind, _, _ in passes])
    of_chunk = np.array([chunk for _, _, chunk in passes])[:, None] == np.arange(chunks)
    forwards, backwards, weights = (np.cumsum(of_chunk & (kinds == kind)[:, None], axis=0) for kind in range(3))
    made = weights if (kinds == 2).any() else backwards
    alive = np.concatenate([made > 0, forwards - backwards], axis=1)[kinds == 0]
    if until_end:
        alive = np.concatenate([alive, [[1] * chunks + [0] * chunks]])
    different = np.unique(alive, axis=0)
    # A point that has at no chunk more alive than another one is never the fullest.
    no_more = (different[:, None] <= different).all(axis=2).sum(axis=1) == 1
    return np.asarray(different[no_more], np.float64)
