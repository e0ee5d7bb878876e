"""Small valid files for every reader, and the commands through which a user reaches it."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
for _folder in (
    "golden",
    "frontend",
    "frontend/onnx",
    "profiler",
    "profiler/byteprofile",
    "profiler/traces",
    "ir/exporters",
):
    if str(TESTS / _folder) not in sys.path:
        sys.path.append(str(TESTS / _folder))

Files = dict[str, bytes]
CONFORMANCE = TESTS / "golden" / "conformance"
OUT = "{folder}.out"
"""What a command writes: beside the folder of what it reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A reader.

    Attributes:
        name: of the reader.
        seeds: makes sets of valid files.
        commands: to reach it; `{file}` is the file that was damaged, `{folder}` where it is, `{seed:NAME}` a file
            of the seed, `{step}` a step graph, `OUT` what is written.
        damaged: endings of the files that take damage, where a set has others too.
        fast: cases in the fast tests, of what is not quick.
    """

    name: str
    seeds: Callable[[], list[Files]]
    commands: tuple[tuple[str, ...], ...]
    damaged: tuple[str, ...] = ("",)
    fast: int = 30


def made(make: Callable[[Path], Any]) -> Files:
    """The files that a function writes into a folder."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "seed"
        folder.mkdir()
        make(folder)
        return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def _conformance(*names: str) -> list[Files]:
    return [{"graph.pb": (CONFORMANCE / f"{name}.pb").read_bytes()} for name in names]


def _exported(form: str, ending: str) -> list[Files]:
    from conformance_graphs import GRAPHS

    from echograph.workflow.formats import EXPORTS

    names = ("two_layers", "job", "kinds")
    return [made(lambda f, n=name: EXPORTS[form](GRAPHS[n](), f / f"graph.{ending}")) for name in names]  # type: ignore[misc]


def _chakra() -> list[Files]:
    from chakra_sets import good_set, write_set

    return [made(lambda folder: write_set(folder, *good_set()))]


def _comms() -> list[Files]:
    from echograph.ir.comms.record import (
        FORMAT,
        CallSignature,
        EndLine,
        GroupLine,
        HeaderLine,
        Heartbeat,
        StuckCall,
        encode,
    )

    began, files = 1_700_000_000_000_000_000, {}
    for rank in range(2):
        both = {"bytes": 1 << 20, "input_bytes": 1 << 20, "output_bytes": 1 << 20, "dtype": "float32"}
        message = (
            {"op": "send", "channel": "0,1:0>1/0", "peer": 1}
            if rank == 0
            else {"op": "recv", "channel": "0,1:0>1/0", "peer": 0}
        )
        lines = [
            HeaderLine(format=FORMAT, version=(1, 0), rank=rank, world=2, host="here", began_ns=began),
            GroupLine(name="0,1", ranks=(0, 1)),
            CallSignature(
                id=0, op="all_reduce", group="0,1", channel="0,1", shapes=((512, 512),), asynchronous=True, **both
            ),  # type: ignore[arg-type]
            CallSignature(
                id=1, group="0,1", shapes=((512, 512),), site="train.py:3", module="layer", **message, **both
            ),  # type: ignore[arg-type]
            Heartbeat(at_ns=began + 5, issued={"0,1": 2}),
            StuckCall(
                op="all_reduce", channel="0,1", sequence=1, seconds=3.5, arrived=(0,), missing=(1,), unheard=()
            ),
            EndLine(calls=4),
        ]
        rows = [[0, 0, began, 0, 900, 100], [1, 0, began + 1000, 0, 300, 0], [0, 1, began + 2000, -1, 100, -1]]
        said = [encode(line) for line in lines[:4]] + [json.dumps(row).encode() + b"\n" for row in rows]
        files[f"trace.{rank}.jsonl"] = b"".join([*said, *map(encode, lines[4:])])
    return [files]


