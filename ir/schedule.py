"""Where every operation of a folded program stands in time: positions without unfolding."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from echograph.ir.columns import NONE, Int64, distinct
from echograph.ir.graph import Graph, Program


class Schedule:
    """Positions in one program: the i-th operation that it runs has the position i.

    Args:
        graph: the graph of the program.
        program: one of its programs; every operation of an instance and micro-batch runs at most once.
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
        order = np.argsort(keys, kind="stable")
        self._order, self._keys = order, keys[order]

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
        call = self._order[np.maximum(slot, 0)]
        block, begin, end, its_instance, its_micro_batch = (self.calls[call, i] for i in range(5))
        inside = (slot >= 0) & (op >= begin) & (op < end) & (its_instance == instance)
        inside &= (its_micro_batch == micro_batch) & (
            block == self.graph.block_of_op[np.minimum(op, self._ops - 1)]
        )
        return np.where(inside, self.starts[call] + op - begin, NONE)

    def last_position(self, instance: int, op: int, before: int) -> int:
        """Position of the last run of an operation, in any micro-batch, before a position; -1 where none."""
        found = self.position(np.int64(instance), self.micro_batches, np.int64(op))  # type: ignore[arg-type]
        found = found[(found >= 0) & (found < before)]
        return int(found.max()) if len(found) else NONE
