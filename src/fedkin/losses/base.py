"""Define base classes of losses: `Loss`, `RowLoss` and `ScalarLoss` (linear predictors), `LogLinkLoss`.

A loss defines everything that depends on it: valid targets, the link function, the score of held-out rows, and the
targets that it suits. It must be convex in the predictor: certificates and kin rely on that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import entr

from fedkin._base import TINY, Array, Index, Mask
from fedkin.errors import DataError, ParameterError, argument

#: Mean square of a logit or log rate that is still plausible: 5 is odds of 148 to 1.
LOGIT_SIZE = 25.0

#: Gauss-Hermite nodes of a standard normal, and their weights.
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(15)
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()

TargetKind = Literal["number", "count", "positive", "class", "survival"]
Maybe = Array | None  #: an optional array of rows


class Loss(ABC):
    """Base class of losses: the mean loss of one site as a convex function of ``theta (p,)``.

    Parameters of the methods: ``theta (p,)``, ``X (n, q)``, ``y (n,)`` or None, ``offset (n,)`` or None. The methods on
    batches take B sites with n rows each: ``theta (B, p)``, ``X (B, n, q)``, ``y`` and ``offset (B, n)`` or None.
    """

    name: str = "loss"
    target: ClassVar[TargetKind | None] = "number"  # None for losses of the features alone (the mean)
    wanted: str = "a target"  # numbers that may be targets, for messages
    link: ClassVar[Literal["identity", "log", "logit", "softmax"] | None] = None  # from predictor to mean response
    metric: ClassVar[str | None] = None  # name of the error in `row_errors`; None if the loss itself scores rows
    ratio: ClassVar[str | None] = None  # name of the exponential of a coefficient in results
    purpose: ClassVar[str] = ""  # intended targets ("counts"), if not clear from `target`
    boosting: ClassVar[str | None] = None  # objective of LightGBM with the same mean response, where there is one
    takes_intercept: bool = True  # whether linear predictors have an intercept
    location: bool = False  # theta is a location, without intercept or linear predictor
    additive: bool = True  # the loss is a sum over rows; otherwise it depends on all rows of a site
    quadratic: bool = False  # `quadratic_terms` describes the loss completely; a `RowLoss` then has curvature 1
    strong_convexity: float = 0.0  # a modulus that is certain for all rows
    n_outputs: int = 0  # linear predictors of a row; 0 for losses that are not a `RowLoss`
    linear_beyond: float | None = None  # residual size beyond which a row has no curvature; None for smooth losses
    parameter: float = 0.0  # of `ScalarLoss.slope`
    estimates_scale: bool = False  # `dispersion` is an estimate: tests refer to F instead of chi-square
    canonical: ClassVar[bool] = False  # curvature does not depend on targets
    has_prediction: bool = True  # `predict` is more than the linear predictor

    # losses without parameters are equal when they are of one class; those with parameters are dataclasses
    def __eq__(self, other: object) -> bool:
        return self is other or (type(self) is type(other) and not vars(self) and not vars(other))

    def __hash__(self) -> int:
        return hash(type(self)) if not vars(self) else id(self)

    # --- losses for given data ---
    @classmethod
    def from_target(cls, y: NDArray[Any] | None) -> Loss:
        """Return the loss of this class for the targets of all sites."""
        return cls()

    @classmethod
    def from_classes(cls, n_classes: int) -> Loss:
        """Return the loss for this number of classes, if targets are classes."""
        return cls()

    @classmethod
    def from_rows(cls, X: Array, y: Maybe, site: Index, offset: Maybe = None, weight: Maybe = None) -> Loss:
        """Return the loss with its parameters estimated from all rows; ``site (n,)`` numbers their sites."""
        return cls.from_target(y)

    @classmethod
    def suits(cls, y: NDArray[Any]) -> bool:
        """Return whether the targets suggest this loss."""
        return False

    def check_target(self, y: NDArray[Any] | None, site: object) -> None:
        """Raise a `DataError` that names the site if ``y`` is not a valid target of this loss."""
        if self.target is not None and y is None:
            raise DataError(f"site {site!r} has no target, but the {self.name} loss needs one")
        if self.target is not None and y is not None and y.dtype.kind not in "fiub":
            raise DataError(
                f"site {site!r}: the {self.name} loss needs a numeric target, got {str(y[0])!r}; for classes, leave "
                f"{argument('loss')} out, or use KinClassifier"
            )
        if y is not None and (bad := self.refused(y)).any():
            hint = "encode the labels, or use KinClassifier"
            if self.target != "class":
                hint = f"correct such rows, or choose another {argument('loss')}"
            raise DataError(f"site {site!r}: the {self.name} loss needs {self.wanted}, got {y[bad][0]:g}; {hint}")

    def refused(self, y: NDArray[Any]) -> Mask:
        """Return a mask of invalid targets."""
        return np.zeros(y.shape, dtype=bool)

    # --- the mean loss of one site ---
    def n_params(self, n_features: int) -> int:
        """Return the length p of theta for ``n_features`` columns."""
        return n_features

    @abstractmethod
    def value(self, theta: Array, X: Array, y: Maybe, offset: Maybe = None) -> float:
        """Return the mean loss over the rows."""

    def gradient(self, theta: Array, X: Array, y: Maybe, offset: Maybe = None) -> Array:
        """Return the gradient ``(p,)`` of `value`, the mean of `scores`."""
        return np.asarray(self.scores(theta, X, y, offset).mean(axis=0))

    @abstractmethod
    def scores(self, theta: Array, X: Array, y: Maybe, offset: Maybe = None) -> Array:
        """Return per-row derivatives psi ``(n, p)``."""

    @abstractmethod
    def hessian(self, theta: Array, X: Array, y: Maybe, offset: Maybe = None) -> Array:
        """Return the Hessian ``(p, p)`` of `value`."""

    @abstractmethod
    def predict(self, theta: Array, X: Array, offset: Maybe = None) -> Array:
        """Return the mean response of each row ``(n,)``; class probabilities ``(n, C)`` for multinomial."""

    def row_errors(self, y: Array, response: Array) -> Array:
        """Return the error ``(n,)`` of held-out rows, as named by `metric`; lower is better.

        ``response`` is the result of `predict`; losses without a target compare the features ``y (n, p)`` with it. If
        the loss is not `additive`, all rows must be from one site.
        """
        raise NotImplementedError(f"the {self.name} loss does not define an error per row")

    def score_weights(self, y: Array) -> Array:
        """Return the weights ``(n,)`` of held-out rows in the mean error."""
        return np.ones(len(y))

    def cumulative_hazard(self, theta: Array, X: Array, y: Maybe, offset: Maybe = None) -> tuple[Array, Array]:
        """Return times ``(K,)`` and the site's baseline cumulative hazard at each."""
        raise NotImplementedError(f"the {self.name} loss has no hazards")

    @property
    def scale_equivariant(self) -> bool:
        """Whether theta scales with the target, so that the scale of residuals is learned."""
        return self.location or (self.link == "identity" and self.estimates_scale)

    def dispersion(self, theta: Array, X: Array, y: Maybe, offset: Maybe = None, weight: Maybe = None) -> float:
        """Return the factor by which the score covariance exceeds the Hessian; 1 for likelihoods without a free scale.

        For losses on linear predictors, a row with ``weight (n,)`` w counts as w rows.
        """
        return 1.0

    def remark(self, noise: float) -> str | None:
        """Return a warning if the estimated dispersion contradicts this loss, with the loss to use instead."""
        return None

    # --- structure of the loss ---
    @property
    def rowwise(self) -> RowLoss | None:
        """Loss as a function of linear predictors; None if it is not one."""
        return None

    def quadratic_terms(self, X: Array, y: Maybe, offset: Maybe, weight: Maybe = None) -> tuple[Array, Array, Array]:
        """Return ``A, b, c`` of ``theta' A theta / 2 - b' theta + c`` on a batch, if the loss is `quadratic`.

        ``A (B, p, p)``, or ``(B,)`` if all are multiples of the identity; ``b (B, p)``; ``c (B,)``. Weights ``(B, n)``
        have mean 1 on each site.
        """
        raise NotImplementedError(f"the {self.name} loss is not quadratic")

    def least_squares_rows(self, X: Array, y: Maybe, offset: Maybe, weight: Maybe = None) -> tuple[Array, Array] | None:
        """Return features ``(B, n, p)`` and responses ``(B, n)`` if the loss is least squares on them, else None."""
        return None

    def row_curvatures(self, theta: Array, X: Array, y: Maybe, offset: Maybe) -> Maybe:
        """Return the trace ``(n,)`` of each row's Hessian, with row k at ``theta[k]`` of ``theta (n, p)``, if known."""
        return None

    # --- gradients of batches in a compact form for SAGA; bitwise independent of other sites ---
    def compact_width(self, n_params: int) -> int:
        """Return how many numbers `compact_scores` holds per row."""
        return self.n_outputs or n_params

    def compact_scores(self, theta: Array, X: Array, y: Maybe, offset: Maybe) -> Array:
        """Return numbers ``(B, n, width)`` that determine each row's gradient; by default the full score."""
        return np.stack([self.scores(t, *rows) for t, *rows in each(theta, X, y, offset)])

    def mean_of_compact(self, compact: Array, X: Array) -> Array:
        """Return mean gradients ``(B, p)`` of a batch from its `compact_scores`."""
        return np.asarray(compact.sum(axis=1) / X.shape[1])

    def batch_gradients(self, theta: Array, X: Array, y: Maybe, offset: Maybe) -> Array:
        """Return gradients ``(B, p)`` of a batch."""
        return self.mean_of_compact(self.compact_scores(theta, X, y, offset), X)


