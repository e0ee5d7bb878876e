"""From kernels to code: the operators, shapes, modules and lines behind them, and how long they should take."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from echograph.errors import EchoError, UsageError
from echograph.ir.columns import Int64
from echograph.ir.intervals import union
from echograph.ir.types import Attention, Convolution, DType, Gemm
from echograph.profiler.analyses.table import AnswerTable, from_rows, stacked
from echograph.profiler.analyses.work import US, KernelKind, kernel_kinds
from echograph.profiler.costs.device import CostEstimate, DeviceProfile, load_device, profile_of_hardware
from echograph.profiler.costs.estimate import DTYPE_NAMES, cost_of, in_tf32
from echograph.profiler.traces import read_trace
from echograph.profiler.traces.captures import CapturedCalls, captured_calls
from echograph.profiler.traces.events import details
from echograph.profiler.traces.kernel_names import function_name
from echograph.profiler.traces.operands import ShapedCall, TracedOperand, TracedWork, operator_call, traced_work
from echograph.profiler.traces.origins import Origins, origins
from echograph.profiler.traces.trace import KERNELS, NONE, Trace, TraceSet

_ORIGINS = (
    "rank", "index", "name", "ts", "dur", "stream", "operator", "phase", "shapes", "dtypes", "module", "source",
)  # fmt: skip
_SHAPES_NEEDED = "profile with record_shapes=True"
_TO_OR_FROM_HOST = re.compile(r"HtoD|DtoH|HostToDevice|DeviceToHost")
_SURE = 1.645
"""Deviations of a prediction within which 95 of 100 durations are not longer than it."""


class DeviceCall(NamedTuple):
    """One call of an operator, and the work on the device that it led to.

    Attributes:
        row: of the operator; -1 for work that no operator launched.
        works: rows of the work, communication left out.
    """

    row: int
    works: list[int]


def device_calls(trace: Trace, found: Origins) -> list[DeviceCall]:
    """The calls of operators that led to work on a device; each work without an operator stands alone.

    An operator that was captured in a CUDA graph is called by each launch of that.
    """
    works = np.flatnonzero(trace.on_device & (kernel_kinds(trace) != KernelKind.COMMUNICATION))
    of: dict[tuple[int, int], list[int]] = defaultdict(list)
    alone = []
    for row in works.tolist():
        operator = found.operator[row]
        if operator == NONE:
            alone.append(DeviceCall(NONE, [row]))
        else:
            of[operator, found.replay[row]].append(row)
    return [*(DeviceCall(row, rows) for (row, _), rows in of.items()), *alone]


def described_calls(trace: Trace, found: Origins, rows: list[int]) -> dict[int, ShapedCall]:
    """What the trace's file says of some operators, by row.

    Raises:
        InputError: the file is gone.
        DataError: it has changed.
    """
    said = details(trace, np.array(rows, np.int64)) if rows else []
    return {
        row: operator_call(trace.text(row), found.phase[row], event.get("args") or {})
        for row, event in zip(rows, said, strict=True)
    }


def kernel_origins(traces: TraceSet, *, stack: bool = False, captured: str = "") -> AnswerTable:
    """Each kernel, copy and set with the operator, the shapes, the module and the line that it came from.

    Columns: `rank`; `index` of the event in the file; `name`; `ts` and `dur` microseconds; `stream`; `operator`,
    the innermost one, or the one around it that says all (`aten::convolution`); `phase` (a forward operator within
    a backward pass is `recompute`); `shapes` and `dtypes` of its tensors; `module`, the path of `nn.Module`s; and
    `source`, the innermost line of Python that is not PyTorch's, of compiled code `LINE via GENERATED LINE`, or
    where no lines were traced the generated file. Operators of a backward pass have the module and
    the line of what they differentiate. What the trace does not say is empty: shapes need `record_shapes=True`,
    modules and lines `with_stack=True`.

    Args:
        traces: the job's; their files are still where they were.
        stack: show all lines, the innermost first, instead of one.
        captured: a trace of one rank in which the CUDA graphs were captured that these traces launch.

    Raises:
        InputError: a file is gone.
    """
    parts, notes = [], list(traces.notes)
    other = _Described.of(read_trace(Path(captured))) if captured else None
    for rank, trace in traces.items():
        rows = np.flatnonzero(trace.on_device)
        if not len(rows):
            notes.append(f"rank {rank}: nothing ran on a device while it was profiled")
            continue
        own = _Described.of(trace, rows)
        joined = captured_calls(trace, other.trace) if other is not None else CapturedCalls({}, 0)
        calls = joined.calls
        notes += [*own.found.notes, *joined.notes(rank)]
        if other is not None and not calls:
            notes.append(f"rank {rank}: launches no CUDA graph that was captured in {captured}")
        # Where a captured call stands for the work, all is known from there.
        told = [
            other.told(calls[row], stack) if other is not None and row in calls else own.told(row, stack)
            for row in rows.tolist()
        ]
        parts.append(
            {
                "rank": np.full(len(rows), rank),
                "index": trace.index[rows],
                "name": [trace.text(row) for row in rows.tolist()],
                "ts": trace.start[rows] / US,
                "dur": trace.duration[rows] / US,
                "stream": trace.stream[rows],
                **{title: [one[title] for one in told] for title in _ORIGINS[6:]},
            }
        )
    return stacked(parts, _ORIGINS, notes)


@dataclass(frozen=True, slots=True, eq=False)
class _Described:
    """A trace with where its rows come from, and what its file says of their operators."""

    trace: Trace
    found: Origins
    calls: Mapping[int, ShapedCall]

    @classmethod
    def of(cls, trace: Trace, rows: Int64 | None = None) -> _Described:
        """What is known of some rows of a trace, or of all."""
        found = origins(trace)
        of = found.operator if rows is None else [found.operator[row] for row in rows.tolist()]
        return cls(trace, found, described_calls(trace, found, sorted({row for row in of if row != NONE})))

    def told(self, row: int, stack: bool) -> dict[str, str]:
        """Where a row comes from, under the last titles of the table."""
        operator = self.found.operator[row]
        shapes, dtypes = _told(self.calls.get(operator))
        return {
            "operator": "" if operator == NONE else self.trace.text(operator),
            "phase": _phase(self.found, operator),
            "shapes": shapes,
            "dtypes": dtypes,
            "module": self.found.module[row],
            "source": _source(self.trace, self.found, row, self.calls.get(operator), stack),
        }


def _phase(found: Origins, row: int) -> str:
    if row == NONE:
        return ""
    return "data loading" if found.loads[row] else found.phase[row].name.lower()


def _source(trace: Trace, found: Origins, row: int, call: ShapedCall | None, stack: bool = False) -> str:
    """The line of Python that a row came from, or all of them; without any, the file of a compiled kernel."""
    lines = " < ".join(found.frames(trace, row)) if stack else found.source(trace, row)
    return lines or ("" if call is None else call.generated)


def _told(call: ShapedCall | None) -> tuple[str, str]:
    """Shapes and types of an operator's tensors; ".T" of a matrix that lies by columns."""
    given = [] if call is None else call.tensors
    return " ".join(map(_shape_text, given)), " ".join(one.dtype.text for one in given)


