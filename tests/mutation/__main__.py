"""How many small faults the tests notice: `python tests/mutation --count 100 --seed 1 [--room simulator ...]`.

Draws mutants of the rooms, puts one at a time into a copy of the project, and runs the fast tests that pass
through its line, quickest first, until one fails; then those that are named after its file. Which tests pass
through which line is measured once, with coverage, and kept (`--map`, to measure it anew).

mutmut and cosmic-ray were looked at: the one wraps every function, which compiled code cannot be, and the other
runs all of the tests on each mutant.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mutants import Mutant, mutants_of

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("ir/passes", "simulator", "profiler/costs")
TESTS = (
    *("tests/golden", "tests/readers/test_interpreter.py", "tests/simulator", "tests/properties/test_plans.py"),
    *(
        f"tests/profiler/test_costs_{kind}.py"
        for kind in ("attention", "convolution", "device", "estimate", "gemm", "memory")
    ),
    *(f"tests/cli/test_{name}.py" for name in ("flows", "run", "scenario")),
)
KEPT = ROOT / "out" / "mutation"
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", "node_modules", "__pycache__", "out", ".mypy_cache", ".hypothesis"
)
SECONDS = 240
MOST_TESTS = 400

Map = dict[tuple[str, int], set[str]]


def environment(root: Path) -> dict[str, str]:
    data = os.environ.get("ECHOGRAPH_DATA", str(ROOT.parent / "shared" / "data"))
    return {**os.environ, "PYTHONPATH": str(root / "src"), "ECHOGRAPH_DATA": data, "PYTHONDONTWRITEBYTECODE": "1"}


def measure_map(tests: Sequence[str]) -> None:
    """Runs the tests once, and keeps which of them pass through which line, and how long each takes."""
    KEPT.mkdir(parents=True, exist_ok=True)
    (KEPT / "coverage").unlink(missing_ok=True)
    settings = KEPT / "coveragerc"
    rooms = ",".join(f"{ROOT}/src/echograph/{room}/*" for room in ROOMS)
    settings.write_text(f"[run]\ninclude = {rooms}\n")
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *tests, "--cov",
         f"--cov-config={settings}", "--cov-context=test", "--cov-report=", f"--junitxml={KEPT / 'times.xml'}"],
        cwd=ROOT, env={**environment(ROOT), "COVERAGE_FILE": str(KEPT / "coverage")}, check=False,
    )  # fmt: skip


def read_map() -> tuple[Map, dict[str, float]]:
    """Tests through each line of each file, and seconds of each test."""
    from coverage.numbits import numbits_to_nums

    through: Map = defaultdict(set)
    with sqlite3.connect(KEPT / "coverage") as data:
        rows = data.execute(
            "select path, context, numbits from line_bits join file on file.id = file_id "
            "join context on context.id = context_id where context != ''"
        )
        for path, context, numbits in rows:
            name = str(Path(path).resolve().relative_to(ROOT))
            for line in numbits_to_nums(numbits):
                through[name, line].add(context.partition("|")[0])
    seconds: dict[str, float] = {}
    for case in ElementTree.parse(KEPT / "times.xml").iter("testcase"):
        seconds[f"{case.get('classname')}.{case.get('name')}"] = float(case.get("time") or 0)
    return through, seconds


def test_key(test: str) -> str:
    """A test's name as its JUnit report spells it."""
    path, _, rest = test.partition("::")
    return f"{path.removesuffix('.py').replace('/', '.')}.{rest}"


def covering(mutant: Mutant, through: Map, seconds: dict[str, float]) -> list[str]:
    """The tests that pass through a mutant's line, quickest first; compiled code leaves none: its file's, then."""
    found = through.get((str(mutant.path), mutant.line), set())
    if not found:
        found = set().union(*(tests for (path, _), tests in through.items() if path == str(mutant.path)))
    return sorted(found, key=lambda test: (seconds.get(test_key(test), 1.0), test))[:MOST_TESTS]


