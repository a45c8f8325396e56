"""Several classes, by the multinomial likelihood."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkin._base import Array, Index, Mask
from fedkin.errors import DataError, ParameterError
from fedkin.losses.logistic import lacks_class
from fedkin.losses.rowwise import LOGIT_SIZE, RowLoss, xlogx


@dataclass(frozen=True)
class MultinomialLoss(RowLoss):
    """Multinomial logistic loss, classes ``0 .. n_classes - 1``, class 0 is the reference.

    ``theta`` is ``(n_classes - 1, q)`` flattened: one row of coefficients for each class but the first.
    """

    n_classes: int = 3

    name = "multinomial"
    needs_classes = True
    strictly_convex = True
    minimiser = "separable"

    def __post_init__(self) -> None:
        if self.n_classes < 2:
            raise ParameterError(f"the multinomial loss needs at least 2 classes, got {self.n_classes}")

    @property
    def n_outputs(self) -> int:  # type: ignore[override]
        return self.n_classes - 1

    def value_at(self, eta: Array, y: Array) -> Array:
        chosen = self._onehot(y)
        top = np.maximum(eta.max(axis=-1), 0.0)
        norm = top + np.log(np.exp(-top) + np.exp(eta - top[..., None]).sum(axis=-1))
        return np.asarray(norm - (chosen * eta).sum(axis=-1))

    def slope_at(self, eta: Array, y: Array) -> Array:
        return self._probabilities(eta)[..., 1:] - self._onehot(y)

    def curvature_at(self, eta: Array, y: Array) -> Array:
        mu = self._probabilities(eta)[..., 1:]
        out = -mu[..., :, None] * mu[..., None, :]
        diagonal = np.arange(self.n_outputs)
        out[..., diagonal, diagonal] += mu
        return out

    def conjugate_at(self, a: Array, y: Array) -> Array:
        mu = a + self._onehot(y)
        return np.asarray(xlogx(mu).sum(axis=-1) + xlogx(1.0 - mu.sum(axis=-1)))

    def response(self, eta: Array) -> Array:
        return self._probabilities(eta)

    def curvature_bound(self) -> float:
        return 0.5

    def plausible_size(self, y: Array, offset: Array | None) -> Array:
        return np.full(y.shape[0], LOGIT_SIZE)

    def constant_diverges(self, y: Array, group: Index) -> Mask:
        return lacks_class(y, group, self.n_classes)

    def check_target(self, y: NDArray[Any] | None, device: object) -> None:
        super().check_target(y, device)
        assert y is not None
        bad = (y < 0) | (y >= self.n_classes) | (y != np.floor(y))
        if bad.any():
            raise DataError(
                f"device {device!r}: the multinomial loss needs classes 0..{self.n_classes - 1}, got {y[bad][0]:g}; "
                "encode the labels, or use FedADMMClassifier, which does it"
            )

    def _onehot(self, y: Array) -> Array:
        return np.asarray(y[..., None] == np.arange(1, self.n_classes), dtype=np.float64)

    def _probabilities(self, eta: Array) -> Array:
        full = np.concatenate([np.zeros((*eta.shape[:-1], 1)), eta], axis=-1)
        full = np.exp(full - full.max(axis=-1, keepdims=True))
        return np.asarray(full / full.sum(axis=-1, keepdims=True))
