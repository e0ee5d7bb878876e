"""What Transformers 5 took away, for scripts of release 4: names, arguments, methods.

Only what is known to be as it was. Where a script asks for it, a note says so: with the same packages, real ranks
would stop there.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from operator import attrgetter
from typing import Any

import torch

from echograph.frontend.scripts.adapter import once_imported, patched, replaced
from echograph.frontend.scripts.values import NoteTaker, caller

_MOVED = {
    "pytorch_utils": ("Conv1D", "apply_chunking_to_forward", "prune_linear_layer"),
    "trainer_pt_utils": (
        "DistributedLengthGroupedSampler", "nested_concat", "nested_numpify", "nested_truncate",
    ),
}  # fmt: skip
_NOT_THERE = dict.fromkeys(
    ("is_flax_available", "is_ipex_available", "is_tf_available", "is_torch_tpu_available"),
    f"{__name__}:not_there",
)
NAMES: dict[str, dict[str, str]] = {
    "transformers": {
        **_NOT_THERE,
        "AdamW": f"{__name__}:AdamW",
        **{name: f"transformers:{now}" for name, now in (
            ("AutoModelForVision2Seq", "AutoModelForImageTextToText"), ("MT5Tokenizer", "T5Tokenizer"),
            ("BloomTokenizerFast", "PreTrainedTokenizerFast"), ("CLIPFeatureExtractor", "CLIPImageProcessor"),
            ("LayoutLMv2FeatureExtractor", "LayoutLMv2ImageProcessor"), ("MT5TokenizerFast", "T5TokenizerFast"),
            ("SpecialTokensMixin", "PreTrainedTokenizerBase"), ("ViTFeatureExtractor", "ViTImageProcessor"),
        )},
        "TRANSFORMERS_CACHE": "huggingface_hub.constants:HF_HUB_CACHE",
    },
    "transformers.activations": {"swish": "torch.nn.functional:silu"},
    "transformers.file_utils": {
        **_NOT_THERE,
        "add_start_docstrings_to_callable": "transformers.file_utils:add_start_docstrings_to_model_forward",
        "cached_property": "functools:cached_property", "torch_required": f"{__name__}:as_it_is",
        "TRANSFORMERS_CACHE": "huggingface_hub.constants:HF_HUB_CACHE",
    },
    "transformers.modeling_utils": {
        **{name: f"transformers.pytorch_utils:{name}" for name in _MOVED["pytorch_utils"]},
        "get_parameter_device": f"{__name__}:device_of", "get_parameter_dtype": f"{__name__}:dtype_of",
        "no_init_weights": "transformers.initialization:no_init_weights",
    },
    "transformers.models.auto.modeling_auto": {
        "MODEL_FOR_VISION_2_SEQ_MAPPING_NAMES":
            "transformers.models.auto.modeling_auto:MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    },
    "transformers.models.bert.modeling_bert": {"BertLayerNorm": "torch.nn:LayerNorm"},
    "transformers.optimization": {"AdamW": f"{__name__}:AdamW"},
    "transformers.tokenization_utils": {"BatchEncoding": "transformers:BatchEncoding"},
    "transformers.tokenization_utils_base": {"SpecialTokensMixin": "transformers:PreTrainedTokenizerBase"},
    "transformers.trainer": {
        **_NOT_THERE,
        "ALL_LAYERNORM_LAYERS": "transformers.pytorch_utils:ALL_LAYERNORM_LAYERS",
        "is_apex_available": "transformers.utils:is_apex_available",
        **{name: f"transformers.trainer_pt_utils:{name}" for name in _MOVED["trainer_pt_utils"]},
    },
    "transformers.trainer_utils": {"EvaluationStrategy": "transformers.trainer_utils:IntervalStrategy"},
    "transformers.utils": {
        **_NOT_THERE,
        "cached_property": "functools:cached_property",
        "is_flash_attn_available": "transformers.utils:is_flash_attn_2_available",
        "is_offline_mode": "huggingface_hub:is_offline_mode",
        "is_safetensors_available": f"{__name__}:there", "is_torch_compile_available": f"{__name__}:there",
        "is_torchdynamo_available": f"{__name__}:there",
        "send_example_telemetry": f"{__name__}:not_there",
        "TRANSFORMERS_CACHE": "huggingface_hub.constants:HF_HUB_CACHE",
    },
    "transformers.utils.import_utils": {**_NOT_THERE, "is_torch_fx_available": f"{__name__}:there"},
}  # fmt: skip
"""Module: its name of what is gone -> where the same is, as module:name."""

MODULES: dict[str, dict[str, str]] = {
    "transformers.deepspeed": {"": "transformers.integrations.deepspeed"},
    "transformers.generation_utils": {"": "transformers.generation.utils"},
}  # fmt: skip
"""Modules that are gone as a whole."""

_FLAT = re.compile(r"transformers\.((?:configuration|modeling|tokenization)_(\w+))")
_FAST = re.compile(r"transformers\.models\.(\w+)\.tokenization_\1_fast")


def moved(name: str) -> dict[str, str]:
    """Where the names of a module are that a type of model had, as in `MODULES`; empty where it had none.

    Args:
        name: `transformers.modeling_bert`, of release 3, or `transformers.models.bert.tokenization_bert_fast`.
    """
    flat, fast = _FLAT.fullmatch(name), _FAST.fullmatch(name)
    if flat and find_spec(folder := f"transformers.models.{flat[2]}") and find_spec(f"{folder}.{flat[1]}"):
        return {"": f"{folder}.{flat[1]}"}
    return {"": "transformers"} if fast else {}


RENAMED = {
    "transformers.trainer:Trainer": {"tokenizer": "processing_class"},
    "transformers.training_args:TrainingArguments": {
        "evaluation_strategy": "eval_strategy", "no_cuda": "use_cpu", "warmup_ratio": "warmup_steps",
        "per_gpu_eval_batch_size": "per_device_eval_batch_size",
        "per_gpu_train_batch_size": "per_device_train_batch_size",
    },
    "trl.trainer.sft_config:SFTConfig": {"max_seq_length": "max_length"},
    "trl.trainer.dpo_config:DPOConfig": {}, "trl.trainer.grpo_config:GRPOConfig": {},
    **{f"trl.trainer.{kind}_trainer:{kind.upper()}Trainer": {"tokenizer": "processing_class"} for kind in (
        "sft", "dpo", "grpo", "kto", "rloo",
    )},
    "trl.trainer.reward_trainer:RewardTrainer": {"tokenizer": "processing_class"},
}  # fmt: skip
"""Arguments that have another name now: place of a class -> its old name -> the one it has."""

LEFT_OUT = {
    "transformers.training_args:TrainingArguments": (
        "fp16_backend", "fp16_opt_level", "half_precision_backend", "include_inputs_for_metrics",
        "include_tokens_per_second", "jit_mode_eval", "logging_dir", "overwrite_output_dir", "past_index",
        "push_to_hub_model_id", "push_to_hub_organization", "push_to_hub_token", "ray_scope", "save_safetensors",
        "use_legacy_prediction_loop",
    ),
    "trl.trainer.dpo_config:DPOConfig": (
        "base_model_attribute_name", "dataset_batch_size", "generate_during_eval", "is_encoder_decoder",
        "label_pad_token_id", "model_adapter_name", "padding_value", "ref_adapter_name", "use_logits_to_keep",
    ),
    "trl.trainer.sft_config:SFTConfig": (
        "chars_per_token", "dataset_batch_size", "num_of_sequences",
    ),
}  # fmt: skip
"""Arguments that said what is printed, written or chosen by itself, and are left out."""

_CUT_BY_LENGTH = ("max_prompt_length", "max_completion_length", "max_target_length")
"""Of TRL's preference trainers: parts of a sample that were cut, which is cut as a whole by now (`max_length`)."""
_TRAINERS = {"sft": "SFT", "dpo": "DPO"}

