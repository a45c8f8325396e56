"""The mean of the rows."""

from __future__ import annotations

import numpy as np

from fedkin._base import Array
from fedkin.losses.interface import Loss


class MeanLoss(Loss):
    """``m(z; theta) = ||z - theta||^2 / 2`` with ``z`` the row of features; there is no target."""

    name = "mean"
    needs_target = False
    location = True
    quadratic = True
    compiled = True

    def n_params(self, n_features: int) -> int:
        return n_features

    def value(self, theta: Array, X: Array, y: Array | None, offset: Array | None = None) -> float:
        return float(0.5 * ((X - theta) ** 2).sum() / X.shape[0])

    def gradient(self, theta: Array, X: Array, y: Array | None, offset: Array | None = None) -> Array:
        return np.asarray(theta - X.mean(axis=0))

    def scores(self, theta: Array, X: Array, y: Array | None, offset: Array | None = None) -> Array:
        return theta - X

    def hessian(self, theta: Array, X: Array, y: Array | None, offset: Array | None = None) -> Array:
        return np.eye(X.shape[1])

    def predict(self, theta: Array, X: Array, offset: Array | None = None) -> Array:
        return np.broadcast_to(theta, X.shape).copy()

    def dispersion(self, theta: Array, X: Array, y: Array | None, offset: Array | None = None) -> float:
        n, p = X.shape
        return float(((X - theta) ** 2).sum() / max((n - 1) * p, 1))

    @property
    def estimates_scale(self) -> bool:
        return True

    def quadratic_terms(self, X: Array, y: Array | None, offset: Array | None) -> tuple[Array, Array, Array]:
        return np.ones(X.shape[0]), X.mean(axis=1), 0.5 * (X**2).sum(axis=2).mean(axis=1)

    def row_curvatures(self, theta: Array, X: Array, y: Array | None, offset: Array | None) -> Array:
        # of each coordinate, not their sum: all directions are alike
        return np.ones(X.shape[0])

    def compact_scores(self, theta: Array, X: Array, y: Array | None, offset: Array | None) -> Array:
        return theta[:, None, :] - X

    def batch_gradients(self, theta: Array, X: Array, y: Array | None, offset: Array | None) -> Array:
        return np.asarray(theta - X.sum(axis=1) / X.shape[1])
