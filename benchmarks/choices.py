"""What each choice that was made while looking at measured steps is worth: predictions with it and without it.

python -m benchmarks.choices TABLE RESULT.json [--most 40] [--only WORD ...] [-o FOUND.json]

No constant is fitted to a step, but somebody chose what to look for, and looked at these rows meanwhile. An entry
of `CHOICES` is such a choice: the families that it moves, how it is taken back, what it rests on, whether that
source knows nothing of these rows. TABLE is the table of `echosim validate`, RESULT.json what that wrote of it,
all choices in. Rows of the families that a choice moves, at most `--most` of each, evenly drawn, are predicted
without it, and the mean absolute error of each family is held against that of the same rows in RESULT.json.
Prints a table in Markdown. All of it takes some ten minutes of processor time.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from echograph.models.stacks import load_stack, stack_names
from echograph.profiler.costs import estimate, power, releases
from echograph.profiler.costs.device import PowerModel
from echograph.workflow.system import System
from echograph.workflow.validation import run, trainers
from echograph.workflow.validation.table import MeasuredStep, read_measured_steps

NEMO, MEGATRON_2021 = ("dgxc", "mlperf"), ("sc21t1", "kor22", "mlm2009", "vtrainM", "bloom")
EVERY = ("dgxc", "mbridge", "mlperf", "titan", "mpt", "kor22", "sc21t1", "sc21t2", "vtrainM", "bloom")
OF_TODAY = "nemo nemo-2 megatron-bridge megatron-bridge-2025"
Undo = AbstractContextManager[None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A choice that can be taken back.

    Attributes:
        name: what was chosen, and what stands without it.
        families: those that it moves.
        without: predicts as if it had not been made, for as long as it is entered.
        source: what it rests on.
        independent: whether that source knows nothing of these rows.
    """

    name: str
    families: tuple[str, ...]
    without: Callable[[], Undo]
    source: str
    independent: bool


@contextmanager
def setting(where: Any, **values: Any) -> Iterator[None]:
    """Attributes of a module or a frozen record with other values."""
    before = {name: getattr(where, name) for name in values}
    try:
        for name, value in values.items():
            _set(where, name, value)
        yield
    finally:
        for name, value in before.items():
            _set(where, name, value)


def _set(where: Any, name: str, value: Any) -> None:
    if isinstance(where, type(run) | type):
        setattr(where, name, value)
    else:
        object.__setattr__(where, name, value)


def stack(names: str, **choices: Any) -> Callable[[], Undo]:
    """Stacks, their names apart by spaces, with other choices."""

    def without() -> Undo:
        stacks, found = (
            {name: load_stack(name) for name in stack_names()},
            ExitStack(),
        )  # all, as some are like others
        for name in names.split():
            found.enter_context(setting(stacks[name], **choices))
        return found

    return without


def rules(leave_out: Callable[[Any], bool]) -> Callable[[], Undo]:
    """The table of trainers without some of its rules for single rows and machines."""

    def without() -> Undo:
        file = trainers._read()
        kept = tuple(
            msgspec.structs.replace(one, when=tuple(rule for rule in one.when if not leave_out(rule)))
            for one in file.trainers
        )
        machines = tuple(one for one in file.machines if not leave_out(one))
        return setting(trainers, _read=lambda: msgspec.structs.replace(file, trainers=kept, machines=machines))

    return without


