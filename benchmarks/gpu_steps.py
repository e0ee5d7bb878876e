"""Training steps of public models on one GPU: measured where there is one, captured where there is none.

python benchmarks/gpu_steps.py NAME --seconds 5 --out steps.jsonl       on a GPU
echoc capture torch --script benchmarks/gpu_steps.py --world-size 1 -o NAME.pb -- NAME

`python -m benchmarks.gpu_beside` holds predictions of the captured steps against those in benchmarks/measured.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

PROFILED = 2


@dataclass(frozen=True)
class Run:
    """One training run: a model at its published sizes, and how it is trained."""

    model: str
    batch: int
    length: int
    precision: str
    compiled: bool = False


RUNS = {
    "gpt2": Run("gpt2", 16, 1024, "autocast"),
    "gpt2-compiled": Run("gpt2", 16, 1024, "autocast", compiled=True),
    "gpt2-fp32": Run("gpt2", 8, 1024, "fp32"),
    "bert": Run("bert", 32, 512, "autocast"),
    "llama": Run("llama", 2, 4096, "bf16"),
    "llama-compiled": Run("llama", 2, 4096, "bf16", compiled=True),
    "llama-long": Run("llama", 1, 16384, "bf16"),
    "resnet50": Run("resnet50", 256, 224, "autocast"),
    "nano": Run("nano", 12, 256, "autocast"),
}
"""`llama`: four layers of Llama-3 8B with its vocabulary; `nano`: nanoGPT's model of characters; others whole."""


def build(model: str) -> tuple[Any, int]:
    """A model of transformers with random weights, and the size of its vocabulary (0: it takes images)."""
    import transformers as t

    if model in ("gpt2", "nano"):
        of_gpt2 = t.GPT2Config(use_cache=False)
        if model == "nano":
            of_gpt2 = t.GPT2Config(
                n_embd=384, n_layer=6, n_head=6, n_positions=256, vocab_size=65, use_cache=False
            )
        return t.GPT2LMHeadModel(of_gpt2), of_gpt2.vocab_size
    if model == "bert":
        return t.BertForMaskedLM(t.BertConfig()), t.BertConfig().vocab_size
    if model == "llama":
        of_llama = t.LlamaConfig(
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=4,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=128256,
            max_position_embeddings=131072,
            use_cache=False,
        )
        return t.LlamaForCausalLM(of_llama), 128256
    return t.ResNetForImageClassification(t.ResNetConfig.from_dict({"num_labels": 1000})), 0


def step_of(run: Run, device: torch.device) -> Callable[[], Any]:
    """What makes one training step of a run."""
    torch.manual_seed(0)
    with device:
        model, vocabulary = build(run.model)
    if run.precision == "bf16":
        model = model.to(torch.bfloat16)
    model.train()
    optimizer: torch.optim.Optimizer
    if vocabulary:
        tokens = torch.randint(0, vocabulary, (run.batch, run.length), device=device)
        feed = {"input_ids": tokens, "labels": tokens}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=run.precision == "bf16")
    else:
        model = model.to(memory_format=torch.channels_last)
        images = torch.randn(run.batch, 3, run.length, run.length, device=device)
        classes = torch.randint(0, 1000, (run.batch,), device=device)
        feed = {"pixel_values": images.to(memory_format=torch.channels_last), "labels": classes}
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4)
    if run.compiled:
        model = torch.compile(model)

    def step() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=run.precision == "autocast"):
            loss = model(**feed).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measure(name: str, step: Callable[[], Any], seconds: float) -> dict[str, Any]:
    """Steps in a row for so long, their peak of memory, and the kernels of two more: times in seconds."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    found: dict[str, Any] = {"name": name, "torch": torch.__version__, "device": torch.cuda.get_device_name()}
    found["at_rest_bytes"] = torch.cuda.memory_allocated()
    times = list[float]()
    began = last = time.perf_counter()
    while last - began < seconds:
        for _ in range(4):
            step()
        torch.cuda.synchronize()
        now = time.perf_counter()
        times.append((now - last) / 4)
        last = now
    found |= {"steps_s": times, "peak_bytes": torch.cuda.max_memory_allocated()}
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = {}
    for event in profiled.events():
        if event.device_type.name == "CUDA" and not event.is_user_annotation:
            count, total = kernels.get(event.name, [0.0, 0.0])
            kernels[event.name] = [count + 1 / PROFILED, total + event.device_time / 1e6 / PROFILED]
    return found | {"kernels": kernels}


def main() -> None:
    """Makes three steps of a run, and measures more where it is asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=list(RUNS))
    parser.add_argument("--seconds", type=float, default=0.0, help="how long to measure; 0: not at all")
    parser.add_argument("--out", type=Path, default=Path("steps.jsonl"), help="a line of JSON is added to it")
    given = parser.parse_args()
    step = step_of(RUNS[given.name], torch.device("cuda"))
    for _ in range(3):
        step()
    if given.seconds:
        found = measure(given.name, step, given.seconds)
        with given.out.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(found) + "\n")
        print(f"{given.name}: {sorted(found['steps_s'])[len(found['steps_s']) // 2] * 1e3:.3f} ms a step")


if __name__ == "__main__":
    main()
