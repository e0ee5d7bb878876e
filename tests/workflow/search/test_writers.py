"""A plan in the words of others says all of it, or is refused."""

from __future__ import annotations

import argparse
import json
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from echograph.errors import UnknownNameError, UsageError
from echograph.workflow.plan import Plan, read_plan
from echograph.workflow.search.writers import FORMATS, PlanSizes, parse_target, written

yaml = pytest.importorskip("yaml")


def sizes(plan: Plan, **more: Any) -> PlanSizes:
    data = (plan.gpus or 64) // plan.model_ranks
    micro = plan.micro_batch or 1
    count = (plan.global_batch or data * micro) // (data * micro)
    said: dict[str, Any] = {"gpus": plan.gpus or 64, "node": 8, "data_ranks": data, "micro_batch": micro}
    return PlanSizes(**said | {"micro_batches": count, "layers": 32, "dtype": "bf16"} | more)


def text(name: str, plan: Plan) -> str:
    return written(name, plan, sizes(plan))[0]


FULL = Plan(
    gpus=64, tp=8, sequence_parallel=True, pp=4, vpp=2, zero=1, micro_batch=1, global_batch=64, recompute="full"
)


def test_a_plan_file_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(text("plan", FULL))
    assert Plan(**read_plan(path)) == FULL


def _arguments(plan: Plan) -> dict[str, str | bool]:
    parser, words = argparse.ArgumentParser(), text("megatron", plan).replace("\\\n", " ").split()
    found: dict[str, str | bool] = {}
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            found[word] = True if after.startswith("--") else after
    assert parser is not None
    return found


def test_megatron_says_all_of_it() -> None:
    found = _arguments(FULL)
    assert found["--tensor-model-parallel-size"] == "8"
    assert found["--num-layers-per-virtual-pipeline-stage"] == "4"
    assert found["--global-batch-size"] == "64"
    assert found["--recompute-granularity"] == "full" and found["--recompute-num-layers"] == "1"
    for flag in ("--sequence-parallel", "--use-distributed-optimizer", "--bf16"):
        assert found[flag] is True
    assert "--fp8-recipe" not in found
    assert _arguments(Plan(gpus=64, precision="mxfp8"))["--fp8-recipe"] == "mxfp8"


@pytest.mark.parametrize(
    ("layers", "said", "layout"),
    [
        (10, {}, "'Ettt|ttt|tt|ttL'"),
        (10, {"stage_layers": "2,3,3,2"}, "'Ett|ttt|ttt|ttL'"),
        (14, {"vpp": 2, "stage_layers": "1,2,2,2,2,2,2,1"}, "'Et|tt|tt|tt|tt|tt|tt|tL'"),
    ],
)
def test_megatron_is_told_the_layers_of_uneven_chunks(layers: int, said: dict[str, Any], layout: str) -> None:
    """Without a layout it takes only layers that the chunks divide."""
    plan = Plan(gpus=64, pp=4, global_batch=64, **said)
    told = written("megatron", plan, sizes(plan, layers=layers))[0]
    assert f"--pipeline-model-parallel-layout {layout} " in told
    assert "--num-layers-per-virtual-pipeline-stage" not in told
    for name in ("torchtitan", "accelerate"):
        if said:
            with pytest.raises(UsageError, match="has no word for"):
                written(name, plan, sizes(plan, layers=layers))


def test_megatron_is_told_what_the_stack_does_by_itself() -> None:
    found = _arguments(Plan(gpus=64, tp=8, zero=1, global_batch=64, stack="nemo"))
    for flag in ("--overlap-grad-reduce", "--overlap-param-gather", "--tp-comm-overlap", "--grad-reduce-in-bf16"):
        assert flag in found
    assert "--expert-tensor-parallel-size" not in found and "--moe-token-dispatcher-type" not in found
    plain = _arguments(Plan(gpus=64, tp=8, zero=1, global_batch=64, stack="megatron-core"))
    assert "--overlap-grad-reduce" not in plain and "--tp-comm-overlap" not in plain
    assert "--accumulate-allreduce-grads-in-fp32" in plain
    # The stack's loss is compiled function by function, which Megatron-LM does only when told.
    assert "--cross-entropy-loss-fusion" in plain
    for plan in (Plan(gpus=64, stack="megatron-core", loss="eager"), Plan(gpus=64)):
        assert "--cross-entropy-loss-fusion" not in _arguments(plan)


