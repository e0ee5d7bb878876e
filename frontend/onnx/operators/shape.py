"""Operators that move, cut, join, repeat and make tensors, look elements up, and the ones that speak of shapes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from echograph.errors import CaptureError
from echograph.frontend.onnx.call import NodeCall, Operator, extents
from echograph.frontend.onnx.model import MAX_KNOWN


def _type(call: NodeCall, default: torch.dtype) -> torch.dtype:
    number = call.integer("dtype")
    return call.dtypes.of(number, call.node.name) if number else default


def _normal(call: NodeCall, made: Tensor) -> Any:
    return made.normal_(call.real("mean", 0.0), call.real("scale", 1.0))


def _uniform(call: NodeCall, made: Tensor) -> Any:
    return made.uniform_(call.real("low", 0.0), call.real("high", 1.0))


def _shaped(fill: Any, call: NodeCall) -> Any:
    return fill(call, torch.empty(call.ints("shape"), dtype=_type(call, call.dtypes.to_step(torch.float32))))


def _like(fill: Any, call: NodeCall) -> Any:
    return fill(call, torch.empty(call[0].shape, dtype=_type(call, call[0].dtype)))


def _bernoulli(call: NodeCall) -> Any:
    return torch.bernoulli(call[0]).to(_type(call, call[0].dtype))


def _multinomial(call: NodeCall) -> Any:
    if call[0].dim() != 2:
        raise CaptureError("its input is no matrix of scores")
    drawn = torch.multinomial(torch.exp(call[0]), call.integer("sample_size", 1), True)
    return drawn.to(_type(call, torch.int32))


def _shape(call: NodeCall) -> Any:
    whole = extents(call[0])
    start, end = call.integer("start"), call.integer("end", len(whole))
    return torch.tensor(whole[start:end], dtype=torch.int64)


def _size(call: NodeCall) -> Any:
    return torch.tensor(prod(extents(call[0])), dtype=torch.int64)


def _constant(call: NodeCall) -> Any:
    for name, dtype in (("value_float", torch.float32), ("value_floats", torch.float32),
                        ("value_int", torch.int64), ("value_ints", torch.int64)):  # fmt: skip
        if name in call.node.attributes:
            return torch.tensor(call.node.attributes[name], dtype=call.dtypes.to_step(dtype))
    value = call.node.attributes.get("value")
    if value is None:
        raise CaptureError("its value is no dense tensor of numbers")
    made = torch.tensor(value)
    return made.to(call.dtypes.to_step(made.dtype))


def _constant_of_shape(call: NodeCall) -> Any:
    fill = call.node.attributes.get("value")
    value = torch.tensor(0.0 if fill is None else fill.reshape(-1)[0])
    return torch.full(call.ints("shape", 0), value.item(), dtype=call.dtypes.to_step(value.dtype))


def _range(call: NodeCall) -> Any:
    numbers = []
    for position in range(3):
        known = call.constant(position)
        if known is None:
            raise CaptureError("it lacks its start, limit or delta")
        numbers.append(known.item())
    return torch.arange(*numbers, dtype=call[0].dtype)


def _reshape(call: NodeCall) -> Any:
    x, wanted = call[0], call.ints("shape", 1)
    if not call.integer("allowzero"):
        wanted = [x.shape[i] if extent == 0 and i < x.dim() else extent for i, extent in enumerate(wanted)]
    return x.reshape(wanted)


def _flatten(call: NodeCall) -> Any:
    x = call[0]
    axis = call.integer("axis", 1)
    axis = axis + x.dim() if axis < 0 else axis
    return x.reshape([prod(extents(x)[:axis]), prod(extents(x)[axis:])])


def _squeeze(call: NodeCall) -> Any:
    axes = call.optional_ints("axes", 1)
    return call[0].squeeze() if axes is None else call[0].squeeze(axes)


def _unsqueeze(call: NodeCall) -> Any:
    x = call[0]
    axes = call.ints("axes", 1)
    rank = x.dim() + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        x = x.unsqueeze(axis)
    return x


def _transpose(call: NodeCall) -> Any:
    x = call[0]
    order = call.ints("perm", default=range(x.dim() - 1, -1, -1))
    if order == list(range(x.dim())):
        return x
    moved = [i for i, source in enumerate(order) if i != source]
    # The exchange of two dimensions is what a matrix product recognises as a layout.
    return x.transpose(*moved) if len(moved) == 2 else x.permute(order)


def _concat(call: NodeCall) -> Any:
    return torch.cat([call[i] for i in range(len(call.operands))], call.axis(0, call[0].dim()))


def _split(call: NodeCall) -> Any:
    x = call[0]
    axis = call.axis(0, x.dim())
    sizes = call.optional_ints("split", 1)
    if sizes is None:
        parts, extent = len(call.node.outputs), int(x.shape[axis])
        size = -(-extent // parts)
        sizes = [size] * (parts - 1) + [extent - size * (parts - 1)]
    return torch.split(x, sizes, axis)


def _split_to_sequence(call: NodeCall) -> Any:
    x = call[0]
    axis = call.axis(0, x.dim())
    known = call.constant(1)
    sizes = 1 if known is None else known.tolist()
    if isinstance(sizes, int) and x.shape[axis] > MAX_KNOWN * max(sizes, 0):
        raise CaptureError(f"it splits {extents(x)} into parts of {sizes}: more than {MAX_KNOWN}")
    parts = list(torch.split(x, sizes, axis))
    return [parts if known is not None or call.integer("keepdims", 1) else [p.squeeze(axis) for p in parts]]


def _sequence_at(call: NodeCall) -> Any:
    position = call.constant(1)
    if position is None:
        raise CaptureError("it lacks its position")
    return call[0][int(position)]


def _concat_from_sequence(call: NodeCall) -> Any:
    join = torch.stack if call.integer("new_axis") else torch.cat
    return join(list(call[0]), call.integer("axis"))


def _slice(call: NodeCall) -> Any:
    x: Tensor = call[0]
    starts, ends = call.ints("starts", 1), call.ints("ends", 2)
    axes = call.ints("axes", 3, default=range(len(starts)))
    steps = call.ints("steps", 4, default=[1] * len(starts))
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        axis = axis % x.dim()
        chosen = range(int(x.shape[axis]))[start:end:step]
        if step < 0:  # PyTorch goes forward alone
            last = int(x.shape[axis]) - 1
            x, chosen = x.flip([axis]), range(last - chosen.start, last - chosen.stop, -step)
        if len(chosen) != x.shape[axis]:
            x = x[(slice(None),) * axis + (slice(chosen.start, chosen.stop, chosen.step),)]
    return x


def _expand(call: NodeCall) -> Any:
    x = call[0]
    wanted = torch.broadcast_shapes(x.shape, call.ints("shape", 1))  # type: ignore[no-untyped-call]
    return x if wanted == x.shape else x.expand(wanted)


def _tile(call: NodeCall) -> Any:
    return call[0].repeat(call.ints("repeats", 1))


def _pad(call: NodeCall) -> Any:
    x: Tensor = call[0]
    pads = call.ints("pads", 1)
    axes = [a % x.dim() for a in call.ints("axes", 3, default=range(x.dim()))]
    widths = [0] * (2 * x.dim())
    for i, axis in enumerate(axes):  # PyTorch counts pairs from the last dimension
        at = 2 * (x.dim() - 1 - axis)
        widths[at : at + 2] = pads[i], pads[i + len(axes)]
    while len(widths) > 2 and widths[-2:] == [0, 0]:
        widths = widths[:-2]
    mode = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}.get(
        call.text("mode", "constant")
    )
    if mode is None:
        raise CaptureError(f"its mode '{call.text('mode')}' is not one that ONNX has")
    if mode != "constant":
        return F.pad(x, widths, mode=mode)
    value = call.number(2) if call.get(2) is not None else call.real("value", 0.0)
    return F.pad(x, widths, value=value if isinstance(value, int | float) else 0.0)


def _eye_like(call: NodeCall) -> Any:
    rows, columns = extents(call[0])
    number = call.integer("dtype")
    dtype = call.dtypes.of(number, call.node.name) if number else call[0].dtype
    offset = torch.arange(columns) - torch.arange(rows).unsqueeze(1)
    return (offset == call.integer("k")).to(dtype)


def _reverse_sequence(call: NodeCall) -> Any:
    """Turns the first so many entries of each sequence round; how many follows from data."""
    x, lengths = call[0], call[1]
    time, batch = call.integer("time_axis", 0), call.integer("batch_axis", 1)
    x = x if batch == 0 else x.transpose(0, 1)  # [batch, time, ...]
    if {time, batch} != {0, 1}:
        raise CaptureError(f"its axes are {time} and {batch}: 0 and 1 are known")
    places = torch.arange(int(x.shape[1])).unsqueeze(0)
    ends = lengths.unsqueeze(1)
    index = torch.where(places < ends, ends - 1 - places, places)
    shape = extents(x)
    index = index.reshape([*shape[:2], *[1] * (len(shape) - 2)]).expand(shape)
    made = torch.gather(x, 1, index)
    return made if batch == 0 else made.transpose(0, 1)


def _center_crop_pad(call: NodeCall) -> Any:
    x, wanted = call[0], call.ints("shape", 1)
    for axis, extent in zip(call.ints("axes", default=range(x.dim())), wanted, strict=True):
        size = int(x.shape[axis])
        if extent <= size:
            x = x.narrow(axis, (size - extent) // 2, extent)
        else:
            more = extent - size
            widths = [0, 0] * (x.dim() - 1 - axis % x.dim()) + [more // 2, more - more // 2]
            x = F.pad(x, widths)
    return x


def _sequence_insert(call: NodeCall) -> Any:
    parts, position = list(call[0]), call.constant(2)
    parts.insert(len(parts) if position is None else int(position), call[1])
    return [parts]


def _sequence_erase(call: NodeCall) -> Any:
    parts, position = list(call[0]), call.constant(1)
    del parts[-1 if position is None else int(position)]
    return [parts]


def _trilu(call: NodeCall) -> Any:
    known = call.constant(1)
    diagonal = 0 if known is None else int(known)
    return torch.triu(call[0], diagonal) if call.integer("upper", 1) else torch.tril(call[0], diagonal)


def _depth_to_space(call: NodeCall) -> Any:
    x, block = call[0], call.integer("blocksize", 1)
    batch, channels, height, width = extents(x)
    first = call.text("mode", "DCR") == "DCR"
    split = [batch, block, block, channels // block**2] if first else [batch, channels // block**2, block, block]
    order = [0, 3, 4, 1, 5, 2] if first else [0, 1, 4, 2, 5, 3]
    moved = x.reshape([*split, height, width]).permute(order)
    return moved.reshape([batch, channels // block**2, height * block, width * block])


def _space_to_depth(call: NodeCall) -> Any:
    x, block = call[0], call.integer("blocksize", 1)
    batch, channels, height, width = extents(x)
    parts = x.reshape([batch, channels, height // block, block, width // block, block])
    return parts.permute([0, 3, 5, 1, 2, 4]).reshape([batch, channels * block**2, height // block, width // block])


def _resize(scales_at: int, call: NodeCall) -> Any:
    """Only a picture's own dimensions are resized, as every exporter writes it."""
    x: Tensor = call[0]
    scales = call.constant(scales_at) if scales_at < len(call.operands) else None
    sizes = call.optional_ints("sizes", 3)
    if sizes is None:
        factors = call.node.attributes.get("scales") if scales is None else scales.tolist()
        if not factors:
            raise CaptureError("it has neither scales nor sizes")
        sizes = [int(extent * factor) for extent, factor in zip(extents(x), factors, strict=True)]
    if sizes[:2] != extents(x)[:2]:
        raise CaptureError(f"it resizes {extents(x)} to {sizes}: only dimensions after the second can be")
    mode = call.text("mode", "nearest")
    smooth = {"linear": {1: "linear", 2: "bilinear", 3: "trilinear"}, "cubic": {2: "bicubic"}}.get(mode, {})
    return F.interpolate(x, size=sizes[2:], mode=smooth.get(x.dim() - 2, "nearest"))


