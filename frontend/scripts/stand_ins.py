"""Packages that need a GPU: what scripts import of them, where they are not installed, and what of them is known.

A stand-in is there for as long as a script runs. What its functions make is known (attention, whichever kernel
makes it), so they are made of PyTorch's operators, those of a GPU. A kernel in Triton can be imported and not be
run, unless it does nothing but write what it was given: `WRITES_ONLY`. All else of them ends in one line with its
name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from importlib.util import find_spec
from itertools import accumulate, groupby, pairwise
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from echograph.errors import CaptureError
from echograph.frontend.pytorch.known_values import is_known
from echograph.frontend.scripts import apex, flash_attn_kernels
from echograph.frontend.scripts.adapter import once_imported, patched, replaced
from echograph.frontend.scripts.values import NoteTaker

WRITES_ONLY = ("_fill_indices_kernel",)
"""Kernels in Triton, by name, that write a tensor which they were given and read small ones: places of tokens in
the order of their experts (torchtitan). Their few microseconds are left out."""


@contextmanager
def standing_in(note: NoteTaker) -> Iterator[None]:
    """In the context, what is not installed of `_STAND_INS` has a stand-in.

    Args:
        note: is told what was used of them.
    """
    missing = [name for name in _STAND_INS if _is_missing(name)]
    made = [module for name in missing for module in _STAND_INS[name](note)]
    sys.modules.update({module.__name__: module for module in made})
    parts = _Parts([name for name in missing if name in _NAMED])
    on_demand = {"apex": lambda: apex.modules(_module, note), "kernels": lambda: _hub_kernels(note)}
    wanted = {name: make for name, make in on_demand.items() if _is_missing(name)}
    finders: list[MetaPathFinder] = [parts, apex.Wanted(wanted), _Installed(made)]
    sys.meta_path += finders
    try:
        with (
            once_imported(_LOSSES, partial(_by_pytorch, note)),
            once_imported("torchmetrics.metric", partial(_valid, note)),
            once_imported("torchmetrics.collections", partial(_each_by_itself, note)),
            once_imported(_TORCHAUDIO, partial(_in_python, note)),
        ):
            yield
    finally:
        for finder in finders:
            sys.meta_path.remove(finder)
        ask_anew()
        missing += wanted
        for name in [name for name in sys.modules if name.partition(".")[0] in missing]:
            del sys.modules[name]
        # The next run names the same operators, however long something holds the modules of this one.
        for library in (library for module in made for library in vars(module).get("_held", ())):
            library._destroy()


_LOSSES = "trl.kernels.chunked_logprob"
"""TRL's losses of language models, each by a kernel in Triton and, for other devices, by PyTorch's operators."""


@contextmanager
def _by_pytorch(note: NoteTaker) -> Iterator[None]:
    """In the context, TRL computes its losses by PyTorch's operators."""

    def choose(_: Any) -> bool:
        note("TRL's losses are kernels in Triton: its own PyTorch operators, which make the same, stand for them")
        return False

    module, choice = sys.modules[_LOSSES], "_use_triton"
    with replaced(module, choice, choose) if hasattr(module, choice) else nullcontext():
        yield


@contextmanager
def _each_by_itself(note: NoteTaker) -> Iterator[None]:
    """torchmetrics, whose metrics that hold the same share what they update: nobody knows whether any do."""

    def comparing(_: Any) -> Any:
        def equal(*_: Any) -> bool:
            note("torchmetrics asks which metrics hold the same: each of a collection is updated by itself")
            return False

        return staticmethod(equal)

    with patched(sys.modules["torchmetrics.collections"].MetricCollection, "_equal_metric_states", comparing):
        yield


@contextmanager
def _valid(note: NoteTaker) -> Iterator[None]:
    """In the context, metrics do not look whether there are more classes among values than was said."""

    def choose(_: Any) -> bool:
        note("torchmetrics does not hold values against the classes that it was told of: there are none")
        return False

    kind = sys.modules["torchmetrics.metric"].Metric
    kind.validate_args = property(choose, lambda _, asked: None)
    try:
        yield
    finally:
        del kind.validate_args


_TORCHAUDIO, _COMPILED = "torchaudio._extension.utils", "libtorchaudio"


