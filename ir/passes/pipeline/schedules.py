"""Pipeline schedules as data: the actions of a stage, in order.

An action is the forward or backward pass of one chunk of layers for one micro-batch. A schedule may split
backward: then "backward" makes the gradients that are sent on, and "weight" those of the parameters. Every
schedule runs the micro-batches of a chunk in ascending order, each kind of pass for itself, so the sends of a
stage meet the receives of its neighbour in the order in which both issue them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from echograph.errors import PlanError, UnknownNameError

Computation = Literal["forward", "backward", "weight"]
Action = tuple[Computation, int, int]
"""What to run, for which micro-batch, and which of the stage's chunks."""

MAX_MICRO_BATCHES = 65_536
MAX_PASSES = 4_000_000


def gpipe(stage: int, stages: int, micro_batches: int, chunks: int) -> list[Action]:
    """All forwards, then all backwards (Huang et al., "GPipe", NeurIPS 2019, section 2.2)."""
    forward: list[Action] = [("forward", m, 0) for m in range(micro_batches)]
    return forward + [("backward", m, 0) for m in range(micro_batches)]


def one_forward_one_backward(stage: int, stages: int, micro_batches: int, chunks: int) -> list[Action]:
    """1F1B, the schedule "PipeDream-Flush" of Narayanan et al., SC 2021, section 2.2.1.

    A stage runs as many forwards ahead as there are stages after it, then alternates; so stage s keeps the
    activations of `stages - s` micro-batches at most.
    """
    forward: list[Action] = [("forward", m, 0) for m in range(micro_batches)]
    backward: list[Action] = [("backward", m, 0) for m in range(micro_batches)]
    return _alternate(forward, backward, warm_up=stages - stage - 1)


def interleaved(stage: int, stages: int, micro_batches: int, chunks: int, ahead: int = 0) -> list[Action]:
    """1F1B with several chunks a stage (Narayanan et al., SC 2021, section 2.2.2).

    Chunks take turns after `stages` micro-batches; the warm-up of Megatron-LM is `2 (stages - stage - 1) +
    (chunks - 1) stages` passes, and `ahead` more.
    """
    turns = [
        (start + micro_batch, chunk)
        for start in range(0, micro_batches, stages)
        for chunk in range(chunks)
        for micro_batch in range(stages)
    ]
    forward: list[Action] = [("forward", micro_batch, chunk) for micro_batch, chunk in turns]
    backward: list[Action] = [("backward", micro_batch, chunks - 1 - chunk) for micro_batch, chunk in turns]
    return _alternate(forward, backward, warm_up=2 * (stages - stage - 1) + (chunks - 1) * stages + ahead)


def zb_h1(stage: int, stages: int, micro_batches: int, chunks: int) -> list[Action]:
    """ZB-H1 (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.1).

    1F1B with backward split. Stage s puts a weight pass off until s more backward passes are done, so that it
    fills the end of the step, where 1F1B waits; a micro-batch whose weight pass is done makes room for the next
    forward, so every stage keeps the activations of `stages` micro-batches at most, as the first one does under
    1F1B. With `stages` micro-batches or more, of passes that take F, B and W, the bubble is (stages - 1) times
    F + B - W (table 2 of the paper), or F or B where that is longer.
    """
    weight: list[Action] = [("weight", m, 0) for m in range(micro_batches)]
    passes: list[Action] = []
    for each in one_forward_one_backward(stage, stages, micro_batches, chunks):
        passes.append(each)
        if each[0] == "backward" and each[1] >= stage:
            passes.append(weight[each[1] - stage])
    return passes + weight[max(0, micro_batches - stage) :]


