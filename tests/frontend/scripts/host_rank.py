"""One real rank of a script that is written for GPUs, on a CPU over gloo: what is asked for on a GPU is made here.

    python host_rank.py train.py ...      python host_rank.py -m package.train ...

Nothing is captured, and no tensor is fake: the script's own code, PyTorch's wrappers and gloo run as they are.
Only where something is, and what a GPU is asked, is answered otherwise.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo  # before anything of it is another
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from echograph.frontend.scripts import stand_ins

_CPU = torch.device("cpu")


def _gpu(device: Any) -> bool:
    return not isinstance(device, bool) and (isinstance(device, int) or str(device).startswith("cuda"))


class OnTheHost(TorchFunctionMode):
    """Whatever is asked for on a GPU is on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (Tensor.cuda, Tensor.pin_memory):
            return args[0]
        if func is Tensor.to or func.__name__ == "_parse_to":  # of tensors, of modules
            args = tuple(_CPU if type(arg) in (int, str, torch.device) and _gpu(arg) else arg for arg in args)
        if _gpu(kwargs.get("device")):
            kwargs["device"] = _CPU
        return func(*args, **kwargs)


def _answer() -> None:
    """A GPU for each rank, as scripts ask for it."""
    local, count = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    properties = SimpleNamespace(name="CPU", total_memory=1 << 34, major=9, minor=0)
    answers: dict[str, Any] = {
        "is_available": lambda: True, "device_count": lambda: count, "set_device": lambda *_: None,
        "current_device": lambda: local, "synchronize": lambda *_: None, "empty_cache": lambda: None,
        "get_device_name": lambda *_: "CPU", "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: (9, 0), "is_bf16_supported": lambda *_: True,
        "manual_seed": lambda *_: None, "manual_seed_all": lambda *_: None,
        "reset_peak_memory_stats": lambda *_: None, "memory_stats": lambda *_: defaultdict(int),
        "memory_allocated": lambda *_: 0, "max_memory_allocated": lambda *_: 0,
    }  # fmt: skip
    for owner in (torch.cuda, torch.cpu):
        for name, answer in answers.items():
            setattr(owner, name, answer)
    torch.accelerator.is_available = lambda: True
    torch.accelerator.device_count = lambda: count
    torch.accelerator.current_accelerator = lambda *_, **__: _CPU
    torch.accelerator.set_device_index = lambda *_: None
    torch.accelerator.device_index = lambda *_: nullcontext()
    torch._utils._get_available_device_type = lambda: "cpu"


def _communicate() -> None:
    """gloo for every backend, meshes and wrappers of the CPU."""
    start, mesh, wrap = (
        dist.init_process_group,
        dist.init_device_mesh,
        torch.nn.parallel.DistributedDataParallel.__init__,
    )

    def init(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        start("gloo", *args, **{name: value for name, value in kwargs.items() if name != "device_id"})

    def wrapped(self: Any, module: Any, *_: Any, **kwargs: Any) -> None:
        wrap(
            self,
            module,
            **{name: value for name, value in kwargs.items() if name not in ("device_ids", "output_device")},
        )

    dist.init_process_group = init
    dist.init_device_mesh = lambda kind, *args, **kwargs: mesh("cpu", *args, **kwargs)
    torch.distributed.device_mesh.init_device_mesh = dist.init_device_mesh
    torch.nn.parallel.DistributedDataParallel.__init__ = wrapped
    # gloo has no sums that are scaled as they are made; what is summed is as large.
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    factors = _fsdp_collectives._get_gradient_divide_factors
    _fsdp_collectives._get_gradient_divide_factors = lambda *args, **kwargs: (
        *factors(*args, **kwargs)[:2],
        dist.ReduceOp.SUM,
        dist.ReduceOp.SUM,
    )
    plain = dist.all_reduce

    def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, *args: Any, **kwargs: Any) -> Any:
        # Nor has it averages in all-reduces, whose bytes are those of sums.
        return plain(tensor, dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op, *args, **kwargs)

    dist.all_reduce = all_reduce


def main() -> None:
    _answer()
    _communicate()
    del sys.argv[0]
    module = sys.argv[0] == "-m"
    if module:
        del sys.argv[0]
    sys.path.insert(0, str(Path.cwd() if module else Path(sys.argv[0]).resolve().parent))
    with stand_ins.standing_in(print), OnTheHost():
        if module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
