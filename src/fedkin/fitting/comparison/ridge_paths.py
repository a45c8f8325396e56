"""Ridge regressions tuned by leaving out one row at a time, in closed form: at each site, and pooled.

One eigendecomposition gives the fits of all ridges, and the leverages give every row's prediction without it; nothing
is fitted twice. Rows are those of `prepare`: an intercept first where there is one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedkin._base import Array, Index

#: Ridges that are tried, for standardised columns and sums over rows.
RIDGES = np.logspace(-2, 4, 13)
#: Strengths that hold site intercepts together: noise variance over the variance between sites.
HOLDS = np.logspace(-1, 3, 9)
_LEAST_FREEDOM = 1e-9  # of a row to differ from its fit; less is rounding


class SiteRows(NamedTuple):
    """Rows ``X (N, p)``, ``y (N,)``, ``weight (N,)`` of V sites, one after the other from ``starts (V + 1,)``."""

    X: Array
    y: Array
    weight: Array
    starts: Index
    intercept: bool

    @property
    def n_sites(self) -> int:
        return len(self.starts) - 1

    @property
    def site(self) -> Index:
        """The site of each row, ``(N,)``."""
        return np.repeat(np.arange(self.n_sites), np.diff(self.starts))


def own_ridges(rows: SiteRows) -> Array:
    """A ridge regression at each site, tuned there: ``theta (V, p)``.

    What `sklearn.linear_model.RidgeCV` finds at a site whose columns were standardised there.
    """
    sizes, theta = np.diff(rows.starts), np.zeros((rows.n_sites, rows.X.shape[1]))
    for size in np.unique(sizes):
        sites = np.flatnonzero(sizes == size)
        # as many sites at once as a few hundred thousand numbers hold
        for part in np.array_split(sites, max(1, int(size) * sites.size * rows.X.shape[1] // 2_000_000)):
            where = rows.starts[part][:, None] + np.arange(size)
            theta[part] = _own_block(rows.X[where], rows.y[where], rows.weight[where], rows.intercept)
    return theta


def _own_block(X: Array, y: Array, weight: Array, intercept: bool) -> Array:
    """Parameters ``(B, p)`` of sites with equally many rows: ``X (B, n, p)``, ``y`` and ``weight (B, n)``."""
    first = int(intercept)
    columns, total = X[:, :, first:], weight.sum(axis=1)
    mean, middle = np.zeros(columns.shape[::2]), np.zeros(len(X))
    if intercept:
        mean = np.einsum("bn,bnq->bq", weight, columns) / total[:, None]
        middle = (weight * y).sum(axis=1) / total
    centred = columns - mean[:, None]
    scale = np.sqrt(np.einsum("bn,bnq->bq", weight, centred**2) / total[:, None])
    scale = np.where(scale > 1e-12 * np.abs(columns).max(axis=1), scale, 1.0)
    root = np.sqrt(weight)
    Z, target = centred / scale[:, None] * root[:, :, None], (y - middle[:, None]) * root
    size, turn = np.linalg.eigh(np.swapaxes(Z, 1, 2) @ Z)
    U = Z @ turn
    along = np.einsum("bnq,bn->bq", U, target)
    shrunk = 1.0 / (np.maximum(size, 0.0)[:, :, None] + RIDGES)
    leverage = (U**2) @ shrunk + (weight / total[:, None] if intercept else 0 * weight)[:, :, None]
    missed = (target[:, :, None] - U @ (along[:, :, None] * shrunk)) / np.maximum(1.0 - leverage, _LEAST_FREEDOM)
    best = _largest_best((missed**2).sum(axis=1))
    chosen = along * shrunk[np.arange(len(X)), :, best]
    slopes = np.einsum("bqk,bk->bq", turn, chosen) / scale
    if not intercept:
        return np.asarray(slopes)
    return np.column_stack([middle - (slopes * mean).sum(axis=1), slopes])


def _largest_best(scores: Array) -> Index:
    """The largest of the best ridges for each row of ``scores (B, A)``: without two other rows, all are as good."""
    good = scores <= scores.min(axis=1, keepdims=True) * (1 + 1e-6) + 1e-300
    return np.asarray(scores.shape[1] - 1 - good[:, ::-1].argmax(axis=1))


def pooled_ridge(rows: SiteRows, holds: Array | None = None) -> Array:
    """One ridge regression for all sites, tuned: ``theta (V, p)``, with site intercepts where ``holds`` are given.

    ``holds`` are the strengths that are tried, ``sum_u hold b_u^2`` beside the sum of squares: site u's intercept is
    the common one plus ``b_u``. Without them all rows of ``theta`` are equal.
    """
    first, pooled = int(rows.intercept), _Pooled.of(rows)
    best: tuple[float, Array, Array] | None = None
    for hold in (np.inf,) if holds is None else holds:
        share = np.zeros(rows.n_sites) if np.isinf(hold) else 1.0 / (pooled.total + hold)
        found = pooled.tuned(share)
        best = found if best is None or found[0] < best[0] else best
    assert best is not None
    _, common, own = best
    theta = np.tile(common[1 - first :], (rows.n_sites, 1))
    if first:
        theta[:, 0] += own
    return theta


class _Pooled(NamedTuple):
    """Rows times the roots of their weights, ``Z (N, q)`` and ``target (N,)``, and their sums at sites and over all."""

    Z: Array
    target: Array
    root: Array
    site: Index
    intercept: bool
    total: Array  # (V,), weights
    columns: Array  # (V, q)
    targets: Array  # (V,)
    gram: Array  # (q, q)
    cross: Array  # (q,)

    @classmethod
    def of(cls, rows: SiteRows) -> _Pooled:
        root, plain, first = np.sqrt(rows.weight), rows.X[:, int(rows.intercept) :], rows.starts[:-1]
        unit = bool((rows.weight == 1).all())
        Z, target = (plain, rows.y) if unit else (plain * root[:, None], rows.y * root)
        total, targets = np.add.reduceat(rows.weight, first), np.add.reduceat(target * root, first)
        columns = np.add.reduceat(plain if unit else Z * root[:, None], first, axis=0)
        return cls(Z, target, root, rows.site, rows.intercept, total, columns, targets, Z.T @ Z, Z.T @ target)

    def tuned(self, share: Array) -> tuple[float, Array, Array]:
        """Squared error without each row, common parameters ``(1 + q,)``, what sites add to the intercept ``(V,)``.

        With site intercepts eliminated, least squares is in the metric ``M = I - share_u 1 1'`` on the rows of site u,
        so ``M x`` is x less ``share_u`` times the site's sum; ``left`` is what that leaves of ones.
        """
        left = (1.0 - share * self.total) if self.intercept else 0.0 * share
        mass = float(left @ self.total)
        has_common = mass > 1e-10 * max(float(self.total.sum()) * self.intercept, 1e-300)
        mean, middle = np.zeros(self.Z.shape[1]), 0.0
        if has_common:
            mean, middle = left @ self.columns / mass, float(left @ self.targets) / mass
        shrunk_sums = share[:, None] * self.columns
        size, turn = np.linalg.eigh(self.gram - self.columns.T @ shrunk_sums - mass * np.outer(mean, mean))
        along = turn.T @ (self.cross - shrunk_sums.T @ self.targets - mass * mean * middle)
        shrunk = 1.0 / (np.maximum(size, 0.0)[:, None] + RIDGES)
        U = self.Z @ turn
        U -= self._at_rows((shrunk_sums + np.outer(left, mean)) @ turn)
        fitted = U @ (along[:, None] * shrunk)
        missed = self.target[:, None] - self._at_rows((share * self.targets + left * middle)[:, None]) - fitted
        np.square(U, out=U)
        constant = self.root**2 * (share + (left**2 / mass if has_common else 0.0))[self.site]
        missed /= np.maximum((1.0 - constant)[:, None] - U @ shrunk, _LEAST_FREEDOM)
        score = np.einsum("na,na->a", missed, missed)
        best = int(_largest_best(score[None])[0])
        slopes = turn @ (along * shrunk[:, best])
        common = np.concatenate([[middle - float(mean @ slopes)], slopes])
        own = share * (self.targets - self.total * self.intercept * common[0] - self.columns @ slopes)
        return float(score[best]), common, own

    def _at_rows(self, of_sites: Array) -> Array:
        """What sites have ``(V, k)``, at their rows."""
        return np.asarray(of_sites[self.site] * self.root[:, None])
