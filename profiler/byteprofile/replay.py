"""Runs a composed graph: each node as soon as all it waits for has ended; step after step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from echograph.errors import UnknownNameError, UsageError
from echograph.profiler.analyses.table import Table, from_rows
from echograph.profiler.byteprofile.dag import SHARED, Dag, LongestPath
from echograph.profiler.byteprofile.names import COMMUNICATION, COMPUTATION, UPDATES
from echograph.units import PS_PER_MS, PS_PER_US

COMMUNICATIONS, COMPUTATIONS, EACH = "communication", "computation", "each:"
Durations = Mapping[str, int]


class Change(NamedTuple):
    """A what-if: time becomes (time + added) x ratio.

    Attributes:
        ratio: factor.
        added: picoseconds.
    """

    ratio: float
    added: int

    def of(self, duration: int) -> int:
        """The changed duration, never below 0."""
        return max(0, round((duration + self.added) * self.ratio))


class Replay(NamedTuple):
    """What ran when.

    Attributes:
        dag: what ran.
        durations: picoseconds that each node took.
        starts: for each step, picoseconds at which each node started.
        ends: for each step, picoseconds at which each GPU had ended it.
    """

    dag: Dag
    durations: Durations
    starts: tuple[Mapping[str, int], ...]
    ends: tuple[Mapping[int, int], ...]

    @property
    def makespan(self) -> int:
        """Picoseconds until the last GPU had ended the last step."""
        return max(self.ends[-1].values(), default=0)

    @property
    def step(self) -> float:
        """Picoseconds of a step, on average."""
        return self.makespan / len(self.ends)


def replay(dag: Dag, *, steps: int = 1, durations: Durations | None = None) -> Replay:
    """Runs a graph.

    A GPU starts a step when it has ended all of its own nodes of the step before. Nothing but dependencies holds a
    node up.

    Args:
        dag: of all GPUs.
        steps: how often.
        durations: picoseconds of nodes that take other times than the graph says.

    Raises:
        UsageError: fewer than one step.
        DataError: the dependencies run in a circle.
    """
    if steps < 1:
        raise UsageError(f"--step-num {steps}: give 1 or more")
    order = dag.order()
    taken = {name: node.duration for name, node in dag.nodes.items()} | dict(durations or {})
    begin: dict[int, int] = {}
    all_starts, all_ends = [], []
    for _ in range(steps):
        starts: dict[str, int] = {}
        over: dict[int, int] = dict(begin)
        for name in order:
            gpu = dag.nodes[name].gpu
            ready = (starts[before] + taken[before] for before in dag.waits.get(name, ()))
            starts[name] = max((begin.get(gpu, 0), *ready))
            if gpu != SHARED:
                over[gpu] = max(over.get(gpu, 0), starts[name] + taken[name])
        begin = over
        all_starts.append(starts)
        all_ends.append(over)
    return Replay(dag, taken, tuple(all_starts), tuple(all_ends))


def step_table(found: Replay, names: Mapping[int, str]) -> Table:
    """One row a step and GPU: when it `start_ms`ed and `end_ms`ed on it, and `step_ms` between the two.

    Args:
        found: a replay.
        names: of the GPUs.
    """
    rows = []
    before: Mapping[int, int] = {}
    for number, ends in enumerate(found.ends):
        for gpu, end in sorted(ends.items()):
            start = before.get(gpu, 0)
            rows.append((number, names[gpu], *(x / PS_PER_MS for x in (start, end, end - start))))
        before = ends
    return from_rows(("step", "gpu", "start_ms", "end_ms", "step_ms"), rows)


def delayed(dag: Dag, what: str, change: Change) -> dict[str, int]:
    """Durations if communication, computation or one node took another time.

    Computation is forward, backward and the update.

    Args:
        dag: the graph.
        what: `communication`, `computation` or a node's name.
        change: of each of them.

    Raises:
        UnknownNameError: it is none of these.
    """
    categories = {COMMUNICATIONS: {COMMUNICATION}, COMPUTATIONS: COMPUTATION | UPDATES}
    if what in categories:
        chosen = [
            name
            for name, node in dag.nodes.items()
            if node.category in categories[what] and (node.gpu != SHARED or node.duration)
        ]
    elif what in dag.nodes:
        chosen = [what]
    else:
        raise UnknownNameError("node", what, (COMMUNICATIONS, COMPUTATIONS, f"{EACH}N", *dag.nodes))
    return {name: change.of(dag.nodes[name].duration) for name in chosen}


def sensitivity(dag: Dag, path: LongestPath, every: int, change: Change, *, steps: int = 1) -> Table:
    """What each n-th node of the critical path does to the step when it alone takes another time.

    One row a node: its `name`, the time it takes (`node_ms`), the step if it is changed (`step_ms`), by how much
    that is longer (`difference_ms`), and how much of the node's own change arrives there (`share`).

    Args:
        dag: the graph.
        path: its longest path.
        every: n.
        change: of the one node.
        steps: to replay.

    Raises:
        UsageError: n is below 1.
    """
    if every < 1:
        raise UsageError(f"--delay {EACH}{every}: give 1 or more: every n-th node of the critical path is delayed")
    base = replay(dag, steps=steps).step
    rows = []
    for node in path.nodes[::every]:
        new = change.of(node.duration)
        step = replay(dag, steps=steps, durations={node.name: new}).step
        share = (step - base) / (new - node.duration) if new != node.duration else None
        rows.append((node.name, *(x / PS_PER_MS for x in (node.duration, step, step - base)), share))
    return from_rows(("name", "node_ms", "step_ms", "difference_ms", "share"), rows)


def as_events(found: Replay, names: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    """The replay as events of a Chrome trace, by their starts: a process a GPU, a thread a category.

    Names and arguments are those of ByteProfile, so that the analyses here read the trace.

    Args:
        found: a replay.
        names: of the GPUs.
    """
    for number, starts in enumerate(found.starts):
        for name, start in sorted(starts.items(), key=lambda pair: (pair[1], pair[0])):
            node = found.dag.nodes[name]
            duration = found.durations[name]
            if node.gpu == SHARED and not duration:
                continue
            inputs = sorted(found.dag.waits.get(name, ()))
            computes = node.category in COMPUTATION | UPDATES
            yield {
                "name": name,
                "cat": "operator" if computes else node.category or "other",
                "ph": "X",
                "ts": _us(start),
                "dur": _us(duration),
                "pid": names.get(node.gpu, "server"),
                "tid": node.category or "other",
                "args": {"name": name, "step": number, **{f"input{i}": other for i, other in enumerate(inputs)}},
            }


def _us(picoseconds: int) -> float:
    return picoseconds // PS_PER_US if picoseconds % PS_PER_US == 0 else picoseconds / PS_PER_US


def path_table(paths: Sequence[tuple[str, LongestPath]]) -> Table:
    """One row a node of each path: `of` which GPU, or all; `name`; what it takes, `avg_ms`; and its `end_ms`."""
    rows = []
    for of, path in paths:
        end = 0
        for node in path.nodes:
            end += node.duration
            rows.append((of, node.name, node.duration / PS_PER_MS, end / PS_PER_MS))
    return from_rows(("of", "name", "avg_ms", "end_ms"), rows)
