"""What sums over members say with groups integrated out.

Loops are written out, since every numpy function takes the compiler a second or so.
"""

from __future__ import annotations

import math

from fedkin.kin.kernels.bundles import GROUPS, LANES, PRIOR, ROOM, W1, W2, W3
from fedkin.kin.kernels.lanes import at_least, every, lanes, put, square_root
from fedkin.solvers.jit import INT, kernel, part


@part
def row_of(i, p):  # type: ignore[no-untyped-def]
    """Where row i of an upper triangle with a column more begins, less i."""
    return i * p - i * (i - 1) // 2


@part
def reduce_lanes(sums, block, site, prior, room):  # type: ignore[no-untyped-def]
    """``[e'(H + P)^-1 e - log|H + P| + log|P|] / 2`` into ``room.out``, where ``e = c + P m``.

    ``H`` and ``c`` are those of a block of ``sums (B, T + p, LANES)``, with ``room.take`` times a site's added. Leaves
    in ``room.R`` the Cholesky factor ``U`` of ``H + P = U'U``, with 1 over its diagonal in place of that, and
    ``U'^-1 e`` as its last column: row i from its diagonal on, so that column j is at ``row_of(i, p) + j``.
    """
    R, p = room.R, len(room.x)
    first, half, take = block * sums.shape[1], p * (p + 1) // 2, lanes(room.take, 0)
    t, squares, product = 0, every(0.0), every(1.0)
    put(room.out, 0, squares)
    for k in range(p):
        # numbers stay in registers while rows above are taken off: first the pivot, what it is solved for and up to
        # three right of it (or the second of these again), then four at a time
        end, rest, row = half + k, (p - k - 1) % 4, row_of(k, p)
        t1, j1 = (t + 1, k + 1) if rest > 0 else (end, p)
        t2, j2 = (t + 2, k + 2) if rest > 1 else (end, p)
        t3, j3 = (t + 3, k + 3) if rest > 2 else (end, p)
        pivot = lanes(sums, first + t) + take * every(site[t]) + every(prior.precision[k])
        pull = lanes(sums, first + end) + take * every(site[end]) + every(prior.pull[k])
        a = lanes(sums, first + t1) + take * every(site[t1])
        b = lanes(sums, first + t2) + take * every(site[t2])
        c = lanes(sums, first + t3) + take * every(site[t3])
        at = 0
        for i in range(k):
            above = lanes(R, at + k)
            pivot = pivot - above * above
            pull = pull - above * lanes(R, at + p)
            a = a - above * lanes(R, at + j1)
            b = b - above * lanes(R, at + j2)
            c = c - above * lanes(R, at + j3)
            at += p - i
        pivot = at_least(pivot, 1e-10)
        product = product * (pivot * every(1.0 / prior.precision[k]))
        scale = every(1.0) / square_root(pivot)
        pull = pull * scale
        squares = squares + pull * pull
        put(R, row + k, scale)
        put(R, row + j1, a * scale)
        put(R, row + j2, b * scale)
        put(R, row + j3, c * scale)
        put(R, row + p, pull)
        if k % 16 == 15 or k == p - 1:  # few logarithms, no overflow
            put(room.x, 0, product)
            for v in range(LANES):
                room.out[v] -= math.log(room.x[0, v])
            product = every(1.0)
        t += 1 + rest
        for j in range(k + 1 + rest, p, 4):
            a = lanes(sums, first + t) + take * every(site[t])
            b = lanes(sums, first + t + 1) + take * every(site[t + 1])
            c = lanes(sums, first + t + 2) + take * every(site[t + 2])
            d = lanes(sums, first + t + 3) + take * every(site[t + 3])
            at = 0
            for i in range(k):
                above = lanes(R, at + k)
                a = a - above * lanes(R, at + j)
                b = b - above * lanes(R, at + j + 1)
                c = c - above * lanes(R, at + j + 2)
                d = d - above * lanes(R, at + j + 3)
                at += p - i
            put(R, row + j, a * scale)
            put(R, row + j + 1, b * scale)
            put(R, row + j + 2, c * scale)
            put(R, row + j + 3, d * scale)
            t += 4
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
        first = block * p
        for i in range(p - 1, -1, -1):
            row = row_of(i, p)
            middle = lanes(R, row + p)
            drawn = middle + lanes(draw, first + i)
            for j in range(i + 1, p):
                right = lanes(R, row + j)
                middle = middle - right * lanes(mean, first + j)
                drawn = drawn - right * lanes(draw, first + j)
            scale = lanes(R, row + i)
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
