"""Define the Huber loss: least squares for small residuals, absolute deviations for large ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedkin._base import Array, Index, check_positive
from fedkin.losses.base import Maybe, ScalarLoss, given
from fedkin.losses.robust import EFFICIENT, robust_scale, weighted_median


@dataclass(frozen=True)
class HuberLoss(ScalarLoss):
    """Huber loss: quadratic for residuals up to ``delta``, linear beyond.

    ``delta`` is in units of the target. The loss name "huber" uses 1.345 robust standard deviations of the rows
    (`HuberLoss.from_rows`).
    """

    delta: float = EFFICIENT

    name = "huber"
    link = "identity"
    metric = "mean absolute error"
    purpose = "numbers with outliers"
    curvature_bound = 1.0
    minimiser = "always"
    estimates_scale = True

    @property
    def slope_bound(self) -> float:  # type: ignore[override]
        return self.delta

    def __post_init__(self) -> None:
        check_positive("delta of the huber loss", self.delta)

    @classmethod
    def from_rows(cls, X: Array, y: Maybe, site: Index, offset: Maybe = None, weight: Maybe = None) -> HuberLoss:
        """Return the loss with its threshold at 1.345 robust standard deviations of these rows.

        The standard deviation is the median absolute residual of a Huber fit with common slopes and site intercepts,
        divided by 0.6745; ``X (n, q)`` has no column of ones. If it is 0 (more than half of the targets are equal or
        fitted exactly), columns are dropped; then the mean absolute residual is used.
        """
        if y is None or y.dtype.kind not in "fiub":
            return cls()
        y = np.asarray(y, dtype=np.float64) - (0.0 if offset is None else offset)
        w = np.ones(len(y)) if weight is None else np.asarray(weight, dtype=np.float64)
        several = np.bincount(site, weights=w)[site] > 1
        if not several.any():  # no site has its own intercept
            several, site = np.ones(len(y), dtype=bool), np.zeros(len(y), dtype=np.int64)
        used = several & (w > 0)
        sites = np.unique(site[used], return_inverse=True)[1]
        for columns in (X[used], X[used][:, :0]):
            found = robust_scale(columns, y[used], sites, w[used])
            if found > 0:
                return cls(EFFICIENT * found)
        size = float(np.average(np.abs(y - weighted_median(y, w)), weights=w)) if w.sum() > 0 else 0.0
        return cls(EFFICIENT * size) if size > 0 else cls()

    @property
    def parameter(self) -> float:  # type: ignore[override]
        return self.delta

    @property
    def linear_beyond(self) -> float:  # type: ignore[override]
        return self.delta

    def loss(self, eta: Array, y: Array) -> Array:
        size = np.abs(y - eta)
        return np.where(size <= self.delta, 0.5 * size**2, self.delta * (size - 0.5 * self.delta))

    @staticmethod
    def slope(eta: Any, y: Any, parameter: float) -> Any:
        return np.minimum(np.maximum(eta - y, -parameter), parameter)

    def curvature(self, eta: Array, y: Array) -> Array:
        return np.where(np.abs(y - eta) <= self.delta, 1.0, 0.0)

    def conjugate(self, a: Array, y: Array) -> Array:
        # the tolerance admits rounding on the boundary of the box
        inside = np.abs(a) <= self.delta * (1 + 1e-12)
        return np.asarray(np.where(inside, 0.5 * a**2 + a * y, np.inf))

    def row_errors(self, y: Array, response: Array) -> Array:
        return np.abs(y - response)

    def repair_at(self, eta: Array, y: Array) -> Array:
        # rows near the threshold may hardly move: their slope must stay within [-delta, delta]
        left = np.maximum(1.0 - np.abs(y - eta[..., 0]) / self.delta, 0.0)
        return left[..., None, None]

    def cautious_at(self, eta: Array, y: Array) -> Array:
        # iteratively reweighted least squares: the parabola above the loss that touches it at eta
        weight = self.delta / np.maximum(np.abs(y - eta[..., 0]), self.delta)
        return np.asarray(weight)[..., None, None]

    def working_response(self, y: Array) -> tuple[Array, Maybe]:
        return y, None

    def dispersion(self, theta: Array, X: Array, y: Maybe, offset: Maybe = None, weight: Maybe = None) -> float:
        residual = self.predict(theta, X, offset) - given(y)
        psi, weight = np.clip(residual, -self.delta, self.delta), np.ones(len(X)) if weight is None else weight
        n, p = float(weight.sum()), X.shape[1]
        inliers = max(float(weight @ (np.abs(residual) <= self.delta)) / n, 1.0 / n)
        # Huber's proposal: E psi^2 / (E psi')  against a Hessian that already carries E psi'; the square is his (1973)
        # correction for estimating p parameters from n rows
        correction = (1.0 + p / n * (1.0 - inliers) / inliers) ** 2
        return float(correction * (weight @ psi**2) / (max(n - p, 1) * inliers))
