"""The objective written down for cvxpy, which shares no code with the package, and comparisons with its optimum."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import cvxpy as cp
import numpy as np

from builders import LOSSES
from fedkin import Problem, Solution, solve
from fedkin.losses import Loss, MultinomialLoss

NORMS = {"l1": 1, "l2": 2, "linf": "inf"}


@dataclass(frozen=True)
class Reference:
    """An optimum that somebody else's solver found: ``theta (V, p)`` and the objective on the public scale."""

    theta: np.ndarray
    objective: float


def reference(problem: Problem, tol: float = 1e-10) -> Reference:
    """Solve ``problem`` by cvxpy and Clarabel."""
    federation, graph = problem.federation, problem.graph
    n_sites, p = problem.n_sites, problem.n_params
    theta = cp.Variable((n_sites, p))
    rows = [federation[site] for site in federation.sites]
    total = sum(mean_loss(one, theta[u], rows[u]) for u, one in enumerate(problem.losses))
    total += 0.5 * cp.sum(cp.multiply(np.broadcast_to(problem.ridge, (n_sites, p)), cp.square(theta)))
    total += cp.sum(cp.multiply(sparsity_matrix(problem), cp.abs(theta)))
    total = total / n_sites
    for (i, j), weight in zip(graph.edges, graph.weights, strict=True):
        total += problem.lam * weight * cp.norm(theta[i] - theta[j], NORMS[problem.penalty.name])
    ball = [] if problem.radius is None else [cp.norm(theta[u], 2) <= problem.radius for u in range(n_sites)]
    task = cp.Problem(cp.Minimize(total), ball)
    assert np.isfinite(minimum(task, tol)), task.status
    return Reference(theta.value, problem.objective(theta.value))


def minimum(task: cp.Problem, tol: float = 1e-10) -> float:
    """Solve by Clarabel, with larger tolerances where that fails; -inf if there is no minimum."""
    for wanted in (tol, 100 * tol, 1e4 * tol):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "may be inaccurate": the comparison itself will tell
                task.solve(solver=cp.CLARABEL, tol_gap_abs=wanted, tol_gap_rel=wanted, tol_feas=wanted, max_iter=500)
        except cp.SolverError:  # exponential cones sometimes end in a numerical error this close to the optimum
            continue
        return task.value if task.status in ("optimal", "optimal_inaccurate") else -np.inf
    raise AssertionError("Clarabel fails at every tolerance")


def sparsity_matrix(problem: Problem) -> np.ndarray:
    sparsity = problem.sparsity
    if isinstance(sparsity, dict):
        sparsity = [sparsity.get(site, 0.0) for site in problem.federation.sites]
    sparsity = np.asarray(sparsity, dtype=float)
    if sparsity.ndim == 1:
        sparsity = sparsity[:, None]
    return np.broadcast_to(sparsity, (problem.n_sites, problem.n_params))


def mean_loss(loss: Loss, theta: cp.Expression, rows: object) -> cp.Expression:
    """A site's mean loss, term by term as in the documentation."""
    X, y, offset = rows.X, rows.y, rows.offset
    n = X.shape[0]
    if loss.name == "mean":
        return 0.5 * cp.sum_squares(np.ones((n, 1)) @ cp.reshape(theta, (1, -1), order="C") - X) / n
    offset = np.zeros(n) if offset is None else offset
    if isinstance(loss, MultinomialLoss):
        return multinomial(loss, theta, X, y, offset) / n
    eta = X @ theta + offset
    row = LOSSES[loss.name].row
    assert row is not None, f"the case of the {loss.name} loss in tests/builders.py has no row: write the loss in cvxpy"
    return cp.sum(row(cp, eta, y, loss)) / n


def multinomial(
    loss: MultinomialLoss, theta: cp.Expression, X: np.ndarray, y: np.ndarray, offset: np.ndarray
) -> cp.Expression:
    rest = X @ cp.reshape(theta, (loss.n_classes - 1, X.shape[1]), order="C").T + offset[:, None]
    eta = cp.hstack([np.zeros((X.shape[0], 1)), rest])
    chosen = np.eye(loss.n_classes)[y.astype(int)]
    return cp.sum(cp.log_sum_exp(eta, axis=1)) - cp.sum(cp.multiply(chosen, eta))


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
