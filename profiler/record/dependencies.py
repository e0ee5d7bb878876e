"""The graph of one step's dependencies: FW., BW., Comm. and STEP nodes, as ByteProfile lays it out.

    I/O -> FW.<operator> -> ... -> OUTPUT<k> -> BW.<operator> -> ... -> Comm.<gradients> -> STEP -> Comm.<...>

What runs in the step is seen from outside: operators by autograd, modules by hooks, calls by the tracer. A node
of autograd's graph is an operator of the forward pass, and is what runs for it in the backward pass. Nodes are
found from the inputs and outputs of modules; each belongs to the innermost module that had been entered when it
was made. Hooks look only, and for one step.

Operators follow autograd's graph exactly. A reduction of gradients follows the operators that make them. What
else is communicated is placed where it was issued: in the forward pass between the operators made before and
after it, in the backward pass behind the one that was running, or before it where that one is a function that
communicates. ByteProfile closes the circle from STEP to the next step's FW nodes; here it stays open.

Autograd numbers its nodes as they are made, and the profiler writes that number at the operator that makes a node
and at its backward. A step's numbers are those of the observed step shifted by one offset, which the kinds of
nodes tell. A node takes the time that operators with its number took themselves, so that nested ones do not count
twice; on a device, that of the kernels they launched.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from echograph.errors import DataError
from echograph.ir.comms.record import NativeSource
from echograph.ir.files import write_whole
from echograph.profiler.comms.call import TracedCall
from echograph.profiler.record.folder import COMMS, DAG, TRACE
from echograph.profiler.traces.kineto import read_trace
from echograph.profiler.traces.relations import launches
from echograph.profiler.traces.trace import NONE, OPERATORS, Trace
from echograph.units import PS_PER_US

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
    return int(call.kind.what["input_bytes"]) // int(dtype.itemsize)


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


STEP = "STEP"


def write_dependencies(observer: StepObserver, folder: Path) -> None:
    """Writes `dag.gml`, and `gradient_name_list.txt`, a name a line.

    Args:
        observer: has looked at a step.
        folder: of the rank.

    Raises:
        OutputError: the folder cannot be written to.
    """
    from networkx import generate_gml

    graph = dependencies(observer)
    write_whole(folder / DAG, (line + "\n" for line in generate_gml(graph)))
    names = (f"{parameter.name}\n" for parameter in observer.parameters)
    write_whole(folder / "gradient_name_list.txt", names)


def dependencies(observer: StepObserver) -> Any:
    """The graph, a `networkx.DiGraph`.

    Nodes have `op`, the part of their name before the first point; operators `order`, autograd's number of them.
    """
    from networkx import DiGraph

    graph: Any = DiGraph()
    names = _distinct(observer.operators)
    for operator in observer.operators:
        for phase in ("FW", "BW"):
            graph.add_node(f"{phase}.{names[operator]}", op=phase, order=operator.order)
    graph.add_node(STEP, op=STEP)
    communications = _called(observer.communications)
    for one, name in communications.items():
        kind = one.call.kind
        graph.add_node(
            name, op="Comm", kind=kind.op, group=kind.group, channel=kind.channel, bytes=kind.bytes,
            sequence=one.call.sequence, phase=one.phase,
        )  # fmt: skip
    for tail, head in _operator_edges(observer, names):
        for end in (tail, head):
            if end not in graph:
                graph.add_node(end, op=end.rstrip("0123456789"))
        graph.add_edge(tail, head)
    for one, name in communications.items():
        graph.add_edges_from(_communication_edges(observer, names, one, name))
    reduced = {number for one in communications for number in one.gradients}
    for operator in observer.operators:
        if set(operator.gradients) - reduced:
            graph.add_edge(f"BW.{names[operator]}", STEP)
    for node, data in list(graph.nodes(data=True)):
        if data["op"] in ("BW", "Comm") and data.get("phase") != "optimizer" and not graph.out_degree(node):
            graph.add_edge(node, STEP)
    return graph


def _operator_edges(observer: StepObserver, names: dict[ObservedOperator, str]) -> Iterator[tuple[str, str]]:
    consumed = {taken for operator in observer.operators for taken in operator.inputs}
    outputs = 0
    for operator in observer.operators:
        name = names[operator]
        if not operator.inputs:
            yield "I/O", f"FW.{name}"
        for taken in operator.inputs:
            yield f"FW.{names[taken]}", f"FW.{name}"
            yield f"BW.{name}", f"BW.{names[taken]}"
        if operator not in consumed:
            yield f"FW.{name}", f"OUTPUT{outputs}"
            yield f"OUTPUT{outputs}", f"BW.{name}"
            outputs += 1


def _communication_edges(
    observer: StepObserver, names: dict[ObservedOperator, str], one: ObservedCommunication, name: str
) -> Iterator[tuple[str, str]]:
    if one.phase == "optimizer":
        yield STEP, name
    elif one.gradients:
        wanted = set(one.gradients)
        for operator in observer.operators:
            if wanted & set(operator.gradients):
                yield f"BW.{names[operator]}", name
        yield name, STEP
    elif one.phase == "forward":
        before, after = _around(observer.operators, one.order)
        if before is not None and before.python:
            # A function is made before its forward runs: the call is part of it.
            yield from ((f"FW.{names[taken]}", name) for taken in before.inputs)
            yield name, f"FW.{names[before]}"
        else:
            if before is not None:
                yield f"FW.{names[before]}", name
            if after is not None:
                yield name, f"FW.{names[after]}"
    elif one.during is not None and one.during in names:
        running = one.during
        if running.python:
            yield from ((f"BW.{names[user]}", name) for user in observer.operators if running in user.inputs)
            yield name, f"BW.{names[running]}"
        else:
            yield f"BW.{names[running]}", name
            yield from ((name, f"BW.{names[taken]}") for taken in running.inputs)
    else:
        yield name, STEP


def _around(
    operators: list[ObservedOperator], order: int
) -> tuple[ObservedOperator | None, ObservedOperator | None]:
    before = [operator for operator in operators if operator.order < order]
    after = [operator for operator in operators if operator.order >= order]
    return (before[-1] if before else None), (after[0] if after else None)


def _called(communications: list[ObservedCommunication]) -> dict[ObservedCommunication, str]:
    """`Comm.<id>+<id>` for gradients, whose ids are lines of the list of names, else operation and place."""
    seen: Counter[str] = Counter()
    names = {}
    for position, one in enumerate(communications):
        name = "+".join(map(str, sorted(one.gradients))) or f"{one.call.kind.op}.{position}"
        count = seen[name]
        seen[name] += 1
        names[one] = f"Comm.{name}_{count}" if count else f"Comm.{name}"
    return names


def _distinct(operators: list[ObservedOperator]) -> dict[ObservedOperator, str]:
    """A name for each: the n-th further one of a name gets `_n`."""
    seen: Counter[str] = Counter()
    names = {}
    for operator in operators:
        count = seen[operator.name]
        seen[operator.name] += 1
        names[operator] = f"{operator.name}_{count}" if count else operator.name
    return names


TIMED = frozenset({"FW", "BW", "Comm", "STEP"})
_EVALUATES = "autograd::engine::evaluate_function: "
_ACCUMULATES = f"{_EVALUATES}torch::autograd::AccumulateGrad"
_OUTERMOST = "Optimizer.step#outermost"
_STEP = "ProfilerStep#"
_GRADIENT, _FURTHER = re.compile(r"Backward\d*$"), re.compile(r"_\d+$")
_NS_PER_US = 1000


class Owner(NamedTuple):
    """Whose time it is: phase as in `op` of nodes, and autograd's number (-1 of the update)."""

    phase: str
    number: int


