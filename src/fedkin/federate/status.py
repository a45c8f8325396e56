"""What is known about the sites whose directories are on this machine: a line for each, and a federation as a picture.

Residuals and the gap are sums over sites. Each writes its share into its own directory; where the directories of all
are here, as in a simulation, the certificate is known. Where it is not, the words say why.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedkin._base import count, is_locked, listed, wait_until
from fedkin.admm import MOST_PARAMS, Share, together
from fedkin.errors import DataError, FedkinError
from fedkin.federate.messages import CENTRE, FEDERATION, INVITE, read_invite
from fedkin.federate.records import CANNOT, HOLDING, LOCK, STATUS, SiteStatus, read_status

if TYPE_CHECKING:
    from fedkin.federate.supervisor import Child

#: State of a site that runs and says nothing.
SILENT = "silent"
#: States in which somebody should look after a site.
TROUBLE = ("failed", "dead", "starting again", CANNOT, HOLDING, SILENT)
#: A site that has not written its status for so many seconds is silent; fewer where its disk has no room.
SILENT_SECONDS, SILENT_SECONDS_WITHOUT_ROOM = 20.0, 3.0
_LITTLE_ROOM = 65536  # bytes
_MOMENT = 2.0  # seconds from a lock to the number of its process
_DONE = ("done", "finished")
_AT_REST = (*_DONE, "stopped", "selected", "never started", CANNOT)
_ABSENT = ("dead", "never started", "stopped", SILENT, "starting again")
_TRACE = ("n_iter", "primal_residual", "dual_residual", "gap")
_NO_SHARES = (
    "Sites have not told their shares of the gap for one and the same round; they do so for up to "
    f"{MOST_PARAMS} parameters, in runs between neighbours."
)


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
    arrived: int = 0
    new_loss: float | None = None
    new_error: float | None = None
    changed: int | None = None


def places_in(directory: Path) -> list[Path]:
    """Return the directories of sites: this one, or those in it; first the organiser's, if the centre ran there."""
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
    """Return what to call the site whose directory it is."""
    return CENTRE if (place / FEDERATION).exists() else place.name


def overview(places: Sequence[Path], children: Mapping[str, Child] | None = None) -> list[Line]:
    """Return a line for each site; ``children`` are those of a supervisor, by name."""
    return [_line(place, (children or {}).get(name_of(place))) for place in places]


def _line(place: Path, child: Child | None) -> Line:
    status, pid = read_status(place), holder(place / LOCK)
    if pid is not None and status.pid != pid:
        status.state, status.why = "starting", None  # the rest is of the process before
    state, why = _state(place, status, pid is not None, child)
    restarts = status.restarts if child is None else child.restarts_before + child.restarts
    told = {name: getattr(status, name) for name in ("round", "rounds", "change", "waiting_for", "pulled")}
    told |= {"up": len(status.up), "repaired": status.repaired, "sent": status.sent}
    told |= {name: getattr(status, name) for name in ("arrived", "new_loss", "new_error", "changed")}
    return Line(name=name_of(place), state=state, restarts=restarts, pid=pid, why=why, **told)


def _state(place: Path, status: SiteStatus, alive: bool, child: Child | None) -> tuple[str, str | None]:
    """Return state and reason, from what a site wrote, whether it runs, and what its supervisor knows."""
    state = status.state if alive or status.state in _AT_REST else "dead"
    if child is not None and child.state in ("failed", "waiting"):
        state = child.state if child.state == "failed" else "starting again"
    elif child is not None and child.state == "stopped" and state not in (*_DONE, CANNOT):
        state = "stopped"
    elif child is not None and child.state == "running" and state not in _DONE:
        # a file without a process that runs is of the time before
        state = state if alive and status.time is not None else "starting"
    if alive and (silent := silence(place, status)) is not None:
        return SILENT, silent
    return state, status.why


def silence(place: Path, status: SiteStatus, pid: int | None = None) -> str | None:
    """Return what to say about a running site that has not written its status for long; None about others.

    A process (``pid``) that does not hold the lock yet is given time.
    """
    running, since = holder(place / LOCK), status.time
    if status.pid != running or since is None:
        # a status of the time before says nothing: then it counts from the start
        try:
            since = (place / LOCK).stat().st_mtime
        except OSError:
            return None
    seconds = time.time() - since if pid in (None, running) else 0.0
    if seconds < SILENT_SECONDS_WITHOUT_ROOM:
        return None
    words = f"its process runs, but has not written {STATUS} for {seconds:.0f} s"
    if (trouble := trouble_with_disk(place)) is not None:
        return f"{words}: {trouble}"
    return None if seconds < SILENT_SECONDS else f"{words}: it was halted, or cannot write in {place}"


def trouble_with_disk(place: Path) -> str | None:
    """Return why nothing can be written to a directory, as far as its file system tells."""
    try:
        facts = os.statvfs(place)
    except OSError:
        return None
    if facts.f_flag & os.ST_RDONLY:
        return f"the disk of {place} can only be read; it goes on when that is fixed"
    blocks = facts.f_bfree if os.geteuid() == 0 else facts.f_bavail
    if blocks * facts.f_frsize < _LITTLE_ROOM:
        return f"the disk of {place} is full; make room, and it goes on"
    return None


def is_running(place: Path) -> bool:
    """Return whether a process holds the site's lock."""
    return is_locked(place / LOCK)


