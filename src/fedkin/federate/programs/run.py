"""``python -m fedkin.federate.programs.run DIR/devices/NAME``: what ``fedkin peer run`` becomes, light for a device.

Exit codes: 0 finished, 3 stopped on request, 4 cannot go on now (start again later), 2 wrong directory or input.
"""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from fedkin._base import lock
from fedkin.errors import DataError, FedkinError
from fedkin.federate.contract.manifest import CENTRE, Manifest, load_manifest, load_rows
from fedkin.federate.contract.plans import PLAN
from fedkin.federate.journal import Journal
from fedkin.federate.links.memory import Transport
from fedkin.federate.lockstep import Patience, PeerError, Status, Stopped
from fedkin.federate.peer import Device
from fedkin.federate.setup.departures import read_notices
from fedkin.federate.setup.directory import (
    CERTIFICATE,
    DEVICES,
    KEY,
    LINKS,
    LOCK,
    LOG,
    OWNER,
    PRESENCE,
    RECORD,
    RESULT,
    STATE,
    STATUS,
    read_selection,
    read_status,
)
from fedkin.federate.trust.security import (
    SecurityError,
    check_pair,
    check_place,
    check_private,
    common_name,
    with_absolute_paths,
    write_private,
)

FINISHED, WRONG, STOPPED, LATER = 0, 2, 3, 4
#: State of a device that ended with an error.
CANNOT = "cannot go on"
#: Variable in which a supervisor says how often it has started the device again.
RESTARTS = "FEDKIN_RESTARTS"
_STATUS_SECONDS, _NOTICE_SECONDS = 0.5, 1.0
_OWNER_CURE = f'{OWNER} needs {{"device": "NAME"}}: write it, or carry it again from where peer init made it'


def run_device(place: Path, patience: Patience, *, echo: bool = False) -> int:
    """Run the device whose directory is ``place`` to its end; returns an exit code."""
    name = name_of(place)
    with only_one(place):
        journal = Journal(name, place / LOG, echo=echo)
        writer = StatusWriter(place, int(read_status(place).get("rounds", 0)))
        try:
            manifest = load_manifest(place)
            writer.rounds = manifest.rounds
            position = own_position(place, manifest, name)
            check_not_left(place, manifest, position)
            return _run(place, manifest, position, patience, journal, writer)
        except Stopped:
            journal.write("info", "stopped on request")
            return STOPPED
        except (FedkinError, OSError) as error:
            journal.write("error", "cannot go on", why=str(error))
            writer.fail(str(error))
            sys.stderr.write(f"{name}: {error}\n")
            return exit_code(error)
        finally:
            journal.close()


def check_not_left(place: Path, manifest: Manifest, position: int) -> frozenset[int]:
    """The positions of `read_notices`; raises `DataError` when that of the device itself is among them."""
    gone = read_notices(place, manifest)
    if position in gone:
        name = manifest.members[position].name
        raise DataError(f"{name} has left this federation for good ({place}/left/{name}): the others go on without it")
    return gone


def exit_code(error: FedkinError | OSError) -> int:
    """`LATER` for what may be gone at the next start, `WRONG` for what somebody has to mend first."""
    if isinstance(error, OSError):
        mend = isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError) or error.errno == errno.EROFS
        return WRONG if mend else LATER
    return LATER if isinstance(error, PeerError) else WRONG


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

    Raises
    ------
    DataError, SecurityError
        When they are missing or of another device.
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


def _run(
    place: Path, manifest: Manifest, position: int, patience: Patience, journal: Journal, writer: StatusWriter
) -> int:
    from fedkin.federate.links.zenoh import ZenohTransport

    others = {manifest.members[v].name for v in manifest.partners(position)}
    if manifest.placement == "central":
        others = {member.name for member in manifest.members} if position == manifest.n_devices else {CENTRE}
    transport = ZenohTransport(links(place, manifest), link_watcher(journal, others, manifest.secure))
    try:
        if position == manifest.n_devices:
            _run_centre(place, manifest, transport, journal, patience, writer)
        elif manifest.placement == "central":
            _run_worker(place, manifest, position, transport, journal, patience, writer)
        elif manifest.placement == "replicas":
            _run_replica(place, manifest, position, transport, journal, patience, writer)
        else:
            _run_peer(place, manifest, position, transport, journal, patience, writer)
        writer.status.state = "done"
        writer.write(force=True)
        return FINISHED
    finally:
        transport.close()


def _run_peer(
    place: Path,
    manifest: Manifest,
    position: int,
    transport: Transport,
    journal: Journal,
    patience: Patience,
    writer: StatusWriter,
) -> None:
    rows = load_rows(place, manifest, position)
    device = Device(
        manifest,
        position,
        rows,
        transport,
        journal,
        checkpoint=place / STATE,
        patience=patience,
        left=read_notices(place, manifest) | read_selection(place, manifest),
        tick=writer.device_tick,
    )
    writer.status = device.status
    theta = device.run()
    write_result(place, theta, device.shard.theta[0], manifest, position)
    writer.write(force=True)
    device.linger()


