"""Huber's loss."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedkin._base import Array
from fedkin.errors import ParameterError
from fedkin.losses.interface import given
from fedkin.losses.linear import LinearLoss
from fedkin.losses.rowwise import ScalarLoss


@dataclass(frozen=True)
class HuberLoss(ScalarLoss):
    """Squared loss for residuals up to ``delta``, absolute beyond it."""

    delta: float = 1.345

    name = "huber"
    minimiser = "always"
    compiled = True

    def __post_init__(self) -> None:
        if not self.delta > 0:
            raise ParameterError(f"huber delta must be positive, got {self.delta!r}")

    @property
    def _kernel_parameter(self) -> float:
        return self.delta

    def _value(self, eta: Array, y: Array) -> Array:
        size = np.abs(y - eta)
        return np.where(size <= self.delta, 0.5 * size**2, self.delta * (size - 0.5 * self.delta))

    def _slope(self, eta: Array, y: Array) -> Array:
        return np.clip(eta - y, -self.delta, self.delta)

    def _curvature(self, eta: Array, y: Array) -> Array:
        return np.where(np.abs(y - eta) <= self.delta, 1.0, 0.0)

    def _conjugate(self, a: Array, y: Array) -> Array:
        # the tolerance admits rounding on the boundary of the box
        inside = np.abs(a) <= self.delta * (1 + 1e-12)
        return np.asarray(np.where(inside, 0.5 * a**2 + a * y, np.inf))

    def _mean(self, eta: Array) -> Array:
        return eta

    def repair_at(self, eta: Array, y: Array) -> Array:
        # rows near the corner may hardly move: their slope must stay within [-delta, delta]
        room = np.maximum(1.0 - np.abs(y - eta[..., 0]) / self.delta, 0.0)
        return room[..., None, None]

    def cautious_at(self, eta: Array, y: Array) -> Array:
        # iteratively reweighted least squares: the parabola above the loss that touches it at eta
        weight = self.delta / np.maximum(np.abs(y - eta[..., 0]), self.delta)
        return np.asarray(weight)[..., None, None]

    def curvature_bound(self) -> float:
        return 1.0

    def working_response(self, y: Array) -> tuple[Array, Array | None]:
        return y, None

    def dispersion(self, theta: Array, X: Array, y: Array | None, offset: Array | None = None) -> float:
        residual = self.predictors(theta, X, offset)[:, 0] - given(y)
        psi = np.clip(residual, -self.delta, self.delta)
        n, p = X.shape
        inliers = max(float((np.abs(residual) <= self.delta).mean()), 1.0 / n)
        # Huber's proposal: E psi^2 / (E psi')  against a Hessian that already carries E psi'; the square is his (1973)
        # correction for estimating p parameters from n rows
        correction = (1.0 + p / n * (1.0 - inliers) / inliers) ** 2
        return float(correction * (psi @ psi) / (max(n - p, 1) * inliers))

    def lent_dispersion(self, theta: Array, X: Array, y: Array | None, offset: Array | None = None) -> float:
        # a fit through all its points is as noisy as least squares, however robust the loss
        return LinearLoss().dispersion(theta, X, y, offset)

    @property
    def estimates_scale(self) -> bool:
        return True
