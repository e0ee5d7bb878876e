"""A set of Chakra traces, one of each rank, as columns: what checking and importing them needs.

Nodes are decoded many at a time, those of several small files together; a file with a node that is not as usual is
read a node at a time instead. Of a node some hundred bytes stay: its id, what it is, its sizes and times, and its
dependencies; of attributes that nothing here reads, their number.
"""

from __future__ import annotations

import json
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from echograph.errors import FormatError, InputError
from echograph.ir.chakra.messages import (
    AttributeValue,
    ChakraNode,
    NodeColumns,
    decode_metadata,
    decode_nodes,
    eights,
    read_metadata,
    read_nodes,
    split,
    varints,
)
from echograph.ir.columns import NONE, Int32, Int64, Ragged
from echograph.ir.files import read_whole
from echograph.progress import Progress, silent

ABSENT = -(2**63)
"""In place of a number that a node does not state."""

MAX_NODES = 10_000_000
MAX_DEPENDENCIES = 50_000_000
MAX_NAME_LETTERS = 2**16
MAX_TEXT_LETTERS = 2**28
"""Of all names that differ, and of the names of groups."""

MAX_GROUPS_BYTES = 64 * 2**20
MAX_DISTINCT = 100_000
GROUPS_FILE = "comm_groups.json"
ROLES_FILE = "roles.json"

_Groups = Mapping[str, tuple[int, ...]]
_TRACE = re.compile(r"(.+)\.(0|[1-9]\d{0,8})\.et")
_NUMBERS = ("comm_type", "comm_size", "comm_src", "comm_dst", "comm_tag", "num_ops", "tensor_size", "stream")
ATTRIBUTES = (*_NUMBERS, "pg_name", "is_cpu_op", "involved_dim", "comm_priority")
"""Those that are read."""

_COLUMNS = {**dict.fromkeys(_NUMBERS, False), "is_cpu_op": True}
WINDOW_BYTES = 8 * 2**20
"""Of files that are decoded together."""

_OWN = ("comm_src", "comm_dst")
_MAX_TEMPLATES_BYTES = 256 * 2**20

_GROUP = b"\x0a\x07pg_name\xea\x01"
"""How an attribute begins that names a group, before the length of the name."""

_Places = dict[str, tuple[Int64, Int64]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankTrace:
    """The nodes of a rank in the order of its file; the columns of numbers hold `ABSENT` where one is not stated.

    Attributes:
        rank: the number in the file's name.
        path: the file.
        version: that the file states; "" where it states none, None where its metadata is empty.
        id: uint64.
        name: index into `Traces.names`.
        type: `NodeType` values.
        host: whether it is work of the host (`is_cpu_op`).
        group: index into `Traces.groups_named`.
        comm_type: which collective.
        comm_size: bytes.
        comm_src: rank.
        comm_dst: rank.
        comm_tag: of a message.
        num_ops: floating-point operations.
        tensor_size: bytes that it moves.
        stream: of the device, as PyTorch's traces state it.
        duration_us: whole microseconds.
        ctrl_deps: rows; -1 where the file has no node of that id.
        data_deps: rows; -1 where the file has no node of that id.
        wrong_dims: whether `involved_dim` is stated, but no list.
    """

    rank: int
    path: Path
    version: str | None
    id: npt.NDArray[np.uint64]
    name: Int32
    type: npt.NDArray[np.uint8]
    host: npt.NDArray[np.bool_]
    group: Int32
    comm_type: Int64
    comm_size: Int64
    comm_src: Int64
    comm_dst: Int64
    comm_tag: Int64
    num_ops: Int64
    tensor_size: Int64
    stream: Int64
    duration_us: npt.NDArray[np.uint64]
    ctrl_deps: Ragged
    data_deps: Ragged
    wrong_dims: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.id)

    def ascending(self, mask: npt.NDArray[np.bool_]) -> Int64:
        """The rows of a mask by ascending id."""
        rows = np.flatnonzero(mask)
        return rows[np.argsort(self.id[rows], kind="stable")]

    def edges(self, *, control: bool = True) -> tuple[Int64, Int64]:
        """Rows (before, after), each pair once, of all dependencies whose node the file has, or of data alone."""
        kinds = (self.ctrl_deps, self.data_deps) if control else (self.data_deps,)
        rows, deps = (np.concatenate(part) for part in ([k.rows for k in kinds], [k.values for k in kinds]))
        key = np.unique(deps[deps != NONE] * max(1, len(self)) + rows[deps != NONE])
        before, after = np.divmod(key, max(1, len(self)))
        return before, after

    def order(self, *, control: bool = True) -> list[int]:
        """Rows, each after those that it depends on, else by ascending id; without those of a cycle."""
        ascending = np.argsort(self.id, kind="stable")
        place = np.empty(len(self), np.int64)
        place[ascending] = np.arange(len(self))
        before, after = self.edges(control=control)
        if (place[before] < place[after]).all():
            return list(ascending.tolist())
        return [int(ascending[at]) for at in _sorted(len(self), place[before], place[after])]


