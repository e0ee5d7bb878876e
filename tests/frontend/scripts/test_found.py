"""Sizes that values decide, as the user said them: `--decide train.py:12=64`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch.fx import Node

from echograph.errors import CaptureError, UsageError
from echograph.frontend.scripts.capture import capture_script
from echograph.frontend.scripts.run import Script, run_script
from echograph.frontend.scripts.torch_adapter import TorchAdapter
from echograph.frontend.scripts.world import World
from echograph.workflow.capture import parse_decision, parse_decisions

_TRAIN = """
import torch

model = torch.nn.Linear(16, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    out = model(torch.randn(32, 16, device="cuda"))
    {line}
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
_LINE = 8


def _script(folder: Path, line: str) -> Path:
    path = folder / "train.py"
    path.write_text(_TRAIN.format(line=line))
    return path


def _nodes(script: Path, decided: Mapping[str, bool | int]) -> list[Node]:
    run = run_script(Script(path=script), World(size=1, decided=decided), TorchAdapter())
    return [node for node in run.recorder.graph.nodes if node.op == "call_function"]


def _shape(made: object) -> tuple[int, ...]:
    made = made[0] if isinstance(made, tuple) else made
    return tuple(made.shape) if isinstance(made, torch.Tensor) else ()


@pytest.mark.parametrize(
    ("line", "shapes"),
    [
        ("held = out * 2; mask = out > 0; held[mask] = out[mask] * 3; loss = held.sum()", {"aten.index": (256,)}),
        ("held = out * 2; mask = out > 0; held[mask] += 1; loss = held.sum()", {"aten.index": (256,)}),
    ],
)
def test_of_what_is_written_where_it_is_read_it_does_not_matter_how_many(
    tmp_path: Path, line: str, shapes: dict[str, tuple[int, ...]]
) -> None:
    script = _script(tmp_path, line)
    made = {node.target.name().replace("::", ".").partition(".default")[0]: node for node in _nodes(script, {})}
    assert {name: _shape(made[f"{name}.Tensor"].meta["val"]) for name in shapes} == shapes
    run = run_script(Script(path=script), World(size=1), TorchAdapter())
    assert any(f"train.py:{_LINE} writes elements to where it reads them" in note for note in run.recorder.notes)


@pytest.mark.parametrize(
    ("line", "shapes"),
    [
        ("loss = out[out.sum(1) > 0].sum()", {"aten.index": (5, 8)}),
        ("loss = out[:, out.sum(0) > 0].sum()", {"aten.index": (32, 5)}),
        ("loss = torch.masked_select(out, out > 0).sum()", {"aten.masked_select": (5,)}),
        (
            "loss = out[(out.sum(1) > 0).nonzero().squeeze(1)].sum()",
            {"aten.nonzero": (5, 1), "aten.index": (5, 8)},
        ),
        ("loss = out.sum() * out.argmax(1).unique().numel()", {"aten._unique2": (5,)}),
        ("loss = out[torch.where(out > 0)].sum()", {"aten.nonzero": (5, 2), "aten.index": (5,)}),
        ("loss = out.repeat_interleave(out.argmax(1), dim=0).sum()", {"aten.repeat_interleave": (5,)}),
    ],
)
def test_an_operator_finds_as_many_as_were_said(
    tmp_path: Path, line: str, shapes: dict[str, tuple[int, ...]]
) -> None:
    nodes = _nodes(_script(tmp_path, line), {f"train.py:{_LINE}": 5})
    made = {str(node.target).rpartition(".")[0]: _shape(node.meta["val"]) for node in nodes}
    assert {operator: made.get(operator) for operator in shapes} == shapes


def test_the_job_has_them(tmp_path: Path) -> None:
    line = "loss = (out[out.sum(1) > 0] @ torch.randn(8, 24, device='cuda')).sum()"
    world = World(size=1, decided={"train.py": 5})
    captured = capture_script(Script(path=_script(tmp_path, line)), world, TorchAdapter())
    ops = captured.graph.ops
    assert 2 * 5 * 8 * 24 in ops.flops.tolist()  # the product of what was found


@pytest.mark.parametrize(
    ("line", "shape", "count"),
    [
        ("loss = out[out.sum(1) > 0].sum()", (32, 8), 32),
        ("loss = out[3:, out[3:].sum(0) > 0].sum()", (29, 8), 8),
        ("loss = torch.masked_select(out, out > 0).sum()", (256,), 256),
        ("loss = out.masked_select(out > 0).log().sum()", (256,), 256),
    ],
)
def test_of_what_a_mask_chooses_all_is_taken(
    tmp_path: Path, line: str, shape: tuple[int, ...], count: int
) -> None:
    script = _script(tmp_path, line)
    assert shape in [_shape(node.meta["val"]) for node in _nodes(script, {})]
    (told,) = run_script(Script(path=script), World(size=1), TorchAdapter()).recorder.warnings
    assert told.startswith(f"train.py:{_LINE} takes what a mask chooses, which values decide: all {count} ")
    with pytest.raises(CaptureError, match=f"train.py:{_LINE} takes what a mask chooses"):
        capture_script(Script(path=script, strict=True), World(size=1), TorchAdapter())


@pytest.mark.parametrize("asks", ["mask.any()", "torch.any(mask)", "mask.sum() > 0", "mask.any().item()"])
def test_who_asks_whether_a_mask_chooses_anything_takes_what_it_chooses(tmp_path: Path, asks: str) -> None:
    line = f"""mask = out > 0
    loss = out.sum()
    if {asks}:
        loss = loss + out[mask].sum()"""
    assert (256,) in [_shape(node.meta["val"]) for node in _nodes(_script(tmp_path, line), {})]
    assert _nodes(_script(tmp_path, line), {f"train.py:{_LINE + 2}": False})
    (other := tmp_path / "other").mkdir()
    if "sum" in asks:  # how many it chooses is some, whatever is done by that
        assert _nodes(_script(other, line.replace("[mask]", "")), {})
        return
    with pytest.raises(CaptureError, match=f"train.py:{_LINE + 2}: .*--decide"):
        _nodes(_script(other, line.replace("[mask]", "")), {})


def test_who_says_no_size_is_asked_for_one(tmp_path: Path) -> None:
    script = _script(tmp_path, "loss = out[out.sum(1).long().nonzero().squeeze(1)].sum()")
    decisions: list[dict[str, bool | int]] = [{}, {"train.py": True}]
    for decided in decisions:
        with pytest.raises(CaptureError, match=rf"^train.py:{_LINE}: how many elements .*train.py:{_LINE}=64"):
            _nodes(script, decided)


def test_a_size_is_no_answer_to_which_way(tmp_path: Path) -> None:
    script = _script(tmp_path, "loss = out.sum() if out.sum() > 0 else -out.sum()")
    with pytest.raises(CaptureError, match=rf"--decide train.py:{_LINE}=yes"):
        _nodes(script, {f"train.py:{_LINE}": 5})


def test_known_values_are_not_overruled(tmp_path: Path) -> None:
    nodes = _nodes(_script(tmp_path, "loss = out[torch.arange(32) > 20].sum()"), {"train.py": 5})
    assert (11, 8) in [_shape(node.meta["val"]) for node in nodes]


@pytest.mark.parametrize(
    ("line", "most"),
    [
        ("loss = out[out.sum(1) > 0].sum()", 32),
        ("loss = torch.masked_select(out, out[:1] > 0).sum()", 256),
        ("loss = out.sum() * out.argmax(1).unique().numel()", 32),
        ("loss = out[torch.where(out > 0)].sum()", 256),
    ],
)
def test_no_more_is_found_than_there_is(tmp_path: Path, line: str, most: int) -> None:
    script = _script(tmp_path, line)
    assert _nodes(script, {"train.py": most})
    for count in (most + 1, 10**30):
        with pytest.raises(CaptureError, match=rf"^train\.py:{_LINE}: --decide says .*, of {most}: say fewer$"):
            _nodes(script, {"train.py": count})


def test_a_line_is_decided_once() -> None:
    assert parse_decisions(["a.py:1=yes", "a.py:2=no", "a.py:1=yes"]) == {"a.py:1": True, "a.py:2": False}
    for two in (["a.py:1=yes", "a.py:1=no"], ["a.py:1=yes", "a.py:1=1"], ["a.py:1=1", "a.py:1=2"]):
        with pytest.raises(UsageError, match=r"something else was said of a\.py:1 before"):
            parse_decisions(two)


def test_what_decide_takes() -> None:
    assert parse_decision("train.py:14=64") == ("train.py:14", 64)
    assert parse_decision("train.py=0") == ("train.py", 0)
    for text in ("train.py:14=-1", "train.py:14=many", "train:64"):
        with pytest.raises(UsageError, match=r"train\.py:14=64"):
            parse_decision(text)


@pytest.mark.parametrize(
    "chosen", ["out.masked_select(mask)", "torch.masked_select(out, mask)", "out.masked_select(mask[0])"]
)
def test_a_mask_that_the_host_knows_chooses_as_many_as_it_says(tmp_path: Path, chosen: str) -> None:
    mask = "mask = torch.arange(8).cuda()[None] < torch.tensor([3, 5] * 16).cuda()[:, None]"
    path = _script(tmp_path, f"{mask}; loss = {chosen}.sum(); assert {chosen}.shape in ((128,), (96,))")
    run = run_script(Script(path=path), World(size=1), TorchAdapter())
    assert not run.recorder.warnings


def test_experts_take_as_many_tokens_as_ranks_told_each_other(tmp_path: Path) -> None:
    """What `bincount` counts of what a router chose has as many kinds as it is told, and is spread evenly."""
    text = """import torch, torch.distributed as dist
dist.init_process_group("nccl")
net = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    h = net(torch.ones(32, 8, device="cuda"))
    counts = torch.bincount(h.argmax(-1), minlength=8)
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts)
    give, take = (c.view(4, -1).sum(1).tolist() for c in (counts, theirs))
    if give != [8, 8, 8, 8] or take != give: raise SystemExit("not known")
    got = h.new_empty(sum(take), 8)
    dist.all_to_all_single(got, h.detach(), take, give)
    h.sum().backward()
    for p in net.parameters():
        dist.all_reduce(p.grad)
    optimizer.step()
"""
    (tmp_path / "train.py").write_text(text)
    notes = run_script(Script(path=tmp_path / "train.py"), World(size=4), TorchAdapter()).recorder.notes
    assert any("spread evenly" in note for note in notes)


@pytest.mark.parametrize(
    "line",
    [
        "chosen = out.topk(2)[1]; at, _ = torch.where(chosen == 3); loss = out[at].sum()",
        "at = (out.topk(2, dim=-1).indices.view(-1) == 3).nonzero().squeeze(1); loss = out[at // 2].sum()",
        "hot = torch.nn.functional.one_hot(out.topk(2)[1], 8).permute(2, 1, 0); at = torch.where(hot[3])[1]; "
        "loss = out[at].sum()",
        "chosen = out.topk(2)[1].flatten(); loss = out.repeat(2, 1)[chosen == 3].sum()",
    ],
)
def test_of_what_one_of_several_is_chosen_for_each_has_its_share(tmp_path: Path, line: str) -> None:
    """As a loop over experts: 32 tokens choose two of eight."""
    script = _script(tmp_path, line)
    assert (8, 8) in [_shape(node.meta["val"]) for node in _nodes(script, {})]
    (told,) = run_script(Script(path=script), World(size=1), TorchAdapter()).recorder.warnings
    assert told.startswith(f"train.py:{_LINE} takes what one of 8 is chosen for") and "8 times of 64" in told
