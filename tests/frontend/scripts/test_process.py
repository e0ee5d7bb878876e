"""Whatever a script does to its process, a capture says in one line how it ended."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from echograph.errors import CaptureError
from echograph.frontend.scripts.capture import capture_script
from echograph.frontend.scripts.process import CaptureProcess
from echograph.frontend.scripts.run import Script
from echograph.frontend.scripts.torch_adapter import TorchAdapter
from echograph.frontend.scripts.world import World
from echograph.ir import serde

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")

BEGIN = """import atexit, ctypes, multiprocessing, os, signal, sys, threading, time
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
STEPS = """for _ in range(3):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def captured(path: Path) -> CaptureProcess:
    return CaptureProcess(Script(path=path), World(size=2), TorchAdapter())


def written(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(BEGIN + text)
    return path


ENDED = {
    "os._exit(0)": ("ended after 0 training steps, before step 2", 1),
    "os._exit(3)": ("ended with exit status 3 after 0 training steps", 3),
    "ctypes.CDLL(None)._exit(0)": ("ended its process with exit status 0 without a graph", 1),
    "os.execv('/bin/sh', ['sh', '-c', 'exit 4'])": ("ended its process with exit status 4 without a graph", 4),
    "os.abort()": ("ended its process by SIGABRT without a graph", 134),
    "os.kill(os.getpid(), signal.SIGTERM)": ("ended its process by SIGTERM without a graph", 143),
    "os.kill(os.getpid(), signal.SIGKILL)": ("ended its process by SIGKILL without a graph", 137),
    "signal.alarm(1)\ntime.sleep(60)": ("ended its process by SIGALRM without a graph", 142),
    "raise ValueError('no data')": ("train.py:5: ValueError: no data", 1),
}


def some(names: Iterable[str], fast: int) -> list[ParameterSet]:
    """Parameters of which the first are tried by the fast tests."""
    return [pytest.param(name, marks=() if i < fast else pytest.mark.slow) for i, name in enumerate(names)]


@pytest.mark.parametrize("end", some(ENDED, 4))
def test_a_process_that_ends_is_one_line(tmp_path: Path, end: str) -> None:
    line, status = ENDED[end]
    with captured(written(tmp_path, end + "\n")) as running, pytest.raises(CaptureError) as refused:
        running.result()
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)
    assert refused.value.exit_code == status


GOES_ON = {
    "nothing": "",
    "exits at exit": "atexit.register(lambda: sys.exit(7))\n",
    "ends its process at exit": "atexit.register(lambda: os._exit(7))\n",
    "a thread goes on": "threading.Thread(target=time.sleep, args=(600,)).start()\n",
    "closes descriptors": "os.closerange(0, 256)\n",
    "closes streams": "sys.stdout.close(); sys.stderr.close()\n",
    "has no streams": "sys.stdout = sys.stderr = None\n",
    "handles signals": "signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, print)\n",
    "moves away": "os.chdir('/')\n",
}


@pytest.mark.parametrize("deed", some(GOES_ON, 3))
def test_a_deed_of_the_script_changes_nothing(
    tmp_path: Path, deed: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, GOES_ON[deed] + STEPS)
    with captured(path) as running:
        found = running.result()
    path.write_text(BEGIN + STEPS)
    wanted = capture_script(Script(path=path), World(size=2), TorchAdapter())
    assert b"".join(serde.encode(found.graph)) == b"".join(serde.encode(wanted.graph))
    assert found.notes == wanted.notes
    assert capfd.readouterr() == ("", "")


WAIT = "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
FORKS = {
    "a fork runs on": ("if os.fork() == 0:\n    print('child')\nelse:\n    print(os.wait()[1])\n", "child\n0\n"),
    "a fork exits": (f"pid = os.fork()\nif pid == 0:\n    sys.exit(5)\n{WAIT}", "5\n"),
    "a fork ends at once": (f"pid = os.fork()\nif pid == 0:\n    os._exit(6)\n{WAIT}", "6\n"),
    "multiprocessing forks": (
        "child = multiprocessing.get_context('fork').Process(target=sys.exit, args=(4,))\n"
        "child.start()\nchild.join()\nprint(child.exitcode)\n",
        "4\n",
    ),
}


@pytest.mark.parametrize("name", some(FORKS, 2))
def test_a_child_of_the_script_ends_where_the_script_does(
    tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    text, printed = FORKS[name]
    flushed = text.replace("print('child')", "print('child', flush=True)")
    path = written(tmp_path, flushed + STEPS + "    print('step', flush=True)\n")
    with captured(path) as running:
        assert running.result().graph.ops
    out, err = capfd.readouterr()
    assert err == ""
    assert [line for line in out.splitlines() if line != "step"] == printed.splitlines()


def test_a_capture_that_is_left_ends_the_script(tmp_path: Path) -> None:
    path = written(tmp_path, f"open({str(tmp_path / 'begun')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n")
    with captured(path):
        while not (tmp_path / "begun").exists() or not (tmp_path / "begun").read_text():
            pass
        script = int((tmp_path / "begun").read_text())
        os.kill(script, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(script, 0)


@pytest.mark.parametrize(
    ("number", "status", "line"),
    [(signal.SIGINT, 130, "echoc: interrupted\n"), (signal.SIGTERM, 143, "echoc: terminated\n")],
)
def test_a_signal_ends_the_command_in_one_line(
    warm: Path, tmp_path: Path, number: int, status: int, line: str
) -> None:
    path = written(tmp_path, "print(os.getppid(), flush=True)\nwhile True:\n    time.sleep(0.1)\n")
    command = [warm / "echoc", "capture", "torch", "--script", path, "-o", "job.pb"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        os.kill(int(running.stdout.readline()), number)
        _, said = running.communicate(timeout=100)
    # On a busy machine the stages that it came through stand before.
    assert (running.returncode, said.splitlines()[-1] + "\n") == (status, line)
    assert [file.name for file in tmp_path.iterdir()] == ["train.py"]