class RowLoss(Loss):
    """Loss of ``k`` linear predictors per row; ``theta`` is ``(k, q)`` flattened, with ``k = n_outputs``.

    Predictors have shape ``(..., k)`` and targets ``(...)``, so calls handle one site or many. Subclasses define the
    pointwise functions, their convex conjugate and the mean response; scores, Hessians and certificates follow.
    """

    n_outputs: int = 1
    strictly_convex: bool = False  # every curvature is positive definite: a gradient is in the range of its Hessian
    curvature_bound: float = float("inf")  # at least as large as any curvature
    slope_bound: float = float("inf")  # at least as large as any slope; where finite, no loss is negative
    minimiser: Literal["always", "separable", "unknown"] = "unknown"  # for full rank: always, or if not separable

    # --- pointwise functions ---
    @abstractmethod
    def value_at(self, eta: Array, y: Array) -> Array:
        """Return the loss of each row, ``(...)``."""

    @abstractmethod
    def slope_at(self, eta: Array, y: Array) -> Array:
        """Return the derivative of each row's loss in eta, ``(..., k)``."""

    @abstractmethod
    def curvature_at(self, eta: Array, y: Array) -> Array:
        """Return the second derivative of each row's loss in eta, ``(..., k, k)``."""

    @abstractmethod
    def conjugate_at(self, a: Array, y: Array) -> Array:
        """Return the convex conjugate of each row's loss at slope ``a (..., k)``; infinite outside its domain."""

    @abstractmethod
    def response(self, eta: Array) -> Array:
        """Return the mean response for predictors ``(..., k)``."""

    def averaged_predictor(self, eta: Array, covariance: Array) -> Array:
        """Return predictors ``(..., k)`` whose response equals the mean response over normal predictors.

        ``eta (..., k)`` and ``covariance (..., k, k)`` are the mean and covariance of the predictors. By default,
        return the mean, which is exact for the identity link.
        """
        return eta

    def observation_interval(self, eta: Array, error: Array, noise: float, level: float) -> tuple[Array, Array]:
        """Return limits ``(n,)`` of prediction intervals for new observations.

        Predictors are normal with means ``eta (n,)`` and standard errors ``error (n,)``; ``noise`` is the dispersion.
        """
        raise ParameterError(
            f'the {self.name} loss has no prediction intervals for new observations: use interval="mean"'
        )

    def repair_at(self, eta: Array, y: Array) -> Array:
        """Return weights ``(..., k, k)`` for moves of a dual point that stay in the conjugate's domain."""
        return self.curvature_at(eta, y)

    def cautious_at(self, eta: Array, y: Array) -> Array:
        """Return the curvature ``(..., k, k)`` of a quadratic model at eta that is reliable far from eta.

        The default is the curvature bound, or the curvature itself if there is none.
        """
        if not np.isfinite(self.curvature_bound):
            return self.curvature_at(eta, y)
        return np.broadcast_to(self.curvature_bound * np.eye(self.n_outputs), (*eta.shape, self.n_outputs))

    # --- properties of the targets before any fit; y and offset are (B, n) ---
    def plausible_size(self, y: Array, offset: Maybe) -> Array:
        """Return the mean square ``(B,)`` that a site's linear predictor may plausibly have."""
        return np.asarray(((y if offset is None else y - offset) ** 2).mean(axis=1))

    def working_response(self, y: Array) -> tuple[Array, Maybe] | None:
        """Return response and weights ``(B, n)`` of a least-squares fit for initial values; None to start at 0."""
        return None

    def informative_curvature(self, y: Array) -> Array:
        """Return the curvature ``(B,)`` of an informative row; if all rows have much less, no minimiser exists."""
        return np.ones(y.shape[0])

    def constant_diverges(self, y: Array, group: Index) -> Mask:
        """Return the groups of rows on which the best constant predictor is infinite; ``group (n,)`` numbers them."""
        return np.zeros(int(group.max(initial=-1)) + 1, dtype=bool)

    # --- the site's mean loss ---
    @property
    def rowwise(self) -> Self:
        return self

    def n_params(self, n_features: int) -> int:
        return self.n_outputs * n_features

    def predictors(self, theta: Array, X: Array, offset: Maybe = None) -> Array:
        """Return linear predictors ``(n, k)``."""
        eta = X @ theta.reshape(self.n_outputs, -1).T
        return eta if offset is None else eta + offset[:, None]

    def value(self, theta: Array, X: Array, y: Maybe, offset: Maybe = None) -> float:
        return float(self.value_at(self.predictors(theta, X, offset), given(y)).mean())

    def gradient(self, theta: Array, X: Array, y: Maybe, offset: Maybe = None) -> Array:
        slope = self.slope_at(self.predictors(theta, X, offset), given(y))
        return np.asarray(slope.T @ X / X.shape[0]).reshape(-1)

    def scores(self, theta: Array, X: Array, y: Maybe, offset: Maybe = None) -> Array:
        slope = self.slope_at(self.predictors(theta, X, offset), given(y))
        return np.asarray(slope[:, :, None] * X[:, None, :]).reshape(X.shape[0], -1)

    def hessian(self, theta: Array, X: Array, y: Maybe, offset: Maybe = None) -> Array:
        return weighted_gram(X, self.curvature_at(self.predictors(theta, X, offset), given(y)))

    def predict(self, theta: Array, X: Array, offset: Maybe = None) -> Array:
        return self.response(self.predictors(theta, X, offset))

    def row_curvatures(self, theta: Array, X: Array, y: Maybe, offset: Maybe) -> Array:
        weights = theta.reshape(theta.shape[0], self.n_outputs, -1)
        eta = np.einsum("np,nkp->nk", X, weights)
        curvature = self.curvature_at(eta if offset is None else eta + offset[:, None], given(y))
        return np.asarray(np.trace(curvature, axis1=1, axis2=2) * np.einsum("np,np->n", X, X))

    # --- batches: elementwise products, because the bits of a matrix product depend on its shape ---
    def compact_scores(self, theta: Array, X: Array, y: Maybe, offset: Maybe) -> Array:
        """Return slopes ``(B, n, k)``."""
        weights = theta.reshape(theta.shape[0], 1, self.n_outputs, -1)
        eta = np.add.reduce(X[:, :, None, :] * weights, axis=3)
        return self.slope_at(eta if offset is None else eta + offset[:, :, None], given(y))

    def mean_of_compact(self, compact: Array, X: Array) -> Array:
        outer = np.add.reduce(compact[:, :, :, None] * X[:, :, None, :], axis=1) / X.shape[1]
        return np.asarray(outer.reshape(outer.shape[0], -1))


