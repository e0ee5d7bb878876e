"""Dependency graphs: what runs after what, how long each node takes, the longest path, and the graph run again."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from echograph.errors import DataError, MissingExtraError, UnknownNameError, UsageError
from echograph.profiler.analyses.table import AnswerTable, from_rows
from echograph.profiler.byteprofile.events import COMMUNICATION, COMPUTATION, UPDATES, category_of
from echograph.profiler.byteprofile.layout import read_text
from echograph.units import PS_PER_MS, PS_PER_US

SHARED = -1
"""The GPU of a node that belongs to none."""


class DagNode(NamedTuple):
    """What runs.

    Attributes:
        name: its name in results.
        duration: picoseconds.
        gpu: number of the GPU in the job, or `SHARED`.
        category: FW, BW, Comm, ...
    """

    name: str
    duration: int
    gpu: int
    category: str


class LongestPath(NamedTuple):
    """A longest path.

    Attributes:
        nodes: in order.
        length: picoseconds of all of them, the last included.
    """

    nodes: tuple[DagNode, ...]
    length: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dag:
    """Nodes, and which of them each waits for.

    Attributes:
        nodes: by name.
        waits: the names that a node waits for, for each that waits for any.
    """

    nodes: dict[str, DagNode]
    waits: dict[str, frozenset[str]]

    def order(self) -> list[str]:
        """Names, each after all it waits for.

        Raises:
            DataError: they wait for each other in a circle.
        """
        sorter = TopologicalSorter({name: sorted(self.waits.get(name, ())) for name in self.nodes})
        try:
            return list(sorter.static_order())
        except CycleError as error:
            circle = " -> ".join(map(str, error.args[1][:5]))
            raise DataError(f"the dependencies run in a circle: {circle}: nothing can be first") from None

    def edges(self) -> Iterator[tuple[str, str]]:
        """Each dependency: what is waited for, what waits."""
        for name in self.nodes:
            yield from ((before, name) for before in sorted(self.waits.get(name, ())))

    def longest_path(self) -> LongestPath:
        """The chain of dependencies that takes longest, from the first start to the last end.

        Raises:
            DataError: they wait for each other in a circle.
        """
        ends: dict[str, int] = {}
        via: dict[str, str | None] = {}
        for name in self.order():
            before = max(self.waits.get(name, ()), key=lambda other: (ends[other], other), default=None)
            via[name] = before
            ends[name] = self.nodes[name].duration + (ends[before] if before is not None else 0)
        last = max(ends, key=lambda name: (ends[name], name), default=None)
        length = ends[last] if last is not None else 0
        found = []
        while last is not None:
            found.append(self.nodes[last])
            last = via[last]
        return LongestPath(tuple(reversed(found)), length)


class Drawing:
    """Grows a `Dag`."""

    def __init__(self) -> None:
        self.nodes: dict[str, DagNode] = {}
        self.waits: dict[str, set[str]] = {}

    def node(self, node: DagNode) -> str:
        """Adds a node, if its name is new; its name."""
        self.nodes.setdefault(node.name, node)
        return node.name

    def edge(self, before: str, after: str) -> None:
        """Makes one node wait for another."""
        if before != after:
            self.waits.setdefault(after, set()).add(before)

    def add(self, dag: Dag) -> None:
        """Adds all of another graph."""
        self.nodes |= dag.nodes
        for after, befores in dag.waits.items():
            self.waits.setdefault(after, set()).update(befores)

    def dag(self) -> Dag:
        """What has grown."""
        return Dag(nodes=self.nodes, waits={name: frozenset(befores) for name, befores in self.waits.items()})


def composed(dags: Iterable[Dag]) -> Dag:
    """Several graphs as one; nodes of one name are one node."""
    drawing = Drawing()
    for dag in dags:
        drawing.add(dag)
    return drawing.dag()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedDag:
    """A dependency graph as a file has it.

    Attributes:
        nodes: names, with the picoseconds that the file says they take (attribute `avg`, microseconds), or None.
        edges: what is waited for, what waits; without those from the update to the next step, which close circles.
    """

    nodes: dict[str, int | None]
    edges: tuple[tuple[str, str], ...]


def read_dag(path: Path) -> RecordedDag:
    """Reads a `dag.gml`.

    Raises:
        MissingExtraError: networkx is not installed.
        InputError: the file cannot be read.
        DataError: it is no GML, or no dependency graph.
    """
    text = read_text(path)
    if find_spec("networkx") is None:
        raise MissingExtraError("networkx", "report", "a dependency graph in GML")
    import networkx

    try:
        network = networkx.parse_gml(text.splitlines())
    except (networkx.NetworkXError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path}: is no GML ({' '.join(str(error).split())[:80]})") from None
    if not network.is_directed():
        raise DataError(f"{path}: the graph is not directed ('directed 1' is missing): nothing says what waits")
    nodes: dict[str, int | None] = {}
    for name, found in network.nodes(data=True):
        average = found.get("avg")
        nodes[str(name)] = None
        if isinstance(average, int | float) and 0 <= average < float("inf"):
            nodes[str(name)] = round(average * PS_PER_US)
    if not any(category_of(name) for name in nodes):
        raise DataError(f"{path}: is no dependency graph of a step: no node is called FW., BW., Comm. or STEP")
    edges = [(str(before), str(after)) for before, after in network.edges() if not _next_step(before, after)]
    return RecordedDag(nodes=nodes, edges=tuple(dict.fromkeys(edges)))


def _next_step(before: object, after: object) -> bool:
    return category_of(str(before)) in UPDATES and category_of(str(after)) in ("FW", "I/O", "BW")


def table(dag: Dag, head: int | None = None) -> AnswerTable:
    """One row a node, in an order in which they can run: `name`, what it takes, `avg_ms`, and what it `waits_for`.

    Args:
        dag: a graph.
        head: only so many rows.

    Raises:
        DataError: the dependencies run in a circle.
    """
    rows = [
        (name, dag.nodes[name].duration / PS_PER_MS, ", ".join(sorted(dag.waits.get(name, ()))))
        for name in dag.order()
    ]
    return from_rows(("name", "avg_ms", "waits_for"), rows[:head])


def as_dot(dag: Dag) -> Iterator[str]:
    """A drawing for Graphviz: a cluster a GPU, a colour a category."""
    numbers = {name: number for number, name in enumerate(dag.nodes)}
    clusters: dict[int, list[DagNode]] = {}
    for node in dag.nodes.values():
        clusters.setdefault(node.gpu, []).append(node)
    yield "digraph step {\n  node [shape=box, style=filled, fontname=Helvetica, fontsize=10];\n"
    for gpu, nodes in sorted(clusters.items()):
        if gpu != SHARED:
            yield f"  subgraph cluster_{gpu} {{\n    label={json.dumps(f'GPU {gpu}')};\n"
        for node in nodes:
            label = json.dumps(f"{node.name}\n{node.duration / PS_PER_MS:.4f} ms")
            yield f"    n{numbers[node.name]} [label={label}, fillcolor={json.dumps(_colour(node.category))}];\n"
        if gpu != SHARED:
            yield "  }\n"
    yield from (f"  n{numbers[before]} -> n{numbers[after]};\n" for before, after in dag.edges())
    yield "}\n"


def _colour(category: str) -> str:
    colours = {"FW": "#d4e6f7", "BW": "#fbdcc4", "Comm": "#e3d4f2", "STEP": "#d7eed2", "UPDATE": "#d7eed2"}
    return colours.get(category, "#e8e8e8")


def as_gml(dag: Dag) -> Iterator[str]:
    """The graph as `dag.gml`, with the microseconds of each node (`avg`), which `read_dag` reads."""
    numbers = {name: number for number, name in enumerate(dag.nodes)}
    yield "graph [\n  directed 1\n"
    for name, node in dag.nodes.items():
        label, category = (html.escape(text, quote=True) for text in (name, node.category))
        yield f'  node [\n    id {numbers[name]}\n    label "{label}"\n    op "{category}"\n'
        # In full, since GML has no number like 1e-06.
        yield f"    avg {node.duration / PS_PER_US:.6f}\n  ]\n"
    for before, after in dag.edges():
        yield f"  edge [\n    source {numbers[before]}\n    target {numbers[after]}\n  ]\n"
    yield "]\n"


FORMS: Mapping[str, Callable[[Dag], Iterator[str]]] = {"dot": as_dot, "gml": as_gml}


COMMUNICATIONS, COMPUTATIONS, EACH = "communication", "computation", "each:"
NodeDurations = Mapping[str, int]


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
    durations: NodeDurations
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


def replay(dag: Dag, *, steps: int = 1, durations: NodeDurations | None = None) -> Replay:
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


def step_table(found: Replay, names: Mapping[int, str]) -> AnswerTable:
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


def sensitivity(dag: Dag, path: LongestPath, every: int, change: Change, *, steps: int = 1) -> AnswerTable:
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


def path_table(paths: Sequence[tuple[str, LongestPath]]) -> AnswerTable:
    """One row a node of each path: `of` which GPU, or all; `name`; what it takes, `avg_ms`; and its `end_ms`."""
    rows = []
    for of, path in paths:
        end = 0
        for node in path.nodes:
            end += node.duration
            rows.append((of, node.name, node.duration / PS_PER_MS, end / PS_PER_MS))
    return from_rows(("of", "name", "avg_ms", "end_ms"), rows)
