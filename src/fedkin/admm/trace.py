"""Record traces, handle Ctrl-C, certify gaps, and run subgradient descent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from signal import SIGINT, default_int_handler, getsignal, signal
from types import FrameType
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from fedkin._base import Array, check_choice, check_positive, check_whole
from fedkin.admm.gradients import Gradients
from fedkin.admm.rounds import averaging_weight
from fedkin.admm.run_plan import AVERAGES, Average, BatchSize, local_curvature, site_rows
from fedkin.core import FusedObjective, Problem, Solution, Status, gap_scale
from fedkin.errors import ParameterError, SolverError
from fedkin.solvers import MinimizerBall

#: Every round is recorded at first, then one each time the number of rounds has grown by this factor.
RECORD_GROWTH = 1.2
#: Differences are scaled by this before projection onto the dual ball, so that they end on its boundary.
_FAR = 1e100


@dataclass(frozen=True, eq=False)
class Progress:
    """Progress of a run, passed to callbacks.

    Attributes
    ----------
    n_iter : int
        Number of completed rounds.
    theta : array (V, p)
        Parameters that would be returned now.
    record : mapping
        Newest line of the trace.
    """

    n_iter: int
    theta: Array
    record: Mapping[str, float]


Callback = Callable[[Progress], object]


def next_record(done: int, every: int | None) -> int:
    """Return the round to record next."""
    if every is not None:
        return (done // every + 1) * every
    return max(done + 1, int(np.ceil(done * RECORD_GROWTH)))


class Trace:
    """Trace of a run; ``distance`` is ``||theta - reference||_F^2 / |V|``, as in the paper's theorem."""

    def __init__(self, problem: Problem, reference: Solution | ArrayLike | None) -> None:
        self.problem, self.reference = problem, None
        self.lines: list[dict[str, float]] = []
        if reference is not None:
            theta = reference.theta if isinstance(reference, Solution) else np.asarray(reference, dtype=np.float64)
            expected = (problem.n_sites, problem.n_params)
            if theta.shape != expected:
                raise ParameterError(f"reference has shape {theta.shape}, expected {expected}: a row for each site")
            self.reference = theta

    def record(self, n_iter: int, theta: Array, balance: Array | None, **columns: float) -> dict[str, float]:
        """Add a line; ``balance (V, p)`` are the summed duals for the dual residual."""
        objective, V = self.problem.fused, self.problem.n_sites
        line = {"n_iter": float(n_iter), "objective": objective.value(theta) / V}
        if balance is not None:
            residual = objective.terms.gradients(theta) + balance
            if objective.sparsity is not None:
                residual = residual + np.clip(-residual, -objective.sparsity, objective.sparsity)
            line["dual_residual"] = root_mean_square(residual)
        if self.reference is not None:
            line["distance"] = float(((theta - self.reference) ** 2).sum() / V)
        line.update(columns)
        self.lines.append(line)
        return line

    def columns(self) -> dict[str, Array]:
        """Return the trace as arrays."""
        names = self.lines[-1] if self.lines else ()
        return {name: np.array([line.get(name, np.nan) for line in self.lines]) for name in names}


def root_mean_square(rows: Array) -> float:
    """Return the root of the mean over rows of their squared length; 0 without rows."""
    return float(np.sqrt((rows**2).sum() / max(rows.shape[0], 1)))


