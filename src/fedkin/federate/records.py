"""A site's records: its log, JSON files with a digest of their content, and the ledger of everything that has left it.

Damage is detected when they are read, and only their owner may read them.

The ledger is append-only and hash-chained: every line has the digest of the line before. There are two copies, one in
the site's directory and one in a folder of the user (``FEDKIN_LEDGERS``, by default ``~/.local/share/fedkin/ledgers``)
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
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec
import numpy as np
from scipy import sparse
from scipy.optimize import linprog
from scipy.spatial import KDTree

from fedkin._base import PRIVATE_DIRECTORY, PRIVATE_FILE, AnyArray, Array, count, write_file
from fedkin.admm.availability import mix
from fedkin.core import composed_epsilon
from fedkin.data import Rows
from fedkin.errors import DataError
from fedkin.federate.disclosure import Thresholds, fewest_rows
from fedkin.federate.trust import open_private

if TYPE_CHECKING:
    from fedkin.federate.contract import Contract
    from fedkin.federate.plan import SitePlan


_MANY_VALUES = 20  # distinct values, for each table compared, with which columns can tell patients apart
_ALIKE = 0.1  # share of rows in common, beyond three times those expected by chance, that makes tables overlap
_NOTHING = 1e-6  # rows
_NEARBY, _BY_CHANCE = 0.03, 0.02  # standard deviations within which values are alike; share of rows alike by chance
_OTHERWISE = (
    "Join with the table used then. If all of it has been withdrawn, record that there: fedkin site ledger DIR "
    "--withdrawn REASON"
)
_MOST_SHUFFLED = 2000  # rows of which columns are shuffled, to see how many are alike by chance
_MOST_COUNTED = 2000  # pairs of event and peer
#: A log that reaches this size in bytes replaces ``NAME.old``, and a new one begins.
MOST_BYTES = 4 << 20


class Journal:
    """Log of one site's events, in a file and, with ``echo``, on standard error. Every line names the site.

    Text chosen by others (names in certificates, reasons) is inside a JSON string, so a line is always one event. The
    log and its predecessor (``NAME.old``) take at most twice ``most_bytes``.
    """

    def __init__(
        self, site: str, path: Path | None = None, *, echo: bool = False, most_bytes: int = MOST_BYTES
    ) -> None:
        self.site, self.echo, self._path, self._most_bytes = site, echo, path, most_bytes
        self._lock = threading.Lock()
        self._file: int | None = None
        self._size = 0
        if path is not None:
            self._open(path)
        #: How often each event was written or counted.
        self.counts: Counter[str] = Counter()

    def write(self, level: str, event: str, **fields: object) -> None:
        """Write a line: time, level, site, event and further facts."""
        with self._lock:
            self.counts[event] += 1
            self._put(level, event, fields)

    def sparingly(self, level: str, event: str, **fields: object) -> None:
        """Write a line with a count, only for the 1st, 2nd, 4th, 8th, ... occurrence of the same event and peer.

        So events that an intruder can cause fill neither the disk nor the memory. Beyond a limit, further peers are
        counted together.
        """
        name = f"{event} {fields.get('peer')}"
        with self._lock:
            if name not in self.counts and len(self.counts) >= _MOST_COUNTED:
                name = f"{event} and others"
            self.counts[event] += 1
            self.counts[name] += 1
            times = self.counts[name]
            if times & (times - 1) == 0:
                self._put(level, event, {**fields, "times": times})

    def close(self) -> None:
        """Close the file; later lines are only counted."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _put(self, level: str, event: str, fields: dict[str, object]) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime()) + f".{int(time.time() * 1000) % 1000:03d}Z"
        facts = {"time": stamp, "level": level, "site": self.site, "event": event, **fields}
        line = msgspec.json.encode(facts, enc_hook=str)
        try:
            if self._file is not None:
                self._append(line + b"\n")
            if self.echo:
                sys.stderr.write(line.decode() + "\n")
        except OSError:
            # a full disk must not stop a site that can still compute; checkpoints report it
            self.counts["log lines lost"] += 1

    def _open(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, PRIVATE_FILE)
        self._size = os.fstat(self._file).st_size
        # half a line, from a crash or a full disk, must not swallow the next one
        self._torn = self._size > 0 and os.pread(self._file, 1, self._size - 1) != b"\n"

    def _append(self, line: bytes) -> None:
        if self._size + len(line) > self._most_bytes and self._path is not None:
            self._path.replace(self._path.with_name(f"{self._path.name}.old"))
            assert self._file is not None
            os.close(self._file)
            self._open(self._path)
        assert self._file is not None
        text = b"\n" + line if self._torn else line
        self._torn = True  # until all of it is there
        written = os.write(self._file, text)
        self._size += written
        self._torn = written < len(text)
        if self._torn:
            raise OSError("half a line")


