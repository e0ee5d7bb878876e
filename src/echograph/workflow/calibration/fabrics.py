"""Fits fabrics: those that ship, to a table of collectives, and those of a user's cluster, to logs of nccl-tests.

The profiler's fit moves the numbers of the simulator's formulas. A recipe says which measured rows make which
shipped fabric: data, with where each comes from and what is assumed. From logs a cluster is written that has its
fabrics beside it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from echograph.errors import UsageError
from echograph.ir.files import write_whole
from echograph.profiler.fit.fabric import CollectiveRow, FabricFit, error_by_kind, fit_fabric, size_fold
from echograph.simulator.clusters import PRESETS, Cluster, load_cluster
from echograph.simulator.clusters.fabric import FABRICS, over_link, read_fabric_document
from echograph.simulator.collectives.calibrate import LIMITS, Calibration, place_measured

NETWORK_ONLY_BANDWIDTH = (
    "protocols.LL",
    "protocols.Simple.base_us",
    "protocols.Simple.hop_us",
    "nvls_tree.base_us",
    "nvls_tree.hop_us",
    "peer",
)


ASSUMED_ERROR = 0.3
TRANSFERRED_ERROR = 0.43
"""Mean error above 1 MiB of hops of one network with the bandwidth of another: hdr200's on efa-p5, efa-p4de and
slingshot11, 42, 40 and 48 %."""

CONGESTED = 1024
"""GPUs whose rows on Alps took twice those of 512 and of 2,048. That was this job's network: under four of the
source's other settings 1,024 GPUs took half, and others (256, 512, 2,048) twice to ten times as long."""


@dataclass(frozen=True, kw_only=True)
class FabricRecipe:
    """How one fabric is made: where its rows are, what the fit may move, and what its file says.

    Attributes:
        fabric: its name.
        cluster: where the rows were measured.
        rows: whether a row is one of its.
        start: the file to start from.
        source: who measured what.
        note: weak spots.
        origin: as in `Origin`.
        fixed: parameters that the fit leaves alone.
        judged: rows that judge the fit.
        hold_out: whether rows are held out.
        unseen: error by collective on rows of other tables, which no fit has seen; tests work it out again.
        assumed_error: as in `Origin`.
        in_pairs: whether each two GPUs of a node are joined by links of their own, without a switch.
    """

    fabric: str
    cluster: str
    rows: Callable[[CollectiveRow], bool]
    start: Callable[[], dict[str, Any]]
    source: str
    note: str
    origin: str = "fitted"
    fixed: tuple[str, ...] = ()
    judged: Callable[[CollectiveRow], bool] = lambda row: True
    hold_out: bool = True
    unseen: Mapping[str, float] = field(default_factory=dict)
    assumed_error: float = ASSUMED_ERROR
    in_pairs: bool = False


def _cost(base: float, hop: float, efficiency: float) -> dict[str, float]:
    return {"base_us": base, "hop_us": hop, "efficiency": efficiency}


def node_start(
    link: tuple[str, float], levels: dict[int, float], nvls: tuple[float, float] | None = None
) -> dict[str, Any]:
    """A node fabric to start from: NCCL's tuning table has hops of 0.6, 1.9 and 3.4 us on NVLink."""
    rate = next(iter(levels.values()))
    return {
        "kind": "node",
        "link": {"kind": link[0], "bandwidth_GBps": link[1]},
        "levels": [{"ranks": ranks, "bandwidth_GBps": value} for ranks, value in levels.items()],
        "fill": 0.4,
        "protocols": {"LL": _cost(5, 1, 0.4), "LL128": _cost(8, 1.9, 0.8), "Simple": _cost(15, 3.4, 1)},
        "nvls": nvls and {"base_us": nvls[0], "bandwidth_GBps": nvls[1]},
        "peer": {
            "LL": _cost(8, 0.2, 0.1),
            "Simple": _cost(14, 0.2, 1),
            "bandwidth_GBps": 0.85 * rate,
            "local_share": 0.3,
        },
    }


