"""Jobs as ByteProfile and dPRO would have written them, small enough to compute answers by hand.

Two steps of a model of two layers, `a` and `b`, whose weights are `wa` and `wb`. Times are microseconds. A step:

    FW.a 100 (120 in the second), FW.b 50, OUTPUT0 nothing, BW.b 60, BW.a 80, then STEP 30, from 1000 x step on
    Comm.wb in two partitions (8 and 9) once BW.b is over, Comm.wa in one (10) once BW.a is over
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Event = dict[str, Any]

GRADIENTS = ("wa", "wb")
STEPS = 2
PERIOD = 1000
FW_A, FW_B, BW_B, BW_A, STEP = (100, 120), 50, 60, 80, 30
EDGES = (
    ("I/O_0", "FW.a"),
    ("FW.a", "FW.b"),
    ("FW.b", "OUTPUT0"),
    ("OUTPUT0", "BW.b"),
    ("BW.b", "BW.a"),
    ("BW.b", "Comm.wb"),
    ("BW.a", "Comm.wa"),
    ("Comm.wa", "STEP"),
    ("Comm.wb", "STEP"),
    ("BW.a", "STEP"),
    ("STEP", "FW.a"),
)
# What a part takes, of each partition; PUSH and PULL on the root alone, COORDINATE_PUSH on the others.
PARTS = {"REDUCE": 10, "COPYD2H": 5, "PUSH": 40, "PULL": 50, "COPYH2D": 6, "BROADCAST": 12}
OTHERS = {"REDUCE": 10, "COPYD2H": 5, "COORDINATE_PUSH": 4, "COPYH2D": 6, "BROADCAST": 12}
PARTITIONS = {"wa": ("10",), "wb": ("8", "9")}


def write(path: Path, content: Any) -> Path:
    """Writes JSON, gzipped where the name says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def complete(name: str, ts: float, dur: float, cat: str, tid: str = "0", pid: str = "0", **args: Any) -> Event:
    """A complete event."""
    shown = {"name": name, **args}
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "cat": cat, "pid": pid, "tid": tid, "args": shown}


def gml(path: Path, edges: Sequence[tuple[str, str]], averages: dict[str, float] | None = None) -> Path:
    """A dependency graph, with the attributes that networkx writes."""
    names = list(dict.fromkeys(name for edge in edges for name in edge))
    lines = ["graph [", "  directed 1"]
    for number, name in enumerate(names):
        average = f" avg {averages[name]}" if averages and name in averages else ""
        lines.append(f'  node [ id {number} label "{name}" op "{name.split(".")[0]}"{average} ]')
    lines += [f"  edge [ source {names.index(a)} target {names.index(b)} ]" for a, b in edges]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*lines, "]", ""]))
    return path


def computation(step: int, clock: float = 0, slower: float = 0, key: str = "input") -> list[Event]:
    """Forward, backward and the update of a step."""
    at = clock + step * PERIOD
    events = []
    for name, dur, before in (
        ("FW.a", FW_A[step] + slower, "I/O_0"),
        ("FW.b", FW_B, "FW.a"),
        ("BW.b", BW_B, "OUTPUT0"),
        ("BW.a", BW_A, "BW.b"),
    ):
        events.append(complete(name, at, dur, "operator", **{f"{key}0": before}))
        at += dur
    return [*events, complete("STEP", clock + step * PERIOD + 700, STEP, "operator")]


def communication(step: int, *, root: bool, clock: float = 0, later: float = 0) -> list[Event]:
    """The parts of both gradients, partition after partition, and their totals, which include 15 of queueing."""
    events = []
    for gradient, start in (("wb", 250), ("wa", 400)):
        name = f"Comm.{gradient}"
        first = at = clock + step * PERIOD + start + later
        for partition in PARTITIONS[gradient]:
            for part, dur in (PARTS if root else OTHERS).items():
                events.append(
                    complete(f"{name}.{part}", at, dur, "Comm", partition, name) | {"args": {"name": name}}
                )
                at += dur
        events.append(complete(name, first, at + 15 - first, "Comm", "total", name, input0=f"BW.{gradient[1]}"))
    return events


