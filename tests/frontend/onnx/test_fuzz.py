"""Whatever bytes a file holds: a graph that verifies, or one line, in bounded memory."""

from __future__ import annotations

from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import onnx_models as m
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, helper

from echograph.errors import EchoError
from echograph.frontend.onnx.call import step_type
from echograph.frontend.onnx.compile import compile_onnx
from echograph.frontend.onnx.model import read
from echograph.frontend.onnx.operators import OPERATORS
from echograph.frontend.pytorch.spec import StepSpec
from echograph.ir.graph import StepGraph

SEEDS = {
    "layers": (m.layers(2).SerializeToString(), {"batch": 2, "sequence": 4}),
    "picture": (m.picture().SerializeToString(), {"n": 2}),
}
MOST_KIB = 200 * 2**10
EDITS = st.lists(
    st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255), st.sampled_from(["set", "cut", "insert"])),
    min_size=1,
    max_size=4,
)


def _edited(data: bytes, edits: list[tuple[float, int, str]]) -> bytes:
    made = bytearray(data)
    for place, byte, kind in edits:
        at = int(place * len(made)) if made else 0
        if kind == "set" and made:
            made[at] = byte
        elif kind == "cut":
            del made[at : at + byte]
        else:
            made[at:at] = bytes([byte])
    return bytes(made)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("train", [False, True])
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(edits=EDITS)
def test_edited_bytes(
    seed: str, train: bool, edits: list[tuple[float, int, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    data, dims = SEEDS[seed]
    path = tmp_path_factory.getbasetemp() / f"fuzz-{seed}.onnx"
    path.write_bytes(_edited(data, edits))
    _survives(path, dims, train)


NUMBERS = st.one_of(st.integers(-3, 9), st.sampled_from([2**16, 2**31, 2**40, 2**62, -(2**62)]))
CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["operator", "input", "attribute", "drop", "swap", "extent", "constant"]),
        st.integers(0, 10**6),
        st.integers(0, 10**6),
        NUMBERS,
    ),
    min_size=1,
    max_size=3,
)


def _changed(data: bytes, changes: list[tuple[str, int, int, int]]) -> bytes:
    """A model that parses, and says something else."""
    proto = ModelProto.FromString(data)
    nodes, graph = proto.graph.node, proto.graph
    values = [v for node in nodes for v in (*node.input, *node.output)]
    for kind, one, other, number in changes:
        node = nodes[one % len(nodes)]
        if kind == "operator":
            node.op_type = sorted(OPERATORS)[other % len(OPERATORS)]
        elif kind == "input":
            node.input[other % len(node.input) :] = [values[number % len(values)]]
        elif kind == "attribute":
            names = (
                "axis",
                "perm",
                "pads",
                "strides",
                "dilations",
                "group",
                "to",
                "transB",
                "epsilon",
                "kernel_shape",
            )
            name = names[other % len(names)]
            given = [a for a in node.attribute if a.name != name]
            del node.attribute[:]
            made = [number] * (other % 5) if name in ("perm", "pads", "strides", "dilations") else number
            node.attribute.extend([*given, helper.make_attribute(name, made, attr_type=_kind(made))])
        elif kind == "drop":
            del node.attribute[:]
        elif kind == "swap":
            first, second = NodeProto(), NodeProto()
            first.CopyFrom(node)
            second.CopyFrom(nodes[other % len(nodes)])
            nodes[other % len(nodes)].CopyFrom(first)
            node.CopyFrom(second)
        elif kind == "extent":
            tensor = graph.initializer[one % len(graph.initializer)]
            tensor.dims[other % len(tensor.dims)] = number
        else:
            tensor = next((t for t in graph.initializer if t.data_type == TensorProto.INT64), graph.initializer[0])
            tensor.raw_data = number.to_bytes(8, "little", signed=True)
    return proto.SerializeToString()


def _kind(made: object) -> AttributeProto.AttributeType:
    return AttributeProto.INTS if isinstance(made, list) else AttributeProto.INT


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("train", [False, True])
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(changes=CHANGES)
def test_changed_models(
    seed: str, train: bool, changes: list[tuple[str, int, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    data, dims = SEEDS[seed]
    path = tmp_path_factory.getbasetemp() / f"changed-{seed}.onnx"
    path.write_bytes(_changed(data, changes))
    _survives(path, dims, train)


@settings(suppress_health_check=list(HealthCheck))
@given(data=st.binary(max_size=300))
def test_random_bytes(data: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "random.onnx"
    path.write_bytes(data)
    _survives(path, {}, False)


@pytest.fixture(scope="module", autouse=True)
def _warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What is imported on first use is no model's memory."""
    for name, (data, dims) in SEEDS.items():
        path = tmp_path_factory.getbasetemp() / f"warm-{name}.onnx"
        path.write_bytes(data)
        model = read(path, dims)
        compile_onnx(model, StepSpec(dtype="bf16"), train=True)


def _survives(path: Path, dims: dict[str, int], train: bool) -> None:
    before = getrusage(RUSAGE_SELF).ru_maxrss
    try:
        model = read(path, dims)
        graph = compile_onnx(model, StepSpec(dtype=step_type(model)), train=train).graph
        assert isinstance(graph, StepGraph)
    except EchoError as error:
        assert len(str(error).splitlines()) == 1
    assert getrusage(RUSAGE_SELF).ru_maxrss - before < MOST_KIB
