"""Losses that see a row only through linear predictors ``eta = X theta + offset``.

A `RowLoss` states pointwise functions of eta (value, slope, curvature), their convex conjugate and the mean response.
Everything else (scores, Hessians, certificates) follows from these.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal

import numpy as np

from fedkin._base import Array, Index, Mask
from fedkin.losses.interface import Loss, given

#: Mean square of a logit or log rate that is still plausible: 5 is odds of 148 to 1.
LOGIT_SIZE = 25.0


class RowLoss(Loss):
    """Loss that sees a row through ``k`` linear predictors; ``theta`` is ``(k, q)`` flattened, ``k = n_outputs``.

    Arrays of predictors have shape ``(..., k)`` and targets ``(...)``, so that one call
    serves one device or a block of devices.
    """

    n_outputs: int = 1
    #: True when every curvature is positive definite: then a gradient never leaves the range of its Hessian.
    strictly_convex: bool = False
    #: When a design of full rank has a minimiser: "always", unless the rows are "separable", or "unknown".
    minimiser: Literal["always", "separable", "unknown"] = "unknown"

    # --- pointwise functions ---
    @abstractmethod
    def value_at(self, eta: Array, y: Array) -> Array:
        """Loss of each row, ``(...)``."""

    @abstractmethod
    def slope_at(self, eta: Array, y: Array) -> Array:
        """Derivative of each row's loss in eta, ``(..., k)``."""

    @abstractmethod
    def curvature_at(self, eta: Array, y: Array) -> Array:
        """Second derivative of each row's loss in eta, ``(..., k, k)``."""

    @abstractmethod
    def conjugate_at(self, a: Array, y: Array) -> Array:
        """Convex conjugate of each row's loss at slope ``a (..., k)``; infinite outside its domain."""

    @abstractmethod
    def response(self, eta: Array) -> Array:
        """Mean response for predictors ``(..., k)``."""

    def repair_at(self, eta: Array, y: Array) -> Array:
        """Weights ``(..., k, k)`` by which a dual point may move without leaving the conjugate's domain."""
        return self.curvature_at(eta, y)

    def curvature_bound(self) -> float:
        """A number at least as large as any curvature, infinite when there is none."""
        return float("inf")

    def cautious_at(self, eta: Array, y: Array) -> Array:
        """Curvature ``(..., k, k)`` of a quadratic model at eta whose minimiser can be trusted far away from eta.

        By default the curvature bound, and the curvature itself where there is none.
        """
        bound = self.curvature_bound()
        if not np.isfinite(bound):
            return self.curvature_at(eta, y)
        return np.broadcast_to(bound * np.eye(self.n_outputs), (*eta.shape, self.n_outputs))

    # --- what the targets tell before any fit; y and offset are (B, n) ---
    def plausible_size(self, y: Array, offset: Array | None) -> Array:
        """Mean square ``(B,)`` that a device's linear predictor may plausibly have."""
        return np.asarray(((y if offset is None else y - offset) ** 2).mean(axis=1))

    def working_response(self, y: Array) -> tuple[Array, Array | None] | None:
        """Response and weights ``(B, n)`` of a least-squares fit that is a good start; None to start at 0."""
        return None

    def informative_curvature(self, y: Array) -> Array:
        """Curvature ``(B,)`` of an informative row: much less in all rows means that no minimiser exists."""
        return np.ones(y.shape[0])

    def constant_diverges(self, y: Array, group: Index) -> Mask:
        """Groups of rows on which the best constant predictor is infinite; ``group (n,)`` numbers each row's group."""
        return np.zeros(int(group.max(initial=-1)) + 1, dtype=bool)

    # --- the device's mean loss ---
    @property
    def rowwise(self) -> RowLoss:
        return self

    def n_params(self, n_features: int) -> int:
        return self.n_outputs * n_features

    def predictors(self, theta: Array, X: Array, offset: Array | None = None) -> Array:
        """Linear predictors ``(n, k)``."""
        eta = X @ theta.reshape(self.n_outputs, -1).T
        return eta if offset is None else eta + offset[:, None]

    def value(self, theta: Array, X: Array, y: Array | None, offset: Array | None = None) -> float:
        return float(self.value_at(self.predictors(theta, X, offset), given(y)).mean())

    def gradient(self, theta: Array, X: Array, y: Array | None, offset: Array | None = None) -> Array:
        slope = self.slope_at(self.predictors(theta, X, offset), given(y))
        return np.asarray(slope.T @ X / X.shape[0]).reshape(-1)

    def scores(self, theta: Array, X: Array, y: Array | None, offset: Array | None = None) -> Array:
        slope = self.slope_at(self.predictors(theta, X, offset), given(y))
        return np.asarray(slope[:, :, None] * X[:, None, :]).reshape(X.shape[0], -1)

    def hessian(self, theta: Array, X: Array, y: Array | None, offset: Array | None = None) -> Array:
        return weighted_gram(X, self.curvature_at(self.predictors(theta, X, offset), given(y)))

    def predict(self, theta: Array, X: Array, offset: Array | None = None) -> Array:
        return self.response(self.predictors(theta, X, offset))

    def row_curvatures(self, theta: Array, X: Array, y: Array | None, offset: Array | None) -> Array:
        weights = theta.reshape(theta.shape[0], self.n_outputs, -1)
        eta = np.stack([np.einsum("np,np->n", X, weights[:, k]) for k in range(self.n_outputs)], axis=1)
        eta = eta if offset is None else eta + offset[:, None]
        each = self.curvature_at(eta, np.zeros(len(X)) if y is None else y)
        return np.asarray(np.trace(each, axis1=1, axis2=2) * np.einsum("np,np->n", X, X))

    # --- batches: products element by element, as a matrix product's bits depend on its shape ---
    def compact_width(self, n_params: int) -> int:
        return self.n_outputs

    def compact_scores(self, theta: Array, X: Array, y: Array | None, offset: Array | None) -> Array:
        """Slopes ``(B, n, k)``."""
        weights = theta.reshape(theta.shape[0], 1, self.n_outputs, -1)
        eta = (X[:, :, None, :] * weights).sum(axis=3)
        return self.slope_at(eta if offset is None else eta + offset[:, :, None], given(y))

    def mean_of_compact(self, compact: Array, X: Array) -> Array:
        if self.n_outputs == 1:
            return np.asarray((compact * X).sum(axis=1) / X.shape[1])
        outer = (compact[:, :, :, None] * X[:, :, None, :]).sum(axis=1) / X.shape[1]
        return np.asarray(outer.reshape(outer.shape[0], -1))

    def batch_gradients(self, theta: Array, X: Array, y: Array | None, offset: Array | None) -> Array:
        return self.mean_of_compact(self.compact_scores(theta, X, y, offset), X)


