"""What comes of shared sums: the summaries of all sites, checked file by file, and the questions that follow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from fedkin._base import in_file, listed, write_file
from fedkin.core import Query, Summary
from fedkin.errors import DataError, FedkinError
from fedkin.federate.contract.contract import Contract
from fedkin.federate.enrol import files
from fedkin.federate.enrol.admission import revoked
from fedkin.federate.enrol.files import Charter, checked, contract_of, read_text
from fedkin.federate.enrol.notices import read_notices
from fedkin.federate.enrol.organiser import Organiser, read_charter, read_federation
from fedkin.federate.sharing.files import ASK_SUFFIX, SUMMARY_SUFFIX, AskFile, SummaryFile, round_file
from fedkin.federate.sharing.share import column_names
from fedkin.federate.trust import SecurityError, Signer, fingerprint, seal, unseal, unseal_by_authority
from fedkin.losses import describe_loss

_STATE = "fit.json"  #: in the organiser's folder of questions: what it remembers until they are answered


@dataclass(frozen=True, eq=False)
class Collected:
    """The summaries of one round.

    Attributes
    ----------
    contract : Contract
        Under which all of them were made.
    summaries : dict of site id (text) to Summary
        In the order of the organiser's list where that is here, else by name.
    round : int
        1 for first messages, else that of the questions they answer.
    missing : tuple of str
        Names of sites that are on the organiser's list, not out, and have sent nothing.
    """

    contract: Contract
    summaries: dict[str, Summary]
    round: int
    missing: tuple[str, ...] = ()


def read_summaries(directory: Path, federation: Path | None = None, *, now: datetime | None = None) -> Collected:
    """The newest summaries in a folder, each of a site that was admitted, under one contract.

    Parameters
    ----------
    directory : path
        Folder with files ``*.summary``, such as ``heart/summaries``.
    federation : path, optional
        The organiser's ``federation.json``, or the directory with it; by default it is looked for in the folder and
        the one above. From it comes the trust in all files.
    now : datetime, optional
        When certificates must be valid; the present by default. For a fit of old files say when they came.

    Raises
    ------
    SecurityError, DataError
        Naming the file: not signed by a site of the federation, of another contract, changed, of a site that is out or
        whose certificate has ended, a second one of the same site, or of a round that not all sites have answered.
    """
    charter_file = _find_charter(directory, federation)
    charter = read_charter(charter_file)
    contract = contract_of(charter.contract)
    organiser = _organiser_at(charter_file.parent)
    out = read_notices(charter_file.parent / files.NOTICES, charter.run, charter.authority.encode())
    rounds: dict[int, dict[str, tuple[Path, SummaryFile]]] = {}
    for path in sorted(directory.glob(f"*{SUMMARY_SUFFIX}")):
        found, signed = _read_one(path, charter, contract, now)
        if organiser is not None and signed in revoked(organiser, found.site):
            raise SecurityError(f"{path}: {found.site} lost the key with which it was signed; let it share again")
        if found.site in out:
            raise DataError(
                f"{path}: {found.site} has left or was expelled, so its sums count no more; remove the file"
            )
        same = rounds.setdefault(found.round, {})
        if found.site in same:
            raise DataError(f"{path} and {same[found.site][0]} are both of {found.site}, round {found.round}: keep one")
        same[found.site] = (path, found)
    known = [] if organiser is None else [member.name for member in organiser.members]
    if not rounds:
        awaited = [name for name in known if name not in out]
        whose = f"; those of {listed(awaited, 8)} are missing" if awaited else ""
        raise DataError(
            f"no summaries have arrived in {directory}{whose}: put there what sites send, the files "
            f"*{SUMMARY_SUFFIX} of fedkin site share"
        )
    newest = max(rounds)
    _check_complete(rounds, newest)
    order = {name: k for k, name in enumerate(known)}
    names = sorted(rounds[newest], key=lambda name: (order.get(name, len(order)), name))
    summaries = {}
    for name in names:
        path, found = rounds[newest][name]
        summary = _summary_in(path, found, contract)
        _check_id(path, name, str(summary.site), organiser)
        summaries[str(summary.site)] = summary
    missing = tuple(name for name in known if name not in names and name not in out)
    return Collected(contract, summaries, newest, missing)


def write_asks(
    organiser: Organiser, asks: Iterable[Query], state: Mapping[str, Any], ca_key: Path | None = None
) -> list[Path]:
    """Write the questions of a round, one file for each site, and what the organiser must remember until the answers.

    Parameters
    ----------
    organiser : Organiser
        Who asks: only the authority's key can sign questions.
    asks : iterable of Query
        Whose ``site`` is the id of a site.
    state : mapping
        Plain values, which `read_state` gives back.
    ca_key : path, optional
        Key of the organiser's own authority.
    """
    signer = Signer.authority(organiser.signing(ca_key))
    folder, paths = organiser.directory / files.ASKS, []
    for ask in asks:
        member = organiser.member(str(ask.site))
        body = AskFile(
            run=organiser.charter.run, contract=organiser.contract.digest, site=member.name, ask=ask.to_plain()
        )
        path = round_file(folder, member.name, ask.round, ASK_SUFFIX)
        write_file(path, seal("ask", msgspec.to_builtins(body), signer), private=True)
        paths.append(path)
    kept = {"run": organiser.charter.run, "contract": organiser.contract.digest, "state": dict(state)}
    write_file(folder / _STATE, seal("fit", kept, signer), private=True)
    return paths


def read_state(organiser: Organiser) -> dict[str, Any] | None:
    """What `write_asks` remembered last; None before anything was asked."""
    path = organiser.directory / files.ASKS / _STATE
    if not path.exists():
        return None
    with in_file(path, SecurityError):
        body = unseal_by_authority(read_text(path), "fit", organiser.authority)
        if (body.get("run"), body.get("contract")) != (organiser.charter.run, organiser.contract.digest):
            raise SecurityError("it belongs to another federation")
    state: dict[str, Any] = body["state"]
    return state


def _find_charter(directory: Path, federation: Path | None) -> Path:
    if not directory.is_dir():
        raise DataError(f"there is no folder {directory}")
    if federation is not None:
        return federation / files.FEDERATION if federation.is_dir() else federation
    for place in (directory, directory.absolute().parent):
        if (place / files.FEDERATION).exists():
            return place / files.FEDERATION
    raise DataError(
        f"neither {directory} nor the folder above has {files.FEDERATION}, without which nobody knows whose sums these "
        "are: ask the organiser for it, and say --federation FILE"
    )


def _organiser_at(directory: Path) -> Organiser | None:
    """The organiser's directory, where the charter lies in it; None where somebody has the charter alone."""
    return read_federation(directory) if (directory / files.SITES).exists() else None


