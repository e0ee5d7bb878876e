"""JSON, GML and text say all of a graph: read back, it has the same file, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from conformance_graphs import GRAPHS
from graphs import Model, build, models
from hypothesis import given, settings
from hypothesis import strategies as st

from echograph.errors import FormatError
from echograph.ir import serde
from echograph.ir import types as t
from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import Graph, JobGraph, StepGraph, Workload
from echograph.ir.passes.data_parallel import DataParallel
from echograph.ir.passes.fold import Fold
from echograph.ir.text import to_text
from echograph.ir.text.network import from_gml, to_network
from echograph.ir.text.parser import from_text
from echograph.ir.text.records import from_json, to_json
from echograph.workflow.formats import EXPORTS, IMPORTS

nx = pytest.importorskip("networkx")

FORMS: dict[str, tuple[Callable[[Graph], str], Callable[[str], Graph]]] = {
    "json": (lambda graph: "".join(to_json(graph)), from_json),
    "gml": (lambda graph: "\n".join(nx.generate_gml(to_network(graph))), from_gml),
    "text": (lambda graph: "".join(to_text(graph, tables=True)), from_text),
}
NAMES = st.sampled_from(
    ["", "[]", "()", "a b", 'quo"te', "two\nlines", "&amp;", "Größe", "%3", "1", "alias=%0", "\\", "#"]
)


def encoded(graph: Graph) -> bytes:
    return b"".join(serde.encode(graph))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", GRAPHS)
def test_conformance_graphs_come_back(form: str, name: str) -> None:
    write, read = FORMS[form]
    graph = GRAPHS[name]()
    assert encoded(read(write(graph))) == encoded(graph)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=25, deadline=None)
@given(model=models())
def test_random_steps_and_jobs_come_back(form: str, model: Model) -> None:
    write, read = FORMS[form]
    folded = Fold()(build(model))
    for graph in (build(model), folded, DataParallel(replicas=4)(folded)):
        assert encoded(read(write(graph))) == encoded(graph)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=60, deadline=None)
@given(
    names=st.lists(NAMES, min_size=8, max_size=8), spread=st.floats(0, 2.0**100, width=32), dropout=st.floats(0, 1)
)
def test_any_name_and_number_comes_back(form: str, names: list[str], spread: float, dropout: float) -> None:
    one, two, three, four, five, six, seven, eight = names
    builder = GraphBuilder(
        name=one, producer=two, workload=Workload(model=three, optimizer=four), streams=(five, "s")
    )
    x = builder.tensor(six, (), t.DType.FP32, t.TensorRole.INPUT)
    builder.group(seven, ranks=(0, 1))
    builder.group("other" + seven, ranks=(0, 2))
    attention = t.Attention(heads=1, kv_heads=1, head_dim=2**62, dropout=dropout)
    duration = t.Duration(device=eight, picoseconds=2**62, source=t.Source.MEASURED, samples=2**33, spread=spread)
    builder.compute(eight, module=seven, inputs=(x, x), attributes=attention, durations=(duration,), stream=1)
    builder.send(one, group=1, peer=-1, tag=2**40, nbytes=2**50, phase=t.Phase.BACKWARD, deps=(0,))
    graph = builder.build(JobGraph)
    write, read = FORMS[form]
    assert encoded(read(write(graph))) == encoded(graph)


@pytest.mark.parametrize("form", FORMS)
def test_the_exporter_and_the_frontend_are_the_same_forms(form: str, tmp_path: Path) -> None:
    graph = replace(GRAPHS["job"](), unknown=b"\xa2\x06\x00")
    done = EXPORTS[form](graph, tmp_path / "graph")
    assert (done.files, done.bytes, done.notes) == (1, (tmp_path / "graph").stat().st_size, ())
    assert encoded(IMPORTS[form](tmp_path / "graph")) == encoded(graph)


def test_text_without_tables_comes_back_with_others() -> None:
    for make in GRAPHS.values():
        text = "".join(to_text(make()))
        assert "".join(to_text(from_text(text))) == text


def test_what_is_changed_in_json_is_changed_in_the_graph() -> None:
    text = "".join(to_json(GRAPHS["two_layers"]()))
    graph = from_json(text.replace('"flops":64', '"flops":"65"'))
    assert graph.ops[0].flops == 65  # type: ignore[union-attr]
    assert isinstance(from_json(text.replace('"level": "step"', '"level": "job"')), JobGraph)


def test_json_by_hand_needs_no_tables_and_no_programs() -> None:
    block = '{"name":"main","tensors":[{"id":0,"name":"x","shape":[4],"dtype":"fp32","role":"input"}],"ops":[]}'
    graph = from_json(f'{{"echograph":"1.0","level":"step","name":"mine","blocks":[{block}]}}')
    assert isinstance(graph, StepGraph)
    assert (graph.name, graph.tensors[0].name, graph.workload) == ("mine", "x", Workload())


def test_gml_is_a_network_of_rows_and_of_what_they_name() -> None:
    graph = GRAPHS["two_layers"]()
    network = to_network(graph)
    assert network.number_of_nodes() == len(graph.tensors) + len(graph.ops)
    kinds = [edge["kind"] for _, _, edge in network.edges(data=True)]
    assert kinds.count("reads") == len(graph.ops.inputs.values)
    assert kinds.count("makes") == len(graph.ops.outputs.values)
    assert kinds.count("alias") == 1
    assert network.nodes["@2 aten.mm"]["flops"] == 256


def test_gml_comes_back_whatever_the_order_of_its_nodes() -> None:
    graph = GRAPHS["job"]()
    network = to_network(graph)
    shuffled = nx.MultiDiGraph(**network.graph)
    for node, found in reversed(list(network.nodes(data=True))):
        shuffled.add_node(node, **found)
    shuffled.add_edges_from(reversed(list(network.edges(data=True))))
    assert encoded(from_gml("\n".join(nx.generate_gml(shuffled)))) == encoded(graph)


def test_a_network_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echograph.ir.text.network.MAX_ROWS", 3)
    with pytest.raises(Exception, match="at most 3: export it as json"):
        to_network(GRAPHS["two_layers"]())


SAID: dict[str, list[tuple[str, str, str]]] = {
    "json": [
        ('"level": "step"', '"level": []', r"level: is a list: give step or job"),
        ('"echograph": "1.0"', '"echograph": "3.0"', "echograph: is '3.0', and format 2.x and older is read"),
        (
            '"phase":"forward"',
            '"phase":"forwrd"',
            r"blocks\[0\].ops\[0\].phase: is 'forwrd': known: forward, backward",
        ),
        ('"flops":64', '"flops":6.5', r"blocks\[0\].ops\[0\].flops: is 6.5: give a whole number"),
        ('"flops":64', '"flop":64', r"blocks\[0\].ops\[0\].flop: is no field of Compute: known: id, name"),
        (
            '"kind":"compute","id":0',
            '"id":0',
            r"blocks\[0\].ops\[0\].kind: is missing: known: compute, collective",
        ),
        ('"flops":64', f'"flops":{2**64}', r"blocks\[0\].ops\[0\].flops: is beyond 64 bits"),
        ('"parameters":32', '"parameters":-32', "no valid graph: the workload has parameters -32"),
        ('"id":2,"name":"aten.mm"', '"id":2,"name":5', r"blocks\[1\].ops\[0\].name: is 5: give a text"),
        ('"id":4,', '"id":7,', "tensor 7 stands where 4 is next"),
        ('"bindings":[4,2]', '"bindings":[4,99]', "no valid graph: .*instances_bound"),
        ("[1,2,3,0,0]", "[1,2,3]", r"programs\[0\].calls\[0\]: give whole numbers: \[block, begin"),
        ('"blocks"', '"blokcs"', "blokcs: is no field of GraphHead"),
        ('"shape":[8,4]', '"shape":NaN', "is no JSON .NaN is no number"),
    ],
    "gml": [
        ("directed 1", "directed 0", "not of directed, multiple edges"),
        ('kind "reads"', 'kind "read"', "edge 1 -> 4.*: give 'kind' .reads, makes, after, alias, forward."),
        ('table "tensor"', 'table "tensors"', "node 0: give 'table'"),
        ("row 3", 'row "x"', "node 3: give 'row', its number in its table"),
        ("row 3", "row 2", "tensor 2 stands where 3 is next"),
        ('blocks "', 'blocks "[', "the network: its attribute 'blocks' is no JSON text"),
        ("node [", "node ", "is no GML"),
    ],
    "text": [
        ("parameters=32", "parameters=99999999999999999999", "line 2: a number of 64 bits is expected"),
        ("echograph 1.0", "echograph 3.0", "line 1: format 2.x or older is expected where '.0 step"),
        ("forward flops=64", "forwrd flops=64", "one of forward, backward, .* is expected where 'forwrd"),
        ("stream compute", "streams compute", "'program' is expected where 'streams compute'"),
        ("@1 %3", "@7 %3", "operation 7 stands where 1 is next"),
        ("%2: fp32", "%0: fp32", "one declaration of tensor 0"),
        ("bind($9)", "bind($0..99999999)", "the text stands for over 4,194,304 calls and bindings"),
        ("micro_batch=0\n}\n", "micro_batch=0\n", "the text ends inside a program"),
        ("instance=0..1 micro_batch=0", "instance=0..1 micro_batch=0..2", "spans of one length"),
    ],
}


@pytest.mark.parametrize(("form", "old", "new", "said"), [(form, *case) for form in SAID for case in SAID[form]])
def test_what_is_wrong_is_said_and_where(form: str, old: str, new: str, said: str) -> None:
    write, read = FORMS[form]
    text = write(GRAPHS["two_layers"]())
    assert old in text
    with pytest.raises(FormatError, match=said) as caught:
        read(text.replace(old, new, 1))
    assert "\n" not in str(caught.value)
