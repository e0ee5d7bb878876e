"""Lowers an annotated graph to a `StepGraph`: tensors with roles and aliases, operations with work and traffic.

- A view is an operation without cost whose result aliases its argument.
- An operation in place makes the next version of the tensor that it writes: a new tensor, alias of the one
  before.
- An allocation is no operation; the first write to it makes the tensor.
- An operator over lists of tensors (fused optimizer, foreach) becomes one operation per element, all sharing
  one launch (`MultiTensor`), so that passes can shard and move the parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.fx import Graph, Node

from echograph.errors import CaptureError
from echograph.frontend.pytorch import annotate
from echograph.frontend.pytorch.annotate import FORWARD_NODE, FQN, GRADIENT_OF, MODULE, PHASE, ROLE, VAL
from echograph.frontend.pytorch.call_nodes import (
    arguments,
    arguments_of,
    attributes_of,
    bytes_moved,
    is_allocation,
    is_getitem,
    is_multi_tensor,
    is_view,
    kept_argument,
    node_flops,
    qualified_name,
    read_arguments,
    tensor_bytes,
    written_arguments,
)
from echograph.frontend.pytorch.spec import StepSpec
from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import StepGraph, Workload
from echograph.ir.types import DType, MultiTensor, Phase, TensorRole

DTYPES = {
    torch.float32: DType.FP32, torch.float16: DType.FP16, torch.bfloat16: DType.BF16, torch.float64: DType.FP64,
    torch.float8_e4m3fn: DType.FP8_E4M3, torch.float8_e5m2: DType.FP8_E5M2,
    torch.int64: DType.INT64, torch.int32: DType.INT32, torch.int16: DType.INT16, torch.int8: DType.INT8,
    torch.uint64: DType.INT64, torch.uint32: DType.INT32, torch.uint16: DType.INT16, torch.uint8: DType.UINT8,
    torch.bool: DType.BOOL, torch.complex64: DType.COMPLEX64,
}  # fmt: skip
_STEP_TYPES = {"bf16": DType.BF16, "fp16": DType.FP16, "fp32": DType.FP32}
_ROLES = {
    annotate.PARAMETER: TensorRole.PARAMETER,
    annotate.BUFFER: TensorRole.BUFFER,
    annotate.INPUT: TensorRole.INPUT,
    annotate.OPTIMIZER_STATE: TensorRole.OPTIMIZER_STATE,
    annotate.GRADIENT: TensorRole.GRADIENT,
}
PHASES = {
    annotate.FORWARD: Phase.FORWARD,
    annotate.BACKWARD: Phase.BACKWARD,
    annotate.RECOMPUTE: Phase.RECOMPUTE,
    annotate.OPTIMIZER: Phase.OPTIMIZER,
}


def lower(
    graph: Graph, spec: StepSpec, *, name: str, batch_size: int | None = None, sequence_length: int | None = None
) -> StepGraph:
    """Lowers an annotated graph.

    Args:
        graph: fulfils the contract of `annotate`.
        spec: what the step was captured with.
        name: of the model.
        batch_size: samples of one micro-batch; None: the first extent of the first input.
        sequence_length: tokens of one sample; None: the second extent of the first input if that is a
            matrix of integers, else 0 (no tokens).

    Raises:
        CaptureError: a tensor has a type that a workload graph does not know.
        GraphError: the graph breaks an invariant of the IR.
    """
    return lower_nodes(graph, workload_of(graph, spec, name, batch_size, sequence_length))[0]


def lower_nodes(graph: Graph, workload: Workload) -> tuple[StepGraph, dict[Node, list[int]]]:
    """`lower`, and the operations that each call node became."""
    lowering = GraphLowering(GraphBuilder(name=workload.model, workload=workload), graph)
    for node in graph.nodes:
        lowering.add(node)
    return lowering.builder.build(StepGraph), lowering.made


def workload_of(
    graph: Graph,
    spec: StepSpec,
    name: str,
    batch_size: int | None = None,
    sequence_length: int | None = None,
) -> Workload:
    """What an annotated graph trains; the arguments are those of `lower`."""
    trained = {n.meta[GRADIENT_OF] for n in graph.nodes if GRADIENT_OF in n.meta}
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    inputs = [n.meta[VAL] for n in placeholders if n.meta[ROLE] == annotate.INPUT and n.meta[VAL].dim()]
    extents = tuple(inputs[0].shape) if inputs else (1,)
    has_tokens = len(extents) == 2 and not inputs[0].is_floating_point()
    return Workload(
        model=name,
        parameters=sum(n.meta[VAL].numel() for n in placeholders if n.meta[FQN] in trained),
        batch_size=extents[0] if batch_size is None else batch_size,
        sequence_length=(extents[1] if has_tokens else 0) if sequence_length is None else sequence_length,
        dtype=_STEP_TYPES[spec.dtype],
        optimizer=spec.optimizer,
        master_weights=spec.has_master_weights,
    )


class Order(TypedDict, total=False):
    """Where an operation stands among the others; fields of `ir.types.Op`."""

    stream: int
    deps: list[int]


class GraphLowering:
    """State of one lowering: which tensor a node's value is now, and which operations (`made`) a node became.

    Args:
        builder: of the graph; its open block gets the tensors and operations.
        graph: fulfils the contract of `annotate`.
    """

    def __init__(self, builder: GraphBuilder, graph: Graph) -> None:
        self.builder = builder
        self._tensors: dict[Node, int | None] = {}
        self.results: dict[Node, list[int | None]] = {}
        self._ops: dict[str, int] = {}
        self._owner: dict[int, str] = {}
        self._root: dict[int, int] = {}
        self.roles: dict[int, TensorRole] = {}
        self._names: dict[int, str] = {}
        self._spans: dict[int, tuple[int, int]] = {}
        self._writes: dict[int, list[tuple[int, int]]] = {}
        self._gradients = _gradient_nodes(graph)
        self.made: dict[Node, list[int]] = {}

    def add(self, node: Node) -> None:
        """Adds a node; nodes come in program order."""
        if node.op == "placeholder":
            self._placeholder(node)
        elif node.op != "call_function":
            return
        elif is_getitem(node):
            source, index = node.args
            self._tensors[node] = self.results[source][index]  # type: ignore[index]
        elif is_allocation(node) or (is_view(node) and not node.all_input_nodes):
            self._tensors[node] = None  # no memory yet, or none at all: a number's conjugate, say
        elif is_multi_tensor(node):
            self._multi_tensor(node)
        else:
            self._call(node)

    def order(self, node: Node, inputs: list[int]) -> Order:
        """What an operation of a node comes after besides those that made its inputs, and on which stream."""
        del node
        return {"deps": self.earlier_writes(inputs)}

    def _placeholder(self, node: Node) -> None:
        role, name = _ROLES[node.meta[ROLE]], node.meta[FQN]
        tensor = self.tensor(name, node.meta[VAL], role)
        self._tensors[node] = tensor
        if role is TensorRole.PARAMETER:
            self._owner[tensor] = name
        elif role in (TensorRole.OPTIMIZER_STATE, TensorRole.GRADIENT):
            self._owner[tensor] = name.rpartition(".")[0]

    # -- one operation per node ----------------------------------------------------------------------------

    def _call(self, node: Node) -> None:
        named = arguments(node)
        if is_view(node):
            self._declare_allocation(node.all_input_nodes[0])
        written = [named[name] for name in written_arguments(node)]
        inputs = self.present([*_nodes(list(read_arguments(node).values())), *_nodes([kept_argument(node)])])
        order = self.order(node, inputs)
        view_of = inputs[0] if is_view(node) and inputs else None
        results = [self._result(node, i, value, view_of) for i, value in enumerate(_values(node))]
        if written:
            results = [self.next_version(n, node) for n in _nodes(written)]
        bytes_read, bytes_written = bytes_moved(node)
        op = self.operation(
            node,
            phase=PHASES[node.meta[PHASE]],
            module=node.meta[MODULE],
            inputs=inputs,
            outputs=[r for r in results if r is not None],
            **order,
            forward_op=self._ops.get(node.meta.get(FORWARD_NODE, "")),
            flops=node_flops(node),
            bytes_read=bytes_read,
            bytes_written=bytes_written,
            attributes=attributes_of(node),
            arguments=arguments_of(node),
        )
        self.note_writes([r for r in results if r is not None] if written else [], op)
        self._ops[node.name] = op
        self.made[node] = [op]
        self.results[node] = results
        self._tensors[node] = results[0] if results else None

    def _result(self, node: Node, index: int, value: Any, view_of: int | None) -> int | None:
        """The tensor of one result of a call that writes nothing in place; None for a result that is none."""
        if not isinstance(value, Tensor) or any(True for _ in written_arguments(node)):
            return None
        gradient = self._gradients.get((node, index))
        if gradient is not None:
            tensor = self.tensor(f"{gradient}.grad", value, TensorRole.GRADIENT, view_of)
            self._owner[tensor] = gradient
            return tensor
        suffix = f".{index}" if isinstance(node.meta[VAL], tuple) else ""
        role = TensorRole.ACTIVATION if view_of is None else self.roles[view_of]
        return self.tensor(_result_name(node) + suffix, value, role, view_of)

    def operation(self, node: Node, **fields: Any) -> int:
        """Adds what a node is, an operation of `builder.compute`'s fields."""
        return self.builder.compute(qualified_name(node), **fields)

    # -- one operation per element of a list -----------------------------------------------------------------

    def _multi_tensor(self, node: Node) -> None:
        named = arguments(node)
        lists = {n: v for n, v in named.items() if isinstance(v, tuple | list) and v and isinstance(v[0], Node)}
        parts = max(len(v) for v in lists.values())
        single = [v for v in named.values() if isinstance(v, Node)]
        written = set(written_arguments(node))
        read = set(read_arguments(node))
        results: list[int | None] = []
        values = _values(node)
        for part in range(parts):
            reads = [v[part] for name, v in lists.items() if name in read] + single
            writes = [v[part] for name, v in lists.items() if name in written]
            writes += [named[name] for name in written if isinstance(named[name], Node)]
            value = values[part] if values else None
            results.append(self._part(node, reads, writes, value, MultiTensor(parts=parts, leads=part == 0)))
        self.results[node] = results

    def _part(
        self, node: Node, reads: list[Node], writes: list[Node], value: Any, share: MultiTensor
    ) -> int | None:
        inputs = self.present(reads)
        order = self.order(node, inputs)
        owner = next((self._owner[i] for i in inputs if i in self._owner), "")
        made = [self.next_version(n, node, owner) for n in writes]
        result = None
        if isinstance(value, Tensor):
            result = self.tensor(_result_name(node), value, TensorRole.ACTIVATION)
            made.append(result)
            self._owner[result] = owner
        op = self.builder.compute(
            qualified_name(node),
            phase=PHASES[node.meta[PHASE]],
            module=owner.rpartition(".")[0],
            inputs=inputs,
            outputs=made,
            bytes_read=sum(tensor_bytes(n.meta[VAL]) for n in dict.fromkeys(reads)),
            bytes_written=sum(tensor_bytes(n.meta[VAL]) for n in writes)
            + (tensor_bytes(value) if isinstance(value, Tensor) else 0),
            attributes=share,
            **order,
        )
        self.note_writes(made, op)
        self.made.setdefault(node, []).append(op)
        return result

    # -- tensors -------------------------------------------------------------------------------------------

    def tensor(
        self,
        name: str,
        value: Tensor,
        role: TensorRole,
        alias_of: int | None = None,
        sharded: tuple[str, ...] = (),
    ) -> int:
        """Adds a tensor of a value's shape and type to the graph.

        Raises:
            CaptureError: a workload graph does not know the type.
        """
        dtype = DTYPES.get(value.dtype)
        if dtype is None:
            raise CaptureError(f"tensor '{name}' has the type {value.dtype}, which a workload graph does not know")
        tensor = self.builder.tensor(name, value.shape, dtype, role, alias_of=alias_of, sharded=sharded)
        self._root[tensor] = tensor if alias_of is None else self._root[alias_of]
        self._spans[tensor] = _span(value)
        self.roles[tensor], self._names[tensor] = role, name
        return tensor

    def next_version(self, node: Node, writer: Node, owner: str = "") -> int:
        """The tensor that a write in place makes; further reads of the node mean this one."""
        before = self._tensors[node]
        if before is not None:
            tensor = self.tensor(self._names[before], node.meta[VAL], self.roles[before], before)
            self._owner[tensor] = self._owner.get(before, owner)
        elif (gradient := self._gradients.get((node, 0))) is not None:
            tensor = self.tensor(f"{gradient}.grad", node.meta[VAL], TensorRole.GRADIENT)
            self._owner[tensor] = gradient
        elif owner:
            tensor = self.tensor(f"{owner}.main_grad", node.meta[VAL], TensorRole.GRADIENT)
            self._owner[tensor] = owner
        else:
            tensor = self.tensor(_result_name(writer), node.meta[VAL], TensorRole.ACTIVATION)
        self._tensors[node] = tensor
        return tensor

    def _declare_allocation(self, node: Node) -> None:
        """Memory that is written part by part: the parts need a tensor to be views of."""
        if self._tensors[node] is None:
            self._tensors[node] = self.tensor(_result_name(node), node.meta[VAL], TensorRole.ACTIVATION)

    def present(self, nodes: list[Node]) -> list[int]:
        """Tensors that nodes stand for, operand by operand; memory that nothing wrote yet is none."""
        return [t for n in nodes if (t := self._tensors[n]) is not None]

    def note_writes(self, versions: list[int], op: int) -> None:
        """An operation wrote memory that has had other names."""
        for tensor in versions:
            begin, end = self._spans[tensor]
            writes = self._writes.setdefault(self._root[tensor], [])
            # What is written over all of it is forgotten: the later write comes after.
            writes[:] = [w for w in writes if self._spans[w[0]][0] < begin or self._spans[w[0]][1] > end]
            writes.append((tensor, op))

    def earlier_writes(self, inputs: list[int]) -> list[int]:
        """Operations that wrote, through another view, memory that these tensors name: of each, the last one."""
        found = set()
        for tensor in inputs:
            begin, end = self._spans[tensor]
            for other, op in reversed(self._writes.get(self._root[tensor], ())):
                if self._spans[other][0] < end and begin < self._spans[other][1]:
                    found |= {op} if tensor < other else set()
                    break
        return sorted(found)


