from __future__ import annotations

from itertools import pairwise

import pytest

from echograph.errors import PlanError, UnknownNameError
from echograph.ir.passes.pipeline.schedules import Action, ChunkOrder, order, paired

SHAPES = [
    ("gpipe", 4, 8, 1),
    ("gpipe", 1, 3, 1),
    ("1f1b", 4, 8, 1),
    ("1f1b", 8, 3, 1),
    ("1f1b", 1, 1, 1),
    ("interleaved", 2, 2, 2),
    ("interleaved", 4, 8, 2),
    ("interleaved", 3, 12, 5),
]
KINDS = {"FORWARD": "forward", "BACKWARD_INPUT": "backward", "BACKWARD_WEIGHT": "weight"}
"""PyTorch's words."""


def warm_up(passes: list[Action]) -> int:
    """Forwards before the first backward, the one that the steady state begins with among them."""
    return next(i for i, (kind, _, _) in enumerate(passes) if kind == "backward")


def in_flight(passes: list[Action]) -> int:
    """The most micro-batches of a chunk whose forward is done and whose backward is not, over all chunks."""
    alive, most = 0, 0
    for kind, _, _ in passes:
        alive += 1 if kind == "forward" else -1
        most = max(most, alive)
    return most


@pytest.mark.parametrize(("schedule", "stages", "micro_batches", "chunks"), SHAPES)
def test_every_pass_runs_once_and_forward_comes_first(
    schedule: str, stages: int, micro_batches: int, chunks: int
) -> None:
    for stage in range(stages):
        passes = order(schedule, stage, stages, micro_batches, chunks)
        assert len(passes) == len(set(passes)) == 2 * micro_batches * chunks
        done = set()
        for kind, micro_batch, chunk in passes:
            assert kind == "forward" or (micro_batch, chunk) in done
            done.add((micro_batch, chunk))


@pytest.mark.parametrize(("schedule", "stages", "micro_batches", "chunks"), SHAPES)
def test_micro_batches_of_a_chunk_ascend(schedule: str, stages: int, micro_batches: int, chunks: int) -> None:
    passes = order(schedule, stages - 1, stages, micro_batches, chunks)
    for kind in ("forward", "backward"):
        for chunk in range(chunks):
            mine = [m for k, m, c in passes if (k, c) == (kind, chunk)]
            assert mine == list(range(micro_batches))


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("micro_batches", [1, 2, 7, 8, 15, 20])
def test_zb_v_is_that_of_pytorch(stages: int, micro_batches: int) -> None:
    theirs = pytest.importorskip("torch.distributed.pipelining.schedules").ScheduleZBVZeroBubble
    schedule = theirs.__new__(theirs)
    schedule.pp_group_size, schedule.num_stages, schedule._n_microbatches = stages, 2 * stages, micro_batches
    for stage in range(stages):
        known = [each for each in schedule._calculate_single_rank_operations(stage) if each is not None]
        passes = [(KINDS[a.computation_type.name], a.microbatch_index, int(a.stage_index != stage)) for a in known]
        assert order("zb-v", stage, stages, micro_batches, 2) == passes


@pytest.mark.parametrize("stages", [2, 3, 4, 7])
@pytest.mark.parametrize("more", [0, 1, 5])
def test_dualpipe_v_is_that_of_pytorch(stages: int, more: int) -> None:
    theirs = pytest.importorskip("torch.distributed.pipelining.schedules").ScheduleDualPipeV
    schedule = theirs.__new__(theirs)
    schedule.pp_group_size, schedule.num_stages, schedule._n_microbatches = stages, 2 * stages, 2 * stages + more
    for stage in range(stages):
        passes, pairs = [], set()
        for each in schedule._calculate_single_rank_operations(stage):
            if each.sub_actions:
                pairs.add(len(passes))
            for action in each.sub_actions or (each,):
                what = action.microbatch_index, int(action.stage_index != stage)
                whole = action.computation_type.name == "FULL_BACKWARD"
                kinds = ("backward", "weight") if whole else (KINDS[action.computation_type.name],)
                passes += [(kind, *what) for kind in kinds]
        assert order("dualpipe-v", stage, stages, 2 * stages + more, 2) == passes
        assert paired("dualpipe-v", passes) == pairs


