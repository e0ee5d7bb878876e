"""Experts that take what comes, in a capture: how many tokens each takes is a value, and decides shapes.

Routing is not known without values, so experts are taken to have equal loads: of a rank's choices (its tokens
times the experts that each takes) every expert gets as many, a remainder going to the first ones. Beyond a
capacity, tokens are dropped, and padded to a capacity, loads are that. What counts and exchanges the loads is
recorded as it runs. `balanced` is for captures alone: on real ranks the loads are what they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.overrides import TorchFunctionMode

from echograph.errors import CaptureError
from echograph.frontend.megatron.patches import Patch

_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"


def balanced(note: Callable[[str], None]) -> tuple[Patch, ...]:
    """What stands in for loads.

    Args:
        note: is told that loads are taken to be equal.
    """
    return (
        Patch(
            where=f"{_DISPATCHER}:MoEAlltoAllTokenDispatcher.preprocess",
            reason="the host reads how many tokens each expert takes",
            around=lambda original: _preprocess(original, note),
        ),
        Patch(
            where=f"{_DISPATCHER}:MoEAllGatherTokenDispatcher.__init__",
            reason="it has tokens of which only values tell how many they are",
            around=lambda _: _refuse,
        ),
        *(
            Patch(
                where=f"{_DISPATCHER}:{name}",
                reason="what a mask selects has as many elements as it is true for",
                around=_of_known_size,
            )
            for name in ("permute", "unpermute")
        ),
        Patch(
            where=f"{_DISPATCHER}:sort_chunks_by_idxs",
            reason="a kernel of Transformer Engine's that does it at once is not there",
            around=_unfused,
        ),
    )


def loads(choices: int, experts: int) -> list[int]:
    """How many of a rank's choices each expert gets: equal numbers, a remainder to the first ones."""
    each, rest = divmod(choices, experts)
    return [each + (number < rest) for number in range(experts)]


def _preprocess(original: Callable[..., Tensor], note: Callable[[str], None]) -> Callable[..., Tensor]:
    def preprocess(dispatcher: Any, routing_map: Tensor) -> Tensor:
        counted = original(dispatcher, routing_map)
        if not isinstance(routing_map, FakeTensor):
            return counted
        with unset_fake_temporarily():
            if dispatcher.drop_and_pad:
                return torch.full(counted.shape, dispatcher.capacity * dispatcher.tp_size * dispatcher.ep_size)
            note("experts are taken to have equal loads: which they have, only values tell")
            return _take(dispatcher, routing_map.shape[0])

    return preprocess


def _refuse(*_: Any, **__: Any) -> None:
    raise CaptureError(
        "--moe-token-dispatcher-type allgather: how many tokens it handles only values tell: "
        "give --moe-token-dispatcher-type alltoall"
    )


def _take(dispatcher: Any, tokens: int) -> Tensor:
    """Tells a dispatcher the loads in place of those that it counted; returns those of this rank's experts."""
    from megatron.core.transformer.moe.moe_utils import get_capacity

    choices, experts = tokens * dispatcher.config.moe_router_topk, dispatcher.num_experts
    counts = torch.tensor(loads(choices, experts))
    factor = dispatcher.config.moe_expert_capacity_factor
    if factor is not None:
        counts = counts.clamp(max=int(get_capacity(choices, experts, factor)))
    across, along, here = dispatcher.tp_size, dispatcher.ep_size, dispatcher.num_local_experts
    of_mine = counts[dispatcher.local_expert_indices]
    dispatcher.num_out_tokens = int(counts.sum())
    if along > 1 or across > 1:
        dispatcher.input_splits = counts.reshape(along, here).sum(1).numpy()
        dispatcher.output_splits = of_mine.sum().expand(along).numpy()
        dispatcher.output_splits_tp = (along * of_mine.sum()).expand(across).numpy()
    dispatcher.num_global_tokens_per_local_expert = of_mine.expand(across * along, here)
    chunks = torch.arange(experts * across)
    dispatcher.sort_input_by_local_experts = chunks.reshape(-1, here).T.ravel()
    dispatcher.restore_output_by_local_experts = chunks.reshape(here, -1).T.ravel()
    made: Tensor = across * along * of_mine
    return made


class _Selecting(TorchFunctionMode):
    """`masked_select` of a mask of which is known for how many elements it is true: their places, and a gather."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.masked_select:
            return func(*args, **(kwargs or {}))
        source, mask = args
        places = torch.ops.aten.nonzero_static(mask.reshape(-1), size=self._size)
        return source.reshape(-1).index_select(0, places.view(-1))


def _of_known_size(original: Callable[..., Any]) -> Callable[..., Any]:
    """Permutes tokens; the kernel of Transformer Engine's that does it at once is not there."""

    @wraps(original)
    def run(tokens: Tensor, *args: Any, **named: Any) -> Any:
        size = named["num_out_tokens"] if "num_out_tokens" in named else tokens.shape[0]
        if not isinstance(tokens, FakeTensor) or not isinstance(size, int):
            return original(tokens, *args, **named)
        with _Selecting(size):
            return original(tokens, *args, **named | {"fused": False})

    return run


def _unfused(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def run(*args: Any, **named: Any) -> Any:
        return original(*args, **named | {"fused": False})

    return run
