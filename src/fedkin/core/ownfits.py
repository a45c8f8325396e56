"""Every site's own fit, with what its variance is made of, and the rule for sites that have none.

`fedkin.core.local` turns this into estimates and covariances and documents the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from fedkin._base import Array, Index
from fedkin.core.linalg import RANK_TOLERANCE, inverse_of, least_eigenvalue
from fedkin.core.row_newton import minimise, minimise_sum, minimise_with_ridge
from fedkin.core.rows import RowBatch, row_blocks, unit_weights
from fedkin.core.summaries import Summaries
from fedkin.data import Federation
from fedkin.losses import Loss, RowLoss

_BATCH_ENTRIES = 2**22  # rows times features that are worked on at once
ROUNDING = 1e-20  # exact fits keep a variance above rounding: this share of the response's mean square


class OwnFits:
    """The fits of M sites that share one loss; rows of the arrays are positions in ``members``."""

    def __init__(self, data: Federation | Summaries, members: Index, loss: Loss) -> None:
        self.data, self.members, self.loss = data, members, loss
        m, p = members.size, loss.n_params(data.n_features)
        self.theta, self.ridge = np.empty((m, p)), np.zeros((m, p))  # no ridge where a site has its own estimate
        self.rescued = np.zeros(m, dtype=bool)  # sites without an estimate of their own
        # Hessians of the mean losses, without the ridge; what stands for them in variances (their expected values where
        # they are singular); mean outer products of the scores
        self.hessian, self.curvature, self.score_cov = (np.empty((m, p, p)) for _ in range(3))
        # the degrees of freedom are infinite where the dispersion is not estimated; those of a sandwich are 0 where
        # there are too few rows for one
        self.dispersion, self.dof, self.matrix_dof = np.ones(m), np.full(m, np.inf), np.zeros(m)
        self.noise_covariance: Array | None = None  # of estimates from noisy sums, (M, p, p)
        self.notes: dict[int, list[str]] = {}

    @property
    def federation(self) -> Federation:
        """The rows."""
        assert isinstance(self.data, Federation)
        return self.data

    @property
    def n(self) -> Array:
        """As how many rows those of each site count."""
        if isinstance(self.data, Federation):
            return self.data.weight_sums[self.members]
        return self.data.n_samples[self.members].astype(np.float64)

    @property
    def n_params(self) -> int:
        return int(self.theta.shape[1])

    def note(self, who: Index, text: str) -> None:
        for k in who.tolist():
            self.notes.setdefault(k, []).append(text)


def fit_sites(federation: Federation, members: Index, loss: Loss) -> OwnFits:
    """Fit the sites with positions ``members`` (ascending), which share one loss."""
    fits = OwnFits(federation, members, loss)
    if has_means(loss):
        _fit_means(fits)
    elif loss.rowwise is not None:
        _fit_rows(fits, loss.rowwise)
    else:
        _fit_functions(fits)
    return fits


def has_means(loss: Loss) -> bool:
    """Whether the mean of the rows minimises the loss."""
    return loss.location and loss.quadratic


def _fit_means(fits: OwnFits) -> None:
    p = fits.n_params
    fits.hessian[:] = fits.curvature[:] = np.eye(p)
    for sites, rows in row_blocks(fits.federation, fits.members):
        where, X, weight = np.searchsorted(fits.members, sites), rows.X, unit_weights(rows)
        weighted = X if weight is None else weight[:, :, None] * X
        fits.theta[where] = weighted.mean(axis=1)
        centred = X - fits.theta[where][:, None, :]
        scattered = centred if weight is None else weight[:, :, None] * centred
        fits.score_cov[where] = np.matmul(np.swapaxes(scattered, 1, 2), centred) / X.shape[1]
    degrees = np.asarray((fits.n - 1.0) * p, dtype=np.float64)
    total = np.einsum("mpp->m", fits.score_cov) * fits.n
    X, weight = fits.federation.X, fits.federation.weight
    square = np.average(X**2, axis=0, weights=weight)
    variance = np.average((X - np.average(X, axis=0, weights=weight)) ** 2, axis=0, weights=weight)
    share_dispersion(fits, total, degrees, total, float(variance.mean()))
    fits.dispersion = np.maximum(fits.dispersion, ROUNDING * float(square.mean()))
    # n - 1 degrees of freedom span R^p only when there are at least p of them
    fits.matrix_dof = np.where(fits.n > p, fits.n - 1.0, 0.0)


def _fit_rows(fits: OwnFits, loss: RowLoss) -> None:
    batches = list(_batches(fits.federation, fits.members, loss))
    p = fits.n_params
    scale = column_scale(fits.federation.X, loss, fits.federation.weight)
    rank = np.empty(fits.members.size, dtype=np.int64)
    size = np.empty(fits.members.size)
    for where, batch in batches:
        rank[where], size[where] = batch.rank, plausible_size(batch)
        _fit_own(fits, where, batch)
    unfit = fits.rescued
    size = np.maximum(size, np.average(size, weights=fits.n))
    size[size == 0] = 1.0
    degrees = fits.n - rank * (p / fits.federation.n_features)
    if loss.estimates_scale:
        # a light ridge shows how large the noise is, and the noise then how large the ridge should be
        fits.ridge[unfit] = light_ridge(scale, fits.n[unfit, None])
        _fit_ridge(fits, batches)
        total = _residual_sums(fits, batches, loss.dispersion)
        lent = total if degrees.min() > 0 else _residual_sums(fits, batches, loss.lent_dispersion)
        share_dispersion(fits, total, degrees, lent, float(np.average(size, weights=fits.n)))
        fits.dispersion = np.maximum(fits.dispersion, ROUNDING * size)
    fits.ridge[unfit] = ridge_rule(scale, fits.n[unfit], size[unfit], fits.dispersion[unfit])
    _fit_ridge(fits, batches)
    for k in np.flatnonzero(unfit).tolist():
        line = no_minimiser_note(loss, int(fits.n[k]), int(rank[k]), fits.federation.n_features)
        fits.notes[k] = [line, *fits.notes.get(k, [])]
    for where, batch in batches:
        _describe_rows(fits, where, batch)


def why_no_minimiser(loss: RowLoss, n_rows: int, rank: int, n_features: int) -> str:
    """Why rows have no unique minimiser, in words."""
    if rank < n_features:
        rows = "1 row" if n_rows == 1 else f"{n_rows} rows"
        return f"{rows} and a design of rank {rank} for {n_features} features"
    return f"the {loss.name} loss has no minimum (separated classes, one class only or no counts)"


def no_minimiser_note(loss: RowLoss, n_rows: int, rank: int, n_features: int) -> str:
    """What a site without an estimate of its own is told."""
    why = why_no_minimiser(loss, n_rows, rank, n_features)
    return f"{why}: ridge fit, wide in the directions that the rows do not show"


def _fit_own(fits: OwnFits, where: Index, batch: RowBatch) -> None:
    """Own estimates where they exist, NaN elsewhere."""
    fits.theta[where], fits.rescued[where] = np.nan, True
    full = np.flatnonzero(batch.full_rank)
    if full.size:
        theta, exists = minimise(batch.take(full))
        own = where[full[exists]]
        fits.theta[own], fits.rescued[own] = theta[exists], False


def _fit_ridge(fits: OwnFits, batches: Sequence[tuple[Index, RowBatch]]) -> None:
    for where, batch in batches:
        poor = np.flatnonzero(fits.rescued[where])
        if poor.size:
            fits.theta[where[poor]] = minimise_with_ridge(batch.take(poor), fits.ridge[where[poor]])


def _describe_rows(fits: OwnFits, where: Index, batch: RowBatch) -> None:
    """Hessians, score covariances and the degrees of freedom of a sandwich at the estimates."""
    n, p, eta = fits.n[where], fits.n_params, batch.predictors(fits.theta[where])
    slope, weights = batch.loss.slope_at(eta, batch.y), batch.loss.curvature_at(eta, batch.y)
    fits.hessian[where] = batch.gram_of(weights)
    fits.score_cov[where] = batch.gram_of(slope[..., :, None] * slope[..., None, :])
    fits.curvature[where] = fits.hessian[where]
    own = ~fits.rescued[where]
    flat = own & (least_eigenvalue(fits.hessian[where]) <= RANK_TOLERANCE)
    if flat.any():
        # Huber's Hessian misses the rows beyond the corner; its expected value is their share times the Gram matrix
        share = batch.average(np.einsum("bnkk->bn", weights)) / batch.loss.n_outputs
        eye = np.eye(batch.loss.n_outputs)
        spread = np.einsum("kl,bqr->bkqlr", eye, batch.gram[flat]).reshape(-1, p, p)
        fits.curvature[where[flat]] = np.maximum(share[flat], 1.0 / n[flat])[:, None, None] * spread
        fits.note(where[flat], "the Hessian at the estimate is singular: its expected value stands in for it")
    usable = np.flatnonzero(own & ~flat & (n > p))
    if usable.size:
        inverse = inverse_of(fits.hessian[where[usable]])
        k = batch.loss.n_outputs
        blocks = inverse.reshape(usable.size, k, p // k, k, p // k)
        X = batch.X[usable]
        leverage = np.einsum("bnq,bkqlr,bnr,bnkl->bn", X, blocks, X, weights[usable], optimize=True)
        # how far the mean of squared scores is from a Wishart matrix depends on how uneven the leverages are
        uneven = np.maximum(3.0 * batch.average(leverage**2, usable) / (p * (p + 2.0)), 1e-300)
        fits.matrix_dof[where[usable]] = np.minimum((n[usable] - p) / uneven, n[usable] - p)


def _fit_functions(fits: OwnFits) -> None:
    """Sites with a loss that is known only as functions."""
    for k, u in enumerate(fits.members):
        rows = fits.federation[fits.federation.sites[u]]
        theta, ridge, problem = minimise_sum([(1.0, fits.loss, rows)], rows.n_samples, fits.n_params)
        fits.theta[k], fits.ridge[k] = theta, ridge
        fits.rescued[k] = bool(problem)
        if problem:
            fits.note(np.array([k]), problem)
        fits.hessian[k] = fits.curvature[k] = fits.loss.hessian(theta, *rows.arrays)
        scores = fits.loss.scores(theta, *rows.arrays)
        fits.score_cov[k] = scores.T @ scores / rows.n_samples
        fits.dispersion[k] = fits.loss.dispersion(theta, *rows.arrays)
    degrees = fits.n.astype(np.float64) - fits.n_params
    if fits.loss.estimates_scale:
        total = fits.dispersion * np.maximum(degrees, 1.0)
        share_dispersion(fits, total, degrees, total, 1.0)
    fits.matrix_dof = np.where(fits.rescued, 0.0, np.maximum(degrees, 0.0))


def share_dispersion(fits: OwnFits, total: Array, degrees: Array, lent: Array, fallback: float) -> None:
    """Dispersions ``total / degrees``; sites without degrees of freedom take the mean of what the others lend."""
    own = degrees > 0
    fits.dispersion = np.divide(total, degrees, out=np.ones_like(total), where=own)
    fits.dof = np.where(own, degrees, np.inf)
    if not own.all():
        without = np.flatnonzero(~own)
        if own.any():
            pooled, pooled_dof = float(lent[own].sum() / degrees[own].sum()), float(degrees[own].sum())
            others = "taken from another site" if own.sum() == 1 else f"pooled over {own.sum()} other sites"
            text = f"no residual degrees of freedom: noise variance {others}"
        else:
            pooled, pooled_dof = fallback, float(fits.n.sum())
            text = "no site has residual degrees of freedom: the mean square of the response stands in for the noise"
        fits.dispersion[without], fits.dof[without] = pooled, pooled_dof
        fits.note(without, text)
    fits.dispersion = np.maximum(fits.dispersion, 1e-100)


def _residual_sums(fits: OwnFits, batches: Sequence[tuple[Index, RowBatch]], dispersion: Callable[..., float]) -> Array:
    """Dispersions times the degrees of freedom that `Loss.dispersion` divides by."""
    total = np.empty(fits.members.size)
    for where, batch in batches:
        for b, k in enumerate(where.tolist()):
            weight = None if batch.weight is None else batch.weight[b] * (fits.n[k] / batch.n_rows)
            total[k] = dispersion(fits.theta[k], *batch.rows.take(b).arrays, weight)
        total[where] *= np.maximum(fits.n[where] - batch.n_params, 1)
    return total


def _batches(federation: Federation, members: Index, loss: RowLoss) -> Iterator[tuple[Index, RowBatch]]:
    """Batches of sites with equally many rows, and their positions in ``members`` (which ascend)."""
    for sites, rows in row_blocks(federation, members):
        rows = rows.map(lambda part: part.astype(np.float64, copy=False))
        step = max(1, _BATCH_ENTRIES // max(rows.X[0].size * loss.n_outputs, 1))
        for start in range(0, sites.size, step):
            part = slice(start, start + step)
            some = rows.take(part)
            yield np.searchsorted(members, sites[part]), RowBatch(loss, some, unit_weights(some))


def plausible_size(batch: RowBatch) -> Array:
    """Mean square ``(B,)`` that linear predictors may have, by weights where predictors are in the response's units."""
    y, offset = batch.y, batch.rows.offset
    if batch.weight is None or not batch.loss.estimates_scale:
        return batch.loss.plausible_size(y, offset)
    return batch.loss.plausible_size(np.sqrt(batch.weight) * (y if offset is None else y - offset), None)


def light_ridge(scale: Array, n_rows: Array | float) -> Array:
    """A ridge of a thousandth of a row's worth, with which a fit shows how large the noise is."""
    return np.asarray(1e-3 * scale / n_rows)


def ridge_rule(scale: Array, n_rows: Array | float, size: Array, dispersion: Array | float) -> Array:
    """The ridge ``(M, p)`` of sites without a minimiser, see `fedkin.core.LocalFit`."""
    return np.asarray((dispersion / (n_rows * size))[:, None] * scale)


def column_scale(X: Array, loss: RowLoss, weight: Array | None = None) -> Array:
    """Mean square of each parameter's feature, ``(p,)``; 1 for a column of zeros, which has no scale."""
    scale = np.tile(np.average(X**2, axis=0, weights=weight), loss.n_outputs)
    return np.where(scale > 0, scale, 1.0)