def _read_one(path: Path, charter: Charter, contract: Contract, now: datetime | None) -> tuple[SummaryFile, str]:
    """A summary of the federation, and the fingerprint of the key that signed it."""
    with in_file(path, SecurityError):
        sealed = unseal(read_text(path), "summary", charter.authority.encode(), now=now)
        found = checked(sealed.body, SummaryFile)
        if sealed.certificate is None or sealed.signer != found.site:
            raise SecurityError(f"{sealed.signer} signed it, but it is about the rows of {found.site}")
        if found.run != charter.run:
            raise SecurityError(f"it belongs to another federation (run {found.run})")
        if found.contract != contract.digest:
            raise SecurityError("it was made under another contract")
    return found, fingerprint(sealed.certificate)


def _summary_in(path: Path, found: SummaryFile, contract: Contract) -> Summary:
    try:
        summary = Summary.from_plain(found.summary, contract.loss_object())
    except FedkinError as error:
        raise DataError(f"{path}: {error}") from None
    agreed = (describe_loss(contract.loss_object()), column_names(contract), contract.folds, contract.seed)
    if (describe_loss(summary.loss), summary.feature_names, summary.folds, summary.seed) != agreed:
        raise DataError(f"{path}: its loss, columns or folds are not those of the contract; let the site share again")
    return summary


def _check_id(path: Path, name: str, site: str, organiser: Organiser | None) -> None:
    """A site speaks for itself only: its id is its name, or what the organiser's list says."""
    agreed = name if organiser is None else str(organiser.member(name).id)
    if site != agreed:
        raise SecurityError(f"{path}: {name} signed it, but its sums say that they are of {site!r}")


def _check_complete(rounds: Mapping[int, Mapping[str, tuple[Path, SummaryFile]]], newest: int) -> None:
    everybody = {name for same in rounds.values() for name in same}
    silent = sorted(everybody - rounds[newest].keys())
    if silent:
        path, found = next(iter(rounds[newest].values()))
        raise DataError(
            f"{path} is the answer of {found.site} to question {newest}, which {listed(silent, 8)} have not answered "
            "yet: wait for them"
        )
