"""Losses other than least squares: expand them at the estimates of the mixed model, then at those with groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from fedkin._base import Array, Index, Mask
from fedkin.core import damped_newton
from fedkin.errors import SolverError
from fedkin.kin.chains import Sampling
from fedkin.kin.groups import Grouped, find_groups
from fedkin.kin.likelihoods import QuadraticLikelihoods, apply, given_mean
from fedkin.kin.mixed import MixedModel, Population, fit_mixed, fit_one_model, fit_population, mixed_at
from fedkin.kin.partitions import UNLIKELY, Neighbours
from fedkin.kin.result import Kin
from fedkin.kin.sources import ROUNDS, STEP, Source
from fedkin.losses import LOGIT_SIZE

#: Expansions at the estimate with groups.
AGAIN = 3
#: Variances start no lower: from nothing none of them would rise again.
LEAST_VARIANCE = 1e-4
#: What to do about a fit that failed.
HINT = "check for columns or targets of extreme size, or use another loss"


def warm_start(start: Kin, source: Source) -> tuple[Array, Array, Array, Array] | None:
    """Return thetas ``(V, p)``, mean and variance ``(p,)``, and the parameters of `MixedModel` from an earlier result.

    Sites that it did not have start at its mean; the result is None if it had other parameters.
    """
    if len(start.names) != len(source.names):
        return None
    known, learned = dict(zip(start.sites, start.theta, strict=True)), start.learned
    mean = learned.units.theta(learned.mean)
    theta = source.units.to_fitted(np.array([known.get(one, mean) for one in source.sites]))
    fixed = learned.units.fixed_mask
    variance = np.where(fixed, 0.0, np.maximum(learned.variance, LEAST_VARIANCE))
    # results do not keep the variance of the slopes' means
    parameters = np.log(np.concatenate([variance[~fixed], [0.1, max(learned.noise, LEAST_VARIANCE)]]))
    return theta, source.units.to_fitted(mean), variance, parameters


def fit_smooth(
    source: Source, free: Mask, neighbours: Neighbours, seed: int, sampling: Sampling, start: Kin | None
) -> tuple[MixedModel, Grouped, Population]:
    """Fit a smooth loss: expand it at the estimates of the mixed model, then at those with groups."""
    mixed = _mixed_rounds(source, free, start)
    slack = 0.5 * mixed.theta.shape[1] * float(mixed.noise[0])
    limits = source.values(mixed.theta) + slack
    model = _expanded(source, mixed, mixed.theta, mixed.covariance)
    # short chains say where to expand; where groups count for nothing, so does the length of chains
    brief, moved, last, short = sampling.brief(), np.inf, False, True

    def again_at(there: MixedModel, length: Sampling) -> Grouped | None:
        """Search for groups again with the part of the graph that the guard kept; None if the quadratics were not
        accurate enough."""
        kept = neighbours if found.with_graph else Neighbours.none(len(mixed.theta))
        again = find_groups(there, ~free, kept, seed, length, guard=False)
        return again if source.value(again.theta) <= limits.sum() else None

    found = find_groups(model, ~free, neighbours, seed, brief)
    for turn in range(1, AGAIN + 1):
        if found.blend is None or found.blend.weight > 1 - UNLIKELY or last:
            break
        at = _within_limits(source, found.theta, mixed.theta, limits)
        # a site whose group hardly tells anything would be averaged over points where losses have no curvature
        wide = np.trace(found.covariance, axis1=1, axis2=2) > np.trace(mixed.covariance, axis1=1, axis2=2)
        there = _expanded(source, mixed, at, np.where(wide[:, None, None], mixed.covariance, found.covariance))
        last = turn == AGAIN or moved < STEP
        again = again_at(there, sampling if last else brief)
        if again is None:
            break
        short = not last
        moved = float(np.abs(again.theta - at).max())
        last = last or (moved < STEP and brief.keep == sampling.keep)
        model, found = there, again
    if short and brief.keep < sampling.keep and found.blend is not None and found.blend.weight <= 1 - UNLIKELY:
        # the last expansion was not taken, so that long chains have still to run where short ones have stayed
        found = again_at(model, sampling) or found
    if source.value(found.theta) > limits.sum():
        found = replace(found, theta=mixed.theta, covariance=mixed.covariance)
    sums = source.sums(mixed.theta, mixed.covariance)
    if mixed.nested is None:
        found = found.with_one_model(fit_one_model(sums, free, mixed, learned=False))
    # one model for all may separate classes without error, so that classes are compared with no model at all
    first = source.start()
    if source.loss.target == "class":
        first = source.units.to_fitted(np.zeros_like(first))
    refuse_worse(source.values, found.theta, first, slack * len(first))
    return model, found, _fit_population(source, sums, mixed)


def _fit_population(source: Source, sums: QuadraticLikelihoods, mixed: MixedModel) -> Population:
    """Fit the population effects of a smooth loss, with losses averaged around the sites' positions in that population.

    At modes, means of counts would be too large. A mean that maximises a likelihood is biased, too (away from zero for
    classes), so scores are adjusted as in Firth (1993).
    """
    if not source.can_average:
        return fit_population(sums, mixed.noise, mixed.variance, learned=False)
    noise, sums = float(mixed.noise[0]), source.averaged(mixed.theta, mixed.covariance)
    found = fit_population(sums, mixed.noise, mixed.variance, learned=False)
    theta, mean, spread, pace, moved = mixed.theta, found.mean, found.variance, 1.0, np.zeros_like(found.mean)
    worst = sums.values(theta).sum() + 0.5 * theta.size
    for _ in range(ROUNDS if mixed.nested is None else 0):
        error = np.sqrt(np.diag(found.covariance))
        if not error.max() ** 2 < LOGIT_SIZE:  # rows hardly tell the mean
            break
        own, left = given_mean(spread, sums.G / noise)
        theta = theta + pace * (mean + apply(own, sums.c - sums.G @ mean) / noise - theta)
        sums = source.averaged(theta, own, left @ found.covariance @ np.swapaxes(left, 1, 2))
        if not sums.values(theta).sum() <= worst:  # quadratics do not hold so far away
            break
        found = fit_population(sums, mixed.noise, spread, learned=False)
        step = found.mean - mean
        before, moved = moved, step / error
        pace = 0.5 * pace if moved @ before < 0 else pace  # rounds that go back and forth take shorter steps
        if np.abs(pace * moved).max() < STEP:
            break
        growth = np.log((found.variance + 1e-12) / (spread + 1e-12))
        mean, spread = mean + pace * step, spread * np.exp(pace * np.clip(growth, -1.0, 1.0))
    return found


def refuse_worse(values: Callable[[Array], Array], theta: Array, common: Array, slack: float) -> None:
    """Raise `SolverError` if estimates fit the rows worse than one model for all, both ``(V, p)``."""
    end, start = (float(values(at).sum()) for at in (theta, common))
    if not end <= start + slack:
        raise SolverError(f"the fit ended at a loss of {end:.4g}, above {start:.4g}, that of one model for all: {HINT}")


def _mixed_rounds(source: Source, free: Mask, start: Kin | None) -> MixedModel:
    """Fit the mixed model of a smooth loss: posterior modes given mean and variance, then these from the modes."""
    # expansions hold at the modes: elsewhere a badly predicted row has next to no weight and a large gradient
    warm = None if start is None else warm_start(start, source)
    if warm is None:
        theta = mean = source.start()
        variance, parameters = np.where(source.fixed, 0.0, np.where(free, 0.3, 0.03)), None
    else:
        theta, mean, variance, parameters = warm
        mean, parameters = np.tile(mean, (len(theta), 1)), parameters if source.district is None else None
    dispersion = 1.0
    for turn in range(ROUNDS):
        before = theta
        theta, sums = posterior_modes(source.expand, theta, mean, variance, dispersion, source.values)
        model = fit_mixed(sums, free, dispersion=dispersion, start=parameters)
        mean, variance = model.centres, model.variance
        if np.abs(theta - before).max() < STEP and turn >= 2:
            break
        # rows that a fit goes through would have no dispersion, and estimates no digits
        dispersion = max(source.dispersion(theta, float(model.degrees.sum())), 3e-6)
        parameters = model.parameters.copy()
        parameters[int((~model.fixed).sum()) + 1] = np.log(dispersion)
    theta, _ = posterior_modes(source.expand, theta, mean, variance, dispersion, source.values)
    model = replace(model, theta=theta)
    return _averaged_rounds(source, free, model) if source.averages else model


def _averaged_rounds(source: Source, free: Mask, model: MixedModel) -> MixedModel:
    """Fit the model again, with losses averaged over every site's posterior instead of taken at its mode."""
    # nothing promises that rounds converge where some sites hardly tell: steps are short, a worse model is not taken
    first, dispersion = model, float(model.noise[0])
    for _ in range(ROUNDS):
        before, expand = model, partial(source.averaged, covariance=model.covariance)
        _, sums = posterior_modes(expand, model.theta, model.centres, model.variance, dispersion)
        found = fit_mixed(sums, free, dispersion=dispersion, start=model.parameters).parameters
        held = np.clip(found, model.parameters - 1.0, model.parameters + 1.0)
        model = mixed_at(sums, free, dispersion, held)
        moved = np.abs(model.theta - before.theta).max()
        if moved < STEP and np.abs(held - before.parameters).max() < 0.1:
            break
    worst = source.value(first.theta) + 0.5 * first.theta.size
    return model if source.value(model.theta) <= worst else first


