"""Define the loss whose minimiser is the mean of the features."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedkin._base import Array, check_positive
from fedkin.losses.base import Loss, Maybe


@dataclass(frozen=True)
class MeanLoss(Loss):
    """Mean loss ``m(z; theta) = ||z - theta||^2 / (2 variance)`` for a row of features ``z``, without a target.

    ``variance`` is the known variance of each coordinate about its mean; it may differ by site.
    """

    variance: float = 1.0

    name = "mean"
    target = None
    metric = "mean squared distance"
    location = True
    quadratic = True
    estimates_scale = True

    def __post_init__(self) -> None:
        check_positive("variance", self.variance)

    @property
    def parameter(self) -> float:  # type: ignore[override]
        return 1.0 / self.variance

    def value(self, theta: Array, X: Array, y: Maybe, offset: Maybe = None) -> float:
        return float(0.5 * self.parameter * ((X - theta) ** 2).sum() / X.shape[0])

    def scores(self, theta: Array, X: Array, y: Maybe, offset: Maybe = None) -> Array:
        return np.asarray(self.parameter * (theta - X))

    def hessian(self, theta: Array, X: Array, y: Maybe, offset: Maybe = None) -> Array:
        return self.parameter * np.eye(X.shape[1])

    def predict(self, theta: Array, X: Array, offset: Maybe = None) -> Array:
        return np.broadcast_to(theta, X.shape).copy()

    def row_errors(self, y: Array, response: Array) -> Array:
        return np.asarray(((y - response) ** 2).sum(axis=1))

    def dispersion(self, theta: Array, X: Array, y: Maybe, offset: Maybe = None, weight: Maybe = None) -> float:
        weight = np.ones(X.shape[0]) if weight is None else weight
        squares = float(weight @ ((X - theta) ** 2).sum(axis=1))
        return float(self.parameter * squares / max((weight.sum() - 1) * X.shape[1], 1))

    def quadratic_terms(self, X: Array, y: Maybe, offset: Maybe, weight: Maybe = None) -> tuple[Array, Array, Array]:
        w = np.full(X.shape[:2], self.parameter) if weight is None else self.parameter * weight
        A, b = np.full(X.shape[0], self.parameter), (w[:, :, None] * X).mean(axis=1)
        return A, b, 0.5 * (w * (X**2).sum(axis=2)).mean(axis=1)

    def row_curvatures(self, theta: Array, X: Array, y: Maybe, offset: Maybe) -> Array:
        # of each coordinate, not their sum: all directions are alike
        return np.full(X.shape[0], self.parameter)

    def compact_scores(self, theta: Array, X: Array, y: Maybe, offset: Maybe) -> Array:
        return np.asarray(self.parameter * (theta[:, None, :] - X))
