"""Baselines: network-lasso ADMM with exact minimisations (Hallac, Leskovec and Boyd 2015), and subgradient descent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy import sparse

from fedkin._base import Array, Index, check_choice, check_positive, check_whole
from fedkin.admm.gradients import Gradients
from fedkin.admm.plan import AVERAGES, Average, BatchSize, local_curvature, site_rows, starting_point
from fedkin.admm.run import (
    Callback,
    Progress,
    Trace,
    certify,
    deferred_interrupt,
    next_record,
    root_mean_square,
    run_callbacks,
)
from fedkin.admm.shard import averaging_weight, edge_update
from fedkin.core import FusedObjective, Problem, QuadraticTerms, SiteTerms, Solution, Status, damped_newton
from fedkin.errors import ParameterError, SolverError

Resolve = Callable[[Array, Array], Array]

#: Differences are scaled by this before they are projected onto the dual ball, where they then lie on its border.
_FAR = 1e100


def network_lasso_admm(
    problem: Problem,
    rounds: int = 1000,
    *,
    rho: float | Literal["auto"] = "auto",
    tol: float | None = None,
    reference: Solution | ArrayLike | None = None,
    warm_start: Solution | None = None,
    callbacks: Sequence[Callback] = (),
    record_every: int | None = None,
) -> Solution:
    """Run network-lasso ADMM with all rows: Algorithm 1 with the node step replaced by an exact minimisation.

    Parameters
    ----------
    problem : Problem
        What is solved; without sparsity.
    rounds : int
        Rounds to do.
    rho : float or "auto"
        Penalty of the augmented Lagrangian; by default ``4 * mean curvature / mean degree``.
    tol : float, optional
        Stop when the relative duality gap is at most this.
    reference, warm_start, callbacks, record_every
        As in `fedkin.fed_admm`.

    Returns
    -------
    Solution
        With a trace of ``n_iter``, ``objective``, ``dual_residual``, ``primal_residual``, ``distance``, ``vectors``,
        ``bytes``, ``rows`` and ``gap`` (with ``tol``).

    Examples
    --------
    >>> import fedkin
    >>> from fedkin.admm import network_lasso_admm
    >>> fed = fedkin.Federation({"a": [[0.0]], "b": [[2.0]]})
    >>> problem = fedkin.Problem(fed, fedkin.Graph.complete(["a", "b"]), loss="mean", lam=0.1)
    >>> network_lasso_admm(problem, rounds=100).theta.round(6).ravel().tolist()
    [0.2, 1.8]
    """
    check_whole("rounds", rounds, least=1)
    if tol is not None:
        check_positive("tol", tol)
    objective, graph = problem.fused, problem.graph
    if objective.sparsity is not None:
        raise ParameterError("network-lasso ADMM has no sparsity term; use fedkin.solve or fedkin.fed_admm")
    degree = graph.degree.astype(np.float64)
    theta, duals = starting_point(problem, warm_start)
    alpha = np.zeros((graph.n_edges, problem.n_params)) if duals is None else duals
    if rho == "auto":
        curvature = np.einsum("vii->v", objective.terms.hessians(theta)).mean() / problem.n_params
        strength = 4.0 * float(curvature) / max(float(degree.mean()), 1e-12)
    else:
        check_positive("rho", rho)
        strength = float(rho)
    minimise = _node_minimiser(objective.terms, np.maximum(strength * degree, 1e-12 * strength)[:, None])
    sums = sparse.csr_array(graph.incidence().T)
    balance = before = np.asarray(sums @ alpha)
    previous, n_rows = alpha, float(problem.federation.n_samples.sum())

    def advance(t: int) -> None:
        nonlocal theta, previous, alpha, before, balance
        theta, previous = minimise(theta, 2.0 * balance - before), alpha
        alpha = edge_update(alpha, objective.differences(theta), strength, objective.edge_radius, objective.penalty)
        before, balance = balance, np.asarray(sums @ alpha)

    def record(t: int) -> dict[str, float]:
        columns = {"primal_residual": root_mean_square(alpha - previous) / strength, **_traffic(problem, t, n_rows * t)}
        if tol is not None:
            columns["gap"] = certify(objective, theta, [balance])[0]
        return trace.record(t, theta, balance, **columns)

    trace = Trace(problem, reference)
    status, done = _iterate(rounds, advance, record, lambda: theta, callbacks, record_every, tol)
    return _finish(problem, theta, alpha, balance, status, done, trace)


def _iterate(
    rounds: int,
    advance: Callable[[int], None],
    record: Callable[[int], dict[str, float]],
    theta: Callable[[], Array],
    callbacks: Sequence[Callback],
    record_every: int | None,
    tol: float | None = None,
) -> tuple[Status, int]:
    """Advance round after round, and record some of them, until something ends it; how it ended, and after how many."""
    planned = next_record(0, record_every)
    with deferred_interrupt() as interrupt, np.errstate(over="ignore", invalid="ignore"):
        for t in range(1, rounds + 1):
            advance(t)
            if t in (planned, rounds) or interrupt.pressed:
                planned, line = next_record(t, record_every), record(t)
                if tol is not None and line["gap"] <= tol:
                    return "converged", t
                if interrupt.pressed or run_callbacks(callbacks, Progress(t, theta(), line)):
                    return "interrupted", t
    return "iteration_limit", rounds


def _node_minimiser(terms: SiteTerms, weight: Array) -> Resolve:
    """``argmin M_u(x) + <pull_u, x> + weight_u ||x - theta_u||^2 / 2``, as a function of theta and pull."""
    if isinstance(terms, QuadraticTerms):
        resolve = terms.resolvent(weight * np.ones(terms.n_params))
        return lambda theta, pull: resolve(terms.b + weight * theta - pull)
    return lambda theta, pull: _newton(terms, weight, theta, pull)


def _newton(terms: SiteTerms, weight: Array, theta: Array, pull: Array) -> Array:
    eye = np.eye(terms.n_params)

    def everywhere(x: Array, who: Index) -> Array:
        """Terms know all sites at once: those that are done stand where they began."""
        out = theta.copy()
        out[who] = x
        return out

    def value(x: Array, who: Index) -> Array:
        with np.errstate(over="ignore", invalid="ignore"):
            losses = terms.values(everywhere(x, who))[who]
            found = losses + (pull[who] * x).sum(axis=1) + 0.5 * (weight[who] * (x - theta[who]) ** 2).sum(axis=1)
        return np.where(np.isnan(found), np.inf, found)

    def derivatives(x: Array, who: Index) -> tuple[Array, Array]:
        at = everywhere(x, who)
        gradient = terms.gradients(at)[who] + pull[who] + weight[who] * (x - theta[who])
        return gradient, terms.hessians(at)[who] + weight[who][:, :, None] * eye

    found, converged = damped_newton(value, derivatives, theta)
    if not converged.all():
        raise SolverError("the local minimisation on a site made no progress; add ridge=1e-3 or so")
    return found


def _finish(
    problem: Problem, theta: Array, alpha: Array, balance: Array, status: Status, done: int, trace: Trace
) -> Solution:
    gap, radius = certify(problem.fused, theta, [balance])
    words = {"converged": "converged after", "interrupted": "interrupted after", "iteration_limit": "did"}[status]
    message = f"{words} {done} rounds: relative gap {gap:.1e}"
    value = problem.objective(theta)
    return Solution(theta, value, gap, status, done, trace.columns(), alpha, message, radius)


def subgradient_descent(
    problem: Problem,
    rounds: int = 1000,
    batch_size: BatchSize = None,
    *,
    step: float | Literal["auto"] = "auto",
    decay: float = 0.5,
    average: Average = "last",
    seed: int = 0,
    reference: Solution | ArrayLike | None = None,
    callbacks: Sequence[Callback] = (),
    record_every: int | None = None,
) -> Solution:
    """Run subgradient descent on the objective: GD with all rows, SGD with batches; a baseline for `fedkin.fed_admm`.

    Parameters
    ----------
    problem : Problem
        What is solved.
    rounds : int
        Steps to take. In each, a site sends its theta to its neighbours, as in Fed-ADMM.
    batch_size : int, sequence of V ints or None
        Rows that a site draws in each round, the same ones as in `fedkin.fed_admm` with this seed; None for all
        rows (GD).
    step : float or "auto"
        The c of ``eta(t) = c / t^decay``; by default 1 / (largest curvature of a batch). Baselines deserve a c of
        their own: try a grid.
    decay : float
        Between 0 and 1; 1/2 is the classical choice for functions with kinks.
    seed : int
        Of the batches.
    average, reference, callbacks, record_every
        As in `fedkin.fed_admm`.

    Returns
    -------
    Solution
        With a trace of ``n_iter``, ``objective``, ``distance``, ``vectors``, ``bytes`` and ``rows``. ``alpha`` holds
        the subgradients of the penalty at theta, and the gap is what they prove.

    Raises
    ------
    SolverError
        When the iteration runs away.

    Examples
    --------
    >>> import fedkin
    >>> from fedkin.datasets import paper_design
    >>> from fedkin.admm import subgradient_descent
    >>> design = paper_design(n_sites=10, n_samples=30, n_features=3, n_clusters=2, seed=0)
    >>> problem = fedkin.Problem(design.federation, design.graph, lam=0.001)
    >>> solution = subgradient_descent(problem, rounds=500)
    >>> bool(solution.objective < 1.01 * fedkin.solve(problem).objective)
    True
    """
    check_whole("rounds", rounds, least=1)
    check_choice("average", average, AVERAGES)
    if not 0 <= decay <= 1:
        raise ParameterError(f"decay must lie between 0 and 1, got {decay!r}")
    rows = site_rows(problem, batch_size)
    if step == "auto":
        length = 1.0 / float(local_curvature(problem.terms, rows).of_batches(rows).max())
    else:
        check_positive("step", step)
        length = float(step)
    gradients = Gradients(rows, seed)
    objective, trace = problem.fused, Trace(problem, reference)
    theta, _ = starting_point(problem, None)
    mean = theta

    def advance(t: int) -> None:
        nonlocal theta, mean
        moved = theta - length / t**decay * (gradients(t, theta) + penalty_subgradient(objective, theta)[1])
        mean = mean + averaging_weight(average, t) * ((theta if average == "paper" else moved) - mean)
        theta = moved

    def record(t: int) -> dict[str, float]:
        line = trace.record(t, mean, None, **_traffic(problem, t, float(gradients.looked.sum())))
        if not np.isfinite(line["objective"]):
            raise SolverError(f"subgradient descent ran away within {t} rounds; give a smaller step")
        return line

    status, done = _iterate(rounds, advance, record, lambda: mean, callbacks, record_every)
    alpha, _ = penalty_subgradient(problem.fused, mean)
    balance = np.asarray(problem.graph.incidence().T @ alpha)
    return _finish(problem, mean, alpha, balance, status, done, trace)


def penalty_subgradient(objective: FusedObjective, theta: Array) -> tuple[Array, Array]:
    """Subgradients of the edge penalty ``(E, p)``, and of all penalties with respect to theta ``(V, p)``."""
    differences = objective.differences(theta)
    # far outside, the projection onto the dual ball is a point where the norm is attained; at 0 it is 0
    edges = objective.penalty.project(_FAR * differences, objective.edge_radius)
    total = np.asarray(objective.graph.incidence().T @ edges)
    if objective.sparsity is not None:
        total = total + objective.sparsity * np.sign(theta)
    return edges, total


def _traffic(problem: Problem, rounds: int, rows: float) -> dict[str, float]:
    vectors = 2.0 * problem.graph.n_edges * rounds
    return {"vectors": vectors, "bytes": vectors * problem.n_params * 8.0, "rows": rows}
