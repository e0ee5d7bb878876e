"""What the ranks of the test jobs do; run as a script by `comms_jobs.py`, not collected."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import all_reduce as imported_before

import echograph
from echograph.ir.comms.bandwidth import base_operation

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def start(folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=RANK, world_size=WORLD)


def listed(counts: dict[tuple[str, str, int], int]) -> list[Any]:
    return sorted([*key, n] for key, n in counts.items() if n)


def since(tracer: Any, before: dict[tuple[str, str, int], int]) -> list[Any]:
    now = Counter(tracer.counts())
    now.subtract(before)
    return listed(now)


def seen_by_recorder() -> list[dict[str, Any]]:
    return json.loads(torch._C._distributed_c10d._dump_fr_trace_json(includeCollectives=True)).get("entries", [])


SIZES = iter(range(1, 1000))


def one(n: int | None = None) -> torch.Tensor:
    return torch.full((n or next(SIZES),), float(RANK + 1))


def many(n: int) -> list[torch.Tensor]:
    return [one(n) for _ in range(WORLD)]


def every_call(world: Any, side: Any, twin: Any) -> list[Any]:
    """Every kind of call once, each with a size of its own, so that none can stand for another."""
    x = one()
    dist.all_reduce(x)
    results = [x.tolist()]
    imported_before(one())
    work = dist.all_reduce(one(), dist.ReduceOp.SUM, side, True)
    results.append([isinstance(work, dist.Work), work.get_future() is not None])
    work.wait()
    world.allreduce([one()]).wait()
    n = next(SIZES)
    dist.all_gather(many(n), one(n))
    n = next(SIZES)
    dist.all_gather_into_tensor(one(n * WORLD), one(n))
    n = next(SIZES)
    dist.reduce_scatter(one(n), many(n))
    n = next(SIZES)
    dist.reduce_scatter_tensor(one(n), one(n * WORLD), dist.ReduceOp.SUM, side)
    dist.broadcast(one(), 0)
    dist.reduce(one(), 1)
    n = next(SIZES)
    dist.gather(one(n), many(n) if RANK == 0 else None, dst=0)
    n = next(SIZES)
    dist.scatter(one(n), many(n) if RANK == 1 else None, src=1)
    n = next(SIZES)
    dist.all_to_all_single(one(n * WORLD), one(n * WORLD), group=twin)
    n = next(SIZES)
    dist.all_to_all(many(n), many(n))
    (dist.send if RANK == 0 else dist.recv)(one(), 1 - RANK)
    (dist.isend if RANK == 0 else dist.irecv)(one(), 1 - RANK).wait()
    n = next(SIZES)
    pair = [dist.P2POp(dist.isend, one(n), 1 - RANK), dist.P2POp(dist.irecv, one(n), 1 - RANK)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    with dist._coalescing_manager(world, async_ops=True) as together:
        dist.all_reduce(one(500))
        dist.all_reduce(one(600))
    together.wait()
    dist.barrier()
    dist.monitored_barrier()
    return results


def raw(folder: Path) -> Any:
    """Every kind of call, then those that are refused, late, or never waited for."""
    tracer = echograph.trace_collectives(folder / "traces" / "raw.jsonl")
    start(folder)
    world = dist.group.WORLD
    side = dist.new_group([0, 1])
    alone = dist.new_group([1])
    twin = dist.new_group([0, 1])
    if RANK == 1:
        dist.all_reduce(torch.ones(1), group=alone)
    results = every_call(world, side, twin)
    plain = listed(tracer.counts())
    objects: list[Any] = [None] * WORLD
    dist.all_gather_object(objects, {"rank": RANK})
    dist.broadcast_object_list([objects], 0)
    refused = False
    try:
        dist.all_gather([one(3)], one(3))
    except (RuntimeError, ValueError):
        refused = True
    never = dist.all_reduce(one(700), async_op=True)
    late = dist.all_reduce(one(800), async_op=True)
    time.sleep(0.5)
    late.wait()
    # gloo has no coalesced blocks: none has begun, and what follows is a call as any other.
    with suppress(RuntimeError):
        world._start_coalescing(torch.device("cpu"))
    dist.all_reduce(one(900))
    entries = seen_by_recorder()
    calls = tracer.calls
    tracer.stop()
    del never
    dist.all_reduce(one())
    return {
        "ddp": _ddp(folder),
        "plain": plain,
        "all": listed(tracer.counts()),
        "results": results,
        "refused": refused,
        "calls": calls,
        "recorded": [[e["profiling_name"], e["process_group"][0], e["input_sizes"]] for e in entries],
    }


def _ddp(folder: Path) -> list[Any]:
    """The making of a DDP model, and five steps."""
    model = torch.nn.Linear(100, 10)
    with echograph.trace_collectives(folder / "traces" / "ddp.jsonl") as tracer:
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        for _ in range(5):
            wrapped(torch.ones(2, 100)).sum().backward()
    return listed(tracer.counts())


def _debugged(tracer: Any, step: Any) -> dict[str, Any]:
    """What CommDebugMode and the tracer count in one step."""
    from torch.distributed.tensor.debug import CommDebugMode

    before = tracer.counts()
    mode = CommDebugMode()
    with mode:
        step()
    told: Counter[str] = Counter()
    for op, n in mode.get_comm_counts().items():
        name = str(op).rpartition(".")[2].strip("_")
        spelled = {
            "allreduce": "all_reduce",
            "allgather_base": "all_gather",
            "reduce_scatter_base": "reduce_scatter",
        }
        told[base_operation(spelled.get(name, name))] += n
    return {"counts": since(tracer, before), "debug": dict(told)}


def frameworks(folder: Path) -> Any:
    """A step each of DDP, FSDP2, tensor-parallel DTensor, a compiled functional collective and a pipeline."""
    from torch import nn
    from torch.distributed._functional_collectives import all_gather_tensor
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    start(folder)
    tracer = echograph.trace_collectives(folder / "traces" / "frameworks.jsonl")
    answer: dict[str, Any] = {}

    def net() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))

    def train(model: nn.Module) -> Any:
        return lambda: model(torch.ones(4, 64)).sum().backward()

    plain = net()
    before = tracer.counts()
    wrapped = nn.parallel.DistributedDataParallel(net())
    answer["ddp made"] = {"counts": since(tracer, before)}
    tracer.attach(wrapped)
    answer["ddp"] = _debugged(tracer, train(wrapped))
    answer["bytes"] = sum(p.numel() * p.element_size() for p in plain.parameters())
    sharded = net()
    for layer in (sharded[0], sharded[2], sharded):
        fully_shard(layer)
    answer["fsdp2"] = _debugged(tracer, train(sharded))
    mesh = init_device_mesh("cpu", (WORLD,))
    split = parallelize_module(net(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    answer["tensor"] = _debugged(tracer, train(split))
    compiled = torch.compile(lambda x: all_gather_tensor(x, 0, dist.group.WORLD) * 2, backend="aot_eager")
    before = tracer.counts()
    compiled(torch.ones(10))
    answer["compiled"] = {"counts": since(tracer, before)}
    stage = PipelineStage(net()[0] if RANK == 0 else net()[2], RANK, WORLD, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=3, loss_fn=lambda out, target: (out - target).sum())
    before = tracer.counts()
    if RANK == 0:
        schedule.step(torch.ones(6, 64))
    else:
        schedule.step(target=torch.ones(6, 64))
    answer["pipeline"] = {"counts": since(tracer, before)}
    tracer.stop()
    return answer


def four(folder: Path) -> Any:
    """Two meshes' worth of groups among four ranks, and a step of FSDP1 over all of them."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    start(folder)
    tracer = echograph.trace_collectives(folder / "traces" / "four.jsonl")
    rows, columns = ([0, 1], [2, 3]), ([0, 2], [1, 3])
    for turn, halves in enumerate((rows, columns), 1):
        groups = [dist.new_group(ranks) for ranks in halves]
        mine = next(group for group, ranks in zip(groups, halves, strict=True) if RANK in ranks)
        for _ in range(turn):
            dist.all_reduce(torch.ones(10 * turn), group=mine)
    dist.send(torch.ones(7), (RANK + 1) % WORLD) if RANK % 2 == 0 else dist.recv(torch.ones(7), RANK - 1)
    answer = {"groups": listed(tracer.counts())}
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 256)
    before = tracer.counts()
    wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    answer["made"] = since(tracer, before)
    before = tracer.counts()
    wrapped(torch.ones(4, 64)).sum().backward()
    answer["fsdp1"] = since(tracer, before)
    tracer.stop()
    return answer


