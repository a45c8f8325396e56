"""`find_kin`: from rows or summaries to estimates, groups and their probabilities."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedkin._base import Array, Index, check_whole, one_blas_thread
from fedkin.core import FileRows, Summaries, site_data
from fedkin.data import Federation
from fedkin.errors import DataError, GraphError, SolverError
from fedkin.graph import Graph
from fedkin.kin import display
from fedkin.kin.chains import Given, Sampling, kmeans, modularity_directions
from fedkin.kin.covariates import Covariates, hint_of
from fedkin.kin.groups import Grouped, find_groups
from fedkin.kin.learned import Learned
from fedkin.kin.likelihoods import FEW, QuadraticLikelihoods, Units, apply, common_units
from fedkin.kin.mixed import (
    MixedModel,
    Population,
    fit_mixed,
    fit_one_model,
    fit_population,
    with_noise,
)
from fedkin.kin.partitions import SHARES, Neighbours
from fedkin.kin.result import Diagnostics, GraphUse, Kin
from fedkin.kin.sampler import MANY_SITES, WHOLE_GROUPS, load_kernels
from fedkin.kin.smooth import HINT, WarmStart, fit_smooth
from fedkin.kin.sources import ScaledLosses, Source, canonical_order, intercepts_of
from fedkin.losses import Loss

#: What a fit may start from: an earlier result, a graph of who seems alike, or a label for each site.
StartFrom = Kin | Graph | Mapping[Hashable, Any] | Sequence[Any] | Array
#: How often noise is learned again from estimates with groups where there are many coefficients, and what ends it.
NOISES, NOISE_STEP = 3, 0.03
#: Residuals have at most so many times the variance that the noise, or the mixed model, leaves them.
MOST_LEFT = 2.0


def find_kin(
    data: Federation | Summaries | FileRows,
    graph: Graph | None = None,
    *,
    loss: str | Loss = "linear",
    seed: int = 0,
    sweeps: int | None = None,
    chains: int = 3,
    start: StartFrom | None = None,
    covariates: Covariates | None = None,
) -> Kin:
    """Find which sites are alike, and estimate every site's parameters with as much pooling as the data support.

    Sites differ around a common mean, each coefficient by a variance of its own that is learned; some of them may form
    groups. One model for all, a model per site, site intercepts, random slopes and groups that share everything are
    special cases; how far to go to any of them is averaged over, not chosen.

    Parameters
    ----------
    data : Federation, Summaries or FileRows
        Rows, one message per site (`fedkin.summarise`), or rows that stay in files (`fedkin.core.rows_in_files`).
        Columns are used as they are: add an intercept by ``federation.with_intercept()``. Units do not matter.
    graph : Graph, optional
        Who may be kin, over the same sites. It may be wrong: a graph that says the opposite is read inverted, one that
        is about something else is dropped. An edge counts by its weight: the largest as a whole edge, one of half
        that weight as half of one.
    loss : str or Loss
        As for `Problem`; summaries know theirs.
    seed : int
        Of the sampler.
    sweeps : int
        Sweeps that each chain keeps, at least 4. By default 70, and up to 280 where chains disagree about few sites and
        coefficients; 30, and up to 240, from 300 sites on. Losses other than least squares are first expanded where
        shorter chains (24 sweeps) say, which is all where these give groups no weight.
    chains : int
        Chains, at least 2 for diagnostics.
    start : Kin, Graph, mapping {site: label} or sequence of V labels, optional
        An earlier result for the same columns, in the same units: variances begin where it ended, and so do the sites
        that it has, if the loss is smooth. It saves rounds; what is found is the same but for rounding. A graph or
        labels suggest groups from which one more chain starts: those that edge tests keep together, for example.
        Unlike ``graph`` they are no data: a bad start costs time and changes nothing that chains agree on.
    covariates : mapping {site: value, row or {name: value}}, array (V, q) or pandas table, optional
        What is known about the sites beside their rows: coordinates, size, region. Sites that are near each other, or
        have the same label, are joined by a graph, which may be wrong like any other (`fedkin.kin.covariate_graph`).
        An array is in the order of the sites. Give either a graph or covariates.

    Returns
    -------
    Kin

    Notes
    -----
    The result does not depend on the order of the sites. Smooth losses are expanded at the current estimate, several
    times where there are rows; summaries of smooth losses are used where they were expanded. For better estimates ask
    sites for another summary at ``kin.theta`` and fit again.

    Examples
    --------
    >>> import fedkin
    >>> from fedkin.datasets import paper_design
    >>> design = paper_design(n_sites=20, n_samples=40, n_features=4, n_clusters=2, seed=1)
    >>> kin = fedkin.find_kin(design.federation)
    >>> kin.groups.tolist() == design.labels.tolist()
    True
    """
    check_whole("seed", seed, least=0)
    if sweeps is not None:
        check_whole("sweeps", sweeps, least=4)
    check_whole("chains", chains, least=1)
    source = Source(site_data(data, loss))
    source.refuse_small_threshold()
    graph = hint_of(graph, covariates, source.sites)
    first = source.first()
    order = canonical_order(first, source.sites)
    neighbours = _neighbours(graph, source.sites, order)
    sampling = replace(Sampling.for_sites(len(order), sweeps, chains), given=given_groups(start, source.sites, order))
    ordered = source.take(order)
    del data, first, source  # sums of many sites are large
    warm = WarmStart.from_kin(start, ordered.sites, ordered.names) if isinstance(start, Kin) else None
    load_kernels(len(order) < MANY_SITES, len(order) >= WHOLE_GROUPS)
    with one_blas_thread():
        found = _fit(ordered, neighbours, seed, sampling, warm)
    if not all(np.isfinite(part).all() for part in (found.theta, found.covariance)):
        raise SolverError(f"no finite estimates were found: {HINT}")
    return found.reordered(np.argsort(order))


def _neighbours(graph: Graph | None, sites: tuple[object, ...], order: Index) -> Neighbours:
    """Return neighbours in the canonical order; the largest weight counts as an edge, others as parts of one."""
    if graph is None:
        return Neighbours.none(len(sites))
    position = {sites[u]: k for k, u in enumerate(order.tolist())}
    unknown = [site for site in graph.sites if site not in position]
    if unknown:
        raise GraphError(f"the graph names site {unknown[0]!r}, which has no data: leave it out of the graph")
    place = np.array([position[site] for site in graph.sites], dtype=np.int64)
    return Neighbours.from_edges(len(sites), place[graph.edges], graph.weights / graph.weights.max(initial=1e-300))


def given_groups(start: StartFrom | None, sites: tuple[Hashable, ...], order: Index) -> Given | None:
    """Return the groups that a graph or labels suggest, sites in this order; None for an earlier result."""
    if start is None or isinstance(start, Kin):
        return None
    if isinstance(start, Graph):
        V, graph = len(sites), start.aligned(sites)
        parts = graph.components()
        if parts.max() > 0 or graph.n_edges == V * (V - 1) // 2:
            return Given(parts[order], fine=False)
        # edges join all sites: fine groups of sites with the same neighbours, which may merge
        edges, weights = np.argsort(order)[graph.edges], graph.weights / graph.weights.max()
        top, _ = modularity_directions(Neighbours.from_edges(V, edges, weights))
        return Given(kmeans(top, max(2, round(2 * V**0.5)), np.random.default_rng(0)), fine=True)
    labels: Any = start
    if isinstance(labels, Mapping):
        missing = [site for site in sites if site not in labels]
        if missing:
            raise DataError(f"start= has no label of site {missing[0]!r}: give every site one")
        labels = [labels[site] for site in sites]
    elif np.ndim(labels) != 1 or len(labels) != len(sites):
        raise DataError(f"start= takes a Kin, a Graph, or a label for each of the {len(sites)} sites")
    number = {label: k for k, label in enumerate(dict.fromkeys(labels))}
    return Given(np.array([number[label] for label in labels], dtype=np.int64)[order], fine=False)


def _fit(source: Source, neighbours: Neighbours, seed: int, sampling: Sampling, warm: WarmStart | None) -> Kin:
    """Fit sites in canonical order."""
    first, loss, had_graph = source.first(), source.loss, neighbours.neighbour.size > 0
    intercepts = intercepts_of(source.names, loss.n_outputs)
    # a point among the rows has no units of its own: every coordinate is like an intercept
    free = np.ones_like(intercepts) if loss.location else intercepts
    has_scale = loss.quadratic or loss.threshold is not None
    units = common_units(first, intercepts, has_scale=has_scale, location=loss.location)
    if source.has_rows and not loss.quadratic:
        model, found, population = fit_smooth(ScaledLosses(source, units), free, neighbours, seed, sampling, warm)
        return make_kin(source, units, model, found, population, had_graph=had_graph)
    dispersion = None if loss.quadratic else source.shared_dispersion() / units.target**2
    sums = units.fitted(first)
    model = fit_mixed(sums, free, dispersion=dispersion, start=None if warm is None else warm.parameters)
    found = find_groups(model, ~free, neighbours, seed, sampling)
    for _ in range(NOISES if dispersion is None and sums.n_params > FEW else 0):
        factor = _noise_factor(sums, model, found)
        if abs(np.log(factor)) < NOISE_STEP:
            break
        noise, parameters = model.noise, model.parameters
        del model, found  # of many coefficients they are large
        model = with_noise(sums, free, noise * factor, parameters)
        found = find_groups(model, ~free, neighbours, seed, sampling)
    one = fit_one_model(sums, free, model, learned=dispersion is None)
    population = fit_population(sums, model, learned=dispersion is None)
    found = replace(found, full=None).with_one_model(model, one)
    if loss.quadratic:
        _refuse_residuals(sums, model, found.theta)
    del first, sums
    return make_kin(source, units, model, found, population, had_graph=had_graph)


def _refuse_residuals(sums: QuadraticLikelihoods, model: MixedModel, theta: Array) -> None:
    """Raise `SolverError` where estimates leave far more of the rows they were fitted to than the learned noise."""
    weight = 1.0 / model.noise
    left, mixed = (float(2 * sums.values(at) @ weight) for at in (theta, model.theta))
    # where noise differs much between sites, the mixed model leaves more than it says, too
    if not left <= MOST_LEFT * max(mixed, float(sums.n.sum())):
        times = left / float(sums.n.sum())
        raise SolverError(
            f"residuals of the fit have {times:.3g} times the variance of the noise it has learned: {HINT}"
        )


def _noise_factor(sums: QuadraticLikelihoods, model: MixedModel, found: Grouped) -> float:
    """Return by how much noises are larger than those of the model, by what groups leave."""
    # many coefficients explain noise as well where sites have few rows, unless sites share them
    if found.blend is None or found.full is None or found.blend.weight > 0.5:
        return 1.0
    at_mean = 2 * sums.values(np.tile(model.mean, (sums.n_sites, 1))) / model.noise
    return found.full.noise(found.blend.chains, float(sums.n.sum()), float(at_mean.sum()))


def make_kin(
    source: Source, units: Units, model: MixedModel, found: Grouped, population: Population, *, had_graph: bool
) -> Kin:
    """Return the result in the user's units, sites in canonical order."""
    V, p, blend = len(model.theta), len(model.mean), found.blend
    same, n_groups, weight = found.kinship()
    labels = display.display_groups(same)
    shown = display.resolved(same, labels)
    use, rates = _graph_use(found) if had_graph else ("none", None)
    states = found.kept if found.kept is not None else None if blend is None else blend.chains.states()
    learned = Learned(
        units=units,
        mean=model.mean,
        mean_covariance=found.mean_covariance,
        variance=found.variance,
        noise=float(np.exp(np.log(model.noise).mean())),
        precision=model.precision,
        score=model.score,
        F=found.F,
        weight=1.0 if blend is None else blend.weight,
        scales=np.zeros(len(SHARES)) if blend is None else blend.scales,
        states=states if states is not None and len(states.weight) else None,
        one=found.one,
        one_mean=np.zeros(p) if found.common is None else found.common.mean,
        one_covariance=np.zeros((p, p)) if found.common is None else found.common.covariance,
        population=population,
    )
    return Kin(
        sites=source.sites,
        names=source.names,
        loss=source.loss,
        n_samples=source.n_samples,
        mean=units.theta(population.mean),
        mean_covariance=units.covariance(population.covariance),
        degrees=population.degrees(units.A),
        sd=np.sqrt(np.diag(units.covariance(np.diag(found.variance)))),
        theta=units.theta(found.theta),
        covariance=units.covariance(found.covariance),
        noise=model.noise * units.target**2,
        probability=same,
        n_groups=n_groups,
        groups=labels if shown else np.zeros(V, dtype=np.int64),
        resolved=shown,
        weight_mixed=weight,
        graph_use=use,
        rates=rates,
        sure=_sure(model, found),
        diagnostics=_diagnostics(found),
        learned=learned,
    )


