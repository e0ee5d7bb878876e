"""What one rank runs: a loop that reads programs as lines of JSON and answers with their times.

It knows nothing of Echograph. A program is a list of instructions, said in `jobs.py`: `compute` lasts until a
deadline and stands for a device; a communication is issued and goes on beside it; `wait` blocks until it is done.

    python worker.py RANK WORLD ADDRESS PORT
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

c10d: Any = torch.distributed  # whose stubs lack most of what is used here

ELEMENT_BYTES = 4
# Between the moment when all agree on a start and the start: longer than agreeing takes on the slowest links.
LEAD_S = 0.06
TIMEOUT = timedelta(seconds=60)


class Worker:
    """One rank and its communicators; all ranks are on one machine, so they share a clock."""

    def __init__(self, rank: int, world: int, address: str, port: int) -> None:
        self.rank = rank
        self.store = c10d.TCPStore(address, port, world, is_master=rank == 0, timeout=TIMEOUT)
        self.communicators: dict[tuple[str, tuple[int, ...]], Any] = {}
        self.tensors: dict[tuple[str, int], torch.Tensor] = {}

    def communicator(self, name: str, ranks: tuple[int, ...]) -> Any:
        """A group with a thread of its own, so that its collectives run in order, as those of NCCL do."""
        key = name, ranks
        if key not in self.communicators:
            options = c10d.ProcessGroupGloo._Options()
            options._devices = [c10d.ProcessGroupGloo.create_device(interface="eth0")]
            options._threads = 1
            options._timeout = TIMEOUT
            store = c10d.PrefixStore(f"{name}/{ranks}", self.store)
            self.communicators[key] = c10d.ProcessGroupGloo(store, ranks.index(self.rank), len(ranks), options)
        return self.communicators[key]

    def run(self, program: list[dict[str, Any]], everyone: tuple[int, ...], steps: int) -> list[float]:
        """Seconds of each step, from the moment when all begin to the end of this rank's part."""
        groups = {(what["communicator"], tuple(what["ranks"])) for what in program if "communicator" in what}
        for name, ranks in sorted(groups):  # all ranks in one order: making a group waits for its members
            self.communicator(name, ranks)
        begin, seconds = self.meet(everyone, time.monotonic()), []
        for _ in range(steps):
            end = self.step(program, begin)
            seconds.append(end - begin)
            begin = self.meet(everyone, end)
        return seconds

    def meet(self, everyone: tuple[int, ...], end: float) -> float:
        """When the next step begins: a little after the last of all has ended this one."""
        latest = torch.tensor([end], dtype=torch.float64)
        options = c10d.AllreduceOptions()
        options.reduceOp = c10d.ReduceOp.MAX
        self.communicator("meet", everyone).allreduce([latest], options).wait()
        begin = float(latest) + LEAD_S
        if time.monotonic() > begin:
            raise RuntimeError("agreeing on the start took longer than the start was ahead")
        return begin

    def step(self, program: list[dict[str, Any]], begin: float) -> float:
        """Runs a program from a moment on; returns when it ended.

        Computing goes on from when it ended last, however late this process woke: a device's queue does not wait.
        """
        pending: dict[str, Any] = {}
        device = begin
        sleep_until(begin)
        for number, what in enumerate(program):
            if what["do"] == "compute":
                device += what["seconds"]
                sleep_until(device)
            elif what["do"] == "wait":
                done = pending.pop(what["handle"])
                if not done.is_completed():
                    done.wait()
                    device = max(device, time.monotonic())
            else:
                pending[what["handle"]] = self.issue(what, number)
        return device

    def issue(self, what: dict[str, Any], number: int) -> Any:
        """Starts a communication; no two that go on at once share memory."""
        group = self.communicator(what["communicator"], tuple(what["ranks"]))
        size = what["bytes"] // ELEMENT_BYTES
        part = size // len(what["ranks"])
        match what["do"]:
            case "all_reduce":
                return group.allreduce([self.tensor(f"whole {number}", size)])
            case "all_gather":
                return group._allgather_base(self.tensor(f"whole {number}", size), self.tensor("part", part))
            case "reduce_scatter":
                return group._reduce_scatter_base(self.tensor("part", part), self.tensor(f"whole {number}", size))
            case "send":
                return group.send([self.tensor(f"whole {number}", size)], what["peer"], 0)
            case "recv":
                return group.recv([self.tensor(f"whole {number}", size)], what["peer"], 0)
        raise ValueError(f"unknown instruction {what['do']}")

    def tensor(self, name: str, size: int) -> torch.Tensor:
        """Memory that stays, so that no step pays for its pages."""
        key = name, size
        if key not in self.tensors:
            self.tensors[key] = torch.zeros(size)
        return self.tensors[key]


def sleep_until(moment: float) -> None:
    """Sleeps: few processors cannot be busy for eight ranks."""
    while (left := moment - time.monotonic()) > 0:
        time.sleep(left)


def main() -> None:
    """Answers programs until the input ends."""
    rank, world, port = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[4])
    torch.set_num_threads(1)
    # A rank is woken when its message is there, not when other work of the machine makes room for it.
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    worker = Worker(rank, world, sys.argv[3], port)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        worker.tensors.clear()
        print(json.dumps(worker.run(asked["program"], tuple(asked["ranks"]), asked["steps"])), flush=True)


if __name__ == "__main__":
    main()
