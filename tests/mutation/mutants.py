"""Small faults in source text: one operator or number changed, as a slip of the hand would.

What cannot change a result by construction is not drawn, and counted by its reason (`LEFT_OUT`, `ARGUMENTS`):
what is raised or asserted, its text included; functions that return nothing but an error; annotations, but for the
bounds in them; and arguments that assert or document: `strict=True` of zip, `frozen=`, `slots=`, `kw_only=` and
`repr=` of classes and fields, `maxsize=` of caches. All else is, the text of names and of what is printed too.
"""

from __future__ import annotations

import ast
from collections.abc import Container, Iterator
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
SYMBOLS = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
    ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in",
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**",
    ast.BitAnd: "&", ast.BitOr: "|", ast.LShift: "<<", ast.RShift: ">>", ast.And: "and", ast.Or: "or",
}  # fmt: skip
SAID = "raised or asserted"
LEFT_OUT: dict[type[ast.AST], str] = {
    ast.Raise: SAID, ast.Assert: SAID, ast.Import: "imports", ast.ImportFrom: "imports",
}  # fmt: skip
ARGUMENTS = ("frozen", "slots", "kw_only", "repr", "maxsize")
TYPES = ("annotation", "returns", "type_params")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault: `old` becomes `new` at bytes `start` to `stop` of a line-numbered place in a file."""

    path: Path
    line: int
    start: int
    stop: int
    old: str
    new: str
    left_out: str = ""
    """Why it cannot change a result."""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: `{self.old}` -> `{self.new}`"

    def applied(self, source: bytes) -> bytes:
        """The source of the file with the fault in it."""
        return source[: self.start] + self.new.encode() + source[self.stop :]


def mutants_of(root: Path, path: Path) -> list[Mutant]:
    """Every mutant of a file of a checkout, in the order of its text, those that are left out as well."""
    source = (root / path).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def place(line: int, column: int) -> int:
        return starts[line - 1] + column

    found = []
    for node, start, stop, new, why in _faults(ast.parse(source), ""):
        begin, end = place(*start), place(*stop)
        old = source[begin:end].decode()
        if isinstance(node, ast.Compare | ast.BinOp | ast.BoolOp):
            # Between two operands stand the operator, spaces, and brackets that belong to the operands.
            operator = old.strip().strip("()").strip()
            begin += old.index(operator)
            end, old = begin + len(operator.encode()), operator
        # Older Pythons misplace what is in some f-strings.
        if old in _spelled(node):
            found.append(Mutant(path, source.count(b"\n", 0, begin) + 1, begin, end, old, new, why))
    return sorted(found, key=lambda m: (m.start, m.new))


def _spelled(node: ast.AST) -> Container[str]:
    """What may stand in the place of a fault of a node."""
    match node:
        case ast.Compare(ops=ops):
            return [SYMBOLS[type(op)] for op in ops]
        case ast.BinOp(op=op) | ast.BoolOp(op=op):
            return [SYMBOLS[type(op)]]
        case ast.UnaryOp():
            return ["not ", "not"]
        case ast.IfExp(test=test):
            return _Text(test)
    return _Text(node)


@dataclass(frozen=True, slots=True)
class _Text:
    """All texts of an expression."""

    node: ast.AST

    def __contains__(self, text: object) -> bool:
        try:
            return ast.dump(ast.parse(f"({text})", mode="eval").body) == ast.dump(self.node)
        except SyntaxError:
            return False


Place = tuple[int, int]


def _faults(node: ast.AST, why: str) -> Iterator[tuple[ast.AST, Place, Place, str, str]]:
    """The faults of a node and of what is in it, with the reason why they are left out, or ""."""
    why = why or LEFT_OUT.get(type(node), "") or _reason(node)
    for fault in _of(node):
        yield *fault, why
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _faults(child, _inherited(node, name, child, why))


def _reason(node: ast.AST) -> str:
    match node:
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return "types"
        case ast.FunctionDef(returns=ast.Name(id=name)) if name.endswith("Error") or name == "NoReturn":
            return SAID
        case ast.keyword(arg="strict", value=ast.Constant(value=True)):
            return "strict=True"
        case ast.keyword(arg=str(name)) if name in ARGUMENTS:
            return f"{name}="
    return ""


def _inherited(node: ast.AST, name: str, child: ast.AST, why: str) -> str:
    """The reason of a field of a node."""
    if name in TYPES:
        return why or "types"
    if why == "types" and isinstance(node, ast.Call):
        return ""  # bounds, which are checked when something is read
    required = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "_require"
    return why or (SAID if required and isinstance(child, ast.JoinedStr) else "")


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
