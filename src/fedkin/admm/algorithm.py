"""Run Fed-ADMM (Algorithms 1 and 2 of the paper): decentralised stochastic ADMM with intermittent sites."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from threading import Event
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedkin._base import TINY, Array, Mask, check_choice, check_positive, check_whole
from fedkin.admm import trace as tracing
from fedkin.admm.availability import Availability
from fedkin.admm.checkpoint import Store, digest_of
from fedkin.admm.gradients import GradientKind, StreamWatch, sample_streams
from fedkin.admm.links import DirectLink, ShardedRounds
from fedkin.admm.round_kernels import CompiledRounds, unsupported
from fedkin.admm.rounds import Shard, edge_update, run_rounds
from fedkin.admm.run_plan import Average, BatchSize, RunPlan, StepRule, plan_run
from fedkin.admm.trace import Callback, Progress, Trace, certify
from fedkin.cluster import Engine, On, engine_of
from fedkin.core import Problem, Solution, Status
from fedkin.errors import ChangeWarning, ConvergenceWarning, ModelFileError, ParameterError, SolverError, argument
from fedkin.solvers import Backend, fused_parameters

#: A diverging run restarts with steps this many times shorter, at most this many times.
RESTART_FACTOR, MAX_RESTARTS = 4.0, 6
#: An objective above RUNAWAY times the initial value ends a run at once; WORSE is checked after the last round.
RUNAWAY, WORSE = 1e6, 0.1
_Rounds = Callable[[int, int, Mask | None, Array | None], None]
#: Multiplications between two checks for Ctrl-C, and above which compilation is worthwhile.
CHUNK_WORK, COMPILE_WORK = 3e8, 2e9


def fed_admm(
    problem: Problem,
    rounds: int = 1000,
    batch_size: BatchSize = None,
    *,
    availability: Availability | None = None,
    streams: Mapping[Any, Iterable[Any]] | None = None,
    tol: float | None = None,
    reference: Solution | ArrayLike | None = None,
    warm_start: Solution | None = None,
    rho: float | Literal["auto"] = "auto",
    step: float | Literal["auto", "literal"] = "auto",
    kappa: float | None = None,
    average: Average | None = None,
    gradient: GradientKind = "plain",
    seed: int = 0,
    callbacks: Sequence[Callback] = (),
    record_every: int | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    resume: bool = False,
    fuse: bool = False,
    backend: Backend = "auto",
    on: On = "local",
) -> Solution:
    """Minimise the objective of ``problem`` by Fed-ADMM; sites step on a batch, then exchange theta with neighbours.

    Parameters
    ----------
    problem : Problem
        Problem to solve.
    rounds : int
        Total number of rounds, including those before resuming.
    batch_size : int, sequence of V ints or None
        Rows that a site draws in each round, without replacement; None for all its rows.
    availability : Availability, optional
        Availability of intermittent sites (Algorithm 2).
    streams : mapping {site: iterable of samples}, optional
        New samples ``(x, y)`` for these sites in every round; their stored rows are used for the curvature only.
        docs/fused.md describes the reported values.
    tol : float, optional
        Stop when the relative duality gap is at most this; it is computed for every line of the trace. With streams,
        stop when the improvement on unseen rows over the second half of the rounds, plus two standard errors, is
        below this share of the objective.
    reference : Solution or array (V, p), optional
        Reference for the column ``distance`` of the trace.
    warm_start : Solution, optional
        Initial theta and edge duals; 0 by default.
    rho : float or "auto"
        Penalty of the augmented Lagrangian. By default ``mean curvature / mean degree``, times 4 if noise does not
        force shrinking steps.
    step : "auto", float or "literal"
        "auto": proximal steps chosen by each site from its own curvature. A number kappa: proximal steps
        ``eta_i(t) = e / (1 + rho |N_i| e)`` with ``e(t) = kappa / t``. "literal": ``eta(t) = kappa / t`` as printed in
        the paper. Its parameters often grow by many orders of magnitude before converging, so such a run is stopped
        only on overflow. The paper prevents this with a ball, ``Problem(radius=...)``.
    kappa : float, optional
        Step constant for ``step="literal"``; by default from the curvature.
    average : "tail", "paper", "last" or None
        Returned parameters: an average with weights proportional to t^3, which discounts early rounds; the plain
        average of theta(0), ..., theta(T-1) from the theorem; or the last theta. By default "last" if nothing is random
        or ``gradient`` removes the variance, otherwise "tail".
    gradient : "plain", "saga" or "svrg"
        The paper's mini-batch gradient, or a variance-reduced one with linear convergence on strongly convex losses.
        SAGA stores a number per row; SVRG passes over all rows periodically.
    seed : int
        Seed of the batches and the availability.
    callbacks : sequence of callables
        Functions called with a `Progress` whenever a line is recorded; a true result ends the run.
    record_every : int, optional
        Rounds between lines of the trace; by default this interval grows geometrically by a fifth.
    checkpoint : path, optional
        SQLite file for the state, written every ``checkpoint_every`` rounds, at the end and at Ctrl-C.
    checkpoint_every : int, optional
        Rounds between checkpoints; by default one whenever a line is recorded.
    resume : bool
        Whether to continue from the checkpoint; the result is bitwise that of an uninterrupted run.
    fuse : bool
        Whether to set sites bitwise equal if the duals show their edges to be fused (for `Solution.clusters`), unless
        this increases the gap.
    backend : "auto", "numpy" or "numba"
        "numpy" is the reference, bitwise identical in every engine; "numba" is faster and agrees to 1e-10; "auto"
        compiles when that saves time.
    on : "local", "ray", "ray://host:port" or Engine
        Where the rounds run: in this process, or in shards on a Ray cluster, with results bitwise equal to "numpy" for
        any number of shards. Losing a machine costs at most ``save_every`` rounds of the engine, or those since the
        last line.

    Returns
    -------
    Solution
        ``trace`` has the columns ``n_iter``, ``objective``, ``dual_residual`` (of the returned parameters: root mean
        square over sites of gradient plus duals), ``primal_residual`` (root mean square over edges of theta - beta),
        ``distance`` (``||theta - reference||_F^2 / |V|``), ``vectors`` and ``bytes`` (cumulative communication),
        ``rows`` (cumulative rows used), ``available`` (share of sites in that round) and ``gap`` (with ``tol``). With
        streams, ``gap`` is NaN; ``new_objective``, ``new_error``, ``gain`` and ``gain_error`` are estimates on unseen
        rows, ``changes`` counts detected changes, and the solution's ``objective`` is the last ``new_objective``.

    Raises
    ------
    ParameterError
        When an argument is out of range.
    SolverError
        When the run diverges with the requested steps.

    Notes
    -----
    docs/fused.md derives the computed form of a round. The gap is certified by the edge duals: they and their
    averages stay inside their balls in every round.

    Examples
    --------
    >>> import fedkin
    >>> from fedkin.datasets import paper_design
    >>> design = paper_design(n_sites=10, n_samples=30, n_features=3, n_clusters=2, seed=0)
    >>> problem = fedkin.Problem(design.federation, design.graph, lam=0.01)
    >>> exact = fedkin.solve(problem, 1e-10)
    >>> solution = fedkin.fed_admm(problem, rounds=300, batch_size=5, gradient="saga", reference=exact)
    >>> bool(solution.trace["distance"][-1] < 1e-10)
    True
    """
    for name, value in (("record_every", record_every), ("checkpoint_every", checkpoint_every)):
        if value is not None:
            check_whole(name, value, least=1)
    if tol is not None:
        check_positive("tol", tol)
    if resume and checkpoint is None:
        raise ParameterError("resume needs checkpoint, the file to continue from")
    check_choice("backend", backend, ("auto", "numpy", "numba"))
    given = {"rho": rho, "step": step, "kappa": kappa, "average": average, "gradient": gradient, "seed": seed}
    more: dict[str, Any] = {**given, "availability": availability, "streaming": set(streams or {})}
    plan, engine = plan_run(problem, rounds, batch_size, warm_start=warm_start, **more), engine_of(on)
    if engine is not None:
        if streams or backend == "numba":
            wrong = argument("streams") if streams else argument("backend", "numba")
            raise ParameterError(
                f"rounds on a cluster do not support {wrong}: leave it out, or use {argument('on', 'local')}"
            )
        backend = "numpy"
    file = None
    if checkpoint is not None:
        sites = problem.federation.sites
        facts = () if availability is None else availability.bind(sites, plan.seed).facts
        streamed = sorted(sample_streams(problem.rows_for("Fed-ADMM"), streams))
        file = Store(checkpoint, digest_of([*_describe(problem, plan, tuple(given.values())), streamed, *facts]))
    told = Trace(problem, reference), tol, callbacks, record_every, checkpoint_every, engine, file
    with closing(_Run(problem, plan, streams, step, backend, *told, fresh=not resume)) as run:
        if resume:
            run.resume()
        return run.go(fuse)


class _DivergedError(Exception):
    """The steps are too long."""


@dataclass(eq=False)
class _Run:
    """State of one run, here or on an engine: its shard, progress, trace, checkpoint and restarts."""

    problem: Problem
    plan: RunPlan
    streams: Mapping[Any, Iterable[Any]] | None
    step: float | str
    backend: Backend
    trace: Trace
    tol: float | None
    callbacks: Sequence[Callback]
    record_every: int | None
    save_every: int | None
    engine: Engine | None
    file: Store | None
    fresh: bool
    caution: float = 1.0
    restarts: int = 0

    def __post_init__(self) -> None:
        self.listeners = _listeners(self.problem, self.plan.availability)
        with np.errstate(over="ignore"):
            self.start_value = self.problem.objective(self.plan.theta)
            # a warm start may fit perfectly, so also compare with theta = 0
            zero = self.problem.objective(np.zeros_like(self.plan.theta))
            self.scale = max(abs(self.start_value), abs(zero), TINY)
        self.begin()

    def begin(self) -> None:
        plan, steps = self.plan, self.plan.steps
        if self.caution > 1.0:
            plan = replace(plan, steps=StepRule(self.caution * steps.start, steps.growth, steps.damping))
        availability, sites = plan.availability, self.problem.federation.sites
        self.presence = None if availability is None else availability.bind(sites, plan.seed)
        self.sampled = sample_streams(self.problem.rows_for("Fed-ADMM"), self.streams)
        self.watch = StreamWatch(self.problem, self.sampled) if self.sampled else None
        self.shard = shard = Shard(plan, streams=self.sampled)
        assert plan.rows is not None
        work = float(plan.rows.batch.sum() + plan.edges.shape[0] + plan.n_sites) * plan.n_params
        self.chunk = int(max(1, min(4096, CHUNK_WORK / work)))
        compiled = self.backend == "numba" or (self.backend == "auto" and plan.rounds * work >= COMPILE_WORK)
        reason = unsupported(shard) if compiled else None
        if reason is not None and self.backend == "numba":
            raise ParameterError(f"backend='numba' cannot do this run: {reason}; use backend='numpy'")
        self.compiled = compiled and reason is None
        #: Runs many rounds at a time: numpy in this process, compiled, or shards on an engine.
        self.run: _Rounds | ShardedRounds = partial(_numpy_rounds, shard)
        if self.engine is not None:
            self.run = ShardedRounds(shard, self.engine)
        elif self.compiled:
            self.run = CompiledRounds(shard)
        self.done, self.vectors, self.available = 0, 0.0, 1.0

    def close(self) -> None:
        for one in (self.run, self.file):
            if isinstance(one, ShardedRounds | Store):
                one.close()

    def restart(self, reason: str) -> None:
        """Restart with shorter steps, or raise an error that explains why that cannot help."""
        self.close()
        if self.step != "auto":
            if self.step != "literal":
                given, better = argument("step", self.step), argument("step", "auto")
                raise SolverError(f"{reason} with {given}; use {better}, or a smaller step") from None
            raise SolverError(f"{reason} with the literal step kappa/t; {_literal_hint()}") from None
        if self.streams:
            raise SolverError(f"{reason}, and samples of a stream cannot be reread; give a small step") from None
        if self.restarts >= MAX_RESTARTS:
            raise SolverError(
                f"{reason}, even with {self.caution:.0f} times shorter steps: the objective may have no finite "
                f"minimiser (add {argument('ridge', 1e-3)} or so), or the features are badly scaled (standardise them)"
            ) from None
        self.restarts += 1
        self.caution *= RESTART_FACTOR
        self.trace.lines.clear()
        self.begin()

    def go(self, fuse: bool) -> Solution:
        while True:
            try:
                with tracing.deferred_interrupt() as interrupt, np.errstate(over="ignore", invalid="ignore"):
                    status = self._rounds(interrupt)
                    worse, theta = self._worse(), self.shard.average.copy()
                    if worse is not None and self.step == "literal":
                        # the printed algorithm is not judged: later rounds may converge
                        warnings.warn(f"{worse}; {_literal_hint()}", ConvergenceWarning, stacklevel=3)
                    elif worse is not None and status != "interrupted":
                        raise _DivergedError(worse)
                    elif worse is not None:
                        theta = self.plan.theta  # interrupted at a bad moment: the best so far is the start
                    return self._finish(status, theta, fuse)
            except _DivergedError as diverged:
                self.restart(str(diverged))

    def _rounds(self, interrupt: Event) -> Status:
        status: Status = "iteration_limit"
        lines, rounds = self.trace.lines, self.plan.rounds
        recorded = int(lines[-1]["n_iter"]) if lines else 0
        while self.done < rounds and status == "iteration_limit":
            planned = tracing.next_record(recorded, self.record_every)
            self._advance_to(min(planned, rounds), interrupt)
            if interrupt.is_set():
                status = "interrupted"
            elif self.done == planned:
                recorded, status = planned, self._look()
                if self.save_every is None:
                    self._save()
        self._save()
        if not lines or lines[-1]["n_iter"] != self.done:
            self._record()
        return status

    def _advance_to(self, goal: int, interrupt: Event) -> None:
        every = self.save_every
        while self.done < goal and not interrupt.is_set():
            count = min(goal - self.done, self.chunk)
            if every is not None:
                count = min(count, every - self.done % every)
            available = probability = None
            if self.presence is not None:
                available, probability = self.presence.rounds(self.done + 1, count)
                self.available = float(available[-1].mean())
                self.vectors += float((available @ self.listeners).sum())
            else:
                self.vectors += float(self.listeners.sum()) * count
            self.run(self.done + 1, count, available, probability)
            self.done += count
            if not (finite := np.isfinite(self.shard.theta).all(axis=1)).all():
                site = self.problem.federation.sites[int(finite.argmin())]
                raise _DivergedError(f"the parameters of site {site!r} became infinite within {self.done} rounds")
            if every is not None and self.done % every == 0:
                self._save()

    def _look(self) -> Status:
        line = self._record()
        guarded = self.step != "literal" and self.watch is None  # the stored rows of streams give no certificate
        if guarded and not line["objective"] < self.start_value + RUNAWAY * self.scale:
            raise _DivergedError(f"the objective diverged within {self.done} rounds")
        if self.tol is not None and (self.watch.is_enough(self.tol) if self.watch else line["gap"] <= self.tol):
            return "converged"
        try:
            stop = tracing.run_callbacks(self.callbacks, Progress(self.done, self.shard.average.copy(), line))
        except KeyboardInterrupt:
            stop = True
        return "interrupted" if stop else "iteration_limit"

    def _record(self) -> dict[str, float]:
        shard, plan, objective = self.shard, self.plan, self.problem.fused
        alpha, average, balance = shard.alpha, shard.average, shard.average_balance
        moved = edge_update(alpha, shard.differences(), plan.rho, plan.edge_radius, plan.penalty) - alpha
        assert shard.gradients is not None
        columns = {
            # an edge step moves alpha by rho times theta - beta
            "primal_residual": tracing.root_mean_square(moved) / plan.rho,
            "vectors": self.vectors,
            "bytes": self.vectors * self.problem.n_params * 8.0,
            "rows": float(shard.gradients.looked.sum()),
            "available": self.available,
        }
        if self.watch is not None:
            columns |= self.watch.look(self.done, average)
        elif self.tol is not None:
            columns["gap"] = certify(objective, average, [balance, shard.balance])[0]
        return self.trace.record(self.done, average, balance, **columns)

    def _worse(self) -> str | None:
        value, start = self.trace.lines[-1]["objective"], self.start_value
        if self.watch is not None or value <= start + WORSE * self.scale:
            return None
        return f"after {self.done} rounds the objective is {value:.3g}, worse than {start:.3g} at the start"

    def _finish(self, status: Status, theta: Array, fuse: bool) -> Solution:
        objective, balance, alpha = self.problem.fused, self.shard.average_balance, self.shard.alpha
        balances = [balance, self.shard.balance]
        gap, radius = certify(objective, theta, balances)
        if fuse:
            zeta = None
            if objective.sparsity is not None:
                zeta = np.clip(-objective.terms.gradients(theta) - balance, -objective.sparsity, objective.sparsity)
            candidate = fused_parameters(objective, theta, alpha, zeta)
            other, within = certify(objective, candidate, balances)
            if other <= gap:
                theta, gap, radius = candidate, other, within
        message = _message(status, self.done, gap, self.tol, self.restarts)
        value, trace = self.problem.objective(theta), self.trace.columns()
        if self.watch is not None:
            message = self.watch.message(status, self.done)
            value, gap, radius = self.watch.columns["new_objective"], np.nan, None  # stored rows certify nothing
            for u, row in self.watch.changes:
                site = self.problem.federation.sites[u]
                text = f"site {site!r}: its rows follow different parameters from about row {row} of its stream on"
                warnings.warn(f"{text}; start a new run with warm_start", ChangeWarning, stacklevel=4)
        if status == "iteration_limit" and self.tol is not None:
            warnings.warn(message, ConvergenceWarning, stacklevel=4)
        return Solution(theta, value, gap, status, self.done, trace, alpha, message, radius)

    def _save(self) -> None:
        if self.file is None:
            return
        if self.fresh:  # whatever is there is replaced
            self.file.clear()
            self.fresh = False
        arrays: dict[str, NDArray[Any]] = {f"trace_{name}": values for name, values in self.trace.columns().items()}
        arrays["streamed"] = np.array([self.sampled[u].used for u in sorted(self.sampled)], dtype=np.int64)
        if self.watch is not None:
            arrays |= {f"watch_{name}": part for name, part in self.watch.state().items()}
        if self.presence is not None:
            arrays["seen"] = self.presence.seen
        header = {name: getattr(self, name) for name in ("vectors", "available", "restarts", "caution", "compiled")}
        self.file.save(self.done, {**self.shard.state(), **arrays}, header, durable=True)

    def resume(self) -> None:
        assert self.file is not None
        path = self.file.path
        if not path.exists():
            raise ModelFileError(f"{path}: there is no checkpoint to resume from; run once without resume")
        saved = self.file.load()
        if saved is None and self.file.others():
            raise ParameterError(
                f"{path}: was written by a run with other data, another graph or other settings; resume needs the same "
                "problem, batch size, steps, seed and availability (only rounds may change)"
            )
        if saved is None:
            raise ModelFileError(f"{path}: cannot be read as a checkpoint: it holds no state")
        arrays, header = saved.arrays, saved.header
        self.restarts, self.caution = header["restarts"], header["caution"]
        if self.backend == "auto":
            self.backend = "numba" if header["compiled"] else "numpy"
        self.begin()
        self.shard.restore(arrays)
        for u, used in zip(sorted(self.sampled), arrays["streamed"].tolist(), strict=True):
            self.sampled[u].skip(used)
        self.done, self.vectors, self.available = saved.round, header["vectors"], header["available"]
        if self.presence is not None:
            self.presence.seen = arrays["seen"]
        if self.watch is not None:
            self.watch.restore(_named("watch_", arrays))
        columns = {name: values.tolist() for name, values in _named("trace_", arrays).items()}
        self.trace.lines = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _numpy_rounds(shard: Shard, first: int, count: int, *presence: Any) -> None:
    run_rounds(shard, DirectLink(first + count - 1, first - 1, *presence))


def _named(start: str, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the arrays whose names begin like this, by the rest of their names."""
    return {name.removeprefix(start): part for name, part in arrays.items() if name.startswith(start)}


