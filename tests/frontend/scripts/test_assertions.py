"""A script goes on where it raises otherwise: what it asserts of values that nobody has is taken to hold."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from echograph.errors import CaptureError
from echograph.frontend.scripts.installed import of_library
from echograph.frontend.scripts.run import Script, ScriptRun, run_script
from echograph.frontend.scripts.torch_adapter import TorchAdapter
from echograph.frontend.scripts.world import World

_TRAIN = """
import torch

model = torch.nn.Linear(16, 8).cuda()
optimizer, best = torch.optim.SGD(model.parameters(), lr=0.1), 0.5

def check(out, low, high):
{check}
    return out.sum()

for step in range(3):
    out = model(torch.randn(32, 16, device="cuda"))
    check(out, out.min().item(), out.max().item()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def _run(folder: Path, check: str) -> ScriptRun:
    path = folder / "train.py"
    path.write_text(_TRAIN.format(check="\n".join(f"    {line}" for line in check.splitlines())))
    return run_script(Script(path=path), World(size=1), TorchAdapter())


@pytest.mark.parametrize(
    "check",
    [
        "assert (out[:, 1:] >= out[:, :-1]).all()",
        "assert not (out < 0).any(), 'negative'",
        "assert low < high and (out > 0).all()",
        "assert not (low >= high or (out == 0).any())",
        "if (out < 0).any():\n    raise ValueError('negative')",
        "if not low < high:\n    print(low)\n    raise ValueError(f'{low} {high}')",
        "if step < 0:\n    pass\nelif low > high:\n    raise ValueError('order')\nelse:\n    out = out * 2",
        "try:\n    out = out + 1\nfinally:\n    assert low < high",
        "if torch.min(out) < -1.0:\n    print('min value is', torch.min(out))",
        "check.clipped = 0\nif low > 1.0:\n    check.clipped += 1\nif check.clipped:\n    raise SystemExit",
        "global best\nif low < best:\n    best = low\nelse:\n    raise SystemExit",
        "global best\nif step < 0 or best < high:\n    out, best = out * 2, high",
        "global best\nis_best = high > best\nbest = max(high, best)\nif not is_best:\n    raise SystemExit",
        "coef = 1 / (out.norm() + 1e-6)\nif coef < 1.0:\n    for p in model.parameters():\n"
        "        if p.grad is not None:\n            p.grad.detach().mul_(coef.to(p.device))",
        "if high > 0.5:\n    for p in model.parameters():\n        p.data *= 0.5 / high",
        "row = out[0]\nif (row > 1).sum() > 0:\n    out = out[:, row > 1]\nelse:\n    raise SystemExit",
        "wet = out > 1\ncount = wet.sum().item()\nif count == 0:\n    raise SystemExit\nout = out[wet]",
        "wet = out > 1\nif not wet.any() and step:\n    raise SystemExit\nout = out.masked_select(wet)",
        "wet = out > 1\nout = out[wet] if torch.count_nonzero(wet) else None",
        "wet = out > 1\ncount = int(wet.sum())\nif not count:\n    return 0 * out.sum()\nout = out[wet]",
        "import logging\ntry:\n    if low > high:\n        logging.warning('order')\nexcept ValueError:\n    pass",
    ],
)
def test_what_would_raise_is_taken_not_to(tmp_path: Path, check: str) -> None:
    run = _run(tmp_path, check)
    assert run.recorder.recorded
    told = ("raises, prints or counts by values", "asks whether a mask chooses any elements")
    assert any(text in line for line in run.recorder.notes for text in told)


@pytest.mark.parametrize(
    "check",
    [
        "for _ in range(2):\n    if low < 0.1:\n        print(low)\n        break\n    out = out * 2",
        "for _ in range(2):\n    if out.sum() > 9:\n        continue\n    out = out * 2",
        "words = []\nfor word in out.argmax(1).tolist():\n    if word == 3:\n        break\n    words += [word]",
        "kept = []\nif low > 3:\n    kept.append(int(low))\nassert len(kept) == 1",
        "kept = []\nif low > 3:\n    kept.append(1)\nelse:\n    kept.append(0)\nassert kept",
    ],
)
def test_that_a_loop_goes_on_and_a_list_is_filled_is_a_guess_that_is_told(tmp_path: Path, check: str) -> None:
    run = _run(tmp_path, check)
    assert run.recorder.recorded
    assert any("leaves a loop, or a round of it, or fills a list by values" in w for w in run.recorder.warnings)


@pytest.mark.parametrize(
    "check",
    [
        "drawn = out.argmax(1)\nright = (drawn == 3).sum()\nif right == 0:\n    raise SystemExit",
        "right = (out > 1).float().sum().item()\nif right == 0:\n    raise SystemExit",
        "right, wrong = (out > 1).sum().item(), (out < 1).sum().item()\nx = 1 / right if right + wrong > 0 else 0",
        "words = {0: 'a', 1: 'b'}\nprint(words[out[0].argmax().item()], words.get(int(out[0].argmax()), 'c'))",
        "import sys\nif not low < high:\n    print('order')\n    sys.exit(1)",
        "global best\nbest = torch.zeros(()) if step == 0 else best\nis_best = out[0, 0] > best\n"
        "best = max(best, out[0, 0])\nif not is_best:\n    raise SystemExit",
    ],
)
def test_what_it_looks_up_counts_or_keeps_is_no_question(tmp_path: Path, check: str) -> None:
    run = _run(tmp_path, check)
    assert run.recorder.recorded and not run.recorder.warnings


@pytest.mark.parametrize(
    "check",
    [
        "if low > high:\n    out = out * 2",
        "if low < 1.0:\n    out.mul_(2)",
        "while True:\n    if low > high:\n        break",
        "for _ in range(2):\n    if low > high:\n        out = out * 2\n        break",
        "kept = []\nif low > high:\n    kept.append(out * 2)\n    out = out * 2",
        "done = False\nif low > high:\n    done = True",
        "clipped = 0.0\nif low > high:\n    clipped += high",
        "if low > high:\n    print(low)\nelse:\n    out = out * 2",
        "if low > high:\n    if step:\n        raise ValueError('order')",
        "try:\n    assert low > high\nexcept AssertionError:\n    out = out * 2",
        "try:\n    if low > high:\n        raise ValueError\nexcept ValueError:\n    out = out * 2",
        "assert step >= (1 if low > high else 0)",
        "while low > high:\n    raise ValueError('order')",
        "wet = out > 1\nif wet.any():\n    out = out * 2",
        "wet = out > 1\nif wet.sum() > 3:\n    out = out[wet]",
    ],
)
def test_where_it_goes_on_either_way_it_is_asked(tmp_path: Path, check: str) -> None:
    with pytest.raises(CaptureError, match=r"train\.py:\d+: .* decides what the script does"):
        _run(tmp_path, check)


def test_an_integer_is_within_the_bounds_that_it_is_held_against(tmp_path: Path) -> None:
    """As environments ask of an action, in libraries; a real number may be on either side."""
    run = _run(tmp_path, "drawn = out[0].argmax().item()\nif not 3 <= drawn < 8:\n    raise SystemExit")
    assert any("train.py:9 holds an integer" in line for line in run.recorder.notes)
    with pytest.raises(CaptureError, match=r"train\.py:8: .* decides what the script does"):
        _run(tmp_path, "if 0.2 < low < 8:\n    out = out * 2")


def test_what_the_user_said_counts_before(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(_TRAIN.format(check="    assert low < high"))
    world = World(size=1, decided={"train.py:8": False})
    with pytest.raises(CaptureError, match=r"train\.py:8: AssertionError"):
        run_script(Script(path=path), world, TorchAdapter())


def test_what_a_library_checks_holds_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "site-packages" / "a_library"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(
        "def check(labels):\n"
        "    if (labels < 0).any():\n        raise ValueError('labels')\n"
        "    if labels.max().item() > 7 or labels.float().mean().item() > 0.5:\n"
        "        raise ValueError('labels')\n"
    )
    monkeypatch.syspath_prepend(str(folder.parent))
    run = _run(tmp_path, "import a_library\na_library.check(out.argmax(1))")
    assert run.recorder.recorded
    sys.modules.pop("a_library", None)


def test_a_frameworks_checkout_beside_a_script_is_none_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it decides by a number made of values goes as where it is installed."""
    folder, use = tmp_path / "a_framework", "from a_framework.clip import clip\nout = out * clip(out.sum())"
    folder.mkdir()
    (folder / "clip.py").write_text("def clip(norm):\n    return 2 if 1.0 / (norm.item() + 0.5) < 1.0 else 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with of_library(str(folder)):
        assert _run(tmp_path, use).recorder.recorded
    with pytest.raises(CaptureError, match=r"clip\.py:2: a comparison"):
        _run(tmp_path, use)


_SOLVER = """def solve(state, error):
    rounds = 0
    while error(state) > 0.1 and rounds < 50:
        state, rounds = state * 0.5, rounds + 1
    while not (state > 0).all():
        rounds = 99
    return state, rounds
"""


def test_a_loop_goes_round_as_often_as_the_user_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a library, too, which would go round for ever."""
    folder = tmp_path / "site-packages" / "a_solver"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(_SOLVER)
    monkeypatch.syspath_prepend(str(folder.parent))
    solved = "import a_solver\nout, rounds = a_solver.solve(out, torch.{})\nassert rounds == 3, rounds"
    path = tmp_path / "train.py"
    for error in ("amax", "norm"):
        with pytest.raises(
            CaptureError, match=r"__init__.py:3: a tensor's value decides how often a loop goes round"
        ):
            _run(tmp_path, solved.format(error))
        world = World(size=1, decided={"__init__.py:3": 3})
        assert run_script(Script(path=path), world, TorchAdapter()).recorder.recorded
    sys.modules.pop("a_solver", None)


def test_a_loop_of_the_script_asks_how_often(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"train.py:8: a tensor's value decides how often a loop goes round"):
        _run(tmp_path, "while high > 0.1:\n    high = (out * 2).max().item()")
