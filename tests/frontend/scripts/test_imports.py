"""A capture imports what its script needs, and its hooks are there from where that is imported."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from echograph.errors import CaptureError
from echograph.frontend.scripts.adapter import once_imported, replaced
from echograph.frontend.scripts.run import Script, run_script
from echograph.frontend.scripts.torch_adapter import TorchAdapter
from echograph.frontend.scripts.world import World

PLAIN = """import sys, torch
import torch.distributed as dist
dist.init_process_group("nccl")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear({width}, {width}, bias=False).cuda())
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    model(torch.ones(4, {width}, device="cuda")).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    heavy = ("torch._dynamo.eval_frame", "torch._inductor", "torch.distributed.fsdp", "torch.utils.cpp_extension")
    assert not (found := [name for name in heavy if name in sys.modules]), found
"""


def capture(folder: Path, script: str) -> tuple[int, int, str]:
    """Exit status, peak of memory in KiB, and what stderr says of a capture for eight ranks."""
    (folder / "train.py").write_text(script)
    words = ["capture", "torch", "--script", "train.py", "--world-size", "8", "-o", "job.pb"]
    code = "from echograph.cli.echoc import main; main()"
    with (folder / "errors").open("w") as errors:
        process = subprocess.Popen([sys.executable, "-c", code, *words], cwd=folder, stderr=errors)
        _, status, used = os.wait4(process.pid, 0)
    return status, used.ru_maxrss, (folder / "errors").read_text()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "wait4"), reason="this system cannot tell what a process used")
def test_a_plain_script_imports_no_compiler_and_writes_no_memory_of_buckets(tmp_path: Path) -> None:
    status, small, errors = capture(tmp_path, PLAIN.format(width=64))
    assert status == 0, errors
    status, large, errors = capture(tmp_path, PLAIN.format(width=16384))  # 1 GiB of gradients
    assert status == 0, errors
    assert large - small < 200 * 2**10


def test_hooks_are_there_from_the_import_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made_late.py").write_text("answer = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "made_late", raising=False)
    finders = list(sys.meta_path)

    @contextmanager
    def hooks() -> Iterator[None]:
        with replaced(sys.modules["made_late"], "answer", 2):
            yield

    for _ in range(2):  # the second time it is there from the start
        with once_imported("made_late", hooks):
            import made_late  # type: ignore[import-not-found]

            assert made_late.answer == 2
            assert made_late.__loader__ is made_late.__spec__.loader
            assert type(made_late.__loader__).__name__ == "SourceFileLoader"
        assert made_late.answer == 1
        assert sys.meta_path == finders
    del sys.modules["made_late"]
    with once_imported("made_late", hooks):
        pass
    assert "made_late" not in sys.modules
    assert sys.meta_path == finders


def test_a_module_that_is_waited_for_can_be_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`runpy` asks its loader for the code, and imports nothing."""
    (tmp_path / "run_late.py").write_text("answer = __name__")
    monkeypatch.syspath_prepend(tmp_path)
    with once_imported("run_late", nullcontext):
        assert runpy.run_module("run_late", run_name="__main__")["answer"] == "__main__"


_STEPS = """import sys, torch
{first}
model = torch.nn.Linear(16, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{then}
for step in range(3):
    model(torch.randn(32, 16, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def run(folder: Path, first: str, then: str = "") -> list[str]:
    path = folder / "train.py"
    path.write_text(_STEPS.format(first=first, then=then))
    return list(run_script(Script(path=path), World(), TorchAdapter()).recorder.notes)


_UNUSED = """import no_such_logger.pictures as pictures
import no_such_logger
from yaml.no_such_part import Thing
from yaml import safe_load, no_such_name
class Shown(torch.nn.Module, no_such_logger.Mixin):
    def show(self, how: no_such_name[int] | None = None, thing: Thing | None = None): ...
assert not isinstance(model := 3, no_such_name) and safe_load("3") == 3
assert "no_such_logger" not in sys.modules
"""


def test_what_is_imported_and_not_used_need_not_be_there(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    notes = " ".join(run(tmp_path, _UNUSED))
    assert "train.py:3 imports no_such_logger, which is not installed: nothing that is captured uses it" in notes
    assert "train.py:5 imports no_such_name, which yaml has not" in notes


@pytest.mark.parametrize(
    ("use", "line"),
    [
        ("pictures.Writer()", "ModuleNotFoundError: No module named 'no_such_logger'.*: install no_such_logger"),
        ("Shown()", "install no_such_logger beside echograph"),
        ("no_such_logger.ready or 3", "install no_such_logger beside echograph"),
        ("no_such_name('x')", "ImportError: cannot import name 'no_such_name' from 'yaml'"),
        ("Thing(3)", "No module named 'yaml.no_such_part'"),
    ],
)
def test_what_is_used_is_asked_for(tmp_path: Path, use: str, line: str) -> None:
    pytest.importorskip("yaml")
    with pytest.raises(CaptureError, match=rf"train.py:14: .*{line}"):
        run(tmp_path, _UNUSED, "\n" + use)


def test_another_way_is_taken_where_the_script_has_one(tmp_path: Path) -> None:
    (tmp_path / "fast.py").write_text("import no_such_logger\n")
    first = """import contextlib
try:
    import no_such_logger
except ImportError:
    no_such_logger = None
try:
    import fast
except (ValueError, ModuleNotFoundError):
    fast = None
with contextlib.suppress(ImportError):
    import no_such_logger as there
    assert False
def late():
    told = '''
try:'''
    try:
        import no_such_logger
    except ImportError: return None
assert no_such_logger is None and fast is None and late() is None
"""
    assert not run(tmp_path, first)


def test_what_the_script_has_itself_is_missing_at_once(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "__init__.py").write_text("from .built import fast")
    with pytest.raises(CaptureError, match=r"No module named 'own.built'"):
        run(tmp_path, "import own")


def test_an_empty_folder_is_no_package(tmp_path: Path) -> None:
    (tmp_path / "NoSuchEngine").mkdir()
    first = "from NoSuchEngine import SparseTensor"
    assert any("imports SparseTensor, which NoSuchEngine has not" in note for note in run(tmp_path, first))
    with pytest.raises(CaptureError, match="NoSuchEngine is an empty folder: fetch it"):
        run(tmp_path, first, "\nSparseTensor()")


@pytest.mark.parametrize("own", [None, "offline"])
def test_weights_and_biases_is_off_whatever_a_script_says(
    own: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages/wandb.py").write_text(
        "def init(project=None, mode='online'): return mode\ndef login(): raise ValueError('no key')"
    )
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    first = "import wandb\nassert wandb.login() and wandb.init('x', mode='online') == 'disabled'"
    if own is not None:
        monkeypatch.setenv("WANDB_MODE", own)
        first = "import wandb\nassert wandb.init('x', mode='online') == 'online'"
    path = tmp_path / "train.py"
    path.write_text(_STEPS.format(first=first, then=""))
    assert run_script(Script(path=path), World(size=1), TorchAdapter()).recorder.recorded
