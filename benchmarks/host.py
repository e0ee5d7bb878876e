"""What Python, autograd and a framework cost the host for every operation, measured on this processor.

python -m benchmarks.host [--seconds S] [FRAMEWORK ...]

Training steps of two depths run for real, with tensors so small that arithmetic takes little; by how much the
deeper one takes longer is the time of its layers, without what a step has but once. It is CPU time of the thread.
All cases take turns, and of a case's turns the one counts that nineteen of twenty are longer than: nobody
disturbed it. On a busy machine that needs priority all the same (nice -n -12), or caches are cold after each
change of turns. Two widths, one of which has four times the elements, tell what still is arithmetic, which is
taken off. Operations are counted as a capture counts them: a kernel or a view each.

A CPU's backward runs on the thread that calls it, a device's on one of autograd's own: what handing over costs is
not in the figure, and neither is launching, which is the driver's work.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

DEPTHS = (2, 6)
SIZES = ((16, 4), (32, 8))
"""Width, and tokens: the second have four times the elements of the first."""
HEADS = 4
PHASES = ("forward", "recompute", "backward")
_OF_RANDOM_STATES = ("aten.eq", "aten.all", "aten._local_scalar_dense", "aten.detach", "aten._to_copy")
_NO_KERNEL = ("aten.empty", "aten.new_empty", "aten.bernoulli_", "aten.div_", *_OF_RANDOM_STATES)
"""What launches nothing on a device: memory, comparisons of random states, which are the host's own, and what the
CPU writes dropout as (its last multiplication stands for the device's one kernel)."""


class Step(Protocol):
    """Runs forward and backward, with recomputation or without."""

    def __call__(self, again: bool, clock: Callable[[], float] | None = None) -> tuple[float, float]:
        """Seconds, or what another clock says, of each."""


Make = Callable[[int, int, int], Step]
"""Layers, width and tokens -> their step."""


class Operations(TorchDispatchMode):
    """Counts operations as a capture does."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts one."""
        self.count += not str(func).startswith(_NO_KERNEL)
        return func(*args, **(kwargs or {}))


def main() -> None:
    """Prints a line for each framework, and writes host.json to $OUT (default: out/host)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host")
    parser.add_argument("frameworks", nargs="*", default=list(FRAMEWORKS), metavar="FRAMEWORK")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each framework")
    given = parser.parse_args()
    torch.set_num_threads(1)
    out = Path(os.environ.get("OUT", "out/host"))
    out.mkdir(parents=True, exist_ok=True)
    results = {}
    print(f"{'framework':<16}{'phase':<12}{'us/layer':>10}{'arithmetic':>12}{'operations':>12}{'us each':>9}")
    for name in given.frameworks:
        results[name] = measure(FRAMEWORKS[name], given.seconds)
        for phase, found in results[name].items():
            print(
                f"{name:<16}{phase:<12}{1e6 * found['layer_s']:>10.0f}{1e6 * found['arithmetic_s']:>12.0f}"
                f"{found['operations']:>12.1f}{1e6 * found['op_s']:>9.2f}",
                flush=True,
            )
    (out / "host.json").write_text(json.dumps(results, indent=2) + "\n")


def measure(make: Make, seconds: float) -> dict[str, dict[str, float]]:
    """Seconds of a layer and of one of its operations, by phase.

    Args:
        make: layers, width and tokens -> their step.
        seconds: how long to take turns.
    """
    cases = {(depth, size): make(depth, *size) for depth in DEPTHS for size in SIZES}
    taken = turns(cases, (False, True), seconds)

    def layer(size: tuple[int, int], again: bool, side: int) -> float:
        shallow, deep = (undisturbed(taken[((depth, size), again)], side) for depth in DEPTHS)
        return (deep - shallow) / (DEPTHS[1] - DEPTHS[0])

    def phases(size: tuple[int, int]) -> tuple[float, float, float]:
        forward, backward = layer(size, False, 0), layer(size, False, 1)
        whole = layer(size, True, 0) + layer(size, True, 1)
        return forward, whole - forward - backward, backward

    counts = _counts(cases[DEPTHS[0], SIZES[0]], cases[DEPTHS[1], SIZES[0]])
    found = {}
    for phase, small, large, count in zip(PHASES, *map(phases, SIZES), counts, strict=True):
        arithmetic = max(0.0, large - small) / 3  # of four times the elements, less one
        host = small - arithmetic
        found[phase] = {"layer_s": host, "arithmetic_s": arithmetic, "operations": count, "op_s": host / count}
    return found


def turns(
    cases: Mapping[Any, Step], ways: Sequence[bool], seconds: float
) -> dict[tuple[Any, bool], list[tuple[float, float]]]:
    """Seconds of forward and backward passes of all cases, turn by turn, with recomputation, without, or both."""
    for step in cases.values():  # what is compiled is compiled now
        for again in ways:
            step(again)
    taken: dict[tuple[Any, bool], list[tuple[float, float]]] = defaultdict(list)
    until = time.monotonic() + seconds
    while time.monotonic() < until or len(next(iter(taken.values()))) < 10:
        for case, step in cases.items():
            for again in ways:
                taken[case, again].append(step(again))
    return taken


def undisturbed(taken: Sequence[tuple[float, float]], side: int) -> float:
    """Seconds that nineteen of twenty turns take longer than, of one side."""
    of_it = sorted(turn[side] for turn in taken[2:])
    return of_it[len(of_it) // 20]


def _counts(shallow: Step, deep: Step) -> tuple[float, float, float]:
    """Operations of a layer, by phase; a layer's forward pass is what recomputation runs again."""

    def count(step: Step, again: bool) -> tuple[int, int]:
        # A capture has what is compiled operation by operation.
        with torch.compiler.set_stance("force_eager"), Operations() as mode:
            marks = step(again, lambda: mode.count)
        return marks[0], mode.count - marks[0]

    more = DEPTHS[1] - DEPTHS[0]
    forward, backward = ((b - a) / more for a, b in zip(count(shallow, False), count(deep, False), strict=True))
    return forward, forward, backward


@dataclass(frozen=True, slots=True)
class Trained:
    """A stack of layers and what it is fed."""

    run: Callable[[bool], Tensor]
    clock: Callable[[], float] = time.thread_time

    def __call__(self, again: bool, clock: Callable[[], float] | None = None) -> tuple[float, float]:
        """Seconds, or what another clock says, of forward and backward."""
        now = clock or self.clock
        begun = now()
        loss = self.run(again)
        half = now()
        loss.backward(torch.ones_like(loss))
        return half - begun, now() - half


def _hugging_face(config: Callable[[int, int], Any]) -> Make:
    """Decoders of Hugging Face: a `config` of so many layers of a width; recomputed as `torch` does it."""

    def make(layers: int, width: int, tokens: int) -> Step:
        from transformers import AutoModelForCausalLM

        def model(again: bool) -> nn.Module:
            made = AutoModelForCausalLM.from_config(config(layers, width), attn_implementation="eager").train()
            if again:
                made.gradient_checkpointing_enable({"use_reentrant": True})
            return made

        models = {again: model(again) for again in (False, True)}
        text = torch.zeros(1, tokens, dtype=torch.int64)

        def run(again: bool) -> Tensor:
            embedded = models[again].get_input_embeddings()(text)
            return models[again].base_model(inputs_embeds=embedded, use_cache=False).last_hidden_state

        return Trained(run)

    return make


def _gpt2(layers: int, width: int) -> Any:
    from transformers import GPT2Config

    return GPT2Config(n_layer=layers, n_embd=width, n_head=HEADS, vocab_size=64, n_positions=64)


def _llama(layers: int, width: int) -> Any:
    from transformers import LlamaConfig

    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_attention_heads": HEADS}
    return LlamaConfig(num_hidden_layers=layers, vocab_size=64, max_position_embeddings=64, **sizes)


def without_a_device() -> None:
    """A generator stands for the device's, whose states Megatron-LM saves and restores around what draws."""
    state = torch.Generator()
    stands_in: dict[str, Any] = {
        "get_rng_state": lambda *_, **__: state.get_state(),
        "set_rng_state": lambda new, *_, **__: state.set_state(new),
        "manual_seed": state.manual_seed,
        "current_device": lambda: "cpu",
    }
    for name, function in stands_in.items():
        setattr(torch.cuda, name, function)


def _megatron_core(layers: int, width: int, tokens: int) -> Step:
    """Megatron-core's layers without Transformer Engine, recomputed whole; its rank is alone.

    What `torch.compile` fuses of them, by default, is called as it is on a device: guards, then a kernel.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return megatron_layers(get_gpt_layer_local_spec(), layers, width, tokens)


def megatron_layers(
    spec: Any, layers: int, width: int, tokens: int, dtype: torch.dtype = torch.float32, **options: Any
) -> Step:
    """Layers of a specification, and options of theirs that are not as here."""
    import logging

    logging.disable(logging.WARNING)
    torch._dynamo.config.automatic_dynamic_shapes = False  # a training has one shape
    fake_group()
    without_a_device()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.transformer_block import TransformerBlock
    from megatron.core.transformer.transformer_config import TransformerConfig

    random._get_cuda_rng_state = lambda *_, **__: torch.cuda.get_rng_state()
    random._set_cuda_rng_state = lambda new, *_, **__: torch.cuda.set_rng_state(new)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        random.model_parallel_cuda_manual_seed(1)
    plain = {
        "num_layers": layers, "hidden_size": width, "num_attention_heads": HEADS, "use_cpu_initialization": True,
        "bias_activation_fusion": True, "bias_dropout_fusion": True, "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False, "attention_softmax_in_fp32": False, "params_dtype": dtype,
    } | options  # fmt: skip
    whole = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    blocks = {
        again: TransformerBlock(TransformerConfig(**plain, **(whole if again else {})), spec)
        for again in (False, True)
    }
    hidden = torch.randn(tokens, 1, width, dtype=dtype, requires_grad=True)
    mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool).triu(1)
    for block in blocks.values():
        for parameter in block.parameters():
            parameter.main_grad = torch.zeros_like(parameter)  # where gradients are added up as they are made
    return Trained(lambda again: blocks[again](hidden, mask))


def fake_group(ranks: int = 1) -> None:
    """A process group of so many ranks, of which this is the first, and whose collectives do nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with suppress(ValueError):  # there is one already
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)


FRAMEWORKS: dict[str, Make] = {
    "gpt2": _hugging_face(_gpt2),
    "llama": _hugging_face(_llama),
    "megatron-core": _megatron_core,
}
"""What is measured."""

if __name__ == "__main__":
    main()
