"""A recorder that knows tensors by the memory that they lie in.

Scripts hold tensors that were there before the step, give tensors other memory (`parameter.data = ...`), and give
memory back and take it again under the same tensors, as FSDP does with what it gathers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node

from echograph.frontend.pytorch import annotate
from echograph.frontend.pytorch.annotate import FORWARD, MODULE, PHASE
from echograph.frontend.pytorch.recorder import Recorder
from echograph.frontend.scripts.memory import Memory
from echograph.frontend.scripts.streams import AFTER, STREAM, Stream

SHARES = "shares"
"""Of placeholders: global ranks of each group over whose ranks the elements are divided."""
_ATEN = torch.ops.aten


class MemoryRecorder(Recorder):  # type: ignore[no-untyped-call]
    """Finds the node that stands for a tensor by its memory, where no operator of the step made the tensor.

    Attributes:
        memory: what lives through steps.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__(mode)
        self.memory = Memory()
        self._recording = False
        self._paused = 0

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """What runs is no work of the step."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def resizing(self, original: Any) -> Any:
        """Wraps what gives memory back (a size of 0) and takes it."""

        def resize(storage: Any, size: int) -> Any:
            # FSDP gives memory back and takes it again under the same tensors: what stood for it stands no more.
            if self._recording and size and not storage.nbytes():
                self.memory.renew(storage, next(reversed(self.graph.nodes), None))
            return original(storage, size)

        return resize

    def of_micro_batch(self) -> dict[str, Any]:
        """Annotations that say whose micro-batch runs."""
        return {}

    def stands_for(self, node: Node, tensor: Tensor) -> None:
        """A tensor is the value of a node, and its memory is known by it."""
        super().stands_for(node, tensor)
        self.memory.made(tensor, node)

    def node_of(self, tensor: Tensor) -> Node:
        """The node that stands for a tensor, unless it was given other memory since, or its own anew."""
        node = super().node_of(tensor)
        if self.memory.stands(node, tensor):
            return node
        self.forget(tensor)
        return self.unknown(tensor)

    def unknown(self, tensor: Tensor) -> Node:
        """A node for a tensor that was there before the step, or a part of the memory of one that is known."""
        base = self.memory.node_at(tensor)
        if base is None and self.memory.is_renewed(tensor):
            base = self._taken(tensor)
        if base is None:
            role, name, shares = self.memory.describe(tensor)
            whole = self.memory.whole(tensor)
            if whole is not None:
                with self.pausing(), self._mode:
                    flat = whole()
                base = super().add_placeholder(flat, role, name)
                base.meta[SHARES] = shares
                self.memory.made(flat, base, of=tensor)
            else:
                node = super().add_placeholder(tensor, role, name)
                node.meta[SHARES] = shares
                self.memory.made(tensor, node)
                return node
        return self._view(tensor, base)

    def _taken(self, tensor: Tensor) -> Node:
        """Memory that was taken anew: an allocation, with nothing in it yet."""
        whole = self.memory.whole(tensor)
        with self.pausing(), self._mode:
            flat = tensor.new_empty(tensor.shape) if whole is None else whole()
        meta = {PHASE: FORWARD, MODULE: "", STREAM: Stream.current.name, AFTER: frozenset()}
        meta |= self.of_micro_batch()
        node = self.add_call(_ATEN.empty.memory_format, (list(flat.shape),), {}, self._snapshot(flat), meta)
        self.memory.made(tensor, node)
        return node

    def _view(self, tensor: Tensor, base: Node) -> Node:
        value, here = base.meta[annotate.VAL], self._snapshot(tensor)
        if _same_layout(value, here):
            super().bind(tensor, base)
            return base
        meta = {key: base.meta[key] for key in (PHASE, MODULE) if key in base.meta} or {PHASE: FORWARD, MODULE: ""}
        meta |= {STREAM: Stream.current.name, AFTER: frozenset()} | self.of_micro_batch()
        if value.dtype != here.dtype:
            base = self.add_call(_ATEN.view.dtype, (base, here.dtype), {}, here, dict(meta))
        layout = (tuple(here.shape), tuple(here.stride()), here.storage_offset())
        node = self.add_call(_ATEN.as_strided.default, (base, *layout), {}, here, dict(meta))
        super().bind(tensor, node)
        self.memory.made(tensor, node)
        return node


def _same_layout(one: Tensor, other: Tensor) -> bool:
    return (one.dtype, one.shape, one.stride(), one.storage_offset()) == (
        other.dtype, other.shape, other.stride(), other.storage_offset(),
    )  # fmt: skip
