"""Earlier releases of a library's attention: how much longer they take than the one that a profile has.

Told from NVIDIA's own tables of these releases, each row over what the fitted release is modelled to take at its
shape, the median of a pass (`python -m benchmarks.attention_releases CLONE`; CLONE: of NVIDIA/cudnn-frontend,
whose benchmarks they were). Heads are of 128 there; others are taken to be alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from echograph.profiler.costs.device import AttentionModel, AttentionPass, DeviceProfile

SPREAD = 0.05
"""Relative one-sigma error beyond the fitted release's: half of the rows are within it of their median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Seconds of a release over those of the one that is fitted.

    Attributes:
        of: the fitted one's name.
        forward: of forward passes.
        backward: of backward passes.
        source: where it was measured.
    """

    of: str
    forward: float
    backward: float
    source: str


RELEASES: dict[tuple[str, str], Release] = {
    ("cudnn-2024", "hopper"): Release(
        of="cudnn",
        forward=1.06,
        backward=1.08,
        source="NVIDIA/cudnn-frontend b740542 and de355c7 (cuDNN 9.1 of April 2024 and that of September), "
        "benchmark/benchmark_results.csv: H200 at 1,980 MHz and 700 W",
    ),
    ("cudnn-2025", "blackwell"): Release(
        of="cudnn",
        forward=1.08,
        backward=1.1,
        source="NVIDIA/cudnn-frontend f937055 and 0b1577c (cuDNN 9.10 of June 2025 and 9.13 of October), "
        "benchmark/sdpa_benchmark*_training: B200 and GB300; 9.17 of December is as fast as the fitted one",
    ),
}
"""By name and architecture."""


def library_of(kernel: str) -> str:
    """The name of a kernel without its release: "cudnn" of "cudnn-2024"."""
    return kernel.partition("-")[0]


def attention_model(device: DeviceProfile, kernel: str) -> AttentionModel | None:
    """A device's model of a kernel of attention, or of a release of one; None: it has none."""
    found, release = device.attention.get(kernel), RELEASES.get((kernel, device.datasheet.architecture))
    if found is not None or release is None or (fitted := device.attention.get(release.of)) is None:
        return found
    backward = fitted.backward and _longer(fitted.backward, release.backward, release.source)
    return msgspec.structs.replace(
        fitted, forward=_longer(fitted.forward, release.forward, release.source), backward=backward
    )


def _longer(fitted: AttentionPass, factor: float, source: str) -> AttentionPass:
    label = msgspec.structs.replace(
        fitted.label,
        basis=f"{fitted.label.basis}; {factor} times as long: {source}",
        spread=float(np.hypot(fitted.label.spread, SPREAD)),
        spread_short=float(np.hypot(fitted.label.spread_short, SPREAD)),
    )
    return msgspec.structs.replace(fitted, time_scale=fitted.time_scale * factor, label=label)
