"""Compiled loops of the sampler: draw the groups of all sites, and evaluate what groups explain.

A site is a row of sums ``(T + p,)``: the upper triangle of ``H``, row by row, then ``c``. The log likelihood of a group
centre ``nu`` is ``c'nu - nu'H nu / 2``, so that the sums of a group are those of its members. Centres have a normal
prior with ``precision (p,)`` and ``pull (p,)``, precision times mean. Matrices are factorised four at a time: the
processor then has independent numbers to work on.
"""

from __future__ import annotations

import math

import numpy as np

from fedkin._base.compiling import kernel

_NONE, _HALF, _ONE = (0.0, 0.0, 0.0, 0.0), (0.5, 0.5, 0.5, 0.5), (1.0, 1.0, 1.0, 1.0)


@kernel
def _load(a, t):
    return a[t, 0], a[t, 1], a[t, 2], a[t, 3]


@kernel
def _store(a, t, x):
    a[t, 0], a[t, 1], a[t, 2], a[t, 3] = x


@kernel
def _minus(x, y, z):
    return x[0] - y[0] * z[0], x[1] - y[1] * z[1], x[2] - y[2] * z[2], x[3] - y[3] * z[3]


@kernel
def _times(x, y):
    return x[0] * y[0], x[1] * y[1], x[2] * y[2], x[3] * y[3]


@kernel
def _logs(x):
    return math.log(x[0]), math.log(x[1]), math.log(x[2]), math.log(x[3])


@kernel
def _entry(sums, g, t, take, site, add):
    """Return entry t of the sums of four groups ``g``, plus ``take`` times a site's, plus a number."""
    x = site[t]
    a, b, c, d = sums[g[0], t] + add, sums[g[1], t] + add, sums[g[2], t] + add, sums[g[3], t] + add
    return a + take[0] * x, b + take[1] * x, c + take[2] * x, d + take[3] * x


@kernel
def _four(ids, at, n):
    """Return four of n ids from ``at`` on; the last one again where there are fewer."""
    return ids[at], ids[min(at + 1, n - 1)], ids[min(at + 2, n - 1)], ids[min(at + 3, n - 1)]


@kernel
def _row(i, p):
    """Return where row i of an upper triangle with one more column begins, less i."""
    return i * p - i * (i - 1) // 2


@kernel
def reduce_four(sums, g, take, site, precision, pull, R):
    """Return ``[e'(H + P)^-1 e - log|H + P| + log|P|] / 2`` of four groups, where ``e = c + P m``.

    Leaves in ``R (T + p, 4)`` the Cholesky factor ``U`` of ``H + P = U'U``, with 1 over its diagonal in place of that,
    and ``U'^-1 e`` as its last column: row i from its diagonal on, so that column j is at ``_row(i, p) + j``.
    """
    p = len(precision)
    t, half, squares, logs, product = 0, p * (p + 1) // 2, _NONE, _NONE, _ONE
    for k in range(p):
        row = _row(k, p)
        pivot = _entry(sums, g, t, take, site, precision[k])
        e = _entry(sums, g, half + k, take, site, pull[k])
        at = 0
        for i in range(k):
            above = _load(R, at + k)
            pivot = _minus(pivot, above, above)
            e = _minus(e, above, _load(R, at + p))
            at += p - i
        pivot = max(pivot[0], 1e-10), max(pivot[1], 1e-10), max(pivot[2], 1e-10), max(pivot[3], 1e-10)
        scale = 1 / math.sqrt(pivot[0]), 1 / math.sqrt(pivot[1]), 1 / math.sqrt(pivot[2]), 1 / math.sqrt(pivot[3])
        one = 1.0 / precision[k]
        product = _times(product, _times(pivot, (one, one, one, one)))
        if k % 16 == 15 or k == p - 1:  # few logarithms, no overflow
            logs = _minus(logs, _ONE, _logs(product))
            product = _ONE
        e = _times(e, scale)
        squares = _minus(squares, e, e)
        _store(R, row + k, scale)
        _store(R, row + p, e)
        t += 1
        j = k + 1
        if (p - j) % 2 == 1:  # then two columns at a time
            a = _entry(sums, g, t, take, site, 0.0)
            at = 0
            for i in range(k):
                a = _minus(a, _load(R, at + k), _load(R, at + j))
                at += p - i
            _store(R, row + j, _times(a, scale))
            t += 1
            j += 1
        while j < p:
            a, b = _entry(sums, g, t, take, site, 0.0), _entry(sums, g, t + 1, take, site, 0.0)
            at = 0
            for i in range(k):
                above = _load(R, at + k)
                a = _minus(a, above, _load(R, at + j))
                b = _minus(b, above, _load(R, at + j + 1))
                at += p - i
            _store(R, row + j, _times(a, scale))
            _store(R, row + j + 1, _times(b, scale))
            t += 2
            j += 2
    return _times(_minus(logs, _ONE, squares), _HALF)


