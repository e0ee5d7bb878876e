"""What is known of a call node: arguments, what it writes or only renames, FLOPs, bytes, and what costs ask.

Arguments by name, what is written and what is a view follow from the operator's schema.

Floating-point operations are those that `torch.utils.flop_counter` counts: matrix products, convolutions and
attention, a multiply-add as two; everything else is bound by memory and counts zero. The formulas are PyTorch's
own registry; `_grouped_mm`, which it lacks, is added here.

Traffic is the bytes that move between device memory and the device, each tensor once. Most operators read their
arguments and write their results. The exceptions are the ones that look up a few rows of a large table, that read
only the shape of an argument, or that overwrite one.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from echograph.frontend.pytorch.annotate import BACKWARD, FORWARD, NUMBER, PHASE, TF32, VAL, call_nodes
from echograph.ir.types import Attention, Attributes, Convolution, Gemm

_ALLOCATIONS = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
)
_FILLS = frozenset(
    {"zeros", "zeros_like", "ones", "ones_like", "full", "full_like", "fill", "fill_", "scalar_tensor",
     "new_zeros", "new_ones", "new_full", "arange", "zero", "zero_", "lift_fresh_copy"}
)  # fmt: skip
_MULTI_TENSOR = ("_foreach_", "_fused_adam", "_fused_sgd_", "_amp_foreach_")


class _Operator(NamedTuple):
    """What a schema says, read from PyTorch once: each look at it makes new objects there.

    Attributes:
        name: with its namespace ("aten::add_").
        plain_name: without its namespace.
        by_position: names of the arguments that may be given by position.
        defaults: default of each argument, None for one without, in the order of the schema.
        written: names of the arguments that it writes in place.
        is_view: whether all its results alias an argument, and it writes none.
        is_in_place: whether it writes an argument.
    """

    name: str
    plain_name: str
    by_position: tuple[str, ...]
    defaults: dict[str, Any]
    written: tuple[str, ...]
    is_view: bool
    is_in_place: bool
    required: frozenset[str]


def _operator(target: Any) -> _Operator | None:
    # By its number, since operators take long to say their hash.
    known = _OPERATORS.get(id(target))
    if known is None:
        known = _OPERATORS[id(target)] = target, _read(target)
    return known[1]


_OPERATORS: dict[int, tuple[Any, _Operator | None]] = {}


def _read(target: Any) -> _Operator | None:
    schema: torch.FunctionSchema | None = getattr(target, "_schema", None)
    if schema is None:
        return None
    aliases = [result.alias_info for result in schema.returns]
    renames = bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)
    name = str(schema.name)
    return _Operator(
        name=name,
        plain_name=name.partition("::")[2],
        by_position=tuple(a.name for a in schema.arguments if not a.kwarg_only),
        defaults={a.name: a.default_value for a in schema.arguments},
        written=tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write),
        is_view=renames or name.endswith("::_unsafe_view"),
        is_in_place=bool(schema.is_mutable),
        required=frozenset(a.name for a in schema.arguments if not a.has_default_value()),
    )


def _called(node: Node) -> _Operator:
    found = _operator(node.target)
    if found is None:
        raise TypeError(f"node '{node.name}' calls no operator")
    return found


def plain_name(node: Node) -> str:
    """Operator name without namespace and overload ("add_"); "" for `getitem`."""
    found = _operator(node.target)
    return "" if found is None else found.plain_name


def qualified_name(node: Node) -> str:
    """Operator name with its namespace and without its overload ("aten.add_")."""
    return _called(node).name.replace("::", ".")


def arguments(node: Node) -> dict[str, Any]:
    """Arguments of a call node by their names in the schema, defaults filled in."""
    found = _called(node)
    return {**found.defaults, **dict(zip(found.by_position, node.args, strict=False)), **node.kwargs}


def given_arguments(node: Node) -> dict[str, Any]:
    """Arguments of a call node that differ from their defaults, by their names in the schema."""
    found = _called(node)
    given = {**dict(zip(found.by_position, node.args, strict=False)), **node.kwargs}
    return {n: v for n, v in given.items() if n in found.required or not _same(v, found.defaults.get(n))}


def _same(value: Any, default: Any) -> bool:
    return type(value) is type(default) and not isinstance(value, Node) and bool(value == default)


def written_arguments(node: Node) -> tuple[str, ...]:
    """Names of the arguments that the operator writes in place."""
    found = _called(node)
    # The fused optimizers write the gradients only when they also unscale them.
    if found.plain_name.startswith("_fused_") and node.kwargs.get("grad_scale") is None:
        return tuple(name for name in found.written if name != "grads")
    return found.written


def is_view(node: Node) -> bool:
    """Whether a call node only renames memory: all its results alias an argument, and it writes none."""
    found = _operator(node.target)
    return found is not None and found.is_view


def is_in_place(node: Node) -> bool:
    """Whether a call node writes to one of its arguments."""
    found = _operator(node.target)
    return found is not None and found.is_in_place


def is_allocation(node: Node) -> bool:
    """Whether a call node only reserves memory."""
    return plain_name(node) in _ALLOCATIONS


def is_fill(node: Node) -> bool:
    """Whether a call node makes numbers from nothing: it reads no tensor's values."""
    return plain_name(node) in _FILLS


