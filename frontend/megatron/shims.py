"""Stand-ins for what megatron-core takes from a GPU, Transformer Engine or Apex.

`SHIMS` has them, each with its reason. They make a script run where none of the three is, on real ranks of CPUs
or on none, and change nothing of which collectives it asks for. The device itself is the business of
`frontend.scripts.device`.

Two tables are for captures alone. `LEFT_OUT` is what scripts of Megatron-LM do before they train: they compile,
and index their data. A capture needs the shapes of samples, and neither their values nor the files they are in,
which are where the job runs.

`balanced` is for experts that take what comes: how many tokens each takes is a value, and decides shapes. Routing
is not known without values, so experts are taken to have equal loads: of a rank's choices (its tokens times the
experts that each takes) every expert gets as many, a remainder going to the first ones. Beyond a capacity, tokens
are dropped, and padded to a capacity, loads are that. What counts and exchanges the loads is recorded as it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils.data import Dataset

from echograph.errors import CaptureError
from echograph.frontend.megatron.patches import Patch, in_place
from echograph.frontend.megatron.stub_modules import standing_in
from echograph.frontend.pytorch import compiler
from echograph.frontend.pytorch.known_values import Guess, real
from echograph.frontend.scripts.adapter import patched
from echograph.frontend.scripts.host_work import WorkCounter
from echograph.frontend.scripts.streams import CapturedStream
from echograph.frontend.scripts.values import printed

_GENERATOR = "random numbers are drawn from the GPU's generator; which they are does not change what runs"


@contextmanager
def shimmed() -> Iterator[None]:
    """In the context, megatron-core does without a GPU's generator, Transformer Engine and Apex.

    Raises:
        CaptureError: this megatron-core does not have what a shim stands in for.
    """
    # What was compiled before would be kernels of this machine's compiler: operators run one by one.
    stance = torch.compiler.set_stance("force_eager") if compiler.is_here() else nullcontext()
    with standing_in(), in_place(SHIMS), stance:
        yield


def _norm(config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> nn.Module:
    """PyTorch's norm, its parameters marked as those of Transformer Engine and Apex are."""
    kinds: dict[str, Callable[..., nn.Module]] = {"LayerNorm": nn.LayerNorm, "RMSNorm": nn.RMSNorm}
    if config.normalization not in kinds:
        raise CaptureError(f"normalization '{config.normalization}': without its kernels, {' or '.join(kinds)}")
    norm = kinds[config.normalization](hidden_size, eps=eps, dtype=config.params_dtype)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


def _norm_of_all(size: int, flag: Any, lists: list[list[Tensor]], each: bool, *_: Any) -> tuple[Tensor, None]:
    """The norm of many tensors together."""
    del size, flag, each
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(lists[0]))).view(1), None


def _scale_all(size: int, flag: Any, lists: list[list[Tensor]], factor: float) -> None:
    """Writes tensors, times a factor, to others, which may be the same."""
    del size, flag
    source, target = lists
    if any(one is not other for one, other in zip(source, target, strict=True)):
        torch._foreach_copy_(target, source)
    if isinstance(factor, Guess) or factor != 1.0:  # gradients that are clipped are more than the bound
        torch._foreach_mul_(target, factor)


def _fused(original: Callable[..., None]) -> Callable[..., None]:
    """Adam in one kernel, if nothing else is asked for."""

    def init(optimizer: Any, /, *args: Any, **options: Any) -> None:
        if options.get("foreach") is None and options.get("fused") is None:
            options["fused"] = True
        original(optimizer, *args, **options)

    return init


def _update(original: Callable[..., Any]) -> Callable[..., Any]:
    """An update that takes the host, for each parameter that has a gradient, what Transformer Engine's does."""

    @wraps(original)
    def step(optimizer: Any, /, *args: Any, **options: Any) -> Any:
        counter = WorkCounter.current
        if counter is None:
            return original(optimizer, *args, **options)
        with counter.aside():
            parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        with counter.standing_in(*["FusedAdam parameter"] * len(parameters)):
            return original(optimizer, *args, **options)

    return step


