"""Random step graphs of layered models, as Hypothesis strategies.

A `Model` says which operations a layer has; `build` writes its forward pass, its backward pass in reverse, and its
optimizer, with the aliases, views, shared parameters and saved activations that real captures have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

from echograph.ir import types as t
from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import StepGraph, Workload

KINDS = ("linear", "gelu", "view", "in_place", "residual", "shared", "buffer", "attention")
SHAPE = (4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A random model: `layers` times the operations `kinds`, in modules `prefix.0`, `prefix.1`, ..."""

    layers: int
    kinds: tuple[str, ...]
    prefix: str = "layers"
    nested: int = 0
    backward: bool = True
    optimizer: bool = True
    durations: bool = False
    deps: bool = False
    odd: tuple[int, int] | None = None

    @property
    def foldable(self) -> bool:
        """Whether its layers should become one block."""
        return self.layers > 1 and self.odd is None


def models(*, min_layers: int = 0, odd: bool = True) -> st.SearchStrategy[Model]:
    """Random models; with `odd`, one operation of one layer may differ from its like in the others."""
    kinds = st.lists(st.sampled_from(KINDS), min_size=1, max_size=7).map(tuple)
    spot = st.none() | st.tuples(st.integers(0, 4), st.integers(0, 6))
    return st.builds(
        Model,
        layers=st.integers(min_layers, 5),
        kinds=kinds,
        prefix=st.sampled_from(["layers", "encoder.layer", "a.0.h", "0"]),
        nested=st.sampled_from([0, 0, 2, 3]),
        backward=st.booleans(),
        optimizer=st.booleans(),
        durations=st.booleans(),
        deps=st.booleans(),
        odd=spot if odd else st.none(),
    )


@dataclass
class _Writer:
    """State of one model being written."""

    model: Model
    builder: GraphBuilder
    shared: int = 0
    shared_gradient: int | None = None
    undo: list[Callable[[int], int]] = field(default_factory=list)
    gradients: list[tuple[int, int, str]] = field(default_factory=list)
    previous: int | None = None

    def tensor(self, name: str, role: t.TensorRole, alias: int | None = None) -> int:
        return self.builder.tensor(name, SHAPE, t.DType.BF16, role, alias_of=alias)

    def op(self, operator: str, module: str, phase: t.Phase, reads: list[int], made: int, **values: object) -> int:
        durations = ()
        if self.model.durations:
            durations = (
                t.Duration(device="h100", picoseconds=1000 + len(operator), source=t.Source.FITTED, samples=3),
            )
        return self.builder.compute(
            operator, module=module, phase=phase, inputs=reads, outputs=[made], durations=durations, **values
        )

    def forward(self, kind: str, module: str, x: int, entry: int, flops: int) -> int:
        """Writes one forward operation and remembers its backward; returns its output."""
        reads, alias, work = [x], None, {"flops": flops, "bytes_read": 128, "bytes_written": 64}
        weight = None
        if kind == "linear":
            weight = self.tensor(f"{module}.weight", t.TensorRole.PARAMETER)
            reads, work["attributes"] = [x, weight], t.Gemm(transpose_b=True)
        elif kind == "attention":
            work["attributes"] = t.Attention(heads=2, kv_heads=1, head_dim=4, causal=True, dropout=0.1)
        elif kind == "shared":
            reads = [x, self.shared]
        elif kind == "buffer":
            reads = [x, self.tensor(f"{module}.mask", t.TensorRole.BUFFER)]
        elif kind == "residual":
            reads = [x, entry]
        elif kind in ("view", "in_place"):
            alias = x
            work = {} if kind == "view" else work
        y = self.tensor(f"{module}.{kind}", t.TensorRole.ACTIVATION, alias)
        deps = [self.builder.op_count() - 1] if self.model.deps and self.previous is not None else []
        at = self.op(f"fw.{kind}", module, t.Phase.FORWARD, reads, y, deps=deps, **work)
        self.previous = at
        self.undo.append(lambda gradient: self.backward(kind, module, x, weight, gradient, at))
        return y

    def backward(self, kind: str, module: str, saved: int, weight: int | None, gradient: int, at: int) -> int:
        """Writes the backward of one operation; returns the gradient of its input."""
        phase, work = t.Phase.BACKWARD, {"flops": 7, "bytes_read": 1, "bytes_written": 1, "forward_op": at}
        reads = [gradient, saved] if weight is None else [gradient, weight]
        made = self.tensor(f"{module}.d_{kind}", t.TensorRole.ACTIVATION)
        self.op(f"bw.{kind}", module, phase, reads, made, **work)
        if weight is not None:
            dw = self.tensor(f"{module}.weight.grad", t.TensorRole.GRADIENT)
            self.op("bw.weight", module, phase, [gradient, saved], dw, **work)
            self.gradients.append((weight, dw, module))
        if kind == "shared":
            before = self.shared_gradient
            dw = self.tensor("shared.grad", t.TensorRole.GRADIENT, before)
            self.op("bw.shared", module, phase, [gradient] if before is None else [gradient, before], dw, **work)
            self.shared_gradient = dw
        return made

    def step(self, weight: int, gradient: int, module: str) -> None:
        """Writes the optimizer's update of one parameter, in place."""
        state = self.tensor(f"{module}.weight.exp_avg", t.TensorRole.OPTIMIZER_STATE)
        updated = self.tensor(f"{module}.weight", t.TensorRole.PARAMETER, weight)
        moved = self.tensor(f"{module}.weight.exp_avg", t.TensorRole.OPTIMIZER_STATE, state)
        self.builder.compute(
            "adamw_", module=module, phase=t.Phase.OPTIMIZER, inputs=[weight, gradient, state],
            outputs=[updated, moved], flops=12, bytes_read=3, bytes_written=2,
        )  # fmt: skip


