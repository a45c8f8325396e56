"""Define losses from user functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkin._base import Array
from fedkin.errors import ParameterError
from fedkin.losses.base import Loss, Maybe, each


@dataclass(frozen=True)
class UserLoss(Loss):
    """Custom loss defined by functions of ``(theta, X, y, offset)`` of one site.

    Parameters
    ----------
    value_fn : callable
        Mean loss over the rows, convex in theta.
    gradient_fn : callable
        Its gradient ``(p,)``.
    hessian_fn : callable, optional
        Its Hessian ``(p, p)``; by default, differences of the gradient are used.
    predict_fn : callable, optional
        ``(theta, X, offset) -> (n,)``; by default the linear predictor.
    scores_fn : callable, optional
        Derivatives by row ``(n, p)``; by default ``gradient_fn`` is called for each row.
    params : int, optional
        Length of theta; by default the number of features.
    strong_convexity : float
        A modulus valid for every site. If positive, the certificate is unconditional; otherwise it holds for minimisers
        inside the parameter ball (`Problem.radius`).
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
        for name in ("value_fn", "gradient_fn", "hessian_fn", "scores_fn"):
            _check_arguments(name, getattr(self, name), ("theta", "X", "y", "offset"))
        _check_arguments("predict_fn", self.predict_fn, ("theta", "X", "offset"))

    def n_params(self, n_features: int) -> int:
        return n_features if self.params is None else self.params

    @property
    def has_prediction(self) -> bool:  # type: ignore[override]
        return self.predict_fn is not None

    def check_target(self, y: NDArray[Any] | None, site: object) -> None:
        """Accept any target; the given functions must handle it."""

    def value(self, theta: Array, X: Array, y: Maybe, offset: Maybe = None) -> float:
        return float(self.value_fn(theta, X, y, offset))

    def gradient(self, theta: Array, X: Array, y: Maybe, offset: Maybe = None) -> Array:
        return np.asarray(self.gradient_fn(theta, X, y, offset), dtype=np.float64)

    def scores(self, theta: Array, X: Array, y: Maybe, offset: Maybe = None) -> Array:
        if self.scores_fn is not None:
            return np.asarray(self.scores_fn(theta, X, y, offset), dtype=np.float64)
        single_rows = each(*(part if part is None else part[:, None] for part in (X, y, offset)))
        return np.stack([self.gradient(theta, *row) for row in single_rows])

    def hessian(self, theta: Array, X: Array, y: Maybe, offset: Maybe = None) -> Array:
        if self.hessian_fn is not None:
            return np.asarray(self.hessian_fn(theta, X, y, offset), dtype=np.float64)
        step = np.cbrt(np.finfo(float).eps) * max(1.0, float(np.abs(theta).max()))
        up, down = (
            np.array([self.gradient(theta + sign * shift, X, y, offset) for shift in step * np.eye(theta.size)])
            for sign in (1.0, -1.0)
        )
        return np.asarray((up - down + (up - down).T) / (4 * step))

    def predict(self, theta: Array, X: Array, offset: Maybe = None) -> Array:
        if self.predict_fn is not None:
            return np.asarray(self.predict_fn(theta, X, offset), dtype=np.float64)
        return np.asarray(X @ theta + (0.0 if offset is None else offset))

    def batch_gradients(self, theta: Array, X: Array, y: Maybe, offset: Maybe) -> Array:
        # scores may need one call per row
        return np.stack([self.gradient(t, *rows) for t, *rows in each(theta, X, y, offset)])


def _check_arguments(name: str, function: Callable[..., Any] | None, wanted: tuple[str, ...]) -> None:
    try:
        if function is not None:
            inspect.signature(function).bind(*wanted)
    except TypeError as error:
        raise ParameterError(
            f"{name} is called as {name}({', '.join(wanted)}), which the given function does not accept: {error}"
        ) from None
    except ValueError:
        return  # the signature of built-in functions is unknown