def byteprofile(
    folder: Path, *, older: bool = False, clock: float = 0, slower: float = 0, later: float = 0, worker: int = 0
) -> Path:
    """A worker of two GPUs; the second is the root, and its forward operators are slower.

    Args:
        folder: of the worker.
        older: older names of folders and arguments.
        clock: by which the worker's clock is ahead.
        slower: by which FW.a takes longer on the root.
        later: by which communications begin later.
        worker: number, which older folders' names have.
    """
    for rank in range(2):
        root = rank == 1
        gpu = folder / (f"{2 * worker + rank}_{rank}" if older else str(rank))
        events: list[Event] = []
        for step in range(STEPS):
            key = "arg" if older else "input"
            events += computation(step, clock, slower if root else 0, key)
            events += communication(step, root=root, clock=clock, later=later)
        write(gpu / f"bps_trace_local_rank{rank}_{STEPS}step.json", {"traceEvents": events})
        gml(gpu / "dag.gml", EDGES)
    return folder


def sources(gpu: Path, *, root: bool = True) -> Path:
    """What ByteProfile makes a final trace of: the same job, as the three profilers wrote it."""
    raw: list[Event] = [{"ph": "M", "name": "process_name", "pid": 3, "args": {"name": "gpu/0"}}]
    names = {"FW.a": "a_fwd", "FW.b": "b_fwd", "BW.b": "b_fwd_backward", "BW.a": "a_fwd_backward"}
    for step in range(STEPS):
        for event in computation(step):
            if event["name"] == "STEP":
                spans = [("sgd_mom_update", 700, 10), ("sgd_mom_update", 712, 18), ("_copyto_GPU2GPU", 735, 5)]
            else:
                spans = [(names[event["name"]], event["ts"] - step * PERIOD, event["dur"])]
            for name, ts, dur in spans:
                both = {"name": name, "cat": "operator", "pid": 3, "tid": 5}
                raw.append({"ph": "B", "ts": step * PERIOD + ts, **both})
                raw.append({"ph": "E", "ts": step * PERIOD + ts + dur, **both})
    # The same operators once more, on another process.
    raw += [event | {"pid": 4} for event in raw if event["ph"] != "M"]
    write(gpu / "temp.json", {"traceEvents": raw})
    comm = []
    for step in range(STEPS):
        for event in communication(step, root=root):
            index = GRADIENTS.index(event["pid"].removeprefix("Comm."))
            name = f"Comm.byteps.gradient_{index}"
            part = event["name"].removeprefix(event["pid"])
            comm.append(event | {"name": name + part, "pid": name, "args": {"name": name}})
    write(gpu / "comm.json", {"traceEvents": comm})
    loads = [complete("I/O_0", step * PERIOD - 30, 25, "I/O") for step in range(STEPS)]
    write(gpu / "io.json", {"traceEvents": loads})
    gml(gpu / "dag.gml", EDGES)
    (gpu / "gradient_name_list.txt").write_text("".join(f"{i}: {name}\n" for i, name in enumerate(GRADIENTS)))
    return gpu


UPDATES = (
    *(edge for edge in EDGES if "STEP" not in edge),
    ("Comm.wa", "UPDATE_CAL"),
    ("Comm.wb", "UPDATE_CAL"),
    ("UPDATE_CAL", "UPDATE_0"),
    ("UPDATE_0", "FW.a"),
)
# Horovod fuses both gradients.
NCCL = {"Sync": 33, "QUEUE": 7, "MEMCPY_IN_FUSION_BUFFER": 5, "NCCL_ALLREDUCE": 90, "MEMCPY_OUT_FUSION_BUFFER": 6}


def _updates(step: int, clock: float) -> list[Event]:
    at = clock + step * PERIOD + 700
    return [complete("UPDATE_CAL", at, 20, "operator"), complete("UPDATE_0", at + 20, 9, "operator")]


def _prefixed(events: Iterable[Event], host: int, gpu: int) -> list[Event]:
    pid = f"host{host}.rank{gpu}"
    return [event | {"name": f"{pid}->{event['name']}", "pid": pid} for event in events]


def _timed(events: list[Event], process: int, name: str, ts: float, dur: float) -> None:
    events.append({"ph": "B", "name": name, "ts": ts, "pid": process, "tid": 0})
    events.append({"ph": "E", "ts": ts + dur, "pid": process, "tid": 0})


