"""An ONNX model as a PyTorch module on fake tensors: a tree of scopes that owns the weights and runs the nodes.

Every node runs within the scope of the module that it stood in, so a recorder's hooks see the paths of the
original model. What follows from constants and shapes is computed with real numbers, outside of the recording:
shape arithmetic is the exporter's, not the device's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from echograph.errors import CaptureError, EchoError
from echograph.frontend.onnx.call import Call, Operator, shapes
from echograph.frontend.onnx.control import CONTROL, Execute, choose
from echograph.frontend.onnx.dtypes import DTypes
from echograph.frontend.onnx.model import MAX_KNOWN, Body, Node, OnnxModel, all_nodes
from echograph.frontend.onnx.opaque import DOMAIN, opaque
from echograph.frontend.onnx.operators import OPERATORS, UNKNOWN
from echograph.frontend.onnx.operators.shape import STATIC
from echograph.frontend.pytorch.blame import reason

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

    def _execute(self, nodes: Iterable[Node], values: dict[str, Any]) -> None:
        for node in nodes:
            self._read.update(node.inputs)
            operands = [self._value(node, name, values) for name in node.inputs]
            results = self._flow(node, operands, values) if node.bodies else self._run(node, operands)
            values.update(zip(node.outputs, results, strict=False))

    def _value(self, node: Node, name: str, values: dict[str, Any]) -> Any:
        """What a node reads; a result that its maker's kernel does not have is nobody's operand."""
        value = values.get(name)
        if value is None and name:
            raise CaptureError(
                f"{self.model.source}: node '{node.name}' ({node.operator}) reads '{name}', a result that "
                "no kernel makes: export the model again"
            )
        return value

    def _flow(self, node: Node, operands: Sequence[Any], values: dict[str, Any]) -> Sequence[Any]:
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

    def _repeat(self, node: Node, operands: Sequence[Any], execute: Execute) -> list[Any]:
        try:
            return CONTROL[node.operator](node, operands, execute, _numbers)
        except CaptureError as error:
            if str(error).startswith(f"{self.model.source}: "):
                raise  # it names a node of the body
            raise CaptureError(f"{self.model.source}: node '{node.name}' ({node.operator}): {error}") from error

    def _call(self, node: Node, operands: Sequence[Any]) -> Call:
        return Call(
            node=node,
            operands=operands,
            known=[_numbers(value) for value in operands],
            dtypes=self.dtypes,
            opset=self.model.opset,
            training=self.training,
        )

    def _run(self, node: Node, operands: Sequence[Any]) -> tuple[Any, ...]:
        call = self._call(node, operands)
        with _one_line(self.model.source, call):
            operator = self._operators.get(node.operator if node.operator in OPERATORS else node.outputs[0])
            if operator is None:
                raise CaptureError("it is not known: export the model with ONNX's own operators")
            result = self._known(operator, call)
            if result is None:
                result = self._scopes[node.module](partial(operator, call)) if node.module else operator(call)
        return tuple(result) if isinstance(result, tuple | list) else (result,)

    def _known(self, operator: Operator, call: Call) -> Any:
        """The result where it follows from constants and shapes and is small; else None."""
        static = call.node.operator in STATIC
        made_up = call.node.operator.startswith(DOMAIN)  # it has shapes and no numbers
        if made_up or (not static and any(v is not None and not _is_known(v) for v in call.operands)):
            return None
        with _disable_current_modes(), torch.no_grad():
            if not static and not self._is_small(operator, call):
                return None
            return operator(call)

    def _is_small(self, operator: Operator, call: Call) -> bool:
        """Runs it on shapes alone first: two small operands may broadcast to a huge result."""
        with self._shapes:
            fakes = [_map(self._shapes.from_tensor, value) for value in call.operands]
            trial = Call(
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

    def __init__(self, source: str, call: Call) -> None:
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
