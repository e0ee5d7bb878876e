"""What a script cannot do without; of these, Apex: mixed precision (O0, O1), its data parallelism, LARC.

What O1 casts is what PyTorch's autocast casts; a loss is scaled and gradients are brought back by kernels of their
own. Its wrapper of models is PyTorch's DDP, whose buckets differ from Apex's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from echograph.errors import CaptureError
from echograph.frontend.scripts import imports

_SCALE = 65536.0


class Wanted(Loader, MetaPathFinder):
    """Finds modules of stand-ins where a script cannot do without them: the import is none within `try`.

    Args:
        make: package -> what makes its modules, where they are wanted.
    """

    def __init__(self, make: Mapping[str, Callable[[], list[ModuleType]]]) -> None:
        self._make = make
        self._made: dict[str, ModuleType] = {}

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        """One for each of them."""
        if name in self._make and name not in self._made and is_wanted():
            self._made |= {module.__name__: module for module in self._make[name]()}
        return ModuleSpec(name, self, is_package=True) if name in self._made else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """It is there."""
        return self._made[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """It is complete."""


def is_wanted() -> bool:
    """Whether a module is being imported, and not only asked for, by code that does not go on without it."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(("<frozen importlib", imports.__file__)):
        if frame.f_code.co_filename == "<frozen importlib.util>":
            return False
        frame = frame.f_back
    return frame is not None and not imports.is_caught(frame)


def _initialize(models: Any, optimizers: Any = None, enabled: bool = True, opt_level: str = "O1", **_: Any) -> Any:
    """`amp.initialize`: models that compute in 16 bits where autocast does, optimizers as they are.

    Raises:
        CaptureError: the level is O2 or O3.
    """
    if enabled and opt_level not in ("O0", "O1"):
        raise CaptureError(f"apex.amp's {opt_level} is not known to a capture: give O1, or take torch.amp")
    if enabled and opt_level == "O1":
        for model in models if isinstance(models, list) else [models]:
            model.forward = torch.autocast("cuda", torch.float16)(model.forward)
    return models if optimizers is None else (models, optimizers)


@contextmanager
def _scaled(loss: Any, optimizers: Any, delay_unscale: bool = False, **_: Any) -> Iterator[Any]:
    """`amp.scale_loss`: the loss times a number, gradients divided by it afterwards, unless they are to wait."""
    yield loss * _SCALE
    if not delay_unscale:
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            torch._foreach_mul_(grads, 1.0 / _SCALE)


def _masters(optimizer: Any) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


class _Larc:
    """`LARC`: an optimizer whose gradients are scaled by the norms of each parameter and of its gradient.

    Args:
        optimizer: that takes the step.
        trust_coefficient: ratio of the norms that is aimed at.
        clip: whether the ratio bounds the learning rate, instead of setting it.
        eps: added to the norms.
    """

    def __init__(
        self, optimizer: Any, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8
    ) -> None:
        self.optim, self._trust, self._clip, self._eps = optimizer, trust_coefficient, clip, eps

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optim, name)

    def step(self) -> None:
        """Scales gradients, adds the decay of weights to them, and takes the optimizer's step without one.

        Where Apex asks whether a norm is 0, the host waits for it; that is left out.
        """
        decays = [group.get("weight_decay", 0) for group in self.optim.param_groups]
        with torch.no_grad():
            for group, decay in zip(self.optim.param_groups, decays, strict=True):
                group["weight_decay"] = 0
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._scale(parameter, decay, group["lr"])
        self.optim.step()
        for group, decay in zip(self.optim.param_groups, decays, strict=True):
            group["weight_decay"] = decay

    def _scale(self, parameter: Tensor, decay: float, rate: float) -> None:
        grad = parameter.grad
        assert grad is not None
        size, of_grad = parameter.norm(), grad.norm()
        ratio = self._trust * size / (of_grad + size * decay + self._eps)
        if self._clip:
            ratio = (ratio / rate).clamp(max=1)
        grad.add_(parameter, alpha=decay)
        grad.mul_(ratio)


def modules(make: Callable[..., ModuleType], note: Callable[[str], None]) -> list[ModuleType]:
    """Apex's modules of which something is known.

    Args:
        make: name and contents -> module.
        note: is told what was used.
    """
    told = "apex is not installed: its mixed precision is PyTorch's autocast, its data parallelism PyTorch's DDP"

    def initialize(*args: Any, **kwargs: Any) -> Any:
        note(told)
        return _initialize(*args, **kwargs)

    def parallel(module: nn.Module, *_: Any, **__: Any) -> nn.Module:
        note(told)
        return nn.parallel.DistributedDataParallel(module)

    amp = make(
        "apex.amp", initialize=initialize, scale_loss=_scaled, master_params=_masters, state_dict=dict,
        load_state_dict=lambda _: None, _amp_state=SimpleNamespace(loss_scalers=[SimpleNamespace()] * 8),
    )  # fmt: skip
    larc = make("apex.parallel.LARC", LARC=_Larc)
    wrapped = make(
        "apex.parallel", DistributedDataParallel=parallel, LARC=larc, SyncBatchNorm=nn.SyncBatchNorm,
        convert_syncbn_model=nn.SyncBatchNorm.convert_sync_batchnorm,
        create_syncbn_process_group=lambda *_, **__: None,
    )  # fmt: skip
    return [make("apex", amp=amp, parallel=wrapped), amp, wrapped, larc]
