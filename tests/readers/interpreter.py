"""The step time of an annotated job, worked out rank by rank as `docs/ir.md` says and from that page alone.

It shares no line with the simulator: the oracle of both the page and `echosim`. Every rank of the mesh is run,
none stands for another, and each rule of the page (its sections 4 to 7) is one function here. It is for small
jobs: a node for every issue, every readiness and every end of every operation of every rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from functools import cache
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


class WaitForEver(Exception):
    """Ranks wait for each other for ever."""


def step_time_ps(path: Path, device: str, cluster: str) -> int:
    """Picoseconds from idle devices to the end of the last operation of the last rank.

    Args:
        path: a job that `echoc annotate` gave durations.
        device: the device's name in these durations.
        cluster: the cluster's name in them.
    """
    job = Job(pb.Graph.FromString(path.read_bytes()), device, cluster)
    moments = Moments(job)
    for program in job.graph.programs:
        script = Script(job, program)
        for rank in job.ranks_of(program):
            moments.add(rank, script)
    return moments.last()


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

    def ranks_of(self, program: pb.Program) -> list[int]:
        """The ranks that run a program."""
        return list(program.ranks) or self.ranks({c.axis: c.value for c in program.coordinates})

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

    @cache  # noqa: B019 (a job lives as long as its test)
    def members(self, group: int, rank: int) -> tuple[int, ...]:
        """The set of a group that a rank is in, in the order of positions."""
        said = self.graph.groups[group]
        if said.ranks:
            return tuple(said.ranks)
        axes = [said.along] if said.along else said.axes
        along = self.ranks({axis: at for axis, at in self.place(rank).items() if axis not in axes})
        return tuple(along[position] for position in said.positions or range(len(along)))


class Script:
    """What every rank of a program does, in the order in which the host issues it.

    Attributes:
        rows: of the operation table.
        waits: for each the positions in `rows` of those that must have ended before it starts.
    """

    def __init__(self, job: Job, program: pb.Program) -> None:
        self.job = job
        self.rows: list[int] = []
        self.waits: list[set[int]] = []
        self.ran: dict[tuple[int, ...], int] = {}
        columns = program.block, program.begin, program.end, program.instance, program.micro_batch
        for block, begin, end, instance, micro_batch in zip(*columns, strict=True):
            for row in range(begin, end):
                self.waits.append(
                    {*self._made(row, block, instance, micro_batch), *self._named(row, instance, micro_batch)}
                )
                self.ran[instance, row, micro_batch] = self.ran[instance, row] = len(self.rows)
                self.rows.append(row)

    def _made(self, row: int, block: int, instance: int, micro_batch: int) -> Iterator[int]:
        """The makers of what an operation reads."""
        job, op = self.job, self.job.ops[row]
        for tensor in op.inputs:
            if (made := job.source(block, instance, tensor)) is None:
                continue
            at, maker, value = made
            here = self.ran.get((at, maker, micro_batch))
            if here is None and job.tensors[value].role in PERSISTENT:
                here = self.ran[at, maker]
            if here is None:
                raise ValueError(f"operation {row} reads what has not been made")
            if job.kinds[row] != "host" or job.ops[maker].stream != op.stream:
                yield here

    def _named(self, row: int, instance: int, micro_batch: int) -> Iterator[int]:
        """What an operation names in `deps`."""
        for before in self.job.ops[row].deps:
            here = self.ran.get((instance, before, micro_batch), self.ran.get((instance, before)))
            if here is not None:
                yield here


class Moments:
    """Three moments of every operation that a rank runs: it is issued, it is ready, it has ended.

    A moment is a number. It comes some picoseconds after the last of those before it.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.before: list[list[int]] = []
        self.after_ps: list[int] = []
        self.meetings: dict[Hashable, list[int]] = defaultdict(list)

    def add(self, rank: int, script: Script) -> None:
        """The moments of a rank. Those of the operation at position p are first + 3 p and the next two."""
        job, first = self.job, len(self.before)
        streams: dict[int, int] = {}
        met: dict[Hashable, int] = defaultdict(int)
        for row, positions in zip(script.rows, script.waits, strict=True):
            op, kind, issued = job.ops[row], job.kinds[row], len(self.before)
            waits = [first + 3 * position + 2 for position in positions]
            host = [issued - 3] if issued > first else []
            stream = [streams[op.stream]] if op.stream in streams else []
            self.before += [host + (waits if kind == "host" else []), [issued, *stream, *waits], [issued + 1]]
            self.after_ps += [job.on_host[row], 0, 0 if kind == "host" else job.on_device[row]]
            streams[op.stream] = issued + 2
            if kind in COMMUNICATIONS:
                name = meeting(job, rank, kind, getattr(op, kind))
                met[kind, name] += 1
                self.meetings[name, met[kind, name]].append(issued)

    def last(self) -> int:
        """When the last of all moments is.

        Raises:
            WaitForEver: some do.
        """
        for together in self.meetings.values():
            for issued in together:
                self.before[issued + 2] = [other + 1 for other in together]
        missing = [len(those) for those in self.before]
        followers: list[list[int]] = [[] for _ in self.before]
        for moment, those in enumerate(self.before):
            for one in those:
                followers[one].append(moment)
        at = [0] * len(self.before)
        known = [moment for moment, count in enumerate(missing) if not count]
        for moment in known:
            at[moment] = max((at[one] for one in self.before[moment]), default=0) + self.after_ps[moment]
            for later in followers[moment]:
                missing[later] -= 1
                if not missing[later]:
                    known.append(later)
        if len(known) < len(self.before):
            raise WaitForEver
        return max(at, default=0)


def meeting(job: Job, rank: int, kind: str, said: pb.Collective | pb.PointToPoint) -> Hashable:
    """A name of a communication that all who take part in it find, each for itself."""
    members = job.members(said.group, rank)
    if kind == "collective":
        return said.group, members
    peer = members[(members.index(rank) + said.peer) % len(members)]
    return said.group, members, said.tag, (rank, peer) if kind == "send" else (peer, rank)
