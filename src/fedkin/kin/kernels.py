"""Compiled loops of the sampler: draw the groups of all sites, and evaluate what groups explain.

A site is a row of sums ``(T + p,)``: the upper triangle of ``H``, row by row, then ``c``. The log likelihood of a group
centre ``nu`` is ``c'nu - nu'H nu / 2``, so that the sums of a group are those of its members. ``prior (T + p + 1,)`` is
a row of that kind for the centres' normal prior, with the logarithm of its constant at the end (`pack_prior`).
"""

from __future__ import annotations

import math

import numpy as np

from fedkin._compiling import kernel


@kernel
def reduce(sums, take, site, prior, p, R):
    """Return ``[e'(H + P)^-1 e - log|H + P|] / 2`` plus the constant, of a group and ``take`` times a site.

    ``e = c + P m``. Leaves in ``R (p, p + 1)`` the Cholesky factor ``U`` of ``H + P = U'U``, with 1 over its diagonal
    in place of that, and ``U'^-1 e`` as its last column.
    """
    half, t = p * (p + 1) // 2, 0
    squares, logs, product = 0.0, 0.0, 1.0
    for k in range(p):
        row = R[k, k:]
        for j in range(p - k):
            row[j] = sums[t + j] + take * site[t + j] + prior[t + j]
        row[p - k] = sums[half + k] + take * site[half + k] + prior[half + k]
        t += p - k
        for i in range(k):
            above, times = R[i, k:], R[i, k]
            for j in range(p - k + 1):
                row[j] -= times * above[j]
        pivot = max(row[0], 1e-10)
        scale = 1.0 / math.sqrt(pivot)
        product *= pivot
        if k & 7 == 7 or k + 1 == p:  # few logarithms, no overflow
            logs += math.log(product)
            product = 1.0
        for j in range(p - k + 1):
            row[j] *= scale
        row[0] = scale
        squares += row[p - k] ** 2
    return prior[half + p] + 0.5 * (squares - logs)


@kernel
def log_marginals(sums, site, take, prior, p, R, out):
    """Write the log marginals of groups with sums ``(n, T + p)``, plus ``take`` times a site's, into ``out (n,)``."""
    for k in range(len(out)):
        out[k] = reduce(sums[k], take, site, prior, p, R)


@kernel
def _solve(R, p, noise, out):
    """Write ``U^-1 (U'^-1 e + noise)`` into ``out (p,)``: a centre's mean without noise, a draw with it."""
    for i in range(p - 1, -1, -1):
        left = R[i, p] + noise[i]
        for j in range(i + 1, p):
            left -= R[i, j] * out[j]
        out[i] = left * R[i, i]


@kernel
def centres(sums, prior, R, mean, draw, out):
    """Write means of the groups' centres ``(n, p)``, draws where ``draw`` holds noise, and log marginals ``(n,)``."""
    n, p = draw.shape
    nothing = np.zeros(p)
    for k in range(n):
        out[k] = reduce(sums[k], 0.0, sums[k], prior, p, R)
        _solve(R, p, nothing, mean[k])
        _solve(R, p, draw[k], draw[k])


@kernel
def _free_group(n, used, old):
    """Return an empty group (``old`` if its last site has just left it), or -1, and tighten ``used``."""
    if n[old] == 0:
        return old
    while n[used[0] - 1] == 0:
        used[0] -= 1
    free = 0
    while free < used[0] and n[free] > 0:
        free += 1
    return free if free < len(n) else -1


