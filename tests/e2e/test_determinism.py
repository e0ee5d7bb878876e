"""The same input gives the same bytes, whatever a process hashes or when it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.torch
MODEL = {"model_type": "bert", "architectures": ["BertForPreTraining"], "num_hidden_layers": 3}
SCRIPT = """
import sys
from importlib import import_module
for words in {0!r}:
    sys.argv = words
    try:
        import_module("echograph.cli." + words[0]).main()
    except SystemExit as stop:
        assert not stop.code, words
"""


def run(seed: int, *commands: list[object]) -> None:
    """Runs commands one after another in a process of their own."""
    script = SCRIPT.format([[str(word) for word in command] for command in commands])
    environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


@pytest.mark.slow
def test_two_processes_write_the_same_bytes(tmp_path: Path) -> None:
    model = tmp_path / "model.json"
    model.write_text(json.dumps(MODEL))
    records: list[dict[str, Any]] = []
    for seed in (1, 2):
        graph, result, trace = (tmp_path / f"{name}{seed}" for name in ("graph", "result", "trace"))
        run(
            seed,
            ["echoc", "compile", "-m", model, "--batch-size", 4, "-o", graph],
            ["echosim", "run", graph, "--gpus", 64, "-o", result, "--trace", trace],
        )
        records.append(json.loads(result.read_text()))
        records[-1]["simulation"].pop("wall_s")
    assert (tmp_path / "graph1").read_bytes() == (tmp_path / "graph2").read_bytes()
    assert (tmp_path / "trace1").read_bytes() == (tmp_path / "trace2").read_bytes()
    assert json.dumps(records[0]) == json.dumps(records[1])
