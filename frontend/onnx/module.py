"""An ONNX model as a PyTorch module on fake tensors: a tree of scopes that owns the weights and runs the nodes.

Every node runs within the scope of the module that it stood in, so a recorder's hooks see the paths of the
original model. What follows from constants and shapes is computed with real numbers, outside of the recording:
shape arithmetic is the exporter's, not the device's.

Control flow: `If`, `Loop` and `Scan`, as long as shapes and constants alone decide which way it goes. A graph
holds one course of the step. A branch that data decide on is taken as the caller says, and that is noted.

Operators of the domain `echograph`: what a step graph held and ONNX has no word for. The exporter
(`ir.exporters.onnx`) writes such a node under the operator's name with the shapes of its results. Read again, it
is an operator of that name which makes tensors of those shapes; the product of experts, which counts FLOPs, is
PyTorch's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from echograph.errors import CaptureError, EchoError, InputError
from echograph.frontend.onnx.call import DTypes, NodeCall, Operator, shapes
from echograph.frontend.onnx.model import MAX_KNOWN, Body, OnnxModel, OnnxNode, all_nodes
from echograph.frontend.onnx.operators import OPERATORS, UNKNOWN
from echograph.frontend.onnx.operators.shape import STATIC
from echograph.frontend.pytorch.userfile import reason

MAX_ITERATIONS = 4096
BRANCHES = ("then", "else")
Execute = Callable[[Body, Sequence[Any]], list[Any]]
"""Runs a body on values for its inputs -> its outputs."""
Numbers = Callable[[Any], np.ndarray[Any, Any] | None]
"""A value's numbers where they are known."""
Control = Callable[[OnnxNode, Sequence[Any], Execute, Numbers], list[Any]]


def choose(node: OnnxNode, condition: np.ndarray[Any, Any] | None, branch: str) -> Body:
    """The branch of an `If` that runs.

    Args:
        node: the node.
        condition: its numbers, None where they depend on data.
        branch: which one is taken then, of `BRANCHES`; "" refuses.

    Raises:
        CaptureError: the condition depends on data and nobody chose; or the node lacks a branch.
    """
    if condition is None and not branch:
        raise CaptureError(
            "its condition depends on data: say which branch the step takes, with --branch then or --branch else"
        )
    taken = branch if condition is None else "then" if bool(condition.reshape(-1)[0]) else "else"
    body = node.bodies.get(f"{taken}_branch")
    if body is None:
        raise CaptureError(f"it has no {taken}_branch")
    return body


def loop(node: OnnxNode, operands: Sequence[Any], execute: Execute, numbers: Numbers) -> list[Any]:
    """Runs the body of a `Loop` as often as its trip count and its condition say.

    Raises:
        CaptureError: they depend on data, or are more than `MAX_ITERATIONS`.
    """
    body = _body(node)
    most, going = _trip_count(operands, numbers), _condition(operands[1] if len(operands) > 1 else None, numbers)
    carried, count = list(operands[2:]), len(operands) - 2
    scanned: list[list[Any]] = [[] for _ in body.outputs[1 + count :]]
    iteration = 0
    while going and (most is None or iteration < most):
        if iteration == MAX_ITERATIONS:
            raise CaptureError(f"it runs more than {MAX_ITERATIONS} times: export the model without the loop")
        with _disable_current_modes():
            position, go_on = torch.tensor(iteration), torch.tensor(True)
        results = execute(body, [position, go_on, *carried])
        going = _condition(results[0], numbers)
        carried = results[1 : 1 + count]
        for values, value in zip(scanned, results[1 + count :], strict=True):
            values.append(value)
        iteration += 1
    if scanned and not iteration:
        raise CaptureError("it runs no time, so that the shape of what it collects is not known")
    return carried + [torch.stack(values) for values in scanned]


def scan(node: OnnxNode, operands: Sequence[Any], execute: Execute, numbers: Numbers) -> list[Any]:
    """Runs the body of a `Scan` once for every slice of what it scans.

    Raises:
        CaptureError: there are none, or more than `MAX_ITERATIONS`.
    """
    del numbers
    body, inputs = _body(node), _integer(node, "num_scan_inputs")
    states = len(operands) - inputs
    outputs = len(body.outputs) - states
    if not 0 < inputs <= len(operands) or outputs < 0:
        raise CaptureError(f"it scans {inputs} of {len(operands)} inputs")
    axes, backward = _listed(node, "scan_input_axes", inputs), _listed(node, "scan_input_directions", inputs)
    slices = [_unbind(t, axis, back) for t, axis, back in zip(operands[states:], axes, backward, strict=True)]
    length = len(slices[0])
    if not 0 < length <= MAX_ITERATIONS:
        raise CaptureError(f"it runs {length} times: 1 to {MAX_ITERATIONS} are possible")
    carried = list(operands[:states])
    scanned: list[list[Any]] = [[] for _ in range(outputs)]
    for position in range(length):
        results = execute(body, [*carried, *(part[position] for part in slices)])
        carried = results[:states]
        for values, value in zip(scanned, results[states:], strict=True):
            values.append(value)
    places, turned = _listed(node, "scan_output_axes", outputs), _listed(node, "scan_output_directions", outputs)
    joined = zip(scanned, places, turned, strict=True)
    return carried + [torch.stack(v[::-1] if back else v, axis) for v, axis, back in joined]


