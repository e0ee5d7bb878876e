"""The Megatron adapter: a captured job against closed forms, what is put in place and taken out, and wrong use."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import warnings
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the [torch] extra")
if find_spec("megatron") is None:
    pytest.skip("needs the [megatron] extra", allow_module_level=True)

from echograph.errors import CaptureError
from echograph.frontend.megatron.adapter import MegatronAdapter, _places
from echograph.frontend.megatron.hooks import hooks
from echograph.frontend.megatron.patches import TESTED, Patch, in_place
from echograph.frontend.megatron.shims import SHIMS, _finite, shimmed
from echograph.frontend.scripts.adapter import numbers_of
from echograph.frontend.scripts.capture import capture_script
from echograph.frontend.scripts.installed import is_of_library, of_library
from echograph.frontend.scripts.run import Script
from echograph.frontend.scripts.world import World
from echograph.ir import types as t
from echograph.ir.graph import BETWEEN_STEPS, JobGraph
from echograph.profiler.costs.host import load_units
from echograph.simulator.memory.lifetimes import Allocations, Lifetimes
from echograph.units import to_ps
from echograph.workflow.predict import predict

pytestmark = pytest.mark.torch

SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "megatron-gpt" / "pretrain.py"
LAYERS, HIDDEN, LENGTH, VOCABULARY, TENSOR, STAGES, MICRO_BATCHES = 4, 64, 64, 256, 2, 2, 3


def captured(size: int, options: str) -> JobGraph:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script = Script(path=SCRIPT, arguments=options.split())
        return capture_script(script, World(size=size), MegatronAdapter()).graph  # type: ignore[return-value]


@pytest.fixture(scope="module")
def job() -> JobGraph:
    return captured(
        8,
        f"--num-layers {LAYERS} --hidden-size {HIDDEN} --seq-length {LENGTH} --padded-vocab-size {VOCABULARY} "
        f"--tensor-model-parallel-size {TENSOR} --pipeline-model-parallel-size {STAGES} --sequence-parallel "
        "--bf16 --use-distributed-optimizer --untie-embeddings-and-output-weights --disable-gloo-process-groups "
        f"--global-batch-size {2 * MICRO_BATCHES}",
    )


def calls(job: JobGraph, program: int) -> Counter[tuple[Any, ...]]:
    """Communications of a role: phase, kind, axes, bytes."""
    found: Counter[tuple[Any, ...]] = Counter()
    for _, begin, end, _, _ in job.programs[program].calls.tolist():
        for op in job.ops[begin:end]:
            match op:
                case t.Collective():
                    found[op.phase.name, op.collective.name, job.groups[op.group].axes, op.bytes_per_rank] += 1
                case t.Send() | t.Recv():
                    found[op.phase.name, type(op).__name__, op.peer, op.nbytes] += 1
    return found


def test_a_job_has_the_mesh_and_a_role_for_each_stage(job: JobGraph) -> None:
    assert [(axis.name, axis.size) for axis in job.mesh] == [("pp", 2), ("dp", 2), ("tp", 2)]
    assert [dict(program.coordinates) for program in job.programs] == [{"pp": 0}, {"pp": 1}]
    assert job.world_size == 8


def test_a_stage_communicates_as_the_papers_count(job: JobGraph) -> None:
    """Narayanan et al. 2021 and Korthikanti et al. 2022: what a stage exchanges in a micro-batch and in a step."""
    activation = 2 * HIDDEN * LENGTH
    layer = 12 * HIDDEN * HIDDEN // TENSOR + 4 * HIDDEN // TENSOR + 3 * HIDDEN // TENSOR + 2 * HIDDEN + 4 * HIDDEN
    first = calls(job, 0)
    layers = LAYERS // STAGES
    gathers, scatters = 2 * layers * MICRO_BATCHES, 2 * layers * MICRO_BATCHES
    assert first["FORWARD", "ALL_GATHER", ("tp",), activation] == gathers
    assert first["FORWARD", "REDUCE_SCATTER", ("tp",), activation] == scatters + MICRO_BATCHES
    # The backward pass gathers again the inputs of the column-parallel products, and the embedding's gradient.
    assert first["BACKWARD", "ALL_GATHER", ("tp",), activation] == 2 * gathers + MICRO_BATCHES
    assert first["BACKWARD", "REDUCE_SCATTER", ("tp",), activation] == scatters
    sent = {verb: sum(n for key, n in first.items() if key[1] == verb) for verb in ("Send", "Recv")}
    assert sent == {"Send": MICRO_BATCHES, "Recv": MICRO_BATCHES}
    assert {key[2:] for key in first if key[1] in ("Send", "Recv")} == {(1, activation // TENSOR)}
    buckets = [key for key in first if key[2] == ("dp",)]
    elements = layers * layer + VOCABULARY * HIDDEN // TENSOR
    assert {key[1] for key in buckets} == {"REDUCE_SCATTER", "ALL_GATHER"}
    for _, _, _, nbytes in buckets:
        # Buffers are padded so that their shards begin at aligned places.
        assert 2 * elements <= nbytes < 2 * (elements + 128 * (12 * layers + 1))


def test_a_job_has_its_micro_batches_and_is_simulated(job: JobGraph) -> None:
    for program in job.programs:
        assert set(program.calls[:, 4].tolist()) == set(range(MICRO_BATCHES))
    result, _ = predict(job)
    assert result.step_ps > 0


def test_shims_and_hooks_are_taken_out_again() -> None:
    import megatron.core
    import torch
    from megatron.core.transformer.moe import moe_utils

    release = numbers_of(megatron.core.__version__)
    patches = [patch for patch in (*SHIMS, *hooks(Nowhere())) if patch.is_of(release)]

    def now() -> list[Any]:
        found = []
        for patch in patches:
            module, _, path = patch.where.partition(":")
            owner: Any = importlib.import_module(module)
            *outer, name = path.split(".")
            for part in outer:
                owner = getattr(owner, part)
            found.append(vars(owner)[name])
        return found

    before = now()
    with shimmed(), in_place(hooks(Nowhere())):
        during = now()
    assert all(a is b for a, b in zip(before, now(), strict=True))
    assert all(a is not b for a, b in zip(before, during, strict=True))
    assert all(patch.reason for patch in patches)
    assert not hasattr(moe_utils, "te_general_gemm")
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_coalesced_", "Meta")


def test_random_states_that_were_added_are_there() -> None:
    """As megatron-core asks before it tells Transformer Engine's attention to draw from them."""
    with shimmed():
        from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

        tracker = CudaRNGStatesTracker()
        assert not tracker.is_initialized()
        tracker.add("of a rank", 1)
        assert tracker.is_initialized()


