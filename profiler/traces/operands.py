"""What a traced operator computes: an operation as graphs have it, with FLOPs and bytes, that costs can price.

It follows from the shapes that the profiler recorded (`record_shapes=True`). A profile says an operator's inputs,
not its results: those follow from what the operator does. A family is a line in `_FAMILIES`; an operator that is
in none has a name and shapes, but no FLOPs and no bytes. Bytes are what must move, each tensor once; FLOPs are
what is executed, a multiply-add as two.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from echograph.ir.types import Attention, Attributes, Compute, Convolution, DType, Gemm, Phase, Tensor, TensorRole

TORCH_DTYPES = {
    "float": DType.FP32, "double": DType.FP64, "half": DType.FP16, "bfloat16": DType.BF16,
    "c10::half": DType.FP16, "c10::bfloat16": DType.BF16,
    "c10::float8_e4m3fn": DType.FP8_E4M3, "c10::float8_e4m3fnuz": DType.FP8_E4M3,
    "c10::float8_e5m2": DType.FP8_E5M2, "c10::float8_e5m2fnuz": DType.FP8_E5M2,
    "c10::complex<float>": DType.COMPLEX64, "long": DType.INT64, "long int": DType.INT64, "int": DType.INT32,
    "unsigned int": DType.INT32, "short": DType.INT16, "short int": DType.INT16, "byte": DType.UINT8,
    "unsigned char": DType.UINT8, "char": DType.INT8, "signed char": DType.INT8, "bool": DType.BOOL,
}  # fmt: skip
"""Element types by the names that torch gives them in traces, in lower case."""

MOST_ELEMENTS = 2**60
"""Of a tensor, as many bytes as a graph's may have: a trace that says more is wrong."""


