"""The evidence of variances, ridge and noise of the mixed model, and its maximum by Fisher scoring."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from fedkin._base import Array, Index, Mask
from fedkin.kin.likelihoods import Dense, Matrices, QuadraticLikelihoods

#: Precision of an intercept's mean: flat for every purpose.
FLAT = 1e-8
#: Shares of the information about a mean that are rounding.
UNSEEN = 1e-9
#: Logarithm of the least variance, which is none.
LEAST_LOG = -14.0
#: With more sites than this, variances, ridge and noise are learned from so many of them...
MOST_SITES, FEW_SITES = 2000, 24
#: ... or from fewer, but not less than those, where they times the cubes of their coefficients are more than this.
MOST_WORK = 2e9
#: With many coefficients the noise is learned with variances this much alike: left apart, variances explain noise, too.
TIED = 0.1
#: With fewer sites than this the likelihood of a variance does not fall fast enough for a prior that rises.
FEWEST = 4
#: Log likelihood that a step of Fisher scoring promises and that ends it; more where another search follows.
ENOUGH, ROUGHLY = 1e-5, 1e-2
#: No parameter moves by more than this in one step; they are logarithms.
FARTHEST = 2.0


@dataclass(frozen=True)
class Priors:
    """Priors of the variances between sites, in standardised units.

    Attributes
    ----------
    likeness : float
        Standard deviation of the slopes' log variances around their mean: it steadies few sites and many columns.
        Infinite to leave them apart.
    log_variance : (float, float)
        Mean and standard deviation of any log variance, a very weak hold against running away.
    ridge : float or None
        Variance of the slopes' means; None to learn it.
    level : float
        Power of the slopes' variance in the prior of its level. With 1/2 the density of the standard deviation rises
        from 0 in proportion (Chung et al. 2013), so that it does not come out as nothing where the likelihood hardly
        tells: it is then about 0.7 of its standard error. Intercepts have none: they seldom agree, and where they do
        another direction would only blur groups. Left out with fewer than `FEWEST` sites.
    """

    likeness: float = 0.7
    log_variance: tuple[float, float] = (-8.0, 20.0)
    ridge: float | None = None
    level: float = 0.5

    def log_density(self, logs: Array, slopes: Mask, V: int) -> tuple[float, Array, Array]:
        """Return the log prior of log variances ``(p,)`` of V sites, its gradient, and minus its second derivatives."""
        value, gradient, curvature = 0.0, np.zeros(len(logs)), np.zeros((len(logs), len(logs)))
        if slopes.sum() > 1 and np.isfinite(self.likeness):
            apart = np.where(slopes, logs - logs[slopes].mean(), 0.0) / self.likeness
            value -= 0.5 * float(apart @ apart)
            gradient -= apart / self.likeness
            curvature += (np.diag(slopes * 1.0) - np.outer(slopes, slopes / slopes.sum())) / self.likeness**2
        if self.level and slopes.any() and V >= FEWEST:
            lift = self.level * slopes / slopes.sum()
            value += float(lift @ logs)
            gradient += lift
        centre, width = self.log_variance
        if np.isfinite(width):
            value -= 0.5 * float((((logs - centre) / width) ** 2).sum())
            gradient -= (logs - centre) / width**2
            curvature += np.eye(len(logs)) / width**2
        return value, gradient, curvature

    def freedom(self, logs: Array, slopes: Mask, information: Array) -> float:
        """Return the cost in log evidence of variances of their own for slopes, which the likelihood does not include.

        Laplace's approximation of the integral over the log variances' differences, about which the likelihood tells
        ``information (p, p)``: the log prior where they are, and how much narrower than the prior they are known.
        """
        if slopes.sum() < 2 or not np.isfinite(self.likeness):
            return 0.0
        apart = (logs[slopes] - logs[slopes].mean()) / self.likeness
        told = information[np.ix_(slopes, slopes)] * self.likeness**2
        told = told - told.mean(axis=0)
        told = told - told.mean(axis=1)[:, None]
        return float(0.5 * apart @ apart + 0.5 * np.linalg.slogdet(np.eye(len(told)) + told)[1])


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
        self.held: float | None = None  # the logarithm of the noise, where it is not free

    def of_some_sites(self) -> Evidence:
        """Return the evidence of the sites from which variances are learned."""
        made = copy.copy(self)
        if (some := some_sites(self.sums)) is not None:
            made.sums, made.share, made.alone = self.sums.take(some), self.share[some], self.alone.take(some)
            made.responses, made.products = self.responses[some], self.products[some]
            made.district = made.sums.district
        return made

    def hold_noise(self, start: Array) -> Array:
        """Learn the noise with variances held together, and leave it there; return the parameters then."""
        alike = copy.copy(self)
        alike.priors, alike.held = replace(self.priors, likeness=TIED), None
        found = alike.maximise(start)
        self.held = float(found[self.alone.n_params + 1])
        return found

    def start(self) -> Array:
        variance = np.where(self.intercepts, 0.3, 0.03)
        ridge = 0.1 if self.priors.ridge is None else self.priors.ridge
        noise = 0.5 if self.learned else np.exp(self.log_noise)
        return self.with_districts(np.log(np.concatenate([variance, [ridge, noise]])))

    def with_districts(self, parameters: Array) -> Array:
        """Return parameters with the log variances between districts, where there are any: as those of sites first."""
        p = self.alone.n_params
        return parameters if self.district is None or len(parameters) > p + 2 else np.append(parameters, parameters[:p])

    def maximise(self, start: Array, variance: float | None = None, enough: float = ENOUGH) -> Array:
        p = self.alone.n_params
        low, high = np.full(len(start), LEAST_LOG), np.full(len(start), 8.0)
        if variance is not None:
            low[:p] = high[:p] = variance
            low[p + 2 :] = high[p + 2 :] = variance
        low[p], high[p] = (-9.0, 9.0) if self.priors.ridge is None else (start[p], start[p])
        low[p + 1], high[p + 1] = (-14.0, 14.0) if self.learned else (self.log_noise, self.log_noise)
        if self.held is not None:
            low[p + 1] = high[p + 1] = self.held
        return fisher_scoring(self._negative, start, low, high, enough)

    def solve(self, parameters: Array) -> Solved:
        """Return the model at given parameters."""
        p = self.alone.n_params
        root = np.exp(0.5 * parameters[:p])
        weight = 1.0 / (np.exp(parameters[p + 1]) * self.share)
        matrices = self.alone.matrices.scaled(root, weight)
        away, logs = matrices.resolved()  # I - B^-1
        scaled = self.responses * (weight[:, None] * root)[:, :, None]  # T c
        seen = scaled - away.multiply(scaled)
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
        each, mean = seen - away.multiply(around / root[:, None]), means @ apart
        centre = around @ apart
        rest = scaled @ apart - each @ apart - matrices.apply(centre / root + each @ apart)
        effects = each @ apart + rest - away.apply(rest)  # refined once: rounding grows with variances over noise
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
        """Return numbers ``(..., p)`` of all coefficients, from those that vary and those that are fixed."""
        made = np.zeros((*varying.shape[:-1], len(self.free)))
        made[..., self.free], made[..., ~self.free] = varying, fixed
        return made

    def whole(self, at: Solved) -> tuple[Array, Array]:
        """Return mean ``(p,)`` and its covariance, fixed coefficients included."""
        return self.spread(at.mean, at.beta), self.bordered(at.covariance[None], at.lean_mean[None], at)[0]

    def bordered(self, given: Array, lean: Array, at: Solved) -> Array:
        """Return covariances ``(n, p, p)`` from those given fixed coefficients, and how these lean on them."""
        made, free, fixed = np.empty((len(lean), *2 * self.free.shape)), *map(np.flatnonzero, (self.free, ~self.free))
        both = -lean @ at.fixed_covariance
        made[:, free[:, None], free] = given - both @ np.swapaxes(lean, 1, 2)
        made[:, free[:, None], fixed], made[:, fixed[:, None], free] = both, np.swapaxes(both, 1, 2)
        made[:, fixed[:, None], fixed] = at.fixed_covariance
        return made

    def _negative(self, parameters: Array) -> tuple[float, Array, Array]:
        """Minus the log evidence, its gradient, and its expected second derivatives, those by way of the mean left out.

        A site's covariance is ``V = sigma2 (I + Z T T Z' / sigma2)``, so that ``tau_j z_j'V^-1 z_k tau_k`` is
        ``I - B^-1`` at j and k: half its square, summed over sites, is the information about log variances.
        """
        p, priors = self.alone.n_params, self.priors
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
        held, pull, curvature = priors.log_density(parameters[:p], self.slopes, V)
        gradient[:p] += pull
        information[:p, :p] += curvature
        if above is not None:
            more, pull, curvature = priors.log_density(parameters[p + 2 :], self.slopes, len(above.centres))
            held += more
            gradient[p + 2 :] += pull
            information[p + 2 :, p + 2 :] += curvature
        return -value - held, -gradient, information

    def centre_covariance(self, at: Solved) -> Array:
        """Return the covariance of what a site's effects are around, given fixed coefficients."""
        return at.covariance if at.above is None else at.above.covariance(at.covariance)[self.district]

    def information(self, parameters: Array) -> Array:
        """Return the expected information of the likelihood alone about log variances ``(p, p)``."""
        p = self.alone.n_params
        held = self.priors.log_density(parameters[:p], self.slopes, self.sums.n_sites)[2]
        return np.asarray(self._negative(parameters)[2][:p, :p] - held)


