"""What PyTorch's execution trace says of a profile's events: schemas, shapes and types."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from echograph.errors import DataError, UsageError
from echograph.ir.columns import Bools
from echograph.ir.files import read_unpacked
from echograph.profiler.analyses.table import AnswerTable, from_rows
from echograph.profiler.analyses.work import US
from echograph.profiler.traces.events import details
from echograph.profiler.traces.trace import NONE, OPERATORS, Trace, TraceSet

TITLES = (
    "rank",
    "index",
    "name",
    "cat",
    "ts",
    "dur",
    "et_node",
    "et_node_name",
    "op_schema",
    "input_shapes",
    "input_types",
    "output_shapes",
    "output_types",
)
_MAX_BYTES = 2**31


class _Values(msgspec.Struct, gc=False):
    shapes: list[Any] = msgspec.field(default_factory=list)
    types: list[Any] = msgspec.field(default_factory=list)


class _Attribute(msgspec.Struct, gc=False):
    name: str
    value: Any = None


class _Node(msgspec.Struct, gc=False):
    """A node as PyTorch writes it since schema 1.0.2; before, what are attributes now stood beside the name."""

    id: int
    name: str = ""
    inputs: _Values | list[Any] = msgspec.field(default_factory=list)
    outputs: _Values | list[Any] = msgspec.field(default_factory=list)
    attrs: list[_Attribute] = msgspec.field(default_factory=list)
    rf_id: int = NONE
    op_schema: str = ""
    input_shapes: list[Any] = msgspec.field(default_factory=list)
    input_types: list[Any] = msgspec.field(default_factory=list)
    output_shapes: list[Any] = msgspec.field(default_factory=list)
    output_types: list[Any] = msgspec.field(default_factory=list)


class _File(msgspec.Struct, gc=False):
    nodes: list[_Node]


def execution_trace(traces: TraceSet, *, file: str = "") -> AnswerTable:
    """The events of a profile with their nodes of an execution trace that was recorded at the same time.

    A node's `rf_id` is the number that PyTorch gave a call: an operator's "Record function id", or in files that
    do not say that, its "External id". (Both are equal only where nothing was profiled before in the process.)
    What an operator called or launched has its external id, and so its node.

    Columns: `rank`; `index` of the event in its file; its `name`, `cat`, `ts` (microseconds since the first event
    of the job) and `dur`; `et_node` and `et_node_name`; `op_schema`; `input_shapes`, `input_types`,
    `output_shapes`, `output_types` as JSON. Events without a node are left out; how many are is a note.

    Args:
        traces: of one rank.
        file: its execution trace (JSON, gzipped or not, of `torch.profiler.ExecutionTraceObserver`).

    Raises:
        UsageError: no file is named, or there are several ranks.
        InputError: it cannot be read.
        DataError: it is no execution trace, or none of the operators has a node of its name.
    """
    if not file:
        raise UsageError("execution-trace: name the file, for instance --option file=et.json")
    if len(traces) > 1:
        raise UsageError(f"execution-trace: a file is of one rank, and there are {len(traces)}: add --ranks 0")
    ((rank, trace),) = traces.items()
    nodes, operators = _nodes(Path(file)), trace.of_category(OPERATORS)
    number = _call_numbers(trace, operators | trace.of_category({"user_annotation"}))
    node_of = {row: nodes[n] for row, n in enumerate(number) if n in nodes}
    node_of = {r: node for r, node in node_of.items() if not operators[r] or node.name == trace.text(r)}
    same = int(operators[list(node_of)].sum())
    if not same:
        raise DataError(f"{file}: no operator of {trace.path} has a node in it: it is of another run or rank")
    notes = list(traces.notes)
    if left_out := int(operators.sum()) - same:
        notes.append(f"rank {rank}: {left_out} of {int(operators.sum())} operators have no node of their name")
    found = []
    for row, node in node_of.items():
        times = (float(trace.start[row]) / US, float(trace.duration[row]) / US)
        event = (int(trace.index[row]), trace.text(row), trace.strings[trace.category[row]], *times)
        found.append((rank, *event, node.id, node.name, node.op_schema, *map(json.dumps, _shapes_and_types(node))))
    return from_rows(TITLES, found, notes)


def _call_numbers(trace: Trace, calls: Bools) -> list[int]:
    """The number of each row's call, by which an execution trace knows it; -1 where there is none."""
    of_external: dict[int, int] = {}
    for external, event in zip(trace.external_id[calls].tolist(), details(trace, calls), strict=True):
        number = event.get("args", {}).get("Record function id", external)
        if external != NONE and isinstance(number, int):
            of_external[external] = number
    return [of_external.get(external, external) for external in trace.external_id.tolist()]


def _nodes(path: Path) -> dict[int, _Node]:
    """Nodes by the number that the profiler knows them by."""
    data = read_unpacked(path, "give the file of ExecutionTraceObserver", _MAX_BYTES)
    try:
        nodes = msgspec.json.decode(data, type=_File).nodes
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path}: no execution trace of PyTorch ({error})") from None
    found = {}
    for node in nodes:
        said = {attribute.name: attribute.value for attribute in node.attrs}
        node.op_schema = str(said.get("op_schema", node.op_schema))
        number = said.get("rf_id", node.rf_id)
        # Nodes that stand for a process or a thread have the number 0, as has nothing that ran.
        if isinstance(number, int) and number > 0:
            found[number] = node
    return found


def _shapes_and_types(node: _Node) -> tuple[list[Any], ...]:
    if isinstance(node.inputs, _Values) and isinstance(node.outputs, _Values):
        return node.inputs.shapes, node.inputs.types, node.outputs.shapes, node.outputs.types
    return node.input_shapes, node.input_types, node.output_shapes, node.output_types
