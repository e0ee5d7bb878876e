"""The page of a prediction: the number, where it goes, what limits it, what it rests on."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

import numpy as np

from echograph.ir.columns import Bools
from echograph.ir.graph import JobGraph
from echograph.ir.intervals import Pieces
from echograph.ir.timeline import Lane, Timeline
from echograph.ir.traced import is_traced
from echograph.ir.types import COMMUNICATIONS, Phase, Source
from echograph.profiler.costs.device import DeviceProfile, Label
from echograph.profiler.page import charts
from echograph.profiler.page.frame import banner, data, document, folded, tiles
from echograph.profiler.page.lanes import script
from echograph.simulator.breakdown import COMPUTE, breakdown, layers_of, moments
from echograph.simulator.clusters import Cluster, NetworkFabric, NodeFabric
from echograph.simulator.durations import Durations
from echograph.simulator.result import Result
from echograph.units import format_bytes, format_count, to_s
from echograph.workflow.feasible import shortage
from echograph.workflow.plan import Plan
from echograph.workflow.report import parts
from echograph.workflow.report.lanes import ShownStep
from echograph.workflow.scenario import Scenario
from echograph.workflow.system import System

_Record = Mapping[str, Any]

MOST_ROLES = 16
RESULT, DETAILS = "result", "details"
_WHERE = (
    "Each moment counts once: a kernel runs (compute); else a communication does (exposed, by the axes of its "
    "group); else the host issues; else nothing (bubble in a pipeline, wait elsewhere)."
)
_STEP = (
    "The first lane is the critical path. Each lane below is a role, what it does at every moment: a bar's colour "
    "is its work, the strip at its foot the share of the bar in which the device communicated or waited instead."
)
_LIMITS = (
    "The longest chain of work in which each piece had to wait for the one before, by kind. To make a kind faster "
    "shortens the step by its share of this path, until another path is the longest; to make faster what runs "
    "beside it shortens nothing."
)
_PATH = "What the critical path is made of: an operation in all layers (as *) and micro-batches is one row."
_MEMORY = "What is allocated at the moment when most is, on the role that needs most."
_COMMUNICATION = (
    "All communication of a rank in one step, by the axes of its groups. What is not exposed is hidden."
)
_DATA = (
    "The JSON of echosim run stands in this file as the element 'result', what the page shows beyond it as "
    "'details'. echosim compare takes the page where it takes the JSON."
)

_LOSSES = {
    "host": "the host, which alone is at work",
    "bubble": "bubble: waiting for another pipeline stage",
    "wait": "waiting for other ranks",
}


def prediction_page(
    result: Result,
    job: JobGraph,
    plan: Plan,
    system: System,
    scenario: Scenario,
    notes: Sequence[str] = (),
    near: Sequence[str] = (),
) -> str:
    """A prediction as HTML that loads nothing, with its JSON in it.

    Args:
        result: the prediction.
        job: what was simulated.
        plan: the plan that the user gave.
        system: where it ran.
        scenario: what was asked beyond that.
        notes: what the plan could not do.
        near: where it does not fit in memory, what to change so that it does.
    """
    timeline, layers = result.timeline, layers_of(job)
    shown = _shown(len(timeline.programs))
    found = {n: moments(layers, timeline, np.flatnonzero(timeline.program == n)) for n in shown}
    record, more = result.to_json(), details(result, job, timeline, found)
    more["assumptions"] = [part._asdict() for part in assumptions(result, job, plan, system, notes)]
    more["asked"] = asked(scenario, system)
    roles = len(timeline.programs)
    some = "" if len(shown) == roles else f" Of {roles} roles {len(shown)} are shown."
    note = f"{result.tasks:,} tasks: --trace writes them all."
    note += "" if result.ranks is None else " Of each role, those ranks are drawn that end last."
    drawn = ShownStep(job, timeline, layers).drawing(found, more["idle"], note) if result.step_ps else ""
    does_not_fit = result.memory is not None and not result.memory.fits
    body = [
        *_head(record, more, banner("DOES NOT FIT", f"needs {shortage(result, near)}") if does_not_fit else ""),
        _where(record, more, some),
        parts.section("One step", _STEP + some, drawn),
        _limits(record),
        _path(record, more["critical_path"]),
        _memory(record),
        _communication(record),
        _links(record),
        _rests(record, more),
        parts.section("This page as data", _DATA, data(RESULT, record), data(DETAILS, more)),
    ]
    return document(f"{record['model']} on {record['gpus']:,} GPUs", body, [script()])


def _shown(count: int) -> list[int]:
    """The roles that are shown: all, or some evenly chosen, with the first and the last."""
    if count <= MOST_ROLES:
        return list(range(count))
    return sorted({round(i * (count - 1) / (MOST_ROLES - 1)) for i in range(MOST_ROLES)})


def _head(record: _Record, more: _Record, alarm: str) -> list[str]:
    low, high = (parts.seconds(value) for value in record["step_time_interval_s"])
    shown = [(parts.seconds(record["step_time_s"]), f"step time; 90 % interval {low} to {high}")]
    if record["tokens_per_s"]:
        shown.append((format_count(record["tokens_per_s"]), "tokens/s"))
    shown.append((format_count(record["samples_per_s"]), "samples/s"))
    if record["mfu"] is not None:
        shown.append((parts.percent(record["mfu"]), _utilisation(record)))
    memory = record["memory"]
    if memory is not None:
        verdict = "fits" if memory["fits"] else "DOES NOT FIT"
        of = f"of {format_bytes(memory['capacity_bytes'])} device memory: {verdict}"
        shown.append((format_bytes(memory["device_bytes"]), of))
    for name, value in record.get("step_time_percentiles_s", {}).items():
        shown.append((parts.seconds(value), f"{name.upper()} of the draws with noise"))
    if "failures" in record:
        shown.append((parts.percent(record["failures"]["goodput"]), "of the time trains, with failures"))
    where = f"One training step on {record['gpus']:,} GPUs of {record['cluster']} ({record['device']})"
    said = ": ".join(filter(None, (where, parts.plan_line(record))))
    changes = [*more["asked"], *record.get("degraded", ())]
    what_if = f"<p><b>What if:</b> {escape('; '.join(changes))}</p>" if changes else ""
    return [
        f"<h1>{escape(record['model'])}</h1>",
        f"<p>{escape(said)}</p>",
        alarm,
        what_if,
        tiles(shown),
        _verdict(record),
    ]


def _utilisation(record: _Record) -> str:
    """Which FLOPs the utilisation counts, and the utilisation with causal attention counted by half."""
    text = "of the devices' peak (model FLOPs, none recomputed or padded)"
    causal = record["mfu_causal"]
    return text if causal == record["mfu"] else f"{text}; {parts.percent(causal)} with causal attention by half"


def _verdict(record: _Record) -> str:
    """The page in two sentences."""
    step, limits = record["step_time_s"], record["limits_s"]
    if not step or not limits:
        return ""
    split = parts.flat(record["breakdown_s"])
    computes = split.pop("compute")
    lost = max(split, key=split.__getitem__)
    most = max(limits, key=limits.__getitem__)
    said = _LOSSES.get(lost, f"{lost} communication")
    text = f"The device computes for {parts.percent(computes / step)} of the step"
    text += f"; most of the rest is {said}, {parts.percent(split[lost] / step)}. " if split[lost] else ". "
    text += f"What limits it most is {most}: {parts.percent(limits[most] / step)} of the critical path."
    return f"<p>{escape(text)}</p>"


def _where(record: _Record, more: _Record, some: str) -> str:
    step = record["step_time_s"] or 1.0
    rows = [
        (f"{role['role']}: computes {parts.percent(role['breakdown_s']['compute'] / step)}", role["breakdown_s"])
        for role in more["roles"]
    ]
    several, last = record["breakdown_ranks"] > 1, record["breakdown_of"]
    whose = (
        f" The table is of {last['name']} (rank {last['rank']}), which ends last, beside what "
        f"{record['breakdown_ranks']:,} ranks have of each part on average, at least and at most."
    )
    table = _of_ranks(record, step) if several else _of_one(record, step)
    said = _WHERE + (whose if several else "") + some
    phases = list(dict.fromkeys(phase for role in more["roles"] for phase in role["compute_s"]))
    computed = [
        (role["role"], *(parts.seconds(role["compute_s"].get(phase, 0.0)) for phase in phases))
        for role in more["roles"]
    ]
    by_phase = folded("what the roles compute, by phase", parts.grid(("role", *phases), computed))
    return parts.section("Where the step goes", said, parts.stacked_bars(rows), table, by_phase)


def _of_one(record: _Record, step: float) -> str:
    """The parts of the step of the one role that was simulated."""
    lines = [
        (name, parts.seconds(value), parts.percent(value / step))
        for name, value in parts.flat(record["breakdown_s"]).items()
        if value or name == "compute"
    ]
    return parts.grid(("part", "time", "of the step"), lines)


def _of_ranks(record: _Record, step: float) -> str:
    """The parts of the step of the role that ends last, and how they differ between ranks."""
    split, mean, least, most = (
        parts.flat(record[f"breakdown_{which}s"]) for which in ("", "mean_", "least_", "most_")
    )
    lines = [
        (name, parts.seconds(value), *(parts.percent(of[name] / step) for of in (split, mean, least, most)))
        for name, value in split.items()
        if most[name]
    ]
    return parts.grid(("part", "time", "of the step", "mean", "least", "most"), lines)


def _limits(record: _Record) -> str:
    step = record["step_time_s"] or 1.0
    rows = [
        (name, parts.seconds(value), parts.percent(value / step), parts.seconds(0.1 * value))
        for name, value in record["limits_s"].items()
    ]
    # Where links are shared, other times load them otherwise: the path's share is then no bound.
    bound = "about" if record["simulation"]["network"] == "flows" else "at most"
    titles = ("kind of work", "on the critical path", "of the step", f"10 % less time saves {bound}")
    drawn = parts.limit_bars([("critical path", record)])
    return parts.section("What limits the step", _LIMITS, drawn, parts.grid(titles, rows), _through(record, step))


def _through(record: _Record, step: float) -> str:
    """The ranks through which the critical path goes."""
    rows = []
    for one in record.get("limits_by_rank", ()):
        spent = sum(one["limits_s"].values())
        shares = {name: value / spent for name, value in one["limits_s"].items()}
        work = ", ".join(f"{name} {parts.percent(share)}" for name, share in shares.items() if share >= 0.03)
        slower = "–" if one["slower"] == 1 else f"{one['slower']:g} times as long"
        who = (f"rank {one['rank']}", one["role"])
        rows.append((who, slower, parts.seconds(spent), parts.percent(spent / step), work))
    titles = ("the path goes through", "its kernels take", "for", "of the step", "with")
    return parts.grid(titles, rows, (1, 4))


def _path(record: _Record, path: _Record) -> str:
    step = record["step_time_s"] or 1.0
    spent = ("on the path", "of the step", "times", "each", "duration")
    operations = [
        (row["module"] or "–", (_named(row), row["shapes"]), *_spent(row, step)) for row in path["operations"]
    ]
    communication = [
        (
            _named(row),
            f"{row['group']}, {row['ranks']:,} ranks",
            " to ".join(dict.fromkeys(map(format_bytes, row["bytes"]))),
            ", ".join(row["algorithms"]) or "–",
            *_spent(row, step),
        )
        for row in path["collectives"]
    ]
    tables = (
        ("Operations", parts.grid(("module", "operation, shapes", *spent), operations, (1, 6))),
        ("Communication", parts.grid(("what", "group", "bytes", "algorithms", *spent), communication, (1, 3, 8))),
    )
    drawn = [f"<h3>{escape(title)}</h3>{table}" for title, table in tables if table]
    rest = f" What is not listed takes {parts.seconds(path['rest_s'])} of the path." if path["rest_s"] else ""
    if "limits_by_rank" in record:
        rest += " Listed are the ranks that are drawn, from where they no longer wait for other ranks."
    return parts.section("On the critical path", _PATH + rest, *drawn)


def _named(row: _Record) -> str:
    """An operation with its phase, where its name does not say it."""
    return row["name"] if row["phase"] in row["name"] else f"{row['name']}, {row['phase']}"


def _spent(row: _Record, step: float) -> tuple[str, ...]:
    """What the critical path spends on an operation, and where its duration comes from."""
    spread = f" ±\u00a0{100 * row['spread']:.0f}\u00a0%" if row["spread"] else ""
    on_path = row["on_path_s"]
    times = f"{row['count']:,}"
    share = parts.percent(on_path / step)
    return (parts.seconds(on_path), share, times, parts.seconds(row["each_s"]), f"{row['source']}{spread}" or "–")


def _memory(record: _Record) -> str:
    memory = record["memory"]
    if memory is None:
        return ""
    bar = parts.memory_bars([(f"{memory['program'] or 'each rank'}: {parts.memory_said(memory)}", memory)])
    peak = memory["peak_bytes"] or 1
    rows = [
        (
            row["where"],
            row["role"].replace("_", " "),
            format_bytes(row["bytes"]),
            parts.percent(row["bytes"] / peak),
        )
        for row in memory["contributors"]
    ]
    figures = [("allocated at the peak", "torch.cuda.max_memory_allocated", memory["peak_bytes"])]
    if memory["reserved_bytes"] is not None:
        figures.append(("reserved", "torch.cuda.max_memory_reserved", memory["reserved_bytes"]))
    figures += [(name, "", nbytes) for name, nbytes in memory["overhead_bytes"].items()]
    figures += [("in all", "nvidia-smi", memory["device_bytes"]), ("the device has", "", memory["capacity_bytes"])]
    told = parts.grid(("figure", "as shown by", "bytes"), [(a, b, format_bytes(c)) for a, b, c in figures], (1,))
    peaks = list(memory["peak_bytes_by_program"].items())
    by_role = charts.bars([(role, [nbytes]) for role, nbytes in peaks[:MOST_ROLES]], ["allocated"], "bytes")
    return parts.section(
        "Memory at the peak",
        _MEMORY,
        bar,
        parts.grid(("held by", "as", "bytes", "of what is allocated"), rows, (1,)),
        folded("the figures as tools report them", told),
        folded("what is allocated at the peak, role by role", by_role) if len(peaks) > 1 else "",
    )


def _communication(record: _Record) -> str:
    rows = [(axis, *parts.communication(record, axis)) for axis in record["collectives"]]
    return parts.section("Communication", _COMMUNICATION, parts.grid(parts.COMMUNICATION, rows, (5,)))


def _links(record: _Record) -> str:
    rows = [
        (link["name"], parts.percent(link["utilisation"]), f"{link['alike']:,}")
        for link in record.get("links", ())
    ]
    table = parts.grid(("link", "used", "links used alike"), rows)
    return parts.section("Links", "Those used most, as a share of their bandwidth over the step.", table)


def _rests(record: _Record, more: _Record) -> str:
    shares = ", ".join(
        f"{parts.percent(share)} {name}" for name, share in record["durations"].items() if share > 0
    )
    text = f"By the time that devices are busy, durations are {shares}. " if shares else ""
    text += "Assumed is a guess, analytical a formula from a datasheet, fitted a model of measurements."
    rows = [(part["part"], part["basis"], part["text"]) for part in more["assumptions"]]
    return parts.section("What it rests on", text, parts.grid(("part", "is", "from"), rows, (1, 2)))


MOST_OPERATIONS, MOST_COLLECTIVES = 15, 10
_TENSORS = 3
_LAST_NUMBER = re.compile(r"(?<=_)\d+$")
_NUMBER = re.compile(r"(?<![^.])(\d+|\{\})(?![^.])")


def details(result: Result, job: JobGraph, timeline: Timeline, found: Mapping[int, Pieces]) -> dict[str, Any]:
    """What the page shows besides the result, as data.

    Args:
        result: the prediction.
        job: the job that was simulated.
        timeline: what ran when.
        found: what the programs that are shown do at each moment.
    """
    staged = result.breakdown.bubble or "pp" in {axis.name for axis in job.mesh}
    idle = "bubble" if staged else "wait"
    return {
        "roles": [
            {
                "role": timeline.programs[number],
                "breakdown_s": breakdown(job, timeline, number).to_json(),
                "compute_s": _by_phase(job, timeline, moments),
            }
            for number, moments in found.items()
        ],
        "idle": idle,
        "critical_path": _Path(job, timeline, result.times).largest(),
    }


def _by_phase(job: JobGraph, timeline: Timeline, moments: Pieces) -> dict[str, float]:
    """The compute of one role by phase."""
    computes = moments.layer == COMPUTE
    phase = job.ops.phase[timeline.op[moments.row[computes]]]
    length = (moments.end - moments.start)[computes]
    spent = {one.name.lower(): to_s(int(length[phase == one].sum())) for one in Phase}
    return {name: value for name, value in spent.items() if value}


class _Path:
    """What the critical path is made of."""

    def __init__(self, job: JobGraph, timeline: Timeline, times: Durations | None) -> None:
        self.job, self.times, self.makespan = job, times, timeline.makespan
        path = timeline.critical_path()
        device = path[timeline.lane[path] == Lane.DEVICE]
        self.count = np.bincount(timeline.op[device], minlength=len(job.ops))
        self.spent = np.zeros(len(job.ops), np.int64)
        np.add.at(self.spent, timeline.op[device], timeline.duration[device])

    def largest(self) -> dict[str, Any]:
        """The operations and communications on which it spends most, and what is left of the step."""
        communicates = np.isin(self.job.ops.kind, COMMUNICATIONS)
        parts = (
            (~communicates, self._operation, MOST_OPERATIONS),
            (communicates, self._communication, MOST_COLLECTIVES),
        )
        operations, collectives = (self._rows(mask, of, most) for mask, of, most in parts)
        rest = self.makespan - sum(row["on_path_s"] for row in (*operations, *collectives))
        for row in (*operations, *collectives):
            row["on_path_s"] = to_s(row["on_path_s"])
            row["each_s"] = row["on_path_s"] / row["count"]
        return {"operations": operations, "collectives": collectives, "rest_s": to_s(rest)}

    def _rows(self, mask: Bools, of: Callable[[int], dict[str, Any]], most: int) -> list[dict[str, Any]]:
        """Those that are alike but for layer, stage and size together; the time is in picoseconds."""
        rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        for op in np.flatnonzero(mask & (self.spent > 0)).tolist():
            row = {**of(op), **self._source(op)}
            held = rows.setdefault(tuple(row.values()), {**row, "on_path_s": 0, "count": 0})
            held["on_path_s"] += int(self.spent[op])
            held["count"] += int(self.count[op])
            if "group" in row:
                self._widen(held, op)
        return sorted(rows.values(), key=lambda row: -row["on_path_s"])[:most]

    def _operation(self, op: int) -> dict[str, Any]:
        job = self.job
        touched = job.ops.outputs.row(op) or job.ops.inputs.row(op)
        # Of no module is, for instance, the sum of gradients: it is known by what it writes.
        of_tensor = job.tensors[int(job.root[touched[0]])].name if touched else ""
        module = job.strings[job.ops.module[op]] or of_tensor
        return {**self._named(op), "module": _NUMBER.sub("*", module), "shapes": _shapes(job, op)}

    def _communication(self, op: int) -> dict[str, Any]:
        group = self.job.groups[int(self.job.ops.group[op])]
        ranks = self.job.group_size(group)
        return {**self._named(op), "group": group.label, "ranks": ranks}

    def _named(self, op: int) -> dict[str, Any]:
        name = _LAST_NUMBER.sub("*", self.job.strings[self.job.ops.name[op]])
        return {"name": name, "phase": Phase(int(self.job.ops.phase[op])).name.lower()}

    def _source(self, op: int) -> dict[str, Any]:
        """Where the duration comes from: of what the network's model timed, which fabrics it rests on."""
        times = self.times
        if times is None or not times.source[op]:
            return {"source": "", "spread": 0.0}
        source = Source(int(times.source[op])).name.lower()
        modelled = times.estimates[op].source if op in times.algorithm else source
        return {"source": modelled, "spread": round(float(times.spread[op]), 4)}

    def _widen(self, row: dict[str, Any], op: int) -> None:
        """Sizes and algorithms of the communications that stand in one row."""
        nbytes = int(self.job.ops.nbytes[op])
        low, high = row.get("bytes", (nbytes, nbytes))
        row["bytes"] = [min(low, nbytes), max(high, nbytes)]
        algorithm = self.times.algorithm.get(op) if self.times is not None else None
        known = row.setdefault("algorithms", [])
        if algorithm and algorithm not in known:
            known.append(algorithm)


