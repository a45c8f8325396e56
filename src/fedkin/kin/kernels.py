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
def reduce(sums, take, site, prior, p, R):
    """Return ``[e'(H + P)^-1 e - log|H + P|] / 2`` plus the constant, for a group plus ``take`` times a site.

    Here ``e = c + P m``. On return, ``R (p, p + 1)`` holds the Cholesky factor ``U`` of ``H + P = U'U`` with its
    diagonal inverted, and ``U'^-1 e`` as its last column.
    """
    half, t = p * (p + 1) // 2, 0
    squares, logs, product = 0.0, 0.0, 1.0
    for k in range(p):
        row = R[k, k:]
        for j in range(p - k):
            row[j] = sums[t + j] + take * site[t + j] + prior[t + j]
        row[p - k] = sums[half + k] + take * site[half + k] + prior[half + k]
        t += p - k
        for i in range(0, k - 3, 4):  # four rows at a time: rows are short, and are read and written less often
            a, b, c, d = R[i, k:], R[i + 1, k:], R[i + 2, k:], R[i + 3, k:]
            a0, b0, c0, d0 = a[0], b[0], c[0], d[0]
            for j in range(p - k + 1):
                row[j] -= a0 * a[j] + b0 * b[j] + c0 * c[j] + d0 * d[j]
        for i in range(k - k % 4, k):
            a = R[i, k:]
            a0 = a[0]
            for j in range(p - k + 1):
                row[j] -= a0 * a[j]
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
def reduce_two(one, other, take, take_other, site, prior, p, R):
    """Apply `reduce` to two groups, with factors in ``R (2, p, p + 1)``.

    Two groups at a time, with four columns each, take half the time, because the latencies of the processor's
    operations overlap.
    """
    half, t, A, B = p * (p + 1) // 2, 0, R[0], R[1]
    squares_a, logs_a, product_a = 0.0, 0.0, 1.0
    squares_b, logs_b, product_b = 0.0, 0.0, 1.0
    for k in range(p):
        end = half + k
        a, pull_a = one[t] + take * site[t] + prior[t], one[end] + take * site[end] + prior[end]
        b, pull_b = other[t] + take_other * site[t] + prior[t], other[end] + take_other * site[end] + prior[end]
        for i in range(k):
            a -= A[i, k] * A[i, k]
            b -= B[i, k] * B[i, k]
            pull_a -= A[i, k] * A[i, p]
            pull_b -= B[i, k] * B[i, p]
        a, b = max(a, 1e-10), max(b, 1e-10)
        product_a *= a
        product_b *= b
        if k & 7 == 7 or k + 1 == p:
            logs_a += math.log(product_a)
            logs_b += math.log(product_b)
            product_a, product_b = 1.0, 1.0
        a, b = 1.0 / math.sqrt(a), 1.0 / math.sqrt(b)
        A[k, k], B[k, k], A[k, p], B[k, p] = a, b, pull_a * a, pull_b * b
        squares_a += A[k, p] ** 2
        squares_b += B[k, p] ** 2
        t -= k
        for j in range(k + 1, p - 3, 4):
            a0, a1, a2, a3 = one[t + j], one[t + j + 1], one[t + j + 2], one[t + j + 3]
            b0, b1, b2, b3 = other[t + j], other[t + j + 1], other[t + j + 2], other[t + j + 3]
            s, f = site[t + j], prior[t + j]
            a0, b0 = a0 + take * s + f, b0 + take_other * s + f
            s, f = site[t + j + 1], prior[t + j + 1]
            a1, b1 = a1 + take * s + f, b1 + take_other * s + f
            s, f = site[t + j + 2], prior[t + j + 2]
            a2, b2 = a2 + take * s + f, b2 + take_other * s + f
            s, f = site[t + j + 3], prior[t + j + 3]
            a3, b3 = a3 + take * s + f, b3 + take_other * s + f
            for i in range(k):
                x, y = A[i, k], B[i, k]
                a0 -= x * A[i, j]
                a1 -= x * A[i, j + 1]
                a2 -= x * A[i, j + 2]
                a3 -= x * A[i, j + 3]
                b0 -= y * B[i, j]
                b1 -= y * B[i, j + 1]
                b2 -= y * B[i, j + 2]
                b3 -= y * B[i, j + 3]
            A[k, j], A[k, j + 1], A[k, j + 2], A[k, j + 3] = a0 * a, a1 * a, a2 * a, a3 * a
            B[k, j], B[k, j + 1], B[k, j + 2], B[k, j + 3] = b0 * b, b1 * b, b2 * b, b3 * b
        for j in range(p - (p - k - 1) % 4, p):
            a0, b0 = (
                one[t + j] + take * site[t + j] + prior[t + j],
                other[t + j] + take_other * site[t + j] + prior[t + j],
            )
            for i in range(k):
                a0 -= A[i, k] * A[i, j]
                b0 -= B[i, k] * B[i, j]
            A[k, j], B[k, j] = a0 * a, b0 * b
        t += p
    return prior[half + p] + 0.5 * (squares_a - logs_a), prior[half + p] + 0.5 * (squares_b - logs_b)


@kernel
def log_marginals(sums, site, take, prior, p, R, out):
    """Write the log marginals of groups with sums ``(n, T + p)``, plus ``take`` times a site's, to ``out (n,)``."""
    n = len(out)
    for k in range(0, n - 1, 2):
        out[k], out[k + 1] = reduce_two(sums[k], sums[k + 1], take, take, site, prior, p, R)
    if n % 2:
        out[n - 1] = reduce(sums[n - 1], take, site, prior, p, R[0])


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
        out[k] = reduce(sums[k], 0.0, sums[k], prior, p, R[0])
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
            for t in range(0, many - 1, 2):
                k, other = live[t], live[t + 1]
                take, take_other = -1.0 if k == old else 1.0, -1.0 if other == old else 1.0
                new[k], new[other] = reduce_two(sums[k], sums[other], take, take_other, site, prior, p, R)
            if many % 2:
                k = live[many - 1]
                new[k] = reduce(sums[k], -1.0 if k == old else 1.0, site, prior, p, R[0])
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
        one, two = reduce_two(sums[0], sums[1], 1.0, 1.0, site, prior, p, R)
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
        total, some, inside, own = 0.0, 0.0, 0.0, 0.0
        for k in range(len(logs)):
            odds[k] = math.exp(odds[k] - top) if odds[k] > top - 50.0 else 0.0
            total += odds[k]
        names = leader[z[u]] == here and sizes[z[u]] > 1
        for k in range(len(logs)):
            odds[k] /= total
            if odds[k] > 1e-12:
                each = odds[k] * math.log(odds[k])
                own -= each
                if sizes[k] == 0 or lead[k] < doubt[u] or (lead[k] == doubt[u] and leader[k] <= here):
                    some += odds[k]
                    inside += each
        if some > 0 and not names:
            entropy += math.log(some) - inside / some
        doubt[u] += own
        left, chosen = chance[u], 0
        while chosen < len(logs) - 1 and (left > odds[chosen] or odds[chosen] == 0.0):
            left -= odds[chosen]
            chosen += 1
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
    reduce(sites[u], 0.0, sites[u], prior, p, R[0])
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
        new = reduce_two(sums[0], sums[1], 1.0, 1.0, sites[u], prior, p, R)
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
