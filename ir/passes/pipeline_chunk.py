"""Writes the block of one pipeline chunk: its part of the main block, with what it receives and sends.

The rows stand in the order in which they run: receives, operations and sends of forward, the same of backward,
then what the optimizer needs. The layers stay blocks of their own, called in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from echograph.errors import PlanError
from echograph.ir import types as t
from echograph.ir.builder import GraphBuilder
from echograph.ir.columns import NONE
from echograph.ir.graph import StepGraph
from echograph.ir.passes.pipeline_placement import Placement
from echograph.ir.passes.pipeline_routes import Part, Routes, part_of
from echograph.ir.passes.rewrite import Call

AXIS = "pp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What all chunks have in common.

    Attributes:
        graph: the step.
        placement: which chunk runs what.
        routes: what crosses between chunks.
        stages: chunk k is on stage k modulo this.
        group: the group of the stages.
        shared: for every gradient that chunks share, the group that all-reduces it; None where two exchange it.
    """

    graph: StepGraph
    placement: Placement
    routes: Routes
    stages: int
    group: int
    shared: dict[int, int | None]


@dataclass(slots=True, kw_only=True)
class Chunk:
    """The block of a chunk as it is written. "Ids" are those of the step.

    Attributes:
        plan: what all chunks have in common.
        number: which chunk.
        builder: the builder, with the chunk's block open.
        block: number of that block.
        rows: new row of each tensor in the block, by id.
        own: position of these rows among those that are no ports.
        ports: ids of the layers' tensors that the ports stand for.
        ops: new row of each operation, by its row in the step.
        forward_ops: ids of the operations elsewhere that are named as forward operations.
        calls: what runs in each part, the layers' calls among it.
        names: for rows that hold a share of a gradient, the gradient's name.
        written: rows of all operations of the block.
        first_id: the id in the job of the block's first tensor, once all blocks are known.
        first_op_id: the same of its first operation.
        growth: what the ids of layers' tensors grow by.
        op_growth: what the ids and rows of layers' operations grow by.
    """

    plan: Plan
    number: int
    builder: GraphBuilder
    block: int
    rows: dict[int, int] = field(default_factory=dict)
    own: dict[int, int] = field(default_factory=dict)
    ports: list[int] = field(default_factory=list)
    ops: dict[int, int] = field(default_factory=dict)
    forward_ops: list[int] = field(default_factory=list)
    calls: dict[Part, list[Call]] = field(default_factory=lambda: {part: [] for part in Part})
    names: dict[int, str] = field(default_factory=dict)
    written: range = range(0)
    first_id: int = 0
    first_op_id: int = 0
    growth: int = 0
    op_growth: int = 0

    def write(self) -> None:
        """Writes all rows, and the calls that run them and the layers."""
        graph, placement = self.plan.graph, self.plan.placement
        first = self.builder.op_count()
        self._name_shares()
        for part in Part:
            self._call(part, self._begin(part))
            for block, begin, end, instance, _ in graph.programs[0].calls.tolist():
                for rows in _of_part(graph, range(begin, end), part):
                    if block == 0:
                        self._call(part, [self._op(row) for row in rows if self.number in placement.ops[row]])
                    elif placement.instances[block, instance] == self.number:
                        self.calls[part].append((block, rows.start, rows.stop, instance, 0))
            self._call(part, self._end(part))
        for (block, instance), chunk in placement.instances.items():
            for bound in graph.blocks[block].instances[instance].bindings if chunk == self.number else ():
                if not self.is_layers(bound):
                    self.tensor(bound)
        for tensor in _untouched(graph) if self.number == 0 else ():
            self.tensor(tensor)
        self.written = range(first, self.builder.op_count())

    def is_layers(self, tensor: int) -> bool:
        """Whether a tensor id names a tensor of a layer of this chunk."""
        block, instance, _ = self.plan.graph.locate_tensor(tensor)
        return block > 0 and self.plan.placement.instances[block, instance] == self.number

    def new_id(self, tensor: int) -> int:
        """The id in the job of a tensor that the block or a layer of the chunk owns."""
        row = self.rows.get(tensor)
        return tensor + self.growth if row is None or row not in self.own else self.first_id + self.own[row]

    def run(self, part: Part, micro_batch: int) -> list[Call]:
        """The calls of a part, once all blocks are known."""
        return [
            (block, begin + grown, end + grown, instance, micro_batch)
            for block, begin, end, instance, _ in self.calls[part]
            for grown in (0 if block == self.block else self.op_growth,)
        ]

    def _call(self, part: Part, ops: list[int]) -> None:
        if not ops:
            return
        calls = self.calls[part]
        begin = ops[0]
        if calls and calls[-1][0] == self.block and calls[-1][2] == begin:
            begin = calls.pop()[1]
        calls.append((self.block, begin, ops[-1] + 1, 0, 0))

    # -- communication -------------------------------------------------------------------------------------

    def _begin(self, part: Part) -> list[int]:
        routes = self.plan.routes
        if part == Part.UPDATE:
            return self._add_shares_up()
        received = routes.up[self.number] if part == Part.FORWARD else routes.down[self.number]
        return [self._receive(tensor, part) for tensor in received]

    def _end(self, part: Part) -> list[int]:
        routes, sent = self.plan.routes, tuple[int, ...]()
        if part == Part.FORWARD and self.number + 1 < self.plan.placement.chunks:
            sent = routes.up[self.number + 1]
        elif part == Part.BACKWARD and self.number > 0:
            sent = routes.down[self.number - 1]
        return [self._send(tensor, part) for tensor in sent]

    def _receive(self, tensor: int, part: Part) -> int:
        value = self.value(tensor)
        made = self._add(tensor, replace(value, role=t.TensorRole.ACTIVATION, port=False, alias_of=None))
        other = self.number - 1 if part == Part.FORWARD else self.number + 1
        tag = 2 * min(other, self.number) + part
        return self._link("recv", part.name.lower(), made, value.nbytes, other, tag, _PHASES[part])

    def _send(self, tensor: int, part: Part) -> int:
        other = self.number + 1 if part == Part.FORWARD else self.number - 1
        tag, nbytes = 2 * min(other, self.number) + part, self.value(tensor).nbytes
        return self._link("send", part.name.lower(), self.tensor(tensor), nbytes, other, tag, _PHASES[part])

    def _link(
        self,
        verb: Literal["send", "recv"],
        what: str,
        row: int,
        nbytes: int,
        other: int,
        tag: int,
        phase: t.Phase,
        payload: t.Payload = t.Payload.ACTIVATION,
    ) -> int:
        """A send of a tensor to the stage of another chunk, or the receive of one from there."""
        add = self.builder.send if verb == "send" else self.builder.recv
        return add(
            f"{AXIS}.{verb}_{what}",
            group=self.plan.group,
            peer=other % self.plan.stages - self.number % self.plan.stages,
            tag=tag,
            nbytes=nbytes,
            payload=payload,
            phase=phase,
            inputs=(row,) if verb == "send" else (),
            outputs=() if verb == "send" else (row,),
            stream=self.builder.stream(f"comm.{AXIS}.{what}.{verb}"),
        )

    def _add_shares_up(self) -> list[int]:
        """Adds what other chunks have of the gradients that it shares with them."""
        shares = self.plan.placement.shares
        mine = [gradient for chunk, gradient in shares if chunk == self.number]
        reduced = [gradient for gradient in mine if self.plan.shared[gradient] is not None]
        ops = [self._all_reduce(gradient) for gradient in reduced]
        if ops:
            ops.append(self.builder.compute(f"{AXIS}.wait", phase=t.Phase.BACKWARD, deps=ops))
        for gradient in mine:
            if gradient not in reduced:
                (other,) = (chunk for chunk, its in shares if its == gradient and chunk != self.number)
                ops += self._exchange(gradient, other)
        return ops

    def _all_reduce(self, gradient: int) -> int:
        value, group = self.plan.graph.tensors[gradient], self.plan.shared[gradient]
        assert group is not None
        return self.builder.collective(
            f"{AXIS}.all_reduce_shared_gradient",
            t.CollectiveKind.ALL_REDUCE,
            group=group,
            bytes_per_rank=value.nbytes,
            dtype=value.dtype,
            payload=t.Payload.GRADIENT,
            asynchronous=True,
            phase=t.Phase.BACKWARD,
            inputs=(self._share(gradient),),
            stream=self.builder.stream(f"comm.{AXIS}.shared_gradient"),
        )

    def _exchange(self, gradient: int, other: int) -> list[int]:
        """An all-reduce of two stages out of more, which no group of axes can say: both send, and both add."""
        value, builder, share = self.plan.graph.tensors[gradient], self.builder, self._share(gradient)
        tag = 2 * self.plan.placement.chunks + sorted(self.plan.shared).index(gradient)
        link = value.nbytes, other, tag, t.Phase.BACKWARD, t.Payload.GRADIENT
        theirs = builder.tensor(f"{value.name}.of_{other}", value.shape, value.dtype, t.TensorRole.ACTIVATION)
        self.own[theirs] = len(self.own)
        send = self._link("send", "shared_gradient", share, *link)
        recv = self._link("recv", "shared_gradient", theirs, *link)
        add = builder.compute(
            "aten.add_",
            phase=t.Phase.BACKWARD,
            inputs=(share, theirs),
            deps=(send,),
            bytes_read=2 * value.nbytes,
            bytes_written=value.nbytes,
        )
        return [send, recv, add]

    def _share(self, gradient: int) -> int:
        """New row of the chunk's share of a gradient."""
        share = self.plan.placement.shares[self.number, gradient]
        return self.tensor(self.plan.graph.tensor_id(0, 0, share))

    # -- rows ----------------------------------------------------------------------------------------------

    def _op(self, row: int) -> int:
        graph = self.plan.graph
        op = graph.ops[row]
        if not set(op.deps) <= self.ops.keys():
            raise PlanError(
                f"operation {row} ({op.name}) waits for one of another pipeline stage: use fewer stages"
            )
        changes: dict[str, object] = {
            "inputs": [self._read(tensor) for tensor in op.inputs],
            "outputs": [self.tensor(graph.tensor_id(0, 0, tensor)) for tensor in op.outputs],
            "deps": [self.ops[before] for before in op.deps],
        }
        if isinstance(op, t.Compute) and op.forward_op is not None:
            changes["forward_op"] = self._forward_op(op.forward_op)
        self.ops[row] = self.builder.add(op, **changes)
        return self.ops[row]

    def _forward_op(self, forward: int) -> int:
        graph = self.plan.graph
        if forward in self.ops:
            return self.ops[forward]
        if forward >= 0:
            forward_id = graph.op_id(0, 0, forward)
        else:
            forward_id = graph.blocks[0].instances[0].op_bindings[-2 - forward]
        if forward_id not in self.forward_ops:
            self.forward_ops.append(forward_id)
        return -2 - self.forward_ops.index(forward_id)

    def _read(self, row: int) -> int:
        """New row of a tensor of the main block; of the chunk's own terms, where it is a sum over chunks."""
        term = self.plan.placement.terms.get((self.number, row), row)
        return self.tensor(self.plan.graph.tensor_id(0, 0, term))

    def tensor(self, tensor: int) -> int:
        """New row of a tensor, by its id in the step: a copy of the main block's, a port for a layer's.

        Raises:
            PlanError: it is made elsewhere and does not come here.
        """
        if tensor in self.rows:
            return self.rows[tensor]
        graph, value = self.plan.graph, self.value(tensor)
        block, _, row = graph.locate_tensor(tensor)
        if block:
            if not self.is_layers(tensor):
                raise PlanError(f"tensor {value.name} is not on pipeline chunk {self.number}: use fewer stages")
            self.ports.append(tensor)
            role = value.role if value.role.persistent else t.TensorRole.ACTIVATION
            return self._add(tensor, replace(value, role=role, port=True, alias_of=None))
        maker = int(graph.maker[row])
        if maker != NONE and self.number not in self.plan.placement.ops[maker]:
            raise PlanError(f"tensor {value.name} is not on pipeline chunk {self.number}: use fewer stages")
        alias = None if value.alias_of is None else self.tensor(graph.tensor_id(0, 0, value.alias_of))
        if row in self.names:  # a share stands for the gradient, so it lives as long
            value = replace(value, name=self.names[row], role=t.TensorRole.GRADIENT)
        return self._add(tensor, replace(value, alias_of=alias))

    def _add(self, tensor: int, value: t.Tensor) -> int:
        row = self.builder.tensor(
            value.name,
            value.shape,
            value.dtype,
            value.role,
            alias_of=value.alias_of,
            port=value.port,
            sharded=value.sharded,
        )
        self.rows[tensor] = row
        if not value.port:
            self.own[row] = len(self.own)
        return row

    def value(self, tensor: int) -> t.Tensor:
        """A tensor of the step with the name that it has in its instance."""
        graph = self.plan.graph
        block, instance, row = graph.locate_tensor(tensor)
        value = graph.tensors[row]
        label = graph.blocks[block].instances[instance].label
        return replace(value, name=value.name.replace("{}", label)) if block else value

    def _name_shares(self) -> None:
        graph = self.plan.graph
        for (chunk, gradient), share in self.plan.placement.shares.items():
            row = share
            while chunk == self.number and row not in (gradient, NONE):
                self.names[row] = graph.tensors[gradient].name
                row = int(graph.tensors.alias_of[row])


_PHASES = {Part.FORWARD: t.Phase.FORWARD, Part.BACKWARD: t.Phase.BACKWARD}


def _untouched(graph: StepGraph) -> Iterator[int]:
    """Tensors of the main block that nothing reads or makes, such as an unused parameter."""
    bound = {b for block in graph.blocks[1:] for instance in block.instances for b in instance.bindings}
    touched = set(graph.ops.inputs.values.tolist()) | set(graph.tensors.alias_of.tolist())
    for row in graph.blocks[0].tensors:
        if graph.maker[row] == NONE and not graph.tensors.port[row] and row not in touched:
            tensor = graph.tensor_id(0, 0, row)
            if tensor not in bound:
                yield tensor


def _of_part(graph: StepGraph, ops: range, part: Part) -> Iterator[range]:
    """Runs of operations that belong to a part."""
    begin = ops.start
    for row in ops:
        if part_of(graph, row) != part:
            if row > begin:
                yield range(begin, row)
            begin = row + 1
    if ops.stop > begin:
        yield range(begin, ops.stop)
