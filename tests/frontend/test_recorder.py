"""The recorder's graph: what is in it, how it is annotated, and that it is the step a real trainer runs."""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from echograph.frontend.pytorch import annotate  # noqa: E402
from echograph.frontend.pytorch.annotate import (  # noqa: E402
    BACKWARD,
    FORWARD,
    FORWARD_NODE,
    FQN,
    GRADIENT_OF,
    MODULE,
    OPTIMIZER,
    PHASE,
    RECOMPUTE,
    ROLE,
    VAL,
    call_nodes,
)
from echograph.frontend.pytorch.call_nodes import plain_name  # noqa: E402

pytestmark = pytest.mark.torch


def names(graph: Any, phase: str) -> list[str]:
    return [plain_name(n) for n in call_nodes(graph) if n.meta[PHASE] == phase]


def by_name(graph: Any) -> dict[str, Any]:
    return {n.name: n for n in graph.nodes}


def test_linear_layer_is_written_down_as_it_runs(capture_step: Any) -> None:
    graph = capture_step(
        lambda: (torch.nn.Linear(4, 3), (torch.zeros(2, 4),), torch.sum), dtype="fp32", optimizer="sgd"
    )
    assert names(graph, FORWARD) == ["t", "addmm", "sum"]
    assert names(graph, BACKWARD) == ["ones_like", "expand", "t", "mm", "t", "sum", "view", "t"]
    assert names(graph, OPTIMIZER) == ["_fused_sgd_"]
    placeholders = {n.meta[FQN]: n.meta[ROLE] for n in graph.nodes if n.op == "placeholder"}
    assert placeholders == {
        "weight": "parameter",
        "bias": "parameter",
        "input.0": "input",
        "weight.momentum_buffer": "optimizer_state",
        "bias.momentum_buffer": "optimizer_state",
    }


def test_module_paths_and_forward_links(capture_step: Any, build_mlp: Any) -> None:
    graph = capture_step(build_mlp)
    nodes = by_name(graph)
    forward = {plain_name(n): n.meta[MODULE] for n in call_nodes(graph) if n.meta[PHASE] == FORWARD}
    assert forward["embedding"] == "embed"
    assert forward["native_layer_norm"] == "block.0"
    assert forward["gelu"] == "block.2"
    assert forward["mm"] == "head"
    assert forward["add"] == "" and forward["_log_softmax"] == ""
    links = {
        plain_name(n): (plain_name(nodes[n.meta[FORWARD_NODE]]), n.meta[MODULE])
        for n in call_nodes(graph)
        if n.meta[PHASE] == BACKWARD
    }
    assert links["embedding_dense_backward"] == ("embedding", "embed")
    assert links["native_layer_norm_backward"] == ("native_layer_norm", "block.0")
    assert links["gelu_backward"] == ("gelu", "block.2")
    assert links["_log_softmax_backward_data"] == ("_log_softmax", "")


def test_sum_of_gradients_belongs_to_the_tensor_that_is_read_twice(capture_step: Any, build_mlp: Any) -> None:
    graph = capture_step(build_mlp)
    sums = [n for n in call_nodes(graph) if n.meta[PHASE] == BACKWARD and plain_name(n) == "add"]
    assert [plain_name(by_name(graph)[n.meta[FORWARD_NODE]]) for n in sums] == ["embedding"]


def test_each_parameter_has_one_gradient_of_its_shape(capture_step: Any, build_mlp: Any) -> None:
    graph = capture_step(build_mlp)
    shapes = {n.meta[FQN]: n.meta[VAL].shape for n in graph.nodes if n.meta.get(ROLE) == "parameter"}
    gradients = {n.meta[GRADIENT_OF]: n.meta[VAL].shape for n in graph.nodes if GRADIENT_OF in n.meta}
    assert gradients == shapes


def test_tied_parameter_has_one_gradient_the_sum_of_two(capture_step: Any) -> None:
    def build() -> tuple[Any, ...]:
        embed, head = torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7, bias=False)
        head.weight = embed.weight
        return torch.nn.Sequential(embed, head), (torch.zeros(3, dtype=torch.long),), torch.sum

    graph = capture_step(build)
    assert [n.meta[FQN] for n in graph.nodes if n.meta.get(ROLE) == "parameter"] == ["0.weight"]
    (gradient,) = [n for n in graph.nodes if GRADIENT_OF in n.meta]
    assert plain_name(gradient) == "add" and gradient.meta[GRADIENT_OF] == "0.weight"


