"""Makes every shipped profile from a kernel table: python -m echograph.profiler.fit.ship TABLE DATE."""

from __future__ import annotations

import sys
from pathlib import Path

from echograph.profiler.costs.device import DeviceProfile
from echograph.profiler.fit.device import fit_device, write_profile
from echograph.profiler.fit.facts import DATASHEETS, read_facts
from echograph.profiler.fit.table import read_table


def ship(table_path: Path, folder: Path, date: str) -> dict[str, DeviceProfile]:
    """Fits every device of the datasheet file, relatives first, and writes one JSON file each."""
    table, facts = read_table(table_path), read_facts()
    done: dict[str, DeviceProfile] = {}
    for name, device in facts.items():
        relative = done[device.relative] if device.relative else None
        done[name] = fit_device(table, name, device, relative=relative, date=date)
        write_profile(done[name], folder / f"{name}.json")
    return done


if __name__ == "__main__":
    ship(Path(sys.argv[1]), DATASHEETS.parent, sys.argv[2])
