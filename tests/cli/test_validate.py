"""`echosim validate`: rows become plans, gaps are counted, what cannot be modelled is skipped with its reason."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from echograph.workflow.validation import spellings
from echograph.workflow.validation.fits import least_bytes
from echograph.workflow.validation.model import public_model, with_known_sizes
from echograph.workflow.validation.run import GIB, measured_memory, predict_rows
from echograph.workflow.validation.score import Outcome, by_family
from echograph.workflow.validation.setup import Setup, setup
from echograph.workflow.validation.table import MeasuredStep, Skip

ROW: dict[str, Any] = {
    "id": "toy-001", "model": "GPT toy", "layers": 2, "hidden": 128, "heads": 4, "kv_heads": 4, "ffn_hidden": 512,
    "vocab": 1024, "seq_len": 64, "gpu_type": "A100-SXM-80GB", "n_gpus": 8, "tp": 2, "pp": 1, "vpp": 1, "dp": 4,
    "cp": 1, "ep": 1, "sequence_parallel": "no", "zero_stage": 0, "recompute": "none", "precision": "bf16",
    "micro_batch": 2, "global_batch": 16, "step_time_s": 0.02, "grade": "A", "attention": "unfused",
}  # fmt: skip


def write(path: Path, *rows: dict[str, Any]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(ROW))
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.mark.torch
def test_every_row_has_a_prediction_or_a_reason(cli, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the [torch] extra")
    rows = (
        ROW,
        ROW | {"id": "toy-002", "micro_batch": 1, "vpp": "", "cp": ""},
        ROW | {"id": "toy-003", "hidden": ""},
        ROW | {"id": "toy-004", "step_time_s": ""},
        ROW | {"id": "toy-005", "global_batch": 17},
        ROW | {"id": "toy-006", "grade": "C"},
        ROW | {"id": "other-001", "gpu_type": "abacus"},
    )
    peers = tmp_path / "peers.csv"
    peers.write_text("tool,id,err\nabacus,toy-001,0.5\nabacus,toy-003,9\n")
    record = cli("echosim", "validate", write(tmp_path / "t.csv", *rows), "--peers", peers, "--json").json()
    toy = record["families"]["toy"]
    assert (toy["rows"], toy["simulated"], toy["skipped"]) == (5, 2, 3)
    assert toy["peers"]["abacus"] == {"rows": 1, "mean_abs_error": 0.5, "median_abs_error": 0.5, "bias": 0.5}
    by_id = {row["id"]: row for row in record["rows"]}
    low, high = by_id["toy-001"]["interval_s"]
    assert low < by_id["toy-001"]["predicted_s"] < high
    assert by_id["toy-001"]["in_interval"] == (low <= 0.02 <= high)
    assert by_id["toy-003"]["in_interval"] is None
    assert by_id["toy-001"]["error"] == pytest.approx(by_id["toy-001"]["predicted_s"] / 0.02 - 1)
    assert "cp 1" in by_id["toy-002"]["assumed"]
    assert by_id["toy-003"]["skipped"] == "hidden is empty"
    assert "no step time" in by_id["toy-004"]["skipped"]
    assert "--global-batch 17" in by_id["toy-005"]["skipped"]
    assert "toy-006" not in by_id
    assert "abacus" in by_id["other-001"]["skipped"]


@pytest.mark.torch
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_one_capture_serves_all_micro_batches(precision: str) -> None:
    pytest.importorskip("transformers", reason="needs the [torch] extra")
    from echograph.workflow.compile import compile_entry
    from echograph.workflow.predict import predict

    rows = [ROW | {"id": f"toy-{n}", "micro_batch": n, "precision": precision} for n in (1, 2, 4)]
    read = [MeasuredStep({k: str(v) for k, v in row.items()}) for row in rows]
    for row, outcome in zip(read, predict_rows(read), strict=True):
        made = setup(row)
        alone = compile_entry(
            made.model.entry,
            made.spec,
            batch_size=made.micro_batch,
            seq_len=made.seq_len,
            attention=made.model.attention,
        )
        result, _ = predict(alone, made.plan)
        assert outcome.predicted_s == pytest.approx(result.to_json()["step_time_s"], rel=0.005)


@pytest.mark.torch
def test_processes_change_nothing(cli, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the [torch] extra")
    table = write(tmp_path / "t.csv", ROW, ROW | {"id": "toy-002", "micro_batch": 1})
    one, two = (cli("echosim", "validate", table, "--json", "--jobs", n).json() for n in (1, 2))
    assert one == two
    assert "echograph" in cli("echosim", "validate", table).out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"precision": "INT8"}, "precision 'INT8'"),
        ({"zero_stage": "most"}, "zero_stage 'most'"),
        ({"n_gpus": 9}, "not tp x pp"),
        ({"dp": 3}, "not tp x pp"),
        ({"recompute": "sometimes"}, "recompute 'sometimes'"),
        ({"model": "MoE toy", "ep": 2}, "experts are not in the table"),
        ({"micro_batch": "many"}, "micro_batch is 'many'"),
        ({"model": "MoE 1.3B"}, "experts are not in the table"),
        ({"params_B": 5}, "params_B is 5, and its sizes make"),
        (
            {"model": "abacus"}
            | dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab"), ""),
            "model 'abacus' is not a known one",
        ),
        ({"model": "GPT 8x7B"}, "experts are not in the table"),
        ({"model": "Llama3-8B QLoRA"}, "QLoRA: weights of 4 bits"),
        ({"model": "ResNet-50"}, "is not one stack of layers over tokens"),
        ({"model": "T5-large"}, "is not one stack of layers over tokens"),
        ({"n_gpus": 0}, "n_gpus is '0'"),
        ({"seq_len": 0}, "seq_len is '0'"),
        ({"zero_stage": "3 (offload)"}, "zero_stage '3 .offload"),
        ({"schedule": "zero-bubble", "pp": 2, "dp": 2}, "schedule 'zero-bubble' of 1 chunks a stage"),
        ({"notes": "DualPipe", "pp": 2, "dp": 2, "vpp": 4}, "two chunks a stage, and vpp is 4"),
        ({"sequence_parallel": "perhaps"}, "sequence_parallel 'perhaps'"),
    ],
)
def test_what_is_not_modelled_is_skipped(change: dict[str, Any], words: str) -> None:
    pytest.importorskip("torch", reason="needs the [torch] extra")
    with pytest.raises(Skip, match=words):
        setup(MeasuredStep({k: str(v) for k, v in (ROW | change).items()}))


def made(**change: object) -> Setup:
    return setup(MeasuredStep({k: str(v) for k, v in (ROW | change).items()}))


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("bf16-mixed", ("bf16", "")), ("torch.bfloat16", ("bf16", "")), ("BF16 (TE)", ("bf16", "")),
        ("amp_bf16", ("bf16", "")), ("bfloat16 mixed precision", ("bf16", "")), ("16-mixed", ("fp16", "")),
        ("half", ("fp16", "")), ("32-true", ("fp32", "")), ("FP8", ("bf16", "fp8")), ("FP8-CS", ("bf16", "fp8")),
        ("FP8-CS (FP8-MX)", ("bf16", "fp8")), ("fp8 (E4M3 hybrid)", ("bf16", "fp8")),
        ("FP8 (MX)", ("bf16", "mxfp8")),
        ("TF32", ("fp32", "tf32")),
        ("fp8 tensorwise", ("bf16", "fp8")), ("float8 rowwise", ("bf16", "fp8-rowwise")),
        ("FP8 (1x128 tiles)", ("bf16", "fp8-blockwise")), ("FP8-SC", ("bf16", "fp8-blockwise")),
        ("FP8 blockwise", ("bf16", "fp8-blockwise")), ("MXFP8", ("bf16", "mxfp8")), ("NVFP4", ("bf16", "nvfp4")),
        ("MXFP4", None), ("INT8", None), ("FP8 somehow", None), ("", None),
    ],
)  # fmt: skip
def test_spellings_of_a_precision(text: str, read: tuple[str, str] | None) -> None:
    assert spellings.precision(text) == read


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("", "none"), ("none", "none"), ("No AC", "none"), ("False", "none"),
        ("no activation checkpointing", "none"),
        ("full", "full"), ("Full AC", "full"), ("True", "full"), ("activation checkpointing", "full"),
        ("selective", "selective"), ("Selective AC", "selective"), ("selective(op)", "selective-op"),
        ("selective (attn)", "selective"), ("core_attn", "selective"), ("full, uniform, 1", "full"),
        ("selective (2)", "2"), ("AC every 2", "2"), ("every 3rd layer", "3"), ("every 1", "full"),
        ("full, block, 10", None), ("full, uniform, 4", None), ("mlp", None),
        ("Selective (op)", "selective-op"), ("sometimes", None), ("half of the layers", None),
    ],
)  # fmt: skip
def test_spellings_of_recomputation(text: str, read: str | None) -> None:
    assert spellings.recompute(text) == read


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("", (0, False, 0, True)), ("none", (0, False, 0, True)), ("DDP", (0, False, 0, True)),
        ("FSDP", (3, False, 0, True)), ("fsdp2", (3, False, 0, True)), ("HSDP", (3, True, 0, True)),
        ("FSDP (HYBRID_SHARD)", (3, True, 0, True)), ("fsdp2(SHARD_GRAD_OP)", (3, False, 0, False)),
        ("FULL_SHARD", (3, False, 0, True)), ("SHARD_GRAD_OP", (3, False, 0, False)),
        ("hybrid shard", (3, True, 0, True)), ("FSDP NO_SHARD", (0, False, 0, True)),
        ("ZeRO-1", (1, False, 0, True)), ("zero2", (2, False, 0, True)),
        ("ZeRO stage 3", (3, False, 0, True)), ("zero1=8", (1, False, 8, True)), ("zero1=-1", (1, False, 0, True)),
        ("1 (8-GPU groups)", (1, False, 8, True)), ("distributed optimizer", (1, False, 0, True)),
        ("3 (CPU offload)", None), ("ZeRO-Infinity", None), ("ZeRO++", None), ("12", None), ("most", None),
    ],
)  # fmt: skip
def test_spellings_of_sharding(text: str, read: tuple[int, bool, int, bool] | None) -> None:
    said = spellings.sharding(text)
    assert (said and (said.stage, said.copies, said.group, said.reshards)) == read


@pytest.mark.parametrize(
    ("notes", "nic_GBps"),
    [
        ("", None), ("1600Gbps node-node RoCE", None), ("8xHDR200 IB/node (1.6Tb/s)", None), ("400Gbps", "6.25"),
        ("128 GPUs; 800 Gbps", "12.5"), ("4 * 100Gb RoCE", "6.25"), ("800 Gb/s a node", "12.5"),
        ("200Gb/s IB", None),
        ("100Gb/s Ethernet", None), ("100 Gb/s per GPU", "12.5"), ("600 GB/s NVLink", None), ("3.2Tb/s EFA", "50"),
    ],
)  # fmt: skip
def test_a_network_that_a_row_names_is_its_clusters(notes: str, nic_GBps: str | None) -> None:
    pytest.importorskip("torch", reason="needs the [torch] extra")
    assert made(notes=notes).settings == ({"network.nic_GBps": nic_GBps} if nic_GBps else {})


@pytest.mark.parametrize(
    ("words", "gpus"),
    [
        ("4 per node", 4),
        ("A100, 4 GPUs/node", 4),
        ("4 GPUs a node", 4),
        ("8 GPUs per node", None),
        ("4 nodes", None),
    ],
)
def test_nodes_that_a_row_names_are_its_clusters(words: str, gpus: int | None) -> None:
    pytest.importorskip("torch", reason="needs the [torch] extra")
    from echograph.simulator.clusters import load_cluster

    found = made(notes=words)
    cluster = load_cluster(found.plan.cluster, found.settings)
    assert (cluster.gpus_per_node, cluster.domain_gpus, cluster.network.nics_per_node) == ((gpus or 8,) * 3)
    assert any("nodes of 4" in line for line in found.assumed) == bool(gpus)


def test_groups_of_zero_3_are_copies() -> None:
    pytest.importorskip("torch", reason="needs the [torch] extra")
    change = {"n_gpus": 16, "tp": 1, "dp": 16}
    assert made(zero_stage="3 (8-GPU groups)", **change).plan.hsdp_replicas == 2
    assert "zero 3 over all replicas" in made(zero_stage="3 by hand", **change).assumed


def test_dense_models_of_automodel_are_hugging_faces_compiled_on_several_gpus() -> None:
    pytest.importorskip("torch", reason="needs the [torch] extra")
    many = made(trainer="NeMo AutoModel", model="Llama3 8B", tp=1, dp="", hidden=4096, heads=32, kv_heads=8)
    one = made(trainer="NeMo AutoModel", model="Llama3 8B LoRA", tp=1, dp="", n_gpus=1)
    assert [found.plan.stack for found in (many, one)] == ["inductor", "fsdp"]


def test_experts_that_a_row_leaves_out_are_those_of_the_recipe() -> None:
    pytest.importorskip("torch", reason="needs the [torch] extra")
    sizes = dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "dp"), "")
    for gpus, said, ranks in ((8, "", 8), (64, "-", 64), (64, 8, 8)):
        row = sizes | {"model": "GPT-OSS 120B", "tp": 1, "n_gpus": gpus, "ep": said, "global_batch": 2 * gpus}
        found = made(trainer="NeMo AutoModel", zero_stage="fsdp2", **row)
        assert found.plan.ep == ranks
        assert (f"ep {ranks} by default" in found.assumed) == (said in ("", "-"))


def test_an_empty_cell_is_what_its_trainer_does_and_says_so() -> None:
    pytest.importorskip("torch", reason="needs the [torch] extra")
    empty = {"sequence_parallel": "", "zero_stage": "", "recompute": "", "precision": ""}
    known, guessed = made(trainer="NeMo 24.07", **empty), made(trainer="abacus", **empty)
    assert (known.plan.zero, known.plan.sequence_parallel, known.plan.recompute) == (1, True, "none")
    assert (guessed.plan.zero, guessed.plan.sequence_parallel, guessed.spec.dtype) == (0, False, "bf16")
    for column, value in (("zero_stage", "1"), ("sequence_parallel", "yes"), ("recompute", "none")):
        assert f"{column} {value} by default" in known.assumed
        assert any(line.startswith(column) and line.endswith("(a guess)") for line in guessed.assumed)
    alone = made(trainer="abacus", **empty | {"tp": 1, "n_gpus": 1, "dp": 1})
    assert not any(line.startswith(("zero_stage", "sequence_parallel")) for line in alone.assumed)
    assert made(trainer="fms-fsdp", recompute="Selective AC").plan.recompute == "full"


@pytest.mark.parametrize(
    ("trainer", "said", "attention"),
    [
        ("Megatron-DeepSpeed", "", "fused-softmax"), ("Megatron-LM 2021", "", "fused-softmax"),
        ("Megatron-LM v0.12", "", "sdpa"), ("abacus", "", "sdpa"), ("GPT-NeoX", "flash", "sdpa"),
        ("Megatron-Core", "unfused", "fused-softmax"), ("PyTorch FSDP", "unfused", "eager"),
        ("HF Transformers", "unfused", "eager"), ("FSDP", "unfused, fused softmax", "fused-softmax"),
    ],
)  # fmt: skip
def test_attention_that_a_row_leaves_out_is_its_trainers(trainer: str, said: str, attention: str) -> None:
    pytest.importorskip("torch", reason="needs the [torch] extra")
    found = made(trainer=trainer, attention=said)
    assert found.model.attention == attention
    assert ("fused attention" in found.assumed) == (not said and attention == "sdpa")
    assert ("attention unfused by default" in found.assumed) == (not said and attention != "sdpa")


def test_dualpipe_is_that_of_two_chunks_whose_exchanges_hide() -> None:
    pytest.importorskip("torch", reason="needs the [torch] extra")
    sizes = dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "dp"), "")
    row = sizes | {"model": "DeepSeek-V3", "n_gpus": 128, "tp": 1, "pp": 8, "ep": 16, "attention": "flash"}
    for change in ({"notes": "DualPipe, DeepEP"}, {"trainer": "HAI-LLM"}):
        found = made(**row | {"precision": "fp8", "global_batch": 256} | change)
        assert (found.plan.schedule, found.plan.vpp) == ("dualpipe-v", 2)
        assert found.plan.overlap_moe_expert_parallel_comm
        assert "DualPipe as DualPipeV" in found.assumed
    assert (found.plan.precision, found.plan.moe_dispatcher, found.plan.zero) == ("fp8-blockwise", "deepep", 0)
    exact = made(**row | {"notes": "DualPipeV", "ep": 1, "global_batch": 256})
    assert not exact.plan.overlap_moe_expert_parallel_comm
    assert "DualPipe as DualPipeV" not in exact.assumed
    assert made(notes="without DualPipe", pp=2, dp=2).plan.schedule == ""
    assert made(schedule="1F1B", pp=2, dp=2).plan.schedule == ""
    assert made(trainer="HAI-LLM", pp=1).plan.schedule == made(notes="DualPipe", pp=1).plan.schedule == ""


def test_what_nothing_hangs_on_is_not_assumed() -> None:
    pytest.importorskip("torch", reason="needs the [torch] extra")
    empty = {"vpp": "", "ep": "", "cp": ""}
    dense = made(**empty).assumed
    assert "cp 1" in dense and not {"vpp 1", "ep 1"} & set(dense)
    assert "vpp 1" in made(pp=2, dp=2, **empty).assumed
    sizes = dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "dp"), "")
    assert "ep 1" in made(**sizes | empty | {"model": "Mixtral 8x7B"}).assumed


def test_ddp_of_megatron_divides_the_optimizer_as_its_trainer_does() -> None:
    pytest.importorskip("torch", reason="needs the [torch] extra")
    assert [made(trainer=name, zero_stage="DDP").plan.zero for name in ("nemo 24.07", "abacus")] == [1, 0]


@pytest.mark.parametrize(
    ("notes", "stack"),
    [
        ("torch.compile", "inductor"), ("FSDP, compiled", "inductor"), ("compile=true", "inductor"),
        ("compile=false", "fsdp"), ("without torch.compile", "fsdp"), ("no compile", "fsdp"), ("", "fsdp"),
    ],
)  # fmt: skip
def test_an_unknown_trainer_that_compiles_runs_compiled_kernels(notes: str, stack: str) -> None:
    pytest.importorskip("torch", reason="needs the [torch] extra")
    assert made(notes=notes, zero_stage="FSDP", attention="flash", trainer="abacus").plan.stack == stack
    assert made(zero_stage="FSDP", attention="flash", trainer=f"abacus, {notes}").plan.stack == stack


def test_recomputation_that_is_left_open_is_what_the_memory_needs() -> None:
    pytest.importorskip("torch", reason="needs the [torch] extra")
    large = {
        "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn_hidden": 28672, "vocab": 32000, "layers": 80,
        "seq_len": 8192, "params_B": 69, "zero_stage": "FSDP", "tp": 1, "n_gpus": 64, "dp": 64, "micro_batch": 2,
        "global_batch": 128, "recompute": "",
    }  # fmt: skip
    found = made(**large)
    assert found.plan.recompute == "full"
    assert "recompute full, as it does not fit without" in found.assumed
    for change in ({"recompute": "none"}, {"seq_len": 512, "micro_batch": 1}, {"zero_stage": "DDP"}):
        assert made(**large | change).plan.recompute == "none"
    # Of a GPT of Megatron-LM: 16 bytes a parameter divided by 8, and 22 h of each token and layer in 16 bit.
    one = made(zero_stage="3", tp=1, dp=8)
    hidden, layers, tokens = 128, 2, 2 * 64
    state, kept = least_bytes(one.model, one.plan, 64)
    assert (state, kept) == (12 * hidden**2 * layers * 16 // 8, 26 * hidden * layers * tokens)


def test_a_published_model_of_another_width_is_skipped() -> None:
    pytest.importorskip("torch", reason="needs the [torch] extra")
    assert made(model="Qwen2.5 7B", hidden=3584, heads=28, kv_heads=4).model.entry.name == "qwen2.5-7b"
    with pytest.raises(Skip, match="hidden is 128, and that of qwen"):
        made(model="Qwen2.5 7B")


@pytest.mark.parametrize("batch", ["", "32"])
def test_samples_of_a_step_are_told_by_its_rate_or_without_accumulation(batch: str) -> None:
    pytest.importorskip("torch", reason="needs the [torch] extra")
    rate = {"global_batch": batch, "tokens_per_s_per_gpu": 64, "micro_batch": 4}
    both = made(step_time_s=4, **rate)
    assert both.plan.global_batch == 32
    assert ("samples of a step by its rate" in both.assumed) == (not batch)
    alone = MeasuredStep({k: str(v) for k, v in (ROW | rate | {"step_time_s": ""}).items()})
    assert setup(alone).plan.global_batch == int(batch or 16)
    assert alone.measured_s == int(batch or 16) * 64 / (64 * 8)
    with pytest.raises(Skip, match="global_batch is empty"):
        MeasuredStep(alone.columns | {"global_batch": "", "pp": "2"}).measured_s  # noqa: B018


@pytest.mark.parametrize(
    ("trainer", "stack"),
    [
        ("NeMo 24.07", "nemo-1"), ("nemo 23.11", "nemo-1"), ("NeMo 24.09", "nemo"),
        ("NeMo AutoModel", "automodel"), ("automodel", "automodel"),
        ("Megatron-LM v0.12", "megatron-core"),
        ("Megatron Core", "megatron-core"), ("megatron_lm 2021", "megatron-2021"), ("TorchTitan", "torchtitan"),
        ("megatron-lm 2022", "megatron-2021"), ("megatron-lm 2024", "megatron-core"), ("nemo 25.02", "nemo-2"),
        ("nemo 24.12", "nemo"), ("torchtitan", "torchtitan"),
    ],
)  # fmt: skip
def test_the_trainer_names_the_stack(trainer: str, stack: str) -> None:
    pytest.importorskip("torch", reason="needs the [torch] extra")
    for name in ("toy-001", "titan-001"):
        found = made(trainer=trainer, id=name)
        assert found.plan.stack == stack
        assert not any("trainer" in line for line in found.assumed)


@pytest.mark.parametrize(
    ("change", "attention"),
    [
        ({}, "fused-softmax"), ({"tp": 4, "dp": 2}, "eager"),
        ({"tp": 4, "dp": 2, "micro_batch": 4}, "fused-softmax"), ({"seq_len": 2048}, "fused-softmax"),
        ({"seq_len": 4096}, "eager"), ({"seq_len": 66}, "eager"),
        ({"tp": 4, "dp": 2, "attention": "flash"}, "sdpa"),
    ],
)  # fmt: skip
def test_scores_that_megatrons_softmax_does_not_take(change: dict[str, Any], attention: str) -> None:
    pytest.importorskip("torch", reason="needs the [torch] extra")
    assert made(trainer="megatron-lm 2021", **change).model.attention == attention


@pytest.mark.parametrize(
    ("plan", "stack"),
    [
        ({"attention": "unfused"}, "megatron-2021"), ({"pp": 2, "dp": 2}, "megatron-core"), ({}, "megatron-core"),
        ({"pp": 2, "dp": 2, "zero_stage": "fsdp3"}, "megatron-core"), ({"zero_stage": "fsdp3"}, "fsdp"),
        ({"tp": 1, "dp": 8, "zero_stage": "3"}, "deepspeed"), ({"tp": 1, "dp": 8, "zero_stage": "1"}, "deepspeed"),
        ({"tp": 1, "dp": 8}, "eager"),
    ],
)  # fmt: skip
def test_the_plan_hints_at_the_stack_of_an_unknown_trainer(plan: dict[str, Any], stack: str) -> None:
    pytest.importorskip("torch", reason="needs the [torch] extra")
    change = {"attention": "flash", "zero_stage": "0"} | plan
    for trainer, named in (("nemofish", "trainer 'nemofish'"), ("", "no trainer named")):
        found = made(trainer=trainer, **change)
        assert found.plan.stack == stack
        assert f"{named}: stack {stack}" in found.assumed


@pytest.mark.parametrize(
    ("gpu", "cluster"),
    [
        ("H100", "dgx-h100"), ("DGX-H100", "dgx-h100"), ("NVIDIA H100 80GB HBM3", "dgx-h100"),
        ("H200 SXM", "dgx-h200"), ("nvidia_a100-sxm4-80gb", "dgx-a100"), ("A100-40G", "azure-nd-a100-v4"),
        ("DGX-A100 (8x40G)", "azure-nd-a100-v4"), ("40GB A100", "azure-nd-a100-v4"),
        ("DGX-A100 640GB", "dgx-a100"),
        ("AMD Instinct MI300", "mi300x-node"), ("nvidia h200", "dgx-h200"),
        ("A100-80GB-SXM4", "dgx-a100"), ("A100-SXM4-40GB", "azure-nd-a100-v4"), ("DGX-GB300", "gb300-nvl72"),
        ("DGX-B200", "dgx-b200"), ("H100-96GB-HBM2e-500W", "grand-teton-h100"),
        ("NVIDIA L40S 48GB", "ethernet-100g"), ("RTX PRO 6000 Blackwell", "rtx-pro-6000-node"),
    ],
)  # fmt: skip
def test_spellings_of_gpus(gpu: str, cluster: str) -> None:
    pytest.importorskip("torch", reason="needs the [torch] extra")
    found = made(gpu_type=gpu)
    assert found.plan.cluster == cluster
    assert any("clocks" in line for line in found.assumed) == ("500W" in gpu)


@pytest.mark.parametrize("gpu", ["H100 PCIe", "A100-PCIE-40GB", "H100 NVL", "abacus", "XB200", "MI300A"])
def test_a_gpu_without_a_preset_is_skipped(gpu: str) -> None:
    pytest.importorskip("torch", reason="needs the [torch] extra")
    with pytest.raises(Skip, match="has no cluster preset"):
        made(gpu_type=gpu)


def test_stage_2_in_a_pipeline_reduces_gradients_once() -> None:
    pytest.importorskip("torch", reason="needs the [torch] extra")
    pipeline = {"tp": 1, "pp": 2, "n_gpus": 8, "dp": 4}
    assert made(zero_stage="2", **pipeline).plan.zero == 1
    assert "gradients reduced once a step" in made(zero_stage="2", **pipeline).assumed
    assert made(zero_stage="2", tp=1, dp=8, n_gpus=8).plan.zero == 2


def test_what_single_runs_did_is_read_off_their_columns() -> None:
    pytest.importorskip("torch", reason="needs the [torch] extra")
    bloom = {"trainer": "megatron-deepspeed 2022", "tp": 1, "dp": ""}
    tables = ("chronicles § Best TFLOPs", "chronicles § 48 node contenders")
    assert [made(source=source, **bloom).blocking for source in tables] == [False, True]
    large = {"trainer": "llm-foundry 2023", "model": "MPT-7b", "tp": 1, "dp": ""}
    gpus = {"H100-SXM-80GB": 128, "A100-SXM-80GB": 128, "H100-SXM-80GB (p5)": 64}
    plans = [made(gpu_type=gpu, n_gpus=n, global_batch=2 * n, **large).plan for gpu, n in gpus.items()]
    assert [plan.stack for plan in plans] == ["llm-foundry-2024", "llm-foundry", "llm-foundry"]
    assert [plan.recompute_early_stop for plan in plans] == [True, None, None]
    assert made(source="chronicles, Rebalancing layers", **bloom).plan.stack == "megatron-deepspeed"
    assert made(**bloom).plan.grad_dtype == ""
    assert made(notes="4xHDR200 per node").plan.cluster == "a100-4x-hdr200"
    assert made(trainer="torchtitan", notes="eager bf16").plan.stack == "fsdp"


@pytest.mark.parametrize(
    ("stage", "plan"),
    [
        ("", (0, 1, 1, None)), ("1 (8-GPU groups)", (1, 1, 2, None)), ("1 (16-GPU groups)", (1, 1, 1, None)),
        ("fsdp3", (3, 1, 1, None)), ("hsdp3", (3, 2, 1, None)), ("fsdp2(SHARD_GRAD_OP)", (3, 1, 1, False)),
    ],
)  # fmt: skip
def test_spellings_of_what_is_sharded(stage: str, plan: tuple[object, ...]) -> None:
    pytest.importorskip("torch", reason="needs the [torch] extra")
    found = made(zero_stage=stage, n_gpus=16, tp=1, dp=16).plan
    copies = found.hsdp_replicas, found.distributed_optimizer_instances
    assert (found.zero, *copies, found.reshard_after_forward) == plan


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("DeepSeekV3 (w/o MTP)", "deepseek-v3"), ("Qwen3_30B_a3B (tokendrop)", "qwen3-30b-a3b"),
        ("GPT OSS 120B", "gpt-oss-120b"), ("Nemotron4-15B", "nemotron-4-15b"),
        ("Nemotron_3_Nano", "nemotron-3-nano-30b-a3b"), ("Qwen3 235B", "qwen3-235b-a22b"),
        ("LLAMA3_70B LoRA", "llama-3-70b"), ("GPT toy", None), ("mosaic", None),
        ("DeepSeek V3 671B", "deepseek-v3"), ("Nemotron V3 Super 120B", "nemotron-3-super-120b-a12b"),
        ("Qwen3 MoE 235B", "qwen3-235b-a22b"), ("LLAMA3-405B", "llama-3.1-405b"), ("Nemotron-8B", "nemotron-3-8b"),
        ("GPT3-5B", "gpt3-5b"), ("GPT-2 (124M)", "gpt2"), ("GPT-2 (1.5B)", None), ("Llama 70B", None),
        ("DeepSeek V3 236B", None), ("Qwen3 235B (22B active)", "qwen3-235b-a22b"),
    ],
)  # fmt: skip
def test_public_models_are_known_by_free_spellings(name: str, known: str | None) -> None:
    found = public_model(name)
    assert (found and found.name) == known


@pytest.mark.torch
def test_copies_of_a_sharded_model_are_predicted() -> None:
    pytest.importorskip("transformers", reason="needs the [torch] extra")
    change = {"zero_stage": "hsdp3", "n_gpus": 16, "tp": 1, "dp": 16, "global_batch": 32, "trainer": "fms-fsdp"}
    (outcome,) = predict_rows([MeasuredStep({k: str(v) for k, v in (ROW | change).items()})])
    assert outcome.predicted_s and "sharded within nodes" in outcome.assumed


def test_a_gate_is_told_by_the_parameters_that_a_row_states() -> None:
    pytest.importorskip("torch", reason="needs the [torch] extra")
    sizes = {"hidden": 4096, "heads": 32, "kv_heads": 32, "ffn_hidden": 11008, "vocab": 103168, "layers": 32}
    found = [made(model="InternLM-7B", params_B=b, **sizes).model.entry.architecture for b in (7.3, 5.5)]
    assert found == ["LlamaForCausalLM", "GPT2LMHeadModel"]


def test_a_shallow_models_second_embedding_is_no_gate() -> None:
    """Four layers of Llama 405B: two embeddings of 2.1 B beside layers of 12.75 B, as 17.0 B says."""
    pytest.importorskip("torch", reason="needs the [torch] extra")
    sizes = {"layers": 4, "hidden": 16384, "heads": 128, "kv_heads": 8, "ffn_hidden": 53248, "vocab": 128256}
    found = made(model="405B, cut", params_B=17.0, **sizes).model.entry.config
    assert (found["hidden_act"], found["intermediate_size"]) == ("silu", 53248)
    # Learned positions of 65,536 tokens are no gate either.
    sizes = {"layers": 24, "hidden": 1024, "heads": 16, "kv_heads": 16, "ffn_hidden": 4096, "vocab": 50368}
    found = made(model="mine", params_B=0.421, **sizes)
    assert found.model.entry.architecture == "GPT2LMHeadModel"
    # What agrees with neither is told.
    found = made(model="mine", params_B=0.25, **sizes)
    assert "a feed-forward network without a gate" in found.assumed


def test_dense_layers_of_a_model_cut_short_are_told() -> None:
    pytest.importorskip("torch", reason="needs the [torch] extra")
    said = {"model": "DeepSeek-V3", "n_gpus": 8, "tp": 1, "dp": 8, "ep": 8, "seq_len": 4096, "global_batch": 32}
    row = MeasuredStep({"id": "x-1", "gpu_type": "H100", "step_time_s": "1", "trainer": "Megatron-LM"})
    cut, whole = (
        setup(MeasuredStep(row.columns | {k: str(v) for k, v in (said | {"layers": n}).items()})).assumed
        for n in (4, 61)
    )
    assert "its first 3 of 4 layers dense, as published of 61" in cut
    assert not any("layers dense" in line for line in whole)


@pytest.mark.parametrize(("trainer", "samples"), [("torchtitan", 2), ("nemo 25.02", 1), ("", 1)])
def test_a_micro_batch_that_a_row_leaves_out_is_its_trainers_default(trainer: str, samples: int) -> None:
    pytest.importorskip("torch", reason="needs the [torch] extra")
    pipeline = {"tp": 1, "pp": 2, "dp": 4, "global_batch": 16, "micro_batch": ""}
    assert made(trainer=trainer, **pipeline).plan.micro_batch == samples


def test_torchtitan_counts_micro_batches_by_ranks_until_2025_and_by_chunks_since() -> None:
    pytest.importorskip("torch", reason="needs the [torch] extra")
    pipeline = {
        "tp": 1,
        "pp": 2,
        "vpp": 2,
        "dp": 4,
        "global_batch": 32,
        "micro_batch": "",
        "trainer": "torchtitan",
    }
    reports = ("benchmarks/llama3_h100_202412_torchtitan.md", "benchmarks/llama3_h100_202506_torchtitan.md")
    assert [made(**pipeline, source=report).plan.micro_batch for report in reports] == [4, 2]


def test_a_rate_or_a_utilisation_stands_for_a_step_time() -> None:
    said = {"step_time_s": "", "seq_len": 2048, "global_batch": 64, "n_gpus": 8}
    row = MeasuredStep({k: str(v) for k, v in (ROW | said | {"tokens_per_s_per_gpu": 4096}).items()})
    assert row.measured_s == 4.0
    shape = {"mfu": 0.5, "params_B": 1, "layers": 10, "hidden": 1000}
    row = MeasuredStep({k: str(v) for k, v in (ROW | said | shape).items()})
    each = 6e9 + 12 * 10 * 1000 * 2048
    assert row.measured_s == pytest.approx(64 * 2048 * each / (0.5 * 312e12 * 8))
    rate = {"tflops_per_gpu": 156, "params_B": 1, "layers": 10, "hidden": 1000, "recompute": "none"}
    assert MeasuredStep({k: str(v) for k, v in (ROW | said | rate).items()}).measured_s == row.measured_s
    for change, why in (
        ({}, "no step time"), (rate | {"recompute": "full"}, "computed again"), (rate | {"ep": 8}, "experts"),
    ):  # fmt: skip
        with pytest.raises(Skip, match=why):
            MeasuredStep({k: str(v) for k, v in (ROW | said | change).items()}).measured_s  # noqa: B018


@pytest.mark.parametrize(
    ("said", "attention"),
    [
        ("unfused", "fused-softmax"), ("Unfused, ALiBi", "fused-softmax"), ("eager", "eager"),
        ("math SDPA", "eager"), ("no flash attention", "eager"), ("SDPA Flash v2", "sdpa"),
        ("nocturne", "sdpa"), ("", "sdpa"),
    ],
)  # fmt: skip
def test_spellings_of_attention(said: str, attention: str) -> None:
    pytest.importorskip("torch", reason="needs the [torch] extra")
    assert made(attention=said).model.attention == attention


@pytest.mark.parametrize(
    ("batch", "samples"),
    [("4M", 2048), ("4M tokens", 2048), ("0.5M", 256), ("3.2001M", 1563), ("4194304 tokens", 2048), ("512", 512)],
)
def test_steps_may_be_counted_in_tokens(batch: str, samples: int) -> None:
    assert MeasuredStep({"global_batch": batch, "seq_len": "2048"}).global_batch == samples


def test_data_parallel_ranks_may_count_those_of_the_context() -> None:
    pytest.importorskip("torch", reason="needs the [torch] extra")
    for dp, said in ((4, True), (2, False)):
        found = made(tp=2, cp=2, n_gpus=8, dp=dp)
        assert ("dp counts context-parallel ranks" in found.assumed) == said
    with pytest.raises(Skip, match="not tp x pp x cp x dp"):
        made(tp=2, cp=2, n_gpus=8, dp=3)


def test_numbers_are_read_as_tables_print_them() -> None:
    row = MeasuredStep(
        {"n_gpus": "1,024", "seq_len": "8K", "vpp": "-", "pp": "n/a", "cp": "2.0", "tp": "2.5", "dp": "x"}
    )
    assert [row.number(name, 1) for name in ("n_gpus", "seq_len", "vpp", "pp", "cp", "ep")] == [
        1024,
        8192,
        1,
        1,
        2,
        1,
    ]
    for name in ("tp", "dp"):
        with pytest.raises(Skip, match=name):
            row.number(name, 1)
    row = MeasuredStep({"a": "843 ms", "b": "16,186", "c": "2.5s", "d": "fast", "e": "-1", "f": "", "g": "nan"})
    assert [row.real(name) for name in "abcdefg"] == [pytest.approx(0.843), 16186.0, 2.5, None, None, None, None]


def test_a_utilisation_is_a_share_or_percent_of_the_peak_in_16_bit() -> None:
    said = {"step_time_s": "", "seq_len": 2048, "global_batch": 64, "n_gpus": 8}
    said |= {"params_B": 1, "layers": 10, "hidden": 1000, "mfu": 0.5}

    def seconds(**change: object) -> float:
        return MeasuredStep({k: str(v) for k, v in (ROW | said | change).items()}).measured_s

    assert seconds(mfu="50%") == seconds(mfu=50) == seconds(mfu=0.5) == 2 * seconds(mfu=1)
    assert seconds(gpu_type="DGX-A100") == seconds(gpu_type="80GB A100") == seconds()
    assert seconds(gpu_type="NVIDIA GB200 NVL72") == pytest.approx(seconds() * 312 / 2500)
    assert seconds(mfu=0.5, tflops_per_gpu=156, precision="fp8", recompute="No AC") == seconds()
    for change, why in (({"precision": "fp8"}, "which precision's peak"), ({"seq_len": 131072}, "is masked")):
        with pytest.raises(Skip, match=why):
            seconds(**change)


def test_a_public_name_stands_for_the_sizes_that_a_row_leaves_out() -> None:
    pytest.importorskip("torch", reason="needs the [torch] extra")
    row = MeasuredStep({"model": "LLaMA-65B", "layers": "40", "heads": ""})
    assert (with_known_sizes(row).number("layers"), with_known_sizes(row).number("heads")) == (40, 64)
    assert with_known_sizes(row).real("params_B") == pytest.approx(65.3, abs=0.1)
    for name in ("Mixtral-8x7B", "abacus"):
        assert with_known_sizes(MeasuredStep({"model": name})).columns == {"model": name}


@pytest.mark.parametrize(("width", "gated"), [(4096, False), (3584, True), ("", False)])
def test_a_gate_is_told_by_the_width_where_no_parameters_are_stated(width: object, gated: bool) -> None:
    pytest.importorskip("torch", reason="needs the [torch] extra")
    found = made(model="abacus", hidden=1024, heads=8, kv_heads=8, ffn_hidden=width, params_B="")
    assert (found.model.entry.architecture == "LlamaForCausalLM") == gated
    assert f"a feed-forward network with{'' if gated else 'out'} a gate" in found.assumed


@pytest.mark.parametrize(
    ("text", "gib"), [("47", 47.0), ("82.4", 82.4), ("", None), ("47GB", None), ("nan", None)]
)
def test_a_peak_that_is_no_number_is_none(text: str, gib: float | None) -> None:
    row = MeasuredStep({k: str(v) for k, v in (ROW | {"peak_mem_gib": text}).items()})
    assert measured_memory(row) == (None if gib is None else round(gib * GIB))


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "stages"),
    [(8, 4, 1, ""), (10, 4, 1, "2,3,3,2"), (6, 2, 2, "1,2,2,1"), (9, 4, 1, "")],
)
def test_embedding_and_loss_take_a_layers_slot_where_layers_do_not_divide(
    layers: int, pp: int, vpp: int, stages: str
) -> None:
    pytest.importorskip("torch", reason="needs the [torch] extra")
    change = {"layers": layers, "pp": pp, "vpp": vpp, "n_gpus": 2 * pp, "dp": 1}
    assert setup(MeasuredStep({k: str(v) for k, v in (ROW | change).items()})).plan.stage_layers == stages


@pytest.mark.torch
def test_deeper_models_and_more_replicas_share_a_capture() -> None:
    """Every row is what a capture and a plan of its own give."""
    pytest.importorskip("transformers", reason="needs the [torch] extra")
    from echograph.workflow.compile import compile_entry
    from echograph.workflow.predict import predict

    changes = ({"layers": 6, "dp": 2, "n_gpus": 4}, {"layers": 6}, {"layers": 8, "dp": 8, "n_gpus": 16})
    rows = [ROW | {"id": f"toy-{n}", "global_batch": 4 * (c.get("dp") or 4)} | c for n, c in enumerate(changes)]
    read = [MeasuredStep({k: str(v) for k, v in row.items()}) for row in rows]
    for row, outcome in zip(read, predict_rows(read), strict=True):
        made = setup(row)
        model = made.model
        alone = compile_entry(
            model.entry, made.spec, batch_size=2, seq_len=made.seq_len, attention=model.attention
        )
        assert outcome.predicted_s == predict(alone, made.plan)[0].to_json()["step_time_s"]


@pytest.mark.parametrize(
    ("text", "words"),
    [("a,b\n1,2\n", "has no column id"), ("id,model,gpu_type,n_gpus,step_time_s\n", "no row"), ("\x00\xff", "")],
)
def test_a_wrong_table_is_one_line(cli, tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(text.encode("latin-1"))
    outcome = cli("echosim", "validate", path)
    assert outcome.status == 1
    assert words in outcome.err
    assert outcome.err.count("\n") == 1


def test_errors_are_relative_and_signed() -> None:
    rows = [
        Outcome(id="f-1", family="f", measured_s=2.0, predicted_s=1.0, peak_bytes=3, measured_peak_bytes=2),
        Outcome(id="f-2", family="f", measured_s=2.0, predicted_s=3.0, interval_s=(1.9, 4.0)),
        Outcome(id="f-3", family="f", skipped="why"),
        Outcome(id="f-4", family="f", measured_s=2.0, predicted_s=3.0, interval_s=(2.1, 4.0)),
    ]
    found = by_family(rows, {})["f"]
    assert (found["mean_abs_error"], found["bias"]) == (0.5, pytest.approx(1 / 6))
    assert found["in_interval"] == 0.5
    assert found["memory"] == {"rows": 1, "mean_abs_error": 0.5, "median_abs_error": 0.5, "bias": 0.5}
    assert [row["id"] for row in found["worst"]] == ["f-1", "f-2", "f-4"]


def test_a_table_or_a_trace_and_not_both(cli, tmp_path: Path) -> None:
    neither = cli("echosim", "validate")
    assert neither.status == 2
    assert "give a table of measured steps, or --trace FOLDER" in neither.err
    table = write(tmp_path / "t.csv", ROW)
    asked = cli("echosim", "validate", table, "--model", "gpt2", "--tp", "2")
    assert asked.status == 2
    assert "--model, --tp: only with --trace" in asked.err
    family = cli("echosim", "validate", "--trace", tmp_path, "--family", "toy")
    assert family.status == 2
    assert "--family: of a table of steps" in family.err


def test_a_profile_is_corrected_by_a_trace_alone(cli, tmp_path: Path) -> None:
    found = cli("echoprof", "fit", "--trace", tmp_path, "--kernels", tmp_path / "k.csv", "-o", tmp_path / "p")
    assert found.status == 2
    assert "--trace: a profile is corrected by one trace alone" in found.err