class Nowhere:
    """A place that nobody asks."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


@pytest.mark.parametrize(
    ("where", "named"),
    [
        ("megatron.core.pipeline_parallel.schedules:forward_step", "forward_step"),
        ("megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator.recv_forward", "recv_forward"),
        ("megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup", "_ParamAndGradBucketGroup"),
    ],
)
def test_a_hook_that_has_moved_is_named(where: str, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, _, path = where.partition(":")
    owner: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    monkeypatch.delattr(owner, name)
    moved = pytest.raises(CaptureError, match=rf"has no megatron\.core.*{named}.*{re.escape(TESTED[0])}")
    with moved as raised, in_place(hooks(Nowhere())):
        pass
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("since", "before", "version", "there"),
    [("0.14", "", "0.13.1", False), ("0.14", "", "0.14.0", True), ("0.13", "0.14", "0.13.1", True),
     ("0.13", "0.14", "0.14.0rc0", False), ("0.9", "", "0.16.1", True)],
)  # fmt: skip
def test_a_version_has_what_came_before_it_and_was_not_taken_out(
    since: str, before: str, version: str, there: bool
) -> None:
    patch = Patch(where="module:name", reason="", around=lambda f: f, since=since, before=before)
    assert patch.is_of(numbers_of(version)) is there


def test_what_keeps_a_module_from_its_import_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise AttributeError("module 'transformer_engine.pytorch' has no attribute 'Novelty'")

    monkeypatch.setattr(importlib, "import_module", broken)
    with (
        pytest.raises(CaptureError, match=r"megatron\.core cannot be imported: .*Novelty"),
        in_place(hooks(Nowhere())),
    ):
        pass


def test_another_version_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MegatronAdapter().check() == []
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "0.18.0" if name == "megatron-core" else real(name)
    )
    (line,) = MegatronAdapter().check()
    assert "0.18.0" in line
    assert TESTED[0] in line


@pytest.mark.parametrize(
    ("size", "options", "said"),
    [
        (4, "--tensor-model-parallel-size 3", "pretrain.py:"),
        (2, "--context-parallel-size 2 --attention-backend unfused", "TEDotProductAttention"),
        (2, "--train-iters 1", "before step 2"),
        (2, "--no-such-option", "pretrain.py"),
    ],
)
def test_wrong_use_is_one_line(size: int, options: str, said: str) -> None:
    with pytest.raises(CaptureError) as raised:
        captured(size, f"--num-layers 1 --disable-gloo-process-groups {options}")
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_tied_embeddings_of_four_stages_are_exchanged() -> None:
    """The group of the first and the last stage is no axis: both send the gradient and add what they receive."""
    job = captured(
        8,
        f"--num-layers 4 --hidden-size {HIDDEN} --seq-length {LENGTH} --padded-vocab-size {VOCABULARY} "
        "--pipeline-model-parallel-size 4 --bf16 --disable-gloo-process-groups --global-batch-size 8",
    )
    for program, peer in enumerate((3, None, None, -3)):
        found = [
            (type(op), op.peer, op.nbytes)
            for _, begin, end, _, _ in job.programs[program].calls.tolist()
            for op in job.ops[begin:end]
            if isinstance(op, t.Send | t.Recv) and op.payload is t.Payload.GRADIENT
        ]
        expected = [] if peer is None else [(kind, peer, VOCABULARY * HIDDEN * 2) for kind in (t.Send, t.Recv)]
        assert found == expected
    result, _ = predict(job)
    assert result.step_ps > 0


def test_a_stage_keeps_its_last_input_and_the_gradient_of_it(job: JobGraph) -> None:
    """megatron-core sets the input of a stage on its module; sequences are divided over two ranks.

    Beside it, the optimizer has fp32 copies of its share of gradients in 16 bit, as large as its masters, and
    rotary embeddings their frequencies, one block of the allocator.
    """
    one, allocations = LENGTH // TENSOR * HIDDEN * 2, Allocations(job)
    for stage, program in enumerate(job.programs):
        rows = [job.locate_tensor(int(n))[2] for n in Lifetimes(allocations, stage).before]
        masters = [job.tensors[row].nbytes for row in rows if job.tensors[row].name.endswith(".master")]
        assert masters
        blocks = sum(-(-nbytes // 512) * 512 for nbytes in masters)
        assert program.held[BETWEEN_STEPS] == blocks + 512 + stage * 2 * one


def test_a_step_is_made_where_gradients_might_overflow() -> None:
    """The flag of fp16's loss scaling is a value, for which 1 would stand: a step that is skipped."""
    seen: list[str] = []

    def check(optimizer: str) -> bool:
        seen.append(optimizer)
        return True

    assert _finite(check)("optimizer") is False
    assert seen == ["optimizer"]


