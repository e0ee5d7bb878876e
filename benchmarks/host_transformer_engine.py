"""As `benchmarks.host`, of Transformer Engine's modules and of megatron-core's layers made of them, from a clone.

python -m benchmarks.host_transformer_engine FOLDER [--seconds S] [CASE ...]

FOLDER has the package `transformer_engine` of Transformer Engine 2. Its Python runs as it is, but that where it
says "cuda" it reads "cpu". Its extension, which is a device's, is replaced by functions that return empty tensors
of the same shapes: what these take is measured by calling them again, alone, with what they were given, and taken
off. So what the extension takes in C++ before a launch (its arguments, a product's heuristics, a plan of cuDNN's)
is in no figure, and neither is a launch, nor what NVTX and the setting of a device take. In FP8, what makes a
quantized tensor is taken off as well, which is a call into Python for the real one, too. Attention in several
kernels runs these on this processor. Kernels written in Triton, of cross-entropy and of permutations, are not
measured.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.machinery
import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from itertools import cycle
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import c10d_logger

from benchmarks.host import (
    DEPTHS,
    HEADS,
    SIZES,
    Make,
    Step,
    Trained,
    fake_group,
    measure,
    megatron_layers,
    turns,
    undisturbed,
    without_a_device,
)

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
DTYPE = torch.bfloat16
_BUILD = {"NVTE_PROJECT_BUILDING": "1", "NVTE_RELEASE_BUILD": "0"}
"""With these, its package loads no libraries."""
_ENUMERATIONS = (
    "DType", "FP8FwdTensors", "FP8BwdTensors", "CommOverlapType", "NVTE_Fused_Attn_Backend", "NVTE_QKV_Layout",
    "NVTE_Bias_Type", "NVTE_Mask_Type", "NVTE_Softmax_Type", "NVTE_QKV_Format", "Float8BlockScaleTensorFormat",
)  # fmt: skip


class _Enumeration:
    """Names that are numbers, in the order in which they are asked for."""

    def __init__(self, **known: int) -> None:
        vars(self).update(known)

    def __getattr__(self, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        number = len(vars(self))
        setattr(self, name, number)
        return number


class Extension(ModuleType):
    """`transformer_engine_torch`: its functions make empty tensors, and note calls where `calls` is a list."""

    def __init__(self) -> None:
        super().__init__("transformer_engine_torch")
        self.calls: list[Call] | None = None
        for name in _ENUMERATIONS:
            setattr(self, name, _Enumeration())
        numbers = range(1, 4)
        forward = [f"GEMM{number}_{part}" for number in numbers for part in ("INPUT", "WEIGHT", "OUTPUT")]
        backward = [f"GRAD_{part}{number}" for number in numbers for part in ("OUTPUT", "INPUT")]
        self.FP8FwdTensors = _Enumeration(**{name: place for place, name in enumerate(forward)})
        self.FP8BwdTensors = _Enumeration(**{name: place for place, name in enumerate(backward)})
        self.NVTE_Fused_Attn_Backend = _Enumeration(NVTE_No_Backend=-1, NVTE_F16_arbitrary_seqlen=1)
        for made in ("CommOverlap", "CommOverlapP2P", "CommOverlapHelper", "FP8TensorMeta"):
            setattr(self, made, type(made, (), {}))
        for name, function in _FUNCTIONS.items():
            setattr(self, name, self._noting(function))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(f"transformer_engine_torch.{name}: nothing stands for it here")

        return missing

    def _noting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            if self.calls is not None:
                self.calls.append((call, _kept(args), named))
            return function(*args, **named)

        return call


def _kept(given: Any) -> Any:
    """Arguments that stay as they are, whatever becomes of them."""
    if isinstance(given, list | tuple):
        return type(given)(_kept(one) for one in given)
    return given.detach() if isinstance(given, Tensor) else given


def _product(
    a: Any, a_transposed: bool, b: Any, b_transposed: bool, out: Any, quantizer: Any, dtype: Any, bias: Any,
    bias_type: Any, gelu: Any, gelu_in: Any, grad: bool, *_: Any, **__: Any,
) -> Any:  # fmt: skip
    rows, columns = a.size()[-2:]
    if b_transposed:  # a weight's gradient
        found = torch.empty(b.size()[-1], columns, dtype=DTYPE) if out is None else out
        return found, torch.empty(b.size()[-1], dtype=DTYPE) if grad and bias is not None else None, None, None
    return torch.empty(*b.size()[:-1], rows if a_transposed else columns, dtype=DTYPE), None, None, None


def _products(a: Any, a_transposed: bool, b: Any, b_transposed: bool, out: Any, *rest: Any) -> Any:
    return rest[2]


def _normalised(given: Tensor, weight: Tensor, *_: Any) -> Any:
    rows = given.numel() // given.shape[-1]
    return torch.empty_like(given), torch.empty(rows), torch.empty(rows)


def _attended(*args: Any) -> Any:
    query = next(one for one in args if isinstance(one, Tensor) and one.dim() >= 3)
    return [
        torch.empty_like(query),
        torch.empty(query.shape[1], query.shape[2], query.shape[0], 1),
        torch.empty(2),
    ]


def _attended_back(*args: Any) -> Any:
    query, key, value = [one for one in args if isinstance(one, Tensor) and one.dim() >= 3][:3]
    return [torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None, None]


def _first(*args: Any) -> Any:
    return torch.empty_like(args[0])


def _gated(given: Tensor, *_: Any) -> Tensor:
    return given.new_empty(*given.shape[:-1], given.shape[-1] // 2)


def _quantized(given: Tensor, quantizer: Any, out: Any = None, noop: Any = None) -> Any:
    if out is not None:
        return out
    return quantizer.make_empty(given.shape, dtype=given.dtype, device=given.device)


def _nothing(*_: Any) -> None:
    return None


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "generic_gemm": _product,
    "te_general_grouped_gemm": _products,
    "layernorm_fwd": _normalised,
    "rmsnorm_fwd": lambda given, *_: (torch.empty_like(given), None, torch.empty(given.shape[:-1].numel())),
    "layernorm_bwd": lambda above, given, mean, deviation, weight, *_: (
        torch.empty_like(above), torch.empty_like(weight), torch.empty_like(weight),
    ),
    "rmsnorm_bwd": lambda above, given, deviation, weight, *_: (torch.empty_like(above), torch.empty_like(weight)),
    "get_fused_attn_backend": lambda *_: 1,
    "fused_attn_fwd": _attended,
    "fused_attn_bwd": _attended_back,
    "fused_rope_forward": _first,
    "fused_rope_backward": _first,
    "quantize": _quantized,
    "bgrad_quantize": lambda given, quantizer: (torch.empty(given.shape[-1]), _quantized(given, quantizer)),
    "gelu": _first,
    "dgelu": lambda above, given, *_: torch.empty_like(given),
    "swiglu": _gated,
    "dswiglu": lambda above, given, *_: torch.empty_like(given),
    "get_num_cublas_streams": lambda: 4,
    "get_cublasLt_version": lambda: 130000,
    "get_cudnn_version": lambda: 91000,
    "ubuf_built_with_mpi": lambda: False,
    "device_supports_multicast": lambda: False,
    "multi_tensor_scale": _nothing,
    "multi_tensor_scale_tensor": _nothing,
    "multi_tensor_adam": _nothing,
    "multi_tensor_adam_param_remainder": _nothing,
    "multi_tensor_l2norm": lambda *_: (torch.zeros(1), torch.empty(0)),
    "fused_amax_and_scale_update_after_reduction": _nothing,
}  # fmt: skip
for _kind in ("scaled", "scaled_masked", "scaled_upper_triang_masked", "scaled_aligned_causal_masked"):
    _FUNCTIONS |= {f"{_kind}_softmax_{way}": _first for way in ("forward", "backward")}


# -- what makes its Python run here ---------------------------------------------------------------------------


_READS = {
    "torch.cuda.is_available()": "True",
    '"cuda"': '"cpu"',
    ".is_cuda": ".is_cpu",
    ".cuda()": ".cpu()",
    ", torch.cuda.current_device())": ")",
}
"""Words of its files, and what is read in place of them, in this order."""


class _Source(importlib.machinery.SourceFileLoader):
    """A file, read with other words for the device."""

    def get_code(self, fullname: str) -> Any:
        text = Path(self.path).read_text()
        for word, other in _READS.items():
            text = text.replace(word, other)
        return compile(text, self.path, "exec")


class _Clone(importlib.abc.MetaPathFinder):
    """Finds the package in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.split(".")[0] != "transformer_engine":
            return None
        file = self._folder.joinpath(*fullname.split("."))
        inside = file / "__init__.py"
        if not inside.exists() and not file.with_suffix(".py").exists():
            return None
        where = inside if inside.exists() else file.with_suffix(".py")
        return importlib.util.spec_from_file_location(
            fullname, where, loader=_Source(fullname, str(where)),
            submodule_search_locations=[str(file)] if inside.exists() else None,
        )  # fmt: skip


