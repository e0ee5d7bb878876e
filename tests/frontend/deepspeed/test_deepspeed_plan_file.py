"""DeepSpeed's file of a plan, given to DeepSpeed and captured, is the step that the plan was predicted to take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("deepspeed", reason="needs the [deepspeed] extra")
pytest.importorskip("transformers", reason="needs the [models] extra")

import echograph as eg
from echograph.frontend.deepspeed.adapter import DeepSpeedAdapter
from echograph.frontend.scripts.capture import capture_script
from echograph.frontend.scripts.run import Script
from echograph.frontend.scripts.world import World
from echograph.models.catalog import get_model
from echograph.workflow.compile import compile_entry
from echograph.workflow.search.writers import PlanSizes, written

pytestmark = [pytest.mark.torch, pytest.mark.slow]

SCRIPT = Path(__file__).with_name("deepspeed_llama.py")
SIZES = {"num_hidden_layers": 8, "hidden_size": 2048, "intermediate_size": 7168, "num_attention_heads": 16,
         "num_key_value_heads": 4, "head_dim": 128}  # fmt: skip
LENGTH, RANKS, TIMES = 4096, 8, 4


@pytest.mark.parametrize("zero", [1, 2])
def test_a_plan_comes_back_within_three_per_cent(zero: int, tmp_path: Path) -> None:
    plan = eg.Plan(gpus=RANKS, zero=zero, micro_batch=1, global_batch=RANKS * TIMES, stack="deepspeed")
    entry = get_model("llama-3-8b").with_config(**SIZES)
    step = compile_entry(entry, eg.StepSpec(), batch_size=1, seq_len=LENGTH)
    system = eg.System("dgx-h100")
    planned = eg.simulate(eg.lower(step, plan, system), system, plan=plan, memory=False)
    sizes = PlanSizes(
        gpus=RANKS, node=8, data_ranks=RANKS, micro_batch=1, micro_batches=TIMES, layers=8, dtype="bf16"
    )
    config = json.loads(written("deepspeed", plan, sizes)[0])
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-4}}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(config))
    given = f"--layers 8 --hidden 2048 --length {LENGTH} --deepspeed_config {path}"
    job = capture_script(Script(path=SCRIPT, arguments=given.split()), World(size=RANKS), DeepSpeedAdapter()).graph
    captured = eg.simulate(job, system, memory=False)  # type: ignore[arg-type]
    assert captured.step_s == pytest.approx(planned.step_s, rel=0.03)