def is_multi_tensor(node: Node) -> bool:
    """Whether one launch of the operator handles lists of tensors, element by element."""
    return plain_name(node).startswith(_MULTI_TENSOR)


def is_getitem(node: Node) -> bool:
    """Whether a call node picks one result of an operator with several."""
    return node.target is operator.getitem


# Operator -> names of its two matrix operands.
_GEMM_OPERANDS = {
    "aten.mm": ("self", "mat2"),
    "aten.bmm": ("self", "mat2"),
    "aten.addmm": ("mat1", "mat2"),
    "aten.baddbmm": ("batch1", "batch2"),
    "aten._grouped_mm": ("self", "mat2"),
    "aten._scaled_mm": ("self", "mat2"),
    "fp8._scaled_mm": ("a", "b"),
    "fp8._scaled_mm_add_": ("a", "b"),
}
_ATTENTION = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention")
_CPU_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
_CONVOLUTION = ("convolution", "convolution_backward")
# What the results' shapes say, and what is the device's affair.
_SHAPES = ("size", "shape", "split_size", "split_sizes", "pin_memory")
_HANDLES = (torch.device, torch.layout, torch.memory_format, torch.Generator)


def attributes_of(node: Node) -> Attributes | None:
    """The attributes of a call node, or None where shapes say all."""
    name = plain_name(node)
    if qualified_name(node) in _GEMM_OPERANDS:
        named = arguments(node)
        a, b = (named[operand].meta[VAL] for operand in _GEMM_OPERANDS[qualified_name(node)])
        return Gemm(
            transpose_a=_is_transposed(a), transpose_b=_is_transposed(b), block=named.get("block", 0),
            tf32=node.meta.get(TF32, False) and a.dtype is torch.float32,
        )  # fmt: skip
    if name.removesuffix("_backward") in (*_ATTENTION, _CPU_ATTENTION):
        return _attention(arguments(node))
    if name in _CONVOLUTION:
        return _convolution(arguments(node), ieee=not node.meta.get(TF32, True))
    return None


def arguments_of(node: Node) -> str:
    """What a forward operator is given beside tensors and shapes, as a JSON object; "" where that is nothing.

    Names are those of the operator's schema. What has its default is left out; a tensor within a list is "%", one
    that is left out null, a type the name of PyTorch.
    """
    if node.meta.get(PHASE) != FORWARD or plain_name(node) in _CONVOLUTION:
        return ""
    numbers = is_fill(node)  # what it is filled with is no operand
    given = {name: _plain(value, numbers) for name, value in given_arguments(node).items() if name not in _SHAPES}
    told = {name: value for name, value in given.items() if value is not _TENSOR}
    return json.dumps(told, separators=(",", ":")) if told else ""


_TENSOR = object()


def _plain(value: Any, numbers: bool = False) -> Any:
    if numbers and isinstance(value, Node) and NUMBER in value.meta:
        return value.meta[NUMBER]
    if isinstance(value, (Node, *_HANDLES)):
        return _TENSOR
    if isinstance(value, tuple | list):
        items = [_plain(item) for item in value]
        if items and all(item is _TENSOR for item in items):
            return _TENSOR
        return ["%" if item is _TENSOR else item for item in items]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value if value is None or isinstance(value, bool | int | float | str) else _TENSOR


