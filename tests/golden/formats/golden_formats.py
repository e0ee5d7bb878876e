"""What files written by hand may hold, and what is taken for what is left out, as it was when last looked at.

`python tests/golden/formats/golden_formats.py` writes `formats.json` anew: the JSON schemas of device, fabric and
cluster files (keys, bounds, defaults; whether other keys are refused), and the defaults of passes, of simulations
and of costs. Whoever has such a file, or leaves an option out, gets what stands here.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

import msgspec

from echograph.ir.passes import PASSES
from echograph.profiler import costs
from echograph.profiler.costs import DeviceProfile
from echograph.simulator.clusters import ClusterFile
from echograph.simulator.clusters.fabric import FILES
from echograph.simulator.goodput import Reliability
from echograph.simulator.host import IssueTimes
from echograph.simulator.memory import Memory, Runtime, largest_memory, memory
from echograph.simulator.memory.allocator import CachingAllocator
from echograph.simulator.ranks import EveryRank
from echograph.simulator.simulate import simulate

STORED = Path(__file__).parent / "formats.json"

SIMULATED: tuple[Callable[..., Any], ...] = (
    simulate, memory, largest_memory, Memory, Runtime, CachingAllocator, EveryRank, IssueTimes, Reliability,
)  # fmt: skip


def schemas() -> dict[str, Any]:
    """JSON schemas by kind of file."""
    kinds = {
        "device": DeviceProfile,
        "cluster": ClusterFile,
        **{f"{kind} fabric": of for kind, of in FILES.items()},
    }
    return {kind: msgspec.json.schema(of) for kind, of in kinds.items()}


def defaults() -> dict[str, Any]:
    """Arguments that may be left out, with what is taken for them, by what takes them."""
    asked: dict[str, Callable[..., Any]] = {
        **{f"pass {name}": PASSES[name] for name in PASSES},
        **{function.__name__: function for function in SIMULATED},
        **{f"cost {name}": getattr(costs, name) for name in costs.__all__ if not name[0].isupper()},
    }
    return {name: _defaults_of(takes) for name, takes in asked.items()}


def _defaults_of(takes: Callable[..., Any]) -> dict[str, str]:
    if is_dataclass(takes):
        made = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(takes)}
        return {name: _text(value) for name, value in made.items() if value is not MISSING}
    parameters = inspect.signature(takes).parameters.values()
    return {each.name: _text(each.default) for each in parameters if each.default is not each.empty}


def _text(value: Any) -> str:
    # What an enumeration's member is called stays, whatever Python shows of it.
    return str(getattr(value, "name", None) or repr(value))


def record() -> dict[str, Any]:
    """All that is written down."""
    return {"schemas": schemas(), "defaults": defaults()}


def _lines(of: dict[str, Any]) -> str:
    """An object of objects with each of them on a line of its own, any other on one."""
    if not of or not all(isinstance(value, dict) for value in of.values()):
        return json.dumps(of)
    return "{\n" + ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in of.items()) + "\n}"


if __name__ == "__main__":
    parts = []
    for part, kinds in record().items():
        lines = ",\n".join(f"{json.dumps(kind)}: {_lines(of)}" for kind, of in kinds.items())
        parts.append(f"{json.dumps(part)}: {{\n{lines}\n}}")
    STORED.write_text("{" + ",\n".join(parts) + "}\n")
