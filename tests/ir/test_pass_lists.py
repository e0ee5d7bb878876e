"""Lists of passes: as text and back, run one after the other, every wrong one refused in one line."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echograph.errors import EchoError, GraphError, PlanError, UnknownNameError, UsageError
from echograph.ir import serde
from echograph.ir.graph import Graph, JobGraph, StepGraph
from echograph.ir.passes import PASSES
from echograph.ir.passes.base import NotingPass, Pass, parse_passes, pass_text, run, split_at_job
from echograph.ir.passes.data_parallel import DataParallel
from echograph.ir.passes.fold import Fold
from echograph.ir.passes.fully_shard import FullyShard
from echograph.ir.passes.mesh import MeshOrder, ResizeAxes, UnfoldRanks
from echograph.ir.passes.pipeline import Pipeline
from echograph.ir.passes.precision import Precision
from echograph.ir.passes.recompute import Recompute
from echograph.ir.passes.tensor_parallel import TensorParallel
from echograph.ir.text import to_text
from echograph.ir.text.parser import from_text
from echograph.ir.types import DType

sys.path.insert(0, str(Path(__file__).parents[1] / "simulator"))
from layered import layered_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Rename:
    """A pass of nobody's table."""

    name: ClassVar[str] = "rename"

    to: str = "another"
    spoil: bool = False

    def __call__(self, graph: StepGraph) -> StepGraph:
        streams = () if self.spoil else graph.streams
        return replace(graph, name=self.to, streams=streams)


ELSEWHERE = f"{__name__}:Rename"


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (Fold(), "fold"),
        (TensorParallel(size=8), "tensor_parallel{size=8}"),
        (TensorParallel(size=2, plan={"*.up": "colwise", "a b": "rowwise"}),
         'tensor_parallel{size=2,plan=(*.up:colwise,"a b":rowwise)}'),
        (Pipeline(stages=4, micro_batches=8, layers=(1, 2, 3, 4)),
         "pipeline{stages=4,micro_batches=8,layers=(1,2,3,4)}"),
        (Recompute(policy="selective_op", early_stop=False), "recompute{policy=selective_op,early_stop=false}"),
        (FullyShard(replicas=4, reduce_dtype=DType.FP32), "fully_shard{replicas=4,reduce_dtype=fp32}"),
        (DataParallel(replicas=2, reduce_scatter=False), "data_parallel{replicas=2,reduce_scatter=false}"),
        (Precision(dtype="fp8-rowwise", kept="fp8"), "precision{dtype=fp8-rowwise,kept=fp8}"),
        (Precision(dtype="none"), 'precision{dtype="none"}'),
        (ResizeAxes(sizes={"dp": 4}), "resize_axes{sizes=(dp:4)}"),
        (MeshOrder(order=("dp",)), "mesh_order{order=(dp)}"),
        (Rename(to="Größe {2}"), ELSEWHERE + '{to="Gr\\u00f6\\u00dfe {2}"}'),
    ],
)  # fmt: skip
def test_a_pass_is_read_as_it_is_said(one: Pass, text: str) -> None:
    assert pass_text(one) == text
    assert parse_passes(f" {text}\n{text} ") == (one, one)


def test_options_may_be_spaced_and_said_to_be_none() -> None:
    spaced = "tensor_parallel { size = 2 , plan = none }"
    assert parse_passes(spaced) == (TensorParallel(size=2),)
    assert parse_passes("fuse{} mesh_order{order=()}") == (PASSES["fuse"](), MeshOrder(order=()))


