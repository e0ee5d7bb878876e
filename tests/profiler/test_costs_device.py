"""Profiles: every shipped one loads, is small, names its sources, and a broken file is refused in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from echograph.errors import DataError, FormatError, InputError, UnknownNameError
from echograph.profiler.costs.device import DeviceProfile, Label, device_names, load_device

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
