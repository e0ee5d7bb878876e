"""Damages what every reader reads, and says what broke: `python tests/fuzz/fuzz_readers.py --cases 1000 --seed 1`.

Each reader has a process of its own, which is started anew after a case that stopped it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import resource
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from reader_cases import SECONDS, Case, prepare, reproducer, run_cases, run_command
from reader_targets import STEP, TARGETS, Target


def fuzz(target: Target, seed: int, cases: int) -> Iterator[tuple[int, str]]:
    """The faults of a reader: the number of the case (-1: of a whole file), and what was wrong."""
    first = 0
    while first < cases:
        here, there = multiprocessing.Pipe(duplex=False)
        worker = multiprocessing.get_context("fork").Process(
            target=_work, args=(there, target, seed, first, cases)
        )
        worker.start()
        there.close()
        with here, contextlib.suppress(EOFError):
            patience = 30 * SECONDS  # until it has run the commands on whole files
            while here.poll(patience):
                number, fault = here.recv()
                patience = 9 * SECONDS
                if fault:
                    yield number, fault
                first = number + 1
        worker.join(SECONDS)
        if worker.is_alive():
            worker.kill()
            worker.join()
        if worker.exitcode:
            yield first, f"no answer, not even to a signal, or its process died ({worker.exitcode})"
            first += 1


def _work(pipe: Connection, target: Target, seed: int, first: int, cases: int) -> None:
    fault = prepare(target)
    pipe.send((first - 1, None if first else fault))
    for number, fault in run_cases(target, seed, range(first, cases)):
        pipe.send((number, fault))
    pipe.close()


def show(target: Target, seed: int, number: int, keep: Path | None) -> None:
    """Runs one case, and prints the command, what it said and what was wrong."""
    prepare(target)
    case = Case(target, seed, number)
    folder = (keep or Path("fuzz-case")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    case.write(folder)
    print(" ".join(case.words(folder)))
    print(run_command(*case.words(folder)))
    for _, fault in run_cases(target, seed, range(number, number + 1)):
        print(fault or "no fault")


def _cpu_s() -> float:
    """Seconds of the processor that readers took so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    """Prints each fault with the line that runs it again, and a line of JSON for every reader."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=200, help="for each reader")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reader", action="append", help=", ".join(target.name for target in TARGETS))
    parser.add_argument("--case", type=int, help="only this one, of one reader; its files are kept")
    parser.add_argument("--keep", type=Path, help="where the files of that case go (usual: fuzz-case)")
    parser.add_argument("--fast", action="store_true", help="the cases of the fast tests")
    given = parser.parse_args()
    if unknown := set(given.reader or ()) - {target.name for target in TARGETS}:
        parser.error(f"no reader {', '.join(sorted(unknown))}")
    targets = [target for target in TARGETS if not given.reader or target.name in given.reader]
    if given.case is not None:
        show(targets[0], given.seed, given.case, given.keep)
        return 0
    # What most commands import, once for all processes.
    run_command("echosim", "run", STEP, "--gpus", 8)
    run_command("echoc", "show", STEP)
    total = 0
    for target in targets:
        faults, before = 0, _cpu_s()
        cases = target.fast if given.fast else given.cases
        for number, fault in fuzz(target, given.seed, cases):
            faults += 1
            print(f"{fault}\n  {reproducer(target, given.seed, number)}", flush=True)
        total += faults
        took = round(_cpu_s() - before, 1)
        found = {"reader": target.name, "seed": given.seed, "cases": cases, "faults": faults, "cpu_s": took}
        print(json.dumps(found), flush=True)
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
