"""An example reader of Chakra traces: replays exported files, and knows nothing of what they were made from.

Its messages come from the schema's text alone. A rank has one compute resource and one for every group and every
pair of ranks that it sends between; ready nodes start by ascending id; collectives and messages start when all of
their ranks have come, and take what the textbook's ring takes with bandwidth alone. ASTRA-sim, by contrast, lets a
rank communicate once at a time; `one_at_a_time` does as it does.
"""

from __future__ import annotations

import heapq
import json
import re
import tempfile
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

SCHEMA = Path(__file__).resolve().parents[3] / "proto" / "chakra.proto"
COMP, SEND, RECV, COLLECTIVE = 4, 5, 6, 7
ALL_REDUCE, ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER = 0, 2, 6, 7


@cache
def messages() -> dict[str, Any]:
    """Message classes, from the schema's text by protoc."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    from grpc_tools import protoc

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "set"
        # Under a package of its own: one process cannot have two schemas of one name.
        schema = Path(folder) / "replayed.proto"
        schema.write_text(SCHEMA.read_text())
        assert protoc.main(["protoc", f"-I{folder}", f"--descriptor_set_out={out}", str(schema)]) == 0
        found = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in found.file:
        pool.Add(file)
    return message_factory.GetMessageClassesForFiles(["replayed.proto"], pool)


def read_messages(path: Path) -> Iterator[Any]:
    """The metadata, then the nodes."""
    classes = messages()
    data, at, kind = path.read_bytes(), 0, "ChakraProtoMsg.GlobalMetadata"
    while at < len(data):
        length = shift = 0
        while True:
            byte = data[at]
            at += 1
            length |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        message = classes[kind].FromString(data[at : at + length])
        assert len(data[at : at + length]) == length
        yield message
        at, kind = at + length, "ChakraProtoMsg.Node"


@dataclass
class Node:
    id: int
    type: int
    name: str
    deps: list[int]
    micros: int
    comm_type: int = 0
    size: int = 0
    pg: str = ""
    message: tuple[int, int, int] = (0, 0, 0)
    """Source, target and tag."""
    chain: int = 0
    """The first node of the chain of control dependencies that it is in."""
    readers: list[int] = field(default_factory=list)


def read_rank(path: Path) -> dict[int, Node]:
    """The nodes of a rank, by id."""
    found = read_messages(path)
    assert next(found).version
    nodes: dict[int, Node] = {}
    for message in found:
        attributes = {a.name: getattr(a, a.WhichOneof("value")) for a in message.attr}
        nodes[message.id] = Node(
            id=message.id, type=message.type, name=message.name, micros=message.duration_micros,
            deps=sorted({*message.ctrl_deps, *message.data_deps}), comm_type=attributes.get("comm_type", 0),
            size=attributes.get("comm_size", 0), pg=attributes.get("pg_name", ""),
            message=tuple(attributes.get(f"comm_{end}", 0) for end in ("src", "dst", "tag")),
        )  # fmt: skip
        before = list(message.ctrl_deps)
        assert len(before) <= 1, "streams are chains"
        nodes[message.id].chain = nodes[before[0]].chain if before else message.id
    for node in nodes.values():
        for before in node.deps:
            nodes[before].readers.append(node.id)
    return nodes


@lru_cache(maxsize=1)
def read_folder(folder: Path) -> tuple[dict[int, dict[int, Node]], dict[str, list[int]]]:
    """The nodes of every rank, and the groups; of the folder that was read last, as they were then."""
    files = {int(re.findall(r"\.(\d+)\.et$", p.name)[0]): p for p in folder.glob("*.et")}
    return {rank: read_rank(files[rank]) for rank in sorted(files)}, json.loads(
        (folder / "comm_groups.json").read_text()
    )


def seconds(node: Node, ranks: int, bytes_per_s: float) -> float:
    """A ring's time by bandwidth alone (Patarasuk and Yuan 2009), and that of a message."""
    if node.type != COLLECTIVE:
        return node.size / bytes_per_s
    steps = {
        ALL_REDUCE: 2 * (ranks - 1) / ranks,
        REDUCE_SCATTER: (ranks - 1) / ranks,
        ALL_TO_ALL: (ranks - 1) / ranks,
        ALL_GATHER: ranks - 1,
    }
    return steps[node.comm_type] * node.size / bytes_per_s


