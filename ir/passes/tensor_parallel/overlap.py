"""Tensor-parallel communication beside products: what of it a layer does not wait for.

Bulk: in backward the input of a column-parallel layer, gathered again for the gradient of its weight, is gathered
beside the product that makes the gradient of the input; and this gradient is scattered (or all-reduced) beside
those that make the gradients of weights, which come after it. Megatron-LM does so since 2022, whatever its options
are (`LinearWithGradAccumulationAndAsyncCommunication`; Korthikanti et al. 2022, section 4.2.2), and so does
Transformer Engine.

Chunks: what remains is cut up with the product that it belongs to, so that one part is computed while another is
on its way. A column-parallel product begins with the rows of its own rank, and takes those of the others as they
come (Transformer Engine's "ring_exchange", PyTorch's async tensor parallelism); a row-parallel one is cut into
`splits`, each scattered once it is made ("pipeline"; `--tp-comm-overlap` of Megatron-LM is bulk and both).

Each chunk of the product is a kernel of its own; those of its communication are not. With n equal chunks of a
product of time g and a gather of time a, the last chunk arrives at a, and g/n is left to compute then: the pair
takes max(g, a + g/n). So the last n-th of the rows waits for the whole gather, and what is computed before it does
not; its operand is then on its way, not made (`tp.arriving`). With a scatter of time s the first n-th of the
product is made first, scattering begins after it, and the last n-th of the bytes goes when all is made: max(g +
s/n, g/n + s). Several products of what was gathered (queries, keys and values) are one.

What Transformer Engine gathers in backward it first copies to the buffer that the other ranks read (`tp.share`;
v1.11, pytorch/module/base.py and layernorm_linear.py, copy_input_to_ubuf), but where a cast to 8 bit writes it
there; forward a norm does.

PyTorch's asynchronous tensor parallelism (`dtensor`) finds patterns in a compiled layer: a gather and the products
of what it gathers, and a product whose result is scattered. A sum of several products, as the gradient of what
queries, keys and values share, is scattered with nothing beside it (inductor's fx_passes/micro_pipeline_tp.py). A
rank's own part is first copied to where the others read it (`tp.share`). What the ranks have made for each other
lies side by side, and is added up once all of it is there (`tp.sum`), so a product has as many parts as there are
ranks (torch/distributed/_symmetric_memory: `_pipelined_all_gather_and_consume`, `_pipelined_produce_and_all2all`).

It comes after the passes that choose kernels, before those that lower the step to a job. The head is left out.

A library that calls `torch.distributed` without `async_op` overlaps nothing: the stream of the kernels waits for
each collective before it goes on (`TpCommWaits`), whatever the next kernel reads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import ClassVar

from echograph.errors import PlanError
from echograph.ir import types as t
from echograph.ir.columns import NONE
from echograph.ir.graph import StepGraph
from echograph.ir.passes.model import find_layers
from echograph.ir.passes.rewrite import StepWriter

AXIS = "tp"
SPLITS = 4
"""Parts of a product before a scatter: `num_splits` of Transformer Engine's `initialize_ub` by default."""
_REDUCTIONS = (t.CollectiveKind.REDUCE_SCATTER, t.CollectiveKind.ALL_REDUCE)
SYMMETRIC = "tp.symmetric_"
"""What the names of collectives begin with that ranks make by reading each other's memory, beside products."""
_RESHAPES = ("aten.view", "aten._unsafe_view", "aten.reshape")


@dataclass(frozen=True, slots=True, kw_only=True)
class TpCommOverlap:
    """The step of a tensor-parallel rank with communication beside products.

    Attributes:
        chunks: whether products and their communication are cut up, too; else bulk overlap alone.
        splits: parts of a product before a scatter.
        dtensor: whether the chunks are those of PyTorch's asynchronous tensor parallelism.
    """

    name: ClassVar[str] = "tp_comm_overlap"

    chunks: bool = True
    splits: int = SPLITS
    dtensor: bool = False

    def __call__(self, graph: StepGraph) -> StepGraph:
        """The step graph.

        Raises:
            PlanError: less than two splits.
        """
        if self.splits < 2:
            raise PlanError(f"tp_comm_overlap: {self.splits} splits: give 2 or more")
        ranks = next((axis.size for axis in graph.mesh if axis.name == AXIS), 1)
        if ranks == 1:
            return graph
        symmetric = self.chunks and self.dtensor
        ordered = _Bulk(_Flow(graph), reductions=not symmetric).write()
        if not self.chunks:
            return ordered
        return _Chunks(_Flow(ordered), ranks if symmetric else self.splits, symmetric).write()


