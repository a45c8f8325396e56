"""A site's directory: joined with an invite, and what the site reads, accepts and signs itself.

Private key and rows are made here and never leave. Whatever came from outside is checked when it is read, every time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec

from fedkin._base import in_file
from fedkin.data import Rows
from fedkin.errors import DataError
from fedkin.federate.contract.contract import Contract, Thresholds
from fedkin.federate.contract.words import in_words
from fedkin.federate.enrol import files
from fedkin.federate.enrol.files import Admit, Invite, Order, Request, checked, contract_of, read_text
from fedkin.federate.enrol.notices import read_notices
from fedkin.federate.enrol.organiser import read_invite
from fedkin.federate.enrol.settings import SiteSettings, read_settings
from fedkin.federate.trust import (
    RENEW_DAYS,
    Pair,
    SecurityError,
    belong_together,
    check_issued,
    check_place,
    check_private,
    read_private,
    unseal_by_authority,
    unseal_request,
    validity,
)


@dataclass(frozen=True, eq=False)
class Site:
    """A site's directory, in which everything was checked but the rows.

    Attributes
    ----------
    directory : path
    invite : Invite
        The site itself and its neighbours.
    contract : Contract
        What all agree on.
    settings : SiteSettings
        The site's own rules.
    order : Order or None
        What the organiser set for the rounds.
    certificate : bytes or None
        PEM; None before the site was admitted.
    key : bytes
        The site's private key, PEM.
    out : frozenset of str
        Names of sites that have left or were expelled, by the notices here.
    """

    directory: Path
    invite: Invite
    contract: Contract
    settings: SiteSettings
    order: Order | None
    certificate: bytes | None
    key: bytes = field(repr=False)
    out: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """The site's name."""
        return self.invite.site.name

    @property
    def authority(self) -> bytes:
        """The authority's certificate, PEM."""
        return self.invite.authority.encode()

    def pair(self, now: datetime | None = None) -> Pair:
        """Certificate and key, both valid; raises `SecurityError` before the site is admitted and after it is out."""
        if self.certificate is None:
            raise SecurityError(
                f"{self.directory}: {self.name} is not admitted yet; send {request_file(self.directory, self.name)} "
                "to the organiser"
            )
        if self.name in self.out:
            raise SecurityError(f"{self.directory}: {self.name} has left or was expelled, for good")
        with in_file(self.directory / files.ADMIT, SecurityError):
            check_issued(self.certificate, self.authority, now)
        return Pair(self.certificate, self.key)

    def renewal_due(self, now: datetime | None = None) -> bool:
        """Whether the certificate ends soon."""
        left = timedelta(days=RENEW_DAYS)
        return self.certificate is not None and validity(self.certificate)[1] < (now or datetime.now(UTC)) + left

    def rows(self) -> Rows:
        """The prepared rows; raises when they are damaged or do not fit the contract."""
        return read_rows(self.directory, self.contract)


def read_site(directory: Path) -> Site:
    """A site's directory, after checking every signature in it.

    Raises
    ------
    SecurityError
        When a file was changed, is not private, or belongs to another site or federation; the file is named.
    """
    if not (directory / files.INVITE).exists():
        raise DataError(f"{directory} is not a site's directory: it has no {files.INVITE} (fedkin site join)")
    check_place(directory)
    invite, _ = read_invite(directory / files.INVITE)
    contract = contract_of(invite.contract)
    authority = invite.authority.encode()
    out = read_notices(directory / files.NOTICES, invite.run, authority)
    settings = read_settings(directory / files.SETTINGS, contract)
    path = directory / files.ORDER
    order = read_order(path, invite, contract) if path.exists() else None
    path = directory / files.ADMIT
    certificate = read_admit(path, invite, contract) if path.exists() else None
    if certificate is None:
        path = request_file(directory, invite.site.name)
    key = key_of(directory, _asked_for(path) if certificate is None else certificate, path)
    return Site(directory, invite, contract, settings, order, certificate, key, out)


