"""The invocations of a captured step are those that the step makes on real tensors."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the [torch] extra")
pytestmark = pytest.mark.torch

from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from echograph.frontend.pytorch.capture import capture, capture_mode  # noqa: E402
from echograph.frontend.pytorch.invocations import invocations_of  # noqa: E402
from echograph.frontend.pytorch.lower import lower_nodes, workload_of  # noqa: E402
from echograph.frontend.pytorch.rounding import settings_kept  # noqa: E402
from echograph.frontend.pytorch.spec import StepSpec  # noqa: E402
from echograph.frontend.pytorch.step import real_step  # noqa: E402
from echograph.ir.graph import StepGraph  # noqa: E402
from echograph.ir.passes.fold import Fold  # noqa: E402
from echograph.ir.profile import Invocation, signatures  # noqa: E402
from echograph.profiler.measure.ops import RealOperands  # noqa: E402

SPECS = {
    "adamw": StepSpec(dtype="fp32", kernels="cpu"),
    "sgd and clipping": StepSpec(dtype="fp32", kernels="cpu", optimizer="sgd", clip_grad_norm=1.0),
    "bf16 with master weights": StepSpec(dtype="bf16", kernels="cpu"),
}


class Net(nn.Module):
    """Embedding, two attention layers with dropout, a convolution, a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True) for _ in range(2)
        )
        self.conv = nn.Conv1d(12, 12, 3, padding=1)

    def forward(self, tokens: Any) -> Any:
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.conv(x) @ self.words.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def build() -> tuple[Any, Any, Any]:
    return Net(), (torch.arange(24).reshape(2, 12) % 50,), None


def captured(spec: StepSpec, cache_bytes: int = 2**30) -> tuple[StepGraph, list[Invocation]]:
    with capture_mode():
        parts = build()
    nodes = capture(*parts, spec)
    step, made = lower_nodes(nodes, workload_of(nodes, spec, "net"))
    return step, invocations_of(nodes, step, made, cache_bytes)


class Watch(TorchDispatchMode):  # type: ignore[misc]
    """Counts operators with the shapes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shapes = str([tuple(t.shape) for t in tensors((*args, *(kwargs or {}).values()))])
        self.seen[str(func._schema.name).replace("::", "."), shapes] += 1
        return func(*args, **(kwargs or {}))


def tensors(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in tensors(item)] if isinstance(value, tuple | list) else []


def operands(invocation: Invocation) -> str:
    def shapes(argument: Any) -> list[tuple[int, ...]]:
        if isinstance(argument, tuple):
            return [s for item in argument for s in shapes(item)]
        return [argument.shape] if hasattr(argument, "strides") else []

    return str([s for a in (*invocation.arguments, *(v for _, v in invocation.keywords)) for s in shapes(a)])


@pytest.mark.parametrize("name", SPECS)
def test_they_are_what_the_step_runs_on_real_tensors(name: str) -> None:
    _, invocations = captured(SPECS[name])
    run = real_step(*build(), SPECS[name], "cpu")
    run()
    with Watch() as watch:
        run()
    recorded: Counter[tuple[str, str]] = Counter()
    for invocation in invocations:
        launches = sum(p.runs for p in invocation.parts) if len(invocation.parts) == 1 else 1
        recorded[invocation.operator, operands(invocation)] += launches
    shared = ("aten._foreach_", "aten._fused_")
    for key, count in recorded.items():
        if not key[0].startswith(shared):
            assert watch.seen[key] == count, key
        else:
            assert watch.seen[key] >= 1, key


@pytest.mark.parametrize("name", SPECS)
def test_every_operation_that_works_is_part_of_one_call_and_keeps_its_signature_when_folded(name: str) -> None:
    step, invocations = captured(SPECS[name])
    want = Counter(s for s in signatures(step) if s is not None)
    have: Counter[Any] = Counter()
    for invocation in invocations:
        for part in invocation.parts:
            have[part.signature] += part.runs
    assert have == want
    folded = Fold()(step)
    assert len(folded.blocks) > 1
    assert {s for s in signatures(folded) if s is not None} == set(want)


def test_the_parts_of_a_shared_launch_share_its_time() -> None:
    _, invocations = captured(SPECS["adamw"])
    (update,) = [c for c in invocations if c.operator == "aten._fused_adamw_"]
    assert sum(p.share * p.runs for p in update.parts) == pytest.approx(1.0)
    assert len(update.operands) == 5 * sum(p.runs for p in update.parts)


def test_all_of_them_run_again() -> None:
    _, invocations = captured(SPECS["adamw"])
    maker = RealOperands("cpu")
    with torch.no_grad():
        for invocation in invocations:
            maker.make(invocation).run()


def test_a_step_that_fits_the_cache_finds_all_in_it_and_one_without_a_cache_nothing() -> None:
    _, warm = captured(SPECS["adamw"])
    _, cold = captured(SPECS["adamw"], 0)
    made_here = {"aten.bernoulli_"}  # its memory is fresh
    assert all(o.since is not None for c in warm if c.operator not in made_here for o in c.operands)
    assert all(o.since is None for c in cold for o in c.operands)


def of_six_layers(width: int, cache_bytes: int) -> list[Invocation]:
    """The products of the forward pass."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(6)))

        def forward(self, x: Any) -> Any:
            return self.layers(x).sum()

    with capture_mode():
        module, inputs = Deep(), (torch.zeros(8, width),)
    spec = SPECS["adamw"]
    nodes = capture(module, inputs, None, spec)
    step, made = lower_nodes(nodes, workload_of(nodes, spec, "deep"))
    invocations = invocations_of(nodes, step, made, cache_bytes)
    return [c for c in invocations if c.operator == "aten.mm" and c.operands[0].shape == (8, width)]