def posterior_modes(
    expand: Callable[[Array], QuadraticLikelihoods],
    theta: Array,
    mean: Array,
    variance: Array,
    dispersion: float,
    values: Callable[[Array], Array] | None = None,
) -> tuple[Array, QuadraticLikelihoods]:
    """Minimise each site's loss plus a penalty around ``mean (V, p)`` by Newton's method from ``theta (V, p)``.

    Return the minimisers and the quadratics there. Without ``values``, quadratics also give values.
    """
    penalty, at = 1.0 / (variance + 1e-9), theta.copy()
    last: dict[bytes, QuadraticLikelihoods] = {}

    def sums(there: Array) -> QuadraticLikelihoods:
        if (key := there.tobytes()) not in last:  # the last ones are kept, since values are asked for first
            last.clear()
            last[key] = expand(there)
        return last[key]

    def value(part: Array, who: Index) -> Array:
        at[who] = part
        each = sums(at).values(at) if values is None else values(at)
        return np.asarray(each[who] / dispersion + 0.5 * (part - mean[who]) ** 2 @ penalty)

    def derivatives(part: Array, who: Index) -> tuple[Array, Array]:
        at[who] = part
        mine = sums(at).take(who)
        gradient = (apply(mine.G, part) - mine.c) / dispersion + penalty * (part - mean[who])
        return gradient, mine.G / dispersion + np.diag(penalty)

    found = damped_newton(value, derivatives, theta, tol=1e-9, max_iter=12)[0]
    return found, sums(found)


def _within_limits(source: Source, theta: Array, back: Array, limits: Array) -> Array:
    """Return ``theta (V, p)``, but half way back, or more, for sites whose loss there is above its limit ``(V,)``."""
    for _ in range(8):
        bad = source.values(theta) > limits
        if not bad.any():
            return theta
        theta = np.where(bad[:, None], 0.5 * (theta + back), theta)
    return np.asarray(np.where(bad[:, None], back, theta))


def _expanded(source: Source, model: MixedModel, at: Array, covariance: Array) -> MixedModel:
    """Return the model with the site likelihoods at another point, with this uncertainty."""
    sums = source.sums(at, covariance)
    weight = 1.0 / model.noise
    matrices = sums.matrices.scaled(np.ones(sums.n_params), weight)
    return replace(model, precision=sums.G * weight[:, None, None], score=sums.c * weight[:, None], matrices=matrices)
