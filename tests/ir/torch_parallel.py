"""What torch's own parallel wrappers compute and communicate: a fake process group and fake tensors.

Run as a program, since it makes default process groups: the argument is a JSON object with `model`, `changes` (of
its configuration), `ranks`, `tensor` (ranks of a tensor-parallel group), `positions` and `plans`; each plan is
"tp", "tp_sp", "fsdp_tp" or "ddp". For each it prints one line with the plan, matrix products by their extents
(m, k, n) and collectives as (kind, ranks of the group, bytes of the larger buffer, type), counted.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from echograph.frontend.pytorch.capture import capture_mode
from echograph.models import build, get_model

DTYPES = {torch.float32: "FP32", torch.bfloat16: "BF16", torch.int64: "INT64"}
FUNCTIONAL = {
    "all_reduce": "ALL_REDUCE",
    "all_gather_into_tensor": "ALL_GATHER",
    "reduce_scatter_tensor": "REDUCE_SCATTER",
}
# Which argument is the larger buffer, and which the group.
PLAIN = {
    "c10d::_allgather_base_": ("ALL_GATHER", 0, 2),
    "c10d::_reduce_scatter_base_": ("REDUCE_SCATTER", 1, 2),
    "c10d::allreduce_": ("ALL_REDUCE", 0, 1),
    "c10d::broadcast_": ("BROADCAST", 0, 1),
}
WHOLE = Replicate()


class Recorder(TorchDispatchMode):
    """Counts matrix products and collectives of local tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.products: Counter[tuple[int, ...]] = Counter()
        self.collectives: Counter[tuple[str, int, int, str]] = Counter()
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        name, schema = func.overloadpacket.__name__, func._schema.name
        if not self.paused:
            if name in ("mm", "addmm"):
                a, b = args[-2:]
                self.products[*a.shape, b.shape[1]] += 1
            elif func.namespace == "_c10d_functional" and name != "wait_tensor":
                ranks = _resolve_process_group(args[-1]).size()
                parts = ranks if name.startswith("all_gather") else 1
                self._count(FUNCTIONAL[name], ranks, args[0], parts)
            elif schema in PLAIN:
                kind, buffer, group = PLAIN[schema]
                whole = args[buffer][0] if isinstance(args[buffer], list) else args[buffer]
                self._count(kind, dist.ProcessGroup.unbox(args[group]).size(), whole)
            elif func.namespace == "c10d":
                raise NotImplementedError(schema)
        return func(*args, **(kwargs or {}))

    def _count(self, kind: str, ranks: int, tensor: torch.Tensor, parts: int = 1) -> None:
        self.collectives[kind, ranks, parts * tensor.nbytes, DTYPES[tensor.dtype]] += 1

    def ignore_shape_inference(self) -> None:
        """DTensor runs each operator once more on global shapes to learn its result's; that is no work."""
        infer = ShardingPropagator._propagate_tensor_meta_non_cached

        def quietly(*args: Any, **kwargs: Any) -> Any:
            self.paused, before = True, self.paused
            try:
                return infer(*args, **kwargs)
            finally:
                self.paused = before

        ShardingPropagator._propagate_tensor_meta_non_cached = quietly  # type: ignore[method-assign]


# -- tensor-parallel plans -----------------------------------------------------------------------------------


class Conv1D(ParallelStyle):
    """GPT-2's linear layer, whose weight lies as [inputs, outputs]: colwise or rowwise."""

    def __init__(self, style: ColwiseParallel | RowwiseParallel) -> None:
        super().__init__()
        self.style = style
        self.column = isinstance(style, ColwiseParallel)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        style = self.style
        if not self.column:
            style.desired_input_layouts = (Shard(-1),)

        def share(name: str, owner: nn.Module, mesh: DeviceMesh) -> None:
            del name
            layouts = {"weight": Shard(1 if self.column else 0), "bias": Shard(0) if self.column else WHOLE}
            for key, layout in layouts.items():
                tensor = distribute_tensor(getattr(owner, key), mesh, [layout], src_data_rank=None)
                owner.register_parameter(key, nn.Parameter(tensor))

        return distribute_module(
            module,
            device_mesh,
            share,
            lambda m, i, mesh: style._prepare_input_fn(
                style.input_layouts, style.desired_input_layouts, m, i, mesh
            ),
            lambda m, o, mesh: style._prepare_output_fn(style.output_layouts, style.use_local_output, m, o, mesh),
        )


def _row(between: Placement) -> RowwiseParallel:
    return RowwiseParallel(output_layouts=between, use_local_output=between == WHOLE)


def _rest(between: Placement, embedding: str, norm: str) -> dict[str, Any]:
    local = between == WHOLE
    rest: dict[str, Any] = {
        embedding: RowwiseParallel(input_layouts=WHOLE, output_layouts=between, use_local_output=local),
        "lm_head": ColwiseParallel(input_layouts=between, use_local_output=False),
    }
    return rest if local else rest | {norm: SequenceParallel()}


