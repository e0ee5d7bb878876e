"""Which cases of parametrized tests the fast suite leaves to the slow one.

python tests/long_cases.py JUNIT.xml ...

Of each test that has several, the quickest stays, and all that take less than `LONG_S`; pages of docs stay.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

LONG_S = 0.5
FILE = Path(__file__).with_suffix(".txt")


def long_cases(reports: Iterable[Path]) -> list[str]:
    """The ids, of reports of whole runs (pytest's --junitxml); of a case in several, the shortest time counts."""
    seconds: dict[str, float] = {}
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            name = f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}"
            seconds[name] = min(seconds.get(name, 1e9), float(case.attrib["time"]))
    cases = defaultdict(list)
    for name in sorted(seconds, key=seconds.__getitem__):
        cases[name.partition("[")[0]].append(name)
    return sorted(
        name
        for test, (_, *others) in cases.items()
        for name in others
        if seconds[name] >= LONG_S and not test.startswith("tests/docs/")
    )


if __name__ == "__main__":
    FILE.write_text("".join(f"{name}\n" for name in long_cases(map(Path, sys.argv[1:]))))
