"""Reads pages back: what is drawn where, and whether the HTML is whole."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "br", "hr", "img", "input", "link", "wbr"}


class Page(HTMLParser):
    """A page's elements: tag, attributes, and the text within.

    Attributes:
        found: in the order in which they begin.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None], list[str]]] = []
        self._open: list[int] = []
        self.feed(text)
        self.close()
        assert not self._open, "an element does not end"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), []))
        if tag not in VOID:
            self._open.append(len(self.found) - 1)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), []))

    def handle_endtag(self, tag: str) -> None:
        assert self.found[self._open.pop()][0] == tag, f"{tag} ends before what is within it"

    def handle_data(self, data: str) -> None:
        for at in self._open:
            self.found[at][2].append(data)

    def all(self, tag: str, kind: str | None = None) -> list[dict[str, str | None]]:
        """The attributes of the elements of a name, and of a class."""
        return [
            a for t, a, _ in self.found if t == tag and (kind is None or kind in (a.get("class") or "").split())
        ]

    def texts(self, tag: str) -> list[str]:
        """The text within each element of a name."""
        return ["".join(text) for t, _, text in self.found if t == tag]


def share(attributes: dict[str, str | None], name: str) -> float:
    """An attribute in percent."""
    return float((attributes[name] or "").removesuffix("%"))


def element(text: str, name: str) -> Any:
    """The data that stands in a page under a name."""
    found = re.findall(rf'<script type="application/json" id="{name}">([^<]*)</script>', text)
    assert len(found) == 1
    return json.loads(found[0])


def rows(text: str, title: str) -> list[list[str]]:
    """The rows of the first table in a section of the page."""
    section = text.split(f"<h2>{title}</h2>")[1].split("<h2>")[0]
    found = Page(section.split("<table>")[1].split("</table>")[0].join(("<table>", "</table>")))
    cells: list[list[str]] = []
    for tag, _, content in found.found:
        if tag == "tr":
            cells.append([])
        if tag == "td":
            cells[-1].append("".join(content))
    return cells[1:]
