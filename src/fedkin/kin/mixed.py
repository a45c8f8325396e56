"""The mixed model with a spread of its own for every coefficient, learned from sums alone.

``theta_u = mean + b_u`` with ``b_uj ~ N(0, spread_j)``, noise ``sigma2_u``, and ``mean_j ~ N(0, ridge)`` except for
intercepts. Local fits, one model for all, site intercepts and random slopes are its corners. Spread, ridge and noise
maximise the likelihood with mean and effects integrated out (restricted maximum likelihood, as in lme4), lightly held
by `Priors`, which also keep slopes' spreads away from nothing. With ``T = diag sqrt(spread)`` only
``B_u = I + T S_u T`` is ever inverted, where ``S_u = G_u / sigma2_u``: one row, collinear columns, constant columns and
sites with one class are harmless.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fedkin._base import Array, Index, Mask
from fedkin.kin.matrices import FEW, LowRank, dense_sums
from fedkin.kin.noise import steadied
from fedkin.kin.priors import Priors
from fedkin.kin.quadratics import Quadratics, apply
from fedkin.kin.scoring import ENOUGH, ROUGHLY, scored

#: Precision of an intercept's mean: flat for every purpose.
FLAT = 1e-8
#: Logarithm of the least spread, which is none.
LEAST_LOG = -14.0
#: With more sites than this, spreads, ridge and noise are learned from so many of them...
MOST_SITES, FEW_SITES = 2000, 24
#: ... or from fewer, but not less than those, where they times the cubes of their coefficients are more than this.
MOST_WORK = 2e9
#: With many coefficients the noise is learned with spreads this much alike, unless there are so many rows for each:
#: left apart, spreads explain noise, too.
TIED, ENOUGH_ROWS = 0.1, 2.0


@dataclass(frozen=True, eq=False)
class MixedModel:
    """A fitted mixed model.

    Attributes
    ----------
    mean : array (p,)
    mean_covariance : array (p, p)
    spread : array (p,)
        Variances of the coefficients between sites.
    mean_precision : array (p,)
        Prior precision of the mean: 1 / ridge for slopes, next to nothing for intercepts.
    noise : array (V,)
        Noise variance of each site (least squares), or its dispersion.
    theta : array (V, p)
        Posterior means of the sites' parameters.
    covariance : array (V, p, p)
        Their posterior covariances, the uncertainty of the mean included, that of the variances not.
    precision : array (V, p, p)
        ``G_u / noise_u``.
    score : array (V, p)
        ``c_u / noise_u``.
    degrees : array (V,)
        Effective degrees of freedom that each site spends.
    log_likelihood : float
    """

    mean: Array
    mean_covariance: Array
    spread: Array
    mean_precision: Array
    noise: Array
    theta: Array
    covariance: Array
    precision: Array
    score: Array
    degrees: Array
    log_likelihood: float
    parameters: Array  # log spread, log ridge, log noise: where the next fit may begin
    short: LowRank | None = None  # the precision as diagonal plus low rank, where that pays


def fit_mixed(
    sums: Quadratics,
    intercepts: Mask,
    *,
    dispersion: float | None = None,
    start: Array | None = None,
    priors: Priors | None = None,
    passes: int = 3,
) -> MixedModel:
    """Fit the mixed model to sums in standardised units.

    Parameters
    ----------
    sums : Quadratics
        The sites' losses.
    intercepts : bool array (p,)
        Parameters whose mean is free and whose spread is unlike that of the others.
    dispersion : float, optional
        Noise variance of all sites, where it is known (1 for the logistic loss). None to learn it, for each site
        half way (in logarithms) between the common one and its own.
    start : array (p + 2,), optional
        ``parameters`` of an earlier fit.
    priors : Priors, optional
        How strongly spreads are held together.
    passes : int
        Fits with noises updated in between, when they are learned.

    Returns
    -------
    MixedModel

    Examples
    --------
    Twenty sites whose means differ with standard deviation 2, four rows each:

    >>> import numpy as np
    >>> from fedkin.kin import Quadratics, fit_mixed
    >>> rng = np.random.default_rng(0)
    >>> y = 2 * rng.normal(size=(20, 1)) + rng.normal(size=(20, 4))
    >>> sums = Quadratics(np.full((20, 1, 1), 4.0), y.sum(1)[:, None], (y**2).sum(1), np.full(20, 4.0))
    >>> model = fit_mixed(sums, np.array([True]))
    >>> bool(1.5 < np.sqrt(model.spread[0]) < 2.5 and 0.8 < model.noise.mean() < 1.2)
    True
    """
    evidence = _Evidence(sums, intercepts, dispersion, priors or Priors())
    parameters = evidence.start() if start is None else start
    if (some := _some_sites(sums)) is not None:
        few = fit_mixed(sums.take(some), intercepts, dispersion=dispersion, start=start, priors=priors, passes=passes)
        return _with_own_noise(evidence, few.parameters) if dispersion is None else evidence.model(few.parameters)
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


def with_noise(sums: Quadratics, intercepts: Mask, noise: Array, parameters: Array) -> MixedModel:
    """The model with these noises ``(V,)``, and spreads that go with them; ``parameters`` are where to begin."""
    evidence = _Evidence(sums, intercepts, None, Priors())
    evidence.share = noise / np.exp(np.log(noise).mean())
    start = parameters.copy()
    start[-1] = evidence.held = float(np.log(noise).mean())
    if (some := _some_sites(sums)) is None:
        return evidence.model(evidence.maximise(start))
    few = _Evidence(sums.take(some), intercepts, None, Priors())
    few.share, few.held = evidence.share[some], evidence.held
    return evidence.model(few.maximise(start))


def mixed_at(sums: Quadratics, intercepts: Mask, dispersion: float, parameters: Array) -> MixedModel:
    """The mixed model at given log spreads, log ridge and log noise, of sites that all have this dispersion."""
    return _Evidence(sums, intercepts, dispersion, Priors()).model(parameters)


@dataclass(frozen=True, eq=False)
class OneModel:
    """One model for all sites, ``mean (p,)`` with ``covariance (p, p)``, and the log odds that some of them differ."""

    log_odds: float
    mean: Array
    covariance: Array


def without_spread(sums: Quadratics, intercepts: Mask, model: MixedModel, *, learned: bool) -> OneModel:
    """How probable it is that sites do not differ at all, given their losses and a model that was fitted to them.

    Both have the same prior probability. A spread costs half the logarithm of the number of sites for the level of the
    intercepts' spreads and for that of the slopes' (as in the Bayesian information criterion), and what the slopes'
    freedom to have spreads of their own costs (`Priors.freedom`). ``learned`` says whether the noise is, and has to be
    learned anew.
    """
    if (some := _some_sites(sums)) is not None:
        return without_spread(sums.take(some), intercepts, replace(model, noise=model.noise[some]), learned=learned)
    evidence = _Evidence(sums, intercepts, None if learned else float(model.noise[0]), Priors())
    evidence.share = model.noise / np.exp(np.log(model.noise).mean())
    start = model.parameters.copy()
    start[: sums.n_params] = LEAST_LOG
    alone = evidence.solve(evidence.maximise(start, spread=LEAST_LOG))
    levels = int(intercepts.any()) + int((~intercepts).any())
    gain = evidence.solve(model.parameters).log_likelihood - alone.log_likelihood
    told = evidence.information(model.parameters)
    cost = 0.5 * levels * np.log(sums.n_sites) + evidence.priors.freedom(
        model.parameters[: len(told)], ~intercepts, told
    )
    return OneModel(float(gain - cost), alone.mean, alone.covariance)


def _some_sites(sums: Quadratics) -> Index | None:
    """Sites from which spreads are learned, or None for all of them."""
    rank = sums.n_params if sums.short is None else sums.short.factor.shape[2]
    most = min(MOST_SITES, max(FEW_SITES, int(MOST_WORK / (sums.n_params**2 * rank))))
    if sums.n_sites <= most:
        return None
    return np.linspace(0, sums.n_sites - 1, most).astype(np.int64)


def _noise_share(sums: Quadratics, model: MixedModel) -> Array:
    """The sites' noises over the common one ``(V,)``, half way (in logarithms) between 1 and their own."""
    residual = np.maximum(2 * sums.values(model.theta), 1e-12)
    left = np.maximum(sums.n - model.degrees, 0.0)
    own = np.sqrt(steadied(residual / np.maximum(left, 1e-9), left))
    return np.asarray(own / np.exp(np.log(own).mean()))


