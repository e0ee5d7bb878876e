"""Windows, Fourier transforms, and the sampling of pictures."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import pi
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from echograph.errors import CaptureError
from echograph.frontend.onnx.call import NodeCall, Operator, extents

_HANN, _HAMMING, _BLACKMAN = (0.5, 0.5), (25 / 46, 21 / 46), (0.42, 0.5, 0.08)


def _window(terms: tuple[float, ...], call: NodeCall) -> Any:
    size = call.ints("size", 0)[0]
    number = call.integer("output_datatype", 1)
    length = size if call.integer("periodic", 1) else size - 1
    angle = torch.arange(size, dtype=torch.float64) * (2 * pi / max(length, 1))
    made = sum((-1) ** i * term * torch.cos(i * angle) for i, term in enumerate(terms))
    assert isinstance(made, Tensor)
    return made.to(call.dtypes.of(number, call.node.name))


def _dft(call: NodeCall) -> Any:
    """Real [..., 1] or complex [..., 2] numbers in, complex pairs out."""
    x, length = call[0], call.constant(1)
    axis = call.integer("axis", 1) if call.opset < 20 else (call.optional_ints("axis", 2) or [-2])[0]
    inverse, one_sided = call.integer("inverse"), call.integer("onesided")
    if inverse and one_sided:
        raise CaptureError("it is an inverse transform of one side: export it whole")
    whole = torch.view_as_complex(x.contiguous()) if x.shape[-1] == 2 else x.squeeze(-1)
    along, size = axis % x.dim(), None if length is None else int(length)
    if one_sided:
        made = torch.fft.rfft(whole, size, along)
    else:
        made = (torch.fft.ifft if inverse else torch.fft.fft)(whole, size, along)
    return torch.view_as_real(made)


def _stft(call: NodeCall) -> Any:
    """Frames of a signal [batch, length, 1], windowed and transformed."""
    signal, step, window = call[0], call.constant(1), call.get(2)
    length = call.constant(3)
    if step is None or (length is None and window is None):
        raise CaptureError("it lacks its step or the length of its frames")
    size = int(length) if length is not None else int(window.shape[0])
    frames = signal.squeeze(-1).unfold(1, size, int(step))
    frames = frames if window is None else frames * window
    transform = torch.fft.rfft if call.integer("onesided", 1) else torch.fft.fft
    return torch.view_as_real(transform(frames))


def _grid_sample(call: NodeCall) -> Any:
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(call.text("mode", "linear"), call.text("mode", "linear"))
    padding, aligned = call.text("padding_mode", "zeros"), bool(call.integer("align_corners"))
    return F.grid_sample(call[0], call[1], mode, padding, aligned)


def _affine_grid(call: NodeCall) -> Any:
    return F.affine_grid(call[0], call.ints("size", 1), bool(call.integer("align_corners")))


def _col2im(call: NodeCall) -> Any:
    image, block = call.ints("image_shape", 1), call.ints("block_shape", 2)
    pads = call.ints("pads", default=[0] * (2 * len(block)))
    if len(image) != 2 or pads[: len(block)] != pads[len(block) :]:
        raise CaptureError(f"it makes {extents(call[0])} a picture that is not flat or padded unevenly")
    ones = [1] * len(block)
    fold: Any = F.fold
    dilations, strides = call.ints("dilations", default=ones), call.ints("strides", default=ones)
    return fold(call[0], image, block, dilations, pads[: len(block)], strides)


OPERATORS: Mapping[str, Operator] = {
    "HannWindow": partial(_window, _HANN),
    "HammingWindow": partial(_window, _HAMMING),
    "BlackmanWindow": partial(_window, _BLACKMAN),
    "DFT": _dft,
    "STFT": _stft,
    "GridSample": _grid_sample,
    "AffineGrid": _affine_grid,
    "Col2Im": _col2im,
}
