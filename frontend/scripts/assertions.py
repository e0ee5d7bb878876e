"""What the text of a script tells where it asks for values: which way it goes on, and what it does with elements.

Which way it goes is told where the other way raises, ends the script, prints or counts: assertions, and branches
that do no more; where it asks whether a mask chooses anything, and takes what it chooses: that is all of it; where
it keeps what is better than the best so far: what comes is better; and where it scales by what it compares:
gradients are clipped. What leaves a loop, or a round of it, is a guess that is told: the loop goes on. So is what
puts something in a list: it is put there.

A script that trains goes on there, so what it asserts of values is taken to hold. Where exceptions are caught in
place, it may go either way.
"""

from __future__ import annotations

import ast
import dis
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
    span = _part_of(frame)
    return None if span is None else _required(frame.f_code.co_filename).required.get(span)


def guessed(frame: FrameType) -> bool:
    """Whether what `holds` says of a frame is a guess: of how often a loop goes round, or what a list holds."""
    span = _part_of(frame)
    return span is not None and span in _required(frame.f_code.co_filename).guesses


def looks_up(frame: FrameType) -> bool:
    """Whether a frame looks something up in a table: `words[index]`, `counts.get(index, 0)`."""
    span = _span_of(frame)
    return span is not None and span in _looked_up(frame.f_code.co_filename)


def is_kept(frame: FrameType) -> bool:
    """Whether a frame says which of two is better and keeps that for later: `is_best = acc > best`."""
    span = _span_of(frame)
    return span is not None and span in _required(frame.f_code.co_filename).kept


def goes_round(frame: FrameType) -> bool | None:
    """What the value that a frame asks for is where a loop (`while`) goes round; None: it is no loop's."""
    span = _part_of(frame)
    return None if span is None else _required(frame.f_code.co_filename).rounds.get(span)


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


def _part_of(frame: FrameType) -> _Span | None:
    """What of its file's text a frame is at; of a condition, the part of it."""
    span = _span_of(frame)
    parts = None if span is None else _required(frame.f_code.co_filename).parts.get(span)
    return parts[_place(frame, span) % len(parts)] if parts and span is not None else span


def _place(frame: FrameType, span: _Span) -> int:
    """At which part of its condition a branch is: the interpreter says of each that it is the whole statement."""
    before = islice(dis.get_instructions(frame.f_code), frame.f_lasti)
    return sum(
        at.offset < frame.f_lasti
        and "_IF_" in at.opname
        and at.positions is not None
        and tuple(at.positions) == span
        for at in before
    )


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
def _looked_up(file: str) -> frozenset[_Span]:
    """What is looked up in a file."""
    nodes = list(ast.walk(_tree(file)))
    gets = (node for node in nodes if isinstance(node, ast.Call) and _name(node) in ("get", "setdefault", "add"))
    return frozenset(map(_span, [*(node for node in nodes if isinstance(node, ast.Subscript)), *gets]))


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
def _required(file: str) -> _Raising:
    """Places in a file (first and last line, first and last column) and what is to be true there."""
    found = _Raising()
    found.visit(_tree(file))
    return found


