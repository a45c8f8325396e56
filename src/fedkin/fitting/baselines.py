"""Tuned baselines that Fedkin is compared with: local models, one global model, and site intercepts.

From rows, ridges are tuned by leaving out one row at a time: exactly for least squares, where one eigendecomposition
gives the fits of all ridges and leverages give each leave-one-out prediction; by one Newton step for smooth losses
(Rad and Maleki 2020). From sums, they are tuned by folds (`fold_baselines`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from fedkin._base import Array, Index, Mask
from fedkin.core import (
    Quadratics,
    RowData,
    RowTerms,
    SiteTerms,
    SummedTerms,
    global_fit,
    local_fit,
    minimise_with_ridge,
    resolve_losses,
)
from fedkin.data import Federation, Rows, Schema
from fedkin.errors import DegenerateSiteWarning
from fedkin.fitting.model import FittedModel
from fedkin.fitting.options import FitOptions
from fedkin.fitting.preparation import Estimate, Prepared, prepare
from fedkin.graph import Graph
from fedkin.losses import LOGIT_SIZE, RowLoss, weighted_gram

LOCAL, GLOBAL, INTERCEPTS = "Local", "Global", "Site intercepts"

#: Ridges that are tried for least squares, on standardised columns and sums over rows.
RIDGES = np.logspace(-2, 4, 13)
#: Shrinkage of site intercepts: noise variance over the variance between sites.
HOLDS = np.logspace(-1, 3, 9)
#: The same for smooth losses, largest first.
SMOOTH_RIDGES, SMOOTH_HOLDS = np.logspace(3, -1, 9), np.logspace(3, -1, 5)
#: Ridges that are tried from sums, in units of one row's curvature; features have a standard deviation of about 1.
FOLD_RIDGES = np.geomspace(1e-3, 10.0, 7)
#: Ridge of an intercept of a smooth loss: it matters only where a class, or every count, is missing.
LIGHT = 1.0 / LOGIT_SIZE
_STEPS, _ENOUGH = 12, 1e-7  # Newton steps at most, and the relative decrease that ends them
_FREEDOM, _SMOOTH_FREEDOM = 1e-9, 1e-3  # least freedom of a row to differ from its fit
_LEAST = 1e-10  # what keeps sums without enough rows solvable, as a share of the curvature


def baseline_models(
    federation: Federation, options: FitOptions | None = None, schema: Schema | None = None
) -> dict[str, FittedModel]:
    """Fit the baseline models to the same rows.

    Local is a ridge fit at each site, tuned there. Global is one ridge fit to all rows. Site intercepts is Global with
    a separate intercept for each site, shrunk by the amount that predicts best; it needs an intercept and at least two
    sites. Losses that do not depend on linear predictors have nothing to tune.

    Parameters
    ----------
    federation : Federation
        Training rows, every site with at least one.
    options : FitOptions, optional
        Its loss and intercept are used; features are standardised, and ridges are tuned.
    schema : Schema, optional
        As in `fit`.

    Returns
    -------
    dict {"Local" | "Global" | "Site intercepts": FittedModel}

    Examples
    --------
    >>> from fedkin.datasets import paper_design
    >>> from fedkin.fitting import baseline_models
    >>> design = paper_design(n_sites=6, n_samples=30, n_features=3, n_clusters=1, seed=0)
    >>> list(baseline_models(design.federation))
    ['Local', 'Global', 'Site intercepts']
    """
    options = FitOptions() if options is None else options
    prepared = prepare(federation, replace(options, boost=False), schema, standardize=True)
    alone, each = Graph.empty(federation.sites), np.arange(federation.n_sites)
    return {
        name: prepared.model(Estimate(theta, alone, each if name == LOCAL else 0 * each), options)
        for name, theta in _thetas(prepared).items()
    }


def _thetas(prepared: Prepared) -> dict[str, Array]:
    fed, loss = prepared.rows, prepared.loss.rowwise
    resolve_losses(prepared.loss, fed)  # which checks the targets
    if not prepared.loss.additive:
        data = RowData(fed, prepared.loss)
        return {LOCAL: _by_freedom(data), GLOBAL: np.tile(_by_freedom(data, pooled=True), (fed.n_sites, 1))}
    if loss is None or fed.y is None:
        # a ridge is added as for Local, which does not warn
        with warnings.catch_warnings(action="ignore", category=DegenerateSiteWarning):
            pooled = global_fit(fed, prepared.loss)
        return {LOCAL: local_fit(fed, prepared.loss).theta, GLOBAL: np.tile(pooled, (fed.n_sites, 1))}
    weight = np.ones(len(fed.X)) if fed.weight is None else fed.weight
    rows = StackedRows(fed.X, fed.y.astype(np.float64), weight, fed.starts, prepared.columns.intercept, fed.offset)
    if loss.quadratic and rows.offset is not None:
        rows = rows._replace(y=rows.y - rows.offset, offset=None)

    def own(some: StackedRows) -> Array:
        return own_ridges(some) if loss.quadratic else own_fits(loss, some)

    common = own(rows._replace(starts=np.array([0, len(rows.y)])))[0]
    found = {LOCAL: own(rows), GLOBAL: np.tile(common, (fed.n_sites, 1))}
    if rows.intercept and fed.n_sites > 1:
        found[INTERCEPTS] = (
            ridge_with_site_intercepts(rows) if loss.quadratic else with_site_intercepts(loss, rows, common)
        )
    return found


def _by_freedom(data: RowData, pooled: bool = False) -> Array:
    """Return parameters ``(V, p)`` with the ridge chosen by AIC; ``(1, p)`` when all sites are ``pooled``.

    Leave-one-out does not apply to partial likelihoods. AIC with the effective degrees of freedom of the ridge fit
    approximates the cross-validated partial likelihood (Verweij and van Houwelingen 1994).
    """
    n = data.n.astype(np.float64)
    terms: SiteTerms = data.terms(np.zeros(data.n_params))
    if pooled:
        n, terms = n.sum(keepdims=True), SummedTerms(terms, np.zeros(n.size, dtype=np.int64), n / n.sum())
    theta, chosen = np.zeros((n.size, data.n_params)), np.zeros((n.size, data.n_params))
    best = np.full(n.size, np.inf)
    for ridge in SMOOTH_RIDGES:
        held = np.broadcast_to(ridge / n[:, None], theta.shape)
        theta = minimise_with_ridge(terms, held, start=theta)
        hessian = terms.hessians(theta)
        freedom = np.linalg.solve(hessian + held[:, :, None] * np.eye(data.n_params), hessian)
        score = n * terms.values(theta) + np.einsum("vpp->v", freedom)
        better = score < best
        best, chosen = np.where(better, score, best), np.where(better[:, None], theta, chosen)
    return chosen


class StackedRows(NamedTuple):
    """Rows ``X (N, p)``, ``y (N,)``, ``weight (N,)`` of V sites, one after the other from ``starts (V + 1,)``."""

    X: Array
    y: Array
    weight: Array
    starts: Index
    intercept: bool
    offset: Array | None = None

    @property
    def n_sites(self) -> int:
        return len(self.starts) - 1

    @property
    def site(self) -> Index:
        """The site of each row, ``(N,)``."""
        return np.repeat(np.arange(self.n_sites), np.diff(self.starts))

    def by_size(self) -> Iterator[tuple[Index, Index]]:
        """Yield sites ``(B,)`` with the same number of rows n, and the numbers of these rows ``(B, n)``."""
        sizes = np.diff(self.starts)
        for size in np.unique(sizes):
            sites = np.flatnonzero(sizes == size)
            # as many sites at once as a few hundred thousand numbers hold
            for part in np.array_split(sites, max(1, int(size) * sites.size * self.X.shape[1] // 2_000_000)):
                yield part, self.starts[part][:, None] + np.arange(size)


# --- least squares ----------------------------------------------------------------------------------------------


def own_ridges(rows: StackedRows) -> Array:
    """Fit a ridge regression at each site, with its own tuning; return ``theta (V, p)``.

    The result equals that of `sklearn.linear_model.RidgeCV` at each site. Columns are standardised over all sites, so a
    column that hardly varies at a site has little weight there.
    """
    theta, first = np.zeros((rows.n_sites, rows.X.shape[1])), int(rows.intercept)
    for sites, where in rows.by_size():
        y, weight, Z = rows.y[where], rows.weight[where], rows.X[where][:, :, first:]
        share, root = first * weight / weight.sum(axis=1)[:, None], np.sqrt(weight)
        middle, mean = (share * y).sum(axis=1), np.einsum("bn,bnq->bq", share, Z)
        Z, target = (Z - mean[:, None]) * root[:, :, None], (y - middle[:, None]) * root
        size, turn = np.linalg.eigh(np.swapaxes(Z, 1, 2) @ Z)
        U = Z @ turn
        along = np.einsum("bnq,bn->bq", U, target)
        shrunk = 1.0 / (np.maximum(size, 0.0)[:, :, None] + RIDGES)
        leverage = (U**2) @ shrunk + share[:, :, None]
        missed = (target[:, :, None] - U @ (along[:, :, None] * shrunk)) / np.maximum(1.0 - leverage, _FREEDOM)
        best = _largest_best((missed**2).sum(axis=1))
        slopes = np.einsum("bqk,bk->bq", turn, along * shrunk[np.arange(sites.size), :, best])
        theta[sites, first:] = slopes
        if first:
            theta[sites, 0] = middle - (slopes * mean).sum(axis=1)
    return theta


def _largest_best(scores: Array) -> Index:
    """Return the largest of the best ridges for each row of ``scores (B, A)``: without two other rows, all tie."""
    good = scores <= scores.min(axis=1, keepdims=True) * (1 + 1e-6) + 1e-300
    return np.asarray(scores.shape[1] - 1 - good[:, ::-1].argmax(axis=1))


def ridge_with_site_intercepts(rows: StackedRows) -> Array:
    """Fit a ridge regression with site intercepts, with tuned ridge and shrinkage; return ``theta (V, p)``.

    Site u's intercept is the common one plus ``b_u``, with ``sum_u hold b_u^2`` added to the sum of squares. With the
    ``b_u`` eliminated, least squares uses the metric ``M = I - share_u 1 1'`` on the rows of site u, so ``M x`` is x
    minus ``share_u`` times the site's sum; ``left`` is the remainder for a column of ones.
    """
    root, site, first = np.sqrt(rows.weight), rows.site, rows.starts[:-1]
    Z, target = rows.X[:, 1:] * root[:, None], rows.y * root
    total, targets = np.add.reduceat(rows.weight, first), np.add.reduceat(target * root, first)
    sums = np.add.reduceat(Z * root[:, None], first, axis=0)
    gram, cross, lowest = Z.T @ Z, Z.T @ target, np.inf
    for hold in HOLDS:
        share, left = 1.0 / (total + hold), hold / (total + hold)
        mass = float(left @ total)
        mean, middle = left @ sums / mass, float(left @ targets) / mass
        shrunk_sums = share[:, None] * sums
        size, turn = np.linalg.eigh(gram - sums.T @ shrunk_sums - mass * np.outer(mean, mean))
        along = turn.T @ (cross - shrunk_sums.T @ targets - mass * mean * middle)
        shrunk = 1.0 / (np.maximum(size, 0.0)[:, None] + RIDGES)
        U = Z @ turn
        U -= ((shrunk_sums + np.outer(left, mean)) @ turn)[site] * root[:, None]
        missed = target - (share * targets + left * middle)[site] * root
        missed = missed[:, None] - U @ (along[:, None] * shrunk)
        np.square(U, out=U)
        constant = rows.weight * (share + left**2 / mass)[site]
        missed /= np.maximum((1.0 - constant)[:, None] - U @ shrunk, _FREEDOM)
        score = np.einsum("na,na->a", missed, missed)
        best = int(_largest_best(score[None])[0])
        if score[best] < lowest:
            lowest, slopes = score[best], turn @ (along * shrunk[:, best])
            level = middle - float(mean @ slopes)
            own = share * (targets - total * level - sums @ slopes)
    return np.column_stack([level + own, np.tile(slopes, (rows.n_sites, 1))])


# --- smooth losses ----------------------------------------------------------------------------------------------


def own_fits(loss: RowLoss, rows: StackedRows) -> Array:
    """Fit each site with the ridge that best predicts left-out rows; return ``theta (V, p)``."""
    k, q = loss.n_outputs, rows.X.shape[1]
    found = np.zeros((rows.n_sites, k * q))
    for sites, where in rows.by_size():
        weight = rows.weight[where]
        shift = None if rows.offset is None else rows.offset[where]
        relative = None if (weight == 1).all() else weight / weight.mean(axis=1, keepdims=True)
        batch = RowTerms(loss, Rows(rows.X[where], rows.y[where], shift), relative)
        best, theta = np.full(sites.size, np.inf), None
        for ridge in SMOOTH_RIDGES:
            level = np.full((k, q), ridge)
            if rows.intercept:
                level[:, 0] = LIGHT
            each = level.reshape(-1) / weight.sum(axis=1)[:, None]
            # the last fit is close: few steps suffice
            theta = minimise_with_ridge(batch, each, start=theta, tol=_ENOUGH)
            score = _without_each_row(batch, theta, each)
            better = score < best
            best[better], found[sites[better]] = score[better], theta[better]
    return found


def _without_each_row(batch: RowTerms, theta: Array, ridge: Array) -> Array:
    """Return approximate leave-one-out mean losses ``(B,)``."""
    loss, eta = batch.loss, batch.predictors(theta)
    curvature = loss.curvature_at(eta, batch.y)
    weight = np.ones(batch.y.shape) if batch.weight is None else batch.weight
    hessian = batch.gram_of(curvature) * batch.n_rows
    diagonal = np.arange(batch.n_params)
    hessian[:, diagonal, diagonal] += ridge * batch.n_rows
    q, k = batch.X.shape[2], loss.n_outputs
    inverse = np.linalg.pinv(hessian, hermitian=True).reshape(-1, k, q, k, q)
    leverage = np.empty((*batch.y.shape, k, k))
    for a, b in np.ndindex(k, k):
        leverage[..., a, b] = ((batch.X @ inverse[:, a, :, b]) * batch.X).sum(axis=2)
    moved = _left_out(eta, loss.slope_at(eta, batch.y), curvature, leverage * weight[..., None, None])
    return np.asarray((weight * loss.value_at(moved, batch.y)).mean(axis=1))


def _left_out(eta: Array, slope: Array, curvature: Array, leverage: Array) -> Array:
    """Return predictors ``(..., k)`` of rows without themselves; ``leverage (..., k, k)`` is each ``x'H^-1 x``."""
    if eta.shape[-1] == 1:
        freedom = np.maximum(1.0 - leverage[..., 0] * curvature[..., 0], _SMOOTH_FREEDOM)
        return np.asarray(eta + leverage[..., 0] * slope / freedom)
    freedom = np.eye(eta.shape[-1]) * (1 + _SMOOTH_FREEDOM) - leverage @ curvature
    return np.asarray(eta + np.linalg.solve(freedom, leverage @ slope[..., None])[..., 0])


