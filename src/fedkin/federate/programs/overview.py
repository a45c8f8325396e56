"""What is known about the sites whose directories are on this machine."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fedkin._base import is_locked, wait_until
from fedkin.errors import DataError
from fedkin.federate.messages import CENTRE, FEDERATION, INVITE
from fedkin.federate.programs.files import LOCK, STATUS, read_status
from fedkin.federate.programs.program import CANNOT
from fedkin.federate.waiting import HOLDING

#: State of a site that runs and says nothing.
SILENT = "silent"
#: States in which somebody should look after a site.
TROUBLE = ("failed", "dead", "starting again", CANNOT, HOLDING, SILENT)
#: A site that has not written its status for so many seconds is silent; fewer where its disk has no room.
SILENT_SECONDS, SILENT_SECONDS_WITHOUT_ROOM = 20.0, 3.0
_LITTLE_ROOM = 65536  # bytes
_MOMENT = 2.0  # seconds from a lock to the number of its process
_AT_REST = ("done", "finished", "stopped", "selected", "never started", CANNOT)


class Watched(Protocol):
    """What a supervisor knows about a site."""

    state: str
    restarts: int
    restarts_before: int
    why: str


@dataclass(frozen=True)
class Line:
    """What is known about a site on this machine."""

    name: str
    state: str
    round: int
    rounds: int
    change: float | None
    up: int
    waiting_for: Sequence[str]
    pulled: int
    repaired: int
    restarts: int
    pid: int | None
    why: str | None = None
    sent: int = 0


def places_in(directory: Path) -> list[Path]:
    """The directories of sites: this one, or those in it; the organiser's, if the central machine ran there, first."""
    if (directory / INVITE).exists():
        return [directory]
    found = sorted(path.parent for path in directory.glob(f"*/{INVITE}"))
    found += sorted(path.parent for path in directory.glob(f"sites/*/{INVITE}"))
    centres = [path.parent for path in (directory / FEDERATION, *directory.glob(f"*/{FEDERATION}")) if path.exists()]
    places = [place for place in centres if (place / STATUS).exists()] + found
    if not places:
        raise DataError(f"{directory} is not a site's directory, and has none in it (fedkin site join makes one)")
    return places


def name_of(place: Path) -> str:
    """What to call the site whose directory it is."""
    return CENTRE if (place / FEDERATION).exists() else place.name


def overview(places: Sequence[Path], children: Mapping[str, Watched] | None = None) -> list[Line]:
    """A line for each site; ``children`` are those of a supervisor, by name."""
    return [_line(place, (children or {}).get(name_of(place))) for place in places]


def _line(place: Path, child: Watched | None) -> Line:
    status, pid = read_status(place), holder(place / LOCK)
    alive = pid is not None
    if alive and status.get("pid") != pid:
        status |= {"state": "starting", "why": None}  # the rest is of the process before
    state, why = _state(place, status, alive, child)
    return Line(
        name_of(place),
        state,
        int(status.get("round", 0)),
        int(status.get("rounds", 0)),
        status.get("change"),
        len(status.get("up", ())),
        status.get("waiting_for", ()),
        int(status.get("pulled", 0)),
        int(status.get("repaired", 0)),
        int(status.get("restarts", 0)) if child is None else child.restarts_before + child.restarts,
        pid,
        why,
        int(status.get("sent", 0)),
    )


def _state(place: Path, status: Mapping[str, Any], alive: bool, child: Watched | None) -> tuple[str, str | None]:
    """State and reason, from what a site wrote, whether it runs, and what its supervisor knows."""
    state, why = str(status.get("state", "never started")), status.get("why")
    if not alive and state not in _AT_REST:
        state = "dead"
    if child is not None and child.state in ("failed", "waiting"):
        state = child.state if child.state == "failed" else "starting again"
    elif child is not None and child.state == "stopped" and state not in ("done", "finished", CANNOT):
        state = "stopped"
    elif child is not None and child.state == "running" and state not in ("done", "finished"):
        # a file without a process that runs is of the time before
        state = state if alive and status else "starting"
    if alive and (silent := silence(place, status)) is not None:
        state, why = SILENT, silent
    return state, why


