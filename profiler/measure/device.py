"""What measuring needs of a device: a clock, an empty cache, its name. All that differs between them is here."""

from __future__ import annotations

import ctypes
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from re import sub
from statistics import median
from typing import Any, Literal

import torch

from echograph.errors import UsageError
from echograph.ir.profile import Environment

HostClockName = Literal["wall", "cpu"]

_ASSUMED_CACHE_BYTES = 32 * 2**20
_HOLD_CYCLES = 400_000
"""GPU cycles (some 0.2 ms) that the device idles before a measurement, so that the host is ahead of it."""
_RAMP_CYCLES = 100_000_000
"""GPU cycles (some 50 ms) in which the clocks come up."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_BASELINES = 101


class MeasuringDevice(ABC):
    """A device to measure on.

    Attributes:
        name: PyTorch's name of its kind.
        cache_bytes: what its last cache holds.
        runs_ahead: whether the host issues work that the device does later.
        host_clock: seconds of the host.
    """

    name: str
    cache_bytes: int
    runs_ahead: bool
    host_clock: Callable[[], float] = staticmethod(time.perf_counter)

    @abstractmethod
    def start(self) -> None:
        """Begins a measurement when all earlier work is done."""

    @abstractmethod
    def stop(self) -> float:
        """Seconds of the device since `start`."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits until the device is idle."""

    @abstractmethod
    def environment(self, name: str = "") -> Environment:
        """Where measurements are made; `name` under which graphs find them, or one of the hardware's."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Memory that tensors may still take."""

    @abstractmethod
    def peak_bytes(self, run: Callable[[], Any], given: Iterable[torch.Tensor]) -> int:
        """Runs something with given tensors; returns the memory that it allocates at its peak besides theirs."""

    def kernels(self, run: Callable[[], Any]) -> tuple[str, ...]:
        """Names of the device kernels that something launches, in order; none where the host computes."""
        return ()

    def utilisation(self) -> float | None:
        """Share of the last moments in which the device worked; None where no one says."""
        return None

    def baseline(self) -> float:
        """Seconds that a measurement of nothing shows."""

        def nothing() -> float:
            self.start()
            return self.stop()

        return median(nothing() for _ in range(_BASELINES))

    def flush(self) -> None:
        """Fills the cache with something else."""
        self._other.fill_(1)

    def use_other(self, nbytes: int) -> None:
        """Reads so many bytes of something else, at most twice what the cache holds."""
        if (words := nbytes // self._other.element_size()) > 0:
            self._other[:words].amax()

    @cached_property
    def _other(self) -> torch.Tensor:
        return torch.zeros(2 * self.cache_bytes // 4, dtype=torch.float32, device=self.name)


class Processor(MeasuringDevice):
    """The CPU: the host is the device, and computes with the threads that PyTorch has.

    Args:
        clock: "wall", or "cpu": the processor time of this process, which other processes disturb less.

    Raises:
        UsageError: processor time is asked for with several threads, where it adds them up.
    """

    name = "cpu"
    runs_ahead = False

    def __init__(self, clock: HostClockName = "wall") -> None:
        if clock == "cpu" and torch.get_num_threads() > 1:
            raise UsageError(
                "--clock cpu: adds up the time of several threads: set OMP_NUM_THREADS=1, or use wall"
            )
        self.cache_bytes = _processor_cache() or _ASSUMED_CACHE_BYTES
        self.host_clock = time.process_time if clock == "cpu" else time.perf_counter
        self._began = 0.0

    def start(self) -> None:
        """Begins a measurement."""
        self._began = self.host_clock()

    def stop(self) -> float:
        """Seconds since `start`."""
        return self.host_clock() - self._began

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def environment(self, name: str = "") -> Environment:
        """The processor, its threads and versions."""
        threads = torch.get_num_threads()
        hardware = _processor_name()
        return Environment(
            device=name or f"cpu-{_slug(hardware)}-{threads}t",
            hardware=hardware,
            torch=torch.__version__,
            date=_today(),
            threads=threads,
            memory_bytes=_memory("MemTotal:"),
        )

    def free_bytes(self) -> int:
        """What the kernel says is available."""
        return _memory("MemAvailable:") or 2**63 - 1

    def peak_bytes(self, run: Callable[[], Any], given: Iterable[torch.Tensor]) -> int:
        """The results: what a kernel takes for itself is not seen."""
        result = run()
        results = result if isinstance(result, tuple | list) else (result,)
        sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(results)}
        for tensor in given:
            sizes.pop(tensor.untyped_storage().data_ptr(), None)
        return sum(sizes.values())


class Cuda(MeasuringDevice):
    """A CUDA device, timed with events. It idles first, so that the host's own time does not show."""

    name = "cuda"
    runs_ahead = True

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise UsageError("--device cuda: PyTorch sees no CUDA device here: use --device cpu")
        self._properties: Any = torch.cuda.get_device_properties()
        self.cache_bytes = int(self._properties.L2_cache_size)
        cuda: Any = torch.cuda
        self._sleep = cuda._sleep
        self._events = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)

    def start(self) -> None:
        """Lets the device idle for a moment, and marks its end."""
        self._sleep(_HOLD_CYCLES)
        self._events[0].record()

    def stop(self) -> float:
        """Seconds between the two marks on the device."""
        self._events[1].record()
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) * 1e-3

    def synchronize(self) -> None:
        """Waits for the device."""
        torch.cuda.synchronize()

    def environment(self, name: str = "") -> Environment:
        """The device, its clocks, driver and versions."""
        hardware = torch.cuda.get_device_name()
        self._sleep(_RAMP_CYCLES)  # an idle device names its idle clocks
        return Environment(
            device=name or _slug(hardware),
            hardware=hardware,
            driver=_nvml(lambda nvml, _: nvml.nvmlSystemGetDriverVersion()) or "",
            torch=torch.__version__,
            cuda=torch.version.cuda or "",
            date=_today(),
            sm_clock_mhz=_nvml(lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)) or 0,
            memory_clock_mhz=_nvml(lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM)) or 0,
            memory_bytes=int(self._properties.total_memory),
        )

    def free_bytes(self) -> int:
        """What the driver and PyTorch's allocator have left."""
        reserved = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return int(torch.cuda.mem_get_info()[0]) + reserved

    def peak_bytes(self, run: Callable[[], Any], given: Iterable[torch.Tensor]) -> int:
        """What PyTorch's allocator gave at most, workspaces included."""
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def kernels(self, run: Callable[[], Any]) -> tuple[str, ...]:
        """As PyTorch's profiler sees them."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            run()
            torch.cuda.synchronize()
        events = [e for e in seen.events() or () if str(e.device_type).endswith("CUDA")]
        return tuple(str(e.name) for e in sorted(events, key=lambda e: e.time_range.start))

    def utilisation(self) -> float | None:
        """As NVML says."""
        found = _nvml(lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu)
        return None if found is None else float(found) / 100


def open_device(name: str, clock: HostClockName = "wall") -> MeasuringDevice:
    """The device to measure on.

    Args:
        name: "cpu" or "cuda".
        clock: of the CPU.

    Raises:
        UsageError: there is no such device here, or the clock is not one for it.
    """
    if name == "cuda":
        if clock != "wall":
            raise UsageError(f"--clock {clock}: is of --device cpu; CUDA is timed with events")
        return Cuda()
    return Processor(clock)


def keep_freed_memory() -> bool:
    """Makes malloc keep what is freed, as CUDA's caching allocator does; returns whether it can (glibc).

    Otherwise large results come from the system anew in every step, and the first touch of each of their pages
    costs as much as the operation itself.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    limit = 2**31 - 1
    return bool(mallopt(_M_MMAP_THRESHOLD, limit) and mallopt(_M_TRIM_THRESHOLD, limit))


def _nvml(ask: Callable[[Any, Any], Any]) -> Any:
    """What NVML answers; None where its Python binding is not installed, or refuses."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        # By identity: NVML numbers all devices, PyTorch those of CUDA_VISIBLE_DEVICES.
        uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
        answer = ask(pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
    except pynvml.NVMLError:
        return None
    return answer.decode() if isinstance(answer, bytes) else answer


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor)]


def _processor_cache() -> int:
    """Bytes of the processor's last cache; 0 where the system does not say."""
    sizes = {"K": 2**10, "M": 2**20, "G": 2**30}
    found = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        found += [int(text[:-1]) * sizes[text[-1]] for text in _lines(path)]
    return max(found)


def _processor_name() -> str:
    for line in _lines(Path("/proc/cpuinfo")):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "processor"


def _memory(key: str) -> int:
    """Bytes that /proc/meminfo has under a key; 0 where there is none."""
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    return 0


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().split("\n")[:-1]
    except OSError:
        return []


def _slug(text: str) -> str:
    return sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _today() -> str:
    return datetime.now(UTC).date().isoformat()
