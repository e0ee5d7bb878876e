"""The graph of one step's dependencies: FW., BW., Comm. and STEP nodes, as ByteProfile lays it out.

    I/O -> FW.<operator> -> ... -> OUTPUT<k> -> BW.<operator> -> ... -> Comm.<gradients> -> STEP -> Comm.<...>

Operators follow autograd's graph exactly. A reduction of gradients follows the operators that make them. What
else is communicated is placed where it was issued: in the forward pass between the operators made before and after
it, in the backward pass behind the one that was running, or before it where that one is a function that
communicates. ByteProfile closes the circle from STEP to the next step's FW nodes; here it stays open.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from echograph.ir.files import write_whole
from echograph.profiler.record.folder import DAG
from echograph.profiler.record.operators import Communication, Operator, StepObserver

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


def _operator_edges(observer: StepObserver, names: dict[Operator, str]) -> Iterator[tuple[str, str]]:
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
    observer: StepObserver, names: dict[Operator, str], one: Communication, name: str
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


def _around(operators: list[Operator], order: int) -> tuple[Operator | None, Operator | None]:
    before = [operator for operator in operators if operator.order < order]
    after = [operator for operator in operators if operator.order >= order]
    return (before[-1] if before else None), (after[0] if after else None)


def _called(communications: list[Communication]) -> dict[Communication, str]:
    """`Comm.<id>+<id>` for gradients, whose ids are lines of the list of names, else operation and place."""
    seen: Counter[str] = Counter()
    names = {}
    for position, one in enumerate(communications):
        name = "+".join(map(str, sorted(one.gradients))) or f"{one.call.kind.op}.{position}"
        count = seen[name]
        seen[name] += 1
        names[one] = f"Comm.{name}_{count}" if count else f"Comm.{name}"
    return names


def _distinct(operators: list[Operator]) -> dict[Operator, str]:
    """A name for each: the n-th further one of a name gets `_n`."""
    seen: Counter[str] = Counter()
    names = {}
    for operator in operators:
        count = seen[operator.name]
        seen[operator.name] += 1
        names[operator] = f"{operator.name}_{count}" if count else operator.name
    return names
