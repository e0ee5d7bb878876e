"""The accelerator that DeepSpeed finds in a capture: a GPU in all that it asks, while tensors lie on the CPU.

DeepSpeed goes one way or another by what its accelerator says: on one that is synchronous it uses no streams and
waits for nothing. So this one says what CUDA's says, with the streams and events that a capture records.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch import Tensor

from echograph.errors import CaptureError
from echograph.frontend.scripts import streams
from echograph.frontend.scripts.device import MEMORY_BYTES
from echograph.frontend.scripts.world import World


class CapturedAccelerator(CPU_Accelerator):  # type: ignore[misc]
    """A GPU as DeepSpeed sees it, each method what `deepspeed.accelerator.CUDA_Accelerator` answers."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._communication_backend_name = "nccl"
        self._world = world

    def is_synchronized_device(self) -> bool:
        """Work is issued to streams, and the host goes on."""
        return False

    def use_host_timers(self) -> bool:
        """DeepSpeed's own timers measure nothing here."""
        return True

    def device_count(self) -> int:
        """GPUs of the machine."""
        return min(self._world.local_size, self._world.size)

    def current_device(self) -> int:
        """The GPU of this rank."""
        return self._world.local_rank

    @property
    def Stream(self) -> type[streams.CapturedStream]:
        """The class of streams."""
        return streams.CapturedStream

    @property
    def Event(self) -> type[streams.CapturedEvent]:
        """The class of events."""
        return streams.CapturedEvent

    def stream(self, stream: streams.CapturedStream | None) -> Any:
        """What is issued in the context goes to the stream."""
        return streams.on(stream)

    def current_stream(self, device_index: int | None = None) -> streams.CapturedStream:
        """What work is issued to."""
        return streams.CapturedStream.current

    def default_stream(self, device_index: int | None = None) -> streams.CapturedStream:
        """What work is issued to where nobody says otherwise."""
        return streams.CapturedStream.default

    def is_fp16_supported(self) -> bool:
        """Half precision is there on every GPU that DeepSpeed trains on."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """Types of parameters."""
        return [torch.float, torch.half, torch.bfloat16]

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Nothing is allocated."""
        return 0

    max_memory_allocated = memory_cached = max_memory_cached = memory_allocated
    memory_reserved = max_memory_reserved = memory_allocated

    def total_memory(self, device_index: int | None = None) -> int:
        """Of the GPU."""
        return MEMORY_BYTES

    available_memory = total_memory

    def pin_memory(self, tensor: Tensor, make_copy: bool = True, match_shape: bool = True) -> Tensor:
        """Memory of the host is what it was."""
        return tensor


def stand_in(original: Callable[..., Any]) -> Callable[..., Any]:
    """For `OpBuilder.load`, which would compile an operator: PyTorch's own, where one does the same."""
    del original

    def load(builder: Any, *_: Any, **__: Any) -> Any:
        name = type(builder).__name__
        if name not in _OPERATORS:
            raise CaptureError(
                f"DeepSpeed's operator {name.removesuffix('Builder')} is compiled code that a capture cannot look "
                "into: leave the feature that uses it out of the configuration"
            )
        return _OPERATORS[name]

    return load


def _fused_adam(
    chunk: int, flag: Tensor, lists: list[list[Tensor]], lr: float, beta1: float, beta2: float, eps: float,
    step: int, decoupled: int, bias_correction: int, weight_decay: float,
) -> None:  # fmt: skip
    """DeepSpeed's multi-tensor Adam as PyTorch's: one launch that reads and writes the same tensors."""
    del chunk, flag, bias_correction
    gradients, parameters, first, second = lists
    update = torch._fused_adamw_ if decoupled else torch._fused_adam_
    # PyTorch's kernel takes both in one type; DeepSpeed's reads a gradient in its own.
    steps = [torch.ones((), dtype=torch.float32) for _ in parameters]
    update(
        parameters, gradients, first, second, [], steps, lr=lr, beta1=beta1, beta2=beta2,
        weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=False,
    )  # fmt: skip


def _cpu_adam(
    number: int, step: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float,
    bias_correction: bool, parameter: Tensor, gradient: Tensor, first: Tensor, second: Tensor,
) -> None:  # fmt: skip
    """DeepSpeed's Adam of the host: the same update, of one tensor."""
    del number
    _fused_adam(
        0, parameter, [[gradient], [parameter], [first], [second]], lr, beta1, beta2, eps, step, 1,
        int(bias_correction), weight_decay,
    )  # fmt: skip


def _nothing(*_: Any) -> None:
    """Nothing is kept in C++."""


_OPERATORS = {
    "FusedAdamBuilder": SimpleNamespace(multi_tensor_adam=_fused_adam),
    "CPUAdamBuilder": SimpleNamespace(create_adam=_nothing, destroy_adam=_nothing, adam_update=_cpu_adam),
}
"""Operators of DeepSpeed that PyTorch has too."""
