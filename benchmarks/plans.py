"""What one more plan costs: GPT-3 175B on 1,024 GPUs under 62 plans, and 500 more.

python -m benchmarks.plans [--plans 62] [--alone 8] [--calculon CHECKOUT]

The 62 plans are those that Calculon (McDonald et al., "Calculon: a Methodology and Tool for High-Level Codesign of
Systems and Large Language Models", SC 2023) can express, too: both predict them in this run, Calculon from a
checkout of its sources. The others add chunks, ZeRO, recomputation and sizes of micro-batches at random. Some are
predicted alone as well, and have to be equal to the picosecond. Times are of one processor, in its own seconds.
"""

from __future__ import annotations

import argparse
import resource
import time
from itertools import product
from random import Random

import echograph as eg
from echograph.workflow.predict import predict
from echograph.workflow.predictor import Predictor

GPUS, LAYERS, GLOBAL_BATCH = 1024, 96, 1536
SEED = 20


def expressible() -> list[eg.Plan]:
    """62 plans that a closed form of transformers knows as well: tp, pp, vpp, micro-batch, recomputation."""
    grid = [
        eg.Plan(
            gpus=GPUS, global_batch=GLOBAL_BATCH, tp=tp, pp=pp, vpp=vpp, micro_batch=size, recompute=recompute,
            sequence_parallel=tp > 1, zero=zero,
        )
        for tp, pp, vpp, size, recompute, zero in product(
            (2, 4, 8), (4, 8, 16, 32), (1, 3), (1, 2), ("selective", "full"), (0, 1)
        )
        if fits(tp, pp, vpp, size)
    ]  # fmt: skip
    return Random(SEED).sample(grid, 62)


def more(count: int) -> list[eg.Plan]:
    """Plans over everything that a search varies."""
    grid = [
        eg.Plan(
            gpus=GPUS, global_batch=GLOBAL_BATCH, tp=tp, pp=pp, vpp=vpp, micro_batch=size, recompute=recompute,
            sequence_parallel=shared, zero=zero,
        )
        for tp, pp, vpp, size, recompute, zero, shared in product(
            (1, 2, 4, 8), (1, 2, 4, 8, 16, 32), (1, 2, 3, 4, 6), (1, 2, 4), ("none", "selective", "full"),
            (0, 1, 2, 3), (False, True)
        )
        if fits(tp, pp, vpp, size) and (tp > 1 or not shared)
    ]  # fmt: skip
    return Random(SEED).sample(grid, count)


def fits(tp: int, pp: int, vpp: int, size: int) -> bool:
    """Whether layers, ranks and the batch divide."""
    replicas = GPUS // tp // pp
    count, rest = divmod(GLOBAL_BATCH, replicas * size)
    return not rest and count > 0 and not (LAYERS % (pp * vpp) or (vpp > 1 and (pp == 1 or count % pp)))


def main() -> None:
    """Prints what plans cost together, and alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=62, help="how many; beyond 62, of the larger space")
    parser.add_argument("--alone", type=int, default=8, help="how many of them alone, too, and compared")
    parser.add_argument("--skip", type=int, default=0, help="how many of them to leave out")
    arguments = parser.parse_args()
    plans = (expressible() + more(500))[arguments.skip : arguments.skip + arguments.plans]
    step = eg.compile("gpt3-175b")
    system = eg.System("dgx-h100")
    predictor = Predictor(step, system)
    spent, steps = [], []
    for plan in plans:
        began = time.process_time()
        steps.append(predictor.predict(plan, memory=False, interval=False))
        spent.append(time.process_time() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rest = spent[1:] or spent
    print(f"{len(plans)} plans: first {spent[0]:.2f} s, then {1e3 * sum(rest) / len(rest):.1f} ms a plan, {peak:.0f} MiB")
    alone = []
    chosen = Random(SEED).sample(range(len(plans)), min(arguments.alone, len(plans)))
    for which in chosen:
        began = time.process_time()
        result, _ = predict(step, plans[which], system)
        alone.append(time.process_time() - began)
        same = (result.step_ps, result.breakdown) == (steps[which].step_ps, steps[which].breakdown)
        assert same, f"{plans[which]}: {steps[which].step_ps} ps, alone {result.step_ps} ps"
    if alone:
        together = sum(spent[which] for which in chosen) / len(alone)
        print(f"{len(alone)} of them alone: {1e3 * sum(alone) / len(alone):.0f} ms, {sum(alone) / len(alone) / together:.1f} times; equal")


if __name__ == "__main__":
    main()
