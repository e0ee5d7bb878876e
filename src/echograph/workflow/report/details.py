"""What a prediction knows beyond its JSON: the step of every role, and what stands on the critical path."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from echograph.ir.columns import Bools
from echograph.ir.graph import JobGraph
from echograph.ir.intervals import Pieces
from echograph.ir.timeline import Lane, Timeline
from echograph.ir.types import COMMUNICATIONS, Phase, Source
from echograph.simulator.breakdown import COMPUTE, breakdown
from echograph.simulator.durations import Durations
from echograph.simulator.result import Result
from echograph.units import to_s

MOST_OPERATIONS, MOST_COLLECTIVES = 15, 10
_TENSORS = 3
_LAST_NUMBER = re.compile(r"(?<=_)\d+$")
_NUMBER = re.compile(r"(?<![^.])(\d+|\{\})(?![^.])")


def details(result: Result, job: JobGraph, timeline: Timeline, found: Mapping[int, Pieces]) -> dict[str, Any]:
    """What the page shows besides the result, as data.

    Args:
        result: the prediction.
        job: the job that was simulated.
        timeline: what ran when.
        found: what the programs that are shown do at each moment.
    """
    staged = result.breakdown.bubble or "pp" in {axis.name for axis in job.mesh}
    idle = "bubble" if staged else "wait"
    return {
        "roles": [
            {
                "role": timeline.programs[number],
                "breakdown_s": breakdown(job, timeline, number).to_json(),
                "compute_s": _by_phase(job, timeline, moments),
            }
            for number, moments in found.items()
        ],
        "idle": idle,
        "critical_path": _Path(job, timeline, result.times).largest(),
    }


def _by_phase(job: JobGraph, timeline: Timeline, moments: Pieces) -> dict[str, float]:
    """The compute of one role by phase."""
    computes = moments.layer == COMPUTE
    phase = job.ops.phase[timeline.op[moments.row[computes]]]
    length = (moments.end - moments.start)[computes]
    spent = {one.name.lower(): to_s(int(length[phase == one].sum())) for one in Phase}
    return {name: value for name, value in spent.items() if value}


class _Path:
    """What the critical path is made of."""

    def __init__(self, job: JobGraph, timeline: Timeline, times: Durations | None) -> None:
        self.job, self.times, self.makespan = job, times, timeline.makespan
        path = timeline.critical_path()
        device = path[timeline.lane[path] == Lane.DEVICE]
        self.count = np.bincount(timeline.op[device], minlength=len(job.ops))
        self.spent = np.zeros(len(job.ops), np.int64)
        np.add.at(self.spent, timeline.op[device], timeline.duration[device])

    def largest(self) -> dict[str, Any]:
        """The operations and communications on which it spends most, and what is left of the step."""
        communicates = np.isin(self.job.ops.kind, COMMUNICATIONS)
        parts = (
            (~communicates, self._operation, MOST_OPERATIONS),
            (communicates, self._communication, MOST_COLLECTIVES),
        )
        operations, collectives = (self._rows(mask, of, most) for mask, of, most in parts)
        rest = self.makespan - sum(row["on_path_s"] for row in (*operations, *collectives))
        for row in (*operations, *collectives):
            row["on_path_s"] = to_s(row["on_path_s"])
            row["each_s"] = row["on_path_s"] / row["count"]
        return {"operations": operations, "collectives": collectives, "rest_s": to_s(rest)}

    def _rows(self, mask: Bools, of: Callable[[int], dict[str, Any]], most: int) -> list[dict[str, Any]]:
        """Those that are alike but for layer, stage and size together; the time is in picoseconds."""
        rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        for op in np.flatnonzero(mask & (self.spent > 0)).tolist():
            row = {**of(op), **self._source(op)}
            held = rows.setdefault(tuple(row.values()), {**row, "on_path_s": 0, "count": 0})
            held["on_path_s"] += int(self.spent[op])
            held["count"] += int(self.count[op])
            if "group" in row:
                self._widen(held, op)
        return sorted(rows.values(), key=lambda row: -row["on_path_s"])[:most]

    def _operation(self, op: int) -> dict[str, Any]:
        job = self.job
        touched = job.ops.outputs.row(op) or job.ops.inputs.row(op)
        # Of no module is, for instance, the sum of gradients: it is known by what it writes.
        of_tensor = job.tensors[int(job.root[touched[0]])].name if touched else ""
        module = job.strings[job.ops.module[op]] or of_tensor
        return {**self._named(op), "module": _NUMBER.sub("*", module), "shapes": _shapes(job, op)}

    def _communication(self, op: int) -> dict[str, Any]:
        group = self.job.groups[int(self.job.ops.group[op])]
        ranks = self.job.group_size(group)
        return {**self._named(op), "group": group.label, "ranks": ranks}

    def _named(self, op: int) -> dict[str, Any]:
        name = _LAST_NUMBER.sub("*", self.job.strings[self.job.ops.name[op]])
        return {"name": name, "phase": Phase(int(self.job.ops.phase[op])).name.lower()}

    def _source(self, op: int) -> dict[str, Any]:
        """Where the duration comes from: of what the network's model timed, which fabrics it rests on."""
        times = self.times
        if times is None or not times.source[op]:
            return {"source": "", "spread": 0.0}
        source = Source(int(times.source[op])).name.lower()
        modelled = times.estimates[op].source if op in times.algorithm else source
        return {"source": modelled, "spread": round(float(times.spread[op]), 4)}

    def _widen(self, row: dict[str, Any], op: int) -> None:
        """Sizes and algorithms of the communications that stand in one row."""
        nbytes = int(self.job.ops.nbytes[op])
        low, high = row.get("bytes", (nbytes, nbytes))
        row["bytes"] = [min(low, nbytes), max(high, nbytes)]
        algorithm = self.times.algorithm.get(op) if self.times is not None else None
        known = row.setdefault("algorithms", [])
        if algorithm and algorithm not in known:
            known.append(algorithm)


def _shapes(job: JobGraph, op: int) -> str:
    """Shapes of the first tensors that an operation reads, and of those that it writes."""
    read, written = (
        ["×".join(map(str, job.tensors.shape.row(tensor))) or "1" for tensor in side.row(op)]
        for side in (job.ops.inputs, job.ops.outputs)
    )
    more = ["…"] if len(read) > _TENSORS else []
    into = f" → {', '.join(written[:_TENSORS])}" if written else ""
    return f"{', '.join(read[:_TENSORS] + more)}{into}"
