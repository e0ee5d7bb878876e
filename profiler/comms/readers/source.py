"""What every reader gives, as `ir.comms_source` defines it for frontends, too."""

from __future__ import annotations

from echograph.ir.comms_source import NO_TIME, Rows, Source, known_rows, no_rows

__all__ = ["NO_TIME", "Rows", "Source", "known_rows", "no_rows"]
