"""Two classes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from fedkin._base import Array, Mask
from fedkin.losses.base import ClassLoss, Loss, ScalarLoss, xlogx
from fedkin.losses.multinomial import MultinomialLoss

#: The logistic function as a mixture of normal ones: shares and scales (Monahan and Stefanski 1992), exact to 3e-9.
_SHARES = np.array([0.003246343272134, 0.051517477033972, 0.195077912673858, 0.315569823632818,
                    0.274149576158423, 0.131076880695470, 0.027912418727972, 0.001449567805354])  # fmt: skip
_SCALES = np.array([1.365340806296348, 1.059523971016916, 0.830791313765644, 0.650732166639391,
                    0.508135425366489, 0.396313345166341, 0.308904252267995, 0.238212616409306])  # fmt: skip


class LogisticLoss(ClassLoss, ScalarLoss):
    """Logistic loss ``m = log(1 + exp(eta)) - y eta`` with ``y`` in {0, 1}."""

    name = "logistic"
    canonical = True
    link = "logit"
    boosting = "binary"
    curvature_bound = 0.25
    slope_bound = 1.0
    wanted = "targets 0 and 1"

    @classmethod
    def from_classes(cls, n_classes: int) -> Loss:
        """Return the logistic loss, or the multinomial one for more than two classes."""
        return cls() if n_classes <= 2 else MultinomialLoss(n_classes)

    @classmethod
    def suits(cls, y: NDArray[Any]) -> bool:
        return y.dtype.kind not in "fiu" or np.unique(y).tolist() == [0, 1]

    def loss(self, eta: Array, y: Array) -> Array:
        # four times as fast as logaddexp
        return np.maximum(eta, 0.0) + np.log1p(np.exp(-np.abs(eta))) - y * eta

    @staticmethod
    def slope(eta: Any, y: Any, parameter: float) -> Any:
        # exp of negative numbers only: no overflow, and full relative precision in the lower tail
        return np.exp(np.minimum(eta, 0.0)) / (1.0 + np.exp(-np.abs(eta))) - y

    def curvature(self, eta: Array, y: Array) -> Array:
        small = np.exp(-np.abs(eta))
        return np.asarray(small / (1.0 + small) ** 2)

    def conjugate(self, a: Array, y: Array) -> Array:
        mu = a + y
        return xlogx(mu) + xlogx(1.0 - mu)

    def mean(self, eta: Array) -> Array:
        return np.asarray(self.slope(eta, 0.0, 0.0))

    def averaged_predictor(self, eta: Array, covariance: Array) -> Array:
        return averaged_logit(eta, covariance[..., 0])

    def cautious_at(self, eta: Array, y: Array) -> Array:
        # the parabola above the loss that touches it at eta (Jaakkola and Jordan 2000): tanh(eta / 2) / (2 eta)
        half = np.maximum(np.abs(eta), 1e-4) / 2
        return np.asarray(np.tanh(half) / (4 * half))[..., None]

    def refused(self, y: NDArray[Any]) -> Mask:
        return ~np.isin(y, (0, 1))


def averaged_logit(eta: Array, variance: Array) -> Array:
    """Return the log odds of the mean of ``expit`` over normal log odds with this mean and variance."""
    far = np.abs(eta)
    tail = np.zeros_like(far)
    for share, scale in zip(_SHARES, _SCALES, strict=True):
        tail += share * ndtr(-far * scale / np.sqrt(1.0 + variance * scale**2))
    # means are closer to 1/2 than the response at the mean; the mixture has lighter tails than the logistic function
    tail = np.minimum(np.maximum(tail, np.exp(-far) / (1.0 + np.exp(-far))), 0.5)
    return np.asarray(np.where(variance > 0, np.sign(eta) * (np.log1p(-tail) - np.log(tail)), eta))