def _shape_text(one: TracedOperand) -> str:
    return f"[{','.join(map(str, one.shape))}]{'.T' if one.by_columns else ''}"


@dataclass(slots=True, kw_only=True)
class ShapeUse:
    """The calls of one operator with the same shapes on one kind of device.

    Attributes:
        call: one of them.
        work: what each of them computes; None where that is not known.
        device: what ran it; None where there is no profile of it.
        wide: whether its kernels compute products of fp32 in TF32.
        leaves: whether it moves data to or from the host, of which no profile says how long that takes.
        times: picoseconds of each call during which any of its work ran.
        kernels: picoseconds of all calls by name of the kernel.
        launches: how many kernels, copies and sets these are.
        module: of the first of them.
        source: line of Python of the first of them.
    """

    call: ShapedCall
    work: TracedWork | None
    device: DeviceProfile | None
    wide: bool
    leaves: bool
    times: list[int] = field(default_factory=list)
    kernels: Counter[str] = field(default_factory=Counter)
    launches: int = 0
    module: str = ""
    source: str = ""

    @property
    def mean_s(self) -> float:
        """Seconds of a call."""
        return sum(self.times) / len(self.times) / 1e12

    def predicted(self) -> CostEstimate | None:
        """How long a call should take on the device; None where nothing says."""
        if self.work is None or self.device is None or self.leaves:
            return None
        if not self.work.op.bytes_read and not self.work.op.bytes_written:
            return None
        operands = self.work.inputs, self.work.outputs
        device = in_tf32(self.device) if self.wide else self.device
        if self.work.op.attributes is not None and operands[0][0].dtype not in (*DTYPE_NAMES, DType.FP64):
            return None  # products of whole numbers: no table
        try:
            return cost_of(self.work.op, operands, device)
        except EchoError:
            return None

    def roof(self) -> tuple[float, str]:
        """Seconds that the datasheet leaves a call, and what bounds it; 0 where that is not known."""
        if self.work is None or self.device is None or self.leaves:
            return 0.0, ""
        sheet, op = self.device.datasheet, self.work.op
        memory = (op.bytes_read + op.bytes_written) / sheet.memory_bandwidth_bytes_per_s
        name = DTYPE_NAMES.get(self.work.inputs[0].dtype, "") if self.work.inputs else ""
        names = ("tf32",) if self.wide else (name, "bf16") if name == "fp16" else (name,)
        peak = next((sheet.peak_flops_per_s[n] for n in names if n in sheet.peak_flops_per_s), 0.0)
        compute = op.flops / peak if peak else 0.0
        if op.flops and not peak:
            return 0.0, ""
        return max(compute, memory), "compute" if compute > memory else "memory"


