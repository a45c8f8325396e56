"""Overview of sites whose directories are on this machine.

Residuals and the gap are sums over sites. Each site writes its share into its own directory. If all directories are
here, as in a simulation, the certificate is known; otherwise a sentence explains why not.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from fedkin._base import count, is_locked, listed, wait_until
from fedkin.admm import MOST_PARAMS, Share, together
from fedkin.errors import DataError, FedkinError
from fedkin.federate.messages import CENTRE, FEDERATION, INVITE, MODEL, read_invite
from fedkin.federate.records import CANNOT, HOLDING, LOCK, STATUS, SiteStatus, read_status

#: State of a site that runs and does not update its status.
SILENT = "silent"
#: States in which a site needs attention.
TROUBLE = ("failed", "dead", "starting again", CANNOT, HOLDING, SILENT)
#: A site that has not written its status for this many seconds is silent; fewer if its disk is full.
SILENT_SECONDS, SILENT_SECONDS_WITHOUT_ROOM = 20.0, 3.0
_LITTLE_ROOM = 65536  # bytes
_MOMENT = 2.0  # seconds from a lock to the number of its process
_DONE = ("done", "finished")
_AT_REST = (*_DONE, "stopped", "selected", "never started", CANNOT)
_ABSENT = ("dead", "never started", "stopped", SILENT, "starting again")
#: Relative gap from which on rounds have converged.
CONVERGED = 1e-6
_TRACE = ("n_iter", "primal_residual", "dual_residual", "gap")
_NO_SHARES = (
    "Sites have not reported their shares of the gap for the same round; they report them for up to "
    f"{MOST_PARAMS} parameters, in runs between neighbours."
)


class Line(SiteStatus):
    """Status of a site on this machine, as its process, its lock and its supervisor tell it."""

    name: str


def places_in(directory: Path) -> list[Path]:
    """Return the directories of sites here or in this directory, starting with the organiser's if it ran the central
    machine."""
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
    """Return the name of the site in a directory."""
    return CENTRE if (place / FEDERATION).exists() else place.name


def overview(places: Sequence[Path], children: Mapping[Path, str] = MappingProxyType({})) -> list[Line]:
    """Return a `Line` for each site, given the states of a supervisor's child processes."""
    return [_line(place, children.get(place)) for place in places]


def _line(place: Path, child: str | None) -> Line:
    status, pid = read_status(place), holder(place / LOCK)
    if pid is not None and status.pid != pid:
        status.state, status.why = "starting", None  # the rest is of the process before
    state = status.state if pid is not None or status.state in _AT_REST else "dead"
    if child in ("failed", "waiting"):
        state = "failed" if child == "failed" else "starting again"
    elif child == "stopped" and state not in (*_DONE, CANNOT):
        state = "stopped"
    elif child == "running" and state not in _DONE and (pid is None or status.time is None):
        state = "starting"  # a file without a process that runs is of the time before
    if pid is not None and (silent := silence(place, status)) is not None:
        state, status.why = SILENT, silent
    status.state, status.pid = state, pid
    return Line(name=name_of(place), **msgspec.structs.asdict(status))


def silence(place: Path, status: SiteStatus, pid: int | None = None) -> str | None:
    """Return a message about a running site that has not written its status for a long time; None for others.

    A process (``pid``) that does not hold the lock yet is allowed some time.
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
    """Return why a directory cannot be written to, as far as its file system reports."""
    try:
        facts = os.statvfs(place)
    except OSError:
        return None
    if facts.f_flag & os.ST_RDONLY:
        return f"the disk of {place} is read-only; the site continues when that is fixed"
    blocks = facts.f_bfree if os.geteuid() == 0 else facts.f_bavail
    if blocks * facts.f_frsize < _LITTLE_ROOM:
        return f"the disk of {place} is full; free some space, and the site continues"
    return None


def holder(lock: Path) -> int | None:
    """Return the number of the process that holds a lock; None if none does.

    A process writes its number right after it takes the lock, so this waits a moment for the number of a live process.
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
    """Return the overview of sites on this machine in Prometheus text format."""
    measures = (
        ("round", "gauge", "Current round of the site.", lambda line: line.round),
        ("rounds", "gauge", "Rounds of the run.", lambda line: line.rounds),
        ("change", "gauge", "Largest change of a parameter in the last round.", lambda line: line.change),
        ("neighbours_up", "gauge", "Neighbours that are connected.", lambda line: len(line.up)),
        ("waiting_for", "gauge", "Neighbours that are overdue.", lambda line: len(line.waiting_for)),
        ("running", "gauge", "1 if the process is running.", lambda line: int(line.pid is not None)),
        ("trouble", "gauge", "1 if the site needs attention.", lambda line: int(line.state in TROUBLE)),
        ("pulled_total", "counter", "Messages requested again.", lambda line: line.pulled),
        ("repaired_total", "counter", "Edge duals that had to be repaired.", lambda line: line.repaired),
        ("sent_bytes_total", "counter", "Bytes sent.", lambda line: line.sent),
        ("arrived_rows_total", "counter", "Rows taken in during the run.", lambda line: line.arrived),
        ("new_rows_loss", "gauge", "Loss of the newest rows before they were used.", lambda line: line.new_loss),
        ("changed", "gauge", "1 if new rows follow different parameters.", lambda line: int(line.changed is not None)),
        ("restarts_total", "counter", "Restarts by the supervisor.", lambda line: line.restarts),
    )
    out = []
    for name, kind, words, value_of in measures:
        out += [f"# HELP fedkin_{name} {words}", f"# TYPE fedkin_{name} {kind}"]
        values = [(line.name, value_of(line)) for line in lines]
        out += [f'fedkin_{name}{{site="{site}"}} {value}' for site, value in values if value is not None]
    return "\n".join(out) + "\n"


