"""Positions without unfolding are those of the program written out."""

from __future__ import annotations

import numpy as np
import pytest
from conformance_graphs import GRAPHS

from echograph.ir.schedule import Schedule


@pytest.mark.parametrize("name", GRAPHS)
def test_positions_are_those_of_the_program_written_out(name: str) -> None:
    graph = GRAPHS[name]()
    for program in graph.programs:
        schedule = Schedule(graph, program)
        written = [(i, m, op) for _, low, high, i, m in program.calls.tolist() for op in range(low, high)]
        assert len(schedule) == len(written)
        columns = [np.array(c, np.int64) for c in zip(*written, strict=True)] or [np.zeros(0, np.int64)] * 3
        assert schedule.position(*columns).tolist() == list(range(len(written)))


def test_what_does_not_run_has_no_position() -> None:
    graph = GRAPHS["job"]()
    first = Schedule(graph, graph.programs[0])
    zero = np.zeros(1, np.int64)
    assert first.position(zero, zero, zero + 6).tolist() == [-1]
    assert first.position(zero, zero + 1, zero + 6).tolist() == [12]
    assert first.position(zero, zero, zero + 8).tolist() == [-1]
    assert first.micro_batches.tolist() == [0, 1]
