"""``python -m fedkin.federate.programs.run DIR/devices/NAME``: what ``fedkin peer run`` becomes, light for a device."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedkin._base import write_arrays
from fedkin.errors import DataError
from fedkin.federate.contract.manifest import Manifest
from fedkin.federate.links import Transport
from fedkin.federate.peer import Device
from fedkin.federate.programs.program import DeviceParser, Program, run_program
from fedkin.federate.setup.departures import read_departures
from fedkin.federate.setup.directory import PRESENCE, RECORD, RESULT, STATE, read_selection
from fedkin.federate.trust.security import SecurityError
from fedkin.federate.waiting import Patience

_LOOK_SECONDS = 1.0  # between two looks for neighbours that have left


def run(program: Program, patience: Patience) -> None:
    """Do all rounds that are left."""
    manifest, position = program.manifest, program.position
    program.status.rounds = manifest.rounds
    check_not_left(program.place, manifest, position)
    roles: dict[str, Callable[[Program, Transport, Patience], None]]
    roles = {"peer": _peer, "replicas": _replica, "central": _worker}
    role = _centre if position == manifest.n_devices else roles[manifest.placement]
    with program.linked() as transport:
        role(program, transport, patience)
        program.status.end("done")


def check_not_left(place: Path, manifest: Manifest, position: int) -> frozenset[int]:
    """The positions of `read_departures`; raises `DataError` when that of the device itself is among them."""
    gone = read_departures(place, manifest)
    if position in gone:
        name = manifest.members[position].name
        raise DataError(f"{name} has left this federation for good ({place}/left/{name}): the others go on without it")
    return gone


def _peer(program: Program, transport: Transport, patience: Patience) -> None:
    place, manifest, position = program.place, program.manifest, program.position
    looked = 0.0

    def tick(device: Device) -> None:
        nonlocal looked
        program.status.tick()
        now = time.monotonic()
        if now - looked > _LOOK_SECONDS:
            looked = now
            try:
                device.drop(check_not_left(place, manifest, position))
            except SecurityError as error:
                program.journal.sparingly("warning", "notice refused", why=str(error))

    device = Device(
        manifest,
        position,
        program.rows(),
        transport,
        program.journal,
        checkpoint=place / STATE,
        patience=patience,
        left=read_departures(place, manifest) | read_selection(place, manifest),
        tick=tick,
    )
    program.status.begin(device.status, manifest.rounds)
    theta = device.run()
    write_result(place, theta, device.shard.theta[0], manifest, position)
    program.status.write(force=True)
    device.linger()


def _replica(program: Program, transport: Transport, patience: Patience) -> None:
    from fedkin.federate.replicas import Replica

    place, manifest = program.place, program.manifest
    device = Replica(
        manifest,
        program.position,
        program.rows(),
        transport,
        program.journal,
        checkpoint=place / STATE,
        record=place / RECORD,
        patience=patience,
        tick=program.status.tick,
    )
    program.status.begin(device.status, manifest.rounds)
    theta = device.run()
    write_result(place, theta, device.theta, manifest, program.position)
    if device.leads:
        write_presence(place, device.component.presence, [manifest.members[u].name for u in device.component.members])
    program.status.write(force=True)
    device.linger()


def _worker(program: Program, transport: Transport, patience: Patience) -> None:
    from fedkin.federate.central import Worker

    manifest, position, rows = program.manifest, program.position, program.rows()
    worker = Worker(manifest, position, rows, transport, program.journal, patience=patience, tick=program.status.tick)
    program.status.begin(worker.status, manifest.rounds)
    theta = worker.run()
    write_result(program.place, theta, theta, manifest, position)


def _centre(program: Program, transport: Transport, patience: Patience) -> None:
    from fedkin.federate.central import Centre

    place, manifest = program.place, program.manifest
    centre = Centre(
        manifest,
        transport,
        program.journal,
        checkpoint=place / STATE,
        patience=patience,
        tick=program.status.tick,
    )
    program.status.begin(centre.status, manifest.rounds)
    centre.run()
    write_presence(place, centre.hub.presence, [member.name for member in manifest.members])
    program.status.write(force=True)
    centre.linger()


def write_result(
    place: Path, theta: np.ndarray[Any, Any], last: np.ndarray[Any, Any], manifest: Manifest, position: int
) -> None:
    """Write the device's averaged and last parameters, for its owner, with the run that they are of."""
    name = manifest.members[position].name
    _replace_archive(place / RESULT, theta=theta, last=last, run=manifest.run, revision=manifest.revision, device=name)


def write_presence(place: Path, presence: Sequence[Any], names: Sequence[str]) -> None:
    """Write who was there in which round."""
    _replace_archive(place / PRESENCE, available=np.array(presence), devices=np.array(names))


def _replace_archive(path: Path, **parts: Any) -> None:
    write_arrays(path, parts, compressed=True, private=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse arguments and run one device."""
    parser = DeviceParser("run", "Run one device of a federation.", Patience())
    parser.add_argument("--echo", action="store_true", help="log to standard error, too")
    place, patience, given = parser.parsed(arguments)
    return run_program(place, lambda program: run(program, patience), echo=given["echo"])


if __name__ == "__main__":
    sys.exit(main())
