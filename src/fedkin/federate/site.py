"""A site's directory: how a site joins with an invite, and what it reads, accepts and signs.

The private key and the prepared rows are created here and never leave. Files from outside are checked on every read.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from fedkin._base import PRIVATE_DIRECTORY, AnyArray, in_file, write_file
from fedkin.core import Summary
from fedkin.data import Finding, Rows, level_text, raise_findings, read_columns, row_places
from fedkin.errors import DataError
from fedkin.federate import messages, trust
from fedkin.federate.contract import Contract
from fedkin.federate.disclosure import check_count, check_disclosure, refuse_disclosure
from fedkin.federate.ledger import Entry, Ledger, What
from fedkin.federate.messages import (
    Admit,
    Invite,
    KeyList,
    ModelFile,
    Notice,
    Order,
    Request,
    Steps,
    SummaryFile,
    read_invite,
)
from fedkin.federate.records import read_arrived
from fedkin.federate.settings import District, SiteSettings, Thresholds
from fedkin.federate.trust import Pair, SecurityError

#: Computes a site's step numbers from its invite and rows; the placements central and replicas need them.
StepMaker = Callable[[Invite, Rows], Steps]

_LIFTED, _HOLD_AGAIN = "the custodian lifts the hard minima", "the hard minima hold again"  # notes of the ledger
_OF_REQUEST = "own estimate and steps"
_OF_ROUNDS = ("model.json", "coefficients.csv", "edges.csv")  # files of the model that rounds end with


def change_settings(directory: Path, *, confirmed: bool = False, **changes: Any) -> SiteSettings:
    """Change some of a site's own rules, or confirm changes made by hand; return all of them."""
    path, contract = directory / messages.SETTINGS, read_invite(directory / messages.INVITE).terms
    wanted = SiteSettings.read(path, contract, confirmed=not confirmed, **changes)
    if confirmed or changes:
        wanted.write(path)
        if "below_minima" in changes:
            site = Site.read(directory)
            site.record("settings", site.rows(), "nobody", _LIFTED if wanted.below_minima else _HOLD_AGAIN)
    return wanted