def deepspeed_zero(folder: Path) -> Any:
    """A step of each of DeepSpeed's ZeRO stages."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(RANK)}
    import deepspeed

    # It would build an extension for ranks of one machine.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    start(folder)
    deepspeed.init_distributed("gloo")
    tracer = echograph.trace_collectives(folder / "traces" / "deepspeed.jsonl")
    answer = {}
    for stage in (1, 2, 3):
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            config={
                "train_micro_batch_size_per_gpu": 2,
                "zero_allow_untested_optimizer": True,
                "zero_optimization": {"stage": stage},
            },
        )

        def step(engine: Any = engine) -> None:
            engine.backward(engine(torch.ones(2, 64)).sum())
            engine.step()

        answer[str(stage)] = _debugged(tracer, step)
    tracer.stop()
    return answer


def megatron_tensor_parallel(folder: Path) -> Any:
    """Megatron-Core's mappings of tensor and sequence parallelism, forward and backward."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import mappings

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    start(folder)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=WORLD, create_gloo_process_groups=False)
    tracer = echograph.trace_collectives(folder / "traces" / "megatron.jsonl")

    def step() -> None:
        x = torch.ones(4, 8, 16, requires_grad=True)
        y = mappings.copy_to_tensor_model_parallel_region(x * 2)
        y = mappings.reduce_from_tensor_model_parallel_region(y)
        y = mappings.reduce_scatter_to_sequence_parallel_region(y * 3)
        y = mappings.gather_from_sequence_parallel_region(y * 3)
        mappings.gather_from_tensor_model_parallel_region(y).sum().backward()

    answer = _debugged(tracer, step)
    tracer.stop()
    return answer