def with_site_intercepts(loss: RowLoss, rows: StackedRows, start: Array) -> Array:
    """Fit a model with site intercepts, tuning ridge and shrinkage in turn; return ``theta (V, p)``.

    ``start (p,)`` is a fit of all rows.
    """
    model, k = _Intercepts(loss, rows), loss.n_outputs
    state = (start.reshape(k, -1), np.zeros((rows.n_sites, k)))
    hold, ridge = float(SMOOTH_HOLDS[2]), float(SMOOTH_RIDGES[0])

    def best(levels: list[tuple[float, float]]) -> tuple[float, float]:
        nonlocal state
        found = []
        for level in levels:
            state, score = model.fit(state, *level)
            found.append((score, level, state))
        _, level, state = min(found, key=lambda one: one[0])
        return level

    ridge, hold = best([(float(level), hold) for level in SMOOTH_RIDGES])
    best([(ridge, float(level)) for level in SMOOTH_HOLDS])
    common, own = state
    theta = np.tile(common, (rows.n_sites, 1, 1))
    theta[:, :, 0] += own
    return theta.reshape(rows.n_sites, -1)


_State = tuple[Array, Array]  # common parameters (k, q), intercept first; what sites add to it (V, k)


class _Intercepts:
    """Newton's method for the common parameters, with the sites' intercepts eliminated."""

    def __init__(self, loss: RowLoss, rows: StackedRows) -> None:
        self.loss, self.rows, self.site, self.starts = loss, rows, rows.site, rows.starts[:-1]

    def predictors(self, state: _State) -> Array:
        eta = self.rows.X @ state[0].T + state[1][self.site]
        return np.asarray(eta if self.rows.offset is None else eta + self.rows.offset[:, None])

    def cost(self, state: _State, level: Array, hold: float) -> float:
        with np.errstate(over="ignore", invalid="ignore"):
            value = float(self.rows.weight @ self.loss.value_at(self.predictors(state), self.rows.y))
        penalty = 0.5 * float((level * state[0] ** 2).sum() + hold * (state[1] ** 2).sum())
        return value + penalty if np.isfinite(value) else np.inf

    def fit(self, state: _State, ridge: float, hold: float) -> tuple[_State, float]:
        """Return the minimiser, and the mean loss of left-out rows."""
        level = np.full(state[0].shape, ridge)
        level[:, 0] = LIGHT
        now = self.cost(state, level, hold)
        for _ in range(_STEPS):
            (common, own), _ = self.step(state, level, hold)
            for shorter in 0.5 ** np.arange(30):
                tried = (state[0] + shorter * common, state[1] + shorter * own)
                ahead = self.cost(tried, level, hold)
                if ahead <= now:
                    break
            else:
                break
            state, gained, now = tried, now - ahead, ahead
            if gained <= _ENOUGH * max(abs(now), 1e-12):
                break
        return state, self.step(state, level, hold, score=True)[1]

    def step(self, state: _State, level: Array, hold: float, *, score: bool = False) -> tuple[_State, float]:
        """Return the Newton step and, on request, the approximate mean loss of left-out rows."""
        X, y, weight, loss = self.rows.X, self.rows.y, self.rows.weight, self.loss
        (k, q), eta = state[0].shape, self.predictors(state)
        slope, curvature = loss.slope_at(eta, y), loss.curvature_at(eta, y)
        if not loss.strictly_convex:
            curvature = curvature + 1e-2 * loss.cautious_at(eta, y)
        pulled, bent = slope * weight[:, None], curvature * weight[:, None, None]
        gradient = (pulled.T @ X + level * state[0]).reshape(-1)
        own = np.add.reduceat(pulled, self.starts, axis=0) + hold * state[1]
        inner = np.linalg.inv(np.add.reduceat(bent, self.starts, axis=0) + hold * np.eye(k))
        crosses = np.empty((self.rows.n_sites, k, k, q))
        for a, b in np.ndindex(k, k):
            crosses[:, a, b] = np.add.reduceat(bent[:, a, b, None] * X, self.starts, axis=0)
        cross = crosses.reshape(-1, k, k * q)
        pull = inner @ cross
        whole = weighted_gram(X, bent) * len(X) + np.diag(level.reshape(-1))
        outer = np.linalg.pinv(whole - np.einsum("vkp,vkr->pr", cross, pull), hermitian=True)
        common = -outer @ (gradient - np.einsum("vkp,vk->p", pull, own))
        step = (common.reshape(k, q), -np.einsum("vab,vb->va", inner, own) - pull @ common)
        if not score:
            return step, np.nan
        apart = -pull[self.site]
        for a in range(k):
            apart[:, a, a * q : (a + 1) * q] += X
        leverage = inner[self.site] + apart @ outer @ np.swapaxes(apart, 1, 2)
        moved = _left_out(eta, slope, curvature, leverage * weight[:, None, None])
        return step, float(weight @ loss.value_at(moved, y) / weight.sum())


