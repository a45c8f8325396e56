"""Each device's own minimiser, for losses that see rows through linear predictors; many devices at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from fedkin.losses import LinearLoss, RowLoss, weighted_gram
from fedkin.stats.newton import NewtonResult, damped_newton, solve_positive, unit_diagonal

Array = NDArray[np.float64]
Index = NDArray[np.int64]

#: A Gram matrix with unit diagonal has full rank when its eigenvalues exceed this.
RANK_TOLERANCE = 1e-10
#: Information about some direction, in rows' worth, below which a likelihood counts as having no maximum.
SEPARATION_TOLERANCE = 1e-6


@dataclass(frozen=True, eq=False)
class RowBatch:
    """B devices of one loss, with n rows each.

    Attributes
    ----------
    loss : RowLoss
    X : array (B, n, q)
    y : array (B, n)
    offset : array (B, n) or None
    weight : array (B, n) or None
        Weights of the rows, with mean 1 on each device; None for equal weights.
    """

    loss: RowLoss
    X: Array
    y: Array
    offset: Array | None = None
    weight: Array | None = None

    @property
    def n_rows(self) -> int:
        return int(self.X.shape[1])

    @property
    def n_devices(self) -> int:
        return int(self.X.shape[0])

    @property
    def n_params(self) -> int:
        return self.loss.n_params(self.X.shape[2])

    @cached_property
    def gram(self) -> Array:
        """``mean_k x_k x_k'``, shape ``(B, q, q)``."""
        ones = np.ones((*self.X.shape[:2], 1, 1))
        return weighted_gram(self.X, ones if self.weight is None else ones * self.weight[:, :, None, None])

    @cached_property
    def _gram_spectrum(self) -> tuple[Array, Array, Array]:
        scaled, scale = unit_diagonal(self.gram)
        values, vectors = np.linalg.eigh(scaled)
        return values, vectors, scale

    @cached_property
    def rank(self) -> Index:
        """Rank ``(B,)`` of each design."""
        values, _, _ = self._gram_spectrum
        return np.asarray((values > RANK_TOLERANCE).sum(axis=1))

    @property
    def full_rank(self) -> NDArray[np.bool_]:
        return np.asarray(self.rank == self.X.shape[2])

    def plausible_size(self) -> Array:
        """Mean square ``(B,)`` that a device's linear predictor may plausibly have."""
        return self.loss.plausible_size(self.y, self.offset)

    def take(self, who: Index | NDArray[np.bool_]) -> RowBatch:
        """Some of the devices."""
        return RowBatch(self.loss, self.X[who], self.y[who], _rows(self.offset, who), _rows(self.weight, who))

    def predictors(self, theta: Array, who: Index) -> Array:
        """Linear predictors ``(A, n, k)`` of the devices ``who`` at ``theta (A, p)``."""
        k = self.loss.n_outputs
        eta = np.matmul(self._X(who), np.swapaxes(theta.reshape(theta.shape[0], k, -1), 1, 2))
        return np.asarray(eta if self.offset is None else eta + self.offset[who][:, :, None])

    def values(self, theta: Array, who: Index) -> Array:
        rows = self.loss.value_at(self.predictors(theta, who), self.y[who])
        return np.asarray((rows if self.weight is None else rows * self.weight[who]).mean(axis=1))

    def gradients(self, theta: Array, who: Index) -> Array:
        return self._back(self.loss.slope_at(self.predictors(theta, who), self.y[who]), who)

    def hessians(self, theta: Array, who: Index) -> Array:
        curvature = self.loss.curvature_at(self.predictors(theta, who), self.y[who])
        return self._gram_with(curvature, who)

    def derivatives(self, theta: Array, who: Index, caution: float = 1.0) -> tuple[Array, Array]:
        """Gradients ``(A, p)`` and Hessians ``(A, p, p)``.

        Singular Hessians get ``caution`` times the matrix of the loss's cautious model on top. With 1 the full step
        decreases the loss; smaller values reach further, and a line search makes up for what goes too far.
        """
        eta = self.predictors(theta, who)
        gradients = self._back(self.loss.slope_at(eta, self.y[who]), who)
        matrices = self._gram_with(self.loss.curvature_at(eta, self.y[who]), who)
        if not self.loss.strictly_convex:
            singular = np.linalg.eigvalsh(unit_diagonal(matrices)[0])[:, 0] <= 100 * RANK_TOLERANCE
            if singular.any():
                cautious = self.loss.cautious_at(eta[singular], self.y[who[singular]])
                matrices[singular] += caution * self._gram_with(cautious, who[singular])
        return gradients, matrices

    def information(self, theta: Array) -> Array:
        """Least information about any direction, ``(B,)``: smallest eigenvalue of ``n H`` relative to the Gram matrix.

        One row whose curvature is 1 contributes 1 on average. For full-rank designs.
        """
        values, vectors, scale = self._gram_spectrum
        root = vectors / np.sqrt(np.maximum(values, RANK_TOLERANCE))[:, None, :] / scale[:, :, None]
        k, q = self.loss.n_outputs, self.X.shape[2]
        hessian = self.hessians(theta, np.arange(self.n_devices)).reshape(-1, k, q, k, q)
        relative = np.einsum("bqi,bkqlr,brj->bkilj", root, hessian, root, optimize=True)
        relative = relative.reshape(-1, k * q, k * q)
        return np.asarray(self.n_rows * np.linalg.eigvalsh(relative)[:, 0])

    def _X(self, who: Index) -> Array:
        return self.X if who.size == self.n_devices else self.X[who]

    def _back(self, slope: Array, who: Index) -> Array:
        if self.weight is not None:
            slope = slope * self.weight[who][:, :, None]
        mean = np.matmul(np.swapaxes(slope, 1, 2), self._X(who)) / self.n_rows
        return np.asarray(mean).reshape(who.size, -1)

    def _gram_with(self, curvature: Array, who: Index) -> Array:
        if self.weight is not None:
            curvature = curvature * self.weight[who][:, :, None, None]
        return weighted_gram(self._X(who), curvature)


