"""A mixed model with a separate variance for every coefficient, learned from sums alone.

``theta_u = mean + b_u`` with ``b_uj ~ N(0, variance_j)``, noise ``sigma2_u``, and ``mean_j ~ N(0, ridge)`` except for
intercepts. Local fits, one model for all, site intercepts and random slopes are special cases. Variances, ridge and
noise maximise the likelihood with mean and effects integrated out (restricted maximum likelihood, as in lme4), with
weak `Priors` that also keep the variances of slopes away from zero. With ``T = diag sqrt(variance)`` only ``B_u = I + T
S_u T`` is ever inverted, where ``S_u = G_u / sigma2_u``. So sites with one row, collinear or constant columns, or one
class are harmless.

Fixed coefficients ``beta`` are the same at all sites, with a flat prior. They are profiled out: fitting the target and
each fixed column as a response gives the normal equations of generalised least squares.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from scipy.special import polygamma

from fedkin._base import TINY, Array, Index, Mask
from fedkin.core import inverse_trigamma
from fedkin.kin.evidence import FLAT, LEAST_LOG, UNSEEN, Evidence, Priors, some_sites
from fedkin.kin.likelihoods import FEW, Dense, Matrices, QuadraticLikelihoods, apply, carried, given_mean


@dataclass(frozen=True, eq=False)
class Nested:
    """Districts of sites: the posterior of the mean of the sites in each of K districts."""

    index: Index  # (V,) of each site's district
    variance: Array  # (p,) of the coefficients between districts
    mean: Array  # (K, p)
    precision: Array  # (K, p, p) what its sites say about it

    def covariance(self, mean: Array) -> Array:
        """Return covariances ``(K, p, p)`` of the district means, given that of the overall mean."""
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
    nested: Nested | None = None

    @property
    def fixed(self) -> Mask:
        """Coefficients ``(p,)`` that are the same at all sites."""
        return np.asarray(self.variance == 0)

    @property
    def centres(self) -> Array:
        """Centre of each site's coefficients, ``(V, p)``: the mean of all sites, or that of its district."""
        if self.nested is None:
            return np.broadcast_to(self.mean, self.theta.shape)
        return self.nested.mean[self.nested.index]


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
    # with many coefficients and fewer than two rows for each of them, noise is learned with variances alike
    hold = dispersion is None and sums.n_params > FEW and sums.n.mean() < 2 * sums.n_params
    for _ in range(passes - 1 if dispersion is None else 0):
        if hold:
            parameters = evidence.hold_noise(parameters)
        parameters = evidence.maximise(parameters)
        share = _noise_share(sums, model_at(evidence, parameters))
        moved = np.abs(np.log(share / evidence.share)).max()
        evidence.share = share
        if moved < 1e-3:
            break
    if hold:
        parameters = evidence.hold_noise(parameters)
    return model_at(evidence, evidence.maximise(parameters))


def model_at(evidence: Evidence, parameters: Array) -> MixedModel:
    """Evaluate the model at given variances, ridge and noise."""
    at, sums, varying = evidence.solve(parameters), evidence.sums, evidence.free
    precision, variance = sums.G * at.weight[:, None, None], evidence.spread(at.root**2)
    matrices = sums.matrices.scaled(np.ones(sums.n_params), at.weight)
    mean, mean_covariance = evidence.whole(at)
    above, centre, nested, centre_covariance = at.above, at.mean, None, mean_covariance
    if above is not None:
        said = precision @ given_mean(variance, precision)[1]
        together = np.zeros((len(above.centres), *mean_covariance.shape))
        np.add.at(together, above.index, 0.5 * (said + np.swapaxes(said, 1, 2)))
        centres = above.centres @ np.append(1.0, -at.beta)
        nested = Nested(above.index, evidence.spread(above.root**2), evidence.spread(centres, at.beta), together)
        centre, centre_covariance = centres[above.index], nested.covariance(mean_covariance)[above.index]
    if isinstance(matrices, Dense):
        own, left = given_mean(variance, precision)
        covariance = own + left @ centre_covariance @ np.swapaxes(left, 1, 2)
    else:
        covariance = np.empty_like(precision)
        for u in range(len(precision)):  # one site after another: such matrices are large
            covariance[u] = carried(matrices, at.away, at.root, varying, u, mean_covariance)
            covariance[u][np.ix_(varying, varying)] += (
                at.root[:, None] * at.root * (np.eye(len(at.root)) - at.away.of(u))
            )
    return MixedModel(
        mean=mean,
        mean_covariance=mean_covariance,
        variance=variance,
        noise=1.0 / at.weight,
        theta=evidence.spread(centre + at.effects * at.root, at.beta),
        covariance=covariance,
        precision=precision,
        score=sums.c * at.weight[:, None],
        degrees=(precision * covariance).sum(axis=(1, 2)),
        log_likelihood=at.log_likelihood,
        parameters=parameters,
        matrices=matrices,
        nested=nested,
    )


