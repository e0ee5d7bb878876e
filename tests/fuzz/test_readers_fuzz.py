"""Whatever is wrong with a file: an answer that holds, or one line why not, soon and in little memory."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from damage import Shared, damage, pickled
from reader_targets import TARGETS, made

FUZZER = Path(__file__).with_name("fuzz_readers.py")
SLOW_CASES = 20_000
TORCH = {"ONNX", "configuration", "measured steps"}
EXTRA = {"ONNX": "onnx", "gml": "networkx", "kernels": "scipy"}
NAMES = [target.name for target in TARGETS]


def fuzz(*words: object) -> str:
    """The faults that the fuzzer finds; "" where there are none."""
    done = subprocess.run([sys.executable, FUZZER, *map(str, words)], capture_output=True, text=True, check=False)
    assert done.stderr == "" or done.returncode, done.stderr[-2000:]
    faults = [line for line in done.stdout.splitlines() if not line.startswith('{"reader"')]
    return "\n".join(faults)[:4000] if faults or done.returncode == 0 else done.stderr[-2000:]


def missing(name: str) -> bool:
    needed = (["torch", "transformers"] if name in TORCH else []) + ([EXTRA[name]] if name in EXTRA else [])
    return any(importlib.util.find_spec(module) is None for module in needed)


def test_a_few_cases_of_every_reader() -> None:
    """In one process a reader; those that need PyTorch, or seconds a case, are fuzzed by the slow tests alone."""
    quick = [target for target in TARGETS if target.fast and not missing(target.name)]
    words = [word for target in quick for word in ("--reader", target.name)]
    assert fuzz("--fast", *words) == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_many_cases(name: str) -> None:
    if missing(name):
        pytest.skip("needs an extra")
    assert fuzz("--reader", name, "--cases", SLOW_CASES // len(NAMES), "--seed", 2) == ""


def test_damage_is_a_function_of_the_generator() -> None:
    data = b'{"a": [1, 2, {"b": "text"}], "c": 1.5}'
    made_once, again = ([damage("x.json", data, Random(n)) for n in range(200)] for _ in range(2))
    assert made_once == again
    assert len(set(made_once)) > 120


def test_shared_values_are_small() -> None:
    assert len(pickled({"entries": Shared(60)})) < 1000


def test_files_of_a_seed_are_those_of_the_folder() -> None:
    assert made(lambda folder: (folder / "a").write_bytes(b"x")) == {"a": b"x"}
