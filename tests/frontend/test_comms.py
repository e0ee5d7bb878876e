"""Traces of collectives become jobs, whose simulation gives the traced times again and those of other networks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echograph.errors import FormatError, InputError, PlanError
from echograph.frontend.comms import load
from echograph.ir import serde
from echograph.ir.comms.record import FORMAT, CallSignature, GroupLine, HeaderLine, RecordLine, encode
from echograph.ir.formats import Imported
from echograph.ir.graph import JobGraph
from echograph.ir.passes.annotate import ForgetCommunication
from echograph.ir.passes.mesh import ResizeWorld
from echograph.ir.types import COMMUNICATIONS, Collective, CollectiveKind, Recv, Send
from echograph.simulator.clusters import load_cluster
from echograph.simulator.collectives import collective_time
from echograph.simulator.host import IssueTimes
from echograph.simulator.limits import Scale
from echograph.simulator.result import Result
from echograph.simulator.simulate import simulate
from echograph.units import PS_PER_NS, to_ps
from echograph.workflow.plan import Plan
from echograph.workflow.predict import predict

BEGAN = 1_700_000_000_000_000_000
MIB = 1 << 20
FREE = IssueTimes(op_ps=0, launch_ps=0)
UNKNOWN = -1
Row = tuple[int, int, int, int, int, int]


def reduction(number: int = 0, **changes: Any) -> CallSignature:
    fields = {"op": "all_reduce", "group": "0,1", "channel": "0,1", "bytes": MIB, "dtype": "float32", **changes}
    return CallSignature(id=number, input_bytes=MIB, output_bytes=MIB, **fields)


def write(
    folder: Path, ranks: list[tuple[list[CallSignature], list[Row]]], *, world: int = 0, hosts: int = 1
) -> Path:
    """Traces of ranks: descriptions, and rows whose time of the call is from the job's beginning on."""
    folder.mkdir(parents=True)
    for rank, (signatures, rows) in enumerate(ranks):
        header = HeaderLine(
            format=FORMAT, version=(1, 0), rank=rank, world=world or len(ranks), host=f"host {rank % hosts}"
        )
        names = {what.group for what in signatures}
        groups = [GroupLine(name=name, ranks=tuple(map(int, name.split(",")))) for name in sorted(names)]
        said: list[RecordLine] = [header, *groups, *signatures]
        lines = [encode(line) for line in said]
        lines += [json.dumps([w, s, BEGAN + queued, *rest]).encode() + b"\n" for w, s, queued, *rest in rows]
        (folder / f"trace.{rank}.jsonl").write_bytes(b"".join(lines))
    return folder


def job_of(folder: Path) -> JobGraph:
    imported = load(folder)
    assert isinstance(imported, Imported) and isinstance(imported.graph, JobGraph)
    return imported.graph


def replay(job: JobGraph, *scales: Scale) -> Result:
    return simulate(job, load_cluster(), FREE, memory=False, scales=scales)


def faster(factor: float) -> Scale:
    return Scale(selector="comm", factor=factor)


# -- closed forms --------------------------------------------------------------------------------------------


def test_waiting_for_a_late_rank_is_no_transfer(tmp_path: Path) -> None:
    what = [reduction()]
    early: list[Row] = [(0, 0, 0, 0, 900, 0), (0, 1, 1000, 0, 300, 0)]
    late: list[Row] = [(0, 0, 600, 0, 300, 0), (0, 1, 1200, 0, 100, 0)]
    job = job_of(write(tmp_path / "t", [(what, early), (what, late)]))
    assert [p.ranks for p in job.programs] == [(0,), (1,)]
    assert replay(job).step_ps == 1300 * PS_PER_NS
    # Of the 900 ns that rank 0 is in the first call, it waits 600: they do not shrink with the network.
    assert replay(job, faster(0)).step_ps == (600 + 300) * PS_PER_NS
    assert replay(job, faster(0.5)).step_ps == (600 + 150 + 300 + 50) * PS_PER_NS