def test_deepspeed_multiplies_to_the_batch() -> None:
    config = json.loads(text("deepspeed", Plan(gpus=64, zero=2, micro_batch=2, global_batch=512)))
    batch, micro, often = (
        config[f"{name}"]
        for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    assert batch == 512 == micro * often * 64
    assert config["zero_optimization"]["stage"] == 2 and config["bf16"]["enabled"]


@pytest.mark.parametrize(("words", "said"), [({"stack": "deepspeed"}, True), ({}, None), (
    {"stack": "deepspeed", "overlap_grad_reduce": False}, False)])  # fmt: skip
def test_deepspeed_is_told_what_the_stack_does_beside_backward(words: dict[str, Any], said: bool | None) -> None:
    config = json.loads(text("deepspeed", Plan(gpus=64, zero=2, global_batch=64, **words)))
    assert config["zero_optimization"].get("overlap_comm") is said
    assert config["zero_optimization"].get("reduce_bucket_size") == (64_000_000 if said else None)


def test_deepspeed_reads_it(tmp_path: Path) -> None:
    config = pytest.importorskip("deepspeed.runtime.config", reason="needs the [deepspeed] extra")
    record = json.loads(text("deepspeed", Plan(gpus=1, zero=2, micro_batch=2, global_batch=8)))
    read = config.DeepSpeedConfig(record)
    assert (read.zero_optimization_stage, read.gradient_accumulation_steps, read.bfloat16_config.enabled) == (
        2,
        4,
        True,
    )


def test_torchtitan_covers_the_mesh() -> None:
    config = tomllib.loads(text("torchtitan", FULL_TITAN))
    degrees = [value for key, value in config["parallelism"].items() if key.endswith("degree")]
    assert config["parallelism"]["pipeline_parallel_schedule"] == "1F1B"
    product = 1
    for degree in degrees:
        product *= degree
    assert product == 64
    assert config["activation_checkpoint"] == {"mode": "selective", "selective_ac_option": "2"}


@pytest.mark.parametrize(
    ("stack", "compiled"), [("", None), ("fsdp", None), ("torchtitan", ["model"]), ("inductor", ["model", "loss"])]
)
def test_torchtitan_compiles_what_the_stack_compiles(stack: str, compiled: list[str] | None) -> None:
    config = tomllib.loads(text("torchtitan", Plan(gpus=64, zero=3, stack=stack)))
    assert config.get("compile") == (compiled and {"enable": True, "components": compiled})


FULL_TITAN = Plan(
    gpus=64,
    tp=4,
    sequence_parallel=True,
    pp=2,
    zero=3,
    hsdp_replicas=2,
    micro_batch=1,
    global_batch=64,
    recompute="2",
)


@pytest.mark.parametrize(
    ("plan", "kind"),
    [
        (Plan(gpus=64), "MULTI_GPU"),
        (Plan(gpus=64, zero=2), "DEEPSPEED"),
        (Plan(gpus=64, zero=3), "FSDP"),
        (Plan(gpus=64, tp=2, pp=2), "MEGATRON_LM"),
    ],
)
def test_accelerate_is_of_the_kind_that_the_plan_needs(plan: Plan, kind: str) -> None:
    config = yaml.safe_load(text("accelerate", plan))
    assert config["distributed_type"] == kind
    assert (config["num_processes"], config["num_machines"]) == (64, 8)


@pytest.mark.parametrize(
    ("plan", "dtype", "mixed"),
    [
        (Plan(gpus=8), "bf16", "no"),
        (Plan(gpus=8), "fp32", "no"),
        (Plan(gpus=8, zero=2), "bf16", "bf16"),
        (Plan(gpus=8, zero=3), "bf16", "bf16"),
    ],
)
def test_accelerate_casts_where_it_keeps_fp32_weights_in_shards(plan: Plan, dtype: str, mixed: str) -> None:
    """Of replicas its mixed precision is autocast, which is another step: the script makes a 16-bit model."""
    for master in (True, False):
        told, notes = written("accelerate", plan, sizes(plan, dtype=dtype, master_weights=master))
        assert yaml.safe_load(told)["mixed_precision"] == mixed
        of_script = [note for note in notes if f"makes the model in {dtype}" in note]
        assert len(of_script) == (plan.zero == 0 and dtype == "bf16")
        assert all(("fp32 copies" in note) is master for note in of_script)


def test_accelerate_reads_it(tmp_path: Path) -> None:
    read = pytest.importorskip("accelerate.commands.config.config_args", reason="needs accelerate")
    path = tmp_path / "config.yaml"
    path.write_text(text("accelerate", Plan(gpus=64, zero=3)))
    config = read.load_config_from_file(str(path))
    assert config.fsdp_config["fsdp_version"] == 2 and config.num_processes == 64


def test_what_a_script_has_to_do_is_said() -> None:
    _, notes = written("accelerate", Plan(gpus=8, recompute="full"), sizes(Plan(gpus=8)))
    assert any("gradient_checkpointing_enable" in note for note in notes)


REFUSED = [
    ("megatron", Plan(gpus=64, zero=2), "--zero 2"),
    ("megatron", Plan(gpus=64, pp=2, schedule="zb-h1"), "--schedule zb-h1"),
    ("megatron", Plan(gpus=64, recompute="selective-op"), "--recompute selective-op"),
    ("megatron", Plan(gpus=64, zero=3, hsdp_replicas=2), "--hsdp-replicas 2"),
    ("deepspeed", Plan(gpus=64, tp=2), "--tp 2"),
    ("torchtitan", Plan(gpus=64, zero=1), "--zero 1"),
    ("torchtitan", Plan(gpus=64, tp=2), "sequence-parallel"),
    ("accelerate", Plan(gpus=64, ep=2), "--ep 2"),
    ("accelerate", Plan(gpus=64, precision="fp8"), "--precision fp8"),
]


@pytest.mark.parametrize(("name", "plan", "said"), REFUSED)
def test_what_has_no_word_is_refused(name: str, plan: Plan, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        text(name, plan)


def test_no_field_is_left_out_silently() -> None:
    """A field that a format never looks at makes it refuse the plan."""
    others: dict[str, Any] = {
        "tp": 2, "cp": 2, "ep": 2, "pp": 2, "zero": 1, "micro_batch": 2, "capacity_factor": 1.5,
        "tp_plan": "x.toml",
        "grad_dtype": "fp16", "precision": "nvfp4", "loss": "fused", "expert_imbalance": 2.0,
        "mesh_order": "dp-tp-cp-ep-pp",
        "overlap_param_gather": True, "tp_comm_overlap": "bulk", "recompute_early_stop": False,
    }  # fmt: skip
    needs = {"tp_plan": {"tp": 2}, "tp_comm_overlap": {"tp": 2, "sequence_parallel": True}}
    needs |= {"overlap_param_gather": {"zero": 1}}
    for name, value in others.items():
        plain = Plan(gpus=64, **needs.get(name, {}))
        plan = Plan(gpus=64, **needs.get(name, {}) | {name: value})
        for form in FORMATS:
            try:
                changed, notes = written(form, plan, sizes(plan))
                before, _ = written(form, plain, sizes(plain))
            except UsageError:
                continue
            silent = changed == before and not notes
            assert not silent or name == "expert_imbalance", (form, name)
    assert {f.name for f in fields(Plan)} >= others.keys()


def test_targets_are_read() -> None:
    assert parse_target("megatron:a/b.txt") == ("megatron", Path("a/b.txt"))
    with pytest.raises(UsageError, match="say the file"):
        parse_target("megatron")
    with pytest.raises(UnknownNameError, match="did you mean 'megatron'"):
        parse_target("megatrn:a")
