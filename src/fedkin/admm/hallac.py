"""Baseline: network-lasso ADMM (Hallac, Leskovec and Boyd 2015); every device minimises exactly in every round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy import sparse

from fedkin._base import Array, check_positive, check_whole
from fedkin.admm.plan import starting_point
from fedkin.admm.shard import edge_update
from fedkin.admm.trace import (
    Callback,
    Progress,
    Trace,
    certify,
    deferred_interrupt,
    next_record,
    root_mean_square,
    run_callbacks,
)
from fedkin.errors import ParameterError, SolverError
from fedkin.objective import DeviceTerms, Problem, QuadraticTerms, Solution, Status

Resolve = Callable[[Array, Array], Array]


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
    """Network-lasso ADMM with all rows: Algorithm 1 with the node step replaced by an exact minimisation.

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
    reference : Solution or array (V, p), optional
        For the column ``distance`` of the trace.
    warm_start : Solution, optional
        Where theta and the duals start; at 0 by default.
    callbacks : sequence of callables
        Called with a `Progress` whenever a line is recorded; a true result ends the run.
    record_every : int, optional
        Rounds between lines of the trace; by default they grow by a fifth.

    Returns
    -------
    Solution
        With a trace of ``n_iter``, ``objective``, ``dual_residual``, ``primal_residual``, ``distance``, ``vectors``,
        ``bytes``, ``rows`` and ``gap`` (with ``tol``).

    Examples
    --------
    >>> import fedkin
    >>> from fedkin.admm.hallac import network_lasso_admm
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
    theta, alpha = starting_point(problem, warm_start)
    alpha = np.zeros((graph.n_edges, problem.n_params)) if alpha is None else alpha
    if rho == "auto":
        curvature = np.einsum("vii->v", objective.terms.hessians(theta)).mean() / problem.n_params
        strength = 4.0 * float(curvature) / max(float(degree.mean()), 1e-12)
    else:
        check_positive("rho", rho)
        strength = float(rho)
    minimise = _node_minimiser(objective.terms, np.maximum(strength * degree, 1e-12 * strength)[:, None])
    sums = sparse.csr_array(graph.incidence().T)
    balance = before = np.asarray(sums @ alpha)
    trace, status, done = Trace(problem, reference), "iteration_limit", 0
    planned, n_rows = next_record(0, record_every), float(problem.federation.n_samples.sum())
    with deferred_interrupt() as interrupt:
        for t in range(1, rounds + 1):
            theta = minimise(theta, 2.0 * balance - before)
            previous = alpha
            alpha = edge_update(alpha, objective.differences(theta), strength, objective.edge_radius, objective.penalty)
            before, balance, done = balance, np.asarray(sums @ alpha), t
            if t in (planned, rounds) or interrupt.pressed:
                planned = next_record(t, record_every)
                vectors = 2.0 * graph.n_edges * t
                columns = {
                    "primal_residual": root_mean_square(alpha - previous) / strength,
                    "vectors": vectors,
                    "bytes": vectors * problem.n_params * 8.0,
                    "rows": n_rows * t,
                }
                if tol is not None:
                    columns["gap"] = certify(objective, theta, [balance]).gap
                line = trace.record(t, theta, balance, **columns)
                if tol is not None and line["gap"] <= tol:
                    status = "converged"
                    break
                if interrupt.pressed or run_callbacks(callbacks, Progress(t, theta, line)):
                    status = "interrupted"
                    break
    return _finish(problem, theta, alpha, balance, status, done, trace)  # type: ignore[arg-type]


def _node_minimiser(terms: DeviceTerms, weight: Array) -> Resolve:
    """``argmin M_u(x) + <pull_u, x> + weight_u ||x - theta_u||^2 / 2``, as a function of theta and pull."""
    if isinstance(terms, QuadraticTerms):
        resolve = terms.resolvent(weight * np.ones(terms.n_params))
        return lambda theta, pull: resolve(terms.b + weight * theta - pull)
    return lambda theta, pull: _newton(terms, weight, theta, pull)


def _newton(terms: DeviceTerms, weight: Array, theta: Array, pull: Array) -> Array:
    """Damped Newton steps, all devices at once, until the gradient is at rounding level."""
    eye = np.eye(terms.n_params)

    def value(x: Array) -> Array:
        with np.errstate(over="ignore", invalid="ignore"):
            return np.asarray(terms.values(x) + (pull * x).sum(axis=1) + 0.5 * (weight * (x - theta) ** 2).sum(axis=1))

    x, now = theta, value(theta)
    for _ in range(50):
        gradient = terms.gradients(x) + pull + weight * (x - theta)
        scale = np.abs(pull).max() + np.abs(weight * x).max() + 1.0
        if np.abs(gradient).max() <= 1e-13 * scale:
            return x
        step = np.linalg.solve(terms.hessians(x) + weight[:, :, None] * eye, gradient[:, :, None])[:, :, 0]
        slope = (gradient * step).sum(axis=1)
        length = np.ones(terms.n_devices)
        for _ in range(40):
            tried = x - length[:, None] * step
            new = value(tried)
            # near the minimum the decrease drowns in rounding: accept what does not hurt
            poor = ~(new <= now - 1e-4 * length * slope + 1e-14 * np.abs(now))
            if not poor.any():
                break
            length = np.where(poor, 0.5 * length, length)
        else:
            raise SolverError("a device's own minimisation did not get anywhere; add ridge=1e-3 or so")
        x, now = tried, new
    return x


def _finish(
    problem: Problem, theta: Array, alpha: Array, balance: Array, status: Status, done: int, trace: Trace
) -> Solution:
    certificate = certify(problem.fused, theta, [balance])
    words = {"converged": "converged after", "interrupted": "interrupted after", "iteration_limit": "did"}[status]
    message = f"{words} {done} rounds: relative gap {certificate.gap:.1e}"
    value = problem.objective(theta)
    return Solution(theta, value, certificate.gap, status, done, trace.columns(), alpha, message, certificate.radius)
