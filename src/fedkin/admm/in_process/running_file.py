"""What a run in one process tells whoever watches it: a small file beside its checkpoint, replaced now and then."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from fedkin._base import Mask, write_file
from fedkin.graph import Graph

#: End of the name of the file beside a checkpoint.
RUNNING = ".running.json"
_PAUSE_SECONDS = 0.5
_MOST_LINES = 400  # of the trace
_MOST_SITES, _MOST_EDGES = 2_000, 20_000


class RunningFile:
    """Writes how far a run is, at most twice a second."""

    def __init__(self, checkpoint: str | os.PathLike[str], graph: Graph, rounds: int) -> None:
        self.path = running_file(checkpoint)
        few = graph.n_sites <= _MOST_SITES
        self._fixed = {
            "sites": [str(site) for site in graph.sites] if few else [],
            "edges": graph.edges.tolist() if few and graph.n_edges <= _MOST_EDGES else [],
            "rounds": rounds,
        }
        self._written = -math.inf

    def write(
        self, state: str, round: int, lines: Sequence[Mapping[str, float]], present: Mask | None, *, force: bool = False
    ) -> None:
        """Replace the file, if it is time to; a disk without room is the checkpoint's matter."""
        now = time.monotonic()
        if not force and now - self._written < _PAUSE_SECONDS:
            return
        self._written = now
        told: dict[str, Any] = {
            "pid": os.getpid(),
            "time": time.time(),
            "state": state,
            "round": round,
            **self._fixed,
            "absent": [] if present is None else np.flatnonzero(~present).tolist(),
            "trace": [
                {name: value for name, value in line.items() if math.isfinite(value)} for line in lines[-_MOST_LINES:]
            ],
        }
        with suppress(OSError):
            write_file(self.path, json.dumps(told))


def running_file(checkpoint: str | os.PathLike[str]) -> Path:
    """The file beside a checkpoint.

    Examples
    --------
    >>> running_file("runs/a.db").name
    'a.db.running.json'
    """
    path = Path(checkpoint)
    return path.with_name(path.name + RUNNING)


def read_running(path: Path) -> dict[str, Any] | None:
    """What a run last wrote; None where there is nothing, or half a file of somebody else's."""
    try:
        told = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return told if isinstance(told, dict) and "trace" in told else None