T = TypeVar("T")

STATE, LOG, STATUS, LOCK = "state.db", "log.jsonl", "status.json", "lock"
CHOICE, CHOICE_STATE = "choice.json", "choice.db"  # the lam that sites chose, and the state of the rounds before it
SELECTION = "selection.json"  # p-values of the site's edges, and which of them it dropped
PRESENCE = "presence.npz"  # of the central machine or a leader: which sites took part in each round
RECORD = "record.bin"  # of a leader: its decisions since the last checkpoint
STDERR = "stderr.txt"  # of a site under supervision
#: State of a site that must write a checkpoint before it continues, and cannot.
HOLDING = "waiting: no space for a checkpoint"
#: State of a site that ended with an error.
CANNOT = "cannot go on"
#: Number of newest certificate shares that a site reports to its owner.
MOST_SHARES = 240


class SiteStatus(msgspec.Struct, kw_only=True):
    """Status of a site while it runs, ``status.json``; the defaults describe a site that never ran.

    ``up`` are the connected partners; ``change`` is the change of theta in the last round; ``sent`` the bytes so far;
    ``shares`` the site's share of the certificate in some of the last rounds (`fedkin.admm.Share`); ``arrived`` the
    rows taken in during the run, ``new_loss`` the loss of the newest rows before they were used, with its standard
    error, ``changed`` the arrived row from which the data follow other parameters; ``why`` why it cannot continue, or
    the site whose key it refuses.
    """

    pid: int | None = None
    time: float | None = None
    state: str = "never started"
    round: int = 0
    rounds: int = 0
    change: float | None = None
    up: set[str] = set()
    waiting_for: list[str] = []
    pulled: int = 0
    repaired: int = 0
    started: float = 0.0
    restarts: int = 0
    sent: int = 0
    shares: list[list[float | None]] = []
    arrived: int = 0
    new_loss: float | None = None
    new_error: float | None = None
    changed: int | None = None
    why: str | None = None


class Selection(msgspec.Struct, frozen=True):
    """Result of edge selection at a site, ``selection.json``: p-values of its edges, and which edges are dropped."""

    run: str
    revision: int
    threshold: float
    p_values: dict[str, float]
    dropped: list[str]


class Choice(msgspec.Struct, frozen=True):
    """The ``lam`` chosen by the sites, ``choice.json``: levels, and sums over sites of mean held-out losses."""

    run: str
    revision: int
    lam: float
    levels: list[float]
    losses: list[float]
    sites: int


def write_record(path: Path, content: msgspec.Struct | Mapping[str, Any]) -> None:
    """Replace a file that only its owner may read."""
    fields = msgspec.to_builtins(content, order="deterministic")
    whole = msgspec.json.encode({**fields, "digest": _digest(fields)})
    write_file(path, msgspec.json.format(whole, indent=1).decode() + "\n", private=True)


def read_record(path: Path, kind: type[T] = dict) -> T:  # type: ignore[assignment]
    """Return what `write_record` wrote; raise `DataError` if the file is missing, damaged or was changed by hand."""
    try:
        content = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        told = content.pop("digest")
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from None
    except (msgspec.MsgspecError, ValueError, KeyError, RecursionError):
        raise DataError(f"{path} is damaged: it is not a record with a digest") from None
    if told != _digest(content):
        raise DataError(f"{path} is damaged: its digest does not match its content")
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise DataError(f"{path} was written by another version of Fedkin: {error}") from None


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.blake2b(msgspec.json.encode(content, order="deterministic"), digest_size=16).hexdigest()


def read_status(place: Path) -> SiteStatus:
    """Return the last status of a site; the defaults if it never ran or the file is damaged."""
    try:
        return read_record(place / STATUS, SiteStatus)
    except DataError:
        return SiteStatus()


def read_choice(place: Path, run: str, revision: int) -> float | None:
    """Return the ``lam`` chosen in this run and revision; None before the choice."""
    path = place / CHOICE
    found = read_record(path, Choice) if path.exists() else None
    return found.lam if found is not None and (found.run, found.revision) == (run, revision) else None


