"""A device's log: one JSON object per line, readable by its owner only."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from fedkin._base import PRIVATE_FILE

_MOST_COUNTED = 2000  # pairs of event and peer


class Journal:
    """Appends events of one device, which every line names, to a file, and to standard error if asked (``echo``)."""

    def __init__(self, device: str, path: Path | None = None, *, echo: bool = False) -> None:
        self.device, self.echo = device, echo
        self._lock = threading.Lock()
        self._file = None
        if path is not None:
            self._file = os.fdopen(
                os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE_FILE), "w", buffering=1
            )
        #: How often each event was written or counted.
        self.counts: Counter[str] = Counter()

    def write(self, level: str, event: str, **fields: object) -> None:
        """Write a line: time, level, device, event, and what else is known."""
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
                self._file.close()
                self._file = None

    def _put(self, level: str, event: str, fields: dict[str, object]) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime()) + f".{int(time.time() * 1000) % 1000:03d}Z"
        line = json.dumps({"time": stamp, "level": level, "device": self.device, "event": event, **fields}, default=str)
        try:
            if self._file is not None:
                self._file.write(line + "\n")
            if self.echo:
                sys.stderr.write(line + "\n")
        except OSError:
            # a full disk must not stop a device that can still compute; checkpoints report it
            self.counts["log lines lost"] += 1
