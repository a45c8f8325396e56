"""Baselines: subgradient descent on the whole objective, with all rows (GD) or with batches (SGD)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from fedkin._base import Array, check_choice, check_positive, check_whole
from fedkin.admm.curvature import local_curvature
from fedkin.admm.gradients import Gradients
from fedkin.admm.plan import BatchSize, device_rows, starting_point
from fedkin.admm.shard import AVERAGES, Average, averaging_weight
from fedkin.admm.trace import (
    Callback,
    Progress,
    Trace,
    certify,
    deferred_interrupt,
    next_record,
    run_callbacks,
)
from fedkin.errors import ParameterError, SolverError
from fedkin.objective import FusedObjective, Problem, Solution, Status

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
    warm_start: Solution | None = None,
    callbacks: Sequence[Callback] = (),
    record_every: int | None = None,
) -> Solution:
    """Subgradient descent on the objective: GD with all rows, SGD with batches. A baseline for `fedkin.fed_admm`.

    Parameters
    ----------
    problem : Problem
        What is solved.
    rounds : int
        Steps to take. In each, a device sends its theta to its neighbours, as in Fed-ADMM.
    batch_size : int, sequence of V ints or None
        Rows that a device draws in each round, the same ones as in `fedkin.fed_admm` with this seed; None for all
        rows (GD).
    step : float or "auto"
        The c of ``eta(t) = c / t^decay``; by default 1 / (largest curvature of a batch). Baselines deserve a c of
        their own: try a grid.
    decay : float
        Between 0 and 1; 1/2 is the classical choice for functions with kinks.
    average : "last", "paper" or "tail"
        As in `fedkin.fed_admm`.
    seed : int
        Of the batches.
    reference : Solution or array (V, p), optional
        For the column ``distance`` of the trace.
    warm_start : Solution, optional
        Where theta starts; at 0 by default.
    callbacks : sequence of callables
        Called with a `Progress` whenever a line is recorded; a true result ends the run.
    record_every : int, optional
        Rounds between lines of the trace; by default they grow by a fifth.

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
    >>> design = paper_design(n_devices=10, n_samples=30, n_features=3, n_clusters=2, seed=0)
    >>> problem = fedkin.Problem(design.federation, design.graph, lam=0.001)
    >>> solution = subgradient_descent(problem, rounds=500)
    >>> bool(solution.objective < 1.01 * fedkin.solve(problem).objective)
    True
    """
    check_whole("rounds", rounds, least=1)
    check_choice("average", average, AVERAGES)
    if not 0 <= decay <= 1:
        raise ParameterError(f"decay must lie between 0 and 1, got {decay!r}")
    rows = device_rows(problem, batch_size, set())
    if step == "auto":
        length = 1.0 / float(local_curvature(problem.terms, rows).of_batches(rows).max())
    else:
        check_positive("step", step)
        length = float(step)
    gradients = Gradients(rows, seed)
    objective, trace = problem.fused, Trace(problem, reference)
    theta, _ = starting_point(problem, warm_start)
    mean, status, done = theta, "iteration_limit", 0
    planned = next_record(0, record_every)
    with deferred_interrupt() as interrupt, np.errstate(over="ignore", invalid="ignore"):
        for t in range(1, rounds + 1):
            direction = gradients(t, theta) + penalty_subgradient(objective, theta)[1]
            moved = theta - length / t**decay * direction
            mean = mean + averaging_weight(average, t) * ((theta if average == "paper" else moved) - mean)
            theta, done = moved, t
            if t in (planned, rounds) or interrupt.pressed:
                planned = next_record(t, record_every)
                line = trace.record(t, mean, None, **_traffic(problem, t, float(gradients.looked.sum())))
                _raise_if_lost(line["objective"], t)
                if interrupt.pressed or run_callbacks(callbacks, Progress(t, mean, line)):
                    status = "interrupted"
                    break
    return _finish(problem, mean, status, done, trace)  # type: ignore[arg-type]


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


def _raise_if_lost(value: float, t: int) -> None:
    if not np.isfinite(value):
        raise SolverError(f"subgradient descent ran away within {t} rounds; give a smaller step")


def _finish(problem: Problem, theta: Array, status: Status, done: int, trace: Trace) -> Solution:
    objective = problem.fused
    alpha, _ = penalty_subgradient(objective, theta)
    certificate = certify(objective, theta, [np.asarray(objective.graph.incidence().T @ alpha)])
    words = "interrupted after" if status == "interrupted" else "did"
    message = f"{words} {done} rounds: relative gap {certificate.gap:.1e}"
    value = problem.objective(theta)
    return Solution(theta, value, certificate.gap, status, done, trace.columns(), alpha, message, certificate.radius)
