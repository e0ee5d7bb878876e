"""Random task graphs: of one program, and of several that meet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from echograph.ir.columns import Ragged
from echograph.simulator.tasks import TaskGraph

STREAMS = 3
# Few distinct durations, zero among them, make ties; ties are where engines part.
DURATIONS = (0, 1, 2, 3, 10**12)
Choose = Callable[[int], int]
"""A number below the argument."""


def task_graph(
    resources: list[int],
    durations: list[int],
    deps: list[list[int]],
    rendezvous: list[int] | None = None,
    programs: list[int] | None = None,
) -> TaskGraph:
    count = len(resources)
    offsets = np.cumsum([0, *(len(d) for d in deps)]).astype(np.int64)
    zeros = np.zeros(count, np.int64)
    return TaskGraph(
        resource=np.array(resources, np.int32), duration=np.array(durations, np.int64),
        deps=Ragged(offsets, np.array([x for d in deps for x in d], np.int32)),
        rendezvous=np.array(rendezvous if rendezvous is not None else [-1] * count, np.int32),
        program=np.array(programs if programs is not None else zeros, np.int32),
        # The first resource of a program is its host.
        lane=np.minimum(np.array(resources) % (STREAMS + 1), 1).astype(np.uint8), op=zeros,
        instance=zeros.astype(np.int32), micro_batch=zeros.astype(np.int32),
        resources=max(resources, default=0) + 1,
    )  # fmt: skip


@st.composite
def random_tasks(draw: st.DrawFn) -> TaskGraph:
    count = draw(st.integers(1, 60))
    resources = draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    durations = draw(st.lists(st.sampled_from(DURATIONS), min_size=count, max_size=count))
    deps = [sorted(draw(st.sets(st.integers(0, i - 1), max_size=3))) if i else [] for i in range(count)]
    return task_graph(resources, durations, deps)


@st.composite
def random_meetings(draw: st.DrawFn, *, crossed: bool = False) -> TaskGraph:
    return meetings(lambda n: draw(st.integers(0, n - 1)), draw(st.integers(1, 40)), crossed=crossed)


def seeded_meetings(seed: int, events: int, *, crossed: bool = False) -> TaskGraph:
    rng = np.random.default_rng(seed)
    return meetings(lambda n: int(rng.integers(n)), events, crossed=crossed)


def meetings(choose: Choose, events: int, *, crossed: bool) -> TaskGraph:
    """Programs of `STREAMS` streams and a host, whose work and meetings happen in one global order.

    Such an order cannot deadlock. `crossed` exchanges the meetings of two tasks, which may.
    """
    programs = 1 + choose(5)
    rows: list[list[tuple[int, int, list[int], int]]] = [[] for _ in range(programs)]
    rendezvous = 0
    for _ in range(events):
        meets = choose(3) == 0 and programs > 1
        members = {choose(programs) for _ in range(1 + choose(programs))} if meets else {choose(programs)}
        for program in sorted(members):
            before = len(rows[program])
            deps = sorted({choose(before) for _ in range(choose(4))}) if before else []
            stream = 1 + choose(STREAMS) if meets else choose(STREAMS + 1)
            rows[program].append((stream, DURATIONS[choose(5)], deps, rendezvous if meets else -1))
        rendezvous += meets
    first = np.cumsum([0, *(len(r) for r in rows)]).tolist()
    flat = [(p, first[p], row) for p in range(programs) for row in rows[p]]
    tasks = task_graph(
        [p * (STREAMS + 1) + row[0] for p, _, row in flat],
        [row[1] for _, _, row in flat],
        [[start + dep for dep in row[2]] for _, start, row in flat],
        [row[3] for _, _, row in flat],
        [p for p, _, _ in flat],
    )
    return _cross(tasks, choose) if crossed else tasks


def _cross(tasks: TaskGraph, choose: Choose) -> TaskGraph:
    meets = np.flatnonzero(tasks.rendezvous >= 0)
    rendezvous = tasks.rendezvous.copy()
    for _ in range(1 + choose(2)):
        if len(meets) > 1:
            one, other = meets[choose(len(meets))], meets[choose(len(meets))]
            rendezvous[[one, other]] = rendezvous[[other, one]]
    return replace(tasks, rendezvous=rendezvous)
