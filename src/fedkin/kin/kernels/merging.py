"""Greedy merging of groups, which finds starts for chains."""

from __future__ import annotations

import math

import numpy as np

from fedkin.kin.kernels.bundles import I1, J1, LANES, R1, R2
from fedkin.kin.kernels.marginals import add_site, factorise, log_marginals, make_groups
from fedkin.solvers.kernels.jit import FLOAT, INT, kernel, part


@part
def largest(values):  # type: ignore[no-untyped-def]
    """Where the largest value is."""
    at = 0
    for t in range(values.size):
        if values[t] > values[at]:
            at = t
    return at


@part
def merge_gains(groups, a, H, edges, prior, rates, gain, out):  # type: ignore[no-untyped-def]
    """What merging group ``a`` with each other group adds to the log evidence, into row and column a of ``gain``."""
    block, lane = a // LANES, a % LANES
    p, K = prior.size, len(gain)
    c, t = groups.y, 0
    for i in range(p):
        c[i] = groups.c[block, i, lane]
        for j in range(i, p):
            H[t] = groups.H[block, i, j, lane]
            t += 1
    for other in range(len(groups.H)):
        log_marginals(groups, other, H, c, prior, out)
        for v in range(LANES):
            b = other * LANES + v
            if b < K and b != a and groups.n[b] > 0:
                pairs = groups.n[a] * groups.n[b] - edges[a, b]
                gain[a, b] = out[v] - groups.log[a] - groups.log[b] + edges[a, b] * rates[0] + pairs * rates[1]
                gain[b, a] = gain[a, b]


@kernel(INT, R2, R2, R1, J1, J1, R1, FLOAT, FLOAT, I1)
def merge(H, c, prior, first, neighbour, weight, r_in, r_out, z):  # type: ignore[no-untyped-def]
    """Merge groups ``z (V,)`` (numbered 0..K-1), the best pair first, while the evidence rises; how many are left."""
    V, p = c.shape
    K = 0
    for u in range(V):
        K = max(K, z[u] + 1)
    rates = (math.log(r_in / r_out), math.log((1.0 - r_in) / (1.0 - r_out)))
    groups, edges = make_groups(K, p, False), np.zeros((K, K))
    gain, room, out = np.zeros((K, K)), np.zeros(H.shape[1]), np.zeros(LANES)
    gain.fill(-np.inf)
    for u in range(V):
        add_site(groups, z[u], H[u], c[u], 1)
        for t in range(first[u], first[u + 1]):
            edges[z[u], z[neighbour[t]]] += weight[t]
    for a in range(K):
        groups.log[a] = factorise(groups, a, prior)
    for a in range(K):
        merge_gains(groups, a, room, edges, prior, rates, gain, out)
    best, label = np.zeros(K, np.int64), np.zeros(K, np.int64)  # each group's best partner, and where it has gone
    for a in range(K):
        best[a] = largest(gain[a])
        label[a] = a
    left = K
    while left > 1:
        into = -1
        for a in range(K):
            if groups.n[a] > 0 and gain[a, best[a]] > (0.0 if into < 0 else gain[into, best[into]]):
                into = a
        if into < 0:
            break
        gone = best[into]
        block, lane = gone // LANES, gone % LANES
        for i in range(p):
            groups.c[into // LANES, i, into % LANES] += groups.c[block, i, lane]
            for j in range(i, p):
                groups.H[into // LANES, i, j, into % LANES] += groups.H[block, i, j, lane]
        groups.n[into] += groups.n[gone]
        groups.n[gone] = 0
        left -= 1
        for k in range(K):
            edges[into, k] += edges[gone, k]
            edges[k, into] = edges[into, k]
            gain[gone, k] = gain[k, gone] = -np.inf
            if label[k] == gone:
                label[k] = into
        groups.log[into] = factorise(groups, into, prior)
        merge_gains(groups, into, room, edges, prior, rates, gain, out)
        for a in range(K):
            if groups.n[a] > 0:
                if a == into or best[a] == into or best[a] == gone:
                    best[a] = largest(gain[a])
                elif gain[a, into] > gain[a, best[a]]:
                    best[a] = into
    for u in range(V):
        z[u] = label[z[u]]
    return left
