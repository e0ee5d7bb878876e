"""The critical path against HTA's on the published traces, by hand on a small one, and against networkx."""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hta_reference import PUBLISHED, answer, exact, traces
from hypothesis import given
from hypothesis import strategies as st
from small_traces import Event, call, job, launched, operator, step, trace, work, write
from typer.testing import CliRunner

from echograph.cli.echoprof import app
from echograph.errors import DataError, FormatError, UsageError
from echograph.profiler.analyses import ANALYSES
from echograph.profiler.analyses.counters import queues
from echograph.profiler.analyses.critical_path import (
    Bound,
    CriticalGraph,
    Edge,
    critical_graph,
    load_graph,
    path_bounds,
    save_critical_graph,
)
from echograph.profiler.traces import read_traces
from echograph.profiler.traces.relations import call_stacks
from echograph.profiler.traces.trace import NONE, Trace

US = 1_000_000
ALEXNET = "[param|pytorch.model.alex_net|0|0|0|measure|forward]"
everywhere = pytest.mark.parametrize("name", PUBLISHED)


def published(data: Path, name: str, clock: Any = traces) -> CriticalGraph:
    """The graph of the part of a published trace of which HTA's answer is."""
    first = next(iter(clock(data, name).values()))
    annotation = ALEXNET if name.startswith("critical-path") else "ProfilerStep"
    marks = sum(annotation in first.strings[code] for code in first.name)
    return critical_graph(first, annotation=annotation, instance=min(1, marks - 1))


@everywhere
def test_graph_and_path_are_those_of_hta(measured_data: Path, name: str) -> None:
    theirs = json.loads((measured_data / "hta_reference" / name / "critical_path_info.json").read_text())
    graph = published(measured_data, name)
    path = graph.path()
    assert (graph.nodes, len(graph.weight)) == (theirs["graph_nodes"], theirs["edges"])
    assert (path.length, len(path.nodes)) == (theirs["cp_len_us"] * US, theirs["cp_nodes"])
    ours, other = (Counter(kinds) for kinds in (_kinds(graph, slice(None)), theirs["edge_types"]))
    for kind in ("OPERATOR_KERNEL", "DEPENDENCY", "SYNC_DEPENDENCY"):
        assert ours[kind] == other[kind], kind
    # Launches and starts in one moment: HTA takes them in the order in which an unstable sort leaves them, so
    # that some kernels are alone in their queue or are not; each has one edge or the other.
    together = 0
    for _, queue in queues(graph.trace):
        launch = queue.works != queue.rows
        together += int(np.isin(queue.time[launch], queue.time[~launch]).sum())
    assert abs(ours["KERNEL_LAUNCH_DELAY"] - other["KERNEL_LAUNCH_DELAY"]) <= together
    assert _kinds(graph, path.edges) == theirs["cp_edge_types"]


def _kinds(graph: CriticalGraph, edges: Any) -> Counter[str]:
    names = {"OPERATOR": "OPERATOR_KERNEL"}
    found = (Edge(kind).name.upper() for kind in graph.kind[edges].tolist())
    return Counter(names.get(name, name) for name in found)


@everywhere
def test_breakdown_is_that_of_hta(measured_data: Path, name: str) -> None:
    theirs = answer(measured_data, name, "critical_path_breakdown.csv")
    if theirs is None:
        pytest.skip("HTA's breakdown is not published for this set")
    graph = published(measured_data, name)
    stacks, row_of = call_stacks(graph.trace), {int(index): row for row, index in enumerate(graph.trace.index)}
    annotation = graph.trace.of_category({"user_annotation"})

    def operator_of(index: float | None) -> int:
        # HTA charges what lies between an annotation's calls to the annotation, which has no nodes in its graph;
        # here the operator around it is charged.
        row = row_of.get(int(-1 if index is None else index), NONE)
        while row != NONE and annotation[row]:
            row = int(stacks.parent[row])
        return row

    edges = graph.path().edges
    parts = (graph.event, graph.weight / US, graph.bound, graph.kind)
    rows = zip(*(part[edges].tolist() for part in parts), strict=True)
    ours = Counter((e, w, _theirs(b), f"critical_path_{Edge(k).name}") for e, w, b, k in rows)
    other = Counter((operator_of(r["event_idx"]), r["duration"], r["bound_by"] or "", r["type"]) for r in theirs)
    assert ours == other


def _theirs(bound: int) -> str:
    """HTA has no word for copies and sets: it counts them as computation."""
    return (Bound.gpu_compute_bound if bound == Bound.gpu_memory_bound else Bound(bound)).title