def network_start(
    efficiency: float, *, pat: bool, nvls_tree: bool, two_domain_volume: float = 1
) -> dict[str, Any]:
    """A network fabric to start from: NCCL's tuning table has hops of 5, 8.5 and 14 to 50 us for trees."""
    return {
        "kind": "network",
        "protocols": {
            "LL": _cost(5, 6, 0.3 * efficiency),
            "LL128": _cost(5, 8.5, 0.85 * efficiency),
            "Simple": _cost(5, 15, efficiency),
        },
        "two_domain_volume": two_domain_volume,
        "tree_efficiency": 1.0,
        "ring_hop_share": 0.5,
        "nvls_tree": _cost(20, 15, efficiency) if nvls_tree else None,
        "pat": pat,
        "peer": _cost(5, 1, efficiency),
    }


def like_hdr200(efficiency: float, nvls_tree: float) -> dict[str, Any]:
    """A network of other NICs: hops and the protocols' relative efficiency as hdr200 has them, tree included."""
    made = network_start(efficiency, pat=True, nvls_tree=True)
    fitted = json.loads((FABRICS / "hdr200.json").read_text())["protocols"]
    for name, cost in fitted.items():
        share = cost["efficiency"] / fitted["Simple"]["efficiency"]
        made["protocols"][name] = cost | {"efficiency": round(share * efficiency, 4)}
    made["nvls_tree"] = _cost(fitted["Simple"]["base_us"], fitted["Simple"]["hop_us"], nvls_tree)
    return made


def _one_node(gpu: str) -> Callable[[CollectiveRow], bool]:
    """Rows of NVIDIA's aiconfigurator; int8 sums, which no training step does and NVLS cannot, are left out."""
    return lambda row: "aiconfigurator" in row.source and row.gpu == gpu and row.dtype == "half"


def _alps(row: CollectiveRow) -> bool:
    """Of two versions of the network's plugin, which differ little, the newer."""
    return "alps" in row.source and "aws-1.13.0" in row.source


def _from_64_kib(row: CollectiveRow) -> bool:
    return row.size_bytes >= 65536


def _echo(row: CollectiveRow) -> bool:
    return "Echo" in row.source


_AIC = "nccl-tests of ai-dynamo/aiconfigurator (Apache-2.0), fp16, out-of-place"
_SHORT = "Only bandwidth is fitted; latencies are assumed: those of hdr200."