@dataclass(frozen=True, slots=True, kw_only=True)
class TpCommWaits:
    """The step of a tensor-parallel rank whose kernels wait for each collective, as Megatron-LM's did until 2022.

    Source: NVIDIA/Megatron-LM v2.5, megatron/mpu/mappings.py: `torch.distributed.all_reduce` forward and backward,
    after both products of a linear layer's gradients.
    """

    name: ClassVar[str] = "tp_comm_waits"

    def __call__(self, graph: StepGraph) -> StepGraph:
        """The step graph."""
        return _Waits(_Flow(graph)).write()


class _Flow:
    """What reads and makes what in a step of a tensor-parallel rank."""

    def __init__(self, graph: StepGraph) -> None:
        self.graph = graph
        self.readers = self._readers()
        self.names = [graph.strings[name] for name in graph.ops.name.tolist()]
        self.ops = list(graph.ops)
        calls = graph.programs[0].calls.tolist()
        cuts = {row for _, begin, end, _, _ in calls for row in (begin, end)}
        self.call_of = [0] * len(self.ops)
        for row in range(1, len(self.ops)):
            self.call_of[row] = self.call_of[row - 1] + (row in cuts)
        of_layers = {row for layer in find_layers(graph) for row in layer.rows}
        self.of_layers = [row in of_layers or self._forward(row) in of_layers for row in range(len(self.ops))]
        self.modules = {self.ops[row].module for row in of_layers}

    def _readers(self) -> dict[int, list[int]]:
        """The operations that read each tensor, in order; not the views that nothing reads."""
        graph, found = self.graph, defaultdict[int, list[int]](list)
        bound = {i for block in graph.blocks for instance in block.instances for i in instance.bindings}
        kept = {graph.locate_tensor(i)[2] for i in bound}
        for row in range(len(graph.ops) - 1, -1, -1):
            outputs = graph.ops.outputs.row(row)
            if not graph.ops.is_view[row] or any(i in found or i in kept for i in outputs):
                for index in graph.ops.inputs.row(row):
                    found[index].insert(0, row)
        return found

    def _forward(self, row: int) -> int:
        return int(self.graph.ops.forward_op[row])

    def is_product(self, row: int) -> bool:
        """Whether an operation is a matrix product."""
        op = self.ops[row]
        return isinstance(op, t.Compute) and isinstance(op.attributes, t.Gemm)

    def communication(self, row: int, *kinds: t.CollectiveKind) -> t.Collective | None:
        """A collective of activations over the axis, of one of some kinds; None for any other operation."""
        op = self.ops[row]
        if not isinstance(op, t.Collective) or op.collective not in kinds or op.payload != t.Payload.ACTIVATION:
            return None
        return op if self.graph.groups[op.group].axes == (AXIS,) else None

    def reshaped(self, tensor: int) -> list[int]:
        """A tensor and what holds the same rows in another shape."""
        found = [tensor]
        for index in found:
            found += [
                i for row in self.readers[index] if self.names[row] in _RESHAPES for i in self.ops[row].outputs
            ]
        return found

    def products_of(self, gather: t.Collective) -> list[int]:
        """Products in the call of a gather whose rows are those that it gathers."""
        held = set(self.reshaped(gather.outputs[0]))
        rows = sorted({row for index in held for row in self.readers[index] if self.is_product(row)})
        same = [row for row in rows if self.call_of[row] == self.call_of[gather.id]]
        return [row for row in same if self.of_layers[row] and self.left(row) in held]

    def left(self, row: int) -> int:
        """The left operand of a product."""
        op = self.ops[row]
        if self.names[row] == "aten._scaled_mm":
            return op.inputs[0]
        return [i for i in op.inputs if len(self.graph.tensors.shape.row(i)) >= 2][-2]

    def before(self, row: int, first: int) -> set[int]:
        """The operations from a row on that another needs, itself included."""
        found, open_rows = set[int](), [row]
        while open_rows:
            here = open_rows.pop()
            if here < first or here in found:
                continue
            found.add(here)
            made = (int(self.graph.maker[i]) for i in self.ops[here].inputs)
            open_rows += [maker for maker in (*made, *self.ops[here].deps) if maker != NONE]
        return found


