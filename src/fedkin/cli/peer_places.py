"""Which directory a command of ``fedkin peer`` was given: that of a federation, or that of one device."""

from __future__ import annotations

from pathlib import Path

from fedkin.cli.console import note
from fedkin.errors import DataError
from fedkin.federate.contract.files import load_manifest
from fedkin.federate.contract.manifest import Manifest
from fedkin.federate.programs.overview import NOT_HERE, expected_names, is_device, missing_or_damaged
from fedkin.federate.setup.departures import left_devices
from fedkin.federate.setup.directory import DEVICES


def federation_in(directory: Path, command: str, instead: str) -> Manifest:
    """The manifest in the directory of a federation.

    Parameters
    ----------
    directory : path
        That was given.
    command : str
        That needs it, for the message.
    instead : str
        What to do where it is the directory of one device.
    """
    if is_device(directory):
        raise DataError(
            f"{directory} is the directory of one device, but fedkin {command} needs that of the federation, "
            f"which fedkin peer init made: {instead}"
        )
    manifest = load_manifest(directory)
    if not (directory / DEVICES).is_dir():
        raise DataError(f"{directory} has no directory {DEVICES}, so no device is here")
    return manifest


def note_who_is_not_here(directory: Path, manifest: Manifest) -> None:
    """Name the devices that cannot be started from this directory.

    Raises
    ------
    DataError
        When a device is here, but its directory is damaged, and others would wait for it.
    """
    left = left_devices(directory)
    for name in expected_names(manifest):
        found = None if name in left else missing_or_damaged(directory / DEVICES / name)
        if found is None:
            continue
        state, why = found
        waits = manifest.placement == "peer"
        if state != NOT_HERE and waits:
            raise DataError(f"{name} cannot be started, and the others would wait for it: {why}")
        wait = "; the others wait for it" if waits and len(manifest.neighbours(manifest.position(name))) else ""
        note(f"{name} is not started: {why}{wait}")
