"""Which value of an ONNX model a tensor of the graph is now.

Tensors of a graph may share memory: views, and the versions that operations in place make. ONNX's values never
change, so a write makes a new value of the memory's whole, and a view that is read after is made again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable

import numpy as np

from echograph.ir.columns import NONE, Int64
from echograph.ir.exporters.onnx_operators import Unsaid
from echograph.ir.graph import StepGraph

_MOST_PLACES = 2**20
_RESHAPED = ("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "unflatten")


class Memory:
    """Names of values.

    Args:
        graph: unfolded.
        replay: adds a view again: (the operation that made it, the value that it is of) -> its name.
    """

    def __init__(self, graph: StepGraph, replay: Callable[[int, str], str]) -> None:
        self._graph = graph
        self._replay = replay
        self._alias = graph.tensors.alias_of.tolist()
        self._names: dict[int, tuple[str, int]] = {}
        self._whole: dict[int, str] = {}
        self._writes: Counter[int] = Counter()

    def root(self, tensor: int) -> int:
        """The tensor that owns the memory."""
        while self._alias[tensor] != NONE:
            tensor = self._alias[tensor]
        return tensor

    def has(self, tensor: int) -> bool:
        """Whether a tensor has a value."""
        return tensor in self._names

    def make(self, tensor: int, name: str) -> None:
        """A new value, or a view of one."""
        root = self.root(tensor)
        self._names[tensor] = name, self._writes[root]
        if tensor == root:
            self._whole[root] = name

    def write(self, tensor: int, name: str, whole: str) -> None:
        """A value written in place, and with it the whole that it lies in."""
        root = self.root(tensor)
        self._writes[root] += 1
        self._names[tensor] = name, self._writes[root]
        self._whole[root] = whole

    def whole(self, root: int) -> str:
        """All of a memory as it is now."""
        return self._whole[root]

    def name(self, tensor: int) -> str:
        """The value of a tensor as its memory is now.

        Raises:
            Unsaid: nothing made it.
        """
        root = self.root(tensor)
        name, writes = self._names.get(tensor, ("", -1))
        if writes == self._writes[root]:
            return name
        above = self._alias[tensor]
        if root not in self._whole:
            raise Unsaid("value")
        if above == NONE:
            name = self._whole[root]
        elif self._is_view(tensor):
            name = self._replay(int(self._graph.maker[tensor]), self.name(above))
        else:
            name = self.name(above)
        self._names[tensor] = name, self._writes[root]
        return name

    def places(self, tensor: int) -> Int64 | None:
        """Positions in the flattened memory that a tensor names; None where it is all of it, in order.

        Raises:
            Unsaid: it is a view that is not followed, or too large a part.
        """
        views = []
        while self._alias[tensor] != NONE:
            if self._is_view(tensor):
                views.append(tensor)
            tensor = self._alias[tensor]
        if not views:
            return None
        whole = self._graph.tensors[tensor]
        if whole.numel > _MOST_PLACES:
            raise Unsaid("size")
        places = np.arange(whole.numel, dtype=np.int64).reshape(whole.shape)
        for view in reversed(views):
            places = self._viewed(places, view)
        return places

    def _is_view(self, tensor: int) -> bool:
        maker = int(self._graph.maker[tensor])
        return maker != NONE and not self._graph.ops[maker].name.endswith("_")

    def _viewed(self, places: Int64, view: int) -> Int64:
        op = self._graph.ops[int(self._graph.maker[view])]
        given = json.loads(getattr(op, "arguments", "") or "{}")
        name, shape = op.name.removeprefix("aten."), self._graph.tensors[view].shape
        if name in _RESHAPED:
            return places.reshape(shape)
        if name == "slice":
            cut = slice(given.get("start"), given.get("end"), given.get("step", 1))
            part: Int64 = places[(slice(None),) * (given.get("dim", 0) % places.ndim) + (cut,)]
            return part
        if name == "select":
            chosen: Int64 = np.asarray(np.take(places, given["index"], given["dim"]))
            return chosen
        if name == "t":
            return places.T
        if name == "transpose":
            return np.swapaxes(places, given["dim0"], given["dim1"])
        if name == "permute":
            return np.transpose(places, given["dims"])
        raise Unsaid(name)
