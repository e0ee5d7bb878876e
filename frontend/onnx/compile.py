"""From an ONNX model to a step graph: the model runs on fake tensors under the PyTorch frontend's recorder.

The forward pass is what the nodes say; autograd adds the backward pass, and the step its optimizer, so that an
ONNX model's training step is made of the same operators, FLOPs and bytes as a PyTorch model's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from echograph.errors import CaptureError, InputError, UnknownNameError, UsageError
from echograph.frontend.onnx.call import DTypes, main_type
from echograph.frontend.onnx.model import OnnxModel
from echograph.frontend.onnx.module import OnnxModule
from echograph.frontend.pytorch.annotate import check_annotations
from echograph.frontend.pytorch.capture import capture, capture_mode, quiet_fakes
from echograph.frontend.pytorch.device_ops import cuda_operators
from echograph.frontend.pytorch.lower import lower
from echograph.frontend.pytorch.recorder import OperatorRecorder
from echograph.frontend.pytorch.spec import StepSpec
from echograph.frontend.pytorch.step import TrainingStep
from echograph.ir.graph import StepGraph
from echograph.ir.passes.fold import Fold
from echograph.ir.passes.rewrite import StepWriter

LOSSES = ("auto", "output", "cross-entropy", "sum")
_PRODUCTS = ("MatMul", "Gemm")
_PASSED = ("Add", "Identity", "Cast", "Reshape")
_LABELS = "labels"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLoss:
    """A loss and what it needs.

    Attributes:
        text: what it is, for people.
        function: the module's outputs, with the inputs that it adds -> scalar.
        inputs: what the step is given for it.
    """

    text: str
    function: Callable[[Mapping[str, Any]], Tensor]
    inputs: Mapping[str, Tensor] = field(default_factory=dict)


def choose_loss(kind: str, model: OnnxModel, outputs: Mapping[str, Any]) -> OutputLoss:
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
        return OutputLoss(text=f"output '{first}'", function=lambda out: out[first])
    if kind == "sum":
        return OutputLoss(text="sum of the outputs", function=lambda out: _sum([out[name] for name in floats]))
    if first not in floats or value.dim() < 2:
        raise UsageError(f"--loss cross-entropy: '{first}' is no matrix of scores: give --loss sum")
    return _cross_entropy(first, value, {value.name for value in model.inputs} | set(model.outputs))


def _cross_entropy(first: str, scores: Tensor, taken: set[str]) -> OutputLoss:
    labels = _LABELS
    while labels in taken:
        labels += "_"

    def function(out: Mapping[str, Any]) -> Tensor:
        classes = out[first].shape[-1]
        return F.cross_entropy(out[first].reshape(-1, classes), out[labels].reshape(-1))

    made = torch.empty(scores.shape[:-1], dtype=torch.int64)
    return OutputLoss(text=f"cross-entropy of '{first}'", function=function, inputs={labels: made})


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


class Compiled(NamedTuple):
    """A step graph, what its loss is ("" without training), and what was taken for granted."""

    graph: StepGraph
    loss: str
    notes: tuple[str, ...] = ()


class ForwardStep(TrainingStep):
    """A module and its inputs, without what training adds.

    Args:
        module: put into evaluation mode, in place.
        inputs: keyword arguments of the module.
    """

    def __init__(self, module: OnnxModule, inputs: Mapping[str, Tensor]) -> None:
        self.module = module.eval()
        self.inputs = inputs
        self.parameters, self.state, self.scaler = {}, {}, {}


def compile_onnx(
    model: OnnxModel, spec: StepSpec, *, train: bool = False, loss: str = "auto", branch: str = ""
) -> Compiled:
    """Makes the step graph of a model.

    Args:
        model: what a file holds.
        spec: the step; only its dtype counts without training, and stands for the type of most of the weights.
        train: a training step; False: the forward pass alone, as in inference.
        loss: what is trained on (`loss.choose_loss`).
        branch: "then" or "else", what an `If` takes where data decide; "" refuses it.

    Raises:
        CaptureError: the model cannot run; names the node.
        UsageError: the loss does not fit the outputs.
        InputError: its sizes are beyond what a graph can hold.
    """
    try:
        return _compile(model, spec, train, loss, branch)
    except OverflowError:
        raise InputError(
            f"{model.source}: sizes or FLOPs are beyond 64-bit integers: make the batch or the samples smaller"
        ) from None


def _compile(model: OnnxModel, spec: StepSpec, train: bool, loss: str, branch: str) -> Compiled:
    dtypes = DTypes(main=main_type(model), step=spec.torch_dtype)
    with quiet_fakes(), capture_mode() as mode:
        module = OnnxModule(model, dtypes, branch)
        inputs = {v.name: torch.empty(v.shape, dtype=dtypes.of(v.dtype, v.name)) for v in model.inputs}
    if train or any(node.bodies for node in model.nodes):
        with quiet_fakes(), mode, torch.no_grad(), cuda_operators():
            outputs = module(**inputs)
            module.drop_unread()
            chosen = choose_loss(loss, model, outputs) if train else None
    if not train:
        with quiet_fakes():
            graph = Fold()(_forward(module, inputs, spec, mode))
        return Compiled(graph, "", tuple(_notes(module)))
    assert chosen is not None
    captured = capture(module, {**inputs, **chosen.inputs}, chosen.function, spec)
    return Compiled(Fold()(lower(captured, spec, name=model.name)), chosen.text, tuple(_notes(module)))


def _notes(module: OnnxModule) -> Iterator[str]:
    """What a reader of the numbers should know of how weights were told, and which way the model went."""
    weights = [weight for weight in module.model.weights if module.has(weight.name)]
    if constants := [weight for weight in weights if weight.constant and (weight.trainable or weight.quantised)]:
        total = sum(prod(weight.shape) for weight in constants)
        yield f"{len(constants)} nodes 'Constant' hold weights: their {total} elements count as parameters"
    if integers := [weight for weight in weights if weight.quantised]:
        total = sum(prod(weight.shape) for weight in integers)
        yield (
            f"{len(integers)} weights are integers ({total} elements, which count as parameters): products of "
            "integers are those of the step's type, between conversions"
        )
    yield from module.notes
    if module.branch and not module.notes:
        yield "--branch: has no effect here: no If has a condition that depends on data"


def _forward(module: OnnxModule, inputs: Mapping[str, Tensor], spec: StepSpec, mode: FakeTensorMode) -> StepGraph:
    recorder = OperatorRecorder(mode)
    with cuda_operators(), recorder.following(ForwardStep(module, inputs)), recorder, torch.no_grad():
        module(**inputs)
    check_annotations(recorder.graph)
    writer = StepWriter(lower(recorder.graph, spec, name=module.model.name))
    writer.builder.workload = replace(
        writer.builder.workload, parameters=module.parameter_count(), optimizer="", master_weights=False
    )
    return writer.write()
