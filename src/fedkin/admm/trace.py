"""What rounds in one process share: a trace, Ctrl-C, a certificate; rounds in shards; and subgradient descent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from signal import SIGINT, default_int_handler, getsignal, signal
from types import FrameType
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from fedkin._base import Array, Index, Mask, check_choice, check_positive, check_whole
from fedkin.admm.gradients import Gradients, SiteRows
from fedkin.admm.plan import AVERAGES, Average, BatchSize, RunPlan, local_curvature, site_rows
from fedkin.admm.rounds import DirectLink, Shard, ShardState, averaging_weight, run_rounds
from fedkin.cluster import Engine, Peers, Shards, partition
from fedkin.core import SCALE_FLOOR, FusedObjective, Problem, Solution, Status
from fedkin.errors import ParameterError, SolverError
from fedkin.solvers import MinimizerBall

#: Rounds are recorded one by one in the beginning, and then each time their number has grown by this factor.
RECORD_GROWTH = 1.2
#: Differences are scaled by this before they are projected onto the dual ball, where they then lie on its border.
_FAR = 1e100


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
    if objective.radius is not None:
        return float(objective.terms.gaps_in_ball(theta, balance, objective.radius).sum()) + total, False
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


# --- rounds in shards on an engine: the same loop and the same bits as in one process -------------------------------


class PeerLink(DirectLink):
    """The link of a shard on an engine: thetas of sites at edges to other shards travel between these.

    ``give`` and ``take`` are the positions of the sites that each neighbour needs, and sends, increasing.
    """

    def __init__(self, peers: Peers, give: Mapping[int, Index], take: Mapping[int, Index], hosted: Index) -> None:
        super().__init__(0)
        self._peers, self._take = peers, {number: sites.tolist() for number, sites in take.items()}
        self._give = {number: np.searchsorted(hosted, sites) for number, sites in give.items()}

    def go_on(self, rounds: int, done: int, available: Mask | None, probability: Array | None) -> None:
        """Begin the rounds after ``done``."""
        DirectLink.__init__(self, rounds, done, available, probability)

    def begin(self, shard: Shard) -> int | None:
        return self.done + 1 if self.done < self.rounds else None

    def exchange(self, t: int, shard: Shard) -> Mapping[int, Array]:
        found = self._peers.exchange({number: shard.theta[rows] for number, rows in self._give.items()})
        return {u: theta for number in found for u, theta in zip(self._take[number], found[number], strict=True)}


class RoundShard:
    """One shard: its sites, its link, and the loop."""

    def __init__(
        self, peers: Peers, plan: RunPlan, state: ShardState, give: Mapping[int, Index], take: Mapping[int, Index]
    ) -> None:
        self._shard, self._link = Shard(plan), PeerLink(peers, give, take, plan.sites)
        self._shard.restore(state)

    def run(self, first: int, count: int, available: Mask | None, probability: Array | None) -> None:
        """Do ``count`` rounds from ``first`` on."""
        self._link.go_on(first + count - 1, first - 1, available, probability)
        run_rounds(self._shard, self._link)

    def state(self) -> dict[str, Any]:
        """Return everything that changes."""
        return vars(self._shard.state())

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to a `state`."""
        self._shard.restore(ShardState(**state))


class ShardedRounds:
    """Rounds of all sites of a shard, in shards on an engine; its state is brought up to date after every call."""

    def __init__(self, shard: Shard, engine: Engine) -> None:
        self.shard, self.engine, plan = shard, engine, shard.plan
        self._labels = partition(plan.n_sites, plan.edges, min(engine.workers, plan.n_sites))
        self._numbers = np.unique(self._labels)
        self._hosted = [np.flatnonzero(self._labels == k) for k in self._numbers]
        self._labels = np.searchsorted(self._numbers, self._labels)
        self._touching = [np.flatnonzero((self._labels[plan.edges] == k).any(axis=1)) for k in range(len(self._hosted))]
        self._shards: Shards | None = None

    def __call__(self, first: int, count: int, available: Mask | None = None, probability: Array | None = None) -> None:
        """Do ``count`` rounds from ``first`` on; presence and probabilities ``(count, V)`` when sites come and go."""
        if self._shards is None:  # now the state is that to begin with, also after a resume
            self._shards = self.engine.shards(self._make, len(self._hosted))
        for lo in range(0, count, self.engine.save_every):
            some = slice(lo, min(lo + self.engine.save_every, count))
            each = [
                tuple(None if given is None else given[some, hosted] for given in (available, probability))
                for hosted in self._hosted
            ]
            self._shards.call("run", first + some.start, some.stop - some.start, each=each)
            self._shards.save()
        self._collect(self._shards.call("state", changes=False))
        self._shards.renewed()

    def close(self) -> None:
        """End the shards."""
        if self._shards is not None:
            self._shards.close()

    def _make(self, k: int) -> tuple[type[RoundShard], Sequence[object]]:
        plan, hosted, edges, labels = self.shard.plan, self._hosted[k], self._touching[k], self._labels
        ends = plan.edges[edges]
        crossing = ends[labels[ends[:, 0]] != labels[ends[:, 1]]]
        here = labels[crossing] == k
        mine, theirs = crossing[here], crossing[~here]
        give = {int(r): np.unique(mine[labels[theirs] == r]) for r in np.unique(labels[theirs])}
        take = {r: np.unique(theirs[labels[theirs] == r]) for r in give}
        part = replace(
            plan,
            sites=hosted,
            theta=plan.theta[hosted],
            edges=ends,
            edge_radius=plan.edge_radius[edges],
            steps=plan.steps.take(hosted),
            rows=None if plan.rows is None else _compact(plan.rows, hosted),
            sparsity=None if plan.sparsity is None else plan.sparsity[hosted],
            alpha=None if plan.alpha is None else plan.alpha[edges],
            availability=None,
        )
        state = vars(self.shard.state())
        pieces = {name: array[self._places(name, k)] if len(array) else array for name, array in state.items()}
        return RoundShard, (part, ShardState(**pieces), give, take)

    def _places(self, name: str, k: int) -> Index:
        """Return where the lines of a part of the state of shard ``k`` are among all."""
        if name == "alpha":
            return self._touching[k]
        if name != "table":
            return self._hosted[k]
        assert self.shard.gradients is not None
        counts = self.shard.gradients.rows.counts
        return _lines(np.cumsum(counts) - counts, counts, self._hosted[k])

    def _collect(self, states: Sequence[Mapping[str, Any]]) -> None:
        whole = vars(self.shard.state())
        for k, state in enumerate(states):
            for name, array in whole.items():
                if len(array):
                    array[self._places(name, k)] = state[name]
        self.shard.restore(ShardState(**whole))


def _lines(starts: Index, counts: Index, sites: Index) -> Index:
    """Return the numbers of the rows of some sites, one site after the other."""
    n = counts[sites]
    return np.repeat(starts[sites] - (np.cumsum(n) - n), n) + np.arange(n.sum())


def _compact(rows: SiteRows, sites: Index) -> SiteRows:
    """Return the rows of some sites, without those of others."""
    counts = rows.counts[sites]
    data = rows.data.take(_lines(rows.starts, rows.counts, sites))
    return replace(rows.take(sites), data=data, starts=np.cumsum(counts) - counts)
