"""`echosim run --trace`, then `echoprof analyze`: both commands say where the time goes alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ONE_NS = 1e-9
US = 1e-6


@pytest.mark.parametrize(
    "plan",
    [
        ("--gpus", 8),
        ("--gpus", 64, "--zero", 3),
        ("--gpus", 16, "--tp", 2, "--pp", 2, "--global-batch", 32),
        ("--gpus", 32, "--tp", 4, "--pp", 2, "--sequence-parallel", "--cluster", "dgx-a100"),
    ],
    ids=lambda plan: " ".join(map(str, plan)),
)
def test_the_breakdown_is_the_simulations(cli, graph: Path, tmp_path: Path, plan: tuple[object, ...]) -> None:
    path = tmp_path / "trace.json"
    said = cli("echosim", "run", graph, *plan, "--trace", path, "--json").json()
    parts = said["breakdown_s"]

    def table(name: str) -> dict[int, dict[str, float]]:
        rows = cli("echoprof", "analyze", path, name, "--no-cache", "--json").json()["rows"]
        return {row["rank"]: row for row in rows}

    temporal, overlap, steps = table("temporal-breakdown"), table("overlap"), table("steps")
    stages = said["plan"].get("pp", 1)
    assert list(temporal) == [said["gpus"] // stages * stage for stage in range(stages)]
    for step in steps.values():
        assert step["dur"] * US == pytest.approx(said["step_time_s"], rel=0, abs=ONE_NS)
    exposed = sum(parts["exposed_communication"].values())
    # The simulation's breakdown is of the program that ends last, which is one of the trace's.
    found = [
        rank
        for rank, row in temporal.items()
        if row["compute_time(us)"] * US == pytest.approx(parts["compute"], rel=0, abs=ONE_NS)
        and row["non_compute_time(us)"] * US == pytest.approx(exposed, rel=0, abs=ONE_NS)
    ]
    assert found
    row = temporal[found[0]]
    around = steps[found[0]]["dur"] - row["kernel_time(us)"]
    idle = parts["bubble"] + parts["wait"] + parts["host"]
    assert (row["idle_time(us)"] + around) * US == pytest.approx(idle, rel=0, abs=ONE_NS)
    hidden = overlap[found[0]]["communication_time(us)"] - overlap[found[0]]["overlapped_time(us)"]
    assert hidden * US == pytest.approx(exposed, rel=0, abs=ONE_NS)


def test_ranks_that_are_traced_keep_their_numbers(cli, graph: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    cli("echosim", "run", graph, "--gpus", 16, "--tp", 2, "--trace", path, "--trace-ranks", "0,9", "--json").json()
    answer = cli("echoprof", "analyze", path, "steps", "--no-cache", "--json").json()
    assert [row["rank"] for row in answer["rows"]] == [0, 9]
    assert answer["notes"] == []
    one = cli("echoprof", "analyze", path, "temporal-breakdown", "--ranks", "9", "--no-cache", "--json").json()
    assert [row["rank"] for row in one["rows"]] == [9]
    job = json.loads(path.read_text())["distributedInfo"]
    assert job["world_size"] == 16 and "rank" not in job
    assert {tuple(group["ranks"]) for group in job["pg_config"]} == {
        (0, 1),
        (8, 9),
        tuple(range(0, 16, 2)),
        tuple(range(1, 16, 2)),
    }
