"""What a training step does besides the model; known without PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from echograph.errors import UsageError
from echograph.options import given, option

if TYPE_CHECKING:
    import torch

StepDType = Literal["bf16", "fp16", "fp32"]
OptimizerName = Literal["adamw", "adam", "sgd"]
Kernels = Literal["cuda", "cpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Sizes of a model of the zoo or of a Hugging Face configuration; None: the model's own.

    Attributes:
        batch_size: samples of one micro-batch.
        seq_len: tokens of a sample, or pixels of an image's side.
        attention: "sdpa", "fused", "eager", or "fused-softmax" (Megatron-LM's).
    """

    batch_size: int | None = option(None, "Samples of one micro-batch.", least=1)
    seq_len: int | None = option(None, "Tokens of a sample, or pixels of an image's side.", least=1)
    attention: str | None = option(None, "sdpa, fused, eager, or fused-softmax (Megatron-LM's).")


MOST_FURTHER = 64
"""Of tokens that multi-token prediction looks ahead: published models have one to four."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpec:
    """What a training step does besides the model. The text of each field is its help on the command line.

    Attributes:
        dtype: type of parameters, activations and gradients.
        optimizer: "adamw", "adam", or "sgd" with momentum; each the fused, multi-tensor kernel.
        clip_grad_norm: largest norm of all gradients together; None does not clip.
        master_weights: keep fp32 copies of 16-bit parameters and update those; None: yes for 16-bit types.
        recompute: discard activations and compute them again in the backward pass, with the module's own
            `gradient_checkpointing_enable` (Hugging Face).
        lora_rank: rank of the adapters that alone are trained; None trains everything.
        lora_targets: last names of the linear layers that get one, with commas between them.
        mtp_num_layers: tokens further on that are predicted, too (multi-token prediction); a pipeline counts their
            layers behind the model's.
        mtp_use_repeated_layer: whether one module predicts all of them, with the same weights.
        kernels: whose kernels composite operators become: "cuda" or "cpu".

    Raises:
        UsageError: a field is no choice of its own, lacks another, or a norm or a rank is not above 0.
    """

    dtype: StepDType = option("bf16", "bf16, fp16 or fp32.", "bf16; the file's for ONNX")
    optimizer: OptimizerName = option("adamw", "adamw, adam or sgd.")
    clip_grad_norm: float | None = option(None, "Clip the gradients' norm to this.", "no clipping")
    master_weights: bool | None = option(None, "Keep fp32 copies of 16-bit parameters.", "yes")
    recompute: bool = option(False, "The model's own activation checkpointing.")
    lora_rank: int | None = option(
        None, "Freeze the model and train adapters of this rank (LoRA).", "all is trained"
    )
    lora_targets: str = option(
        "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj", "Linear layers that get adapters."
    )
    mtp_num_layers: int = option(0, "Predict as many tokens further on (multi-token prediction).")
    mtp_use_repeated_layer: bool = option(False, "One module predicts all of them.")
    kernels: Kernels = option("cuda", "Whose kernels operators become: cuda or cpu.")

    def __post_init__(self) -> None:
        for field, choices in (
            ("dtype", get_args(StepDType)),
            ("optimizer", get_args(OptimizerName)),
            ("kernels", get_args(Kernels)),
        ):
            if getattr(self, field) not in choices:
                raise UsageError(f"{field} '{getattr(self, field)}': choose one of {', '.join(choices)}")
        if self.lora_rank is not None and self.lora_rank < 1:
            raise UsageError(f"--lora-rank {self.lora_rank}: give 1 or more")
        if not 0 <= self.mtp_num_layers <= MOST_FURTHER:
            raise UsageError(f"--mtp-num-layers {self.mtp_num_layers}: give 0 to {MOST_FURTHER}")
        if self.clip_grad_norm is not None and not 0 < self.clip_grad_norm < float("inf"):
            raise UsageError(f"clip_grad_norm {self.clip_grad_norm}: give a norm above 0, or leave it out")
        asked = given(self)
        if "lora_targets" in asked and self.lora_rank is None:
            raise UsageError("--lora-targets: says which layers get adapters: give --lora-rank as well")
        if self.mtp_use_repeated_layer and not self.mtp_num_layers:
            raise UsageError("--mtp-use-repeated-layer: is of further tokens: give --mtp-num-layers as well")
        if self.master_weights and self.dtype == "fp32":
            raise UsageError("--master-weights: are copies of 16-bit parameters, and these are fp32: leave it out")

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as PyTorch names it."""
        import torch

        return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[self.dtype]

    @property
    def has_master_weights(self) -> bool:
        """Whether the optimizer updates fp32 copies instead of the parameters."""
        return self.dtype != "fp32" and self.master_weights is not False
