"""The example at Llama's shape, under tensor, sequence, pipeline and data parallelism: options and capture."""

from __future__ import annotations

import warnings
from pathlib import Path

from echograph.ir.graph import JobGraph

SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "megatron-gpt" / "pretrain.py"


def options(
    *, world: int, tensor: int, stages: int, micro_batches: int, layers: int, hidden: int, channels: int,
    heads: int, kv_heads: int, vocabulary: int, length: int,
) -> str:  # fmt: skip
    """The script's arguments."""
    return (
        f"--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {stages} --sequence-parallel "
        f"--num-layers {layers} --hidden-size {hidden} --ffn-hidden-size {channels} --num-attention-heads {heads} "
        f"--num-query-groups {kv_heads} --seq-length {length} --padded-vocab-size {vocabulary} "
        "--bf16 --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights "
        "--use-distributed-optimizer --accumulate-allreduce-grads-in-fp32 --overlap-grad-reduce "
        "--no-align-grad-reduce --disable-gloo-process-groups "
        f"--global-batch-size {micro_batches * world // (tensor * stages)}"
    )


def capture(arguments: str, world: int) -> JobGraph:
    """What the ranks of a world do in a step."""
    from echograph.frontend.megatron.adapter import MegatronAdapter
    from echograph.frontend.scripts.capture import capture_script
    from echograph.frontend.scripts.run import Script
    from echograph.frontend.scripts.world import World

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script = Script(path=SCRIPT, arguments=arguments.split())
        return capture_script(script, World(size=world), MegatronAdapter()).graph  # type: ignore[return-value]
