"""One training step as plain PyTorch: what a real trainer runs, and nothing that it does not.

    forward -> loss -> backward -> [gradients to fp32] -> [unscale] -> [clip] -> optimizer -> [weights to 16 bit]

`TrainingStep` holds the state of a step in steady state (optimizer state and fp32 master weights exist
already), and the three parts that a producer runs in turn: `forward`, `backward`, `update`.
`real_step` is one on real tensors, for comparison with its capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Module
from torch.utils._pytree import tree_map_only

from echograph.errors import CaptureError
from echograph.frontend.pytorch import annotate
from echograph.frontend.pytorch.spec import StepSpec

Inputs = tuple[Any, ...] | Mapping[str, Any]
LossFunction = Callable[[Any], Tensor]

# Any values do: a captured graph holds shapes, not numbers.
_LEARNING_RATE = 1e-4
_CLIP_EPSILON = 1e-6


class TrainingStep:
    """A module, its inputs and loss, and the optimizer's state, ready to run one step.

    Args:
        module: put into train mode and converted to the step's dtype, in place.
        inputs: positional (tuple) or keyword (mapping) arguments of the module.
        loss: model output -> scalar; None where the module returns the loss, or an object with `.loss`.
        spec: the rest of the step.

    Raises:
        CaptureError: the module has no trainable parameter, or cannot recompute and should.
    """

    def __init__(self, module: nn.Module, inputs: Inputs, loss: LossFunction | None, spec: StepSpec) -> None:
        self.module = module.train()
        self.spec = spec
        self.loss = loss
        if spec.recompute:
            _enable_recompute(module)
        _convert(module, spec.torch_dtype)
        self.inputs = _convert_inputs(inputs, spec.torch_dtype)
        self.parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise CaptureError(
                f"{type(module).__name__} has no trainable parameter: "
                "set requires_grad on at least one, or capture another module"
            )
        self.state = _optimizer_state(self.parameters, spec)
        self.scaler = _scaler_state() if spec.dtype == "fp16" else {}

    def tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        """Role, name and tensor of everything that exists before the step, each tensor once."""
        for name, parameter in self.module.named_parameters():
            yield annotate.PARAMETER, name, parameter
        for name, buffer in self.module.named_buffers():
            yield annotate.BUFFER, name, buffer
        yield from _named_tensors(self.inputs)
        for name, slots in self.state.items():
            for slot, tensor in slots.items():
                yield annotate.OPTIMIZER_STATE, f"{name}.{slot}", tensor
        for slot, tensor in self.scaler.items():
            yield annotate.OPTIMIZER_STATE, f"grad_scaler.{slot}", tensor

    def forward(self) -> Tensor:
        """Runs the module and its loss; returns the scalar to differentiate (scaled, for fp16).

        Raises:
            CaptureError: there is no scalar loss.
        """
        return self.loss_of(self.inputs, self.scaler.get("scale"))

    def loss_of(self, inputs: Inputs, scale: Tensor | None) -> Tensor:
        """`forward` as a function of what varies: the inputs, and the loss scale of fp16."""
        output = self.module(**inputs) if isinstance(inputs, Mapping) else self.module(*inputs)
        value = self.loss(output) if self.loss is not None else getattr(output, "loss", output)
        loss = _scalar_loss(value, self.module, self.loss)
        return loss if scale is None else loss * scale

    def backward(self, loss: Tensor) -> dict[str, Tensor]:
        """Differentiates the loss; returns the gradient of each parameter that has one.

        Raises:
            CaptureError: the loss does not depend on any trainable parameter.
        """
        if not loss.requires_grad:
            raise CaptureError(
                f"the loss of {type(self.module).__name__} does not depend on a trainable parameter: "
                "look for no_grad or detach on the way to it"
            )
        loss.backward()  # type: ignore[no-untyped-call]
        return {n: p.grad for n, p in self.parameters.items() if p.grad is not None}

    @torch.no_grad()
    def update(self, gradients: Mapping[str, Tensor]) -> None:
        """Applies the optimizer to the parameters that have a gradient, and drops the gradients."""
        names = list(gradients)
        grads = [gradients[n] for n in names]
        parameters: list[Tensor] = [self.parameters[n] for n in names]
        targets = parameters
        if self.spec.has_master_weights:
            targets = self._slots(names, "master")
            masters = [torch.empty_like(t) for t in targets]
            torch._foreach_copy_(masters, grads)
            grads = masters
        found_inf = self._unscale(grads) if self.scaler else None
        if self.spec.clip_grad_norm is not None:
            _clip(grads, self.spec.clip_grad_norm)
        self._optimize(names, targets, grads, found_inf)
        if self.spec.has_master_weights:
            torch._foreach_copy_(parameters, targets)
        for parameter in self.parameters.values():
            parameter.grad = None

    def _slots(self, names: Sequence[str], slot: str) -> list[Tensor]:
        return [self.state[n][slot] for n in names]

    def _unscale(self, grads: list[Tensor]) -> Tensor:
        """As `torch.amp.GradScaler.unscale_` and `update` do."""
        found_inf = torch.zeros((), dtype=torch.float32, device=self.scaler["scale"].device)
        inverse = self.scaler["scale"].double().reciprocal().float()
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inverse)
        torch._amp_update_scale_(self.scaler["scale"], self.scaler["growth_tracker"], found_inf, 2.0, 0.5, 2000)
        return found_inf

    def _optimize(
        self, names: list[str], targets: list[Tensor], grads: list[Tensor], found_inf: Tensor | None
    ) -> None:
        if self.spec.optimizer == "sgd":
            torch._fused_sgd_(
                targets,
                grads,
                self._slots(names, "momentum_buffer"),
                weight_decay=0.0,
                momentum=0.9,
                lr=_LEARNING_RATE,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=False,
                found_inf=found_inf,
            )
            return
        steps = self._slots(names, "step")
        torch._foreach_add_(steps, 1)
        fused = torch._fused_adamw_ if self.spec.optimizer == "adamw" else torch._fused_adam_
        fused(
            targets,
            grads,
            self._slots(names, "exp_avg"),
            self._slots(names, "exp_avg_sq"),
            [],
            steps,
            lr=_LEARNING_RATE,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.01,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
            found_inf=found_inf,
        )
        if found_inf is not None:
            torch._foreach_sub_(steps, [found_inf] * len(steps))


def _clip(grads: list[Tensor], max_norm: float) -> None:
    """As `torch.nn.utils.clip_grad_norm_` with `foreach=True`, without its Python look at each gradient."""
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    coefficient = torch.clamp(max_norm / (norm + _CLIP_EPSILON), max=1.0)
    torch._foreach_mul_(grads, coefficient)


def _scalar_loss(value: Any, module: nn.Module, loss: LossFunction | None) -> Tensor:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.reshape(()) if value.dim() else value
    whose = "the loss function" if loss is not None else type(module).__name__
    if isinstance(value, Tensor):
        what = f"a tensor of shape {list(value.shape)}"
        remedy = "reduce it with .mean() or .sum()"
    else:
        what = f"{'an' if type(value).__name__[0] in 'AEIOUaeiou' else 'a'} {type(value).__name__}"
        remedy = "give a loss function (output -> scalar tensor), or inputs with labels"
    raise CaptureError(f"{whose} returned {what}, not a scalar loss: {remedy}")


def _enable_recompute(module: nn.Module) -> None:
    if not getattr(module, "supports_gradient_checkpointing", False):
        raise CaptureError(
            f"{type(module).__name__} does not support activation checkpointing: "
            "use torch.utils.checkpoint inside the model, or the recompute pass of `echoc lower`"
        )
    enable: Any = getattr(module, "activation_checkpointing_enable", None)
    if enable is not None:
        enable()
    else:
        module.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]


def _convert(module: nn.Module, dtype: torch.dtype) -> None:
    """Converts parameters and persistent buffers that are floating point; keeps shared parameters shared.

    Buffers that are not saved (rotary frequencies, say) keep their type, as when weights are loaded in 16 bit.
    """
    converted: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is None or not parameter.is_floating_point() or parameter.dtype == dtype:
                continue
            if id(parameter) not in converted:
                data = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
                converted[id(parameter)] = parameter, nn.Parameter(data, parameter.requires_grad)
            owner._parameters[name] = converted[id(parameter)][1]
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_floating_point() and name not in owner._non_persistent_buffers_set:
                owner._buffers[name] = buffer.to(dtype)


def _convert_inputs(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    converted: Inputs = tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, inputs)
    return converted


def _named_tensors(value: Any, name: str = "input") -> Iterator[tuple[str, str, Tensor]]:
    if isinstance(value, Tensor):
        yield annotate.INPUT, name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named_tensors(item, str(key) if name == "input" else f"{name}.{key}")
    elif isinstance(value, tuple | list):
        for i, item in enumerate(value):
            yield from _named_tensors(item, f"{name}.{i}")


def _optimizer_state(parameters: Mapping[str, Tensor], spec: StepSpec) -> dict[str, dict[str, Tensor]]:
    slots = ("momentum_buffer",) if spec.optimizer == "sgd" else ("exp_avg", "exp_avg_sq")
    state: dict[str, dict[str, Tensor]] = {}
    for name, parameter in parameters.items():
        dtype = torch.float32 if spec.has_master_weights else parameter.dtype
        like = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        state[name] = {"master": like} if spec.has_master_weights else {}
        state[name] |= {slot: torch.empty_like(like) for slot in slots}
        if spec.optimizer != "sgd":
            state[name]["step"] = torch.empty((), dtype=torch.float32)
    return state


def _scaler_state() -> dict[str, Tensor]:
    return {
        "scale": torch.empty((), dtype=torch.float32),
        "growth_tracker": torch.empty((), dtype=torch.int32),
    }


def real_step(
    module: Module, inputs: Inputs, loss: LossFunction | None, spec: StepSpec, device: str
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