def units(schedule: str, passes: list[Action], pair: int | None) -> list[list[Action]]:
    """The passes of a stage as what ends at once: pairs that take a time of their own, and whole backwards."""
    places, found, at = paired(schedule, passes), list[list[Action]](), 0
    while at < len(passes):
        whole = passes[at][0] == "backward" and passes[at + 1 : at + 2] == [("weight", *passes[at][1:])]
        count = 1 if pair is None else 3 if at in places else 2 if whole else 1
        found.append(passes[at : at + count])
        at += count
    return found


def makespan(
    schedule: str, stages: int, micro_batches: int, times: dict[str, int], pair: int | None = None
) -> int:
    """When the last of two chunks' passes ends, if what crosses stages takes no time.

    Args:
        schedule: whose chunks turn.
        stages: how many.
        micro_batches: how many.
        times: of each kind of pass.
        pair: of a forward and a whole backward that run together; None: one after the other, as they stand.
    """
    where = ChunkOrder(stages, turns=True)
    queues = [units(schedule, order(schedule, stage, stages, micro_batches, 2), pair) for stage in range(stages)]
    ended: dict[tuple[str, int, int], int] = {}
    free, last = [0] * stages, 2 * stages - 1
    while any(queues):
        moved = False
        for stage, queue in enumerate(queues):
            while queue:
                these = [(kind, m, where.chunks(stage, 2 * stages)[local]) for kind, m, local in queue[0]]
                before = {
                    (kind, m, chunk): {
                        "forward": ("forward", m, chunk - 1),
                        "backward": ("backward", m, chunk + 1) if chunk < last else ("forward", m, chunk),
                        "weight": ("backward", m, chunk),
                    }[kind]
                    for kind, m, chunk in these
                }
                needs = [need for need in before.values() if need[2] >= 0 and need not in these]
                if not all(need in ended for need in needs):
                    break
                took = pair if len(these) == 3 and pair is not None else sum(times[kind] for kind, _, _ in these)
                free[stage] = max([free[stage], *(ended[need] for need in needs)]) + took
                ended |= dict.fromkeys(these, free[stage])
                queue.pop(0)
                moved = True
        assert moved, "stages wait for each other"
    return max(free)


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("micro_batches", [2, 3, 8])
def test_dualpipe_v_waits_as_its_paper_says(stages: int, micro_batches: int) -> None:
    """(PP / 2 - 1) (F&B + B - 3 W) on the first stage, which has the model's ends, for PP chunks.

    Passes are of one length, and a pair hides its forward. B counts the gradients of weights.
    """
    count, unit = micro_batches * stages, 10
    forward, backward, weights, both = unit, 2 * unit, unit, 2 * unit
    times = {"forward": forward, "backward": unit, "weight": weights}
    pairs = len(paired("dualpipe-v", order("dualpipe-v", 0, stages, count, 2)))
    busy = 2 * count * (forward + backward) - pairs * (forward + backward - both)
    bubble = (stages - 1) * (both + backward - 3 * weights)
    assert makespan("dualpipe-v", stages, count, times, both) == busy + bubble


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_dualpipe_v_one_after_the_other_waits_as_zb_v_does(stages: int) -> None:
    times = {"forward": 10, "backward": 10, "weight": 10}
    for schedule in ("dualpipe-v", "zb-v"):
        assert makespan(schedule, stages, 4 * stages, times) == 2 * 4 * stages * 30 + (stages - 1) * 10


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_dualpipe_v_holds_a_micro_batch_more_than_there_are_chunks(stages: int) -> None:
    for stage in range(stages):
        passes = [each for each in order("dualpipe-v", stage, stages, 4 * stages, 2) if each[0] != "weight"]
        assert in_flight(passes) <= 2 * stages + 1


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize(("stages", "count"), [(1, 3), (3, 3), (3, 6), (4, 8), (3, 9)])
def test_a_stage_has_the_chunks_that_are_on_it(turns: bool, stages: int, count: int) -> None:
    where = ChunkOrder(stages, turns)
    found = [[chunk for chunk in range(count) if where.stage(chunk) == stage] for stage in range(stages)]
    assert [where.chunks(stage, count) for stage in range(stages)] == found
    assert sorted(chunk for each in found for chunk in each) == list(range(count))
    neighbours = {abs(where.stage(chunk) - where.stage(chunk + 1)) for chunk in range(count - 1)}
    assert not turns or neighbours <= {0, 1}