def _with_own_noise(evidence: _Evidence, parameters: Array) -> MixedModel:
    """The model of all sites at parameters that some of them gave."""
    evidence.share = _noise_share(evidence.sums, evidence.model(parameters))
    return evidence.model(parameters)


class _Evidence:
    """The log evidence of spreads, ridge and noise, with its gradient by Fisher's identity."""

    def __init__(self, sums: Quadratics, intercepts: Mask, dispersion: float | None, priors: Priors) -> None:
        self.sums, self.intercepts, self.slopes, self.priors = sums, intercepts, ~intercepts, priors
        self.learned = dispersion is None
        self.log_noise = 0.0 if dispersion is None else float(np.log(dispersion))
        self.share = np.ones(sums.n_sites)  # of each site's noise in the common one
        self.held: float | None = None  # the logarithm of the noise, where it is not free

    def hold_noise(self, start: Array) -> Array:
        """Learn the noise with spreads held together, and leave it there; returns the parameters then."""
        alike = _Evidence(self.sums, self.intercepts, None, replace(self.priors, likeness=TIED))
        alike.share = self.share
        found = alike.maximise(start)
        self.held = float(found[-1])
        return found

    def start(self) -> Array:
        spread = np.where(self.intercepts, 0.3, 0.03)
        ridge = 0.1 if self.priors.ridge is None else self.priors.ridge
        noise = 0.5 if self.learned else np.exp(self.log_noise)
        return np.asarray(np.log(np.concatenate([spread, [ridge, noise]])))

    def maximise(self, start: Array, spread: float | None = None, enough: float = ENOUGH) -> Array:
        p = self.sums.n_params
        low, high = np.full(p + 2, LEAST_LOG), np.full(p + 2, 8.0)
        if spread is not None:
            low[:p] = high[:p] = spread
        low[p], high[p] = (-9.0, 9.0) if self.priors.ridge is None else (start[p], start[p])
        low[p + 1], high[p + 1] = (-14.0, 14.0) if self.learned else (self.log_noise, self.log_noise)
        if self.held is not None:
            low[p + 1] = high[p + 1] = self.held
        return scored(self._negative, start, low, high, enough=enough)

    def solve(self, parameters: Array) -> _Solved:
        """The model at given parameters."""
        p = self.sums.n_params
        root = np.exp(0.5 * parameters[:p])
        weight = 1.0 / (np.exp(parameters[p + 1]) * self.share)
        if self.sums.short is not None:
            return self._solved_short(self.sums.short, parameters, root, weight)
        B = self.sums.G * (weight[:, None, None] * (root[:, None] * root))
        diagonal = np.arange(p)
        B[:, diagonal, diagonal] += 1.0
        log_det = 2 * float(np.log(np.einsum("ujj->uj", np.linalg.cholesky(B))).sum())
        inverse = np.linalg.inv(B)
        scaled = self.sums.c * (weight[:, None] * root)  # T c
        seen = apply(inverse, scaled)
        covariance, mean, log_likelihood = self._mean(
            parameters, weight, len(B) * np.eye(p) - inverse.sum(axis=0), scaled, seen, log_det
        )
        # effects in units of their spread: B^-1 T (c - S mean) = B^-1 T c - (I - B^-1) T^-1 mean
        effects = seen - mean / root + (inverse @ (mean / root))
        return _Solved(root, weight, inverse, covariance, mean, effects, log_likelihood)

    def _solved_short(self, short: LowRank, parameters: Array, root: Array, weight: Array) -> _Solved:
        """The same from matrices of low rank: ``I - B^-1`` is one, too."""
        away, logs = short.scaled(root, weight).resolved()
        scaled = self.sums.c * (weight[:, None] * root)
        seen = scaled - away.apply(scaled)
        covariance, mean, log_likelihood = self._mean(parameters, weight, away.sum(), scaled, seen, float(logs.sum()))
        effects = seen - away.apply(mean / root)
        return _Solved(root, weight, away, covariance, mean, effects, log_likelihood)

    def _mean(
        self, parameters: Array, weight: Array, away: Array, scaled: Array, seen: Array, log_det: float
    ) -> tuple[Array, Array, float]:
        """Covariance and value of the mean, and the log likelihood, from sums over sites of ``I - B^-1``."""
        p = self.sums.n_params
        root = np.exp(0.5 * parameters[:p])
        # sum of S - S C S = T^-1 (I - B^-1) T^-1, and of c - S C c = T^-1 B^-1 T c
        prior = np.where(self.intercepts, FLAT, np.exp(-parameters[p]))
        A = away / (root[:, None] * root) + np.diag(prior)
        A = 0.5 * (A + A.T)
        covariance = np.linalg.inv(A)
        pulled = seen.sum(axis=0) / root
        mean = covariance @ pulled
        log_likelihood = -0.5 * (
            (self.sums.n @ np.log(1.0 / weight) if self.learned else 0.0)
            + log_det
            + self.sums.yy @ weight
            - (scaled * seen).sum()
            - pulled @ mean
            + np.linalg.slogdet(A)[1]
            - np.log(prior).sum()
        )
        return covariance, mean, float(log_likelihood)

    def _negative(self, parameters: Array) -> tuple[float, Array, Array]:
        """Minus the log evidence, its gradient, and its expected second derivatives, those by way of the mean left out.

        A site's covariance is ``V = sigma2 (I + Z T T Z' / sigma2)``, so that ``tau_j z_j'V^-1 z_k tau_k`` is
        ``I - B^-1`` at j and k: half its square, summed over sites, is the information about log spreads.
        """
        p, priors = self.sums.n_params, self.priors
        at = self.solve(parameters)
        value, gradient = at.log_likelihood, np.zeros(p + 2)
        V, scaled = self.sums.n_sites, at.covariance / (at.root[:, None] * at.root)
        if isinstance(at.inverse, LowRank):
            sums = at.inverse.sums(scaled)
        else:
            sums = dense_sums(at.inverse, scaled, noise=self.learned)
        square = (at.effects**2).sum(axis=0) + sums.open + sums.spent
        gradient[:p] = 0.5 * (square - V)
        information = np.zeros((p + 2, p + 2))
        information[:p, :p] = 0.5 * sums.squares
        if self.slopes.any():
            means = at.mean[self.slopes] ** 2 + np.diag(at.covariance)[self.slopes]
            gradient[p] = 0.5 * (means * np.exp(-parameters[p]) - 1).sum()
            told = 1.0 - np.diag(at.covariance)[self.slopes] * np.exp(-parameters[p])
            information[p, p] = 0.5 * float(told @ told)
        if self.learned:
            theta = at.mean + at.effects * at.root
            traces = sums.trace + sums.pull
            gradient[p + 1] = 0.5 * (2 * self.sums.values(theta) @ at.weight + traces - self.sums.n.sum())
            information[:p, p + 1] = information[p + 1, :p] = 0.5 * sums.inner
            information[p + 1, p + 1] = 0.5 * float(self.sums.n.sum() - V * p + sums.rest)
        held, pull, curvature = priors.of(parameters[:p], self.slopes, V)
        gradient[:p] += pull
        information[:p, :p] += curvature
        return -value - held, -gradient, information

    def information(self, parameters: Array) -> Array:
        """What the likelihood alone tells about log spreads ``(p, p)``, expected."""
        p = self.sums.n_params
        held = self.priors.of(parameters[:p], self.slopes, self.sums.n_sites)[2]
        return np.asarray(self._negative(parameters)[2][:p, :p] - held)

    def model(self, parameters: Array) -> MixedModel:
        at, p = self.solve(parameters), self.sums.n_params
        outer = at.root[:, None] * at.root
        precision = self.sums.G * at.weight[:, None, None]
        short = self.sums.short
        if isinstance(at.inverse, LowRank):
            covariance = np.empty_like(precision)
            for u, one in enumerate(at.inverse.opened(at.covariance / outer)):
                covariance[u] = outer * one
        else:
            keep = at.root[:, None] * at.inverse / at.root  # I - C S
            covariance = outer * at.inverse + keep @ at.covariance @ np.swapaxes(keep, 1, 2)
        return MixedModel(
            mean=at.mean,
            mean_covariance=at.covariance,
            spread=at.root**2,
            mean_precision=np.where(self.intercepts, FLAT, np.exp(-parameters[p])),
            noise=1.0 / at.weight,
            theta=at.mean + at.effects * at.root,
            covariance=covariance,
            precision=precision,
            score=self.sums.c * at.weight[:, None],
            degrees=(precision * covariance).sum(axis=(1, 2)),
            log_likelihood=at.log_likelihood,
            parameters=parameters,
            short=None if short is None else short.scaled(np.ones(p), at.weight),
        )


@dataclass(frozen=True, eq=False)
class _Solved:
    """The model at given spreads, ridge and noise; effects ``(V, p)`` in units of their spread."""

    root: Array  # (p,) square roots of the spreads
    weight: Array  # (V,) 1 / noise
    inverse: Array | LowRank  # (V, p, p) of B; or what it leaves of I, of low rank
    covariance: Array  # (p, p) of the mean
    mean: Array
    effects: Array
    log_likelihood: float
