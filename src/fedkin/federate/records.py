"""What a running site writes into its directory: its log, and small JSON files, each with a digest of its content.

A damaged disk must not change them unnoticed; only their owner may read them.
"""

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
