"""`DeviceTerms`: the devices' mean losses as functions of the stacked parameters ``theta (V, p)``.

Everything that a solver or a certificate needs of the data, vectorised over devices: values, gradients, Hessians and
the Fenchel-Young gap ``M_u(theta_u) + M_u*(-s_u) + <s_u, theta_u>``, a device's share of a duality gap. There is one
kind of terms for each way to know a loss: `quadratic`, `rowwise`, `custom`; and `mixed` for several of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from fedkin._base import Array, Index

#: Share of the cautious Hessian where the Hessian itself may vanish in directions in which the gradient does not.
LEAST_CAUTION = 1e-6


class DeviceTerms(ABC):
    """Mean losses of V devices, each a convex function on R^p."""

    n_devices: int
    n_params: int

    @abstractmethod
    def values(self, theta: Array) -> Array:
        """``M_u(theta_u)``, shape ``(V,)``."""

    @abstractmethod
    def gradients(self, theta: Array) -> Array:
        """Shape ``(V, p)``."""

    @abstractmethod
    def hessians(self, theta: Array) -> Array:
        """Shape ``(V, p, p)``."""

    def cautious_hessians(self, theta: Array) -> Array:
        """Matrices ``(V, p, p)`` of quadratic models at ``theta`` that can be trusted farther away than Hessians."""
        return self.hessians(theta)

    def caution(self) -> tuple[Array, Array]:
        """Shares ``(V,)`` of the cautious Hessians that Newton's method begins with, and that it should always keep."""
        return np.zeros(self.n_devices), np.zeros(self.n_devices)

    def lower_bounds(self) -> Array:
        """Numbers ``(V,)`` that ``M_u`` never falls below, minus infinity where none is known."""
        return np.full(self.n_devices, -np.inf)

    @abstractmethod
    def young_gaps(self, theta: Array, s: Array, radius: float = np.inf) -> Array:
        """Upper bounds ``(V,)`` on ``M_u(theta_u) + <s_u, theta_u> - min_v (M_u(v) + <s_u, v>)``.

        The minimum is over v in the ball of that ``radius``. Without one, a device is infinite when its minimum is not
        finite (a residual outside the range of a singular design), or when no bound was found.
        """

    @abstractmethod
    def take(self, devices: Index) -> DeviceTerms:
        """The terms of some devices, in that order."""


def ball_gap(left: Array, theta: Array, radius: float) -> Array:
    """Bound ``<left, theta> + radius * |left|`` on what an unbalanced direction may cost, 0 where nothing is left."""
    size = np.sqrt(np.einsum("vp,vp->v", left, left))
    if not np.isfinite(radius):
        return np.where(size > 0, np.inf, 0.0)
    return np.asarray(np.einsum("vp,vp->v", left, theta) + radius * size)
