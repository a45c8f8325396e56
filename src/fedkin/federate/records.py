"""What a site writes down: its log, JSON files, each with a digest of its content, and the ledger of what left it.

A damaged disk must not change them unnoticed; only their owner may read them.

The ledger is append-only and hash-chained: every line has the digest of the line before. There are two copies, one in
the site's directory and one in a folder of the user (``FEDKIN_LEDGERS``, by default ``~/.local/share/fedkin/ledgers``)
under the names of run and site. Lines of both count. So a site that joins again in another directory, or whose files
were removed, is the same site. The folder also has short digests of the rows of every table of which something left
(``DIGEST.rows``), so that a table that differs from it in few rows is recognised in any federation.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec
import numpy as np

from fedkin._base import PRIVATE_DIRECTORY, PRIVATE_FILE, count, write_file
from fedkin.core import composed_epsilon
from fedkin.data import Rows
from fedkin.errors import DataError
from fedkin.federate.trust import open_private

if TYPE_CHECKING:
    from fedkin.federate.plan import SitePlan


_MOST_COUNTED = 2000  # pairs of event and peer
#: A log that has grown to so many bytes becomes ``NAME.old``, in place of the one before, and a new one begins.
MOST_BYTES = 4 << 20


class Journal:
    """Appends events of one site, which every line names, to a file, and to standard error if asked (``echo``).

    Only what this program saw is written. Whatever others choose (names in certificates, reasons) is inside a JSON
    string, so a line is always one event. Log and predecessor (``NAME.old``) take at most twice ``most_bytes``.
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
        """Write a line: time, level, site, event, and what else is known."""
        with self._lock:
            self.counts[event] += 1
            self._put(level, event, fields)

    def sparingly(self, level: str, event: str, **fields: object) -> None:
        """Like `write`, but of the same event and peer only the 1st, 2nd, 4th, 8th, ... time, with the count.

        What an intruder can cause must not fill the disk, nor the memory: of very many peers, the later are counted
        together.
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
        """Close the file; later lines are counted only."""
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
PRESENCE = "presence.npz"  # of the central machine or a leader: who was there in which round
RECORD = "record.bin"  # of a leader: what it decided since the last checkpoint
STDERR = "stderr.txt"  # of a site under supervision
#: State of a site that cannot write what has to be written before it goes on.
HOLDING = "holding: no room for a checkpoint"
#: State of a site that ended with an error.
CANNOT = "cannot go on"
#: Shares of the certificate that a site tells its owner, the newest.
MOST_SHARES = 40


class SiteStatus(msgspec.Struct, kw_only=True):
    """What a site says about itself while it runs, ``status.json``; the defaults are those of a site that never ran.

    ``up`` are partners that are there; ``change`` is that of theta in the last round; ``sent`` the bytes so far;
    ``shares`` what the site adds to the certificate in some of the last rounds (`fedkin.admm.Share`); ``arrived`` the
    rows that were taken in during the run, ``new_loss`` the loss of the newest before they were used, with its standard
    error, ``changed`` the arrived row from which on they follow other parameters; ``why`` the reason when it cannot go
    on, or whose key it refuses.
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
    """What edge selection found at a site, ``selection.json``: p-values of its edges, and whose edge is dropped."""

    run: str
    revision: int
    threshold: float
    p_values: dict[str, float]
    dropped: list[str]


class Choice(msgspec.Struct, frozen=True):
    """The ``lam`` that sites have chosen, ``choice.json``: levels, and sums over sites of mean held-out losses."""

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
    """Return what `write_record` wrote; raises `DataError` when the file is missing, damaged or was changed by hand."""
    try:
        content = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        told = content.pop("digest")
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from None
    except (msgspec.MsgspecError, ValueError, KeyError, RecursionError):
        raise DataError(f"{path} is damaged: it is not a record with a digest") from None
    if told != _digest(content):
        raise DataError(f"{path} is damaged: its digest does not fit its content")
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise DataError(f"{path} was written by another version of Fedkin: {error}") from None


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.blake2b(msgspec.json.encode(content, order="deterministic"), digest_size=16).hexdigest()


