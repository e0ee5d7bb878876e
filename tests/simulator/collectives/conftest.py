from __future__ import annotations

from pathlib import Path

import pytest

from echograph.profiler.fit.fabric import CollectiveRow, read_collectives_csv


@pytest.fixture(scope="session")
def rows(measured_data: Path) -> list[CollectiveRow]:
    """Every measured row."""
    return read_collectives_csv(measured_data / "collectives.csv.gz")
