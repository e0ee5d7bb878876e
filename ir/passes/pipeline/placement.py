"""Which chunk of a pipeline runs which operation of a step, and which values cross from chunk to chunk, and when.

A chunk is a run of layers; chunk k feeds chunk k + 1. Layers are what stands under one numbered component of a
module path (`encoder.layer.3`), in the order of their first forward operation. An instance of a repeated block
belongs to one layer; an operation of the main block goes

- with its layer, if it is in one;
- forward otherwise: with the layer before it in the program, to the first chunk where there is none and to the
  last one after all layers; but to every chunk that reads it, if it depends on no parameter and no layer (position
  ids, rotary tables, masks);
- backward otherwise: with the forward operation that it differentiates, or with what makes its inputs;
- optimizer: with the parameter that it updates, to every chunk that holds the parameter (`OptimizerPlacer`).

A parameter that several chunks read is on each of them. The additions that sum its gradient over chunks do not
run: each chunk keeps its own share, and the shares are all-reduced (Shoeybi et al., "Megatron-LM", 2019; the
embedding group of Megatron-LM).

Of the optimizer, operations that write the same parameter, gradient or state go together, to the chunks that hold
it. Others go where what they read is. What reads of several stages (the norms of all gradients) runs on every
stage, on what of it the stage has; its result is the stage's share, completed by an all-reduce over the stages.
What hangs on no single stage (the loss scale, the factor that gradients are clipped by) runs on every stage, in
its first chunk.

The flag of fp16 loss scaling is handed from parameter to parameter, through all stages: a stage hands it on among
its own, and an all-reduce joins the stages' flags. The gradient of a parameter that several stages hold counts on
the first of them, as Megatron-LM counts it (`param_is_not_shared`).

A value goes from neighbour to neighbour: what forward makes goes up, with the forward pass, to every chunk that
reads it; what backward makes goes down, with the backward pass. A chunk that only passes it on receives it too.

A schedule that splits backward runs it as two passes (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024,
section 1). B makes what is sent on: an operation is in B if a gradient that some chunk sends depends on it, in
any instance of its block. The rest of backward is in W: gradients of weights, biases and embeddings. A kernel
that makes both kinds at once, as that of a layer norm's backward, is in B; so is all recomputation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache

import numpy as np

from echograph.errors import PlanError
from echograph.ir import types as t
from echograph.ir.columns import NONE
from echograph.ir.graph import StepGraph, kept
from echograph.ir.passes.model import final_gradients, overflow_flags, total_norms

Chunks = frozenset[int]


@dataclass(slots=True, kw_only=True)
class Partition:
    """Where everything runs.

    Attributes:
        chunks: number of chunks.
        instances: chunk of each (block, instance) other than the main block's.
        ops: for every operation of the main block, the chunks that run it.
        holders: for every parameter of the main block that is used, the chunks that hold a copy.
        shares: for (chunk, gradient of the main block), the tensor that holds the chunk's share of it, where the
            sum over chunks is left to an all-reduce.
        terms: the same for every sum within these gradients, for the operations that read it.
        stagewide: operations of the optimizer that every stage runs, in its first chunk.
        totals: those of them whose result is the stage's share of a sum over the stages.
        flags: for operations that complete a flag which all stages have a share of, the tensor id of the flag.
        flag_memory: (block, instance, tensor) of the memory of these flags.
    """

    chunks: int
    instances: dict[tuple[int, int], int] = field(default_factory=dict)
    ops: dict[int, Chunks] = field(default_factory=dict)
    holders: dict[int, Chunks] = field(default_factory=dict)
    shares: dict[tuple[int, int], int] = field(default_factory=dict)
    terms: dict[tuple[int, int], int] = field(default_factory=dict)
    stagewide: set[int] = field(default_factory=set)
    totals: set[int] = field(default_factory=set)
    flags: dict[int, int] = field(default_factory=dict)
    flag_memory: set[tuple[int, int, int]] = field(default_factory=set)

    def of(self, source: tuple[int, int, int]) -> Chunks:
        """The chunks that run (block, instance, operation)."""
        block, instance, op = source
        return self.ops[op] if block == 0 else frozenset((self.instances[block, instance],))


def place_operations(graph: StepGraph, chunks: int, layers: tuple[int, ...] | None) -> Partition:
    """Places the forward and backward operations of a step on chunks.

    Args:
        graph: a folded step graph.
        chunks: number of chunks.
        layers: layers of each chunk; None splits evenly, and the first take one more where it does not divide. The
            first chunk may have none, which leaves it the embedding, and the last, which leaves it the head; of as
            many chunks as layers and one or two more these do (Llama 3's 126 layers in 128 chunks).

    Raises:
        PlanError: there are too few layers for the chunks, `layers` do not add up, or operations cannot be placed.
    """
    if len(odd := np.flatnonzero(graph.ops.phase == t.Phase.OTHER)):
        name = graph.strings[graph.ops.name[odd[0]]]
        raise PlanError(
            f"operation {odd[0]} ({name}) has no phase: a pipeline needs forward, backward or optimizer"
        )
    found = layer_names(graph)
    return _Placer(graph, chunks, _split(found, chunks, layers)).place()


@lru_cache(4096)
def layer_of(module: str, label: str = "") -> str | None:
    """The layer that a module belongs to: its path to the first numbered component; None where there is none."""
    parts = module.replace("{}", label).split(".") if label else module.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return None if number is None else ".".join(parts[: number + 1])


@kept
def layer_names(graph: StepGraph) -> list[str]:
    """All layers, by the paths of their modules, in the order of their first forward operation."""
    found: dict[str | None, None] = {}
    for block, begin, end, instance, _ in graph.programs[0].calls.tolist():
        for row in range(begin, end) if block == 0 else (begin,):
            if graph.ops.phases[row] == t.Phase.FORWARD:
                label = graph.blocks[block].instances[instance].label
                found.setdefault(layer_of(graph.strings[graph.ops.module[row]], label))
    return [name for name in found if name is not None]


def _split(names: list[str], chunks: int, layers: tuple[int, ...] | None) -> dict[str, int]:
    """The chunk of every layer."""
    if layers is None:
        empty = max(0, chunks - len(names))
        if empty > 2 or not names:
            raise PlanError(
                f"{chunks} pipeline chunks, but the model has {len(names)} layers: use {len(names)} or fewer"
            )
        least, more = divmod(len(names), chunks - empty)
        even = [least + (chunk < more) for chunk in range(chunks - empty)]
        layers = (*[0] * (empty == 2), *even, *[0] * (empty > 0))
    ends = min(layers[0], layers[-1]) if layers else -1
    middle = min(layers[1:-1], default=1)
    if len(layers) != chunks or sum(layers) != len(names) or not names or ends < 0 or middle < 1:
        given = ", ".join(map(str, layers))
        raise PlanError(
            f"layers ({given}): give {chunks} numbers of 1 or more, 0 at the ends alone, that add up to the "
            f"model's {len(names)} layers{_near(layers, chunks, len(names))}"
        )
    number = [chunk for chunk, count in enumerate(layers) for _ in range(count)]
    return dict(zip(names, number, strict=True))


def _near(layers: tuple[int, ...], chunks: int, total: int) -> str:
    """The split that is nearest to one of the right length: too many layers are taken from the last chunks."""
    near = [max(1, count) for count in layers]
    if len(near) != chunks or total < chunks:
        return ""
    near[-1] += max(0, total - sum(near))
    for chunk in reversed(range(chunks)):
        near[chunk] = max(1, near[chunk] - max(0, sum(near) - total))
    return f", such as {', '.join(map(str, near))}"


class _Placer:
    def __init__(self, graph: StepGraph, chunks: int, layers: dict[str, int]) -> None:
        self.graph, self.layers = graph, layers
        self.placement = Partition(chunks=chunks)
        self.main = graph.blocks[0].ops

    def place(self) -> Partition:
        graph, placement = self.graph, self.placement
        for number, block in enumerate(graph.blocks[1:], 1):
            module = graph.strings[graph.ops.module[block.ops.start]]
            for index, instance in enumerate(block.instances):
                placement.instances[number, index] = self.layers[str(layer_of(module, instance.label))]
        common = self._common()
        home = self._forward_and_backward()
        placement.ops |= {row: frozenset((chunk,)) for row, chunk in home.items() if row not in common}
        self._replicate(common, home)
        _Gradients(graph, placement).share()
        self._hold()
        return placement

    def _common(self) -> set[int]:
        """Forward operations of the main block that depend on no parameter and no layer."""
        graph, common = self.graph, set[int]()
        # An activation that nothing made is memory, which is written in place.
        fixed = (t.TensorRole.INPUT, t.TensorRole.BUFFER, t.TensorRole.ACTIVATION)
        for row in self.main:
            if graph.ops.phases[row] != t.Phase.FORWARD or graph.ops.kinds[row] != t.OpKind.COMPUTE:
                continue
            origins = [int(graph.origin[tensor]) for tensor in self._touched(row)]
            if all(
                int(graph.maker[i]) in common
                or (graph.maker[i] == NONE and not graph.tensors.port[i] and graph.tensors.roles[i] in fixed)
                for i in origins
            ):
                common.add(row)
        return common

    def _forward_and_backward(self) -> dict[int, int]:
        """The chunk of every operation of the main block before the optimizer's."""
        graph, home, current = self.graph, dict[int, int](), 0
        final, ended = next(reversed(self.layers)), False
        for block, begin, end, instance, _ in graph.programs[0].calls.tolist():
            if block:
                current = self.placement.instances[block, instance]
                module = graph.strings[graph.ops.module[begin]]
                ended |= layer_of(module, graph.blocks[block].instances[instance].label) == final
                continue
            for row in range(begin, end):
                if graph.ops.phases[row] == t.Phase.OPTIMIZER:
                    continue
                layer = str(layer_of(graph.strings[graph.ops.module[row]]))
                own = self.layers.get(layer)
                if own is not None:
                    current, ended = own, ended or layer == final
                elif graph.ops.phases[row] == t.Phase.FORWARD and ended:
                    own = current = self.placement.chunks - 1
                elif graph.ops.phases[row] != t.Phase.FORWARD:
                    own = self._of_forward_op(row, home)
                    own = self._of_inputs(row, home) if own is None else own
                home[row] = current if own is None else own
        return home

    def _of_forward_op(self, row: int, home: dict[int, int]) -> int | None:
        forward = int(self.graph.ops.forward_op[row])
        if forward == NONE:
            return None
        if forward < NONE:
            identity = self.graph.blocks[0].instances[0].op_bindings[-2 - forward]
            block, instance, forward = self.graph.locate_op(identity)
            if block:
                return self.placement.instances[block, instance]
        return home.get(forward)

    def _of_inputs(self, row: int, home: dict[int, int]) -> int | None:
        """Where the backward operations of the main block run that make what one reads."""
        makers = (int(self.graph.maker[tensor]) for tensor in self.graph.ops.inputs.row(row))
        made = [home[m] for m in makers if m in home and self.graph.ops.phases[m] == t.Phase.BACKWARD]
        return min(made, default=None)

    def _replicate(self, common: set[int], home: dict[int, int]) -> None:
        """Common operations run on every chunk that reads them; what nothing reads, where it stands."""
        graph, placement = self.graph, self.placement
        wanted: dict[int, set[int]] = defaultdict(set)
        for (block, instance), chunk in placement.instances.items():
            for bound in graph.blocks[block].instances[instance].bindings:
                source = graph.source(*graph.locate_tensor(bound))
                if source is not None and source[0] == 0:
                    wanted[source[2]].add(chunk)
        for row in reversed(self.main):
            if row in common:
                placement.ops[row] = frozenset(wanted[row] or {home[row]})
            if row in placement.ops:
                for tensor in self._touched(row):
                    source = graph.source(0, 0, tensor)
                    if source is not None and source[2] in common and source[0] == 0:
                        wanted[source[2]] |= placement.ops[row]
                for before in common.intersection(graph.ops.deps.row(row)):  # wrote in place what this reads
                    wanted[before] |= placement.ops[row]

    def _touched(self, row: int) -> list[int]:
        """What an operation reads, and what it renames or writes in place."""
        written = (int(self.graph.tensors.alias_of[tensor]) for tensor in self.graph.ops.outputs.row(row))
        return [*self.graph.ops.inputs.row(row), *(tensor for tensor in written if tensor != NONE)]

    def _hold(self) -> None:
        """Which chunks read which parameter of the main block."""
        graph, placement = self.graph, self.placement
        held: dict[int, set[int]] = defaultdict(set)
        for row, chunks in placement.ops.items():
            for tensor in graph.ops.inputs.row(row):
                if graph.tensors.roles[tensor] == t.TensorRole.PARAMETER and graph.maker[tensor] == NONE:
                    held[int(graph.root[tensor])] |= chunks
        for (block, instance), chunk in placement.instances.items():
            for bound in graph.blocks[block].instances[instance].bindings:
                owner, _, tensor = graph.locate_tensor(bound)
                parameter = graph.tensors.roles[tensor] == t.TensorRole.PARAMETER and graph.maker[tensor] == NONE
                if owner == 0 and parameter:
                    held[int(graph.root[tensor])].add(chunk)
        placement.holders = {tensor: frozenset(chunks) for tensor, chunks in held.items()}


class _Gradients:
    """Splits sums of gradients that cross chunks."""

    def __init__(self, graph: StepGraph, placement: Partition) -> None:
        self.graph, self.placement = graph, placement

    def share(self) -> None:
        """Fills `placement.shares`, and places the additions where both sides are."""
        graph, placement = self.graph, self.placement
        main = graph.blocks[0].tensors
        for gradient in (tensor for tensor in final_gradients(graph) if tensor in main):
            chunks = self._chunks(gradient)
            if len(chunks) > 1:
                for chunk in chunks:
                    placement.shares[chunk, gradient] = self._share(gradient, chunk)
            self._place(gradient)

    def _sum(self, tensor: int) -> tuple[int, int] | None:
        """What an addition of two gradients adds; None where the tensor is no such sum."""
        maker = int(self.graph.maker[tensor])
        if maker == NONE or self.graph.ops.phases[maker] != t.Phase.BACKWARD:
            return None
        inputs = self.graph.ops.inputs.row(maker)
        name = self.graph.strings[self.graph.ops.name[maker]]
        return (inputs[0], inputs[1]) if name == "aten.add" and len(inputs) == 2 else None

    def _chunks(self, tensor: int) -> Chunks:
        """The chunks that the terms of a sum are made on."""
        if added := self._sum(tensor):
            return self._chunks(added[0]) | self._chunks(added[1])
        source = self.graph.source(0, 0, tensor)
        return frozenset() if source is None else self.placement.of(source)

    def _share(self, tensor: int, chunk: int) -> int:
        """The tensor that holds a chunk's terms of a sum."""
        if added := self._sum(tensor):
            here = [side for side in added if chunk in self._chunks(side)]
            return tensor if len(here) == 2 else self._share(here[0], chunk)
        if self.graph.tensors.port[self.graph.root[tensor]]:
            name = self.graph.tensors[tensor].name
            raise PlanError(f"gradient {name} is summed over layers of several stages: use fewer stages")
        return tensor

    def _place(self, tensor: int) -> None:
        """An addition runs where both of its sides are; elsewhere one side, or none, is what there is of it."""
        if added := self._sum(tensor):
            both = self._chunks(added[0]) & self._chunks(added[1])
            for chunk in self._chunks(tensor) - both:
                self.placement.terms[chunk, tensor] = self._share(tensor, chunk)
            for side in added:
                self._place(side)
            self.placement.ops[int(self.graph.maker[tensor])] = both


_KEPT = (t.TensorRole.PARAMETER, t.TensorRole.GRADIENT, t.TensorRole.OPTIMIZER_STATE)


class OptimizerPlacer:
    """Places the optimizer's operations of the main block, once all others are placed.

    Args:
        graph: the step.
        placement: gets the operations, and what is common to all stages.
        stages: chunk k is on stage k modulo this.
    """

    def __init__(self, graph: StepGraph, placement: Partition, stages: int) -> None:
        self.graph, self.placement = graph, placement
        self.everywhere = frozenset(range(stages))
        self.parent: dict[int, int] = {}
        self.writes: dict[int, bool] = {}
        self.fixed: dict[int, set[Chunks]] = defaultdict(set)
        self.shares: dict[int, set[int]] = defaultdict(set)
        for chunk, gradient in placement.shares:
            self.shares[gradient].add(chunk)

    def place(self) -> None:
        """Fills `ops`, `stagewide`, `totals` and `flags` of the placement.

        Raises:
            PlanError: a value of several stages is neither the norm of all gradients nor their overflow flag.
        """
        graph, placement = self.graph, self.placement
        rows = [r for r in graph.blocks[0].ops if graph.ops.phases[r] == t.Phase.OPTIMIZER]
        flags = overflow_flags(graph)
        placement.flags = {row: graph.tensor_id(0, 0, graph.ops.outputs.row(row)[-1]) for row in flags}
        placement.flag_memory = {graph.owner(0, 0, graph.ops.outputs.row(row)[-1]) for row in flags}
        for row in rows:
            self._tie(row)
        for row in rows:
            if self.writes[row]:
                self.fixed[self._find(-1 - row)] |= self._read_from(row, outside=True)
        several = []
        for row in rows:
            places = self.fixed[self._find(-1 - row)] or self._read_from(row)
            if len(places) > 1:
                several.append(row)
            elif self.writes[row] and places:
                self.fixed[self._find(-1 - row)] = places
            if len(places) != 1:
                placement.stagewide.add(row)
            placement.ops[row] = next(iter(places)) if len(places) == 1 else self.everywhere
        self._check(several, rows)
        placement.totals = {row for row in total_norms(graph) if row in placement.stagewide}
        self._count_once(several, rows)
        self._check_layers()

    # -- where operations go -------------------------------------------------------------------------------

    def _tie(self, row: int) -> None:
        """Ties an operation that writes something kept to all such memory that it touches."""
        graph = self.graph
        made = {m for i in graph.ops.outputs.row(row) if (m := self._kept(i)) is not None}
        self.writes[row] = bool(made)
        if made:
            for memory in made | {m for i in graph.ops.inputs.row(row) if (m := self._kept(i)) is not None}:
                self.parent[self._find(memory)] = self._find(-1 - row)

    def _kept(self, tensor: int) -> int | None:
        """The memory behind a tensor if it belongs to a parameter; what is only read, as a buffer, does not."""
        root = int(self.graph.root[tensor])
        maker = int(self.graph.maker[root])
        made = maker != NONE and self.graph.ops.phases[maker] != t.Phase.OPTIMIZER
        return root if made or self.graph.tensors.roles[root] in _KEPT else None

    def _find(self, node: int) -> int:
        root = node
        while (up := self.parent.setdefault(root, root)) != root:
            root = up
        while (up := self.parent[node]) != root:
            self.parent[node], node = root, up
        return root

    def _read_from(self, row: int, *, outside: bool = False) -> set[Chunks]:
        """Where the values are that an operation reads; `outside`: but for those of the main block's optimizer."""
        graph, placement, found = self.graph, self.placement, set[Chunks]()
        for tensor in graph.ops.inputs.row(row):
            if self._is_flag(0, 0, tensor):
                continue
            source = graph.source(0, 0, tensor)
            if source is None:
                holders = placement.holders.get(int(graph.root[tensor]))
                found |= {holders} if holders else self._of_state(tensor) if not outside else set()
            elif source[0] == 0 and graph.ops.phases[source[2]] == t.Phase.OPTIMIZER:
                if not outside and source[2] not in placement.stagewide:
                    found.add(placement.ops[source[2]])
            else:
                shared = frozenset(self.shares[int(graph.origin[tensor])])
                found.add(shared or placement.of(source))
        return found

    def _of_state(self, tensor: int) -> set[Chunks]:
        kept = self._kept(tensor)
        return set() if kept is None else self.fixed[self._find(kept)]

    def _is_flag(self, block: int, instance: int, tensor: int) -> bool:
        memory = self.placement.flag_memory
        return bool(memory) and self.graph.owner(block, instance, tensor) in memory

    # -- what crosses stages -------------------------------------------------------------------------------

    def _check(self, several: list[int], rows: list[int]) -> None:
        """Only what ends in the norm of all gradients can be computed stage by stage."""
        graph = self.graph
        ends = set(total_norms(graph))
        readers = self._readers(rows)
        for row in reversed(rows):
            after = [reader for tensor in graph.ops.outputs.row(row) for reader in readers[tensor]]
            if after and ends.issuperset(after) and not self.writes[row]:
                ends.add(row)
        for row in several:
            if row not in ends:
                self._refuse(f"operation {row} ({graph.strings[graph.ops.name[row]]})")

    def _readers(self, rows: Iterable[int]) -> dict[int, list[int]]:
        readers: dict[int, list[int]] = defaultdict(list)
        for row in rows:
            for tensor in self.graph.ops.inputs.row(row):
                readers[int(self.graph.origin[tensor])].append(row)
        return readers

    def _count_once(self, several: list[int], rows: list[int]) -> None:
        """What is summed over the stages is made on one of the chunks that could."""
        readers, placement = self._readers(rows), self.placement
        for row in rows:
            after = [reader for tensor in self.graph.ops.outputs.row(row) for reader in readers[tensor]]
            held = len(placement.ops[row]) > 1 and row not in placement.stagewide
            if held and after and set(several).issuperset(after):
                placement.ops[row] = frozenset((min(placement.ops[row]),))

    def _check_layers(self) -> None:
        """A layer's optimizer may read what all stages have, but not what another layer's makes."""
        graph, placement = self.graph, self.placement
        for number, block in enumerate(graph.blocks[1:], 1):
            ports = {
                int(graph.root[tensor])
                for row in block.ops
                if graph.ops.phases[row] == t.Phase.OPTIMIZER
                for tensor in graph.ops.inputs.row(row)
                if graph.tensors.port[graph.root[tensor]]
            }
            for index in range(len(block.instances)):
                here = frozenset((placement.instances[number, index],))
                for port in ports:
                    source = graph.source(number, index, port)
                    if source is None or graph.ops.phases[source[2]] != t.Phase.OPTIMIZER:
                        continue
                    known = (source[0] == 0 and source[2] in placement.stagewide) or here <= placement.of(source)
                    if not known and not self._is_flag(number, index, port):
                        self._refuse(block.name)

    def _refuse(self, where: str) -> None:
        raise PlanError(
            f"the optimizer's part in {where} combines values of several pipeline stages, which can be done for "
            "the norm of all gradients and fp16 overflow only: use an optimizer that takes parameters one by one"
        )


class PipelinePhase(IntEnum):
    """The part of the step that an operation runs in: once a micro-batch, or once a step.

    `WEIGHT` is the end of backward, where a schedule runs it as a pass of its own; for all else it is backward.
    """

    FORWARD = 0
    BACKWARD = 1
    WEIGHT = 2
    UPDATE = 3


def pipeline_phase(graph: StepGraph, row: int) -> PipelinePhase:
    """The part of an operation; recomputation belongs to the backward pass."""
    return _parts_of(graph)[row]


@kept
def _parts_of(graph: StepGraph) -> list[PipelinePhase]:
    other = {int(t.Phase.FORWARD): PipelinePhase.FORWARD, int(t.Phase.OPTIMIZER): PipelinePhase.UPDATE}
    return [other.get(phase, PipelinePhase.BACKWARD) for phase in graph.ops.phases]


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """Tensor ids that each chunk receives, in the order of sending.

    Attributes:
        up: for every chunk, what it receives from the chunk before it in its forward pass.
        down: for every chunk, what it receives from the chunk after it in its backward pass.
    """

    up: tuple[tuple[int, ...], ...]
    down: tuple[tuple[int, ...], ...]


def route(graph: StepGraph, placement: Partition) -> Routes:
    """Finds what crosses.

    Raises:
        PlanError: a value would have to go against the direction of its pass, or a parameter is shared by layers
            of several chunks.
    """
    up: list[set[int]] = [set() for _ in range(placement.chunks)]
    down: list[set[int]] = [set() for _ in range(placement.chunks)]
    readers: dict[int, dict[int, PipelinePhase]] = defaultdict(dict)
    for tensor, chunk, part in _reads(graph, placement):
        readers[tensor][chunk] = min(part, readers[tensor].get(chunk, part))
    sources = _sources(graph)
    for tensor, parts in readers.items():
        if tensor not in sources:
            sources[tensor] = graph.source(*graph.locate_tensor(tensor))
        source = sources[tensor]
        homes = placement.of(source) if source is not None else _holder(graph, placement, tensor)
        for chunk, part in parts.items():
            if homes is None or chunk in homes:
                continue
            if source is not None and pipeline_phase(graph, source[2]) == PipelinePhase.UPDATE:
                continue  # stages agree on it when their passes are done (`placement.Optimizer`)
            _check_crosses(graph, tensor)
            assert source is not None
            made, home = pipeline_phase(graph, source[2]), min(homes, default=chunk)
            if made == PipelinePhase.FORWARD and home < chunk and part != PipelinePhase.UPDATE:
                for hop in range(home + 1, chunk + 1):
                    up[hop].add(tensor)
            elif made != PipelinePhase.UPDATE and home > chunk and part == PipelinePhase.BACKWARD:
                for hop in range(chunk, home):
                    down[hop].add(tensor)
            else:
                made_in, read_in = f"chunk {home}'s {made.name.lower()}", f"chunk {chunk}'s {part.name.lower()}"
                raise PlanError(
                    f"tensor {_name(graph, tensor)} of pipeline {made_in} is read in {read_in}, which no schedule "
                    "can do: give other layers or fewer stages"
                )
    return Routes(up=tuple(tuple(sorted(s)) for s in up), down=tuple(tuple(sorted(s)) for s in down))


def _reads(graph: StepGraph, placement: Partition) -> Iterator[tuple[int, int, PipelinePhase]]:
    """(tensor id, chunk, part) of what operations read: those of the main block, and ports of the others."""
    for row, chunks in placement.ops.items():
        for chunk in chunks:
            for tensor in graph.ops.inputs.row(row):
                term = placement.terms.get((chunk, tensor), tensor)
                yield graph.tensor_id(0, 0, term), chunk, pipeline_phase(graph, row)
    parts = _port_parts(graph)
    for (number, index), chunk in placement.instances.items():
        for part, bound in zip(parts[number], graph.blocks[number].instances[index].bindings, strict=True):
            yield bound, chunk, part


@kept
def _sources(graph: StepGraph) -> dict[int, tuple[int, int, int] | None]:
    """`Graph.source` by tensor id, of those that were asked for."""
    del graph
    return {}


@kept
def _port_parts(graph: StepGraph) -> list[list[PipelinePhase]]:
    """For every port of each block, the part in which it is read first; the forward pass where it is not."""
    found = []
    for block in graph.blocks:
        parts = _first_parts(graph, block.ops)
        ports = (i for i in block.tensors if graph.tensors.port[i])
        found.append([parts.get(port, PipelinePhase.FORWARD) for port in ports])
    return found


def _first_parts(graph: StepGraph, ops: range) -> dict[int, PipelinePhase]:
    """For every port that operations of a block read, the part in which it is read first."""
    parts: dict[int, PipelinePhase] = {}
    for row in ops:
        for tensor in graph.ops.inputs.row(row):
            origin = int(graph.origin[tensor])
            if graph.tensors.port[origin]:
                parts[origin] = min(pipeline_phase(graph, row), parts.get(origin, PipelinePhase.UPDATE))
    return parts


def _holder(graph: StepGraph, placement: Partition, tensor: int) -> frozenset[int] | None:
    """The chunk that has an input of the step, where it is a layer's own; None where all chunks have it."""
    block, instance, _ = graph.value(*graph.locate_tensor(tensor))
    return frozenset((placement.instances[block, instance],)) if block else None


def _check_crosses(graph: StepGraph, tensor: int) -> None:
    """Only what belongs to one micro-batch can be sent; an input of the step is everywhere."""
    _, _, row = graph.locate_tensor(tensor)
    if graph.tensors[row].role.persistent:
        raise PlanError(
            f"{graph.tensors[row].role.name.lower()} {_name(graph, tensor)} is used by layers of several pipeline "
            "stages: put them on one stage"
        )
    if graph.maker[graph.value(*graph.locate_tensor(tensor))[2]] == NONE:
        raise PlanError(
            f"input {_name(graph, tensor)} is held by a layer of another pipeline stage: fold differently"
        )


def _name(graph: StepGraph, tensor: int) -> str:
    block, instance, row = graph.locate_tensor(tensor)
    return graph.tensors[row].name.replace("{}", graph.blocks[block].instances[instance].label)


def parts(graph: StepGraph, routes: Routes, *, split: bool) -> list[PipelinePhase]:
    """The part of every operation of the table; `split` divides backward in two."""
    found = [pipeline_phase(graph, row) for row in range(len(graph.ops))]
    if split:
        needed = _InputGradients(graph).needed(routes)
        for row in range(len(found)):
            if graph.ops.phases[row] == t.Phase.BACKWARD and row not in needed:
                found[row] = PipelinePhase.WEIGHT
    return found


class _InputGradients:
    """Walks from what is sent to everything before it in the backward pass."""

    def __init__(self, graph: StepGraph) -> None:
        self.graph, self.views = graph, graph.ops.is_view
        self.readers: dict[int, list[int]] = defaultdict(list)
        inputs = graph.ops.inputs
        for tensor, row in zip(graph.root[inputs.values].tolist(), inputs.rows.tolist(), strict=True):
            self.readers[tensor].append(row)
        self.bound: dict[int, set[int]] = defaultdict(set)
        for block in graph.blocks:
            ports = [i for i in block.tensors if graph.tensors.port[i]]
            for instance in block.instances:
                for port, bound in zip(ports, instance.bindings, strict=True):
                    self.bound[port].add(bound)

    def needed(self, routes: Routes) -> set[int]:
        """Rows of the operations that something sent depends on, and of those that must stay beside them."""
        graph = self.graph
        left = [row for tensors in routes.down for tensor in tensors for row in self._makers(tensor)]
        # What makes nothing, as a wait does, is felt by what follows on its stream.
        silent = graph.ops.outputs.lengths == 0
        left += np.flatnonzero(silent | (graph.ops.phase == t.Phase.RECOMPUTE)).tolist()
        found: set[int] = set()
        while left:
            row = left.pop()
            if row not in found and pipeline_phase(graph, row) == PipelinePhase.BACKWARD:
                found.add(row)
                left += graph.ops.deps.row(row)
                left += [maker for tensor in graph.ops.inputs.row(row) for maker in self._of(tensor)]
                left += self._read_before(row)
        return found

    def _makers(self, tensor: int) -> list[int]:
        """The operation behind a tensor id."""
        source = self.graph.source(*self.graph.locate_tensor(tensor))
        return [] if source is None else [source[2]]

    def _of(self, tensor: int) -> list[int]:
        """The operations that make what a row of the tensor table is, in any instance."""
        origin = int(self.graph.origin[tensor])
        if self.graph.tensors.port[origin]:
            return [maker for bound in self.bound[origin] for maker in self._makers(bound)]
        maker = int(self.graph.maker[origin])
        return [] if maker == NONE else [maker]

    def _read_before(self, row: int) -> list[int]:
        """What reads memory that an operation then overwrites: it may not run after it."""
        graph, found = self.graph, list[int]()
        if self.views[row]:
            return found
        for tensor in graph.ops.outputs.row(row):
            if graph.tensors.alias_of[tensor] == NONE:
                continue
            root = int(graph.root[tensor])
            found += [reader for reader in self.readers[root] if reader < row]
            for bound in self.bound.get(root, ()):
                found += self.readers[int(graph.root[graph.locate_tensor(bound)[2]])]
        return found
