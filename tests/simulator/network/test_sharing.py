from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echograph.simulator.network import fair_rates


def test_textbook_chain() -> None:
    # One long flow and one short on each of two links: the thin link halves, the rest goes to the short flow.
    assert fair_rates([["a", "b"], ["a"], ["b"]], {"a": 10.0, "b": 4.0}) == pytest.approx([2.0, 8.0, 2.0])


def test_a_flow_of_no_link_and_a_dead_link() -> None:
    assert fair_rates([[], ["a"]], {"a": 0.0}) == [float("inf"), 0.0]


def test_a_link_crossed_twice_counts_twice() -> None:
    assert fair_rates([["a", "a"], ["a"]], {"a": 9.0}) == pytest.approx([3.0, 3.0])


def test_unknown_link() -> None:
    with pytest.raises(KeyError):
        fair_rates([["a"]], {})


links = st.sampled_from("abcd")


@given(
    flows=st.lists(st.lists(links, min_size=1, max_size=4, unique=True), max_size=12),
    capacities=st.fixed_dictionaries({link: st.floats(0.1, 100) for link in "abcd"}),
)
def test_no_link_is_overfull_and_every_flow_has_a_bottleneck(
    flows: list[list[str]], capacities: dict[str, float]
) -> None:
    rates = fair_rates(flows, capacities)
    load = {link: sum(r for r, flow in zip(rates, flows, strict=True) if link in flow) for link in capacities}
    assert all(load[link] <= capacities[link] * (1 + 1e-9) for link in capacities)
    for rate, flow in zip(rates, flows, strict=True):
        # Max-min fair: on some full link of its own, no flow is faster.
        assert any(
            load[link] >= capacities[link] * (1 - 1e-9)
            and all(rate >= other * (1 - 1e-9) for other, path in zip(rates, flows, strict=True) if link in path)
            for link in flow
        )
