"""The same model and plan captured from a script of PyTorch's wrappers and compiled: what both say of the job."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from echograph.frontend.pytorch.spec import StepSpec
from echograph.frontend.scripts.capture import capture_script
from echograph.frontend.scripts.run import Script
from echograph.frontend.scripts.torch_adapter import TorchAdapter
from echograph.frontend.scripts.world import World
from echograph.ir.graph import JobGraph, StepGraph
from echograph.ir.passes.model import MICRO_BATCH_AXES
from echograph.ir.types import Phase, TensorRole
from echograph.models import get_model
from echograph.simulator.clusters import load_cluster
from echograph.simulator.memory import memory
from echograph.workflow.compile import compile_entry
from echograph.workflow.plan import Plan
from echograph.workflow.predict import lower

pytestmark = [pytest.mark.torch, pytest.mark.slow]

RANKS, LENGTH, BATCH = 16, 128, 2
SIZES = {
    "n_layer": 4, "n_embd": 256, "n_head": 4, "vocab_size": 8192, "n_positions": LENGTH, "use_cache": False,
    "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
SCRIPT = f"""
import os, torch, torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel
dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = GPT2LMHeadModel(GPT2Config(**{SIZES!r})).cuda()
blocks = list(model.transformer.h)
WRAP
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for _ in range(3):
    tokens = torch.randint({SIZES["vocab_size"]}, ({BATCH}, {LENGTH}), device="cuda")
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
DDP = "model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[0], gradient_as_bucket_view=True)"
FSDP1 = """
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({type(blocks[0])}), device_id=0, use_orig_params=True)
"""
HSDP = """
from torch.distributed.fsdp import fully_shard
mesh = dist.device_mesh.init_device_mesh("cuda", (2, 8), mesh_dim_names=("copies", "parts"))
for module in (*blocks, model):
    fully_shard(module, mesh=mesh)
"""
CASES = {
    "DDP": (DDP, Plan(gpus=RANKS)),
    "FSDP": (FSDP1, Plan(gpus=RANKS, zero=3)),
    "HSDP": (HSDP, Plan(gpus=RANKS, zero=3, hsdp_replicas=2)),
}
LASTING = (TensorRole.PARAMETER, TensorRole.OPTIMIZER_STATE)


@pytest.fixture(scope="module")
def step() -> StepGraph:
    entry = get_model("gpt2").with_config(**SIZES)
    return compile_entry(entry, StepSpec(dtype="fp32", master_weights=False), batch_size=BATCH, seq_len=LENGTH)


@pytest.fixture(scope="module", params=CASES)
def both(
    request: pytest.FixtureRequest, step: StepGraph, tmp_path_factory: pytest.TempPathFactory
) -> tuple[JobGraph, JobGraph]:
    wrap, plan = CASES[request.param]
    script: Path = tmp_path_factory.mktemp("scripts") / "train.py"
    script.write_text(SCRIPT.replace("WRAP", wrap))
    captured = capture_script(Script(path=script), World(size=RANKS), TorchAdapter()).graph
    assert isinstance(captured, JobGraph)
    return captured, lower(step, plan, load_cluster(plan.cluster))


def lasting(job: JobGraph) -> dict[tuple[TensorRole, tuple[int, ...]], int]:
    """Elements of what lives through steps, single numbers left out, by role and sizes of the axes over which."""
    found: dict[tuple[TensorRole, tuple[int, ...]], int] = defaultdict(int)
    copies = {row: len(block.instances) for block in job.blocks for row in block.tensors}
    for row, tensor in enumerate(job.tensors[i] for i in range(len(job.tensors))):
        if tensor.role in LASTING and tensor.alias_of is None and not tensor.port and tensor.shape:
            over = tuple(axis.size for axis in job.mesh if axis.name in tensor.sharded)
            found[tensor.role, over] += copies[row] * int(job.tensors.numel[row])
    return found


def model_flops(job: JobGraph) -> int:
    calls = job.programs[0].calls.tolist()
    counted = [
        job.ops.flops[b:e][(job.ops.phase[b:e] == Phase.FORWARD) | (job.ops.phase[b:e] == Phase.BACKWARD)].sum()
        for _, b, e, _, _ in calls
    ]
    return int(sum(counted))


def test_what_is_trained_is_the_same(both: tuple[JobGraph, JobGraph]) -> None:
    captured, compiled = (job.workload for job in both)
    for name in (
        "parameters", "batch_size", "sequence_length", "dtype", "optimizer", "master_weights", "model_flops",
        "causal_attention_flops",
    ):  # fmt: skip
        assert getattr(captured, name) == getattr(compiled, name), name
    assert captured.model_flops > 0
    assert model_flops(both[0]) == model_flops(both[1])


def test_ranks_have_micro_batches_of_their_own_in_both(both: tuple[JobGraph, JobGraph]) -> None:
    captured, compiled = (list(job.mesh) for job in both)
    assert [axis.size for axis in captured] == [axis.size for axis in compiled]
    assert {axis.name for axis in captured} <= set(MICRO_BATCH_AXES)
    if len(captured) > 1:
        assert captured == compiled


def test_the_same_is_divided_over_the_same_axes(both: tuple[JobGraph, JobGraph]) -> None:
    """But for what padding adds: a share of a unit is a whole number of elements of each rank."""
    captured, compiled = map(lasting, both)
    assert set(captured) == set(compiled)
    for key, elements in compiled.items():
        assert captured[key] == pytest.approx(elements, rel=0.01), key


def test_memory_is_the_same(both: tuple[JobGraph, JobGraph]) -> None:
    captured, compiled = (memory(job, 0, 0, reserve=False) for job in both)
    assert captured is not None
    assert compiled is not None
    assert captured.peak_bytes == pytest.approx(compiled.peak_bytes, rel=0.02)
    for role in ("parameter", "optimizer_state", "buffer"):
        assert captured.by_role[role] == pytest.approx(compiled.by_role[role], rel=0.02, abs=1 << 16), role
