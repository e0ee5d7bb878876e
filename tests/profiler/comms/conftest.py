"""Makes the helpers beside these tests importable."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def four() -> Iterator[None]:
    """A group of four ranks of which this process is the first, and which moves nothing."""
    dist = pytest.importorskip("torch.distributed", reason="needs the [torch] extra")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()
