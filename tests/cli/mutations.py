"""Damages graph files and simulates what still decodes; run as `python mutations.py GRAPH COUNT SEED`.

A process of its own, so that its memory can be limited: prints a JSON record of what happened.
"""

from __future__ import annotations

import json
import math
import random
import resource
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from echograph.cli.compose import predict
from echograph.cli.show import summarize
from echograph.errors import EchoError
from echograph.ir.files import fields, with_checksum
from echograph.ir.serde import decode
from echograph.proto import workload_pb2 as pb

MEMORY_BYTES = 2 * 2**30
CPU_SECONDS = 5.0
EXTREMES = (0, 1, 2, 3, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**45, 2**62, 2**63 - 1, 2**64 - 1)


def damage_bytes(data: bytes, chance: random.Random) -> bytes:
    """Flips, replaces, inserts, removes or cuts bytes."""
    damaged = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8))):
        at, length = chance.randrange(len(damaged)), chance.choice((1, 2, 8))
        match chance.randrange(5):
            case 0:
                damaged[at] ^= 1 << chance.randrange(8)
            case 1:
                damaged[at] = chance.choice((0x00, 0x7F, 0x80, 0xFF))
            case 2:
                damaged[at:at] = chance.randbytes(length)
            case 3 if len(damaged) > 2 * length:
                del damaged[at : at + length]
            case _:
                del damaged[max(1, at) :]
    return bytes(damaged)


def damage_fields(data: bytes, chance: random.Random) -> bytes:
    """Sets some fields, anywhere in the message, to values that no writer would choose."""
    graph = pb.Graph.FromString(data)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        _damage_one_field(graph, chance)
    return graph.SerializeToString()


def _damage_one_field(message: Any, chance: random.Random) -> None:
    while True:
        descriptor, value = chance.choice(message.ListFields())
        if descriptor.message_type is None:
            break
        if descriptor.is_repeated:
            if chance.random() < 0.1:
                del value[chance.randrange(len(value))]
                return
            value = chance.choice(value)
        if not value.ListFields():
            return
        message = value
    if descriptor.is_repeated:
        at = chance.randrange(len(value))
        if chance.random() < 0.2:
            del value[at]
        else:
            value[at] = _other(descriptor, value[at], chance)
    else:
        setattr(message, descriptor.name, _other(descriptor, value, chance))


def _other(descriptor: Any, value: Any, chance: random.Random) -> Any:
    if descriptor.type == descriptor.TYPE_STRING:
        return chance.choice(("", value * 3, "\x1b[31m\n{}{}"))
    if descriptor.type == descriptor.TYPE_BYTES:
        return chance.randbytes(3)
    if descriptor.type == descriptor.TYPE_BOOL:
        return not value
    if descriptor.cpp_type in (descriptor.CPPTYPE_DOUBLE, descriptor.CPPTYPE_FLOAT):
        return chance.choice((0.0, -1.0, 1e30, math.inf, math.nan))
    bits = 64 if descriptor.cpp_type in (descriptor.CPPTYPE_INT64, descriptor.CPPTYPE_UINT64) else 32
    number = chance.choice((*EXTREMES, value + 1, value - 1, 2 * value))
    if descriptor.cpp_type in (descriptor.CPPTYPE_UINT64, descriptor.CPPTYPE_UINT32):
        return number % 2**bits
    return (number + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)


def simulate(data: bytes) -> str:
    """What `echoc show` and `echosim run` do with the bytes of a file; the outcome's name."""
    try:
        graph = decode(data)
    except EchoError:
        return "refused"
    json.dumps(summarize(graph), allow_nan=False)
    try:
        result, _ = predict(graph, cluster="dgx-h100", gpus=None)
    except EchoError:
        return "not simulated"
    record = result.to_json()
    parts = record["breakdown_s"]
    total = sum(v for k, v in parts.items() if k != "exposed_communication")
    total += sum(parts["exposed_communication"].values())
    json.dumps(record, allow_nan=False)
    if not math.isclose(total, record["step_time_s"], rel_tol=1e-9):
        raise AssertionError(f"the breakdown's {total} s are not the step's {record['step_time_s']} s")
    low, high = record["step_time_interval_s"]
    if not 0 <= low <= record["step_time_s"] <= high:
        raise AssertionError(f"the interval {low} to {high} misses the step {record['step_time_s']}")
    return "simulated"


def main(path: Path, count: int, seed: int) -> None:
    """Prints the outcomes, and for each mutation that broke something its number and how."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGPROF, _too_long)
    whole = path.read_bytes()
    body = b"".join(whole[f.start : f.end] for f in fields(whole))
    ways: list[Callable[[random.Random], bytes]] = [
        lambda chance: damage_bytes(whole, chance),
        lambda chance: b"".join(with_checksum([damage_bytes(body, chance)])),
        lambda chance: b"".join(with_checksum([damage_fields(body, chance)])),
        lambda chance: b"".join(with_checksum([damage_fields(body, chance)])),
    ]
    outcomes: Counter[str] = Counter({f"whole file {simulate(whole)}": 1})
    failures = []
    for number in range(count):
        data = ways[number % len(ways)](random.Random(f"{seed} {number}"))
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        try:
            outcomes[simulate(data)] += 1
        except BaseException as error:
            failures.append([number, f"{type(error).__name__}: {error}"])
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    print(json.dumps({"outcomes": outcomes, "failures": failures}))


def _too_long(*_: object) -> None:
    raise TimeoutError(f"more than {CPU_SECONDS} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
