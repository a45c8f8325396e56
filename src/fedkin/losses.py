"""Losses: what a device minimises on its own rows.

A loss is the mean over a device's rows of ``m(z; theta)``. Losses that see a row only through linear predictors
``eta = X theta + offset`` derive from `RowLoss` and state three pointwise functions (value, slope, curvature), their
convex conjugate and the mean response; everything else (scores, Hessians, certificates) follows from these.
`UserLoss` wraps functions that somebody else wrote.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkin.errors import DataError, ParameterError

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


class MeanLoss(Loss):
    """``m(z; theta) = ||z - theta||^2 / 2`` with ``z`` the row of features; there is no target."""

    name = "mean"
    needs_target = False

    def n_params(self, n_features: int) -> int:
        return n_features

    def value(self, theta: Array, X: Array, y: Array | None, offset: Array | None = None) -> float:
        return float(0.5 * ((X - theta) ** 2).sum() / X.shape[0])

    def gradient(self, theta: Array, X: Array, y: Array | None, offset: Array | None = None) -> Array:
        return np.asarray(theta - X.mean(axis=0))

    def scores(self, theta: Array, X: Array, y: Array | None, offset: Array | None = None) -> Array:
        return theta - X

    def hessian(self, theta: Array, X: Array, y: Array | None, offset: Array | None = None) -> Array:
        return np.eye(X.shape[1])

    def predict(self, theta: Array, X: Array, offset: Array | None = None) -> Array:
        return np.broadcast_to(theta, X.shape).copy()

    def dispersion(self, theta: Array, X: Array, y: Array | None, offset: Array | None = None) -> float:
        n, p = X.shape
        return float(((X - theta) ** 2).sum() / max((n - 1) * p, 1))

    @property
    def estimates_scale(self) -> bool:
        return True


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
        return float(self.value_at(self.predictors(theta, X, offset), _given(y)).mean())

    def gradient(self, theta: Array, X: Array, y: Array | None, offset: Array | None = None) -> Array:
        slope = self.slope_at(self.predictors(theta, X, offset), _given(y))
        return np.asarray(slope.T @ X / X.shape[0]).reshape(-1)

    def scores(self, theta: Array, X: Array, y: Array | None, offset: Array | None = None) -> Array:
        slope = self.slope_at(self.predictors(theta, X, offset), _given(y))
        return np.asarray(slope[:, :, None] * X[:, None, :]).reshape(X.shape[0], -1)

    def hessian(self, theta: Array, X: Array, y: Array | None, offset: Array | None = None) -> Array:
        return weighted_gram(X, self.curvature_at(self.predictors(theta, X, offset), _given(y)))

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


def _given(y: Array | None) -> Array:
    if y is None:
        raise DataError("this loss needs a target, but the federation has none")
    return y


class _ScalarLoss(RowLoss):
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


class LinearLoss(_ScalarLoss):
    """``m = (y - eta)^2 / 2``."""

    name = "linear"
    strictly_convex = True

    def _value(self, eta: Array, y: Array) -> Array:
        return 0.5 * (y - eta) ** 2

    def _slope(self, eta: Array, y: Array) -> Array:
        return eta - y

    def _curvature(self, eta: Array, y: Array) -> Array:
        return np.ones_like(eta)

    def _conjugate(self, a: Array, y: Array) -> Array:
        return 0.5 * a**2 + a * y

    def _mean(self, eta: Array) -> Array:
        return eta

    def curvature_bound(self) -> float:
        return 1.0

    def dispersion(self, theta: Array, X: Array, y: Array | None, offset: Array | None = None) -> float:
        residual = self.predictors(theta, X, offset)[:, 0] - _given(y)
        return float(residual @ residual / max(X.shape[0] - X.shape[1], 1))

    @property
    def estimates_scale(self) -> bool:
        return True


class LogisticLoss(_ScalarLoss):
    """``m = log(1 + exp(eta)) - y eta`` with ``y`` in {0, 1}."""

    name = "logistic"
    strictly_convex = True

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
        return _xlogx(mu) + _xlogx(1.0 - mu)

    def _mean(self, eta: Array) -> Array:
        return _expit(eta)

    def curvature_bound(self) -> float:
        return 0.25

    def cautious_at(self, eta: Array, y: Array) -> Array:
        # the parabola above the loss that touches it at eta (Jaakkola and Jordan 2000): tanh(eta / 2) / (2 eta)
        half = np.maximum(np.abs(eta), 1e-4) / 2
        return np.asarray(np.tanh(half) / (4 * half))[..., None]

    def check_target(self, y: NDArray[Any] | None, device: object) -> None:
        super().check_target(y, device)
        assert y is not None
        bad = ~np.isin(y, (0, 1))
        if bad.any():
            raise DataError(
                f"device {device!r}: the logistic loss needs targets 0 and 1, got {y[bad][0]:g}; "
                "encode the labels, or use FedADMMClassifier, which does it"
            )


class PoissonLoss(_ScalarLoss):
    """``m = exp(eta) - y eta``: log link, counts ``y >= 0``."""

    name = "poisson"
    strictly_convex = True

    def _value(self, eta: Array, y: Array) -> Array:
        return self._mean(eta) - y * eta

    def _slope(self, eta: Array, y: Array) -> Array:
        return self._mean(eta) - y

    def _curvature(self, eta: Array, y: Array) -> Array:
        return self._mean(eta)

    def _conjugate(self, a: Array, y: Array) -> Array:
        mu = a + y
        return _xlogx(mu) - mu

    def cautious_at(self, eta: Array, y: Array) -> Array:
        # the secant of the slope between eta and its zero, log y: the model is least where the row's loss is
        mean, count = self._mean(eta), np.maximum(y, np.finfo(float).tiny)[..., None]
        gap = eta - np.log(count)
        secant = np.divide(mean - y[..., None], gap, out=mean.copy(), where=np.abs(gap) > 1e-4)
        return np.maximum(secant, mean)[..., None]

    def _mean(self, eta: Array) -> Array:
        # a predictor that is far too large has an infinite loss; line searches step back from it
        with np.errstate(over="ignore"):
            return np.exp(eta)

    def check_target(self, y: NDArray[Any] | None, device: object) -> None:
        super().check_target(y, device)
        assert y is not None
        if (y < 0).any():
            raise DataError(f"device {device!r}: the poisson loss needs counts of at least 0, got {y.min():g}")


@dataclass(frozen=True)
class HuberLoss(_ScalarLoss):
    """Squared loss for residuals up to ``delta``, absolute beyond it."""

    delta: float = 1.345

    name = "huber"

    def __post_init__(self) -> None:
        if not self.delta > 0:
            raise ParameterError(f"huber delta must be positive, got {self.delta!r}")

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

    def dispersion(self, theta: Array, X: Array, y: Array | None, offset: Array | None = None) -> float:
        residual = self.predictors(theta, X, offset)[:, 0] - _given(y)
        psi = np.clip(residual, -self.delta, self.delta)
        n, p = X.shape
        inliers = max(float((np.abs(residual) <= self.delta).mean()), 1.0 / n)
        # Huber's proposal: E psi^2 / (E psi')  against a Hessian that already carries E psi'; the square is his (1973)
        # correction for estimating p parameters from n rows
        correction = (1.0 + p / n * (1.0 - inliers) / inliers) ** 2
        return float(correction * (psi @ psi) / (max(n - p, 1) * inliers))

    @property
    def estimates_scale(self) -> bool:
        return True


@dataclass(frozen=True)
class MultinomialLoss(RowLoss):
    """Multinomial logistic loss, classes ``0 .. n_classes - 1``, class 0 is the reference.

    ``theta`` is ``(n_classes - 1, q)`` flattened: one row of coefficients for each class but the first.
    """

    n_classes: int = 3

    name = "multinomial"
    strictly_convex = True

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
        return np.asarray(_xlogx(mu).sum(axis=-1) + _xlogx(1.0 - mu.sum(axis=-1)))

    def response(self, eta: Array) -> Array:
        return self._probabilities(eta)

    def curvature_bound(self) -> float:
        return 0.5

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


@dataclass(frozen=True)
class UserLoss(Loss):
    """A loss of one's own, from functions of ``(theta, X, y, offset)`` of one device.

    Parameters
    ----------
    value_fn : callable
        Mean loss over the rows, convex in theta.
    gradient_fn : callable
        Its gradient ``(p,)``.
    hessian_fn : callable, optional
        Its Hessian ``(p, p)``; differences of the gradient are used without it.
    predict_fn : callable, optional
        ``(theta, X, offset) -> (n,)``; the linear predictor without it.
    scores_fn : callable, optional
        Per-row derivatives ``(n, p)``; without it they are obtained by calling ``gradient_fn`` row by row.
    params : int, optional
        Length of theta; the number of features without it.
    strong_convexity : float
        A modulus that is certain for every device. With it the certificate is unconditional; without it the
        certificate holds for minimisers inside the parameter ball (`Problem.radius`).
    name : str

    Examples
    --------
    Expectile regression:

    >>> import numpy as np
    >>> from fedkin.losses import UserLoss
    >>> def value(theta, X, y, offset):
    ...     r = y - X @ theta
    ...     return float(np.mean(np.where(r > 0, 0.8, 0.2) * r**2))
    >>> def gradient(theta, X, y, offset):
    ...     r = y - X @ theta
    ...     return -2 * X.T @ (np.where(r > 0, 0.8, 0.2) * r) / len(y)
    >>> expectile = UserLoss(value, gradient, name="expectile")
    >>> expectile.value(np.zeros(1), np.ones((2, 1)), np.array([1.0, -1.0]))
    0.5
    """

    value_fn: Callable[..., float]
    gradient_fn: Callable[..., Array]
    hessian_fn: Callable[..., Array] | None = None
    predict_fn: Callable[..., Array] | None = None
    scores_fn: Callable[..., Array] | None = None
    params: int | None = None
    strong_convexity: float = 0.0
    name: str = "user"

    def __post_init__(self) -> None:
        rows = ("theta", "X", "y", "offset")
        for name, wanted in dict.fromkeys(("value_fn", "gradient_fn", "hessian_fn", "scores_fn"), rows).items():
            _check_arguments(name, getattr(self, name), wanted)
        _check_arguments("predict_fn", self.predict_fn, ("theta", "X", "offset"))

    def n_params(self, n_features: int) -> int:
        return n_features if self.params is None else self.params

    def check_target(self, y: NDArray[Any] | None, device: object) -> None:
        """The user's functions know what they need."""

    def value(self, theta: Array, X: Array, y: Array | None, offset: Array | None = None) -> float:
        return float(self.value_fn(theta, X, y, offset))

    def gradient(self, theta: Array, X: Array, y: Array | None, offset: Array | None = None) -> Array:
        return np.asarray(self.gradient_fn(theta, X, y, offset), dtype=np.float64)

    def scores(self, theta: Array, X: Array, y: Array | None, offset: Array | None = None) -> Array:
        if self.scores_fn is not None:
            return np.asarray(self.scores_fn(theta, X, y, offset), dtype=np.float64)
        rows = range(X.shape[0])
        one = [slice(k, k + 1) for k in rows]
        return np.stack(
            [
                self.gradient(theta, X[k], None if y is None else y[k], None if offset is None else offset[k])
                for k in one
            ]
        )

    def hessian(self, theta: Array, X: Array, y: Array | None, offset: Array | None = None) -> Array:
        if self.hessian_fn is not None:
            return np.asarray(self.hessian_fn(theta, X, y, offset), dtype=np.float64)
        p = theta.size
        step = np.cbrt(np.finfo(float).eps) * max(1.0, float(np.abs(theta).max()))
        columns = np.empty((p, p))
        for c in range(p):
            shift = np.zeros(p)
            shift[c] = step
            up = self.gradient(theta + shift, X, y, offset)
            columns[:, c] = (up - self.gradient(theta - shift, X, y, offset)) / (2 * step)
        return 0.5 * (columns + columns.T)

    def predict(self, theta: Array, X: Array, offset: Array | None = None) -> Array:
        if self.predict_fn is not None:
            return np.asarray(self.predict_fn(theta, X, offset), dtype=np.float64)
        eta = X @ theta
        return np.asarray(eta if offset is None else eta + offset)


