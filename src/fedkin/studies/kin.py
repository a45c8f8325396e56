"""The kin studies: `find_kin` and other methods on one design, judged by the truth; tables, figure and claims.

The estimator is an entry of the grid, shared by the seeds: each has its own cells, on the same designs. The other
methods take least-squares sums alone: greedy clustering, IFCA, the mixed model, and the information limit of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np

from fedkin._base import Array, Index
from fedkin.core import oracle_fit
from fedkin.data import Federation
from fedkin.datasets import Design, paper_design
from fedkin.errors import ParameterError
from fedkin.graph import Graph
from fedkin.kin import Kin, QuadraticLikelihoods, common_units, display_groups, find_kin, fit_mixed
from fedkin.studies.claims import Check, bound_check, doubt, doubt_of_means, largest
from fedkin.studies.figures import (
    ResultTable,
    Row,
    Sample,
    add_legend,
    column_label,
    distinct,
    label_of,
    paired_ratios,
    point_label,
    ratio_of_sums,
    summarize,
)
from fedkin.studies.tasks import TUNED_OPTIONS, Replication, Task, Tuning, Workbench, make_design, settings_from

BINS = np.linspace(0.0, 1.0, 11)  # ends of the bins of stated probabilities in a reliability diagram
LEVEL = 0.95  # of the intervals whose coverage is looked at
CELL = ["varrho", "signal"]


def differing_design(
    n_sites: int = 30,
    n_samples: int = 50,
    n_features: int = 8,
    *,
    truth: str = "groups",
    loss: str = "linear",
    signal: float = 1.0,
    seed: int = 0,
) -> Design:
    """Draw sites that differ in one of three ways, ``truth``: in three groups, not at all, or continuously.

    Parameters of "continuous" sites are ``N(centre, signal^2 / (4 sqrt(p)))``, and edges between them are drawn by lot;
    otherwise it is the paper's design with a fifth of the edges flipped.
    """
    if truth not in ("groups", "none", "continuous"):
        raise ParameterError(f'truth must be "groups", "none" or "continuous", got {truth!r}')
    if truth != "continuous":
        sizes = (n_sites, n_samples, n_features, 3 if truth == "groups" else 1)
        return paper_design(*sizes, varrho=0.2, loss=loss, signal=signal, seed=seed)
    rng = np.random.default_rng(seed)
    scale = signal * n_features**-0.25
    theta = scale * (rng.normal(size=n_features) + 0.5 * rng.normal(size=(n_sites, n_features)))
    graph = Graph.empty(range(n_sites)).corrupt(0.3, seed=rng)
    data = {}
    for u in range(n_sites):
        X = rng.normal(size=(n_samples, n_features))
        mean, noise = X @ theta[u], rng.normal(size=n_samples)
        data[u] = X, mean + noise if loss == "linear" else (mean + rng.logistic(size=n_samples) > 0).astype(np.float64)
    return Design(Federation(data), graph, Graph.empty(range(n_sites)), theta, np.arange(n_sites))


def least_squares(federation: Federation) -> QuadraticLikelihoods:
    """Return the sites' sums ``X'X``, ``X'y`` and ``y'y``."""
    X, y, of = federation.X, np.asarray(federation.y, dtype=np.float64), federation.site_index
    own = [np.flatnonzero(of == u) for u in range(federation.n_sites)]
    G, c = (np.stack([X[rows].T @ right[rows] for rows in own]) for right in (X, y))
    yy = np.array([float(y[rows] @ y[rows]) for rows in own])
    return QuadraticLikelihoods(G, c, yy, federation.n_samples.astype(np.float64))


def mixed(sums: QuadraticLikelihoods) -> Array:
    """Fit the mixed model without groups: random slopes with a variance per coefficient."""
    no_intercept = np.zeros(sums.n_params, dtype=bool)
    units = common_units(sums, no_intercept, has_scale=True)
    return units.theta(fit_mixed(units.fitted(sums), no_intercept).theta)


def pooled(sums: QuadraticLikelihoods, labels: Index) -> Array:
    """Return one fit per group, ``(V, p)``."""
    groups, of = np.unique(labels, return_inverse=True)
    each = [np.linalg.lstsq(sums.G[of == k].sum(axis=0), sums.c[of == k].sum(axis=0))[0] for k in range(len(groups))]
    return np.stack(each)[of]


# --- greedy pooled clustering -----------------------------------------------------------------------------------------


def clustering(sums: QuadraticLikelihoods, graph: Graph | None = None, turns: int = 3) -> Index:
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


def ifca(sums: QuadraticLikelihoods, n_groups: int, seed: int, restarts: int = 20, rounds: int = 100) -> Index:
    """Run iterative federated clustering with a given number of groups, each fitted exactly.

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


