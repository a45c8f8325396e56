"""Define the negative binomial loss for overdispersed counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from scipy.optimize import brentq
from scipy.special import digamma, xlogy

from fedkin._base import TINY, Array, Index, check_positive
from fedkin.losses.base import Maybe, xlogx
from fedkin.losses.poisson import PoissonLoss, negative_binomial_cdf

#: Range of an estimated alpha; at the lower end counts are practically Poisson.
_LEAST, _MOST = 1e-6, 100.0
#: Maximum number of steps for estimating alpha, tolerance for its logarithm, and longest step of eta.
_STEPS, _CHANGE, _LEAP = 100, 1e-4, 2.0
#: Maximum number of stored products of two columns per row.
_CELLS = 5e6


@dataclass(frozen=True)
class NegativeBinomialLoss(PoissonLoss):
    """``m = (y + 1 / alpha) log(1 + alpha exp(eta)) - y eta``: log link, counts with variance ``mu + alpha mu^2``.

    The loss name "negbinomial" estimates ``alpha`` from the rows (`NegativeBinomialLoss.from_rows`).
    """

    alpha: float = 1.0

    name = "negbinomial"
    metric = "mean negative binomial deviance"
    boosting: ClassVar[str | None] = None
    canonical: ClassVar[bool] = False
    purpose = "counts that vary more than Poisson counts"

    def __post_init__(self) -> None:
        check_positive("alpha of the negbinomial loss", self.alpha)

    @classmethod
    def from_rows(
        cls, X: Array, y: Maybe, site: Index, offset: Maybe = None, weight: Maybe = None
    ) -> NegativeBinomialLoss:
        """Return the loss with alpha estimated from these rows in a model with site-specific coefficients.

        Site coefficients are normal around common ones, with estimated variances. Alpha maximises the likelihood with
        the Cox-Reid adjustment; ``X (n, q)`` has no column of ones.
        """
        if y is None or y.dtype.kind not in "fiub" or not len(y) or cls().refused(y).any() or not y.any():
            return cls()
        w = np.ones(len(y)) if weight is None else np.asarray(weight, dtype=np.float64)
        return cls(_learned_alpha(X, np.asarray(y, dtype=np.float64), site, 0.0 if offset is None else offset, w))

    @property
    def parameter(self) -> float:  # type: ignore[override]
        return self.alpha

    def loss(self, eta: Array, y: Array) -> Array:
        return np.asarray((y + 1.0 / self.alpha) * np.logaddexp(0.0, eta + np.log(self.alpha)) - y * eta)

    @staticmethod
    def slope(eta: Any, y: Any, parameter: float) -> Any:
        return (parameter * y + 1.0) / (parameter + np.exp(-eta)) - y

    def curvature(self, eta: Array, y: Array) -> Array:
        other = np.exp(-eta)
        # of huge predictors, infinity over infinity
        share = np.divide(other, self.alpha + other, out=np.ones_like(other), where=np.isfinite(other))
        return np.asarray((self.alpha * y + 1.0) * share / (self.alpha + other))

    def conjugate(self, a: Array, y: Array) -> Array:
        size = y + 1.0 / self.alpha
        share = (a + y) / size
        return np.asarray(size * (xlogx(share) + xlogx(1.0 - share) - share * np.log(self.alpha)))

    def cdf(self, value: Array, mean: Array, noise: float) -> Array:
        return negative_binomial_cdf(value, mean, 1.0 / self.alpha)

    def row_errors(self, y: Array, response: Array) -> Array:
        mean, size = np.maximum(response, TINY), 1.0 / self.alpha
        return np.asarray(2 * (xlogy(y, y / mean) - (y + size) * np.log1p((y - mean) / (size + mean))))

    def informative_curvature(self, y: Array) -> Array:
        most = super().informative_curvature(y)
        return np.asarray(most / (1.0 + self.alpha * most))

    def remark(self, noise: float) -> None:
        return None


def _learned_alpha(X: Array, y: Array, site: Index, offset: Array | float, weight: Array) -> float:
    """Fit ``eta = offset + (1, x)'b_u`` with normal ``b_u`` by Fisher scoring, and alpha along with it."""
    # a subsample of rows, in the order of sites, is sufficient
    p = X.shape[1] + 1
    some = np.argsort(site, kind="stable")[:: 1 + int(len(y) * p * p / _CELLS)]
    X, y, w, shift = X[some], y[some], weight[some], np.broadcast_to(offset, y.shape)[some]
    sd = X.std(axis=0)
    columns = np.column_stack([np.ones(len(y)), (X - X.mean(axis=0)) / np.where(sd > 0, sd, 1.0)])
    _, starts, place = np.unique(site[some], return_index=True, return_inverse=True)
    pairs = columns[:, :, None] * columns[:, None, :]
    level = np.log(max(float(w @ y / (w @ np.exp(shift))), 1e-300))
    eta, alpha, variance, leverage = np.full(len(y), level) + shift, 0.5, np.full(p, 0.25), np.zeros(len(y))
    for _ in range(_STEPS):
        mu = np.exp(np.clip(eta, -700.0, 700.0))
        before, alpha = alpha, _best_alpha(y, mu, w, leverage)
        curvature = w * mu / (1.0 + alpha * mu)
        pull = curvature * (eta - shift) + w * (y - mu) / (1.0 + alpha * mu)
        H = np.add.reduceat(pairs * curvature[:, None, None], starts)
        c = np.add.reduceat(columns * pull[:, None], starts)
        P = np.diag(1.0 / variance)
        inverse = np.linalg.inv(H + P)
        kept = P @ inverse @ H  # the precision of the rows after integrating out the site's coefficients
        centre = np.linalg.lstsq(kept.sum(axis=0), np.einsum("ij,ujk,uk->i", P, inverse, c), rcond=1e-10)[0]
        b = np.einsum("ujk,uk->uj", inverse, c + P @ centre)
        variance = np.maximum(((b - centre) ** 2 + np.einsum("ujj->uj", inverse)).mean(axis=0), 1e-8)
        new = (columns * b[place]).sum(axis=1) + shift
        moved = np.clip(new - eta, -_LEAP, _LEAP)
        eta = eta + moved
        leverage = curvature * np.einsum("nij,nij->n", pairs, inverse[place])
        if abs(np.log(alpha / before)) < _CHANGE and np.abs(moved).max() < 1e-2:
            break
    return alpha


def _best_alpha(y: Array, mu: Array, weight: Array, leverage: Array) -> float:
    """Return the root of the derivative in alpha of the likelihood with Cox and Reid's correction."""

    def score(log: float) -> float:
        a = np.exp(log)
        r, share = 1.0 / a, mu / (1.0 + a * mu)
        each = r * y - r * r * (digamma(y + r) - digamma(r)) - (y + r) * share + r * r * np.log1p(a * mu)
        return float(weight @ each + 0.5 * leverage @ share)

    low, high = float(np.log(_LEAST)), float(np.log(_MOST))
    if score(low) <= 0:
        return _LEAST
    return _MOST if score(high) >= 0 else float(np.exp(brentq(score, low, high, xtol=1e-6)))
