"""Penalty levels: where everything is fused (`lam_max`), and the grids below it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedkin._base import Array, check_positive, check_whole
from fedkin.errors import ParameterError
from fedkin.graph import Graph
from fedkin.objective import FusedObjective, Problem, sum_groups, summed_terms
from fedkin.solvers.congestion import least_congestion
from fedkin.solvers.exact import solve_fused, uninterrupted

#: Relative gap of the fused solution, whose gradients decide `lam_max`.
FUSED_GAP = 1e-10


def lam_max(problem: Problem, tol: float = 1e-3) -> float:
    """The smallest ``lam`` at which all devices of each connected component are fused.

    Parameters
    ----------
    problem : Problem
        Its own ``lam`` does not matter.
    tol : float
        The result is at least the exact value and at most ``1 + tol`` times it. Trees, the l1 penalty and a single
        parameter have exact methods.

    Notes
    -----
    With gradients g at the fused solution, ``lam_max`` is the smallest level that admits edge duals with
    ``D' y = -g``: a network flow with least congestion, see `fedkin.solvers.congestion`. With ``sparsity`` it is an
    upper bound (the sparsity duals are fixed).

    Examples
    --------
    >>> import fedkin
    >>> fed = fedkin.Federation({"a": [[0.0]], "b": [[2.0]]})
    >>> problem = fedkin.Problem(fed, fedkin.Graph.complete(["a", "b"]), loss="mean")
    >>> round(fedkin.lam_max(problem), 3)
    0.5
    """
    check_positive("tol", tol)
    objective = problem.fused
    return least_congestion(objective.graph, objective.penalty, fused_gradients(objective), tol) / problem.n_devices


def fused_solution(objective: FusedObjective) -> Array:
    """The solution with every component fused, ``(V, p)``: Global on a connected graph, each device weighted alike."""
    labels = objective.graph.components()
    first = np.unique(labels, return_index=True)[1]
    sparsity = None
    if objective.sparsity is not None:
        sparsity = sum_groups(objective.sparsity, labels, first.size)
    # each component under the name of its first device
    graph = Graph.empty([objective.graph.devices[u] for u in first])
    pooled = replace(
        objective, terms=summed_terms(objective.terms, labels), graph=graph, strength=0.0, sparsity=sparsity
    )
    return uninterrupted(solve_fused(pooled, FUSED_GAP, quiet=True)).theta[labels]


def fused_gradients(objective: FusedObjective) -> Array:
    """Gradients at the fused solution (with sparsity duals added), which sum to zero over each component."""
    theta = fused_solution(objective)
    gradient = objective.terms.gradients(theta)
    labels = objective.graph.components()
    groups = int(labels.max()) + 1
    if objective.sparsity is not None:
        gradient = gradient + objective.sparsity * np.sign(theta)
        free = np.where(np.abs(theta) > 0, 0.0, objective.sparsity)
        shares = free / np.maximum(sum_groups(free, labels, groups), np.finfo(float).tiny)[labels]
        gradient = gradient - shares * sum_groups(gradient, labels, groups)[labels]
    # remove what rounding left over
    return np.asarray(gradient - (sum_groups(gradient, labels, groups) / np.bincount(labels)[:, None])[labels])


def lam_grid(problem: Problem, n_lams: int = 20, ratio: float = 1e-3, tol: float = 0.01) -> Array:
    """``n_lams`` penalty levels, geometric from `lam_max` down to ``ratio * lam_max``; just 0 where that is 0.

    ``tol`` is that of `lam_max`.
    """
    check_whole("n_lams", n_lams, least=1)
    if not 0 < ratio < 1:
        raise ParameterError(f"ratio must lie between 0 and 1, got {ratio!r}")
    top = lam_max(problem, tol)
    return top * np.geomspace(1.0, ratio, n_lams) if top > 0 else np.zeros(1)


def lattice(top: float, n_lams: int, ratio: float) -> Array:
    """Levels ``(n_lams,)`` from the first at or above ``top`` downwards, out of ``step ** k`` for all whole k.

    Components of a graph find tops of their own; on a common lattice their curves can be added.

    Examples
    --------
    >>> from fedkin.solvers import lattice
    >>> lattice(0.07, 3, 0.01).round(6).tolist()
    [0.1, 0.01, 0.001]
    """
    step = ratio ** (1.0 / (n_lams - 1))
    first = int(np.floor(np.log(top) / np.log(step) + 1e-9))
    return np.asarray(step ** np.arange(first, first + n_lams, dtype=np.float64))


def checked_grid(lams: Sequence[float] | Array) -> Array:
    """Penalty levels in decreasing order."""
    try:
        grid = np.asarray(lams, dtype=np.float64)
    except (TypeError, ValueError):
        grid = np.empty(0)
    if grid.ndim != 1 or grid.size == 0 or not (np.isfinite(grid) & (grid >= 0)).all():
        raise ParameterError(f"lams must be a list of finite numbers of at least 0, got {lams!r}")
    return np.sort(grid)[::-1]
