"""What a running site writes into its directory, beside what it joined with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedkin.errors import DataError
from fedkin.federate.manifest import Manifest
from fedkin.federate.records import read_record

STATE, LOG, STATUS, LOCK = "state.db", "log.jsonl", "status.json", "lock"
SELECTION = "selection.json"  # p-values of the site's edges, and which of them it dropped
PRESENCE = "presence.npz"  # of the central machine or a leader: who was there in which round
RECORD = "record.bin"  # of a leader: what it decided since the last checkpoint
STDERR = "stderr.txt"  # of a site under supervision


def read_status(place: Path) -> dict[str, Any]:
    """What a site last said about itself; empty when it never ran, or the file is damaged."""
    try:
        return read_record(place / STATUS)
    except DataError:
        return {}


def read_selection(place: Path, manifest: Manifest) -> frozenset[int]:
    """Numbers of neighbours whose edge was dropped by edge selection."""
    if manifest.select is None:
        return frozenset()
    path = place / SELECTION
    if not path.exists():
        raise DataError(f"edges are not tested yet: fedkin site select {place}")
    chosen = read_record(path)
    if (chosen["run"], chosen["revision"]) != (manifest.run, manifest.revision):
        raise DataError(f"{path} belongs to another run or order: fedkin site select {place}")
    return frozenset(manifest.number(name) for name in chosen["dropped"])
