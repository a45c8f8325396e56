"""`find_kin`: from rows or summaries to estimates, groups and their probabilities."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from fedkin._base import Array, Index, Mask, check_whole, one_blas_thread
from fedkin.core import FileRows, Summaries, damped_newton, site_data
from fedkin.data import Federation, site_id
from fedkin.errors import DataError, GraphError, ParameterError, SolverError
from fedkin.graph import Graph
from fedkin.kin.chains import Given, Sampling, effective_size, kmeans, modularity_directions, split_rhat
from fedkin.kin.covariates import Covariates, hint_of
from fedkin.kin.groups import ALL_MIXED, Grouped, groups_of, with_population
from fedkin.kin.learned import Learned
from fedkin.kin.likelihoods import FEW, QuadraticLikelihoods, Units, apply, common_units, given_mean
from fedkin.kin.mixed import (
    MixedModel,
    Population,
    fit_mixed,
    fit_one_model,
    fit_population,
    mixed_at,
    with_noise,
)
from fedkin.kin.partitions import SHARES, Neighbours, display_groups, resolved
from fedkin.kin.result import Diagnostics, Kin
from fedkin.kin.sampler import MANY_SITES, WHOLE_GROUPS, load_kernels
from fedkin.kin.sources import ScaledLosses, Source, canonical_order, intercepts_of
from fedkin.losses import LOGIT_SIZE, Loss

#: What a fit may start from: an earlier result, a graph of who seems alike, or a label for each site.
StartFrom = Kin | Graph | Mapping[Hashable, Any] | Sequence[Any] | Array
#: How often noise is learned again from estimates with groups where there are many coefficients, and what ends it.
NOISES, NOISE_STEP = 3, 0.03
#: States of all chains that are kept.
STATES = 60
#: Residuals have at most so many times the variance that the noise, or the mixed model, leaves them.
MOST_LEFT = 2.0
#: Rounds of the mixed model for smooth losses, and the largest change of a standardised parameter that ends them.
ROUNDS, STEP = 20, 2e-3
#: The same for rounds with averaged losses, and their Newton steps.
AVERAGED_STEP, AVERAGED_NEWTON = 0.01, 3
#: Rounds of the population effects of smooth losses, and the change in standard errors that ends them.
POPULATION_ROUNDS, POPULATION_STEP = 6, 0.01
#: Newton steps of a site given mean and variance, and the decrement, relative to the loss, that ends them.
NEWTON, NEWTON_TOL = 12, 1e-9
#: The same for averaged losses, whose values cost as much as their derivatives.
AVERAGED_TOL = 1e-6
#: Expansions at the estimate with groups, and the change that ends them.
AGAIN, AGAIN_STEP = 3, 0.02
#: How often the way back to the mixed model is halved for a site that an estimate with groups does not suit.
BACK = 8
#: Variances start no lower: from nothing none of them would rise again.
LEAST_VARIANCE = 1e-4
#: Least dispersion in standardised units: rows that a fit goes through would have none, and estimates no digits.
LEAST_DISPERSION = 3e-6
#: Where the variance of the slopes' means starts, which results do not keep.
RIDGE = 0.1
#: What to do about a fit that has gone astray.
HINT = "look for columns or targets of extreme size, or take another loss"


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
        What is known about the sites besides their rows: coordinates, size, region. Sites that are near each other, or
        have the same label, are joined by a graph, which may be wrong like any other (`fedkin.kin.covariate_graph`).
        An array is in the order of the sites. Give either a graph or covariates.
    fixed : sequence of str
        Columns with one effect, the same at all sites. So are columns that are constant within nearly all sites, where
        there is an intercept: how their effects differ between sites cannot be told. `Kin.fixed` has them all.
    within : mapping {site: district} or sequence of V districts, optional
        In which district each site is; a mapping may have sites to come, too. Districts differ around the mean of all,
        and sites around that of their district, each coefficient with a variance of its own at both levels. Then no
        groups are looked for.

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
    source = source.with_fixed(fixed, first)
    sites = source.sites
    districts = _districts(within, sites)
    if districts is not None:
        if graph is not None or isinstance(start, Graph):
            raise ParameterError("with districts no groups are looked for: give within= or a graph, not both")
        source.district = np.unique([repr(one) for one in districts], return_inverse=True)[1]
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
    listed = within.items() if isinstance(within, Mapping) else zip(sites, districts or (), strict=True)
    named = None if districts is None else tuple((site_id(site), site_id(one)) for site, one in listed)
    return replace(found.reordered(np.argsort(order)), within=named)


def _districts(within: Any, sites: tuple[Hashable, ...]) -> tuple[Hashable, ...] | None:
    """Return the district of each site of the data."""
    if within is None:
        return None
    if isinstance(within, Mapping):
        missing = [site for site in sites if site not in within]
        if missing:
            raise DataError(f"within= has no district of site {missing[0]!r}: give every site one")
        within = [within[site] for site in sites]
    if isinstance(within, str) or len(within) != len(sites):
        raise DataError(f"within= takes a district for each of the {len(sites)} sites")
    made = tuple(site_id(one) for one in within)
    if not 1 < len(set(made)) < len(sites):
        found = "all sites are in one district" if len(set(made)) == 1 else "every site is a district of its own"
        raise DataError(f"{found}, so that there is no level above sites: leave within= out")
    return made


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
    units = replace(units, fixed=source.fixed if source.fixed.any() else None)
    if source.has_rows and not loss.quadratic:
        model, found, population = fit_smooth(ScaledLosses(source, units), free, neighbours, seed, sampling, warm)
        return make_kin(source, units, model, found, population, had_graph=had_graph)
    dispersion = None if loss.quadratic else source.shared_dispersion() / units.target**2
    sums = ScaledLosses(source, units).fitted(first)
    model = fit_mixed(sums, free, dispersion=dispersion, start=None if warm is None else warm.parameters)
    found = groups_of(model, ~free, neighbours, seed, sampling)
    for _ in range(NOISES if dispersion is None and sums.n_params > FEW and model.nested is None else 0):
        factor = _noise_factor(sums, model, found)
        if abs(np.log(factor)) < NOISE_STEP:
            break
        noise, parameters = model.noise, model.parameters
        del model, found  # of many coefficients they are large
        model = with_noise(sums, free, noise * factor, parameters)
        found = groups_of(model, ~free, neighbours, seed, sampling)
    one = fit_one_model(sums, free, model, learned=dispersion is None)
    population = fit_population(sums, model.noise, model.variance, learned=dispersion is None)
    found = replace(found, full=None)
    if model.nested is None:
        found = found.with_one_model(model, one)
    if loss.quadratic:
        _refuse_residuals(sums, model, found.theta)
    else:
        common, slack = np.tile(one.mean, (sums.n_sites, 1)), 0.5 * found.theta.size * float(model.noise[0])
        _refuse_worse(sums.values, found.theta, common, slack)
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
    found, model = with_population(found, model, population)
    V, p, blend = len(model.theta), len(model.mean), found.blend
    same, n_groups, weight = found.kinship()
    labels = display_groups(same)
    shown = resolved(same, labels)
    use, rates = found.graph_use() if had_graph else ("none", None)
    states = found.kept
    if states is None and blend is not None:
        states = blend.chains.states(STATES // len(blend.chains.records))
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
    lines = chains.trace(lambda one: one.trace)
    for name, draws in (("number of groups", lines[:, :, 1]), ("bound on the evidence", lines[:, :, 0])):
        rhat[name], size[name] = float(split_rhat(draws)), float(effective_size(draws))
    each, sizes = blend.mixing()
    rhat |= {"parameters, worst": float(each.max()), "parameters, median": float(np.median(each))}
    size |= {"parameters, worst": float(sizes.min()), "parameters, median": float(np.median(sizes))}
    return Diagnostics(chains.weights, chains.starts, int(lines.shape[1]), rhat, size)


# --- losses that are not quadratic -----------------------------------------------------------------------------------


class WarmStart(NamedTuple):
    """An earlier result for the sites of the next fit."""

    theta: Array  # (V, p) in the user's units, the mean for a site that the earlier fit did not have
    mean: Array  # (p,) in the user's units
    variance: Array  # (p,) between sites in standardised units
    parameters: Array  # (p + 2,) as in `MixedModel`

    @classmethod
    def from_kin(cls, start: Kin, sites: Sequence[Hashable], names: Sequence[str]) -> WarmStart | None:
        """Return the start for these sites; None where the earlier fit had other parameters."""
        if len(start.names) != len(names):
            return None
        mean = start.learned.units.theta(start.learned.mean)
        known = dict(zip(start.sites, start.theta, strict=True))
        theta = np.array([known.get(one, mean) for one in sites])
        fixed = start.learned.units.fixed_mask
        variance = np.where(fixed, 0.0, np.maximum(start.learned.variance, LEAST_VARIANCE))
        noise = max(start.learned.noise, LEAST_VARIANCE)
        return cls(theta, mean, variance, np.log(np.concatenate([variance[~fixed], [RIDGE, noise]])))


def fit_smooth(
    losses: ScaledLosses, free: Mask, neighbours: Neighbours, seed: int, sampling: Sampling, warm: WarmStart | None
) -> tuple[MixedModel, Grouped, Population]:
    """Fit a smooth loss: expand it where the mixed model puts the sites, then where groups put them."""
    mixed = _mixed_rounds(losses, free, warm)
    scale = 1.0 if losses.source.loss.threshold is None else float(mixed.noise[0]) * losses.units.target**2
    slack = 0.5 * mixed.theta.shape[1] * scale
    limits = losses.values(mixed.theta) + slack
    model = _expanded(losses, mixed, mixed.theta, mixed.covariance)
    # short chains say where to expand; where groups count for nothing, so does the length of chains
    brief, moved, last, short = sampling.brief(), np.inf, False, True

    def again_at(there: MixedModel, length: Sampling) -> Grouped | None:
        """Find groups again with what the guard has left of the graph; None where the quadratics do not hold so far."""
        kept = neighbours if found.with_graph else Neighbours.none(len(mixed.theta))
        again = groups_of(there, ~free, kept, seed, length, guard=False)
        return again if losses.value(again.theta) <= limits.sum() else None

    found = groups_of(model, ~free, neighbours, seed, brief)
    for turn in range(1, AGAIN + 1):
        if found.blend is None or found.blend.weight > ALL_MIXED or last:
            break
        at = _within_limits(losses, found.theta, mixed.theta, limits)
        there = _expanded(losses, mixed, at, found.covariance)
        last = turn == AGAIN or moved < AGAIN_STEP
        again = again_at(there, sampling if last else brief)
        if again is None:
            break
        short = not last
        moved = float(np.abs(again.theta - at).max())
        last = last or (moved < AGAIN_STEP and brief.keep == sampling.keep)
        model, found = there, again
    if short and brief.keep < sampling.keep and found.blend is not None and found.blend.weight <= ALL_MIXED:
        # the last expansion was not taken, so that long chains have still to run where short ones have stayed
        found = again_at(model, sampling) or found
    if losses.value(found.theta) > limits.sum():
        found = replace(found, theta=mixed.theta, covariance=mixed.covariance)
    sums = losses.sums(mixed.theta, mixed.covariance)
    if mixed.nested is None:
        found = found.with_one_model(model, fit_one_model(sums, free, mixed, learned=False))
    source = losses.source
    # one model for all may separate classes without error, so that classes are compared with no model at all
    start = np.zeros_like(found.theta) if source.loss.target == "class" else source.start()
    _refuse_worse(source.values, losses.units.theta(found.theta), start, slack * len(start))
    return model, found, _fit_population(losses, sums, mixed)


def _fit_population(losses: ScaledLosses, sums: QuadraticLikelihoods, mixed: MixedModel) -> Population:
    """Fit the population effects of a smooth loss, with losses averaged where that population puts the sites.

    At modes, means of counts come out too large. A mean that maximises a likelihood is biased, too, away from zero for
    classes: scores are adjusted as Firth (1993) does.
    """
    if not losses.source.can_average:
        return fit_population(sums, mixed.noise, mixed.variance, learned=False)
    noise = float(mixed.noise[0])
    sums = losses.averaged(mixed.theta, mixed.covariance)
    found = fit_population(sums, mixed.noise, mixed.variance, learned=False)
    for _ in range(POPULATION_ROUNDS if mixed.nested is None else 0):
        if not np.diag(found.covariance).max() < LOGIT_SIZE:  # rows hardly tell the mean
            break
        own, left = given_mean(found.variance, sums.G / noise)
        theta = found.mean + apply(own, sums.c - sums.G @ found.mean) / noise
        sums = losses.averaged(theta, own, left @ found.covariance @ np.swapaxes(left, 1, 2))
        before, found = found, fit_population(sums, mixed.noise, found.variance, learned=False)
        if (np.abs(found.mean - before.mean) < POPULATION_STEP * np.sqrt(np.diag(before.covariance))).all():
            break
    return found


def _refuse_worse(values: Callable[[Array], Array], theta: Array, common: Array, slack: float) -> None:
    """Raise `SolverError` where estimates suit the rows less than one model for all, both ``(V, p)``."""
    end, start = (float(values(at).sum()) for at in (theta, common))
    if not end <= start + slack:
        raise SolverError(f"the fit ended with a loss of {end:.4g}, but one model for all has {start:.4g}: {HINT}")


def _mixed_rounds(losses: ScaledLosses, free: Mask, warm: WarmStart | None) -> MixedModel:
    """Fit the mixed model of a smooth loss: posterior modes given mean and variance, then these from the modes."""
    # expansions hold at the modes: elsewhere a badly predicted row has next to no weight and a large gradient
    source, units = losses
    theta = units.to_fitted(source.start() if warm is None else warm.theta)
    mean, variance, parameters, dispersion = theta, np.where(free, 0.3, 0.03), None, 1.0
    variance[source.fixed] = 0.0
    if warm is not None:
        mean = np.tile(units.to_fitted(warm.mean), (len(theta), 1))
        variance, parameters = warm.variance, warm.parameters if source.district is None else None

    def values(at: Array) -> Array:
        return losses.values(at) / units.target**2

    for turn in range(ROUNDS):
        before = theta
        theta = posterior_modes(values, losses.expand, theta, mean, variance, dispersion, NEWTON)
        model = fit_mixed(losses.expand(theta), free, dispersion=dispersion, start=parameters)
        mean, variance = model.centres, model.variance
        if np.abs(theta - before).max() < STEP and turn >= 2:
            break
        found = source.dispersion(units.theta(theta), units.A, float(model.degrees.sum())) / units.target**2
        dispersion = max(found, LEAST_DISPERSION)
        parameters = model.parameters.copy()
        parameters[int((~model.fixed).sum()) + 1] = np.log(dispersion)
    model = replace(model, theta=posterior_modes(values, losses.expand, theta, mean, variance, dispersion, NEWTON))
    return _averaged_rounds(losses, free, model) if source.averages else model


def _averaged_rounds(losses: ScaledLosses, free: Mask, model: MixedModel) -> MixedModel:
    """Fit the model again, with losses averaged over every site's posterior instead of taken at its mode."""
    # nothing promises that rounds converge where some sites hardly tell: steps are short, a worse model is not taken
    first, dispersion = model, float(model.noise[0])
    for _ in range(ROUNDS):
        before, sums = model, _averaged_modes(losses, model, dispersion)
        found = fit_mixed(sums, free, dispersion=dispersion, start=model.parameters).parameters
        held = np.clip(found, model.parameters - 1.0, model.parameters + 1.0)
        model = mixed_at(sums, free, dispersion, held)
        moved = np.abs(model.theta - before.theta).max()
        if moved < AVERAGED_STEP and np.abs(held - before.parameters).max() < 0.1:
            break
    worst = losses.value(first.theta) + 0.5 * first.theta.size
    return model if losses.value(model.theta) <= worst else first


