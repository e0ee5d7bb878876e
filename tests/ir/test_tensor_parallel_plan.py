"""Plans of tensor parallelism: from a file, from Hugging Face, inferred from the graph."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from echograph.errors import InputError, PlanError, UnknownNameError
from echograph.frontend.pytorch.spec import StepSpec
from echograph.ir import types as t
from echograph.ir.graph import StepGraph
from echograph.ir.passes.tensor_parallel import TensorParallel
from echograph.ir.passes.tensor_parallel.plan import (
    PLAN,
    Style,
    from_hugging_face,
    given_placements,
    infer_plan,
    read_plan,
)
from echograph.models import get_model
from echograph.workflow.compile import compile as compile_model
from echograph.workflow.compile import compile_entry

POSITIONS = 128
MODELS = """
import torch
from torch import nn
F = nn.functional
WORDS = 4096

class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.first, self.second = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.alpha, self.beta = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.gate = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)
        self.slim, self.side = nn.Linear(4 * width, width, bias=False), nn.Linear(width, width)

    def forward(self, x):
        batch, positions, width = x.shape
        parts = self.alpha(self.first(x)).chunk(3, -1)
        q, k, v = (y.view(batch, positions, self.heads, -1).transpose(1, 2) for y in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.beta(y.transpose(1, 2).reshape(batch, positions, width))
        y = self.second(x)
        x = x + self.slim(F.gelu(self.wide(y)) * self.gate(y))
        return x + self.side(x)

class Model(nn.Module):
    def __init__(self, make, width=256):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(128, width)
        self.body, self.out = make(), nn.Linear(width, WORDS)

    def forward(self, ids, labels):
        x = self.body(self.words(ids) + self.places(torch.arange(ids.shape[1])))
        return F.cross_entropy(self.out(x).view(-1, WORDS), labels.view(-1))

def built(make):
    ids = torch.zeros(2, 128, dtype=torch.long)
    return Model(make), {"ids": ids, "labels": ids.clone()}

def own():
    return built(lambda: nn.Sequential(*(Layer(256, 8) for _ in range(4))))

def encoder():
    layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True)
    return built(lambda: nn.TransformerEncoder(layer, 4))

def perceptron():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)
        def forward(self, x):
            return self.b(self.a(x).relu()).sum()
    return Two(), (torch.zeros(4, 64),)
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "models.py"
    path.write_text(MODELS)
    return path


def user_step(models: Path, name: str) -> StepGraph:
    return compile_model(f"{models}:{name}", StepSpec())


def zoo_step(name: str, **changes: Any) -> StepGraph:
    return compile_entry(get_model(name).with_config(**changes), StepSpec(), batch_size=1, seq_len=POSITIONS)


def summed(graph: StepGraph) -> dict[str, int]:
    """Modules that all-reduce, and how often."""
    found: dict[str, int] = {}
    for _, begin, end, _, _ in graph.programs[0].calls.tolist():
        for op in graph.ops[begin:end]:
            if isinstance(op, t.Collective) and op.module:
                assert op.collective == t.CollectiveKind.ALL_REDUCE
                found[op.module.rpartition(".")[2]] = found.get(op.module.rpartition(".")[2], 0) + 1
    return found


# -- inferred ----------------------------------------------------------------------------------------------------


def test_names_do_not_matter(models: Path) -> None:
    """Attention and feed-forward part are shared; a lone product between two additions is not."""
    step = user_step(models, "own")
    parallel = TensorParallel(size=4)
    local = parallel(step)
    # The first layer's, which differs from the others, stands apart: four layers in all.
    assert summed(local) == {"words": 1, "beta": 4, "slim": 4, "wide": 4, "alpha": 4, "out": 1}
    shapes = {x.name.rpartition("}.")[2]: x.shape for x in local.tensors if x.role == t.TensorRole.PARAMETER}
    assert shapes["alpha.weight"] == (192, 256)
    assert shapes["beta.weight"] == (256, 64)
    assert shapes["side.weight"] == (256, 256)
    assert shapes["words.weight"] == (1024, 256)
    assert shapes["places.weight"] == (128, 256)
    lines = parallel.with_notes(step)[1]
    assert lines
    assert all("side" in line and "whole on every rank" in line for line in lines)


def test_what_does_not_divide_is_left_whole_and_says_why(models: Path) -> None:
    parallel, step = TensorParallel(size=16), user_step(models, "own")
    local = parallel(step)
    assert set(summed(local)) == {"words", "slim", "wide", "out"}
    assert any(
        "alpha.weight -> " in line and "extent of 8, which 16 ranks" in line
        for line in parallel.with_notes(step)[1]
    )


def test_packed_queries_keys_and_values_of_torch(models: Path) -> None:
    """`out_proj` is in the table of known names and `in_proj_weight` is not: they make one pair."""
    step = user_step(models, "encoder")
    parallel = TensorParallel(size=4)
    local = parallel(step)
    assert parallel.with_notes(step)[1] == []
    assert summed(local) == {"words": 1, "self_attn": 8, "linear1": 4, "linear2": 4, "out": 1}
    weight = next(x for x in local.tensors if x.name.endswith("in_proj_weight") and not x.port)
    assert (weight.shape, weight.sharded) == ((192, 256), ("tp",))
    kernel = next(op for op in local.ops if isinstance(getattr(op, "attributes", None), t.Attention))
    assert local.tensors.shape.row(kernel.inputs[0]) == (2, 2, POSITIONS, 32)
    # Eight heads for sixteen ranks: all of the attention is whole then, what the table knows of it too.
    assert set(summed(TensorParallel(size=16)(step))) == {"words", "linear1", "linear2", "out"}


