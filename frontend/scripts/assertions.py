"""What the text of a script tells where it asks for values: which way it goes on, and what it does with elements.

Which way it goes is told where the other way raises or prints: assertions, and branches that do no more; where it
asks whether a mask chooses anything, and takes what it chooses: that is all of it; and where it keeps what is
better than the best so far: what comes is better.

A script that trains goes on there, so what it asserts of values is taken to hold. Where exceptions are caught in
place, it may go either way.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from functools import cache
from itertools import islice
from types import FrameType

_Span = tuple[int | None, int | None, int | None, int | None]


def holds(frame: FrameType) -> bool | None:
    """What the value that a frame asks for must be, true or false, for the script to go on; None: either will do.

    Args:
        frame: that is about to branch, or to compare what it branches by.
    """
    span = _span_of(frame)
    return None if span is None else _required(frame.f_code.co_filename).get(span)


def extreme(frame: FrameType) -> str:
    """Whether a frame is in a call of `max` or `min`, which compares to choose a number: its name; "": neither."""
    span = _span_of(frame)
    return "" if span is None else _extremes(frame.f_code.co_filename).get(span, "")


def writes_back(frame: FrameType) -> bool:
    """Whether a frame reads elements that its statement writes: `nearest[mask] = found[mask]`, `x[mask] += 1`."""
    span = _span_of(frame)
    return span is not None and span in _written_back(frame.f_code.co_filename)


def bounded(frame: FrameType) -> bool:
    """Whether a frame holds a number against two bounds: `0 <= action < self.n`."""
    span = _span_of(frame)
    return span is not None and span in _bounded(frame.f_code.co_filename)


def _span_of(frame: FrameType) -> _Span | None:
    """What of its file's text a frame is at."""
    return next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), None)


@cache
def _tree(file: str) -> ast.Module:
    """A file as Python reads it; nothing where it is no source."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ast.Module([], [])


@cache
def _bounded(file: str) -> frozenset[_Span]:
    """Comparisons of a file with a lower and an upper bound."""
    compared = (node for node in ast.walk(_tree(file)) if isinstance(node, ast.Compare) and len(node.ops) == 2)
    return frozenset(_span(node) for node in compared if all(isinstance(op, ast.Lt | ast.LtE) for op in node.ops))


@cache
def _written_back(file: str) -> frozenset[_Span]:
    """Elements that are read in a file, where the statement assigns to those of the same index."""
    found: list[ast.expr] = []
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.AugAssign):
            found.append(node.target)
        written = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(node, ast.Assign) and isinstance(written, ast.Subscript):
            index = ast.dump(written.slice)
            read = (part for part in ast.walk(node.value) if isinstance(part, ast.Subscript))
            found += [part for part in read if ast.dump(part.slice) == index]
    return frozenset(map(_span, found))


@cache
def _extremes(file: str) -> dict[_Span, str]:
    """Calls of `max` and `min` in a file."""
    calls = (node for node in ast.walk(_tree(file)) if isinstance(node, ast.Call))
    named = ((call, call.func.id) for call in calls if isinstance(call.func, ast.Name))
    return {_span(call): name for call, name in named if name in ("max", "min")}


@cache
def _required(file: str) -> dict[_Span, bool]:
    """Places in a file (first and last line, first and last column) and what is to be true there."""
    found = _Raising()
    found.visit(_tree(file))
    return found.required


class _Raising(ast.NodeVisitor):
    """Finds conditions that raise or print when they are not met, or ask whether a mask chooses anything."""

    def __init__(self) -> None:
        self.required: dict[_Span, bool] = {}
        self._caught = 0

    def visit_Assert(self, node: ast.Assert) -> None:
        """It raises unless its test is true."""
        if not self._caught:
            self._add(node, node.test, True)

    def visit_If(self, node: ast.If) -> None:
        """It raises or prints if its test is true, or takes what is there, or what is better."""
        plain = all(isinstance(part, ast.Expr | ast.Assign | ast.AugAssign) for part in node.body[:-1])
        if (mask := _asked_of(node.test)) is not None and _chooses(node.body, mask):
            self._add(node, node.test, True)
        if (best := _better(node)) is not None:
            self._add(node, best, True)
        raises = plain and isinstance(node.body[-1], ast.Raise) and not self._caught
        if raises or (all(map(_prints, node.body)) and not node.orelse):
            self._add(node, node.test, False)
        self.generic_visit(node)

    def visit_Module(self, node: ast.Module) -> None:
        """What is better than the best so far, which is kept by `max` or `min`: `is_best = acc > best`."""
        parts = [part for part in ast.walk(node) if isinstance(part, ast.Assign)]
        best = {of for part in parts if (of := _best_of(part))}
        for part in parts:
            if best and _ordered(part.value) in best:
                self.required.setdefault(_span(part.value), True)
        self.generic_visit(node)

    def visit_Try(self, node: ast.Try) -> None:
        """What is raised within may be caught."""
        self._caught += bool(node.handlers)
        for within in node.body:
            self.visit(within)
        self._caught -= bool(node.handlers)
        for part in (*node.handlers, *node.orelse, *node.finalbody):
            self.visit(part)

    def _add(self, statement: ast.stmt, test: ast.expr, wanted: bool) -> None:
        parts = {_span(part): value for part, value in _parts(test, wanted)}
        self.required |= parts
        # Where a branch is said to be is up to the interpreter: at its part of the condition, or at the statement.
        if len(set(parts.values())) == 1:
            self.required[_span(statement)] = next(iter(parts.values()))


def _better(node: ast.If) -> ast.expr | None:
    """Where a branch keeps what is better than the best so far (`if loss < best: best = loss`), what it asks."""
    kept = _kept(node.body)
    tests = node.test.values if isinstance(node.test, ast.BoolOp) else [node.test]
    return next((test for test in tests if _ordered(test) in kept), None)


def _kept(body: list[ast.stmt]) -> set[frozenset[str]]:
    """What statements put in place of what, by name."""
    assigned = (part for part in body if isinstance(part, ast.Assign))
    pairs = (pair for part in assigned for target in part.targets for pair in _apart(target, part.value))
    return {frozenset(map(ast.unparse, pair)) for pair in pairs}


def _apart(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """`best, bad = loss, 0` as two."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return list(zip(target.elts, value.elts, strict=False))
    return [(target, value)]