def test_bytes_kinds_and_types_are_kept(tmp_path: Path) -> None:
    ops = {
        "all_gather_into_tensor": CollectiveKind.ALL_GATHER,
        "reduce_scatter_tensor_coalesced": CollectiveKind.REDUCE_SCATTER,
        "reduce": CollectiveKind.REDUCE,
        "monitored_barrier": CollectiveKind.BARRIER,
    }
    signatures = [reduction(n, op=op, bytes=n, phase="backward", module="m") for n, op in enumerate(ops)]
    rows: list[Row] = [(n, n, 100 * n, 0, 50, 0) for n in range(len(ops))]
    job = job_of(write(tmp_path / "t", [(signatures, rows)] * 2))
    made = [op for op in job.ops if isinstance(op, Collective)]
    assert [op.collective for op in made] == [*ops.values()] * 2
    assert [op.bytes_per_rank for op in made] == [*range(len(ops))] * 2
    assert {op.module for op in made} == {"m"}
    serde.save(job, tmp_path / "job.pb")
    assert replay(serde.load(tmp_path / "job.pb")).step_ps == replay(job).step_ps  # type: ignore[arg-type]


def test_what_only_cxx_waits_for_is_waited_for_behind_the_last_of_it(tmp_path: Path) -> None:
    """Two steps of two buckets, as DDP makes them: 400 ns until the last gradient, then optimizer and forward."""
    signatures = [reduction(n, asynchronous=True, bytes=n) for n in (0, 1)]
    step = [(0, 300, 500), (1, 400, 700)]  # bucket, made, ended from the step's beginning on; the step takes 800
    rows: list[Row] = [
        (b, 2 * turn + b, 800 * turn + made, 0, end - made, UNKNOWN) for turn in (0, 1) for b, made, end in step
    ]
    imported = load(write(tmp_path / "t", [(signatures, rows)] * 2))
    job = imported.graph
    assert isinstance(job, JobGraph)
    assert any(note.startswith("8 calls that only C++ waits for") for note in imported.notes)
    assert replay(job).step_ps == (800 + 700 - 300) * PS_PER_NS
    # Without communication: 100 to the second bucket, 100 behind the reduction, 300 and 100 of the next step.
    assert replay(job, faster(0)).step_ps == (100 + 100 + 300 + 100) * PS_PER_NS


def test_messages_meet_their_receives(tmp_path: Path) -> None:
    send = reduction(op="send", channel="0,1:0>1/7", peer=1)
    recv = reduction(op="recv", channel="0,1:0>1/7", peer=0)
    signatures = [send], [recv]
    rows: tuple[list[Row], list[Row]] = (
        [(0, 0, 0, 0, UNKNOWN, UNKNOWN), (0, 1, 100, 0, 200, 0)],
        [(0, 0, 0, 0, 50, 0), (0, 1, 150, 0, 150, 0)],
    )
    job = job_of(write(tmp_path / "t", list(zip(signatures, rows, strict=True))))
    ends = [op for op in job.ops if isinstance(op, Send | Recv)]
    assert [(type(op), op.peer, op.tag) for op in ends] == [(Send, 1, 7)] * 2 + [(Recv, -1, 7)] * 2
    assert replay(job).step_ps == 300 * PS_PER_NS


def test_clocks_of_several_hosts_are_not_compared(tmp_path: Path) -> None:
    what = [reduction()]
    early: list[Row] = [(0, 0, 0, 0, 900, 0), (0, 1, 1000, 0, 300, 0)]
    ahead = 5_000_000
    late: list[Row] = [(0, 0, ahead + 600, 0, 300, 0), (0, 1, ahead + 1200, 0, 100, 0)]
    job = job_of(write(tmp_path / "t", [(what, early), (what, late)], hosts=2))
    # Nobody knows that rank 1 was 600 late to the first call; of the rest nothing is lost.
    assert replay(job).step_ps == (1300 - 600) * PS_PER_NS


