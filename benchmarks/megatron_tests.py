"""Megatron-LM's own functional tests, captured without a GPU, against what they took on H100, A100 and GB200.

python -m benchmarks.megatron_tests FOLDER --table megatron_tests.csv [--only PATTERN] [--results FOLDER]

FOLDER is a checkout of Megatron-LM, whose own `megatron.core` is captured. The table has a line a test and
platform: its arguments, its GPUs, the median time of an iteration and the last rank's peak of allocated bytes. A
test's own `model_config.yaml` in the checkout is taken where it is there, since it has its tokenizer and what it
logs; what names files (data, checkpoints, vocabularies, boards) is left out or stood in for, and nothing else is.

Each set of arguments is captured once, by `echoc capture megatron`, and simulated on each platform that has a
measurement. Results stay in the folder of results, a file a set: a second call goes on where the first was
stopped, `--again failed` tries those anew that failed, `--again simulations` simulates anew what is captured,
`--again all` does all. A set whose attention another library ran on some of its GPUs or in some of its
containers is captured once for each (`_backend`). `--page docs/accuracy/megatron-tests.md` writes the page's part
(`benchmarks.megatron_page`).

With `--history CLONE`, a clone that has its history, a test's arguments are those that it was measured with, which
are not all those of the checkout, and its results say when that was, and what else it took
(`benchmarks.megatron_history`).
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from benchmarks import forked
from benchmarks.megatron_history import Known, Measured, history
from benchmarks.megatron_page import errors_table, judged, write_page

Record = dict[str, Any]
ROOT = Path(__file__).resolve().parents[1]

ON_AWS = "H100 on AWS"
CLUSTERS = {"H100": "dgx-h100", "A100": "dgx-a100", "GB200": "gb200-nvl72", ON_AWS: "aws-p5"}
"""The preset of each GPU of the table, and of what GitHub's CI measured."""