class _Waits(StepWriter):
    """Writes kernels that come after a tensor-parallel collective, in the same call, as waiting for it."""

    def __init__(self, flow: _Flow) -> None:
        super().__init__(flow.graph)
        self.flow = flow
        self.begun: t.Collective | None = None

    def operation(self, op: t.Op) -> None:
        begun = self.begun
        if isinstance(op, t.Collective) and self.graph.groups[op.group].axes == (AXIS,):
            self.begun = op
        elif begun is not None and isinstance(op, t.Compute) and not op.is_view:
            self.begun = None
            if self.flow.call_of[op.id] == self.flow.call_of[begun.id]:
                self.copy(op, deps=[self.part.ops[row] for row in {*op.deps, begun.id}])
                return
        self.copy(op)


class _Bulk(StepWriter):
    """Writes backward in Megatron-LM's order: gradients of inputs before those of weights.

    Args:
        flow: of the step.
        reductions: whether a reduction comes before gradients of weights, too, or gathers' products alone.
    """

    def __init__(self, flow: _Flow, *, reductions: bool = True) -> None:
        super().__init__(flow.graph)
        self.flow, self.reductions = flow, reductions
        self.orders: dict[int, list[int]] = {}

    def order(self, block: int) -> Sequence[int]:
        if block not in self.orders:
            rows = list(self.graph.blocks[block].ops)
            for anchor, products in list(self._anchors(rows)):
                rows = self._ordered(rows, anchor, products)
            self.orders[block] = rows
        return self.orders[block]

    def _anchors(self, rows: Iterable[int]) -> Iterator[tuple[int, list[int]]]:
        """What gradients of weights come after: the product or the reduction of an input's gradient."""
        flow = self.flow
        for row in rows:
            if self.graph.ops.phases[row] != t.Phase.BACKWARD:
                continue
            if (gather := flow.communication(row, t.CollectiveKind.ALL_GATHER)) is not None:
                yield from ((product, [product]) for product in flow.products_of(gather))
            elif self.reductions and flow.communication(row, *_REDUCTIONS) is not None:
                yield row, self._summands(row)

    def _summands(self, row: int) -> list[int]:
        """The products whose results a reduction adds up."""
        found, open_rows = set[int](), [row]
        while open_rows:
            for index in self.flow.ops[open_rows.pop()].inputs:
                maker = int(self.graph.maker[index])
                if maker == NONE or self.graph.ops.phases[maker] != t.Phase.BACKWARD:
                    continue
                if self.flow.is_product(maker):
                    found.add(maker)
                elif not self.graph.ops.flops[maker] and self.flow.call_of[maker] == self.flow.call_of[row]:
                    open_rows.append(maker)
        return sorted(found)

    def _ordered(self, rows: list[int], anchor: int, products: list[int]) -> list[int]:
        """The order with the gradients of weights, of the layers whose gradients products are, after an anchor."""
        flow, ops = self.flow, self.graph.ops
        call = [row for row in rows if flow.call_of[row] == flow.call_of[anchor]]
        place = {row: at for at, row in enumerate(call)}
        needed = flow.before(anchor, min(call))
        layers = {int(ops.forward_op[row]) for row in products} - {NONE}
        late = {
            row for row in call
            if int(ops.forward_op[row]) in layers and ops.phases[row] == t.Phase.BACKWARD and row not in needed
        }  # fmt: skip
        early = self._add_what_is_read_by(late, [row for row in reversed(call) if row not in needed])
        for row in call:  # what reads what is late
            if row not in needed and any(int(self.graph.maker[i]) in late for i in flow.ops[row].inputs):
                late.add(row)
        late = {row for row in late if place[row] < place[anchor]}
        first = min((place[row] for row in products), default=0)
        early = {row for row in early if place[row] > first and row not in late}
        if any(row not in early and place[row] >= first for e in early for row in self._makers(e, place)):
            early = set()
        changed = [row for row in call[:first] if row not in late] + sorted(early, key=place.__getitem__)
        changed += [row for row in call[first : place[anchor] + 1] if row not in late and row not in early]
        changed += sorted(late, key=place.__getitem__)
        changed += [row for row in call[place[anchor] + 1 :] if row not in early]
        at = rows.index(call[0])
        return [*rows[:at], *changed, *rows[at + len(call) :]]

    def _add_what_is_read_by(self, late: set[int], rows: Iterable[int]) -> set[int]:
        """Adds what nothing but late operations reads; gathers among it, and what they read alone, are early."""
        early: set[int] = set()
        for row in rows:
            readers = {r for i in self.flow.ops[row].outputs for r in self.flow.readers[i]}
            if row in late or not readers or self.graph.ops.phases[row] != t.Phase.BACKWARD:
                continue
            gathers = self.flow.communication(row, t.CollectiveKind.ALL_GATHER) is not None
            if readers <= early or (gathers and readers <= late | early):
                early.add(row)
            elif readers <= late:
                late.add(row)
        return early

    def _makers(self, row: int, place: Collection[int]) -> Iterator[int]:
        makers = [int(self.graph.maker[i]) for i in self.flow.ops[row].inputs]
        return (maker for maker in (*makers, *self.flow.ops[row].deps) if maker in place)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """A product in parts.

    Attributes:
        rows: of each part, in order.
        arriving: the shard that stands for what is gathered, where all parts but the last do not wait for that.
        scatter: the collective that begins after the first part; None where none does.
    """

    rows: tuple[int, ...]
    arriving: int | None = None
    scatter: t.Collective | None = None