def _best_of(statement: ast.Assign) -> frozenset[str]:
    """Of `best = max(acc, best)`, the two; none of another statement."""
    call = statement.value
    if not isinstance(call, ast.Call) or len(call.args) != 2 or ast.unparse(call.func) not in ("max", "min"):
        return frozenset()
    two = frozenset(map(ast.unparse, call.args))
    return two if ast.unparse(statement.targets[0]) in two else frozenset()


def _ordered(test: ast.expr) -> frozenset[str]:
    """The two sides of a comparison that says which is more; none where it is another expression."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], _ORDER):
        return frozenset()
    return frozenset(map(ast.unparse, (test.left, test.comparators[0])))


_ORDER = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def _asked_of(test: ast.expr) -> ast.expr | None:
    """The mask of which a condition asks whether it chooses anything: `mask.any()`, `mask.sum() > 0`."""
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Gt):
        zero = test.comparators[0]
        return _reduced(test.left, "sum") if isinstance(zero, ast.Constant) and zero.value == 0 else None
    return _reduced(test, "any")


def _reduced(call: ast.expr, by: str) -> ast.expr | None:
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return None
    if call.func.attr == "item" and not call.args:
        return _reduced(call.func.value, by)
    if call.func.attr != by or call.keywords:
        return None
    return call.func.value if not call.args else call.args[0] if ast.unparse(call.func.value) == "torch" else None


def _chooses(body: list[ast.stmt], mask: ast.expr) -> bool:
    """Whether statements take elements by a mask."""
    index = ast.dump(mask)
    parts = (part for statement in body for part in ast.walk(statement) if isinstance(part, ast.Subscript))
    return any(isinstance(part.ctx, ast.Load) and ast.dump(part.slice) == index for part in parts)


_PRINTING = ("print", "debug", "info", "warn", "warning", "error", "critical", "exception")


def _prints(statement: ast.stmt) -> bool:
    """Whether a statement prints, or writes a line of a log, of what is there."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call):
        return False
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    calls = (part for given in (*call.args, *call.keywords) for part in ast.walk(given))
    return name in _PRINTING and not any(isinstance(part, ast.NamedExpr | ast.Await) for part in calls)


def _parts(test: ast.expr, wanted: bool) -> Iterator[tuple[ast.expr, bool]]:
    """Parts of a condition, and what makes the whole of it as wanted if it is true of each."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _parts(test.operand, not wanted)
    elif isinstance(test, ast.BoolOp):
        for part in test.values:
            yield from _parts(part, wanted)
    else:
        yield test, wanted


def _span(node: ast.expr | ast.stmt) -> _Span:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset
