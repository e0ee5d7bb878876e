"""DeepSpeed's pipeline engine: captured without ranks, and written down on two and four real ones over gloo."""

from __future__ import annotations

import json
from functools import cache
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import pytest
from deepspeed_both import BF16, FP32, HERE, Call, captured_calls, configure, echo, real_calls, told_of

from echograph.ir import serde
from echograph.ir.graph import JobGraph
from echograph.ir.types import Collective, Recv, Send

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the [deepspeed] extra"),
]

SCRIPT = HERE / "deepspeed_pipeline.py"
HELD_IN_FP32 = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}
CASES: dict[int, dict[str, tuple[dict[str, Any], dict[str, Any], int, tuple[str, ...]]]] = {
    2: {
        "pp2-fp32": ({"stage": 0}, FP32, 4, ()),
        "pp2-zero1-tied": ({"stage": 1}, BF16, 4, ("--tied",)),
        "pp2-recomputed-dynamic": ({"stage": 0}, BF16, 3, ("--checkpoint", "1", "--dynamic")),
        "pp2-pairs": ({"stage": 1}, FP32, 2, ("--pair",)),
    },
    4: {
        "pp2-dp2-zero0": ({"stage": 0}, FP32, 4, ("--tied",)),
        "pp2-dp2-zero1": ({"stage": 1, "reduce_bucket_size": 20000}, BF16, 4, ("--tied",)),
        "pp2-dp2-zero1-fp32-gradients": ({"stage": 1}, HELD_IN_FP32, 4, ()),
        "pp4-tied": ({"stage": 0}, BF16, 6, ("--tied", "--stages", "4", "--blocks", "6")),
    },
}
"""ranks -> name -> zero_optimization, precision, micro-batches, arguments of the script."""
NAMES = [(size, name) for size, cases in CASES.items() for name in cases]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, warm: Path) -> Any:
    """Ranks -> a folder with what that many real ranks told of all cases, and with what was captured of them."""
    return cache(lambda size: both_of(size, tuple(CASES[size]), tmp_path_factory.mktemp(f"pipeline{size}"), warm))


def both_of(size: int, names: tuple[str, ...], folder: Path, programs: Path) -> Path:
    cases = {}
    for name in names:
        zero, precision, micro_batches, arguments = CASES[size][name]
        config = configure(folder / f"{name}.json", zero, precision, micro_batches)
        cases[name] = [str(SCRIPT), "--deepspeed_config", str(config), *arguments]
    return told_of(cases, folder, programs, size)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "name"), NAMES)
def test_a_step_communicates_what_it_does_on_real_ranks(size: int, name: str, both: Any) -> None:
    for rank in range(size):
        calls = real_calls(both(size), name, rank)
        assert calls
        assert captured_calls(both(size), name, rank) == calls, rank


@pytest.mark.slow
@pytest.mark.parametrize(("size", "name"), NAMES)
def test_a_job_says_the_same(size: int, name: str, both: Any) -> None:
    """One role a stage, which stands for all that are of it."""
    folder = both(size)
    job = serde.load(folder / f"{name}.pb")
    stages = 4 if name.startswith("pp4") else 2
    assert [(axis.name, axis.size) for axis in job.mesh if axis.size > 1] == [
        (axis, extent) for axis, extent in (("pp", stages), ("dp", size // stages)) if extent > 1
    ]
    assert [dict(program.coordinates) for program in job.programs] == [{"pp": stage} for stage in range(stages)]
    for stage in range(stages):
        rank = stage * size // stages
        assert calls_of_job(job, stage, rank) == [
            call for made in real_calls(folder, name, rank) for call in as_job_says(made, size)
        ]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "name"), NAMES)
def test_micro_batches_follow_each_other(size: int, name: str, both: Any) -> None:
    """1F1B: each forward and backward pass once, and no more of them begun than there are stages to come."""
    job = serde.load(both(size) / f"{name}.pb")
    micro_batches = CASES[size][name][2]
    for stage, program in enumerate(job.programs):
        passes = []
        for _, begin, end, _, micro_batch in program.calls.tolist():
            phases = dict.fromkeys(job.ops[i].phase.name.lower() for i in range(begin, end))
            passes += [(phase, micro_batch) for phase in phases if phase in ("forward", "backward")]
        order = list(dict.fromkeys(passes))
        assert sorted(order) == sorted((p, m) for p in ("forward", "backward") for m in range(micro_batches))
        flying = [sum(1 if phase == "forward" else -1 for phase, _ in order[: i + 1]) for i in range(len(order))]
        assert min(flying) >= 0
        assert max(flying) == min(len(job.programs) - stage, micro_batches)


def as_job_says(call: Call, size: int) -> list[list[Any]]:
    """A call without what a job leaves out (types of messages); two ranks of more exchange what they add up."""
    operation, ranks, nbytes, dtype, peer, phase = call
    if peer >= 0:
        return [[operation, nbytes, peer, phase]]
    if size > 2 and len(ranks) == 2 and ranks[1] - ranks[0] == size - 1:
        return [["send", nbytes, ranks[1], phase], ["recv", nbytes, ranks[1], phase]]
    short = {"bfloat16": "bf16", "float32": "fp32", "uint8": "uint8"}[dtype]
    return [[operation, ranks, nbytes, short, phase]]


