"""What megatron-core computes and communicates in a step, recorded without ranks: fake process group and tensors.

    python torch_megatron.py '{"world": 1024, "tensor": 8, "stages": 4, "micro_batches": 8, "layers": 8,
                               "hidden": 4096, "channels": 14336, "heads": 32, "kv_heads": 8, "positions": 8192,
                               "vocabulary": 129024, "overlap_param_gather": false, "record": [0, 1, 3]}'

Its own GPT model, pipeline schedule (1F1B), data parallelism and distributed optimizer run as they are, but for
what they need a GPU for: tensors "on the GPU" are made elsewhere, streams do nothing, and a value that is read is
1. megatron-core has no norm of its own that goes with sequence parallelism (Transformer Engine has): the one here
is torch's, marked as that one marks its weight. A step of one micro-batch comes before the one that is recorded,
since only from the second on gradients are reduced while backward goes on.

For each stage of `record` it prints one line, a list of events in order: [micro-batch, phase, what, ...]. Those of
the step are of micro-batch -1; phases are "forward", "backward", "messages" and "step"; what is ["product", m, k,
n], ["send" | "recv", peer stage, bytes], or [kind, axes of the group, bytes of the larger buffer, type].
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, clip_grads, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import nn
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from echograph.frontend.pytorch.capture import capture_mode

DTYPES = {torch.float32: "FP32", torch.bfloat16: "BF16"}
# Which argument is the larger buffer, and which the group.
COLLECTIVES = {
    "c10d::_allgather_base_": ("ALL_GATHER", 0, 2),
    "c10d::allgather_into_tensor_coalesced_": ("ALL_GATHER", 0, 2),
    "c10d::_reduce_scatter_base_": ("REDUCE_SCATTER", 1, 2),
    "c10d::reduce_scatter_tensor_coalesced_": ("REDUCE_SCATTER", 1, 2),
    "c10d::allreduce_": ("ALL_REDUCE", 0, 1),
}


class OnTheGpu(TorchFunctionMode):
    """Makes on the CPU what is asked for on a GPU, and says that it is there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        made = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(made, str):
            return made.replace("torch.", "torch.cuda.")
        return made


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down matrix products, messages and collectives."""

    def __init__(self, axes: Callable[[list[int]], list[str]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.axes = axes
        self.events: list[list[Any]] = []
        self.passes: Counter[str] = Counter()
        self.place: tuple[int, str] = (-1, "step")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, schema = func.overloadpacket.__name__, func._schema.name
        if name == "_local_scalar_dense":
            return 1
        if name in ("mm", "addmm"):
            a, b = args[-2:]
            self._note("product", *a.shape, b.shape[1])
        elif schema in ("c10d::send", "c10d::recv_"):
            (tensor,), _, peer = args[:3]
            self.events.append([-1, "messages", schema.removeprefix("c10d::").strip("_"), peer, tensor.nbytes])
        elif schema in COLLECTIVES:
            kind, buffer, group = COLLECTIVES[schema]
            whole = args[buffer] if isinstance(args[buffer], list | tuple) else [args[buffer]]
            ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(args[group]))
            for tensor in whole:
                self._note(kind, self.axes(ranks), tensor.nbytes, DTYPES[tensor.dtype])
        elif func.namespace == "c10d":
            raise NotImplementedError(schema)
        return func(*args, **(kwargs or {}))

    def _note(self, *what: Any) -> None:
        self.events.append([*self.place, *what])

    @contextmanager
    def at(self, micro_batch: int, phase: str) -> Iterator[None]:
        before, self.place = self.place, (micro_batch, phase)
        try:
            yield
        finally:
            self.place = before


def norm_of_all(size: int, flag: Any, lists: list[list[torch.Tensor]], each: bool) -> tuple[torch.Tensor, None]:
    """The norm of many tensors together."""
    del size, flag, each
    return torch.stack([tensor.norm() for tensor in lists[0]]).norm(), None


def agree(found: list[Any], mine: Any) -> None:
    """What all ranks have, if all have the same."""
    found[:] = [mine] * len(found)


def pretend(library: torch.library.Library) -> None:
    """Answers for what only a GPU, or other ranks, have."""
    nothing = SimpleNamespace(wait_stream=lambda _: None, record_event=lambda *_: None, synchronize=lambda: None)
    for name, answer in {
        "current_device": lambda: "cpu",
        "current_stream": lambda *_: nothing,
        "default_stream": lambda *_: nothing,
        "stream": lambda _: nullcontext(),
        "Stream": lambda *_, **__: nothing,
        "synchronize": lambda *_: None,
        "device_count": lambda: 8,
    }.items():
        setattr(torch.cuda, name, answer)
    for name in ("allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_"):
        library.impl(name, lambda *_, **__: FakeWork().boxed(), "Meta")  # type: ignore[no-untyped-call]
    # Ranks agree on the optimizer's groups of parameters before the first step.
    dist.all_gather_object = agree  # type: ignore[assignment]
    # The generator that dropout draws from is the GPU's; there is no dropout.
    CudaRNGStatesTracker.fork = lambda *_: nullcontext()
    # Transformer Engine's norm of many tensors is a kernel; the one that stands in for it reads values.
    clip_grads.l2_norm_impl = norm_of_all


class Norm(nn.RMSNorm):
    """RMSNorm on a share of the sequence: its gradient is a summand, as the mark says."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