def _run_replica(
    place: Path,
    manifest: Manifest,
    position: int,
    transport: Transport,
    journal: Journal,
    patience: Patience,
    writer: StatusWriter,
) -> None:
    from fedkin.federate.replicas import Replica

    device = Replica(
        manifest,
        position,
        load_rows(place, manifest, position),
        transport,
        journal,
        checkpoint=place / STATE,
        record=place / RECORD,
        patience=patience,
        tick=lambda _: writer.tick(),
    )
    writer.status = device.status
    theta = device.run()
    write_result(place, theta, device.theta, manifest, position)
    if device.leads:
        names = [manifest.members[u].name for u in device.component.members]
        _write_presence(place, device.history, names)
    writer.write(force=True)
    device.linger()


def _run_worker(
    place: Path,
    manifest: Manifest,
    position: int,
    transport: Transport,
    journal: Journal,
    patience: Patience,
    writer: StatusWriter,
) -> None:
    from fedkin.federate.central import Worker

    rows = load_rows(place, manifest, position)
    worker = Worker(manifest, position, rows, transport, journal, patience=patience, tick=writer.tick)
    writer.status = worker.status
    theta = worker.run()
    write_result(place, theta, theta, manifest, position)


def _run_centre(
    place: Path, manifest: Manifest, transport: Transport, journal: Journal, patience: Patience, writer: StatusWriter
) -> None:
    from fedkin.federate.central import Centre

    centre = Centre(manifest, transport, journal, checkpoint=place / STATE, patience=patience, tick=writer.tick)
    writer.status = centre.status
    centre.run()
    _write_presence(place, centre.hub.presence, [member.name for member in manifest.members])
    writer.write(force=True)
    centre.linger()


def _write_presence(place: Path, presence: Sequence[Any], names: Sequence[str]) -> None:
    _replace_archive(place / PRESENCE, available=np.array(presence), devices=np.array(names))


def links(place: Path, manifest: Manifest) -> dict[str, Any]:
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


def link_watcher(journal: Journal, neighbours: set[str], secure: bool) -> Any:
    """A function for links that open and close, which names strangers in the log."""

    def on_link(name: str | None, address: str, opened: bool) -> None:
        if not opened:
            journal.sparingly("info", "link closed", peer=name)
        elif secure and name not in neighbours:
            journal.sparingly("warning", "link from a stranger: all it does is refused", peer=name, address=address)
        else:
            journal.sparingly("info", "link opened", peer=name)

    return on_link


def write_result(
    place: Path, theta: np.ndarray[Any, Any], last: np.ndarray[Any, Any], manifest: Manifest, position: int
) -> None:
    """Write the device's averaged and last parameters, for its owner, with the run that they are of."""
    name = manifest.members[position].name
    _replace_archive(place / RESULT, theta=theta, last=last, run=manifest.run, revision=manifest.revision, device=name)


def _replace_archive(path: Path, **parts: Any) -> None:
    """Write an NPZ file that only the owner may read, in one step."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **parts)
    temporary = path.with_name(f"{path.name}.tmp")
    write_private(temporary, buffer.getvalue())
    temporary.replace(path)


class StatusWriter:
    """Keeps ``status.json`` up to date, and passes on the wish to stop."""

    def __init__(self, place: Path, rounds: int) -> None:
        self.place, self.rounds = place, rounds
        before = read_status(place)
        # a device that cannot even begin is where it was
        self.status = Status(round=int(before.get("round", 0)) if before.get("rounds") == rounds else 0)
        self.restarts = int(os.environ.get(RESTARTS, before.get("restarts", 0)))
        self.why: str | None = None
        self.stop = False
        self._written = self._noticed = 0.0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stop = True

    def device_tick(self, device: Device) -> None:
        """To be called now and then by a `Device`: also looks for notices of neighbours that have left for good."""
        self.tick()
        now = time.monotonic()
        if now - self._noticed > _NOTICE_SECONDS:
            self._noticed = now
            try:
                device.drop(check_not_left(self.place, device.manifest, device.position))
            except SecurityError as error:
                device.journal.sparingly("warning", "notice refused", why=str(error))

    def tick(self) -> None:
        """Write the status if it is time to, and raise `Stopped` after SIGTERM or Ctrl-C."""
        if self.stop:
            self.status = replace(self.status, state="stopped")
            self.write(force=True)
            raise Stopped("stopped on request")
        self.write()

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
        try:
            write_private(self.place / f"{STATUS}.tmp", json.dumps(content).encode())
            (self.place / f"{STATUS}.tmp").replace(self.place / STATUS)
        except OSError:
            pass  # a full disk: checkpoints report it


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse arguments and run one device."""
    parser = argparse.ArgumentParser(prog="fedkin peer run", description="Run one device of a federation.")
    parser.add_argument("place", type=Path, help="the device's directory")
    parser.add_argument("--echo", action="store_true", help="log to standard error, too")
    for name, value in vars(Patience()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=value, metavar="SECONDS")
    given = vars(parser.parse_args(arguments))
    place, echo = given.pop("place"), given.pop("echo")
    try:
        return run_device(place, Patience(**given), echo=echo)
    except (FedkinError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return exit_code(error)


if __name__ == "__main__":
    sys.exit(main())
