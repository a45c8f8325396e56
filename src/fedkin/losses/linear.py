"""Least squares."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.special import ndtri

from fedkin._base import Array
from fedkin.losses.base import Maybe, ScalarLoss, given, squared_dispersion


class LinearLoss(ScalarLoss):
    """Squared loss ``m = (y - eta)^2 / 2``."""

    name = "linear"
    link = "identity"
    metric = "mean squared error"
    boosting = "regression"
    curvature_bound = 1.0
    quadratic = True
    strictly_convex = True
    minimiser = "always"
    estimates_scale = True

    def loss(self, eta: Array, y: Array) -> Array:
        return 0.5 * (y - eta) ** 2

    @staticmethod
    def slope(eta: Any, y: Any, parameter: float) -> Any:
        return eta - y

    def curvature(self, eta: Array, y: Array) -> Array:
        return np.ones_like(eta)

    def conjugate(self, a: Array, y: Array) -> Array:
        return 0.5 * a**2 + a * y

    def row_errors(self, y: Array, response: Array) -> Array:
        return np.square(y - response)

    def observation_interval(self, eta: Array, error: Array, noise: float, level: float) -> tuple[Array, Array]:
        half = ndtri(0.5 + 0.5 * level) * np.sqrt(error**2 + noise)
        return eta - half, eta + half

    def dispersion(self, theta: Array, X: Array, y: Maybe, offset: Maybe = None, weight: Maybe = None) -> float:
        return squared_dispersion(given(y) - self.predict(theta, X, offset), X.shape[1], weight)

    def least_squares_rows(self, X: Array, y: Maybe, offset: Maybe, weight: Maybe = None) -> tuple[Array, Array]:
        y = given(y) if offset is None else given(y) - offset
        if weight is None:
            return X, y
        root = np.sqrt(weight)
        return root[..., None] * X, root * y

    def quadratic_terms(self, X: Array, y: Maybe, offset: Maybe, weight: Maybe = None) -> tuple[Array, Array, Array]:
        X, y = self.least_squares_rows(X, y, offset, weight)
        n, transposed = X.shape[1], np.swapaxes(X, 1, 2)
        A = np.matmul(transposed, X) / n
        return A, np.matmul(transposed, y[:, :, None])[:, :, 0] / n, 0.5 * (y**2).mean(axis=1)
