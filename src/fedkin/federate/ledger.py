"""The ledger of everything that has left a site, and which earlier messages rule out sharing something.

It is append-only and hash-chained: every line has the digest of the line before. There are two copies, one in the
site's directory and one in a folder of the user (``FEDKIN_LEDGERS``, by default ``~/.local/share/fedkin/ledgers``)
named by run and site. Lines of both count, so a site that joins again in another directory, or whose files were
removed, is recognised as the same site. The folder also has the values of every shared table (``DIGEST.rows``), in the
units of the table. They identify patients in any federation, even under a contract that prepares rows differently or
has other columns, if a column has changed, or if values were rounded.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np
from msgspec import field
from scipy.spatial import KDTree

from fedkin._base import PRIVATE_DIRECTORY, AnyArray, Array, write_file
from fedkin.admm.availability import mix
from fedkin.core import composed_epsilon
from fedkin.data import Rows
from fedkin.errors import DataError
from fedkin.federate.settings import Thresholds, fewest_rows
from fedkin.federate.trust import open_private

if TYPE_CHECKING:
    from fedkin.federate.contract import Contract

_ALIKE = 0.1  # share of rows that agree in one or two columns, beyond three times chance, that makes tables overlap
_DEVIATIONS = 5.0  # standard deviations beyond chance
_NEARBY, _BY_CHANCE = 0.03, 0.02  # standard deviations within which values are alike; share of rows alike by chance
_MOST_SHUFFLED = 2000  # rows of which columns are shuffled, to see how many are alike by chance
_WITHDRAW = "If all of it has been withdrawn, record that{}: fedkin site ledger {} --withdrawn REASON"
_ELSEWHERE = _WITHDRAW.format(" there", "DIR")
_DECIDE = "If the custodian decides otherwise: fedkin site settings {} --below-minima"

LEDGER = "ledger.jsonl"  #: in a site's directory
PLACE = "FEDKIN_LEDGERS"  #: environment variable with the user's folder of ledgers

What = Literal["share", "answer", "refused", "request", "select", "run", "publish", "arrived", "withdrawn", "settings"]
#: Kinds of entries that record numbers which depend on rows.
_LEAVES = ("share", "answer", "refused", "request", "select", "run", "arrived", "publish")


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of the ledger: what left, to whom, and the digest of its rows. ``epsilon`` and ``delta`` if private.

    For sums, ``at`` is the point at which they were taken, and ``folds`` names their folds, if any. ``columns`` is a
    digest of the contract's prepared columns and loss. ``sums`` is the digest of the file with the noisy sums behind
    the message.
    """

    what: What
    to: str
    run: str
    site: str
    contract: str
    rows: str
    time: str = field(default_factory=lambda: f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%fZ}")
    note: str = ""
    epsilon: float | None = None
    delta: float | None = None
    at: tuple[float, ...] = ()
    folds: str = ""
    columns: str = ""
    sums: str = ""


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    before: str
    entry: Entry
    digest: str


