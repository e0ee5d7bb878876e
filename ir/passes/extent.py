"""Where the batch, or the sequence, lies in every tensor of a step, and the step with another one.

It begins with the inputs, and follows the extent through all operations, both ways, until nothing more is found
by a rule an operator. What is not found does not carry it: parameters, and what is made of them alone.

The batch (or the sequence) is one factor of one dim of a tensor, if it is in it at all. A rule says where it is
in the other tensors of an operation when one is known. Unlike placements (`tensor_parallel.rules`), which follow
the data, this runs both ways: what is added to a tensor of four samples is of four samples. (Of one sample this
would not hold: a dim of 1 may be it, or broadcast.)

`MicroBatch` is the same step with another number of samples. All extents, FLOPs and bytes that carry the batch
scale; operations stay what they were. That takes two samples: in a capture of one, what autograd sums over the
batch is not there. A step of one sample does less: autograd sums no gradient over the batch of what was
broadcast, and what is copied only to merge the batch with another dim is a view. These operations are left out.
(Products of unfused attention keep the layout of the copies that they would read of several samples.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod
from typing import ClassVar

from echograph.errors import PlanError
from echograph.ir import types as t
from echograph.ir.columns import NONE
from echograph.ir.graph import StepGraph
from echograph.ir.passes.dims import Ambiguous, Shape, kept_dims, product_factors, transposed, view_dim
from echograph.ir.passes.rewrite import StepWriter
from echograph.ir.types import CollectiveKind

Found = Iterator[tuple[int, "ExtentDim"]]


@dataclass(frozen=True, slots=True)
class ExtentDim:
    """Where a tensor carries the extent.

    Attributes:
        dim: the dim.
        before: the dim is a merge of (before, extent, after).
        extra: elements of the dim beside it: labels padded by one position have one.
    """

    dim: int
    before: int = 1
    extra: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpShapes:
    """What a rule knows of an operation. Operands are numbered: inputs, then outputs.

    Attributes:
        name: operator without namespace and in-place mark.
        shapes: of the operands.
        inputs: how many of them are inputs.
        least: the extent that a dim has at least: of the whole, or of one rank's part.
        parts: sizes of the mesh axes, over which a slice may divide the extent and a gather join it.
        positions: whether the extent is that of the sequence: attention then has two, of queries and of keys.
    """

    name: str
    shapes: tuple[Shape, ...]
    inputs: int
    least: int = 1
    parts: tuple[int, ...] = ()
    positions: bool = False

    @property
    def outputs(self) -> range:
        """Numbers of the outputs."""
        return range(self.inputs, len(self.shapes))


def follow(site: OpShapes, at: int, place: ExtentDim) -> Found:
    """Where the other operands carry the extent, if operand `at` carries it at a place.

    Raises:
        Ambiguous: shapes do not say.
    """
    return RULES.get(site.name, elementwise)(site, at, place)


def view_place(place: ExtentDim, source: Shape, target: Shape) -> ExtentDim | None:
    """Where an extent is after a view of row-major memory; None where the view cuts across it."""
    moved = view_dim(place.dim, place.before, source, target)
    return ExtentDim(*moved) if moved else None


def _joined(site: OpShapes, at: int, place: ExtentDim, links: Sequence[Sequence[tuple[int, int]]]) -> Found:
    """Operands that share a dim with operand `at`: links are lists of (operand, dim)."""
    for link in links:
        if (at, place.dim) in link:
            for operand, dim in link:
                if operand != at and site.shapes[operand][dim] == site.shapes[at][place.dim]:
                    yield operand, replace(place, dim=dim)


def elementwise(site: OpShapes, at: int, place: ExtentDim) -> Found:
    """Element by element, shapes broadcast; the rule of what has no other."""
    shape = site.shapes[at]
    extent, back = shape[place.dim], place.dim - len(shape)
    same = [i for i, s in enumerate(site.shapes) if len(s) >= -back and s[back] == extent]
    rank = max(map(len, site.shapes))
    if any(len(site.shapes[i]) == rank and i not in same for i in site.outputs):
        raise Ambiguous
    for other in same:
        if other != at:
            yield other, replace(place, dim=back + len(site.shapes[other]))


def _nothing(site: OpShapes, at: int, place: ExtentDim) -> Found:
    yield from ()


def _expand(site: OpShapes, at: int, place: ExtentDim) -> Found:
    """The extent of an expanded dim begins here."""
    source, made = site.shapes
    here, other = (source, made) if at == 0 else (made, source)
    dim = place.dim - len(here) + len(other)
    if dim >= 0 and other[dim] == here[place.dim]:
        yield 1 - at, replace(place, dim=dim)


def _view(site: OpShapes, at: int, place: ExtentDim) -> Found:
    for other in site.outputs if at < site.inputs else (0,):
        if site.shapes[other] == site.shapes[at]:
            yield other, place
            continue
        moved = view_place(place, site.shapes[at], site.shapes[other])
        if moved is None or place.extra or site.shapes[other][moved.dim] // moved.before % site.least:
            raise Ambiguous
        yield other, moved


def _swap(site: OpShapes, at: int, place: ExtentDim) -> Found:
    """`t`, `transpose` and `permute`."""
    orders = transposed(site.name, *site.shapes)
    dims = {o.index(place.dim) if at == 0 else o[place.dim] for o in orders}
    if len(dims) != 1:
        raise Ambiguous
    yield 1 - at, replace(place, dim=dims.pop())


def _same_rank(site: OpShapes, at: int, place: ExtentDim) -> Found:
    """Dims stay: norms, convolutions, pools, softmax, sorting, collectives, slices of other dims."""
    extent = site.shapes[at][place.dim]
    for other, shape in enumerate(site.shapes):
        if other != at and len(shape) == len(site.shapes[at]):
            if shape[place.dim] == extent:
                yield other, place
            elif moved := _resized(site, at, other, place):
                yield other, moved


def _resized(site: OpShapes, at: int, other: int, place: ExtentDim) -> ExtentDim | None:
    """A share of the extent on each rank of an axis, or a slice or padding of it."""
    here, there = site.shapes[at][place.dim], site.shapes[other][place.dim]
    large, small = max(here, there), min(here, there)
    if site.name not in _SLICES and site.name not in COLLECTIVES.values():
        return None
    if small and large % small == 0 and large // small in site.parts:
        return place
    if site.name in COLLECTIVES.values():
        raise Ambiguous
    if place.before > 1:
        raise Ambiguous
    return replace(place, extra=place.extra + there - here) if at < site.inputs else None


def _pieces(site: OpShapes, at: int, place: ExtentDim) -> Found:
    """`cat`, `split`: pieces of the extent itself are not followed."""
    extents = {s[place.dim] for s in site.shapes if len(s) == len(site.shapes[at])}
    if len(extents) != 1:
        raise Ambiguous
    return _same_rank(site, at, place)


def _removal(site: OpShapes, at: int, place: ExtentDim) -> Found:
    """`select`, `unbind` take a dim away, `stack` and `select_backward` add one."""
    shape = site.shapes[at]
    for other, there in enumerate(site.shapes):
        if len(there) != len(shape):
            # Nobody selects one sample.
            yield from _where_kept(other, shape, there, place, first=True)
        elif other != at:
            yield other, place


def _reduction(site: OpShapes, at: int, place: ExtentDim) -> Found:
    """Sums, means and extremes; all inputs but the first are ignored."""
    for other in site.outputs if at == 0 else (0,):
        shape, there = site.shapes[at], site.shapes[other]
        if len(there) != len(shape):
            yield from _where_kept(other, shape, there, place)
        elif there[place.dim] == shape[place.dim]:
            yield other, place


def _where_kept(other: int, shape: Shape, there: Shape, place: ExtentDim, *, first: bool = False) -> Found:
    """Where an operand carries the extent that has more dims, or fewer: nowhere, if its dim was taken away."""
    down = len(shape) > len(there)
    kept = kept_dims(shape, there) if down else kept_dims(there, shape)
    kept = [k for k in kept if first and k[:1] == (0,)] or kept
    dims = {(k.index(place.dim) if place.dim in k else None) if down else k[place.dim] for k in kept}
    if len(dims) != 1:
        raise Ambiguous
    if (dim := dims.pop()) is not None:
        yield other, replace(place, dim=dim)


def _matmul(site: OpShapes, at: int, place: ExtentDim) -> Found:
    return _joined(site, at, place, product_factors(site.shapes, site.inputs))


def _grouped(site: OpShapes, at: int, place: ExtentDim) -> Found:
    """`_grouped_mm`: tokens [T, k] with experts [E, k, n], or [k, T] with [T, n] for the experts' gradient."""
    out = site.inputs
    weights = len(site.shapes[1]) == 2
    return _joined(site, at, place, [[(0, 1), (1, 0)]] if weights else [[(0, 0), (out, 0)]])


