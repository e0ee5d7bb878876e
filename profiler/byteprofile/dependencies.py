"""One GPU's dependency graph with measured durations: as the model says, and as its operators really ran."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from echograph.errors import DataError, InputError
from echograph.profiler.byteprofile.dag import Dag, Drawing, Node, Recorded, read_dag
from echograph.profiler.byteprofile.events import Events, joined
from echograph.profiler.byteprofile.layout import Gpu, Job, events_of, gradient_names
from echograph.profiler.byteprofile.names import (
    ALLREDUCE,
    COMMUNICATION,
    COMPUTATION,
    MESSAGES,
    PARTS,
    PLACE,
    QUEUE_TYPES,
    WAITING,
    Label,
    by_number,
    category_of,
)
from echograph.profiler.byteprofile.read import is_kineto
from echograph.profiler.byteprofile.statistics import statistics

Averages = dict[Label, int]


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


def _recorded(gpu: Gpu) -> Recorded:
    if gpu.dag.is_file():
        return read_dag(gpu.dag)
    ours = bool(gpu.files) and is_kineto(gpu.files[0])
    hint = "; of a PyTorch trace: echoprof analyze TRACES critical-path" if ours else ""
    raise InputError(f"{gpu.dag}: no such file: the dependency graph of that GPU is needed{hint}")


def _sent_by(sender: str | None) -> Callable[[Label], bool]:
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
    recorded: Recorded, averages: Averages, names: Sequence[str], gpu: int, prefix: str, queues: bool
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
                Node(f"{prefix}{operation}", total if total is not None else said or 0, gpu, category)
            )
            ends[name] = [(node, node)]
        ends[operation] = ends[name]
    for before, after in recorded.edges:
        for _, last in ends[before]:
            for first, _ in ends[after]:
                drawing.edge(last, first)
    return drawing, chains


def _link(drawing: Drawing, chain: Chain, durations: Mapping[str, int], gpu: int) -> None:
    nodes = [drawing.node(Node(name, durations[part], gpu, COMMUNICATION)) for part, name in chain.parts.items()]
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
    partitions: dict[int, list[Label]] = {}
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


def run_time(found: Dependencies) -> RunTime:
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
