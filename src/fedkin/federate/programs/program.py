"""What all programs of a device have in common: who it is, lock, log, status, signals, links, exit code.

Exit codes: 0 finished, 3 stopped on request, 4 cannot go on now (start again later), 2 wrong directory or input.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from fedkin._base import lock
from fedkin.data import Rows
from fedkin.errors import DataError, FedkinError
from fedkin.federate.contract.manifest import CENTRE, Manifest
from fedkin.federate.contract.plans import PLAN
from fedkin.federate.contract.reading import load_manifest, load_rows
from fedkin.federate.journal import Journal
from fedkin.federate.records import write_record
from fedkin.federate.setup.directory import CERTIFICATE, DEVICES, KEY, LINKS, LOCK, LOG, OWNER, STATUS, read_status
from fedkin.federate.trust.security import (
    check_pair,
    check_place,
    check_private,
    common_name,
    with_absolute_paths,
)
from fedkin.federate.waiting import Patience, PeerError, Status, Stopped

if TYPE_CHECKING:
    from fedkin.federate.links.zenoh import ZenohTransport

T = TypeVar("T")

FINISHED, WRONG, STOPPED, LATER = 0, 2, 3, 4
#: State of a device that ended with an error.
CANNOT = "cannot go on"
#: Environment variable in which a supervisor says how often it has started the device again.
RESTARTS = "FEDKIN_RESTARTS"
_STATUS_SECONDS = 0.5
_OWNER_CURE = f'{OWNER} needs {{"device": "NAME"}}: write it, or carry it again from where peer init made it'


@dataclass(frozen=True)
class Program:
    """A device that runs: where and who it is, and what it writes to. The central machine has position V."""

    place: Path
    name: str
    manifest: Manifest
    position: int
    journal: Journal
    status: StatusWriter

    def rows(self) -> Rows:
        """Its rows, checked against the manifest."""
        return load_rows(self.place, self.manifest, self.position)

    @contextmanager
    def linked(self) -> Iterator[ZenohTransport]:
        """A transport to those whom it exchanges messages with; closed at the end."""
        from fedkin.federate.links.zenoh import ZenohTransport

        manifest, position = self.manifest, self.position
        if manifest.placement == "central":
            known = {member.name for member in manifest.members} if position == manifest.n_devices else {CENTRE}
        else:
            known = {manifest.members[v].name for v in manifest.partners(position)}

        def on_link(name: str | None, address: str, opened: bool) -> None:
            if not opened:
                self.journal.sparingly("info", "link closed", peer=name)
            elif manifest.secure and name not in known:
                words = "link from a stranger: all it does is refused"
                self.journal.sparingly("warning", words, peer=name, address=address)
            else:
                self.journal.sparingly("info", "link opened", peer=name)

        def on_refused(key: str, size: int) -> None:
            why = f"{size} bytes, but the largest message has {manifest.most_bytes}"
            self.journal.sparingly("warning", "message refused", peer=key.split("/")[2], why=why)

        transport = ZenohTransport(read_links(self.place, manifest), on_link, on_refused, manifest.most_bytes)
        try:
            yield transport
        finally:
            transport.close()


def run_program(place: Path, work: Callable[[Program], None], *, echo: bool = False) -> int:
    """Do ``work`` as the device whose directory is ``place``; errors go to its log, status and stderr.

    Returns an exit code.
    """
    try:
        name = name_of(place)
        with only_one(place), closing(Journal(name, place / LOG, echo=echo)) as journal:
            status = StatusWriter(place)
            try:
                manifest = load_manifest(place)
                position = own_position(place, manifest, name)
                work(Program(place, name, manifest, position, journal, status))
            except Stopped:
                journal.write("info", "stopped on request")
                return STOPPED
            except (FedkinError, OSError) as error:
                journal.write("error", CANNOT, why=str(error))
                status.fail(str(error))
                sys.stderr.write(f"{name}: {error}\n")
                return exit_code(error)
    except (FedkinError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return exit_code(error)
    return FINISHED


class DeviceParser(argparse.ArgumentParser):
    """Parses the directory of a device, and how long it waits (``patience`` has the defaults)."""

    def __init__(self, command: str, words: str, patience: Patience) -> None:
        super().__init__(prog=f"fedkin peer {command}", description=words)
        self.add_argument("place", type=Path, help="the device's directory")
        for name, value in vars(patience).items():
            self.add_argument(f"--{name.replace('_', '-')}", type=float, default=value, metavar="SECONDS")

    def parsed(self, arguments: Sequence[str] | None) -> tuple[Path, Patience, dict[str, Any]]:
        """The directory, the waits, and the other options."""
        given = vars(self.parse_args(arguments))
        waits = {name: given.pop(name) for name in vars(Patience())}
        return given.pop("place"), self.checked(lambda: Patience(**waits)), given

    def checked(self, make: Callable[[], T]) -> T:
        """What ``make`` makes; options of which it cannot be made end the process like those that cannot be parsed."""
        try:
            return make()
        except FedkinError as error:
            self.error(str(error))


def exit_code(error: FedkinError | OSError) -> int:
    """`LATER` for what may be gone at the next start, `WRONG` for what somebody has to mend first."""
    if isinstance(error, OSError):
        mend = isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError) or error.errno == errno.EROFS
        return WRONG if mend else LATER
    return LATER if isinstance(error, PeerError) else WRONG


# --- the device's directory ---


def name_of(place: Path) -> str:
    """The name of the device whose directory is ``place``, as its owner's file says."""
    if not (place / OWNER).exists():
        if (place / DEVICES).is_dir():
            raise DataError(f"{place} is the directory of a federation: give that of a device, {place / DEVICES}/NAME")
        load_manifest(place)
    try:
        return str(_read_json(place / OWNER, _OWNER_CURE)["device"])
    except KeyError:
        raise DataError(f"{place / OWNER} does not say which device it is; {_OWNER_CURE}") from None