class Solved(NamedTuple):
    """The model at given variances, ridge and noise; effects ``(V, p)`` in units of their standard deviation."""

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
    """K districts of sites as one more level: what their sites say together about the mean of each."""

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
        """Add up site likelihoods, given the standard deviations ``below (q,)`` between sites of a district."""
        K, q = int(index.max()) + 1, len(root)
        A, pulled = np.zeros((K, q, q)), np.zeros((K, *seen.shape[1:]))
        np.add.at(A, index, np.stack([away.of(u) for u in range(len(index))]) / (below[:, None] * below))
        np.add.at(pulled, index, seen / below[:, None])
        left, logs = Dense(A * (root[:, None] * root)).resolved()
        scaled = root[:, None] * pulled
        seen = scaled - left.multiply(scaled)
        total, explained = left.sum() / (root[:, None] * root), np.tensordot(scaled, seen, ((0, 1), (0, 1)))
        pull = seen.sum(axis=0) / root[:, None]
        return cls(index, root, left, seen, total, pull, explained, float(logs.sum()), seen, seen)

    def around(self, means: Array) -> Districts:
        """Return the districts with effects around ``means (q, 1 + k)``."""
        effects = self.seen - self.away.multiply(means / self.root[:, None])
        return replace(self, effects=effects, centres=means + self.root[:, None] * effects)

    def covariance(self, mean: Array) -> Array:
        """Return covariances ``(K, q, q)`` of the means of districts, given that of the mean of all."""
        outer = self.root[:, None] * self.root
        return np.asarray(outer * np.asarray(self.away.posterior_cov(mean / outer)))

    def squares(self, at: Solved) -> tuple[Array, Array]:
        """Return expected sums of squared effects ``(q,)``, and sums of squares of the matrices."""
        sums = self.away.sums(at.covariance / (self.root[:, None] * self.root))
        own = self.effects @ np.append(1.0, -at.beta)
        by_fixed = ((self.effects[:, :, 1:] @ at.fixed_covariance) * self.effects[:, :, 1:]).sum(axis=(0, 2))
        return (own**2).sum(axis=0) + sums.left + sums.spent + by_fixed, sums.squares


