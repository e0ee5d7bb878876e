"""Predictions of stored graphs under plans of every kind, as they were when they were last looked at.

`python tests/golden/predictions/golden.py` writes `records/` anew; `git diff` then shows which predictions a
change has moved, and by how much.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent


class Case(NamedTuple):
    """A line of `plans.txt`."""

    name: str
    graph: Path
    options: tuple[str, ...]

    @property
    def stored(self) -> Path:
        return HERE / "records" / f"{self.name}.json"


def cases() -> tuple[Case, ...]:
    lines = (HERE / "plans.txt").read_text().splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    return tuple(
        Case(name, HERE / "graphs" / f"{graph}.pb", tuple(options))
        for name, graph, *options in filter(None, words)
    )


def predict(case: Case) -> dict[str, Any]:
    """What `echosim run --json` prints, but for the time that it took and most tensors of the peak."""
    from echograph.cli.app import run
    from echograph.cli.echosim import app

    out, err = StringIO(), StringIO()
    before, sys.argv = sys.argv, ["echosim", "run", str(case.graph), *case.options, "--json"]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            run(app, "echosim")
    except SystemExit as stop:
        if stop.code != 0:
            raise AssertionError(f"{case.name}: {err.getvalue()}") from None
    finally:
        sys.argv = before
    record: dict[str, Any] = json.loads(out.getvalue())
    del record["simulation"]["wall_s"]
    del record["memory"]["tensors"][2:]  # what follows is as the first ones are
    return record


def differences(before: Any, after: Any, where: str = "") -> Iterator[str]:
    """What differs between two records, but for last digits of numbers: libraries of mathematics decide them."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys((*before, *after)):
            yield from differences(before.get(key), after.get(key), f"{where}.{key}" if where else key)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, pair in enumerate(zip(before, after, strict=True)):
            yield from differences(*pair, f"{where}[{index}]")
    elif isinstance(before, float) and isinstance(after, float):
        if abs(before - after) > 1e-9 * max(abs(before), abs(after)):
            yield f"{where}: {before} -> {after}"
    elif type(before) is not type(after) or before != after:
        yield f"{where}: {before} -> {after}"


if __name__ == "__main__":
    for case in cases():
        record = predict(case)
        case.stored.parent.mkdir(exist_ok=True)
        case.stored.write_text(json.dumps(record, indent=1) + "\n")
        print(f"{case.name:20} {record['step_time_s']:.6f} s")