def silence(place: Path, status: Mapping[str, Any], pid: int | None = None) -> str | None:
    """What to say about a running site that has not written its status for long; None about others.

    A process (``pid``) that does not hold the lock yet is given time.
    """
    try:
        running = holder(place / LOCK)
        # a status of the time before says nothing: then it counts from the start
        since = float(status["time"]) if status.get("pid") == running else (place / LOCK).stat().st_mtime
    except (OSError, ValueError, KeyError, TypeError):
        return None
    seconds = time.time() - since if pid in (None, running) else 0.0
    if seconds < SILENT_SECONDS_WITHOUT_ROOM:
        return None
    words = f"its process runs, but has not written {STATUS} for {seconds:.0f} s"
    trouble = trouble_with_disk(place)
    if trouble is not None:
        return f"{words}: {trouble}"
    if seconds < SILENT_SECONDS:
        return None
    return f"{words}: it was halted, or cannot write in {place}"


def trouble_with_disk(place: Path) -> str | None:
    """Why nothing can be written to a directory, as far as its file system tells."""
    try:
        facts = os.statvfs(place)
    except OSError:
        return None
    if facts.f_flag & os.ST_RDONLY:
        return f"the disk of {place} can only be read; it goes on when that is mended"
    blocks = facts.f_bfree if os.geteuid() == 0 else facts.f_bavail
    if blocks * facts.f_frsize < _LITTLE_ROOM:
        return f"the disk of {place} is full; make room, and it goes on"
    return None


def is_running(place: Path) -> bool:
    """Whether a process holds the site's lock."""
    return is_locked(place / LOCK)


def holder(lock: Path) -> int | None:
    """The number of the process that holds a lock; None when none does.

    A process writes its number right after it has taken the lock, so this waits a moment for a number of a process that
    is alive.
    """
    alive: list[int] = []

    def is_known() -> bool:
        if is_locked(lock):
            with suppress(OSError, ValueError):
                pid = int(lock.read_text())
                os.kill(pid, 0)  # raises when it is the number of a process that has ended
                alive.append(pid)
            return bool(alive)
        return True

    wait_until(is_known, _MOMENT, pause=0.01)
    return alive[0] if alive else None


def prometheus(lines: Sequence[Line]) -> str:
    """The overview in the text format of Prometheus, of sites that are on this machine."""
    measures = (
        ("round", "gauge", "Round that the site is in.", lambda line: line.round),
        ("rounds", "gauge", "Rounds of the run.", lambda line: line.rounds),
        ("change", "gauge", "Largest change of a parameter in the last round.", lambda line: line.change),
        ("neighbours_up", "gauge", "Neighbours that are there.", lambda line: line.up),
        ("waiting_for", "gauge", "Neighbours that it has waited for long.", lambda line: len(line.waiting_for)),
        ("running", "gauge", "1 when the process runs.", lambda line: int(line.pid is not None)),
        ("trouble", "gauge", "1 when somebody should look after it.", lambda line: int(line.state in TROUBLE)),
        ("pulled_total", "counter", "Messages asked for again.", lambda line: line.pulled),
        ("repaired_total", "counter", "Edge duals that had to be repaired.", lambda line: line.repaired),
        ("sent_bytes_total", "counter", "Bytes that it has sent.", lambda line: line.sent),
        ("restarts_total", "counter", "Times that the supervisor started it again.", lambda line: line.restarts),
    )
    out = []
    for name, kind, words, value_of in measures:
        out += [f"# HELP fedkin_{name} {words}", f"# TYPE fedkin_{name} {kind}"]
        values = [(_labels(line), value_of(line)) for line in lines]
        out += [f"fedkin_{name}{{{labels}}} {value}" for labels, value in values if value is not None]
    return "\n".join(out) + "\n"


def _labels(line: Line) -> str:
    return f'site="{line.name}"'
