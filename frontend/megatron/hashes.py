"""Weights that Megatron-LM hashes between steps, to see that all replicas have the same.

`--check-weight-hash-across-dp-replicas-interval`: in steps whose number the interval divides, each rank copies
every parameter to the host, casts it to fp32, takes its SHA-1 there, and gathers the hashes of its replicas
(megatron/core/utils.py: `check_param_hashes_across_dp_replicas`). Hashes are values, and a capture has none: here
the same is copied, waited for and gathered, bytes that the host hashes are counted, and hashes are taken to agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn

from echograph.frontend.megatron.patches import Patch
from echograph.frontend.scripts.recorder import COPY
from echograph.frontend.scripts.streams import CapturedStream
from echograph.ir.types import CopyDirection

if TYPE_CHECKING:
    from echograph.frontend.scripts.recorder import ScriptRecorder

_DIGEST = hashlib.sha1(usedforsecurity=False).digest_size
_NOTE = (
    "--check-weight-hash-across-dp-replicas-interval: weights are hashed in steps whose number it divides, and "
    "taken to agree; the captured step has it if it is one of them"
)


def hashing(recorder: ScriptRecorder) -> tuple[Patch, ...]:
    """What stands in for the check.

    Args:
        recorder: of the step.
    """
    return (
        Patch(
            where="megatron.core.utils:check_param_hashes_across_dp_replicas",
            reason="copies of parameters are compared between steps, which only values tell",
            around=lambda _: _checking(recorder),
        ),
    )


def _checking(recorder: ScriptRecorder) -> Callable[..., bool]:
    def check(model: Sequence[nn.Module], cross_check: bool = False) -> bool:
        from megatron.core import parallel_state as state

        recorder.note(_NOTE)
        if not recorder.is_recording:
            return True
        parameters = [parameter for chunk in model for parameter in chunk.parameters()]
        for parameter in parameters:
            _hash(parameter.data, recorder)
        experts = [parameter for parameter in parameters if not getattr(parameter, "allreduce", True)]
        for count, group in (
            (len(parameters) - len(experts), state.get_data_parallel_group),
            (len(experts), state.get_expert_data_parallel_group),
        ):
            if count:
                _compare(count, group(), cross_check)
        return True

    return check


def _hash(weights: Tensor, recorder: ScriptRecorder) -> None:
    """Brings weights to the host, waits for them and hashes them as fp32."""
    on_host = torch.empty_like(weights).copy_(weights)
    recorder.node_of(on_host).meta[COPY] = CopyDirection.DEVICE_TO_HOST
    CapturedStream.current.synchronize()
    recorder.hashed(weights.numel() * torch.float32.itemsize)


def _compare(count: int, group: Any, cross_check: bool) -> None:
    """Gathers the hashes of a rank's parameters; the host reads whether each replica's are its own."""
    own = torch.zeros(count, _DIGEST, dtype=torch.uint8, device="cuda")
    replicas = [torch.zeros_like(own) for _ in range(group.size())]
    distributed.all_gather(replicas, own, group=group)
    for theirs in (replicas[0], *(replicas if cross_check else ())):
        torch.all(own == theirs)  # torch.equal, whose answer is a value
        CapturedStream.current.synchronize()
