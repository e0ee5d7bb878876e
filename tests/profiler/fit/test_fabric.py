from __future__ import annotations

import gzip
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from echograph.errors import DataError, InputError
from echograph.profiler.fit.fabric import (
    CollectiveRow,
    Predict,
    error_by_kind,
    fit_fabric,
    read_collectives_csv,
    read_nccl_tests,
    size_fold,
)

ROOT = Path(__file__).resolve().parents[3]
DATA = Path(os.environ.get("ECHOGRAPH_DATA", ROOT.parent / "shared" / "data"))
TRUTH = {"alpha_us": 6.0, "rate_GBps": 80.0}


def rows(noise: float = 0.0, seed: int = 0) -> list[CollectiveRow]:
    generator = np.random.default_rng(seed)
    made = []
    for ranks in (2, 4, 8):
        for power in range(10, 30):
            seconds = _time(TRUTH, ranks, 2**power) * float(np.exp(noise * generator.standard_normal()))
            made.append(
                CollectiveRow(kind="all_gather", ranks=ranks, nodes=1, size_bytes=2**power, seconds=seconds)
            )
    return made


def _time(values: Mapping[str, float], ranks: int, size: float) -> float:
    return (ranks - 1) * (values["alpha_us"] * 1e-6 + size / ranks / (values["rate_GBps"] * 1e9))


def predictor(measured: list[CollectiveRow]) -> Predict:
    return lambda values: np.array([_time(values, row.ranks, row.size_bytes) for row in measured])


def test_recovers_the_parameters_that_made_the_rows() -> None:
    measured = rows()
    fit = fit_fabric(measured, predictor(measured), {"alpha_us": 1.0, "rate_GBps": 300.0})
    assert fit.parameters == pytest.approx(TRUTH, rel=0.01)
    assert fit.error["all_gather"] < 0.01
    assert fit.undetermined == ()


def test_noise_and_outliers_move_it_little() -> None:
    measured = rows(noise=0.05)
    measured[7] = CollectiveRow(kind="all_gather", ranks=2, nodes=1, size_bytes=2**17, seconds=1.0)
    fit = fit_fabric(measured, predictor(measured), {"alpha_us": 1.0, "rate_GBps": 300.0})
    assert fit.parameters == pytest.approx(TRUTH, rel=0.06)


def test_what_no_row_speaks_of_stays_at_its_start() -> None:
    measured = rows()
    fit = fit_fabric(measured, predictor(measured), {"alpha_us": 1.0, "rate_GBps": 300.0, "other": 7.0})
    assert fit.parameters["other"] == pytest.approx(7.0)
    assert fit.undetermined == ("other",)


def test_ceilings_hold() -> None:
    measured = rows()
    start = {"alpha_us": 1.0, "link.rate_GBps": 30.0}
    fit = fit_fabric(
        measured,
        lambda values: predictor(measured)(
            {"alpha_us": values["alpha_us"], "rate_GBps": values["link.rate_GBps"]}
        ),
        start,
        upper={"rate_GBps": 50.0},
    )
    assert fit.parameters["link.rate_GBps"] == pytest.approx(50.0)


@pytest.mark.parametrize(
    ("measured", "start", "message"),
    [
        ([], {"a": 1.0}, "needs rows"),
        (rows(), {"alpha_us": 0.0, "rate_GBps": 1.0}, "start of alpha_us is not above 0"),
    ],
)
def test_what_cannot_be_fitted(measured: list[CollectiveRow], start: dict[str, float], message: str) -> None:
    with pytest.raises(DataError, match=message):
        fit_fabric(measured, predictor(measured), start)


def test_predictions_of_another_length() -> None:
    with pytest.raises(DataError, match="1 predictions for 60 rows"):
        fit_fabric(rows(), lambda values: np.ones(1), {"a": 1.0})


def test_folds_hold_whole_sizes_and_all_have_some() -> None:
    measured = rows()
    folds = {row.size_bytes: size_fold(row) for row in measured}
    assert all(size_fold(row) == folds[row.size_bytes] for row in measured)
    assert set(folds.values()) == {0, 1, 2, 3}


