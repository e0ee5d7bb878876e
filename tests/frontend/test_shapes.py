"""What is remembered of operators, held against what PyTorch's fake tensors make of the same arguments anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils.flop_counter import FlopCounterMode

from echograph.frontend.pytorch.shapes import Shapes

ATEN = torch.ops.aten


@pytest.fixture
def mode() -> Iterator[FakeTensorMode]:
    with FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False) as mode:
        yield mode


def told(value: Any, given: tuple[Any, ...]) -> Any:
    """All that can be seen of a result: itself an argument, or its layout, memory and what PyTorch keeps of it."""
    if isinstance(value, list | tuple):
        return type(value), [told(part, given) for part in value]
    if not isinstance(value, Tensor):
        return value
    for i, argument in enumerate(given):
        if value is argument:
            return i
    assert type(value) is FakeTensor
    storage = value.untyped_storage()
    memory = [isinstance(a, Tensor) and a.untyped_storage()._cdata == storage._cdata for a in given]
    kept = {name: kept for name, kept in vars(value).items() if not name.startswith("_echograph")}
    keys = torch._C._dispatch_keys(value).raw_repr()
    layout = (value.shape, value.stride(), value.storage_offset(), value.dtype, value.device, value.requires_grad)
    return layout, storage.nbytes(), memory, kept, keys


def fake(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype)


CASES: list[tuple[Any, Callable[[], tuple[Any, ...]], dict[str, Any]]] = [
    (ATEN.mm.default, lambda: (fake(4, 8), fake(8, 2)), {}),
    (ATEN.mm.default, lambda: (fake(8, 4).t(), fake(8, 2)), {}),
    (ATEN.add.Tensor, lambda: (fake(4, 1), fake(8)), {"alpha": 2}),
    (ATEN.add.Tensor, lambda: (fake(4, dtype=torch.int64), 1), {}),
    (ATEN.add.Tensor, lambda: (fake(4, dtype=torch.int64), 1.0), {}),
    (ATEN.add.Tensor, lambda: (fake(4, dtype=torch.bool), True), {}),
    (ATEN.add_.Tensor, lambda: (fake(4, 8), fake(8)), {}),
    (ATEN.copy_.default, lambda: (fake(4, 8)[:, 2:], fake(6, dtype=torch.bfloat16)), {}),
    (ATEN.view.default, lambda: (fake(4, 8)[2:], [16]), {}),
    (ATEN._unsafe_view.default, lambda: (fake(4, 8), [32]), {}),
    (ATEN.slice.Tensor, lambda: (fake(4, 8), 1, 2, 7, 2), {}),
    (ATEN.expand.default, lambda: (fake(4, 1), [3, 4, 5]), {}),
    (ATEN.as_strided.default, lambda: (fake(4, 8), [2, 3], [8, 2], 5), {}),
    (ATEN.detach.default, lambda: (fake(4, 8).t(),), {}),
    (ATEN.alias.default, lambda: (fake(4, 8)[1:],), {}),
    (ATEN.split.Tensor, lambda: (fake(7, 8), 3), {}),
    (ATEN.unbind.int, lambda: (fake(3, 8), 0), {}),
    (ATEN.cat.default, lambda: ([fake(2, 3), fake(4, 3)],), {}),
    (ATEN.native_layer_norm.default, lambda: (fake(4, 8), [8], fake(8), fake(8), 1e-5), {}),
    (ATEN.convolution_backward.default,
     lambda: (fake(2, 4, 6), fake(2, 3, 8), fake(4, 3, 3), [4], [1], [0], [1], False, [0], 1, [True, True, False]),
     {}),
    (ATEN._to_copy.default, lambda: (fake(4, 8).t(),), {"dtype": torch.bfloat16}),
    (ATEN.clone.default, lambda: (fake(2, 3, 4, 5),), {"memory_format": torch.channels_last}),
    (ATEN.empty_like.default, lambda: (fake(4, 8),), {"device": torch.device("meta")}),
    (ATEN.zeros.default, lambda: ([2, 3],), {"dtype": torch.float16, "device": torch.device("cpu")}),
    (ATEN.arange.default, lambda: (7,), {}),
    (ATEN._foreach_add_.Scalar, lambda: ([fake(3), fake(4, 5)], 1.0), {}),
    (ATEN._foreach_mul.Scalar, lambda: ([fake(3), fake(4, 5)], 2.0), {}),
    (ATEN.embedding.default, lambda: (fake(10, 4), fake(2, 3, dtype=torch.int64)), {}),
    (ATEN.index.Tensor, lambda: (fake(10, 4), [fake(3, dtype=torch.int64)]), {}),
    (ATEN.native_dropout.default, lambda: (fake(4, 8), 0.1, True), {}),
    (ATEN.mul.out, lambda: (fake(4), fake(4)), {"out": None}),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}")
def test_a_remembered_result_is_the_one_that_fake_tensors_make(mode: FakeTensorMode, case: Any) -> None:
    func, make, kwargs = case
    shapes = Shapes(mode)
    for _ in range(3):
        args = make()
        named = {name: fake(4) if name == "out" else value for name, value in kwargs.items()}
        expected = told(func(*args, **named), args)
        again = make()
        named = {name: fake(4) if name == "out" else value for name, value in kwargs.items()}
        assert told(shapes.call(func, again, named), again) == expected


extents = st.lists(st.integers(1, 4), min_size=2, max_size=4)


@settings(max_examples=60, deadline=None)
@given(
    shape=extents,
    turned=st.booleans(),
    first=st.integers(0, 1),
    dtypes=st.tuples(*[st.sampled_from([torch.float32, torch.bfloat16, torch.int64])] * 2),
)
def test_results_follow_every_layout(
    shape: list[int], turned: bool, first: int, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """One memory of layouts serves them all: what was learnt of one is not taken for another."""
    with FakeTensorMode() as mode:
        shapes = Shapes(mode)
        for start in (first, 0, first):
            whole = fake(shape[0] + 1, *shape[1:], dtype=dtypes[0])[start : start + shape[0]]
            one = whole.transpose(0, 1) if turned else whole
            other = fake(*one.shape, dtype=dtypes[1])
            for func, args in (
                (ATEN.mul.Tensor, (one, other)),
                (ATEN.sub_.Tensor, (other.float(), one)),
                (ATEN.transpose.int, (one, 0, -1)),
                (ATEN.select.int, (one, 1, 0)),
                (ATEN.sum.dim_IntList, (one, [0], True)),
                (ATEN.clone.default, (one,)),
            ):
                assert told(shapes.call(func, args, {}), args) == told(func(*args), args)


def test_views_share_memory_and_results_do_not(mode: FakeTensorMode) -> None:
    shapes = Shapes(mode)
    for _ in range(2):
        base = fake(4, 8)
        one, other = (shapes.call(ATEN.view.default, (base, [32]), {}) for _ in range(2))
        assert one is not other
        assert one.untyped_storage()._cdata == other.untyped_storage()._cdata == base.untyped_storage()._cdata
        one, other = (shapes.call(ATEN.neg.default, (base,), {}) for _ in range(2))
        assert one.untyped_storage()._cdata != other.untyped_storage()._cdata


def test_what_depends_on_values_is_asked_each_time(mode: FakeTensorMode) -> None:
    shapes = Shapes(mode)
    for _ in range(2):
        with pytest.raises(DynamicOutputShapeException):
            shapes.call(ATEN.nonzero.default, (fake(4),), {})
        # A tensor that was made of a number keeps it, as what is worked out of it does.
        number = torch.tensor(3.0)
        assert shapes.call(ATEN.mul.Tensor, (number, number), {}).item() == 9.0


def test_where_the_mode_is_put_aside_values_are_real(mode: FakeTensorMode) -> None:
    shapes = Shapes(mode)
    given = ([3],), {"dtype": torch.float32, "device": torch.device("cpu")}
    for _ in range(2):
        assert type(shapes.call(ATEN.ones.default, *given)) is FakeTensor
        with unset_fake_temporarily():
            assert shapes.call(ATEN.ones.default, *given).tolist() == [1.0, 1.0, 1.0]
    with FakeTensorMode() as other:
        assert shapes.call(ATEN.ones.default, *given).fake_mode is other


def test_a_mode_beneath_sees_every_call(mode: FakeTensorMode) -> None:
    shapes = Shapes(mode)
    with FlopCounterMode(display=False) as counter:
        for _ in range(3):
            shapes.call(ATEN.mm.default, (fake(2, 4), fake(4, 8)), {})
    assert counter.get_total_flops() == 3 * 2 * 2 * 4 * 8


def test_a_layout_that_changed_in_place_is_another_one(mode: FakeTensorMode) -> None:
    shapes = Shapes(mode)
    tensor = fake(4, 8)
    assert shapes.call(ATEN.neg.default, (tensor,), {}).shape == (4, 8)
    shapes.call(ATEN.t_.default, (tensor,), {})
    shapes.call(ATEN.t_.default, (tensor,), {})
    shapes.call(ATEN.t_.default, (tensor,), {})
    assert shapes.call(ATEN.neg.default, (tensor,), {}).stride() == (1, 8)


def test_memory_that_was_given_back_is_viewed_as_fake_tensors_view_it(mode: FakeTensorMode) -> None:
    shapes = Shapes(mode)
    for size in (128, 0, 128, 0):
        one, other = fake(4, 8), fake(4, 8)
        for base in (one, other):
            base.untyped_storage().resize_(size)
        expected = told(ATEN.view.default(one, [32]), (one,))
        assert told(shapes.call(ATEN.view.default, (other, [32]), {}), (other,)) == expected


def test_gradients_pass_through_remembered_results(mode: FakeTensorMode) -> None:
    """Views and in-place writes keep their place in autograd's graph where a recorder answers for the mode."""
    from echograph.frontend.pytorch.recorder import OperatorRecorder

    recorder = OperatorRecorder(mode)
    with recorder:
        for _ in range(3):
            weight = torch.empty(8, 8, requires_grad=True)
            x = torch.empty(4, 8, requires_grad=True)
            hidden = (x @ weight).view(2, 2, 8).transpose(0, 1)
            hidden = hidden * 2
            hidden[0].mul_(3)
            hidden.detach().add_(1)
            version = hidden._version
            hidden.sum().backward()  # type: ignore[no-untyped-call]
            assert version == 2
            assert x.grad is not None and weight.grad is not None
            assert (x.grad.shape, weight.grad.shape) == ((4, 8), (8, 8))


@pytest.mark.parametrize("shape", [(4, 8), (0,)])
def test_what_is_filled_is_given_back_and_takes_the_shape_of_the_result(
    shape: tuple[int, ...], mode: FakeTensorMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    shapes, ask = Shapes(mode), mode.dispatch
    monkeypatch.setattr(
        mode, "dispatch", lambda func, *rest, **named: asked.append(func) or ask(func, *rest, **named)
    )
    for times in (1, 1 if shape == (4, 8) else 2):
        out = fake(*shape)
        assert shapes.call(ATEN.exp.out, (fake(4, 8),), {"out": out}) is out
        assert out.shape == (4, 8)
        assert asked.count(ATEN.exp.out) == times
