"""Dependency graphs with measured durations: one GPU's, and those of all GPUs coupled by their communications.

A GPU's graph is what the model says, or what its operators really ran after. `prepare` reads a folder into both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from echograph.errors import DataError, InputError
from echograph.profiler.byteprofile.dag import SHARED, Dag, DagNode, Drawing, RecordedDag, read_dag
from echograph.profiler.byteprofile.events import (
    ALLREDUCE,
    COMMUNICATION,
    COMPUTATION,
    MESSAGES,
    PARTS,
    PLACE,
    QUEUE_TYPES,
    SERVER,
    WAITING,
    EventLabel,
    Events,
    by_number,
    category_of,
    is_kineto,
    joined,
)
from echograph.profiler.byteprofile.layout import Gpu, Job, events_of, find_job, gradient_names
from echograph.profiler.byteprofile.statistics import statistics

if TYPE_CHECKING:
    from echograph.profiler.byteprofile.dag import Dag, LongestPath


Averages = dict[EventLabel, int]


class Chain(NamedTuple):
    """One partition of a communication, on one GPU.

    Attributes:
        operation: "Comm.w".
        position: of the partition among the communication's.
        parts: node of each part, in the order in which they run.
    """

    operation: str
    position: int
    parts: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dependencies:
    """One GPU's graph.

    Attributes:
        gpu: where its files are.
        number: of the GPU in the job.
        prefix: what its nodes' names begin with.
        dag: nodes and what they wait for.
        chains: of communications, where these are taken apart.
        events: what was measured.
        root: whether it is the one of its worker that talks to the servers.
    """

    gpu: Gpu
    number: int
    prefix: str
    dag: Dag
    chains: tuple[Chain, ...]
    events: Events
    root: bool


def dependencies(job: Job, *, queues: bool = False) -> list[Dependencies]:
    """The graph of each GPU of a job, in which each node takes the average of what was measured.

    A node that has no event takes what the file says of it (`avg`), or no time.

    Args:
        job: folders with traces and `dag.gml`.
        queues: take communications apart into a chain a partition through the parts that work was done in;
            otherwise a communication is one node with its total, which includes queueing.

    Raises:
        InputError: a file cannot be read, or a GPU has no `dag.gml`.
        DataError: a file is broken.
    """
    messages = joined([events_of(file) for file in job.messages])
    found = []
    for number, gpu in enumerate(job.gpus):
        recorded = _recorded(gpu)
        root = gpu.rank == max(other.rank for other in job.gpus if other.worker == gpu.worker)
        sender = f"worker_{gpu.worker}->" if root else None
        events = gpu.events()
        measured = joined([events, messages.rows(messages.where(_sent_by(sender)))])
        names = gradient_names((gpu.folder, gpu.folder.parent, gpu.folder.parent.parent))
        averages = _own(statistics(measured).average_ps() if len(measured) else {}, names)
        prefix = job.prefix(gpu)
        drawing, chains = _weighted(recorded, averages, names, number, prefix, queues)
        if not any(node.duration for node in drawing.nodes.values()):
            raise DataError(
                f"{gpu.dag}: none of its nodes has an event in the trace, or a time of its own ('avg'): nothing "
                "says how long they take"
            )
        dag = drawing.dag()
        facts: dict[str, Any] = {"gpu": gpu, "number": number, "prefix": prefix, "events": events, "root": root}
        found.append(Dependencies(dag=dag, chains=tuple(chains), **facts))
    return found


def _recorded(gpu: Gpu) -> RecordedDag:
    if gpu.dag.is_file():
        return read_dag(gpu.dag)
    ours = bool(gpu.files) and is_kineto(gpu.files[0])
    hint = "; of a PyTorch trace: echoprof analyze TRACES critical-path" if ours else ""
    raise InputError(f"{gpu.dag}: no such file: the dependency graph of that GPU is needed{hint}")


def _sent_by(sender: str | None) -> Callable[[EventLabel], bool]:
    return lambda label: label.prefix == sender


def _own(averages: Averages, names: Sequence[str]) -> Averages:
    """Averages by labels without prefix, and gradients by name where the trace has their index."""
    found = {}
    for label, average in averages.items():
        index = label.operation.removeprefix(f"{COMMUNICATION}.")
        known = label.category == COMMUNICATION and index.isdigit() and int(index) < len(names)
        operation = f"{COMMUNICATION}.{names[int(index)]}" if known else label.operation
        found[label._replace(prefix="", operation=operation, mark=".")] = average
    return found


def _weighted(
    recorded: RecordedDag, averages: Averages, names: Sequence[str], gpu: int, prefix: str, queues: bool
) -> tuple[Drawing, list[Chain]]:
    """The recorded graph with durations, communications as one node or as chains."""
    by_name = {label.name: average for label, average in averages.items()}
    parts: dict[str, Averages] = {}
    for label, average in averages.items():
        if label.category == COMMUNICATION:
            parts.setdefault(label.operation, {})[label] = average
    drawing = Drawing()
    ends: dict[str, list[tuple[str, str]]] = {}
    chains: list[Chain] = []
    for name, said in recorded.nodes.items():
        category = category_of(name)
        operation = _measured_as(name, names, parts) if category == COMMUNICATION else name
        if operation in ends:
            ends[name] = ends[operation]
            continue
        own = _chains(operation, parts.get(operation, {}), prefix)
        if own and queues:
            for chain, labels in own:
                _link(drawing, chain, labels, gpu)
                chains.append(chain)
            ends[name] = [(first_of(chain), last_of(chain)) for chain, _ in own]
        else:
            total = by_name.get(operation, by_name.get(name))
            if total is None and own:
                whole = _chains(operation, parts[operation], prefix, waiting=True)
                total = max(sum(labels.values()) for _, labels in whole)
            node = drawing.node(
                DagNode(f"{prefix}{operation}", total if total is not None else said or 0, gpu, category)
            )
            ends[name] = [(node, node)]
        ends[operation] = ends[name]
    for before, after in recorded.edges:
        for _, last in ends[before]:
            for first, _ in ends[after]:
                drawing.edge(last, first)
    return drawing, chains


def _link(drawing: Drawing, chain: Chain, durations: Mapping[str, int], gpu: int) -> None:
    nodes = [
        drawing.node(DagNode(name, durations[part], gpu, COMMUNICATION)) for part, name in chain.parts.items()
    ]
    for before, after in pairwise(nodes):
        drawing.edge(before, after)


def first_of(chain: Chain) -> str:
    """The node that a chain begins with."""
    return next(iter(chain.parts.values()))


def last_of(chain: Chain) -> str:
    """The node that a chain ends with."""
    return next(reversed(list(chain.parts.values())))


def _measured_as(node: str, names: Sequence[str], parts: Collection[str]) -> str:
    """The communication that carried a gradient: by its name, its index, or fused with others (`Comm.1+2`)."""
    gradient = node.removeprefix(f"{COMMUNICATION}.")
    if node in parts:
        return node
    known = {gradient, str(names.index(gradient))} if gradient in names else {gradient}
    for operation in parts:
        if known & set(operation.removeprefix(f"{COMMUNICATION}.").split("+")):
            return operation
    return node


def _chains(
    operation: str, averages: Averages, prefix: str, *, waiting: bool = False
) -> list[tuple[Chain, dict[str, int]]]:
    """A chain for each partition of a communication, and what its parts take; without empty parts.

    Of Horovod's parts, those that only wait are left out, unless they are asked for.

    What messages were seen on the network stands for PUSH and PULL, which a worker measured around them.
    """
    said = {label.part for label in averages if label.part in PLACE and averages[label]}
    dropped = set(WAITING) if ALLREDUCE in said and not waiting else set()
    dropped |= {"PUSH", "PULL"} if said & set(MESSAGES) else set()
    kept = [label for label, average in averages.items() if label.part in said - dropped and average]
    partitions: dict[int, list[EventLabel]] = {}
    # Queues and messages name partitions differently, but count them in the same order.
    for seen in (QUEUE_TYPES, tuple(PARTS - set(QUEUE_TYPES))):
        labels = [label for label in kept if label.part in seen]
        keys = sorted({label.key for label in labels}, key=by_number)
        for label in labels:
            partitions.setdefault(keys.index(label.key), []).append(label)
    found = []
    for position, labels in sorted(partitions.items()):
        labels.sort(key=lambda label: PLACE[label.part])
        nodes = {label.part: f"{prefix}{label.name}" for label in labels}
        found.append((Chain(operation, position, nodes), {label.part: averages[label] for label in labels}))
    return found


class RunTime(NamedTuple):
    """What ran after what on a GPU.

    Attributes:
        dag: nodes and what they wait for.
        parallelism: the most operators that ran at once.
    """

    dag: Dag
    parallelism: int


def observed_order(found: Dependencies) -> RunTime:
    """The graph in which operators wait for those that really ran before them, whatever the model demands.

    Forward and backward operators of the first step are swept by their starts: each waits for those that ended
    since the last start, and for whatever those wait for that still run. All other dependencies stay.

    Args:
        found: a GPU's dependencies.
    """
    events, dag = found.events, found.dag
    swept: dict[str, int] = {}
    rows = events.where(lambda label: label.category in COMPUTATION)
    for row in rows[np.argsort(events.start[rows], kind="stable")].tolist():
        name = f"{found.prefix}{events.labels[events.label[row]]._replace(prefix='').name}"
        if name in dag.nodes:
            swept.setdefault(name, row)
    drawing = Drawing()
    drawing.nodes |= dag.nodes
    for before, after in dag.edges():
        if not (before in swept and after in swept):
            drawing.edge(before, after)
    running: dict[str, int] = {}
    most = 0
    for name, row in swept.items():
        start, end = int(events.start[row]), int(events.end[row])
        over = [other for other, until in running.items() if until <= start]
        for other in over:
            drawing.edge(other, name)
            del running[other]
        for other in running:
            for before in drawing.waits.get(other, set()) & swept.keys():
                drawing.edge(before, name)
        running[name] = end
        most = max(most, len(running))
    return RunTime(drawing.dag(), most)


_PUSHES, _PULLS = ("PUSH", "PUSH_REQ"), ("PULL", "PULL_RES")
_COLLECTED, _SPREAD = (
    frozenset({"COORDINATE_REDUCE", "REDUCE", "PCIE_REDUCE"}),
    ("COORDINATE_BROADCAST", "BROADCAST"),
)

_PartitionKey = tuple[str, int]


class Member(NamedTuple):
    """One GPU's chain of a partition that all GPUs have."""

    worker: int
    root: bool
    chain: Chain

    def part(self, names: Iterable[str]) -> str | None:
        """The node of the first of these parts that the chain has."""
        return next((self.chain.parts[name] for name in names if name in self.chain.parts), None)


