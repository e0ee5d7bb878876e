"""`echosim calibrate`: what it writes is what the simulator reads, and what it cannot judge is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from echograph.simulator.form import Form
from echograph.workflow.calibration.form import calibrate


def rows(family: str, seed: int, count: int = 40) -> list[dict[str, Any]]:
    """Steps that are only matrix products, off by a tenth or so."""
    errors = np.random.default_rng(seed).normal(0.0, 0.1, count).tolist()
    return [
        {
            "id": f"{family}-{number}", "family": family, "predicted_s": 1.0, "measured_s": math.exp(error),
            "error": math.exp(-error) - 1, "durations_interval_s": [0.95, 1.05], "work": {"matrix products": 1.0},
            "unsaid": 0.0,
        }
        for number, error in enumerate(errors)
    ]  # fmt: skip


def test_the_command_writes_what_the_simulator_reads(cli, tmp_path: Path) -> None:
    results = [tmp_path / "one.json", tmp_path / "two.json"]
    skipped = {"id": "none-1", "family": "none", "error": None, "work": {}}
    for path, part in zip(
        results,
        ([row for n in range(3) for row in rows(f"family{n}", n)], [*rows("other", 7), skipped]),
        strict=True,
    ):
        path.write_text(json.dumps({"rows": part}))
    output = tmp_path / "form.json"
    found = cli(
        "echosim", "calibrate", *results, "-o", output, "--date", "2026-11-23", "--source", "made", "--json"
    )
    form = msgspec.json.decode(output.read_bytes(), type=Form)
    assert (form.date, form.source, form.steps, form.families) == ("2026-11-23", "made", 160, 4)
    assert form == calibrate(results, source="made", date="2026-11-23").form
    record = found.json()["leave_one_family_out"]
    assert list(record) == ["family0", "family1", "family2", "other", "all steps", "all families"]
    assert "family left out" in cli("echosim", "calibrate", *results).out


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("no JSON", "is no result"),
        ('{"rows": [{"id": "a"}]}', "is no result"),
        ('{"rows": [{"id": "a", "family": "b", "predicted_s": -1}]}', "is no result"),
        ('{"rows": [{"id": "a", "family": "b", "work": {"host": "x"}}]}', "is no result"),
        ('{"rows": [{"id": "a", "family": "b"}]}', "no row with a prediction"),
        ('{"rows": []}', "no row with a prediction"),
    ],
)
def test_what_is_no_result_is_refused(cli, tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    outcome = cli("echosim", "calibrate", path)
    assert outcome.status == 1
    assert says in outcome.err


def test_one_family_has_no_judge(cli, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"rows": rows("alone", 1)}))
    outcome = cli("echosim", "calibrate", path)
    assert outcome.status == 1
    assert "alone" in outcome.err