def _shapes(job: JobGraph, op: int) -> str:
    """Shapes of the first tensors that an operation reads, and of those that it writes."""
    read, written = (
        ["×".join(map(str, job.tensors.shape.row(tensor))) or "1" for tensor in side.row(op)]
        for side in (job.ops.inputs, job.ops.outputs)
    )
    more = ["…"] if len(read) > _TENSORS else []
    into = f" → {', '.join(written[:_TENSORS])}" if written else ""
    return f"{', '.join(read[:_TENSORS] + more)}{into}"


class Assumption(NamedTuple):
    """A part of the prediction and what it rests on.

    Attributes:
        part: the part, in a word.
        basis: what it is: "measured", "fitted", "analytical", "assumed" (a guess), "left out", ...
        text: an explanation in words.
    """

    part: str
    basis: str
    text: str


def assumptions(
    result: Result, job: JobGraph, plan: Plan, system: System, notes: Sequence[str] = ()
) -> list[Assumption]:
    """What a prediction rests on, the durations first.

    Args:
        result: the prediction.
        job: what was simulated.
        plan: the plan that the user gave.
        system: where it ran.
        notes: what the plan could not do.
    """
    device = None if is_traced(job) else system.device
    found = [*_given(result, job), *(_fitted(result, job, device) if device else ())]
    found += _network(result, system.cluster) if device and result.collectives else ()
    found += [Assumption("plan", "as asked", note) for note in notes]
    if "ep" in {axis.name for axis in job.mesh}:
        rows = f"{plan.expert_imbalance:g} times the mean of all ranks (--expert-imbalance)"
        found.append(Assumption("experts", "assumed", f"rows of the busiest rank's experts: {rows}"))
    if is_traced(job):
        return found
    if result.ranks is None:
        alike = "ranks of one role take equal time: no jitter, no slow node (--jitter, --straggler, --degrade)"
        found.append(Assumption("ranks", "assumed", alike))
    if result.memory is not None:
        found += [
            Assumption(
                "memory", "assumed" if "assumed" in name else "as users measured", f"{name}: {format_bytes(size)}"
            )
            for name, size in result.memory.overhead_bytes.items()
        ]
    return [*found, *_ALWAYS]


