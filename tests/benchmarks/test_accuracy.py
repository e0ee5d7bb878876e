"""The page of accuracy: what is generated stands between its markers, and says what the rows say."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FORM = ("families", "plots", "intervals", "believe")


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
    page = tmp_path / "page.md"
    page.write_text("by hand\n" + "".join(f"<!-- {n} -->\nold\n<!-- end {n} -->\nkept\n" for n in FORM))
    monkeypatch.setattr(sys, "argv", ["accuracy", str(result), str(again), "--page", str(page)])
    accuracy.main()
    text = page.read_text()
    assert text.startswith("by hand\n") and text.count("kept\n") == 4 and "old" not in text
    mean = (0 + 1 / 51 + 1 / 26 + 3 / 53 + 0.5) / 5
    assert f"| one:  | 5 | 5 | {100 * mean:.1f} % |" in text and "12.5 %" in text
    assert "| two:  | 4 | 5 | 20.0 % | 20.0 % | -20.0 % |" in text
    assert "| two, dense | 3 | 3 | 20.0 % |" in text and "| two, with experts | 1 | 1 |" in text
    assert "| one, dense |" not in text
    assert "| stack: nemo | 9 | 2 |" in text and "| GPUs: 65 to 512 | 4 | 1 | 20.0 % |" in text
    assert "| all families | 9 |" in text
    assert "(page/one.png)" in text
    assert {path.name for path in (tmp_path / "page").iterdir()} == {"one.png", "two.png"}
    first = (tmp_path / "page" / "one.png").read_bytes()
    accuracy.main()
    assert page.read_text() == text and (tmp_path / "page" / "one.png").read_bytes() == first


def test_a_page_without_markers_is_refused(accuracy: Any) -> None:
    from echograph.errors import DataError

    with pytest.raises(DataError, match="<!-- families -->"):
        accuracy.replace_part("text", "families", "")


def test_the_page_that_ships_has_all_markers() -> None:
    text = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    for name in FORM:
        assert text.count(f"<!-- {name} -->") == text.count(f"<!-- end {name} -->") == 1