def _sorted(count: int, before: Int64, after: Int64) -> Iterator[int]:
    """Numbers, each after those that come before it, else the lowest that can come next."""
    children = followers(count, before, after)
    missing = np.bincount(after, minlength=count).tolist()
    ready = [at for at, number in enumerate(missing) if number == 0]
    while ready:
        at = heappop(ready)
        yield at
        for child in children.row(at):
            missing[child] -= 1
            if not missing[child]:
                heappush(ready, child)


def followers(count: int, before: Int64, after: Int64) -> Ragged:
    """For every number those that come after it."""
    order = np.argsort(before, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(before, minlength=count))])
    return Ragged(offsets, after[order])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Traces:
    """The traces of all ranks.

    Attributes:
        prefix: what the names of the files begin with.
        ranks: by ascending rank.
        groups: name -> ranks; None where there is no file of groups.
        groups_path: where they stand, or would.
        names: of nodes.
        groups_named: what nodes state as `pg_name`, whatever its type; None for those that state none.
        others: how many nodes have an attribute that is not read, by its name.
    """

    prefix: str
    ranks: tuple[RankTrace, ...]
    groups: _Groups | None
    groups_path: Path
    names: tuple[str, ...]
    groups_named: tuple[AttributeValue | None, ...]
    others: Mapping[str, int]

    def name(self, trace: RankTrace, row: int) -> str:
        """Name of a node."""
        return self.names[int(trace.name[row])]


def group_name(traces: Traces, trace: RankTrace, row: int) -> str:
    """The group of a node: "" is the whole world, which nodes without one mean; "?" none that is text."""
    return group_called(traces.groups_named[int(trace.group[row])])


def group_called(named: AttributeValue | None) -> str:
    """The group that a node means by what it states as its `pg_name`, as `group_name` has it."""
    if named is None or named == "0":
        return ""
    return named if isinstance(named, str) else "?"


def ranks_of_group(traces: Traces, name: str) -> tuple[int, ...]:
    """The ranks of a group; none where there is no such group."""
    return (traces.groups or {}).get(name, ()) if name else tuple(trace.rank for trace in traces.ranks)


def read_traces(source: Path, progress: Progress = silent) -> Traces:
    """Reads the traces of a folder, or those whose names begin with a path (`FOLDER/NAME`).

    Args:
        source: the folder, or the path.
        progress: told how many ranks have been read.

    Raises:
        InputError: there are none, or a file cannot be read.
        FormatError: a file is malformed, or the set is larger than is read; names the file.
    """
    prefix, files = _files(source)
    folder = files[0][1].parent
    groups_path = _groups_path(folder)
    groups = read_groups(groups_path) if groups_path.exists() else None
    shared = _Shared()
    ranks: list[RankTrace] = []
    for trace in _read_ranks(files, shared):
        ranks.append(trace)
        progress(f"reading traces of ranks in {folder}", len(ranks), len(files))
    return Traces(
        prefix=prefix,
        ranks=tuple(ranks),
        groups=groups,
        groups_path=groups_path,
        names=tuple(shared.names),
        groups_named=tuple(value for _, value in shared.groups),
        others=dict(sorted(shared.others.items())),
    )


