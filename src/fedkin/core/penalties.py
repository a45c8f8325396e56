"""Define penalties on the difference between two neighbours: a norm phi, its prox and its dual ball.

All functions take stacked differences ``d (E, p)`` and a scale per edge ``(E,)`` or a scalar.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np

from fedkin._base import Array
from fedkin.errors import ParameterError


class Penalty(ABC):
    """A norm phi on R^p."""

    name: str
    #: True when phi is a sum over coordinates, so that coordinates fuse separately.
    separable: bool = False

    @abstractmethod
    def value(self, d: Array) -> Array:
        """Return ``phi(d_e)``, shape ``(E,)``."""

    @abstractmethod
    def dual_norm(self, y: Array) -> Array:
        """Return ``phi*(y_e)``, shape ``(E,)``."""

    @abstractmethod
    def project(self, y: Array, radius: Array | float) -> Array:
        """Return the nearest point of the dual ball ``phi*(y_e) <= radius_e``, shape ``(E, p)``."""

    def prox(self, d: Array, scale: Array | float) -> Array:
        """Return ``argmin_x scale * phi(x) + ||x - d||^2 / 2``, by Moreau's decomposition."""
        return d - self.project(d, scale)

    def euclidean_bound(self, p: int) -> float:
        """Return the smallest c with ``||d||_2 <= c * phi(d)``."""
        return 1.0

    def __repr__(self) -> str:
        return f"Penalty({self.name!r})"


class L1(Penalty):
    """Sum of absolute differences: coordinates fuse separately."""

    name = "l1"
    separable = True

    def value(self, d: Array) -> Array:
        return np.asarray(np.abs(d).sum(axis=1))

    def dual_norm(self, y: Array) -> Array:
        return np.asarray(np.abs(y).max(axis=1, initial=0.0))

    def project(self, y: Array, radius: Array | float) -> Array:
        bound = np.asarray(radius, dtype=np.float64)
        bound = bound if bound.ndim == 0 else bound[:, None]
        return y.clip(-bound, bound)


class L2(Penalty):
    """Euclidean norm of the difference: whole vectors fuse."""

    name = "l2"

    def value(self, d: Array) -> Array:
        return np.asarray(np.sqrt(np.einsum("ep,ep->e", d, d)))

    def dual_norm(self, y: Array) -> Array:
        return self.value(y)

    def project(self, y: Array, radius: Array | float) -> Array:
        size = self.value(y)
        # squares that overflow are infinite, without a warning; their sum shows that at once
        if not math.isfinite(size.dot(size)) and not np.isfinite(size).all():
            return self.project(_shorter(y, size), radius)
        # a length of 0 is inside every ball
        shrink = np.divide(radius, size, out=np.ones_like(size), where=size > radius)
        return np.asarray(y * shrink[:, None])


class LInf(Penalty):
    """Largest absolute difference."""

    name = "linf"

    def value(self, d: Array) -> Array:
        return np.asarray(np.abs(d).max(axis=1, initial=0.0))

    def dual_norm(self, y: Array) -> Array:
        return np.asarray(np.abs(y).sum(axis=1))

    def project(self, y: Array, radius: Array | float) -> Array:
        # projection onto the l1 ball by sorting (Duchi et al. 2008), all rows at once
        bound = np.broadcast_to(np.asarray(radius, dtype=np.float64), y.shape[:1])
        size = _nearer(np.abs(y), bound)
        ordered = -np.sort(-size, axis=1)
        excess = np.cumsum(ordered, axis=1) - bound[:, None]
        rank = np.arange(1, y.shape[1] + 1)
        positive = np.maximum((ordered * rank > excess).sum(axis=1), 1)
        threshold = np.take_along_axis(excess, positive[:, None] - 1, axis=1)[:, 0] / positive
        threshold = np.where(size.sum(axis=1) > bound, threshold, 0.0)
        return np.asarray(np.sign(y) * np.maximum(size - threshold[:, None], 0.0))

    def euclidean_bound(self, p: int) -> float:
        return float(np.sqrt(p))


#: Values whose squares would overflow are clipped to this size.
_FAR = 1e100
#: Points this many radii outside the l1 ball lose the relevant digits in sums.
_OUTSIDE = 1e8


def _shorter(y: Array, size: Array) -> Array:
    """Rescale rows whose Euclidean ``size (E,)`` overflows, keeping their direction."""
    most = np.finfo(np.float64).max
    y = np.clip(y, -most, most)
    longest = np.abs(y).max(axis=1, initial=0.0, keepdims=True)
    return np.where(np.isfinite(size)[:, None], y, y / np.where(longest > 0, longest, 1.0) * _FAR)


def _nearer(size: Array, bound: Array) -> Array:
    """Return absolute values ``(E, p)`` with the same projection onto the l1 ball; rows far outside are moved to it.

    The threshold of a projection is at least the largest value minus the radius, so lowering all values of a row by up
    to that amount does not change it.
    """
    longest = size.max(axis=1, initial=0.0)
    far = longest > _OUTSIDE * bound
    if not far.any():
        return size
    largest = np.minimum(longest, np.finfo(np.float64).max)[:, None]
    moved = np.maximum(np.minimum(size, largest) - largest + 2.0 * bound[:, None], 0.0)
    return np.where(far[:, None], moved, size)


_NAMED: dict[str, type[Penalty]] = {kind.name: kind for kind in (L1, L2, LInf)}
PENALTY_NAMES = tuple(_NAMED)


def make_penalty(penalty: str | Penalty) -> Penalty:
    """Return the penalty of that name."""
    if isinstance(penalty, Penalty):
        return penalty
    if penalty not in _NAMED:
        raise ParameterError(f"unknown penalty {penalty!r}; choose one of {', '.join(PENALTY_NAMES)}")
    return _NAMED[penalty]()
