"""What a model without a loss is trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from echograph.errors import CaptureError, UnknownNameError, UsageError
from echograph.frontend.onnx.model import OnnxModel

LOSSES = ("auto", "output", "cross-entropy", "sum")
_PRODUCTS = ("MatMul", "Gemm")
_PASSED = ("Add", "Identity", "Cast", "Reshape")
_LABELS = "labels"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A loss and what it needs.

    Attributes:
        text: what it is, for people.
        function: the module's outputs, with the inputs that it adds -> scalar.
        inputs: what the step is given for it.
    """

    text: str
    function: Callable[[Mapping[str, Any]], Tensor]
    inputs: Mapping[str, Tensor] = field(default_factory=dict)


def choose_loss(kind: str, model: OnnxModel, outputs: Mapping[str, Any]) -> Loss:
    """The loss of a training step.

    Args:
        kind: "output" (the first output, a scalar), "cross-entropy" (of the first output against labels), "sum"
            (of all outputs), or "auto": the first of these that fits, cross-entropy where the first output is
            that of a matrix product.
        model: the model.
        outputs: what it returns, fake; make labels under the same mode.

    Raises:
        UsageError: the outputs do not fit the kind.
        CaptureError: the model has no output of floating-point numbers.
    """
    if kind not in LOSSES:
        raise UnknownNameError("loss", kind, LOSSES)
    first = next(iter(model.outputs), "")
    floats = [n for n in model.outputs if isinstance(outputs[n], Tensor) and outputs[n].is_floating_point()]
    if not floats:
        raise CaptureError(f"{model.source}: no output is a tensor of floating-point numbers: nothing to train on")
    value = outputs[first]
    if kind == "auto":
        kind = "output" if first in floats and value.numel() == 1 else "sum"
        if kind == "sum" and first in floats and value.dim() > 1 and _is_logits(model, first):
            kind = "cross-entropy"
    if kind == "output":
        if first not in floats or value.numel() != 1:
            raise UsageError(f"--loss output: '{first}' is not a scalar: give --loss cross-entropy or sum")
        return Loss(text=f"output '{first}'", function=lambda out: out[first])
    if kind == "sum":
        return Loss(text="sum of the outputs", function=lambda out: _sum([out[name] for name in floats]))
    if first not in floats or value.dim() < 2:
        raise UsageError(f"--loss cross-entropy: '{first}' is no matrix of scores: give --loss sum")
    return _cross_entropy(first, value, {value.name for value in model.inputs} | set(model.outputs))


def _cross_entropy(first: str, scores: Tensor, taken: set[str]) -> Loss:
    labels = _LABELS
    while labels in taken:
        labels += "_"

    def function(out: Mapping[str, Any]) -> Tensor:
        classes = out[first].shape[-1]
        return F.cross_entropy(out[first].reshape(-1, classes), out[labels].reshape(-1))

    made = torch.empty(scores.shape[:-1], dtype=torch.int64)
    return Loss(text=f"cross-entropy of '{first}'", function=function, inputs={labels: made})


def _sum(values: list[Tensor]) -> Tensor:
    total = values[0].sum()
    for value in values[1:]:
        total = total + value.sum()
    return total


def _is_logits(model: OnnxModel, output: str) -> bool:
    """Whether the output is that of a last dense layer, biased and reshaped perhaps."""
    makers = {name: node for node in model.nodes for name in node.outputs}
    node = makers.get(output)
    while node is not None and node.operator in _PASSED:
        node = next((makers[name] for name in node.inputs if name in makers), None)
    return node is not None and node.operator in _PRODUCTS
