"""Tables of measurements say in which line and column they are wrong."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from echograph.errors import DataError
from echograph.profiler.fit.fabric import read_collectives_csv
from echograph.profiler.fit.regression import disagreement
from echograph.profiler.fit.table import read_table, read_tables

COLLECTIVES = "collective,n_gpus,n_nodes,size_bytes,time_us\nall_reduce,8,1,1024,20\nall_reduce,8,1,2048,21\n"
KERNELS = "op,dtype,m,n,k,latency_ms\ngemm,bf16,64,64,64,0.01\ngemm,bf16,128,64,64,0.01\n"


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("2048", "20\r48", "line 3: "), ("2048", "-1", "line 3: "), ("2048", "1e400", "line 3: "),
        ("2048", "nan", "line 3: "), ("2048", "1e300", "line 3: "), ("8,1,2048", "8,1", "line 3: more or fewer"),
        ("2048,21", "2048,21,5", "line 3: more or fewer"), ("21", "inf", "line 3: "), ("21", "-1", "line 3: "),
        ("8,1,2048", "9" * 5000 + ",1,2048", "line 3: "), ("8,1,2048", "99999999999,1,2048", "line 3: "),
    ],
)  # fmt: skip
@pytest.mark.parametrize("packed", [False, True])
def test_collectives(before: str, after: str, says: str, packed: bool, tmp_path: Path) -> None:
    path, text = tmp_path / "table.csv", COLLECTIVES.replace(before, after).encode()
    path.write_bytes(gzip.compress(text) if packed else text)
    with pytest.raises(DataError, match=says) as refused:
        read_collectives_csv(path)
    assert str(path) in str(refused.value)
    assert len(str(refused.value)) < 400 + len(str(path))


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("128", "-128", "line 3: 'm' is -128"),
        ("128", "nan", "line 3: 'm' is nan"),
        ("128", "x", "line 3: 'm' is 'x'"),
        ("128", "1e300", "line 3: 'm' is 1e300"),
        ("128", "", "line 3: gemm without 'm'"),
        ("128", "0", "line 3: 'm' is 0"),
        ("128,64,64,0.01", "128,64,64,0", "line 3: 'latency_ms' is 0"),
        ("128,64,64,0.01", "128,64,64,", "without 'latency_ms'"),
        ("128,64", "128", "line 3: 5 cells"),
        ("dtype,m", "dtype,n", "'n' stands twice"),
        ("bf16,128", "x" * 400 + ",128", "line 3: 'dtype'"),
        ("128", "1\r28", "line"), ("128", '"128', "line"),
    ],
)  # fmt: skip
def test_kernels(before: str, after: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(KERNELS.replace(before, after), newline="")
    with pytest.raises(DataError, match=says) as refused:
        read_table(path)
    assert str(refused.value).startswith(str(path))


def test_whole_tables_are_read(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(KERNELS)
    assert read_table(path).number["m"].tolist() == [64, 128]
    path.write_text(COLLECTIVES.replace("2048", "2048.0"))
    assert [row.size_bytes for row in read_collectives_csv(path)] == [1024, 2048]


def test_several_tables_are_one_with_the_library_of_each_row(tmp_path: Path) -> None:
    first, second = tmp_path / "first.csv", tmp_path / "second.csv.gz"
    first.write_text(KERNELS)
    text = (
        "source,op,dtype,kernel,m,n,k,latency_ms\nours,gemm,bf16,cublas,64,64,64,0.011\nours,gemm,fp8,,1,1,1,0.2\n"
    )
    second.write_bytes(gzip.compress(text.encode()))
    table = read_tables([first, second])
    assert table.number["m"].tolist() == [64, 128, 64, 1]
    assert table.text["kernel"].tolist() == ["", "", "cublas", ""]
    assert table.text["dtype"].counts() == {"bf16": 3, "fp8": 1}
    assert table.sources() == {"": 2, "ours": 2}
    chosen = table.select(dtypes=["bf16"]).where(table.select(dtypes=["bf16"]).text["kernel"].among(["cublas"]))
    assert chosen.seconds().tolist() == pytest.approx([1.1e-5])
    assert table.text["kernel"].starting("cub").tolist() == [False, False, True, False]


def test_how_far_libraries_are_apart() -> None:
    shape = np.repeat(np.arange(1.0, 201.0), 2)
    library = np.tile(np.asarray([0, 1], np.int32), 200)
    rng = np.random.default_rng(5)
    apart = 1e-3 * np.exp(0.1 * rng.standard_normal(400))
    assert disagreement((shape,), library, apart) == pytest.approx(0.1, rel=0.15)
    # One library, shapes that one of them has, and short kernels say nothing.
    assert disagreement((shape,), np.zeros(400, np.int32), apart) == 0.0
    assert disagreement((np.arange(400.0),), library, apart) == 0.0
    assert disagreement((shape,), library, apart * 1e-3) == 0.0