def test_gradients_are_stolen_not_copied(capture_step: Any, build_mlp: Any) -> None:
    """The recorder holds no gradient, or autograd would clone each of them."""
    backward = Counter(names(capture_step(build_mlp), BACKWARD))
    assert backward["clone"] == backward["copy_"] == backward["detach"] == 0


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"dtype": "fp32"}, ["_foreach_add_", "_fused_adamw_"]),
        ({"dtype": "fp32", "optimizer": "adam"}, ["_foreach_add_", "_fused_adam_"]),
        ({"dtype": "bf16"}, ["_foreach_copy_", "_foreach_add_", "_fused_adamw_", "_foreach_copy_"]),
        ({"dtype": "bf16", "master_weights": False}, ["_foreach_add_", "_fused_adamw_"]),
        ({"dtype": "bf16", "optimizer": "sgd"}, ["_foreach_copy_", "_fused_sgd_", "_foreach_copy_"]),
    ],
)
def test_optimizer(capture_step: Any, build_mlp: Any, spec: dict[str, Any], expected: list[str]) -> None:
    recorded = [n for n in names(capture_step(build_mlp, **spec), OPTIMIZER) if not n.startswith("empty")]
    assert recorded == expected


def test_clipping_and_loss_scaling(capture_step: Any, build_mlp: Any) -> None:
    graph = capture_step(build_mlp, dtype="fp16", clip_grad_norm=1.0)
    recorded = names(graph, OPTIMIZER)
    unscale = recorded.index("_amp_foreach_non_finite_check_and_unscale_")
    assert unscale < recorded.index("_foreach_norm") < recorded.index("_foreach_mul_")
    assert recorded.index("_foreach_mul_") < recorded.index("_fused_adamw_")
    assert names(graph, FORWARD)[-1] == "mul"


def test_recomputed_operations_repeat_the_forward_pass(capture_step: Any, zoo: Any) -> None:
    build = zoo("gpt2", batch_size=2, seq_len=64)
    plain, graph = capture_step(build), capture_step(build, recompute=True)
    nodes = by_name(graph)
    recomputed = [n for n in call_nodes(graph) if n.meta[PHASE] == RECOMPUTE]
    assert recomputed
    for node in recomputed:
        forward = nodes[node.meta[FORWARD_NODE]]
        assert node.target is forward.target and node.meta[MODULE] == forward.meta[MODULE]
        assert str(node.meta[VAL]) == str(forward.meta[VAL])
    # Apart from them the step is the same.
    for phase in (FORWARD, BACKWARD, OPTIMIZER):
        assert Counter(names(graph, phase)) == Counter(names(plain, phase))
    assert annotate.forward_node_coverage(graph) == 1.0


def test_function_checkpoint_of_either_kind(capture_step: Any) -> None:
    class Checkpointed(torch.nn.Module):
        def __init__(self, use_reentrant: bool) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
            self.use_reentrant = use_reentrant

        def forward(self, x: Any) -> Any:
            from torch.utils.checkpoint import checkpoint

            return checkpoint(lambda y: self.second(self.first(y).relu()).sin(), x.requires_grad_(),
                              use_reentrant=self.use_reentrant)  # fmt: skip

    for use_reentrant in (True, False):
        graph = capture_step(lambda: (Checkpointed(use_reentrant), (torch.zeros(2, 4),), torch.sum))  # noqa: B023
        recomputed = [n for n in call_nodes(graph) if n.meta[PHASE] == RECOMPUTE]
        assert {"addmm", "relu"} <= {plain_name(n) for n in recomputed}
        nodes = by_name(graph)
        assert all(nodes[n.meta[FORWARD_NODE]].target is n.target for n in recomputed)
        assert {n.meta[MODULE] for n in recomputed if plain_name(n) == "addmm"} == {"first", "second"}


def test_module_is_left_without_traces(build_mlp: Any) -> None:
    from echograph.frontend.pytorch.capture import capture, capture_mode
    from echograph.frontend.pytorch.spec import StepSpec

    with capture_mode():
        module, inputs, loss = build_mlp()
    capture(module, inputs, loss, StepSpec())
    for child in module.modules():
        assert not child._forward_hooks and not child._forward_pre_hooks
    assert not any("_echograph_node" in p.__dict__ for p in module.parameters())
    assert all(p.grad is None for p in module.parameters())


def test_no_phantom_operations(capture_step: Any, zoo: Any) -> None:
    graph = capture_step(zoo("bert-base-uncased", batch_size=1, seq_len=32))
    for node in call_nodes(graph):
        assert node.target.namespace == "aten"
        assert not plain_name(node).startswith(("detach", "alias", "lift", "sym_", "_local_scalar"))


