"""Fusion of elementwise operations, as by a compiler (torch.compile, inductor) or a library of fused kernels.

Elementwise operations that read each other's results, or the same tensor, become one kernel, which reads what
comes from outside once and writes only what is read outside. A reduction of what a kernel has made joins it:
along rows the kernel goes on after it, with the rows on the chip (a norm is one kernel). One in another
direction joins, too, but where a compiler has to choose, as between a norm's gradient and that of its weights,
it makes a kernel of its own; a kernel written by hand has both. Slices, concatenations and copies into another
layout are elementwise, too (a rotary embedding is one kernel).

What a kernel makes and only other kernels read, as those of backward do, is computed again where it is read, if
that moves fewer bytes than to write and to read it: a norm keeps what it has read and one number a row, a gated
activation its two operands (Transformer Engine's kernels; inductor by a minimum cut, Ansel et al. 2024, section
5.1).

Nothing moves from one phase, block or call to another; matrix products, attention, random numbers and
operations in place stay as they are. Norms that are one operation already are the library's or the compiler's
own. Views of results that only the kernel reads vanish with them.

The pass knows no layouts: it comes last of those that change a step, before those that lower it to a job.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from types import MappingProxyType
from typing import ClassVar, Literal

from echograph.ir import types as t
from echograph.ir.columns import NONE
from echograph.ir.graph import Graph, JobGraph, StepGraph
from echograph.ir.passes.fold import LABEL
from echograph.ir.passes.fuse_loss import fuse_losses
from echograph.ir.passes.rewrite import StepWriter, issued

RESCALE = "fp8.rescale"
"""Applies scales of rows and of columns to the result of a product of 8-bit operands."""
_MOVES = ("aten.cat", "aten.slice_backward", "aten.clone")
_POINTWISE = {
    *_MOVES, RESCALE,
    "aten._to_copy", "aten.abs", "aten.add", "aten.clamp", "aten.cos", "aten.div", "aten.eq", "aten.exp",
    "aten.gelu", "aten.gelu_backward", "aten.ge", "aten.gt", "aten.le", "aten.log", "aten.lt",
    "aten.masked_fill", "aten.maximum", "aten.minimum", "aten.mul", "aten.native_dropout_backward", "aten.ne",
    "aten.neg", "aten.pow", "aten.reciprocal", "aten.relu", "aten.rsqrt", "aten.rsub", "aten.sigmoid",
    "aten.sigmoid_backward", "aten.silu", "aten.silu_backward", "aten.sin", "aten.sqrt", "aten.sub",
    "aten.tanh", "aten.tanh_backward", "aten.threshold_backward", "aten.where",
}  # fmt: skip
_REDUCTIONS = ("aten.sum", "aten.mean", "aten.amax", "aten.amin", "aten.var")
_WITH_PLACES = ("aten.max", "aten.min")
"""Reductions that also say where what they leave stood: reductions like the others where nobody reads that."""
_NORMS = ("aten.native_layer_norm", "aten._fused_rms_norm", "aten.rms_norm")
_MAKERS = {"modules": "fused", "layers": "compiled", "step": "compiled"}
"""What the names of kernels begin with, by where they fuse: who makes them."""
_RANDOM = "aten.native_dropout"
DRAWS = "dropout"
"""How the names of a compiler's kernels begin that draw random numbers, one an element."""
RESCALED = "rescaled"
"""How the names of kernels begin that apply scales to results of products."""
FUSED, COMPILED = "fused", "compiled"
"""Who makes kernels of a captured job's region: a library one, by hand, or a compiler as few as it can."""


@dataclass(frozen=True, slots=True)
class KernelRegion:
    """Operations of a captured job that the script had made one kernel, or as few as a compiler makes of them.

    Attributes:
        maker: `FUSED` or `COMPILED`.
        number: tells it from others.
        of: the number of the region that it is the gradient of, where autograd made it; 0: of none.
    """

    maker: str
    number: int
    of: int = 0


