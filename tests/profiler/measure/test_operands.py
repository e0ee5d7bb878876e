"""Operands have the recorded layout and identity, and numbers that their operator can work with."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the [torch] extra")
pytestmark = pytest.mark.torch


from echograph.ir.profile import Invocation, Named, Operand, contiguous  # noqa: E402
from echograph.profiler.measure.ops import RealOperands, operator_of  # noqa: E402


def tensor(number: int, *shape: int, dtype: str = "float32", strides: tuple[int, ...] | None = None) -> Operand:
    return Operand(
        number=number, dtype=dtype, shape=shape, strides=contiguous(shape) if strides is None else strides
    )


def index(number: int, *shape: int) -> Operand:
    return tensor(number, *shape, dtype="int64")


INDEXED = {
    "embedding": Invocation(operator="aten.embedding", arguments=(tensor(0, 7, 4), index(1, 50))),
    "embedding_backward": Invocation(
        operator="aten.embedding_dense_backward", arguments=(tensor(0, 50, 4), index(1, 50), 7, -1, False)
    ),
    "nll": Invocation(operator="aten.nll_loss_forward", arguments=(tensor(0, 50, 3), index(1, 50), None, 1, -100)),
    "nll_backward": Invocation(
        operator="aten.nll_loss_backward",
        arguments=(tensor(0), tensor(1, 50, 3), index(2, 50), None, 1, -100, tensor(3)),
    ),
    "gather": Invocation(operator="aten.gather", arguments=(tensor(0, 5, 3), 1, index(1, 5, 20))),
    "scatter": Invocation(
        operator="aten.scatter_add_", arguments=(tensor(0, 5, 30), -1, index(1, 5, 20), tensor(2, 5, 20))
    ),
    "index": Invocation(
        operator="aten.index", overload="Tensor", arguments=(tensor(0, 5, 9), (None, index(1, 40)))
    ),
    "index_put": Invocation(
        operator="aten.index_put_",
        arguments=(tensor(0, 5, 9), (index(1, 40), index(2, 40)), tensor(3, 40), True),
    ),
    "index_select": Invocation(operator="aten.index_select", arguments=(tensor(0, 5, 9), 1, index(1, 40))),
    "index_add": Invocation(
        operator="aten.index_add", arguments=(tensor(0, 5, 9), 0, index(1, 40), tensor(2, 40, 9))
    ),
    "take": Invocation(operator="aten.take", arguments=(tensor(0, 5, 9), index(1, 100))),
    "max_pool": Invocation(
        operator="aten.max_pool2d_with_indices_backward",
        arguments=(
            tensor(0, 1, 2, 4, 4), tensor(1, 1, 2, 8, 8), (2, 2), (2, 2), (0, 0), (1, 1), False,
            index(2, 1, 2, 4, 4),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", INDEXED)
def test_indices_lie_in_range_and_are_not_all_alike(name: str) -> None:
    prepared = RealOperands("cpu").make(INDEXED[name])
    prepared.run()  # PyTorch refuses an index out of range.
    indices = [t for t in prepared.tensors if t.dtype == torch.int64]
    assert indices and all(len(t.unique()) > 1 and t.min() >= 0 for t in indices)


def test_the_groups_of_a_grouped_product_are_equal_and_end_where_the_rows_do() -> None:
    invocation = Invocation(
        operator="aten._grouped_mm",
        arguments=(
            tensor(0, 32, 16, dtype="bfloat16"),
            tensor(1, 4, 16, 8, dtype="bfloat16"),
            tensor(2, 4, dtype="int32"),
        ),
        products=True,
    )
    assert RealOperands("cpu").make(invocation).tensors[2].tolist() == [8, 16, 24, 32]


def test_layout_and_identity_are_the_recorded_ones() -> None:
    transposed = tensor(0, 4, 3, strides=(1, 4))
    invocation = Invocation(operator="aten.mul", overload="Tensor", arguments=(transposed, transposed))
    prepared = RealOperands("cpu").make(invocation)
    (only,) = prepared.tensors
    assert only.shape == (4, 3) and only.stride() == (1, 4)
    assert torch.equal(prepared.run(), only * only)


def test_expanded_and_empty_tensors_take_the_memory_that_they_span() -> None:
    assert tensor(0, 100, 3, strides=(0, 1)).extent == 3
    assert tensor(0, 4, 3, strides=(10, 1)).extent == 33
    assert tensor(0, 4, 0).extent == 0 and tensor(0).extent == 1


def test_products_get_numbers_of_both_signs_and_others_none_that_make_nan() -> None:
    root = Invocation(operator="aten.sqrt", arguments=(tensor(0, 1000),))
    assert not RealOperands("cpu").make(root).run().isnan().any()
    product = Invocation(operator="aten.mm", arguments=(tensor(0, 30, 30), tensor(1, 30, 30)), products=True)
    assert all(bool((t < 0).any() and (t > 0).any()) for t in RealOperands("cpu").make(product).tensors)


def test_what_is_overwritten_becomes_ordinary_again() -> None:
    invocation = Invocation(operator="aten.mul_", overload="Scalar", arguments=(tensor(0, 8), 0.5))
    prepared = RealOperands("cpu").make(invocation)
    for _ in range(200):
        prepared.restore()
        prepared.run()
    assert torch.all(prepared.tensors[0] == 0.25)


def test_lists_written_in_place_become_ordinary_again() -> None:
    pair = (tensor(0, 8), tensor(1, 3))
    invocation = Invocation(operator="aten._foreach_mul_", overload="Scalar", arguments=(pair, 0.0))
    prepared = RealOperands("cpu").make(invocation)
    prepared.run()
    prepared.restore()
    assert all(torch.all(t == 0.5) for t in prepared.tensors)


def test_constants_of_the_framework_become_what_they_name() -> None:
    invocation = Invocation(
        operator="aten.full",
        arguments=((2, 3), 1.5),
        keywords=(
            ("dtype", Named(kind="dtype", name="float64")),
            ("device", Named(kind="device", name="")),
            ("layout", Named(kind="layout", name="strided")),
        ),
    )
    made = RealOperands("cpu").make(invocation).run()
    assert made.dtype == torch.float64 and made.tolist() == [[1.5] * 3] * 2


def test_what_only_its_maker_can_give_comes_from_one_run_of_it() -> None:
    maker = Invocation(operator="aten.sort", arguments=(tensor(0, 9),))
    first, second = (
        Operand(number=i, dtype=d, shape=(9,), strides=(1,), maker=(maker, i))
        for i, d in enumerate(("float32", "int64"))
    )
    invocation = Invocation(operator="aten.gather", arguments=(first, 0, second))
    values, order = RealOperands("cpu").make(invocation).tensors
    assert torch.equal(values, values.sort()[0]) and sorted(order.tolist()) == list(range(9))


def test_an_operator_that_this_torch_lacks_is_an_attribute_error() -> None:
    unknown: Any = Invocation(operator="aten.no_such_operator")
    with pytest.raises(AttributeError):
        operator_of(unknown)