class _Raising(ast.NodeVisitor):
    """Finds conditions that raise, print or count where they are not met, or ask whether a mask chooses any."""

    def __init__(self) -> None:
        self.required: dict[_Span, bool] = {}
        self.parts: dict[_Span, list[_Span]] = {}
        self.rounds: dict[_Span, bool] = {}
        self.guesses: set[_Span] = set()
        self.kept: set[_Span] = set()
        self._caught = 0
        self._loops: list[type[ast.stmt]] = []
        self._within: list[ast.stmt] = []

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """What a function asks of a mask goes by what it takes with it."""
        before = self._within, self._loops
        self._within, self._loops = node.body, []
        self.generic_visit(node)
        self._within, self._loops = before

    def visit_Assert(self, node: ast.Assert) -> None:
        """It raises unless its test is true."""
        self._branch(node, node.test)
        if not self._caught:
            self._add(node.test, True)
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        """It raises, prints or counts if its test is true, or takes what is there, or what is better."""
        plain = all(isinstance(part, ast.Expr | ast.Assign | ast.AugAssign) for part in node.body[:-1])
        self._ask(node, [node])
        if (best := _better(node)) is not None:
            self._add(best, True)
        if _ordered(node.test) and not node.orelse and _scales(node.body, _ordered(node.test)):
            self._add(node.test, True)
        raises = plain and isinstance(node.body[-1], ast.Raise) and not self._caught
        if raises or (plain and _exits(node.body[-1])) or (all(map(_tells, node.body)) and not node.orelse):
            self._add(node.test, False)
        elif self._goes_on(node.body):
            self._guess(node.test, False)
        elif all(map(_gathers, [*node.body, *node.orelse])) and not all(map(_idles, node.body)):
            self._guess(node.test, True)
        self.generic_visit(node)

    def _goes_on(self, body: list[ast.stmt]) -> bool:
        """Whether statements do no more than leave a loop of so many rounds, or a round of any."""
        leaves = isinstance(body[-1], ast.Continue) or (
            isinstance(body[-1], ast.Break) and self._loops[-1:] == [ast.For]
        )
        return leaves and all(isinstance(part, ast.Expr) or _sets(part) for part in body[:-1])

    def _guess(self, test: ast.expr, wanted: bool) -> None:
        for part, value in _parts(test, wanted):
            if _span(part) not in self.required:
                self.required[_span(part)] = value
                self.guesses.add(_span(part))

    def visit_For(self, node: ast.For) -> None:
        """It goes round as often as there is something."""
        self._loops.append(ast.For)
        self.generic_visit(node)
        self._loops.pop()

    def visit_While(self, node: ast.While) -> None:
        """It goes round while its test is true."""
        self._branch(node, node.test)
        self.rounds |= {_span(part): value for part, value in _parts(node.test, True)}
        self._loops.append(ast.While)
        self.generic_visit(node)
        self._loops.pop()

    def visit_IfExp(self, node: ast.IfExp) -> None:
        """It takes what is there."""
        self._ask(node, [])
        self.generic_visit(node)

    def _ask(self, branch: ast.If | ast.IfExp, alone: list[ast.stmt]) -> None:
        """A mask of which it is asked whether it chooses anything, and that takes elements there, does."""
        within = self._within or alone
        self._branch(branch, branch.test)
        for part, _ in _parts(branch.test, True):
            mask, some = _asked_of(part, within)
            if mask is not None and _chooses(within, mask):
                self.required[_span(part)] = some

    def visit_Module(self, node: ast.Module) -> None:
        """What is better than the best so far, which is kept by `max` or `min`: `is_best = acc > best`."""
        parts = [part for part in ast.walk(node) if isinstance(part, ast.Assign)]
        best = {of for part in parts if (of := _best_of(part))}
        for part in parts:
            if best and _ordered(part.value) in best:
                self.required.setdefault(_span(part.value), True)
                self.kept.add(_span(part.value))
        self.generic_visit(node)

    def visit_Try(self, node: ast.Try) -> None:
        """What is raised within may be caught."""
        self._caught += bool(node.handlers)
        for within in node.body:
            self.visit(within)
        self._caught -= bool(node.handlers)
        for part in (*node.handlers, *node.orelse, *node.finalbody):
            self.visit(part)

    def _add(self, test: ast.expr, wanted: bool) -> None:
        self.required |= {_span(part): value for part, value in _parts(test, wanted)}

    def _branch(self, statement: ast.stmt | ast.IfExp, test: ast.expr) -> None:
        self.parts[_span(statement)] = [_span(part) for part, _ in _parts(test, True)]


def _better(node: ast.If) -> ast.expr | None:
    """Where a branch keeps what is better than the best so far (`if loss < best: best = loss`), what it asks."""
    kept = _kept(node.body)
    tests = node.test.values if isinstance(node.test, ast.BoolOp) else [node.test]
    return next((test for test in tests if _ordered(test) in kept), None)


def _scales(body: list[ast.stmt], compared: frozenset[str]) -> bool:
    """Whether statements do no more than multiply in place by what was compared: gradients that are clipped.

    `if coef < 1: for p in parameters: p.grad.mul_(coef)`, `if norm > most: g *= most / norm`.
    """
    ends = [part for part in body if not isinstance(part, ast.For | ast.If)]
    within = [part for part in body if isinstance(part, ast.For | ast.If)]
    if any(part.orelse or not _scales(part.body, compared) for part in within):
        return False
    by = [_factor(part) for part in ends]
    return bool(within or ends) and all(one is not None and _names(one) & compared for one in by)


def _names(value: ast.expr) -> set[str]:
    """Parts of an expression but for numbers, as they are written."""
    parts = (part for part in ast.walk(value) if isinstance(part, ast.expr) and not isinstance(part, ast.Constant))
    return {ast.unparse(part) for part in parts}


def _factor(statement: ast.stmt) -> ast.expr | None:
    """By what a statement multiplies in place; None where it does something else."""
    if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Mult):
        return statement.value
    call = statement.value if isinstance(statement, ast.Expr) else None
    scales = isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in _SCALING
    return call.args[-1] if scales and isinstance(call, ast.Call) and call.args else None


_SCALING = ("mul_", "_foreach_mul_")


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
    if not isinstance(call, ast.Call) or len(call.args) != 2 or not _is_called(call.func, "max", "min"):
        return frozenset()
    two = frozenset(map(ast.unparse, call.args))
    return two if ast.unparse(statement.targets[0]) in two else frozenset()


