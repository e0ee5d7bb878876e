"""Dispatchers of experts that one kernel exchanges tokens for: DeepEP's and HybridEP's, for where they are not.

A token goes once to each rank that has experts of it, whichever of its experts these are. How many ranks that are
only values tell: each token's experts are taken to be any, of which every rank has as many, so that of R ranks
with E experts R (1 - C(E - E/R, k) / C(E, k)) are expected to have one of k. Experts get equal loads.

An exchange is an all-to-all of so many rows. What the kernel does besides (a row read for several ranks, rows of
several added up) is part of it; HybridEP puts rows in the order of experts behind it, in a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import comb
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from echograph.errors import CaptureError
from echograph.frontend.megatron.patches import TESTED, Patch

_DEEP, _HYBRID = TESTED[0], "0.16"
"""The versions that have DeepEP's dispatcher, and HybridEP's."""
_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"
_EXPECTED = (
    "--moe-token-dispatcher-type flex: a token's experts are taken to be any, of which every rank has as many, "
    "and experts to have equal loads; tokens go once to each rank by one all-to-all"
)


def distinct_ranks(ranks: int, experts: int, choices: int) -> float:
    """Of how many ranks a token is expected to need experts.

    Args:
        ranks: which have as many experts each.
        experts: of all ranks.
        choices: experts of a token.
    """
    return ranks * (1 - comb(experts - experts // ranks, choices) / comb(experts, choices))


class _Plan(NamedTuple):
    """An exchange.

    Attributes:
        group: ranks.
        tokens: of a rank.
        sent: rows that a rank sends, and receives.
        rows: that its experts take; as `sent`, where they are put in order later.
        places: of these among those received; None where that is part of the exchange, or later.
    """

    group: Any
    tokens: int
    sent: int
    rows: int
    places: Tensor | None


def _there(given: Tensor, plan: _Plan) -> Tensor:
    """[tokens, hidden] -> [rows, hidden]."""
    got = _exchanged(given, plan)
    if plan.places is not None:
        return got.index_select(0, plan.places)
    return got if plan.rows == plan.sent else _rows(got, plan.rows)


def _back(given: Tensor, plan: _Plan) -> Tensor:
    """[rows, hidden] -> [tokens, hidden]."""
    if plan.places is not None:
        given = given.new_empty(plan.sent, given.shape[1]).index_add_(0, plan.places, given)
    return _rows(_exchanged(given, plan), plan.tokens)


def _exchanged(given: Tensor, plan: _Plan) -> Tensor:
    got = given.new_empty(plan.sent, given.shape[1])
    dist.all_to_all_single(got, _rows(given.contiguous(), plan.sent), group=plan.group)
    return got


def _rows(given: Tensor, count: int) -> Tensor:
    """So many rows of a tensor, which the kernel reads or writes as it goes: no memory of their own."""
    return given if given.shape[0] == count else given.as_strided((count, given.shape[1]), (0, 1))


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, plan: _Plan) -> Tensor:
        ctx.plan = plan
        return _there(given, plan)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _back(gradient, ctx.plan), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, plan: _Plan) -> Tensor:
        ctx.plan = plan
        return _back(given, plan)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _there(gradient, ctx.plan), None


class _Beside(torch.autograd.Function):
    """What goes along with the rows: weights of their experts, a few bytes each."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, rows: int) -> Tensor:
        ctx.tokens = given.shape[0]
        return _rows(given.contiguous(), rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _rows(gradient.contiguous(), ctx.tokens), None


def _instead(function: Callable[..., Any], original: Any) -> Callable[..., Any]:
    del original
    return function


class Flex:
    """What stands in for the kernels' functions.

    Args:
        note: is told what loads are taken to be.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note, self._choices = note, 1

    def patches(self) -> tuple[Patch, ...]:
        """Its functions in place of those of DeepEP and HybridEP."""
        functions: dict[str, Callable[..., Any]] = {
            "fused_dispatch": self.dispatch,
            "fused_combine": self.combine,
            "set_deepep_num_sms": lambda *_: None,
            "hybrid_ep_dispatch": self.dispatch_in_order,
            "hybrid_ep_combine": self.combine_in_order,
        }
        return (
            *(
                Patch(
                    where=f"{_DISPATCHER}:{name}",
                    reason="kernels for GPUs send what only values tell",
                    around=partial(_instead, function),
                    since=_HYBRID if name.startswith("hybrid") else _DEEP,
                )
                for name, function in functions.items()
            ),
            *(
                Patch(
                    where=f"{_DISPATCHER}:{name}.dispatch",
                    reason="how many experts a token has is not told to the kernels",
                    around=self._choosing,
                    since=since,
                )
                for name, since in (("_DeepepManager", _DEEP), ("_HybridEPManager", _HYBRID))
            ),
            Patch(
                where=f"{_DISPATCHER}:_DeepepManager._indices_to_multihot",
                reason="which of a rank's experts a token takes only values tell",
                around=_multihot,
            ),
        )

    def _choosing(self, original: Any) -> Any:
        def dispatch(manager: Any, *args: Any, **named: Any) -> Any:
            copies = manager.num_experts // manager.config.num_moe_experts
            self._choices = copies * manager.config.moe_router_topk
            return original(manager, *args, **named)

        return dispatch

    def _plan(self, x: Tensor, group: Any, experts: int, in_order: bool, fused: bool, multiple: int) -> Any:
        if not isinstance(x, FakeTensor):
            raise CaptureError("--moe-token-dispatcher-type flex without its kernels is there in a capture alone")
        self._note(_EXPECTED)
        ranks, tokens = group.size(), x.shape[0]
        each = round(tokens * distinct_ranks(ranks, experts, self._choices) / ranks)
        load = -(-tokens * self._choices * ranks // experts)
        load += -load % max(1, multiple)
        with unset_fake_temporarily():
            loads = torch.full((experts // ranks,), load, dtype=torch.int64)
        rows = load * (experts // ranks) if in_order else each * ranks
        places = x.new_empty(rows, dtype=torch.int64) if in_order and not fused else None
        return _Plan(group, tokens, each * ranks, rows, places), loads

    def dispatch(self, x: Tensor, indices: Tensor, probs: Tensor, num_experts: int, group: Any, **_: Any) -> Any:
        """`deep_ep`'s dispatch: rows that a rank receives, their experts and probabilities, and loads."""
        plan, loads = self._plan(x, group, num_experts, False, False, 1)
        made = _Dispatch.apply(x, plan)  # type: ignore[no-untyped-call]
        probabilities = _Beside.apply(probs, plan.rows)  # type: ignore[no-untyped-call]
        return made, indices.new_empty(plan.rows, indices.shape[1]), probabilities, loads, plan

    def combine(self, x: Tensor, group: Any, handle: _Plan, **_: Any) -> Any:
        """`deep_ep`'s combine."""
        del group
        return _Combine.apply(x, handle), None  # type: ignore[no-untyped-call]

    def dispatch_in_order(
        self, x: Tensor, routing_map: Tensor, probs: Tensor, group: Any, num_local_experts: int,
        pad_multiple: int | None = None, fused: bool = False, **_: Any,
    ) -> Any:  # fmt: skip
        """`HybridEPDispatch`: rows in the order of this rank's experts."""
        del routing_map
        plan, loads = self._plan(x, group, num_local_experts * group.size(), True, fused, pad_multiple or 1)
        made = _Dispatch.apply(x, plan)  # type: ignore[no-untyped-call]
        probabilities = _Beside.apply(probs, plan.rows)  # type: ignore[no-untyped-call]
        return made, probabilities[:, 0], None, loads, plan

    def combine_in_order(self, x: Tensor, handle: _Plan, *_: Any, **__: Any) -> Any:
        """`HybridEPCombine`."""
        return _Combine.apply(x, handle)  # type: ignore[no-untyped-call]


def _multihot(original: Any) -> Any:
    def multihot(manager: Any, indices: Tensor, probs: Tensor) -> Any:
        if not isinstance(indices, FakeTensor):
            return original(manager, indices, probs)
        shape = (indices.shape[0], manager.num_local_experts + 1)
        routed = torch.zeros(shape, dtype=torch.bool, device=indices.device).scatter_(1, indices + 1, True)
        weights = torch.zeros(shape, dtype=torch.float, device=indices.device).scatter(1, indices + 1, probs)
        return routed[:, 1:], weights[:, 1:]

    return multihot
