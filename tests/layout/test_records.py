"""Records that hold arrays, or that are linked, are compared by who they are, not by value.

Arrays have no one truth, and no hash; what is linked would be compared to the end of its chain.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import echograph

ARRAYS = {"Int32", "Int64", "Float64", "Bools", "FloatArray", "NDArray", "ndarray"}
ROOMS = ("simulator",)


def records() -> Iterator[type]:
    """The dataclasses of the rooms."""
    root = Path(echograph.__file__).parent
    for room in ROOMS:
        for path in sorted((root / room).resolve().rglob("*.py")):
            if "@dataclass" in path.read_text():
                parts = path.relative_to((root / room).resolve()).with_suffix("").parts
                name = ".".join(("echograph", *room.split("/"), *parts)).removesuffix(".__init__")
                module = import_module(name)
                its = [r for r in vars(module).values() if isinstance(r, type) and r.__module__ == name]
                yield from filter(dataclasses.is_dataclass, its)


def test_records_that_hold_arrays_or_each_other_are_not_compared_by_value() -> None:
    """Neither are those that hold such records, or others of their own."""
    every = {record.__name__: record for record in records()}
    apart = set(ARRAYS)
    for _ in every:
        held = {
            name: field.name
            for name, record in every.items()
            for field in dataclasses.fields(record)
            if field.compare and re.match(r"[\w.]+", str(field.type)) and _held(str(field.type)) & apart
        }
        if held.keys() <= apart:
            break
        apart |= held.keys()
    assert len(held) > 20
    wrong = {name: field for name, field in held.items() if every[name].__eq__ is not object.__eq__}
    assert wrong == {}, "give the dataclass eq=False, or the field compare=False"


def _held(annotation: str) -> set[str]:
    """Names of the types in an annotation, but for those of functions."""
    return set() if "Callable" in annotation else set(re.findall(r"\w+", annotation))
