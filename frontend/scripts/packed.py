"""Sequences of several lengths, packed: rows of the first step, then those of the second, of fewer samples.

`torch.nn.utils.rnn` packs and pads by functions of PyTorch that look into lengths in memory. Here it is the
same slices and copies (aten/src/ATen/native/PackedSequence.cpp), of lengths that the host knows.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

import torch
from torch import Tensor

from echograph.frontend.pytorch.known_values import told


def pack(x: Tensor, lengths: Tensor, batch_first: bool, unknown: Callable[[], None]) -> tuple[Tensor, Tensor]:
    """Rows [sum of lengths, ...], and how many samples each step has.

    Args:
        x: [steps, samples, ...], or samples first.
        lengths: of the samples, the longest first.
        batch_first: whether samples are.
        unknown: is called where nobody has the lengths, which are all steps then.

    Raises:
        RuntimeError: they do not fall, or a sample has no steps, or more than there are, as in PyTorch.
    """
    x = x.transpose(0, 1) if batch_first else x
    known = told(lengths)
    if known is None:
        unknown()
    steps, samples = x.shape[:2]
    numbers = [steps] * samples if known is None else known.tolist()
    falling = len(numbers) == samples and sorted(numbers, reverse=True) == numbers
    if not falling or not 0 < numbers[-1] <= numbers[0] <= steps:
        raise RuntimeError(
            f"Lengths {numbers} of {samples} sequences are to fall from {steps} at most to 1 at least"
        )
    parts, sizes, done = [], [], 0
    for count in range(samples, 0, -1):
        upto = numbers[count - 1]
        if upto > done:
            parts.append(x[done:upto, :count].reshape((upto - done) * count, *x.shape[2:]))
            sizes += [count] * (upto - done)
            done = upto
    return torch.cat(parts), torch.tensor(sizes, device="cpu")


def pad(rows: Tensor, sizes: Tensor, batch_first: bool, value: float, total: int) -> tuple[Tensor, Tensor]:
    """What was packed [steps, samples, ...], or samples first, and the length of each sample.

    Args:
        rows: as of `pack`.
        sizes: the same.
        batch_first: whether samples are.
        value: of what is padding.
        total: steps of what comes out.

    Raises:
        RuntimeError: nobody has the sizes.
    """
    known = told(sizes)
    if known is None:
        raise RuntimeError("How many samples each step has is not known: a PackedSequence was made by hand")
    numbers = known.tolist()
    out = rows.new_full((total, numbers[0], *rows.shape[1:]), value)
    step = row = 0
    for count, run in groupby(numbers):
        steps = len(list(run))
        part = rows[row : row + steps * count].view(steps, count, *rows.shape[1:])
        out[step : step + steps, :count] = part
        step, row = step + steps, row + steps * count
    lengths = [sum(count > place for count in numbers) for place in range(numbers[0])]
    return out.transpose(0, 1) if batch_first else out, torch.tensor(lengths, device="cpu")
