"""Steps that really run on this machine's CPU, against what a capture with `--measure-host` predicts of them.

python -m benchmarks.measured_host [--rounds N] [--budget S]

A small GPT as nanoGPT writes it (`benchmarks/small_gpt.py`), of four sizes, trains for real on one thread. The
same script is captured as by `echoc capture torch --device cpu --measure-host`, each distinct operator of the
capture is measured by itself as `echoprof ops --clock cpu` does, and the step is simulated. The units of the
host's work are measured here as well, since the machine is another one, or busier, than the one of the table. All
are processor time, and medians; the script trains while operators and units are measured, so that what else the
machine does disturbs both alike. Nothing is fitted to a step.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch

from benchmarks import host_units

SIZES = ((2, 16, 2, 2, 8), (4, 64, 4, 4, 32), (4, 128, 4, 4, 64), (6, 192, 6, 4, 64))
"""Layers, width, heads, batch and tokens."""
VOCABULARY = 65
FIRST = 5
"""Steps in which memory and caches are warmed."""
SCRIPT = Path(__file__).with_name("small_gpt.py")


def main() -> None:
    """Prints a line for each size."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.measured_host")
    parser.add_argument("--rounds", type=int, default=3, help="turns of real steps, operators and units")
    parser.add_argument("--budget", type=float, default=15.0, help="seconds for the operators, each turn")
    given = parser.parse_args()
    torch.set_num_threads(1)
    names = ("layers", "width", "tokens", "real ms", "predicted", "error", "without host")
    print("{:>6} {:>5} {:>6} {:>8} {:>9} {:>7} {:>12}".format(*names))
    for size in SIZES:
        real_s, predicted_s, kernels_s = compare(size, given.rounds, given.budget)
        print(
            f"{size[0]:>6} {size[1]:>5} {size[3] * size[4]:>6} {1e3 * real_s:>8.2f} {1e3 * predicted_s:>9.2f} "
            f"{predicted_s / real_s - 1:>+7.1%} {kernels_s / real_s - 1:>+12.1%}",
            flush=True,
        )


def compare(size: tuple[int, ...], rounds: int, budget_s: float) -> tuple[float, float, float]:
    """Seconds of a step as it runs, as predicted, and of its operators alone."""
    arguments = [str(part) for part in (*size, VOCABULARY)]
    run = _captured(arguments)
    waiting = _invocations(run)
    found = []
    for _ in range(rounds):
        with _training(arguments) as times:
            units = msgspec.structs.replace(_units(), **host_units.measure(15))
            profile = _measured(waiting, budget_s)
        found.append((median(times), *_predicted(run, units, profile)))
    columns = list(zip(*found, strict=True))
    return median(columns[0]), median(columns[1]), median(columns[2])


@contextmanager
def _training(arguments: list[str]) -> Iterator[list[float]]:
    """In the context the script trains; then the list has the processor time of its steps, without the first."""
    with tempfile.TemporaryFile("w+") as told:
        command = [sys.executable, str(SCRIPT), *arguments, str(10**9)]
        process = subprocess.Popen(command, stdout=told)
        times: list[float] = []
        try:
            while os.fstat(told.fileno()).st_size < 20 * FIRST:  # it trains
                time.sleep(0.2)
            yield times
        finally:
            process.terminate()
            process.wait()
        told.seek(0)
        times += [float(line) for line in told.read().splitlines()[FIRST:-1]]


def _units() -> Any:
    from echograph.profiler.costs.host import load_units

    return load_units()


def _captured(arguments: list[str]) -> Any:
    from echograph.frontend.scripts import ADAPTERS
    from echograph.frontend.scripts.run import Script, run_script
    from echograph.frontend.scripts.world import World

    script = Script(path=SCRIPT, arguments=arguments, host=_units())
    return run_script(script, World(size=1, local_size=1, gpus=False), ADAPTERS["torch"]())


def _invocations(run: Any) -> list[Any]:
    from echograph.frontend.pytorch.invocations import invocations_of
    from echograph.frontend.pytorch.lower import lower_nodes
    from echograph.ir.graph import Workload
    from echograph.profiler.measure.device import Processor

    step, made = lower_nodes(run.recorder.graph, Workload(model="gpt"))
    return invocations_of(run.recorder.graph, step, made, Processor("cpu").cache_bytes)


def _measured(waiting: list[Any], budget_s: float) -> Any:
    """A profile of the operators."""
    from echograph.ir.profile import Profile
    from echograph.profiler.measure.device import Processor, keep_freed_memory
    from echograph.profiler.measure.ops import Options, measure

    keep_freed_memory()
    device = Processor("cpu")
    environment = replace(device.environment("cpu"), host_op_picoseconds=1, host_view_picoseconds=1)
    timing = measure(waiting, device, Profile(environment=environment), Options(budget_s=budget_s, kernels=False))
    if timing.refused or timing.left:
        raise SystemExit(f"not measured: {[*timing.refused, *timing.left][:3]}")
    return timing.profile


def _predicted(run: Any, units: Any, profile: Any) -> tuple[float, float]:
    """Seconds of the step, and of its operators alone."""
    from echograph.frontend.scripts.capture import lower_job
    from echograph.ir.graph import Workload
    from echograph.ir.passes.annotate import join
    from echograph.simulator.simulate import simulate
    from echograph.units import to_ps
    from echograph.workflow.system import System, measured_host

    job = lower_job([run], {"dp": 1}, [{}], Workload(model="gpt"), units)
    job = join(job, profile)[0](job)
    host = replace(measured_host(profile), script=units.name, kernel_ps=-to_ps(units.alone_s), launch_ps=0)
    cluster = replace(System().cluster, device="cpu")
    whole = simulate(job, cluster, host, memory=False).step_ps
    alone = simulate(job, cluster, replace(host, op_ps=0, script="", kernel_ps=0), memory=False).step_ps
    return whole / 1e12, alone / 1e12


if __name__ == "__main__":
    main()
