"""Define `find_kin`, which turns rows or summaries into estimates, groups and their probabilities."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedkin._base import Array, Index, check_whole, one_blas_thread
from fedkin.cluster import On, running_on
from fedkin.core import FileRows, Summaries, site_data
from fedkin.data import Federation, site_id
from fedkin.errors import DataError, GraphError, ParameterError, SolverError
from fedkin.graph import Graph
from fedkin.kin.chains import (
    DRAWS,
    Diagnostics,
    Given,
    Sampling,
    effective_size,
    kmeans,
    modularity_directions,
    split_rhat,
)
from fedkin.kin.covariates import Covariates, hint_of
from fedkin.kin.groups import Grouped, find_groups, with_population
from fedkin.kin.learned import Learned
from fedkin.kin.likelihoods import FEW, QuadraticLikelihoods, common_units
from fedkin.kin.mixed import (
    MixedModel,
    Population,
    fit_mixed,
    fit_one_model,
    fit_population,
    fit_unseen,
    with_noise,
)
from fedkin.kin.partitions import Neighbours, display_groups, resolved
from fedkin.kin.result import Kin
from fedkin.kin.sampler import MANY_SITES, WHOLE_GROUPS, load_kernels
from fedkin.kin.smooth import HINT, fit_smooth, refuse_worse, warm_start
from fedkin.kin.sources import Source, canonical_order, intercepts_of
from fedkin.losses import Loss

#: Possible starts of a fit: an earlier result, a graph of sites that seem alike, or a label for each site.
StartFrom = Kin | Graph | Mapping[Hashable, Any] | Sequence[Any] | Array


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
    fixed: Sequence[str] = (),
    within: Mapping[Hashable, Hashable] | Sequence[Hashable] | None = None,
    on: On | None = None,
) -> Kin:
    """Find which sites are alike, and estimate every site's parameters with as much pooling as the data support.

    Sites vary around a common mean, each coefficient with its own learned variance; some sites may form groups. One
    model for all, a model per site, site intercepts, random slopes and groups that share everything are special cases;
    the fit averages over them instead of choosing one.

    Parameters
    ----------
    data : Federation, Summaries or FileRows
        Rows, one summary per site (`fedkin.summarise`), or rows that stay in files (`fedkin.core.rows_in_files`).
        Columns are used as they are: add an intercept by ``federation.with_intercept()``. Units do not matter.
    graph : Graph, optional
        Edges between the sites that may be alike. It may be wrong: a graph whose edges join different sites is
        inverted, and an unrelated one is ignored. Edges count in proportion to their weights, the largest as one edge.
    loss : str or Loss
        As for `Problem`; summaries contain their loss.
    seed : int
        Seed of the sampler.
    sweeps : int
        Sweeps that each chain keeps, at least 4. By default 70, and up to 280 if chains disagree about few sites
        and coefficients; from 300 sites, 30 and up to 240. Losses other than least squares are first expanded with
        shorter chains (24 sweeps), which suffice if they give groups no weight.
    chains : int
        Number of chains, at least 2 for diagnostics.
    start : Kin, Graph, mapping {site: label} or sequence of V labels, optional
        An earlier result for the same columns, in the same units: variances start from it and, if the loss is smooth,
        so do its sites. This saves rounds; the result is the same except for rounding. A graph or labels give the
        starting groups of one more chain, for example those from edge tests. Unlike ``graph`` they are not data: a bad
        start costs time, but does not change results on which chains agree.
    covariates : mapping {site: value, row or {name: value}}, array (V, q) or pandas table, optional
        Covariates of the sites, such as coordinates, size or region. Sites with similar values or the same label are
        joined in a graph, which may be wrong like any other (`fedkin.kin.covariate_graph`). An array is in the order of
        the sites. Give either a graph or covariates.
    fixed : sequence of str
        Columns with the same effect at all sites. With an intercept, columns that are constant within nearly all sites
        are also fixed, since differences in their effects cannot be estimated. `Kin.fixed` lists all of them.
    within : mapping {site: district} or sequence of V districts, optional
        The district of each site; a mapping may include planned sites. Districts vary around the overall mean, and
        sites around the mean of their district; each coefficient has its own variance at both levels. Groups are then
        not searched for.
    on : "local", "ray", "ray://host:port" or RayEngine, optional
        Where to sample more than 3,000 sites without a graph: in this process, or in shards on a Ray cluster
        (docs/cluster.md). Results do not depend on the number of shards. The default is `fedkin.cluster.running_on`.

    Returns
    -------
    Kin

    Notes
    -----
    The result does not depend on the order of the sites. Smooth losses are expanded at the current estimate, repeatedly
    if rows are available; summaries of smooth losses are used at their own expansion points. For better estimates,
    request further summaries at ``kin.theta`` and fit again.

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
    with one_blas_thread(), running_on(on):
        source = Source(site_data(data, loss))
        source.refuse_small_threshold()
        source.refuse_large(len(fixed))
        graph, sites = hint_of(graph, covariates, source.sites), source.sites
        first = source.first()
        source = source.with_fixed(fixed, first)
        districts = None if within is None else _districts(within, sites)
        if districts is not None:
            if graph is not None or isinstance(start, Graph):
                wrong = "with districts, Fedkin does not search for groups: give within= or a graph, not both"
                raise ParameterError(wrong)
            source.district = np.unique([repr(one) for one in districts], return_inverse=True)[1]
        order = canonical_order(first, sites)
        neighbours, given = _neighbours(graph, sites, order), given_groups(start, sites, order)
        sampling = replace(Sampling.for_sites(len(order), sweeps, chains), given=given)
        source = source.take(order)
        del data, first  # sums of many sites are large
        load_kernels(len(order) < MANY_SITES, len(order) >= WHOLE_GROUPS)
        found = _fit(source, neighbours, seed, sampling, start if isinstance(start, Kin) else None)
    if not all(np.isfinite(part).all() for part in (found.theta, found.covariance)):
        raise SolverError(f"no finite estimates were found: {HINT}")
    listed = within.items() if isinstance(within, Mapping) else zip(sites, districts or (), strict=True)
    named = None if districts is None else tuple((site_id(site), site_id(one)) for site, one in listed)
    return replace(found.reordered(np.argsort(order)), within=named)


