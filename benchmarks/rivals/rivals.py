"""Rivals of kin that take least-squares sums alone, and the information limit of all methods.

`fedkin study --config benchmarks/rivals/kin.toml` runs them on the designs of the study "kin".
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedkin._base import Array, Index
from fedkin.data import Federation
from fedkin.datasets import Design
from fedkin.errors import ParameterError
from fedkin.graph import Graph
from fedkin.kin import QuadraticLikelihoods, common_units, fit_mixed
from fedkin.studies import Replication
from fedkin.studies.tasks import Workbench


def least_squares(federation: Federation) -> QuadraticLikelihoods:
    """Return the sites' sums ``X'X``, ``X'y`` and ``y'y``."""
    X, y, of = federation.X, np.asarray(federation.y, dtype=np.float64), federation.site_index
    own = [np.flatnonzero(of == u) for u in range(federation.n_sites)]
    G, c = (np.stack([X[rows].T @ right[rows] for rows in own]) for right in (X, y))
    yy = np.array([float(y[rows] @ y[rows]) for rows in own])
    return QuadraticLikelihoods.from_products(G, c, yy, federation.n_samples.astype(np.float64))


def mixed_model(sums: QuadraticLikelihoods) -> Array:
    """Fit the mixed model without groups: random slopes with a variance per coefficient."""
    no_intercept = np.zeros(sums.n_params, dtype=bool)
    units = common_units(sums, no_intercept, has_scale=True)
    return units.theta(fit_mixed(units.fitted(sums), no_intercept).theta)


def pooled_fits(sums: QuadraticLikelihoods, labels: Index) -> Array:
    """Return one fit per group, ``(V, p)``."""
    groups, of = np.unique(labels, return_inverse=True)
    each = [np.linalg.lstsq(sums.G[of == k].sum(axis=0), sums.c[of == k].sum(axis=0))[0] for k in range(len(groups))]
    return np.stack(each)[of]


# --- greedy pooled clustering -----------------------------------------------------------------------------------------


def greedy_groups(sums: QuadraticLikelihoods, graph: Graph | None = None, turns: int = 3) -> Index:
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


def _merges(sums: QuadraticLikelihoods, noise: float, evidence: Array) -> Iterator[tuple[Index, float]]:
    """Yield labels after 0, 1, ... merges, and the deviance that they have cost.

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
    """Return the log likelihood of a graph given groups at its best two rates, never quite 0 or 1, and these."""
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


def ifca_groups(sums: QuadraticLikelihoods, n_groups: int, seed: int, restarts: int = 20, rounds: int = 100) -> Index:
    """Run iterative federated clustering with a given number of groups, each fitted exactly.

    Every site joins the group whose parameters lose least on its rows, every group is fitted to its sites, until
    nothing changes. Groups begin with the fits of sites drawn at random; of several starts the one with the least loss
    counts.
    """
    rng = np.random.default_rng(seed)
    local = pooled_fits(sums, np.arange(sums.n_sites))
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
        if (value := float(sums.values(pooled_fits(sums, labels)).sum())) < least:
            best, least = labels, value
    return best


# --- the information limit --------------------------------------------------------------------------------------------


def posterior_means(
    design: Design,
    sums: QuadraticLikelihoods,
    seed: int,
    *,
    variance: float,
    noise: float,
    rates: tuple[float, float],
    sweeps: int = 400,
    burn: int = 50,
) -> Array:
    """Return posterior means under the true model, ``(V, p)``: no method can do better on average.

    ``variance`` is that of every coefficient of a group's parameters, ``noise`` that of the rows, ``rates`` the shares
    of pairs with an edge, inside groups and between them.
    A Gibbs sampler that begins at the true groups, so that it need not find them: groups' parameters given labels,
    then labels one by one given parameters and the edges to all others.
    """
    rng = np.random.default_rng(seed)
    K, p = len(np.unique(design.labels)), sums.n_params
    G, c = sums.G / noise, sums.c / noise
    inside, between = (float(np.clip(rate, 1e-9, 1 - 1e-9)) for rate in rates)
    i, j = design.graph.edges.T
    weight = np.full((sums.n_sites, sums.n_sites), np.log((1 - inside) / (1 - between)))
    weight[i, j] = weight[j, i] = np.log(inside / between)
    np.fill_diagonal(weight, 0.0)
    member = np.eye(K)[design.labels]  # (V, K)
    total = np.zeros((sums.n_sites, p))
    for sweep in range(burn + sweeps):
        precision = np.einsum("uk,upq->kpq", member, G, optimize=True) + np.eye(p) / variance
        mean = np.linalg.solve(precision, (member.T @ c)[:, :, None])[:, :, 0]
        if sweep >= burn:
            total += member @ mean
        root = np.linalg.cholesky(precision)
        drawn = mean + np.linalg.solve(np.swapaxes(root, 1, 2), rng.normal(size=(K, p, 1)))[:, :, 0]
        fit = c @ drawn.T - 0.5 * np.einsum("kp,upq,kq->uk", drawn, G, drawn, optimize=True)
        gumbel = rng.gumbel(size=fit.shape)
        for u in rng.permutation(sums.n_sites):
            member[u] = np.arange(K) == np.argmax(fit[u] + weight[u] @ member + gumbel[u])
    return total / sweeps


# --- estimators of the study ------------------------------------------------------------------------------------------


def clustering(design: Design, bench: Workbench, replication: Replication) -> Array:
    """Fit the groups of greedy clustering with the graph."""
    sums = least_squares(design.federation)
    return pooled_fits(sums, greedy_groups(sums, design.graph))


def mixed(design: Design, bench: Workbench, replication: Replication) -> Array:
    """Fit the mixed model."""
    return mixed_model(least_squares(design.federation))


def ifca(design: Design, bench: Workbench, replication: Replication) -> Array:
    """Fit the groups of IFCA, which is told their number."""
    sums = least_squares(design.federation)
    return pooled_fits(sums, ifca_groups(sums, len(np.unique(design.labels)), bench.seed))


def limit(design: Design, bench: Workbench, replication: Replication) -> Array:
    """Return the posterior means under the true model of the paper's design."""
    if replication.options.get("generator", "paper") != "paper":
        raise ParameterError('the limit is known for generator = "paper" alone; leave "rivals:limit" out of the grid')
    sums = least_squares(design.federation)
    given = {"signal": 1.0, "noise": 1.0, "varrho": 0.1, **replication.options.get("design", {}), **replication.params}
    rates, variance = (1 - given["varrho"], given["varrho"]), given["signal"] ** 2 * sums.n_params**-0.5
    return posterior_means(design, sums, bench.seed, variance=variance, noise=given["noise"] ** 2, rates=rates)
