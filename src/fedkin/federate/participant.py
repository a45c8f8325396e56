"""A participant in a run: a shard, a link to the others, and the state on disk.

Crashes are harmless because the vector of a round is a function of the state after the previous round. A site that
restarts from an older state computes the same numbers again. Its neighbours ignore repeated messages and resend their
own; each keeps its vectors since the last durable state, and two more. A killed process loses at most `LAG_SECONDS` of
rounds, since the kernel has its state; a machine that lost power restarts from the last durable state.

Rows that arrive while a site runs (`Arrivals`) are never used immediately. They are taken in after a round whose state
is safely on disk, and are written to disk, with the round from which they are used, before the next theta is computed.
Two successive thetas could reveal the rows added between them. So the rows of one intake must pass the site's
disclosure check on their own, and wait for more rows until they do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fedkin._base import PRIVATE_DIRECTORY, Array, count, replacing, write_file
from fedkin.admm import (
    MOST_PARAMS,
    ChangeTest,
    Saved,
    Sent,
    Shard,
    ShareTaker,
    Store,
    is_shared,
    run_rounds,
)
from fedkin.data import CSV_SUFFIXES, PARQUET_SUFFIXES, Rows, raise_findings, read_columns, row_places
from fedkin.errors import DataError, FedkinError, ModelFileError, ParameterError, SolverError
from fedkin.federate.disclosure import check_disclosure, check_point, check_rounds, concentration
from fedkin.federate.endpoint import Endpoint
from fedkin.federate.inbox import Patience, Stopped
from fedkin.federate.links import Arrays, make_link
from fedkin.federate.messages import ARRIVED
from fedkin.federate.plan import TOO_LONG, SitePlan, planned_rows
from fedkin.federate.records import MOST_SHARES, Journal, SiteStatus
from fedkin.federate.site import ARRIVED_LIST, Arrived, Part, Seen, Site, read_arrived, rows_before
from fedkin.federate.transports import Transport
from fedkin.losses import Loss

#: Calls a function until the disk takes what it writes: ``hold(write, path, round)``.
Hold = Callable[[Callable[[], None], Path, int], None]

#: Larger states are written with durable saves only.
MOST_BYTES = 4 << 20
#: Work that a process may lose when it is killed, and does again: quick rounds are written together.
LAG_SECONDS = 0.05
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


#: A file that has changed less than so many seconds ago may still be written to.
SETTLED_SECONDS = 1.0
_CHUNK = 16  # rows that are given to the test for changes at once


class Arrivals:
    """Rows that arrive at a site during a run; ``source`` is a table or a directory, None for no more rows."""

    def __init__(
        self, site: Site, revision: int, source: Path | None, start: Array, loss: Loss, journal: Journal
    ) -> None:
        self.site, self.revision, self.source, self.loss, self.journal = site, revision, source, loss, journal
        rounds = site.contract.rounds
        if rounds.placement != "peer" or rounds.gradient != "plain":
            raise ParameterError(
                "arriving rows need a contract with placement = 'peer' and gradient = 'plain': elsewhere, other "
                "machines know a site's earlier steps, and SAGA and SVRG remember earlier rows"
            )
        if not loss.additive:
            raise ParameterError(
                f"arriving rows extend a sum, but those of the {loss.name} loss change the risk sets of all others: "
                "join again with the whole table, and let the organiser order new rounds"
            )
        if source is not None and not source.exists():
            raise DataError(f"there is no table or directory {source} to follow")
        self.arrived = read_arrived(site.directory)
        self.base = rows_before(site, revision)
        self.parts = [self._load(part) for part in self.arrived.parts if part.revision == revision]
        self._facts: list[tuple[str, int, int]] = []
        self._used = 0
        self._said: dict[str, object] = {}
        #: Rows of this run's arrivals at which changes began, found by a test at the point from which the run started.
        self.changes: list[int] = []
        self._start, self._test, self._tested = start, ChangeTest(start), 0
        for rows in self.parts:
            self._test_rows(rows)

    def _load(self, part: Part) -> Rows:
        return Rows.load(self.site.directory / ARRIVED / part.file)

    @property
    def _own_parts(self) -> list[Part]:
        return [part for part in self.arrived.parts if part.revision == self.revision]

    def rows_from(self, round: int) -> Rows | None:
        """Return all rows used in a round; None if they are the same as in the last call."""
        used = sum(part.round <= round for part in self._own_parts)
        if used == self._used:
            return None
        self._used = used
        return Rows.stack([self.base, *self.parts[:used]])

    def tell(self, status: SiteStatus) -> None:
        """Return what has arrived, how well it was predicted, and the last change."""
        status.arrived = sum(rows.n_samples for rows in self.parts)
        if own := self._own_parts:
            status.new_loss, status.new_error = own[-1].loss, own[-1].error
        status.changed = self.changes[-1] if self.changes else None

    def look(self, t: int, theta: Array) -> None:
        """Take in new rows after round t, whose state is on disk; ``theta (p,)`` is the current average.

        Rows that cannot be read, do not fit the contract or are too few to use on their own are left in place, and the
        log gives the reason.
        """
        try:
            found = self._read()
            if found is None:
                return
            rows, seen = found
            contract, own = self.site.contract, self.site.settings
            whole = Rows.stack([self.base, *self.parts, rows])
            findings = check_disclosure(contract, rows, own) or check_point(contract, rows, theta, own)
            if findings := findings or check_rounds(contract, whole, theta, own):
                self._facts = []  # the settings may change
                self._say("info", "new rows are waiting for more", rows=rows.n_samples, why=str(findings[0]))
                return
            self.site.ledger.check_differences(whole, own)
            part = self._written(t + 1, rows, whole, theta)
        except (FedkinError, OSError) as error:
            self._say("warning", "new rows refused", why=str(error))
            return
        # from here on they count; an error ends the process, and the list tells the next one
        self.arrived = Arrived((*self.arrived.parts, part), {**self.arrived.seen, **seen})
        listed = msgspec.json.encode(self.arrived)
        write_file(self.site.directory / ARRIVED / ARRIVED_LIST, listed, private=True, durable=True)
        self.parts.append(rows)
        told = {name: float(f"{value:.4g}") for name, value in (("loss", part.loss), ("error", part.error))}
        self.journal.write("info", "rows arrived", rows=rows.n_samples, from_round=part.round, **told)
        before = len(self.changes)
        self._test_rows(rows)
        for row in self.changes[before:]:
            self.journal.write("warning", "rows follow different parameters", from_arrived_row=row, round=t)

    def _written(self, round: int, rows: Rows, whole: Rows, theta: Array) -> Part:
        """Write rows that are to count from a round onwards, and a line of the ledger about the ``whole`` table."""
        losses = np.array([self.loss.value(theta, *rows.take(slice(k, k + 1)).arrays) for k in range(rows.n_samples)])
        mean, sd = float(losses.mean()), float(losses.std(ddof=min(1, losses.size - 1)))
        part = Part(f"{self.revision}-{round}.npz", self.revision, round, mean, sd / losses.size**0.5)
        folder, site = self.site.directory / ARRIVED, self.site
        folder.mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)
        with replacing(folder / part.file, private=True, durable=True) as temporary:
            rows.save(temporary)
        note = f"{count(rows.n_samples, 'row')} that arrived, from round {round} on"
        site.record("arrived", whole, "its neighbours", note, once=True)
        return part

    def _say(self, level: str, event: str, **facts: object) -> None:
        """Log a line, unless it is that of the last look."""
        if facts != self._said:
            self._said = facts
            self.journal.write(level, event, **facts)

    def _read(self) -> tuple[Rows, dict[str, Seen]] | None:
        """Return rows that have not been taken in, and how far each file has then been read."""
        source = self.source
        if source is None:
            return None
        files = [source]
        if source.is_dir():
            suffixes, inside = (*CSV_SUFFIXES, *PARQUET_SUFFIXES), sorted(source.iterdir())
            files = [path for path in inside if path.suffix.lower() in suffixes and not path.name.startswith(".")]
        facts = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        if facts == self._facts or any(time.time() - changed / 1e9 < SETTLED_SECONDS for _, _, changed in facts):
            return None
        self._facts = facts
        new, seen = [], {}
        for path in files:
            rows = self._prepared(path)
            done = self._done(path, rows)
            if rows.n_samples > done:
                new.append(rows.take(slice(done, None)))
                seen[path.name] = Seen(rows.n_samples, rows.digest)
        return (Rows.stack(new), seen) if new else None

    def _prepared(self, path: Path) -> Rows:
        contract, columns = self.site.contract, read_columns(path)
        raise_findings(contract.check(columns, at=row_places(path, columns)))
        return contract.prepare(columns)

    def _done(self, path: Path, rows: Rows) -> int:
        """Return how many rows of a file are known: they come first, and have not changed."""
        if (known := self.arrived.seen.get(path.name)) is not None:
            if rows.n_samples < known.rows or rows.take(slice(0, known.rows)).digest != known.digest:
                raise DataError(
                    f"{path}: its first {count(known.rows, 'row')} are not those that were taken in; add rows at the "
                    "end, or files, and change nothing else"
                )
            return known.rows
        joined = self.site.rows()
        if rows.n_samples >= joined.n_samples and rows.take(slice(0, joined.n_samples)).digest == joined.digest:
            return joined.n_samples
        if self.source is not None and self.source.is_file():
            told = count(joined.n_samples, "row")
            raise DataError(f"{path} does not start with the {told} that the site joined with; follow that table")
        return 0

    def _test_rows(self, rows: Rows) -> None:
        for k in range(0, rows.n_samples, _CHUNK):
            chunk = rows.take(slice(k, k + _CHUNK))
            began = self._test.add(self.loss.gradient(self._test.point, *chunk.arrays), chunk.n_samples)
            if began is not None:
                self.changes.append(self._tested + began)
                self._tested += int(self._test.counts[1])
                self._test = ChangeTest(self._start)
