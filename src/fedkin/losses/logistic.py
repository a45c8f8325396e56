"""Two classes, by the logistic likelihood."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkin._base import Array, Index, Mask
from fedkin.errors import DataError
from fedkin.losses.rowwise import LOGIT_SIZE, ScalarLoss, xlogx


class LogisticLoss(ScalarLoss):
    """``m = log(1 + exp(eta)) - y eta`` with ``y`` in {0, 1}."""

    name = "logistic"
    needs_classes = True
    strictly_convex = True
    minimiser = "separable"
    compiled = True

    def _value(self, eta: Array, y: Array) -> Array:
        # four times as fast as logaddexp
        return np.maximum(eta, 0.0) + np.log1p(np.exp(-np.abs(eta))) - y * eta

    def _slope(self, eta: Array, y: Array) -> Array:
        return _expit(eta) - y

    def _curvature(self, eta: Array, y: Array) -> Array:
        small = np.exp(-np.abs(eta))
        return np.asarray(small / (1.0 + small) ** 2)

    def _conjugate(self, a: Array, y: Array) -> Array:
        mu = a + y
        return xlogx(mu) + xlogx(1.0 - mu)

    def _mean(self, eta: Array) -> Array:
        return _expit(eta)

    def curvature_bound(self) -> float:
        return 0.25

    def cautious_at(self, eta: Array, y: Array) -> Array:
        # the parabola above the loss that touches it at eta (Jaakkola and Jordan 2000): tanh(eta / 2) / (2 eta)
        half = np.maximum(np.abs(eta), 1e-4) / 2
        return np.asarray(np.tanh(half) / (4 * half))[..., None]

    def plausible_size(self, y: Array, offset: Array | None) -> Array:
        return np.full(y.shape[0], LOGIT_SIZE)

    def constant_diverges(self, y: Array, group: Index) -> Mask:
        return lacks_class(y, group, 2)

    def check_target(self, y: NDArray[Any] | None, device: object) -> None:
        super().check_target(y, device)
        assert y is not None
        bad = ~np.isin(y, (0, 1))
        if bad.any():
            raise DataError(
                f"device {device!r}: the logistic loss needs targets 0 and 1, got {y[bad][0]:g}; "
                "encode the labels, or use FedADMMClassifier, which does it"
            )


def lacks_class(y: Array, group: Index, n_classes: int) -> Mask:
    """Groups of rows in which one of the classes ``0 .. n_classes - 1`` is missing."""
    seen = np.zeros((int(group.max(initial=-1)) + 1, n_classes), dtype=bool)
    seen[group, y.astype(np.int64)] = True
    return np.asarray(~seen.all(axis=1))


def _expit(eta: Array) -> Array:
    # exp of a negative number only: no overflow, and full relative precision in the lower tail
    small = np.exp(-np.abs(eta))
    return np.asarray(np.where(eta >= 0, 1.0, small) / (1.0 + small))
