"""What stands in for FP8, Mamba, Muon and the flex dispatcher: shapes and work, and values where it has any."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="needs the [torch] extra")

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from echograph.errors import CaptureError
from echograph.frontend.megatron import flex, fp8, mamba, muon, shims
from echograph.frontend.scripts.streams import CapturedStream

pytestmark = pytest.mark.torch

HALF = {"dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("recipe", "gradient", "scales"),
    [
        (fp8.Float8CurrentScaling(), torch.float8_e5m2, ()),
        (fp8.Float8CurrentScaling(fp8_format=fp8.Format.E4M3), torch.float8_e4m3fn, ()),
        (fp8.DelayedScaling(), torch.float8_e5m2, None),
        (fp8.Float8BlockScaling(), torch.float8_e4m3fn, (64, 2)),
        (fp8.MXFP8BlockScaling(), torch.float8_e4m3fn, (64, 8)),
    ],
)
def test_a_tensor_is_cast_as_its_recipe_says(
    recipe: fp8.ScalingRecipe, gradient: torch.dtype, scales: object
) -> None:
    with FakeTensorMode():
        made = fp8.cast(torch.empty(64, 256, **HALF), recipe, gradient=True)
    assert (made.rows.shape, made.columns.shape) == ((64, 256), (256, 64))
    assert made.rows.dtype == made.columns.dtype == gradient
    assert [tuple(scale.shape) for scale in made.row_scales] == ([] if scales is None else [scales])


def test_a_layer_holds_its_copies_from_step_to_step() -> None:
    """In a list, through which a recorder looks; without micro-batches they are made anew each time."""
    with FakeTensorMode():
        weight, copies = torch.nn.Parameter(torch.empty(64, 32, **HALF)), fp8.Copies()
        copies.of([weight], fp8.Float8CurrentScaling(), None)
        assert not copies
        (first,) = copies.of([weight], fp8.Float8CurrentScaling(), True)
        (later,) = copies.of([weight], fp8.Float8CurrentScaling(), False)
    assert later is first
    assert [id(part) for part in copies] == [id(first.rows), id(first.columns)]


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("fuses", [False, True])
def test_a_layer_in_fp8_has_three_products(keeps: bool, fuses: bool) -> None:
    with FakeTensorMode():
        weight = torch.nn.Parameter(torch.empty(64, 32, **HALF))
        weight.main_grad = torch.empty(64, 32)
        layer = fp8.DividedLayer(
            recipe=fp8.Float8CurrentScaling(), group=None, parallel_mode=None, sequence_parallel=False,
            fuses=fuses, keeps_given=keeps, weight=weight,
        )  # fmt: skip
        given = torch.empty(16, 32, **HALF, requires_grad=True)
        (copies,) = fp8.Copies().of([weight], layer.recipe, None)
        with FlopCounterMode(display=False) as counter:
            fp8.linear(given, copies, layer).sum().backward()
    assert given.grad.shape == given.shape and weight.grad.shape == weight.shape
    assert counter.get_total_flops() == 3 * 2 * 16 * 32 * 64
    assert getattr(weight, "grad_added_to_main_grad", False) is fuses


def test_weights_are_cast_once_a_step() -> None:
    copies, recipe = fp8.Copies(), fp8.Float8CurrentScaling()
    with FakeTensorMode():
        weights = [torch.nn.Parameter(torch.empty(16, 16, **HALF))]
        first, second, third = (copies.of(weights, recipe, begins)[0] for begins in (True, False, True))
    assert second is first and third is not first


def test_a_parameter_in_fp8_keeps_no_16_bits() -> None:
    with FakeTensorMode(), fp8.model_init(recipe=fp8.Float8CurrentScaling()):
        weight = fp8.mark(torch.nn.Parameter(torch.empty(32, 16, **HALF)))
        assert isinstance(weight, fp8.QuantizedTensor) and not isinstance(torch.empty(1), fp8.QuantizedTensor)
        fp8.replace_raw_data(weight, torch.empty(32, 16, dtype=torch.uint8))
        (copies,) = fp8.Copies().of([weight], fp8.Float8CurrentScaling(), True)
    assert weight.shape == (32, 16) and weight.untyped_storage().nbytes() == 2
    assert copies.rows.dtype == torch.float8_e4m3fn and copies.columns.shape == (16, 32)
    with pytest.raises(CaptureError, match="--fp8-param-gather"), fp8.model_init(recipe=fp8.DelayedScaling()):
        pass


def test_with_values_there_is_no_fp8() -> None:
    with pytest.raises(CaptureError, match="FP8 without Transformer Engine"):
        fp8.cast(torch.ones(16, 16, **HALF), fp8.DelayedScaling())


def test_experts_rows_are_padded_and_put_back() -> None:
    given = torch.arange(10.0).view(5, 2)
    padded, sizes = fp8.Padding(2, 4)(given, [2, 3])
    assert sizes == [4, 4] and padded.shape == (8, 2)
    assert torch.equal(fp8.Unpadding(2, 4)(padded, [2, 3]), given)


def test_a_scan_has_the_work_of_its_chunks() -> None:
    batch, length, heads, head, groups, state, chunk = 2, 64, 4, 8, 2, 16, 32
    channels = heads * head + 2 * groups * state
    with FakeTensorMode():
        given = torch.empty(batch, length, heads * head + channels + heads, **HALF, requires_grad=True)
        weight, bias = (torch.empty(*s, **HALF, requires_grad=True) for s in ((channels, 4), (channels,)))
        dt_bias, a, d = (torch.empty(heads, requires_grad=True) for _ in range(3))
        with FlopCounterMode(display=False) as counter:
            out = mamba.split_conv1d_scan(given, weight, bias, dt_bias, a, d, chunk, headdim=head, ngroups=groups)
            forward = counter.get_total_flops()
            out.sum().backward()
    assert out.shape == (batch, length, heads * head)
    pairs, within, states = chunk * state * groups, chunk * head * heads, state * head * heads
    assert forward == 2 * batch * length * (pairs + within + 2 * states)
    assert counter.get_total_flops() - forward == 2 * batch * length * (3 * pairs + 2 * within + 5 * states)
    assert all(tensor.grad.shape == tensor.shape for tensor in (given, weight, bias, dt_bias, a, d))


def test_a_gated_norm_has_its_values() -> None:
    norm = mamba.GatedNorm(8, group_size=4, norm_before_gate=False)
    x, z = torch.randn(3, 8), torch.randn(3, 8)
    gated = x * torch.nn.functional.silu(z)
    groups = gated.view(3, 2, 4)
    wanted = groups / (groups.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    assert torch.allclose(norm(x, z), wanted.view(3, 8), atol=1e-6)


def test_muon_s_updates_are_nearly_orthogonal() -> None:
    torch.manual_seed(0)
    made = muon.newton_schulz_tp(torch.randn(24, 16), 5, "quintic", None)
    values = torch.linalg.svdvals(made)
    assert made.shape == (24, 16) and values.min() > 0.6 and values.max() < 1.3
    weight = torch.nn.Parameter(torch.zeros(24, 16))
    optimizer = muon.OrthogonalizedOptimizer(
        [weight], 0.1, 0.9, 0.0, nesterov=True, weight_decay_method="decoupled", fp32_matmul_prec="highest",
        scaled_orthogonalize_fn=lambda gradient: muon.newton_schulz_tp(gradient, 5, "quintic", None),
    )  # fmt: skip
    weight.grad = torch.randn(24, 16)
    optimizer.step()
    assert torch.linalg.svdvals(weight).min() > 0.06 and torch.linalg.svdvals(weight).max() < 0.13


@pytest.mark.parametrize(
    ("ranks", "experts", "choices", "expected"),
    [(8, 8, 1, 1.0), (8, 8, 2, 2.0), (8, 8, 8, 8.0), (2, 4, 2, 2 * (1 - 1 / 6)), (1, 8, 2, 1.0)],
)
def test_a_token_goes_once_to_each_rank(ranks: int, experts: int, choices: int, expected: float) -> None:
    assert flex.distinct_ranks(ranks, experts, choices) == pytest.approx(expected)


def test_the_host_reads_whether_a_loss_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question whose answer is known without values is asked, too, and waited for; no step is refused."""
    (patch,) = [patch for patch in shims.LEFT_OUT if patch.where.endswith("validate_result")]
    waits: list[object] = []
    monkeypatch.setattr(CapturedStream, "host_waits", waits.append)
    answers: list[bool] = []
    validate = patch.around(lambda _, loss, rejected: answers.append(rejected(loss)))
    with FakeTensorMode():
        for question in (torch.isnan, torch.isinf, lambda loss: loss > 1):
            validate(None, torch.empty(1), question)
    assert answers == [False, False, False]
    assert len(waits) == 2
