"""What a pass is, and how passes run: one after the other, verified in between, written down in the graph.

Lists of passes as text: `tensor_parallel{size=8} pipeline{stages=4,micro_batches=8}`.

A pass is a name of `PASSES`, or `module:Class` for one that stands elsewhere. Its options are the fields of its
dataclass, read by their types: numbers, `true` and `false`, words, `none`, tuples `(10,12,10)`, and mappings
`(*.up:colwise,*.down:rowwise)`. A text with spaces, or with signs of this syntax in it, stands in double quotes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from enum import Enum
from functools import cache
from importlib import import_module
from math import isfinite
from types import NoneType, UnionType
from typing import (
    Any,
    ClassVar,
    Literal,
    NoReturn,
    Protocol,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    overload,
    runtime_checkable,
)

from echograph.errors import PlanError, UnknownNameError, UsageError
from echograph.ir.graph import Graph, JobGraph, StepGraph
from echograph.ir.passes import PASSES
from echograph.ir.verify import verify as check

Note = Callable[[str], object]
"""Told what a pass could not do, one line each."""
G = TypeVar("G", bound=Graph)
_LEVELS = {StepGraph: "a step graph", JobGraph: "a job graph"}


class Pass(Protocol):
    """Graph in, graph out: a frozen dataclass whose fields are its options.

    The annotations of `__call__` say whether it takes, and leaves, a step or a job.

    Attributes:
        name: its word in lists of passes; that of `PASSES` where it stands there.
    """

    name: ClassVar[str]

    def __call__(self, graph: Any, /) -> Any:
        """The graph transformed; the one given stays as it is."""
        ...


@runtime_checkable
class NotingPass(Pass, Protocol):
    """A pass that can say what it could not do."""

    def with_notes(self, graph: Any, /) -> tuple[Any, Sequence[str]]:
        """What `__call__` returns, and one line for each note."""
        ...


@overload
def run(
    graph: Graph, passes: Iterable[Pass], *, to: None = None, verify: bool = True, note: Note | None = None
) -> StepGraph | JobGraph: ...
@overload
def run(
    graph: Graph, passes: Iterable[Pass], *, to: type[G], verify: bool = True, note: Note | None = None
) -> G: ...
def run(
    graph: Graph,
    passes: Iterable[Pass],
    *,
    to: type[Graph] | None = None,
    verify: bool = True,
    note: Note | None = None,
) -> Graph:
    """Applies passes in order; `Graph.passes` of the result lists them with their options.

    Args:
        graph: a step or a job.
        passes: what to apply.
        to: the level that they have to leave; None: either.
        verify: check every invariant after each of them. `GraphBuilder.build` has done so already for passes that
            use it.
        note: told what passes could not do.

    Raises:
        PlanError: a pass does not fit the graph, or the level that the ones before it left.
        GraphError: a pass left a graph that breaks an invariant.
    """
    for one in passes:
        _check_level(one, graph)
        if note is not None and isinstance(one, NotingPass):
            made, lines = one.with_notes(graph)
            for line in lines:
                note(line)
        else:
            made = one(graph)
        if not isinstance(made, Graph):
            raise PlanError(f"pass {one.name}: returned {type(made).__name__}: it has to return the graph")
        graph = replace(made, passes=(*graph.passes, pass_text(one)))
        if verify:
            check(graph)
    if to is JobGraph and not isinstance(graph, to):
        raise PlanError("the passes leave a step graph: end them with one such as data_parallel{replicas=8}")
    if to is StepGraph and not isinstance(graph, to):
        raise PlanError("the passes leave a job graph: leave out pipeline, data_parallel and fully_shard")
    return graph


def split_at_job(passes: Sequence[Pass]) -> tuple[tuple[Pass, ...], tuple[Pass, ...]]:
    """The passes that leave a step a step, and those from the first on that makes a job of it."""
    jobs = [at for at, one in enumerate(passes) if _levels(type(one), "return") == {JobGraph}]
    first = jobs[0] if jobs else len(passes)
    return tuple(passes[:first]), tuple(passes[first:])


def _check_level(one: Pass, graph: Graph) -> None:
    takes = _levels(type(one), "graph")
    if type(graph) in takes:
        return
    where = (
        "put it before the pass that makes a job of the step"
        if takes == {StepGraph}
        else "put pipeline, data_parallel or fully_shard before it"
    )
    raise PlanError(
        f"pass {one.name}: takes {_LEVELS[next(iter(takes))]}, and has {_LEVELS[type(graph)]} here: {where}"
    )


@cache
def _levels(kind: type[Pass], what: str) -> frozenset[type[Graph]]:
    """The kinds of graph that a pass says it takes ("graph") or leaves ("return"); both where it does not say."""
    hint = get_type_hints(kind.__call__).get(what, Graph)
    kinds = get_args(hint) or (hint.__bound__ if isinstance(hint, TypeVar) else hint,)
    return frozenset(level for level in _LEVELS if any(issubclass(level, kind) for kind in kinds))


_NAME = re.compile(r"[\w.]+(?::[\w.]+)?")
_KEY = re.compile(r"\w+")
_BARE = re.compile(r"[^\s,{}()=:\"]+")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_SPACE = re.compile(r"\s*")
_WORDS = {int: "a whole number", float: "a number", str: "a text"}

OptionValue = str | list[str] | dict[str, str] | None
"""A word, what stands in parentheses, or the bare word `none`."""


def parse_passes(text: str) -> tuple[Pass, ...]:
    """The passes that a text lists.

    Raises:
        UnknownNameError: no such pass, option or choice; names the nearest.
        UsageError: a value is of another type, an option is missing or stands twice, or the text is no list.
    """
    return _Reader(text).passes()


def pass_text(one: Pass) -> str:
    """A pass with those of its options that differ from their defaults, as `parse_passes` reads it."""
    own: type = type(one)
    known = one.name in PASSES and PASSES[one.name] is own
    name = one.name if known else f"{own.__module__}:{own.__qualname__}"
    options = [f"{f.name}={_said(value)}" for f in _options(one) if (value := getattr(one, f.name)) != _default(f)]
    return f"{name}{{{','.join(options)}}}" if options else name


def _options(one: Any) -> list[Field[Any]]:
    return [f for f in fields(one) if f.init]


def _default(option: Field[Any]) -> Any:
    return option.default if option.default_factory is MISSING else option.default_factory()


def _said(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Enum):
        return value.name.lower()
    if isinstance(value, Mapping):
        return f"({','.join(f'{_said(k)}:{_said(v)}' for k, v in value.items())})"
    if isinstance(value, tuple):
        return f"({','.join(map(_said, value))})"
    text = str(value)
    return text if _BARE.fullmatch(text) and text != "none" and text.isascii() else json.dumps(text)


class _Reader:
    """Reads a list of passes from left to right."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def passes(self) -> tuple[Pass, ...]:
        found = []
        while self._skip() < len(self.text):
            found.append(self._pass())
        if not found:
            raise UsageError("passes: the list is empty: give names of passes, as tensor_parallel{size=8}")
        return tuple(found)

    def _pass(self) -> Pass:
        name = self._match(_NAME, "the name of a pass")
        given: dict[str, OptionValue] = {}
        if self._has("{"):
            while not self._has("}"):
                key = self._match(_KEY, f"an option of {name}, or }}")
                if key in given:
                    raise UsageError(f"pass {name}: option {key} stands twice: give it once")
                self._take("=")
                given[key] = self._value()
                if not self._has(",") and not self.text.startswith("}", self._skip()):
                    self._fail("a comma or }")
        return _made(name, given)

    def _value(self) -> OptionValue:
        if not self._has("("):
            quoted = self.text.startswith('"', self._skip())
            word = self._word()
            return None if word == "none" and not quoted else word
        items: list[str] = []
        said: dict[str, str] = {}
        while not self._has(")"):
            word = self._word()
            if self._has(":"):
                said[word] = self._word()
            else:
                items.append(word)
            if items and said:
                self._fail("either values or pairs")
            if not self._has(",") and not self.text.startswith(")", self._skip()):
                self._fail("a comma or )")
        return said or items

    def _word(self) -> str:
        if not self.text.startswith('"', self._skip()):
            return self._match(_BARE, "a value")
        start, quoted = self.at, self._match(_QUOTED, "a text in quotes")
        try:
            return str(json.loads(quoted))
        except ValueError:
            self.at = start
            self._fail("a text in quotes")

    def _skip(self) -> int:
        space = _SPACE.match(self.text, self.at)
        self.at = space.end() if space else self.at
        return self.at

    def _has(self, sign: str) -> bool:
        found = self.text.startswith(sign, self._skip())
        self.at += len(sign) * found
        return found

    def _take(self, sign: str) -> None:
        if not self._has(sign):
            self._fail(sign)

    def _match(self, pattern: re.Pattern[str], what: str) -> str:
        found = pattern.match(self.text, self._skip())
        if found is None:
            self._fail(what)
        self.at = found.end()
        return found[0]

    def _fail(self, what: str) -> NoReturn:
        rest = self.text[self.at : self.at + 20]
        raise UsageError(
            f"passes: {what} should stand at {rest!r}" if rest else f"passes: {what} is missing at the end"
        )