class Replay:
    """Runs the traces of a folder.

    Args:
        folder: what was exported.
        bytes_per_s: of every link.
        streams: whether kernels of different chains run side by side, as CUDA lets them; ASTRA-sim does not.
        one_at_a_time: whether a rank has one collective or send at a time, and sends do not wait for their
            receives, as in ASTRA-sim.
    """

    def __init__(
        self, folder: Path, bytes_per_s: float, *, streams: bool = False, one_at_a_time: bool = False
    ) -> None:
        self.streams, self.one_at_a_time = streams, one_at_a_time
        self.nodes, self.groups = read_folder(folder)
        self.waits = {
            rank: {node.id: len(node.deps) for node in nodes.values()} for rank, nodes in self.nodes.items()
        }
        self.rate = bytes_per_s
        self.events: list[tuple[float, int, int]] = []
        self.ready: dict[int, list[int]] = {rank: [] for rank in self.nodes}
        self.busy: set[tuple[int, object]] = set()
        self.met: dict[object, deque[Any]] = defaultdict(deque)
        self.done = 0

    def run(self) -> float:
        """Seconds until the last node has ended; fails where nodes wait for each other for ever."""
        now = 0.0
        for rank, nodes in self.nodes.items():
            self.ready[rank] = [node.id for node in nodes.values() if not node.deps]
            heapq.heapify(self.ready[rank])
        for rank in self.nodes:
            self._issue(rank, now)
        while self.events:
            now, rank, number = heapq.heappop(self.events)
            self._end(rank, number)
            # What ends at one moment ends before anything starts.
            if not self.events or self.events[0][:2] != (now, rank):
                self._issue(rank, now)
        total = sum(map(len, self.nodes.values()))
        assert self.done == total, f"{total - self.done} of {total} nodes never ended"
        return now

    def _resource(self, node: Node) -> object:
        if node.type == COMP:
            return COMP, node.chain if self.streams else 0
        if self.one_at_a_time:
            return node.message if node.type == RECV else COLLECTIVE
        return node.pg or node.message

    def _issue(self, rank: int, now: float) -> None:
        held = []
        while self.ready[rank]:
            number = heapq.heappop(self.ready[rank])
            node = self.nodes[rank][number]
            if (rank, self._resource(node)) in self.busy:
                held.append(number)
                continue
            self.busy.add((rank, self._resource(node)))
            if node.type == COMP:
                heapq.heappush(self.events, (now + node.micros * 1e-6, rank, number))
            else:
                self._meet(rank, node, now)
        for number in held:
            heapq.heappush(self.ready[rank], number)

    def _meet(self, rank: int, node: Node, now: float) -> None:
        """A rank takes part once at a time, so those who have come are all of one collective or message."""
        if self.one_at_a_time and not node.pg:
            self._pass_on(rank, node, now)
            return
        came = self.met[node.pg or node.message]
        came.append((rank, node.id))
        expected = len(self.groups[node.pg]) if node.pg else 2
        if len(came) < expected:
            return
        parts = [self.nodes[r][n] for r, n in came]
        assert len({(p.comm_type, p.size) for p in parts}) == 1, parts
        assert {p.type for p in parts} in ({COLLECTIVE}, {SEND, RECV})
        for r, n in came:
            heapq.heappush(self.events, (now + seconds(node, expected, self.rate), r, n))
        came.clear()

    def _pass_on(self, rank: int, node: Node, now: float) -> None:
        """A send ends when its bytes have arrived, and its receive when it has come, too."""
        arrival = now + seconds(node, 2, self.rate)
        if node.type == SEND:
            heapq.heappush(self.events, (arrival, rank, node.id))
        mine, theirs = (self.met[kind, node.message] for kind in (node.type, SEND + RECV - node.type))
        mine.append((arrival if node.type == SEND else now, rank, node.id))
        if theirs:
            sent, received = (mine, theirs) if node.type == SEND else (theirs, mine)
            (arrived, *_), (ready, receiver, number) = sent.popleft(), received.popleft()
            heapq.heappush(self.events, (max(arrived, ready), receiver, number))

    def _end(self, rank: int, number: int) -> None:
        nodes = self.nodes[rank]
        self.done += 1
        self.busy.discard((rank, self._resource(nodes[number])))
        for reader in nodes[number].readers:
            self.waits[rank][reader] -= 1
            if not self.waits[rank][reader]:
                heapq.heappush(self.ready[rank], reader)
