"""What names of events say: ByteProfile's `Comm.w.PUSH`, dPRO's `host0.rank1->Comm.1+2.SEND~>0_1_6_0`."""

from __future__ import annotations

import re
from typing import NamedTuple

COMMUNICATION = "Comm"
COMPUTATION = frozenset({"FW", "BW"})
UPDATES = frozenset({"STEP", "UPDATE"})
# A communication with a parameter server, in the order in which its parts run; BytePS calls them queue types. PUSH
# and PULL are what a worker sees of the parts between them.
QUEUE_TYPES = (
    "COORDINATE_REDUCE",
    "REDUCE",
    "COPYD2H",
    "PCIE_REDUCE",
    "COORDINATE_PUSH",
    "PUSH",
    "PULL",
    "COPYH2D",
    "COORDINATE_BROADCAST",
    "BROADCAST",
)
SERVER = ("COPY_FIRST", "SUM", "COPY_MERGED")
MESSAGES = ("PUSH_REQ", "PUSH_RES", "PULL_REQ", "PULL_RES")
# An all-reduce of Horovod on NCCL; the first two are waiting.
WAITING = frozenset({"Sync", "QUEUE"})
ALLREDUCE = "NCCL_ALLREDUCE"
NCCL = ("Sync", "QUEUE", "MEMCPY_IN_FUSION_BUFFER", ALLREDUCE, "MEMCPY_OUT_FUSION_BUFFER")
# The thread of a communication as a whole; its parts' are partitions.
TOTAL = "total"
# Messages inside an NCCL_ALLREDUCE.
TRANSFERS = frozenset({"SEND", "RECV"})
_PUSHED, _PULLED = QUEUE_TYPES.index("PUSH"), QUEUE_TYPES.index("PULL") + 1
_IN_ORDER = (
    *QUEUE_TYPES[:_PUSHED],
    *("PUSH", "PUSH_REQ", "PUSH_RES", *SERVER, "PULL", "PULL_REQ", "PULL_RES"),
    *QUEUE_TYPES[_PULLED:],
    *NCCL,
)
PLACE = {part: place for place, part in enumerate(_IN_ORDER)}
PARTS = frozenset(PLACE) | TRANSFERS

_PREFIX = re.compile(r"(?:(?:wk\d+\.)?rank\d+\.|[\w.\- ]+->)(?=\S)")
_CATEGORY = re.compile(r"(FW|BW|Comm|OUTPUT|STEP|UPDATE|I/O|push|pull)(?:[._\-\d]|$)")


class Label(NamedTuple):
    """An event's name, taken apart; events with the same label are repetitions of one thing.

    Attributes:
        prefix: whose it is, as it stands before the name ("rank0.", "host0.rank1->"); empty where nothing says.
        category: FW, BW, Comm, STEP, UPDATE, I/O, OUTPUT, push, pull; of other events, their category in the file.
        operation: "BW.conv0", "Comm.w"; of other events, their name.
        part: of a communication: which of `PARTS`; empty for all of it.
        key: of a part: the partition, or the loop, channel, chunk and slice.
        mark: what stands before the key.
    """

    prefix: str
    category: str
    operation: str
    part: str = ""
    key: str = ""
    mark: str = "."

    @property
    def name(self) -> str:
        """The label as tables show it: `rank0.Comm.w.PUSH.9`."""
        part = f".{self.part}" if self.part else ""
        return f"{self.prefix}{self.operation}{part}{self.mark if self.key else ''}{self.key}"


def parse(name: str, category: str, key: str) -> Label:
    """Takes an event's name apart.

    Args:
        name: as in the file.
        category: the event's `cat`.
        key: the event's thread, which of a communication's part is its partition.
    """
    found = _PREFIX.match(name)
    prefix = found.group() if found else ""
    operation, mark, suffix = name[len(prefix) :].partition("~>")
    known = category_of(operation)
    if known != COMMUNICATION:
        return Label(prefix, known or category or operation.split(".")[0], operation, "", suffix, mark or ".")
    whole, _, part = operation.rpartition(".")
    if part not in PARTS or whole in ("", COMMUNICATION) or key == TOTAL:
        return Label(prefix, known, operation, "", suffix, mark or ".")
    # Only of BytePS' queues is the thread a partition.
    queued = part in QUEUE_TYPES and not suffix
    return Label(prefix, known, whole, part, key if queued else suffix, mark or ".")


def category_of(name: str) -> str:
    """FW, BW, Comm, STEP, ... of an operation or a node of a dependency graph; empty for any other name."""
    found = _CATEGORY.match(name)
    return found.group(1) if found else ""


def by_number(text: str) -> tuple[tuple[int, int | str], ...]:
    """A key that sorts numbers in names as numbers: 9 before 10."""
    pieces = re.split(r"(\d+)", text)
    return tuple((0, int(piece)) if piece.isdigit() else (1, piece) for piece in pieces if piece)