RECIPES = (
    FabricRecipe(
        fabric="nvlink3",
        cluster="dgx-a100",
        rows=_one_node("A100-SXM4-80GB"),
        start=lambda: node_start(("nvlink", 300), {8: 230}),
        source=f"{_AIC}, 2-8 A100-SXM4-80GB, NCCL 2.27.3",
        note="NCCL of 2022 takes up to twice as long from 64 KiB to 16 MiB; larger sizes agree.",
    ),
    FabricRecipe(
        fabric="nvlink3-one-process",
        cluster="azure-nd-a100-v4",
        rows=lambda row: _echo(row) and row.nodes == 1 and row.ranks > 1,
        start=lambda: node_start(("nvlink", 300), {8: 230}),
        source="nccl-tests logs of NetX-lab/Echo (MIT), 2-8 A100-SXM4-40GB, fp32, one process for all GPUs",
        note="One process launches on all GPUs in turn: small sizes are host-bound; training runs otherwise. "
        "Point-to-point traffic is that of nvlink3's start, unfitted.",
        origin="partly assumed",
        fixed=("peer",),
    ),
    FabricRecipe(
        fabric="nvlink4",
        cluster="dgx-h100",
        rows=_one_node("H100-SXM5-80GB"),
        start=lambda: node_start(("nvlink", 450), {8: 380}, (70, 300)),
        source=f"{_AIC}, 2-8 H100-SXM5-80GB, NCCL 2.29.2",
        note="NVLS is seen on 8 GPUs only; on fewer, its (1 + 1/n) law is taken from H200.",
    ),
    FabricRecipe(
        fabric="nvlink4-h200",
        cluster="dgx-h200",
        rows=lambda row: (
            _one_node("H200-SXM")(row)
            or (
                "stas00" in row.source
                and row.gpu == "H200-SXM"
                and "ENABLE=0" not in row.note
                and row.dtype == "float"
            )
        ),
        start=lambda: node_start(("nvlink", 450), {8: 380}, (70, 300)),
        source=f"{_AIC}, 2-8 H200-SXM, NCCL 2.29.2; "
        "4-8 H200 at 8 and 16 GiB of stas00/ml-engineering, NCCL 2.27.7",
        note="",
    ),
    FabricRecipe(
        fabric="nvlink5",
        cluster="dgx-b200",
        rows=_one_node("B200-SXM"),
        start=lambda: node_start(("nvlink", 900), {8: 780}),
        source=f"{_AIC}, 2-8 B200-SXM, NCCL 2.29.2",
        note="No NVLS: NCCL chose ring up to 4 GiB, above which NVLS is a tenth faster.",
    ),
    FabricRecipe(
        fabric="nvlink5-nvl72",
        cluster="gb200-nvl72",
        rows=lambda row: _one_node("GB200")(row) or ("coreweave" in row.source and row.ranks == 72),
        start=lambda: node_start(("nvlink", 900), {72: 750}, (400, 420)),
        source=f"{_AIC}, 2-4 GB200, NCCL 2.29.2; "
        "72 GB200 of one rack, 512 MiB to 8 GiB, coreweave/nccl-tests, NCCL 2.26.2",
        note="Between 4 and 72 GPUs nothing is measured; NVLS rests on five sizes of one run on 72.",
    ),
    FabricRecipe(
        fabric="pcie4",
        cluster="ethernet-100g",
        rows=_one_node("L40S"),
        start=lambda: node_start(("pcie", 32), {2: 20, 4: 5.5, 8: 1.5}),
        source=f"{_AIC}, 2-8 L40S on PCIe 4.0, NCCL 2.27.3",
        note="The eight-GPU rows of this host scatter by a factor of three between neighbouring sizes, and have a "
        "seventeenth of a pair's bandwidth; no preset names it.",
    ),
    FabricRecipe(
        fabric="pcie5",
        cluster="ethernet-100g",
        rows=_one_node("RTX PRO 6000"),
        start=lambda: node_start(("pcie", 64), {2: 38, 4: 26, 8: 24}),
        source=f"{_AIC}, 2-8 RTX PRO 6000 on PCIe 5.0, NCCL 2.29.2",
        note="ethernet-100g takes it at the bandwidth of PCIe 4.0.",
    ),
    FabricRecipe(
        fabric="hdr200",
        cluster="azure-nd-a100-v4",
        rows=lambda row: _echo(row) and row.nodes > 1,
        start=lambda: network_start(0.65, pat=False, nvls_tree=False, two_domain_volume=2),
        source="nccl-tests logs of NetX-lab/Echo (MIT), all_reduce, 16-128 A100-SXM4-40GB, "
        "eight HDR 200 Gb/s a node, fp32",
        note="Only all_reduce is measured across nodes; other collectives follow from its links. tree_efficiency, "
        "ring_hop_share and peer are assumed. Rows at 2 KiB (32), 1 KiB (128) and 128 KiB (64, 128) are outliers.",
        fixed=("peer",),
        judged=_from_64_kib,
    ),
    FabricRecipe(
        fabric="efa-p5",
        cluster="aws-p5",
        rows=lambda row: "(p5)" in row.gpu and row.nccl == "",
        start=lambda: network_start(0.8, pat=True, nvls_tree=True),
        source="nccl-tests of aws-samples/awsome-distributed-training, all_reduce, 16 H100 (p5), "
        "EFA 3,200 Gb/s, fp32",
        note="Two nodes only: what hop and base each cost is divided by their start values.",
        fixed=("peer",),
        judged=_from_64_kib,
    ),
    FabricRecipe(
        fabric="efa-p4de",
        cluster="aws-p4de",
        rows=lambda row: "(p4de)" in row.gpu,
        start=lambda: network_start(0.8, pat=True, nvls_tree=False),
        source="nccl-tests of aws-samples/awsome-distributed-training, all_reduce, 16 A100 (p4de), "
        "EFA 400 Gb/s, fp32",
        note="Two nodes only: what hop and base each cost is divided by their start values.",
        fixed=("peer",),
        judged=_from_64_kib,
    ),
    FabricRecipe(
        fabric="ndr400",
        cluster="dgx-h100",
        rows=lambda row: "coreweave" in row.source and row.ranks == 96,
        start=lambda: like_hdr200(0.95, 0.95),
        source="bandwidth: coreweave/nccl-tests, all_reduce, 96 H100, 512 MiB to 8 GiB, "
        "NDR 400 Gb/s a GPU; latencies: hdr200",
        note=f"{_SHORT} Errors are of DeepEP on 16 to 64 H100 and H200, and of vidur's send and receive.",
        origin="partly assumed",
        fixed=NETWORK_ONLY_BANDWIDTH,
        hold_out=False,
        unseen={"all_to_all": 0.23, "send_recv": 0.22},
        assumed_error=TRANSFERRED_ERROR,
    ),
    FabricRecipe(
        fabric="nvlink4-gh200x4",
        cluster="alps-gh200",
        rows=lambda row: _alps(row) and row.nodes == 1,
        start=lambda: node_start(("nvlink", 450), {4: 340}),
        source="nccl-tests of boeschf/nccl-benchmark-on-alps-2025, all_reduce, 4 GH200 of a node, fp32, "
        "NCCL 2.23.4",
        note="Only all_reduce on four GPUs is measured; point-to-point traffic is its start, unfitted. A group of "
        "n GPUs has the links of n - 1 pairs a GPU.",
        origin="partly assumed",
        fixed=("peer",),
        in_pairs=True,
    ),
    FabricRecipe(
        fabric="slingshot11",
        cluster="alps-gh200",
        rows=lambda row: _alps(row) and row.nodes > 1 and row.size_bytes >= 262144 and row.ranks != CONGESTED,
        start=lambda: network_start(0.92, pat=True, nvls_tree=False) | {"ll128_chunks": 2, "ring_message_us": 40},
        source="nccl-tests of boeschf/nccl-benchmark-on-alps-2025, all_reduce, 8 to 2,048 GH200, "
        "256 KiB to 4 GiB, four Slingshot 11 of 200 Gb/s a node, fp32, NCCL 2.23.4, plugin aws-ofi-nccl 1.13.0",
        note="Only all_reduce is measured. A fit to 64 GPUs is 12 % off on 128 to 2,048 above 1 MiB, but for "
        "1,024, left out since their job took twice what 512 and 2,048 did. ll128_chunks is assumed. 16 to 64 "
        "GPUs take up to three times as long with half a MiB to one a rank.",
        origin="partly assumed",
        fixed=("peer",),
    ),
    FabricRecipe(
        fabric="nvl72-ib",
        cluster="gb200-nvl72",
        rows=lambda row: "coreweave" in row.source and row.ranks > 96,
        # A GPU has the NIC that ndr400's has; how many of a rack's one group uses, the rows say.
        start=lambda: like_hdr200(0.95, 0.95) | {"ring_nics": 8},
        source="bandwidth: coreweave/nccl-tests, all_reduce, 128 and 1,440 GB200, "
        "512 MiB to 16 GiB; latencies: hdr200",
        note="Only nvls_tree is fitted; the protocols' hops are assumed: those of hdr200, and efficiencies those "
        "of ndr400, whose NIC it is. The rows reach 400 GB/s of a rack's 3,600: rings and trees of a group are "
        "taken to use 8 of its NICs, point-to-point traffic each GPU's own.",
        origin="partly assumed",
        fixed=("protocols", "peer", "ring_nics"),
        hold_out=False,
        assumed_error=TRANSFERRED_ERROR,
    ),
)


