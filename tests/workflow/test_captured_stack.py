"""What a captured job's stack says of its kernels, on the device that it is simulated on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import JobGraph, Workload
from echograph.ir.types import Attention, DType, Phase, TensorRole
from echograph.models.stacks import load_stack
from echograph.profiler.costs import load_device
from echograph.workflow.plan import with_kernels
from echograph.workflow.predict import UNSAID_STACK, simulate
from echograph.workflow.system import System


def job(
    attention: Attention, operator: str = "aten._scaled_dot_product_flash_attention", stack: str = ""
) -> JobGraph:
    """A forward pass of attention alone: 8,192 tokens."""
    builder = GraphBuilder(name="job", workload=Workload(dtype=DType.BF16, stack=stack))
    builder.stream("compute")
    shape = (1, attention.heads, 8192, attention.head_dim)
    query, key, value = (builder.tensor(name, shape, DType.BF16, TensorRole.INPUT) for name in "qkv")
    out = builder.tensor("out", shape, DType.BF16, TensorRole.ACTIVATION)
    builder.compute(
        operator, phase=Phase.FORWARD, inputs=(query, key, value), outputs=(out,), attributes=attention,
        flops=4 * 8192 * 8192 * attention.heads * attention.head_dim,
    )  # fmt: skip
    builder.program([(0, 0, 1, 0, 0)], role="every rank", ranks=(0,))
    return builder.build(JobGraph)


CAUSAL = Attention(heads=32, kv_heads=32, head_dim=128, causal=True)
MEGATRON = load_stack("megatron-core")


def kernel(graph: JobGraph, device: str) -> str:
    chosen = with_kernels(graph, MEGATRON, load_device(device))
    return chosen.strings[chosen.ops.name[0]]


@pytest.mark.parametrize(
    ("device", "dropout", "deterministic", "expected"),
    [
        ("h100-sxm", 0.0, False, "cudnn"),
        ("h100-sxm", 0.1, True, "cudnn"),
        ("a100-sxm-80", 0.1, True, "flash2"),
        ("gb200", 0.1, False, "cudnn"),
        ("gb200", 0.0, True, "cudnn"),
        ("gb200", 0.1, True, "flash2"),
    ],
)
def test_transformer_engine_takes_the_first_library_that_has_such_an_attention(
    device: str, dropout: float, deterministic: bool, expected: str
) -> None:
    attention = replace(CAUSAL, dropout=dropout, deterministic=deterministic)
    assert kernel(job(attention), device) == f"{expected}.attention"


def test_a_kernel_that_is_named_already_stays() -> None:
    assert kernel(job(CAUSAL, "flash3.attention"), "h100-sxm") == "flash3.attention"


def test_a_device_without_a_model_of_any_keeps_what_was_captured() -> None:
    captured = job(CAUSAL)
    assert kernel(captured, "v100-sxm2") == captured.strings[captured.ops.name[0]]


def test_a_job_runs_the_kernels_of_the_stack_that_it_carries() -> None:
    system = System("dgx-h100")
    plain, stacked = (simulate(job(CAUSAL, stack=stack), system) for stack in ("", "megatron-core"))
    assert stacked.step_ps < plain.step_ps, "cuDNN is faster than FlashAttention-2 on H100"
    assert stacked.plan["stack"] == "megatron-core"
    assert "stack" not in plain.plan
    assert UNSAID_STACK > 0
    wide, narrow = ((r.interval_ps[1] - r.interval_ps[0]) / r.step_ps for r in (plain, stacked))
    assert narrow < wide, "a stack that is known leaves less unsaid"
