"""Dependencies, critical paths and replays, computed by hand."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiled_jobs import (
    BW_A,
    BW_B,
    EDGES,
    FW_A,
    FW_B,
    MESSAGES,
    NCCL,
    OTHERS,
    PARTS,
    SERVER,
    STEP,
    byteprofile,
    complete,
    dpro_byteps,
    dpro_nccl,
    gml,
    write,
)

from echograph.errors import DataError, InputError, UnknownNameError, UsageError
from echograph.profiler.byteprofile.combine import as_trace
from echograph.profiler.byteprofile.dag import (
    Change,
    Dag,
    DagNode,
    Replay,
    as_dot,
    as_events,
    as_gml,
    dag_table,
    delayed,
    path_table,
    read_dag,
    run_dag,
    sensitivity,
    step_table,
)
from echograph.profiler.byteprofile.dependencies import coupled, dependencies, observed_order
from echograph.profiler.byteprofile.reader import events_of, find_job
from echograph.profiler.byteprofile.report import statistics

US = 10**6
MS = 10**9
# Until BW.b and BW.a are over, on a GPU that is not slower; averages of both steps.
HALF = sum(FW_A) // 2 + FW_B + BW_B
COMPUTED = HALF + BW_A
OWN, ROOT = sum(OTHERS.values()), sum(PARTS.values())
# The root's, from its push on; and before it.
PUSHED = ROOT - PARTS["REDUCE"] - PARTS["COPYD2H"]
HANDED = OTHERS["REDUCE"] + OTHERS["COPYD2H"] + OTHERS["COORDINATE_PUSH"]


def composed(path: Path, *, queues: bool = False, at_run_time: bool = False) -> tuple[list[Dag], Dag]:
    job = find_job(path)
    found = dependencies(job, queues=queues)
    dags = [observed_order(one).dag if at_run_time else one.dag for one in found]
    return dags, coupled(job, found, dags)


def lengths(path: Path, **options: bool) -> list[float]:
    dags, all_ = composed(path, **options)
    return [dag.longest_path().length / US for dag in (*dags, all_)]


def starts_of(done: Replay) -> dict[str, int]:
    """Picoseconds at which each node of the first step started."""
    return {
        node.name: start
        for node, start in zip(done.nodes, done.timeline.start.tolist(), strict=True)
        if not node.step
    }


@pytest.mark.parametrize("at_run_time", [False, True])
def test_a_communication_is_one_node_with_its_total(worker: Path, at_run_time: bool) -> None:
    # On the first GPU Comm.wa is over last, on the root Comm.wb.
    assert COMPUTED + OWN + 15 > HALF + 2 * OWN + 15
    assert COMPUTED + ROOT + 15 < HALF + 2 * ROOT + 15
    one, two = COMPUTED + OWN + 15 + STEP, HALF + 2 * ROOT + 15 + STEP
    assert lengths(worker, at_run_time=at_run_time) == [one, two, two]


@pytest.mark.parametrize("at_run_time", [False, True])
def test_taken_apart_queueing_is_gone_and_the_root_pushes_for_all(worker: Path, at_run_time: bool) -> None:
    # The last push waits for the GPU that hands over later: 19 after BW.a, against 15 on the root itself.
    every = COMPUTED + HANDED + PUSHED + STEP
    expected = [COMPUTED + OWN + STEP, COMPUTED + ROOT + STEP, every]
    assert lengths(worker, queues=True, at_run_time=at_run_time) == expected
    names = [node.name for node in composed(worker, queues=True)[1].longest_path().nodes]
    crossing = names.index("rank0.Comm.wa.COORDINATE_PUSH.10")
    assert names[crossing + 1 : crossing + 3] == ["rank1.Comm.wa.PUSH.10", "rank1.Comm.wa.PULL.10"]


def test_no_worker_pulls_before_all_have_pushed(job: Path) -> None:
    slowest = COMPUTED + 40 + PARTS["REDUCE"] + PARTS["COPYD2H"]
    expected = slowest + PUSHED + STEP
    assert lengths(job, queues=True)[-1] == expected
    # The other worker's root waits too: its pull starts when the last push is in.
    done = run_dag(composed(job, queues=True)[1])
    assert starts_of(done)["wk0.rank1.Comm.wa.PULL.10"] == (slowest + PARTS["PUSH"]) * US
    # Alone, it does not.
    assert lengths(job / "worker0", queues=True)[-1] == COMPUTED + HANDED + PUSHED + STEP


def test_gpus_that_reduce_among_themselves_wait_for_each_other(tmp_path: Path) -> None:
    for rank, slower in ((0, 0), (1, 70)):
        events = [complete("FW.a", 0, 100 + slower, "operator"), complete("BW.a", 200, 50, "operator")]
        for part, dur in (("COORDINATE_REDUCE", 3), ("REDUCE", 20), ("BROADCAST", 30)):
            events.append(complete(f"Comm.w.{part}", 300, dur, "Comm", str(4 + rank)))
        events.append(complete("STEP", 500, 10, "operator"))
        write(tmp_path / "w" / str(rank) / "bps_trace.json", events)
        gml(tmp_path / "w" / str(rank) / "dag.gml", [("FW.a", "BW.a"), ("BW.a", "Comm.w"), ("Comm.w", "STEP")])
    dags, all_ = composed(tmp_path / "w", queues=True)
    assert [dag.longest_path().length / US for dag in dags] == [213, 283]
    done = run_dag(all_)
    # Both broadcast when the slower one has reduced: 170 + 50 + 3 + 20. Keys differ, the partition is the first.
    assert {name: start / US for name, start in starts_of(done).items() if "BROADCAST" in name} == {
        "rank0.Comm.w.BROADCAST.4": 243,
        "rank1.Comm.w.BROADCAST.5": 243,
    }
    assert starts_of(done)["wk0.Comm.w.0.Sync"] == 243 * US
    assert done.makespan == 283 * US


def test_horovods_all_reduce_waits_for_the_slowest_and_its_waiting_is_left_out(tmp_path: Path) -> None:
    trial = dpro_nccl(tmp_path / "trial", clock=777, slower=13)
    update = 20 + 9
    work = sum(dur for part, dur in NCCL.items() if part not in ("Sync", "QUEUE"))
    alone = COMPUTED + work + update
    assert lengths(trial, queues=True) == [alone, alone, alone, alone + 13, alone + 13]
    done = run_dag(composed(trial, queues=True)[1])
    starts = {name: start for name, start in starts_of(done).items() if "ALLREDUCE" in name}
    assert set(starts.values()) == {(COMPUTED + 13 + NCCL["MEMCPY_IN_FUSION_BUFFER"]) * US}
    assert len(starts) == 4
    # As one node, it takes all of its parts, waiting included.
    assert lengths(trial)[0] == COMPUTED + sum(NCCL.values()) + update


def test_messages_go_through_the_server(tmp_path: Path) -> None:
    trial = dpro_byteps(tmp_path / "trial")
    reduced, update = 10, 20 + 9
    alone = COMPUTED + reduced + sum(MESSAGES.values()) + update
    served = MESSAGES["PUSH_REQ"] + sum(SERVER.values()) + MESSAGES["PULL_RES"]
    assert lengths(trial, queues=True) == [alone, alone, COMPUTED + reduced + served + update]


def test_a_node_without_events_takes_what_the_file_says(tmp_path: Path) -> None:
    write(tmp_path / "0" / "trace.json", [complete("FW.a", 0, 8, "operator")])
    edges = [("FW.a", "BW.a"), ("BW.a", "STEP")]
    gml(tmp_path / "0" / "dag.gml", edges, averages={"BW.a": 2.5, "FW.a": 1000.0})
    assert lengths(tmp_path / "0") == [10.5, 10.5]
    write(tmp_path / "0" / "trace.json", [complete("FW.z", 0, 8, "operator")])
    gml(tmp_path / "0" / "dag.gml", edges)
    with pytest.raises(DataError, match="none of its nodes has an event"):
        lengths(tmp_path / "0")


def test_operators_wait_for_those_that_ran_before_them(tmp_path: Path) -> None:
    spans = {"FW.a": (0, 10), "FW.b": (5, 12), "FW.c": (12, 20), "BW.c": (15, 18), "BW.b": (30, 31)}
    events = [complete(name, ts, end - ts, "operator") for name, (ts, end) in spans.items()]
    events.append(complete("FW.a", 100, 10, "operator"))  # of the next step
    write(tmp_path / "0" / "trace.json", events)
    # The model would have all in one line, and an operator that was never seen.
    line = ("I/O_0", "FW.a", "FW.b", "FW.c", "BW.c", "BW.unseen", "BW.b", "STEP")
    gml(tmp_path / "0" / "dag.gml", list(itertools.pairwise(line)))
    (found,) = dependencies(find_job(tmp_path / "0"))
    swept = observed_order(found)
    assert swept.parallelism == 2
    assert {name: set(waits) for name, waits in swept.dag.waits.items() if waits} == {
        "FW.a": {"I/O_0"},
        # b starts while a runs: it waits for what a waited for among operators, which is nothing.
        "FW.c": {"FW.a", "FW.b"},
        "BW.c": {"FW.a", "FW.b"},
        "BW.b": {"FW.c", "BW.c", "BW.unseen"},
        "BW.unseen": {"BW.c"},
        "STEP": {"BW.b"},
    }
    assert swept.dag.longest_path().length / US == 10 + 8 + 1
    assert found.dag.longest_path().length / US == 10 + 7 + 8 + 3 + 1


def test_steps_follow_each_other_on_each_gpu(worker: Path) -> None:
    _, all_ = composed(worker)
    first, second = COMPUTED + OWN + 15 + STEP, HALF + 2 * ROOT + 15 + STEP
    found = step_table(run_dag(all_, steps=3)).records()
    assert found == [
        {
            "step": step,
            "gpu": f"rank{gpu}",
            "start_ms": pytest.approx(step * length / 1000),
            "end_ms": pytest.approx((step + 1) * length / 1000),
            "step_ms": pytest.approx(length / 1000),
        }
        for step in range(3)
        for gpu, length in enumerate((first, second))
    ]
    with pytest.raises(UsageError, match="--step-num 0: give 1 or more"):
        run_dag(all_, steps=0)


def test_delays_of_communication_computation_and_one_node(worker: Path) -> None:
    _, all_ = composed(worker)
    communicated, computed = 2 * ROOT + 15, HALF + STEP

    def step(what: str, change: Change) -> float:
        return run_dag(delayed(all_, what, change)).makespan / US

    assert step("communication", Change(2.0, 0)) == computed + 2 * communicated
    assert step("computation", Change(1.5, 0)) == 1.5 * computed + communicated
    # (time + 10) x 2, of FW.a, FW.b, BW.b, BW.a and STEP: now the way through BW.a and Comm.wa is longer.
    assert step("computation", Change(2.0, 10 * US)) == 2 * (COMPUTED + STEP + 5 * 10) + ROOT + 15
    assert step("rank1.FW.b", Change(1.0, 100 * US)) == computed + communicated + 100
    assert step("rank1.FW.b", Change(1.0, -1000 * US)) == computed + communicated - FW_B
    # 129 are hidden: the other GPU ends so much earlier.
    assert step("rank0.FW.b", Change(1.0, 100 * US)) == computed + communicated
    with pytest.raises(UnknownNameError, match=r"did you mean 'rank0\.FW\.a'"):
        step("rank0.FW.aa", Change(1.0, 1))


def test_each_nth_critical_node_is_delayed_alone(worker: Path) -> None:
    _, all_ = composed(worker, queues=True)
    path = all_.longest_path()
    found = sensitivity(all_, path, 3, Change(1.0, 500 * US)).records()
    assert [row["name"] for row in found] == [node.name for node in path.nodes[::3]]
    base = path.length / MS
    for row in found:
        # What is on the critical path arrives in full.
        assert row["step_ms"] == pytest.approx(base + 0.5)
        assert (row["difference_ms"], row["share"]) == (pytest.approx(0.5), pytest.approx(1.0))
    # Faster, it may lose against another path: COORDINATE_PUSH against the root's own 15.
    fast = sensitivity(all_, path, 1, Change(0.0, 0)).records()
    (row,) = (row for row in fast if row["name"].endswith("COORDINATE_PUSH.10"))
    assert row["difference_ms"] == pytest.approx(-4 / 1000)
    (row,) = (row for row in fast if row["name"] == "rank0.Comm.wa.REDUCE.10")
    assert row["share"] == pytest.approx(4 / 10)
    with pytest.raises(UsageError, match="each:0"):
        sensitivity(all_, path, 0, Change(2.0, 0))


def test_a_replay_read_back_takes_what_was_measured(worker: Path, tmp_path: Path) -> None:
    _, all_ = composed(worker, queues=True, at_run_time=True)
    path = tmp_path / "replay.json"
    path.write_text("".join(as_trace(as_events(run_dag(all_, steps=2)))))
    again = {label.name: average for label, average in statistics(events_of(path)).average_ps().items()}
    measured = statistics(find_job(worker).events()).average_ps()
    kept = {label.name: ps for label, ps in measured.items() if label.part or label.category != "Comm"}
    assert {name: ps for name, ps in again.items() if ps} == kept


def test_the_path_as_a_table(worker: Path) -> None:
    dags, _ = composed(worker)
    found = path_table([("rank0", dags[0].longest_path())]).records()
    assert [row["name"].removeprefix("rank0.") for row in found] == [
        "I/O_0", "FW.a", "FW.b", "OUTPUT0", "BW.b", "BW.a", "Comm.wa", "STEP",
    ]  # fmt: skip
    assert found[-1]["end_ms"] == pytest.approx((COMPUTED + OWN + 15 + STEP) / 1000)
    assert sum(row["avg_ms"] for row in found) == pytest.approx(found[-1]["end_ms"])


@st.composite
def dags(draw: st.DrawFn) -> Dag:
    size = draw(st.integers(1, 12))
    gpus = draw(st.lists(st.integers(-1, 2), min_size=size, max_size=size))
    times = draw(st.lists(st.integers(0, 20), min_size=size, max_size=size))
    nodes = {f"n{i}": DagNode(f"n{i}", times[i], gpus[i], "FW") for i in range(size)}
    waits = {
        f"n{i}": {f"n{j}" for j in range(i) if draw(st.booleans())} for i in range(size)
    }  # fmt: skip
    return Dag(nodes=nodes, waits=waits)


@given(dags(), st.integers(1, 3))
def test_a_replay_takes_as_long_as_networkx_says(dag: Dag, ratio: int) -> None:
    networkx = pytest.importorskip("networkx", reason="needs the [report] extra")
    graph = networkx.DiGraph()
    for name, node in dag.nodes.items():
        graph.add_edge(name, "end", weight=node.duration)
        graph.add_edges_from((before, name, {"weight": dag.nodes[before].duration}) for before in dag.waits[name])
    expected = networkx.dag_longest_path_length(graph)
    path = dag.longest_path()
    assert path.length == expected == sum(node.duration for node in path.nodes)
    assert all(a.name in dag.waits[b.name] for a, b in itertools.pairwise(path.nodes))
    done = run_dag(dag)
    assert max(starts_of(done)[name] + node.duration for name, node in dag.nodes.items()) == expected
    for name, start in starts_of(done).items():
        assert start == max((starts_of(done)[b] + dag.nodes[b].duration for b in dag.waits[name]), default=0)
    slower = run_dag(dag.changed({name: ratio * node.duration for name, node in dag.nodes.items()}))
    assert slower.makespan == ratio * done.makespan


@given(dags())
def test_a_graph_read_back_is_the_same(tmp_path_factory: pytest.TempPathFactory, dag: Dag) -> None:
    pytest.importorskip("networkx", reason="needs the [report] extra")
    named = {f"FW.{name}": node for name, node in dag.nodes.items()}
    waits = {f"FW.{name}": {f"FW.{b}" for b in befores} for name, befores in dag.waits.items()}
    whole = Dag(nodes={name: node._replace(name=name) for name, node in named.items()}, waits=waits)
    path = tmp_path_factory.mktemp("dag") / "dag.gml"
    path.write_text("".join(as_gml(whole)))
    found = read_dag(path)
    assert found.nodes == {name: node.duration for name, node in whole.nodes.items()}
    assert set(found.edges) == set(whole.edges())


def test_an_order_and_a_drawing(worker: Path) -> None:
    _, all_ = composed(worker)
    rows = dag_table(all_).records()
    place = {row["name"]: number for number, row in enumerate(rows)}
    for before, after in EDGES:
        if before != "STEP":
            assert place[f"rank0.{before}"] < place[f"rank0.{after}"]
    assert next(row["waits_for"] for row in rows if row["name"] == "rank1.STEP") == (
        "rank1.BW.a, rank1.Comm.wa, rank1.Comm.wb"
    )
    assert len(dag_table(all_, 3)) == 3
    text = "".join(as_dot(all_))
    assert text.count(" -> ") == 2 * (len(EDGES) - 1)
    assert text.count("subgraph") == 2


def test_graphs_that_are_none_are_refused(worker: Path, tmp_path: Path) -> None:
    file = worker / "0" / "dag.gml"
    wrong: dict[str, str] = {
        "graph [ node [ id 0": "is no GML",
        "graph [ directed 0 node [ id 0 label \"FW.a\" ] ]": "not directed",
        'graph [ directed 1 node [ id 0 label "conv" ] ]': "no node is called FW.",
    }  # fmt: skip
    for text, message in wrong.items():
        file.write_text(text)
        with pytest.raises(DataError, match=message):
            read_dag(file)
    gml(file, [("FW.a", "BW.a"), ("BW.a", "FW.a")])
    with pytest.raises(DataError, match=r"run in a circle: .*FW\.a"):
        composed(worker)[1].order()
    file.unlink()
    with pytest.raises(InputError, match=r"0/dag\.gml: no such file"):
        composed(worker)


def test_older_names_give_the_same_paths(tmp_path: Path) -> None:
    paths: list[Any] = [lengths(byteprofile(tmp_path / f"{old}", older=old), queues=True) for old in (False, True)]
    assert paths[0] == paths[1]
