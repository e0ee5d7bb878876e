"""As `benchmarks.host`, of Megatron-LM's layers of 2021 and 2022, from a clone of that time.

python -m benchmarks.host_megatron_2021 FOLDER [--seconds S]

FOLDER has the package `megatron` of Megatron-LM 2.x, or of BigScience's Megatron-DeepSpeed. Its fused kernels, and
Apex's layer norm, are a device's: the operator that does the same stands behind an autograd function as theirs is.
Operations are those of GPT-2 as it is captured for such runs ("fused-softmax"), over which the time is spread: the
layer's own, where TorchScript runs one by one what it fuses on a device, are no measure.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.host import DEPTHS, HEADS, PHASES, Trained, fake_group, measure, without_a_device

_ARGUMENTS: dict[str, Any] = {
    "num_attention_heads": HEADS, "fp16": False, "bf16": False, "apply_query_key_layer_scaling": False,
    "attention_softmax_in_fp32": False, "masked_softmax_fusion": True, "attention_dropout": 0.1,
    "hidden_dropout": 0.1, "bias_gelu_fusion": True, "bias_dropout_fusion": True,
    "fp32_residual_connection": False, "params_dtype": torch.float32, "layernorm_epsilon": 1e-5,
    "init_method_std": 0.02,
    "curriculum_learning": False,
    "use_cpu_initialization": True, "distribute_checkpointed_activations": False, "deepspeed": False,
    "glu_activation": None, "openai_gelu": False, "onnx_safe": None, "micro_batch_size": 1, "rank": 0,
    "sync_tp_duplicated_parameters": False, "world_size": 1, "apply_residual_connection_post_layernorm": False,
    "checkpoint_num_layers": 1, "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1,
    "memory_centric_tiled_linear": False, "virtual_pipeline_model_parallel_size": None,
    "pp_partition_method": None, "abort_on_unmet_fused_kernel_constraints": False,
}  # fmt: skip


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, shape: Any, eps: float) -> Tensor:
        ctx.shape = shape
        x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
        out, mean, rstd = torch.ops.aten.native_layer_norm(x, shape, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        of = torch.ops.aten.native_layer_norm_backward
        found = of(gradient.contiguous(), x, ctx.shape, mean, rstd, weight, bias, [True] * 3)
        return (*found, None, None)


class MixedFusedLayerNorm(nn.Module):
    """What Apex has under this name."""

    def __init__(self, size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.shape, self.eps = torch.Size([size]), eps
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension."""
        return _LayerNorm.apply(x, self.weight, self.bias, self.shape, self.eps)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, scale: float) -> Tensor:
        kept = torch.tensor([scale])
        out = torch.softmax(scores, -1)
        ctx.save_for_backward(out, kept)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        out, _ = ctx.saved_tensors
        return torch.ops.aten._softmax_backward_data(gradient, out, -1, out.dtype), None


def main() -> None:
    """Prints a line for each phase, and writes host-megatron-2021.json to $OUT (default: out/host)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_megatron_2021")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    counts = _captured()
    transformer = _of_clone(given.folder)
    found = measure(lambda *size: _layers(transformer, *size), given.seconds)
    for phase, count in zip(PHASES, counts, strict=True):
        entry = found[phase]
        entry |= {"operations": count, "op_s": entry["layer_s"] / count}
        print(
            f"{phase:<12}{1e6 * entry['layer_s']:>8.0f} us a layer{1e6 * entry['arithmetic_s']:>6.0f} us taken off"
            f"{count:>8.1f} operations{1e6 * entry['op_s']:>8.2f} us each"
        )
    out = Path(os.environ.get("OUT", "out/host"))
    out.mkdir(parents=True, exist_ok=True)
    (out / "host-megatron-2021.json").write_text(json.dumps(found, indent=2) + "\n")


def _captured() -> tuple[float, float, float]:
    """Operations of a layer as it is captured, by phase; what adds up micro-batches is none of them."""
    from echograph.frontend.pytorch.spec import StepSpec
    from echograph.ir.types import Phase
    from echograph.models import get_model
    from echograph.workflow.compile import compile_entry

    def count(layers: int) -> dict[Phase, int]:
        entry = get_model("gpt2").with_config(n_layer=layers, activation_function="gelu")
        spec = StepSpec(dtype="fp16")
        graph = compile_entry(entry, spec, batch_size=1, seq_len=64, attention="fused-softmax")
        runs = graph.run_counts()
        return {phase: int(runs[graph.ops.phase == int(phase)].sum()) for phase in Phase}

    shallow, deep = map(count, DEPTHS)
    forward, backward = ((deep[p] - shallow[p]) / (DEPTHS[1] - DEPTHS[0]) for p in (Phase.FORWARD, Phase.BACKWARD))
    return forward, forward, backward


def _module(name: str, path: Path | None = None, **entries: Any) -> ModuleType:
    """A module of that name with these entries; of a package's files, without what its `__init__` imports."""
    module = ModuleType(name)
    if path is not None:
        module.__path__ = [str(path)]
    vars(module).update(entries)
    sys.modules[name] = module
    return module


