"""What no plan can be better than: lower bounds of a step's time and memory, before its job is built.

Two of them, the second tighter and dearer; a search asks for it only where the first does not decide.

- `Bounds.first`, from the captured step alone: the FLOPs of its products over all GPUs at the device's peak, and
  parameters with the optimizer's state over all ranks that can share them.
- `Bounds.second`, from the step of one rank, which plans share that differ in their pipeline and their data
  parallelism alone: the kernels of a micro-batch, as long as they take on the device, cannot run at once on one
  compute stream, and a stage waits for the ones before it. With t_r the kernels of stage r for one micro-batch,
  f_i and b_i those of the forward and backward pass of chunk i, and m micro-batches,

      step >= max over stages r of (m t_r + sum over i < r of (f_i + b_i)),

  without what may run after a chunk has sent its result, a layer at most. A layer's kernels wait for its own
  communication (tensor, context, expert parallelism): with the constants of the layer as a row of max-plus
  matrices (`simulator.engine.segments`), clocks of the compute stream go on by at least the one from that stream
  to itself. Other communication, the host, and what a stage does beside its layers only make a step longer.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from echograph.errors import EchoError
from echograph.ir.columns import NONE, Bools, Float64
from echograph.ir.graph import JobGraph, StepGraph
from echograph.ir.passes.base import split_at_job
from echograph.ir.passes.pipeline.placement import layer_of
from echograph.ir.passes.pipeline.schedules import TURNING, ChunkOrder
from echograph.ir.types import Gemm, OpKind, Phase, TensorRole
from echograph.models.stacks import Stack, load_stack
from echograph.profiler.costs.estimate import DTYPE_NAMES, KnownCosts
from echograph.simulator.durations import NetworkModel, durations
from echograph.simulator.engine.segments import cut, transfer_matrix, work_of
from echograph.workflow.plan import Plan, passes, schedule_of, with_kernels, with_stack
from echograph.workflow.scenario import Scenario
from echograph.workflow.shared import SharedSteps
from echograph.workflow.system import System

_STATES = (TensorRole.PARAMETER, TensorRole.OPTIMIZER_STATE)
_NARROW = ("fp8", "nvfp4", "fp8_block")
_NOT_OF_KERNELS = ("comm", "collective:", "host")
"""Beginnings of selectors of what bounds do not count."""
_BACK_IN_ORDER = ("gpipe", "1f1b", "interleaved")
"""Schedules that run a chunk's backward pass in one piece."""


_MAKES_SMALLER = frozenset({"stack", "precision", "loss", "capacity_factor", "grad_dtype"})
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


def _as_usual(plan: Plan) -> bool:
    """Whether ranks lie as they do where nothing is said: those that share a layer are neighbours."""
    return plan.mesh_order == Plan().mesh_order


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanBound:
    """What a plan takes at least.

    Attributes:
        step_ps: picoseconds of a step.
        memory_bytes: of the fullest device.
    """

    step_ps: float
    memory_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepCost:
    """What a rank's step for one micro-batch takes and holds, before it is divided over stages and replicas.

    Arrays have one entry a layer, in the model's order.

    Attributes:
        forward_ps: kernels of the forward pass of each layer.
        backward_ps: those of the backward pass, recomputation included.
        forward_waits_ps: what these wait in the forward pass of each layer for its own communication.
        backward_waits_ps: the same in the backward pass, where it runs in one piece.
        all_ps: of both passes, with what stands beside the layers.
        update_ps: of the optimizer.
        parameter_bytes: of all parameters.
        state_bytes: of all of the optimizer's state.
        kept_bytes: what each layer's forward pass leaves for its backward pass.
        all_kept_bytes: the same of all layers, with what stands beside them.
    """

    forward_ps: Float64
    backward_ps: Float64
    forward_waits_ps: Float64
    backward_waits_ps: Float64
    all_ps: float
    update_ps: float
    parameter_bytes: float
    state_bytes: float
    kept_bytes: Float64
    all_kept_bytes: float