# --- from sums --------------------------------------------------------------------------------------------------


def fold_baselines(sums: Quadratics, intercepts: Mask, held_out: int) -> dict[str, Array]:
    """Return parameters ``(V, p)`` of each method from all folds but one; ``intercepts (p,)`` are never shrunk.

    Ridges are chosen by cross-validation over the other folds, separately at each site for Local.
    """
    A, b, _ = sums.coefficients()
    A = A[:, :, None, None] * np.eye(len(intercepts)) if A.ndim == 2 else A
    whole = (sums.count.astype(np.float64), A, b)
    folds = [k for k in range(sums.folds) if k != held_out and sums.count[:, k].any()]
    V, loss = len(sums.at), dict[str, Array]()
    for k in folds:
        seen = np.flatnonzero(sums.count[:, k])
        test = sums.take(seen).terms(k)
        for m, ridge in enumerate(FOLD_RIDGES):
            for name, theta in _fold_fits(whole, intercepts, (held_out, k), np.full(V, ridge)).items():
                each = loss.setdefault(name, np.zeros((len(FOLD_RIDGES), V)))
                each[m, seen] += sums.count[seen, k] * test.values(theta[seen])
    if not folds:
        return _fold_fits(whole, intercepts, (held_out,), np.full(V, FOLD_RIDGES[0]))
    found = {}
    for name, each in loss.items():
        chosen = np.full(V, FOLD_RIDGES[each.sum(axis=1).argmin()])
        if name == LOCAL:
            tested = (sums.count[:, folds] > 0).any(axis=1)
            chosen = np.where(tested, FOLD_RIDGES[each.argmin(axis=0)], chosen)
        found[name] = _fold_fits(whole, intercepts, (held_out,), chosen)[name]
    return found


