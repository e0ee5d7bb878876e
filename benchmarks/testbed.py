"""Real steps over shaped links beside their predictions: the table of docs/accuracy/networks.md.

python -m benchmarks.testbed [--only TEXT] [--output FILE.md]

Needs Linux, root, `ip`, `tc` and torch, and takes some five minutes; says why and stops where it cannot run. The
jobs and what measures them are those of tests/testbed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "testbed"))

from configurations import CONFIGURATIONS, Configuration
from measure import Outcome, outcomes
from namespaces import why_not


def main() -> None:
    """Prints the table as it grows, then the means."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="configurations whose name holds this text")
    parser.add_argument("--output", type=Path, help="write the table to this file, too")
    asked = parser.parse_args()
    if reason := why_not():
        print(f"no test bed here: {reason}")
        return
    lines = []
    for line in table([c for c in CONFIGURATIONS if asked.only in c.name]):
        print(line, flush=True)
        lines.append(line)
    if asked.output:
        asked.output.write_text("\n".join(lines) + "\n")


def table(configurations: list[Configuration]) -> Iterator[str]:
    """Lines of Markdown: where and when, a row a configuration, and how far off they are."""
    yield (
        f"{datetime.date.today()}, {platform.system()} {platform.release()}, {os.cpu_count()} processors "
        f"({_processor()}), load {os.getloadavg()[0]:.1f} at the start, torch {version('torch')}"
    )
    yield ""
    yield "| job | measured s | least to most | predicted s | error | closed form |"
    yield "|---|---|---|---|---|---|"
    found = []
    for one in outcomes(configurations):
        found.append(one)
        yield (
            f"| {one.configuration.name}{' (second time)' if one.again else ''} | {one.measured:.3f} "
            f"| {one.least:.3f}-{one.most:.3f} | {one.predicted:.3f} | {one.error:+.1%} "
            f"| {one.closed_form / one.measured - 1:+.1%} |"
        )
    yield ""
    yield from _means(found)


def _means(found: list[Outcome]) -> Iterator[str]:
    shared = [one for one in found if one.configuration.links.uplink is not None]
    alone = [one for one in found if one.configuration.links.uplink is None]
    for name, chosen in (("all", found), ("links of their own", alone), ("a shared uplink", shared)):
        if chosen:
            errors = [one.error for one in chosen]
            mean, bias, worst = statistics.mean(map(abs, errors)), statistics.mean(errors), max(errors, key=abs)
            closed, free = (
                statistics.mean(abs(getattr(one, guess) / one.measured - 1) for one in chosen)
                for guess in ("closed_form", "free")
            )
            yield (
                f"{name}: {len(chosen)}, mean error {mean:.1%}, bias {bias:+.1%}, worst {worst:+.1%}; "
                f"closed form {closed:.1%}; were communications free {free:.1%}"
            )
    for nic in sorted({one.configuration.links.nic for one in found}):
        fabric = next(one.fabric for one in found if one.configuration.links.nic == nic)
        errors_of = ", ".join(f"{kind} {error:.1%}" for kind, error in fabric.errors.items())
        yield f"fit at {nic / 1e6:.0f} Mbit/s: {errors_of}"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    main()
