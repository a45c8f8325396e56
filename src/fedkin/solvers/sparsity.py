"""The choice of the l1 term by cross-validation within sites, together with ``lam``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedkin._base import Array
from fedkin.core import Problem, summed_terms
from fedkin.errors import ParameterError
from fedkin.solvers.compiled import Backend
from fedkin.solvers.crossvalidation import (
    ROUGH_GAP,
    Fold,
    LamChoice,
    Rule,
    beyond_doubt,
    cross_validate_lam,
    cut_folds,
    judge_problems,
)
from fedkin.solvers.exact import solve_fused
from fedkin.solvers.path import checked_grid
from fedkin.solvers.variants import profiled

#: Levels that are tried, and the least of them as a share of the one at which all parameters are 0.
N_LEVELS, LEAST_SHARE = 10, 1e-3


def cross_validate_sparsity(
    problem: Problem,
    levels: Sequence[float] | Array | None = None,
    *,
    weights: Array | None = None,
    per_site: bool = False,
    folds: int = 5,
    rule: Rule = "min",
    seed: int = 0,
    n_jobs: int | None = None,
    backend: Backend = "auto",
) -> tuple[Problem, LamChoice]:
    """Choose the level of the l1 term, one for all sites or one for each, together with ``lam``.

    Each level is judged by its best ``lam`` among a few, from all fused down to none; the best one then gets the whole
    grid.

    Parameters
    ----------
    problem : Problem
        Its own ``sparsity`` and ``lam`` do not matter.
    levels : sequence of float, optional
        Candidates; by default ten from the one at which all parameters are 0 on, and 0. Those below one that is clearly
        worse for all sites together are not tried, unless sites may have levels of their own.
    weights : array (p,), optional
        Relative size of the level for each parameter, 0 for intercepts; 1 by default.
    per_site : bool
        Give sites a level of their own (the paper's ``lambda_i``) where it is beyond doubt that their held-out rows are
        predicted better than with the common one.
    folds, rule, seed, n_jobs, backend
        As in `cross_validate_lam`.

    Returns
    -------
    problem : Problem
        With the chosen sparsity ``(V, p)``.
    choice : LamChoice
        Of its ``lam``.

    Examples
    --------
    >>> import fedkin
    >>> from fedkin.datasets import paper_design
    >>> from fedkin.solvers import cross_validate_sparsity
    >>> design = paper_design(n_sites=10, n_samples=12, n_features=8, n_clusters=2, seed=0)
    >>> problem, choice = cross_validate_sparsity(fedkin.Problem(design.federation, design.truth))
    >>> problem.sparsity.shape
    (10, 8)
    """
    weights = np.ones(problem.n_params) if weights is None else np.asarray(weights, dtype=np.float64)
    if weights.shape != (problem.n_params,) or not (weights >= 0).all() or not weights.any():
        raise ParameterError(f"weights must be {problem.n_params} numbers of at least 0, not all of them 0")
    if levels is None:
        levels = np.append(0.0, sparsity_max(problem, weights) * np.geomspace(LEAST_SHARE, 1.0, N_LEVELS))
    grid = checked_grid(levels)
    how: dict[str, Any] = {"folds": folds, "seed": seed, "n_jobs": n_jobs, "backend": backend}
    ones = np.ones((problem.n_sites, 1))
    candidates = (replace(problem, sparsity=level * weights * ones) for level in grid)
    tried = judge_problems(candidates, abandon=not per_site, **how)
    best = int(np.argmin([scores.mean() for _, scores in tried]))
    chosen = tried[best][0]
    if per_site:
        own = _own_levels([cut_folds(one, folds, seed) for one, _ in tried], grid, best)
        chosen = replace(chosen, sparsity=own[:, None] * weights)
    return chosen, cross_validate_lam(chosen, rule=rule, **how)


def sparsity_max(problem: Problem, weights: Array) -> float:
    """Return the level of ``level * weights (p,)`` at which 0 is best at every site, given common other parameters."""
    free = weights == 0
    theta = np.zeros((1, problem.n_params))
    if free.any():
        pooled = summed_terms(problem.terms, np.zeros(problem.n_sites, dtype=np.int64))
        theta = profiled(pooled, free, ["all sites"])[1](theta[:, ~free])
    gradient = problem.terms.gradients(np.tile(theta, (problem.n_sites, 1)))
    return float((np.abs(gradient[:, ~free]) / weights[~free]).max())


def _own_levels(cuts: list[list[Fold]], levels: Array, best: int) -> Array:
    """Return a level for each site ``(V,)``: the common one, or another that is better beyond doubt."""
    V = cuts[0][0].objective.graph.n_sites
    losses = np.full((len(cuts), len(cuts[0]), V), np.nan)
    for m, cut in enumerate(cuts):
        for k, fold in enumerate(cut):
            theta = solve_fused(fold.objective, ROUGH_GAP, quiet=True).theta
            losses[m, k, fold.seen] = fold.held_out(theta[fold.seen])
    chosen = np.full(V, best)
    for u in range(V):
        known = losses[:, ~np.isnan(losses[0, :, u]), u]
        better = [m for m in range(len(cuts)) if beyond_doubt(known[best] - known[m])]
        chosen[u] = min(better, key=lambda m: float(known[m].mean()), default=best)
    return np.asarray(levels[chosen])
