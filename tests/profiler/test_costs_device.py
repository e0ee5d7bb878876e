"""Profiles: every shipped one loads, is small, names its sources, and a broken file is refused in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from echograph.errors import DataError, FormatError, InputError, UnknownNameError
from echograph.profiler.costs.device import (
    AttentionPass,
    DeviceProfile,
    GemmModel,
    GroupedModel,
    HeldOut,
    HostModel,
    Label,
    MemoryModel,
    device_names,
    load_device,
)

FITTED = ("a100-sxm-80", "h100-sxm", "h200", "b200")
MAX_BYTES = 300_000


def labels(device: DeviceProfile) -> list[Label]:
    passes = [p for a in device.attention.values() for p in (a.forward, a.backward) if p is not None]
    owners = (*device.gemm.values(), *passes, *device.memory.values(), device.grouped)
    return [owner.label for owner in owners]


@pytest.mark.parametrize("name", device_names())
def test_profile_is_small_and_names_its_sources(name: str) -> None:
    device = load_device(name)
    assert device.name == name
    assert len(msgspec.json.encode(device)) < MAX_BYTES
    assert device.datasheet.source
    assert device.host.basis
    for label in labels(device):
        assert label.basis
        assert 0.0 < label.spread <= label.spread_short < 1.0


@pytest.mark.parametrize("name", device_names())
def test_what_is_borrowed_or_assumed_is_never_called_fitted(name: str) -> None:
    for label in labels(load_device(name)):
        if label.basis.startswith("assumed"):
            assert label.source == "analytical"
        if label.source == "analytical":
            assert label.held_out.long is None


@pytest.mark.parametrize("name", FITTED)
def test_measured_devices_are_fitted(name: str) -> None:
    device = load_device(name)
    assert device.gemm["bf16"].label.source == "fitted"
    assert device.attention["trtllm"].forward.label.source == "fitted"


def test_unknown_device_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'h100-sxm'"):
        load_device("h100-smx")


def test_a_users_own_profile_loads_by_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(load_device("h100-sxm"), name="mine")))
    assert load_device(path).name == "mine"


def test_broken_files_are_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    with pytest.raises(InputError, match="No such file"):
        load_device(path)
    path.write_text('{"format": 1')
    with pytest.raises(FormatError, match="not a device profile"):
        load_device(path)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(load_device("h100-sxm"), format=2)))
    with pytest.raises(FormatError, match="newer"):
        load_device(path)
    orphan = msgspec.structs.replace(load_device("h100-sxm"), default_attention="none")
    path.write_bytes(msgspec.json.encode(orphan))
    with pytest.raises(DataError, match="default_attention"):
        load_device(path)


def test_predicting_imports_no_framework() -> None:
    script = (
        "import sys\n"
        "from echograph.profiler.costs import gemm, load_device\n"
        "gemm(load_device('h100-sxm'), 4096, 4096, 4096)\n"
        "heavy = {'torch', 'scipy', 'pandas', 'google.protobuf', 'numba'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


LEFT_OUT: dict[type[msgspec.Struct], dict[str, object]] = {
    # Factors of 1, shares and additions of 0, and of what is not there nothing.
    GemmModel: {
        "time_scale": 1.0, "transposed_scale": {}, "batched_scale": 1.0, "batched_spread": 0.0, "alignment": None,
        "quantize": None, "residual": None, "traffic_cached": 1.0, "cache_share": 1.0, "k_step": 0,
        # All of the traffic of an accumulator is seen, until a fit says how much is hidden.
        "accumulate_exposure": 1.0,
    },
    AttentionPass: {
        "query_traffic": 0.0, "kv_traffic": 0.0, "traffic_knee_bytes": 1.0, "traffic_sharpness": 1.0,
        "traffic_cached": 1.0, "time_scale": 1.0, "plateau_keys": 1e30, "windowed_scale": 1.0, "residual": None,
        "tile": 128, "tile_elements": 0, "tile_fits": 0, "key_tile": 1, "wave_rounding": 0.0, "splits": 1.0,
        "edge": 0.5, "throttle": 0.0, "throttle_flops": 0.0,
    },
    HostModel: {"view_s": None, "communication_s": None},
    Label: {"held_out": HeldOut(), "between_libraries": 0.0},
    HeldOut: {"long": None, "short": None},
    MemoryModel: {"moved_bytes": [], "moved_scale": [], "finish_s": 0.0, "column_cycles": 0.0},
    GroupedModel: {"products": {}, "together": {}},
    DeviceProfile: {
        "sustained_gemm_slowdown": 1.0, "sustained_basis": "", "power": None, "scan": None,
        "traced": msgspec.UNSET,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", LEFT_OUT, ids=lambda kind: kind.__name__)
def test_what_a_profile_leaves_out_changes_nothing(kind: type[msgspec.Struct]) -> None:
    device = load_device("h100-sxm")
    gemm = device.gemm["bf16"]
    full = {
        GemmModel: gemm, AttentionPass: device.attention["flash2"].forward, HostModel: device.host,
        Label: gemm.label, HeldOut: gemm.label.held_out, MemoryModel: device.memory["norm"], DeviceProfile: device,
        GroupedModel: device.grouped,
    }[kind]  # fmt: skip
    document = {key: value for key, value in msgspec.to_builtins(full).items() if key not in LEFT_OUT[kind]}
    read = msgspec.convert(document, kind)
    assert {key: getattr(read, key) for key in LEFT_OUT[kind]} == LEFT_OUT[kind]
    required = [f.name for f in msgspec.structs.fields(kind) if f.required]
    assert sorted([*required, *LEFT_OUT[kind]]) == sorted(kind.__struct_fields__)


GEMM, FLASH = "gemm.bf16", "attention.flash2.forward"
EDGES: list[tuple[str, object, object]] = [
    ("datasheet.memory_bandwidth_bytes_per_s", 1e6, 0.99e6), ("datasheet.clock_hz", 1e21, 1.01e21),
    ("datasheet.memory_bytes", 0, -1), ("datasheet.memory_bytes", 2**60, 2**60 + 1),
    ("datasheet.sm_count", 1, 0), ("datasheet.sm_count", 10**6, 10**6 + 1),
    ("memory_launch_s", 1, 1.01), ("memory_launch_s", 0, -0.01),
    ("sustained_gemm_slowdown", 1e-3, 0.9e-3), ("sustained_gemm_slowdown", 1e3, 1001),
    (f"{GEMM}.wave_rounding", 1, 1.01), (f"{GEMM}.wave_rounding", 0, -0.01),
    (f"{GEMM}.split_traffic", 1e3, 1001), (f"{GEMM}.split_traffic", 0, -0.01),
    (f"{GEMM}.throttle_flops", 1e30, 1.01e30), (f"{GEMM}.throttle_flops", 0, -1),
    (f"{GEMM}.overlap_power", 0.1, 0.09), (f"{GEMM}.overlap_power", 1e3, 1001),
    (f"{GEMM}.element_bytes", 0.125, 0.12), (f"{GEMM}.element_bytes", 16, 16.1),
    (f"{GEMM}.k_step", 0, -1), (f"{GEMM}.k_step", 4096, 4097), (f"{FLASH}.tile_elements", 0, -1),
    (f"{GEMM}.efficiency.0", 1e-4, 0.9e-4), (f"{GEMM}.efficiency.0", 2, 2.01),
    (f"{GEMM}.overhead_k.0", 1e9, 1e9 + 1), (f"{GEMM}.overhead_k.0", 0, -1),
    (f"{GEMM}.splits", [1], []), (f"{GEMM}.tiles.0.0", 1, 0), (f"{GEMM}.residual.knots.0", [1, 2], [1]),
    (f"{GEMM}.residual.permille.0", 10_000, 10_001), (f"{GEMM}.residual.permille.0", -10_000, -10_001),
    (f"{GEMM}.label.spread", 10, 10.1), (f"{GEMM}.label.spread", 0, -0.1),
    (f"{GEMM}.label.held_out.long.bias", 1e6, 1e6 + 1), (f"{GEMM}.label.held_out.long.bias", -1e6, -1e6 - 1),
    (f"{GEMM}.label.held_out.long.rows", 0, -1), (f"{GEMM}.label.held_out.long.rows", 10**12, 10**12 + 1),
    (f"{FLASH}.traffic_knee_bytes", 1, 0.9), (f"{FLASH}.traffic_knee_bytes", 1e30, 1.1e30),
    ("name", "x", ""), ("name", "x" * 200, "x" * 201), ("format", 1, 0),
    # What two values must be beside each other.
    (f"{FLASH}.head_dims", [1, 2, 3, 4, 5], [1, 2, 2, 4, 5]), ("memory.norm.row_bytes", [2, 3], [3, 3]),
    (f"{GEMM}.alignment.operand", {"16": 1.0}, {"15": 1.0}),
    (f"{GEMM}.alignment.output", {"16": 1.0}, {"15": 1.0}),
    ("host.view_s", 5e-6, 6e-6),
]  # fmt: skip


@pytest.mark.parametrize(("way", "good", "bad"), EDGES, ids=[way for way, *_ in EDGES])
def test_the_last_value_that_a_profile_may_say_and_the_first_that_it_may_not(
    way: str, good: object, bad: object
) -> None:
    document = json.loads(msgspec.json.encode(load_device("h100-sxm")))
    document["host"]["op_s"] = 5e-6
    *parents, last = way.split(".")
    place = document
    for key in parents:
        place = place[int(key) if isinstance(place, list) else key]
    if way.endswith(("head_dims", "row_bytes")):
        of = "efficiency" if way.endswith("head_dims") else "bandwidth_fraction"
        place[of] = [0.5] * len(good)  # type: ignore[arg-type]
    for value, fits in ((good, True), (bad, False)):
        place[int(last) if isinstance(place, list) else last] = value
        if way.endswith("knots.0"):
            grid = document["gemm"]["bf16"]["residual"]
            grid["permille"] = [0] * (len(value) * len(grid["knots"][1]) * len(grid["knots"][2]))  # type: ignore[arg-type]
        if fits:
            msgspec.convert(document, DeviceProfile, str_keys=True)
            continue
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(document, DeviceProfile, str_keys=True)