class _Triton(ModuleType):
    """Its names, so that kernels can be written down; none runs."""

    __version__ = "3.5.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    def __getitem__(self, _: Any) -> Any:
        return self


class _Stream:
    """A stream of a device that is not there; entering it is PyTorch's Python, ordering it nothing."""

    device = torch.device("cpu")

    def _ordered(self, _: Any) -> None:
        return None

    wait_stream = wait_event = record_event = _ordered


def installed(folder: Path) -> Extension:
    """Imports the clone's package; what stands for its extension."""
    import torch._inductor.runtime.hints  # before there is what looks like Triton

    without_a_device()
    fake_group(max(RINGS))
    device = SimpleNamespace(major=9, minor=0, multi_processor_count=132, gcnArchName="")
    stream = _Stream()
    nothing: dict[str, Any] = {
        "current_stream": lambda *_: stream, "set_stream": lambda _: None, "Event": lambda: None,
        "get_device_properties": lambda *_: device,
        "get_device_capability": lambda *_: (9, 0), "_exchange_device": lambda _: 0,
        "_maybe_exchange_device": lambda _: 0, "_get_device_index": lambda *_, **__: 0,
        "is_current_stream_capturing": lambda: False,
    }  # fmt: skip
    for name, function in nothing.items():
        setattr(torch.cuda, name, function)
    for name in ("range_push", "range_pop"):
        setattr(torch.cuda.nvtx, name, lambda *_: 0)
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        # As before PyTorch 2.13, which warns at each call.
        function = inspect.unwrap(getattr(torch.distributed, name))
        setattr(torch.distributed, name, c10d_logger._exception_logger(function))
    extension = Extension()
    written = {name: _Triton(name) for name in ("triton", "triton.language", "triton.language.standard")}
    for module in written.values():
        module.__path__ = []
    os.environ.update(_BUILD)
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    sys.meta_path.insert(0, _Clone(folder))
    package = ModuleType("transformer_engine")
    package.__path__, package.__version__ = [str(folder / "transformer_engine")], _version(folder)
    sys.modules.update({"transformer_engine": package, "transformer_engine_torch": extension, **written})
    package.common = importlib.import_module("transformer_engine.common")
    package.common.load_framework_extension = lambda _: None
    package.pytorch = importlib.import_module("transformer_engine.pytorch")
    for name in written:
        del sys.modules[name]
    return extension


