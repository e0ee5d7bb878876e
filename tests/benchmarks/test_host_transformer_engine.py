"""What stands for Transformer Engine's extension, and how files of a clone are read."""

from __future__ import annotations

from importlib.util import module_from_spec
from pathlib import Path

import pytest
import torch
from benchmarks.host import undisturbed
from benchmarks.host_transformer_engine import Extension, _Clone, _Source


@pytest.fixture
def extension() -> Extension:
    return Extension()


def test_products_have_the_shapes_of_the_kernels(extension: Extension) -> None:
    weight, given, above = torch.empty(6, 4), torch.empty(3, 2, 4), torch.empty(3, 2, 6)

    def product(
        a: torch.Tensor, transposed: bool, b: torch.Tensor, other: bool, bias: object, grad: bool
    ) -> object:
        return extension.generic_gemm(a, transposed, b, other, None, None, None, bias, None, False, None, grad)

    assert product(weight, True, given, False, None, False)[0].shape == (3, 2, 6)
    assert product(weight, False, above, False, None, True)[0].shape == (3, 2, 4)
    gradient, of_bias, *_ = product(given.view(6, 4), False, above.view(6, 6), True, weight, True)
    assert gradient.shape == weight.shape
    assert of_bias.shape == (6,)


def test_calls_that_are_noted_keep_what_they_were_given(extension: Extension) -> None:
    given, weight = torch.ones(2, 4), torch.ones(4)
    extension.calls = calls = []
    extension.rmsnorm_fwd(given, weight, 1e-5)
    given.data = torch.empty(0)  # as what a layer no longer needs is freed
    ((function, args, named),) = calls
    assert function(*args, **named)[0].shape == (2, 4)
    assert len(calls) == 2


def test_a_function_that_nothing_stands_for_says_so(extension: Extension) -> None:
    with pytest.raises(NotImplementedError, match="swap_first_dims"):
        extension.swap_first_dims(torch.empty(1))


def test_enumerations_are_the_extension_s_own(extension: Extension) -> None:
    assert (extension.FP8FwdTensors.GEMM1_INPUT, extension.FP8FwdTensors.GEMM2_WEIGHT) == (0, 4)
    assert (extension.FP8BwdTensors.GRAD_OUTPUT1, extension.FP8BwdTensors.GRAD_INPUT2) == (0, 3)
    assert extension.DType.kFloat32 != extension.DType.kBFloat16
    assert extension.DType.kFloat32 == extension.DType.kFloat32


def test_a_clone_s_files_are_read_for_the_cpu(tmp_path: Path) -> None:
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "one.py").write_text('device = "cuda"\nfits = lambda t: t.is_cuda and torch.cuda.is_available()\n')
    spec = _Clone(tmp_path).find_spec("transformer_engine.one")
    assert isinstance(spec.loader, _Source)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.device == "cpu"
    assert module.fits(torch.empty(1)) is True
    assert _Clone(tmp_path).find_spec("torch.nn") is None
    assert _Clone(tmp_path).find_spec("transformer_engine.two") is None


def test_of_turns_the_one_counts_that_nearly_all_are_longer_than() -> None:
    assert undisturbed([(0.0, 9.0), (0.0, 9.0), *((1.0 * n, 2.0 * n) for n in range(40, 0, -1))], 1) == 6.0