@pytest.mark.parametrize("producer", ["recorder", "aot"])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_executed_graph_trains_like_pytorch(
    capture_step: Any, build_mlp: Any, producer: str, clip: float | None
) -> None:
    """The recorded step, run on real numbers, updates parameters and state as torch.optim does."""
    graph = capture_step(build_mlp, dtype="fp32", clip_grad_norm=clip, producer=producer)
    torch.manual_seed(0)
    module, _, loss = build_mlp()
    tokens = torch.randint(0, 11, (2, 5))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    values: list[Any] = []
    state: dict[str, Any] = {}
    for node in (n for n in graph.nodes if n.op == "placeholder"):
        if node.meta[ROLE] == "parameter":
            value = module.get_parameter(node.meta[FQN]).detach().clone()
        elif node.meta[ROLE] == "input":
            value = tokens
        else:
            value = torch.zeros(node.meta[VAL].shape)
        state[node.meta[FQN]] = value
        values.append(value)
    torch.fx.Interpreter(torch.fx.GraphModule({}, graph)).run(*values)

    loss(module(tokens)).backward()
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
    optimizer.step()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(state[name], parameter.detach(), msg=name)
        torch.testing.assert_close(state[f"{name}.exp_avg"], optimizer.state[parameter]["exp_avg"])
        torch.testing.assert_close(state[f"{name}.exp_avg_sq"], optimizer.state[parameter]["exp_avg_sq"])
        assert state[f"{name}.step"].item() == 1


def test_frozen_and_unused_parameters_are_not_updated(capture_step: Any) -> None:
    class Partial(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.frozen, self.unused = (torch.nn.Linear(4, 4, bias=False) for _ in range(3))
            self.frozen.requires_grad_(False)

        def forward(self, x: Any) -> Any:
            return self.used(self.frozen(x)).sum()

    graph = capture_step(lambda: (Partial(), (torch.zeros(2, 4),)))
    assert [n.meta[GRADIENT_OF] for n in graph.nodes if GRADIENT_OF in n.meta] == ["used.weight"]
    (step,) = [n for n in call_nodes(graph) if plain_name(n) == "_fused_adamw_"]
    assert len(step.args[0]) == 1


def test_constants_and_several_results(capture_step: Any) -> None:
    class Scaled(torch.nn.Linear):
        def forward(self, x: Any) -> Any:
            top, _ = torch.topk(super().forward(x) * torch.tensor([2.0, 3.0, 4.0]), 2)
            return top.sum()

    graph = capture_step(lambda: (Scaled(4, 3), (torch.zeros(2, 4),)), dtype="fp32")
    constants = [n for n in graph.nodes if n.op == "placeholder" and n.meta[FQN].startswith("constant_")]
    assert [tuple(n.meta[VAL].shape) for n in constants] == [(3,)]
    (topk,) = [n for n in call_nodes(graph) if plain_name(n) == "topk"]
    assert [n.args[1] for n in topk.users if n.target is operator.getitem] == [0, 1]


def test_modules_convert_inside_the_capture_mode(capture_step: Any) -> None:
    """`module.to(dtype)` refuses fake parameters outside of it."""
    tied = torch.nn.Linear

    def build() -> tuple[Any, ...]:
        model = torch.nn.Sequential(tied(4, 4, bias=False), tied(4, 4, bias=False))
        model[1].weight = model[0].weight
        return model.to(torch.float64), (torch.zeros(2, 4),), torch.sum

    graph = capture_step(build)
    (weight,) = [n.meta[VAL] for n in graph.nodes if n.meta.get(ROLE) == "parameter"]
    assert weight.dtype == torch.bfloat16


def test_check_annotations_names_the_node_and_the_breach(capture_step: Any, build_mlp: Any) -> None:
    from echograph.errors import CaptureError

    breaches = {
        VAL: "meta['val']",
        PHASE: "phase",
        MODULE: "module path",
    }
    for key, message in breaches.items():
        graph = capture_step(build_mlp)
        node = next(iter(call_nodes(graph)))
        del node.meta[key]
        with pytest.raises(
            CaptureError, match=f"'{node.name}'.*{message}".replace("[", r"\[").replace("]", r"\]")
        ):
            annotate.check_annotations(graph)
    graph = capture_step(build_mlp)
    for node in call_nodes(graph):
        node.meta.pop(FORWARD_NODE, None)
    with pytest.raises(CaptureError, match=r"0\.0% of the backward"):
        annotate.check_annotations(graph)
