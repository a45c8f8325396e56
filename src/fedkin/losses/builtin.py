"""The built-in losses. A new one is a class here and an entry in `fedkin.losses.named`."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkin._base import Array, Index, Mask
from fedkin.errors import ParameterError
from fedkin.losses.averages import averaged_logit, averaged_softmax
from fedkin.losses.interface import LOGIT_SIZE, Loss, RowLoss, given


class MeanLoss(Loss):
    """``m(z; theta) = ||z - theta||^2 / 2`` with ``z`` the row of features; there is no target."""

    name = "mean"
    needs_target = False
    location = True
    quadratic = True
    estimates_scale = True
    compiled = True

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

    def dispersion(
        self, theta: Array, X: Array, y: Array | None, offset: Array | None = None, weight: Array | None = None
    ) -> float:
        weight = np.ones(X.shape[0]) if weight is None else weight
        return float(weight @ ((X - theta) ** 2).sum(axis=1) / max((weight.sum() - 1) * X.shape[1], 1))

    def quadratic_terms(
        self, X: Array, y: Array | None, offset: Array | None, weight: Array | None = None
    ) -> tuple[Array, Array, Array]:
        if weight is None:
            return np.ones(X.shape[0]), X.mean(axis=1), 0.5 * (X**2).sum(axis=2).mean(axis=1)
        mean, squares = (weight[:, :, None] * X).mean(axis=1), (weight * (X**2).sum(axis=2)).mean(axis=1)
        return np.ones(X.shape[0]), mean, 0.5 * squares

    def row_curvatures(self, theta: Array, X: Array, y: Array | None, offset: Array | None) -> Array:
        # of each coordinate, not their sum: all directions are alike
        return np.ones(X.shape[0])

    def compact_scores(self, theta: Array, X: Array, y: Array | None, offset: Array | None) -> Array:
        return theta[:, None, :] - X

    def batch_gradients(self, theta: Array, X: Array, y: Array | None, offset: Array | None) -> Array:
        return np.asarray(theta - X.sum(axis=1) / X.shape[1])


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

    def _mean(self, eta: Array) -> Array:
        return eta

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


class LinearLoss(ScalarLoss):
    """``m = (y - eta)^2 / 2``."""

    name = "linear"
    noise = "normal"
    curvature_bound = 1.0
    quadratic = True
    strictly_convex = True
    minimiser = "always"
    estimates_scale = True
    compiled = True

    def _value(self, eta: Array, y: Array) -> Array:
        return 0.5 * (y - eta) ** 2

    def _slope(self, eta: Array, y: Array) -> Array:
        return eta - y

    def _curvature(self, eta: Array, y: Array) -> Array:
        return np.ones_like(eta)

    def _conjugate(self, a: Array, y: Array) -> Array:
        return 0.5 * a**2 + a * y

    def dispersion(
        self, theta: Array, X: Array, y: Array | None, offset: Array | None = None, weight: Array | None = None
    ) -> float:
        residual = self.predictors(theta, X, offset)[:, 0] - given(y)
        if weight is None:
            return float(residual @ residual / max(X.shape[0] - X.shape[1], 1))
        return float(weight @ residual**2 / max(weight.sum() - X.shape[1], 1))

    def least_squares_rows(
        self, X: Array, y: Array | None, offset: Array | None, weight: Array | None = None
    ) -> tuple[Array, Array]:
        y = given(y) if offset is None else given(y) - offset
        if weight is None:
            return X, y
        root = np.sqrt(weight)
        return root[..., None] * X, root * y

    def quadratic_terms(
        self, X: Array, y: Array | None, offset: Array | None, weight: Array | None = None
    ) -> tuple[Array, Array, Array]:
        X, y = self.least_squares_rows(X, y, offset, weight)
        n, transposed = X.shape[1], np.swapaxes(X, 1, 2)
        A = np.matmul(transposed, X) / n
        return A, np.matmul(transposed, y[:, :, None])[:, :, 0] / n, 0.5 * (y**2).mean(axis=1)


class LogisticLoss(ScalarLoss):
    """``m = log(1 + exp(eta)) - y eta`` with ``y`` in {0, 1}."""

    name = "logistic"
    curvature_bound = 0.25
    wanted = "targets 0 and 1"
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
        return _xlogx(mu) + _xlogx(1.0 - mu)

    def _mean(self, eta: Array) -> Array:
        return _expit(eta)

    def averaged_predictor(self, eta: Array, covariance: Array) -> Array:
        return averaged_logit(eta, covariance[..., 0])

    def cautious_at(self, eta: Array, y: Array) -> Array:
        # the parabola above the loss that touches it at eta (Jaakkola and Jordan 2000): tanh(eta / 2) / (2 eta)
        half = np.maximum(np.abs(eta), 1e-4) / 2
        return np.asarray(np.tanh(half) / (4 * half))[..., None]

    def plausible_size(self, y: Array, offset: Array | None) -> Array:
        return np.full(y.shape[0], LOGIT_SIZE)

    def constant_diverges(self, y: Array, group: Index) -> Mask:
        return _lacks_class(y, group, 2)

    def refused(self, y: NDArray[Any]) -> Mask:
        return ~np.isin(y, (0, 1))


class PoissonLoss(ScalarLoss):
    """``m = exp(eta) - y eta``: log link, counts ``y >= 0``."""

    name = "poisson"
    counts = True
    noise = "poisson"
    wanted = "counts of at least 0"
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
        return _xlogx(mu) - mu

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

    def refused(self, y: NDArray[Any]) -> Mask:
        return np.asarray(y < 0)


@dataclass(frozen=True)
class HuberLoss(ScalarLoss):
    """Squared loss for residuals up to ``delta``, absolute beyond it.

    ``delta`` is in units of the target. Fits of tables by the name "huber" take 1.345 standard deviations of the rows
    (`fedkin.losses.scaled_huber`).
    """

    delta: float = 1.345

    name = "huber"
    curvature_bound = 1.0
    minimiser = "always"
    estimates_scale = True
    compiled = True

    def __post_init__(self) -> None:
        if not self.delta > 0:
            raise ParameterError(f"huber delta must be positive, got {self.delta!r}")

    @property
    def _kernel_parameter(self) -> float:  # type: ignore[override]
        return self.delta

    @property
    def corner(self) -> float:  # type: ignore[override]
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

    def repair_at(self, eta: Array, y: Array) -> Array:
        # rows near the corner may hardly move: their slope must stay within [-delta, delta]
        room = np.maximum(1.0 - np.abs(y - eta[..., 0]) / self.delta, 0.0)
        return room[..., None, None]

    def cautious_at(self, eta: Array, y: Array) -> Array:
        # iteratively reweighted least squares: the parabola above the loss that touches it at eta
        weight = self.delta / np.maximum(np.abs(y - eta[..., 0]), self.delta)
        return np.asarray(weight)[..., None, None]

    def working_response(self, y: Array) -> tuple[Array, Array | None]:
        return y, None

    def dispersion(
        self, theta: Array, X: Array, y: Array | None, offset: Array | None = None, weight: Array | None = None
    ) -> float:
        residual = self.predictors(theta, X, offset)[:, 0] - given(y)
        psi, weight = np.clip(residual, -self.delta, self.delta), np.ones(len(X)) if weight is None else weight
        n, p = float(weight.sum()), X.shape[1]
        inliers = max(float(weight @ (np.abs(residual) <= self.delta)) / n, 1.0 / n)
        # Huber's proposal: E psi^2 / (E psi')  against a Hessian that already carries E psi'; the square is his (1973)
        # correction for estimating p parameters from n rows
        correction = (1.0 + p / n * (1.0 - inliers) / inliers) ** 2
        return float(correction * (weight @ psi**2) / (max(n - p, 1) * inliers))

    def lent_dispersion(
        self, theta: Array, X: Array, y: Array | None, offset: Array | None = None, weight: Array | None = None
    ) -> float:
        # a fit through all its points is as noisy as least squares, however robust the loss
        return LinearLoss().dispersion(theta, X, y, offset, weight)


@dataclass(frozen=True)
class MultinomialLoss(RowLoss):
    """Multinomial logistic loss, classes ``0 .. n_classes - 1``, class 0 is the reference.

    ``theta`` is ``(n_classes - 1, q)`` flattened: one row of coefficients for each class but the first.
    """

    n_classes: int = 3

    name = "multinomial"
    curvature_bound = 0.5
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
        return np.asarray(_xlogx(mu).sum(axis=-1) + _xlogx(1.0 - mu.sum(axis=-1)))

    def response(self, eta: Array) -> Array:
        return self._probabilities(eta)

    def averaged_predictor(self, eta: Array, covariance: Array) -> Array:
        return averaged_softmax(eta, covariance)

    def plausible_size(self, y: Array, offset: Array | None) -> Array:
        return np.full(y.shape[0], LOGIT_SIZE)

    def constant_diverges(self, y: Array, group: Index) -> Mask:
        return _lacks_class(y, group, self.n_classes)

    @property
    def wanted(self) -> str:  # type: ignore[override]
        return f"classes 0..{self.n_classes - 1}"

    def refused(self, y: NDArray[Any]) -> Mask:
        return np.asarray((y < 0) | (y >= self.n_classes) | (y != np.floor(y)))

    def _onehot(self, y: Array) -> Array:
        return np.asarray(y[..., None] == np.arange(1, self.n_classes), dtype=np.float64)

    def _probabilities(self, eta: Array) -> Array:
        full = np.concatenate([np.zeros((*eta.shape[:-1], 1)), eta], axis=-1)
        full = np.exp(full - full.max(axis=-1, keepdims=True))
        return np.asarray(full / full.sum(axis=-1, keepdims=True))


def _lacks_class(y: Array, group: Index, n_classes: int) -> Mask:
    """Groups of rows in which one of the classes ``0 .. n_classes - 1`` is missing."""
    seen = np.zeros((int(group.max(initial=-1)) + 1, n_classes), dtype=bool)
    seen[group, y.astype(np.int64)] = True
    return np.asarray(~seen.all(axis=1))


def _expit(eta: Array) -> Array:
    # exp of a negative number only: no overflow, and full relative precision in the lower tail
    small = np.exp(-np.abs(eta))
    return np.asarray(np.where(eta >= 0, 1.0, small) / (1.0 + small))


def _xlogx(mu: Array) -> Array:
    """``mu log mu``, 0 at 0 and infinite below; a rounding error below 0 counts as 0."""
    safe = np.where(mu > 0, mu, 1.0)
    return np.where(mu > -1e-15, safe * np.log(safe), np.inf)
