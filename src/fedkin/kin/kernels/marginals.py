"""Sums over the members of groups, and what they say with groups integrated out.

Loops are written out, since every numpy function takes the compiler a second or so.
"""

from __future__ import annotations

import math

import numpy as np

from fedkin.kin.kernels.bundles import LANES, Groups
from fedkin.solvers.kernels.jit import part


@part
def make_groups(most, p, drawn):  # type: ignore[no-untyped-def]
    """Room for ``most`` groups, all of them empty, and for ``phi`` where groups are drawn."""
    blocks = (most + LANES - 1) // LANES
    return Groups(
        np.zeros((blocks, p, p, LANES)),
        np.zeros((blocks, p, LANES)),
        np.zeros(blocks * LANES, np.int64),
        np.zeros(blocks * LANES),
        np.zeros(blocks * LANES),
        np.zeros((blocks * LANES, p)),
        np.zeros((blocks * LANES, p)),
        np.zeros((blocks if drawn else 1, p + p * (p + 1) // 2, LANES)),
        np.zeros(1, np.int64),
        np.ones(LANES),
        np.zeros((p, p, LANES)),
        np.zeros((p, LANES)),
        np.zeros((p + 1, LANES)),
        np.zeros((p, p)),
        np.zeros(p),
    )


@part
def log_marginal(H, c, prior, R, x):  # type: ignore[no-untyped-def]
    """``[c'(H + P)^-1 c - log|H + P| + log|P|] / 2`` with ``P = diag(prior)``, for one site.

    Leaves the Cholesky factor ``R'R = H + P`` in the upper triangle of ``R`` and ``R'^-1 c`` in ``x``.
    """
    p, t = c.size, 0
    for i in range(p):
        for j in range(i, p):
            R[i, j] = H[t]
            t += 1
        x[i] = c[i]
    return reduce_marginal(prior, R, x)


@part
def reduce_marginal(prior, R, x):  # type: ignore[no-untyped-def]
    """`log_marginal` of the ``H`` in the upper triangle of ``R`` and the ``c`` in ``x``, which are overwritten."""
    p = x.size
    square, logs, product = 0.0, 0.0, 1.0
    for i in range(p):
        R[i, i] += prior[i]
    for k in range(p):
        pivot = max(R[k, k], 1e-10)
        product *= pivot / prior[k]
        if product > 1e150 or product < 1e-150:  # few logarithms, no overflow
            logs += math.log(product)
            product = 1.0
        scale = 1.0 / math.sqrt(pivot)
        for j in range(k, p):
            R[k, j] *= scale
        x[k] *= scale
        square += x[k] * x[k]
        for i in range(k + 1, p):
            factor = R[k, i]
            x[i] -= factor * x[k]
            for j in range(i, p):
                R[i, j] -= factor * R[k, j]
    return 0.5 * (square - logs - math.log(product))


@part
def log_marginals(groups, block, H, c, prior, out):  # type: ignore[no-untyped-def]
    """`log_marginal` of the groups of a block, with ``take`` times ``H`` and ``c`` added, into ``out (LANES,)``."""
    p = c.size
    R, x, row, take = groups.lanes, groups.x, groups.row, groups.take
    product = row[p]
    for v in range(LANES):
        out[v], product[v] = 0.0, 1.0
    t = 0
    for i in range(p):
        for j in range(i, p):
            for v in range(LANES):
                R[i, j, v] = groups.H[block, i, j, v] + take[v] * H[t]
            t += 1
        for v in range(LANES):
            R[i, i, v] += prior[i]
            x[i, v] = groups.c[block, i, v] + take[v] * c[i]
    for k in range(p):
        for v in range(LANES):
            pivot = max(R[k, k, v], 1e-10)
            product[v] *= pivot / prior[k]
            row[k, v] = 1.0 / math.sqrt(pivot)
            x[k, v] *= row[k, v]
            out[v] += x[k, v] * x[k, v]
        if k % 8 == 7 or k == p - 1:  # few logarithms, no overflow
            for v in range(LANES):
                out[v] -= math.log(product[v])
                product[v] = 1.0
        for j in range(k + 1, p):
            for v in range(LANES):
                row[j, v] = R[k, j, v] * row[k, v]
        for i in range(k + 1, p):
            for v in range(LANES):
                x[i, v] -= row[i, v] * x[k, v]
            # all reads before all writes: only then can the compiler use vector instructions
            f0, f1, f2, f3 = row[i, 0], row[i, 1], row[i, 2], row[i, 3]
            f4, f5, f6, f7 = row[i, 4], row[i, 5], row[i, 6], row[i, 7]
            for j in range(i, p):
                a0, a1 = R[i, j, 0] - f0 * row[j, 0], R[i, j, 1] - f1 * row[j, 1]
                a2, a3 = R[i, j, 2] - f2 * row[j, 2], R[i, j, 3] - f3 * row[j, 3]
                a4, a5 = R[i, j, 4] - f4 * row[j, 4], R[i, j, 5] - f5 * row[j, 5]
                a6, a7 = R[i, j, 6] - f6 * row[j, 6], R[i, j, 7] - f7 * row[j, 7]
                R[i, j, 0], R[i, j, 1], R[i, j, 2], R[i, j, 3] = a0, a1, a2, a3
                R[i, j, 4], R[i, j, 5], R[i, j, 6], R[i, j, 7] = a4, a5, a6, a7
    for v in range(LANES):
        out[v] *= 0.5


@part
def factorise(groups, k, prior):  # type: ignore[no-untyped-def]
    """`log_marginal` of one group: its Cholesky factor in ``groups.R``, the solved right-hand side in ``groups.y``."""
    block, lane = k // LANES, k % LANES
    p = prior.size
    for i in range(p):
        groups.y[i] = groups.c[block, i, lane]
        for j in range(i, p):
            groups.R[i, j] = groups.H[block, i, j, lane]
    return reduce_marginal(prior, groups.R, groups.y)


@part
def add_site(groups, k, H, c, sign):  # type: ignore[no-untyped-def]
    """Put a site into group k (sign 1), or take it out (sign -1)."""
    block, lane, t = k // LANES, k % LANES, 0
    for i in range(c.size):
        groups.c[block, i, lane] += sign * c[i]
        for j in range(i, c.size):
            groups.H[block, i, j, lane] += sign * H[t]
            t += 1
    groups.n[k] += sign
    groups.used[0] = max(groups.used[0], k + 1)


@part
def back_substitute(R, x, out):  # type: ignore[no-untyped-def]
    """``out = R^-1 x``."""
    for i in range(x.size - 1, -1, -1):
        total = x[i]
        for j in range(i + 1, x.size):
            total -= R[i, j] * out[j]
        out[i] = total / R[i, i]


@part
def inverse_of_factor(R, out):  # type: ignore[no-untyped-def]
    """``out = (R'R)^-1``."""
    p = len(R)
    root = np.zeros((p, p))
    for j in range(p):
        root[j, j] = 1.0 / R[j, j]
        for i in range(j - 1, -1, -1):
            total = 0.0
            for k in range(i + 1, j + 1):
                total += R[i, k] * root[k, j]
            root[i, j] = -total / R[i, i]
    for i in range(p):
        for j in range(i, p):
            total = 0.0
            for k in range(j, p):
                total += root[i, k] * root[j, k]
            out[i, j] = total
            out[j, i] = total


@part
def multiply(A, B, out):  # type: ignore[no-untyped-def]
    for i in range(len(A)):
        for j in range(len(A)):
            out[i, j] = 0.0
    add_product(A, B, out)


@part
def add_product(A, B, out):  # type: ignore[no-untyped-def]
    """``out += A B``."""
    for i in range(len(A)):
        for k in range(len(A)):
            factor = A[i, k]
            for j in range(len(A)):
                out[i, j] += factor * B[k, j]


@part
def assign(target, values):  # type: ignore[no-untyped-def]
    for t in range(target.size):
        target[t] = values[t]


@part
def log_beta(x, y):  # type: ignore[no-untyped-def]
    return math.lgamma(x) + math.lgamma(y) - math.lgamma(x + y)


@part
def set_phi(groups, k):  # type: ignore[no-untyped-def]
    """What makes a site's ``c`` and ``H`` into ``c'nu - nu'H nu / 2`` at the draw of group k."""
    block, lane, p = k // LANES, k % LANES, groups.draw.shape[1]
    t = p
    for i in range(p):
        groups.phi[block, i, lane] = groups.draw[k, i]
        for j in range(i, p):
            groups.phi[block, t, lane] = (-0.5 if i == j else -1.0) * groups.draw[k, i] * groups.draw[k, j]
            t += 1


@part
def log_likelihoods(groups, block, H, c, out):  # type: ignore[no-untyped-def]
    """``c'nu - nu'H nu / 2`` at the draws of the groups of a block, into ``out (LANES,)``."""
    p, phi = c.size, groups.phi
    a0, a1, a2, a3, a4, a5, a6, a7 = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    for t in range(p + H.size):
        x = c[t] if t < p else H[t - p]
        a0, a1 = a0 + x * phi[block, t, 0], a1 + x * phi[block, t, 1]
        a2, a3 = a2 + x * phi[block, t, 2], a3 + x * phi[block, t, 3]
        a4, a5 = a4 + x * phi[block, t, 4], a5 + x * phi[block, t, 5]
        a6, a7 = a6 + x * phi[block, t, 6], a7 + x * phi[block, t, 7]
    out[0], out[1], out[2], out[3] = a0, a1, a2, a3
    out[4], out[5], out[6], out[7] = a4, a5, a6, a7
