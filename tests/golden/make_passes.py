"""Writes what every pass makes of a small graph: `passes/NAME.after.txt` from `passes/NAME.before.txt`.

python tests/golden/make_passes.py                                  # all, with the options that they have
python tests/golden/make_passes.py 'tensor_parallel{size=2}'        # one with others, or a new one

The text of a graph lists the passes that made it, so the second file says how it came from the first.
"""

from __future__ import annotations

import sys
from pathlib import Path

from echograph.ir.passes.base import parse_passes, run
from echograph.ir.text import to_text
from echograph.ir.text.parser import from_text

FOLDER = Path(__file__).parent / "passes"


def spec(name: str) -> str:
    """The pass, with its options, that the stored result says it comes from."""
    graph = from_text((FOLDER / f"{name}.after.txt").read_text(encoding="utf-8"))
    return graph.passes[-1]


def after(said: str) -> str:
    """What a pass makes of its stored graph."""
    (one,) = parse_passes(said)
    before = from_text((FOLDER / f"{one.name}.before.txt").read_text(encoding="utf-8"))
    return "".join(to_text(run(before, (one,))))


def main() -> None:
    """Writes the files."""
    names = [path.name.partition(".")[0] for path in sorted(FOLDER.glob("*.before.txt"))]
    for said in sys.argv[1:] or map(spec, names):
        path = FOLDER / f"{said.partition('{')[0]}.after.txt"
        path.write_text(after(said), encoding="utf-8")


if __name__ == "__main__":
    main()
