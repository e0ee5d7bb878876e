"""SimAI's rows: nothing of the stage's work is lost or counted twice, and communication keeps its order."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conformance_graphs import GRAPHS

from echograph.errors import PlanError, UsageError
from echograph.ir.exporters.simai import write_simai
from echograph.ir.formats import Exported
from echograph.ir.graph import Axis, JobGraph
from echograph.ir.types import COMMUNICATIONS, Collective, CollectiveKind, Compute, OpKind, Phase
from echograph.workflow.plan import Plan
from echograph.workflow.predict import lower
from echograph.workflow.system import System, annotate

pytest.importorskip("transformers", reason="needs the [torch] extra")
pytestmark = pytest.mark.torch

from small_models import small_step  # noqa: E402

WORDS = {
    "ALLREDUCE": "ALL_REDUCE",
    "ALLGATHER": "ALL_GATHER",
    "REDUCESCATTER": "REDUCE_SCATTER",
    "ALLTOALL": "ALL_TO_ALL",
}
DEVICE = "h100-sxm"
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "dp": ("llama", {"gpus": 8}),
    "tp": ("llama", {"gpus": 8, "tp": 2, "global_batch": 32}),
    "tp-pp": ("llama", {"gpus": 8, "tp": 2, "pp": 2, "global_batch": 32}),
    "tp-sp": ("gpt2", {"gpus": 8, "tp": 4, "sequence_parallel": True, "global_batch": 8}),
    "vpp": ("llama", {"gpus": 8, "pp": 2, "vpp": 2, "global_batch": 64}),
    "zero-1": ("llama", {"gpus": 8, "zero": 1}),
    "ep": ("mixtral", {"gpus": 8, "ep": 2, "global_batch": 32}),
    "recompute": ("llama", {"gpus": 8, "tp": 2, "recompute": "full", "global_batch": 16}),
}


QUICK = ("dp", "tp", "tp-pp")
plans = pytest.mark.parametrize(
    "plan", [pytest.param(plan, marks=() if plan in QUICK else pytest.mark.slow) for plan in PLANS]
)


@dataclass(frozen=True)
class Row:
    """A line of the text: of the forward, input-gradient and weight-gradient columns time, word and bytes."""

    name: str
    columns: tuple[tuple[int, str, int], ...]


@cache
def job(plan: str) -> JobGraph:
    model, options = PLANS[plan]
    return annotate(lower(small_step(model), Plan(**options)), System("dgx-h100"))


def written(graph: JobGraph, path: Path) -> tuple[dict[str, str], list[Row], Exported]:
    done = write_simai(graph, path, device=DEVICE)
    first, count, *lines = path.read_text().splitlines()
    policy, *fields = first.split()
    assert policy == "HYBRID_TRANSFORMER_FWD_IN_BCKWD"
    assert int(count) == len(lines)
    rows = []
    for line in lines:
        name, dependency, *cells, update = line.split()
        assert (dependency, len(cells), update) == ("-1", 9, "0")
        columns = [(int(cells[i]), cells[i + 1], int(cells[i + 2])) for i in (0, 3, 6)]
        assert all((word == "NONE") == (nbytes == 0) for _, word, nbytes in columns)
        rows.append(Row(name, tuple(columns)))
    return dict(zip(fields[::2], fields[1::2], strict=True)), rows, done


def stage_of(graph: JobGraph, done: Exported) -> Any:
    said = [note for note in done.notes if note.startswith("one stage for all")]
    return next((p for p in graph.programs if said and f"it is {p.role}," in said[0]), graph.programs[0])


def executed(graph: JobGraph, program: Any) -> list[tuple[int, int]]:
    return [(row, m) for _, begin, end, _, m in program.calls.tolist() for row in range(begin, end)]


@plans
def test_the_stages_time_is_in_the_rows(plan: str, tmp_path: Path) -> None:
    graph = job(plan)
    _, rows, done = written(graph, tmp_path / "w.txt")
    picoseconds = np.maximum(graph.ops.duration_on(DEVICE)[0], 0)
    ran = executed(graph, stage_of(graph, done))
    works = [row for row, _ in ran if graph.ops.kind[row] not in COMMUNICATIONS]
    forward = sum(int(picoseconds[row]) for row in works if graph.ops.phase[row] == Phase.FORWARD)
    total = sum(int(picoseconds[row]) for row in works)
    said = [sum(row.columns[column][0] for row in rows) * 1000 for column in range(3)]
    assert 0 <= forward - said[0] < 1000
    assert 0 <= total - sum(said) < 3000
    assert all(said[column] > 0 for column in range(3))


def group_words(graph: JobGraph, row: int) -> str:
    """The group of a collective in the words of the format, from the sizes of the mesh alone."""
    axes = {axis.name for axis in graph.mesh if axis.size > 1} & set(graph.groups[int(graph.ops.group[row])].axes)
    data = {axis.name for axis in graph.mesh if axis.size > 1} - {"tp", "pp"}
    for name, group in (("TP", {"tp"}), ("EP", {"ep"}), ("DP", data), ("DP_EP", data - {"ep"})):
        if axes == group:
            return name
    return "?"


def collectives(graph: JobGraph, ran: list[tuple[int, int]]) -> Counter[tuple[str, str, int]]:
    found: Counter[tuple[str, str, int]] = Counter()
    for row, _ in ran:
        op = graph.ops[row]
        if isinstance(op, Collective) and op.collective.name in WORDS.values():
            found[op.collective.name, group_words(graph, row), op.bytes_per_rank] += 1
    return found


@plans
def test_every_collective_that_the_format_has_is_in_the_rows(plan: str, tmp_path: Path) -> None:
    graph = job(plan)
    _, rows, done = written(graph, tmp_path / "w.txt")
    said: Counter[tuple[str, str, int]] = Counter()
    for row in rows:
        for column, (_, word, nbytes) in enumerate(row.columns):
            kind, _, suffix = word.partition("_")
            if kind != "NONE":
                said[WORDS[kind], suffix or ("DP" if column == 2 else "TP"), nbytes] += 1
    ran = collectives(graph, executed(graph, stage_of(graph, done)))
    lost = ran - said
    assert said - ran == Counter()
    noted = sum(int(note.split()[2]) for note in done.notes if "collectives of" in note)
    assert noted == lost.total()
    assert plan not in ("tp", "tp-sp", "ep") or sum(n for (_, group, _), n in said.items() if group != "DP") > 0


@pytest.mark.parametrize("plan", ["tp", pytest.param("tp-sp", marks=pytest.mark.slow)])
def test_communication_is_in_the_order_in_which_simai_runs_it(plan: str, tmp_path: Path) -> None:
    graph = job(plan)
    fields, rows, _ = written(graph, tmp_path / "w.txt")
    ran = [(graph.ops[row], m) for row, m in executed(graph, graph.programs[0])]
    tensor = [(op, m) for op, m in ran if isinstance(op, Collective) and graph.groups[op.group].axes == ("tp",)]

    def of(phase: Phase, micro_batch: int) -> list[tuple[str, int]]:
        return [
            (op.collective.name, op.bytes_per_rank) for op, m in tensor if (op.phase, m) == (phase, micro_batch)
        ]

    def said(column: int, lines: list[Row]) -> list[tuple[str, int]]:
        return [
            (WORDS[r.columns[column][1]], r.columns[column][2]) for r in lines if r.columns[column][1] != "NONE"
        ]

    batches = range(int(fields["ga:"]))
    assert said(0, rows) == [one for m in batches for one in of(Phase.FORWARD, m)]
    assert said(1, rows[::-1]) == [one for m in reversed(batches) for one in of(Phase.BACKWARD, m)]


MESHES = {
    "dp": (1, 1, 1, 1, 1), "tp-pp": (2, 1, 2, 1, 8), "vpp": (1, 1, 2, 2, 8), "ep": (1, 2, 1, 1, 2),
    "tp": (2, 1, 1, 1, 4), "tp-sp": (4, 1, 1, 1, 2), "zero-1": (1, 1, 1, 1, 1), "recompute": (2, 1, 1, 1, 2),
}  # fmt: skip


@plans
def test_the_header_says_the_mesh(plan: str, tmp_path: Path) -> None:
    tp, ep, pp, vpp, ga = MESHES[plan]
    fields, _, _ = written(job(plan), tmp_path / "w.txt")
    sent = {int(n) for n, k in zip(job(plan).ops.nbytes, job(plan).ops.kind, strict=True) if k == OpKind.SEND}
    assert fields == {
        "model_parallel_NPU_group:": str(tp), "ep:": str(ep), "pp:": str(pp), "vpp:": str(vpp), "ga:": str(ga),
        "all_gpus:": "8", "checkpoints:": "0", "checkpoint_initiates:": "0",
        "pp_comm:": str(max(sent, default=0)),
    }  # fmt: skip


def test_what_the_format_cannot_hold_is_said(tmp_path: Path) -> None:
    _, _, done = written(job("tp-pp"), tmp_path / "w.txt")
    said = "\n".join(done.notes)
    for what in ("one stage for all", "sends and receives", "the host's time", "streams became", "schedule"):
        assert what in said
    graph = job("dp")
    ops = graph.ops
    variant = np.where(ops.kind == OpKind.COLLECTIVE, CollectiveKind.BROADCAST, ops.variant).astype(np.uint8)
    _, _, done = written(replace(graph, ops=replace(ops, variant=variant)), tmp_path / "w.txt")
    assert any(note.startswith("left out: ") and "broadcast collectives" in note for note in done.notes)


def test_what_cannot_be_right_is_refused(tmp_path: Path) -> None:
    graph = job("tp-pp")
    large = np.where(graph.ops.kind == OpKind.SEND, 2**31, graph.ops.nbytes)
    with pytest.raises(PlanError, match="pp_comm holds at most 2,147,483,647: take a smaller --micro-batch"):
        write_simai(replace(graph, ops=replace(graph.ops, nbytes=large)), tmp_path / "w.txt", device=DEVICE)
    with pytest.raises(UsageError, match="lists its ranks"):
        write_simai(GRAPHS["ranks"](), tmp_path / "w.txt", device=DEVICE)  # type: ignore[arg-type]
    alone = replace(job("dp"), mesh=(Axis(name="pp", size=2), *job("dp").mesh))
    with pytest.raises(PlanError, match="stages that send each other nothing"):
        write_simai(alone, tmp_path / "w.txt", device=DEVICE)
    assert not (tmp_path / "w.txt").exists()


def test_weight_gradients_are_told_from_input_gradients(tmp_path: Path) -> None:
    graph = job("dp")
    makes = [
        op for op in graph.ops if isinstance(op, Compute) and op.phase == Phase.BACKWARD and op.name == "aten.mm"
    ]
    assert makes
    _, rows, _ = written(graph, tmp_path / "w.txt")
    layers = [row for row in rows if row.name.startswith("model.layers.")]
    assert len({row.name for row in layers}) == 4
    assert sum(row.columns[2][0] for row in layers) > 0
