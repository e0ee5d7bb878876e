"""Random columns, and links that they share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from random_tasks import seeded_meetings

from echograph.ir.columns import Ragged
from echograph.simulator.engine.columns import Columns
from echograph.simulator.engine.sharing import Sharing
from echograph.simulator.tasks import DEVICE, TaskGraph


def random_columns(tasks: TaskGraph, rng: np.random.Generator, jitter: float = 0.0) -> Columns:
    """Up to six columns of different speed, which meet in half of the tasks of streams."""
    count, rows = int(rng.integers(1, 7)), int(rng.integers(1, 4))
    factor = rng.choice([0.0, 0.5, 1.0, 1.0, 1.37], (3, count))
    factor[0] = 1.0
    meets = (tasks.lane == DEVICE) & (rng.random(len(tasks)) < 0.5)
    return Columns(
        kind=rng.integers(0, 3, len(tasks)).astype(np.int32),
        factor=factor,
        place=np.where(meets, rng.integers(0, rows, len(tasks)), -1).astype(np.int32),
        places=rng.integers(0, count, (rows, count)).astype(np.int32),
        jitter=jitter,
        seed=int(rng.integers(100)),
    )


def random_sharing(tasks: TaskGraph, columns: int, rng: np.random.Generator, capacity: float = 1.0) -> Sharing:
    """Up to five links, over which half of the tasks send up to 3.3 bytes/s; some load a link twice."""
    links, rows, kinds = int(rng.integers(1, 6)), int(rng.integers(1, 6)), int(rng.integers(1, 3))
    lengths = rng.integers(0, 4, rows)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    routed = rng.random(len(tasks)) < 0.5
    return Sharing(
        capacity=capacity * rng.choice([1.0, 2.0, 3.0, 7.0], links),
        load=rng.choice([0.0, 0.5, 1.0, 2.0, 3.3], len(tasks)),
        route=np.where(routed, rng.integers(0, kinds, len(tasks)), -1).astype(np.int32),
        routes=rng.integers(-1, rows, (kinds, columns)).astype(np.int32),
        links=Ragged(offsets, rng.integers(0, links, int(offsets[-1])).astype(np.int32)),
        weight=rng.choice([0.5, 1.0, 1.0, 2.0], int(offsets[-1])),
    )


def random_scene(seed: int, events: int, capacity: float = 1.0) -> tuple[TaskGraph, Columns, Sharing]:
    """Programs that meet, in columns that meet, with durations up to a second."""
    rng = np.random.default_rng(seed)
    tasks = seeded_meetings(seed, events)
    spread = np.where(rng.random(len(tasks)) < 0.7, 10 ** rng.uniform(0, 12, len(tasks)), tasks.duration)
    tasks = replace(tasks, duration=spread.astype(np.int64))
    columns = random_columns(tasks, rng)
    return tasks, columns, random_sharing(tasks, columns.factor.shape[1], rng, capacity)
