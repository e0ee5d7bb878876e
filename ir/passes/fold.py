"""Folds repeated modules into blocks: 96 layers become one block with 96 instances.

Candidates are modules under a numbered path component (`encoder.layer.3`). The operations of each candidate are
written down with their tensors numbered in order of appearance; candidates with the same writing are the same
block. What is the same is therefore proven op by op, not assumed from names, and `unfold` gives the graph back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from echograph.ir.builder import GraphBuilder
from echograph.ir.columns import NONE, Int64
from echograph.ir.graph import StepGraph
from echograph.ir.passes.rewrite import empty_copy
from echograph.ir.types import Tensor, TensorRole

LABEL = "{}"


@dataclass(slots=True, kw_only=True)
class _Candidate:
    """Operations under one numbered module, and the tensors they touch in order of appearance."""

    prefix: str
    label: str
    ops: list[int] = field(default_factory=list)
    tensors: list[int] = field(default_factory=list)
    ports: set[int] = field(default_factory=set)
    op_ports: list[int] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class _Part:
    """A block to be: instances that read alike. The main block is a part with one instance."""

    name: str
    instances: list[_Candidate]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """The same step with each repeated module as a block and its instances."""

    name: ClassVar[str] = "fold"

    def __call__(self, graph: StepGraph) -> StepGraph:
        """A graph for which `unfold` gives an equal of the input, an unfolded step (one block, run once).

        It is the input itself if nothing repeats or a name has a `{}` of its own.
        """
        if len(graph.blocks) > 1 or any(LABEL in text for text in graph.strings):
            return graph
        writer = _Writer(graph)
        owner = np.full(len(graph.ops), NONE, np.int64)
        parts: list[_Part] = []
        for depth in range(writer.depth):
            for alike in writer.alike(owner, depth):
                owner_id = sum(len(p.instances) for p in parts)
                for offset, candidate in enumerate(alike):
                    owner[candidate.ops] = owner_id + offset
                parts.append(_Part(name=alike[0].prefix or "layers", instances=alike))
        if not parts:
            return graph
        rest = _Candidate(prefix="", label="", ops=np.flatnonzero(owner == NONE).tolist())
        writer.write(rest, main=True)
        return _emit(graph, [_Part(name="main", instances=[rest]), *parts], owner)


class _Writer:
    """Writes candidates down so that equal ones have equal writings."""

    def __init__(self, graph: StepGraph) -> None:
        self.graph = graph
        ops = graph.ops
        self.modules = [graph.strings[i] for i in ops.module]
        self.numbered = {m: _numbered(m) for m in set(self.modules)}
        self.depth = max((len(n) for n in self.numbered.values()), default=0)
        self.columns = list(zip(*(getattr(ops, name).tolist() for name in _COMPARED), strict=True))
        self.readers = _readers(graph)
        self.taken: set[int] = set()
        self.linked = _linked(graph)

    def alike(self, owner: Int64, depth: int) -> Iterator[list[_Candidate]]:
        """Candidates at one depth of numbering that read the same, two or more at a time, in program order."""
        found: dict[tuple[str, str], _Candidate] = {}
        for row in np.flatnonzero(owner == NONE).tolist():
            numbered = self.numbered[self.modules[row]]
            if len(numbered) > depth:
                key = numbered[depth]
                found.setdefault(key, _Candidate(prefix=key[0], label=key[1])).ops.append(row)
        same: dict[Hashable, list[_Candidate]] = defaultdict(list)
        for candidate in found.values():
            if self.closed(candidate):
                same[(candidate.prefix, self.write(candidate))].append(candidate)
        for group in same.values():
            if len(group) > 1:
                self.taken.update(i for c in group for i in c.tensors if i not in c.ports)
                yield group

    def closed(self, candidate: _Candidate) -> bool:
        """Whether no explicit dependency crosses its border: a block cannot say such a one."""
        own = set(candidate.ops)
        return all(own.issuperset(self.linked.get(row, ())) for row in candidate.ops)

    def write(self, candidate: _Candidate, *, main: bool = False) -> Hashable:
        """Numbers the candidate's tensors and returns its writing."""
        own = set(candidate.ops)
        numbers: dict[int, int] = {}
        local = {row: at for at, row in enumerate(candidate.ops)}
        lines: list[Hashable] = []
        for row in candidate.ops:
            reads, makes = self.graph.ops.inputs.row(row), self.graph.ops.outputs.row(row)
            for tensor in (*reads, *makes):
                if tensor not in numbers:
                    self._admit(candidate, numbers, tensor, own, main)
            names = tuple(numbers[i] for i in reads), tuple(numbers[i] for i in makes)
            deps = tuple(local.get(d, -1) for d in self.graph.ops.deps.row(row))
            forward = self._forward(candidate, row, local)
            module = _relabel(self.modules[row], candidate)
            lines.append((self.columns[row], names, deps, forward, module, self.graph.ops.durations_of(row)))
        if main:
            self._admit_rest(candidate, numbers)
        return tuple(lines), tuple(self._tensor(candidate, i, numbers) for i in candidate.tensors)

    def _admit(
        self, candidate: _Candidate, numbers: dict[int, int], tensor: int, own: set[int], main: bool
    ) -> None:
        maker = int(self.graph.maker[tensor])
        if maker != NONE:
            mine = maker in own
        elif main:
            mine = tensor not in self.taken
        else:  # an input is the step's own, so that the first layer reads like the others
            mine = self.graph.tensors.roles[tensor] != TensorRole.INPUT and own.issuperset(self.readers[tensor])
        alias = int(self.graph.tensors.alias_of[tensor])
        if mine and alias != NONE and alias not in numbers:
            self._admit(candidate, numbers, alias, own, main)
        if not mine:
            candidate.ports.add(tensor)
        numbers[tensor] = len(candidate.tensors)
        candidate.tensors.append(tensor)

    def _admit_rest(self, candidate: _Candidate, numbers: dict[int, int]) -> None:
        """The main block also holds what no operation makes and no other block holds."""
        for tensor in np.flatnonzero(self.graph.maker == NONE).tolist():
            if tensor not in numbers and tensor not in self.taken:
                self._admit(candidate, numbers, tensor, set(), True)

    def _forward(self, candidate: _Candidate, row: int, local: dict[int, int]) -> int:
        forward = int(self.graph.ops.forward_op[row])
        if forward == NONE or forward in local:
            return local.get(forward, NONE)
        if forward not in candidate.op_ports:
            candidate.op_ports.append(forward)
        return -2 - candidate.op_ports.index(forward)

    def _tensor(self, candidate: _Candidate, index: int, numbers: dict[int, int]) -> Hashable:
        tensor = self.graph.tensors[index]
        port = index in candidate.ports
        alias = None if port or tensor.alias_of is None else numbers[tensor.alias_of]
        return (
            tensor.shape,
            tensor.dtype,
            _role(tensor, port),
            port,
            alias,
            "" if port else _relabel(tensor.name, candidate),
            tensor.sharded,
        )