def _graph_use(found: Grouped) -> tuple[GraphUse, tuple[float, float] | None]:
    """Return what was made of the graph: it counts when the odds of an edge differ by two standard deviations."""
    blend = found.blend
    if blend is None or not found.with_graph:
        return "ignored", None
    weights = blend.chains.weights
    rates = blend.chains.trace(lambda one: one.trace[:, 3:5])
    inside, between = (weights @ rates.mean(axis=1)).tolist()
    odds = np.log(rates / (1 - rates))
    contrast = odds[:, :, 0] - odds[:, :, 1]
    mean = float(weights @ contrast.mean(axis=1))
    deviation = float(np.sqrt(weights @ ((contrast - mean) ** 2).mean(axis=1)))
    if blend.weight > 0.5 or abs(mean) < 2 * deviation:
        return "ignored", (inside, between)
    return ("used" if mean > 0 else "inverted"), (inside, between)


def _diagnostics(found: Grouped) -> Diagnostics | None:
    blend = found.blend
    if blend is None:
        return None
    chains = blend.chains
    rhat, size = {}, {}
    lines = chains.trace(lambda one: one.trace)
    for name, draws in (("number of groups", lines[:, :, 1]), ("bound on the evidence", lines[:, :, 0])):
        rhat[name], size[name] = float(display.split_rhat(draws)), float(display.effective_size(draws))
    each, sizes = blend.mixing()
    rhat |= {"parameters, worst": float(each.max()), "parameters, median": float(np.median(each))}
    size |= {"parameters, worst": float(sizes.min()), "parameters, median": float(np.median(sizes))}
    return Diagnostics(chains.weights, chains.starts, int(lines.shape[1]), rhat, size)


def _sure(model: MixedModel, found: Grouped) -> dict[str, float]:
    """Return unbiased estimates of ``sum_u (theta_u - truth_u)'S_u (theta_u - truth_u)``, but for that of the noise."""
    S, c, fitted = model.precision, model.score, found.theta
    values, vectors = np.linalg.eigh(S)
    seen = values > 1e-9 * np.maximum(values[:, -1:], 1e-300)
    turned = apply(np.swapaxes(vectors, 1, 2), c)
    explained, rank = float((turned[seen] ** 2 / values[seen]).sum()), float(seen.sum())
    total, pooled = S.sum(axis=0), c.sum(axis=0)
    one = np.linalg.lstsq(total, pooled, rcond=None)[0]
    common = float(np.linalg.matrix_rank(total, hermitian=True))
    misfit = float((fitted * (apply(S, fitted) - 2 * c)).sum())
    return {
        "kin": misfit + explained - rank + 2 * found.degrees,
        "Local": rank,
        "Global": explained - float(pooled @ one) - rank + 2 * common,
    }
