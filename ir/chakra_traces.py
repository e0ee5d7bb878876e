"""A set of Chakra traces, one of each rank, as columns: what checking and importing them needs.

The files are read one after the other. Of a node some hundred bytes stay: its id, what it is, its sizes and times,
and its dependencies; of attributes that nothing here reads, their number.
"""

from __future__ import annotations

import json
import re
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from echograph.errors import FormatError, InputError
from echograph.ir.columns import NONE, Int32, Int64, Ragged
from echograph.ir.files import read_whole
from echograph.ir.serde_chakra import ChakraNode, Value, read, read_metadata

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

Groups = Mapping[str, tuple[int, ...]]
_TRACE = re.compile(r"(.+)\.(0|[1-9]\d{0,8})\.et")
_NUMBERS = ("comm_type", "comm_size", "comm_src", "comm_dst", "comm_tag", "num_ops", "tensor_size", "stream")
ATTRIBUTES = (*_NUMBERS, "pg_name", "is_cpu_op", "involved_dim", "comm_priority")
"""Those that are read."""


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
    groups: Groups | None
    groups_path: Path
    names: tuple[str, ...]
    groups_named: tuple[Value | None, ...]
    others: Mapping[str, int]

    def name(self, trace: RankTrace, row: int) -> str:
        """Name of a node."""
        return self.names[int(trace.name[row])]


def read_traces(source: Path) -> Traces:
    """Reads the traces of a folder, or those whose names begin with a path (`FOLDER/NAME`).

    Raises:
        InputError: there are none, or a file cannot be read.
        FormatError: a file is malformed, or the set is larger than is read; names the file.
    """
    prefix, files = _files(source)
    folder = files[0][1].parent
    groups_path = _groups_path(folder)
    groups = read_groups(groups_path) if groups_path.exists() else None
    shared = _Shared()
    ranks = tuple(_read_rank(rank, path, shared) for rank, path in files)
    return Traces(
        prefix=prefix,
        ranks=ranks,
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


def read_groups(path: Path) -> Groups:
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
        self.groups: dict[tuple[type, Value | None], int] = {}
        self.others: Counter[str] = Counter()
        self.nodes = self.dependencies = self.letters = 0

    def name(self, path: Path, node: ChakraNode) -> int:
        return self._index(path, node, self.names, node.name, node.name)

    def group(self, path: Path, node: ChakraNode) -> int:
        value = node.attributes.get("pg_name")
        return self._index(path, node, self.groups, (type(value), value), value)

    def _index(self, path: Path, node: ChakraNode, known: dict[Any, int], key: object, value: object) -> int:
        found = known.get(key)
        if found is None:
            letters = len(value) if isinstance(value, str | bytes | tuple) else 1
            self.letters += letters
            if letters > MAX_NAME_LETTERS or self.letters > MAX_TEXT_LETTERS:
                raise FormatError(
                    f"{path}: node {node.id} has a name or group of {letters:,} letters, or all names are over "
                    f"{MAX_TEXT_LETTERS:,} letters together: corrupted"
                )
            found = known[key] = len(known)
        return found

    def count(self, path: Path, node: ChakraNode) -> None:
        """Counts a node, and the attributes that are not read.

        Raises:
            FormatError: the set is too large.
        """
        self.nodes += 1
        self.dependencies += len(node.ctrl_deps) + len(node.data_deps)
        if self.nodes > MAX_NODES or self.dependencies > MAX_DEPENDENCIES:
            what = f"over {MAX_NODES:,} nodes or {MAX_DEPENDENCIES:,} dependencies in all"
            raise FormatError(f"{path}: {what}: give traces of fewer ranks or steps")
        for name in node.attributes.keys() - set(ATTRIBUTES):
            if (short := name[:80]) in self.others or len(self.others) < MAX_DISTINCT:
                self.others[short] += 1


def _read_rank(rank: int, path: Path, shared: _Shared) -> RankTrace:
    version, attributes = read_metadata(path)
    ids, durations = array("Q"), array("Q")
    names, groups, numbers = array("i"), array("i"), {name: array("q") for name in _NUMBERS}
    types, hosts, dims = bytearray(), bytearray(), bytearray()
    deps = [(array("q", [0]), array("Q")) for _ in range(2)]
    for node in read(path):
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
    order = np.argsort(own, kind="stable")
    at = np.minimum(np.searchsorted(own[order], ids), len(own) - 1)
    return Ragged(offsets, np.where(own[order[at]] == ids, order[at], NONE))
