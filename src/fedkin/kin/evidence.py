"""The evidence of variances, ridge and noise of the mixed model, and its maximum by Fisher scoring."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from scipy.special import expit, log_expit

from fedkin._base import Array, Index, Mask
from fedkin.kin.likelihoods import NODES, SHARE_OF_NODES, Dense, Matrices, QuadraticLikelihoods, apply

#: Precision of an intercept's mean: flat for every purpose.
FLAT = 1e-8
#: Shares of the information about a mean that are rounding.
UNSEEN = 1e-9
#: Logarithms of the least variance, which is none, and of the largest.
LEAST_LOG, MOST_LOG = -14.0, 8.0
#: With fewer sites than this no groups are looked for.
FEWEST = 4


@dataclass(frozen=True)
class Priors:
    """Priors of the variances between sites, in standardised units.

    Attributes
    ----------
    likeness : float
        Standard deviation of log variances around their level: it steadies few sites and many columns. Infinite to
        leave them apart.
    log_variance : (float, float)
        Mean and standard deviation of any log variance: a very weak prior that prevents divergence.
    ridge : float or None
        Variance of the slopes' means; None to learn it.
    level : bool
        Whether the level of the slopes' variances, and that of the intercepts', has the uniform shrinkage prior
        (Daniels 1999): the share of the variance of a typical site's own estimate that is between sites is uniform.
        The density of the standard deviation rises from 0 in proportion, so it does not come out as nothing where the
        likelihood is flat. The prior is proper, so models with and without variances can be compared.
    """

    likeness: float = 0.7
    log_variance: tuple[float, float] = (0.0, np.inf)
    ridge: float | None = None
    level: bool = True

    def log_density(self, logs: Array, slopes: Mask) -> tuple[float, Array, Array]:
        """Return the log prior of log variances ``(p,)`` relative to those of a typical site's own estimates, its
        gradient, and minus its second derivatives."""
        value, gradient, curvature = 0.0, np.zeros(len(logs)), np.zeros((len(logs), len(logs)))
        for kind in (slopes, ~slopes):
            m = int(kind.sum())
            share = kind / max(m, 1)
            level = float(share @ logs)
            if m > 1 and np.isfinite(self.likeness):
                apart = np.where(kind, logs - level, 0.0) / self.likeness
                value -= 0.5 * float(apart @ apart) + 0.5 * (m - 1) * np.log(2 * np.pi * self.likeness**2)
                gradient -= apart / self.likeness
                curvature += (np.diag(kind * 1.0) - m * np.outer(share, share)) / self.likeness**2
            if m and self.level:
                between = float(expit(level))
                value += float(log_expit(level) + log_expit(-level)) - 0.5 * np.log(m)
                gradient += (1 - 2 * between) * share
                curvature += 2 * between * (1 - between) * np.outer(share, share)
        centre, width = self.log_variance
        if np.isfinite(width):
            value -= 0.5 * float((((logs - centre) / width) ** 2).sum())
            gradient -= (logs - centre) / width**2
            curvature += np.eye(len(logs)) / width**2
        return value, gradient, curvature


class Evidence:
    """The log evidence of variances, ridge and noise, with its gradient by Fisher's identity."""

    def __init__(
        self,
        sums: QuadraticLikelihoods,
        intercepts: Mask,
        dispersion: float | None,
        priors: Priors,
        noise: Array | None = None,
    ) -> None:
        self.sums, self.priors = sums, priors
        self.free = np.ones(sums.n_params, dtype=bool) if sums.fixed is None else ~sums.fixed
        self.intercepts, self.slopes = intercepts[self.free], ~intercepts[self.free]
        self.alone, self.responses, self.products = sums.varying()
        self.district = sums.district
        self.learned = dispersion is None
        self.log_noise = 0.0 if dispersion is None else float(np.log(dispersion))
        # of each site's noise in the common one
        self.share = np.ones(sums.n_sites) if noise is None else noise / np.exp(np.log(noise).mean())
        self.typical = np.zeros(len(self.slopes))
        self.held: float | None = None  # the logarithm of the noise, where it is not free

    def of_some_sites(self) -> Evidence:
        """Return the evidence of the sites used to learn variances."""
        made = copy.copy(self)
        if (some := some_sites(self.sums)) is not None:
            made.sums, made.share, made.alone = self.sums.take(some), self.share[some], self.alone.take(some)
            made.responses, made.products = self.responses[some], self.products[some]
            made.district = made.sums.district
        return made

    def hold_noise(self, start: Array) -> Array:
        """Learn the noise with variances that are much alike, keep it fixed, and return the parameters."""
        # of many coefficients, variances that are left apart explain noise, too
        alike = copy.copy(self)
        alike.priors, alike.held = replace(self.priors, likeness=0.1), None
        found = alike.maximise(start)
        self.held = float(found[self.alone.n_params + 1])
        return found

    def start(self) -> Array:
        variance = np.where(self.intercepts, 0.3, 0.03)
        ridge = 0.1 if self.priors.ridge is None else self.priors.ridge
        noise = 0.5 if self.learned else np.exp(self.log_noise)
        return self.with_districts(np.log(np.concatenate([variance, [ridge, noise]])))

    def with_districts(self, parameters: Array) -> Array:
        """Return parameters with log variances between districts, if there are any; they start at those of sites."""
        p = self.alone.n_params
        return parameters if self.district is None or len(parameters) > p + 2 else np.append(parameters, parameters[:p])

    def maximise(self, start: Array, variance: float | None = None) -> Array:
        p = self.alone.n_params
        self._set_typical(start)
        low, high = np.full(len(start), LEAST_LOG), np.full(len(start), MOST_LOG)
        if variance is not None:
            low[:p] = high[:p] = variance
            low[p + 2 :] = high[p + 2 :] = variance
        low[p], high[p] = (-9.0, 9.0) if self.priors.ridge is None else (start[p], start[p])
        low[p + 1], high[p + 1] = (-14.0, 14.0) if self.learned else (self.log_noise, self.log_noise)
        if self.held is not None:
            low[p + 1] = high[p + 1] = self.held
        return fisher_scoring(self._negative, start, low, high)

    def solve(self, parameters: Array) -> Solved:
        """Return the model at given parameters."""
        p = self.alone.n_params
        root = np.exp(0.5 * parameters[:p])
        weight = 1.0 / (np.exp(parameters[p + 1]) * self.share)
        matrices = self.alone.matrices.scaled(root, weight)
        away, logs = matrices.resolved()  # I - B^-1
        scaled = self.responses * (weight[:, None] * root)[:, :, None]  # T c
        seen = scaled - away @ scaled
        # sum of S - S C S = T^-1 (I - B^-1) T^-1, and of c - S C c = T^-1 B^-1 T c
        prior, outer = np.where(self.intercepts, FLAT, np.exp(-parameters[p])), root[:, None] * root
        left = np.tensordot(weight, self.products, 1) - np.tensordot(scaled, seen, ((0, 1), (0, 1)))
        above: Districts | None = None
        if self.district is None:
            A, pulled, more = away.sum() / outer, seen.sum(axis=0) / root[:, None], 0.0
        else:
            above = Districts.from_sites(self.district, away, seen, root, np.exp(0.5 * parameters[p + 2 :]))
            A, pulled, more = above.total, above.pulled, above.logs
            left -= above.explained
        A = 0.5 * (A + A.T) + np.diag(prior)
        if self.slopes.any():
            covariance, log_mean = np.linalg.inv(A), float(np.linalg.slogdet(A)[1])
            means = covariance @ pulled
        else:  # nothing holds the mean in directions that nobody sees
            told, untold, log_mean = inverses(A)
            covariance, means = told + untold, told @ pulled
        left -= pulled.T @ means
        known, unknown, log_fixed = inverses(left[1:, 1:])
        beta = known @ left[1:, 0]
        spent, apart = float((known * left[1:, 1:]).sum()), np.append(1.0, -beta)
        # effects in units of their standard deviation: B^-1 T (c - S mean) = B^-1 T c - (I - B^-1) T^-1 mean
        around = means
        if above is not None:
            above = above.around(means)
            around = above.centres[self.district]
        each, mean = seen - away @ (around / root[:, None]), means @ apart
        centre = around @ apart
        rest = scaled @ apart - each @ apart - apply(matrices, centre / root + each @ apart)
        effects = each @ apart + rest - apply(away, rest)  # refined once: rounding grows with variances over noise
        # at its minimum, a sum of squares loses fewer digits than the closed form
        squares = 2 * self.sums.values(self.spread(centre + effects * root, beta)) @ weight
        misfit = float(squares + (effects**2).sum() + mean**2 @ prior)
        misfit += 0.0 if above is None else float(((above.effects @ apart) ** 2).sum())
        log_likelihood = -0.5 * (
            (self.sums.n @ np.log(1.0 / weight) if self.learned else 0.0)
            + logs.sum()
            + more
            + misfit
            + log_mean
            - np.log(prior).sum()
            + log_fixed
            - len(beta) * np.log(FLAT)
        )
        return Solved(
            root,
            weight,
            away,
            covariance,
            mean,
            effects,
            float(log_likelihood),
            misfit,
            spent,
            beta,
            known + unknown,
            means[:, 1:],
            each[:, :, 1:],
            above,
        )

    def spread(self, varying: Array, fixed: Array | float = 0.0) -> Array:
        """Combine the varying and the fixed coefficients into ``(..., p)``."""
        made = np.zeros((*varying.shape[:-1], len(self.free)))
        made[..., self.free], made[..., ~self.free] = varying, fixed
        return made

    def whole(self, at: Solved) -> tuple[Array, Array]:
        """Return the mean ``(p,)`` and its covariance, including fixed coefficients."""
        lean = np.zeros((len(self.free), len(at.beta)))
        lean[self.free], lean[~self.free] = -at.lean_mean, np.eye(len(at.beta))
        covariance = lean @ at.fixed_covariance @ lean.T
        covariance[np.ix_(self.free, self.free)] += at.covariance
        return self.spread(at.mean, at.beta), covariance

    def _negative(self, parameters: Array) -> tuple[float, Array, Array]:
        """Return minus the log evidence, its gradient and its expected second derivatives, without those through the
        mean.

        A site's covariance is ``V = sigma2 (I + Z T T Z' / sigma2)``, so that ``tau_j z_j'V^-1 z_k tau_k`` is
        ``I - B^-1`` at j and k: half its square, summed over sites, is the information about log variances.
        """
        p = self.alone.n_params
        at = self.solve(parameters)
        value, gradient = at.log_likelihood, np.zeros(len(parameters))
        V, sums = self.sums.n_sites, at.away.sums(self.centre_covariance(at) / (at.root[:, None] * at.root))
        by_fixed = ((at.lean @ at.fixed_covariance) * at.lean).sum(axis=(0, 2))
        square = (at.effects**2).sum(axis=0) + sums.left + sums.spent + by_fixed
        gradient[:p] = 0.5 * (square - V)
        information = np.zeros((len(parameters), len(parameters)))
        information[:p, :p] = 0.5 * sums.squares
        if (above := at.above) is not None:
            square, squares = above.squares(at)
            gradient[p + 2 :] = 0.5 * (square - len(above.centres))
            information[p + 2 :, p + 2 :] = 0.5 * squares
        spread = np.diag(at.covariance) + ((at.lean_mean @ at.fixed_covariance) * at.lean_mean).sum(axis=1)
        means, slopes = at.mean**2 + spread, self.slopes
        if slopes.any():
            gradient[p] = 0.5 * (means[slopes] * np.exp(-parameters[p]) - 1).sum()
            told = 1.0 - spread[slopes] * np.exp(-parameters[p])
            information[p, p] = 0.5 * float(told @ told)
        if self.learned:
            # with all variances the misfit scales, but for what is flat
            flat = at.spent + (1.0 - FLAT * means[~slopes]).sum()
            gradient[p + 1] = 0.5 * (at.misfit + flat - self.sums.n.sum()) - gradient.sum()
            information[:p, p + 1] = information[p + 1, :p] = 0.5 * sums.inner
            information[p + 1, p + 1] = 0.5 * float(self.sums.n.sum() - V * p + sums.rest)
        held, pull, curvature = self._prior(parameters)
        return -value - held, -gradient - pull, information + curvature

    def _prior(self, parameters: Array) -> tuple[float, Array, Array]:
        """Return the log prior of all variances, its gradient, and minus its second derivatives."""
        p, value = self.alone.n_params, 0.0
        gradient, curvature = np.zeros(len(parameters)), np.zeros((len(parameters), len(parameters)))
        for start in (0, p + 2)[: 1 if self.district is None else 2]:
            part = slice(start, start + p)
            held, gradient[part], curvature[part, part] = self.priors.log_density(
                parameters[part] - self.typical, self.slopes
            )
            value += held
        return value, gradient, curvature

    def _set_typical(self, parameters: Array) -> None:
        """Set the log variances of a typical site's own estimates, one for all slopes, at this noise."""
        seen = np.einsum("ujj->uj", self.alone.G) / self.share[:, None]
        for kind in (self.slopes, ~self.slopes):
            told = float(seen[:, kind].mean()) if kind.any() else 1.0
            self.typical[kind] = parameters[self.alone.n_params + 1] - np.log(max(told, FLAT))

    def integrate(self, parameters: Array) -> tuple[float, list[tuple[float, Array]]]:
        """Return the log evidence with variances integrated out, and values of the parameters with their chances.

        Laplace's approximation is improved by quadrature over the level of the slopes' variances, or of all if there
        are no slopes. The other variances keep their ratios.
        """
        p, direction = self.alone.n_params, np.zeros(len(parameters))
        self._set_typical(parameters)
        top, _, curvature = self._negative(parameters)
        direction[:p] = self.slopes if self.slopes.any() else 1.0
        error = float(direction @ curvature @ direction) ** -0.5
        log = -top + 0.5 * p * np.log(2 * np.pi) - 0.5 * float(np.linalg.slogdet(curvature[:p, :p])[1])
        if error < 0.1:  # the level is known
            return log, [(1.0, parameters)]
        points = [parameters + error * step * direction for step in NODES]
        for one in points:
            np.clip(one[:p], LEAST_LOG, MOST_LOG, out=one[:p])
        logs = np.array([top - self._negative(one)[0] for one in points]) + 0.5 * NODES**2 + np.log(SHARE_OF_NODES)
        whole = float(np.logaddexp.reduce(logs))
        return log + whole, list(zip(np.exp(logs - whole).tolist(), points, strict=True))

    def centre_covariance(self, at: Solved) -> Array:
        """Return the covariance of the centre of a site's effects, given the fixed coefficients."""
        return at.covariance if at.above is None else at.above.covariance(at.covariance)[self.district]