STATIC = ("Shape", "Size", "SequenceLength")
"""Operators that see only the shape of what they read."""


def _gather(call: NodeCall) -> Any:
    """Rows of a table are an embedding, one known position is a view, anything else picks along a dimension."""
    x: Tensor = call[0]
    axis = call.axis(0, x.dim())
    known = call.known[1]
    if known is not None:
        if known.ndim == 0:
            return x.select(axis, int(known))
        index = torch.tensor(np.where(known < 0, known + int(x.shape[axis]), known))
    else:
        index = call[1]
    if axis == 0 and x.dim() == 2 and x.is_floating_point():
        return F.embedding(index, x)
    picked = x.index_select(axis, index.reshape(-1))
    return picked.reshape([*extents(x)[:axis], *extents(index), *extents(x)[axis + 1 :]])


def _gather_elements(call: NodeCall) -> Any:
    return torch.gather(call[0], call.axis(0, call[0].dim()), call[1])


def _gather_nd(call: NodeCall) -> Any:
    x, index = call[0], call[1]
    if call.integer("batch_dims"):
        raise CaptureError("its batch_dims are not 0: export it as GatherElements")
    return x[_positions(x, index)]


def _positions(x: Tensor, index: Tensor) -> tuple[Tensor, ...]:
    if index.dim() == 0 or index.shape[-1] > x.dim():
        raise CaptureError(
            f"its indices {extents(index)} say more than the {x.dim()} dimensions of what they index"
        )
    return index.unbind(-1)