_COMPARED = (
    "kind", "name", "phase", "stream", "flops", "bytes_read", "bytes_written", "attributes", "variant", "dtype",
    "payload", "asynchronous", "group", "peer", "tag", "nbytes",
)  # fmt: skip


def _role(tensor: Tensor, port: bool) -> TensorRole:
    """A layer does not know whether what it reads is the step's input or another layer's output."""
    return TensorRole.ACTIVATION if port and not tensor.role.persistent else tensor.role


def _readers(graph: StepGraph) -> dict[int, list[int]]:
    """For each tensor that no operation makes, the operations that touch it or an alias of it."""
    readers: dict[int, list[int]] = defaultdict(list)
    alias = graph.tensors.alias_of.tolist()
    for ragged in (graph.ops.inputs, graph.ops.outputs):
        for tensor, row in zip(ragged.values.tolist(), ragged.rows.tolist(), strict=True):
            while tensor != NONE:
                if graph.maker[tensor] == NONE:
                    readers[tensor].append(row)
                tensor = alias[tensor]
    return readers


def _linked(graph: StepGraph) -> dict[int, list[int]]:
    """For each operation with explicit dependencies, those at the other end."""
    linked: dict[int, list[int]] = defaultdict(list)
    for before, after in zip(graph.ops.deps.values.tolist(), graph.ops.deps.rows.tolist(), strict=True):
        linked[before].append(after)
        linked[after].append(before)
    return linked


