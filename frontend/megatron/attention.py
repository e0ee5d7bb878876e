"""Attention of Transformer Engine 2, made of PyTorch's operators: `DotProductAttention`.

Which kernel runs is what its environment variables say, which Megatron sets by `--attention-backend`: one kernel
("flash", and cuDNN's, for which the same operator stands), or a product, a softmax and a product (unfused).

Over ranks of context parallelism, sequences are divided in the ways of `--cp-comm-type`: by heads (a2a), by
passing keys and values around (p2p), by gathering them (all_gather), or by heads within groups and around between
them (a2a+p2p). As Transformer Engine has it, each rank has two parts of a causal sequence, of which it attends to
as much as every other rank does.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from echograph.errors import CaptureError
from echograph.frontend.megatron import packing
from echograph.frontend.megatron.apex import masked_softmax
from echograph.frontend.megatron.kernels import within
from echograph.frontend.pytorch import known_values
from echograph.ir.passes.fuse import COMPILED

_ATEN = torch.ops.aten
_FOR = "Transformer Engine is not installed, and what stands in for it"
_CAUSAL, _FULL = ("causal", "padding_causal", "causal_bottom_right"), ("no_mask", "padding")
_MASKED = ("padding", "padding_causal", "arbitrary")
PACKS = (
    "padded attention is taken to run by cuDNN: FlashAttention, which runs where that cannot, packs sequences: "
    "--attention-backend flash captures it so"
)
"""Said of a capture that two libraries would run, each in its way."""


def refused(what: str, remedy: str) -> CaptureError:
    """What the stand-ins do not do."""
    return CaptureError(f"{what}: {_FOR} has none: {remedy}")


def is_one_kernel() -> bool:
    """Whether attention is one kernel, as the variables of Transformer Engine say.

    Raises:
        CaptureError: they leave none.
    """
    fused, unfused = (
        any(os.environ.get(name, "1") == "1" for name in names)
        for names in (("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN"), ("NVTE_UNFUSED_ATTN",))
    )
    if not fused and not unfused:
        raise CaptureError(
            "NVTE_FLASH_ATTN, NVTE_FUSED_ATTN and NVTE_UNFUSED_ATTN are all 0: no attention of Transformer Engine "
            "is left: give --attention-backend flash, fused or unfused"
        )
    return fused


def is_flash_alone() -> bool:
    """Whether FlashAttention is the one kernel, since the variables rule out cuDNN's."""
    return os.environ.get("NVTE_FLASH_ATTN", "1") == "1" and os.environ.get("NVTE_FUSED_ATTN", "1") == "0"


