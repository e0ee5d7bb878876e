"""What was assumed of a row has a width: every kind says why, and whatever is assumed has one."""

from __future__ import annotations

import pytest

from echograph.workflow.validation.assumptions import assumption_of, read_assumptions, unsaid_spread


def test_every_kind_says_where_its_width_comes_from() -> None:
    kinds = read_assumptions()
    assert all(len(kind.source) > 10 and 0 < kind.spread < 0.5 for kind in kinds)
    assert kinds[-1].text == ""


@pytest.mark.parametrize(
    ("text", "begins"),
    [
        ("no recomputation", "no recomputation"),
        ("micro-batches of 8", "micro-batches of"),
        ("zero 1 over all replicas", "zero ."),
        ("trainer 'abacus': stack eager", "trainer"),
        ("vpp 1", "(tp|pp"),
        ("something new", ""),
    ],
)
def test_an_assumption_has_the_width_of_the_first_kind_that_it_begins_with(text: str, begins: str) -> None:
    found = assumption_of(text)
    assert found.text.startswith(begins)
    assert bool(found.text) == bool(begins)


def test_assumptions_are_independent() -> None:
    one, other = (unsaid_spread([text]) for text in ("no recomputation", "vpp 1"))
    assert unsaid_spread(["no recomputation", "vpp 1"]) == pytest.approx((one**2 + other**2) ** 0.5)
    assert unsaid_spread([]) == 0.0
