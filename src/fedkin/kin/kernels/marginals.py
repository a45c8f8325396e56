"""What sums over members say with groups integrated out.

Loops are written out, since every numpy function takes the compiler a second or so.
"""

from __future__ import annotations

import math

from fedkin.kin.kernels.bundles import GROUPS, LANES, PRIOR, ROOM, W1, W2, W3
from fedkin.kin.kernels.lanes import at_least, every, lanes, put, square_root
from fedkin.solvers.kernels.jit import INT, kernel, part


@part
def reduce_lanes(sums, block, site, prior, room):  # type: ignore[no-untyped-def]
    """``[e'(H + P)^-1 e - log|H + P| + log|P|] / 2`` into ``room.out``, where ``e = c + P m``.

    ``H`` and ``c`` are those of a block of ``sums (B, T + p, LANES)``, with ``room.take`` times a site's added. Leaves
    in ``room.R`` the Cholesky factor ``U`` of ``H + P = U'U``, with 1 over its diagonal in place of that, and
    ``U'^-1 e`` as its last column.
    """
    R, p = room.R, len(room.x)
    wide, first = p + 1, block * sums.shape[1]
    take, half = lanes(room.take, 0), p * (p + 1) // 2
    t, squares, product = 0, every(0.0), every(1.0)
    put(room.out, 0, squares)
    for k in range(p):
        # numbers stay in registers while rows above are taken off: first the pivot's, then those right of it, by fours
        pull = lanes(sums, first + half + k) + take * every(site[half + k]) + every(prior.pull[k])
        pivot = lanes(sums, first + t) + take * every(site[t]) + every(prior.precision[k])
        for i in range(k):
            above = lanes(R, i * wide + k)
            pivot = pivot - above * above
            pull = pull - above * lanes(R, i * wide + p)
        pivot = at_least(pivot, 1e-10)
        product = product * (pivot / every(prior.precision[k]))
        scale = every(1.0) / square_root(pivot)
        pull = pull * scale
        squares = squares + pull * pull
        put(R, k * wide + k, scale)
        put(R, k * wide + p, pull)
        if k % 8 == 7 or k == p - 1:  # few logarithms, no overflow
            put(room.x, 0, product)
            for v in range(LANES):
                room.out[v] -= math.log(room.x[0, v])
            product = every(1.0)
        j, t = k + 1, t + 1
        while j + 3 < p:
            a = lanes(sums, first + t) + take * every(site[t])
            b = lanes(sums, first + t + 1) + take * every(site[t + 1])
            c = lanes(sums, first + t + 2) + take * every(site[t + 2])
            d = lanes(sums, first + t + 3) + take * every(site[t + 3])
            for i in range(k):
                above, at = lanes(R, i * wide + k), i * wide + j
                a = a - above * lanes(R, at)
                b = b - above * lanes(R, at + 1)
                c = c - above * lanes(R, at + 2)
                d = d - above * lanes(R, at + 3)
            at = k * wide + j
            put(R, at, a * scale)
            put(R, at + 1, b * scale)
            put(R, at + 2, c * scale)
            put(R, at + 3, d * scale)
            j, t = j + 4, t + 4
        while j < p:
            a = lanes(sums, first + t) + take * every(site[t])
            for i in range(k):
                a = a - lanes(R, i * wide + k) * lanes(R, i * wide + j)
            put(R, k * wide + j, a * scale)
            j, t = j + 1, t + 1
    put(room.out, 0, every(0.5) * (lanes(room.out, 0) + squares))


@kernel(INT, GROUPS, W1, PRIOR, ROOM)
def join(groups, site, prior, room):  # type: ignore[no-untyped-def]
    """Log marginals of all groups with ``take`` times a site's sums added, into ``new``; how many blocks."""
    blocks = (groups.used[0] + LANES - 1) // LANES
    for block in range(blocks):
        reduce_lanes(groups.sums, block, site, prior, room)
        put(groups.new, block, lanes(room.out, 0))
    return blocks


@kernel(INT, GROUPS, W1, PRIOR, ROOM, W3, W3)
def centres(groups, site, prior, room, mean, draw):  # type: ignore[no-untyped-def]
    """Means of the groups' centres ``(B, p, LANES)``, draws where ``draw`` holds noise, log marginals into ``new``.

    ``site (T + p,)`` is any that can be multiplied by 0.
    """
    blocks, p, R = (groups.used[0] + LANES - 1) // LANES, len(room.x), room.R
    put(room.take, 0, every(0.0))
    for block in range(blocks):
        reduce_lanes(groups.sums, block, site, prior, room)
        put(groups.new, block, lanes(room.out, 0))
        first, wide = block * p, p + 1
        for i in range(p - 1, -1, -1):
            middle = lanes(R, i * wide + p)
            drawn = middle + lanes(draw, first + i)
            for j in range(i + 1, p):
                right = lanes(R, i * wide + j)
                middle = middle - right * lanes(mean, first + j)
                drawn = drawn - right * lanes(draw, first + j)
            scale = lanes(R, i * wide + i)
            put(mean, first + i, middle * scale)
            put(draw, first + i, drawn * scale)
    return blocks


@kernel(INT, W2, PRIOR, ROOM, W1)
def alone(sums, prior, room, out):  # type: ignore[no-untyped-def]
    """Log marginals of groups of one site each, ``sums (V, T + p)``, into ``out (V,)``; how many."""
    V, turned = len(sums), room.one
    put(room.take, 0, every(0.0))
    for block in range((V + LANES - 1) // LANES):
        for v in range(LANES):
            u = min(block * LANES + v, V - 1)
            for t in range(sums.shape[1]):
                turned[0, t, v] = sums[u, t]
        reduce_lanes(turned, 0, sums[0], prior, room)
        for v in range(min(LANES, V - block * LANES)):
            out[block * LANES + v] = room.out[v]
    return V