def build(model: Model) -> StepGraph:
    """The step graph of a model."""
    workload = Workload(model="random", parameters=10, batch_size=2, sequence_length=4, dtype=t.DType.BF16)
    w = _Writer(model, GraphBuilder(name="random", workload=workload))
    x = w.tensor("input", t.TensorRole.INPUT)
    w.shared = w.tensor("shared", t.TensorRole.PARAMETER)
    w.tensor("unused", t.TensorRole.BUFFER)
    x = w.forward("linear", "embed", x, x, 3)
    for layer in range(model.layers):
        entry, w.previous = x, None
        for at, kind in enumerate(model.kinds):
            inner = f".{at % model.nested}" if model.nested else f".m{at}"
            flops = 5 + (model.odd == (layer, at))
            x = w.forward(kind, f"{model.prefix}.{layer}{inner}", x, entry, flops)
    w.previous = None
    x = w.forward("shared", "head", x, x, 3)
    if model.backward:
        gradient = x
        for undo in reversed(w.undo):
            gradient = undo(gradient)
    if model.backward and model.optimizer:
        for weight, gradient, module in w.gradients:
            w.step(weight, gradient, module)
    return w.builder.build(StepGraph)


graphs = models().map(build)


def copy_with(
    graph: StepGraph, ops: dict[int, dict[str, object]], tensors: dict[int, dict[str, object]] | None = None
) -> StepGraph:
    """The unfolded graph with fields of some operations and tensors replaced."""
    builder = GraphBuilder(name=graph.name, workload=graph.workload, streams=graph.streams)
    for tensor in graph.tensors:
        change = (tensors or {}).get(tensor.id, {})
        builder.tensor(
            change.get("name", tensor.name), change.get("shape", tensor.shape), change.get("dtype", tensor.dtype),
            change.get("role", tensor.role), alias_of=tensor.alias_of,
        )  # fmt: skip
    for op in graph.ops:
        change = dict(ops.get(op.id, {}))
        builder.add(replace(op, name=change.pop("operator", op.name)), **change)
    return builder.build(StepGraph)