def _is_called(name: ast.expr, *names: str) -> bool:
    return isinstance(name, ast.Name) and name.id in names


def _ordered(test: ast.expr) -> frozenset[str]:
    """The two sides of a comparison that says which is more; none where it is another expression."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], _ORDER):
        return frozenset()
    return frozenset(map(ast.unparse, (test.left, test.comparators[0])))


_ORDER = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def _asked_of(test: ast.expr, within: list[ast.stmt]) -> tuple[ast.expr | None, bool]:
    """The mask of which a condition asks whether it chooses anything, and what the condition is if it does.

    `mask.any()`, `mask.sum() > 0`, `torch.count_nonzero(mask) == 0`; or a name that one of these was given.
    """
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        kind, bound = type(test.ops[0]), test.comparators[0]
        some = _SOME.get((kind, bound.value)) if isinstance(bound, ast.Constant) else None
        return (None, True) if some is None else (_reduced(test.left, within), some)
    return _reduced(test, within), True


_SOME: dict[tuple[type[ast.cmpop], object], bool] = {
    (ast.Gt, 0): True, (ast.NotEq, 0): True, (ast.GtE, 1): True, (ast.Eq, 0): False, (ast.Lt, 1): False,
    (ast.LtE, 0): False,
}  # fmt: skip


def _reduced(call: ast.expr, within: list[ast.stmt]) -> ast.expr | None:
    """The mask of which something counts what it chooses, or asks whether that is anything."""
    if isinstance(call, ast.Name):
        parts = (part for statement in within for part in ast.walk(statement) if isinstance(part, ast.Assign))
        given = [part.value for part in parts if _is_called(part.targets[0], call.id)]
        return None if len(given) != 1 or isinstance(given[0], ast.Name) else _reduced(given[0], [])
    if not isinstance(call, ast.Call):
        return None
    if isinstance(call.func, ast.Name) and call.func.id in ("bool", "float", "int") and len(call.args) == 1:
        return _reduced(call.args[0], within)
    if not isinstance(call.func, ast.Attribute) or call.keywords:
        return None
    if call.func.attr in ("item", "long", "float", "int", "cpu", "detach") and not call.args:
        return _reduced(call.func.value, within)
    if call.func.attr not in ("any", "sum", "count_nonzero"):
        return None
    if ast.unparse(call.func.value) == "torch":
        return call.args[0] if len(call.args) == 1 else None
    return None if call.args else call.func.value


def _chooses(body: list[ast.stmt], mask: ast.expr) -> bool:
    """Whether statements take, or write to, elements by a mask: `x[mask]`, `x[:, mask] = 0`, `masked_select`."""
    index = ast.dump(mask)
    parts = [part for statement in body for part in ast.walk(statement)]
    indices = [part.slice for part in parts if isinstance(part, ast.Subscript)]
    by = [one for at in indices for one in (at.elts if isinstance(at, ast.Tuple) else [at])]
    by += [one for part in parts if isinstance(part, ast.Call) and _selects(part) for one in part.args]
    return any(ast.dump(one) == index for one in by)


def _selects(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == "masked_select"


_PLAIN = ("int", "str", "float", "chr", "len", "round", "tuple", "list", "min", "max", "abs", "item", "join")
_GATHERING = ("append", "add", "extend")


def _gathers(statement: ast.stmt) -> bool:
    """Whether a statement does no more than put what is there in a list or a set, or remember it."""
    if _tells(statement) or _idles(statement):
        return True
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    call = statement.value
    calls = [part for given in call.args for part in ast.walk(given) if isinstance(part, ast.Call)]
    return _name(call) in _GATHERING and all(_name(part) in _PLAIN for part in calls)


def _sets(statement: ast.stmt) -> bool:
    """Whether a statement gives a name a constant."""
    return isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant)


def _idles(statement: ast.stmt) -> bool:
    """Whether a statement does nothing, or remembers a constant."""
    return isinstance(statement, ast.Pass) or _sets(statement)


def _exits(statement: ast.stmt) -> bool:
    """Whether a statement ends the script: `sys.exit(1)`."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and _name(call) in ("exit", "_exit", "quit")


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


_PRINTING = ("print", "debug", "info", "warn", "warning", "error", "critical", "exception")


def _tells(statement: ast.stmt) -> bool:
    """Whether a statement does no more than print, write a line of a log, or count: `clipped += 1`."""
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name | ast.Attribute):
        by = statement.value
        return isinstance(statement.op, ast.Add) and isinstance(by, ast.Constant) and isinstance(by.value, int)
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call):
        return False
    calls = (part for given in (*call.args, *call.keywords) for part in ast.walk(given))
    return _name(call) in _PRINTING and not any(isinstance(part, ast.NamedExpr | ast.Await) for part in calls)


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
