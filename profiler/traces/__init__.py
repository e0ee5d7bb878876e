"""Readers of profiler traces: files to columns.

`events` takes a file apart, `kineto` makes columns of its events, `folder` reads the files of a job and `cache`
keeps what was read. `relations` answers what most analyses ask of a trace: launches, stacks, steps.
"""

from echograph.profiler.traces.cache import cache_folder
from echograph.profiler.traces.folder import read_traces
from echograph.profiler.traces.kineto import read_trace
from echograph.profiler.traces.trace import Trace, TraceSet

__all__ = ["Trace", "TraceSet", "cache_folder", "read_trace", "read_traces"]
