"""An ONNX model as a PyTorch module on fake tensors: a tree of scopes that owns the weights and runs the nodes.

Every node runs within the scope of the module that it stood in, so a recorder's hooks see the paths of the
original model. What follows from constants and shapes is computed with real numbers, outside of the recording:
shape arithmetic is the exporter's, not the device's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from echograph.errors import CaptureError, EchoError
from echograph.frontend.onnx.call import Call, Operator, shapes
from echograph.frontend.onnx.dtypes import DTypes
from echograph.frontend.onnx.model import MAX_KNOWN, Node, OnnxModel
from echograph.frontend.onnx.opaque import DOMAIN, opaque
from echograph.frontend.onnx.operators import OPERATORS
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

    Raises:
        CaptureError: nodes have operators that are not known.
        InputError: a weight has a type that a step graph does not know.
    """

    def __init__(self, model: OnnxModel, dtypes: DTypes) -> None:
        super().__init__()
        self.model = model
        self.dtypes = dtypes
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
        for node in model.nodes:
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
        for node in self.model.nodes:
            results = self._run(node, [values.get(name) for name in node.inputs])
            values.update(zip(node.outputs, results, strict=False))
        own = {value.name for value in self.model.inputs}
        outputs = {name: values.get(name) for name in self.model.outputs}
        return outputs | {name: value for name, value in inputs.items() if name not in own}

    def _run(self, node: Node, operands: Sequence[Any]) -> tuple[Any, ...]:
        operator = self._operators[node.operator if node.operator in OPERATORS else node.outputs[0]]
        call = Call(
            node=node,
            operands=operands,
            known=[_numbers(value) for value in operands],
            dtypes=self.dtypes,
            opset=self.model.opset,
            training=self.training,
        )
        with _one_line(self.model.source, call):
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
    unknown = [n for n in model.nodes if n.operator not in OPERATORS and not n.operator.startswith(DOMAIN)]
    if unknown:
        shown = ", ".join(f"'{n.name}' ({n.operator})" for n in unknown[:_SHOWN])
        count = f", ... ({len(unknown)} in all)" if len(unknown) > _SHOWN else ""
        raise CaptureError(
            f"{model.source}: nodes with operators that are not known: {shown}{count}: export the model with "
            "ONNX's own operators, without control flow or quantisation"
        )
    for node in model.nodes:
        if node.operator in OPERATORS:
            yield node.operator, OPERATORS[node.operator]
        else:
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