def contract_in(path: Path) -> tuple[Contract, Thresholds]:
    """The contract in a TOML file, an invite or a site's directory, and thresholds: the site's own in the last case."""
    if path.is_dir():
        contract = contract_of(read_invite(path / files.INVITE)[0].contract)
        return contract, read_settings(path / files.SETTINGS, contract).thresholds
    contract = Contract.read(path) if path.suffix == ".toml" else contract_of(read_invite(path)[0].contract)
    return contract, contract.thresholds


def change_settings(directory: Path, *, confirmed: bool = False, **changes: Any) -> SiteSettings:
    """Change some of a site's own rules, or confirm those that were changed by hand; returns all of them.

    Raises
    ------
    DataError
        When they would be laxer than the contract's, or the file was changed and that is not ``confirmed``.
    """
    contract = contract_of(read_invite(directory / files.INVITE)[0].contract)
    path = directory / files.SETTINGS
    found = read_settings(path, contract, confirmed=not confirmed)
    try:
        wanted = msgspec.convert({**found.plain(), **changes}, type=SiteSettings)
    except msgspec.ValidationError as error:
        raise DataError(f"{path} {in_words(error)}") from None
    wanted.check(contract, str(path))
    if confirmed or changes:
        wanted.write(path)
    return wanted


def read_rows(directory: Path, contract: Contract) -> Rows:
    """The prepared rows in a site's directory."""
    path = directory / files.ROWS
    check_private(path)
    rows = Rows.load(path)
    columns = len(contract.schema.names) + contract.intercept
    if rows.X.shape[1] != columns:
        raise DataError(f"{path} has {rows.X.shape[1]} columns, but the contract makes {columns}; join again")
    contract.loss_object().check_target(rows.y, directory.name)
    return rows


def departures(directory: Path) -> frozenset[str]:
    """Names of the sites that are out, by the valid notices in a site's directory.

    For whoever runs for long: cheap, and to be asked again and again. Its own name is among them when it is out itself.

    Raises
    ------
    SecurityError
        When a notice was not signed by the organiser, or by the site that left.
    """
    invite, _ = read_invite(directory / files.INVITE)
    return read_notices(directory / files.NOTICES, invite.run, invite.authority.encode())


def read_order(path: Path, invite: Invite, contract: Contract) -> Order:
    """An order that is for this federation."""
    with in_file(path, SecurityError):
        order = checked(unseal_by_authority(read_text(path), "order", invite.authority.encode()), Order)
        _check_same(order.run, order.contract, invite, contract)
    return order


def read_admit(path: Path, invite: Invite, contract: Contract) -> bytes:
    """The certificate in an admit file that is for this site."""
    with in_file(path, SecurityError):
        admit = checked(unseal_by_authority(read_text(path), "admit", invite.authority.encode()), Admit)
        _check_same(admit.run, admit.contract, invite, contract)
        if admit.site != invite.site.name:
            raise SecurityError(f"it is for {admit.site}, but this is {invite.site.name}")
    return admit.certificate.encode()


def _check_same(run: str, digest: str, invite: Invite, contract: Contract) -> None:
    if run != invite.run:
        raise SecurityError(f"it is for another federation (run {run})")
    if digest != contract.digest:
        raise SecurityError("it is for another contract")


def key_of(directory: Path, certificate: bytes, where: Path) -> bytes:
    """That one of the site's keys to which a certificate (or request), which is in the file ``where``, belongs."""
    for path in (directory / files.KEY, directory / files.NEXT_KEY):
        if path == directory / files.KEY or path.exists():
            key = read_private(path)
            with in_file(path, SecurityError):
                if belong_together(certificate, key):
                    return key
    raise SecurityError(
        f"{where}: it is for another key than {directory / files.KEY}; ask the organiser to admit the newest request"
    )


def request_file(directory: Path, name: str) -> Path:
    """What a site sends to the organiser."""
    return directory / f"{name}.request"


def _asked_for(path: Path) -> bytes:
    """The certificate request that a site sent."""
    with in_file(path, SecurityError):
        return checked(unseal_request(read_text(path), "request", "request", b"").body, Request).request.encode()
