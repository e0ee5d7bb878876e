"""What DeepSpeed communicates in a step: captured without ranks, and written down on two real ones over gloo."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the [torch] extra")

from deepspeed_both import BF16, FP32, captured_calls, configure, echo, real_calls, told_of

from echograph.ir import serde
from echograph.ir.types import Collective, Copy, CopyDirection, Payload, Phase

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the [deepspeed] extra"),
    pytest.mark.skipif(find_spec("transformers") is None, reason="needs the [huggingface] extra"),
]

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[2] / "examples" / "deepspeed-gpt2"
SMALL = ("--layers", "2", "--hidden", "64", "--heads", "2", "--vocabulary", "512", "--length", "16")
CHECKPOINTED = (*SMALL, "--activation-checkpointing")
# Small enough that the small model has several buckets, gathers ahead, and gathers again in the backward pass.
MANY_BUCKETS = {
    "stage": 3, "reduce_bucket_size": 20000, "stage3_prefetch_bucket_size": 20000,
    "stage3_param_persistence_threshold": 100, "stage3_max_live_parameters": 60000,
    "stage3_max_reuse_distance": 1000,
}  # fmt: skip
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
PARAMETERS_OFFLOADED = {"offload_param": {"device": "cpu"}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int, tuple[str, ...]]] = {
    "zero0-fp32": ({"stage": 0}, FP32, 1, SMALL),
    "zero1-accumulated-buckets": ({"stage": 1, "reduce_bucket_size": 20000}, BF16, 2, SMALL),
    "zero2-accumulated-buckets": ({"stage": 2, "reduce_bucket_size": 20000}, BF16, 2, SMALL),
    "zero3": ({"stage": 3}, BF16, 1, SMALL),
    "zero3-accumulated-buckets": (MANY_BUCKETS, BF16, 2, SMALL),
    "zero3-checkpointed": (MANY_BUCKETS, BF16, 2, CHECKPOINTED),
    "zero3-fp32": (MANY_BUCKETS, FP32, 1, SMALL),
    "zero2-offload": ({"stage": 2, **OFFLOADED}, BF16, 2, SMALL),
    "zero3-offload": ({**MANY_BUCKETS, **OFFLOADED}, BF16, 1, SMALL),
    "zero3-offload-parameters": ({**MANY_BUCKETS, **OFFLOADED, **PARAMETERS_OFFLOADED}, BF16, 2, SMALL),
}
"""name -> zero_optimization, precision, micro-batches, arguments of the script."""
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64", "uint8": "uint8"}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, warm: Path) -> Path:
    """A folder with what two real ranks told of all cases, and with what was captured of them."""
    return both_of(tuple(CASES), tmp_path_factory.mktemp("deepspeed"), warm)


def both_of(names: tuple[str, ...], folder: Path, programs: Path) -> Path:
    """The folder, in which two real ranks, and a capture of each, have written down what they communicate."""
    cases = {}
    for name in names:
        zero, precision, micro_batches, arguments = CASES[name]
        config = configure(folder / f"{name}.json", zero, precision, micro_batches)
        cases[name] = [str(EXAMPLE / "train.py"), "--deepspeed_config", str(config), *arguments]
    return told_of(cases, folder, programs)


def calls_of_job(path: Path) -> list[list[Any]]:
    """Operation, size of the group, bytes, type and phase of each collective of the one role, in program order."""
    job = serde.load(path)
    (program,) = job.programs
    found = []
    for _, begin, end, _, _ in program.calls.tolist():
        for op in (job.ops[i] for i in range(begin, end)):
            if isinstance(op, Collective):
                assert job.groups[op.group].axes == ("dp",)
                operation = op.name.rpartition(".")[2]
                found.append([operation, job.world_size, op.bytes_per_rank, op.dtype.text, op.phase.name.lower()])
    return found


@pytest.mark.slow
def test_the_example_runs_on_two_ranks_and_communicates_as_captured(tmp_path: Path, warm: Path) -> None:
    compare("zero3", both_of(("zero3",), tmp_path, warm))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_step_communicates_what_it_does_on_real_ranks(name: str, both: Path) -> None:
    compare(name, both)


def compare(name: str, both: Path) -> None:
    calls = real_calls(both, name, 0)
    assert len(calls) > 0
    assert calls == real_calls(both, name, 1) == captured_calls(both, name, 0) == captured_calls(both, name, 1)
    told = [[op, len(ranks), nbytes, DTYPES[dtype], phase] for op, ranks, nbytes, dtype, _, phase in calls]
    assert calls_of_job(both / f"{name}.pb") == told


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero2-offload", "zero3-offload"])
def test_what_is_offloaded_is_copied(name: str, both: Path) -> None:
    """This rank's half of the parameters comes back from the host once a step; its gradients go there in fp32."""
    job = serde.load(both / f"{name}.pb")
    copies = [op for op in (job.ops[i] for i in range(len(job.ops))) if isinstance(op, Copy)]
    half = job.workload.parameters // 2
    back = [op.nbytes for op in copies if op.phase is Phase.OPTIMIZER]
    assert {op.direction for op in copies if op.phase is Phase.OPTIMIZER} == {CopyDirection.HOST_TO_DEVICE}
    assert sum(back) == 2 * half
    away = [op.nbytes for op in copies if op.direction is CopyDirection.DEVICE_TO_HOST]
    # With two micro-batches the first one's gradients go too, to be added up.
    assert sum(away) == 4 * half if name == "zero3-offload" else sum(away) >= 4 * half


