"""What runs in one training step, seen from outside: operators by autograd, modules by hooks, calls by the tracer.

A node of autograd's graph is an operator of the forward pass, and is what runs for it in the backward pass.
Nodes are found from the inputs and outputs of modules; each belongs to the innermost module that had been entered
when it was made. Hooks look only, and for one step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from echograph.profiler.comms.call import TracedCall

_GRADIENT = re.compile(r"Backward\d*$")
_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module"}
# FSDP2 reduces gradients in the backward of a function that stands at its modules' inputs.
_REDUCES = "RegisterPostBackwardFunction"


@dataclass(slots=True, eq=False)
class ObservedOperator:
    """A node of autograd's graph.

    Attributes:
        name: module path and kind, `h.0.attn.c_attn.Addmm`.
        order: when it was made, a number that rises.
        python: whether it is a function written in Python, which may communicate itself.
        inputs: operators whose outputs it takes.
        gradients: parameters whose gradients come from it.
    """

    name: str
    order: int
    python: bool
    inputs: list[ObservedOperator] = field(default_factory=list)
    gradients: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class ObservedCommunication:
    """A call, and where it was made.

    Attributes:
        call: as the tracer knows it.
        phase: forward, backward or optimizer.
        order: operators made before it are below this.
        during: the operator whose backward made it.
        for_gradients: whether it was made where gradients are accumulated, or after all of them.
        gradients: parameters whose gradients were ready then, and in no reduction yet.
    """

    call: TracedCall
    phase: str
    order: int
    during: ObservedOperator | None
    for_gradients: bool
    gradients: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Parameter:
    """A parameter that got a gradient, or could.

    Attributes:
        name: path in the model.
        elements: number of them, of the whole parameter.
    """

    name: str
    elements: int


class StepObserver:
    """Looks at one step.

    Attributes:
        operators: in the order in which they were made, once the step is over.
        communications: in the order in which they were issued.
        parameters: of all models that ran, in their order; operators refer to places here.
    """

    def __init__(self) -> None:
        self.operators: list[ObservedOperator] = []
        self.communications: list[ObservedCommunication] = []
        self.parameters: list[Parameter] = []
        self.roots: list[Any] = []
        self._known: dict[Any, ObservedOperator] = {}
        self._stack: list[str] = []
        self._paths: dict[int, str] = {}
        self._numbers: dict[int, int] = {}
        self._ready: list[int] = []
        self._backward_began = False
        self._optimizing = False
        self._names: dict[str, int] = {}
        self._restore: list[Callable[[], Any]] = []

    def install(self) -> None:
        """Looks from now on."""
        import torch
        from torch.nn.modules import module
        from torch.optim import optimizer

        self._restore += [
            module.register_module_forward_pre_hook(self._enter).remove,
            module.register_module_forward_hook(self._leave, always_call=True).remove,
            optimizer.register_optimizer_step_pre_hook(self._optimizer_begins).remove,
        ]
        backward = torch.autograd.backward

        def observed(tensors: Any, *arguments: Any, **named: Any) -> Any:
            self._claim(_nodes(tensors), "", None)
            return backward(tensors, *arguments, **named)

        torch.autograd.backward = observed
        self._restore.append(lambda: setattr(torch.autograd, "backward", backward))

    def remove(self) -> None:
        """Stops looking, and lets go of autograd's nodes."""
        while self._restore:
            self._restore.pop()()
        self.operators = sorted(self._known.values(), key=lambda operator: operator.order)
        self._known.clear()

    def issued(self, call: TracedCall) -> None:
        """Told by the capture of collectives, before the call."""
        import torch

        node = torch._C._current_autograd_node()
        in_backward = node is not None or torch._C._current_graph_task_id() != -1
        during = self._known.get(node) if node is not None else None
        reduces = in_backward and (during is None or during.name.rpartition(".")[2] == _REDUCES)
        after = not in_backward and self._backward_began and not self._stack
        phase = "optimizer" if self._optimizing else "backward" if in_backward or after else "forward"
        communication = ObservedCommunication(
            call=call,
            phase=phase,
            order=torch._C._autograd._get_sequence_nr(),
            during=during,
            for_gradients=(reduces or after) and not self._optimizing,
        )
        if communication.for_gradients and _reduces(call.kind.op):
            communication.gradients = self._reduced(_elements(call))
        self.communications.append(communication)

    def refused(self, call: TracedCall) -> None:
        """Told by the capture: there was no such call."""
        self.communications = [other for other in self.communications if other.call is not call]

    def ended(self, call: TracedCall) -> None:
        """Told by the capture."""

    def _reduced(self, elements: int) -> list[int]:
        """The gradients in a buffer: those that fill it, in the order in which they came; else all, padded."""
        sizes = [self.parameters[number].elements for number in self._ready]
        found = next(
            (
                slice(begin, begin + count)
                for begin in range(len(sizes))
                for count, total in enumerate(_sums(sizes[begin:], elements), start=1)
                if total == elements
            ),
            slice(0, len(sizes) if sum(sizes) <= elements else 0),
        )
        gradients = self._ready[found]
        del self._ready[found]
        return gradients

    def _enter(self, module: Any, inputs: Any) -> None:
        if id(module) not in self._paths:
            self._add_root(module)
        self._claim(_nodes(inputs), self._stack[-1] if self._stack else "", None)
        self._stack.append(self._paths[id(module)])

    def _leave(self, module: Any, inputs: Any, output: Any) -> None:
        path = self._paths.get(id(module), "")
        self._claim(_nodes(output), path, module)
        if path in self._stack:
            # An exception may have left deeper modules behind.
            del self._stack[len(self._stack) - 1 - self._stack[::-1].index(path) :]

    def _optimizer_begins(self, *_: Any) -> None:
        self._optimizing = True

    def _add_root(self, root: Any) -> None:
        """A module that no other one called: a model, or a chunk of one."""
        self.roots.append(root)
        skip = _wrapping(root)
        chunk = "" if len(self.roots) == 1 else f"{len(self.roots) - 1}."
        for path, module in root.named_modules():
            self._paths.setdefault(id(module), chunk + path[len(skip) :] if path.startswith(skip) else "")
        for path, parameter in root.named_parameters():
            if parameter.requires_grad:
                self._number(parameter, chunk + path.removeprefix(skip))

    def _number(self, variable: Any, name: str) -> int:
        number = self._numbers.get(id(variable))
        if number is None:
            number = self._names.get(name)
        if number is None:
            number = len(self.parameters)
            whole = getattr(variable, "ds_numel", None)
            elements = variable.numel() if whole is None else whole
            self.parameters.append(Parameter(name=name, elements=elements))
        self._numbers[id(variable)] = self._names[name] = number
        return number

    def _claim(self, nodes: list[Any], path: str, module: Any) -> None:
        """The operators above some tensors that no one has claimed yet belong to this module."""
        added: list[tuple[Any, ObservedOperator]] = []
        while nodes:
            node = nodes.pop()
            if node is None or node in self._known or _accumulates(node):
                continue
            kind = _GRADIENT.sub("", type(node).__name__)
            self._known[node] = operator = ObservedOperator(
                name=f"{path}.{kind}" if path else kind, order=node._sequence_nr(), python=_in_python(node)
            )
            added.append((node, operator))
            nodes.extend(above for above, _ in node.next_functions)
            node.register_prehook(self._begins_backward)
        for node, operator in added:
            for above, _ in node.next_functions:
                if above is None:
                    continue
                if _accumulates(above):
                    operator.gradients.append(self._parameter(above, path, module))
                else:
                    operator.inputs.append(self._known[above])

    def _parameter(self, node: Any, path: str, module: Any) -> int:
        variable = node.variable
        own = {} if module is None else module._parameters
        # A parameter that is gathered for its module's sake is another tensor of the same name.
        name = next((name for name, parameter in own.items() if parameter is variable), None)
        if name is not None:
            number = self._number(variable, f"{path}.{name}" if path else name)
            self.parameters[number].elements = max(self.parameters[number].elements, variable.numel())
        else:
            number = self._numbers.get(id(variable), -1)
            if number < 0:
                number = self._number(variable, f"{path}.leaf{len(self.parameters)}".lstrip("."))

        def ready(gradients: Any) -> None:
            if number not in self._ready:
                self._ready.append(number)

        # These nodes may live as long as the parameter.
        self._restore.append(node.register_prehook(ready).remove)
        return number

    def _begins_backward(self, gradients: Any) -> None:
        self._backward_began = True


