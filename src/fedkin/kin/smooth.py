"""Losses other than least squares: expand them at the estimates of the mixed model, then at those with groups."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from fedkin._base import Array, Index, Mask
from fedkin.core import damped_newton
from fedkin.errors import SolverError
from fedkin.kin.chains import Sampling
from fedkin.kin.groups import Grouped, groups_of
from fedkin.kin.likelihoods import QuadraticLikelihoods, apply, given_mean
from fedkin.kin.mixed import MixedModel, Population, fit_mixed, fit_one_model, fit_population, mixed_at
from fedkin.kin.partitions import UNLIKELY, Neighbours
from fedkin.kin.result import Kin
from fedkin.kin.sources import ROUNDS, STEP, ScaledLosses
from fedkin.losses import LOGIT_SIZE

#: Newton steps of a site given mean and variance, and the decrement, relative to the loss, that ends them.
NEWTON, NEWTON_TOL = 12, 1e-9
#: Expansions at the estimate with groups.
AGAIN = 3
#: How often the way back to the mixed model is halved for a site that an estimate with groups does not suit.
BACK = 8
#: Variances start no lower: from nothing none of them would rise again.
LEAST_VARIANCE = 1e-4
#: Least dispersion in standardised units: rows that a fit goes through would have none, and estimates no digits.
LEAST_DISPERSION = 3e-6
#: Where the variance of the slopes' means starts, which results do not keep.
RIDGE = 0.1
#: What to do about a fit that failed.
HINT = "check for columns or targets of extreme size, or use another loss"


class WarmStart(NamedTuple):
    """An earlier result, as a start for the sites of the next fit."""

    theta: Array  # (V, p) in the user's units, the mean for a site that the earlier fit did not have
    mean: Array  # (p,) in the user's units
    variance: Array  # (p,) between sites in standardised units
    parameters: Array  # (p + 2,) as in `MixedModel`

    @classmethod
    def from_kin(cls, start: Kin, sites: Sequence[Hashable], names: Sequence[str]) -> WarmStart | None:
        """Return the start for these sites; None if the earlier fit had other parameters."""
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
    """Fit a smooth loss: expand it at the estimates of the mixed model, then at those with groups."""
    mixed = _mixed_rounds(losses, free, warm)
    slack = 0.5 * mixed.theta.shape[1] * float(mixed.noise[0]) * losses.units.target**2
    limits = losses.values(mixed.theta) + slack
    model = _expanded(losses, mixed, mixed.theta, mixed.covariance)
    # short chains say where to expand; where groups count for nothing, so does the length of chains
    brief, moved, last, short = sampling.brief(), np.inf, False, True

    def again_at(there: MixedModel, length: Sampling) -> Grouped | None:
        """Search for groups again with the part of the graph that the guard kept; None if the quadratics were not
        accurate enough."""
        kept = neighbours if found.with_graph else Neighbours.none(len(mixed.theta))
        again = groups_of(there, ~free, kept, seed, length, guard=False)
        return again if losses.value(again.theta) <= limits.sum() else None

    found = groups_of(model, ~free, neighbours, seed, brief)
    for turn in range(1, AGAIN + 1):
        if found.blend is None or found.blend.weight > 1 - UNLIKELY or last:
            break
        at = _within_limits(losses, found.theta, mixed.theta, limits)
        # a site whose group hardly tells anything would be averaged over points where losses have no curvature
        wide = np.trace(found.covariance, axis1=1, axis2=2) > np.trace(mixed.covariance, axis1=1, axis2=2)
        there = _expanded(losses, mixed, at, np.where(wide[:, None, None], mixed.covariance, found.covariance))
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
    if losses.value(found.theta) > limits.sum():
        found = replace(found, theta=mixed.theta, covariance=mixed.covariance)
    sums = losses.sums(mixed.theta, mixed.covariance)
    if mixed.nested is None:
        found = found.with_one_model(fit_one_model(sums, free, mixed, learned=False))
    source = losses.source
    # one model for all may separate classes without error, so that classes are compared with no model at all
    start = np.zeros_like(found.theta) if source.loss.target == "class" else source.start()
    refuse_worse(source.values, losses.units.theta(found.theta), start, slack * len(start))
    return model, found, _fit_population(losses, sums, mixed)


def _fit_population(losses: ScaledLosses, sums: QuadraticLikelihoods, mixed: MixedModel) -> Population:
    """Fit the population effects of a smooth loss, with losses averaged around the sites' positions in that population.

    At modes, means of counts would be too large. A mean that maximises a likelihood is biased, too (away from zero for
    classes), so scores are adjusted as in Firth (1993).
    """
    if not losses.source.can_average:
        return fit_population(sums, mixed.noise, mixed.variance, learned=False)
    noise, sums = float(mixed.noise[0]), losses.averaged(mixed.theta, mixed.covariance)
    found = fit_population(sums, mixed.noise, mixed.variance, learned=False)
    theta, mean, spread, pace, moved = mixed.theta, found.mean, found.variance, 1.0, np.zeros_like(found.mean)
    worst = sums.values(theta).sum() + 0.5 * theta.size
    for _ in range(ROUNDS if mixed.nested is None else 0):
        error = np.sqrt(np.diag(found.covariance))
        if not error.max() ** 2 < LOGIT_SIZE:  # rows hardly tell the mean
            break
        own, left = given_mean(spread, sums.G / noise)
        theta = theta + pace * (mean + apply(own, sums.c - sums.G @ mean) / noise - theta)
        sums = losses.averaged(theta, own, left @ found.covariance @ np.swapaxes(left, 1, 2))
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
        raise SolverError(f"the fit ended at a loss of {end:.4g}, above the {start:.4g} of one model for all: {HINT}")


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
        theta = posterior_modes(values, losses.expand, theta, mean, variance, dispersion)
        model = fit_mixed(losses.expand(theta), free, dispersion=dispersion, start=parameters)
        mean, variance = model.centres, model.variance
        if np.abs(theta - before).max() < STEP and turn >= 2:
            break
        found = source.dispersion(units.theta(theta), units.A, float(model.degrees.sum())) / units.target**2
        dispersion = max(found, LEAST_DISPERSION)
        parameters = model.parameters.copy()
        parameters[int((~model.fixed).sum()) + 1] = np.log(dispersion)
    model = replace(model, theta=posterior_modes(values, losses.expand, theta, mean, variance, dispersion))
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
        if moved < STEP and np.abs(held - before.parameters).max() < 0.1:
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
    return expand(posterior_modes(lambda at: expand(at).values(at), expand, *start))


def posterior_modes(
    values: Callable[[Array], Array],
    expand: Callable[[Array], QuadraticLikelihoods],
    theta: Array,
    mean: Array,
    variance: Array,
    dispersion: float,
) -> Array:
    """Minimise each site's loss plus a penalty around ``mean (V, p)`` by Newton's method from ``theta (V, p)``."""
    penalty, at = 1.0 / (variance + 1e-9), theta.copy()

    def value(part: Array, who: Index) -> Array:
        at[who] = part
        return np.asarray(values(at)[who] / dispersion + 0.5 * (part - mean[who]) ** 2 @ penalty)

    def derivatives(part: Array, who: Index) -> tuple[Array, Array]:
        at[who] = part
        sums = expand(at).take(who)
        gradient = (apply(sums.G, part) - sums.c) / dispersion + penalty * (part - mean[who])
        return gradient, sums.G / dispersion + np.diag(penalty)

    return damped_newton(value, derivatives, theta, NEWTON_TOL, NEWTON)[0]


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
