"""Counts, by the Poisson likelihood with a log link."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkin._base import Array, Index, Mask
from fedkin.errors import DataError
from fedkin.losses.rowwise import LOGIT_SIZE, ScalarLoss, xlogx


class PoissonLoss(ScalarLoss):
    """``m = exp(eta) - y eta``: log link, counts ``y >= 0``."""

    name = "poisson"
    strictly_convex = True
    minimiser = "separable"
    compiled = True

    def _value(self, eta: Array, y: Array) -> Array:
        return self._mean(eta) - y * eta

    def _slope(self, eta: Array, y: Array) -> Array:
        return self._mean(eta) - y

    def _curvature(self, eta: Array, y: Array) -> Array:
        return self._mean(eta)

    def _conjugate(self, a: Array, y: Array) -> Array:
        mu = a + y
        return xlogx(mu) - mu

    def _mean(self, eta: Array) -> Array:
        # a predictor that is far too large has an infinite loss; line searches step back from it
        with np.errstate(over="ignore"):
            return np.exp(eta)

    def cautious_at(self, eta: Array, y: Array) -> Array:
        # the secant of the slope between eta and its zero, log y: the model is least where the row's loss is
        mean, count = self._mean(eta), np.maximum(y, np.finfo(float).tiny)[..., None]
        gap = eta - np.log(count)
        secant = np.divide(mean - y[..., None], gap, out=mean.copy(), where=np.abs(gap) > 1e-4)
        return np.maximum(secant, mean)[..., None]

    def plausible_size(self, y: Array, offset: Array | None) -> Array:
        offset = np.zeros_like(y) if offset is None else offset
        top = offset.max(axis=1)
        exposure = top + np.log(np.exp(offset - top[:, None]).mean(axis=1))
        rate = np.log(np.maximum(y.mean(axis=1), 0.5 / y.shape[1])) - exposure
        return np.asarray(LOGIT_SIZE + rate**2)

    def working_response(self, y: Array) -> tuple[Array, Array]:
        # the usual first step of a log link: log(y + something), with that many counts as weight
        raised = y + 0.5 * np.maximum(y.mean(axis=1, keepdims=True), 1e-8)
        return np.log(raised), raised

    def informative_curvature(self, y: Array) -> Array:
        return np.asarray(y.max(axis=1))

    def constant_diverges(self, y: Array, group: Index) -> Mask:
        return np.asarray(np.bincount(group, weights=y) == 0)

    def check_target(self, y: NDArray[Any] | None, device: object) -> None:
        super().check_target(y, device)
        assert y is not None
        if (y < 0).any():
            raise DataError(f"device {device!r}: the poisson loss needs counts of at least 0, got {y.min():g}")