def shape_uses(traces: TraceSet, device: str = "", notes: list[str] | None = None) -> list[ShapeUse]:
    """The calls of all ranks by operator and shapes, those first that took the most time.

    Args:
        traces: the job's.
        device: name or file of the profile of the devices; "": what the traces say.
        notes: gets a line for what is missing.

    Raises:
        EchoError: no such device, or a file is gone.
    """
    uses: dict[Hashable, ShapeUse] = {}
    said = [] if notes is None else notes
    for rank, trace in traces.items():
        profile = load_device(device) if device else profile_of(trace, said)
        found = origins(trace)
        calls = device_calls(trace, found)
        said += found.notes
        if not calls:
            said.append(f"rank {rank}: nothing computed on a device while it was profiled")
            continue
        described = described_calls(trace, found, sorted({call.row for call in calls if call.row != NONE}))
        if not any(call.operands for call in described.values()):
            said.append(trace.without("shapes", _SHAPES_NEEDED))
        for call in calls:
            _add(uses, trace, found, call, described.get(call.row), profile)
    return sorted(uses.values(), key=lambda use: (-sum(use.times), use.call.name))


def profile_of(trace: Trace, notes: list[str]) -> DeviceProfile | None:
    """The profile of the device that a trace says it ran on."""
    listed = trace.header.get("deviceProperties")
    known = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    name = str(known[0].get("name", "")) if known else ""
    memory = known[0].get("totalGlobalMem", 0) if known else 0
    found = profile_of_hardware(name, memory if isinstance(memory, int) else 0)
    if found is None:
        of = f"of '{name}'" if name else "(the trace does not name its device)"
        notes.append(f"rank {trace.rank}: no profile {of}: name one with --option device=..., see echosim devices")
        return None
    return load_device(found)


