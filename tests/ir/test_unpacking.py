"""What compressed files unpack to has a limit, whoever reads them; so has what never ends."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from echograph.errors import DataError, FormatError, InputError
from echograph.ir import files
from echograph.ir.files import Unpacked, read_arrays, read_unpacked, read_whole

MIB = 1 << 20


def packed(pieces: Iterator[bytes]) -> bytes:
    pack = zlib.compressobj(9, wbits=31)
    return b"".join(map(pack.compress, pieces)) + pack.flush()


def bomb(path: Path, size: int, begin: bytes = b"") -> Path:
    """A gzip file of many members that unpacks to blanks."""
    path.write_bytes(packed(iter([begin])) + packed(iter([b" " * MIB] * 40)) * (size // (40 * MIB)))
    return path


@pytest.mark.parametrize("members", [1, 3])
def test_what_was_packed_is_what_is_read(members: int, tmp_path: Path) -> None:
    text = json.dumps(np.random.default_rng(0).integers(0, 9, 300_000).tolist()).encode()
    path = tmp_path / "data"
    path.write_bytes((gzip.compress(text) + b"\0" * 40_000) * members)
    pieces = list(Unpacked(path))
    assert b"".join(pieces) == text * members
    assert all(pieces)
    assert max(map(len, pieces)) <= MIB
    path.write_bytes(text)
    assert b"".join(Unpacked(path)) == text


def test_a_stream_without_its_end_is_known(tmp_path: Path) -> None:
    path = tmp_path / "data.gz"
    path.write_bytes(gzip.compress(b"text" * 1000)[:-9])
    unpacked = Unpacked(path)
    assert b"".join(unpacked).startswith(b"text")
    assert unpacked.cut_off
    with pytest.raises(DataError, match="cut off"):
        read_unpacked(path, "give one", MIB)


def test_a_damaged_stream_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.gz"
    path.write_bytes(gzip.compress(b"text")[:10] + b"\xff" * 20)
    with pytest.raises(DataError, match="damaged"):
        read_unpacked(path, "give one", MIB)


def test_a_limit_holds_packed_or_not(tmp_path: Path) -> None:
    path = tmp_path / "data"
    for content in (b"x" * 1001, gzip.compress(b"x" * 1001)):
        path.write_bytes(content)
        with pytest.raises(FormatError, match="than 1000 B, not read"):
            read_unpacked(path, "give one", 1000)
        assert len(read_unpacked(path, "give one", 1001)) == 1001


def test_no_measurement_shrinks_to_a_thousandth(tmp_path: Path) -> None:
    path, read = bomb(tmp_path / "data.gz", 200 * MIB), 0
    with pytest.raises(FormatError, match=r"unpacks to more than 200 times its size"):
        for piece in Unpacked(path):
            read += len(piece)
    assert read <= 65 * MIB


def test_devices_are_no_files() -> None:
    for read in (lambda path: read_whole(path, "give one"), lambda path: list(Unpacked(path)), read_arrays):
        with pytest.raises(InputError, match="a device"):
            read(Path("/dev/zero"))


def test_a_pipe_is_read_up_to_the_limit() -> None:
    with subprocess.Popen(["yes"], stdout=subprocess.PIPE) as endless:
        assert endless.stdout is not None
        with pytest.raises(FormatError, match="larger than"):
            read_whole(Path(f"/dev/fd/{endless.stdout.fileno()}"), "give one", MIB)
        endless.kill()


def test_archives_of_arrays_have_the_same_limits(tmp_path: Path) -> None:
    path = tmp_path / "arrays.npz"
    np.savez_compressed(path, a=np.arange(10), b=np.zeros(3))
    assert read_arrays(path)["a"].tolist() == list(range(10))
    assert list(read_arrays(path, ["b"])) == ["b"]
    with pytest.raises(FormatError, match="no archive"):
        read_arrays(path, ["c"])
    np.savez_compressed(path, a=np.zeros(80 * MIB, np.uint8))
    with pytest.raises(FormatError, match=r"unpack to 80(\.00)? MiB, not read"):
        read_arrays(path)


def test_an_array_that_claims_more_than_there_is(tmp_path: Path) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<i8", "fortran_order": False, "shape": (2**50,)})
    with zipfile.ZipFile(tmp_path / "arrays.npz", "w") as archive:
        archive.writestr("a.npy", header.getvalue() + b"\0" * 80)
    with pytest.raises(FormatError, match="no archive"):
        read_arrays(tmp_path / "arrays.npz")


READERS = {
    "trace": ("analyze", "{}", "idle"),
    "trace of nothing": ("analyze", "{}", "idle"),
    "kernels": ("fit", "--kernels", "{}", "-o", "{}.out"),
    "collectives": ("fit", "--collectives", "{}", "-o", "{}.out"),
    "ByteProfile": ("stats", "{}"),
}
LIMITED = """
import resource, sys
import numpy, msgspec  # what they take is not the reader's
from echograph.cli.echoprof import main
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, used + 2**30))
sys.argv[0] = "echoprof"
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
def test_ten_gigabytes_in_ten_megabytes(reader: str, tmp_path: Path) -> None:
    begin = b'{"traceEvents": [{"ph": "X", "name": "' if reader in ("trace", "ByteProfile") else b""
    path = bomb(tmp_path / "rank0.json.gz", 10 << 30, begin)
    assert path.stat().st_size < 11 * 10**6
    words = [word.format(path) for word in READERS[reader]]
    done = subprocess.run([sys.executable, "-c", LIMITED, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    # On a busy machine the stages that it came through stand before.
    *stages, last = done.stderr.splitlines()
    assert last.startswith(f"echoprof: {path}: ")
    assert all(stage.endswith(" ...") for stage in stages), done.stderr
    assert "out of memory" not in done.stderr


def test_what_is_free_is_less_than_what_is_read() -> None:
    assert files.FREE_BYTES < files.MAX_FILE_BYTES < files.MAX_UNPACKED_BYTES
