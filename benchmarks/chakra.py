"""Chakra traces of 1,024 ranks: how fast they are written and read back, and in how much memory.

python -m benchmarks.chakra [--runs 3]

Whole processes, whose CPU time includes reading the job and estimating its kernels. Two jobs of the same ranks:
roles that stand for many ranks each, and a program for every rank.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from benchmarks.measure import echo, measure
from echograph.ir import serde
from echograph.ir.graph import JobGraph
from echograph.ir.passes.mesh import UnfoldRanks

PLAN = ("--gpus", "1024", "--tp", "8", "--pp", "8", "--micro-batch", "1", "--global-batch", "64")
"""Of GPT-3 13B: five layers a stage and four micro-batches."""


def main() -> None:
    """Prints one line a job."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        measure(echo("echoc", "compile", "--model", "gpt3-13b", "-o", "step.pb"), runs=1, cwd=folder)
        measure(echo("echoc", "lower", "step.pb", *PLAN, "-o", "roles.pb"), runs=1, cwd=folder)
        job = serde.load(folder / "roles.pb")
        assert isinstance(job, JobGraph)
        serde.save(UnfoldRanks()(job), folder / "ranks.pb")
        print("what programs     nodes  a rank     MiB  wall s   cpu s   nodes/s  peak MiB")
        for name, programs in (("roles", len(job.programs)), ("ranks", job.world_size)):
            command = echo("echoc", "export", f"{name}.pb", "--to", "chakra", "-o", "out", "--json")
            found = measure(command, runs=runs, cwd=folder)
            about = json.loads((folder / "out" / "chakra.json").read_text())
            nodes, size = about["nodes"], sum(path.stat().st_size for path in (folder / "out").iterdir()) / 2**20
            print(
                f"write {programs:>7} {nodes:>9} {nodes // about['ranks']:>7} {size:>7.0f} {found.wall_s:>7.2f} "
                f"{found.cpu_s:>7.2f} {nodes / found.cpu_s:>9.0f} {found.peak_MiB:>9.0f}",
                flush=True,
            )
        found = measure(echo("echoc", "import", "chakra", "out", "-o", "back.pb"), runs=runs, cwd=folder)
        size = (folder / "back.pb").stat().st_size / 2**20
        back = serde.load(folder / "back.pb")
        print(
            f"read  {len(back.programs):>7} {nodes:>9} {nodes // job.world_size:>7} {size:>7.0f} "
            f"{found.wall_s:>7.2f} {found.cpu_s:>7.2f} {nodes / found.cpu_s:>9.0f} {found.peak_MiB:>9.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