def _add(
    uses: dict[Hashable, ShapeUse],
    trace: Trace,
    found: Origins,
    device_call: DeviceCall,
    call: ShapedCall | None,
    profile: DeviceProfile | None,
) -> ShapeUse:
    row, works = device_call
    # Of these rows alone: there is a call for every few rows of the trace.
    kernels = [trace.strings[code] in KERNELS for code in trace.category[works].tolist()]
    texts = map(trace.text, works)
    names = [function_name(text) if kernel else text for text, kernel in zip(texts, kernels, strict=True)]
    if call is None:
        call = operator_call("", found.phase[works[0]], {})
    work = traced_work(call)
    wide = any("tf32" in trace.text(one) for one in works) and any(t.dtype is DType.FP32 for t in call.tensors)
    leaves = any(_TO_OR_FROM_HOST.search(name) for name in names)
    attributes = work.op.attributes if work is not None else None
    same = (call.name, call.phase, _told(call), attributes, wide, leaves, profile.name if profile else "")
    # What no operator launched is told apart by its own name.
    key: Hashable = same if row != NONE else (*same, names[0])
    if key not in uses:
        source = _source(trace, found, works[0], call)
        uses[key] = ShapeUse(
            call=call, work=work, device=profile, wide=wide, leaves=leaves, module=found.module[works[0]],
            source=source,
        )  # fmt: skip
    use = uses[key]
    start = trace.start[works]
    begin, end = union(start, start + trace.duration[works])
    use.times.append(int((end - begin).sum()))
    use.launches += len(works)
    for name, took in zip(names, trace.duration[works].tolist(), strict=True):
        use.kernels[name] += took
    return use


def costed_calls(trace: Trace, device: DeviceProfile) -> list[tuple[DeviceCall, ShapeUse]]:
    """The calls of one rank, each with those like it, of which `predicted` says how long one should take.

    Raises:
        InputError: the trace's file is gone.
    """
    uses: dict[Hashable, ShapeUse] = {}
    found = origins(trace)
    calls = device_calls(trace, found)
    described = described_calls(trace, found, sorted({call.row for call in calls if call.row != NONE}))
    return [(call, _add(uses, trace, found, call, described.get(call.row), device)) for call in calls]


TITLES = (
    "kind", "operator", "phase", "shapes", "dtypes", "calls", "kernels", "kernel", "sum (us)", "mean (us)",
    "min (us)", "max (us)", "FLOPs", "bytes", "flops_per_byte", "TFLOP/s", "GB/s", "roof_TFLOP/s", "bound_by",
    "percent_of_peak", "predicted (us)", "spread", "excess (us)", "module", "source",
)  # fmt: skip


def shapes(traces: TraceSet, *, kind: str = "", device: str = "") -> AnswerTable:
    """The operators by shape: how long each takes, how fast that is, and how long it should take.

    One row an operator, phase and shapes, over all ranks, the costliest first. Columns: `kind` ("product",
    "convolution", "attention", "normalisation", "softmax", "elementwise", "copy", "reduction", "lookup",
    "compiled", "transfer" to or from the host; "other" of operators that are in none of these, "no operator"
    of work whose launch was not seen or made by none); `operator`; `phase`; `shapes` of its tensors (".T": by
    columns) and what else costs depend on; `dtypes`; `calls`; `kernels` that a call launches, on average;
    `kernel` that takes most of it; `sum (us)`, `mean (us)`, `min (us)`, `max (us)` during which work of a call
    runs, communication left out; `FLOPs` that are executed and `bytes` that must move, of a call, and the
    former over the latter; `TFLOP/s`, `GB/s`; by the datasheet `roof_TFLOP/s`, `bound_by` compute or memory,
    and `percent_of_peak` (the roofline); `predicted (us)` by the device's cost model, its `spread` (one sigma,
    relative), and `excess (us)`, what all calls took beyond the prediction; `module` and `source` of the
    first.
    What is not known is empty.

    Args:
        traces: the job's; their files are still where they were.
        kind: only this kind.
        device: name or file of the devices' profile, where the traces do not name a device that has one.

    Raises:
        UsageError: nothing is of the kind.
        UnknownNameError: no such device.
        InputError: a file is gone.
    """
    notes = list(traces.notes)
    uses = shape_uses(traces, device, notes)
    known = dict.fromkeys(map(_kind, uses))
    if kind and kind not in known:
        raise UsageError(f"shapes: nothing is of the kind '{kind}'; there is {', '.join(known) or 'nothing'}")
    notes += _coverage(uses)
    return _table(TITLES, (_row(use) for use in uses if kind in ("", _kind(use))), notes)


