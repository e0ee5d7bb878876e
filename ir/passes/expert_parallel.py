"""Expert parallelism: the experts of each mixture-of-experts layer are divided over ranks, which exchange tokens.

The ranks of the axis "ep" are data-parallel ranks for all but the experts: each works on its own micro-batch, and
has the router, the shared experts and everything else whole. Of the experts each has an equal share. After the
router has put the rows of a layer (tokens times experts per token) in the order of the experts, an all-to-all
takes them to the ranks that have the experts (dispatch); there they are put in the order of the local experts,
multiplied, put back, and another all-to-all returns them (combine). The backward pass exchanges the gradients of
the same rows, the other way round. (Lepikhin et al., "GShard", 2020, section 3; Megatron-Core's
`MoEAlltoAllTokenDispatcher`.)

How many rows will come, a rank cannot know: before the dispatch the ranks all-gather how many each has for every
expert, and the host waits for the answer to size the exchange (`preprocess` of the same dispatcher). With a
capacity that is known beforehand (`drop_and_pad`), and neither is needed; then rows are padded or dropped by an
operation of its own, which trainers fuse with the ordering of the rows.

The axes "cp" and "ep" may share the experts together (`across`): context-parallel ranks have tokens of their own,
too, so all may exchange with all, as Megatron-Core lets the ranks of experts cut across those of attention (Liu
et al., "MoE Parallel Folding", 2025).

So an exchange carries each row on its own (`MoEAlltoAllTokenDispatcher`). Others send a token once to each NVLink
domain that has one of its experts, where it is forwarded, or once to each rank in a single domain (`deepep`:
DeepEP, and HybridEP like it, of Megatron-Core's `MoEFlexTokenDispatcher`). Bytes of an exchange are then those of
an all-to-all that puts as many on the links which take longest: tokens times the places that one goes to
(`places`), on average over routing without a preference but for groups of experts, of which a router may choose
first (DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.1.2).

The graph has one program for all ranks of the axis: that of the rank that has most rows. `imbalance` says how
many that are and is an assumption; what of the rows stays on its rank (one in `size`, on average) is in the
buffers of the exchange, as nccl-tests counts them. Gradients of experts are summands over fewer ranks than
others: `sharded` names the axis, and the pass that adds them up looks there.

The rows of a mixture-of-experts layer are at home, on the rank whose tokens they are, or at the experts. A tensor
that is not at home is divided along one dim: one that counts rows (the ranks exchange them), or one that counts
experts (each rank holds its share of them). How an operator carries the dim on, the rules of tensor parallelism
say; here stands what is peculiar to experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, comb, gcd, prod
from typing import ClassVar, Literal, get_args

from echograph.errors import PlanError, UnknownNameError
from echograph.ir import types as t
from echograph.ir.columns import NONE
from echograph.ir.graph import Axis, StepGraph
from echograph.ir.passes.dims import Ambiguous
from echograph.ir.passes.model import EXPERT, NORMS, axes_group, overflow_flags, total_norms
from echograph.ir.passes.rewrite import StepWriter
from echograph.ir.passes.tensor_parallel.rules import VIEWS, WHOLE, OpSchema, Placement, Shard, decide, operator

GROUPED = ("_grouped_mm",)
"""Operators that multiply the rows of each expert by its weight: (rows, weights, ends of the groups of rows)."""


@dataclass(frozen=True, slots=True)
class Away:
    """Not at home, but with the experts.

    Attributes:
        along: the dim that counts rows or experts.
        experts: experts of the layer, on all ranks together.
        rows: whether the dim counts rows; else it counts experts.
    """

    along: Shard
    experts: int
    rows: bool = True

    def at(self, dim: int) -> Away:
        """The same along another dim."""
        return Away(Shard(dim), self.experts, self.rows)


ExpertPlacement = Away | None
"""Where a tensor is; None: at home, or whole on every rank."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Where an operation wants its inputs, and where it leaves its outputs."""

    inputs: tuple[ExpertPlacement, ...]
    outputs: tuple[ExpertPlacement, ...]

    @property
    def away(self) -> tuple[Away, ...]:
        """The places of what is away, inputs first."""
        return tuple(p for p in (*self.inputs, *self.outputs) if p is not None)


