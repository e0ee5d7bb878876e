"""Scripts as users write them, as jobs: what they hold, and that they simulate and export."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from script_ranks import PROGRAMS, calls_of

from echograph.errors import CaptureError
from echograph.frontend.scripts.capture import capture_script
from echograph.frontend.scripts.recorder import workspace_bytes
from echograph.frontend.scripts.run import Script, run_script
from echograph.frontend.scripts.torch_adapter import TorchAdapter
from echograph.frontend.scripts.world import World
from echograph.ir.graph import BETWEEN_STEPS, JobGraph
from echograph.ir.types import Collective, CollectiveKind, Compute, OpKind, Payload, Phase, TensorRole


def job_of(name: str, size: int, *arguments: str) -> JobGraph:
    script = Script(path=PROGRAMS / f"{name}.py", arguments=arguments)
    graph = capture_script(script, World(size=size), TorchAdapter()).graph
    assert isinstance(graph, JobGraph)
    return graph


@pytest.fixture(scope="module")
def ddp() -> JobGraph:
    return job_of("ddp", 16, "--width", "64", "--depth", "2")


def test_a_job_has_one_program_for_ranks_that_do_alike(ddp: JobGraph) -> None:
    assert [(axis.name, axis.size) for axis in ddp.mesh] == [("dp", 16)]
    assert [(program.role, dict(program.coordinates)) for program in ddp.programs] == [("every rank", {})]
    assert ddp.world_size == 16


def test_work_and_gradients_are_those_of_the_model(ddp: JobGraph) -> None:
    weights = [(64, 64), (64, 64), (64, 10)]
    forward = sum(2 * 16 * m * n for m, n in weights)
    backward = 2 * forward - 2 * 16 * 64 * 64  # the first layer's input has no gradient
    flops = {phase: int(ddp.ops.flops[ddp.ops.phase == phase].sum()) for phase in Phase}
    assert flops[Phase.FORWARD] == forward
    assert flops[Phase.BACKWARD] == backward
    elements = sum(m * n + n for m, n in weights)
    reduced = [op for op in map(ddp.ops.__getitem__, range(len(ddp.ops))) if isinstance(op, Collective)]
    assert {op.collective for op in reduced} == {CollectiveKind.ALL_REDUCE}
    assert sum(op.bytes_per_rank for op in reduced) == 4 * elements == 4 * ddp.workload.parameters
    assert {op.payload for op in reduced} == {Payload.GRADIENT}
    named = {
        ddp.tensors[i].name
        for i in range(len(ddp.tensors))
        if ddp.tensors[i].role is TensorRole.PARAMETER and ddp.tensors[i].alias_of is None
    }
    assert named == {
        f"{layer}.{what}" for layer in ("layers.0", "layers.1", "head") for what in ("weight", "bias")
    }


def test_the_optimizer_waits_for_the_reduced_gradients(ddp: JobGraph) -> None:
    """From any optimizer operation on parameters one comes back to all reductions, by inputs and deps."""
    ops = [ddp.ops[i] for i in range(len(ddp.ops))]
    before = [
        {int(ddp.maker[ddp.origin[t]]) for t in op.inputs if ddp.maker[ddp.origin[t]] >= 0} | set(op.deps)
        for op in ops
    ]
    last: dict[int, int] = {}
    for op in ops:  # work on one stream is in order
        if op.stream in last:
            before[op.id].add(last[op.stream])
        last[op.stream] = op.id
    seen, todo = set(), [max(op.id for op in ops if isinstance(op, Compute) and op.phase is Phase.OPTIMIZER)]
    while todo:
        here = todo.pop()
        if here not in seen:
            seen.add(here)
            todo += before[here]
    assert set(np.flatnonzero(ddp.ops.kind == OpKind.COLLECTIVE).tolist()) <= seen


def test_reductions_are_issued_while_backward_goes_on(ddp: JobGraph) -> None:
    backward = np.flatnonzero((ddp.ops.phase == Phase.BACKWARD) & (ddp.ops.flops > 0))
    reductions = np.flatnonzero(ddp.ops.kind == OpKind.COLLECTIVE)
    assert ddp.ops.asynchronous[reductions].all()
    assert set(ddp.ops.stream[reductions].tolist()).isdisjoint(ddp.ops.stream[backward].tolist())


def test_stages_of_a_pipeline_are_roles() -> None:
    job = job_of("pipeline", 3)
    assert [(axis.name, axis.size) for axis in job.mesh] == [("pp", 3)]
    assert [dict(program.coordinates) for program in job.programs] == [{"pp": stage} for stage in range(3)]
    sends = np.flatnonzero(job.ops.kind == OpKind.SEND)
    receives = np.flatnonzero(job.ops.kind == OpKind.RECV)
    assert len(sends) == len(receives) == 2 * 2 * 4  # both ways between stages, of four micro-batches
    assert job.ops.nbytes[sends].sum() == job.ops.nbytes[receives].sum()
    for program in job.programs:
        assert set(program.calls[:, 4].tolist()) == {0, 1, 2, 3}


def test_the_process_is_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    before = dict(os.environ), list(sys.path), list(sys.argv), Path.cwd(), torch.cuda.is_available(), torch.save
    run = run_script(
        Script(path=PROGRAMS / "tensor_parallel.py", arguments=("--sequence",)), World(size=2), TorchAdapter()
    )
    assert before == (
        dict(os.environ), list(sys.path), list(sys.argv), Path.cwd(), torch.cuda.is_available(), torch.save,
    )  # fmt: skip
    assert not torch.distributed.is_initialized()
    assert capsys.readouterr().out == "step 0: 1.0\n"
    # A layer gathers its input and scatters its output forward, and the other way round backward, but that
    # nothing asks for the gradient of the input of the model.
    kinds = [call[0] for call in calls_of(run)]
    assert kinds.count("all_gather") == 6
    assert kinds.count("reduce_scatter") == 5


@pytest.mark.parametrize(("chosen", "nbytes"), [(":4096:8", 2**25), (":4096:2:16:8", 2**23 + 2**17)])
def test_what_cublas_is_told_to_hold_is_held(chosen: str, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert workspace_bytes(chosen) == nbytes
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", chosen)
    (program,) = job_of("ddp", 4).programs
    assert program.held["cublas"] == 2 * nbytes


@pytest.mark.parametrize("chosen", ["4096:8", ":4096", ":4096:8:", ":a:b"])
def test_a_wrong_workspace_is_one_line(chosen: str) -> None:
    with pytest.raises(CaptureError, match="CUBLAS_WORKSPACE_CONFIG"):
        workspace_bytes(chosen)


def test_gradients_that_a_step_makes_anew_are_there_between_steps(ddp: JobGraph) -> None:
    """The script's `zero_grad` drops them; the allocator has whole blocks of 512 bytes."""
    (program,) = ddp.programs
    parameters = [t for t in ddp.tensors if t.role is TensorRole.PARAMETER and t.alias_of is None]
    assert parameters
    assert program.held[BETWEEN_STEPS] == sum(-(-t.nbytes // 512) * 512 for t in parameters)


def test_a_complex_number_has_a_conjugate_in_backward(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "import torch\nmodel = torch.nn.Linear(16, 8).cuda()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for step in range(3):\n"
        "    z = torch.view_as_complex(model(torch.randn(32, 16, device='cuda')).view(32, 4, 2))\n"
        "    (z * 1j * torch.view_as_complex(torch.randn(4, 2, device='cuda'))).real.sum().backward()\n"
        "    optimizer.step()\n    optimizer.zero_grad()\n"
    )
    graph = capture_script(Script(path=path), World(size=1), TorchAdapter()).graph
    assert isinstance(graph, JobGraph)
    ops = [op for op in map(graph.ops.__getitem__, range(len(graph.ops))) if isinstance(op, Compute)]
    assert sum(op.flops for op in ops) == 2 * 2 * 32 * 16 * 8  # forward, and the gradient of the weight
    assert not any(op.name == "aten._conj" and not op.inputs for op in ops)  # a number's conjugate is no work