def _numbered(module: str) -> tuple[tuple[str, str], ...]:
    parts = module.split(".")
    return tuple((".".join(parts[:i]), p) for i, p in enumerate(parts) if p.isdigit())


def _relabel(text: str, candidate: _Candidate) -> str:
    if not candidate.label:
        return text
    own = f"{candidate.prefix}.{candidate.label}" if candidate.prefix else candidate.label
    if text == own or text.startswith(own + "."):
        stem = f"{candidate.prefix}.{LABEL}" if candidate.prefix else LABEL
        return stem + text[len(own) :]
    return text


def _emit(graph: StepGraph, parts: list[_Part], owner: Int64) -> StepGraph:
    builder = empty_copy(graph)
    tensor_ids, op_ids = _identify(parts)
    first_op = []
    for number, part in enumerate(parts):
        if number:
            builder.begin_block(part.name)
        first_op.append(builder.op_count())
        _emit_block(graph, builder, part.instances)
    for number, part in enumerate(parts):
        for c in part.instances:
            builder.instance(
                number,
                c.label,
                bindings=[tensor_ids[i] for i in c.tensors if i in c.ports],
                op_bindings=[op_ids[i] for i in c.op_ports],
            )
    builder.program(_calls(parts, owner, first_op))
    return builder.build(StepGraph)


def _identify(parts: list[_Part]) -> tuple[dict[int, int], dict[int, int]]:
    """Tensor and operation ids of the new graph for the rows of the old one."""
    tensors: dict[int, int] = {}
    ops: dict[int, int] = {}
    for part in parts:
        for candidate in part.instances:
            own = [t for t in candidate.tensors if t not in candidate.ports]
            tensors |= {tensor: at for at, tensor in enumerate(own, len(tensors))}
            ops |= {op: at for at, op in enumerate(candidate.ops, len(ops))}
    return tensors, ops


def _emit_block(graph: StepGraph, builder: GraphBuilder, instances: Sequence[_Candidate]) -> None:
    c = instances[0]
    numbers: dict[int, int] = {}
    for index in c.tensors:
        tensor, port = graph.tensors[index], index in c.ports
        numbers[index] = builder.tensor(
            _relabel(tensor.name, c),
            tensor.shape,
            tensor.dtype,
            _role(tensor, port),
            alias_of=None if port or tensor.alias_of is None else numbers[tensor.alias_of],
            port=port,
            sharded=tensor.sharded,
        )
    first = builder.op_count()
    local = {row: first + at for at, row in enumerate(c.ops)}
    for at, row in enumerate(c.ops):
        op = graph.ops[row]
        changes: dict[str, object] = {
            "inputs": [numbers[i] for i in op.inputs],
            "outputs": [numbers[i] for i in op.outputs],
            "deps": [local[d] for d in op.deps],
            "module": _relabel(op.module, c),
        }
        forward = getattr(op, "forward_op", None)
        if forward is not None:
            changes["forward_op"] = local[forward] if forward in local else -2 - c.op_ports.index(forward)
        if len({int(graph.ops.arguments[other.ops[at]]) for other in instances}) > 1:
            changes["arguments"] = ""  # the work is the same, what it is given is not: nothing is said of it
        builder.add(op, **changes)


def _calls(parts: list[_Part], owner: Int64, first_op: list[int]) -> list[tuple[int, int, int, int, int]]:
    whose = [
        (number, instance) for number, part in enumerate(parts[1:], 1) for instance in range(len(part.instances))
    ]
    begin_of_run = np.flatnonzero(np.diff(owner, prepend=-2))
    ends = [*begin_of_run[1:].tolist(), len(owner)]
    done: dict[tuple[int, int], int] = defaultdict(int)
    calls = []
    for start, end in zip(begin_of_run.tolist(), ends, strict=True):
        key = (0, 0) if owner[start] == NONE else whose[int(owner[start])]
        begin = first_op[key[0]] + done[key]
        calls.append((key[0], begin, begin + end - start, key[1], 0))
        done[key] += end - start
    return calls
