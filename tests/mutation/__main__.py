"""How many small faults the tests notice: `python tests/mutation --count 100 --seed 1 [--room simulator ...]`.

Draws mutants of the rooms, evenly from all that could change a result (`mutants` says what is not drawn, the
report how many of what), puts one at a time into a copy of the project, and runs the fast tests that pass through
its line, quickest first, until one fails. Of a line that runs when its module is imported, or that is compiled, it
asks those that look at definitions and those that pass through its file; where not all could be asked, those that
are named after its file, too. Which tests pass through which line is measured once, with coverage, and kept
(`--map`, to measure it anew).

A test notices a mutant if it fails with it twice, the second time alone, and passes without it alone; tests that
failed when the map was measured are not asked. Time is counted in CPU seconds of the tests: those that use several
times what they used without a mutant, and more, hang, and notice it. What hangs without using any is killed after
a long while, and notices nothing.

mutmut and cosmic-ray were looked at: the one wraps every function, which compiled code cannot be, and the other
runs all of the tests on each mutant.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mutants import Mutant, mutants_of

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("ir/passes", "simulator", "profiler/costs")
TESTS = (
    *("tests/golden", "tests/ir", "tests/readers/test_interpreter.py", "tests/simulator"),
    "--ignore=tests/ir/exporters",
    "tests/properties/test_plans.py",
    *(
        f"tests/profiler/test_costs_{kind}.py"
        for kind in ("attention", "convolution", "device", "estimate", "gemm", "memory")
    ),
    *(f"tests/cli/test_{name}.py" for name in ("flows", "run", "scenario")),
)
OF_DEFINITIONS = ["tests/golden/test_golden_formats.py", "tests/layout/test_records.py"]
"""Tests that look at what stands in files, asked of lines that run when a module is imported."""
KEPT = ROOT / "out" / "mutation"
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", "node_modules", "__pycache__", "out", ".mypy_cache", ".hypothesis"
)
LEAST_SECONDS, SLOWER, STALLED = 90, 4, 3600
"""CPU seconds that tests may always use, times those that they used once; seconds after which none will end."""
ADDRESS_SPACE = 8 * 2**30
"""Bytes of virtual memory of the process that runs tests of a mutant; the suite needs about 2 GiB."""
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
    failed = set()
    for case in ElementTree.parse(KEPT / "times.xml").iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}"
        seconds[name] = float(case.get("time") or 0)
        if case.find("failure") is not None or case.find("error") is not None:
            failed.add(name)
    for name in sorted(failed):
        print(f"fails without a mutant, is not asked: {name}")
    return {line: {t for t in tests if test_key(t) not in failed} for line, tests in through.items()}, seconds


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
    """Files of tests that are named after a mutant's file, or the first words of its name, or its folder."""
    folder, words = ROOT / "tests" / mutant.path.parts[0], mutant.path.stem.split("_")
    own = "_".join((mutant.path.parent.name, *words))
    names = ["_".join(words[:count]) + "*" for count in range(len(words), 0, -1)]
    for name in (own, *names, f"{mutant.path.parent.name}*"):
        if found := sorted(folder.rglob(f"test_{name}.py")):
            return [str(path.relative_to(ROOT)) for path in found]
    return []


