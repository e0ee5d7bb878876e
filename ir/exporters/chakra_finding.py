"""What a check of Chakra traces says: a finding, at a file or at one of its nodes."""

from __future__ import annotations

from dataclasses import dataclass

from echograph.ir.chakra_traces import RankTrace, Traces
from echograph.ir.serde_chakra import Value

ERROR, WARNING = "error", "warning"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that a simulator trips over.

    Attributes:
        severity: `ERROR`: it aborts, hangs or is wrong; `WARNING`: it may not mean what was meant.
        file: the file's name.
        what: what is wrong.
        fix: what to do.
        node: id of the node; None where it is of the file.
        name: of the node.
        check: the name of the one that found it.
    """

    severity: str
    file: str
    what: str
    fix: str
    node: int | None = None
    name: str = ""
    check: str = ""

    def __str__(self) -> str:
        node = "" if self.node is None else f": node {self.node} ({self.name[:60]})"
        return f"{self.severity}: {self.file}{node}: {self.what}: {self.fix}"


def at_node(traces: Traces, trace: RankTrace, row: int, what: str, fix: str, severity: str = ERROR) -> Finding:
    """A finding at a node."""
    return Finding(
        severity=severity,
        file=trace.path.name,
        node=int(trace.id[row]),
        name=traces.name(trace, row),
        what=what,
        fix=fix,
    )


def group_name(traces: Traces, trace: RankTrace, row: int) -> str:
    """The group of a node: "" is the whole world, which nodes without one mean; "?" none that is text."""
    return group_called(traces.groups_named[int(trace.group[row])])


def group_called(named: Value | None) -> str:
    """The group that a node means by what it states as its `pg_name`, as `group_name` has it."""
    if named is None or named == "0":
        return ""
    return named if isinstance(named, str) else "?"


def ranks_of(traces: Traces, name: str) -> tuple[int, ...]:
    """The ranks of a group; none where there is no such group."""
    return (traces.groups or {}).get(name, ()) if name else tuple(trace.rank for trace in traces.ranks)