def holder(lock: Path) -> int | None:
    """Return the number of the process that holds a lock; None when none does.

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
    """Return the overview in the text format of Prometheus, of sites that are on this machine."""
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
        ("arrived_rows_total", "counter", "Rows that were taken in during the run.", lambda line: line.arrived),
        ("new_rows_loss", "gauge", "Loss of the newest rows before they were used.", lambda line: line.new_loss),
        ("changed", "gauge", "1 when new rows follow other parameters.", lambda line: int(line.changed is not None)),
        ("restarts_total", "counter", "Times that the supervisor started it again.", lambda line: line.restarts),
    )
    out = []
    for name, kind, words, value_of in measures:
        out += [f"# HELP fedkin_{name} {words}", f"# TYPE fedkin_{name} {kind}"]
        values = [(line.name, value_of(line)) for line in lines]
        out += [f'fedkin_{name}{{site="{site}"}} {value}' for site, value in values if value is not None]
    return "\n".join(out) + "\n"


def snapshot(places: Sequence[Path]) -> dict[str, Any]:
    """Return what the directories of sites say now: sites, edges between them, round, largest change, bytes, gap.

    A site has the ``kind`` "running", "waiting", "absent", "trouble", "done", "left" or "elsewhere" (a neighbour whose
    directory is not on this machine).
    """
    lines = overview(places)
    left = frozenset[str]().union(*(_left(place) for place in places))
    seen = {name for place in places for name in read_status(place).up}
    sites = [_site(line, left) for line in lines]
    pairs = sorted({tuple(sorted(pair)) for place in places for pair in _edges(place)})
    for name in sorted({name for pair in pairs for name in pair} - {line.name for line in lines}):
        there = "seen by its neighbours" if name in seen else "not seen"
        kind = "left" if name in left else "elsewhere" if name in seen else "absent"
        sites.append({"name": name, "kind": kind, "state": there, "round": None, "waiting_for": [], "sent": 0})
    number = {site["name"]: k for k, site in enumerate(sites)}
    running = [line for line in lines if line.name not in left]
    changes = [line.change for line in running if line.change is not None and line.state not in _DONE]
    trace, words = _certificate(places, sites, left)
    return {
        "kind": "sites",
        "sites": sites,
        "edges": [[number[a], number[b]] for a, b in pairs],
        "round": min((line.round for line in running), default=0),
        "rounds": max((line.rounds for line in lines), default=0),
        "change": max(changes, default=None),
        "bytes": sum(line.sent for line in lines),
        "waited_for": sorted({name for line in lines for name in line.waiting_for}),
        "gap": trace["gap"][-1] if trace["gap"] and not words else None,
        "trace": trace,
        "no_gap": words,
    }


def _certificate(
    places: Sequence[Path], sites: Sequence[dict[str, Any]], left: frozenset[str]
) -> tuple[dict[str, list[float | None]], str | None]:
    """Return residuals and gap in the rounds of which all sites here told their shares, and why there is no gap."""
    here = [place for place in places if name_of(place) not in left | {CENTRE}]
    told = [{int(one[0] or 0): one for one in read_status(place).shares} for place in here]
    rounds = sorted(set.intersection(*(set(one) for one in told))) if told else []
    shares = [[Share(*(math.inf if x is None else x for x in one[t])) for one in told] for t in rounds]  # type: ignore[arg-type]
    lines = [together(of_all) for of_all in shares]
    trace: dict[str, list[float | None]] = {
        name: [line[name] if math.isfinite(line[name]) else None for line in lines] for name in _TRACE
    }
    away = [site["name"] for site in sites if site["kind"] != "left" and site["name"] not in map(name_of, here)]
    if CENTRE in away or any(name_of(place) == CENTRE for place in places):
        return trace, "With a central machine, sites do not hold the duals of their edges, which a gap needs."
    if away:
        trace["gap"] = []
        known = f"{count(len(away), 'site')} {'is' if len(away) == 1 else 'are'} on other machines"
        return trace, f"A gap is a sum over all sites, and {known}. Residuals are of the sites on this one."
    if not rounds:
        return trace, _NO_SHARES if any(site.get("round") for site in sites) else "No round is over yet."
    if trace["gap"][-1] is None:
        open_ = [name_of(place) for place, one in zip(here, told, strict=True) if one[rounds[-1]][3] is None]
        return trace, f"The rows of {listed(open_)} do not bound the gap: a ridge in the contract would."
    return trace, None


def _site(line: Line, left: frozenset[str]) -> dict[str, Any]:
    kinds = {"done": _DONE, "absent": _ABSENT, "trouble": TROUBLE}
    kind = next((kind for kind, states in kinds.items() if line.state in states), None)
    kind = "left" if line.name in left else kind or ("waiting" if line.waiting_for else "running")
    shown = ("name", "state", "round", "change", "waiting_for", "restarts", "pulled", "sent", "why")
    return {"kind": kind, **{name: value for name, value in asdict(line).items() if name in shown}}


def _left(place: Path) -> frozenset[str]:
    try:
        path = place / INVITE
        return read_invite(path).departures(place) if path.exists() else frozenset()
    except FedkinError:  # a forged or damaged notice: the site itself refuses it
        return frozenset()


def _edges(place: Path) -> list[tuple[str, str]]:
    """Return the pairs of names that exchange messages, as far as a site's invite tells; with a centre, with it."""
    if not (place / INVITE).exists():
        return []
    invite = read_invite(place / INVITE)
    if invite.centre is not None:
        return [(name_of(place), CENTRE)]
    return [(name_of(place), neighbour.member.name) for neighbour in invite.neighbours]