def minimise(batch: RowBatch) -> tuple[Array, NDArray[np.bool_]]:
    """Minimisers ``theta (B, p)`` of full-rank devices, and which of them exist.

    A likelihood without a maximum (separated classes, a class or all counts missing) shows in the Hessian at the end of
    the iterations: they follow some direction until practically no information about it is left.
    """
    if batch.loss.quadratic:
        return _least_squares(batch), np.ones(batch.n_devices, dtype=bool)
    result = _newton(batch, np.zeros((batch.n_devices, batch.n_params)))
    exists = np.isfinite(result.theta).all(axis=1)
    if batch.loss.minimiser == "separable":
        unit = batch.loss.informative_curvature(batch.y)
        known = np.where(np.isfinite(result.theta), result.theta, 0.0)
        exists &= (unit > 0) & (batch.information(known) > SEPARATION_TOLERANCE * unit)
    elif batch.loss.minimiser == "unknown":
        exists &= result.converged
    return result.theta, np.asarray(exists)


def minimise_with_ridge(batch: RowBatch, ridge: Array) -> Array:
    """Minimisers ``(B, p)`` of the mean loss plus ``sum_c ridge_c theta_c^2 / 2``, ``ridge (B, p)`` positive."""
    return _newton(batch, ridge).theta


def _newton(batch: RowBatch, ridge: Array) -> NewtonResult:
    diagonal = np.arange(batch.n_params)

    def value(theta: Array, who: Index) -> Array:
        return np.asarray(batch.values(theta, who) + 0.5 * (ridge[who] * theta**2).sum(axis=1))

    def derivatives(theta: Array, who: Index, caution: float) -> tuple[Array, Array]:
        gradient, matrix = batch.derivatives(theta, who, caution)
        matrix[:, diagonal, diagonal] += ridge[who]
        return gradient + ridge[who] * theta, matrix

    result = damped_newton(value, partial(derivatives, caution=0.01), _start(batch), max_iter=150)
    if result.converged.all() or batch.loss.strictly_convex:
        return result
    # rarely, far-reaching steps run in circles; careful ones do not
    return damped_newton(value, partial(derivatives, caution=1.0), result.theta, max_iter=300)


def _least_squares(batch: RowBatch) -> Array:
    who = np.arange(batch.n_devices)
    theta = np.zeros((batch.n_devices, batch.n_params))
    for _ in range(2):  # the second solve refines the first
        theta = theta - solve_positive(batch.gram, batch.gradients(theta, who))
    return theta


def _start(batch: RowBatch) -> Array:
    """A start with finite value, close enough for counts of any size."""
    zero = np.zeros((batch.n_devices, batch.n_params))
    working = batch.loss.working_response(batch.y)
    if working is None:
        return zero
    response, weight = working
    if weight is None:
        return _least_squares(RowBatch(LinearLoss(), batch.X, response, batch.offset, batch.weight))
    weight = weight if batch.weight is None else weight * batch.weight
    theta = _least_squares(RowBatch(LinearLoss(), batch.X, response, batch.offset, weight))
    everyone = np.arange(batch.n_devices)
    better = batch.values(theta, everyone) < batch.values(zero, everyone)
    return np.where(better[:, None], theta, zero)


def _rows(array: Array | None, who: Index | NDArray[np.bool_]) -> Array | None:
    return None if array is None else array[who]