_ENTRY: dict[str, Any] = {
    "profiling_name": "nccl:_all_gather_base", "process_group": ["0", "default_pg"], "collective_seq_id": 4,
    "p2p_seq_id": 0,
    "is_p2p": False, "input_sizes": [[256]], "output_sizes": [[1024]], "input_dtypes": ["BFloat16"],
    "output_dtypes": ["BFloat16"], "time_created_ns": 1000, "time_discovered_started_ns": 2000,
    "time_discovered_completed_ns": 9000, "duration_ms": 0.005, "state": "completed", "retired": True,
}  # fmt: skip


def _dump() -> bytes:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    message = _ENTRY | {"profiling_name": "nccl:send 0->1", "is_p2p": True}
    entries = [
        _ENTRY,
        _ENTRY | {"collective_seq_id": 5, "time_discovered_completed_ns": None, "state": "started"},
        message,
    ]
    return json.dumps({"version": "2.10", "pg_config": config, "entries": entries}).encode()


def _flight_recorder() -> list[Files]:
    return [{"nccl_trace_rank_0.json": _dump(), "nccl_trace_rank_1.json": _dump()}]


def _flight_recorder_pickles() -> list[Files]:
    return [{"nccl_trace_rank_0.pickle": _dump()}]


_LOG = """\
[TRACE] global rank 0 in GROUP_0 - all_reduce - async:0, Size: 4.00 MB, Shape: (1024, 1024), Dtype: \
torch.float32, Duration: 10.5 ms, GROUP size 2  = [0, 1], call count: 1
[BATCH] global rank 0 - send: 16 bytes (0.00 MB), shape: [(4,)], ops count: 2
[BARRIER] global rank 0 -barrier - async:0, Duration: 5.839 ms
[COALESCE] global rank 0 in GROUP_0 - coalesced_ops - async:1, conuters: 2, name: all_reduce, sizes: 192, \
Duration: 0.224 ms, GROUP size 2  = [0, 1],
"""


def _collective_trace() -> list[Files]:
    return [{"trace-0.log": _LOG.encode()}]


def _event(name: str, ts: float, dur: float, cat: str = "cpu_op", tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 10, "tid": tid, "ts": ts, "dur": dur, "args": args}


def _traces() -> list[Files]:
    """Two steps of two ranks: of gloo, and of kernels on a device."""
    from small_traces import launched, step

    said: dict[str, Any] = {"Input Dims": [[1_000_000]], "Input type": ["float"]}
    files, kernels = {}, {}
    for rank in range(2):
        events, device = [], []
        for number in range(2):
            at = 1000.0 * number
            events += [
                _event(f"ProfilerStep#{number}", at, 1000, "user_annotation"),
                _event("aten::mm", at, 100),
                _event("c10d::allreduce_", at + 100, 10),
                _event("gloo:all_reduce", at + 110, 300, "user_annotation", 2, **said),
                _event("aten::add_", at + 420, 50),
            ]
            reduce = {
                "Collective name": "allreduce",
                "In msg nelems": 1000,
                "Out msg nelems": 1000,
                "dtype": "Float",
            }
            reduce |= {"Group size": 2, "Process Group Name": "0", "Process Group Ranks": "[0, 1]"}
            device += [
                step(number, at, 900),
                *launched("gemm", at + 10, at + 20, 100, 10 * number + 1),
                *launched("ncclDevKernel_AllReduce", at + 30, at + 130, 80, 10 * number + 2, stream=9, **reduce),
                *launched("Memcpy HtoD", at + 40, at + 60, 20, 10 * number + 4, cat="gpu_memcpy", bytes=4096),
                _event("cudaStreamSynchronize", at + 300, 50, "cuda_runtime", correlation=10 * number + 3),
            ]
        job = {"distributedInfo": {"backend": "gloo", "rank": rank, "world_size": 2}}
        files[f"{rank}.json"] = json.dumps(job | {"traceEvents": events}).encode()
        kernels[f"{rank}.json"] = json.dumps(job | {"traceEvents": device}).encode()
    return [files, kernels]


