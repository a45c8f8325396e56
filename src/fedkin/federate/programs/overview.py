"""What is known about the devices of a federation directory, or of one device's directory, on this machine."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fedkin._base import is_locked, wait_until
from fedkin.errors import DataError
from fedkin.federate.contract.manifest import CENTRE, Manifest
from fedkin.federate.programs.program import CANNOT
from fedkin.federate.setup.departures import left_devices, read_departures
from fedkin.federate.setup.directory import DEVICES, LINKS, LOCK, OWNER, STATUS, read_result, read_status
from fedkin.federate.waiting import HOLDING

#: States of devices that have no directory here, or one with which they cannot start, or that run and say nothing.
NOT_HERE, DAMAGED, SILENT = "not here", "damaged", "silent"
#: States in which somebody should look after a device.
TROUBLE = ("failed", "dead", "starting again", CANNOT, HOLDING, DAMAGED, SILENT)
#: A device that has not written its status for so many seconds is silent; fewer where its disk has no room.
SILENT_SECONDS, SILENT_SECONDS_WITHOUT_ROOM = 20.0, 3.0
_LITTLE_ROOM = 65536  # bytes
_AT_REST = ("done", "finished", "stopped", "selected", "never started", CANNOT)


class Watched(Protocol):
    """What a supervisor knows about a device."""

    state: str
    restarts: int
    restarts_before: int
    why: str


@dataclass(frozen=True)
class Line:
    """What is known about a device on this machine."""

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
    id: str | int | None = None  # in the data, where the name is another


def is_device(place: Path) -> bool:
    """Whether this is the directory of one device, and not that of a federation."""
    return not (place / DEVICES).is_dir() and any((place / name).exists() for name in (OWNER, LINKS))


def overview(directory: Path, manifest: Manifest, children: Mapping[str, Watched] | None = None) -> list[Line]:
    """A line for each device: of a federation all, the central machine first; of a device's directory that one.

    ``children`` are those of a supervisor, by name.
    """
    ids = {member.name: member.id for member in manifest.members}
    if is_device(directory):
        name = own_name(directory)
        left = {manifest.members[u].name for u in read_departures(directory, manifest)}
        return [_line(directory, name, ids.get(name, name), name in left, None)]
    gone = left_devices(directory)
    lines = []
    for name in expected_names(manifest):
        child = (children or {}).get(name)
        lines.append(_line(directory / DEVICES / name, name, ids.get(name, name), name in gone, child))
    return lines


def expected_names(manifest: Manifest) -> list[str]:
    """Names of all devices of a federation, and of the central machine, which comes first."""
    names = sorted(member.name for member in manifest.members)
    return [CENTRE, *names] if manifest.placement == "central" else names


def own_name(place: Path) -> str:
    """The name of the device in whose directory we are; raises `DataError` when its file does not tell."""
    path = place / OWNER
    try:
        return str(json.loads(path.read_bytes())["device"])
    except FileNotFoundError:
        raise DataError(f"{path} is missing: carry it again from where fedkin peer init made it") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} cannot be read ({error!r}): carry it again from where peer init made it") from None


def missing_or_damaged(place: Path) -> tuple[str, str] | None:
    """`NOT_HERE` or `DAMAGED`, and why, for a device that cannot be started from this directory; None for others."""
    if not place.is_dir():
        return NOT_HERE, f"there is no directory {place}: it runs on another machine, or was moved or removed"
    try:
        own_name(place)
    except DataError as error:
        return DAMAGED, str(error)
    return None


def _line(place: Path, name: str, identity: str | int, left: bool, child: Watched | None) -> Line:
    status, pid = read_status(place), holder(place / LOCK)
    alive = pid is not None
    if alive and status.get("pid") != pid:
        status |= {"state": "starting", "why": None}  # the rest is of the process before
    state, why = _state(place, status, alive, child)
    absent = missing_or_damaged(place)
    if absent is not None and not alive:
        state, why = absent
    if left and not alive:
        state, why = "left", None
    return Line(
        name,
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
        identity if str(identity) != name else None,
    )


def _state(place: Path, status: Mapping[str, Any], alive: bool, child: Watched | None) -> tuple[str, str | None]:
    """State and reason, from what a device wrote, whether it runs, and what its supervisor knows."""
    state, why = str(status.get("state", "never started")), status.get("why")
    if not alive and state not in _AT_REST:
        state = "finished" if read_result(place) is not None else "dead"
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
    """What to say about a running device that has not written its status for long; None about others.

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
    """Whether a process holds the device's lock."""
    return is_locked(place / LOCK)


def holder(lock: Path, seconds: float = 2.0) -> int | None:
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

    wait_until(is_known, seconds, pause=0.01)
    return alive[0] if alive else None


def prometheus(lines: Sequence[Line]) -> str:
    """The overview in the text format of Prometheus, of devices that are on this machine."""
    measures = (
        ("round", "gauge", "Round that the device is in.", lambda line: line.round),
        ("rounds", "gauge", "Rounds of the run.", lambda line: line.rounds),
        ("change", "gauge", "Largest change of a parameter in the last round.", lambda line: line.change),
        ("neighbours_up", "gauge", "Neighbours that are there.", lambda line: line.up),
        ("waiting_for", "gauge", "Neighbours that it has waited for long.", lambda line: len(line.waiting_for)),
        ("running", "gauge", "1 when the process runs.", lambda line: int(line.pid is not None)),
        ("trouble", "gauge", "1 when somebody should look after it.", lambda line: int(line.state in TROUBLE)),
        ("pulled_total", "counter", "Messages asked for again.", lambda line: line.pulled),
        ("repaired_total", "counter", "Edge duals that had to be repaired.", lambda line: line.repaired),
        ("restarts_total", "counter", "Times that the supervisor started it again.", lambda line: line.restarts),
    )
    out = []
    for name, kind, words, value_of in measures:
        out += [f"# HELP fedkin_{name} {words}", f"# TYPE fedkin_{name} {kind}"]
        values = [(_labels(line), value_of(line)) for line in lines if line.state != NOT_HERE]
        out += [f"fedkin_{name}{{{labels}}} {value}" for labels, value in values if value is not None]
    return "\n".join(out) + "\n"


def _labels(line: Line) -> str:
    labels = {"device": line.name} | ({} if line.id is None else {"id": str(line.id)})
    escapes = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    return ",".join(f'{name}="{value.translate(escapes)}"' for name, value in labels.items())
