"""What operations take, against another run and by category: by hand, and against Python's own statistics."""

from __future__ import annotations

import statistics as python_statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiled_jobs import BW_A, BW_B, FW_A, FW_B, OTHERS, PARTS, STEP, byteprofile, complete, write

from echograph.errors import DataError, OutputError
from echograph.profiler.byteprofile.reader import columns_of, events_of, find_job
from echograph.profiler.byteprofile.report import (
    category_table,
    compared_operations,
    draw_settings,
    mapping,
    settings_of,
    settings_table,
    statistics,
    statistics_table,
)

MS = 1e-3  # of a microsecond


def rows(path: Path, **options: object) -> dict[str, dict[str, object]]:
    table = statistics_table(statistics(find_job(path).events()), **options)  # type: ignore[arg-type]
    return {row.pop("name"): row for row in table.records()}


def test_each_name_is_counted_in_milliseconds(worker: Path) -> None:
    found = rows(worker / "0")
    average = sum(FW_A) / 2
    assert found["FW.a"] == {
        "count": 2,
        "total_ms": pytest.approx(sum(FW_A) * MS),
        "min_ms": pytest.approx(FW_A[0] * MS),
        "max_ms": pytest.approx(FW_A[1] * MS),
        "avg_ms": pytest.approx(average * MS),
        "variance_ms2": pytest.approx(((FW_A[0] - average) ** 2 + (FW_A[1] - average) ** 2) / 2 * MS**2),
    }
    for part, dur in OTHERS.items():
        for partition in ("8", "9"):
            assert found[f"Comm.wb.{part}.{partition}"]["avg_ms"] == pytest.approx(dur * MS)
            assert found[f"Comm.wb.{part}.{partition}"]["variance_ms2"] == 0
    assert found["Comm.wb"]["avg_ms"] == pytest.approx((2 * sum(OTHERS.values()) + 15) * MS)
    assert len(found) == 5 + 3 * len(OTHERS) + 2


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 10**7)), min_size=1, max_size=40))
def test_python_says_the_same(events: list[tuple[str, int]]) -> None:
    written = [complete(f"FW.{name}", at, dur, "operator") for at, (name, dur) in enumerate(events)]
    found = statistics(columns_of(Path("t"), written, []))
    expected: dict[str, list[float]] = {}
    for name, dur in events:
        expected.setdefault(f"FW.{name}", []).append(dur * MS)
    for row in statistics_table(found).records():
        values = expected.pop(row["name"])
        assert row["count"] == len(values)
        assert row["total_ms"] == pytest.approx(sum(values))
        assert (row["min_ms"], row["max_ms"]) == (pytest.approx(min(values)), pytest.approx(max(values)))
        assert row["avg_ms"] == pytest.approx(python_statistics.fmean(values))
        assert row["variance_ms2"] == pytest.approx(python_statistics.pvariance(values), rel=1e-9, abs=1e-9)
    assert not expected


def test_sort_puts_the_largest_average_first_and_head_cuts(worker: Path) -> None:
    unsorted, ordered = list(rows(worker / "1")), list(rows(worker / "1", sort=True))
    assert unsorted[:5] == ["FW.a", "FW.b", "BW.b", "BW.a", "STEP"]
    # 261, 138, 110, 80, 60, ...; of equals, the one that is first in the file.
    assert ordered[:7] == ["Comm.wb", "Comm.wa", "FW.a", "BW.a", "BW.b", "FW.b", "Comm.wb.PULL.8"]
    assert sorted(ordered) == sorted(unsorted)
    assert list(rows(worker / "1", sort=True, head=2)) == ["Comm.wb", "Comm.wa"]


def test_categories_name_their_largest(worker: Path) -> None:
    found = category_table(statistics(find_job(worker / "1").events())).records()
    assert [(row["category"], row["operation"]) for row in found] == [
        ("FW", "FW.a"), ("BW", "BW.a"), ("STEP", "STEP"), ("Comm", "Comm.wb"),
    ]  # fmt: skip
    expected = [sum(FW_A) / 2, BW_A, STEP, 2 * sum(PARTS.values()) + 15]
    assert [row["avg_ms"] for row in found] == pytest.approx([dur * MS for dur in expected])


def test_compare_gives_the_difference_of_averages(tmp_path: Path, worker: Path) -> None:
    slower = byteprofile(tmp_path / "slower", slower=44)
    runs = [statistics(find_job(path).events()) for path in (worker, slower)]
    found = compared_operations(*runs, sort=True).records()
    first = sum(FW_A) / 2 * MS
    assert found[0] == {
        "name": "rank1.FW.a",
        "avg1_ms": pytest.approx(first),
        "avg2_ms": pytest.approx(first + 44 * MS),
        "difference_ms": pytest.approx(44 * MS),
        "relative": pytest.approx(44 * MS / first),
    }
    assert all(row["difference_ms"] == 0 for row in found[1:])
    assert len(compared_operations(*runs, head=3)) == 3
    assert compared_operations(*runs).records()[0]["name"] == "rank0.FW.a"