@dataclass(frozen=True, eq=False)
class Site:
    """A site's directory, in which everything except the rows has been checked.

    ``certificate`` is None until the site is admitted; ``out`` has the names of sites that have left or were expelled,
    as far as this site knows from its notices and the list of ``keys``.
    """

    directory: Path
    invite: Invite
    settings: SiteSettings
    order: Order | None
    certificate: bytes | None
    key: bytes = field(repr=False)
    out: frozenset[str]
    keys: KeyList

    @classmethod
    def join(
        cls,
        invite: Path,
        data: Path,
        directory: Path | None = None,
        *,
        expected: str | None = None,
        steps: StepMaker | None = None,
        below_minima: bool = False,
    ) -> tuple[Site, list[Finding]]:
        """Join a federation: check the rows, create a key and write the request for the organiser.

        Joining the same federation again replaces the rows and the request, and keeps the key and the settings. Nothing
        is written unless the rows fit the contract and the authority has the ``expected`` fingerprint, which the
        organiser reads out. Only the site's custodian may allow rows ``below_minima``. The numbers from ``steps`` are
        the only ones in the request that depend on rows. Returns the site and notes on the rows.
        """
        given = read_invite(invite)
        seen = trust.fingerprint(given.authority.encode())
        if expected is not None and not trust.same_fingerprint(seen, expected):
            raise SecurityError(
                f"{invite} is not signed by the authority with the fingerprint {expected}: do not join, and ask the "
                "organiser to read it out again"
            )
        contract, name = given.terms, given.site.name
        place = Path(name) if directory is None else directory
        known = _known_key(place, given)
        columns = read_columns(data)
        settings = SiteSettings.from_contract(contract, below_minima=below_minima)
        if (place / messages.SETTINGS).exists():
            changes = {"below_minima": True} if below_minima else {}
            settings = SiteSettings.read(place / messages.SETTINGS, contract, **changes)
        findings = contract.check(columns, settings, at=row_places(data, columns))
        raise_findings(findings)
        if contract.within in columns:
            settings = msgspec.structs.replace(settings, district=_district(columns[contract.within], contract.within))
        rows = contract.prepare(columns)
        if steps is not None and contract.rounds.placement != "peer":
            Ledger(place, given.run, name, contract).check("request", rows, settings)
        request, key = _request(given, known or trust.make_key(), rows, steps)
        place.mkdir(parents=True, exist_ok=True)
        place.chmod(PRIVATE_DIRECTORY)
        (place / messages.NOTICES).mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)
        if known is None:
            trust.write_key(place / messages.KEY, key.key)
        shutil.rmtree(place / messages.ARRIVED, ignore_errors=True)  # the table has what arrived
        rows.save(place / messages.ROWS)
        settings.write(place / messages.SETTINGS)
        request.write(place / f"{name}.request", key)
        # last: it makes the directory that of a site
        write_file(place / messages.INVITE, trust.read_whole(invite), private=True)
        made = cls.read(place)
        if below_minima:
            made.record("settings", rows, "nobody", _LIFTED)
        if request.steps is not None:
            made.record("request", rows, note=_OF_REQUEST, once=True)
        return made, findings

    @classmethod
    def read(cls, directory: Path) -> Site:
        """Read a site's directory, after checking every signature in it; errors name the file."""
        if not (directory / messages.INVITE).exists():
            raise DataError(f"{directory} is not a site's directory: it has no {messages.INVITE} (fedkin site join)")
        trust.check_private(directory)
        invite = read_invite(directory / messages.INVITE)
        settings = SiteSettings.read(directory / messages.SETTINGS, invite.terms)
        order, path = invite.find(directory / messages.ORDER, Order), directory / messages.ADMIT
        admitted = invite.find(path, Admit, invite.site.name)
        certificate = None if admitted is None else admitted.certificate.encode()
        if certificate is None:
            path = directory / f"{invite.site.name}.request"
        owner = certificate or invite.read(path, Request)[0].request.encode()
        with in_file(path, SecurityError):
            key = _key_of(directory, owner)
        out, keys = invite.departures(directory), invite.keys(directory)
        return cls(directory, invite, settings, order, certificate, key, out, keys)

    @property
    def name(self) -> str:
        """The site's name."""
        return self.invite.site.name

    @property
    def contract(self) -> Contract:
        """The contract that all sites agreed on."""
        return self.invite.terms

    @property
    def authority(self) -> bytes:
        """The authority's certificate, PEM."""
        return self.invite.authority.encode()

    @property
    def request(self) -> Path:
        """The request for the organiser."""
        return self.directory / f"{self.name}.request"

    @property
    def key_fingerprint(self) -> str:
        """Fingerprint of the site's key, for people to compare."""
        return trust.fingerprint(trust.make_request(self.name, self.key))

    def pair(self) -> Pair:
        """Return the valid certificate and key; raise `SecurityError` unless the site is admitted and not out."""
        certificate = self._admitted()
        with in_file(self.directory / messages.ADMIT, SecurityError):
            trust.check_issued(certificate, self.authority)
        return Pair(certificate, self.key)

    def _admitted(self) -> bytes:
        if self.certificate is None:
            raise SecurityError(f"{self.name} is not admitted yet; send {self.request} to the organiser")
        if self.name in self.out:
            raise SecurityError(f"{self.directory}: {self.name} has left or was expelled permanently")
        if self.keys.has_lost(self.certificate):
            raise SecurityError(
                f"{self.directory}: its key was lost, and {self.name} was admitted with another one. Use the directory "
                "with the new key, and tell the organiser if you know of none"
            )
        return self.certificate

    def renewal_due(self) -> bool:
        """Return whether the certificate expires soon."""
        return self.certificate is not None and trust.ends_soon(self.certificate)

    @property
    def ledger(self) -> Ledger:
        """Ledger of everything that has left the site."""
        return Ledger(self.directory, self.invite.run, self.name, self.contract)

    def record(
        self, what: What, rows: Rows, to: str = "the organiser", note: str = "", *, once: bool = False, **more: Any
    ) -> None:
        """Record in the ledger what is about to leave the site: about these rows, or a model of them."""
        contract, about = self.contract, {"run": self.invite.run, "site": self.name, "rows": rows.digest, **more}
        digests: dict[str, Any] = {"contract": contract.digest, "columns": contract.columns_digest}
        self.ledger.record(Entry(what=what, to=to, note=note, **digests, **about), rows, once=once)

    def rows(self) -> Rows:
        """Read the prepared rows; raise `DataError` if they are damaged or do not fit the contract."""
        path = self.directory / messages.ROWS
        trust.check_private(path)
        rows, p = Rows.load(path), len(self.contract.column_names)
        if rows.X.shape[1] != p:
            raise DataError(f"{path} has {rows.X.shape[1]} columns, but the contract makes {p}; join again")
        self.contract.loss_object().check_target(rows.y, self.directory.name)
        return rows

    def allowed_rows(self, what: What) -> Rows:
        """Read the rows for a message without noise; raise `DataError` unless the ledger and the disclosure gate allow
        it."""
        rows = self.rows()
        self.ledger.check(what, rows, self.settings)
        refuse_disclosure(check_disclosure(self.contract, rows, self.settings), f"{what}: nothing is shared")
        return rows

    def noisy_sums(self) -> tuple[Summary, str] | None:
        """Return the noisy sums of the rows that have left, and the digest of their file; None if none have.

        Rounds use them instead of the rows.
        """
        known = {one.sums for one in self.ledger.sent(self.rows()) if one.sums and one.run == self.invite.run}
        if not known:
            return None
        path = messages.round_file(self.directory / messages.SENT, self.name, 1, messages.SUMMARY)
        found, _ = self.invite.read(path, SummaryFile, ended=True)
        if found.digest not in known:
            raise DataError(f"{path} does not have the noisy sums that left this site: put them back")
        return Summary.from_plain(found.summary), found.digest

    def let_out(self, what: What, to: str = "the organiser", note: str = "") -> str:
        """Check and record that numbers of rounds may leave the site; return the digest of the noisy sums behind them.

        It is empty if they are computed from the rows.
        """
        noisy = self.noisy_sums()
        if noisy is None:
            rows = self.allowed_rows(what)
            self.record(what, rows, to, note, once=True)
            return ""
        rows, (summary, digest) = self.rows(), noisy
        assert summary.privacy is not None
        private = (summary.privacy.epsilon, summary.privacy.delta)
        self.ledger.check(what, rows, self.settings, private=private, budget=self.settings.epsilon, sums=digest)
        refuse_disclosure(check_count(self.contract, rows.n_samples, self.settings), f"{what}: nothing is shared")
        given = dict(zip(("epsilon", "delta"), private, strict=True))
        self.record(what, rows, to, f"{note}, from the noisy sums", once=True, **given, sums=digest)
        return digest

    def accept(self, path: Path) -> str:
        """Check and keep a file from the organiser (admit, order, model) or from a departed site (notice).

        Returns a sentence that describes it.
        """
        text, kind = messages.read_kind(path)
        if kind == Admit.kind:
            with in_file(path, SecurityError):
                return self._accept_admit(text)
        if kind == Order.kind:
            return self._accept_order(path, text)
        if kind == ModelFile.kind:
            place = self.directory / messages.MODEL
            self.invite.read(path, ModelFile, site=self.name)[0].unpack(place)
            return f"{place} has the model of {self.name}; fedkin predict {place} TABLE"
        if kind == Notice.kind:
            notice, certificate = self.invite.read(path, Notice)
            if self.keys.has_lost(certificate):
                raise SecurityError(f"{path} was signed with a key that {notice.site} has since lost; remove the file")
            write_file(self.directory / messages.NOTICES / f"{notice.site}.notice", text, private=True)
            what = "was expelled" if notice.what == "expelled" else "has left"
            return f"{notice.site} {what}: its link is closed permanently"
        if kind == KeyList.kind:
            with in_file(path, SecurityError):
                newer = self.take_keys(text)
            return "its keys are valid from now on" if newer else "its keys, or newer ones, were already here"
        raise DataError(f"{path} is a file of the kind {kind!r}; a site accepts admit, order, notice, keys and model")

    def take(self, text: bytes) -> None:
        """Keep a newer list of keys, or a certificate with a later end, received over a connection.

        Any site may have passed it on; raises `SecurityError` unless the organiser signed it.
        """
        if messages.kind_of(text) != Admit.kind:
            self.take_keys(text)
        elif self._extends(admit := self.invite.open(text, Admit, site=self.name)[0]):
            self._accept_admit(text)
        else:
            self.take_keys(admit.keys.encode())

    def is_news(self, text: bytes) -> bool:
        """Return whether `take` would keep anything; raise `SecurityError` unless the organiser signed it."""
        if messages.kind_of(text) != Admit.kind:
            return self._is_newer(text)
        admit, _ = self.invite.open(text, Admit, site=self.name)
        return self._is_newer(admit.keys.encode()) or self._extends(admit)

    def _extends(self, admit: Admit) -> bool:
        return trust.validity(admit.certificate.encode())[1] > trust.validity(self._admitted())[1]

    def _is_newer(self, text: bytes) -> bool:
        given, _ = self.invite.open(text, KeyList)
        if len(given.keys) != self.invite.n_sites:
            raise SecurityError(f"it has {len(given.keys)} keys for {self.invite.n_sites} sites")
        return given.revision > self.invite.keys(self.directory).revision

    def take_keys(self, text: bytes) -> bool:
        """Keep a list of keys if the organiser signed it and it is newer than the current one; return whether it is."""
        if newer := self._is_newer(text):
            write_file(self.directory / messages.KEYS, text, private=True, durable=True)
        return newer

    def _accept_admit(self, text: bytes) -> str:
        admit, _ = self.invite.open(text, Admit, site=self.name)
        certificate = admit.certificate.encode()
        trust.check_issued(certificate, self.authority)
        key = _key_of(self.directory, certificate)
        self.take_keys(admit.keys.encode())
        write_file(self.directory / messages.ADMIT, text, private=True, durable=True)
        following = self.directory / messages.NEXT_KEY
        if following.exists() and trust.read_key(following) == key:
            following.replace(self.directory / messages.KEY)
        return f"{self.name} is admitted until {trust.validity(certificate)[1]:%Y-%m-%d}"

    def _accept_order(self, path: Path, text: bytes) -> str:
        order, _ = self.invite.read(path, Order)
        if self.order is not None and order.revision < self.order.revision:
            raise DataError(
                f"{path} has revision {order.revision}, but the newer revision {self.order.revision} is already here"
            )
        write_file(self.directory / messages.ORDER, text, private=True)
        given = {name: getattr(order, name) for name in ("lam", "rounds", "rho")}
        words = ", ".join(f"{name} {value:g}" for name, value in given.items() if value is not None)
        return f"order {order.revision}: {words or 'everything as in the contract'}"

    def leave(self) -> Path:
        """Sign a notice that this site leaves permanently; return the file for the organiser and the neighbours."""
        notice = Notice(run=self.invite.run, site=self.name, what="left")
        return notice.write(self.directory / messages.NOTICES / f"{self.name}.notice", self.pair())

    def renew(self, steps: StepMaker | None = None) -> tuple[Path, bool]:
        """Create a new key and request its certificate; the old ones remain in use until the answer is accepted.

        Returns the request, and whether the old key signed it. If not, the organiser must ask the site to confirm it.
        """
        certificate, rows, path = self._admitted(), self.rows(), self.directory / messages.NEXT_KEY
        if steps is not None and self.contract.rounds.placement != "peer":
            rows = self.allowed_rows("request")
            self.record("request", rows, note=_OF_REQUEST, once=True)
        if not path.exists():
            trust.write_key(path, trust.make_key())
        following = trust.read_key(path)
        try:
            request, key = _request(self.invite, following, rows, steps)
        except SecurityError as error:
            raise SecurityError(f"{path}: {error}; remove it and renew again") from None
        valid = trust.validity(certificate)[1] > datetime.now(UTC)
        return request.write(self.request, Pair(certificate, self.key) if valid else key), valid

    def publish(self, dropped: frozenset[str] = frozenset()) -> Path:
        """Sign the site's own model for the organiser, if the site's rules allow it; return the file to send.

        ``dropped`` are the names of neighbours whose edge the edge tests dropped.
        """
        signer, model, sent = self.pair(), self.directory / messages.MODEL, self.directory / messages.SENT
        if not model.is_dir():
            raise DataError(f"{self.directory} has no model yet: fedkin site run creates one")
        if not self.settings.share_result:
            raise DataError(
                f"the rules of {self.name} do not allow sharing its parameters: fedkin site settings {self.directory} "
                "--share-result"
            )
        sums = self.let_out("publish", note="coefficients and number of rows")
        _check_of_rounds(model, sums)
        sent.mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)
        packed = ModelFile.pack(self.invite.run, self.name, self.contract.digest, model, tuple(sorted(dropped)))
        return packed.write(sent / f"{self.name}.model", signer)