def _made(name: str, given: Mapping[str, OptionValue]) -> Pass:
    """A pass by its name and what is said of its options."""
    kind = _elsewhere(name) if ":" in name else PASSES[name]
    hints = get_type_hints(kind)
    known = {f.name: f for f in _options(kind)}
    values = {}
    for key, value in given.items():
        if key not in known:
            raise UnknownNameError(f"option of pass {name}", key, known)
        values[key] = _read(hints[key], value, f"pass {name}: {key}")
    missing = [key for key, f in known.items() if key not in values and _default(f) is MISSING]
    if missing:
        shown = ",".join(f"{key}=..." for key in missing)
        raise UsageError(f"pass {name}: has no {' and no '.join(missing)}: give {name}{{{shown}}}")
    made: Pass = kind(**values)
    return made


def _elsewhere(target: str) -> Any:
    """A pass that no table has: `module:Class`."""
    module, _, attribute = target.partition(":")
    try:
        kind = getattr(import_module(module), attribute)
    except ImportError as error:
        raise UsageError(f"pass {target}: {error}: put the folder of {module} on PYTHONPATH") from None
    except AttributeError:
        raise UsageError(f"pass {target}: module {module} has no {attribute}: give its class") from None
    if not (isinstance(kind, type) and is_dataclass(kind) and callable(kind) and hasattr(kind, "name")):
        raise UsageError(f"pass {target}: is no pass: give a frozen dataclass with a name and a __call__")
    return kind