def coupled(job: Job, gpus: Sequence[Dependencies], dags: Sequence[Dag]) -> Dag:
    """One graph of all GPUs.

    Partitions of a communication belong together by their place among its partitions. In each:

    - What the root of a worker pushes, the others have handed to it before; what it pulled, they copy after.
    - No worker pulls before the pushes of all are in, and the server has summed them.
    - GPUs that reduce and broadcast among themselves, or all-reduce, wait for each other at a node that takes no
      time (`Sync`).

    Args:
        job: what the graphs are of.
        gpus: dependencies, communications taken apart.
        dags: the graph of each, as it is or at run time.
    """
    drawing = Drawing()
    for dag in dags:
        drawing.add(dag)
    groups: dict[_PartitionKey, list[Member]] = {}
    for found in gpus:
        for chain in found.chains:
            member = Member(found.gpu.worker, found.root, chain)
            groups.setdefault((chain.operation, chain.position), []).append(member)
    servers = _servers(job)
    for key, members in groups.items():
        _hand_over(drawing, members)
        _through_servers(drawing, key, members, servers.get(key, {}))
        _synchronise(drawing, key, members)
    return drawing.dag()


def _hand_over(drawing: Drawing, members: Sequence[Member]) -> None:
    roots = {member.worker: member for member in members if member.root}
    for member in members:
        root = roots.get(member.worker)
        if member.root or root is None:
            continue
        push, pull = root.part(_PUSHES), root.part(reversed(_PULLS))
        if push is None or pull is None or member.part((*_PUSHES, *_PULLS)) is not None:
            continue
        before, after = _around(member.chain)
        if before is not None:
            drawing.edge(before, push)
        if after is not None:
            drawing.edge(pull, after)


