"""Where a site goes, and what becomes of the sums: parts of the sweeps."""

from __future__ import annotations

import math

import numpy as np

from fedkin.kin.kernels.bundles import LANES
from fedkin.solvers.jit import part


@part
def free_group(groups, old, most):  # type: ignore[no-untyped-def]
    """An empty group (``old`` if its last site has just left it, -1 where there are ``most``), and how many to ask."""
    if groups.n[old] == 0:
        return old, groups.used[0]
    while groups.n[groups.used[0] - 1] == 0:
        groups.used[0] -= 1
    free = 0
    while free < groups.used[0] and groups.n[free] > 0:
        free += 1
    return (free if free < most else -1), groups.used[0]


@part
def edges_to(sites, u, used, weight):  # type: ignore[no-untyped-def]
    """Weights of the edges between a site and each group, into the second half of ``weight``."""
    half = weight.size // 2
    for k in range(used):
        weight[half + k] = 0.0
    for t in range(sites.first[u], sites.first[u + 1]):
        weight[half + sites.z[sites.neighbour[t]]] += sites.weight[t]


@part
def choose(sites, u, groups, used, free, odds, weight, same):  # type: ignore[no-untyped-def]
    """A group for a site, drawn by what joining it adds, ``new - log``; and the entropy of that draw."""
    half, z = weight.size // 2, sites.z
    top, others = -np.inf, 0
    for k in range(used):
        weight[k] = -np.inf
        if groups.n[k] > 0:
            others += 1
            edges = weight[half + k]
            gain = groups.new[k] - groups.log[k] + edges * odds[1] + (groups.n[k] - edges) * odds[2]
            weight[k] = gain + math.log(groups.n[k] + odds[3])
            top = max(top, weight[k])
    weight[used] = -np.inf
    if free >= 0:  # a new group
        weight[used] = sites.alone[u] + odds[0] + (odds[others + 5] - odds[others + 4] if others > 0 else 0.0)
    top = max(top, weight[used])
    total, entropy = 0.0, 0.0
    for k in range(used + 1):
        weight[k] = math.exp(weight[k] - top) if weight[k] > top - 50.0 else 0.0
        total += weight[k]
    for k in range(used + 1):
        weight[k] /= total
        if weight[k] > 1e-12:
            entropy -= weight[k] * math.log(weight[k])
    if same.size:
        for v in range(len(same)):
            if v != u:
                same[u, v] += weight[z[v]]
    left, chosen = sites.chance[u], 0
    while chosen < used and (left > weight[chosen] or weight[chosen] == 0.0):
        left -= weight[chosen]
        chosen += 1
    if chosen == used:
        chosen = free if free >= 0 else z[u]
    return chosen, entropy


@part
def move(sites, groups, u, chosen):  # type: ignore[no-untyped-def]
    """Take a site from its group to another."""
    old = sites.z[u]
    sites.z[u] = chosen
    groups.n[old] -= 1
    groups.n[chosen] += 1
    groups.used[0] = max(groups.used[0], chosen + 1)
    empty = groups.n[old] == 0
    a, i, b, j = old // LANES, old % LANES, chosen // LANES, chosen % LANES
    for t in range(sites.sums.shape[1]):
        # nothing is left of an empty group, rounding errors included
        groups.sums[a, t, i] = 0.0 if empty else groups.sums[a, t, i] - sites.sums[u, t]
        groups.sums[b, t, j] += sites.sums[u, t]