def namesakes(mutant: Mutant) -> list[str]:
    """Files of tests that are named after a mutant's file, or after the first words of its name."""
    folder, words = ROOT / "tests" / mutant.path.parts[0], mutant.path.stem.split("_")
    own = f"test_{mutant.path.parent.name}_{mutant.path.stem}.py"
    if found := sorted(folder.rglob(own)):
        return [str(path.relative_to(ROOT)) for path in found]
    for count in range(len(words), 0, -1):
        found = sorted(folder.rglob(f"test_{'_'.join(words[:count])}*.py"))
        if found:
            return [str(path.relative_to(ROOT)) for path in found]
    return []


def first_failure(root: Path, tests: list[str]) -> str | None:
    """The first of the tests that fails, in a fork of this process, which has imported what takes long.

    Tests that hang are failures of the one that hangs, or, where that cannot be told, of "".
    """
    told = root / "failed"
    told.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        os.setsid()
        silent = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(silent, stream)
        os.environ.update(environment(root))
        os.chdir(root)
        sys.path[0] = str(root / "src")
        import pytest

        class Teller:
            def pytest_runtest_logreport(self, report: Any) -> None:
                if report.failed:
                    told.write_text(report.nodeid)

        options = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
        status = int(pytest.main([*options, *tests], plugins=[Teller()]))
        if status and not told.exists():
            told.write_text("")
        os._exit(0)
    deadline = time.monotonic() + SECONDS
    while not os.waitpid(child, os.WNOHANG)[0]:
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return ""
        time.sleep(0.05)
    return told.read_text() if told.exists() else None


def noticed(root: Path, mutant: Mutant, tests: list[str], sound: dict[str, bool]) -> bool:
    """Whether a test fails with the mutant in the copy at `root` and passes without; `sound` keeps which pass."""
    path = root / mutant.path
    source = path.read_bytes()
    while tests:
        path.write_bytes(mutant.applied(source))
        try:
            failed = first_failure(root, tests)
        finally:
            path.write_bytes(source)
        if failed is None:
            return False
        if not failed:
            return first_failure(root, tests) is None
        if failed not in sound:
            sound[failed] = first_failure(root, [failed]) is None
        if sound[failed]:
            return True
        tests = [test for test in tests if test != failed]
        if tests and not any("::" in test for test in tests):
            tests = [*tests, f"--deselect={failed}"]
    return False


def drawn(rooms: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """`count` mutants of the rooms' files, drawn evenly from all that can be made and compile."""
    paths = sorted(p.relative_to(ROOT) for room in rooms for p in (ROOT / room).rglob("*.py"))
    every = [mutant for path in paths for mutant in mutants_of(ROOT, path)]
    found = []
    for mutant in random.Random(seed).sample(every, len(every)):
        try:
            compile(mutant.applied((ROOT / mutant.path).read_bytes()), str(mutant.path), "exec")
        except SyntaxError:
            continue
        found.append(mutant)
        if len(found) == count:
            break
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tests/mutation")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--room", action="append", help=f"folders to draw from [default: {' '.join(ROOMS)}]")
    parser.add_argument("--map", action="store_true", help="measure anew which tests pass through which line")
    parser.add_argument(
        "--part", default="0/1", help="K/N: every Nth of them, from the Kth, for several processes"
    )
    parser.add_argument("--only", help="only mutants whose text holds this")
    options = parser.parse_args()
    if options.map or not (KEPT / "times.xml").exists():
        measure_map(TESTS)
    through, seconds = read_map()
    part, parts = map(int, options.part.split("/"))
    mutants = drawn(options.room or ROOMS, options.count, options.seed)[part::parts]
    mutants = [m for m in mutants if not options.only or options.only in str(m)]
    for module in ("numba", "torch", "transformers", "hypothesis", "pytest"):
        __import__(module)
    survivors: list[Mutant] = []
    sound: dict[str, bool] = {}
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        root = Path(folder) / "project"
        shutil.copytree(ROOT, root, symlinks=True, ignore=LEFT_OUT)
        for number, mutant in enumerate(mutants, start=1):
            tests = covering(mutant, through, seconds)
            caught = any(noticed(root, mutant, chosen, sound) for chosen in (tests, namesakes(mutant)))
            survivors += [] if caught else [mutant]
            print(
                f"{number}/{len(mutants)} {'caught  ' if caught else 'SURVIVED'} {mutant} ({len(tests)} tests)",
                flush=True,
            )
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} caught, seed {options.seed}")


if __name__ == "__main__":
    main()
