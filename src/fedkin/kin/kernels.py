"""Compiled loops of the sampler: draw the groups of all sites, and evaluate their likelihood.

A site is a row of sums ``(T + p,)``: the upper triangle of ``H``, row by row, then ``c``. The log likelihood of a group
centre ``nu`` is ``c'nu - nu'H nu / 2``, so the sums of a group are those of its members. ``prior (T + p + 1,)`` is such
a row for the centres' normal prior, followed by the logarithm of its constant (`pack_prior`).
"""

from __future__ import annotations

import math

import numpy as np

from fedkin._compiling import kernel


@kernel
def reduce(one, other, take, take_other, site, prior, p, R):
    """Return ``[e'(H + P)^-1 e - log|H + P|] / 2`` plus the constant, for two groups plus multiples of a site.

    Here ``e = c + P m``. On return, ``R (2, p, p + 1)`` holds the Cholesky factors ``U`` of ``H + P = U'U`` with their
    diagonals inverted, and ``U'^-1 e`` as last columns. Two groups at a time take less time than one after the other,
    because the latencies of the processor's operations overlap.
    """
    half, t, A, B = p * (p + 1) // 2, 0, R[0], R[1]
    squares_a, logs_a, product_a = 0.0, 0.0, 1.0
    squares_b, logs_b, product_b = 0.0, 0.0, 1.0
    for k in range(p):
        a, b, end = A[k], B[k], half + k
        t -= k
        for j in range(k, p):
            s, f = site[t + j], prior[t + j]
            a[j], b[j] = one[t + j] + take * s + f, other[t + j] + take_other * s + f
        a[p] = one[end] + take * site[end] + prior[end]
        b[p] = other[end] + take_other * site[end] + prior[end]
        t += p
        for i in range(0, k - 3, 4):  # four rows at a time: rows are short, and are read and written less often
            x0, x1, x2, x3 = A[i, k], A[i + 1, k], A[i + 2, k], A[i + 3, k]
            y0, y1, y2, y3 = B[i, k], B[i + 1, k], B[i + 2, k], B[i + 3, k]
            for j in range(k, p + 1):
                a[j] -= x0 * A[i, j] + x1 * A[i + 1, j] + x2 * A[i + 2, j] + x3 * A[i + 3, j]
                b[j] -= y0 * B[i, j] + y1 * B[i + 1, j] + y2 * B[i + 2, j] + y3 * B[i + 3, j]
        for i in range(k - k % 4, k):
            x0, y0 = A[i, k], B[i, k]
            for j in range(k, p + 1):
                a[j] -= x0 * A[i, j]
                b[j] -= y0 * B[i, j]
        pivot_a, pivot_b = max(a[k], 1e-10), max(b[k], 1e-10)
        product_a *= pivot_a
        product_b *= pivot_b
        if k & 7 == 7 or k + 1 == p:  # few logarithms, no overflow
            logs_a += math.log(product_a)
            logs_b += math.log(product_b)
            product_a, product_b = 1.0, 1.0
        a[k], b[k] = 1.0 / math.sqrt(pivot_a), 1.0 / math.sqrt(pivot_b)
        for j in range(k + 1, p + 1):
            a[j] *= a[k]
            b[j] *= b[k]
        squares_a += a[p] ** 2
        squares_b += b[p] ** 2
    return prior[half + p] + 0.5 * (squares_a - logs_a), prior[half + p] + 0.5 * (squares_b - logs_b)


@kernel
def log_marginals(sums, site, take, prior, p, R, out):
    """Write the log marginals of groups with sums ``(n, T + p)``, plus ``take`` times a site's, to ``out (n,)``."""
    n = len(out)
    for k in range(0, n, 2):
        other = min(k + 1, n - 1)
        out[k], out[other] = reduce(sums[k], sums[other], take, take, site, prior, p, R)


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
    """Write means of the groups' centres ``(n, p)``, draws if ``draw`` holds noise, and log marginals ``(n,)``."""
    n, p = draw.shape
    nothing = np.zeros(p)
    for k in range(n):
        out[k], _ = reduce(sums[k], sums[k], 0.0, 0.0, sums[k], prior, p, R)
        _solve(R[0], p, nothing, mean[k])
        _solve(R[0], p, draw[k], draw[k])


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
def _set_chances(odds, top):
    """Replace logarithms, of which ``top`` is the largest, by probabilities."""
    total = 0.0
    for k in range(len(odds)):
        odds[k] = math.exp(odds[k] - top) if odds[k] > top - 50.0 else 0.0
        total += odds[k]
    for k in range(len(odds)):
        odds[k] /= total


@kernel
def _pick(chances, left):
    """Return where a uniform number falls among probabilities."""
    chosen = 0
    while chosen < len(chances) - 1 and (left > chances[chosen] or chances[chosen] == 0.0):
        left -= chances[chosen]
        chosen += 1
    return chosen


