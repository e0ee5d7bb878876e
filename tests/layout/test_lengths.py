"""A function does one thing, and is read without scrolling."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("benchmarks", "examples", "frontend", "ir", "models", "profiler", "simulator", "src", "tests")
MOST_LINES = 60
"""Of a function's body, without its signature and its docstring: both may be as long as they have to be."""


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from the first statement behind the docstring to the last."""
    first, *rest = function.body
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    body = rest if is_docstring else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """A node and the statements within it; no expressions, which hold no function and are most of a tree."""
    yield node
    for part in ("body", "orelse", "finalbody", "handlers", "cases"):
        within = getattr(node, part, None)
        for one in within if isinstance(within, list) else ():
            yield from statements(one)


def too_long(name: str, source: str) -> Iterator[str]:
    """A line for each function of a module whose body is over the limit."""
    if source.count("\n") <= MOST_LINES:
        return
    for node in statements(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and body_lines(node) > MOST_LINES:
            yield f"{name}:{node.lineno} {node.name}: {body_lines(node)} lines"


def test_no_function_is_longer_than_a_screen() -> None:
    sources = (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))
    written = (path for path in sources if not path.stem.endswith("_pb2") and path.parent.name != "out")
    assert [line for path in written for line in too_long(str(path.relative_to(ROOT)), path.read_text())] == []


def test_a_body_is_counted_without_signature_and_docstring() -> None:
    head = "def f(\n    a,\n    b,\n):\n    '''One.\n\n    Two.\n    '''\n"
    assert list(too_long("m.py", head)) == []
    assert list(too_long("m.py", head + "    a\n" * 60)) == []
    assert list(too_long("m.py", head + "    a\n" * 61)) == ["m.py:1 f: 61 lines"]


def test_functions_are_found_wherever_they_stand() -> None:
    long = [f"{{0}}{line}" for line in ("def f():", *["    a"] * 61)]
    for around in ("if x:", "class C:", "for a in b:", "with a:", "def g():", "match a:\n case 1:"):
        text = "\n".join([around, *(line.format("  ") for line in long)])
        assert any("f: 61 lines" in found for found in too_long("m.py", text)), around
    for lines in (
        ["try:", "  a", "except A:", *long],
        ["if x:", "  a", "else:", *long],
        ["try:", "  a", "finally:", *long],
    ):
        assert list(too_long("m.py", "\n".join(line.format("  ") for line in lines))), lines[0]
