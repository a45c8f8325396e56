"""Store the state of a run on disk: its state after a round, and the recently sent vectors.

The store is one SQLite file in write-ahead mode. Every save is one transaction, which reaches the kernel but does not
wait for the disk, so it survives a killed process. A durable save also moves the log into the file and waits for the
disk, so after a power failure the run goes back at most to the last durable save. Records belong to a run and its
revision and carry a digest: damaged records are reported and never used.
"""

from __future__ import annotations

import errno
import hashlib
import os
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fedkin._base import Array
from fedkin.errors import ModelFileError

NamedArrays = Mapping[str, NDArray[Any]]

#: Marks the file as ours, and its format.
_APPLICATION, _FORMAT = 0x66656B69, 1
_TABLES = """
create table state (slot integer primary key, run text, revision integer, round integer, header text, digest blob,
    content blob);
create table sent (kind integer, slot integer, run text, revision integer, round integer, digest blob, content blob,
    primary key (kind, slot)) without rowid;
"""
_PRIVATE = 0o600


@dataclass(frozen=True, eq=False)
class Saved:
    """State read from a checkpoint."""

    round: int
    arrays: dict[str, NDArray[Any]]
    header: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Sent:
    """Sent vector: its kind, round and values ``(n,)``."""

    kind: int
    round: int
    values: Array


