"""Compiled loops for graphs that are two sets of chains, such as grids: exact solutions along every chain."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types

from fedkin.solvers.kernels.bundles import I1, R1, W1, W2
from fedkin.solvers.kernels.jit import FLOAT, INT, bundle, outlined, part, readable, writable

_I2, _V1 = readable(types.int32, 2), writable(types.int32, 1)


class Links(NamedTuple):
    """Chains of sites: chain c visits ``nodes[starts[c]:starts[c + 1]]``.

    ``edges[k]`` is the edge after place k, ``sign[k]`` is 1 where its head comes first, ``radius[k]`` bounds its dual.
    """

    starts: Any
    nodes: Any
    edges: Any
    sign: Any
    radius: Any


LINKS = bundle(Links, I1, I1, I1, R1, R1)


@part
def _chain_prox(y: Any, a: Any, radius: Any, x: Any, n: int) -> None:
    """``argmin_x sum_k a_k (x_k - y_k)^2 / 2 + sum_k radius_k |x_k - x_{k+1}|`` for the first ``n`` entries.

    Condat's direct method (2013), with weights. A stretch from ``start`` on has the value ``low`` if the next jump is
    downwards and ``high`` if it is upwards; ``under`` and ``over`` are the duals that would belong to them at k, and
    the stretch ends where these last touched their bounds. ``radius[n-1]`` counts as 0.
    """
    start, k, k_low, k_high = 0, 0, 0, 0
    r = radius[0] if n > 1 else 0.0
    weight = a[0]
    low, high = y[0] - r / weight, y[0] + r / weight
    under, over = r, -r
    while k < n - 1:
        r = radius[k + 1] if k + 2 < n else 0.0
        next_under = under + a[k + 1] * (y[k + 1] - low)
        next_over = over + a[k + 1] * (y[k + 1] - high)
        if next_under < -r:
            # even the lowest value is too high for what comes next: jump down where it last was tight
            while start <= k_low:
                x[start] = low
                start += 1
            before, k = radius[start - 1], start
            r, weight = radius[k] if k + 1 < n else 0.0, a[k]
            low, high = y[k] + (before - r) / weight, y[k] + (before + r) / weight
            under, over, k_low, k_high = r, -r, k, k
        elif next_over > r:
            while start <= k_high:
                x[start] = high
                start += 1
            before, k = radius[start - 1], start
            r, weight = radius[k] if k + 1 < n else 0.0, a[k]
            low, high = y[k] - (before + r) / weight, y[k] - (before - r) / weight
            under, over, k_low, k_high = r, -r, k, k
        else:
            k += 1
            weight += a[k]
            under, over = next_under, next_over
            if under >= r:
                low += (under - r) / weight
                under, k_low = r, k
            if over <= -r:
                high += (over + r) / weight
                over, k_high = -r, k
    while start < n:
        x[start] = low
        start += 1


@outlined(types.void, INT, INT, LINKS, R1, R1, R1, W1)
def chain_step(lo: int, hi: int, links: Any, a: Any, b: Any, v: Any, rest: Any) -> None:
    """What the exact solution on chains ``lo .. hi`` leaves: ``rest = b - v - a x``, a balance of duals."""
    starts, nodes, radius = links.starts, links.nodes, links.radius
    longest = 0
    for c in range(lo, hi):
        longest = max(longest, starts[c + 1] - starts[c])
    y, weight, x = np.empty(longest), np.empty(longest), np.empty(longest)
    for c in range(lo, hi):
        first, n = starts[c], starts[c + 1] - starts[c]
        for k in range(n):
            i = nodes[first + k]
            weight[k] = a[i]
            y[k] = (b[i] - v[i]) / a[i]
        _chain_prox(y, weight, radius[first : first + n], x, n)
        for k in range(n):
            rest[nodes[first + k]] = weight[k] * (y[k] - x[k])


@outlined(FLOAT, INT, INT, R1, R1, R1, R1)
def turn(lo: int, hi: int, a: Any, v: Any, new: Any, old: Any) -> float:
    """``<v - new, new - old>`` in the metric of the duals: momentum has turned against descent when it is positive."""
    total = 0.0
    for i in range(lo, hi):
        total += (v[i] - new[i]) * (new[i] - old[i]) / a[i]
    return total


@outlined(types.void, INT, INT, FLOAT, W1, R1, W1)
def push(lo: int, hi: int, momentum: float, v: Any, new: Any, old: Any) -> None:
    """``v = new + momentum (new - old)``, ``old = new``."""
    for i in range(lo, hi):
        v[i] = new[i] + momentum * (new[i] - old[i])
        old[i] = new[i]


@outlined(types.void, INT, INT, LINKS, R1, INT, W2)
def chain_duals(lo: int, hi: int, links: Any, balance: Any, column: int, alpha: Any) -> None:
    """Edge duals of chains ``lo .. hi`` from their balances, by summing along the chain; kept inside their balls."""
    starts, nodes, edges, sign, radius = links.starts, links.nodes, links.edges, links.sign, links.radius
    for c in range(lo, hi):
        total = 0.0
        for k in range(starts[c], starts[c + 1] - 1):
            total += balance[nodes[k]]
            alpha[edges[k], column] = sign[k] * min(max(total, -radius[k]), radius[k])


@outlined(INT, _I2, _I2, _V1, _V1, _V1)
def walk(neighbour: Any, edge: Any, starts: Any, nodes: Any, edges: Any) -> int:
    """Follow chains from end to end; returns their number, or -1 when some sites form a ring.

    ``neighbour (V, 2)`` and ``edge (V, 2)`` hold -1 where a site has fewer than two neighbours.
    """
    n = neighbour.shape[0]
    seen = np.zeros(n, dtype=np.bool_)
    count, place = 0, 0
    for first in range(n):
        if seen[first] or (neighbour[first, 0] >= 0 and neighbour[first, 1] >= 0):
            continue
        starts[count] = place
        count += 1
        i = first
        while i >= 0:
            seen[i] = True
            nodes[place] = i
            edges[place] = -1
            following = -1
            for side in range(2):
                j = neighbour[i, side]
                if j >= 0 and not seen[j]:
                    following = j
                    edges[place] = edge[i, side]
            place += 1
            i = following
    starts[count] = place
    return count if place == n else -1
