"""A script without ranks and on real ones communicates the same, in order: the captured step repeats there."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from script_ranks import PROGRAMS, captured, phases, repeats, traced

CASES = {
    "ddp": ("ddp", 2, ()),
    "ddp, recomputed": ("ddp", 2, ("--recompute", "not-reentrant")),
    "ddp, recomputed by re-entry": ("ddp", 2, ("--recompute", "reentrant")),
    "ddp, unused parameters": ("ddp", 2, ("--spare",)),
    "fsdp2": ("fsdp2", 2, ()),
    "fsdp2, recomputed": ("fsdp2", 2, ("--recompute", "not-reentrant")),
    "fsdp2, recomputed by re-entry": ("fsdp2", 2, ("--recompute", "reentrant")),
    "hsdp, two micro-batches": ("fsdp2", 4, ("--replicas", "2", "--accumulate", "2")),
    "fsdp1": ("fsdp1", 2, ()),
    "dtensor": ("tensor_parallel", 2, ()),
    "dtensor, sequence": ("tensor_parallel", 2, ("--sequence",)),
    "dtensor and data": ("tensor_parallel", 4, ("--sequence",)),
    "1f1b": ("pipeline", 2, ()),
    "gpipe": ("pipeline", 3, ("--schedule", "gpipe")),
    "interleaved 1f1b": ("pipeline", 2, ("--schedule", "interleaved")),
    "looped breadth first": ("pipeline", 2, ("--schedule", "looped")),
    "interleaved zero bubble": ("pipeline", 2, ("--schedule", "zero-bubble")),
    "zero bubble, V": ("pipeline", 2, ("--schedule", "zbv")),
    "spawned": ("spawned", 2, ()),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_operation_group_bytes_type_and_phase_in_order(tmp_path: Path, case: str) -> None:
    name, size, arguments = CASES[case]
    script = PROGRAMS / f"{name}.py"
    without = captured(script, size, *arguments)
    spawns = name == "spawned"
    real = traced(script, size, tmp_path, *arguments, "--steps", "5", spawns=spawns)
    for rank in range(size):
        assert without[rank]
        assert repeats(without[rank], real[rank]), rank
        # Five steps, of which the first may differ (DDP has its final buckets from the second on).
        told = Counter(call[:-1] for call in real[rank])
        for call, count in Counter(call[:-1] for call in without[rank]).items():
            assert 4 * count <= told[call] <= 5 * count
    if name in ("ddp", "fsdp1", "fsdp2", "tensor_parallel"):
        assert {"backward"} <= phases(real[0]) <= {"forward", "backward", "recompute", "optimizer"}