def _scatter_elements(call: NodeCall) -> Any:
    x, index, updates = call[0], call[1], call[2]
    axis = call.axis(0, x.dim())
    reduction = call.text("reduction", "none")
    if reduction == "none":
        return x.scatter(axis, index, updates)
    if reduction == "add":
        return x.scatter_add(axis, index, updates)
    name = {"mul": "prod", "max": "amax", "min": "amin"}.get(reduction)
    if name is None:
        raise CaptureError(f"its reduction '{reduction}' is not one that ONNX has")
    return x.scatter_reduce(axis, index, updates, name)


def _scatter_nd(call: NodeCall) -> Any:
    x, index, updates = call[0], call[1], call[2]
    reduction = call.text("reduction", "none")
    if reduction not in ("none", "add"):
        raise CaptureError(f"its reduction '{reduction}' has no kernel of its own: use ScatterElements")
    return x.index_put(_positions(x, index), updates, accumulate=reduction == "add")


def _one_hot(call: NodeCall) -> Any:
    depth = call.constant(1)
    if depth is None:
        raise CaptureError("it lacks its depth")
    classes = torch.arange(int(depth.item()), dtype=call[0].dtype)
    axis = call.integer("axis", -1)
    rank = call[0].dim() + 1
    hits = (call[0].unsqueeze(-1) == classes).movedim(-1, axis % rank)
    return torch.where(hits, call[2][1], call[2][0])