def _read(hint: Any, value: OptionValue, where: str) -> Any:
    """A value as what a type hint says."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if value is None and NoneType in kinds:
        return None
    kind, *others = (kind for kind in kinds if kind is not NoneType)
    origin, args = get_origin(kind), get_args(kind)
    if origin is tuple:
        if not isinstance(value, list):
            raise UsageError(f"{where}: give values in parentheses, as (a,b)")
        return tuple(_read(args[0], item, where) for item in value)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise UsageError(f"{where}: give pairs in parentheses, as (a:b,c:d)")
        return {_read(args[0], key, where): _read(args[1], item, where) for key, item in value.items()}
    choices = _choices(kind)
    if others or not (choices or kind in _WORDS):
        raise UsageError(f"{where}: has no form as text: make the pass in Python")
    if not isinstance(value, str):
        raise UsageError(f"{where}: give one value")
    if choices:
        if value not in choices:
            raise UnknownNameError(where, value, choices)
        return choices[value]
    try:
        number = kind(value)
    except ValueError:
        raise UsageError(f"{where} is {value[:40]!r}: give {_WORDS[kind]}") from None
    if isinstance(number, float) and not isfinite(number):
        raise UsageError(f"{where} is {value}: give a number")
    return number


def _choices(kind: Any) -> dict[str, Any]:
    """What stands for the values of a type that has few."""
    if kind is bool:
        return {"true": True, "false": False}
    if get_origin(kind) is Literal:
        return {str(choice): choice for choice in get_args(kind)}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return {member.name.lower(): member for member in kind}
    return {}