def _files(source: Path) -> tuple[str, list[tuple[int, Path]]]:
    """What the names begin with, and (rank, file) by rank."""
    folder, wanted = (source, None) if source.is_dir() else (source.parent, source.name)
    if (folder / ROLES_FILE).exists():
        raise InputError(f"{source}: holds one trace a role ({ROLES_FILE}): export those of all ranks")
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise InputError(f"{source}: {error.strerror or error}; give the folder of NAME.RANK.et files") from None
    sets: dict[str, list[tuple[int, Path]]] = {}
    for path in entries:
        if (match := _TRACE.fullmatch(path.name)) and wanted in (None, match[1], path.name):
            sets.setdefault(match[1], []).append((int(match[2]), path))
    if not sets:
        raise InputError(f"{source}: no Chakra traces there: give the folder of NAME.RANK.et files")
    if len(sets) > 1:
        names = ", ".join(sorted(sets)[:4])
        raise InputError(f"{source}: holds {len(sets)} sets of traces ({names}): give one, as {source}/NAME")
    ((prefix, files),) = sets.items()
    return prefix, sorted(files)


def _groups_path(folder: Path) -> Path:
    """The file of groups, or where it would be: by its usual name, else the one that is called like it."""
    usual = folder / GROUPS_FILE
    others = sorted(folder.glob("*comm*group*.json"))
    return others[0] if not usual.exists() and len(others) == 1 else usual