class Bounds:
    """Lower bounds of the plans of one graph on one system.

    Args:
        graph: the step.
        system: where it runs.
        scenario: what is asked beyond that; where it makes work shorter, bounds are as much lower.
        steps: what passes leave of the graph, for those who predict its plans, too; None: for the bounds alone.
    """

    def __init__(
        self, graph: StepGraph, system: System, scenario: Scenario, steps: SharedSteps | None = None
    ) -> None:
        self.graph, self.system = graph, system
        of_kernels = (s.factor for s in scenario.scales if not s.selector.startswith(_NOT_OF_KERNELS))
        self.shorter = min([1.0, *of_kernels])
        # Another network, or communication that is made shorter, may let kernels wait less.
        self.network = NetworkModel(system.cluster) if scenario == Scenario() and not system.profile else None
        self._shared, self._costs = steps or SharedSteps(graph), KnownCosts()
        self._steps: dict[Hashable, StepCost | EchoError] = {}
        self._least_ps: dict[Hashable, float] = {}
        self._keeps: dict[tuple[int, str], float] = {}

    def first(self, chosen: Mapping[str, Any], global_batch: int) -> PlanBound:
        """A bound from the captured step alone.

        Args:
            chosen: the values of a choice of the space.
            global_batch: samples of a step.
        """
        gpus, precision = chosen["gpus"], chosen.get("precision", "")
        flops = 0.0 if "capacity_factor" in chosen else self._flops * global_batch
        rate = self._rate(precision) * gpus
        parameters, states = self._at_rest
        model = chosen["tp"] * chosen["pp"]
        share = model * chosen["ep"]
        whole = share if chosen["zero"] < 3 else max(share, gpus)
        apart = share if chosen["zero"] == 0 else max(share, gpus)
        kept = 0.0 if _MAKES_SMALLER & chosen.keys() else self._kept(chosen["micro_batch"], chosen["recompute"])
        return PlanBound(
            step_ps=self.shorter * 1e12 * flops / rate if rate else 0.0,
            memory_bytes=parameters / whole + states / apart + kept / (model * chosen["cp"]),
        )

    def second(self, plan: Plan, gpus: int) -> PlanBound:
        """A bound from the step of one rank, which is made when it is asked for first.

        Raises:
            EchoError: the plan does not fit the graph.
        """
        cost, key = self.step(plan), of_step(plan)
        ranks = gpus // plan.model_ranks
        micro_batch = plan.micro_batch or self.graph.workload.batch_size
        count = (plan.global_batch or plan.pp * ranks * micro_batch) // (ranks * micro_batch)
        shards = gpus // (plan.tp * plan.pp)
        parameters = cost.parameter_bytes / (shards if plan.zero == 3 else 1)
        states = cost.state_bytes / (shards if plan.zero else 1)
        like = key, plan.pp, plan.vpp, schedule_of(plan), plan.stage_layers, plan.zero == 0, count, _in_pairs(plan)
        if like not in self._least_ps:
            self._least_ps[like] = self.shorter * _step_ps(cost, plan, count)
        return PlanBound(
            step_ps=self._least_ps[like],
            memory_bytes=(parameters + states) / plan.pp + _kept(cost, plan, count),
        )

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
            return _cost(self._step_of(plan), plan, self.system, network, self._costs)
        except EchoError as error:
            return error

    def _step_of(self, plan: Plan) -> StepGraph:
        before, _ = split_at_job(passes(plan, self.graph.workload, self.system.cluster))
        return self._shared.after(before)

    def _kept(self, micro_batch: int, recompute: str) -> float:
        """Bytes that the forward pass of a whole micro-batch leaves for the backward pass."""
        key = micro_batch, recompute
        if key not in self._keeps:
            plan = Plan(micro_batch=micro_batch, recompute=recompute, gpus=1, cluster=self.system.cluster.name)
            try:
                step = self._step_of(plan)
                self._keeps[key] = float((_kept_by_op(step) * step.run_counts()).sum())
            except EchoError:
                self._keeps[key] = 0.0  # which is said of the plan itself
        return self._keeps[key]

    @cached_property
    def _flops(self) -> float:
        """Of the products of a sample, forward and backward.

        None are counted where durations are known already, which may be those of anything.
        """
        ops = self.graph.ops
        if len(ops.duration.rows):
            return 0.0
        of_product = [isinstance(value, Gemm) for value in ops.attribute_values] + [False]  # none is -1, the last
        products = np.array(of_product)[ops.attributes] & (ops.kind == OpKind.COMPUTE)
        products &= np.isin(ops.phase, (Phase.FORWARD, Phase.BACKWARD))
        total = float((ops.flops * products * self.graph.run_counts()).sum())
        return total / max(1, self.graph.workload.batch_size)

    def _rate(self, precision: str) -> float:
        """FLOP/s that no product is beyond; 0 where the device is not known."""
        device = self.system.device
        if device is None:
            return 0.0
        peaks = device.datasheet.peak_flops_per_s
        narrow = precision.startswith(("fp8", "mxfp8", "nvfp4")) or self._captured_narrow
        fastest = max(rate for name, rate in peaks.items() if narrow or not name.startswith(_NARROW))
        scales = [1.0]
        for model in device.gemm.values():
            scales += [model.batched_scale, *model.transposed_scale.values()]
        return fastest / min(scales)

    @cached_property
    def _captured_narrow(self) -> bool:
        codes = np.unique(self.graph.tensors.dtype).tolist()
        return any(DTYPE_NAMES.get(code, "").startswith(_NARROW) for code in codes)

    @cached_property
    def _at_rest(self) -> tuple[float, float]:
        parameters, states = (float(_bytes_of(self.graph, role).sum()) for role in _STATES)
        return parameters, states


