"""Software stacks: every file is read, every choice has a source and changes what a plan means."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from echograph import load
from echograph.errors import DataError, UnknownNameError
from echograph.ir import serde
from echograph.ir.graph import Workload
from echograph.ir.passes.base import pass_text
from echograph.ir.passes.kernels import PADDED
from echograph.ir.types import DType, Gemm
from echograph.models.stacks import CHOICES, Stack, load_stack, read_stack, stack_names
from echograph.profiler.costs import load_device
from echograph.simulator.clusters import load_cluster
from echograph.simulator.memory import Runtime
from echograph.workflow.plan import Plan, passes, with_kernels, with_stack
from echograph.workflow.predict import predict
from echograph.workflow.system import System, runtime_of

GRAPHS = Path(__file__).parents[1] / "golden" / "predictions" / "graphs"

PLANS = (
    {},
    {"zero": 1, "precision": "fp8"},
    {"pp": 2, "recompute": "full"},
    {"zero": 3},
    {"tp": 2, "ep": 2, "sequence_parallel": True},
    {"tp": 2},
    {"tp": 2, "sequence_parallel": True},
    {"pp": 2, "tp": 2},
    {"cp": 2},
)
OF_THE_SYSTEM = {
    "host", "host_waits", "expandable_segments", "other_communicators", "padded_products", "tp_comm_sms",
}  # fmt: skip
"""Choices that no pass has: `with_kernels`, `simulate` and `runtime_of` read them."""


def said(plan: Plan) -> str:
    workload = Workload(dtype=DType.BF16)
    return " ".join(map(pass_text, passes(plan, workload, load_cluster("dgx-h100"))))


@pytest.mark.parametrize("name", stack_names())
def test_every_choice_has_a_source(name: str) -> None:
    stack = load_stack(name)
    assert stack.name == name
    assert len(stack.title) > 10
    assert stack.sources
    for choice, source in stack.sources.items():
        assert choice in CHOICES
        assert len(source) > 30, f"{name}: {choice}: says too little of where it is from"


@pytest.mark.parametrize("choice", sorted(set(CHOICES) - OF_THE_SYSTEM))
def test_some_stack_makes_each_choice_and_it_acts(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = False
    for name in stack_names():
        own = load_stack(name)
        if choice not in own.sources:
            continue
        without = replace(own, **{choice: getattr(Stack(), choice)})
        for options in PLANS:
            with monkeypatch.context() as patch:
                before = said(Plan(gpus=8, stack=name, **options))
                patch.setattr("echograph.workflow.plan.load_stack", lambda _, stack=without: stack)
                changed |= before != said(Plan(gpus=8, stack=name, **options))
    assert changed


def test_what_a_plan_says_counts_more_than_its_stack() -> None:
    nemo = load_stack("nemo")
    assert with_stack(Plan(zero=1), nemo).overlap_param_gather is True
    assert with_stack(Plan(zero=1, overlap_param_gather=False), nemo).overlap_param_gather is False
    torchtitan = load_stack("torchtitan")
    assert with_stack(Plan(), torchtitan).loss == "fused"
    assert with_stack(Plan(loss="eager"), torchtitan).loss == "eager"


@pytest.mark.parametrize(("stack", "zero", "whole"), [
    ("megatron-2021", 1, True), ("megatron-deepspeed", 1, True), ("deepspeed", 2, True),
    ("megatron-2021", 0, False), ("megatron-core", 1, False), ("nemo", 1, False),
])  # fmt: skip
def test_deepspeed_reduces_whole_gradients(stack: str, zero: int, whole: bool) -> None:
    assert ("reduce_scatter=false" in said(Plan(gpus=8, stack=stack, zero=zero))) == whole


def test_an_activation_stays_unfused_where_its_library_has_no_kernel() -> None:
    assert "unfused=(aten.relu)" in said(Plan(gpus=8, stack="nemo-2")).replace("[", "(").replace("]", ")")
    assert "unfused" not in said(Plan(gpus=8, stack="nemo"))


def test_attention_is_of_the_first_kernel_that_the_device_has() -> None:
    workload = Workload(dtype=DType.BF16)
    plan = Plan(gpus=8, stack="nemo")
    assert "attention_kernel{kernel=cudnn-2024}" in said(plan)
    on_a100 = " ".join(map(pass_text, passes(plan, workload, load_cluster("dgx-a100"))))
    assert "attention_kernel{kernel=flash2}" in on_a100


def test_nemo_ran_flashattention_until_its_launcher_let_cudnn_in() -> None:
    said_of = {name: said(Plan(gpus=8, cp=2, stack=name)) for name in ("nemo-1", "nemo", "nemo-2")}
    kernels = {name: re.findall(r"attention_kernel{kernel=([\w-]+)}", text) for name, text in said_of.items()}
    assert kernels == {"nemo-1": ["flash2"], "nemo": ["cudnn-2024"], "nemo-2": ["cudnn"]}
    waits = {name: load_stack(name).ring_host_waits for name in said_of}
    assert waits == {"nemo-1": False, "nemo": True, "nemo-2": False}


def test_a_stack_like_another_has_its_choices_and_their_sources(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text('title = "Ours"\nlike = "nemo"\n[grad_dtype]\nvalue = "fp32"\nsource = "a report"\n')
    own, nemo = read_stack(path), load_stack("nemo")
    assert own == replace(
        nemo, name="own", title="Ours", grad_dtype="fp32", sources={**nemo.sources, "grad_dtype": "a report"}
    )
    path.write_text('like = "nemos"\n')
    with pytest.raises(UnknownNameError, match="nemo"):
        read_stack(path)


def test_a_file_without_a_source_or_with_an_unknown_choice_is_refused(tmp_path: Path) -> None:
    for text, reason in (
        ('[fuse]\nvalue = "step"\n', "needs a value and its source"),
        ('[fuse]\nvalue = "step"\nsource = " "\n', "needs a value and its source"),
        ('[fuel]\nvalue = "step"\nsource = "a report"\n', "no choice of a stack"),
        ('[fuse]\nvalue = 3\nsource = "a report"\n', "fuse"),
        ("fuse = 3\n", "fuse needs"),
        ("[fuse\n", "stack own.toml"),
    ):
        path = tmp_path / "own.toml"
        path.write_text(text)
        with pytest.raises(DataError, match=reason):
            read_stack(path)
    with pytest.raises(UnknownNameError, match="nemo"):
        load_stack("nemos")


def test_a_stack_that_pads_has_padded_products_and_no_others() -> None:
    step = serde.load(GRAPHS / "gpt2-xl.pb")
    device = load_device("h200")
    for name, pads in (("inductor", True), ("eager", False)):
        graph = with_kernels(step, load_stack(name), device)
        products = [
            graph.strings[graph.ops.name[row]]
            for row, which in enumerate(graph.ops.attributes.tolist())
            if which >= 0 and isinstance(graph.ops.attribute_values[which], Gemm)
        ]
        assert products
        assert all(each.endswith(PADDED) == pads for each in products)


def test_what_a_framework_takes_of_memory_is_its_stack_s() -> None:
    assert runtime_of("torchtitan", "").expandable_segments
    assert not runtime_of("", "").expandable_segments
    graph = load(GRAPHS / "bert.pb")
    taken = [
        predict(graph, Plan(gpus=16, tp=2, pp=2, stack=stack), System())[0].memory
        for stack in ("eager", "megatron-deepspeed")
    ]
    assert taken[0] is not None
    assert taken[1] is not None
    # All ranks are 16, a replica 4, a pipeline a pair.
    more = sum(taken[1].overhead_bytes.values()) - sum(taken[0].overhead_bytes.values())
    assert more == 2 * Runtime().nccl_bytes + Runtime().nccl_pair_bytes