FOLDS = 4


def rows_of(recipe: FabricRecipe, rows: list[CollectiveRow]) -> list[CollectiveRow]:
    """The rows that make a fabric."""
    return [row for row in rows if recipe.rows(row)]


def fit_recipe(recipe: FabricRecipe, rows: list[CollectiveRow]) -> FabricFit:
    """Fits a recipe's fabric on given rows."""
    calibration = _calibration(recipe, rows)
    return fit_fabric(rows, calibration.predict, calibration.start(), upper=LIMITS)


def cross_validate(recipe: FabricRecipe, rows: list[CollectiveRow]) -> tuple[list[CollectiveRow], np.ndarray]:
    """Predicts every row that is judged by a fit that has not seen its size; rows and seconds."""
    judged: list[CollectiveRow] = []
    seconds: list[np.ndarray] = []
    for fold in range(FOLDS):
        test = [row for row in rows if size_fold(row, FOLDS) == fold and recipe.judged(row)]
        made = fit_recipe(recipe, [row for row in rows if size_fold(row, FOLDS) != fold])
        judged += test
        seconds.append(predict(recipe, made, test))
    return judged, np.concatenate(seconds)


def predict(recipe: FabricRecipe, made: FabricFit, rows: list[CollectiveRow]) -> np.ndarray:
    """Seconds of rows by a fit."""
    return _calibration(recipe, rows).predict(made.parameters)


