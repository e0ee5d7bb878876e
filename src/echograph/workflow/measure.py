"""The operations of a training step, whole steps, and collectives, measured on the machine at hand."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echograph.errors import UsageError
from echograph.options import option
from echograph.progress import Progress
from echograph.units import to_s

if TYPE_CHECKING:
    from echograph.frontend.pytorch.spec import StepSpec
    from echograph.ir.graph import StepGraph
    from echograph.ir.profile import Environment, Invocation, Profile
    from echograph.profiler.measure.device import MeasuringDevice
    from echograph.profiler.measure.ops import OpTiming
    from echograph.profiler.measure.sampling import Samples


DEVICES, CLOCKS = ("cuda", "cpu"), ("wall", "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuringOptions:
    """How a training step is measured on the machine at hand.

    Attributes:
        dtype: type of the parameters, as in `StepSpec`; "": bf16, on the CPU fp32.
        optimizer: name of the optimizer, as in `StepSpec`.
        device: "cuda" or "cpu"; "": cuda where there is one.
        clock: what times the CPU: "wall", or "cpu" (time of this process; one thread only).

    Raises:
        UsageError: there is no such device or clock.
    """

    dtype: str = option("", "bf16, fp16 or fp32", "bf16, on the CPU fp32")
    optimizer: str = option("adamw", "adamw, adam or sgd.")
    device: str = option("", "cuda or cpu", "cuda where there is one")
    clock: str = option("wall", "Of the CPU: wall, or cpu (time of this process; one thread only).")

    def __post_init__(self) -> None:
        for name, value, choices in (("--device", self.device or "cpu", DEVICES), ("--clock", self.clock, CLOCKS)):
            if value not in choices:
                raise UsageError(f"{name} {value}: give one of {', '.join(choices)}")

    def open(self) -> tuple[MeasuringDevice, StepSpec]:
        """The device, and what the step is captured with for it.

        Raises:
            UsageError: there is no such type or optimizer.
        """
        import torch

        from echograph.frontend.pytorch.spec import StepSpec
        from echograph.profiler.measure.device import open_device

        name: Any = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        dtype: Any = self.dtype or ("bf16" if name == "cuda" else "fp32")
        clock: Any = self.clock
        optimizer: Any = self.optimizer
        return open_device(name, clock), StepSpec(dtype=dtype, optimizer=optimizer, kernels=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A step as graph and as invocations.

    Attributes:
        graph: the step, folded.
        flat: the step as it ran, unfolded.
        invocations: the distinct invocations that do work.
    """

    graph: StepGraph
    flat: StepGraph
    invocations: list[Invocation]


def capture_invocations(
    model: str, spec: StepSpec, cache_bytes: int, progress: Progress, **sizes: Any
) -> Captured:
    """Captures a step as graph and as the invocations that it is made of."""
    from echograph.frontend.pytorch.capture import capture, capture_mode
    from echograph.frontend.pytorch.invocations import invocations_of
    from echograph.frontend.pytorch.lower import lower_nodes, workload_of
    from echograph.ir.passes.fold import Fold
    from echograph.workflow.compile import build_model

    with capture_mode():
        name, built = build_model(model, spec, progress=progress, **sizes)
    progress(f"capturing one training step of {name}")
    nodes = capture(*built, spec)
    flat, made = lower_nodes(nodes, workload_of(nodes, spec, name))
    return Captured(graph=Fold()(flat), flat=flat, invocations=invocations_of(nodes, flat, made, cache_bytes))


def measure_invocations(
    invocations: list[Invocation],
    device: MeasuringDevice,
    profile: Profile,
    options: Any,
    output: Path,
    progress: Progress,
) -> OpTiming:
    """Measures invocations, and writes the profile as it grows."""
    from echograph.ir.profile import save_profile
    from echograph.profiler.measure.device import keep_freed_memory
    from echograph.profiler.measure.ops import measure

    if device.name == "cpu":
        keep_freed_memory()

    def save(grown: Profile) -> None:
        save_profile(grown, output)

    return measure(invocations, device, profile, options, save=save, progress=progress)


