"""What the ports of a graph are bound to, all instances at once: `Graph.value` on columns.

A *slot* is one port of one instance. Slots follow each other as blocks, instances and ports do.
"""

from __future__ import annotations

from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from echograph.ir.columns import NONE, Int64

if TYPE_CHECKING:
    from echograph.ir.graph import Graph

Place = tuple[Int64, Int64, Int64]
"""Blocks, instances, and rows of the tensor table."""


class Ports:
    """The slots of a graph.

    Args:
        graph: every instance binds all ports of its block, to ids that exist.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        counts = [len(block.instances) for block in graph.blocks]
        instances = [instance for block in graph.blocks for instance in block.instances]
        lengths = np.array([len(instance.bindings) for instance in instances], np.int64)
        self._first_instance = np.cumsum([0, *counts])
        self._first_slot: Int64 = np.cumsum(lengths) - lengths
        self._instance_of: Int64 = np.repeat(np.arange(len(instances)), lengths)
        self.bound: Int64 = np.fromiter(chain.from_iterable(i.bindings for i in instances), np.int64)

    def __len__(self) -> int:
        return len(self.bound)

    @property
    def instances(self) -> tuple[Int64, Int64]:
        """The block and the instance of every slot."""
        block = np.searchsorted(self._first_instance, self._instance_of, side="right") - 1
        return block, self._instance_of - self._first_instance[block]

    @property
    def rows(self) -> Int64:
        """The port that every slot is of, as a row of the tensor table."""
        port = self.graph.tensors.port
        rows = np.flatnonzero(port)
        starts = np.array([b.tensors.start for b in self.graph.blocks], np.int64)
        before = np.concatenate([[0], np.cumsum(port)])[starts]
        place = np.arange(len(self)) - self._first_slot[self._instance_of]
        found: Int64 = rows[before[self.instances[0]] + place]
        return found

    @cached_property
    def located(self) -> Place:
        """Where the tensor stands that every slot is bound to."""
        return self.locate(self.bound)

    def locate(self, tensor_id: Int64) -> Place:
        """`Graph.locate_tensor` of ids that exist."""
        graph = self.graph
        starts, counts = np.array(graph.tensor_bases, np.int64).reshape(-1, 2).T
        block = np.searchsorted(starts, tensor_id, side="right") - 1
        instance, position = np.divmod(tensor_id - starts[block], np.maximum(counts, 1)[block])
        own = np.flatnonzero(~graph.tensors.port)
        return block, instance, own[(np.cumsum(counts) - counts)[block] + position]

    def slot(self, block: Int64, instance: Int64, port: Int64) -> Int64:
        """The slots of ports, given as rows, in instances of their blocks."""
        slots: Int64 = self._first_slot[self._first_instance[block] + instance] + self.graph.port_position[port]
        return slots

    def last(self, owner: Int64) -> Int64:
        """For every slot, the last of the chain that it begins; -1 where the chain never ends.

        Args:
            owner: `Graph.origin` or `Graph.root`: for each tensor, whose value or memory it has.
        """
        block, instance, row = self.located
        row = owner[row]
        goes_on = self.graph.tensors.port[row]
        after = np.arange(len(self))
        after[goes_on] = self.slot(block[goes_on], instance[goes_on], row[goes_on])
        for _ in range(len(self).bit_length()):
            after = after[after]
        return np.where(goes_on[after], NONE, after)

    @cached_property
    def _values(self) -> Place:
        """Where every slot has its value from."""
        last = self.last(self.graph.origin)
        block, instance, row = (column[last] for column in self.located)
        return block, instance, self.graph.origin[row]

    def value(self, block: Int64, instance: Int64, row: Int64) -> Place:
        """`Graph.value` of many tensors."""
        row = self.graph.origin[row]
        through = np.flatnonzero(self.graph.tensors.port[row])
        slots = self.slot(block[through], instance[through], row[through])
        found = block.copy(), instance.copy(), row
        for column, values in zip(found, self._values, strict=True):
            column[through] = values[slots]
        return found