class Store:
    """Checkpoint file of one run, created at the first save; states of other runs or revisions are ignored.

    Sent vectors are kept for ``sent`` rounds.
    """

    def __init__(self, path: str | os.PathLike[str], run: str, revision: int = 0, *, sent: int = 1) -> None:
        self.path, self.run, self.revision, self._sent = Path(path), run, revision, sent
        self._open: sqlite3.Connection | None = None

    def save(
        self, round: int, arrays: NamedArrays, header: Mapping[str, Any], sent: Iterable[Sent] = (), *, durable: bool
    ) -> None:
        """Write the state after a round and the vectors sent in it, in one transaction.

        Raise `OSError` when writing fails; earlier saves are kept.
        """
        parts = [np.ascontiguousarray(part) for part in arrays.values()]
        layout = {name: [part.dtype.str, part.shape] for name, part in zip(arrays, parts, strict=True)}
        text = msgspec.json.encode({"arrays": layout, "header": dict(header)}).decode()
        content = b"".join([part.tobytes() for part in parts])
        state = (self.run, self.revision, round, text, self._digest(round, text, content), content)
        try:
            file = self._open = self._open or self._connect()
            file.execute("begin")
            file.execute("replace into state values (0, ?, ?, ?, ?, ?, ?)", state)
            for one in sent:
                numbers = one.values.tobytes()
                where = (one.kind, one.round % self._sent, self.run, self.revision, one.round)
                record = (*where, self._digest(one.round, one.kind, numbers), numbers)
                file.execute("replace into sent values (?, ?, ?, ?, ?, ?, ?)", record)
            file.execute("commit")
            if durable:
                self._flush(file)
        except sqlite3.OperationalError as error:
            # the next attempt opens a new connection, because the state of this one is unknown
            self.close()
            raise OSError(errno.EIO, f"{self.path}: {error}") from None
        except (sqlite3.DatabaseError, OverflowError) as error:
            self.close()
            raise self._damaged(error) from None

    def _flush(self, file: sqlite3.Connection) -> None:
        blocked, _, _ = file.execute("pragma wal_checkpoint(truncate)").fetchone()
        if blocked:
            raise sqlite3.OperationalError("another process reads the file")

    def _digest(self, round: int, what: object, content: bytes) -> bytes:
        return _digest(self.run, self.revision, round, what, content)

    def load(self) -> Saved | None:
        """Return the last state of this run and revision; None if there is none.

        Raises `ModelFileError` when the file or the record is damaged.
        """
        self._check()
        query = "select round, header, digest, content from state where run = ? and revision = ?"
        for round, text, digest, content in self._read(query):
            if self._digest(round, text, content) != digest:
                raise self._damaged(f"the digest of the state after round {round} does not match")
            described, arrays, place = msgspec.json.decode(text), {}, 0
            for name, (kind, shape) in described["arrays"].items():
                size = int(np.prod(shape, dtype=np.int64))
                arrays[name] = np.frombuffer(content, np.dtype(kind), size, place).reshape(shape).copy()
                place += arrays[name].nbytes
            return Saved(round, arrays, described["header"])
        return None

    def _check(self) -> None:
        """Raise `ModelFileError` when the file's structure or any record is damaged.

        This includes records of other runs, because the damage may be in the name of the run.
        """
        if self._open is None:
            for (words,) in self._read("pragma integrity_check", ()):
                if words != "ok":
                    raise self._damaged(words)
            for table, what in (("state", "header"), ("sent", "kind")):
                query = f"select run, revision, round, {what}, digest, content from {table}"
                for run, revision, round, named, digest, content in self._read(query, ()):
                    if _digest(run, revision, round, named, content) != digest:
                        raise self._damaged(f"the digest of a record of round {round} does not match")

    def sent(self) -> list[Sent]:
        """Return the stored vectors that this run has sent, oldest first."""
        query = "select round, kind, digest, content from sent where run = ? and revision = ? order by round"
        out = []
        for round, kind, digest, content in self._read(query):
            if self._digest(round, kind, content) != digest:
                raise self._damaged(f"the digest of the vectors sent in round {round} does not match")
            out.append(Sent(kind, round, np.frombuffer(content).copy()))
        return out

    def others(self) -> list[tuple[str, int, int]]:
        """Return run, revision and round of states from other runs or revisions."""
        return self._read("select run, revision, round from state where not (run = ? and revision = ?)")

    def _read(self, query: str, of: tuple[str, int] | tuple[()] | None = None) -> list[Any]:
        of = (self.run, self.revision) if of is None else of
        if not self.path.exists() or not self.path.stat().st_size:
            return []
        try:
            if self._open is not None:
                return self._open.execute(query, of).fetchall()
            with closing(self._connect()) as file:
                return file.execute(query, of).fetchall()
        except (sqlite3.Error, UnicodeDecodeError, OverflowError, MemoryError) as error:
            raise self._damaged(error) from None

    def _damaged(self, why: object) -> ModelFileError:
        return ModelFileError(f"{self.path}: cannot be read as a checkpoint: {why}")

    def _connect(self) -> sqlite3.Connection:
        fresh = not self.path.exists() or not self.path.stat().st_size
        if fresh:
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, _PRIVATE))
        file = sqlite3.connect(self.path, timeout=1.0, isolation_level=None, check_same_thread=False)
        try:
            # one process has the file: no shared memory, no lock for every transaction
            file.execute("pragma locking_mode = exclusive")
            if fresh:
                file.execute("pragma page_size = 4096")
            file.execute("pragma journal_mode = wal").fetchone()
            file.execute("pragma synchronous = normal")
            file.execute("pragma wal_autocheckpoint = 8000")
            (application,) = file.execute("pragma application_id").fetchone()
            (version,) = file.execute("pragma user_version").fetchone()
            if not application and not file.execute("select count(*) from sqlite_master").fetchone()[0]:
                marks = f"pragma application_id = {_APPLICATION}; pragma user_version = {_FORMAT};"
                file.executescript(f"begin; {_TABLES} {marks} commit;")
                self._flush(file)
            elif (application, version) != (_APPLICATION, _FORMAT):
                raise ModelFileError(f"{self.path}: is not a checkpoint of this version ({_FORMAT})")
        except BaseException:
            file.close()
            raise
        return file

    def close(self) -> None:
        """Close the file; the next save opens it again."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def clear(self) -> None:
        """Remove the file and its log."""
        self.close()
        for path in (self.path, *(self.path.with_name(self.path.name + end) for end in ("-wal", "-shm", "-journal"))):
            path.unlink(missing_ok=True)


def _digest(run: object, revision: object, round: object, what: object, content: bytes) -> bytes:
    digest = hashlib.blake2b(f"{run} {revision} {round} {what}".encode(errors="replace"), digest_size=16)
    digest.update(content if isinstance(content, bytes) else str(content).encode(errors="replace"))
    return digest.digest()


def digest_of(parts: Iterable[object]) -> str:
    """Return a digest of arrays (their dtype, shape and bytes), numbers and strings, the same in every process."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        if isinstance(part, np.ndarray) and part.dtype.kind != "O":
            digest.update(f"array:{part.dtype.str}:{part.shape};".encode())
            digest.update(np.ascontiguousarray(part).data)
        else:
            digest.update(f"{type(part).__name__}:{part!r};".encode())
    return digest.hexdigest()