def start_profile(device: MeasuringDevice, output: Path, name: str, resume: bool, progress: Progress) -> Profile:
    """The profile to begin with: the one that there is, or an empty one with the host's times."""
    from echograph.ir.profile import Profile, load_profile
    from echograph.profiler.measure.ops import continued

    if resume:
        if not output.exists():
            raise UsageError(f"--resume: there is no {output} to go on with: leave --resume out")
        return continued(load_profile(output), device.environment(name), str(output))
    progress("measuring the host")
    return Profile(environment=with_host(device, name))


def with_host(device: MeasuringDevice, name: str = "") -> Environment:
    """A device's environment with the host's times, measured now."""
    from echograph.profiler.measure.ops import measure_host
    from echograph.units import to_ps

    host = measure_host(device)
    return replace(
        device.environment(name), host_op_picoseconds=to_ps(host.op_s), host_view_picoseconds=to_ps(host.view_s)
    )


def summarize_measured(captured: Captured, outcome: OpTiming, device: MeasuringDevice) -> dict[str, Any]:
    """What was measured of a step, in numbers."""
    from echograph.ir.passes.annotate import join

    _, coverage = join(captured.graph, outcome.profile)
    environment = outcome.profile.environment
    measurements = outcome.profile.measurements
    return {
        "device": environment.device,
        "hardware": environment.hardware,
        "driver": environment.driver,
        "torch": environment.torch,
        "cuda": environment.cuda,
        "threads": environment.threads,
        "utilisation": device.utilisation(),
        "distinct_invocations": len(captured.invocations),
        "measurements": len(measurements),
        "operations": {
            "measured": coverage.measured,
            "free": coverage.free,
            "missing": coverage.missing,
        },
        "unmatched": len(coverage.unmatched),
        "not_measured": [{"invocation": text, "reason": why} for text, why in outcome.refused],
        "left": len(outcome.left),
        "sum_s": coverage.busy_ps * 1e-12,
        "host_op_s": environment.host_op_picoseconds * 1e-12,
        "host_view_s": environment.host_view_picoseconds * 1e-12,
        "largest_peak_bytes": max((m.peak_bytes for m in measurements), default=0),
    }


def time_step(
    model: str,
    spec: StepSpec,
    device: MeasuringDevice,
    *,
    steps: int,
    warm_up: int,
    keep: bool,
    profile: Path | None,
    progress: Progress,
    **sizes: Any,
) -> dict[str, Any]:
    """Whole training steps, timed end to end; beside a profile's sum of operations and its simulation.

    Args:
        model: name of the model, or a file, as in `compile`.
        spec: dtype, optimizer and other options of the step.
        device: the device that runs the step.
        steps: number of steps that are timed.
        warm_up: number of steps before those.
        keep: on the CPU: whether freed memory stays, as on CUDA.
        profile: measured durations of the operations; None predicts nothing.
        progress: told what goes on.
        sizes: `batch_size`, `seq_len` and `attention` of a zoo model.

    Returns:
        Seconds, and relative errors of what was predicted.

    Raises:
        UsageError: freed memory that does not stay, of a device that is not the CPU.
    """
    if not keep and device.name != "cpu":
        raise UsageError("--allocator: is of the CPU, whose freed memory may go back to the system: leave it out")
    predicted = (
        {} if profile is None else predicted_step(model, spec, profile, device.cache_bytes, progress, **sizes)
    )
    samples = measure_step(model, spec, device, steps, warm_up, keep, progress, **sizes)
    errors = {
        f"{name[:-2]}_error": seconds / samples.median - 1
        for name, seconds in predicted.items()
        if name.endswith("_s")
    }
    return {
        "model": model,
        "device": device.environment().hardware,
        "steps": len(samples.seconds),
        "step_s": samples.median,
        "mean_s": samples.mean,
        "spread": samples.spread,
        "seconds": list(samples.seconds),
        **predicted,
        **errors,
    }


