"""Sparse tensors of coordinates (COO): where their values are, and the values, two dense tensors.

PyTorch's fake tensors have none of these on a GPU, whose product with a dense matrix is a kernel of its own. So a
sparse tensor is a pair here: what a script asks of it is answered by the two, and a product is one operator that
reads both, with its gradients. What else is asked of one is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from echograph.errors import CaptureError
from echograph.frontend.scripts.adapter import replaced
from echograph.frontend.scripts.places import device_of, on_gpu

Ask = Callable[..., Any]
"""Goes on with a function of PyTorch for dense tensors, wherever these are."""


_REFUSED = "'{}' of a sparse tensor is not captured: products with dense matrices are"


def _new(kind: Any, places: Tensor, held: Tensor, size: Sequence[int]) -> Any:
    made = kind._make_wrapper_subclass(kind, tuple(size), dtype=held.dtype, device="cpu")
    made.places = places
    made._local_tensor = held  # as DTensors have it: where it lies is said of what it holds
    return made


def _named(_: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """A function of its own, so that who answers for one is told that it is one."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **(kwargs or {}))


def _nobody_answers(_: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
    raise CaptureError(_REFUSED.format(func))


_KIND: Any = type(Tensor)
SparseTensor: Any = _KIND(
    "SparseTensor",
    (Tensor,),
    {
        "__new__": staticmethod(_new),
        "__repr__": lambda sparse, **_: f"SparseTensor({tuple(sparse.shape)}, {sparse.places.shape[1]} values)",
        "__torch_function__": classmethod(_named),
        "__torch_dispatch__": classmethod(_nobody_answers),
    },
)
"""A tensor made of places, (sparse dimensions, values), of what it holds there, (values, ...), and of its size."""


@torch.library.custom_op("coo::mm", mutates_args=())
def product(places: Tensor, held: Tensor, dense: Tensor, rows: int) -> Tensor:
    """A sparse matrix times a dense one.

    Args:
        places: (2, values), rows and columns.
        held: (values).
        dense: (columns, width).
        rows: of the sparse matrix.

    Returns:
        (rows, width).
    """
    raise NotImplementedError  # there are no values


@torch.library.custom_op("coo::sampled_mm", mutates_args=())
def sampled(places: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Products of rows of two dense matrices at places, (values): the gradient of what a sparse matrix holds."""
    raise NotImplementedError


@product.register_fake
def _(places: Tensor, held: Tensor, dense: Tensor, rows: int) -> Tensor:
    return dense.new_empty((rows, dense.shape[1]))


@sampled.register_fake
def _(places: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty((places.shape[1],))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    places, held, dense, _ = inputs
    ctx.save_for_backward(places, held, dense)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    places, held, dense = ctx.saved_tensors
    of_held = sampled(places, gradient, dense) if ctx.needs_input_grad[1] else None
    of_dense = product(places.flip(0), held, gradient, dense.shape[0]) if ctx.needs_input_grad[2] else None
    return None, of_held, of_dense, None


product.register_autograd(_backward, setup_context=_keep)


@register_flop_formula(torch.ops.coo.mm)
def _product_flops(places: Any, held: Any, dense: Any, rows: Any, *_: Any, **__: Any) -> int:
    return int(2 * places[1] * dense[1])


@register_flop_formula(torch.ops.coo.sampled_mm)
def _sampled_flops(places: Any, left: Any, *_: Any, **__: Any) -> int:
    return int(2 * places[1] * left[1])


def answer(ask: Ask, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function of PyTorch makes of a sparse tensor, or where it makes one.

    Args:
        ask: goes on for dense tensors.
        func: that is called.
        args: its arguments.
        kwargs: those by name.

    Raises:
        CaptureError: it is not known.
    """
    if func is torch.sparse_coo_tensor:
        return made(ask, *args, **kwargs)
    if func in _PRODUCTS:
        return _multiplied(ask, *args[:2])
    sparse = args[0]
    if isinstance(sparse, SparseTensor):
        if func in ASKED:
            return ASKED[func](sparse)
        if func in _OF_VALUES and not any(isinstance(other, Tensor) for other in args[1:]):
            held = ask(func, sparse._local_tensor, *args[1:], **kwargs)
            return _like(ask, sparse, held)
        if func in _TRANSPOSED:
            return _turned(ask, sparse)
        if func in (Tensor.to_dense, Tensor._to_dense):
            blank = ask(Tensor.new_zeros, sparse._local_tensor, tuple(sparse.shape))
            return ask(
                Tensor.index_put, blank, tuple(ask(Tensor.unbind, sparse.places)), sparse._local_tensor, True
            )
    raise CaptureError(_REFUSED.format(getattr(func, "__name__", func)))


def made(
    ask: Ask, indices: Any = None, values: Any = None, size: Any = None, *, dtype: Any = None, device: Any = None,
    **_: Any,
) -> Any:  # fmt: skip
    """`torch.sparse_coo_tensor`: places and values as they are given, none of them added up."""
    where = {} if device is None else {"device": device}
    places = ask(torch.as_tensor, indices, **where)
    held = ask(torch.as_tensor, values, **where, **({} if dtype is None else {"dtype": dtype}))
    if size is None:
        size = [int(ask(Tensor.item, ask(Tensor.max, row))) + 1 for row in ask(Tensor.unbind, places)]
    return SparseTensor(places, held, size)


def _like(ask: Ask, sparse: Any, held: Tensor) -> Any:
    """The same with other values, wherever these are."""
    places = sparse.places
    if on_gpu(held) != on_gpu(places):
        places = ask(Tensor.cuda if on_gpu(held) else Tensor.cpu, places)
    return SparseTensor(places, held, sparse.shape)


def _turned(ask: Ask, sparse: Any) -> Any:
    """Of a matrix, with rows and columns in each other's place."""
    return SparseTensor(ask(Tensor.flip, sparse.places, (0,)), sparse._local_tensor, sparse.shape[::-1])


def _multiplied(ask: Ask, left: Any, right: Any) -> Any:
    """Of a sparse matrix and a dense one, in either order; a vector is a matrix of one column."""
    if not isinstance(left, SparseTensor):
        return ask(Tensor.t, _multiplied(ask, _turned(ask, right), ask(Tensor.t, left)))
    if isinstance(right, SparseTensor):
        raise CaptureError(_REFUSED.format("a product with another"))
    if right.dim() == 1:
        return ask(Tensor.squeeze, _multiplied(ask, left, ask(Tensor.unsqueeze, right, 1)), 1)
    return product(left.places, left._local_tensor, right, left.shape[0])


_PRODUCTS = (
    torch.mm, Tensor.mm, torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, torch.spmm, torch.smm,
    torch.dsmm, torch.sparse.mm, Tensor.mv, torch.mv,
)  # fmt: skip
_TRANSPOSED = (Tensor.t, torch.t, Tensor.transpose, torch.transpose)
_OF_VALUES = (
    Tensor.to, Tensor.cuda, Tensor.cpu, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.type,
    Tensor.detach, Tensor.clone, Tensor.contiguous, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.div,
    Tensor.__truediv__, torch.mul, torch.div, Tensor.neg, Tensor.pow, Tensor.sqrt, Tensor.abs,
)  # fmt: skip
ASKED: dict[Any, Callable[[Any], Any]] = {
    Tensor.coalesce: lambda sparse: sparse,
    Tensor.is_coalesced: lambda _: True,
    Tensor.untyped_storage: lambda sparse: sparse._local_tensor.untyped_storage(),
    Tensor._nnz: lambda sparse: sparse.places.shape[1],
    Tensor.sparse_dim: lambda sparse: sparse.places.shape[0],
    Tensor.dense_dim: lambda sparse: sparse._local_tensor.dim() - 1,
    **dict.fromkeys((Tensor.indices, Tensor._indices), lambda sparse: sparse.places),
    **dict.fromkeys((Tensor.values, Tensor._values), lambda sparse: sparse._local_tensor),
    **{getattr(Tensor, name).__get__: asked for name, asked in {
        "is_sparse": lambda _: True,
        "layout": lambda _: torch.sparse_coo,
        "requires_grad": lambda sparse: sparse._local_tensor.requires_grad,
        "is_cuda": lambda sparse: on_gpu(sparse._local_tensor),
        "device": lambda sparse: device_of(sparse._local_tensor),
    }.items()},
}  # fmt: skip
_LEGACY = {
    "FloatTensor": torch.float32, "DoubleTensor": torch.float64, "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16, "IntTensor": torch.int32, "LongTensor": torch.int64,
    "BoolTensor": torch.bool,
}  # fmt: skip


class _Legacy(type):
    def __instancecheck__(cls, given: object) -> bool:
        return isinstance(given, SparseTensor) and given.dtype == vars(cls)["dtype"]

    def __call__(cls, *args: Any) -> Any:
        size = args[2:] or ((args[0],) if len(args) == 1 else ())
        if len(args) < 2:
            raise CaptureError(_REFUSED.format("a constructor without values"))
        return torch.sparse_coo_tensor(*args[:2], *size, dtype=vars(cls)["dtype"], device=vars(cls)["device"])


def installed() -> Iterator[AbstractContextManager[None]]:
    """In the contexts, the old types of sparse tensors make such pairs."""
    for owner, device in ((torch.sparse, "cpu"), (torch.cuda.sparse, "cuda")):
        for name, dtype in _LEGACY.items():
            if hasattr(owner, name):
                yield replaced(owner, name, _Legacy(name, (), {"dtype": dtype, "device": device}))
