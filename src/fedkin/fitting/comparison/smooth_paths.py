"""Smooth losses with ridges that are tuned by leaving out one row at a time: at each site, and pooled.

Along a path of ridges every fit starts from the one before, so a few Newton steps suffice. What a row would be
predicted without it follows from one more Newton step (approximate leave-one-out; Rad and Maleki 2020).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedkin._base import Array
from fedkin.core import RowBatch, minimise_with_ridge
from fedkin.data import Rows
from fedkin.fitting.comparison.ridge_paths import SiteRows
from fedkin.losses import LOGIT_SIZE, RowLoss, weighted_gram

#: Ridges that are tried, largest first, for standardised columns and sums over rows.
RIDGES = np.logspace(3, -1, 9)
#: Strengths that hold site intercepts together, beside sums over rows.
HOLDS = np.logspace(3, -1, 5)
#: Ridge of an intercept: it matters only where a class, or every count, is missing.
LIGHT = 1.0 / LOGIT_SIZE
_STEPS, _ENOUGH = 12, 1e-7  # Newton steps at most, and the relative decrease that ends them
_LEAST_FREEDOM = 1e-3  # of a row to differ from its fit


def own_fits(loss: RowLoss, rows: SiteRows, offset: Array | None) -> Array:
    """A fit at each site with the ridge that is best there: ``theta (V, p)``."""
    k, sizes = loss.n_outputs, np.diff(rows.starts)
    theta = np.zeros((rows.n_sites, k * rows.X.shape[1]))
    for size in np.unique(sizes):
        sites = np.flatnonzero(sizes == size)
        where = rows.starts[sites][:, None] + np.arange(size)
        weight = rows.weight[where]
        scaled, mean, scale = _standardised(rows.X[where], weight, rows.intercept)
        shift = None if offset is None else offset[where]
        relative = None if (weight == 1).all() else weight / weight.mean(axis=1, keepdims=True)
        batch = RowBatch(loss, Rows(scaled, rows.y[where], shift), relative)
        fitted = _tuned(batch, weight.sum(axis=1), rows.intercept).reshape(sites.size, k, -1)
        slopes = fitted / scale[:, None]
        if rows.intercept:
            slopes[:, :, 0] -= (slopes[:, :, 1:] * mean[:, None]).sum(axis=2)
        theta[sites] = slopes.reshape(sites.size, -1)
    return theta


def pooled_fit(loss: RowLoss, rows: SiteRows, offset: Array | None) -> Array:
    """One fit of all rows with the ridge that is best: ``theta (p,)``."""
    together = SiteRows(rows.X, rows.y, rows.weight, np.array([0, len(rows.y)]), rows.intercept)
    return np.asarray(own_fits(loss, together, offset)[0])


def _standardised(X: Array, weight: Array, intercept: bool) -> tuple[Array, Array, Array]:
    """Columns ``(B, n, p)`` standardised at each site, means ``(B, q)`` of the features, scales ``(B, p)``."""
    first, share = int(intercept), weight / weight.sum(axis=1, keepdims=True)
    mean = np.einsum("bn,bnp->bp", share, X[:, :, first:]) if intercept else np.zeros((len(X), X.shape[2]))
    out = X.copy()
    out[:, :, first:] -= mean[:, None]
    scale = np.ones((len(X), X.shape[2]))
    spread = np.sqrt(np.einsum("bn,bnp->bp", share, out[:, :, first:] ** 2))
    scale[:, first:] = np.where(spread > 1e-12 * np.abs(X[:, :, first:]).max(axis=1), spread, 1.0)
    return out / scale[:, None], mean, scale


def _tuned(batch: RowBatch, total: Array, intercept: bool) -> Array:
    """Parameters ``(B, p)`` with the ridge that predicts rows best that were left out."""
    q, k = batch.X.shape[2], batch.loss.n_outputs
    best, chosen, theta = np.full(batch.n_sites, np.inf), np.zeros((batch.n_sites, k * q)), None
    for ridge in RIDGES:
        level = np.full((k, q), ridge)
        if intercept:
            level[:, 0] = LIGHT
        each = level.reshape(-1) / total[:, None]
        theta = minimise_with_ridge(batch, each, start=theta, tol=_ENOUGH)
        score = _without_each_row(batch, theta, each)
        better = score < best
        best, chosen = np.where(better, score, best), np.where(better[:, None], theta, chosen)
    return chosen


def _without_each_row(batch: RowBatch, theta: Array, ridge: Array) -> Array:
    """Mean losses ``(B,)`` of rows that were left out, approximately."""
    loss, eta = batch.loss, batch.predictors(theta)
    curvature = loss.curvature_at(eta, batch.y)
    weight = np.ones(batch.y.shape) if batch.weight is None else batch.weight
    hessian = batch.gram_of(curvature) * batch.n_rows
    diagonal = np.arange(batch.n_params)
    hessian[:, diagonal, diagonal] += ridge * batch.n_rows
    q, k = batch.X.shape[2], loss.n_outputs
    inverse = np.linalg.pinv(hessian, hermitian=True).reshape(-1, k, q, k, q)
    leverage = np.stack(
        [
            np.stack([((batch.X @ inverse[:, a, :, b]) * batch.X).sum(axis=2) for b in range(k)], axis=-1)
            for a in range(k)
        ],
        axis=-2,
    )
    moved = left_out(eta, loss.slope_at(eta, batch.y), curvature, leverage * weight[..., None, None])
    return np.asarray((weight * loss.value_at(moved, batch.y)).mean(axis=1))


def left_out(eta: Array, slope: Array, curvature: Array, leverage: Array) -> Array:
    """Predictors ``(..., k)`` of rows without themselves; ``leverage (..., k, k)`` is ``x'H^-1 x`` of each row."""
    if eta.shape[-1] == 1:
        freedom = np.maximum(1.0 - leverage[..., 0] * curvature[..., 0], _LEAST_FREEDOM)
        return np.asarray(eta + leverage[..., 0] * slope / freedom)
    freedom = np.eye(eta.shape[-1]) * (1 + _LEAST_FREEDOM) - leverage @ curvature
    return np.asarray(eta + np.linalg.solve(freedom, leverage @ slope[..., None])[..., 0])


