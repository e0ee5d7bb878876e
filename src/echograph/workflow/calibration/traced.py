"""A device profile corrected by the kernels of a trace: `echoprof fit --trace`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from echograph.errors import DataError
from echograph.ir.intervals import union
from echograph.ir.types import Compute
from echograph.profiler.analyses.shapes import costed_calls
from echograph.profiler.costs.device import DeviceProfile
from echograph.profiler.costs.estimate import cost_of, kernel_key
from echograph.profiler.fit.device import write_profile
from echograph.profiler.fit.traced import KindFit, TracedKernel, fit_traced, with_traced
from echograph.profiler.traces.trace import TraceSet
from echograph.progress import Progress, silent
from echograph.units import PS_PER_S
from echograph.workflow.plan import Plan
from echograph.workflow.validation.traced import PredictedTrace, matched_calls, predict_trace, predicted_calls

TITLES = ("profile", "what", "kernels", "median error before", "median error", "percent of time", "corrected")


def fit_trace(
    traces: TraceSet,
    output: Path,
    *,
    model: str = "",
    plan: Plan | None = None,
    source: str = "",
    progress: Progress = silent,
) -> list[dict[str, object]]:
    """Writes the profile of a trace's device, corrected by its kernels.

    Kernels are told by shapes where the trace has them, else by the model that it shows.

    Args:
        traces: the job's.
        output: folder for the profile.
        model: as `validate_trace` takes it.
        plan: as `validate_trace` takes it.
        source: what the trace is called.
        progress: told what goes on.

    Returns:
        A record for each kind: errors on kernels held out before and after, and whether it was corrected.

    Raises:
        UsageError: the trace shows neither shapes nor a model.
        DataError: no kind of kernel could be judged on kernels held out.
    """
    found = predict_trace(traces, model=model, plan=plan, progress=progress)
    assert found.system.device is not None
    base = msgspec.structs.replace(found.system.device, traced=msgspec.UNSET)
    kernels = list(_of_shapes(traces, base) if found.job is None else _of_model(found, base))
    if not kernels:
        raise DataError(
            f"{traces[found.rank].path}: shows neither the shapes of its kernels nor which model ran: "
            "give --model, or record with record_shapes=True"
        )
    progress(f"fitting {len(kernels)} calls of kernels")
    fits = fit_traced(kernels, f"kernels of the trace {source}" if source else "kernels of a trace")
    if not any(fit.correction for fit in fits):
        raise DataError("no kind of kernel is nearer to what was measured with a correction: nothing to write")
    write_profile(with_traced(found.system.device, fits), output / f"{base.name}.json")
    return list(_records(base.name, fits))


def _records(name: str, fits: list[KindFit]) -> Iterator[dict[str, object]]:
    total = sum(fit.kernels_s for fit in fits)
    for fit in fits:
        values = (name, fit.key, fit.kernels, round(fit.before, 4), round(fit.after, 4))
        share = round(100 * fit.kernels_s / total, 2)
        yield dict(zip(TITLES, (*values, share, "yes" if fit.correction else "no"), strict=True))


def _of_shapes(traces: TraceSet, device: DeviceProfile) -> Iterator[TracedKernel]:
    """The calls of a trace whose shapes were recorded."""
    for trace in traces.values():
        for call, use in costed_calls(trace, device):
            cost = use.predicted()
            if cost is not None and use.work is not None:
                start = trace.start[call.works]
                begin, end = union(start, start + trace.duration[call.works])
                busy = int((end - begin).sum())
                key = kernel_key(use.work.op, (use.work.inputs, use.work.outputs))
                yield TracedKernel(key=key, predicted_s=float(cost.seconds), measured_s=busy / PS_PER_S)


def _of_model(found: PredictedTrace, device: DeviceProfile) -> Iterator[TracedKernel]:
    """The calls of a trace that stand for predicted ones."""
    job, result = found.job, found.result
    assert job is not None and result is not None
    predicted = predicted_calls(job, result.timeline, job.program_of(found.rank))
    known: dict[int, tuple[str, float]] = {}
    for step in found.steps:
        for measured, call in matched_calls(step.calls, predicted):
            if call.number not in known:
                known[call.number] = _priced(job.ops[call.number], job.tensors, device)
            key, seconds = known[call.number]
            yield TracedKernel(key=key, predicted_s=seconds, measured_s=measured.duration / PS_PER_S)


def _priced(op: Any, tensors: Any, device: DeviceProfile) -> tuple[str, float]:
    if not isinstance(op, Compute):
        return "", 0.0
    operands = [tensors[i] for i in op.inputs], [tensors[i] for i in op.outputs]
    alone = replace(op, durations=())
    return kernel_key(alone, operands), float(cost_of(alone, operands, device).seconds)
