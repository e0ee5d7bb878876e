"""The graphs of all GPUs as one: communications couple them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from echograph.profiler.byteprofile.dag import SHARED, Dag, Drawing, Node
from echograph.profiler.byteprofile.dependencies import Chain, Dependencies
from echograph.profiler.byteprofile.events import joined
from echograph.profiler.byteprofile.layout import Job, events_of
from echograph.profiler.byteprofile.names import ALLREDUCE, COMMUNICATION, PLACE, SERVER, by_number
from echograph.profiler.byteprofile.statistics import statistics

_PUSHES, _PULLS = ("PUSH", "PUSH_REQ"), ("PULL", "PULL_RES")
_COLLECTED, _SPREAD = (
    frozenset({"COORDINATE_REDUCE", "REDUCE", "PCIE_REDUCE"}),
    ("COORDINATE_BROADCAST", "BROADCAST"),
)

Key = tuple[str, int]


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
    groups: dict[Key, list[Member]] = {}
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


def _through_servers(drawing: Drawing, key: Key, members: Sequence[Member], server: dict[str, int]) -> None:
    pairs = [(member.part(_PUSHES), member.part(reversed(_PULLS))) for member in members]
    ends = [(push, pull) for push, pull in pairs if push is not None and pull is not None]
    alone = len({member.worker for member in members}) < 2 and not server
    if alone or not ends:
        return
    name = f"{key[0]}.{key[1]}"
    parts = [
        Node(f"server.{name}.{part}", server[part], SHARED, COMMUNICATION) for part in SERVER if part in server
    ]
    nodes = [drawing.node(node) for node in parts or [Node(f"server.{name}.Sync", 0, SHARED, COMMUNICATION)]]
    for before, after in pairwise(nodes):
        drawing.edge(before, after)
    for push, pull in ends:
        drawing.edge(push, nodes[0])
        drawing.edge(nodes[-1], pull)


def _synchronise(drawing: Drawing, key: Key, members: Sequence[Member]) -> None:
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
    sync = drawing.node(Node(name, 0, SHARED, COMMUNICATION))
    for _, node in places:
        for before in drawing.waits.get(node, set()) - {sync}:
            drawing.edge(before, sync)
        drawing.edge(sync, node)


def _servers(job: Job) -> dict[Key, dict[str, int]]:
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