def test_error_by_kind() -> None:
    pair = [
        CollectiveRow(kind=kind, ranks=2, nodes=1, size_bytes=8, seconds=1.0)
        for kind in ("all_reduce", "all_gather")
    ]
    assert error_by_kind(pair, np.array([1.1, 0.7])) == pytest.approx({"all_reduce": 0.1, "all_gather": 0.3})


HEADER = """# nThread 1 nGpus 1 minBytes 1024 maxBytes 4096
# Collective test starting: all_gather_perf
#   Rank  0 Group  0 Pid   12 on  host-a device  0 [0000:07:00] NVIDIA H100 80GB HBM3
#   Rank  1 Group  0 Pid   13 on  host-b device  0 [0000:07:00] NVIDIA H100 80GB HBM3
NCCL version 2.21.5+cuda12.4
#       size   count   type  redop  root   time  algbw  busbw #wrong   time  algbw  busbw #wrong
"""
LINE = "     1024     128  float   none    -1  12.50   0.08   0.04      0  12.00   0.09   0.04      0\n"


def test_log_of_today(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_text(HEADER + LINE + "# Out of bounds values : 0 OK\n")
    (row,) = read_nccl_tests(path)
    assert (row.kind, row.ranks, row.nodes, row.size_bytes) == ("all_gather", 2, 2, 1024)
    assert row.seconds == pytest.approx(12.5e-6)
    assert (row.dtype, row.gpu, row.nccl) == ("float", "NVIDIA H100 80GB HBM3", "2.21.5")


def test_log_in_gzip_with_a_given_collective(tmp_path: Path) -> None:
    path = tmp_path / "run.log.gz"
    path.write_bytes(gzip.compress((HEADER + LINE).replace("all_gather_perf", "").encode()))
    with pytest.raises(DataError, match="cannot tell the collective; name it with kind"):
        read_nccl_tests(path)
    assert read_nccl_tests(path, kind="all_to_all")[0].kind == "all_to_all"


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "no '# Rank' lines"), (HEADER, "no row of the table"), ("\x00\xff garbage", "no '# Rank' lines")],
)
def test_log_that_is_none(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.log"
    path.write_text(text)
    with pytest.raises(DataError, match=message) as caught:
        read_nccl_tests(path)
    assert "\n" not in str(caught.value)


def test_log_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gone\.log: No such file"):
        read_nccl_tests(tmp_path / "gone.log")


@pytest.mark.skipif(not (DATA / "nccl-tests").exists(), reason="no measured tables: set ECHOGRAPH_DATA")
def test_published_logs_agree_with_the_table() -> None:
    table = [row for row in read_collectives_csv(DATA / "collectives.csv.gz") if "Echo" in row.source]
    for path in sorted((DATA / "nccl-tests").glob("a100_allreduce_*.log")):
        ranks = int(path.stem.rsplit("_", 1)[1])
        # With one GPU busbw is 0, so that nothing in these old logs tells the collective.
        found = read_nccl_tests(path, kind="all_reduce" if ranks == 1 else None)
        assert {row.kind for row in found} == {"all_reduce"}
        assert {(row.ranks, row.nodes) for row in found} == {(ranks, max(1, ranks // 8))}
        expected = {row.size_bytes: row.seconds for row in table if row.ranks == ranks}
        assert {row.size_bytes: row.seconds for row in found} == pytest.approx(expected)


CSV = "collective,n_gpus,n_nodes,size_bytes,time_us\n"


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(CSV + "alltoall,8,1,1024,5\n")
    (row,) = read_collectives_csv(path)
    assert (row.kind, row.ranks, row.seconds, row.gpu) == ("all_to_all", 8, pytest.approx(5e-6), "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("collective,n_gpus\n", "lacks column n_nodes, size_bytes, time_us"),
        (CSV + "gossip,8,1,1024,5\n", "line 2: unknown collective 'gossip'"),
        (CSV + "alltoall,8,1,x,5\n", "line 2: could not convert"),
        (CSV + "alltoall,1,8,1024,5\n", "line 2: needs n_gpus >= n_nodes"),
        (CSV + "alltoall,8,1\n", "line 2"),
    ],
)
def test_broken_csv(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_collectives_csv(path)
