"""The step time of an annotated job, worked out rank by rank as `docs/ir.md` says and from that page alone.

It shares no line with the simulator: the oracle of both the page and `echosim`. Every rank of the mesh is run, none
stands for another, and each rule of the page (its sections 4 to 7) is one function here. It is for small jobs: a
node for every issue, every readiness and every end of every operation of every rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from itertools import product
from math import prod
from pathlib import Path

from echograph.proto import workload_pb2 as pb

PERSISTENT = {
    pb.TENSOR_ROLE_PARAMETER,
    pb.TENSOR_ROLE_GRADIENT,
    pb.TENSOR_ROLE_OPTIMIZER_STATE,
    pb.TENSOR_ROLE_BUFFER,
}
COMMUNICATIONS = ("collective", "send", "recv")


def step_time_ps(path: Path, device: str, cluster: str) -> int:
    """Picoseconds from idle devices to the end of the last operation of the last rank.

    Args:
        path: a job that `echoc annotate` gave durations.
        device: the device's name in these durations.
        cluster: the cluster's name in them.
    """
    job = Job(pb.Graph.FromString(path.read_bytes()), device, cluster)
    ranks = [Rank(job, rank, program) for rank, program in job.programs()]
    return max(run(ranks).values(), default=0)


class Job:
    """A graph with what its rows refer to: sources of tensors, durations, members of groups."""

    def __init__(self, graph: pb.Graph, device: str, cluster: str) -> None:
        self.graph = graph
        self.tensors = [tensor for chunk in graph.tensor_chunks for tensor in chunk.tensors]
        self.ops = [op for chunk in graph.op_chunks for op in chunk.ops]
        self.kinds = [op.WhichOneof("kind") for op in self.ops]
        self.maker = {tensor: row for row, op in enumerate(self.ops) for tensor in op.outputs}
        self.places: list[tuple[int, int, int]] = []
        self.port: dict[int, int] = {}
        for number, block in enumerate(graph.blocks):
            rows = range(block.tensor_begin, block.tensor_end)
            self.port |= {row: at for at, row in enumerate(r for r in rows if self.tensors[r].port)}
            own = [row for row in rows if not self.tensors[row].port]
            self.places += [(number, at, row) for at in range(len(block.instances)) for row in own]
        text = list(graph.strings)
        self.on_host, self.on_device = [], []
        for op in self.ops:
            known = {text[d.device]: d.picoseconds for d in op.durations}
            self.on_host.append(known.get(f"{device}/host", 0))
            self.on_device.append(known.get(device, known.get(cluster, 0)))

    def source(self, block: int, instance: int, row: int) -> tuple[int, int, int] | None:
        """(instance, operation, tensor) that a value comes from; None for an input of the graph."""
        while row not in self.maker:
            if row in self.port:
                bound = self.graph.blocks[block].instances[instance].bindings[self.port[row]]
                block, instance, row = self.places[bound]
            elif self.tensors[row].HasField("alias_of"):
                row = self.tensors[row].alias_of
            else:
                return None
        return instance, self.maker[row], row

    def programs(self) -> Iterator[tuple[int, pb.Program]]:
        """Every rank with its program."""
        for program in self.graph.programs:
            fixed = {c.axis: c.value for c in program.coordinates}
            for rank in program.ranks or (self.ranks(fixed) if self.graph.mesh else [0]):
                yield rank, program

    def ranks(self, fixed: dict[str, int]) -> list[int]:
        """Ranks with these coordinates, whatever the others are."""
        axes = [(axis.name, axis.size) for axis in self.graph.mesh]
        return [
            self.rank(dict(zip((name for name, _ in axes), place, strict=True)))
            for place in product(*([fixed[name]] if name in fixed else range(size) for name, size in axes))
        ]

    def rank(self, place: dict[str, int]) -> int:
        """The rank at a place of the mesh."""
        rank = 0
        for axis in self.graph.mesh:
            rank = rank * axis.size + place[axis.name]
        return rank

    def place(self, rank: int) -> dict[str, int]:
        """Where in the mesh a rank is."""
        sizes = [axis.size for axis in self.graph.mesh]
        return {
            axis.name: rank // prod(sizes[number + 1 :]) % axis.size for number, axis in enumerate(self.graph.mesh)
        }

    def members(self, group: int, rank: int) -> tuple[int, ...]:
        """The set of a group that a rank is in, in the order of positions."""
        said = self.graph.groups[group]
        if said.ranks:
            return tuple(said.ranks)
        along = self.ranks({axis: at for axis, at in self.place(rank).items() if axis not in said.axes})
        return tuple(along[position] for position in said.positions or range(len(along)))


@dataclass(eq=False)
class Task:
    """One operation that one rank runs.

    Attributes:
        rank: the rank.
        kind: of the operation, as the oneof has it.
        host_ps: time that the host takes to issue it, or to do it.
        device_ps: time that it takes once it has begun.
        stream: its stream.
        waits: tasks that must have ended.
        meets: for a communication, what all who take part in it share.
    """

    rank: int
    kind: str
    host_ps: int
    device_ps: int
    stream: int
    waits: list[Task] = field(default_factory=list)
    meets: Hashable = None


class Rank:
    """The tasks of a rank, in the order in which its host issues them."""

    def __init__(self, job: Job, rank: int, program: pb.Program) -> None:
        self.job, self.rank = job, rank
        self.tasks: list[Task] = []
        self.ran: dict[tuple[int, ...], Task] = {}
        self.met: dict[Hashable, int] = defaultdict(int)
        columns = program.block, program.begin, program.end, program.instance, program.micro_batch
        for block, begin, end, instance, micro_batch in zip(*columns, strict=True):
            for row in range(begin, end):
                self.issue(row, block, instance, micro_batch)

    def issue(self, row: int, block: int, instance: int, micro_batch: int) -> None:
        """Adds an operation to the rank's tasks."""
        job, op, kind = self.job, self.job.ops[row], self.job.kinds[row]
        task = Task(self.rank, kind, job.on_host[row], job.on_device[row], op.stream)
        for tensor in op.inputs:
            if made := job.source(block, instance, tensor):
                at, maker, value = made
                here = self.ran.get((at, maker, micro_batch))
                if here is None and job.tensors[value].role in PERSISTENT:
                    here = self.ran[at, maker]
                if here is None:
                    raise ValueError(f"operation {row} reads what has not been made")
                if kind != "host" or here.stream != op.stream:
                    task.waits.append(here)
        for before in op.deps:
            here = self.ran.get((instance, before, micro_batch)) or self.ran.get((instance, before))
            if here is not None:
                task.waits.append(here)
        if kind in COMMUNICATIONS:
            task.meets = self.meeting(kind, getattr(op, kind))
        self.ran[instance, row, micro_batch] = self.ran[instance, row] = task
        self.tasks.append(task)

    def meeting(self, kind: str, said: pb.Collective | pb.PointToPoint) -> Hashable:
        """A name of the communication that all who take part in it find, each for itself."""
        members = self.job.members(said.group, self.rank)
        line: tuple[Hashable, ...] = (said.group, members)
        if kind != "collective":
            peer = members[(members.index(self.rank) + said.peer) % len(members)]
            line += (said.tag, *((self.rank, peer) if kind == "send" else (peer, self.rank)))
        self.met[kind, line] += 1
        return (*line, self.met[kind, line])


