"""Groups that split and merge as a whole: Metropolis steps that moves of single sites would take for ever to do.

Two sites are picked at random. If they are in different groups these may merge, if they are in one group it may split
around them, the other members joining one of the two after another (Dahl 2003). Steps are accepted so that chains keep
their target.
"""

from __future__ import annotations

import math

import numpy as np

from fedkin.kin.kernels.bundles import LANES
from fedkin.kin.kernels.draws import shuffle
from fedkin.kin.kernels.marginals import add_site, factorise, reduce_marginal
from fedkin.solvers.kernels.jit import part

#: Pairs of sites in a sweep, and how often they may split: rarely, since that takes longest, and merging is what chains
#: from fine starts need.
TRIES, SPLITS = 20, 0.05


@part
def split_and_merge(sites, state, course, groups, c, prior, rng):  # type: ignore[no-untyped-def]
    """Try to split or merge groups, with `groups` collected, some times."""
    V, z, r, most = len(c), state.z, state.share[0], course.most
    side = np.zeros(V, np.int64)
    order = np.zeros(V, np.int64)
    logs = np.zeros(2)
    odds = math.log(SPLITS / (1.0 - SPLITS))
    for _ in range(TRIES):
        t = 0
        for k in range(groups.used[0]):
            t += groups.n[k] > 0
        splits = rng.random() < SPLITS
        one = int(rng.random() * V)
        other = int(rng.random() * (V - 1))
        other += other >= one
        limit = math.log(1.0 - rng.random())
        a, b = z[one], z[other]
        if (a == b) != splits:
            continue
        if splits:
            b = 0
            while b < most and groups.n[b] > 0:
                b += 1
            if b == most:
                continue
            both, gain = factorise(groups, a, prior), 0.0
        else:
            both = log_together(groups, a, b, prior)
            logs[0], logs[1] = factorise(groups, a, prior), factorise(groups, b, prior)
            gain = split_gain(sites, state, course, z, a, b, groups.n[a], groups.n[b], logs, both)
            gain += course.partitions[t] - course.partitions[t - 1]
            if limit > odds - gain:  # whatever the way back is
                continue
        size = 0
        for u in range(V):
            side[u] = -1
            if u != one and u != other and (z[u] == a or z[u] == b):
                order[size] = u
                size += 1
        shuffle(order[:size], rng)
        side[one], side[other] = 0, 1
        path, first = share_out(
            sites, state, course, groups, c, prior, order[:size], one, other, splits, side, logs, rng
        )
        if splits:
            gain = split_gain(sites, state, course, side, 0, 1, first, size + 2 - first, logs, both)
            gain += course.partitions[t + 1] - course.partitions[t]
            if limit > gain - path - odds:
                continue
        elif limit > odds + path - gain:
            continue
        for u in range(V):  # who is in b alone changes
            if side[u] == 1:
                add_site(groups, z[u], sites.H[r, u], c[u], -1)
                z[u] = b if splits else a
                add_site(groups, z[u], sites.H[r, u], c[u], 1)


@part
def log_together(groups, a, b, prior):  # type: ignore[no-untyped-def]
    """The log marginal of two groups as one."""
    p, R, y = prior.size, groups.R, groups.y
    for i in range(p):
        y[i] = groups.c[a // LANES, i, a % LANES] + groups.c[b // LANES, i, b % LANES]
        for j in range(i, p):
            R[i, j] = groups.H[a // LANES, i, j, a % LANES] + groups.H[b // LANES, i, j, b % LANES]
    return reduce_marginal(prior, R, y)


@part
def split_gain(sites, state, course, labels, a, b, n_a, n_b, logs, both):  # type: ignore[no-untyped-def]
    """Log density with the groups ``a`` and ``b`` of ``labels`` apart, minus that with them together."""
    gain = logs[0] + logs[1] - both
    gain += math.lgamma(n_a + 1.0) + math.lgamma(n_b + 1.0) - math.lgamma(n_a + n_b + 1.0)
    if course.edges:
        between = 0.0
        for u in range(labels.size):
            if labels[u] == a:
                for t in range(sites.first[u], sites.first[u + 1]):
                    if labels[sites.neighbour[t]] == b:
                        between += sites.weight[t]
        r_in, r_out = state.scalars[2], state.scalars[3]
        gain += between * math.log(r_out / r_in)
        gain += (float(n_a) * n_b - between) * math.log((1.0 - r_out) / (1.0 - r_in))
    return gain


@part
def share_out(sites, state, course, groups, c, prior, order, one, other, drawn, side, logs, rng):  # type: ignore[no-untyped-def]
    """Members join ``one`` or ``other`` in this order, as is drawn, or as they are; log probability, size of the first.

    Leaves in ``side`` who is where, and in ``logs`` the log marginals of both.
    """
    r, p, z, R, y = state.share[0], prior.size, state.z, groups.R, groups.y
    edge = math.log(state.scalars[2] / state.scalars[3])
    gap = math.log((1.0 - state.scalars[2]) / (1.0 - state.scalars[3]))
    H, sums, new, weight = np.zeros((2, sites.H.shape[2])), np.zeros((2, p)), np.zeros(2), np.zeros(2)
    n, path = np.ones(2), 0.0
    for step in range(order.size + 2):
        u = order[step - 2] if step > 1 else (one if step == 0 else other)
        for s in range(2):
            if step < 2 and s != step:
                continue
            t = 0
            for i in range(p):
                y[i] = sums[s, i] + c[u, i]
                for j in range(i, p):
                    R[i, j] = H[s, t] + sites.H[r, u, t]
                    t += 1
            new[s] = reduce_marginal(prior, R, y)
            weight[s] = new[s] - logs[s] + math.log(n[s])
        at = step
        if step > 1:
            if course.edges:
                for s in range(2):
                    weight[s] += n[s] * gap
                for t in range(sites.first[u], sites.first[u + 1]):
                    s = side[sites.neighbour[t]]
                    if s >= 0:
                        weight[s] += sites.weight[t] * (edge - gap)
            ahead = weight[1] - weight[0]
            # log(1 + exp(x)) without overflow
            cost = max(ahead, 0.0) + math.log1p(math.exp(-abs(ahead)))
            stays = math.log(1.0 - rng.random()) < -cost if drawn else z[u] == z[one]
            at = 0 if stays else 1
            path += (0.0 if at == 0 else ahead) - cost
            side[u] = at
            n[at] += 1.0
        for i in range(p):
            sums[at, i] += c[u, i]
        for t in range(sites.H.shape[2]):
            H[at, t] += sites.H[r, u, t]
        logs[at] = new[at]
    return path, int(n[0])
