"""Every site's own fit, from rows or sums, with what its variance is made of, and the rule for sites that have none.

`fedkin.core.local` turns this into estimates and covariances and documents the rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from fedkin._base import Array, Index, Mask
from fedkin.core.newton import (
    RANK_TOLERANCE,
    damped_newton,
    inverse_of,
    least_eigenvalue,
    solve_positive,
    unit_diagonal,
)
from fedkin.core.quadratics import RowData
from fedkin.core.rows import RowBatch, row_blocks, unit_weights
from fedkin.core.summaries import Summaries
from fedkin.data import Federation, Rows
from fedkin.errors import ParameterError
from fedkin.losses import LinearLoss, Loss, RowLoss

_BATCH_ENTRIES = 2**22  # rows times features that are worked on at once
#: Information about some direction, in rows' worth, below which a likelihood counts as having no maximum.
SEPARATION_TOLERANCE = 1e-6
ROUNDING = 1e-20  # exact fits keep a variance above rounding: this share of the response's mean square


class OwnFits:
    """The fits of M sites that share one loss; rows of the arrays are positions in ``members``."""

    def __init__(self, members: Index, loss: Loss, n: Array, n_features: int) -> None:
        self.members, self.loss, self.n, self.n_features = members, loss, n, n_features
        m, p = members.size, loss.n_params(n_features)
        self.theta, self.ridge = np.empty((m, p)), np.zeros((m, p))  # no ridge where a site has its own estimate
        self.rescued = np.zeros(m, dtype=bool)  # sites without an estimate of their own
        # Hessians of the mean losses, without the ridge; what stands for them in variances (their expected values where
        # they are singular); mean outer products of the scores, 0 where they are not known
        self.hessian, self.curvature, self.score_cov = (np.zeros((m, p, p)) for _ in range(3))
        # the degrees of freedom are infinite where the dispersion is not estimated; those of a sandwich are 0 where
        # there are too few rows for one
        self.dispersion, self.dof, self.matrix_dof = np.ones(m), np.full(m, np.inf), np.zeros(m)
        self.noise_covariance: Array | None = None  # of estimates from noisy sums, (M, p, p)
        self.notes: dict[int, list[str]] = {}

    @property
    def n_params(self) -> int:
        return int(self.theta.shape[1])

    def note(self, who: Index, text: str) -> None:
        for k in who.tolist():
            self.notes.setdefault(k, []).append(text)

    def share_dispersion(self, total: Array, degrees: Array, lent: Array, fallback: float) -> None:
        """Dispersions ``total / degrees``; sites without degrees of freedom take the mean of what the others lend."""
        own = degrees > 0
        self.dispersion = np.divide(total, degrees, out=np.ones_like(total), where=own)
        self.dof = np.where(own, degrees, np.inf)
        if not own.all():
            without = np.flatnonzero(~own)
            if own.any():
                pooled, pooled_dof = float(lent[own].sum() / degrees[own].sum()), float(degrees[own].sum())
                others = "taken from another site" if own.sum() == 1 else f"pooled over {own.sum()} other sites"
                text = f"no residual degrees of freedom: noise variance {others}"
            else:
                pooled, pooled_dof = fallback, float(self.n.sum())
                text = "no site has residual degrees of freedom: the mean square of the response is used for the noise"
            self.dispersion[without], self.dof[without] = pooled, pooled_dof
            self.note(without, text)
        self.dispersion = np.maximum(self.dispersion, 1e-100)


def fit_sites(data: RowData | Summaries, members: Index, loss: Loss, *, describe: bool = True) -> OwnFits:
    """Fit the sites with positions ``members`` (ascending), which share one loss; ``describe`` what variances need."""
    fits = OwnFits(members, loss, data.n[members].astype(np.float64), data.n_features)
    if data.rows is not None:
        if loss.location and loss.quadratic:
            _fit_means(fits, _moments_of_rows(data.rows, members), 0.0)
        elif loss.rowwise is not None:
            _fit_by_rule(fits, _RowFits(fits, data.rows), loss.rowwise, describe)
        else:
            _fit_functions(fits, data.rows)
        return fits
    if loss.location and loss.quadratic:
        moments = _moments_of_sums(data)
        _fit_means(fits, moments, _residual_noise(data, moments[0]))
    elif loss.quadratic and loss.rowwise is not None:
        _fit_by_rule(fits, _SumFits(fits, data), loss.rowwise, describe)
    else:
        _take_estimates(fits, data)
    if data.privacy is not None:
        fits.noise_covariance = _noise_covariances(data, fits)
    return fits


# --- means --------------------------------------------------------------------------------------------------------

#: Means ``(M, p)`` and covariances ``(M, p, p)`` of rows by site; mean squares ``(q,)`` and variances of all rows.
_Moments = tuple[Array, Array, Array, Array]


def _moments_of_rows(rows: Federation, members: Index) -> _Moments:
    theta = np.empty((members.size, rows.n_features))
    scatter = np.empty((members.size, rows.n_features, rows.n_features))
    for sites, block in row_blocks(rows, members):
        where, X, weight = np.searchsorted(members, sites), block.X, unit_weights(block)
        theta[where] = (X if weight is None else weight[:, :, None] * X).mean(axis=1)
        centred = X - theta[where][:, None, :]
        scattered = centred if weight is None else weight[:, :, None] * centred
        scatter[where] = np.matmul(np.swapaxes(scattered, 1, 2), centred) / X.shape[1]
    mean = np.average(rows.X, axis=0, weights=rows.weight)
    square = np.average(rows.X**2, axis=0, weights=rows.weight)
    return theta, scatter, square, np.average((rows.X - mean) ** 2, axis=0, weights=rows.weight)


def _moments_of_sums(sums: Summaries) -> _Moments:
    assert sums.scores is not None
    n, rows = sums.n, int(sums.n_samples.sum())
    theta = -sums.sums.gradient.sum(axis=1) / n[:, None]
    scatter = sums.scores.sum(axis=1) / n[:, None, None] - theta[:, :, None] * theta[:, None, :]
    mean, square = sums.column_sums.sum(axis=0) / rows, sums.column_squares.sum(axis=0) / rows
    return theta, scatter, square, (square - mean**2).clip(0.0)


def _fit_means(fits: OwnFits, moments: _Moments, least: Array | float) -> None:
    p = fits.n_params
    fits.hessian[:] = fits.curvature[:] = np.eye(p)
    fits.theta, fits.score_cov, square, variance = moments
    total = np.maximum(np.einsum("mpp->m", fits.score_cov) * fits.n, least)
    fits.share_dispersion(total, (fits.n - 1.0) * p, total, float(variance.mean()))
    fits.dispersion = np.maximum(fits.dispersion, ROUNDING * float(square.mean()))
    # n - 1 degrees of freedom span R^p only when there are at least p of them
    fits.matrix_dof = np.where(fits.n > p, fits.n - 1.0, 0.0)


# --- losses on linear predictors ----------------------------------------------------------------------------------


def _fit_by_rule(fits: OwnFits, sites: _RowFits | _SumFits, loss: RowLoss, describe: bool) -> None:
    fits.theta, exists = sites.own()
    fits.rescued = ~exists
    unfit, n = np.flatnonzero(fits.rescued), fits.n
    size = np.maximum(sites.size, np.average(sites.size, weights=n))
    size[size == 0] = 1.0
    if loss.estimates_scale:
        # a light ridge shows how large the noise is, and the noise then how large the ridge should be
        fits.ridge[unfit] = 1e-3 * sites.scale / n[unfit, None]
        fits.theta[unfit] = sites.with_ridge(unfit, fits.ridge[unfit])
        degrees = n - sites.rank * (fits.n_params / fits.n_features)
        total = sites.residuals(fits.theta, lent=False)
        lent = total if degrees.min() > 0 else sites.residuals(fits.theta, lent=True)
        fits.share_dispersion(total, degrees, lent, float(np.average(size, weights=n)))
        fits.dispersion = np.maximum(fits.dispersion, ROUNDING * size)
    fits.ridge[unfit] = (fits.dispersion[unfit] / (n[unfit] * size[unfit]))[:, None] * sites.scale
    fits.theta[unfit] = sites.with_ridge(unfit, fits.ridge[unfit])
    for k in unfit.tolist():
        why = f"the {loss.name} loss has no minimum (separated classes, one class only or no counts)"
        if sites.rank[k] < fits.n_features:
            rows = "1 row" if n[k] == 1 else f"{round(n[k])} rows"
            why = f"{rows} and a design of rank {sites.rank[k]} for {fits.n_features} features"
        line = f"{why}: ridge fit, wide in the directions that the rows do not show"
        fits.notes[k] = [line, *fits.notes.get(k, [])]
    if describe:
        sites.describe()


class _SumFits:
    """Least squares on means of ``x x'`` (A), ``x y`` (b) and ``y^2 / 2`` (c), with the methods of `_RowFits`."""

    def __init__(self, fits: OwnFits, sums: Summaries) -> None:
        self.fits, self.sums, self.scale = fits, sums, sums.column_scale
        terms = sums.terms(np.zeros(fits.n_params))
        self.A, self.b, self.c = terms.A, terms.b, terms.c
        self.rank = (np.linalg.eigvalsh(unit_diagonal(self.A)[0]) > RANK_TOLERANCE).sum(axis=1)
        self.size = 2.0 * np.maximum(self.c, 0.0)

    def own(self) -> tuple[Array, Mask]:
        exists, theta = self.rank == self.fits.n_params, np.zeros_like(self.b)
        who = np.flatnonzero(exists)
        theta[who] = self.with_ridge(who, np.zeros((who.size, 1)))
        return theta, exists

    def with_ridge(self, who: Index, ridge: Array) -> Array:
        A = self.A[who] + ridge[:, :, None] * np.eye(self.fits.n_params)
        theta = np.zeros_like(self.b[who])
        for _ in range(2):  # the second solve refines the first
            theta = theta + solve_positive(A, self.b[who] - np.einsum("vpq,vq->vp", A, theta))
        return theta

    def residuals(self, theta: Array, *, lent: bool) -> Array:
        bend = np.einsum("vpq,vq->vp", self.A, theta) - 2.0 * self.b
        misfit = 2.0 * self.c + np.einsum("vp,vp->v", bend, theta)
        return np.asarray(np.maximum(self.fits.n * misfit, _residual_noise(self.sums, theta)))

    def describe(self) -> None:
        self.fits.hessian[:] = self.fits.curvature[:] = self.A