class Runner:
    """Runs tests in a copy of the project.

    Args:
        root: the copy.
        seconds: of each test, without a mutant.
    """

    def __init__(self, root: Path, seconds: dict[str, float]) -> None:
        self.root, self.seconds = root, seconds
        self.sound: dict[str, bool] = {}
        self.compiled = root / "compiled"
        self.compiled.mkdir()

    def noticed(self, mutant: Mutant, tests: list[str]) -> str | None:
        """The test that fails with the mutant, or "" where they hang; None if none does."""
        while tests:
            failed = self._with(mutant, tests)
            if failed is None:
                return None
            if not failed:
                return None if self.first_failure(tests) is not None else ""
            if failed not in self.sound:
                self.sound[failed] = self.first_failure([failed]) is None
            if self.sound[failed] and self._with(mutant, [failed]) is not None:
                return failed
            tests = [test for test in tests if test != failed]
            if tests and not any("::" in test for test in tests):
                tests = [*tests, f"--deselect={failed}"]
        return None

    def _with(self, mutant: Mutant, tests: list[str]) -> str | None:
        """The first failure with a mutant in place."""
        path = self.root / mutant.path
        source, was = path.read_bytes(), path.stat()
        path.write_bytes(mutant.applied(source))
        # What is compiled of other files is as good as before, and what is of this one is thrown away.
        compiled = self.root / "compiled of the mutant"
        shutil.copytree(self.compiled, compiled)
        try:
            return self.first_failure(tests, compiled)
        finally:
            path.write_bytes(source)
            os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
            shutil.rmtree(compiled)

    def first_failure(self, tests: list[str], compiled: Path | None = None) -> str | None:
        """The first of the tests that fails, in a fork of this process, which has imported what takes long.

        Tests that hang are failures of the one that hangs, or, where that cannot be told, of "".
        """
        told = self.root / "failed"
        told.unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            most = LEAST_SECONDS + round(SLOWER * sum(self.seconds.get(test_key(test), 30.0) for test in tests))
            resource.setrlimit(resource.RLIMIT_CPU, (most, most + 10))
            # A mutant may ask for all the memory there is; address space is what Linux can limit.
            resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
            self._run(tests, told, compiled or self.compiled)
        deadline = time.monotonic() + STALLED
        while not os.waitpid(child, os.WNOHANG)[0]:
            if time.monotonic() > deadline:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                print("stalled, and killed", flush=True)
                return None
            time.sleep(0.05)
        return told.read_text() if told.exists() else None

    def _run(self, tests: list[str], told: Path, compiled: Path) -> None:
        os.setsid()
        silent = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(silent, stream)
        told.write_text("")  # if it is killed
        os.environ.update(environment(self.root), NUMBA_CACHE_DIR=str(compiled))
        os.chdir(self.root)
        sys.path[0] = str(self.root / "src")
        import numba
        import pytest

        numba.config.CACHE_DIR = str(compiled)

        class Teller:
            def pytest_runtest_logreport(self, report: Any) -> None:
                if report.failed:
                    told.write_text(report.nodeid)

        options = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
        if not pytest.main([*options, *tests], plugins=[Teller()]):
            told.unlink()
        os._exit(0)


def drawn(rooms: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """`count` mutants of the rooms' files, drawn evenly from all that can be made and compile."""
    paths = sorted(p.relative_to(ROOT) for room in rooms for p in (ROOT / room).rglob("*.py"))
    every = [mutant for path in paths for mutant in mutants_of(ROOT, path)]
    left_out = Counter(mutant.left_out for mutant in every if mutant.left_out)
    every = [mutant for mutant in every if not mutant.left_out]
    print(
        f"drawn from {len(every)} mutants; {left_out.total()} that cannot change a result are not drawn: "
        + ", ".join(f"{number} {why}" for why, number in left_out.most_common())
    )
    found = []
    for mutant in random.Random(seed).sample(every, len(every)):
        if len(found) == count:
            break
        try:
            compile(mutant.applied((ROOT / mutant.path).read_bytes()), str(mutant.path), "exec")
        except SyntaxError:
            continue
        found.append(mutant)
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
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        root = Path(folder) / "project"
        shutil.copytree(ROOT, root, symlinks=True, ignore=LEFT_OUT)
        runner = Runner(root, seconds)
        for number, mutant in enumerate(mutants, start=1):
            tests, before = covering(mutant, through, seconds), _cpu_seconds()
            known = (str(mutant.path), mutant.line) in through
            of_definitions = [] if known else OF_DEFINITIONS
            # Where all that pass through a line were asked, no other can notice.
            others = [] if known and len(tests) < MOST_TESTS else namesakes(mutant)
            every = (runner.noticed(mutant, asked) for asked in (of_definitions, tests, others))
            by = next((test for test in every if test is not None), None)
            survivors += [mutant] if by is None else []
            told = "SURVIVED" if by is None else "caught  "
            took = f"{len(tests)} tests, {_cpu_seconds() - before:.0f} CPU s"
            print(f"{number}/{len(mutants)} {told} {mutant} ({took}) {by or ''}", flush=True)
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} caught, seed {options.seed}, part {options.part}")
    for mutant in survivors:
        print(f"survived: {mutant}")


def _cpu_seconds() -> float:
    of_children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return of_children.ru_utime + of_children.ru_stime


if __name__ == "__main__":
    main()
