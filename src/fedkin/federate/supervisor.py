"""Run the sites of a directory as child processes, start those that fail again, and stop them."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fedkin._base import is_locked, lock
from fedkin.errors import DataError
from fedkin.federate.messages import CENTRE, MODEL
from fedkin.federate.monitoring import Line, holder, name_of, overview, places_in, silence
from fedkin.federate.program import FINISHED, RESTARTS, STOPPED, WRONG
from fedkin.federate.records import HOLDING, LOCK, STATE, STDERR, read_status
from fedkin.federate.trust import open_private

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


class Supervisor:
    """Supervisor that runs the sites of these directories as child processes.

    ``module`` is the program to run, with ``options``. A site that fails is restarted at most ``max_restarts`` times.
    ``news`` has a sentence for each site that ended with an error, until somebody shows it.
    """

    def __init__(
        self, places: Sequence[Path], module: str, options: Sequence[str] = (), max_restarts: int = MAX_RESTARTS
    ) -> None:
        self.places, self.module, self.options, self.max_restarts = places, module, options, max_restarts
        self.children, self.news = list[Child](), list[str]()

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

    def overview(self) -> list[Line]:
        """Return a `Line` for each site."""
        lines = overview(self.places, {child.place: child.state for child in self.children})
        for line, child in zip(lines, self.children, strict=False):
            line.restarts = child.restarts_before + child.restarts
        return lines

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
    if running := [name_of(place) for place in places if is_locked(place / LOCK)]:
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
