from __future__ import annotations

from pathlib import Path

import pytest

from echograph.profiler.fit.fabric import CollectiveRow, read_collectives_csv


@pytest.fixture(scope="session")
def rows(measured_data: Path) -> list[CollectiveRow]:
    """Every measured row."""
    tables = ("collectives.csv.gz", "collectives_alps.csv")
    return [row for table in tables for row in read_collectives_csv(measured_data / table)]