def test_what_not_all_ranks_recorded_is_left_out(tmp_path: Path) -> None:
    what = [reduction()]
    whole: list[Row] = [(0, 0, 0, 0, 100, 0), (0, 1, 200, 0, 100, 0)]
    imported = load(write(tmp_path / "t", [(what, whole), (what, whole[:1])]))
    assert any(note.startswith("1 calls that not all of their ranks recorded") for note in imported.notes)
    assert sum(isinstance(op, Collective) for op in imported.graph.ops) == 2


# -- any job -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Script:
    """What each rank does: works, calls a collective, works, waits for one; and how long collectives take."""

    work: list[list[int]]
    waits: list[int]
    took: list[int]

    def play(self, folder: Path | None, factor: float = 1) -> int:
        """Nanoseconds from the first call to the end; and the trace, if a folder is given."""
        ranks, calls = len(self.work), len(self.took)
        now, free, first = [0] * ranks, 0, 0
        rows: list[list[list[int]]] = [[] for _ in range(ranks)]
        ends: list[int] = []
        for n in range(calls):
            for rank in range(ranks):
                now[rank] += self.work[rank][2 * n]
                rows[rank].append([0, n, now[rank], 0, 0, UNKNOWN])
            first = min(now) if n == 0 else first
            free = max(free, *now) + int(self.took[n] * factor)
            ends.append(free)
            for rank in range(ranks):
                rows[rank][n][4] = free - rows[rank][n][2]
                now[rank] += self.work[rank][2 * n + 1] if self.waits[n] else 0
                # A wait lets one call more or fewer be under way; the last one waits for all.
                for m in range(n + 1 if n == calls - 1 else n + 1 - self.waits[n]):
                    if rows[rank][m][5] == UNKNOWN:
                        rows[rank][m][5] = now[rank] - rows[rank][m][2]
                        now[rank] = max(now[rank], ends[m])
        if folder is not None:
            write(folder, [([reduction(asynchronous=True)], [tuple(row) for row in of]) for of in rows])  # type: ignore[misc]
        return max(*now, free) - first


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    calls = draw(st.integers(1, 6))
    times = st.integers(0, 50).map(lambda n: 2 * n)
    return Script(
        work=[draw(st.lists(times, min_size=2 * calls, max_size=2 * calls)) for _ in range(2)],
        waits=draw(st.lists(st.integers(0, 2), min_size=calls, max_size=calls)),
        took=draw(st.lists(times, min_size=calls, max_size=calls)),
    )


