"""Steps that really run on this machine's CPU, against what a capture with `--measure-host` predicts of them.

python -m benchmarks.measured_host [--rounds N] [--budget S]

A small GPT as nanoGPT writes it (`benchmarks/small_gpt.py`), of several sizes, trains for real on one thread. The
same script is captured as by `echoc capture torch --device cpu --measure-host`, each distinct operator of the
capture is measured by itself as `echoprof ops --clock cpu` does, and the step is simulated. The units of the
host's work are measured here as well, since the machine is another one, or busier, than the one of the table. All
is processor time. Steps take turns with operators and units, so that both see the machine in the same mood; a
figure is the median of a round, and an error the median of the rounds' own. Nothing is fitted to a step.

Processor time of a step still depends on who else uses the caches. On a machine that others keep busy, have a core
for this alone: `chrt --rr 5 taskset --cpu-list 1 python -m benchmarks.measured_host`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch

from benchmarks import host_units

SIZES = (
    (2, 16, 2, 2, 8),
    (4, 64, 4, 4, 32),
    (2, 128, 4, 8, 64),
    (4, 128, 4, 4, 64),
    (6, 192, 6, 4, 64),
    (4, 256, 4, 4, 128),
    (6, 384, 6, 2, 128),
)
"""Layers, width, heads, batch and tokens."""
VOCABULARY = 65
FIRST, STEPS = 5, 25
"""Steps of a turn, in which memory and caches are warmed, and those that count."""
UNIT_ROUNDS = 10
SCRIPT = Path(__file__).with_name("small_gpt.py")


def main() -> None:
    """Prints a line for each size."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.measured_host")
    parser.add_argument("--rounds", type=int, default=3, help="turns of real steps, operators and units")
    parser.add_argument("--budget", type=float, default=15.0, help="seconds for the operators, each turn")
    given = parser.parse_args()
    torch.set_num_threads(1)
    names = ("layers", "width", "tokens", "real ms", "predicted", "error", "without host", "rounds")
    print("{:>6} {:>5} {:>6} {:>8} {:>9} {:>7} {:>12}  {}".format(*names))
    for size in SIZES:
        rounds = compare(size, given.rounds, given.budget)
        real_s, predicted_s = (median(r[i] for r in rounds) for i in (0, 1))
        errors = [predicted / real - 1 for real, predicted, _ in rounds]
        alone = median(kernels / real - 1 for real, _, kernels in rounds)
        print(
            f"{size[0]:>6} {size[1]:>5} {size[3] * size[4]:>6} {1e3 * real_s:>8.2f} {1e3 * predicted_s:>9.2f} "
            f"{median(errors):>+7.1%} {alone:>+12.1%}  " + " ".join(f"{error:+.1%}" for error in errors),
            flush=True,
        )


def compare(size: tuple[int, ...], rounds: int, budget_s: float) -> list[tuple[float, float, float]]:
    """For each round the seconds of a step as it runs, as predicted, and of its operators alone."""
    arguments = [str(part) for part in (*size, VOCABULARY)]
    run = _captured(arguments)
    waiting = _invocations(run)
    found = []
    with _training(arguments) as steps:
        for _ in range(rounds):
            before = steps()
            units = msgspec.structs.replace(_units(), **host_units.measure(UNIT_ROUNDS))
            profile = _measured(waiting, budget_s)
            found.append((median((*before, *steps())), *_predicted(run, units, profile)))
    return found


@contextmanager
def _training(arguments: list[str]) -> Iterator[Callable[[], list[float]]]:
    """The script, which trains where it is asked for the processor time of a turn's steps, and waits otherwise."""
    command = [sys.executable, str(SCRIPT), *arguments, str(FIRST + STEPS)]
    # Freed memory is kept, as in `keep_freed_memory`, of the operators.
    kept = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), str(2**31 - 1))
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=os.environ | kept) as script:
        asked, told = script.stdin, script.stdout
        assert asked is not None
        assert told is not None

        def steps() -> list[float]:
            print(file=asked, flush=True)
            return [float(told.readline()) for _ in range(FIRST + STEPS)][FIRST:]

        yield steps
        asked.close()


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
