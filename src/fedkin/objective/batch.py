"""Devices with equally many rows, so that linear algebra runs on all of them at once: `RowBlock` and `RowBatch`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedkin._base import Array, Index, Mask
from fedkin.data import Federation, Rows
from fedkin.losses import RowLoss, weighted_gram
from fedkin.objective.linalg import RANK_TOLERANCE, unit_diagonal


@dataclass(frozen=True)
class RowBlock:
    """Devices ``(B,)`` with the same number of rows, and these: ``X (B, n, q)``, ``y (B, n)``, ``offset (B, n)``."""

    devices: Index
    rows: Rows


def row_blocks(federation: Federation, devices: Index) -> tuple[RowBlock, ...]:
    """Devices grouped by their number of rows, in the order given within each group."""
    sizes = federation.n_samples[devices]
    blocks = []
    for size in np.unique(sizes):
        members = devices[sizes == size]
        rows = (federation.starts[members][:, None] + np.arange(size)).reshape(-1)
        contiguous = rows.size > 0 and bool((np.diff(rows) == 1).all())
        where = slice(int(rows[0]), int(rows[-1]) + 1) if contiguous else rows
        shape = (members.size, int(size))

        def fold(array: Array, shape: tuple[int, int] = shape) -> Array:
            return array.reshape(*shape, *array.shape[1:])

        blocks.append(RowBlock(members, federation.rows.take(where).map(fold)))
    return tuple(blocks)


@dataclass(frozen=True, eq=False)
class RowBatch:
    """B devices of one loss, with n rows each.

    Attributes
    ----------
    loss : RowLoss
    rows : Rows
        ``X (B, n, q)``, ``y (B, n)``, ``offset (B, n)`` or None.
    weight : array (B, n) or None
        Weights of the rows, with mean 1 on each device; None for equal weights.

    Notes
    -----
    Methods take ``theta (A, p)`` of the devices ``who (A,)``, or of all of them when it is None.
    """

    loss: RowLoss
    rows: Rows
    weight: Array | None = None

    @property
    def X(self) -> Array:
        return self.rows.X

    @property
    def y(self) -> Array:
        assert self.rows.y is not None
        return self.rows.y

    @property
    def n_rows(self) -> int:
        return int(self.X.shape[1])

    @property
    def n_devices(self) -> int:
        return int(self.X.shape[0])

    @property
    def n_params(self) -> int:
        return self.loss.n_params(self.X.shape[2])

    def take(self, who: Index | Mask) -> RowBatch:
        """Some of the devices."""
        return RowBatch(self.loss, self.rows.take(who), None if self.weight is None else self.weight[who])

    # --- the mean losses ---

    def predictors(self, theta: Array, who: Index | None = None) -> Array:
        """Linear predictors ``(A, n, k)``."""
        k, offset = self.loss.n_outputs, self.rows.offset
        eta = np.matmul(_of(self.X, who), np.swapaxes(theta.reshape(theta.shape[0], k, -1), 1, 2))
        return np.asarray(eta if offset is None else eta + _of(offset, who)[:, :, None])

    def values(self, theta: Array, who: Index | None = None) -> Array:
        """Mean losses ``(A,)``."""
        rows = self.loss.value_at(self.predictors(theta, who), _of(self.y, who))
        return np.asarray((rows if self.weight is None else rows * _of(self.weight, who)).mean(axis=1))

    def gradients(self, theta: Array, who: Index | None = None) -> Array:
        """Gradients ``(A, p)``."""
        return self.mean_of(self.loss.slope_at(self.predictors(theta, who), _of(self.y, who)), who)

    def hessians(self, theta: Array, who: Index | None = None) -> Array:
        """Hessians ``(A, p, p)``."""
        return self.grams(theta, self.loss.curvature_at, who)

    def grams(self, theta: Array, weights_at: Callable[[Array, Array], Array], who: Index | None = None) -> Array:
        """Means of ``x x' (x) W`` with ``W = weights_at(eta, y)``, shape ``(A, p, p)``."""
        return self.gram_of(weights_at(self.predictors(theta, who), _of(self.y, who)), who)

    def mean_of(self, slope: Array, who: Index | None = None) -> Array:
        """Means of ``slope (x) x`` over a device's rows, ``(A, p)``, for ``slope (A, n, k)``."""
        if self.weight is not None:
            slope = slope * _of(self.weight, who)[:, :, None]
        mean = np.matmul(np.swapaxes(slope, 1, 2), _of(self.X, who)) / self.n_rows
        return np.asarray(mean).reshape(slope.shape[0], -1)

    def gram_of(self, weights: Array, who: Index | None = None) -> Array:
        """Means of ``x x' (x) W`` for ``weights (A, n, k, k)``."""
        if self.weight is not None:
            weights = weights * _of(self.weight, who)[:, :, None, None]
        return weighted_gram(_of(self.X, who), weights)

    # --- what the design shows ---

    @cached_property
    def gram(self) -> Array:
        """``mean_k x_k x_k'``, shape ``(B, q, q)``."""
        return self.gram_of(np.ones((*self.X.shape[:2], 1, 1)))

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
    def full_rank(self) -> Mask:
        return np.asarray(self.rank == self.X.shape[2])

    def information(self, theta: Array) -> Array:
        """Least information about any direction, ``(B,)``: smallest eigenvalue of ``n H`` relative to the Gram matrix.

        One row whose curvature is 1 contributes 1 on average. For full-rank designs.
        """
        values, vectors, scale = self._gram_spectrum
        root = vectors / np.sqrt(np.maximum(values, RANK_TOLERANCE))[:, None, :] / scale[:, :, None]
        k, q = self.loss.n_outputs, self.X.shape[2]
        hessian = self.hessians(theta).reshape(-1, k, q, k, q)
        relative = np.einsum("bqi,bkqlr,brj->bkilj", root, hessian, root, optimize=True)
        relative = relative.reshape(-1, k * q, k * q)
        return np.asarray(self.n_rows * np.linalg.eigvalsh(relative)[:, 0])


def _of(array: Array, who: Index | None) -> Array:
    return array if who is None or who.size == array.shape[0] else array[who]
