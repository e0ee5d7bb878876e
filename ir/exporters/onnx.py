"""The forward pass of a step graph as an ONNX model without weights.

Weights are inputs of the model that say so: metadata `echograph.role` is "parameter" or "buffer". An operation
that ONNX has a word for (`onnx_operators`) is a node of ONNX; any other is a node of the domain `echograph` under
its own name, with its FLOPs, bytes and attributes, and the shapes of its results in the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echograph.errors import GraphError, MissingExtraError, UsageError
from echograph.ir.exporters import Exported
from echograph.ir.exporters.onnx_operators import Operation, Spelling, spell
from echograph.ir.files import write_whole
from echograph.ir.graph import Graph, StepGraph
from echograph.ir.types import Compute, DType, Phase, TensorRole
from echograph.ir.unfold import unfold

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, ValueInfoProto

DOMAIN = "echograph"
ROLE = "echograph.role"
MODULE = "echograph.module"
_OPSET, _IR_VERSION, _DOMAIN_VERSION = 23, 11, 1
_SHOWN = 6
# Numbers of TensorProto.DataType.
_TYPES = {
    DType.FP32: 1, DType.FP16: 10, DType.BF16: 16, DType.FP64: 11, DType.FP8_E4M3: 17, DType.FP8_E5M2: 19,
    DType.INT64: 7, DType.INT32: 6, DType.INT16: 5, DType.INT8: 3, DType.UINT8: 2, DType.BOOL: 9,
    DType.COMPLEX64: 14,
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


class _Writer:
    """State of one export: which tensors have a name so far."""

    def __init__(self, graph: StepGraph) -> None:
        try:
            from onnx import helper
        except ImportError:
            raise MissingExtraError("onnx", "onnx", "writing ONNX models") from None
        self.helper = helper
        self.graph = graph
        self.assumed: Counter[str] = Counter()
        self.foreign: Counter[str] = Counter()
        self.names: dict[int, str] = {}
        self.taken: set[str] = set()
        self.types: list[ValueInfoProto] = []
        self.read: set[int] = set()

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
        given = [self._given(tensor) for tensor in read if tensor not in makers]
        nodes = [node for op in forward for node in self._nodes(op)]
        results = [op.outputs[0] for op in forward if op.outputs and not self.read.intersection(op.outputs)]
        helper = self.helper
        made = {info.name: info for info in self.types}
        outputs = [made.pop(self.names[tensor]) for tensor in results]
        graph = helper.make_graph(nodes, self.graph.name or "step", given, outputs, value_info=list(made.values()))
        model: ModelProto = helper.make_model(
            graph,
            producer_name=DOMAIN,
            ir_version=_IR_VERSION,
            opset_imports=[helper.make_opsetid("", _OPSET), helper.make_opsetid(DOMAIN, _DOMAIN_VERSION)],
        )
        return model

    def notes(self) -> Iterator[str]:
        """What the model assumes, and what ONNX has no word for."""
        if any(phase != Phase.FORWARD for phase in self.graph.ops.phase.tolist()):
            yield "the forward pass alone: ONNX holds no backward pass and no optimizer"
        for what, count in self.assumed.most_common():
            yield f"{what} ({count} nodes): the graph does not say"
        if self.foreign:
            shown = ", ".join(f"{count} x {name}" for name, count in self.foreign.most_common(_SHOWN))
            rest = f", ... ({len(self.foreign)} operators)" if len(self.foreign) > _SHOWN else ""
            yield f"nodes of the domain '{DOMAIN}', which ONNX has no exact word for: {shown}{rest}"

    # -- values --------------------------------------------------------------------------------------------

    def _given(self, tensor: int) -> ValueInfoProto:
        """A weight or an input of the step."""
        known = self.graph.tensors[tensor]
        role = {TensorRole.INPUT: "input", TensorRole.PARAMETER: "parameter"}.get(known.role, "buffer")
        info = self._info(tensor, known.name)
        entry = info.metadata_props.add()
        entry.key, entry.value = ROLE, role
        return info

    def _made(self, tensor: int) -> str:
        """The name of a result; it is declared with its shape."""
        if tensor not in self.names:
            self.types.append(self._info(tensor, f"{self.graph.tensors[tensor].name}.{tensor}"))
        return self.names[tensor]

    def _info(self, tensor: int, wanted: str) -> ValueInfoProto:
        known = self.graph.tensors[tensor]
        name = wanted or f"tensor.{tensor}"
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        self.names[tensor] = name
        return self.helper.make_tensor_value_info(name, _TYPES[known.dtype], list(known.shape))

    # -- nodes ---------------------------------------------------------------------------------------------

    def _nodes(self, op: Compute) -> Iterator[NodeProto]:
        tensors = self.graph.tensors
        operation = Operation(
            op=op, inputs=[tensors[i] for i in op.inputs], outputs=[tensors[i] for i in op.outputs]
        )
        spelling = spell(operation)
        if spelling is not None and self._makes_all(spelling, op):
            yield from self._spelled(spelling, op)
            return
        self.foreign[op.name] += 1
        values = {"flops": op.flops, "bytes_read": op.bytes_read, "bytes_written": op.bytes_written}
        fields = {} if op.attributes is None else asdict(op.attributes)
        yield self._node(
            op, op.name, [self.names[i] for i in op.inputs], [self._made(i) for i in op.outputs], DOMAIN,
            values | {name: _plain(value) for name, value in fields.items()},
        )  # fmt: skip

    def _makes_all(self, spelling: Spelling, op: Compute) -> bool:
        """Whether no forward operation reads a result that ONNX's node does not make."""
        return not self.read.intersection(op.outputs[spelling.results :])

    def _spelled(self, spelling: Spelling, op: Compute) -> Iterator[NodeProto]:
        if spelling.assumed:
            self.assumed[f"{spelling.steps[0][0]}: {spelling.assumed}"] += 1
        before = ""
        base = self._made(op.outputs[0])
        for position, (operator, operands, attributes) in enumerate(spelling.steps):
            last = position == len(spelling.steps) - 1
            inputs = []
            for number, operand in enumerate(operands):
                if isinstance(operand, list):
                    constant = f"{base}.constant.{number}"
                    yield self._node(op, "Constant", [], [constant], "", {"value_ints": operand})
                    inputs.append(constant)
                else:
                    inputs.append(before if isinstance(operand, str) else self.names[op.inputs[operand]])
            before = f"{base}.step.{position}"
            results = [self._made(i) for i in op.outputs[: spelling.results]] if last else [before]
            attributes = {k: _TYPES[v] if isinstance(v, DType) else v for k, v in attributes.items()}
            yield self._node(op, operator, inputs, results, "", attributes)

    def _node(
        self,
        op: Compute,
        operator: str,
        inputs: list[str],
        outputs: list[str],
        domain: str,
        values: Mapping[str, Any],
    ) -> NodeProto:
        name = f"{op.name}.{outputs[0]}" if outputs else op.name
        node = self.helper.make_node(operator, inputs, outputs, name=name, domain=domain, **values)
        if op.module:
            entry = node.metadata_props.add()
            entry.key, entry.value = MODULE, op.module
        return node


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return int(value) if isinstance(value, bool) else value
