"""Least squares on nearly collinear rows, by QR factors instead of Gram matrices.

A Gram matrix squares the condition number: of features whose singular values span more than 1e5, it hardly tells which
directions it still sees. A triangular factor of the rows has the same size and keeps what the rows know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedkin._base import Array, Index

#: Singular values below this share of the largest one count as zero.
SINGULAR_TOLERANCE = 1e-12


@dataclass(frozen=True, eq=False)
class RowFactors:
    """``M_u(theta) = |R_u (scale_u theta) - z_u|^2 / 2 + rest_u`` for M devices.

    Attributes
    ----------
    devices : int array (M,)
        Ascending positions among the terms.
    R : array (M, p, p)
        Triangular factors of the rows, with features scaled to mean square 1.
    z : array (M, p)
    rest : array (M,)
    scale : array (M, p)
    """

    devices: Index
    R: Array
    z: Array
    rest: Array
    scale: Array

    @classmethod
    def of_rows(cls, devices: Index, X: Array, y: Array, ridge: Array) -> RowFactors:
        """Factors of rows ``X (M, n, p)`` with responses ``y (M, n)``, and a ridge ``(p,)``."""
        m, n, p = X.shape
        # the ridge is p further rows, whose response is 0
        further = np.broadcast_to(np.diag(np.sqrt(ridge)), (m, p, p))
        X = np.concatenate([X / np.sqrt(n), further], axis=1)
        y = np.concatenate([y / np.sqrt(n), np.zeros((m, p))], axis=1)
        scale = np.sqrt((X**2).sum(axis=1))
        scale[scale == 0] = 1.0
        Q, R = np.linalg.qr(X / scale[:, None, :])
        z = np.matmul(y[:, None, :], Q)[:, 0, :]
        left = y - np.matmul(Q, z[:, :, None])[:, :, 0]
        return cls(devices, R, z, 0.5 * (left**2).sum(axis=1), scale)

    @classmethod
    def joined(cls, parts: Sequence[RowFactors]) -> RowFactors | None:
        """The factors of all parts, by device; None when there are none."""
        if not parts:
            return None
        columns = [(one.devices, one.R, one.z, one.rest, one.scale) for one in parts]
        devices, *others = (np.concatenate(column) for column in zip(*columns, strict=True))
        order = np.argsort(devices)
        return cls(devices[order], *(other[order] for other in others))

    def values(self, theta: Array) -> Array:
        """``M_u(theta_u)`` for ``theta (M, p)``."""
        misfit = self._misfit(theta)
        return np.asarray(0.5 * (misfit**2).sum(axis=1) + self.rest)

    def excess(self, theta: Array) -> Array:
        """``M_u(theta_u) - min M_u``, shape ``(M,)``."""
        U, values, _ = self._svd
        seen = np.matmul(self._misfit(theta)[:, None, :], U)[:, 0, :] * (values > 0)
        return np.asarray(0.5 * (seen**2).sum(axis=1))

    def minimizers(self) -> Array:
        """Minimisers ``(M, p)``, the shortest ones in scaled units where they are not unique."""
        U, values, Vt = self._svd
        roots = np.divide(1.0, values, out=np.zeros_like(values), where=values > 0)
        theta = np.zeros_like(self.z)
        for _ in range(2):  # the second time refines the first
            seen = np.matmul(self._misfit(theta)[:, None, :], U)[:, 0, :] * roots
            theta = theta - np.matmul(seen[:, None, :], Vt)[:, 0, :] / self.scale
        return theta

    def take(self, place: Index) -> RowFactors | None:
        """The factors of devices whose new ``place`` is not negative; None when there are none."""
        chosen = np.flatnonzero(place[self.devices] >= 0)
        chosen = chosen[np.argsort(place[self.devices[chosen]])]
        if not chosen.size:
            return None
        parts = (part[chosen] for part in (self.R, self.z, self.rest, self.scale))
        return RowFactors(place[self.devices[chosen]], *parts)

    def _misfit(self, theta: Array) -> Array:
        return np.asarray(np.matmul(self.R, (theta * self.scale)[:, :, None])[:, :, 0] - self.z)

    @cached_property
    def _svd(self) -> tuple[Array, Array, Array]:
        U, values, Vt = np.linalg.svd(self.R)
        return U, np.where(values > SINGULAR_TOLERANCE * values[:, :1], values, 0.0), Vt