def _snapshots() -> list[Files]:
    import pickle  # noqa: TID251 - the format is a pickle

    from test_memory_snapshot import snapshot

    # Whatever a file is called, how it begins says what it is: ".bin" takes damage to its bytes.
    return [{"rank0.bin": pickle.dumps(snapshot(), protocol)} for protocol in (2, 4)]


def _nsight() -> list[Files]:
    from functools import partial

    from test_nsight import export

    def make(folder: Path, used: dict[int, int]) -> None:
        export(folder / "a.sqlite", used)

    return [made(partial(make, used=used)) for used in ({10: 0}, {10: 0, 20: 1})]


def _rocprof() -> list[Files]:
    from test_rocprof import tool

    said = ([tool()], [tool(10), tool(20)])
    return [{"a.json": json.dumps({"rocprofiler-sdk-tool": tools}).encode()} for tools in said]


def _xplanes() -> list[Files]:
    from test_xplane import Writer, gpu, host

    spaces = (host(gpu(Writer(), 0), 0), host(gpu(gpu(Writer(), 0), 1), 0, 1))
    return [{"xplane.bin": one.space.SerializeToString()} for one in spaces]


def _merged() -> list[Files]:
    from functools import partial

    from test_merged import TOOLS, merged

    def make(folder: Path, how: Any) -> None:
        merged(folder / "a.json", *how)

    return [made(partial(make, how=how)) for how in TOOLS.values()]


def _packed_traces() -> list[Files]:
    import gzip

    return [{f"{n}.gz": gzip.compress(data, mtime=0) for n, data in files.items()} for files in _traces()]


def _recording() -> list[Files]:
    from echograph.profiler.record.folder import Hooks, Metadata, StepTimes, write_hooks, write_metadata
    from echograph.profiler.record.overhead import Overhead

    def make(folder: Path) -> None:
        for rank in range(2):
            mine = folder / str(rank)
            mine.mkdir()
            steps = [StepTimes(number=n, seconds=0.1, state="recorded" if n > 1 else "free") for n in range(4)]
            about = Metadata(
                rank=rank,
                world_size=2,
                start_step=2,
                end_step=4,
                complete=True,
                steps=steps,
                overhead=_some(Overhead),
            )
            write_metadata(mine, about)
            write_hooks(mine, Hooks(entered_ns=[1000, 2000, 101_000]))
            (mine / "trace.json").write_bytes(_traces()[0][f"{rank}.json"])
            (mine / "comms.jsonl").write_bytes(_comms()[0][f"trace.{rank}.jsonl"])

    return [made(make)]


def _some(kind: Any) -> Any:
    """A structure of numbers, with any."""
    import msgspec

    required = [f for f in msgspec.structs.fields(kind) if f.required]
    return msgspec.convert({f.encode_name: {} if "dict" in str(f.type) else 1 for f in required}, kind)


def _traced_job() -> list[Files]:
    from echograph.ir import serde
    from echograph.workflow.formats.kineto import load as load_kineto

    def make(folder: Path) -> None:
        for name, data in _traces()[0].items():
            (folder / name).write_bytes(data)
        job = load_kineto(folder).graph
        for name in _traces()[0]:
            (folder / name).unlink()
        serde.save(job, folder / "job.pb")

    return [made(make)]


def _byteprofile() -> list[Files]:
    from profiled_jobs import byteprofile

    return [made(lambda folder: byteprofile(folder)), made(lambda folder: byteprofile(folder, older=True))]


_KERNELS = "source,gpu,op,dtype,m,n,k,layout,batch,seq,heads,kv_heads,head_dim,causal,latency_ms,tflops,notes"


def _kernels() -> list[Files]:
    sizes = [(m, n, k) for m in range(8, 14) for n in range(8, 14) for k in range(8, 14)]
    rows = [
        f"mine,H100 SXM,gemm,bf16,{2**m},{2**n},{2**k},nn,1,,,,,,{0.005 + 2.0 ** (m + n + k - 39)},,"
        for m, n, k in sizes
    ]
    return [{"kernels.csv": "\n".join([_KERNELS, *rows, ""]).encode()}]


