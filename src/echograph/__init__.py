"""Echograph: a compiler and simulator for distributed deep-learning training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echograph.profiler.comms.tracer import trace_collectives as trace_collectives
    from echograph.profiler.record.recorder import record as record

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Imported when asked for: importing echograph loads nothing else.
    if name == "trace_collectives":
        from echograph.profiler.comms.tracer import trace_collectives

        return trace_collectives
    if name == "record":
        from echograph.profiler.record.recorder import record

        return record
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
