"""Values that are known while a model is captured: they answer questions, cut and index, and are never drawn."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("torch", reason="needs the [torch] extra")

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.nn import functional as F

from echograph.frontend.pytorch.capture import capture_mode
from echograph.frontend.pytorch.device_ops import cpu_operators
from echograph.frontend.pytorch.known_values import MOST_KNOWN, is_known

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def mode():
    with capture_mode():
        yield


def test_what_is_made_of_settings_is_known_and_what_is_made_of_that() -> None:
    grid = torch.tensor([[1, 4, 6], [1, 2, 2]])
    assert grid.prod(-1).tolist() == [24, 4]
    assert [int(frames * rows) for frames, rows, _ in grid] == [4, 2]
    assert torch.repeat_interleave(grid[:, 1], grid[:, 2]).tolist() == [4] * 6 + [2] * 2
    assert torch.tensor([grid.max() + 1, 0]).tolist() == [7, 0]


def test_known_masks_index_unknown_tensors() -> None:
    mask = torch.arange(12).reshape(3, 4) % 2 == 0
    hidden = torch.empty(3, 4, 8)
    assert hidden[mask].shape == (6, 8)
    assert hidden[mask].__class__ is hidden.__class__
    hidden[mask] = torch.zeros(6, 8)
    assert mask.nonzero().shape == (6, 2)
    assert torch.masked_select(torch.arange(12).reshape(3, 4), mask).tolist() == [0, 2, 4, 6, 8, 10]


def test_known_numbers_cut_unknown_tensors() -> None:
    size = torch.tensor([[28, 42]])
    image = torch.empty(3, 64, 64)
    assert image[:, : size[0, 0] // 14, : size[0, 1] // 14].shape == (3, 2, 3)
    parts = torch.empty(10, 2).split([size[0, 0] // 14, torch.tensor(8)])
    assert [part.shape[0] for part in parts] == [2, 8]


@pytest.mark.parametrize("make", [torch.ones_like, torch.zeros_like])
def test_constants_as_large_as_an_unknown_tensor_are_known(make) -> None:
    made = make(torch.empty(2, 5), dtype=torch.long)
    assert made.sum(-1).tolist() == ([5, 5] if make is torch.ones_like else [0, 0])
    assert torch.empty(3).new_ones(4, dtype=torch.long).tolist() == [1] * 4


def test_what_unknown_values_come_into_is_unknown() -> None:
    unknown = torch.empty(4)
    for tensor in (unknown, unknown + torch.arange(4), torch.arange(4).float() @ unknown):
        assert not is_known(tensor)
        with pytest.raises(DataDependentOutputException):
            tensor.sum().item()
    with pytest.raises(DynamicOutputShapeException):
        torch.empty(4)[unknown > 0]
    written = torch.zeros(4)
    written.copy_(unknown)
    assert not is_known(written)


def test_what_is_large_is_not_followed() -> None:
    assert not is_known(torch.arange(MOST_KNOWN + 1))


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand([]),
        lambda: torch.randint(0, 9, (2,)),
        lambda: torch.randperm(3),
        lambda: torch.zeros(3).uniform_(),
        lambda: torch.bernoulli(torch.full((3,), 0.5)),
        lambda: F.dropout(torch.ones(3), 0.5),
    ],
)
def test_what_is_drawn_is_not_known(draw) -> None:
    """Else a layer that is left out by chance would be left out of the captured step."""
    assert not is_known(draw())


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_lengths_give_the_shape_of_a_connectionist_loss(reduction: str) -> None:
    scores = torch.zeros(20, 2, 5).requires_grad_().log_softmax(-1)
    labels, lengths = torch.tensor([1, 2, 3, 1, 2]), torch.tensor([3, 2])
    with cpu_operators():
        loss = F.ctc_loss(scores, labels, torch.full((2,), 20), lengths, reduction=reduction)
        assert loss.shape == ()
        assert loss.grad_fn is not None


def test_a_guess_that_numbers_are_unequal_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with capture_mode():
        unknown = torch.nn.Parameter(torch.empty(4, 8)) * 2.0
        for _ in range(2):
            assert not (unknown == 0.0).any().item()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert re.fullmatch(
        r"note: test_known_values\.py:\d+ compares numbers that have no values with 0.0: .*", said[0]
    )


def test_a_mask_that_is_repeated_for_each_number_is_known() -> None:
    """As models hold tokens of an image against what stands for them: `embeddings[mask.expand_as(embeddings)]`."""
    tokens = torch.arange(64).reshape(1, 64) < 5
    embeddings = torch.empty(1, 64, MOST_KNOWN // 32)
    mask = tokens.unsqueeze(-1).expand_as(embeddings)
    assert is_known(mask) and mask.numel() > MOST_KNOWN
    assert embeddings[mask].numel() == 5 * embeddings.shape[-1]