def test_what_if_changes_the_summary_too(measured_data: Path) -> None:
    # HTA's summary reads the weights that the graph was made with: after this it still says 35,834 us.
    graph = published(measured_data, "critical-path-alexnet")
    faster = graph.scaled(0.1, bounds=[Bound.cpu_bound])
    assert faster.path().length == pytest.approx(6996.2 * US)
    summary = {name: spent for name, spent, _ in path_bounds(faster)}
    assert sum(summary.values()) == pytest.approx(6996.2)
    assert summary["cpu_bound"] == pytest.approx(3204.2)
    assert graph.path().length == 35_834 * US


@pytest.mark.parametrize("name", ["critical-path-alexnet", "critical-path-simple-add", "v100-ddp-216k-events"])
@pytest.mark.parametrize("kind", [Edge.operator, Edge.kernel_launch_delay, Edge.kernel_kernel_delay])
def test_halving_a_kind_of_edge(measured_data: Path, name: str, kind: Edge) -> None:
    graph = published(measured_data, name)
    before, halved = graph.path(), graph.scaled(0.5, edges=[kind])
    after = halved.path()
    # No path is shorter than what is left of the longest, and none longer than that was.
    kept = int(halved.weight[before.edges].sum())
    assert kept <= after.length <= before.length
    assert int(halved.weight[after.edges].sum()) == after.length
    assert sum(spent for _, spent, _ in path_bounds(halved)) == pytest.approx(after.length / US)
    assert sum(share for _, _, share in path_bounds(halved)) == pytest.approx(100)
    assert np.array_equal(halved.weight == graph.weight, (graph.kind != kind) | (graph.weight == 0))


@pytest.mark.parametrize("name", ["a100-nccl-args", "v100-float-timestamps"])
def test_exact_times_give_nearly_the_rounded_path(measured_data: Path, name: str) -> None:
    # Rounded, events of less than a microsecond vanish from the graph; here they are in it.
    precise, rounded = published(measured_data, name, exact), published(measured_data, name)
    assert precise.path().length == pytest.approx(rounded.path().length, rel=0.02)
    assert precise.nodes >= rounded.nodes


@pytest.mark.parametrize("name", ["critical-path-alexnet", "dlrm-v100-8-ranks"])
def test_path_is_that_of_networkx(measured_data: Path, name: str) -> None:
    graph = published(measured_data, name)
    for changed in (graph, graph.scaled(0.3, edges=[Edge.operator]), graph.scaled(0, bounds=[Bound.cpu_bound])):
        assert changed.path().length == longest(changed)


def longest(graph: CriticalGraph) -> int:
    networkx = pytest.importorskip("networkx")
    other = networkx.DiGraph()
    other.add_weighted_edges_from(
        zip(*(c.tolist() for c in (graph.source, graph.target, graph.weight)), strict=True)
    )
    return int(networkx.dag_longest_path_length(other))


def small() -> list[Event]:
    """Two operators that launch a kernel each, a wait for both, and a last operator."""
    return [
        step(0, 0, 2000),
        operator("aten::mm", 10, 90),
        *launched("gemm", 20, 40, 200, 1),
        operator("aten::mm", 110, 40),
        *launched("gemm", 115, 245, 1000, 2),
        call(160, 1090, 3, "cudaStreamSynchronize"),
        work("Stream Sync", 160, 1085, 3, cat="cuda_sync"),
        operator("aten::add", 1260, 40),
    ]


# The first operator until it launches; launch; kernel; gap; kernel; the wait and what follows it: 0; add.
SMALL_US = 10 + 20 + 200 + 5 + 1000 + 40


def rows(folder: Path, name: str = "critical-path", **options: Any) -> list[dict[str, Any]]:
    return list(ANALYSES[name](job(folder, small()), **options).records())


def test_small_path(tmp_path: Path) -> None:
    found = [(r["s_name"], r["duration"], r["type"], r["bound_by"]) for r in rows(tmp_path)]
    assert found == [
        ("aten::mm", 10, "critical_path_operator", "cpu_bound"),
        ("", 20, "critical_path_kernel_launch_delay", "gpu_kernel_launch_overhead"),
        ("gemm", 200, "critical_path_operator", "gpu_compute_bound"),
        ("gemm", 5, "critical_path_kernel_kernel_delay", "gpu_kernel_kernel_overhead"),
        ("gemm", 1000, "critical_path_operator", "gpu_compute_bound"),
        ("", 0, "critical_path_sync_dependency", ""),
        ("", 0, "critical_path_dependency", ""),
        ("aten::add", 40, "critical_path_operator", "cpu_bound"),
    ]


