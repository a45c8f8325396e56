"""Methods beside `find_kin`, on least-squares sums alone: clustering, IFCA, the mixed model, and the limit of all.

Each takes the `Quadratics` of the sites and returns ``theta (V, p)``, or labels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fedkin._base import Array, Index
from fedkin.data import Federation
from fedkin.datasets import Design
from fedkin.graph import Graph
from fedkin.kin import Quadratics, common_units, fit_mixed


def least_squares(federation: Federation) -> Quadratics:
    """The sites' sums ``X'X``, ``X'y`` and ``y'y``."""
    X, y, of = federation.X, np.asarray(federation.y, dtype=np.float64), federation.site_index
    own = [np.flatnonzero(of == u) for u in range(federation.n_sites)]
    G, c = (np.stack([X[rows].T @ right[rows] for rows in own]) for right in (X, y))
    yy = np.array([float(y[rows] @ y[rows]) for rows in own])
    return Quadratics(G, c, yy, federation.n_samples.astype(np.float64))


def mixed(sums: Quadratics) -> Array:
    """Partial pooling without groups: random slopes with a spread per coefficient."""
    no_intercept = np.zeros(sums.n_params, dtype=bool)
    units = common_units(sums, no_intercept, has_scale=True)
    return units.theta(fit_mixed(units.fitted(sums), no_intercept).theta)


def pooled(sums: Quadratics, labels: Index) -> Array:
    """One fit per group, ``(V, p)``."""
    groups, of = np.unique(labels, return_inverse=True)
    each = [np.linalg.lstsq(sums.G[of == k].sum(axis=0), sums.c[of == k].sum(axis=0))[0] for k in range(len(groups))]
    return np.stack(each)[of]


# --- greedy pooled clustering -----------------------------------------------------------------------------------------


def clustering(sums: Quadratics, graph: Graph | None = None, turns: int = 3) -> Index:
    """Merge the two groups whose pooled fits differ least, from single sites up; the level with the least BIC.

    Two groups differ by what merging costs in deviance. With a graph the pairs of sites count too, as a block model of
    two rates of edges, inside groups and between them, which are those of the best level of the turn before.
    """
    noise = float((sums.yy - _explained(sums.G, sums.c)).sum() / (sums.n - sums.n_params).sum())
    price = sums.n_params * np.log(sums.n.sum())  # of a group
    has_edge = np.zeros((sums.n_sites, sums.n_sites))
    if graph is not None:
        i, j = graph.edges.T
        has_edge[i, j] = has_edge[j, i] = 1.0
    evidence, best = np.zeros_like(has_edge), np.zeros(sums.n_sites, dtype=np.int64)
    for _ in range(1 if graph is None else turns):
        least = np.inf
        for labels, deviance in _merges(sums, noise, evidence):
            rates = (0.0, 0.5, 0.5) if graph is None else _block_model(has_edge, labels)
            if (score := deviance + labels.max() * price - 2 * rates[0]) < least:
                least, best, (_, inside, between) = score, labels, rates
        evidence = has_edge * np.log(inside / between) + (1 - has_edge) * np.log((1 - inside) / (1 - between))
    return best


def _explained(G: Array, c: Array) -> Array:
    """``c' G^-1 c`` for stacks."""
    return np.asarray((c * np.linalg.solve(G, c[..., None])[..., 0]).sum(axis=-1))


def _merges(sums: Quadratics, noise: float, evidence: Array) -> Iterator[tuple[Index, float]]:
    """Labels after 0, 1, ... merges, and the deviance that they have cost.

    ``evidence (V, V)`` is the log likelihood ratio that two sites are alike.
    """
    G, c, V = sums.G / noise, sums.c / noise, sums.n_sites
    own, between = _explained(G, c), evidence.copy()
    cost = np.full((V, V), np.inf)
    for u in range(1, V):
        cost[u, :u] = own[u] + own[:u] - _explained(G[u] + G[:u], c[u] + c[:u]) - 2 * between[u, :u]
    labels, alive, deviance = np.arange(V), np.ones(V, dtype=bool), 0.0
    yield labels.copy(), deviance
    for _ in range(V - 1):
        a, b = np.unravel_index(int(np.argmin(cost)), cost.shape)
        G[b] += G[a]
        c[b] += c[a]
        together = float(_explained(G[b], c[b]))
        deviance += float(own[a] + own[b]) - together
        own[b] = together
        between[b] += between[a]
        between[:, b] += between[:, a]
        alive[a] = False
        labels[labels == labels[a]] = labels[b]
        cost[a, :] = cost[:, a] = np.inf
        others = np.flatnonzero(alive & (np.arange(V) != b))
        fresh = own[b] + own[others] - _explained(G[b] + G[others], c[b] + c[others]) - 2 * between[b, others]
        cost[np.maximum(b, others), np.minimum(b, others)] = fresh
        yield np.unique(labels, return_inverse=True)[1], deviance