def _gradient_nodes(graph: Graph) -> dict[tuple[Node, int], str]:
    """(call node, result) -> parameter, for final gradients and for what they are views of."""
    gradients: dict[tuple[Node, int], str] = {}
    for node in graph.nodes:
        name = node.meta.get(GRADIENT_OF)
        while name is not None and node.op == "call_function":
            index = 0
            if is_getitem(node):
                node, index = node.args
            gradients[node, index] = name
            if not is_view(node):
                break
            node = node.all_input_nodes[0]
    return gradients


def _span(value: Tensor) -> tuple[int, int]:
    """First byte of a tensor in its storage, and the one after its last."""
    size, begin = value.element_size(), int(value.storage_offset()) * value.element_size()
    last = sum((int(extent) - 1) * int(stride) for extent, stride in zip(value.shape, value.stride(), strict=True))
    return begin, begin + (last + 1) * size if value.numel() else begin


def _result_name(node: Node) -> str:
    """The operator's name alone: a number would make the tensors of equal layers differ."""
    return qualified_name(node).rpartition(".")[2]


def _values(node: Node) -> tuple[Any, ...]:
    value = node.meta[VAL]
    if isinstance(value, tuple | list):
        return tuple(value)
    return () if value is None else (value,)


def _nodes(value: Any) -> Iterator[Node]:
    if isinstance(value, Node):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _nodes(item)