class Solved(NamedTuple):
    """The model at given variances, ridge and noise; effects ``(V, p)`` are in standard deviations."""

    root: Array  # (p,) standard deviations
    weight: Array  # (V,) 1 / noise
    away: Matrices  # I - B^-1
    covariance: Array  # (p, p) of the mean
    mean: Array
    effects: Array
    log_likelihood: float
    misfit: float  # of the target, given variances and ridge
    spent: float  # number of fixed coefficients that rows tell
    beta: Array  # (k,) fixed coefficients
    fixed_covariance: Array  # (k, k)
    lean_mean: Array  # (q, k) by how much the mean falls with fixed coefficients
    lean: Array  # (V, q, k) the same of effects, in their units
    above: Districts | None


@dataclass(frozen=True, eq=False)
class Districts:
    """K districts of sites, a second level: the likelihood of each district's mean from all its sites."""

    index: Index  # (V,)
    root: Array  # (q,) standard deviations between districts
    away: Dense  # I - B^-1 of districts
    seen: Array  # (K, q, 1 + k)
    total: Array  # (q, q) information about the mean
    pulled: Array  # (q, 1 + k)
    explained: Array  # (1 + k, 1 + k) products that differences between districts explain
    logs: float
    effects: Array  # (K, q, 1 + k) of each response, in units of their standard deviation
    centres: Array  # (K, q, 1 + k) means of districts

    @classmethod
    def from_sites(cls, index: Index, away: Matrices, seen: Array, below: Array, root: Array) -> Districts:
        """Add up site likelihoods, given the standard deviations ``below (q,)`` between the sites of a district."""
        K, q = int(index.max()) + 1, len(root)
        A, pulled = np.zeros((K, q, q)), np.zeros((K, *seen.shape[1:]))
        np.add.at(A, index, np.stack([away.of(u) for u in range(len(index))]) / (below[:, None] * below))
        np.add.at(pulled, index, seen / below[:, None])
        left, logs = Dense(A * (root[:, None] * root)).resolved()
        scaled = root[:, None] * pulled
        seen = scaled - left @ scaled
        total, explained = left.sum() / (root[:, None] * root), np.tensordot(scaled, seen, ((0, 1), (0, 1)))
        pull = seen.sum(axis=0) / root[:, None]
        return cls(index, root, left, seen, total, pull, explained, float(logs.sum()), seen, seen)

    def around(self, means: Array) -> Districts:
        """Return the districts with effects around ``means (q, 1 + k)``."""
        effects = self.seen - self.away @ (means / self.root[:, None])
        return replace(self, effects=effects, centres=means + self.root[:, None] * effects)

    def covariance(self, mean: Array) -> Array:
        """Return covariances ``(K, q, q)`` of the district means, given that of the overall mean."""
        outer = self.root[:, None] * self.root
        return np.asarray(outer * np.asarray(self.away.posterior_cov(mean / outer)))

    def squares(self, at: Solved) -> tuple[Array, Array]:
        """Return expected sums of squared effects ``(q,)``, and sums of squares of the matrices."""
        sums = self.away.sums(at.covariance / (self.root[:, None] * self.root))
        own = self.effects @ np.append(1.0, -at.beta)
        by_fixed = ((self.effects[:, :, 1:] @ at.fixed_covariance) * self.effects[:, :, 1:]).sum(axis=(0, 2))
        return (own**2).sum(axis=0) + sums.left + sums.spent + by_fixed, sums.squares


