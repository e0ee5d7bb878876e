"""Writes the step of one expert-parallel rank: local experts, and the exchanges before and after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from math import prod

from echograph.ir import types as t
from echograph.ir.columns import NONE
from echograph.ir.graph import Axis, StepGraph
from echograph.ir.passes.expert_parallel.places import Away, Choice, ExpertPlacement, Load, Places, before
from echograph.ir.passes.gradients import axes_group, overflow_flags, total_norms
from echograph.ir.passes.rewrite import StepWriter
from echograph.ir.passes.tensor_parallel.rules import VIEWS, Shard
from echograph.ir.passes.tensor_parallel.sharding import operator

_KINDS = t.CollectiveKind
_INDEX_BYTES = 8
"""Of the position of a row, as torch indexes."""


def write(graph: StepGraph, places: Places, load: Load, axes: Sequence[Axis]) -> StepGraph:
    """The step of one rank.

    Args:
        graph: the step with all experts.
        places: where its tensors are.
        load: the share of the experts' work.
        axes: those whose ranks share the experts, outermost first; what the mesh lacks is put outside it.
    """
    return _Writer(graph, places, load, axes).write()


class _Writer(StepWriter):
    """Copies the step with local shapes, and moves rows between home and experts where operations want them."""

    def __init__(self, graph: StepGraph, places: Places, load: Load, axes: Sequence[Axis]) -> None:
        super().__init__(graph)
        self.places, self.load = places, load
        self.axes = tuple(axis.name for axis in axes)
        self.copies: dict[tuple[int, ExpertPlacement], int] = {}
        self.scalars = {*total_norms(graph), *overflow_flags(graph)} if load.size > 1 else set()
        if load.size > 1:
            self.builder.mesh = (*(axis for axis in axes if axis not in graph.mesh), *graph.mesh)
            self.group, self.stream = axes_group(self.builder, self.axes)

    # -- tensors and operations ----------------------------------------------------------------------------

    def tensor(self, index: int, **changes: object) -> int:
        """New row of an old tensor, with its local shape."""
        local = self._local(index)
        return super().tensor(index, shape=local.shape, sharded=local.sharded, **changes)

    def operation(self, op: t.Op) -> None:
        """Writes an operation where it is chosen to be."""
        choice = self.places.choices.get(op.id)
        if choice is None:
            self.copy(op)
        else:
            # The last input first: the ends of the groups tell how many rows will come.
            pairs = [*zip(op.inputs, choice.inputs, strict=True)]
            reads = [self._read(index, place, op) for index, place in reversed(pairs)][::-1]
            for index in op.outputs:
                alias = self.graph.tensors[index].alias_of
                if alias in op.inputs:
                    moved = reads[op.inputs.index(alias)]
                    self.part.tensors[index] = self.add_tensor(self._local(index), moved)
            self.copy(op, inputs=reads, **self._work(op, choice))
        if op.id in self.scalars:
            index = op.outputs[-1]
            scalar = self.graph.tensors[index]
            made = self.add_tensor(scalar, self.part.tensors[index])
            self._collective(_KINDS.ALL_REDUCE, scalar, scalar.nbytes, op, self.part.tensors[index], made)
            self.part.tensors[index] = made

    def _local(self, index: int) -> t.Tensor:
        tensor, place = self.graph.tensors[index], self.places.places.get(index)
        divided = place is not None and not place.rows and tensor.role.persistent and self.load.size > 1
        sharded = (*self.axes, *tensor.sharded) if divided else tensor.sharded
        return replace(tensor, shape=self.load.local(tensor.shape, place), sharded=sharded)

    def _work(self, op: t.Op, choice: Choice) -> dict[str, object]:
        """A rank's part of an operation's work; durations of the whole one no longer hold."""
        ins, outs = [*zip(op.inputs, choice.inputs, strict=True)], [*zip(op.outputs, choice.outputs, strict=True)]
        share = next((self._share(i, p) for i, p in (*ins, *outs) if p is not None), Fraction(1))
        if isinstance(op, t.Collective):
            return {"bytes_per_rank": int(op.bytes_per_rank * share), "durations": ()}
        if not isinstance(op, t.Compute) or not choice.away:
            return {}
        return {
            "flops": int(op.flops * share),
            "bytes_read": self._bytes(ins, op.bytes_read),
            "bytes_written": self._bytes(outs or ins, op.bytes_written),
            "durations": (),
        }

    def _share(self, index: int, place: ExpertPlacement) -> Fraction:
        whole = self.graph.tensors.shape.row(index)
        return Fraction(prod(self.load.local(whole, place)), max(1, prod(whole)))

    def _bytes(self, placed: Sequence[tuple[int, ExpertPlacement]], nbytes: int) -> int:
        """Bytes of the parts: exact where the whole is the sum of the tensors, else in proportion."""
        whole = local = 0
        for index, place in dict(placed).items():
            size = self.graph.tensors[index].nbytes
            whole += size
            local += int(size * self._share(index, place))
        if whole == nbytes:
            return local
        return nbytes * local // whole if whole else nbytes

    # -- between home and experts --------------------------------------------------------------------------

    def _read(self, index: int, wanted: ExpertPlacement, op: t.Op) -> int:
        """The tensor where an operation wants it, moved before the operation if need be."""
        has = self.places.places.get(index)
        if has == wanted:
            return self.tensor(index)
        if (index, wanted) not in self.copies:
            self.copies[index, wanted] = self._move(index, has, wanted, op)
        return self.copies[index, wanted]

    def _move(self, index: int, has: ExpertPlacement, wanted: ExpertPlacement, op: t.Op) -> int:
        if (view := self._view(index, wanted, op)) is not None:
            return view
        if wanted is None:
            assert has is not None
            return self._combine(index, has, op)
        if not wanted.rows:
            return self._own_ends(index, wanted, op)
        if index in self.places.ends:
            return self._own_experts(index, wanted, op)
        return self._dispatch(index, wanted, op)

    def _view(self, index: int, wanted: ExpertPlacement, op: t.Op) -> int | None:
        """Of a view, what it is a view of is moved, so that several views share the exchange."""
        graph, maker = self.graph, int(self.graph.maker[index])
        if maker == NONE or operator(graph, maker) not in VIEWS or len(graph.ops.outputs.row(maker)) != 1:
            return None
        (source,), view = graph.ops.inputs.row(maker)[:1], graph.ops[maker]
        shapes = graph.tensors.shape.row(source), graph.tensors.shape.row(index)
        place = None if wanted is None else before(operator(graph, maker), *shapes, wanted)
        if place is None and (wanted is not None or self.places.places.get(source) is None):
            return None
        moved = self._read(source, place, op)
        tensor = graph.tensors[index]
        made = self.add_tensor(replace(tensor, shape=self.load.local(tensor.shape, wanted), port=False), moved)
        self.builder.compute(view.name, phase=op.phase, module=op.module, inputs=(moved,), outputs=(made,))
        return made

    def _dispatch(self, index: int, place: Away, op: t.Op) -> int:
        """Rows to the experts: pad or drop, exchange, and put the rows of each expert together."""
        tensor, row = self.graph.tensors[index], self._read(index, None, op)
        sent, received = self._counts(tensor, place)
        if self.load.capacity_factor is not None:
            row = self._permute("aten.index", row, self._rows(tensor, place, sent), op)
        if self.load.size > 1:
            row = self._exchange(row, tensor, place, max(sent, received), received, op)
            if place.experts > self.load.size:
                row = self._permute("aten.cat", row, self._rows(tensor, place, received), op)
        return row

    def _combine(self, index: int, place: Away, op: t.Op) -> int:
        """Rows back home: the same the other way round."""
        tensor, row = self.graph.tensors[index], self.tensor(index)
        sent, received = self._counts(tensor, place)
        if self.load.size > 1:
            if place.experts > self.load.size:
                row = self._permute("aten.cat", row, self._rows(tensor, place, received), op)
            row = self._exchange(row, tensor, place, max(sent, received), sent, op)
        if self.load.capacity_factor is not None:
            row = self._permute("aten.index", row, replace(tensor, port=False), op)
        return row

    def _counts(self, tensor: t.Tensor, place: Away) -> tuple[int, int]:
        rows = tensor.shape[place.along.dim] // place.along.before
        return self.load.sent(rows, place.experts), self.load.received(rows, place.experts)

    def _rows(self, tensor: t.Tensor, place: Away, rows: int) -> t.Tensor:
        dim = place.along.dim
        extents = (*tensor.shape[:dim], place.along.before * rows, *tensor.shape[dim + 1 :])
        return replace(tensor, shape=extents, port=False)

    def _permute(self, name: str, row: int, made: t.Tensor, op: t.Op) -> int:
        """Copies rows in another order: by position (`index`), or as slices between known ends (`cat`)."""
        output = self.add_tensor(made, None)
        positions = _INDEX_BYTES * made.shape[0] if name == "aten.index" else 0
        self.builder.compute(
            name, phase=op.phase, module=op.module, inputs=(row,), outputs=(output,),
            bytes_read=made.nbytes + positions, bytes_written=made.nbytes,
        )  # fmt: skip
        return output

    def _exchange(self, row: int, tensor: t.Tensor, place: Away, most: int, rows: int, op: t.Op) -> int:
        """An all-to-all: the buffer is that of what the rank sends or receives, whichever is larger."""
        made = self.add_tensor(self._rows(tensor, place, rows), None)
        self._collective(
            _KINDS.ALL_TO_ALL, tensor, self._rows(tensor, place, most).nbytes, op, row, made, t.Payload.ACTIVATION
        )
        return made

    # -- how many rows -------------------------------------------------------------------------------------

    def _own_ends(self, index: int, place: Away, op: t.Op) -> int:
        """Ends of the groups of the rank's own experts: every rank tells how many rows it has for whom."""
        ends = self.graph.tensors[index]
        local = replace(ends, shape=self.load.local(ends.shape, place), port=False)
        if self.load.capacity_factor is not None:  # known beforehand
            made = self.add_tensor(local, None)
            self.builder.compute(
                "aten.arange", phase=op.phase, module=op.module, outputs=(made,), bytes_written=local.nbytes
            )
            return made
        counts = replace(local, name="counts", shape=(self.load.size, place.experts))
        gathered = self.add_tensor(counts, None)
        self._collective(_KINDS.ALL_GATHER, ends, counts.nbytes, op, self.tensor(index), gathered, t.Payload.OTHER)
        copied = self.builder.copy(
            "counts", t.CopyDirection.DEVICE_TO_HOST, nbytes=counts.nbytes, phase=op.phase, module=op.module,
            inputs=(gathered,),
        )  # fmt: skip
        self.builder.host("synchronize", phase=op.phase, module=op.module, deps=(copied,))
        made = self.add_tensor(local, None)
        self.builder.compute(
            "aten.cumsum", phase=op.phase, module=op.module, inputs=(gathered,), outputs=(made,),
            bytes_read=counts.nbytes, bytes_written=local.nbytes,
        )  # fmt: skip
        return made

    def _own_experts(self, index: int, place: Away, op: t.Op) -> int:
        """The expert of each row that came: repeated as often as it has rows."""
        ends = self.places.ends[index]
        counted = self._read(ends, Away(Shard(0), place.experts, rows=False), op)
        tensor = self.graph.tensors[index]
        local = replace(tensor, shape=self.load.local(tensor.shape, place), port=False)
        made = self.add_tensor(local, None)
        self.builder.compute(
            "aten.repeat_interleave", phase=op.phase, module=op.module, inputs=(counted,), outputs=(made,),
            bytes_read=self.graph.tensors[ends].nbytes // self.load.size, bytes_written=local.nbytes,
        )  # fmt: skip
        return made

    def _collective(
        self,
        kind: t.CollectiveKind,
        tensor: t.Tensor,
        nbytes: int,
        op: t.Op,
        read: int,
        made: int,
        payload: t.Payload = t.Payload.GRADIENT,
    ) -> None:
        self.builder.collective(
            f"ep.{kind.name.lower()}", kind, group=self.group, bytes_per_rank=nbytes, dtype=tensor.dtype,
            payload=payload, asynchronous=True, phase=op.phase, module=op.module, inputs=(read,), outputs=(made,),
            stream=self.stream,
        )  # fmt: skip