def test_a_model_without_anything_to_share_is_refused(models: Path) -> None:
    with pytest.raises(PlanError, match="fits no parameter: give a plan"):
        TensorParallel(size=2)(user_step(models, "perceptron"))


FAMILIES = [
    ("gpt2", {"n_layer": 3}),
    ("bert-base-uncased", {"num_hidden_layers": 3}),
    ("llama-2-7b", {"num_hidden_layers": 3}),
    pytest.param("phi-2", {"num_hidden_layers": 3}, marks=pytest.mark.slow),
    pytest.param("bloom-7b1", {"n_layer": 3}, marks=pytest.mark.slow),
    pytest.param("mpt-7b", {"n_layers": 3}, marks=pytest.mark.slow),
    pytest.param("vit-b-16", {"num_hidden_layers": 3}, marks=pytest.mark.slow),
    pytest.param("mixtral-8x7b", {"num_hidden_layers": 3}, marks=pytest.mark.slow),
    pytest.param("opt-125m", {"num_hidden_layers": 3}, marks=pytest.mark.slow),
    pytest.param("gemma-2-2b", {"num_hidden_layers": 3}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "changes"), FAMILIES)
def test_without_its_names_the_same_is_found_as_the_table_says(name: str, changes: dict[str, int]) -> None:
    step = zoo_step(name, **changes)
    parallel = TensorParallel(size=2)
    found, lines = infer_plan(step, {}, 256, lambda plan: parallel._fault(step, plan))
    assert lines == []
    inferred, known = given_placements(step, found), given_placements(step, PLAN)
    # A bias of its own that BERT adds to the logits is no bias of a product.
    names = {step.tensors[i].name for i in set(inferred) ^ set(known)}
    assert {name for name in names if not name.startswith("cls.predictions.bias")} == set()
    assert all(inferred[i] == known[i] for i in set(inferred) & set(known))


def test_a_plan_of_the_user_is_not_added_to(models: Path) -> None:
    step = user_step(models, "own")
    plan: Mapping[str, Style] = {"*.wide": "colwise", "*.gate": "colwise", "*.slim": "rowwise"}
    assert set(summed(TensorParallel(size=4, plan=plan)(step))) == {"slim", "wide"}


# -- Hugging Face ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "config"),
    [("llama-2-7b", "LlamaConfig"), pytest.param("mixtral-8x7b", "MixtralConfig", marks=pytest.mark.slow)],
)
def test_plans_of_hugging_face_share_what_ours_do(name: str, config: str) -> None:
    """Their plans are for the layers of the base model; the embedding and the head are ours to share."""
    transformers = pytest.importorskip("transformers")
    theirs = from_hugging_face({**getattr(transformers, config).base_model_tp_plan, "lm_head": "colwise_rep"})
    step = zoo_step(name, num_hidden_layers=2)
    ours = {p: style for p, style in PLAN.items() if p != "*.embed_tokens"}
    placed = given_placements(step, {p: s for p, s in theirs.items() if "embed_tokens" not in p})
    assert placed == given_placements(step, ours)


def test_every_style_of_hugging_face_is_known() -> None:
    styles = pytest.importorskip("transformers.integrations.tensor_parallel").ALL_PARALLEL_STYLES
    plan = {f"layers.*.{style}": style for style in styles.keys()}  # noqa: SIM118 - it is no dict
    assert set(from_hugging_face(plan).values()) <= {"colwise", "rowwise", "vocab"}
    with pytest.raises(UnknownNameError, match="did you mean 'colwise'"):
        from_hugging_face({"layers.*.mlp": "colwize"})


# -- files -------------------------------------------------------------------------------------------------------


def test_plans_are_read_from_files(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text('[plan]\n"*.wide" = "colwise"\n"*.slim" = "rowwise"\n')
    assert read_plan(path) == {"*.wide": "colwise", "*.slim": "rowwise"}
    path.write_text(
        '[base_model_tp_plan]\n"layers.*.up" = "packed_colwise"\n"layers.*.norm" = "sequence_parallel"\n'
    )
    assert read_plan(path) == {"*layers.*.up": "colwise"}


@pytest.mark.parametrize(
    ("content", "error", "says"),
    [
        (None, InputError, "No such file"),
        ("[plan", InputError, "no TOML"),
        ("[other]", InputError, "give one table"),
        ("plan = 3", InputError, "give one table"),
        ("[plan]\n[base_model_tp_plan]", InputError, "give one table"),
        ('[plan]\n"*.a" = "columns"', UnknownNameError, "unknown parallel style 'columns'"),
        ('[plan]\n"*.a" = 3', UnknownNameError, "unknown parallel style '3'"),
        ('[base_model_tp_plan]\n"*.a" = "columns"', UnknownNameError, "unknown Hugging Face parallel style"),
    ],
)
def test_wrong_files_are_refused_in_one_line(
    tmp_path: Path, content: str | None, error: type[Exception], says: str
) -> None:
    path = tmp_path / "plan.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(error, match=says) as caught:
        read_plan(path)
    assert "\n" not in str(caught.value)