def test_compare_leaves_out_what_one_run_lacks(tmp_path: Path) -> None:
    traces = (("FW.a", "FW.b", "FW.zero"), ("FW.b", "FW.c", "FW.zero"))
    durations = {"FW.a": 1, "FW.b": 2, "FW.c": 3, "FW.zero": 0}
    runs = [
        statistics(
            events_of(write(tmp_path / f"{i}.json", [complete(n, 0, durations[n], "operator") for n in names]))
        )
        for i, names in enumerate(traces)
    ]
    table = compared_operations(*runs, sort=True)
    assert [(row["name"], row["relative"]) for row in table.records()] == [("FW.b", 0), ("FW.zero", None)]
    assert table.notes == ("1 names are only in the first and 1 only in the second",)
    with pytest.raises(DataError, match="no name is in both"):
        compared_operations(
            runs[0], statistics(events_of(write(tmp_path / "o.json", [complete("BW.z", 0, 1, "operator")])))
        )


def test_settings_are_compared_by_category_on_the_first_gpu(job: Path, tmp_path: Path) -> None:
    slower = byteprofile(tmp_path / "slower")
    # Only the second GPU of that worker would be slower; the first is looked at.
    table = settings_table(settings_of([find_job(job), find_job(slower)]))
    found = {(row["setting"], row["worker"], row["category"]): row for row in table.records()}
    assert {(Path(name).name, worker) for name, worker, _ in found} == {("job", 0), ("job", 1), ("slower", 0)}
    total = sum(OTHERS.values())
    # Partitions are one: two gradients with five parts each, and their totals.
    comm = [*OTHERS.values(), *OTHERS.values(), 2 * total + 15, total + 15]
    for (_, _, category), row in found.items():
        expected = {"FW": [sum(FW_A) / 2, FW_B], "BW": [BW_A, BW_B], "STEP": [STEP], "Comm": comm}[category]
        assert row["operations"] == len(expected)
        assert row["mean_ms"] == pytest.approx(sum(expected) / len(expected) * MS)


def test_the_chart_is_drawn_the_same_each_time(job: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the [report] extra")
    found = settings_of([find_job(job)])
    draw_settings(found, tmp_path / "a.svg")
    draw_settings(found, tmp_path / "b.svg")
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    # A bar for each of the 2 x 17 operations, a patch for each of 4 categories in the legend.
    assert {category for category in ("FW", "BW", "Comm", "STEP") if f"<!-- {category} -->" in text} == {
        "FW", "BW", "Comm", "STEP",
    }  # fmt: skip
    with pytest.raises(OutputError, match=r"give one of \.png"):
        draw_settings(found, tmp_path / "a.bmp")


def test_kernels_belong_to_the_operator_that_they_ran_within(tmp_path: Path) -> None:
    operators = [complete(name, ts, dur, "operator") for name, ts, dur in (
        ("FW.a", 0, 10), ("FW.b", 10, 10), ("FW.a", 100, 10), ("Comm.w", 0, 500),
    )]  # fmt: skip
    kernels = [complete(name, ts, dur, "kernel") for name, ts, dur in (
        ("gemm", 1, 4), ("relu", 6, 2), ("gemm", 104, 4), ("relu", 8, 5), ("gemm", 16, 9), ("late", 300, 1),
    )]  # fmt: skip
    table = mapping(
        events_of(write(tmp_path / "o.json", operators)), events_of(write(tmp_path / "k.json", kernels))
    )
    # relu at 8 to 13 is more of FW.b; gemm at 16 to 25 is not half within FW.b (4 of 9).
    assert table.records() == [
        {"operator": "FW.a", "kernel": "gemm", "count": 2, "total_ms": 8 * MS, "per_operator": 1.0},
        {"operator": "FW.a", "kernel": "relu", "count": 1, "total_ms": 2 * MS, "per_operator": 0.5},
        {"operator": "FW.b", "kernel": "relu", "count": 1, "total_ms": 5 * MS, "per_operator": 1.0},
    ]
    assert table.notes == ("2 of 6 kernels ran outside all operators",)


def test_an_offset_moves_kernels_and_an_operator_around_others_is_found(tmp_path: Path) -> None:
    operators = [complete("FW.long", 0, 100, "operator"), complete("FW.short", 50, 1, "operator")]
    kernels = [complete("gemm", 1060, 4, "kernel"), complete("aten::mm", 1060, 4, "cpu_op")]
    read = [
        events_of(write(tmp_path / name, events)) for name, events in (("o.json", operators), ("k.json", kernels))
    ]
    (row,) = mapping(*read, offset=-1000 * 10**6).records()
    assert (row["operator"], row["kernel"], row["count"]) == ("FW.long", "gemm", 1)
    assert not len(mapping(*read))
    with pytest.raises(DataError, match="has no operators"):
        mapping(read[1], read[1])


def test_a_trace_without_events_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no events with a duration"):
        statistics(events_of(write(tmp_path / "t.json", [])))
