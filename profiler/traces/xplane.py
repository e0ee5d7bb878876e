"""What XLA's profiler writes of JAX and TensorFlow (`*.xplane.pb`), to columns."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from echograph.errors import DataError, FormatError
from echograph.ir.columns import Bools
from echograph.ir.files import read_unpacked
from echograph.ir.serde.xplane import Plane, PlaneLine, decode_planes
from echograph.profiler.traces.kineto import rank_of_name
from echograph.profiler.traces.rows import TraceRows
from echograph.profiler.traces.trace import NONE, Trace
from echograph.progress import Progress, silent
from echograph.units import PS_PER_NS

WHAT = "an XPlane of XLA"
MAX_BYTES = 2**31
_DEVICE = re.compile(r"/device:(GPU|TPU):(\d{1,6})")
_HOST = "/host:CPU"
_STREAM = re.compile(r"Stream #(\d{1,18})")
# Where a device has no streams (TPUs), its operators; all other lines say the same at another grain.
_OPERATORS, _ASYNC = "XLA Ops", "Async XLA Ops"
_STEPS = "Steps"
_CALLS = (
    (re.compile(r"hip[A-Z]"), "hip_runtime"),
    (re.compile(r"cuda[A-Z]"), "cuda_runtime"),
    (re.compile(r"cu[A-Z]"), "cuda_driver"),
)
# Beyond this, a line's time is since 1970, and not since the profile began.
_EPOCH_NS = 10**17


def read_xplane(path: Path, progress: Progress = silent) -> Trace:
    """The kernels, copies, calls, operators of the host and steps of a file.

    Where several devices ran something, each is a rank (`processRanks`) with the calls that launched it; what else
    the host did is of the first. Steps are those of `jax.profiler.StepTraceAnnotation`, or of the device.

    Args:
        path: the file, gzipped or not.
        progress: told how far the reading is.

    Raises:
        InputError: the file cannot be read.
        DataError: it is no such file, or cut off.
    """
    progress(f"reading {path.name}")
    try:
        planes = decode_planes(read_unpacked(path, "give an .xplane.pb of XLA's profiler", MAX_BYTES))
    except FormatError as error:
        raise DataError(f"{path}: {error}") from None
    return _Space(path, planes).trace()


class _Space:
    """The planes of a file, and the rows that were made of them."""

    def __init__(self, path: Path, planes: list[Plane]) -> None:
        self.rows = TraceRows(path, WHAT)
        self.path = path
        named = [(found, plane) for plane in planes if (found := _DEVICE.match(plane.name))]
        self.devices = {int(found[2]): plane for found, plane in named if any(line.names for line in _work(plane))}
        self._host = [plane for plane in planes if plane.name == _HOST]
        read = {plane.name for plane in (*self.devices.values(), *self._host)}
        self._others = [plane.name for plane in planes if _ran(plane) and plane.name not in read]
        latest = max((line.start_ns for plane in planes for line in plane.lines), default=0)
        begun = next(
            (plane.facts["profile_start_time"] for plane in planes if "profile_start_time" in plane.facts), 0
        )
        self._begun_ns = begun if isinstance(begun, int) and latest < _EPOCH_NS else 0

    def trace(self) -> Trace:
        """All that is read, as a trace."""
        if not self.devices and not self._host:
            there = ", ".join(self._others[:8]) or "none"
            raise DataError(f"{self.path}: an XPlane without a plane of a device or the host (it has {there})")
        several = len(self.devices) > 1
        # A process of the host for each device that has one of its own.
        hosts = {device: 10**6 + device if several else 10**6 for device in self.devices} or {0: 10**6}
        owner = self._owners(hosts)
        for number, plane in self.devices.items():
            self._add_device(number, plane)
        steps = False
        for plane in self._host:
            for at, line in enumerate(plane.lines):
                steps |= self._add_thread(at, line, owner, hosts)
        if not steps:
            for number, plane in self.devices.items():
                self._add_steps(hosts[number], plane)
        header: dict[str, Any] = {"deviceProperties": [_properties(n, plane) for n, plane in self.devices.items()]}
        if several:
            ranks = {device: rank for rank, device in enumerate(sorted(hosts))}
            header["processRanks"] = {
                str(pid): rank for device, rank in ranks.items() for pid in (device, hosts[device])
            }
            self.rows.notes.append(f"{self.path}: {len(hosts)} devices: each is taken for a rank")
        if self._others:
            self.rows.notes.append(f"{self.path}: not read: {', '.join(self._others)}")
        return self.rows.trace(rank_of_name(self.path), header)

    def _owners(self, hosts: dict[int, int]) -> dict[int, int]:
        """The process of the host of each correlation number."""
        found: dict[int, int] = {}
        for number, plane in self.devices.items():
            for line in _work(plane):
                found |= dict.fromkeys(line.correlation[line.correlation != NONE].tolist(), hosts[number])
        return found

    def _add_device(self, number: int, plane: Plane) -> None:
        for at, line in enumerate(_work(plane)):
            said = _STREAM.match(line.name)
            stream = int(said[1]) if said else at
            copies = np.array([name.startswith("Memcpy") for name in line.names], np.bool_)
            sets = np.array([name.startswith("Memset") for name in line.names], np.bool_)
            kept = _leaves(line) if line.name == _OPERATORS else np.ones(len(line.names), np.bool_)
            for category, of in (("kernel", ~copies & ~sets), ("gpu_memcpy", copies), ("gpu_memset", sets)):
                chosen = of & kept
                moved = {"bytes": line.nbytes[chosen]} if (chosen & (line.nbytes >= 0)).any() else {}
                self._add(
                    category, line, chosen, pid=number, tid=stream, stream=stream,
                    correlation=line.correlation[chosen], arguments=moved,
                )  # fmt: skip

    def _add_thread(self, at: int, line: PlaneLine, owner: dict[int, int], hosts: dict[int, int]) -> bool:
        """Adds a thread of the host; whether it marks steps."""
        categories = np.array([_category(name) for name in line.names], dtype=object)
        first = next(iter(hosts.values()))
        pid = np.array([owner.get(number, first) for number in line.correlation.tolist()], np.int64)
        marks = line.step != NONE
        for category in dict.fromkeys(categories.tolist()):
            of = (categories == category) & ~marks
            correlation = line.correlation[of] if category in {name for _, name in _CALLS} else NONE
            self._add(category, line, of, pid=pid[of], tid=at, correlation=correlation)
        if marks.any():
            names = [f"ProfilerStep#{number}" for number in line.step[marks].tolist()]
            for host in hosts.values():
                self._add("user_annotation", line, marks, names, pid=host, tid=at)
        return bool(marks.any())

    def _add_steps(self, host: int, plane: Plane) -> None:
        for line in plane.lines:
            if line.name == _STEPS:
                names = [f"ProfilerStep#{name}" if name.isdigit() else name for name in line.names]
                self._add("user_annotation", line, np.ones(len(names), np.bool_), names, pid=host, tid=0)

    def _add(self, category: str, line: PlaneLine, of: Bools, names: list[str] | None = None, **rest: Any) -> None:
        labels = [line.names[row] for row in np.flatnonzero(of).tolist()] if names is None else names
        base = (self._begun_ns + line.start_ns) * PS_PER_NS
        self.rows.add(category, labels, line.offset_ps[of], line.duration_ps[of], base_ps=base, **rest)


def _work(plane: Plane) -> list[PlaneLine]:
    """The lines of a device on which work runs."""
    streams = [line for line in plane.lines if _STREAM.match(line.name)]
    return streams or [line for line in plane.lines if line.name in (_OPERATORS, _ASYNC)]


def _ran(plane: Plane) -> bool:
    return any(line.names for line in plane.lines)


def _leaves(line: PlaneLine) -> Bools:
    """Which operators are not around others, as loops are around what they repeat."""
    order = np.lexsort((-line.duration_ps, line.offset_ps))
    start, end = line.offset_ps[order], (line.offset_ps + line.duration_ps)[order]
    around = np.append((start[1:] < end[:-1]) & (end[1:] <= end[:-1]), [False])[: len(order)]
    found = np.ones(len(order), np.bool_)
    found[order[around]] = False
    return found


def _category(name: str) -> str:
    if name.startswith("$"):
        return "python_function"
    return next((category for pattern, category in _CALLS if pattern.match(name)), "cpu_op")


def _properties(number: int, plane: Plane) -> dict[str, Any]:
    vendor, kind = plane.facts.get("device_vendor"), plane.facts.get("device_type_string")
    named = " ".join(str(text) for text in (vendor, kind) if text)
    return {"id": number, "name": named or plane.name}
