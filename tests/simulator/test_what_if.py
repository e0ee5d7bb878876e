"""What a scale selects, row by row; and what is said where it selects nothing."""

from __future__ import annotations

import pytest

from echograph.errors import UsageError
from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import Axis, JobGraph
from echograph.ir.types import CollectiveKind, DType, Payload, Phase
from echograph.simulator.limits import MAX_FACTOR, Scale, factors, parse_scale


def job() -> JobGraph:
    """Three kernels of two modules, collectives over one axis and over two, a message both ways, and host work."""
    builder = GraphBuilder(streams=("compute", "comm"))
    builder.mesh = (Axis(name="dp", size=2), Axis(name="cp", size=2), Axis(name="tp", size=2))
    both, tp = builder.group("both", axes=("dp", "cp")), builder.group("tp", axes=("tp",))
    for name, module in (("aten.mm", "layers.0.mlp"), ("aten.mul", "layers.0.mlp"), ("aten.mm", "head")):
        builder.compute(name, phase=Phase.FORWARD, flops=1, module=module)
    for group, kind in ((both, CollectiveKind.ALL_REDUCE), (tp, CollectiveKind.ALL_GATHER)):
        builder.collective("it", kind, group=group, bytes_per_rank=8, dtype=DType.FP32, stream=1)
    message = {"group": tp, "peer": 1, "tag": 0, "nbytes": 8, "payload": Payload.ACTIVATION, "stream": 1}
    builder.send("send", **message)  # type: ignore[arg-type]
    builder.recv("recv", **message)  # type: ignore[arg-type]
    builder.host("wait")
    builder.program([(0, 0, 8, 0, 0)])
    return builder.build(JobGraph)


@pytest.mark.parametrize(
    ("selector", "rows"),
    [
        ("compute", {0, 1, 2}),
        ("comm", {3, 4, 5, 6}),
        ("comm.dp", {3}),
        ("comm.cp", {3}),
        ("comm.dp+cp", {3}),
        ("comm.tp", {4, 5, 6}),
        ("collective:all_reduce", {3}),
        ("collective:all_gather", {4}),
        ("op:aten.mm", {0, 2}),
        ("op:aten.m*", {0, 1, 2}),
        ("module:*.mlp", {0, 1}),
        ("module:head", {2}),
        ("host", set()),
    ],
)
def test_what_a_scale_selects(selector: str, rows: set[int]) -> None:
    scaled, host = factors(job(), [Scale(selector=selector, factor=3.0)])
    assert scaled.tolist() == [3.0 if row in rows else 1.0 for row in range(8)]
    assert host == (3.0 if selector == "host" else 1.0)


def test_scales_multiply() -> None:
    scales = [
        Scale(selector=s, factor=f) for s, f in (("compute", 2), ("op:aten.mm", 5), ("host", 2), ("host", 7))
    ]
    scaled, host = factors(job(), scales)
    assert scaled.tolist() == [10, 2, 10, 1, 1, 1, 1, 1]
    assert host == 14
    assert factors(job(), [])[1] == 1.0


@pytest.mark.parametrize(
    ("selector", "says"),
    [
        ("comm.pp", r"it has comm.dp\+cp, comm.tp"),
        ("collective:broadcast", "it has collective:all_gather, collective:all_reduce"),
        ("collective:scatter", "it has collective:all_gather"),
        ("op:aten.bmm", "it has see echoc text"),
        ("module:nothing", "selects nothing"),
        ("op:", "unknown: give compute, comm"),
        ("collective:", "unknown"),
        ("gpu", "unknown"),
    ],
)
def test_what_selects_nothing_names_what_there_is(selector: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        factors(job(), [Scale(selector=selector, factor=2)])


def test_how_the_command_line_spells_a_scale() -> None:
    assert parse_scale("comm.dp=2") == Scale(selector="comm.dp", factor=2.0)
    assert parse_scale("op:a=b=0") == Scale(selector="op:a=b", factor=0.0)
    assert parse_scale(f"host={MAX_FACTOR}").factor == 1e6
    for wrong in ("host", "=2", "host=", "host=two", "host=-0.1", f"host={MAX_FACTOR + 1}", "host=nan"):
        with pytest.raises(UsageError, match="give WHAT=FACTOR"):
            parse_scale(wrong)
