"""The adapter's rules, without a capture: refusals, names, hooks; and ZeRO-3's slices against DeepSpeed's own."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the [torch] extra")

from echograph.errors import CaptureError, InputError
from echograph.frontend.deepspeed.adapter import DeepSpeedAdapter, check, common_module, mark_copies
from echograph.frontend.pytorch.annotate import FQN
from echograph.frontend.scripts.recorder import COPY
from echograph.frontend.scripts.world import World
from echograph.ir.formats import Imported
from echograph.ir.graph import JobGraph
from echograph.ir.types import CopyDirection
from echograph.progress import silent
from echograph.workflow import capture

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the [deepspeed] extra")


@pytest.mark.parametrize(
    ("parameters", "module"),
    [
        (["h.1.attn.q.weight", "h.1.attn.k.weight"], "h.1.attn"),
        (["h.1.attn.q.weight"], "h.1.attn.q"),
        (["h.1.weight", "h.11.weight"], "h"),
        (["wte.weight", "h.0.ln.weight"], ""),
        ([], ""),
    ],
)
def test_what_is_gathered_is_for_the_module_that_has_it_all(parameters: list[str], module: str) -> None:
    assert common_module(parameters) == module


@pytest.mark.parametrize(
    ("configuration", "line"),
    [
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, 'offload_param.device = "nvme"'),
        ({"optimizer": {"type": "OneBitAdam"}}, 'optimizer.type = "OneBitAdam"'),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "zero_quantized_weights = true"),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "zero_optimization.zenflow is not captured"),
    ],
)
def test_what_is_not_captured_is_refused_in_one_line(configuration: dict[str, Any], line: str) -> None:
    with pytest.raises(CaptureError) as refused:
        check(configuration)
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


def test_ordinary_configurations_pass() -> None:
    check(
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "optimizer": {"type": "AdamW"}}
    )
    check({"zero_optimization": None})
    check({})


def test_a_configuration_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"ds\.json: no such file"):
        DeepSpeedAdapter().arguments((), tmp_path / "ds.json")


def test_another_version_is_told_with_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "0.21.3" if name == "deepspeed" else real(name)
    )
    (line,) = (said for said in DeepSpeedAdapter().check() if said.startswith("deepspeed"))
    assert "0.21.3" in line
    assert "0.19 up to 0.20" in line


@pytest.mark.parametrize("begins", ["deepspeed.initialize()", "deepspeed.zero.Init()"])
def test_a_script_of_deepspeed_is_captured_as_one(
    begins: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever begins with its engine under `echoc capture torch` is run once more, by DeepSpeed's adapter."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        monkeypatch.delitem(sys.modules, name)
    zero = "deepspeed.runtime.zero.partition_parameters"
    for name in ("deepspeed", "deepspeed/runtime", "deepspeed/runtime/zero"):
        (tmp_path / "packages" / name).mkdir(parents=True)
        (tmp_path / "packages" / name / "__init__.py").touch()
    (tmp_path / "packages" / f"{zero.replace('.', '/')}.py").write_text("class Init: pass")
    (tmp_path / "packages/deepspeed/__init__.py").write_text(
        f"from {zero} import Init\nimport deepspeed.runtime.zero as zero\nzero.Init = Init\n"
        "def initialize(): pass\nclass PipelineModule: pass"
    )
    monkeypatch.syspath_prepend(tmp_path / "packages")
    script = tmp_path / "train.py"
    script.write_text(f"import deepspeed\ntry:\n    {begins}\nexcept ValueError:\n    pass")
    asked: list[str] = []

    def captured_as(framework: str, *given: Any, **named: Any) -> Any:
        asked.append(framework)
        if framework == "torch":
            return really(framework, *given, **named)
        return Imported(graph=JobGraph.__new__(JobGraph), notes=("its own",), warnings=())

    really = capture._captured
    monkeypatch.setattr(capture, "_captured", captured_as)
    options = capture.CaptureOptions(script=script, world_size=2)
    found = capture.capture_script_file("torch", (), options, showing=lambda: nullcontext(silent))
    assert asked == ["torch", "deepspeed"]
    assert found.notes == (
        "the script trains with deepspeed, and is captured as by 'echoc capture deepspeed'",
        "its own",
    )


def test_its_launcher_says_the_local_rank_itself(tmp_path: Path) -> None:
    for name, told in (("deepspeed/launcher/runner.py", ()), ("train.py", ("--local_rank=0",))):
        script = tmp_path / name
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text("parser.add_argument('--local_rank')")
        assert DeepSpeedAdapter().launched(script, (), World(size=2)) == told


def test_copies_between_host_and_device_are_told_by_what_lies_where() -> None:
    """A master on the host, updated there from a gradient that is clipped by a number of the device's."""
    import torch
    from torch.fx import Graph

    graph, aten = Graph(), torch.ops.aten

    def placeholder(name: str) -> Any:
        node = graph.placeholder(name)
        node.meta[FQN] = name
        return node

    share, gradient, factor = (placeholder(name) for name in ("share", "gradient", "factor"))
    master, held = placeholder("master"), placeholder("master_grad")
    down = graph.call_function(aten.copy_.default, (held, gradient))
    clipped = graph.call_function(aten.mul_.Tensor, (down, factor))
    view = graph.call_function(aten.view.default, (clipped, [4]))
    updated = graph.call_function(aten.add_.Tensor, (master, view))
    up = graph.call_function(aten.copy_.default, (share, updated))
    stays = graph.call_function(aten.copy_.default, (gradient, up))
    mark_copies(graph, {"master", "master_grad"})
    assert down.meta[COPY] is CopyDirection.DEVICE_TO_HOST
    assert up.meta[COPY] is CopyDirection.HOST_TO_DEVICE
    assert [node for node in graph.nodes if COPY in node.meta] == [down, up]
    assert COPY not in stays.meta