def run(ranks: list[Rank]) -> dict[Task, int]:
    """When every task ends.

    A task has three moments: its host has issued it, it is ready, and it has ended. A `graphlib.CycleError` is a
    job that hangs.
    """
    meetings: dict[Hashable, list[Task]] = defaultdict(list)
    before: dict[tuple[str, Task], list[tuple[str, Task]]] = {}
    for rank in ranks:
        host: list[tuple[str, Task]] = []
        streams: dict[int, list[tuple[str, Task]]] = defaultdict(list)
        for task in rank.tasks:
            waits = [("ended", other) for other in task.waits]
            before["issued", task] = host + (waits if task.kind == "host" else [])
            before["ready", task] = [("issued", task), *streams[task.stream], *waits]
            meetings[task.meets if task.meets is not None else task].append(task)
            host, streams[task.stream] = [("issued", task)], [("ended", task)]
    for together in meetings.values():
        for task in together:
            before["ended", task] = [("ready", other) for other in together]
    moments: dict[tuple[str, Task], int] = {}
    for moment, task in TopologicalSorter(before).static_order():
        began = max((moments[other] for other in before[moment, task]), default=0)
        takes = {"issued": task.host_ps, "ready": 0, "ended": 0 if task.kind == "host" else task.device_ps}
        moments[moment, task] = began + takes[moment]
    return {task: at for (moment, task), at in moments.items() if moment == "ended"}