def _calibration(recipe: FabricRecipe, rows: list[CollectiveRow]) -> Calibration:
    return Calibration(load_cluster(recipe.cluster), recipe.fabric, _start(recipe), rows, recipe.fixed)


def _start(recipe: FabricRecipe, date: str = "") -> dict[str, Any]:
    about = {"origin": recipe.origin, "source": recipe.source, "date": date, "assumed_error": recipe.assumed_error}
    return {"about": about, **recipe.start()}


def fabric_document(
    recipe: FabricRecipe, made: FabricFit, rows: list[CollectiveRow], date: str
) -> tuple[dict[str, Any], dict[str, float]]:
    """The fabric's file, and the errors by collective on rows unseen by their fit."""
    judged, seconds = cross_validate(recipe, rows) if recipe.hold_out else ([], np.empty(0))
    error = error_by_kind(judged, seconds) if judged else {}
    about = {
        "rows": len(rows),
        "held_out_rows": len(judged),
        "held_out_error": {kind: round(value, 4) for kind, value in error.items()} | dict(recipe.unseen),
        "note": recipe.note,
    }
    rounded = {name: float(f"{value:.4g}") for name, value in made.parameters.items()}
    content = _calibration(recipe, rows).document(rounded)
    if recipe.in_pairs:
        content |= _in_pairs(content)
    return content | {"about": content["about"] | about | {"date": date}}, error


def _in_pairs(content: Mapping[str, Any]) -> dict[str, Any]:
    """Bandwidths of smaller groups than the one that was measured, as links of pairs give them."""
    (whole,), peer = content["levels"], content["peer"]
    pair = whole["bandwidth_GBps"] / (whole["ranks"] - 1)
    levels = [{"ranks": n, "bandwidth_GBps": float(f"{(n - 1) * pair:.4g}")} for n in range(2, whole["ranks"] + 1)]
    to_one = float(f"{peer['bandwidth_GBps'] / (whole['ranks'] - 1):.4g}")
    return {"levels": levels, "peer": peer | {"bandwidth_GBps": to_one}}


MIN_ROWS = 8


def fit_logs(
    rows: Sequence[CollectiveRow], cluster: str, name: str, output: Path, date: str
) -> list[dict[str, Any]]:
    """Writes `name.toml` and the fabrics that rows speak of, beside it.

    Links inside a domain are fitted first, to the rows of one domain; then what joins domains, to the others.

    Args:
        rows: measured collectives.
        cluster: what they ran on: a preset, or the path of a TOML file.
        name: name of the new cluster.
        output: folder.
        date: date of the fit, as it stands in the profiles.

    Returns:
        A record for each kind of collective of a fabric: rows, and the error on sizes that its fit has not seen.

    Raises:
        UsageError: too few rows to fit anything to, or a cluster file that does not name its fabrics on lines of
            their own.
        DataError: a row does not fit the cluster.
    """
    where, records = load_cluster(cluster), []
    path = Path(cluster) if cluster.endswith(".toml") else PRESETS / f"{cluster}.toml"
    text = path.read_text(encoding="utf-8")
    rows = [row for row in rows if row.ranks > 1]
    inside = [place_measured(row.ranks, row.nodes, where).domains == 1 for row in rows]
    for table in ("node", "network"):
        mine = [row for row, within in zip(rows, inside, strict=True) if within == (table == "node")]
        if len(mine) < MIN_ROWS:
            text = _point_at(text, table, path.parent)
            continue
        start = read_fabric_document(_shipped_or_beside(text, table, path.parent))
        if table == "node":
            # The rows are of this cluster's links, so that is what the new fabric says of its bandwidths.
            start = dict(over_link(start, where.node_fabric.link, f"{name}-node"))
            start |= {} if where.node_fabric.nvls else {"nvls": None}
        document, error = _fitted(mine, where, f"{name}-{table}", start, date)
        write_whole(output / f"{name}-{table}.json", [json.dumps(document, indent=2) + "\n"])
        text = _with_fabric(text, table, f"{name}-{table}.json")
        records += [
            {"profile": f"{name}-{table}", "what": kind, "rows held out": document["about"]["held_out_rows"],
             "median error": None, "mean error": round(value, 4), "bias": None}
            for kind, value in error.items()
        ]  # fmt: skip
        write_whole(output / f"{name}.toml", [text])
        where = load_cluster(output / f"{name}.toml")
    if not records:
        raise UsageError(f"--nccl-tests: {len(rows)} rows; a fit takes {MIN_ROWS} inside a node or between nodes")
    write_whole(output / f"{name}.toml", [text])
    return records


