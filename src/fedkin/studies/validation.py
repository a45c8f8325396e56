"""Cross-validation of lam in bulk, for quadratic losses: all folds at once, on Gram statistics.

The same scores as `fedkin.cross_validate_lam`, to the tolerance of the paths, in a fraction of the time: the folds are
solved as one problem on as many copies of the graph, training statistics are totals minus the held-out fold, and
solutions on the way are not polished.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fedkin.graph import Graph
from fedkin.objective import FusedObjective, Problem, QuadraticTerms
from fedkin.solvers import PrimalDual, cross_validate_lam, initial_rho, resolve_backend, solve_fused, start_iteration

Array = NDArray[np.float64]

#: Iterations after which the plain solver takes over.
PATIENCE = 2000


def validated_lam(problem: Problem, lams: Array, *, folds: int, seed: int, tol: float) -> float:
    """The ``lam`` with the smallest held-out loss, each device weighted equally.

    Parameters
    ----------
    problem : Problem
        Its own lam does not matter.
    lams : array (m,)
        Candidates, decreasing.
    folds, seed
        Of the folds, cut within devices.
    tol : float
        Relative duality gap along the paths.
    """
    if isinstance(problem.terms, QuadraticTerms) and problem.fused.sparsity is None and not np.any(problem.ridge):
        return float(lams[fold_scores(problem, lams, folds, seed, tol).mean(axis=0).argmin()])
    return cross_validate_lam(problem, lams, folds=folds, seed=seed, tol=tol).lam


def fold_scores(problem: Problem, lams: Array, folds: int, seed: int, tol: float) -> Array:
    """Held-out mean losses ``(folds, m)`` of the paths fitted without each fold."""
    statistics = _Statistics.of(problem, folds, seed)
    n_devices = problem.n_devices
    edges = np.concatenate([problem.graph.edges + fold * n_devices for fold in range(folds)])
    weights = np.tile(problem.graph.weights, folds)
    copies = Graph.from_indices(range(folds * n_devices), edges, weights)
    objective = FusedObjective(statistics.train, copies, problem.fused.penalty, 0.0)
    scores = np.empty((folds, lams.size))
    # from small to large, as in lam_path
    for k, theta in _path(objective, lams * n_devices, tol):
        scores[:, k] = statistics.held_out.values(theta).reshape(folds, n_devices).mean(axis=1)
    return scores


@dataclass(frozen=True, eq=False)
class _Statistics:
    """Mean losses of training and held-out rows, fold after fold: ``folds * V`` devices each."""

    train: QuadraticTerms
    held_out: QuadraticTerms

    @classmethod
    def of(cls, problem: Problem, folds: int, seed: int) -> _Statistics:
        federation = problem.federation
        fold_of = federation.folds(folds, seed)
        n, A, b, c = [], [], [], []
        for fold in range(folds):
            part = federation.take(fold_of == fold)
            terms = replace(problem, federation=part).terms
            assert isinstance(terms, QuadraticTerms)
            rows = part.n_samples.astype(np.float64)
            n.append(rows)
            A.append(_times(terms.A, rows))
            b.append(_times(terms.b, rows))
            c.append(_times(terms.c, rows))
        sums = [np.stack(one) for one in (n, A, b, c)]
        rest = [one.sum(axis=0) - one for one in sums]
        return cls(_means(*rest), _means(*sums))


def _times(values: Array, rows: Array) -> Array:
    return values * rows.reshape(-1, *(1,) * (values.ndim - 1))


def _means(n: Array, A: Array, b: Array, c: Array) -> QuadraticTerms:
    """Terms of ``folds * V`` devices from sums over rows."""
    flat = n.reshape(-1)
    return QuadraticTerms(*(_times(one.reshape(-1, *one.shape[2:]), 1.0 / flat) for one in (A, b, c)))


def _path(objective: FusedObjective, strengths: Array, tol: float) -> Iterator[tuple[int, Array]]:
    """Numbers of the strengths, from the smallest, with the solutions ``theta``."""
    terms = objective.terms
    assert isinstance(terms, QuadraticTerms)
    backend = resolve_backend("auto", objective, strengths.size)
    pair: PrimalDual | None = None
    for k in reversed(range(strengths.size)):
        at = objective.with_strength(strengths[k])
        theta = None if pair is None else pair.theta
        alpha = (
            None if pair is None else at.penalty.project(pair.alpha * strengths[k] / strengths[k + 1], at.edge_radius)
        )
        iteration = start_iteration(backend, at, terms, theta, alpha, None, initial_rho(at, terms))
        try:
            found = None
            while iteration.regular and found is None and iteration.n_iter < PATIENCE:
                iteration.advance(max(5, iteration.n_iter // 10))
                value, gap = iteration.certificate()
                if gap <= tol * abs(value):
                    found = iteration.pair()
                elif gap <= 10 * tol * abs(value):
                    fused = iteration.fused()
                    value, gap = iteration.certificate(fused)
                    found = iteration.pair(fused) if gap <= tol * abs(value) else None
        finally:
            iteration.close()
        if found is None:  # a singular device, or a stubborn problem
            solution = solve_fused(at, tol)
            found = PrimalDual(solution.theta, solution.alpha, None, np.zeros_like(solution.theta), np.ones(1), 0)
        pair = found
        yield k, pair.theta
