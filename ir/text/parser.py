"""The text form read back: what `text.to_text` prints, line by line.

Each function reads one part of a line, in the order in which `text` prints it, and refuses anything else.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from itertools import repeat
from math import inf
from typing import Any, NoReturn, TypeVar

import numpy as np

from echograph.errors import FormatError
from echograph.ir import types as t
from echograph.ir.columns import TENSOR_COLUMNS, Column, Holds
from echograph.ir.graph import FORMAT_MAJOR, Axis, Group, Instance, JobGraph, Program, StepGraph, Workload
from echograph.ir.text.records import MIN_NUMBER, BlockRows, GraphHead, assemble

MAX_SPAN = 2**22
"""Numbers that the spans of a file (`0..9`) may stand for together, so that a short file stays a small graph."""

_BYTES = re.compile("(?:[0-9a-f]{2})+")
_KINDS = {name.lower() for name in t.CollectiveKind.__members__} | {"send", "recv", "copy", "host"}


def from_text(text: str) -> StepGraph | JobGraph:
    """The graph that `to_text` printed, its tables in the order in which their entries appear if it says none.

    Raises:
        FormatError: it is no such text; says in which line, and what is wrong there.
    """
    return _Parser(text).graph()


class _Parser:
    def __init__(self, text: str) -> None:
        lines = ((number, line.strip()) for number, line in enumerate(text.split("\n"), start=1))
        self.lines: Iterator[Line] = (Line(number, line) for number, line in lines if line)
        self.left = MAX_SPAN
        self.streams: dict[str, int] = {}
        self.groups: dict[str, int] = {}

    def graph(self) -> StepGraph | JobGraph:
        head, line = self._head()
        self.streams, self.groups = _numbers(head.streams), _numbers([g.name for g in head.groups])
        blocks: list[BlockRows] = []
        while line is not None and line.has("block "):
            if line.integer() != len(blocks):
                line.fail(f"block {len(blocks)}")
            line.take(" ")
            blocks.append(self._block(line))
            line = next(self.lines, None)
        programs: list[Program] = []
        while line is not None:
            line.take("program")
            programs.append(self._program(line))
            line = next(self.lines, None)
        return assemble(head, blocks, programs)

    # -- the head ----------------------------------------------------------------------------------------

    def _head(self) -> tuple[GraphHead, Line | None]:
        line = next(self.lines, None) or Line(1, "")
        line.take("echograph ")
        if not 1 <= line.integer() <= FORMAT_MAJOR:
            line.fail(f"format {FORMAT_MAJOR}.x or older")
        line.take(".")
        line.integer()
        level = JobGraph if line.has(" job ") else StepGraph
        if level is StepGraph:
            line.take(" step ")
        said: dict[str, Any] = {"level": level, "name": line.word(), "groups": [], "streams": [], "passes": []}
        line.take(" producer=")
        said["producer"] = line.word()
        line.end()
        after = None
        for line in self.lines:
            if not self._said(line, said):
                after = line
                break
            line.end()
        return GraphHead(**said | {key: tuple(said[key]) for key in ("groups", "streams", "passes")}), after

    def _said(self, line: Line, said: dict[str, Any]) -> bool:
        """Takes what a line of the head says; False where the head has ended."""
        if line.has("workload"):
            said["workload"] = _workload(line)
        elif line.has("mesh"):
            said["mesh"] = line.words(lambda: _axis(line))
        elif line.has("group "):
            said["groups"].append(self._group(line))
        elif line.has("stream "):
            said["streams"].append(line.word())
        elif line.has("pass "):
            said["passes"].append(line.word())
        elif line.has("strings"):
            said["strings"] = line.words(line.word)
        elif line.has("attributes"):
            said["attributes"] = line.words(lambda: _attributes(line) or line.fail("attributes"))
        elif line.has("unknown "):
            said["unknown"] = bytes.fromhex(line.match(_BYTES, "hexadecimal digits"))
        else:
            return False
        return True

    def _group(self, line: Line) -> Group:
        name = line.word()
        axes = line.options("axes=(", lambda: line.listed(line.word))
        positions = line.options("positions=(", lambda: self._runs(line))
        ranks = line.options("ranks=(", lambda: self._runs(line))
        return Group(name=name, axes=axes, ranks=ranks, positions=positions)

    # -- blocks ------------------------------------------------------------------------------------------

    def _block(self, line: Line) -> BlockRows:
        name = line.word()
        line.take(" {")
        line.end()
        instances: list[Instance] = []
        tensors: dict[int, t.Tensor] = {}
        ops: list[t.Op] = []
        while not (line := self._next("a block")).has("}"):
            if line.has("instance "):
                instances.append(self._instance(line, len(instances)))
            elif line.has("@"):
                ops.append(self._op(line, tensors))
            else:
                _tensor(line, tensors)
            line.end()
        line.end()
        rows = tuple(tensors[number] for number in sorted(tensors))
        return BlockRows(name=name, instances=tuple(instances), tensors=rows, ops=tuple(ops))

    def _next(self, what: str) -> Line:
        line = next(self.lines, None)
        if line is None:
            raise FormatError(f"the text ends inside {what}")
        return line

    def _instance(self, line: Line, number: int) -> Instance:
        if line.integer() != number:
            line.fail(f"instance {number}")
        return Instance(
            label=line.option("label=", line.word, ""),
            bindings=line.options("bind(", lambda: self._runs(line, "$")),
            op_bindings=line.options("forward(", lambda: self._runs(line, "&")),
        )

    def _op(self, line: Line, tensors: dict[int, t.Tensor]) -> t.Op:
        common: dict[str, Any] = {"id": line.integer()}
        if line.text.startswith(" %", line.at):
            line.take(" ")
            common["outputs"] = line.listed(lambda: _tensor(line, tensors), " =")
        line.take(" ")
        name = line.word()
        kind = name if name in _KINDS and line.has(" ") else ""
        common["name"] = line.word() if kind else name
        line.take("(")
        common["inputs"] = line.listed(lambda: line.row("%"))
        line.take(" ")
        common["phase"] = line.member(t.Phase)
        common["module"] = line.option("module=", line.word, "")
        common["stream"] = line.option("stream=", lambda: _named(line, self.streams, "a stream"), 0)
        made, own = self._own(line, kind)
        common["deps"] = line.options("after(", lambda: line.listed(lambda: line.row("@")))
        durations = []
        while line.has(" time("):
            durations.append(_duration(line))
        return made(**common, durations=tuple(durations), **own)

    def _own(self, line: Line, kind: str) -> tuple[Callable[..., t.Op], dict[str, Any]]:
        """The type of an operation, and the fields that are its own."""
        if kind == "host":
            return t.Host, {}
        if not kind:
            return t.Compute, _compute(line)
        line.take(" ")
        if kind == "copy":
            direction = line.member(t.CopyDirection)
            line.take(" bytes=")
            return t.Copy, {"direction": direction, "nbytes": line.integer()}
        line.take("group=")
        own: dict[str, Any] = {"group": _named(line, self.groups, "a group")}
        if kind in ("send", "recv"):
            for key, name in (("peer", "peer"), ("tag", "tag"), ("bytes", "nbytes")):
                line.take(f" {key}=")
                own[name] = line.integer()
            line.take(" payload=")
            return (t.Send if kind == "send" else t.Recv), own | {"payload": line.member(t.Payload)}
        line.take(" bytes_per_rank=")
        own |= {"collective": t.CollectiveKind[kind.upper()], "bytes_per_rank": line.integer()}
        line.take(" dtype=")
        own["dtype"] = line.member(t.DType)
        line.take(" payload=")
        return t.Collective, own | {"payload": line.member(t.Payload), "asynchronous": line.has(" async")}

    # -- programs ----------------------------------------------------------------------------------------

    def _program(self, line: Line) -> Program:
        role = line.option("role=", line.word, "")
        coordinates = line.options("at(", lambda: line.listed(lambda: _axis(line)))
        ranks = line.options("ranks=(", lambda: self._runs(line))
        held = line.options("held(", lambda: line.listed(lambda: _axis(line)))
        line.take(" {")
        line.end()
        calls: list[Sequence[int]] = []
        while not (line := self._next("a program")).has("}"):
            calls.extend(self._calls(line))
            line.end()
        line.end()
        try:
            columns = np.array(calls, np.int64).reshape(-1, 5)
        except OverflowError:
            raise FormatError(f"line {line.number}: a number of the program before is beyond 64 bits") from None
        places = {axis.name: axis.size for axis in coordinates}
        holds = {entry.name: entry.size for entry in held}
        return Program(calls=columns, role=role, coordinates=places, ranks=ranks, held=holds)

    def _calls(self, line: Line) -> Iterator[tuple[int, ...]]:
        line.take("call ")
        block = line.integer()
        line.take(" ")
        begin = line.row("@")
        line.take(":")
        end = line.row("@")
        line.take(" instance=")
        instances = self._span(line)
        line.take(" micro_batch=")
        micro_batches = self._span(line)
        count = max(len(instances), len(micro_batches))
        if {len(instances), len(micro_batches)} - {1, count}:
            line.fail("spans of one length")
        columns = (span if len(span) == count else repeat(span[0], count) for span in (instances, micro_batches))
        return zip(repeat(block, count), repeat(begin), repeat(end), *columns, strict=False)

    # -- numbers -----------------------------------------------------------------------------------------

    def _span(self, line: Line, sigil: str = "") -> range:
        """`4..9`, both ends included, `9..4`, or a number alone."""
        first = line.row(sigil)
        last = line.integer() if line.has("..") else first
        self.left -= abs(last - first) + 1
        if self.left < 0:
            raise FormatError(f"line {line.number}: the text stands for over {MAX_SPAN:,} calls and bindings")
        return range(first, last + 1) if last >= first else range(first, last - 1, -1)

    def _runs(self, line: Line, sigil: str = "") -> tuple[int, ...]:
        return tuple(number for span in line.listed(lambda: self._span(line, sigil)) for number in span)


def _numbers(names: Sequence[str]) -> dict[str, int]:
    """What operations may call the entries of a table, and their numbers."""
    uses = Counter(names)
    return {name: number for number, name in enumerate(names) if uses[name] == 1 and name}


def _named(line: Line, table: dict[str, int], what: str) -> int:
    if line.has("#"):
        return line.integer()
    start, word = line.at, line.word()
    if word not in table:
        line.at = start
        line.fail(f"{what} that the text declares")
    return table[word]


def _axis(line: Line) -> Axis:
    name = line.word()
    line.take("=")
    return Axis(name=name, size=line.integer())


def _workload(line: Line) -> Workload:
    model = line.option("model=", line.word, "")
    sizes = {}
    for key in ("parameters", "batch_size", "sequence_length"):
        line.take(f" {key}=")
        sizes[key] = line.integer()
    line.take(" dtype=")
    dtype = line.member(t.DType)
    optimizer = line.option("optimizer=", line.word, "")
    master_weights = line.has(" master_weights")
    for key in ("model_flops", "causal_attention_flops"):
        sizes[key] = line.option(f"{key}=", line.integer, 0)
    stack = line.option("stack=", line.word, "")
    return Workload(
        model=model, dtype=dtype, optimizer=optimizer, master_weights=master_weights, stack=stack,
        parameters=sizes["parameters"], batch_size=sizes["batch_size"], sequence_length=sizes["sequence_length"],
        model_flops=sizes["model_flops"], causal_attention_flops=sizes["causal_attention_flops"],
    )  # fmt: skip


_OPTIONS = {name: column for name, column in TENSOR_COLUMNS.items() if column.text}
_AFTER_NAME = re.compile(f" (?:{'|'.join(column.text for column in _OPTIONS.values())}|)=")


def _tensor(line: Line, tensors: dict[int, t.Tensor]) -> int:
    """Declares a tensor; returns its number."""
    number = line.row("%")
    line.take(":")
    port = line.has(" port")
    line.take(" ")
    dtype = line.member(t.DType)
    shape = line.bracketed(line.integer)
    line.take(" ")
    role = line.member(t.TensorRole)
    name = ""
    if line.text.startswith(" ", line.at) and not _AFTER_NAME.match(line.text, line.at):
        line.take(" ")
        name = line.word()
    options = {name: _value(line, column) for name, column in _OPTIONS.items() if line.has(f" {column.text}=")}
    if number in tensors:
        line.fail(f"one declaration of tensor {number}")
    tensors[number] = t.Tensor(id=number, name=name, shape=shape, dtype=dtype, role=role, port=port, **options)
    return number


def _value(line: Line, column: Column) -> Any:
    """A field of a tensor after its keyword."""
    if column.holds == Holds.TENSOR:
        line.take("%")
    read = line.word if column.holds == Holds.STRING else line.integer
    if column.ragged:
        return line.separated(read)
    return bool(read()) if column.dtype == "?" else read()


def _compute(line: Line) -> dict[str, Any]:
    own: dict[str, Any] = {}
    if line.has(" forward="):
        own["forward_op"] = -2 - line.row("^") if line.text.startswith("^", line.at) else line.row("@")
    for key, name in (("flops", "flops"), ("read", "bytes_read"), ("written", "bytes_written")):
        own[name] = line.option(f"{key}=", line.integer, 0)
    own["attributes"] = _attributes(line) if _ATTRIBUTES.match(line.text, line.at) and line.has(" ") else None
    own["arguments"] = line.option("arguments=", line.word, "")
    return own


_ATTRIBUTES = re.compile(r" (?:gemm|attention|convolution|multi_tensor)\(")


def _attributes(line: Line) -> t.Attributes | None:
    start = line.at
    found: t.Attributes | None = None
    if line.has("gemm("):
        a, b = line.has("transpose_a"), line.has(" transpose_b") or line.has("transpose_b")
        block = line.integer() if line.has(" block=") or line.has("block=") else 0
        tf32 = line.has(" tf32") or line.has("tf32")
        found = t.Gemm(transpose_a=a, transpose_b=b, block=block, tf32=tf32)
    elif line.has("attention("):
        sizes = {key: line.field(key, line.integer) for key in ("heads", "kv_heads", "head_dim")}
        causal = line.has(" causal")
        dropout, deterministic = line.option("dropout=", line.real, 0.0), line.has(" deterministic")
        found = t.Attention(causal=causal, dropout=dropout, deterministic=deterministic, **sizes)
    elif line.has("convolution("):
        windows = {
            key: line.field(key, lambda: line.bracketed(line.integer)) for key in ("stride", "padding", "dilation")
        }
        groups = line.field("groups", line.integer)
        transposed, ieee = line.has(" transposed"), line.has(" ieee")
        found = t.Convolution(groups=groups, transposed=transposed, ieee=ieee, **windows)
    elif line.has("multi_tensor("):
        found = t.MultiTensor(parts=line.field("parts", line.integer), leads=line.has(" leads"))
    if found is None:
        line.at = start
        return None
    line.take(")")
    return found


def _duration(line: Line) -> t.Duration:
    device = line.word()
    line.take(" ")
    picoseconds = line.integer()
    line.take("ps ")
    source = line.member(t.Source)
    samples = line.option("samples=", line.integer, 0)
    spread = line.option("spread=", line.real, 0.0)
    line.take(")")
    return t.Duration(device=device, picoseconds=picoseconds, source=source, samples=samples, spread=spread)


# -- a line ---------------------------------------------------------------------------------------------------
# A line of the text form, read from left to right.


_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_WORD = re.compile(r"[A-Za-z0-9_.{}]+")
_INTEGER = re.compile(r"[+-]?[0-9]{1,20}")
_FLOAT = re.compile(r"[0-9][0-9.e+-]{0,30}")

E = TypeVar("E", bound=IntEnum)
T = TypeVar("T")


class Line:
    """A line and how far it has been read; every method that reads something refuses anything else.

    Raises:
        FormatError: what comes next is something else; says in which line, and what.
    """

    __slots__ = ("at", "number", "text")

    def __init__(self, number: int, text: str) -> None:
        self.number, self.text, self.at = number, text, 0

    def fail(self, wanted: str) -> NoReturn:
        """Says what should come next."""
        rest = ascii(self.text[self.at : self.at + 30]) if self.at < len(self.text) else "the end of the line"
        raise FormatError(f"line {self.number}: {wanted} is expected where {rest} stands")

    def has(self, literal: str) -> bool:
        """Takes a literal if it comes next."""
        found = self.text.startswith(literal, self.at)
        self.at += len(literal) if found else 0
        return found

    def take(self, literal: str) -> None:
        """Takes a literal, which must come next."""
        if not self.has(literal):
            self.fail(f"'{literal.strip()}'")

    def match(self, pattern: re.Pattern[str], wanted: str) -> str:
        """Takes what a pattern matches."""
        found = pattern.match(self.text, self.at)
        if found is None:
            self.fail(wanted)
        self.at = found.end()
        return found.group()

    def word(self) -> str:
        """A word, or a text in quotes."""
        if not self.text.startswith('"', self.at):
            return self.match(_WORD, "a word")
        start, quoted = self.at, self.match(_STRING, "a text in quotes")
        try:
            word = json.loads(quoted)
            word.encode()
        except ValueError:
            self.at = start
            self.fail("a text in quotes")
        return str(word)

    def integer(self) -> int:
        """A whole number of 64 bits."""
        start, found = self.at, int(self.match(_INTEGER, "a whole number"))
        if not MIN_NUMBER <= found < -MIN_NUMBER:
            self.at = start
            self.fail("a number of 64 bits")
        return found

    def real(self) -> float:
        """A number that is not negative."""
        start, digits = self.at, self.match(_FLOAT, "a number")
        try:
            found = float(digits)
        except ValueError:
            found = inf
        if found == inf:
            self.at = start
            self.fail("a number")
        return found

    def member(self, kind: type[E]) -> E:
        """A member of an enumeration, by its name in lower case."""
        start, word = self.at, self.match(_WORD, "a word")
        if word.upper() not in kind.__members__ or word != word.lower():
            self.at = start
            self.fail(f"one of {', '.join(name.lower() for name in kind.__members__)}")
        return kind[word.upper()]

    def row(self, sigil: str) -> int:
        """A number after its sigil."""
        self.take(sigil)
        return self.integer()

    def field(self, key: str, read: Callable[[], T]) -> T:
        """A field that is always there."""
        self.has(" ")
        self.take(f"{key}=")
        return read()

    def option(self, key: str, read: Callable[[], T], default: T) -> T:
        """A field that is left out where it has its default."""
        return read() if self.has(f" {key}") else default

    def options(self, key: str, read: Callable[[], tuple[T, ...]]) -> tuple[T, ...]:
        """A field of several things that is left out where there are none."""
        return read() if self.has(f" {key}") else ()

    def words(self, read: Callable[[], T]) -> tuple[T, ...]:
        """What stands between spaces, up to the end of the line."""
        found = []
        while self.has(" "):
            found.append(read())
        return tuple(found)

    def separated(self, read: Callable[[], T]) -> tuple[T, ...]:
        """One or more with bare commas between them: a comma and a space separate longer things."""
        found = [read()]
        while not self.text.startswith(", ", self.at) and self.has(","):
            found.append(read())
        return tuple(found)

    def bracketed(self, read: Callable[[], T]) -> tuple[T, ...]:
        """`[1,2]`, or `[]`."""
        self.take("[")
        if self.has("]"):
            return ()
        found = self.separated(read)
        self.take("]")
        return found

    def listed(self, read: Callable[[], T], end: str = ")") -> tuple[T, ...]:
        """What stands between commas, up to `end`."""
        found: list[T] = []
        while not self.has(end):
            if found:
                self.take(", ")
            found.append(read())
        return tuple(found)

    def end(self) -> None:
        """Nothing may come any more."""
        if self.at != len(self.text):
            self.fail("the end of the line")