def _fitted(
    rows: list[CollectiveRow], cluster: Cluster, name: str, start: dict[str, Any], date: str
) -> tuple[dict[str, Any], dict[str, float]]:
    """The fabric's file, fitted on all rows, and its errors on rows whose size another fit had not seen."""

    def fit(seen: list[CollectiveRow]) -> tuple[Calibration, FabricFit]:
        calibration = Calibration(cluster, name, start, seen)
        return calibration, fit_fabric(seen, calibration.predict, calibration.start(), upper=LIMITS)

    judged: list[CollectiveRow] = []
    seconds: list[np.ndarray] = []
    for fold in range(FOLDS):
        seen = [row for row in rows if size_fold(row, FOLDS) != fold]
        test = [row for row in rows if size_fold(row, FOLDS) == fold]
        if seen and test:
            judged += test
            parameters = fit(seen)[1].parameters
            seconds.append(Calibration(cluster, name, start, test).predict(parameters))
    error = error_by_kind(judged, np.concatenate(seconds)) if judged else {}
    calibration, made = fit(rows)
    document = calibration.document({key: float(f"{value:.4g}") for key, value in made.parameters.items()})
    ranks = sorted({row.ranks for row in rows})
    document["about"] |= {
        "origin": "fitted",
        "source": f"nccl-tests on {ranks[0]} to {ranks[-1]} {rows[0].gpu or 'GPUs'}, NCCL {rows[0].nccl or '?'}",
        "date": date,
        "rows": len(rows),
        "held_out_rows": len(judged),
        "held_out_error": {kind: round(value, 4) for kind, value in error.items()},
        "note": f"no row speaks of: {', '.join(made.undetermined) or 'nothing'}",
    }
    return document, error


def _section(text: str, table: str) -> re.Match[str]:
    found = re.search(rf"^\[{table}\][ \t]*(#.*)?$.*?(?=^\[|\Z)", text, re.MULTILINE | re.DOTALL)
    return _written_plainly(found, f"[{table}]")


def _named(text: str, table: str) -> str:
    found = re.search(r"""^fabric\s*=\s*["']([^"']*)["']""", _section(text, table)[0], re.MULTILINE)
    return _written_plainly(found, f"fabric of [{table}]")[1]


def _written_plainly(found: re.Match[str] | None, what: str) -> re.Match[str]:
    if found is None:
        raise UsageError(
            f"--cluster: its file writes {what} in a way that cannot be changed: give it lines of its own"
        )
    return found


def _shipped_or_beside(text: str, table: str, folder: Path) -> str | Path:
    name = _named(text, table)
    return folder / name if name.endswith(".json") else name


def _point_at(text: str, table: str, folder: Path) -> str:
    """The file with a fabric of its own folder named from wherever it lies."""
    where = _shipped_or_beside(text, table, folder)
    return _with_fabric(text, table, str(where.resolve())) if isinstance(where, Path) else text


def _with_fabric(text: str, table: str, fabric: str) -> str:
    section = _section(text, table)
    changed = re.sub(r"^fabric\s*=.*$", lambda _: f'fabric = "{fabric}"', section[0], count=1, flags=re.MULTILINE)
    return text[: section.start()] + changed + text[section.end() :]
