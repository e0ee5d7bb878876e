"""What the host takes: a framework's work in proportion to its processor, and what of it acts on a step."""

from __future__ import annotations

from dataclasses import replace

import pytest
from layered import layered_step

from echograph.errors import UnknownNameError
from echograph.ir.types import Phase
from echograph.models.stacks import load_stack, stack_names
from echograph.profiler.costs.host import frameworks, load_framework, load_processor, processors
from echograph.simulator.clusters import cluster_names, load_cluster
from echograph.workflow.plan import Plan
from echograph.workflow.predict import predict
from echograph.workflow.system import System


@pytest.mark.parametrize("name", frameworks())
def test_a_framework_takes_as_long_where_it_was_measured_and_longer_on_a_slower_processor(name: str) -> None:
    framework = load_framework(name)
    here, slow = load_processor(framework.processor), load_processor("epyc-7742")
    times = framework.on(here)
    assert times[Phase.RECOMPUTE] == framework.recompute_s
    assert times[Phase.BACKWARD] == framework.backward_s
    assert times[Phase.OPTIMIZER] == times[Phase.FORWARD] == framework.forward_s
    ratio = here.single_thread / slow.single_thread
    assert framework.on(slow) == {phase: pytest.approx(ratio * seconds) for phase, seconds in times.items()}
    assert ratio > 2


def test_every_name_is_of_a_table() -> None:
    assert {load_cluster(name).processor for name in cluster_names()} - {""} <= processors().keys()
    hosts = {load_stack(name).host for name in stack_names()} - {""}
    assert hosts == frameworks().keys()


def test_a_name_of_no_table_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="epyc-7742"):
        load_processor("epyc-774")
    with pytest.raises(UnknownNameError, match="megatron-core"):
        load_framework("megatron-cor")
    with pytest.raises(UnknownNameError, match="xeon-8480c"):
        System(replace(load_cluster("dgx-h100"), processor="xeon-8480"))


def test_a_stack_names_the_host_of_a_plan() -> None:
    step = layered_step(1)
    known = System("dgx-a100")
    faster = System(replace(known.cluster, processor="epyc-9655"))
    unknown = System(replace(known.cluster, processor=""))
    plan = Plan(gpus=1, cluster="dgx-a100", stack="megatron-core")
    slow, fast, plain = (predict(step, plan, where)[0].breakdown.host for where in (known, faster, unknown))
    assert 0 < fast < slow
    assert plain not in (slow, fast)
    assert known.host_running("") == known.host
    assert unknown.host_running("megatron-core") == unknown.host
