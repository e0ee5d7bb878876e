"""Two predictions on one page, and pages compared like the JSON that stands in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from html_pages import Page, element, rows


@pytest.fixture
def results(cli: Any, graph: Path, tmp_path: Path) -> tuple[Path, Path, Path]:
    """JSON and page of one prediction, and the JSON of another."""
    plain, page, other = tmp_path / "a.json", tmp_path / "a.html", tmp_path / "b.json"
    assert cli("echosim", "run", graph, "--gpus", 8, "-o", plain, "--html", page).status == 0
    others = ("--tp", 2, "--cluster", "dgx-h200")
    assert cli("echosim", "run", graph, "--gpus", 8, *others, "-o", other).status == 0
    return plain, page, other


def test_a_page_is_compared_as_its_json(cli: Any, results: tuple[Path, Path, Path]) -> None:
    plain, page, other = results
    assert cli("echosim", "compare", plain, other).out == cli("echosim", "compare", page, other).out
    same = cli("echosim", "compare", plain, page, "--json").json()
    assert not same["plan"]
    assert all(row["difference"] == 0 for row in same["figures"].values())


def test_the_page_of_two_shows_what_differs(cli: Any, results: tuple[Path, Path, Path], tmp_path: Path) -> None:
    plain, _, other = results
    path = tmp_path / "both.html"
    record = cli("echosim", "compare", plain, other, "--html", path, "--json").json()
    text = path.read_text()
    page = Page(text)
    assert element(text, "comparison") == record
    assert page.texts("h1") == ["a against b"]
    step = record["figures"]["step_time_s"]
    assert f"{100 * (step['ratio'] - 1):+.1f} %" in page.texts("b")
    set_otherwise = rows(text, "What is set otherwise")
    assert ["tp", "1", "2"] in set_otherwise
    assert [row[0] for row in set_otherwise].count("cluster") == 1
    shown = rows(text, "Where the step goes")
    assert len(shown) == len(record["figures"])
    for row, figure in zip(shown, record["figures"].values(), strict=True):
        assert row[-1] == ("–" if figure["ratio"] is None else f"{figure['ratio']:.3f}")
    parts = [v["difference"] for k, v in record["figures"].items() if k in ("compute", "host", "bubble", "wait")]
    parts += [v["difference"] for k, v in record["figures"].items() if k.startswith("exposed ")]
    assert sum(parts) == pytest.approx(step["difference"])
    assert len(text) < 10**5


def test_what_is_no_result_is_refused(cli: Any, results: tuple[Path, Path, Path], tmp_path: Path) -> None:
    other = tmp_path / "x.html"
    other.write_text("<!doctype html>\n<html><body>no data</body></html>")
    outcome = cli("echosim", "compare", results[0], other)
    assert outcome.status == 1
    assert "is no result" in outcome.err
    outcome = cli("echosim", "compare", *results[:2], "--html", results[1])
    assert outcome.status == 2
    assert "give another file" in outcome.err