def _is_transposed(operand: Tensor) -> bool:
    """Whether a matrix lies in memory by columns (of two equal layouts, by rows)."""
    rows, columns = operand.stride()[-2:]
    return rows == 1 and columns != 1


def _attention(named: dict[str, Any]) -> Attention:
    query, key = named["query"].meta[VAL], named["key"].meta[VAL]
    return Attention(
        heads=query.shape[1],
        kv_heads=key.shape[1],
        head_dim=query.shape[3],
        causal=bool(named["is_causal"]),
        dropout=float(named["dropout_p"]),
    )


def _convolution(named: dict[str, Any], ieee: bool) -> Convolution:
    weight = named["weight"].meta[VAL]
    dimensions = weight.dim() - 2

    def each(values: list[int]) -> tuple[int, ...]:
        return tuple(values) * dimensions if len(values) == 1 else tuple(values)

    return Convolution(
        stride=each(named["stride"]),
        padding=each(named["padding"]),
        dilation=each(named["dilation"]),
        groups=int(named["groups"]),
        transposed=bool(named["transposed"]),
        ieee=ieee and weight.dtype is torch.float32,
    )


Formula = Callable[..., int]


def grouped_mm_flops(
    a: Sequence[int], b: Sequence[int], offsets: Sequence[int] | None = None, *_: Any, **__: Any
) -> int:
    """FLOPs of `aten._grouped_mm`: every row of the ragged operand meets one expert's matrix.

    Args:
        a: shape [m, k] (rows grouped by `offsets`) or [experts, m, k].
        b: shape [experts, k, n]; or [k, n], where `offsets` groups the contraction or the columns.
        offsets: shape of the ends of the groups; None when both operands have an expert dimension.
    """
    experts = a[0] if len(a) == len(b) == 3 else 1
    return 2 * experts * a[-2] * a[-1] * b[-1]


def _of_few_bits(rows: Callable[[tuple[Any, ...]], int]) -> Formula:
    """FLOPs of a product with a weight of as many rows as a function of the arguments says."""
    return lambda *args, **_: 2 * int(args[0].numel()) * int(rows(args))


# Products of bitsandbytes, whose weights have 4 or 8 bits. They are known by name, as it may not be installed.
_BITSANDBYTES: Mapping[str, Formula] = {
    "bitsandbytes::gemm_4bit": _of_few_bits(lambda args: args[2][0]),
    "bitsandbytes::gemv_4bit": _of_few_bits(lambda args: args[2][0]),
    "bitsandbytes::int8_linear_matmul": _of_few_bits(lambda args: args[1].shape[0]),
    "bitsandbytes::int8_scaled_mm": _of_few_bits(lambda args: args[1].shape[0]),
    "bitsandbytes::int8_mixed_scaled_mm": _of_few_bits(lambda args: args[2].shape[0]),
}


def _by_groups(whole: Formula) -> Formula:
    """FLOPs of a convolution's gradients, of which PyTorch's formula counts the weight's for each of its groups.

    A channel of a group meets the channels of that group alone, as in the forward pass and the input's gradient.
    """

    def flops(*args: Any, **named: Any) -> int:
        groups, of = args[9:11]
        of_input = int(whole(*args[:10], [of[0], False, False], **named))
        return of_input + int(whole(*args[:10], [False, of[1], False], **named)) // int(groups)

    return flops


@cache
def formulas() -> Mapping[Any, Formula]:
    """Operator packet -> formula that takes the operator's arguments and `out_val`."""
    from torch.utils.flop_counter import flop_registry, shape_wrapper

    wrapped: Formula = shape_wrapper(grouped_mm_flops)  # type: ignore[no-untyped-call]
    both = torch.ops.aten.convolution_backward
    return {**flop_registry, torch.ops.aten._grouped_mm: wrapped, both: _by_groups(flop_registry[both])}


def node_flops(node: Node) -> int:
    """FLOPs of one call node of an annotated graph."""
    packet = getattr(node.target, "overloadpacket", None)
    formula = formulas().get(packet) or _BITSANDBYTES.get(getattr(packet, "_qualified_op_name", ""))
    if formula is None:
        return 0
    args: Any
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta[VAL])
    if args and isinstance(args[-1], torch.dtype):
        args = args[:-1]  # the result's, of which not every formula knows
    return int(formula(*args, **kwargs, out_val=node.meta[VAL]))


