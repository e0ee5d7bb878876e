"""Dependency graphs: what runs after what, how long each node takes, the longest path, and the graph run again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from echograph.errors import DataError, MissingExtraError, UnknownNameError, UsageError
from echograph.ir.columns import NONE, Int64
from echograph.ir.longest_path import LongestPaths, longest_paths
from echograph.ir.timeline import Lane, Timeline
from echograph.profiler.analyses.table import AnswerTable, from_rows
from echograph.profiler.byteprofile.reader import (
    COMMUNICATION,
    COMPUTATION,
    UPDATES,
    category_of,
    in_us,
    read_text,
)
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
        step: of a replay of several.
    """

    name: str
    duration: int
    gpu: int
    category: str
    step: int = 0


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
        gpus: names of the GPUs.
    """

    nodes: dict[str, DagNode] = field(default_factory=dict)
    waits: dict[str, set[str]] = field(default_factory=dict)
    gpus: tuple[str, ...] = ()

    def edge(self, before: str, after: str) -> None:
        """Makes one node wait for another."""
        if before != after:
            self.waits.setdefault(after, set()).add(before)

    def chain(self, nodes: Iterable[DagNode]) -> list[str]:
        """Adds nodes whose names are new, and makes each wait for the one before; their names."""
        names = [self.nodes.setdefault(node.name, node).name for node in nodes]
        for before, after in pairwise(names):
            self.edge(before, after)
        return names

    def before(self, name: str) -> list[str]:
        """What a node waits for."""
        return sorted(self.waits.get(name, ()))

    def edges(self) -> Iterator[tuple[str, str]]:
        """Each dependency: what is waited for, what waits."""
        for name in self.nodes:
            yield from ((before, name) for before in self.before(name))

    def changed(self, durations: Mapping[str, int]) -> Dag:
        """The graph if some of its nodes took other times, picoseconds."""
        nodes = {
            name: node._replace(duration=durations.get(name, node.duration)) for name, node in self.nodes.items()
        }
        return replace(self, nodes=nodes)

    def order(self) -> list[str]:
        """Names, each after all it waits for.

        Raises:
            DataError: they wait for each other in a circle.
        """
        names = list(self.nodes)
        return [names[at] for at in _longest(self).order]

    def longest_path(self) -> LongestPath:
        """The chain of dependencies that takes longest, from the first start to the last end.

        Raises:
            DataError: they wait for each other in a circle.
        """
        done = run_dag(self)
        rows = done.timeline.critical_path().tolist()
        return LongestPath(tuple(done.nodes[row] for row in rows), done.timeline.makespan)


def _longest(dag: Dag) -> LongestPaths:
    """When each node can start."""
    edges = _numbered(dag)
    taken = np.array([node.duration for node in dag.nodes.values()], np.int64)
    found = longest_paths(np.arange(len(taken)), edges[:, 0], edges[:, 1], taken[edges[:, 0]])
    if len(found.order) < len(taken):
        left = set(dag.nodes) - {list(dag.nodes)[at] for at in found.order}
        # From one that is left always to one that it waits for, until one comes again.
        way = [min(left)]
        while len(set(way)) == len(way):
            way.append(min(left & dag.waits[way[-1]]))
        circle = " -> ".join(way[way.index(way[-1]) :][::-1][:5])
        raise DataError(f"the dependencies run in a circle: {circle}: nothing can be first")
    return found


def _numbered(dag: Dag) -> Int64:
    """Int64 [dependencies, 2]: the numbers of what is waited for, and of what waits."""
    number = {name: at for at, name in enumerate(dag.nodes)}
    edges = [(number[before], number[after]) for before, after in dag.edges()]
    return np.array(edges, np.int64).reshape(-1, 2)


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


def dag_table(dag: Dag, head: int | None = None) -> AnswerTable:
    """One row a node, in an order in which they can run: `name`, what it takes, `avg_ms`, and what it `waits_for`.

    Args:
        dag: a graph.
        head: only so many rows.

    Raises:
        DataError: the dependencies run in a circle.
    """
    rows = [(name, dag.nodes[name].duration / PS_PER_MS, ", ".join(dag.before(name))) for name in dag.order()]
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
    from networkx import DiGraph, generate_gml

    network: Any = DiGraph()
    for name, node in dag.nodes.items():
        network.add_node(name, op=node.category, avg=node.duration / PS_PER_US)
    network.add_edges_from(dag.edges())
    yield from (line + "\n" for line in generate_gml(network))


FORMS: Mapping[str, Callable[[Dag], Iterator[str]]] = {"dot": as_dot, "gml": as_gml}


_MOST = 1e6
COMMUNICATIONS, COMPUTATIONS, EACH = "communication", "computation", "each:"


class Change(NamedTuple):
    """A what-if: time becomes (time + added) x ratio.

    Attributes:
        ratio: factor.
        added: picoseconds.
    """

    ratio: float
    added: int

    @classmethod
    def asked(cls, delay: str, ratio: float, added_ms: float) -> Change:
        """What `--delay`, `--delay-ratio` and `--delay-ms` say.

        Raises:
            UsageError: they do not go together, or are no times.
        """
        if not delay and (ratio != 1.0 or added_ms):
            raise UsageError("--delay-ratio and --delay-ms: say what is delayed with --delay")
        if delay and ratio == 1.0 and not added_ms:
            raise UsageError(f"--delay {delay}: say by how much with --delay-ratio or --delay-ms")
        if not (0 <= ratio <= _MOST and abs(added_ms) <= _MOST):
            raise UsageError(
                f"--delay-ratio {ratio:g} --delay-ms {added_ms:g}: give a ratio from 0 to 1e6 and at most 1e6 ms"
            )
        every = delay.removeprefix(EACH)
        if every != delay and not (every.isdigit() and int(every)):
            raise UsageError(
                f"--delay {delay}: write each:N with N from 1 up: every N-th node of the critical path"
            )
        return cls(ratio, round(added_ms * PS_PER_MS))

    def of(self, duration: int) -> int:
        """The changed duration, never below 0."""
        return max(0, round((duration + self.added) * self.ratio))


class Replay(NamedTuple):
    """What ran when.

    Attributes:
        dag: what was run.
        nodes: those of all steps.
        timeline: a row for each of them: its GPU is the program, its step the micro-batch.
    """

    dag: Dag
    nodes: tuple[DagNode, ...]
    timeline: Timeline

    @property
    def ends(self) -> Int64:
        """Int64 [steps, GPUs], picoseconds at which each GPU had ended its nodes of each step."""
        timeline, gpus = self.timeline, len(self.timeline.programs) - 1
        own = np.flatnonzero(timeline.program < gpus)
        found = np.zeros((int(timeline.micro_batch.max(initial=0)) + 1, gpus), np.int64)
        np.maximum.at(found, (timeline.micro_batch[own], timeline.program[own]), timeline.end[own])
        return np.maximum.accumulate(found)

    @property
    def makespan(self) -> int:
        """Picoseconds until the last GPU had ended the last step."""
        return int(self.ends.max(initial=0))

    @property
    def step(self) -> float:
        """Picoseconds of a step, on average."""
        return self.makespan / len(self.ends)


def run_dag(dag: Dag, *, steps: int = 1) -> Replay:
    """Runs a graph.

    A GPU starts a step when it has ended all of its own nodes of the step before. Nothing but dependencies holds a
    node up.

    Args:
        dag: of all GPUs.
        steps: how often.

    Raises:
        UsageError: fewer than one step.
        DataError: the dependencies run in a circle.
    """
    if steps < 1:
        raise UsageError(f"--step-num {steps}: give 1 or more")
    whole = dag if steps == 1 else _repeated(dag, steps)
    nodes, (before, after) = tuple(whole.nodes.values()), _numbered(whole).T
    start = np.array(_longest(whole).length, np.int64)
    duration = np.array([node.duration for node in nodes], np.int64)
    # Of what ended at the moment at which a node started, the last by name.
    cause, held_up = np.full(len(nodes), NONE, np.int64), (start + duration)[before] == start[after]
    cause[after[held_up]] = before[held_up]
    names = dag.gpus or tuple(f"rank{gpu}" for gpu in range(1 + max((node.gpu for node in nodes), default=0)))
    zero = np.zeros(len(nodes), np.int32)
    timeline = Timeline(
        program=np.array([len(names) if node.gpu == SHARED else node.gpu for node in nodes], np.int32),
        lane=np.full(len(nodes), Lane.DEVICE, np.uint8),
        stream=zero,
        op=np.arange(len(nodes)),
        instance=zero,
        micro_batch=np.array([node.step for node in nodes], np.int32),
        start=start,
        duration=duration,
        cause=cause,
        programs=(*names, "server"),
        streams=("",),
    )
    return Replay(dag, nodes, timeline)


def _repeated(dag: Dag, steps: int) -> Dag:
    """The graph several times; a node that takes no time is between two steps of a GPU."""
    found = Dag(gpus=dag.gpus)
    for step in range(steps):
        for name, node in dag.nodes.items():
            found.nodes[f"{step}:{name}"] = node._replace(step=step)
            for before in dag.before(name):
                found.edge(f"{step}:{before}", f"{step}:{name}")
            if node.gpu != SHARED:
                over = DagNode(f"{step}.over:{node.gpu}", 0, SHARED, "", step)
                found.nodes.setdefault(over.name, over)
                found.edge(f"{step}:{name}", over.name)
                if step:
                    found.edge(f"{step - 1}.over:{node.gpu}", f"{step}:{name}")
    return found


def step_table(found: Replay) -> AnswerTable:
    """One row a step and GPU: when it `start_ms`ed and `end_ms`ed on it, and `step_ms` between the two."""
    ends = found.ends.tolist()
    rows = [
        (step, name, *(x / PS_PER_MS for x in (start, end, end - start)))
        for step, (before, after) in enumerate(pairwise([[0] * len(ends[0]), *ends]))
        for name, start, end in zip(found.timeline.programs, before, after, strict=False)
    ]
    return from_rows(("step", "gpu", "start_ms", "end_ms", "step_ms"), rows)


def delayed(dag: Dag, what: str, change: Change) -> Dag:
    """The graph if communication, computation or one node took another time.

    Computation is forward, backward and the update.

    Args:
        dag: the graph.
        what: `communication`, `computation` or a node's name.
        change: how the time of each of these nodes changes.

    Raises:
        UnknownNameError: it is none of these.
    """
    categories = {COMMUNICATIONS: {COMMUNICATION}, COMPUTATIONS: COMPUTATION | UPDATES}
    if what not in categories and what not in dag.nodes:
        raise UnknownNameError("node", what, (COMMUNICATIONS, COMPUTATIONS, f"{EACH}N", *dag.nodes))
    chosen = [
        node
        for node in dag.nodes.values()
        if node.name == what
        or (node.category in categories.get(what, ()) and (node.gpu != SHARED or node.duration))
    ]
    return dag.changed({node.name: change.of(node.duration) for node in chosen})


def sensitivity(dag: Dag, path: LongestPath, every: int, change: Change, *, steps: int = 1) -> AnswerTable:
    """What each n-th node of the critical path does to the step when it alone takes another time.

    One row a node: its `name`, the time it takes (`node_ms`), the step if it is changed (`step_ms`), by how much
    that is longer (`difference_ms`), and how much of the node's own change arrives there (`share`).

    Args:
        dag: the graph.
        path: its longest path.
        every: n.
        change: how the node's time changes.
        steps: how many steps are replayed; times are averages of a step.

    Raises:
        UsageError: n is below 1.
    """
    if every < 1:
        raise UsageError(f"--delay {EACH}{every}: give 1 or more: every n-th node of the critical path is delayed")
    base = run_dag(dag, steps=steps).step
    rows = []
    for node in path.nodes[::every]:
        new = change.of(node.duration)
        step = run_dag(dag.changed({node.name: new}), steps=steps).step
        share = (step - base) / (new - node.duration) if new != node.duration else None
        rows.append((node.name, *(x / PS_PER_MS for x in (node.duration, step, step - base)), share))
    return from_rows(("name", "node_ms", "step_ms", "difference_ms", "share"), rows)


def as_events(found: Replay) -> Iterator[dict[str, Any]]:
    """The replay as events of a Chrome trace, by their starts: a process a GPU, a thread a category.

    Names and arguments are those of ByteProfile, so that the analyses here read the trace.
    """
    timeline, nodes = found.timeline, found.nodes
    start, duration = timeline.start.tolist(), timeline.duration.tolist()
    for row in sorted(range(len(nodes)), key=lambda row: (nodes[row].step, start[row], nodes[row].name)):
        node = nodes[row]
        if node.gpu == SHARED and not duration[row]:
            continue
        computes = node.category in COMPUTATION | UPDATES
        inputs = {f"input{i}": other for i, other in enumerate(found.dag.before(node.name))}
        yield {
            "name": node.name,
            "cat": "operator" if computes else node.category or "other",
            "ph": "X",
            "ts": in_us(start[row]),
            "dur": in_us(duration[row]),
            "pid": timeline.programs[timeline.program[row]],
            "tid": node.category or "other",
            "args": {"name": node.name, "step": node.step, **inputs},
        }


def path_table(paths: Sequence[tuple[str, LongestPath]]) -> AnswerTable:
    """One row a node of each path: `of` which GPU, or all; `name`; what it takes, `avg_ms`; and its `end_ms`."""
    rows = []
    for of, path in paths:
        end = 0
        for node in path.nodes:
            end += node.duration
            rows.append((of, node.name, node.duration / PS_PER_MS, end / PS_PER_MS))
    return from_rows(("of", "name", "avg_ms", "end_ms"), rows)