SAID_OTHERWISE: dict[str, Callable[[Any], dict[str, Any]]] = {
    "adafactor": lambda on: {"optim": "adafactor"} if _is_on(on) else {},
    "fsdp_min_num_params": lambda least: {"fsdp_config": {"min_num_params": int(least)}} if int(least) else {},
    "fsdp_transformer_layer_cls_to_wrap": lambda name: (
        {"fsdp_config": {"transformer_layer_cls_to_wrap": [name]}} if name else {}
    ),
    "group_by_length": lambda on: {"train_sampling_strategy": "group_by_length"} if _is_on(on) else {},
}
"""Arguments of the trainer that are said by others now: name -> value -> those."""


def said_otherwise(given: dict[str, Any], asked: Mapping[str, Any], note: NoteTaker) -> None:
    """Says arguments of `TrainingArguments` that are no more by those that are; changes `given`.

    Args:
        given: arguments by name.
        asked: those that it takes.
        note: is told of each.
    """
    for old in [old for old in SAID_OTHERWISE if old in given and old not in asked]:
        for name, value in SAID_OTHERWISE[old](given.pop(old)).items():
            note(f"transformers' TrainingArguments has no {old} any more: {name} says it")
            table = given.get(name)
            given[name] = {**table, **value} if isinstance(table, dict) else value


