"""What holds of every pipeline: nothing is lost, nothing waits forever, no more is kept than the schedule says."""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import cache
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from layered import layered_step
from pipelines import flops, makespan, messages, tied_step

from echograph.ir.graph import JobGraph, StepGraph
from echograph.ir.passes.fold import Fold
from echograph.ir.passes.pipeline import Pipeline
from echograph.ir.passes.pipeline.schedules import order
from echograph.ir.schedule import Schedule
from echograph.ir.types import OpKind, Phase
from echograph.ir.verify import verify

LAYERS = 8


@cache
def step(kind: str) -> StepGraph:
    return {
        "layered": lambda: Fold()(layered_step(LAYERS)),
        "unfolded": lambda: layered_step(LAYERS),
        "tied": lambda: tied_step(LAYERS),
        "skip": lambda: tied_step(LAYERS, skip=True),
    }[kind]()


@st.composite
def plans(draw: st.DrawFn) -> Pipeline:
    """Any plan for a model of `LAYERS` layers."""
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "zb-h1", "interleaved"]))
    interleaved = schedule == "interleaved"
    stages = draw(st.integers(2, 4) if interleaved else st.integers(1, 6))
    chunks = draw(st.integers(2, LAYERS // stages)) if interleaved else 1
    micro_batches = draw(st.integers(1, 3)) * stages if interleaved else draw(st.integers(1, 7))
    cuts = st.lists(
        st.integers(1, LAYERS - 1), min_size=stages * chunks - 1, max_size=stages * chunks - 1, unique=True
    )
    at = [0, *sorted(draw(cuts)), LAYERS]
    layers = tuple(b - a for a, b in pairwise(at))
    return Pipeline(stages=stages, micro_batches=micro_batches, schedule=schedule, chunks=chunks, layers=layers)


@settings(deadline=None, max_examples=60)
@given(plan=plans(), kind=st.sampled_from(["layered", "unfolded", "tied", "skip"]))
def test_nothing_is_lost_and_nothing_waits_forever(plan: Pipeline, kind: str) -> None:
    graph = step(kind)
    job = plan(graph)
    verify(job)
    for both in messages(job).values():
        assert both[OpKind.SEND] == both[OpKind.RECV]
    optimizer = np.where(graph.ops.phase == Phase.OPTIMIZER, graph.ops.flops, 0)
    once = sum(int(optimizer[x:y].sum()) for _, x, y, _, _ in graph.programs[0].calls.tolist())
    # A weight that two stages share is updated on both, and a mask that several read is made on each.
    again = repeated(graph, job)
    assert flops(job) - again == plan.micro_batches * (flops(graph) - once) + once
    assert makespan(job) >= 0  # raises where a communication is waited for in vain


def repeated(graph: StepGraph, job: JobGraph) -> int:
    """FLOPs of what runs on more stages than one, less those of the additions that are left to an all-reduce."""

    def count(g: StepGraph | JobGraph) -> Counter[str]:
        found: Counter[str] = Counter()
        for program in g.programs:
            for block, begin, end, _, _ in program.calls.tolist():
                for row in range(begin, end) if g.blocks[block].name.startswith("main") else ():
                    found[g.strings[g.ops.name[row]]] += int(g.ops.flops[row])
        return found

    stages = [p.calls for p in job.programs]
    micro_batches = 1 + max(int(calls[:, 4].max()) for calls in stages)
    there, here = count(job), count(graph)
    masks = there["aten.triu"] - micro_batches * here["aten.triu"]
    weights = sum(there[name] - here[name] for name in ("aten.sgd_",))
    sums = there["aten.add"] - micro_batches * here["aten.add"]
    return masks + max(0, weights) + sums


@settings(deadline=None, max_examples=40)
@given(plan=plans())
def test_no_more_is_kept_than_the_schedule_says(plan: Pipeline) -> None:
    """From the first of a layer's operations to the last that reads what it saved, by the job's own order."""
    job = plan(step("layered"))
    number = next(n for n, b in enumerate(job.blocks) if len(b.instances) == LAYERS)
    rows = [r for r in job.blocks[number].ops if job.ops.phase[r] != Phase.OPTIMIZER]
    every = np.arange(plan.micro_batches)
    for stage, program in enumerate(job.programs):
        at = Schedule(job, program)
        held: dict[int, int] = defaultdict(int)
        for layer in set(program.calls[program.calls[:, 0] == number][:, 3].tolist()):
            same = np.full(plan.micro_batches, layer)
            begin, end = (
                at.position(same, every, np.full(plan.micro_batches, row)) for row in (rows[0], rows[-1])
            )
            held[layer] = max(int(((begin <= now) & (now <= end)).sum()) for now in begin.tolist())
        assert set(held.values()) <= set(promised(plan, stage).values())


def promised(plan: Pipeline, stage: int) -> dict[int, int]:
    """For each chunk of a stage, the micro-batches that are forward and not yet all the way back at one time."""
    alive: dict[int, int] = defaultdict(int)
    most: dict[int, int] = defaultdict(int)
    last = "weight" if plan.schedule == "zb-h1" else "backward"
    for kind, _, chunk in order(plan.schedule, stage, plan.stages, plan.micro_batches, plan.chunks):
        alive[chunk] += (kind == "forward") - (kind == last)
        most[chunk] = max(most[chunk], alive[chunk])
    if plan.schedule == "1f1b":
        assert most == {0: min(plan.micro_batches, plan.stages - stage)}
    if plan.schedule == "zb-h1":
        assert most == {0: min(plan.micro_batches, plan.stages)}
    return most
