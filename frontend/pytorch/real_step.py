"""A training step on real tensors, for comparison with its capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_map_only

from echograph.frontend.pytorch.spec import StepSpec
from echograph.frontend.pytorch.step import Inputs, Loss, TrainingStep


def real_step(
    module: Module, inputs: Inputs, loss: Loss | None, spec: StepSpec, device: str
) -> Callable[[], None]:
    """One training step on a device, to be run again and again: forward, loss, backward, optimizer.

    Args:
        module: with real parameters; moved to the device.
        inputs: real, of any device.
        loss: as in `capture`.
        spec: what the step does besides the model.
        device: PyTorch's name of it.
    """
    inputs = tree_map_only(Tensor, lambda t: t.to(device), inputs)
    with torch.device(device):
        step = TrainingStep(module.to(device), inputs, loss, spec)
    for tensors in (*step.state.values(), step.scaler):
        for slot, tensor in tensors.items():
            tensor.fill_(2.0**10 if slot == "scale" else 0)
    if spec.has_master_weights:
        with torch.no_grad():
            for name, tensors in step.state.items():
                tensors["master"].copy_(step.parameters[name])

    def run() -> None:
        gradients: dict[str, Any] = step.backward(step.forward())
        step.update(gradients)

    return run