_UPDATE = Owner("STEP", NONE)
# A step: picoseconds of each owner, and the kind of each number whose backward ran.
_OwnerTimes: TypeAlias = dict[Owner, int]
_NodeKinds: TypeAlias = dict[int, str]


def add_durations(folder: Path) -> str:
    """Gives the nodes of `dag.gml` the attribute `avg`: microseconds, the mean over the window's steps.

    Args:
        folder: of a rank whose window is over.

    Returns:
        What could not be timed, in a line, or "".

    Raises:
        InputError: a file cannot be read.
        DataError: the trace is broken, or marks no steps.
        OutputError: the folder cannot be written to.
    """
    from networkx import generate_gml, read_gml

    graph: Any = read_gml(folder / DAG)
    trace = read_trace(folder / TRACE)
    begins = np.sort(trace.start[_marks(trace)])
    if not len(begins):
        raise DataError(f"{folder / TRACE}: marks no steps: the times of {DAG} are not known")
    averages = dict(_averages(graph, list(_steps(trace, begins))))
    averages |= _communicated(graph, folder / COMMS, len(begins))
    for node, average in averages.items():
        graph.nodes[node]["avg"] = average
    write_whole(folder / DAG, (line + "\n" for line in generate_gml(graph)))
    timed = [node for node, op in graph.nodes(data="op") if op in TIMED]
    # What was made, and whose backward nothing asked for, took no time.
    idle = {f"BW{node[2:]}" for node in averages if node.startswith("FW.")}
    missing = [node for node in timed if node not in averages and node not in idle]
    if not missing:
        return ""
    return (
        f"{DAG}: {len(missing)} of {len(timed)} nodes have no time (avg), '{missing[0]}' first: not in the trace"
    )


