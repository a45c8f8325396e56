"""Curvature of each site's loss: numbers that the site knows, from which steps and rho are chosen."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedkin._base import Array
from fedkin.admm.gradients import SiteRows
from fedkin.core import QuadraticTerms, SiteTerms
from fedkin.losses import Loss, by_loss

#: A site with less curvature than this share of its largest one counts as if it had that much.
WEAKEST_SHARE = 0.02
_FIT_STEPS = 8


@dataclass(frozen=True, eq=False)
class Curvature:
    """Curvatures ``(V,)`` of the sites' mean losses, at 0 and near their own minimisers.

    - ``weakest``: smallest eigenvalue of the Hessian near the minimiser, at least `WEAKEST_SHARE` of the largest;
    - ``mean``: mean eigenvalue there;
    - ``strongest``: largest eigenvalue met;
    - ``row``: curvature of a single row's loss, weighted by itself: what a random row shows where it matters;
    - ``worst_row``: the largest of them.
    """

    weakest: Array
    mean: Array
    strongest: Array
    row: Array
    worst_row: Array

    def of_batches(self, rows: SiteRows, worst: bool = False) -> Array:
        """Smoothness ``(V,)`` that a random batch shows, between `strongest` (all rows) and `row` (one row).

        The expected smoothness of Gower et al. (2019, "SGD: general analysis and improved rates") for batches without
        replacement, which is proven with the worst row.
        """
        n = rows.counts.astype(np.float64)
        b = np.minimum(rows.batch, rows.counts).astype(np.float64)
        one = self.worst_row if worst else self.row
        return np.asarray((n * (b - 1.0) * self.strongest + (n - b) * one) / (b * np.maximum(n - 1.0, 1.0)))


def local_curvature(terms: SiteTerms, rows: SiteRows) -> Curvature:
    """Measure the curvatures of the sites' mean losses ``terms``, whose rows are ``rows``."""
    zero = np.zeros((terms.n_sites, terms.n_params))
    fit = zero if isinstance(terms, QuadraticTerms) else _rough_fit(terms)
    smallest, largest, mean = _spectrum(terms, fit)
    typical, worst = _row_curvature(rows, fit)
    if fit is not zero:
        largest = np.maximum(largest, _spectrum(terms, zero)[1])
        typical, worst = (np.maximum(*pair) for pair in zip((typical, worst), _row_curvature(rows, zero), strict=True))
    # losses without rows of their own: the trace is the mean curvature of a row, if rows are alike
    unknown = ~np.isfinite(worst)
    typical, worst = (np.maximum(np.where(unknown, mean * terms.n_params, each), largest) for each in (typical, worst))
    tiny = np.finfo(float).tiny
    weakest = np.maximum(smallest, WEAKEST_SHARE * largest)
    return Curvature(weakest + tiny, mean + tiny, largest + tiny, typical + tiny, worst + tiny)


def _spectrum(terms: SiteTerms, theta: Array) -> tuple[Array, Array, Array]:
    if isinstance(terms, QuadraticTerms) and terms.isotropic:
        return terms.A, terms.A, terms.A
    hessians = terms.hessians(theta)
    values = np.linalg.eigvalsh(hessians)
    mean = np.asarray(np.einsum("vii->v", hessians), dtype=np.float64) / terms.n_params
    return np.asarray(values[:, 0], dtype=np.float64), np.asarray(values[:, -1], dtype=np.float64), mean


def _rough_fit(terms: SiteTerms) -> Array:
    """Some damped Newton steps from 0, each only where it lowers the site's loss."""
    theta = np.zeros((terms.n_sites, terms.n_params))
    with np.errstate(over="ignore", invalid="ignore"):
        value = terms.values(theta)
        damping = np.full(terms.n_sites, 0.05)
        for _ in range(_FIT_STEPS):
            hessians = terms.hessians(theta)
            mean = np.einsum("vii->v", hessians) / terms.n_params
            lift = damping * mean + np.finfo(float).tiny
            shifted = hessians + lift[:, None, None] * np.eye(terms.n_params)
            tried = theta - np.linalg.solve(shifted, terms.gradients(theta)[:, :, None])[:, :, 0]
            tried_value = terms.values(tried)
            better = np.isfinite(tried_value) & (tried_value < value)
            theta = np.where(better[:, None], tried, theta)
            value = np.where(better, tried_value, value)
            damping = np.where(better, 0.3 * damping + 0.015, 10.0 * damping)
    return theta


def _row_curvature(rows: SiteRows, theta: Array) -> tuple[Array, Array]:
    """Typical and largest curvature of one row on each site, infinite where the loss has no rows of its own."""
    typical, worst = np.empty(rows.starts.size), np.empty(rows.starts.size)
    for members, loss in by_loss(rows.losses):
        typical[members], worst[members] = _row_curvature_of(loss, rows, members, theta)
    return typical, worst


def _row_curvature_of(loss: Loss, rows: SiteRows, members: NDArray[np.int64], theta: Array) -> tuple[Array, Array]:
    ridge = rows.ridge.max()
    counts = rows.counts[members]
    first = np.concatenate([[0], np.cumsum(counts)[:-1]])
    numbers = np.repeat(rows.starts[members] - first, counts) + np.arange(counts.sum())
    each = loss.row_curvatures(theta[np.repeat(members, counts)], *rows.data.take(numbers).arrays)
    if each is None:
        unknown = np.full(members.size, np.inf)
        return unknown, unknown
    total = np.maximum(np.add.reduceat(each, first), np.finfo(float).tiny)
    # the trace of E(curvature^2 x x' / ...) over that of the Hessian: heavy rows count as much as they can hurt
    typical = np.add.reduceat(each * each, first) / total
    return typical + ridge, np.maximum.reduceat(each, first) + ridge