def measure_step(
    model: str,
    spec: StepSpec,
    device: MeasuringDevice,
    steps: int,
    warm_up: int,
    keep: bool,
    progress: Progress,
    **sizes: Any,
) -> Samples:
    """Times real steps of a model on a device."""
    import torch

    from echograph.frontend.pytorch.step import real_step
    from echograph.profiler.measure.device import keep_freed_memory
    from echograph.profiler.measure.sampling import time_steps
    from echograph.workflow.compile import build_model

    if keep and device.name == "cpu":
        keep_freed_memory()
    with torch.device(device.name):
        _, built = build_model(model, spec, progress=progress, **sizes)
    return time_steps(real_step(*built, spec, device.name), device, steps, warm_up, progress)


def predicted_step(
    model: str, spec: StepSpec, profile: Path, cache_bytes: int, progress: Progress, **sizes: Any
) -> dict[str, Any]:
    """The sum of a step's operations, and the step simulated, from a profile; None where it lacks operations."""
    from echograph.ir.passes.annotate import join
    from echograph.ir.profile import load_profile
    from echograph.workflow.plan import Plan
    from echograph.workflow.predict import predict

    graph = capture_invocations(model, spec, cache_bytes, progress, **sizes).graph
    _, coverage = join(graph, load_profile(profile))
    found: dict[str, Any] = {"sum_s": to_s(coverage.busy_ps), "missing": coverage.missing}
    if not coverage.missing:
        progress("simulating")
        result, _ = predict(graph, Plan(cluster=str(profile)))
        found["simulated_s"] = to_s(result.step_ps)
    return found


def measure_collectives(
    wanted: Sequence[str],
    sizes: Sequence[int],
    backend: str,
    budget_s: float,
    tell: Callable[[str], None],
    output: Path | None = None,
) -> list[dict[str, Any]] | None:
    """Times collectives over all ranks.

    Args:
        wanted: operations: "all_reduce", ...
        sizes: bytes of each.
        backend: "gloo" or "nccl"; "": nccl where there is CUDA.
        budget_s: seconds that each size is repeated.
        tell: given the lines of a table like nccl-tests', as they come.
        output: folder for one such table an operation.

    Returns:
        A record each measurement, in seconds; None on all ranks but the first.

    Raises:
        UsageError: one rank alone, no time to measure, or a backend that there is not.
        OutputError: the folder cannot be written.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise UsageError(
            "echoprof collectives measures between ranks: torchrun --nproc-per-node 2 --no-python "
            "echoprof collectives"
        )
    if not 0 < budget_s < inf:
        raise UsageError(f"--budget: {budget_s:g}: give seconds above 0")
    import torch
    from torch import distributed

    from echograph.ir.files import whole_folder, write_whole
    from echograph.profiler.measure.collectives import facts_of_ranks, header, measure_collectives, table_row

    device = _device(backend or ("nccl" if torch.cuda.is_available() else "gloo"))
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        first = distributed.get_rank() == 0
        facts = facts_of_ranks(device)
        logs: dict[str, list[str]] = {name: [header(name, facts)] for name in wanted}
        records: list[dict[str, Any]] = []
        for measured in measure_collectives(list(wanted), list(sizes), device, budget_s):
            log = logs[measured.operation]
            log.append(table_row(measured, len(facts)))
            if first:
                tell("\n".join(log) if len(log) == 2 else log[-1])
            records.append(
                {
                    "operation": measured.operation,
                    "ranks": len(facts),
                    "size_bytes": measured.size_bytes,
                    "seconds": measured.seconds,
                    "repeats": measured.repeats,
                }
            )
        if first and output is not None:
            with whole_folder(output) as folder:
                for name, log in logs.items():
                    write_whole(folder / f"{name}.log", ["\n".join(log) + "\n"])
        return records if first else None
    finally:
        distributed.destroy_process_group()


def _device(backend: str) -> Any:
    import torch

    if backend not in ("gloo", "nccl"):
        raise UsageError(f"--backend: unknown backend '{backend}': give gloo or nccl")
    if backend == "gloo":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError("--backend nccl needs CUDA: this PyTorch sees none; use gloo")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device
