"""JSON, GML and text hold all of real graphs; `test_zoo` asks the same of every model of the zoo."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("networkx")

from families import TEN, sizes
from graph_forms import check_forms

from echograph.ir.graph import StepGraph

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("name", ["bert-base-uncased", "llama-3-8b", "mixtral-8x7b"])
def test_shallow_models(name: str, compiled: Callable[..., StepGraph]) -> None:
    check_forms(compiled(name, 2, attention=TEN[name], **sizes(name)))