# In a process of its own, since importing DeepSpeed changes the one it is imported in.
_HOOKS = """
import torch
from echograph.errors import CaptureError
from echograph.frontend.deepspeed import shims
from echograph.frontend.scripts.adapter import patched
shims.load()
for module, owner, name in (("runtime.engine", "Engine", ""), ("runtime.nowhere", "", "")):
    try:
        shims.hook_point(module, owner)
    except CaptureError as error:
        print(error)
try:
    with patched(shims.hook_point("runtime.engine", "DeepSpeedEngine"), "backwards", lambda f: f):
        pass
except CaptureError as error:
    print(error)
from deepspeed.runtime.comm import coalesced_collectives as reduce
import sys
import torch.distributed as dist, deepspeed.comm
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
backend = sys.modules["deepspeed.comm.torch"].TorchBackend
deepspeed.comm.comm.cdb = backend.__new__(backend)
deepspeed.comm.comm.cdb.initialized = True
for sizes in ((8,), (7, 8, 3), (1, 2), (5,)):
    given = []
    made = []
    reduce._torch_reduce_scatter_fn = lambda flat, share, group=None: given.append((flat.numel(), share.numel()))
    for run in (reduce.reduce_scatter_coalesced, lambda tensors, group: shims._scatter(reduce, tensors, group)):
        made.append([t.numel() for t in run([torch.ones(n) for n in sizes], dist.group.WORLD)])
    print(given[0] == given[1], made[0] == made[1])
"""


@pytest.mark.slow
@needs_deepspeed
def test_moved_hooks_are_one_line_and_slices_are_deepspeeds(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _HOOKS], cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    wanted = ("True", "False", "this version", "deepspeed.")
    said = [line for line in done.stdout.splitlines() if line.startswith(wanted)]
    assert "deepspeed.runtime.engine.Engine" in said[0]
    assert "deepspeed.runtime.nowhere" in said[1]
    assert "deepspeed.runtime.engine.DeepSpeedEngine has no 'backwards'" in said[2]
    assert said[3:] == ["True True"] * 4
