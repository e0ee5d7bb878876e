"""Tensors of the host have the values that PyTorch itself gives them, and no others."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from echograph.errors import CaptureError
from echograph.frontend.pytorch.capture import fake_mode, plain_attention_masks
from echograph.frontend.pytorch.known_values import MOST_KNOWN, rest_on_ranks
from echograph.frontend.scripts import device, values
from echograph.frontend.scripts.adapter import unpatched
from echograph.frontend.scripts.world import World


@pytest.fixture(autouse=True)
def _captured() -> Iterator[None]:
    world = World(size=2)
    with world.entered(tuple), fake_mode(unpatched), device.present(world):
        yield


CALLS = {
    "add": lambda x: x + 3,
    "in place": lambda x: x.mul_(2).add_(x),
    "view, then its base": lambda x: (x[1:].zero_(), x)[1],
    "set": lambda x: (x.__setitem__(slice(0, 2), 7), x)[1],
    "sort": lambda x: x.sort()[0],
    "shared with processes": lambda x: x.share_memory_().add_(1),
    "split": lambda x: torch.cat(list(reversed(x.split(1)))),
    "stack": lambda x: torch.stack([x, x + 1]).t().contiguous(),
    "cumulate": lambda x: x.cumsum(0) // 2,
    "compare": lambda x: (x > 2).to(torch.int64),
    "number": lambda x: torch.full((2,), x.sum().item()),
    "moved": lambda x: x.cuda().to("cuda", non_blocking=True) * 2,
    "einsum": lambda x: torch.einsum("i,i->i", x, x),
    "shape": lambda x: x.reshape(1, -1).expand(2, -1),
}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-9, 9), min_size=2, max_size=6), st.lists(st.sampled_from(sorted(CALLS)), max_size=4))
def test_values_are_those_of_pytorch(numbers: list[int], calls: list[str]) -> None:
    fake = torch.tensor(numbers)
    assert isinstance(fake, FakeTensor)
    for call in calls:
        fake = CALLS[call](fake.flatten())
    with unset_fake_temporarily():
        true = torch.tensor(numbers)
        for call in calls:
            true = CALLS[call](true.flatten().clone() if call in ("in place", "set") else true.flatten())
        expected = true.tolist()
    assert fake.tolist() == expected


def test_indices_of_a_batch_are_random_as_seeded() -> None:
    torch.manual_seed(3)
    fake = torch.randint(1000, (4,))
    rows = [list(range(2000))[i : i + 3] for i in fake]
    with unset_fake_temporarily():
        torch.manual_seed(3)
        starts = torch.randint(1000, (4,)).tolist()
    assert rows == [[start, start + 1, start + 2] for start in starts]


def test_a_moment_of_what_the_host_draws_is_known() -> None:
    """As e3nn normalises activations: by a million of double precision, of a generator."""
    drawn = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    second = torch.nn.functional.silu(drawn).pow(2).mean().pow(-0.5).item()
    assert 1.6 < second < 1.7 and abs(drawn.pow(2).mean().item() - 1) < 0.01


def test_what_the_host_writes_to_all_of_a_tensor_is_known() -> None:
    drawn = torch.FloatTensor(3, 3).normal_()
    first, _ = torch.linalg.qr(drawn)
    assert abs(abs(torch.det(first).item()) - 1) < 1e-5 and first.shape == (3, 3)
    assert torch.empty(2, dtype=torch.int64).fill_(7).tolist() == [7, 7]
    assert torch.empty(2).copy_(torch.arange(2)).tolist() == [0.0, 1.0]
    held = torch.nn.Parameter(torch.empty(3))
    for unknown in (
        torch.empty(3, device="cuda").normal_(),
        torch.zeros(3, device="cuda").uniform_(),
        held.data.normal_(),
    ):
        with pytest.raises(CaptureError, match="decides what the script does"):
            bool(unknown.sum() > 0)


def test_what_is_written_to_a_part_made_before_is_not_lost() -> None:
    whole = torch.empty(3)
    part, same = whole[:1], whole.detach()
    whole.fill_(2.0)
    part += torch.empty(1)
    same += 1
    with pytest.raises(CaptureError, match="decides what the script does"):
        bool(whole.sum() > 5)


def test_an_array_of_numpy_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    import numpy as np

    batch = torch.stack([torch.from_numpy(np.arange(i, i + 3)) for i in torch.tensor([5, 9])])
    assert batch.numpy().tolist() == [[5, 6, 7], [9, 10, 11]]
    print(batch[0, 0])
    assert "5" in capsys.readouterr().out


@pytest.mark.parametrize("write", ["product", "unknown sum", "view", "copy"])
def test_what_comes_from_elsewhere_is_not_known(write: str) -> None:
    count = torch.zeros(4, dtype=torch.int64)
    part = count[1:]
    assert int(part[0]) == 0
    unknown = torch.empty(3, dtype=torch.int64)
    if write == "product":
        dist.init_process_group()
        dist.all_reduce(count, op=dist.ReduceOp.PRODUCT)
    elif write == "unknown sum":
        dist.init_process_group()
        dist.broadcast(part, src=1)
    elif write == "view":
        part += unknown
    else:
        count[:3].copy_(unknown)
    for tensor in (count[1], part[0], count.sum()):
        with pytest.raises(CaptureError, match="decides what the script does"):
            bool(tensor == 0)


def test_what_is_large_is_not_computed() -> None:
    with pytest.raises(CaptureError):
        bool(torch.arange(MOST_KNOWN + 1)[0] == 0)
    assert bool(torch.arange(MOST_KNOWN)[1] == 1)


def test_parameters_have_no_values() -> None:
    model = torch.nn.BatchNorm1d(4)
    with pytest.raises(CaptureError):
        bool(model.weight.sum() > 3)


def test_values_are_finite_where_somebody_asks() -> None:
    loss = torch.empty(3, requires_grad=True).sum()
    assert not torch.isnan(loss)
    assert not loss.isinf().any().item()
    assert torch.isfinite(loss).all()
    assert not (~torch.isfinite(loss)).any()
    assert loss == loss and not (loss != loss).any()
    assert loss.item() not in [math.inf, -math.inf, math.nan] and loss.item() < math.inf
    with pytest.raises(CaptureError):
        bool(loss > 0)
    with pytest.raises(CaptureError):
        bool(loss.item() == 2.0)


@pytest.mark.parametrize("size", [3, MOST_KNOWN + 4])
def test_a_part_of_what_is_finite_is(size: int) -> None:
    asked = torch.isnan(torch.empty(2, size, requires_grad=True))
    assert not asked[0].any().item() and not asked.view(-1)[:2].any()
    assert not (asked | torch.isinf(torch.empty(2, size))).any() and asked.sum() == 0
    assert (~asked & torch.isfinite(torch.empty(2, size))).all() and (~asked).sum().item() == 2 * size
    with pytest.raises(CaptureError, match="decides what the script does"):
        bool((asked | (torch.empty(2, size) > 0)).any())
    if size > 3:
        return
    assert asked.tolist() == [[False] * 3] * 2 and (~asked).tolist() == [[True] * 3] * 2
    assert not any(flag for row in asked for flag in row)
    assert asked.sum().item() == 0 and asked.float().max().item() == 0
    assert not (asked | torch.isinf(torch.empty(2, size))).any().item()
    assert not torch.stack([asked.any(), asked.all()]).any().item()


@pytest.mark.parametrize("size", [3, MOST_KNOWN + 4])
def test_what_is_written_to_an_answer_is_its_value(size: int) -> None:
    asked = torch.isnan(torch.empty(size))
    asked |= torch.empty(size) > 0
    with pytest.raises(CaptureError, match="decides what the script does"):
        bool(asked.any())
    asked = torch.isnan(torch.empty(3))
    asked |= torch.tensor([False, True, False])
    assert asked.tolist() == [False, True, False]


def test_what_is_written_to_elements_that_are_one_in_memory_is_not_lost() -> None:
    asked = torch.empty(3) == 0
    asked |= torch.tensor([False, True, False])
    with pytest.raises(CaptureError, match="decides what the script does"):
        bool(asked.any())


def test_unknown_elements_are_asked_for_together() -> None:
    asked: list[torch.Tensor] = []
    answer = values.answer

    def counted(tensor: torch.Tensor, note: values.NoteTaker) -> object:
        asked.append(tensor)
        return answer(tensor, note)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(values, "answer", counted)
        numbers = torch.empty(2, 3, 50).tolist()
    assert [len(numbers), len(numbers[1]), len(numbers[1][2])] == [2, 3, 50]
    assert type(numbers[1][2][0]) is values.StandInNumber and len(asked) == 1
    assert torch.empty(2, 0).tolist() == [[], []]
    with pytest.raises(CaptureError, match="decides what the script does"):
        bool(numbers[0][0][0] > 0)


def test_the_user_says_which_way() -> None:
    loss = torch.empty(3).sum()
    here = values.caller()
    assert here is not None
    line = int(here.rpartition(":")[2]) + 4
    with values.deciding({f"test_host_values.py:{line}": True, f"test_host_values.py:{line + 1}": False}):
        assert loss > 3
        assert not loss.item() < 3
    with values.deciding({"test_host_values.py": False, f"test_host_values.py:{line + 3}": True}):
        assert loss > 3
        assert not loss > 3


def test_a_slice_between_known_tensors_is_as_long_as_they_say() -> None:
    begin = torch.tensor([3])
    for of in (torch.zeros(5_000_000), torch.arange(20)):
        assert of[begin : begin + 7].shape == (7,)
        assert of[torch.tensor(5) :].shape == (len(of) - 5,)
    assert list(range(9))[torch.tensor(2) : torch.tensor(5)] == [2, 3, 4]


def test_a_tensor_of_tensors_is_as_long_as_their_list() -> None:
    known, unknown = torch.tensor(3), torch.empty(8192).sum()
    assert torch.tensor([known, known + 1]).tolist() == [3, 4]
    # Beside numbers, a tensor of one element is one, whatever its dimensions.
    assert torch.tensor([-2.5, torch.zeros(2)[0][None], 3]).tolist() == [-2.5, 0.0, 3.0]
    assert torch.tensor([[1, known.reshape(1, 1)]]).tolist() == [[1, 3]]
    assert torch.tensor([torch.tensor([7])] * 3).tolist() == [7, 7, 7]
    assert torch.tensor((2.0, unknown.reshape(1))).shape == (2,)
    made = torch.tensor([[unknown, known], [2.0, unknown]], device="cuda")
    assert (made.shape, made.is_cuda, made.dtype) == ((2, 2), True, torch.float32)


def test_a_known_mask_cuts_what_is_not_known() -> None:
    mask = torch.tensor([True, False, True]).cuda()
    assert torch.empty(3, 8192, device="cuda")[mask].shape == (2, 8192)
    assert torch.empty(8192, 3, device="cuda")[:, mask].shape == (8192, 2)


def test_what_pytorch_keeps_of_a_tensor_ends_where_others_write_it() -> None:
    dist.init_process_group("nccl")
    count = torch.cuda.LongTensor([1])
    part = count[:1]
    assert part.constant is not None  # type: ignore[attr-defined]
    dist.all_reduce(count, op=dist.ReduceOp.PRODUCT)
    for tensor in (count, part, count[0]):
        assert tensor.constant is None  # type: ignore[attr-defined]
        with pytest.raises(CaptureError, match="decides what the script does"):
            bool(tensor.item() == 1)


@pytest.mark.parametrize("of", ["all", "view"])
def test_what_ranks_add_up_is_taken_to_be_alike(of: str) -> None:
    dist.init_process_group("nccl")
    count = torch.tensor([3, 5], device="cuda")
    part = count[1:]
    dist.all_reduce(count if of == "all" else part)
    assert part.item() == 10
    assert count.tolist() == [6 if of == "all" else 3, 10]
    dist.all_reduce(count, op=dist.ReduceOp.MAX)
    assert count[1].item() == 10
    assert rest_on_ranks(part if of == "view" else count)
    flag = torch.ByteTensor([1]).to("cuda")
    dist.all_reduce(flag)
    assert flag.item() == 2


def test_what_ranks_gather_is_taken_to_be_alike() -> None:
    dist.init_process_group("nccl")
    times = torch.zeros(2, 3, device=torch.cuda.current_device())
    times[0, 1] = 7.0
    dist.all_gather_into_tensor(times.view(-1), times[0].view(-1))
    assert times.tolist() == [[0.0, 7.0, 0.0]] * 2
    sizes = [torch.empty(1, dtype=torch.int64, device="cuda") for _ in range(2)]
    dist.all_gather(tensor_list=sizes, tensor=torch.tensor([4], device="cuda"))
    assert [size.item() for size in sizes] == [4, 4]


def test_tensors_that_nobody_has_are_equal_as_the_user_says() -> None:
    one, other = torch.empty(4, device="cuda"), torch.empty(4)
    assert torch.equal(one, one) and not torch.equal(one, torch.empty(5)) and not one.equal(torch.empty(4, 1))
    for ask in (lambda: torch.equal(one, other), lambda: other.equal(one), lambda: torch.equal(one, other=other)):
        with pytest.raises(CaptureError, match=r"whether tensors are equal decides .*--decide .*=yes"):
            ask()
        with values.deciding({"test_host_values.py": True}):
            assert ask()


def test_tensors_that_nobody_has_are_close_as_the_user_says() -> None:
    one, other = torch.empty(4, device="cuda"), torch.empty(4, device="cuda")
    assert torch.allclose(one, one)
    for ask in (lambda: torch.allclose(one, other, atol=1e-5), lambda: other.allclose(one)):
        with pytest.raises(CaptureError, match=r"whether tensors are close decides .*--decide .*=yes"):
            ask()
        with values.deciding({"test_host_values.py": False}):
            assert not ask()


def test_who_only_prints_is_told_how_an_unknown_number_compares() -> None:
    read = torch.empty(8192).sum()
    assert values.printed(lambda: read.item() > 0.0)()
    with pytest.raises(CaptureError):
        bool(read.item() > 0.0)


def test_a_method_whose_name_a_script_gives_a_number_still_answers() -> None:
    bias = torch.nn.Parameter(torch.empty(4, 2, device="cuda"))
    bias.stride = 1  # type: ignore[assignment,method-assign]
    assert bias.stride == 1  # type: ignore[comparison-overlap]
    with torch.no_grad():
        assert bias.zero_().stride() == (2, 1)


def test_a_gpu_counts_known_integers() -> None:
    """`torch.histc` does, on GPUs alone: torchtitan counts tokens of experts so where their routes are forced."""
    counts = torch.histc(torch.arange(24, device="cuda") % 4, bins=4, min=0, max=3)
    assert counts.tolist() == [6, 6, 6, 6] and not rest_on_ranks(counts)


def test_transformers_looks_at_a_mask_that_is_known() -> None:
    masking = pytest.importorskip("transformers.masking_utils")
    with plain_attention_masks():
        assert not masking.is_tracing(torch.ones(2, 16, dtype=torch.int64, device="cuda"))
        assert masking.is_tracing(torch.empty(2, 16).cuda() > 0)
    assert masking.is_tracing(torch.ones(2, 16, dtype=torch.int64, device="cuda"))


ASKED = {
    "equals": lambda read: read == 3,
    "differs": lambda read: read != 3,
    "is more": lambda read: read > 0,
    "is less, after a sum": lambda read: read + 1 > 0,
    "is true": lambda read: bool(read),
}


@pytest.mark.parametrize("kind", [torch.int64, torch.bool, torch.float32])
@pytest.mark.parametrize("ask", ASKED)
def test_no_script_is_told_how_an_unknown_number_compares(kind: torch.dtype, ask: str) -> None:
    read = torch.empty(8192).sum().to(kind).item()
    if ask == "is true" and kind == torch.float32:
        assert read  # hardly any loss is 0
        return
    with pytest.raises(CaptureError, match="decides what the script does"):
        ASKED[ask](read)
    assert f"{read:.2f}" == "1.00"
    assert kind == torch.float32 or "abc"[read] == "b"


def test_what_a_rank_tells_others_it_knows_itself_and_they_know_later() -> None:
    told = World(size=2)
    for rank in (0, 1):
        with replace(told, rank=rank).entered(tuple), fake_mode(unpatched), device.present(told):
            dist.init_process_group("nccl")
            seed = torch.tensor([7 + rank]).cuda()
            dist.broadcast(seed, src=0)
            assert seed.item() == 7


def test_labels_of_a_data_set_are_counted() -> None:
    import numpy as np

    labels = np.arange(2708) % 7
    ones = torch.from_numpy(np.eye(7)[labels]).to(torch.float)  # 18,956 numbers, as Cora's labels are kept
    assert int(ones.max(dim=1)[1].max()) + 1 == 7


def test_a_number_may_come_before_a_tensor() -> None:
    powers = torch.pow(2.0, torch.arange(3.0))
    assert powers.tolist() == [1.0, 2.0, 4.0] and torch.remainder(7, torch.tensor([4, 5])).tolist() == [3, 2]
    assert torch.hann_window(4).sum().item() == pytest.approx(2.0) and torch.logspace(0, 1, 2).tolist() == [
        1.0,
        10.0,
    ]


def test_a_tensor_by_the_class_of_another_is_of_sizes_or_numbers() -> None:
    """`type(rewards)(n, 1)`, where the class of all is that of fake tensors."""
    rewards = torch.ones(3)
    made = type(rewards)(rewards.size(0), 1)
    assert made.shape == (3, 1) and made.dtype == torch.float32 and not made.requires_grad
    assert type(rewards)([1.0, 2.0]).shape == (2,) and type(rewards)().shape == (0,)