@given(to=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_is_read_as_it_is_said(to: str) -> None:
    assert parse_passes(pass_text(Rename(to=to))) == (Rename(to=to),)


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("tensor_paralel{size=8}", UnknownNameError, "did you mean 'tensor_parallel'"),
        (
            "tensor_parallel{sizes=8}",
            UnknownNameError,
            "option of pass tensor_parallel 'sizes': did you mean 'size'",
        ),
        ("recompute{policy=ful}", UnknownNameError, "pass recompute: policy 'ful': did you mean 'full'"),
        ("fully_shard{replicas=2,reduce_dtype=fp33}", UnknownNameError, "did you mean 'fp3"),
        ("depth{layers=many}", UsageError, "depth: layers is 'many': give a whole number"),
        ("expert_parallel{size=2,imbalance=nan}", UsageError, "imbalance is nan: give a number"),
        ("depth{layers=(1,2)}", UsageError, "layers: give one value"),
        ("depth{layers=none}", UsageError, "layers: give one value"),
        ("mesh_order{order=dp}", UsageError, r"give values in parentheses, as \(a,b\)"),
        ("resize_axes{sizes=(1,2)}", UsageError, r"give pairs in parentheses, as \(a:b,c:d\)"),
        ("resize_axes{sizes=(dp:2,3)}", UsageError, "either values or pairs"),
        ("tensor_parallel", UsageError, r"has no size: give tensor_parallel\{size=\.\.\.\}"),
        ("tensor_parallel{size=8,size=4}", UsageError, "size stands twice"),
        ("tensor_parallel{size=8", UsageError, "a comma or } is missing at the end"),
        ("tensor_parallel{size}", UsageError, "= should stand at '}'"),
        ("tensor_parallel{=8}", UsageError, "an option of tensor_parallel, or } should stand at '=8}'"),
        ("fold, fuse", UsageError, "the name of a pass should stand at ', fuse'"),
        ('precision{dtype="fp', UsageError, "a text in quotes should stand"),
        ('precision{dtype="\\q"}', UsageError, "a text in quotes should stand"),
        ("mesh_order{order=(a b)}", UsageError, r"a comma or \) should stand at 'b\)\}'"),
        ("", UsageError, "the list is empty"),
        ("no_such_module_of_mine:Pass", UsageError, "put the folder of no_such_module_of_mine on PYTHONPATH"),
        ("echograph.ir.graph:Grap", UsageError, "has no Grap: give its class"),
        ("echograph.ir.graph:Graph", UsageError, "is no pass: give a frozen dataclass with a name"),
    ],
)
def test_a_wrong_list_is_refused_in_one_line(text: str, kind: type[EchoError], words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        parse_passes(text)
    assert "\n" not in str(caught.value)


@given(st.text('fold{}(),:="none \\12.x', max_size=30))
def test_any_list_is_read_or_refused(text: str) -> None:
    try:
        assert parse_passes(text)
    except EchoError as error:
        assert "\n" not in str(error)


def test_a_graph_says_what_was_applied_to_it(tmp_path: Path) -> None:
    job = run(layered_step(4), parse_passes("fold pipeline{stages=2} data_parallel{replicas=2}"), to=JobGraph)
    assert job.passes == ("fold", "pipeline{stages=2}", "data_parallel{replicas=2}")
    later = run(job, (UnfoldRanks(),))
    assert later.passes == (*job.passes, "unfold_ranks")
    serde.save(later, tmp_path / "job.pb")
    assert serde.load(tmp_path / "job.pb").passes == later.passes
    assert from_text("".join(to_text(later))).passes == later.passes
    again = run(layered_step(4), parse_passes(" ".join(later.passes)))
    assert list(to_text(again)) == list(to_text(later))


def test_what_was_applied_survives_passes_called_by_hand() -> None:
    step = run(layered_step(4), (Fold(), Recompute(policy="full")))
    assert DataParallel(replicas=2)(step).passes == step.passes


def test_every_pass_of_the_table_has_its_name_there() -> None:
    for name in PASSES:
        assert PASSES[name].name == name
        assert "graph" in PASSES[name].__call__.__annotations__


def test_a_pass_that_meets_the_other_level_says_where_to_put_it() -> None:
    lowered = (DataParallel(replicas=2), Recompute(policy="full"))
    with pytest.raises(PlanError, match="recompute: takes a step graph, and has a job graph here: put it before"):
        run(Fold()(layered_step(2)), lowered)
    with pytest.raises(PlanError, match="mesh_order: takes a job graph, and has a step graph here: put pipeline"):
        run(layered_step(2), (MeshOrder(order=("dp",)),))
    with pytest.raises(PlanError, match="the passes leave a step graph: end them"):
        run(layered_step(2), (Fold(),), to=JobGraph)
    with pytest.raises(PlanError, match="the passes leave a job graph"):
        run(layered_step(2), (DataParallel(replicas=2),), to=StepGraph)


def test_what_a_pass_leaves_is_verified() -> None:
    with pytest.raises(GraphError, match="stream"):
        run(layered_step(2), (Rename(spoil=True),))
    assert run(layered_step(2), (Rename(spoil=True),), verify=False).streams == ()


def test_a_pass_that_forgets_to_return_is_refused() -> None:
    @dataclass(frozen=True)
    class Forgets:
        name: ClassVar[str] = "forgets"

        def __call__(self, graph: Graph) -> None:
            """Returns nothing."""

    with pytest.raises(PlanError, match="forgets: returned NoneType"):
        run(layered_step(1), (Forgets(),))


def test_a_tuple_is_cut_where_a_step_becomes_a_job() -> None:
    passes = parse_passes("fold recompute{policy=full} pipeline{stages=2} data_parallel{replicas=2} unfold_ranks")
    step, job = split_at_job(passes)
    assert [one.name for one in step] == ["fold", "recompute"]
    assert [one.name for one in job] == ["pipeline", "data_parallel", "unfold_ranks"]
    assert split_at_job(step) == (step, ())


def test_notes_come_from_the_pass_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    step, said, times = Fold()(layered_step(2)), list[str](), list[int]()
    one = TensorParallel(size=2, vocab_multiple=1)
    assert isinstance(one, NotingPass)
    assert not isinstance(Fold(), NotingPass)
    propagate = TensorParallel._sharding

    def counted(self: TensorParallel, graph: StepGraph) -> Any:
        times.append(1)
        return propagate(self, graph)

    monkeypatch.setattr(TensorParallel, "_sharding", counted)
    noted = run(step, (one,), note=said.append)
    assert said
    assert len(times) == 1
    plain = run(step, (one,))
    assert list(to_text(plain)) == list(to_text(noted))
    assert np.array_equal(plain.ops.flops, noted.ops.flops)
