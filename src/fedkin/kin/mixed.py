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

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from scipy.special import polygamma

from fedkin._base import Array, Index, Mask
from fedkin.core import inverse_trigamma
from fedkin.kin.evidence import FLAT, LEAST_LOG, ROUGHLY, Evidence, Priors, some_sites
from fedkin.kin.likelihoods import FEW, Dense, LowRank, Matrices, QuadraticLikelihoods, given_mean

#: More rows for each of many coefficients than this, and the noise is learned freely.
ENOUGH_ROWS = 2.0
#: The same for the population, whose standard errors need fewer digits.
NEARLY = 1e-4
#: Degrees of freedom below this are none: one site alone says nothing about a population.
NO_DEGREES = 1e-3
#: Excess variance of log noise between sites below which one noise serves all.
COMMON_NOISE = 1e-3


@dataclass(frozen=True, eq=False)
class Nested:
    """K districts of sites: what is known about the mean of the sites of each."""

    index: Index  # (V,) of each site's district
    variance: Array  # (p,) of the coefficients between districts
    mean: Array  # (K, p)
    precision: Array  # (K, p, p) what its sites say about it

    def covariance(self, mean: Array) -> Array:
        """Return covariances ``(K, p, p)`` of the means, given that of the mean of all."""
        own, left = given_mean(self.variance, self.precision)
        return np.asarray(own + left @ mean @ np.swapaxes(left, 1, 2))


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
    nested: Nested | None = None

    @property
    def centres(self) -> Array:
        """What each site's coefficients are around, ``(V, p)``: the mean, or that of its district."""
        if self.nested is None:
            return np.broadcast_to(self.mean, self.theta.shape)
        return self.nested.mean[self.nested.index]

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
    evidence = Evidence(sums, intercepts, dispersion, priors or Priors())
    parameters = evidence.start() if start is None else evidence.with_districts(start)
    if (some := some_sites(sums)) is not None:
        few = fit_mixed(sums.take(some), intercepts, dispersion=dispersion, start=start, priors=priors, passes=passes)
        if dispersion is None:
            evidence.share = _noise_share(sums, model_at(evidence, few.parameters))
        return model_at(evidence, few.parameters)
    hold = dispersion is None and sums.n_params > FEW and sums.n.mean() < ENOUGH_ROWS * sums.n_params
    for _ in range(passes - 1 if dispersion is None else 0):
        if hold:
            parameters = evidence.hold_noise(parameters)
        parameters = evidence.maximise(parameters, enough=ROUGHLY)
        share = _noise_share(sums, model_at(evidence, parameters))
        moved = np.abs(np.log(share / evidence.share)).max()
        evidence.share = share
        if moved < 1e-3:
            break
    if hold:
        parameters = evidence.hold_noise(parameters)
    return model_at(evidence, evidence.maximise(parameters))


def model_at(evidence: Evidence, parameters: Array) -> MixedModel:
    """Return the model at given variances, ridge and noise."""
    at, p, fixed = evidence.solve(parameters), evidence.sums.n_params, ~evidence.free
    outer = at.root[:, None] * at.root
    precision = evidence.sums.G * at.weight[:, None, None]
    covariance = np.empty((len(precision), *outer.shape))
    above, centre, lean, nested = at.above, at.mean, at.lean_mean, None
    for u, one in enumerate(at.away.posterior_cov(evidence.centre_covariance(at) / outer)):
        covariance[u] = outer * one
    variance = evidence.spread(at.root**2)
    if above is not None:
        said = precision @ given_mean(variance, precision)[1]
        index, together = above.index, np.zeros((len(above.centres), p, p))
        np.add.at(together, index, 0.5 * (said + np.swapaxes(said, 1, 2)))
        centres = above.centres @ np.append(1.0, -at.beta)
        nested = Nested(index, evidence.spread(above.root**2), evidence.spread(centres, at.beta), together)
        centre, lean = centres[index], above.centres[index][:, :, 1:]
    if fixed.any():
        covariance = evidence.bordered(covariance, lean + at.root[:, None] * at.lean, at)
    matrices = evidence.sums.matrices
    mean, mean_covariance = evidence.whole(at)
    return MixedModel(
        mean=mean,
        mean_covariance=mean_covariance,
        variance=variance,
        noise=1.0 / at.weight,
        theta=evidence.spread(centre + at.effects * at.root, at.beta),
        covariance=covariance,
        precision=precision,
        score=evidence.sums.c * at.weight[:, None],
        degrees=(precision * covariance).sum(axis=(1, 2)),
        log_likelihood=at.log_likelihood,
        parameters=parameters,
        matrices=matrices.scaled(np.ones(p), at.weight) if isinstance(matrices, LowRank) else Dense(precision),
        fixed=fixed,
        nested=nested,
    )


def with_noise(sums: QuadraticLikelihoods, intercepts: Mask, noise: Array, parameters: Array) -> MixedModel:
    """Fit the model with these noises ``(V,)``, and variances that go with them; ``parameters`` are where to begin."""
    evidence, start = Evidence(sums, intercepts, None, Priors(), noise), parameters.copy()
    start[evidence.alone.n_params + 1] = evidence.held = float(np.log(noise).mean())
    return model_at(evidence, evidence.of_some_sites().maximise(start))


