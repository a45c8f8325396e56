"""A site's directory: joined with an invite, and what the site reads, accepts and signs itself.

Private key and rows are made here and never leave. What came from outside is checked whenever it is read.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec

from fedkin._base import PRIVATE_DIRECTORY, in_file, write_file
from fedkin.data import Finding, Rows, raise_findings, read_columns, row_places
from fedkin.errors import DataError
from fedkin.federate import messages, trust
from fedkin.federate.contract import Contract
from fedkin.federate.disclosure import Thresholds
from fedkin.federate.envelope import Signer, canonical, kind_of
from fedkin.federate.messages import Admit, Invite, ModelFile, Notice, Order, Request, Steps, read_invite
from fedkin.federate.trust import Pair, SecurityError

#: Makes a site's three step numbers from its invite and rows.
StepMaker = Callable[[Invite, Rows], Steps]

_SETTINGS = """\
# The rules of this site. Nothing is shared below these thresholds. They may be stricter than the contract's, not laxer.
# After a change by hand:  fedkin site settings {place} --confirm
rows = {rows}                  # fewest rows
rows_per_parameter = {rows_per_parameter}    # fewest rows for each parameter of the model
cell = {cell}                  # fewest rows with any level of a category, or any class of the target, that occurs
share_result = {share_result}       # whether the organiser may have this site's fitted parameters
digest = "{digest}"
"""


class SiteSettings(Thresholds, frozen=True, kw_only=True):
    """A site's own rules, ``site.toml``: thresholds as strict as the contract's or stricter, and what else it shares.

    The file is for people; a digest of its values tells a damaged file, or one that was changed by hand, from the one
    that the site's owner confirmed. ``share_result``: whether the organiser may have the site's fitted parameters.
    """

    share_result: bool = False

    @classmethod
    def from_contract(cls, contract: Contract) -> SiteSettings:
        """Take the contract's thresholds, and share nothing beyond."""
        return cls(**msgspec.structs.asdict(contract.thresholds))

    @classmethod
    def read(cls, path: Path, contract: Contract, *, confirmed: bool = True) -> SiteSettings:
        """Read the settings in a file, whose digest must fit where they are ``confirmed``."""
        trust.check_private(path)
        try:
            values = tomllib.loads(path.read_bytes().decode())
            digest = values.pop("digest", None)
            found = msgspec.convert(values, type=cls)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise DataError(f"{path} is damaged, or not TOML ({error}); fix it, or remove it and join again") from None
        except msgspec.ValidationError as error:
            raise DataError(f"{path}: {error}") from None
        if confirmed and digest != found.digest:
            raise DataError(
                f"{path} was changed by hand, or damaged: look at it, then confirm that it is right with "
                f"fedkin site settings {path.parent} --confirm"
            )
        return found.checked(contract, path)

    def checked(self, contract: Contract, where: Path) -> SiteSettings:
        """Return the settings; raises `DataError` when a threshold is laxer than the contract's."""
        for name, agreed in msgspec.structs.asdict(contract.thresholds).items():
            if (own := getattr(self, name)) < agreed:
                raise DataError(
                    f"{where}: {name} is {own}, laxer than the {agreed} of the contract; a site may only be stricter"
                )
        return self

    def write(self, path: Path) -> None:
        """Write the file, with its digest."""
        shown = {name: str(value).lower() for name, value in msgspec.structs.asdict(self).items()}
        write_file(path, _SETTINGS.format(place=path.parent, digest=self.digest, **shown), private=True)

    @property
    def digest(self) -> str:
        """What tells these values from others."""
        return hashlib.sha256(canonical(self)).hexdigest()[:16]


@dataclass(frozen=True)
class Joined:
    """What `Site.join` did; ``findings`` are remarks on the rows."""

    directory: Path
    request: Path
    invite: Invite
    authority_fingerprint: str
    key_fingerprint: str
    n_rows: int
    findings: list[Finding]
    new_key: bool


