"""A search finds what predicting every plan finds, and says why the others lose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from echograph.errors import DataError, EchoError, PlanError, UnknownNameError, UsageError
from echograph.ir.graph import StepGraph
from echograph.progress import silent
from echograph.units import format_bytes
from echograph.workflow.plan import Plan
from echograph.workflow.predict import predict
from echograph.workflow.predictor import Predictor
from echograph.workflow.scenario import Scenario
from echograph.workflow.search import branch, search
from echograph.workflow.search.bounds import Bounds
from echograph.workflow.search.branch import ONE_SAMPLE, Candidate
from echograph.workflow.search.objective import OBJECTIVES, objective
from echograph.workflow.search.space import AXES, SearchFacts, parse_axis, space, words
from echograph.workflow.system import System
from echograph.workflow.workers import WorkerOptions

BASE = Plan(gpus=8, global_batch=16)
SMALL: dict[str, tuple[Any, ...]] = {
    "tp": (1, 2),
    "sequence_parallel": (False,),
    "cp": (1,),
    "pp": (1, 2),
    "vpp": (1,),
    "schedule": ("",),
    "zero": (0, 3),
    "hsdp_replicas": (1,),
    "micro_batch": (2,),
    "recompute": ("none", "full"),
}
FAILURES = Scenario(node_mtbf_hours=1000.0, checkpoint_s=60.0, restart_s=300.0)


def exhaustive(
    graph: StepGraph, system: System, over: dict[str, tuple[Any, ...]], name: str = "step", base: Plan = BASE
) -> list[tuple[float, Plan]]:
    """Every plan that runs, best first; of equal ones the first of the space."""
    among, found = space(graph, system.cluster, base, over), []
    scenario = FAILURES if name == "goodput" else Scenario()
    aim = objective(name, system, scenario)
    for chosen in among.choices():
        try:
            plan = among.plan(chosen)
            result, _ = predict(graph, plan, system, scenario)
        except EchoError:
            continue
        if result.memory is None or result.memory.fits:
            found.append((aim.value(result), plan))
    return sorted(found, key=lambda pair: pair[0])


@pytest.mark.parametrize(
    "name", ["step", *(pytest.param(name, marks=pytest.mark.slow) for name in ("energy", "goodput", "cost"))]
)
def test_the_best_are_those_of_every_plan(dense: StepGraph, name: str) -> None:
    system, over = System("dgx-h100"), SMALL | ({"gpus": (4, 8)} if name == "cost" else {})
    base = replace(BASE, gpus=None) if "gpus" in over else BASE
    every = exhaustive(dense, system, over, name, base)
    scenario = FAILURES if name == "goodput" else Scenario()
    found = search(dense, base, system, scenario, over=over, objective=name, top=5)
    assert [(one.value, one.plan) for one in found.best] == every[:5]
    assert not found.ended
    losers = found.losers
    assert found.considered == found.simulated + losers.slower_by_bound + losers.too_large_by_bound + sum(
        losers.refused.values()
    )


def test_the_table_says_of_memory_what_a_prediction_alone_says(dense: StepGraph) -> None:
    found = search(dense, BASE, System("dgx-h100"), over=SMALL, top=3)
    table = [" ".join(line.split()) for line in str(found).splitlines()]
    for number, one in enumerate(found.best, 1):
        memory = predict(dense, one.plan, System("dgx-h100"))[0].memory
        assert memory is not None
        assert (one.peak_bytes, one.device_bytes) == (memory.peak_bytes, memory.device_bytes)
        said = f"{format_bytes(memory.peak_bytes)} {format_bytes(memory.device_bytes)}"
        assert any(line.startswith(f"{number} ") and said in line for line in table)
    assert any(line.endswith("MFU allocated in all plan") for line in table)


@pytest.mark.slow
def test_memory_decides_as_it_does_alone(dense: StepGraph) -> None:
    whole = System("dgx-h100")
    needs = sorted(one.device_bytes for one in search(dense, BASE, whole, over=SMALL, top=100).best)
    most = needs[len(needs) // 2]
    every = exhaustive(dense, whole.with_memory(most), SMALL)
    assert 0 < len(every) < len(needs)
    found = search(dense, BASE, whole, over=SMALL, max_memory_bytes=most, top=3)
    assert [one.plan for one in found.best] == [plan for _, plan in every[:3]]
    assert found.losers.too_large + found.losers.too_large_by_bound > 0
    assert found.losers.least_missing_bytes > 0


@pytest.mark.slow
def test_processes_find_the_same(dense: StepGraph) -> None:
    alone, together = (
        search(dense, BASE, over=SMALL, top=4, where=WorkerOptions(jobs=jobs)).to_json()["best"] for jobs in (1, 2)
    )
    assert alone == together


def test_bounds_spare_predictions(dense: StepGraph) -> None:
    """Where kernels are all that takes time, plans that compute more are known to be slower before."""
    scenario = Scenario(without=("comm", "host"))
    found = search(dense, Plan(gpus=8, global_batch=64), scenario=scenario, over=SMALL, top=1)
    assert found.losers.slower_by_bound > 0


def test_the_front_is_not_beaten(dense: StepGraph) -> None:
    found = search(dense, replace(BASE, gpus=None), over=SMALL | {"gpus": (4, 8), "recompute": ("none",)}, top=100)
    figures = {(c.step_s, c.device_bytes, c.gpus) for c in found.best}
    for one in found.front:
        mine = one.step_s, one.device_bytes, one.gpus
        assert not any(
            other != mine and all(a <= b for a, b in zip(other, mine, strict=True)) for other in figures
        )
    assert len(found.front) > 1


def test_plans_whose_intervals_overlap_are_alike(dense: StepGraph) -> None:
    found = search(dense, BASE, over=SMALL)
    high = found.best[0].interval_s[1]
    assert 1 <= found.alike <= len(found.best)
    assert all(one.interval_s[0] <= high for one in found.best[: found.alike])


def test_chunks_that_do_not_divide_have_fewer_layers_at_the_ends(dense: StepGraph) -> None:
    """As Llama 3.1 405B is published: 126 layers, 16 stages of 8, or 4 chunks on each of 8 stages."""
    facts = SearchFacts(gpus=(256,), global_batch=256, domain=8, layers=126, experts=1, tokens=8192, batch=2)
    axis = {axis.name: axis for axis in AXES}
    on_eight = {"gpus": 256, "tp": 4, "cp": 1, "pp": 8}
    assert axis["vpp"].values(facts, on_eight) == [1, 2, 4, 8]
    assert axis["stage_layers"].values(facts, on_eight | {"vpp": 4}) == ["", "3," + "4," * 30 + "3"]
    assert axis["stage_layers"].values(facts, on_eight | {"pp": 2, "vpp": 3}) == [""]
    for layers, divides in (("3," + "4," * 30 + "3", True), ("4,4", False), ("x", False), ("", True)):
        assert axis["stage_layers"].divides(layers, facts, on_eight | {"vpp": 4}) == divides


def test_time_ends_it_with_what_is_known(dense: StepGraph) -> None:
    found = search(dense, BASE, time_s=0.0)
    assert found.ended == "time" and not found.best and found.losers.not_reached > 0
    assert found.losers.not_reached + sum(found.losers.refused.values()) == found.considered
    assert found.gap is None and "others may be better)" in str(found)


def test_an_ended_search_says_how_much_better_another_plan_may_be(
    dense: StepGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the lowest bound of those that are not predicted, which the best of them all is not below."""
    from echograph.workflow import workers

    over, give = SMALL | {"micro_batch": (1, 2)}, workers._Here.give
    whole = search(dense, BASE, over=over, front=False, top=1)
    asked: list[str] = []

    def noted(self: Any, point: Any) -> None:
        asked.append(point[2])
        if asked.count("bound") == 3:
            raise KeyboardInterrupt
        give(self, point)

    monkeypatch.setattr(workers._Here, "give", noted)
    found = search(dense, BASE, over=over, front=False, top=1, time_s=3600.0)
    assert found.ended == "interrupt" and found.gap is not None
    assert 0 < found.least <= whole.best[0].value <= found.best[0].value
    assert found.gap == max(0.0, 1 - found.least / found.best[0].value) and found.to_json()["gap"] == found.gap
    assert f"others may be better, by {found.gap:.1%} at most" in str(found)
    assert whole.gap == 0.0