class ScalarLoss(RowLoss):
    """One linear predictor; subclasses work on eta without the trailing axis."""

    @abstractmethod
    def _value(self, eta: Array, y: Array) -> Array: ...

    @abstractmethod
    def _slope(self, eta: Array, y: Array) -> Array: ...

    @abstractmethod
    def _curvature(self, eta: Array, y: Array) -> Array: ...

    @abstractmethod
    def _conjugate(self, a: Array, y: Array) -> Array: ...

    @abstractmethod
    def _mean(self, eta: Array) -> Array: ...

    def value_at(self, eta: Array, y: Array) -> Array:
        return self._value(eta[..., 0], y)

    def slope_at(self, eta: Array, y: Array) -> Array:
        return self._slope(eta[..., 0], y)[..., None]

    def curvature_at(self, eta: Array, y: Array) -> Array:
        return self._curvature(eta[..., 0], y)[..., None, None]

    def conjugate_at(self, a: Array, y: Array) -> Array:
        return self._conjugate(a[..., 0], y)

    def response(self, eta: Array) -> Array:
        return self._mean(eta[..., 0])


def weighted_gram(X: Array, weights: Array) -> Array:
    """``mean_k x_k x_k' (x) W_k`` for ``X (..., n, q)`` and ``weights (..., n, k, k)``: shape ``(..., kq, kq)``."""
    n, q = X.shape[-2:]
    k = weights.shape[-1]
    out = np.empty((*X.shape[:-2], k, q, k, q))
    for a in range(k):
        for b in range(a + 1):
            block = np.swapaxes(X * weights[..., a, b, None], -1, -2) @ X / n
            out[..., a, :, b, :] = block
            out[..., b, :, a, :] = block
    return out.reshape(*X.shape[:-2], k * q, k * q)


def xlogx(mu: Array) -> Array:
    """``mu log mu``, 0 at 0 and infinite below; a rounding error below 0 counts as 0."""
    safe = np.where(mu > 0, mu, 1.0)
    return np.where(mu > -1e-15, safe * np.log(safe), np.inf)
