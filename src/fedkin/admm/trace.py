"""What the round-by-round solvers share: a trace, Ctrl-C, and the certificate of what they return."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from signal import SIGINT, default_int_handler, getsignal, signal
from types import FrameType

import numpy as np
from numpy.typing import ArrayLike

from fedkin._base import Array
from fedkin.core import SCALE_FLOOR, FusedObjective, Problem, Solution
from fedkin.errors import ParameterError
from fedkin.solvers import MinimizerBall

#: Rounds are recorded one by one in the beginning, and then each time their number has grown by this factor.
RECORD_GROWTH = 1.2


@dataclass(frozen=True, eq=False)
class Progress:
    """What a callback sees.

    Attributes
    ----------
    n_iter : int
        Rounds done.
    theta : array (V, p)
        The parameters that would be returned now.
    record : mapping
        The newest line of the trace.
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
    """The lines of a trace; ``distance`` is ``||theta - reference||_F^2 / |V|``, as in the paper's theorem."""

    def __init__(self, problem: Problem, reference: Solution | ArrayLike | None) -> None:
        self.problem, self.reference = problem, None
        self.lines: list[dict[str, float]] = []
        if reference is not None:
            theta = reference.theta if isinstance(reference, Solution) else np.asarray(reference, dtype=np.float64)
            expected = (problem.n_sites, problem.n_params)
            if theta.shape != expected:
                raise ParameterError(f"reference has shape {theta.shape}, expected {expected}: a line for each site")
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

    Each of ``balances (V, p)`` is ``D' alpha`` for duals inside their balls; an average of such sums is one, too. The
    second number is the radius of the ball that the gap holds for where that is unproven.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        value, zero = objective.value(theta), objective.value(np.zeros_like(theta))
        radius, proven = MinimizerBall(objective).radius(theta, value)
        gradients = objective.terms.gradients(theta)
        best, needed = np.inf, False
        for balance in balances:
            gap, conditional = _gap(objective, theta, gradients, balance, radius)
            if gap < best:
                best, needed = gap, conditional
    floor = SCALE_FLOOR * abs(zero) + np.finfo(float).tiny
    return max(best, 0.0) / max(abs(value), floor), radius if needed and not proven else None


def _gap(
    objective: FusedObjective, theta: Array, gradients: Array, balance: Array, radius: float
) -> tuple[float, bool]:
    # sum_e <alpha_e, theta_i - theta_j> = <D' alpha, theta>: the edges need not be looked at one by one
    total = objective.penalty_value(theta) - float((balance * theta).sum())
    if objective.sparsity is not None:
        zeta = np.clip(-(gradients + balance), -objective.sparsity, objective.sparsity)
        balance = balance + zeta
        total -= float((zeta * theta).sum())
    sites = objective.terms.young_gaps(theta, balance)
    unbounded = ~np.isfinite(sites)
    if unbounded.any() and np.isfinite(radius):
        sites[unbounded] = objective.terms.young_gaps(theta, balance, radius)[unbounded]
    return float(sites.sum()) + total, bool(unbounded.any())


class Interrupt:
    """Whether Ctrl-C was pressed."""

    pressed = False


@contextmanager
def deferred_interrupt() -> Iterator[Interrupt]:
    """Note Ctrl-C instead of raising it, so that a round is never left half done; the second one raises at once."""
    interrupt = Interrupt()
    # only the main thread receives signals; a handler of somebody else's is left alone
    if threading.current_thread() is not threading.main_thread() or getsignal(SIGINT) is not default_int_handler:
        yield interrupt
        return

    def note(number: int, frame: FrameType | None) -> None:
        if interrupt.pressed:
            default_int_handler(number, frame)
        interrupt.pressed = True

    signal(SIGINT, note)
    try:
        yield interrupt
    finally:
        signal(SIGINT, default_int_handler)


def run_callbacks(callbacks: Iterable[Callback], progress: Progress) -> bool:
    """Call all of them, and return whether one wants the run to end."""
    return any([bool(callback(progress)) for callback in callbacks])