@contextmanager
def _in_python(note: NoteTaker) -> Iterator[None]:
    """In the context, torchaudio goes on without compiled operators that are for another PyTorch."""

    def loading(original: Callable[[str], bool]) -> Callable[[str], bool]:
        def load(library: str) -> bool:
            try:
                return original(_COMPILED) and original(library)
            except OSError:
                note("torchaudio's compiled operators are for another PyTorch: what it has in Python is taken")
                return False

        return load

    with patched(sys.modules[_TORCHAUDIO], "_load_lib", loading):
        yield


class _Parts(Loader, MetaPathFinder):
    """Finds modules of stand-ins that are not there themselves: whatever is imported of them is a name."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        """One for each module of a stand-in; of FlashAttention's, where the script has no other way without it."""
        package = name.partition(".")[0]
        if package not in self._names or (package == "flash_attn" and not apex.is_wanted()):
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """A module of names."""
        return _module(spec.name, __getattr__=partial(_name_in, spec.name))

    def exec_module(self, module: ModuleType) -> None:
        """It is complete."""


def ask_anew() -> None:
    """Transformers forgets what it knows of packages and devices, if it was imported where there were others."""
    asking = sys.modules.get("transformers.utils.import_utils")
    for function in list(vars(asking).values()) if asking is not None else ():
        if hasattr(function, "cache_clear"):
            function.cache_clear()


class _StoodIn(Distribution):
    """What package managers tell of an installed distribution, of one that has a stand-in."""

    def __init__(self, name: str, module: ModuleType) -> None:
        self._texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {module.__version__}\n",
            "top_level.txt": f"{module.__name__}\n",
        }

    def read_text(self, filename: str) -> str | None:
        """One of its files of metadata."""
        return self._texts.get(filename)

    def locate_file(self, path: Any) -> NoReturn:
        """It has no files.

        Raises:
            FileNotFoundError: always.
        """
        raise FileNotFoundError(path)


class _Installed(DistributionFinder):
    """Answers `importlib.metadata`, which frameworks ask before they import a package, for stand-ins.

    Args:
        made: modules of the stand-ins.
    """

    def __init__(self, made: Sequence[ModuleType]) -> None:
        modules = {module.__name__: module for module in made}
        self._told = [
            _StoodIn(name, modules[module]) for module, name in _DISTRIBUTED_AS.items() if module in modules
        ]

    def find_spec(self, *_: Any) -> None:
        """It brings no modules."""

    def find_distributions(self, context: Any = None) -> Iterator[Distribution]:
        """Those of a name; without one, all."""
        asked = None if context is None else context.name
        for told in self._told:
            if asked is None or asked.lower().replace("-", "_") == told.name:
                yield told


_DISTRIBUTED_AS = {"flash_attn": "flash_attn", "flash_attn_interface": "flash_attn_3", "xformers": "xformers"}


def _is_missing(name: str) -> bool:
    return name not in sys.modules and find_spec(name) is None


def _module(name: str, **contents: Any) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    module.__dict__.update(contents)
    return module


# -- Triton --------------------------------------------------------------------------------------------------


class _Kernel:
    """What `triton.jit` makes of a function."""

    def __init__(self, function: Any, note: NoteTaker) -> None:
        self.fn, self._note = function, note
        self.__name__ = str(getattr(function, "__name__", function))

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self

    def __call__(self, *_: Any, **__: Any) -> None:
        if self.__name__ not in WRITES_ONLY:
            raise CaptureError(
                f"the kernel {self.__name__} is written in Triton, and a capture cannot look into it: the script "
                "is captured only where it takes PyTorch's own operators, or makes it a custom operator with a "
                "fake implementation (torch.library.register_fake)"
            )
        self._note(f"the kernel {self.__name__} (Triton) is left out: it writes indices, for some microseconds")

    run = __call__


class _Config:
    """`triton.Config`: scripts read back what they gave, to choose among several."""

    def __init__(
        self, kwargs: dict[str, Any], num_warps: int = 4, num_stages: int = 3, num_ctas: int = 1, **others: Any
    ) -> None:
        self.kwargs, self.num_warps, self.num_stages, self.num_ctas = kwargs, num_warps, num_stages, num_ctas
        vars(self).update(others)