def _collectives() -> list[Files]:
    head = "collective,n_gpus,n_nodes,size_bytes,time_us,dtype,gpu,interconnect,nccl,source,notes"
    rows = [
        f"all_reduce,8,1,{2**p},{20 + 2**p / 1e5},half,A100-SXM4-80GB,NVLink3,2.18,aiconfigurator,"
        for p in range(12, 30, 3)
    ]
    return [{"collectives.csv": "\n".join([head, *rows, ""]).encode()}]


def _nccl_tests() -> list[Files]:
    lines = ["# nThread 1 nGpus 1 minBytes 4096 maxBytes 1073741824 step: 4(factor)", "# Using devices"]
    lines += [
        f"#  Rank {rank:2} Group  0 Pid {rank} on node0 device {rank} [0x0{rank}] NVIDIA GPU" for rank in range(8)
    ]
    lines += ["# Collective test starting: all_reduce_perf", "NCCL version 2.21.5+cuda12.4"]
    for size in [2**power for power in range(12, 30)]:
        us = 20 + size / 2e5
        timing = f"{us:.2f} {size / us / 1e3:.2f} {1.75 * size / us / 1e3:.2f} 0"
        lines.append(f"{size} {size // 4} float sum -1 {timing} {timing}")
    return [{"nccl.log": "\n".join([*lines, ""]).encode()}]


def _cluster() -> list[Files]:
    from echograph.simulator.clusters import PRESETS

    extra = b'\n[[degraded]]\nlink = "node 0 nic 1"\nbandwidth = 0.5\n'
    return [{"mine.toml": (PRESETS / f"{name}.toml").read_bytes()} for name in ("dgx-h100", "ethernet-100g")] + [
        {"mine.toml": (PRESETS / "dgx-a100.toml").read_bytes() + extra}
    ]


def _fabric() -> list[Files]:
    from echograph.simulator.clusters import PRESETS

    folder = PRESETS.parent
    cluster = (PRESETS / "dgx-h100.toml").read_bytes().replace(b'"nvlink4"', b'"own.json"')
    return [{"mine.toml": cluster, "own.json": (folder / "fabrics" / "nvlink4.json").read_bytes()}]


def _device() -> list[Files]:
    from echograph.profiler import devices
    from echograph.simulator.clusters import PRESETS

    cluster = (PRESETS / "dgx-h100.toml").read_bytes()
    own = (Path(str(devices.__file__)).parent / "v100-sxm2.json").read_bytes()
    return [{"mine.toml": cluster.replace(b'"h100-sxm"', b'"own.json"'), "own.json": own}]


_PLAN = """\
gpus = 16
cluster = "dgx-h100"
tp = 1
pp = 1
dp = 16
zero = 1
global_batch = 64
micro_batch = 1
sequence_parallel = false
recompute = "none"
precision = "bf16"
"""


def _plan() -> list[Files]:
    return [{"plan.toml": _PLAN.encode()}, {"plan.toml": b"gpus = 8\nzero = 3\n"}]


@cache
def _results() -> list[Files]:
    from reader_cases import run_command

    def make(folder: Path) -> None:
        for gpus in (8, 16):
            for ending in ("-o", "--html"):
                path = folder / f"{gpus}.{'json' if ending == '-o' else 'html'}"
                assert run_command("echosim", "run", STEP, "--gpus", gpus, ending, path).status == 0

    files = made(make)
    return [{n: d for n, d in files.items() if n.endswith(ending)} for ending in (".json", ".html")]


def _onnx() -> list[Files]:
    import onnx_models
    from onnx import TensorProto

    whole = onnx_models.layers(1)
    for entry in whole.graph.input[0].type.tensor_type.shape.dim:
        entry.dim_value = 4
    outside = onnx_models.layers(1)
    outside.CopyFrom(whole)
    tensor = outside.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "weights.bin"), ("offset", "0"), ("length", "3200")):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value
    small = onnx_models.picture(2)
    small.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2
    return [{"model.onnx": model.SerializeToString()} for model in (whole, outside, small)]