def fisher_scoring(
    negative: Callable[[Array], tuple[float, Array, Array]], start: Array, low: Array, high: Array, enough: float
) -> Array:
    """Minimise a negative log likelihood from ``start`` on, within ``low <= x <= high``, by Fisher scoring."""
    x = np.clip(start, low, high)
    value, gradient, curvature = negative(x)
    light = 1e-6 * np.eye(len(x))
    for _ in range(60):
        free = (low < high) & ~((x <= low) & (gradient > 0)) & ~((x >= high) & (gradient < 0))
        if not free.any():
            break
        inside, step = np.ix_(free, free), np.zeros_like(x)
        step[free] = -np.linalg.solve(curvature[inside] + light[inside], gradient[free])
        step *= min(1.0, FARTHEST / max(float(np.abs(step).max()), 1e-300))
        if -0.5 * float(gradient @ step) < enough:
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


def some_sites(sums: QuadraticLikelihoods) -> Index | None:
    """Return sites from which variances are learned, or None for all of them."""
    most = min(MOST_SITES, max(FEW_SITES, int(MOST_WORK / (sums.n_params**2 * sums.matrices.rank))))
    return None if sums.n_sites <= most else np.linspace(0, sums.n_sites - 1, most).astype(np.int64)


def inverses(A: Array) -> tuple[Array, Array, float]:
    """Return the inverse in directions about which ``A`` says something but rounding, and ``1 / FLAT`` in others.

    The last is the log determinant of the inverse of their sum.
    """
    scale = 1.0 / np.sqrt(np.maximum(np.diag(A), FLAT))
    values, vectors = np.linalg.eigh(A * np.outer(scale, scale))
    vectors, seen = scale[:, None] * vectors, values > UNSEEN
    logs = float(np.log(np.where(seen, values, FLAT)).sum() - 2 * np.log(scale).sum())
    return (vectors[:, seen] / values[seen]) @ vectors[:, seen].T, vectors[:, ~seen] @ vectors[:, ~seen].T / FLAT, logs