def test_a_cache_of_one_layer_holds_what_was_made_last_but_not_the_weights() -> None:
    forward = of_six_layers(64, cache_bytes=2 * 64 * 64 * 4)
    assert any(c.operands[0].since is not None for c in forward)
    assert any(o.since is None for c in forward for o in c.operands if o.shape == (64, 64))


def test_weights_were_used_before_all_that_a_step_uses_besides() -> None:
    forward = of_six_layers(512, cache_bytes=2**30)
    layer = 512 * 512 * 4
    weights = {o.since for c in forward for o in c.operands if o.shape == (512, 512)}
    # Since the update lie five other layers' weights, at least, and at most these of all with all that Adam has.
    assert 4 * layer <= max(since for since in weights if since is not None) <= 32 * layer
    # The product before one has just made what it is given, by the same code.
    assert (0, 0) in {(c.since, c.operands[0].since) for c in forward}
    assert max(c.since for c in forward if c.since is not None) >= 4 * layer  # the last product of the step before


@pytest.mark.parametrize(("dtype", "kernel"), [("bf16", "flash"), ("fp32", "efficient")])
def test_a_random_state_names_the_call_that_makes_it(dtype: Any, kernel: str) -> None:
    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Any) -> Any:
            q = self.linear(x).view(2, 8, 2, 8).transpose(1, 2)
            return nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.1).sum()

    with capture_mode():
        module, inputs = Attend(), (torch.zeros(2, 8, 16),)
    spec = StepSpec(dtype=dtype)
    nodes = capture(module, inputs, None, spec)
    step, made = lower_nodes(nodes, workload_of(nodes, spec, "attend"))
    invocations = {c.operator: c for c in invocations_of(nodes, step, made, 2**30)}
    forward = invocations[f"aten._scaled_dot_product_{kernel}_attention"]
    backward = invocations[f"aten._scaled_dot_product_{kernel}_attention_backward"]
    made = [o.maker for o in backward.operands if o.maker is not None]
    assert {maker.text for maker, _ in made} == {forward.text}
    assert {index for _, index in made} == ({0, 1, 6, 7} if kernel == "flash" else {0, 1, 2, 3})


def test_an_invocation_says_where_operands_of_fp32_are_not_rounded_as_by_default() -> None:
    """Its text tells it apart, so that a measurement of the one is none of the other."""
    plain = {one.text: one.tf32 for one in captured(SPECS["adamw"])[1]}
    with settings_kept():
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = True, False
        other = {one.text: one.tf32 for one in captured(SPECS["adamw"])[1]}
    assert set(plain.values()) == {None}
    products = {text for text, tf32 in other.items() if tf32}
    convolutions = {text for text, tf32 in other.items() if tf32 is False}
    assert products and all(text.endswith(" tf32") and "mm" in text for text in products)
    assert convolutions and all(text.endswith(" ieee") and "convolution" in text for text in convolutions)
    assert {text.removesuffix(" tf32").removesuffix(" ieee") for text in other} == set(plain)