class _Name(type):
    """Whatever else of a package a module names where it is imported: classes, constants, decorators."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (), {})

    def __call__(cls, *given: Any, **named: Any) -> Any:
        """As a decorator it leaves what it is given; what a script derives from it, or computes, is not known."""
        if any(isinstance(value, Tensor) for value in tree_leaves((given, named))):
            raise CaptureError(
                f"{cls.__name__} of {cls.__module__}, whose package is not installed, is none of what stands in "
                "for it: choose PyTorch's own operators, or install the package"
            )
        if isinstance(cls.__base__, _Name):
            raise CaptureError(
                f"{cls.__name__} derives from {cls.__base__.__name__}, whose package is not installed and of "
                "which a capture knows no more than the name: choose PyTorch's own operators"
            )
        return given[0] if len(given) == 1 and callable(given[0]) else cls

    def __getitem__(cls, _: Any) -> Any:
        return cls

    # With `__getitem__` alone, Python would look through its items without end.
    def __contains__(cls, _: object) -> bool:
        return False

    def __iter__(cls) -> NoReturn:
        raise TypeError(f"{cls.__name__} of {cls.__module__}, whose package is not installed, has no items")


def _name_in(module: str, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Name(name, (), {"__module__": module})


def _triton(note: NoteTaker) -> list[ModuleType]:
    def jit(function: Any = None, **_: Any) -> Any:
        return jit if function is None else _Kernel(function, note)

    def configured(*_: Any, **__: Any) -> Callable[[Any], Any]:
        return lambda kernel: kernel

    named = partial(_name_in, "triton")
    language = _module("triton.language", __getattr__=named, constexpr=_Name("constexpr", (), {}))
    whole = _module(
        "triton", jit=jit, autotune=configured, heuristics=configured, language=language, __version__="3.5.0",
        Config=_Config,
        cdiv=lambda a, b: -(-a // b), next_power_of_2=lambda n: 1 << (n - 1).bit_length(), __getattr__=named,
    )  # fmt: skip
    return [whole, language]


# -- attention -----------------------------------------------------------------------------------------------


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **_: Any,
) -> Any:
    """`flash_attn_func` of FlashAttention 2 and 3: PyTorch's fused kernel, which is the same.

    Args:
        q: (batch, sequence, heads, head), as k and v, which may have fewer heads.
        k: keys.
        v: values.
        dropout_p: of the scores.
        softmax_scale: of the scores; None: 1 / sqrt(head).
        causal: whether positions see those before them alone.
        window_size: how many positions to the left and right are seen; -1 is all.
        softcap: bound of the scores; 0 is none.
        alibi_slopes: biases of the scores.
        deterministic: whether gradients are added up in one order.
        return_attn_probs: whether what the kernel keeps for its backward pass is asked for: logarithms of sums,
            and scores, of which there are none without dropout.
    """
    if window_size[0] >= k.shape[1]:
        window_size = (-1, -1)
    if tuple(window_size) not in ((-1, -1), (-1, 0)) or softcap or alibi_slopes is not None:
        raise CaptureError(
            "flash_attn with a window, a cap or ALiBi's slopes is no kernel of PyTorch's, so a capture knows "
            "none: the script is captured only without these"
        )
    query, key, value = (part.transpose(1, 2) for part in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        dropout_p=dropout_p,
        is_causal=causal,
        scale=softmax_scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    out = out.transpose(1, 2)
    return (out, *_kept(q.shape[0], q.shape[2], q.shape[1], like=q)) if return_attn_probs else out


def _kept(*sizes: int, like: Tensor) -> tuple[Tensor, None]:
    """Logarithms of sums of scores, and scores, of which there are none."""
    return like.new_empty(sizes, dtype=torch.float32), None


def _packed(qkv: Tensor, *args: Any, **kwargs: Any) -> Any:
    q, k, v = qkv.unbind(dim=-3)
    return flash_attention(q, k, v, *args, **kwargs)


def _packed_keys(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Any:
    k, v = kv.unbind(dim=-3)
    return flash_attention(q, k, v, *args, **kwargs)


def _cached(*_: Any, **__: Any) -> None:
    raise CaptureError(
        "flash_attn with a cache of keys is no kernel of training that is known here: take flash_attn_func, "
        "flash_attn_varlen_func or PyTorch's scaled_dot_product_attention"
    )


def attention_of_several(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], keys: Sequence[int], *args: Any, **kwargs: Any
) -> Tensor:
    """Attention within each of several sequences, one behind the other: a kernel for each run of equal ones.

    Args:
        q: (positions of all, heads, head), as k and v.
        k: keys.
        v: values.
        lengths: positions of each sequence; there may be more behind them.
        keys: positions of its keys and values.
        args: as of `flash_attention`.
        kwargs: the same by name.

    Returns:
        As q.
    """
    outs, begin, begin_keys = [], 0, 0
    for (length, width), run in groupby(zip(lengths, keys, strict=True)):
        count = len(list(run))
        end, end_keys = begin + count * length, begin_keys + count * width
        if length:
            queries = q[begin:end].view(count, length, *q.shape[1:])
            keyed, valued = (part[begin_keys:end_keys].view(count, width, *part.shape[1:]) for part in (k, v))
            outs.append(flash_attention(queries, keyed, valued, *args, **kwargs).flatten(0, 1))
        begin, begin_keys = end, end_keys
    if begin < q.shape[0]:
        outs.append(q[begin:] * 0.0)
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int = 0,
    max_seqlen_k: int = 0, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, **_: Any,
) -> Any:  # fmt: skip
    """`flash_attn_varlen_func`, where the host knows the bounds of the sequences."""
    del max_seqlen_q, max_seqlen_k
    if not (is_known(cu_seqlens_q) and is_known(cu_seqlens_k)):
        raise CaptureError(
            "flash_attn_varlen takes sequences whose lengths only values tell: give it sequences of one length "
            "(flash_attn_func), or PyTorch's scaled_dot_product_attention"
        )
    lengths, keys = (
        [end - begin for begin, end in pairwise(bounds.tolist())] for bounds in (cu_seqlens_q, cu_seqlens_k)
    )
    given = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    out = attention_of_several(q, k, v, lengths, keys, *given)
    return (out, *_kept(q.shape[1], q.shape[0], like=q)) if return_attn_probs else out


class _Rotated(torch.autograd.Function):
    """FlashAttention's rotary embedding: one kernel that reads and writes its input, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, inplace: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return grads[0] * 1.0, None, None, None


