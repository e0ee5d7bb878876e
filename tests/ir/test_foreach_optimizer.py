"""AdamW kernel by kernel: what moves, against the bytes that PyTorch's own kernels move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from echograph.ir import serde
from echograph.ir.graph import StepGraph, Workload
from echograph.ir.passes import foreach_optimizer as module
from echograph.ir.passes.foreach_optimizer import FOREACH, FUSED, ForeachOptimizer
from echograph.ir.types import Compute, DType
from echograph.models.stacks import load_stack
from echograph.simulator.clusters import load_cluster
from echograph.workflow.plan import Plan, passes

GRAPHS = Path(__file__).parents[1] / "golden" / "predictions" / "graphs"


def test_updates_move_what_their_kernels_do() -> None:
    step = serde.load(GRAPHS / "gpt2-xl.pb")
    assert isinstance(step, StepGraph)
    made, updates = ForeachOptimizer()(step), 0
    for row, name in enumerate(step.ops.name.tolist()):
        if step.strings[name] in FUSED:
            before, after = step.ops[row], made.ops[row]
            assert isinstance(before, Compute) and isinstance(after, Compute) and after.name == FOREACH
            assert (after.bytes_read, after.bytes_written) == (
                3 * before.bytes_read,
                before.bytes_written * 8 // 3,
            )
            assert after.attributes == before.attributes and len(after.inputs) == len(before.inputs)
            updates += 1
    assert updates and len(step.ops) == len(made.ops)
    assert int(made.ops.bytes_read.sum()) > int(step.ops.bytes_read.sum())


@pytest.mark.parametrize(("stack", "loops"), [("torchtitan", True), ("fsdp", True), ("nemo", False)])
def test_frameworks_that_ask_for_no_fused_optimizer_have_none(stack: str, loops: bool) -> None:
    assert load_stack(stack).foreach_optimizer is loops
    made = passes(Plan(gpus=8, stack=stack), Workload(dtype=DType.BF16), load_cluster("dgx-h100"))
    assert any(isinstance(one, ForeachOptimizer) for one in made) is loops


@pytest.mark.slow
def test_kernels_of_torch_move_as_many_elements() -> None:
    """Counts elements of the operators that torch's own update calls."""
    torch = pytest.importorskip("torch", reason="needs the [torch] extra")
    from torch.utils._python_dispatch import TorchDispatchMode

    read, written = 0, 0
    reads = {"lerp_": 2, "addcmul_": 2, "addcdiv_": 3}

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal read, written
            name = func._schema.name.removeprefix("aten::_foreach_")
            lists = args[0] if args and isinstance(args[0], list) else []
            if func._schema.name.startswith("aten::_foreach_") and lists and lists[0].numel() == SIZE:
                read, written = read + reads.get(name, 1), written + 1
            return func(*args, **(kwargs or {}))

    SIZE = 1000
    weight = torch.nn.Parameter(torch.ones(SIZE))
    weight.grad = torch.ones(SIZE)
    update = torch.optim.AdamW([weight], foreach=True)
    update.step()
    with Count():
        update.step()
    assert (read, written) == (module.READ, module.WRITTEN)
