"""Several penalty levels of a small quadratic problem at once, on the kernels of `fedkin.solvers.kernels.levels`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedkin._base import Array
from fedkin.objective import FusedObjective, QuadraticTerms, Solution
from fedkin.solvers.chains import chains_for
from fedkin.solvers.compiled import CompiledIteration
from fedkin.solvers.pdhg import Stopping, initial_rho
from fedkin.solvers.search import FUSING_HELPS, SCALE_FLOOR, verdict
from fedkin.solvers.workload import iteration_is_shared

#: Numbers that the solutions of one call may take.
ROOM = 20_000_000


def solve_levels(
    objective: FusedObjective,
    known: Sequence[tuple[float, Solution]],
    strengths: Array,
    tol: float,
    max_iter: int,
    *,
    fuse_components: bool = True,
) -> list[Solution]:
    """Solutions at the first of some strengths: as many as one call gets done, perhaps none.

    Parameters
    ----------
    objective : FusedObjective
        Its own strength does not matter.
    known : sequence of (strength, Solution)
        At most two, to start from; the last one is the nearest.
    strengths : array (m,)
        Levels to solve, in this order.
    tol, max_iter
        As in `fedkin.solve`.
    fuse_components : bool
        Whether to stop where a whole component may be fused at the optimum.

    Notes
    -----
    What needs more care than a kernel takes is left to `fedkin.solvers.exact.solve_fused`: large problems, singular
    designs, sparsity, grids, levels that need many iterations, and those where whole components may be fused.
    """
    terms = objective.terms
    if not isinstance(terms, QuadraticTerms) or not _fits(objective, terms, strengths, known):
        return []
    start = objective.with_strength(float(strengths[0]))
    iteration = CompiledIteration(start, terms, None, None, None, initial_rho(start, terms), n_threads=1)
    if not iteration.regular:
        return []
    floor = SCALE_FLOOR * abs(float(terms.c.sum())) + np.finfo(float).tiny
    levels, before = np.concatenate([[at for at, _ in known], strengths]), len(known)
    theta = np.empty((levels.size, terms.n_devices, terms.n_params))
    alpha = np.empty((levels.size, objective.graph.n_edges, terms.n_params))
    for k, (_, solution) in enumerate(known):
        theta[k], alpha[k] = solution.theta, solution.alpha
    component = np.empty(0, dtype=np.int32)
    if fuse_components:
        component = objective.graph.components()[objective.graph.edges[:, 0]].astype(np.int32)
    stopping = Stopping(tol, floor, max_iter, FUSING_HELPS)
    done, table, checks = iteration.settle_levels(levels, before, theta, alpha, component, stopping)
    return [_solution(theta[k], alpha[k], table[k], checks[k], tol) for k in range(before, before + done)]


def _fits(
    objective: FusedObjective, terms: QuadraticTerms, strengths: Array, known: Sequence[tuple[float, Solution]]
) -> bool:
    levels = strengths.size + len(known)
    return (
        objective.sparsity is None
        and strengths.size > 0
        and min(strengths.min(), *(at for at, _ in known), np.inf) > 0
        and not iteration_is_shared(objective, terms)
        and levels * (objective.graph.n_edges + terms.n_devices) * terms.n_params <= ROOM
        and chains_for(objective, terms) is None
    )


def _solution(theta: Array, alpha: Array, row: Array, checks: Array, tol: float) -> Solution:
    n_iter, value, gap, n_checks = row.tolist()
    trace = dict(zip(("n_iter", "objective", "gap"), checks[: int(n_checks)].T, strict=True))
    message = verdict("converged", gap, tol, int(n_iter))
    return Solution(theta, value, gap, "converged", int(n_iter), trace, alpha, message)
