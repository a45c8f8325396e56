"""Sites whose directories are on this machine: their state and their processes.

Residuals and the gap are sums over sites. Each site writes its share into its own directory. If all directories are
here, as in a simulation, the certificate is known; otherwise a sentence explains why not.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedkin._base import count, is_locked, listed, lock, wait_until
from fedkin.admm import MOST_PARAMS, Share, together
from fedkin.errors import DataError, FedkinError
from fedkin.federate.messages import CENTRE, FEDERATION, INVITE, MODEL, read_invite
from fedkin.federate.program import FINISHED, RESTARTS, STOPPED, WRONG
from fedkin.federate.records import CANNOT, HOLDING, LOCK, STATE, STATUS, STDERR, SiteStatus, read_status
from fedkin.federate.trust import open_private

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


@dataclass(frozen=True)
class Line:
    """Overview of one site on this machine."""

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


def overview(places: Sequence[Path], children: Mapping[str, Child] | None = None) -> list[Line]:
    """Return a `Line` for each site; ``children`` are those of a supervisor, by name."""
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


def is_running(place: Path) -> bool:
    """Return whether a process holds the site's lock."""
    return is_locked(place / LOCK)


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
    """Return the overview of sites on this machine in the text format of Prometheus."""
    measures = (
        ("round", "gauge", "Current round of the site.", lambda line: line.round),
        ("rounds", "gauge", "Rounds of the run.", lambda line: line.rounds),
        ("change", "gauge", "Largest change of a parameter in the last round.", lambda line: line.change),
        ("neighbours_up", "gauge", "Neighbours that are connected.", lambda line: line.up),
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
    return {"kind": kind, **{name: value for name, value in asdict(line).items() if name in shown}}


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


#: A site that fails this often is not restarted.
MAX_RESTARTS = 10
#: Seconds before the first restart; doubled each time, up to a minute.
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 60.0
_STOP_SECONDS = 20.0
_LISTEN_SECONDS = 1.0  # between two looks at what a running site says
#: Lock of a running supervisor, in the directory above the sites', and the signal that stops it.
SUPERVISOR_LOCK, STOP_SIGNAL = "up.lock", signal.SIGUSR1


@dataclass
class Child:
    """A site under supervision."""

    place: Path
    process: subprocess.Popen[bytes] | None = None
    restarts: int = 0
    due: float = -math.inf
    state: str = "waiting"
    why: str = ""  # it ended, the last time
    restarts_before: int = 0  # under earlier supervisors
    stderr_before: int = 0  # bytes of stderr.txt that are older than the process
    listened: float = -math.inf  # when its status was looked at
    told: bool = False  # that it holds, or says nothing

    @property
    def name(self) -> str:
        return name_of(self.place)


@dataclass
class Supervisor:
    """Supervisor that runs the sites of these directories as child processes.

    ``module`` is the program to run, with ``options``. A site that fails is restarted at most ``max_restarts`` times.
    """

    places: Sequence[Path]
    module: str
    options: Sequence[str] = ()
    max_restarts: int = MAX_RESTARTS
    children: list[Child] = field(default_factory=list)
    #: News that has not been shown yet: a sentence for each site that ended with an error.
    news: list[str] = field(default_factory=list)

    def start(self) -> None:
        """Start every site that is here; raise `DataError` if one is already running."""
        check_idle(self.places)
        self.children = [Child(place, restarts_before=read_status(place).restarts) for place in self.places]
        for child in self.children:
            self._start(child)

    def _start(self, child: Child) -> None:
        restarts = str(child.restarts_before + child.restarts)
        role = ["--centre"] if child.name == CENTRE else []
        with open_private(child.place / STDERR) as errors:
            child.stderr_before = errors.tell()
            child.process = subprocess.Popen(
                [sys.executable, "-m", self.module, *role, str(child.place), *self.options],
                stdin=subprocess.DEVNULL,
                # the transport writes there what strangers may choose: nothing of it is to be taken for the site's
                stdout=subprocess.DEVNULL,
                stderr=errors,
                # Ctrl-C is for the supervisor, which then stops its sites
                start_new_session=True,
                # the arithmetic of one site is small: threads would only get into each other's way
                env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **os.environ, RESTARTS: restarts},
            )
        child.state = "running"

    def poll(self) -> bool:
        """Check the sites and restart those that failed; return False when all have ended."""
        now = time.monotonic()
        for child in self.children:
            if child.state == "waiting" and now >= child.due:
                self._start(child)
            if child.state != "running" or child.process is None:
                continue
            code = child.process.poll()
            if code is None:
                self._listen(child, now)
                continue
            if code == FINISHED:
                child.state = "finished"
            elif code == STOPPED:
                child.state = "stopped"
                self.news.append(f"{child.name}: stopped on request; it is not started again")
            else:
                self._after_error(child, code, now)
        return any(child.state in ("running", "waiting") for child in self.children)

    def _listen(self, child: Child, now: float) -> None:
        """Report once when a running site is holding or silent, and once more when it continues."""
        if now - child.listened < _LISTEN_SECONDS:
            return
        child.listened, status = now, read_status(child.place)
        pid = None if child.process is None else child.process.pid
        why = silence(child.place, status, pid)
        if why is None and status.state == HOLDING and status.pid == pid:
            why = f"{HOLDING}; log.jsonl in {child.place} says why"
        if why is not None and not child.told:
            self.news.append(f"{child.name}: {why}")
        elif why is None and child.told:
            self.news.append(f"{child.name}: it goes on")
        child.told = why is not None

    def _after_error(self, child: Child, code: int, now: float) -> None:
        child.why = _why(child, code)
        if code == WRONG or child.restarts >= self.max_restarts:
            child.state = "failed"
            self.news.append(f"{child.name}: {child.why}; it is not started again")
            return
        pause = min(FIRST_PAUSE * 2**child.restarts, LONGEST_PAUSE)
        child.due, child.restarts, child.state = now + pause, child.restarts + 1, "waiting"
        times = f"{child.restarts} of {self.max_restarts} times"
        self.news.append(f"{child.name}: {child.why}; starting it again in {pause:g} s ({times})")

    @property
    def by_name(self) -> dict[str, Child]:
        """The child processes by site name."""
        return {child.name: child for child in self.children}

    def failed(self) -> list[Child]:
        """Return the sites that are not restarted."""
        return [child for child in self.children if child.state == "failed"]

    def stop(self) -> None:
        """Ask all sites to stop, and kill those that do not; none is restarted."""
        running = [(child, child.process) for child in self.children if child.state == "running"]
        for child in self.children:
            if child.state == "waiting":
                child.state = "stopped"
        for _, process in running:
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + _STOP_SECONDS
        for child, process in running:
            if process is None:
                continue
            try:
                process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            child.state = "finished" if process.returncode == FINISHED else "stopped"

    def stopped(self) -> bool:
        """Return whether sites were stopped before they finished."""
        return any(child.state == "stopped" for child in self.children)