def read_status(place: Path) -> SiteStatus:
    """Return what a site last said about itself; the defaults when it never ran, or the file is damaged."""
    try:
        return read_record(place / STATUS, SiteStatus)
    except DataError:
        return SiteStatus()


def read_choice(place: Path, run: str, revision: int) -> float | None:
    """Return the ``lam`` that was chosen in this run and revision, None before that."""
    path = place / CHOICE
    found = read_record(path, Choice) if path.exists() else None
    return found.lam if found is not None and (found.run, found.revision) == (run, revision) else None


def read_selection(place: Path, plan: SitePlan) -> frozenset[int]:
    """Return the numbers of neighbours whose edge was dropped by edge selection."""
    if plan.select is None:
        return frozenset()
    path = place / SELECTION
    if not path.exists():
        raise DataError(f"edges are not tested yet: fedkin site select {place}")
    chosen = read_record(path, Selection)
    if (chosen.run, chosen.revision) != (plan.run, plan.revision):
        raise DataError(f"{path} belongs to another run or order: fedkin site select {place}")
    return frozenset(plan.number(name) for name in chosen.dropped)


FILE = "ledger.jsonl"
PLACE = "FEDKIN_LEDGERS"  #: environment variable with the user's folder of ledgers

What = Literal["share", "answer", "request", "select", "run", "publish", "arrived", "withdrawn", "settings"]
#: Entries after which numbers that depend on rows are elsewhere.
_LEAVES = ("share", "answer", "request", "select", "run", "publish")


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line: what left, to whom, and from which rows (their digest). ``epsilon`` and ``delta`` if it was private.

    Of sums, ``at`` is the point at which they were taken, ``folds`` says which folds they were in, if any.
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

    @property
    def same(self) -> tuple[object, ...]:
        """What an entry is about, whenever it was."""
        return tuple(getattr(self, name) for name in self.__struct_fields__ if name != "time")


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    before: str
    entry: Entry
    digest: str


