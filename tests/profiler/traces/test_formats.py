"""Which reader a file has: by how it begins, whatever it is called."""

from __future__ import annotations

import gzip
import io
import json
import pickle  # noqa: TID251 - one of the formats is a pickle
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echograph.errors import DataError, InputError
from echograph.profiler.analyses import ANALYSES
from echograph.profiler.traces import read_traces
from echograph.profiler.traces.formats import FORMATS, format_of


def archive() -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("a.json"), io.BytesIO())
    return content.getvalue()


BEGINS = {
    "a memory snapshot of PyTorch": pickle.dumps({}),
    "an export of Nsight Systems": b"SQLite format 3\0",
    "rocprofv3's JSON": b' {\n "rocprofiler-sdk-tool": [',
    "an XPlane of XLA": b"\x0a\x80\x01\x12\x0d/device:GPU:0",
}
JSON = (b'{"traceEvents": []}', b"\n{}", b"\n\n [", b"\n\x0b{", b"[]", b"", b"{", b"\x80", b"\n")


def test_every_format_is_told_by_its_begin() -> None:
    assert set(BEGINS) == {known.name for known in FORMATS}
    for name, head in BEGINS.items():
        found = format_of(head)
        assert found is not None and found.name == name
    assert [format_of(head) for head in JSON] == [None] * len(JSON)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (json.dumps({"schema": "1.0", "nodes": []}).encode(), "an execution trace, no profile: the analysis"),
        (b"[[1, 2, 3, 4]]", "a memory timeline, no profile: the analysis memory-categories reads it"),
        (archive(), "a tar archive: unpack it"),
        (b"", "not a trace: it has no traceEvents"),
        (b"SQLite format 3\0 and no more", "not a whole SQLite file"),
        (b'{"rocprofiler-sdk-tool": 3}', "not a whole JSON of rocprofv3"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_what_is_no_trace_is_one_line(content: bytes, said: str, packed: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(DataError, match=said) as error:
        read_traces(path)
    assert "\n" not in str(error.value)


@settings(max_examples=200, deadline=None)
@given(begin=st.sampled_from([*BEGINS.values(), *JSON]), rest=st.binary(max_size=200))
def test_any_bytes_are_a_trace_or_one_line(
    begin: bytes, rest: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("bytes") / "a.gz"
    path.write_bytes(begin + rest)
    try:
        ANALYSES["kernels"](read_traces(path))
    except InputError as error:
        assert "\n" not in str(error)