def _llama(module: Any, between: Placement, size: int) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    del size
    layer = {
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": between}, desired_input_kwarg_layouts={"hidden_states": WHOLE}
        ),
        "mlp": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(WHOLE,)),
        **{f"self_attn.{x}_proj": ColwiseParallel() for x in "qkv"},
        **{f"mlp.{x}_proj": ColwiseParallel() for x in ("gate", "up")},
        "self_attn.o_proj": _row(between),
        "mlp.down_proj": _row(between),
    }
    if between != WHOLE:
        layer |= {name: SequenceParallel() for name in ("input_layernorm", "post_attention_layernorm")}
    return module.model.layers, layer, _rest(between, "model.embed_tokens", "model.norm")


def _gpt2(module: Any, between: Placement, size: int) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    for block in module.transformer.h:  # it splits queries, keys and values of a rank's own heads
        block.attn.split_size //= size
    layer: dict[str, Any] = {
        "attn": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(WHOLE,)),
        "mlp": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(WHOLE,)),
        "attn.c_attn": Conv1D(ColwiseParallel()),
        "attn.c_proj": Conv1D(_row(between)),
        "mlp.c_fc": Conv1D(ColwiseParallel()),
        "mlp.c_proj": Conv1D(_row(between)),
    }
    if between != WHOLE:
        layer |= {name: SequenceParallel() for name in ("ln_1", "ln_2")}
    return module.transformer.h, layer, _rest(between, "transformer.wte", "transformer.ln_f")


def _bert(module: Any, between: Placement, size: int) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    del size
    if between != WHOLE:
        raise NotImplementedError("BERT's layers alone, whose stream is whole")
    columns = [*(f"attention.self.{x}" for x in ("query", "key", "value")), "intermediate.dense"]
    layer = {
        "attention.self": PrepareModuleInput(input_layouts=(WHOLE,), desired_input_layouts=(WHOLE,)),
        **{name: ColwiseParallel() for name in columns},
        **{name: RowwiseParallel() for name in ("attention.output.dense", "output.dense")},
    }
    return module.bert.encoder.layer, layer, {}


PLANS = {"llama": _llama, "gpt2": _gpt2, "bert": _bert}


def share(module: nn.Module, model: str, mesh: DeviceMesh, sequence: bool) -> None:
    """Makes a model tensor-parallel, with activations between the layers whole or shared by sequence."""
    family = next(plan for name, plan in PLANS.items() if model.startswith(name))
    layers, layer_plan, rest = family(module, Shard(1) if sequence else WHOLE, mesh.size())
    for layer in layers:
        parallelize_module(layer, mesh, layer_plan, src_data_rank=None)
    parallelize_module(module, mesh, rest, src_data_rank=None)


# -- running -------------------------------------------------------------------------------------------------


def shard(module: nn.Module, mesh: DeviceMesh) -> None:
    """FSDP2, a layer a unit: parameters gathered in bf16, gradients reduced in fp32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers = next(m for m in module.modules() if isinstance(m, nn.ModuleList))
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)


def replicate(built: Any, fake: Any) -> nn.Module:
    """DDP with its buckets in the order of the backward pass, as they are from the second step on."""
    with unset_fake_temporarily():
        net = DistributedDataParallel(built.module, init_sync=False)

    def reduce(state: None, bucket: Any) -> Any:
        del state
        dist.all_reduce(bucket.buffer())
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    reduce.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
    net.register_comm_hook(None, reduce)
    with fake:
        built.loss(net(**built.inputs)).backward()
    with unset_fake_temporarily():
        net.reducer._rebuild_buckets()
    return net


def run(case: dict[str, Any], plan: str) -> Recorder:
    """One forward and backward pass under a plan."""
    ranks, tensor = case["ranks"], case["tensor"]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    recorder = Recorder()
    # FSDP2 converts fp32 parameters itself; the others train in bf16.
    torch.set_default_dtype(torch.float32 if plan == "fsdp_tp" else torch.bfloat16)
    try:
        with capture_mode() as fake:
            entry = get_model(case["model"]).with_config(**case["changes"])
            built = build(entry, batch_size=1, seq_len=case["positions"])
        built.module.train()
        net = built.module
        if plan == "ddp":
            net = replicate(built, fake)
        else:
            mesh = init_device_mesh("cpu", (ranks // tensor, tensor), mesh_dim_names=("dp", "tp"))
            with unset_fake_temporarily():
                share(built.module, case["model"], mesh["tp"], plan == "tp_sp")
                if plan == "fsdp_tp":
                    shard(built.module, mesh["dp"])
        recorder.ignore_shape_inference()
        with fake, recorder, loss_parallel(), implicit_replication():
            built.loss(net(**built.inputs)).backward()
    finally:
        torch.set_default_dtype(torch.float32)
        dist.destroy_process_group()
    return recorder


def main() -> None:
    case = json.loads(sys.argv[1])
    for plan in case["plans"]:
        found = run(case, plan)
        rows = [[[*key, n] for key, n in counts.items()] for counts in (found.products, found.collectives)]
        print(json.dumps([plan, *rows]))


if __name__ == "__main__":
    main()
