"""A thousand damaged files, as they are and with a checksum that vouches for the damage.

With the checksum made anew, decoding and verifying see the damage: whatever they let through is a graph like any
other, so printing it, writing it and unfolding it may fail only with an error of the tree.
"""

from __future__ import annotations

import random
import resource
import sys
from contextlib import suppress
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "fuzz"))

from conformance_graphs import GRAPHS
from damage import damage_bytes
from graphs import KINDS, Model, build

from echograph.errors import EchoError, FormatError
from echograph.ir.files import fields, with_checksum
from echograph.ir.graph import StepGraph
from echograph.ir.passes.fold import Fold
from echograph.ir.schedule import Schedule
from echograph.ir.serde import decode, encode
from echograph.ir.text import to_text
from echograph.ir.unfold import unfold

MUTATIONS = 1000
MODEL = Model(layers=3, kinds=KINDS, durations=True, deps=True)
VICTIMS = {"layered": lambda: Fold()(build(MODEL)), "job": GRAPHS["job"], "kinds": GRAPHS["kinds"]}


@pytest.mark.parametrize("victim", VICTIMS)
def test_damage_under_a_stale_checksum_is_refused(victim: str) -> None:
    data = b"".join(encode(VICTIMS[victim]()))
    chance = random.Random(victim)
    for _ in range(MUTATIONS):
        damaged = damage_bytes(data, chance)
        if damaged != data:
            with pytest.raises(FormatError):
                decode(damaged)


@pytest.mark.parametrize("victim", VICTIMS)
def test_damage_under_a_new_checksum_is_refused_or_harmless(victim: str) -> None:
    whole = b"".join(encode(VICTIMS[victim]()))
    data = b"".join(whole[f.start : f.end] for f in fields(whole))
    chance, harmless = random.Random(victim), 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(MUTATIONS):
        with suppress(FormatError):
            graph = decode(b"".join(with_checksum([damage_bytes(data, chance)])))
            harmless += 1
            text = list(to_text(graph))
            assert list(to_text(decode(b"".join(encode(graph))))) == text
            for program in graph.programs:
                Schedule(graph, program)
            if isinstance(graph, StepGraph):
                with suppress(EchoError):
                    unfold(graph)
    assert 0 < harmless < MUTATIONS, "the mutations should reach both outcomes"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 * 1024, "memory in KiB"