@dataclass(slots=True, eq=False)
class _Kernel:
    """Operations that become one.

    Attributes:
        size: elements that it works on.
        area: the part of the model that it stays within; "": none.
        reduced: elements that are left of those when rows are reduced; 0 before it does so.
        rows: the operations, in order.
        views: views of what they make, in order.
        end: the row that it stands at once something outside has read it; it takes in what could have run by then.
        alone: whether it takes in nothing more.
    """

    size: int
    area: str = ""
    reduced: int = 0
    rows: list[int] = field(default_factory=list)
    views: list[int] = field(default_factory=list)
    end: int | None = None
    alone: bool = False

    @property
    def at(self) -> int:
        """The row at which it runs."""
        return self.rows[-1] if self.end is None else self.end


@dataclass(frozen=True, slots=True, kw_only=True)
class Fuse:
    """The step with fused elementwise operations.

    Attributes:
        within: "step": all that a compiler finds; "layers": the same of each layer, which is compiled, and not of
            what stands before and after the layers; "modules": only within one part of a layer (a norm, a
            feed-forward network), as a library of fused kernels has them. What stands between parts, as the
            addition of a residual, is then a kernel of its own, and the loss is fused function by function, as
            Megatron's is: what one of them makes goes through memory to the next.
        unfused: operators of which the library has no kernel, within "modules": nothing fuses in the part of a
            layer that one of them stands in (an activation that is written in Python alone).
    """

    name: ClassVar[str] = "fuse"

    within: Literal["step", "layers", "modules"] = "step"
    unfused: tuple[str, ...] = ()

    def __call__(self, graph: StepGraph) -> StepGraph:
        """The step graph."""
        found = _Finder(graph, self.within, unfused=self.unfused).kernels()
        again = [kernel for kernel in found if self.within != "modules" or kernel.area]
        return _Writer(graph, _Traffic(graph, found, again), _MAKERS[self.within]).write()


def fuse_regions(job: JobGraph, regions: Sequence[KernelRegion | None]) -> JobGraph:
    """A captured job in which the regions of its script are kernels.

    Other than in `Fuse`, random numbers of a dropout join a kernel, too. A compiler that has both passes chooses
    what is kept between them, and has the loss in one kernel each; where a script's own functions say what is
    kept, that is kept. What a compiled region writes in place joins as well: a compiler works out new values, and
    writes the last of them over the first.

    Args:
        job: with a region, or none, for each row of its operations.
        regions: as many; equal regions are one.
    """
    whole = [r.of or r.number if r is not None and r.maker == COMPILED else None for r in regions]
    job, rows = fuse_losses(job, whole)
    regions = [regions[row] for row in rows]
    found = _Finder(job, "regions", regions).kernels()
    makers = {row: region.maker for row, region in enumerate(regions) if region is not None}
    both = {region.of for region in regions if region is not None}
    compiled = {row: whole[before] for row, before in enumerate(rows) if whole[before] in both}
    again = [kernel for kernel in found if kernel.rows[0] in compiled]
    return _Writer(job, _Traffic(job, found, again, compiled), "", makers).write_as(JobGraph)


