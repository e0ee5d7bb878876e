"""A measured row as a model, a step, a plan and a cluster; what a row does not say is assumed, and counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from echograph.ir.passes.depth import FEWEST
from echograph.workflow.plan import Plan
from echograph.workflow.validation.table import MeasuredStep, Skip
from echograph.workflow.validation.trainers import Trainer, machine_of, trainer_of

if TYPE_CHECKING:
    from echograph.frontend.pytorch.spec import StepSpec
    from echograph.models import ModelEntry

CLUSTERS = {
    "A100-SXM-80GB": "dgx-a100",
    "A100-SXM-40GB": "azure-nd-a100-v4",
    "A100-SXM-40GB (DGX-A100)": "azure-nd-a100-v4",
    "A100-SXM (single DGX-class node)": "dgx-a100",
    "H100-96GB-HBM2e-500W": "grand-teton-h100",
    "H100-SXM-80GB": "dgx-h100",
    "H100-SXM-80GB (p5)": "aws-p5",
    "H200-SXM-141GB": "dgx-h200",
    "B200": "dgx-b200",
    "GB200-NVL72": "gb200-nvl72",
}
"""The preset whose nodes are those of the row; a GPU that no preset has is skipped."""

UNMODELLED = {"H100-96GB-HBM2e-500W": "full clocks within 500 W"}
"""What a preset leaves out, by GPU."""

RECOMPUTE = {"": "none", "none": "none", "full": "full", "selective": "selective", "selective(op)": "selective-op"}
ZERO = {"": 0, "0": 0, "1": 1, "2": 2, "3": 3, "fsdp3": 3, "fsdp2(SHARD_GRAD_OP)": 3}
PRECISION = {
    "fp16": ("fp16", ""), "bf16": ("bf16", ""), "BF16": ("bf16", ""), "amp_bf16": ("bf16", ""),
    "fp8": ("bf16", "fp8"), "FP8": ("bf16", "fp8"), "FP8-hybrid": ("bf16", "fp8"), "FP8-CS": ("bf16", "fp8"),
    "fp8 tensorwise": ("bf16", "fp8"), "fp8 rowwise": ("bf16", "fp8-rowwise"), "amp_fp8": ("bf16", "fp8"),
    "MXFP8": ("bf16", "mxfp8"), "FP8-MX": ("bf16", "mxfp8"),
}  # fmt: skip
"""Type of the step and precision of its matrix products."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a row is simulated as.

    Attributes:
        entry: the model, of the row's dimensions, but as deep as a capture needs it.
        layers: how deep it is.
        attention: the model's implementation of attention.
        spec: the rest of the step.
        plan: how it is spread.
        seq_len: tokens of a sample.
        assumed: what the row does not say, one line each.
        blocking: whether every launch waited for its kernel.
    """

    entry: ModelEntry
    layers: int
    attention: str
    spec: StepSpec
    plan: Plan
    seq_len: int
    assumed: tuple[str, ...]
    blocking: bool

    @property
    def key(self) -> tuple[object, ...]:
        """Rows with one key share a captured step, whatever their layers and micro-batches."""
        entry = self.entry
        shape = tuple(sorted((k, str(v)) for k, v in entry.config.items()))
        return entry.architecture, shape, self.attention, self.spec, self.seq_len

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
    if not trainer.stack:
        assumed.append(f"trainer '{row.text('trainer')}': kernels as PyTorch has them")
    entry, attention = _model(row, assumed)
    return Setup(
        entry=entry,
        layers=row.number("layers"),
        attention=attention,
        spec=StepSpec(dtype=dtype),
        plan=_plan(row, trainer, precision, assumed),
        seq_len=row.number("seq_len"),
        assumed=tuple(assumed),
        blocking=trainer.launch_blocking,
    )


def _known(table: dict[str, Any], row: MeasuredStep, column: str) -> Any:
    value = row.text(column)
    if value not in table:
        raise Skip(f"{column} '{value}' is not modelled")
    return table[value]


def _model(row: MeasuredStep, assumed: list[str]) -> tuple[ModelEntry, str]:
    from echograph.models import get_model

    layers, hidden, heads = (row.number(c) for c in ("layers", "hidden", "heads"))
    layers = min(layers, FEWEST)
    kv_heads, ffn = row.number("kv_heads", heads), row.number("ffn_hidden", 4 * hidden)
    vocabulary, length = row.number("vocab"), row.number("seq_len")
    name = row.text("model").lower()
    if row.number("ep", 1) > 1 or any(
        word in name for word in ("deepseek", "nemotron", "qwen3", "gpt oss", "moe")
    ):
        raise Skip(f"model '{row.text('model')}': its layers are not in the table's columns")
    # All tables' unfused attention is Megatron's, which has kernels of its own for scale, mask and softmax.
    attention = "fused-softmax" if row.text("attention").startswith("unfused") else "sdpa"
    if not row.text("attention"):
        assumed.append("fused attention")
    if "llama" in name:
        entry = get_model("llama-3-8b").with_config(
            hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
            intermediate_size=ffn, vocab_size=vocabulary, max_position_embeddings=length,
        )  # fmt: skip
    elif name.startswith("mpt"):
        # The library's MPT has no fused attention, the trainer's had: GPT's layers are the same products.
        assumed.append("GPT's layers for MPT's: biases, positions in a table")
        entry = get_model("megatron-gpt-1.7b").with_config(
            n_embd=hidden, n_layer=layers, n_head=heads, vocab_size=vocabulary, n_positions=length, n_inner=ffn,
            attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
        )  # fmt: skip
    else:
        entry = get_model("megatron-gpt-1.7b").with_config(
            n_embd=hidden, n_layer=layers, n_head=heads, vocab_size=vocabulary, n_positions=length, n_inner=ffn
        )
    return entry, attention


def _plan(row: MeasuredStep, trainer: Trainer, precision: str, assumed: list[str]) -> Plan:
    gpu = row.text("gpu_type")
    cluster = CLUSTERS.get(gpu)
    if cluster is None:
        raise Skip(f"gpu_type '{gpu}' has no cluster preset")
    cluster = machine_of(row, cluster)
    if gpu in UNMODELLED:
        assumed.append(UNMODELLED[gpu])
    sizes = {name: row.number(name, 1) for name in ("tp", "pp", "vpp", "cp", "ep")}
    assumed += [f"{name} 1" for name in sizes if not row.text(name)]
    gpus, model = row.number("n_gpus"), sizes["tp"] * sizes["pp"] * sizes["cp"]
    if gpus % model or row.number("dp", gpus // model) * model != gpus:
        raise Skip(f"{gpus} GPUs are not tp x pp x cp x dp")
    if row.text("recompute") == "see recipe":
        assumed.append("no recomputation")
    recompute = "none" if row.text("recompute") == "see recipe" else _known(RECOMPUTE, row, "recompute")
    zero = _known(ZERO, row, "zero_stage")
    return Plan(
        gpus=gpus,
        cluster=cluster,
        tp=sizes["tp"],
        pp=sizes["pp"],
        vpp=sizes["vpp"],
        stage_layers=_stage_layers(row.number("layers"), sizes["pp"] * sizes["vpp"]),
        cp=sizes["cp"],
        ep=sizes["ep"],
        sequence_parallel=row.text("sequence_parallel") == "yes" and sizes["tp"] > 1,
        zero=zero,
        reshard_after_forward=False if "SHARD_GRAD_OP" in row.text("zero_stage") else None,
        recompute=recompute,
        precision=precision,
        stack=trainer.stack,
        micro_batch=_micro_batch(row, trainer, gpus // model, sizes["pp"] * sizes["vpp"], assumed),
        global_batch=row.number("global_batch"),
        **trainer.set,
    )


def _stage_layers(layers: int, chunks: int) -> str:
    """Layers of each chunk where the embedding and the loss take a layer's slot each; "" where they need not."""
    even, rest = divmod(layers + 2, chunks)
    if layers % chunks == 0 or rest:
        return ""
    return ",".join(str(even - (chunk in (0, chunks - 1))) for chunk in range(chunks))


def _micro_batch(row: MeasuredStep, trainer: Trainer, replicas: int, chunks: int, assumed: list[str]) -> int:
    """The row's; where it names none, its trainer's default."""
    if row.text("micro_batch"):
        return row.number("micro_batch")
    if trainer.micro_batch == "chunks":
        assumed.append("as many micro-batches as pipeline chunks")
        return max(1, row.number("global_batch") // replicas // chunks)
    assumed.append(f"micro-batches of {trainer.micro_batch}")
    return trainer.micro_batch