def _process(number: int, name: str) -> Event:
    return {"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}}


def dpro_nccl(trial: Path, *, clock: float = 0, slower: float = 0) -> Path:
    """Two hosts with two GPUs; `clock` is that of host 1, `slower` of FW.a on its second GPU."""
    for host in range(2):
        for gpu in range(2):
            folder = trial / f"host{host}" / str(gpu)
            own = clock if host else 0
            compute: list[Event] = []
            comm = [_process(1, "horovod_allreduce.0+1"), _process(2, "Sync")]
            for step in range(STEPS):
                extra = slower if host and gpu else 0
                compute += [e for e in computation(step, own, extra) if e["name"] != "STEP"] + _updates(step, own)
                at = own + step * PERIOD + 400
                for part, dur in NCCL.items():
                    if part == "Sync":
                        _timed(comm, 2, "0+1", at, dur)
                    else:
                        _timed(comm, 1, part, at, dur)
                    at += dur
            write(folder / "trace.json.gz", {"traceEvents": _prefixed(compute, host, gpu)})
            write(folder / "comm.json", comm)
            ids = {"loopId": 0, "channelId": 1, "chunkId": 6, "sliceId": 0}
            sends = [complete(f"Comm.0+1.{part}", own + 450, 11, "Comm", **ids) for part in ("SEND", "RECV")]
            write(folder / "comm_detail.json", {"traceEvents": sends})
            write(folder / "metadata.json", {"gradient_name_list": list(GRADIENTS)})
            gml(folder / "dag.gml", UPDATES)
            (folder / "nccl_graph.txt").write_text("ring\n")
    return trial


MESSAGES = {"PUSH_REQ": 30, "PUSH_RES": 3, "PULL_REQ": 2, "PULL_RES": 25}
SERVER = {"COPY_FIRST": 4, "SUM": 8, "COPY_MERGED": 5}


def dpro_byteps(trial: Path) -> Path:
    """Two hosts of one GPU each, one server; the second gradient is partitioned."""
    for host in range(2):
        folder = trial / f"host{host}" / "0"
        compute = [
            e for step in range(STEPS) for e in (*computation(step), *_updates(step, 0)) if e["name"] != "STEP"
        ]
        write(folder / "trace.json.gz", {"traceEvents": _prefixed(compute, host, 0)})
        reduces = [
            complete(f"Comm.{GRADIENTS.index(gradient)}.REDUCE", step * PERIOD + 300, 10, "Comm", partition)
            for step in range(STEPS)
            for gradient, partitions in PARTITIONS.items()
            for partition in partitions
        ]
        write(folder / "comm.json", {"traceEvents": reduces})
        write(folder / "metadata.json", {"gradient_name_list": list(GRADIENTS)})
        gml(folder / "dag.gml", UPDATES)
    timeline = [_process(2 * w + back, f"worker_{w} -> server_0" if not back else f"server_0 -> worker_{w}")
                for w in range(2) for back in range(2)]  # fmt: skip
    for step in range(STEPS):
        for worker in range(2):
            for tensor in ("wa", "wb~PART0", "wb~PART1"):
                at = float(step * PERIOD + 420)
                for part, dur in MESSAGES.items():
                    verb, way = part.split("_")
                    _timed(timeline, 2 * worker + (way == "RES"), f"{tensor}.{verb}", at, dur)
                    at += dur
    write(trial / "comm_timeline.json", timeline)
    served = [_process(0, "server_0")]
    for step in range(STEPS):
        for tensor in ("wa", "wb~PART0", "wb~PART1"):
            at = float(step * PERIOD + 450)
            for part, dur in SERVER.items():
                _timed(served, 0, f"{tensor}.{part}", at, dur)
                at += dur
    write(trial / "server_timeline.json", served)
    return trial


def server_profile(path: Path) -> Path:
    """BytePS' own: two pushes of key 9 that overlap, and a pull."""
    events = []
    for phase, name, ts in (
        ("B", "push-9", 0), ("B", "push-9", 5), ("E", "push-9", 20), ("E", "push-9", 30), ("B", "pull-9", 40),
        ("E", "pull-9", 47), ("E", "pull-9", 60), ("B", "pull-9", 70),
    ):  # fmt: skip
        events.append({"ph": phase, "name": name, "ts": ts, "pid": 9, "tid": 9, "cat": "Comm"})
    return write(path, {"traceEvents": events})
