"""Which collectives a trace holds, of what size, of which group."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_traces import job, launched, operator, work, write

from echograph.errors import FormatError
from echograph.ir.comms.record import FORMAT, CallSignature, GroupLine, HeaderLine, RecordLine, encode
from echograph.profiler.traces import read_trace
from echograph.profiler.traces.collectives import (
    MatchedCollective,
    collective_of_kernel,
    collectives,
    collectives_of_job,
)

KERNEL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "reduce_scatter"),
        ("c10d::_allgather_base_", "all_gather"),
        ("nccl:all_to_all", "all_to_all"),
        ("gloo:all_reduce", "all_reduce"),
        ("c10d::_reduce_oop", "reduce"),
        ("_reduce_scatter_tensor_coalesced", "reduce_scatter"),
        ("ncclDevKernel_Generic", ""),
    ],
)
def test_names_of_one_collective(name: str, kind: str) -> None:
    assert collective_of_kernel(name) == kind


def test_sizes_and_groups_are_read_from_whichever_row_has_them(tmp_path: Path) -> None:
    groups = {"distributedInfo": {"rank": 0, "pg_config": [{"pg_name": "0", "ranks": [0, 1]}]}}
    said: dict[str, Any] = {"Input Dims": [[1024], []], "Input type": ["c10::BFloat16", ""]}
    named = {"Collective name": "_allgather_base", "In msg nelems": 8, "Out msg nelems": 32, "dtype": "Half"}
    named |= {"Process Group Name": "3", "Process Group Ranks": "[0, 2, 4, 6]", "Group size": 4}
    gloo = operator("gloo:all_reduce", 30, 50, tid=2, **said) | {"cat": "user_annotation"}
    events = [
        operator("c10d::allreduce_", 10, 5),
        gloo,
        work("ncclDevKernel_AllGather_RING_LL", 20, 30, 9, stream=20, **named),
    ]
    found = collectives(read_trace(write(tmp_path / "rank0.json", events, rank=None, **groups)))
    reduced, gathered = found
    assert (reduced.kind, reduced.nbytes, reduced.ranks, reduced.issue) == ("all_reduce", 2048, (0, 1), 0)
    assert (gathered.kind, gathered.nbytes, gathered.ranks, gathered.group) == (
        "all_gather",
        64,
        (0, 2, 4, 6),
        "3",
    )


def test_a_size_comes_from_the_annotation_where_the_operator_was_given_a_list(tmp_path: Path) -> None:
    """PyTorch 2.0 records no shapes of lists of tensors; the annotation within has those of what goes in."""
    listed = {"Input Dims": [[], []], "Input type": ["TensorList", "Scalar"]}
    said = {"Input Dims": [[1000]], "Input type": ["float"]}
    events = [
        operator("record_param_comms", 10, 20, **listed),
        operator("nccl:all_reduce", 11, 10, **said) | {"cat": "user_annotation"},
        *launched("ncclKernel_AllReduce_RING_LL_Sum_float", 12, 40, 30, 1, stream=20),
    ]
    (call,) = collectives(read_trace(write(tmp_path / "rank0.json", events)))
    assert (call.kind, call.nbytes, call.dtype) == ("all_reduce", 4000, "float")


@pytest.mark.parametrize(
    ("operator_name", "annotation", "kind", "dims"),
    [
        ("c10d::_allgather_base_", "nccl:_all_gather_base", "all_gather", [[4096], [64], []]),
        ("c10d::_reduce_scatter_base_", "nccl:_reduce_scatter_base", "reduce_scatter", [[64], [4096], []]),
        ("c10d::alltoall_base_", "", "all_to_all", [[4096], [4000], []]),
    ],
)
def test_the_whole_buffer_is_the_larger_of_what_goes_in_and_comes_out(
    tmp_path: Path, operator_name: str, annotation: str, kind: str, dims: list[list[int]]
) -> None:
    types = ["signed char", "signed char", ""]
    events = [
        operator(operator_name, 10, 20, **{"Input Dims": dims, "Input type": types}),
        *launched("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t", 12, 40, 30, 1, stream=20),
    ]
    if annotation and kind == "all_gather":  # of which ranks it is is not said: its shape alone is no size
        said = {"Input Dims": [[64]], "Input type": ["signed char"]}
        events.insert(1, operator(annotation, 11, 10, **said) | {"cat": "user_annotation"})
    (call,) = collectives(read_trace(write(tmp_path / "rank0.json", events)))
    assert (call.kind, call.nbytes) == (kind, 4096)


@pytest.mark.parametrize(
    "said",
    [
        {"In msg nelems": 4, "Out msg nelems": 2**64 - 1, "dtype": "Float"},
        {"Input Dims": [[2**40, 2**40]], "Input type": ["float"]},
        {"Input Dims": [[-4]], "Input type": ["float"]},
    ],
)
def test_a_size_that_no_buffer_has_is_not_known(tmp_path: Path, said: dict[str, Any]) -> None:
    events = [work("ncclDevKernel_AllReduce", 20, 30, 9, stream=20, **said)]
    (call,) = collectives(read_trace(write(tmp_path / "rank0.json", events)))
    assert (call.kind, call.nbytes, call.dtype) == ("all_reduce", 0, "")


def gloo(name: str, called: str, ts: float) -> list[dict[str, Any]]:
    """A call and, 20 us later, what a thread of gloo did for it."""
    said: dict[str, Any] = {"Input Dims": [[100]], "Input type": ["float"]}
    done = operator(f"gloo:{name}", ts + 20, 30, tid=9, **said) | {"cat": "user_annotation"}
    return [operator(f"c10d::{called}", ts, 10), done]


def test_gloo_reduces_everything_where_a_part_is_asked_for(tmp_path: Path) -> None:
    events = [
        *gloo("all_reduce", "_reduce_scatter_base_", 0),
        *gloo("all_reduce", "allreduce_", 100),
        *gloo("all_gather", "_allgather_base_", 200),
    ]
    found = collectives(job(tmp_path, events)[0])
    assert [(call.kind, call.issue) for call in found] == [("all_reduce", 0), ("all_reduce", 2), ("all_gather", 4)]


def test_groups_come_from_a_trace_of_collectives_beside_it(tmp_path: Path) -> None:
    base = 1_700_000_000_000_000_000
    several = [{"pg_name": "0", "ranks": [0, 1, 2, 3]}, {"pg_name": "1", "ranks": [0, 1]}]
    job_says = {"distributedInfo": {"rank": 0, "world_size": 4, "pg_config": several}, "baseTimeNanoseconds": base}
    events = [*gloo("all_reduce", "allreduce_", 1000), *gloo("all_reduce", "allreduce_", 2000)]
    path = write(tmp_path / "0" / "trace.json", events, rank=None, **job_says)
    assert [call.ranks for call in collectives(read_trace(path))] == [(), ()]
    said: list[RecordLine] = [HeaderLine(format=FORMAT, version=(1, 0), rank=0, world=4, host="here")]
    for number, ranks in enumerate(((0, 1), (0, 1, 2, 3))):
        name = ",".join(map(str, ranks))
        said.append(GroupLine(name=name, ranks=ranks))
        said.append(
            CallSignature(
                id=number, op="all_reduce", group=name, channel=name, bytes=4, input_bytes=4, output_bytes=4
            )
        )
    queued = [base + 1_004_000, base + 2_003_000]
    lines = [json.dumps([number, number, at, 0, 40_000, 0]).encode() + b"\n" for number, at in enumerate(queued)]
    (tmp_path / "0" / "comms.jsonl").write_bytes(b"".join([*map(encode, said), *lines]))
    found = collectives(read_trace(path))
    assert [(call.group, call.ranks) for call in found] == [("0,1", (0, 1)), ("0,1,2,3", (0, 1, 2, 3))]
    (tmp_path / "0" / "comms.jsonl").write_bytes(b"nothing of this kind\n")
    with pytest.raises(FormatError, match=r"comms\.jsonl"):
        collectives(read_trace(path))


def test_collectives_of_groups_are_matched_in_their_groups(tmp_path: Path) -> None:
    """Two pairs of ranks, each of which reduces twice, and all of them once."""

    def rank(pair: list[int]) -> list[dict[str, Any]]:
        kernels = []
        for number, ranks in enumerate((pair, [0, 1, 2, 3], pair)):
            said = {"Collective name": "allreduce", "In msg nelems": 4, "Out msg nelems": 4, "dtype": "Float"}
            said |= {"Process Group Name": str(ranks[0]), "Process Group Ranks": str(ranks)}
            kernels += launched(
                "ncclDevKernel", 10.0 * number, 10.0 * number + 2, 5, number + 1, stream=20, **said
            )
        return kernels

    met, notes = collectives_of_job(job(tmp_path, rank([0, 1]), rank([0, 1]), rank([2, 3]), rank([2, 3])))
    assert notes == []
    assert sorted((tuple(one.calls), one.number) for one in met) == [
        ((0, 1), 0), ((0, 1), 1), ((0, 1, 2, 3), 0), ((2, 3), 0), ((2, 3), 1),
    ]  # fmt: skip


def windows(
    tmp_path: Path, begins: list[int], count: int, late: dict[int, float] | None = None
) -> list[MatchedCollective]:
    """All-reduces of growing size, one a millisecond; each rank's profile begins at another of them."""
    parts = []
    for rank, begin in enumerate(begins):
        events = []
        for number in range(begin, count):
            said = {"Collective name": "allreduce", "dtype": "Float", "Process Group Ranks": "[0, 1, 2]"}
            said |= {"In msg nelems": 100 * (number % 4), "Out msg nelems": 100 * (number % 4)}
            start = 1000 * number + 7 * rank + (late or {}).get(rank, 0)
            end = 1000 * number + 300 + (late or {}).get(rank, 0)
            events += launched(KERNEL, start - 5, start, end - start, number + 1, stream=20, **said)
        parts.append(events)
    return collectives_of_job(job(tmp_path, *parts))[0]


def test_profiles_that_begin_one_after_the_other_are_matched_by_time(tmp_path: Path) -> None:
    met = windows(tmp_path, [0, 3, 2], 12)
    assert len(met) == 9
    sizes = [{call.nbytes for call in one.calls.values()} for one in met]
    assert all(len(size) == 1 for size in sizes) and sizes[0] == {4 * 100 * 3}


def test_clocks_that_disagree_match_nothing(tmp_path: Path) -> None:
    assert windows(tmp_path, [0, 3, 2], 12, {2: 500.0}) == []
    # Equally many are matched by their order whatever the clocks say.
    assert len(windows(tmp_path / "equal", [0, 0, 0], 12, {2: 500.0})) == 12


def test_a_shift_at_which_sizes_differ_is_not_taken(tmp_path: Path) -> None:
    """A clock that is wrong by just one interval looks right but for the sizes."""
    assert windows(tmp_path, [0, 0, 1], 12, {2: 1000.0}) == []