def _per_site(option: str, what: str, given: Any, sites: tuple[Hashable, ...]) -> list[Any]:
    """Return the label of each site from a mapping or a sequence."""
    if isinstance(given, Mapping):
        missing = [site for site in sites if site not in given]
        if missing:
            raise DataError(f"{option}= has no {what} of site {missing[0]!r}: give every site one")
        return [given[site] for site in sites]
    if isinstance(given, str) or np.ndim(given) != 1 or len(given) != len(sites):
        raise DataError(f"{option}= needs a {what} for each of the {len(sites)} sites")
    return list(given)


def _districts(within: Any, sites: tuple[Hashable, ...]) -> tuple[Hashable, ...]:
    """Return the district of each site of the data."""
    made = tuple(site_id(one) for one in _per_site("within", "district", within, sites))
    if not 1 < len(set(made)) < len(sites):
        found = "all sites are in one district" if len(set(made)) == 1 else "every site is its own district"
        raise DataError(f"{found}, so there is no level above sites: leave within= out")
    return made


def _neighbours(graph: Graph | None, sites: tuple[object, ...], order: Index) -> Neighbours:
    """Return neighbours in the canonical order, with weights relative to the largest."""
    if graph is None:
        return Neighbours.none(len(sites))
    position = {sites[u]: k for k, u in enumerate(order.tolist())}
    unknown = [site for site in graph.sites if site not in position]
    if unknown:
        raise GraphError(f"the graph names site {unknown[0]!r}, which has no data: leave it out of the graph")
    place = np.array([position[site] for site in graph.sites], dtype=np.int64)
    return Neighbours.from_edges(len(sites), place[graph.edges], graph.weights / graph.weights.max(initial=1e-300))


def given_groups(start: StartFrom | None, sites: tuple[Hashable, ...], order: Index) -> Given | None:
    """Return the groups suggested by a graph or labels, with sites in this order; None for an earlier result."""
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
    labels = _per_site("start", "label", start, sites)
    number = {label: k for k, label in enumerate(dict.fromkeys(labels))}
    return Given(np.array([number[label] for label in labels], dtype=np.int64)[order], fine=False)