def _table(titles: Sequence[str], rows: Iterable[Mapping[str, Any]], notes: list[str]) -> AnswerTable:
    return from_rows(titles, ([row[title] for title in titles] for row in rows), notes)


_SLOW = (
    "operator", "phase", "shapes", "dtypes", "calls", "mean (us)", "predicted (us)", "ratio", "excess (us)",
    "sure_excess (us)", "percent_of_peak", "kernel", "module", "source",
)  # fmt: skip


def slow_kernels(traces: TraceSet, *, device: str = "", top: int = 0) -> AnswerTable:
    """The kernels that take longer than they should, those first that cost most by it.

    A row is an operator with its shapes, all its kernels together. Columns, beside those of `shapes`: `ratio` of
    measured to predicted; `excess (us)` what all calls took beyond the prediction; `sure_excess (us)` what they
    took beyond the longest that the prediction holds likely (95 of 100 are shorter). Only rows that have a sure
    excess are here, by that.

    Args:
        traces: the job's; their files are still where they were.
        device: name or file of the devices' profile, where the traces do not name a device that has one.
        top: only so many; 0 for all.

    Raises:
        UnknownNameError: no such device.
        InputError: a file is gone.
    """
    notes = list(traces.notes)
    uses = shape_uses(traces, device, notes)
    notes += _coverage(uses)
    found = []
    for use in uses:
        cost = use.predicted()
        if cost is None:
            continue
        sure = (use.mean_s - float(cost.seconds) * (1 + _SURE * float(cost.spread))) * len(use.times) * 1e6
        if sure > 0:
            found.append(_row(use) | {"ratio": use.mean_s / float(cost.seconds), "sure_excess (us)": sure})
    found.sort(key=lambda row: -row["sure_excess (us)"])
    return _table(_SLOW, found[: top or None], notes)


_ERRORS = (
    "kind", "phase", "shapes", "calls", "measured (us)", "percent_of_time", "percent_predicted",
    "measured_there (us)", "predicted (us)", "ratio", "median_error", "within_spread",
)  # fmt: skip


def prediction_errors(traces: TraceSet, *, device: str = "") -> AnswerTable:
    """How far the device's cost model is from what the kernels took, by kind of operator and part of the step.

    Columns: `kind`, `phase` ("all" in the last row); `shapes` how many differ, `calls`; `measured (us)`, and its
    share of the devices' time outside communication; `percent_predicted` of it has a prediction, of that
    `measured_there (us)`, `predicted (us)` and their `ratio` (above 1: it took longer than predicted);
    `median_error` of a shape, relative to the measured time, shapes by the time that they take; `within_spread`
    percent of that time is of shapes whose prediction is within two of its deviations.

    Args:
        traces: the job's; their files are still where they were.
        device: name or file of the devices' profile, where the traces do not name a device that has one.

    Raises:
        UnknownNameError: no such device.
        InputError: a file is gone.
    """
    notes = list(traces.notes)
    uses = shape_uses(traces, device, notes)
    total = sum(sum(use.times) for use in uses)
    groups: dict[tuple[str, str], list[ShapeUse]] = defaultdict(list)
    for use in uses:
        groups[_kind(use), use.call.phase.name.lower()].append(use)
    rows = [(*key, *_errors(of, total)) for key, of in groups.items()]
    if uses:
        rows.append(("all", "all", *_errors(uses, total)))
    return from_rows(_ERRORS, rows, notes)


