"""The JSON that `rocprofv3 --output-format json` writes, to columns.

Its records are those of ROCprofiler-SDK's buffer tracing; names of operations stand in its `strings`, names of
kernels among its `kernel_symbols`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from echograph.errors import DataError
from echograph.ir.columns import Int64
from echograph.ir.files import read_unpacked
from echograph.profiler.traces.kineto import rank_of_name
from echograph.profiler.traces.rows import TraceRows
from echograph.profiler.traces.trace import NONE, Trace
from echograph.progress import Progress, silent
from echograph.units import PS_PER_NS

WHAT = "rocprofv3's JSON"
MAX_BYTES = 2**33
_GPU = 2
_COPY_NAMES = {
    "MEMORY_COPY_HOST_TO_HOST": "Memcpy HtoH",
    "MEMORY_COPY_HOST_TO_DEVICE": "Memcpy HtoD",
    "MEMORY_COPY_DEVICE_TO_HOST": "Memcpy DtoH",
    "MEMORY_COPY_DEVICE_TO_DEVICE": "Memcpy DtoD",
}
# Lists of calls on the host, and the category of each.
_HOST = {"hip_api": "hip_runtime", "hsa_api": "hsa_api", "rccl_api": "cpu_op", "marker_api": "user_annotation"}
_LAUNCH = ("hip_api", "hsa_api")
_EMPTY, _NO_RECORDS = re.compile(rb"\s*\[\s*\]\s*"), msgspec.Raw(b"[]")
_READ = ("kernel_dispatch", "memory_copy", *_HOST)


class _Handle(msgspec.Struct, gc=False, frozen=True):
    handle: int = 0


class _Correlation(msgspec.Struct, gc=False, frozen=True):
    internal: int = 0


_NONE, _NO_CALL = _Handle(), _Correlation()


class _Agent(msgspec.Struct, gc=False, frozen=True):
    id: _Handle
    type: int = 0
    number: int = msgspec.field(default=0, name="logical_node_type_id")
    product_name: str = ""


class _Dispatch(msgspec.Struct, gc=False, frozen=True):
    agent_id: _Handle = _NONE
    queue_id: _Handle = _NONE
    kernel_id: int = 0


class _Record(msgspec.Struct, gc=False, frozen=True):
    start_timestamp: int
    end_timestamp: int
    kind: int = 0
    operation: int = 0
    thread_id: int = 0
    correlation_id: _Correlation = _NO_CALL
    dispatch_info: _Dispatch | None = None
    stream_id: _Handle | None = None
    src_agent_id: _Handle = _NONE
    dst_agent_id: _Handle = _NONE
    bytes: int = NONE


class _Symbol(msgspec.Struct, gc=False, frozen=True):
    kernel_id: int
    kernel_name: str = ""
    formatted_kernel_name: str = ""


class _Kind(msgspec.Struct, gc=False, frozen=True):
    kind: str = ""
    operations: list[str] = []


class _Marker(msgspec.Struct, gc=False, frozen=True):
    key: int
    value: str


class _Strings(msgspec.Struct, gc=False, frozen=True):
    buffer_records: list[_Kind] = []
    marker_api: list[_Marker] = []


class _Metadata(msgspec.Struct, gc=False, frozen=True):
    pid: int = 0


class _Tool(msgspec.Struct, gc=False, frozen=True):
    """One process."""

    # Taken apart a list at a time: each record is a hundred times as large as its row.
    buffer_records: dict[str, msgspec.Raw]
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    agents: list[_Agent] = []
    kernel_symbols: list[_Symbol] = []
    strings: _Strings = msgspec.field(default_factory=_Strings)


class _File(msgspec.Struct, gc=False, frozen=True):
    tools: list[_Tool] = msgspec.field(name="rocprofiler-sdk-tool")


def read_rocprof(path: Path, progress: Progress = silent) -> Trace:
    """The kernels, copies, calls and markers of a file.

    Calls of HIP have the correlation numbers of what they launched; of HSA, only where HIP was not traced. Ranges
    of ROCTx become annotations. Of several processes in a file, each is a rank by its number (`processRanks`).

    Args:
        path: the file, gzipped or not.
        progress: told how far the reading is.

    Raises:
        InputError: the file cannot be read.
        DataError: it is no such file, or broken.
    """
    progress(f"reading {path.name}")
    data = read_unpacked(path, "give the JSON of rocprofv3", MAX_BYTES)
    try:
        tools = msgspec.json.decode(data, type=_File).tools
        del data
        rows = TraceRows(path, WHAT)
        processes = sorted(tool.metadata.pid for tool in tools)
        for tool in tools:
            _Process(tool, rows, several=len(tools) > 1).add(progress)
    except (msgspec.DecodeError, UnicodeDecodeError, OverflowError, RecursionError) as error:
        raise DataError(f"{path}: not a whole JSON of rocprofv3 ({error})") from None
    header: dict[str, Any] = {"deviceProperties": _devices(tools)}
    if len(tools) > 1:
        header["processRanks"] = {str(pid): rank for rank, pid in enumerate(processes)}
        header["processRanks"] |= {
            _device_text(agent.number, pid): rank
            for rank, pid in enumerate(processes)
            for tool in tools
            for agent in tool.agents
        }
        rows.notes.append(f"{path}: {len(tools)} processes: taken for ranks, by their own numbers")
    return rows.trace(rank_of_name(path), header)


def _devices(tools: list[_Tool]) -> list[dict[str, Any]]:
    found = {agent.number: agent.product_name for tool in tools for agent in tool.agents if agent.type == _GPU}
    return [{"id": number, "name": name} for number, name in sorted(found.items())]


def _device_text(device: int, process: int) -> str:
    return f"device {device} of process {process}"


class _Process:
    """The records of one process."""

    def __init__(self, tool: _Tool, rows: TraceRows, *, several: bool) -> None:
        self.tool, self.rows = tool, rows
        self.pid = tool.metadata.pid
        self._several = several
        self._numbers = {agent.id.handle: agent.number for agent in tool.agents}
        self._gpus = {agent.id.handle for agent in tool.agents if agent.type == _GPU}

    def add(self, progress: Progress) -> None:
        """Adds all that is read, and says what is not."""
        lists = self.tool.buffer_records
        others = [name for name, text in lists.items() if name not in _READ and not _EMPTY.fullmatch(bytes(text))]
        self._add_kernels(self._records("kernel_dispatch"))
        progress(f"reading {self.rows.path.name}", len(self.rows))
        self._add_copies(self._records("memory_copy"))
        traced = ""
        for name, category in _HOST.items():
            records = self._records(name)
            # HIP's calls come before those of HSA, which it makes itself.
            traced = traced or (name if records else "")
            self._add_calls(records, category, launches=name == traced and name in _LAUNCH)
        if others:
            self.rows.notes.append(f"{self.rows.path}: not read: {', '.join(sorted(others))}")

    def _records(self, name: str) -> list[_Record]:
        return msgspec.json.decode(self.tool.buffer_records.pop(name, _NO_RECORDS), type=list[_Record])

    def _add_kernels(self, records: list[_Record]) -> None:
        names = {one.kernel_id: one.formatted_kernel_name or one.kernel_name for one in self.tool.kernel_symbols}
        dispatched = [record.dispatch_info or _Dispatch() for record in records]
        labels = [names.get(one.kernel_id) or f"kernel {one.kernel_id}" for one in dispatched]
        agents = [one.agent_id.handle for one in dispatched]
        # Before ROCm 7 records did not say their stream.
        queues = [
            one.queue_id.handle if record.stream_id is None else record.stream_id.handle
            for one, record in zip(dispatched, records, strict=True)
        ]
        self._add_work("kernel", records, labels, agents, queues)

    def _add_copies(self, records: list[_Record]) -> None:
        labels = [_COPY_NAMES.get(name := self._operation(record), name) for record in records]
        agents = [
            record.dst_agent_id.handle if record.dst_agent_id.handle in self._gpus else record.src_agent_id.handle
            for record in records
        ]
        queues = [0 if record.stream_id is None else record.stream_id.handle for record in records]
        self._add_work("gpu_memcpy", records, labels, agents, queues)

    def _add_work(
        self,
        category: str,
        records: list[_Record],
        labels: list[str],
        agents: Sequence[int],
        queues: Sequence[int],
    ) -> None:
        devices = {handle: self._device(self._numbers.get(handle, handle)) for handle in set(agents)}
        stream = np.array(queues, np.int64)
        nbytes = np.array([record.bytes for record in records], np.int64)
        self._add(
            category, records, labels, pid=np.array([devices[handle] for handle in agents], np.int64), tid=stream,
            stream=stream, correlation=_correlations(records),
            arguments={"bytes": nbytes} if category == "gpu_memcpy" and (nbytes >= 0).all() else {},
        )  # fmt: skip

    def _device(self, number: int) -> int:
        return self.rows.process(_device_text(number, self.pid)) if self._several else number

    def _add_calls(self, records: list[_Record], category: str, *, launches: bool) -> None:
        said = {marker.key: marker.value for marker in self.tool.strings.marker_api}
        labels = [
            said.get(record.correlation_id.internal) or self._operation(record)
            if category == "user_annotation"
            else self._operation(record)
            for record in records
        ]
        self._add(
            category, records, labels, pid=self.pid, correlation=_correlations(records) if launches else NONE,
            tid=np.array([record.thread_id for record in records], np.int64),
        )  # fmt: skip

    def _operation(self, record: _Record) -> str:
        kinds = self.tool.strings.buffer_records
        if 0 <= record.kind < len(kinds) and 0 <= record.operation < len(kinds[record.kind].operations):
            return kinds[record.kind].operations[record.operation]
        return f"operation {record.operation} of kind {record.kind}"

    def _add(self, category: str, records: list[_Record], labels: list[str], **rest: Any) -> None:
        times = np.array([(one.start_timestamp, one.end_timestamp) for one in records], np.int64).reshape(-1, 2)
        if not len(times):
            return
        # Nanoseconds since the machine was started, which may be more than picoseconds in 64 bits.
        base = int(times[:, 0].min())
        start, length = times[:, 0] - base, times[:, 1] - times[:, 0]
        self.rows.add(
            category, labels, _ps(start), np.where(length < 0, NONE, _ps(length)), base_ps=base * PS_PER_NS, **rest
        )


def _ps(nanoseconds: Int64) -> Int64:
    found: Int64 = np.minimum(nanoseconds, np.iinfo(np.int64).max // PS_PER_NS) * PS_PER_NS
    return found


def _correlations(records: list[_Record]) -> Int64:
    return np.array([record.correlation_id.internal or NONE for record in records], np.int64)