@dataclass(frozen=True, slots=True)
class TracedOperand:
    """A tensor that an operator was given.

    Attributes:
        shape: extents.
        dtype: element type.
        strides: in elements; empty where the trace does not say.
    """

    shape: tuple[int, ...]
    dtype: DType
    strides: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of memory behind it: a dimension of stride 0 repeats the same elements."""
        strides = self.strides if len(self.strides) == len(self.shape) else (1,) * len(self.shape)
        return self.dtype.nbytes(prod(n for n, stride in zip(self.shape, strides, strict=True) if stride or not n))

    @property
    def by_columns(self) -> bool:
        """Whether a matrix lies in memory by columns."""
        return len(self.strides) >= 2 and self.strides[-2] == 1 and self.strides[-1] != 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapedCall:
    """An operator with what it was given.

    Attributes:
        name: as the trace has it ("aten::mm").
        phase: part of the step.
        operands: by position: a tensor, or None for what is none. Of lists of tensors the trace does not say the
            types, so they are None too.
        values: by position the text of what is no tensor; empty where the trace does not say.
        generated: file of code that `torch.compile` made, for a kernel of that; "" of all else.
    """

    name: str
    phase: Phase
    operands: tuple[TracedOperand | None, ...]
    values: tuple[str, ...]
    generated: str = ""

    def tensor(self, at: int) -> TracedOperand:
        """The tensor at a position.

        Raises:
            LookupError: there is none.
        """
        found = self.operands[at]
        if found is None:
            raise LookupError(at)
        return found

    @property
    def tensors(self) -> list[TracedOperand]:
        """All tensors."""
        return [one for one in self.operands if one is not None]

    def value(self, at: int) -> Any:
        """What stands at a position that holds no tensor: a number, a truth, a list.

        Raises:
            LookupError: the trace does not say.
        """
        try:
            return ast.literal_eval(self.values[at])
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise LookupError(at) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedWork:
    """What an operator computes.

    Attributes:
        kind: "product", "convolution", "attention", "normalisation", ...: the table that it stands in.
        op: as an operation of a graph.
        inputs: what the operation reads, in the order that costs expect.
        outputs: what it makes.
    """

    kind: str
    op: Compute
    inputs: list[Tensor]
    outputs: list[Tensor]


def operator_call(name: str, phase: Phase, arguments: Mapping[str, Any]) -> ShapedCall:
    """An operator from what the trace says of it; what makes no sense counts as not said.

    Args:
        name: of the operator.
        phase: part of the step.
        arguments: `args` of its event.
    """
    shapes, types, strides, values = (
        found if isinstance(found := arguments.get(key), list) else []
        for key in ("Input Dims", "Input type", "Input Strides", "Concrete Inputs")
    )
    strides = strides if len(strides) == len(shapes) else [[]] * len(shapes)
    generated = arguments.get("kernel_file")
    return ShapedCall(
        name=name,
        phase=phase,
        operands=tuple(map(_operand, shapes, types, strides)),
        values=tuple(map(str, values)),
        generated=generated if isinstance(generated, str) else "",
    )


def _operand(shape: Any, type_name: Any, strides: Any) -> TracedOperand | None:
    dtype = TORCH_DTYPES.get(str(type_name).lower())
    if dtype is None or not isinstance(shape, list):
        return None
    if not all(type(extent) is int and extent >= 0 for extent in shape) or prod(shape) > MOST_ELEMENTS:
        return None
    steps = strides if isinstance(strides, list) and all(type(step) is int for step in strides) else []
    return TracedOperand(tuple(shape), dtype, tuple(steps))


def traced_work(call: ShapedCall) -> TracedWork | None:
    """What an operator computes; None of one that is in no family, or of which the trace says too little."""
    for family in _FAMILIES:
        if family.names.fullmatch(call.name):
            try:
                found = family.work(call)
            except LookupError:
                return None
            return _traced(call, family.kind, found)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """Inputs and results of an operation, its FLOPs, and the bytes that it reads where not all of its inputs."""

    inputs: Sequence[TracedOperand]
    outputs: Sequence[TracedOperand]
    flops: int = 0
    read: int | None = None
    attributes: Attributes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    kind: str
    names: re.Pattern[str]
    work: Callable[[ShapedCall], _Work]


def _traced(call: ShapedCall, kind: str, found: _Work) -> TracedWork:
    inputs, outputs = (
        [
            Tensor(id=at, name="", shape=one.shape, dtype=one.dtype, role=TensorRole.ACTIVATION)
            for at, one in enumerate(side)
        ]
        for side in (found.inputs, found.outputs)
    )
    read = sum(one.nbytes for one in found.inputs) if found.read is None else found.read
    op = Compute(
        id=0,
        name="compiled.fused" if kind == "compiled" else call.name.replace("::", "."),
        phase=call.phase,
        flops=found.flops,
        bytes_read=read,
        bytes_written=sum(one.nbytes for one in found.outputs),
        attributes=found.attributes,
    )
    return TracedWork(kind=kind, op=op, inputs=inputs, outputs=outputs)


def _like(operand: TracedOperand, shape: Sequence[int] | None = None, dtype: DType | None = None) -> TracedOperand:
    return TracedOperand(operand.shape if shape is None else tuple(shape), dtype or operand.dtype)


# -- products ---------------------------------------------------------------------------------------------------


def _product(left: int) -> Callable[[ShapedCall], _Work]:
    """A product of the matrices at two positions, with what stands before them added to it."""

    def work(call: ShapedCall) -> _Work:
        a, b = call.tensor(left), call.tensor(left + 1)
        if len(a.shape) < 2 or len(b.shape) < 2 or a.shape[-1] != b.shape[-2]:
            raise LookupError(call.name)
        shape = (*a.shape[:-1], b.shape[-1])
        # A result of 8 bits is rounded to 16.
        result = _like(a, shape, a.dtype if a.dtype.bits >= 16 else DType.BF16)
        return _Work(
            inputs=[*(t for t in call.operands[:left] if t is not None), a, b],
            outputs=[result],
            flops=2 * prod(shape) * a.shape[-1],
            attributes=Gemm(transpose_a=a.by_columns, transpose_b=b.by_columns),
        )

    return work


# -- convolutions -----------------------------------------------------------------------------------------------


def _convolution(call: ShapedCall) -> _Work:
    image, weight = call.tensor(0), call.tensor(1)
    attributes = _attributes(call, 3, len(weight.shape) - 2)
    result = _like(image, (image.shape[0], *_out_shape(image, weight, attributes, call)))
    flops = _convolution_flops(image, weight, result, attributes)
    return _Work(inputs=[image, weight], outputs=[result], flops=flops, attributes=attributes)


def _convolution_backward(call: ShapedCall) -> _Work:
    gradient, image, weight = (call.tensor(at) for at in range(3))
    attributes = _attributes(call, 4, len(weight.shape) - 2)
    wanted = call.value(10)
    outputs = [_like(one) for one, asked in zip((image, weight), wanted, strict=False) if asked]
    flops = len(outputs) * _convolution_flops(image, weight, gradient, attributes)
    return _Work(inputs=[gradient, image, weight], outputs=outputs, flops=flops, attributes=attributes)


def _attributes(call: ShapedCall, at: int, dimensions: int) -> Convolution:
    """Stride, padding, dilation, transposed, output padding and groups stand side by side."""

    def each(position: int) -> tuple[int, ...]:
        values = call.value(position)
        if not isinstance(values, list) or dimensions < 1 or len(values) not in (1, dimensions):
            raise LookupError(position)
        return tuple(values) * dimensions if len(values) == 1 else tuple(values)

    return Convolution(
        stride=each(at), padding=each(at + 1), dilation=each(at + 2), transposed=bool(call.value(at + 3)),
        groups=int(call.value(at + 5)),
    )  # fmt: skip


def _out_shape(image: TracedOperand, weight: TracedOperand, of: Convolution, call: ShapedCall) -> tuple[int, ...]:
    sizes = zip(image.shape[2:], weight.shape[2:], of.stride, of.padding, of.dilation, strict=True)
    if of.transposed:
        added = call.value(7)
        extents = [(n - 1) * s - 2 * p + d * (k - 1) + 1 for n, k, s, p, d in sizes]
        return (weight.shape[1] * of.groups, *(n + more for n, more in zip(extents, added, strict=True)))
    return (weight.shape[0], *((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes))


def _convolution_flops(image: TracedOperand, weight: TracedOperand, result: TracedOperand, of: Convolution) -> int:
    """Each position of the smaller side meets a whole filter."""
    positions = prod((image if of.transposed else result).shape[2:])
    return 2 * image.shape[0] * positions * prod(weight.shape)


# -- attention --------------------------------------------------------------------------------------------------

_CAUSAL = 0.5
"""Of causal attention kernels leave out what the mask hides: half."""
_BACKWARD_FLOPS = 2.5
"""Five products for the two of the forward pass: the scores are computed again."""


def _attention(first: int, causal: int, heads_first: bool = True) -> Callable[[ShapedCall], _Work]:
    """Attention whose query, key and value begin at a position (behind the gradient: backward)."""

    def work(call: ShapedCall) -> _Work:
        given = [call.tensor(first + at) for at in range(3)]
        if any(len(one.shape) != 4 for one in given):  # sequences of several lengths in one tensor
            raise LookupError(call.name)
        query, key, value = (one if heads_first else _heads_first(one) for one in given)
        batch, heads, queries, width = query.shape
        masked = bool(call.value(causal))
        flops = 2 * batch * heads * queries * key.shape[2] * (width + value.shape[3])
        scale = (_CAUSAL if masked else 1.0) * (_BACKWARD_FLOPS if first else 1.0)
        result = _like(query, (*query.shape[:3], value.shape[3]))
        inputs = [query, key, value]
        # Backward reads the result and its gradient, too.
        extra = [result, result] if first else []
        return _Work(
            inputs=[result, *inputs] if first else inputs,
            outputs=[_like(one) for one in inputs] if first else [result],
            flops=int(flops * scale),
            read=sum(one.nbytes for one in (*inputs, *extra)),
            attributes=Attention(heads=heads, kv_heads=key.shape[1], head_dim=width, causal=masked),
        )

    return work


def _heads_first(one: TracedOperand) -> TracedOperand:
    batch, length, heads, width = one.shape
    return TracedOperand((batch, heads, length, width), one.dtype)


# -- what memory bounds -----------------------------------------------------------------------------------------


def _rows(call: ShapedCall) -> _Work:
    """Norms and softmax: a result like the first input, which is the gradient in a backward pass."""
    return _Work(inputs=call.tensors, outputs=[_like(call.tensor(0))])


def _elementwise(call: ShapedCall) -> _Work:
    """A result of the shape that the inputs stretch to, and of their widest type."""
    tensors = call.tensors
    rank = max((len(one.shape) for one in tensors), default=0)
    if not tensors:
        raise LookupError(call.name)
    padded = [(1,) * (rank - len(one.shape)) + one.shape for one in tensors]
    shape = tuple(next((n for n in extents if n != 1), 1) for extents in zip(*padded, strict=True))
    if any(n not in (1, whole) for one in padded for n, whole in zip(one, shape, strict=True)):
        raise LookupError(call.name)
    dtype = DType.BOOL if _COMPARES.fullmatch(call.name) else _promoted(tensors)
    return _Work(inputs=tensors, outputs=[TracedOperand(shape, dtype)])


def _promoted(tensors: Sequence[TracedOperand]) -> DType:
    """The type of a result: of tensors with dimensions before those without, of fractions before whole numbers."""
    with_dimensions = [one for one in tensors if one.shape] or tensors
    return max((one.dtype for one in with_dimensions), key=lambda dtype: (dtype in _FRACTIONS, dtype.bits))


_FRACTIONS = {DType.FP64, DType.FP32, DType.FP16, DType.BF16, DType.FP8_E4M3, DType.FP8_E5M2, DType.COMPLEX64}
_COMPARES = re.compile(r"aten::(eq|ne|lt|le|gt|ge|logical_\w+|isnan|isinf|isfinite)")


def _in_place(call: ShapedCall) -> _Work:
    """The first tensor is read, changed and written."""
    return _Work(inputs=call.tensors, outputs=[_like(call.tensor(0))])


def _overwritten(call: ShapedCall) -> _Work:
    """The first tensor is written and not read."""
    return _Work(inputs=call.tensors[1:], outputs=[_like(call.tensor(0))])


def _reduction(call: ShapedCall) -> _Work:
    whole = call.tensor(0)
    try:
        dims = call.value(1)
    except LookupError:
        dims = []
    named = {int(d) % len(whole.shape) for d in dims} if isinstance(dims, list) and whole.shape else set()
    kept = [n for at, n in enumerate(whole.shape) if at not in named] if named else []
    return _Work(inputs=[whole], outputs=[_like(whole, kept)])


def _looked_up(call: ShapedCall) -> _Work:
    """A row of a table for each index."""
    table, indices = call.tensor(0), call.tensor(1)
    result = _like(table, (*indices.shape, *table.shape[1:]))
    return _Work(inputs=[table, indices], outputs=[result], read=indices.nbytes + result.nbytes)


def _selected(call: ShapedCall) -> _Work:
    """Some positions of one dimension."""
    table, indices = call.tensor(0), call.tensor(2)
    at = int(call.value(1)) % max(1, len(table.shape))
    result = _like(table, (*table.shape[:at], prod(indices.shape), *table.shape[at + 1 :]))
    return _Work(inputs=[table, indices], outputs=[result], read=indices.nbytes + result.nbytes)


def _table_gradient(call: ShapedCall) -> _Work:
    gradient, indices = call.tensor(0), call.tensor(1)
    return _Work(inputs=[gradient, indices], outputs=[_like(gradient, (int(call.value(2)), gradient.shape[-1]))])


def _dropout(call: ShapedCall) -> _Work:
    given = call.tensor(0)
    return _Work(inputs=[given], outputs=[_like(given), _like(given, dtype=DType.BOOL)])


def _compiled(call: ShapedCall) -> _Work:
    """A kernel of torch.compile: its arguments are what it reads and what it writes."""
    return _Work(inputs=call.tensors, outputs=[])


def _family(kind: str, names: str, work: Callable[[ShapedCall], _Work]) -> _Family:
    return _Family(kind=kind, names=re.compile(names), work=work)


_SDPA = "aten::_scaled_dot_product_"
_NORMS = r"aten::(native_(layer|batch|group)|cudnn_batch|miopen_batch|_fused_rms)_norm(_backward)?"
_FUNCTIONS = (
    "add|sub|rsub|mul|div|neg|abs|exp|log|log2|log1p|sqrt|rsqrt|reciprocal|pow|sin|cos|tanh|sigmoid|erf|relu|silu"
    "|leaky_relu|gelu|elu|hardtanh|hardswish|hardsigmoid|softplus|clamp|clamp_min|clamp_max|maximum|minimum|where"
    r"|lerp|addcmul|addcdiv|threshold|masked_fill|floor|ceil|round|sign|bitwise_\w+|logical_\w+|eq|ne|lt|le|gt|ge"
    "|isnan|isinf|isfinite|remainder|fmod|mse_loss|binary_cross_entropy|smooth_l1_loss"
)
_GRADIENTS = (
    "(threshold|gelu|silu|tanh|sigmoid|elu|leaky_relu|hardtanh|hardswish|hardsigmoid|softplus|mse_loss"
    "|binary_cross_entropy|smooth_l1_loss|native_dropout)_backward|_masked_scale"
)
_REDUCTIONS = "sum|mean|prod|amax|amin|max|min|any|all|var|std|norm|linalg_vector_norm"
# Of the first family that has a name.
_FAMILIES = (
    _family("product", "aten::(mm|bmm|_scaled_mm|_int_mm)", _product(0)),
    _family("product", "aten::(addmm|baddbmm|_addmm_activation)_?", _product(1)),
    _family("convolution", "aten::convolution", _convolution),
    _family("convolution", "aten::convolution_backward", _convolution_backward),
    _family("attention", f"{_SDPA}flash_attention", _attention(0, 4)),
    _family("attention", f"{_SDPA}(efficient|cudnn)_attention", _attention(0, 6)),
    _family("attention", f"{_SDPA}(flash|efficient)_attention_backward", _attention(1, 11)),
    _family("attention", f"{_SDPA}cudnn_attention_backward", _attention(1, 14)),
    _family("attention", "flash_attn::_flash_attn_forward", _attention(0, 5, heads_first=False)),
    _family("attention", "flash_attn::_flash_attn_backward", _attention(1, 11, heads_first=False)),
    _family("normalisation", _NORMS, _rows),
    _family("softmax", r"aten::_(log_)?softmax(_backward_data)?", _rows),
    _family("elementwise", "aten::(native_dropout|_fused_dropout)", _dropout),
    _family("copy", "aten::(copy|fill|zero|normal|uniform|random|bernoulli|exponential)_", _overwritten),
    _family("elementwise", f"aten::({_FUNCTIONS}|{_GRADIENTS})", _elementwise),
    _family("elementwise", "aten::(?!index|scatter|resize|set|_foreach|_fused)[a-z0-9_]+[a-z0-9]_", _in_place),
    _family("reduction", f"aten::({_REDUCTIONS})", _reduction),
    _family("lookup", "aten::embedding", _looked_up),
    _family("lookup", "aten::index_select", _selected),
    _family("lookup", "aten::embedding_dense_backward", _table_gradient),
    _family("compiled", r"triton_(poi|red|per|tem)_fused_.*", _compiled),
)

WHOLE = re.compile(
    r"aten::(convolution|convolution_backward|linear_backward)"
    r"|aten::_scaled_dot_product_(flash|efficient|cudnn)_attention(_backward)?"
    r"|aten::(embedding|native_layer_norm|native_group_norm)(_dense)?(_backward)?|aten::_fused_rms_norm(_backward)?"
)
"""Operators that say all of what they call."""
