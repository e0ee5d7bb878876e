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
SCRIPT = "import sys; from echograph.cli.{0} import main; sys.argv = {1!r}; main()"


def run(seed: int, *arguments: object) -> None:
    words = [str(a) for a in arguments]
    environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
    subprocess.run([sys.executable, "-c", SCRIPT.format(words[0], words)], env=environment, check=True)


def test_two_processes_write_the_same_bytes(tmp_path: Path) -> None:
    model = tmp_path / "model.json"
    model.write_text(json.dumps(MODEL))
    records: list[dict[str, Any]] = []
    for seed in (1, 2):
        graph, result, trace = (tmp_path / f"{name}{seed}" for name in ("graph", "result", "trace"))
        run(seed, "echoc", "compile", "-m", model, "--batch-size", 4, "-o", graph)
        run(seed, "echosim", "run", graph, "--gpus", 64, "-o", result, "--trace", trace)
        records.append(json.loads(result.read_text()))
        records[-1]["simulation"].pop("wall_s")
    assert (tmp_path / "graph1").read_bytes() == (tmp_path / "graph2").read_bytes()
    assert (tmp_path / "trace1").read_bytes() == (tmp_path / "trace2").read_bytes()
    assert json.dumps(records[0]) == json.dumps(records[1])