@pytest.mark.parametrize(
    ("scale", "cpu", "gpu"),
    [
        ("", 50, 1200),
        ("gpu_compute_bound=0.5", 50, 600),
        ("cpu_bound=2,gpu_compute_bound=0.5", 100, 600),
        # Without kernels the host alone is the longest: both operators, a wait that costs nothing, and the last.
        ("gpu_compute_bound=0", 90 + 40 + 40, None),
    ],
)
def test_small_summary(tmp_path: Path, scale: str, cpu: float, gpu: float | None) -> None:
    summary = {r["bound_by"]: r for r in rows(tmp_path, "critical-path-summary", scale=scale)}
    assert summary["cpu_bound"]["duration"] == cpu
    assert summary.get("gpu_compute_bound", {}).get("duration") == gpu
    assert sum(r["percentage"] for r in summary.values()) == pytest.approx(100)
    whole = sum(r["duration"] for r in rows(tmp_path, scale=scale))
    assert sum(r["duration"] for r in summary.values()) == whole


@pytest.mark.parametrize("factor", [1e17, 1e300])
def test_times_beyond_64_bits_are_refused(tmp_path: Path, factor: float) -> None:
    with pytest.raises(UsageError, match="more than 106 days: give a smaller factor"):
        critical_graph(trace(tmp_path, small())).scaled(factor, bounds=[Bound.gpu_compute_bound])


def test_a_slower_host_delays_kernels_by_launch_edges(tmp_path: Path) -> None:
    one = trace(tmp_path, small())
    slow = [critical_graph(one, launch_edges=e).scaled(10, bounds=[Bound.cpu_bound]) for e in (False, True)]
    assert critical_graph(one, launch_edges=True).path().length == SMALL_US * US
    assert slow[0].path().length == (100 + 20 + 200 + 5 + 1000 + 400) * US
    assert slow[1].path().length == (900 + 50 + 1000 + 400) * US


def loading() -> list[Event]:
    loader = operator("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 10, 100)
    within = operator("aten::stack", 20, 30)
    return [
        operator("aten::mm", 0, 10),
        loader | {"cat": "user_annotation"},
        within,
        operator("aten::add", 115, 40),
    ]


def test_loading_data_is_on_the_path_where_it_is_named(tmp_path: Path) -> None:
    def summary(**options: Any) -> dict[str, float]:
        table = ANALYSES["critical-path-summary"](job(tmp_path, loading()), **options)
        return {row["bound_by"]: row["duration"] for row in table.records()}

    # What lies between two operators that nothing is around is free; annotations count where they are named.
    assert summary() == {"cpu_bound": 10 + 30 + 40}
    assert summary(data_load_events="DataLoader") == {"cpu_bound": 80, "data_loading": 10 + 60}
    assert summary(data_load_events="Data.*next", scale="data_loading=0.5")["data_loading"] == 35
    with pytest.raises(UsageError, match="not a regular expression"):
        summary(data_load_events="(")


def test_what_loads_data_is_kept_with_the_graph(tmp_path: Path) -> None:
    graph = critical_graph(trace(tmp_path, loading()), data_load_events="DataLoader")
    save_critical_graph(graph, tmp_path / "graph.npz")
    assert path_bounds(load_graph(tmp_path / "graph.npz", graph.trace)) == path_bounds(graph)
    assert "data_loading" in [name for name, *_ in path_bounds(graph)]


def test_an_awaited_event_delays_another_stream(tmp_path: Path) -> None:
    wait = work("Stream Wait Event", 56, 1, 4, stream=20, cat="cuda_sync")
    wait["args"] |= {"wait_on_stream": 7, "wait_on_cuda_event_record_corr_id": 3}
    events = [
        *launched("gemm", 10, 20, 300, 1),
        call(30, 2, 3, "cudaEventRecord"),
        call(50, 2, 4, "cudaStreamWaitEvent"),
        wait,
        *launched("other", 60, 322, 50, 5, stream=20),
    ]
    graph = critical_graph(trace(tmp_path, events))
    path = graph.path()
    assert [Edge(kind).name for kind in graph.kind[path.edges]] == [
        "kernel_launch_delay",
        "operator",
        "sync_dependency",
        "operator",
    ]
    assert path.length == (10 + 300 + 50) * US


def test_window(tmp_path: Path) -> None:
    events = [*small(), step(1, 3000, 500), operator("aten::mul", 3010, 70)]
    one = trace(tmp_path, events)
    names = [f"ProfilerStep#{n}" for n in (0, 1)]
    lengths = [critical_graph(one, annotation=name).path().length / US for name in names]
    assert lengths == [SMALL_US, 70]
    both = critical_graph(one, annotation="ProfilerStep", instance=0, last=1)
    assert both.path().length / US == SMALL_US + 70
    with pytest.raises(UsageError, match="there are 2, counted from 0"):
        critical_graph(one, annotation="ProfilerStep", instance=2)
    with pytest.raises(UsageError, match="no row has it"):
        critical_graph(one, annotation="nowhere")


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 50)), max_size=30, unique_by=lambda e: e[:2]
    )
)
def test_longest_path_of_random_graphs(pairs: list[tuple[int, int, int]]) -> None:
    graph = _graph([(min(a, b), max(a, b), w) for a, b, w in pairs if a != b])
    path = graph.path()
    assert path.length == int(graph.weight[path.edges].sum())
    assert path.length == (longest(graph) if len(graph.weight) else 0)
    assert np.array_equal(graph.source[path.edges], path.nodes[:-1])
    assert np.array_equal(graph.target[path.edges], path.nodes[1:])
    assert graph.scaled(3).path().length == 3 * path.length


