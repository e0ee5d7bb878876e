"""Whatever cluster, plan and options are asked for: a prediction that holds together, or one line why not."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from types import FrameType
from typing import Any, get_args

import numpy as np
import pytest
from small_models import CONFIGS, small_step

from echograph.errors import EchoError
from echograph.simulator.clusters import cluster_names
from echograph.simulator.result import Result
from echograph.workflow.plan import CpMethod, GradDType, LossName, Plan, PrecisionName, RecomputeName, ScheduleName
from echograph.workflow.predict import predict
from echograph.workflow.scenario import Scenario
from echograph.workflow.system import System

pytest.importorskip("transformers", reason="needs the [torch] extra")
pytestmark = pytest.mark.torch

FEW, MANY = 150, 10_000
SECONDS = 300
COUNTS, NO_COUNTS = (1, 1, 2, 2, 4), (8, 3, 0, -1, 16, 64)
Choice = tuple[tuple[Any, ...], tuple[Any, ...]]
"""What makes sense, and what does not, or seldom."""
PLAN: dict[str, Choice] = {
    "gpus": ((16, 32, 64, 128), (8, 7, 0, 4096)),
    "cluster": (cluster_names(), ("atlantis",)),
    "tp": (COUNTS, NO_COUNTS), "cp": (COUNTS, NO_COUNTS), "ep": (COUNTS, NO_COUNTS), "pp": (COUNTS, NO_COUNTS),
    "vpp": ((1, 2), (4, 0)),
    "dp": ((1, 2, 4), NO_COUNTS),
    "sequence_parallel": ((True, False), ()),
    "cp_method": (get_args(CpMethod), ("telepathy",)),
    "capacity_factor": ((1.0, 1.5), (0.0, -1.0)),
    "expert_imbalance": ((1.0, 2.0), (0.5,)),
    "schedule": (get_args(ScheduleName), ("whenever",)),
    "stage_layers": (("2,2", "1,3", "4", "1,1,1,1"), ("0,4", "a,b")),
    "zero": ((0, 1, 2, 3), (4,)),
    "hsdp_replicas": (COUNTS, NO_COUNTS),
    "reshard_after_forward": ((True, False), ()),
    "overlap_grad_reduce": ((True, False), ()),
    "overlap_param_gather": ((True, False), ()),
    "micro_batch": ((1, 2, 4), (0, 1000)),
    "global_batch": ((128, 256), (8, 16, 7, 0)),
    "recompute": ((*get_args(RecomputeName), "2"), ("0", "sometimes")),
    "loss": (get_args(LossName), ("lost",)),
    "precision": (("bf16", "fp8", "fp8-rowwise", "mxfp8"), (*get_args(PrecisionName), "fp2")),
    "grad_dtype": (("bf16", "fp32"), (*get_args(GradDType), "fp2")),
    "mesh_order": (("tp-cp-ep-dp-pp", "tp-pp-dp-cp-ep"), ("tp-tp",)),
}  # fmt: skip
SETTINGS: dict[str, Choice] = {
    "network.nic_GBps": (("50", "1e-3", "400"), ("0", "-1", "nan", "fast")),
    "network.nics_per_node": (("1", "4", "8"), ("0", "1e9")),
    "network.rails": (("1", "8"), ("3",)),
    "network.fabric": (("hdr200", "ndr400"), ("none",)),
    "node.gpus": (("1", "4", "8"), ("7", "0")),
    "node.nvlink_domain": (("8", "72"), ("4",)),
    "node.nvlink_GBps": (("450", "1e-9", "1e12"), ("0",)),
    "node.memory_GiB": (("80", "0.5", "1e6"), ("none",)),
    "node.nvls": (("true", "false"), ("perhaps",)),
    "node.device": (("h100-sxm", "b200", "v100-sxm2"), ("abacus",)),
    "max_gpus": (("256", "1024"), ("8", "0")),
    "no.such_key": (("1",), ()),
}
WHAT: Choice = (
    ("compute", "comm", "comm.dp", "host", "op:aten.mm", "op:*"),
    ("comm.tp", "collective:all_gather", "?"),
)
FACTORS: Choice = (("0", "0.5", "1", "1.5", "1e3"), ("1e30", "-1", "nan", "x"))
LINKS: Choice = (
    ("node 0 nic 0", "leaf 0 up", "gpu 3 nvlink", "node 0"),
    ("node 999999 nic 0", "spine 7 down", "nowhere"),
)


@pytest.mark.parametrize("start", range(0, FEW, 50))
def test_a_prediction_or_one_line(start: int) -> None:
    check(range(start, start + 50))


@pytest.mark.slow
@pytest.mark.parametrize("start", range(FEW, MANY, 500))
def test_ten_thousand(start: int) -> None:
    check(range(start, min(start + 500, MANY)))


def check(seeds: range) -> None:
    predicted = 0
    for seed in seeds:
        asker = Asker(seed)
        model, options = asker.one((tuple(CONFIGS), ())), asker.plan()
        asked = f"seed {seed}: {model} {options}"
        try:
            with within(SECONDS, asked):
                plan = Plan(**options)
                asked_of = asker.system(plan.cluster), asker.scenario()
                result, _ = predict(small_step(model), plan, *asked_of, trace_ranks=asker.traced())
        except EchoError as error:
            line = str(error)
            assert line and "\n" not in line, asked
            assert len(line) < 600, asked
            continue
        predicted += 1
        holds_together(result, asked)
    # Many draws have something wrong with them; if all had, nothing would be tested.
    assert predicted > len(seeds) // 5


def holds_together(result: Result, asked: str) -> None:
    timeline = result.timeline
    end = timeline.start + timeline.duration
    assert 0 <= result.interval_ps[0] <= result.interval_ps[1], asked
    assert result.step_ps == int(end.max(initial=0)), asked
    lane = timeline.program.astype(np.int64) * 64 + np.where(timeline.lane == 1, 1 + timeline.stream, 0)
    busy = np.bincount(lane, weights=timeline.duration)
    assert busy.max(initial=0) <= result.step_ps * (1 + 1e-9), asked
    later = timeline.cause >= 0
    assert (end[timeline.cause[later]] <= timeline.start[later]).all(), asked
    assert json.loads(json.dumps(result.to_json(), allow_nan=False)), asked


class Asker:
    """Draws options: a careless one takes values that make no sense, too."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.careless = self.random.random() < 0.3

    def one(self, choice: Choice) -> Any:
        return self.random.choice(sum(choice, ()) if self.careless else choice[0])

    def perhaps(self, chance: float, words: str) -> tuple[str, ...]:
        return (words,) if self.random.random() < chance else ()

    def plan(self) -> dict[str, Any]:
        often = {"gpus": 0.95, "cluster": 0.7}
        given = {n: self.one(choice) for n, choice in PLAN.items() if self.random.random() < often.get(n, 0.15)}
        return given if self.careless else {n: value for n, value in given.items() if _goes_with(n, given)}

    def system(self, cluster: str) -> System:
        """Where it runs, with keys of the cluster's file that have other values."""
        key, one = self.one((tuple(SETTINGS), ())), self.one
        return System(
            cluster,
            settings={name: one(SETTINGS[name]) for name in self.perhaps(0.15, key)},
            host_waits=one(((False, False, True), ())),
            launch_blocking=one(((False, False, False, True), ())),
        )

    def scenario(self) -> Scenario:
        """What is asked beyond a plan, as the command line spells it."""
        one = self.one
        jitter = one(((0.0, 0.0, 0.0, 0.05), (0.9, -1.0)))
        failures = one((((None,) * 4, (1000.0, 60.0, 300.0, None)), ((0.0, -1.0, None, 5.0),)))
        return Scenario(
            scale=self.perhaps(0.2, f"{one(WHAT)}={one(FACTORS)}"),
            without=self.perhaps(0.1, one(WHAT)),
            ranks=one((("roles", "roles", "all"), ("some",))),
            straggler=self.perhaps(0.1, f"{one((('0', '5', 'node:0'), ('99999', 'x')))}={one(FACTORS)}"),
            jitter=jitter,
            seed=one(((0, 1, 2), (-1,))),
            draws=one(((1, 3 if jitter else 1), (0, 3))),
            network=one((("", "", "closed-form", "flows"), ("psychic",))),
            degrade=self.perhaps(0.1, f"{one(LINKS)}={one(FACTORS)}"),
            node_mtbf_hours=failures[0],
            checkpoint_s=failures[1],
            restart_s=failures[2],
            checkpoint_interval_s=failures[3],
        )

    def traced(self) -> tuple[int, ...]:
        """Ranks whose timelines are wanted."""
        return self.one((((), (), (), (0,)), ((0, 9999),)))


def _goes_with(name: str, given: dict[str, Any]) -> bool:
    """Whether an option that needs another one has it."""
    zero = given.get("zero", 0)
    needs: dict[str, bool] = {
        **dict.fromkeys(("vpp", "schedule", "stage_layers"), given.get("pp", 1) > 1),
        **dict.fromkeys(("reshard_after_forward", "hsdp_replicas"), zero == 3),
        "sequence_parallel": given.get("tp", 1) > 1,
        "overlap_param_gather": zero in (1, 2),
        "schedule": given.get("pp", 1) > 1 and "vpp" not in given,
        "dp": False,
    }
    return needs.get(name, True)


@contextmanager
def within(seconds: int, asked: str) -> Iterator[None]:
    """A prediction that takes longer hangs."""

    def late(signum: int, frame: FrameType | None) -> None:
        raise AssertionError(f"no answer in {seconds} s: {asked}")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
