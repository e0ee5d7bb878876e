"""What operators make that find as many elements as values say, once the user said how many.

Operators of PyTorch whose fake implementation has no size for what they make: masks, unique values, boxes that are
kept. What ran before them, and what is made of theirs, is as with any other shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod
from typing import Any

import torch
from torch import Tensor

from echograph.errors import CaptureError

_COUNT: ContextVar[int | None] = ContextVar("count", default=None)
ALL = -1
"""In place of a count: as many as there are."""
_FOUND = "_echograph_found"
_INDEX = torch.ops.aten.index.Tensor


@contextmanager
def finding(count: int) -> Iterator[None]:
    """In the context, operators that find elements find so many, or `ALL`."""
    token = _COUNT.set(count)
    try:
        yield
    finally:
        _COUNT.reset(token)


def found(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operator makes of as many elements as were said; None where nobody did, or it finds none.

    Args:
        func: an operator of `torch.ops`.
        args: its arguments.
        kwargs: those by name.

    Raises:
        CaptureError: it cannot find so many.
    """
    count, mask = _COUNT.get(), _mask_of(args) if func is _INDEX else None
    if count is None and mask is not None and torch._C._current_autograd_node() is not None:
        count = getattr(mask, _FOUND, None)  # the gradient of what was written there
    rule = None if count is None else _RULES.get(str(func))
    if count is None or rule is None:
        return None
    most = _most(str(func), args, kwargs)
    if count == ALL:
        if most is None:
            return None
        count = most
    if most is not None and count > most:
        raise CaptureError(
            f"--decide says that '{str(func).split('.')[1]}' finds {count:,}, of {most:,}: say fewer"
        )
    if mask is not None:
        setattr(mask, _FOUND, count)
    return rule(count, func, *args, **kwargs)


def _mask_of(args: tuple[Any, ...]) -> Tensor | None:
    """The mask by which elements are chosen; None where they are by their places."""
    return next((i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)), None)


def _most(operator: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """How many elements an operator finds at most; None where nothing bounds them."""
    if operator in ("aten.repeat_interleave.Tensor", "aten.bincount.default"):
        return None
    if operator == "aten.masked_select.default":
        return prod(torch.broadcast_shapes(args[0].shape, args[1].shape))  # type: ignore[no-untyped-call]
    if operator == "aten.index.Tensor":
        mask = _mask_of(args)
        return None if mask is None else mask.numel()
    dim = kwargs.get("dim", args[1] if operator == "aten.unique_dim.default" else None)
    if operator == "torchvision.nms.default":
        dim = 0
    size: int = args[0].numel() if dim is None else args[0].shape[dim]
    return size


def _positions(count: int, _: Any, given: Tensor) -> Tensor:
    return given.new_empty((count, given.dim()), dtype=torch.int64)


def _chosen(count: int, _: Any, given: Tensor, __: Tensor) -> Tensor:
    return given.new_empty((count,))


def _kept(count: int, _: Any, boxes: Tensor, *__: Any) -> Tensor:
    return boxes.new_empty((count,), dtype=torch.int64)


def _repeated(count: int, _: Any, repeats: Tensor, *, output_size: int | None = None) -> Tensor:
    return repeats.new_empty((count if output_size is None else output_size,))


def _bins(count: int, _: Any, given: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    dtype = torch.int64 if weights is None else torch.float32 if weights.dtype == torch.float32 else torch.float64
    return given.new_empty((max(count, minlength),), dtype=dtype)


def _indexed(count: int, func: Any, given: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """Masks are the places where they are true: a vector for each of their dimensions."""
    places: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            places.append(index)
        else:
            places += [index.new_empty((count,), dtype=torch.int64) for _ in range(index.dim())]
    made: Tensor = func(given, places)
    return made


def _unique(
    count: int,
    _: Any,
    given: Tensor,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    del sorted
    whole = given.new_empty(given.shape if return_inverse else (0,), dtype=torch.int64)
    return given.new_empty((count,)), whole, given.new_empty((count if return_counts else 0,), dtype=torch.int64)


def _unique_rows(
    count: int, _: Any, given: Tensor, dim: int, sorted: bool = True, return_inverse: bool = False,
    return_counts: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    del sorted
    shape = list(given.shape)
    whole = given.new_empty((shape[dim] if return_inverse else 0,), dtype=torch.int64)
    shape[dim] = count
    return given.new_empty(shape), whole, given.new_empty((count if return_counts else 0,), dtype=torch.int64)


def _unique_runs(
    count: int, func: Any, given: Tensor, return_inverse: bool = False, return_counts: bool = False,
    dim: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if dim is None:
        return _unique(count, func, given, True, return_inverse, return_counts)
    return _unique_rows(count, func, given, dim, True, return_inverse, return_counts)


_RULES: dict[str, Callable[..., Any]] = {
    "aten.nonzero.default": _positions,
    "aten.masked_select.default": _chosen,
    "aten.index.Tensor": _indexed,
    "aten.repeat_interleave.Tensor": _repeated,
    "aten.bincount.default": _bins,
    "aten._unique2.default": _unique,
    "aten.unique_dim.default": _unique_rows,
    "aten.unique_consecutive.default": _unique_runs,
    "torchvision.nms.default": _kept,
}


def finds(func: Any) -> bool:
    """Whether an operator is one of those."""
    return str(func) in _RULES