class _Finder:
    """Goes through the operations in order, with the kernels that may still grow."""

    def __init__(
        self,
        graph: Graph,
        within: str,
        regions: Sequence[KernelRegion | None] = (),
        *,
        unfused: Sequence[str] = (),
    ) -> None:
        self.graph, self.within_modules, self.within_layers = graph, within == "modules", within == "layers"
        self.regions = regions
        self.cuts = {cut for program in graph.programs for cut in program.calls[:, 1:3].ravel().tolist()}
        self.holds: dict[int, _Kernel] = {}
        self.made: dict[int, _Kernel] = {}
        self.sums: dict[int, _Kernel] = {}
        self.reading: dict[int, _Kernel] = {}
        self.found: list[_Kernel] = []
        names = [graph.strings[name] for name in graph.ops.name.tolist()]
        self.eager = {self._area(row) for row, name in enumerate(names) if name in unfused}
        self.read = set(graph.ops.inputs.values.tolist()) if regions else set[int]()

    def kernels(self) -> list[_Kernel]:
        """The kernels, those of one operation among them."""
        phase = NONE
        for row in range(len(self.graph.ops)):
            if row in self.cuts or int(self.graph.ops.phase[row]) != phase:
                self.made, self.sums, self.reading = {}, {}, {}
            phase = int(self.graph.ops.phase[row])
            self._take(row)
        return self.found

    def _take(self, row: int) -> None:
        graph = self.graph
        inputs, outputs = graph.ops.inputs.row(row), graph.ops.outputs.row(row)
        read = list({id(k): k for i in inputs if (k := self.made.get(i)) is not None}.values())
        self._settle(kernel for row_ in graph.ops.deps.row(row) if (kernel := self.holds.get(row_)) is not None)
        self._settle(kernel for i in inputs if (kernel := self.sums.get(i)) is not None)
        if graph.ops.is_view[row] and read and len(outputs) == 1:
            self._take_view(row, read[0])
            return
        fusible = self._is_plain(row)
        joins = self._joined(read, row) if fusible else []
        self._settle(kernel for kernel in read if kernel not in joins)
        if fusible:
            self._grow(row, joins)

    def _take_view(self, row: int, kernel: _Kernel) -> None:
        (before, *_), (after,) = self.graph.ops.inputs.row(row), self.graph.ops.outputs.row(row)
        sizes = self._elements(before), self._elements(after)
        # A kernel that holds whole rows shows them as they are, or what is left of each to all of its row.
        if not kernel.reduced or sizes[0] == sizes[1] or sizes == (kernel.reduced, kernel.size):
            kernel.views.append(row)
            self.made[after] = self.holds[row] = kernel
        else:
            self._settle([kernel])

    def _settle(self, kernels: Iterable[_Kernel]) -> None:
        """Something else reads what they make: they run before that."""
        for kernel in kernels:
            if kernel.end is None:
                kernel.end = kernel.rows[-1]

    def _grow(self, row: int, joins: list[_Kernel]) -> None:
        """Takes an operation into the kernels that it joins, or begins one with it."""
        if not joins:
            joins = [_Kernel(self._size(row), self._area(row))]
            self.found += joins
        kernel = self._merged(joins)
        kernel.rows.append(row)
        self.holds[row] = kernel
        inputs, (made, *others) = self.graph.ops.inputs.row(row), self.graph.ops.outputs.row(row)
        if self._reduces(row) and not self._is_of_rows(inputs[0], made):
            kernel.alone = not self._by_hand(row)
            self.sums[made] = kernel
            return
        self.reading |= {i: kernel for i in inputs if self.made.get(i) is not kernel}
        kernel.size = max(kernel.size, self._size(row))
        self.made |= dict.fromkeys((made, *others), kernel)
        if self._reduces(row):
            kernel.reduced = self._elements(made)

    def _joined(self, read: list[_Kernel], row: int) -> list[_Kernel]:
        """Of the kernels whose results an operation reads, those that it joins; else one with its inputs."""
        if joins := self._in_time([kernel for kernel in read if self._fits(kernel, row)], row):
            return joins
        size = self._size(row)
        wide = (i for i in self.graph.ops.inputs.row(row) if self._elements(i) == size)
        beside = next((k for i in wide if (k := self.reading.get(i)) and self._fits(k, row)), None)
        return self._in_time([beside], row) if beside is not None and beside not in read else []

    def _in_time(self, joins: list[_Kernel], row: int) -> list[_Kernel]:
        """Those that can run together with an operation where the first of them has to; the latest, if not all."""
        while ends := [kernel.end for kernel in joins if kernel.end is not None]:
            rows = (row, *(r for kernel in joins for r in kernel.rows))
            read = {i for r in rows for i in self.graph.ops.inputs.row(r) if self.made.get(i) not in joins}
            after = (dep for r in rows for dep in self.graph.ops.deps.row(r) if self.holds.get(dep) not in joins)
            if all(at <= min(ends) for at in (*map(self._ready, read), *after)):
                break
            joins = [kernel for kernel in joins if kernel.end != min(ends)]
        return joins

    def _ready(self, tensor: int) -> int:
        """The row after which a tensor is there."""
        kernel = self.made.get(tensor)
        return int(self.graph.maker[tensor]) if kernel is None else kernel.at

    def _fits(self, kernel: _Kernel, row: int) -> bool:
        """Whether an operation works on the same elements as a kernel, or on what is left of its rows."""
        if kernel.alone or kernel.area != self._area(row):
            return False
        inputs, (made, *_) = self.graph.ops.inputs.row(row), self.graph.ops.outputs.row(row)
        if self._reduces(row):
            left = self._elements(made) if self._is_of_rows(inputs[0], made) else 0
            whole = self._elements(inputs[0]) == kernel.size
            return whole and (kernel.reduced in (0, left) if left else self._by_hand(row))
        size = self._size(row)
        if size in (kernel.size, kernel.reduced):
            return True
        wide = [i for i in inputs if self._elements(i) == size]
        of_part = size < kernel.size and bool(wide) and all(self.made.get(i) is kernel for i in wide)
        return not kernel.reduced and (of_part or self._name(row) in _MOVES)

    def _by_hand(self, row: int) -> bool:
        """Whether a kernel is one that is written by hand, which sums up in any direction."""
        region = self.regions[row] if self.regions else None
        return self.within_modules if region is None else region.maker == FUSED

    def _area(self, row: int) -> str:
        """The part of a layer that an operation belongs to; beyond layers, its module. "": all is one."""
        if self.regions:
            return f"{self.regions[row]} {self.graph.ops.stream[row]}"
        if not self.within_modules:
            return ""
        area = self._module(row)
        if self._name(row) == "aten.add" and self.graph.ops.phases[row] == t.Phase.BACKWARD:
            # Gradients that come from two parts are added up between these, by the framework.
            makers = {self._maker(tensor) for tensor in self.graph.ops.inputs.row(row)}
            return (
                area if {NONE if row == NONE else self._module(row) for row in makers} == {area} else f"{area} +"
            )
        return area

    def _module(self, row: int) -> str:
        module: str = self.graph.strings[self.graph.ops.module[row]]
        layer, inner, part = module.rpartition(LABEL)
        return layer + inner + ".".join(part.split(".")[:2])

    def _maker(self, tensor: int) -> int:
        """The row that made a tensor, or what it is a view of."""
        while (row := int(self.graph.maker[tensor])) != NONE and self.graph.ops.is_view[row]:
            tensor = self.graph.ops.inputs.row(row)[0]
        return row

    def _merged(self, kernels: list[_Kernel]) -> _Kernel:
        first, *others = sorted(kernels, key=lambda kernel: -kernel.size)
        for other in others:
            first.reduced = first.reduced or other.reduced
            first.rows += other.rows
            first.views += other.views
            ends = [end for end in (first.end, other.end) if end is not None]
            first.end = min(ends, default=None)
            self.found.remove(other)
            for known in (self.made, self.sums, self.reading):
                known |= {tensor: first for tensor, kernel in known.items() if kernel is other}
        first.rows.sort()
        first.views.sort()
        return first

    def _name(self, row: int) -> str:
        """What an operation is called; in a compiled region, as if it wrote nothing in place."""
        name: str = self.graph.strings[self.graph.ops.name[row]]
        return name.removesuffix("_") if self._compiled(row) else name

    def _compiled(self, row: int) -> bool:
        region = self.regions[row] if self.regions else None
        return region is not None and region.maker == COMPILED

    def _reduces(self, row: int) -> bool:
        name = self._name(row)
        if name in _WITH_PLACES and self._compiled(row):
            _, *places = self.graph.ops.outputs.row(row)
            return len(places) == 1 and places[0] not in self.read
        return name in _REDUCTIONS

    def _is_of_rows(self, before: int, after: int) -> bool:
        """Whether a reduction leaves one element of each row."""
        whole, left = self.graph.tensors.shape.row(before), self.graph.tensors.shape.row(after)
        return tuple(left[: len(whole) - 1]) == tuple(whole[:-1]) and prod(left) * whole[-1] == prod(whole)

    def _size(self, row: int) -> int:
        tensors = (*self.graph.ops.inputs.row(row), *self.graph.ops.outputs.row(row))
        return max(map(self._elements, tensors))

    def _elements(self, index: int) -> int:
        return prod(self.graph.tensors.shape.row(index))

    def _is_plain(self, row: int) -> bool:
        """Whether an operation is elementwise or reduces, and makes one new tensor, of what it reads alone."""
        ops, outputs = self.graph.ops, self.graph.ops.outputs.row(row)
        plain = ops.kinds[row] == t.OpKind.COMPUTE and not ops.flops[row]
        random = bool(self.regions) and self._name(row) == _RANDOM
        more = random or (self._name(row) in _WITH_PLACES and self._reduces(row))
        return bool(
            plain
            and self._is_inside(row)
            and (random or self._name(row) in _POINTWISE or self._reduces(row))
            and ops.attributes[row] == NONE
            and not ops.is_view[row]
            and len(outputs) == 1 + more
            and (self._compiled(row) or self.graph.tensors.alias_of[outputs[0]] == NONE)
        )

    def _is_inside(self, row: int) -> bool:
        """Whether an operation is of what is fused, and waits for nothing but what it reads."""
        if self.regions:
            return self.regions[row] is not None
        waits = bool(self.graph.ops.deps.row(row))
        if waits or self._area(row) in self.eager:
            return False
        return not self.within_layers or LABEL in self.graph.strings[self.graph.ops.module[row]]


