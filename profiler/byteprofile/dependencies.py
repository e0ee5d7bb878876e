"""Dependency graphs with measured durations: one GPU's, and those of all GPUs coupled by their communications.

A GPU's graph is what the model says, or what its operators really ran after. `prepare` reads a folder into both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from echograph.errors import DataError, InputError
from echograph.profiler.analyses.table import AnswerTable
from echograph.profiler.byteprofile.dag import (
    EACH,
    SHARED,
    Change,
    Dag,
    DagNode,
    LongestPath,
    RecordedDag,
    Replay,
    delayed,
    read_dag,
    run_dag,
    sensitivity,
)
from echograph.profiler.byteprofile.reader import (
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
    Gpu,
    Job,
    by_number,
    category_of,
    events_of,
    find_job,
    gradient_names,
    is_kineto,
    joined,
)
from echograph.profiler.byteprofile.report import statistics

Averages = dict[EventLabel, int]


class GpuPlace(NamedTuple):
    """Whose nodes are meant.

    Attributes:
        gpu: number of the GPU in the job.
        worker: number of its worker.
        root: whether it is the one of its worker that talks to the servers.
        prefix: what its nodes' names begin with.
    """

    gpu: int
    worker: int
    root: bool
    prefix: str


class Chain(NamedTuple):
    """One partition of a communication, on one GPU.

    Attributes:
        at: the GPU.
        operation: "Comm.w".
        position: of the partition among the communication's.
        parts: node of each part, in the order in which they run.
    """

    at: GpuPlace
    operation: str
    position: int
    parts: Mapping[str, DagNode]

    def part(self, names: Iterable[str]) -> str | None:
        """The node of the first of these parts that the chain has."""
        return next((self.parts[name].name for name in names if name in self.parts), None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dependencies:
    """One GPU's graph.

    Attributes:
        at: the GPU.
        dag: nodes and what they wait for.
        chains: of communications, where these are taken apart.
        events: what was measured.
    """

    at: GpuPlace
    dag: Dag
    chains: tuple[Chain, ...]
    events: Events


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
        at = GpuPlace(number, gpu.worker, root, job.prefix(gpu))
        events = gpu.events()
        sent = messages.only(_sent_by(f"worker_{gpu.worker}->" if root else None))
        measured = joined([events, sent])
        names = gradient_names((gpu.folder, gpu.folder.parent, gpu.folder.parent.parent))
        averages = _own(statistics(measured).average_ps() if len(measured) else {}, names)
        dag, chains = _weighted(at, recorded, averages, names, queues)
        if not any(node.duration for node in dag.nodes.values()):
            raise DataError(
                f"{gpu.dag}: none of its nodes has an event in the trace, or a time of its own ('avg'): nothing "
                "says how long they take"
            )
        found.append(Dependencies(at=at, dag=dag, chains=tuple(chains), events=events))
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
    at: GpuPlace, recorded: RecordedDag, averages: Averages, names: Sequence[str], queues: bool
) -> tuple[Dag, list[Chain]]:
    """The recorded graph with durations, communications as one node or as chains."""
    by_name = {label.name: average for label, average in averages.items()}
    parts: dict[str, Averages] = {}
    for label, average in averages.items():
        if label.category == COMMUNICATION:
            parts.setdefault(label.operation, {})[label] = average
    dag = Dag()
    ends: dict[str, list[tuple[str, str]]] = {}
    chains: list[Chain] = []
    for name, said in recorded.nodes.items():
        category = category_of(name)
        operation = _measured_as(name, names, parts) if category == COMMUNICATION else name
        if operation in ends:
            ends[name] = ends[operation]
            continue
        own = _chains(at, operation, parts.get(operation, {}))
        if own and queues:
            linked = [dag.chain(chain.parts.values()) for chain in own]
            chains += own
            ends[name] = [(nodes[0], nodes[-1]) for nodes in linked]
        else:
            total = by_name.get(operation, by_name.get(name))
            if total is None and own:
                whole = _chains(at, operation, parts[operation], waiting=True)
                total = max(sum(node.duration for node in chain.parts.values()) for chain in whole)
            duration = total if total is not None else said or 0
            (node,) = dag.chain([DagNode(f"{at.prefix}{operation}", duration, at.gpu, category)])
            ends[name] = [(node, node)]
        ends[operation] = ends[name]
    for before, after in recorded.edges:
        for _, last in ends[before]:
            for first, _ in ends[after]:
                dag.edge(last, first)
    return dag, chains


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


def _chains(at: GpuPlace, operation: str, averages: Averages, *, waiting: bool = False) -> list[Chain]:
    """A chain for each partition of a communication, without empty parts.

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
        parts = {
            label.part: DagNode(f"{at.prefix}{label.name}", averages[label], at.gpu, COMMUNICATION)
            for label in labels
        }
        found.append(Chain(at, operation, position, parts))
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
    dag, swept = found.dag, dict[str, tuple[int, int]]()
    for start, end, label in found.events.only(lambda label: label.category in COMPUTATION).in_order():
        name = f"{found.at.prefix}{label._replace(prefix='').name}"
        if name in dag.nodes:
            swept.setdefault(name, (start, end))
    ran = Dag(nodes=dag.nodes)
    for before, after in dag.edges():
        if not (before in swept and after in swept):
            ran.edge(before, after)
    running: dict[str, int] = {}
    most = 0
    for name, (start, end) in swept.items():
        over = [other for other, until in running.items() if until <= start]
        for other in over:
            ran.edge(other, name)
            del running[other]
        for other in running:
            for before in ran.waits.get(other, set()) & swept.keys():
                ran.edge(before, name)
        running[name] = end
        most = max(most, len(running))
    return RunTime(ran, most)


