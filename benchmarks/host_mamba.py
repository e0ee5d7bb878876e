"""What calls of state-spaces/mamba take the host: Triton's launchers, einops and autograd's Python.

python -m benchmarks.host_mamba FOLDER [--seconds S]

FOLDER has the package `mamba_ssm`; Triton and einops are installed. No device is needed: kernels are compiled for
one (compute capability 9.0), by the driver that stands here for NVIDIA's, and launching one calls a function that
does nothing. So what a launch takes in C, from the arguments on, is not in the figure; neither are the kernels of
the convolution, nor what it takes to choose among configurations, of which the first is taken. The functions of
PyTorch run on the CPU, on tensors so small that their arithmetic is next to nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.host import Trained, turns, undisturbed

CAPABILITY = (9, 0)
HEADS, HEAD, GROUPS, STATE, CHUNK, TOKENS = 2, 16, 1, 16, 16, 16


class Kernels(TorchDispatchMode):
    """Counts operators of PyTorch that launch a kernel: neither views nor memory."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts one."""
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        self.count += not view and not func.__name__.startswith(("empty", "new_empty"))
        return func(*args, **(kwargs or {}))


class _Utilities:
    """What Triton asks of a device, without one."""

    launch = "".format  # takes whatever it is given, in C

    @staticmethod
    def load_binary(*_: Any) -> tuple[int, ...]:
        """A module, a function, registers, spills, threads."""
        return 0, 0, 32, 0, 1024

    @staticmethod
    def build_signature_metadata(_: Any) -> bytes:
        """For the launcher in C."""
        return b""

    @staticmethod
    def get_device_properties(_: int) -> dict[str, int]:
        """Enough of everything."""
        return {"max_shared_mem": 10**9, "multiprocessor_count": 132, "max_num_regs": 65536, "warpSize": 32}


def install(folder: Path) -> None:
    """Makes `mamba_ssm.ops.triton` of a clone one that is imported, over a driver that launches nothing."""
    nvidia: Any = importlib.import_module("triton.backends.nvidia.driver")
    runtime: Any = importlib.import_module("triton.runtime")
    nvidia.PyKernelArg = lambda nested_tuple=None, type=None: (nested_tuple, type)
    nvidia.ARG_CONSTEXPR, nvidia.ARG_KERNEL, nvidia.ARG_TUPLE = 0, 1, 2

    driver = object.__new__(nvidia.CudaDriver)  # which would ask for a device
    driver.utils, driver.launcher_cls = _Utilities(), nvidia.CudaLauncher
    driver.get_device_capability = lambda device=0: CAPABILITY
    driver.get_current_device = lambda: 0
    driver.get_current_stream = lambda device: 0
    runtime.driver.set_active(driver)
    runtime.Autotuner._bench = lambda *_, **__: [1.0, 1.0, 1.0]
    for name in ("_exchange_device", "_maybe_exchange_device"):
        setattr(torch.cuda, name, lambda device: 0)
    properties = SimpleNamespace(multi_processor_count=132)
    torch.cuda.get_device_properties = lambda device=None: properties
    functions: Any = ModuleType("causal_conv1d.cpp_functions")
    functions.causal_conv1d_fwd_function = lambda x, *_: torch.empty_like(x)
    functions.causal_conv1d_bwd_function = lambda x, weight, bias, *rest: (
        rest[4], torch.empty_like(weight), torch.empty_like(bias),
    )  # fmt: skip
    functions.causal_conv1d_update_function = None
    convolution: Any = ModuleType("causal_conv1d")
    convolution.causal_conv1d_fn = None
    package = ModuleType("mamba_ssm")  # as it is, without what it imports of models
    package.__path__ = [str(folder / "mamba_ssm")]
    sys.modules |= {"causal_conv1d": convolution, functions.__name__: functions, "mamba_ssm": package}


def _scan() -> Trained:
    combined: Any = importlib.import_module("mamba_ssm.ops.triton.ssd_combined")
    of_scan, channels = HEADS * HEAD, HEADS * HEAD + 2 * GROUPS * STATE
    shapes = {"given": (1, TOKENS, of_scan + channels + HEADS), "weight": (channels, 4), "bias": (channels,)}
    made = {name: torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for name, shape in shapes.items()}
    of_heads = [torch.randn(HEADS, requires_grad=True) for _ in range(3)]

    def run(again: bool) -> Tensor:
        del again
        for tensor in (*made.values(), *of_heads):
            tensor.grad = None
        out: Tensor = combined.mamba_split_conv1d_scan_combined(
            *made.values(), *of_heads, chunk_size=CHUNK, activation="silu", headdim=HEAD, ngroups=GROUPS,
            norm_before_gate=False,
        )  # fmt: skip
        return out

    return Trained(run)


def _norm() -> Trained:
    width = HEADS * HEAD
    norm: Any = importlib.import_module("mamba_ssm.ops.triton.layernorm_gated").RMSNorm(
        width, norm_before_gate=False, dtype=torch.bfloat16
    )
    given, gate = (torch.randn(1, TOKENS, width, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))

    def run(again: bool) -> Tensor:
        del again
        given.grad = gate.grad = norm.weight.grad = None
        out: Tensor = norm(given, gate)
        return out

    return Trained(run)


CASES = {"mamba_split_conv1d_scan_combined": _scan, "RMSNorm gated": _norm}
"""What is measured: one call, with all gradients."""


def main() -> None:
    """Prints a line a case and phase, and writes host-mamba.json to $OUT (default: out/host)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_mamba")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=30.0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    install(given.folder)
    found = {name: _measured(make(), given.seconds) for name, make in CASES.items()}
    for name, phases in found.items():
        for phase, of in phases.items():
            kernels = f"{of['triton']:>4} of Triton{of['torch']:>4} of PyTorch"
            print(f"{name:<34}{phase:<10}{1e6 * of['s']:>8.0f} us{kernels}")
    out = Path(os.environ.get("OUT", "out/host"))
    out.mkdir(parents=True, exist_ok=True)
    (out / "host-mamba.json").write_text(json.dumps(found, indent=2) + "\n")


def _measured(step: Trained, seconds: float) -> dict[str, dict[str, float]]:
    """Seconds of a call, its launches by Triton and its operators of PyTorch that launch, by phase."""
    taken = turns({"": step}, (False,), seconds)["", False]
    launches: list[int] = []
    runtime: Any = importlib.import_module("triton.runtime")
    original = runtime.JITFunction.run
    runtime.JITFunction.run = lambda *args, **named: (launches.append(1), original(*args, **named))[1]
    with Kernels() as kernels:
        marks = step(False, lambda: 1000 * len(launches) + kernels.count)
    runtime.JITFunction.run = original
    return {
        phase: {"s": undisturbed(taken, side), "triton": marks[side] // 1000, "torch": marks[side] % 1000}
        for side, phase in enumerate(("forward", "backward"))
    }


if __name__ == "__main__":
    main()
