"""Every site's own fit from its summary: the same estimates and rules as from rows, where sums tell them."""

from __future__ import annotations

import numpy as np

from fedkin._base import Array, Index
from fedkin.core.linalg import RANK_TOLERANCE, inverse_of, unit_diagonal
from fedkin.core.newton import solve_positive
from fedkin.core.ownfits import (
    ROUNDING,
    OwnFits,
    has_means,
    light_ridge,
    no_minimiser_note,
    ridge_rule,
    share_dispersion,
)
from fedkin.core.summaries import Summaries
from fedkin.errors import ParameterError


def fits_of_sums(summaries: Summaries, variance: str) -> OwnFits:
    """The fits of all sites."""
    loss = summaries.loss
    if variance == "sandwich" and not has_means(loss):
        raise ParameterError(
            'variance="sandwich" needs the squares of every row\'s score, which summaries do not hold: use "model"'
        )
    summaries = summaries.repaired()
    fits = OwnFits(summaries, np.arange(summaries.n_sites), loss)
    if has_means(loss):
        _fit_means(fits, summaries)
    elif loss.quadratic:
        _fit_least_squares(fits, summaries)
    else:
        _take_estimates(fits, summaries)
    if summaries.privacy is not None:
        fits.noise_covariance = noise_covariances(summaries, fits.theta, fits.curvature, fits.ridge)
    return fits


def _fit_means(fits: OwnFits, summaries: Summaries) -> None:
    assert summaries.scores is not None
    p, n = fits.n_params, fits.n
    fits.hessian[:] = fits.curvature[:] = np.eye(p)
    fits.theta = -summaries.sums.gradient.sum(axis=1) / n[:, None]
    second = summaries.scores.sum(axis=1) / n[:, None, None]
    fits.score_cov = second - fits.theta[:, :, None] * fits.theta[:, None, :]
    total = np.maximum(np.einsum("mpp->m", fits.score_cov) * n, residual_noise(summaries, fits.theta))
    rows = int(n.sum())
    mean, square = summaries.column_sums.sum(axis=0) / rows, summaries.column_squares.sum(axis=0) / rows
    share_dispersion(
        fits, total, np.asarray((n - 1.0) * p, dtype=np.float64), total, float((square - mean**2).clip(0.0).mean())
    )
    fits.dispersion = np.maximum(fits.dispersion, ROUNDING * float(square.mean()))
    fits.matrix_dof = np.where(n > p, n - 1.0, 0.0)


def _fit_least_squares(fits: OwnFits, summaries: Summaries) -> None:
    """The rules of rows (`fedkin.core.ownfits`) on means of ``x x'`` (A), ``x y`` (b) and ``y^2 / 2`` (c)."""
    terms = summaries.terms(np.zeros(fits.n_params))
    A, b, c = terms.A, terms.b, terms.c
    fits.hessian[:] = fits.curvature[:] = A
    fits.score_cov[:] = 0.0  # unknown, and used by the sandwich only
    values, _ = np.linalg.eigh(unit_diagonal(A)[0])
    rank = (values > RANK_TOLERANCE).sum(axis=1)
    fits.rescued = rank < fits.n_params
    unfit, own = np.flatnonzero(fits.rescued), np.flatnonzero(~fits.rescued)
    fits.theta[own] = _solved(A[own], b[own])
    scale, size = summaries.column_scale, 2.0 * np.maximum(c, 0.0)
    size = np.maximum(size, np.average(size, weights=fits.n))
    size[size == 0] = 1.0
    fits.ridge[unfit] = light_ridge(scale, fits.n[unfit, None])
    _fit_ridge(fits, unfit, A, b)
    misfit = 2.0 * c + np.einsum("vp,vp->v", np.einsum("vpq,vq->vp", A, fits.theta) - 2.0 * b, fits.theta)
    total = np.maximum(fits.n * misfit, residual_noise(summaries, fits.theta))
    share_dispersion(fits, total, (fits.n - rank).astype(np.float64), total, float(np.average(size, weights=fits.n)))
    fits.dispersion = np.maximum(fits.dispersion, ROUNDING * size)
    fits.ridge[unfit] = ridge_rule(scale, fits.n[unfit], size[unfit], fits.dispersion[unfit])
    _fit_ridge(fits, unfit, A, b)
    assert fits.loss.rowwise is not None
    for k in unfit.tolist():
        line = no_minimiser_note(fits.loss.rowwise, int(fits.n[k]), int(rank[k]), summaries.n_features)
        fits.notes[k] = [line, *fits.notes.get(k, [])]


