"""Positive amounts."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammainc

from fedkin._base import Array, Mask
from fedkin.losses.base import LOGIT_SIZE, ScalarLoss, given, secant_curvature, xlogx


class GammaLoss(ScalarLoss):
    """``m = y exp(-eta) + eta``: log link, positive amounts ``y`` whose standard deviation grows with their mean."""

    name = "gamma"
    target = "positive"
    link = "log"
    metric = "mean gamma deviance"
    purpose = "positive amounts such as costs"
    wanted = "targets above 0"
    strictly_convex = True
    minimiser = "always"
    estimates_scale = True

    def loss(self, eta: Array, y: Array) -> Array:
        return y * np.exp(-eta) + eta

    @staticmethod
    def slope(eta: Any, y: Any, parameter: float) -> Any:
        return 1.0 - y * np.exp(-eta)

    def curvature(self, eta: Array, y: Array) -> Array:
        return np.asarray(y * np.exp(-eta))

    def conjugate(self, a: Array, y: Array) -> Array:
        ratio = 1.0 - a
        return np.asarray(xlogx(ratio) - ratio * (1.0 + np.log(y)))

    def mean(self, eta: Array) -> Array:
        return np.exp(eta)

    def row_errors(self, y: Array, response: Array) -> Array:
        ratio = y / np.maximum(response, np.finfo(float).tiny)
        return np.asarray(2.0 * (ratio - 1.0 - np.log(ratio)))

    def observation_interval(self, eta: Array, error: Array, noise: float, level: float) -> tuple[Array, Array]:
        """Return quantiles of amounts whose log mean is uncertain, by quadrature."""
        nodes, weights = np.polynomial.hermite_e.hermegauss(15)
        weights = weights / weights.sum()
        shape, means = 1.0 / noise, eta[:, None] + error[:, None] * nodes
        ends = []
        for chance in ((1 - level) / 2, (1 + level) / 2):
            low, high = means.min(axis=1) - 60.0 * max(noise, 1.0), means.max(axis=1) + 10.0 * max(noise, 1.0)
            for _ in range(60):
                middle = 0.5 * (low + high)
                enough = gammainc(shape, shape * np.exp(middle[:, None] - means)) @ weights >= chance
                high, low = np.where(enough, middle, high), np.where(enough, low, middle)
            ends.append(np.exp(high))
        return ends[0], ends[1]

    def cautious_at(self, eta: Array, y: Array) -> Array:
        return secant_curvature(self, eta, y)

    def plausible_size(self, y: Array, offset: Array | None) -> Array:
        size = np.log(y) if offset is None else np.log(y) - offset
        return np.asarray(LOGIT_SIZE + (size**2).mean(axis=1))

    def working_response(self, y: Array) -> tuple[Array, Array | None]:
        return np.log(y), None

    def refused(self, y: NDArray[Any]) -> Mask:
        return np.asarray(~(y > 0))

    def dispersion(
        self, theta: Array, X: Array, y: Array | None, offset: Array | None = None, weight: Array | None = None
    ) -> float:
        weight = np.ones(len(X)) if weight is None else weight
        residual = given(y) / self.predict(theta, X, offset) - 1.0
        return float(weight @ residual**2 / max(float(weight.sum()) - X.shape[1], 1.0))
