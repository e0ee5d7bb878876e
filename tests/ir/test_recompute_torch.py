"""Recomputation held against torch.utils.checkpoint itself, captured from a model that calls it."""

from __future__ import annotations

import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the [torch] extra")
sys.path.insert(0, str(Path(__file__).parent))

import torch
from recompute_model import LAYERS, Run, step
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from echograph.ir.graph import StepGraph
from echograph.ir.passes.fold import Fold
from echograph.ir.passes.recompute import Recompute
from echograph.ir.passes.rewrite import StepWriter
from echograph.ir.types import Op, Phase
from echograph.ir.unfold import difference, unfold


def not_reentrant(**options: Any) -> Run:
    return partial(_swapped, partial(checkpoint, use_reentrant=False, **options))


def _swapped(run: Run, function: Run, *args: Any) -> Any:
    return run(function, *args)


def every_second_product() -> Any:
    """torchtitan's policy: it counts the products of a pass, and recomputes the second, fourth, ... of them."""
    counts: dict[bool, int] = defaultdict(int)

    def policy(context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        product = function == torch.ops.aten.mm.default
        counts[context.is_recompute] += product
        kept = counts[context.is_recompute] % 2 if product else "attention" in str(function)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def same(ours: StepGraph, torchs: StepGraph) -> None:
    assert difference(unfold(ours), torchs) is None


def test_full_is_checkpoint_of_each_layer() -> None:
    same(Recompute(policy="full")(Fold()(step())), step(run=not_reentrant()))


def test_full_without_early_stop() -> None:
    ours = Recompute(policy="full", early_stop=False)(Fold()(step()))
    same(ours, step(run=not_reentrant(early_stop=False)))


@pytest.mark.parametrize("every", [2, 3])
def test_some_layers_only(every: int) -> None:
    ours = Recompute(policy="full", every=every)(Fold()(step()))
    assert any(len(block.instances) == LAYERS // every for block in ours.blocks[1:])
    same(ours, step(run=not_reentrant(), every=every))


def test_selective_is_checkpoint_of_the_core_attention() -> None:
    ours = Recompute(policy="selective", early_stop=True)(Fold()(step(fused=False)))
    same(ours, step(fused=False, run_core=not_reentrant()))


class Unlinked(StepWriter):
    """Leaves out which operations are recomputed: a capture does not say it where only some of a run are."""

    def operation(self, op: Op) -> None:
        self.copy(op, **({"forward_op": None} if op.phase == Phase.RECOMPUTE else {}))


def test_selective_op_is_torchs_selective_checkpoint() -> None:
    ours = Recompute(policy="selective_op")(Fold()(step()))
    same(Unlinked(ours).write(), step(run=not_reentrant(context_fn=every_second_product)))
