"""A federation at one moment, in plain values: sites on this machine, their neighbours elsewhere, who is absent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedkin.errors import FedkinError
from fedkin.federate.contract.manifest import CENTRE
from fedkin.federate.enrol.files import INVITE
from fedkin.federate.enrol.organiser import read_invite
from fedkin.federate.enrol.site import departures
from fedkin.federate.programs.files import read_status
from fedkin.federate.programs.overview import SILENT, TROUBLE, Line, name_of, overview

_ABSENT = ("dead", "never started", "stopped", SILENT, "starting again")
_DONE = ("done", "finished")


def snapshot(places: Sequence[Path]) -> dict[str, Any]:
    """What the directories of sites say now: sites, edges between them, the round, the largest change, bytes.

    A site has the ``kind`` "running", "waiting", "absent", "trouble", "done", "left" or "elsewhere" (a neighbour whose
    directory is not on this machine).
    """
    lines = overview(places)
    left = frozenset[str]().union(*(_left(place) for place in places))
    waited_for = {name for line in lines for name in line.waiting_for}
    seen = {name for place in places for name in read_status(place).get("up", ())}
    sites = [_site(line, left) for line in lines]
    here = {line.name for line in lines}
    pairs = sorted({tuple(sorted(pair)) for place in places for pair in _edges(place)})
    for name in sorted({name for pair in pairs for name in pair} - here):
        there = "seen by its neighbours" if name in seen else "not seen"
        kind = "left" if name in left else "elsewhere" if name in seen else "absent"
        sites.append({"name": name, "kind": kind, "state": there, "round": None, "waiting_for": [], "sent": 0})
    number = {site["name"]: k for k, site in enumerate(sites)}
    running = [line for line in lines if line.name not in left]
    changes = [line.change for line in running if line.change is not None and line.state not in _DONE]
    return {
        "kind": "sites",
        "sites": sites,
        "edges": [[number[a], number[b]] for a, b in pairs],
        "round": min((line.round for line in running), default=0),
        "rounds": max((line.rounds for line in lines), default=0),
        "change": max(changes, default=None),
        "bytes": sum(line.sent for line in lines),
        "waited_for": sorted(waited_for),
        "gap": None,
    }


def _site(line: Line, left: frozenset[str]) -> dict[str, Any]:
    if line.name in left:
        kind = "left"
    elif line.state in _DONE:
        kind = "done"
    elif line.state in _ABSENT:
        kind = "absent"
    elif line.state in TROUBLE:
        kind = "trouble"
    else:
        kind = "waiting" if line.waiting_for else "running"
    return {
        "name": line.name,
        "kind": kind,
        "state": line.state,
        "round": line.round,
        "change": line.change,
        "waiting_for": list(line.waiting_for),
        "restarts": line.restarts,
        "pulled": line.pulled,
        "sent": line.sent,
        "why": line.why,
    }


def _left(place: Path) -> frozenset[str]:
    try:
        return departures(place) if (place / INVITE).exists() else frozenset()
    except FedkinError:  # a forged or damaged notice: the site itself refuses it
        return frozenset()


def _edges(place: Path) -> list[tuple[str, str]]:
    """Pairs of names that exchange messages, as far as a site's invite tells; with a central machine, with it."""
    if not (place / INVITE).exists():
        return []
    invite, _ = read_invite(place / INVITE)
    name = name_of(place)
    if invite.centre is not None:
        return [(name, CENTRE)]
    return [(name, neighbour.member.name) for neighbour in invite.neighbours]
