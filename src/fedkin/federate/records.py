"""What a running site writes into its directory: small JSON files, each with a digest of its content.

A damaged disk must not change them unnoticed; only their owner may read them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from fedkin._base import write_file
from fedkin.errors import DataError
from fedkin.federate.plan import SitePlan

T = TypeVar("T")

STATE, LOG, STATUS, LOCK = "state.db", "log.jsonl", "status.json", "lock"
SELECTION = "selection.json"  # p-values of the site's edges, and which of them it dropped
PRESENCE = "presence.npz"  # of the central machine or a leader: who was there in which round
RECORD = "record.bin"  # of a leader: what it decided since the last checkpoint
STDERR = "stderr.txt"  # of a site under supervision


class StatusFile(msgspec.Struct, kw_only=True):
    """What a site last said about itself, ``status.json``; the defaults are those of a site that never ran.

    ``change`` is that of theta in the last round, ``sent`` the bytes so far, ``shares`` what the site adds to the
    certificate in some of the last rounds (`fedkin.admm.Share`), ``why`` the reason when it cannot go on.
    """

    pid: int | None = None
    time: float | None = None
    state: str = "never started"
    round: int = 0
    rounds: int = 0
    change: float | None = None
    up: list[str] = []
    waiting_for: list[str] = []
    pulled: int = 0
    repaired: int = 0
    started: float = 0.0
    restarts: int = 0
    sent: int = 0
    shares: list[list[float | None]] = []
    why: str | None = None


class Selection(msgspec.Struct, frozen=True):
    """What edge selection found at a site, ``selection.json``: p-values of its edges, and whose edge is dropped."""

    run: str
    revision: int
    threshold: float
    p_values: dict[str, float]
    dropped: list[str]


def write_record(path: Path, content: msgspec.Struct | Mapping[str, Any]) -> None:
    """Replace a file that only its owner may read."""
    fields = msgspec.to_builtins(content)
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


def read_status(place: Path) -> StatusFile:
    """Return what a site last said about itself; the defaults when it never ran, or the file is damaged."""
    try:
        return read_record(place / STATUS, StatusFile)
    except DataError:
        return StatusFile()


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
