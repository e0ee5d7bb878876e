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

sys.path.append(str(Path(__file__).parents[1] / "fuzz"))

from damage import damage_bytes, damage_message

from echograph.errors import EchoError
from echograph.ir.files import fields, with_checksum
from echograph.ir.serde import decode
from echograph.proto import workload_pb2 as pb
from echograph.workflow.predict import predict
from echograph.workflow.summary import summarize

MEMORY_BYTES = 2 * 2**30
CPU_SECONDS = 5.0


def simulate(data: bytes) -> str:
    """What `echoc show` and `echosim run` do with the bytes of a file; the outcome's name."""
    try:
        graph = decode(data)
    except EchoError:
        return "refused"
    json.dumps(summarize(graph), allow_nan=False)
    try:
        result, _ = predict(graph)
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
        lambda chance: b"".join(with_checksum([damage_message(pb.Graph.FromString(body), chance)])),
        lambda chance: b"".join(with_checksum([damage_message(pb.Graph.FromString(body), chance)])),
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
