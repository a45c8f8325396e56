"""What a site does: it joins with an invite, accepts what it is sent, renews its certificate, and leaves.

Private key and rows are made here and never leave.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from fedkin._base import PRIVATE_DIRECTORY, in_file, write_file
from fedkin.data import Finding, Rows, raise_findings, read_columns, row_places
from fedkin.errors import DataError
from fedkin.federate.contract.contract import Contract
from fedkin.federate.enrol import files
from fedkin.federate.enrol.files import Invite, Request, Steps, contract_of, read_text
from fedkin.federate.enrol.notices import NOTICE_SUFFIX, make_notice, read_notice
from fedkin.federate.enrol.organiser import read_invite
from fedkin.federate.enrol.settings import SiteSettings
from fedkin.federate.enrol.site import Site, key_of, read_admit, read_order, read_site, request_file
from fedkin.federate.trust import (
    Pair,
    SecurityError,
    Signer,
    belong_together,
    check_issued,
    fingerprint,
    kind_of,
    make_key,
    make_request,
    read_private,
    same_fingerprint,
    seal,
    validity,
)

#: Makes a site's three step numbers from its invite and rows.
StepMaker = Callable[[Invite, Rows], Steps]


@dataclass(frozen=True)
class Enrolled:
    """What `join` did: the directory, the request to send, fingerprints to compare, and whether the key is new.

    ``findings`` are remarks on the rows, and why they are too few to share sums of, if they are.
    """

    directory: Path
    request: Path
    invite: Invite
    authority_fingerprint: str
    key_fingerprint: str
    n_rows: int
    findings: list[Finding]
    new_key: bool


def join(
    invite: Path,
    data: Path,
    directory: Path | None = None,
    *,
    expected: str | None = None,
    steps: StepMaker | None = None,
) -> Enrolled:
    """Join a federation: check the rows, make a key, write the request for the organiser.

    Joining again with an invite to the same federation replaces rows and request, and keeps key and settings.

    Parameters
    ----------
    invite : path
        What the organiser sent.
    data : path
        Table of the site's rows. Nothing is written unless they fit the contract.
    directory : path, optional
        The site's directory; by default the site's name.
    expected : str, optional
        The fingerprint of the authority that the organiser read out; another one is refused.
    steps : function, optional
        Makes the step numbers that the placements central and replicas need; they go into the request, and are the
        only numbers in it that depend on rows.

    Raises
    ------
    SecurityError
        When the invite was changed, or is by another authority than expected or than that of the directory.
    DataError
        When rows do not fit, with everything that is wrong with them.
    """
    given, digest = read_invite(invite)
    seen = fingerprint(given.authority.encode())
    if expected is not None and not same_fingerprint(seen, expected):
        raise SecurityError(
            f"{invite}: its authority has the fingerprint {seen}, not {expected}; do not join, and ask the organiser"
        )
    contract = contract_of(given.contract)
    place = Path(given.site.name) if directory is None else directory
    known = _known_before(place, given)
    columns = read_columns(data)
    findings = contract.check(columns, at=row_places(data, columns))
    raise_findings(findings)
    rows = contract.prepare(columns)
    needed = contract.rounds.placement != "peer"
    if needed and steps is None:
        raise DataError(f"placement {contract.rounds.placement!r} needs the site's step numbers in its request")
    own_steps = steps(given, rows) if needed and steps is not None else None
    place.mkdir(parents=True, exist_ok=True)
    place.chmod(PRIVATE_DIRECTORY)
    (place / files.NOTICES).mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)
    key = known or make_key()
    if known is None:
        write_file(place / files.KEY, key, private=True)
    rows.save(place / files.ROWS)
    if not (place / files.SETTINGS).exists():
        SiteSettings.of(contract).write(place / files.SETTINGS)
    asked = make_request(given.site.name, key)
    request = _request(given, contract, digest, asked, own_steps)
    sent = request_file(place, given.site.name)
    write_file(sent, seal("request", request, Signer(given.site.name, key)), private=True)
    write_file(place / files.INVITE, read_text(invite), private=True)  # last: it makes the directory that of a site
    return Enrolled(place, sent, given, seen, fingerprint(asked), rows.n_samples, findings, new_key=known is None)


def _known_before(place: Path, given: Invite) -> bytes | None:
    """The key of a directory that joined the same federation already; None for a new place."""
    if not place.exists() or not any(place.iterdir()):
        return None
    if not (place / files.INVITE).exists():
        if (place / files.KEY).exists():  # a join that was cut short
            return read_private(place / files.KEY)
        raise DataError(f"{place} exists and is not a site's directory: choose another place with --into, or remove it")
    before, _ = read_invite(place / files.INVITE)
    if (before.run, before.site.name, before.authority) != (given.run, given.site.name, given.authority):
        raise SecurityError(
            f"{place} belongs to {before.site.name} in {before.federation!r} (run {before.run}), but the invite is for "
            f"{given.site.name} in {given.federation!r} (run {given.run}): choose another place with --into"
        )
    return read_private(place / files.KEY)


def _request(invite: Invite, contract: Contract, digest: str, asked: bytes, steps: Steps | None) -> dict[str, object]:
    request = Request(
        run=invite.run,
        site=invite.site.name,
        contract=contract.digest,
        invite=digest,
        request=asked.decode(),
        steps=steps,
    )
    body: dict[str, object] = msgspec.to_builtins(request)
    return body


def accept(directory: Path, path: Path) -> str:
    """Check a file from the organiser (admit, order) or from a site that left (notice), and keep it.

    Returns
    -------
    str
        What it was, in words.
    """
    site = read_site(directory)
    text = read_text(path)
    with in_file(path, SecurityError):
        kind = kind_of(text)
    if kind == "admit":
        return _accept_admit(site, path, text)
    if kind == "order":
        return _accept_order(site, path, text)
    if kind == "notice":
        notice = read_notice(path, site.invite.run, site.authority)
        write_file(directory / files.NOTICES / f"{notice.site}{NOTICE_SUFFIX}", text, private=True)
        return (
            f"{notice.site} {'was expelled' if notice.what == 'expelled' else 'has left'}: its link is closed for good"
        )
    raise DataError(f"{path} is a file of the kind {kind!r}; a site accepts admit, order, notice and model")


def leave(directory: Path) -> Path:
    """Sign that this site leaves, for good; returns the notice for the organiser and the neighbours."""
    site = read_site(directory)
    signer = Signer.site(site.pair())
    path = directory / files.NOTICES / f"{site.name}{NOTICE_SUFFIX}"
    write_file(path, make_notice(site.invite.run, site.name, "left", signer), private=True)
    return path


def renew(directory: Path, steps: StepMaker | None = None) -> tuple[Path, bool]:
    """Make a new key and a request for its certificate; the old ones serve until the answer is accepted.

    Returns
    -------
    path, bool
        The request, and whether the old key could sign it: otherwise the organiser must ask who sent it.
    """
    site = read_site(directory)
    if site.certificate is None:
        raise SecurityError(f"{site.name} is not admitted yet; send its request to the organiser")
    if site.name in site.out:
        raise SecurityError(f"{site.name} has left or was expelled, for good: there is nothing to renew")
    path = directory / files.NEXT_KEY
    if not path.exists():
        write_file(path, make_key(), private=True)
    key = read_private(path)
    try:
        asked = make_request(site.name, key)
    except SecurityError as error:
        raise SecurityError(f"{path}: {error}; remove it and renew again") from None
    digest = read_invite(directory / files.INVITE)[1]
    needed = site.contract.rounds.placement != "peer"
    own_steps = steps(site.invite, site.rows()) if needed and steps is not None else None
    body = _request(site.invite, site.contract, digest, asked, own_steps)
    valid = validity(site.certificate)[1] > datetime.now(UTC)
    signer = Signer.site(Pair(site.certificate, site.key)) if valid else Signer(site.name, key)
    path = request_file(directory, site.name)
    write_file(path, seal("request", body, signer), private=True)
    return path, valid


def _accept_admit(site: Site, path: Path, text: bytes) -> str:
    certificate = read_admit(path, site.invite, site.contract)
    with in_file(path, SecurityError):
        check_issued(certificate, site.authority)
    key_of(site.directory, certificate, path)
    write_file(site.directory / files.ADMIT, text, private=True, durable=True)
    following = site.directory / files.NEXT_KEY
    if following.exists() and belong_together(certificate, read_private(following)):
        following.replace(site.directory / files.KEY)
    return f"{site.name} is admitted until {validity(certificate)[1]:%Y-%m-%d}"


def _accept_order(site: Site, path: Path, text: bytes) -> str:
    order = read_order(path, site.invite, site.contract)
    if site.order is not None and order.revision < site.order.revision:
        raise DataError(
            f"{path} has revision {order.revision}, older than {site.order.revision}, which is here already"
        )
    write_file(site.directory / files.ORDER, text, private=True)
    set_to = {name: getattr(order, name) for name in ("lam", "rounds", "rho")}
    words = ", ".join(f"{name} {value:g}" for name, value in set_to.items() if value is not None)
    return f"order {order.revision}: {words or 'everything as in the contract'}"
