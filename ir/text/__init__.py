"""A graph as text that people read and that says everything the file says.

    echograph 1.0 step tiny producer=echograph
    workload parameters=16 batch_size=8 sequence_length=0 dtype=bf16
    stream compute
    block 0 main {
      instance 0
      %0: bf16[8,4] input x
      %1: bf16[4,4] parameter w
      @0 %2: bf16[8,4] activation y = aten.mm(%0, %1) forward flops=256 read=96 written=64
    }
    program {
      call 0 @0:@1 instance=0 micro_batch=0
    }

Sigils: `%` a row of the tensor table, `@` a row of the operation table, `$` a tensor id, `&` an operation id, `#`
a stream or group by number (only where its name is not unique), `^` a position in an instance's `op_bindings`. A
word is letters, digits and `_ . { }`; any other string stands as a JSON string. A field with its default value is
left out. A tensor that an operation makes is declared where it is made, any other at the head of its block.
`4..9` includes both ends; `@4:@9` stops before operation 9.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from echograph.ir import types as t
from echograph.ir.columns import NONE, TENSOR_COLUMNS, Column, Holds
from echograph.ir.files import write_whole
from echograph.ir.formats import Exported
from echograph.ir.graph import Block, Graph, Group, Instance, JobGraph, Program

_WORD = re.compile(r"[A-Za-z0-9_.{}]+")

_OPTIONS = [
    (field.name, TENSOR_COLUMNS[field.name], field.default)
    for field in fields(t.Tensor)
    if field.name in TENSOR_COLUMNS and TENSOR_COLUMNS[field.name].text
]
"""Fields of a tensor that stand after their keyword, and what they are where they are left out."""


def to_text(graph: Graph, *, tables: bool = False) -> Iterator[str]:
    """The graph's text, line by line, each with its line end. `parser` reads it back.

    Two graphs that differ in anything but the order of their string and attribute tables differ in their text.

    Args:
        graph: any graph.
        tables: whether it says that order, too; a graph read back then has the same file, byte for byte.

    Yields:
        Lines; their number grows with the folded graph, not with the step.
    """
    printer = _Printer(graph, tables)
    for line in printer.lines():
        yield line + "\n"


class _Printer:
    def __init__(self, graph: Graph, tables: bool) -> None:
        self.graph, self.tables = graph, tables
        self.streams = _names(graph.streams)
        self.groups = _names([g.name for g in graph.groups])

    def lines(self) -> Iterator[str]:
        yield from self._header()
        for number, block in enumerate(self.graph.blocks):
            yield f"block {number} {_word(block.name)} {{"
            yield from (f"  {line}" for line in self._block(block))
            yield "}"
        for program in self.graph.programs:
            yield _program(program)
            yield from (f"  {line}" for line in _calls(program))
            yield "}"

    def _header(self) -> Iterator[str]:
        graph, w = self.graph, self.graph.workload
        level = "job" if isinstance(graph, JobGraph) else "step"
        version = "{}.{}".format(*graph.format)
        yield f"echograph {version} {level} {_word(graph.name)} producer={_word(graph.producer)}"
        yield _join(
            "workload",
            f"model={_word(w.model)}" if w.model else "",
            f"parameters={w.parameters} batch_size={w.batch_size} sequence_length={w.sequence_length}",
            f"dtype={w.dtype.text}",
            f"optimizer={_word(w.optimizer)}" if w.optimizer else "",
            "master_weights" if w.master_weights else "",
            f"model_flops={w.model_flops}" if w.model_flops else "",
            f"causal_attention_flops={w.causal_attention_flops}" if w.causal_attention_flops else "",
            f"stack={_word(w.stack)}" if w.stack else "",
        )
        if graph.mesh:
            yield _join("mesh", *(f"{_word(a.name)}={a.size}" for a in graph.mesh))
        yield from (_group(group) for group in graph.groups)
        yield from (f"stream {_word(name)}" for name in graph.streams)
        yield from (f"pass {_word(said)}" for said in graph.passes)
        if self.tables:
            yield _join("strings", *map(_word, graph.strings))
            yield _join("attributes", *map(_attributes, graph.ops.attribute_values))
        if graph.unknown:
            yield f"unknown {graph.unknown.hex()}"

    def _block(self, block: Block) -> Iterator[str]:
        yield from (_instance(number, instance) for number, instance in enumerate(block.instances))
        for index in block.tensors:
            if self.graph.maker[index] == NONE:
                yield self._tensor(index)
        for index in block.ops:
            yield self._op(self.graph.ops[index])

    def _tensor(self, index: int) -> str:
        tensor = self.graph.tensors[index]
        extents = ",".join(map(str, tensor.shape))
        return _join(
            f"%{index}:",
            "port" if tensor.port else "",
            f"{tensor.dtype.text}[{extents}] {tensor.role.name.lower()}",
            _word(tensor.name) if tensor.name else "",
            *(
                f"{column.text}={_value(column, value)}"
                for name, column, default in _OPTIONS
                if (value := getattr(tensor, name)) != default
            ),
        )

    def _op(self, op: t.Op) -> str:
        makes = ", ".join(self._tensor(i) for i in op.outputs)
        reads = ", ".join(f"%{i}" for i in op.inputs)
        kind, own = self._own(op)
        return _join(
            f"@{op.id}",
            f"{makes} =" if makes else "",
            kind,
            f"{_word(op.name)}({reads}) {op.phase.name.lower()}",
            f"module={_word(op.module)}" if op.module else "",
            f"stream={self.streams[op.stream]}" if op.stream else "",
            own,
            f"after({', '.join(f'@{d}' for d in op.deps)})" if op.deps else "",
            *map(_duration, op.durations),
        )

    def _own(self, op: t.Op) -> tuple[str, str]:
        """The keyword before the operator ("" for a compute operation), and the fields of its kind."""
        match op:
            case t.Compute():
                return "", _compute(op)
            case t.Collective():
                issue = "async" if op.asynchronous else ""
                own = _join(f"bytes_per_rank={op.bytes_per_rank}", f"dtype={op.dtype.text}", _payload(op), issue)
                return op.collective.name.lower(), f"group={self.groups[op.group]} {own}"
            case t.Send() | t.Recv():
                where = f"group={self.groups[op.group]} peer={op.peer:+d} tag={op.tag}"
                return type(op).__name__.lower(), f"{where} bytes={op.nbytes} {_payload(op)}"
            case t.Copy():
                return "copy", f"{op.direction.name.lower()} bytes={op.nbytes}"
            case t.Host():
                return "host", ""


def _payload(op: t.Collective | t.Send | t.Recv) -> str:
    return f"payload={op.payload.name.lower()}"


def _compute(op: t.Compute) -> str:
    forward = ""
    if op.forward_op is not None:
        forward = f"forward=@{op.forward_op}" if op.forward_op >= 0 else f"forward=^{-2 - op.forward_op}"
    work = {"flops": op.flops, "read": op.bytes_read, "written": op.bytes_written}
    return _join(
        forward,
        *(f"{key}={value}" for key, value in work.items() if value),
        _attributes(op.attributes) if op.attributes is not None else "",
        f"arguments={json.dumps(op.arguments)}" if op.arguments else "",
    )


def _attributes(value: t.Attributes) -> str:
    match value:
        case t.Gemm(transpose_a=a, transpose_b=b, block=block, tf32=tf32):
            scaled = f"block={block}" if block else ""
            return f"gemm({_join('transpose_a' * a, 'transpose_b' * b, scaled, 'tf32' * tf32)})"
        case t.Attention():
            sizes = f"heads={value.heads} kv_heads={value.kv_heads} head_dim={value.head_dim}"
            dropout = f"dropout={value.dropout!r}" if value.dropout else ""
            causal, deterministic = "causal" * value.causal, "deterministic" * value.deterministic
            return f"attention({_join(sizes, causal, dropout, deterministic)})"
        case t.Convolution():
            windows = ((k, getattr(value, k)) for k in ("stride", "padding", "dilation"))
            sizes = " ".join(f"{k}=[{','.join(map(str, v))}]" for k, v in windows)
            flags = "transposed" * value.transposed, "ieee" * value.ieee
            return f"convolution({_join(sizes, f'groups={value.groups}', *flags)})"
        case t.MultiTensor():
            return f"multi_tensor(parts={value.parts}{' leads' if value.leads else ''})"


def _duration(d: t.Duration) -> str:
    samples = f"samples={d.samples}" if d.samples else ""
    spread = f"spread={np.float32(d.spread)!s}" if d.spread else ""
    return f"time({_join(_word(d.device), f'{d.picoseconds}ps', d.source.name.lower(), samples, spread)})"


def _group(group: Group) -> str:
    axes = f"axes=({', '.join(map(_word, group.axes))})" if group.axes else ""
    positions = f"positions=({_runs(group.positions)})" if group.positions else ""
    ranks = f"ranks=({_runs(group.ranks)})" if group.ranks else ""
    return _join("group", _word(group.name), axes, positions, ranks)


def _instance(number: int, instance: Instance) -> str:
    return _join(
        f"instance {number}",
        f"label={_word(instance.label)}" if instance.label else "",
        f"bind({_runs(instance.bindings, '$')})" if instance.bindings else "",
        f"forward({_runs(instance.op_bindings, '&')})" if instance.op_bindings else "",
    )


def _program(program: Program) -> str:
    place = ", ".join(f"{_word(axis)}={value}" for axis, value in program.coordinates.items())
    held = ", ".join(f"{_word(by)}={nbytes}" for by, nbytes in program.held.items())
    return _join(
        "program",
        f"role={_word(program.role)}" if program.role else "",
        f"at({place})" if place else "",
        f"ranks=({_runs(program.ranks)})" if program.ranks else "",
        f"held({held})" if held else "",
        "{",
    )


def _calls(program: Program) -> Iterator[str]:
    """One line for each run of calls that differ by a constant step of -1, 0 or 1 in instance and micro-batch."""
    calls: list[list[int]] = program.calls.tolist()
    at = 0
    while at < len(calls):
        end = _end_of_run(calls, at)
        block, low, high, *first = calls[at]
        instance, micro_batch = map(_span, first, calls[end - 1][3:])
        yield f"call {block} @{low}:@{high} instance={instance} micro_batch={micro_batch}"
        at = end


def _end_of_run(calls: Sequence[Sequence[int]], start: int) -> int:
    end, steps = start + 1, None
    while end < len(calls) and calls[end][:3] == calls[start][:3]:
        step = calls[end][3] - calls[end - 1][3], calls[end][4] - calls[end - 1][4]
        if max(map(abs, step)) != 1 or step != (steps or step):
            break
        end, steps = end + 1, step
    return end


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}..{last}"


def _runs(values: Iterable[int], sigil: str = "") -> str:
    """Numbers in their order, with each run of three or more that ascend by one as `first..last`."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ", ".join(
        f"{sigil}{low}..{high}" if high > low + 1 else ", ".join(f"{sigil}{i}" for i in range(low, high + 1))
        for low, high in runs
    )


def _names(names: Sequence[str]) -> list[str]:
    """How operations refer to entries of a table: by name, or by number where a name is not unique or empty."""
    uses = Counter(names)
    return [_word(n) if n and uses[n] == 1 else f"#{i}" for i, n in enumerate(names)]


def _word(text: str) -> str:
    return text if _WORD.fullmatch(text) else json.dumps(text)


def _value(column: Column, value: Any) -> str:
    """A field of a tensor after its keyword."""
    if column.ragged:
        return ",".join(map(_word if column.holds == Holds.STRING else str, value))
    return f"%{value}" if column.holds == Holds.TENSOR else str(int(value))


def _join(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def export_text(graph: Graph, output: Path) -> Exported:
    """Writes a graph as text, its tables' order included.

    Raises:
        OutputError: the path cannot be written.
    """
    return Exported(files=1, bytes=write_whole(output, to_text(graph, tables=True)))
