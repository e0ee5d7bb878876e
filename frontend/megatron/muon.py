"""Muon of NVIDIA's `emerging_optimizers`, in PyTorch's operators, for where it is not installed.

It needs Python 3.12 and Triton there. An update is that of its version 0.3: weights decay, momentum, and five
steps of Newton and Schulz on the momentum, of three products each, in bf16 where the precision of products is
"medium".
"""

from __future__ import annotations

from itertools import cycle, islice
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.optim import Optimizer

from echograph.errors import CaptureError

Coefficients = Literal["quintic"]

# Jordan et al. 2024, as emerging_optimizers has them: each step's own.
_QUINTIC = ((4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012))  # fmt: skip


class OrthogonalizedOptimizer(Optimizer):
    """`emerging_optimizers.orthogonalized_optimizers.OrthogonalizedOptimizer`.

    Args:
        params: matrices, or groups of them.
        lr: learning rate.
        momentum: of the gradients' average.
        weight_decay: decoupled, or added to gradients.
        nesterov: whether the gradient is added to the average once more.
        weight_decay_method: "decoupled" or "l2".
        fp32_matmul_prec: of Newton and Schulz's products.
        scaled_orthogonalize_fn: an update of an average; what derives from this has its own.
    """

    def __init__(
        self, params: Any, lr: float, momentum: float, weight_decay: float, *, nesterov: bool,
        weight_decay_method: str, fp32_matmul_prec: Any, scaled_orthogonalize_fn: Any = None, **named: Any,
    ) -> None:  # fmt: skip
        self.nesterov, self.weight_decay_method = nesterov, weight_decay_method
        self.fp32_matmul_prec, self.scaled_orthogonalize_fn = fp32_matmul_prec, scaled_orthogonalize_fn
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, **named})

    def _init_group(self, group: Any, skip_non_grad_params: bool = True) -> None:
        for parameter in group["params"]:
            if (parameter.grad is not None or not skip_non_grad_params) and not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates all parameters that have gradients."""
        del closure
        for group in self.param_groups:
            self._init_group(group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: Any) -> None:
        average = self.state[parameter]["momentum_buffer"]
        if group["weight_decay"]:
            decays = self.weight_decay_method == "decoupled"
            amount = -group["weight_decay"] * group["lr"] if decays else group["weight_decay"]
            (parameter if decays else gradient).add_(parameter, alpha=amount)
        average.lerp_(gradient, 1 - group["momentum"])
        into = gradient.lerp(average, group["momentum"]) if self.nesterov else average
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(self.fp32_matmul_prec)
        try:
            update = self.orthogonalize(parameter, into, **{k: v for k, v in group.items() if k != "params"})
        finally:
            torch.set_float32_matmul_precision(before)
        parameter.add_(update, alpha=-group["lr"])

    def orthogonalize(self, p: Tensor, grad: Tensor, **_: Any) -> Tensor:
        """The update of a matrix."""
        del p
        made: Tensor = self.scaled_orthogonalize_fn(grad)
        return made


class AdaptiveMuon(OrthogonalizedOptimizer):
    """`emerging_optimizers.orthogonalized_optimizers.AdaptiveMuon`: there is none."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise CaptureError(
            "--optimizer adaptive_muon: emerging_optimizers is not installed: give --optimizer muon"
        )


def scale_factor(size_out: int, size_in: int, mode: str = "spectral") -> float:
    """`emerging_optimizers.orthogonalized_optimizers.get_muon_scale_factor`: what an update is multiplied with."""
    if mode == "spectral":
        return float(max(size_out, size_in) ** 0.5)
    ratio = size_out / size_in
    return float((max(1, ratio) if mode == "shape_scaling" else ratio) ** 0.5)


def newton_schulz_tp(
    x: Tensor, steps: int, coefficient_type: str, tp_group: Any, partition_dim: int | None = None,
    tp_mode: str = "duplicated", use_syrk: bool = False,
) -> Tensor:  # fmt: skip
    """`emerging_optimizers.orthogonalized_optimizers.muon_utils.newton_schulz_tp`.

    Args:
        x: matrix of fp32, of which each rank has a part along `partition_dim`.
        steps: of Newton and Schulz.
        coefficient_type: whose coefficients; they change no operation.
        tp_group: ranks.
        partition_dim: None: the rank has all of it.
        tp_mode: "duplicated": the ranks gather it and do the same; "distributed": each its part.
        use_syrk: refused: kernels of Triton.
    """
    del coefficient_type
    if use_syrk:
        raise CaptureError("--muon-use-syrk runs kernels of Triton, which is not installed: leave it out")
    if partition_dim is None:
        return _newton_schulz(x, steps, x.shape[0] > x.shape[1], None)
    if tp_mode == "distributed":
        return _newton_schulz(x, steps, partition_dim == 0, tp_group)
    parts = [torch.empty_like(x) for _ in range(tp_group.size())]
    dist.all_gather(parts, x, tp_group)
    whole = torch.cat(parts, dim=partition_dim)
    made = _newton_schulz(whole, steps, whole.shape[0] > whole.shape[1], None)
    rank: int = tp_group.rank()
    return made.chunk(tp_group.size(), dim=partition_dim)[rank]


def _newton_schulz(x: Tensor, steps: int, transpose: bool, group: Any) -> Tensor:
    x = x.mT if transpose else x
    if group is None:
        x = functional.normalize(x, p=2, dim=(-2, -1), eps=1e-7)  # type: ignore[arg-type]
    else:
        squares = (x * x).sum()
        dist.all_reduce(squares, group=group)
        x = x / squares.sqrt().clamp_min(1e-7)
    if torch.get_float32_matmul_precision() == "medium":
        x = x.to(torch.bfloat16)
    for a, b, c in islice(cycle(_QUINTIC), steps):
        squared = x @ x.mT
        if group is not None:
            dist.all_reduce(squared, group=group)
        x = torch.addmm(x, torch.addmm(squared, squared, squared, alpha=c, beta=b), x, beta=a)
    x = x.to(torch.float32)
    return x.mT if transpose else x


def no_optimizers() -> list[str]:
    """`emerging_optimizers.registry.get_optimizer_name_list`: of others, there are none."""
    return []
