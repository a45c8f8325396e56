"""The mixed model with a variance of its own for every coefficient, learned from sums alone.

``theta_u = mean + b_u`` with ``b_uj ~ N(0, variance_j)``, noise ``sigma2_u``, and ``mean_j ~ N(0, ridge)`` except for
intercepts. Local fits, one model for all, site intercepts and random slopes are special cases. Variances, ridge and
noise maximise the likelihood with mean and effects integrated out (restricted maximum likelihood, as in lme4), lightly
held by `Priors`, which also keep slopes' variances away from nothing. With ``T = diag sqrt(variance)`` only ``B_u = I +
T S_u T`` is ever inverted, where ``S_u = G_u / sigma2_u``: one row, collinear columns, constant columns and sites with
one class are harmless.

Fixed coefficients ``beta`` are the same at all sites, with a flat prior. They are profiled out: what the model without
them makes of the target and of each fixed column as a response gives the normal equations of generalised least squares.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from scipy.special import polygamma

from fedkin._base import Array, Index, Mask
from fedkin.core import inverse_trigamma
from fedkin.kin.likelihoods import FEW, Dense, LowRank, Matrices, QuadraticLikelihoods

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
#: With many coefficients the noise is learned with variances this much alike, unless there are so many rows for each:
#: left apart, variances explain noise, too.
TIED, ENOUGH_ROWS = 0.1, 2.0
#: With fewer sites than this the likelihood of a variance does not fall fast enough for a prior that rises.
FEWEST = 4
#: Log likelihood that a step of Fisher scoring promises and that ends it; more where another search follows.
ENOUGH, ROUGHLY = 1e-5, 1e-2
#: The same for the population, whose standard errors need fewer digits.
NEARLY = 1e-4
#: Degrees of freedom below this are none: one site alone says nothing about a population.
NO_DEGREES = 1e-3
#: No parameter moves by more than this in one step; they are logarithms.
FARTHEST = 2.0
#: Excess variance of log noise between sites below which one noise serves all.
COMMON_NOISE = 1e-3


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


@dataclass(frozen=True, eq=False)
class MixedModel:
    """A fitted mixed model of V sites with p coefficients."""

    mean: Array  # (p,)
    mean_covariance: Array  # (p, p)
    variance: Array  # (p,) of the coefficients between sites
    noise: Array  # (V,) noise variance of each site (least squares), or its dispersion
    theta: Array  # (V, p) posterior means
    covariance: Array  # (V, p, p) posterior covariances with the uncertainty of the mean, not that of the variances
    precision: Array  # (V, p, p) G_u / noise_u
    score: Array  # (V, p) c_u / noise_u
    degrees: Array  # (V,) effective degrees of freedom that each site spends
    log_likelihood: float
    parameters: Array  # (p + 2,) log variance, log ridge, log noise: where the next fit may start
    matrices: Matrices  # the precision, perhaps as diagonal plus low rank
    fixed: Mask  # (p,) coefficients that are the same at all sites, with variance 0

    def given_fixed(self) -> MixedModel:
        """Return the model of the coefficients that vary, given the others."""
        fixed, free = self.fixed, np.flatnonzero(~self.fixed)
        if not fixed.any():
            return self
        square, lean, C = np.ix_(free, free), self.lean(), self.mean_covariance[np.ix_(fixed, fixed)]
        precision, matrices = self.precision[:, free][:, :, free], self.matrices
        if isinstance(matrices, LowRank):
            matrices = LowRank(matrices.diagonal[:, free], matrices.factor[:, free])
        else:
            matrices = Dense(precision)
        return replace(
            self,
            mean=self.mean[free],
            mean_covariance=self.mean_covariance[square] - lean[0] @ C @ lean[0].T,
            variance=self.variance[free],
            theta=self.theta[:, free],
            covariance=self.covariance[:, free][:, :, free] - lean[1:] @ C @ np.swapaxes(lean[1:], 1, 2),
            precision=precision,
            score=self.score[:, free] - self.precision[:, free][:, :, fixed] @ self.mean[fixed],
            matrices=matrices,
            fixed=np.zeros(len(free), dtype=bool),
        )

    def lean(self) -> Array:
        """Return how much the others, of the mean and of each site, change with fixed ones ``(1 + V, p - k, k)``."""
        fixed, free = self.fixed, ~self.fixed
        both = np.concatenate([self.mean_covariance[None], self.covariance])[:, free][:, :, fixed]
        return np.asarray(both @ np.linalg.pinv(self.mean_covariance[np.ix_(fixed, fixed)], hermitian=True))


def fit_mixed(
    sums: QuadraticLikelihoods,
    intercepts: Mask,
    *,
    dispersion: float | None = None,
    start: Array | None = None,
    priors: Priors | None = None,
    passes: int = 3,
) -> MixedModel:
    """Fit the mixed model to sums in standardised units."""
    evidence = _Evidence(sums, intercepts, dispersion, priors or Priors())
    parameters = evidence.start() if start is None else start
    if (some := _some_sites(sums)) is not None:
        few = fit_mixed(sums.take(some), intercepts, dispersion=dispersion, start=start, priors=priors, passes=passes)
        if dispersion is None:
            evidence.share = _noise_share(sums, evidence.model(few.parameters))
        return evidence.model(few.parameters)
    hold = dispersion is None and sums.n_params > FEW and sums.n.mean() < ENOUGH_ROWS * sums.n_params
    for _ in range(passes - 1 if dispersion is None else 0):
        if hold:
            parameters = evidence.hold_noise(parameters)
        parameters = evidence.maximise(parameters, enough=ROUGHLY)
        share = _noise_share(sums, evidence.model(parameters))
        moved = np.abs(np.log(share / evidence.share)).max()
        evidence.share = share
        if moved < 1e-3:
            break
    if hold:
        parameters = evidence.hold_noise(parameters)
    return evidence.model(evidence.maximise(parameters))


def with_noise(sums: QuadraticLikelihoods, intercepts: Mask, noise: Array, parameters: Array) -> MixedModel:
    """Fit the model with these noises ``(V,)``, and variances that go with them; ``parameters`` are where to begin."""
    evidence, start = _Evidence(sums, intercepts, None, Priors(), noise), parameters.copy()
    start[-1] = evidence.held = float(np.log(noise).mean())
    return evidence.model(evidence.of_some_sites().maximise(start))


def mixed_at(sums: QuadraticLikelihoods, intercepts: Mask, dispersion: float, parameters: Array) -> MixedModel:
    """Return the mixed model at given log variances, log ridge and log noise, of sites with this dispersion."""
    return _Evidence(sums, intercepts, dispersion, Priors()).model(parameters)


@dataclass(frozen=True, eq=False)
class Population:
    """Effects of the population of sites by restricted maximum likelihood, in standardised units.

    Their mean has a flat prior: the mean of `MixedModel`, to which sites are shrunk, is itself shrunk to zero.
    """

    mean: Array  # (p,)
    covariance: Array  # (p, p) given the variances
    variance: Array  # (p,) of the coefficients between sites, held by no prior
    between: Array  # (p, q) of each diagonal entry of the covariance, what is owed to each of q variances between sites
    uncertainty: Array  # (q + 1, q + 1) covariance of the estimated log variances and of the log noise
    log_likelihood: float  # restricted, of least squares

    def degrees(self, A: Array) -> Array:
        """Return degrees of freedom ``(r,)`` of the variances of ``A mean`` (Satterthwaite 1946), for ``A (r, p)``."""
        variance = np.einsum("ri,ij,rj->r", A, self.covariance, A)
        parts = A**2 @ self.between
        slopes = np.column_stack([parts, variance - parts.sum(axis=1)])  # by log variances, and by the log noise
        known = np.einsum("ri,ij,rj->r", slopes, self.uncertainty, slopes)
        found = 2 * variance**2 / np.maximum(known, 1e-9 * variance**2 + np.finfo(float).tiny)
        return np.asarray(np.where(found > NO_DEGREES, found, 0.0))


def fit_population(sums: QuadraticLikelihoods, noise: Array, variance: Array, *, learned: bool) -> Population:
    """Fit the population effects given the noises ``(V,)``; ``learned`` says whether these were.

    ``variance (p,)`` is where variances start; they have no prior here but that they exist.
    """
    V, p = sums.n_sites, sums.n_params
    priors, flat = Priors(likeness=np.inf, ridge=1.0, level=0.0), np.ones(p, dtype=bool)
    middle = float(np.exp(np.log(noise).mean()))
    evidence = _Evidence(sums, flat, middle, priors, noise)
    free, start = evidence.free, np.append(np.log(np.maximum(variance, np.exp(LEAST_LOG))), [0.0, np.log(middle)])
    start = start[np.append(free, [True, True])]
    parameters = evidence.of_some_sites().maximise(start, enough=NEARLY)
    at, q = evidence.solve(parameters), int(free.sum())
    mean, covariance = evidence.whole(at)
    # weights of the effects of sites: in means, which lean on fixed coefficients, and in these
    between = np.empty((p, q))
    by_fixed = at.lean @ at.fixed_covariance
    rows = zip(np.flatnonzero(free), at.covariance / at.root, at.lean_mean, strict=True)
    for j, row, lean in rows:
        between[j] = ((at.away.apply(row) - by_fixed @ lean) ** 2).sum(axis=0)
    between[~free] = (by_fixed**2).sum(axis=0).T
    found = at.away.sums(covariance[np.ix_(free, free)] / (at.root[:, None] * at.root))
    information = np.zeros((q + 1, q + 1))
    information[:q, :q] = 0.5 * found.squares + priors.log_density(parameters[:q], ~flat[free], V)[2]
    information[:q, q] = information[q, :q] = 0.5 * found.inner
    information[q, q] = 0.5 * max(float(sums.n.sum() - V * q + found.rest), 1.0)
    uncertainty, kept = np.zeros_like(information), slice(None if learned else q)
    # the mean is estimated, too, which costs one of V sites
    uncertainty[kept, kept] = np.linalg.inv(information[kept, kept]) * V / max(V - 1, 1e-9)
    # the evidence leaves out the noises and powers of 2 pi, and has a normal prior in place of a flat one
    n = float(sums.n.sum())
    constant = p * np.log(FLAT) + (n - p) * np.log(2 * np.pi) + float(sums.n @ np.log(noise))
    return Population(
        mean=mean,
        covariance=covariance,
        variance=evidence.spread(at.root**2),
        between=between,
        uncertainty=uncertainty,
        log_likelihood=float(at.log_likelihood - 0.5 * constant),
    )


def _inverses(A: Array) -> tuple[Array, Array, float]:
    """Return the inverse in directions about which ``A`` says something but rounding, and ``1 / FLAT`` in others.

    The last is the log determinant of the inverse of their sum.
    """
    scale = 1.0 / np.sqrt(np.maximum(np.diag(A), FLAT))
    values, vectors = np.linalg.eigh(A * np.outer(scale, scale))
    vectors, seen = scale[:, None] * vectors, values > UNSEEN
    logs = float(np.log(np.where(seen, values, FLAT)).sum() - 2 * np.log(scale).sum())
    return (vectors[:, seen] / values[seen]) @ vectors[:, seen].T, vectors[:, ~seen] @ vectors[:, ~seen].T / FLAT, logs


class OneModel(NamedTuple):
    """One model for all sites, ``mean (p,)`` with ``covariance (p, p)``, and the log odds that some of them differ."""

    log_odds: float
    mean: Array
    covariance: Array


def fit_one_model(sums: QuadraticLikelihoods, intercepts: Mask, model: MixedModel, *, learned: bool) -> OneModel:
    """Fit one model to all sites, and compare it with a mixed model that was fitted to them.

    Both have the same prior probability. A variance costs half the logarithm of the number of sites for the level of
    the intercepts' variances and for that of the slopes' (as in the Bayesian information criterion), and what the
    slopes' freedom to have variances of their own costs (`Priors.freedom`). ``learned`` says whether the noise is, and
    has to be learned anew.
    """
    if (some := _some_sites(sums)) is not None:
        return fit_one_model(sums.take(some), intercepts, replace(model, noise=model.noise[some]), learned=learned)
    evidence = _Evidence(sums, intercepts, None if learned else float(model.noise[0]), Priors(), model.noise)
    start = model.parameters.copy()
    start[:-2] = LEAST_LOG
    alone = evidence.solve(evidence.maximise(start, variance=LEAST_LOG))
    levels = int((~evidence.slopes).any()) + int(evidence.slopes.any())
    gain = evidence.solve(model.parameters).log_likelihood - alone.log_likelihood
    told = evidence.information(model.parameters)
    freedom = evidence.priors.freedom(model.parameters[: len(told)], evidence.slopes, told)
    cost = 0.5 * levels * np.log(sums.n_sites) + freedom
    return OneModel(float(gain - cost), *evidence.whole(alone))


def _some_sites(sums: QuadraticLikelihoods) -> Index | None:
    """Return sites from which variances are learned, or None for all of them."""
    most = min(MOST_SITES, max(FEW_SITES, int(MOST_WORK / (sums.n_params**2 * sums.matrices.rank))))
    return None if sums.n_sites <= most else np.linspace(0, sums.n_sites - 1, most).astype(np.int64)


def _noise_share(sums: QuadraticLikelihoods, model: MixedModel) -> Array:
    """Return the sites' noises over the common one ``(V,)``, half way (in logarithms) between 1 and their own."""
    residual = np.maximum(2 * sums.values(model.theta), 1e-12)
    left = np.maximum(sums.n - model.degrees, 0.0)
    own = np.sqrt(moderate_variances(residual / np.maximum(left, 1e-9), left))
    return np.asarray(own / np.exp(np.log(own).mean()))