@settings(max_examples=40, deadline=None)
@given(script=scripts())
def test_any_job_is_replayed_and_follows_the_network(
    script: Script, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("script") / "t"
    span = script.play(folder)
    job = job_of(folder)
    assert replay(job).step_ps == span * PS_PER_NS
    for factor in (0, 0.5):
        assert replay(job, faster(factor)).step_ps == script.play(None, factor) * PS_PER_NS


# -- other networks and sizes ----------------------------------------------------------------------------------


def data_parallel(tmp_path: Path) -> JobGraph:
    what = [reduction()]
    rows: list[list[Row]] = [[(0, n, 1_000_000 * n + late, 0, 400_000, 0) for n in (0, 1)] for late in (0, 1000)]
    return job_of(write(tmp_path / "t", [(what, rows[0]), (what, rows[1])]))


@pytest.mark.parametrize("gpus", [1, 2, 8, 64, 65])
def test_other_sizes_take_the_clusters_time(tmp_path: Path, gpus: int) -> None:
    cluster = load_cluster()
    job = ResizeWorld(gpus=gpus)(ForgetCommunication()(data_parallel(tmp_path)))
    assert job.world_size == gpus
    one = collective_time("all_reduce", MIB, cluster.place(range(gpus)), cluster).seconds
    # Rank 1, where there is one, begins 1 us late; then 600 us of work lie between the two calls of each.
    late = 1_000 if gpus > 1 else 0
    work = 599_000 if gpus > 1 else 600_000
    step = replay(job).step_ps
    assert step == pytest.approx((late + 600_000) * PS_PER_NS + 2 * to_ps(one), abs=1_000 * PS_PER_NS)
    assert step >= (late + work) * PS_PER_NS + 2 * to_ps(one)


def test_the_plan_resizes(tmp_path: Path) -> None:
    result, job = predict(data_parallel(tmp_path), Plan(gpus=16))
    assert result.gpus == job.world_size == 16
    assert (job.ops.kind == COMMUNICATIONS[0]).sum() == 4


def test_jobs_of_several_groups_are_not_resized(tmp_path: Path) -> None:
    send = reduction(op="send", channel="0,1:0>1/0")
    recv = reduction(op="recv", channel="0,1:0>1/0")
    row: list[Row] = [(0, 0, 0, 0, 100, 0)]
    with pytest.raises(PlanError, match=r"2 ranks cannot run on 4: it sends"):
        ResizeWorld(gpus=4)(job_of(write(tmp_path / "p", [([send], row), ([recv], row)])))
    alone = [reduction(group=str(rank), channel=str(rank)) for rank in (0, 1)]
    with pytest.raises(PlanError, match="group '0' is of some ranks"):
        ResizeWorld(gpus=4)(job_of(write(tmp_path / "g", [([what], row) for what in alone])))
    shuffle = reduction(op="all_to_all_single")
    with pytest.raises(PlanError, match="all_to_all moves depends on the number of ranks"):
        ResizeWorld(gpus=4)(job_of(write(tmp_path / "a", [([shuffle], row)] * 2)))


# -- refusals --------------------------------------------------------------------------------------------------


def test_refusals_say_what_to_do(tmp_path: Path) -> None:
    what, row = [reduction()], [(0, 0, 0, 0, 100, 0)]
    one: list[tuple[list[CallSignature], list[Row]]] = [(what, row)]
    with pytest.raises(InputError, match="of 4 ranks those of 1, 2, 3 are missing"):
        load(write(tmp_path / "few", one, world=4))
    both = write(tmp_path / "both", one * 2)
    (both / "other.0.jsonl").write_bytes((both / "trace.0.jsonl").read_bytes())
    with pytest.raises(InputError, match=r"of rank 0, as is other\.0\.jsonl: name one trace"):
        load(both)
    assert load(both / "trace").graph.world_size == 2
    with pytest.raises(InputError, match="no trace of collectives here"):
        load(tmp_path / "nowhere")
    cuda: Any = [([reduction(device="cuda")], row)] * 2
    with pytest.raises(FormatError, match="all_reduce on cuda"):
        load(write(tmp_path / "cuda", cuda))
    unknown: Any = [([reduction(op="all_dance")], row)] * 2
    with pytest.raises(FormatError, match="all_dance is no collective"):
        load(write(tmp_path / "unknown", unknown))


@pytest.mark.parametrize("late", [4, 5], ids=["end", "wait"])
def test_a_trace_longer_than_the_clock_is_refused_whatever_ended_last(tmp_path: Path, late: int) -> None:
    far = [0, 0, 0, 0, 100, 0]
    far[late] = 2**54
    ranks: Any = [([reduction()], [tuple(far)]), ([reduction()], [(0, 0, 0, 0, 100, 0)])]
    with pytest.raises(FormatError, match="from first call to last over 106 days"):
        load(write(tmp_path / "far", ranks))


# -- a real job ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_real_job_is_replayed_within_a_tenth(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    worker = Path(__file__).with_name("comms_worker.py")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    command = [sys.executable, str(worker), str(tmp_path)]
    ranks = [subprocess.Popen(command, env={**env, "RANK": str(rank)}) for rank in range(2)]
    try:
        assert [rank.wait(120) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
    measured = max(json.loads((tmp_path / f"answer.{rank}").read_text()) for rank in range(2))
    job = job_of(tmp_path / "traces")
    result, _ = predict(job)
    assert result.step_ps / 1e12 == pytest.approx(measured, rel=0.1)
    communication = sum(op.bytes_per_rank for op in job.ops if isinstance(op, Collective)) / 2
    # Six steps of the gradients and the loss.
    assert communication == 6 * 4 * (8 * (768 * 768 + 768) + 1)
    assert replay(job, faster(0)).step_ps < result.step_ps
