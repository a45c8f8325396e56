"""Sharing the members of a group out among two, for moves of whole groups."""

from __future__ import annotations

import math

from fedkin.kin.kernels.bundles import GROUPS, I1, LANES, MOVING, PRIOR, ROOM, W1
from fedkin.kin.kernels.marginals import reduce_lanes
from fedkin.solvers.jit import FLOAT, kernel


@kernel(FLOAT, MOVING, GROUPS, PRIOR, ROOM, W1, I1, I1, FLOAT)
def share_out(sites, groups, prior, room, odds, members, side, least):  # type: ignore[no-untyped-def]
    """Members join the first or the second of them, in this order, as is drawn or as they are; log probability of that.

    ``side (V,)``: 2 for members who draw, 3 or 4 for those who are to join the first or the second, -1 for all other
    sites; it is left with who is where, 0 or 1. ``groups``: two empty ones, left with log marginals and numbers.
    ``odds`` as in a sweep. It ends early once the log probability is below ``least``.
    """
    path = 0.0
    for v in range(LANES):
        room.take[v] = 1.0
    for step in range(members.size):
        u = members[step]
        reduce_lanes(groups.sums, 0, sites.sums[u], prior, room)
        at = step
        if step > 1:
            ahead = (room.out[1] - groups.log[1] + math.log(groups.n[1])) - (
                room.out[0] - groups.log[0] + math.log(groups.n[0])
            )
            ahead += (groups.n[1] - groups.n[0]) * odds[2]
            for t in range(sites.first[u], sites.first[u + 1]):
                other = side[sites.neighbour[t]]
                if 0 <= other < 2:
                    ahead += (2.0 * other - 1.0) * sites.weight[t] * (odds[1] - odds[2])
            # log(1 + exp(x)) without overflow
            cost = max(ahead, 0.0) + math.log(1.0 + math.exp(-abs(ahead)))
            at = side[u] - 3
            if at < 0:
                at = 0 if math.log(1.0 - sites.chance[u]) < -cost else 1
            path += (0.0 if at == 0 else ahead) - cost
            if path < least:
                break
        side[u] = at
        groups.n[at] += 1
        groups.log[at] = room.out[at]
        for t in range(sites.sums.shape[1]):
            groups.sums[0, t, at] += sites.sums[u, t]
    return path
