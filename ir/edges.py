"""Dependencies between streams, as positions in the programs that run them.

What an operation reads is made by the operation that `Graph.source` says, in the reader's micro-batch if it ran
there before, else in the last run before the reader.
"""

from __future__ import annotations

import numpy as np

from echograph.ir.columns import NONE, Int64
from echograph.ir.graph import JobGraph
from echograph.ir.schedule import Schedule

Pairs = tuple[Int64, Int64]


class Edges:
    """Finds the dependencies of the programs of a job.

    They stand in tables, row (reader) by row, for a block or an instance of one; a call has those of its rows.
    """

    def __init__(self, job: JobGraph) -> None:
        self.job = job
        ops = job.ops
        origin = job.origin[ops.inputs.values]
        makers, readers = job.maker[origin], ops.inputs.rows
        crossing = (makers != NONE) & (ops.stream[makers] != ops.stream[readers])
        self._before = np.concatenate([makers[crossing], np.asarray(ops.deps.values, np.int64)])
        self._after = np.concatenate([readers[crossing], ops.deps.rows])
        order = np.argsort(self._after, kind="stable")
        self._before, self._after = self._before[order], self._after[order]
        ports = job.tensors.port[origin]
        self._port_readers, self._ports = readers[ports], origin[ports]
        self._instances = max(len(block.instances) for block in job.blocks)

    def of(self, number: int) -> Pairs:
        """Positions (before, after) in a program between which a stream waits for another one."""
        schedule = Schedule(self.job, self.job.programs[number])
        calls = schedule.calls
        call, row = spread(*(np.searchsorted(self._after, calls[:, i]) for i in (1, 2)))
        local = _place(schedule, call, self._after[row], calls[call, 3], self._before[row])
        through = self._through_ports(schedule)
        return np.concatenate([local[0], through[0]]), np.concatenate([local[1], through[1]])

    def _through_ports(self, schedule: Schedule) -> Pairs:
        """Where the maker is an operation of another block or instance."""
        calls, size = schedule.calls, len(self.job.ops) + 1
        homes, home = np.unique(calls[:, 0] * self._instances + calls[:, 3], return_inverse=True)
        block, instance = np.divmod(homes, self._instances)
        bounds = np.array([(b.ops.start, b.ops.stop) for b in self.job.blocks], np.int64)[block]
        at, place = spread(*np.searchsorted(self._port_readers, bounds.T))
        reader = self._port_readers[place]
        _, instance, value = self.job.ports.value(block[at], instance[at], self._ports[place])
        maker, stream = self.job.maker[value], self.job.ops.stream
        crossing = np.flatnonzero((maker != NONE) & (stream[maker] != stream[reader]))
        reader, instance, maker = reader[crossing], instance[crossing], maker[crossing]
        key = at[crossing] * size + reader
        call, row = spread(*(np.searchsorted(key, home * size + calls[:, i]) for i in (1, 2)))
        return _place(schedule, call, reader[row], instance[row], maker[row])


def spread(low: Int64, high: Int64) -> Pairs:
    """For ranges of rows, one of each call: every (call, row)."""
    count = high - low
    call = np.repeat(np.arange(len(count)), count)
    return call, np.arange(len(call)) + np.repeat(low - (np.cumsum(count) - count), count)


def _place(schedule: Schedule, call: Int64, reader: Int64, instance: Int64, maker: Int64) -> Pairs:
    """Positions of makers and readers, without what the program does not run."""
    now = schedule.starts[call] + reader - schedule.calls[call, 1]
    made = schedule.position(instance, schedule.calls[call, 4], maker)
    other = np.flatnonzero((made == NONE) | (made >= now))
    made[other] = _last_run(schedule, instance[other], maker[other], now[other])
    return made[made != NONE], now[made != NONE]


def _last_run(schedule: Schedule, instance: Int64, op: Int64, before: Int64) -> Int64:
    """Positions of the last runs of operations, in any micro-batch, before given positions; -1 where none."""
    if not len(op):
        return op
    which, query = np.unique(np.stack([instance, op]), axis=1, return_inverse=True)
    runs = schedule.position(which[0][:, None], schedule.micro_batches[None], which[1][:, None])
    # All runs in one ascending row: those of the first query, those of the second, ...
    span = len(schedule) + 1
    runs = np.sort(runs + 1 + span * np.arange(len(runs))[:, None], axis=None)
    first = query.ravel() * span
    at = np.searchsorted(runs, first + before + 1) - 1
    last = runs[np.maximum(at, 0)] - first - 1
    return np.where((at >= 0) & (last >= 0), last, NONE)
