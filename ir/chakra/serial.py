"""How long a reader takes for a job's traces that runs one kernel and one communication of a rank at a time.

ASTRA-sim is one: of what is ready it starts the lowest id; a send does not wait for its receive, and a receive
keeps nothing from running. The ranks of a program do the same, so one of each is run; a collective waits for one
rank of every program that takes part.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from echograph.ir.chakra.lowering import Lowered
from echograph.ir.chakra.messages import NodeType
from echograph.ir.chakra.ranks import Communicators
from echograph.ir.chakra.trace import Step
from echograph.ir.columns import Int64
from echograph.units import PS_PER_NS, PS_PER_US

MAX_NODES = 400_000
"""Of one rank of every program together: a run takes some microseconds a node."""

_COMPUTE, _COMMUNICATE, _RECEIVE = range(3)
_LANES = {NodeType.COMP: _COMPUTE, NodeType.RECV: _RECEIVE}


class _Meeting(NamedTuple):
    """What those who meet have in common, and how many they are; a message is told by its ends and tag."""

    key: tuple[object, ...]
    members: int


@dataclass(slots=True)
class _Role:
    """One rank of a program while it runs; nodes are counted from 0."""

    lanes: list[int]
    times: list[int]
    meets: list[_Meeting | None]
    missing: list[int]
    readers: list[list[int]]
    ready: list[list[int]] = field(default_factory=lambda: [[], [], []])
    busy: list[bool] = field(default_factory=lambda: [False, False])


class Serial:
    """A run of one rank of every program.

    Args:
        ranks: who is whose group and peer.
        rows: what the rows of the operation table become.
        picoseconds: int64 [operations], of communications how long they take.
    """

    def __init__(self, ranks: Communicators, rows: Mapping[int, Lowered], picoseconds: Int64) -> None:
        self.ranks, self.rows = ranks, rows
        self.picoseconds = picoseconds.tolist()
        places = [ranks.ranks(number).tolist() for number in range(len(ranks.job.programs))]
        self.first = [ranks_of[0] for ranks_of in places]
        self.program = {rank: number for number, ranks_of in enumerate(places) for rank in ranks_of}
        self.groups = {str(number): members for number, members in ranks.members()}
        self.roles: dict[int, _Role] = {}
        self.nodes = 0
        self.now = 0
        self.done = 0
        self.events: list[tuple[int, int, int]] = []
        self.met: dict[tuple[object, ...], deque[tuple[int, int, int]]] = defaultdict(deque)

    def add(self, number: int, steps: Iterable[Step]) -> None:
        """Adds the nodes of a program, in order; beyond `MAX_NODES` nothing more is kept."""
        role = _Role([], [], [], [], [])
        for step in steps:
            self.nodes += 1
            if self.nodes > MAX_NODES:
                return
            lowered = self.rows[step.row]
            needs = {*step.after, *step.waits}
            role.lanes.append(_LANES.get(lowered.kind, _COMMUNICATE))
            kernel = lowered.kind == NodeType.COMP
            time = step.duration_us * PS_PER_US or PS_PER_NS if kernel else self.picoseconds[step.row]
            role.times.append(time)
            role.meets.append(None if kernel else self._meeting(number, lowered, step.row))
            role.missing.append(len(needs))
            role.readers.append([])
            for need in needs:
                role.readers[need - 1].append(step.number - 1)
        self.roles[number] = role

    def _meeting(self, number: int, lowered: Lowered, row: int) -> _Meeting:
        assert lowered.differs is not None
        own = self.ranks.attributes(lowered.differs, self.first[number])
        if "pg_name" in own:
            programs = frozenset(self.program[rank] for rank in self.groups[str(own["pg_name"])])
            index = int(self.ranks.job.ops.group[row])
            return _Meeting((index, programs), len(programs))
        ends = (self.program[int(str(own[name]))] for name in ("comm_src", "comm_dst"))
        return _Meeting((*ends, int(self.ranks.job.ops.group[row]), int(self.ranks.job.ops.tag[row])), 2)

    def run(self) -> int | None:
        """Picoseconds until the last node has ended; None for too many nodes, or where they wait for ever."""
        if self.nodes > MAX_NODES:
            return None
        for role in self.roles.values():
            for node, missing in enumerate(role.missing):
                if not missing:
                    role.ready[role.lanes[node]].append(node)
            for lane in role.ready:
                heapify(lane)
        todo = set(self.roles)
        while todo or self.events:
            for number in sorted(todo):
                self._issue(number)
            todo = set()
            if self.events:
                self.now = self.events[0][0]
            # What ends at one moment ends before anything starts.
            while self.events and self.events[0][0] == self.now:
                _, number, node = heappop(self.events)
                self._end(number, node)
                todo.add(number)
        return self.now if self.done == self.nodes else None

    def _issue(self, number: int) -> None:
        role = self.roles[number]
        while role.ready[_RECEIVE]:
            self._pass_on(number, heappop(role.ready[_RECEIVE]), sends=False)
        for lane in (_COMPUTE, _COMMUNICATE):
            if role.ready[lane] and not role.busy[lane]:
                role.busy[lane] = True
                node = heappop(role.ready[lane])
                meeting = role.meets[node]
                if meeting is None:
                    heappush(self.events, (self.now + role.times[node], number, node))
                elif len(meeting.key) == 2:
                    self._gather(number, node, meeting)
                else:
                    self._pass_on(number, node, sends=True)

    def _gather(self, number: int, node: int, meeting: _Meeting) -> None:
        came = self.met[meeting.key]
        came.append((self.now, number, node))
        if len(came) == meeting.members:
            for _, one, its in came:
                heappush(self.events, (self.now + self.roles[one].times[its], one, its))
            came.clear()

    def _pass_on(self, number: int, node: int, *, sends: bool) -> None:
        """A send ends when its bytes have arrived, and its receive when it has come, too."""
        role = self.roles[number]
        meeting = role.meets[node]
        assert meeting is not None
        at = self.now + role.times[node] if sends else self.now
        if sends:
            heappush(self.events, (at, number, node))
        mine, theirs = self.met[(*meeting.key, sends)], self.met[(*meeting.key, not sends)]
        mine.append((at, number, node))
        if theirs:
            one, other = mine.popleft(), theirs.popleft()
            _, receiver, place = other if sends else one
            heappush(self.events, (max(one[0], other[0]), receiver, place))

    def _end(self, number: int, node: int) -> None:
        role = self.roles[number]
        self.done += 1
        if role.lanes[node] != _RECEIVE:
            role.busy[role.lanes[node]] = False
        for reader in role.readers[node]:
            role.missing[reader] -= 1
            if not role.missing[reader]:
                heappush(role.ready[role.lanes[reader]], reader)
