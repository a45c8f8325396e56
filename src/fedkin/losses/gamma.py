"""Positive amounts."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammainc

from fedkin._base import TINY, Array, Mask
from fedkin.losses.base import LOGIT_SIZE, LogLinkLoss, Maybe, given, squared_dispersion, xlogx


class GammaLoss(LogLinkLoss):
    """Gamma loss ``m = y exp(-eta) + eta`` with log link, for positive ``y`` with sd proportional to the mean."""

    name = "gamma"
    target = "positive"
    metric = "mean gamma deviance"
    purpose = "positive amounts such as costs"
    wanted = "targets above 0"
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

    def cdf(self, value: Array, mean: Array, noise: float) -> Array:
        return np.asarray(gammainc(1.0 / noise, value / (noise * mean)))

    def row_errors(self, y: Array, response: Array) -> Array:
        ratio = y / np.maximum(response, TINY)
        return np.asarray(2.0 * (ratio - 1.0 - np.log(ratio)))

    def dispersion(self, theta: Array, X: Array, y: Maybe, offset: Maybe = None, weight: Maybe = None) -> float:
        return squared_dispersion(given(y) / self.predict(theta, X, offset) - 1.0, X.shape[1], weight)

    def plausible_size(self, y: Array, offset: Maybe) -> Array:
        return LOGIT_SIZE + super().plausible_size(np.log(y), offset)

    def working_response(self, y: Array) -> tuple[Array, Maybe]:
        return np.log(y), None

    def refused(self, y: NDArray[Any]) -> Mask:
        return np.asarray(~(y > 0))
