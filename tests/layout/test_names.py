"""One concept, one name, one place: no public class or type alias is defined in two modules."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

NAMESPACE = Path(__file__).resolve().parents[2] / "src" / "echograph"


def defined(source: str) -> Iterator[str]:
    """The public classes and type aliases of a module; constants are spelt in capitals."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
        else:
            continue
        yield from (name for name in names if name[0].isupper() and not name.isupper())


def defined_twice(modules: Iterable[tuple[str, str]]) -> list[str]:
    """A line for each name that several modules define: the name, and where.

    Args:
        modules: name and source of each.
    """
    places = defaultdict(list)
    for module, source in modules:
        for name in dict.fromkeys(defined(source)):
            places[name].append(module)
    return [f"{name}: {', '.join(where)}" for name, where in sorted(places.items()) if len(where) > 1]


def sources() -> Iterator[tuple[str, str]]:
    """The project's modules, without those that are generated."""
    for top in sorted(NAMESPACE.iterdir()):
        for path in sorted(top.resolve().rglob("*.py")) if top.is_dir() else [top]:
            if path.suffix == ".py" and not path.stem.endswith("_pb2"):
                inside = path.relative_to(top.resolve()) if top.is_dir() else Path()
                yield (Path("echograph") / top.name / inside).as_posix(), path.read_text(encoding="utf-8")


def test_a_public_name_is_defined_once() -> None:
    assert defined_twice(sources()) == []


def test_the_rule_names_both_places() -> None:
    first = "class Plan: ...\nSIZE = 1\nT = int\n"
    second = "Plan = tuple[int, int]\nSIZE = 2\n_Row = int\n"
    assert defined_twice([("a", first), ("b", second), ("c", "import a\nplan = a.Plan\n")]) == ["Plan: a, b"]
