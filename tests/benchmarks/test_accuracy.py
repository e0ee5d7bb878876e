"""The page of accuracy: what is generated stands between its markers, and says what the rows say."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = {
    "accuracy.md": ("summary", "believe"),
    "accuracy/steps.md": ("families", "plots", "kinds"),
    "accuracy/intervals.md": ("intervals",),
}


@pytest.fixture(scope="module")
def accuracy() -> Any:
    pytest.importorskip("matplotlib", reason="needs the [report] extra")
    spec = importlib.util.spec_from_file_location("accuracy", ROOT / "benchmarks" / "accuracy.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(name: str, measured: float, **other: Any) -> dict[str, Any]:
    predicted = other.pop("predicted_s", 1.0)
    return {
        "id": name, "family": name.split("-")[0], "measured_s": measured, "predicted_s": predicted,
        "error": predicted / measured - 1, "durations_interval_s": [0.9, 1.1], "work": {"matrix products": 1.0},
        "unsaid": 0.0, "device": "a100", "stack": "nemo", "gpus": 8, "in_interval": None, **other,
    }  # fmt: skip


def test_the_page_is_made_from_results(accuracy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(f"one-{n}", 1.0 + n / 50) for n in range(5)]
    rows += [row(f"two-{n}", 1.25, gpus=128, experts=n == 3) for n in range(4)]
    skipped = {"id": "two-9", "family": "two", "error": None, "work": {}}
    families = {"one": {"peers": {"calculon": {"mean_abs_error": 0.125}}}, "two": {"peers": {}}}
    result, again = tmp_path / "result.json", tmp_path / "again.json"
    result.write_text(json.dumps({"rows": [*rows, skipped], "families": families}))
    again.write_text(json.dumps({"rows": [row("one-4", 2.0)], "families": {}}))
    pages = {name: tmp_path / name for name in PARTS}
    (tmp_path / "accuracy").mkdir()
    for name, parts in PARTS.items():
        old = "".join(f"<!-- {part} -->\nold\n<!-- end {part} -->\nkept\n" for part in parts)
        pages[name].write_text(f"by hand\n{old}")
    monkeypatch.setattr(
        sys, "argv", ["accuracy", str(result), str(again), "--page", str(tmp_path / "accuracy.md")]
    )
    accuracy.main()
    texts = {name: page.read_text() for name, page in pages.items()}
    for name, parts in PARTS.items():
        text = texts[name]
        assert text.startswith("by hand\n") and text.count("kept\n") == len(parts) and "old" not in text
    mean = (0 + 1 / 51 + 1 / 26 + 3 / 53 + 0.5) / 5
    front, steps, intervals = texts.values()
    assert f"| one (`one`) | 5 | {100 * mean:.1f} % |" in front and "12.5 %" in front
    assert f"| mean over families | 9 | {50 * (mean + 0.2):.1f} % |" in front
    assert "| a100 | nemo | " in front and " | 20 % (4) |" in front
    assert f"| one:  | 5 | 5 | {100 * mean:.1f} % |" in steps and "12.5 %" in steps
    assert "| two:  | 4 | 5 | 20.0 % | 20.0 % | -20.0 % |" in steps
    assert "| two, dense | 3 | 3 | 20.0 % |" in steps and "| two, with experts | 1 | 1 |" in steps
    assert "| one, dense |" not in steps
    assert "| stack: nemo | 9 | 2 |" in steps and "| GPUs: 65 to 512 | 4 | 1 | 20.0 % |" in steps
    assert "(one.png)" in steps
    assert "| all families | 9 |" in intervals
    plots = tmp_path / "accuracy"
    assert {path.name for path in plots.glob("*.png")} == {"one.png", "two.png"}
    first = (plots / "one.png").read_bytes()
    accuracy.main()
    assert {name: page.read_text() for name, page in pages.items()} == texts
    assert (plots / "one.png").read_bytes() == first


def test_a_page_without_markers_is_refused(accuracy: Any) -> None:
    from echograph.errors import DataError

    with pytest.raises(DataError, match="<!-- families -->"):
        accuracy.replace_part("text", "families", "")


@pytest.mark.parametrize("page", PARTS)
def test_the_pages_that_ship_have_all_markers(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    for name in PARTS[page]:
        assert text.count(f"<!-- {name} -->") == text.count(f"<!-- end {name} -->") == 1