def _body(node: OnnxNode) -> Body:
    if "body" not in node.bodies:
        raise CaptureError("it has no body")
    return node.bodies["body"]


def _trip_count(operands: Sequence[Any], numbers: Numbers) -> int | None:
    if not operands or operands[0] is None:
        return None
    known = numbers(operands[0])
    if known is None:
        raise CaptureError("its trip count depends on data: export the model for one length")
    return int(known.reshape(-1)[0])


def _condition(value: Any, numbers: Numbers) -> bool:
    if value is None:
        return True
    known = numbers(value)
    if known is None:
        raise CaptureError("its condition depends on data: export the model with a constant trip count")
    return bool(known.reshape(-1)[0])


def _integer(node: OnnxNode, name: str) -> int:
    return int(node.attributes.get(name, 0))


def _listed(node: OnnxNode, name: str, count: int) -> list[int]:
    return [int(value) for value in node.attributes.get(name) or [0] * count]


def _unbind(value: Tensor, axis: int, backward: int) -> list[Tensor]:
    parts = list(value.unbind(axis))
    return parts[::-1] if backward else parts


CONTROL: Mapping[str, Control] = {"Loop": loop, "Scan": scan}
"""What runs a body again and again; `If` is `choose` and one run."""


DOMAIN = "echograph."
_NAMESPACE = "echograph"
_SCHEMA = "(Tensor?[] operands, int[] ranks, int[] extents, ScalarType[] dtypes) -> Tensor[]"
_libraries: list[Any] = []


def opaque(node: OnnxNode, model: OnnxModel, dtypes: DTypes) -> Operator:
    """What a node of echograph's domain runs.

    Raises:
        InputError: the file does not state the shape of a result.
    """
    name = node.operator.removeprefix(DOMAIN)
    if name in _EXACT:
        return _EXACT[name]
    declared = [model.types.get(output) for output in node.outputs]
    results = [value for value in declared if value is not None]
    if len(results) < len(declared) or not results:
        raise InputError(f"{model.source}: node '{node.name}' ({node.operator}): its results have no shapes")
    ranks = [len(value.shape) for value in results]
    extents = [extent for value in results for extent in value.shape]
    types = [dtypes.of(value.dtype, model.source) for value in results]

    def run(call: NodeCall) -> Any:
        if call.training:
            raise CaptureError(
                "nothing is known of its derivative: train from the graph that it was exported from"
            )
        if all(operand is None for operand in call.operands):  # numbers from nothing, whatever fills them in
            return tuple(torch.zeros(value.shape, dtype=t) for value, t in zip(results, types, strict=True))
        return tuple(_operator(name)(list(call.operands), ranks, extents, types))

    return run