def _block_model(has_edge: Array, labels: Index) -> tuple[float, float, float]:
    """Log likelihood of a graph given groups at its best two rates, and these; a rate is never quite 0 or 1."""
    same = labels[:, None] == labels
    i, j = np.tril_indices(len(labels), -1)
    total, rates = 0.0, []
    for side in (same[i, j], ~same[i, j]):
        edges, pairs = has_edge[i, j][side].sum(), side.sum()
        rate = float((edges + 0.5) / (pairs + 1))
        rates.append(rate)
        total += float(edges * np.log(rate) + (pairs - edges) * np.log(1 - rate))
    return total, rates[0], rates[1]


# --- IFCA -------------------------------------------------------------------------------------------------------------


def ifca(sums: Quadratics, n_groups: int, seed: int, restarts: int = 20, rounds: int = 100) -> Index:
    """Iterative federated clustering with a given number of groups, each fitted exactly.

    Every site joins the group whose parameters lose least on its rows, every group is fitted to its sites, until
    nothing changes. Groups begin with the fits of sites drawn at random; of several starts the one with the least loss
    counts.
    """
    rng = np.random.default_rng(seed)
    local = pooled(sums, np.arange(sums.n_sites))
    best, least = np.zeros(sums.n_sites, dtype=np.int64), np.inf
    for _ in range(restarts):
        centres = local[rng.choice(sums.n_sites, n_groups, replace=False)]
        labels = np.full(sums.n_sites, -1)
        for _ in range(rounds):
            losses = 0.5 * np.einsum("kp,upq,kq->uk", centres, sums.G, centres, optimize=True) - sums.c @ centres.T
            if (losses.argmin(axis=1) == labels).all():
                break
            labels = losses.argmin(axis=1)
            for k in np.unique(labels):  # a group without sites keeps its parameters
                mine = labels == k
                centres[k] = np.linalg.lstsq(sums.G[mine].sum(axis=0), sums.c[mine].sum(axis=0))[0]
        if (value := float(sums.values(pooled(sums, labels)).sum())) < least:
            best, least = labels, value
    return best


# --- the information limit --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Truth:
    """What the design was drawn with, and nobody knows."""

    n_groups: int
    variance: float  # of every coefficient of a group's parameters
    noise: float
    inside: float  # share of pairs in one group that have an edge
    between: float


def limit(design: Design, sums: Quadratics, truth: Truth, seed: int, sweeps: int = 400, burn: int = 50) -> Array:
    """Posterior means under the true model and its true constants, ``(V, p)``: no method can do better on average.

    A Gibbs sampler that begins at the true groups, so that it need not find them: groups' parameters given labels,
    then labels one by one given parameters and the edges to all others.
    """
    rng = np.random.default_rng(seed)
    K, p = truth.n_groups, sums.n_params
    G, c = sums.G / truth.noise, sums.c / truth.noise
    inside, between = (float(np.clip(rate, 1e-9, 1 - 1e-9)) for rate in (truth.inside, truth.between))
    i, j = design.graph.edges.T
    weight = np.full((sums.n_sites, sums.n_sites), np.log((1 - inside) / (1 - between)))
    weight[i, j] = weight[j, i] = np.log(inside / between)
    np.fill_diagonal(weight, 0.0)
    member = np.eye(K)[design.labels]  # (V, K)
    total = np.zeros((sums.n_sites, p))
    for sweep in range(burn + sweeps):
        precision = np.einsum("uk,upq->kpq", member, G, optimize=True) + np.eye(p) / truth.variance
        mean = np.linalg.solve(precision, (member.T @ c)[:, :, None])[:, :, 0]
        if sweep >= burn:
            total += member @ mean
        root = np.linalg.cholesky(precision)
        noise = np.linalg.solve(np.swapaxes(root, 1, 2), rng.normal(size=(K, p, 1)))[:, :, 0]
        drawn = mean + noise
        fit = c @ drawn.T - 0.5 * np.einsum("kp,upq,kq->uk", drawn, G, drawn, optimize=True)
        gumbel = rng.gumbel(size=fit.shape)
        for u in rng.permutation(sums.n_sites):
            chosen = int(np.argmax(fit[u] + weight[u] @ member + gumbel[u]))
            member[u] = 0.0
            member[u, chosen] = 1.0
    return total / sweeps
