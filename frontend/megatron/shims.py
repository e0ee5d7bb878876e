"""Stand-ins for what megatron-core takes from a GPU, Transformer Engine or Apex. Written for 0.16.

`SHIMS` has them, each with its reason. They make a script run where none of the three is, on real ranks of CPUs or
on none, and change nothing of which collectives it asks for. The device itself is the business of
`frontend.scripts.device`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import FakeWork

from echograph.errors import CaptureError
from echograph.frontend.megatron.patches import Patch, in_place
from echograph.frontend.megatron.stub_modules import standing_in

_COALESCED = ("allreduce_coalesced_", "allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_")
_GENERATOR = "random numbers are drawn from the GPU's generator; which they are does not change what runs"


@contextmanager
def shimmed() -> Iterator[None]:
    """In the context, megatron-core does without a GPU's generator, Transformer Engine and Apex.

    Raises:
        CaptureError: this megatron-core does not have what a shim stands in for.
    """
    # What megatron-core has compiled would be kernels of this machine's compiler: its operators run one by one.
    with standing_in(), in_place(SHIMS), _coalesced(), torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def _coalesced() -> Iterator[None]:
    """In the context, PyTorch has shape rules for collectives of several buckets at once; it lacks them."""
    library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    for name in _COALESCED:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{name}", "Meta"):
            library.impl(name, lambda *_, **__: FakeWork().boxed(), "Meta")  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


def _norm(config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> nn.Module:
    """PyTorch's norm, its parameters marked as those of Transformer Engine and Apex are."""
    kinds: dict[str, Callable[..., nn.Module]] = {"LayerNorm": nn.LayerNorm, "RMSNorm": nn.RMSNorm}
    if config.normalization not in kinds:
        raise CaptureError(f"normalization '{config.normalization}': without its kernels, {' or '.join(kinds)}")
    norm = kinds[config.normalization](hidden_size, eps=eps, dtype=config.params_dtype)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


def _norm_of_all(size: int, flag: Any, lists: list[list[Tensor]], each: bool, *_: Any) -> tuple[Tensor, None]:
    """The norm of many tensors together."""
    del size, flag, each
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(lists[0]))).view(1), None


def _scale_all(size: int, flag: Any, lists: list[list[Tensor]], factor: float) -> None:
    """Writes tensors, times a factor, to others, which may be the same."""
    del size, flag
    source, target = lists
    if any(one is not other for one, other in zip(source, target, strict=True)):
        torch._foreach_copy_(target, source)
    if factor != 1.0:
        torch._foreach_mul_(target, factor)


def _fused(original: Callable[..., None]) -> Callable[..., None]:
    """Adam in one kernel, if nothing else is asked for."""

    def init(optimizer: Any, *args: Any, **options: Any) -> None:
        if options.get("foreach") is None and options.get("fused") is None:
            options["fused"] = True
        original(optimizer, *args, **options)

    return init


def _same(answer: Any = None) -> Callable[[Any], Any]:
    return lambda _: lambda *_, **__: answer


def _backward(output: Tensor, gradient: Tensor | None) -> None:
    """A backward pass from an output whose memory is given back, which PyTorch's own functions would refuse."""
    if gradient is None:
        gradient = torch.ones_like(output, memory_format=torch.preserve_format)
    torch.autograd.graph._engine_run_backward(
        (output,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _name_it(tracker: Any, name: str, seed: int) -> None:
    tracker.states_[name] = seed


SHIMS: tuple[Patch, ...] = (
    Patch(
        where="megatron.core.tensor_parallel.random:CudaRNGStatesTracker.add",
        reason=_GENERATOR,
        around=lambda _: _name_it,
    ),
    Patch(
        where="megatron.core.tensor_parallel.random:CudaRNGStatesTracker.fork",
        reason=_GENERATOR,
        around=_same(nullcontext()),
    ),
    Patch(
        where="megatron.core.tensor_parallel.random:_get_cuda_rng_state",
        reason=_GENERATOR,
        around=lambda _: lambda *_, **__: torch.get_rng_state(),
    ),
    Patch(
        where="megatron.core.tensor_parallel.random:_set_cuda_rng_state",
        reason=_GENERATOR,
        around=_same(),
    ),
    Patch(
        where="megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
        reason="the norm that is left without their kernels refuses sequence parallelism; theirs do not",
        around=lambda _: staticmethod(lambda cls, *args, **options: _norm(*args, **options)),
    ),
    Patch(
        where="megatron.core.fusions.fused_softmax:FusedScaleMaskSoftmax.is_kernel_available",
        reason="the kernel is Apex's; what is left without it is scale, mask and softmax one by one",
        around=lambda original: original if find_spec("scaled_masked_softmax_cuda") else _same(False)(original),
    ),
    Patch(
        where="megatron.core.optimizer.clip_grads:l2_norm_impl",
        reason="the kernel answers on the device; what is left without it reads every tensor's norm on the host",
        around=lambda _: _norm_of_all,
    ),
    *(
        Patch(
            where=f"megatron.core.optimizer.{module}:multi_tensor_scale_impl",
            reason="the kernel scales many tensors in one launch; what is left without it, one by one",
            around=lambda _: _scale_all,
        )
        for module in ("clip_grads", "optimizer")
    ),
    Patch(
        where="torch.optim.adam:Adam.__init__",
        reason="megatron-core takes Transformer Engine's or Apex's fused Adam, if there; PyTorch has one, too",
        around=_fused,
    ),
    Patch(
        where="megatron.core.pipeline_parallel.schedules:custom_backward",
        reason="it calls autograd's engine past PyTorch's own function, where hooks see a pass begin",
        around=lambda _: _backward,
    ),
)