def _of_clone(folder: Path) -> SimpleNamespace:
    """The clone's layers, and the arguments that they read."""
    without_a_device()
    arguments = Namespace(**_ARGUMENTS)
    package = folder / "megatron"
    checkpointing = _module("deepspeed.checkpointing", is_configured=lambda: False)
    activations = _module("deepspeed.runtime.activation_checkpointing.checkpointing", is_configured=lambda: False)
    inner = _module("deepspeed.runtime.activation_checkpointing", package, checkpointing=activations)
    runtime = _module("deepspeed.runtime", package, activation_checkpointing=inner)
    _module("deepspeed", package, checkpointing=checkpointing, runtime=runtime)
    root = _module("megatron", package, get_args=lambda: arguments, print_rank_0=print)
    for name in ("get_timers", "get_tokenizer", "get_num_microbatches"):
        setattr(root, name, lambda: None)
    _module("megatron.global_vars", get_args=lambda: arguments)
    _module("megatron.model", package / "model", LayerNorm=MixedFusedLayerNorm)
    _module("megatron.model.fused_layer_norm", MixedFusedLayerNorm=MixedFusedLayerNorm)
    fake_group()
    from megatron import mpu  # type: ignore[attr-defined]
    from megatron.enums import PositionEmbeddingType  # type: ignore[import-not-found]
    from megatron.model import fused_softmax, transformer  # type: ignore[attr-defined]
    from megatron.mpu import random  # type: ignore[import-not-found]

    arguments.position_embedding_type = PositionEmbeddingType.absolute
    mpu.initialize_model_parallel(1, 1)
    random._set_cuda_rng_state = lambda new, *_, **__: torch.cuda.set_rng_state(new)
    mpu.model_parallel_cuda_manual_seed(1)

    class FusedSoftmax(fused_softmax.FusedScaleMaskSoftmax):  # type: ignore[misc]
        def forward(self, scores: Tensor, mask: Tensor | None) -> Tensor:
            self.is_kernel_available(mask, *scores.size())
            batch, heads, rows, columns = scores.size()
            return _Softmax.apply(scores.view(-1, rows, columns), 1.0).view(batch, heads, rows, columns)

    transformer.FusedScaleMaskSoftmax, transformer.LayerNorm = FusedSoftmax, MixedFusedLayerNorm
    return SimpleNamespace(arguments=arguments, transformer=transformer)


def _layers(clone: SimpleNamespace, layers: int, width: int, tokens: int) -> Trained:
    from megatron.model.utils import init_method_normal  # type: ignore[import-not-found]

    sizes = {"hidden_size": width, "ffn_hidden_size": 4 * width, "kv_channels": width // HEADS}
    for name, value in (sizes | {"num_layers": layers, "seq_length": tokens, "padded_vocab_size": 64}).items():
        setattr(clone.arguments, name, value)
    clone.arguments.checkpoint_activations = True
    init = init_method_normal(0.02)
    causal = clone.transformer.AttnMaskType.causal
    ends = {"pre_process": False, "post_process": False}
    block = clone.transformer.ParallelTransformer(init, init, self_attn_mask_type=causal, **ends)
    hidden = torch.randn(tokens, 1, width, requires_grad=True)
    mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool).triu(1)

    def run(again: bool) -> Tensor:
        block.checkpoint_activations = again
        block.set_input_tensor(hidden)
        found: Tensor = block(hidden, mask)
        return found

    return Trained(run)


if __name__ == "__main__":
    main()
