"""The ledger of everything that has left a site, and which earlier messages rule out sharing something.

It is append-only and hash-chained: every line has the digest of the line before. There are two copies, one in the
site's directory and one in a folder of the user (``FEDKIN_LEDGERS``, by default ``~/.local/share/fedkin/ledgers``)
named by run and site. Lines of both count, so a site that joins again in another directory, or whose files were
removed, is recognised as the same site. The folder also has the values of every shared table (``DIGEST.rows``), in the
units of the table. They identify tables that differ in only a few rows, in any federation, even under a contract that
prepares rows differently or has other columns, if a column has changed, or if values were rounded.
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
from scipy import sparse
from scipy.optimize import linprog
from scipy.spatial import KDTree

from fedkin._base import PRIVATE_DIRECTORY, AnyArray, Array, count, write_file
from fedkin.admm.availability import mix
from fedkin.core import composed_epsilon
from fedkin.data import Rows
from fedkin.errors import DataError
from fedkin.federate.settings import Thresholds, fewest_rows
from fedkin.federate.trust import open_private

if TYPE_CHECKING:
    from fedkin.federate.contract import Contract

_MANY_VALUES = 20  # distinct values, for each table compared, with which columns can tell patients apart
_ALIKE = 0.1  # share of rows in common, beyond three times those expected by chance, that makes tables overlap
_NOTHING = 1e-6  # rows
_NEARBY, _BY_CHANCE = 0.03, 0.02  # standard deviations within which values are alike; share of rows alike by chance
_MOST_SHUFFLED = 2000  # rows of which columns are shuffled, to see how many are alike by chance
_WITHDRAW = "If all of it has been withdrawn, record that{}: fedkin site ledger {} --withdrawn REASON"
_OTHERWISE = "Join with the table used then. " + _WITHDRAW.format(" there", "DIR")

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

        `check_differences`, which uses the site's ``own`` thresholds, covers other tables. ``private`` are the
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
        self.check_differences(table, own)
        lost = f": send {resend} again if it was lost" if resend else ""
        every = self.sent(table, overlapping=True)
        exact = [one for one in every if one.epsilon is None]
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

    def sent(self, table: Rows, *, overlapping: bool = False) -> list[Entry]:
        """Return the entries about these rows, or also of tables that have some of them; oldest first.

        Rows are recognised under any name, federation or preparation, and if one column has changed.
        """
        related = _overlap if overlapping else _same
        own, others = self._marks(table), self._others(table)
        rows = {table.digest, *(digest for digest, other in others.items() if related(own.near(other), other))}
        known = (*_since_withdrawal(self.entries()), *self._elsewhere())
        return _by_time(one for one in known if one.rows in rows)

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
                    f"{_WITHDRAW.format(' there', 'DIR')}"
                ) from error
        return found

    def check_differences(self, table: Rows, own: Thresholds) -> None:
        """Raise `DataError` if earlier tables and this one differ in too few rows, or if it was shared in another way.

        Tables are combined as anyone with the sums of all of them could do: if the sums of this table minus multiples
        of earlier ones leave fewer rows than the threshold, nothing is shared. Nothing more of a table is shared under
        a contract with other prepared columns or another loss, unless the site's custodian has lifted the hard minima:
        combined, curves with other knots single out one patient.
        """
        fewest, marks, others = fewest_rows(self._contract, own), self._marks(table), self._others(table)
        when = {one.rows: f"as {one.site}, {one.time[:10]}, run {one.run}" for one in self._elsewhere()}
        for rows, other in others.items():
            if (n := min(_fewest_left(one, [other]) for one in (marks, marks.near(other)))) < fewest:
                raise DataError(
                    f"numbers from a table that differs from this one in {count(math.ceil(n), 'row')} have left before "
                    f"({when.get(rows, 'the line in the ledger is lost')}): the difference would reveal these rows; at "
                    f"least {fewest} are needed. {_OTHERWISE}"
                )
        like = [other for other in others.values() if other.columns.keys() == marks.columns.keys()]
        if len(like) > 1 and (n := _fewest_left(marks, like)) < fewest:
            raise DataError(
                f"numbers from {len(like)} tables have left before, and the sums of this one minus theirs would reveal "
                f"{count(math.ceil(n), 'row')}; at least {fewest} are needed. {_OTHERWISE}"
            )
        for one in () if own.lowers_minima else self.sent(table, overlapping=True):
            if one.epsilon is None and one.columns != self._contract.columns_digest:
                raise DataError(
                    "numbers about these rows have left before under a contract with other columns or another loss "
                    f"(as {one.site}, {one.time[:10]}, run {one.run}): together they could single out rows. Join "
                    "with the columns, knots and loss used then. If the custodian decides otherwise: fedkin site "
                    f"settings {self.directory} --below-minima"
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
        alike = np.isfinite(apart)
        if np.isfinite(by_chance).mean() > _BY_CHANCE or alike.mean() < _ALIKE:
            return self
        found = own.copy()
        found[alike] = known[np.asarray(nearest)[alike]]
        return _Marks.from_columns(dict(zip(self.columns, found.T, strict=True)))

    def codes(self, name: str) -> AnyArray:
        return np.frombuffer(self.columns[name], dtype="<u8")

    def keys(self, names: Sequence[str]) -> Iterator[AnyArray]:
        """Yield codes ``(n,)`` of rows by which to recognise patients: of all columns, of all but one, and of one."""
        parts = {name: mix(self.codes(name) ^ np.uint64(zlib.crc32(name.encode()))) for name in names}
        every = sum(parts.values(), start=np.zeros(next(iter(parts.values())).size, dtype=np.uint64))
        yield every
        if len(names) > 1:
            yield from (every - parts[name] for name in names)
        if len(names) > 2:
            yield from (parts[name] for name in names)


def _shared_keys(tables: Sequence[_Marks]) -> Iterator[list[AnyArray]]:
    """Yield keys of the rows of each table, by the columns that all tables have."""
    if names := sorted(set.intersection(*(set(one.columns) for one in tables))):
        yield from (list(keys) for keys in zip(*(one.keys(names) for one in tables), strict=True))


def _same(one: _Marks, other: _Marks) -> bool:
    """Return whether two tables have the same rows, by the columns they share."""
    known = one.columns.keys() == other.columns.keys()
    for first, second in _shared_keys([one, other]):
        return (known or _tells([first, second])) and np.array_equal(np.sort(first), np.sort(second))
    return False


def _overlap(one: _Marks, other: _Marks) -> bool:
    """Return whether two tables have rows in common: equal in all columns, or in fewer, beyond chance."""
    known = one.columns.keys() == other.columns.keys()
    for number, (first, second) in enumerate(_shared_keys([one, other])):
        if not (common := np.intersect1d(first, second).size):
            continue
        times = np.unique(first, return_counts=True)[1]
        chance = second.size * float((times * (times - 1)).sum()) / max(first.size - 1, 1)
        if (known and number == 0) or common > _ALIKE * min(first.size, second.size) + 3 * chance:
            return True
    return _same(one, other)


def _tells(keys: Sequence[AnyArray]) -> bool:
    """Return whether different patients have different keys often enough to tell tables apart by them."""
    return np.unique(keys[0]).size > _MANY_VALUES * (len(keys) - 1)


def _fewest_left(own: _Marks, others: Sequence[_Marks]) -> float:
    """Return the fewest rows left in sums of a table minus multiples of those of others; infinity if they cancel.

    Rows are counted by each key: equal keys cancel. Sums that cancel reveal nothing new.
    """
    least = math.inf
    for number, keys in enumerate(_shared_keys([own, *others])):
        whole = number == 0 and len(others) == 1 and own.columns.keys() == others[0].columns.keys()
        if not whole and not _tells(keys):
            continue
        values, which = np.unique(np.concatenate(keys), return_inverse=True)
        table = np.repeat(np.arange(len(keys)), [one.size for one in keys])
        counts = np.bincount(which * len(keys) + table, minlength=values.size * len(keys)).reshape(-1, len(keys))
        kinds, times = np.unique(counts, axis=0, return_counts=True)
        left = _least_absolute(kinds[:, 0].astype(float), kinds[:, 1:].astype(float), times.astype(float))
        least = min(least, left if left > _NOTHING else math.inf)
    return least


def _least_absolute(y: Array, X: Array, weight: Array) -> float:
    """Return the smallest weighted sum of absolute residuals of ``y`` on the columns of ``X``."""
    n, p = X.shape
    cost = np.concatenate([np.zeros(p), weight, weight])
    equal = sparse.hstack([sparse.csr_array(X), sparse.eye_array(n), -sparse.eye_array(n)])
    limits = [(None, None)] * p + [(0, None)] * (2 * n)
    return float(linprog(cost, A_eq=equal, b_eq=y, bounds=limits).fun)  # type: ignore[call-overload]  # sparse
