"""The forward pass of a step graph as an ONNX model without weights.

Weights are inputs of the model that say so: metadata `echograph.role` is "parameter" or "buffer". An operation
becomes nodes of ONNX's own (`onnx_operators`), so that the model computes what the step computes. One that ONNX
has no word for, or of which the graph does not say all, is a node of the domain `echograph` under its own name,
with its FLOPs, bytes and attributes, and the shapes of its results in the model.

ONNX's values never change. Where a step writes into memory that other tensors are views of, the model makes the
whole anew (`ValueNames`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from echograph.errors import GraphError, MissingExtraError, UsageError
from echograph.ir.columns import NONE, Int64
from echograph.ir.exporters.onnx_operators import GROUPED_MM, Unsaid, rule_of
from echograph.ir.files import write_whole
from echograph.ir.formats import Exported
from echograph.ir.graph import Graph, StepGraph
from echograph.ir.types import Compute, DType, Phase, Tensor, TensorRole
from echograph.ir.unfold import unfold

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, ValueInfoProto

if TYPE_CHECKING:
    from onnx import FunctionProto, OperatorSetIdProto

    Function = Callable[[str, OperatorSetIdProto], FunctionProto]

DOMAIN = "echograph"
ROLE = "echograph.role"
MODULE = "echograph.module"
DTYPE = "echograph.dtype"
_OPSET, _IR_VERSION, _DOMAIN_VERSION = 23, 11, 1
_SHOWN = 6
# Numbers of TensorProto.DataType. ONNX Runtime has next to no kernels of bf16 for processors, so it is written as
# fp32, with metadata that say what it is.
_TYPES = {
    DType.FP32: 1, DType.FP16: 10, DType.BF16: 1, DType.FP64: 11, DType.FP8_E4M3: 17, DType.FP8_E5M2: 19,
    DType.INT64: 7, DType.INT32: 6, DType.INT16: 5, DType.INT8: 3, DType.UINT8: 2, DType.BOOL: 9,
    DType.COMPLEX64: 14, DType.FP4_E2M1: 23,
}  # fmt: skip


def export(graph: Graph, output: Path) -> Exported:
    """Writes the forward pass of a step graph.

    Args:
        graph: a step graph.
        output: the `.onnx` file.

    Raises:
        UsageError: the graph is that of a job, or has no forward pass.
        GraphError: the model would be larger than a protobuf can be.
        MissingExtraError: the `onnx` package is not installed.
        OutputError: the path cannot be written.
    """
    if not isinstance(graph, StepGraph):
        raise UsageError(f"{graph.name}: ONNX holds what one device computes: export the step graph, not the job")
    writer = _Writer(unfold(graph))
    model = writer.model()
    try:
        data = model.SerializeToString()
    except Exception as error:
        raise GraphError(
            f"{graph.name}: cannot be a protobuf message of ONNX ({error}): export fewer layers"
        ) from None
    return Exported(files=1, bytes=write_whole(output, [data]), notes=tuple(writer.notes()))


@dataclass(slots=True, kw_only=True)
class _Call:
    """One operation being spelled; see `OperatorCall`. What it adds counts only once the rule has ended."""

    writer: _Writer
    op: Compute
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    names: Sequence[str]
    given: Mapping[str, Any]
    written: str | None
    read: Sequence[bool]
    added: list[NodeProto] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)

    def node(self, operator: str, *operands: str, **attributes: Any) -> str:
        """Adds a node -> the name of its result."""
        return self.nodes(operator, operands, 1, **attributes)[0]

    def nodes(self, operator: str, operands: Sequence[str], results: int, **attributes: Any) -> list[str]:
        """Adds a node -> the names of its results."""
        made = [self.writer.fresh(self.op.name) for _ in range(results)]
        self.added.append(self.writer.node(self.op, operator, operands, made, "", attributes))
        return made

    def constant(self, values: Any, dtype: DType) -> str:
        """Adds a constant -> its name."""
        tensor = self.writer.helper.np_dtype_to_tensor_dtype
        array = np.asarray(values)
        wanted = self.writer.helper.tensor_dtype_to_np_dtype(_TYPES[dtype])
        if wanted.kind == "f" and array.dtype.kind in "fiu" and wanted.itemsize < 8:
            array = (
                np.clip(array, np.finfo(wanted).min, np.finfo(wanted).max) if np.isfinite(array).all() else array
            )
        value = self.writer.from_array(array.astype(wanted))
        assert value.data_type == tensor(wanted)
        return self.node("Constant", value=value)

    def cast(self, name: str, before: DType, after: DType) -> str:
        """A value as another type -> its name."""
        if before == after:
            return name
        made = self.node("Cast", name, to=_TYPES[after])
        if after == DType.BF16:
            _say(self.added[-1], DTYPE, after.text)
        return made

    def function(self, name: str) -> list[str]:
        """Adds a call of one of the model's functions with all that the operation reads -> its results."""
        made = [self.writer.fresh(name) for _ in self.outputs]
        self.added.append(self.writer.node(self.op, name, self.names, made, DOMAIN, _values(self.op)))
        self.functions.append(name)
        return made

    def assume(self, text: str) -> None:
        """Says what the model does otherwise than the step."""
        self.assumed.append(text)


