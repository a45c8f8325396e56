"""The directory of a federation: a signed manifest, and a sub-directory for each device with its rows, key and links.

::

    DIR/
      manifest.json  manifest.sig  ca.crt
      plan.json  plan.sig             steps, batches and deals of all devices: no device gets this
      ca.key                          the authority's key: keep it, the devices do not need it
      devices/NAME/
        manifest.json  manifest.sig  ca.crt
        plan.json  plan.sig           steps, batch and deal of this device
        rows.npz  device.key  device.crt
        zenoh.json5                   endpoints and access list of this device
        device.json                   what its owner decides
        state.db  log.jsonl  status.json  result.npz      written while it runs

A sub-directory is all that a device needs; carry it to the device's machine. Everything is readable by its owner only.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedkin._base import PRIVATE_DIRECTORY, Array, write_file
from fedkin.data import Rows
from fedkin.errors import DataError
from fedkin.federate.contract.manifest import (
    CENTRE,
    Manifest,
    asking_keys,
    keys_of,
    presence_key,
    selection_keys,
)
from fedkin.federate.contract.plans import PLAN, PLAN_SIGNATURE
from fedkin.federate.contract.reading import AUTHORITY, MANIFEST, ROWS, SIGNATURE
from fedkin.federate.records import read_record
from fedkin.federate.trust.security import (
    Grant,
    Pair,
    issue,
    link_configuration,
    sign,
    verify,
)

DEVICES, OWNER, LINKS = "devices", "device.json", "zenoh.json5"
KEY, CERTIFICATE, AUTHORITY_KEY = "device.key", "device.crt", "ca.key"
STATE, LOG, STATUS, RESULT, LOCK = "state.db", "log.jsonl", "status.json", "result.npz", "lock"
SELECTION = "selection.json"  # p-values of the device's edges, and which of them it dropped
PRESENCE = "presence.npz"  # of the central machine or a leader: who was there in which round
RECORD = "record.bin"  # of a leader: what it decided since the last checkpoint


def write_federation(
    directory: Path,
    manifest: Manifest,
    rows: Mapping[int, Rows],
    authority: Pair,
    *,
    keep_key: bool = True,
    share_result: bool = False,
) -> None:
    """Make the directory of a federation.

    Parameters
    ----------
    directory : path
        Must not exist, or be empty.
    manifest : Manifest
        What all agree on.
    rows : mapping {position: Rows}
        Rows of the devices that are known here. A device that is left out gets its ``rows.npz`` later.
    authority : Pair
        Who signs manifest and certificates.
    keep_key : bool
        Whether to write the authority's key to the directory (not when it is the user's own).
    share_result : bool
        What `device.json` says at first: whether `collect` may have the device's parameters. Its owner may change it.
    """
    manifest.check()
    if directory.exists() and any(directory.iterdir()):
        raise DataError(f"{directory} exists and is not empty: choose another place, or remove it")
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(PRIVATE_DIRECTORY)
    text = manifest.to_bytes()
    signed = {MANIFEST: text, SIGNATURE: sign(authority, text), AUTHORITY: authority.certificate}
    _write_all(directory, signed | _signed_plan(manifest, None, authority))
    if keep_key:
        write_file(directory / AUTHORITY_KEY, authority.key, private=True)
    places = {u: member.name for u, member in enumerate(manifest.members)}
    if manifest.placement == "central":
        places[manifest.n_devices] = CENTRE
    (directory / DEVICES).mkdir(mode=PRIVATE_DIRECTORY)
    for position, name in places.items():
        place = directory / DEVICES / name
        place.mkdir(mode=PRIVATE_DIRECTORY)
        _write_all(place, signed | _signed_plan(manifest, position, authority))
        if manifest.secure:
            pair = issue(authority, name, [_host(endpoint_of(manifest, position))])
            write_file(place / KEY, pair.key, private=True)
            write_file(place / CERTIFICATE, pair.certificate, private=True)
        owner = {"device": name, "share_result": share_result}
        write_file(place / OWNER, _json(owner), private=True)
        write_file(place / LINKS, _json(links_of(manifest, position)), private=True)
        if position in rows:
            rows[position].save(place / ROWS)


def _signed_plan(manifest: Manifest, position: int | None, authority: Pair) -> dict[str, bytes]:
    text = manifest.plan_bytes(position)
    return {PLAN: text, PLAN_SIGNATURE: sign(authority, text)}


def sign_again(directory: Path, manifest: Manifest, authority: Pair) -> list[Path]:
    """Replace the manifest of a federation and of its devices that are on this machine by a later revision.

    Returns
    -------
    list of path
        Directories of those devices.
    """
    manifest.check()
    text = manifest.to_bytes()
    # the signature must fit the certificate that is there already
    verify((directory / AUTHORITY).read_bytes(), text, sign(authority, text))
    places = device_directories(directory)
    for place in [*places, directory]:
        _write_all(place, {MANIFEST: text, SIGNATURE: sign(authority, text)})
    return places


def endpoint_of(manifest: Manifest, position: int) -> str:
    """Where a device, or the central machine, listens."""
    if position == manifest.n_devices:
        assert manifest.centre is not None
        return manifest.centre
    return manifest.members[position].endpoint


def links_of(manifest: Manifest, position: int) -> dict[str, Any]:
    """The zenoh configuration of one device: it connects to neighbours before it in the manifest, the others to it.

    Grants follow `keys_of`: a neighbour writes what it sends here, and reads what is sent to it.
    """
    if manifest.placement == "central":
        from fedkin.federate.central import star_keys

        others = list(range(manifest.n_devices)) if position == manifest.n_devices else [manifest.n_devices]
        keys = star_keys
    else:
        others = manifest.partners(position)
        keys = _peer_keys
    grants = [Grant(_name(manifest, v), keys(manifest, v, position), keys(manifest, position, v)) for v in others]
    connect = [endpoint_of(manifest, v) for v in others if (v < position) != (manifest.placement == "central")]
    # behind a firewall: devices of a star only connect
    listen = (
        [] if manifest.placement == "central" and position < manifest.n_devices else [endpoint_of(manifest, position)]
    )
    return link_configuration(listen, connect, grants if manifest.secure else None, manifest.most_bytes)


def _peer_keys(manifest: Manifest, sender: int, receiver: int) -> list[str]:
    keys = [*keys_of(manifest, sender, receiver).values(), *asking_keys(manifest, sender, receiver).values()]
    keys.append(presence_key(manifest, sender))
    return keys if manifest.select is None else [*keys, *selection_keys(manifest, sender, receiver).values()]


def _name(manifest: Manifest, position: int) -> str:
    return CENTRE if position == manifest.n_devices else manifest.members[position].name


def _host(endpoint: str) -> str:
    return endpoint.partition("/")[2].rpartition(":")[0].strip("[]")


def _json(content: object) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()


def _write_all(place: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        write_file(place / name, content, private=True)


# --- reading it -------------------------------------------------------------------------------------------------------


def device_directories(directory: Path) -> list[Path]:
    """The devices' sub-directories that are on this machine, the central machine's first."""
    places = sorted(path for path in (directory / DEVICES).iterdir() if (path / OWNER).exists())
    return sorted(places, key=lambda path: path.name != CENTRE)


def read_status(place: Path) -> dict[str, Any]:
    """What a device last said about itself; empty when it never ran, or the file is damaged."""
    try:
        return read_record(place / STATUS)
    except DataError:
        return {}


def read_selection(place: Path, manifest: Manifest) -> frozenset[int]:
    """Positions of neighbours whose edge was dropped by edge selection."""
    if manifest.select is None:
        return frozenset()
    if not (place / SELECTION).exists():
        raise DataError(f"edges are not selected yet: fedkin peer select {place}")
    chosen = read_record(place / SELECTION)
    if chosen["run"] != manifest.run:
        raise DataError(f"{place / SELECTION} belongs to another run")
    return frozenset(manifest.position(name) for name in chosen["dropped"])


def read_result(place: Path) -> Array | None:
    """The averaged parameters ``(p,)`` of a device that has finished, None before."""
    try:
        return _result_parts(place)["theta"].astype(np.float64)
    except (DataError, KeyError):
        return None


def result_of(place: Path, manifest: Manifest, position: int) -> Array:
    """The averaged parameters ``(p,)`` of a device at the end of this run, and of no other.

    Raises
    ------
    DataError
        When there are none, or they cannot be read, or they are of another run, revision or device.
    """
    path = place / RESULT
    if not path.exists():
        raise DataError("it has not finished")
    parts = _result_parts(place)
    expected = {"run": manifest.run, "revision": str(manifest.revision), "device": manifest.members[position].name}
    for name, value in expected.items():
        if name not in parts:
            raise DataError(f"{path} does not say of which {name} it is, so it is not taken")
        if str(parts[name]) != value:
            raise DataError(f"{path} is of {name} {parts[name]}, not of {name} {value}, so it is not taken")
    theta = parts.get("theta", np.empty(0)).astype(np.float64)
    if theta.shape != (manifest.n_params,) or not np.isfinite(theta).all():
        raise DataError(f"{path} does not have {manifest.n_params} finite parameters")
    return theta


def _result_parts(place: Path) -> dict[str, np.ndarray[Any, Any]]:
    path = place / RESULT
    try:
        # opened here: numpy would leave a damaged file open
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from None


def why_not_shared(place: Path, what: str) -> str | None:
    """Why the owner of a device's directory does not let ``what`` leave it; None when it may."""
    path = place / OWNER
    if not place.is_dir():
        return "its directory is not on this machine"
    try:
        owner = json.loads(path.read_bytes())
    except FileNotFoundError:
        return f"{path} is missing, so nobody knows whether its owner shares {what}"
    except (OSError, ValueError) as error:
        return f"{path} cannot be read ({error}), so nobody knows whether its owner shares {what}"
    if not isinstance(owner, dict) or owner.get("share_result") is not True:
        return f"its owner keeps {what} (share_result in {place / OWNER})"
    return None


def collect(directory: Path, manifest: Manifest, left: Collection[str] = ()) -> tuple[dict[int, Any], dict[int, str]]:
    """Results that owners share, by position, and for the other devices why there is none; ``left`` names who left."""
    found: dict[int, Any] = {}
    reasons: dict[int, str] = {}
    for position, member in enumerate(manifest.members):
        place = directory / DEVICES / member.name
        if member.name in left:
            reasons[position] = "it has left for good"
            continue
        if (refused := why_not_shared(place, "it")) is not None:
            reasons[position] = refused
            continue
        try:
            found[position] = result_of(place, manifest, position)
        except DataError as error:
            reasons[position] = str(error)
    return found, reasons
