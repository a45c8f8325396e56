"""Warm-started paths of solutions along decreasing penalty levels."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from fedkin._base import Array, Index, available_threads, check_positive, check_whole
from fedkin.core import FusedObjective, Problem, Solution
from fedkin.errors import ConvergenceWarning
from fedkin.solvers.compiled import Backend, Resolved, iteration_is_shared, resolve_backend, run_side_by_side
from fedkin.solvers.exact import scaled, solve_fused, uninterrupted
from fedkin.solvers.grids import checked_grid, lam_grid

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
    solutions: tuple[Solution, ...] = field(repr=False)

    def __len__(self) -> int:
        return len(self.solutions)

    def __iter__(self) -> Iterator[tuple[float, Solution]]:
        return iter(zip(self.lams.tolist(), self.solutions, strict=True))


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
        The levels, put into decreasing order; by default ``n_lams`` of them from `lam_max` down to ``ratio * lam_max``.
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
    check_positive("tol", tol)
    check_whole("max_iter", max_iter, least=1)
    grid = lam_grid(problem, n_lams, ratio) if lams is None else checked_grid(lams)
    objective = problem.fused
    resolved = resolve_backend(backend, objective, grid.size)
    strengths = grid * problem.n_sites
    tasks = [partial(_solved, objective, part, strengths, tol, max_iter, resolved) for part in stretches_of(grid.size)]
    solutions = list(
        itertools.chain.from_iterable(run_side_by_side(tasks, path_threads(objective, resolved), "levels of lam"))
    )
    warn_of_limits([solution.message for solution in solutions if solution.status == "iteration_limit"], grid.size)
    return LamPath(grid, tuple(scaled(solution, problem.n_sites) for solution in solutions))


def _solved(
    objective: FusedObjective, part: Index, strengths: Array, tol: float, max_iter: int, backend: Resolved
) -> list[Solution]:
    found = dict(path_stretch(objective, part, strengths, tol, max_iter, backend))
    return [found[k] for k in part.tolist()]


def warn_of_limits(messages: list[str], n_solves: int, stacklevel: int = 3) -> None:
    """One warning for all solves that stopped at the iteration limit, given their messages."""
    if messages:
        text = f"{len(messages)} of {n_solves} penalty levels did not converge. The first one {messages[0]}"
        warnings.warn(text, ConvergenceWarning, stacklevel=stacklevel)


def path_threads(objective: FusedObjective, backend: Resolved) -> int:
    """Number of solves to run side by side: compiled ones that do not use threads themselves."""
    alone = backend == "numpy" or iteration_is_shared(objective, objective.terms)
    return 1 if alone else available_threads()


def stretches_of(n_levels: int) -> list[Index]:
    """Positions of the levels of a path in stretches that do not wait for each other."""
    # the same on any number of cores: so are the results
    return np.array_split(np.arange(n_levels), min(STRETCHES, -(-n_levels // SHORTEST_STRETCH)))


def path_stretch(
    objective: FusedObjective,
    part: Index,
    strengths: Array,
    tol: float,
    max_iter: int,
    backend: Resolved,
    *,
    fuse_components: bool = True,
) -> Iterator[tuple[int, Solution]]:
    """Solutions along a stretch of a path, with their positions, each started from where the others point to.

    ``part`` are consecutive positions in the decreasing ``strengths (m,)``. ``fuse_components`` says whether it matters
    that components are fused exactly where they are at the optimum, and that every level of a smooth loss has a
    certificate.
    """
    known: list[tuple[float, Solution]] = []
    # near the top solutions change abruptly: go there from below. Elsewhere go down, where steps are shorter.
    ahead = (part[::-1] if part[0] == 0 else part).tolist()
    for k in ahead:
        at = objective.with_strength(float(strengths[k]))
        solution = solve_fused(
            at,
            tol,
            max_iter=max_iter,
            warm_start=_predicted(known, at),
            quiet=True,
            fuse_components=fuse_components,
            certify=fuse_components,
            backend=backend,
        )
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
