"""Groups of sites by Gibbs sampling, compiled (numba): one chain of partitions, and merging that finds starts for it.

The model, in units where the spread between sites is 1 for every coefficient: ``b_u = nu_z(u) + sqrt(rho) e_u``, groups
``nu_k ~ N(m, diag w)``, partitions ``z`` from a Chinese restaurant process with concentration ``alpha``, edges with
probability ``r_in`` inside groups and ``r_out`` between them. Effects ``e`` and groups ``nu`` are integrated out, so
that a chain moves over partitions. For many sites groups are drawn once per sweep instead, which costs p^2 and not p^3
for each pair of a site and a group.

Everything compiled is in this file: numba compiles a kernel again only when its own file has changed. Loops are written
out, since every numpy function takes the compiler a second or so.
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
#: Groups whose marginals are computed at once, one in each lane of vector instructions.
LANES = 8


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
    """Sums over members, and room to work in. Group k is in lane ``k % LANES`` of block ``k // LANES``.

    ``H (B, p, p, LANES)`` (upper triangles), ``c (B, p, LANES)``, ``n (B LANES,)``, log marginals ``log``, what they
    would be with another site ``new``, means and draws ``(B LANES, p)``; ``take (LANES,)``, ``lanes (p, p, LANES)``,
    ``x (p, LANES)``, ``row (p + 1, LANES)`` for `log_marginals`, ``R (p, p)``, ``y (p,)`` for `log_marginal`.
    """

    H: Any
    c: Any
    n: Any
    log: Any
    new: Any
    draw: Any
    mean: Any
    take: Any
    lanes: Any
    x: Any
    row: Any
    R: Any
    y: Any


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

    Leaves the Cholesky factor ``R'R = H + P`` in the upper triangle of ``R`` and ``R'^-1 c`` in ``x``, which may be
    ``H`` and ``c`` themselves.
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
def log_marginals(groups, block, H, c, prior, out):  # type: ignore[no-untyped-def]
    """`log_marginal` of the groups of a block, with ``take`` times ``H`` and ``c`` added, into ``out (LANES,)``."""
    p = c.size
    R, x, row, take = groups.lanes, groups.x, groups.row, groups.take
    product = row[p]
    for v in range(LANES):
        out[v], product[v] = 0.0, 1.0
    for i in range(p):
        for j in range(i, p):
            for v in range(LANES):
                R[i, j, v] = groups.H[block, i, j, v] + take[v] * H[i, j]
        for v in range(LANES):
            R[i, i, v] += prior[i]
            x[i, v] = groups.c[block, i, v] + take[v] * c[i]
    for k in range(p):
        for v in range(LANES):
            pivot = max(R[k, k, v], 1e-10)
            product[v] *= pivot / prior[k]
            row[k, v] = 1.0 / math.sqrt(pivot)
            x[k, v] *= row[k, v]
            out[v] += x[k, v] * x[k, v]
        if k % 8 == 7 or k == p - 1:  # few logarithms, no overflow
            for v in range(LANES):
                out[v] -= math.log(product[v])
                product[v] = 1.0
        for j in range(k + 1, p):
            for v in range(LANES):
                row[j, v] = R[k, j, v] * row[k, v]
        for i in range(k + 1, p):
            for v in range(LANES):
                x[i, v] -= row[i, v] * x[k, v]
            # all reads before all writes: only then can the compiler use vector instructions
            f0, f1, f2, f3 = row[i, 0], row[i, 1], row[i, 2], row[i, 3]
            f4, f5, f6, f7 = row[i, 4], row[i, 5], row[i, 6], row[i, 7]
            for j in range(i, p):
                a0, a1 = R[i, j, 0] - f0 * row[j, 0], R[i, j, 1] - f1 * row[j, 1]
                a2, a3 = R[i, j, 2] - f2 * row[j, 2], R[i, j, 3] - f3 * row[j, 3]
                a4, a5 = R[i, j, 4] - f4 * row[j, 4], R[i, j, 5] - f5 * row[j, 5]
                a6, a7 = R[i, j, 6] - f6 * row[j, 6], R[i, j, 7] - f7 * row[j, 7]
                R[i, j, 0], R[i, j, 1], R[i, j, 2], R[i, j, 3] = a0, a1, a2, a3
                R[i, j, 4], R[i, j, 5], R[i, j, 6], R[i, j, 7] = a4, a5, a6, a7
    for v in range(LANES):
        out[v] *= 0.5


@part
def factorise(groups, k, prior):  # type: ignore[no-untyped-def]
    """`log_marginal` of one group: its Cholesky factor in ``groups.R``, the solved right-hand side in ``groups.y``."""
    block, lane = k // LANES, k % LANES
    p = prior.size
    for i in range(p):
        groups.y[i] = groups.c[block, i, lane]
        for j in range(i, p):
            groups.R[i, j] = groups.H[block, i, j, lane]
    return log_marginal(groups.R, groups.y, prior, groups.R, groups.y)


@part
def add_site(groups, k, H, c, sign):  # type: ignore[no-untyped-def]
    """Put a site into group k (sign 1), or take it out (sign -1)."""
    block, lane = k // LANES, k % LANES
    for i in range(c.size):
        groups.c[block, i, lane] += sign * c[i]
        for j in range(i, c.size):
            groups.H[block, i, j, lane] += sign * H[i, j]
    groups.n[k] += sign


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
        x[j] += rng.standard_normal()


@part
def pick(logs, rng):  # type: ignore[no-untyped-def]
    """A position, drawn with probability proportional to ``exp(logs)``, which are overwritten."""
    top, left, at = -np.inf, 0.0, 0
    for t in range(logs.size):
        top = max(top, logs[t])
    for t in range(logs.size):
        logs[t] = math.exp(logs[t] - top)
        left += logs[t]
    left *= rng.random()
    while at < logs.size - 1 and left > logs[at]:
        left -= logs[at]
        at += 1
    return at


@part
def shuffle(order, rng):  # type: ignore[no-untyped-def]
    for t in range(order.size - 1, 0, -1):
        other = int(rng.random() * (t + 1))
        order[t], order[other] = order[other], order[t]


@part
def draw_beta(a, b, rng):  # type: ignore[no-untyped-def]
    """A beta variable, away from 0 and 1 by so much that its odds can be computed with."""
    x = rng.standard_gamma(a)
    return min(max(x / (x + rng.standard_gamma(b)), LEAST_RATE), 1.0 - LEAST_RATE)


@part
def assign(target, values):  # type: ignore[no-untyped-def]
    for t in range(target.size):
        target[t] = values[t]


@part
def log_beta(x, y):  # type: ignore[no-untyped-def]
    return math.lgamma(x) + math.lgamma(y) - math.lgamma(x + y)


@part
def collect(sites, z, r, m, c, groups):  # type: ignore[no-untyped-def]
    """Sums over the members of each group around ``m``, at share number ``r``; the log likelihood of ``nu = m``."""
    groups.H.fill(0.0)
    groups.c.fill(0.0)
    groups.n.fill(0)
    base = 0.0
    V, p = c.shape
    for u in range(V):
        base += sites.k[r, u]
        for i in range(p):
            bend = 0.0
            for j in range(p):
                bend += sites.H[r, u, i, j] * m[j]
            c[u, i] = sites.c[r, u, i] - bend
            base += m[i] * (sites.c[r, u, i] - 0.5 * bend)
        add_site(groups, z[u], sites.H[r, u], c[u], 1)
    return base


@part
def join_marginals(groups, course, old, free, H, c, prior, out):  # type: ignore[no-untyped-def]
    """Log marginals of all groups with a site that has just left group ``old``, and of the site alone.

    An empty group with the site is the site alone; ``old`` with it is what ``old`` was, so that its lane has room for
    what is left of it.
    """
    alone = 0.0
    for block in range(len(groups.H)):
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
def move_sites(sites, state, course, groups, c, prior, same, rng):  # type: ignore[no-untyped-def]
    """Draw every site's group given all others, in random order; the entropy of these choices.

    Adds the probabilities of sharing a group to ``same`` (nothing where it is empty).
    """
    V, p = c.shape
    most, r, z = course.most, state.share[0], state.z
    alpha, r_in, r_out = state.scalars[2], state.scalars[3], state.scalars[4]
    edge, gap = math.log(r_in / r_out), math.log((1.0 - r_in) / (1.0 - r_out))
    weight, edges, out = np.zeros(most + 1), np.zeros(most), np.zeros(LANES)
    order = np.empty(V, np.int64)
    for u in range(V):
        order[u] = u
    shuffle(order, rng)
    entropy = 0.0
    for u in order:
        H, old = sites.H[r, u], z[u]
        add_site(groups, old, H, c[u], -1)
        free = -1
        for k in range(most):
            if groups.n[k] == 0:
                free = k
                break
        if course.edges:
            for k in range(most):
                edges[k] = 0.0
            for t in range(sites.first[u], sites.first[u + 1]):
                edges[z[sites.neighbour[t]]] += 1.0
        if course.collapsed:
            alone = join_marginals(groups, course, old, free, H, c[u], prior, out)
        else:
            alone = log_marginal(H, c[u], prior, groups.R, groups.y)
        top = -np.inf
        for k in range(most):
            weight[k] = -np.inf
            if groups.n[k] == 0:
                continue
            gain = groups.new[k] - groups.log[k]
            if not course.collapsed:
                gain = 0.0
                for i in range(p):
                    bend = 0.0
                    for j in range(p):
                        bend += H[i, j] * groups.draw[k, j]
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
            chosen = free if free >= 0 else old
            groups.new[chosen] = alone
            if not course.collapsed:
                log_marginal(H, c[u], prior, groups.R, groups.y)
                add_noise(groups.y, rng)
                back_substitute(groups.R, groups.y, groups.draw[chosen])
        z[u] = chosen
        groups.log[chosen] = groups.new[chosen]
        add_site(groups, chosen, H, c[u], 1)
    return entropy


@part
def draw_groups(groups, prior, rng):  # type: ignore[no-untyped-def]
    """Means and draws of ``nu_k - m``; the sum of log marginals."""
    total = 0.0
    for k in range(groups.n.size):
        if groups.n[k] > 0:
            groups.log[k] = factorise(groups, k, prior)
            total += groups.log[k]
            back_substitute(groups.R, groups.y, groups.mean[k])
            add_noise(groups.y, rng)
            back_substitute(groups.R, groups.y, groups.draw[k])
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
        mean = total * prior[j] / precision + rng.standard_normal() / math.sqrt(precision)
        squares = 0.0
        for k in range(groups.n.size):
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
        for k in range(groups.n.size):
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
    inside, pairs, V = 0.0, 0.0, z.size
    for u in range(V):
        for t in range(sites.first[u], sites.first[u + 1]):
            inside += 0.5 * (z[sites.neighbour[t]] == z[u])
    for k in range(n.size):
        pairs += 0.5 * n[k] * (n[k] - 1)
    return inside, pairs, 0.5 * sites.neighbour.size - inside, 0.5 * V * (V - 1) - pairs


@part
def multiply(A, B, out):  # type: ignore[no-untyped-def]
    for i in range(len(A)):
        for j in range(len(A)):
            out[i, j] = 0.0
    add_product(A, B, out)


@part
def add_product(A, B, out):  # type: ignore[no-untyped-def]
    """``out += A B``."""
    for i in range(len(A)):
        for k in range(len(A)):
            factor = A[i, k]
            for j in range(len(A)):
                out[i, j] += factor * B[k, j]


@part
def keep_sweep(sites, state, groups, prior, record, s):  # type: ignore[no-untyped-def]
    """Add effects given the partition as line ``s``: groups' means plus what sites say about their own effects."""
    r, share = state.share[0], sites.share[state.share[0]]
    V, p = record.b.shape
    B, C, BC, b, centre = np.zeros((p, p)), np.zeros((p, p)), np.zeros((p, p)), np.zeros(p), np.zeros(p)
    for k in range(groups.n.size):
        if groups.n[k] == 0:
            continue
        factorise(groups, k, prior)
        inverse_of_factor(groups.R, C)
        for i in range(p):
            centre[i] = state.m[i] + groups.mean[k, i]
        for u in range(V):
            if state.z[u] != k:
                continue
            assign(b, centre)
            if share > 0.0:
                for i in range(p):
                    bend = 0.0
                    for j in range(p):
                        bend += sites.H[r, u, i, j] * centre[j]
                        B[i, j] = -share * sites.H[r, u, i, j]
                    B[i, i] += 1.0
                    b[i] += share * (sites.c[r, u, i] - bend)
                multiply(B, C, BC)
                add_product(BC, B, record.bb[u])
            for i in range(p):
                record.b[u, i] += b[i]
                for j in range(p):
                    record.bb[u, i, j] += b[i] * b[j] + (share * B[i, j] if share > 0.0 else C[i, j])
            if u < record.means.shape[1]:
                assign(record.means[s, u], b)
    assign(record.z[s], state.z)
    assign(record.m[s], state.m)
    assign(record.w[s], state.w)
    record.alpha[s] = state.scalars[2]


