"""What all tests share."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parents[1]

# Test helpers are plain modules beside the tests that use them.
sys.path[:0] = [str(ROOT / "tests" / folder) for folder in ("simulator", "processes")]

# Each worker has a core; threads of PyTorch beyond it would wait for each other in loops that use all of it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Virtual machines may flag matrix tiles (AMX) and not let programs use them; PyTorch's bf16 products then die of
# an illegal instruction.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

# As the commands do: what is built lives until a test ends, and the usual thresholds look for garbage in vain.
gc.set_threshold(100_000, 50, 50)

# A test that says nothing of how many examples it takes takes these, the same in every run; `make test-all` is
# thorough and draws anew.
hypothesis.settings.register_profile("quick", max_examples=60, deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile("thorough", max_examples=400, deadline=None)
hypothesis.settings.load_profile("quick")


def pytest_collection_finish() -> None:
    """Modules and tests are no garbage; what is made from here on may be."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def quiet_commands() -> None:
    """Commands that a loaded machine makes slow say no more than quick ones."""
    from echograph.cli import output

    output.QUIET_S = 3600.0


@pytest.fixture(scope="session")
def warm() -> Iterator[Path]:
    """The folder of `python` and the commands that start at once."""
    pytest.importorskip("transformers", reason="needs the [torch] extra")
    from warm_python import warm_programs

    with warm_programs() as folder:
        yield folder


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Cases that take long, of tests that have quicker ones, are slow tests (`long_cases.py`).

    Without measured tables, one test of each module that compares with them stands for its others.
    """
    long = set((ROOT / "tests" / "long_cases.txt").read_text(encoding="utf-8").splitlines())
    for item in items:
        if item.nodeid in long:
            item.add_marker(pytest.mark.slow)
    if _has_tables():
        return
    kept: dict[Path, list[pytest.Item]] = {}
    for item in items:
        if "measured_data" in getattr(item, "fixturenames", ()):
            kept.setdefault(item.path, []).append(item)
    for first, *rest in kept.values():
        reason = f"{1 + len(rest)} tests of this module compare with measured tables: set ECHOGRAPH_DATA"
        first.add_marker(pytest.mark.skip(reason=reason))
    others = {item for _, *rest in kept.values() for item in rest}
    items[:] = [item for item in items if item not in others]
    config.hook.pytest_deselected(items=list(others))


def _tables() -> Path:
    return Path(os.environ.get("ECHOGRAPH_DATA", ROOT.parent / "shared" / "data"))


def _has_tables() -> bool:
    return (_tables() / "kernels.csv.gz").exists()


@pytest.fixture(scope="session")
def measured_data() -> Path:
    """The folder of published measurements; not part of the project, so absent on most machines."""
    if not _has_tables():
        pytest.skip(
            f"no measured tables at {_tables()}, with which tests of this module compare: set ECHOGRAPH_DATA"
        )
    return _tables()