def _convolution(site: OpShapes, at: int, place: ExtentDim) -> Found:
    """Images [batch, channels, ...]; backward (gradient, image, weight) -> gradients of image and weight."""
    rows = [0, site.inputs]
    if site.name.endswith("backward"):
        rows = [0, 1, *(o for o in site.outputs if site.shapes[o] == site.shapes[1])][:3]
    return _joined(site, at, place, [[(i, 0) for i in rows]])


def _attention(site: OpShapes, at: int, place: ExtentDim) -> Found:
    """Fused attention, [batch, heads, positions, channels]."""
    if not site.positions:
        return _joined(
            site, at, place, [[(i, d) for i, s in enumerate(site.shapes) if len(s) >= 3] for d in (0, 1)]
        )
    query = 1 if site.name.endswith("backward") else 0
    keys = {query + 1, query + 2} | ({site.inputs + 1, site.inputs + 2} if query else set())
    ranked = [i for i, s in enumerate(site.shapes) if len(s) >= 3]
    return _joined(site, at, place, [[(i, 2) for i in ranked if (i in keys) == side] for side in (True, False)])


def _loss(site: OpShapes, at: int, place: ExtentDim) -> Found:
    """Negative log-likelihood of classes [rows, classes] for targets [rows]; the loss is one number."""
    rows = [(i, 0) for i, s in enumerate(site.shapes) if s]
    return _joined(site, at, place, [rows])