def _averages(graph: Any, steps: list[tuple[_OwnerTimes, _NodeKinds]]) -> Iterator[tuple[str, float]]:
    """Of operators and the update; the mean over the steps in which they were found."""
    numbers = {name: order for name, order in graph.nodes(data="order") if order is not None}
    seen = Counter((name[:2], order) for name, order in numbers.items())
    # Two threads that make nodes number them alike; which is which nobody knows.
    numbers = {name: order for name, order in numbers.items() if seen[name[:2], order] == 1}
    found: dict[str, list[int]] = defaultdict(list)
    for times, kinds in steps:
        if _UPDATE in times and "STEP" in graph:
            found["STEP"].append(times[_UPDATE])
        offset = _offset(numbers, kinds)
        for name, order in numbers.items() if offset is not None else ():
            owner = Owner(name[:2], order + offset)
            if owner in times and kinds.get(owner.number) in (None, *_kinds_of(name)):
                found[name].append(times[owner])
    for name, taken in found.items():
        yield name, sum(taken) / len(taken) / PS_PER_US


def _offset(numbers: Mapping[str, int], kinds: _NodeKinds) -> int | None:
    """What a step's numbers are ahead of the observed step's: where most kinds agree."""
    places: dict[str, list[int]] = defaultdict(list)
    at: dict[int, tuple[str, ...]] = {}
    for name, order in numbers.items():
        if name.startswith("BW."):
            at[order] = _kinds_of(name)
            for kind in at[order]:
                places[kind].append(order)
    ran: dict[str, list[int]] = defaultdict(list)
    for number, kind in kinds.items():
        ran[kind].append(number)
    common = [kind for kind in ran if kind in places]
    if not common:
        return None
    rarest = min(common, key=lambda kind: len(ran[kind]) * len(places[kind]))
    offsets = {number - order for number in ran[rarest] for order in places[rarest]}
    agreeing = {
        offset: sum(kind in at.get(number - offset, ()) for number, kind in kinds.items()) for offset in offsets
    }
    # Of equals the smallest, so that the answer does not hang on the order of a set.
    return max(sorted(agreeing), key=lambda offset: agreeing[offset])


def _kinds_of(name: str) -> tuple[str, ...]:
    last = name.rpartition(".")[2]
    return tuple(dict.fromkeys((last, _FURTHER.sub("", last))))


def _steps(trace: Trace, begins: Any) -> Iterator[tuple[_OwnerTimes, _NodeKinds]]:
    owners = _owners(trace)
    rows = np.array(sorted(owners), np.int64)
    host = dict(_own_times(trace, rows, owners))
    device = _device_times(trace, owners)
    step = np.searchsorted(begins, trace.start, "right") - 1
    for number in range(len(begins)):
        on_host, on_device, kinds = Counter[Owner](), Counter[Owner](), _NodeKinds()
        for row in rows[step[rows] == number].tolist():
            owner, name = owners[row], trace.text(row)
            on_host[owner] += host[row]
            on_device[owner] += device[row]
            if owner.phase == "BW" and name.startswith(_EVALUATES) and name != _ACCUMULATES:
                kinds[owner.number] = _GRADIENT.sub("", name.removeprefix(_EVALUATES))
        yield {owner: on_device[owner] or time for owner, time in on_host.items()}, kinds