# --- site intercepts ------------------------------------------------------------------------------------------


def with_site_intercepts(loss: RowLoss, rows: SiteRows, offset: Array | None, start: Array) -> Array:
    """One fit whose intercepts differ between sites, ridge and hold tuned in turn: ``theta (V, p)``.

    ``start (p,)`` is a fit of all rows.
    """
    model = _Intercepts(loss, rows, offset)
    k = loss.n_outputs
    state = _State(start.reshape(k, -1), np.zeros((rows.n_sites, k)))
    hold, ridge = float(HOLDS[2]), float(RIDGES[0])
    for name in ("ridge", "hold"):
        best = np.inf
        for level in RIDGES if name == "ridge" else HOLDS:
            tried = (float(level), hold) if name == "ridge" else (ridge, float(level))
            state, score = model.fit(state, *tried)
            if score < best:
                best, kept, level_kept = score, state, float(level)
        state = kept
        hold, ridge = (hold, level_kept) if name == "ridge" else (level_kept, ridge)
    theta = np.tile(state.common, (rows.n_sites, 1, 1))
    theta[:, :, 0] += state.own
    return theta.reshape(rows.n_sites, -1)


@dataclass(frozen=True)
class _State:
    common: Array  # (k, q), intercept first
    own: Array  # (V, k), added to the intercept


