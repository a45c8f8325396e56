"""What a loss has to offer.

Losses that see a row only through linear predictors ``eta = X theta + offset`` derive from `RowLoss` and state three
pointwise functions (value, slope, curvature), their convex conjugate and the mean response; everything else (scores,
Hessians, certificates) follows from these.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkin.errors import DataError

Array = NDArray[np.float64]


class Loss(ABC):
    """Mean loss of one device as a function of its parameter ``theta (p,)``.

    Parameters of all methods: ``theta (p,)``, ``X (n, q)``, ``y (n,)`` or None, ``offset (n,)`` or None.
    """

    name: str = "loss"
    #: False for losses of the features alone (the mean).
    needs_target: bool = True

    @abstractmethod
    def n_params(self, n_features: int) -> int:
        """Length p of theta for ``n_features`` columns."""

    @abstractmethod
    def value(self, theta: Array, X: Array, y: Array | None, offset: Array | None = None) -> float:
        """Mean loss over the rows."""

    @abstractmethod
    def gradient(self, theta: Array, X: Array, y: Array | None, offset: Array | None = None) -> Array:
        """Gradient ``(p,)`` of `value`."""

    @abstractmethod
    def scores(self, theta: Array, X: Array, y: Array | None, offset: Array | None = None) -> Array:
        """Per-row derivatives psi, shape ``(n, p)``; their mean is `gradient`."""

    @abstractmethod
    def hessian(self, theta: Array, X: Array, y: Array | None, offset: Array | None = None) -> Array:
        """Hessian ``(p, p)`` of `value`."""

    @abstractmethod
    def predict(self, theta: Array, X: Array, offset: Array | None = None) -> Array:
        """Mean response for each row, ``(n,)``; class probabilities ``(n, C)`` for multinomial."""

    def check_target(self, y: NDArray[Any] | None, device: object) -> None:
        """Raise `DataError`, naming the device, when ``y`` cannot be a target of this loss."""
        if self.needs_target and y is None:
            raise DataError(f"device {device!r} has no target, but the {self.name} loss needs one")
        if self.needs_target and y is not None and y.dtype.kind not in "fiub":
            raise DataError(
                f"device {device!r}: the {self.name} loss needs a numeric target, got {y.dtype}; "
                "encode the labels as numbers, or use FedADMMClassifier, which does it"
            )

    def degrees_of_freedom(self, n_features: int) -> int:
        """Number of parameters that the noise variance has to pay for."""
        return self.n_params(n_features)

    def dispersion(self, theta: Array, X: Array, y: Array | None, offset: Array | None = None) -> float:
        """Factor by which the score covariance exceeds the Hessian; 1 for likelihoods without a free scale."""
        return 1.0

    @property
    def estimates_scale(self) -> bool:
        """Whether `dispersion` is an estimate (then tests refer to F instead of chi-square)."""
        return False


class RowLoss(Loss):
    """Loss that sees a row through ``k`` linear predictors; ``theta`` is ``(k, q)`` flattened, ``k = n_outputs``.

    Arrays of predictors have shape ``(..., k)`` and targets ``(...)``, so that one call
    serves one device or a block of devices.
    """

    n_outputs: int = 1
    #: True when every curvature is positive definite: then a gradient never leaves the range of its Hessian.
    strictly_convex: bool = False

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

    # --- the device's mean loss ---
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


def given(y: Array | None) -> Array:
    """The target, or the error that it is missing."""
    if y is None:
        raise DataError("this loss needs a target, but the federation has none")
    return y
