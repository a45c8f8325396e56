"""Terms of custom losses, which are known only as functions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedkin._base import Array, Index
from fedkin.data import Rows
from fedkin.losses import Loss
from fedkin.objective.terms import LEAST_CAUTION, DeviceTerms, ball_gap


class LossTerms(DeviceTerms):
    """Mean losses given only as functions (`UserLoss`), one device after the other.

    Parameters
    ----------
    loss : Loss
    rows : sequence of Rows
        One for each of the V devices.
    ridge : array (p,)
        Adds ``sum_c ridge_c theta_c^2 / 2`` to each device.
    """

    def __init__(self, loss: Loss, rows: Sequence[Rows], ridge: Array) -> None:
        self.loss, self.rows, self.ridge = loss, tuple(rows), ridge
        self.n_devices, self.n_params = len(self.rows), ridge.size

    def values(self, theta: Array) -> Array:
        own = [self.loss.value(t, *rows.arrays) for t, rows in zip(theta, self.rows, strict=True)]
        return np.asarray(own + 0.5 * (theta**2) @ self.ridge)

    def gradients(self, theta: Array) -> Array:
        own = [self.loss.gradient(t, *rows.arrays) for t, rows in zip(theta, self.rows, strict=True)]
        return np.stack(own) + theta * self.ridge

    def hessians(self, theta: Array) -> Array:
        own = [self.loss.hessian(t, *rows.arrays) for t, rows in zip(theta, self.rows, strict=True)]
        return np.stack(own) + np.diag(self.ridge)

    def cautious_hessians(self, theta: Array) -> Array:
        hessians, gradients = self.hessians(theta), self.gradients(theta)
        # nothing is known but the derivatives: curb the step to about the length of theta
        size, steepness = np.linalg.norm(theta, axis=1), np.linalg.norm(gradients, axis=1)
        curb = np.maximum(np.einsum("vii->v", hessians) / self.n_params, steepness / (1.0 + size))
        return np.asarray(hessians + curb[:, None, None] * np.eye(self.n_params))

    def caution(self) -> tuple[Array, Array]:
        return np.ones(self.n_devices), np.full(self.n_devices, LEAST_CAUTION)

    def young_gaps(self, theta: Array, s: Array, radius: float = np.inf) -> Array:
        residual = self.gradients(theta) + s
        modulus = self.loss.strong_convexity + self.ridge.min()
        strong = np.full(self.n_devices, np.inf)
        if modulus > 0:
            strong = np.einsum("vp,vp->v", residual, residual) / (2 * modulus)
        return np.asarray(np.minimum(strong, ball_gap(residual, theta, radius)))

    def take(self, devices: Index) -> LossTerms:
        return LossTerms(self.loss, [self.rows[u] for u in devices], self.ridge)