def _embedding(site: OpShapes, at: int, place: ExtentDim) -> Found:
    """Rows of a table for indices: (table, indices) -> rows, backward (rows, indices) -> table."""
    rows = 0 if site.name == "embedding_dense_backward" else site.inputs
    return _joined(site, at, place, [[(1, d), (rows, d)] for d in range(len(site.shapes[1]))])


def _index(site: OpShapes, at: int, place: ExtentDim) -> Found:
    """`index(table, indices...)` and `index_put([table,] indices..., values)`; the indexed dims come first."""
    puts = site.name != "index"
    values, whole = (site.inputs - 1, site.inputs) if puts else (site.inputs, 0)
    table = puts and site.inputs > 2 and site.shapes[0] == site.shapes[whole]
    indices = range(int(table or not puts), site.inputs - int(puts))
    shape, count = site.shapes[values], len(indices)
    rank = max((len(site.shapes[i]) for i in indices), default=0)
    start = next((p for p in range(len(shape)) if _index_fits(site, indices, shape, p)), 0)
    links = [[(values, start + d), *((i, d - rank + len(site.shapes[i])) for i in indices)] for d in range(rank)]
    rest = range(start + rank, len(shape))
    links += [[(values, d), (whole, d - rank + count)] for d in rest if d - rank + count < len(site.shapes[whole])]
    links += [[(values, d), (whole, d)] for d in range(start)]
    if table:
        links += [[(0, d), (whole, d)] for d in range(len(site.shapes[whole]))]
    return _joined(site, at, place, [[(o, d) for o, d in link if d >= 0] for link in links])