@dataclass(frozen=True, eq=False)
class Site:
    """A site's directory, in which everything was checked but the rows.

    ``certificate`` is None before the site was admitted; ``out`` are the names of sites that have left or were
    expelled, by the notices here.
    """

    directory: Path
    invite: Invite
    settings: SiteSettings
    order: Order | None
    certificate: bytes | None
    key: bytes = field(repr=False)
    out: frozenset[str] = frozenset()

    @classmethod
    def join(
        cls,
        invite: Path,
        data: Path,
        directory: Path | None = None,
        *,
        expected: str | None = None,
        steps: StepMaker | None = None,
    ) -> Joined:
        """Join a federation: check the rows, make a key, write the request for the organiser.

        Joining again with an invite to the same federation replaces rows and request, and keeps key and settings.
        Nothing is written unless the rows fit the contract, and the authority's fingerprint is the ``expected`` one,
        which the organiser read out. ``steps`` makes the step numbers that the placements central and replicas need;
        they go into the request, and are the only numbers in it that depend on rows.
        """
        given = read_invite(invite)
        seen = trust.fingerprint(given.authority.encode())
        if expected is not None and not trust.same_fingerprint(seen, expected):
            raise SecurityError(
                f"{invite}: its authority has the fingerprint {seen}, not {expected}; do not join, and ask the "
                "organiser"
            )
        contract, name = given.terms, given.site.name
        place = Path(name) if directory is None else directory
        known = _known_before(place, given)
        columns = read_columns(data)
        findings = contract.check(columns, at=row_places(data, columns))
        raise_findings(findings)
        rows = contract.prepare(columns)
        own_steps = _steps(given, rows, steps)
        place.mkdir(parents=True, exist_ok=True)
        place.chmod(PRIVATE_DIRECTORY)
        (place / messages.NOTICES).mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)
        key = known or trust.make_key()
        if known is None:
            write_file(place / messages.KEY, key, private=True)
        rows.save(place / messages.ROWS)
        if not (place / messages.SETTINGS).exists():
            SiteSettings.from_contract(contract).write(place / messages.SETTINGS)
        asked = trust.make_request(name, key)
        sent = _request(given, asked, own_steps).write(place / f"{name}.request", Signer(name, key))
        # last: it makes the directory that of a site
        write_file(place / messages.INVITE, trust.read_whole(invite), private=True)
        mark, new = trust.fingerprint(asked), known is None
        return Joined(place, sent, given, seen, mark, rows.n_samples, findings, new_key=new)

    @classmethod
    def read(cls, directory: Path) -> Site:
        """Read a site's directory, after checking every signature in it; errors name the file."""
        if not (directory / messages.INVITE).exists():
            raise DataError(f"{directory} is not a site's directory: it has no {messages.INVITE} (fedkin site join)")
        trust.check_place(directory)
        invite = read_invite(directory / messages.INVITE)
        verifier, name = invite.verifier, invite.site.name
        settings = SiteSettings.read(directory / messages.SETTINGS, invite.terms)
        order, path = verifier.find(directory / messages.ORDER, Order), directory / messages.ADMIT
        admitted = verifier.find(path, Admit, name)
        certificate = None if admitted is None else admitted.certificate.encode()
        if certificate is None:
            path = directory / f"{name}.request"
        key = _key_of(directory, certificate or verifier.read_request(path).body.request.encode(), path)
        out = verifier.departures(directory / messages.NOTICES)
        return cls(directory, invite, settings, order, certificate, key, out)

    @property
    def name(self) -> str:
        """The site's name."""
        return self.invite.site.name

    @property
    def contract(self) -> Contract:
        """What all agree on."""
        return self.invite.terms

    @property
    def authority(self) -> bytes:
        """The authority's certificate, PEM."""
        return self.invite.authority.encode()

    def pair(self, now: datetime | None = None) -> Pair:
        """Return certificate and key, both valid; raises `SecurityError` unless the site is admitted and not out."""
        if self.certificate is None:
            request = self.directory / f"{self.name}.request"
            raise SecurityError(f"{self.directory}: {self.name} is not admitted yet; send {request} to the organiser")
        if self.name in self.out:
            raise SecurityError(f"{self.directory}: {self.name} has left or was expelled, for good")
        with in_file(self.directory / messages.ADMIT, SecurityError):
            trust.check_issued(self.certificate, self.authority, now)
        return Pair(self.certificate, self.key)

    def renewal_due(self, now: datetime | None = None) -> bool:
        """Return whether the certificate ends soon."""
        left = timedelta(days=trust.RENEW_DAYS)
        return self.certificate is not None and trust.validity(self.certificate)[1] < (now or datetime.now(UTC)) + left

    def rows(self) -> Rows:
        """Read the prepared rows; raises when they are damaged or do not fit the contract."""
        path = self.directory / messages.ROWS
        trust.check_private(path)
        rows, p = Rows.load(path), len(self.contract.column_names)
        if rows.X.shape[1] != p:
            raise DataError(f"{path} has {rows.X.shape[1]} columns, but the contract makes {p}; join again")
        self.contract.loss_object().check_target(rows.y, self.directory.name)
        return rows

    def accept(self, path: Path) -> str:
        """Keep a file from the organiser (admit, order, model) or from a site that left (notice), after checking it.

        Returns what it was, in words.
        """
        text = trust.read_whole(path, ModelFile.most_bytes)
        with in_file(path, SecurityError):
            kind = kind_of(text)
        if kind in (Admit.kind, Order.kind):
            return (self._accept_admit if kind == Admit.kind else self._accept_order)(path, text)
        if kind == ModelFile.kind:
            found = self.invite.verifier.read(path, ModelFile, site=self.name).body
            place = self.directory / messages.MODEL
            found.unpack(place)
            return f"{place} has the model of {self.name}; fedkin predict {place} TABLE"
        if kind == Notice.kind:
            notice = self.invite.verifier.read_notice(path).body
            write_file(self.directory / messages.NOTICES / f"{notice.site}.notice", text, private=True)
            what = "was expelled" if notice.what == "expelled" else "has left"
            return f"{notice.site} {what}: its link is closed for good"
        raise DataError(f"{path} is a file of the kind {kind!r}; a site accepts admit, order, notice and model")

    def _accept_admit(self, path: Path, text: bytes) -> str:
        certificate = self.invite.verifier.read(path, Admit, site=self.name).body.certificate.encode()
        with in_file(path, SecurityError):
            trust.check_issued(certificate, self.authority)
        key = _key_of(self.directory, certificate, path)
        write_file(self.directory / messages.ADMIT, text, private=True, durable=True)
        following = self.directory / messages.NEXT_KEY
        if following.exists() and trust.read_private(following) == key:
            following.replace(self.directory / messages.KEY)
        return f"{self.name} is admitted until {trust.validity(certificate)[1]:%Y-%m-%d}"

    def _accept_order(self, path: Path, text: bytes) -> str:
        order = self.invite.verifier.read(path, Order).body
        if self.order is not None and order.revision < self.order.revision:
            raise DataError(
                f"{path} has revision {order.revision}, older than {self.order.revision}, which is here already"
            )
        write_file(self.directory / messages.ORDER, text, private=True)
        given = {name: getattr(order, name) for name in ("lam", "rounds", "rho")}
        words = ", ".join(f"{name} {value:g}" for name, value in given.items() if value is not None)
        return f"order {order.revision}: {words or 'everything as in the contract'}"

    def leave(self) -> Path:
        """Sign that this site leaves, for good; returns the notice for the organiser and the neighbours."""
        notice = Notice(run=self.invite.run, site=self.name, what="left", day=messages.today())
        return notice.write(self.directory / messages.NOTICES / f"{self.name}.notice", Signer.site(self.pair()))

    def renew(self, steps: StepMaker | None = None) -> tuple[Path, bool]:
        """Make a new key and a request for its certificate; the old ones serve until the answer is accepted.

        Returns the request, and whether the old key could sign it: otherwise the organiser must ask who sent it.
        """
        if self.certificate is None:
            raise SecurityError(f"{self.name} is not admitted yet; send its request to the organiser")
        if self.name in self.out:
            raise SecurityError(f"{self.name} has left or was expelled, for good: there is nothing to renew")
        path = self.directory / messages.NEXT_KEY
        if not path.exists():
            write_file(path, trust.make_key(), private=True)
        key = trust.read_private(path)
        try:
            asked = trust.make_request(self.name, key)
        except SecurityError as error:
            raise SecurityError(f"{path}: {error}; remove it and renew again") from None
        own_steps = _steps(self.invite, self.rows(), steps) if steps is not None else None
        valid = trust.validity(self.certificate)[1] > datetime.now(UTC)
        signer = Signer.site(Pair(self.certificate, self.key)) if valid else Signer(self.name, key)
        request = _request(self.invite, asked, own_steps)
        return request.write(self.directory / f"{self.name}.request", signer), valid

    def publish(self, dropped: frozenset[str] = frozenset()) -> Path:
        """Sign the site's own model for the organiser, if the site's rules allow it; returns the file to send.

        ``dropped`` are the names of neighbours whose edge the edge tests dropped.
        """
        signer, model, sent = Signer.site(self.pair()), self.directory / messages.MODEL, self.directory / messages.SENT
        if not model.is_dir():
            raise DataError(f"{self.directory} has no model yet: fedkin site run makes one")
        if not self.settings.share_result:
            raise DataError(
                f"the rules of {self.name} keep its parameters to itself: fedkin site settings {self.directory} "
                "--share-result"
            )
        sent.mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)
        packed = ModelFile.pack(self.invite.run, self.name, self.contract.digest, model, tuple(sorted(dropped)))
        return packed.write(sent / f"{self.name}.model", signer)