def _around(chain: Chain) -> tuple[str | None, str | None]:
    """The last node before the push would be, and the first after the pull."""
    before = [name for part, name in chain.parts.items() if PLACE[part] < PLACE["PUSH"]]
    after = [name for part, name in chain.parts.items() if PLACE[part] > PLACE["PULL_RES"]]
    return before[-1] if before else None, after[0] if after else None


def _through_servers(
    drawing: Drawing, key: _PartitionKey, members: Sequence[Member], server: dict[str, int]
) -> None:
    pairs = [(member.part(_PUSHES), member.part(reversed(_PULLS))) for member in members]
    ends = [(push, pull) for push, pull in pairs if push is not None and pull is not None]
    alone = len({member.worker for member in members}) < 2 and not server
    if alone or not ends:
        return
    name = f"{key[0]}.{key[1]}"
    parts = [
        DagNode(f"server.{name}.{part}", server[part], SHARED, COMMUNICATION) for part in SERVER if part in server
    ]
    nodes = [drawing.node(node) for node in parts or [DagNode(f"server.{name}.Sync", 0, SHARED, COMMUNICATION)]]
    for before, after in pairwise(nodes):
        drawing.edge(before, after)
    for push, pull in ends:
        drawing.edge(push, nodes[0])
        drawing.edge(nodes[-1], pull)


