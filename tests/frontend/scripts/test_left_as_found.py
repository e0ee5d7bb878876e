"""A capture leaves everything as it was, whatever the script does; the script's own end is one line."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.modules import module as modules
from torch.optim import optimizer
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from echograph.errors import CaptureError
from echograph.frontend.scripts.process import CaptureProcess
from echograph.frontend.scripts.run import Script, run_script
from echograph.frontend.scripts.torch_adapter import TorchAdapter
from echograph.frontend.scripts.world import World

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")

SCRIPT = """import atexit, os, signal, sys, threading, time
import torch
import torch.distributed as dist
{before}
dist.init_process_group("nccl")
model = torch.nn.Linear(8, 8).cuda()
{made}
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    loss = model(torch.ones(4, 8, device="cuda")).sum()
    {within}
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
{after}
"""
# What may stand at each place, and what then ends the capture ("": nothing does).
DEEDS: dict[str, dict[str, str]] = {
    "before": {
        "os.environ.update(WORLD_SIZE='9', ECHOGRAPH_LEFT='1', PATH='')": "",
        "os.chdir(os.path.dirname(os.path.abspath(__file__)) + '/..')": "",
        "sys.path.insert(0, 'nowhere'); sys.argv[:] = ['other']; sys.setrecursionlimit(5000)": "",
        "for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1): signal.signal(s, lambda *_: None)": "",
        "torch.set_default_dtype(torch.float64); torch.use_deterministic_algorithms(True)": "",
        "torch.set_default_device('cuda'); torch.set_float32_matmul_precision('high')": "",
        "torch.backends.fp32_precision = torch.backends.cuda.matmul.fp32_precision = 'tf32'": "",
        "torch.save = torch.load = torch.compile = None; sys.excepthook = sys.stdout = None": "",
        "open('left', 'w').write('x'); torch.save({}, 'checkpoint.pt')": "",
        "print('x' * 3_000_000); print('y' * 3_000_000, file=sys.stderr)": "",
        "threading.Thread(target=time.sleep, args=(600,)).start()": "",
        "threading.Thread(target=lambda: 1 / 0, daemon=True).start()": "",
        "os.fork() or os._exit(3)": "",
        "os._exit(5)": "ended with exit status 5",
        "sys.exit('no data')": "ended with exit status no data",
        "raise KeyboardInterrupt": "KeyboardInterrupt",
        "raise MemoryError('too much')": "too much",
        "while True: pass": " runs for more than",
        "time.sleep(600)": " runs for more than",
        "def deep(): deep()\ndeep()": "RecursionError",
        "raise GeneratorExit": "GeneratorExit",
        "raise BaseException('neither\\nnor')": "train.py:4: BaseException: neither",
        "os.kill(os.getpid(), signal.SIGTERM)": "by SIGTERM",
        "import ctypes; ctypes.string_at(0)": "by SIGSEGV",
        "import subprocess; subprocess.run([sys.executable, '-c', 'print(1)'], check=True)": "",
        "import multiprocessing as m; p = m.get_context('spawn').Process(target=print); p.start(); p.join()": "",
        "os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')": "",
        "import warnings, gc; warnings.simplefilter('error', UserWarning); gc.disable()": "",
        "import builtins; builtins.print = builtins.input = None; sys.settrace(lambda *_: None)": "",
        "signal.signal(signal.SIGALRM, lambda *_: sys.exit(8)); signal.alarm(1); time.sleep(600)": "status 8",
        "os.closerange(3, 256)": "",
        "for _ in range(50): threading.Thread(target=time.sleep, args=(600,), daemon=True).start()": "",
    },
    "made": {
        "model.register_forward_hook(lambda *_: 1 / 0)": "ZeroDivisionError",
        "model.weight.register_hook(lambda _: 1 / 0)": "ZeroDivisionError",
        "model.weight.register_hook(lambda _: os._exit(6))": "ended with exit status 6",
        "model.register_full_backward_hook(lambda *_: sys.exit(4))": "ended with exit status 4",
        "model.register_forward_pre_hook(lambda *_: sys.exit('over'))": "over",
        "torch.nn.modules.module.register_module_forward_hook(lambda *_: None)": "",
        "model.weight.register_post_accumulate_grad_hook(lambda _: None)": "",
    },
    "within": {
        "os.fork() or sys.exit(0)": "",
        "os.environ.clear()": "",
        "step == 1 and threading.Thread(target=os._exit, args=(7,)).start(); time.sleep(step)": "status 7",
    },
    "after": {
        "atexit.register(lambda: 1 / 0)": "",
        "atexit.register(time.sleep, 600)": "",
        "raise SystemExit(9)": "",
    },
}


def text(**deeds: str) -> str:
    """A script with a deed at each place; what is made in a step that is recorded never comes to the end."""
    return SCRIPT.format(**{place: deeds.get(place, "pass") for place in DEEDS})


def found() -> dict[str, Any]:
    """What a capture could leave behind in this process."""
    global_hooks = [
        getattr(modules, name) for name in dir(modules) if name.startswith("_global_") and "hooks" in name
    ]
    return {
        "environment": dict(os.environ),
        "folder": Path.cwd(),
        "path": list(sys.path),
        "arguments": list(sys.argv),
        "signals": {s: signal.getsignal(s) for s in signal.valid_signals()},
        "hooks": [sys.excepthook, threading.excepthook, sys.unraisablehook, sys.stdout, sys.stderr],
        "recursion": sys.getrecursionlimit(),
        "type": torch.get_default_dtype(),
        "settings": [
            torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled(), torch.get_default_device(),
            torch.get_float32_matmul_precision(),
        ],
        "modes": [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()],
        "torch": [torch.save, torch.load, torch.compile, torch.Tensor.to, torch.Tensor.device, torch.nn.Module.to],
        "cuda": [torch.cuda.is_available(), torch.version.cuda, torch.cuda.Stream],
        "module hooks": [len(hooks) for hooks in global_hooks if hasattr(hooks, "__len__")],
        "optimizer hooks": [
            len(hooks) for hooks in (optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks)
        ],
        "distributed": [
            dist.is_initialized(), dist.get_backend, dist.init_device_mesh, dist.broadcast_object_list,
        ],
        "children": multiprocessing.active_children(),
    }  # fmt: skip


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files that no other process has, in one where scripts may leave what they write."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def outcome(run: Callable[[], Any]) -> str:
    """The line in which a capture ended; "" where there is a graph."""
    try:
        run()
    except (CaptureError, KeyboardInterrupt, MemoryError) as error:
        return str(error) or type(error).__name__
    return ""


def check(folder: Path, deeds: dict[str, str], *, timeout_s: float) -> None:
    """Captures a script with some deeds: the first of them that ends it says how."""
    path = folder / "work" / "train.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text(**deeds))
    before = found()
    script = Script(path=path)
    with CaptureProcess(script, World(size=2), TorchAdapter(), quiet=True, timeout_s=timeout_s) as running:
        line = outcome(running.result)
    assert found() == before
    # PyTorch may make a folder there for its compiler.
    assert not list(Path(tempfile.gettempdir()).glob("echograph-*"))
    ends = [DEEDS[place][deed] for place, deed in deeds.items() if DEEDS[place][deed]]
    assert "\n" not in line
    assert (ends[0] in line) if ends else (line == ""), (deeds, line)


EACH = [(place, deed) for place, deeds in DEEDS.items() for deed in deeds]


@pytest.mark.parametrize(("place", "deed"), [pytest.param(*each, id=each[1][:40]) for each in EACH])
def test_each_deed_ends_in_a_graph_or_in_one_line(
    tmp_path: Path, place: str, deed: str, capfd: pytest.CaptureFixture[str]
) -> None:
    # An endless script ends when it is told to; all others have the time that they need on a busy machine.
    check(tmp_path, {place: deed}, timeout_s=4 if "runs for" in DEEDS[place][deed] else 200)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(64))
def test_deeds_together_end_in_a_graph_or_in_one_line(tmp_path: Path, seed: int) -> None:
    chosen = random.Random(seed)
    deeds = {place: chosen.choice(list(DEEDS[place])) for place in DEEDS if chosen.random() < 0.7}
    ends = next((DEEDS[place][deed] for place, deed in deeds.items() if DEEDS[place][deed]), "")
    check(tmp_path, deeds, timeout_s=4 if "runs for" in ends else 200)


@pytest.mark.parametrize("name", ["zażółć ☃.py", "two words.py", "new\nline.py", "-o.py", "no suffix"])
def test_a_script_may_have_any_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(text())
    with CaptureProcess(Script(path=path), World(size=2), TorchAdapter(), quiet=True) as running:
        assert outcome(running.result) == ""
    path.write_text(text(before="raise ValueError('no data')"))
    with CaptureProcess(Script(path=path), World(size=2), TorchAdapter(), quiet=True) as running:
        line = outcome(running.result)
    assert line.startswith(f"{name}:4: ValueError: no data")
    assert "\n" not in line.removeprefix(name)  # which a command prints without


@pytest.mark.slow
def test_an_endless_script_is_ended_at_its_line(tmp_path: Path) -> None:
    """In the time that a busy machine takes to come to it."""
    path = tmp_path / "train.py"
    path.write_text("import time\nwhile True:\n    time.sleep(1)\n")
    with (
        CaptureProcess(Script(path=path), World(size=2), TorchAdapter(), timeout_s=30) as running,
        pytest.raises(CaptureError, match=r"train.py:[23] runs for more than 30 s: give a longer --timeout"),
    ):
        running.result()


def test_a_capture_without_a_process_of_its_own_restores_what_it_can(tmp_path: Path) -> None:
    """Where the system cannot fork, and in tests, the script runs here."""
    path = tmp_path / "train.py"
    harmless = ("os.environ.update", "os.chdir", "sys.path", "for s in", "torch.set_default")
    for deed in (deed for deed in DEEDS["before"] if deed.startswith(harmless)):
        path.write_text(text(before=deed))
        before = found()
        run_script(Script(path=path), World(size=2), TorchAdapter())
        assert found() == before, deed
    for place in ("before", "made"):
        for deed in (deed for deed, line in DEEDS[place].items() if "Error" in line):
            path.write_text(text(**{place: deed}))
            before = found()
            with pytest.raises(CaptureError):
                run_script(Script(path=path), World(size=2), TorchAdapter())
            assert found() == before, deed


def test_no_bytecode_is_left_beside_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "own" / "train.py"
    path.parent.mkdir()
    path.with_name("model_beside.py").write_text("import torch\nlayer = torch.nn.Linear(8, 8).cuda()\n")
    path.write_text(
        SCRIPT.format(before="from model_beside import layer", made="model = layer", within="", after="")
    )
    run_script(Script(path=path), World(size=2), TorchAdapter())
    assert sorted(one.name for one in path.parent.iterdir()) == ["model_beside.py", "train.py"]
    assert not sys.dont_write_bytecode


OPTIMIZERS = """import torch
assert "step" not in vars(torch.optim.AdamW), "as PyTorch has it"
model = torch.nn.Linear(8, 8).cuda()
optimizers = [kind(model.parameters(), lr=0.1) for kind in (torch.optim.AdamW, torch.optim.Rprop)]
for step in range(3):
    model(torch.ones(4, 8, device="cuda")).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
"""


def test_optimizers_that_were_made_before_are_as_new_in_a_run(tmp_path: Path) -> None:
    """PyTorch gives a class hooks of its step where the first optimizer is made, past what stands in for that."""
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    hooked, plain = vars(torch.optim.AdamW)["step"], vars(torch.optim.Rprop)["step"]
    (tmp_path / "train.py").write_text(OPTIMIZERS)
    run_script(Script(path=tmp_path / "train.py"), World(size=1), TorchAdapter())
    assert (vars(torch.optim.AdamW)["step"], vars(torch.optim.Rprop)["step"]) == (hooked, plain)
