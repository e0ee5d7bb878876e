"""Steps that really run on this machine's CPU, against what a capture with `--measure-host` predicts of them.

python -m benchmarks.measured_host [--rounds N] [--budget S]

A small GPT as nanoGPT writes it (`benchmarks/small_gpt.py`), of four sizes, trains for real on one thread. The
same script is captured as by `echoc capture torch --device cpu --measure-host`, each distinct operator of the
capture is measured by itself as `echoprof ops --clock cpu` does, and the step is simulated. The units of the
host's work are measured here as well, since the machine is another one, or busier, than the one of the table. All
are processor time; real steps, operators and units take turns, and what is compared is the median of the turns.
Nothing is fitted to a step.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
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
STEPS = 60
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
        real_s = _real(arguments)
        units = msgspec.structs.replace(_units(), **host_units.measure(15))
        found.append((real_s, *_predicted(run, units, _measured(waiting, budget_s))))
    columns = list(zip(*found, strict=True))
    return median(columns[0]), median(columns[1]), median(columns[2])


def _real(arguments: list[str]) -> float:
    """Processor time of a step that runs."""
    command = [sys.executable, str(SCRIPT), *arguments, str(STEPS)]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return median(map(float, told[STEPS // 4 :]))


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
