"""Models that travel: a site's part of a fit from summaries, or after rounds a site's own model, as a signed file.

A model directory is a few files; here they are one, texts as they are and arrays (``.npz``) in base 64. What is in them
is for `fedkin.fitting` to read.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from fedkin._base import PRIVATE_DIRECTORY, in_file, replacing_directory, write_file
from fedkin.errors import DataError
from fedkin.federate.enrol.admission import revoked
from fedkin.federate.enrol.files import MODEL, checked, read_text
from fedkin.federate.enrol.organiser import Organiser
from fedkin.federate.enrol.site import read_site
from fedkin.federate.sharing.files import MODEL_SUFFIX, SENT, ModelFile
from fedkin.federate.trust import SecurityError, Signer, fingerprint, seal, unseal, unseal_by_authority

_MODELS = "models"  #: of the organiser: what goes to sites
_PLAIN_FILE = re.compile(r"[a-z_]+\.(json|csv|npz)")
_ARRAYS = ".npz"


def deliver(organiser: Organiser, folders: Mapping[str, Path], ca_key: Path | None = None) -> list[Path]:
    """Sign each site's part of a model, for that site alone; returns the files to send.

    Parameters
    ----------
    organiser : Organiser
        Who fitted it.
    folders : mapping of site to path
        Name or id of a site, and the directory of its part of the model.
    ca_key : path, optional
        Key of the organiser's own authority.
    """
    signer = Signer.authority(organiser.signing(ca_key))
    place = organiser.directory / _MODELS
    place.mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)
    paths = []
    for name, folder in folders.items():
        member = organiser.member(name)
        paths.append(place / f"{member.name}{MODEL_SUFFIX}")
        _write(paths[-1], organiser.charter.run, organiser.contract.digest, member.name, folder, signer)
    return paths


def accept_model(directory: Path, path: Path) -> str:
    """Keep the site's part of a model, which the organiser signed; returns what it was, in words."""
    site = read_site(directory)
    with in_file(path, SecurityError):
        found = checked(unseal_by_authority(read_text(path), "model", site.authority), ModelFile)
        _check(found, site.invite.run, site.contract.digest)
        if found.site != site.name:
            raise SecurityError(f"it is for {found.site}, but this is {site.name}")
    unpack(found, directory / MODEL)
    return f"{directory / MODEL} has the model of {site.name}; fedkin predict {directory / MODEL} TABLE"


def publish(directory: Path, dropped: frozenset[str] = frozenset()) -> Path:
    """Sign the site's own model for the organiser, if the site's rules allow it; returns the file to send.

    Parameters
    ----------
    directory : path
        The site's, with a model in it.
    dropped : set of str
        Names of neighbours whose edge the edge tests dropped.
    """
    site = read_site(directory)
    signer = Signer.site(site.pair())
    if not (directory / MODEL).is_dir():
        raise DataError(f"{directory} has no model yet: fedkin site run makes one")
    if not site.settings.share_result:
        raise DataError(
            f"the rules of {site.name} keep its parameters to itself: fedkin site settings {directory} --share-result"
        )
    folder = directory / SENT
    folder.mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)
    path = folder / f"{site.name}{MODEL_SUFFIX}"
    _write(path, site.invite.run, site.contract.digest, site.name, directory / MODEL, signer, tuple(sorted(dropped)))
    return path


def read_published(organiser: Organiser, path: Path) -> ModelFile:
    """What a site published: signed by itself, with a key that it has not lost, under this contract."""
    with in_file(path, SecurityError):
        sealed = unseal(read_text(path), "model", organiser.authority)
        found = checked(sealed.body, ModelFile)
        if sealed.certificate is None or sealed.signer != found.site:
            raise SecurityError(f"{sealed.signer} signed it, but it is the model of {found.site}")
        if fingerprint(sealed.certificate) in revoked(organiser, found.site):
            raise SecurityError(f"{found.site} lost the key with which it was signed")
        _check(found, organiser.charter.run, organiser.contract.digest)
    if found.site in organiser.out():
        raise DataError(f"{path}: {found.site} has left or was expelled, so its model counts no more")
    return found


def unpack(found: ModelFile, place: Path) -> None:
    """Write a model's files into a directory, which is replaced as a whole."""
    with replacing_directory(place) as fresh:
        for name, text in found.files.items():
            (fresh / name).write_bytes(base64.b64decode(text) if name.endswith(_ARRAYS) else text.encode())


def _write(
    path: Path, run: str, contract: str, site: str, folder: Path, signer: Signer, dropped: tuple[str, ...] = ()
) -> None:
    texts = {}
    for file in sorted(folder.iterdir()):
        content = file.read_bytes()
        texts[file.name] = (base64.b64encode(content) if file.suffix == _ARRAYS else content).decode()
    day = f"{datetime.now(UTC):%Y-%m-%d}"
    body = ModelFile(run=run, contract=contract, site=site, day=day, files=texts, dropped=dropped)
    write_file(path, seal("model", msgspec.to_builtins(body), signer), private=True)


def _check(found: ModelFile, run: str, contract: str) -> None:
    if found.run != run:
        raise SecurityError(f"it belongs to another federation (run {found.run})")
    if found.contract != contract:
        raise SecurityError("it was made under another contract")
    for name in found.files:
        if not _PLAIN_FILE.fullmatch(name):
            raise SecurityError(f"it holds a file {name!r}, which no model has")