def late(folder: Path) -> Any:
    """Five all-reduces of 64 MiB; rank 1 comes 0.4 s late to the third."""
    start(folder)
    data = torch.ones(16 << 20)
    dist.all_reduce(data)
    with echograph.trace_collectives(folder / "traces" / "late.jsonl"):
        for turn in range(5):
            if turn == 2 and RANK == 1:
                time.sleep(0.4)
            dist.all_reduce(data)
            dist.barrier()
    return True


def killed(folder: Path) -> Any:
    """Rank 1 dies before the fourth all-reduce; the others wait for it until the watchdog has spoken."""
    start(folder)
    echograph.trace_collectives(folder / "traces" / "killed.jsonl", timeout_s=2.5)
    for _ in range(3):
        dist.all_reduce(torch.ones(10))
    time.sleep(1.5)
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with suppress(RuntimeError):
        dist.all_reduce(torch.ones(10))
    return True


def stuck(folder: Path) -> Any:
    """Rank 1 comes 5 s late; the watchdog speaks after 2 s, and the job goes on."""
    start(folder)
    with echograph.trace_collectives(folder / "traces" / "stuck.jsonl", timeout_s=2):
        dist.all_reduce(torch.ones(10))
        if RANK == 1:
            time.sleep(5)
        data = torch.ones(10)
        dist.all_reduce(data)
    return data.tolist()


def traced_from_outside(folder: Path) -> Any:
    """A script that knows nothing of tracers."""
    start(folder)
    dist.all_reduce(torch.ones(10))
    dist.destroy_process_group()
    return True


if __name__ == "__main__":
    faulthandler.dump_traceback_later(60, exit=True)
    name, where = sys.argv[1], Path(sys.argv[2])
    result = globals()[name](where)
    (where / f"{name}.{RANK}.answer").write_text(json.dumps(result))
    if dist.is_initialized() and name not in ("killed",):
        dist.destroy_process_group()