def _rotary(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, inplace: bool = False, **_: Any
) -> Tensor:
    out: Tensor = _Rotated.apply(x, cos, sin, inplace)  # type: ignore[no-untyped-call]
    return out


class _RotatedWithin(torch.autograd.Function):
    """The same of the first of several that lie beside each other (queries and keys), where they lie."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, count: int) -> Tensor:
        ctx.count = count
        ctx.mark_dirty(whole)
        whole.narrow(2, 0, count).mul_(1.0)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grads[0].narrow(2, 0, ctx.count).mul_(1.0)
        return grads[0], None


def _rotary_of_all(
    qkv: Tensor, cos: Tensor, sin: Tensor, *_: Any, num_heads_q: int | None = None, **__: Any
) -> Tensor:
    """`apply_rotary_emb_qkv_` of (batch, sequence, 3, heads, head), or of heads of queries, keys and values."""
    turned = 2 if num_heads_q is None else (num_heads_q + qkv.shape[2]) // 2
    apply: Callable[..., Tensor] = _RotatedWithin.apply
    return apply(qkv, turned)


def _rotary_of_keys(kv: Tensor, cos: Tensor, sin: Tensor, *_: Any, **__: Any) -> Tensor:
    """`apply_rotary_emb_kv_` of (batch, sequence, 2, heads, head)."""
    apply: Callable[..., Tensor] = _RotatedWithin.apply
    return apply(kv, 1)


class _RotaryEmbedding(torch.nn.Module):
    """`flash_attn.layers.rotary.RotaryEmbedding`: angles that are kept, and one kernel for each tensor."""

    def __init__(
        self, dim: int, base: float = 10000.0, interleaved: bool = False, scale_base: float | None = None,
        pos_idx_in_fp32: bool = True, device: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if scale_base is not None:
            raise CaptureError("flash_attn's rotary embedding with scale_base is not known here: leave it out")
        self.dim, self.base, self.interleaved, self.pos_idx_in_fp32 = dim, base, interleaved, pos_idx_in_fp32
        self.scale_base = self.scale = None
        self.inv_freq: Tensor
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        self._seq_len_cached = 0
        self._cos_cached: Tensor | None = None
        self._sin_cached: Tensor | None = None

    def _compute_inv_freq(self, device: Any = None) -> Tensor:
        made: Tensor = 1.0 / self.base ** (
            torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim
        )
        return made

    def _update_cos_sin_cache(self, seqlen: int, device: Any = None, dtype: torch.dtype | None = None) -> None:
        if seqlen > self._seq_len_cached or self._cos_cached is None or self._cos_cached.dtype != dtype:
            self._seq_len_cached = seqlen
            angles = torch.outer(torch.arange(seqlen, device=device, dtype=torch.float32), self.inv_freq)
            self._cos_cached, self._sin_cached = angles.cos().to(dtype), angles.sin().to(dtype)

    def forward(self, qkv: Tensor, kv: Tensor | None = None, seqlen_offset: int = 0, **given: Any) -> Any:
        """Of (batch, sequence, 3, heads, head), or of queries and, two in one, keys and values."""
        longest = max(qkv.shape[1] + seqlen_offset, given.get("max_seqlen") or 0)
        self._update_cos_sin_cache(longest, device=qkv.device, dtype=qkv.dtype)
        cos, sin = self._cos_cached, self._sin_cached
        assert cos is not None and sin is not None
        turned = _rotary(qkv, cos, sin)
        return turned if kv is None else (turned, _rotary(kv, cos, sin))


class _FlashAttention(torch.nn.Module):
    """`flash_attn.flash_attention.FlashAttention` of the first version."""

    def __init__(self, softmax_scale: float | None = None, attention_dropout: float = 0.0, **_: Any) -> None:
        super().__init__()
        self.softmax_scale, self.dropout_p = softmax_scale, attention_dropout

    def forward(
        self, qkv: Tensor, key_padding_mask: Tensor | None = None, causal: bool = False,
        cu_seqlens: Tensor | None = None, max_s: int | None = None, need_weights: bool = False,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Of (batch, sequence, 3, heads, head), or of sequences one behind the other."""
        if key_padding_mask is not None or need_weights:
            raise CaptureError(
                "flash_attn's FlashAttention of padded sequences, or with its weights, is not known to a capture: "
                "give it sequences of one length"
            )
        dropout_p = self.dropout_p if self.training else 0.0
        q, k, v = qkv.unbind(dim=-3)
        given: dict[str, Any] = {"dropout_p": dropout_p, "softmax_scale": self.softmax_scale, "causal": causal}
        if cu_seqlens is None:
            return flash_attention(q, k, v, **given), None
        longest = max_s or 0
        return _varlen(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **given), None


