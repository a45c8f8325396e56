"""Several classes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax, logsumexp, ndtri, softmax

from fedkin._base import Array, Mask, check_whole
from fedkin.errors import DataError
from fedkin.losses.base import ClassLoss, xlogx

#: Number of antithetic pairs of points for averaging responses.
PAIRS = 64


@dataclass(frozen=True)
class MultinomialLoss(ClassLoss):
    """Multinomial logistic loss for classes ``0 .. n_classes - 1``, with reference class 0.

    ``theta`` is ``(n_classes - 1, q)`` flattened, with one row of coefficients for each class except the first.
    """

    n_classes: int = 3

    name = "multinomial"
    link = "softmax"
    curvature_bound = 0.5
    slope_bound = 1.0

    def __post_init__(self) -> None:
        check_whole("n_classes", self.n_classes, least=2)

    @classmethod
    def from_target(cls, y: NDArray[Any] | None) -> MultinomialLoss:
        if y is None or y.size == 0 or y.dtype.kind not in "fiub":
            raise DataError("the multinomial loss needs numeric classes 0, 1, 2, ... as target")
        return cls.from_classes(int(y.max()) + 1)

    @classmethod
    def from_classes(cls, n_classes: int) -> MultinomialLoss:
        return cls(max(n_classes, 2))

    @property
    def n_outputs(self) -> int:  # type: ignore[override]
        return self.n_classes - 1

    def value_at(self, eta: Array, y: Array) -> Array:
        return np.asarray(logsumexp(with_reference(eta), axis=-1) - (self._onehot(y) * eta).sum(axis=-1))

    def slope_at(self, eta: Array, y: Array) -> Array:
        return self.response(eta)[..., 1:] - self._onehot(y)

    def curvature_at(self, eta: Array, y: Array) -> Array:
        mu = self.response(eta)[..., 1:]
        out = -mu[..., :, None] * mu[..., None, :]
        diagonal = np.arange(self.n_outputs)
        out[..., diagonal, diagonal] += mu
        return out

    def conjugate_at(self, a: Array, y: Array) -> Array:
        mu = a + self._onehot(y)
        return np.asarray(xlogx(mu).sum(axis=-1) + xlogx(1.0 - mu.sum(axis=-1)))

    def response(self, eta: Array) -> Array:
        return np.asarray(softmax(with_reference(eta), axis=-1))

    def averaged_predictor(self, eta: Array, covariance: Array) -> Array:
        return averaged_softmax(eta, covariance)

    @property
    def wanted(self) -> str:  # type: ignore[override]
        return f"classes 0..{self.n_classes - 1}"

    def refused(self, y: NDArray[Any]) -> Mask:
        return np.asarray((y < 0) | (y >= self.n_classes) | (y != np.floor(y)))

    def _onehot(self, y: Array) -> Array:
        return np.asarray(y[..., None] == np.arange(1, self.n_classes), dtype=np.float64)


def with_reference(eta: Array) -> Array:
    """Return log odds ``(..., k + 1)``, starting with the 0 of the reference class."""
    return np.concatenate([np.zeros_like(eta[..., :1]), eta], axis=-1)


def averaged_softmax(eta: Array, covariance: Array) -> Array:
    """Return log odds ``(..., k)`` against the first class for probabilities averaged over normal log odds.

    Means are taken over `normal_points`; for four classes the error is at most 0.02.
    """
    size = np.einsum("...kk->...", covariance)[..., None, None]
    root = np.linalg.cholesky(covariance + (1e-12 * size + 1e-300) * np.eye(eta.shape[-1]))
    logs = np.full((*eta.shape[:-1], eta.shape[-1] + 1), -np.inf)
    for z in normal_points(eta.shape[-1]):
        logs = np.logaddexp(logs, log_softmax(with_reference(eta + root @ z), axis=-1))
    return np.asarray(np.where(size[..., 0] > 0, logs[..., 1:] - logs[..., :1], eta))


@cache
def normal_points(k: int) -> Array:
    """Return points ``(2 PAIRS, k)`` placed evenly over a standard normal, with its mean and covariance."""
    root = 2.0
    for _ in range(50):  # of x ** (k + 1) = x + 1, which places them most evenly
        root = (1.0 + root) ** (1.0 / (k + 1))
    number = np.arange(1, max(PAIRS, 4 * k) + 1)
    points = ndtri((0.5 + number[:, None] * root ** -np.arange(1.0, k + 1)) % 1.0)
    points = np.linalg.solve(np.linalg.cholesky(points.T @ points / len(points)), points.T).T
    return np.concatenate([points, -points])
