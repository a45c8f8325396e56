"""All devices of a federation directory on this machine: started, watched, started again when they die, stopped."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from fedkin.engine.directory import LOCK, STATE, device_directories, read_result, read_status
from fedkin.engine.manifest import CENTRE, Manifest
from fedkin.engine.notices import left_devices
from fedkin.engine.process import CANNOT, FINISHED, RESTARTS, STOPPED, WRONG
from fedkin.engine.security import open_private
from fedkin.errors import DataError

#: A device that dies so often is given up.
MAX_RESTARTS = 10
#: Seconds before the first restart; doubled each time, up to a minute.
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 60.0
_STOP_SECONDS = 20.0
STDERR = "stderr.txt"  # of a device under supervision


@dataclass
class Child:
    """A device under supervision."""

    place: Path
    process: subprocess.Popen[bytes] | None = None
    restarts: int = 0
    due: float = 0.0
    state: str = "waiting"
    why: str = ""  # it ended, the last time
    restarts_before: int = 0  # under earlier supervisors
    stderr_before: int = 0  # bytes of stderr.txt that are older than the process

    @property
    def name(self) -> str:
        return self.place.name


@dataclass
class Supervisor:
    """Runs the devices of a directory as child processes.

    Parameters
    ----------
    directory : path
        Of the federation.
    options : sequence of str
        Passed on to each device, see ``fedkin peer run --help``.
    max_restarts : int
        How often a device that dies is started again.
    module : str
        What a device runs.
    places : sequence of path, optional
        Directories of the devices to run; all that are here by default.
    """

    directory: Path
    options: Sequence[str] = ()
    max_restarts: int = MAX_RESTARTS
    module: str = "fedkin.engine.process"
    places: Sequence[Path] | None = None
    children: list[Child] = field(default_factory=list)
    #: What happened and has not been told yet: a sentence for each device that ended with an error.
    news: list[str] = field(default_factory=list)

    def start(self) -> None:
        """Start every device that is here; raises `DataError` when one runs already."""
        check_idle(self.directory)
        left = left_devices(self.directory)
        places = device_directories(self.directory) if self.places is None else self.places
        places = [place for place in places if place.name not in left]
        self.children = [Child(place, restarts_before=int(read_status(place).get("restarts", 0))) for place in places]
        for child in self.children:
            self._start(child)

    def _start(self, child: Child) -> None:
        restarts = str(child.restarts_before + child.restarts)
        with open_private(child.place / STDERR) as errors:
            child.stderr_before = errors.tell()
            child.process = subprocess.Popen(
                [sys.executable, "-m", self.module, str(child.place), *self.options],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                # Ctrl-C is for the supervisor, which then stops its devices
                start_new_session=True,
                # the arithmetic of one device is small: threads would only get into each other's way
                env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **os.environ, RESTARTS: restarts},
            )
        child.state = "running"

    def poll(self) -> bool:
        """Look after the devices; False when all have ended, well or not."""
        now = time.monotonic()
        for child in self.children:
            if child.state == "waiting" and now >= child.due:
                self._start(child)
            if child.state != "running" or child.process is None:
                continue
            code = child.process.poll()
            if code is None:
                continue
            if code == FINISHED:
                child.state = "finished"
            elif code == STOPPED:
                child.state = "stopped"
            else:
                self._after_error(child, code, now)
        return any(child.state in ("running", "waiting") for child in self.children)

    def _after_error(self, child: Child, code: int, now: float) -> None:
        child.why = _why(child, code)
        if code == WRONG or child.restarts >= self.max_restarts:
            child.state = "failed"
            self.news.append(f"{child.name}: {child.why}; it is not started again")
            return
        pause = min(FIRST_PAUSE * 2**child.restarts, LONGEST_PAUSE)
        child.due = now + pause
        child.restarts += 1
        child.state = "waiting"
        times = f"{child.restarts} of {self.max_restarts} times"
        self.news.append(f"{child.name}: {child.why}; starting it again in {pause:g} s ({times})")

    def failed(self) -> list[Child]:
        """Devices that are not started again."""
        return [child for child in self.children if child.state == "failed"]

    def stop(self) -> None:
        """Ask all devices to stop, and end those that do not."""
        running = [
            child.process for child in self.children if child.process is not None and child.process.poll() is None
        ]
        for process in running:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + _STOP_SECONDS
        for process in running:
            try:
                process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _why(child: Child, code: int) -> str:
    """Why a device ended, in its own words if it had the time."""
    status = read_status(child.place)
    if child.process is not None and status.get("pid") == child.process.pid and status.get("why"):
        return str(status["why"])
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    with (child.place / STDERR).open("rb") as errors:
        errors.seek(child.stderr_before)
        words = errors.read().decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(words) if line.strip()), "")
    return last.removeprefix("error: ").removeprefix(f"{child.name}: ") or f"ended with exit code {code}"


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


def overview(directory: Path, children: Sequence[Child] = ()) -> list[Line]:
    """A line for each device whose directory is here."""
    restarts = {child.name: child for child in children}
    left = left_devices(directory)
    lines = []
    for place in device_directories(directory):
        status, alive = read_status(place), is_running(place)
        child = restarts.get(place.name)
        state = str(status.get("state", "never started"))
        if not alive and state not in ("done", "finished", "stopped", "tuned", "never started", CANNOT):
            state = "finished" if read_result(place) is not None else "dead"
        if child is not None and child.state in ("failed", "waiting"):
            state = child.state if child.state == "failed" else "starting again"
        elif child is not None and child.state == "running" and state not in ("done", "finished"):
            # a file without a process that runs is of the time before
            state = state if alive and status else "starting"
        if place.name in left and not alive:
            state = "left"
        lines.append(
            Line(
                place.name,
                state,
                int(status.get("round", 0)),
                int(status.get("rounds", 0)),
                status.get("change"),
                len(status.get("up", ())),
                status.get("waiting_for", ()),
                int(status.get("pulled", 0)),
                int(status.get("repaired", 0)),
                int(status.get("restarts", 0)) if child is None else child.restarts_before + child.restarts,
                status.get("pid") if alive else None,
                status.get("why"),
            )
        )
    return lines


def is_running(place: Path) -> bool:
    """Whether a process holds the device's lock."""
    try:
        descriptor = os.open(place / LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def all_done(directory: Path, manifest: Manifest) -> bool:
    """Whether all devices of the federation are here, or have left, and have done all that there is to do."""
    left, central = left_devices(directory), manifest.placement == "central"
    names = {member.name for member in manifest.members} | ({CENTRE} if central else set())
    places = [place for place in device_directories(directory) if place.name not in left]
    if {place.name for place in places} | set(left) != names:
        return False  # somebody elsewhere may still need the last rounds

    def is_done(place: Path) -> bool:
        # who removes a checkpoint wants to start from round 0
        kept = (place / STATE).exists() or (central and place.name != CENTRE)
        result = place.name == CENTRE or read_result(place) is not None
        return kept and result and read_status(place).get("state") == "done"

    return all(is_done(place) for place in places)


def check_idle(directory: Path) -> None:
    """Raise `DataError` when devices of this directory run, under another supervisor or none."""
    running = [place.name for place in device_directories(directory) if is_running(place)]
    if running:
        raise DataError(
            f"already running: {', '.join(running)}; to see them: fedkin peer status {directory}; "
            f"to end them first: fedkin peer stop {directory}"
        )


def stop_all(directory: Path) -> list[str]:
    """Ask every device that runs here to stop, and return their names; a supervisor does not start them again."""
    stopped = []
    for place in device_directories(directory):
        # who holds the lock has written its number there, so it is not that of another process by now
        if is_running(place):
            with suppress(ProcessLookupError, ValueError):
                os.kill(int((place / LOCK).read_text()), signal.SIGTERM)
                stopped.append(place.name)
    return stopped


def prometheus(lines: Sequence[Line]) -> str:
    """The overview in the text format of Prometheus.

    Examples
    --------
    >>> from fedkin.engine.supervisor import Line, prometheus
    >>> line = Line("north", "running", 12, 100, 0.5, 2, (), 3, 0, 1, 4711)
    >>> print(prometheus([line]).splitlines()[2])
    fedkin_round{device="north"} 12
    """
    measures = (
        ("round", "gauge", "Round that the device is in.", lambda line: line.round),
        ("rounds", "gauge", "Rounds of the run.", lambda line: line.rounds),
        ("change", "gauge", "Largest change of a parameter in the last round.", lambda line: line.change),
        ("neighbours_up", "gauge", "Neighbours that are there.", lambda line: line.up),
        ("waiting_for", "gauge", "Neighbours that it has waited for long.", lambda line: len(line.waiting_for)),
        ("running", "gauge", "1 when the process runs.", lambda line: int(line.pid is not None)),
        ("pulled_total", "counter", "Messages asked for again.", lambda line: line.pulled),
        ("repaired_total", "counter", "Edge duals that had to be repaired.", lambda line: line.repaired),
        ("restarts_total", "counter", "Times that the supervisor started it again.", lambda line: line.restarts),
    )
    out = []
    for name, kind, words, value_of in measures:
        out += [f"# HELP fedkin_{name} {words}", f"# TYPE fedkin_{name} {kind}"]
        values = [(line.name, value_of(line)) for line in lines]
        out += [f'fedkin_{name}{{device="{device}"}} {value}' for device, value in values if value is not None]
    return "\n".join(out) + "\n"
