"""Damaged graphs through the whole of `echosim run`: simulated, or refused in one line; nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
CONFORMANCE = HERE.parent / "golden" / "conformance"


def mutate(path: Path, count: int, seed: int = 20) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-W", "error", HERE / "mutations.py", path, str(count), str(seed)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    record: dict[str, Any] = json.loads(done.stdout)
    return record


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["step", "job"])
def test_damage_to_a_compiled_graph_never_breaks_the_simulator(
    kind: str, count: int, graph: Path, job_graph: Path
) -> None:
    record = mutate(graph if kind == "step" else job_graph, count)
    assert record["failures"] == []
    assert record["outcomes"]["whole file simulated"] == 1
    assert min(record["outcomes"][outcome] for outcome in ("refused", "simulated")) > count // 20


@pytest.mark.slow
@pytest.mark.parametrize("name", ["aliases", "job", "kinds", "large_numbers", "ranks", "two_layers"])
def test_damage_to_a_conformance_graph_never_breaks_the_simulator(name: str) -> None:
    assert mutate(CONFORMANCE / f"{name}.pb", 1000)["failures"] == []


def test_durations_beyond_the_clock_are_refused(cli, graph: Path, tmp_path: Path) -> None:
    from echograph.ir.files import fields, with_checksum
    from echograph.proto import workload_pb2 as pb

    whole = graph.read_bytes()
    message = pb.Graph.FromString(b"".join(whole[f.start : f.end] for f in fields(whole)))
    for chunk in message.op_chunks:
        for op in chunk.ops:
            op.durations.add(device=0, picoseconds=2**62, source=pb.SOURCE_IMPORTED)
    path = tmp_path / "long.pb"
    path.write_bytes(b"".join(with_checksum([message.SerializeToString()])))
    outcome = cli("echosim", "run", path)
    assert outcome.status == 1
    assert "days" in outcome.err
