"""The forward pass as ONNX: the checker takes it, and read back it is the same work."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("torch")
sys.path.append(str(Path(__file__).parents[2] / "frontend" / "onnx"))

import onnx_models as m  # noqa: E402
from onnx import TensorProto, helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

from echograph.errors import UsageError  # noqa: E402
from echograph.frontend.onnx.call import step_type  # noqa: E402
from echograph.frontend.onnx.compile import compile_onnx  # noqa: E402
from echograph.frontend.onnx.model import read  # noqa: E402
from echograph.frontend.pytorch.spec import StepSpec  # noqa: E402
from echograph.ir.builder import GraphBuilder  # noqa: E402
from echograph.ir.exporters.onnx import export  # noqa: E402
from echograph.ir.formats import Exported  # noqa: E402
from echograph.ir.graph import JobGraph, StepGraph  # noqa: E402
from echograph.ir.types import Attention, Convolution, DType, Phase, TensorRole  # noqa: E402
from echograph.workflow.formats import EXPORTS  # noqa: E402


def written(graph: Any, folder: Path) -> tuple[Any, Exported]:
    done = export(graph, folder / "out.onnx")
    proto = onnx.load(folder / "out.onnx")
    onnx.checker.check_model(proto, full_check=True)
    return proto, done


def step(proto: Any, folder: Path, dims: dict[str, int], **options: Any) -> StepGraph:
    model = read(m.save(proto, folder), dims)
    return compile_onnx(model, StepSpec(dtype=step_type(model)), **options).graph


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", ["layers", "picture"])
def test_read_back_it_is_the_same_forward_pass(name: str, train: bool, tmp_path: Path) -> None:
    proto, dims = (m.layers(2), {"batch": 2, "sequence": 4}) if name == "layers" else (m.picture(), {"n": 2})
    graph = step(proto, tmp_path, dims, train=train)
    written(graph, tmp_path)
    again = compile_onnx(read(tmp_path / "out.onnx"), StepSpec(dtype="fp32")).graph
    assert m.products(again) == m.forward(m.products(graph))
    assert m.flops(again) == Counter(FORWARD=m.flops(graph)["FORWARD"])
    assert again.workload.parameters == graph.workload.parameters
    assert len(again.blocks) == len(graph.blocks)


def test_shapes_agree_with_those_that_onnx_infers(tmp_path: Path) -> None:
    graph = step(m.layers(2), tmp_path, {"batch": 2, "sequence": 4})
    proto, _ = written(graph, tmp_path)
    stated = {v.name: v for v in proto.graph.value_info}
    del proto.graph.value_info[:]
    inferred = onnx.shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True)
    found = {v.name: v.type for v in inferred.graph.value_info if v.type.tensor_type.elem_type}
    common = found.keys() & stated.keys()
    assert len(common) > 15
    assert all(found[name] == stated[name].type for name in common)


def test_numbers_agree_with_the_model_it_came_from(tmp_path: Path) -> None:
    """Where every operator has an exact word, the file that comes out computes what the file that went in did."""
    import numpy as np

    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Add", ["h", "b"], ["a"]),
        helper.make_node("Relu", ["a"], ["r"]), helper.make_node("Transpose", ["r"], ["t"], perm=[1, 0]),
        helper.make_node("MatMul", ["r", "t"], ["s"]), helper.make_node("Sigmoid", ["s"], ["y"]),
    ]  # fmt: skip
    source = m.model(
        nodes, [m.value("x", [2, 3])], [m.value("y", [2, 2])], [m.weight("w", 3, 4), m.weight("b", 4)]
    )
    proto, done = written(step(source, tmp_path, {}), tmp_path)
    assert done.notes == ()
    rng = np.random.default_rng(1)
    feeds = {n: rng.normal(size=s).astype("f4") for n, s in (("x", (2, 3)), ("w", (3, 4)), ("b", (4,)))}
    expected = ReferenceEvaluator(source).run(None, feeds)[0]
    found = ReferenceEvaluator(proto).run([proto.graph.output[-1].name], feeds)[0]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def _graph(name: str, inputs: list[Any], outputs: list[Any], **op: Any) -> StepGraph:
    builder = GraphBuilder(name="one")
    reads = [builder.tensor(f"x{i}", shape, dtype, TensorRole.INPUT) for i, (shape, dtype) in enumerate(inputs)]
    makes = [builder.tensor("y", shape, dtype, TensorRole.ACTIVATION) for shape, dtype in outputs]
    builder.compute(name, phase=Phase.FORWARD, inputs=reads, outputs=makes, bytes_read=1, **op)
    return builder.build(StepGraph)


def test_attention_is_onnxs_own(tmp_path: Path) -> None:
    shape = (2, 4, 8, 16)
    attributes = Attention(heads=4, kv_heads=4, head_dim=16, causal=True)
    graph = _graph(
        "aten._scaled_dot_product_flash_attention", [(shape, DType.BF16)] * 3,
        [(shape, DType.BF16), ((2, 4, 8), DType.FP32)], flops=4 * 2 * 4 * 8 * 8 * 16, attributes=attributes,
    )  # fmt: skip
    proto, _ = written(graph, tmp_path)
    assert [n.op_type for n in proto.graph.node] == ["Attention"]
    again = compile_onnx(read(tmp_path / "out.onnx"), StepSpec(dtype="bf16")).graph
    assert m.flops(again) == m.flops(graph)
    assert [o.attributes for o, _, _ in m.operations(again) if o.flops] == [attributes]


def test_a_transposed_convolution_keeps_its_size(tmp_path: Path) -> None:
    form = Convolution(stride=(2, 2), padding=(1, 1), dilation=(1, 1), transposed=True)
    graph = _graph(
        "aten.convolution", [((1, 3, 5, 5), DType.FP32), ((3, 2, 3, 3), DType.FP32)],
        [((1, 2, 10, 10), DType.FP32)], flops=2 * 3 * 25 * 2 * 9, attributes=form,
    )  # fmt: skip
    written(graph, tmp_path)
    again = compile_onnx(read(tmp_path / "out.onnx"), StepSpec(dtype="fp32")).graph
    assert m.products(again) == m.products(graph)
    assert [out[0].shape for _, _, out in m.operations(again)] == [(1, 2, 10, 10)]


def test_an_operator_without_a_word_keeps_its_name_shapes_and_attributes(tmp_path: Path) -> None:
    graph = _graph("aten.roll", [((4, 6), DType.FP32)], [((4, 6), DType.FP32)])
    proto, done = written(graph, tmp_path)
    (node,) = proto.graph.node
    assert (node.domain, node.op_type) == ("echograph", "aten.roll")
    assert {a.name: a.i for a in node.attribute} == {"flops": 0, "bytes_read": 1, "bytes_written": 0}
    assert "1 x aten.roll" in done.notes[-1]
    again = compile_onnx(read(tmp_path / "out.onnx"), StepSpec(dtype="fp32")).graph
    ((op, inputs, outputs),) = m.operations(again)
    assert (op.name, inputs[0].shape, outputs[0].shape) == ("echograph.roll", (4, 6), (4, 6))


@pytest.mark.parametrize(("arguments", "exact"), [('{"dims":[0,2,1]}', True), ("", False)])
def test_a_permutation_is_what_the_graph_says_or_a_name(arguments: str, exact: bool, tmp_path: Path) -> None:
    shape = (2, 3, 3)  # of which the shapes alone do not tell which it is
    graph = _graph("aten.permute", [(shape, DType.FP32)], [(shape, DType.FP32)], arguments=arguments)
    proto, _ = written(graph, tmp_path)
    (node,) = proto.graph.node
    assert (node.op_type == "Transpose") == exact
    if exact:
        assert list(node.attribute[0].ints) == [0, 2, 1]


def test_bf16_is_fp32_that_says_what_it_is(tmp_path: Path) -> None:
    graph = _graph("aten._to_copy", [((4,), DType.FP32)], [((4,), DType.BF16)])
    proto, done = written(graph, tmp_path)
    assert {v.type.tensor_type.elem_type for v in (*proto.graph.input, *proto.graph.output)} == {TensorProto.FLOAT}
    assert any("bf16 is written as fp32" in note for note in done.notes)
    model = read(tmp_path / "out.onnx")
    again = compile_onnx(model, StepSpec(dtype=step_type(model))).graph
    ((_, inputs, outputs),) = m.operations(again)
    assert (inputs[0].dtype, outputs[0].dtype) == (DType.FP32, DType.BF16)


def test_weights_are_inputs_that_say_so(tmp_path: Path) -> None:
    proto, _ = written(step(m.picture(), tmp_path, {"n": 2}, train=True), tmp_path)
    roles = {v.name: v.metadata_props[0].value for v in proto.graph.input}
    assert roles["conv.weight"] == roles["fc.bias"] == "parameter"
    assert roles["bn.mean"] == "buffer"
    assert roles["image"] == roles["labels"] == "input"
    assert not proto.graph.initializer


def test_jobs_and_graphs_without_a_forward_pass_are_refused(tmp_path: Path) -> None:
    builder = GraphBuilder(name="job")
    with pytest.raises(UsageError, match="export the step graph, not the job"):
        export(builder.build(JobGraph), tmp_path / "x.onnx")
    with pytest.raises(UsageError, match="no forward operation"):
        export(GraphBuilder(name="empty").build(StepGraph), tmp_path / "x.onnx")
    assert not (tmp_path / "x.onnx").exists()


def test_it_is_in_the_table_of_formats() -> None:
    assert EXPORTS["onnx"] is export
    assert TensorProto.BFLOAT16 == 16


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "bert-base-uncased", "resnet-50", "llama-3.2-1b", "t5-small"])
def test_zoo_models_read_back(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from echograph.models import get_model
    from echograph.workflow.compile import compile_entry

    graph = compile_entry(get_model(name), StepSpec(), batch_size=2, seq_len=64)
    written(graph, tmp_path)
    model = read(tmp_path / "out.onnx")
    again = compile_onnx(model, StepSpec(dtype=step_type(model))).graph
    assert m.products(again) == m.forward(m.products(graph))
    assert m.flops(again) == Counter(FORWARD=m.flops(graph)["FORWARD"])