def test_a_circle_is_refused() -> None:
    with pytest.raises(DataError, match="circle"):
        _graph([(0, 1, 1), (1, 2, 1), (2, 0, 1)]).path()


def test_a_factor_below_zero_is_refused() -> None:
    with pytest.raises(UsageError, match="from 0 up"):
        _graph([(0, 1, 1)]).scaled(-1)


def _graph(found: list[tuple[int, int, int]]) -> CriticalGraph:
    edges = {pair[:2]: pair[2] for pair in found}
    pairs = np.array(list(edges), np.int64).reshape(-1, 2)
    time, code = np.zeros(5, np.int64), np.zeros(5, np.int32)
    events = Trace(
        rank=0,
        world_size=1,
        path="t",
        origin=0,
        start=time,
        duration=time,
        name=code,
        category=code,
        pid=time,
        tid=time,
        stream=code,
        correlation=time,
        external_id=time,
        index=np.arange(5),
        strings=("a",),
    )
    return CriticalGraph(
        trace=events,
        rows=np.arange(5),
        source=pairs[:, 0],
        target=pairs[:, 1],
        kind=np.zeros(len(edges), np.int8),
        weight=np.array(list(edges.values()), np.int64),
        event=np.full(len(edges), -1, np.int64),
    )


def test_saved_and_restored(tmp_path: Path) -> None:
    one = trace(tmp_path, small())
    graph = critical_graph(one).scaled(0.5, edges=[Edge.kernel_launch_delay])
    file = tmp_path / "graph.npz"
    save_critical_graph(graph, file)
    again = load_graph(file, one)
    assert again.path().length == graph.path().length == (SMALL_US - 10) * US
    assert path_bounds(again) == path_bounds(graph)
    with pytest.raises(DataError, match="another trace"):
        load_graph(file, dataclasses.replace(one, start=one.start + 1))
    (tmp_path / "broken.npz").write_bytes(b"PK but no archive")
    with pytest.raises(FormatError, match="save a critical path graph with"):
        load_graph(tmp_path / "broken.npz", one)


def test_marked_copy(tmp_path: Path) -> None:
    origin = 1_700_000_000_000_000
    events = [event | {"ts": origin + event["ts"]} for event in small()]
    source = write(tmp_path / "in" / "rank0.json", events, deviceProperties=[])
    copy = tmp_path / "out.json.gz"
    result = CliRunner().invoke(app, ["analyze", str(source), "critical-path", "--no-cache", "-o", str(copy)])
    assert result.exit_code == 0, result.output
    document = json.loads(gzip.decompress(copy.read_bytes()))
    assert document["deviceProperties"] == []
    marked = [event["name"] for event in document["traceEvents"] if event["args"].get("critical") == 1]
    assert marked[:6] == ["aten::mm", "cudaLaunchKernel", "gemm", "gemm", "cudaStreamSynchronize", "aten::add"]
    arrows = [e for e in document["traceEvents"] if e.get("cat") == "critical_path"]
    assert [(e["ph"], e["ts"] - origin, e["args"]["type"]) for e in arrows] == [
        ("s", 20, "kernel_launch_delay"),
        ("f", 40, "kernel_launch_delay"),
        ("s", 1245, "sync_dependency"),
        ("f", 1250, "sync_dependency"),
        ("s", 1250, "dependency"),
        ("f", 1260, "dependency"),
    ]
    before, after = (next(iter(read_traces(path).values())) for path in (source, copy))
    assert np.array_equal(before.start, after.start)
    assert np.array_equal(before.duration, after.duration)


def test_a_file_is_of_one_rank(tmp_path: Path) -> None:
    both = job(tmp_path, small(), small())
    assert {row["rank"] for row in ANALYSES["critical-path-summary"](both).records()} == {0, 1}
    with pytest.raises(UsageError, match="add --ranks 0"):
        ANALYSES["critical-path"](both, save=str(tmp_path / "g.npz"))