def limit(
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


# --- the task ---------------------------------------------------------------------------------------------------------


def kin(replication: Replication) -> Iterator[dict[str, Any]]:
    """Yield one row: errors of the grid point's estimator and of an oracle told the groups; for kin, see `judged`."""
    params, options = replication.params, replication.options
    design, name = make_design(replication), params.get("estimator", "kin")
    bench = Workbench(design, settings_from(Tuning, {**options, **params}), replication.seed % 2**31)
    started = process_time()
    kin = None
    if name == "kin":
        kin = find_kin(design.federation, design.graph, loss=bench.settings.loss, seed=bench.seed)
        theta = kin.theta
    elif name in ESTIMATORS:
        theta = ESTIMATORS[name](least_squares(design.federation), bench, replication)
    else:
        theta = bench.estimate(name).theta
    seconds = process_time() - started
    target = [one[-1] for one in options.get("targets", ()) if one[:-1] == [params.get("varrho"), params.get("signal")]]
    yield {
        "error": design.error(theta),
        "oracle_error": design.error(oracle_fit(design.federation, design.labels.tolist(), bench.settings.loss)),
        "target": target[0] if target else None,
        **({} if kin is None else judged(design, kin)),
        "cpu_seconds": seconds,
    }


def judged(design: Design, kin: Kin) -> dict[str, Any]:
    """Compare what a result says of itself with the truth.

    ``coverage`` is the share of parameters inside their intervals, ``coverage_site`` that of the intervals from own
    rows alone. ``exact`` is whether the groups that are shown (one, where none are resolved) are the truth. ``purity``
    is the share of pairs inside groups that are kin, whether the groups count as resolved or not. ``pairs``, ``stated``
    and ``true`` are, by bins of the stated probability, the number of pairs, their sum of probabilities, and how many
    of them are kin.
    """
    best = display_groups(kin.probability)
    i, j = np.tril_indices(len(best), -1)
    same, together, shown = (labels[i] == labels[j] for labels in (design.labels, best, kin.groups))
    stated = kin.probability[i, j]
    place = np.clip(np.digitize(stated, BINS) - 1, 0, len(BINS) - 2)
    bins = {"pairs": np.ones_like(stated), "stated": stated, "true": same.astype(np.float64)}
    return {
        "coverage": _coverage(design, kin.confint(LEVEL)),
        "coverage_site": _coverage(design, kin.confint(LEVEL, "site")),
        "resolved": float(kin.resolved),
        "purity": float(same[together].mean()) if together.any() else 1.0,
        "exact": float((same == shown).all()),
        "shown_groups": int(kin.groups.max()) + 1,
        "graph_use": kin.graph_use,
        **{name: np.bincount(place, weights, minlength=len(BINS) - 1).tolist() for name, weights in bins.items()},
    }


def _coverage(design: Design, intervals: Array) -> float:
    inside = (intervals[:, :, 0] <= design.theta_star) & (design.theta_star <= intervals[:, :, 1])
    return float(inside.mean())


def _limit(sums: QuadraticLikelihoods, bench: Workbench, replication: Replication) -> Array:
    if replication.options.get("generator", "paper") != "paper":
        raise ParameterError('the limit is known for generator = "paper" alone; leave "limit" out of the grid')
    given = {"signal": 1.0, "noise": 1.0, "varrho": 0.1, **replication.options.get("design", {}), **replication.params}
    rates, variance = (1 - given["varrho"], given["varrho"]), given["signal"] ** 2 * sums.n_params**-0.5
    return limit(bench.design, sums, bench.seed, variance=variance, noise=given["noise"] ** 2, rates=rates)


#: Estimators of this task, from the sites' sums; all others are those of `fedkin.studies.tasks`.
ESTIMATORS: Mapping[str, Callable[[QuadraticLikelihoods, Workbench, Replication], Array]] = {
    "clustering": lambda sums, bench, _: pooled(sums, clustering(sums, bench.design.graph)),
    "clusterpath": lambda _, bench, __: bench.penalised(Graph.complete(bench.design.federation.sites)).theta,
    "mixed": lambda sums, bench, _: mixed(sums),
    "ifca": lambda sums, bench, _: pooled(sums, ifca(sums, len(np.unique(bench.design.labels)), bench.seed)),
    "limit": _limit,
}

#: The task of this module with its options, as in `fedkin.studies.tasks`.
TASKS: Mapping[str, tuple[Task, Mapping[str, Sequence[str]]]] = {"kin": (kin, {**TUNED_OPTIONS, "targets": ()})}


# --- tables, figure and claims ----------------------------------------------------------------------------------------

#: Estimators that are told something about the truth: no rivals.
TOLD = ("pooled", "ifca", "limit")
#: What is promised: error over the target, and over the best rival; stated probabilities; coverage.
TARGET, RIVAL, RELIABLE, COVERAGE = 1.05, 1.02, 0.05, (0.93, 0.97)
#: Groups are right when this share of the pairs inside them are kin; the rule that shows them, when that many are.
PURE, RIGHT = 0.9, 0.95


def ratio_table(spec: Mapping[str, Any], rows: Sequence[Row]) -> ResultTable:
    """Make the table of errors over that of an oracle who is told the groups."""
    names = [name for name in distinct(rows, "estimator") if name != "pooled"]
    ratios = {name: paired_ratios(rows, CELL, "estimator", (name, "pooled"), "error") for name in names}
    targets = summarize(rows, CELL, "target")
    points = sorted({point for found in ratios.values() for point in found})
    cells = [
        [*point, *(ratios[name].get(point) for name in names), targets[point].mean if point in targets else None]
        for point in points
    ]
    caption = (
        "Mean error over the mean error of an oracle who is told the groups, on the same replications, with its "
        "standard error in brackets."
    )
    return ResultTable(spec["name"], [*map(column_label, CELL), *map(label_of, names), "kin's target"], cells, caption)


def group_table(spec: Mapping[str, Any], rows: Sequence[Row]) -> ResultTable:
    """Make the table of what kin says of itself at each grid point, and the truth."""
    mine = _of_kin(rows)
    names = _grid(mine)
    measures = {
        "resolved": "groups resolved",
        "exact": "groups exactly right",
        "purity": "pairs inside groups that are kin",
        "coverage": "coverage of 95% intervals",
        "coverage_site": "of those from own rows alone",
    }
    tables = {name: summarize(mine, names, name) for name in measures}
    cells = [[*point, *(tables[name][point] for name in measures)] for point in tables["coverage"]]
    caption = (
        "Means over the replications, with standard errors in brackets. Where groups are not resolved, one is shown; "
        "pairs inside groups are counted whether they are resolved or not."
    )
    return ResultTable(spec["name"], [*map(column_label, names), *measures.values()], cells, caption)


def reliability(spec: Mapping[str, Any], rows: Sequence[Row], folder: Path | None = None) -> Any:
    """Draw the share of pairs that are kin against the stated probability, where groups are resolved and where not."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 4.2), layout="constrained")
    axes = figure.subplots(1, 2, sharex=True, sharey=True)
    for axis, (title, resolved) in zip(axes, {"resolved": 1.0, "not resolved": 0.0}.items(), strict=True):
        chosen = [row for row in rows if row["resolved"] == resolved]
        axis.plot([0, 1], [0, 1], color="#555555", linewidth=1.0, linestyle=(0, (2, 2)), label="as stated")
        for stated, true, pairs in _bins(chosen):
            half = true.half_width() if true.n > 1 else 0.0
            ends = np.clip([true.mean - half, true.mean + half], 0.0, 1.0)
            axis.plot([stated, stated], ends, color="#D55E00", linewidth=1.0)
            size = 12 + 300 * pairs / max(sum(one[2] for one in _bins(chosen)), 1.0)
            axis.scatter([stated], [true.mean], s=size, color="#D55E00", edgecolor="white", zorder=3)
        axis.set_title(f"groups {title}: {len(chosen)} federations", loc="left")
    figure.supxlabel("stated probability that two sites are kin", fontsize=10)
    figure.supylabel("share of pairs that are kin", fontsize=10)
    add_legend(figure, axes)
    return figure


def _bins(rows: Sequence[Row]) -> list[tuple[float, Sample, float]]:
    """Return of each bin with pairs: mean stated probability, share of pairs that are kin, number of pairs."""
    if not rows:
        return []
    pairs, stated, true = (np.array([row[name] for row in rows]) for name in ("pairs", "stated", "true"))
    found = []
    for k in range(pairs.shape[1]):
        used = pairs[:, k] > 0
        if used.any():
            n = float(pairs[used, k].sum())
            found.append((float(stated[used, k].sum()) / n, ratio_of_sums(true[used, k], pairs[used, k]), n))
    return found


def checks(rows: Sequence[Row]) -> list[Check]:
    """Check errors against targets and rivals, probabilities, coverage, and when groups are shown."""
    return [*_error_checks(rows), *coverage_checks(rows)]


def _error_checks(rows: Sequence[Row]) -> list[Check]:
    oracle = paired_ratios(rows, CELL, "estimator", ("kin", "pooled"), "error")
    targets = summarize(rows, CELL, "target")
    over = {point: one.scaled(1 / targets[point].mean) for point, one in oracle.items() if point in targets}
    rivals = [name for name in distinct(rows, "estimator") if name not in ("kin", *TOLD)]
    against = [paired_ratios(rows, CELL, "estimator", ("kin", name), "error") for name in rivals]
    worst = {
        point: max((one[point] for one in against if point in one), key=lambda one: one.mean)
        for point in dict.fromkeys(point for one in against for point in one)
    }
    found: list[Check] = []
    for claim, ratios, bound in (
        ("kin / Oracle at most {} times its target in every cell that has one", over, TARGET),
        ("kin at most {} times the best of the others that are told nothing, in every cell", worst, RIVAL),
    ):
        found += bound_check(claim.format(bound), ratios, CELL, bound)
    limits = paired_ratios(rows, CELL, "estimator", ("kin", "limit"), "error")
    if limits:
        middle = float(np.median([one.mean for one in limits.values()]))
        observed = f"median {middle:.3f}; the largest is {largest(limits, CELL)}"
        found.append(Check("kin / the information limit", observed, None))
    return found


def coverage_checks(rows: Sequence[Row]) -> list[Check]:
    """Check the coverage of intervals, reliability of probabilities, purity of groups that are shown."""
    mine = _of_kin(rows)
    names = _grid(mine)
    low, high = COVERAGE
    shares = summarize(mine, names, "coverage")
    outside = [point for point, one in shares.items() if not low <= one.mean <= high]
    farthest = max(shares, key=lambda point: abs(shares[point].mean - 0.95))
    observed = f"{len(shares) - len(outside)} of {len(shares)} cells; the farthest is "
    observed += f"{shares[farthest].mean:.3f} at {point_label(names, farthest)}"
    claim = f"95% intervals cover between {low:.0%} and {high:.0%} of parameters, on average over sites, in every cell"
    found = [Check(claim, observed, not outside, doubt_of_means(shares, low, high, ".3f"))]
    shown = [row for row in mine if row["resolved"]]
    off = {stated: one.scaled(1.0, -stated) for stated, one, _ in _bins(shown)}
    if off:
        worst = max(off, key=lambda stated: abs(off[stated].mean))
        observed = f"the farthest: stated {worst:.2f}, true {worst + off[worst].mean:.2f}"
        claim = f"Stated probabilities within {RELIABLE} of the truth where groups are resolved, in every bin"
        in_doubt = doubt_of_means(off, -RELIABLE, RELIABLE, "+.3f")
        found.append(Check(claim, observed, abs(off[worst].mean) <= RELIABLE, in_doubt))
        pure = Sample.from_values([float(row["purity"] >= PURE) for row in shown])
        observed = f"{pure.mean:.3f} of {pure.n}; resolved in {len(shown)} of {len(mine)} federations"
        claim = f"Where groups are resolved, {PURE:.0%} of pairs inside them are kin, in {RIGHT:.0%} of federations"
        in_doubt = doubt([pure.share_interval()], low=RIGHT, form=".3f")
        found.append(Check(claim, observed, pure.mean >= RIGHT, in_doubt))
    return found


def _grid(rows: Sequence[Row]) -> list[str]:
    """Return the columns that tell the grid points apart."""
    return [name for name in ("truth", "loss", "n_samples", *CELL) if any(row.get(name) is not None for row in rows)]


def _of_kin(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.get("estimator", "kin") == "kin"]