def _fold_fits(
    whole: tuple[Array, Array, Array], free: Mask, without: tuple[int, ...], ridge: Array
) -> dict[str, Array]:
    """Return all methods with these ridges ``(V,)``; pooled methods use the first."""
    kept = [k for k in range(whole[0].shape[1]) if k not in without]
    n, A, b = (part[:, kept].sum(axis=1) for part in whole)
    V, slopes, one = len(n), ~free, np.eye(len(free))
    tiny = _LEAST * max(float(np.einsum("vii->", A)), 1e-300) / len(free)
    shrink = np.diag(slopes.astype(np.float64))
    own = A + (n * ridge)[:, None, None] * shrink + tiny / V * one
    held = n.sum() * ridge[0] * shrink + tiny * one
    pooled = np.linalg.solve(A.sum(axis=0) + held, b.sum(axis=0))
    found = {LOCAL: np.linalg.solve(own, b[:, :, None])[:, :, 0], GLOBAL: np.tile(pooled, (V, 1))}
    if not free.any() or V == 1:
        return found
    # intercepts of the sites, minimised out
    level = A[:, free][:, :, free] + tiny / V * np.eye(int(free.sum()))
    cross = A[:, slopes][:, :, free]
    start = np.linalg.solve(level, b[:, free, None])
    steep = np.linalg.solve(level, np.swapaxes(cross, 1, 2))
    left = (A[:, slopes][:, :, slopes] - cross @ steep).sum(axis=0) + held[slopes][:, slopes]
    theta = np.empty_like(b)
    theta[:, slopes] = np.linalg.solve(left, (b[:, slopes] - (cross @ start)[:, :, 0]).sum(axis=0))
    theta[:, free] = start[:, :, 0] - steep @ theta[0, slopes]
    return found | {INTERCEPTS: theta}
