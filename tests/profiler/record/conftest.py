"""Makes the helpers beside these tests importable, and what they record in their own process cheaper."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="module")
def _short() -> Iterator[None]:
    """What recording costs is measured from a few steps: most tests ask whether it is, not how well."""
    from echograph.profiler.record import overhead

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"ROUNDS": 1, "STEPS": 3, "WARMUP": 1, "CALLS": 20}.items():
            patch.setattr(overhead, name, value)
        yield
