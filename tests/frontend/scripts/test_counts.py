"""An integer that nobody has is followed to where it becomes a size or a bound of a loop, which is a warning."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from echograph.errors import CaptureError
from echograph.frontend.scripts.run import Script, ScriptRun, run_script
from echograph.frontend.scripts.torch_adapter import TorchAdapter
from echograph.frontend.scripts.world import World

_TRAIN = """
import math
import torch

labels = torch.randint(0, 7, (32,), device="cuda")
model = torch.nn.Linear(16, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    out = model(torch.randn(32, 16, device="cuda"))
    {line}
    out.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def _run(folder: Path, line: str, decided: Mapping[str, bool | int] | None = None) -> ScriptRun:
    (folder / "train.py").write_text(_TRAIN.format(line=line.replace("; ", "\n    ")))
    return run_script(Script(path=folder / "train.py"), World(size=1, decided=decided or {}), TorchAdapter())


@pytest.mark.parametrize(
    ("line", "at"),
    [
        ("torch.zeros(int(labels.max()) + 1)", 10),
        ("torch.nn.Embedding(labels.max().item() + 1, 4)", 10),
        ("n = 1 + round(out.max().item() * 0.5); out = out[:, :n]", 11),
        ("n = math.ceil(out.max().item()); out = out.narrow(0, 0, n)", 11),
        ("out = out.expand(max(2, labels.max().item()), *out.shape)", 10),
        ("n = labels.tolist(); out = torch.split(out, [n[0], 31])[0]", 11),
        ("out = torch.cat([out] * labels[0].item())", 10),
        ("n = int(out.sum().item()); out = sum(out for i in range(n))", 11),
        ("for i in range(1, labels.max() + 1):; \tout = out + 1", 10),
    ],
)
def test_a_size_or_a_loop_of_a_value_is_a_warning_with_its_line(tmp_path: Path, line: str, at: int) -> None:
    (warned,) = _run(tmp_path, line).recorder.warnings
    assert warned.startswith(f"train.py:{at} ") and "1 stands for it; --decide train.py:10=NUMBER" in warned


@pytest.mark.parametrize(
    "line",
    [
        "out = out / int(labels.sum()) + labels.max().item()",
        "out = out * torch.full((8,), labels.max().item(), device='cuda')",
        "print(int(labels[0]) * 2, range(int('3')), int('11', 2))",
        "right = 0; right += int((out.argmax(-1) == labels).sum())",
        "out[int(labels[0])].sum(); out.fill_(2)",
    ],
)
def test_a_value_that_is_no_size_is_none(tmp_path: Path, line: str) -> None:
    assert not _run(tmp_path, line).recorder.warnings


def test_the_user_says_what_it_is(tmp_path: Path) -> None:
    run = _run(tmp_path, "many = int(labels.max()); out = out[:, :many]", {"train.py:10": 5})
    assert not run.recorder.warnings and run.world.asked == {"train.py:10"}
    assert any(tuple(node.meta["val"].shape) == (32, 5) for node in run.recorder.graph.nodes if "val" in node.meta)


def test_what_is_made_of_it_is_not_known(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"train\.py:11: .*--decide"):
        _run(tmp_path, "many = torch.tensor([labels.max().item(), 3]); if many.sum() > 4:; \tpass")


def test_int_and_range_are_those_of_the_script(tmp_path: Path) -> None:
    """Its own of these names, and of files that it imports; what asks for the type finds it."""
    (tmp_path / "own.py").write_text("def of(x):\n    assert isinstance(int(x), int)\n    return int(x)\n")
    run = _run(
        tmp_path, "import own; many = own.of(labels.max()); range = lambda n: [n]; out = out[:range(many)[0]]"
    )
    (warned,) = run.recorder.warnings
    assert "train.py:13 makes a size" in warned and "own.py:2 reads it" not in warned


def test_an_error_says_what_stood_for_a_size_before(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"train\.py:11: RuntimeError.* train\.py:10 makes a size .*--decide"):
        _run(tmp_path, "out = out[:, :int(labels.max())]; out = out.view(32, 5)")


def test_int_is_pythons_own_otherwise(tmp_path: Path) -> None:
    line = "assert (int(), int('7'), int('ff', 16), int('ff', base=16), int(2.5)) == (0, 7, 255, 255, 2)"
    assert not _run(tmp_path, f"assert list(range(1, int('4', base=8))) == [1, 2, 3]; {line}").recorder.warnings
