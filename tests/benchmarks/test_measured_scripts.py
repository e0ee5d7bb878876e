"""Scripts of others against what their authors measured: rows, and what is printed of them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

TRAIN = """import sys
import torch

model = torch.nn.Linear(64, int(sys.argv[1])).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2]))
    return importlib.import_module("benchmarks.measured_scripts")


def row(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": name, "repository": "of/small", "ranks": 1, "script": "train.py", "arguments": ["64"],
        "cluster": "dgx-h100", "step-s": 1.0, "peak-gib": 1.0, **changes,
    }  # fmt: skip


def test_each_row_says_what_was_measured_and_where(measured: Any) -> None:
    rows = measured.scripts(measured.ROWS.read_text())
    assert len({each["name"] for each in rows}) == len(rows) > 10
    for each in rows:
        assert each["step-s"] > 0 and each["peak-gib"] > 0 and len(each["commit"]) == 40
        assert measured.ROWS.with_name(each["cluster"]).is_file()


@pytest.mark.slow
def test_captured_scripts_are_compared_and_others_end_in_their_line(
    measured: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "train.py").write_text(TRAIN)
    rows = [row("small"), row("without an argument", arguments=[])]
    (found,) = measured.comparisons(rows, tmp_path)
    assert "without an argument: " in capsys.readouterr().out
    assert 0 < found.predicted_s < 1 and found.step_error == found.predicted_s - 1 and not found.is_held
    assert (tmp_path / "graphs" / "small.pb").is_file()
    last = measured.table([found]).splitlines()[-1]
    assert last.startswith("Mean error of 1 steps: ") and "0 of them in the 90 % interval" in last
