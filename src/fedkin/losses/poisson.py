"""Counts."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import pdtr

from fedkin._base import Array, Index, Mask
from fedkin.losses.base import LOGIT_SIZE, ScalarLoss, secant_curvature, xlogx

#: Whole numbers with a larger mean than this are rarely counts of events, unless 0 is among them.
_MEAN_OF_COUNTS = 10.0


class PoissonLoss(ScalarLoss):
    """``m = exp(eta) - y eta``: log link, counts ``y >= 0``."""

    name = "poisson"
    target = "count"
    link = "log"
    metric = "mean Poisson deviance"
    purpose = "counts of events"
    wanted = "counts of at least 0"
    strictly_convex = True
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

    def mean(self, eta: Array) -> Array:
        return np.exp(eta)

    def row_errors(self, y: Array, response: Array) -> Array:
        mean, positive = np.maximum(response, np.finfo(float).tiny), y > 0
        return np.asarray(2 * (np.where(positive, y * np.log(np.where(positive, y, 1.0) / mean), 0.0) - y + mean))

    def observation_interval(self, eta: Array, error: Array, noise: float, level: float) -> tuple[Array, Array]:
        """Return quantiles of counts whose log mean is uncertain, by quadrature."""
        nodes, weights = np.polynomial.hermite_e.hermegauss(15)
        weights = weights / weights.sum()
        rates = np.exp(eta[:, None] + error[:, None] * nodes)
        ends = []
        for chance in ((1 - level) / 2, (1 + level) / 2):
            low, high = np.full(len(eta), -1.0), np.ceil(rates.max(axis=1) + 10 * np.sqrt(rates.max(axis=1)) + 10)
            while (high - low > 1).any():
                middle = np.floor((low + high) / 2)
                enough = (pdtr(middle[:, None], rates) @ weights) >= chance
                high, low = np.where(enough, middle, high), np.where(enough, low, middle)
            ends.append(high)
        return ends[0], ends[1]

    def cautious_at(self, eta: Array, y: Array) -> Array:
        return secant_curvature(self, eta, y)

    def plausible_size(self, y: Array, offset: Array | None) -> Array:
        offset = np.zeros_like(y) if offset is None else offset
        top = offset.max(axis=1)
        exposure = top + np.log(np.exp(offset - top[:, None]).mean(axis=1))
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
