"""What a library's files remember between steps (`functools.lru_cache`) comes into no capture, and out of none."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch

from echograph.frontend.pytorch.capture import capture, capture_mode
from echograph.frontend.pytorch.spec import StepSpec


def test_what_a_models_file_remembers_is_of_no_other_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "remembering.py"
    path.write_text(
        "from functools import lru_cache, wraps\nimport torch\n\n"
        "def keeping(func):\n    kept = lru_cache(func)\n    return wraps(func)(lambda *given: kept(*given))\n\n"
        "def unfilled():\n    def use():\n        return late\n    return use\n    late = 1\n\n"
        "use = unfilled()\n\n"
        "@lru_cache\ndef scale(size):\n    return torch.ones(size) * 2\n\n"
        "@keeping\ndef shift(size):\n    return torch.ones(size) + 2\n\n"
        "class Scaled(torch.nn.Linear):\n    def forward(self, x):\n"
        "        return (super().forward(x) * scale(8) + shift(8)).sum()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    kind = importlib.import_module("remembering").Scaled
    counts = []
    for _ in range(2):
        with capture_mode():
            module, x = kind(8, 8), torch.ones(2, 8)
        counts.append(len(capture(module, (x,), None, StepSpec(dtype="fp32")).nodes))
        ran = kind(8, 8)(torch.ones(2, 8))  # remembers tensors that have data
        assert type(ran) is torch.Tensor and ran.isfinite()
    assert counts[0] == counts[1]
    del sys.modules["remembering"]
