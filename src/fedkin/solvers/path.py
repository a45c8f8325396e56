"""Penalty levels: where everything is fused (`lam_max`), and warm-started paths below it (`lam_path`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fedkin.errors import ParameterError
from fedkin.graph import Graph
from fedkin.problem import FusedObjective, Problem, Solution
from fedkin.solvers.congestion import least_congestion
from fedkin.solvers.exact import scaled, solve_fused, uninterrupted
from fedkin.terms import summed_terms

Array = NDArray[np.float64]

#: Relative gap of the fused solution, whose gradients decide `lam_max`.
FUSED_GAP = 1e-10


@dataclass(frozen=True, eq=False)
class LamPath:
    """Solutions along decreasing penalty levels.

    Attributes
    ----------
    lams : array (m,)
        From `lam_max` downwards.
    solutions : tuple of Solution
    """

    lams: Array
    solutions: tuple[Solution, ...]

    def __len__(self) -> int:
        return len(self.solutions)

    def __iter__(self) -> Iterator[tuple[float, Solution]]:
        return iter(zip(self.lams.tolist(), self.solutions, strict=True))


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
    if not tol > 0:
        raise ParameterError(f"tol must be positive, got {tol!r}")
    objective = problem.fused
    return least_congestion(objective.graph, objective.penalty, fused_gradients(objective), tol) / problem.n_devices


def fused_solution(objective: FusedObjective) -> Array:
    """The solution with every component fused, ``(V, p)``: Global on a connected graph, each device weighted alike."""
    labels = objective.graph.components()
    first = np.unique(labels, return_index=True)[1]
    sparsity = None
    if objective.sparsity is not None:
        sparsity = _sum_by(labels, objective.sparsity, first.size)
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
        shares = free / np.maximum(_sum_by(labels, free, groups), np.finfo(float).tiny)[labels]
        gradient = gradient - shares * _sum_by(labels, gradient, groups)[labels]
    # remove what rounding left over
    return np.asarray(gradient - (_sum_by(labels, gradient, groups) / np.bincount(labels)[:, None])[labels])


def _sum_by(labels: NDArray[np.int64], values: Array, groups: int) -> Array:
    sums = np.zeros((groups, values.shape[1]))
    np.add.at(sums, labels, values)
    return sums


def lam_grid(problem: Problem, n_lams: int = 20, ratio: float = 1e-3) -> Array:
    """``n_lams`` penalty levels, geometric from `lam_max` down to ``ratio * lam_max``; just 0 where that is 0."""
    if n_lams < 1:
        raise ParameterError(f"n_lams must be at least 1, got {n_lams}")
    if not 0 < ratio < 1:
        raise ParameterError(f"ratio must lie between 0 and 1, got {ratio!r}")
    top = lam_max(problem, tol=0.01)
    return top * np.geomspace(1.0, ratio, n_lams) if top > 0 else np.zeros(1)


def checked_grid(lams: Sequence[float] | Array) -> Array:
    """Penalty levels in decreasing order."""
    grid = np.asarray(lams, dtype=np.float64)
    if grid.ndim != 1 or grid.size == 0 or not (np.isfinite(grid) & (grid >= 0)).all():
        raise ParameterError(f"lams must be a list of finite numbers of at least 0, got {lams!r}")
    return np.sort(grid)[::-1]


def lam_path(
    problem: Problem,
    lams: Sequence[float] | Array | None = None,
    *,
    n_lams: int = 20,
    ratio: float = 1e-3,
    tol: float = 1e-6,
    max_iter: int = 20_000,
) -> LamPath:
    """Solutions along a decreasing sequence of penalty levels, each warm-started from its neighbour.

    Parameters
    ----------
    problem : Problem
        Its own ``lam`` does not matter.
    lams : sequence of float, optional
        The levels; by default ``n_lams`` of them from `lam_max` down to ``ratio * lam_max``.
    n_lams, ratio
        See `lams`.
    tol, max_iter
        For each solution, as in `solve`.

    Returns
    -------
    LamPath
        Ctrl-C ends the whole path.

    Examples
    --------
    >>> import fedkin
    >>> fed = fedkin.Federation({"a": [[0.0]], "b": [[2.0]]})
    >>> problem = fedkin.Problem(fed, fedkin.Graph.complete(["a", "b"]), loss="mean")
    >>> path = fedkin.lam_path(problem, [0.5, 0.25])
    >>> [solution.theta.round(2).ravel().tolist() for lam, solution in path]
    [[1.0, 1.0], [0.5, 1.5]]
    """
    grid = lam_grid(problem, n_lams, ratio) if lams is None else checked_grid(lams)
    solutions: list[Solution] = []
    # from small to large: duals grow with lam, so a scaled dual is close to the next one
    for k in reversed(range(grid.size)):
        objective = problem.fused.with_strength(grid[k] * problem.n_devices)
        previous = solutions[-1] if solutions else None
        if previous is not None and grid[k + 1] > 0:
            previous = replace(previous, alpha=previous.alpha * (grid[k] / grid[k + 1]))
        solutions.append(uninterrupted(solve_fused(objective, tol, max_iter=max_iter, warm_start=previous)))
    public = tuple(scaled(solution, problem.n_devices) for solution in reversed(solutions))
    return LamPath(grid, public)
