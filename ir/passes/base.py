"""What a pass is, and how passes run: one after the other, verified in between, written down in the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol, TypeVar, get_args, get_type_hints, overload, runtime_checkable

from echograph.errors import PlanError
from echograph.ir.graph import Graph, JobGraph, StepGraph
from echograph.ir.passes.spec import pass_text
from echograph.ir.verify import verify as check

Note = Callable[[str], object]
"""Told what a pass could not do, one line each."""
G = TypeVar("G", bound=Graph)
_LEVELS = {StepGraph: "a step graph", JobGraph: "a job graph"}


class Pass(Protocol):
    """Graph in, graph out: a frozen dataclass whose fields are its options.

    The annotations of `__call__` say whether it takes, and leaves, a step or a job.

    Attributes:
        name: its word in lists of passes; that of `PASSES` where it stands there.
    """

    name: ClassVar[str]

    def __call__(self, graph: Any, /) -> Any:
        """The graph transformed; the one given stays as it is."""
        ...


@runtime_checkable
class NotingPass(Pass, Protocol):
    """A pass that can say what it could not do."""

    def with_notes(self, graph: Any, /) -> tuple[Any, Sequence[str]]:
        """What `__call__` returns, and one line for each note."""
        ...


@overload
def run(
    graph: Graph, passes: Iterable[Pass], *, to: None = None, verify: bool = True, note: Note | None = None
) -> StepGraph | JobGraph: ...
@overload
def run(
    graph: Graph, passes: Iterable[Pass], *, to: type[G], verify: bool = True, note: Note | None = None
) -> G: ...
def run(
    graph: Graph,
    passes: Iterable[Pass],
    *,
    to: type[Graph] | None = None,
    verify: bool = True,
    note: Note | None = None,
) -> Graph:
    """Applies passes in order; `Graph.passes` of the result lists them with their options.

    Args:
        graph: a step or a job.
        passes: what to apply.
        to: the level that they have to leave; None: either.
        verify: check every invariant after each of them. `GraphBuilder.build` has done so already for passes that
            use it.
        note: told what passes could not do.

    Raises:
        PlanError: a pass does not fit the graph, or the level that the ones before it left.
        GraphError: a pass left a graph that breaks an invariant.
    """
    for one in passes:
        _check_level(one, graph)
        if note is not None and isinstance(one, NotingPass):
            made, lines = one.with_notes(graph)
            for line in lines:
                note(line)
        else:
            made = one(graph)
        if not isinstance(made, Graph):
            raise PlanError(f"pass {one.name}: returned {type(made).__name__}: it has to return the graph")
        graph = replace(made, passes=(*graph.passes, pass_text(one)))
        if verify:
            check(graph)
    if to is JobGraph and not isinstance(graph, to):
        raise PlanError("the passes leave a step graph: end them with one such as data_parallel{replicas=8}")
    if to is StepGraph and not isinstance(graph, to):
        raise PlanError("the passes leave a job graph: leave out pipeline, data_parallel and fully_shard")
    return graph


def split_at_job(passes: Sequence[Pass]) -> tuple[tuple[Pass, ...], tuple[Pass, ...]]:
    """The passes that leave a step a step, and those from the first on that makes a job of it."""
    jobs = [at for at, one in enumerate(passes) if _levels(one, "return") == {JobGraph}]
    first = jobs[0] if jobs else len(passes)
    return tuple(passes[:first]), tuple(passes[first:])


def _check_level(one: Pass, graph: Graph) -> None:
    takes = _levels(one, "graph")
    if type(graph) in takes:
        return
    where = (
        "put it before the pass that makes a job of the step"
        if takes == {StepGraph}
        else "put pipeline, data_parallel or fully_shard before it"
    )
    raise PlanError(f"pass {one.name}: takes {_LEVELS[takes.pop()]}, and has {_LEVELS[type(graph)]} here: {where}")


def _levels(one: Pass, what: str) -> set[type[Graph]]:
    """The kinds of graph that a pass says it takes ("graph") or leaves ("return"); both where it does not say."""
    hint = get_type_hints(type(one).__call__).get(what, Graph)
    kinds = get_args(hint) or (hint.__bound__ if isinstance(hint, TypeVar) else hint,)
    return {level for level in _LEVELS if any(issubclass(level, kind) for kind in kinds)}
