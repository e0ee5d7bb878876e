"""The lines of a trace, as `ir.comms_record` defines them for frontends, too."""

from __future__ import annotations

from echograph.ir.comms_record import (
    COLUMNS,
    DECODER,
    ENCODER,
    FORMAT,
    MAJOR,
    MINOR,
    UNKNOWN,
    UNREADABLE,
    Beat,
    End,
    GroupLine,
    Header,
    Line,
    Row,
    Stuck,
    What,
    encode,
)

__all__ = [
    "COLUMNS",
    "DECODER",
    "ENCODER",
    "FORMAT",
    "MAJOR",
    "MINOR",
    "UNKNOWN",
    "UNREADABLE",
    "Beat",
    "End",
    "GroupLine",
    "Header",
    "Line",
    "Row",
    "Stuck",
    "What",
    "encode",
]