class _RmsNorm(torch.nn.RMSNorm):
    """`flash_attn.ops.rms_norm.RMSNorm`, and Triton's of the same name."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-5, device: Any = None, dtype: Any = None, **_: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps, device=device, dtype=dtype)

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        """One kernel."""
        return torch.nn.functional.rms_norm(x, self.normalized_shape, self.weight, self.eps)


def _layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None, eps: float = 1e-6,
    is_rms_norm: bool = False, **given: Any,
) -> Tensor:  # fmt: skip
    if residual is not None or given.get("prenorm") or given.get("dropout_p"):
        raise CaptureError(
            "flash_attn's layer_norm_fn with a residual or dropout is one kernel that PyTorch has not"
        )
    shape, functional = (x.shape[-1],), torch.nn.functional
    if is_rms_norm:
        return functional.rms_norm(x, shape, weight, eps)
    return functional.layer_norm(x, shape, weight, bias, eps)


def _unpadded(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """`flash_attn.bert_padding.unpad_input`: positions that a mask keeps, of all sequences one behind the other.

    Args:
        hidden_states: (batch, sequence, ...).
        attention_mask: (batch, sequence), 1 where a position counts.
        unused_mask: the same, of positions for which there is room.

    Returns:
        (positions, ...), where each was, bounds of the sequences, the longest, and how many each has that count.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(dim=-1, dtype=torch.int32)
    places = torch.nonzero(kept.flatten(), as_tuple=False).flatten()
    bounds = torch.nn.functional.pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
    counted = attention_mask.sum(dim=-1, dtype=torch.int32)
    return _rows(hidden_states.flatten(0, 1), places), places, bounds, int(lengths.max().item()), counted


def _rows(given: Tensor, places: Tensor) -> Tensor:
    """`flash_attn.bert_padding.index_first_axis`."""
    return given.index_select(0, places)