def _version(folder: Path) -> str:
    return (folder / "build_tools" / "VERSION.txt").read_text().strip()


# -- what is measured -----------------------------------------------------------------------------------------


def _chain(module: Callable[[int], nn.Module], run: Callable[[Any, Tensor], Any] | None = None) -> Make:
    """Modules one after the other: of a width -> one of them; how it is called, or just so."""

    def make(layers: int, width: int, tokens: int) -> Step:
        width, tokens = 2 * width, 2 * tokens  # cuDNN's heads have eight channels or more, FP8 eight tokens
        with torch.random.fork_rng():
            modules = [module(width).to(DTYPE) for _ in range(layers)]
        parameters = [parameter for one in modules for parameter in one.parameters()]
        for parameter in parameters:
            parameter.main_grad = torch.zeros_like(parameter)
        given = torch.randn(tokens, 1, width, dtype=DTYPE, requires_grad=True)

        def forward(again: bool) -> Tensor:
            del again
            out: Any = given
            for parameter in parameters:
                parameter.grad = None
            for one in modules:
                out = run(one, out) if run else one(out)
                out = out[0] if isinstance(out, tuple) else out
            return out

        return Trained(forward)

    return make


RINGS = (2, 4)
"""Ranks that pass keys and values around."""


def _attending(
    one_kernel: bool, ranks: int = 1, *, masks: Sequence[str] = ("causal",), forks: bool = False
) -> Make:
    """Attention by cuDNN's kernel or by several, of one tensor, and the view of it that has heads.

    Args:
        one_kernel: whether it is cuDNN's.
        ranks: over which sequences are divided, whose keys and values go around.
        masks: of one module after the other; where there are several, each call chooses its kernel anew.
        forks: whether it draws from another random state of Megatron-LM's, without dropout as well.
    """

    def make(*size: int) -> Step:
        _select(one_kernel)
        of = sys.modules["transformer_engine.pytorch"].DotProductAttention
        sort: dict[str, Any] = {"attention_dropout": 0.0, "qkv_format": "sbhd"}
        if ranks > 1:
            sort |= {"cp_group": _group(ranks), "cp_global_ranks": list(range(ranks))}
            sort |= {"cp_stream": _Stream(), "cp_comm_type": "p2p"}
        if forks:
            sort |= {"get_rng_state_tracker": _states}
        each = cycle(masks)
        padded = torch.zeros(1, 1, 1, 2 * size[2], dtype=torch.bool) if masks == ("padding",) else None

        def attend(module: Any, given: Tensor) -> Tensor:
            heads = given.view(*given.shape[:2], HEADS, -1)
            return module(heads, heads, heads, attention_mask=padded, attn_mask_type=module.attn_mask_type)

        return _chain(lambda width: of(HEADS, width // HEADS, attn_mask_type=next(each), **sort), attend)(*size)

    return make


def _states() -> Any:
    """Random states of Megatron-LM, with that of its ranks of tensor parallelism."""
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *_, **__: torch.cuda.get_rng_state()
    random._set_cuda_rng_state = lambda new, *_, **__: torch.cuda.set_rng_state(new)
    tracker = random.get_cuda_rng_tracker()
    if not tracker.get_states():
        tracker.add("model-parallel-rng", 1)
    return tracker


@cache
def _group(ranks: int) -> Any:
    """Of the first ones."""
    return torch.distributed.new_group(list(range(ranks)))


def _divided(name: str, by: str, sequence: bool) -> Make:
    """A module that two ranks of tensor parallelism divide by "column" or by "row", and sequences, too, or not.

    Half of what it makes, or two copies, so that all have as many rows.
    """

    def module(width: int) -> nn.Module:
        columns = by == "column"
        made: nn.Module = getattr(sys.modules["transformer_engine.pytorch"], name)(
            width * (1 if columns else 2), width * (2 if columns else 1), bias=True, return_bias=not columns,
            parallel_mode=by, tp_group=_group(2), tp_size=2, sequence_parallel=sequence, **_FUSES,
        )  # fmt: skip
        return made

    def run(one: Any, given: Tensor) -> Tensor:
        made = one(given)
        return _resized(made[0] if isinstance(made, tuple) else made, by if sequence else "")

    return _chain(module, run)


def _resized(made: Tensor, by: str) -> Tensor:
    """Half of the rows, or twice as many."""
    if not by:
        return made
    return made.narrow(0, 0, made.shape[0] // 2) if by == "column" else made.repeat(2, 1, 1)


def _resizing(by: str) -> Make:
    """What chains of divided modules have besides."""

    def run(_: Any, given: Tensor) -> Tensor:
        other = given.repeat(2, 1, 1) if by == "column" else given.narrow(0, 0, given.shape[0] // 2)
        return _resized(other, by)

    return _chain(lambda _: nn.Identity(), run)


def _select(one_kernel: bool) -> None:
    """Attention in one kernel or in several, from now on."""
    os.environ |= {"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": str(int(one_kernel))}
    within = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
    sys.modules[within]._attention_backends["backend_selection_requires_update"] = True


def _rotated(*size: int) -> Step:
    rotate = sys.modules["transformer_engine.pytorch.attention.rope"].apply_rotary_pos_emb
    tokens, channels = 2 * size[2], 2 * size[1] // HEADS
    angles = torch.zeros(tokens, 1, 1, channels)

    def run(_: Any, given: Tensor) -> Tensor:
        heads = given.view(*given.shape[:2], HEADS, -1)
        return rotate(heads, angles, tensor_format="sbhd", fused=True).view(given.shape)

    return _chain(lambda _: nn.Identity(), run)(*size)


def _views(*size: int) -> Step:
    """What the chains of attention and of rotations have besides."""

    def run(_: Any, given: Tensor) -> Tensor:
        return given.view(*given.shape[:2], HEADS, -1).view(given.shape)

    return _chain(lambda _: nn.Identity(), run)(*size)


def _of(name: str, **options: Any) -> Make:
    """A module that has as many features behind as before."""

    def module(width: int) -> nn.Module:
        made: nn.Module = getattr(sys.modules["transformer_engine.pytorch"], name)(width, width, **options)
        return made

    return _chain(module)


def _norm(name: str) -> Make:
    return _chain(lambda width: getattr(sys.modules["transformer_engine.pytorch"], name)(width, device="cpu"))


def _grouped(experts: int) -> Make:
    def module(width: int) -> nn.Module:
        of = sys.modules["transformer_engine.pytorch"].GroupedLinear
        return of(experts, width, width, bias=False, fuse_wgrad_accumulation=True, device="cpu")

    def run(one: Any, given: Tensor) -> Tensor:
        rows = given.shape[0]
        return one(given, [rows // experts + (number < rows % experts) for number in range(experts)])

    return _chain(module, run)


def _in_fp8(make: Make) -> Make:
    def stepped(*size: int) -> Step:
        from transformer_engine.common.recipe import DelayedScaling
        from transformer_engine.pytorch import fp8_autocast

        step, recipe = make(*size), DelayedScaling()
        plain = step.run

        def run(again: bool) -> Tensor:
            with fp8_autocast(enabled=True, fp8_recipe=recipe):
                return plain(again)

        return Trained(run)

    return stepped


PARAMETERS = 100
"""Of a layer that is updated; a rank of a training has some hundred in all, and caches hold less of more."""


def _updated(layers: int, *_: int) -> Step:
    """An update of the parameters of layers as megatron-core asks for it: in fp32, of gradients in fp32."""
    of = sys.modules["transformer_engine.pytorch"].optimizers.FusedAdam
    kept = [nn.Parameter(torch.zeros(4)) for _ in range(PARAMETERS * layers)]
    for parameter in kept:
        parameter.grad = torch.zeros(4)
    optimizer = of(kept, weight_decay=0.01)

    def step(again: bool, clock: Callable[[], float] | None = None) -> tuple[float, float]:
        del again
        now = clock or time.thread_time
        begun = now()
        optimizer.step()
        return now() - begun, 0.0

    return step


def _layers(one_kernel: bool) -> Make:
    def make(layers: int, width: int, tokens: int) -> Step:
        _select(one_kernel)
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec as of

        options = {"gradient_accumulation_fusion": True, "bf16": True, "attention_backend": _backend(one_kernel)}
        return megatron_layers(of(), layers, 2 * width, tokens, DTYPE, **options)

    return make


def _backend(one_kernel: bool) -> Any:
    from megatron.core.transformer.enums import AttnBackend

    return AttnBackend.fused if one_kernel else AttnBackend.unfused


_FUSES = {"fuse_wgrad_accumulation": True, "device": "cpu"}
CASES: dict[str, Make] = {
    "views": _views,
    "Linear": _of("Linear", **_FUSES),
    "LayerNormLinear": _of("LayerNormLinear", **_FUSES),
    "LayerNormMLP": _of("LayerNormMLP", **_FUSES),
    "LayerNorm": _norm("LayerNorm"),
    "RMSNorm": _norm("RMSNorm"),
    "DotProductAttention, fused": _attending(True),
    "DotProductAttention, unfused": _attending(False),
    **{f"DotProductAttention, ring of {ranks}": _attending(True, ranks) for ranks in RINGS},
    "DotProductAttention, chosen anew": _attending(True, masks=("causal", "no_mask")),
    **{
        f"DotProductAttention, {'' if one else 'un'}fused, padding": _attending(one, masks=("padding",))
        for one in (True, False)
    },
    "DotProductAttention, fused, forks": _attending(True, forks=True),
    "apply_rotary_pos_emb": _rotated,
    "GroupedLinear of 2": _grouped(2),
    "GroupedLinear of 8": _grouped(8),
    "halves and copies": _resizing("column"),
    **{
        f"{name} by {by}s{', sequences' if sequence else ''}": _divided(name, by, sequence)
        for name, by in (("Linear", "column"), ("LayerNormLinear", "column"), ("Linear", "row"))
        for sequence in (False, True)
    },
    "Linear, FP8": _in_fp8(_of("Linear", **_FUSES)),
    "LayerNormLinear, FP8": _in_fp8(_of("LayerNormLinear", **_FUSES)),
    f"FusedAdam, {PARAMETERS} parameters": _updated,
}
"""Modules, measured alone."""
LAYERS: dict[str, Make] = {"layer, fused": _layers(True), "layer, unfused": _layers(False)}
"""Layers of megatron-core."""


# -- how ------------------------------------------------------------------------------------------------------


def main() -> None:
    """Prints a line a case and phase, and writes host-transformer-engine.json to $OUT (default: out/host)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_transformer_engine")
    parser.add_argument("folder", type=Path)
    parser.add_argument("cases", nargs="*", default=[*CASES, *LAYERS], metavar="CASE")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each case")
    given = parser.parse_args()
    torch.set_num_threads(1)
    extension = installed(given.folder)
    found: dict[str, dict[str, dict[str, float]]] = {}
    print(f"{'case':<30}{'phase':<11}{'us':>8}{'taken off':>12}{'calls':>7}{'operations':>12}")
    for name in given.cases:
        make = CASES[name] if name in CASES else LAYERS[name]
        found[name] = measure(make, given.seconds) if name in LAYERS else _alone(make, given.seconds)
        taken_off = _stubs(make, extension, len(found[name]))
        for (phase, entry), (stubs, calls) in zip(found[name].items(), taken_off, strict=True):
            entry |= {"stubs_s": stubs, "calls": calls, "layer_s": entry["layer_s"] - stubs}
            print(
                f"{name:<30}{phase:<11}{1e6 * entry['layer_s']:>8.1f}"
                f"{1e6 * (stubs + entry['arithmetic_s']):>12.1f}{calls:>7.1f}{entry['operations']:>12.1f}",
                flush=True,
            )
    out = Path(os.environ.get("OUT", "out/host"))
    out.mkdir(parents=True, exist_ok=True)
    (out / "host-transformer-engine.json").write_text(json.dumps(found, indent=2) + "\n")


def _alone(make: Make, seconds: float) -> dict[str, dict[str, float]]:
    """Seconds of one module, forward and backward; there is no arithmetic in it that is worth taking off."""
    cases = {depth: make(depth, *SIZES[0]) for depth in DEPTHS}
    taken = turns(cases, (False,), seconds)
    more = DEPTHS[1] - DEPTHS[0]
    shallow, deep = ([undisturbed(taken[depth, False], side) for side in (0, 1)] for depth in DEPTHS)
    return {
        phase: {"layer_s": (b - a) / more, "arithmetic_s": 0.0, "operations": 0}
        for phase, a, b in zip(("forward", "backward"), shallow, deep, strict=True)
    }


def _stubs(make: Make, extension: Extension, phases: int) -> list[tuple[float, float]]:
    """Seconds that what stands for the extension takes of a layer, and how often it is called, by phase."""

    def of(layers: int) -> list[tuple[float, int]]:
        step = make(layers, *SIZES[0])
        step(False)
        extension.calls = calls = []
        marks = step(False, lambda: len(calls))
        extension.calls = None
        parts = calls[: int(marks[0])], calls[int(marks[0]) :]
        return [(_seconds(part), len(part)) for part in parts]

    more = DEPTHS[1] - DEPTHS[0]
    forward, backward = (
        ((b[0] - a[0]) / more, (b[1] - a[1]) / more) for a, b in zip(*map(of, DEPTHS), strict=True)
    )
    return [forward, backward] if phases == 2 else [forward, forward, backward]


def _seconds(calls: list[Call]) -> float:
    """Seconds of these calls, the least of many turns that nineteen of twenty are longer than."""
    taken = []
    for _ in range(400):
        begun = time.thread_time()
        for function, args, named in calls:
            function(*args, **named)
        taken.append(time.thread_time() - begun)
    return sorted(taken)[len(taken) // 20]


if __name__ == "__main__":
    main()
