"""A measured row as a model, a step, a plan and a cluster; what a row does not say is assumed, and counted."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from echograph.workflow.plan import Plan
from echograph.workflow.validation.model import RowModel, model_of
from echograph.workflow.validation.table import MeasuredStep, Skip
from echograph.workflow.validation.trainers import Trainer, machine_of, trainer_of

if TYPE_CHECKING:
    from echograph.frontend.pytorch.spec import StepSpec

RECOMPUTE = {"": "none", "none": "none", "full": "full", "selective": "selective", "selective(op)": "selective-op"}
ZERO = re.compile(r"(?:(?P<hsdp>hsdp)|fsdp|zero-?)?(?P<stage>[0-3])(?P<more>[^0-9].*)?")
"""Spellings of a stage: 1, "fsdp3", "hsdp3", "1 (8-GPU groups)", "fsdp2(SHARD_GRAD_OP)"."""
GROUPS = re.compile(r"\((?P<gpus>[0-9]+)-GPU groups\)")
"""How many ranks divide the optimizer among themselves, as of "1 (8-GPU groups)"."""
PRECISION = {
    "fp32": ("fp32", ""), "fp16": ("fp16", ""), "bf16": ("bf16", ""), "amp_bf16": ("bf16", ""),
    "bf16 te": ("bf16", ""), "fp8": ("bf16", "fp8"), "fp8-hybrid": ("bf16", "fp8"), "fp8-cs": ("bf16", "fp8"),
    "fp8 tensorwise": ("bf16", "fp8"), "fp8 rowwise": ("bf16", "fp8-rowwise"), "amp_fp8": ("bf16", "fp8"),
    "mxfp8": ("bf16", "mxfp8"), "fp8-mx": ("bf16", "mxfp8"), "fp8-sc": ("bf16", "fp8-blockwise"),
    "nvfp4": ("bf16", "nvfp4"),
}  # fmt: skip
"""Type of the step and precision of its matrix products."""


NODE = 8
"""GPUs among which a model is sharded that has copies (HSDP), where a row does not say how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a row is simulated as.

    Attributes:
        model: the model.
        spec: the rest of the step.
        plan: how it is spread.
        seq_len: tokens of a sample.
        assumed: what the row does not say, one line each.
        blocking: whether every launch waited for its kernel.
        layer_alone: whether the figure is of the layers alone, without embedding, loss and optimizer.
    """

    model: RowModel
    spec: StepSpec
    plan: Plan
    seq_len: int
    assumed: tuple[str, ...]
    blocking: bool
    layer_alone: bool

    @property
    def key(self) -> tuple[object, ...]:
        """Rows with one key share a captured step, whatever their layers and micro-batches."""
        entry = self.model.of_layers(0)
        shape = tuple(sorted((k, str(v)) for k, v in entry.config.items()))
        return entry.architecture, shape, self.model.attention, self.spec, self.seq_len

    @property
    def micro_batch(self) -> int:
        """Samples of a micro-batch."""
        return self.plan.micro_batch or 1


def setup(row: MeasuredStep) -> Setup:
    """The model, step and plan of a row.

    Raises:
        Skip: the row says too little, or what no plan can be.
    """
    from echograph.frontend.pytorch.spec import StepSpec

    assumed: list[str] = []
    dtype, precision = _known(PRECISION, row, "precision")
    trainer = trainer_of(row)
    if trainer.guessed:
        assumed.append(f"trainer '{row.text('trainer')}': stack {trainer.stack}")
    model = model_of(row, trainer, assumed)
    plan, seq_len = _plan(row, trainer, model.layers, precision, assumed), row.number("seq_len")
    if model.attention == "fused-softmax" and not _softmax_fuses(row, plan, seq_len):
        model = replace(model, attention="eager")
    return Setup(
        model=model,
        spec=StepSpec(dtype=dtype, **trainer.step, **_adapters(row, trainer, assumed)),
        plan=plan,
        seq_len=seq_len,
        assumed=tuple(assumed),
        blocking=trainer.launch_blocking,
        layer_alone="layer only" in row.text("notes"),
    )


def _softmax_fuses(row: MeasuredStep, plan: Plan, seq_len: int) -> bool:
    """Whether Megatron-LM's kernel for scale, mask and softmax has a form for a rank's scores.

    NVIDIA/Megatron-LM v2.0 to v2.6, megatron/model/fused_softmax.py: rows of 17 to 2,048 keys, by fours in
    a matrix and over the matrices. Other scores are scaled, masked and normalised one by one.
    """
    matrices = (plan.micro_batch or 1) * row.number("heads", plan.tp) // plan.tp
    return 16 < seq_len <= 2048 and seq_len % 4 == 0 and matrices % 4 == 0


def _known(table: dict[str, Any], row: MeasuredStep, column: str) -> Any:
    value = row.text(column)
    for spelling in (value, value.lower(), _bare(value.lower())):
        if spelling in table:
            return table[spelling]
    raise Skip(f"{column} '{value}' is not modelled")


def _bare(text: str) -> str:
    """A text without what stands in parentheses."""
    return re.sub(r"\s*\([^)]*\)", "", text).strip()


def _plan(row: MeasuredStep, trainer: Trainer, layers: int, precision: str, assumed: list[str]) -> Plan:
    machine = machine_of(row)
    if machine.assumed:
        assumed.append(machine.assumed)
    sizes = {name: row.number(name, 1) for name in ("tp", "pp", "vpp", "cp", "ep")}
    assumed += [f"{name} 1" for name in sizes if not row.text(name)]
    gpus, model = row.number("n_gpus"), sizes["tp"] * sizes["pp"] * sizes["cp"]
    if gpus % model or row.number("dp", gpus // model) * model != gpus:
        raise Skip(f"{gpus} GPUs are not tp x pp x cp x dp")
    if row.text("recompute") == "see recipe":
        assumed.append("no recomputation")
    recompute = "none" if row.text("recompute") == "see recipe" else _known(RECOMPUTE, row, "recompute")
    zero = _zero(row, gpus // model, sizes["pp"], assumed)
    return Plan(
        gpus=gpus,
        cluster=machine.cluster,
        tp=sizes["tp"],
        pp=sizes["pp"],
        vpp=sizes["vpp"],
        stage_layers=_stage_layers(layers, sizes["pp"] * sizes["vpp"], trainer.step.get("mtp_num_layers", 0)),
        cp=sizes["cp"],
        ep=sizes["ep"],
        # More ranks than there are with data of their own: those of a tensor-parallel group are among them.
        etp=1 if sizes["ep"] > gpus // model * sizes["cp"] else None,
        sequence_parallel=row.text("sequence_parallel") == "yes" and sizes["tp"] > 1,
        **zero,
        capacity_factor=1.0 if "tokendrop" in row.text("model") else None,
        recompute=recompute,
        precision=precision,
        stack=trainer.stack,
        micro_batch=_micro_batch(row, trainer, gpus // model, sizes, assumed),
        global_batch=row.number("global_batch"),
        **trainer.set,
    )


def _adapters(row: MeasuredStep, trainer: Trainer, assumed: list[str]) -> dict[str, Any]:
    """What is trained of a row that says LoRA; nothing where all is."""
    if not re.search(r"\blora\b", row.text("model").lower()):
        return {}
    assumed.append(f"adapters of rank {trainer.lora_rank} beside {trainer.lora_targets.replace(',', ', ')}")
    return {"lora_rank": trainer.lora_rank, "lora_targets": trainer.lora_targets}


def _zero(row: MeasuredStep, replicas: int, stages: int, assumed: list[str]) -> dict[str, Any]:
    """What is sharded, and among whom.

    Stage 2 as DeepSpeed has it reduces the gradients of every micro-batch, which no trainer does in a pipeline:
    DeepSpeed refuses the two together, and others (Megatron's distributed optimizer, FSDP's SHARD_GRAD_OP) keep
    whole gradients until the last micro-batch.
    """
    said = ZERO.fullmatch(row.text("zero_stage") or "0")
    if said is None:
        raise Skip(f"zero_stage '{row.text('zero_stage')}' is not modelled")
    more, stage = said["more"] or "", int(said["stage"])
    groups = GROUPS.search(more)
    if stage == 1 and groups and replicas % int(groups["gpus"]) == 0 and replicas > int(groups["gpus"]) > 1:
        return {"zero": 1, "distributed_optimizer_instances": replicas // int(groups["gpus"])}
    if stage < 3 and more and "SHARD_GRAD_OP" not in more:
        assumed.append(f"zero {stage} over all replicas")
    if "SHARD_GRAD_OP" in more:
        return {"zero": 3, "reshard_after_forward": False}
    if stage == 2 and stages > 1 and replicas > 1:
        assumed.append("gradients reduced once a step")
        return {"zero": 1}
    if said["hsdp"] and stage == 3 and replicas > NODE:
        assumed.append("sharded within nodes")
        return {"zero": 3, "hsdp_replicas": replicas // NODE}
    return {"zero": stage}


def _stage_layers(layers: int, chunks: int, further: int) -> str:
    """Layers of each chunk where the embedding and the loss take a layer's slot each; "" where they need not.

    With further tokens the last chunk has what is left, and the layers that predict these (Megatron-Bridge's
    layouts of DeepSeek-V3).
    """
    full = -(-layers // chunks)
    left = layers - full * (chunks - 1)
    if further and 0 < left < full:
        return ",".join(map(str, [full] * (chunks - 1) + [left + further]))
    even, rest = divmod(layers + 2, chunks)
    if layers % chunks == 0 or rest:
        return ""
    return ",".join(str(even - (chunk in (0, chunks - 1))) for chunk in range(chunks))


def _micro_batch(
    row: MeasuredStep, trainer: Trainer, replicas: int, sizes: dict[str, int], assumed: list[str]
) -> int:
    """The row's; where it names none, its trainer's default."""
    if row.text("micro_batch"):
        return row.number("micro_batch")
    if isinstance(trainer.micro_batch, int):
        assumed.append(f"micro-batches of {trainer.micro_batch}")
        return trainer.micro_batch
    assumed.append(f"as many micro-batches as pipeline {trainer.micro_batch}")
    pieces = sizes["pp"] * (sizes["vpp"] if trainer.micro_batch == "chunks" else 1)
    return max(1, row.number("global_batch") // replicas // pieces)
