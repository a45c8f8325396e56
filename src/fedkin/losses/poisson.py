"""Counts."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainc, logsumexp, pdtr, xlogy

from fedkin._base import TINY, Array, Index, Mask
from fedkin.errors import argument
from fedkin.losses.base import LOGIT_SIZE, LogLinkLoss, Maybe, xlogx

#: Whole numbers with a larger mean than this are rarely counts of events, unless they include 0.
_MEAN_OF_COUNTS = 10.0
#: Ratio of variance to mean above which counts are called overdispersed.
_OVERDISPERSED = 1.5


class PoissonLoss(LogLinkLoss):
    """Poisson loss ``m = exp(eta) - y eta`` with log link, for counts ``y >= 0``."""

    name = "poisson"
    canonical: ClassVar[bool] = True
    target = "count"
    metric = "mean Poisson deviance"
    boosting: ClassVar[str | None] = "poisson"
    purpose = "counts of events"
    wanted = "counts of at least 0"
    minimiser = "separable"

    @classmethod
    def suits(cls, y: NDArray[Any]) -> bool:
        if y.dtype.kind not in "fiu" or y.size == 0 or y.min() < 0 or (y != np.floor(y)).any():
            return False
        return np.unique(y).size > 2 and bool(y.min() == 0 or y.mean() <= _MEAN_OF_COUNTS)

    def loss(self, eta: Array, y: Array) -> Array:
        return np.exp(eta) - y * eta

    @staticmethod
    def slope(eta: Any, y: Any, parameter: float) -> Any:
        return np.exp(eta) - y

    def curvature(self, eta: Array, y: Array) -> Array:
        return np.exp(eta)

    def conjugate(self, a: Array, y: Array) -> Array:
        mu = a + y
        return xlogx(mu) - mu

    def cdf(self, value: Array, mean: Array, noise: float) -> Array:
        # overdispersed counts have variance noise * mean: negative binomial
        if noise <= 1:
            return np.where(value < 0, 0.0, pdtr(np.floor(np.maximum(value, 0.0)), mean))
        return negative_binomial_cdf(value, mean, mean / (noise - 1.0))

    def observation_interval(self, eta: Array, error: Array, noise: float, level: float) -> tuple[Array, Array]:
        low = np.floor(self.quantile((1 - level) / 2, eta, error, noise))
        # where 0 alone is likely, less than half of the rest lies below: the upper end then comes nearer
        below = self.averaged_cdf(low - 1.0, eta, error, noise)
        return low, np.floor(self.quantile(below + level, eta, error, noise))

    def row_errors(self, y: Array, response: Array) -> Array:
        mean = np.maximum(response, TINY)
        return np.asarray(2 * (xlogy(y, y / mean) - y + mean))

    def remark(self, noise: float) -> str | None:
        if noise < _OVERDISPERSED:
            return None
        return (
            f"counts vary {noise:.3g} times as much as Poisson counts with the same means (overdispersion): "
            f"{argument('loss', 'negbinomial')} estimates the overdispersion and weights rows accordingly"
        )

    def plausible_size(self, y: Array, offset: Maybe) -> Array:
        exposure = 0.0 if offset is None else logsumexp(offset, axis=1) - np.log(y.shape[1])
        rate = np.log(np.maximum(y.mean(axis=1), 0.5 / y.shape[1])) - exposure
        return np.asarray(LOGIT_SIZE + rate**2)

    def working_response(self, y: Array) -> tuple[Array, Array]:
        # the usual first step of a log link: log(y + something), with that many counts as weight
        raised = y + 0.5 * np.maximum(y.mean(axis=1, keepdims=True), 1e-8)
        return np.log(raised), raised

    def informative_curvature(self, y: Array) -> Array:
        return np.asarray(y.max(axis=1))

    def constant_diverges(self, y: Array, group: Index) -> Mask:
        return np.asarray(np.bincount(group, weights=y) == 0)

    def refused(self, y: NDArray[Any]) -> Mask:
        return np.asarray(y < 0)


def negative_binomial_cdf(value: Array, mean: Array, size: Array | float) -> Array:
    """Return the probability of counts up to ``value``, for this mean and the variance ``mean + mean^2 / size``."""
    return np.asarray(betainc(size, np.maximum(np.floor(value) + 1.0, 0.0), size / (size + mean)))
