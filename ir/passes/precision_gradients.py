"""Gradients that add up in fp32: each parameter has a buffer that lives as long as it does, its main gradient.

Megatron-LM's `--accumulate-allreduce-grads-in-fp32`: the product that makes a weight's gradient adds it to the
buffer itself (gradient accumulation fusion, on by default there); any other 16-bit gradient is added to it by a
kernel of its own. The optimizer reads the buffers, which are set to zero after it. Data-parallel passes reduce
them in their type, and see that nothing has to be added up over micro-batches: no operation makes such a
gradient's memory (`data_parallel_gradients.adds_up`).

The gradient of a parameter that is used twice (a tied embedding) is a sum, which a pipeline takes apart. Its terms
are made in fp32, and added up over micro-batches as they would be in 16 bit.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np

from echograph.ir import types as t
from echograph.ir.columns import NONE
from echograph.ir.graph import StepGraph
from echograph.ir.passes.data_parallel_gradients import final_gradients
from echograph.ir.passes.rewrite_step import StepWriter

_FUSING = ("aten.mm", "aten._scaled_mm")
_WIDE = t.DType.FP32


def to_main_gradients(graph: StepGraph) -> StepGraph:
    """The step with fp32 main gradients; the step itself where none of its gradients has a 16-bit type."""
    gradients = [row for row in final_gradients(graph) if graph.tensors[row].dtype.itemsize < _WIDE.itemsize]
    return _Writer(graph, gradients).write() if gradients else graph


class _Writer(StepWriter):
    """Writes main gradients.

    Args:
        graph: the step.
        gradients: rows of its final gradients of 16-bit types.
    """

    def __init__(self, graph: StepGraph, gradients: list[int]) -> None:
        super().__init__(graph)
        self.gradients = frozenset(gradients)
        self.readers: dict[int, list[int]] = defaultdict(list)
        for tensor, row in zip(graph.ops.inputs.values.tolist(), graph.ops.inputs.rows.tolist(), strict=True):
            self.readers[tensor].append(row)
        # The gradient that a product adds to its buffer, by the product's row; those that are added after a row;
        # tensors whose type changes; tensors that are no gradients any more, as they die when they are added.
        self.fused: dict[int, int] = {}
        self.added: dict[int, list[int]] = defaultdict(list)
        self.wide: set[int] = set()
        self.dying: set[int] = set()
        self.narrow: dict[int, int] = {}
        for gradient in gradients:
            self._sort(gradient)
        self._widen_ports()
        self.zeroed = self._last_readers()
        counts = (
            len(gs) * len(graph.blocks[int(graph.block_of_op[r])].instances) for r, gs in self.zeroed.items()
        )
        self.launched = sum(counts)
        self.leads = min((gs[0] for r, gs in self.zeroed.items() if graph.block_of_op[r] == 0), default=NONE)

    # -- what becomes of which gradient --------------------------------------------------------------------

    def _sort(self, gradient: int) -> None:
        graph = self.graph
        chain = self._chain(gradient)
        base = chain[-1]
        if self._is_sum(base):
            self.wide |= {*chain, *self._terms(base)}
            return
        maker = int(graph.maker[base])
        alone = all(self._leads_to_optimizer(index, set(chain)) for index in chain)
        same = graph.tensors.shape.row(base) == graph.tensors.shape.row(gradient)
        if graph.strings[graph.ops.name[maker]] in _FUSING and alone and same:
            self.fused[maker] = gradient
            self.wide |= set(chain)
        else:
            self.added[int(graph.maker[gradient])].append(gradient)
            self.dying |= set(chain)

    def _chain(self, gradient: int) -> list[int]:
        """A gradient, what it is a view of, and so on up to what a kernel made."""
        chain = [gradient]
        while (maker := int(self.graph.maker[chain[-1]])) != NONE and self.graph.ops.is_view[maker]:
            chain.append(self.graph.ops.inputs.row(maker)[0])
        return chain

    def _is_sum(self, tensor: int) -> bool:
        maker = int(self.graph.maker[tensor])
        named = maker != NONE and self.graph.strings[self.graph.ops.name[maker]] == "aten.add"
        return named and len(self.graph.ops.inputs.row(maker)) == 2

    def _terms(self, total: int) -> set[int]:
        """All tensors that a sum is made of, sums and views among them."""
        found: set[int] = set()
        for term in self.graph.ops.inputs.row(int(self.graph.maker[total])):
            chain = self._chain(term)
            if self.graph.maker[chain[-1]] != NONE:  # else it is of another block, and read as it is
                found |= {*chain, *(self._terms(chain[-1]) if self._is_sum(chain[-1]) else ())}
        return found

    def _leads_to_optimizer(self, index: int, chain: set[int]) -> bool:
        """Whether nothing of the backward pass reads a tensor but views that lead to the gradient."""
        return all(
            self.graph.ops.phase[row] == t.Phase.OPTIMIZER or chain.issuperset(self.graph.ops.outputs.row(row))
            for row in self.readers[index]
        )

    def _widen_ports(self) -> None:
        """Ports that mean a gradient have its new type."""
        graph, changed = self.graph, self.wide | self.gradients
        for block in graph.blocks:
            ports = np.flatnonzero(graph.tensors.port[block.tensors.start : block.tensors.stop])
            for instance in block.instances:
                for port, bound in zip(ports.tolist(), instance.bindings, strict=True):
                    if graph.locate_tensor(bound)[2] in changed:
                        self.wide.add(block.tensors.start + port)

    def _last_readers(self) -> dict[int, list[int]]:
        """The operations of the optimizer after which buffers are read no more, with their gradients."""
        last: dict[int, list[int]] = defaultdict(list)
        buffered = [*self.fused.values(), *(g for gradients in self.added.values() for g in gradients)]
        for gradient in sorted(buffered):
            rows = [row for index in self._versions(gradient) for row in self.readers[index]]
            if rows and self.graph.ops.phase[max(rows)] == t.Phase.OPTIMIZER:
                last[max(rows)].append(gradient)
        return last

    def _versions(self, gradient: int) -> list[int]:
        """A gradient, its fp32 copy, and what the optimizer makes of that in place."""
        found = [gradient]
        for index in found:
            for row in self.readers[index]:
                copied = self._is_copy(self.graph.ops[row])
                outputs = self.graph.ops.outputs.row(row)
                found += [i for i in outputs if copied or self.graph.tensors.alias_of[i] == index]
        return found

    def _is_copy(self, op: t.Op) -> bool:
        """Whether an operation of the optimizer does nothing but widen a gradient."""
        if op.phase != t.Phase.OPTIMIZER or "copy" not in op.name or len(op.inputs) != 1 or len(op.outputs) != 1:
            return False
        made = self.graph.tensors[op.outputs[0]]
        of_gradient = op.inputs[0] in self.gradients or op.inputs[0] in self.wide
        return of_gradient and (made.dtype, made.role, made.alias_of) == (_WIDE, t.TensorRole.GRADIENT, None)

    # -- writing -------------------------------------------------------------------------------------------

    def operation(self, op: t.Op) -> None:
        if self._is_copy(op):
            (source,), (made,) = op.inputs, op.outputs
            self.part.tensors[made] = self.tensor(source)
            if (maker := int(self.graph.maker[source])) in self.part.ops:
                self.part.ops[op.id] = self.part.ops[maker]
            return
        if op.id in self.fused and isinstance(op, t.Compute):
            self._accumulate(op, self.graph.tensors[self.fused[op.id]])
        else:
            self._rewrite(op)
        for gradient in self.added.get(op.id, ()):
            self._add(op, self.graph.tensors[gradient])
        for gradient in self.zeroed.get(op.id, ()):
            self._zero(op, self.graph.tensors[gradient])

    def tensor(self, index: int, **changes: object) -> int:
        """New row of an old tensor; what changes its type or role has the new one."""
        if index in self.wide:
            changes["dtype"] = _WIDE
        if index in self.dying:
            changes["role"] = t.TensorRole.ACTIVATION
        return super().tensor(index, **changes)

    def _rewrite(self, op: t.Op) -> None:
        """Copies an operation; what it moves grows with the types of its tensors."""
        changes: dict[str, object] = {}
        updates = op.phase == t.Phase.OPTIMIZER
        if not updates:
            changes["inputs"] = [self.narrow.get(i, self.tensor(i)) for i in op.inputs]
        if isinstance(op, t.Compute) and not op.is_view:
            wide = self.wide | self.gradients if updates else self.wide
            for name, tensors in (("bytes_read", op.inputs), ("bytes_written", op.outputs)):
                more = sum(self.graph.tensors[i].nbytes for i in set(tensors) & wide)
                changes[name] = getattr(op, name) + more
        self.copy(op, **changes)

    def _version(self, gradient: t.Tensor, buffer: int | None) -> int:
        """A main gradient as an operation leaves it; without one before it, the buffer itself."""
        named = gradient.name if buffer is not None else f"{gradient.name}.main"
        return self.add_tensor(replace(gradient, name=named, dtype=_WIDE, role=t.TensorRole.GRADIENT), buffer)

    def _accumulate(self, op: t.Compute, gradient: t.Tensor) -> None:
        """Writes a product that adds its result to the buffer."""
        buffer = self._version(gradient, None)
        self.part.tensors[op.outputs[0]] = self._version(gradient, buffer)
        nbytes, plain = gradient.numel * _WIDE.itemsize, op.name == "aten.mm"
        inputs = [self.tensor(i) for i in op.inputs]
        product = replace(
            op, name="aten.addmm_" if plain else op.name, bytes_read=op.bytes_read + nbytes, bytes_written=nbytes,
            durations=(),
        )  # fmt: skip
        self.copy(product, inputs=[buffer, *inputs] if plain else [*inputs, buffer])

    def _add(self, op: t.Op, gradient: t.Tensor) -> None:
        """Adds a 16-bit gradient, which dies with that, to the buffer."""
        self.narrow[gradient.id] = self.part.tensors[gradient.id]
        buffer = self._version(gradient, None)
        made = self.part.tensors[gradient.id] = self._version(gradient, buffer)
        nbytes = gradient.numel * _WIDE.itemsize
        self.builder.compute(
            "aten.add_", phase=op.phase, module=op.module, inputs=(buffer, self.narrow[gradient.id]),
            outputs=(made,), bytes_read=nbytes + gradient.nbytes, bytes_written=nbytes,
        )  # fmt: skip

    def _zero(self, op: t.Op, gradient: t.Tensor) -> None:
        """Sets a buffer to zero, for the next step."""
        buffer = self.part.tensors[gradient.id]
        made = self._version(gradient, buffer)
        self.builder.compute(
            "aten._foreach_zero_", phase=op.phase, module=op.module, inputs=(buffer,), outputs=(made,),
            deps=(self.part.ops[op.id],), bytes_written=gradient.numel * _WIDE.itemsize,
            attributes=t.MultiTensor(parts=self.launched, leads=gradient.id == self.leads),
        )  # fmt: skip