_ALWAYS = (
    Assumption(
        "overlap",
        "left out",
        "kernels and collectives that run at once do not slow each other, beyond `tp_comm_sms` of a stack",
    ),
    Assumption("the step", "left out", "data loading, checkpoints, logging, and what one step leaves to the next"),
    Assumption("interval", "formula", "covers durations, the model's form and a stack that is not named"),
)


def asked(scenario: Scenario, system: System) -> list[str]:
    """What a scenario and a system change of a prediction, in words; none for plain ones."""
    said = [f"{scale.selector} takes {scale.factor:g} times as long" for scale in scenario.scales]
    said += [f"{key} is {value}" for key, value in system.settings.items()]
    said += [
        f"{where.replace(':', ' ') if ':' in where else f'rank {where}'} is {factor:g} times as slow"
        for where, factor in scenario.slow
    ]
    said += [f"kernels vary by {100 * scenario.jitter:g} %"] if scenario.jitter else []
    said += ["the host waits for what a stage receives"] if system.host.waits else []
    said += ["every launch waits for its kernel"] if system.host.blocking and system.profile is None else []
    return said


def _given(result: Result, job: JobGraph) -> Iterator[Assumption]:
    """Durations that the graph or a profile holds."""
    if is_traced(job):
        yield Assumption("durations", "as traced", "every operation takes what it took in the trace")
        return
    for source, text in (("measured", "of this device"), ("imported", "as the imported graph has them")):
        share = result.sources.get(source, 0.0)
        if share > 0:
            yield Assumption("durations", source, f"{100 * share:.1f} % of the busy time, {text}")


