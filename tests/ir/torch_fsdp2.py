"""What torch's own FSDP2 communicates, recorded without ranks: a fake process group and fake tensors."""

from __future__ import annotations

import json
import sys
from collections import Counter

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from echograph.frontend.pytorch.capture import capture_mode
from echograph.models import build, get_model

NAMES = {
    "c10d::_allgather_base_": ("ALL_GATHER", 0),
    "c10d::_reduce_scatter_base_": ("REDUCE_SCATTER", 1),
}
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


class Collectives(TorchDispatchMode):
    """Counts collectives with the bytes of their larger buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, int, str]] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        known = NAMES.get(func._schema.name)
        if known is not None:
            whole = args[known[1]]
            self.found[known[0], whole.numel() * whole.element_size(), DTYPES[whole.dtype]] += 1
        elif func._schema.name.startswith("c10d::") and "wait" not in func._schema.name:
            self.found[func._schema.name, 0, ""] += 1
        return func(*args, **(kwargs or {}))


def main(model: str, changes: str, ranks: int, seq_len: int | None) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    with capture_mode() as mode:
        built = build(get_model(model).with_config(**json.loads(changes)), batch_size=1, seq_len=seq_len)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def placement(parameter: torch.nn.Parameter) -> Shard | None:
        """As torchtitan: experts are cut along their second dimension where there are fewer than ranks."""
        stacked = parameter.ndim > 2 and parameter.shape[0] < ranks and parameter.shape[1] % ranks == 0
        return Shard(1) if stacked else None

    with unset_fake_temporarily():
        for path, layers in built.module.named_modules():
            if isinstance(layers, torch.nn.ModuleList) and not any(part.isdigit() for part in path.split(".")):
                for layer in layers:
                    fully_shard(layer, mesh=mesh, mp_policy=policy, shard_placement_fn=placement)
        fully_shard(built.module, mesh=mesh, mp_policy=policy, shard_placement_fn=placement)
    with mode, Collectives() as recorded:
        built.loss(built.module(**built.inputs)).backward()
    print(json.dumps([[*key, count] for key, count in recorded.found.items()]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]) or None)