class _RowFits:
    """Any loss on linear predictors, in batches of sites with equally many rows.

    ``rank (M,)`` of the designs; ``size (M,)``, mean squares that predictors may have; ``scale (p,)``, mean squares of
    the features, 1 for a column of zeros.
    """

    def __init__(self, fits: OwnFits, rows: Federation) -> None:
        assert fits.loss.rowwise is not None
        self.fits, self.loss = fits, fits.loss.rowwise
        self.batches = list(_batches(rows, fits.members, self.loss))
        scale = np.tile(np.average(rows.X**2, axis=0, weights=rows.weight), self.loss.n_outputs)
        self.scale = np.where(scale > 0, scale, 1.0)
        self.rank, self.size = np.empty(fits.members.size, dtype=np.int64), np.empty(fits.members.size)
        for where, batch in self.batches:
            self.rank[where], self.size[where] = batch.rank, _plausible_size(batch)

    def own(self) -> tuple[Array, Mask]:
        """Minimisers ``(M, p)`` and which exist."""
        theta, exists = np.full_like(self.fits.theta, np.nan), np.zeros(self.fits.members.size, dtype=bool)
        for where, batch in self.batches:
            full = np.flatnonzero(batch.rank == batch.X.shape[2])
            if full.size:
                theta[where[full]], exists[where[full]] = minimise(batch.take(full))
        return theta, exists

    def with_ridge(self, who: Index, ridge: Array) -> Array:
        """Minimisers ``(A, p)`` of the sites ``who (A,)`` with ``ridge (A, p)``."""
        theta = np.empty_like(ridge)
        for where, batch in self.batches if who.size else ():
            here = np.flatnonzero(np.isin(where, who))
            if here.size:
                at = np.searchsorted(who, where[here])
                theta[at] = minimise_with_ridge(batch.take(here), ridge[at])
        return theta

    def residuals(self, theta: Array, *, lent: bool) -> Array:
        """Dispersions ``(M,)`` times their degrees of freedom, or what is lent to sites that have none."""
        total, n = np.empty(len(theta)), self.fits.n
        dispersion = self.loss.lent_dispersion if lent else self.loss.dispersion
        for where, batch in self.batches:
            for b, k in enumerate(where.tolist()):
                weight = None if batch.weight is None else batch.weight[b] * (n[k] / batch.n_rows)
                total[k] = dispersion(theta[k], *batch.rows.take(b).arrays, weight)
            total[where] *= np.maximum(n[where] - batch.n_params, 1)
        return total

    def describe(self) -> None:
        """Fill in Hessians, score covariances and the degrees of freedom of a sandwich at the estimates."""
        for where, batch in self.batches:
            self._describe(where, batch)

    def _describe(self, where: Index, batch: RowBatch) -> None:
        fits, k = self.fits, batch.loss.n_outputs
        n, p, eta = fits.n[where], fits.n_params, batch.predictors(fits.theta[where])
        slope, weights = batch.loss.slope_at(eta, batch.y), batch.loss.curvature_at(eta, batch.y)
        fits.hessian[where] = batch.gram_of(weights)
        fits.score_cov[where] = batch.gram_of(slope[..., :, None] * slope[..., None, :])
        fits.curvature[where] = fits.hessian[where]
        own = ~fits.rescued[where]
        flat = own & (least_eigenvalue(fits.hessian[where]) <= RANK_TOLERANCE)
        if flat.any():
            # Huber's Hessian misses the rows beyond delta; its expected value is their share times the Gram matrix
            share = batch.average(np.einsum("bnkk->bn", weights)) / k
            gram = np.einsum("kl,bqr->bkqlr", np.eye(k), batch.gram[flat]).reshape(-1, p, p)
            fits.curvature[where[flat]] = np.maximum(share[flat], 1.0 / n[flat])[:, None, None] * gram
            fits.note(where[flat], "the Hessian at the estimate is singular: its expected value is used instead")
        usable = np.flatnonzero(own & ~flat & (n > p))
        if usable.size:
            blocks = inverse_of(fits.hessian[where[usable]]).reshape(usable.size, k, p // k, k, p // k)
            X = batch.X[usable]
            leverage = np.einsum("bnq,bkqlr,bnr,bnkl->bn", X, blocks, X, weights[usable], optimize=True)
            # how far the mean of squared scores is from a Wishart matrix depends on how uneven the leverages are
            uneven = np.maximum(3.0 * batch.average(leverage**2, usable) / (p * (p + 2.0)), 1e-300)
            fits.matrix_dof[where[usable]] = np.minimum((n[usable] - p) / uneven, n[usable] - p)


def _batches(rows: Federation, members: Index, loss: RowLoss) -> Iterator[tuple[Index, RowBatch]]:
    """Batches of sites with equally many rows, and their positions in ``members`` (which ascend)."""
    for sites, block in row_blocks(rows, members):
        block = block.map(lambda part: part.astype(np.float64, copy=False))
        step = max(1, _BATCH_ENTRIES // max(block.X[0].size * loss.n_outputs, 1))
        for start in range(0, sites.size, step):
            some = block.take(slice(start, start + step))
            yield np.searchsorted(members, sites[start : start + step]), RowBatch(loss, some, unit_weights(some))


def _plausible_size(batch: RowBatch) -> Array:
    """Mean square ``(B,)`` that linear predictors may have, by weights where predictors are in the response's units."""
    y, offset = batch.y, batch.rows.offset
    if batch.weight is None or not batch.loss.estimates_scale:
        return batch.loss.plausible_size(y, offset)
    return batch.loss.plausible_size(np.sqrt(batch.weight) * (y if offset is None else y - offset), None)


# --- other losses -------------------------------------------------------------------------------------------------


def _fit_functions(fits: OwnFits, data: Federation) -> None:
    """Sites with a loss that is known only as functions."""
    for k, u in enumerate(fits.members):
        rows = data[data.sites[u]]
        theta, ridge, problem = minimise_sum([(1.0, fits.loss, rows)], rows.n_samples, fits.n_params)
        fits.theta[k], fits.ridge[k], fits.rescued[k] = theta, ridge, bool(problem)
        if problem:
            fits.note(np.array([k]), problem)
        fits.hessian[k] = fits.curvature[k] = fits.loss.hessian(theta, *rows.arrays)
        scores = fits.loss.scores(theta, *rows.arrays)
        fits.score_cov[k] = scores.T @ scores / rows.n_samples
        fits.dispersion[k] = fits.loss.dispersion(theta, *rows.arrays)
    degrees = fits.n.astype(np.float64) - fits.n_params
    if fits.loss.estimates_scale:
        total = fits.dispersion * np.maximum(degrees, 1.0)
        fits.share_dispersion(total, degrees, total, 1.0)
    fits.matrix_dof = np.where(fits.rescued, 0.0, np.maximum(degrees, 0.0))


def _take_estimates(fits: OwnFits, sums: Summaries) -> None:
    """The estimates that the sites found themselves, with the Hessians there."""
    if sums.own is None:
        raise ParameterError(
            "these summaries are answers to questions, which do not hold the sites' own estimates: use those of the "
            "first round"
        )
    fits.theta = sums.sums.at.copy()
    fits.hessian[:] = fits.curvature[:] = sums.terms(np.zeros(fits.n_params)).hessians(fits.theta)
    for k, one in enumerate(sums.own):
        fits.ridge[k], fits.dispersion[k], fits.dof[k] = one.ridge, one.dispersion, one.dof
        if one.note:
            fits.note(np.array([k]), one.note)
    fits.rescued = np.asarray(fits.ridge.any(axis=1))


# --- noisy sums ---------------------------------------------------------------------------------------------------


def _noise_covariances(sums: Summaries, fits: OwnFits) -> Array:
    """Covariances ``(V, p, p)`` that the sites' noise gives to their estimates, to first order.

    With noise E in the mean of ``x x'`` and e in that of ``x y``, an estimate moves by ``A^{-1} (e - E theta)``.
    """
    noise, theta = sums.noise() / sums.n[:, None, None], fits.theta
    if sums.loss.location:
        return np.asarray(noise[:, :-1, -1, None] ** 2 * np.eye(fits.n_params))
    squares, target = noise[:, :-1, :-1] ** 2, noise[:, :-1, -1] ** 2
    diagonal = np.arange(fits.n_params)
    moved = squares * theta[:, :, None] * theta[:, None, :]
    moved[:, diagonal, diagonal] = target + np.einsum("vpq,vq->vp", squares, theta**2)
    inverse = inverse_of(fits.curvature + fits.ridge[:, :, None] * np.eye(fits.n_params))
    return np.asarray(inverse @ moved @ inverse)


def _residual_noise(data: Summaries, theta: Array) -> Array | float:
    """Standard deviations ``(V,)`` of noise in residual sums of squares: no estimate of these is believed below it."""
    if data.privacy is None:
        return 0.0
    noise = data.noise() ** 2
    if data.loss.location:
        return np.asarray(np.sqrt(np.einsum("vpp->v", noise[:, :-1, :-1])))
    fitted = np.einsum("vp,vpq,vq->v", theta**2, noise[:, :-1, :-1], theta**2)
    return np.asarray(np.sqrt(noise[:, -1, -1] + 4 * np.einsum("vp,vp->v", noise[:, :-1, -1], theta**2) + 2 * fitted))


# --- minimisers ----------------------------------------------------------------------------------------------------


def minimise(batch: RowBatch) -> tuple[Array, Mask]:
    """Minimisers ``theta (B, p)`` of full-rank sites, and which of them exist.

    A likelihood without a maximum (separated classes, a class or all counts missing) shows in the Hessian at the end of
    the iterations: they follow some direction until practically no information about it is left.
    """
    if batch.loss.quadratic:
        return _least_squares(batch), np.ones(batch.n_sites, dtype=bool)
    theta, converged = _newton(batch, np.zeros((batch.n_sites, batch.n_params)))
    exists = np.isfinite(theta).all(axis=1)
    if batch.loss.minimiser == "separable":
        unit = batch.loss.informative_curvature(batch.y)
        known = np.where(np.isfinite(theta), theta, 0.0)
        exists &= (unit > 0) & (batch.information(known) > SEPARATION_TOLERANCE * unit)
    elif batch.loss.minimiser == "unknown":
        exists &= converged
    return theta, np.asarray(exists)


def minimise_with_ridge(batch: RowBatch, ridge: Array, *, start: Array | None = None, tol: float = 1e-15) -> Array:
    """Minimisers ``(B, p)`` of the mean loss plus ``sum_c ridge_c theta_c^2 / 2``, ``ridge (B, p)`` positive.

    ``start (B, p)`` may be the minimisers of a similar problem; ``tol`` is that of `damped_newton`.
    """
    return _newton(batch, ridge, start, tol)[0]


def _newton(batch: RowBatch, ridge: Array, start: Array | None = None, tol: float = 1e-15) -> tuple[Array, Mask]:
    loss, diagonal = batch.loss, np.arange(batch.n_params)

    def value(theta: Array, who: Index) -> Array:
        return np.asarray(batch.values(theta, who) + 0.5 * (ridge[who] * theta**2).sum(axis=1))

    # Singular Hessians get `caution` times the matrix of the loss's cautious model on top. With 1 the full step
    # decreases the loss; smaller values reach further, and a line search makes up for what goes too far.
    def derivatives(theta: Array, who: Index, caution: float) -> tuple[Array, Array]:
        y, eta = batch.y[who], batch.predictors(theta, who)
        gradient, matrix = batch.mean_of(loss.slope_at(eta, y), who), batch.gram_of(loss.curvature_at(eta, y), who)
        if not loss.strictly_convex:
            singular = least_eigenvalue(matrix) <= 100 * RANK_TOLERANCE
            if singular.any():
                added = batch.gram_of(loss.cautious_at(eta[singular], y[singular]), who[singular])
                matrix[singular] += caution * added
        matrix[:, diagonal, diagonal] += ridge[who]
        return gradient + ridge[who] * theta, matrix

    begin = _start(batch) if start is None else start
    theta, converged = damped_newton(value, partial(derivatives, caution=0.01), begin, tol, max_iter=150)
    if converged.all() or loss.strictly_convex:
        return theta, converged
    # rarely, far-reaching steps run in circles; careful ones do not
    return damped_newton(value, partial(derivatives, caution=1.0), theta, tol, max_iter=300)


def _least_squares(batch: RowBatch) -> Array:
    theta = np.zeros((batch.n_sites, batch.n_params))
    for _ in range(2):  # the second solve refines the first
        theta = theta - solve_positive(batch.gram, batch.gradients(theta))
    return theta


def _start(batch: RowBatch) -> Array:
    """A start with finite value, close enough for counts of any size."""
    zero = np.zeros((batch.n_sites, batch.n_params))
    working = batch.loss.working_response(batch.y)
    if working is None:
        return zero
    response, own = working
    weight = own if batch.weight is None else batch.weight if own is None else own * batch.weight
    theta = _least_squares(RowBatch(LinearLoss(), Rows(batch.X, response, batch.rows.offset), weight))
    if own is None:
        return theta
    return np.where((batch.values(theta) < batch.values(zero))[:, None], theta, zero)


def minimise_sum(parts: Sequence[tuple[float, Loss, Rows]], n_rows: float, p: int) -> tuple[Array, Array, str]:
    """Minimiser of a weighted sum of mean losses, the ridge that it needed (0 for none), and why."""

    def sums(theta: Array, ridge: Array) -> tuple[float, Array, Array]:
        value, gradient, hessian = 0.5 * float(ridge @ theta**2), ridge * theta, np.diag(ridge)
        for factor, loss, rows in parts:
            value += factor * loss.value(theta, *rows.arrays)
            gradient = gradient + factor * loss.gradient(theta, *rows.arrays)
            hessian = hessian + factor * loss.hessian(theta, *rows.arrays)
        return value, gradient, hessian

    def run(ridge: Array) -> tuple[Array, bool]:
        theta, converged = damped_newton(
            lambda theta, who: np.array([sums(row, ridge)[0] for row in theta]),
            lambda theta, who: (sums(theta[0], ridge)[1][None], sums(theta[0], ridge)[2][None]),
            np.zeros((1, p)),
            max_iter=300,
        )
        return theta[0], bool(converged[0])

    none = np.zeros(p)
    start = np.einsum("pp->p", sums(none, none)[2])
    theta, converged = run(none)
    if converged and np.isfinite(theta).all():
        hessian = sums(theta, none)[2]
        # curvature that has vanished, in some direction or compared with where the iterations began, means no minimiser
        regular = least_eigenvalue(hessian) > RANK_TOLERANCE
        if regular and n_rows * np.diag(hessian).max() > 1e-6 * start.max():
            return theta, none, ""
    scale = np.where(start > 0, start, start[start > 0].mean() if (start > 0).any() else 1.0)
    ridge = scale / n_rows
    return run(ridge)[0], ridge, "the loss has no unique minimiser: ridge fit with one row's worth of curvature"