def places(parts: int, experts: int, chosen: int, groups: tuple[int, int] = (1, 1)) -> float:
    """How many of equal parts have one of a token's experts, on average over routing without a preference.

    Without groups: parts (1 - C(N - N/parts, k) / C(N, k)) for k of N experts.

    Args:
        parts: into how many equal parts the experts are divided (ranks of the ep axis).
        experts: experts of a layer.
        chosen: experts that a token is routed to (top-k).
        groups: groups that the experts stand in, and from how many of them a token's experts are chosen.
    """
    count, allowed = groups
    if not (count % parts == 0 or parts % count == 0):
        count = allowed = 1  # groups that do not lie within parts, nor parts within groups
    pool, width = experts // count * allowed, max(1, count // parts)
    here = experts // max(parts, count)
    missed = sum(
        comb(width, hit) * comb(count - width, allowed - hit) * comb(pool - hit * here, chosen)
        for hit in range(min(width, allowed) + 1)
    )
    return parts * (1 - missed / (comb(count, allowed) * comb(pool, chosen)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What of the experts' work one rank has.

    Attributes:
        size: ranks that share the experts.
        imbalance: rows of the busiest rank in units of the mean.
        capacity_factor: rows that each expert takes, in units of its even share; None: whatever comes.
        parts: of the ranks, to each of which a token is sent once; 0: each row is sent on its own.
        groups: of experts, and how many of them a router chooses for a token.
    """

    size: int
    imbalance: float = 1.0
    capacity_factor: float | None = None
    parts: int = 0
    groups: tuple[int, int] = (1, 1)

    def carried(self, experts: int, chosen: int) -> float:
        """What of a row is carried: less than 1 where a token is sent once for all its experts in a part."""
        return places(self.parts, experts, chosen, self.groups) / chosen if self.parts else 1.0

    def sent(self, rows: int, experts: int) -> int:
        """Rows that a rank sends to all experts, for the rows that its tokens make."""
        if self.capacity_factor is None:
            return rows
        return experts * ceil(round(self.capacity_factor * rows / experts, 6))

    def received(self, rows: int, experts: int) -> int:
        """Rows that the busiest rank's experts work on, for the rows that each rank's tokens make."""
        return ceil(round(self.imbalance * self.sent(rows, experts), 6))

    def local(self, shape: tuple[int, ...], place: ExpertPlacement) -> tuple[int, ...]:
        """Shape of what one rank holds of a tensor with this place."""
        if place is None:
            return shape
        dim, before = place.along.dim, place.along.before
        part = shape[dim] // before
        part = self.received(part, place.experts) if place.rows else part // self.size
        return (*shape[:dim], before * part, *shape[dim + 1 :])


def grouped(site: OpSchema, experts: int) -> Choice:
    """Rows times weights [experts, ...], or rows times rows to gradients of weights (added to a buffer).

    Raises:
        PlanError: the operands have other dims.
    """
    ranks = tuple(len(shape) for shape in site.inputs[:2])
    share, rows = Away(Shard(0), experts, rows=False), Away(Shard(0), experts)
    adds = ranks == (2, 2) and len(site.inputs) == 4 and site.inputs[2] == site.outputs[0]
    if ranks not in ((2, 3), (2, 2)) or len(site.inputs) != 3 + adds:
        shapes = ", ".join(map(str, site.inputs))
        raise PlanError(f"aten.{site.name} of operands {shapes}: expert parallelism knows rows, weights and ends")
    if ranks == (2, 3):
        return Choice((rows, share, share), (rows,))
    return Choice((rows.at(1), rows, *([share] * adds), share), (share,))


def by_expert(site: OpSchema, places: tuple[ExpertPlacement, ...], experts: int) -> Choice | None:
    """Rows of a table of the experts (biases), picked by the expert of each row, and the gradient of that."""
    table, rows = Away(Shard(0), experts, rows=False), Away(Shard(0), experts)
    if site.name == "index" and places == (table, None):
        return Choice((table, rows), (rows,))
    if site.name == "index_put" and len(places) == 3 and site.outputs[0][:1] == (experts,):
        return Choice((table, rows, rows), (table,))
    return None


def carry(
    site: OpSchema, places: tuple[ExpertPlacement, ...], in_place: ExpertPlacement, fixed: tuple[bool, ...]
) -> Choice | None:
    """What any other operator does with what is away, or None if it needs something of it at home.

    Args:
        site: the operation; its placements are made here.
        places: of its inputs.
        in_place: of the memory that an in-place operator writes.
        fixed: for each input, whether it is where it is; constants that nothing has read yet are not.
    """
    kinds = {(p.experts, p.rows) for p in (*places, in_place) if p is not None}
    if len(kinds) != 1:
        return None
    ((experts, rows),) = kinds

    def placement(place: ExpertPlacement) -> Placement:
        return WHOLE if place is None else place.along

    def place(placement: Placement) -> ExpertPlacement:
        return Away(placement, experts, rows) if isinstance(placement, Shard) else None

    try:
        decision = decide(
            OpSchema(
                name=site.name, inputs=site.inputs, placements=tuple(map(placement, places)), outputs=site.outputs,
                in_place=None if in_place is None else in_place.along,
            )
        )  # fmt: skip
    except Ambiguous:
        return None
    made = Choice(tuple(map(place, decision.inputs)), tuple(map(place, decision.outputs)))
    stays = all(h == w or not f for h, w, f in zip(places, made.inputs, fixed, strict=True))
    complete = all(isinstance(p, Shard) or p == WHOLE for p in decision.outputs)
    return made if stays and complete and made.away else None


def before(name: str, source: tuple[int, ...], view: tuple[int, ...], place: Away) -> Away | None:
    """Where a tensor must be for a view of it to have a place: along a dim of the same extent, or None."""
    site = OpSchema(name=name, inputs=(source,), placements=(), outputs=(view,))
    for dim, extent in enumerate(source):
        if extent == view[place.along.dim] and place.along == Shard(place.along.dim):
            made = carry(site, (place.at(dim),), None, (True,))
            if made is not None and made.outputs == (place,):
                return place.at(dim)
    return None


class Places:
    """Where each tensor is and what each operation chooses, once per row of the tables.

    The rows of a grouped product are with the experts, and so is what is computed of such rows alone. What also
    reads something at home is computed there, unless it is between two products: so rows are exchanged just before
    the first product of a layer and just after the last, in the type they then have, and so are their gradients.

    Args:
        graph: the step.
        size: ranks that share the experts.

    Attributes:
        ends: tensors that hold the ends of the experts' groups of rows, or the expert of each row, with the
            former.
        places: where tensors are; those at home are left out.
        choices: what operations choose that have something with the experts.

    Raises:
        PlanError: no experts, experts that do not divide, or a step that needs other ranks' experts.
    """

    def __init__(self, graph: StepGraph, *, size: int) -> None:
        self.graph, self.size = graph, size
        self.products = [row for row in range(len(graph.ops)) if operator(graph, row) in GROUPED]
        self._check_experts()
        self.ends = self._ends()
        self.places = self._parameters()
        self.choices: dict[int, Choice] = {}
        self._decided: set[int] = set()
        self._readers: dict[int, list[int]] = {}
        for index, row in zip(graph.ops.inputs.values.tolist(), graph.ops.inputs.rows.tolist(), strict=True):
            self._readers.setdefault(index, []).append(row)
        for block, begin, end, instance, _ in graph.programs[0].calls.tolist():
            for row in range(begin, end):
                if row not in self._decided:
                    self._decided.add(row)
                    self._decide(block, instance, row)
        self._check_ports()

    # -- the experts ---------------------------------------------------------------------------------------

    def experts(self, row: int) -> int:
        """Experts of a grouped product."""
        (count,) = self.graph.tensors.shape.row(self.graph.ops.inputs.row(row)[-1])
        return int(count)

    def tokens(self) -> set[int]:
        """Tokens that the rows of a layer are copies of, where an `index` takes the copies."""
        graph, found = self.graph, set[int]()
        for row in self.products:
            source = graph.source(int(graph.block_of_op[row]), 0, graph.ops.inputs.row(row)[0])
            if source is not None and operator(graph, source[2]) == "index":
                copied = graph.tensors.shape.row(graph.ops.inputs.row(source[2])[0])
                found.add(prod(copied[:-1]))
        return found

    def groups(self) -> tuple[int, int]:
        """Groups of experts that a router chooses first, and how many: of what it takes the greatest."""
        graph, found = self.graph, (1, 1)
        experts = min(map(self.experts, self.products))
        for row in range(len(graph.ops)):
            if operator(graph, row) == "topk":
                read, made = (side.row(row)[0] for side in (graph.ops.inputs, graph.ops.outputs))
                among, taken = graph.tensors.shape.row(read), graph.tensors.shape.row(made)[-1]
                if len(among) == 2 and among[-1] < experts and experts % among[-1] == 0:
                    found = among[-1], taken
        return found

    def _check_experts(self) -> None:
        if not self.products:
            raise PlanError(
                f"expert parallelism over {self.size} ranks: the step has no grouped products of experts "
                "(aten._grouped_mm): leave it out, or take a mixture-of-experts model"
            )
        counts = [self.experts(row) for row in self.products]
        if any(count % self.size for count in counts):
            common = gcd(*counts)
            sizes = [n for n in range(1, common + 1) if common % n == 0]
            below = max(n for n in sizes if n < self.size)
            above = next((n for n in sizes if n > self.size), None)
            fitting = str(below) if above is None else f"{below} or {above}"
            experts = " or ".join(map(str, sorted(set(counts))))
            raise PlanError(
                f"expert parallelism over {self.size} ranks: a layer's {experts} experts do not divide: "
                f"choose a size of {fitting}"
            )

    def _ends(self) -> dict[int, int]:
        """The ends of groups; and what they are counted from, if it is integers, one a row: their experts."""
        graph, ends = self.graph, dict[int, int]()
        for row in self.products:
            first, last = graph.ops.inputs.row(row)[0], graph.ops.inputs.row(row)[-1]
            found, seen = [last], {last}
            while found:
                index = found.pop()
                whole = graph.tensors.dtype[index] in (t.DType.INT64, t.DType.INT32)
                names_experts = whole and graph.tensors.shape.row(index) == graph.tensors.shape.row(first)[:1]
                if index == last or names_experts:
                    ends[index] = last
                maker = int(graph.maker[index])
                if maker != NONE and (index == last or not names_experts):
                    reads = [i for i in graph.ops.inputs.row(maker) if i not in seen]
                    found += reads
                    seen.update(reads)
        return ends

    def _parameters(self) -> dict[int, ExpertPlacement]:
        """Weights and biases of the experts and their optimizer state, divided along their first dim."""
        graph, found = self.graph, dict[int, ExpertPlacement]()
        for row in range(len(graph.ops)):
            name, inputs = operator(graph, row), graph.ops.inputs.row(row)
            if name in GROUPED and len(graph.tensors.shape.row(inputs[1])) == 3:
                table, experts = inputs[1], self.experts(row)
            elif name == "index" and len(inputs) == 2 and inputs[1] in self.ends:
                table, (experts,) = inputs[0], graph.tensors.shape.row(self.ends[inputs[1]])
            else:
                continue
            block = int(graph.block_of_op[row])
            for instance in range(len(graph.blocks[block].instances)):
                root = self._root(block, instance, table)
                if graph.tensors.roles[root] == t.TensorRole.PARAMETER:
                    found[root] = Away(Shard(0), experts, rows=False)
        return found | self._states(found)

    def _root(self, block: int, instance: int, index: int) -> int:
        """What a tensor was before views and casts."""
        while True:
            block, instance, index = self.graph.value(block, instance, index)
            maker = int(self.graph.maker[index])
            if maker == NONE or not len(self.graph.ops.inputs.row(maker)):
                return index
            index = self.graph.ops.inputs.row(maker)[0]

    def _states(self, parameters: dict[int, ExpertPlacement]) -> dict[int, ExpertPlacement]:
        """What lives through the step for each of these parameters: their name begins with the parameter's."""
        graph, found = self.graph, dict[int, ExpertPlacement]()
        for index, place in parameters.items():
            parameter = graph.tensors[index]
            block = next(b for b in graph.blocks if index in b.tensors)
            for other in block.tensors:
                tensor = graph.tensors[other]
                kept = tensor.role in (t.TensorRole.OPTIMIZER_STATE, t.TensorRole.GRADIENT)
                alike = tensor.shape == parameter.shape and tensor.name.startswith(f"{parameter.name}.")
                if kept and alike and graph.maker[other] == NONE:
                    found[other] = place
        return found

    # -- operations ----------------------------------------------------------------------------------------

    def _decide(self, block: int, instance: int, row: int) -> None:
        graph = self.graph
        inputs, outputs = graph.ops.inputs.row(row), graph.ops.outputs.row(row)
        if outputs and all(self._is_free(i) for i in outputs):
            return  # a constant, made where it is read first
        places = tuple(self._place(block, instance, i) for i in inputs)
        choice = self._choice(block, instance, row, places)
        if choice is None:
            choice = Choice((None,) * len(inputs), (None,) * len(outputs))
        if choice.away or any(places):
            self.choices[row] = choice
        for index, has, wanted in zip(inputs, places, choice.inputs, strict=True):
            if self._is_free(index):
                self._settle(index, wanted)
            elif has != wanted and not self._moves(index, has or wanted):
                raise self._unshareable(row, index)
        self.places |= zip(outputs, choice.outputs, strict=True)

    def _moves(self, index: int, place: ExpertPlacement) -> bool:
        """Whether a tensor can be moved: rows, and the ends of their groups, which are counted anew."""
        return (place is not None and place.rows) or self.ends.get(index) == index

    def _choice(self, block: int, instance: int, row: int, places: tuple[ExpertPlacement, ...]) -> Choice | None:
        """What an operation chooses; None for everything at home."""
        graph = self.graph
        inputs, outputs = graph.ops.inputs.row(row), graph.ops.outputs.row(row)
        name, site = operator(graph, row), self._site(row)
        if name in GROUPED:
            product = grouped(site, self.experts(row))
            if len(site.inputs[1]) == 3 and places[1] != product.inputs[1]:
                raise PlanError(
                    f"{self._where(row)}: its weights are no parameter with the experts as first dim: "
                    "expert parallelism cannot share them"
                )
            return product
        if len(inputs) > 1 and inputs[1] in self.ends:
            (experts,) = graph.tensors.shape.row(self.ends[inputs[1]])
            if (choice := by_expert(site, places, int(experts))) is not None:
                return choice
        if not any(places):
            return None
        if graph.ops.kinds[row] != t.OpKind.COMPUTE:
            reduces = graph.ops[row]
            same = isinstance(reduces, t.Collective) and reduces.collective == t.CollectiveKind.ALL_REDUCE
            return Choice(places, places) if same else None
        if graph.strings[graph.ops.name[row]] in NORMS:
            return Choice(places, (None,) * len(outputs))
        memory = int(graph.tensors.alias_of[outputs[0]]) if name.endswith("_") and outputs else NONE
        in_place = None if memory == NONE else self._place(block, instance, memory)
        fixed = tuple(not self._is_free(i) for i in inputs)
        if memory != NONE and in_place is None and not self._is_free(memory):
            return None
        choice = carry(site, places, in_place, fixed)
        if choice is None and (anywhere := carry(site, places, in_place, (False,) * len(inputs))) is not None:
            between = any(self._goes_on(i, place) for i, place in zip(outputs, anywhere.outputs, strict=True))
            return anywhere if between else None
        return choice

    def _goes_on(self, index: int, place: ExpertPlacement) -> bool:
        """Whether rows go into a further product, row by row: nothing between is worth a way home and back."""
        graph = self.graph
        if place is None or not place.rows:
            return False
        for row in self._readers.get(index, ()):
            inputs, outputs = graph.ops.inputs.row(row), graph.ops.outputs.row(row)
            if operator(graph, row) in GROUPED:
                return True
            places = tuple(place if i == index else None for i in inputs)
            choice = carry(self._site(row), places, None, (False,) * len(inputs))
            if choice and any(self._goes_on(i, p) for i, p in zip(outputs, choice.outputs, strict=True)):
                return True
        return False

    def _site(self, row: int) -> OpSchema:
        graph = self.graph
        shape = graph.tensors.shape.row
        return OpSchema(
            name=operator(graph, row).removesuffix("_"), placements=(),
            inputs=tuple(map(shape, graph.ops.inputs.row(row))),
            outputs=tuple(map(shape, graph.ops.outputs.row(row))),
        )  # fmt: skip

    def _is_free(self, index: int) -> bool:
        """Whether it is a constant (or a view of one) that nothing has read yet, which can be made anywhere."""
        maker = int(self.graph.maker[index])
        if index in self.places or maker == NONE:
            return False
        reads = self.graph.ops.inputs.row(maker)
        return not len(reads) or (
            len(reads) == 1 and operator(self.graph, maker) in VIEWS and self._is_free(reads[0])
        )

    def _settle(self, index: int, wanted: ExpertPlacement) -> None:
        """Makes a constant where it is read."""
        graph, maker = self.graph, int(self.graph.maker[index])
        self.places[index] = wanted
        reads, place = graph.ops.inputs.row(maker), wanted
        if len(reads):
            if wanted is not None:
                shapes = graph.tensors.shape.row(reads[0]), graph.tensors.shape.row(index)
                place = before(operator(graph, maker), *shapes, wanted)
                if place is None:
                    raise self._unshareable(maker, index)
            self._settle(reads[0], place)
        if wanted is not None:
            self.choices[maker] = Choice((place,) * len(reads), (wanted,))

    def _place(self, block: int, instance: int, index: int) -> ExpertPlacement:
        graph = self.graph
        if index not in self.places and not self._is_free(index):
            place: ExpertPlacement = None
            if graph.tensors.port[index]:
                place = self._place(*graph.locate_tensor(graph.tensor_id(block, instance, index)))
            elif (alias := int(graph.tensors.alias_of[index])) != NONE:
                place = self._place(block, instance, alias)
            self.places[index] = place
        return self.places.get(index)

    def _check_ports(self) -> None:
        """All instances of a block must bind a port to tensors of one place."""
        graph = self.graph
        for number, instance, port, where in graph.bindings():
            if self._place(*where) != self._place(number, instance, port):
                raise PlanError(
                    f"{graph.tensors[where[2]].name} is not with the experts as what instance 0 of block "
                    f"'{graph.blocks[number].name}' takes in its place is: expert parallelism cannot share this "
                    "step"
                )

    def _unshareable(self, row: int, index: int) -> PlanError:
        tensor = self.graph.tensors[index]
        return PlanError(
            f"{self._where(row)} takes {tensor.name} {tensor.shape} of all experts, or that of some: expert "
            "parallelism cannot share this step"
        )

    def _where(self, row: int) -> str:
        graph = self.graph
        return f"{graph.strings[graph.ops.module[row]] or 'the step'} ({graph.strings[graph.ops.name[row]]})"


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
        self.tokens = max(places.tokens(), default=1)
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
            row = self._exchange(row, tensor, place, self._carried(tensor, place), received, op)
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
            row = self._exchange(row, tensor, place, self._carried(tensor, place), sent, op)
        if self.load.capacity_factor is not None:
            row = self._permute("aten.index", row, replace(tensor, port=False), op)
        return row

    def _counts(self, tensor: t.Tensor, place: Away) -> tuple[int, int]:
        rows = tensor.shape[place.along.dim] // place.along.before
        return self.load.sent(rows, place.experts), self.load.received(rows, place.experts)

    def _carried(self, tensor: t.Tensor, place: Away) -> int:
        """Rows of the larger of what a rank sends and receives, those alone that are carried."""
        chosen = max(1, tensor.shape[place.along.dim] // self.tokens)
        return ceil(round(self.load.carried(place.experts, chosen) * max(self._counts(tensor, place)), 6))

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
        """An all-to-all of a buffer with so many rows at most, of which others are made."""
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


MAX_SIZE = 4096
Dispatcher = Literal["alltoall", "deepep", "hybridep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertParallel:
    """The step as one rank executes it that has a share of the experts.

    Attributes:
        size: ranks that share the experts, those of the axes of `across` among them.
        capacity_factor: rows that each expert takes of each rank, in units of their even share; more are dropped,
            fewer padded. None: every expert takes what comes.
        imbalance: rows that the busiest rank has, in units of the mean (assumed; 1 is the balance that routers are
            trained for). With a capacity all ranks have as many.
        across: axes of the step's mesh whose ranks share the experts, too; each must have tokens of its own.
        dispatcher: "alltoall" sends every row; "deepep" and "hybridep" a token once to each NVLink domain, or,
            in a single one, to each rank.
        domains: NVLink domains that the ranks are on.
    """

    name: ClassVar[str] = "expert_parallel"

    size: int
    capacity_factor: float | None = None
    imbalance: float = 1.0
    across: tuple[str, ...] = ()
    dispatcher: Dispatcher = "alltoall"
    domains: int = 1

    def __call__(self, graph: StepGraph) -> StepGraph:
        """The step with local experts, and exchanges over the axis "ep", outside all other axes, and `across`.

        Raises:
            PlanError: an option is out of range, the experts do not divide (names sizes that do), or the step has
                no experts, or what cannot be shared.
        """
        self._check()
        if "ep.all_to_all" in graph.strings:
            raise PlanError("the step is expert-parallel already: start from the step as it was captured")
        if self.size == 1 and self.capacity_factor is None:
            return graph
        axes = self._axes(graph)
        places = Places(graph, size=self.size)
        self._check_tokens(graph, places)
        load = Load(
            size=self.size,
            imbalance=self.imbalance,
            capacity_factor=self.capacity_factor,
            parts=self._parts(),
            groups=places.groups(),
        )
        return write(graph, places, load, axes)

    def _axes(self, graph: StepGraph) -> tuple[Axis, ...]:
        """The axes whose ranks share the experts, outermost first; the first is new, unless it has one rank."""
        inner = tuple(axis for axis in graph.mesh if axis.name in self.across)
        if len(inner) != len(self.across):
            names = ", ".join(axis.name for axis in graph.mesh) or "no axis"
            raise PlanError(f"experts across {', '.join(self.across)}: the step's mesh has {names}: leave it out")
        ranks = prod(axis.size for axis in inner)
        if self.size % ranks:
            raise PlanError(
                f"expert parallelism over {self.size} ranks, across {', '.join(self.across)}: no multiple of "
                f"{ranks}: choose {self.size // ranks * ranks or ranks} or {-(-self.size // ranks) * ranks}"
            )
        outer = self.size // ranks
        return (*((Axis(name=EXPERT, size=outer),) if outer > 1 else ()), *inner)

    def _check_tokens(self, graph: StepGraph, places: Places) -> None:
        """The ranks of the axes of `across` must divide the tokens of the step among them."""
        ranks = prod(axis.size for axis in graph.mesh if axis.name in self.across)
        whole = graph.workload.batch_size * graph.workload.sequence_length
        if self.across and {tokens * ranks for tokens in places.tokens()} != {whole}:
            raise PlanError(
                f"experts across {', '.join(self.across)}: the ranks do not have tokens of their own: leave it out"
            )

    def _parts(self) -> int:
        """Parts of the ranks to each of which a token is sent once."""
        if self.dispatcher == "alltoall":
            return 0
        return self.domains if self.domains > 1 else self.size

    def _check(self) -> None:
        if self.dispatcher not in get_args(Dispatcher):
            raise UnknownNameError("dispatcher of experts", self.dispatcher, get_args(Dispatcher))
        if not 1 <= self.size <= MAX_SIZE:
            raise PlanError(f"expert parallelism over {self.size} ranks: choose 1 to {MAX_SIZE}")
        if not 1 <= self.domains <= self.size:
            raise PlanError(
                f"experts of {self.size} ranks on {self.domains} NVLink domains: give 1 to {self.size}"
            )
        if self.capacity_factor is not None and not 0 < self.capacity_factor < float("inf"):
            raise PlanError(f"capacity factor {self.capacity_factor:g} of the experts: give more than 0")
        if not 1 <= self.imbalance <= self.size:
            raise PlanError(
                f"imbalance {self.imbalance:g} of the experts: the busiest of {self.size} ranks has 1 to "
                f"{self.size} times the mean"
            )
        if self.capacity_factor is not None and self.imbalance != 1:
            raise PlanError(
                f"imbalance {self.imbalance:g} of the experts: with a capacity all have as many rows: leave it out"
            )