def _synchronise(drawing: Drawing, key: _PartitionKey, members: Sequence[Member]) -> None:
    """A node that takes no time between what GPUs do alone and what they do together."""
    everywhere = [member for member in members if ALLREDUCE in member.chain.parts]
    if everywhere:
        _meet(drawing, f"{key[0]}.{key[1]}.Sync", [(m.chain, m.chain.parts[ALLREDUCE]) for m in everywhere])
    for worker in sorted({member.worker for member in members}):
        local = [(m.chain, spread) for m in members if m.worker == worker and (spread := _broadcast(m.chain))]
        if local:
            _meet(drawing, f"wk{worker}.{key[0]}.{key[1]}.Sync", local)


def _broadcast(chain: Chain) -> str | None:
    """The node that broadcasts what was reduced right before it."""
    parts = list(chain.parts)
    for before, after in pairwise(parts):
        if after in _SPREAD and before in _COLLECTED:
            return chain.parts[after]
    return None


def _meet(drawing: Drawing, name: str, places: Sequence[tuple[Chain, str]]) -> None:
    sync = drawing.node(DagNode(name, 0, SHARED, COMMUNICATION))
    for _, node in places:
        for before in drawing.waits.get(node, set()) - {sync}:
            drawing.edge(before, sync)
        drawing.edge(sync, node)


def _servers(job: Job) -> dict[_PartitionKey, dict[str, int]]:
    """Picoseconds of what servers do of each partition: copy the first push, add the others, hand out the sum."""
    found = joined([events_of(file) for file in job.messages])
    found = found.rows(found.where(lambda label: label.part in SERVER))
    if not len(found):
        return {}
    # A partition is on one server.
    averages = statistics(found.relabelled(lambda label: label._replace(prefix=""))).average_ps()
    partitions: dict[str, dict[str, dict[str, int]]] = {}
    for label, average in averages.items():
        partitions.setdefault(label.operation, {}).setdefault(label.key, {})[label.part] = average
    return {
        (operation, position): of[key]
        for operation, of in partitions.items()
        for position, key in enumerate(sorted(of, key=by_number))
    }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobDependencies:
    """The graphs of a folder of traces.

    Attributes:
        names: of the GPUs, by their numbers.
        dags: each GPU's own.
        all: of all GPUs together.
        parallelism: the most operators that ran at once, by the GPU's name; empty where nobody looked.
        notes: what is missing, one line each.
    """

    names: dict[int, str]
    dags: list[Dag]
    all: Dag
    parallelism: dict[str, int]
    notes: tuple[str, ...]

    def paths(self) -> list[tuple[str, LongestPath]]:
        """The longest path of each GPU, then of all."""
        own = [(self.names[number], dag.longest_path()) for number, dag in enumerate(self.dags)]
        return [*own, ("all", self.all.longest_path())]


def prepare(path: Path, *, queues: bool, run_time: bool) -> JobDependencies:
    """Reads a folder of traces with their dependencies.

    Args:
        path: the folder.
        queues: take communications apart.
        run_time: operators in the order in which they ran.
    """
    job = find_job(path)
    found = dependencies(job, queues=queues)
    names = {one.number: job.title(one.gpu) for one in found}
    swept = [observed_order(one) for one in found] if run_time else []
    dags = [one.dag for one in swept or found]
    return JobDependencies(
        names=names,
        dags=dags,
        all=coupled(job, found, dags),
        parallelism={names[number]: one.parallelism for number, one in enumerate(swept)},
        notes=tuple(dict.fromkeys(note for one in found for note in one.events.notes)),
    )