def contract_in(path: Path) -> tuple[Contract, Thresholds]:
    """Return the contract in a TOML file, an invite or a site's directory, and thresholds: the site's own if it is."""
    if path.is_dir():
        contract = read_invite(path / messages.INVITE).terms
        return contract, SiteSettings.read(path / messages.SETTINGS, contract)
    contract = Contract.read(path) if path.suffix == ".toml" else read_invite(path).terms
    return contract, contract.thresholds


def change_settings(directory: Path, *, confirmed: bool = False, **changes: Any) -> SiteSettings:
    """Change some of a site's own rules, or confirm those that were changed by hand; returns all of them."""
    contract = read_invite(directory / messages.INVITE).terms
    path = directory / messages.SETTINGS
    found = SiteSettings.read(path, contract, confirmed=not confirmed)
    try:
        wanted = msgspec.convert({**msgspec.structs.asdict(found), **changes}, type=SiteSettings)
    except msgspec.ValidationError as error:
        raise DataError(f"{path}: {error}") from None
    wanted.checked(contract, path)
    if confirmed or changes:
        wanted.write(path)
    return wanted


def _known_before(place: Path, given: Invite) -> bytes | None:
    """Return the key of a directory that joined the same federation already; None for a new place."""
    if not place.exists() or not any(place.iterdir()):
        return None
    if not (place / messages.INVITE).exists():
        if (place / messages.KEY).exists():  # a join that was cut short
            return trust.read_private(place / messages.KEY)
        raise DataError(f"{place} exists and is not a site's directory: choose another place with --into, or remove it")
    before = read_invite(place / messages.INVITE)
    if (before.run, before.site.name, before.authority) != (given.run, given.site.name, given.authority):
        raise SecurityError(
            f"{place} belongs to {before.site.name} in {before.federation!r} (run {before.run}), but the invite is for "
            f"{given.site.name} in {given.federation!r} (run {given.run}): choose another place with --into"
        )
    return trust.read_private(place / messages.KEY)


def _steps(invite: Invite, rows: Rows, make: StepMaker | None) -> Steps | None:
    """Return the step numbers for a request, where the placement needs them."""
    placement = invite.terms.rounds.placement
    if placement == "peer":
        return None
    if make is None:
        raise DataError(f"placement {placement!r} needs the site's step numbers in its request")
    return make(invite, rows)


def _request(invite: Invite, asked: bytes, steps: Steps | None) -> Request:
    return Request(invite.run, invite.site.name, invite.terms.digest, invite.digest, asked.decode(), steps)


def _key_of(directory: Path, certificate: bytes, where: Path) -> bytes:
    """Return the one of the site's keys to which a certificate (or request), which is in ``where``, belongs."""
    for path in (directory / messages.KEY, directory / messages.NEXT_KEY):
        if path == directory / messages.KEY or path.exists():
            key = trust.read_private(path)
            with in_file(path, SecurityError):
                if trust.belong_together(certificate, key):
                    return key
    raise SecurityError(
        f"{where}: it is for another key than {directory / messages.KEY}; ask the organiser to admit the newest request"
    )