@pytest.mark.slow
def test_parameters_on_the_host_are_copied_to_be_gathered(both: Path) -> None:
    """What a rank gives to gathers is its half, from the host; the optimizer, there too, copies none back."""
    job = serde.load(both / "zero3-offload-parameters.pb")
    ops = [job.ops[i] for i in range(len(job.ops))]
    to_device = sum(
        op.nbytes for op in ops if isinstance(op, Copy) and op.direction is CopyDirection.HOST_TO_DEVICE
    )
    gathered = sum(
        op.bytes_per_rank for op in ops if isinstance(op, Collective) and op.payload is Payload.PARAMETER
    )
    assert to_device > job.workload.parameters
    assert 2 * to_device == gathered


@pytest.mark.slow
def test_llama_in_shares_of_1024_ranks_moves_what_its_parameters_weigh(tmp_path: Path, warm: Path) -> None:
    """Each gradient is scattered once; a parameter is gathered for both passes, or once where it persists."""
    zero = {"stage": 3, "stage3_max_live_parameters": 1, "stage3_max_reuse_distance": 1}
    config = configure(tmp_path / "ds.json", zero, BF16, 1)
    given = ("--layers", "2", "--hidden", "1024", "--length", "256", "--deepspeed_config", str(config))
    script = str(HERE / "deepspeed_llama.py")
    echo(warm / "echoc", "capture", "deepspeed", "--script", script, "--world-size", "1024", "-o",
         str(tmp_path / "job.pb"), "--", *given)  # fmt: skip
    moved: dict[str, int] = {}
    for operation, ranks, nbytes, dtype, _ in calls_of_job(tmp_path / "job.pb"):
        assert ranks == 1024
        if dtype == "bf16":
            moved[operation] = moved.get(operation, 0) + nbytes
    shapes = _llama_shapes()
    padded = {name: -(-numel // 1024) * 1024 * 2 for name, numel in shapes.items()}
    assert moved["reduce_scatter_tensor"] == sum(padded.values())
    small = sum(nbytes for name, nbytes in padded.items() if shapes[name] <= 100_000)
    # The embedding's input has no gradient, so nothing asks for its table in the backward pass.
    once = padded["model.embed_tokens.weight"] + small
    assert moved["all_gather_into_tensor"] == 2 * (sum(padded.values()) - once) + once
    told = json.loads(echo(warm / "echosim", "run", str(tmp_path / "job.pb"), "--json"))
    assert told["gpus"] == 1024
    assert told["step_time_s"] > 0
    echo(
        warm / "echoc",
        "export",
        str(tmp_path / "job.pb"),
        "--to",
        "chakra",
        "--per-role",
        "-o",
        str(tmp_path / "traces"),
    )
    assert list((tmp_path / "traces").iterdir())


def _llama_shapes() -> dict[str, int]:
    """Elements of each parameter of the model of `deepspeed_llama.py`, as transformers makes it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256, hidden_size=1024, intermediate_size=3584, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    return {name: parameter.numel() for name, parameter in model.named_parameters()}