def _why(child: Child, code: int) -> str:
    """Return why a site ended, in its own words if it had the time."""
    status = read_status(child.place)
    if child.process is not None and status.pid == child.process.pid and status.why:
        return status.why
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    with (child.place / STDERR).open("rb") as errors:
        errors.seek(child.stderr_before)
        words = errors.read().decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(words) if line.strip()), "")
    return last.removeprefix("error: ").removeprefix(f"{child.name}: ") or f"ended with exit code {code}"


def all_done(places: Sequence[Path]) -> bool:
    """Return whether all sites have finished; removing a checkpoint requests a new start from round 0."""

    def is_done(place: Path) -> bool:
        made = (place / MODEL).is_dir() if name_of(place) != CENTRE else (place / STATE).exists()
        return made and read_status(place).state == "done"

    return all(is_done(place) for place in places)


@contextmanager
def only_supervisor(directory: Path) -> Iterator[None]:
    """Hold the lock of a supervisor; raise `DataError` if another process does.

    The holder must stop when it receives `STOP_SIGNAL`.
    """
    descriptor = lock(directory / SUPERVISOR_LOCK, str(os.getpid()))
    if descriptor is None:
        pid = holder(directory / SUPERVISOR_LOCK)
        raise DataError(f"already running: process {pid}; to end it first: fedkin site stop {directory}")
    try:
        yield
    finally:
        os.close(descriptor)


def check_idle(places: Sequence[Path]) -> None:
    """Raise `DataError` if sites are already running, with or without another supervisor."""
    if running := [name_of(place) for place in places if is_running(place)]:
        raise DataError(
            f"already running: {', '.join(running)}; to see them: fedkin site status {places[0].parent}; "
            f"to end them first: fedkin site stop {places[0].parent}"
        )


def stop_all(directory: Path) -> list[str]:
    """Ask every running site in a directory to stop, and their supervisor, which then restarts none.

    Returns the names of these sites.
    """
    # who runs is looked up first: the supervisor, once it is asked, stops its sites, too
    running = {name_of(place): pid for place in places_in(directory) if (pid := holder(place / LOCK)) is not None}
    # the supervisor is asked first: it must not start again what ends
    supervised = _ask(holder(directory / SUPERVISOR_LOCK), STOP_SIGNAL)
    for pid in running.values():
        _ask(pid, signal.SIGTERM)
    return [*running, "the supervisor"] if supervised else list(running)


def _ask(pid: int | None, number: signal.Signals) -> bool:
    """Send a signal to a process, if there is one."""
    with suppress(ProcessLookupError):
        if pid is not None:
            os.kill(pid, number)
            return True
    return False
