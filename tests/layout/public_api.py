"""Writes down what other programs may import; `python tests/layout/public_api.py` renews the golden file."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

GOLDEN = Path(__file__).with_name("public_api.txt")
MODULES = (
    "echograph",
    "echograph.errors",
    "echograph.registry",
    "echograph.units",
    "echograph.ir.types",
    "echograph.ir.graph",
    "echograph.ir.builder",
    "echograph.ir.serde",
    "echograph.ir.text",
    "echograph.ir.unfold",
    "echograph.ir.verify",
    "echograph.ir.timeline",
    "echograph.ir.profile",
    "echograph.ir.passes",
    "echograph.ir.passes.annotate",
    "echograph.ir.passes.data_parallel",
    "echograph.ir.passes.fold",
    "echograph.ir.exporters.chrome",
    "echograph.frontend.pytorch.capture",
    "echograph.frontend.pytorch.lower",
    "echograph.frontend.pytorch.spec",
    "echograph.frontend.pytorch.step",
    "echograph.models",
    "echograph.profiler.costs",
    "echograph.simulator.simulate",
    "echograph.simulator.result",
    "echograph.simulator.host",
    "echograph.simulator.clusters",
    "echograph.simulator.collectives",
    "echograph.simulator.network",
    "echograph.simulator.engine",
)


def public_api() -> Iterator[str]:
    """Lines: each module's public functions and classes with their parameters, and the classes' members."""
    for path in MODULES:
        module = import_module(path)
        for name in sorted(_public_names(module)):
            yield from _describe(f"{path}.{name}", getattr(module, name))


def _public_names(module: ModuleType) -> list[str]:
    declared: list[str] | None = getattr(module, "__all__", None)
    if declared is not None:
        return list(declared)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (getattr(value, "__module__", None) == module.__name__ or (name.isupper() and name != "NONE"))
    ]


def _describe(path: str, value: Any) -> Iterator[str]:
    if inspect.isclass(value):
        yield f"class {path}"
        for name, member in sorted(vars(value).items()):
            if not name.startswith("_"):
                yield f"    {name}{_parameters(member)}"
    else:
        yield f"{path}{_parameters(value)}"


def _parameters(value: Any) -> str:
    function = getattr(value, "__func__", value)
    if not inspect.isfunction(function):
        return ""
    parameters = inspect.signature(function).parameters.values()
    shown = []
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in shown:
            shown.append("*")
        shown.append(parameter.name + ("" if parameter.default is parameter.empty else "=..."))
    return f"({', '.join(shown)})"


if __name__ == "__main__":
    GOLDEN.write_text("\n".join(public_api()) + "\n")
