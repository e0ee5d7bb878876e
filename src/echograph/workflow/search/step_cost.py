"""What the step of one rank takes and holds, layer by layer, before pipeline and data parallelism divide it.

Kernels of a pass of a layer, as long as they take on the device, follow each other on one compute stream, and
wait for the layer's own communication (tensor, context, expert parallelism; `simulator.exposed`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from echograph.errors import EchoError, PlanError
from echograph.ir.builder import GraphBuilder
from echograph.ir.columns import NONE, Bools, Float64, Int64
from echograph.ir.graph import JobGraph, StepGraph
from echograph.ir.passes.model import adds_up, final_gradients
from echograph.ir.passes.pipeline.placement import OptimizerPlacer, layer_names, place_operations
from echograph.ir.passes.rewrite import ACCUMULATE, accumulate
from echograph.ir.types import COMMUNICATIONS, OpKind, Phase, TensorRole
from echograph.models.stacks import Stack, load_stack
from echograph.profiler.costs.device import PowerModel
from echograph.profiler.costs.estimate import PER_JOULE, Bursts, KnownCosts
from echograph.profiler.costs.power import highest_clock
from echograph.simulator.durations import NetworkModel, durations
from echograph.simulator.exposed import exposed_ps
from echograph.units import PS_PER_S
from echograph.workflow.plan import Plan, with_kernels
from echograph.workflow.system import System

HELD = (TensorRole.PARAMETER, TensorRole.OPTIMIZER_STATE, TensorRole.GRADIENT, TensorRole.ACTIVATION)
"""What a step holds, of gradients those that its backward pass makes of parameters; of activations those that the
forward pass of a micro-batch leaves for its backward pass."""


@dataclass(frozen=True, eq=False)
class StepBytes:
    """What a rank's step holds, in bytes.

    Attributes:
        before: [`HELD`, layers + 1], of the layers before each one, and last of all layers.
        rest: [`HELD`], of what is of no layer.
    """

    before: Float64
    rest: Float64

    @property
    def layers(self) -> int:
        """How many layers there are."""
        return len(self.before[0]) - 1

    @cached_property
    def in_all(self) -> list[float]:
        """[`HELD`], of all layers and of what is of none."""
        found: list[float] = (self.before[:, -1] + self.rest).tolist()
        return found


@dataclass(frozen=True, slots=True, eq=False)
class PassCost:
    """Picoseconds of the forward or backward pass of each layer, for one micro-batch.

    What the clock of a stage paces stands apart: all of it takes as much longer as that is lower than in a burst.

    Attributes:
        kernels_ps: [2, layers], kernels: what no clock paces, and what it does, at that of a burst.
        waits_ps: [layers], what these wait for the layer's own communication, at the lowest clock.
        unsent_ps: [2, layers], the part of both that may be left when what another layer reads is made.
    """

    kernels_ps: Float64
    waits_ps: Float64
    unsent_ps: Float64

    def whole_ps(self, waits: bool) -> Float64:
        """[2, layers] Kernels, and what they wait where that counts."""
        return np.stack([self.kernels_ps[0] + self.waits_ps, self.kernels_ps[1]]) if waits else self.kernels_ps


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerPower:
    """What the passes of each layer spend in a micro-batch: a stage's clock is no higher than that allows.

    Spent are joules of cores and of memory, and seconds that the clock paces and others (`power.py`).

    Attributes:
        model: of the device.
        spent: [4, layers], kernels and communication.
        waits_s: [layers], what kernels wait for the layer's communication, at most, where passes run in one piece.
        communication_s: [layers], what it takes.
        adding: [4, layers + 1], kernels that add up gradients, and last those of gradients of no layer.
        copying: [4, layers + 1], kernels that copy gradients into buckets, as `adding`.
        rest: [4], of what is of no layer, with its communication.
    """

    model: PowerModel
    spent: Float64
    waits_s: Float64
    communication_s: Float64
    adding: Float64
    copying: Float64
    rest: Float64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepCost:
    """What a rank's step for one micro-batch takes and holds, before it is divided over stages and replicas.

    Arrays have one entry a layer, in the model's order; what a pipeline puts with the first layer or behind the
    last one (embedding, head and loss) is of these.

    Attributes:
        forward: the forward pass of each layer.
        backward: the backward pass, recomputation included; what it waits, where it runs in one piece.
        adding_ps: kernels that add a micro-batch's whole gradients to those of the ones before.
        copying_ps: kernels that copy a micro-batch's gradients into the buckets that are reduced.
        all_ps: [2], kernels of both passes, with what is of no layer.
        update_ps: of the optimizer.
        held: bytes.
        power: what passes spend; None where the clock is that of a burst.
    """

    forward: PassCost
    backward: PassCost
    adding_ps: Float64
    copying_ps: Float64
    all_ps: Float64
    update_ps: float
    held: StepBytes
    power: LayerPower | None = None


def step_cost(
    step: StepGraph,
    plan: Plan,
    system: System,
    network: NetworkModel | None,
    costs: KnownCosts,
    boards: int = 1,
    waiting: bool = True,
) -> StepCost:
    """What a rank's step takes, by layers.

    Args:
        step: the rank's.
        plan: which made it.
        system: where it runs.
        network: what communication takes; None: kernels wait for nothing, and where they may, run at the clock of
            a burst.
        costs: of kernels, asked for before; gets these.
        boards: a job has so many at least, the slowest of which counts.
        waiting: whether what kernels wait for communication counts.
    """
    said = plan.stack or step.workload.stack
    step = with_kernels(step, load_stack(said) if said else Stack(), system.device)
    kernels, layers = _Kernels.of(step, system, costs, boards), _Layers.of(step)
    ops, counts = step.ops, step.run_counts()
    # Streams run beside each other: of several the one that does most is the bound.
    works = kernels.picoseconds.any(axis=0)
    busiest = int(np.argmax(np.bincount(ops.stream[works]))) if works.any() else 0
    time = kernels.picoseconds * (ops.stream == busiest)
    adding, copying = (
        _of_gradients(layers, rows, _Kernels.of(made, system, costs))
        for rows, made in (_adding(step), _copying(step))
    )
    waits, power = _waits_and_power(kernels, layers, network, adding[1], copying[1])
    waits = waits if waiting else np.zeros(len(ops))
    unsent, forward = layers.unsent(time, waits), ops.phase == Phase.FORWARD
    backward = np.isin(ops.phase, (Phase.BACKWARD, Phase.RECOMPUTE))
    passes = [
        PassCost(*(layers.sums(column * its) for column in (time, waits, unsent))) for its in (forward, backward)
    ]
    return StepCost(
        forward=passes[0],
        backward=passes[1],
        adding_ps=adding[0],
        copying_ps=copying[0],
        all_ps=(time * (forward | backward) * counts).sum(axis=1),
        update_ps=float((time[0] * (ops.phase == Phase.OPTIMIZER) * counts).sum()),
        held=_held(layers),
        power=power,
    )


def products_cost(step: StepGraph, flops: Float64) -> StepCost:
    """What a step takes in its products alone, in FLOPs in place of picoseconds.

    All of a layer's may be left when what another layer reads is made: passes decide that, and have not run.

    Args:
        step: as it was captured, or with what is computed again.
        flops: of each operation.
    """
    layers, phase = _Layers.of(step), step.ops.phase
    backward = np.isin(phase, (Phase.BACKWARD, Phase.RECOMPUTE))
    unpaced = np.stack([flops, np.zeros(len(flops))])
    none = np.zeros(layers.count)
    sums = (layers.sums(unpaced * its) for its in (phase == Phase.FORWARD, backward))
    passes = [PassCost(its, none, its) for its in sums]
    return StepCost(
        forward=passes[0],
        backward=passes[1],
        adding_ps=none,
        copying_ps=none,
        all_ps=(unpaced * ((phase == Phase.FORWARD) | backward) * step.run_counts()).sum(axis=1),
        update_ps=0.0,
        held=_held(layers),
    )


def held_bytes(step: StepGraph) -> StepBytes:
    """Bytes that a step holds."""
    return _held(_Layers.of(step))


def _held(layers: _Layers) -> StepBytes:
    step, kept = layers.graph, _kept_by_op(layers.graph)
    columns = [layers.shares(owned(step, role), step.tensors.nbytes) for role in HELD[:-1]] + [layers.sums(kept)]
    totals = [bytes_of(step, role).sum() for role in HELD[:-1]] + [(kept * step.run_counts()).sum()]
    of_layers = np.array(columns).reshape(len(HELD), layers.count)
    before = np.concatenate([np.zeros((len(HELD), 1)), np.cumsum(of_layers, axis=1)], axis=1)
    # Two layers may hold the same parameter.
    return StepBytes(before, np.maximum(0.0, np.array(totals) - before[:, -1]))


ROUNDING_PS = 2
"""By so much whole picoseconds may be less than what they were rounded from, twice."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Kernels:
    """What the kernels of a graph take on the slowest of some boards.

    Attributes:
        graph: the graph.
        bursts: what they take before it is known how long they run; None where durations are measured.
        slower: how much longer those of tensor cores take than on a typical board.
        picoseconds: [2, operations], at least: what no clock paces, and what it does, at that of a burst.
    """

    graph: StepGraph
    bursts: Bursts | None
    slower: float
    picoseconds: Float64

    @classmethod
    def of(cls, graph: StepGraph, system: System, costs: KnownCosts, boards: int = 1) -> _Kernels:
        """Of a graph on a system."""
        bursts, slower = system.bursts(graph, costs), system.slower(boards)
        graph = system.annotate(graph, costs) if bursts is None else graph
        ops, takes = graph.ops, np.zeros((2, len(graph.ops)))
        known, _, _ = ops.duration_on(system.cluster.device)
        its = np.isin(ops.kind, (OpKind.COMPUTE, OpKind.COPY)) & ~ops.is_view & (known != NONE)
        takes[0, its] = known[its]
        if bursts is not None:
            its = bursts.picoseconds != NONE
            paced_ps = bursts.paced_s * PS_PER_S
            takes[:, its] = np.stack([bursts.picoseconds - paced_ps, paced_ps])[:, its]
            takes[:, bursts.of_cores] *= slower
            takes[0, its] = np.maximum(0.0, takes[0, its] - ROUNDING_PS)
        return cls(graph=graph, bursts=bursts, slower=slower, picoseconds=takes)

    def at(self, clock: float) -> StepGraph:
        """The graph with the durations of a clock."""
        if self.bursts is None:
            return self.graph
        return self.bursts.durations(np.full(len(self.graph.ops), clock), self.slower)(self.graph)

    @property
    def power(self) -> PowerModel | None:
        """Of the device; None where durations are measured or nothing is known of it."""
        return None if self.bursts is None else self.bursts.device.power

    def spent(self) -> Float64:
        """[4, operations] Joules of cores and of memory; seconds that the clock paces, and others, of passes."""
        assert self.bursts is not None
        passes = np.isin(self.graph.ops.phase, _PASSES)
        units = np.array([PER_JOULE, PER_JOULE, PS_PER_S, PS_PER_S])
        return np.asarray(self.bursts.spent * passes / units[:, None])