def _padded(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """`flash_attn.bert_padding.pad_input`: back to (batch, sequence, ...), zeros where nothing was kept."""
    whole = hidden_states.new_zeros((batch * seqlen, *hidden_states.shape[1:]))
    return whole.index_copy(0, indices, hidden_states).view(batch, seqlen, *hidden_states.shape[1:])


def _of_einops() -> dict[str, Any]:
    """What `flash_attn.bert_padding` imports itself, and others import from there."""
    if find_spec("einops") is None:
        return {}
    einops = import_module("einops")
    return {"rearrange": einops.rearrange, "repeat": einops.repeat}


def _flash_attn(note: NoteTaker) -> list[ModuleType]:
    # Frameworks look which arguments a version takes.
    @wraps(flash_attention)
    def attention(*args: Any, **kwargs: Any) -> Any:
        note("flash_attn is not installed: its attention is PyTorch's flash attention, the same kernel")
        return flash_attention(*args, **kwargs)

    @wraps(_varlen)
    def several(*args: Any, **kwargs: Any) -> Any:
        note(f"flash_attn is not installed: {_RUNS}")
        return _varlen(*args, **kwargs)

    def several_packed(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **kwargs: Any) -> Any:
        return several(*qkv.unbind(dim=1), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **kwargs)

    def several_packed_keys(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Any:
        return several(q, *kv.unbind(dim=1), *args, **kwargs)

    functions = {
        "flash_attn_func": attention, "flash_attn_qkvpacked_func": _packed,
        "flash_attn_kvpacked_func": _packed_keys,
        "flash_attn_varlen_func": several, "flash_attn_varlen_qkvpacked_func": several_packed,
        "flash_attn_varlen_kvpacked_func": several_packed_keys, "flash_attn_with_kvcache": _cached,
    }  # fmt: skip
    name = "flash_attn"
    interface = _module(f"{name}.flash_attn_interface", **functions)
    rotary = _module(
        f"{name}.layers.rotary", apply_rotary_emb=_rotary, apply_rotary_emb_func=_rotary,
        apply_rotary_emb_kv_=_rotary_of_keys, apply_rotary_emb_qkv_=_rotary_of_all,
        RotaryEmbedding=_RotaryEmbedding,
    )  # fmt: skip
    layers = _module(f"{name}.layers", rotary=rotary)
    modules_of = f"{name}.modules.mha"
    mha = _module(modules_of, **functions, __getattr__=partial(_name_in, modules_of))
    modules = _module(f"{name}.modules", mha=mha, __getattr__=partial(_name_in, f"{name}.modules"))
    first = _module(f"{name}.flash_attention", FlashAttention=_FlashAttention)
    norm = _module(f"{name}.ops.triton.layer_norm", layer_norm_fn=_layer_norm, RMSNorm=_RmsNorm)
    triton = _module(f"{name}.ops.triton", layer_norm=norm)
    rms = _module(f"{name}.ops.rms_norm", RMSNorm=_RmsNorm)
    padding = _module(
        f"{name}.bert_padding", unpad_input=_unpadded, pad_input=_padded, index_first_axis=_rows,
        __getattr__=partial(_name_in, f"{name}.bert_padding"), **_of_einops(),
    )  # fmt: skip
    ops = _module(f"{name}.ops", triton=triton, rms_norm=rms)
    whole = _module(
        name, __version__="2.8.3", flash_attn_interface=interface, flash_attention=first, layers=layers, ops=ops,
        modules=modules, bert_padding=padding, __getattr__=partial(_name_in, name), **functions,
    )  # fmt: skip
    of_third = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")
    third = _module("flash_attn_interface", __version__="3.0.0", **{each: functions[each] for each in of_third})
    return [whole, interface, layers, rotary, ops, triton, norm, rms, padding, modules, mha, first, third]


# -- xFormers ------------------------------------------------------------------------------------------------


class _AttentionBias:
    """`xformers.ops.AttentionBias`, of which scripts say that a mask is one."""


class _Blocks(_AttentionBias):
    """`xformers.ops.fmha.BlockDiagonalMask`: sequences one behind the other, each of which sees itself."""

    causal = False

    def __init__(self, lengths: Sequence[int], keys: Sequence[int]) -> None:
        self.lengths, self.keys = list(lengths), list(keys)
        self._batch_sizes: Sequence[int] | None = None

    @classmethod
    def from_seqlens(cls, q_seqlen: Sequence[int], kv_seqlen: Sequence[int] | None = None, **_: Any) -> _Blocks:
        """Of the lengths of sequences."""
        return cls(q_seqlen, q_seqlen if kv_seqlen is None else kv_seqlen)

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[Tensor]) -> tuple[_Blocks, Tensor]:
        """Of tensors (batch, length, ...), and these one behind the other: (1, positions of all, ...)."""
        made = cls.from_seqlens([tensor.shape[1] for tensor in tensors for _ in range(tensor.shape[0])])
        made._batch_sizes = [tensor.shape[0] for tensor in tensors]
        return made, torch.cat([tensor.reshape(1, -1, *tensor.shape[2:]) for tensor in tensors], dim=1)

    def make_causal(self) -> _Blocks:
        """The same, where positions see those before them alone."""
        return _CausalBlocks(self.lengths, self.keys)

    def split(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of which (1, positions of all, ...) was made."""
        sizes = self._batch_sizes or [1] * len(self.lengths)
        firsts = [self.lengths[at] for at in accumulate(sizes[:-1], initial=0)]
        parts = torch.split(tensor, [size * length for size, length in zip(sizes, firsts, strict=True)], dim=1)
        shapes = zip(parts, sizes, firsts, strict=True)
        return [part.reshape(size, length, *tensor.shape[2:]) for part, size, length in shapes]


class _CausalBlocks(_Blocks):
    causal = True


class _Causal(_AttentionBias):
    """`xformers.ops.LowerTriangularMask`."""


# Operators that scripts name, whose results a checkpoint is to keep; here PyTorch's run, which they name as well.
_NAMED_OPERATORS = (
    "xformers_flash::flash_fwd", "xformers_flash3::flash_fwd", "xformers::efficient_attention_forward_cutlass",
)  # fmt: skip


def _named_operators() -> list[Any]:
    """Names of operators, for as long as what is given back is held."""
    held = []
    for name in _NAMED_OPERATORS:
        space, _, operator = name.partition("::")
        library: Any = torch.library.Library(space, "FRAGMENT")  # type: ignore[no-untyped-call]
        library.define(f"{operator}() -> ()")
        held.append(library)
    return held


def _efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Any = None, p: float = 0.0, scale: float | None = None,
    **_: Any,
) -> Tensor:  # fmt: skip
    """`xformers.ops.memory_efficient_attention` of (batch, sequence, heads, head), or without heads."""
    if query.dim() == 3 and not isinstance(attn_bias, _Blocks):
        bias = attn_bias.unsqueeze(1) if isinstance(attn_bias, Tensor) else attn_bias
        q, k, v = (part.unsqueeze(2) for part in (query, key, value))
        return _efficient_attention(q, k, v, bias, p, scale).squeeze(2)
    if isinstance(attn_bias, _Blocks):
        parts = (query[0], key[0], value[0])
        return attention_of_several(*parts, attn_bias.lengths, attn_bias.keys, p, scale, attn_bias.causal)[None]
    if isinstance(attn_bias, Tensor) and query.dim() == 4:
        # The kernel is the one that PyTorch took over.
        q, k, v = (part.transpose(1, 2) for part in (query, key, value))
        biased = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_bias, p, scale=scale)
        return biased.transpose(1, 2)
    causal = isinstance(attn_bias, _Causal) or attn_bias is _Causal
    if attn_bias is not None and not causal:
        raise CaptureError(
            "xformers' attention with a bias that is no mask of blocks or of positions before is a kernel that is "
            "not known here: take PyTorch's scaled_dot_product_attention"
        )
    out: Tensor = flash_attention(query, key, value, p, scale, causal)
    return out


def _scaled_index_add(
    given: Tensor, index: Tensor, source: Tensor, scaling: Tensor | None = None, alpha: float = 1.0
) -> Tensor:
    return torch.index_add(given, 0, index, source if scaling is None else source * scaling, alpha=alpha)


class _SwiGLU(torch.nn.Module):
    """`xformers.ops.SwiGLU` as PyTorch's operators, of which xFormers' own are fewer."""

    def __init__(
        self, in_features: int, hidden_features: int, out_features: int | None = None, bias: bool = True, *,
        _pack_weights: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.w12: torch.nn.Linear | None = None
        if _pack_weights:
            self.w12 = torch.nn.Linear(in_features, 2 * hidden_features, bias=bias)
        else:
            self.w1 = torch.nn.Linear(in_features, hidden_features, bias=bias)
            self.w2 = torch.nn.Linear(in_features, hidden_features, bias=bias)
        self.w3 = torch.nn.Linear(hidden_features, out_features or in_features, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Of (..., in_features)."""
        gate, up = (self.w1(x), self.w2(x)) if self.w12 is None else self.w12(x).chunk(2, dim=-1)
        out: Tensor = self.w3(torch.nn.functional.silu(gate) * up)
        return out


def _xformers(note: NoteTaker) -> list[ModuleType]:
    def attention(*args: Any, **kwargs: Any) -> Tensor:
        note(f"xformers is not installed: {_RUNS}")
        return _efficient_attention(*args, **kwargs)

    biases = {
        "BlockDiagonalMask": _Blocks, "BlockDiagonalCausalMask": _CausalBlocks, "LowerTriangularMask": _Causal,
        "AttentionBias": _AttentionBias,
    }  # fmt: skip
    bias = _module("xformers.ops.fmha.attn_bias", **biases)
    fmha = _module(
        "xformers.ops.fmha", attn_bias=bias, memory_efficient_attention=attention, **biases
    )  # fmt: skip
    ops = _module(
        "xformers.ops", fmha=fmha, memory_efficient_attention=attention, LowerTriangularMask=_Causal,
        AttentionBias=_AttentionBias, SwiGLU=_SwiGLU,
        unbind=torch.unbind, scaled_index_add=_scaled_index_add,
        index_select_cat=lambda parts, rows: torch.cat(
            [part[row].flatten() for part, row in zip(parts, rows, strict=True)]
        ),
    )  # fmt: skip
    # It watches a run, and there is none.
    profiler = _module(
        "xformers.profiler", profile=lambda *_, **__: nullcontext(), step=lambda: None,
        __getattr__=partial(_name_in, "xformers.profiler"),
    )  # fmt: skip
    held = _named_operators()
    whole = _module("xformers", __version__="0.0.33", ops=ops, profiler=profiler, _held=held)
    return [whole, ops, fmha, bias, profiler]


# -- grouped_gemm ---------------------------------------------------------------------------------------------


def _grouped(a: Tensor, b: Tensor, batch_sizes: Tensor, trans_a: bool = False, trans_b: bool = False) -> Tensor:
    """`grouped_gemm.ops.gmm`: rows of a, of which each matrix of b takes as many as its size says."""
    if trans_a:
        raise CaptureError("grouped_gemm with trans_a is the product of a backward pass: leave that to autograd")
    ends = batch_sizes.to(a.device).cumsum(0).to(torch.int32)
    return torch._grouped_mm(a, b.transpose(-2, -1) if trans_b else b, offs=ends)


def _by_expert(tokens: Tensor, experts: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """`grouped_gemm.ops.permute`: each token once for each of its experts, in their order, and where it went."""
    order = experts.flatten().argsort()
    return tokens.index_select(0, order // experts.shape[-1] if experts.dim() > 1 else order), order


def _by_token(rows: Tensor, order: Tensor, weights: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """`grouped_gemm.ops.unpermute`: what the experts of each token made of it, weighted and added up."""
    back = rows.index_select(0, order.argsort())
    return back if weights is None else (back.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1)


def _grouped_gemm(note: NoteTaker) -> list[ModuleType]:
    def product(*args: Any, **kwargs: Any) -> Tensor:
        note(
            "grouped_gemm is not installed: its products are PyTorch's grouped ones, its permutations several "
            "kernels"
        )
        return _grouped(*args, **kwargs)

    ops = _module("grouped_gemm.ops", gmm=product, permute=_by_expert, unpermute=_by_token)
    return [_module("grouped_gemm", ops=ops, **{name: getattr(ops, name) for name in ("gmm", "permute")}), ops]


def _hub_kernels(note: NoteTaker) -> list[ModuleType]:
    """`kernels`, which takes compiled code from the hub: of FlashAttention's, what is known of its package."""

    def get_kernel(name: str, *_: Any, **__: Any) -> ModuleType:
        if "flash-attn" in name:
            whole, third = _flash_attn(note)[0], _flash_attn(note)[-1]
            known = {each: value for each, value in vars(whole).items() if not each.startswith("__")}
            return _module(name, **known | {"flash_attn_interface": third})
        raise CaptureError(
            f"{name} is compiled code for GPUs, into which a capture cannot look: the script is captured only "
            "where it takes PyTorch's own operators in its place"
        )

    return [_module("kernels", get_kernel=get_kernel)]


_RUNS = "its attention of several sequences is PyTorch's flash attention, a kernel for each run of equal lengths"
_NAMED = ("triton", "flash_attn")
"""Those of which anything may be imported; of the others what is not there raises ImportError, as a script that
has another way expects."""
_STAND_INS: dict[str, Callable[[NoteTaker], list[ModuleType]]] = {
    "triton": _triton, "flash_attn": _flash_attn, "xformers": _xformers,
    "grouped_gemm": _grouped_gemm,
    "dropout_layer_norm": lambda note: [flash_attn_kernels.dropout_layer_norm(_module, note)],
    "rotary_emb": lambda note: [flash_attn_kernels.rotary_emb(_module, note)],
    "xentropy_cuda_lib": lambda note: [flash_attn_kernels.xentropy_cuda_lib(_module, note)],
}  # fmt: skip
