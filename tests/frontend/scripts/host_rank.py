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
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo  # before anything of it is another
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from echograph.frontend.pytorch import device_ops
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
        if func in (torch.histc, Tensor.histc) and not args[0].is_floating_point():
            return func(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)  # a GPU counts integers, too
        if func is torch._grouped_mm:
            return _grouped(*args, **kwargs)
        return func(*args, **kwargs)


def _grouped(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """Products of groups of rows, one by one: PyTorch's kernel is for GPUs, and for CPUs of some kinds."""
    ends = offs.tolist()
    rows = [a[begin:end].float() @ b[i].float() for i, (begin, end) in enumerate(pairwise([0, *ends]))]
    return torch.cat([*rows, a.new_zeros(len(a) - ends[-1], b.shape[-1]).float()]).to(a.dtype)


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


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float | None) -> Tensor:
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if not causal:
        return scores
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, float("-inf"))


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: None, lse: bool, dropout: float = 0.0, causal: bool = False, *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    scores = _scores(q, k, causal, scale)
    none = torch.zeros((), dtype=torch.int64)
    return scores.softmax(-1) @ v, scores.logsumexp(-1).float(), none, none


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Any, out: Tensor, lse: Tensor, seed: Tensor, offset: Any,
    dropout: float, mask: list[bool], causal: bool = False, *, scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, None]:  # fmt: skip
    weights = (_scores(q, k, causal, scale) - lse.unsqueeze(-1)).exp()
    by_scores = weights * (grad @ v.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True))
    by_scores = by_scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    return by_scores @ k, by_scores.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ grad, None


def _attend() -> Any:
    """The kernel of attention that a GPU takes in fp32, of which PyTorch's context parallelism knows its parts."""
    library: Any = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", device_ops._attention, "AutogradCPU")
    library.impl("_scaled_dot_product_efficient_attention", _efficient, "CPU")
    library.impl("_scaled_dot_product_efficient_attention_backward", _efficient_backward, "CPU")
    return library


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
    kept = _attend()  # noqa: F841 for as long as it is there
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
