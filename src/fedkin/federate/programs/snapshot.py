"""A federation at one moment, in plain values: sites on this machine, their neighbours elsewhere, who is absent.

Residuals and the gap are sums over sites. Each writes its share into its own directory; whoever has the directories of
all, as in a simulation, has the certificate. Where it cannot be known, the words say why.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedkin._base import count, listed
from fedkin.admm import MOST_PARAMS, Share, together
from fedkin.errors import FedkinError
from fedkin.federate.messages import CENTRE, INVITE, read_invite
from fedkin.federate.programs.files import read_status
from fedkin.federate.programs.overview import SILENT, TROUBLE, Line, name_of, overview
from fedkin.federate.site import departures

_ABSENT = ("dead", "never started", "stopped", SILENT, "starting again")
_DONE = ("done", "finished")
_TRACE = ("n_iter", "primal_residual", "dual_residual", "gap")
_NO_SHARES = (
    "Sites have not told their shares of the gap for one and the same round; they do so for up to "
    f"{MOST_PARAMS} parameters, in runs between neighbours."
)


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
    trace, words = _certificate(places, sites, left)
    return {
        "kind": "sites",
        "sites": sites,
        "edges": [[number[a], number[b]] for a, b in pairs],
        "round": min((line.round for line in running), default=0),
        "rounds": max((line.rounds for line in lines), default=0),
        "change": max(changes, default=None),
        "bytes": sum(line.sent for line in lines),
        "waited_for": sorted(waited_for),
        "gap": trace["gap"][-1] if trace["gap"] and not words else None,
        "trace": trace,
        "no_gap": words,
    }


def _certificate(
    places: Sequence[Path], sites: Sequence[dict[str, Any]], left: frozenset[str]
) -> tuple[dict[str, list[float | None]], str | None]:
    """Residuals and gap in the rounds of which all sites here have told their shares, and why there is no gap."""
    here = [place for place in places if name_of(place) not in left | {CENTRE}]
    told = [{int(one[0]): one for one in read_status(place).get("shares", ())} for place in here]
    rounds = sorted(set.intersection(*(set(one) for one in told))) if told else []
    lines = [together([_share(one[t]) for one in told]) for t in rounds]
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
        started = any(line.get("round") for line in sites)
        return trace, _NO_SHARES if started else "No round is over yet."
    if trace["gap"][-1] is None:
        open_ = [name_of(place) for place, one in zip(here, told, strict=True) if one[rounds[-1]][3] is None]
        return trace, f"The rows of {listed(open_)} do not bound the gap: a ridge in the contract would."
    return trace, None


def _share(numbers: Sequence[float | None]) -> Share:
    return Share(*(math.inf if value is None else value for value in numbers))  # type: ignore[arg-type]


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
    invite = read_invite(place / INVITE)
    name = name_of(place)
    if invite.centre is not None:
        return [(name, CENTRE)]
    return [(name, neighbour.member.name) for neighbour in invite.neighbours]
