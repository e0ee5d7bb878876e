"""Writes the conformance files: graphs (.pb), what a reader finds in them (.json), and their text (.txt).

python tests/golden/make_conformance.py
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from conformance_graphs import GRAPHS, two_layers

from echograph.ir import types as t
from echograph.ir.files import fields, with_checksum
from echograph.ir.graph import FORMAT_MAJOR, FORMAT_MINOR, Graph, Group, JobGraph, Program
from echograph.ir.schedule import Schedule
from echograph.ir.serde import encode
from echograph.ir.text import to_text
from echograph.proto import workload_pb2 as pb

FOLDER = Path(__file__).parent / "conformance"
FUTURE = b"\xa2\x06\x03new"  # field 100, a string


def summary(graph: Graph, version: str = "") -> dict[str, Any]:
    """What a reader must find. Sums that may exceed 2^53 are decimal strings."""
    work, durations = Counter[str](), Counter[str]()
    programs = [_program(graph, program, work, durations) for program in graph.programs]
    ops, tensors = graph.ops, graph.tensors
    return {
        "format": version or "{}.{}".format(*graph.format),
        "level": "job" if isinstance(graph, JobGraph) else "step",
        "name": graph.name,
        "producer": graph.producer,
        "model": graph.workload.model,
        "parameters": str(graph.workload.parameters),
        "world_size": graph.world_size,
        "unknown_bytes": len(graph.unknown),
        "streams": list(graph.streams),
        "tensors": [_tensor(tensor) for tensor in tensors],
        "kinds": {t.OpKind(k).name.lower(): n for k, n in sorted(Counter(ops.kind.tolist()).items())},
        "blocks": [
            {
                "name": b.name,
                "tensors": len(b.tensors),
                "ports": sum(tensors[i].port for i in b.tensors),
                "operations": len(b.ops),
                "instances": [i.label for i in b.instances],
            }
            for b in graph.blocks
        ],
        "groups": [{"name": g.name, "members": [*_members(graph, g)]} for g in graph.groups],
        "unfolded_operations": graph.unfolded_ops,
        "work": {key: str(work[key]) for key in sorted(work)},
        "picoseconds": {device: str(durations[device]) for device in sorted(durations)},
        "programs": programs,
    }


def _tensor(tensor: t.Tensor) -> str:
    """Type, role and bytes: `bf16[8,4] activation 64`."""
    extents = ",".join(map(str, tensor.shape))
    return f"{tensor.dtype.text}[{extents}] {tensor.role.name.lower()} {tensor.nbytes}"


def _program(graph: Graph, program: Program, work: Counter[str], durations: Counter[str]) -> dict[str, Any]:
    """One program: its ranks, and for each operation that it runs the positions of those that made its inputs."""
    schedule, rows = Schedule(graph, program), []
    for block, begin, end, instance, micro_batch in program.calls.tolist():
        label = graph.blocks[block].instances[instance].label
        for index in range(begin, end):
            op = graph.ops[index]
            if isinstance(op, t.Compute):
                for key in ("flops", "bytes_read", "bytes_written"):
                    work[f"{op.phase.name.lower()} {key}"] += getattr(op, key)
            durations.update({d.device: d.picoseconds for d in op.durations})
            module = op.module.replace("{}", label) if block else op.module
            made_at = [_made_at(graph, schedule, block, instance, micro_batch, i, len(rows)) for i in op.inputs]
            rows.append([op.name, module, micro_batch, made_at])
    return {"role": program.role, "ranks": _ranks(graph, program), "operations": rows}


def _made_at(
    graph: Graph, schedule: Schedule, block: int, instance: int, micro_batch: int, tensor: int, now: int
) -> int | None:
    source = graph.source(block, instance, tensor)
    if source is None:
        return None
    _, instance, op = source
    same = int(schedule.position(np.int64(instance), np.int64(micro_batch), np.int64(op)))
    if 0 <= same < now:
        return same
    any_time = schedule.position(np.int64(instance), schedule.micro_batches, np.int64(op))
    return max((at for at in any_time.tolist() if 0 <= at < now), default=-1)


def _ranks(graph: Graph, program: Program) -> list[int]:
    if program.ranks or not graph.mesh:
        return list(program.ranks) or [0]
    free = [[program.coordinates[a.name]] if a.name in program.coordinates else range(a.size) for a in graph.mesh]
    return [_rank(graph, coordinates) for coordinates in product(*free)]


def _rank(graph: Graph, coordinates: tuple[int, ...]) -> int:
    rank = 0
    for axis, value in zip(graph.mesh, coordinates, strict=True):
        rank = rank * axis.size + value
    return rank


def _members(graph: Graph, group: Group) -> Iterator[list[int]]:
    """Every set of ranks that the group stands for."""
    if group.ranks:
        yield list(group.ranks)
        return
    fixed = [range(1) if a.name in group.axes else range(a.size) for a in graph.mesh]
    for outer in product(*fixed):
        free = [range(a.size) if a.name in group.axes else [o] for a, o in zip(graph.mesh, outer, strict=True)]
        whole = [_rank(graph, coordinates) for coordinates in product(*free)]
        yield [whole[position] for position in group.positions] or whole


def files() -> Iterator[tuple[str, bytes]]:
    """Name and content of every file."""
    for name, make in GRAPHS.items():
        graph = make()
        yield f"{name}.pb", b"".join(encode(graph))
        yield f"{name}.json", _json(summary(graph))
        yield f"{name}.txt", "".join(to_text(graph)).encode()
    whole = b"".join(encode(two_layers()))
    known = b"".join(whole[f.start : f.end] for f in fields(whole))
    newer = pb.Graph(format_major=FORMAT_MAJOR, format_minor=FORMAT_MINOR + 1)
    minor = known + newer.SerializeToString() + FUTURE
    expected = summary(two_layers(), f"{FORMAT_MAJOR}.{FORMAT_MINOR + 1}") | {"unknown_bytes": len(FUTURE)}
    yield "newer_minor.pb", b"".join(with_checksum([minor]))
    yield "newer_minor.json", _json(expected)
    major = known + pb.Graph(format_major=FORMAT_MAJOR + 1).SerializeToString()
    spoiled = bytearray(whole)
    spoiled[len(whole) // 2] ^= 1
    refused = {
        "newer_major": (b"".join(with_checksum([major])), "newer"), "bad_checksum": (bytes(spoiled), "corrupted"),
        "no_checksum": (known, "truncated"), "half": (whole[: len(whole) // 2], "truncated"),
    }  # fmt: skip
    for name, (data, reason) in refused.items():
        yield f"{name}.pb", data
        yield f"{name}.json", _json({"error": reason})


def _json(value: dict[str, Any]) -> bytes:
    """An entry on each line, and an item on each line of lists of objects and of text."""
    return ("{\n" + ",\n".join(f" {_line(key)}: {_entry(item)}" for key, item in value.items()) + "\n}\n").encode()


def _entry(value: Any) -> str:
    if not isinstance(value, list) or len(value) < 2:
        return _line(value)
    return "[\n" + ",\n".join(f"  {_line(item)}" for item in value) + "\n ]"


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, data in files():
        (FOLDER / name).write_bytes(data)
