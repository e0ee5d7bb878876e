"""The page of two runs, and what a reader does on pages by clicking."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from html_pages import Page
from small_traces import job, launched, step

from echograph.errors import EchoError
from echograph.profiler.analyses.table import from_rows
from echograph.profiler.page.comparison import comparison
from echograph.profiler.page.plots import draw
from echograph.profiler.page.report import page_of
from echograph.profiler.traces import TraceSet

LONG = "void cutlass::" + "x" * 150 + "<end>"


@pytest.fixture
def run(tmp_path: Path) -> TraceSet:
    ranks = [[step(1, 0, 100), *launched(LONG, 5, 10, 30 + 10 * rank, 1)] for rank in range(3)]
    return job(tmp_path / "run", *ranks)


@pytest.fixture
def other(tmp_path: Path) -> TraceSet:
    return job(tmp_path / "other", [step(1, 0, 80), *launched("gemm", 5, 10, 20, 1)])


def test_two_runs_on_one_page(run: TraceSet, other: TraceSet) -> None:
    text = comparison(run, other, "a <b> against c")
    page = Page(text)
    assert page.texts("h1") == ["a <b> against c"]
    assert {"kernels", "steps", "rank-times", "What each rank's time is spent on"} <= set(page.texts("h2"))
    assert "http" not in text
    assert page.texts("h3") == ["the run", "against"]
    tiles = ["".join(said) for _, a, said in page.found if a.get("class") == "tile"]
    assert tiles[0] == "100 usa step, 80 us against"
    assert tiles[1] == "+20 usdifference of a step"
    # A long name is whole in its cell, and told when it is pointed at.
    assert LONG in [cell["title"] for cell in page.all("td") if "title" in cell]
    assert "communication: the traces are too large" not in text


def test_one_analysis_of_two_runs_and_one_that_cannot_be_made(run: TraceSet, other: TraceSet) -> None:
    page = Page(comparison(run, other, "t", ["kernels"]))
    assert page.texts("h2") == ["To look at", "kernels"]
    with pytest.raises(EchoError, match="no two runs side by side"):
        comparison(run, other, "t", ["launches"])


def test_large_traces_leave_out_what_takes_minutes(
    run: TraceSet, other: TraceSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echograph.profiler.page.comparison._MOST_EVENTS", 1)
    page = Page(comparison(run, other, "t"))
    assert "shapes: the traces are too large for this page: ask by name" in page.texts("li")
    assert "shapes" not in page.texts("h2")


def test_a_heat_map_of_many_ranks_says_how_many_are_left_out() -> None:
    titles = (
        "rank",
        "computation(us)",
        "overlapped(us)",
        "communication(us)",
        "memory(us)",
        "idle(us)",
        "whole(us)",
    )
    rows = [(rank, 90.0 + (rank == 3), 0.0, 0.0, 0.0, 10.0 - (rank == 3), 100.0) for rank in range(200)]
    text = draw("rank-times", from_rows(titles, rows))
    page = Page(text)
    assert len(page.all("tr")) == 1 + 128
    assert "The first 128 of 200 ranks." in page.texts("p")
    colours = [cell["style"] for cell in page.all("td")]
    # One microsecond more than the others of 2 (2 % of the whole) takes half of the colour, not all.
    assert "32%" in str(colours[3 * 6]) and "5%" in str(colours[0])


# Chooses a kind, then one that changed, clicks a long name, and compares two ranks; says what is seen after each.
CLICKS = """<script>addEventListener("load", () => {
  const said = document.createElement("pre"), table = document.querySelector("table.answer");
  const rows = () => [...table.tBodies[0].rows].filter((row) => !row.hidden);
  const shown = () => rows().map((row) => row.cells[0].textContent);
  const lists = [...document.querySelectorAll(".search select")];
  const tell = (what) => said.append(what, ";");
  tell(lists.map((list) => list.options[0].textContent));
  const choose = (list, at) => { list.selectedIndex = at; list.dispatchEvent(new Event("change")); };
  choose(lists[0], 2); tell(shown()); choose(lists[1], 1); tell(shown());
  tell(document.querySelector(".search span").textContent);
  choose(lists[0], 0); choose(lists[1], 0); tell(shown().length);
  const cell = table.querySelector("td[title]"); cell.click(); tell(cell.className);
  document.body.append(said);
})</script>"""


def browser(page: str, folder: Path) -> Page:
    """What a browser has made of a page."""
    target = folder / "page.html"
    target.write_text(page)
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=4000", "--dump-dom"]
    flags += ["--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}"]
    done = subprocess.run(
        ["chromium", *flags, target.as_uri()], capture_output=True, text=True, check=True, timeout=120
    )
    assert "CONSOLE" not in done.stderr
    return Page(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_browser_filters_tables_and_shows_long_names(tmp_path: Path) -> None:
    rows = [
        (f"k{n}", "COMPUTATION" if n % 2 else "MEMORY", float(n), "new" if n < 4 else "gone") for n in range(8)
    ]
    rows.append((LONG, "MEMORY", 9.0, "gone"))
    table = from_rows(("name", "kernel_type", "sum (us)", "change"), rows)
    page = browser(page_of("mine", table, "mine").replace("</body>", f"{CLICKS}</body>"), tmp_path)
    lists, of_kind, changed, told, all_rows, long = page.texts("pre")[0].split(";")[:6]
    assert lists == "kernel_type: all,change: all"
    assert of_kind == "k1,k3,k5,k7"
    assert changed == "k1,k3"
    assert told == "2 of 9 rows"
    assert all_rows == "9"
    assert long == "text whole"


COMPARES = """<script>addEventListener("load", () => {
  const table = document.querySelector("table.compare"), said = document.createElement("pre");
  const tell = () => said.append(table.tFoot.rows[0].hidden ? "none" : table.tFoot.rows[0].textContent, ";");
  const click = (row) => { table.rows[row].querySelector("button").click(); tell(); };
  tell(); click(1); click(3); click(2); click(2);
  document.body.append(said);
})</script>"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_browser_compares_the_ranks_that_are_clicked(run: TraceSet, other: TraceSet, tmp_path: Path) -> None:
    page = browser(comparison(run, other, "t").replace("</body>", f"{COMPARES}</body>"), tmp_path)
    none, one, two, last, back = page.texts("pre")[0].split(";")[:5]
    assert none == one == back == "none"
    assert two == "rank 2 less rank 0+20.00 us0.00 us0.00 us0.00 us0.00 us+20.00 us"
    assert last.startswith("rank 1 less rank 2-10.00 us")
