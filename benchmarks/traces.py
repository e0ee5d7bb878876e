"""Reading and analysing real profiler traces, beside HTA (PyPI `traceinsight`) on the same files, in the same run.

python -m benchmarks.traces [--large]

Reads the 216,092-event trace of the published measurements (ECHOGRAPH_DATA, default ../shared/data); with --large,
instead, that trace as eight ranks, and tiled eight times (1.7 M events). HTA runs where ECHOGRAPH_HTA names a
Python that has `traceinsight` 0.6.1 and pandas 2.3.3, by the scripts in ../shared/tools. CPU seconds are of each
process and its children, without imports; of HTA's analyses those count that both have, each once.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DATA = Path(os.environ.get("ECHOGRAPH_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
TOOLS = DATA.parent / "tools"
TRACE = DATA / "traces" / "v100-ddp-216k-events"
# Our analysis: HTA's step in the timings of its script, and our options.
SAME: dict[str, tuple[str, dict[str, Any]]] = {
    "temporal-breakdown": ("temporal_breakdown", {}),
    "idle": ("idle_time_breakdown", {}),
    "kernels": ("gpu_kernel_breakdown_all", {}),
    "overlap": ("comm_comp_overlap", {}),
    "memory-bandwidth": ("memory_bw_time_series", {}),
    "memory-bandwidth-summary": ("memory_bw_summary", {}),
    "queue-length": ("queue_length_time_series", {}),
    "queue-length-summary": ("queue_length_summary", {}),
    "queue-full": ("blocked_on_full_queue_maxlen4", {"max_queue_length": 4}),
    "launches": ("cuda_kernel_launch_stats", {}),
    "annotations": ("cpu_user_annotation_breakdown", {"side": "host"}),
    "annotated-kernels": ("gpu_kernels_with_user_annotations", {}),
    "steps": ("profiler_steps", {}),
    "stragglers": ("potential_stragglers", {}),
    "kernel-sequences": ("frequent_cuda_kernel_sequences", {"operator": "aten::addmm", "min_length": 1}),
    "operators": ("aten_op_kernels_and_delay", {}),
}
# HTA's other tables that come with one of ours: kernel types with kernels, statistics of gaps with idle times.
WITH = {"kernels": ["kernel-types"], "idle": ["idle-intervals"]}
# These HTA answers for one rank alone.
FIRST_RANK = {"annotated-kernels", "kernel-sequences", "operators"}
NOT_OURS = (
    "critical_path,overlay_critical_path,generate_trace_with_counters,cupti_counters,gpu_kernel_breakdown,"
    "call_graph_one_rank(new),call_graph_one_rank(old)"
)
SLOW = "frequent_cuda_kernel_sequences,aten_op_kernels_and_delay"


def main() -> None:
    """Prints CPU seconds and peak memory of both, their ratios, and each analysis."""
    if not TRACE.exists():
        print(f"no published traces at {TRACE.parent}: set ECHOGRAPH_DATA")
        return
    if "--large" not in sys.argv[1:]:
        _compare("216k events", TRACE, skip=NOT_OURS)
        return
    (source,) = TRACE.glob("*.gz")
    for label, how in (("as 8 ranks", ("ranks", "8")), ("tiled 8 times, 1.7 M events", ("time", "8"))):
        with tempfile.TemporaryDirectory() as folder:
            script = str(TOOLS / "scale_trace.py")
            subprocess.run([sys.executable, script, str(source), *how, folder], check=True)
            _compare(label, Path(folder), skip=f"{NOT_OURS},{SLOW}")


def _compare(label: str, folder: Path, skip: str) -> None:
    skipped = set(skip.split(","))
    ours = json.loads(_run([sys.executable, "-m", "benchmarks.traces", "--ours", str(folder)]))
    theirs = _hta(folder, skip)
    print(f"\n{label}: CPU seconds, peak MiB")
    print(f"{'':<28}{'echograph':>10}{'HTA':>10}{'ratio':>8}")
    _line("parse", ours["parse"], theirs.get("parse", {}).get("cpu_s"))
    _line("peak memory", ours["peak_MiB"], theirs.get("_meta", {}).get("self_peak_mb"))
    _line("second look, wall", ours["second_look_wall_s"], None)
    both = {name: hta for name, (hta, _) in SAME.items() if hta not in skipped}
    for name, hta in both.items():
        _line(name, ours[name], theirs.get(hta, {}).get("cpu_s"))
    if theirs:
        _line(
            "all of these",
            sum(ours[n] for n in both),
            sum(theirs.get(h, {}).get("cpu_s", 0) for h in both.values()),
        )


def _line(name: str, ours: float, theirs: float | None) -> None:
    beside = "" if theirs is None else f"{theirs:10.3f}{theirs / max(ours, 1e-4):7.1f}x"
    print(f"{name:<28}{ours:10.3f}{beside}", flush=True)


def _hta(folder: Path, skip: str) -> dict[str, Any]:
    python = os.environ.get("ECHOGRAPH_HTA")
    if not python:
        print("ECHOGRAPH_HTA names no Python with traceinsight: HTA is left out")
        return {}
    with tempfile.TemporaryDirectory() as out:
        # HTA may write beside its input, so it gets a copy.
        copy = Path(out) / "traces"
        copy.mkdir()
        for file in folder.iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
        _run(
            [python, str(TOOLS / "hta_baseline.py"), str(copy), out, "--no-csv", "--limit", "3600", "--skip", skip]
        )
        found: dict[str, Any] = json.loads((Path(out) / "timing.json").read_text())
        return found


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def ours(folder: Path) -> dict[str, float]:
    """CPU seconds of reading a folder and of each analysis; peak memory; wall seconds of a second look."""
    from echograph.profiler.analyses import ANALYSES
    from echograph.profiler.traces import TraceSet, read_traces

    found: dict[str, float] = {}
    workers = os.cpu_count() or 1
    traces, found["parse"] = _timed(lambda: read_traces(folder, workers=workers))
    for name, (_, options) in SAME.items():
        chosen = TraceSet({min(traces): traces[min(traces)]}) if name in FIRST_RANK else traces
        analyses = [(ANALYSES[name], options)] + [(ANALYSES[other], {}) for other in WITH.get(name, [])]
        _, found[name] = _timed(lambda todo=analyses, on=chosen: [analysis(on, **o) for analysis, o in todo])
    usage = (resource.getrusage(who).ru_maxrss / 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    found["peak_MiB"] = max(usage)
    with tempfile.TemporaryDirectory() as cache:
        read_traces(folder, workers=workers, cache_folder=Path(cache))
        began = time.perf_counter()
        read_traces(folder, workers=workers, cache_folder=Path(cache))
        found["second_look_wall_s"] = time.perf_counter() - began
    return found


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    began = _cpu()
    done = work()
    return done, _cpu() - began


def _cpu() -> float:
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--ours"]:
        print(json.dumps(ours(Path(sys.argv[2]))))
    else:
        main()
