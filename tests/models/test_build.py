"""Building: fake and real, forward and backward, and the traps that `build` takes care of."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from echograph.errors import InputError, UsageError
from echograph.models import build, get_model, model_entries

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch", reason="needs the [torch] extra")
pytest.importorskip("transformers", reason="needs the [torch] extra")

# A few layers of the smallest of each architecture run always; all, which differ in size alone, in the slow set.
REPRESENTATIVES = {
    entry.architecture: entry.name for entry in sorted(model_entries(), key=lambda entry: -(entry.parameters or 0))
}
DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_decoder_layers")
ENTRIES = [
    *(pytest.param(name, 2, id=f"{name}-2-layers") for name in REPRESENTATIVES.values()),
    *(pytest.param(entry.name, None, id=entry.name, marks=pytest.mark.slow) for entry in model_entries()),
]
ARCHITECTURES = [get_model(name) for name in REPRESENTATIVES.values()]
FUSED = "aten._scaled_dot_product_flash_attention_for_cpu.default"


class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts operators, and fused attentions that are not plainly causal or were given a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.masks = 0
        self.causal = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators[str(func)] += 1
        if str(func) == FUSED:
            self.masks += (kwargs or {}).get("attn_mask") is not None
            self.causal += len(args) > 4 and args[4] is True
        return func(*args, **(kwargs or {}))


def record(entry, **options) -> tuple[torch.nn.Module, Recorder]:
    module, inputs, loss = build(entry, **options)
    with Recorder() as recorder:
        value = loss(module(**inputs))
        value.backward()
    assert value.shape == ()
    missing = [name for name, parameter in module.named_parameters() if parameter.grad is None]
    assert not missing
    return module, recorder


@pytest.mark.parametrize(("name", "layers"), ENTRIES)
def test_every_model_steps_on_fake_tensors(name: str, layers: int | None, fake) -> None:
    """How many parameters a model has with all of its layers, `test_parameters` asks."""
    entry = get_model(name)
    if layers is not None:
        layers += entry.config.get("first_k_dense_replace", 0)
        entry = entry.with_config(**{key: layers for key in DEPTHS if key in entry.config})
    with fake():
        module, recorder = record(entry, batch_size=1)
    assert module.training
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
    assert recorder.masks == 0
    if layers is None:
        assert sum(parameter.numel() for parameter in module.parameters()) == entry.parameters


@pytest.mark.parametrize("entry", ARCHITECTURES, ids=lambda entry: entry.architecture)
def test_every_architecture_steps_for_real(entry, tiny) -> None:
    small = tiny(entry)
    module, inputs, loss = build(small, batch_size=2, seq_len=32)
    value = loss(module(**inputs))
    value.backward()
    guess = value.item()
    gradients = [parameter.grad for parameter in module.parameters()]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
    classes = small.config.get("vocab_size") or small.config["num_labels"]
    guess -= math.log(2) if "next_sentence_label" in inputs else 0.0
    # Untrained, a model guesses: cross entropy is near that of as many equal chances.
    assert guess == pytest.approx(math.log(classes), rel=0.35)


@pytest.mark.parametrize("entry", ARCHITECTURES, ids=lambda entry: entry.architecture)
def test_fake_and_real_run_the_same_products(entry, tiny, fake, bfloat16) -> None:
    with bfloat16():
        _, real = record(tiny(entry), batch_size=2, seq_len=32)
    with fake():
        _, fakes = record(tiny(entry), batch_size=2, seq_len=32)
    # Looking whether a batch is packed or padded reads values, which only real tensors have.
    names = {name for name in real.operators | fakes.operators if "mm" in name or "attention" in name}
    if any(name.startswith("mamba2.") for name in fakes.operators):
        names -= {"aten.bmm.default"}  # a scan is one operation, whose inside runs on real tensors alone
    assert {name: real.operators[name] for name in names} == {name: fakes.operators[name] for name in names}


def test_gpt3_builds_with_all_its_layers(fake) -> None:
    with fake():
        module, inputs, _ = build(get_model("gpt3-175b"))
    assert len(module.transformer.h) == 96
    assert inputs["input_ids"].shape == (1, 2048)


@pytest.mark.parametrize("name", ["llama-3-8b", "mistral-7b", "phi-3-mini", "qwen2.5-0.5b"])
def test_causal_attention_is_fused_and_maskless(name: str, fake) -> None:
    entry = get_model(name).with_config(num_hidden_layers=2)
    with fake():
        _, recorder = record(entry)
    assert (recorder.operators[FUSED], recorder.causal, recorder.masks) == (2, 2, 0)


def test_a_sliding_window_shorter_than_the_sequence_keeps_its_mask(fake) -> None:
    entry = get_model("mistral-7b").with_config(num_hidden_layers=2)
    with fake():
        _, recorder = record(entry, seq_len=8192)
    assert recorder.masks == 2


def test_eager_attention_is_matrix_products(fake) -> None:
    entry = get_model("llama-3-8b").with_config(num_hidden_layers=2)
    with fake():
        _, recorder = record(entry, attention="eager")
    assert recorder.operators[FUSED] == 0
    assert recorder.operators["aten._softmax.default"] == 2


def test_fused_softmax_touches_scores_in_softmax_and_dropout_alone(fake) -> None:
    entry = get_model("megatron-gpt-1.7b").with_config(n_embd=64, n_layer=2, n_head=4, n_positions=32)
    with fake():
        _, eager = record(entry, seq_len=32, attention="eager")
        _, fused = record(entry, seq_len=32, attention="fused-softmax")
    assert fused.operators["aten._softmax.default"] == eager.operators["aten._softmax.default"] == 2
    assert fused.operators["aten.bmm.default"] == eager.operators["aten.bmm.default"] == 2 * 6
    # Of each layer, the sum with the mask; the scale stays, on the queries.
    assert eager.operators["aten.add.Tensor"] - fused.operators["aten.add.Tensor"] >= 2
    assert fused.operators["aten.mul.Tensor"] == eager.operators["aten.mul.Tensor"]


def test_sinks_and_windows_are_one_fused_kernel() -> None:
    from echograph.frontend.pytorch.spec import StepSpec
    from echograph.workflow.compile import compile_entry

    entry = get_model("gpt-oss-20b").with_config(num_hidden_layers=2)
    names = [op.name for op in compile_entry(entry, StepSpec(), seq_len=256, attention="fused").ops]
    assert "aten._scaled_dot_product_flash_attention_backward" in names
    assert "aten.bmm" not in names


@pytest.mark.parametrize("groups", [1, 2])
def test_fused_softmax_is_attention(groups: int) -> None:
    from echograph.models.transformers_model import fused_softmax

    query = torch.randn(2, 4, 8, 16)
    key, value = torch.randn(2, 2, 4 // groups, 8, 16)
    output, _ = fused_softmax(torch.nn.Identity().eval(), query, key, value, None)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    torch.testing.assert_close(output, expected.transpose(1, 2))


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-20b"])
def test_experts_are_grouped_products(name: str, fake) -> None:
    entry = get_model(name).with_config(num_hidden_layers=2)
    with fake():
        _, recorder = record(entry)
    assert recorder.operators["aten._grouped_mm.default"] == 2 * 6  # up and down, forward and twice backward


def test_tied_embeddings_stay_one_parameter_on_fake_and_meta_tensors(fake) -> None:
    entry = get_model("gpt2").with_config(n_layer=1)
    with fake():
        module = build(entry).module
    assert module.lm_head.weight is module.transformer.wte.weight
    with torch.device("meta"):
        module = build(entry).module
    assert module.lm_head.weight is module.transformer.wte.weight


def test_the_search_for_packed_sequences_is_off_only_during_forward(fake, tiny) -> None:
    from transformers import masking_utils

    search = masking_utils.find_packed_sequence_indices
    module, inputs, _ = build(tiny(get_model("llama-3-8b")), batch_size=1, seq_len=8)
    module(**inputs)
    assert masking_utils.find_packed_sequence_indices is search
    with pytest.raises(TypeError):
        module(nonsense_that_no_layer_takes=object(), **{**inputs, "labels": "no tensor"})
    assert masking_utils.find_packed_sequence_indices is search


def test_inputs_are_the_same_every_time_and_inside_the_vocabulary(tiny) -> None:
    entry = tiny(get_model("bert-base-uncased"))
    first, second = (build(entry, batch_size=3, seq_len=40).inputs for _ in range(2))
    assert first.keys() == {"input_ids", "labels", "next_sentence_label"}
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert first["input_ids"].shape == (3, 40) and int(first["input_ids"].max()) < entry.config["vocab_size"]


@pytest.mark.parametrize(("seq_len", "targets"), [(512, 114), (1024, 229)])
def test_decoder_targets_follow_from_span_corruption(seq_len: int, targets: int, fake) -> None:
    with fake():
        inputs = build(get_model("t5-small"), batch_size=2, seq_len=seq_len).inputs
    assert (inputs["input_ids"].shape, inputs["labels"].shape) == ((2, seq_len), (2, targets))


def test_images_take_the_side_asked_for(fake) -> None:
    with fake():
        module, inputs, _ = build(get_model("vit-b-16"), batch_size=2, seq_len=384)
    assert inputs["pixel_values"].shape == (2, 3, 384, 384)
    assert module.vit.embeddings.position_embeddings.shape[1] == (384 // 16) ** 2 + 1


@pytest.mark.parametrize(
    ("name", "limit"), [("bert-base-uncased", 512), ("roberta-base", 512), ("gpt2", 1024), ("opt-125m", 2048)]
)
def test_more_tokens_than_learned_positions_are_refused(name: str, limit: int, fake) -> None:
    with fake():
        build(get_model(name), batch_size=1, seq_len=limit)
        with pytest.raises(UsageError, match=f"{name}.* {limit + 1} tokens exceed its {limit} learned positions"):
            build(get_model(name), batch_size=1, seq_len=limit + 1)


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        ("gpt2", {"batch_size": 0}, "batch size 0"),
        ("gpt2", {"seq_len": -1}, "length -1"),
        ("gpt2", {"attention": "flash"}, "'flash': choose sdpa"),
        ("bloom-7b1", {"attention": "sdpa"}, "no sdpa attention: use 'eager'"),
        ("mpt-7b", {"attention": "fused-softmax"}, "no fused-softmax attention: use 'eager'"),
    ],
)
def test_what_a_model_cannot_do_is_a_usage_error(name: str, options: dict, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint), torch.device("meta"):
        build(get_model(name), **options)


def test_a_configuration_that_the_library_rejects_is_one_line() -> None:
    with pytest.raises(InputError, match="gpt2: GPT2LMHeadModel rejects") as caught, torch.device("meta"):
        build(get_model("gpt2").with_config(n_layer="many"))
    assert "\n" not in str(caught.value)
