"""Scripts of others, unedited: without ranks and on four or eight real ones they communicate the same, in order.

ECHOGRAPH_STRANGERS names a folder of clones at the commits of `benchmarks/strangers.toml`; nothing is ours.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from benchmarks import strangers
from script_ranks import calls_of, repeats, traced

from echograph.frontend.scripts.run import Script, run_script
from echograph.frontend.scripts.torch_adapter import TorchAdapter
from echograph.frontend.scripts.world import World

CLONES = os.environ.get("ECHOGRAPH_STRANGERS", "")
RANK = Path(__file__).with_name("host_rank.py")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not CLONES, reason="needs clones of the scripts, in a folder that ECHOGRAPH_STRANGERS names"
    ),
]


@dataclass(frozen=True, kw_only=True)
class Stranger:
    """A script: the folder of its clone that it runs in, its file or module, its arguments, how many ranks."""

    folder: str
    script: str = ""
    module: str = ""
    arguments: tuple[str, ...] = ()
    step: int = 2
    times: int = 2
    ranks: int = 4


_SHORT = (
    "--training.mixed_precision_param", "float32", "--training.steps", "6",
    "--profiling.no-enable_profiling", "--metrics.no-enable_tensorboard", "--checkpoint.no-enable",
)  # fmt: skip


def _torchtitan(
    *options: str, model: str = "llama3", batch: int = 1, length: int = 64, ranks: int = 4
) -> Stranger:
    """torchtitan's debug model under a plan."""
    config = ("--job.config_file", f"torchtitan/models/{model}/train_configs/debug_model.toml")
    sizes = ("--training.local_batch_size", str(batch), "--training.seq_len", str(length))
    return Stranger(
        folder="torchtitan",
        module="torchtitan.train",
        step=3,  # it logs after the first and the last
        ranks=ranks,
        arguments=(*config, *_SHORT, *sizes, *options),
    )


