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
from echograph.ir.types import OpKind, Phase, TensorRole
from echograph.models.stacks import Stack, load_stack
from echograph.profiler.costs.estimate import KnownCosts
from echograph.simulator.durations import NetworkModel, durations
from echograph.simulator.exposed import exposed_ps
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

    Attributes:
        kernels_ps: kernels.
        waits_ps: what these wait for the layer's own communication.
        unsent_ps: the part of both that may be left when what another layer reads is made.
    """

    kernels_ps: Float64
    waits_ps: Float64
    unsent_ps: Float64

    def whole_ps(self, waits: bool) -> Float64:
        """Kernels, and what they wait where that counts."""
        return self.kernels_ps + self.waits_ps if waits else self.kernels_ps


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
        all_ps: kernels of both passes, with what is of no layer.
        update_ps: of the optimizer.
        held: bytes.
    """

    forward: PassCost
    backward: PassCost
    adding_ps: Float64
    copying_ps: Float64
    all_ps: float
    update_ps: float
    held: StepBytes


def step_cost(
    step: StepGraph, plan: Plan, system: System, network: NetworkModel | None, costs: KnownCosts
) -> StepCost:  # fmt: skip
    """What a rank's step takes, by layers; without a network, kernels wait for nothing."""
    said = plan.stack or step.workload.stack
    timed = system.annotate(with_kernels(step, load_stack(said) if said else Stack(), system.device), costs)
    ops = timed.ops
    known, _, _ = ops.duration_on(system.cluster.device)
    kernels = np.isin(ops.kind, (OpKind.COMPUTE, OpKind.COPY)) & ~ops.is_view & (known != NONE)
    # Streams run beside each other: of several the one that does most is the bound.
    busiest = int(np.argmax(np.bincount(ops.stream[kernels]))) if kernels.any() else 0
    time = np.where(kernels & (ops.stream == busiest), known, 0).astype(np.float64)
    forward = ops.phase == Phase.FORWARD
    backward = np.isin(ops.phase, (Phase.BACKWARD, Phase.RECOMPUTE))
    waits = np.zeros(len(ops)) if network is None else _waits(timed, network)
    layers, counts = _Layers.of(timed), timed.run_counts()
    unsent = layers.unsent(time, waits)
    passes = [
        PassCost(*(layers.sums(column * phase) for column in (time, waits, unsent)))
        for phase in (forward, backward)
    ]
    return StepCost(
        forward=passes[0],
        backward=passes[1],
        adding_ps=layers.shares(*_adding(timed, system, costs)),
        copying_ps=layers.shares(*_copying(timed, system, costs)),
        all_ps=float((time * (forward | backward) * counts).sum()),
        update_ps=float((time * (ops.phase == Phase.OPTIMIZER) * counts).sum()),
        held=_held(layers),
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
    passes = [layers.sums(flops * its) for its in (phase == Phase.FORWARD, backward)]
    none = np.zeros(layers.count)
    return StepCost(
        **{name: PassCost(its, none, its) for name, its in zip(("forward", "backward"), passes, strict=True)},
        adding_ps=none,
        copying_ps=none,
        all_ps=float((flops * ((phase == Phase.FORWARD) | backward) * step.run_counts()).sum()),
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


def _adding(step: StepGraph, system: System, costs: KnownCosts) -> tuple[Bools, Float64]:
    """Which tensors are gradients that micro-batches add up, and what that takes, in picoseconds."""
    rows = [row for row in final_gradients(step) if not adds_up(step, row)]
    builder = GraphBuilder(name=ACCUMULATE)
    made = [replace(step.tensor(row), sharded=()) for row in rows]
    accumulate(builder, ((one, one.name, at) for at, one in zip(builder.tensors(made), made, strict=True)))
    return _of_tensors(step, rows, builder.build(StepGraph), system, costs)


def _copying(step: StepGraph, system: System, costs: KnownCosts) -> tuple[Bools, Float64]:
    """Which tensors are gradients that buckets are filled with, and what the copy takes, in picoseconds."""
    rows = final_gradients(step)
    builder = GraphBuilder(name="copies")
    made = [replace(step.tensor(row), sharded=()) for row in rows]
    nbytes = [one.nbytes for one in made]
    builder.computes(
        ["zero.copy_to_bucket"] * len(made), phase=Phase.BACKWARD,
        inputs=[(port,) for port in builder.tensors(made)], bytes_read=nbytes, bytes_written=nbytes,
    )  # fmt: skip
    return _of_tensors(step, rows, builder.build(StepGraph), system, costs)


def _of_tensors(
    step: StepGraph, rows: Sequence[int], made: StepGraph, system: System, costs: KnownCosts
) -> tuple[Bools, Float64]:
    """Which tensors of a step have a kernel of their own in another one, in turn, and what it takes."""
    found, takes = np.zeros(len(step.tensors), bool), np.zeros(len(step.tensors))
    timed = system.annotate(made, costs)
    known, _, _ = timed.ops.duration_on(system.cluster.device)
    found[list(rows)], takes[list(rows)] = True, np.maximum(known, 0)
    return found, takes


def _waits(step: StepGraph, network: NetworkModel) -> Float64:
    """What kernels wait at least in each call of a layer, by the call's first operation; picoseconds.

    Args:
        step: of a rank, with durations.
        network: what communication takes.
    """
    found = np.zeros(len(step.ops))
    job = JobGraph(**{its.name: getattr(step, its.name) for its in fields(step)})
    try:
        takes = durations(job, network.cluster, network=network).picoseconds
    except EchoError:
        return found  # which is said of the plan itself
    phases = np.isin(step.ops.phase, (Phase.BACKWARD, Phase.RECOMPUTE))
    for (begin, end), waits in exposed_ps(job, takes).items():
        if begin >= step.blocks[0].ops.stop and len({*phases[begin:end].tolist()}) == 1:
            found[begin] = waits
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

    def sums(self, column: Float64) -> Float64:
        """Sums of a column of the operation table over what each layer runs."""
        found, totals = np.zeros(self.count), np.concatenate([[0.0], np.cumsum(column)])
        if self.count:
            block, begin, end, instance, _ = self.graph.programs[0].calls.T
            for number, layers in enumerate(self.instances, 1):
                its = block == number
                np.add.at(found, layers[instance[its]], totals[end[its]] - totals[begin[its]])
            placed = self.rows != NONE
            np.add.at(found, self.rows[placed], column[self.graph.blocks[0].ops.start :][: len(placed)][placed])
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
            for layer in self._holders.get(row, ()):
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
        """
        graph, left = self.graph, time + waits
        phase = np.where(graph.ops.phase == Phase.RECOMPUTE, Phase.BACKWARD, graph.ops.phase)
        for of_pass in (Phase.FORWARD, Phase.BACKWARD):
            makers = self._sent(of_pass, phase)
            for block in np.unique(graph.block_of_op[makers]).tolist():
                rows = np.arange(graph.blocks[block].ops.start, graph.blocks[block].ops.stop)
                rows = rows[phase[rows] == of_pass]
                first = makers[graph.block_of_op[makers] == block].min()
                left[rows] = time[rows] * (rows > first)
                if left[rows].any():
                    left[rows] += waits[rows]
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