def fisher_scoring(
    negative: Callable[[Array], tuple[float, Array, Array]], start: Array, low: Array, high: Array
) -> Array:
    """Minimise a negative log likelihood of logarithms from ``start``, within ``low <= x <= high``, by Fisher scoring.

    No step is longer than 2, and the last one promises less than 1e-5.
    """
    x = np.clip(start, low, high)
    value, gradient, curvature = negative(x)
    light = 1e-6 * np.eye(len(x))
    for _ in range(60):
        free = (low < high) & ~((x <= low) & (gradient > 0)) & ~((x >= high) & (gradient < 0))
        if not free.any():
            break
        inside, step = np.ix_(free, free), np.zeros_like(x)
        step[free] = -np.linalg.solve(curvature[inside] + light[inside], gradient[free])
        step *= min(1.0, 2.0 / max(float(np.abs(step).max()), 1e-300))
        if -0.5 * float(gradient @ step) < 1e-5:
            break
        for _ in range(25):
            trial = np.clip(x + step, low, high)
            found = negative(trial)
            if found[0] <= value + 1e-4 * float(gradient @ (trial - x)):
                break
            step *= 0.5
        else:
            break
        x, (value, gradient, curvature) = trial, found
    return x


def some_sites(sums: QuadraticLikelihoods, work: float = 2e9) -> Index | None:
    """Return the sites used to learn variances, or None for all of them: at most 2,000, and fewer, but at least 24, if
    these times the cubes of their coefficients are more than ``work``."""
    most = min(2000, max(24, int(work / (sums.n_params**2 * sums.matrices.rank))))
    return None if sums.n_sites <= most else np.linspace(0, sums.n_sites - 1, most).astype(np.int64)


def inverses(A: Array) -> tuple[Array, Array, float]:
    """Return the inverse of ``A`` in directions where it exceeds rounding errors, and ``1 / FLAT`` in the others.

    The last value is the log determinant of the inverse of their sum.
    """
    scale = 1.0 / np.sqrt(np.maximum(np.diag(A), FLAT))
    values, vectors = np.linalg.eigh(A * np.outer(scale, scale))
    vectors, seen = scale[:, None] * vectors, values > UNSEEN
    logs = float(np.log(np.where(seen, values, FLAT)).sum() - 2 * np.log(scale).sum())
    return (vectors[:, seen] / values[seen]) @ vectors[:, seen].T, vectors[:, ~seen] @ vectors[:, ~seen].T / FLAT, logs
