"""An environment acts on the number that stands for an action, as on any other."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from echograph.errors import CaptureError
from echograph.frontend.scripts import environments
from echograph.frontend.scripts.run import Script, run_script
from echograph.frontend.scripts.torch_adapter import TorchAdapter
from echograph.frontend.scripts.world import World

_LIBRARY = """
class Pole:
    def step(self, action):
        return 1.0 if action == 1 else -1.0

def make(name):
    return Pole()
"""
_TRAIN = """
import torch
{of}
model = torch.nn.Linear(4, 2).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    out = model(torch.ones(1, 4, device="cuda"))
    pole.step(out.argmax().item())
    out.sum().backward()
    optimizer.step()
"""


@pytest.fixture
def gymnasium(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of that name, with what scripts use of it."""
    folder = tmp_path / "site-packages" / "gymnasium"
    (folder / "envs").mkdir(parents=True)
    (folder / "__init__.py").write_text("from gymnasium.envs.registration import make\n")
    (folder / "envs" / "__init__.py").write_text("")
    (folder / "envs" / "registration.py").write_text(_LIBRARY)
    monkeypatch.syspath_prepend(str(folder.parent))
    held = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "gymnasium"}
    for name in held:
        monkeypatch.delitem(sys.modules, name)


def _forget() -> dict[str, ModuleType]:
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "gymnasium"}


@pytest.mark.usefixtures("gymnasium")
def test_an_action_that_nobody_has(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(_TRAIN.format(of="import gymnasium; pole = gymnasium.make('CartPole-v1')"))
    run = run_script(Script(path=path), World(size=1), TorchAdapter())
    assert "train.py:8 acts as values say, which a capture does not have: by 1" in run.recorder.notes
    _forget()
    path.write_text(_TRAIN.format(of="from gymnasium.envs.registration import Pole; pole = Pole()"))
    with pytest.raises(CaptureError, match=r"registration\.py:4: .*--decide"):
        run_script(Script(path=path), World(size=1), TorchAdapter())
    _forget()


class _Newer:
    """An environment of gym 0.26."""

    def reset(self, seed: int | None = None) -> tuple[float, dict[str, Any]]:
        return 0.5, {}

    def step(self, _: int) -> tuple[float, float, bool, bool, dict[str, Any]]:
        return 1.0, 2.0, False, True, {}


def test_an_environment_gives_four_values_where_a_script_takes_four(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "pole.seed(3)\nstate, done = pole.reset(), False\nassert state == 0.5\n"
        "state, reward, done, _ = pole.step(1)\n"
    )
    notes: list[str] = []
    pole = _Newer()
    environments._as_before(pole, notes.append)
    told = runpy.run_path(str(path), {"pole": pole})
    assert told["done"] is True and told["state"] == 1.0 and len(notes) == 2
    assert pole.reset() == (0.5, {}) and len(pole.step(1)) == 5