@pytest.mark.slow
def test_with_a_time_that_is_long_enough_it_finds_the_same(dense: StepGraph) -> None:
    found, alone = search(dense, BASE, over=SMALL, time_s=3600.0), search(dense, BASE, over=SMALL)
    assert not found.ended and found.best == alone.best
    losers = found.losers
    assert found.considered == found.simulated + losers.slower_by_bound + losers.too_large_by_bound + sum(
        losers.refused.values()
    )
    assert losers.slower + losers.too_large + len(found.best) == found.simulated


def test_a_search_with_a_time_predicts_before_all_plans_are_bounded(
    dense: StepGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for each step of a rank, at most: it has something early."""
    from echograph.workflow import workers

    asked, give = [], workers._Here.give

    def noted(self: Any, point: Any) -> None:
        asked.append(point[2])
        if asked.count("bound") == 4:
            raise KeyboardInterrupt
        give(self, point)

    monkeypatch.setattr(workers._Here, "give", noted)
    over = SMALL | {"micro_batch": (1, 2)}
    found = search(dense, BASE, over=over, front=False, time_s=3600.0)
    assert found.ended == "interrupt" and found.best
    assert asked[:4] == ["bound", "step", "bound", "whole"]
    asked.clear()
    assert not search(dense, BASE, over=over, front=False).best
    assert asked == ["bound"] * 4


def test_what_computes_again_is_bounded_by_what_does_not_first(
    dense: StepGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that compute nothing again bound those that do, of which the slower ones' own steps are never made."""
    from echograph.workflow import workers

    asked, give = [], workers._Here.give

    def noted(self: Any, point: Any) -> None:
        asked.append((point[2], point[1].recompute))
        give(self, point)

    monkeypatch.setattr(workers._Here, "give", noted)
    over = SMALL | {"micro_batch": (1, 2), "zero": (0,)}
    found = search(dense, BASE, over=over, front=False, top=1)
    assert found.best[0].plan.recompute == "none" and not found.ended
    assert asked.count(("bound", "none")) == 4 > asked.count(("bound", "full"))
    # Where nothing else is asked for, both are.
    asked.clear()
    search(dense, BASE, over=over | {"recompute": ("full",), "tp": (1,)}, front=False, top=100)
    assert asked.count(("bound", "none")) == asked.count(("bound", "full")) == 2


def test_an_ended_search_has_the_fastest_plan_whose_step_is_known(dense: StepGraph) -> None:
    """Also where one that is slower was predicted whole before."""
    system = System("dgx-h100")
    predictor, aim = Predictor(dense, system), objective("step", system, Scenario())
    among = space(dense, system.cluster, BASE, SMALL)
    state = branch._Search(among, Bounds(dense, system, Scenario()), aim, 2**40, 10, silent, ahead=True)
    plans = [among.plan(chosen) for chosen in among.choices()][:3]
    every = (branch.predicted(predictor, aim, *one) for one in enumerate(plans))
    whole = sorted((one for one in every if isinstance(one, Candidate)), key=lambda one: one.rank)
    assert whole[0].value < whole[1].value < whole[2].value
    state.needs = dict.fromkeys(range(3), 0.0)
    state._take(whole[1].number, whole[1].plan, whole[1])
    for one in (whole[2], whole[0]):
        state._take(one.number, one.plan, one.step_s)
    state.so_far(predictor)
    assert [one.number for one in state.best] == [whole[0].number, whole[1].number]


def test_memory_decides_before_clocks_do(dense: StepGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    """What needs more than it may is not simulated; it needs no less than that says, nor no more than it may."""
    system = System("dgx-h100")
    predictor, aim = Predictor(dense, system), objective("step", system, Scenario())
    one = branch.predicted(predictor, aim, 0, replace(BASE, pp=4))
    assert isinstance(one, Candidate)
    assert branch.predicted(predictor, aim, 0, one.plan, one.device_bytes) == one
    monkeypatch.delattr(Predictor, "predict")
    for most in (one.device_bytes - 1, one.device_bytes // 2, 0):
        found = branch.predicted(predictor, aim, 0, one.plan, most)
        assert isinstance(found, branch.TooLarge) and most < found.least_bytes <= one.device_bytes


def test_how_full_plans_are_that_are_predicted_ahead_is_bisected(dense: StepGraph) -> None:
    """Between what fits and what does not, by the needs of their bounds; the fastest of those first."""
    system = System("dgx-h100")
    among = space(dense, system.cluster, BASE, SMALL)
    aim = objective("step", system, Scenario())
    state = branch._Search(among, Bounds(dense, system, Scenario()), aim, 100, 10, silent, ahead=True)
    state.needs = {0: 20.0, 1: 50.0, 2: 55.0, 3: 90.0}
    state.left = [(4.0 - number, 1, number, BASE) for number in state.needs]
    # Up to 60 of 20 to 100; 55 is too large: up to 37.5; 20 fits, and none is left below that.
    for number, fits in ((2, False), (0, True)):
        assert state._dive() == (number, BASE, "step")
        state._take(number, BASE, 1e-3)
        assert state._dive() == (number, BASE, "whole")
        state._dived(number, fits)
    assert state._dive() is None


def test_plans_are_near_the_best_that_differ_in_little(dense: StepGraph) -> None:
    """A pipeline with its schedule is one thing, and so is tensor parallelism with its sequences."""
    words = (
        {"tp": 2},
        {"tp": 4, "zero": 1},
        {"tp": 4, "sequence_parallel": True},
        {"tp": 2, "pp": 2, "schedule": "zb-h1"},
        {"tp": 2, "recompute": "full"},
    )
    plans = [(1.0 + number, (), number, Plan(gpus=8, **each)) for number, each in enumerate(words)]
    names = [axis.name for axis in AXES]
    near = list(branch._Differences(names, plans).nearest(plans[0][3]))
    assert [number for *_, number, _ in near] == [0, 2, 3, 4, 1]
    other = branch._Differences(names, plans[1:]).nearest(Plan(gpus=8, tp=8, zero=1))
    assert [number for *_, number, _ in other] == [1, 2, 3, 4]


@pytest.mark.slow
def test_what_is_like_the_best_is_bounded_out_of_turn(dense: StepGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every plan is taken once, whichever way it is reached: in the end the counts are those of the space."""
    asked, beside = [], branch._Search._beside_best

    def noted(self: branch._Search) -> Any:
        asked.append(beside(self))
        return asked[-1]

    monkeypatch.setattr(branch._Search, "_beside_best", noted)
    over = SMALL | {"micro_batch": (1, 2), "tp": (1,), "pp": (1, 2)}
    found = search(dense, BASE, over=over, front=False, top=3, time_s=3600.0)
    assert any(asked) and not found.ended
    assert found.best == search(dense, BASE, over=over, front=False, top=3).best
    losers = found.losers
    assert found.considered == found.simulated + losers.slower_by_bound + losers.too_large_by_bound + sum(
        losers.refused.values()
    )


@pytest.mark.slow
def test_plans_that_share_a_step_wait_for_one_bound(dense: StepGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    from echograph.workflow import workers

    asked, give = [], workers._Here.give

    def noted(self: Any, point: Any) -> None:
        asked.append(point[2])
        give(self, point)

    monkeypatch.setattr(workers._Here, "give", noted)
    found = search(dense, BASE, over=SMALL, front=False)
    bounds = [at for at, what in enumerate(asked) if what == "bound"]
    assert 2 < len(bounds) < found.considered


def test_an_interrupt_ends_it_with_what_is_known(dense: StepGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    from echograph.workflow import workers

    taken, take = [], workers._Here.take

    def interrupted(self: Any, timeout_s: float | None = None) -> list[tuple[Any, Any]]:
        if sum(isinstance(answer, float) for _, answer in taken) == 3:
            raise KeyboardInterrupt
        taken.extend(take(self, timeout_s))
        return taken[-1:]

    monkeypatch.setattr(workers._Here, "take", interrupted)
    found = search(dense, BASE, over=SMALL)
    assert found.ended == "interrupt"
    assert found.simulated == 3 and len(found.best) == 1


def test_what_is_fixed_stays(dense: StepGraph) -> None:
    others = {word: values for word, values in SMALL.items() if word not in ("tp", "recompute")}
    found = search(dense, replace(BASE, tp=2, recompute="full"), over=others)
    assert {(one.plan.tp, one.plan.recompute) for one in found.best} == {(2, "full")}


def test_a_stack_may_be_searched_over(dense: StepGraph) -> None:
    over = SMALL | {"stack": ("eager", "inductor"), "tp": (1,), "pp": (1,), "recompute": ("none",)}
    found = search(dense, BASE, over=over)
    assert {one.plan.stack for one in found.best} == {"eager", "inductor"}


@pytest.mark.parametrize(
    ("base", "more", "words_of_it"),
    [
        (Plan(global_batch=8), {}, "--gpus"),
        (Plan(gpus=8), {}, "--global-batch"),
        (Plan(gpus=10**7, global_batch=8), {}, "max_gpus"),
        (replace(BASE, dp=8), {}, "--dp"),
        (replace(BASE, tp=2), {"over": {"tp": (1,)}}, "--tp"),
        (BASE, {"objective": "goodput"}, "--node-mtbf-hours"),
        (BASE, {"max_memory_bytes": 2**60}, "--max-memory"),
        (BASE, {"top": 0}, "--top"),
    ],
)
def test_what_is_missing_is_said(dense: StepGraph, base: Plan, more: dict[str, Any], words_of_it: str) -> None:
    with pytest.raises(UsageError, match=words_of_it):
        search(dense, base, **more)


def test_an_unknown_objective_is_said(dense: StepGraph) -> None:
    with pytest.raises(UnknownNameError, match=r"did you mean 'energy'"):
        search(dense, BASE, objective="enrgy")


def test_a_space_without_plans_says_why(dense: StepGraph) -> None:
    with pytest.raises(PlanError, match="does not divide"):
        search(dense, BASE, over={"tp": (3,)})
    with pytest.raises(PlanError, match=r"none of .* lacks"):
        search(dense, BASE, over=SMALL, max_memory_bytes=2**20)


def test_axes_are_read() -> None:
    assert parse_axis("--over", "tp=1,2") == ("tp", (1, 2))
    assert parse_axis("--over", "sequence-parallel=true,false") == ("sequence_parallel", (True, False))
    assert parse_axis("--over", "recompute=none,2") == ("recompute", ("none", "2"))
    assert words("--over", "8..64:x2") == ["8", "16", "32", "64"]
    assert words("--over", "1..2:+0.5,7") == ["1", "1.5", "2", "7"]


@pytest.mark.parametrize(
    "text", ["tp", "tp=", "tp=x", "tp=1,,2", "gpus=8..4", "gpus=1..8:x1", "gpus=0..8:x2", "gpus=1..9:*2"]
)
def test_wrong_axes_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_axis("--over", text)
    with pytest.raises(UnknownNameError):
        parse_axis("--over", "tpp=1")


def test_every_objective_has_a_bound_below_its_value(dense: StepGraph) -> None:
    system = System("dgx-h100")
    result, _ = predict(dense, Plan(gpus=8, global_batch=16), system)
    for name in OBJECTIVES:
        aim = objective(name, system, FAILURES)
        assert aim.least(result.step_s, result.gpus) <= aim.value(result) * (1 + 1e-12)


def test_a_capture_of_one_sample_is_said_to_leave_out_micro_batches(
    dense: StepGraph, caplog: pytest.LogCaptureFixture
) -> None:
    over = {name: values for name, values in SMALL.items() if name != "micro_batch"}
    over |= {"tp": (1,), "pp": (1,), "zero": (0,), "recompute": ("none",)}
    one = replace(dense, workload=replace(dense.workload, batch_size=1))
    found = search(one, BASE, over=over, front=False)
    assert {candidate.record["micro_batch"] for candidate in found.best} == {1}
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == [ONE_SAMPLE]
    caplog.clear()
    search(dense, BASE, over=over | {"micro_batch": (1,)}, front=False)
    assert not caplog.records


@pytest.mark.slow
def test_a_search_that_was_killed_goes_on_from_what_is_on_disk(dense: StepGraph, tmp_path: Path) -> None:
    system, path = System("dgx-h100"), tmp_path / "search.jsonl"
    whole = search(dense, BASE, system, over=SMALL, top=4)
    kept = search(dense, BASE, system, over=SMALL, top=4, journal_path=path)
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) > 4
    # As SIGKILL leaves it: some answers, and a line that was begun.
    half = len(lines) // 2
    path.write_bytes(b"".join(lines[:half]) + lines[half][:20])
    again = search(dense, BASE, system, over=SMALL, top=4, journal_path=path)
    for found in (kept, again):
        assert (found.best, found.front, found.simulated) == (whole.best, whole.front, whole.simulated)
    # Nothing was asked twice: the same lines stand there, each once.
    assert sorted(path.read_bytes().splitlines(keepends=True)) == sorted(lines)
    search(dense, BASE, system, over=SMALL, top=4, journal_path=path)
    assert len(path.read_bytes().splitlines()) == len(lines)
    # Another system has other answers.
    search(dense, BASE, System("dgx-a100"), over=SMALL, top=4, journal_path=path)
    assert len(path.read_bytes().splitlines()) > len(lines)


def test_a_journal_of_something_else_is_refused(dense: StepGraph, tmp_path: Path) -> None:
    path = tmp_path / "search.jsonl"
    path.write_text("not of a search\n\n")
    with pytest.raises(DataError, match="line 1 is no point"):
        search(dense, BASE, System("dgx-h100"), over=SMALL, journal_path=path)


def test_a_schedule_that_cannot_run_so_few_micro_batches_is_refused_and_others_are_found(dense: StepGraph) -> None:
    over = {"schedule": ("dualpipe-v", "interleaved"), "vpp": (2,), "pp": (2,), "tp": (1,)}
    found = search(dense, Plan(gpus=8, global_batch=8), over=over, top=1)
    assert found.best and found.best[0].plan.schedule != "dualpipe-v"
    assert any("dualpipe-v" in reason for reason in found.losers.refused)
