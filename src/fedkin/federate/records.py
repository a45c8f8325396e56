"""A site's log, and JSON files with a digest of their content, which only their owner may read."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from fedkin._base import PRIVATE_FILE, write_file
from fedkin.errors import DataError
from fedkin.federate.messages import ARRIVED

if TYPE_CHECKING:
    from fedkin.federate.plan import SitePlan

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


# --- rows that arrived while the site ran -----------------------------------------------------------------------------

ARRIVED_LIST = "list.json"


class Part(msgspec.Struct, frozen=True):
    """Rows that were taken in together: their file, and the revision and round from which they are used.

    ``loss`` and ``error`` are the mean loss of these rows before they were used, and its standard error.
    """

    file: str
    revision: int
    round: int
    loss: float
    error: float


class Seen(msgspec.Struct, frozen=True):
    """Number of rows of a file that were taken in, and their digest."""

    rows: int
    digest: str


class Arrived(msgspec.Struct, frozen=True):
    """List of everything that has arrived at a site, ``arrived/list.json``."""

    parts: tuple[Part, ...] = ()
    seen: dict[str, Seen] = {}


def read_arrived(directory: Path) -> Arrived:
    """Read the list in a site's directory; it is empty if nothing has arrived."""
    path = directory / ARRIVED / ARRIVED_LIST
    if not path.exists():
        return Arrived()
    try:
        return msgspec.json.decode(path.read_bytes(), type=Arrived)
    except msgspec.DecodeError as error:
        raise DataError(f"{path} is damaged ({error}); put a copy back, or join again") from None