CHOICES = (
    Choice(
        name="boards rest while kernels wait for communication of their layer; without: they draw as ever",
        families=("dgxc", "mbridge", "mlperf", "titan", "mpt"),
        without=lambda: setting(System, _exposed=lambda *_: {}),
        source="an H200, measured with rests between products (benchmarks/measured/h200_power.csv)",
        independent=True,
    ),
    Choice(
        name="cuDNN's attention of 2024 and 2025 takes what it took then; without: what today's takes",
        families=(*NEMO, "mbridge"),
        without=lambda: setting(releases, RELEASES={}),
        source="NVIDIA/cudnn-frontend's tables of these releases",
        independent=True,
    ),
    Choice(
        name="llm-foundry's parameters are views of one tensor; without: copied after each gather",
        families=("mpt",),
        without=stack("llm-foundry llm-foundry-2024", flat_parameters=False),
        source="code of PyTorch and Composer",
        independent=True,
    ),
    Choice(
        name="boards differ, and a step waits for the slowest (1.5 %); without: all alike",
        families=EVERY,
        without=lambda: setting(power, slowest_of=lambda boards, spread: 1.0),
        source="Sinha et al. 2022, a study of older boards",
        independent=True,
    ),
    Choice(
        name="FP8 products of gradients take 1.15 times as long on Hopper; without: 1",
        families=("dgxc", "mlperf", "titan", "mbridge"),
        without=lambda: setting(estimate, SPLIT_ACCUMULATION={}),
        source="pytorch/ao#2377 (1.1 to 1.2), Transformer Engine's and torchao's code",
        independent=True,
    ),
    Choice(
        name="kernels of 2021's Megatron-LM wait for tensor-parallel all-reduces; without: those that need them",
        families=("bloom", "sc21t1", "sc21t2", "mlm2009"),
        without=stack("megatron-2021 megatron-deepspeed", tp_comm_waits=False),
        source="Megatron-LM's and BigScience's code",
        independent=True,
    ),
    Choice(
        name="DeepSpeed's ZeRO-1 reduces whole gradients on every rank; without: each its part",
        families=("bloom",),
        without=stack("megatron-2021 megatron-deepspeed", zero_all_reduces=False),
        source="code of DeepSpeed v0.5.8 to v0.6.4",
        independent=True,
    ),
    Choice(
        name="squared ReLU of NeMo 2.0 is not fused; without: fused",
        families=("dgxc",),
        without=stack("nemo-2", unfused=()),
        source="NeMo's code",
        independent=True,
    ),
    Choice(
        name="NeMo and Megatron-Bridge overlap tensor-parallel communication in chunks; without: bulk",
        families=(*NEMO, "mbridge"),
        without=stack(OF_TODAY, tp_comm_overlap="bulk"),
        source="NeMo's and Megatron-Bridge's recipes",
        independent=True,
    ),
    Choice(
        name="a reduction beside products takes 16 multiprocessors of them; without: none",
        families=(*NEMO, "mbridge"),
        without=stack(OF_TODAY, tp_comm_sms=0),
        source="Transformer Engine's default",
        independent=True,
    ),
    Choice(
        name="NeMo and Megatron-Bridge add gradients up in bf16; without: fp32",
        families=(*NEMO, "mbridge"),
        without=stack(OF_TODAY, grad_dtype="fp32"),
        source="NeMo's and Megatron-Bridge's recipes, dgxc-benchmarking",
        independent=True,
    ),
    Choice(
        name="tensor-parallel ranks gather in 8 bit what FP8 reads; without: in 16",
        families=(*NEMO, "mbridge", "titan"),
        without=stack(f"{OF_TODAY} torchtitan", fp8_gathers="bf16"),
        source="code of Transformer Engine and torchtitan",
        independent=True,
    ),
    Choice(
        name="FP8 casts weights once a step; without: for each micro-batch",
        families=(*NEMO, "mbridge"),
        without=stack(OF_TODAY, fp8_weights="micro-batch"),
        source="code of Megatron-LM and Transformer Engine",
        independent=True,
    ),
    Choice(
        name="rings of 2024's Transformer Engine hold the host; without: it runs ahead",
        families=("dgxc",),
        without=stack("nemo", ring_host_waits=False),
        source="code of Transformer Engine v1.10 to v1.13",
        independent=True,
    ),
    Choice(
        name="NeMo's host takes what megatron-core's takes; without: what is assumed of any",
        families=NEMO,
        without=stack("nemo nemo-2", host=""),
        source="megatron-core, measured",
        independent=True,
    ),
    Choice(
        name="experts' products are in FP8, too; without: in bf16",
        families=("mbridge",),
        without=stack(OF_TODAY, fp8_experts=False),
        source="code of Transformer Engine",
        independent=True,
    ),
    Choice(
        name="no dropout with NeMo; without: 0.1",
        families=("mlperf",),
        without=lambda: _trainer("nemo", dropout=0.1),
        source="recipes of NeMo",
        independent=True,
    ),
    Choice(
        name="LoRA's adapters beside the projections of attention alone; without: beside every matrix",
        families=("dgxc", "mbridge"),
        without=lambda: _lora(),
        source="recipes of NeMo and Megatron-Bridge",
        independent=True,
    ),
    Choice(
        name="dispatcher and overlap of experts' exchanges by release; without: the stack's alone",
        families=("mbridge",),
        without=rules(lambda rule: any("moe" in key for key in getattr(rule, "set", {}))),
        source="Megatron-Bridge's scripts at named releases",
        independent=True,
    ),
    Choice(
        name="ZeRO-3 of 2021 gathers tensors one by one, and its host waits; without: ahead, as today's",
        families=("sc21t2",),
        without=stack("deepspeed-2021", zero3_apart=False, host_waits=False),
        source="code of DeepSpeed v0.3.13 to v0.3.16",
        independent=True,
    ),
    Choice(
        name="llm-foundry of 2023 ran Triton's attention; without: FlashAttention-2",
        families=("mpt",),
        without=stack("llm-foundry", attention=("flash2",)),
        source="llm-foundry's scripts",
        independent=True,
    ),
    Choice(
        name="its two metrics go over the logits of each micro-batch; without: they do not",
        families=("mpt",),
        without=stack("llm-foundry llm-foundry-2024", logged_losses=0),
        source="code of llm-foundry and Composer",
        independent=True,
    ),
    Choice(
        name="its recomputation does not stop early; without: it does",
        families=("mpt",),
        without=stack("llm-foundry", recompute_early_stop=True),
        source="llm-foundry's setup.py, release notes of PyTorch 2.1",
        independent=True,
    ),
    Choice(
        name="its tables of January 2024 ran later software; without: that of 2023",
        families=("mpt",),
        without=rules(lambda rule: getattr(rule, "gpus_above", 0) == 127),
        source="the commit that added them",
        independent=True,
    ),
    Choice(
        name="torchtitan's H100 are of 500 W with HBM2e; without: those of the data sheet",
        families=("titan",),
        without=rules(lambda rule: getattr(rule, "cluster", "") == "grand-teton-h100"),
        source="torchtitan's reports",
        independent=True,
    ),
    Choice(
        name="torchtitan compiles each layer by itself; without: nothing is fused",
        families=("titan",),
        without=stack("torchtitan", fuse=""),
        source="torchtitan's code",
        independent=True,
    ),
    Choice(
        name="torchtitan rotates by complex numbers and repeats keys and values; without: as a library would",
        families=("titan",),
        without=stack("torchtitan", complex_rotation=False, repeated_heads=False),
        source="torchtitan's code (pytorch/torchtitan#15)",
        independent=True,
    ),
    Choice(
        name="asynchronous tensor parallelism where a report says so; without: none",
        families=("titan",),
        without=rules(lambda rule: getattr(rule, "set", {}).get("tp_comm_overlap") == "chunks"),
        source="torchtitan's reports, code of PyTorch (micro_pipeline_tp.py, _symmetric_memory)",
        independent=True,
    ),
    Choice(
        name="FlashAttention-2 on Hopper draws what was measured; without: what products draw",
        families=("titan", "mpt"),
        without=lambda: setting(PowerModel, joules_of=_of_products),
        source="an H200, measured (benchmarks/measured/h200_power.csv)",
        independent=True,
    ),
    Choice(
        name="pipelines of 2021 reduce gradients after backward; without: during",
        families=MEGATRON_2021,
        without=stack("megatron-2021", overlap_grad_reduce_in_pipelines=True),
        source="code of Megatron-LM v2.x",
        independent=True,
    ),
    Choice(
        name="the host waits for what a stage receives; without: it runs ahead",
        families=MEGATRON_2021,
        without=stack("megatron-2021", host_waits=False),
        source="code of Megatron-LM v2.x",
        independent=True,
    ),
    Choice(
        name="Megatron's Python between kernels as measured; without: as traced of V100 hosts",
        families=MEGATRON_2021,
        without=stack("megatron-2021 megatron-deepspeed deepspeed-2021", host=""),
        source="benchmarks.host_megatron_2021, ratings of processors",
        independent=True,
    ),
    Choice(
        name="vTrain's nodes have four NICs; without: eight",
        families=("vtrainM",),
        without=rules(lambda rule: getattr(rule, "cluster", "") == "a100-4x-hdr200"),
        source="vTrain's table",
        independent=True,
    ),
    Choice(
        name="Jean Zay's nodes, ports and hosts; without: a DGX A100",
        families=("bloom",),
        without=rules(lambda rule: getattr(rule, "cluster", "") == "jean-zay-a100"),
        source="BigScience's all_reduce on these nodes, IDRIS",
        independent=True,
    ),
    Choice(
        name="CUDA_LAUNCH_BLOCKING=1 on Jean Zay; without: not set",
        families=("bloom",),
        without=rules(lambda rule: getattr(rule, "launch_blocking", False)),
        source="BigScience's chronicles and scripts",
        independent=True,
    ),
    Choice(
        name="bloom's gradients add up in fp32 from 28 February 2022 on; without: never",
        families=("bloom",),
        without=rules(lambda rule: getattr(rule, "stack", "") == "megatron-deepspeed"),
        source="BigScience's chronicles",
        independent=True,
    ),
)