# What names files of the machines that ran, or says what is done with them: a capture has no such files.
_FILES = re.compile(
    r"--(.*-path|save|load|save-.*|load-.*|.*-dir|(?!ckpt-format).*ckpt.*|.*checkpoint(?!-activations)(-.*)?|vocab-file|merge-file"
    r"|tokenizer-.*|tiktoken-.*|wandb-.*|async-.*|verify-integrity|finetune|no-mmap-bin-files|split|mock-data"
    r"|use-persistent-ckpt-worker|exit-.*|no-load-.*|dataloader-type|num-workers|no-use-tokenizer-.*|data-args-path"
    r"|override-opt.param-scheduler|use-checkpoint-.*|langrl-env-config|bert-.*path|retro-.*)"
)
# Variables that choose what runs; others are of libraries that a capture does not call.
_CHOOSES = re.compile("NVTE_|CUDA_DEVICE_MAX_CONNECTIONS|CUBLAS_WORKSPACE_CONFIG")
# Vocabularies that their files' names or the tokenizer's kind tell of, without them.
_VOCABULARIES = (
    ("bert-large-cased", 28996),
    # BERT's tests name a vocab.txt, in three folders since 2024, and do not say which it is: the memory that they
    # have at rest is that of the cased one.
    ("/vocab.txt", 28996),
    ("bert-large-uncased", 30522),
    ("gpt2", 50257),
    ("GPT2BPE", 50257),
    ("multiMixV8", 131072),
    ("nemotron_2_256k", 256000),
    ("nemo_minitron_8b", 131072),
    ("mcore_mistral", 32768),
    ("llama", 32000),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Test:
    """A set of arguments, and what it took where.

    Attributes:
        name: of the first test that has it.
        names: of all tests that have it.
        script: in the checkout.
        arguments: of the script, as given.
        environment: variables that the test sets.
        gpus: ranks.
        measured: lines of the table; "runs" is what else is known: dates and seconds, oldest first.
    """

    name: str
    names: tuple[str, ...]
    script: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    gpus: int
    measured: tuple[Mapping[str, Any], ...]

    @property
    def key(self) -> str:
        """Tells sets apart; the name of its files."""
        told = json.dumps([self.script, self.arguments, dict(self.environment), self.gpus])
        return f"{self.name.replace('/', '.')}-{hashlib.sha256(told.encode()).hexdigest()[:8]}"


def tests_of(table: Path, folder: Path, known: Mapping[str, Known] | None = None) -> list[Test]:
    """The training tests of a table with a number of GPUs and arguments, those with the same ones together.

    The same are those that differ by their order, or by what no step feels (`_UNFELT`).

    Args:
        table: the measurements.
        folder: the checkout.
        known: by files of times, when and with which arguments they were measured.
    """
    found: dict[str, list[Mapping[str, Any]]] = {}
    sets: dict[str, Any] = {}
    with table.open(newline="") as lines:
        for row in csv.DictReader(lines):
            if row["kind"] != "training" or not row["gpus"]:
                continue
            known_of = (known or {}).get(row["source"].partition(":")[2], Known(None, ()))
            written = known_of.arguments or _written(folder, row)
            if not written or known_of.copied:
                continue  # a test that is there no longer, of which nobody says how it ran; times of another GPU
            environment = {k: str(v) for k, v in json.loads(row["env"]).items() if _CHOOSES.match(k)}
            made = (row["script"], tuple(_arguments(written)), environment, int(row["gpus"]))
            key = json.dumps([made[0], _felt(made[1]), *made[2:]])
            sets.setdefault(key, made)
            found.setdefault(key, []).extend(_by_machine(row, known_of.runs))
    return [_test(sets[key], rows) for key, rows in found.items()]


def _by_machine(row: Mapping[str, Any], runs: Sequence[Measured]) -> Iterator[Mapping[str, Any]]:
    """A line of the table, with what else is known of its times; two where both kinds of machines took some.

    The table's is the last one. Where GitHub's CI took it, the last one of a DGX H100 stands beside it, with the
    memory of both, which does not differ.
    """
    of = {there: [run for run in runs if run.on_github is there] for there in (False, True)}
    told: dict[str, Any] = {**row, "runs": [(run.date, run.seconds) for run in of[False]]}
    if runs and runs[-1].on_github:
        times = [(run.date, run.seconds) for run in of[True]]
        if of[False]:
            last = of[False][-1]
            taken = {"iteration_s_median": last.seconds, "iteration_s_p90": last.spread, "iteration_s_min": 1.0}
            yield {**told, **taken}
            told |= dict.fromkeys(("mem_max_allocated_bytes", "mem_allocated_bytes"), 0)
        told |= {"gpu": ON_AWS, "runs": times}
    yield told


def _test(made: Any, rows: Sequence[Mapping[str, Any]]) -> Test:
    script, arguments, environment, gpus = made
    names = tuple(dict.fromkeys(row["id"].partition("@")[0] for row in rows))
    return Test(
        name=names[0], names=names, script=script, arguments=arguments, environment=environment, gpus=gpus,
        measured=tuple(rows),
    )  # fmt: skip


def _written(folder: Path, row: Mapping[str, str]) -> dict[str, Any]:
    """A test's arguments: of its file in the checkout, else those of the table, which name no files."""
    path = folder / Path(row["source"].partition(":")[2]).parent / "model_config.yaml"
    if path.is_file():
        # The tests' files have keys twice, of which the later one counts.
        model = yaml.safe_load(path.read_text())["MODEL_ARGS"]
        return {str(k): v for k, v in model.items()}
    return {f"--{name}": value for name, value in json.loads(row["args"]).items()}


def _arguments(written: Mapping[str, Any]) -> Iterator[str]:
    """What a script finds behind its name: an argument that is true stands alone, one that is false not at all."""
    kept = {name: value for name, value in written.items() if not _FILES.fullmatch(name)}
    kept.pop("--vocab-size", None)
    for name, default in _GONE.items():
        if kept.get(name) == default:
            kept.pop(name)
    if not kept.keys() & {"--train-iters", "--train-samples"}:
        kept["--train-iters"] = 100  # the table does not say how long a test ran
    for name, value in kept.items():
        if value is True or value is None:
            yield name
        elif value is not False:
            yield name
            yield from _words(name, value)
    yield from _vocabulary(written)


_GONE: dict[str, Any] = {"--encoder-pipeline-model-parallel-size": 0}
"""Arguments that Megatron-LM has no more, by the value with which they did nothing."""


def _told_apart(written: Mapping[str, Any]) -> list[str]:
    """Arguments without the order in which a file has them, and what changes no time."""
    named = {str(name): str(value) for name, value in written.items()}
    told = {name: value for name, value in named.items() if not _FILES.fullmatch(name) and name != "--vocab-size"}
    return sorted(f"{name} {value}" for name, value in told.items() if not _UNFELT.fullmatch(name))


def _felt(arguments: Iterable[str]) -> list[str]:
    """A script's options in one order, without those that change no step."""
    options: list[list[str]] = []
    for word in arguments:
        if word.startswith("--"):
            options.append([])
        options[-1].append(word)
    return sorted(" ".join(option) for option in options if not _UNFELT.fullmatch(option[0]))


_UNFELT = re.compile("--(legacy-tokenizer|.*-iters|lr-.*|lr|min-lr|seed)")


def _commit(table: Path) -> str:
    """The commit whose files a table has."""
    with table.open(newline="") as lines:
        return next(csv.DictReader(lines))["source"].partition("@")[2].partition(":")[0]


def _words(name: str, value: Any) -> list[str]:
    text = re.sub(r"\\+([|()])", r"\1", str(value).strip())  # for a shell
    if name in _LISTS:
        return text.strip("[]").split()
    return [text.strip("\"'")]


_LISTS = {"--recompute-modules", "--hierarchical-context-parallel-sizes", "--spec", "--offload-modules",
          "--cuda-graph-modules", "--cuda-graph-scope", "--cp-comm-type", "--rampup-batch-size",
          "--timing-log-option", "--wgrad-deferral-limit"}  # fmt: skip


def _vocabulary(written: Mapping[str, Any]) -> list[str]:
    told = " ".join(str(value) for name, value in written.items() if re.search("vocab|token|merge", name))
    size = written.get("--vocab-size") or next((n for word, n in _VOCABULARIES if word in told), 50257)
    return [
        "--data-path",
        "none",
        "--split",
        "949,50,1",
        "--tokenizer-type",
        "NullTokenizer",
        "--vocab-size",
        str(size),
    ]


# -- one test -------------------------------------------------------------------------------------------------


def run_test(
    test: Test,
    folder: Path,
    results: Path,
    limit_s: float,
    captures_only: bool,
    anew: bool,
    given: Sequence[str] = (),
) -> Record:
    """Captures and simulates a set of arguments, and writes down what came of it.

    Args:
        test: the set.
        folder: the checkout.
        results: where results are kept.
        limit_s: seconds of a processor for each process of a capture.
        captures_only: no simulation.
        anew: whether a capture that is there is made again.
        given: options of the capture.
    """
    job, file = results / f"{test.key}.pb", results / f"{test.key}.json"
    record: Record = {"name": test.name, "names": test.names, "script": test.script, "gpus": test.gpus,
                      "arguments": test.arguments}  # fmt: skip
    before = _told(file)
    anew = anew or before.get("error", "none") != ""
    record |= {key: before.get(key, "") for key in _OF_CAPTURE} | {"rows": [], "simulated_by": code()}
    jobs = _jobs(test, job)
    spent: Counter[str] = Counter()
    for backend, made in jobs.items():
        if anew or not made.is_file():
            record |= _captured(_with_backend(test, backend), folder, made, limit_s, given)
            spent.update({key: record[key] for key in _SPENT})
            if record["error"]:
                break
    record |= spent
    if not record["error"] and not captures_only:
        try:
            record["rows"] = _simulated(test, jobs)
        except Exception as error:
            record["error"] = f"simulation: {type(error).__name__}: {str(error).splitlines()[0]}"
    whole = file.with_suffix(".part")
    whole.write_text(json.dumps(record, indent=1))
    whole.replace(file)
    return record


def _jobs(test: Test, job: Path) -> dict[str, Path]:
    """Files of the captures that a set needs, by what `--attention-backend` would say; "": as it is."""
    backends = {_backend(test, row) for row in test.measured if row["gpu"] in CLUSTERS} or {""}
    return {backend: job.with_suffix(f".{backend}.pb") if backend else job for backend in sorted(backends)}


def _with_backend(test: Test, backend: str) -> Test:
    return replace(test, arguments=(*test.arguments, _BACKEND, backend)) if backend else test


_BACKEND = "--attention-backend"
_DROPOUT = "--attention-dropout"
_NEW_LTS = "2025-11-06"
"""Until then images of "lts" were made of NVIDIA's PyTorch 24.01 (Megatron-LM, .gitlab/stages/01.build.yml)."""


def _backend(test: Test, row: Mapping[str, Any]) -> str:
    """What `--attention-backend` would say of the library that a measurement ran attention with.

    In one order, Transformer Engine 1.2, that of 24.01, ruled out FlashAttention-2 (pytorch/attention.py:
    DotProductAttention), and cuDNN but on Hopper, so that attention was unfused. Since then FlashAttention runs
    where cuDNN has none, and copies what it is given, or packs what is padded.
    """
    given = list(test.arguments)
    engine = "--transformer-impl" not in given or given[given.index("--transformer-impl") + 1] != "local"
    if _BACKEND in given or not engine:
        return ""
    in_order = "--deterministic-mode" in given or test.environment.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "0"
    dates = [date for date, _ in row["runs"]]
    if in_order and row["platform"].startswith("lts") and row["gpu"] == "A100" and dates and dates[-1] < _NEW_LTS:
        return "unfused"
    return "" if _has_cudnn(test, row["gpu"], in_order) else "flash"


def _has_cudnn(test: Test, gpu: str, in_order: bool) -> bool:
    """Whether Transformer Engine takes cuDNN's attention for a test on a GPU."""
    from echograph.profiler.costs.deterministic import is_possible
    from echograph.workflow.system import System

    device = System(CLUSTERS[gpu]).device
    assert device is not None
    given = list(test.arguments)
    dropout = float(given[given.index(_DROPOUT) + 1]) if _DROPOUT in given else 0.1
    return "cudnn" in device.attention and is_possible("cudnn", device.datasheet.architecture, dropout, in_order)


_SPENT = ("capture_cpu_s", "capture_wall_s")
_OF_CAPTURE = ("error", "notes", *_SPENT, "captured_by")


@cache
def code() -> str:
    """The commit of the code that runs, with "-dirty" where it is changed; "" outside of a repository."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _told(file: Path) -> Record:
    return json.loads(file.read_text()) if file.is_file() else {}


def _captured(test: Test, folder: Path, job: Path, limit_s: float, given: Sequence[str]) -> dict[str, Any]:
    command = [
        "echoc", "capture", "megatron", "--script", test.script, "--world-size", str(test.gpus), "-o", str(job),
        "--json", *given, "--", *test.arguments,
    ]  # fmt: skip
    # Its children have the same limit, each for itself. A busy machine changes what a clock shows, and not this.
    ended = forked.run(
        command, folder=folder, environment=os.environ | test.environment, bytecode=job.parent / "bytecode",
        limit_s=limit_s, patience_s=_PATIENCE * limit_s,
    )  # fmt: skip
    error = "" if ended.status == 0 else _last_line(ended.errors)
    if ended.status in (None, -signal.SIGXCPU) or signal.SIGXCPU.name in error:
        error = f"did not end in {limit_s:g} s of a processor"
    notes = json.loads(ended.out).get("notes", []) if not error and ended.out.startswith("{") else []
    return {
        "error": error, "notes": notes, "capture_cpu_s": ended.cpu_s, "capture_wall_s": ended.wall_s,
        "captured_by": code(),
    }  # fmt: skip


_PATIENCE = 8
"""Times as long by the clock, at most: a capture that waits uses no processor."""


_IMPORTED = (
    "torch._dynamo",
    "echograph.cli.echoc",
    "echograph.workflow.capture",
    "echograph.workflow.predict",
    "echograph.frontend.scripts.process",
    "echograph.frontend.megatron.adapter",
    "transformers.models.auto.tokenization_auto",  # what Megatron-LM imports of it for its tokenizers
)


def prepare() -> None:
    """Imports what captures and simulations do; a third of a capture was that, and is done once a process."""
    os.environ["OMP_NUM_THREADS"] = "1"  # PyTorch reads it there
    forked.import_once(_IMPORTED)


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if line.startswith("echoc: ")), (lines or ["no message"])[-1])


def _simulated(test: Test, jobs: Mapping[str, Path]) -> list[dict[str, Any]]:
    from echograph import load, simulate
    from echograph.workflow.system import System

    began = time.process_time()
    made: dict[tuple[str, str], Any] = {}
    rows = []
    for row in test.measured:
        if row["gpu"] not in CLUSTERS:
            continue
        run = row["gpu"], _backend(test, row)
        if run not in made:
            made[run] = simulate(load(jobs[run[1]]), System(CLUSTERS[row["gpu"]]))
        result = made[run]
        rows.append(
            {
                "id": row["id"], "platform": row["platform"], "gpu": row["gpu"],
                "measured_s": float(row["iteration_s_median"]), "predicted_s": result.step_ps / 1e12,
                "spread": float(row["iteration_s_p90"]) / float(row["iteration_s_min"]),
                "measured_peak_bytes": int(float(row["mem_max_allocated_bytes"] or 0)),
                "predicted_peak_bytes": list(result.memory.programs.values())[-1],
                "measured_rest_bytes": int(float(row["mem_allocated_bytes"] or 0)),
                "predicted_rest_bytes": list(result.memory.at_rest.values())[-1],
                "hidden_size": _hidden(test), "runs": row["runs"],
            }
        )  # fmt: skip
    for row in rows:
        row["simulation_cpu_s"] = (time.process_time() - began) / len(rows)
    return rows


def _hidden(test: Test) -> int:
    names = list(test.arguments)
    return int(names[names.index("--hidden-size") + 1]) if "--hidden-size" in names else 0


# -- all of them ----------------------------------------------------------------------------------------------


def summary(records: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """How many were captured, what failed and how often, and errors by platform."""
    records = list(records)
    failed = Counter(_kind(record["error"]) for record in records if record["error"])
    yield f"{len(records) - failed.total()} of {len(records)} sets of arguments captured"
    for reason, count in failed.most_common():
        yield f"{count:4} {reason}"
    rows = judged(records)
    if rows:
        yield "\n" + errors_table(rows)


def _kind(error: str) -> str:
    """An error without what differs between tests that fail alike."""
    return re.sub(r"0x[0-9a-f]+|\d{3,}", "N", error.removeprefix("echoc: "))[:200]


def write_table(records: Iterable[Mapping[str, Any]], file: Path) -> None:
    """A line a test and platform."""
    rows = [row for record in records for row in record["rows"]]
    if rows:
        with file.open("w", newline="") as lines:
            writer = csv.DictWriter(lines, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(sorted(rows, key=lambda row: str(row["id"])))


def _again(file: Path, which: str) -> bool:
    if not file.is_file() or which == "all":
        return True
    return which == "simulations" or (which == "failed" and bool(_told(file)["error"]))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a checkout of Megatron-LM")
    parser.add_argument("--table", type=Path, required=True, help="the measurements")
    parser.add_argument("--only", default="*", help="names of tests, with wildcards")
    parser.add_argument("--results", type=Path, default=Path("megatron-results"), help="where results are kept")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--limit-s", type=float, default=420.0, help="seconds of a processor for a capture")
    parser.add_argument("--captures-only", action="store_true", help="no simulation")
    parser.add_argument(
        "--again", choices=("none", "failed", "simulations", "all"), default="none", help="what is run anew"
    )
    parser.add_argument("--page", type=Path, help="whose part is written, of all results in the folder")
    parser.add_argument("--history", type=Path, metavar="CLONE", help="a clone of Megatron-LM with its history")
    parser.add_argument("--measure-host", action="store_true", help="as of the capture")
    parser.add_argument("--list", action="store_true", help="print the sets of arguments alone")
    return parser.parse_args()


def main() -> None:
    """Runs what has no result yet, and prints the whole."""
    options = _options()
    folder, results = options.folder.resolve(), options.results.resolve()
    known = history(options.history, _commit(options.table), _told_apart) if options.history else None
    tests = [t for t in tests_of(options.table, folder, known) if any(fnmatch(n, options.only) for n in t.names)]
    if options.list:
        for test in tests:
            print(test.key, test.script, test.gpus, *test.arguments)
        return
    results.mkdir(parents=True, exist_ok=True)
    left = [test for test in tests if _again(results / f"{test.key}.json", options.again)]
    with ProcessPoolExecutor(options.jobs, initializer=prepare) as pool:
        given = ("--measure-host",) if options.measure_host else ()
        running = [
            pool.submit(
                run_test, test, folder, results, options.limit_s, options.captures_only,
                options.again == "all", given,
            )
            for test in left
        ]  # fmt: skip
        for done, future in enumerate(as_completed(running), start=1):
            record = future.result()
            print(
                f"{done}/{len(left)} {record['name']} {record['capture_cpu_s']:.0f} s {record['error']}",
                flush=True,
            )
    records = [json.loads((results / f"{test.key}.json").read_text()) for test in tests]
    write_table(records, results / "table.csv")
    print(*summary(records), sep="\n")
    if options.page:
        write_page(results, options.page)


if __name__ == "__main__":
    main()
