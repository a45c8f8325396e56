"""Groups of sites by Gibbs sampling: one chain over partitions."""

from __future__ import annotations

import math

import numpy as np

from fedkin.kin.kernels.bundles import (
    COURSE,
    LANES,
    LEAST,
    MEAN_PRECISION,
    RANDOM,
    RECORD,
    SHAPES,
    SHARE_EVERY,
    SITES,
    STATE,
    TYPICAL_WIDTH,
)
from fedkin.kin.kernels.draws import add_noise, draw_beta, pick, shuffle
from fedkin.kin.kernels.marginals import (
    add_product,
    add_site,
    assign,
    back_substitute,
    factorise,
    inverse_of_factor,
    log_beta,
    log_likelihoods,
    log_marginal,
    log_marginals,
    make_groups,
    multiply,
    set_phi,
)
from fedkin.kin.kernels.splits import split_and_merge
from fedkin.solvers.kernels.jit import FLOAT, kernel, part


@part
def collect(sites, z, r, m, c, groups):  # type: ignore[no-untyped-def]
    """Sums over the members of each group around ``m``, at share number ``r``; the log likelihood of ``nu = m``."""
    for k in range(groups.used[0]):
        block, lane = k // LANES, k % LANES
        groups.n[k] = 0
        for i in range(m.size):
            groups.c[block, i, lane] = 0.0
            for j in range(i, m.size):
                groups.H[block, i, j, lane] = 0.0
    groups.used[0] = 0
    base = 0.0
    V, p = c.shape
    bend = np.zeros(p)
    for u in range(V):
        base += sites.k[r, u]
        times_packed(sites.H[r, u], m, bend)
        for i in range(p):
            c[u, i] = sites.c[r, u, i] - bend[i]
            base += m[i] * (sites.c[r, u, i] - 0.5 * bend[i])
        add_site(groups, z[u], sites.H[r, u], c[u], 1)
    return base


@part
def times_packed(H, x, out):  # type: ignore[no-untyped-def]
    """``out = H x`` for an upper triangle ``H``."""
    p, t = x.size, 0
    for i in range(p):
        out[i] = 0.0
    for i in range(p):
        total, factor = H[t] * x[i], x[i]
        t += 1
        for j in range(i + 1, p):
            total += H[t] * x[j]
            out[j] += H[t] * factor
            t += 1
        out[i] += total


