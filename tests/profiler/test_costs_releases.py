"""Releases of a library's attention: where they exist, and how long they take beside the fitted one."""

from __future__ import annotations

import pytest

from echograph.errors import UnavailableError, UnknownNameError
from echograph.profiler.costs import attention_backward, attention_forward, load_device
from echograph.profiler.costs.deterministic import is_possible
from echograph.profiler.costs.releases import RELEASES, attention_model, library_of

SHAPE = {"batch": 1, "heads": 32, "seq": 8192, "head_dim": 128}


@pytest.mark.parametrize(("kernel", "device"), [("cudnn-2024", "h100-sxm"), ("cudnn-2025", "gb200")])
def test_a_release_takes_its_factor_longer_and_is_less_sure(kernel: str, device: str) -> None:
    profile = load_device(device)
    release = RELEASES[kernel, profile.datasheet.architecture]
    for cost, factor in ((attention_forward, release.forward), (attention_backward, release.backward)):
        now, then = (cost(profile, kernel=name, **SHAPE) for name in ("cudnn", kernel))
        assert float(then.seconds) == pytest.approx(factor * float(now.seconds), rel=2e-2)
        assert then.seconds > now.seconds and then.spread > now.spread
    model = attention_model(profile, kernel)
    assert model is not None and release.source in model.forward.label.basis


def test_a_release_of_another_architecture_or_library_is_none() -> None:
    assert attention_model(load_device("h100-sxm"), "cudnn-2025") is None
    assert attention_model(load_device("a100-sxm-80"), "cudnn-2024") is None
    with pytest.raises(UnavailableError, match="cudnn-2025"):
        attention_forward(load_device("h100-sxm"), kernel="cudnn-2025", **SHAPE)
    with pytest.raises(UnknownNameError, match="cudann-2025"):
        attention_forward(load_device("h100-sxm"), kernel="cudann-2025", **SHAPE)


def test_a_release_has_what_its_library_has() -> None:
    assert library_of("cudnn-2024") == "cudnn" and library_of("flash2") == "flash2"
    assert not is_possible("cudnn-2024", "ampere", 0.0, deterministic=True)
    profile = load_device("h100-sxm")
    now, then = (
        attention_backward(profile, kernel=name, deterministic=True, **SHAPE) for name in ("cudnn", "cudnn-2024")
    )
    free = attention_backward(profile, kernel="cudnn-2024", **SHAPE)
    assert then.seconds > free.seconds and then.seconds > now.seconds