def snapshot(places: Sequence[Path]) -> dict[str, Any]:
    """Return the current state of sites from their directories: edges, round, largest change, bytes and gap.

    ``converged`` is the round from which the gap stays at most `CONVERGED`, or None. A site has the
    ``kind`` "running", "waiting", "absent", "trouble", "done", "left" or "elsewhere" (a neighbour whose directory is
    not on this machine).
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
        "sites": sites,
        "edges": [[number[a], number[b]] for a, b in pairs],
        "round": min((line.round for line in running), default=0),
        "rounds": max((line.rounds for line in lines), default=0),
        "change": max(changes, default=None),
        "bytes": sum(line.sent for line in lines),
        "waited_for": sorted({name for line in lines for name in line.waiting_for}),
        "gap": trace["gap"][-1] if trace["gap"] and not words else None,
        "converged": None if words else _converged(trace),
        "models": [str(place / MODEL) for place in places if (place / MODEL).exists()],
        "trace": trace,
        "no_gap": words,
    }


def _certificate(
    places: Sequence[Path], sites: Sequence[dict[str, Any]], left: frozenset[str]
) -> tuple[dict[str, list[float | None]], str | None]:
    """Return residuals and gap for rounds with shares of all sites here, and the reason if there is no gap."""
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
        return trace, "With a central machine, sites do not hold the duals of their edges, which the gap needs."
    if away:
        trace["gap"] = []
        known = f"{count(len(away), 'site')} {'is' if len(away) == 1 else 'are'} on other machines"
        return trace, f"A gap is a sum over all sites, and {known}. Residuals are of the sites on this one."
    if not rounds:
        return trace, _NO_SHARES if any(site.get("round") for site in sites) else "No round is complete yet."
    if trace["gap"][-1] is None:
        open_ = [name_of(place) for place, one in zip(here, told, strict=True) if one[rounds[-1]][3] is None]
        return trace, f"The rows of {listed(open_)} do not bound the gap; a ridge in the contract would."
    return trace, None


def _converged(trace: Mapping[str, Sequence[float | None]]) -> int | None:
    """Return the first round from which all gaps are small."""
    found = None
    for t, gap in zip(reversed(trace["n_iter"]), reversed(trace["gap"]), strict=False):
        if gap is None or gap > CONVERGED:
            break
        found = int(t or 0)
    return found


def _site(line: Line, left: frozenset[str]) -> dict[str, Any]:
    kinds = {"done": _DONE, "absent": _ABSENT, "trouble": TROUBLE}
    kind = next((kind for kind, states in kinds.items() if line.state in states), None)
    kind = "left" if line.name in left else kind or ("waiting" if line.waiting_for else "running")
    shown = ("name", "state", "round", "change", "waiting_for", "restarts", "pulled", "sent", "why")
    return {"kind": kind, **{name: getattr(line, name) for name in shown}}


def _left(place: Path) -> frozenset[str]:
    try:
        path = place / INVITE
        return read_invite(path).departures(place) if path.exists() else frozenset()
    except FedkinError:  # a forged or damaged notice: the site itself refuses it
        return frozenset()


def _edges(place: Path) -> list[tuple[str, str]]:
    """Return the pairs of names that exchange messages, as far as a site's invite shows them."""
    if not (place / INVITE).exists():
        return []
    invite = read_invite(place / INVITE)
    if invite.centre is not None:
        return [(name_of(place), CENTRE)]
    return [(name_of(place), neighbour.member.name) for neighbour in invite.neighbours]
