"""A measured row as a model, a step, a plan and a cluster; what a row does not say is assumed, and counted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from echograph.simulator.clusters import Cluster, load_cluster
from echograph.units import GB
from echograph.workflow.plan import Plan, lighter_ends
from echograph.workflow.validation import spellings
from echograph.workflow.validation.fits import least_bytes
from echograph.workflow.validation.model import RowModel, model_of
from echograph.workflow.validation.table import MeasuredStep, Skip
from echograph.workflow.validation.trainers import Trainer, machine_of, trainer_of

if TYPE_CHECKING:
    from echograph.frontend.pytorch.spec import StepSpec

BITS = 8
"""Bits of a byte: networks are sold by bits, and clusters' files have bytes."""

_Read = TypeVar("_Read")

_GUESSES = {"precision": "bf16", "recompute": "none", "sequence_parallel": "no", "zero_stage": "0"}
"""What an empty cell is taken for where nothing is known of the trainer."""

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
        settings: keys of the cluster's file with other values.
        blocking: whether every launch waited for its kernel.
        layer_alone: whether the figure is of the layers alone, without embedding, loss and optimizer.
    """

    model: RowModel
    spec: StepSpec
    plan: Plan
    seq_len: int
    assumed: tuple[str, ...]
    settings: Mapping[str, str]
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
    trainer = trainer_of(row)
    if trainer.guessed:
        named = f"trainer '{row.text('trainer')}'" if row.text("trainer") else "no trainer named"
        assumed.append(f"{named}: stack {trainer.stack}")
    row = _filled(row, trainer, assumed)
    dtype, precision = _known(spellings.precision(row.text("precision")), row, "precision")
    model = model_of(row, trainer, assumed)
    plan, seq_len = _plan(row, trainer, model, precision, assumed), row.number("seq_len")
    adapters = _adapters(row, trainer, assumed)
    if not adapters:
        plan = _fitting(row, model, plan, assumed)
    if model.attention == "fused-softmax" and not _softmax_fuses(row, plan, seq_len):
        model = replace(model, attention="eager")
    return Setup(
        model=model,
        spec=StepSpec(dtype=dtype, **trainer.step, **adapters),
        plan=plan,
        seq_len=seq_len,
        settings=_nodes(row, load_cluster(plan.cluster), assumed),
        assumed=tuple(assumed),
        blocking=trainer.launch_blocking,
        layer_alone=row.of_layers_alone,
    )


def _softmax_fuses(row: MeasuredStep, plan: Plan, seq_len: int) -> bool:
    """Whether Megatron-LM's kernel for scale, mask and softmax has a form for a rank's scores.

    NVIDIA/Megatron-LM v2.0 to v2.6, megatron/model/fused_softmax.py: rows of 17 to 2,048 keys, by fours in
    a matrix and over the matrices. Other scores are scaled, masked and normalised one by one.
    """
    matrices = (plan.micro_batch or 1) * row.number("heads", plan.tp) // plan.tp
    return 16 < seq_len <= 2048 and seq_len % 4 == 0 and matrices % 4 == 0


def _known(read: _Read | None, row: MeasuredStep, column: str) -> _Read:
    if read is None:
        raise Skip(f"{column} '{row.text(column)}' is not modelled")
    return read


def _filled(row: MeasuredStep, trainer: Trainer, assumed: list[str]) -> MeasuredStep:
    """The row with what its trainer does where a cell is empty; what no trainer says is assumed.

    Args:
        row: as it stands in the table.
        trainer: whose `cells` are taken.
        assumed: told of each cell that matters.
    """
    ranks = row.number("tp", 1)
    matters = {
        "precision": True,
        "recompute": True,
        "sequence_parallel": ranks > 1,
        "zero_stage": row.number("n_gpus") > ranks * row.number("pp", 1) * row.number("cp", 1),
    }
    filled = {}
    for column, guess in (_GUESSES | trainer.cells).items():
        # Megatron's DDP is what FSDP is not, and divides the optimizer or does not.
        said = "" if column in trainer.cells and row.text(column).lower() == "ddp" else row.text(column)
        if said or not matters.get(column, True):
            continue
        filled[column] = trainer.cells.get(column, guess)
        whose = "by default" if column in trainer.cells else "(a guess)"
        assumed.append(f"{column} {filled[column]} {whose}")
    return MeasuredStep(row.columns | filled)


def _plan(row: MeasuredStep, trainer: Trainer, model: RowModel, precision: str, assumed: list[str]) -> Plan:
    machine = machine_of(row)
    if machine.assumed:
        assumed.append(machine.assumed)
    sizes = {name: row.number(name, 1) for name in ("tp", "pp", "vpp", "cp", "ep")}
    divides = {"vpp": sizes["pp"] > 1, "ep": model.has_experts}
    assumed += [f"{name} 1" for name in sizes if not row.text(name) and divides.get(name, True)]
    gpus, ranks = row.number("n_gpus"), sizes["tp"] * sizes["pp"] * sizes["cp"]
    copies = row.number("dp", gpus // ranks)
    if sizes["cp"] > 1 and copies * sizes["tp"] * sizes["pp"] == gpus:
        assumed.append("dp counts context-parallel ranks")
    elif gpus % ranks or copies * ranks != gpus:
        raise Skip(f"{gpus} GPUs are not tp x pp x cp x dp")
    sizes, schedule = _schedule(row, sizes, assumed)
    recompute = row.text("recompute")
    if recompute == "see recipe":
        assumed.append("no recomputation")
        recompute = "none"
    recompute = _known(spellings.recompute(recompute, trainer.selective), row, "recompute")
    if trainer.selective != "selective" and row.text("recompute").lower().startswith("selective"):
        assumed.append(f"selective recomputation: {recompute}")
    zero = _zero(row, gpus // ranks, sizes["pp"], assumed)
    return Plan(
        gpus=gpus,
        cluster=machine.cluster,
        tp=sizes["tp"],
        pp=sizes["pp"],
        vpp=sizes["vpp"],
        stage_layers=_stage_layers(
            model.layers, sizes["pp"] * sizes["vpp"], trainer.step.get("mtp_num_layers", 0)
        ),
        cp=sizes["cp"],
        ep=sizes["ep"],
        # More ranks than there are with data of their own: those of a tensor-parallel group are among them.
        etp=1 if sizes["ep"] > gpus // ranks * sizes["cp"] else None,
        sequence_parallel=sizes["tp"] > 1 and _known(_shares_sequence(row), row, "sequence_parallel"),
        **zero,
        capacity_factor=1.0 if "tokendrop" in row.text("model") else None,
        recompute=recompute,
        stack=trainer.stack,
        micro_batch=_micro_batch(row, trainer, gpus // ranks, sizes, assumed),
        global_batch=_global_batch(row, assumed),
        **{"precision": precision} | schedule | trainer.set,
    )


def _schedule(
    row: MeasuredStep, sizes: dict[str, int], assumed: list[str]
) -> tuple[dict[str, int], dict[str, Any]]:
    """Parallel sizes and options of the plan, as the pipeline's schedule needs them.

    DualPipe (DeepSeek-V3, arXiv:2412.19437, section 3.2.1) keeps two copies of a stage's parameters, so that
    micro-batches enter at both ends; DualPipeV has as many passes beside each other, and one copy. Both exchange
    rows of experts beside computing.

    Raises:
        Skip: another schedule than this, 1F1B, or interleaved chunks; or it has other chunks.
    """
    schedule = row.text("schedule").lower()
    said = schedule or row.text("notes").lower()
    if sizes["pp"] == 1:
        return sizes, {}
    if not re.search(r"(?<!no )(?<!without )dualpipe", said):
        if schedule not in ("", "interleaved" if sizes["vpp"] > 1 else "1f1b"):
            raise Skip(f"schedule '{row.text('schedule')}' of {sizes['vpp']} chunks a stage is not modelled")
        return sizes, {}
    if sizes["vpp"] > 2:
        raise Skip(f"DualPipe has two chunks a stage, and vpp is {sizes['vpp']}")
    if not re.search(r"dualpipe-?v\b", said):
        assumed.append("DualPipe as DualPipeV")
    options = {"schedule": "dualpipe-v", "overlap_moe_expert_parallel_comm": sizes["ep"] > 1}
    return sizes | {"vpp": 2}, options


def _fitting(row: MeasuredStep, model: RowModel, plan: Plan, assumed: list[str]) -> Plan:
    """The plan, with whole layers recomputed where it leaves recomputation open and does not fit without."""
    guess = next((line for line in assumed if line.startswith("recompute none")), None)
    state, kept = least_bytes(model, plan, row.number("seq_len"))
    if guess is None or not state < load_cluster(plan.cluster).memory_bytes < state + kept:
        return plan
    assumed[assumed.index(guess)] = "recompute full, as it does not fit without"
    return replace(plan, recompute="full")


def _nodes(row: MeasuredStep, cluster: Cluster, assumed: list[str]) -> dict[str, str]:
    """Other GPUs and ports of a node than the cluster's, where a row says so, as settings of the cluster.

    Args:
        row: whose GPU's name and notes are read.
        cluster: whose nodes have one NVLink domain each to be cut.
        assumed: told that the ports go with the GPUs.
    """
    settings: dict[str, str] = {}
    rate, ports = cluster.network.nic_bytes_per_s * BITS / GB, cluster.network.nics_per_node
    gpus = spellings.node_gpus(f"{row.text('gpu_type')}; {row.text('notes')}") or cluster.gpus_per_node
    if gpus < cluster.gpus_per_node == cluster.domain_gpus:
        ports = max(1, ports * gpus // cluster.gpus_per_node)
        counts = {"node.gpus": gpus, "node.nvlink_domain": gpus, "network.nics_per_node": ports}
        settings = {key: str(count) for key, count in counts.items()} | {"network.rails": str(min(ports, gpus))}
        assumed.append(f"nodes of {gpus} GPUs with as much network for each")
    said = spellings.node_network(row.text("notes"), rate, gpus)
    if said is not None and abs(said / (rate * ports) - 1) >= 0.01:
        settings["network.nic_GBps"] = f"{said / BITS / ports:g}"
    return settings


def _adapters(row: MeasuredStep, trainer: Trainer, assumed: list[str]) -> dict[str, Any]:
    """What is trained of a row that says LoRA; nothing where all is."""
    if re.search(r"qlora\b", row.text("model").lower()):
        raise Skip("QLoRA: weights of 4 bits are not modelled")
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
    said = _known(spellings.sharding(row.text("zero_stage")), row, "zero_stage")
    group = said.group if said.group and replicas % said.group == 0 and replicas > said.group > 1 else 0
    if said.unread or (said.group and not group and said.group != replicas):
        assumed.append(f"zero {said.stage} over all replicas")
    if said.stage == 3:
        copies = replicas // group if group else 1
        if said.copies and not group and replicas > NODE:
            assumed.append("sharded within nodes")
            copies = replicas // NODE
        return {"zero": 3} | ({"hsdp_replicas": copies} if copies > 1 else {}) | _kept(said)
    if said.stage == 1 and group:
        return {"zero": 1, "distributed_optimizer_instances": replicas // group}
    if said.stage == 2 and stages > 1 and replicas > 1:
        assumed.append("gradients reduced once a step")
        return {"zero": 1}
    return {"zero": said.stage}


def _kept(said: spellings.SaidSharding) -> dict[str, bool]:
    return {} if said.reshards else {"reshard_after_forward": False}


def _shares_sequence(row: MeasuredStep) -> bool | None:
    return spellings.flag(row.text("sequence_parallel") or "no")


def _global_batch(row: MeasuredStep, assumed: list[str]) -> int:
    if not row.text("global_batch"):
        assumed.append(
            "samples of a step " + ("by its rate" if row.real("step_time_s") else "without accumulation")
        )
    return row.global_batch


def _stage_layers(layers: int, chunks: int, further: int) -> str:
    """Layers of each chunk where the embedding and the loss take a layer's slot each; "" where they need not.

    With further tokens the last chunk has what is left, and the layers that predict these (Megatron-Bridge's
    layouts of DeepSeek-V3).
    """
    full = -(-layers // chunks)
    left = layers - full * (chunks - 1)
    if further and 0 < left < full:
        return ",".join(map(str, [full] * (chunks - 1) + [left + further]))
    return lighter_ends(layers, chunks)


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
    return max(1, row.global_batch // replicas // pieces)
