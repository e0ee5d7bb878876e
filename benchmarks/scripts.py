"""How long `echoc capture` takes for 1,024 ranks: whole processes, imports and writing included.

python -m benchmarks.scripts [--runs 1]

Megatron: Llama-3-8B's shape at TP 8 x PP 4 x DP 32, eight micro-batches, the example's script, which runs once for
each stage. DeepSpeed: Llama-3-8B in shares (ZeRO-3), which runs once.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from importlib.util import find_spec
from pathlib import Path

from benchmarks.measure import echo, measure

ROOT = Path(__file__).resolve().parents[1]
MEGATRON = ROOT / "examples" / "megatron-gpt" / "pretrain.py"
LLAMA = ROOT / "tests" / "frontend" / "deepspeed" / "deepspeed_llama.py"
PLAN = """
--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --sequence-parallel --use-distributed-optimizer
--accumulate-allreduce-grads-in-fp32 --overlap-grad-reduce --no-align-grad-reduce --bf16 --global-batch-size 256
--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --num-query-groups 8
--seq-length 8192 --padded-vocab-size 129024 --normalization RMSNorm --swiglu --disable-bias-linear
--untie-embeddings-and-output-weights
"""
ZERO = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "zero_optimization": {"stage": 3},
}


def main() -> None:
    """Prints one line a script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1)
    runs = parser.parse_args().runs
    os.environ["DS_ACCELERATOR"] = "cpu"
    with tempfile.TemporaryDirectory() as scratch:
        config = Path(scratch) / "zero3.json"
        config.write_text(json.dumps(ZERO))
        captures = {
            "megatron": (MEGATRON, PLAN.split()),
            "deepspeed": (LLAMA, ["--deepspeed_config", str(config)]),
        }
        print(f"{'capture for 1,024 ranks':<40} {'wall s':>7} {'cpu s':>7} {'MiB':>6} {'KiB written':>11}")
        for framework, (script, arguments) in captures.items():
            if find_spec(framework) is None:
                print(f"{framework} is not installed")
                continue
            written = Path(scratch) / f"{framework}.pb"
            command = echo("echoc", "capture", framework, "--script", str(script), "--world-size", "1024")
            result = measure([*command, "-o", str(written), "--", *arguments], runs=runs, cwd=Path(scratch))
            size = written.stat().st_size / 1024
            label = f"{framework}: {script.name}"
            print(
                f"{label:<40} {result.wall_s:7.1f} {result.cpu_s:7.1f} {result.peak_MiB:6.0f} {size:11.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