def with_noise(sums: QuadraticLikelihoods, intercepts: Mask, noise: Array, parameters: Array) -> MixedModel:
    """Fit the model with these noise variances ``(V,)`` and the variances that suit them, starting from
    ``parameters``."""
    evidence, start = Evidence(sums, intercepts, None, Priors(), noise), parameters.copy()
    start[evidence.alone.n_params + 1] = evidence.held = float(np.log(noise).mean())
    return model_at(evidence, evidence.of_some_sites().maximise(start))


def mixed_at(sums: QuadraticLikelihoods, intercepts: Mask, dispersion: float, parameters: Array) -> MixedModel:
    """Return the mixed model at given log variances, log ridge and log noise, for sites with this dispersion."""
    return model_at(Evidence(sums, intercepts, dispersion, Priors()), parameters)


@dataclass(frozen=True, eq=False)
class Population:
    """Effects of the population of sites by restricted maximum likelihood, in standardised units.

    Their mean has a flat prior, whereas the mean of `MixedModel`, to which sites are shrunk, is itself shrunk to zero.
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
        found = 2 * variance**2 / np.maximum(known, 1e-9 * variance**2 + TINY)
        return np.asarray(np.where(found > 1e-3, found, 0.0))  # one site alone says nothing about a population


def fit_population(sums: QuadraticLikelihoods, noise: Array, variance: Array, *, learned: bool) -> Population:
    """Fit the population effects given the noise variances ``(V,)``; ``learned`` states whether these were learned.

    ``variance (p,)`` is the starting point of the variances, which have no informative prior here.
    """
    V, p = sums.n_sites, sums.n_params
    priors, flat = Priors(likeness=np.inf, log_variance=(-8.0, 20.0), ridge=1.0, level=False), np.ones(p, dtype=bool)
    middle = float(np.exp(np.log(noise).mean()))
    evidence = Evidence(sums, flat, middle, priors, noise)
    free, start = evidence.free, np.append(np.log(np.maximum(variance, np.exp(LEAST_LOG))), [0.0, np.log(middle)])
    start = evidence.with_districts(start[np.append(free, [True, True])])
    parameters = evidence.of_some_sites().maximise(start)
    at, q = evidence.solve(parameters), int(free.sum())
    mean, covariance = evidence.whole(at)
    # weights of the effects of sites and districts: in means, which lean on fixed coefficients, and in these
    above, K = at.above, V if at.above is None else len(at.above.centres)
    between = np.empty((p, q if above is None else 2 * q))
    by_fixed = at.lean @ at.fixed_covariance
    for j, row, lean in zip(np.flatnonzero(free), at.covariance, at.lean_mean, strict=True):
        if above is not None:
            of_districts = apply(above.away, row / above.root)
            between[j, q:] = ((of_districts - above.effects[:, :, 1:] @ at.fixed_covariance @ lean) ** 2).sum(axis=0)
            row = (row - of_districts * above.root)[above.index]
        between[j, :q] = ((apply(at.away, row / at.root) - by_fixed @ lean) ** 2).sum(axis=0)
    between[~free, :q] = (by_fixed**2).sum(axis=0).T
    found = at.away.sums(evidence.centre_covariance(at) / (at.root[:, None] * at.root))
    last = between.shape[1]
    information = np.zeros((last + 1, last + 1))
    information[:q, :q] = 0.5 * found.squares + priors.log_density(parameters[:q], ~flat[free])[2]
    information[:q, last] = information[last, :q] = 0.5 * found.inner
    information[last, last] = 0.5 * max(float(sums.n.sum() - V * q + found.rest), 1.0)
    # means are estimated, too: that of all, which costs one of V sites, or those of districts; a fixed column that is
    # in each site a multiple of one that varies costs the variance of this one another site
    size = np.einsum("upp->up", sums.G)
    rest = size[:, free, None] * size[:, None, ~free] - sums.G[:, free][:, :, ~free] ** 2
    same = (rest <= 1e-8 * size[:, free, None] * size[:, None, ~free]).all(axis=0).sum(axis=1)
    costs = np.append(V / np.maximum(V - 1.0 - same, 1.0), [V / max(V - 1, 1e-9)] * (last + 1 - q))
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


def outer(vectors: Array) -> Array:
    """Return the outer products ``v_u v_u'`` of ``(V, d)``."""
    return np.asarray(vectors[:, :, None] * vectors[:, None, :])