@kernel
def _choose(
    u, z, chance, alone, first, neighbour, weight, n, used, gain, free, odds, odds_of, edges, rank, lead, doubt,
    same,
):  # fmt: skip
    """Draw a group for a site by what joining it gains; return it and what is added to the entropy.

    A partition names every group by its member of least ``rank (V,)``, that is ``lead (G,)``. Given the names of all
    others, a site is alone or in a group with a lower lead, and nothing is open about one that names others: entropies
    of these choices sum to no more than that of the partition. Those of all choices would count the doubt about a pair
    twice; they are added to ``doubt (V,)``, by which ranks are given: sure sites name groups.
    """
    for k in range(used):
        edges[k] = 0.0
    for t in range(first[u], first[u + 1]):
        edges[z[neighbour[t]]] += weight[t]
    top, others = -np.inf, 0
    for k in range(used):
        odds_of[k] = -np.inf
        if n[k] > 0:
            others += 1
            linked = edges[k] * odds[1] + (n[k] - edges[k]) * odds[2]
            odds_of[k] = gain[k] + linked + math.log(n[k] + odds[3])
            top = max(top, odds_of[k])
    odds_of[used] = -np.inf
    if free >= 0:  # a new group
        odds_of[used] = alone[u] + odds[0] + (odds[others + 5] - odds[others + 4] if others > 0 else 0.0)
    top = max(top, odds_of[used])
    total, some, logs = 0.0, 0.0, 0.0
    for k in range(used + 1):
        odds_of[k] = math.exp(odds_of[k] - top) if odds_of[k] > top - 50.0 else 0.0
        total += odds_of[k]
    for k in range(used + 1):
        odds_of[k] /= total
        if odds_of[k] > 1e-12:
            each = odds_of[k] * math.log(odds_of[k])
            doubt[u] -= each
            if k == used or lead[k] < rank[u]:
                some += odds_of[k]
                logs += each
    names = lead[z[u]] == rank[u] and n[z[u]] > 0
    entropy = math.log(some) - logs / some if some > 0 and not names else 0.0
    if same.size:
        for v in range(len(same)):
            if v != u:
                same[u, v] += odds_of[z[v]]
    left, chosen = chance[u], 0
    while chosen < used and (left > odds_of[chosen] or odds_of[chosen] == 0.0):
        left -= odds_of[chosen]
        chosen += 1
    if chosen == used:
        chosen = free if free >= 0 else z[u]
    return chosen, entropy


@kernel
def _set_leads(lead, z, rank):
    lead[:] = len(z)
    for u in range(len(z)):
        lead[z[u]] = min(lead[z[u]], rank[u])


@kernel
def _move(u, chosen, z, sites, sums, n, used, rank, lead):
    """Take a site from its group to another."""
    old = z[u]
    z[u] = chosen
    n[old] -= 1
    n[chosen] += 1
    lead[chosen] = min(lead[chosen], rank[u])
    if lead[old] == rank[u]:
        lead[old] = len(z)
        for v in range(len(z)):
            if z[v] == old:
                lead[old] = min(lead[old], rank[v])
    used[0] = max(used[0], chosen + 1)
    for t in range(sites.shape[1]):
        # nothing is left of an empty group, rounding errors included
        sums[old, t] = sums[old, t] - sites[u, t] if n[old] > 0 else 0.0
        sums[chosen, t] += sites[u, t]