def _sums(sizes: list[int], most: int) -> Iterator[int]:
    total = 0
    for size in sizes:
        total += size
        if total > most:
            return
        yield total


def _elements(call: TracedCall) -> int:
    import torch

    dtype = getattr(torch, call.kind.what["dtype"], torch.float32)
    return int(call.kind.what["input_bytes"]) // dtype.itemsize


def _reduces(operation: str) -> bool:
    return "reduce" in operation


def _wrapping(root: Any) -> str:
    """What wrappers put before the paths of a model's own modules."""
    prefix = ""
    while True:
        children = dict(root.named_children())
        if len(children) != 1 or not children.keys() & _WRAPPERS or any(root.parameters(recurse=False)):
            return prefix
        ((name, root),) = children.items()
        prefix += f"{name}."


def _accumulates(node: Any) -> bool:
    return hasattr(node, "variable")


def _in_python(node: Any) -> bool:
    import torch

    return isinstance(node, torch.autograd.function.BackwardCFunction)


def _nodes(tensors: Any) -> list[Any]:
    """The nodes of autograd that tensors come from, wherever they stand in tuples, lists, dictionaries."""
    import torch
    from torch.utils import _pytree as tree

    leaves = [leaf for leaf in tree.tree_leaves(tensors) if isinstance(leaf, torch.Tensor)]
    return [leaf.grad_fn for leaf in leaves if leaf.grad_fn is not None]
