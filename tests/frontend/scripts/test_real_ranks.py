"""A script without ranks and on real ones communicates the same, in order: the captured step repeats there."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from script_ranks import PROGRAMS, captured, repeats, traced

CASES = {
    "ddp": ("ddp", 2, ()),
    "fsdp2": ("fsdp2", 2, ()),
    "hsdp, two micro-batches": ("fsdp2", 4, ("--replicas", "2", "--accumulate", "2")),
    "fsdp1": ("fsdp1", 2, ()),
    "dtensor": ("tensor_parallel", 2, ()),
    "dtensor, sequence": ("tensor_parallel", 2, ("--sequence",)),
    "dtensor and data": ("tensor_parallel", 4, ("--sequence",)),
    "1f1b": ("pipeline", 2, ()),
    "gpipe": ("pipeline", 3, ("--schedule", "gpipe")),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_operation_group_bytes_and_type_in_order(tmp_path: Path, case: str) -> None:
    name, size, arguments = CASES[case]
    script = PROGRAMS / f"{name}.py"
    without = captured(script, size, *arguments)
    real = traced(script, size, tmp_path, *arguments, "--steps", "5")
    for rank in range(size):
        assert without[rank]
        assert repeats(without[rank], real[rank]), rank
        # Five steps, of which the first may differ (DDP has its final buckets from the second on).
        for call, count in Counter(without[rank]).items():
            assert 4 * count <= real[rank].count(call) <= 5 * count