class Ledger:
    """Ledger of the site called ``site`` in ``directory``, for one run under a contract."""

    def __init__(self, directory: Path, run: str, site: str, contract: Contract) -> None:
        self.directory, self.run, self.site, self._contract = directory, run, site, contract
        given = os.environ.get(PLACE)
        data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
        self.folder = Path(given) if given else data / "fedkin" / "ledgers"

    @property
    def _copies(self) -> tuple[Path, Path]:
        return self.directory / LEDGER, self.folder / f"{self.run}-{self.site}.jsonl"

    def entries(self) -> list[Entry]:
        """Return all entries of this site, oldest first; raise `DataError` if a copy was changed."""
        return _by_time(one for path in self._copies for one in read_ledger(path))

    def check(
        self,
        what: What,
        table: Rows,
        own: Thresholds,
        *,
        private: tuple[float, float] | None = None,
        budget: float = 0.0,
        sums: str = "",
        resend: str = "",
    ) -> None:
        """Raise `DataError` if earlier messages rule out sharing something about these rows.

        Without noise, `check_differences` covers other tables, with the site's ``own`` thresholds. ``private`` are the
        epsilon and delta of the message. All messages with noise about the same rows, in any federation, share one
        ``budget``, which is by default that of the first. Messages that follow from the same noisy ``sums`` count once.
        ``resend`` is the file that can be sent again if noise was added.
        """
        known, rows = _since_withdrawal(self.entries()), table.digest
        again = _WITHDRAW.format("", self.directory)
        # what arrived in a run is the table of the join and more
        if rows not in {one.rows for one in known} and any(one.what != "arrived" for one in known):
            raise DataError(
                "numbers from different rows have left this site before: the difference would reveal the rows that "
                f"changed. Join with the table used then. {again}"
            )
        lost = f": send {resend} again if it was lost" if resend else ""
        every, partly = self.sent(table), self._related(table, own)
        exact = [one for one in every if one.epsilon is None and not partly.get(one.rows)]  # noise protects the others
        noisy = {one.sums or one.time: (one.epsilon, one.delta or 0.0) for one in every if one.epsilon is not None}
        if private is not None and exact:
            raise DataError(
                f"numbers without noise have left this site before ({exact[-1].what}), so noise would protect "
                f"nothing{lost}. {again}"
            )
        if noisy and not (private is not None and sums in noisy):
            first = next(iter(noisy.values()))[0]
            told = f"sums with noise (epsilon {first:g}) of these rows were shared before{lost}."
            total = math.inf if private is None else composed_epsilon((*noisy.values(), private))
            if not total <= budget:
                most = budget or first
                more = f" (epsilon {total:.3g} together, and at most {most:g} may be spent)" if private else ""
                raise DataError(f"{told} To {what} would reveal more than was promised{more}. {again}")
        elif private is not None and budget and private[0] > budget:
            raise DataError(f"epsilon is {private[0]:g}, but this site may spend {budget:g} at most: nothing is shared")

        if private is None:
            self.check_differences(table, own)

    def sent(self, table: Rows) -> list[Entry]:
        """Return the entries about tables that have some of these patients, oldest first.

        They are recognised under any name, federation or preparation, and if one column has changed.
        """
        rows = {table.digest, *self._related(table)}
        known = (*_since_withdrawal(self.entries()), *self._elsewhere())
        return _by_time(one for one in known if one.rows in rows)

    def _related(self, table: Rows, own: Thresholds | None = None) -> dict[str, bool]:
        """Return, by digest, for each other table with some of these patients, whether it has not exactly these."""
        marks, fewest, found = self._marks(table), fewest_rows(self._contract, own), {}
        for digest, other in self._others(table).items():
            partly = [_partly(one, other, fewest) for one in (marks, marks.near(other))]
            if any(one is not None for one in partly):
                found[digest] = any(partly)
        return found

    def _marks(self, table: Rows) -> _Marks:
        return _Marks.from_columns(self._contract.in_table_units(table))

    def _others(self, table: Rows) -> dict[str, _Marks]:
        """Return the fingerprints, by digest, of all other tables about which something has left.

        A fingerprint without a line counts as well: the line was lost.
        """
        named = {one.rows for path in self.folder.glob("*.jsonl") for one in read_ledger(path)}
        # a name with a dot is a file that another site is writing, or did not finish
        known = {path.stem for path in self.folder.glob("[!.]*.rows")} - named | {one.rows for one in self._elsewhere()}
        found = {}
        for rows in sorted(known - {table.digest}):
            path = self.folder / f"{rows}.rows"
            try:
                found[rows] = msgspec.msgpack.decode(path.read_bytes(), type=_Marks)
                if len({len(codes) for codes in found[rows].columns.values()}) != 1:
                    raise ValueError
            except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
                raise DataError(
                    f"{path} is missing or damaged, so it is not known which rows were shared; restore it from a copy. "
                    f"{_ELSEWHERE}"
                ) from error
        return found

    def check_differences(self, table: Rows, own: Thresholds) -> None:
        """Raise `DataError` if an earlier table has some of these patients only, or was shared in another way.

        The difference of sums is one over the other patients. Nor is more shared under a contract with other prepared
        columns or another loss: combined, curves with other knots single out one patient. Neither holds if the site's
        custodian has lifted the hard minima.
        """
        related, decide = self._related(table, own), _DECIDE.format(self.directory)
        if own.lowers_minima:
            return
        when = {one.rows: f"as {one.site}, {one.time[:10]}, run {one.run}" for one in self._elsewhere()}
        if rows := next((digest for digest, partly in related.items() if partly), None):
            raise DataError(
                "numbers about some of these patients, but not exactly these, have left before "
                f"({when.get(rows, 'the line in the ledger is lost')}): the difference would reveal the others. Share "
                "the new patients alone, as a site of their own, or share with noise (--epsilon). "
                f"{_ELSEWHERE}. {decide}"
            )
        for one in self.sent(table):
            if one.epsilon is None and one.columns != self._contract.columns_digest:
                raise DataError(
                    "numbers about these rows have left before under a contract with other columns or another loss "
                    f"(as {one.site}, {one.time[:10]}, run {one.run}): together they could single out rows. Join "
                    f"with the columns, knots and loss used then. {decide}"
                )

    def record(self, entry: Entry, table: Rows, *, once: bool = False) -> None:
        """Append an entry about a table to both copies, which are on disk when this returns.

        With ``once`` nothing is appended if the last entry is the same.
        """
        if once and (known := self.entries()) and msgspec.structs.replace(known[-1], time=entry.time) == entry:
            return
        marks = self.folder / f"{entry.rows}.rows"
        if entry.what in _LEAVES and not marks.exists():
            with _writing(marks):
                write_file(marks, msgspec.msgpack.encode(self._marks(table)), private=True)
        for path in self._copies:
            lines = _read_lines(path)
            before = lines[-1].digest if lines else ""
            text = msgspec.json.encode(_Line(before, entry, _link_digest(before, entry))) + b"\n"
            with _writing(path), open_private(path) as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # other sites of this user read all ledgers
                file.write(text)
                file.flush()
                os.fsync(file.fileno())

    def _elsewhere(self) -> Iterable[Entry]:
        """Yield the entries under any name, in any federation."""
        for path in sorted(self.folder.glob("*.jsonl")) if self.folder.is_dir() else ():
            yield from _since_withdrawal(read_ledger(path))


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Make the folder of a file that is written here; name the file if that is not possible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=PRIVATE_DIRECTORY)
        yield
    except OSError as error:
        raise DataError(
            f"{path} cannot be written ({error.strerror}), so nothing leaves; set {PLACE} to a folder of yours"
        ) from None