@part
def make_groups(most, p):  # type: ignore[no-untyped-def]
    """Room for ``most`` groups, all of them empty."""
    blocks = (most + LANES - 1) // LANES
    return Groups(
        np.zeros((blocks, p, p, LANES)),
        np.zeros((blocks, p, LANES)),
        np.zeros(blocks * LANES, np.int64),
        np.zeros(blocks * LANES),
        np.zeros(blocks * LANES),
        np.zeros((blocks * LANES, p)),
        np.zeros((blocks * LANES, p)),
        np.ones(LANES),
        np.zeros((p, p, LANES)),
        np.zeros((p, LANES)),
        np.zeros((p + 1, LANES)),
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
    prior, c, nothing = np.zeros(p), np.zeros((V, p)), np.zeros((0, 0))
    for j in range(p):
        prior[j] = 1.0 / state.w[j]
    groups = make_groups(course.most, p)
    density = (0.5 * sites.neighbour.size + 1.0) / (0.5 * V * (V - 1) + 2.0)
    yes, no = 2.0 * density, 2.0 - 2.0 * density  # of the rates' beta priors
    best, total, counted = -np.inf, 0.0, 0
    for sweep in range(course.burn + len(record.z)):
        s = sweep - course.burn
        score = collect(sites, state.z, state.share[0], state.m, c, groups)
        draw_groups(groups, prior, rng)
        # one group with a spread inside is a continuum: nobody is kin
        several = groups.n[state.z[0]] < V
        counts = s >= 0 and (state.share[0] == 0 or several)
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
            assign(record.best, state.z)
        score += entropy + log_share_prior(state.share[0], sites.share.size)
        if s >= 0:
            keep_sweep(sites, state, groups, prior, record, s)
            record.trace[s, 1], record.trace[s, 2] = n_groups, state.share[0]
            record.trace[s, 3], record.trace[s, 4] = state.scalars[3], state.scalars[4]
        if course.moves:
            score += move_widths(state, groups, prior, n_groups, rng)
            if sweep % SHARE_EVERY == 0:
                move_share(sites, state, groups, c, prior, rng)
            state.scalars[3] = draw_beta(inside + yes, pairs - inside + no, rng)
            state.scalars[4] = draw_beta(between + yes, others - between + no, rng)
            # Escobar and West (1995), with a Gamma(1, 1) prior
            scale = 1.0 - math.log(draw_beta(alpha + 1.0, V, rng))
            more = n_groups if rng.random() * (V * scale + n_groups) < n_groups else n_groups - 1
            state.scalars[2] = max(rng.standard_gamma(1.0 + more) / scale, LEAST)
        if s >= 0:
            record.trace[s, 0] = score
        if 2 * sweep >= course.burn:
            total += score
            counted += 1
    return total / max(counted, 1)


@part
def largest(values):  # type: ignore[no-untyped-def]
    """Where the largest value is."""
    at = 0
    for t in range(values.size):
        if values[t] > values[at]:
            at = t
    return at


@part
def merge_gains(groups, a, H, edges, prior, rates, gain, out):  # type: ignore[no-untyped-def]
    """What merging group ``a`` with each other group adds to the log evidence, into row and column a of ``gain``."""
    block, lane = a // LANES, a % LANES
    p, K = prior.size, len(gain)
    c = groups.y
    for i in range(p):
        c[i] = groups.c[block, i, lane]
        for j in range(i, p):
            H[i, j] = groups.H[block, i, j, lane]
    for other in range(len(groups.H)):
        log_marginals(groups, other, H, c, prior, out)
        for v in range(LANES):
            b = other * LANES + v
            if b < K and b != a and groups.n[b] > 0:
                pairs = groups.n[a] * groups.n[b] - edges[a, b]
                gain[a, b] = out[v] - groups.log[a] - groups.log[b] + edges[a, b] * rates[0] + pairs * rates[1]
                gain[b, a] = gain[a, b]


@kernel(INT, _R3, _R2, _R1, _J1, _J1, FLOAT, FLOAT, _I1)
def merge(H, c, prior, first, neighbour, r_in, r_out, z):  # type: ignore[no-untyped-def]
    """Merge groups ``z (V,)`` (numbered 0..K-1), the best pair first, while the evidence rises; how many are left."""
    V, p = c.shape
    K = 0
    for u in range(V):
        K = max(K, z[u] + 1)
    rates = (math.log(r_in / r_out), math.log((1.0 - r_in) / (1.0 - r_out)))
    groups, edges = make_groups(K, p), np.zeros((K, K))
    gain, room, out = np.zeros((K, K)), np.zeros((p, p)), np.zeros(LANES)
    gain.fill(-np.inf)
    for u in range(V):
        add_site(groups, z[u], H[u], c[u], 1)
        for t in range(first[u], first[u + 1]):
            edges[z[u], z[neighbour[t]]] += 1.0
    for a in range(K):
        groups.log[a] = factorise(groups, a, prior)
    for a in range(K):
        merge_gains(groups, a, room, edges, prior, rates, gain, out)
    best, label = np.zeros(K, np.int64), np.zeros(K, np.int64)  # each group's best partner, and where it has gone
    for a in range(K):
        best[a] = largest(gain[a])
        label[a] = a
    left = K
    while left > 1:
        into = -1
        for a in range(K):
            if groups.n[a] > 0 and gain[a, best[a]] > (0.0 if into < 0 else gain[into, best[into]]):
                into = a
        if into < 0:
            break
        gone = best[into]
        block, lane = gone // LANES, gone % LANES
        for i in range(p):
            groups.c[into // LANES, i, into % LANES] += groups.c[block, i, lane]
            for j in range(i, p):
                groups.H[into // LANES, i, j, into % LANES] += groups.H[block, i, j, lane]
        groups.n[into] += groups.n[gone]
        groups.n[gone] = 0
        left -= 1
        for k in range(K):
            edges[into, k] += edges[gone, k]
            edges[k, into] = edges[into, k]
            gain[gone, k] = gain[k, gone] = -np.inf
            if label[k] == gone:
                label[k] = into
        groups.log[into] = factorise(groups, into, prior)
        merge_gains(groups, into, room, edges, prior, rates, gain, out)
        for a in range(K):
            if groups.n[a] > 0:
                if a == into or best[a] == into or best[a] == gone:
                    best[a] = largest(gain[a])
                elif gain[a, into] > gain[a, best[a]]:
                    best[a] = into
    for u in range(V):
        z[u] = label[z[u]]
    return left
