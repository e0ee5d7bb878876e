"""Reading the traces of a job on a Ray cluster: for sets that are larger than one machine."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from echograph.errors import EchoError, MissingExtraError
from echograph.profiler.traces.kineto import read_trace
from echograph.profiler.traces.trace import Trace


def read_on_ray(files: Sequence[Path]) -> Iterator[Trace]:
    """The traces of some files, in their order, each read by a task of its own.

    The cluster is the one of `RAY_ADDRESS`, or this machine where there is none. Its workers need echograph and
    the files under the same paths; what comes back are the columns, a small part of a file.

    Args:
        files: one trace each.

    Raises:
        MissingExtraError: Ray is not installed.
        InputError: a file cannot be read, or is broken.
    """
    try:
        import ray
    except ImportError:
        raise MissingExtraError("Ray", "ray", "reading with the engine ray") from None
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    task = ray.remote(_attempt)
    for result in [task.remote(file.resolve()) for file in files]:
        found = ray.get(result)
        if isinstance(found, EchoError):
            raise found
        yield found


def _attempt(file: Path) -> Trace | EchoError:
    """The trace, or why there is none: an error that a task raises comes back with its traceback as its text."""
    try:
        return read_trace(file)
    except EchoError as error:
        return error