def read_ledger(path: Path) -> list[Entry]:
    """Return the entries in a file, oldest first; none if there is no file."""
    return [line.entry for line in _read_lines(path)]


def _read_lines(path: Path) -> list[_Line]:
    if not path.exists():
        return []
    before, lines = "", []
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            texts = file.read().splitlines()
        for text in texts:
            line, written = msgspec.json.decode(text, type=_Line), msgspec.json.decode(text)["entry"]
            if line.before != before or line.digest != _link_digest(before, written):
                raise ValueError
            before = line.digest
            lines.append(line)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        number = len(lines) + 1
        raise DataError(
            f"{path}, line {number}: damaged or changed by hand, so what has left is unknown; restore it from a copy"
        ) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from None
    return lines


def _since_withdrawal(entries: Iterable[Entry]) -> list[Entry]:
    known: list[Entry] = []
    for one in entries:
        if one.what == "withdrawn":
            known.clear()
        elif one.what in _LEAVES:
            known.append(one)
    return known


def _by_time(entries: Iterable[Entry]) -> list[Entry]:
    """Return different entries, oldest first."""
    return sorted(dict.fromkeys(entries), key=lambda one: one.time)


def _link_digest(before: str, entry: object) -> str:
    return hashlib.sha256(before.encode() + msgspec.json.encode(entry, order="sorted")).hexdigest()


# --- tables with rows in common ---------------------------------------------------------------------------------------


