"""A baseline for Fed-ADMM: subgradient descent on the objective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from fedkin._base import Array, check_choice, check_positive, check_whole
from fedkin.admm.gradients import Gradients
from fedkin.admm.plan import AVERAGES, Average, BatchSize, local_curvature, site_rows
from fedkin.admm.shard import averaging_weight
from fedkin.admm.trace import Callback, Progress, Trace, certify, deferred_interrupt, next_record, run_callbacks
from fedkin.core import FusedObjective, Problem, Solution, Status
from fedkin.errors import ParameterError, SolverError

#: Differences are scaled by this before they are projected onto the dual ball, where they then lie on its border.
_FAR = 1e100


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
        step = 1.0 / float(local_curvature(problem.terms, rows).of_batches(rows).max())
    check_positive("step", step)
    gradients, objective, trace = Gradients(rows, seed), problem.fused, Trace(problem, reference)
    theta = mean = np.zeros((problem.n_sites, problem.n_params))
    status: Status = "iteration_limit"
    planned = next_record(0, record_every)
    with deferred_interrupt() as interrupt, np.errstate(over="ignore", invalid="ignore"):
        for t in range(1, rounds + 1):
            moved = theta - step / t**decay * (gradients(t, theta) + penalty_subgradient(objective, theta)[1])
            mean = mean + averaging_weight(average, t) * ((theta if average == "paper" else moved) - mean)
            theta = moved
            if t not in (planned, rounds) and not interrupt.pressed:
                continue
            planned, vectors = next_record(t, record_every), 2.0 * problem.graph.n_edges * t
            columns = {"vectors": vectors, "bytes": vectors * problem.n_params * 8.0, "rows": gradients.looked.sum()}
            line = trace.record(t, mean, None, **columns)
            if not np.isfinite(line["objective"]):
                raise SolverError(f"subgradient descent ran away within {t} rounds; give a smaller step")
            if interrupt.pressed or run_callbacks(callbacks, Progress(t, mean, line)):
                status = "interrupted"
                break
    alpha, _ = penalty_subgradient(objective, mean)
    gap, radius = certify(objective, mean, [np.asarray(problem.graph.incidence().T @ alpha)])
    message = f"{'interrupted after' if status == 'interrupted' else 'did'} {t} rounds: relative gap {gap:.1e}"
    return Solution(mean, problem.objective(mean), gap, status, t, trace.columns(), alpha, message, radius)


def penalty_subgradient(objective: FusedObjective, theta: Array) -> tuple[Array, Array]:
    """Return subgradients of the edge penalty ``(E, p)``, and of all penalties with respect to theta ``(V, p)``."""
    # far outside, the projection onto the dual ball is a point where the norm is attained; at 0 it is 0
    edges = objective.penalty.project(_FAR * objective.differences(theta), objective.edge_radius)
    total = np.asarray(objective.graph.incidence().T @ edges)
    if objective.sparsity is not None:
        total = total + objective.sparsity * np.sign(theta)
    return edges, total