@kernel
def sweep(
    sites, alone, chance, order, z, first, neighbour, weight, sums, n, used, log, new, prior, p, R, odds, odds_of,
    edges, rank, lead, doubt, live, phi, noise, same,
):  # fmt: skip
    """Draw the groups of all sites in ``order``; return a bound on the entropy.

    ``sites (V, T + p)`` and ``alone (V,)``, log marginals of groups of one; ``chance (V,)`` uniform draws; neighbours
    of site u are ``neighbour[first[u]:first[u + 1]]`` and count as ``weight`` of an edge. Groups have ``sums (G, T +
    p)``, ``n (G,)`` members, none from ``used (1,)`` on, log marginals ``log``, and ``new`` with another site.
    ``odds``: logarithms of what a new group costs, of an edge inside against between groups, of a gap; the evenness of
    groups; and the log prior of 0, 1, 2... groups. Adds the probabilities of sharing a group to ``same (V, V)``, or to
    nothing where that is empty.

    Centres are integrated out, or drawn: then a site's sums times ``phi (G, T + p)`` are its log likelihood at the
    centres, p^2 operations for a site and a group, not p^3, and ``noise (V, p)`` draws those of new groups.
    """
    entropy, drawn = 0.0, phi.shape[0] > 0
    _set_leads(lead, z, rank)
    for u in order:
        old, site = z[u], sites[u]
        n[old] -= 1
        free = _free_group(n, used, old)
        before, many = log[old], 0
        for k in range(used[0]):
            if n[k] > 0:
                live[many] = k
                many += 1
        if drawn:
            for k in live[:many]:
                total, at = 0.0, phi[k]
                for t in range(site.size):
                    total += site[t] * at[t]
                new[k] = total
        else:
            for k in live[:many]:
                new[k] = reduce(sums[k], -1.0 if k == old else 1.0, site, prior, p, R)
            if n[old] > 0:  # what it is with the site is known
                log[old], new[old] = new[old], before
            for k in live[:many]:
                new[k] -= log[k]
        chosen, more = _choose(
            u, z, chance, alone, first, neighbour, weight, n, used[0], new, free, odds, odds_of, edges, rank, lead,
            doubt, same,
        )  # fmt: skip
        entropy += more
        n[old] += 1
        if drawn and chosen == free:
            _draw_centre(sites, u, prior, p, R, noise[u], phi[chosen])
        if chosen == old:
            log[old] = before
            continue
        if not drawn:
            log[chosen] = alone[u] if chosen == free else new[chosen] + log[chosen]
        _move(u, chosen, z, sites, sums, n, used, rank, lead)
    return entropy


@kernel
def _draw_centre(sites, u, prior, p, R, noise, phi):
    """Draw the centre of a group of one site, as a row of ``phi``."""
    reduce(sites[u], 0.0, sites[u], prior, p, R)
    t, centre = 0, phi[p * (p + 1) // 2 :]
    _solve(R, p, noise, centre)
    for i in range(p):
        for j in range(i, p):
            phi[t] = (-0.5 if i == j else -1.0) * centre[i] * centre[j]
            t += 1


@kernel
def share_out(
    sites, chance, first, neighbour, weight, members, side, sums, n, log, prior, p, R, odds, least
):  # fmt: skip
    """Let members join the first or the second of them, as is drawn or as they are; return the log probability of that.

    ``side (V,)``: 2 for members who draw, 3 or 4 for those who are to join the first or the second, -1 for all other
    sites; it is left with who is where, 0 or 1. ``sums (2, T + p)``, ``n`` and ``log`` are of two empty groups, and are
    left with what they become. It ends early once the log probability is below ``least``.
    """
    path = 0.0
    for step in range(members.size):
        u = members[step]
        new = reduce(sums[0], 1.0, sites[u], prior, p, R), reduce(sums[1], 1.0, sites[u], prior, p, R)
        at = step
        if step > 1:
            ahead = (new[1] - log[1] + math.log(n[1])) - (new[0] - log[0] + math.log(n[0])) + (n[1] - n[0]) * odds[2]
            for t in range(first[u], first[u + 1]):
                other = side[neighbour[t]]
                if 0 <= other < 2:
                    ahead += (2.0 * other - 1.0) * weight[t] * (odds[1] - odds[2])
            cost = max(ahead, 0.0) + math.log(1.0 + math.exp(-abs(ahead)))  # log(1 + exp(ahead))
            at = side[u] - 3
            if at < 0:
                at = 0 if math.log(1.0 - chance[u]) < -cost else 1
            path += (0.0 if at == 0 else ahead) - cost
            if path < least:
                break
        side[u] = at
        n[at] += 1
        log[at] = new[at]
        for t in range(sites.shape[1]):
            sums[at, t] += sites[u, t]
    return path
