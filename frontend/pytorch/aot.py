"""The second producer: torch.export, then AOTAutograd's joint graph of forward and backward.

It sees the model as a compiler does: functional operators, dead code gone. The optimizer is recorded as in
`recorder`. Its graph has the same annotated form and, in common words, the same compute operations, so each
producer checks the other. One difference remains: a `torch.autograd.Function` of the model's own is traced
through, so its backward is derived from its forward instead of taken from the model.
"""

from __future__ import annotations

import operator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from echograph.errors import UsageError
from echograph.frontend.pytorch.annotate import (
    BACKWARD,
    FORWARD,
    FORWARD_NODE,
    FQN,
    GRADIENT_OF,
    MODULE,
    OPTIMIZER,
    PHASE,
    VAL,
)
from echograph.frontend.pytorch.linking import link_sums
from echograph.frontend.pytorch.recorder import HANDLES, OperatorRecorder
from echograph.frontend.pytorch.step import Inputs, TrainingStep

_ATEN = torch.ops.aten
# What export checks about tensors while a compiled graph runs; an eager step does not.
_CHECKS = (_ATEN._assert_tensor_metadata.default, _ATEN._assert_async.msg, _ATEN._assert_scalar.default)

_FUNCTIONAL_BATCH_NORM = _ATEN._native_batch_norm_legit_functional.default
_BATCH_NORM_RESULTS = 3


def trace_step(step: TrainingStep, recorder: OperatorRecorder) -> Graph:
    """Traces a training step ahead of time and returns it as an annotated graph (`annotate`).

    Args:
        step: the step, its tensors fake tensors of the recorder's mode.
        recorder: a fresh recorder; holds the graph and records the optimizer.

    Raises:
        UsageError: the step recomputes activations, which an export does not show.
        CaptureError: there is no scalar loss. What the module or the export raises passes through.
    """
    if step.spec.recompute:
        raise UsageError("capture producer 'aot' does not see recomputation: use 'recorder'")
    with recorder.following(step):
        joint = _joint_graph(step)
        gradients = _Importer(step, recorder).add(joint)
        recorder.phase = OPTIMIZER
        with recorder:
            step.update(gradients)
    return recorder.graph


class _Loss(nn.Module):
    """Inputs and loss scale -> loss, as a module that owns the step's module."""

    def __init__(self, step: TrainingStep) -> None:
        super().__init__()
        self.root = step.module
        self._loss_of = step.loss_of

    def forward(self, inputs: Inputs, scale: Tensor | None) -> tuple[Tensor]:
        return (self._loss_of(inputs, scale),)


def _joint_graph(step: TrainingStep) -> GraphModule:
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    arguments = _arguments(step)
    with torch.fx.traceback.preserve_node_meta(), ExitStack() as stack:
        program = torch.export.export(_Loss(step), arguments, strict=False)
        joint = aot_export_joint_with_descriptors(stack, program.module(), arguments)
        graph_module: GraphModule = joint.graph_module
    return graph_module


def _arguments(step: TrainingStep) -> tuple[Inputs, Tensor | None]:
    return step.inputs, step.scaler.get("scale")


