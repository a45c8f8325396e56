"""`Columns`: the one affine map between the columns that a model is fitted on and those of the user."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from fedkin._base import Array, Mask
from fedkin.data import INTERCEPT

if TYPE_CHECKING:
    from fedkin.core.quadratics import Quadratics


def parameter_names(names: Sequence[str], outputs: int, labels: Sequence[Hashable] | None = None) -> tuple[str, ...]:
    """A name for each parameter: those of the columns, output by output with its label where there are several."""
    if outputs <= 1:
        return tuple(names)
    labels = [f"class {k + 1}" for k in range(outputs)] if labels is None else labels
    return tuple(f"{name} [{label}]" for label in labels for name in names)


@dataclass(frozen=True, eq=False)
class Columns:
    """Fitted columns ``(x - mean) / scale`` of q named columns x; the first may be the constant ``(intercept)``.

    >>> columns = Columns(("(intercept)", "age"), np.array([0.0, 50.0]), np.array([1.0, 10.0]))
    >>> columns.theta(np.array([1.0, 2.0])).tolist()  # 1 + 2 (age - 50) / 10
    [-9.0, 0.2]
    """

    names: tuple[str, ...]
    mean: Array  # (q,), 0 for the intercept, which takes up the means of the others; all 0 without one
    scale: Array  # (q,), 1 for the intercept
    outputs: int = 1  # blocks of coefficients in a theta
    location: bool = False  # whether the parameters are a point among the rows rather than coefficients of them
    labels: Sequence[Hashable] | None = None  # names of the outputs

    @classmethod
    def from_features(
        cls,
        features: Sequence[str],
        mean: Array,
        scale: Array,
        *,
        intercept: bool,
        outputs: int = 1,
        location: bool = False,
        labels: Sequence[Hashable] | None = None,
    ) -> Columns:
        """Columns of features, after an intercept if there is one."""
        if intercept:
            features, mean, scale = (INTERCEPT, *features), np.append(0.0, mean), np.append(1.0, scale)
        return cls(tuple(features), mean, scale, max(outputs, 1), location, labels)

    @property
    def intercept(self) -> bool:
        """Whether the first column is the constant 1."""
        return self.names[:1] == (INTERCEPT,)

    @property
    def n_params(self) -> int:
        return self.outputs * len(self.names)

    @property
    def parameter_names(self) -> tuple[str, ...]:
        return parameter_names(self.names, self.outputs, self.labels)

    @property
    def intercepts(self) -> Mask:
        """Which of the p parameters are intercepts."""
        return np.tile(np.arange(len(self.names)) == (0 if self.intercept else -1), self.outputs)

    def per_parameter(self, value: float) -> Array:
        """A penalty level for each parameter ``(p,)``, 0 for intercepts."""
        return np.where(self.intercepts, 0.0, value)

    @cached_property
    def A(self) -> Array:
        """The matrix ``(p, p)`` of the map ``theta = A fitted + shift``."""
        one = np.diag(self.scale if self.location else 1.0 / self.scale)
        if self.intercept:
            one[0, 1:] = -self.mean[1:] / self.scale[1:]
        return np.asarray(np.kron(np.eye(self.outputs), one), dtype=np.float64)

    @property
    def shift(self) -> Array:
        """The vector ``(p,)`` of that map."""
        return self.mean if self.location else np.zeros(self.n_params)

    def theta(self, fitted: Array) -> Array:
        """Parameters ``(..., p)`` of the user's columns."""
        return np.asarray(fitted @ self.A.T + self.shift)

    def fitted(self, theta: Array) -> Array:
        """Parameters ``(..., p)`` of the fitted columns."""
        return np.asarray((theta - self.shift) @ np.linalg.inv(self.A).T)

    def covariance(self, fitted: Array) -> Array:
        """Covariances ``(..., p, p)`` of the user's parameters."""
        return np.asarray(self.A @ fitted @ self.A.T)

    def quadratics(self, sums: Quadratics) -> Quadratics:
        """Sums of the user's columns as functions of the fitted parameters."""
        return sums.map(self.A, self.shift)
