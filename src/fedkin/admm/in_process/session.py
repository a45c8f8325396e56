"""One run of Fed-ADMM inside this process: its shards, how far they are, its trace, its checkpoint and its restarts."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkin._base import Array, Mask, check_positive, check_whole
from fedkin.admm.availability import Availability
from fedkin.admm.curvature import local_curvature
from fedkin.admm.in_process.backend import Backend, choose_backend
from fedkin.admm.in_process.checkpoint import Checkpoint, describe
from fedkin.admm.in_process.trace import (
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
from fedkin.admm.plan import Settings, plan_run, sample_streams, site_rows, starting_point
from fedkin.admm.rounds import LocalShards, hosts_of
from fedkin.admm.shard import ShardState, edge_update
from fedkin.core import Problem, Solution, Status
from fedkin.errors import ConvergenceWarning, ParameterError, SolverError
from fedkin.solvers import fused_parameters

#: A run that diverges starts again with steps this many times shorter, and gives up after so many times.
RESTART_FACTOR, MAX_RESTARTS = 4.0, 6
#: RUNAWAY times the starting value ends a run at once; WORSE is checked after the last round.
RUNAWAY, WORSE = 1e6, 0.1
#: Multiplications between two looks at Ctrl-C.
CHUNK_WORK = 3e8


@dataclass(frozen=True, eq=False)
class RunSetup:
    """What determines the course of a run; see `fedkin.fed_admm`."""

    settings: Settings
    rounds: int
    availability: Availability | None = None
    streams: Mapping[Any, Iterable[Any]] | None = None
    warm_start: Solution | None = None
    shards: int | Sequence[int] = 1
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        check_whole("rounds", self.rounds, least=1)


@dataclass(frozen=True, eq=False)
class Recording:
    """What is written down about a run, and when it may end; see `fedkin.fed_admm`."""

    tol: float | None = None
    callbacks: Sequence[Callback] = ()
    record_every: int | None = None
    checkpoint: str | os.PathLike[str] | None = None
    checkpoint_every: int | None = None
    resume: bool = False
    fuse: bool = False

    def __post_init__(self) -> None:
        for name in ("record_every", "checkpoint_every"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), least=1)
        if self.tol is not None:
            check_positive("tol", self.tol)
        if self.resume and self.checkpoint is None:
            raise ParameterError("resume needs checkpoint, the file to go on from")


class _DivergedError(Exception):
    """The steps were too long."""


class Session:
    """One run: what it was asked for, the shards, and how far they are."""

    def __init__(self, problem: Problem, setting: RunSetup) -> None:
        self.problem, self.settings, self.rounds, self.asked = (
            problem,
            setting.settings,
            setting.rounds,
            setting.backend,
        )
        self.availability, self.streams = setting.availability, setting.streams
        settings, availability, streams = self.settings, self.availability, self.streams
        if settings.gradient != "plain" and streams:
            raise ParameterError(
                f"gradient={settings.gradient!r} looks at rows again, but streams bring new ones; use gradient='plain'"
            )
        self.rows = site_rows(problem, settings.batch_size, set(streams or {}))
        self.hosts = hosts_of(setting.shards, problem.n_sites)
        self.curvature = local_curvature(problem.terms, self.rows)
        self.theta, self.alpha = starting_point(problem, setting.warm_start)
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
        sites = problem.federation.sites
        self.presence = None if availability is None else availability.bind(sites, self.settings.seed)
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
        work = float(self.rows.batch.sum() + plan.edges.shape[0] + problem.n_sites) * problem.n_params
        self.backend, self.advance = choose_backend(self.local, self.asked, self.rounds * work)
        self.chunk = int(max(1, min(4096, CHUNK_WORK / work)))
        self.done, self.vectors, self.available = 0, 0.0, 1.0
        self.present: Mask | None = None
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

    def run(self, trace: Trace, recording: Recording) -> Solution:
        """Do all rounds, again with shorter steps where they diverge."""
        self.trace, self.recording = trace, recording
        path = recording.checkpoint
        file = None if path is None else Checkpoint(path, self._describe(), fresh=not recording.resume)
        try:
            if recording.resume and file is not None:
                self._resume(file)
            while True:
                try:
                    return self._go(file)
                except _DivergedError as diverged:
                    trace.lines.clear()
                    self.restart(str(diverged))
        finally:
            if file is not None:
                file.close()

    def _go(self, file: Checkpoint | None) -> Solution:
        """Do the rounds that are missing, and sum up."""
        status: Status = "iteration_limit"
        trace, every = self.trace, self.recording.checkpoint_every
        recorded = int(trace.lines[-1]["n_iter"]) if trace.lines else 0
        with deferred_interrupt() as interrupt, np.errstate(over="ignore", invalid="ignore"):
            while self.done < self.rounds and status == "iteration_limit":
                planned = next_record(recorded, self.recording.record_every)
                self._advance_to(min(planned, self.rounds), interrupt, file)
                if interrupt.pressed:
                    status = "interrupted"
                elif self.done == planned:
                    recorded = planned
                    status = self._look()
                    if file is not None and every is None:
                        self._save(file)
            if file is not None:
                self._save(file)
            if not trace.lines or trace.lines[-1]["n_iter"] != self.done:
                self._record()
            worse = self._worse()
            if worse is not None and status != "interrupted":
                raise _DivergedError(worse)
            return self._finish(status, at_start=worse is not None)

    def _advance_to(self, goal: int, interrupt: Interrupt, file: Checkpoint | None) -> None:
        every = None if file is None else self.recording.checkpoint_every
        while self.done < goal and not interrupt.pressed:
            count = min(goal - self.done, self.chunk)
            if every is not None:
                count = min(count, every - self.done % every)
            available = probability = None
            if self.presence is not None:
                available, probability = self.presence.rounds(self.done + 1, count)
                self.available, self.present = float(available[-1].mean()), available[-1]
                self.vectors += float((available @ self.listeners).sum())
            else:
                self.vectors += float(self.listeners.sum()) * count
            self.advance(self.done + 1, count, available, probability)
            self.done += count
            if not np.isfinite(self.local.gather("theta")).all():
                raise _DivergedError(f"the parameters became infinite within {self.done} rounds")
            if file is not None and every is not None and self.done % every == 0:
                self._save(file)

    def _look(self) -> Status:
        """Record a line, and decide whether to go on."""
        line, tol = self._record(), self.recording.tol
        if not line["objective"] < self.start_value + RUNAWAY * self.scale:
            raise _DivergedError(f"the objective ran away within {self.done} rounds")
        if tol is not None and line["gap"] <= tol:
            return "converged"
        try:
            stop = run_callbacks(self.recording.callbacks, Progress(self.done, self.local.gather("average"), line))
        except KeyboardInterrupt:
            stop = True
        return "interrupted" if stop else "iteration_limit"

    def _record(self) -> dict[str, float]:
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
        if self.recording.tol is not None:
            columns["gap"] = certify(objective, self.local.gather("average"), self._balances()).gap
        average, balance = self.local.gather("average"), self.local.gather("average_balance")
        return self.trace.record(self.done, average, balance, **columns)

    def _balances(self) -> list[Array]:
        return [self.local.gather("average_balance"), self.local.gather("balance")]

    def _fused(self, theta: Array) -> Array:
        objective, zeta = self.problem.fused, None
        if objective.sparsity is not None:
            residual = objective.terms.gradients(theta) + self.local.gather("average_balance")
            zeta = np.clip(-residual, -objective.sparsity, objective.sparsity)
        return fused_parameters(objective, theta, self.local.gather("alpha"), zeta)

    def _worse(self) -> str | None:
        """A sentence, when the result is worse than where the run began."""
        value = self.trace.lines[-1]["objective"]
        if value <= self.start_value + WORSE * self.scale:
            return None
        return f"after {self.done} rounds the objective is {value:.3g}, worse than {self.start_value:.3g} at the start"

    def _finish(self, status: Status, at_start: bool) -> Solution:
        # interrupted in a bad moment: the best so far is the beginning
        theta = self.theta if at_start else self.local.gather("average")
        certificate = certify(self.problem.fused, theta, self._balances())
        tol = self.recording.tol
        if self.recording.fuse:
            candidate = self._fused(theta)
            other = certify(self.problem.fused, candidate, self._balances())
            if other.gap <= certificate.gap:
                theta, certificate = candidate, other
        message = _message(status, self.done, certificate.gap, tol, self.restarts)
        if status == "iteration_limit" and tol is not None:
            warnings.warn(message, ConvergenceWarning, stacklevel=5)
        return Solution(
            theta,
            self.problem.objective(theta),
            certificate.gap,
            status,
            self.done,
            self.trace.columns(),
            self.local.gather("alpha"),
            message,
            certificate.radius,
        )

    # --- checkpoints ---

    def _describe(self) -> list[object]:
        """Everything that the course of this run depends on."""
        start = [self.theta, self.alpha, sorted(self.local.streams)]
        presence = [] if self.presence is None else [self.presence.estimated, *vars(self.presence.pattern).values()]
        return [*describe(self.problem, self.rows, self.settings), *start, *presence]

    def _save(self, file: Checkpoint) -> None:
        arrays: dict[str, NDArray[Any]] = {f"trace_{name}": values for name, values in self.trace.columns().items()}
        streams = self.local.streams
        arrays["streamed"] = np.array([streams[u].used for u in sorted(streams)], dtype=np.int64)
        if self.presence is not None:
            arrays["seen"] = self.presence.seen
        names = ("vectors", "available", "restarts", "caution", "backend")
        header = {name: getattr(self, name) for name in names}
        file.save(self.done, {**vars(self.local.state()), **arrays}, header)

    def _resume(self, file: Checkpoint) -> None:
        """Go to the state, and back to the trace, that was saved."""
        saved = file.load()
        arrays, header = saved.arrays, saved.header
        self.restarts, self.caution = header["restarts"], header["caution"]
        self.asked = header["backend"] if self.asked == "auto" else self.asked
        self.begin()
        self.local.restore(ShardState(**{name: arrays.pop(name) for name in ShardState.__dataclass_fields__}))
        for u, used in zip(sorted(self.local.streams), arrays.pop("streamed").tolist(), strict=True):
            self.local.streams[u].skip(used)
        self.done, self.vectors, self.available = saved.round, header["vectors"], header["available"]
        if self.presence is not None:
            self.presence.seen = arrays.pop("seen")
        columns = {name.removeprefix("trace_"): values.tolist() for name, values in arrays.items()}
        self.trace.lines = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _listeners(problem: Problem, availability: Availability | None) -> Array:
    """Vectors ``(V,)`` that travel in a round because a site is there."""
    graph = problem.graph
    if availability is None:
        return graph.degree.astype(np.float64)
    if availability.placement == "central":
        # the central machine sends theta_i and the pull of its edges, the site returns theta_i
        return np.full(problem.n_sites, 3.0)
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
