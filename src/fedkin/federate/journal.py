"""A site's log: one JSON object per line, readable by its owner only."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import msgspec

from fedkin._base import PRIVATE_FILE

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
