"""What torch's own tracker sees of a training step's memory: run as a script, prints JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed._tools.mem_tracker import MemTracker

from echograph.frontend.pytorch.capture import capture_mode
from echograph.frontend.pytorch.device_ops import cuda_operators
from echograph.frontend.pytorch.spec import StepDType, StepSpec
from echograph.frontend.pytorch.step import TrainingStep
from echograph.models import Built, build, get_model

CPU = torch.device("cpu")


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _build(model: str, changes: dict[str, int], dtype: torch.dtype, batch_size: int, seq_len: int) -> Built:
    with _default_dtype(dtype):
        return build(get_model(model).with_config(**changes), batch_size=batch_size, seq_len=seq_len)


def _peak(tracker: MemTracker) -> dict[str, int]:
    snapshot = tracker.get_tracker_snapshot("peak")[CPU]
    return {str(key).rpartition(".")[2]: int(value) for key, value in snapshot.items()}


def step(model: str, changes: dict[str, int], dtype: StepDType, batch_size: int, seq_len: int) -> dict[str, int]:
    """Peak of a whole step by torch's categories, bytes."""
    spec = StepSpec(dtype=dtype)
    with capture_mode(), cuda_operators():
        built = _build(model, changes, spec.torch_dtype, batch_size, seq_len)
        run = TrainingStep(built.module, built.inputs, built.loss, spec)
        state = [tensor for slots in run.state.values() for tensor in slots.values()]
        tracker = MemTracker()
        tracker.track_external(run.module, *state, *built.inputs.values())
        with tracker:
            gradients = run.backward(run.forward())
            run.update(gradients)
            del gradients
    return _peak(tracker)


def fully_sharded(
    model: str, changes: dict[str, int], batch_size: int, seq_len: int, ranks: int
) -> dict[str, int]:
    """Peak of forward and backward under FSDP2 in bf16, as one of a fake group's ranks sees it."""
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    with capture_mode() as mode:
        built = _build(model, changes, torch.bfloat16, batch_size, seq_len)
    with unset_fake_temporarily():
        layers = next(m for m in built.module.modules() if isinstance(m, torch.nn.ModuleList))
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(built.module, mesh=mesh)
    tracker = MemTracker()
    tracker.track_external(built.module, *built.inputs.values())
    with mode, cuda_operators(), tracker:
        output = built.module(**built.inputs)
        loss = built.loss(output)
        del output
        loss.backward()
    return _peak(tracker)


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*json.loads(sys.argv[2]))))
