from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("torch")

from echograph.frontend.pytorch.spec import StepSpec
from echograph.ir.graph import JobGraph
from echograph.ir.passes.data_parallel import DataParallel
from echograph.ir.passes.fully_shard import FullyShard
from echograph.models import get_model
from echograph.simulator.memory import Memory, Runtime, memory
from echograph.workflow.compile import compile_entry

pytestmark = pytest.mark.torch

TENSORS_ALONE = Runtime(cublas_workspace_bytes=())
SMALL = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 8,
}  # fmt: skip
STEPS = [
    ("gpt2", {"n_layer": 4}, "bf16", 4, 512),
    ("gpt2", {}, "fp32", 4, 512),
    ("bert-base-uncased", {}, "bf16", 4, 512),
    ("vit-b-16", {}, "fp32", 8, 224),
    ("resnet-50", {}, "bf16", 8, 224),
    ("llama-2-7b", {"num_hidden_layers": 3}, "bf16", 1, 1024),
]


def tracked(warm: Path, function: str, *arguments: object) -> dict[str, int]:
    """Torch's figures, from a process of its own: a process group stands for the whole process."""
    command = [warm / "python", Path(__file__).with_name("torch_memory.py"), function]
    done = subprocess.run([*command, json.dumps(arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def of(job: JobGraph) -> Memory:
    found = memory(job, 0, 80 * 2**30, TENSORS_ALONE)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("model", "changes", "dtype", "batch_size", "seq_len"),
    [STEPS[0], *(pytest.param(*step, marks=pytest.mark.slow) for step in STEPS[1:])],
)
def test_the_peak_of_a_step_is_what_torch_tracks(
    warm: Path, model: str, changes: dict[str, int], dtype: str, batch_size: int, seq_len: int
) -> None:
    theirs = tracked(warm, "step", model, changes, dtype, batch_size, seq_len)
    spec = StepSpec(dtype=dtype)  # type: ignore[arg-type]
    entry = get_model(model).with_config(**changes)
    graph = compile_entry(entry, spec, batch_size=batch_size, seq_len=seq_len)
    ours = of(DataParallel(replicas=1)(graph))
    # Whole blocks of 512 bytes, and inputs that their owner holds to the end of the step: nothing else differs.
    assert ours.peak_bytes == pytest.approx(theirs["Total"], rel=0.001)
    assert ours.by_role["parameter"] == pytest.approx(theirs["PARAM"], rel=0.01)
    # The tracker knows no optimizer that is not torch's: what is not of the module is "OTH" for it.
    assert ours.by_role["optimizer_state"] == pytest.approx(theirs["OTH"], rel=0.03)
    # Which gradient of a tensor is a parameter's, it learns when all of it is there, and fp32 copies are not.
    passing = sum(ours.by_role[role] for role in ("activation", "gradient", "input", "buffer"))
    others = sum(theirs[kind] for kind in ("ACT", "TEMP", "GRAD", "BUFFER"))
    assert passing == pytest.approx(others, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("vocab", "batch_size", "seq_len"), [(8000, 2, 1024), (32000, 1, 64), (500, 1, 64), (500, 1, 512)]
)
def test_the_peak_of_a_sharded_step_is_what_torch_tracks_under_fsdp2(
    warm: Path, vocab: int, batch_size: int, seq_len: int
) -> None:
    # Activations dominate, then the root's parameters, then the gathered and reduced layers.
    changes = {**SMALL, "num_hidden_layers": 6, "vocab_size": vocab}
    theirs = tracked(warm, "fully_sharded", "llama-2-7b", changes, batch_size, seq_len, 8)
    entry = get_model("llama-2-7b").with_config(**changes)
    graph = compile_entry(
        entry, StepSpec(dtype="bf16", master_weights=False), batch_size=batch_size, seq_len=seq_len
    )
    ours = of(FullyShard(replicas=8)(graph))
    assert ours.peak_bytes - ours.by_role["optimizer_state"] == pytest.approx(theirs["Total"], rel=0.015)
