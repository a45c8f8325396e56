"""Every site's group, drawn given those of all others, with the groups' centres integrated out."""

from __future__ import annotations

from fedkin.kin.kernels.bundles import GROUPS, LANES, MOVING, PRIOR, ROOM, W1, W2
from fedkin.kin.kernels.choice import choose, edges_to, free_group, move
from fedkin.kin.kernels.lanes import lanes, put
from fedkin.kin.kernels.marginals import reduce_lanes
from fedkin.solvers.jit import FLOAT, INT, kernel


@kernel(FLOAT, MOVING, GROUPS, PRIOR, ROOM, W1, W1, W2, INT)
def sweep(sites, groups, prior, room, odds, weight, same, most):  # type: ignore[no-untyped-def]
    """Draw the groups of all sites in ``sites.order``; the entropy of these choices.

    ``odds``: logarithms of what every group costs, of an edge inside against between groups, of a gap; the evenness of
    groups; and logarithms of the prior of 0, 1, 2... groups.
    ``weight``: room for twice as many groups as there are, and two more. Adds the probabilities of sharing a group to
    ``same (V, V)``, which may be empty.
    """
    entropy = 0.0
    for u in sites.order:
        site, old = sites.sums[u], sites.z[u]
        groups.n[old] -= 1
        free, used = free_group(groups, old, most)
        before, without = groups.log[old], 0.0
        for block in range((used + LANES - 1) // LANES):
            busy = False
            for v in range(LANES):
                k = block * LANES + v
                room.take[v] = -1.0 if k == old else 1.0
                busy = busy or groups.n[k] > 0
            if busy:
                reduce_lanes(groups.sums, block, site, prior, room)
                put(groups.new, block, lanes(room.out, 0))
        if groups.n[old] > 0:  # what it is with the site is known
            without = groups.new[old]
            groups.new[old] = before
            groups.log[old] = without
        edges_to(sites, u, used, weight)
        chosen, spread = choose(sites, u, groups, used, free, odds, weight, same)
        entropy += spread
        groups.n[old] += 1
        if chosen == old:
            groups.log[old] = before
            continue
        groups.log[chosen] = sites.alone[u] if chosen == free else groups.new[chosen]
        move(sites, groups, u, chosen)
    return entropy
