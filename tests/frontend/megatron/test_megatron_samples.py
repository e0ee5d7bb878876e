"""What captures have in place of data, and of loops that values end."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="needs the [torch] extra")
if find_spec("megatron") is None:
    pytest.skip("needs the [megatron] extra", allow_module_level=True)

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from echograph.frontend.megatron.shims import SentenceSamples, _sinkhorn, _sizes
from echograph.frontend.scripts.host_work import WorkCounter

pytestmark = pytest.mark.torch


def test_samples_have_the_lengths_of_encoder_and_decoder() -> None:
    bert = SentenceSamples(SimpleNamespace(sequence_length=12), None, 3)
    assert len(bert) == 3
    assert bert[0]["text"].shape == bert[0]["padding_mask"].shape == (12,)
    t5 = SentenceSamples(SimpleNamespace(sequence_length=12, sequence_length_decoder=5), None, None)[0]
    assert t5["text_enc"].shape == t5["enc_mask"].shape == (12,)
    assert t5["text_dec"].shape == t5["labels"].shape == t5["loss_mask"].shape == (5,)


def test_a_rank_that_has_a_batch_knows_its_sizes() -> None:
    def ask(keys: list[str], data: object) -> object:
        sizes = torch.zeros(10, dtype=torch.int64).cpu()
        return [int(size) for size in sizes]

    with FakeTensorMode():
        data = {"text": torch.zeros(4, 6, dtype=torch.int64), "flag": torch.zeros(4, dtype=torch.int64)}
        made = _sizes(ask)(["text", "flag"], data)
    assert made == ({"text": [4, 6], "flag": [4]}, {"text": 24, "flag": 4}, 28)


def test_sinkhorn_ends_and_is_said() -> None:
    notes: list[str] = []
    swept = 0

    def sweep(cost: torch.Tensor) -> torch.Tensor:
        nonlocal swept
        error: object = 1.0
        while error > 1e-4:  # type: ignore[operator]
            swept += 1
            error = cost.mean()
        return cost

    with FakeTensorMode():
        _sinkhorn(sweep, notes.append)(torch.empty(8, 4))
    assert swept == 4
    assert any("sinkhorn" in note for note in notes)


def test_the_host_waits_for_each_sweep() -> None:
    read: list[torch.Tensor] = []

    def sweep(cost: torch.Tensor) -> torch.Tensor:
        error: float | torch.Tensor = 1.0
        while error > 0.0:
            error = cost.abs().mean()
        return cost

    counter = WorkCounter(lambda tensor: read.append(tensor) if counter.entered_once else None)
    WorkCounter.current = counter
    try:
        with FakeTensorMode():
            _sinkhorn(sweep, lambda _: None)(torch.empty(8, 4))
    finally:
        WorkCounter.current = None
    assert len(read) == 4
    assert not counter.entered_once
