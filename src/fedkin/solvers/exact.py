"""The exact solver: a minimiser of the fused objective with a duality gap as its certificate."""

from __future__ import annotations

import numpy as np

from fedkin._base import Array, check_positive, check_whole
from fedkin.errors import ParameterError
from fedkin.objective import FusedObjective, Problem, Solution
from fedkin.solvers.backend import Backend, resolve_backend
from fedkin.solvers.pdhg import PrimalDual
from fedkin.solvers.search import Search


def solve(
    problem: Problem,
    tol: float = 1e-6,
    *,
    max_iter: int = 20_000,
    warm_start: Solution | None = None,
    backend: Backend = "auto",
) -> Solution:
    """Minimise the objective of ``problem`` and certify the result.

    Parameters
    ----------
    problem : Problem
        What to minimise.
    tol : float
        Relative duality gap to reach.
    max_iter : int
        Limit on primal-dual iterations, all Newton steps together.
    warm_start : Solution, optional
        Of a similar problem (another ``lam``, other rows) on the same graph.
    backend : "auto", "numpy" or "numba"
        What carries out the iterations, see `fedkin.solvers.backend`.

    Returns
    -------
    Solution
        ``solution.gap`` is an upper bound on the relative suboptimality. Ctrl-C ends the iteration with what was found
        so far and the status "interrupted".

    Raises
    ------
    SolverError
        When the objective has no finite minimiser (separable classes without a ridge, for example).

    Notes
    -----
    The gap is relative to ``max(|F(theta)|, 1e-6 |F(0)|)``. With singular designs (fewer rows than parameters on a
    device) it needs a ball that holds a minimiser. For quadratic losses, and with sparsity everywhere, that is proven;
    otherwise ``solution.radius`` says for which ball the certificate holds (see `fedkin.solvers.radius`).

    Examples
    --------
    >>> import fedkin
    >>> from fedkin.datasets import paper_design
    >>> design = paper_design(n_devices=10, n_samples=30, n_features=3, n_clusters=2, seed=0)
    >>> solution = fedkin.solve(fedkin.Problem(design.federation, design.graph, lam=0.01))
    >>> solution.status, solution.gap <= 1e-6
    ('converged', True)
    """
    check_positive("tol", tol)
    check_whole("max_iter", max_iter, least=1)
    if not isinstance(warm_start, Solution | None):
        raise ParameterError(f"warm_start must be a Solution, as solve returns it, got {warm_start!r}")
    solution = solve_fused(problem.fused, tol, max_iter=max_iter, warm_start=warm_start, backend=backend)
    return scaled(solution, problem.n_devices)


def scaled(solution: Solution, n_devices: int) -> Solution:
    """A solution of the fused objective on the public scale (1/|V| of it)."""
    trace = {**solution.trace, "objective": solution.trace["objective"] / n_devices}
    return Solution(
        solution.theta,
        solution.objective / n_devices,
        solution.gap,
        solution.status,
        solution.n_iter,
        trace,
        solution.alpha,
        solution.message,
        solution.radius,
    )


def solve_fused(
    objective: FusedObjective,
    tol: float,
    *,
    max_iter: int = 20_000,
    warm_start: Solution | None = None,
    quiet: bool = False,
    backend: Backend = "auto",
) -> Solution:
    """`solve` on arrays; the objective is |V| times the public one. ``quiet`` leaves out the convergence warning."""
    search = Search(objective, tol, max_iter, _start(objective, warm_start), resolve_backend(backend, objective))
    try:
        search.run(warm=warm_start is not None)
    except KeyboardInterrupt:
        search.status = "interrupted"
    return search.finish(quiet)


def uninterrupted(solution: Solution) -> Solution:
    """The solution, or KeyboardInterrupt again where it is one of many and the user wants none of them any more."""
    if solution.status == "interrupted":
        raise KeyboardInterrupt
    return solution


def _start(objective: FusedObjective, warm_start: Solution | None) -> PrimalDual:
    terms, graph = objective.terms, objective.graph
    shape, edges = (terms.n_devices, terms.n_params), (graph.n_edges, terms.n_params)
    box = objective.sparsity
    if warm_start is None:
        return _pair(np.zeros(shape), np.zeros(edges), None if box is None else np.zeros(shape))
    if warm_start.theta.shape != shape or warm_start.alpha.shape != edges:
        raise ParameterError(
            f"the warm start has theta {warm_start.theta.shape} and alpha {warm_start.alpha.shape}, "
            f"this problem needs {shape} and {edges}; warm starts must come from the same graph"
        )
    theta, alpha = warm_start.theta, objective.penalty.project(warm_start.alpha, objective.edge_radius)
    if box is None:
        return _pair(theta, alpha, None)
    # the sparsity duals are what the edge duals leave to balance
    rest = terms.gradients(theta) + np.asarray(graph.incidence().T @ alpha)
    return _pair(theta, alpha, np.clip(-rest, -box, box))


def _pair(theta: Array, alpha: Array, zeta: Array | None) -> PrimalDual:
    """Parameters and duals to start from, whose balance nobody has computed yet."""
    return PrimalDual(theta, alpha, zeta, np.zeros_like(theta), np.ones(1), 0)