STEPS = {"forward": schedules.forward_step, "backward": schedules.backward_step}


# -- what runs -----------------------------------------------------------------------------------------------


def model_of(case: dict[str, Any], stage: int) -> Any:
    """A stage of Megatron's GPT model in the shape of Llama, in bf16, with its distributed data parallelism."""
    config = TransformerConfig(
        num_layers=case["layers"], hidden_size=case["hidden"], ffn_hidden_size=case["channels"],
        num_attention_heads=case["heads"], num_query_groups=case["kv_heads"],
        tensor_model_parallel_size=case["tensor"], pipeline_model_parallel_size=case["stages"],
        sequence_parallel=True, normalization="RMSNorm", gated_linear_unit=True,
        activation_func=nn.functional.silu, add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0,
        bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16, gradient_accumulation_fusion=False,
        perform_initialization=False, bias_activation_fusion=False, masked_softmax_fusion=False,
        deallocate_pipeline_outputs=False, persist_layer_norm=False,
    )  # fmt: skip
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    layers = case["layers"] // case["stages"]
    module = GPTModel(
        config, TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=Norm),
        vocab_size=case["vocabulary"], max_sequence_length=case["positions"], pre_process=stage == 0,
        post_process=stage == case["stages"] - 1, position_embedding_type="rope",
    )  # fmt: skip
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=True, use_distributed_optimizer=True,
        overlap_param_gather=case["overlap_param_gather"],
    )  # fmt: skip
    model = DistributedDataParallel(config, options, module)
    config.no_sync_func = model.no_sync
    config.finalize_model_grads_func = finalize_model_grads
    return model


def one_step(case: dict[str, Any], model: Any, optimizer: Any, micro_batches: int) -> None:
    """A step as Megatron's training loop runs it."""
    tokens = torch.zeros(1, case["positions"], dtype=torch.int64)

    def forward(data: Any, module: Any) -> tuple[torch.Tensor, Any]:
        del data
        output = module(tokens, tokens, None, labels=tokens)
        return output, lambda losses: (losses.float().mean(), {})

    model.zero_grad_buffer()
    optimizer.zero_grad()
    get_forward_backward_func()(
        forward_step_func=forward, data_iterator=None, model=[model], num_microbatches=micro_batches,
        seq_length=case["positions"], micro_batch_size=1, forward_only=False,
    )  # fmt: skip
    optimizer.step()


def note_passes(recorder: Recorder) -> None:
    """Makes the schedule say which pass of which micro-batch runs."""

    def noted(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with recorder.at(recorder.passes[name], name):
                recorder.passes[name] += 1
                return inner(*args, **kwargs)

        return run

    for name, inner in STEPS.items():
        setattr(schedules, f"{name}_step", noted(name, inner))


def axes_of(case: dict[str, Any]) -> Callable[[list[int]], list[str]]:
    """The mesh axes along which the ranks of a group lie, in Megatron's order of ranks."""
    inside = case["world"] // case["stages"]

    def axes(ranks: list[int]) -> list[str]:
        places = [(r // inside, r % inside // case["tensor"], r % case["tensor"]) for r in ranks]
        varied = [len({place[axis] for place in places}) for axis in range(3)]
        assert prod(varied) == len(ranks), ranks
        return [name for name, count in zip(("pp", "dp", "tp"), varied, strict=True) if count > 1]

    return axes


def run_stage(case: dict[str, Any], stage: int) -> list[list[Any]]:
    """One step of the first rank of a stage."""
    inside = case["world"] // case["stages"]
    dist.init_process_group("fake", store=FakeStore(), rank=stage * inside, world_size=case["world"])
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=case["tensor"], pipeline_model_parallel_size=case["stages"],
        create_gloo_process_groups=False,
    )  # fmt: skip
    recorder = Recorder(axes_of(case))
    note_passes(recorder)
    with capture_mode(), recorder, OnTheGpu():
        model = model_of(case, stage)
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam", lr=1e-4, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True,
                clip_grad=1.0, overlap_param_gather=case["overlap_param_gather"],
            ),
            [model],
            use_gloo_process_groups=False,
        )  # fmt: skip
        for micro_batches in (1, case["micro_batches"]):
            recorder.events, recorder.passes = [], Counter()
            one_step(case, model, optimizer, micro_batches)
    with unset_fake_temporarily():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    return recorder.events


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    c10d = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    pretend(c10d)  # what it registers lives as long as the library
    for stage in asked["record"]:
        print(json.dumps(run_stage(asked, stage)))
