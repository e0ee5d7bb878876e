"""The default producer: writes down each operator as it runs on fake tensors.

A `TorchDispatchMode` sits above `FakeTensorMode`, so it sees exactly the operators that autograd dispatched,
forward and backward, with their fake results. Three sources annotate them:

- the module path: hooks on every module keep a stack of the modules that are running;
- the forward operation of a backward one: autograd gives a node its sequence number when the forward
  operator is dispatched, and tells that number again while the node's backward runs;
- recomputation: gradients are off in a backward pass, and modules do not run, except where a checkpoint
  recomputes.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_impls import fast_detach
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, Node
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from echograph.errors import CaptureError
from echograph.frontend.pytorch import annotate
from echograph.frontend.pytorch.annotate import (
    BACKWARD,
    FORWARD,
    FORWARD_NODE,
    MODULE,
    OPTIMIZER,
    PHASE,
    RECOMPUTE,
    TF32,
    VAL,
)
from echograph.frontend.pytorch.linking import link_recomputed, link_sums
from echograph.frontend.pytorch.rounding import may_round
from echograph.frontend.pytorch.shapes import Shapes
from echograph.frontend.pytorch.step import TrainingStep

_ATEN = torch.ops.aten
_next_sequence_number = torch._C._autograd._get_sequence_nr
_NODE = "_echograph_node"
# They run nothing on a device and make no new value: the result is the argument under another handle.
HANDLES = (_ATEN.detach.default, _ATEN.alias.default, _ATEN.lift_fresh.default, _ATEN.lift.default)
_SILENT_NAMESPACES = ("prim", "profiler")
# Fused attention keeps its random state on "meta" when it is traced.
_DEVICES = ("cpu", "meta")


def record_step(step: TrainingStep, recorder: OperatorRecorder) -> Graph:
    """Runs a training step and returns what it did as an annotated graph (`annotate`).

    Args:
        step: the step, its tensors fake tensors of the recorder's mode.
        recorder: a fresh recorder.

    Raises:
        CaptureError: there is no scalar loss. What the module raises passes through.
    """
    with recorder.following(step), recorder:
        loss = step.forward()
        recorder.phase = BACKWARD
        gradients = step.backward(loss)
        recorder.end_backward(gradients)
        recorder.phase = OPTIMIZER
        step.update(gradients)
    return recorder.graph


class ModelInput(NamedTuple):
    """What is kept of a tensor that a model was given.

    With the tensor its gradient would be kept, and PyTorch copies a gradient that somebody else holds before it
    adds to it.
    """

    shape: tuple[int, ...]
    floating: bool
    attributes: dict[str, Any]

    @classmethod
    def of(cls, tensor: Tensor) -> ModelInput:
        """Of a tensor, whose node may be made later."""
        return cls(tuple(tensor.shape), tensor.is_floating_point(), tensor.__dict__)


class OperatorRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Appends to `graph` a node for each operator dispatched while it is active.

    Attributes:
        graph: what was recorded so far.
        phase: phase of what is recorded next.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = Graph()
        self.phase = FORWARD
        self.creates_graph = False
        self._mode = mode
        self._shapes = Shapes(mode)
        self._stack: list[str] = []
        self._by_sequence: dict[int, Node] = {}
        self._handles: list[Tensor] = []
        self._names: dict[Any, str] = {}
        self._first_call: Node | None = None
        self._constants = 0
        self._failure: tuple[BaseException, str] | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled in a capture: `__torch_dispatch__` needs no guard against that at each call."""
        return False

    def failed_path(self, error: BaseException) -> str | None:
        """Path of the innermost module whose forward raised this exception; None if none did."""
        if self._failure is not None and self._failure[0] is error:
            return self._failure[1]
        # An export does not tell the hooks that a module raised, so its path still stands here.
        return self._stack[-1] if self._stack else None

    def add_placeholder(self, tensor: Tensor, role: str, name: str) -> Node:
        """Declares a tensor that exists before the step; a tensor already known keeps its first name."""
        if (known := self.known(tensor)) is not None:
            return known
        if self._first_call is not None:
            with self.graph.inserting_before(self._first_call):
                node = self.graph.placeholder(name.replace(".", "_"))
        else:
            node = self.graph.placeholder(name.replace(".", "_"))
        node.meta.update({VAL: self._snapshot(tensor), annotate.ROLE: role, annotate.FQN: name})
        tensor.__dict__[_NODE] = node
        self._handles.append(tensor)
        return node

    def end_backward(self, gradients: dict[str, Tensor]) -> None:
        """Marks the parameters' gradients and links what autograd's sequence numbers do not."""
        for name, gradient in gradients.items():
            self.node_of(gradient).meta[annotate.GRADIENT_OF] = name
        link_recomputed(self.graph)
        link_sums(self.graph)

    def add_call(self, target: Any, args: Any, kwargs: Any, value: Any, annotations: dict[str, Any]) -> Node:
        """Appends a call node, its arguments nodes already."""
        name = self._names.get(target) or self._names.setdefault(target, self.graph._target_to_str(target))
        # Given arguments, it looks through them for sizes that are symbols, of which there are none.
        node = self.graph.create_node("call_function", target, name=name)
        node.args = args
        if kwargs:
            node.kwargs = kwargs
        if self._first_call is None:
            self._first_call = node
        node.meta.update(annotations)
        if (rounds := may_round(node)) is not None:
            node.meta[TF32] = rounds
        node.meta[VAL] = value
        return node

    def bind(self, tensor: Tensor, node: Node) -> None:
        """Declares that a tensor is the value of a node."""
        tensor.__dict__[_NODE] = node
        self._handles.append(tensor)

    @contextmanager
    def following(self, step: TrainingStep) -> Iterator[None]:
        """In the context, `step`'s tensors are the graph's placeholders and its modules tell when they run.

        What runs is recorded where the recorder itself is entered too.
        """
        hooks = []
        for role, name, tensor in step.tensors():
            self.add_placeholder(tensor, role, name)
        for path, module in step.module.named_modules():
            hooks.append(module.register_forward_pre_hook(partial(self._enter, path)))
            hooks.append(module.register_forward_hook(partial(self._leave, path), always_call=True))
        try:
            with self._mode:
                yield
            self.graph.output(None)
        finally:
            for hook in hooks:
                hook.remove()
            for tensor in self._handles:
                tensor.__dict__.pop(_NODE, None)

    def _enter(self, path: str, *_: Any) -> None:
        self._stack.append(path)

    def _leave(self, path: str, *_: Any) -> None:
        error = sys.exc_info()[1]
        if error is not None and (self._failure is None or self._failure[0] is not error):
            self._failure = error, path
        self._stack.pop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace in _SILENT_NAMESPACES:
            return func(*args, **kwargs)
        out = self._shapes.call(func, args, kwargs)
        if func in HANDLES:
            if isinstance(out, FakeTensor):
                self.stands_for(self.node_of(args[0] if isinstance(args[0], FakeTensor) else out), out)
            return out
        self._record(func, args, kwargs, out)
        return out

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        several = isinstance(out, tuple | list)
        values = tuple(self._value(item) for item in out) if several else self._value(out)
        node = self.add_call(func, self._as_nodes(args), self._as_nodes(kwargs), values, {})
        node.meta.update(self._annotations(node))
        if isinstance(out, Tensor):
            self.stands_for(node, out)
        elif several:
            for i, (item, value) in enumerate(zip(out, values, strict=True)):
                if isinstance(item, Tensor):
                    self.stands_for(self.add_call(operator.getitem, (node, i), {}, value, node.meta), item)

    def stands_for(self, node: Node, tensor: Tensor) -> None:
        """A tensor is the value of a node; it is not held, since autograd looks who holds a gradient."""
        tensor.__dict__[_NODE] = node

    def forget(self, tensor: Tensor) -> None:
        """A tensor is no longer the value of the node that it was."""
        tensor.__dict__.pop(_NODE, None)

    def _value(self, item: Any) -> Any:
        return self._snapshot(item) if isinstance(item, Tensor) else item

    def _annotations(self, node: Node) -> dict[str, Any]:
        if self.phase == OPTIMIZER:
            return {PHASE: OPTIMIZER, MODULE: ""}
        if self.phase == BACKWARD:
            return self._backward_annotations(node)
        self._number(node)
        return {PHASE: FORWARD, MODULE: self._stack[-1] if self._stack else ""}

    def _number(self, node: Node) -> None:
        # Autograd numbered its node for this operator just before it dispatched it. An operator that needs
        # no gradient sees the number of the one before, which is taken already.
        self._by_sequence.setdefault(_next_sequence_number() - 1, node)

    def _numbered(self, number: int, recomputes: bool) -> Node | None:
        """The forward operation of a number; of a checkpoint that recomputes, the first one that it ran."""
        if recomputes and number not in self._by_sequence:
            # What it ran first may have a number of its own: autocast's cast of a weight.
            later = min((known for known in self._by_sequence if known > number), default=number)
            if later in self._by_sequence:
                self._by_sequence[number] = self._by_sequence[later]
        return self._by_sequence.get(number)

    def _backward_annotations(self, node: Node) -> dict[str, Any]:
        current = torch._C._current_autograd_node()
        runs_again = bool(self._stack) or (torch.is_grad_enabled() and not self.creates_graph)
        recomputes = current is not None and runs_again
        forward = None if current is None else self._numbered(current._sequence_nr(), recomputes)
        link = {} if forward is None else {FORWARD_NODE: forward.name}
        if recomputes:
            self._number(node)
            return {PHASE: RECOMPUTE, MODULE: self._stack[-1] if self._stack else "", **link}
        if self.creates_graph and forward is not None:
            self._number(forward)  # what differentiates this in turn is of the same forward operation
        return {PHASE: BACKWARD, MODULE: "" if forward is None else forward.meta[MODULE], **link}

    def _as_nodes(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.node_of(value)
        if isinstance(value, tuple | list):
            return type(value)([self._as_nodes(v) for v in value])
        if isinstance(value, dict):
            return {k: self._as_nodes(v) for k, v in value.items()}
        if isinstance(value, torch.Generator):
            return None
        return value

    def known(self, tensor: Tensor | ModelInput) -> Node | None:
        """The node that stands for a tensor, if there is one."""
        node: Node | None = (tensor.attributes if isinstance(tensor, ModelInput) else tensor.__dict__).get(_NODE)
        return node if node is not None and node.graph is self.graph else None

    def node_of(self, tensor: Tensor) -> Node:
        """The node that made a tensor; one that is not known becomes a placeholder."""
        return self.known(tensor) or self.unknown(tensor)

    def unknown(self, tensor: Tensor) -> Node:
        """A node for a tensor that no operation made and that nobody declared: a constant of the model."""
        self._constants += 1
        node = self.add_placeholder(tensor, annotate.BUFFER, f"constant_{self._constants}")
        known = getattr(tensor, "constant", None)
        if known is not None and known.numel() == 1:
            with _disable_current_modes():
                node.meta[annotate.NUMBER] = known.item()
        return node

    def _snapshot(self, tensor: Tensor) -> Tensor:
        """The tensor under a handle of its own: autograd clones a gradient that someone else holds."""
        fake = tensor if isinstance(tensor, FakeTensor) else self._mode.from_tensor(tensor)
        if fake.device.type not in _DEVICES:
            raise CaptureError(
                f"a tensor was made on '{fake.device}': let the model make its tensors on the device of its "
                "inputs; the captured operators stand for the GPU's"
            )
        return fast_detach(self._mode, fake)
