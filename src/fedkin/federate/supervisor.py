"""Sites on this machine as child processes: started, watched, started again when they die, stopped."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from fedkin._base import lock
from fedkin.errors import DataError
from fedkin.federate.messages import CENTRE, MODEL
from fedkin.federate.program import FINISHED, RESTARTS, STOPPED, WRONG
from fedkin.federate.records import HOLDING, LOCK, STATE, STDERR, read_status
from fedkin.federate.status import holder, is_running, name_of, places_in, silence
from fedkin.federate.trust import open_private

#: A site that dies so often is given up.
MAX_RESTARTS = 10
#: Seconds before the first restart; doubled each time, up to a minute.
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 60.0
_STOP_SECONDS = 20.0
_LISTEN_SECONDS = 1.0  # between two looks at what a running site says
#: What a supervisor holds while it runs, in the directory that has the sites' ones, and how it is asked to stop.
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
    """Runs the sites of these directories as child processes.

    ``module`` is the program, which gets ``options``; one that dies is started again at most ``max_restarts`` times.
    """

    places: Sequence[Path]
    module: str
    options: Sequence[str] = ()
    max_restarts: int = MAX_RESTARTS
    children: list[Child] = field(default_factory=list)
    #: What happened and has not been told yet: a sentence for each site that ended with an error.
    news: list[str] = field(default_factory=list)

    def start(self) -> None:
        """Start every site that is here; raises `DataError` when one runs already."""
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
        """Look after the sites; False when all have ended, well or not."""
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
        """Tell once when a running site holds or says nothing, and once more when that is over."""
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
        """The sites by their names."""
        return {child.name: child for child in self.children}

    def failed(self) -> list[Child]:
        """Sites that are not started again."""
        return [child for child in self.children if child.state == "failed"]

    def stop(self) -> None:
        """Ask all sites to stop, and end those that do not; none is started again."""
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
        """Whether sites were stopped before their end."""
        return any(child.state == "stopped" for child in self.children)


def _why(child: Child, code: int) -> str:
    """Why a site ended, in its own words if it had the time."""
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
    """Whether all sites have done all that there is to do; who removes a checkpoint wants to start from round 0."""

    def is_done(place: Path) -> bool:
        made = (place / MODEL).is_dir() if name_of(place) != CENTRE else (place / STATE).exists()
        return made and read_status(place).state == "done"

    return all(is_done(place) for place in places)


@contextmanager
def only_supervisor(directory: Path) -> Iterator[None]:
    """Hold the lock of a supervisor; raises `DataError` when another process does.

    Whoever holds it must take `STOP_SIGNAL` for the wish to stop.
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
    """Raise `DataError` when sites run already, under another supervisor or none."""
    if running := [name_of(place) for place in places if is_running(place)]:
        raise DataError(
            f"already running: {', '.join(running)}; to see them: fedkin site status {places[0].parent}; "
            f"to end them first: fedkin site stop {places[0].parent}"
        )


def stop_all(directory: Path) -> list[str]:
    """Ask every site that runs in a directory to stop, and their supervisor, which then starts none again.

    Returns who was asked.
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