class _Writer:
    """State of one export: which values have a name so far."""

    def __init__(self, graph: StepGraph) -> None:
        try:
            from onnx import helper, numpy_helper
        except ImportError:
            raise MissingExtraError("onnx", "onnx", "writing ONNX models") from None
        self.helper = helper
        self.from_array = numpy_helper.from_array
        self.graph = graph
        self.memory = ValueNames(graph, self._replayed)
        self.assumed: Counter[str] = Counter()
        self.foreign: Counter[str] = Counter()
        self.functions: dict[str, None] = {}
        self.taken: set[str] = set()
        self.counts: dict[str, int] = {}
        self.written: list[NodeProto] = []
        self.types: dict[str, ValueInfoProto] = {}
        self.read: set[int] = set()
        self.bf16 = False

    def model(self) -> ModelProto:
        ops = [self.graph.ops[row] for row in range(len(self.graph.ops))]
        forward = [op for op in ops if op.phase == Phase.FORWARD and isinstance(op, Compute)]
        if not forward:
            raise UsageError(
                f"{self.graph.name}: has no forward operation: export a step graph that echoc compiled"
            )
        makers = {tensor for op in forward for tensor in op.outputs}
        read = dict.fromkeys(tensor for op in forward for tensor in op.inputs)
        self.read = set(read)
        given = [
            self._given(tensor) for tensor in read if tensor not in makers and not self._is_allocation(tensor)
        ]
        for op in forward:
            self._write(op)
        outputs = [self.types.pop(self.memory.name(tensor)) for tensor in self._results(forward)]
        helper = self.helper
        graph = helper.make_graph(
            self.written, self.graph.name or "step", given, outputs, value_info=list(self.types.values())
        )
        opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid(DOMAIN, _DOMAIN_VERSION)]
        functions = [FUNCTIONS[name](DOMAIN, opsets[0]) for name in self.functions]
        model: ModelProto = helper.make_model(
            graph, producer_name=DOMAIN, ir_version=_IR_VERSION, opset_imports=opsets, functions=functions
        )
        return model

    def notes(self) -> Iterator[str]:
        """What the model assumes, and what ONNX has no word for."""
        if any(phase != Phase.FORWARD for phase in self.graph.ops.phase.tolist()):
            yield "the forward pass alone: ONNX holds no backward pass and no optimizer"
        if self.bf16:
            yield f"bf16 is written as fp32, as ONNX Runtime's kernels are; metadata '{DTYPE}' say which"
        for what, count in self.assumed.most_common():
            yield f"{what} ({count} nodes)"
        if self.foreign:
            shown = ", ".join(f"{count} x {name}" for name, count in self.foreign.most_common(_SHOWN))
            rest = f", ... ({len(self.foreign)} operators)" if len(self.foreign) > _SHOWN else ""
            yield (
                f"nodes of the domain '{DOMAIN}', which have shapes alone, so that nothing runs it: {shown}{rest}"
            )

    # -- values --------------------------------------------------------------------------------------------

    def _given(self, tensor: int) -> ValueInfoProto:
        """A weight or an input of the step."""
        known = self.graph.tensors[tensor]
        role = {TensorRole.INPUT: "input", TensorRole.PARAMETER: "parameter"}.get(known.role, "buffer")
        info = self._info(tensor, self.fresh(known.name or f"tensor.{tensor}"))
        _say(info, ROLE, role)
        self.memory.make(tensor, info.name)
        return info

    def _is_allocation(self, tensor: int) -> bool:
        """Memory that is there before anything is written to it."""
        known = self.graph.tensors[tensor]
        return known.role == TensorRole.ACTIVATION and known.alias_of is None

    def _results(self, forward: Sequence[Compute]) -> list[int]:
        """What nobody in the forward pass reads, under any name of its memory."""
        roots = {self.memory.root(tensor) for tensor in self.read}
        firsts = [op.outputs[0] for op in forward if op.outputs]
        shown = [t for t in firsts if t not in self.read]
        return [t for t in shown if self.memory.root(t) == t or self.memory.root(t) not in roots] or shown[-1:]

    def _info(self, tensor: int, name: str) -> ValueInfoProto:
        known = self.graph.tensors[tensor]
        info = self.helper.make_tensor_value_info(name, _TYPES[known.dtype], list(known.shape))
        if known.dtype == DType.BF16:
            self.bf16 = True
            _say(info, DTYPE, known.dtype.text)
        return info

    def fresh(self, wanted: str) -> str:
        """A name that no value has yet."""
        name, number = wanted, self.counts.get(wanted, 0)
        while name in self.taken:
            number += 1
            name = f"{wanted}.{number}"
        self.counts[wanted] = number
        self.taken.add(name)
        return name

    # -- nodes ---------------------------------------------------------------------------------------------

    def _write(self, op: Compute) -> None:
        """Adds an operation, in ONNX's words or under its own name."""
        for tensor in op.inputs:
            if not self.memory.has(tensor) and self._is_allocation(tensor):
                self._allocate(op, tensor)
        inputs = [self.memory.name(tensor) for tensor in op.inputs]
        call = self._call(op, inputs)
        try:
            made = self._spell(call)
        except Unsaid:
            self.foreign[op.name] += 1
            made = [self.fresh(op.name) for _ in op.outputs]
            self.written.append(self.node(op, op.name, inputs, made, DOMAIN, _values(op)))
        for tensor, name in zip(op.outputs, made, strict=False):
            self.types.setdefault(name, self._info(tensor, name))
            if op.name.endswith("_"):
                self._store(op, tensor, name)
            else:
                self.memory.make(tensor, name)

    def _call(self, op: Compute, names: Sequence[str]) -> _Call:
        tensors = self.graph.tensors
        before = tensors[op.outputs[0]].alias_of if op.outputs and op.name.endswith("_") else None
        held = before is not None and (self.memory.has(before) or self.memory.has(self.memory.root(before)))
        return _Call(
            writer=self,
            op=op,
            inputs=[tensors[i] for i in op.inputs],
            outputs=[tensors[i] for i in op.outputs],
            names=names,
            given=json.loads(op.arguments) if op.arguments else {},
            written=self.memory.name(before) if held and before is not None else None,
            read=[tensor in self.read for tensor in op.outputs],
        )

    def _spell(self, call: _Call) -> list[str]:
        """Adds what the rule of an operation makes -> the names of its results.

        Raises:
            Unsaid: there is no rule, or it cannot say all that is read.
        """
        rule = rule_of(call.op.name)
        if rule is None or not call.outputs:
            raise Unsaid(call.op.name)
        names = list(rule(call))
        if any(call.read[len(names) :]):
            raise Unsaid("results")
        own = {output for node in call.added for output in node.output}
        names = [name if name in own else call.node("Identity", name) for name in names]
        self.written += call.added
        self.functions.update(dict.fromkeys(call.functions))
        self.assumed.update(f"{call.op.name}: {text}" for text in call.assumed)
        return names[: len(call.outputs)]

    def _allocate(self, op: Compute, tensor: int) -> None:
        known = self.graph.tensors[tensor]
        zeros = _Call(
            writer=self, op=op, inputs=(), outputs=(known,), names=(), given={}, written=None, read=(True,)
        )
        shape = zeros.constant(np.array(known.shape, np.int64), DType.INT64)
        name = zeros.node("Expand", zeros.constant(0, known.dtype), shape)
        self.written += zeros.added
        self.memory.make(tensor, name)

    def _store(self, op: Compute, tensor: int, name: str) -> None:
        """A value written in place; where it is a part, the whole that it lies in is made anew."""
        where = self.memory.places(tensor)
        if where is None:
            self.memory.write(tensor, name, name)
            return
        root = self.memory.root(tensor)
        whole = self.graph.tensors[root]
        if not self.memory.has(root):
            self._allocate(op, root)
        call = self._call(op, ())
        flat = call.node("Reshape", self.memory.whole(root), call.constant(np.array([-1]), DType.INT64))
        part = call.node("Reshape", name, call.constant(np.array([-1]), DType.INT64))
        places = call.constant(where.reshape(-1), DType.INT64)
        written = call.node("ScatterElements", flat, places, part, axis=0)
        made = call.node(
            "Reshape", written, call.constant(np.array(whole.shape, np.int64), DType.INT64), allowzero=1
        )
        self.written += call.added
        self.memory.write(tensor, name, made)

    def _replayed(self, maker: int, source: str) -> str:
        """A view made again of memory that has been written since."""
        op = self.graph.ops[maker]
        assert isinstance(op, Compute)
        return self._spell(self._call(op, [source]))[0]

    def node(
        self,
        op: Compute,
        operator: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        domain: str,
        values: Mapping[str, Any],
    ) -> NodeProto:
        """A node of an operation's module."""
        name = f"{op.name}.{outputs[0]}" if outputs else op.name
        node = self.helper.make_node(operator, inputs, outputs, name=name, domain=domain, **values)
        if op.module:
            _say(node, MODULE, op.module)
        return node