def _on_the_host(original: Callable[..., None]) -> Callable[..., None]:
    def init(*args: Any, **named: Any) -> None:
        original(*args, **named | {"use_cpu_initialization": True})

    return init


def _same(answer: Any = None) -> Callable[[Any], Any]:
    return lambda _: lambda *_, **__: answer


def _backward(output: Tensor, gradient: Tensor | None) -> None:
    """A backward pass from an output whose memory is given back, which PyTorch's own functions would refuse."""
    if gradient is None:
        gradient = torch.ones_like(output, memory_format=torch.preserve_format)
    torch.autograd.graph._engine_run_backward(
        (output,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _backward_of_part(node: Any, outputs: Any, gradients: Any) -> Any:
    """A backward pass of a part of a layer."""
    del node
    torch.autograd.graph._engine_run_backward(
        tuple(outputs), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
    return gradients


def _name_it(tracker: Any, name: str, seed: int) -> None:
    tracker.states_[name] = seed
    tracker._is_initialized = True  # as Megatron-LM asks before it hands the tracker to Transformer Engine


SHIMS: tuple[Patch, ...] = (
    Patch(
        where="megatron.core.tensor_parallel.random:CudaRNGStatesTracker.add",
        reason=_GENERATOR,
        around=lambda _: _name_it,
    ),
    Patch(
        where="megatron.core.tensor_parallel.random:CudaRNGStatesTracker.fork",
        reason=_GENERATOR,
        around=_same(nullcontext()),
    ),
    Patch(
        where="megatron.core.tensor_parallel.random:_get_cuda_rng_state",
        reason=_GENERATOR,
        around=lambda _: lambda *_, **__: torch.get_rng_state(),
    ),
    Patch(
        where="megatron.core.tensor_parallel.random:_set_cuda_rng_state",
        reason=_GENERATOR,
        around=_same(),
    ),
    Patch(
        where="megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
        reason="the norm that is left without their kernels refuses sequence parallelism; theirs do not",
        around=lambda _: staticmethod(lambda cls, *args, **options: _norm(*args, **options)),
    ),
    *(
        Patch(
            where=where,
            reason="the kernel answers on the device; without it, every tensor's norm is read on the host",
            around=lambda _: _norm_of_all,
        )
        for where in (
            "megatron.core.utils:local_multi_tensor_l2_norm",  # Megatron-LM's norm of parameters takes this one
            "megatron.core.optimizer.clip_grads:l2_norm_impl",
        )
    ),
    *(
        Patch(
            where=f"megatron.core.optimizer.{module}:multi_tensor_scale_impl",
            reason="the kernel scales many tensors in one launch; what is left without it, one by one",
            around=lambda _: _scale_all,
        )
        for module in ("clip_grads", "optimizer")
    ),
    Patch(
        where="megatron.core.models.common.embeddings.yarn_rotary_pos_embedding:YarnRotaryEmbedding.__init__",
        reason="it makes its table on a device by its number, of which PyTorch asks the GPU",
        around=_on_the_host,
    ),
    Patch(
        where="torch.optim.adam:Adam.__init__",
        reason="megatron-core takes Transformer Engine's or Apex's fused Adam, if there; PyTorch has one, too",
        around=_fused,
    ),
    Patch(
        where="torch.optim.adam:Adam.step",
        reason="the same: it is Transformer Engine's Python that goes through the parameters there",
        around=_update,
    ),
    Patch(
        where="megatron.core.pipeline_parallel.schedules:custom_backward",
        reason="it calls autograd's engine past PyTorch's own function, where hooks see a pass begin",
        around=lambda _: _backward,
    ),
    Patch(
        where="megatron.core.pipeline_parallel.utils:ScheduleNode.default_backward_func",
        reason="the same, for a part of a pass",
        around=lambda _: _backward_of_part,
    ),
)


_EPOCH = 1 << 31


class TokenSamples(Dataset[dict[str, Tensor]]):
    """Sequences of tokens, in the shapes in which a `GPTDataset` gives them.

    Args:
        config: a `GPTDatasetConfig`.
        split: of which `megatron.core.datasets.utils.Split`.
        size: samples; None: those of an epoch, more than any run takes.
    """

    def __init__(self, config: Any, split: Any, size: int | None) -> None:
        self.config, self.index_split, self._size = config, split, _EPOCH if size is None else size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, _: int) -> dict[str, Tensor]:
        length = self.config.sequence_length
        sample = {name: torch.zeros(length, dtype=torch.int64) for name in ("tokens", "labels")}
        if self.config.create_attention_mask:
            sample["attention_mask"] = torch.zeros(1, length, length, dtype=torch.bool)
        sample["loss_mask"] = torch.ones(length)
        sample["position_ids"] = torch.arange(length)
        return sample


def _around_tokens(kind: type, config: Any, split: Any, size: int | None) -> Any:
    """Samples of a data set that adds to those of a GPT, by `super().__getitem__`: images, say."""
    names = ("__init__", "__len__")
    own: type = type(kind.__name__, (kind,), {name: vars(TokenSamples)[name] for name in names})
    return own(config, split, size)


class SentenceSamples(Dataset[dict[str, Any]]):
    """Samples of BERT and T5, in the shapes in which their datasets give them, none of them padded.

    Args:
        config: of a `BERTMaskedWordPieceDataset` or a `T5MaskedWordPieceDataset`.
        split: of which `megatron.core.datasets.utils.Split`.
        size: samples; None: those of an epoch, more than any run takes.
    """

    def __init__(self, config: Any, split: Any, size: int | None) -> None:
        self.config, self.index_split, self._size = config, split, _EPOCH if size is None else size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, _: int) -> dict[str, Any]:
        decoded = getattr(self.config, "sequence_length_decoder", None)
        if decoded is None:
            names = ("text", "types", "labels", "padding_mask", "loss_mask")
            flags: dict[str, Any] = dict.fromkeys(("is_random", "truncated"), 0)
            return flags | {name: torch.ones(self.config.sequence_length, dtype=torch.int64) for name in names}
        encoded = getattr(self.config, "sequence_length_encoder", None) or self.config.sequence_length
        lengths = dict.fromkeys(("text_enc", "enc_mask"), encoded)
        lengths |= dict.fromkeys(("text_dec", "dec_mask", "labels", "loss_mask"), decoded)
        made = {name: torch.ones(length, dtype=torch.int64) for name, length in lengths.items()}
        return {"truncated": 0, **made}


def _with_sentinels(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Checks a T5's settings as if its tokenizer had the tokens that stand for what is masked."""

    def check(config: Any) -> None:
        tokenizer = config.tokenizer
        config.tokenizer = SimpleNamespace(additional_special_tokens_ids=[0])
        try:
            original(config)
        finally:
            config.tokenizer = tokenizer

    return check


def _sizes(original: Callable[..., Any]) -> Callable[..., Any]:
    """How large the tensors of a batch are: the first rank tells the others, and knows it without asking."""

    def build(keys: Any, data: Any, *args: Any, **named: Any) -> Any:
        if data is None or not isinstance(data[keys[0]], FakeTensor):
            return original(keys, data, *args, **named)
        shapes = {key: list(data[key].shape) for key in keys}
        said = iter([size for key in keys for size in (*shapes[key], *[0] * (5 - len(shapes[key])))])
        with patched(Tensor, "cpu", lambda _: lambda _: list(said)):
            original(keys, data, *args, **named)
        elements = {key: prod(shape) for key, shape in shapes.items()}
        return shapes, elements, sum(elements.values())

    return build


def _build(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Builds samples without data for each split; kinds of data other than tokens of a GPT are refused."""

    def build(builder: Any) -> list[Any]:
        from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset
        from megatron.core.datasets.utils import Split

        plain = builder.cls in (GPTDataset, MockGPTDataset) or builder.cls.__getitem__ is GPTDataset.__getitem__
        masked = builder.cls.__name__ in ("BERTMaskedWordPieceDataset", "T5MaskedWordPieceDataset")
        if not (plain or masked or issubclass(builder.cls, GPTDataset)):
            if builder.config.mock:
                return original(builder)  # type: ignore[no-any-return]
            raise CaptureError(
                f"{builder.cls.__name__}: a capture has samples of the shapes of GPTDataset, BERT and T5, and of "
                "what derives from the first: leave out what chooses another dataset"
            )
        if not builder.is_built_on_rank():
            return [None] * len(Split)
        kind: Any = SentenceSamples if masked else TokenSamples if plain else partial(_around_tokens, builder.cls)
        return [kind(builder.config, split, builder.sizes[split.value]) for split in Split]

    return build


def _unrejected(original: Callable[..., None]) -> Callable[..., None]:
    """Looks for values that are no numbers as the script asks, and finds none."""

    def validate(machine: Any, result: Any, rejection_func: Callable[..., Any], *args: Any, **named: Any) -> Any:
        def reject(value: Any) -> bool:
            if rejection_func in (torch.isnan, torch.isinf):
                rejection_func(value)
                # Whether it is one the host reads.
                CapturedStream.current.synchronize()
            return False

        original(machine, result, reject, *args, **named)

    return validate


def _finite(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Looks for gradients that overflow as the optimizer does, and finds none."""

    def check(optimizer: Any) -> bool:
        original(optimizer)
        return False

    return check


def _not_in_place(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The gradient of logits, worked out beside the softmax that it is made of.

    torch.compile makes functions of what changes its arguments: the element of each label that one is subtracted
    from is written to a copy (a scatter is no part of a kernel), and the copy lives beside the softmax, which
    autograd keeps until its node has ended: the view, which runs nothing, says so.
    """

    def calculate(softmax: Tensor, *args: Any, **named: Any) -> Tensor:
        gradient = original(softmax.clone(), *args, **named)
        softmax.view(softmax.shape)
        return gradient

    return calculate


LEFT_OUT: tuple[Patch, ...] = (
    Patch(
        where="megatron.core.optimizer.optimizer:MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan",
        reason="a step is skipped where gradients overflow, which only values tell: they do not",
        around=_finite,
    ),
    Patch(
        where="megatron.core.fusions.fused_cross_entropy:calculate_gradients",
        reason="it is compiled, and works in place only where it is not",
        around=_not_in_place,
    ),
    Patch(
        where="megatron.core.datasets.utils:compile_helpers",
        reason="it compiles what indexes samples, which are not there",
        around=lambda _: lambda: None,
    ),
    Patch(
        where="megatron.legacy.fused_kernels:load",
        reason="it asks CUDA's compiler for its version",
        around=lambda _: lambda _: None,
        optional=True,
    ),
    Patch(
        where="megatron.core.datasets.t5_dataset:T5MaskedWordPieceDatasetConfig.__post_init__",
        reason="it asks for tokens that a tokenizer without a vocabulary does not have",
        around=_with_sentinels,
    ),
    Patch(
        where="megatron.core.tensor_parallel.data:_build_key_size_numel_dictionaries",
        reason="the sizes of a batch's tensors are values of one that is broadcast",
        around=_sizes,
    ),
    Patch(
        where="megatron.core.rerun_state_machine:RerunStateMachine.validate_result",
        reason="a step is run again where its loss is no number, which only values tell",
        around=_unrejected,
    ),
    Patch(
        where="megatron.core.datasets.gpt_dataset:GPTDataset.__getitem__",
        reason="samples have shapes alone, which data sets that derive from it add to",
        around=lambda _: TokenSamples.__getitem__,
    ),
    Patch(
        where="megatron.core.datasets.blended_megatron_dataset_builder:BlendedMegatronDatasetBuilder.build",
        reason="samples are in files of the machines that train; shapes are what a capture needs of them",
        around=_build,
    ),
    # The last one: what is imported for it takes functions of megatron-core by name, those that stand in for them.
    Patch(
        where="megatron.training.training:checkpoint_and_decide_exit",
        reason="ranks agree on signals and times to end at, which only values tell; a capture ends after its step",
        around=lambda _: lambda *_, **__: False,
        optional=True,
    ),
    Patch(
        where="megatron.core.timers:Timers.log",
        reason="it leaves ranks without a time out of a line that it prints, which only values tell",
        around=printed,
    ),
    Patch(
        where="megatron.training.training:training_log",
        reason="it leaves losses that are not above 0 out of a line that it prints, which only values tell",
        around=printed,
        optional=True,
    ),
)
"""What is not done in a capture."""


_EQUAL = "experts are taken to have equal loads: which they have, only values tell"
_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"


def balanced(note: Callable[[str], None]) -> tuple[Patch, ...]:
    """What stands in for loads.

    Args:
        note: is told that loads are taken to be equal.
    """
    return (
        Patch(
            where=f"{_DISPATCHER}:MoEAlltoAllTokenDispatcher.preprocess",
            reason="the host reads how many tokens each expert takes",
            around=lambda original: _preprocess(original, note),
        ),
        Patch(
            where=f"{_DISPATCHER}:MoEAllGatherTokenDispatcher.dispatch_postprocess",
            reason="the host reads how many of all tokens each of a rank's experts takes",
            around=lambda original: _postprocess(original, note),
        ),
        Patch(
            where="megatron.core.transformer.moe.router:sinkhorn",
            reason="it goes on until values are near others",
            around=lambda original: _sinkhorn(original, note),
        ),
        *(
            Patch(
                where=f"{_DISPATCHER}:{name}",
                reason="what a mask selects has as many elements as it is true for",
                around=_of_known_size,
            )
            for name in ("permute", "unpermute")
        ),
        Patch(
            where=f"{_DISPATCHER}:sort_chunks_by_idxs",
            reason="a kernel of Transformer Engine's that does it at once is not there",
            around=_unfused,
        ),
    )


_SWEEPS = 4
"""Of Sinkhorn's algorithm: what it takes for a new router of 4 experts in 10 of 12 layers of 512 with random
weights (an initial 0.02) and 1,024 tokens that are as frequent as words; in two layers three. Logits of such a
router differ between experts in their means, by what their layer's tokens have in common."""


class _Sweeping(TorchFunctionMode):
    """A loop that goes on for as long as a tensor is true, and so for a number of times."""

    def __init__(self) -> None:
        super().__init__()
        self._left = _SWEEPS

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__bool__:
            return func(*args, **(kwargs or {}))
        counter = WorkCounter.current
        if counter is not None:
            with counter.aside():
                counter.reads(args[0])  # the host waits for the error, sweep by sweep
        self._left -= 1
        return self._left > 0


def _sinkhorn(original: Callable[..., Tensor], note: Callable[[str], None]) -> Callable[..., Tensor]:
    def route(cost: Tensor, *args: Any, **named: Any) -> Tensor:
        if not isinstance(cost, FakeTensor):
            return original(cost, *args, **named)
        note(f"--moe-router-load-balancing-type sinkhorn is taken to end after {_SWEEPS} sweeps, as it begins")
        with _Sweeping():
            return original(cost, *args, **named)

    return route


def loads(choices: int, experts: int) -> list[int]:
    """How many of a rank's choices each expert gets: equal numbers, a remainder to the first ones."""
    each, rest = divmod(choices, experts)
    return [each + (number < rest) for number in range(experts)]


def _preprocess(original: Callable[..., Tensor], note: Callable[[str], None]) -> Callable[..., Tensor]:
    def preprocess(dispatcher: Any, routing_map: Tensor) -> Tensor:
        counted = original(dispatcher, routing_map)
        if not isinstance(routing_map, FakeTensor):
            return counted
        with unset_fake_temporarily():
            if dispatcher.drop_and_pad:
                return torch.full(counted.shape, dispatcher.capacity * dispatcher.tp_size * dispatcher.ep_size)
            note(_EQUAL)
            return _take(dispatcher, routing_map.shape[0])

    return preprocess


def _postprocess(original: Callable[..., Any], note: Callable[[str], None]) -> Callable[..., Any]:
    def postprocess(dispatcher: Any, tokens: Tensor, probabilities: Tensor) -> Any:
        if not isinstance(tokens, FakeTensor):
            return original(dispatcher, tokens, probabilities)
        note(_EQUAL)
        with unset_fake_temporarily():
            ranks = dispatcher.tp_size * dispatcher.ep_size
            of_mine = ranks * _counts(dispatcher, tokens.shape[0] // ranks)[dispatcher.local_expert_indices]
        with _Selecting(int(of_mine.sum()), of_mine):
            return original(dispatcher, tokens, probabilities)

    return postprocess


def _counts(dispatcher: Any, tokens: int) -> Tensor:
    """How many of a rank's choices each expert takes."""
    from megatron.core.transformer.moe.moe_utils import get_capacity

    config = dispatcher.config
    choices, experts = tokens * config.moe_router_topk, config.num_moe_experts
    counts = torch.tensor(loads(choices, experts))
    if config.moe_expert_capacity_factor is not None:
        counts = counts.clamp(max=int(get_capacity(choices, experts, config.moe_expert_capacity_factor)))
    return counts


def _take(dispatcher: Any, tokens: int) -> Tensor:
    """Tells a dispatcher the loads in place of those that it counted; returns those of this rank's experts."""
    counts, experts = _counts(dispatcher, tokens), dispatcher.num_experts
    across, along, here = dispatcher.tp_size, dispatcher.ep_size, dispatcher.num_local_experts
    of_mine = counts[dispatcher.local_expert_indices]
    dispatcher.num_out_tokens = int(counts.sum())
    if along > 1 or across > 1:
        dispatcher.input_splits = counts.reshape(along, here).sum(1).numpy()
        dispatcher.output_splits = of_mine.sum().expand(along).numpy()
        dispatcher.output_splits_tp = (along * of_mine.sum()).expand(across).numpy()
    dispatcher.num_global_tokens_per_local_expert = of_mine.expand(across * along, here)
    chunks = torch.arange(experts * across)
    dispatcher.sort_input_by_local_experts = chunks.reshape(-1, here).T.ravel()
    dispatcher.restore_output_by_local_experts = chunks.reshape(here, -1).T.ravel()
    made: Tensor = across * along * of_mine
    return made


class _Selecting(TorchFunctionMode):
    """`masked_select` of a mask of which is known for how many elements it is true: their places, and a gather.

    Args:
        size: how many.
        loads: what the host reads, if it reads how many they are by experts.
    """

    def __init__(self, size: int, loads: Tensor | None = None) -> None:
        super().__init__()
        self._size, self._loads = size, loads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.cpu and self._loads is not None:
            return self._loads
        if func is not Tensor.masked_select:
            return func(*args, **(kwargs or {}))
        source, mask = args
        places = torch.ops.aten.nonzero_static(mask.reshape(-1), size=self._size)
        return source.reshape(-1).index_select(0, places.view(-1))


def _of_known_size(original: Callable[..., Any]) -> Callable[..., Any]:
    """Permutes tokens; the kernel of Transformer Engine's that does it at once is not there."""

    @wraps(original)
    def run(tokens: Tensor, *args: Any, **named: Any) -> Any:
        size = real(named["num_out_tokens"]) if "num_out_tokens" in named else tokens.shape[0]
        if isinstance(size, Tensor) and not isinstance(size, FakeTensor):
            size = named["num_out_tokens"] = int(size)
        if not isinstance(tokens, FakeTensor) or not isinstance(size, int):
            return original(tokens, *args, **named)
        with _Selecting(size):
            return original(tokens, *args, **named | {"fused": False})

    return run


def _unfused(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def run(*args: Any, **named: Any) -> Any:
        return original(*args, **named | {"fused": False})

    return run
