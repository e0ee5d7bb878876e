"""What a table's trainers ran: `trainers.toml` as stacks, and what is known of single runs and machines."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import msgspec

from echograph.errors import DataError
from echograph.workflow.validation.table import MeasuredStep, Skip

MicroBatchDefault = int | Literal["stages", "chunks"]
"""Samples; or as many micro-batches as a pipeline has ranks in a row ("stages"), or chunks of layers."""


class _Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What holds for some rows: those whose columns have a text, on more than so many GPUs.

    Attributes:
        source: where it is published.
        where: columns, each with a regular expression; case does not count, and "_" is a space in a GPU's name.
        gpus_above: GPUs.
    """

    source: str
    where: dict[str, str] = {}
    gpus_above: int = 0

    def holds(self, row: MeasuredStep) -> bool:
        """Whether it holds for a row."""
        said = all(
            re.search(text, row.text(column).replace("_", " ") if column == "gpu_type" else row.text(column), re.I)
            for column, text in self.where.items()
        )
        return said and row.number("n_gpus") > self.gpus_above


class _When(_Rule, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What some rows of a trainer ran otherwise.

    Attributes:
        stack: another stack; "": the trainer's.
        set: options of the plan.
        step: options of the step.
        launch_blocking: whether every launch waited for its kernel.
        micro_batch: another default; None: the trainer's.
        cells: further ones.
    """

    stack: str = ""
    set: dict[str, Any] = {}
    step: dict[str, Any] = {}
    launch_blocking: bool = False
    micro_batch: MicroBatchDefault | None = None
    cells: dict[str, str] = {}


class Machine(_Rule, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The machine on which some rows ran.

    Attributes:
        cluster: its preset; "": it has none.
        assumed: what nobody measured of the preset; "": nothing.
    """

    cluster: str
    assumed: str = ""


class _Guess(_Rule, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a trainer ran that nobody here knows."""

    stack: str
    fused_softmax: bool = False


class MemoryReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a trainer's memory figure is, and what its runs took besides a graph's tensors.

    Attributes:
        source: where it is published.
        figure: "device", as nvidia-smi says it, or "reserved", by PyTorch's allocator.
        gib_MiB: MiB in a "GiB" of the table; 1,000 / 1.024 where nvidia-smi's MiB were cut to thousands of them.
        cuda_context_MiB: CUDA context and loaded kernels; 0: as kernels that are loaded lazily take.
        cublas_workspace_MiB: of each cuBLAS handle; 0: as on Hopper.
    """

    source: str = ""
    figure: Literal["device", "reserved"] = "device"
    gib_MiB: float = 1024.0
    cuda_context_MiB: int = 0
    cublas_workspace_MiB: int = 0


class Trainer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a trainer is.

    Attributes:
        name: what its name begins with.
        also: another name for it.
        stack: its stack.
        source: where what follows is published.
        set: options of the plan that it sets otherwise than the stack.
        step: options of the step that it sets.
        fused_softmax: whether its unfused attention has Megatron-LM's kernel for scale, mask and softmax.
        dropout: of a plain GPT.
        lora_rank: of a row that says LoRA.
        lora_targets: linear layers that get adapters.
        micro_batch: that of a row that names none.
        cells: what it does where a row's cell is empty, by column.
        selective: what of a layer it computes again where a row says "selective", as plans call it.
        when: what some rows ran otherwise.
        launch_blocking: whether every launch waited for its kernel.
        memory: what its memory figure is.
        guessed: whether the stack is a guess by the plan, as the trainer is not known.
    """

    name: str = ""
    also: str = ""
    stack: str = ""
    source: str = ""
    set: dict[str, Any] = {}
    step: dict[str, Any] = {}
    fused_softmax: bool = False
    dropout: float = 0.0
    lora_rank: int = 8
    lora_targets: str = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
    micro_batch: MicroBatchDefault = 1
    cells: dict[str, str] = {}
    selective: str = "selective"
    when: tuple[_When, ...] = ()
    launch_blocking: bool = False
    memory: MemoryReport = MemoryReport()
    guessed: bool = False

    def is_named(self, said: str) -> bool:
        """Whether a name begins with one of its, all as `_words` has them."""
        return any(f"{said} ".startswith(f"{_words(name)} ") for name in (self.name, self.also) if name)


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    trainers: tuple[Trainer, ...]
    guesses: tuple[_Guess, ...]
    machines: tuple[Machine, ...]


def trainer_of(row: MeasuredStep) -> Trainer:
    """What trained a row, with all that is known of it; an unknown one has the stack that its plan hints at."""
    said = _words(row.text("trainer"))
    known = [one for one in _read().trainers if one.is_named(said)]
    if not known:
        guess = next(guess for guess in _read().guesses if guess.holds(row))
        return Trainer(stack=guess.stack, fused_softmax=guess.fused_softmax, guessed=True)
    found = max(known, key=lambda trainer: len(trainer.name))
    for rule in found.when:
        if rule.holds(row):
            found = msgspec.structs.replace(
                found,
                stack=rule.stack or found.stack,
                set={**found.set, **rule.set},
                step={**found.step, **rule.step},
                cells={**found.cells, **rule.cells},
                launch_blocking=found.launch_blocking or rule.launch_blocking,
                micro_batch=found.micro_batch if rule.micro_batch is None else rule.micro_batch,
            )
    return found


def _words(name: str) -> str:
    """A name as its letters and numbers: "Megatron-LM v0.12" is "megatron lm v0.12"."""
    return " ".join(re.findall(r"[a-z0-9.]+", name.lower()))


def machine_of(row: MeasuredStep) -> Machine:
    """The machine of a row: the first that its columns fit.

    Raises:
        Skip: there is none, or it has no preset.
    """
    found = next((machine for machine in _read().machines if machine.holds(row)), None)
    if found is None or not found.cluster:
        why = f": {found.source}" if found else ""
        raise Skip(f"gpu_type '{row.text('gpu_type')}' has no cluster preset{why}")
    return found


@cache
def _read() -> _File:
    path = files("echograph.workflow.validation").joinpath("trainers.toml")
    try:
        return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _File)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise DataError(f"{path.name}: {error}") from error
