"""What a loss offers: `Loss` for any function of theta, `RowLoss` for those that see rows through linear predictors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedkin._base import Array, Index, Mask
from fedkin.errors import DataError

#: Mean square of a logit or log rate that is still plausible: 5 is odds of 148 to 1.
LOGIT_SIZE = 25.0


class Loss(ABC):
    """Mean loss of one site as a function of its parameter ``theta (p,)``.

    Parameters of all methods: ``theta (p,)``, ``X (n, q)``, ``y (n,)`` or None, ``offset (n,)`` or None. The methods on
    batches take B sites with n rows each: ``theta (B, p)``, ``X (B, n, q)``, ``y`` and ``offset (B, n)`` or None.
    """

    name: str = "loss"
    #: False for losses of the features alone (the mean).
    needs_target: bool = True
    #: True when targets are classes, numbered from 0.
    needs_classes: bool = False
    #: True when targets are counts.
    counts: bool = False
    #: How observations scatter about the mean response; None where that is not known, or too little is known of it.
    noise: Literal["normal", "poisson"] | None = None
    #: What numbers may be targets, in words.
    wanted: str = "a target"
    #: True when theta is a point among the rows: it moves with them, and has neither an intercept nor a predictor.
    location: bool = False
    #: True when `quadratic_terms` describes the loss completely; a `RowLoss` then has curvature 1.
    quadratic: bool = False
    #: A modulus of strong convexity that is certain for all rows.
    strong_convexity: float = 0.0
    #: Linear predictors of a row; 0 for losses that are not a `RowLoss`.
    n_outputs: int = 0
    #: Size of a residual beyond which a row's loss is linear, so that it has no curvature; None where there is none.
    corner: float | None = None
    #: True when `dispersion` is an estimate: then tests refer to F instead of chi-square.
    estimates_scale: bool = False
    #: False when `predict` is no more than the linear predictor.
    has_prediction: bool = True
    #: True when the compiled rounds know the loss; subclasses do not inherit it, since they may compute something else.
    compiled: bool = False
    _kernel_parameter: float = 0.0

    # --- the mean loss of one site ---
    def n_params(self, n_features: int) -> int:
        """Length p of theta for ``n_features`` columns."""
        return n_features

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

    def check_target(self, y: NDArray[Any] | None, site: object) -> None:
        """Raise `DataError`, naming the site, when ``y`` cannot be a target of this loss."""
        if self.needs_target and y is None:
            raise DataError(f"site {site!r} has no target, but the {self.name} loss needs one")
        if self.needs_target and y is not None and y.dtype.kind not in "fiub":
            raise DataError(
                f"site {site!r}: the {self.name} loss needs a numeric target, got {y.dtype}; "
                "encode the labels as numbers, or use KinClassifier, which does it"
            )
        if y is not None and (bad := self.refused(y)).any():
            cure = "; encode the labels, or use KinClassifier, which does it" if self.needs_classes else ""
            raise DataError(f"site {site!r}: the {self.name} loss needs {self.wanted}, got {y[bad][0]:g}{cure}")

    def refused(self, y: NDArray[Any]) -> Mask:
        """Which numbers cannot be targets of this loss."""
        return np.zeros(y.shape, dtype=bool)

    # --- noise ---
    def dispersion(
        self, theta: Array, X: Array, y: Array | None, offset: Array | None = None, weight: Array | None = None
    ) -> float:
        """Factor by which the score covariance exceeds the Hessian; 1 for likelihoods without a free scale.

        A row of ``weight (n,)`` w counts as w rows, for losses on linear predictors.
        """
        return 1.0

    def lent_dispersion(
        self, theta: Array, X: Array, y: Array | None, offset: Array | None = None, weight: Array | None = None
    ) -> float:
        """The dispersion as a guess for sites whose fit passes through all their points."""
        return self.dispersion(theta, X, y, offset, weight)

    # --- what depends on the kind of loss ---
    @property
    def rowwise(self) -> RowLoss | None:
        """The loss as a function of linear predictors; None when it is none."""
        return None

    @property
    def kernel(self) -> tuple[str, float] | None:
        """Name and parameter of the loss in compiled loops; None when these do not know it."""
        return (self.name, self._kernel_parameter) if "compiled" in vars(type(self)) and self.compiled else None

    def quadratic_terms(
        self, X: Array, y: Array | None, offset: Array | None, weight: Array | None = None
    ) -> tuple[Array, Array, Array]:
        """``A, b, c`` of ``theta' A theta / 2 - b' theta + c`` on a batch, where `quadratic`.

        ``A (B, p, p)``, or ``(B,)`` when all are multiples of the identity; ``b (B, p)``; ``c (B,)``. Weights
        ``(B, n)`` have mean 1 on each site.
        """
        raise NotImplementedError(f"the {self.name} loss is not quadratic")

    def least_squares_rows(
        self, X: Array, y: Array | None, offset: Array | None, weight: Array | None = None
    ) -> tuple[Array, Array] | None:
        """Features ``(B, n, p)`` and responses ``(B, n)`` when the loss is least squares on them, else None."""
        return None

    def row_curvatures(self, theta: Array, X: Array, y: Array | None, offset: Array | None) -> Array | None:
        """Trace ``(n,)`` of each row's Hessian, row k at ``theta[k]`` of ``theta (n, p)``; None when not known."""
        return None

    # --- gradients of batches, in a compact form that SAGA can remember ---
    def compact_width(self, n_params: int) -> int:
        """Numbers that `compact_scores` needs for a row."""
        return n_params

    def compact_scores(self, theta: Array, X: Array, y: Array | None, offset: Array | None) -> Array:
        """What tells each row's gradient, given the row: ``(B, n, width)``. Here the whole score."""
        return np.stack([self.scores(t, *rows) for t, *rows in each(theta, X, y, offset)])

    def mean_of_compact(self, compact: Array, X: Array) -> Array:
        """Mean gradients ``(B, p)`` of a batch whose `compact_scores` are given."""
        return np.asarray(compact.sum(axis=1) / X.shape[1])

    def batch_gradients(self, theta: Array, X: Array, y: Array | None, offset: Array | None) -> Array:
        """Gradients ``(B, p)`` of a batch; a site's bits do not depend on the others."""
        return np.stack([self.gradient(t, *rows) for t, *rows in each(theta, X, y, offset)])


