"""Every site's group, drawn given the groups' centres: for each pair of a site and a group p^2 operations, not p^3."""

from __future__ import annotations

from fedkin.kin.kernels.bundles import GROUPS, LANES, MOVING, PRIOR, ROOM, W1, W2, W3
from fedkin.kin.kernels.choice import choose, edges_to, free_group, move
from fedkin.kin.kernels.lanes import every, put
from fedkin.kin.kernels.marginals import reduce_lanes, row_of
from fedkin.solvers.jit import FLOAT, INT, kernel, part


@part
def log_likelihoods(phi, block, site, new):  # type: ignore[no-untyped-def]
    """``c'nu - nu'H nu / 2`` at the centres of a block, into ``new``."""
    a0, a1, a2, a3, a4, a5, a6, a7 = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    for t in range(site.size):
        x = site[t]
        a0, a1 = a0 + x * phi[block, t, 0], a1 + x * phi[block, t, 1]
        a2, a3 = a2 + x * phi[block, t, 2], a3 + x * phi[block, t, 3]
        a4, a5 = a4 + x * phi[block, t, 4], a5 + x * phi[block, t, 5]
        a6, a7 = a6 + x * phi[block, t, 6], a7 + x * phi[block, t, 7]
    k = block * LANES
    new[k], new[k + 1], new[k + 2], new[k + 3] = a0, a1, a2, a3
    new[k + 4], new[k + 5], new[k + 6], new[k + 7] = a4, a5, a6, a7


@part
def found(phi, k, site, noise, prior, room):  # type: ignore[no-untyped-def]
    """Draw the centre of a group of one site, and what a site's sums are multiplied by for its log likelihood there."""
    p, R, centre = len(room.x), room.R, room.x
    block, lane = k // LANES, k % LANES
    for t in range(site.size):
        room.one[0, t, 0] = site[t]
    put(room.take, 0, every(0.0))
    reduce_lanes(room.one, 0, site, prior, room)  # its first lane
    for i in range(p - 1, -1, -1):
        row = row_of(i, p)
        total = R[row + p, 0] + noise[i]
        for j in range(i + 1, p):
            total -= R[row + j, 0] * centre[j, 0]
        centre[i, 0] = total * R[row + i, 0]
    t = 0
    for i in range(p):
        for j in range(i, p):
            phi[block, t, lane] = (-0.5 if i == j else -1.0) * centre[i, 0] * centre[j, 0]
            t += 1
    for i in range(p):
        phi[block, t + i, lane] = centre[i, 0]


@kernel(FLOAT, MOVING, GROUPS, PRIOR, ROOM, W1, W1, W2, INT, W3, W2)
def sweep_drawn(sites, groups, prior, room, odds, weight, same, most, phi, noise):  # type: ignore[no-untyped-def]
    """`sweep` given centres, which ``phi (B, T + p, LANES)`` has; ``noise (V, p)`` draws those of new groups."""
    entropy = 0.0
    for k in range(groups.log.size):
        groups.log[k] = 0.0
    for u in sites.order:
        site, old = sites.sums[u], sites.z[u]
        groups.n[old] -= 1
        free, used = free_group(groups, old, most)
        for block in range((used + LANES - 1) // LANES):
            log_likelihoods(phi, block, site, groups.new)
        edges_to(sites, u, used, weight)
        chosen, spread = choose(sites, u, groups, used, free, odds, weight, same)
        entropy += spread
        groups.n[old] += 1
        if chosen == free:
            found(phi, chosen, site, noise[u], prior, room)
        if chosen != old:
            move(sites, groups, u, chosen)
    return entropy