def _bytes_of(graph: StepGraph, role: TensorRole) -> Float64:
    """Bytes of every tensor of a role, of all instances; 0 for others and for aliases."""
    tensors = graph.tensors
    instances = np.zeros(len(tensors))
    for block in graph.blocks:
        instances[block.tensors.start : block.tensors.stop] = len(block.instances)
    own = (tensors.role == role) & ~tensors.port & (tensors.alias_of == NONE)
    return np.asarray(np.where(own, tensors.nbytes * instances, 0.0))


def _cost(
    step: StepGraph, plan: Plan, system: System, network: NetworkModel | None, costs: KnownCosts
) -> StepCost:  # fmt: skip
    """What a rank's step takes, by layers; without a network, kernels wait for nothing."""
    said = plan.stack or step.workload.stack
    timed = system.annotate(with_kernels(step, load_stack(said) if said else Stack(), system.device), costs)
    ops = timed.ops
    known, _, _ = ops.duration_on(system.cluster.device)
    kernels = (ops.kind == OpKind.COMPUTE) & ~ops.is_view & (known != NONE)
    # Streams run beside each other: of several the one that does most is the bound.
    busiest = int(np.argmax(np.bincount(ops.stream[kernels]))) if kernels.any() else 0
    time = np.where(kernels & (ops.stream == busiest), known, 0).astype(np.float64)
    forward = ops.phase == Phase.FORWARD
    backward = np.isin(ops.phase, (Phase.BACKWARD, Phase.RECOMPUTE))
    kept = _kept_by_op(timed)
    waits = np.zeros(len(ops)) if network is None else _waits(timed, time, busiest, network)
    columns = (time * forward, time * backward, kept, waits * forward, waits * backward)
    forwards, backwards, keeps, before, behind = _by_layer(timed, columns)
    counts = timed.run_counts()
    return StepCost(
        forward_ps=forwards,
        backward_ps=backwards,
        forward_waits_ps=before,
        backward_waits_ps=behind,
        all_ps=float((time * (forward | backward) * counts).sum()),
        update_ps=float((time * (ops.phase == Phase.OPTIMIZER) * counts).sum()),
        parameter_bytes=float(_bytes_of(timed, TensorRole.PARAMETER).sum()),
        state_bytes=float(_bytes_of(timed, TensorRole.OPTIMIZER_STATE).sum()),
        kept_bytes=keeps,
        all_kept_bytes=float((kept * counts).sum()),
    )


def _waits(step: StepGraph, time: Float64, stream: int, network: NetworkModel) -> Float64:
    """What a stream waits at least in each call of a layer, by the call's first operation; picoseconds.

    Args:
        step: of a rank, with durations.
        time: of its kernels on the stream, which it waits beyond.
        stream: the stream.
        network: what communication takes.
    """
    found = np.zeros(len(step.ops))
    if not np.isin(step.ops.kind, (OpKind.COLLECTIVE, OpKind.SEND, OpKind.RECV)).any():
        return found
    job = JobGraph(**{its.name: getattr(step, its.name) for its in fields(step)})
    try:
        device = durations(job, network.cluster, network=network).picoseconds[:, None]
    except EchoError:
        return found  # which is said of the plan itself
    segments = cut(job)
    if segments is None:
        return found
    work, lane = work_of(job, device, np.zeros_like(device)), 1 + stream
    phases = np.isin(step.ops.phase, (Phase.BACKWARD, Phase.RECOMPUTE))
    layers = [block.ops for block in step.blocks[1:]]
    for kind in segments.kinds:
        rows = slice(kind.rows.start, kind.rows.stop)
        if kind.rendezvous or not any(rows.start in its for its in layers) or len({*phases[rows].tolist()}) > 1:
            continue
        matrix = transfer_matrix(kind, work)
        if lane in matrix.lanes:
            at = matrix.lanes.index(lane)
            found[rows.start] = max(0.0, float(matrix.over[at, at, 0]) - float(time[rows].sum()))
    return found


