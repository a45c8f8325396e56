"""Minimise sites' mean losses from rows or sums, with a ridge or a ball constraint if needed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from fedkin._base import TINY, Array, Index, Mask
from fedkin.core.linalg import (
    RANK_TOLERANCE,
    damped_newton,
    inverse_of,
    least_eigenvalue,
    solve_positive,
    unit_diagonal,
)
from fedkin.core.quadratics import SiteTerms
from fedkin.core.sitedata import RowData
from fedkin.core.summaries import Summaries
from fedkin.core.terms import RowTerms, SummedTerms, row_batches
from fedkin.data import Federation, Rows
from fedkin.errors import ParameterError
from fedkin.losses import LinearLoss, Loss, RowLoss

#: Information in some direction, in units of one row, below which a likelihood is treated as having no maximum.
SEPARATION_TOLERANCE = 1e-6
ROUNDING = 1e-20  # lower bound on the variance of exact fits, as a share of the response's mean square


class OwnFits:
    """The fits of M sites that share one loss; rows of the arrays are positions in ``members``."""

    def __init__(self, members: Index, loss: Loss, n: Array, n_features: int, radius: float | None = None) -> None:
        self.members, self.loss, self.n, self.n_features, self.radius = members, loss, n, n_features, radius
        m, p = members.size, loss.n_params(n_features)
        self.theta, self.ridge = np.empty((m, p)), np.zeros((m, p))  # no ridge where a site has its own estimate
        self.rescued = np.zeros(m, dtype=bool)  # sites without an estimate of their own
        # Hessians of the mean losses, without the ridge; what stands for them in variances (their expected values where
        # they are singular); mean outer products of the scores, 0 where they are not known
        self.hessian, self.curvature, self.score_cov = (np.zeros((m, p, p)) for _ in range(3))
        # degrees of freedom: infinite where the dispersion is not estimated, 0 where rows are too few for a sandwich
        self.dispersion, self.dof, self.matrix_dof = np.ones(m), np.full(m, np.inf), np.zeros(m)
        self.noise_covariance: Array | None = None  # of estimates from noisy sums, (M, p, p)
        self.notes: dict[int, list[str]] = {}

    @property
    def n_params(self) -> int:
        return int(self.theta.shape[1])

    def note(self, who: Index, text: str) -> None:
        for k in who.tolist():
            self.notes.setdefault(k, []).append(text)

    def keep_inside(self, with_ridge: RidgeFit) -> None:
        """Replace estimates outside the ball with minimisers over it."""
        if self.radius is not None:
            self.note_border(minimise_in_ball(self.theta, self.ridge, self.radius, with_ridge))

    def note_border(self, who: Index) -> None:
        self.note(who, f"the estimate is on the boundary of the ball of radius {self.radius:g}")

    def share_dispersion(self, total: Array, degrees: Array, lent: Array, fallback: float) -> None:
        """Set dispersions ``total / degrees``; sites without degrees of freedom use the mean over other sites."""
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


def fit_sites(
    data: RowData | Summaries, members: Index, loss: Loss, *, describe: bool = True, radius: float | None = None
) -> OwnFits:
    """Fit the sites at positions ``members`` (ascending) of one loss; ``describe`` adds the inputs of variances."""
    fits = OwnFits(members, loss, data.n[members].astype(np.float64), data.n_features, radius)
    if data.in_memory:
        if loss.location and loss.quadratic:
            _fit_means(fits, _moments_of_rows(data.rows, members), 0.0)
        elif loss.rowwise is not None:
            _fit_by_rule(fits, _RowFits(fits, data, loss.rowwise), loss.rowwise, describe)
        else:
            _fit_functions(fits, data)
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
    for sites, block, unit in row_batches(rows, members):
        where, weight = np.searchsorted(members, sites), 1.0 if unit is None else unit[:, :, None]
        theta[where] = (weight * block.X).mean(axis=1)
        centred = block.X - theta[where][:, None, :]
        scatter[where] = np.matmul(np.swapaxes(weight * centred, 1, 2), centred) / block.X.shape[1]
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
    p, w = fits.n_params, fits.loss.parameter  # the curvature of a row
    fits.hessian[:] = fits.curvature[:] = w * np.eye(p)
    fits.theta, scatter, square, variance = moments
    fits.score_cov, own = w**2 * scatter, fits.theta.copy()
    fits.keep_inside(lambda who, ridge: w * own[who] / (w + ridge))
    total = np.maximum(w * np.einsum("mpp->m", scatter) * fits.n, w * least)
    fits.share_dispersion(total, (fits.n - 1.0) * p, total, w * float(variance.mean()))
    fits.dispersion = np.maximum(fits.dispersion, w * ROUNDING * float(square.mean()))
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
        # a light ridge estimates the noise, which then sets the size of the ridge
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
        line = f"{why}: ridge fit, with large variance in directions that the rows do not determine"
        fits.notes[k] = [line, *fits.notes.get(k, [])]
    fits.keep_inside(sites.with_ridge)
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
    """Any loss on linear predictors, in batches of sites with equally many rows."""

    def __init__(self, fits: OwnFits, data: RowData, loss: RowLoss) -> None:
        self.fits, self.loss, self.batches = fits, loss, list[tuple[Index, RowTerms]]()
        self.scale = np.tile(data.column_scale, loss.n_outputs)  # (p,), mean squares of features, 1 for zeros
        # (M,), ranks of the designs, and mean squares that predictors may have
        self.rank, self.size = np.empty(fits.members.size, dtype=np.int64), np.empty(fits.members.size)
        for sites, rows, weight in row_batches(data.rows, fits.members):
            where = np.searchsorted(fits.members, sites)
            batch = RowTerms(loss, rows.map(lambda part: part.astype(np.float64, copy=False)), weight)
            self.batches.append((where, batch))
            self.rank[where], self.size[where] = batch.rank, _plausible_size(batch)

    def own(self) -> tuple[Array, Mask]:
        """Return minimisers ``(M, p)`` and which exist."""
        theta, exists = np.full_like(self.fits.theta, np.nan), np.zeros(self.fits.members.size, dtype=bool)
        for where, batch in self.batches:
            full = np.flatnonzero(batch.rank == batch.X.shape[2])
            if full.size:
                theta[where[full]], exists[where[full]] = minimise(batch.take(full))
        return theta, exists

    def with_ridge(self, who: Index, ridge: Array) -> Array:
        """Return minimisers ``(A, p)`` of the sites ``who (A,)`` with ``ridge (A, p)``."""
        theta = np.empty_like(ridge)
        for where, batch in self.batches if who.size else ():
            here = np.flatnonzero(np.isin(where, who))
            if here.size:
                at = np.searchsorted(who, where[here])
                theta[at] = minimise_with_ridge(batch.take(here), ridge[at])
        return theta

    def residuals(self, theta: Array, *, lent: bool) -> Array:
        """Return dispersions ``(M,)`` times their degrees of freedom, and the value for sites that have none."""
        total, n = np.empty(len(theta)), self.fits.n
        # an interpolating fit is as noisy as least squares, however robust the loss
        noisy = LinearLoss() if lent and self.loss.scale_equivariant else self.loss
        for where, batch in self.batches:
            for b, k in enumerate(where.tolist()):
                weight = None if batch.weight is None else batch.weight[b] * (n[k] / batch.n_rows)
                total[k] = noisy.dispersion(theta[k], *batch.rows.take(b).arrays, weight)
            total[where] *= np.maximum(n[where] - batch.n_params, 1)
        return total

    def describe(self) -> None:
        """Fill in Hessians, score covariances and degrees of freedom of a sandwich."""
        for where, batch in self.batches:
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
                some = batch.take(usable)
                leverage = np.einsum("bnq,bkqlr,bnr,bnkl->bn", some.X, blocks, some.X, weights[usable], optimize=True)
                # how close the mean of squared scores is to a Wishart matrix depends on the leverages
                uneven = np.maximum(3.0 * some.average(leverage**2) / (p * (p + 2.0)), 1e-300)
                fits.matrix_dof[where[usable]] = np.minimum((n[usable] - p) / uneven, n[usable] - p)


def _plausible_size(batch: RowTerms) -> Array:
    """Return the mean square ``(B,)`` that linear predictors may have, weighted where they have the unit of y."""
    y, offset = batch.y, batch.rows.offset
    if batch.weight is None or not batch.loss.estimates_scale:
        return batch.loss.plausible_size(y, offset)
    return batch.loss.plausible_size(np.sqrt(batch.weight) * (y if offset is None else y - offset), None)


# --- other losses -------------------------------------------------------------------------------------------------


def _fit_functions(fits: OwnFits, data: RowData) -> None:
    for k, u in enumerate(fits.members.tolist()):
        rows, one = data.rows[data.sites[u]], data.take(np.array([u])).terms(np.zeros(fits.n_params))
        theta, ridge, problem = minimise_functions(one, np.ones(1), rows.n_samples, fits.radius)
        fits.theta[k], fits.ridge[k], fits.rescued[k] = theta, ridge, bool(problem)
        if problem:
            fits.note(np.array([k]), problem)
        fits.hessian[k] = fits.curvature[k] = fits.loss.hessian(theta, *rows.arrays)
        scores = fits.loss.scores(theta, *rows.arrays)
        fits.score_cov[k] = scores.T @ scores / rows.n_samples
        fits.dispersion[k] = fits.loss.dispersion(theta, *rows.arrays)
    if fits.radius is not None:
        fits.note_border(np.flatnonzero(np.linalg.norm(fits.theta, axis=1) > (1.0 - 1e-12) * fits.radius))
    degrees = fits.n.astype(np.float64) - fits.n_params
    if fits.loss.estimates_scale:
        total = fits.dispersion * np.maximum(degrees, 1.0)
        fits.share_dispersion(total, degrees, total, 1.0)
    fits.matrix_dof = np.where(fits.rescued, 0.0, np.maximum(degrees, 0.0))


def minimise_functions(terms: SiteTerms, share: Array, n_rows: float, radius: float | None) -> tuple[Array, Array, str]:
    """Return the minimiser ``(p,)`` of the mean losses' weighted sum, the ridge that it needed, and the reason."""
    whole, ridge = SummedTerms(terms, np.zeros(share.size, dtype=np.int64), share), np.zeros((1, terms.n_params))
    start = np.diag(whole.hessians(ridge)[0])
    (theta, converged), why = newton(whole, ridge), ""
    exists = bool(converged[0]) and bool(np.isfinite(theta).all())
    if exists:
        hessian = whole.hessians(theta)[0]
        # curvature that has vanished means no minimiser
        regular = bool(least_eigenvalue(hessian) > RANK_TOLERANCE)
        exists = regular and n_rows * float(np.diag(hessian).max()) > 1e-6 * float(start.max())
    if not exists:
        ridge = np.where(start > 0, start, start[start > 0].mean() if (start > 0).any() else 1.0)[None] / n_rows
        theta = newton(whole, ridge)[0]
        why = "the loss has no unique minimiser: ridge fit with the curvature of one row"
    if radius is not None:
        minimise_in_ball(theta, ridge, radius, lambda _, more: newton(whole, more)[0])
    return theta[0], ridge[0], why