def read_selection(place: Path, plan: SitePlan) -> frozenset[int]:
    """Return the numbers of the neighbours whose edges edge selection dropped."""
    if plan.select is None:
        return frozenset()
    path = place / SELECTION
    if not path.exists():
        raise DataError(f"the edges have not been tested yet; to test them: fedkin site select {place}")
    chosen = read_record(path, Selection)
    if (chosen.run, chosen.revision) != (plan.run, plan.revision):
        raise DataError(f"{path} belongs to another run or order; to test again: fedkin site select {place}")
    return frozenset(plan.number(name) for name in chosen.dropped)


FILE = "ledger.jsonl"
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
    time: str
    note: str = ""
    epsilon: float | None = None
    delta: float | None = None
    at: tuple[float, ...] = ()
    folds: str = ""
    columns: str = ""
    sums: str = ""

    @property
    def same(self) -> tuple[object, ...]:
        """Return the content of an entry without its time."""
        return tuple(getattr(self, name) for name in self.__struct_fields__ if name != "time")


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    before: str
    entry: Entry
    digest: str


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


class Ledger:
    """Ledger of the site called ``site`` in ``directory``, for one run under a contract."""

    def __init__(self, directory: Path, run: str, site: str, contract: Contract) -> None:
        self.directory, self.run, self.site, self._contract = directory, run, site, contract
        given = os.environ.get(PLACE)
        data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
        self.folder = Path(given) if given else data / "fedkin" / "ledgers"

    @property
    def _copies(self) -> tuple[Path, Path]:
        return self.directory / FILE, self.folder / f"{self.run}-{self.site}.jsonl"

    def entries(self) -> list[Entry]:
        """Return all entries of this site, oldest first; raise `DataError` if a copy was changed."""
        found = {(one.time, one.same): one for path in self._copies for one in read_ledger(path)}
        return [found[key] for key in sorted(found, key=lambda key: key[0])]

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
        again = f"If all of it has been withdrawn, record that: fedkin site ledger {self.directory} --withdrawn REASON"
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
        found = {(one.time, one.same): one for one in known if one.rows in rows}
        return [found[key] for key in sorted(found, key=lambda key: key[0])]

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
                    "If all of it has been withdrawn, record that there: fedkin site ledger DIR --withdrawn REASON"
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
                    f"(as {one.site}, {one.time[:10]}, run {one.run}): together they could single rows out. Join "
                    "with the columns, knots and loss used then. If the custodian decides otherwise: fedkin site "
                    f"settings {self.directory} --below-minima"
                )

    def record(self, entry: Entry, table: Rows, *, once: bool = False) -> None:
        """Append an entry about a table to both copies, which are on disk when this returns.

        With ``once`` nothing is appended if the last entry is the same.
        """
        if once and (known := self.entries()) and known[-1].same == entry.same:
            return
        path = self.folder / f"{entry.rows}.rows"
        try:
            if entry.what in _LEAVES and not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True, mode=PRIVATE_DIRECTORY)
                write_file(path, msgspec.msgpack.encode(self._marks(table)), private=True)
        except OSError as error:
            raise _unwritable(path, error) from None
        for path in self._copies:
            lines = _read_lines(path)
            before = lines[-1].digest if lines else ""
            text = msgspec.json.encode(_Line(before, entry, _link_digest(before, entry))) + b"\n"
            try:
                path.parent.mkdir(parents=True, exist_ok=True, mode=PRIVATE_DIRECTORY)
                with open_private(path) as file:
                    fcntl.flock(file, fcntl.LOCK_EX)  # other sites of this user read all ledgers
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                raise _unwritable(path, error) from None

    def _elsewhere(self) -> Iterable[Entry]:
        """Yield the entries under any name, in any federation."""
        for path in sorted(self.folder.glob("*.jsonl")) if self.folder.is_dir() else ():
            yield from _since_withdrawal(read_ledger(path))


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


def _unwritable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"{path} cannot be written ({error.strerror}), so nothing leaves; set {PLACE} to a folder of yours"
    )


def now() -> str:
    """Return the time in the format of entries."""
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%fZ}"


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


def _link_digest(before: str, entry: object) -> str:
    return hashlib.sha256(before.encode() + msgspec.json.encode(entry, order="sorted")).hexdigest()
