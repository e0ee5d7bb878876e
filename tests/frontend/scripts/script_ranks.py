"""What a script communicates: captured without ranks, and on real ones over gloo with the tracer on."""

from __future__ import annotations

import operator
import os
import socket
import subprocess
import sys
from pathlib import Path

from echograph.frontend.pytorch.annotate import PHASE
from echograph.frontend.scripts.adapter import Adapter
from echograph.frontend.scripts.recorder import COMMUNICATION
from echograph.frontend.scripts.run import Script, ScriptRun, run_script
from echograph.frontend.scripts.torch_adapter import TorchAdapter
from echograph.frontend.scripts.world import World
from echograph.ir.comms.bandwidth import base_operation
from echograph.ir.comms.record import NativeSource
from echograph.profiler.comms.launch import STARTUP

PROGRAMS = Path(__file__).with_name("programs")
RANK = Path(__file__).with_name("script_rank.py")
SMALL_TRAINING = """model = torch.nn.Linear(16, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.randn(32, 16, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
"""Three steps of a layer on a GPU, behind `import torch`."""
Call = tuple[str, tuple[int, ...], int, str, int, str]
"""Operation, ranks of its group, bytes, type, the other rank of a message (or -1), phase ("": nobody knows)."""


def captured(
    script: Path, size: int, *arguments: str, step: int = 2, adapter: Adapter | None = None
) -> dict[int, list[Call]]:
    """Of each rank, what it communicates in a step, in order."""
    adapter = adapter or TorchAdapter()
    return {
        rank: calls_of(
            run_script(Script(path=script, arguments=arguments, step=step), World(rank=rank, size=size), adapter)
        )
        for rank in range(size)
    }


def calls_of(run: ScriptRun) -> list[Call]:
    """The communications of a recorded step."""
    found = []
    for node in run.recorder.graph.nodes:
        call = node.meta.get(COMMUNICATION)
        if call is not None and node.target is not operator.getitem:
            dtype = str(call.dtype).removeprefix("torch.") if call.dtype else ""
            found.append((base_operation(call.op), call.ranks, call.nbytes, dtype, call.peer, node.meta[PHASE]))
    return found


def traced(
    script: Path, size: int, folder: Path, *arguments: str, spawns: bool = False, at: Path | None = None
) -> dict[int, list[Call]]:
    """Of each rank of a real run over gloo, all that it communicates, in order; some scripts start their ranks.

    With `at` the script is started as it is there, and no module is known to the tracer.
    """
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    began = []
    for rank in range(1 if spawns else size):
        env = {
            **os.environ,
            **World(rank=rank, size=size).environment,
            "OMP_NUM_THREADS": "1",
            "MASTER_PORT": str(port),
            "ECHOGRAPH_TRACE": str(folder / "trace.jsonl"),
            "ECHOGRAPH_TRACE_TIMEOUT_S": "200",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(STARTUP), os.environ.get("PYTHONPATH", "")))),
        }
        with (folder / f"{rank}.log").open("wb") as log:
            command = [sys.executable, *([] if spawns or at else [str(RANK)]), str(script), *arguments]
            began.append(subprocess.Popen(command, env=env, stdout=log, stderr=log, cwd=at or folder))
    try:
        status = [process.wait(400) for process in began]
    finally:
        for process in began:
            process.kill()
            process.wait()
    logs = "\n".join((folder / f"{rank}.log").read_text()[-3000:] for rank in range(len(began)))
    assert status == [0] * len(began), logs
    return {rank: list(_rows(folder / f"trace.{rank}.jsonl")) for rank in range(size)}


def _rows(path: Path) -> list[Call]:
    source = NativeSource(path)
    source.open()
    rows = [(int(queued), int(number)) for batch in source.rows() for number, _, queued, *_ in batch.tolist()]
    found = []
    for _, number in sorted(set(rows)):
        what = source.signatures[number]
        assert what is not None
        ranks = source.groups[what.group]
        found.append((base_operation(what.op), ranks, what.bytes, what.dtype, what.peer, what.phase))
    return found


def repeats(step: list[Call], whole: list[Call], times: int = 2) -> bool:
    """Whether a run holds a step's calls, that many times one after the other."""
    wanted = step * times
    return any(all(map(_alike, wanted, whole[i : i + len(wanted)])) for i in range(len(whole) - len(wanted) + 1))


def phases(calls: list[Call]) -> set[str]:
    """Those that somebody knows."""
    return {call[-1] for call in calls} - {""}


def _alike(one: Call, real: Call) -> bool:
    return one[:-1] == real[:-1] and real[-1] in ("", one[-1])