def _marks(trace: Trace) -> Any:
    marks = {text for text in trace.strings if text.startswith(_STEP)}
    return np.flatnonzero(trace.named(marks) & trace.of_category({"user_annotation"}))


def _owners(trace: Trace) -> dict[int, Owner]:
    """Whose each row of the host is, the update's too; one without a number is of the one around it."""
    numbers, forwards = trace.argument("Sequence number"), trace.argument("Fwd thread id")
    trained = set(trace.tid[_marks(trace)].tolist())
    backward = forwards[(forwards > 0) & (numbers >= 0)]
    forward = Counter(backward.tolist()).most_common(1)[0][0] if len(backward) else NONE
    owners: dict[int, Owner] = {}
    accumulating: dict[int, Owner] = {}
    for row, around in _nested(trace):
        tid, number, name = int(trace.tid[row]), int(numbers[row]), trace.text(row)
        owner = owners.get(around)
        if name == _OUTERMOST:
            owner = _UPDATE
        elif name == _ACCUMULATES:
            # It has precedence over all that is ready: it runs right behind what made the gradient.
            owner = accumulating.get(tid)
        elif number >= 0 and forwards[row] == forward:
            owner = Owner("BW", number)
        elif number >= 0 and forwards[row] <= 0 and tid in trained:
            owner = Owner("FW", number)
        if owner is not None:
            owners[row] = owner
            if owner.phase == "BW":
                accumulating[tid] = owner
    return owners


def _nested(trace: Trace) -> Iterator[tuple[int, int]]:
    """Operators and updates, outer ones first, each with the row that it is in, or -1."""
    rows = np.flatnonzero(trace.of_category(OPERATORS) | trace.named({_OUTERMOST}))
    rows = rows[np.lexsort((-trace.duration[rows], trace.start[rows], trace.tid[rows]))]
    end, tid = trace.end, trace.tid
    above: list[int] = []
    for row in rows.tolist():
        while above and (tid[above[-1]] != tid[row] or end[above[-1]] <= trace.start[row]):
            above.pop()
        yield row, above[-1] if above else NONE
        above.append(row)


def _own_times(trace: Trace, rows: Any, owners: Mapping[int, Owner]) -> Iterator[tuple[int, int]]:
    """Picoseconds of each row without those of the rows in it."""
    own = {row: int(trace.duration[row]) for row in rows.tolist()}
    for row, around in _nested(trace):
        if row in owners and around in owners:
            own[around] -= int(trace.duration[row])
    yield from own.items()


def _device_times(trace: Trace, owners: Mapping[int, Owner]) -> Counter[int]:
    """Picoseconds of work on devices that each row launched."""
    launched = launches(trace)
    works = trace.on_device[launched.works]
    row_of = {int(trace.external_id[row]): row for row in owners if trace.external_id[row] >= 0}
    times = Counter[int]()
    for call, work in zip(launched.calls[works].tolist(), launched.works[works].tolist(), strict=True):
        row = row_of.get(int(trace.external_id[call]))
        if row is not None:
            times[row] += int(trace.duration[work])
    return times


def _communicated(graph: Any, file: Path, steps: int) -> dict[str, float]:
    """Microseconds from start to end of each call, where all steps made the calls that the observed one did."""
    nodes: dict[str, dict[int, str]] = defaultdict(dict)
    for name, data in graph.nodes(data=True):
        if data.get("op") == "Comm":
            nodes[data["channel"]][data["sequence"]] = name
    if not nodes or not file.exists():
        return {}
    source = NativeSource(file)
    source.open()
    calls: dict[str, dict[int, tuple[int, int]]] = defaultdict(dict)
    for rows in source.rows():
        for number, sequence, _, start, end, _ in rows.tolist():
            what = source.signatures[number]
            if what is not None:
                # One that stands twice had not ended when it was first written.
                calls[what.channel][sequence] = start, end
    averages = {}
    for channel, of in nodes.items():
        made = calls[channel]
        if set(made) != set(range(len(of) * steps)) or set(of) != set(range(len(of))):
            continue
        for place, name in of.items():
            spans = [made[step * len(of) + place] for step in range(steps)]
            if all(0 <= start <= end for start, end in spans):
                averages[name] = sum(end - start for start, end in spans) / steps / _NS_PER_US
    return averages