class _Traffic:
    """What each kernel reads and writes, and which of their results are computed again instead.

    Attributes:
        of: the kernel of each row that is part of one, or a view of what it makes.
        compiled: of rows of captured jobs, what is compiled at a time: nothing else computes its results again.
        outside: tensors of kernels that are written, as others read them, and views that are read.
        again: results that are not written, with what they are computed from where they are read.
    """

    def __init__(
        self,
        graph: Graph,
        found: list[_Kernel],
        again: list[_Kernel],
        compiled: Mapping[int, int | None] = MappingProxyType({}),
    ) -> None:
        self.graph, self.compiled = graph, compiled
        self.of = {row: kernel for kernel in found for row in (*kernel.rows, *kernel.views)}
        self.again: dict[int, tuple[int, ...]] = {}
        inputs = graph.ops.inputs
        self.readers: dict[int, list[int]] = defaultdict(list)
        for tensor, row in zip(inputs.values.tolist(), inputs.rows.tolist(), strict=True):
            self.readers[tensor].append(row)
        bound = {i for block in graph.blocks for b in block.instances for i in _bound(graph, b.bindings)}
        for kernel in found:
            self._absorb(kernel)
        for kernel in sorted(again, key=lambda kernel: kernel.rows[0]):
            if self.of[kernel.rows[0]] is kernel:
                self._forget(kernel, bound)
        alone = {id(k): k for k in self.of.values() if len(k.rows) == 1 and not self._reads_again(k)}
        self.of = {row: kernel for row, kernel in self.of.items() if id(kernel) not in alone}
        self.again = {i: of for i, of in self.again.items() if int(graph.maker[i]) in self.of}
        self.outside = self._read_outside(bound)

    def shown(self, tensor: int) -> int:
        """The result of a kernel that a tensor is, or is a view of, of the kernel or outside; else the tensor."""
        at = tensor
        while (row := int(self.graph.maker[at])) != NONE and self.graph.ops.is_view[row]:
            at = int(self.graph.ops.inputs.row(row)[0])
        return at if row != NONE and row in self.of else tensor

    def reads(self, kernel: _Kernel) -> list[int]:
        """Tensors that a kernel reads, each once."""
        read = dict[int, None]()
        for row in kernel.rows:
            for tensor in self.graph.ops.inputs.row(row):
                if not self._is_of(kernel, tensor):
                    read |= dict.fromkeys(self._instead(tensor))
        return [i for i in read if not self._is_of(kernel, i)]

    def nbytes(self, tensors: Iterable[int]) -> int:
        """Bytes behind tensors: what views show of one tensor counts once, however often one repeats it."""
        behind = defaultdict[int, int](int)
        for index in tensors:
            behind[int(self.graph.root[index])] += self.graph.tensors[index].nbytes
        return sum(min(seen, self.graph.tensors[root].nbytes) for root, seen in behind.items())

    def _is_of(self, kernel: _Kernel, tensor: int) -> bool:
        return self.of.get(int(self.graph.maker[self.shown(tensor)])) is kernel

    def _instead(self, tensor: int) -> Iterator[int]:
        """What is read for a tensor."""
        sources = self.again.get(self.shown(tensor))
        if sources is None:
            yield tensor
        else:
            for source in sources:
                yield from self._instead(source)

    def _reads_again(self, kernel: _Kernel) -> bool:
        inputs = self.graph.ops.inputs
        return any(self.shown(i) in self.again for row in kernel.rows for i in inputs.row(row))

    def _absorb(self, kernel: _Kernel) -> None:
        """Takes the reductions into an elementwise kernel that read nothing but its results."""
        graph = self.graph
        if kernel.reduced or kernel.alone:
            return
        at, made = kernel.at, [i for row in kernel.rows for i in graph.ops.outputs.row(row)]
        readers = {id(its): its for i in made for row in self.readers[i] if (its := self.of.get(row)) is not None}
        for reader in readers.values():
            read = [i for row in reader.rows for i in graph.ops.inputs.row(row)]
            if reader.alone and all(self._is_of(kernel, i) for i in read):
                kernel.end = at
                kernel.rows = sorted((*kernel.rows, *reader.rows))
                kernel.views = sorted((*kernel.views, *reader.views))
                self.of |= dict.fromkeys((*reader.rows, *reader.views), kernel)

    def _forget(self, kernel: _Kernel, bound: set[int]) -> None:
        """Leaves the results unwritten that it is cheaper to compute again."""
        made = [self.graph.ops.outputs.row(row)[0] for row in kernel.rows]
        kept = [i for i in made if self._kernels_that_read(i, kernel, bound) != []]
        for tensor in sorted(kept, key=lambda i: -self.graph.tensors[i].nbytes):
            readers = self._kernels_that_read(tensor, kernel, bound)
            sources = tuple(dict.fromkeys(self._sources(tensor, kernel)))
            others = [i for i in kept if i != tensor and i not in self.again]
            if not readers or tensor in sources or not (others or set(sources) & set(made)):
                continue
            size = self.graph.tensors[tensor].nbytes
            more = sum(
                self.nbytes({*self.reads(reader), *sources}) - self.nbytes(self.reads(reader))
                for reader in readers
            )
            if more < size * (1 + len(readers)):
                self.again[tensor] = sources

    def _sources(self, tensor: int, kernel: _Kernel) -> Iterator[int]:
        """What a kernel makes a result of: what it has read, and what it has left of rows."""
        graph = self.graph
        row = int(graph.maker[tensor])
        name = graph.strings[graph.ops.name[row]] if row != NONE else ""
        outside = self.of.get(row) is not kernel or name in _REDUCTIONS
        of_rows = not graph.ops.is_view[row] and prod(graph.tensors.shape.row(tensor)) <= kernel.reduced
        if outside or (kernel.reduced and of_rows):
            yield tensor
        else:
            for before in graph.ops.inputs.row(row):
                yield from self._sources(before, kernel)
            if name == _RANDOM:  # what was drawn is kept
                yield graph.ops.outputs.row(row)[1]

    def _kernels_that_read(self, tensor: int, kernel: _Kernel, bound: set[int]) -> list[_Kernel] | None:
        """The other kernels that read a result, or views of it; None where something else does."""
        found: list[_Kernel] = []
        if tensor in bound:
            return None
        for row in self.readers[tensor]:
            its = self.of.get(row)
            if self.graph.ops.is_view[row]:
                more = self._kernels_that_read(self.graph.ops.outputs.row(row)[0], kernel, bound)
                if more is None:
                    return None
                found += [k for k in more if k not in found]
            elif its is None or self.compiled.get(row) != self.compiled.get(kernel.rows[0]):
                return None
            elif its is not kernel and its not in found:
                found.append(its)
        return found

    def _read_outside(self, bound: set[int]) -> set[int]:
        """Tensors that are read by others than the kernel that makes them, or are views of such."""
        graph, outside = self.graph, set(bound)
        for tensor, rows in self.readers.items():
            maker = int(graph.maker[tensor])
            if maker == NONE:
                continue
            if any(maker not in self.of or self.of.get(row) is not self.of[maker] for row in rows):
                outside.add(tensor)
        for sources in self.again.values():
            outside.update(sources)
        for row in sorted(self.of, reverse=True):  # what a view that is read shows has to be there
            made, *_ = graph.ops.outputs.row(row)
            if graph.ops.is_view[row] and made in outside:
                outside.update(graph.ops.inputs.row(row))
        return {i for i in outside if self.shown(i) not in self.again}


