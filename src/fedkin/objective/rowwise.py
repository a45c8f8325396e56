"""Terms of losses that see rows through linear predictors (generalised linear models)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fedkin._base import Array, Index
from fedkin.losses import RowLoss
from fedkin.objective.batch import RowBatch, RowBlock
from fedkin.objective.linalg import solve_and_rest
from fedkin.objective.terms import LEAST_CAUTION, DeviceTerms, ball_gap


class RowTerms(DeviceTerms):
    """Mean losses of one row loss, with an optional ridge.

    Parameters
    ----------
    loss : RowLoss
    blocks : sequence of RowBlock
        Together they cover devices ``0 .. V-1``.
    ridge : array (p,)
        Adds ``sum_c ridge_c theta_c^2 / 2`` to each device.
    """

    def __init__(self, loss: RowLoss, blocks: Sequence[RowBlock], ridge: Array) -> None:
        self.loss, self.blocks, self.ridge = loss, tuple(blocks), ridge
        self._batches = [(block.devices, RowBatch(loss, block.rows)) for block in self.blocks]
        self.n_devices = sum(block.devices.size for block in self.blocks)
        self.n_params = ridge.size

    def values(self, theta: Array) -> Array:
        out = 0.5 * (theta**2) @ self.ridge
        for devices, batch in self._batches:
            out[devices] += batch.values(theta[devices])
        return np.asarray(out)

    def gradients(self, theta: Array) -> Array:
        out = theta * self.ridge
        for devices, batch in self._batches:
            out[devices] += batch.gradients(theta[devices])
        return out

    def hessians(self, theta: Array) -> Array:
        return self._grams(theta, self.loss.curvature_at)

    def cautious_hessians(self, theta: Array) -> Array:
        return self._grams(theta, self.loss.cautious_at)

    def caution(self) -> tuple[Array, Array]:
        bounded = bool(np.isfinite(self.loss.curvature_bound()))
        start = 0.0 if self.loss.strictly_convex and bounded else 1.0
        least = 0.0 if self.loss.strictly_convex else LEAST_CAUTION
        return np.full(self.n_devices, start), np.full(self.n_devices, least)

    def lower_bounds(self) -> Array:
        out = np.empty(self.n_devices)
        for devices, batch in self._batches:
            # a function is never below minus its conjugate at 0
            zero = np.zeros((*batch.y.shape, self.loss.n_outputs))
            out[devices] = -self.loss.conjugate_at(zero, batch.y).mean(axis=1)
        return out

    def _grams(self, theta: Array, weights_at: Callable[[Array, Array], Array]) -> Array:
        out = np.empty((self.n_devices, self.n_params, self.n_params))
        for devices, batch in self._batches:
            out[devices] = batch.grams(theta[devices], weights_at)
        diagonal = np.arange(self.n_params)
        out[:, diagonal, diagonal] += self.ridge
        return out

    def young_gaps(self, theta: Array, s: Array, radius: float = np.inf) -> Array:
        out = np.empty(self.n_devices)
        for devices, batch in self._batches:
            out[devices] = self._gaps(batch, theta[devices], s[devices], radius)
        return out

    def _gaps(self, batch: RowBatch, theta: Array, s: Array, radius: float) -> Array:
        # With a dual point a per row and t for the ridge, M*(X'a/n + t) <= mean m*(a) + t' ridge^-1 t / 2. The slopes
        # at theta and t = ridge theta make that tight but miss -s by the residual. Moving them by -W X u and -ridge u,
        # where (X'WX/n + ridge) u = residual, balances it; the Fenchel-Young sum at the moved point is the gap.
        loss, y, eta = self.loss, batch.y, batch.predictors(theta)
        slope, weights = loss.slope_at(eta, y), loss.repair_at(eta, y)
        residual = batch.mean_of(slope) + theta * self.ridge + s
        gram = batch.gram_of(weights)
        diagonal = np.arange(self.n_params)
        gram[:, diagonal, diagonal] += self.ridge
        u, left = solve_and_rest(gram, residual)
        shift = np.matmul(batch.X, np.swapaxes(u.reshape(u.shape[0], loss.n_outputs, -1), 1, 2))
        a = slope - np.matmul(weights, shift[..., None])[..., 0]
        rows = loss.value_at(eta, y) + loss.conjugate_at(a, y) - (a * eta).sum(axis=-1)
        moved = np.maximum(rows.mean(axis=1), 0.0) + 0.5 * (u**2) @ self.ridge + ball_gap(left, theta, radius)
        # the slopes may leave the conjugate's domain: then move only the ridge's part, and charge the rest to the ball
        held = self.ridge > 0
        resting = 0.5 * (residual[:, held] ** 2) @ (1.0 / self.ridge[held])
        resting = resting + ball_gap(np.where(held, 0.0, residual), theta, radius)
        return np.asarray(np.minimum(moved, resting))

    def take(self, devices: Index) -> RowTerms:
        place = np.full(self.n_devices, -1)
        place[devices] = np.arange(devices.size)
        blocks = []
        for block in self.blocks:
            chosen = place[block.devices] >= 0
            blocks.append(RowBlock(place[block.devices[chosen]], block.rows.take(chosen)))
        return RowTerms(self.loss, [block for block in blocks if block.devices.size], self.ridge)