def _profile() -> list[Files]:
    from echograph.ir import types as t
    from echograph.ir.profile import Environment, Measurement, Profile, TensorType, save_profile

    kind = TensorType(dtype=t.DType.BF16, shape=(8, 4))
    environment = Environment(device="h100", hardware="NVIDIA H100", driver="570.1", torch="2.13", cuda="12.8")
    one = Measurement(
        operator="aten.mm", inputs=(kind, kind), outputs=(kind,), attributes=t.Gemm(), mean_picoseconds=2**30,
        median_picoseconds=2**30, samples=5, spread=0.1, kernels=("first",),
    )  # fmt: skip
    return [
        made(lambda f: save_profile(Profile(environment=environment, measurements=(one, one)), f / "own.profile"))
    ]


_CONFIG: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 32,
    "max_position_embeddings": 8, "rope_theta": 10000.0, "torch_dtype": "bfloat16",
}  # fmt: skip


def _config() -> list[Files]:
    return [{"config.json": json.dumps(_CONFIG).encode()}]


def _execution_trace() -> list[Files]:
    attributes = [
        {"name": "rf_id", "type": "uint64", "value": 1},
        {"name": "op_schema", "type": "string", "value": "aten::mm"},
    ]
    values = {"values": [1], "shapes": [[4, 4]], "types": ["Tensor(float)"]}
    node = {"id": 2, "name": "aten::mm", "ctrl_deps": 1, "inputs": values, "outputs": values, "attrs": attributes}
    content = {"schema": "1.1.1", "pid": 1, "nodes": [node, node | {"id": 3, "name": "aten::add", "attrs": []}]}
    events = [
        _event("aten::mm", 0, 10, **{"External id": 1, "Record function id": 1}),
        _event("aten::add", 20, 10),
    ]
    return [{"et.json": json.dumps(content).encode(), "0.trace": json.dumps({"traceEvents": events}).encode()}]


def _timeline() -> list[Files]:
    rows = [[-1, 2, 4096, 0], [100, 1, 512, 4], [200, 1, 1024, 5], [300, 3, -512, 4]]
    return [{"memory.json": json.dumps(rows).encode(), "0.trace": _traces()[0]["0.json"]}]


_STEPS = (
    "id,model,layers,hidden,heads,kv_heads,ffn_hidden,vocab,seq_len,gpu_type,n_gpus,tp,pp,vpp,dp,cp,ep,sequence_parallel,"
    "zero_stage,recompute,precision,micro_batch,global_batch,step_time_s,grade,attention\n"
    "toy,GPT toy,2,128,4,4,512,1024,64,A100-SXM-80GB,8,2,1,1,4,1,1,no,0,none,bf16,2,16,0.02,A,unfused\n"
)


def _steps() -> list[Files]:
    return [{"steps.csv": _STEPS.encode()}]


def _validation() -> list[Files]:
    row = {"measured_s": 1.0, "predicted_s": 1.1, "error": 0.1, "durations_interval_s": [1.0, 1.2], "unsaid": 0.1}
    work = {"matrix products": 0.7, "host": 0.2}
    rows = [{"id": f"{name}-{n}", "family": name, "work": work, **row} for name in ("one", "two") for n in (1, 2)]
    return [{"result.json": json.dumps({"rows": rows}).encode()}]


STEP = CONFORMANCE / "two_layers.pb"
_RUN = ("echosim", "run")

