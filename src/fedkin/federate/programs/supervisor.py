"""All devices of a federation directory on this machine: started, watched, started again when they die, stopped."""

from __future__ import annotations

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
from fedkin.federate.contract.manifest import CENTRE, Manifest
from fedkin.federate.programs.overview import expected_names, holder, is_device, is_running, own_name, silence
from fedkin.federate.programs.program import FINISHED, RESTARTS, STOPPED, WRONG
from fedkin.federate.setup.departures import left_devices
from fedkin.federate.setup.directory import DEVICES, LOCK, STATE, device_directories, read_result, read_status
from fedkin.federate.trust.security import open_private
from fedkin.federate.waiting import HOLDING

#: A device that dies so often is given up.
MAX_RESTARTS = 10
#: Seconds before the first restart; doubled each time, up to a minute.
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 60.0
_STOP_SECONDS = 20.0
_LISTEN_SECONDS = 1.0  # between two looks at what a running device says
STDERR = "stderr.txt"  # of a device under supervision
#: What a supervisor holds while it runs, in the directory of the federation, and how it is asked to stop.
SUPERVISOR_LOCK, STOP_SIGNAL = "up.lock", signal.SIGUSR1


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
    listened: float = 0.0  # when its status was looked at
    told: bool = False  # that it holds, or says nothing

    @property
    def name(self) -> str:
        return self.place.name


@dataclass
class Supervisor:
    """Runs the devices of a directory, or of those ``places`` in it, as child processes.

    ``options`` are passed on to each device (``fedkin peer run --help``), which runs ``module``; one that dies is
    started again at most ``max_restarts`` times.
    """

    directory: Path
    options: Sequence[str] = ()
    max_restarts: int = MAX_RESTARTS
    module: str = "fedkin.federate.programs.run"
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
                # the transport writes there what strangers may choose: nothing of it is to be taken for the device's
                stdout=subprocess.DEVNULL,
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
        """Tell once when a running device holds or says nothing, and once more when that is over."""
        if now - child.listened < _LISTEN_SECONDS:
            return
        child.listened = now
        status = read_status(child.place)
        pid = None if child.process is None else child.process.pid
        why = silence(child.place, status, pid)
        if why is None and status.get("state") == HOLDING and status.get("pid") == pid:
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
        child.due = now + pause
        child.restarts += 1
        child.state = "waiting"
        times = f"{child.restarts} of {self.max_restarts} times"
        self.news.append(f"{child.name}: {child.why}; starting it again in {pause:g} s ({times})")

    @property
    def by_name(self) -> dict[str, Child]:
        """The devices by their names."""
        return {child.name: child for child in self.children}

    def failed(self) -> list[Child]:
        """Devices that are not started again."""
        return [child for child in self.children if child.state == "failed"]

    def stop(self) -> None:
        """Ask all devices to stop, and end those that do not; none is started again."""
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
        """Whether devices were stopped before their end."""
        return any(child.state == "stopped" for child in self.children)


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


def all_done(directory: Path, manifest: Manifest) -> bool:
    """Whether all devices of the federation are here, or have left, and have done all that there is to do."""
    left, central = left_devices(directory), manifest.placement == "central"
    places = [place for place in device_directories(directory) if place.name not in left]
    if {place.name for place in places} | set(left) != set(expected_names(manifest)):
        return False  # somebody elsewhere may still need the last rounds

    def is_done(place: Path) -> bool:
        # who removes a checkpoint wants to start from round 0
        kept = (place / STATE).exists() or (central and place.name != CENTRE)
        result = place.name == CENTRE or read_result(place) is not None
        return kept and result and read_status(place).get("state") == "done"

    return all(is_done(place) for place in places)


@contextmanager
def only_supervisor(directory: Path) -> Iterator[None]:
    """Hold the lock of a federation's supervisor; raises `DataError` when another process does.

    Whoever holds it must take `STOP_SIGNAL` for the wish to stop.
    """
    descriptor = lock(directory / SUPERVISOR_LOCK, str(os.getpid()))
    if descriptor is None:
        raise DataError(
            f"already running: fedkin peer up, process {supervisor_of(directory)}; "
            f"to end it first: fedkin peer stop {directory}"
        )
    try:
        yield
    finally:
        os.close(descriptor)


def supervisor_of(directory: Path) -> int | None:
    """The number of the process that supervises the devices of a directory, if one does."""
    return holder(directory / SUPERVISOR_LOCK)


def check_idle(directory: Path) -> None:
    """Raise `DataError` when devices of this directory run, under another supervisor or none."""
    running = [place.name for place in device_directories(directory) if is_running(place)]
    if running:
        raise DataError(
            f"already running: {', '.join(running)}; to see them: fedkin peer status {directory}; "
            f"to end them first: fedkin peer stop {directory}"
        )


def stop_all(directory: Path) -> list[str]:
    """Ask every device that runs here to stop, and their supervisor, which then starts none again.

    Returns who was asked. ``directory`` is that of a federation or of one device.
    """
    if is_device(directory):
        return [own_name(directory)] if _ask(holder(directory / LOCK), signal.SIGTERM) else []
    # who runs is looked up first: the supervisor, once it is asked, stops its devices, too
    places = device_directories(directory) if (directory / DEVICES).is_dir() else []
    running = {place.name: pid for place in places if (pid := holder(place / LOCK)) is not None}
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