_PASSES = (Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE)


def _adding(step: StepGraph) -> tuple[Sequence[int], StepGraph]:
    """The gradients that micro-batches add up, and the kernels that do."""
    rows = [row for row in final_gradients(step) if not adds_up(step, row)]
    builder = GraphBuilder(name=ACCUMULATE)
    made = [replace(step.tensor(row), sharded=()) for row in rows]
    accumulate(builder, ((one, one.name, at) for at, one in zip(builder.tensors(made), made, strict=True)))
    return rows, builder.build(StepGraph)


def _copying(step: StepGraph) -> tuple[Sequence[int], StepGraph]:
    """The gradients that buckets are filled with, and the kernels that copy them."""
    rows = final_gradients(step)
    builder = GraphBuilder(name="copies")
    made = [replace(step.tensor(row), sharded=()) for row in rows]
    nbytes = [one.nbytes for one in made]
    builder.computes(
        ["zero.copy_to_bucket"] * len(made), phase=Phase.BACKWARD,
        inputs=[(port,) for port in builder.tensors(made)], bytes_read=nbytes, bytes_written=nbytes,
    )  # fmt: skip
    return rows, builder.build(StepGraph)


def _of_gradients(layers: _Layers, rows: Sequence[int], made: _Kernels) -> tuple[Float64, Float64]:
    """Kernels of their own that some tensors of a step have, in turn.

    Returns:
        [layers] Picoseconds; [4, layers + 1] what they spend, and last those of tensors of no layer.
    """
    graph = layers.graph
    count, instances = len(graph.tensors), np.zeros(len(graph.tensors))
    for block in graph.blocks:
        instances[block.tensors.start : block.tensors.stop] = len(block.instances)
    found, takes, spent = np.zeros(count, bool), np.zeros(count), np.zeros((4, count))
    found[list(rows)], takes[list(rows)] = True, made.picoseconds.sum(axis=0)
    if made.power is not None:
        spent[:, list(rows)] = made.spent()
    of_layers = np.stack([layers.shares(found, column) for column in spent])
    rest = np.maximum(0.0, (spent * instances).sum(axis=1) - of_layers.sum(axis=1))
    return layers.shares(found, takes), np.append(of_layers, rest[:, None], axis=1)


