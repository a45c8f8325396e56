"""Solve, and compare with cvxpy: solutions and every gap on the way."""

from __future__ import annotations

import numpy as np

from cvxpy_reference import reference
from fedkin import Problem, Solution, solve

#: Objective values are computed with about this relative error.
ROUNDING = 1e-9


def check_against(problem: Problem, *, tol: float = 1e-10, theta_tol: float | None = 1e-4) -> Solution:
    """Solve, compare with cvxpy, and compare every gap on the way with the truth."""
    solution, other = solve(problem, tol), reference(problem)
    assert solution.status == "converged"
    size = max(abs(other.objective), 1e-9)
    assert solution.objective <= other.objective + 1e-6 * size
    assert solution.objective >= other.objective - 1e-6 * size
    if theta_tol is not None:
        np.testing.assert_allclose(solution.theta, other.theta, atol=theta_tol)
    check_gaps(solution, min(solution.objective, other.objective))
    return solution


def check_gaps(solution: Solution, optimum: float) -> None:
    """No reported gap is below the true one."""
    objective, gap = solution.trace["objective"], solution.trace["gap"]
    missing = (objective - optimum) / np.abs(objective)
    assert (gap >= missing - ROUNDING).all()
    assert solution.gap >= (solution.objective - optimum) / abs(solution.objective) - ROUNDING