class Ledger:
    """The ledger of the site called ``site`` in a run, whose directory is ``directory``."""

    def __init__(self, directory: Path, run: str, site: str) -> None:
        self.directory, self.run, self.site = directory, run, site
        given = os.environ.get(PLACE)
        data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
        self.folder = Path(given) if given else data / "fedkin" / "ledgers"

    @property
    def _copies(self) -> tuple[Path, Path]:
        return self.directory / FILE, self.folder / f"{self.run}-{self.site}.jsonl"

    def entries(self) -> list[Entry]:
        """Return all entries of this site, oldest first; raises `DataError` when a copy was changed."""
        found = {(one.time, one.same): one for path in self._copies for one in read_ledger(path)}
        return [found[key] for key in sorted(found, key=lambda key: key[0])]

    def check(
        self,
        what: What,
        table: Rows,
        fewest: int,
        *,
        private: tuple[float, float] | None = None,
        budget: float = 0.0,
        resend: str = "",
    ) -> None:
        """Raise `DataError` when something about these rows may not leave after what has left before.

        At least ``fewest`` rows must be in one only of this table and another of which something left, or none.
        ``private`` are its epsilon and delta. All messages with noise about the same rows, in any federation, may have
        ``budget`` together, by default that of the first. ``resend`` is the file that can be sent again where noise
        was added.
        """
        known, rows = _since_withdrawal(self.entries()), table.digest
        again = f"If all of it has been withdrawn, record that: fedkin site ledger {self.directory} --withdrawn REASON"
        if any(one.rows != rows for one in known):
            raise DataError(
                "numbers from other rows have left this site before: the difference would give away the rows that "
                f"changed. Join with the table of that time. {again}"
            )
        self._check_differences(table, rows, fewest)
        lost = f": send {resend} again if it was lost" if resend else ""
        every = self.sent(rows)
        exact = [one for one in every if one.epsilon is None]
        noisy = [(one.epsilon, one.delta or 0.0) for one in every if one.epsilon is not None]
        if private is not None and exact:
            raise DataError(
                f"numbers without noise have left this site before ({exact[-1].what}), so that noise would promise "
                f"nothing{lost}. {again}"
            )
        if noisy:
            told = f"sums with noise (epsilon {noisy[0][0]:g}) of these rows were shared before{lost}."
            total = math.inf if private is None else composed_epsilon((*noisy, private))
            if not total <= budget:
                most = budget or noisy[0][0]
                more = f" (epsilon {total:.3g} together, and at most {most:g} may be spent)" if private else ""
                raise DataError(f"{told} {what.capitalize()} would tell more than was promised then{more}. {again}")
        elif private is not None and budget and private[0] > budget:
            raise DataError(f"epsilon is {private[0]:g}, but this site may spend {budget:g} at most: nothing is shared")

    def sent(self, rows: str) -> list[Entry]:
        """Return what left of the rows with this digest, under any name, in any federation, oldest first."""
        known = (*_since_withdrawal(self.entries()), *self._elsewhere())
        found = {(one.time, one.same): one for one in known if one.rows == rows}
        return [found[key] for key in sorted(found, key=lambda key: key[0])]

    def _check_differences(self, table: Rows, rows: str, fewest: int) -> None:
        others = {one.rows: one for one in self._elsewhere() if one.rows != rows}
        known = [(one, self.folder / f"{one.rows}.rows") for one in others.values()]
        own = table.row_digests() if known else np.zeros(0, dtype=np.uint64)
        for one, path in known:
            if not path.exists():
                continue
            text = path.read_bytes()
            if len(text) % 8:
                raise DataError(f"{path} is damaged, so nobody knows which rows have left; restore it from a copy")
            if (n := np.setxor1d(own, np.frombuffer(text, dtype="<u8")).size) < fewest:
                raise DataError(
                    f"numbers from a table that differs from this one in {count(n, 'row')} have left before (as "
                    f"{one.site}, {one.time[:10]}, run {one.run}): the difference would give these rows away, at least "
                    f"{fewest} are needed. Join with the table of that time. If all of it has been withdrawn, record "
                    "that there: fedkin site ledger DIR --withdrawn REASON"
                )

    def record(self, entry: Entry, table: Rows, *, once: bool = False) -> None:
        """Append an entry about a table to both copies, on disk before this returns.

        With ``once`` nothing is appended when the last entry is the same.
        """
        if once and (known := self.entries()) and known[-1].same == entry.same:
            return
        path = self.folder / f"{entry.rows}.rows"
        try:
            if entry.what in _LEAVES and not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True, mode=PRIVATE_DIRECTORY)
                write_file(path, table.row_digests().astype("<u8").tobytes(), private=True)
        except OSError as error:
            raise _unwritable(path, error) from None
        for path in self._copies:
            lines = _read_lines(path)
            before = lines[-1].digest if lines else ""
            text = msgspec.json.encode(_Line(before, entry, _link_digest(before, entry))) + b"\n"
            try:
                path.parent.mkdir(parents=True, exist_ok=True, mode=PRIVATE_DIRECTORY)
                with open_private(path) as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                raise _unwritable(path, error) from None

    def _elsewhere(self) -> Iterable[Entry]:
        """Yield what left under any name, in any federation."""
        for path in sorted(self.folder.glob("*.jsonl")) if self.folder.is_dir() else ():
            yield from _since_withdrawal(read_ledger(path))


def _unwritable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"{path} cannot be written ({error.strerror}), so nothing leaves; set {PLACE} to a folder of yours"
    )


def now() -> str:
    """Return the time, as entries have it."""
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%fZ}"


def read_ledger(path: Path) -> list[Entry]:
    """Return the entries in a file, oldest first; none where there is no file."""
    return [line.entry for line in _read_lines(path)]


def _read_lines(path: Path) -> list[_Line]:
    if not path.exists():
        return []
    before, lines = "", []
    try:
        for text in path.read_bytes().splitlines():
            line, written = msgspec.json.decode(text, type=_Line), msgspec.json.decode(text)["entry"]
            if line.before != before or line.digest != _link_digest(before, written):
                raise ValueError
            before = line.digest
            lines.append(line)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        number = len(lines) + 1
        raise DataError(
            f"{path}, line {number}: damaged, or changed by hand, so nobody knows what has left; restore it from a copy"
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
