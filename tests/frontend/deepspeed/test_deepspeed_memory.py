"""What a job captured from DeepSpeed says of its model and of its memory, held against the compiled one."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from echograph.frontend.pytorch.spec import StepSpec
from echograph.ir import serde
from echograph.ir.graph import JobGraph, StepGraph
from echograph.ir.types import TensorRole
from echograph.models import get_model
from echograph.simulator.clusters import load_cluster
from echograph.simulator.memory import memory
from echograph.workflow.compile import compile_entry
from echograph.workflow.plan import Plan
from echograph.workflow.predict import lower

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the [deepspeed] extra"),
]

SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "deepspeed-gpt2" / "train.py"
RANKS, LAYERS, HIDDEN, HEADS, VOCABULARY, LENGTH, BATCH, MICRO_BATCHES = 16, 2, 256, 4, 8192, 128, 2, 2


@pytest.fixture(scope="module")
def step() -> StepGraph:
    entry = get_model("gpt2").with_config(
        n_layer=LAYERS, n_embd=HIDDEN, n_head=HEADS, vocab_size=VOCABULARY, n_positions=LENGTH
    )
    return compile_entry(entry, StepSpec(clip_grad_norm=1.0), batch_size=BATCH, seq_len=LENGTH)


@pytest.fixture(scope="module", params=(1, 2, 3))
def both(
    request: pytest.FixtureRequest, step: StepGraph, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, JobGraph, JobGraph]:
    """The stage of ZeRO, the captured job, the compiled one."""
    stage: int = request.param
    folder = tmp_path_factory.mktemp("zero")
    settings = {
        "train_micro_batch_size_per_gpu": BATCH, "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}, "bf16": {"enabled": True},
        "gradient_clipping": 1.0, "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }  # fmt: skip
    (folder / "ds.json").write_text(json.dumps(settings))
    model = f"--layers {LAYERS} --hidden {HIDDEN} --heads {HEADS} --vocabulary {VOCABULARY} --length {LENGTH}"
    subprocess.run(
        [
            sys.executable, "-c", "from echograph.cli.echoc import main; main()", "capture", "deepspeed",
            "--script", SCRIPT, "--world-size", str(RANKS), "-o", folder / "job.pb", "--",
            "--deepspeed_config", folder / "ds.json", *model.split(),
        ],
        check=True, capture_output=True,
    )  # fmt: skip
    captured = serde.load(folder / "job.pb")
    assert isinstance(captured, JobGraph)
    plan = Plan(gpus=RANKS, zero=stage, global_batch=BATCH * MICRO_BATCHES * RANKS)
    return stage, captured, lower(step, plan, load_cluster(plan.cluster))


def test_what_is_trained_is_the_same(both: tuple[int, JobGraph, JobGraph]) -> None:
    captured, compiled = (job.workload for job in both[1:])
    for name in ("parameters", "batch_size", "sequence_length", "dtype", "optimizer", "master_weights"):
        assert getattr(captured, name) == getattr(compiled, name), name
    assert captured.master_weights


def test_parameters_and_optimizer_state_take_as_much(both: tuple[int, JobGraph, JobGraph]) -> None:
    captured, compiled = (memory(job, 0, 0, reserve=False) for job in both[1:])
    assert captured is not None
    assert compiled is not None
    for role in ("parameter", "optimizer_state"):
        assert captured.by_role[role] == pytest.approx(compiled.by_role[role], rel=0.05), role


def test_shares_are_told(both: tuple[int, JobGraph, JobGraph]) -> None:
    stage, job, _ = both
    held = [job.tensors[row] for row in range(len(job.tensors))]
    named = {t.name: t.sharded for t in held if t.role.persistent and t.alias_of is None}
    assert named["master.0"] == named["master.0.exp_avg"] == ("dp",)
    assert named["share.0" if stage == 3 else "flat.0"] == (("dp",) if stage == 3 else ())
    assert {t.role for t in held if t.sharded} <= {
        TensorRole.PARAMETER, TensorRole.GRADIENT, TensorRole.OPTIMIZER_STATE,
    }  # fmt: skip


def test_a_micro_batch_is_one_stretch(both: tuple[int, JobGraph, JobGraph]) -> None:
    """Views of what was there before are of the micro-batch that takes them: nothing lives on for them."""
    calls = both[1].programs[0].calls
    assert calls[:, 4].tolist() == [0, 1, 0]