def _fitted(result: Result, job: JobGraph, device: DeviceProfile) -> Iterator[Assumption]:
    """The models of kernels and of the host."""
    precision = str(result.plan.get("precision") or job.workload.dtype.text)
    name = {"fp16": "bf16", "fp8-blockwise": "fp8_block"}.get(
        precision, "fp8" if "fp8" in precision else precision
    )
    gemm = device.gemm.get(name)
    if result.sources.get("fitted", 0.0) + result.sources.get("analytical", 0.0) > 0:
        if gemm is not None and "matrix products" in result.limits:
            yield _labelled("matrix products", gemm.label)
        if "attention" in result.limits:
            attention = device.attention[device.default_attention]
            for name, one in (("forward", attention.forward), ("backward", attention.backward)):
                if one is not None:
                    yield _labelled(f"attention ({device.default_attention}), {name}", one.label)
        if "other kernels" in result.limits:
            yield from _other_kernels(device)
    yield Assumption("host", device.host.source, device.host.basis)


def _labelled(part: str, label: Label) -> Assumption:
    return Assumption(
        part, label.source, f"{label.basis}; error {100 * label.spread:.0f} % (one standard deviation)"
    )


def _other_kernels(device: DeviceProfile) -> Iterator[Assumption]:
    """The kinds of memory-bound kernels, those of one basis together."""
    by_basis: dict[tuple[str, str], list[str]] = {}
    spreads: dict[tuple[str, str], list[float]] = {}
    for kind, model in device.memory.items():
        key = (model.label.source, model.label.basis)
        by_basis.setdefault(key, []).append(kind)
        spreads.setdefault(key, []).append(model.label.spread)
    for (source, basis), kinds in by_basis.items():
        low, high = min(spreads[source, basis]), max(spreads[source, basis])
        error = " to ".join(dict.fromkeys(f"{100 * spread:.0f} %" for spread in (low, high)))
        yield Assumption(f"other kernels: {', '.join(kinds)}", source, f"{basis}; error {error}")


def _network(result: Result, cluster: Cluster) -> Iterator[Assumption]:
    domains: list[tuple[str, NodeFabric | NetworkFabric]] = [
        ("links within an NVLink domain", cluster.node_fabric)
    ]
    if result.gpus > cluster.domain_gpus:
        domains.append(("network between them", cluster.network.fabric))
    for part, fabric in domains:
        note = f" {fabric.about.note}" if fabric.about.note else ""
        yield Assumption(part, fabric.about.origin, f"{fabric.name}: {fabric.about.source}.{note}")
    shared = (
        "collectives share links as flows"
        if result.network == "flows"
        else "each collective takes its closed form; groups that communicate at once share the NICs evenly"
    )
    yield Assumption("network", "simulated" if result.network == "flows" else "formula", shared)
