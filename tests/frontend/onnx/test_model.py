"""Reading: what is looked at, what is bound, and what is refused in one line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx_models as m
import pytest
from onnx import TensorProto, helper

from echograph.errors import EchoError, FormatError, InputError, UsageError
from echograph.frontend.onnx.model import MAX_KNOWN, MAX_NODES, read


def test_symbolic_dimensions_are_bound_by_name(tmp_path: Path) -> None:
    path = m.save(m.layers(), tmp_path)
    assert read(path, {"batch": 4, "sequence": 7}).inputs[0].shape == (4, 7)


def test_unbound_dimensions_are_listed_with_an_example(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"without a size: batch, sequence: give each, as .* --dim batch=8$"):
        read(m.save(m.layers(), tmp_path))


def test_an_unnamed_dimension_is_called_by_its_place(tmp_path: Path) -> None:
    proto = m.model([helper.make_node("Relu", ["x"], ["y"])], [m.value("x", [None, 3])], [m.value("y", [None, 3])])
    path = m.save(proto, tmp_path)
    with pytest.raises(UsageError, match=r"--dim x\.0=8"):
        read(path)
    assert read(path, {"x.0": 5}).inputs[0].shape == (5, 3)


@pytest.mark.parametrize(
    ("dims", "says"), [({"batch": 0, "sequence": 1}, "at least 1"), ({"batc": 1}, "batch, sequence")]
)
def test_wrong_sizes(dims: dict[str, int], says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=says):
        read(m.save(m.layers(), tmp_path), dims)


def test_external_weights_are_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proto = m.picture()
    for tensor in proto.graph.initializer:
        if tensor.name.endswith("weight"):
            tensor.ClearField("raw_data")
            tensor.data_location = TensorProto.EXTERNAL
            entry = tensor.external_data.add()
            entry.key, entry.value = "location", "weights.bin"
    path = m.save(proto, tmp_path)
    (tmp_path / "weights.bin").mkdir()  # whoever opens it fails
    assert {w.path for w in read(path, {"n": 2}).weights} >= {"conv.weight", "bn.weight", "fc.weight"}


@pytest.mark.parametrize(
    ("location", "says"),
    [
        ("/dev/zero", "no path below"), ("/etc/passwd", "no path below"), ("C:\\data", "no path below"),
        ("", "no path below"),
        ("a\0b", "no path below"), ("../weights.bin", "outside"), ("a/../../weights.bin", "outside"),
        ("..\\w", "outside"),
        ("link", "outside"), ("device", "outside"), ("pipe", "a pipe"), ("loop", "its data"),
        ("x" * 5000, "its data"),
    ],
    ids=range(13),
)  # fmt: skip
@pytest.mark.parametrize("where", ["initializer", "attribute", "branch"])
def test_external_data_elsewhere_are_refused(location: str, says: str, where: str, tmp_path: Path) -> None:
    proto, folder = m.picture(), tmp_path / "model"
    folder.mkdir()
    (tmp_path / "weights.bin").touch()
    (folder / "link").symlink_to("../weights.bin")
    (folder / "device").symlink_to("/dev/zero")
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "pipe")
    tensor = TensorProto(name="outside", data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", location
    if where == "initializer":
        proto.graph.initializer.append(tensor)
    elif where == "attribute":
        proto.graph.node[0].attribute.append(helper.make_attribute("value", tensor))
    else:
        branch = helper.make_graph([], "branch", [], [], [tensor])
        proto.graph.node[0].attribute.append(helper.make_attribute("then_branch", branch))
    with pytest.raises(FormatError, match=says) as refused:
        read(m.save(proto, folder), {"n": 2})
    assert "'outside'" in str(refused.value)
    assert len(str(refused.value)) < 400


def test_weights_statistics_and_constants_are_told_apart(tmp_path: Path) -> None:
    model = read(m.save(m.picture(), tmp_path), {"n": 2})
    trained = {w.path for w in model.weights if w.trainable}
    assert trained == {"conv.weight", "bn.weight", "bn.bias", "fc.weight", "fc.bias"}
    assert {w.path for w in model.weights} - trained == {"bn.mean", "bn.var"}
    assert {name: value.tolist() for name, value in model.constants.items()} == {"zero": [0], "rest": [-1]}


def test_names_and_modules_of_layers(tmp_path: Path) -> None:
    model = read(m.save(m.layers(2), tmp_path), {"batch": 1, "sequence": 4})
    assert {n.module for n in model.nodes} == {
        "embed", "head", *(f"layers.{i}{leaf}" for i in range(2) for leaf in ("", ".norm", ".fc"))
    }  # fmt: skip
    assert {"layers.0.fc.MatMul", "layers.1.fc.MatMul", "embed.weight"} <= {w.path for w in model.weights}


@pytest.mark.parametrize(
    ("key", "text", "module"),
    [
        ("pkg.torch.onnx.name_scopes", "['', 'encoder', 'encoder.layer.3', 'addmm']", "encoder.layer.3"),
        ("namespace", ": M/encoder: E/encoder.layer.3: L/addmm: aten.addmm", "encoder.layer.3"),
        ("echograph.module", "encoder.layer.3", "encoder.layer.3"),
        ("pkg.torch.onnx.name_scopes", "__import__('os')", ""),
        ("pkg.torch.onnx.name_scopes", "[" * 5000, ""),
    ],
)
def test_modules_from_metadata(key: str, text: str, module: str, tmp_path: Path) -> None:
    proto = m.model([helper.make_node("Relu", ["x"], ["y"])], [m.value("x", [3])], [m.value("y", [3])])
    entry = proto.graph.node[0].metadata_props.add()
    entry.key, entry.value = key, text
    assert read(m.save(proto, tmp_path)).nodes[0].module == module


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("/encoder/layer.3/attention/MatMul", "encoder.layer.3.attention"),
        ("/layers/layers.3/MatMul", "layers.3"),
        ("bert/encoder/layer_3/MatMul", "bert.encoder.layer.3"),
        ("MatMul_7", ""),
    ],
)
def test_modules_from_names(name: str, module: str, tmp_path: Path) -> None:
    proto = m.model([helper.make_node("Relu", ["x"], ["y"], name=name)], [m.value("x", [3])], [m.value("y", [3])])
    assert read(m.save(proto, tmp_path)).nodes[0].module == module


def test_weights_that_are_inputs_by_their_metadata(tmp_path: Path) -> None:
    proto = m.model(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], [m.value("x", [2, 3]), m.value("w", [3, 4])],
        [m.value("y", [2, 4])],
    )  # fmt: skip
    entry = proto.graph.input[1].metadata_props.add()
    entry.key, entry.value = "pkg.torch.export.graph_signature.InputSpec.kind", "PARAMETER"
    model = read(m.save(proto, tmp_path))
    assert [v.name for v in model.inputs] == ["x"]
    assert [(w.name, w.shape, w.trainable) for w in model.weights] == [("w", (3, 4), True)]


def _functions(depth: int, calls: int) -> Any:
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("f", 1)]
    bodies = [helper.make_function("f", "f0", ["a"], ["b"], [helper.make_node("Relu", ["a"], ["b"])], opsets)]
    for level in range(1, depth):
        chain = [f"v{i}" for i in range(calls)]
        nodes = [
            helper.make_node(f"f{level - 1}", [a], [b], domain="f")
            for a, b in zip(["a", *chain[:-1]], [*chain[:-1], "b"], strict=True)
        ]
        bodies.append(helper.make_function("f", f"f{level}", ["a"], ["b"], nodes, opsets))
    node = helper.make_node(f"f{depth - 1}", ["x"], ["y"], domain="f")
    proto = m.model([node], [m.value("x", [3])], [m.value("y", [3])], functions=bodies)
    proto.opset_import.append(opsets[1])
    return proto


def test_local_functions_are_inlined(tmp_path: Path) -> None:
    assert [n.operator for n in read(m.save(_functions(3, 2), tmp_path)).nodes] == ["Relu"] * 4


def test_functions_that_double_each_other_are_measured_before_they_are_inlined(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"more than {MAX_NODES}"):
        read(m.save(_functions(60, 2), tmp_path))


def test_a_function_that_calls_itself(tmp_path: Path) -> None:
    proto = _functions(2, 1)
    proto.functions[0].node[0].op_type, proto.functions[0].node[0].domain = "f1", "f"
    with pytest.raises(InputError, match="calls itself"):
        read(m.save(proto, tmp_path))


def _relu(**changes: Any) -> Any:
    proto = m.model(
        [helper.make_node("Relu", ["x"], ["h"], name="one"), helper.make_node("Relu", ["h"], ["y"], name="two")],
        [m.value("x", [3])], [m.value("y", [3])],
    )  # fmt: skip
    for position, (field, value) in changes.get("nodes", {}).items():
        getattr(proto.graph.node[position], field)[0] = value
    return proto


def test_cycles_and_values_that_nothing_makes(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"node 'one' \(Relu\) reads 'y', which it or a later node makes"):
        read(m.save(_relu(nodes={0: ("input", "y")}), tmp_path))
    with pytest.raises(InputError, match="reads 'w', which nothing makes"):
        read(m.save(_relu(nodes={1: ("input", "w")}), tmp_path))
    with pytest.raises(InputError, match="makes 'h' again"):
        read(m.save(_relu(nodes={1: ("output", "h")}), tmp_path))


def test_inputs_without_a_shape_and_of_other_kinds(tmp_path: Path) -> None:
    proto = _relu()
    proto.graph.input[0].CopyFrom(m.value("x", None))
    with pytest.raises(InputError, match="input 'x' has no shape"):
        read(m.save(proto, tmp_path))
    sequence = helper.make_tensor_sequence_value_info("x", TensorProto.FLOAT, [3])
    proto.graph.input[0].CopyFrom(sequence)
    with pytest.raises(InputError, match="input 'x' is a sequence_type"):
        read(m.save(proto, tmp_path))


def test_a_negative_dimension_has_no_size(tmp_path: Path) -> None:
    proto = _relu()
    proto.graph.input[0].CopyFrom(m.value("x", [-1, 3]))
    path = m.save(proto, tmp_path)
    with pytest.raises(UsageError, match=r"without a size: x\.0"):
        read(path)
    assert read(path, {"x.0": 5}).inputs[0].shape == (5, 3)


def test_a_dimension_is_bound_by_its_place_before_its_name(tmp_path: Path) -> None:
    proto = m.model([helper.make_node("Relu", ["x"], ["y"])], [m.value("x", ["?", 3, "?"])], [m.value("y", None)])
    path = m.save(proto, tmp_path)
    assert read(path, {"?": 4}).inputs[0].shape == (4, 3, 4)
    assert read(path, {"x.0": 5, "x.2": 6}).inputs[0].shape == (5, 3, 6)
    assert read(path, {"?": 4, "x.2": 6}).inputs[0].shape == (4, 3, 6)
    with pytest.raises(UsageError, match=r"has no such dimension"):
        read(path, {"?": 4, "x.1": 6})


def test_constants_that_layers_read_are_their_weights(tmp_path: Path) -> None:
    """Exporters without initializers write weights as nodes; the numbers that they write so too are none."""
    kernel, edge = np.zeros((4, 3, 3, 3), np.float32), np.zeros((1, 4, 1, 1), np.float32)
    nodes = [
        helper.make_node("Constant", [], ["w"], value=helper.make_tensor("w", 1, kernel.shape, kernel.flatten())),
        helper.make_node("Constant", [], ["b"], value=helper.make_tensor("b", 1, edge.shape, edge.flatten())),
        helper.make_node("Conv", ["x", "w"], ["c"]), helper.make_node("Add", ["c", "b"], ["y"]),
    ]  # fmt: skip
    inputs, outputs = [m.value("x", [1, 3, 8, 8])], [m.value("y", [1, 4, 6, 6])]
    alone = read(m.save(m.model(nodes, inputs, outputs), tmp_path))
    assert [(w.name, w.trainable, w.constant) for w in alone.weights] == [("w", True, True), ("b", True, True)]
    nodes[-1] = helper.make_node("Mul", ["y0", "fc"], ["y"])
    nodes.insert(3, helper.make_node("Add", ["c", "b"], ["y0"]))
    beside = read(m.save(m.model(nodes, inputs, outputs, [m.weight("fc", 4, 6, 6)]), tmp_path))
    assert {w.name for w in beside.weights} == {"w", "fc"}
    assert beside.constants.keys() == set()


def test_a_large_constant_node_is_a_buffer(tmp_path: Path) -> None:
    large = np.zeros(MAX_KNOWN + 1, np.float32)
    nodes = [
        helper.make_node("Constant", [], ["c"], value=helper.make_tensor("c", 1, large.shape, large)),
        helper.make_node("Add", ["x", "c"], ["s"]), helper.make_node("Add", ["s", "w"], ["y"]),
    ]  # fmt: skip
    proto = m.model(nodes, [m.value("x", [1])], [m.value("y", large.shape)], [m.weight("w", *large.shape)])
    model = read(m.save(proto, tmp_path))
    assert [(w.name, w.trainable) for w in model.weights] == [("c", False), ("w", True)]
    assert [n.operator for n in model.nodes] == ["Add", "Add"]


@pytest.mark.parametrize("data", [b"", b"\x00", b"garbage", b"\x08\x0a", bytes(range(256))])
def test_what_is_no_model(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.onnx"
    path.write_bytes(data)
    with pytest.raises(FormatError, match=r"x\.onnx: "):
        read(path)


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    path = m.save(_relu(), tmp_path)
    path.write_bytes(path.read_bytes().replace(b"one", b"\xff\xfe\xfd"))
    with pytest.raises(FormatError, match="text that is none"):
        read(path)


def test_a_truncated_model(tmp_path: Path) -> None:
    path = m.save(m.layers(), tmp_path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(EchoError):
        read(path)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="give the path of an ONNX model"):
        read(tmp_path / "none.onnx")


def test_data_that_do_not_fit_their_shape(tmp_path: Path) -> None:
    proto = m.picture()
    next(t for t in proto.graph.initializer if t.name == "rest").raw_data = b"\x00" * 3
    with pytest.raises(InputError, match="'rest': its data do not fit"):
        read(m.save(proto, tmp_path), {"n": 2})