def _waits_ps(step: StepGraph, takes: Int64, at_most: bool) -> Float64:
    """What kernels wait for communication of their own call, by the call's first operation; picoseconds.

    Args:
        step: of a rank.
        takes: of its operations, picoseconds.
        at_most: of what is of no layer, and of calls of which passes may make several, all that communication
            takes; else nothing.
    """
    job = JobGraph(**{its.name: getattr(step, its.name) for its in fields(step)})
    found, ops = np.zeros(len(step.ops)), step.ops
    if at_most:
        found += takes * np.isin(ops.kind, COMMUNICATIONS)
    phases, waits = np.isin(ops.phase, (Phase.BACKWARD, Phase.RECOMPUTE)), exposed_ps(job, takes)
    for begin, end in {(begin, end) for its in step.programs for _, begin, end, *_ in its.calls.tolist()}:
        if begin >= step.blocks[0].ops.stop and len({*phases[begin:end].tolist()}) == 1:
            found[begin:end] = 0.0
            found[begin] = waits.get((begin, end), 0)
    return found


def _waits_and_power(
    kernels: _Kernels, layers: _Layers, network: NetworkModel | None, adding: Float64, copying: Float64
) -> tuple[Float64, LayerPower | None]:
    """What kernels wait at least, by the first operation of a layer's call; and what passes spend.

    Waits are the shorter the longer kernels take, so they are the least at the lowest clock that a layer has, and
    the most at that of a burst.

    Args:
        kernels: of the step.
        layers: its.
        network: what communication takes; None: not known, and no clock is where there is any.
        adding: as of `LayerPower`.
        copying: as of `LayerPower`.
    """
    step, model, none = kernels.graph, kernels.power, np.zeros(len(kernels.graph.ops))
    spent = np.zeros((4, len(none))) if model is None else kernels.spent()
    of_layers = layers.sums(spent)
    rest = np.maximum(0.0, (spent * step.run_counts()).sum(axis=1) - of_layers.sum(axis=1))
    lowest, least, most, communication = 1.0, none, none, none
    if model is not None:
        lowest = float(highest_clock(model, np.append(of_layers, rest[:, None], axis=1)).min()) * (1 - 1e-3)
    if np.isin(step.ops.kind, COMMUNICATIONS).any():
        if network is None:
            return none, None
        job = JobGraph(**{its.name: getattr(step, its.name) for its in fields(step)})
        try:
            slow, fast = (
                durations(replace(job, ops=kernels.at(clock).ops), network.cluster, network=network).picoseconds
                for clock in (lowest, 1.0)
            )
        except EchoError:
            return none, None  # which is said of the plan itself
        least = _waits_ps(step, slow, False)
        passes = np.isin(step.ops.phase, _PASSES)
        most = _waits_ps(step, fast, True) * passes / PS_PER_S
        communication = fast * passes * np.isin(step.ops.kind, COMMUNICATIONS) / PS_PER_S
    if model is None:
        return least, None
    waits_s, communication_s = layers.sums(np.stack([most, communication]))
    rest[3] += max(0.0, float((communication * step.run_counts()).sum() - communication_s.sum()))
    return least, LayerPower(
        model=model, spent=of_layers, waits_s=waits_s, communication_s=communication_s, adding=adding,
        copying=copying, rest=rest,
    )  # fmt: skip


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


