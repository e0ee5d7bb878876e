"""What NVML says of a device, where its Python binding is there: tried with stand-ins for both."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the [torch] extra")

from echograph.profiler.measure.device import Cuda  # noqa: E402

pytestmark = pytest.mark.torch


class Refused(Exception):
    pass


def binding(devices: dict[str, int], asked: list[str]) -> Any:
    def find(uuid: str) -> int:
        asked.append(uuid)
        if uuid not in devices:
            raise Refused
        return devices[uuid]

    return SimpleNamespace(
        NVMLError=Refused,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=find,
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=handle),
    )


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[[], float | None]:
    """The utilisation of a device that PyTorch numbers 0, whatever NVML numbers it."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="b"))
    return lambda: Cuda.utilisation(object.__new__(Cuda))


def test_utilisation_is_that_of_the_device_in_use(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setitem(sys.modules, "pynvml", binding({"GPU-a": 3, "GPU-b": 42}, asked))
    assert cuda() == 0.42 and asked == ["GPU-b"]


def test_without_the_binding_or_its_answer_there_is_none(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert cuda() is None
    monkeypatch.setitem(sys.modules, "pynvml", binding({"GPU-a": 3}, []))
    assert cuda() is None
