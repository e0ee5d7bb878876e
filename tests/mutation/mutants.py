"""Small faults in source text: one operator or number changed, as a slip of the hand would."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COMPARED: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
COMPUTED: dict[type[ast.operator], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//", ast.Pow: "*",
    ast.BitAnd: "|", ast.BitOr: "&", ast.LShift: ">>", ast.RShift: "<<",
}  # fmt: skip
# What raises or says something, and what is read by people and tools that check types alone.
UNTOUCHED = (
    ast.Raise,
    ast.Assert,
    ast.JoinedStr,
    ast.Import,
    ast.ImportFrom,
    ast.TypeAlias if hasattr(ast, "TypeAlias") else ast.Raise,
)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault: `old` becomes `new` at bytes `start` to `stop` of a line-numbered place in a file."""

    path: Path
    line: int
    start: int
    stop: int
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: `{self.old}` -> `{self.new}`"

    def applied(self, source: bytes) -> bytes:
        """The source of the file with the fault in it."""
        return source[: self.start] + self.new.encode() + source[self.stop :]


def mutants_of(root: Path, path: Path) -> list[Mutant]:
    """Every mutant of a file of a checkout, in the order of its text."""
    source = (root / path).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def place(line: int, column: int) -> int:
        return starts[line - 1] + column

    found = []
    for node, start, stop, new in _faults(ast.parse(source)):
        begin, end = place(*start), place(*stop)
        old = source[begin:end].decode()
        if isinstance(node, ast.Compare | ast.BinOp | ast.BoolOp):
            # Between two operands stand the operator, spaces, and brackets that belong to the operands.
            operator = old.strip().strip("()").strip()
            begin += old.index(operator)
            end, old = begin + len(operator.encode()), operator
            if not old or "#" in old or "\n" in old:
                continue
        found.append(Mutant(path, source.count(b"\n", 0, begin) + 1, begin, end, old, new))
    return sorted(found, key=lambda m: (m.start, m.new))


Place = tuple[int, int]


def _faults(node: ast.AST) -> Iterator[tuple[ast.AST, Place, Place, str]]:
    if isinstance(node, UNTOUCHED):
        return
    yield from _of(node)
    for name, value in ast.iter_fields(node):
        if name in (
            "annotation",
            "returns",
            "decorator_list",
            "type_params",
            "bases",
            "keywords",
        ) and not isinstance(node, ast.Call):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_for_types(child):
                yield from _faults(child)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _end(node: ast.expr) -> Place:
    assert node.end_lineno is not None and node.end_col_offset is not None
    return node.end_lineno, node.end_col_offset


def _begin(node: ast.expr) -> Place:
    return node.lineno, node.col_offset


def _of(node: ast.AST) -> Iterator[tuple[ast.AST, Place, Place, str]]:
    match node:
        case ast.Compare():
            for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
                yield node, _end(left), _begin(right), COMPARED[type(op)]
        case ast.BinOp(op=op) if type(op) in COMPUTED and not _is_text(node):
            yield node, _end(node.left), _begin(node.right), COMPUTED[type(op)]
        case ast.BoolOp(op=op):
            other = "or" if isinstance(op, ast.And) else "and"
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield node, _end(left), _begin(right), other
        case ast.Constant(value=bool(value)):
            yield node, _begin(node), _end(node), str(not value)
        case ast.Constant(value=int(value)) | ast.Constant(value=float(value)):
            yield node, _begin(node), _end(node), repr(value + 1)
        case ast.UnaryOp(op=ast.Not()):
            yield node, _begin(node), _begin(node.operand), ""
        case ast.IfExp():
            yield node, _begin(node.test), _end(node.test), "True"
        case _:
            pass


def _is_text(node: ast.BinOp) -> bool:
    """Whether text is put together: what is said, not what is computed. Types joined with | are none either."""
    sides = [side for n in ast.walk(node) if isinstance(n, ast.BinOp) for side in (n.left, n.right)]
    return any(
        isinstance(s, ast.JoinedStr) or (isinstance(s, ast.Constant) and not isinstance(s.value, int | float))
        for s in sides
    )