_PUSHES, _PULLS = ("PUSH", "PUSH_REQ"), ("PULL", "PULL_RES")
_COLLECTED, _SPREAD = (
    frozenset({"COORDINATE_REDUCE", "REDUCE", "PCIE_REDUCE"}),
    ("COORDINATE_BROADCAST", "BROADCAST"),
)

_PartitionKey = tuple[str, int]


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
    whole = Dag(gpus=tuple(job.title(gpu) for gpu in job.gpus))
    for dag in dags:
        whole.nodes.update(dag.nodes)
        for after, befores in dag.waits.items():
            whole.waits.setdefault(after, set()).update(befores)
    groups: dict[_PartitionKey, list[Chain]] = {}
    for found in gpus:
        for chain in found.chains:
            groups.setdefault((chain.operation, chain.position), []).append(chain)
    servers = _servers(job)
    for key, members in groups.items():
        _hand_over(whole, members)
        _through_servers(whole, key, members, servers.get(key, {}))
        _synchronise(whole, key, members)
    return whole


def _hand_over(whole: Dag, members: Sequence[Chain]) -> None:
    roots = {member.at.worker: member for member in members if member.at.root}
    for member in members:
        root = roots.get(member.at.worker)
        if member.at.root or root is None:
            continue
        push, pull = root.part(_PUSHES), root.part(reversed(_PULLS))
        if push is None or pull is None or member.part((*_PUSHES, *_PULLS)) is not None:
            continue
        before, after = _around(member)
        if before is not None:
            whole.edge(before, push)
        if after is not None:
            whole.edge(pull, after)


def _around(chain: Chain) -> tuple[str | None, str | None]:
    """The last node before the push would be, and the first after the pull."""
    before = [node.name for part, node in chain.parts.items() if PLACE[part] < PLACE["PUSH"]]
    after = [node.name for part, node in chain.parts.items() if PLACE[part] > PLACE["PULL_RES"]]
    return before[-1] if before else None, after[0] if after else None


def _through_servers(whole: Dag, key: _PartitionKey, members: Sequence[Chain], server: dict[str, int]) -> None:
    pairs = [(member.part(_PUSHES), member.part(reversed(_PULLS))) for member in members]
    ends = [(push, pull) for push, pull in pairs if push is not None and pull is not None]
    alone = len({member.at.worker for member in members}) < 2 and not server
    if alone or not ends:
        return
    name = f"{key[0]}.{key[1]}"
    parts = [
        DagNode(f"server.{name}.{part}", server[part], SHARED, COMMUNICATION) for part in SERVER if part in server
    ]
    nodes = whole.chain(parts or [DagNode(f"server.{name}.Sync", 0, SHARED, COMMUNICATION)])
    for push, pull in ends:
        whole.edge(push, nodes[0])
        whole.edge(nodes[-1], pull)