@kernel
def log_marginals(sums, site, take, precision, pull, R, out):
    """Write the log marginals of groups with sums ``(n, T + p)``, plus ``take`` times a site's, into ``out (n,)``."""
    n = len(out)
    for k in range(0, n, 4):
        g = k, min(k + 1, n - 1), min(k + 2, n - 1), min(k + 3, n - 1)
        out[g[0]], out[g[1]], out[g[2]], out[g[3]] = reduce_four(
            sums, g, (take, take, take, take), site, precision, pull, R
        )


@kernel
def centres(sums, precision, pull, R, mean, draw, out):
    """Write means of the groups' centres ``(n, p)``, draws where ``draw`` holds noise, and log marginals ``(n,)``."""
    n, p = draw.shape
    for k in range(0, n, 4):
        g = k, min(k + 1, n - 1), min(k + 2, n - 1), min(k + 3, n - 1)
        logs = reduce_four(sums, g, _NONE, sums[0], precision, pull, R)
        for v in range(min(4, n - k)):
            out[k + v] = logs[v]
            for i in range(p - 1, -1, -1):
                row = _row(i, p)
                middle = R[row + p, v]
                drawn = middle + draw[k + v, i]
                for j in range(i + 1, p):
                    middle -= R[row + j, v] * mean[k + v, j]
                    drawn -= R[row + j, v] * draw[k + v, j]
                mean[k + v, i], draw[k + v, i] = middle * R[row + i, v], drawn * R[row + i, v]


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
    u, z, chance, alone, first, neighbour, weight, n, used, log, new, free, odds, odds_of, edges, rank, lead, doubt,
    same,
):  # fmt: skip
    """Draw a group for a site by what joining it adds, ``new - log``; return it and what is added to the entropy.

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
            gain = new[k] - log[k] + edges[k] * odds[1] + (n[k] - edges[k]) * odds[2]
            odds_of[k] = gain + math.log(n[k] + odds[3])
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
    sites, alone, chance, order, z, first, neighbour, weight, sums, n, used, log, new, precision, pull, R, odds,
    odds_of, edges, rank, lead, doubt, live, same,
):  # fmt: skip
    """Draw the groups of all sites in ``order`` with centres integrated out; return a bound on the entropy.

    ``sites (V, T + p)`` and ``alone (V,)``, log marginals of groups of one; ``chance (V,)`` uniform draws; neighbours
    of site u are ``neighbour[first[u]:first[u + 1]]`` and count as ``weight`` of an edge. Groups have ``sums (G, T +
    p)``, ``n (G,)`` members, none from ``used (1,)`` on, log marginals ``log``, and ``new`` with another site.
    ``odds``: logarithms of what every group costs, of an edge inside against between groups, of a gap; the evenness of
    groups; and the log prior of 0, 1, 2... groups. Adds the probabilities of sharing a group to ``same (V, V)``, or to
    nothing where that is empty.
    """
    entropy = 0.0
    _set_leads(lead, z, rank)
    for u in order:
        old = z[u]
        n[old] -= 1
        free = _free_group(n, used, old)
        before, many = log[old], 0
        for k in range(used[0]):
            if n[k] > 0:
                live[many] = k
                many += 1
        for k in range(0, many, 4):
            g = _four(live, k, many)
            a, b, c, d = g[0] == old, g[1] == old, g[2] == old, g[3] == old
            take = (1.0 - 2.0 * a, 1.0 - 2.0 * b, 1.0 - 2.0 * c, 1.0 - 2.0 * d)
            new[g[0]], new[g[1]], new[g[2]], new[g[3]] = reduce_four(sums, g, take, sites[u], precision, pull, R)
        if n[old] > 0:  # what it is with the site is known
            log[old], new[old] = new[old], before
        chosen, spread = _choose(
            u, z, chance, alone, first, neighbour, weight, n, used[0], log, new, free, odds, odds_of, edges, rank, lead,
            doubt, same
        )
        entropy += spread
        n[old] += 1
        if chosen == old:
            log[old] = before
            continue
        log[chosen] = alone[u] if chosen == free else new[chosen]
        _move(u, chosen, z, sites, sums, n, used, rank, lead)
    return entropy


@kernel
def sweep_drawn(
    sites, alone, chance, order, z, first, neighbour, weight, sums, n, used, log, new, precision, pull, R, odds,
    odds_of, edges, rank, lead, doubt, phi, noise, same,
):  # fmt: skip
    """Draw the groups of all sites given the groups' centres: p^2 operations for a site and a group, not p^3.

    A site's sums times ``phi (G, T + p)`` are its log likelihood at the centres; ``noise (V, p)`` draws those of new
    groups. The rest is as in `sweep`.
    """
    entropy, p = 0.0, len(precision)
    log[:] = 0.0
    _set_leads(lead, z, rank)
    for u in order:
        old, site = z[u], sites[u]
        n[old] -= 1
        free = _free_group(n, used, old)
        for k in range(used[0]):
            if n[k] > 0:
                total, at = 0.0, phi[k]
                for t in range(site.size):
                    total += site[t] * at[t]
                new[k] = total
        chosen, spread = _choose(
            u, z, chance, alone, first, neighbour, weight, n, used[0], log, new, free, odds, odds_of, edges, rank, lead,
            doubt, same
        )
        entropy += spread
        n[old] += 1
        if chosen == free:  # draw its centre
            reduce_four(sites, (u, u, u, u), _NONE, site, precision, pull, R)
            centre = phi[chosen, p * (p + 1) // 2 :]
            for i in range(p - 1, -1, -1):
                row = _row(i, p)
                drawn = R[row + p, 0] + noise[u, i]
                for j in range(i + 1, p):
                    drawn -= R[row + j, 0] * centre[j]
                centre[i] = drawn * R[row + i, 0]
            t = 0
            for i in range(p):
                for j in range(i, p):
                    phi[chosen, t] = (-0.5 if i == j else -1.0) * centre[i] * centre[j]
                    t += 1
        if chosen != old:
            _move(u, chosen, z, sites, sums, n, used, rank, lead)
    return entropy


@kernel
def share_out(
    sites, chance, first, neighbour, weight, members, side, sums, n, log, precision, pull, R, odds, least
):  # fmt: skip
    """Let members join the first or the second of them, as is drawn or as they are; return the log probability of that.

    ``side (V,)``: 2 for members who draw, 3 or 4 for those who are to join the first or the second, -1 for all other
    sites; it is left with who is where, 0 or 1. ``sums (2, T + p)``, ``n`` and ``log`` are of two empty groups, and are
    left with what they become. It ends early once the log probability is below ``least``.
    """
    path = 0.0
    for step in range(members.size):
        u = members[step]
        new = reduce_four(sums, (0, 1, 1, 1), (1.0, 1.0, 1.0, 1.0), sites[u], precision, pull, R)
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