class RowLoss(Loss):
    """Loss that sees a row through ``k`` linear predictors; ``theta`` is ``(k, q)`` flattened, ``k = n_outputs``.

    Predictors have shape ``(..., k)`` and targets ``(...)``, so that one call serves one site or many. The pointwise
    functions, their convex conjugate and the mean response are stated; scores, Hessians, certificates follow.
    """

    n_outputs: int = 1
    #: True when every curvature is positive definite: then a gradient never leaves the range of its Hessian.
    strictly_convex: bool = False
    #: At least as large as any curvature; infinite when nothing is.
    curvature_bound: float = float("inf")
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

    def averaged_predictor(self, eta: Array, covariance: Array) -> Array:
        """Predictors ``(..., k)`` whose response is that of normal ones, averaged.

        ``eta (..., k)`` and ``covariance (..., k, k)`` are their mean and covariance. By default the mean, which it is
        where the response is the predictor itself.
        """
        return eta

    def repair_at(self, eta: Array, y: Array) -> Array:
        """Weights ``(..., k, k)`` by which a dual point may move without leaving the conjugate's domain."""
        return self.curvature_at(eta, y)

    def cautious_at(self, eta: Array, y: Array) -> Array:
        """Curvature ``(..., k, k)`` of a quadratic model at eta whose minimiser can be trusted far away from eta.

        By default the curvature bound, and the curvature itself where there is none.
        """
        if not np.isfinite(self.curvature_bound):
            return self.curvature_at(eta, y)
        return np.broadcast_to(self.curvature_bound * np.eye(self.n_outputs), (*eta.shape, self.n_outputs))

    # --- what the targets tell before any fit; y and offset are (B, n) ---
    def plausible_size(self, y: Array, offset: Array | None) -> Array:
        """Mean square ``(B,)`` that a site's linear predictor may plausibly have."""
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

    # --- the site's mean loss ---
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
        eta = np.add.reduce(X[:, :, None, :] * weights, axis=3)
        return self.slope_at(eta if offset is None else eta + offset[:, :, None], given(y))

    def mean_of_compact(self, compact: Array, X: Array) -> Array:
        if self.n_outputs == 1:
            return np.asarray(np.add.reduce(compact * X, axis=1) / X.shape[1])
        outer = (compact[:, :, :, None] * X[:, :, None, :]).sum(axis=1) / X.shape[1]
        return np.asarray(outer.reshape(outer.shape[0], -1))

    def batch_gradients(self, theta: Array, X: Array, y: Array | None, offset: Array | None) -> Array:
        return self.mean_of_compact(self.compact_scores(theta, X, y, offset), X)


def by_loss(losses: Sequence[Loss], members: Index | None = None) -> list[tuple[Index, Loss]]:
    """Sites (all, or those numbered ``members``) grouped by loss; equal losses count as one.

    Examples
    --------
    >>> from fedkin.losses import HuberLoss, LinearLoss, by_loss
    >>> [(who.tolist(), loss.name) for who, loss in by_loss([HuberLoss(), LinearLoss(), HuberLoss(), LinearLoss()])]
    [([0, 2], 'huber'), ([1, 3], 'linear')]
    """
    groups: dict[object, list[int]] = {}
    for u in range(len(losses)) if members is None else members.tolist():
        loss = losses[u]
        # losses without parameters are the same whichever object they are
        key: object = loss if vars(loss) else type(loss)
        groups.setdefault(key if isinstance(key, Hashable) else id(key), []).append(u)
    return [(np.asarray(group, dtype=np.int64), losses[group[0]]) for group in groups.values()]


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
        raise DataError("this loss needs a target, but the rows have none")
    return y


def each(*parts: Array | None) -> Iterator[tuple[Any, ...]]:
    """The first axes of several arrays in step; a part that is None stays None."""
    length = next(len(part) for part in parts if part is not None)
    return zip(*([None] * length if part is None else part for part in parts), strict=True)
