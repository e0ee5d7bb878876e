"""Trains a GPT with megatron-core on random tokens.

    torchrun --nproc-per-node 8 pretrain.py --tensor-model-parallel-size 4 --sequence-parallel --bf16 ...

The options are Megatron-LM's. Of megatron-core it uses the layers, the schedules, the data parallelism and the
optimizers as they are; attention is PyTorch's fused kernel, so neither Transformer Engine nor Apex is needed. With
`--transformer-impl transformer_engine` layers are Transformer Engine's.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.utils import get_batch_on_this_cp_rank
from torch import Tensor
from torch.nn import functional

Batch = dict[str, Tensor]


def arguments() -> argparse.Namespace:
    """The command line, with what follows from it."""
    parser = argparse.ArgumentParser(description="Trains a GPT with megatron-core on random tokens.")
    model = parser.add_argument_group("model")
    model.add_argument("--num-layers", type=int, default=4)
    model.add_argument("--hidden-size", type=int, default=64)
    model.add_argument("--ffn-hidden-size", type=int, help="default: four times the hidden size")
    model.add_argument("--num-attention-heads", type=int, default=4)
    model.add_argument("--num-query-groups", type=int, help="default: as many as heads")
    model.add_argument("--seq-length", type=int, default=64)
    model.add_argument("--max-position-embeddings", type=int, help="default: the sequence length")
    model.add_argument("--padded-vocab-size", type=int, default=256)
    model.add_argument("--position-embedding-type", choices=["rope", "learned_absolute"], default="rope")
    model.add_argument("--normalization", choices=["LayerNorm", "RMSNorm"], default="LayerNorm")
    model.add_argument("--swiglu", action="store_true")
    model.add_argument("--disable-bias-linear", action="store_true")
    model.add_argument("--untie-embeddings-and-output-weights", action="store_true")
    model.add_argument("--transformer-impl", choices=["local", "transformer_engine"], default="local")
    model.add_argument("--attention-backend", choices=["auto", "flash", "fused", "unfused"], default="auto")
    experts = parser.add_argument_group("experts")
    experts.add_argument("--num-experts", type=int)
    experts.add_argument("--moe-router-topk", type=int, default=2)
    experts.add_argument("--moe-ffn-hidden-size", type=int)
    experts.add_argument("--moe-token-dispatcher-type", choices=["allgather", "alltoall"], default="alltoall")
    experts.add_argument("--moe-grouped-gemm", action="store_true", help="of Transformer Engine's layers")
    experts.add_argument("--moe-expert-capacity-factor", type=float, help="tokens beyond it are dropped")
    experts.add_argument("--moe-pad-expert-input-to-capacity", action="store_true")
    plan = parser.add_argument_group("parallelism")
    plan.add_argument("--tensor-model-parallel-size", type=int, default=1)
    plan.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    plan.add_argument("--num-layers-per-virtual-pipeline-stage", type=int)
    plan.add_argument("--context-parallel-size", type=int, default=1)
    plan.add_argument("--expert-model-parallel-size", type=int, default=1)
    plan.add_argument("--sequence-parallel", action="store_true")
    plan.add_argument("--use-distributed-optimizer", action="store_true")
    plan.add_argument("--overlap-grad-reduce", action="store_true")
    plan.add_argument("--no-align-grad-reduce", action="store_false", dest="align_grad_reduce")
    plan.add_argument("--overlap-param-gather", action="store_true")
    plan.add_argument("--no-align-param-gather", action="store_false", dest="align_param_gather")
    plan.add_argument("--overlap-p2p-communication", action="store_true")
    plan.add_argument("--ddp-bucket-size", type=int)
    plan.add_argument("--recompute-granularity", choices=["selective", "full"])
    plan.add_argument("--recompute-method", choices=["uniform", "block"], default="uniform")
    plan.add_argument("--recompute-num-layers", type=int, default=1)
    plan.add_argument("--distributed-backend", choices=["nccl", "gloo"], default="nccl")
    plan.add_argument("--disable-gloo-process-groups", action="store_true")
    training = parser.add_argument_group("training")
    training.add_argument("--micro-batch-size", type=int, default=1)
    training.add_argument("--global-batch-size", type=int, help="default: one micro-batch a data-parallel rank")
    training.add_argument("--train-iters", type=int, default=3)
    training.add_argument("--log-interval", type=int, default=1)
    training.add_argument("--bf16", action="store_true")
    training.add_argument("--accumulate-allreduce-grads-in-fp32", action="store_true")
    training.add_argument("--lr", type=float, default=1e-3)
    training.add_argument("--clip-grad", type=float, default=1.0)
    training.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args()
    args.max_position_embeddings = args.max_position_embeddings or args.seq_length
    args.params_dtype = torch.bfloat16 if args.bf16 else torch.float32
    return args


def initialize(args: argparse.Namespace) -> None:
    """Makes the process groups and seeds the generators."""
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(args.distributed_backend)
    chunk = args.num_layers_per_virtual_pipeline_stage
    layers = args.num_layers // args.pipeline_model_parallel_size
    args.chunks = layers // chunk if chunk else None
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.chunks,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        create_gloo_process_groups=not args.disable_gloo_process_groups,
    )
    replicas = parallel_state.get_data_parallel_world_size()
    args.global_batch_size = args.global_batch_size or args.micro_batch_size * replicas
    args.micro_batches = args.global_batch_size // (args.micro_batch_size * replicas)
    torch.manual_seed(args.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)


# -- model ---------------------------------------------------------------------------------------------------


class FlashAttention(MegatronModule):
    """Causal attention in one kernel; keys and values of the whole sequence are gathered over its ranks."""

    def __init__(self, config: TransformerConfig, *_: Any, **__: Any) -> None:
        super().__init__(config)
        self.group = parallel_state.get_context_parallel_group()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attends.

        Args:
            query: [sequence, batch, heads, channels].
            key: [sequence, batch, query groups, channels], as is `value`.
            value: likewise.
            attention_mask: not used, nor is what follows: attention is causal.
            attn_mask_type: not used.
            attention_bias: not used.
            packed_seq_params: not used.
        """
        length, batch = query.shape[:2]
        ranks = self.config.context_parallel_size
        if ranks > 1:
            key, value = (
                tensor_parallel.gather_from_sequence_parallel_region(x, group=self.group) for x in (key, value)
            )
            # Rank r has the r-th chunk of the sequence from the front, and the r-th from the back.
            front = torch.arange(ranks, device=query.device)
            chunks = torch.stack([front, 2 * ranks - 1 - front], 1)
            positions = torch.arange(ranks * length, device=query.device).view(2 * ranks, -1)
            positions = positions[chunks].reshape(ranks, length)
            mask = positions[self.group.rank()].unsqueeze(1) >= positions.flatten()
            out = functional.scaled_dot_product_attention(
                *(x.permute(1, 2, 0, 3) for x in (query, key, value)), attn_mask=mask, enable_gqa=True
            )
        else:
            out = functional.scaled_dot_product_attention(
                *(x.permute(1, 2, 0, 3) for x in (query, key, value)), is_causal=True, enable_gqa=True
            )
        return out.permute(2, 0, 1, 3).reshape(length, batch, -1)


