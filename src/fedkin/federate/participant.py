"""A participant in a run: a shard, a link to the others, and the state on disk; and the edge tests before the rounds.

Crashes are harmless because the vector of a round is a function of the state after the previous round. A site that
restarts from an older state computes the same numbers again. Its neighbours ignore repeated messages and resend their
own; each keeps its vectors since the last durable state, and two more. A killed process loses at most `LAG_SECONDS` of
rounds, since the kernel has its state; a machine that lost power restarts from the last durable state.

Edge selection: each site fits its own rows and sends its neighbours the estimate, its covariance and the facts that the
test needs (``p^2 + 2 p + 5`` numbers). Both ends of an edge can then test it; the end with the smaller number decides
and tells the other, so that rounding cannot make them disagree. The Bonferroni threshold ``level / |E|`` needs no other
site. Unlike in `fedkin.select_edges`, noise variances are moderated across the two ends only, and a site without an
estimate of its own takes the scale of its prior from its own rows.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedkin._base import Array
from fedkin.admm import (
    MOST_PARAMS,
    Saved,
    Sent,
    Shard,
    ShareTaker,
    Store,
    is_shared,
    run_rounds,
)
from fedkin.core import LocalFit, Summaries, bonferroni, local_fit, wald_tests
from fedkin.data import Federation
from fedkin.errors import DataError, DegenerateSiteWarning, ModelFileError, ParameterError, SolverError
from fedkin.federate.arrivals import Arrivals
from fedkin.federate.attendance import CentralLink, ReplicatedLink, WorkerLink
from fedkin.federate.disclosure import concentration
from fedkin.federate.endpoint import Action, Endpoint
from fedkin.federate.inbox import Kind, Patience, Stopped
from fedkin.federate.links import Arrays, BaseLink, ChoosingLink, NeighbourLink
from fedkin.federate.plan import ChoicePlan, SitePlan, planned_rows
from fedkin.federate.records import MOST_SHARES, Journal, Selection
from fedkin.federate.transports import Transport

#: Calls a function until the disk takes what it writes: ``hold(write, path, round)``.
Hold = Callable[[Callable[[], None], Path, int], None]

#: Larger states are written with durable saves only.
MOST_BYTES = 4 << 20
#: Work that a process may lose when it is killed, and does again: quick rounds are written together.
LAG_SECONDS = 0.05
#: Why parameters diverge, and how to fix it.
TOO_LONG = "its steps are too long for its rows; give the contract a larger batch_size, a ridge or a smaller rho"
_LITTLE = 0.02  # moves of a theta, relative to its length, that do not change who has the weight


class CheckpointFile(Store):
    """Checkpoint file of one site; states of another run, revision or site are refused.

    ``hold(write, path, round)`` calls ``write`` until the disk accepts it. ``unsaved(t)`` returns the vectors to save
    with the state after round t; they are kept for ``keep`` rounds. ``saved(t)`` is called after each save.

    A durable state is written at once, others after ``lag`` seconds without a write, unless they are larger than
    ``most_bytes``; `settle` writes the last state that waits.
    """

    def __init__(
        self,
        path: Path,
        run: str,
        revision: int,
        site: str,
        hold: Hold,
        unsaved: Callable[[int], Sequence[Sent]],
        saved: Callable[[int], object] = lambda t: None,
        *,
        keep: int = 1,
        most_bytes: int = MOST_BYTES,
        lag: float = LAG_SECONDS,
    ) -> None:
        super().__init__(path, run, revision, sent=keep)
        self.site, self._hold, self._unsaved, self._saved = site, hold, unsaved, saved
        self._most_bytes, self._lag = most_bytes, lag
        self._waiting: Callable[[], None] | None = None
        self._written = -math.inf

    def keep(self, round: int, arrays: Arrays, header: Mapping[str, Any], *, durable: bool) -> None:
        """Write the state after a round, now or later unless a newer one comes first."""
        if not durable and sum(part.nbytes for part in arrays.values()) > self._most_bytes:
            return
        self._waiting = partial(self._write, round, arrays, {"site": self.site, **header}, durable)
        if durable or time.monotonic() - self._written >= self._lag:
            self.settle()

    def settle(self) -> None:
        """Write the state that waits, if there is one."""
        write, self._waiting = self._waiting, None
        if write is not None:
            write()

    def _write(self, round: int, arrays: Arrays, header: Mapping[str, Any], durable: bool) -> None:
        sent = self._unsaved(round)
        self._hold(lambda: self.save(round, arrays, header, sent, durable=durable), self.path, round)
        self._written = time.monotonic()
        self._saved(round)

    def load(self) -> Saved | None:
        """Return the last state, or None; raise an error if the file is damaged, or of another run, revision or
        site."""
        try:
            found = super().load()
            others = [] if found is not None else self.others()
        except ModelFileError as error:
            raise ModelFileError(f"{error}; docs/rounds.md, 'A checkpoint is damaged', says what can be done") from None
        if others:
            raise ParameterError(
                f"{self.path}: was written by another run, or by another revision of this one (after its round "
                f"{others[0][2]}); remove it to start from round 0, on all sites"
            )
        if found is not None and found.header.get("site") != self.site:
            raise DataError(
                f"{self.path} is the state of {found.header.get('site')}, not of {self.site}: put back that of "
                f"{self.site}; docs/rounds.md, 'A checkpoint is damaged', says what can be done without"
            )
        return found

    def end(self) -> None:
        """Close the file without writing a state that waits; the next one opens it again."""
        self._waiting = None
        self.close()


def make_link(end: Endpoint, shard: Shard, record: Path | None = None) -> BaseLink:
    """Return the link for the placement of the run."""
    plan = end.plan
    if plan.placement == "replicas":
        return ReplicatedLink(end, shard, record)
    if plan.placement == "central":
        return CentralLink(end, shard) if plan.is_centre else WorkerLink(end, shard)
    if isinstance(plan, ChoicePlan):
        return ChoosingLink(end, shard)
    return NeighbourLink(end, shard)


class Participant:
    """A site or the central machine, independent of its process; `run` does all rounds.

    ``checkpoint`` is the file for its state; in ``record`` a leader of replicas writes its decisions since then.
    ``left`` are neighbours that have left permanently; ``arrivals`` are the rows that arrive while it runs. ``tick`` is
    called after every round and several times a second while waiting; it may raise `Stopped`.
    """

    def __init__(
        self,
        plan: SitePlan,
        transport: Transport,
        journal: Journal,
        *,
        checkpoint: Path | None = None,
        record: Path | None = None,
        patience: Patience | None = None,
        left: Iterable[int] = (),
        arrivals: Arrivals | None = None,
        tick: Callable[[Participant], object] = lambda participant: None,
    ) -> None:
        self.plan, self.journal, self.arrivals = plan, journal, arrivals
        self._tick = partial(tick, self)
        self.shard = Shard(plan)
        self._rows = None if plan.rows is None else plan.rows.data.digest
        end = self.endpoint = Endpoint(plan, transport, journal, patience, self._tick, self.settle)
        self.link, self.status = make_link(end, self.shard, record), end.status
        self._loss = plan.loss_object()
        self._looked: tuple[object, Array] = (None, np.zeros(0))  # rows and theta that were looked at
        self._taker = ShareTaker(self.shard) if self.link.certifies and plan.n_params <= MOST_PARAMS else None
        self.kept: CheckpointFile | None = None
        if checkpoint is not None and self.link.keeps_state:
            kept = end.hold, end.unsaved, self.link.saved
            self.kept = CheckpointFile(checkpoint, plan.run, plan.revision, end.name, *kept, keep=end.keep)
            self._load(self.kept)
        self.link.replay()
        self.drop(left)
        self._take_arrived(self.done)
        self.link.open()

    @property
    def done(self) -> int:
        """Number of finished rounds."""
        return self.link.done

    def settle(self) -> None:
        """Write the state after the last round, if that has not been done."""
        if self.kept is not None:
            self.kept.settle()

    def run(self) -> Array:
        """Run all remaining rounds, and return the averaged parameters: ``(p,)`` for a site, ``(V, p)`` for a central
        machine."""
        self.link.gather()
        self.status.state, self.status.round = "running", self.done
        stepped = None if self.plan.placement == "central" else self._check_step
        try:
            run_rounds(self.shard, self.link, begun=self._check_theta, stepped=stepped, ended=self._end_round)
            result = self.link.result()
        except Stopped:
            self.settle()
            raise
        finally:
            self._close()
        self.journal.write("info", "finished", round=self.done)
        self.status.state = "finished"
        return result

    def _end_round(self, t: int) -> None:
        plan, shard, status = self.plan, self.shard, self.status
        durable = t == plan.rounds or t % plan.checkpoint_every == 0
        if durable or self.link.keeps_all:
            self.save(t, durable)
        change = float(np.abs(shard.theta - shard.left).max(initial=0.0))
        status.round, status.change = t, change if math.isfinite(change) else None
        if self._taker is not None and (is_shared(t) or t == plan.rounds):
            share = vars(self._taker.take(t)).values()
            status.shares.append([one if math.isfinite(one) else None for one in share])
            del status.shares[:-MOST_SHARES]
        if self.arrivals is not None:
            if t % plan.checkpoint_every == 0 and t < plan.rounds:  # the state after it is safely on disk
                self.arrivals.look(t, shard.average[0])
            self._take_arrived(t)
        self._tick()

    def _check_theta(self) -> None:
        """Stop before a gradient is computed outside the ball, or where few rows carry the weight.

        Others may have drawn or set the parameters there. Rows are checked only after moves that can change their
        weights, so rounds stay quick.
        """
        plan, gradients = self.plan, self.shard.gradients
        if not plan.effective_rows or gradients is None or plan.is_centre:
            return
        theta = self.shard.theta[int(np.flatnonzero(plan.sites == plan.here)[0])]
        size = float(np.linalg.norm(theta))
        if plan.radius is not None and not size <= plan.radius * (1.0 + 1e-6):
            raise DataError(f"its parameters were set to a point of length {size:.3g}, outside the contract's ball")
        if self._loss.quadratic:
            return
        rows, before = self._looked
        if rows is not gradients.rows or not np.linalg.norm(theta - before) <= _LITTLE * (1.0 + size):
            self._looked = gradients.rows, theta.copy()
            if (words := concentration(self._loss, gradients.rows.of(0), theta, plan.effective_rows)) is not None:
                raise DataError(
                    f"its neighbours have pulled its parameters to a point at which {words}: the next theta "
                    "would reveal single rows. A smaller lam pulls less; otherwise check the neighbours' messages"
                )

    def _check_step(self, t: int) -> None:
        """Raise `SolverError` if own parameters are not finite or end at a ball that is not a constraint."""
        plan, theta = self.plan, self.shard.theta[self.shard.own]
        name = self.endpoint.name
        if not math.isfinite(np.add.reduce(theta, axis=None)) and not np.isfinite(theta).all():
            raise SolverError(f"round {t}: the parameters of site {name!r} diverged: {TOO_LONG}")
        if t < plan.rounds or plan.radius is None or plan.constrained:
            return
        if (np.sqrt((theta * theta).sum(axis=1)) > (1.0 - 1e-9) * plan.radius).any():
            raise SolverError(
                f"the parameters of site {name!r} diverged to the boundary of their ball (radius {plan.radius:g}): "
                f"{TOO_LONG}; or give a larger radius"
            )

    def _take_arrived(self, t: int) -> None:
        """Use, after round t, the rows that count from the next round onwards."""
        if self.arrivals is None:
            return
        self.arrivals.tell(self.status)
        rows = self.arrivals.rows_from(t + 1)
        if rows is not None:
            self.shard.take_rows(*planned_rows(self.plan, self.arrivals.site, rows))
            if self._taker is not None:
                self._taker = ShareTaker(self.shard)
            self.status.shares.clear()  # of another objective

    def linger(self) -> None:
        """Stay until all others have finished, since they may need the last vectors."""

        def save() -> None:
            self.save(self.done, True)
            self._close()

        self.link.linger(save)

    def drop(self, gone: Iterable[int]) -> None:
        """Continue without neighbours that have left permanently: their edges leave the objective, with duals set to 0.

        Only the site's own part changes, so neighbours of the same leaver need not agree on the round.
        """
        if new := self.endpoint.drop(gone):
            for v in sorted(new):
                self.journal.write("warning", "edge dropped", peer=self.plan.name(v), round=self.done)
            self.shard.drop(new)
            self.status.shares.clear()  # of another objective

    def save(self, t: int, durable: bool) -> None:
        """Keep the state after round t; a durable one survives a power failure."""
        if self.kept is not None:
            header = {"left": sorted(self.endpoint.left), "over": self.link.over, "rows": self._rows}
            self.kept.keep(t, {**self.shard.state(), **self.link.arrays()}, header, durable=durable)

    def _load(self, kept: CheckpointFile) -> None:
        found = kept.load()
        if found is None:
            return
        if found.header.get("rows") != self._rows:
            raise ModelFileError(
                f"{kept.path} was computed from other rows: join again with the earlier rows, or remove it, on all "
                "sites, to start from round 0"
            )
        self.link.over = found.header["over"]
        self.endpoint.recall(kept.sent(), found.round)
        self.link.restore(found.arrays, found.round)
        self.drop(found.header["left"])
        self.shard.restore(found.arrays)

    def _close(self) -> None:
        if self.kept is not None:
            self.kept.end()


# --- edge tests ------------------------------------------------------------------------------------------------------


def summary(plan: SitePlan) -> Array:
    """Return what a site reports about its own fit: theta, covariance, prior precision, and five facts."""
    assert plan.select is not None and plan.rows is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateSiteWarning)  # `rescued` travels, and the log says so
        data = Federation({0: plan.rows.of(0)}) if plan.noisy is None else Summaries.stack([plan.noisy[0]])
        fit = local_fit(data, plan.rows.losses[0], plan.select.variance)
    dof = fit.residual_dof[0] if np.isfinite(fit.residual_dof[0]) else -1.0
    facts = [fit.n_samples[0], fit.dispersion[0], dof, fit.matrix_estimated[0], fit.rescued[0]]
    parts = [fit.theta[0], fit.covariance[0].ravel(), fit.prior_precision[0], np.array(facts, dtype=float)]
    return np.concatenate(parts)


def _pair(plan: SitePlan, first: Array, second: Array) -> LocalFit:
    """Return a `LocalFit` of two sites from their summaries."""
    assert plan.select is not None
    p, both = plan.n_params, np.stack([first, second])
    samples, dispersion, dof, whole, rescued = both[:, -5:].T
    return LocalFit(
        sites=(0, 1),
        theta=both[:, :p],
        hessian=np.zeros((2, p, p)),
        covariance=both[:, p : p + p * p].reshape(2, p, p),
        n_samples=samples.astype(np.int64),
        dispersion=dispersion,
        residual_dof=np.where(dof < 0, np.inf, dof),
        matrix_estimated=whole > 0.5,
        prior_precision=both[:, p + p * p : 2 * p + p * p],
        rescued=rescued > 0.5,
        notes={},
        variance=plan.select.variance,
        losses=(str(plan.loss["name"]),) * 2,
    )


def select(
    plan: SitePlan, transport: Transport, journal: Journal, patience: Patience, tick: Action = lambda: None
) -> Selection:
    """Exchange summaries and verdicts with the neighbours, and return which edges are dropped.

    ``tick`` is called several times a second while waiting.
    """
    if plan.select is None:
        raise ParameterError("this federation tests no edges: its contract has no [rounds.select]")
    here, own = plan.here, summary(plan)
    if own[-1]:
        journal.write("warning", "no estimate of its own: a ridge fit is used instead")
    end = Endpoint(plan, transport, journal, patience, tick)
    lengths = {Kind.SUMMARY: own.size, Kind.VERDICT: 1, Kind.CHOSEN: 0}
    end.open(lambda v: [end.expected(kind, v, lengths[kind], 0, 0) for kind in plan.kinds(v, here) if kind in lengths])
    end.send(Kind.SUMMARY, 0, own)
    end.wait_for(Kind.SUMMARY, lambda: end.partners, 0)
    p_values = {}
    for v in end.partners:
        other = end.inbox.values(Kind.SUMMARY, v, 0)
        lower, upper = (own, other) if here < v else (other, own)
        p_values[v] = float(wald_tests(_pair(plan, lower, upper), np.array([[1, 0]]))[1][0])
        if here < v:
            end.send(Kind.VERDICT, 0, np.array([p_values[v]]), v)
    # the smaller end decides
    smaller = [v for v in end.partners if v < here]
    end.wait_for(Kind.VERDICT, lambda: smaller, 0)
    p_values |= {v: float(end.inbox.values(Kind.VERDICT, v, 0)[0]) for v in smaller}
    end.linger(Kind.CHOSEN, 0)
    threshold = bonferroni(plan.select.level, plan.n_edges)
    dropped = [plan.name(v) for v in sorted(p_values) if p_values[v] < threshold]
    journal.write("info", "edges selected", kept=len(p_values) - len(dropped), of=len(p_values))
    told = {plan.name(v): p_values[v] for v in sorted(p_values)}
    return Selection(plan.run, plan.revision, threshold, told, dropped)