def _index_fits(site: OpShapes, indices: range, shape: Shape, start: int) -> bool:
    widest = max((site.shapes[i] for i in indices), key=len, default=())
    return shape[start : start + len(widest)] == widest


COLLECTIVES = {kind: f"collective {kind.name.lower()}" for kind in CollectiveKind}
"""Names under which rules know communications."""
_SLICES = frozenset(("slice", "narrow", "constant_pad_nd", "slice_backward"))
_RULES: Sequence[tuple[Callable[[OpShapes, int, ExtentDim], Found], str]] = (
    (_view, "view _unsafe_view reshape unsqueeze squeeze alias detach"),
    (_swap, "t transpose permute numpy_T"),
    (_expand, "expand"),
    (
        _same_rank,
        "slice narrow constant_pad_nd slice_backward roll flip gather scatter scatter_add topk sort argsort cumsum"
        " _softmax _softmax_backward_data _safe_softmax _log_softmax _log_softmax_backward_data native_layer_norm"
        " native_layer_norm_backward native_group_norm native_group_norm_backward native_batch_norm"
        " native_batch_norm_backward cudnn_batch_norm _fused_rms_norm _fused_rms_norm_backward"
        " max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward"
        " _adaptive_avg_pool2d _adaptive_avg_pool2d_backward",
    ),
    (_pieces, "cat split chunk split_with_sizes"),
    (_removal, "select unbind stack select_backward"),
    (_reduction, "sum mean amax amin any all argmax argmin max min var logsumexp linalg_vector_norm"),
    (_matmul, "mm addmm bmm baddbmm mv dot"),
    (_grouped, "_grouped_mm"),
    (_convolution, "convolution convolution_backward"),
    (
        _attention,
        "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward"
        " _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward",
    ),
    (_loss, "nll_loss_forward nll_loss_backward"),
    (_embedding, "embedding embedding_dense_backward"),
    (_index, "index index_put"),
    (_nothing, "histc bincount"),
)
RULES = {name: rule for rule, names in _RULES for name in names.split()} | dict.fromkeys(
    COLLECTIVES.values(), _same_rank
)


