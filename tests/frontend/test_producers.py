"""The two producers see the same step: equal multisets of compute operations, by the rules of `normalise`."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from normalise import compute_operations

from echograph.errors import UnknownNameError, UsageError

pytestmark = pytest.mark.torch

MODELS = ["bert-base-uncased", "resnet-18"]
SLOW_MODELS = ["t5-small", "mixtral-8x7b", "vit-b-16", "gpt2", "llama-3-8b", "resnet-50", "roberta-base",
               "opt-350m", "mpt-7b", "gemma-2-2b", "qwen3-30b-a3b", "deepseek-v3", "gpt-oss-20b", "phi-2",
               "vgg-16", "distilbert-base-uncased"]  # fmt: skip


@pytest.mark.parametrize("name", MODELS + [pytest.param(m, marks=pytest.mark.slow) for m in SLOW_MODELS])
def test_same_compute_operations(captured: Any, name: str) -> None:
    recorded, traced = (compute_operations(captured(name, producer)) for producer in ("recorder", "aot"))
    assert recorded.total() > 50
    assert recorded - traced == traced - recorded  # both empty; shows the operations that differ


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_same_compute_operations_in_other_types(capture_step: Any, build_mlp: Any, dtype: str) -> None:
    recorded, traced = (
        compute_operations(capture_step(build_mlp, dtype=dtype, producer=p)) for p in ("recorder", "aot")
    )
    assert recorded == traced


def test_difference_is_seen(capture_step: Any, build_mlp: Any) -> None:
    adamw, sgd = (compute_operations(capture_step(build_mlp, optimizer=o)) for o in ("adamw", "sgd"))
    assert {o.operator for o in adamw - sgd} == {"_fused_adamw", "_foreach_add"}


def test_ahead_of_time_does_not_see_recomputation(capture_step: Any, zoo: Any) -> None:
    with pytest.raises(UsageError, match="use 'recorder'"):
        capture_step(zoo("gpt2", batch_size=1, seq_len=16), recompute=True, producer="aot")


def test_unknown_producer(capture_step: Any, build_mlp: Any) -> None:
    with pytest.raises(UnknownNameError, match="recorder"):
        capture_step(build_mlp, producer="recoder")