class _Intercepts:
    """Newton's method for the common parameters, with the sites' intercepts eliminated."""

    def __init__(self, loss: RowLoss, rows: SiteRows, offset: Array | None) -> None:
        self.loss, self.X, self.y, self.weight = loss, rows.X, rows.y, rows.weight
        self.offset, self.site, self.starts = offset, rows.site, rows.starts[:-1]

    def predictors(self, state: _State) -> Array:
        eta = self.X @ state.common.T + state.own[self.site]
        return np.asarray(eta if self.offset is None else eta + self.offset[:, None])

    def cost(self, state: _State, level: Array, hold: float) -> float:
        with np.errstate(over="ignore", invalid="ignore"):
            value = float(self.weight @ self.loss.value_at(self.predictors(state), self.y))
        penalty = 0.5 * float((level * state.common**2).sum() + hold * (state.own**2).sum())
        return value + penalty if np.isfinite(value) else np.inf

    def fit(self, state: _State, ridge: float, hold: float) -> tuple[_State, float]:
        """The minimiser from a start on, and the mean loss of rows that were left out."""
        level = np.full(state.common.shape, ridge)
        level[:, 0] = LIGHT
        now = self.cost(state, level, hold)
        for _ in range(_STEPS):
            parts = self._expanded(state, level, hold)
            step, ahead = parts.step, now
            for _ in range(30):
                tried = _State(state.common + step.common, state.own + step.own)
                ahead = self.cost(tried, level, hold)
                if ahead <= now:
                    break
                step = _State(0.5 * step.common, 0.5 * step.own)
            else:
                break
            state, gained, now = tried, now - ahead, ahead
            if gained <= _ENOUGH * max(abs(now), 1e-12):
                break
        return state, self._expanded(state, level, hold).without_each_row()

    def _expanded(self, state: _State, level: Array, hold: float) -> _Expansion:
        eta = self.predictors(state)
        slope, curvature = self.loss.slope_at(eta, self.y), self.loss.curvature_at(eta, self.y)
        if not self.loss.strictly_convex:
            curvature = curvature + 1e-2 * self.loss.cautious_at(eta, self.y)
        return _Expansion(self, state, eta, slope, curvature, level, hold)


class _Expansion:
    """The cost around a state: gradients, and the Hessian in blocks."""

    def __init__(
        self, model: _Intercepts, state: _State, eta: Array, slope: Array, curvature: Array, level: Array, hold: float
    ) -> None:
        self.model, self.eta, self.slope, self.curvature = model, eta, slope, curvature
        k, q = state.common.shape
        X, weight, starts = model.X, model.weight, model.starts
        pulled, bent = slope * weight[:, None], curvature * weight[:, None, None]
        gradient = (pulled.T @ X + level * state.common).reshape(-1)
        own = np.add.reduceat(pulled, starts, axis=0) + hold * state.own
        inner = np.linalg.inv(np.add.reduceat(bent, starts, axis=0) + hold * np.eye(k))
        cross = np.stack(
            [
                np.stack([np.add.reduceat(bent[:, a, b, None] * X, starts, axis=0) for b in range(k)], 1)
                for a in range(k)
            ],
            axis=1,
        ).reshape(-1, k, k * q)
        self.inner, self.pull = inner, inner @ cross  # (V, k, k), (V, k, kq)
        whole = weighted_gram(X, bent) * len(X) + np.diag(level.reshape(-1))
        self.outer = np.linalg.pinv(whole - np.einsum("vkp,vkr->pr", cross, self.pull), hermitian=True)
        common = -self.outer @ (gradient - np.einsum("vkp,vk->p", self.pull, own))
        self.step = _State(common.reshape(k, q), -np.einsum("vab,vb->va", inner, own) - self.pull @ common)

    def without_each_row(self) -> float:
        """Mean loss of rows that were left out, approximately."""
        model, k = self.model, self.eta.shape[1]
        pull = self.pull[model.site]
        leverage = self.inner[model.site].copy()
        spread = np.zeros((len(pull), k, pull.shape[2]))
        q = model.X.shape[1]
        for a in range(k):
            spread[:, a, a * q : (a + 1) * q] = model.X
        spread -= pull
        leverage += spread @ self.outer @ np.swapaxes(spread, 1, 2)
        moved = left_out(self.eta, self.slope, self.curvature, leverage * model.weight[:, None, None])
        return float(model.weight @ model.loss.value_at(moved, model.y) / model.weight.sum())
