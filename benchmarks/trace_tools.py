"""What answers about traces cost, beside HTA and TraceLens on the same files in the same run: CPU and peak memory.

python -m benchmarks.trace_tools

Reads three of the published traces (ECHOGRAPH_DATA, default ../shared/data). HTA runs where ECHOGRAPH_HTA names a
Python that has it (PyPI `traceinsight`), TraceLens where ECHOGRAPH_TRACELENS names one that can import it; other
rows are left out. Each tool answers each question in a process of its own, which reads the file anew: CPU
seconds are of that process and its children without imports, MiB are the most that it held beyond what it held
after its imports.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

DATA = Path(os.environ.get("ECHOGRAPH_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
SETS = ("v100-ddp-216k-events", "a100-nccl-args", "mi300x-resnet")
PROFILED_STEP = 1
"""Which step's critical path is asked for, from 0 on."""

# Each question as each tool is asked it; `path` is a folder with one trace, `file` that trace.
OURS = {
    "time, kernels, overlap, idle": """
from echograph.profiler.analyses import ANALYSES
from echograph.profiler.traces import read_traces
begin()
traces = read_traces(path, last_step=True)
for name in ("temporal-breakdown", "kernels", "overlap", "idle", "launches"):
    ANALYSES[name](traces)
""",
    "critical path of a step": """
from echograph.profiler.analyses import ANALYSES
from echograph.profiler.traces import read_traces
begin()
traces = read_traces(path, last_step=True)
ANALYSES["critical-path"](traces, annotation="ProfilerStep", instance=step)
""",
    "operators by shape, collectives": """
from echograph.profiler.analyses import ANALYSES
from echograph.profiler.traces import read_traces
begin()
traces = read_traces(path, last_step=True)
for name in ("temporal-breakdown", "shapes", "kernel-origins", "communication"):
    ANALYSES[name](traces)
""",
}
HTA = {
    "time, kernels, overlap, idle": """
from hta.trace_analysis import TraceAnalysis
begin()
found = TraceAnalysis(trace_dir=str(path))
found.get_temporal_breakdown(visualize=False)
found.get_gpu_kernel_breakdown(visualize=False)
found.get_comm_comp_overlap(visualize=False)
ranks = found.t.get_ranks()
found.get_idle_time_breakdown(ranks=ranks, visualize=False)
found.get_cuda_kernel_launch_stats(ranks=ranks, visualize=False)
""",
    "critical path of a step": """
from hta.trace_analysis import TraceAnalysis
begin()
found = TraceAnalysis(trace_dir=str(path))
rank = min(found.t.get_ranks())
found.critical_path_analysis(rank=rank, annotation="ProfilerStep", instance_id=step)
""",
}
TRACELENS = {
    "operators by shape, collectives": """
from TraceLens.Reporting.generate_perf_report_pytorch import generate_perf_report_pytorch
begin()
generate_perf_report_pytorch(str(file), output_csvs_dir=str(path / "csvs"))
""",
}
_AROUND = """
import json, resource, sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
path, step = Path(sys.argv[1]), int(sys.argv[2])
file = next(iter(sorted(path.glob("*.json*"))))
def used():
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in both), max(one.ru_maxrss for one in both) / 1024
before = None
def begin():
    global before
    before = used()
{body}
cpu, peak = used()
print()
print(json.dumps([cpu - before[0], peak - before[1]]))
"""


def main() -> None:
    """Prints a row for each set, question and tool: CPU seconds, MiB, and how many times ours these are."""
    tools = {
        "echograph": (sys.executable, OURS),
        "HTA": (os.environ.get("ECHOGRAPH_HTA", ""), HTA),
        "TraceLens": (os.environ.get("ECHOGRAPH_TRACELENS", ""), TRACELENS),
    }
    print(
        "| set | question | tool | CPU s | MiB | times our CPU | times our memory |\n|---|---|---|---|---|---|---|"
    )
    for name in SETS:
        for question in OURS:
            ours = None
            for tool, (python, asked) in tools.items():
                if not python or question not in asked:
                    continue
                found = measured(python, asked[question], DATA / "traces" / name)
                ours = ours or found
                print(f"| {name} | {question} | {tool} | {_cells(found, ours)} |", flush=True)


def measured(python: str, body: str, folder: Path) -> tuple[float, float] | str:
    """CPU seconds and MiB of a question asked of a copy of a set, beside which tools may write; or why not."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "traces"
        copy.mkdir()
        for file in folder.iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
        command = [python, "-c", _AROUND.replace("{body}", body), str(copy), str(PROFILED_STEP)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=scratch, env=_environment()
        )
    if done.returncode:
        return done.stderr.strip().rpartition("\n")[2][:80] or f"exit status {done.returncode}"
    cpu, memory = json.loads(done.stdout.strip().rpartition("\n")[2])
    return cpu, memory


def _environment() -> dict[str, str]:
    """What was imported by a relative path here is to be found from elsewhere, too."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.environ | {"PYTHONPATH": os.pathsep.join(str(Path(one).resolve()) for one in paths if one)}


def _cells(found: tuple[float, float] | str, ours: tuple[float, float] | str | None) -> str:
    if isinstance(found, str):
        return f"failed: {found} | | |"
    cpu, memory = found
    if found is ours or not isinstance(ours, tuple):
        return f"{cpu:.2f} | {memory:.0f} | 1 | 1"
    return f"{cpu:.2f} | {memory:.0f} | {cpu / ours[0]:.1f} | {memory / max(ours[1], 1):.1f}"


if __name__ == "__main__":
    main()