OPERATORS: Mapping[str, Operator] = {
    "Shape": _shape,
    "Size": _size,
    "Constant": _constant,
    "ConstantOfShape": _constant_of_shape,
    "Range": _range,
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Transpose": _transpose,
    "Concat": _concat,
    "Split": _split,
    "SplitToSequence": _split_to_sequence,
    "SequenceConstruct": lambda call: [[call[i] for i in range(len(call.operands))]],
    "SequenceAt": _sequence_at,
    "SequenceEmpty": lambda call: [[]],
    "SequenceInsert": _sequence_insert,
    "SequenceErase": _sequence_erase,
    "SequenceLength": lambda call: torch.tensor(len(call[0])),
    "EyeLike": _eye_like,
    "ReverseSequence": _reverse_sequence,
    "CenterCropPad": _center_crop_pad,
    "ConcatFromSequence": _concat_from_sequence,
    "Slice": _slice,
    "Expand": _expand,
    "Tile": _tile,
    "Pad": _pad,
    "Trilu": _trilu,
    "DepthToSpace": _depth_to_space,
    "SpaceToDepth": _space_to_depth,
    "Resize": partial(_resize, 2),
    "Upsample": partial(_resize, 1),
    "RandomNormal": partial(_shaped, _normal),
    "RandomUniform": partial(_shaped, _uniform),
    "RandomNormalLike": partial(_like, _normal),
    "RandomUniformLike": partial(_like, _uniform),
    "Bernoulli": _bernoulli,
    "Multinomial": _multinomial,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "ScatterElements": _scatter_elements,
    "Scatter": _scatter_elements,
    "ScatterND": _scatter_nd,
    "OneHot": _one_hot,
}