class DotProductAttention(nn.Module):
    """`transformer_engine.pytorch.DotProductAttention`.

    Args:
        attention_dropout: probability.
        cp_group: ranks over which sequences are divided; of a2a+p2p two, inner and outer.
        softmax_scale: of scores; None: one over the square root of channels.
        window_size: refused, as are softmaxes other than "vanilla" and the largest logit.
        softmax_type: see there.
        return_max_logit: see there.
        cp_comm_type: how they are.
        attention_type: "self" or "cross".
        attn_mask_type: "padding" or "padding_causal" of what FlashAttention packs.
        sequence_parallel: whether ranks of tensor parallelism share the sequence as well.
        get_rng_state_tracker: of what draws otherwise on each of these ranks, or None.
    """

    def __init__(
        self, *, attention_dropout: float, cp_group: Any = None, softmax_scale: float | None = None,
        window_size: Any = None, softmax_type: str = "vanilla", return_max_logit: bool = False,
        cp_comm_type: str = "p2p", attention_type: str = "self", attn_mask_type: str = "causal",
        sequence_parallel: bool = False, get_rng_state_tracker: Any = None, **_: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        if window_size is not None or softmax_type != "vanilla" or return_max_logit:
            raise refused("attention in windows, with other softmaxes or with its largest logit", "leave it out")
        if cp_group is not None and cp_comm_type not in ("a2a", "p2p", "all_gather", "a2a+p2p"):
            raise refused(f"--cp-comm-type {cp_comm_type}", "give a2a, p2p, all_gather or a2a+p2p")
        self._dropout, self._scale = attention_dropout, softmax_scale
        self._of_itself = attention_type == "self"
        self._one_kernel, self._flash = is_one_kernel(), is_flash_alone()
        by_heads = cp_group if cp_comm_type == "a2a" else cp_group[0] if cp_comm_type == "a2a+p2p" else None
        around = cp_group if cp_comm_type == "p2p" else cp_group[1] if cp_comm_type == "a2a+p2p" else None
        gathered = cp_group if cp_comm_type == "all_gather" else None
        self._by_heads, self._around, self._gathered = (
            None if cp_group is None else group for group in (by_heads, around, gathered)
        )
        self.attends = attention_type, attn_mask_type
        self.forks = get_rng_state_tracker is not None and not sequence_parallel
        """Whether each call swaps the device's random state, which the host copies, and back."""
        self.ranks_around = 1 if self._around is None else self._around.size()
        self.packs = self._flash and attn_mask_type.startswith("padding") and cp_group is None
        if self.packs:
            self.without_padding = DotProductAttention(
                attention_dropout=attention_dropout, softmax_scale=softmax_scale,
                sequence_parallel=sequence_parallel, get_rng_state_tracker=get_rng_state_tracker,
            )  # fmt: skip
        if cp_group is not None and not self._one_kernel:
            raise refused("context parallelism with --attention-backend unfused", "give --attention-backend flash")

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, *, attn_mask_type: str,
        core_attention_bias: Tensor | None = None, qkv_format: str = "sbhd", **_: Any,
    ) -> Tensor:  # fmt: skip
        """Attends.

        Args:
            query: [sequence, batch, heads, channels].
            key: the same, with as many heads or fewer.
            value: the same as the key, with channels of its own.
            mask: true where nothing is attended to; of a kernel that packs sequences, how long each is: not used.
            attn_mask_type: "causal", "no_mask", "padding", "padding_causal" or "arbitrary".
            core_attention_bias: refused.
            qkv_format: "sbhd"; others are of packed sequences.

        Returns:
            [sequence, batch, heads x channels].
        """
        known = (*_CAUSAL, *_FULL) if self._one_kernel else (*_CAUSAL, *_FULL, "arbitrary")
        if qkv_format != "sbhd" or core_attention_bias is not None or attn_mask_type not in known:
            raise refused(f"attention with mask '{attn_mask_type}', a bias or packed sequences", "leave it out")
        causal = attn_mask_type in _CAUSAL
        if not (_in_one(query, key, value) or _in_one(key, value) or _apart(query, key, value)):
            # What it knows no layout of is copied, and what they were parts of need not be kept.
            query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        if attn_mask_type.startswith("padding"):
            lengths(mask)
        if self.packs and attn_mask_type.startswith("padding"):
            return self._of_packed(query, key, value, causal)
        if not self._one_kernel:
            padded = attn_mask_type.startswith("padding")
            return self._unfused(query, key, value, mask if attn_mask_type in _MASKED else None, causal, padded)
        if self._by_heads is not None:
            query, key, value = (heads_divided(tensor, self._by_heads) for tensor in (query, key, value))
        if self._gathered is not None:
            key, value = (_gathered(tensor, self._gathered) for tensor in (key, value))
        if self._flash and self._around is None:
            out = self._of_flash(query, key, value, causal)
        else:
            out = self._kernel(query, key, value, causal)
        if self._by_heads is not None:
            out = sequence_divided(out, self._by_heads)
        return out.reshape(*out.shape[:2], -1)

    def _kernel(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        """[sequence, batch, heads, channels]."""
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        dropout = self._dropout if self.training else 0.0
        if self._around is not None:
            scale = query.shape[-1] ** -0.5 if self._scale is None else self._scale
            of = _Around(group=self._around, causal=causal, dropout=dropout, scale=scale)
            ring: Tensor = _Ring.apply(query, key, value, of)  # type: ignore[no-untyped-call]
            return ring.permute(2, 0, 1, 3)
        if query.shape[2] != key.shape[2]:  # a rank's parts against gathered ones: some of it is masked
            causal = False
        return functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=causal, scale=self._scale,
            enable_gqa=query.shape[1] != key.shape[1],
        ).permute(2, 0, 1, 3)  # fmt: skip

    def _of_flash(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        """[sequence, batch, heads, channels], by FlashAttention, which takes batches first."""
        query, key, value = (tensor.transpose(0, 1).contiguous() for tensor in (query, key, value))
        out = self._kernel(query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), causal)
        return out.contiguous()

    def _of_packed(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        """[sequence, batch, heads x channels], by FlashAttention: without what is padded, which then is zero."""
        tensors = [tensor.transpose(0, 1).contiguous() for tensor in (query, key, value)]
        batch, length = tensors[0].shape[:2]
        tokens = [tensor.flatten(0, 1) for tensor in tensors]
        index = packing.indices(batch, length, query.device)
        if self._of_itself:
            tokens = list(packing.packed(index, *tokens))
        else:
            of_keys = packing.indices(batch, len(key), key.device)
            tokens = [*packing.packed(index, tokens[0]), *packing.packed(of_keys, *tokens[1:])]
        given = (tensor.view(batch, -1, *tensor.shape[1:]).transpose(0, 1) for tensor in tokens)
        out: Tensor = self.without_padding(*given, attn_mask_type="causal" if causal else "no_mask")
        heads = out.transpose(0, 1).reshape(batch * length, query.shape[2], -1)
        back = packing.unpacked(index, batch * length, heads)
        return back.view(batch, length, -1).transpose(0, 1).contiguous()

    def _unfused(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, causal: bool, padded: bool) -> Tensor:
        """A product, a softmax with scale and mask in one kernel, a dropout, a product."""
        length, batch, heads, channels = query.shape
        mask = _whole_mask(length, len(key), mask, causal, padded, query.device)
        if key.shape[2] != heads:
            key, value = (t.repeat_interleave(heads // t.shape[2], dim=2) for t in (key, value))
        query, key, value = (t.reshape(t.shape[0], batch * heads, -1).transpose(0, 1) for t in (query, key, value))
        scale = channels**-0.5 if self._scale is None else self._scale
        into = query.new_empty(batch * heads, length, key.shape[1])
        scores = torch.baddbmm(into, query, key.transpose(1, 2), beta=0.0, alpha=scale)
        parts = masked_softmax(scores.view(batch, heads, length, -1), mask, False, 1.0)
        if padded:  # the kernel leaves something in rows of which all is masked
            parts = parts.masked_fill(mask, 0)
        parts = functional.dropout(parts, self._dropout, self.training)
        out = torch.bmm(parts.view(batch * heads, length, -1), value)
        out = out.view(batch, heads, length, -1).permute(2, 0, 1, 3).contiguous()
        return out.view(length, batch, -1)


def _whole_mask(queries: int, keys: int, mask: Any, causal: bool, padded: bool, device: torch.device) -> Tensor:
    """Which scores are masked, made anew by each call in several kernels, of a window too where there is none.

    As get_full_mask of utils.py: windows are aligned by the first tokens of causal masks, by the last of others.

    Args:
        queries: tokens of each sequence.
        keys: the same of what they attend to.
        mask: [batch, 1, 1, keys] of padding, or two, of queries and of keys; [batch, 1, queries, keys]; None.
        causal: whether keys behind a query are masked.
        padded: whether the mask is of padding.
        device: of the result.

    Returns:
        [1 or batch, 1, queries, keys].
    """
    if padded:
        of_queries, of_keys = mask if isinstance(mask, tuple) else (mask, mask)
        mask = torch.logical_or(of_queries.squeeze(1).unsqueeze(3), of_keys)
        kept = mask.logical_not()
        rows, columns = kept[:, 0, :, 0].sum(dim=1), kept[:, 0, 0, :].sum(dim=1)
    places = [torch.arange(count, dtype=torch.int32, device=device) for count in (queries, keys)]
    known_values.forget(places)  # nobody asks which scores are masked, and there are many of them
    apart = places[0].view(1, 1, queries, 1) - places[1].view(1, 1, 1, keys)
    if causal:
        first, last = apart - keys, apart + 0
    elif padded:
        whole = apart.expand(len(mask), 1, queries, keys)
        first = whole + (columns - rows - keys).view(-1, 1, 1, 1)
        last = whole + (columns - rows + queries).view(-1, 1, 1, 1)
    else:
        first, last = apart + keys - queries - keys, apart + keys - queries + queries
    outside = torch.logical_not((first <= 0) & ~(last < 0))
    return outside if mask is None else torch.logical_or(outside, mask)


def lengths(mask: Any) -> None:
    """Where sequences begin, as each call finds out anew from what is masked (utils.py: get_cu_seqlens).

    Once for queries and once for keys, of one mask as well (dot_product_attention.py: forward).

    Args:
        mask: [batch, 1, 1, sequence], true where nothing is attended to; two of queries and of keys, or none.
    """
    for one in mask if isinstance(mask, tuple) else (mask, mask):
        if isinstance(one, Tensor) and one.dim() == 4 and one.shape[1:3] == (1, 1):
            ends = one.squeeze(1).squeeze(1).logical_not().sum(dim=1).cumsum(dim=0).to(torch.int32)
            torch.cat((torch.zeros(1, dtype=torch.int32, device=ends.device), ends))


def _in_one(*tensors: Tensor) -> bool:
    """Whether they lie in one memory, beside each other by heads or by channels, as products of three are.

    This and `_apart` are what get_qkv_layout knows (transformer_engine, pytorch/attention/dot_product_attention/
    utils.py): "h3d" and "3hd" of all three, "h2d" and "2hd" of keys and values.
    """
    first = tensors[0]
    same = all(
        (t.untyped_storage()._cdata, t.shape, t.stride())
        == (first.untyped_storage()._cdata, first.shape, first.stride())
        for t in tensors
    )
    heads, channels = first.shape[-2:]
    offsets = [t.storage_offset() for t in tensors]
    beside = ([i * step for i in range(len(tensors))] for step in (channels, heads * channels))
    return same and any(offsets == expected for expected in beside)


def _apart(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether each begins its own memory, and keys lie as values do."""
    alike = [[step / t.shape[-1] for step in t.stride()[:-1]] for t in (key, value)]
    begin = all(t.storage_offset() == 0 for t in (query, key, value))
    return begin and key.shape[:-1] == value.shape[:-1] and alike[0] == alike[1]


def heads_divided(tensor: Tensor, group: Any) -> Tensor:
    """[sequence / n, batch, heads, channels] of each -> [sequence, batch, heads / n, channels]: all to all."""
    from megatron.core.tensor_parallel import mappings

    ranks = group.size()
    length, batch, heads, channels = tensor.shape
    parts = tensor.reshape(length, batch, ranks, heads // ranks, channels).permute(2, 0, 1, 3, 4)
    got: Tensor = mappings.all_to_all(group, parts.contiguous())
    return got.reshape(ranks * length, batch, heads // ranks, channels)


def sequence_divided(tensor: Tensor, group: Any) -> Tensor:
    """The other way around."""
    from megatron.core.tensor_parallel import mappings

    ranks = group.size()
    length, batch, heads, channels = tensor.shape
    parts = tensor.reshape(ranks, length // ranks, batch, heads, channels)
    got: Tensor = mappings.all_to_all(group, parts.contiguous())
    return got.permute(1, 2, 0, 3, 4).reshape(length // ranks, batch, ranks * heads, channels)


def _gathered(tensor: Tensor, group: Any) -> Tensor:
    """[sequence / n, ...] of each -> [sequence, ...]; its gradient is added up and divided."""
    from megatron.core.tensor_parallel import mappings

    got: Tensor = mappings.gather_from_sequence_parallel_region(tensor, group=group)
    return got


# -- keys and values passed around ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Around:
    """How a ring attends: its ranks, and what attention takes."""

    group: Any
    causal: bool
    dropout: float
    scale: float

    def part(self, step: int) -> tuple[slice, slice, bool]:
        """Which queries attend to which of the keys that a rank has in a step, of two halves of each.

        A rank's sequence is two parts of the whole one: the n-th from its beginning and the n-th from its end. Of
        its own, all attend; what comes from ranks before it are, of two parts, one before both of its own; of
        those behind it, both are before its second.
        """
        rank = self.group.rank()
        whole, first, second = slice(0, 2), slice(0, 1), slice(1, 2)
        if step == 0 or not self.causal:
            return whole, whole, self.causal
        return (whole, first, False) if step <= rank else (second, whole, False)


class _Ring(torch.autograd.Function):
    """Attention in steps: in each, keys and values of another rank, which go on to the next meanwhile.

    Partial results are combined by their sums of exponentials. Backward, keys and values go around again, and the
    sums of their gradients with them, one step behind.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, of: _Around) -> Tensor:
        ranks = of.group.size()
        held = torch.cat((key.reshape(-1), value.reshape(-1)))
        parts: list[tuple[Tensor, Tensor]] = []
        sums: Any = None
        for step in range(ranks):
            coming, waits = _pass_on(held, of.group) if step < ranks - 1 else (held, [])
            queries, keys, causal = of.part(step)
            keyed, valued = _of_held(held, key, value)
            out, lse = _attend(_half(query, queries), _half(keyed, keys), _half(valued, keys), of, causal)
            parts.append((out, lse))
            sums = lse.clone() if sums is None else _combine(sums, lse, queries)
            for wait in waits:
                wait.wait()
            held = coming
        result = query.new_empty(0)
        for step, (out, lse) in enumerate(parts):
            queries = of.part(step)[0]
            with within(COMPILED):
                part = _weighted(out, lse, _half(sums, queries))
                if step:
                    _half(result, queries).add_(part)
                else:  # in the first, all of a rank's queries attend
                    result = part.contiguous()
        ctx.save_for_backward(query, key[:0], value[:0], held, result, sums)
        ctx.of, ctx.shapes = of, (key.shape, value.shape)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, _, _, held, result, sums = ctx.saved_tensors
        of, (key_shape, value_shape) = ctx.of, ctx.shapes
        ranks = of.group.size()
        gradient = gradient.contiguous()
        of_query, summed = torch.zeros_like(query), torch.zeros_like(held)
        sent: list[Any] = []
        for step in reversed(range(ranks)):
            # Those of the rank before, while the own are attended to; what it has summed up follows a step behind.
            coming, waits = _pass_on(held, of.group, back=True) if step else (held, [])
            queries, keys, causal = of.part(step)
            keyed, valued = _of_held(held, key_shape, value_shape)
            made = _attend_back(
                _half(gradient, queries), _half(query, queries), _half(keyed, keys), _half(valued, keys),
                _half(result, queries), _half(sums, queries), of, causal,
            )  # fmt: skip
            _half(of_query, queries).add_(made[0])
            for wait in sent:
                wait.wait()
            for kept, added in zip(_of_held(summed, key_shape, value_shape), made[1:], strict=True):
                _half(kept, keys).add_(added)
            if step:
                summed, sent = _pass_on(summed, of.group, back=True)
            for wait in waits:
                wait.wait()
            held = coming
        of_key, of_value = _of_held(summed, key_shape, value_shape)
        return of_query, of_key, of_value, None


def _half(tensor: Tensor, which: slice) -> Tensor:
    """Halves of [batch, heads, sequence, ...] along the sequence."""
    if which == slice(0, 2):
        return tensor
    half = tensor.shape[2] // 2
    return tensor[:, :, which.start * half : which.stop * half]


def _of_held(held: Tensor, key: Any, value: Any) -> tuple[Tensor, Tensor]:
    """Keys and values of what is passed around, in the shapes given, or those of the tensors given."""
    shapes = [t.shape if isinstance(t, Tensor) else t for t in (key, value)]
    split = torch.Size(shapes[0]).numel()
    return held[:split].view(shapes[0]), held[split:].view(shapes[1])


def _pass_on(held: Tensor, group: Any, back: bool = False) -> tuple[Tensor, list[Any]]:
    """Sends to the next rank and receives from the one before; back: the other way around."""
    ranks, rank = dist.get_process_group_ranks(group), group.rank()
    after, before = ranks[(rank + 1) % len(ranks)], ranks[rank - 1]
    if back:
        after, before = before, after
    coming = torch.empty_like(held)
    send, receive = dist.P2POp(dist.isend, held, after, group), dist.P2POp(dist.irecv, coming, before, group)
    return coming, dist.batch_isend_irecv([send, receive])


def _combine(sums: Tensor, lse: Tensor, queries: slice) -> Tensor:
    """Sums of exponentials, of which a step adds to some."""
    part = _half(sums, queries)
    with within(COMPILED):
        part.copy_(torch.logaddexp(part, lse))
    return sums


def _weighted(out: Tensor, lse: Tensor, sums: Tensor) -> Tensor:
    return (out * (lse - sums).exp().unsqueeze(-1)).to(out.dtype)


def _attend(query: Tensor, key: Tensor, value: Tensor, of: _Around, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention's output and its sums of exponentials."""
    if isinstance(query, FakeTensor):
        made = _ATEN._scaled_dot_product_flash_attention(query, key, value, of.dropout, causal, scale=of.scale)
    else:
        flash = _ATEN._scaled_dot_product_flash_attention_for_cpu
        made = flash(query, *_as_many(query, key, value), of.dropout, causal, scale=of.scale)
    return made[0], made[1]


def _attend_back(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    of: _Around,
    causal: bool,
) -> Sequence[Tensor]:
    """Gradients of queries, keys and values."""
    if isinstance(query, FakeTensor):
        nothing = torch.empty(0, dtype=torch.int64)
        made: Sequence[Tensor] = _ATEN._scaled_dot_product_flash_attention_backward(
            gradient, query, key, value, out, lse, nothing, nothing, query.shape[2], key.shape[2], of.dropout,
            causal, nothing, nothing, scale=of.scale,
        )  # fmt: skip
        return made
    back = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward
    several = _as_many(query, key, value)
    of_query, *others = back(gradient, query, *several, out, lse, of.dropout, causal, scale=of.scale)
    heads = key.shape[1]
    return of_query, *(t.unflatten(1, (heads, -1)).sum(2) for t in others)


def _as_many(query: Tensor, *tensors: Tensor) -> Sequence[Tensor]:
    """Keys and values repeated for as many heads as queries have."""
    return [tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1) for tensor in tensors]