_READ_IN_PART = frozenset(("slice", "narrow", "select", "index", "gather", "embedding", "expand"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """What is looked for.

    Attributes:
        name: for messages: "batch", "sequence".
        size: the extent in the inputs.
        dim: which dim of the inputs it is.
        advice: what to do where it cannot be told apart.
    """

    name: str
    size: int
    dim: int
    advice: str


class Carriers:
    """The place of an extent in each tensor, by row of the tensor table.

    Rows are common to the instances of a block, which must agree.

    Args:
        graph: the step.
        extent: what is looked for.
        known: where some tensors carry it; None begins with the inputs of the step.
        through: operations to follow it through, by row; None: all.

    Raises:
        PlanError: the inputs lack it, dims of equal extent cannot be told apart, or a parameter would carry it.
    """

    def __init__(
        self,
        graph: StepGraph,
        extent: Extent,
        known: Mapping[int, ExtentDim] | None = None,
        through: Container[int] | None = None,
    ) -> None:
        self.graph, self.extent = graph, extent
        self.places: dict[int, ExtentDim] = {}
        self._through = through
        self._touching = _touching(graph)
        self._bound = _bound(graph)
        self._parts = tuple(axis.size for axis in graph.mesh if axis.size > 1)
        self._shapes: dict[int, Shape] = {}
        self._todo: list[int] = []
        if known is None:
            known = dict.fromkeys(_inputs(graph, extent), ExtentDim(extent.dim))
        for index, place in known.items():
            self._set(index, place, None)
        if not self.places:
            raise PlanError(f"no input of the step has the {extent.name} of {extent.size} as dim {extent.dim}")
        self._exhaust()
        for row in self._unread() if through is None else ():
            self._set(row, ExtentDim(extent.dim), None)
        self._exhaust()

    def carried(self, rows: Iterable[int]) -> bool:
        """Whether any of some tensors carries the extent."""
        return any(row in self.places for row in rows)

    def resized(self, row: int, size: int) -> Shape:
        """Shape of a tensor with another extent.

        Args:
            row: of the tensor table.
            size: what `Extent.size` becomes.

        Raises:
            PlanError: a share of the extent does not divide.
        """
        shape, place = self._shape(row), self.places.get(row)
        if place is None:
            return shape
        now = shape[place.dim] - place.extra
        if now * size % self.extent.size:
            raise PlanError(
                f"{self._where(row)}: its extent of {now} does not scale from a {self.extent.name} of "
                f"{self.extent.size} to {size}: {self.extent.advice}"
            )
        return (*shape[: place.dim], now * size // self.extent.size + place.extra, *shape[place.dim + 1 :])

    def _shape(self, row: int) -> Shape:
        if row not in self._shapes:
            self._shapes[row] = self.graph.tensors.shape.row(row)
        return self._shapes[row]

    def _exhaust(self) -> None:
        while self._todo:
            self._spread(self._todo.pop())

    def _unread(self) -> list[int]:
        """What is made or expanded with the extent, although nothing reads it: no reader could say so."""
        size, dim, ops = self.extent.size, self.extent.dim, self.graph.ops
        rows = []
        for row in range(len(self.graph.tensors)):
            maker = int(self.graph.maker[row])
            if row in self.places or maker == NONE or self._shape(row)[dim : dim + 1] != (size,):
                continue
            reads = ops.inputs.row(maker)
            begins = not reads or (self._made_by(row, "expand") and self._shape(reads[0])[dim : dim + 1] == (1,))
            if begins and self._dead(row):
                rows.append(row)
        return rows

    def _dead(self, row: int) -> bool:
        """Whether nothing but views, which nothing reads, reads a tensor."""
        readers = [op for op in self._touching[row] if op != self.graph.maker[row]]
        made = [out for op in readers for out in self.graph.ops.outputs.row(op)]
        return all(self.graph.ops.is_view[op] for op in readers) and all(map(self._dead, made))

    def _spread(self, row: int) -> None:
        """Tells a tensor's operations, aliases and bindings where it carries the extent."""
        place = self.places[row]
        for op in self._touching[row]:
            if self._through is None or op in self._through:
                self._follow(op, row, place)
        for other in self._bound[row]:
            self._set(other, place, None)

    def _follow(self, op: int, row: int, place: ExtentDim) -> None:
        ops = self.graph.ops
        operands = (*ops.inputs.row(op), *ops.outputs.row(op))
        site = OpShapes(
            name=self._name(op),
            shapes=tuple(map(self._shape, operands)),
            inputs=len(ops.inputs.row(op)),
            least=max(1, self.extent.size // prod(self._parts)),
            parts=self._parts,
            positions=self.extent.dim == 1,
        )
        try:
            for at in [i for i, operand in enumerate(operands) if operand == row]:
                for other, found in follow(site, at, place):
                    if not (
                        site.name in _READ_IN_PART and other < site.inputs and self._persistent(operands[other])
                    ):
                        self._set(operands[other], found, op)
        except Ambiguous:
            raise self._unclear(op) from None

    def _name(self, op: int) -> str:
        ops = self.graph.ops
        if ops.kinds[op] == t.OpKind.COLLECTIVE:
            return COLLECTIVES[t.CollectiveKind(int(ops.variant[op]))]
        return str(self.graph.strings[ops.name[op]]).rpartition(".")[2].removesuffix("_")

    def _set(self, row: int, place: ExtentDim, op: int | None) -> None:
        known = self.places.get(row)
        if known == place:
            return
        if self._persistent(row):
            raise PlanError(f"{self._where(row)} would change with the {self.extent.name}: {self.extent.advice}")
        if known is not None:
            raise self._unclear(op)
        self.places[row] = place
        self._todo.append(row)

    def _persistent(self, row: int) -> bool:
        """Whether it is common to all micro-batches; a part or a repetition has the role, but is not."""
        role = t.TensorRole(int(self.graph.tensors.role[row]))
        return role.persistent and not self._made_by(row, "expand", "slice")

    def _made_by(self, row: int, *names: str) -> bool:
        maker = int(self.graph.maker[row])
        return maker != NONE and self._name(maker) in names

    def _unclear(self, op: int | None) -> PlanError:
        graph, extent = self.graph, self.extent
        where = "a block's border" if op is None else f"{graph.strings[graph.ops.module[op]] or 'the loss'}"
        if op is not None:
            shapes = [list(map(self._shape, side.row(op))) for side in (graph.ops.inputs, graph.ops.outputs)]
            where += f" ({graph.strings[graph.ops.name[op]]} {shapes[0]} -> {shapes[1]})"
        return PlanError(
            f"{where}: which dim is the {extent.name} of {extent.size} cannot be told: {extent.advice}"
        )

    def _where(self, row: int) -> str:
        graph, maker = self.graph, int(self.graph.maker[row])
        name = str(graph.tensors[row].name)
        return name if maker == NONE else f"{graph.strings[graph.ops.module[maker]]} ({name})"


def _inputs(graph: StepGraph, extent: Extent) -> list[int]:
    rows = [i for i in range(len(graph.tensors)) if graph.tensors.roles[i] == t.TensorRole.INPUT]
    shapes = {i: graph.tensors.shape.row(i) for i in rows if graph.maker[i] == NONE}
    return [i for i, s in shapes.items() if len(s) > extent.dim and s[extent.dim] == extent.size]


def _touching(graph: StepGraph) -> Mapping[int, list[int]]:
    """The operations that read or make each tensor, each once."""
    touching: dict[int, list[int]] = defaultdict(list)
    for ragged in (graph.ops.inputs, graph.ops.outputs):
        for tensor, op in zip(ragged.values.tolist(), ragged.rows.tolist(), strict=True):
            if not touching[tensor] or touching[tensor][-1] != op:
                touching[tensor].append(op)
    return touching


def _bound(graph: StepGraph) -> Mapping[int, set[int]]:
    """Rows that stand for the same tensor: a port and what instances bind to it, memory and what it is renamed."""
    bound: dict[int, set[int]] = defaultdict(set)
    for block in graph.blocks:
        ports = [i for i in block.tensors if graph.tensors.port[i]]
        for instance in block.instances:
            for port, identity in zip(ports, instance.bindings, strict=True):
                other = graph.locate_tensor(identity)[2]
                bound[port].add(other)
                bound[other].add(port)
    for row, alias in enumerate(graph.tensors.alias_of.tolist()):
        same = alias != NONE and graph.tensors.shape.row(row) == graph.tensors.shape.row(alias)
        maker = int(graph.maker[row])
        if same and (maker == NONE or graph.strings[graph.ops.name[maker]].endswith("_")):
            bound[row].add(alias)
            bound[alias].add(row)
    return bound


_LOOKS_UP = frozenset(("embedding", "index", "index_select", "gather", "take", "nll_loss_forward"))
_MOST_OPERANDS = 10


class ExtentWriter(StepWriter):
    """Copies a step with an extent replaced.

    FLOPs are products of extents, in which this one is once, so they scale. Bytes are those of the tensors that an
    operation reads and makes: which of them the graph counted is found from the numbers, and counted again.

    Args:
        graph: the step.
        carriers: where the extent is.
        size: what it becomes.
    """

    def __init__(self, graph: StepGraph, carriers: Carriers, size: int) -> None:
        super().__init__(graph)
        self.carriers, self.size = carriers, size
        self._before: dict[int, int] = {}
        self._after: dict[int, int] = {}

    def tensor(self, index: int, **changes: object) -> int:
        """New row of an old tensor, with its new shape."""
        return super().tensor(index, **({"shape": self.carriers.resized(index, self.size)} | changes))

    def operation(self, op: t.Op) -> None:
        """Writes an operation with its new work."""
        self.copy(op, **self.work(op))

    def work(self, op: t.Op) -> dict[str, object]:
        """FLOPs and bytes of an operation after the change; durations of what changes no longer hold."""
        if not self.carriers.carried((*op.inputs, *op.outputs)):
            return {}
        match op:
            case t.Compute():
                written = self._bytes(op.bytes_written, op.outputs, op.inputs)
                return {
                    "flops": op.flops * self.size // self.carriers.extent.size,
                    "bytes_read": self._read(op, written),
                    "bytes_written": written,
                    "durations": (),
                }
            case t.Collective():
                return {"bytes_per_rank": self._bytes(op.bytes_per_rank, op.outputs, op.inputs), "durations": ()}
            case t.Send() | t.Recv() | t.Copy():
                return {"nbytes": self._bytes(op.nbytes, op.outputs, op.inputs), "durations": ()}
        return {}

    def _read(self, op: t.Compute, written: int) -> int:
        """Bytes read; of a table, a row for each row written, if it has as many."""
        if op.inputs and op.name.rpartition(".")[2] in _LOOKS_UP:
            table, rest = self._memory(op.inputs[0], new=False), set(op.inputs[1:])
            if sum(self._memory(i, new=False) for i in rest) + min(table, op.bytes_written) == op.bytes_read:
                return sum(self._memory(i, new=True) for i in rest) + min(
                    self._memory(op.inputs[0], new=True), written
                )
        return self._bytes(op.bytes_read, op.inputs, op.outputs)

    def _bytes(self, nbytes: int, first: Sequence[int], then: Sequence[int]) -> int:
        """Bytes of the tensors that make up a number of bytes, after the change; in proportion if none do."""
        for rows in (first, (*first, *then)):
            distinct = list(dict.fromkeys(rows))
            before = [self._memory(i, new=False) for i in distinct]
            counted = _summands(before, nbytes)
            if counted is not None:
                return sum(self._memory(distinct[i], new=True) for i in counted)
        rows = (*first, *then)
        whole, now = (sum(self._memory(i, new=new) for i in rows) for new in (False, True))
        return nbytes * now // whole if whole else nbytes

    def _memory(self, row: int, *, new: bool) -> int:
        """Bytes that the elements of a tensor take in memory: of an expanded dim, one."""
        known = self._after if new else self._before
        if row not in known:
            shape: Shape = self.carriers.resized(row, self.size) if new else self.graph.tensors.shape.row(row)
            nbytes = self.graph.tensors[row].dtype.nbytes(prod(shape))
            source = self._viewed(row)
            known[row] = nbytes if source is None else min(nbytes, self._memory(source, new=new))
        return known[row]

    def _viewed(self, row: int) -> int | None:
        """What a tensor is a view of, if it is one; for a port, what the first instance binds."""
        graph = self.graph
        maker = int(graph.maker[row])
        if maker != NONE:
            reads = graph.ops.inputs.row(maker)
            return reads[0] if graph.ops.is_view[maker] and len(reads) == 1 else None
        if graph.tensors.port[row]:
            block = next(b for b in graph.blocks if row in b.tensors)
            return graph.locate_tensor(block.instances[0].bindings[int(graph.port_position[row])])[2]
        alias = int(graph.tensors.alias_of[row])
        return None if alias == NONE else alias


def _summands(sizes: Sequence[int], total: int) -> tuple[int, ...] | None:
    """Which of some numbers add up to a total, as many of them as can; None where none do."""
    if len(sizes) > _MOST_OPERANDS:
        return tuple(range(len(sizes))) if sum(sizes) == total else None
    for count in range(len(sizes), -1, -1):
        for chosen in combinations(range(len(sizes)), count):
            if sum(sizes[i] for i in chosen) == total:
                return chosen
    return None


MAX_SIZE = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The step with another batch.

    Attributes:
        size: samples of a micro-batch.
    """

    name: ClassVar[str] = "micro_batch"

    size: int

    def __call__(self, graph: StepGraph) -> StepGraph:
        """The step with `size` samples.

        Raises:
            PlanError: the size is out of range, the capture has one sample or a batch that cannot be told from
                other extents (says which capture would do), or a share of the batch does not scale.
        """
        now = graph.workload.batch_size
        if not 1 <= self.size <= MAX_SIZE:
            raise PlanError(f"a micro-batch of {self.size}: choose 1 to {MAX_SIZE:,} samples")
        if self.size == now:
            return graph
        if now == 1:
            raise PlanError(
                "a capture of one sample does not show what broadcasts over samples: "
                f"capture with --batch-size 2, or with {self.size}"
            )
        advice = f"capture with --batch-size {self.size}"
        carriers = Carriers(graph, Extent(name="batch", size=now, dim=0, advice=advice))
        writer = (_OneSample if self.size == 1 else ExtentWriter)(graph, carriers, self.size)
        writer.builder.workload = replace(graph.workload, batch_size=self.size)
        return writer.write()


class _OneSample(ExtentWriter):
    """Leaves out what one sample does not need."""

    def operation(self, op: t.Op) -> None:
        """Writes an operation, or lets its input stand for its output."""
        match op.name:
            case "aten.sum" if self._sums_the_batch_alone(op):
                if self.graph.tensors.role[op.outputs[0]] == t.TensorRole.GRADIENT:
                    self.copy(replace(op, name="aten.copy_"), **self.work(op))
                else:
                    self._pass_on(op)
            case "aten.clone" if self._merges_the_batch(op):
                self._pass_on(op)
            case "aten.expand" if self._alike(op) and not self._readers(op.outputs[0]):
                self._pass_on(op)
            case "aten._unsafe_view" if self._maker(op.inputs[0]) == "aten.clone" and self._alike(op):
                self.tensor(op.outputs[0], name="view")
                self.copy(replace(op, name="aten.view"))
            case _:
                super().operation(op)

    def _pass_on(self, op: t.Op) -> None:
        self.part.tensors[op.outputs[0]] = self.tensor(op.inputs[0])
        maker = int(self.graph.maker[op.inputs[0]])
        if maker in self.part.ops:
            self.part.ops[op.id] = self.part.ops[maker]

    def _sums_the_batch_alone(self, op: t.Op) -> bool:
        """Whether it sums a gradient to the shape of what broadcast over the batch, and not to fewer dims."""
        shapes = [self.carriers.resized(i, 1) for i in (op.inputs[0], op.outputs[0])]
        carry = [i in self.carriers.places for i in (op.inputs[0], op.outputs[0])]
        if op.phase != t.Phase.BACKWARD or carry != [True, False] or shapes[0] != shapes[1]:
            return False
        then = [x for x in self._readers(op.outputs[0]) if x.name == "aten.view"]
        return not any(len(self.graph.tensors.shape.row(x.outputs[0])) < len(shapes[1]) for x in then)

    def _merges_the_batch(self, op: t.Op) -> bool:
        """Whether it copies only for a view that merges the batch with another dim.

        `reshape` copies and then takes an `_unsafe_view`; `contiguous` copies what is cut, here a row of labels.
        """
        if op.inputs[0] not in self.carriers.places:
            return False
        readers = self._readers(op.outputs[0])
        cut = self._maker(op.inputs[0]) == "aten.slice" and len(self.graph.tensors.shape.row(op.inputs[0])) == 2
        return len(readers) == 1 and (
            (readers[0].name == "aten._unsafe_view" and self._alike(readers[0]))
            or (readers[0].name == "aten.view" and cut)
        )

    def _alike(self, op: t.Op) -> bool:
        """Whether a view of one sample drops or adds dims of 1 alone, which any layout allows."""
        source, made = (self.carriers.resized(i, 1) for i in (op.inputs[0], op.outputs[0]))
        return [e for e in source if e != 1] == [e for e in made if e != 1]

    def _readers(self, row: int) -> list[t.Op]:
        reads = self.graph.ops.inputs
        return [self.graph.ops[op] for op in reads.rows[reads.values == row].tolist()]

    def _maker(self, row: int) -> str:
        maker = int(self.graph.maker[row])
        return "" if maker == NONE else str(self.graph.ops[maker].name)
