"""Every answer of HTA's that is kept is compared by a test, and rows are compared one by one."""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest
from hta_reference import PUBLISHED, answer, compare, exact, traces

from echograph.profiler.analyses import ANALYSES, COPIES
from echograph.profiler.analyses.table import from_rows
from echograph.profiler.traces import TraceSet
from echograph.profiler.traces.relations import call_stacks, launches, step_of_rows
from echograph.profiler.traces.trace import NONE

US = 1_000_000
HERE = Path(__file__).parent
# What is kept -> the test that compares it, by module.
COMPARED = {
    "aten_op_kernels_and_delay.rank*.csv": "test_against_hta.test_operators",
    "blocked_on_full_queue_maxlen4.csv": "test_against_hta.test_time_on_a_full_queue",
    "comm_comp_overlap.csv": "test_against_hta.test_overlap",
    "?pu_user_annotation_breakdown.csv": "test_against_hta.test_annotations",
    "critical_path_breakdown.csv*": "test_critical_path.test_breakdown_is_that_of_hta",
    "critical_path_info.json": "test_critical_path.test_graph_and_path_are_those_of_hta",
    "cuda_kernel_launch_stats.rank*.csv": "test_against_hta.test_launches",
    "cupti_counters.json": "test_hardware_counters.test_published_traces_have_none_as_hta_says",
    "frequent_cuda_kernel_sequences.csv": "test_against_hta.test_kernel_sequences",
    "gpu_kernel_breakdown.0.csv": "test_against_hta.test_kernel_types",
    "gpu_kernel_breakdown.1.csv": "test_against_hta.test_kernels_keep_true_statistics_when_few_are_named",
    "gpu_kernel_breakdown_all.0.csv": "test_reference_is_used.test_kernel_types_do_not_depend_on_names",
    "gpu_kernel_breakdown_all.1.csv": "test_against_hta.test_kernels",
    "idle_time_breakdown.?.csv": "test_against_hta.test_idle",
    "memory_bw_summary.csv": "test_against_hta.test_memory_bandwidth_summary",
    "memory_bw_time_series.rank*.csv": "test_against_hta.test_memory_bandwidth",
    "overlaid_*.json": "test_reference_is_used.test_marked_sequences",
    "potential_stragglers.json": "test_against_hta.test_stragglers",
    "profiler_steps.json": "test_against_hta.test_steps",
    "queue_length_summary.csv": "test_against_hta.test_queue_length_summary",
    "queue_length_time_series.rank*.csv*": "test_against_hta.test_queue_length",
    "temporal_breakdown.csv": "test_against_hta.test_temporal_breakdown",
    "timing.json": "test_against_hta.test_rows_are_those_that_hta_keeps",
    "trace_df.rank*.csv.gz": "test_reference_is_used.test_rows",
}


def test_every_answer_is_compared(measured_data: Path) -> None:
    kept = {path.name for path in (measured_data / "hta_reference").glob("*/*")}
    by_pattern = {pattern: {name for name in kept if fnmatch(name, pattern)} for pattern in COMPARED}
    assert all(by_pattern.values())
    assert Counter(name for names in by_pattern.values() for name in names) == Counter(kept)


@pytest.mark.parametrize("place", sorted(set(COMPARED.values())))
def test_the_comparing_test_is_there(place: str) -> None:
    module, _, name = place.partition(".")
    spec = importlib.util.spec_from_file_location(f"looked_at_{module}", HERE / f"{module}.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    assert callable(getattr(loaded, name))


@pytest.mark.parametrize("name", PUBLISHED)
def test_kernel_types_do_not_depend_on_names(measured_data: Path, name: str) -> None:
    theirs = answer(measured_data, name, "gpu_kernel_breakdown_all.0.csv") or []
    assert theirs
    assert compare(ANALYSES["kernel-types"](traces(measured_data, name)), theirs, ("kernel_type",)) == []


@pytest.mark.parametrize("name", PUBLISHED)
def test_rows(measured_data: Path, name: str) -> None:
    known = {rank: answer(measured_data, name, f"trace_df.rank{rank}.csv") for rank in traces(measured_data, name)}
    known = {rank: rows for rank, rows in known.items() if rows}
    if not known:
        pytest.skip("HTA's rows are not published for this set")
    for rank, theirs in known.items():
        trace = traces(measured_data, name)[rank]
        pairs, step, stacks = launches(trace), step_of_rows(trace), call_stacks(trace)
        partner = np.full(len(trace), NONE)
        partner[pairs.calls], partner[pairs.works] = trace.index[pairs.works], trace.index[pairs.calls]
        work = Counter(stacks.parent[pairs.works].tolist())
        columns = ("index", "ts", "dur", "s_cat", "s_name", "pid", "tid", "stream", "correlation")
        strings = np.array(trace.strings, object)
        ours = zip(
            trace.index.tolist(),
            (trace.start / US).tolist(),
            (trace.duration / US).tolist(),
            strings[trace.category],
            strings[trace.name],
            trace.pid.tolist(),
            trace.tid.tolist(),
            trace.stream.tolist(),
            trace.correlation.tolist(),
            strict=True,
        )
        assert compare(from_rows(columns, ours), _only(theirs, columns), ("index",)) == []
        by_index = {int(row["index"]): row for row in theirs}
        for row, index in enumerate(trace.index.tolist()):
            other = by_index[index]
            # HTA numbers those without a partner 0 or -1, and so loses the event of index 0.
            assert partner[row] == other["index_correlation"] or max(partner[row], 0) == 0, trace.text(row)
            assert other["index_correlation"] > 0 or partner[row] <= 0, trace.text(row)
            # HTA gives no step to work on stream 0, nor to what starts as a step ends.
            if other["iteration"] not in (None, -1):
                assert step[row] == other["iteration"], trace.text(row)
        assert sum(work.values()) == len(pairs.works)


def test_marked_sequences(measured_data: Path) -> None:
    name, file = "dlrm-v100-8-ranks", "overlaid_worker0_step_12.1694128201545.pt.trace.json"
    theirs = json.loads(gzip.decompress((measured_data / "hta_reference" / name / file).read_bytes()))
    first = TraceSet({0: exact(measured_data, name)[0]})
    ours = json.loads(b"".join(COPIES["kernel-sequences"](first, operator="aten::linear", min_length=1)))
    marked, other = (
        {at: e["args"]["Patterns"] for at, e in enumerate(t["traceEvents"]) if "Patterns" in e.get("args", {})}
        for t in (ours, theirs)
    )
    assert len(other) == 74
    assert marked == other
    assert len(ours["traceEvents"]) == len(theirs["traceEvents"])


def _only(rows: list[dict[str, object]], columns: tuple[str, ...]) -> list[dict[str, object]]:
    found = [{column: row[column] for column in columns} for row in rows]
    for row in found:
        # Kineto writes the stream of what waits for a whole device, -1, as 32 bits without a sign.
        row["stream"] = -1.0 if row["stream"] == 2**32 - 1 else row["stream"]
    return found