HASHING = """
import torch
from megatron.core import parallel_state
from megatron.core.utils import check_param_hashes_across_dp_replicas

torch.distributed.init_process_group("nccl")
parallel_state.initialize_model_parallel()
model = torch.nn.Linear(1024, 512, dtype=torch.bfloat16).cuda()
model.bias.allreduce = False
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(2, 1024, dtype=torch.bfloat16, device="cuda")).sum().backward()
    optimizer.step()
    assert check_param_hashes_across_dp_replicas([model], cross_check=True)
"""


def test_weights_that_are_hashed_are_copied_waited_for_and_gathered(tmp_path: Path) -> None:
    """What was left out without a word: copies, the host's hashing and waits, and hashes of all replicas."""
    path = tmp_path / "train.py"
    path.write_text(HASHING)
    units = load_units("megatron-core")
    capture = capture_script(Script(path=path, host=units), World(size=4), MegatronAdapter())
    job, elements = capture.graph, 1024 * 512 + 512
    copies = [op for op in job.ops if isinstance(op, t.Copy)]
    assert [op.direction for op in copies] == [t.CopyDirection.DEVICE_TO_HOST] * 2
    assert sum(op.nbytes for op in copies) == 2 * elements
    gathered = [op for op in job.ops if isinstance(op, t.Collective)]
    # SHA-1 of four replicas: of a weight, and of one that is an expert's.
    assert [op.bytes_per_rank for op in gathered] == [4 * 20] * 2
    waits = [op for op in job.ops if isinstance(op, t.Host)]
    assert len(waits) == 2 + 2 * (1 + 4)
    work = sum(d.picoseconds for op in job.ops for d in op.durations if d.device == units.name)
    assert 1 < work / to_ps(4 * elements * units.hashed_s) < 2
    assert any("check-weight-hash" in note for note in capture.notes)


def test_what_lies_in_a_checkout_is_no_scripts_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-LM's training loop stands beside its scripts, and asks values as an installed one does."""
    (tmp_path / "megatron" / "training").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    with of_library(*_places()):
        assert is_of_library(str(tmp_path / "megatron" / "training" / "training.py"))
        assert not is_of_library(str(tmp_path / "pretrain_gpt.py"))