@pytest.mark.parametrize("stage", range(4))
def test_a_pass_ahead_leaves_pairs_of_different_micro_batches(stage: int) -> None:
    """A backward that runs beside a forward is never of the same chunk and micro-batch."""
    usual, ahead = order("interleaved", stage, 4, 8, 2), order("interleaved", stage, 4, 8, 2, ahead=1)
    assert sorted(ahead) == sorted(usual)
    assert warm_up(ahead) == warm_up(usual) + 1
    done = set()
    for (kind, *what), (after, *other) in pairwise(ahead):
        if (kind, after) == ("forward", "backward"):
            assert what != other
            assert tuple(other) in done
        done.add(tuple(what))


def test_1f1b_holds_no_more_micro_batches_than_stages_follow() -> None:
    for stage in range(4):
        passes = order("1f1b", stage, 4, 16)
        assert in_flight(passes) == 4 - stage
        assert warm_up(passes) == 4 - stage
    assert in_flight(order("gpipe", 0, 4, 16)) == 16


def test_interleaved_warms_up_as_megatron_does() -> None:
    for stage in range(4):
        assert warm_up(order("interleaved", stage, 4, 16, 3)) == 2 * (3 - stage) + 2 * 4 + 1


def test_interleaved_takes_turns_after_as_many_micro_batches_as_stages() -> None:
    forwards = [(m, c) for kind, m, c in order("interleaved", 0, 2, 4, 2) if kind == "forward"]
    assert forwards == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)]
    backwards = [(m, c) for kind, m, c in order("interleaved", 0, 2, 4, 2) if kind == "backward"]
    assert backwards == [(0, 1), (1, 1), (0, 0), (1, 0), (2, 1), (3, 1), (2, 0), (3, 0)]


@pytest.mark.parametrize(
    ("schedule", "stages", "micro_batches", "chunks", "message"),
    [
        ("1f1b", 4, 0, 1, "0 micro-batches"),
        ("gpipe", 4, 10**9, 1, "micro-batches"),
        ("1f1b", 4, 8, 2, "use interleaved"),
        ("interleaved", 4, 8, 1, "2 or more"),
        ("interleaved", 1, 8, 2, "2 or more"),
        ("interleaved", 4, 10, 2, "such as 8"),
        ("interleaved", 4, 1, 2, "such as 4"),
        ("interleaved", 2, 65_536, 4096, "too many"),
        ("zb-h1", 4, 8, 2, "use interleaved"),
        ("dualpipe-v", 4, 7, 2, "give 8 or more, or use zb-v"),
        ("dualpipe-v", 4, 8, 1, "2 chunks of each"),
    ],
)
def test_what_a_schedule_cannot_do_is_refused(
    schedule: str, stages: int, micro_batches: int, chunks: int, message: str
) -> None:
    with pytest.raises(PlanError, match=message) as error:
        order(schedule, 0, stages, micro_batches, chunks)
    assert "\n" not in str(error.value)


def test_an_unknown_schedule_lists_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="1f1b"):
        order("1f1b1", 0, 4, 8)


@pytest.mark.parametrize(
    ("schedule", "stages", "micro_batches", "chunks"), [s for s in SHAPES if s[0] != "1f1b" or s[2] >= s[1] > 1]
)
def test_the_order_is_that_of_torch(schedule: str, stages: int, micro_batches: int, chunks: int) -> None:
    torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    names = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B"}
    theirs = object.__new__(getattr(torch_schedules, names[schedule]))  # its constructor wants running processes
    theirs._n_microbatches, theirs._num_stages = micro_batches, stages
    theirs.pp_group_size, theirs.n_local_stages, theirs.microbatches_per_round = stages, chunks, stages
    letters = {"FORWARD": "forward", "FULL_BACKWARD": "backward"}
    # Torch lists 1F1B for display only: forwards of the last stage count from 1, as do all with few micro-batches.
    for stage in range(stages - (schedule == "1f1b")):
        if schedule == "interleaved":
            actions = theirs._calculate_single_rank_operations(stage)
        else:
            actions = theirs._get_pipeline_order()[stage]
        expected = [
            (letters[action.computation_type.name], action.microbatch_index, action.stage_index // stages)
            for action in actions
            if action is not None and action.computation_type.name in letters
        ]
        assert order(schedule, stage, stages, micro_batches, chunks) == expected
