"""The page of a job's traces holds the whole picture, and says what is missing."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from html_pages import Page
from small_traces import job, launched, operator, step

from echograph.profiler.analyses import ANALYSES
from echograph.profiler.page.frame import notes
from echograph.profiler.page.plots import PLOTS, draw
from echograph.profiler.page.report import SECTIONS, page_of, report
from echograph.profiler.traces import TraceSet, read_traces

NEED_A_FILE = {"memory-categories", "execution-trace"}


@pytest.fixture(scope="module")
def dlrm(measured_data: Path) -> TraceSet:
    return read_traces(measured_data / "traces" / "dlrm-v100-8-ranks")


def test_the_whole_picture_of_eight_ranks(dlrm: TraceSet) -> None:
    text = report(dlrm, "Traces of dlrm")
    page = Page(text)
    assert len(text) < 2 << 20
    assert "http" not in text
    assert not page.all("link") and not [a for a in page.all("script") if "src" in a]
    titles = page.texts("h2")
    assert titles[0] == "Timeline"
    assert {section.title for section in SECTIONS if not section.of} <= set(titles)
    drawn = page.texts("h3")
    assert {"temporal-breakdown", "kernels", "stragglers", "critical-path", "queue-length"} <= set(drawn)
    (row,) = [row for row in ANALYSES["temporal-breakdown"](dlrm).records() if row["rank"] == 3]
    assert f"{row['kernel_time(us)']:,.2f}".rstrip("0").rstrip(".") in text


def test_every_analysis_has_a_plot(dlrm: TraceSet) -> None:
    dlrm = TraceSet({rank: dlrm[rank] for rank in (0, 1)})
    assert {*PLOTS, *(name for section in SECTIONS for name in section.analyses)} <= set(ANALYSES)
    for name in sorted(set(ANALYSES) - NEED_A_FILE):
        options = {"operator": "aten::"} if name == "kernel-sequences" else {}
        options |= {"test_rank": 1} if name == "trace-diff" else {}
        table = ANALYSES[name](dlrm, **options)
        drawn = Page(draw(name, table))
        assert bool(drawn.all("svg") or drawn.all("table", "heat")) == bool(len(table)), name
        page = Page(page_of(name, table, name))
        assert name in page.texts("h1")[0]


def test_without_devices_or_events_the_page_says_so(tmp_path: Path) -> None:
    host = [step(1, 0, 10), operator("aten::mm", 1, 2)]
    text = report(job(tmp_path, host), "host alone")
    assert "rank 0: nothing ran on a device" in text
    assert "needs two ranks" in text
    assert "What is missing" in Page(report(job(tmp_path / "none", []), "nothing")).texts("h2")
    many = report(job(tmp_path / "many", *([operator("aten::mm", 0, 1)] for _ in range(17))), "many")
    assert "critical path: of the first 16 of 17 ranks" in many


def test_an_analysis_that_fails_is_a_line_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traces = job(tmp_path, [operator("a<b>", 0, 10), *launched("k", 1, 4, 1, 1)])
    (tmp_path / "rank0.json").unlink()
    monkeypatch.setattr("echograph.profiler.page.report._MOST_EVENTS", 1)
    text = report(traces, "<title>")
    assert report(traces, "<title>") == text
    page = Page(text)
    (missing,) = page.texts("ul")
    assert "3 events are too many for a critical path" in missing
    assert "memory-timeline: " in missing and "rank0.json: No such file" in missing
    assert page.texts("h1") == ["<title>"]
    assert "temporal-breakdown" in page.texts("h3")


def test_what_several_ranks_lack_is_said_once() -> None:
    said = ["rank 0: no <x>", "other", "rank 3: no <x>", "rank 0: no <x>", "rank 1: no y"]
    assert Page(notes(said)).texts("li") == ["ranks 0, 3: no <x>", "other", "rank 1: no y"]
    assert notes([]) == ""


# What a reader does: points at every lane in the middle, then zooms in twice and moves to the left.
READER = """<script>setTimeout(() => {
  const box = document.getElementById("timeline"), canvas = box.querySelector("canvas");
  const place = canvas.getBoundingClientRect(), seen = new Set();
  for (let y = 0; y < place.height; y += 5) {
    const at = { clientX: place.left + place.width * 0.6, clientY: place.top + y, pointerId: 1 };
    canvas.dispatchEvent(new PointerEvent("pointermove", at));
    seen.add(box.querySelector(".told").textContent);
  }
  const list = document.createElement("ol");
  for (const told of seen) list.appendChild(document.createElement("li")).textContent = told;
  document.body.appendChild(list);
  const more = box.querySelector("[data-zoom='0.5']");
  more.click();
  more.click();
  box.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowLeft" }));
}, 500)</script>"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_browser_draws_the_timeline(dlrm: TraceSet, tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    target.write_text(report(dlrm, "dlrm").replace("</body>", f"{READER}</body>"))
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=4000", "--dump-dom"]
    done = subprocess.run(
        ["chromium", *flags, f"--user-data-dir={tmp_path / 'profile'}", target.as_uri()],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    page = Page(done.stdout)
    (canvas,) = page.all("canvas")
    assert int(canvas["width"] or 0) > 300
    assert int(canvas["height"] or 0) > 8 * 60
    (where,) = ["".join(text) for _, a, text in page.found if a.get("class") == "where"]
    # A quarter of the whole around its middle, and a fifth of that quarter to the left.
    whole_ms = max(int(trace.end.max()) for trace in dlrm.values()) / 1e9
    assert where == f"{(0.375 - 0.05) * whole_ms:.3f} ms to {(0.625 - 0.05) * whole_ms:.2f} ms"
    told = page.texts("ol")[0]
    for rank in range(8):
        assert f"rank {rank}, thread 5981{rank + 1}" in told
    steps = ANALYSES["steps"](dlrm).records()
    assert f"rank 3, thread 59814, at {steps[3]['ts']:.1f} us for {steps[3]['dur'] / 1e3:.2f} ms" in told


def test_tables_can_be_sorted_and_searched() -> None:
    from echograph.profiler.analyses.table import from_rows
    from echograph.profiler.page.report import page_of

    text = page_of("mine", from_rows(("name", "sum (us)"), [("gemm", 2.0), ("add", 1.0)]), "mine")
    page = Page(text)
    # What the script looks for: titles in a head of their own, all else in one body.
    assert page.all("table", "answer") and len(page.all("thead")) == len(page.all("tbody")) == 1
    assert [title.strip() for title in page.texts("th")] == ["name", "sum (us)"]
    assert "table.answer" in text and 'type = "search"' in text


# Searches for words, then sorts by the second title, twice; says after each what the rows shown begin with.
CLICKS = """<script>addEventListener("load", () => {
  const table = document.querySelector("table.answer"), box = document.querySelector(".search input");
  const said = document.createElement("pre");
  const shown = () => [...table.tBodies[0].rows].filter((row) => !row.hidden);
  const tell = () => said.append(shown().map((row) => row.cells[0].textContent), ";");
  const click = () => { table.tHead.rows[0].cells[1].querySelector("button").click(); tell(); };
  box.value = "mm BF16"; box.dispatchEvent(new Event("input")); tell();
  box.value = ""; box.dispatchEvent(new Event("input")); click(); click();
  document.body.append(said);
})</script>"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_browser_sorts_and_searches_tables(tmp_path: Path) -> None:
    from echograph.profiler.analyses.table import from_rows
    from echograph.profiler.page.report import page_of

    rows = [(f"k{n}", value, "") for n, value in enumerate((3.0, None, 1200.5, 40.0, 5.0, 6.0, 7.0))]
    table = from_rows(("name", "sum (us)", "types"), [*rows, ("addmm", 1.0, "bf16"), ("mm", 2.0, "fp32")])
    target = tmp_path / "page.html"
    target.write_text(page_of("mine", table, "mine").replace("</body>", f"{CLICKS}</body>"))
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=4000", "--dump-dom"]
    done = subprocess.run(
        ["chromium", *flags, f"--user-data-dir={tmp_path / 'profile'}", target.as_uri()],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    searched, largest, least = Page(done.stdout).texts("pre")[0].split(";")[:3]
    assert searched == "addmm"
    # By their numbers, not by their text; what has none is last both ways.
    assert largest == "k2,k3,k6,k5,k4,k0,mm,addmm,k1"
    assert least == "addmm,mm,k0,k4,k5,k6,k3,k2,k1"