def mixed_at(sums: QuadraticLikelihoods, intercepts: Mask, dispersion: float, parameters: Array) -> MixedModel:
    """Return the mixed model at given log variances, log ridge and log noise, of sites with this dispersion."""
    return model_at(Evidence(sums, intercepts, dispersion, Priors()), parameters)


@dataclass(frozen=True, eq=False)
class Population:
    """Effects of the population of sites by restricted maximum likelihood, in standardised units.

    Their mean has a flat prior: the mean of `MixedModel`, to which sites are shrunk, is itself shrunk to zero.
    """

    mean: Array  # (p,)
    covariance: Array  # (p, p) given the variances
    variance: Array  # (p,) of the coefficients between sites, held by no prior
    between: Array  # (p, q) of each diagonal entry of the covariance, what is owed to each of q variances
    uncertainty: Array  # (q + 1, q + 1) covariance of the estimated log variances and of the log noise
    log_likelihood: float  # restricted, of least squares
    outer_variance: Array | None = None  # (p,) of the coefficients between districts

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
    evidence = Evidence(sums, flat, middle, priors, noise)
    free, start = evidence.free, np.append(np.log(np.maximum(variance, np.exp(LEAST_LOG))), [0.0, np.log(middle)])
    start = evidence.with_districts(start[np.append(free, [True, True])])
    parameters = evidence.of_some_sites().maximise(start, enough=NEARLY)
    at, q = evidence.solve(parameters), int(free.sum())
    mean, covariance = evidence.whole(at)
    # weights of the effects of sites and districts: in means, which lean on fixed coefficients, and in these
    above, K = at.above, V if at.above is None else len(at.above.centres)
    between = np.empty((p, q if above is None else 2 * q))
    by_fixed = at.lean @ at.fixed_covariance
    for j, row, lean in zip(np.flatnonzero(free), at.covariance, at.lean_mean, strict=True):
        if above is not None:
            of_districts = above.away.apply(row / above.root)
            between[j, q:] = ((of_districts - above.effects[:, :, 1:] @ at.fixed_covariance @ lean) ** 2).sum(axis=0)
            row = (row - of_districts * above.root)[above.index]
        between[j, :q] = ((at.away.apply(row / at.root) - by_fixed @ lean) ** 2).sum(axis=0)
    between[~free, :q] = (by_fixed**2).sum(axis=0).T
    found = at.away.sums(evidence.centre_covariance(at) / (at.root[:, None] * at.root))
    last = between.shape[1]
    information = np.zeros((last + 1, last + 1))
    information[:q, :q] = 0.5 * found.squares + priors.log_density(parameters[:q], ~flat[free], V)[2]
    information[:q, last] = information[last, :q] = 0.5 * found.inner
    information[last, last] = 0.5 * max(float(sums.n.sum() - V * q + found.rest), 1.0)
    # means are estimated, too: that of all, which costs one of V sites, or those of districts
    costs = np.full(last + 1, V / max(V - 1, 1e-9))
    if above is not None:
        between[~free, q:] = ((above.effects[:, :, 1:] @ at.fixed_covariance) ** 2).sum(axis=0).T
        information[q:last, q:last] = 0.5 * above.squares(at)[1] + 1e-6 * np.eye(q)
        costs[:q], costs[q:last] = V / max(V - K, 1e-9), K / max(K - 1, 1e-9)
    uncertainty, kept = np.zeros_like(information), slice(None if learned else last)
    uncertainty[kept, kept] = np.linalg.inv(information[kept, kept]) * np.sqrt(np.outer(costs, costs))[kept, kept]
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
        outer_variance=None if above is None else evidence.spread(above.root**2),
    )


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
    if (some := some_sites(sums)) is not None:
        return fit_one_model(sums.take(some), intercepts, replace(model, noise=model.noise[some]), learned=learned)
    evidence = Evidence(sums, intercepts, None if learned else float(model.noise[0]), Priors(), model.noise)
    start = model.parameters.copy()
    start[:-2] = LEAST_LOG
    alone = evidence.solve(evidence.maximise(start, variance=LEAST_LOG))
    levels = int((~evidence.slopes).any()) + int(evidence.slopes.any())
    gain = evidence.solve(model.parameters).log_likelihood - alone.log_likelihood
    told = evidence.information(model.parameters)
    freedom = evidence.priors.freedom(model.parameters[: len(told)], evidence.slopes, told)
    cost = 0.5 * levels * np.log(sums.n_sites) + freedom
    return OneModel(float(gain - cost), *evidence.whole(alone))


def _noise_share(sums: QuadraticLikelihoods, model: MixedModel) -> Array:
    """Return the sites' noises over the common one ``(V,)``, half way (in logarithms) between 1 and their own."""
    residual = np.maximum(2 * sums.values(model.theta), 1e-12)
    left = np.maximum(sums.n - model.degrees, 0.0)
    own = np.sqrt(moderate_variances(residual / np.maximum(left, 1e-9), left))
    return np.asarray(own / np.exp(np.log(own).mean()))


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