def certify(objective: FusedObjective, theta: Array, balances: Iterable[Array]) -> tuple[float, float | None]:
    """Return the best relative duality gap of ``theta (V, p)`` that one of the given duals proves.

    Each of ``balances (V, p)`` is ``D' alpha`` for feasible duals; so is an average of them. The second number is the
    radius of the ball for which the gap holds, None if it holds without one.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        value, zero = objective.value(theta), objective.value(np.zeros_like(theta))
        radius, proven = MinimizerBall(objective).radius(theta, value)
        gradients = objective.terms.gradients(theta)
        best, needed = np.inf, False
        for balance in balances:
            gap, conditional = objective.gap_of_sums(theta, gradients, balance, radius)
            if gap < best:
                best, needed = gap, conditional
    return max(best, 0.0) / gap_scale(value, zero), radius if needed and not proven else None


@contextmanager
def deferred_interrupt() -> Iterator[threading.Event]:
    """Record Ctrl-C instead of raising it, so that rounds are always completed; a second Ctrl-C raises at once."""
    interrupt = threading.Event()
    # only the main thread receives signals; foreign handlers are kept
    if threading.current_thread() is not threading.main_thread() or getsignal(SIGINT) is not default_int_handler:
        yield interrupt
        return

    def note(number: int, frame: FrameType | None) -> None:
        if interrupt.is_set():
            default_int_handler(number, frame)
        interrupt.set()

    signal(SIGINT, note)
    try:
        yield interrupt
    finally:
        signal(SIGINT, default_int_handler)


def run_callbacks(callbacks: Iterable[Callback], progress: Progress) -> bool:
    """Call all callbacks, and return whether one of them ends the run."""
    return any([bool(callback(progress)) for callback in callbacks])


# --- a baseline ----------------------------------------------------------------------------------------------


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
        Number of steps. In each, a site sends its theta to its neighbours, as in Fed-ADMM.
    batch_size : int, sequence of V ints or None
        Rows that a site draws in each round, the same ones as in `fedkin.fed_admm` with this seed; None for all
        rows (GD).
    step : float or "auto"
        The c of ``eta(t) = c / t^decay``; by default 1 / (largest curvature of a batch). Tune c over a grid for a fair
        baseline.
    decay : float
        Exponent between 0 and 1; 1/2 is the classical choice for nonsmooth functions.
    seed : int
        Seed of the batches.
    average, reference, callbacks, record_every
        As in `fedkin.fed_admm`.

    Returns
    -------
    Solution
        With a trace of ``n_iter``, ``objective``, ``distance``, ``vectors``, ``bytes`` and ``rows``. ``alpha`` holds
        the subgradients of the penalty at theta, which certify the gap.

    Raises
    ------
    SolverError
        When the iteration diverges.

    Examples
    --------
    >>> import fedkin
    >>> from fedkin.datasets import paper_design
    >>> from fedkin.admm.trace import subgradient_descent
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
            if t not in (planned, rounds) and not interrupt.is_set():
                continue
            planned, vectors = next_record(t, record_every), 2.0 * problem.graph.n_edges * t
            columns = {"vectors": vectors, "bytes": vectors * problem.n_params * 8.0, "rows": gradients.looked.sum()}
            line = trace.record(t, mean, None, **columns)
            if not np.isfinite(line["objective"]):
                raise SolverError(f"subgradient descent diverged within {t} rounds; give a smaller step")
            if interrupt.is_set() or run_callbacks(callbacks, Progress(t, mean, line)):
                status = "interrupted"
                break
    alpha, _ = penalty_subgradient(objective, mean)
    gap, radius = certify(objective, mean, [problem.graph.balance(alpha)])
    message = f"{'interrupted after' if status == 'interrupted' else 'did'} {t} rounds: relative gap {gap:.1e}"
    return Solution(mean, problem.objective(mean), gap, status, t, trace.columns(), alpha, message, radius)


def penalty_subgradient(objective: FusedObjective, theta: Array) -> tuple[Array, Array]:
    """Return subgradients of the edge penalty ``(E, p)``, and of all penalties with respect to theta ``(V, p)``."""
    # far outside, the projection onto the dual ball is a point where the norm is attained; at 0 it is 0
    edges = objective.penalty.project(_FAR * objective.differences(theta), objective.edge_radius)
    total = objective.graph.balance(edges)
    if objective.sparsity is not None:
        total = total + objective.sparsity * np.sign(theta)
    return edges, total