def _check_arguments(name: str, function: Callable[..., Any] | None, wanted: tuple[str, ...]) -> None:
    if function is None:
        return
    try:
        inspect.signature(function).bind(*wanted)
    except TypeError as error:
        raise ParameterError(
            f"{name} is called as {name}({', '.join(wanted)}), which the given function does not accept: {error}"
        ) from None
    except ValueError:
        return  # built-in functions do not tell their arguments


def _expit(eta: Array) -> Array:
    # exp of a negative number only: no overflow, and full relative precision in the lower tail
    small = np.exp(-np.abs(eta))
    return np.asarray(np.where(eta >= 0, 1.0, small) / (1.0 + small))


def _xlogx(mu: Array) -> Array:
    """``mu log mu``, 0 at 0 and infinite below; a rounding error below 0 counts as 0."""
    safe = np.where(mu > 0, mu, 1.0)
    return np.where(mu > -1e-15, safe * np.log(safe), np.inf)


LOSS_NAMES = ("mean", "linear", "logistic", "poisson", "huber", "multinomial")


def make_loss(loss: str | Loss, y: NDArray[Any] | None = None) -> Loss:
    """The loss of that name; ``y`` (all devices' targets) tells "multinomial" its number of classes.

    Examples
    --------
    >>> from fedkin.losses import make_loss
    >>> make_loss("huber").name
    'huber'
    """
    if isinstance(loss, Loss):
        return loss
    simple: Mapping[str, type[Loss]] = {
        "mean": MeanLoss,
        "linear": LinearLoss,
        "logistic": LogisticLoss,
        "poisson": PoissonLoss,
        "huber": HuberLoss,
    }
    if loss in simple:
        return simple[loss]()
    if loss == "multinomial":
        if y is None or y.size == 0 or y.dtype.kind not in "fiub":
            raise DataError("the multinomial loss needs numeric classes 0, 1, 2, ... as target")
        return MultinomialLoss(max(int(y.max()) + 1, 2))
    raise ParameterError(f"unknown loss {loss!r}; choose one of {', '.join(LOSS_NAMES)}, or pass a Loss object")
