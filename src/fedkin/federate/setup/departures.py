"""Devices that have left for good, by signed notices.

The rule: whoever holds the authority's key declares that a device will never come back (``fedkin peer leave``). Each of
its neighbours that finds the notice in its directory ``left`` drops the edge to it, dual included, in the round in
which it is; the objective then is the one without that device, with the same ``lam * |V|``. An edge's dual concerns its
two ends only, so neighbours of a leaver need not agree on the round. Nothing else removes an edge during the rounds.
"""

from __future__ import annotations

import json
from pathlib import Path

from fedkin._base import PRIVATE_DIRECTORY, write_file
from fedkin.errors import DataError
from fedkin.federate.contract.manifest import Manifest
from fedkin.federate.contract.reading import AUTHORITY, load_manifest
from fedkin.federate.setup.directory import AUTHORITY_KEY, device_directories
from fedkin.federate.trust.security import (
    Pair,
    SecurityError,
    belong_together,
    sign,
    verify,
)

LEFT = "left"


def _content(manifest: Manifest, name: str) -> bytes:
    return f"fedkin-left-1 run {manifest.run} device {name}".encode()


def write_departure(directory: Path, name: str, key_file: Path | None = None) -> list[Path]:
    """Sign that device ``name`` has left, and put the notice where it and its neighbours on this machine find it.

    Parameters
    ----------
    directory : path
        Of the federation.
    name : str
        The device.
    key_file : path, optional
        Key of the authority, PEM; by default ``ca.key`` in ``directory``.

    Returns
    -------
    list of path
        Directories of the neighbours that are here.
    """
    manifest = load_manifest(directory)
    position = manifest.position(name)
    if manifest.placement != "peer":
        raise DataError(f"with placement {manifest.placement} nobody waits for {name}: it is absent while it is away")
    authority = read_authority(directory, key_file)
    signature = sign(authority, _content(manifest, name))
    neighbours = {manifest.members[v].name for v in manifest.neighbours(position)}
    here = device_directories(directory)
    places = [place for place in here if place.name in neighbours]
    for place in [directory, *places, *(place for place in here if place.name == name)]:
        (place / LEFT).mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)
        write_file(place / LEFT / name, json.dumps({"signature": signature.hex()}).encode(), private=True)
    return places


def read_authority(directory: Path, key_file: Path | None = None) -> Pair:
    """The certificate in a federation's directory and its key; raises `DataError` when they are not a pair."""
    path = directory / AUTHORITY_KEY if key_file is None else key_file
    try:
        key = path.read_bytes()
    except OSError as error:
        cure = "; give the key of your own authority with --ca-key FILE" if key_file is None else ""
        raise DataError(f"{path} cannot be read ({error.strerror}), so nothing can be signed{cure}") from None
    authority = Pair((directory / AUTHORITY).read_bytes(), key)
    try:
        fit = belong_together(authority)
    except SecurityError as error:
        raise DataError(f"{directory / AUTHORITY} and {path}: {error}") from None
    if not fit:
        raise DataError(f"{path} is not the key of {directory / AUTHORITY}, which signed this federation")
    return authority


def left_devices(directory: Path) -> frozenset[str]:
    """Names of the devices of a federation that have left, by the notices in its directory."""
    if not (directory / LEFT).is_dir():
        return frozenset()
    manifest = load_manifest(directory)
    return frozenset(manifest.members[u].name for u in read_departures(directory, manifest))


def read_departures(place: Path, manifest: Manifest) -> frozenset[int]:
    """Positions of devices that have left, by the valid notices in a device's directory.

    Raises
    ------
    SecurityError
        When a notice was not signed by the authority.
    """
    folder = place / LEFT
    gone = set()
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        try:
            signature = bytes.fromhex(json.loads(path.read_bytes())["signature"])
            verify((place / AUTHORITY).read_bytes(), _content(manifest, path.name), signature)
        except (ValueError, KeyError, TypeError):
            raise SecurityError(f"{path} is not a notice of fedkin peer leave; remove it") from None
        except SecurityError as error:
            raise SecurityError(f"{path}: {error}; remove it, or carry it again from where it was signed") from None
        gone.add(manifest.position(path.name))
    return frozenset(gone)
