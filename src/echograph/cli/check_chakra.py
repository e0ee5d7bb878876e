"""`echoc check FOLDER --as chakra`: what makes ASTRA-sim trip over a set of traces."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer

from echograph.cli.app import print_json, print_line, progress
from echograph.ir.chakra.check import Checked, check
from echograph.ir.chakra.reader import read_traces


def check_chakra(source: Path, *, as_json: bool) -> None:
    """Prints the findings; exits with 1 where one is an error."""
    with progress(f"reading {source}") as say:
        traces = read_traces(source, say)
        say("checking")
        found = check(traces)
    if as_json:
        findings = [asdict(finding) for finding in found.findings]
        print_json({"source": str(source), "valid": not found.errors, **asdict(found), "findings": findings})
    else:
        _print(source, found)
    if found.errors:
        raise typer.Exit(1)


def _print(source: Path, found: Checked) -> None:
    for finding in found.findings:
        print_line(str(finding))
    for name, count in found.counts.items():
        shown = sum(finding.check == name for finding in found.findings)
        if shown < count:
            print_line(f"{name}: {count - shown:,} more")
    verdict = f"{found.errors:,} errors" if found.errors else "valid"
    warnings = sum(found.counts.values()) - found.errors
    more = f", {warnings:,} warnings" if warnings else ""
    print_line(
        f"{source}: {verdict}{more} ({found.ranks} ranks, {found.nodes:,} nodes, {len(found.counts)} checks)"
    )