class ClassLoss(RowLoss):
    """Likelihood of classes ``0, 1, ...``; each of the `n_outputs` predictors compares one with the first."""

    target = "class"
    metric = "log-loss"
    strictly_convex = True
    minimiser = "separable"

    def row_errors(self, y: Array, response: Array) -> Array:
        smallest = np.finfo(float).eps
        return -np.log(np.clip(response[np.arange(len(response)), y.astype(np.int64)], smallest, 1 - smallest))

    def plausible_size(self, y: Array, offset: Maybe) -> Array:
        return np.full(y.shape[0], LOGIT_SIZE)

    def constant_diverges(self, y: Array, group: Index) -> Mask:
        seen = np.zeros((int(group.max(initial=-1)) + 1, self.n_outputs + 1), dtype=bool)
        seen[group, y.astype(np.int64)] = True
        return np.asarray(~seen.all(axis=1))


class ScalarLoss(RowLoss):
    """Loss of one linear predictor; subclasses define functions of eta without the trailing axis."""

    @abstractmethod
    def loss(self, eta: Array, y: Array) -> Array:
        """Return the loss of each row."""

    @staticmethod
    @abstractmethod
    def slope(eta: Any, y: Any, parameter: float) -> Any:
        """Return the derivative in eta, for arrays and, compiled by numba, for scalars."""

    @abstractmethod
    def curvature(self, eta: Array, y: Array) -> Array:
        """Return the second derivative in eta."""

    @abstractmethod
    def conjugate(self, a: Array, y: Array) -> Array:
        """Return the convex conjugate at slope ``a``; infinite outside its domain."""

    def mean(self, eta: Array) -> Array:
        """Return the mean response."""
        return eta

    # a predictor that is far too large has an infinite loss; line searches step back from it
    def value_at(self, eta: Array, y: Array) -> Array:
        with np.errstate(over="ignore"):
            return self.loss(eta[..., 0], y)

    def slope_at(self, eta: Array, y: Array) -> Array:
        with np.errstate(over="ignore"):
            return np.asarray(self.slope(eta[..., 0], y, self.parameter))[..., None]

    def curvature_at(self, eta: Array, y: Array) -> Array:
        with np.errstate(over="ignore"):
            return self.curvature(eta[..., 0], y)[..., None, None]

    def conjugate_at(self, a: Array, y: Array) -> Array:
        return self.conjugate(a[..., 0], y)

    def response(self, eta: Array) -> Array:
        with np.errstate(over="ignore"):
            return self.mean(eta[..., 0])


