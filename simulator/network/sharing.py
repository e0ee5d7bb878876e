"""Max-min fair rates of flows that share links, for engines that let collectives contend.

Progressive filling (Bertsekas and Gallager, "Data Networks", section 6.5.2): every flow's rate grows alike until a
link is full; its flows stop, the others grow on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def fair_rates(flows: Sequence[Sequence[str]], capacities: Mapping[str, float]) -> list[float]:
    """Rate of each flow.

    Args:
        flows: the links that each flow crosses; a link named twice carries it twice.
        capacities: bytes a second of each link, at least 0.

    Returns:
        Bytes a second of each flow, in the flows' order; infinite for a flow that crosses no link.

    Raises:
        KeyError: a flow crosses a link without a capacity.
    """
    rates = [float("inf")] * len(flows)
    left = {link: capacities[link] for flow in flows for link in flow}
    growing = {i for i, flow in enumerate(flows) if flow}
    level = 0.0
    while growing:
        users = dict.fromkeys(left, 0)
        for i in growing:
            for link in flows[i]:
                users[link] += 1
        room = {link: max(0.0, left[link]) / count for link, count in users.items() if count}
        step = min(room.values())
        level += step
        for link, count in users.items():
            left[link] -= step * count
        full = {link for link, growth in room.items() if growth <= step}
        stopped = {i for i in growing if full.intersection(flows[i])}
        for i in stopped:
            rates[i] = level
        growing -= stopped
    return rates