def _is_on(value: Any) -> bool:
    return value is None or str(value).lower() in ("1", "t", "true", "y", "yes")


def there(*_: Any, **__: Any) -> bool:
    """Whether something is there that every release has by now."""
    return True


def not_there(*_: Any, **__: Any) -> bool:
    """Whether there is another framework or machine that Transformers no longer runs on."""
    return False


def as_it_is(function: Any) -> Any:
    """A decorator that asked for a framework."""
    return function


def device_of(module: torch.nn.Module) -> torch.device:
    """Where a module's parameters are."""
    return next(module.parameters()).device


def dtype_of(module: torch.nn.Module) -> torch.dtype:
    """The type of a module's parameters."""
    return next(module.parameters()).dtype


class AdamW(torch.optim.AdamW):
    """Transformers' own, before its release 5: an update of each parameter, with defaults other than PyTorch's."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6,
        weight_decay: float = 0.0, correct_bias: bool = True, no_deprecation_warning: bool = False,
    ) -> None:  # fmt: skip
        del correct_bias, no_deprecation_warning  # numbers by which it multiplied, and what it printed
        super().__init__(params, lr, betas, eps, weight_decay, foreach=False, fused=False)


def contexts(note: NoteTaker) -> Iterator[AbstractContextManager[None]]:
    """In the contexts, classes have the methods that they had, once they are imported."""
    for module, owner, members in (
        ("transformers.tokenization_utils_base", "PreTrainedTokenizerBase", _OF_TOKENIZERS),
        ("transformers.modeling_utils", "PreTrainedModel", _OF_MODELS),
        ("transformers.configuration_utils", "PreTrainedConfig", _OF_CONFIGURATIONS),
        ("transformers.trainer", "Trainer", _OF_TRAINERS),
        ("transformers.training_args", "TrainingArguments", _OF_ARGUMENTS),
    ):
        yield once_imported(module, partial(_having_members, module, owner, members, note))
    yield once_imported("transformers.trainer", partial(_taking_what_they_take, note))
    for name, kind in _TRAINERS.items():
        yield once_imported(f"trl.trainer.{name}_trainer", partial(_told_by_the_trainer, name, kind, note))
    for name, kind in (("dpo", "DPO"), ("grpo", "GRPO")):
        yield once_imported(f"trl.trainer.{name}_config", partial(_cut_as_a_whole, name, kind, note))
    yield once_imported("transformers.modeling_utils", partial(_made_as_before, note))
    for module in ("transformers.file_utils", "transformers.utils"):
        yield once_imported(module, partial(_documented_as_before, module))
    yield once_imported("huggingface_hub.utils._headers", _without_a_token)
    yield once_imported("transformers.tokenization_utils_base", partial(_padding_as_before, note))
    yield once_imported("transformers.tokenization_utils_base", partial(_chats_as_before, note))


@contextmanager
def _having_members(module: str, owner: str, members: Mapping[str, Any], note: NoteTaker) -> Iterator[None]:
    """In the context, a class has members that it has no more."""
    kind = getattr(sys.modules[module], owner)
    added = {name: member for name, member in members.items() if not hasattr(kind, name)}

    def told(name: str, member: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if (line := caller()) is not None:
                note(f"{line} asks for {owner}.{name}, which is no more: it is as it was")
            return member(*args, **kwargs)

        return call

    for name, member in added.items():
        getter = member.fget if isinstance(member, property) else None
        value = property(told(name, getter), member.fset) if getter else member
        setattr(kind, name, told(name, member) if callable(member) else value)
    try:
        yield
    finally:
        for name in added:
            delattr(kind, name)


def _encode(tokenizer: Any, *texts: Any, **kwargs: Any) -> Any:
    return tokenizer(*texts, **kwargs)


def _encode_batch(tokenizer: Any, batch_text_or_text_pairs: Any, *args: Any, **kwargs: Any) -> Any:
    return tokenizer(batch_text_or_text_pairs, *args, **kwargs)


_OF_TOKENIZERS: dict[str, Any] = {
    "additional_special_tokens": property(lambda tokenizer: list(tokenizer.extra_special_tokens)),
    "additional_special_tokens_ids": property(
        lambda tokenizer: tokenizer.convert_tokens_to_ids(list(tokenizer.extra_special_tokens))
    ),
    "as_target_tokenizer": lambda _: nullcontext(),
    "batch_encode_plus": _encode_batch,
    "encode_plus": _encode,
    "legacy": False,
    "max_len": property(lambda tokenizer: tokenizer.model_max_length),
}


def _mask_of_heads(_: Any, head_mask: Any, num_hidden_layers: int, *__: Any) -> Any:
    """A mask for each layer, [layers, 1, heads, 1, 1] of [heads] or [layers, heads]; of none, none."""
    if head_mask is None:
        return [None] * num_hidden_layers
    of_layers = head_mask if head_mask.dim() > 1 else head_mask.expand(num_hidden_layers, -1)
    return of_layers[:, None, :, None, None]


def _added(model: Any, mask: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """What is added to scores where a mask has no one."""
    dtype = dtype or dtype_of(model)
    return (1.0 - mask.to(dtype=dtype)) * torch.finfo(dtype).min


def _of_what_is_encoded(model: Any, encoder_attention_mask: torch.Tensor) -> torch.Tensor:
    """[batch, 1, 1 or queries, keys] of [batch, keys] or [batch, queries, keys]."""
    rows = encoder_attention_mask
    return _added(model, rows[:, None] if rows.dim() == 3 else rows[:, None, None], None)


def _extended(
    model: Any, attention_mask: torch.Tensor, input_shape: Any = None, device: Any = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """[batch, 1, 1 or queries, keys] of [batch, keys] or [batch, queries, keys]; of a decoder, causal."""
    if isinstance(device, torch.dtype):  # which came third, by and by
        dtype = device
    mask = attention_mask[:, None] if attention_mask.dim() == 3 else attention_mask[:, None, None]
    if attention_mask.dim() == 2 and getattr(model.config, "is_decoder", False):
        keys = torch.arange(attention_mask.shape[1], device=attention_mask.device)
        mask = mask * (keys <= keys[:, None])[None, None].to(mask.dtype)
    return _added(model, mask, dtype)


_OF_MODELS: dict[str, Any] = {
    "get_extended_attention_mask": _extended,
    "get_head_mask": _mask_of_heads,
    "invert_attention_mask": _of_what_is_encoded,
}
_OF_CONFIGURATIONS: dict[str, Any] = {
    "add_cross_attention": False, "cross_attention_hidden_size": None, "is_decoder": False, "torchscript": False,
}  # fmt: skip
_OF_TRAINERS: dict[str, Any] = {
    "tokenizer": property(
        lambda trainer: trainer.processing_class,
        lambda trainer, value: setattr(trainer, "processing_class", value),
    )
}

_OF_ARGUMENTS: dict[str, Any] = {
    **dict.fromkeys(LEFT_OUT["transformers.training_args:TrainingArguments"]),
    "overwrite_output_dir": True,
    **{
        old: property(attrgetter(now))
        for old, now in RENAMED["transformers.training_args:TrainingArguments"].items()
    },
    "group_by_length": property(lambda given: given.train_sampling_strategy == "group_by_length"),
}


@contextmanager
def _documented_as_before(module: str) -> Iterator[None]:
    """In the context, what wrote a docstring of examples takes any arguments, and writes none."""

    def documenting(_: Any) -> Callable[..., Any]:
        return lambda *_, **__: as_it_is

    with patched(sys.modules[module], "add_code_sample_docstrings", documenting):
        yield


@contextmanager
def _without_a_token() -> Iterator[None]:
    """In the context, who asks the hub for what is the user's own needs no token: the hub is not asked."""
    headers = sys.modules["huggingface_hub.utils._headers"]

    def sending(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda token: None if token is True else original(token)

    with patched(headers, "get_token_to_send", sending):
        yield


_LOADED_BY: dict[str, Callable[[Any, Any], dict[str, Any]]] = {
    "load_in_4bit": lambda on, library: {"quantization_config": library.BitsAndBytesConfig(load_in_4bit=on)},
    "load_in_8bit": lambda on, library: {"quantization_config": library.BitsAndBytesConfig(load_in_8bit=on)},
    "use_auth_token": lambda told, _: (
        {"token": told} if isinstance(told, str) else {}
    ),  # one's own, of no use here
    "use_flash_attention_2": lambda *_: {"attn_implementation": "flash_attention_2"},
}
"""Arguments of `from_pretrained` that are said otherwise now: name -> value and the library -> those."""


@contextmanager
def _made_as_before(note: NoteTaker) -> Iterator[None]:
    """In the context, a model that ends its making by `init_weights` is made, and one is loaded in 8 or 4 bits."""
    model = sys.modules["transformers.modeling_utils"].PreTrainedModel

    def making(original: Callable[..., None]) -> Callable[..., None]:
        def init(self: Any) -> None:
            if hasattr(self, "all_tied_weights_keys"):
                original(self)
            else:
                note(f"{type(self).__name__} ends its making by init_weights: post_init is the same by now")
                self.post_init()

        return init

    def loading(original: Any) -> Any:
        def load(kind: type, *args: Any, **kwargs: Any) -> Any:
            for old in [old for old in _LOADED_BY if old in kwargs]:
                value = kwargs.pop(old)
                now = _LOADED_BY[old](value, sys.modules["transformers"]) if value else {}
                note(f"from_pretrained takes no {old} any more: {', '.join(now) or 'nothing'} says it")
                kwargs.update(now)
            return original.__func__(kind, *args, **kwargs)

        return classmethod(load)

    with patched(model, "init_weights", making), patched(model, "from_pretrained", loading):
        yield


@contextmanager
def _padding_as_before(note: NoteTaker) -> Iterator[None]:
    """In the context, tokenizers read `pad_to_max_length`, which by now they pass over without a word."""

    def calling(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(tokenizer: Any, *args: Any, **kwargs: Any) -> Any:
            if "pad_to_max_length" in kwargs:
                note("tokenizers read no pad_to_max_length any more: padding='max_length' is the same")
                if kwargs.pop("pad_to_max_length"):
                    kwargs["padding"] = "max_length"
            return original(tokenizer, *args, **kwargs)

        return call

    kind = sys.modules["transformers.tokenization_utils_base"].PreTrainedTokenizerBase
    with patched(kind, "__call__", calling), patched(kind, "encode", calling):
        yield


class _Tokens:
    """What a chat becomes: by names, as release 5 has it, and in its order the tokens that release 4 gave."""

    data: dict[str, Any]
    note: NoteTaker

    def _tokens(self) -> Any:
        if (line := caller()) is not None:
            self.note(f"{line} takes what apply_chat_template gives for its tokens, which were all that it gave")
        return self.data["input_ids"]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._tokens())

    def __len__(self) -> int:
        return len(self._tokens())

    def pop(self, *item: Any) -> Any:
        """A token, or what has a name."""
        return self.data.pop(*item) if item and isinstance(item[0], str) else self._tokens().pop(*item)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "data" not in vars(self):
            raise AttributeError(name)
        return self.data[name] if name in self.data else getattr(self._tokens(), name)

    def keys(self) -> Any:
        """Its names, as it has them."""
        return self.data.keys()

    def values(self) -> Any:
        """What has names."""
        return self.data.values()

    def items(self) -> Any:
        """Both."""
        return self.data.items()

    def __add__(self, other: Any) -> Any:
        return self._tokens() + other

    def __radd__(self, other: Any) -> Any:
        return other + self._tokens()

    def __getitem__(self, item: Any) -> Any:
        return self.data[item] if isinstance(item, str) else self._tokens()[item]


@contextmanager
def _chats_as_before(note: NoteTaker) -> Iterator[None]:
    """In the context, what `apply_chat_template` gives where nobody said how is tokens as well as their names."""

    def applying(original: Callable[..., Any]) -> Callable[..., Any]:
        def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
            made = original(self, *args, **kwargs)
            if "return_dict" in kwargs or not isinstance(getattr(made, "data", None), dict):
                return made
            both = type(type(made).__name__, (_Tokens, type(made)), {"note": staticmethod(note)})
            tokens: Any = object.__new__(both)
            vars(tokens).update(vars(made))
            return tokens

        return apply

    kind = sys.modules["transformers.tokenization_utils_base"].PreTrainedTokenizerBase
    with patched(kind, "apply_chat_template", applying):
        yield


@contextmanager
def _taking_what_they_take(note: NoteTaker) -> Iterator[None]:
    """In the context, what a script's trainer overrides is given no more arguments than it takes."""
    trainer = sys.modules["transformers.trainer"].Trainer

    def making(original: Callable[..., None]) -> Callable[..., None]:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            for name, base in vars(trainer).items():
                own = getattr(type(self), name, None)
                if inspect.isfunction(base) and inspect.isfunction(own) and own is not base and name[:2] != "__":
                    given = _fewer(own, base, note)
                    if given is not None:
                        setattr(self, name, given.__get__(self))
            original(self, *args, **kwargs)

        return init

    with patched(trainer, "__init__", making):
        yield


@contextmanager
def _cut_as_a_whole(name: str, kind: str, note: NoteTaker) -> Iterator[None]:
    """In the context, settings of TRL take lengths of parts of a sample, of which that of the whole is left."""
    settings = getattr(sys.modules[f"trl.trainer.{name}_config"], f"{kind}Config")

    def making(original: Callable[..., None]) -> Callable[..., None]:
        asked = inspect.signature(original).parameters

        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            for old in [old for old in _CUT_BY_LENGTH if old in kwargs and old not in asked]:
                note(f"TRL's {kind}Config has no {old} any more: samples are as long as they are without")
                del kwargs[old]
            original(self, *args, **kwargs)

        return init

    with patched(settings, "__init__", making):
        yield


@contextmanager
def _told_by_the_trainer(name: str, kind: str, note: NoteTaker) -> Iterator[None]:
    """In the context, a trainer of TRL takes what is its settings' by now, as its release 0.7 did."""
    package = sys.modules[f"trl.trainer.{name}_trainer"]
    trainer, settings = getattr(package, f"{kind}Trainer"), getattr(package, f"{kind}Config")
    place = f"trl.trainer.{name}_config:{kind}Config"
    # Those that it takes, those that have another name, those that are left out.
    known = {*inspect.signature(settings).parameters, *RENAMED.get(place, ()), *LEFT_OUT.get(place, ())}
    known.update(_CUT_BY_LENGTH)

    def making(original: Callable[..., None]) -> Callable[..., None]:
        asked = inspect.signature(original).parameters

        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            told = {old: kwargs.pop(old) for old in list(kwargs) if old not in asked and old in known}
            if told:
                note(f"TRL's {kind}Trainer takes no {', '.join(told)} any more: {kind}Config says it")
                given = kwargs.get("args")
                said = {} if given is None else _said_of(given)
                said.setdefault("output_dir", "trainer_output")
                kwargs["args"] = settings(**said | told)
            original(self, *args, **kwargs)

        return init

    with patched(trainer, "__init__", making):
        yield


def _said_of(settings: Any) -> dict[str, Any]:
    """What settings of a trainer say, by name, so that others can be made of it."""
    return {one.name: getattr(settings, one.name) for one in fields(settings) if one.init}


@contextmanager
def derived(names: Callable[[Callable[..., None]], Callable[..., None]]) -> Iterator[None]:
    """In the context, whatever derives from `TrainingArguments` takes what that does, as those of TRL.

    Args:
        names: makes of a constructor one that takes arguments by the names that they had.
    """
    base = sys.modules["transformers.training_args"].TrainingArguments
    with ExitStack() as stack:
        seen: set[type] = {base}

        def make(kind: type, *_: Any, **__: Any) -> Any:
            if kind not in seen and "__init__" in vars(kind):  # which is asked for when this has returned
                stack.enter_context(patched(kind, "__init__", names))
            seen.add(kind)
            return object.__new__(kind)

        stack.enter_context(replaced(base, "__new__", make))
        yield


def _fewer(own: Callable[..., Any], base: Callable[..., Any], note: NoteTaker) -> Any:
    """A method that is given what it takes of the base's arguments; None where it takes all of them."""
    takes, asked = inspect.signature(own).parameters, inspect.signature(base).parameters
    kinds = [one.kind for one in takes.values()]
    varying = inspect.Parameter.VAR_KEYWORD in kinds or inspect.Parameter.VAR_POSITIONAL in kinds
    if varying or all(name in takes for name in asked):
        return None
    places = sum(
        kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds
    )

    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        more = [name for name in kwargs if name in asked and name not in takes]
        if more or len(args) > places:
            note(f"{own.__qualname__} takes fewer arguments than the trainer gives by now: they are left out")
        return own(*args[:places], **{name: value for name, value in kwargs.items() if name not in more})

    return call
