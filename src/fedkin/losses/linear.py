"""Least squares."""

from __future__ import annotations

import numpy as np

from fedkin._base import Array
from fedkin.losses.interface import given
from fedkin.losses.rowwise import ScalarLoss


class LinearLoss(ScalarLoss):
    """``m = (y - eta)^2 / 2``."""

    name = "linear"
    quadratic = True
    strictly_convex = True
    minimiser = "always"
    compiled = True

    def _value(self, eta: Array, y: Array) -> Array:
        return 0.5 * (y - eta) ** 2

    def _slope(self, eta: Array, y: Array) -> Array:
        return eta - y

    def _curvature(self, eta: Array, y: Array) -> Array:
        return np.ones_like(eta)

    def _conjugate(self, a: Array, y: Array) -> Array:
        return 0.5 * a**2 + a * y

    def _mean(self, eta: Array) -> Array:
        return eta

    def curvature_bound(self) -> float:
        return 1.0

    def dispersion(self, theta: Array, X: Array, y: Array | None, offset: Array | None = None) -> float:
        residual = self.predictors(theta, X, offset)[:, 0] - given(y)
        return float(residual @ residual / max(X.shape[0] - X.shape[1], 1))

    @property
    def estimates_scale(self) -> bool:
        return True

    def least_squares_rows(self, X: Array, y: Array | None, offset: Array | None) -> tuple[Array, Array]:
        return X, given(y) if offset is None else given(y) - offset

    def quadratic_terms(self, X: Array, y: Array | None, offset: Array | None) -> tuple[Array, Array, Array]:
        X, y = self.least_squares_rows(X, y, offset)
        n, transposed = X.shape[1], np.swapaxes(X, 1, 2)
        A = np.matmul(transposed, X) / n
        return A, np.matmul(transposed, y[:, :, None])[:, :, 0] / n, 0.5 * (y**2).mean(axis=1)