def fit_unseen(sums: QuadraticLikelihoods, noise: Array, variance: Array) -> Array:
    """Return what to add to the population's mean, ``(p,)``, to predict an unseen site best.

    The population's mean is estimated mostly within sites. If sites with larger values of a column also have larger
    intercepts (Mundlak 1978), its effects are not those by which unseen sites differ; those of one model of all rows
    are. The two are averaged with the weight that predicts each site's rows best from all other sites (stacking;
    Breiman 1996), which sums suffice for.
    """
    some = some_sites(sums)
    few, scale = (sums, noise) if some is None else (sums.take(some), noise[some])
    S, c = few.G / scale[:, None, None], few.c / scale[:, None]
    left = given_mean(variance, S)[1]
    A, a = S @ left, apply(np.swapaxes(left, 1, 2), c)

    def without_each(matrices: Array, vectors: Array) -> Array:
        """Return the solution from all sites ``(p,)``, followed by those without each site, ``(V + 1, p)``."""
        total, right = matrices.sum(axis=0), vectors.sum(axis=0)
        light = UNSEEN * np.diag(np.diag(total) + UNSEEN)
        others = np.concatenate([[total + light], total + light - matrices])
        return np.asarray(np.linalg.solve(others, np.concatenate([[right], right - vectors])[:, :, None])[:, :, 0])

    within, pooled = without_each(A, a), without_each(S, c)
    apart = pooled - within
    gains = (apart[1:] * (c - apply(S, within[1:]))).sum(axis=1)
    cost = float((apart[1:] * apply(S, apart[1:])).sum())
    # what chance may have made of the gain is taken off, as the positive part of Stein's estimate does
    gain, square = float(gains.sum()), float(len(gains) * gains.var())
    weight = float(np.clip((gain - square / gain) / max(cost, UNSEEN), 0.0, 1.0)) if gain > 0 else 0.0
    return np.asarray(weight * apart[0])


class OneModel(NamedTuple):
    """One model for all sites, ``mean (p,)`` with ``covariance (p, p)``, and the log odds that some of them differ."""

    log_odds: float
    mean: Array
    covariance: Array
    shift: Array | float  # (V, p) what it adds to the mixed model's estimates that its variances are uncertain,
    spread: Array | float  # (V, p, p) and to their covariances


def fit_one_model(sums: QuadraticLikelihoods, intercepts: Mask, model: MixedModel, *, learned: bool) -> OneModel:
    """Fit one model to all sites, and compare it with their mixed model, whose variances are integrated out.

    ``learned`` states whether the noise is estimated, and so must be estimated again.
    """
    if (some := some_sites(sums)) is not None:
        few = fit_one_model(sums.take(some), intercepts, replace(model, noise=model.noise[some]), learned=learned)
        return few._replace(shift=0.0, spread=0.0)
    evidence = Evidence(sums, intercepts, None if learned else float(model.noise[0]), Priors(), model.noise)
    start = model.parameters.copy()
    start[:-2] = LEAST_LOG
    alone = evidence.solve(evidence.maximise(start, variance=LEAST_LOG))
    log, points = evidence.integrate(model.parameters)
    shift: Array | float = 0.0
    spread: Array | float = 0.0
    if len(points) > 1:
        usual = model_at(evidence, model.parameters)
        each = [(chance, model_at(evidence, at)) for chance, at in points]
        middle = np.asarray(sum(chance * one.theta for chance, one in each))
        total = sum(chance * (one.covariance + outer(one.theta - middle)) for chance, one in each)
        shift, spread = middle - usual.theta, total - usual.covariance
    return OneModel(log - alone.log_likelihood, *evidence.whole(alone), shift, spread)


def _noise_share(sums: QuadraticLikelihoods, model: MixedModel) -> Array:
    """Return the sites' noises over the common one ``(V,)``, half way (in logarithms) between 1 and their own."""
    residual = np.maximum(2 * sums.values(model.theta), 1e-12)
    left = np.maximum(sums.n - model.degrees, 0.0)
    own = np.sqrt(moderate_variances(residual / np.maximum(left, 1e-9), left))
    return np.asarray(own / np.exp(np.log(own).mean()))


def moderate_variances(variance: Array, degrees: Array) -> Array:
    """Shrink variances ``(V,)`` with few degrees of freedom towards that of most sites (limma; Smyth 2004)."""
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
    if excess <= 0:
        return np.full(len(variance), pooled)
    prior = inverse_trigamma(excess)
    typical = np.exp(middle + polygamma(0, prior) - np.log(prior))
    own = np.where(use, 0.5 * degrees, 0.0)
    return np.asarray((prior * typical + own * np.where(use, variance, 0.0)) / (prior + own))