def _fit(source: Source, neighbours: Neighbours, seed: int, sampling: Sampling, start: Kin | None) -> Kin:
    """Fit sites in canonical order."""
    first, loss, had_graph = source.first(), source.loss, neighbours.neighbour.size > 0
    intercepts = intercepts_of(source.names, loss.n_outputs)
    # a point among the rows has no units of its own: every coordinate is like an intercept
    free = np.ones_like(intercepts) if loss.location else intercepts
    units = common_units(first, intercepts, has_scale=loss.scale_equivariant, location=loss.location)
    units = replace(units, fixed=source.fixed if source.fixed.any() else None)
    source = source.in_units(units)
    if source.has_rows and not loss.quadratic:
        model, found, population = fit_smooth(source, free, neighbours, seed, sampling, start)
        return make_kin(source, model, found, population, had_graph=had_graph)
    dispersion = None if loss.quadratic else source.shared_dispersion() / units.target**2
    sums, warm = source.fitted(first), None if start is None else warm_start(start, source)
    model = fit_mixed(sums, free, dispersion=dispersion, start=None if warm is None else warm[-1])
    found = find_groups(model, ~free, neighbours, seed, sampling)
    for _ in range(3 if dispersion is None and sums.n_params > FEW and model.nested is None else 0):
        factor = _noise_factor(sums, model, found)
        if abs(np.log(factor)) < 0.03:
            break
        noise, parameters = model.noise, model.parameters
        del model, found  # of many coefficients they are large
        model = with_noise(sums, free, noise * factor, parameters)
        found = find_groups(model, ~free, neighbours, seed, sampling)
    one = fit_one_model(sums, free, model, learned=dispersion is None)
    population = fit_population(sums, model.noise, model.variance, learned=dispersion is None)
    found, unseen = replace(found, full=None), None
    if model.nested is None and loss.quadratic and sums.n_sites > 2:
        unseen = fit_unseen(sums, model.noise, population.variance)
    if model.nested is None:
        found = found.with_one_model(one)
    if loss.quadratic:
        _refuse_residuals(sums, model, found)
    else:
        common, slack = np.tile(one.mean, (sums.n_sites, 1)), 0.5 * found.theta.size * float(model.noise[0])
        refuse_worse(sums.values, found.theta, common, slack)
    del first, sums
    made = make_kin(source, model, found, population, had_graph=had_graph)
    return made if unseen is None else replace(made, learned=replace(made.learned, unseen=unseen))


def _refuse_residuals(sums: QuadraticLikelihoods, model: MixedModel, found: Grouped) -> None:
    """Raise `SolverError` if the residual variance of the fit is more than twice the learned noise."""
    common = model.centres if found.common is None else np.tile(found.common.mean, (sums.n_sites, 1))
    left, mixed, same = (float(2 * sums.values(at) @ (1.0 / model.noise)) for at in (found.theta, model.theta, common))
    # where noise differs much between sites, the mixed model leaves more than it says, and so does one model for all
    if not left <= 2.0 * ((1 - found.one) * max(mixed, float(sums.n.sum())) + found.one * same):
        times = left / float(sums.n.sum())
        raise SolverError(f"residuals of the fit have {times:.3g} times the variance of the learned noise: {HINT}")


def _noise_factor(sums: QuadraticLikelihoods, model: MixedModel, found: Grouped) -> float:
    """Return the ratio of the noise that groups leave to that of the model."""
    # many coefficients explain noise as well where sites have few rows, unless sites share them
    if found.blend is None or found.full is None or found.blend.weight > 0.5:
        return 1.0
    at_mean = 2 * sums.values(np.tile(model.mean, (sums.n_sites, 1))) / model.noise
    return found.full.noise(found.blend.chains, float(sums.n.sum()), float(at_mean.sum()))


def make_kin(source: Source, model: MixedModel, found: Grouped, population: Population, *, had_graph: bool) -> Kin:
    """Return the result in the user's units, sites in canonical order."""
    found, model = with_population(found, model, population)
    V, p, blend, units = len(model.theta), len(model.mean), found.blend, source.units
    same, n_groups, weight = found.kinship()
    labels = display_groups(same)
    shown = resolved(same, labels)
    use, rates = found.graph_use() if had_graph else ("none", None)
    states = found.kept
    if states is None and blend is not None:
        states = blend.chains.states(DRAWS)
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
        states=states if states is not None and len(states.weight) else None,
        one=found.one,
        one_mean=np.zeros(p) if found.common is None else found.common.mean,
        one_covariance=np.zeros((p, p)) if found.common is None else found.common.covariance,
        population=population,
        nested=model.nested,
    )
    return Kin(
        sites=source.sites,
        names=source.names,
        fixed=tuple(name for name, one in zip(source.names, source.fixed, strict=True) if one),
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
        sure=found.sure(model),
        diagnostics=_diagnostics(found),
        learned=learned,
    )


def _diagnostics(found: Grouped) -> Diagnostics | None:
    blend = found.blend
    if blend is None:
        return None
    chains = blend.chains
    rhat, size = {}, {}
    lines = chains.trace("trace")
    for name, draws in (("number of groups", lines[:, :, 1]), ("bound on the evidence", lines[:, :, 0])):
        rhat[name], size[name] = float(split_rhat(draws)), float(effective_size(draws))
    each, sizes = blend.mixing()
    rhat |= {"parameters, worst": float(each.max()), "parameters, median": float(np.median(each))}
    size |= {"parameters, worst": float(sizes.min()), "parameters, median": float(np.median(sizes))}
    return Diagnostics(chains.weights, chains.starts, int(lines.shape[1]), rhat, size)
