"""The ledger of a site: what left it, when, to whom, from which rows, under which contract, at which epsilon.

It is append-only and hash-chained: every line has the digest of the line before. There are two copies, one in the
site's directory and one in a folder of the user (``FEDKIN_LEDGERS``, by default ``~/.local/share/fedkin/ledgers``)
under the names of run and site. Lines of both count. So a site that joins again in another directory, or whose files
were removed, is the same site. The folder also has short digests of the rows of every table of which something left
(``DIGEST.rows``), so that a table that differs from it in few rows is recognised in any federation.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from fedkin._base import PRIVATE_DIRECTORY, count, write_file
from fedkin.core import composed_epsilon
from fedkin.data import Rows
from fedkin.errors import DataError
from fedkin.federate.trust import open_private

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
            text = msgspec.json.encode(_Line(before, entry, _digest(before, entry))) + b"\n"
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
            if line.before != before or line.digest != _digest(before, written):
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


def _digest(before: str, entry: object) -> str:
    return hashlib.sha256(before.encode() + msgspec.json.encode(entry, order="sorted")).hexdigest()
