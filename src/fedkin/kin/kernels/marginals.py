"""What sums over members say with groups integrated out.

Loops are written out, since every numpy function takes the compiler a second or so.
"""

from __future__ import annotations

import math

from fedkin.kin.kernels.bundles import GROUPS, LANES, PRIOR, ROOM, W1, W2, W3
from fedkin.solvers.kernels.jit import INT, kernel, part


@part
def load(groups, block, site, room):  # type: ignore[no-untyped-def]
    """Sums of the groups of a block, with ``take`` times a site's added, to where they are reduced."""
    p, t = len(room.x), 0
    for i in range(p):
        for j in range(i, p):
            for v in range(LANES):
                room.R[i, j, v] = groups.sums[block, t, v] + room.take[v] * site[t]
            t += 1
    for i in range(p):
        for v in range(LANES):
            room.x[i, v] = groups.sums[block, t, v] + room.take[v] * site[t]
        t += 1


@part
def reduce_lanes(room, prior):  # type: ignore[no-untyped-def]
    """``[e'(H + P)^-1 e - log|H + P| + log|P|] / 2`` into ``room.out``, where ``e = c + P m``.

    Leaves in ``R`` the pivots of ``H + P`` and the rows right of them, in ``x`` the solved right-hand sides.
    """
    R, x, row, out = room.R, room.x, room.row, room.out
    p = len(x)
    for v in range(LANES):
        out[v], row[p, v] = 0.0, 1.0
    for k in range(p):
        for v in range(LANES):
            pivot = max(R[k, k, v] + prior.precision[k], 1e-10)
            R[k, k, v] = pivot
            row[p, v] *= pivot / prior.precision[k]
            row[k, v] = 1.0 / math.sqrt(pivot)
            x[k, v] = (x[k, v] + prior.pull[k]) * row[k, v]
            out[v] += x[k, v] * x[k, v]
        if k % 8 == 7 or k == p - 1:  # few logarithms, no overflow
            for v in range(LANES):
                out[v] -= math.log(row[p, v])
                row[p, v] = 1.0
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


@kernel(INT, GROUPS, W1, PRIOR, ROOM)
def join(groups, site, prior, room):  # type: ignore[no-untyped-def]
    """Log marginals of all groups with ``take`` times a site's sums added, into ``new``; how many blocks."""
    blocks = (groups.used[0] + LANES - 1) // LANES
    for block in range(blocks):
        load(groups, block, site, room)
        reduce_lanes(room, prior)
        for v in range(LANES):
            groups.new[block * LANES + v] = room.out[v]
    return blocks


@kernel(INT, GROUPS, W1, PRIOR, ROOM, W3, W3)
def centres(groups, site, prior, room, mean, draw):  # type: ignore[no-untyped-def]
    """Means of the groups' centres ``(B, p, LANES)``, draws where ``draw`` holds noise, log marginals into ``new``.

    ``site (T + p,)`` is any that can be multiplied by 0.
    """
    blocks, p, R, x = (groups.used[0] + LANES - 1) // LANES, len(room.x), room.R, room.x
    for v in range(LANES):
        room.take[v] = 0.0
    for block in range(blocks):
        load(groups, block, site, room)
        reduce_lanes(room, prior)
        for v in range(LANES):
            groups.new[block * LANES + v] = room.out[v]
        for i in range(p - 1, -1, -1):
            for v in range(LANES):
                root = math.sqrt(R[i, i, v])
                mean[block, i, v] = x[i, v] * root
                draw[block, i, v] = (x[i, v] + draw[block, i, v]) * root
            for j in range(i + 1, p):
                for v in range(LANES):
                    mean[block, i, v] -= R[i, j, v] * mean[block, j, v]
                    draw[block, i, v] -= R[i, j, v] * draw[block, j, v]
            for v in range(LANES):
                mean[block, i, v] /= R[i, i, v]
                draw[block, i, v] /= R[i, i, v]
    return blocks


@kernel(INT, W2, PRIOR, ROOM, W1)
def alone(sums, prior, room, out):  # type: ignore[no-untyped-def]
    """Log marginals of groups of one site each, ``sums (V, T + p)``, into ``out (V,)``; how many."""
    V, p = len(sums), len(room.x)
    for block in range((V + LANES - 1) // LANES):
        for v in range(LANES):
            u, t = min(block * LANES + v, V - 1), 0
            for i in range(p):
                for j in range(i, p):
                    room.R[i, j, v] = sums[u, t]
                    t += 1
            for i in range(p):
                room.x[i, v] = sums[u, t + i]
        reduce_lanes(room, prior)
        for v in range(min(LANES, V - block * LANES)):
            out[block * LANES + v] = room.out[v]
    return V