def _synchronise(whole: Dag, key: _PartitionKey, members: Sequence[Chain]) -> None:
    """A node that takes no time between what GPUs do alone and what they do together."""
    everywhere = [member for member in members if ALLREDUCE in member.parts]
    if everywhere:
        _meet(whole, f"{key[0]}.{key[1]}.Sync", [m.parts[ALLREDUCE].name for m in everywhere])
    for worker in sorted({member.at.worker for member in members}):
        local = [spread for m in members if m.at.worker == worker and (spread := _broadcast(m))]
        if local:
            _meet(whole, f"wk{worker}.{key[0]}.{key[1]}.Sync", local)


def _broadcast(chain: Chain) -> str | None:
    """The node that broadcasts what was reduced right before it."""
    parts = list(chain.parts)
    for before, after in pairwise(parts):
        if after in _SPREAD and before in _COLLECTED:
            return chain.parts[after].name
    return None


def _meet(whole: Dag, name: str, nodes: Sequence[str]) -> None:
    (sync,) = whole.chain([DagNode(name, 0, SHARED, COMMUNICATION)])
    for node in nodes:
        for before in whole.waits.get(node, set()) - {sync}:
            whole.edge(before, sync)
        whole.edge(sync, node)


def _servers(job: Job) -> dict[_PartitionKey, dict[str, int]]:
    """Picoseconds of what servers do of each partition: copy the first push, add the others, hand out the sum."""
    found = joined([events_of(file) for file in job.messages])
    found = found.only(lambda label: label.part in SERVER)
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
        dags: each GPU's own.
        all: of all GPUs together, with their names.
        parallelism: the most operators that ran at once, by the GPU's name; empty where nobody looked.
        notes: what is missing, one line each.
    """

    dags: list[Dag]
    all: Dag
    parallelism: dict[str, int]
    notes: tuple[str, ...]

    def paths(self) -> list[tuple[str, LongestPath]]:
        """The longest path of each GPU, then of all."""
        each = zip((*self.all.gpus, "all"), (*self.dags, self.all), strict=True)
        return [(of, dag.longest_path()) for of, dag in each]


class Rerun(NamedTuple):
    """A step that was run again.

    Attributes:
        done: what ran when, with what was delayed.
        before: picoseconds of a step before that; None where nothing is delayed, or one node after the other.
        delays: what each of some nodes does to the step, where these are delayed.
    """

    done: Replay
    before: float | None
    delays: AnswerTable | None


def rerun(prepared: JobDependencies, *, steps: int, delay: str, change: Change) -> Rerun:
    """Runs the step of a job again.

    Args:
        prepared: the job.
        steps: how often.
        delay: what is delayed: `communication`, `computation`, a node, each N-th of the critical path (`each:N`),
            or nothing.
        change: of what is delayed.

    Raises:
        UnknownNameError: there is no such node.
        DataError: the dependencies run in a circle.
    """
    dag = prepared.all
    if delay.startswith(EACH):
        every = int(delay.removeprefix(EACH))
        delays = sensitivity(dag, dag.longest_path(), every, change, steps=steps)
        return Rerun(run_dag(dag, steps=steps), None, delays)
    if not delay:
        return Rerun(run_dag(dag, steps=steps), None, None)
    return Rerun(run_dag(delayed(dag, delay, change), steps=steps), run_dag(dag, steps=steps).step, None)


def prepare(path: Path, *, queues: bool, run_time: bool) -> JobDependencies:
    """Reads a folder of traces with their dependencies.

    Args:
        path: the folder.
        queues: take communications apart.
        run_time: operators in the order in which they ran.
    """
    job = find_job(path)
    found = dependencies(job, queues=queues)
    swept = [observed_order(one) for one in found] if run_time else []
    dags = [one.dag for one in swept or found]
    whole = coupled(job, found, dags)
    return JobDependencies(
        dags=dags,
        all=whole,
        parallelism={name: one.parallelism for name, one in zip(whole.gpus, swept, strict=bool(swept))},
        notes=tuple(dict.fromkeys(note for one in found for note in one.events.notes)),
    )