def _take_estimates(fits: OwnFits, sums: Summaries) -> None:
    if sums.own is None:
        raise ParameterError(
            "these summaries answer queries and do not contain the sites' own estimates: use those of the first round"
        )
    fits.theta = sums.sums.at.copy()
    if fits.radius is not None and (longest := float(np.linalg.norm(fits.theta, axis=1).max())) > fits.radius:
        raise ParameterError(
            f"radius is {fits.radius:g}, but sites' own estimates have lengths up to {longest:.3g}: "
            "minimisers over the ball need rows"
        )
    fits.hessian[:] = fits.curvature[:] = sums.terms(np.zeros(fits.n_params)).hessians(fits.theta)
    for k, one in enumerate(sums.own):
        fits.ridge[k], fits.dispersion[k], fits.dof[k] = one.ridge, one.dispersion, one.dof
        if one.note:
            fits.note(np.array([k]), one.note)
    fits.rescued = np.asarray(fits.ridge.any(axis=1))


# --- noisy sums ---------------------------------------------------------------------------------------------------


def _noise_covariances(sums: Summaries, fits: OwnFits) -> Array:
    """Return first-order covariances ``(V, p, p)`` of the estimates due to the privacy noise.

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
    """Return standard deviations ``(V,)`` of the noise in residual sums of squares, lower bounds for these sums."""
    if data.privacy is None:
        return 0.0
    noise = data.noise() ** 2
    if data.loss.location:
        return np.asarray(np.sqrt(np.einsum("vpp->v", noise[:, :-1, :-1])))
    fitted = np.einsum("vp,vpq,vq->v", theta**2, noise[:, :-1, :-1], theta**2)
    return np.asarray(np.sqrt(noise[:, -1, -1] + 4 * np.einsum("vp,vp->v", noise[:, :-1, -1], theta**2) + 2 * fitted))


# --- minimisers ----------------------------------------------------------------------------------------------------

#: ``with_ridge(who (A,), ridge (A, p)) -> (A, p)``: minimisers of the losses ``who`` with that ridge.
RidgeFit = Callable[[Index, Array], Array]


def minimise_in_ball(theta: Array, ridge: Array, radius: float, with_ridge: RidgeFit) -> Index:
    """Replace minimisers ``theta (M, p)`` outside the ball with minimisers over it, in place; return those sites.

    It has an additional ridge m. ``1 / length`` is nearly linear in m: the secant method finds it.
    """
    outside = np.flatnonzero(np.linalg.norm(theta, axis=1) > radius)
    if not outside.size:
        return outside

    def excess(m: Array) -> Array:
        theta[outside] = with_ridge(outside, ridge[outside] + m[:, None])
        return np.asarray(1.0 - radius / np.maximum(np.linalg.norm(theta[outside], axis=1), TINY))

    low, high = np.zeros(outside.size), np.full(outside.size, 1e-3)
    above = 1.0 - radius / np.linalg.norm(theta[outside], axis=1)
    below = excess(high)
    while (below > 0).any():
        grow = below > 0
        low, above = np.where(grow, high, low), np.where(grow, below, above)
        high = np.where(grow, 8.0 * high, high)
        below = excess(high)
    for step in range(90):
        # every third step halves: a secant alone may creep towards the root from one side
        m = 0.5 * (low + high) if step % 3 == 2 else (low * below - high * above) / np.minimum(below - above, -TINY)
        found = excess(m)
        low, above = np.where(found > 0, m, low), np.where(found > 0, found, above)
        high, below = np.where(found > 0, high, m), np.where(found > 0, below, found)
        if (np.abs(found) < 1e-13).all():
            break
    theta[outside] *= radius / np.linalg.norm(theta[outside], axis=1)[:, None]
    return outside


def minimise(batch: RowTerms) -> tuple[Array, Mask]:
    """Return minimisers ``theta (B, p)`` of full-rank sites, and which of them exist."""
    # without a maximum, iterates diverge in a direction until it carries almost no information
    if batch.loss.quadratic:
        return _least_squares(batch), np.ones(batch.n_sites, dtype=bool)
    theta, converged = newton(batch, np.zeros((batch.n_sites, batch.n_params)), _start(batch))
    exists = np.isfinite(theta).all(axis=1)
    if batch.loss.minimiser == "separable":
        unit = batch.loss.informative_curvature(batch.y)
        known = np.where(np.isfinite(theta), theta, 0.0)
        exists &= (unit > 0) & (batch.information(known) > SEPARATION_TOLERANCE * unit)
    elif batch.loss.minimiser == "unknown":
        exists &= converged
    return theta, np.asarray(exists)


def minimise_with_ridge(batch: SiteTerms, ridge: Array, *, start: Array | None = None, tol: float = 1e-15) -> Array:
    """Return minimisers ``(B, p)`` of the mean loss plus ``sum_c ridge_c theta_c^2 / 2``, ``ridge (B, p)`` above 0."""
    start = _start(batch) if start is None and isinstance(batch, RowTerms) else start
    return newton(batch, ridge, start, tol)[0]


def newton(terms: SiteTerms, ridge: Array, start: Array | None = None, tol: float = 1e-15) -> tuple[Array, Mask]:
    """Return minimisers ``(B, p)`` of mean losses with ``ridge (B, p)``, from ``start`` or 0, and which converged."""
    diagonal, strict = np.arange(terms.n_params), not terms.caution()[1].any()

    def value(theta: Array, who: Index) -> Array:
        return np.asarray(terms.take(who).values(theta) + 0.5 * (ridge[who] * theta**2).sum(axis=1))

    # singular Hessians get `caution` times the cautious matrix: 1 decreases the loss, smaller values take longer steps
    def derivatives(theta: Array, who: Index, caution: float) -> tuple[Array, Array]:
        part = terms.take(who)
        gradient, matrix = part.gradients(theta), part.hessians(theta)
        if not strict:
            singular = np.flatnonzero(least_eigenvalue(matrix) <= 100 * RANK_TOLERANCE)
            if singular.size:
                matrix[singular] += caution * part.take(singular).cautious_hessians(theta[singular])
        matrix[:, diagonal, diagonal] += ridge[who]
        return gradient + ridge[who] * theta, matrix

    begin = np.zeros_like(ridge) if start is None else start
    theta, converged = damped_newton(value, partial(derivatives, caution=0.01), begin, tol, max_iter=150)
    if converged.all() or strict:
        return theta, converged
    # long steps occasionally cycle; cautious ones do not
    return damped_newton(value, partial(derivatives, caution=1.0), theta, tol, max_iter=300)


def _least_squares(batch: RowTerms) -> Array:
    theta = np.zeros((batch.n_sites, batch.n_params))
    for _ in range(2):  # the second solve refines the first
        theta = theta - solve_positive(batch.gram, batch.gradients(theta))
    return theta


def _start(batch: RowTerms) -> Array:
    """Return a start with finite value, close enough for counts of any size."""
    zero = np.zeros((batch.n_sites, batch.n_params))
    working = batch.loss.working_response(batch.y)
    if working is None:
        return zero
    response, own = working
    weight = own if batch.weight is None else batch.weight if own is None else own * batch.weight
    theta = _least_squares(RowTerms(LinearLoss(), Rows(batch.X, response, batch.rows.offset), weight))
    if own is None:
        return theta
    return np.where((batch.values(theta) < batch.values(zero))[:, None], theta, zero)