@part
def join_marginals(groups, old, free, H, c, prior, out):  # type: ignore[no-untyped-def]
    """Log marginals of all groups with a site that has just left group ``old``, and of the site alone.

    An empty group with the site is the site alone; ``old`` with it is what ``old`` was, so that its lane has room for
    what is left of it.
    """
    alone = 0.0
    for block in range((max(groups.used[0], free + 1) + LANES - 1) // LANES):
        first, busy = block * LANES, False
        for lane in range(LANES):
            k = first + lane
            groups.take[lane] = 0.0 if k == old and groups.n[k] > 0 else 1.0
            busy = busy or groups.n[k] > 0 or k == free
        if not busy:
            continue
        log_marginals(groups, block, H, c, prior, out)
        for lane in range(LANES):
            k = first + lane
            if k == free:
                alone = out[lane]
            if k == old and groups.n[k] > 0:
                groups.new[k] = groups.log[k]
                groups.log[k] = out[lane]
            else:
                groups.new[k] = out[lane]
    return alone


@part
def found_group(course, t):  # type: ignore[no-untyped-def]
    """Log prior weight of a site that founds a group beside t others; one that joins a group of n has n + 1."""
    return course.partitions[t + 1] - course.partitions[t] if t > 0 else 0.0


@part
def move_sites(sites, state, course, groups, c, prior, same, rng):  # type: ignore[no-untyped-def]
    """Draw every site's group given all others, in random order; the entropy of these choices.

    Adds the probabilities of sharing a group to ``same`` (nothing where it is empty).
    """
    V = len(c)
    most, r, z = course.most, state.share[0], state.z
    r_in, r_out = state.scalars[2], state.scalars[3]
    edge, gap = math.log(r_in / r_out), math.log((1.0 - r_in) / (1.0 - r_out))
    weight, edges, out = np.zeros(groups.n.size + 1), np.zeros(groups.n.size), np.zeros(LANES)
    order = np.empty(V, np.int64)
    for t in range(V):
        order[t] = t
    shuffle(order, rng)
    entropy = 0.0
    for u in order:
        H, old = sites.H[r, u], z[u]
        add_site(groups, old, H, c[u], -1)
        free = 0
        while free < groups.used[0] and groups.n[free] > 0:
            free += 1
        free = free if free < most else -1
        used = groups.used[0]
        if course.edges:
            for k in range(used):
                edges[k] = 0.0
            for t in range(sites.first[u], sites.first[u + 1]):
                edges[z[sites.neighbour[t]]] += sites.weight[t]
        if course.collapsed:
            alone = join_marginals(groups, old, free, H, c[u], prior, out)
        else:
            alone = log_marginal(H, c[u], prior, groups.R, groups.y)
            for block in range((used + LANES - 1) // LANES):
                log_likelihoods(groups, block, H, c[u], out)
                for lane in range(LANES):
                    groups.new[block * LANES + lane] = groups.log[block * LANES + lane] + out[lane]
        top, others = -np.inf, 0
        for k in range(used):
            weight[k] = -np.inf
            if groups.n[k] == 0:
                continue
            others += 1
            gain = groups.new[k] - groups.log[k]
            if course.edges:
                gain += edges[k] * edge + (groups.n[k] - edges[k]) * gap
            weight[k] = gain + math.log(groups.n[k] + 1.0)
            top = max(top, weight[k])
        weight[used] = alone + found_group(course, others) if free >= 0 else -np.inf
        top = max(top, weight[used])
        total = 0.0
        for k in range(used + 1):
            weight[k] = math.exp(weight[k] - top) if weight[k] > top - 50.0 else 0.0
            total += weight[k]
        for k in range(used + 1):
            share = weight[k] / total
            if share > 1e-12:
                entropy -= share * math.log(share)
        if same.size:
            for v in range(V):
                if v != u:
                    same[u, v] += weight[z[v]] / total
        left = rng.random() * total
        chosen = 0
        while chosen < used and (left > weight[chosen] or weight[chosen] == 0.0):
            left -= weight[chosen]
            chosen += 1
        if chosen == used:
            chosen = free if free >= 0 else old
            groups.new[chosen] = alone
            if not course.collapsed:
                add_noise(groups.y, rng)
                back_substitute(groups.R, groups.y, groups.draw[chosen])
                set_phi(groups, chosen)
        z[u] = chosen
        groups.log[chosen] = groups.new[chosen]
        add_site(groups, chosen, H, c[u], 1)
    return entropy


@part
def draw_groups(groups, prior, drawn, rng):  # type: ignore[no-untyped-def]
    """Means and draws of ``nu_k - m``; the sum of log marginals."""
    total = 0.0
    for k in range(groups.used[0]):
        if groups.n[k] > 0:
            groups.log[k] = factorise(groups, k, prior)
            total += groups.log[k]
            back_substitute(groups.R, groups.y, groups.mean[k])
            add_noise(groups.y, rng)
            back_substitute(groups.R, groups.y, groups.draw[k])
            if drawn:
                set_phi(groups, k)
    return total


@part
def move_widths(state, groups, prior, n_groups, rng):  # type: ignore[no-untyped-def]
    """Draw ``m``, ``w`` and what they come from; the sum of log prior minus log conditional of ``m`` and ``w``."""
    p = prior.size
    typical, shape = state.scalars[0], state.scalars[1]
    gain, inverses, logs = 0.0, 0.0, 0.0
    for j in range(p):
        total = 0.0
        for k in range(groups.used[0]):
            if groups.n[k] > 0:
                total += groups.draw[k, j] + state.m[j]
        precision = n_groups * prior[j] + MEAN_PRECISION
        mean = total * prior[j] / precision + rng.standard_normal() / math.sqrt(precision)
        squares = 0.0
        for k in range(groups.used[0]):
            if groups.n[k] > 0:
                squares += (groups.draw[k, j] + state.m[j] - mean) ** 2
        state.m[j] = mean
        gain += 0.5 * (math.log(MEAN_PRECISION / precision) - MEAN_PRECISION * mean**2 + 1.0)
        a, b = shape + 0.5 * n_groups, shape * typical + 0.5 * squares
        width = min(max(b / rng.standard_gamma(a), LEAST), 1.0 / LEAST)
        gain += shape * math.log(shape * typical) - math.lgamma(shape) - a * math.log(b) + math.lgamma(a)
        gain += (a - shape) * math.log(width) + (b - shape * typical) / width
        state.w[j] = width
        prior[j] = 1.0 / width
        inverses += prior[j]
        logs += math.log(prior[j])
    odds = np.zeros(TYPICAL_WIDTH.size)
    for t in range(odds.size):
        odds[t] = p * shape * math.log(TYPICAL_WIDTH[t]) - shape * TYPICAL_WIDTH[t] * inverses
    typical = TYPICAL_WIDTH[pick(odds, rng)]
    odds = np.zeros(SHAPES.size)
    for t in range(odds.size):
        a = SHAPES[t]
        odds[t] = p * (a * math.log(a * typical) - math.lgamma(a)) + (a + 1.0) * logs - a * typical * inverses
    state.scalars[0], state.scalars[1] = typical, SHAPES[pick(odds, rng)]
    return gain


@part
def move_share(sites, state, groups, c, prior, rng):  # type: ignore[no-untyped-def]
    """Draw the share of the spread that is inside groups from its exact conditional."""
    odds = np.zeros(sites.share.size)
    for r in range(odds.size):
        odds[r] = collect(sites, state.z, r, state.m, c, groups) + log_share_prior(r, odds.size)
        for k in range(groups.used[0]):
            if groups.n[k] > 0:
                odds[r] += factorise(groups, k, prior)
    state.share[0] = pick(odds, rng)


@part
def log_share_prior(r, n_shares):  # type: ignore[no-untyped-def]
    """Half of the mass on groups without any spread inside."""
    return math.log(0.5) if r == 0 else math.log(0.5 / (n_shares - 1))


@part
def count_edges(sites, z, n):  # type: ignore[no-untyped-def]
    """Edges inside groups, pairs inside groups, edges between, pairs between."""
    inside, pairs, total, V = 0.0, 0.0, 0.0, z.size
    for u in range(V):
        for t in range(sites.first[u], sites.first[u + 1]):
            total += 0.5 * sites.weight[t]
            if z[sites.neighbour[t]] == z[u]:
                inside += 0.5 * sites.weight[t]
    for k in range(n.size):
        pairs += 0.5 * n[k] * (n[k] - 1)
    return inside, pairs, total - inside, 0.5 * V * (V - 1) - pairs


@part
def keep_sweep(sites, state, groups, prior, record, s):  # type: ignore[no-untyped-def]
    """Add effects given the partition as line ``s``: groups' means plus what sites say about their own effects."""
    r, share = state.share[0], sites.share[state.share[0]]
    V, p = record.b.shape
    B, C, BC, BCB = np.zeros((p, p)), np.zeros((p, p)), np.zeros((p, p)), np.zeros((p, p))
    b, centre, bend = np.zeros(p), np.zeros(p), np.zeros(p)
    # members one group after another
    first, order = np.zeros(groups.used[0] + 1, np.int64), np.zeros(V, np.int64)
    for k in range(groups.used[0]):
        first[k + 1] = first[k] + groups.n[k]
    for u in range(V):
        order[first[state.z[u]]] = u
        first[state.z[u]] += 1
    for k in range(groups.used[0]):
        if groups.n[k] == 0:
            continue
        factorise(groups, k, prior)
        inverse_of_factor(groups.R, C)
        for i in range(p):
            centre[i] = state.m[i] + groups.mean[k, i]
        for place in range(first[k] - groups.n[k], first[k]):
            u = order[place]
            assign(b, centre)
            if share > 0.0:
                times_packed(sites.H[r, u], centre, bend)
                t = 0
                for i in range(p):
                    b[i] += share * (sites.c[r, u, i] - bend[i])
                    for j in range(i, p):
                        B[i, j] = -share * sites.H[r, u, t]
                        B[j, i] = B[i, j]
                        t += 1
                    B[i, i] += 1.0
                multiply(B, C, BC)
                for i in range(p):
                    for j in range(p):
                        BCB[i, j] = share * B[i, j]
                add_product(BC, B, BCB)
            t = 0
            for i in range(p):
                record.b[u, i] += b[i]
                for j in range(i, p):
                    record.bb[u, t] += b[i] * b[j] + (BCB[i, j] if share > 0.0 else C[i, j])
                    t += 1
            if u < record.means.shape[1]:
                assign(record.means[s, u], b)
    assign(record.z[s], state.z)
    assign(record.m[s], state.m)
    assign(record.w[s], state.w)


@kernel(FLOAT, SITES, STATE, RECORD, COURSE, RANDOM)
def run_chain(sites, state, record, course, rng):  # type: ignore[no-untyped-def]
    """Move ``state`` over ``course.burn`` sweeps and one for each line of ``record``; the mean bound on the evidence.

    The bound of a sweep is the log density of data and state, plus the entropies of the conditionals that it was drawn
    from. Its mean leaves out the first half of the sweeps that are not kept.
    """
    V, p = sites.c.shape[1:]
    prior, c, nothing = np.zeros(p), np.zeros((V, p)), np.zeros((0, 0))
    for j in range(p):
        prior[j] = 1.0 / state.w[j]
    drawn = course.collapsed == 0
    groups = make_groups(course.most, p, drawn)
    edges = 0.0
    for t in range(sites.weight.size):
        edges += 0.5 * sites.weight[t]
    density = (edges + 1.0) / (0.5 * V * (V - 1) + 2.0)
    yes, no = 2.0 * density, 2.0 - 2.0 * density  # of the rates' beta priors
    best, total, counted = -np.inf, 0.0, 0
    for sweep in range(course.burn + len(record.z)):
        s = sweep - course.burn
        score = collect(sites, state.z, state.share[0], state.m, c, groups)
        if course.splits:
            split_and_merge(sites, state, course, groups, c, prior, rng)
        draw_groups(groups, prior, drawn, rng)
        # one group with a spread inside is a continuum: nobody is kin
        several = groups.n[state.z[0]] < V
        counts = s >= 0 and (state.share[0] == 0 or several)
        entropy = move_sites(sites, state, course, groups, c, prior, record.same if counts else nothing, rng)
        score += draw_groups(groups, prior, False, rng)
        n_groups = 0
        for k in range(groups.used[0]):
            if groups.n[k] > 0:
                n_groups += 1
                score += math.lgamma(groups.n[k] + 1.0)
        score += course.partitions[n_groups]
        inside, pairs, between, others = count_edges(sites, state.z, groups.n)
        if course.edges:
            score += log_beta(inside + yes, pairs - inside + no) + log_beta(between + yes, others - between + no)
            score -= 2.0 * log_beta(yes, no)
        if score > best:
            best = score
            assign(record.best, state.z)
        score += entropy + log_share_prior(state.share[0], sites.share.size)
        if s >= 0:
            keep_sweep(sites, state, groups, prior, record, s)
            record.trace[s, 1], record.trace[s, 2] = n_groups, state.share[0]
            record.trace[s, 3], record.trace[s, 4] = state.scalars[2], state.scalars[3]
        if course.moves:
            score += move_widths(state, groups, prior, n_groups, rng)
            if sweep % SHARE_EVERY == 0:
                move_share(sites, state, groups, c, prior, rng)
            state.scalars[2] = draw_beta(inside + yes, pairs - inside + no, rng)
            state.scalars[3] = draw_beta(between + yes, others - between + no, rng)
        if s >= 0:
            record.trace[s, 0] = score
        if 2 * sweep >= course.burn:
            total += score
            counted += 1
    return total / max(counted, 1)