@kernel
def _choose(
    u, z, chance, alone, first, neighbour, weight, n, used, gain, free, odds, odds_of, edges, rank, lead, doubt,
    same,
):  # fmt: skip
    """Draw a group for a site, weighted by the gain from joining it; return it and its part of the entropy.

    A partition names every group by its member of least ``rank (V,)``, its ``lead (G,)``. Given the names of all
    others, a site is alone or in a group with a lower lead, and a site that names others has no choice: the entropies
    of these choices sum to at most that of the partition. The entropies of all choices would count the uncertainty
    about a pair twice. They are added to ``doubt (V,)``, which determines ranks, so the most certain sites name groups.
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
    some, logs = 0.0, 0.0
    _set_chances(odds_of[: used + 1], top)
    for k in range(used + 1):
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
    chosen = _pick(odds_of[: used + 1], chance[u])
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

    ``sites (V, T + p)`` and ``alone (V,)`` are the sites' sums and log marginals as groups of one; ``chance (V,)``
    holds uniform draws; neighbours of site u are ``neighbour[first[u]:first[u + 1]]``, with weights ``weight``. Groups
    have ``sums (G, T + p)``, ``n (G,)`` members (none from ``used (1,)`` on), and log marginals ``log``, or ``new``
    with another site added. ``odds`` holds the log costs of a new group, of an edge inside versus between groups, and
    of a missing edge; the evenness of groups; and the log prior of 0, 1, 2... groups. The probabilities of sharing a
    group are added to ``same (V, V)`` unless it is empty.

    Centres are integrated out, or drawn. If drawn, a site's sums times ``phi (G, T + p)`` are its log likelihoods at
    the centres, which takes p^2 operations per site and group instead of p^3; ``noise (V, p)`` draws the centres of new
    groups.
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
            for t in range(0, many, 2):
                k, other = live[t], live[min(t + 1, many - 1)]
                take, take_other = -1.0 if k == old else 1.0, -1.0 if other == old else 1.0
                new[k], new[other] = reduce(sums[k], sums[other], take, take_other, site, prior, p, R)
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
def join_halves(sites, who, part, second, chance, sums, logs, odds, prior, R, draws, joining, n, path):
    """Let sites ``who (m,)`` join one of two halves, at random or, unless it ``draws``, as ``second (m,)`` says.

    The halves have ``sums (2, T + p)`` and log marginals, and ``odds`` is the logarithm of the ratio of their sizes.
    The call sets ``second``, adds to ``joining (P, 2, T + p)`` and ``n (P, 2)`` by the ``part`` of each site, and to
    ``path (P,)`` the log probability of what they join.
    """
    p = R.shape[1]
    for k in range(len(who)):
        site = sites[who[k]]
        one, two = reduce(sums[0], sums[1], 1.0, 1.0, site, prior, p, R)
        ahead = odds + (two - logs[1]) - (one - logs[0])
        # exp of a large number is infinite, and 1 / inf is 0
        if draws:
            second[k] = chance[k] < 1.0 / (1.0 + math.exp(-ahead))
        size, half = (ahead, 1) if second[k] else (-ahead, 0)
        path[part[k]] -= math.log1p(math.exp(-size)) if size > 0 else math.log1p(math.exp(size)) - size
        n[part[k], half] += 1
        for t in range(site.size):
            joining[part[k], half, t] += site[t]


@kernel
def draw_groups(
    sites, phi, logs, chance, first, sizes, lead, leader, z, doubt, odds, sums, n, new_lead, new_leader
):  # fmt: skip
    """Draw the groups of sites, given the centres and log shares of all groups; return a bound on the entropy.

    Each group has a leader, its most certain member: the first with the least ``doubt (V,)``. Current leaders are
    ``lead (G,)`` with positions ``leader (G,)``, for sites numbered from ``first``; leaders of the drawn groups are
    written to ``new_lead`` and ``new_leader``. The call adds to the groups' ``sums (G, T + p)`` and ``n (G,)``, and to
    the doubt.
    """
    entropy = 0.0
    for u in range(len(sites)):
        site, here, top = sites[u], first + u, -np.inf
        for k in range(len(logs)):
            total, at = 0.0, phi[k]
            for t in range(site.size):
                total += site[t] * at[t]
            odds[k] = total + logs[k]
            top = max(top, odds[k])
        some, inside, own = 0.0, 0.0, 0.0
        _set_chances(odds, top)
        names = leader[z[u]] == here and sizes[z[u]] > 1
        for k in range(len(logs)):
            if odds[k] > 1e-12:
                each = odds[k] * math.log(odds[k])
                own -= each
                if sizes[k] == 0 or lead[k] < doubt[u] or (lead[k] == doubt[u] and leader[k] <= here):
                    some += odds[k]
                    inside += each
        if some > 0 and not names:
            entropy += math.log(some) - inside / some
        doubt[u] += own
        chosen = _pick(odds, chance[u])
        z[u] = chosen
        n[chosen] += 1
        for t in range(site.size):
            sums[chosen, t] += site[t]
        if doubt[u] < new_lead[chosen] or (doubt[u] == new_lead[chosen] and here < new_leader[chosen]):
            new_lead[chosen], new_leader[chosen] = doubt[u], here
    return entropy


@kernel
def _draw_centre(sites, u, prior, p, R, noise, phi):
    """Draw the centre of a group of one site, as a row of ``phi``."""
    reduce(sites[u], sites[u], 0.0, 0.0, sites[u], prior, p, R)
    t, centre = 0, phi[p * (p + 1) // 2 :]
    _solve(R[0], p, noise, centre)
    for i in range(p):
        for j in range(i, p):
            phi[t] = (-0.5 if i == j else -1.0) * centre[i] * centre[j]
            t += 1


@kernel
def share_out(
    sites, chance, first, neighbour, weight, members, side, sums, n, log, prior, p, R, odds, least
):  # fmt: skip
    """Assign members to the first or the second group, at random or as they are; return the log probability.

    ``side (V,)`` is 2 for members to draw, 3 or 4 for those assigned to the first or second, and -1 for all other
    sites; on return it is 0 or 1. ``sums (2, T + p)``, ``n`` and ``log`` start with two empty groups, and are updated.
    The loop stops early once the log probability is below ``least``.
    """
    path = 0.0
    for step in range(members.size):
        u = members[step]
        new = reduce(sums[0], sums[1], 1.0, 1.0, sites[u], prior, p, R)
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
