"""Summarise rows with differential privacy: calibrated noise on clipped sums, and the budget of several messages."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtri

from fedkin._base import Array, check_positive, count
from fedkin.core.sitedata import assign_folds
from fedkin.core.summaries import Summaries
from fedkin.core.summary import Privacy, Summary
from fedkin.data import INTERCEPT, Federation, Rows
from fedkin.errors import DataError, ParameterError
from fedkin.losses import Loss

_GRID_BITS = 20  # by which the grid of private sums is finer than their noise


@dataclass(frozen=True)
class Budget:
    """Privacy guarantee to satisfy, and bounds on the rows.

    Replacing a row changes the probability of any message by a factor of at most ``exp(epsilon)``, except with
    probability ``delta``; a delta well below 1 / n is usual. ``limits`` bound the absolute values of the q columns (by
    default 1). They come from the contract's ranges and never from the rows; larger values are clipped.
    ``target_limit`` bounds the target (minus the offset). ``bound`` is an L2 bound on a row in units of its limits,
    including the constant and the target; longer rows are rescaled. The default ``sqrt(q + 1)`` rescales none; a
    smaller bound gives less noise and some bias.
    """

    epsilon: float
    delta: float = 1e-5
    limits: Sequence[float] | None = None
    target_limit: float = 1.0
    bound: float | None = None

    def __post_init__(self) -> None:
        check_positive("epsilon", self.epsilon)
        check_positive("target_limit", self.target_limit)
        if not 0 < self.delta < 1:
            raise ParameterError(f"delta must lie between 0 and 1, got {self.delta!r}")
        if self.bound is not None:
            check_positive("bound", self.bound)


def private_summary(
    site: Hashable,
    rows: Rows,
    loss: Loss,
    budget: Budget,
    *,
    feature_names: Sequence[str],
    folds: int = 5,
    seed: int = 0,
    by_fold: bool = True,
    rng: np.random.Generator | None = None,
) -> Summary:
    """Return the differentially private summary of one site."""
    if not loss.quadratic:
        raise ParameterError(
            f"privacy noise needs the linear or the mean loss; the {loss.name} loss needs several messages, "
            "which would have to share epsilon"
        )
    location, federation = loss.location, Federation({site: rows}, feature_names)
    limits = _limits(budget.limits, federation.n_features, 1.0 if location else budget.target_limit)
    Z, constant = _clipped_entries(federation, limits, location), _constant(federation, location)
    longest = float(np.sqrt(Z.shape[1])) if budget.bound is None else budget.bound
    Z = _shortened(Z, longest, constant)
    sensitivity = np.sqrt(max((longest**4 + longest**2) / 2 - (constant is not None), 1e-12))
    noise = float(noise_multiplier(budget.epsilon, budget.delta) * sensitivity)
    fold_of = assign_folds(federation, folds, seed) if by_fold else np.full(len(Z), -1)
    normals = secure_normals if rng is None else rng.standard_normal
    count, sums = np.zeros(folds + 1, dtype=np.int64), np.zeros((folds + 1, Z.shape[1], Z.shape[1]))
    upper, grid = np.triu_indices(Z.shape[1]), 2.0 ** (np.floor(np.log2(noise)) - _GRID_BITS)
    for fold in np.unique(fold_of):
        own, drawn = Z[fold_of == fold], np.zeros_like(sums[0])
        drawn[upper] = noise * normals(upper[0].size)
        # on a grid: the last bits of a float could reveal the value without noise
        count[fold], sums[fold] = len(own), np.round((own.T @ own + drawn + np.triu(drawn, 1).T) / grid) * grid
        if constant is not None:
            sums[fold, constant, constant] = len(own)
    sums = 0.5 * (sums + np.swapaxes(sums, 1, 2)) * np.outer(limits, limits)
    # everything else follows from sums of products
    names, last, second = federation.feature_names, sums[:, :-1, -1], sums[:, :-1, :-1]
    whole = second.sum(axis=0)
    if location:
        value, hessian, column_sums = 0.5 * np.einsum("kpp->k", second), count.astype(np.float64), last.sum(axis=0)
    else:
        value, hessian = 0.5 * sums[:, -1, -1], second
        column_sums = whole[0] if names[0] == INTERCEPT else np.zeros(len(names))
    head, folded = (site, loss, names, seed, np.zeros(len(names))), (count, value, -last, hessian)
    scores, squares = second if location else None, np.diagonal(whole).copy()
    privacy = Privacy(budget.epsilon, budget.delta, longest, limits, noise)
    return Summary(*head, *folded, column_sums, squares, scores, privacy=privacy)


def table_of_sums(summary: Summary) -> Rows:
    """Return a table with as many rows and the same sums of products as a noisy summary, made positive definite.

    Everything computed from it is computed from the noisy sums, so it keeps their privacy guarantee.

    Examples
    --------
    >>> from fedkin.losses import LinearLoss
    >>> rows = Rows(np.column_stack([np.ones(60), np.linspace(-1, 1, 60)]), np.linspace(-1, 1, 60) ** 2)
    >>> names = ("(intercept)", "x")
    >>> summary = private_summary("a", rows, LinearLoss(), Budget(8.0), feature_names=names, by_fold=False)
    >>> table, sums = table_of_sums(summary), Summaries.stack([summary]).repaired().sums
    >>> table.n_samples, bool(np.allclose(table.X.T @ table.X, sums.hessian[0, -1]))
    (60, True)
    """
    made, n = Summaries.stack([summary]).repaired(), summary.n_samples
    sums, scores = made.sums.total(), made.scores
    value, gradient, hessian = sums.value[0, 0], sums.gradient[0, 0], sums.hessian[0, 0]
    if scores is None:
        centre = np.zeros(gradient.size + 1)
        products = np.block([[hessian, -gradient[:, None]], [-gradient, 2.0 * value]])
    else:
        centre = -gradient / n
        products = scores[0].sum(axis=0) - n * np.outer(centre, centre)
    k = len(products)
    if n <= k:
        raise DataError(f"noisy sums of {count(n, 'row')} cannot stand for a table with {count(k, 'column')}")
    values, vectors = np.linalg.eigh(products)
    root = (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T
    # orthonormal columns, which add up to 0; without BLAS, whose bits depend on the number of threads
    waves = np.sqrt(2.0 / n) * np.cos(np.pi / n * np.outer(np.arange(n) + 0.5, np.arange(1, k + 1)))
    Z = centre + np.einsum("nj,jk->nk", waves, root)
    return Rows(Z) if scores is not None else Rows(np.ascontiguousarray(Z[:, :-1]), Z[:, -1].copy())


def secure_normals(size: int) -> Array:
    """Draw standard normal numbers from the operating system's cryptographic source."""
    bits = np.frombuffer(os.urandom(8 * size), dtype=np.uint64) >> np.uint64(11)
    return np.asarray(ndtri((bits.astype(np.float64) + 0.5) * 2.0**-53))


