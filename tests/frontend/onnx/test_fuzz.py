"""Whatever bytes a file holds: a graph that verifies, or one line, in bounded memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import onnx_models as m
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from echograph.errors import EchoError
from echograph.frontend.onnx.compile import compile_onnx
from echograph.frontend.onnx.dtypes import step_type
from echograph.frontend.onnx.model import read
from echograph.frontend.pytorch.step import StepSpec
from echograph.ir.graph import StepGraph

DIMS = {"batch": 2, "sequence": 4, "n": 2}
SEEDS = {
    "layers": (m.layers(2).SerializeToString(), {"batch": 2, "sequence": 4}),
    "picture": (m.picture().SerializeToString(), {"n": 2}),
}
MOST_BYTES = 200 * 2**20
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
def test_edited_bytes(seed: str, train: bool, edits: list[tuple[float, int, str]], tmp_path_factory: pytest.TempPathFactory) -> None:
    data, dims = SEEDS[seed]
    path = tmp_path_factory.getbasetemp() / f"fuzz-{seed}.onnx"
    path.write_bytes(_edited(data, edits))
    _survives(path, dims, train)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.binary(max_size=300))
def test_random_bytes(data: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "random.onnx"
    path.write_bytes(data)
    _survives(path, {}, False)


def _survives(path: Path, dims: dict[str, int], train: bool) -> None:
    tracemalloc.start()
    try:
        model = read(path, dims)
        graph = compile_onnx(model, StepSpec(dtype=step_type(model)), train=train).graph
        assert isinstance(graph, StepGraph)
    except EchoError as error:
        assert len(str(error).splitlines()) <= 1 or not str(error)
    except OverflowError:
        pass  # the command says it in one line (`one_line_errors`)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < MOST_BYTES