TARGETS: tuple[Target, ...] = (
    Target(
        name="graph",
        seeds=lambda: _conformance("two_layers", "job", "kinds", "aliases", "ranks", "large_numbers"),
        fast=50,
        commands=(
            ("echoc", "check", "{file}"),
            ("echoc", "show", "{file}"),
            ("echoc", "show", "{file}", "--json"),
            ("echoc", "text", "{file}"),
            (*_RUN, "{file}", "--json"),
            ("echoc", "export", "{file}", "--to", "json", "-o", OUT),
            ("echoc", "export", "{file}", "--to", "dot", "-o", OUT),
            (*_RUN, "{file}", "--trace", OUT),
            (*_RUN, "{file}", "--ranks", "all", "--jitter", "0.1", "--scale", "compute=1000", "--json"),
            ("echoc", "lower", "{file}", "--gpus", "16", "--zero", "3", "-o", OUT),
            ("echoc", "export", "{file}", "--to", "graphml", "-o", OUT),
            ("echoc", "export", "{file}", "--to", "svg", "-o", OUT),
        ),
    ),
    *(
        Target(
            name=form,
            seeds=lambda form=form, ending=ending: _exported(form, ending),  # type: ignore[misc]
            commands=(("echoc", "import", form, "{file}", "-o", OUT),),
            fast=30 if form == "gml" else 50,
        )
        for form, ending in (("text", "txt"), ("json", "json"), ("gml", "gml"))
    ),
    Target(
        name="chakra",
        seeds=_chakra,
        commands=(
            ("echoc", "import", "chakra", "{folder}", "-o", OUT),
            ("echoc", "check", "{folder}", "--as", "chakra"),
        ),
    ),
    Target(
        name="communication",
        seeds=_comms,
        commands=(
            ("echoc", "import", "comms", "{folder}", "-o", OUT),
            ("echoprof", "comms", "report", "{folder}", "--json"),
            ("echoprof", "comms", "report", "{folder}"),
            ("echoprof", "comms", "report", "{folder}", "--chrome", OUT),
        ),
    ),
    *(
        Target(
            name=name,
            seeds=seeds,
            commands=(
                ("echoprof", "comms", "report", "{folder}", "--json"),
                ("echoprof", "comms", "report", "{folder}"),
                ("echoprof", "comms", "report", "{file}", "--html", OUT),
            ),
        )
        for name, seeds in (
            ("flight recorder", _flight_recorder),
            ("flight recorder, pickled", _flight_recorder_pickles),
            ("collective_trace", _collective_trace),
        )
    ),
    *(
        Target(
            name=name,
            seeds=seeds,
            fast=30,
            commands=(
                ("echoc", "import", "kineto", "{folder}", "-o", OUT),
                ("echoprof", "analyze", "{folder}", "--no-cache", "--json"),
                *(
                    ("echoprof", "analyze", "{folder}", analysis, "--no-cache", "--json")
                    for analysis in (
                        "temporal-breakdown",
                        "overlap",
                        "critical-path-summary",
                        "collectives",
                        "idle",
                        "queue-full",
                        "memory-timeline",
                        "kernels",
                        "launch-summary",
                        "cross-rank-critical-path-summary",
                        "call-stacks",
                    )
                ),
            ),
        )
        for name, seeds in (("Kineto", _traces), ("Kineto, packed", _packed_traces))
    ),
    *(
        Target(
            name=name,
            seeds=seeds,
            fast=15,
            commands=tuple(
                ("echoprof", "analyze", "{file}", analysis, "--no-cache", "--json") for analysis in analyses
            ),
        )
        for name, seeds, analyses in (
            ("merged ranks", _merged, ("rank-times", "launches")),
            ("memory snapshot", _snapshots, ("memory-peaks", "memory-holders")),
            ("Nsight Systems", _nsight, ("rank-times", "launches", "annotations")),
            ("rocprofv3", _rocprof, ("rank-times", "launches", "kernels")),
            ("XPlane", _xplanes, ("rank-times", "launches", "steps")),
        )
    ),
    Target(
        name="recording",
        seeds=_recording,
        damaged=("metadata.json", "hooks.json", "comms.jsonl"),
        fast=30,
        commands=(
            ("echoc", "import", "kineto", "{folder}", "-o", OUT),
            ("echoc", "import", "comms", "{folder}", "-o", OUT),
            ("echoprof", "comms", "report", "{folder}", "--json"),
        ),
    ),
    Target(
        name="traced job",
        seeds=_traced_job,
        commands=(
            ("echosim", "replay", "{file}", "--json"),
            (
                "echosim",
                "replay",
                "{file}",
                "--gpus",
                "4",
                "--cluster",
                "dgx-h100",
                "--scale",
                "compute=1000",
                "--json",
            ),
        ),
    ),
    Target(
        name="ByteProfile",
        seeds=_byteprofile,
        fast=20,
        commands=(
            ("echoprof", "stats", "{folder}", "--json"),
            ("echoprof", "stats", "{folder}"),
            ("echoprof", "critical", "{folder}", "--json"),
            ("echoprof", "combine", "{folder}", "-o", OUT),
            ("echoprof", "replay", "{folder}", "-o", OUT),
        ),
    ),
    Target(
        name="kernels",
        seeds=_kernels,
        fast=0,
        commands=(("echoprof", "fit", "--kernels", "{file}", "--base", "h100-sxm", "-o", OUT, "--json"),),
    ),
    Target(
        name="collectives",
        seeds=_collectives,
        fast=0,
        commands=(("echoprof", "fit", "--collectives", "{file}", "--fabric", "nvlink3", "-o", OUT, "--json"),),
    ),
    Target(
        name="nccl-tests",
        seeds=_nccl_tests,
        fast=0,
        commands=(("echoprof", "fit", "--nccl-tests", "{file}", "--cluster", "dgx-h100", "-o", OUT, "--json"),),
    ),
    Target(
        name="cluster",
        fast=25,
        seeds=_cluster,
        commands=(
            (*_RUN, "{step}", "--gpus", "16", "--cluster", "{file}", "--json"),
            ("echosim", "clusters", "{file}", "--json"),
        ),
    ),
    *(
        Target(
            name=name,
            seeds=seeds,
            fast=25,
            damaged=("own.json",),
            commands=((*_RUN, "{step}", "--gpus", "16", "--cluster", "{seed:mine.toml}", "--json"),),
        )
        for name, seeds in (("fabric", _fabric), ("device", _device))
    ),
    Target(
        name="plan",
        fast=25,
        seeds=_plan,
        commands=(
            (*_RUN, "{step}", "--plan", "{file}", "--json"),
            ("echoc", "lower", "{step}", "--plan", "{file}", "-o", OUT),
        ),
    ),
    Target(
        name="result",
        seeds=_results,
        fast=30,
        commands=(
            ("echosim", "compare", "{seed:0}", "{seed:1}", "--json"),
            ("echosim", "compare", "{seed:0}", "{seed:1}"),
            ("echosim", "compare", "{seed:0}", "{seed:1}", "--html", OUT),
        ),
    ),
    Target(
        name="profile",
        fast=25,
        seeds=_profile,
        commands=(("echoc", "annotate", "{step}", "--profile", "{file}", "--cluster", "dgx-h100", "-o", OUT),),
    ),
    Target(name="measured steps", seeds=_steps, fast=0, commands=(("echosim", "validate", "{file}", "--json"),)),
    Target(name="validation", seeds=_validation, commands=(("echosim", "calibrate", "{file}", "-o", OUT),)),
    Target(
        name="execution trace",
        seeds=_execution_trace,
        damaged=("et.json",),
        commands=(
            (
                "echoprof",
                "analyze",
                "{seed:0.trace}",
                "execution-trace",
                "--no-cache",
                "--option",
                "file={file}",
                "--json",
            ),
        ),
    ),
    Target(
        name="memory timeline",
        seeds=_timeline,
        damaged=("memory.json",),
        commands=(
            (
                "echoprof",
                "analyze",
                "{seed:0.trace}",
                "memory-categories",
                "--no-cache",
                "--option",
                "file={file}",
                "--json",
            ),
        ),
    ),
    Target(name="ONNX", seeds=_onnx, fast=0, commands=(("echoc", "import", "onnx", "{file}", "-o", OUT),)),
    Target(
        name="configuration",
        seeds=_config,
        fast=0,
        commands=(("echoc", "compile", "--model", "{file}", "--batch-size", "1", "-o", OUT),),
    ),
)
"""Every reader, by what it reads."""
