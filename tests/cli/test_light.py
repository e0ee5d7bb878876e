"""What a command must not load: `--help` and `echosim run` start without PyTorch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HEAVY = {"torch", "transformers", "scipy", "numba"}
SCRIPT = """
import sys
from importlib import import_module
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {heavy!r}:
            raise AssertionError("imported " + name)
sys.meta_path.insert(0, Refuse())
for words in {commands!r}:
    sys.argv = words
    try:
        import_module("echograph.cli." + words[0]).main()
    except SystemExit as stop:
        if stop.code:
            sys.exit(f"{{' '.join(words)}}: exit status {{stop.code}}")
"""
LIGHT = (
    "echoc --help",
    "echoc compile --help",
    "echosim --help",
    "echosim run --help",
    "echoprof --help",
    "echoprof fit --help",
    "echoprof analyze --help",
    "echoprof comms --help",
    "echoprof ops --help",
    "echoc export --help",
    "echoc models",
    "echosim clusters",
    "echosim devices",
)


def run_without(heavy: set[str], *commands: tuple[object, ...]) -> subprocess.CompletedProcess[str]:
    """Commands one after another in one process, where the named packages cannot be imported.

    What one of them has imported the next finds: no harm, as it is none of these.
    """
    words = [[str(word) for word in command] for command in commands]
    script = SCRIPT.format(heavy=heavy, commands=words)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)


def test_help_and_lists_load_nothing_heavy() -> None:
    done = run_without(HEAVY, *(tuple(command.split()) for command in LIGHT))
    assert done.returncode == 0, done.stderr
    assert all(
        word in done.stdout for word in ("Usage: echoprof ops", "bert-base-uncased", "dgx-h100", "h100-sxm")
    )


def test_help_loads_no_protobuf_either() -> None:
    done = run_without(HEAVY | {"google"}, ("echosim", "run", "--help"))
    assert done.returncode == 0, done.stderr


def test_a_simulation_loads_nothing_heavy(graph: Path, tmp_path: Path) -> None:
    run = ("echosim", "run", graph, "--gpus", "1024", "-o", tmp_path / "r", "--trace", tmp_path / "t")
    done = run_without(HEAVY, run, *(("echoc", command, graph) for command in ("show", "check", "text")))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "t").exists()


def test_the_guard_of_these_tests_works() -> None:
    assert "imported json" in run_without({"json"}, ("echosim", "--help")).stderr
    done = run_without({"google"}, ("echosim", "--help"), ("echoc", "show", "no.pb"))
    assert done.returncode != 0 and "imported google" in done.stderr
    assert "Usage: echosim" in done.stdout, "the first command went well"