class _Importer:
    """Writes a joint graph into a recorder's graph, in the annotated form."""

    def __init__(self, step: TrainingStep, recorder: OperatorRecorder) -> None:
        self._step = step
        self._recorder = recorder
        self._nodes: dict[Node, Any] = {}
        self._statistics: set[Node] = set()
        self._by_sequence: dict[int, Node] = {}
        self._known = {
            name: recorder.node_of(tensor)
            for named in (step.module.named_parameters, step.module.named_buffers)
            for name, tensor in named(remove_duplicate=False)
        }
        self._inputs = [
            recorder.node_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(_arguments(step))
        ]

    def add(self, joint: GraphModule) -> dict[str, Tensor]:
        """Imports all nodes; returns the gradients as tensors that the recorder knows."""
        from torch._functorch._aot_autograd.descriptors import PlainAOTOutput

        output = next(n for n in joint.graph.nodes if n.op == "output")
        results = list(zip(output.args[0], output.meta["desc"], strict=True))
        loss = next(node for node, description in results if isinstance(description, PlainAOTOutput))
        for node in joint.graph.nodes:
            if node.op == "placeholder":
                self._nodes[node] = self._placeholder(node, loss)
            elif node.op == "get_attr":
                self._nodes[node] = self._recorder.node_of(getattr(joint, node.target))
            elif node.op == "call_function" and node.target not in _CHECKS:
                self._nodes[node] = self._call(node)
        gradients = self._gradients(results)
        link_sums(self._recorder.graph)
        return gradients

    def _placeholder(self, node: Node, loss: Node) -> Any:
        from torch._functorch._aot_autograd import descriptors as d

        match node.meta["desc"]:
            case d.ParamAOTInput(target=name) | d.BufferAOTInput(target=name):
                return self._known[name.removeprefix("root.")]
            case d.PlainAOTInput(idx=index):
                return self._inputs[index]
            case d.TangentAOTInput():
                return _Tangent(loss)
            case unknown:
                raise AssertionError(f"joint graph has an input of unknown meaning: {unknown}")

    def _call(self, node: Node) -> Any:
        if node.target in HANDLES:
            return self._value(node.all_input_nodes[0])
        if (statistics := self._running_statistics(node)) is not None:
            return statistics
        args, kwargs = map_arg((node.args, node.kwargs), self._value)
        value = node.meta["val"]
        value = tuple(value) if isinstance(value, list) else value
        target = node.target
        if target is _FUNCTIONAL_BATCH_NORM:
            target, value = _ATEN.native_batch_norm.default, value[:_BATCH_NORM_RESULTS]
        made = self._recorder.add_call(target, args, kwargs, value, self._annotations(node))
        if made.meta[PHASE] == FORWARD:
            self._by_sequence.setdefault(node.meta["seq_nr"], made)
        return made

    def _running_statistics(self, node: Node) -> Node | None:
        """The buffer that a result stands for: the eager batch norm updates its running statistics in place.

        The functional one returns them as further results, in fp32, which are then converted to the buffer's
        type.
        """
        source: Any = node.args[0] if node.args else None
        statistics: Node | None = None
        if node.target is operator.getitem and source.target is _FUNCTIONAL_BATCH_NORM:
            result: Any = node.args[1]
            if result >= _BATCH_NORM_RESULTS:
                self._statistics.add(node)
                statistics = self._value(source.args[result])
        elif node.target is _ATEN._to_copy.default and source in self._statistics:
            statistics = self._value(source)
        return statistics

    def _value(self, node: Node) -> Any:
        value = self._nodes[node]
        if isinstance(value, _Tangent):
            loss = self._nodes[value.loss]
            ones = torch.ones_like(loss.meta[VAL])
            annotations = {PHASE: BACKWARD, MODULE: ""}
            value = self._recorder.add_call(_ATEN.ones_like.default, (loss,), {}, ones, annotations)
            self._nodes[node] = value
        return value

    def _annotations(self, node: Node) -> dict[str, Any]:
        if node.meta["partitioner_tag"] == "is_forward":
            return {PHASE: FORWARD, MODULE: _module_path(node.meta.get("nn_module_stack"))}
        forward = self._by_sequence.get(node.meta["seq_nr"])
        if forward is None:
            return {PHASE: BACKWARD, MODULE: ""}
        return {PHASE: BACKWARD, MODULE: forward.meta[MODULE], FORWARD_NODE: forward.name}

    def _gradients(self, results: list[tuple[Node | None, Any]]) -> dict[str, Tensor]:
        from torch._functorch._aot_autograd import descriptors as d

        gradients = {}
        for node, description in results:
            match description:
                case d.GradAOTOutput(grad_of=d.ParamAOTInput(target=target)) if node is not None:
                    name = self._known[target.removeprefix("root.")].meta[FQN]
                    made = self._value(node)
                    made.meta[GRADIENT_OF] = name
                    gradients[name] = torch.empty_like(made.meta[VAL])
                    self._recorder.bind(gradients[name], made)
        return {name: gradients[name] for name in self._step.parameters if name in gradients}


class _Tangent:
    """The gradient of the loss by itself, one; made when the first operation of the backward pass reads it."""

    def __init__(self, loss: Node) -> None:
        self.loss = loss


def _module_path(stack: dict[str, tuple[str, Any]] | None) -> str:
    """Innermost module of an `nn_module_stack`, as a path below the step's module."""
    path = list(stack.values())[-1][0] if stack else ""
    return "" if path == "root" else path.removeprefix("root.")
