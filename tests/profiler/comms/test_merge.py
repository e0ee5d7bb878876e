"""Ranks joined into calls, against closed forms and a plain Python word on random traces."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from echograph.ir.comms.bandwidth import base_operation, bus_factor, message_bytes
from echograph.ir.comms.record import FORMAT, CallSignature, EndLine, GroupLine, HeaderLine, encode
from echograph.profiler.comms import report as report_module
from echograph.profiler.comms.report import report_on
from echograph.profiler.comms.views import ChromeTrace, collectives_page

MS = 10**6


def write(folder: Path, rank: int, rows: list[tuple[int, ...]], world: int, host: str = "a", **what: Any) -> None:
    fields = {
        "op": "all_reduce",
        "group": "g",
        "channel": "g",
        "bytes": 10**6,
        "input_bytes": 1,
        "output_bytes": 1,
    }
    objects = [
        HeaderLine(format=FORMAT, version=(1, 0), rank=rank, world=world, host=host),
        GroupLine(name="g", ranks=tuple(range(world))),
        CallSignature(id=0, **(fields | what)),
    ]
    text = b"".join(
        [*map(encode, objects), *(json.dumps(row).encode() + b"\n" for row in rows), encode(EndLine(calls=1))]
    )
    (folder / f"trace.{rank}.jsonl").write_bytes(text)


def test_wait_transfer_skew_and_bandwidth_of_one_call(tmp_path: Path) -> None:
    # Ranks come after 0, 1, 4 and 2 ms; all end at 9 ms.
    for rank, start in enumerate((0, 1, 4, 2)):
        write(tmp_path, rank, [(0, 0, start * MS, 0, (9 - start) * MS, 0)], 4)
    report = report_on(tmp_path)
    (call,) = report.operations
    assert call["wait_s"] == pytest.approx((4 + 3 + 0 + 2) * 1e-3)
    assert call["transfer_s"] == pytest.approx(4 * 5e-3)
    assert call["mean_skew_s"] == pytest.approx(4e-3)
    assert call["algbw_GBps"] == pytest.approx(10**6 / 5e-3 * 1e-9)
    assert call["busbw_GBps"] == pytest.approx(call["algbw_GBps"] * 2 * 3 / 4)
    assert [(r["times_last"], pytest.approx(r["lateness_s"])) for r in report.ranks] == [
        (0, 0),
        (0, 0),
        (1, 4e-3),
        (0, 0),
    ]
    assert call["exposed_s"] == call["total_s"] == pytest.approx((9 + 8 + 5 + 7) * 1e-3)


def test_exposed_is_what_was_waited_for(tmp_path: Path) -> None:
    rows = [
        (0, 0, 0, 0, 10 * MS, 4 * MS),
        (0, 1, 20 * MS, 0, 10 * MS, 15 * MS),
        (0, 2, 40 * MS, 2 * MS, 10 * MS, 0),
        (0, 3, 60 * MS, 0, 10 * MS, -1),
    ]
    write(tmp_path, 0, rows, 1)
    (call,) = report_on(tmp_path).operations
    assert call["exposed_s"] == pytest.approx((6 + 0 + 8) * 1e-3)
    assert call["hidden_s"] == pytest.approx((4 + 10 + 0) * 1e-3)
    assert call["exposure_unknown_s"] == pytest.approx(10e-3)


def test_clocks_of_other_hosts_are_set_right_by_what_ends_together(tmp_path: Path) -> None:
    ahead = 3_000_000 * MS
    for rank, host in enumerate(("a", "a", "b")):
        rows = [
            (0, n, n * 100 * MS + rank * MS + (ahead if host == "b" else 0), 0, (9 - rank) * MS, 0)
            for n in range(5)
        ]
        write(tmp_path, rank, rows, 3, host)
    report = report_on(tmp_path)
    assert report.clock_offsets == {"a": 0.0, "b": pytest.approx(ahead * 1e-9)}
    assert report.operations[0]["wait_s"] == pytest.approx(5 * (2 + 1 + 0) * 1e-3)
    assert report.operations[0]["transfer_s"] == pytest.approx(5 * 3 * 7e-3)


def test_a_message_is_one_call_of_its_two_ends(tmp_path: Path) -> None:
    for rank, (op, start) in enumerate((("send", 0), ("recv", 3))):
        write(
            tmp_path,
            rank,
            [(0, 0, start * MS, 0, (5 - start) * MS, 0)],
            4,
            op=op,
            channel="g:0>1/0",
            peer=1 - rank,
        )
    report = report_on(tmp_path)
    assert [(row["operation"], row["merged"]) for row in report.operations] == [("send", 1), ("recv", 1)]
    assert report.operations[0]["wait_s"] == pytest.approx(3e-3)


@pytest.mark.parametrize("seed", range(5))
def test_random_traces_are_joined_as_plain_python_joins_them(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_module, "BATCH", 50)
    chance = random.Random(seed)
    calls = [(n, n * 10 * MS) for n in range(400)]
    missing = set(chance.sample(range(400), 7))
    starts: dict[int, dict[int, tuple[int, int]]] = defaultdict(dict)
    for rank in range(3):
        rows = []
        for n, began in calls:
            if rank == 2 and n in missing:
                continue
            start = began + chance.randrange(5 * MS)
            end = began + 6 * MS + chance.randrange(3 * MS)
            starts[n][rank] = start, end
            rows.append((0, n, start, 0, end - start, -1))
        # Calls end out of order.
        for _ in range(50):
            at = chance.randrange(len(rows) - 1)
            rows[at], rows[at + 1] = rows[at + 1], rows[at]
        write(tmp_path, rank, rows, 3)
    report = report_on(tmp_path)
    whole = [ranks for ranks in starts.values() if len(ranks) == 3]
    last = [max(start for start, _ in ranks.values()) for ranks in whole]
    expected_wait = sum(at - start for at, ranks in zip(last, whole, strict=True) for start, _ in ranks.values())
    expected_transfer = sum(end - at for at, ranks in zip(last, whole, strict=True) for _, end in ranks.values())
    (row,) = report.operations
    assert row["calls"] == 3 * 400 - 7
    assert row["merged"] == 3 * 393
    assert row["wait_s"] == pytest.approx(expected_wait * 1e-9)
    assert row["transfer_s"] == pytest.approx(expected_transfer * 1e-9)
    assert report.problems == {"calls of which not all ranks were found": 14}


def test_sizes_and_factors_are_those_of_nccl_tests() -> None:
    assert message_bytes("all_gather_into_tensor_coalesced", 1, 4, 4) == 4
    assert message_bytes("reduce_scatter_tensor", 4, 1, 4) == 4
    assert message_bytes("gather", 2, 0, 4) == message_bytes("scatter", 0, 2, 4) == 8
    assert [bus_factor(op, 4) for op in ("all_reduce", "all_gather", "broadcast", "send", "barrier")] == [
        1.5,
        0.75,
        1,
        1,
        0,
    ]
    assert base_operation("all_reduce_coalesced") == "all_reduce" and base_operation("reduce") == "reduce"
    assert bus_factor("all_reduce", 1) == 0


def test_the_chrome_trace_and_the_page_hold_the_calls(tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    traces.mkdir()
    for rank, start in enumerate((0, 2)):
        write(traces, rank, [(0, 0, start * MS, 0, (9 - start) * MS, 0)], 2, site="<script>", module="m")
    with ChromeTrace(tmp_path / "chrome.json") as sink:
        report = report_on(traces, [sink])
    events = [e for e in json.loads((tmp_path / "chrome.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert [(e["pid"], e["ts"], e["dur"], e["args"]["wait_us"]) for e in events] == [
        (0, 0, 9000, 2000),
        (1, 2000, 7000, 0),
    ]
    text = collectives_page(report, "Of <b>")
    assert "<script" not in text and "http" not in text.replace("http-equiv", "")
    opened: list[str] = []

    class Balanced(HTMLParser):
        def handle_starttag(self, tag: str, attrs: Any) -> None:
            if tag not in ("meta", "!doctype"):
                opened.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert opened.pop() == tag

    Balanced().feed(text)
    assert opened == []
    assert "2 calls on 2 ranks" in text


@pytest.mark.slow
def test_ten_million_calls_fit_in_300_MB(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path, rank, [], 2)
        with (tmp_path / f"trace.{rank}.jsonl").open("r+b") as stream:
            head = stream.read().partition(b'{"line":"end"')[0]
            stream.seek(0)
            stream.truncate()
            stream.write(head)
            for block in range(50):
                first = block * 100_000
                stream.write(
                    b"".join(
                        b"[0,%d,%d,0,%d,0]\n"
                        % (n, 1763751234567890123 + n * 10**6 + rank * 1000, 500_000 - rank * 1000)
                        for n in range(first, first + 100_000)
                    )
                )
            stream.write(encode(EndLine(calls=5_000_000)))
    script = (
        "import sys; from pathlib import Path; from echograph.profiler.comms.report import report_on;"
        "r = report_on(Path(sys.argv[1])); print(r.calls, r.operations[0]['merged'], r.problems);"
        # The highest of this program alone; getrusage counts that of the process it was forked from.
        "print(next(x for x in open('/proc/self/status') if x.startswith('VmHWM')).split()[1])"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=True)
    counts, kibibytes = done.stdout.splitlines()
    assert counts == "10000000 10000000 {}"
    assert int(kibibytes) < 300 * 1024