def _values(op: Compute) -> dict[str, Any]:
    """Attributes of a node that ONNX does not know: the work that it is."""
    values = {"flops": op.flops, "bytes_read": op.bytes_read, "bytes_written": op.bytes_written}
    fields = {} if op.attributes is None else asdict(op.attributes)
    return values | {name: _plain(value) for name, value in fields.items()}


def _say(message: Any, key: str, value: str) -> None:
    entry = message.metadata_props.add()
    entry.key, entry.value = key, value


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return int(value) if isinstance(value, bool) else value


# -- functions ------------------------------------------------------------------------------------------------
# Functions of the domain `echograph`: operators that ONNX has no node for, defined by nodes of ONNX's own.
#
# A reader of ONNX may inline them; `echoc import onnx` takes the call for the operator that it is.


_WORK = ["flops", "bytes_read", "bytes_written"]


def _grouped_mm(domain: str, opset: OperatorSetIdProto) -> FunctionProto:
    """Rows [m, k], grouped by where each group ends, times a matrix [k, n] a group: one product a group."""
    from onnx import TensorProto, helper

    node = helper.make_node
    axis = helper.make_tensor("axis", TensorProto.INT64, [1], [0])
    body = helper.make_graph(
        [
            node("Gather", ["ends", "group"], ["at"], axis=0),
            node("Cast", ["at"], ["wide"], to=TensorProto.INT64),
            node("Unsqueeze", ["wide", "first"], ["end"]),
            node("Slice", ["rows", "begin", "end", "first"], ["own"]),
            node("Gather", ["matrices", "group"], ["matrix"], axis=0),
            node("MatMul", ["own", "matrix"], ["product"]),
            node("Concat", ["before", "product"], ["after"], axis=0),
            node("Identity", ["going"], ["goes_on"]),
        ],
        "group",
        [
            helper.make_tensor_value_info("group", TensorProto.INT64, []),
            helper.make_tensor_value_info("going", TensorProto.BOOL, []),
            helper.make_empty_tensor_value_info("begin"),
            helper.make_empty_tensor_value_info("before"),
        ],
        [helper.make_empty_tensor_value_info(name) for name in ("goes_on", "end", "after")],
    )
    nodes = [
        node("Constant", [], ["first"], value=axis),
        node("Shape", ["matrices"], ["count"], start=0, end=1),
        node("Shape", ["matrices"], ["columns"], start=2, end=3),
        node("Squeeze", ["count", "first"], ["groups"]),
        node("Concat", ["first", "columns"], ["none"], axis=0),
        node("ConstantOfShape", ["none"], ["empty"]),
        node("CastLike", ["empty", "rows"], ["start"]),
        node("Loop", ["groups", "", "first", "start"], ["last", "products"], body=body),
    ]
    attributes = [*_WORK, "transpose_a", "transpose_b"]
    return helper.make_function(
        domain, GROUPED_MM, ["rows", "matrices", "ends"], ["products"], nodes, [opset], attributes
    )