def configure(args: argparse.Namespace) -> TransformerConfig:
    """The transformer's configuration."""
    return TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        normalization=args.normalization,
        gated_linear_unit=args.swiglu,
        activation_func=functional.silu if args.swiglu else functional.gelu,
        add_bias_linear=not args.disable_bias_linear,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_backend=AttnBackend[args.attention_backend],
        num_moe_experts=args.num_experts,
        moe_router_topk=args.moe_router_topk,
        moe_ffn_hidden_size=args.moe_ffn_hidden_size,
        moe_grouped_gemm=args.moe_grouped_gemm,
        moe_token_dispatcher_type=args.moe_token_dispatcher_type,
        moe_expert_capacity_factor=args.moe_expert_capacity_factor,
        moe_pad_expert_input_to_capacity=args.moe_pad_expert_input_to_capacity,
        moe_router_load_balancing_type="none",
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.chunks,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        sequence_parallel=args.sequence_parallel,
        overlap_p2p_comm=args.overlap_p2p_communication,
        batch_p2p_comm=not args.overlap_p2p_communication,
        recompute_granularity=args.recompute_granularity,
        recompute_method=args.recompute_method if args.recompute_granularity == "full" else None,
        recompute_num_layers=args.recompute_num_layers if args.recompute_granularity == "full" else None,
        bf16=args.bf16,
        params_dtype=args.params_dtype,
        pipeline_dtype=args.params_dtype,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        deallocate_pipeline_outputs=True,
    )


