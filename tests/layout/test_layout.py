"""The house rules that a tool can hold: links, sizes, words, directions of import."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import echograph

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("frontend", "ir", "models", "profiler", "proto", "simulator")
FOLDERS = (*PACKAGES, "src", "tests", "benchmarks", "docs", "examples")
TEXT_ENDINGS = {".py", ".md", ".toml", ".txt", ".proto", ".json", ".js", ".yml", ".yaml", ".csv", ".cfg", ""}


def files() -> Iterator[Path]:
    """The project's own text files, each once."""
    for top in (*(ROOT / name for name in FOLDERS), *(p for p in ROOT.iterdir() if p.is_file())):
        for path in top.rglob("*") if top.is_dir() else [top]:
            linked = any(parent.is_symlink() for parent in path.parents if parent != ROOT)
            hidden = {"__pycache__", "node_modules"} & set(path.parts)
            # What a run leaves behind (.coverage, a database) is not the project's text, nor is a worktree's .git.
            left_behind = path.name.startswith(".coverage") or path.name == ".git"
            if path.is_file() and not linked and not hidden and not left_behind and path.suffix in TEXT_ENDINGS:
                yield path


@pytest.mark.parametrize("name", PACKAGES)
def test_each_folder_is_linked_into_the_one_namespace(name: str) -> None:
    link = ROOT / "src" / "echograph" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / ".." / name
    assert (ROOT / name / "__init__.py").is_file()


def test_the_namespace_holds_nothing_else() -> None:
    found = {p.name for p in (ROOT / "src" / "echograph").iterdir()} - {"__pycache__"}
    leaves = {"errors.py", "notes.py", "options.py", "progress.py", "registry.py", "units.py"}
    assert found == {*PACKAGES, *leaves, "cli", "workflow", "__init__.py", "__main__.py", "py.typed"}


def test_the_project_speaks_of_itself_alone() -> None:
    folders = "|".join(("work", "tmp", "root", "home/[a-z]+"))
    unfinished = "|".join(("TO" + "DO", "FIX" + "ME", "X" * 3))
    banned = re.compile(rf"(?<![\w.])/(?:{folders})/|\b(?:{unfinished})\b|artifact" + r"ory|https?://[\w.]*pypi\.")
    hits = []
    for path in files():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if banned.search(line):
                hits.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert hits == []


def test_imports_point_one_way() -> None:
    tool = Path(sys.executable).with_name("lint-imports")
    if not tool.exists():
        pytest.skip("import-linter is not installed: it is in the [dev] extra")
    done = subprocess.run([tool, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "0 broken" in done.stdout


@pytest.mark.parametrize(
    ("package", "absent"),
    [
        ("echograph", {"numpy", "typer"}),
        ("echograph.models", {"torch", "transformers", "numpy"}),
        ("echograph.simulator.simulate", {"torch", "numba", "google", "scipy"}),
        ("echograph.profiler.costs.estimate", {"torch", "numba", "google", "scipy"}),
        ("echograph.ir.builder", {"torch", "google"}),
        ("echograph.frontend.pytorch", {"torch"}),
    ],
)
def test_what_an_import_does_not_load(package: str, absent: set[str]) -> None:
    script = f"import sys, {package}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert {name.partition(".")[0] for name in loaded.split()} & absent == set()


def test_generated_modules_are_those_of_the_schemas() -> None:
    schemas = {p.stem for p in (ROOT / "proto").glob("*.proto")}
    generated = {p.stem.removesuffix("_pb2") for p in (ROOT / "proto").glob("*_pb2.py")}
    assert generated <= schemas
    assert {p.stem.removesuffix("_pb2") for p in (ROOT / "proto").glob("*_pb2.pyi")} == generated


def test_the_tests_mirror_the_folders() -> None:
    beside = {"benchmarks", "cli", "docs", "e2e", "golden", "layout", "properties", "readers", "workflow"}
    helping = {"fuzz", "mutation", "processes", "testbed"}
    found = {p.name for p in (ROOT / "tests").iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert found <= {*PACKAGES, *beside, *helping}


def test_the_package_names_its_commands() -> None:
    def asked(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "echograph", *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    listed = asked()
    assert (listed.returncode, listed.stderr) == (0, "")
    assert listed.stdout == asked("--version").stdout
    first, *commands = listed.stdout.splitlines()
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert first == f"echograph {echograph.__version__}"
    assert {line.split()[0] for line in commands} == scripts.keys()
    assert asked("echosim", "--version").stdout == f"{echograph.__version__}\n"
    wrong = asked("echoism")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("echograph: unknown command 'echoism': did you mean 'echosim'?")