def _errors(uses: list[ShapeUse], total: int) -> tuple[float | None, ...]:
    measured = sum(sum(use.times) for use in uses)
    known = [(sum(use.times), use, cost) for use in uses if (cost := use.predicted()) is not None]
    there = sum(took for took, *_ in known)
    predicted = sum(float(cost.seconds) * len(use.times) * 1e12 for _, use, cost in known)
    off = sorted((abs(float(cost.seconds) / use.mean_s - 1), took) for took, use, cost in known if use.mean_s)
    halves = np.cumsum([took for _, took in off]) if off else np.zeros(0)
    middle = off[int(np.searchsorted(halves, halves[-1] / 2))][0] if off else None
    sure = sum(
        took for took, use, cost in known if abs(use.mean_s / float(cost.seconds) - 1) <= 2 * float(cost.spread)
    )
    return (
        len(uses), sum(len(use.times) for use in uses), measured / US, 100 * measured / max(total, 1),
        100 * there / measured if measured else None, there / US, predicted / US, _ratio(there, predicted), middle,
        100 * sure / there if there else None,
    )  # fmt: skip


def _coverage(uses: list[ShapeUse]) -> Iterator[str]:
    """How much of the devices' time the tables know."""
    total = sum(sum(use.times) for use in uses)
    if not total:
        return
    priced = sum(sum(use.times) for use in uses if use.predicted() is not None)
    sized = sum(sum(use.times) for use in uses if use.work is not None)
    yield (
        f"of the devices' time outside communication {sized / total:.1%} has FLOPs and bytes, "
        f"{priced / total:.1%} a prediction"
    )


def _kind(use: ShapeUse) -> str:
    if use.leaves:
        return "transfer"
    if use.work is not None:
        return use.work.kind
    return "other" if use.call.name else "no operator"


def _row(use: ShapeUse) -> dict[str, Any]:
    seconds, (roof, bound), cost = use.mean_s, use.roof(), use.predicted()
    op = None if use.work is None else use.work.op
    flops, moved = (0, 0) if op is None else (op.flops, op.bytes_read + op.bytes_written)
    texts, dtypes = _told(use.call)
    times = [time / US for time in use.times]
    count, total = len(times), sum(times)
    expected = None if cost is None else float(cost.seconds) * 1e6
    return {
        "kind": _kind(use),
        "operator": use.call.name,
        "phase": use.call.phase.name.lower(),
        "shapes": " ".join(filter(None, (texts, _beyond(use)))),
        "dtypes": dtypes,
        "calls": count,
        "kernels": use.launches / count,
        "kernel": use.kernels.most_common(1)[0][0],
        "sum (us)": total,
        "mean (us)": total / count,
        "min (us)": min(times),
        "max (us)": max(times),
        "FLOPs": flops or None,
        "bytes": moved or None,
        "flops_per_byte": _ratio(flops, moved),
        "TFLOP/s": _ratio(flops / 1e12, seconds),
        "GB/s": _ratio(moved / 1e9, seconds),
        "roof_TFLOP/s": _ratio(flops / 1e12, roof),
        "bound_by": bound,
        "percent_of_peak": _ratio(100 * roof, seconds),
        "predicted (us)": expected,
        "spread": None if cost is None else float(cost.spread),
        "excess (us)": None if expected is None else total - expected * count,
        "module": use.module,
        "source": use.source,
    }


def _ratio(amount: float, of: float) -> float | None:
    return amount / of if amount and of else None


def _beyond(use: ShapeUse) -> str:
    """What costs depend on beside shapes."""
    attributes = None if use.work is None else use.work.op.attributes
    match attributes:
        case Convolution():
            said = (
                ("stride", attributes.stride),
                ("padding", attributes.padding),
                ("dilation", attributes.dilation),
            )
            plain = {"stride": 1, "padding": 0, "dilation": 1}
            parts = [f"{name}={','.join(map(str, v))}" for name, v in said if set(v) != {plain[name]}]
            parts += [f"groups={attributes.groups}"] if attributes.groups > 1 else []
            return " ".join([*parts, *(["transposed"] if attributes.transposed else [])])
        case Attention():
            return "causal" if attributes.causal else ""
        case Gemm():
            return "TF32" if use.wide else ""
    return ""
