"""`echoprof`: fit device and fabric profiles from measurements."""

from __future__ import annotations

from echograph.cli.app import make_app, run

app = make_app("echoprof", "Measure and analyse; fit device and fabric profiles from measurements.")


def main() -> None:
    """Entry point of the console script."""
    run(app, "echoprof")