def read_groups(path: Path) -> _Groups:
    """Process groups, name -> ranks.

    Raises:
        InputError: the file cannot be read.
        FormatError: it does not hold `{"name": [rank, ...], ...}`.
    """
    data = read_whole(path, "give the folder of the traces", MAX_GROUPS_BYTES)
    try:
        found = json.loads(data, object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:
        line = " ".join(str(error).split())[:100]
        raise FormatError(f"{path}: no JSON of process groups ({line})") from None
    if not isinstance(found, dict):
        raise FormatError(f'{path}: holds no process groups: give {{"1": [0, 1], ...}}')
    for name, ranks in found.items():
        if not isinstance(ranks, list) or not all(type(r) is int and abs(r) < 2**31 for r in ranks):
            raise FormatError(f"{path}: group '{name[:40]}' is no list of ranks: give [0, 1, ...]")
    return {name: tuple(ranks) for name, ranks in found.items()}


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice")
    return found


class _Shared:
    """What the ranks' columns index, and how much has been read."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.groups: dict[tuple[type, AttributeValue | None], int] = {}
        self.others: Counter[str] = Counter()
        self.nodes = self.dependencies = self.letters = 0

    def name(self, path: Path, node: ChakraNode) -> int:
        return self._index(path, node, self.names, node.name, node.name)

    def group(self, path: Path, node: ChakraNode) -> int:
        value = node.attributes.get("pg_name")
        return self._index(path, node, self.groups, (type(value), value), value)

    def take_names(self, indices: Int64, texts: Iterable[tuple[int, str]]) -> bool:
        """Writes the index of each (place, name) to its place; whether all are of a length that is read."""
        return all(self._take(indices, at, self.names, text, text) for at, text in texts)

    def take_groups(self, indices: Int64, values: Iterable[tuple[int, AttributeValue]]) -> bool:
        """The same for what nodes state as their group."""
        return all(self._take(indices, at, self.groups, (type(value), value), value) for at, value in values)

    def _take(self, indices: Int64, at: int, known: dict[Any, int], key: object, value: object) -> bool:
        found = self.index(known, key, value)
        indices[at] = NONE if found is None else found
        return found is not None

    def index(self, known: dict[Any, int], key: object, value: object) -> int | None:
        """The index of a text, added where it is new; None where it, or all of them together, are too long."""
        if (found := known.get(key)) is not None:
            return found
        letters = _letters(value)
        if letters > MAX_NAME_LETTERS or self.letters + letters > MAX_TEXT_LETTERS:
            return None
        self.letters += letters
        return known.setdefault(key, len(known))

    def _index(self, path: Path, node: ChakraNode, known: dict[Any, int], key: object, value: object) -> int:
        found = self.index(known, key, value)
        if found is None:
            raise FormatError(
                f"{path}: node {node.id} has a name or group of {_letters(value):,} letters, or all names are "
                f"over {MAX_TEXT_LETTERS:,} letters together: corrupted"
            )
        return found

    def add(self, path: Path, nodes: int, dependencies: int) -> None:
        """Counts nodes.

        Raises:
            FormatError: the set is too large.
        """
        self.nodes += nodes
        self.dependencies += dependencies
        if self.nodes > MAX_NODES or self.dependencies > MAX_DEPENDENCIES:
            what = f"over {MAX_NODES:,} nodes or {MAX_DEPENDENCIES:,} dependencies in all"
            raise FormatError(f"{path}: {what}: give traces of fewer ranks or steps")

    def count(self, path: Path, node: ChakraNode) -> None:
        """Counts a node, and the attributes that are not read.

        Raises:
            FormatError: the set is too large.
        """
        self.add(path, 1, len(node.ctrl_deps) + len(node.data_deps))
        for name in node.attributes.keys() - set(ATTRIBUTES):
            if (short := name[:80]) in self.others or len(self.others) < MAX_DISTINCT:
                self.others[short] += 1


def _letters(value: object) -> int:
    return len(value) if isinstance(value, str | bytes | tuple) else 1


# -- many nodes at a time ------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _File:
    """A trace while it is read.

    Attributes:
        rank: whose.
        path: the file.
        version: as that of a `RankTrace`.
        parts: columns of the nodes that have been decoded.
        others: nodes by attribute that is not read.
        nodes: how many have been decoded.
        dependencies: of these.
        odd: whether it is to be read a node at a time.
        data: all of the file, where it is small.
        places: where what equal ranks differ in stands: by column, nodes and where their values begin.
        trace: the whole, once it has been read.
    """

    rank: int
    path: Path
    version: str | None = None
    parts: list[dict[str, Any]] = field(default_factory=list)
    others: Counter[str] = field(default_factory=Counter)
    nodes: int = 0
    dependencies: int = 0
    odd: bool = False
    data: bytes = b""
    places: _Places = field(default_factory=dict)
    trace: RankTrace | None = None

    def count(self, nodes: int, dependencies: int, shared: _Shared) -> None:
        """Counts nodes of the file, in the set, too."""
        self.nodes, self.dependencies = self.nodes + nodes, self.dependencies + dependencies
        shared.add(self.path, nodes, dependencies)


@dataclass(slots=True, eq=False)
class _Piece:
    """Messages of nodes that follow each other in a file."""

    file: _File
    data: bytes
    begins: list[int]
    ends: list[int]


def _read_ranks(files: Sequence[tuple[int, Path]], shared: _Shared) -> Iterator[RankTrace]:
    """The traces in order. Small files are decoded together; of several of one size only those that differ."""
    known, waiting, size = _Templates(), list[_File](), 0
    for rank, path in files:
        file = _File(rank, path)
        waiting.append(file)
        try:
            if path.stat().st_size > WINDOW_BYTES:
                yield from _finish_all(waiting[:-1], known, shared)
                for piece in _pieces(file):
                    _decode([piece], shared)
                yield _finished(file, shared)
                waiting, size = [], 0
                continue
            file.data = path.read_bytes()
        except OSError:
            file.odd = True
        if not known.fill(file, shared):
            size += len(file.data)
        if size >= WINDOW_BYTES:
            yield from _finish_all(waiting, known, shared)
            waiting, size = [], 0
    yield from _finish_all(waiting, known, shared)


def _finish_all(waiting: Sequence[_File], known: _Templates, shared: _Shared) -> Iterator[RankTrace]:
    """Small files: first those of different sizes, then those that are like none of them."""
    left = [file for file in waiting if file.trace is None]
    while left:
        first = list({len(file.data): file for file in reversed(left)}.values())[::-1]
        _decode([piece for file in first for piece in _pieces(file)], shared)
        for file in first:
            if not file.odd:
                file.trace = _finished(file, shared)
                known.add(file)
        left = [file for file in left if file not in first and not known.fill(file, shared)]
    yield from (_finished(file, shared) if file.trace is None else file.trace for file in waiting)


def _pieces(file: _File) -> Iterator[_Piece]:
    """The nodes of a file in pieces of a window; sets `odd` where something is not as usual."""
    rest, first = b"", True
    try:
        for read in [file.data] if file.data else _windows(file.path):
            data = rest + read
            begins, ends, after, odd = split(data)
            file.odd |= odd
            rest = data[after:]
            if first and begins:
                version, attributes = decode_metadata(file.path, data[begins[0] : ends[0]])
                file.version = version if version or attributes else None
                begins, ends, first = begins[1:], ends[1:], False
            yield _Piece(file, data[:after], begins, ends)
            if file.odd:
                return
    except (OSError, FormatError):
        file.odd = True
    file.odd |= first or bool(rest)


def _windows(path: Path) -> Iterator[bytes]:
    with path.open("rb") as opened:
        while read := opened.read(WINDOW_BYTES):
            yield read


def _decode(pieces: Sequence[_Piece], shared: _Shared) -> None:
    """Decodes the pieces of files together, and gives each file its part."""
    begins: list[int] = []
    ends: list[int] = []
    at = 0
    for piece in pieces:
        begins += [at + begin for begin in piece.begins] if at else piece.begins
        ends += [at + end for end in piece.ends] if at else piece.ends
        at += len(piece.data)
    found = decode_nodes(b"".join(piece.data for piece in pieces), begins, ends, _COLUMNS)
    window = _Window(found, _as_columns(found))
    low = at = 0
    for piece in pieces:
        window.part(low, low := low + len(piece.begins), at, shared, piece.file)
        at += len(piece.data)


def _as_columns(found: NodeColumns) -> dict[str, Any]:
    """The attributes that are read, a value for every node; marks nodes odd whose numbers are beyond 63 bits."""
    count, attributes = len(found.odd), found.attributes
    columns: dict[str, Any] = {name: np.full(count, ABSENT, np.int64) for name in _NUMBERS}
    columns["host"], columns["wrong_dims"] = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
    columns["group"] = np.full(count, NONE, np.int64)
    for name, (nodes, stated, _) in attributes.numbers.items():
        columns["host" if name == "is_cpu_op" else name][nodes] = stated
    nodes, which, _ = attributes.others
    codes = {name: code for code, name in enumerate(ATTRIBUTES)}
    code_of = np.array([codes.get(name, NONE) for name, _ in attributes.values], np.int64)[which]
    for name, code in codes.items():
        rows = np.flatnonzero(code_of == code)
        own, values = nodes[rows], [attributes.values[at][1] for at in which[rows].tolist()]
        if name == "pg_name":
            columns["group"][own] = which[rows]
        elif name == "is_cpu_op":
            columns["host"][own] = [bool(value) for value in values]
        elif name == "involved_dim":
            columns["wrong_dims"][own] = [not isinstance(value, tuple) for value in values]
        elif name in _NUMBERS and len(rows):
            whole = [value if type(value) is int else ABSENT for value in values]
            fits = [value == ABSENT or -(2**63) < value < 2**63 for value in whole]
            found.odd[own[~np.array(fits)]] = True
            columns[name][own] = [value if fit else ABSENT for value, fit in zip(whole, fits, strict=True)]
    return columns


@dataclass(slots=True, eq=False)
class _Window:
    """What has been decoded together, and where its texts stand in the tables of the set."""

    found: NodeColumns
    columns: dict[str, Any]
    names: Int64 = field(init=False)
    groups: Int64 = field(init=False)

    def __post_init__(self) -> None:
        self.names = np.full(len(self.found.texts), NONE, np.int64)
        self.groups = np.full(len(self.found.attributes.values), NONE, np.int64)

    def part(self, low: int, high: int, start: int, shared: _Shared, file: _File) -> None:
        """Gives a file the nodes from low to high, unless one of them is odd; its bytes begin at start."""
        found, columns = self.found, self.columns
        file.odd |= bool(found.odd[low:high].any())
        if file.odd:
            return
        used, named = found.names[low:high], columns["group"][low:high]
        texts = ((at, found.texts[at]) for at in _new(self.names, used))
        values = ((at, found.attributes.values[at][1]) for at in _new(self.groups, named[named != NONE]))
        none = shared.index(shared.groups, (type(None), None), None)
        known = shared.take_names(self.names, texts) and shared.take_groups(self.groups, values)
        if none is None or not known:
            file.odd = True
            return
        part = {name: column[low:high] for name, column in columns.items() if name != "group"}
        part["group"] = np.where(named == NONE, none, self.groups[named] if len(self.groups) else none)
        part |= {"id": found.id[low:high], "name": self.names[used], "type": found.type[low:high]}
        part["duration_us"] = found.duration_us[low:high]
        for kind, (counts, ids) in (("ctrl_deps", found.ctrl_deps), ("data_deps", found.data_deps)):
            begin, end = int(counts[:low].sum()), int(counts[:high].sum())
            part[kind] = counts[low:high], ids[begin:end]
        file.parts.append(part)
        file.count(high - low, sum(len(part[kind][1]) for kind in ("ctrl_deps", "data_deps")), shared)
        nodes, which, _ = found.attributes.others
        inside = which[(nodes >= low) & (nodes < high)]
        file.places = self._places(low, high, start)
        for at, times in zip(*(part.tolist() for part in np.unique(inside, return_counts=True)), strict=True):
            if (name := found.attributes.values[at][0]) not in ATTRIBUTES:
                file.others[name[:80]] += times

    def _places(self, low: int, high: int, start: int) -> _Places:
        """Where the numbers and names stand that equal ranks differ in."""
        attributes = self.found.attributes
        places = {}
        for name in _OWN:
            nodes, _, at = attributes.numbers[name]
            kept = (
                slice(*np.searchsorted(nodes, (low, high)).tolist())
                if (np.diff(nodes) > 0).all()
                else ((nodes >= low) & (nodes < high))
            )
            places[name] = nodes[kept] - low, at[kept] - start
        nodes, which, ends = attributes.others
        lengths = np.array([_group_length(text) for text in attributes.texts], np.int64)[which]
        kept = (nodes >= low) & (nodes < high) & (lengths > 0)
        places["group"] = nodes[kept] - low, (ends - lengths)[kept] - start
        return places


def _group_length(attribute: bytes) -> int:
    """Bytes of the text that names a group, with which its attribute ends; 0 where it is none, or long."""
    length = len(attribute) - len(_GROUP) - 1
    usual = attribute.startswith(_GROUP) and 0 < length < 128 and attribute[len(_GROUP)] == length
    return length if usual else 0


def _new(known: Int64, used: Int64) -> list[int]:
    """Those used that are not known yet."""
    fresh: list[int] = np.flatnonzero(
        np.bincount(used, minlength=len(known)).astype(np.bool_) & (known == NONE)
    ).tolist()
    return fresh


def _finished(file: _File, shared: _Shared) -> RankTrace:
    """The trace of a file whose nodes have all been decoded, or else the one that is read a node at a time."""
    if file.odd:
        shared.nodes, shared.dependencies = shared.nodes - file.nodes, shared.dependencies - file.dependencies
        return _read_rank(file.rank, file.path, shared)
    for name, count in file.others.items():
        if name in shared.others or len(shared.others) < MAX_DISTINCT:
            shared.others[name] += count
    parts = file.parts
    own = _joined(parts, "id", np.uint64)
    ragged: dict[str, Any] = {}
    for kind in ("ctrl_deps", "data_deps"):
        counts = _joined([{kind: part[kind][0]} for part in parts], kind, np.int64)
        ids = _joined([{kind: part[kind][1]} for part in parts], kind, np.uint64)
        ragged[kind] = _resolved(own, np.concatenate([[0], np.cumsum(counts)]), ids)
    return RankTrace(
        rank=file.rank, path=file.path, version=file.version, id=own, name=_joined(parts, "name", np.int32),
        type=_joined(parts, "type", np.uint8), host=_joined(parts, "host", np.bool_),
        group=_joined(parts, "group", np.int32), duration_us=_joined(parts, "duration_us", np.uint64),
        wrong_dims=_joined(parts, "wrong_dims", np.bool_), **ragged,
        **{name: _joined(parts, name, np.int64) for name in _NUMBERS},
    )  # fmt: skip


class _Templates:
    """Traces that have been read, to read those that differ from one in ranks and groups alone."""

    def __init__(self) -> None:
        self._by_size: dict[int, list[_Template]] = {}
        self._bytes = 0

    def add(self, file: _File) -> None:
        """Remembers a file, unless it had to be read a node at a time, or there are many already."""
        if file.trace is not None and not file.odd and self._bytes + len(file.data) <= _MAX_TEMPLATES_BYTES:
            self._bytes += len(file.data)
            self._by_size.setdefault(len(file.data), []).append(_Template(file, file.trace))

    def fill(self, file: _File, shared: _Shared) -> bool:
        """Sets the trace of a file that is like one that has been read; whether it is."""
        alike = self._by_size.get(len(file.data), ())
        file.trace = next((trace for one in alike if (trace := one.read(file, shared)) is not None), None)
        return file.trace is not None


class _Template:
    """A trace that others may differ from in ranks and groups alone."""

    def __init__(self, file: _File, trace: RankTrace) -> None:
        self.file, self.trace = file, trace
        self.bytes, words = eights(file.data)
        self.own = np.zeros(len(self.bytes), np.uint8)  # the bits that may differ
        for name in _OWN:
            _, at = file.places[name]
            lengths = varints(words[at])[1]
            for further in range(int(lengths.max(initial=0))):
                self.own[at[lengths > further] + further] = 0x7F
        nodes, at = file.places["group"]
        self.groups: list[tuple[Int64, Int64, int]] = []
        stated = trace.group[nodes]
        for group in np.unique(stated).tolist():
            these = stated == group
            length = file.data[int(at[these][0]) - 1]
            self.groups.append((nodes[these], at[these], length))
            for further in range(length):
                self.own[at[these] + further] = 0xFF

    def read(self, file: _File, shared: _Shared) -> RankTrace | None:
        """The trace of a file of the same size; None where more than ranks and groups differ."""
        data, words = eights(file.data)
        if ((data ^ self.bytes) & ~self.own).any():
            return None
        group = self.trace.group.copy()
        for nodes, at, length in self.groups:
            named = file.data[int(at[0]) : int(at[0]) + length]
            if not all((data[at + further] == byte).all() for further, byte in enumerate(named)):
                return None
            try:
                text = named.decode()
            except UnicodeDecodeError:
                return None
            if (index := shared.index(shared.groups, (str, text), text)) is None:
                return None
            group[nodes] = index
        own = {}
        for column in _OWN:
            nodes, at = self.file.places[column]
            own[column] = getattr(self.trace, column).copy()
            own[column][nodes] = varints(words[at])[0]
        shared.add(file.path, self.file.nodes, self.file.dependencies)
        for name, count in self.file.others.items():
            if name in shared.others or len(shared.others) < MAX_DISTINCT:
                shared.others[name] += count
        return replace(self.trace, rank=file.rank, path=file.path, group=group, **own)


def _joined(parts: list[dict[str, Any]], name: str, dtype: Any) -> Any:
    """A column from its parts, of its own: a part of a window would keep the whole of it."""
    return np.concatenate([np.zeros(0, dtype), *(part[name] for part in parts)]).astype(dtype, copy=False)


# -- a node at a time ----------------------------------------------------------------------------------------


def _read_rank(rank: int, path: Path, shared: _Shared) -> RankTrace:
    version, attributes = read_metadata(path)
    ids, durations = array("Q"), array("Q")
    names, groups, numbers = array("i"), array("i"), {name: array("q") for name in _NUMBERS}
    types, hosts, dims = bytearray(), bytearray(), bytearray()
    deps = [(array("q", [0]), array("Q")) for _ in range(2)]
    for node in read_nodes(path):
        shared.count(path, node)
        ids.append(node.id)
        names.append(shared.name(path, node))
        types.append(node.type)
        hosts.append(bool(node.attributes.get("is_cpu_op", False)))
        dims.append(not isinstance(node.attributes.get("involved_dim", ()), tuple))
        groups.append(shared.group(path, node))
        durations.append(node.duration_us)
        for name, column in numbers.items():
            column.append(_number(path, node, name))
        for (offsets, values), found in zip(deps, (node.ctrl_deps, node.data_deps), strict=True):
            values.extend(found)
            offsets.append(len(values))
    own = _column(ids, np.uint64)
    ctrl, data = (_resolved(own, _column(o, np.int64), _column(v, np.uint64)) for o, v in deps)
    return RankTrace(
        rank=rank, path=path, version=version if version or attributes else None, id=own,
        name=_column(names, np.int32), type=_column(types, np.uint8), host=_column(hosts, np.bool_),
        group=_column(groups, np.int32), duration_us=_column(durations, np.uint64), ctrl_deps=ctrl,
        data_deps=data, wrong_dims=_column(dims, np.bool_),
        **{name: _column(values, np.int64) for name, values in numbers.items()},
    )  # fmt: skip


def _number(path: Path, node: ChakraNode, name: str) -> int:
    value = node.attributes.get(name)
    if type(value) is not int:
        return ABSENT
    if not -(2**63) < value < 2**63:
        raise FormatError(f"{path}: node {node.id} has {name} {value}, beyond 63 bits")
    return value


def _column(values: array[Any] | bytearray, dtype: Any) -> Any:
    return np.frombuffer(values, dtype) if len(values) else np.zeros(0, dtype)


def _resolved(own: npt.NDArray[np.uint64], offsets: Int64, ids: npt.NDArray[np.uint64]) -> Ragged:
    """Dependencies as rows instead of ids."""
    if not len(own):
        return Ragged(offsets, np.full(len(ids), NONE, np.int64))
    if int(own[-1]) - int(own[0]) == len(own) - 1 and (own[1:] > own[:-1]).all():
        rows = ids - own[0]  # a smaller id becomes a vast number
        return Ragged(offsets, np.where(rows < len(own), rows, np.uint64(0)).astype(np.int64) - (rows >= len(own)))
    order = np.argsort(own, kind="stable")
    at = np.minimum(np.searchsorted(own[order], ids), len(own) - 1)
    return Ragged(offsets, np.where(own[order[at]] == ids, order[at], NONE))
