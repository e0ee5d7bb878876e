"""What comes of reading and of writing a format of another tool."""

from __future__ import annotations

from dataclasses import dataclass

from echograph.ir.graph import Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A graph, and what of its source a graph cannot hold.

    Attributes:
        graph: a step graph or a job graph.
        notes: what was left out or taken for something, a line each.
        warnings: what is unlikely to be meant, a line each.
    """

    graph: Graph
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What an export wrote.

    Attributes:
        files: how many files.
        bytes: their size together.
        notes: what the format cannot hold of this graph, a line each; empty where it holds all.
    """

    files: int
    bytes: int
    notes: tuple[str, ...] = ()