def _averaged_modes(losses: ScaledLosses, model: MixedModel, dispersion: float) -> QuadraticLikelihoods:
    """Return quadratics at the modes of averaged losses: values cost as much as derivatives, so the last are kept."""
    last: list[tuple[Array, QuadraticLikelihoods]] = []

    def expand(at: Array) -> QuadraticLikelihoods:
        if not last or not np.array_equal(last[0][0], at):
            last[:] = [(at.copy(), losses.sums(at, model.covariance))]
        return last[0][1]

    start = model.theta, model.centres, model.variance, dispersion
    return expand(posterior_modes(lambda at: expand(at).values(at), expand, *start, AVERAGED_NEWTON, AVERAGED_TOL))


def posterior_modes(
    values: Callable[[Array], Array],
    expand: Callable[[Array], QuadraticLikelihoods],
    theta: Array,
    mean: Array,
    variance: Array,
    dispersion: float,
    steps: int,
    tol: float = NEWTON_TOL,
) -> Array:
    """Minimise sites' losses plus penalties around ``mean (V, p)`` from ``theta (V, p)`` on, by Newton's method."""
    penalty, at = 1.0 / (variance + 1e-9), theta.copy()

    def value(part: Array, who: Index) -> Array:
        at[who] = part
        return np.asarray(values(at)[who] / dispersion + 0.5 * (part - mean[who]) ** 2 @ penalty)

    def derivatives(part: Array, who: Index) -> tuple[Array, Array]:
        at[who] = part
        sums = expand(at).take(who)
        gradient = (apply(sums.G, part) - sums.c) / dispersion + penalty * (part - mean[who])
        return gradient, sums.G / dispersion + np.diag(penalty)

    return damped_newton(value, derivatives, theta, tol, steps)[0]


def _within_limits(losses: ScaledLosses, theta: Array, back: Array, limits: Array) -> Array:
    """Return ``theta (V, p)``, but half way back, or more, for sites whose loss there is above its limit ``(V,)``."""
    for _ in range(BACK):
        bad = losses.values(theta) > limits
        if not bad.any():
            return theta
        theta = np.where(bad[:, None], 0.5 * (theta + back), theta)
    return np.asarray(np.where(bad[:, None], back, theta))


def _expanded(losses: ScaledLosses, model: MixedModel, at: Array, covariance: Array) -> MixedModel:
    """Return the model with the site likelihoods at another point, with this uncertainty."""
    sums = losses.sums(at, covariance)
    weight = 1.0 / model.noise
    matrices = sums.matrices.scaled(np.ones(sums.n_params), weight)
    return replace(model, precision=sums.G * weight[:, None, None], score=sums.c * weight[:, None], matrices=matrices)