def _describe(problem: Problem, plan: RunPlan, given: tuple[object, ...]) -> list[object]:
    assert plan.rows is not None
    rows, kinds = plan.rows, {id(loss): loss for loss in problem.losses}
    numbers = {key: k for k, key in enumerate(kinds)}
    plain = []
    for loss in kinds.values():  # what can be compared between processes: numbers, strings and names of functions
        told = {k: getattr(x, "__qualname__", type(x).__name__) if callable(x) else x for k, x in vars(loss).items()}
        parts = [(name, part) for name, part in told.items() if isinstance(part, int | float | str)]
        plain.append((type(loss).__name__, loss.name, sorted(parts, key=str)))
    return [
        *rows.data.arrays,
        *(rows.starts, rows.batch, rows.keys, rows.ridge),
        np.array([numbers[id(loss)] for loss in problem.losses]),
        plain,
        *(plan.edges, plan.edge_radius, plan.penalty.name, plan.sparsity, plan.radius),
        given,
        *(plan.theta, plan.alpha),
    ]


def _listeners(problem: Problem, availability: Availability | None) -> Array:
    """Return the number of vectors ``(V,)`` sent in a round because a site is available."""
    if availability is None:
        return problem.graph.degree.astype(np.float64)
    if availability.placement == "central":
        # the central machine sends theta_i and the dual force of its edges, the site returns theta_i
        return np.full(problem.n_sites, 3.0)
    labels = problem.graph.components()
    return np.asarray((np.bincount(labels) - 1.0)[labels], dtype=np.float64)


def _literal_hint() -> str:
    kappa, rho, auto = argument("kappa"), argument("rho"), argument("step", "auto")
    return (
        f"the paper keeps parameters in a ball: give the problem a radius ({argument('radius')}), more rounds, a "
        f"smaller {kappa} or {rho}, or use {auto}"
    )


def _message(status: Status, done: int, gap: float, tol: float | None, restarts: int) -> str:
    again = f" (after {restarts} restarts with shorter steps)" if restarts else ""
    if status == "converged":
        return f"converged: relative gap {gap:.1e} after {done} rounds{again}"
    if status == "interrupted":
        hint = "with a checkpoint, resume=True continues"
        return f"interrupted after {done} rounds at relative gap {gap:.1e}{again}; {hint}"
    if tol is None:
        return f"did {done} rounds: relative gap {gap:.1e}{again}"
    return (
        f"stopped after {done} rounds with relative gap {gap:.1e} > {tol:.1e}{again}; raise rounds, use larger "
        "batches, or use gradient='saga'"
    )
