"""Losses that are not quadratic: expanded where the mixed model puts the sites, then where groups put them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from fedkin._base import Array, Index, Mask
from fedkin.core import damped_newton
from fedkin.errors import SolverError
from fedkin.kin.chains import Sampling
from fedkin.kin.groups import ALL_MIXED, Grouped, find_groups
from fedkin.kin.likelihoods import QuadraticLikelihoods, apply
from fedkin.kin.mixed import MixedModel, Population, fit_mixed, fit_one_model, fit_population, mixed_at
from fedkin.kin.partitions import Neighbours
from fedkin.kin.result import Kin
from fedkin.kin.sources import ScaledLosses, Source

#: Rounds of the mixed model for smooth losses, and the largest change of a standardised parameter that ends them.
ROUNDS, STEP = 20, 2e-3
#: The same for rounds with averaged losses, and their Newton steps.
AVERAGED_STEP, AVERAGED_NEWTON = 0.01, 3
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
#: Where the variance of the slopes' means starts, which results do not keep.
RIDGE = 0.1
#: What to do about a fit that has gone astray.
HINT = "look for columns or targets of extreme size, or take another loss"


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
        variance = np.maximum(start.learned.variance, LEAST_VARIANCE)
        noise = max(start.learned.noise, LEAST_VARIANCE)
        return cls(theta, mean, variance, np.log(np.concatenate([variance, [RIDGE, noise]])))


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
        again = find_groups(there, ~free, kept, seed, length, guard=False)
        return again if losses.value(again.theta) <= limits.sum() else None

    found = find_groups(model, ~free, neighbours, seed, brief)
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
    if losses.source.loss.target != "class":  # one model for all may separate classes without error
        _refuse_worse(losses.source, losses.units.theta(found.theta), slack)
    sums = losses.sums(mixed.theta, mixed.covariance)
    found = found.with_one_model(model, fit_one_model(sums, free, mixed, learned=False))
    if losses.source.can_average:  # at modes, means of counts come out too large
        sums = losses.averaged(mixed.theta, mixed.covariance)
    return model, found, fit_population(sums, mixed, learned=False)


def _refuse_worse(source: Source, theta: Array, slack: float) -> None:
    """Raise `SolverError` where estimates suit the rows less than the one model for all that rounds began with."""
    start, end = source.value(source.start()), source.value(theta)
    if not end <= start + slack * len(theta):
        raise SolverError(f"the fit ended with a loss of {end:.4g}, but one model for all has {start:.4g}: {HINT}")


def _mixed_rounds(losses: ScaledLosses, free: Mask, warm: WarmStart | None) -> MixedModel:
    """Fit the mixed model of a smooth loss: posterior modes given mean and variance, then these from the modes."""
    # expansions hold at the modes: elsewhere a badly predicted row has next to no weight and a large gradient
    source, units = losses
    theta = units.to_fitted(source.start() if warm is None else warm.theta)
    mean, variance, parameters, dispersion = theta[0], np.where(free, 0.3, 0.03), None, 1.0
    if warm is not None:
        mean, variance, parameters = units.to_fitted(warm.mean), warm.variance, warm.parameters

    def values(at: Array) -> Array:
        return losses.values(at) / units.target**2

    for turn in range(ROUNDS):
        before = theta
        theta = posterior_modes(values, losses.expand, theta, mean, variance, dispersion, NEWTON)
        model = fit_mixed(losses.expand(theta), free, dispersion=dispersion, start=parameters)
        mean, variance = model.mean, model.variance
        if np.abs(theta - before).max() < STEP and turn >= 2:
            break
        dispersion = source.dispersion(units.theta(theta), units.A, float(model.degrees.sum())) / units.target**2
        parameters = np.concatenate([model.parameters[:-1], [np.log(dispersion)]])
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

    start = model.theta, model.mean, model.variance, dispersion
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
    """Minimise every site's loss plus its penalty from ``theta (V, p)`` on, by Newton's method."""
    penalty, at = 1.0 / (variance + 1e-9), theta.copy()

    def value(part: Array, who: Index) -> Array:
        at[who] = part
        return np.asarray(values(at)[who] / dispersion + 0.5 * (part - mean) ** 2 @ penalty)

    def derivatives(part: Array, who: Index) -> tuple[Array, Array]:
        at[who] = part
        sums = expand(at).take(who)
        gradient = (apply(sums.G, part) - sums.c) / dispersion + penalty * (part - mean)
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