def own_position(place: Path, manifest: Manifest, name: str) -> int:
    """The position of device ``name``, after checking that plan and certificate in ``place`` are its own.

    Raises `DataError` or `SecurityError` when they are missing or of another device.
    """
    check_private(place / PLAN)
    found = {PLAN: manifest.planned_for}
    if manifest.secure:
        found[CERTIFICATE] = common_name(place / CERTIFICATE)
    for file, other in found.items():
        if other != name:
            whose = "those of all devices" if other is None else f"that of {other}"
            raise DataError(
                f"{place / OWNER} says that this is {name}, but {file} is {whose}: correct {OWNER}, or carry the "
                f"directory of {name} again, whole, from where peer init made it"
            )
    return manifest.n_devices if name == CENTRE else manifest.position(name)


def read_links(place: Path, manifest: Manifest) -> dict[str, Any]:
    """The zenoh configuration in a device's directory, with absolute paths."""
    check_place(place)
    if manifest.secure:
        check_pair(place / CERTIFICATE, place / KEY)
    cure = f"carry {LINKS} again from where peer init made it"
    configuration = _read_json(place / LINKS, cure)
    if manifest.secure and "access_control" not in configuration:
        raise DataError(f"{place / LINKS} has no access list, but the manifest asks for secure links; {cure}")
    try:
        return with_absolute_paths(configuration, place)
    except (TypeError, ValueError, AttributeError):
        raise DataError(f"{place / LINKS} is not a configuration of zenoh; {cure}") from None


def _read_json(path: Path, cure: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DataError(f"{path} is missing; {cure}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); {cure}") from None
    except ValueError as error:
        raise DataError(f"{path} is not JSON ({error}); {cure}") from None
    if not isinstance(content, dict):
        raise DataError(f"{path} is not a JSON object; {cure}")
    return content


@contextmanager
def only_one(place: Path) -> Iterator[None]:
    """Hold the device's lock; raises `DataError` when another process does."""
    try:
        descriptor = lock(place / LOCK, str(os.getpid()))
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        raise DataError(
            f"{place} cannot be written ({error.strerror}), but a device keeps its state and its log there: make it "
            "writable for the user who runs the device, or carry it to a place that is"
        ) from None
    if descriptor is None:
        raise DataError(f"{place} is in use by another process: one device runs once")
    try:
        yield
    finally:
        os.close(descriptor)


class StatusWriter:
    """Keeps ``status.json`` up to date, and passes on the wish to stop. A device replaces ``status`` by its own."""

    def __init__(self, place: Path) -> None:
        self.place = place
        before = read_status(place)
        # a device that cannot even begin is where it was
        self.rounds = int(before.get("rounds", 0))
        self.status = Status(round=int(before.get("round", 0)))
        self.restarts = int(os.environ.get(RESTARTS, before.get("restarts", 0)))
        self.why: str | None = None
        self.stop = False
        self._written = 0.0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stop = True

    def begin(self, status: Status, rounds: int) -> None:
        """From now on write this status."""
        self.status, self.rounds = status, rounds

    def tick(self, device: object = None) -> None:
        """Write the status if it is time to, and raise `Stopped` after SIGTERM or Ctrl-C."""
        if self.stop:
            self.status = replace(self.status, state="stopped")
            self.write(force=True)
            raise Stopped("stopped on request")
        self.write()

    def end(self, state: str) -> None:
        """Write the last state."""
        self.status.state = state
        self.write(force=True)

    def fail(self, why: str) -> None:
        """Write that the device cannot go on."""
        self.status, self.why = replace(self.status, state=CANNOT), why
        self.write(force=True)

    def write(self, *, force: bool = False) -> None:
        """Replace ``status.json``."""
        now = time.monotonic()
        if not force and now - self._written < _STATUS_SECONDS:
            return
        self._written = now
        status = self.status
        content = {
            "pid": os.getpid(),
            "time": time.time(),
            "state": status.state,
            "round": status.round,
            "rounds": self.rounds,
            "change": status.change if np.isfinite(status.change) else None,
            "up": sorted(status.up),
            "waiting_for": status.waiting_for,
            "pulled": status.pulled,
            "repaired": status.repaired,
            "started": status.started,
            "restarts": self.restarts,
            "why": self.why,
        }
        with suppress(OSError):  # a full disk: checkpoints report it
            write_record(self.place / STATUS, content)