def _check_of_rounds(model: Path, sums: str) -> None:
    """Raise `DataError` unless a directory has a model from rounds, with these noisy sums if any, and nothing else."""
    if others := sorted(path.name for path in model.iterdir() if path.name not in _OF_ROUNDS):
        raise DataError(f"{model} has {others[0]}, which is not part of a model of fedkin site run: move it away")
    try:
        origin = msgspec.json.decode((model / _OF_ROUNDS[0]).read_bytes(), type=dict[str, Any])["origin"]
        made = origin["from"], origin.get("sums", "")
    except (OSError, msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{model / _OF_ROUNDS[0]} cannot be used ({error}); run fedkin site run again") from None
    if made != ("rounds", sums):
        how = "rounds with the noisy sums that left" if sums else "rounds"
        raise DataError(f"{model} was not made by {how}: move it elsewhere, and run fedkin site run again")


def contract_in(path: Path) -> tuple[Contract, Thresholds]:
    """Return the contract in a TOML file, an invite or a site's directory, and that site's own thresholds, if any."""
    if path.is_dir():
        contract = read_invite(path / messages.INVITE).terms
        return contract, SiteSettings.read(path / messages.SETTINGS, contract)
    contract = Contract.read(path) if path.suffix == ".toml" else read_invite(path).terms
    return contract, contract.thresholds


def _district(cells: AnyArray, name: str) -> str:
    """Return the district of the site, from a column of its table."""
    named = list(dict.fromkeys(level_text(one) for one in cells.tolist()))
    if len(named) > 1:
        raise DataError(
            f"{name} is {named[0]!r} in some rows and {named[1]!r} in others, but a site has one {name}; crossed "
            "groupings are not supported. Make each part a site, or leave within out of the contract"
        )
    try:
        return msgspec.convert(named[0], District)
    except msgspec.ValidationError:
        raise DataError(f"{name} is {named[0]!r}, expected a name of at most 60 characters in one line") from None


def _known_key(place: Path, given: Invite) -> bytes | None:
    """Return the key of a directory that joined the same federation already; None for a new place."""
    if not place.exists() or not any(place.iterdir()):
        return None
    if (place / messages.INVITE).exists():
        before = read_invite(place / messages.INVITE)
        if (before.run, before.site.name, before.authority) != (given.run, given.site.name, given.authority):
            raise SecurityError(
                f"{place} belongs to {before.site.name} in {before.federation!r} (run {before.run}), but the invite is "
                f"for {given.site.name} in {given.federation!r} (run {given.run}): choose another place with --into"
            )
    elif not (place / messages.KEY).exists():  # with a key it is a join that was cut short
        raise DataError(f"{place} exists and is not a site's directory: choose another place with --into, or remove it")
    return trust.read_key(place / messages.KEY)


def _request(invite: Invite, key: bytes, rows: Rows, steps: StepMaker | None) -> tuple[Request, Pair]:
    """Return a request for a certificate for a key, and the two together, which can sign a first request."""
    asked, name = trust.make_request(invite.site.name, key), invite.site.name
    own = None if steps is None or invite.terms.rounds.placement == "peer" else steps(invite, rows)
    return Request(invite.run, name, invite.terms.digest, invite.digest, asked.decode(), own), Pair(asked, key)


def _key_of(directory: Path, certificate: bytes) -> bytes:
    """Return whichever of the site's keys belongs to a certificate or request."""
    for path in (directory / messages.KEY, directory / messages.NEXT_KEY):
        if path == directory / messages.KEY or path.exists():
            key = trust.read_key(path)
            with in_file(path, SecurityError):
                if Pair(certificate, key).fits():
                    return key
    raise SecurityError(
        f"it is for another key than {directory / messages.KEY}; ask the organiser to admit the newest request"
    )


def rows_before(site: Site, revision: float) -> Rows:
    """Return the rows with which a run of this revision starts: those of the join and of arrivals in earlier runs."""
    earlier = [part for part in read_arrived(site.directory).parts if part.revision < revision]
    return Rows.stack([site.rows(), *(Rows.load(site.directory / messages.ARRIVED / part.file) for part in earlier)])