def _of_products(power: PowerModel, peak: str, kernel: str = "") -> float:
    return power.joules_per_flop.get(peak, 0.0)


def _trainer(name: str, **values: Any) -> Undo:
    file = trainers._read()
    changed = tuple(msgspec.structs.replace(t, **values) if t.name == name else t for t in file.trainers)
    return setting(trainers, _read=lambda: msgspec.structs.replace(file, trainers=changed))


def _lora() -> Undo:
    every = trainers.Trainer().lora_targets
    file = trainers._read()
    changed = tuple(msgspec.structs.replace(t, lora_targets=every) for t in file.trainers)
    return setting(trainers, _read=lambda: msgspec.structs.replace(file, trainers=changed))


def main() -> None:
    """Prints what each choice is worth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, help="the table of echosim validate")
    parser.add_argument("result", type=Path, help="what echosim validate -o wrote of it")
    parser.add_argument("--most", type=int, default=40, help="rows of a family at most (40)")
    parser.add_argument("--only", nargs="*", default=[], help="choices whose names have one of these words")
    parser.add_argument("-o", "--output", type=Path, help="all of it as JSON")
    arguments = parser.parse_args()
    known = {row["id"]: row["error"] for row in json.loads(arguments.result.read_text(encoding="utf-8"))["rows"]}
    rows = sample(
        [row for row in read_measured_steps(arguments.table) if known.get(row.id) is not None], arguments.most
    )
    run._compile = cache_of(run._compile)
    chosen = [c for c in CHOICES if not arguments.only or any(word in c.name for word in arguments.only)]
    found = {}
    print("| choice | rests on | mean error with it, without |\n| --- | --- | --- |")
    for choice in chosen:
        found[choice.name] = errors = without(choice, rows, known)
        told = ", ".join(f"{name} {_mean(a):.1%} -> {_mean(b):.1%} ({len(a)})" for name, (a, b) in errors.items())
        print(f"| {choice.name} | {choice.source} | {told.replace('%', ' %')} |", flush=True)
    if arguments.output:
        arguments.output.write_text(json.dumps(found), encoding="utf-8")


def _mean(errors: Sequence[float]) -> float:
    return statistics.mean(map(abs, errors))


def sample(rows: Sequence[MeasuredStep], most: int) -> dict[str, list[MeasuredStep]]:
    """At most so many rows of each family, evenly drawn."""
    families: dict[str, list[MeasuredStep]] = defaultdict(list)
    for row in rows:
        families[row.family].append(row)
    return {name: every[:: -(-len(every) // most)] for name, every in families.items()}


def without(
    choice: Choice, rows: dict[str, list[MeasuredStep]], known: dict[str, float]
) -> dict[str, tuple[list[float], list[float]]]:
    """Errors of each family of a choice, with it and without it, row by row; rows that cannot be are left out."""
    with choice.without():
        asked = [row for family in choice.families for row in rows.get(family, [])]
        outcomes = run.predict_rows(asked)
    found: dict[str, tuple[list[float], list[float]]] = {}
    for outcome in outcomes:
        if outcome.error is not None:
            errors = found.setdefault(outcome.family, ([], []))
            errors[0].append(known[outcome.id])
            errors[1].append(outcome.error)
    return found


def cache_of(compile_: Callable[..., Any]) -> Callable[..., Any]:
    """Captures, each made once for all choices; what a capture depends on is its key."""
    made: dict[Any, Any] = {}

    def compiled(one: Any, layers: int, batch_size: int) -> Any:
        key = (one.key, layers, batch_size)
        if key not in made:
            made[key] = compile_(one, layers, batch_size)
        return made[key]

    return compiled


if __name__ == "__main__":
    main()