def _even(count: int, parts: int) -> tuple[int, ...]:
    """Rows in parts that differ by one at most."""
    return tuple(count * (i + 1) // parts - count * i // parts for i in range(parts))


class _Chunks(StepWriter):
    """Writes products in parts, beside the gather before or the scatter after them.

    `free` has the products that do not wait for a gather, with the shard that is gathered. Views of what is
    gathered are written when they are read first, as what follows them on their stream waits for them (`held`).
    """

    def __init__(self, flow: _Flow, splits: int, symmetric: bool) -> None:
        super().__init__(flow.graph)
        self.flow, self.splits, self.symmetric = flow, splits, symmetric
        self.beside: set[int] = set()
        self.ranks = next(axis.size for axis in flow.graph.mesh if axis.name == AXIS)
        self.free: dict[int, int] = {}
        self.cuts: dict[int, _Cut] = {}
        self.begun: dict[int, int] = {}
        self.views: dict[int, int] = {}
        self.held: dict[int, t.Op] = {}
        for row in range(len(flow.ops)):
            if (gather := flow.communication(row, t.CollectiveKind.ALL_GATHER)) is not None:
                self._beside_gather(gather)
        for row in range(len(flow.ops)):
            if (scatter := flow.communication(row, t.CollectiveKind.REDUCE_SCATTER)) is not None:
                self._beside_scatter(scatter)

    def _beside_gather(self, gather: t.Collective) -> None:
        """The last n-th of the work on what is gathered waits for it; the rest does not."""
        products = self.flow.products_of(gather)
        flops = self.graph.ops.flops
        waiting = sum(int(flops[row]) for row in products) / self.ranks
        for row in reversed(products):
            work, count = int(flops[row]), self._count(row)
            rows = ceil(count * max(0.0, waiting) / work) if work else count
            waiting -= work
            if rows == 0:
                self.free[row] = gather.inputs[0]
            elif rows < count:
                before = _even(count - rows, min(self.ranks - 1, count - rows))
                self.cuts[row] = _Cut(rows=(*before, rows), arriving=gather.inputs[0])
        if products:
            self.beside.add(gather.id)
        self._hold_views(gather, products[-1] if products else 0)

    def _hold_views(self, gather: t.Collective, last: int) -> None:
        """Views of what is gathered wait until they are read, or until the last product that is cut for it."""
        flow, held, views = self.flow, {gather.outputs[0]}, list[int]()
        for row in range(gather.id + 1, len(flow.ops)):
            if flow.call_of[row] != flow.call_of[gather.id]:
                break
            if held.intersection(flow.ops[row].inputs) and self.graph.ops.is_view[row]:
                held |= {*flow.ops[row].outputs}
                views.append(row)
            elif held.intersection(flow.ops[row].inputs) and not self.symmetric:
                last = max(last, row)
        self.views |= {row: last for row in views if row < last}

    def _beside_scatter(self, scatter: t.Collective) -> None:
        """Scattering begins after the first part of the product that makes what is scattered."""
        chain, index = [scatter.inputs[0]], scatter.inputs[0]
        while (maker := int(self.graph.maker[index])) != NONE and self.flow.names[maker] in _RESHAPES:
            index = self.flow.ops[maker].inputs[0]
            chain.append(index)
        if maker == NONE or not self._is_cut_for(scatter, maker) or self._others_read(chain, scatter):
            return
        if self._count(maker) >= self.splits:
            self.cuts[maker] = _Cut(rows=_even(self._count(maker), self.splits), scatter=scatter)

    def _is_cut_for(self, scatter: t.Collective, product: int) -> bool:
        flow = self.flow
        together = flow.is_product(product) and flow.call_of[product] == flow.call_of[scatter.id]
        alone = product not in self.cuts and product not in self.free
        return together and alone and flow.of_layers[product] and not self._hidden(scatter, product)

    def _hidden(self, scatter: t.Collective, product: int) -> bool:
        """Whether gradients of weights are computed beside a scatter: then it is in bulk."""
        flow, forward = self.flow, int(self.graph.ops.forward_op[product])
        if self.graph.ops.phase[product] != t.Phase.BACKWARD or self.symmetric:
            return False
        after = range(scatter.id + 1, len(flow.ops))
        same = (row for row in after if flow.call_of[row] == flow.call_of[product])
        return any(flow.is_product(row) and int(self.graph.ops.forward_op[row]) == forward for row in same)

    def _others_read(self, chain: Collection[int], scatter: t.Collective) -> bool:
        readers = {row for index in chain for row in self.flow.readers[index]}
        return any(row != scatter.id and not set(self.flow.ops[row].outputs) <= set(chain) for row in readers)

    def _count(self, row: int) -> int:
        return self.graph.tensors.shape.row(self.flow.left(row))[-2]

    # -- writing -------------------------------------------------------------------------------------------

    def operation(self, op: t.Op) -> None:
        if op.id in self.views:
            self.held |= dict.fromkeys(op.outputs, op)
            return
        self._write(op)
        for view in [view for view in self.held.values() if self.views[view.id] == op.id]:
            if view.outputs[0] in self.held:
                self.tensor(view.outputs[0])

    def tensor(self, index: int, **changes: object) -> int:
        if index in self.held:
            self.copy(self.held.pop(index))
        return super().tensor(index, **changes)

    def _write(self, op: t.Op) -> None:
        if isinstance(op, t.Compute) and op.id in self.free:
            rows = self._count(op.id)
            self._part(op, rows, self._arriving(op, rows, self.free[op.id]), self.tensor(op.outputs[0]))
        elif isinstance(op, t.Compute) and op.id in self.cuts:
            self._in_parts(op, self.cuts[op.id])
        elif isinstance(op, t.Collective) and op.id in self.begun:
            self._end(op)
        elif isinstance(op, t.Collective) and self._is_shown(op):
            shown = self._moved(op, "tp.share", self.tensor(op.inputs[0]), op.inputs[0], op.inputs[0])
            self.copy(replace(op, name=SYMMETRIC + "all_gather") if self.symmetric else op, inputs=[shown])
        else:
            self.copy(op)

    def _is_shown(self, op: t.Collective) -> bool:
        """Whether a rank copies its part of what is gathered to where the others read it."""
        if self.symmetric:
            return op.id in self.beside
        maker = int(self.graph.maker[op.inputs[0]])
        cast = maker != NONE and self.flow.names[maker].startswith("fp8.cast")
        there = cast and self.graph.ops.phase[maker] == t.Phase.BACKWARD
        gathers = self.flow.communication(op.id, t.CollectiveKind.ALL_GATHER) is not None
        return gathers and op.phase == t.Phase.BACKWARD and op.module in self.flow.modules and not there

    def _in_parts(self, op: t.Compute, cut: _Cut) -> None:
        output = self.graph.tensors[op.outputs[0]]
        made = None if output.alias_of is None else self.tensor(output.alias_of)
        for place, rows in enumerate(cut.rows):
            on_its_way = cut.arriving if place + 1 < len(cut.rows) else None
            operand = self._rows(op, rows) if on_its_way is None else self._arriving(op, rows, on_its_way)
            made = self.add_tensor(output, made)
            self._part(op, rows, operand, made)
            if place == 0 and cut.scatter is not None:
                self._begin(cut.scatter, made)
            self.part.tensors[output.id] = made

    def _arriving(self, op: t.Compute, rows: int, shard: int) -> int:
        """The left operand of rows that are on their way; it has no memory of its own here."""
        return self._view(op, "tp.arriving", rows, self.tensor(shard))

    def _rows(self, op: t.Compute, rows: int) -> int:
        return self._view(op, "aten.slice", rows, self.tensor(self.flow.left(op.id)))

    def _view(self, op: t.Compute, name: str, rows: int, source: int) -> int:
        left = self.graph.tensors[self.flow.left(op.id)]
        shape = (*left.shape[:-2], rows, left.shape[-1])
        made = self.builder.tensor(left.name, shape, left.dtype, left.role, alias_of=source)
        self.builder.compute(name, phase=op.phase, module=op.module, inputs=(source,), outputs=(made,))
        return made

    def _part(self, op: t.Compute, rows: int, operand: int, output: int) -> None:
        """Writes some rows of a product."""
        left = self.flow.left(op.id)
        whole, count = self.graph.tensors[left], self._count(op.id)
        at = op.inputs.index(left)
        inputs = [operand if place == at else self.tensor(i) for place, i in enumerate(op.inputs)]
        self.copy(
            replace(op, durations=()), inputs=inputs, outputs=(output,), flops=op.flops * rows // count,
            bytes_read=op.bytes_read - whole.nbytes * (count - rows) // count,
            bytes_written=op.bytes_written * rows // count,
        )  # fmt: skip

    def _begin(self, op: t.Collective, first: int) -> None:
        """Scatters what does not have to wait for the last part of a product."""
        share = op.bytes_per_rank // self.splits
        (output,) = op.outputs
        self.begun[op.id] = self.tensor(output)
        self.builder.add(
            self._named(op), inputs=(first,), outputs=(self.begun[op.id],), deps=(), durations=(),
            bytes_per_rank=op.bytes_per_rank - share,
        )  # fmt: skip

    def _end(self, op: t.Collective) -> None:
        """Scatters the rest."""
        (output,) = op.outputs
        self.part.tensors[output] = self.add_tensor(self.graph.tensors[output], self.begun[op.id])
        self.copy(self._named(op), bytes_per_rank=op.bytes_per_rank // self.splits, durations=())
        if self.symmetric:
            self.part.tensors[output] = self._moved(op, "tp.sum", self.tensor(output), op.inputs[0], output)

    def _named(self, op: t.Collective) -> t.Collective:
        return replace(op, name=SYMMETRIC + "reduce_scatter") if self.symmetric else op

    def _moved(self, op: t.Collective, name: str, source: int, read: int, written: int) -> int:
        """A kernel that reads as many bytes as one tensor has and writes another, which it makes anew."""
        whole, part = self.graph.tensors[read], self.graph.tensors[written]
        made = self.builder.tensor(part.name, part.shape, part.dtype, t.TensorRole.ACTIVATION)
        self.builder.compute(
            name, phase=op.phase, module=op.module, inputs=(source,), outputs=(made,),
            bytes_read=whole.nbytes, bytes_written=part.nbytes,
        )  # fmt: skip
        return made
