"""The text says everything, and says it the same way each time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from conformance_graphs import GRAPHS

from echograph.ir import types as t
from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import Axis, Graph, Group, Instance, JobGraph, StepGraph, Workload
from echograph.ir.text import to_text


def text(graph: Graph) -> str:
    return "".join(to_text(graph))


def workload(**changes: object) -> Callable[[Graph], Graph]:
    return lambda g: replace(g, workload=replace(g.workload, **changes))


def instance(**changes: object) -> Callable[[Graph], Graph]:
    def change(graph: Graph) -> Graph:
        changed = replace(graph.blocks[1].instances[1], **changes)
        return replace(
            graph, blocks=(graph.blocks[0], replace(graph.blocks[1], instances=(Instance(label="0"), changed)))
        )

    return change


def program(**changes: object) -> Callable[[Graph], Graph]:
    return lambda g: replace(g, programs=(replace(g.programs[0], **changes),))


GRAPH_CHANGES: dict[str, Callable[[Graph], Graph]] = {
    "nothing": lambda g: g,
    "name": lambda g: replace(g, name="other"),
    "producer": lambda g: replace(g, producer="other"),
    "streams": lambda g: replace(g, streams=("compute", "copy")),
    "stream name": lambda g: replace(g, streams=("copy",)),
    "mesh": lambda g: replace(g, mesh=(Axis(name="dp", size=2),)),
    "mesh size": lambda g: replace(g, mesh=(Axis(name="dp", size=3),)),
    "mesh axes": lambda g: replace(g, mesh=(Axis(name="dp", size=2), Axis(name="tp", size=1))),
    "group": lambda g: replace(g, groups=(Group(name="dp"),)),
    "group axes": lambda g: replace(g, groups=(Group(name="dp", axes=("dp",)),)),
    "group ranks": lambda g: replace(g, groups=(Group(name="dp", ranks=(0, 1, 2, 4)),)),
    "group ranks' order": lambda g: replace(g, groups=(Group(name="dp", ranks=(0, 2, 1, 4)),)),
    "unknown": lambda g: replace(g, unknown=b"\xa2\x06\x00"),
    "level": lambda g: JobGraph(**{f: getattr(g, f) for f in g.__dataclass_fields__}),
    "model": workload(model="other"),
    "parameters": workload(parameters=33),
    "batch_size": workload(batch_size=9),
    "sequence_length": workload(sequence_length=0),
    "dtype": workload(dtype=t.DType.FP16),
    "optimizer": workload(optimizer=""),
    "master_weights": workload(master_weights=False),
    "block name": lambda g: replace(g, blocks=(g.blocks[0], replace(g.blocks[1], name="h"))),
    "blocks": lambda g: replace(g, blocks=(g.blocks[0], replace(g.blocks[1], instances=()))),
    "label": instance(label="7"),
    "bindings": instance(bindings=(2, 4)),
    "op_bindings": instance(op_bindings=(1,)),
    "role": program(role="stage"),
    "coordinates": program(coordinates={"dp": 1}),
    "other coordinates": program(coordinates={"dp": 0}),
    "ranks": program(ranks=(1,)),
    "calls": program(calls=np.array([[1, 2, 3, 0, 0], [1, 2, 3, 1, 0]])),
    "begin": program(calls=np.array([[1, 3, 3, 0, 0], [1, 3, 3, 1, 0]])),
    "end": program(calls=np.array([[1, 2, 4, 0, 0], [1, 2, 4, 1, 0]])),
    "calls' order": program(calls=np.array([[1, 2, 3, 1, 0], [1, 2, 3, 0, 0]])),
    "block": program(calls=np.array([[0, 2, 3, 0, 0], [0, 2, 3, 1, 0]])),
    "micro_batch": program(calls=np.array([[1, 2, 3, 0, 0], [1, 2, 3, 1, 1]])),
    "micro_batches": program(calls=np.array([[1, 2, 3, 0, 0], [1, 2, 3, 0, 1]])),
    "longer run": program(calls=np.array([[1, 2, 3, 0, 0], [1, 2, 3, 1, 0], [1, 2, 3, 2, 0]])),
    "gap": program(calls=np.array([[1, 2, 3, 0, 0], [1, 2, 3, 2, 0]])),
}


def test_no_two_graphs_that_differ_print_the_same() -> None:
    graph = GRAPHS["two_layers"]()
    texts = {name: text(change(graph)) for name, change in GRAPH_CHANGES.items()}
    assert len(set(texts.values())) == len(texts)


GEMM, ATTENTION = t.Gemm(), t.Attention(heads=4, kv_heads=2, head_dim=8)
CONVOLUTION = t.Convolution(stride=(1, 2), padding=(0, 1), dilation=(1, 1))
DURATION = t.Duration(device="d", picoseconds=5, source=t.Source.MEASURED)
COMMON = {"name": "n", "phase": t.Phase.FORWARD, "id": 0}
OPS: list[t.Op] = [
    *(
        t.Compute(**(COMMON | change))
        for change in (
            {}, {"name": "m"}, {"phase": t.Phase.BACKWARD}, {"module": "m"}, {"inputs": (0,)}, {"inputs": (1,)},
            {"inputs": (0, 1)}, {"inputs": (1, 0)}, {"outputs": (0,)}, {"stream": 1}, {"deps": (0,)}, {"flops": 1},
            {"bytes_read": 1}, {"bytes_written": 1}, {"forward_op": 0}, {"forward_op": -2}, {"forward_op": -3},
            *({"attributes": a} for a in (
                GEMM, replace(GEMM, transpose_a=True), replace(GEMM, transpose_b=True), ATTENTION,
                replace(ATTENTION, heads=5), replace(ATTENTION, kv_heads=4), replace(ATTENTION, head_dim=9),
                replace(ATTENTION, causal=True), replace(ATTENTION, dropout=0.1),
                replace(ATTENTION, dropout=0.1 + 2**-56), CONVOLUTION, replace(CONVOLUTION, stride=(2, 1)),
                replace(CONVOLUTION, padding=(1, 1)), replace(CONVOLUTION, dilation=(2, 1)),
                replace(CONVOLUTION, groups=2), replace(CONVOLUTION, transposed=True),
                t.MultiTensor(parts=3, leads=True), t.MultiTensor(parts=3), t.MultiTensor(parts=4, leads=True),
            )),
            *({"durations": d} for d in (
                (DURATION,), (DURATION, DURATION), (replace(DURATION, device="e"),),
                (replace(DURATION, picoseconds=6),), (replace(DURATION, source=t.Source.FITTED),),
                (replace(DURATION, samples=1),), (replace(DURATION, spread=0.5),),
                (replace(DURATION, spread=float(np.nextafter(np.float32(0.5), np.float32(1)))),),
            )),
        )
    ),
    *(
        t.Collective(**(COMMON | {"collective": t.CollectiveKind.ALL_REDUCE, "group": 0, "bytes_per_rank": 8,
                                  "dtype": t.DType.FP32} | change))
        for change in (
            {}, {"collective": t.CollectiveKind.BROADCAST}, {"group": 1}, {"bytes_per_rank": 9},
            {"dtype": t.DType.BF16}, {"payload": t.Payload.GRADIENT}, {"asynchronous": True},
        )
    ),
    *(
        kind(**(COMMON | {"group": 0, "peer": 1, "tag": 0, "nbytes": 8} | change))
        for kind in (t.Send, t.Recv)
        for change in ({}, {"group": 1}, {"peer": -1}, {"tag": 2}, {"nbytes": 9}, {"payload": t.Payload.OTHER})
    ),
    *(t.Copy(**COMMON, direction=direction, nbytes=8) for direction in t.CopyDirection),
    t.Copy(**COMMON, direction=t.CopyDirection.HOST_TO_DEVICE, nbytes=9),
    t.Host(**COMMON),
]  # fmt: skip


def test_no_two_operations_that_differ_print_the_same() -> None:
    graphs = []
    for op in OPS:
        b = GraphBuilder(streams=("compute", "other"))
        b.group("one", ranks=(0, 1))
        b.group("two", ranks=(0, 1))
        for name in "xy":
            b.tensor(name, (4,), t.DType.FP32, t.TensorRole.ACTIVATION)
        b.host("before")
        b.instance(0, op_bindings=(0, 0))
        b.add(op, durations=op.durations)
        graphs.append(b.build(StepGraph))
    assert all(a.ops[1] == replace(op, id=1) for a, op in zip(graphs, OPS, strict=True))
    assert len({text(graph) for graph in graphs}) == len(OPS)


def test_no_two_tensors_that_differ_print_the_same() -> None:
    texts = set()
    base = {"name": "x", "shape": (2, 3), "dtype": t.DType.FP32, "role": t.TensorRole.ACTIVATION}
    changes = [
        {}, {"name": "y"}, {"name": ""}, {"shape": (2,)}, {"shape": (3, 2)}, {"shape": ()}, {"alias_of": 0},
        *({"dtype": d} for d in t.DType if d != base["dtype"]),
        *({"role": r} for r in t.TensorRole if r != base["role"]),
    ]  # fmt: skip
    for change in changes:
        b = GraphBuilder()
        b.tensor("first", (2, 3), t.DType.FP32, t.TensorRole.ACTIVATION)
        b.tensor(**(base | change))
        texts.add(text(b.build(StepGraph)))
    assert len(texts) == len(changes)


@pytest.mark.parametrize("name", ["", 'a "b"', "two\nlines", "%3", "a,b", "Größe", "\u2028", "a=b", "x y"])
def test_any_name_stays_on_its_line(name: str) -> None:
    b = GraphBuilder(name=name, producer=name, workload=Workload(model=name), streams=("compute", name))
    b.tensor(name, (), t.DType.FP32, t.TensorRole.INPUT)
    b.host(name, module=name, inputs=(0,), stream=1)
    written = text(b.build(StepGraph))
    assert written.isascii()
    assert len(written.splitlines()) == len(text(GRAPHS["empty"]()).splitlines()) + 4


def test_streams_and_groups_of_one_name_are_told_apart_by_number() -> None:
    b = GraphBuilder(streams=("main", "main"))
    b.group("g", ranks=(0, 1))
    b.group("g", ranks=(0, 2))
    for stream in (0, 1):
        b.send("x", group=stream, peer=1, tag=0, nbytes=1, stream=stream)
    written = text(b.build(JobGraph))
    assert "stream=#1 group=#1" in written
    assert "group=#0" in written
