"""What megatron-core computes and communicates in a step, recorded without ranks: a fake process group, fake tensors.

    python torch_megatron.py '{"hidden": 4096, "channels": 14336, "heads": 32, "kv_heads": 8, "vocabulary": 129024,
                               "layers": 8, "positions": 4096, "micro_batches": 8, "world": 1024, "tensor": 8,
                               "stages": 4, "overlap_param_gather": false}'

Its own GPT model, pipeline schedule (1F1B), distributed data parallelism and distributed optimizer run as they are,
but for what they need a GPU for: tensors "on the GPU" are made elsewhere, streams and events do nothing, and a
reading of a value answers 0. megatron-core has no norm of its own that goes with sequence parallelism (Transformer
Engine's does): the one here is torch's, marked as that one marks its weight. One step comes before the one that is
recorded, since only from the second on gradients are reduced while backward goes on.

For each stage it prints one line, a list of events in order: [micro-batch, phase, what, ...], where micro-batches
count from 0 and -1 is the step's own, the phase is "forward", "backward", "messages" or "step", and what follows is
["product", m, k, n], ["send" | "recv", peer stage, bytes], or [kind, axes of the group, bytes of the larger buffer,
type].
"""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager, nullcontext
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from echograph.frontend.pytorch.capture import capture_mode

DTYPES = {torch.float32: "FP32", torch.bfloat16: "BF16", torch.int64: "INT64"}
# Which argument is the larger buffer, and which the group.
COLLECTIVES = {
    "c10d::_allgather_base_": ("ALL_GATHER", 0, 2),
    "c10d::allgather_into_tensor_coalesced_": ("ALL_GATHER", 0, 2),
    "c10d::_reduce_scatter_base_": ("REDUCE_SCATTER", 1, 2),
    "c10d::reduce_scatter_tensor_coalesced_": ("REDUCE_SCATTER", 1, 2),
    "c10d::allreduce_": ("ALL_REDUCE", 0, 1),
    "c10d::allreduce_coalesced_": ("ALL_REDUCE", 0, 1),
    "c10d::broadcast_": ("BROADCAST", 0, 1),
}


class OnTheGpu(TorchFunctionMode):
    """Makes on the CPU what is asked for on a GPU, and says that it is there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        made = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(made, str):
            return made.replace("torch.", "torch.cuda.")
        return made


class Recorder(TorchDispatchMode):
    """Writes down matrix products, messages and collectives."""

    def __init__(self, axes: dict[tuple[int, ...], str], inside: int) -> None:
        super().__init__()
        self.axes, self.inside = axes, inside
        self.events: list[list[Any]] = []
        self.place: tuple[int, str] = (-1, "step")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, schema = func.overloadpacket.__name__, func._schema.name
        if name == "_local_scalar_dense":
            return 0
        if name in ("mm", "addmm"):
            a, b = args[-2:]
            self._note("product", *a.shape, b.shape[1])
        elif schema in ("c10d::send", "c10d::recv_"):
            self._message("send" if schema == "c10d::send" else "recv", *args[:3])
        elif schema in COLLECTIVES:
            kind, buffer, group = COLLECTIVES[schema]
            whole = args[buffer] if isinstance(args[buffer], list | tuple) else [args[buffer]]
            ranks = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(args[group])))
            for tensor in whole:
                self._note(kind, self.axes[ranks], tensor.nbytes, DTYPES[tensor.dtype])
        elif func.namespace == "c10d" and name != "barrier":
            raise NotImplementedError(schema)
        return func(*args, **(kwargs or {}))

    def _note(self, *what: Any) -> None:
        self.events.append([*self.place, *what])

    def _message(self, verb: str, tensors: list[torch.Tensor], group: Any, peer: int) -> None:
        del group
        (tensor,) = tensors
        self.events.append([-1, "messages", verb, peer, tensor.nbytes])

    @contextmanager
    def at(self, micro_batch: int, phase: str) -> Any:
        before, self.place = self.place, (micro_batch, phase)
        try:
            yield
        finally:
            self.place = before


def pretend() -> None:
    """Answers for what only a GPU has."""
    nothing = SimpleNamespace(wait_stream=lambda _: None, record_event=lambda *_: None, synchronize=lambda: None)
    for name, answer in {
        "current_device": lambda: "cpu",
        "current_stream": lambda *_: nothing,
        "default_stream": lambda *_: nothing,
        "stream": lambda _: nullcontext(),
        "Stream": lambda *_, **__: nothing,
        "synchronize": lambda *_: None,
        "device_count": lambda: 8,
    }.items():
        setattr(torch.cuda, name, answer)
    library = torch.library.Library("c10d", "IMPL")
    done = torch._C._distributed_c10d.FakeWork
    library.impl("reduce_scatter_tensor_coalesced_", lambda *_, **__: done().boxed(), "Meta")
    KEPT.append(library)


KEPT: list[Any] = []


class Norm(nn.RMSNorm):
    """RMSNorm on a share of the sequence: its gradient is a summand, as the mark says."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