def zb_v(stage: int, stages: int, micro_batches: int, chunks: int) -> list[Action]:
    """ZB-V (Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024; `ChunkOrder` with a turn).

    Two chunks a stage, of which the first go down the stages and the second come back up, so that the last stage
    has the middle of the model and the first one both of its ends. With as many micro-batches as fill it, 2 stages
    - 1, and passes of one length all of a stage's waiting is before its first forward and after its last weight
    pass: (stages - 1) forwards of a chunk in all. Fewer run as the first of so many would.
    """
    count = max(2 * stages - 1, micro_batches)
    passes: list[Action] = []
    done: Counter[tuple[Computation, int]] = Counter()

    def run(times: int, *kinds: tuple[Computation, int]) -> None:
        for kind, chunk in kinds * times:
            passes.append((kind, done[kind, chunk], chunk))
            done[kind, chunk] += 1

    def put_off(chunk: int) -> int:
        return done["backward", chunk] - done["weight", chunk]

    first: tuple[tuple[Computation, int], ...] = (("backward", 0), ("weight", 0))
    second: tuple[tuple[Computation, int], ...] = (("forward", 1), ("backward", 1), ("weight", 1))
    run(2 * (stages - stage) - 1, ("forward", 0))
    run(stage, ("forward", 1), ("forward", 0))
    run(stages - stage, *second)
    while done["forward", 1] < count:
        run(done["forward", 0] < count, ("forward", 0))
        run(1, *first, *second)
    run(stage, ("backward", 0), ("backward", 1))
    run(stages - stage, *first)
    run(put_off(1), ("weight", 1))
    run(put_off(0), ("weight", 0))
    return [each for each in passes if each[1] < micro_batches]


def dualpipe_v(stage: int, stages: int, micro_batches: int, chunks: int) -> list[Action]:
    """DualPipeV: DualPipe (DeepSeek-V3 technical report, arXiv 2412.19437, section 3.2.1) cut in half.

    Two chunks a stage that turn back at the last one, in place of two copies of the model that are fed from both
    ends: what a stage of DualPipe does for the micro-batches of one end its mirror image does for those of the
    other, so half of the stages with half of the micro-batches take as long, and hold the parameters once. In the
    steady state a forward of one chunk stands before a backward of the other, which may run together (`paired`).
    Where passes are of one length and pairs hide their forwards whole, the first stage waits for
    (stages - 1) (F&B + B - 3 W), B with the gradients of weights; where they hide nothing, as long as under zb-v.
    A stage has 2 stages + 1 micro-batches of a chunk in flight at most.
    """
    passes: list[Action] = []
    done: Counter[tuple[Computation, int]] = Counter()
    put_off: deque[Action] = deque()

    def forward(chunk: int) -> None:
        passes.append(("forward", done["forward", chunk], chunk))
        done["forward", chunk] += 1

    def backward(chunk: int, *, whole: bool = True) -> None:
        micro_batch = done["backward", chunk]
        passes.append(("backward", micro_batch, chunk))
        done["backward", chunk] += 1
        put_off.append(("weight", micro_batch, chunk))
        if whole:
            passes.append(put_off.pop())

    for _ in range(2 * (stages - stage - 1)):
        forward(0)
    for _ in range(stage + 1):
        forward(0)
        forward(1)
    for _ in range(stages - stage - 1):
        backward(1)
        forward(1)
    for _ in range(micro_batches - 2 * stages + stage + 1):
        forward(0)
        backward(1)
        forward(1)
        backward(0)
    for _ in range(stages - stage - 1):
        backward(1)
        forward(1)
        backward(0)
    # From the middle on weight passes are put off: they fill what the stages after wait for.
    for turn in range(2 * (stage + 1)):
        backward(1 - turn % 2, whole=turn <= stage)
    for _ in range(stages - stage - 1):
        passes.append(put_off.popleft())
        backward(0, whole=False)
    return passes + list(put_off)


def paired(schedule: str, actions: Sequence[Action]) -> frozenset[int]:
    """The places of forward passes that a schedule runs together with the backward passes behind them."""
    places = (i for i, (one, two) in enumerate(pairwise(actions)) if (one[0], two[0]) == ("forward", "backward"))
    if schedule != "dualpipe-v":
        return frozenset(places)
    # The first backward of the last stage runs alone, so that the one before it has it sooner.
    first = next((i for i, each in enumerate(actions) if each[0] == "backward"), 0)
    return frozenset(i for i in places if actions[i][2] != actions[i + 1][2] and i + 1 != first)


def _alternate(forward: list[Action], backward: list[Action], warm_up: int) -> list[Action]:
    ahead = min(warm_up, len(forward))
    steady = [each for pair in zip(forward[ahead:], backward, strict=False) for each in pair]
    return forward[:ahead] + steady + backward[len(forward) - ahead :]


