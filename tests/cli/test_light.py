"""What a command must not load: `--help` and `echosim run` start without PyTorch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {"torch", "transformers", "scipy", "numba"}
SCRIPT = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {heavy!r}:
            raise AssertionError("imported " + name)
sys.meta_path.insert(0, Refuse())
from echograph.cli.{command} import main
sys.argv = {arguments!r}
main()
"""


def run_without(heavy: set[str], *arguments: object) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, where the named packages cannot be imported."""
    words = [str(a) for a in arguments]
    script = SCRIPT.format(heavy=heavy, command=words[0], arguments=words)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "arguments",
    [
        ("echoc", "--help"),
        ("echoc", "compile", "--help"),
        ("echosim", "--help"),
        ("echosim", "run", "--help"),
        ("echoprof", "--help"),
        ("echoprof", "fit", "--help"),
        ("echoprof", "analyze", "--help"),
        ("echoprof", "comms", "--help"),
        ("echoprof", "ops", "--help"),
        ("echoc", "export", "--help"),
        ("echoc", "models"),
        ("echosim", "clusters"),
        ("echosim", "devices"),
    ],
    ids=" ".join,
)
def test_help_and_lists_load_nothing_heavy(arguments: tuple[str, ...]) -> None:
    done = run_without(HEAVY, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_help_loads_no_protobuf_either() -> None:
    done = run_without(HEAVY | {"google"}, "echosim", "run", "--help")
    assert done.returncode == 0, done.stderr


def test_a_simulation_loads_nothing_heavy(graph: Path, tmp_path: Path) -> None:
    for command in (("run", graph, "--gpus", "1024", "-o", tmp_path / "r", "--trace", tmp_path / "t"),):
        done = run_without(HEAVY, "echosim", *command)
        assert done.returncode == 0, done.stderr
    for command in ("show", "check", "text"):
        done = run_without(HEAVY, "echoc", command, graph)
        assert done.returncode == 0, done.stderr


def test_the_guard_of_these_tests_works() -> None:
    done = run_without({"json"}, "echosim", "--help")
    assert done.returncode != 0