@dataclass(frozen=True, eq=False)
class _Layers:
    """Which layer of a step each operation is of, as a pipeline of a stage for each layer places it.

    Attributes:
        graph: the step.
        count: how many layers there are.
        instances: by block from the second on, the layer of each of its instances.
        rows: by operation of the main block, its layer; -1 for those of none, or of several.
        parameters: by parameter of the main block, the layers that hold it.
    """

    graph: StepGraph
    count: int
    instances: tuple[Int64, ...] = ()
    rows: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    parameters: Mapping[int, frozenset[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: StepGraph) -> _Layers:
        """Places the operations of a step; none are of a layer where it cannot be cut into layers."""
        count = len(layer_names(graph))
        try:
            placement = place_operations(graph, count, None)
            OptimizerPlacer(graph, placement, count).place()
        except PlanError:  # which is said of the plans that cut it
            return cls(graph, 0)
        rows = np.full(len(graph.blocks[0].ops), NONE)
        for row, layers in placement.ops.items():
            if len(layers) == 1:
                (rows[row],) = layers
        instances = tuple(
            np.array([placement.instances[number, each] for each in range(len(block.instances))], np.int64)
            for number, block in enumerate(graph.blocks[1:], 1)
        )
        return cls(graph, count, instances, rows, placement.holders)

    def sums(self, columns: Float64) -> Float64:
        """[..., layers] Sums of columns of the operation table over what each layer runs."""
        found = np.zeros((*columns.shape[:-1], self.count))
        if self.count:
            totals = np.concatenate([np.zeros((*columns.shape[:-1], 1)), np.cumsum(columns, axis=-1)], axis=-1)
            block, begin, end, instance, _ = self.graph.programs[0].calls.T
            for number, layers in enumerate(self.instances, 1):
                its = block == number
                np.add.at(found.T, layers[instance[its]], (totals[..., end[its]] - totals[..., begin[its]]).T)
            placed = np.flatnonzero(self.rows != NONE)
            np.add.at(found.T, self.rows[placed], columns[..., self.graph.blocks[0].ops.start + placed].T)
        return found

    def shares(self, chosen: Bools, values: npt.NDArray[Any]) -> Float64:
        """Sums of a column of the tensor table over the chosen tensors that each layer has."""
        graph, found = self.graph, np.zeros(self.count)
        if not self.count:
            return found
        each = np.where(chosen, values, 0).astype(np.float64)
        for block, layers in zip(graph.blocks[1:], self.instances, strict=True):
            np.add.at(found, layers, each[block.tensors.start : block.tensors.stop].sum())
        for row in np.flatnonzero(each[: graph.blocks[0].tensors.stop]).tolist():
            for layer in self._holders.get(int(graph.root[row]), ()):
                found[layer] += each[row]
        return found

    @cached_property
    def _holders(self) -> Mapping[int, Collection[int]]:
        """The layers that have a tensor of the main block: its maker's, its updater's, a parameter's readers'."""
        graph, placed = self.graph, np.flatnonzero(self.rows != NONE)
        ops = graph.ops
        found: dict[int, Collection[int]] = {}
        for table, rows in ((ops.inputs, ops.phase == Phase.OPTIMIZER), (ops.outputs, np.ones(len(ops), bool))):
            its = rows[table.rows] & np.isin(table.rows, placed)
            for tensor, row in zip(graph.root[table.values[its]].tolist(), table.rows[its].tolist(), strict=True):
                found[tensor] = (int(self.rows[row]),)
        return found | dict(self.parameters)

    def unsent(self, time: Float64, waits: Float64) -> Float64:
        """What of each operation's time may be left when the first tensor is made that another layer waits for.

        In the order of a layer's pass, kernels behind the operation that makes such a tensor; with any, also what
        the pass waits. Of what makes none, and of the main block, all.

        Returns:
            [2, operations], as of `PassCost`.
        """
        graph, left = self.graph, np.stack([time[0] + waits, time[1]])
        phase = np.where(graph.ops.phase == Phase.RECOMPUTE, Phase.BACKWARD, graph.ops.phase)
        for of_pass in (Phase.FORWARD, Phase.BACKWARD):
            makers = self._sent(of_pass, phase)
            for block in np.unique(graph.block_of_op[makers]).tolist():
                rows = np.arange(graph.blocks[block].ops.start, graph.blocks[block].ops.stop)
                rows = rows[phase[rows] == of_pass]
                first = makers[graph.block_of_op[makers] == block].min()
                left[:, rows] = time[:, rows] * (rows > first)
                if left[:, rows].any():
                    left[0, rows] += waits[rows]
        return left

    def _sent(self, of_pass: Phase, phase: npt.NDArray[Any]) -> Int64:
        """The operations of layers' blocks that make what another layer reads in the same pass."""
        graph, inputs = self.graph, self.graph.ops.inputs
        if not self.count:
            return np.empty(0, np.int64)
        layer = np.full((len(graph.blocks), max(len(block.instances) for block in graph.blocks)), NONE)
        for number, layers in enumerate(self.instances, 1):
            layer[number, : len(layers)] = layers
        read = np.zeros(len(graph.tensors), bool)
        read[graph.root[inputs.values[phase[inputs.rows] == of_pass]]] = True
        block, instance, tensor = graph.ports.located
        maker = graph.maker[graph.root[tensor]]
        sent = read[graph.ports.rows] & (maker != NONE) & (block > 0) & (phase[maker] == of_pass)
        sent &= layer[graph.ports.instances] != layer[block, instance]
        return np.unique(maker[sent])


def bytes_of(graph: StepGraph, role: TensorRole) -> Float64:
    """Bytes of every tensor of a role, of all instances; 0 for others and for aliases."""
    instances = np.zeros(len(graph.tensors))
    for block in graph.blocks:
        instances[block.tensors.start : block.tensors.stop] = len(block.instances)
    return np.asarray(np.where(owned(graph, role), graph.tensors.nbytes * instances, 0.0))


def owned(graph: StepGraph, role: TensorRole) -> Bools:
    """Which tensors of a role have memory of their own; of gradients, those that the backward pass makes."""
    tensors = graph.tensors
    owned = (tensors.role == role) & ~tensors.port & (tensors.alias_of == NONE)
    if role == TensorRole.GRADIENT:
        maker = graph.maker
        owned &= (maker != NONE) & (graph.ops.phase[maker] == Phase.BACKWARD)
    return np.asarray(owned)