class LogLinkLoss(ScalarLoss):
    """Loss with a log link, for nonnegative targets."""

    link = "log"
    strictly_convex = True

    @abstractmethod
    def cdf(self, value: Array, mean: Array, noise: float) -> Array:
        """Return the probability of observations up to ``value``, given their mean and the dispersion."""

    def mean(self, eta: Array) -> Array:
        return np.exp(eta)

    def observation_interval(self, eta: Array, error: Array, noise: float, level: float) -> tuple[Array, Array]:
        low, high = (self.quantile(chance, eta, error, noise) for chance in ((1 - level) / 2, (1 + level) / 2))
        return low, high

    def averaged_cdf(self, value: Array, eta: Array, error: Array, noise: float) -> Array:
        """Return `cdf` at values ``(n,)``, averaged over normal predictors by Gaussian quadrature."""
        logs = eta[:, None] + error[:, None] * _NODES
        return np.asarray(self.cdf(value[:, None], np.exp(logs), noise) @ _WEIGHTS)

    def quantile(self, chance: Array | float, eta: Array, error: Array, noise: float) -> Array:
        """Return quantiles ``(n,)`` of observations with normal predictors, by bisection on the log scale."""
        reach, wide = error * _NODES.max(), max(noise, 1.0)
        low, high = eta - reach - 60.0 * wide, np.maximum(eta + reach, 0.0) + 10.0 * wide
        for _ in range(60):
            middle = 0.5 * (low + high)
            enough = self.averaged_cdf(np.exp(middle), eta, error, noise) >= chance
            high, low = np.where(enough, middle, high), np.where(enough, low, middle)
        return np.asarray(np.exp(high))

    def cautious_at(self, eta: Array, y: Array) -> Array:
        # the secant of the slope between eta and its zero, log y: the model is then least where the row's loss is
        gap, curvature = eta - np.log(np.maximum(y, TINY))[..., None], self.curvature_at(eta, y)[..., 0]
        secant = np.divide(self.slope_at(eta, y), gap, out=curvature.copy(), where=np.abs(gap) > 1e-4)
        return np.maximum(secant, curvature)[..., None]