STRANGERS = {
    "pytorch/examples ddp tutorial": Stranger(
        folder="examples/distributed/ddp-tutorial-series", script="multigpu_torchrun.py", arguments=("2", "9")
    ),
    "pytorch/examples minGPT-ddp": Stranger(
        folder="examples/distributed/minGPT-ddp/mingpt",
        script="main.py",
        arguments=(
            "data_config.path=data/input.txt", "data_config.truncate=0.001", "data_config.block_size=16",
            "trainer_config.batch_size=32", "trainer_config.max_epochs=1", "trainer_config.data_loader_workers=0",
            "gpt_config.n_layer=2", "gpt_config.n_embd=32", "gpt_config.n_head=2",
        ),
    ),
    "pytorch/examples FSDP2": Stranger(folder="examples/distributed/FSDP2", script="example.py"),
    "pytorch/examples sequence_parallel": Stranger(
        folder="examples/distributed/tensor_parallelism", script="sequence_parallel_example.py"
    ),
    "nanoGPT": Stranger(
        folder="nanoGPT",
        script="train.py",
        arguments=(
            "--dataset=small", "--compile=False", "--eval_iters=1", "--max_iters=5", "--eval_interval=100",
            "--gradient_accumulation_steps=4", "--batch_size=2", "--block_size=32", "--n_layer=2", "--n_head=2",
            "--n_embd=32", "--dtype=float32",
        ),
    ),
    "torchtitan debug model, FSDP": _torchtitan(),
    "torchtitan debug model, HSDP": _torchtitan("--parallelism.data_parallel_replicate_degree", "2"),
    "torchtitan debug model, TP 2 x PP 2": _torchtitan(
        "--parallelism.tensor_parallel_degree", "2", "--parallelism.pipeline_parallel_degree", "2",
        "--parallelism.pipeline_parallel_schedule", "1F1B", batch=4,
    ),
    "torchtitan debug model, TP 2": _torchtitan("--parallelism.tensor_parallel_degree", "2"),
    "torchtitan debug model, TP 4": _torchtitan("--parallelism.tensor_parallel_degree", "4"),
    "torchtitan debug model, TP 8": _torchtitan("--parallelism.tensor_parallel_degree", "8", ranks=8),
    "torchtitan debug model, HSDP 2 x TP 2 x FSDP 2": _torchtitan(
        "--parallelism.data_parallel_replicate_degree", "2", "--parallelism.tensor_parallel_degree", "2", ranks=8
    ),
    # The kernel of attention in fp32 has parts of 32 positions, of which each rank has two.
    "torchtitan debug model, CP 4": _torchtitan("--parallelism.context_parallel_degree", "4", length=256),
    # Tokens go to all experts alike, as a capture takes it.
    "torchtitan DeepSeek-V3 debug model, EP 4": _torchtitan(
        "--parallelism.expert_parallel_degree", "4", "--activation_checkpoint.mode", "none",
        "--debug.moe_force_load_balance", model="deepseek_v3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STRANGERS)
def test_what_is_captured_is_what_real_ranks_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    stranger = STRANGERS[name]
    clone = Path(CLONES) / stranger.folder
    if not clone.is_dir():
        pytest.skip(f"no clone in {clone}")
    folder = shutil.copytree(
        clone, tmp_path / "clone", ignore=shutil.ignore_patterns(".git", "checkpoints", "*.pt")
    )
    monkeypatch.chdir(folder)
    if name == "nanoGPT":
        data = folder / "data" / "small"
        data.mkdir(exist_ok=True)
        for part in ("train.bin", "val.bin"):  # tokens of 16 bits
            (data / part).write_bytes(bytes(2 * 4096))
    told = {"arguments": stranger.arguments, "step": stranger.step}
    script = (
        Script.of_module(stranger.module, **told)
        if stranger.module
        else Script(path=folder / stranger.script, **told)
    )
    what = ["-m", stranger.module] if stranger.module else [str(folder / stranger.script)]
    real = traced(RANK, stranger.ranks, tmp_path, *what, *stranger.arguments, at=folder)
    adapter = TorchAdapter()  # stages of a pipeline tell each other their shapes
    for rank in range(stranger.ranks):
        world = World(rank=rank, size=stranger.ranks, local_size=stranger.ranks)
        step = calls_of(run_script(script, world, adapter))
        # Who traces a script that it is not told the modules of takes what is recomputed for backward.
        done = [(*call[:-1], "") for call in real[rank]]
        assert step
        assert repeats(step, done, stranger.times), (rank, step[:3], done[-3:])


@dataclass(frozen=True, kw_only=True)
class Hybrid:
    """HSDP of a model of layers: a row of `benchmarks/strangers.toml`, and sizes as its authors give them.

    Attributes:
        row: of the benchmark.
        ranks: of the world.
        local: GPUs of a machine.
        layers: of the model.
        layer: elements of one.
        others: what is a unit outside of the layers: its elements, and how often a step gathers it.
        reduced_bytes: of an element as it is reduced; it is gathered in 16 bits.
        micro_batches: of a step.
    """

    row: str
    ranks: int
    local: int
    layers: int
    layer: int
    others: tuple[tuple[int, int], ...]
    reduced_bytes: int = 2
    micro_batches: int = 1

    def closed_form(self) -> Counter[tuple[str, int, int]]:
        """(operation, ranks of its group, bytes) -> calls of a step.

        A layer is gathered for the forward and the backward pass of each micro-batch. Once a step its gradients
        are scattered within a machine, and each rank's share of them is added up over the machines.
        """
        found = Counter[tuple[str, int, int]]()
        for elements, units, gathers in [
            (self.layer, self.layers, 2 * self.micro_batches),
            *((elements, 1, gathers) for elements, gathers in self.others),
        ]:
            reduced = elements * self.reduced_bytes
            found["all_gather", self.local, 2 * elements] += units * gathers
            found["reduce_scatter", self.local, reduced] += units
            found["all_reduce", self.ranks // self.local, reduced // self.local] += units
        return found


def _llama(width: int, heads_of_keys: int, hidden: int) -> int:
    """Elements of a layer: queries and output, keys and values, the three of the feed-forward, two norms."""
    return 2 * width**2 + 2 * width * heads_of_keys + 3 * width * hidden + 2 * width


def _pythia(width: int) -> int:
    """Elements of a layer, with biases: of attention, of a feed-forward four times as wide, of two norms."""
    return 3 * width * (width + 1) + width * (width + 1) + 8 * width**2 + 5 * width + 4 * width


HYBRID = {
    "fms-fsdp": Hybrid(
        row="fms-fsdp Llama, HSDP", ranks=64, local=8, layers=24, layer=_llama(2048, 512, 6144),
        others=((2 * 32_000 * 2048 + 2048, 1),),
    ),
    # Under the first FSDP the root stays gathered from a forward pass to its backward pass.
    "Lightning (litgpt)": Hybrid(
        row="litgpt pretrain, HSDP", ranks=64, local=8, layers=6, layer=_pythia(128),
        others=((2 * 50_304 * 128 + 2 * 128, 2),), micro_batches=2,
    ),
    # The last norm and the output are needed again at once, and stay.
    "torchtitan": Hybrid(
        row="torchtitan debug model, HSDP", ranks=8, local=4, layers=6, layer=_llama(256, 256, 768),
        others=((2048 * 256, 2), (2048 * 256 + 256, 1)), reduced_bytes=4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HYBRID)
def test_hybrid_sharding_communicates_the_bytes_of_its_closed_form(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    hybrid, folder = HYBRID[name], Path(CLONES).resolve()
    row = next(row for row in strangers.scripts(strangers.ROWS.read_text()) if row["name"] == hybrid.row)
    clone = folder / strangers.clone(row)
    if not clone.is_dir():
        pytest.skip(f"no clone in {clone}")
    monkeypatch.chdir(clone)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    arguments = tuple(x.format(data=folder / "data") for x in (*row["arguments"], *row.get("more", ())))
    script = (
        Script.of_module(row["module"], arguments=arguments)
        if "module" in row
        else Script(path=clone / row["script"], arguments=arguments)
    )
    for rank in (0, hybrid.ranks - 1):
        world = World(rank=rank, size=hybrid.ranks, local_size=hybrid.local)
        calls = calls_of(run_script(script, world, TorchAdapter()))
        within = tuple(range(rank - rank % hybrid.local, rank - rank % hybrid.local + hybrid.local))
        between = tuple(range(rank % hybrid.local, hybrid.ranks, hybrid.local))
        moved = [call for call in calls if call[1] in (within, between) and call[2] >= 1024]
        assert Counter((op, len(group), size) for op, group, size, *_ in moved) == hybrid.closed_form()
        assert {group for op, group, *_ in moved if op == "all_reduce"} == {between}
