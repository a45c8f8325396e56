"""Penalty levels: where everything is fused (`lam_max`), and warm-started paths below it (`lam_path`)."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from fedkin.errors import ConvergenceWarning, ParameterError
from fedkin.graph import Graph
from fedkin.problem import FusedObjective, Problem, Solution
from fedkin.solvers.backend import Backend, Resolved, resolve_backend
from fedkin.solvers.congestion import least_congestion
from fedkin.solvers.exact import scaled, solve_fused, uninterrupted
from fedkin.solvers.workload import available_cores, iteration_is_shared, run_side_by_side
from fedkin.terms import summed_terms

Array = NDArray[np.float64]

#: Relative gap of the fused solution, whose gradients decide `lam_max`.
FUSED_GAP = 1e-10
#: A path is cut into this many stretches, of at least so many levels.
STRETCHES, SHORTEST_STRETCH = 4, 3


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
    backend: Backend = "auto",
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
    tol, max_iter, backend
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
    objective = problem.fused
    resolved = resolve_backend(backend, objective, grid.size)
    stretches = path_stretches(objective, grid * problem.n_devices, tol, max_iter, resolved)
    tasks = [partial(_all_of, stretch) for stretch in stretches]
    done = run_side_by_side(tasks, path_threads(objective, resolved))
    solutions = [solution for _, solution in sorted(itertools.chain.from_iterable(done), key=itemgetter(0))]
    warn_of_limits([solution.message for solution in solutions if solution.status == "iteration_limit"], grid.size)
    return LamPath(grid, tuple(scaled(solution, problem.n_devices) for solution in solutions))


def _all_of(stretch: Iterator[tuple[int, Solution]]) -> list[tuple[int, Solution]]:
    return list(stretch)


def warn_of_limits(messages: list[str], n_solves: int, stacklevel: int = 3) -> None:
    """One warning for all solves that stopped at the iteration limit, given their messages."""
    if messages:
        text = f"{len(messages)} of {n_solves} penalty levels did not converge; the first one {messages[0]}"
        warnings.warn(text, ConvergenceWarning, stacklevel=stacklevel)


def path_threads(objective: FusedObjective, backend: Resolved) -> int:
    """Number of solves to run side by side: compiled ones that do not use threads themselves."""
    alone = backend == "numpy" or iteration_is_shared(objective, objective.terms)
    return 1 if alone else available_cores()


def path_stretches(
    objective: FusedObjective, strengths: Array, tol: float, max_iter: int, backend: Resolved
) -> list[Iterator[tuple[int, Solution]]]:
    """A path in stretches that do not depend on each other; each yields positions and solutions.

    Parameters
    ----------
    objective : FusedObjective
        Its own strength does not matter.
    strengths : array (m,)
        Decreasing.
    tol, max_iter, backend
        For each solution.
    """
    # the same stretches on any number of cores: so are the results
    parts = np.array_split(np.arange(strengths.size), min(STRETCHES, -(-strengths.size // SHORTEST_STRETCH)))
    # near the top the solutions change abruptly: go there from below. Elsewhere go down, where steps are shorter.
    orders = [part[::-1] if k == 0 else part for k, part in enumerate(parts)]
    return [_stretch(objective, order.tolist(), strengths, tol, max_iter, backend) for order in orders]


def _stretch(
    objective: FusedObjective, order: list[int], strengths: Array, tol: float, max_iter: int, backend: Resolved
) -> Iterator[tuple[int, Solution]]:
    known: list[tuple[float, Solution]] = []
    for k in order:
        at = objective.with_strength(float(strengths[k]))
        start = _predicted(known, at)
        solution = solve_fused(at, tol, max_iter=max_iter, warm_start=start, quiet=True, backend=backend)
        yield k, uninterrupted(solution)
        known = [*known[-1:], (at.strength, solution)]


def _predicted(known: list[tuple[float, Solution]], at: FusedObjective) -> Solution | None:
    """Where to start, given the last two solutions: on the line through them, which the path often follows."""
    if not known:
        return None
    strength, last = known[-1]
    if len(known) == 1 or not known[0][0] > strength > at.strength:
        # duals grow with the strength
        return last if not strength > 0 else replace(last, alpha=last.alpha * (at.strength / strength))
    before, other = known[0]
    step = (strength - at.strength) / (before - strength)
    return replace(
        last, theta=last.theta + step * (last.theta - other.theta), alpha=last.alpha + step * (last.alpha - other.alpha)
    )