FUNCTIONS: Mapping[str, Function] = {GROUPED_MM: _grouped_mm}
"""Name -> what makes the function of a domain in an opset."""


# -- memory ---------------------------------------------------------------------------------------------------
# Which value of an ONNX model a tensor of the graph is now.
#
# Tensors of a graph may share memory: views, and the versions that operations in place make. ONNX's values
# never change, so a write makes a new value of the memory's whole, and a view that is read after is made
# again.


_MOST_PLACES = 2**20
_RESHAPED = ("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "unflatten")


class ValueNames:
    """Names of values.

    Args:
        graph: unfolded.
        replay: adds a view again: (the operation that made it, the value that it is of) -> its name.
    """

    def __init__(self, graph: StepGraph, replay: Callable[[int, str], str]) -> None:
        self._graph = graph
        self._replay = replay
        self._alias = graph.tensors.alias_of.tolist()
        self._names: dict[int, tuple[str, int]] = {}
        self._whole: dict[int, str] = {}
        self._writes: Counter[int] = Counter()

    def root(self, tensor: int) -> int:
        """The tensor that owns the memory."""
        while self._alias[tensor] != NONE:
            tensor = self._alias[tensor]
        return tensor

    def has(self, tensor: int) -> bool:
        """Whether a tensor has a value."""
        return tensor in self._names

    def make(self, tensor: int, name: str) -> None:
        """A new value, or a view of one."""
        root = self.root(tensor)
        self._names[tensor] = name, self._writes[root]
        if tensor == root:
            self._whole[root] = name

    def write(self, tensor: int, name: str, whole: str) -> None:
        """A value written in place, and with it the whole that it lies in."""
        root = self.root(tensor)
        self._writes[root] += 1
        self._names[tensor] = name, self._writes[root]
        self._whole[root] = whole

    def whole(self, root: int) -> str:
        """All of a memory as it is now."""
        return self._whole[root]

    def name(self, tensor: int) -> str:
        """The value of a tensor as its memory is now.

        Raises:
            Unsaid: nothing made it.
        """
        root = self.root(tensor)
        name, writes = self._names.get(tensor, ("", -1))
        if writes == self._writes[root]:
            return name
        above = self._alias[tensor]
        if root not in self._whole:
            raise Unsaid("value")
        if above == NONE:
            name = self._whole[root]
        elif self._is_view(tensor):
            name = self._replay(int(self._graph.maker[tensor]), self.name(above))
        else:
            name = self.name(above)
        self._names[tensor] = name, self._writes[root]
        return name

    def places(self, tensor: int) -> Int64 | None:
        """Positions in the flattened memory that a tensor names; None where it is all of it, in order.

        Raises:
            Unsaid: it is a view that is not followed, or too large a part.
        """
        views = []
        while self._alias[tensor] != NONE:
            if self._is_view(tensor):
                views.append(tensor)
            tensor = self._alias[tensor]
        if not views:
            return None
        whole = self._graph.tensors[tensor]
        if whole.numel > _MOST_PLACES:
            raise Unsaid("size")
        places = np.arange(whole.numel, dtype=np.int64).reshape(whole.shape)
        for view in reversed(views):
            places = self._viewed(places, view)
        return places

    def _is_view(self, tensor: int) -> bool:
        maker = int(self._graph.maker[tensor])
        return maker != NONE and not self._graph.ops[maker].name.endswith("_")

    def _viewed(self, places: Int64, view: int) -> Int64:
        op = self._graph.ops[int(self._graph.maker[view])]
        given = json.loads(getattr(op, "arguments", "") or "{}")
        name, shape = op.name.removeprefix("aten."), self._graph.tensors[view].shape
        if name in _RESHAPED:
            return places.reshape(shape)
        if name == "slice":
            cut = slice(given.get("start"), given.get("end"), given.get("step", 1))
            part: Int64 = places[(slice(None),) * (given.get("dim", 0) % places.ndim) + (cut,)]
            return part
        if name == "select":
            chosen: Int64 = np.asarray(np.take(places, given["index"], given["dim"]))
            return chosen
        if name == "t":
            return places.T
        if name == "transpose":
            return np.swapaxes(places, given["dim0"], given["dim1"])
        if name == "permute":
            return np.transpose(places, given["dims"])
        raise Unsaid(name)