def graph_flops(graph: Graph) -> int:
    """FLOPs of all operations of an annotated graph."""
    return sum(node_flops(node) for node in call_nodes(graph))


# Arguments of which an operator reads as many bytes as it writes results: a row for each index.
_LOOKED_UP = {
    "embedding": "weight",
    "index": "self",
    "_unsafe_index": "self",
    "index_select": "self",
    "gather": "self",
    "take": "self",
    "nll_loss_forward": "self",
    "nll_loss2d_forward": "self",
}
# Operators that write a part of what they give: the argument that says how much, and whether they always add.
_WRITTEN_IN_PART = {
    "index_put_": ("values", False),
    "_index_put_impl_": ("values", False),
    "scatter_": ("src", False),
    "scatter_add_": ("src", True),
    "index_add_": ("source", True),
    "index_copy_": ("source", False),
    "all_gather_copy_in": ("all_gather_inputs", False),  # FSDP's, of a rank's part of what is gathered
}
# Arguments of which an operator needs no value: they give a shape, or are overwritten.
_NOT_READ = {
    "nll_loss_backward": ("self",),
    "nll_loss2d_backward": ("self",),
    "copy_": ("self",),
    "_foreach_copy_": ("self",),
    "native_layer_norm_backward": ("bias",),
    "bernoulli_": ("self",),
    "normal_": ("self",),
    "uniform_": ("self",),
    "all_gather_copy_in": ("all_gather_output",),
}


# Of those, what autograd keeps until then all the same, since the formula of a gradient names it.
_KEPT = {"nll_loss_backward": "self", "nll_loss2d_backward": "self"}


def tensor_bytes(value: Tensor) -> int:
    """Bytes of memory behind a tensor's elements; an expanded dimension (stride 0) repeats the same ones."""
    count = 1
    for size, stride in zip(value.shape, value.stride(), strict=True):
        if stride != 0 or size == 0:
            count *= size
    return count * value.element_size()


def read_arguments(node: Node) -> dict[str, Any]:
    """Arguments whose values the operator reads, by name."""
    if is_fill(node):
        return {}
    skipped = _NOT_READ.get(plain_name(node), ())
    if "out" in written_arguments(node):
        skipped = (*skipped, "out")  # where the result goes: `torch.mm(a, b, out=c)`
    return {name: value for name, value in arguments(node).items() if name not in skipped}


def kept_argument(node: Node) -> Node | None:
    """What lives until an operator though nothing reads its values then or later; None: nothing does.

    Under autocast this is the loss's copy in fp32 of log-probabilities in 16 bits.
    """
    kept = arguments(node).get(_KEPT.get(plain_name(node), ""))
    if not isinstance(kept, Node):
        return None
    later = any(user is not node and user.meta.get(PHASE) == BACKWARD for user in kept.users)
    return None if later else kept


def bytes_moved(node: Node) -> tuple[int, int]:
    """(bytes read, bytes written) by a call node that handles its arguments as a whole."""
    if is_view(node):
        return 0, 0
    if plain_name(node) in _WRITTEN_IN_PART:
        return _partial_write(node)
    named = arguments(node)
    written = _total([named[name] for name in written_arguments(node)]) or _total(node.meta[VAL])
    read = read_arguments(node)
    looked_up = read.pop(_LOOKED_UP.get(plain_name(node), ""), None)
    return _total(list(read.values())) + min(written, _total(looked_up)), written


def _partial_write(node: Node) -> tuple[int, int]:
    amount, adds = _WRITTEN_IN_PART[plain_name(node)]
    named = read_arguments(node)
    written = _total(named.get(amount))
    others = _total([value for name, value in named.items() if name != "self"])
    return others + (written if adds or named.get("accumulate") else 0), written


def _total(value: Any) -> int:
    return sum(tensor_bytes(t) for t in distinct_tensors(value))


def distinct_tensors(value: Any) -> Iterator[Tensor]:
    """The fake tensors in a value; each node stands for its own, once."""
    seen: set[Node] = set()
    for item in _flat(value):
        if isinstance(item, Node):
            if item in seen:
                continue
            seen.add(item)
            item = item.meta[VAL]
        if isinstance(item, Tensor):
            yield item


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for item in value:
            yield from _flat(item)
    else:
        yield value
