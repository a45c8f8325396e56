"""Rows that arrive while a site runs.

They are never used immediately. They are taken in after a round whose state is safely on disk, and are written to disk,
with the round from which they are used, before the next theta is computed. Two successive thetas could reveal the rows
added between them. So the rows of one intake must pass the site's disclosure check on their own, and wait for more rows
until they do.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import numpy as np

from fedkin._base import PRIVATE_DIRECTORY, Array, count, replacing, write_file
from fedkin.admm import ChangeTest
from fedkin.data import CSV_SUFFIXES, PARQUET_SUFFIXES, Rows, raise_findings, read_columns, row_places
from fedkin.errors import DataError, FedkinError, ParameterError
from fedkin.federate.disclosure import check_disclosure, check_point, check_rounds
from fedkin.federate.messages import ARRIVED
from fedkin.federate.records import ARRIVED_LIST, Arrived, Journal, Part, Seen, SiteStatus, read_arrived
from fedkin.federate.site import Site, rows_before
from fedkin.losses import Loss

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
            self.site.ledger.check_differences(rows, own)
            part = self._written(t + 1, rows, theta)
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

    def _written(self, round: int, rows: Rows, theta: Array) -> Part:
        """Write rows that are to count from a round onwards, and a line of the ledger about them."""
        losses = np.array([self.loss.value(theta, *rows.take(slice(k, k + 1)).arrays) for k in range(rows.n_samples)])
        mean, sd = float(losses.mean()), float(losses.std(ddof=min(1, losses.size - 1)))
        part = Part(f"{self.revision}-{round}.npz", self.revision, round, mean, sd / losses.size**0.5)
        folder, site = self.site.directory / ARRIVED, self.site
        folder.mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)
        with replacing(folder / part.file, private=True, durable=True) as temporary:
            rows.save(temporary)
        note = f"{count(rows.n_samples, 'row')} that arrived, from round {round} on"
        site.record("arrived", rows, "its neighbours", note, once=True)
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
