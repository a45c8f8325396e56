"""The mean of the features."""

from __future__ import annotations

import numpy as np

from fedkin._base import Array
from fedkin.losses.base import Loss


class MeanLoss(Loss):
    """``m(z; theta) = ||z - theta||^2 / 2`` with ``z`` the row of features; there is no target."""

    name = "mean"
    target = None
    metric = "mean squared distance"
    location = True
    quadratic = True
    estimates_scale = True

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

    def row_errors(self, y: Array, response: Array) -> Array:
        return np.asarray(((y - response) ** 2).sum(axis=1))

    def dispersion(
        self, theta: Array, X: Array, y: Array | None, offset: Array | None = None, weight: Array | None = None
    ) -> float:
        weight = np.ones(X.shape[0]) if weight is None else weight
        return float(weight @ ((X - theta) ** 2).sum(axis=1) / max((weight.sum() - 1) * X.shape[1], 1))

    def quadratic_terms(
        self, X: Array, y: Array | None, offset: Array | None, weight: Array | None = None
    ) -> tuple[Array, Array, Array]:
        if weight is None:
            return np.ones(X.shape[0]), X.mean(axis=1), 0.5 * (X**2).sum(axis=2).mean(axis=1)
        mean, squares = (weight[:, :, None] * X).mean(axis=1), (weight * (X**2).sum(axis=2)).mean(axis=1)
        return np.ones(X.shape[0]), mean, 0.5 * squares

    def row_curvatures(self, theta: Array, X: Array, y: Array | None, offset: Array | None) -> Array:
        # of each coordinate, not their sum: all directions are alike
        return np.ones(X.shape[0])

    def compact_scores(self, theta: Array, X: Array, y: Array | None, offset: Array | None) -> Array:
        return theta[:, None, :] - X

    def batch_gradients(self, theta: Array, X: Array, y: Array | None, offset: Array | None) -> Array:
        return np.asarray(theta - X.sum(axis=1) / X.shape[1])
