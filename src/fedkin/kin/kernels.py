"""Groups of sites by Gibbs sampling, compiled (numba): one chain of partitions, and merging that finds starts for it.

The model, in units where the spread between sites is 1 for every coefficient: ``b_u = nu_z(u) + sqrt(rho) e_u``, groups
``nu_k ~ N(m, diag w)``, partitions ``z`` from a Chinese restaurant process with concentration ``alpha``, edges with
probability ``r_in`` inside groups and ``r_out`` between them. Effects ``e`` and groups ``nu`` are integrated out, so
that a chain moves over partitions. For many sites groups are drawn once per sweep instead, which costs p^2 and not p^3
for each pair of a site and a group.

Everything compiled is in this file: numba compiles a kernel again only when its own file has changed.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import typeof

from fedkin.solvers.kernels.jit import FLOAT, INT, bundle, kernel, part, readable, writable

#: Prior precision of the groups' common mean, in units of the spread between sites.
MEAN_PRECISION = 4.0
#: Where the typical width of groups may lie (log-uniform), and shapes of the widths' inverse gamma prior (uniform).
TYPICAL_WIDTH = np.exp(np.linspace(np.log(0.03), np.log(30.0), 48))
SHAPES = np.array([0.5, 1.0, 2.0, 5.0, 20.0])
#: Widths, concentrations and rates keep away from what cannot be computed with.
LEAST, LEAST_RATE = 1e-6, 1e-6
#: Sweeps from one draw of the within-group share to the next.
SHARE_EVERY = 3


class Sites(NamedTuple):
    """What sites say, with effects inside groups integrated out for each of R shares of the spread.

    ``H (R, V, p, p)``, ``c (R, V, p)``: the log likelihood of ``nu`` is ``c'nu - nu'H nu / 2 + k``, ``k (R, V)``;
    ``share (R,)``; neighbours of site u are ``neighbour[first[u]:first[u + 1]]``.
    """

    H: Any
    c: Any
    k: Any
    share: Any
    first: Any
    neighbour: Any


class State(NamedTuple):
    """Where a chain stands: groups ``z (V,)``, number of the share ``(1,)``, ``m (p,)``, ``w (p,)`` and scalars.

    The scalars are typical width, shape, concentration, rate of edges inside and between groups.
    """

    z: Any
    share: Any
    m: Any
    w: Any
    scalars: Any


class Record(NamedTuple):
    """What a chain leaves: sums over kept sweeps, and a line for each of them.

    ``b (V, p)`` and ``bb (V, p, p)``: means of effects and of their squares given the partition; ``same (V, V)``:
    probabilities of sharing a group; ``trace (S, 5)``: bound on the evidence, groups, number of the share, rates;
    ``means (S, T, p)``: ``b`` of the first T sites; ``z (S, V)``, ``m (S, p)``, ``w (S, p)``, ``alpha (S,)``: the
    states. ``best (V,)`` is the partition with the highest density of all sweeps.
    """

    b: Any
    bb: Any
    same: Any
    trace: Any
    means: Any
    z: Any
    m: Any
    w: Any
    alpha: Any
    best: Any


class Course(NamedTuple):
    """Sweeps before the first that is kept, most groups; whether edges count, groups are integrated out, and
    hyper-parameters move."""

    burn: Any
    most: Any
    edges: Any
    collapsed: Any
    moves: Any


class Groups(NamedTuple):
    """Sums over members ``H (K, p, p)``, ``c (K, p)``, ``n (K,)``, their log marginals ``(K,)``, draws ``(K, p)``,
    and room to work in."""

    H: Any
    c: Any
    n: Any
    log: Any
    draw: Any
    mean: Any
    R: Any
    x: Any
    tH: Any
    tc: Any


_I1, _I2 = writable(INT, 1), writable(INT, 2)
_W1, _W2, _W3 = writable(FLOAT, 1), writable(FLOAT, 2), writable(FLOAT, 3)
_R1, _R2, _R3, _R4 = (readable(FLOAT, n) for n in (1, 2, 3, 4))
_J1 = readable(INT, 1)
_SITES = bundle(Sites, _R4, _R3, _R2, _R1, _J1, _J1)
_STATE = bundle(State, _I1, _I1, _W1, _W1, _W1)
_RECORD = bundle(Record, _W2, _W3, _W2, _W2, _W3, _I2, _W2, _W2, _W1, _I1)
_COURSE = bundle(Course, INT, INT, INT, INT, INT)
_RANDOM = typeof(np.random.default_rng(0))  # type: ignore[no-untyped-call]


@part
def log_marginal(H, c, prior, R, x):  # type: ignore[no-untyped-def]
    """``[c'(H + P)^-1 c - log|H + P| + log|P|] / 2`` with ``P = diag(prior)``.

    Leaves the Cholesky factor ``R'R = H + P`` in the upper triangle of ``R`` and ``R'^-1 c`` in ``x``.
    """
    p = c.size
    square, logs, product = 0.0, 0.0, 1.0
    for i in range(p):
        for j in range(i, p):
            R[i, j] = H[i, j]
        R[i, i] += prior[i]
        x[i] = c[i]
    for k in range(p):
        pivot = max(R[k, k], 1e-10)
        product *= pivot / prior[k]
        if product > 1e150 or product < 1e-150:  # few logarithms, no overflow
            logs += math.log(product)
            product = 1.0
        scale = 1.0 / math.sqrt(pivot)
        for j in range(k, p):
            R[k, j] *= scale
        x[k] *= scale
        square += x[k] * x[k]
        for i in range(k + 1, p):
            factor = R[k, i]
            x[i] -= factor * x[k]
            for j in range(i, p):
                R[i, j] -= factor * R[k, j]
    return 0.5 * (square - logs - math.log(product))


@part
def back_substitute(R, x, out):  # type: ignore[no-untyped-def]
    """``out = R^-1 x``."""
    for i in range(x.size - 1, -1, -1):
        total = x[i]
        for j in range(i + 1, x.size):
            total -= R[i, j] * out[j]
        out[i] = total / R[i, i]


@part
def inverse_of_factor(R, out):  # type: ignore[no-untyped-def]
    """``out = (R'R)^-1``."""
    p = len(R)
    root = np.zeros((p, p))
    for j in range(p):
        root[j, j] = 1.0 / R[j, j]
        for i in range(j - 1, -1, -1):
            total = 0.0
            for k in range(i + 1, j + 1):
                total += R[i, k] * root[k, j]
            root[i, j] = -total / R[i, i]
    for i in range(p):
        for j in range(i, p):
            total = 0.0
            for k in range(j, p):
                total += root[i, k] * root[j, k]
            out[i, j] = total
            out[j, i] = total


@part
def add_noise(x, rng):  # type: ignore[no-untyped-def]
    for j in range(x.size):
        x[j] += rng.normal()


@part
def pick(logs, rng):  # type: ignore[no-untyped-def]
    """A position, drawn with probability proportional to ``exp(logs)``."""
    weight = np.exp(logs - logs.max())
    left = rng.random() * weight.sum()
    at = 0
    while at < weight.size - 1 and left > weight[at]:
        left -= weight[at]
        at += 1
    return at


@part
def log_beta(x, y):  # type: ignore[no-untyped-def]
    return math.lgamma(x) + math.lgamma(y) - math.lgamma(x + y)


@part
def collect(sites, z, r, m, c, groups):  # type: ignore[no-untyped-def]
    """Sums over the members of each group around ``m``, at share number ``r``; the log likelihood of ``nu = m``."""
    groups.H[:] = 0.0
    groups.c[:] = 0.0
    groups.n[:] = 0
    base = 0.0
    V, p = c.shape
    for u in range(V):
        k = z[u]
        base += sites.k[r, u]
        for i in range(p):
            bend = 0.0
            for j in range(p):
                bend += sites.H[r, u, i, j] * m[j]
                groups.H[k, i, j] += sites.H[r, u, i, j]
            c[u, i] = sites.c[r, u, i] - bend
            groups.c[k, i] += c[u, i]
            base += m[i] * (sites.c[r, u, i] - 0.5 * bend)
        groups.n[k] += 1
    return base


@part
def move_sites(sites, state, course, groups, c, prior, same, rng):  # type: ignore[no-untyped-def]
    """Draw every site's group given all others, in random order; the entropy of these choices.

    Adds the probabilities of sharing a group to ``same`` (nothing where it is empty).
    """
    V, p = c.shape
    most, r, z = course.most, state.share[0], state.z
    alpha, r_in, r_out = state.scalars[2], state.scalars[3], state.scalars[4]
    edge, gap = math.log(r_in / r_out), math.log((1.0 - r_in) / (1.0 - r_out))
    weight, new, edges = np.zeros(most + 1), np.zeros(most + 1), np.zeros(most)
    order = rng.permutation(V)
    entropy = 0.0
    for u in order:
        k = z[u]
        groups.c[k] -= c[u]
        groups.H[k] -= sites.H[r, u]
        groups.n[k] -= 1
        if course.collapsed and groups.n[k] > 0:
            groups.log[k] = log_marginal(groups.H[k], groups.c[k], prior, groups.R, groups.x)
        if course.edges:
            edges[:] = 0.0
            for t in range(sites.first[u], sites.first[u + 1]):
                edges[z[sites.neighbour[t]]] += 1.0
        alone = log_marginal(sites.H[r, u], c[u], prior, groups.R, groups.x)
        free, top = -1, -np.inf
        for k in range(most):
            weight[k] = -np.inf
            if groups.n[k] == 0:
                free = k if free < 0 else free
                continue
            if course.collapsed:
                for i in range(p):
                    groups.tc[i] = groups.c[k, i] + c[u, i]
                    for j in range(i, p):
                        groups.tH[i, j] = groups.H[k, i, j] + sites.H[r, u, i, j]
                new[k] = log_marginal(groups.tH, groups.tc, prior, groups.R, groups.x)
                gain = new[k] - groups.log[k]
            else:
                gain = 0.0
                for i in range(p):
                    bend = 0.0
                    for j in range(p):
                        bend += sites.H[r, u, i, j] * groups.draw[k, j]
                    gain += groups.draw[k, i] * (c[u, i] - 0.5 * bend)
            if course.edges:
                gain += edges[k] * edge + (groups.n[k] - edges[k]) * gap
            weight[k] = gain + math.log(groups.n[k])
            top = max(top, weight[k])
        weight[most] = alone + math.log(alpha) if free >= 0 else -np.inf
        top = max(top, weight[most])
        total = 0.0
        for k in range(most + 1):
            weight[k] = math.exp(weight[k] - top)
            total += weight[k]
        for k in range(most + 1):
            share = weight[k] / total
            if share > 1e-12:
                entropy -= share * math.log(share)
        if same.size:
            for v in range(V):
                if v != u:
                    same[u, v] += weight[z[v]] / total
        left = rng.random() * total
        chosen = 0
        while chosen < most and (left > weight[chosen] or weight[chosen] == 0.0):
            left -= weight[chosen]
            chosen += 1
        if chosen == most:
            if free < 0:
                chosen = z[u]
            else:
                chosen = free
                new[chosen] = alone
                if not course.collapsed:
                    log_marginal(sites.H[r, u], c[u], prior, groups.R, groups.x)
                    add_noise(groups.x, rng)
                    back_substitute(groups.R, groups.x, groups.draw[chosen])
        z[u] = chosen
        groups.log[chosen] = new[chosen]
        groups.c[chosen] += c[u]
        groups.H[chosen] += sites.H[r, u]
        groups.n[chosen] += 1
    return entropy


@part
def draw_groups(groups, prior, rng):  # type: ignore[no-untyped-def]
    """Means and draws of ``nu_k - m``; the sum of log marginals."""
    total = 0.0
    for k in range(groups.n.size):
        if groups.n[k] > 0:
            groups.log[k] = log_marginal(groups.H[k], groups.c[k], prior, groups.R, groups.x)
            total += groups.log[k]
            back_substitute(groups.R, groups.x, groups.mean[k])
            add_noise(groups.x, rng)
            back_substitute(groups.R, groups.x, groups.draw[k])
    return total


@part
def move_widths(state, groups, prior, n_groups, rng):  # type: ignore[no-untyped-def]
    """Draw ``m``, ``w`` and what they come from; the sum of log prior minus log conditional of ``m`` and ``w``."""
    p = prior.size
    typical, shape = state.scalars[0], state.scalars[1]
    gain, inverses, logs = 0.0, 0.0, 0.0
    for j in range(p):
        total = 0.0
        for k in range(groups.n.size):
            if groups.n[k] > 0:
                total += groups.draw[k, j] + state.m[j]
        precision = n_groups * prior[j] + MEAN_PRECISION
        mean = total * prior[j] / precision + rng.normal() / math.sqrt(precision)
        squares = 0.0
        for k in range(groups.n.size):
            if groups.n[k] > 0:
                squares += (groups.draw[k, j] + state.m[j] - mean) ** 2
        state.m[j] = mean
        gain += 0.5 * (math.log(MEAN_PRECISION / precision) - MEAN_PRECISION * mean**2 + 1.0)
        a, b = shape + 0.5 * n_groups, shape * typical + 0.5 * squares
        width = min(max(b / rng.gamma(a), LEAST), 1.0 / LEAST)
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
        for k in range(groups.n.size):
            if groups.n[k] > 0:
                odds[r] += log_marginal(groups.H[k], groups.c[k], prior, groups.R, groups.x)
    state.share[0] = pick(odds, rng)


@part
def log_share_prior(r, n_shares):  # type: ignore[no-untyped-def]
    """Half of the mass on groups without any spread inside."""
    return math.log(0.5) if r == 0 else math.log(0.5 / (n_shares - 1))


@part
def count_edges(sites, z, n):  # type: ignore[no-untyped-def]
    """Edges inside groups, pairs inside groups, edges between, pairs between."""
    inside, pairs, V = 0.0, 0.0, z.size
    for u in range(V):
        for t in range(sites.first[u], sites.first[u + 1]):
            inside += 0.5 * (z[sites.neighbour[t]] == z[u])
    for k in range(n.size):
        pairs += 0.5 * n[k] * (n[k] - 1)
    return inside, pairs, 0.5 * sites.neighbour.size - inside, 0.5 * V * (V - 1) - pairs


@part
def keep_sweep(sites, state, groups, prior, record, s):  # type: ignore[no-untyped-def]
    """Add effects given the partition as line ``s``: groups' means plus what sites say about their own effects."""
    r, share = state.share[0], sites.share[state.share[0]]
    V, p = record.b.shape
    C, identity = np.zeros((p, p)), np.eye(p)
    for k in range(groups.n.size):
        if groups.n[k] == 0:
            continue
        log_marginal(groups.H[k], groups.c[k], prior, groups.R, groups.x)
        inverse_of_factor(groups.R, C)
        centre = state.m + groups.mean[k]
        for u in range(V):
            if state.z[u] != k:
                continue
            b = centre.copy()
            if share > 0.0:
                for i in range(p):
                    bend = 0.0
                    for j in range(p):
                        bend += sites.H[r, u, i, j] * centre[j]
                    b[i] += share * (sites.c[r, u, i] - bend)
                B = identity - share * sites.H[r, u]
                record.bb[u] += share * B + np.dot(np.dot(B, C), B)
            else:
                record.bb[u] += C
            for i in range(p):
                record.b[u, i] += b[i]
                for j in range(p):
                    record.bb[u, i, j] += b[i] * b[j]
            if u < record.means.shape[1]:
                record.means[s, u] = b
    record.z[s] = state.z
    record.m[s] = state.m
    record.w[s] = state.w
    record.alpha[s] = state.scalars[2]


@part
def make_groups(most, p):  # type: ignore[no-untyped-def]
    return Groups(
        np.zeros((most, p, p)),
        np.zeros((most, p)),
        np.zeros(most, np.int64),
        np.zeros(most),
        np.zeros((most, p)),
        np.zeros((most, p)),
        np.zeros((p, p)),
        np.zeros(p),
        np.zeros((p, p)),
        np.zeros(p),
    )


@kernel(FLOAT, _SITES, _STATE, _RECORD, _COURSE, _RANDOM)
def run_chain(sites, state, record, course, rng):  # type: ignore[no-untyped-def]
    """Move ``state`` over ``course.burn`` sweeps and one for each line of ``record``; the mean bound on the evidence.

    The bound of a sweep is the log density of data and state, plus the entropies of the conditionals that it was drawn
    from. Its mean leaves out the first half of the sweeps that are not kept.
    """
    V, p = sites.c.shape[1:]
    prior, c, nothing = 1.0 / state.w, np.zeros((V, p)), np.zeros((0, 0))
    groups = make_groups(course.most, p)
    density = (0.5 * sites.neighbour.size + 1.0) / (0.5 * V * (V - 1) + 2.0)
    yes, no = 2.0 * density, 2.0 - 2.0 * density  # of the rates' beta priors
    best, total, counted = -np.inf, 0.0, 0
    for sweep in range(course.burn + len(record.z)):
        s = sweep - course.burn
        score = collect(sites, state.z, state.share[0], state.m, c, groups)
        draw_groups(groups, prior, rng)
        # one group with a spread inside is a continuum: nobody is kin
        counts = s >= 0 and (state.share[0] == 0 or np.sum(groups.n > 0) > 1)
        entropy = move_sites(sites, state, course, groups, c, prior, record.same if counts else nothing, rng)
        score += draw_groups(groups, prior, rng)
        n_groups, alpha = 0, state.scalars[2]
        for k in range(course.most):
            if groups.n[k] > 0:
                n_groups += 1
                score += math.log(alpha) + math.lgamma(groups.n[k])
        score += math.lgamma(alpha) - math.lgamma(alpha + V)
        inside, pairs, between, others = count_edges(sites, state.z, groups.n)
        if course.edges:
            score += log_beta(inside + yes, pairs - inside + no) + log_beta(between + yes, others - between + no)
            score -= 2.0 * log_beta(yes, no)
        if score > best:
            best = score
            record.best[:] = state.z
        score += entropy + log_share_prior(state.share[0], sites.share.size)
        if s >= 0:
            keep_sweep(sites, state, groups, prior, record, s)
            record.trace[s, 1], record.trace[s, 2] = n_groups, state.share[0]
            record.trace[s, 3], record.trace[s, 4] = state.scalars[3], state.scalars[4]
        if course.moves:
            score += move_widths(state, groups, prior, n_groups, rng)
            if sweep % SHARE_EVERY == 0:
                move_share(sites, state, groups, c, prior, rng)
            rate = rng.beta(inside + yes, pairs - inside + no)
            state.scalars[3] = min(max(rate, LEAST_RATE), 1.0 - LEAST_RATE)
            rate = rng.beta(between + yes, others - between + no)
            state.scalars[4] = min(max(rate, LEAST_RATE), 1.0 - LEAST_RATE)
            # Escobar and West (1995), with a Gamma(1, 1) prior
            scale = 1.0 - math.log(rng.beta(alpha + 1.0, V))
            more = n_groups if rng.random() * (V * scale + n_groups) < n_groups else n_groups - 1
            state.scalars[2] = max(rng.gamma(1.0 + more) / scale, LEAST)
        if s >= 0:
            record.trace[s, 0] = score
        if 2 * sweep >= course.burn:
            total += score
            counted += 1
    return total / max(counted, 1)


@part
def merge_gain(groups, edges, prior, edge, gap, a, b):  # type: ignore[no-untyped-def]
    p = prior.size
    for i in range(p):
        groups.tc[i] = groups.c[a, i] + groups.c[b, i]
        for j in range(i, p):
            groups.tH[i, j] = groups.H[a, i, j] + groups.H[b, i, j]
    joined = log_marginal(groups.tH, groups.tc, prior, groups.R, groups.x)
    pairs = groups.n[a] * groups.n[b]
    return joined - groups.log[a] - groups.log[b] + edges[a, b] * edge + (pairs - edges[a, b]) * gap


@kernel(INT, _R3, _R2, _R1, _J1, _J1, FLOAT, FLOAT, _I1)
def merge(H, c, prior, first, neighbour, r_in, r_out, z):  # type: ignore[no-untyped-def]
    """Merge groups ``z (V,)`` (numbered 0..K-1), the best pair first, while the evidence rises; how many are left."""
    V, p = c.shape
    K = z.max() + 1
    edge, gap = math.log(r_in / r_out), math.log((1.0 - r_in) / (1.0 - r_out))
    groups = make_groups(K, p)
    edges = np.zeros((K, K))
    for u in range(V):
        groups.H[z[u]] += H[u]
        groups.c[z[u]] += c[u]
        groups.n[z[u]] += 1
        for t in range(first[u], first[u + 1]):
            edges[z[u], z[neighbour[t]]] += 1.0
    gain = np.full((K, K), -np.inf)  # of merging a and b < a
    for a in range(K):
        groups.log[a] = log_marginal(groups.H[a], groups.c[a], prior, groups.R, groups.x)
        for b in range(a):
            gain[a, b] = merge_gain(groups, edges, prior, edge, gap, a, b)
    label = np.arange(K)
    left = K
    while left > 1:
        best, into, gone = 0.0, -1, -1
        for a in range(K):
            if groups.n[a] > 0:
                for b in range(a):
                    if groups.n[b] > 0 and gain[a, b] > best:
                        best, into, gone = gain[a, b], a, b
        if into < 0:
            break
        groups.H[into] += groups.H[gone]
        groups.c[into] += groups.c[gone]
        groups.n[into] += groups.n[gone]
        groups.n[gone] = 0
        edges[into] += edges[gone]
        edges[:, into] += edges[:, gone]
        left -= 1
        for k in range(K):
            if label[k] == gone:
                label[k] = into
        groups.log[into] = log_marginal(groups.H[into], groups.c[into], prior, groups.R, groups.x)
        for k in range(K):
            if groups.n[k] > 0 and k != into:
                a, b = max(into, k), min(into, k)
                gain[a, b] = merge_gain(groups, edges, prior, edge, gap, a, b)
    for u in range(V):
        z[u] = label[z[u]]
    return left