def _fit_ridge(fits: OwnFits, who: Index, A: Array, b: Array) -> None:
    diagonal = np.arange(fits.n_params)
    raised = A[who].copy()
    raised[:, diagonal, diagonal] += fits.ridge[who]
    fits.theta[who] = _solved(raised, b[who])


def _solved(A: Array, b: Array) -> Array:
    theta = np.zeros_like(b)
    for _ in range(2):  # the second solve refines the first
        theta = theta + solve_positive(A, b - np.einsum("vpq,vq->vp", A, theta))
    return theta


def _take_estimates(fits: OwnFits, summaries: Summaries) -> None:
    """The estimates that the sites found themselves, with the Hessians there."""
    if summaries.own is None:
        raise ParameterError(
            "these summaries are answers to questions, which do not hold the sites' own estimates: use those of the "
            "first round"
        )
    fits.theta = summaries.sums.at.copy()
    terms = summaries.terms(np.zeros(fits.n_params))
    fits.hessian[:] = fits.curvature[:] = terms.hessians(fits.theta)
    fits.score_cov[:] = 0.0
    for k, one in enumerate(summaries.own):
        fits.ridge[k], fits.dispersion[k], fits.dof[k] = one.ridge, one.dispersion, one.dof
        if one.note:
            fits.note(np.array([k]), one.note)
    fits.rescued = np.asarray(fits.ridge.any(axis=1))


# --- noisy sums ---------------------------------------------------------------------------------------------------


def noise_covariances(summaries: Summaries, theta: Array, curvature: Array, ridge: Array) -> Array:
    """Covariances ``(V, p, p)`` that the sites' noise gives to their estimates ``theta (V, p)``, to first order.

    With noise E in the mean of ``x x'`` and e in that of ``x y``, an estimate moves by ``A^{-1} (e - E theta)``.
    """
    noise = summaries.noise() / summaries.n_samples[:, None, None]
    if summaries.loss.location:
        return np.asarray(noise[:, :-1, -1, None] ** 2 * np.eye(theta.shape[1]))
    squares, target = noise[:, :-1, :-1] ** 2, noise[:, :-1, -1] ** 2
    diagonal = np.arange(theta.shape[1])
    moved = squares * theta[:, :, None] * theta[:, None, :]
    moved[:, diagonal, diagonal] = target + np.einsum("vpq,vq->vp", squares, theta**2)
    raised = curvature.copy()
    raised[:, diagonal, diagonal] += ridge
    inverse = inverse_of(raised)
    return np.asarray(inverse @ moved @ inverse)


def residual_noise(summaries: Summaries, theta: Array) -> Array:
    """Standard deviations ``(V,)`` of noise in residual sums of squares: no estimate of these is believed below it."""
    if summaries.privacy is None:
        return np.zeros(summaries.n_sites)
    noise = summaries.noise() ** 2
    if summaries.loss.location:
        return np.asarray(np.sqrt(np.einsum("vpp->v", noise[:, :-1, :-1])))
    fitted = np.einsum("vp,vpq,vq->v", theta**2, noise[:, :-1, :-1], theta**2)
    return np.asarray(np.sqrt(noise[:, -1, -1] + 4 * np.einsum("vp,vp->v", noise[:, :-1, -1], theta**2) + 2 * fitted))
