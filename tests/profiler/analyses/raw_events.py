"""Counts by brute force what the analyses answer, from the events of a file as they stand: no code is shared.

Only plain Python over a list of dicts, one moment after the other.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

WORK = ("kernel", "gpu_memcpy", "gpu_memset", "mtia_ccp_events")
RUNTIME = ("cuda_runtime", "cuda_driver", "hip_runtime", "mtia_runtime", "xpu_runtime", "xpu_driver")
OLD = {"Kernel": "kernel", "Memcpy": "gpu_memcpy", "Memset": "gpu_memset", "Runtime": "cuda_runtime"}
WAITS = ("Event Sync", "Context Sync", "Stream Sync", "Stream Wait Event", "event_wait")
COMMUNICATES = re.compile(
    r"(void )?(\w+::|\(anonymous namespace\)::)*"
    r"(nccl|rccl|hccl|(multimem_)?(one|two)_shot_|multimem_all_|cross_device_reduce)",
    re.IGNORECASE,
)
COPIES = re.compile(r"(cuda|hip)?(Memcpy|Memset)|dma(?![a-z])")


class Work(NamedTuple):
    """What ran on a device; picoseconds."""

    start: int
    end: int
    kind: str
    name: str
    stream: tuple[Any, Any]
    correlation: int
    index: int


class Call(NamedTuple):
    """A call that launched something."""

    start: int
    end: int
    name: str


def picoseconds(value: Any) -> int:
    return int(Decimal(str(value)) * 1_000_000) if not isinstance(value, Decimal) else int(value * 1_000_000)


class Counter:
    """One rank's file, counted.

    Attributes:
        works: what ran on devices, in the order of the file.
        calls: by correlation, the last of each.
    """

    def __init__(self, path: Path) -> None:
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        found = json.loads(text, parse_float=Decimal)
        self.works: list[Work] = []
        self.calls: dict[int, Call] = {}
        for index, event in enumerate(found if isinstance(found, list) else found["traceEvents"]):
            self._add(index, event)

    def _add(self, index: int, event: dict[str, Any]) -> None:
        if event.get("ph") != "X" or "dur" not in event or event.get("cat", "Trace") == "Trace":
            return
        start, args = picoseconds(event["ts"]), event.get("args") or {}
        end = start + picoseconds(event["dur"])
        # What names no stream has the one that its thread stands for.
        stream, number = args.get("stream", event["tid"]), args.get("correlation", -1)
        name, category = event["name"], OLD.get(event["cat"], event["cat"])
        if category in WORK and name not in WAITS:
            kind = "computation"
            if category in ("gpu_memcpy", "gpu_memset") or COPIES.match(name):
                kind = "memory"
            elif COMMUNICATES.match(name):
                kind = "communication"
            self.works.append(Work(start, end, kind, name, (event["pid"], stream), number, index))
        elif number > 0 and category in RUNTIME:
            self.calls[number] = Call(start, end, name)

    def busy(self) -> dict[str, int]:
        """Picoseconds from first to last work by what runs meanwhile."""
        moments = sorted([(w.start, 1, w.kind) for w in self.works] + [(w.end, -1, w.kind) for w in self.works])
        running, spent = dict.fromkeys(("computation", "communication", "memory"), 0), defaultdict[str, int](int)
        before = moments[0][0] if moments else 0
        for now, change, kind in moments:
            took, before = now - before, now
            spent["all"] += took
            spent["idle"] += took * (not any(running.values()))
            spent["computation"] += took * bool(running["computation"])
            spent["other"] += took * bool(not running["computation"] and any(running.values()))
            spent["communication"] += took * bool(running["communication"])
            spent["both"] += took * bool(running["communication"] and running["computation"])
            running[kind] += change
        return spent

    def kernels(self) -> dict[str, list[int]]:
        """Durations of each kernel, by name and kind."""
        found = defaultdict[str, list[int]](list)
        for work in self.works:
            found[f"{work.name}|{work.kind}"].append(work.end - work.start)
        return found

    def launches(self) -> list[tuple[int, int, int, int]]:
        """Correlation, duration of the call and of the work, and the time between, by the call's start."""
        found = []
        for work in self.works:
            call = self.calls.get(work.correlation)
            if call is not None:
                times = (call.end - call.start, work.end - work.start, max(0, work.start - call.end))
                found.append((work.correlation, *times))
        return sorted(found)

    def idle(self, kernel_delay_ps: int = 30_000_000) -> dict[tuple[Any, Any, str], int]:
        """Picoseconds that each stream stood still, by why."""
        found = defaultdict[tuple[Any, Any, str], int](int)
        for stream in dict.fromkeys(work.stream for work in self.works):
            ended = None
            for work in sorted((w for w in self.works if w.stream == stream), key=lambda w: w.start):
                if ended is None:
                    found[*stream, "other"] += 0
                else:
                    gap, call = max(0, work.start - ended), self.calls.get(work.correlation)
                    late = call is not None and call.start > ended
                    why = "host_wait" if late else "kernel_wait" if gap < kernel_delay_ps else "other"
                    found[*stream, why] += gap
                ended = work.end if ended is None else max(ended, work.end)
        return dict(found)

    def collectives(self) -> dict[str, list[tuple[int, int]]]:
        """Start and end of each collective's kernel by its kind, in the order of their launches."""
        kinds = ("AllReduce", "AllGather", "ReduceScatter", "SendRecv", "AllToAll", "Broadcast")
        found = defaultdict[str, list[tuple[int, int, int]]](list)
        for work in self.works:
            kind = next((kind for kind in kinds if kind in work.name), "")
            if work.kind == "communication" and kind:
                call = self.calls.get(work.correlation)
                found[kind].append((work.start if call is None else call.start, work.start, work.end))
        return {kind: [(start, end) for _, start, end in sorted(of)] for kind, of in found.items()}
