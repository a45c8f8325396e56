"""Fed-ADMM (Algorithms 1 and 2 of the paper): decentralised stochastic ADMM, with devices that may come and go."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedkin._base import check_positive, check_whole
from fedkin.admm.availability import Availability
from fedkin.admm.backend import Backend, choose_backend
from fedkin.admm.checkpoint import fingerprint, load_checkpoint, save_checkpoint
from fedkin.admm.curvature import local_curvature
from fedkin.admm.gradients import GradientKind
from fedkin.admm.inprocess import LocalShards
from fedkin.admm.plan import (
    BatchSize,
    Settings,
    describe,
    device_rows,
    hosts_of,
    plan_run,
    sample_streams,
    starting_point,
)
from fedkin.admm.shard import Average, edge_update
from fedkin.admm.trace import (
    Callback,
    Interrupt,
    Progress,
    Trace,
    certify,
    deferred_interrupt,
    next_record,
    root_mean_square,
    run_callbacks,
)
from fedkin.errors import ConvergenceWarning, ParameterError, SolverError
from fedkin.objective import Problem, Solution, Status
from fedkin.solvers import fused_parameters

Array = NDArray[np.float64]

#: A run that diverges starts again with steps this many times shorter, and gives up after so many times.
RESTART_FACTOR, MAX_RESTARTS = 4.0, 6
#: An objective this many times its starting value ends a run at once; worse than the start by WORSE ends it at the end.
RUNAWAY, WORSE = 1e6, 0.1
#: Multiplications between two looks at Ctrl-C.
CHUNK_WORK = 3e8


def fed_admm(
    problem: Problem,
    rounds: int = 1000,
    batch_size: BatchSize = None,
    *,
    rho: float | Literal["auto"] = "auto",
    step: float | Literal["auto", "literal"] = "auto",
    kappa: float | None = None,
    average: Average | None = None,
    gradient: GradientKind = "plain",
    availability: Availability | None = None,
    streams: Mapping[Any, Iterable[Any]] | None = None,
    seed: int = 0,
    tol: float | None = None,
    reference: Solution | ArrayLike | None = None,
    warm_start: Solution | None = None,
    callbacks: Sequence[Callback] = (),
    record_every: int | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    resume: bool = False,
    fuse: bool = False,
    shards: int | Sequence[int] = 1,
    backend: Backend = "auto",
) -> Solution:
    """Minimise the objective of ``problem`` by Fed-ADMM: each round, a device looks at a batch and tells its
    neighbours its theta.

    Parameters
    ----------
    problem : Problem
        What is solved.
    rounds : int
        Rounds to do, counted from the very first one also when resuming.
    batch_size : int, sequence of V ints or None
        Rows that a device draws in each round, without replacement; None for all its rows.
    rho : float or "auto"
        Penalty of the augmented Lagrangian. By default ``mean curvature / mean degree``, times 4 where noise does not
        force the steps to shrink.
    step : "auto", float or "literal"
        "auto": proximal steps chosen by each device from its own curvature. A number kappa: proximal steps
        ``eta_i(t) = e / (1 + rho |N_i| e)`` with ``e(t) = kappa / t``. "literal": ``eta(t) = kappa / t`` as printed
        in the paper, which explodes easily.
    kappa : float, optional
        For ``step="literal"``; by default from the curvature.
    average : "tail", "paper", "last" or None
        What is returned: an average in which round t weighs like t^3 and so forgets the beginning, the plain average of
        theta(0), ..., theta(T-1) that the theorem is about, or the last theta. By default "last" where nothing is
        random or ``gradient`` removes the variance, "tail" otherwise.
    gradient : "plain", "saga" or "svrg"
        The paper's mini-batch gradient, or one whose variance vanishes: linear convergence on strongly convex losses.
        SAGA remembers a number per row, SVRG passes over all rows now and then.
    availability : Availability, optional
        Devices that come and go (Algorithm 2).
    streams : mapping {device: iterable of samples}, optional
        These devices see new samples ``(x, y)`` in every round; their stored rows serve for the curvature and the
        reported objective only.
    seed : int
        Of the batches and of the availability.
    tol : float, optional
        Stop when the relative duality gap is at most this; it is computed for every line of the trace.
    reference : Solution or array (V, p), optional
        For the column ``distance`` of the trace.
    warm_start : Solution, optional
        Where theta and the edge duals start; at 0 by default.
    callbacks : sequence of callables
        Called with a `Progress` whenever a line is recorded; a true result ends the run.
    record_every : int, optional
        Rounds between lines of the trace; by default they grow by a fifth.
    checkpoint : path, optional
        File to write the state to: every ``checkpoint_every`` rounds, at the end and at Ctrl-C.
    checkpoint_every : int, optional
        By default whenever a line is recorded.
    resume : bool
        Go on from the checkpoint; the result is that of a run without the break, to the bit.
    fuse : bool
        Make devices equal to the bit whose edges the duals show to be fused (for `Solution.clusters`), unless that
        makes the gap worse.
    shards : int or sequence of V ints
        Number of shards inside this process, or the shard of each device. It does not change a bit of the result.
    backend : "auto", "numpy" or "numba"
        "numpy" is the reference, with the same bits in every engine; "numba" is faster and agrees to 1e-10; "auto"
        compiles when the work pays.

    Returns
    -------
    Solution
        ``trace`` has the columns ``n_iter``, ``objective``, ``dual_residual`` (of the returned parameters: root mean
        square over devices of gradient plus duals), ``primal_residual`` (root mean square over edges of theta -
        beta), ``distance`` (``||theta - reference||_F^2 / |V|``), ``vectors`` and ``bytes`` (that would have
        travelled up to then), ``rows`` (looked at up to then), ``available`` (share of devices in that round) and
        ``gap`` (with ``tol``).

    Raises
    ------
    ParameterError
        When an argument is out of range.
    SolverError
        When the run diverges with the steps that were asked for.

    Notes
    -----
    docs/fed-admm.md follows a row through a round and derives the form that is computed. The gap is certified by the
    edge duals, which stay inside their balls in every round, and so do their averages.

    Examples
    --------
    >>> import fedkin
    >>> from fedkin.datasets import paper_design
    >>> design = paper_design(n_devices=10, n_samples=30, n_features=3, n_clusters=2, seed=0)
    >>> problem = fedkin.Problem(design.federation, design.graph, lam=0.01)
    >>> exact = fedkin.solve(problem, 1e-10)
    >>> solution = fedkin.fed_admm(problem, rounds=300, batch_size=5, gradient="saga", reference=exact)
    >>> bool(solution.trace["distance"][-1] < 1e-10)
    True
    """
    check_whole("rounds", rounds, least=1)
    for name, value in (("record_every", record_every), ("checkpoint_every", checkpoint_every)):
        if value is not None:
            check_whole(name, value, least=1)
    if tol is not None:
        check_positive("tol", tol)
    if resume and checkpoint is None:
        raise ParameterError("resume needs checkpoint, the file to go on from")
    settings = Settings(batch_size, rho, step, kappa, average, gradient, seed)
    trace = Trace(problem, reference)
    run = _Run(problem, settings, availability, streams, shards, warm_start, rounds, backend)
    file = None if checkpoint is None else _CheckpointFile(run, checkpoint, checkpoint_every)
    if resume and file is not None:
        file.load(trace)
    while True:
        try:
            return run.go(trace, tol, callbacks, record_every, file, fuse)
        except _DivergedError as diverged:
            trace.lines.clear()
            run.restart(str(diverged))


class _DivergedError(Exception):
    """The steps were too long."""


class _Run:
    """One run: what it was asked for, the shards, and how far they are."""

    def __init__(
        self,
        problem: Problem,
        settings: Settings,
        availability: Availability | None,
        streams: Mapping[Any, Iterable[Any]] | None,
        shards: int | Sequence[int],
        warm_start: Solution | None,
        rounds: int,
        backend: Backend,
    ) -> None:
        self.problem, self.settings, self.availability, self.streams = problem, settings, availability, streams
        self.rounds, self.asked = rounds, backend
        if settings.gradient != "plain" and streams:
            raise ParameterError(
                f"gradient={settings.gradient!r} looks at rows again, but streams bring new ones; use gradient='plain'"
            )
        self.rows = device_rows(problem, settings.batch_size, set(streams or {}))
        self.hosts = hosts_of(shards, problem.n_devices)
        self.curvature = local_curvature(problem.terms, self.rows)
        self.theta, self.alpha = starting_point(problem, warm_start)
        with np.errstate(over="ignore"):
            self.start_value = problem.objective(self.theta)
            # a warm start may fit perfectly: what counts as worse is measured against theta = 0 too
            zero = problem.objective(np.zeros_like(self.theta))
            self.scale = max(abs(self.start_value), abs(zero), np.finfo(float).tiny)
        self.noisy = availability is not None or bool(streams) or bool((self.rows.batch < self.rows.counts).any())
        self.caution, self.restarts = 1.0, 0
        self.begin()

    def begin(self) -> None:
        """Set everything to the state before round 1."""
        problem, availability = self.problem, self.availability
        devices = problem.federation.devices
        self.presence = None if availability is None else availability.bind(devices, self.settings.seed)
        plan = plan_run(
            problem,
            self.settings,
            self.rows,
            self.curvature,
            noisy=self.noisy,
            absent=availability is not None,
            caution=self.caution,
        )
        self.local = LocalShards(plan, self.hosts, self.theta, self.alpha, sample_streams(problem, self.streams))
        work = float(self.rows.batch.sum() + plan.edges.shape[0] + problem.n_devices) * problem.n_params
        self.backend, self.advance = choose_backend(self.local, self.asked, self.rounds * work)
        self.chunk = int(max(1, min(4096, CHUNK_WORK / work)))
        self.done, self.vectors, self.available = 0, 0.0, 1.0
        self.listeners = _listeners(problem, availability)

    def restart(self, reason: str) -> None:
        """Begin again with shorter steps, or say why that does not help."""
        step = self.settings.step
        if step != "auto":
            asked = "the literal step kappa/t" if step == "literal" else f"step={step!r}"
            raise SolverError(f"{reason} with {asked}; use step='auto', or a smaller kappa or rho") from None
        if self.streams:
            raise SolverError(f"{reason}, and samples of a stream cannot be seen again; give a small step") from None
        if self.restarts >= MAX_RESTARTS:
            raise SolverError(
                f"{reason}, also with {self.caution:.0f} times shorter steps: the objective may have no finite "
                "minimiser (add ridge=1e-3 or so), or the features are badly scaled (standardise them)"
            ) from None
        self.restarts += 1
        self.caution *= RESTART_FACTOR
        self.begin()

    def go(
        self,
        trace: Trace,
        tol: float | None,
        callbacks: Sequence[Callback],
        record_every: int | None,
        file: _CheckpointFile | None,
        fuse: bool,
    ) -> Solution:
        """Do the rounds that are missing, and sum up."""
        status: Status = "iteration_limit"
        recorded = int(trace.lines[-1]["n_iter"]) if trace.lines else 0
        with deferred_interrupt() as interrupt, np.errstate(over="ignore", invalid="ignore"):
            while self.done < self.rounds and status == "iteration_limit":
                planned = next_record(recorded, record_every)
                self._advance_to(min(planned, self.rounds), interrupt, file, trace)
                if interrupt.pressed:
                    status = "interrupted"
                elif self.done == planned:
                    recorded = planned
                    status = self._look(trace, tol, callbacks)
                    if file is not None and file.every is None:
                        file.save(trace)
            if file is not None:
                file.save(trace)
            if not trace.lines or trace.lines[-1]["n_iter"] != self.done:
                self._record(trace, tol)
            worse = self._worse(trace)
            if worse is not None and status != "interrupted":
                raise _DivergedError(worse)
            return self._finish(trace, status, tol, at_start=worse is not None, fuse=fuse)

    def _advance_to(self, goal: int, interrupt: Interrupt, file: _CheckpointFile | None, trace: Trace) -> None:
        while self.done < goal and not interrupt.pressed:
            count = min(goal - self.done, self.chunk)
            if file is not None and file.every is not None:
                count = min(count, file.every - self.done % file.every)
            available = probability = None
            if self.presence is not None:
                available, probability = self.presence.rounds(self.done + 1, count)
                self.available = float(available[-1].mean())
                self.vectors += float((available @ self.listeners).sum())
            else:
                self.vectors += float(self.listeners.sum()) * count
            self.advance(self.done + 1, count, available, probability)
            self.done += count
            if not np.isfinite(self.local.gather("theta")).all():
                raise _DivergedError(f"the parameters became infinite within {self.done} rounds")
            if file is not None and file.every is not None and self.done % file.every == 0:
                file.save(trace)

    def _look(self, trace: Trace, tol: float | None, callbacks: Sequence[Callback]) -> Status:
        """Record a line, and decide whether to go on."""
        line = self._record(trace, tol)
        if not line["objective"] < self.start_value + RUNAWAY * self.scale:
            raise _DivergedError(f"the objective ran away within {self.done} rounds")
        if tol is not None and line["gap"] <= tol:
            return "converged"
        try:
            stop = run_callbacks(callbacks, Progress(self.done, self.local.gather("average"), line))
        except KeyboardInterrupt:
            stop = True
        return "interrupted" if stop else "iteration_limit"

    def _record(self, trace: Trace, tol: float | None) -> dict[str, float]:
        theta, alpha = self.local.gather("theta"), self.local.gather("alpha")
        objective, plan = self.problem.fused, self.local.plan
        moved = edge_update(alpha, objective.differences(theta), plan.rho, plan.edge_radius, plan.penalty) - alpha
        columns = {
            # an edge step moves alpha by rho times theta - beta
            "primal_residual": root_mean_square(moved) / plan.rho,
            "vectors": self.vectors,
            "bytes": self.vectors * self.problem.n_params * 8.0,
            "rows": float(self.local.looked.sum()),
            "available": self.available,
        }
        if tol is not None:
            columns["gap"] = certify(objective, self.local.gather("average"), self._balances()).gap
        return trace.record(self.done, self.local.gather("average"), self.local.gather("average_balance"), **columns)

    def _balances(self) -> list[Array]:
        return [self.local.gather("average_balance"), self.local.gather("balance")]

    def _fused(self, theta: Array) -> Array:
        objective, zeta = self.problem.fused, None
        if objective.sparsity is not None:
            residual = objective.terms.gradients(theta) + self.local.gather("average_balance")
            zeta = np.clip(-residual, -objective.sparsity, objective.sparsity)
        return fused_parameters(objective, theta, self.local.gather("alpha"), zeta)

    def _worse(self, trace: Trace) -> str | None:
        """A sentence, when the result is worse than where the run began."""
        value = trace.lines[-1]["objective"]
        if value <= self.start_value + WORSE * self.scale:
            return None
        return f"after {self.done} rounds the objective is {value:.3g}, worse than {self.start_value:.3g} at the start"

    def _finish(self, trace: Trace, status: Status, tol: float | None, at_start: bool, fuse: bool) -> Solution:
        # interrupted in a bad moment: the best so far is the beginning
        theta = self.theta if at_start else self.local.gather("average")
        certificate = certify(self.problem.fused, theta, self._balances())
        if fuse:
            candidate = self._fused(theta)
            other = certify(self.problem.fused, candidate, self._balances())
            if other.gap <= certificate.gap:
                theta, certificate = candidate, other
        message = _message(status, self.done, certificate.gap, tol, self.restarts)
        if status == "iteration_limit" and tol is not None:
            warnings.warn(message, ConvergenceWarning, stacklevel=4)
        return Solution(
            theta,
            self.problem.objective(theta),
            certificate.gap,
            status,
            self.done,
            trace.columns(),
            self.local.gather("alpha"),
            message,
            certificate.radius,
        )


class _CheckpointFile:
    """The checkpoint of a run."""

    def __init__(self, run: _Run, path: str | os.PathLike[str], every: int | None) -> None:
        self.run, self.path, self.every = run, path, every
        start = [run.theta, run.alpha, sorted(run.local.streams)]
        presence = [] if run.presence is None else [run.presence.estimated, *vars(run.presence.pattern).values()]
        self.digest = fingerprint([*describe(run.problem, run.rows, run.settings), *start, *presence])

    def save(self, trace: Trace) -> None:
        run = self.run
        arrays = {**run.local.state(), **{f"trace_{name}": values for name, values in trace.columns().items()}}
        if run.presence is not None:
            arrays["seen"] = run.presence.seen
        header = {
            "done": run.done,
            "vectors": run.vectors,
            "available": run.available,
            "restarts": run.restarts,
            "caution": run.caution,
            "backend": run.backend,
        }
        save_checkpoint(self.path, self.digest, arrays, header)

    def load(self, trace: Trace) -> None:
        """Put the run and its trace into the state that was saved."""
        run = self.run
        arrays, header = load_checkpoint(self.path, self.digest)
        run.restarts, run.caution = header["restarts"], header["caution"]
        run.asked = header["backend"] if run.asked == "auto" else run.asked
        run.begin()
        run.local.restore(arrays)
        run.done, run.vectors, run.available = header["done"], header["vectors"], header["available"]
        if run.presence is not None:
            run.presence.seen = arrays["seen"]
        prefix = "trace_"
        columns = {name.removeprefix(prefix): arrays[name].tolist() for name in arrays if name.startswith(prefix)}
        trace.lines = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _listeners(problem: Problem, availability: Availability | None) -> Array:
    """Vectors ``(V,)`` that travel in a round because a device is there."""
    graph = problem.graph
    if availability is None:
        return graph.degree.astype(np.float64)
    if availability.placement == "central":
        # the central machine sends theta_i and the pull of its edges, the device returns theta_i
        return np.full(problem.n_devices, 3.0)
    labels = graph.components()
    return np.asarray((np.bincount(labels) - 1.0)[labels], dtype=np.float64)


def _message(status: Status, done: int, gap: float, tol: float | None, restarts: int) -> str:
    again = f" (after {restarts} restarts with shorter steps)" if restarts else ""
    if status == "converged":
        return f"converged: relative gap {gap:.1e} after {done} rounds{again}"
    if status == "interrupted":
        return (
            f"interrupted after {done} rounds at relative gap {gap:.1e}{again}; with a checkpoint, resume=True goes on"
        )
    if tol is None:
        return f"did {done} rounds: relative gap {gap:.1e}{again}"
    return (
        f"stopped after {done} rounds with relative gap {gap:.1e} > {tol:.1e}{again}; raise rounds, take larger "
        "batches, or use gradient='saga'"
    )