@cache
def _operator(name: str) -> Callable[..., Any]:
    """An operator in PyTorch's table, so that it is recorded under its name."""
    plain = re.sub(r"\W", "_", name.removeprefix("aten.")) or "operator"
    library: Any = torch.library.Library(_NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define(plain + _SCHEMA)
    library.impl(plain, _empty, "CPU")
    library.impl(plain, partial(_empty, device="meta"), "Meta")
    _libraries.append(library)  # an operator lives as long as its library
    made: Callable[..., Any] = getattr(getattr(torch.ops, _NAMESPACE), plain).default
    return made


def _empty(
    operands: list[Any], ranks: list[int], extents: list[int], dtypes: list[torch.dtype], device: str = "cpu"
) -> list[torch.Tensor]:
    results, at = [], 0
    for rank, dtype in zip(ranks, dtypes, strict=True):
        results.append(torch.empty(extents[at : at + rank], dtype=dtype, device=device))
        at += rank
    return results


def _grouped_mm(call: NodeCall) -> Any:
    return torch._grouped_mm(call[0], call[1], call.get(2))


_EXACT: dict[str, Operator] = {"aten._grouped_mm": _grouped_mm}


_SHOWN = 3


class Scope(nn.Module):
    """A module of the original model: it runs what it is given, and owns weights."""

    def forward(self, run: Callable[[], Any]) -> Any:
        """Runs a node of this module."""
        return run()


class OnnxModule(Scope):
    """The model itself; make it under `capture_mode`.

    Args:
        model: what a file holds.
        dtypes: the step's types.
        branch: which branch an `If` takes where data decide ("then" or "else"); "" refuses such a node.

    Attributes:
        notes: what was taken for granted, as far as the module has run.

    Raises:
        CaptureError: nodes have operators that are not known.
        InputError: a weight has a type that a step graph does not know.
    """

    def __init__(self, model: OnnxModel, dtypes: DTypes, branch: str = "") -> None:
        super().__init__()
        self.model = model
        self.dtypes = dtypes
        self.branch = branch
        self.notes: dict[str, None] = {}
        self._read: set[str] = set(model.outputs)
        self._scopes: dict[str, nn.Module] = {"": self}
        self._owners: dict[str, tuple[nn.Module, str]] = {}
        self._operators = dict(_operators(model, dtypes))
        for weight in model.weights:
            path, _, leaf = weight.path.rpartition(".")
            owner = self._scope(path)
            tensor = torch.empty(weight.shape, dtype=dtypes.of(weight.dtype, weight.name))
            # Straight into the tables: a name from a file may be that of a method.
            if weight.trainable and tensor.is_floating_point():
                owner._parameters[leaf] = nn.Parameter(tensor)
            else:
                owner._buffers[leaf] = tensor
            self._owners[weight.name] = owner, leaf
        for node in all_nodes(model.nodes):
            self._scope(node.module)
        with _disable_current_modes():
            made = {name: torch.tensor(value) for name, value in model.constants.items()}
            self._constants = {name: value.to(dtypes.to_step(value.dtype)) for name, value in made.items()}
            self._shapes = FakeTensorMode()

    def _scope(self, path: str) -> nn.Module:
        known = self._scopes.get(path)
        if known is None:
            above, _, name = path.rpartition(".")
            known = self._scopes[path] = Scope()
            self._scope(above)._modules[name] = known
        return known

    def forward(self, **inputs: Tensor) -> dict[str, Any]:  # type: ignore[override]
        """The model's outputs by name, and with them the inputs that are none of the model's (labels)."""
        values: dict[str, Any] = {"": None, **self._constants, **inputs}
        for name, (owner, leaf) in self._owners.items():
            parameter = owner._parameters.get(leaf)
            values[name] = owner._buffers[leaf] if parameter is None else parameter
        self._execute(self.model.nodes, values)
        own = {value.name for value in self.model.inputs}
        outputs = {name: values.get(name) for name in self.model.outputs}
        return outputs | {name: value for name, value in inputs.items() if name not in own}

    def drop_unread(self) -> None:
        """Gives up the weights that no node has read: those of branches that are not taken."""
        for name in self._owners.keys() - self._read:
            owner, leaf = self._owners.pop(name)
            owner._parameters.pop(leaf, None)
            owner._buffers.pop(leaf, None)

    def has(self, weight: str) -> bool:
        """Whether a weight of the file is one of the module's still."""
        return weight in self._owners

    def parameter_count(self) -> int:
        """Elements of the weights that layers have, integers that stand for them included."""
        weights = [weight for weight in self.model.weights if weight.quantised and weight.name in self._owners]
        trained = sum(parameter.numel() for parameter in self.parameters())
        return trained + sum(prod(weight.shape) for weight in weights)

    def _execute(self, nodes: Iterable[OnnxNode], values: dict[str, Any]) -> None:
        for node in nodes:
            self._read.update(node.inputs)
            operands = [self._value(node, name, values) for name in node.inputs]
            results = self._flow(node, operands, values) if node.bodies else self._run(node, operands)
            values.update(zip(node.outputs, results, strict=False))

    def _value(self, node: OnnxNode, name: str, values: dict[str, Any]) -> Any:
        """What a node reads; a result that its maker's kernel does not have is nobody's operand."""
        value = values.get(name)
        if value is None and name:
            raise CaptureError(
                f"{self.model.source}: node '{node.name}' ({node.operator}) reads '{name}', a result that "
                "no kernel makes: export the model again"
            )
        return value

    def _flow(self, node: OnnxNode, operands: Sequence[Any], values: dict[str, Any]) -> Sequence[Any]:
        """The results of a node that holds graphs."""

        def execute(body: Body, given: Sequence[Any]) -> list[Any]:
            inner = {**values, **dict(zip(body.inputs, given, strict=False))}
            self._execute(body.nodes, inner)
            self._read.update(body.outputs)
            return [inner.get(name) for name in body.outputs]

        with _one_line(self.model.source, self._call(node, operands)):
            if node.operator == "If":
                condition = _numbers(operands[0])
                body = choose(node, condition, self.branch)
                if condition is None:
                    self.notes[f"If '{node.name}': its condition depends on data; took '{self.branch}'"] = None
            elif node.operator not in CONTROL:
                raise CaptureError("it is not known: export the model with ONNX's own operators")
        return execute(body, ()) if node.operator == "If" else self._repeat(node, operands, execute)

    def _repeat(self, node: OnnxNode, operands: Sequence[Any], execute: Execute) -> list[Any]:
        try:
            return CONTROL[node.operator](node, operands, execute, _numbers)
        except CaptureError as error:
            if str(error).startswith(f"{self.model.source}: "):
                raise  # it names a node of the body
            raise CaptureError(f"{self.model.source}: node '{node.name}' ({node.operator}): {error}") from error

    def _call(self, node: OnnxNode, operands: Sequence[Any]) -> NodeCall:
        return NodeCall(
            node=node,
            operands=operands,
            known=[_numbers(value) for value in operands],
            dtypes=self.dtypes,
            opset=self.model.opset,
            training=self.training,
        )

    def _run(self, node: OnnxNode, operands: Sequence[Any]) -> tuple[Any, ...]:
        call = self._call(node, operands)
        with _one_line(self.model.source, call):
            operator = self._operators.get(node.operator if node.operator in OPERATORS else node.outputs[0])
            if operator is None:
                raise CaptureError("it is not known: export the model with ONNX's own operators")
            result = self._known(operator, call)
            if result is None:
                result = self._scopes[node.module](partial(operator, call)) if node.module else operator(call)
        return tuple(result) if isinstance(result, tuple | list) else (result,)

    def _known(self, operator: Operator, call: NodeCall) -> Any:
        """The result where it follows from constants and shapes and is small; else None."""
        static = call.node.operator in STATIC
        made_up = call.node.operator.startswith(DOMAIN)  # it has shapes and no numbers
        if made_up or (not static and any(v is not None and not _is_known(v) for v in call.operands)):
            return None
        with _disable_current_modes(), torch.no_grad():
            if not static and not self._is_small(operator, call):
                return None
            return operator(call)

    def _is_small(self, operator: Operator, call: NodeCall) -> bool:
        """Runs it on shapes alone first: two small operands may broadcast to a huge result."""
        with self._shapes:
            fakes = [_map(self._shapes.from_tensor, value) for value in call.operands]
            trial = NodeCall(
                node=call.node,
                operands=fakes,
                known=call.known,
                dtypes=call.dtypes,
                opset=call.opset,
                training=call.training,
            )
            return sum(t.numel() for t in _tensors(operator(trial))) <= MAX_KNOWN


class _one_line:
    """Names the node in what goes wrong in it."""

    def __init__(self, source: str, call: NodeCall) -> None:
        self.source, self.call = source, call

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or not isinstance(error, Exception) or isinstance(error, MemoryError):
            return
        node = self.call.node
        where = f"{self.source}: node '{node.name}' ({node.operator})"
        if isinstance(error, EchoError):
            raise CaptureError(f"{where}: {error}") from error
        raise CaptureError(
            f"{where} does not take {shapes(self.call.operands) or 'nothing'}: {reason(error)}: "
            "check the sizes, or export the model again"
        ) from error


def _operators(model: OnnxModel, dtypes: DTypes) -> Iterator[tuple[str, Operator]]:
    """Operators by type; those of echograph's own domain by the first value that they make."""
    unknown = [
        n for n in model.nodes if not (n.bodies or n.operator in OPERATORS or n.operator.startswith(DOMAIN))
    ]
    if unknown:
        shown = ", ".join(f"'{n.name}' ({n.operator})" for n in unknown[:_SHOWN])
        count = f", ... ({len(unknown)} in all)" if len(unknown) > _SHOWN else ""
        why = "".join(
            f"; {name} {UNKNOWN[name]}" for name in {n.operator: None for n in unknown} if name in UNKNOWN
        )
        raise CaptureError(
            f"{model.source}: nodes with operators that are not known: {shown}{count}{why}: export the model with "
            "others of ONNX's own operators"
        )
    for node in all_nodes(model.nodes):
        if node.operator in OPERATORS:
            yield node.operator, OPERATORS[node.operator]
        elif node.operator.startswith(DOMAIN):
            yield node.outputs[0], opaque(node, model, dtypes)


def _is_known(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_known(item) for item in value)
    return isinstance(value, Tensor) and not isinstance(value, FakeTensor)


def _numbers(value: Any) -> np.ndarray[Any, Any] | None:
    if not isinstance(value, Tensor) or not _is_known(value):
        return None
    with _disable_current_modes():
        plain = value.float() if value.dtype.is_floating_point and value.dtype != torch.float64 else value
        numbers: np.ndarray[Any, Any] = plain.numpy()
    return numbers


def _map(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, list):
        return [_map(function, item) for item in value]
    return function(value) if isinstance(value, Tensor) else value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, Tensor):
        yield value