class _Marks(msgspec.Struct, frozen=True):
    """Fingerprint of a table: for each column each row's value, in the order of the rows."""

    columns: dict[str, bytes]

    @classmethod
    def from_columns(cls, cells: Mapping[str, Array]) -> _Marks:
        """Return the fingerprint of columns."""
        return cls({name: cells[name].astype("<f8").tobytes() for name in sorted(cells)})

    def near(self, other: _Marks) -> _Marks:
        """Return the fingerprint in which rows that are nearly rows of another table are exactly these.

        Another export may round or store values differently. Nothing changes where patients are alike by chance.
        """
        if self.columns.keys() != other.columns.keys():
            return self
        own, known = (
            np.stack([np.frombuffer(one) for one in table.columns.values()], axis=1) for table in (self, other)
        )
        size, rng = known.std(axis=0), np.random.default_rng(0)
        unit = _NEARBY * np.where(size > 0, size, 1.0)
        tree, some = KDTree(known / unit), own[:_MOST_SHUFFLED]
        shuffled = np.stack([rng.permutation(column) for column in some.T], axis=1)
        (by_chance, _), (apart, nearest) = (
            tree.query(one / unit, p=np.inf, distance_upper_bound=1.0) for one in (shuffled, own)
        )
        alike, chance = np.isfinite(apart), float(np.isfinite(by_chance).mean())
        if chance > _BY_CHANCE or alike.sum() <= _beyond(chance * len(own) + 1.0):
            return self
        found = own.copy()
        found[alike] = known[np.asarray(nearest)[alike]]
        return _Marks.from_columns(dict(zip(self.columns, found.T, strict=True)))

    def codes(self, name: str) -> AnyArray:
        return np.frombuffer(self.columns[name], dtype="<u8")

    def keys(self, names: Sequence[str]) -> Iterator[tuple[AnyArray, Sequence[str]]]:
        """Yield codes ``(n,)`` of rows by which to recognise patients: of all columns, of all but one, and of one."""
        parts = {name: mix(self.codes(name) ^ np.uint64(zlib.crc32(name.encode()))) for name in names}
        every = sum(parts.values(), start=np.zeros(next(iter(parts.values())).size, dtype=np.uint64))
        yield every, names
        if len(names) > 1:
            yield from ((every - parts[name], [other for other in names if other != name]) for name in names)
        if len(names) > 2:
            yield from ((parts[name], [name]) for name in names)


def _partly(one: _Marks, other: _Marks, fewest: int) -> bool | None:
    """Return whether two tables have some patients in common, and not exactly the same; None if they have none.

    They do if more rows than by chance are equal in all columns that both have, in all but one, or in one; or if the
    numbers of rows with each combination of values differ by fewer than ``fewest`` rows in total.
    """
    known, names = one.columns.keys() == other.columns.keys(), sorted(one.columns.keys() & other.columns.keys())
    if not names:
        return None
    agree = {name: min(_within(part.codes(name), 1) for part in (one, other)) for name in names}
    found = None
    for (first, by), (second, _) in zip(one.keys(names), other.keys(names), strict=True):
        n, m, whole = first.size, second.size, len(by) == len(names)
        counts = _counts(first, second)
        common, apart = int(counts.min(axis=0).sum()), int(np.ptp(counts, axis=0).sum())
        # columns that follow from each other agree more often than independent ones, but then also within tables
        within = _within(first), _within(second)
        if len(by) >= 3 or (known and whole):
            limit = _beyond(n * m * max(min(within), math.prod(agree[name] for name in by)))
        else:
            chance = n * m * max(within)
            limit = max(_beyond(chance), _ALIKE * min(n, m) + 3 * chance)
        alike = whole and (known or len(names) > 1) and apart < fewest
        if alike or common > limit:
            if apart:
                return True
            found = False
    return found


def _counts(first: AnyArray, second: AnyArray) -> AnyArray:
    """Return how many rows of each of two tables have each key ``(2, k)``."""
    values, which = np.unique(np.concatenate([first, second]), return_inverse=True)
    return np.stack([np.bincount(part, minlength=values.size) for part in np.split(which, [first.size])])


def _within(keys: AnyArray, more: int = 0) -> float:
    """Return the share of pairs of rows within a table that have the same key, if ``more`` pairs had."""
    times = np.unique(keys, return_counts=True)[1]
    return (int((times * (times - 1)).sum()) + more) / keys.size**2


def _beyond(chance: float) -> float:
    """Return how many rows may be alike where so many are by chance."""
    return chance + _DEVIATIONS * math.sqrt(chance)
