"""A line of the text form, read from left to right."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from enum import IntEnum
from math import inf
from typing import NoReturn, TypeVar

from echograph.errors import FormatError
from echograph.ir.text.assemble import MIN_NUMBER

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_WORD = re.compile(r"[A-Za-z0-9_.{}]+")
_INTEGER = re.compile(r"[+-]?[0-9]{1,20}")
_FLOAT = re.compile(r"[0-9][0-9.e+-]{0,30}")

E = TypeVar("E", bound=IntEnum)
T = TypeVar("T")


class Line:
    """A line and how far it has been read; every method that reads something refuses anything else.

    Raises:
        FormatError: what comes next is something else; says in which line, and what.
    """

    __slots__ = ("at", "number", "text")

    def __init__(self, number: int, text: str) -> None:
        self.number, self.text, self.at = number, text, 0

    def fail(self, wanted: str) -> NoReturn:
        """Says what should come next."""
        rest = ascii(self.text[self.at : self.at + 30]) if self.at < len(self.text) else "the end of the line"
        raise FormatError(f"line {self.number}: {wanted} is expected where {rest} stands")

    def has(self, literal: str) -> bool:
        """Takes a literal if it comes next."""
        found = self.text.startswith(literal, self.at)
        self.at += len(literal) if found else 0
        return found

    def take(self, literal: str) -> None:
        """Takes a literal, which must come next."""
        if not self.has(literal):
            self.fail(f"'{literal.strip()}'")

    def match(self, pattern: re.Pattern[str], wanted: str) -> str:
        """Takes what a pattern matches."""
        found = pattern.match(self.text, self.at)
        if found is None:
            self.fail(wanted)
        self.at = found.end()
        return found.group()

    def word(self) -> str:
        """A word, or a text in quotes."""
        if not self.text.startswith('"', self.at):
            return self.match(_WORD, "a word")
        start, quoted = self.at, self.match(_STRING, "a text in quotes")
        try:
            word = json.loads(quoted)
            word.encode()
        except ValueError:
            self.at = start
            self.fail("a text in quotes")
        return str(word)

    def integer(self) -> int:
        """A whole number of 64 bits."""
        start, found = self.at, int(self.match(_INTEGER, "a whole number"))
        if not MIN_NUMBER <= found < -MIN_NUMBER:
            self.at = start
            self.fail("a number of 64 bits")
        return found

    def real(self) -> float:
        """A number that is not negative."""
        start, digits = self.at, self.match(_FLOAT, "a number")
        try:
            found = float(digits)
        except ValueError:
            found = inf
        if found == inf:
            self.at = start
            self.fail("a number")
        return found

    def member(self, kind: type[E]) -> E:
        """A member of an enumeration, by its name in lower case."""
        start, word = self.at, self.match(_WORD, "a word")
        if word.upper() not in kind.__members__ or word != word.lower():
            self.at = start
            self.fail(f"one of {', '.join(name.lower() for name in kind.__members__)}")
        return kind[word.upper()]

    def row(self, sigil: str) -> int:
        """A number after its sigil."""
        self.take(sigil)
        return self.integer()

    def field(self, key: str, read: Callable[[], T]) -> T:
        """A field that is always there."""
        self.has(" ")
        self.take(f"{key}=")
        return read()

    def option(self, key: str, read: Callable[[], T], default: T) -> T:
        """A field that is left out where it has its default."""
        return read() if self.has(f" {key}") else default

    def options(self, key: str, read: Callable[[], tuple[T, ...]]) -> tuple[T, ...]:
        """A field of several things that is left out where there are none."""
        return read() if self.has(f" {key}") else ()

    def words(self, read: Callable[[], T]) -> tuple[T, ...]:
        """What stands between spaces, up to the end of the line."""
        found = []
        while self.has(" "):
            found.append(read())
        return tuple(found)

    def separated(self, read: Callable[[], T]) -> tuple[T, ...]:
        """One or more with bare commas between them: a comma and a space separate longer things."""
        found = [read()]
        while not self.text.startswith(", ", self.at) and self.has(","):
            found.append(read())
        return tuple(found)

    def bracketed(self, read: Callable[[], T]) -> tuple[T, ...]:
        """`[1,2]`, or `[]`."""
        self.take("[")
        if self.has("]"):
            return ()
        found = self.separated(read)
        self.take("]")
        return found

    def listed(self, read: Callable[[], T], end: str = ")") -> tuple[T, ...]:
        """What stands between commas, up to `end`."""
        found: list[T] = []
        while not self.has(end):
            if found:
                self.take(", ")
            found.append(read())
        return tuple(found)

    def end(self) -> None:
        """Nothing may come any more."""
        if self.at != len(self.text):
            self.fail("the end of the line")
