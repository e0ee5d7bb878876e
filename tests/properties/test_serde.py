"""A file says all that a graph is."""

from __future__ import annotations

from graphs import Model, build, models
from hypothesis import given

from echograph.ir.passes.fold import Fold
from echograph.ir.serde import decode, encode
from echograph.ir.text import to_text


@given(models())
def test_a_graph_comes_back_from_its_file(model: Model) -> None:
    for graph in (build(model), Fold()(build(model))):
        data = b"".join(encode(graph))
        again = decode(data)
        assert list(to_text(again)) == list(to_text(graph))
        assert b"".join(encode(again)) == data
