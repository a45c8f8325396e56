"""Terms of quadratic losses: Gram statistics, which keep no rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from fedkin._base import Array, Index, Mask
from fedkin.losses import Loss
from fedkin.objective.batch import RowBlock
from fedkin.objective.factors import RowFactors
from fedkin.objective.linalg import generalized_inverse, surely_regular, unit_diagonal
from fedkin.objective.terms import DeviceTerms, ball_gap


class QuadraticTerms(DeviceTerms):
    """``M_u(theta) = theta' A_u theta / 2 - b_u' theta + c_u``.

    Parameters
    ----------
    A : array (V, p, p), or (V,) when every ``A_u`` is a multiple of the identity
    b : array (V, p)
    c : array (V,)
    factors : RowFactors, optional
        Of devices whose matrix is so close to singular that ``A`` and ``b`` do not tell their minimiser.
    """

    def __init__(self, A: Array, b: Array, c: Array, *, factors: RowFactors | None = None) -> None:
        self.A, self.b, self.c, self.factors = A, b, c, factors
        #: What solvers worked out from the matrices and may use again.
        self.shared: dict[str, Array] = {}
        self.isotropic = A.ndim == 1
        self.n_devices, self.n_params = b.shape

    def apply(self, theta: Array) -> Array:
        """``A_u theta_u``, shape ``(V, p)``."""
        if self.isotropic:
            return self.A[:, None] * theta
        return np.asarray(np.matmul(self.A, theta[:, :, None])[:, :, 0])

    def values(self, theta: Array) -> Array:
        out = ((0.5 * self.apply(theta) - self.b) * theta).sum(axis=1) + self.c
        if self.factors is not None:
            out[self.factors.devices] = self.factors.values(theta[self.factors.devices])
        return np.asarray(out)

    def gradients(self, theta: Array) -> Array:
        return self.apply(theta) - self.b

    def hessians(self, theta: Array) -> Array:
        if self.isotropic:
            return self.A[:, None, None] * np.eye(self.n_params)
        return self.A

    @cached_property
    def mean_curvature(self) -> Array:
        """Mean diagonal of the matrices, ``(p,)``."""
        if self.isotropic:
            return np.full(self.n_params, self.A.mean())
        return np.asarray(np.einsum("vii->i", self.A) / self.n_devices)

    @cached_property
    def typical_size(self) -> float:
        """How large the parameters are that devices would have on their own, roughly."""
        curvature = max(float(self.mean_curvature.mean()), np.finfo(float).tiny)
        return float(np.abs(self.b).max(initial=0.0)) / curvature

    def resolvent(self, weight: Array) -> Callable[[Array], Array]:
        """The map ``v -> (A_u + diag(weight_u))^{-1} v_u`` for positive ``weight (V, p)``."""
        if self.isotropic:
            scale = 1.0 / (self.A[:, None] + weight)
            return lambda v: v * scale
        shifted = self.A.copy()
        diagonal = np.arange(self.n_params)
        shifted[:, diagonal, diagonal] += weight
        inverse = np.linalg.inv(shifted)
        return lambda v: np.asarray(np.matmul(inverse, v[:, :, None])[:, :, 0])

    @cached_property
    def _inverse(self) -> tuple[Array, Mask]:
        if self.isotropic:
            inverse = np.divide(1.0, self.A, out=np.zeros_like(self.A), where=self.A > 0)
            return inverse, np.asarray(self.A <= 0)
        return generalized_inverse(self.A)

    @property
    def singular(self) -> Mask:
        """Devices whose matrix counts as singular, ``(V,)``."""
        return self._inverse[1]

    def minimizers(self) -> Array:
        """Each device's own minimiser (the shortest one in standardised units where it is not unique), ``(V, p)``."""
        own = self._solve(self.b)
        if self.factors is not None:
            own[self.factors.devices] = self.factors.minimizers()
        return own

    def _solve(self, v: Array) -> Array:
        inverse = self._inverse[0]
        if self.isotropic:
            return inverse[:, None] * v
        return np.asarray(np.matmul(inverse, v[:, :, None])[:, :, 0])

    def lower_bounds(self) -> Array:
        return self.values(self.minimizers())

    def young_gaps(self, theta: Array, s: Array, radius: float = np.inf) -> Array:
        residual = self.gradients(theta) + s
        step = self._solve(residual)
        gaps = np.asarray(0.5 * np.einsum("vp,vp->v", residual, step))
        bad = self.singular
        if bad.any():
            left = residual[bad] - self.apply(step)[bad]
            gaps[bad] += ball_gap(left, theta[bad], radius)
        if self.factors is not None:
            # where nothing pulls at a device, its gap is what its rows tell
            free = ~s[self.factors.devices].any(axis=1)
            gaps[self.factors.devices[free]] = self.factors.excess(theta[self.factors.devices])[free]
        return gaps

    def take(self, devices: Index) -> QuadraticTerms:
        factors = None
        if self.factors is not None:
            place = np.full(self.n_devices, -1)
            place[devices] = np.arange(devices.size)
            factors = self.factors.take(place)
        return QuadraticTerms(self.A[devices], self.b[devices], self.c[devices], factors=factors)


def quadratic_terms(loss: Loss, blocks: Sequence[RowBlock], ridge: Array, alone: Mask) -> QuadraticTerms:
    """The terms of a quadratic loss on ``blocks`` of devices ``0 .. V-1``, of which some are ``alone (V,)``."""
    p, even = ridge.size, bool((ridge == ridge[:1]).all())
    A, b, c = np.empty(0), np.empty((alone.size, p)), np.empty(alone.size)
    for block in blocks:
        matrices, b[block.devices], c[block.devices] = loss.quadratic_terms(*block.rows.arrays)
        if matrices.ndim == 1 and not even:
            matrices = matrices[:, None, None] * np.eye(p)
        if not A.size:
            A = np.empty((alone.size, *matrices.shape[1:]))
        A[block.devices] = matrices
    if A.ndim == 1:
        return QuadraticTerms(A + ridge[0], b, c)
    diagonal = np.arange(p)
    A[:, diagonal, diagonal] += ridge
    factors = [_factors_of_poor(loss, block, A, ridge, alone) for block in blocks if alone[block.devices].any()]
    return QuadraticTerms(A, b, c, factors=RowFactors.joined([part for part in factors if part is not None]))


def _factors_of_poor(loss: Loss, block: RowBlock, A: Array, ridge: Array, alone: Mask) -> RowFactors | None:
    """Factors of a block's devices that are alone and whose matrices are not far from singular."""
    where = np.flatnonzero(alone[block.devices])
    where = where[~surely_regular(unit_diagonal(A[block.devices[where]])[0])]
    rows = loss.least_squares_rows(*block.rows.take(where).arrays) if where.size else None
    return None if rows is None else RowFactors.of_rows(block.devices[where], *rows, ridge)