def build_chunk(args: argparse.Namespace, config: TransformerConfig, chunk: int | None) -> DistributedDataParallel:
    """What a rank holds of the model, or one chunk of it where stages are interleaved."""
    if args.transformer_impl == "transformer_engine":
        layer = get_gpt_layer_with_transformer_engine_spec(
            num_experts=args.num_experts, moe_grouped_gemm=args.moe_grouped_gemm
        )
    else:
        layer = get_gpt_layer_local_spec(num_experts=args.num_experts, normalization=args.normalization)
    if args.transformer_impl == "local" and args.attention_backend in ("auto", "flash"):
        layer.submodules.self_attention.submodules.core_attention = ModuleSpec(module=FlashAttention)
    module = GPTModel(
        config=config,
        transformer_layer_spec=layer,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        vp_stage=chunk,
    )
    module.cuda(torch.cuda.current_device())
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=args.accumulate_allreduce_grads_in_fp32,
        overlap_grad_reduce=args.overlap_grad_reduce,
        overlap_param_gather=args.overlap_param_gather,
        use_distributed_optimizer=args.use_distributed_optimizer,
        bucket_size=args.ddp_bucket_size,
    )
    return DistributedDataParallel(
        config,
        options,
        Float16Module(config, module) if args.bf16 else module,
        disable_bucketing=bool(chunk),
    )


def build(args: argparse.Namespace) -> tuple[list[DistributedDataParallel], Any]:
    """The model's chunks and the optimizer."""
    config = configure(args)
    model = [build_chunk(args, config, None if args.chunks is None else i) for i in range(args.chunks or 1)]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=args.lr,
            bf16=args.bf16,
            params_dtype=args.params_dtype,
            use_distributed_optimizer=args.use_distributed_optimizer,
            overlap_param_gather=args.overlap_param_gather,
            clip_grad=args.clip_grad,
        ),
        model,
        use_gloo_process_groups=not args.disable_gloo_process_groups,
    )
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if args.overlap_grad_reduce:
        config.no_sync_func = each(model, "no_sync")
        if args.align_grad_reduce:
            config.grad_sync_func = each(model, "start_grad_sync")
    if args.overlap_param_gather and args.align_param_gather:
        config.param_sync_func = each(model, "start_param_sync")
    return model, optimizer


def each(model: list[DistributedDataParallel], method: str) -> Any:
    """A method of the only chunk, or of each."""
    methods = [getattr(chunk, method) for chunk in model]
    return methods if len(methods) > 1 else methods[0]


# -- training ------------------------------------------------------------------------------------------------


def batches(args: argparse.Namespace) -> Iterator[Batch]:
    """Random tokens; the same on all ranks of a replica, in this rank's share of the sequence."""
    generator = torch.Generator().manual_seed(args.seed + parallel_state.get_data_parallel_rank())
    shape = args.micro_batch_size, args.seq_length + 1
    while True:
        text = torch.randint(args.padded_vocab_size, shape, generator=generator).cuda(non_blocking=True)
        positions = torch.arange(args.seq_length, device=text.device).expand(args.micro_batch_size, -1)
        batch = {"tokens": text[:, :-1], "labels": text[:, 1:], "position_ids": positions}
        batch = {name: tensor.contiguous() for name, tensor in batch.items()}
        yield get_batch_on_this_cp_rank(batch)


def loss_func(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum of the losses of this rank's tokens, their number, and both for the log."""
    loss = output.float().sum()
    tokens = torch.tensor(output.numel(), dtype=torch.int, device=output.device)
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.float()])}


def forward_step(iterator: Iterator[Batch], model: Any) -> tuple[Tensor, Any]:
    """Forward pass of one micro-batch."""
    batch = next(iterator)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(loss_func)


def train_step(args: argparse.Namespace, model: list[Any], optimizer: Any, data: Any) -> list[dict[str, Tensor]]:
    """All micro-batches forward and backward, and the optimizer's step."""
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data,
        model=model,
        num_microbatches=args.micro_batches,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=False,
    )
    optimizer.step()
    return losses


def main() -> None:
    """Trains, and says how the loss goes."""
    args = arguments()
    initialize(args)
    model, optimizer = build(args)
    data = [batches(args) for _ in model]
    for iteration in range(args.train_iters):
        losses = train_step(args, model, optimizer, data if len(data) > 1 else data[0])
        if parallel_state.is_pipeline_last_stage(ignore_virtual=True) and iteration % args.log_interval == 0:
            total = torch.stack([loss["lm loss"] for loss in losses]).sum(0)
            if parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0:
                print(f"iteration {iteration}: lm loss {(total[0] / total[1]).item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
