"""Where a host is not found, nobody waits and asks again."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from echograph.frontend.scripts.run import Script, run_script
from echograph.frontend.scripts.torch_adapter import TorchAdapter
from echograph.frontend.scripts.world import World

ASKING = """import socket, time, torch
for attempt in range(5):
    try:
        socket.create_connection(("nowhere.invalid", 443))
    except OSError:
        time.sleep(2 ** attempt)
time.sleep(7)
assert socket.getaddrinfo("there", 443)
time.sleep(8)
model = torch.nn.Linear(8, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    model(torch.ones(4, 8, device="cuda")).sum().backward()
    optimizer.step()
"""


def test_no_host_no_sleep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    slept: list[float] = []

    def look(host: str, *_: object) -> list[str]:
        asked.append(host)
        if host != "there":
            raise socket.gaierror(socket.EAI_NONAME, "not known")
        return [host]

    monkeypatch.setattr(socket, "getaddrinfo", look)
    monkeypatch.setattr(time, "sleep", slept.append)
    path = tmp_path / "train.py"
    path.write_text(ASKING)
    assert run_script(Script(path=path), World(), TorchAdapter()).recorder.recorded
    assert asked == ["nowhere.invalid", "there"]
    assert slept == [7, 8]  # a script that sleeps by itself does
    assert socket.getaddrinfo is look
