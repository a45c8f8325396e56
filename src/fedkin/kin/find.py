"""`find_kin`: from rows or summaries to estimates, groups and their probabilities."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedkin._base import Array, Index, Mask, check_whole, one_blas_thread, tracked
from fedkin.core import FileRows, Summaries
from fedkin.data import Federation
from fedkin.errors import DataError, GraphError, SolverError
from fedkin.graph import Graph
from fedkin.kin.beginning import Beginning, StartFrom, given_groups
from fedkin.kin.covariates import Covariates, hint_of
from fedkin.kin.matrices import FEW
from fedkin.kin.mixed import MixedModel, fit_mixed, mixed_at, with_noise, without_spread
from fedkin.kin.options import ALL_MIXED, MANY_SITES, WHOLE_GROUPS, Sampling
from fedkin.kin.quadratics import Quadratics, Units, apply, common_units
from fedkin.kin.result import Kin, Parts, kin_of
from fedkin.kin.sampler.neighbours import Neighbours
from fedkin.kin.sources import FileSource, RowSource, SummarySource, SumSource, canonical_order, intercepts_of
from fedkin.losses import Loss

if TYPE_CHECKING:  # loads the compiled sampler
    from fedkin.kin.sampler.groups import Grouped

#: Rounds of the mixed model for smooth losses, and the largest change of a standardised parameter that ends them.
ROUNDS, STEP = 20, 2e-3
#: The same for rounds with averaged losses.
AVERAGED_STEP, AVERAGED_NEWTON = 0.01, 3
#: How often noise is learned again from estimates with groups where there are many coefficients, and what ends it.
NOISES, NOISE_STEP = 3, 0.03
#: Newton steps of a site given mean and spread, and how often each is halved.
NEWTON, HALVINGS = 12, 12
#: Expansions at the estimate with groups, and the change that ends them.
AGAIN, AGAIN_STEP = 3, 0.02
#: How often the way back to the mixed model is halved for a site that an estimate with groups does not suit.
BACK = 8
#: What to do about a fit that has gone astray.
CURE = "look for columns or targets of extreme size, or take another loss"


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

    Sites differ around a common mean, each coefficient by a spread of its own that is learned; some of them may form
    groups. One model for all, a model per site, site intercepts, random slopes and groups that share everything are
    corners of it; how far to go to any of them is averaged over, not chosen.

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
        An earlier result for the same columns, in the same units: spreads begin where it ended, and so do the sites
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
    source: RowSource | SummarySource
    if isinstance(data, Summaries):
        source = SummarySource(data)
        source.refuse_small_corner()
    elif isinstance(data, Federation):
        source = RowSource(data, loss)
    elif isinstance(data, FileRows):
        source = FileSource(data)
    else:
        raise DataError(f"find_kin takes a Federation or Summaries, got {type(data).__name__}")
    graph = hint_of(graph, covariates, source.sites)
    first = source.first()
    order = canonical_order(first, source.sites)
    neighbours = _neighbours(graph, source.sites, order)
    sampling, given = Sampling.of(len(order), sweeps, chains), given_groups(start, source.sites, order)
    ordered = SumSource(source, first, order) if source.loss.quadratic else source.take(order)
    del first, source  # sums of many sites are large
    begin = Beginning.of(start, ordered.sites, ordered.names) if isinstance(start, Kin) else None
    with one_blas_thread():
        found = _fit(ordered, neighbours, seed, replace(sampling, given=given), begin)
    if not (np.isfinite(found.theta).all() and np.isfinite(found.covariance).all()):
        raise SolverError(f"no finite estimates were found: {CURE}")
    return found.reordered(np.argsort(order))


def _neighbours(graph: Graph | None, sites: tuple[object, ...], order: Index) -> Neighbours:
    """Neighbours in the canonical order; the largest weight counts as an edge, others as parts of one."""
    if graph is None:
        return Neighbours.none(len(sites))
    position = {sites[u]: k for k, u in enumerate(order.tolist())}
    unknown = [site for site in graph.sites if site not in position]
    if unknown:
        raise GraphError(f"the graph names site {unknown[0]!r}, which has no data: leave it out of the graph")
    place = np.array([position[site] for site in graph.sites], dtype=np.int64)
    return Neighbours.of(len(sites), place[graph.edges], graph.weights / graph.weights.max(initial=1e-300))


def _load_sampler(V: int) -> None:
    """Load the sampler for V sites. Kernels that are in no cache are compiled, which whoever listens is told."""
    from fedkin.kin import kernels
    from fedkin.solvers.jit import entries

    folder = Path(kernels.__file__).parent
    needed = ("marginals", "sweeps" if V < MANY_SITES else "drawn", *(("splits",) if V >= WHOLE_GROUPS else ()))
    new = [
        name
        for name in needed
        if f"{kernels.__name__}.{name}" not in sys.modules and not any(entries(f"{name}.*", folder))
    ]
    for name in tracked(new, "compiling the sampler, once on this machine") if new else ():
        import_module(f"{kernels.__name__}.{name}")


def _fit(
    source: RowSource | SummarySource | SumSource,
    neighbours: Neighbours,
    seed: int,
    sampling: Sampling,
    begin: Beginning | None = None,
) -> Kin:
    _load_sampler(len(source.sites))
    from fedkin.kin.sampler.groups import find_groups

    first, loss = source.first(), source.loss
    intercepts = intercepts_of(source.names, loss.n_outputs)
    # a point among the rows has no units of its own: every coordinate is like an intercept
    free = np.ones_like(intercepts) if loss.location else intercepts
    has_scale = loss.quadratic or loss.threshold is not None
    units = common_units(first, intercepts, has_scale=has_scale, location=loss.location)
    if not isinstance(source, RowSource):
        dispersion = source.dispersion() / units.target**2 if isinstance(source, SummarySource) else None
        sums = units.fitted(first)
        model = fit_mixed(sums, free, dispersion=dispersion, start=None if begin is None else begin.parameters)
        found = find_groups(model, ~free, neighbours, seed, sampling)
        for _ in range(NOISES if dispersion is None and sums.n_params > FEW else 0):
            factor = _noise_factor(sums, model, found)
            if abs(np.log(factor)) < NOISE_STEP:
                break
            noise, parameters = model.noise, model.parameters
            del model, found  # of many coefficients they are large
            model = with_noise(sums, free, noise * factor, parameters)
            found = find_groups(model, ~free, neighbours, seed, sampling)
        one = without_spread(sums, free, model, learned=dispersion is None)
        del first, sums
        found = replace(found, whole=None)
        found = found.without_spread(model, one)
        return kin_of(source, Parts(units, model, found, neighbours.neighbour.size > 0))
    mixed = _mixed_rounds(source, units, free, begin)
    slack = 0.5 * mixed.theta.shape[1] * (1.0 if loss.threshold is None else float(mixed.noise[0]) * units.target**2)
    limits = source.values(units.theta(mixed.theta)) + slack
    model = _expanded(source, units, mixed, mixed.theta, mixed.covariance)
    # short chains say where to expand; where groups count for nothing, so does the length of chains
    brief, moved, last, short = sampling.brief(), np.inf, False, True
    found = find_groups(model, ~free, neighbours, seed, brief)
    for turn in range(1, AGAIN + 1):
        if found.blend is None or found.blend.weight > ALL_MIXED or last:
            break
        at = _held(source, units, found.theta, mixed.theta, limits)
        there = _expanded(source, units, mixed, at, found.covariance)
        last = turn == AGAIN or moved < AGAIN_STEP
        kept = neighbours if found.with_graph else Neighbours.none(len(mixed.theta))
        again = find_groups(there, ~free, kept, seed, sampling if last else brief, guard=False)
        if source.value(units.theta(again.theta)) > limits.sum():
            break  # the quadratics do not hold that far
        short = not last
        moved = float(np.abs(again.theta - at).max())
        last = last or (moved < AGAIN_STEP and brief.keep == sampling.keep)
        model, found = there, replace(again, sure_other=found.sure_other)  # what the guard has said stays said
    if short and brief.keep < sampling.keep and found.blend is not None and found.blend.weight <= ALL_MIXED:
        # the last expansion was not taken, so that long chains have still to run where short ones have stayed
        kept = neighbours if found.with_graph else Neighbours.none(len(mixed.theta))
        again = find_groups(model, ~free, kept, seed, sampling, guard=False)
        if source.value(units.theta(again.theta)) <= limits.sum():
            found = replace(again, sure_other=found.sure_other)
    if source.value(units.theta(found.theta)) > limits.sum():
        found = replace(found, theta=mixed.theta, covariance=mixed.covariance)
    _refuse_worse(source, units.theta(found.theta), slack)
    sums = _sums(source, units, mixed.theta, mixed.covariance)
    one = without_spread(sums, free, mixed, learned=False)
    found = found.without_spread(model, one)
    return kin_of(source, Parts(units, model, found, neighbours.neighbour.size > 0))


def _refuse_worse(source: RowSource, theta: Array, slack: float) -> None:
    """Raise `SolverError` where estimates suit the sites' rows less than the one model for all that rounds began with.

    Not for classes, where one model for all may fit without error, and what is open about a site is averaged.
    """
    if source.loss.needs_classes:
        return
    start, end = source.value(source.start()), source.value(theta)
    if not end <= start + slack * len(theta):
        raise SolverError(f"the fit ended with a loss of {end:.4g}, but one model for all has {start:.4g}: {CURE}")


def _noise_factor(sums: Quadratics, model: MixedModel, found: Grouped) -> float:
    """By how much noises are larger than those of the model, by what groups leave.

    Many coefficients explain noise as well where sites have few rows, unless sites share them.
    """
    if found.blend is None or found.whole is None or found.blend.weight > 0.5:
        return 1.0
    at_mean = 2 * sums.values(np.tile(model.mean, (sums.n_sites, 1))) / model.noise
    return found.whole.noise(found.blend.chains, float(sums.n.sum()), float(at_mean.sum()))


def _mixed_rounds(source: RowSource, units: Units, free: Mask, begin: Beginning | None) -> MixedModel:
    """The mixed model of a smooth loss: sites settle given mean and spread, which are then learned from them.

    Quadratics hold where sites have settled: elsewhere a row that is badly predicted has next to no weight and a large
    gradient, and would move anything anywhere.
    """
    theta = units.to_fitted(source.start() if begin is None else begin.theta)
    mean, spread, parameters, dispersion = theta[0], np.where(free, 0.3, 0.03), None, 1.0
    if begin is not None:
        mean, spread, parameters = units.to_fitted(begin.mean), begin.spread, begin.parameters
    for turn in range(ROUNDS):
        before = theta
        theta = _settled(source, units, theta, mean, spread, dispersion)
        sums = units.fitted(source.expand(units.theta(theta)))
        model = fit_mixed(sums, free, dispersion=dispersion, start=parameters)
        mean, spread = model.mean, model.spread
        if np.abs(theta - before).max() < STEP and turn >= 2:
            break
        dispersion = source.dispersion(units.theta(theta), units.A, float(model.degrees.sum())) / units.target**2
        parameters = np.concatenate([model.parameters[:-1], [np.log(dispersion)]])
    settled = replace(model, theta=_settled(source, units, theta, mean, spread, dispersion))
    return _averaged_rounds(source, units, free, settled) if source.averages else settled


def _averaged_rounds(source: RowSource, units: Units, free: Mask, model: MixedModel) -> MixedModel:
    """The model again, with losses averaged over what is open about every site instead of taken where it settled.

    Spreads change by a factor of e at most in a round. A model that explains the rows worse than the first is not
    taken: nothing promises that rounds settle where some sites hardly tell.
    """
    first, dispersion = model, float(model.noise[0])
    for _ in range(ROUNDS):
        before = model
        sums = _settled_around(source, units, model, dispersion)
        found = fit_mixed(sums, free, dispersion=dispersion, start=model.parameters).parameters
        held = np.clip(found, model.parameters - 1.0, model.parameters + 1.0)
        model = mixed_at(sums, free, dispersion, held)
        moved = np.abs(model.theta - before.theta).max()
        if moved < AVERAGED_STEP and np.abs(held - before.parameters).max() < 0.1:
            break
    worst = source.value(units.theta(first.theta)) + 0.5 * first.theta.size
    return model if source.value(units.theta(model.theta)) <= worst else first


def _settled_around(source: RowSource, units: Units, model: MixedModel, dispersion: float) -> Quadratics:
    """What sites say around the points where their averaged loss plus penalty is least."""
    penalty, mean, theta = 1.0 / (model.spread + 1e-9), model.mean, model.theta
    covariance = model.covariance

    def cost(sums: Quadratics, at: Array) -> Array:
        return np.asarray(sums.values(at) / dispersion + 0.5 * (at - mean) ** 2 @ penalty)

    sums = _sums(source, units, theta, covariance)
    now = cost(sums, theta)
    for _ in range(AVERAGED_NEWTON):
        precision = sums.G / dispersion + np.diag(penalty)
        pull = (sums.c - apply(sums.G, theta)) / dispersion - penalty * (theta - mean)
        change = np.linalg.solve(precision, pull[:, :, None])[:, :, 0]
        for _ in range(HALVINGS):
            trial = _sums(source, units, theta + change, covariance)
            new = cost(trial, theta + change)
            bad = ~(new <= now + 1e-9 * np.abs(now))
            if not bad.any():
                break
            change[bad] *= 0.5
        if bad.any():
            break
        theta, sums, now = theta + change, trial, new
        if np.abs(change).max() < AVERAGED_STEP:
            break
    return sums


def _sums(source: RowSource, units: Units, at: Array, covariance: Array) -> Quadratics:
    """What sites say at a point, or around it where their losses can be averaged."""
    if source.averages:
        return units.fitted(source.averaged(units.theta(at), units.covariance(covariance)))
    return units.fitted(source.expand(units.theta(at)))


def _settled(source: RowSource, units: Units, theta: Array, mean: Array, spread: Array, dispersion: float) -> Array:
    """Where every site's loss plus penalty is least, from ``theta (V, p)`` on: Newton's method, steps halved."""
    penalty = 1.0 / (spread + 1e-9)

    def cost(at: Array) -> Array:
        losses = source.values(units.theta(at)) / units.target**2
        return np.asarray(losses / dispersion + 0.5 * (at - mean) ** 2 @ penalty)

    now = cost(theta)
    for _ in range(NEWTON):
        sums = units.fitted(source.expand(units.theta(theta)))
        pull = (sums.c - apply(sums.G, theta)) / dispersion - penalty * (theta - mean)
        change = np.linalg.solve(sums.G / dispersion + np.diag(penalty), pull[:, :, None])[:, :, 0]
        for _ in range(HALVINGS):
            new = cost(theta + change)
            bad = ~(new <= now + 1e-9 * np.abs(now))
            if not bad.any():
                break
            change[bad] *= 0.5
        change[bad] = 0.0
        theta, now = theta + change, np.where(bad, now, new)
        if np.abs(change).max() < STEP / 10:
            break
    return theta


def _held(source: RowSource, units: Units, theta: Array, back: Array, limits: Array) -> Array:
    """``theta (V, p)``, but half way back, or more, for sites whose loss there is above its limit ``(V,)``."""
    for _ in range(BACK):
        bad = source.values(units.theta(theta)) > limits
        if not bad.any():
            return theta
        theta = np.where(bad[:, None], 0.5 * (theta + back), theta)
    return np.asarray(np.where(bad[:, None], back, theta))


def _expanded(source: RowSource, units: Units, model: MixedModel, at: Array, covariance: Array) -> MixedModel:
    """The model with what sites say at another point, of which so much is open."""
    sums = _sums(source, units, at, covariance)
    weight = 1.0 / model.noise
    short = None if sums.short is None else sums.short.scaled(np.ones(sums.n_params), weight)
    return replace(model, precision=sums.G * weight[:, None, None], score=sums.c * weight[:, None], short=short)