def by_loss(losses: Sequence[Loss]) -> list[tuple[Index, Loss]]:
    """Group sites by loss; equal losses count as one."""
    groups: dict[object, list[int]] = {}
    for u, loss in enumerate(losses):
        groups.setdefault(loss if isinstance(loss, Hashable) else id(loss), []).append(u)
    return [(np.asarray(group, dtype=np.int64), losses[group[0]]) for group in groups.values()]


def weighted_gram(X: Array, weights: Array) -> Array:
    """Return ``mean_k x_k x_k' (x) W_k``, ``(..., kq, kq)``, of ``X (..., n, q)`` and ``weights (..., n, k, k)``."""
    n, q = X.shape[-2:]
    k = weights.shape[-1]
    out = np.empty((*X.shape[:-2], k, q, k, q))
    for a in range(k):
        for b in range(a + 1):
            block = np.swapaxes(X * weights[..., a, b, None], -1, -2) @ X / n
            out[..., a, :, b, :] = block
            out[..., b, :, a, :] = block
    return out.reshape(*X.shape[:-2], k * q, k * q)


def given(y: Maybe) -> Array:
    """Return the target, or raise an error if it is missing."""
    if y is None:
        raise DataError("this loss needs a target, but the rows have none: pass y")
    return y


def each(*parts: Maybe) -> Iterator[tuple[Any, ...]]:
    """Iterate over the first axes of several arrays; a part that is None stays None."""
    length = next(len(part) for part in parts if part is not None)
    return zip(*([None] * length if part is None else part for part in parts), strict=True)


def xlogx(mu: Array) -> Array:
    """Return ``mu log mu``, 0 at 0 and infinite below; a rounding error below 0 counts as 0."""
    return -entr(np.where(mu > -1e-15, np.maximum(mu, 0.0), mu))


def squared_dispersion(residual: Array, n_params: int, weight: Maybe) -> float:
    """Return the mean square of Pearson residuals ``(n,)``, with ``n - n_params`` degrees of freedom."""
    n = len(residual) if weight is None else float(weight.sum())
    return float(residual**2 @ (np.ones(len(residual)) if weight is None else weight) / max(n - n_params, 1))