def calls_of_job(job: JobGraph, role: int, rank: int) -> list[list[Any]]:
    """What a role communicates, as a rank that it stands for does."""
    found: list[list[Any]] = []
    for _, begin, end, _, _ in job.programs[role].calls.tolist():
        for op in (job.ops[i] for i in range(begin, end)):
            if isinstance(op, Collective):
                operation = op.name.rpartition(".")[2]
                ranks = members(job, op.group, rank)
                found.append([operation, ranks, op.bytes_per_rank, op.dtype.text, op.phase.name.lower()])
            elif isinstance(op, Send | Recv):
                ranks = members(job, op.group, rank)
                peer = ranks[ranks.index(rank) + op.peer]
                kind = "send" if isinstance(op, Send) else "recv"
                other = max(ranks) if "all_reduce" in op.name else peer
                found.append([kind, op.nbytes, other, op.phase.name.lower()])
    return found


def members(job: JobGraph, group: int, rank: int) -> list[int]:
    """The ranks of a group, by the mesh."""
    sizes = [axis.size for axis in job.mesh]
    strides = [prod(sizes[i + 1 :]) for i in range(len(sizes))]
    ranks = [rank]
    for axis, stride in zip(job.mesh, strides, strict=True):
        if axis.name in job.groups[group].axes:
            first = [r - r // stride % axis.size * stride for r in ranks]
            ranks = sorted({r + i * stride for r in first for i in range(axis.size)})
    return ranks


def test_a_pipeline_passes_on_what_shapes_say(tmp_path: Path, warm: Path) -> None:
    """Two stages of two ranks: vectors of every micro-batch one way, their gradients the other."""
    config = configure(tmp_path / "ds.json", {"stage": 1}, BF16, 3)
    job = tmp_path / "job.pb"
    echo(warm / "echoc", "capture", "deepspeed", "--script", str(SCRIPT), "--world-size", "4", "-o", str(job),
         "--", "--tied", "--deepspeed_config", str(config))  # fmt: skip
    graph = serde.load(job)
    assert isinstance(graph, JobGraph)
    assert [dict(program.coordinates) for program in graph.programs] == [{"pp": 0}, {"pp": 1}]
    vector, table = 2 * 16 * 64 * 2, 512 * 64 * 2
    for stage, peer, forward, backward in ((0, 2, "send", "recv"), (1, 0, "recv", "send")):
        calls = calls_of_job(graph, stage, 2 * stage)
        assert [c for c in calls if c[-1] == "forward"] == [[forward, vector, peer, "forward"]] * 3
        assert [c for c in calls if c[-1] == "backward"] == [[backward, vector, peer, "backward"]] * 3
        assert ["all_reduce", [0, 2], table, "bf16", "optimizer"] in calls


@pytest.mark.slow
def test_a_pipeline_of_1024_ranks(tmp_path: Path, warm: Path) -> None:
    """8 stages of 128 ranks each: what it communicates follows from shapes, and other commands take it."""
    config = configure(tmp_path / "ds.json", {"stage": 1, "reduce_bucket_size": 10**9}, BF16, 16)
    given = ("--stages", "8", "--blocks", "14", "--hidden", "256", "--deepspeed_config", str(config))
    job = str(tmp_path / "job.pb")
    echo(
        warm / "echoc",
        "capture",
        "deepspeed",
        "--script",
        str(SCRIPT),
        "--world-size",
        "1024",
        "-o",
        job,
        "--",
        *given,
    )
    graph = serde.load(tmp_path / "job.pb")
    assert [dict(program.coordinates) for program in graph.programs] == [{"pp": stage} for stage in range(8)]
    vector = 2 * 16 * 256 * 2
    for stage in range(8):
        calls = calls_of_job(graph, stage, 128 * stage)
        sides = (stage > 0) + (stage < 7)
        messages = [call for call in calls if call[0] in ("send", "recv")]
        assert [call[1] for call in messages] == [vector] * 2 * 16 * sides
        # The seven stages between have two blocks; 256 ranks' share is aligned to four bytes.
        if 0 < stage < 7:
            block = 2 * 256 + 2 * 4 * 256 * 256 + 5 * 256
            gradients = [call for call in calls if call[0] == "all_reduce" and call[3] == "bf16"]
            assert sum(call[2] for call in gradients) == 2 * 2 * block
    echo(warm / "echoc", "check", job)
    told = json.loads(echo(warm / "echosim", "run", job, "--cluster", "dgx-h100", "--json"))
    assert told["gpus"] == 1024
    assert told["breakdown_s"]["bubble"] > 0
    echo(warm / "echoc", "export", job, "--to", "chakra", "--per-role", "-o", str(tmp_path / "traces"))
    assert len(list((tmp_path / "traces").iterdir())) >= 8


@pytest.mark.slow
def test_a_stage_alone_does_not_know_its_shapes(tmp_path: Path, warm: Path) -> None:
    config = configure(tmp_path / "ds.json", {"stage": 0}, FP32, 2)
    with pytest.raises(AssertionError, match="stage 1 of the pipeline needs the shapes that stage 0 gives"):
        echo(
            warm / "echoc", "capture", "deepspeed", "--script", str(SCRIPT), "--world-size", "2", "--ranks", "1",
            "-o", str(tmp_path / "job.pb"), "--", "--deepspeed_config", str(config),
        )  # fmt: skip
