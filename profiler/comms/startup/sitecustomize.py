"""Starts the tracer or the recorder in every Python process that `echoprof comms --` or `echoprof record --` runs.

Python imports this by its name, because the folder stands first in PYTHONPATH. Whatever `sitecustomize` it hides
is run as well; both begin once PyTorch has been imported. The tracer makes no file before the first collective,
the recorder none before its window is near.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_HERE = str(Path(__file__).parent)


def _run_hidden() -> None:
    elsewhere = [entry for entry in sys.path if entry != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _trace() -> None:
    from echograph import trace_collectives

    trace_collectives(os.environ["ECHOGRAPH_TRACE"], timeout_s=float(os.environ["ECHOGRAPH_TRACE_TIMEOUT_S"]))


def _record() -> None:
    from echograph import record

    record()


_WANTED = {"ECHOGRAPH_TRACE": _trace, "ECHOGRAPH_RECORD": _record}


def _begin() -> None:
    for variable, begin in _WANTED.items():
        if os.environ.get(variable):
            try:
                begin()
            except Exception as error:
                sys.stderr.write(f"echograph: the job is not traced or recorded: {error}\n")


class _AfterTorch:
    """Finds PyTorch as everybody would, and starts what is wanted once it is loaded."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_begin(module: ModuleType) -> None:
                load(module)
                _begin()

            spec.loader.exec_module = load_and_begin  # type: ignore[method-assign]
        return spec


_run_hidden()
if any(os.environ.get(variable) for variable in _WANTED):
    sys.meta_path.insert(0, _AfterTorch())
