"""What every loss offers: `Loss`, and how the devices that share one are grouped."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedkin._base import Array, Index
from fedkin.errors import DataError

if TYPE_CHECKING:
    from fedkin.losses.rowwise import RowLoss


class Loss(ABC):
    """Mean loss of one device as a function of its parameter ``theta (p,)``.

    Parameters of all methods: ``theta (p,)``, ``X (n, q)``, ``y (n,)`` or None, ``offset (n,)`` or None. The methods on
    batches take B devices with n rows each: ``theta (B, p)``, ``X (B, n, q)``, ``y`` and ``offset (B, n)`` or None.
    """

    name: str = "loss"
    #: False for losses of the features alone (the mean).
    needs_target: bool = True
    #: True when targets are classes, numbered from 0.
    needs_classes: bool = False
    #: True when theta is a point among the rows: it moves with them, and has neither an intercept nor a predictor.
    location: bool = False
    #: True when `quadratic_terms` describes the loss completely; a `RowLoss` then has curvature 1.
    quadratic: bool = False
    #: A modulus of strong convexity that is certain for all rows.
    strong_convexity: float = 0.0
    #: Linear predictors of a row; 0 for losses that are not a `RowLoss`.
    n_outputs: int = 0
    #: True when the compiled rounds know the loss; subclasses do not inherit it, since they may compute something else.
    compiled: bool = False

    # --- the mean loss of one device ---
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

    # --- noise ---
    def dispersion(self, theta: Array, X: Array, y: Array | None, offset: Array | None = None) -> float:
        """Factor by which the score covariance exceeds the Hessian; 1 for likelihoods without a free scale."""
        return 1.0

    def lent_dispersion(self, theta: Array, X: Array, y: Array | None, offset: Array | None = None) -> float:
        """The dispersion as a guess for devices whose fit passes through all their points."""
        return self.dispersion(theta, X, y, offset)

    @property
    def estimates_scale(self) -> bool:
        """Whether `dispersion` is an estimate (then tests refer to F instead of chi-square)."""
        return False

    # --- what depends on the kind of loss ---
    @property
    def rowwise(self) -> RowLoss | None:
        """The loss as a function of linear predictors; None when it is none."""
        return None

    @property
    def kernel(self) -> tuple[str, float] | None:
        """Name and parameter of the loss in compiled loops; None when these do not know it."""
        return (self.name, self._kernel_parameter) if "compiled" in vars(type(self)) and self.compiled else None

    @property
    def _kernel_parameter(self) -> float:
        return 0.0

    @property
    def has_prediction(self) -> bool:
        """Whether `predict` is more than the linear predictor."""
        return True

    def quadratic_terms(self, X: Array, y: Array | None, offset: Array | None) -> tuple[Array, Array, Array]:
        """``A, b, c`` of ``theta' A theta / 2 - b' theta + c`` on a batch, where `quadratic`.

        ``A (B, p, p)``, or ``(B,)`` when all are multiples of the identity; ``b (B, p)``; ``c (B,)``.
        """
        raise NotImplementedError(f"the {self.name} loss is not quadratic")

    def least_squares_rows(self, X: Array, y: Array | None, offset: Array | None) -> tuple[Array, Array] | None:
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
        return np.stack([self.scores(t, *rows) for t, *rows in _devices(theta, X, y, offset)])

    def mean_of_compact(self, compact: Array, X: Array) -> Array:
        """Mean gradients ``(B, p)`` of a batch whose `compact_scores` are given."""
        return np.asarray(compact.sum(axis=1) / X.shape[1])

    def batch_gradients(self, theta: Array, X: Array, y: Array | None, offset: Array | None) -> Array:
        """Gradients ``(B, p)`` of a batch; a device's bits do not depend on the others."""
        return np.stack([self.gradient(t, *rows) for t, *rows in _devices(theta, X, y, offset)])


def by_loss(losses: Sequence[Loss], members: Index | None = None) -> list[tuple[Index, Loss]]:
    """Devices (all, or those numbered ``members``) grouped by loss; equal losses count as one.

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


def given(y: Array | None) -> Array:
    """The target, or the error that it is missing."""
    if y is None:
        raise DataError("this loss needs a target, but the rows have none")
    return y


def _devices(theta: Array, X: Array, y: Array | None, offset: Array | None) -> list[tuple[Any, ...]]:
    none = [None] * len(X)
    return list(zip(theta, X, none if y is None else y, none if offset is None else offset, strict=True))
