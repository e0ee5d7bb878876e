"""Where every operation of a folded program stands in time, without unfolding, and what streams wait for."""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property

import numpy as np

from echograph.ir.columns import NONE, Int64, ascending, distinct, enumerate_ranges, equal_rows
from echograph.ir.graph import Graph, JobGraph, Program


class Schedule:
    """Positions in one program: the i-th operation that it runs has the position i.

    Args:
        graph: the graph of the program.
        program: one of its programs; every operation of an instance and micro-batch runs at most once.

    Attributes:
        starts: int64 [calls + 1], the position with which each call begins, and how many there are.
        order: int64 [calls], calls by instance, then micro-batch, then operation.
    """

    def __init__(self, graph: Graph, program: Program) -> None:
        self.graph = graph
        self.calls = program.calls
        _, begin, end, instance, micro_batch = (self.calls[:, i] for i in range(5))
        lengths = end - begin
        self.starts: Int64 = np.concatenate([[0], np.cumsum(lengths)])
        self._ops = max(1, len(graph.ops))
        self._micro_batches = int(micro_batch.max()) + 1 if len(self.calls) else 1
        keys = self._key(instance, micro_batch, begin)
        self.order = ascending(keys)
        self._keys = keys[self.order]

    def _key(self, instance: Int64, micro_batch: Int64, op: Int64) -> Int64:
        return (instance * self._micro_batches + micro_batch) * self._ops + op

    def __len__(self) -> int:
        return int(self.starts[-1])

    @cached_property
    def micro_batches(self) -> Int64:
        """The micro-batches that the program runs, ascending."""
        return distinct(self.calls[:, 4])

    def position(self, instance: Int64, micro_batch: Int64, op: Int64) -> Int64:
        """Positions of operations (table indices) in given instances and micro-batches; -1 where not run."""
        op = np.asarray(op, np.int64)
        if len(self._keys) == 0:
            return np.full(op.shape, NONE, np.int64)
        slot = np.searchsorted(self._keys, self._key(instance, micro_batch, op), side="right") - 1
        call = self.order[np.maximum(slot, 0)]
        block, begin, end, its_instance, its_micro_batch = (self.calls[call, i] for i in range(5))
        inside = (slot >= 0) & (op >= begin) & (op < end) & (its_instance == instance)
        inside &= (its_micro_batch == micro_batch) & (
            block == self.graph.block_of_op[np.minimum(op, self._ops - 1)]
        )
        return np.where(inside, self.starts[call] + op - begin, NONE)


# -- dependencies between streams -----------------------------------------------------------------------------
# Dependencies between streams, as positions in the programs that run them.
#
# What an operation reads is made by the operation that `Graph.source` says, in the reader's micro-batch if it
# ran there before, else in the last run before the reader.


_Pairs = tuple[Int64, Int64]


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

    def of(self, number: int, cuts: Int64 | None = None) -> _Pairs:
        """Positions (before, after) in a program between which a stream waits for another one.

        Args:
            number: of the program.
            cuts: rows, ascending: what waits and what it waits for in one call, and between two of these, is left
                out, as it is the same whenever they run (`within`); None: nothing is.
        """
        schedule = Schedule(self.job, self.job.programs[number])
        calls = schedule.calls
        first, like = equal_rows(calls[:, 1] * (len(self.job.ops) + 1) + calls[:, 2])
        span, row = enumerate_ranges(*(np.searchsorted(self._after, calls[first, i]) for i in (1, 2)))
        if cuts is not None:
            parts = [np.searchsorted(cuts, column[row], side="right") for column in (self._before, self._after)]
            here = (self._before[row] >= calls[first, 1][span]) & (self._before[row] < self._after[row])
            apart = ~here | (parts[0] != parts[1])
            span, row = span[apart], row[apart]
        bounds = np.searchsorted(span, np.arange(len(first) + 1))
        call, at = enumerate_ranges(bounds[like], bounds[like + 1])
        row = row[at]
        local = _place(schedule, call, self._after[row], calls[call, 3], self._before[row])
        through = self._through_ports(schedule)
        return np.concatenate([local[0], through[0]]), np.concatenate([local[1], through[1]])

    def within(self, rows: range) -> list[tuple[int, int]]:
        """Rows (after, before) of operations of a call of which one waits for the other, ascending."""
        after, before = self._listed
        here = range(bisect_left(after, rows.start), bisect_left(after, rows.stop))
        return sorted({(after[at], before[at]) for at in here if rows.start <= before[at] < after[at]})

    @cached_property
    def _listed(self) -> tuple[list[int], list[int]]:
        """Readers and what they wait for, for those who look at a few rows at a time."""
        return self._after.tolist(), self._before.tolist()

    def _through_ports(self, schedule: Schedule) -> _Pairs:
        """Where the maker is an operation of another block or instance."""
        calls, size = schedule.calls, len(self.job.ops) + 1
        first, home = equal_rows(calls[:, 0] * self._instances + calls[:, 3])
        block, instance = calls[first, 0], calls[first, 3]
        bounds = np.array([(b.ops.start, b.ops.stop) for b in self.job.blocks], np.int64)[block]
        at, place = enumerate_ranges(*np.searchsorted(self._port_readers, bounds.T))
        reader = self._port_readers[place]
        _, instance, value = self.job.ports.value(block[at], instance[at], self._ports[place])
        maker, stream = self.job.maker[value], self.job.ops.stream
        crossing = np.flatnonzero((maker != NONE) & (stream[maker] != stream[reader]))
        reader, instance, maker = reader[crossing], instance[crossing], maker[crossing]
        key = at[crossing] * size + reader
        call, row = enumerate_ranges(*(np.searchsorted(key, home * size + calls[:, i]) for i in (1, 2)))
        return _place(schedule, call, reader[row], instance[row], maker[row])


def _place(schedule: Schedule, call: Int64, reader: Int64, instance: Int64, maker: Int64) -> _Pairs:
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
    first, query = equal_rows(instance * (int(op.max()) + 1) + op)
    runs = schedule.position(instance[first, None], schedule.micro_batches[None], op[first, None])
    # All runs in one ascending row: those of the first query, those of the second, ...
    span = len(schedule) + 1
    runs = np.sort(runs + 1 + span * np.arange(len(runs))[:, None], axis=None)
    begin = query * span
    at = np.searchsorted(runs, begin + before + 1) - 1
    last = runs[np.maximum(at, 0)] - begin - 1
    return np.where((at >= 0) & (last >= 0), last, NONE)