@lru_cache(maxsize=32)
def noise_multiplier(epsilon: float, delta: float) -> float:
    """Return the sd of the noise relative to the length bound of a row, for neighbouring data with one row replaced.

    This is the exact calibration of the Gaussian mechanism (Balle and Wang, 2018).
    """

    def excess(log_apart: float) -> float:
        return _delta(float(np.exp(log_apart)), epsilon) - delta

    return 2.0 / float(np.exp(brentq(excess, -60.0, np.log(np.sqrt(2.0 * epsilon) + 40.0))))


def composed_epsilon(messages: Sequence[tuple[float, float]]) -> float:
    """Return the total epsilon of several messages of `private_summary`, at the largest of their deltas.

    The noise of each message is calibrated to its ``(epsilon, delta)``. The composition of Gaussian mechanisms is a
    Gaussian mechanism.
    """
    apart = float(np.sqrt(sum(4.0 / noise_multiplier(*one) ** 2 for one in messages)))
    delta = max(delta for _, delta in messages)
    if _delta(apart, 0.0) <= delta:
        return 0.0
    return float(brentq(lambda epsilon: _delta(apart, epsilon) - delta, 0.0, apart**2 / 2 + 40.0 * apart))


def _delta(apart: float, epsilon: float) -> float:
    """Return the smallest delta of a Gaussian mechanism whose outcomes are ``apart`` standard deviations apart."""
    tails = log_ndtr(apart / 2 - epsilon / apart), epsilon + log_ndtr(-apart / 2 - epsilon / apart)
    return float(np.exp(tails[0]) - np.exp(tails[1]))


def _limits(limits: Sequence[float] | None, q: int, target: float) -> Array:
    given = np.ones(q) if limits is None else np.asarray(limits, dtype=np.float64)
    if given.shape != (q,) or not (np.isfinite(given) & (given > 0)).all():
        raise ParameterError(f"limits must be {q} positive numbers, one for each column, got {limits!r}")
    return np.append(given, target)


def _clipped_entries(federation: Federation, limits: Array, location: bool) -> Array:
    """Return rows ``(n, q + 1)`` of columns and target (or a constant), in units of their limits, cut to [-1, 1]."""
    if location:
        last = np.ones(len(federation.X))
    else:
        assert federation.y is not None
        last = federation.y if federation.offset is None else federation.y - federation.offset
    Z = np.column_stack([federation.X, last]) / limits
    if not np.isfinite(Z).all():
        raise DataError("rows contain a value that is not finite: drop these rows or impute them")
    return np.clip(Z, -1.0, 1.0)


def _constant(federation: Federation, location: bool) -> int | None:
    """Return the position of the constant column, which needs no noise."""
    if location:
        return federation.n_features
    if federation.feature_names[0] != INTERCEPT:
        return None
    if not (federation.X[:, 0] == 1).all():
        raise DataError("the column (intercept) is not 1 in every row")
    return 0


def _shortened(Z: Array, bound: float, constant: int | None) -> Array:
    """Rescale rows to length at most ``bound``; a constant stays 1."""
    free = np.ones(Z.shape[1], dtype=bool)
    rest = bound
    if constant is not None:
        free[constant] = False
        rest = float(np.sqrt(max(bound**2 - 1.0, 0.0)))
        if not rest > 0:
            raise ParameterError(f"bound must be greater than 1, the length of the constant alone, got {bound:g}")
    length = np.sqrt((Z[:, free] ** 2).sum(axis=1))
    out = Z.copy()
    out[:, free] *= np.minimum(1.0, rest / np.maximum(length, 1e-300))[:, None]
    return out
