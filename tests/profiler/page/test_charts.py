"""Charts show numbers where they belong: read back from the SVG."""

from __future__ import annotations

import numpy as np
import pytest
from html_pages import Page, share
from hypothesis import given
from hypothesis import strategies as st

from echograph.profiler.page import charts

positive = st.floats(1e-3, 1e9)


@given(st.lists(st.tuples(positive, positive), min_size=1, max_size=8))
def test_parts_of_bars_stand_one_after_another_to_scale(values: list[tuple[float, float]]) -> None:
    page = Page(charts.bars([(f"row {i}", pair) for i, pair in enumerate(values)], ["a", "b"]))
    longest = max(map(sum, values))
    for (first, second), a, b in zip(values, *_parts_by_row(page, len(values)), strict=True):
        assert share(a, "width") == pytest.approx(100 * first / longest, abs=2e-3)
        assert share(b, "x") == pytest.approx(share(a, "x") + share(a, "width"), abs=2e-3)
        assert share(b, "width") == pytest.approx(100 * second / longest, abs=2e-3)


def _parts_by_row(page: Page, rows: int) -> tuple[list[dict[str, str | None]], list[dict[str, str | None]]]:
    drawn = page.all("rect", "f0"), page.all("rect", "f1")
    assert [len(parts) for parts in drawn] == [rows, rows]
    return drawn


def test_negative_bars_go_to_the_left() -> None:
    down, up = Page(charts.bars([("less", [-1.0]), ("more", [3.0])], ["change"])).all("rect", "f0")
    assert (share(down, "x"), share(down, "width")) == (0, 25)
    assert (share(up, "x"), share(up, "width")) == (25, 75)


def test_percents_are_of_a_hundred() -> None:
    (bar,) = Page(charts.bars([("rank 0", [25.0])], ["share"], "%")).all("rect", "f0")
    assert share(bar, "width") == 25


def test_labels_are_text() -> None:
    page = Page(charts.bars([("<b>&", [1.0])], ["<i>", "x"][:1]))
    assert "<b>&<b>&" in page.texts("text")[0]
    assert not page.all("b")


@given(st.lists(positive, min_size=1, max_size=5000))
def test_the_highest_value_of_a_line_reaches_the_top(values: list[float]) -> None:
    x = np.arange(len(values), dtype=np.float64)
    page = Page(charts.lines({"a": (x, np.array(values))}, "us", ""))
    (line,) = page.all("polyline")
    places = [tuple(map(float, point.split(","))) for point in (line["points"] or "").split()]
    assert min(y for _, y in places) == pytest.approx(0, abs=1e-6)
    assert len(places) <= 1300
    assert all(0 <= a <= 600 for a, _ in places)
    assert [a for a, _ in places] == sorted(a for a, _ in places)


def test_of_many_values_no_peak_is_lost() -> None:
    values = np.zeros(100_000)
    values[12_345] = 7
    page = Page(charts.lines({"a": (np.arange(100_000.0), values)}, "us", ""))
    points = (page.all("polyline")[0]["points"] or "").split()
    high = [float(p.split(",")[0]) for p in points if float(p.split(",")[1]) == 0]
    assert len(high) == 1
    assert high[0] == pytest.approx(600 * 0.12345, abs=1)


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=300))
def test_a_histogram_counts_every_value(values: list[float]) -> None:
    page = Page(charts.histogram(np.array(values), "us"))
    if not any(values):
        assert f"{len(values)}" in "".join(page.texts("text"))
        return
    counted = [int(text.rpartition(": ")[2].replace(",", "")) for text in page.texts("title")]
    assert sum(counted) == len(values)


def test_a_range_has_its_median_within_its_box() -> None:
    page = Page(charts.ranges([("k", [1.0, 2.0, 4.0, 6.0, 8.0]), ("none", [np.nan] * 5)], "us"))
    ((line, box, middle),) = zip(*(page.all("rect", f"f{c}") for c in (8, 0, 1)), strict=True)
    assert share(line, "x") <= share(box, "x") <= share(middle, "x") <= share(box, "x") + share(box, "width")
    assert share(middle, "x") == pytest.approx(98 * 4 / 8)


def test_points_are_logarithmic() -> None:
    named = [("a", 1.0, 10.0), ("b", 10.0, 100.0), ("c", 100.0, 1000.0), ("no", 0.0, 5.0)]
    places = Page(charts.points(named, "", "")).all("circle")
    assert [share(p, "cx") for p in places] == pytest.approx([1, 50, 99])
    assert [float(p["cy"] or 0) for p in places] == pytest.approx([144, 81, 18])


def test_numbers_between_the_ends_of_an_axis_have_room() -> None:
    places = [8.0, 9.0, 16.0, 32.0, 62.0, 64.0]
    drawn = Page(charts.curves({"a": charts.Curve(places, places, places, places)}, "GPUs", "s"))
    middle = [a["x"] for tag, a, _ in drawn.found if tag == "text" and a.get("text-anchor") == "middle"]
    assert middle == ["14.29%", "42.86%"]