SCHEDULES: dict[str, Callable[[int, int, int, int], list[Action]]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-v": zb_v,
    "dualpipe-v": dualpipe_v,
}
SPLIT = frozenset({"zb-h1", "zb-v", "dualpipe-v"})
"""Schedules with weight passes of their own."""
PAIRED = frozenset({"interleaved", "dualpipe-v"})
"""Schedules in which a forward and a backward may run together."""
TURNING = frozenset({"zb-v", "dualpipe-v"})
"""Schedules whose chunks turn back at the last stage."""


@dataclass(frozen=True, slots=True)
class ChunkOrder:
    """Which chunks of the model a stage has.

    Attributes:
        stages: number of stages.
        turns: whether every second row of chunks goes from the last stage to the first; else all go from the first
            to the last.
    """

    stages: int
    turns: bool = False

    def stage(self, chunk: int) -> int:
        """The stage of a chunk."""
        row, place = divmod(chunk, self.stages)
        return self.stages - 1 - place if self.turns and row % 2 else place

    def chunks(self, stage: int, count: int) -> list[int]:
        """The chunks of a stage, of so many, in the order of the model."""
        back = self.stages - 1 - stage if self.turns else stage
        places = (row * self.stages + (back if row % 2 else stage) for row in range(-(-count // self.stages)))
        return [chunk for chunk in places if chunk < count]


def check_schedule(schedule: str, stages: int, micro_batches: int, chunks: int) -> None:
    """Refuses what a schedule cannot do.

    Raises:
        PlanError: names the nearest choice that works.
        UnknownNameError: no such schedule.
    """
    if schedule not in SCHEDULES:
        raise UnknownNameError("schedule", schedule, SCHEDULES)
    if not 1 <= micro_batches <= MAX_MICRO_BATCHES:
        raise PlanError(f"{micro_batches} micro-batches: choose between 1 and {MAX_MICRO_BATCHES:,}")
    if schedule in TURNING:
        if stages < 2 or chunks != 2:
            raise PlanError(f"schedule {schedule} with {stages} stages of {chunks} chunks: give 2 chunks of each")
        if schedule == "dualpipe-v" and micro_batches < 2 * stages:
            raise PlanError(
                f"schedule dualpipe-v with {micro_batches} micro-batches on {stages} stages: give "
                f"{2 * stages} or more, or use zb-v"
            )
    elif schedule == "interleaved":
        _check_interleaved(stages, micro_batches, chunks)
    elif chunks != 1:
        raise PlanError(f"schedule {schedule} with {chunks} chunks a stage: use interleaved, or one chunk")
    if micro_batches * chunks > MAX_PASSES:
        raise PlanError(f"{micro_batches} micro-batches of {chunks} chunks are too many: at most {MAX_PASSES:,}")


def _check_interleaved(stages: int, micro_batches: int, chunks: int) -> None:
    if stages < 2 or chunks < 2:
        raise PlanError(
            f"schedule interleaved with {stages} stages of {chunks} chunks: give 2 or more of both, or use 1f1b"
        )
    if micro_batches % stages:
        near = max(1, round(micro_batches / stages)) * stages
        raise PlanError(
            f"schedule interleaved with {micro_batches} micro-batches on {stages} stages: "
            f"use a multiple of {stages}, such as {near}"
        )


def order(
    schedule: str, stage: int, stages: int, micro_batches: int, chunks: int = 1, *, ahead: int = 0
) -> list[Action]:
    """The passes of one stage in the order in which it runs them.

    Args:
        schedule: a name of `SCHEDULES`.
        stage: which stage, from 0.
        stages: number of stages.
        micro_batches: number of micro-batches of a step.
        chunks: chunks of layers on each stage.
        ahead: passes that a stage of an interleaved schedule runs forward more before its first backward.

    Returns:
        (kind, micro-batch, chunk of the stage), every one once, a forward before its backward, and that before its
        weight pass, which only the schedules of `SPLIT` have.

    Raises:
        PlanError: the schedule cannot do this.
        UnknownNameError: no such schedule.
    """
    check_schedule(schedule, stages, micro_batches, chunks)
    if ahead and schedule == "interleaved":
        return interleaved(stage, stages, micro_batches, chunks, ahead)
    return SCHEDULES[schedule](stage, stages, micro_batches, chunks)