class _Writer(StepWriter):
    """Writes a kernel where it runs, and after it the views that are read outside."""

    def __init__(
        self, graph: Graph, traffic: _Traffic, maker: str, makers: Mapping[int, str] = MappingProxyType({})
    ) -> None:
        super().__init__(graph)
        self.traffic, self.prefix, self.prefixes = traffic, maker, makers

    def operation(self, op: t.Op) -> None:
        kernel = self.traffic.of.get(op.id)
        if kernel is None:
            self._other(op)
        elif op.id == kernel.at:
            self._fused(kernel)
            for row in kernel.views:
                if row < op.id:
                    self._view(row)
        elif op.id > kernel.at and self.graph.ops.is_view[op.id]:
            self._view(op.id)

    def tensor(self, index: int, **changes: object) -> int:
        """As `StepWriter.tensor`; what is written over a result that is not there is over what that was over."""
        tensors = self.graph.tensors
        before = at = int(tensors.alias_of[index])
        while at != NONE and int(self.graph.maker[at]) in self.traffic.of and at not in self.traffic.outside:
            at = int(tensors.alias_of[at])
        if at != before and index not in self.part.tensors:
            changes["alias_of"] = None if at == NONE else at
        return super().tensor(index, **changes)

    def _other(self, op: t.Op) -> None:
        """An operation of no kernel: what shows a result that is not there is not there, either."""
        inputs = self.graph.ops.inputs.row(op.id)
        if self.graph.ops.is_view[op.id] and any(self.traffic.shown(i) in self.traffic.again for i in inputs):
            self.part.ops[op.id] = self.part.ops[int(self.graph.maker[inputs[0]])]
        elif isinstance(op, t.Compute) and op.name.removesuffix("_backward") in _NORMS:
            prefix = self.prefixes.get(op.id, self.prefix or "aten")
            name = f"{prefix}.{op.name.removeprefix('aten.')}"
            self.copy(replace(op, name=name, durations=tuple(issued([op]))))
        else:
            self.copy(op)

    def _view(self, row: int) -> None:
        if self.graph.ops.outputs.row(row)[0] in self.traffic.outside:
            self.copy(self.graph.ops[row])

    def _fused(self, kernel: _Kernel) -> None:
        graph, traffic = self.graph, self.traffic
        made = [i for row in kernel.rows for i in graph.ops.outputs.row(row)]
        read = traffic.reads(kernel)
        waits = {dep for row in kernel.rows for dep in graph.ops.deps.row(row)}.difference(kernel.rows)
        kept = [index for index in made if index in traffic.outside]
        last = graph.ops[kernel.rows[-1]]
        forward = next((f for row in kernel.rows if (f := int(graph.ops.forward_op[row])) != NONE), None)
        name = last.name.rpartition(".")[2]
        if kernel.reduced:
            name = "norm_backward" if last.phase == t.Phase.BACKWARD else "norm"
        prefix = self.prefixes.get(last.id, self.prefix)
        if prefix == COMPILED and any(graph.ops[row].name == _RANDOM for row in kernel.rows):
            name = f"{DRAWS}_{name}"
        if any(graph.ops[row].name == RESCALE for row in kernel.rows):
            name = f"{RESCALED}_{name}"
        new = self.builder.compute(
            f"{prefix}.{name}",
            phase=last.phase,
            module=last.module,
            inputs=[self.tensor(i) for i in read],
            outputs=[self.tensor(i) for i in kept],
            stream=last.stream,
            deps=sorted({self.part.ops[dep] for dep in waits if traffic.of.get(dep) is not kernel}),
            forward_op=self.part.ops[forward] if forward is not None and forward >= 0 else forward,
            bytes_read=traffic.nbytes(read),
            bytes_written=traffic.nbytes(kept),
            durations=issued([graph.ops[row] for row in kernel.rows]),
        )
        self.part.ops |= dict.fromkeys((*kernel.rows, *kernel.views), new)


def _bound(graph: Graph, bindings: tuple[int, ...]) -> list[int]:
    return [graph.locate_tensor(identity)[2] for identity in bindings]
