"""Makes the helpers beside these tests importable, and says once a module what needs published measurements."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "analyses")]
DATA = Path(os.environ.get("ECHOGRAPH_DATA", HERE.parents[2] / "shared" / "data"))
# Where tests hold answers against those of other programs, on traces that cannot be part of the project.
COMPARING = ("analyses", "traces", "replay", "page")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without the measurements, one test of a module is skipped for all of it that need them."""
    if (DATA / "kernels.csv.gz").exists():
        return
    of_module: dict[Path, list[pytest.Item]] = defaultdict(list)
    for item in items:
        asks = "measured_data" in getattr(item, "fixturenames", ())
        if asks and any(item.path.is_relative_to(HERE / folder) for folder in COMPARING):
            of_module[item.path].append(item)
    for first, *others in of_module.values():
        reason = f"{1 + len(others)} tests need the measurements at {DATA}: set ECHOGRAPH_DATA to run them"
        first.add_marker(pytest.mark.skip(reason=reason))
        config.hook.pytest_deselected(items=others)
        left_out = set(map(id, others))
        items[:] = [item for item in items if id(item) not in left_out]