def _kept_by_op(graph: StepGraph) -> Float64:
    """Bytes that each forward operation makes and the backward pass of the same block reads."""
    ops, tensors, root = graph.ops, graph.tensors, graph.root
    late = np.isin(ops.phase, (Phase.BACKWARD, Phase.RECOMPUTE))
    read: Bools = np.zeros(len(tensors), bool)
    read[root[ops.inputs.values[late[ops.inputs.rows]]]] = True
    maker = graph.maker
    made = np.flatnonzero(read & (maker != NONE) & (tensors.role == TensorRole.ACTIVATION) & ~tensors.port)
    made = made[ops.phase[maker[made]] == Phase.FORWARD]
    found = np.zeros(len(ops))
    np.add.at(found, maker[made], tensors.nbytes[made].astype(np.float64))
    return found


def _by_layer(graph: StepGraph, values: Sequence[Float64]) -> list[Float64]:
    """Sums of columns of the operation table over what each layer runs; what is of no layer is left out."""
    sums = [np.concatenate([[0.0], np.cumsum(column)]) for column in values]
    found: dict[str, Float64] = {}
    for block, begin, end, instance, _ in graph.programs[0].calls.tolist():
        label = graph.blocks[block].instances[instance].label
        # All of a block is of the layer that its first operation is of; the main block's are told one by one.
        pieces = [(begin, end)] if block else _runs(graph.ops.module[begin:end], begin)
        for low, high in pieces:
            name = layer_of(graph.strings[graph.ops.module[low]], label)
            if name is not None:
                of_layer = np.array([column[high] - column[low] for column in sums])
                found[name] = found.get(name, np.zeros(len(sums))) + of_layer
    table = np.array(list(found.values())).reshape(len(found), len(sums))
    return [table[:, at] for at in range(len(sums))]


def _runs(codes: npt.NDArray[np.signedinteger[Any]], begin: int) -> list[tuple[int, int]]:
    """Ranges of rows with the same code."""
    cuts = np.flatnonzero(np.diff(codes)) + 1
    edges = [0, *cuts.tolist(), len(codes)]
    return [(begin + low, begin + high) for low, high in pairwise(edges) if high > low]


def _chunks(cost: StepCost, plan: Plan) -> list[slice]:
    """The layers of every chunk of a pipeline, as the pass divides them: the first ones have one more."""
    layers, chunks = len(cost.forward_ps), plan.pp * plan.vpp
    least, more = divmod(layers, chunks)
    counts = [least + (chunk < more) for chunk in range(chunks)]
    if plan.stage_layers:
        counts = [int(word) for word in plan.stage_layers.split(",")]
    if min(counts) < 1 or sum(counts) != layers:
        return []
    ends = np.cumsum([0, *counts]).tolist()
    return [slice(low, high) for low, high in pairwise(ends)]


def _in_pairs(plan: Plan) -> bool:
    """Whether forward and backward passes run as one."""
    return bool(plan.overlap_moe_expert_parallel_comm)


def _step_ps(cost: StepCost, plan: Plan, micro_batches: int) -> float:
    alone = not _in_pairs(plan)
    in_order = schedule_of(plan) in _BACK_IN_ORDER and alone
    forwards = cost.forward_ps + (cost.forward_waits_ps if alone else 0.0)
    backwards = cost.backward_ps + (cost.backward_waits_ps if in_order or (plan.pp == 1 and alone) else 0.0)
    every = cost.all_ps + float((forwards - cost.forward_ps).sum() + (backwards - cost.backward_ps).sum())
    # The mean of all stages, which the slowest one is not below.
    updates = cost.update_ps if plan.zero == 0 else 0.0
    longest = (micro_batches * every + updates) / plan.pp
    chunks = _chunks(cost, plan) if plan.pp > 1 else []
    if not chunks:
        return longest
    where = ChunkOrder(plan.pp, turns=schedule_of(plan) in TURNING)
    before = after = 0.0
    for stage in range(plan.pp):
        of_stage = (chunks[number] for number in where.chunks(stage, len(chunks)))
        own = sum(float((forwards[c] + backwards[c]).sum()) for c in of_stage)
        forward, backward = forwards[chunks[stage]], backwards[chunks[stage]]
        # What a chunk sends may be made before the last of its kernels run: the layer at its end is not counted.
        after_own = after - float(backward[0]) if in_order else 0.0
        longest = max(longest, micro_batches * own + before + max(0.0, after_own))
        before += float(forward[:-1].sum())
        after += float(backward[1:].sum())
    return longest


def _kept(cost: StepCost, plan: Plan, micro_batches: int) -> float:
    """Bytes of activations of the fullest stage."""
    mean = cost.all_kept_bytes / plan.pp
    chunks = _chunks(cost, plan) if plan.pp > 1 and plan.vpp == 1 else []
    held = [
        float(cost.kept_bytes[chunk].sum())
        * (min(micro_batches, plan.pp - stage) if schedule_of(plan) != "gpipe" else micro_batches)
        for stage, chunk in enumerate(chunks)
    ]
    return max([mean, *held])