class _Evidence:
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
        self.learned = dispersion is None
        self.log_noise = 0.0 if dispersion is None else float(np.log(dispersion))
        # of each site's noise in the common one
        self.share = np.ones(sums.n_sites) if noise is None else noise / np.exp(np.log(noise).mean())
        self.held: float | None = None  # the logarithm of the noise, where it is not free

    def of_some_sites(self) -> _Evidence:
        """Return the evidence of the sites from which variances are learned."""
        made = copy.copy(self)
        if (some := _some_sites(self.sums)) is not None:
            made.sums, made.share, made.alone = self.sums.take(some), self.share[some], self.alone.take(some)
            made.responses, made.products = self.responses[some], self.products[some]
        return made

    def hold_noise(self, start: Array) -> Array:
        """Learn the noise with variances held together, and leave it there; return the parameters then."""
        alike = copy.copy(self)
        alike.priors, alike.held = replace(self.priors, likeness=TIED), None
        found = alike.maximise(start)
        self.held = float(found[-1])
        return found

    def start(self) -> Array:
        variance = np.where(self.intercepts, 0.3, 0.03)
        ridge = 0.1 if self.priors.ridge is None else self.priors.ridge
        noise = 0.5 if self.learned else np.exp(self.log_noise)
        return np.asarray(np.log(np.concatenate([variance, [ridge, noise]])))

    def maximise(self, start: Array, variance: float | None = None, enough: float = ENOUGH) -> Array:
        p = self.alone.n_params
        low, high = np.full(p + 2, LEAST_LOG), np.full(p + 2, 8.0)
        if variance is not None:
            low[:p] = high[:p] = variance
        low[p], high[p] = (-9.0, 9.0) if self.priors.ridge is None else (start[p], start[p])
        low[p + 1], high[p + 1] = (-14.0, 14.0) if self.learned else (self.log_noise, self.log_noise)
        if self.held is not None:
            low[p + 1] = high[p + 1] = self.held
        return fisher_scoring(self._negative, start, low, high, enough)

    def solve(self, parameters: Array) -> _Solved:
        """Return the model at given parameters."""
        p = self.alone.n_params
        root = np.exp(0.5 * parameters[:p])
        weight = 1.0 / (np.exp(parameters[p + 1]) * self.share)
        matrices = self.alone.matrices.scaled(root, weight)
        away, logs = matrices.resolved()  # I - B^-1
        scaled = self.responses * (weight[:, None] * root)[:, :, None]  # T c
        seen = scaled - away.multiply(scaled)
        # sum of S - S C S = T^-1 (I - B^-1) T^-1, and of c - S C c = T^-1 B^-1 T c
        prior = np.where(self.intercepts, FLAT, np.exp(-parameters[p]))
        A = away.sum() / (root[:, None] * root) + np.diag(prior)
        A, pulled = 0.5 * (A + A.T), seen.sum(axis=0) / root[:, None]
        if self.slopes.any():
            covariance, log_mean = np.linalg.inv(A), float(np.linalg.slogdet(A)[1])
            means = covariance @ pulled
        else:  # nothing holds the mean in directions that nobody sees
            told, untold, log_mean = _inverses(A)
            covariance, means = told + untold, told @ pulled
        left = np.tensordot(weight, self.products, 1) - np.tensordot(scaled, seen, ((0, 1), (0, 1))) - pulled.T @ means
        known, unknown, log_fixed = _inverses(left[1:, 1:])
        beta = known @ left[1:, 0]
        spent, apart = float((known * left[1:, 1:]).sum()), np.append(1.0, -beta)
        # effects in units of their standard deviation: B^-1 T (c - S mean) = B^-1 T c - (I - B^-1) T^-1 mean
        each, mean = seen - away.multiply(means / root[:, None]), means @ apart
        rest = scaled @ apart - each @ apart - matrices.apply(mean / root + each @ apart)
        effects = each @ apart + rest - away.apply(rest)  # refined once: rounding grows with variances over noise
        # at its minimum, a sum of squares loses fewer digits than the closed form
        squares = 2 * self.sums.values(self.spread(mean + effects * root, beta)) @ weight
        misfit = float(squares + (effects**2).sum() + mean**2 @ prior)
        log_likelihood = -0.5 * (
            (self.sums.n @ np.log(1.0 / weight) if self.learned else 0.0)
            + logs.sum()
            + misfit
            + log_mean
            - np.log(prior).sum()
            + log_fixed
            - len(beta) * np.log(FLAT)
        )
        return _Solved(
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
        )

    def spread(self, varying: Array, fixed: Array | float = 0.0) -> Array:
        """Return numbers ``(..., p)`` of all coefficients, from those that vary and those that are fixed."""
        made = np.zeros((*varying.shape[:-1], len(self.free)))
        made[..., self.free], made[..., ~self.free] = varying, fixed
        return made

    def whole(self, at: _Solved) -> tuple[Array, Array]:
        """Return mean ``(p,)`` and its covariance, fixed coefficients included."""
        return self.spread(at.mean, at.beta), self.bordered(at.covariance[None], at.lean_mean[None], at)[0]

    def bordered(self, given: Array, lean: Array, at: _Solved) -> Array:
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
        value, gradient = at.log_likelihood, np.zeros(p + 2)
        V, sums = self.sums.n_sites, at.away.sums(at.covariance / (at.root[:, None] * at.root))
        by_fixed = ((at.lean @ at.fixed_covariance) * at.lean).sum(axis=(0, 2))
        square = (at.effects**2).sum(axis=0) + sums.left + sums.spent + by_fixed
        gradient[:p] = 0.5 * (square - V)
        information = np.zeros((p + 2, p + 2))
        information[:p, :p] = 0.5 * sums.squares
        spread = np.diag(at.covariance) + ((at.lean_mean @ at.fixed_covariance) * at.lean_mean).sum(axis=1)
        means, slopes = at.mean**2 + spread, self.slopes
        if slopes.any():
            gradient[p] = 0.5 * (means[slopes] * np.exp(-parameters[p]) - 1).sum()
            told = 1.0 - spread[slopes] * np.exp(-parameters[p])
            information[p, p] = 0.5 * float(told @ told)
        if self.learned:
            # with all variances the misfit scales, but for what is flat
            flat = at.spent + (1.0 - FLAT * means[~slopes]).sum()
            gradient[p + 1] = 0.5 * (at.misfit + flat - self.sums.n.sum()) - gradient[: p + 1].sum()
            information[:p, p + 1] = information[p + 1, :p] = 0.5 * sums.inner
            information[p + 1, p + 1] = 0.5 * float(self.sums.n.sum() - V * p + sums.rest)
        held, pull, curvature = priors.log_density(parameters[:p], self.slopes, V)
        gradient[:p] += pull
        information[:p, :p] += curvature
        return -value - held, -gradient, information

    def information(self, parameters: Array) -> Array:
        """Return the expected information of the likelihood alone about log variances ``(p, p)``."""
        p = self.alone.n_params
        held = self.priors.log_density(parameters[:p], self.slopes, self.sums.n_sites)[2]
        return np.asarray(self._negative(parameters)[2][:p, :p] - held)

    def model(self, parameters: Array) -> MixedModel:
        at, p, fixed = self.solve(parameters), self.sums.n_params, ~self.free
        outer = at.root[:, None] * at.root
        precision = self.sums.G * at.weight[:, None, None]
        covariance = np.empty((len(precision), *outer.shape))
        for u, one in enumerate(at.away.posterior_cov(at.covariance / outer)):
            covariance[u] = outer * one
        if fixed.any():
            covariance = self.bordered(covariance, at.lean_mean + at.root[:, None] * at.lean, at)
        matrices = self.sums.matrices
        mean, mean_covariance = self.whole(at)
        return MixedModel(
            mean=mean,
            mean_covariance=mean_covariance,
            variance=self.spread(at.root**2),
            noise=1.0 / at.weight,
            theta=self.spread(at.mean + at.effects * at.root, at.beta),
            covariance=covariance,
            precision=precision,
            score=self.sums.c * at.weight[:, None],
            degrees=(precision * covariance).sum(axis=(1, 2)),
            log_likelihood=at.log_likelihood,
            parameters=parameters,
            matrices=matrices.scaled(np.ones(p), at.weight) if isinstance(matrices, LowRank) else Dense(precision),
            fixed=fixed,
        )


class _Solved(NamedTuple):
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


def moderate_variances(variance: Array, degrees: Array) -> Array:
    """Shrink variances ``(V,)`` with few degrees of freedom to what most sites have (limma; Smyth 2004)."""
    # the true log variances scatter by what degrees of freedom do not explain; where that is nothing, all are pooled
    use = (degrees > 0.5) & (variance > 0)
    if not use.any():
        return np.ones_like(variance)
    s, half = variance[use], 0.5 * degrees[use]
    pooled = float((s * half).sum() / half.sum())
    if use.sum() < 3:
        return np.full(len(variance), pooled)
    logs = np.log(s) - polygamma(0, half) + np.log(half)
    chance = polygamma(1, half)
    weight = (1 / chance) / (1 / chance).sum()
    middle = float(weight @ logs)
    excess = float(weight @ (logs - middle) ** 2 - weight @ chance)
    if excess <= COMMON_NOISE:
        return np.full(len(variance), pooled)
    prior = inverse_trigamma(excess)
    typical = np.exp(middle + polygamma(0, prior) - np.log(prior))
    own = np.where(use, 0.5 * degrees, 0.0)
    return np.asarray((prior * typical + own * np.where(use, variance, 0.0)) / (prior + own))
