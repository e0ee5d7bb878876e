"""A file is written whole or not at all."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from echograph.ir.files import write_whole


def failing() -> Iterator[bytes]:
    yield b"half"
    raise RuntimeError("no more")


def test_a_failure_half_way_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        write_whole(tmp_path / "out", failing())
    assert list(tmp_path.iterdir()) == []


def test_a_failure_half_way_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"before")
    with pytest.raises(RuntimeError):
        write_whole(tmp_path / "out", failing())
    assert (tmp_path / "out").read_bytes() == b"before"
    assert len(list(tmp_path.iterdir())) == 1


def test_text_and_bytes_are_counted_in_bytes(tmp_path: Path) -> None:
    assert write_whole(tmp_path / "out", ["é", b"\x00"]) == 3
    assert (tmp_path / "out").read_bytes() == b"\xc3\xa9\x00"


def test_a_new_file_has_the_usual_permissions(tmp_path: Path) -> None:
    write_whole(tmp_path / "out", [b"x"])
    (tmp_path / "usual").touch()
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_whole(tmp_path / "link", [b"x"])
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_bytes() == b"x"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_is_written_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write_whole(pipe, [b"a", b"b"])
    reader.join()
    assert read == [b"ab"]
    assert pipe.is_fifo()
