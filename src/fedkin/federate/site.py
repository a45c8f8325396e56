"""A site's directory: joined with an invite, and what the site reads, accepts and signs itself.

Private key and rows are made here and never leave. What came from outside is checked whenever it is read.
"""

from __future__ import annotations

import hashlib
import shutil
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from fedkin._base import PRIVATE_DIRECTORY, in_file, write_file
from fedkin.data import Finding, Rows, raise_findings, read_columns, row_places
from fedkin.errors import DataError
from fedkin.federate import messages, trust
from fedkin.federate.contract import Contract
from fedkin.federate.disclosure import Thresholds, check_disclosure, fewest_rows, refuse_disclosure
from fedkin.federate.messages import Admit, Invite, KeyList, ModelFile, Notice, Order, Request, Steps, read_invite
from fedkin.federate.records import Entry, Ledger, What, now
from fedkin.federate.trust import Pair, SecurityError

#: Makes a site's step numbers, which the placements central and replicas need, from its invite and rows.
StepMaker = Callable[[Invite, Rows], Steps]

_SETTINGS = """\
# The rules of this site. Nothing is shared below these thresholds. They may be stricter than the contract's, not laxer.
# After a change by hand:  fedkin site settings {place} --confirm
rows = {rows}                  # fewest rows
rows_per_parameter = {rows_per_parameter}    # fewest rows for each parameter of the model
cell = {cell}                  # fewest rows with any level of a category, or any class of the target, that occurs
pair = {pair}                  # fewest rows with any pair of levels of two features that occurs
effective_rows = {effective_rows}      # fewest rows that carry the weight in the answer to a query
epsilon = {epsilon}             # most epsilon of all messages with noise together; 0 for a single message
share_result = {share_result}       # whether the organiser may have this site's fitted parameters
below_minima = {below_minima}       # whether the hard minima of Fedkin (docs/contract.md) do not hold
digest = "{digest}"
"""


class SiteSettings(Thresholds, frozen=True, kw_only=True):
    """A site's own rules, ``site.toml``: thresholds as strict as the contract's or stricter, and what else it shares.

    The file is for people; a digest of its values tells a damaged file, or one that was changed by hand, from the one
    that the site's owner confirmed. ``epsilon``: the budget of all messages with noise together, 0 for that of the
    first; ``share_result``: whether the organiser may have the site's fitted parameters;
    ``below_minima``: whether only these thresholds and the contract's hold, not the hard minima of Fedkin.
    """

    epsilon: Annotated[float, Meta(ge=0)] = 0.0
    share_result: bool = False
    below_minima: bool = False

    @classmethod
    def from_contract(cls, contract: Contract, **more: Any) -> SiteSettings:
        """Take the contract's thresholds, and share nothing beyond."""
        return cls(**msgspec.structs.asdict(contract.thresholds), **more)

    @property
    def lowers_minima(self) -> bool:
        return self.below_minima

    @classmethod
    def read(cls, path: Path, contract: Contract, *, confirmed: bool = True, **changes: Any) -> SiteSettings:
        """Read the settings in a file, whose digest must fit where they are ``confirmed``, and change some of them."""
        trust.check_private(path)
        try:
            values = tomllib.loads(path.read_bytes().decode())
            digest = values.pop("digest", None)
            found, wanted = (msgspec.convert(given, cls) for given in (values, {**values, **changes}))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise DataError(f"{path} is damaged, or not TOML ({error}); fix it, or remove it and join again") from None
        except msgspec.ValidationError as error:
            raise DataError(f"{path}: {error}") from None
        if confirmed and digest != found.digest:
            raise DataError(
                f"{path} was changed by hand, or damaged: look at it, then confirm that it is right with "
                f"fedkin site settings {path.parent} --confirm"
            )
        for name, agreed in msgspec.structs.asdict(contract.thresholds).items():
            if (own := getattr(wanted, name)) < agreed:
                raise DataError(
                    f"{path}: {name} is {own}, laxer than the {agreed} of the contract; a site may only be stricter"
                )
        return wanted

    def write(self, path: Path) -> None:
        """Write the file, with its digest."""
        shown = {name: str(value).lower() for name, value in msgspec.structs.asdict(self).items()}
        write_file(path, _SETTINGS.format(place=path.parent, digest=self.digest, **shown), private=True)

    @property
    def digest(self) -> str:
        """What tells these values from others."""
        return hashlib.sha256(messages.canonical(self)).hexdigest()[:16]


def change_settings(directory: Path, *, confirmed: bool = False, **changes: Any) -> SiteSettings:
    """Change some of a site's own rules, or confirm those that were changed by hand; returns all of them."""
    path, contract = directory / messages.SETTINGS, read_invite(directory / messages.INVITE).terms
    wanted = SiteSettings.read(path, contract, confirmed=not confirmed, **changes)
    if confirmed or changes:
        wanted.write(path)
        if "below_minima" in changes:
            site, note = Site.read(directory), "the custodian lifts the hard minima"
            note = note if wanted.below_minima else "the hard minima hold again"
            rows = site.rows()
            site.ledger.record(site.entry("settings", rows, "nobody", note), rows)
    return wanted


@dataclass(frozen=True, eq=False)
class Site:
    """A site's directory, in which everything was checked but the rows.

    ``certificate`` is None before the site was admitted; ``out`` are the names of sites that have left or were
    expelled, as far as this site knows them, by the notices here and the list of ``keys``.
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
        """Join a federation: check the rows, make a key, write the request for the organiser.

        Joining again with an invite to the same federation replaces rows and request, and keeps key and settings.
        Nothing is written unless the rows fit the contract, and the authority's fingerprint is the ``expected`` one,
        which the organiser read out. Rows ``below_minima`` need that decision of the site's custodian. The numbers of
        ``steps`` are the only ones in the request that depend on rows.
        Returns the site, and remarks on the rows.
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
        known = _known_key(place, given)
        columns = read_columns(data)
        settings = SiteSettings.from_contract(contract, below_minima=below_minima)
        if (place / messages.SETTINGS).exists():
            changes = {"below_minima": True} if below_minima else {}
            settings = SiteSettings.read(place / messages.SETTINGS, contract, **changes)
        findings = contract.check(columns, settings, at=row_places(data, columns))
        raise_findings(findings)
        rows = contract.prepare(columns)
        if steps is not None and contract.rounds.placement != "peer":
            Ledger(place, given.run, name).check("request", rows, fewest_rows(contract, settings))
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
            made.ledger.record(made.entry("settings", rows, "nobody", "the custodian lifts the hard minima"), rows)
        if request.steps is not None:
            made.ledger.record(made.entry("request", rows, note="own estimate and steps"), rows, once=True)
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
        """What all agree on."""
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
        """What people compare of the site's key."""
        return trust.fingerprint(trust.make_request(self.name, self.key))

    def pair(self) -> Pair:
        """Return certificate and key, both valid; raises `SecurityError` unless the site is admitted and not out."""
        certificate = self._admitted()
        with in_file(self.directory / messages.ADMIT, SecurityError):
            trust.check_issued(certificate, self.authority)
        return Pair(certificate, self.key)

    def _admitted(self) -> bytes:
        if self.certificate is None:
            raise SecurityError(f"{self.name} is not admitted yet; send {self.request} to the organiser")
        if self.name in self.out:
            raise SecurityError(f"{self.directory}: {self.name} has left or was expelled, for good")
        if self.keys.has_lost(self.certificate):
            raise SecurityError(
                f"{self.directory}: its key was lost, and {self.name} was admitted with another one: use the directory "
                "that has it, and tell the organiser if you know of none"
            )
        return self.certificate

    def renewal_due(self, now: datetime | None = None) -> bool:
        """Return whether the certificate ends soon."""
        return self.certificate is not None and trust.ends_soon(self.certificate, now)

    @property
    def ledger(self) -> Ledger:
        """What has left the site."""
        return Ledger(self.directory, self.invite.run, self.name)

    def entry(self, what: What, rows: Rows, to: str = "the organiser", note: str = "") -> Entry:
        """Return an entry of the ledger about something of these rows, or of a model of them, that leaves now."""
        run, contract = self.invite.run, self.contract.digest
        return Entry(
            what=what, to=to, run=run, site=self.name, contract=contract, rows=rows.digest, time=now(), note=note
        )

    def rows(self) -> Rows:
        """Read the prepared rows; raises when they are damaged or do not fit the contract."""
        path = self.directory / messages.ROWS
        trust.check_private(path)
        rows, p = Rows.load(path), len(self.contract.column_names)
        if rows.X.shape[1] != p:
            raise DataError(f"{path} has {rows.X.shape[1]} columns, but the contract makes {p}; join again")
        self.contract.loss_object().check_target(rows.y, self.directory.name)
        return rows

    def allowed_rows(self, what: What) -> Rows:
        """Read the rows for something without noise that leaves; raises `DataError` unless ledger and gate allow it."""
        rows = self.rows()
        self.ledger.check(what, rows, fewest_rows(self.contract, self.settings))
        refuse_disclosure(check_disclosure(self.contract, rows, self.settings), f"{what}: nothing is shared")
        return rows

    def accept(self, path: Path) -> str:
        """Keep a file from the organiser (admit, order, model) or from a site that left (notice), after checking it.

        Returns what it was, in words.
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
                raise SecurityError(f"{path}: {notice.site} lost the key with which it was signed; remove the file")
            write_file(self.directory / messages.NOTICES / f"{notice.site}.notice", text, private=True)
            what = "was expelled" if notice.what == "expelled" else "has left"
            return f"{notice.site} {what}: its link is closed for good"
        if kind == KeyList.kind:
            with in_file(path, SecurityError):
                newer = self.take_keys(text)
            return "its keys count from now on" if newer else "its keys, or newer ones, were here already"
        raise DataError(f"{path} is a file of the kind {kind!r}; a site accepts admit, order, notice, keys and model")

    def take(self, text: bytes) -> None:
        """Keep what came over a link: a newer list of keys, or a certificate that lasts longer than the one here.

        Anybody may have passed it on; raises `SecurityError` unless the organiser signed it.
        """
        if messages.kind_of(text) != Admit.kind:
            self.take_keys(text)
            return
        admit, _ = self.invite.open(text, Admit, site=self.name)
        self.take_keys(admit.keys.encode())
        given, here = (trust.validity(one)[1] for one in (admit.certificate.encode(), self._admitted()))
        if given > here:
            self._accept_admit(text)

    def take_keys(self, text: bytes) -> bool:
        """Keep a list of keys if the organiser signed it and it is newer than the one here; returns whether it is."""
        given, _ = self.invite.open(text, KeyList)
        if len(given.keys) != self.invite.n_sites:
            raise SecurityError(f"it is not of {self.invite.n_sites} sites")
        if newer := given.revision > self.invite.keys(self.directory).revision:
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
                f"{path} has revision {order.revision}, older than {self.order.revision}, which is here already"
            )
        write_file(self.directory / messages.ORDER, text, private=True)
        given = {name: getattr(order, name) for name in ("lam", "rounds", "rho")}
        words = ", ".join(f"{name} {value:g}" for name, value in given.items() if value is not None)
        return f"order {order.revision}: {words or 'everything as in the contract'}"

    def leave(self) -> Path:
        """Sign that this site leaves, for good; returns the notice for the organiser and the neighbours."""
        notice = Notice(run=self.invite.run, site=self.name, what="left", day=messages.today())
        return notice.write(self.directory / messages.NOTICES / f"{self.name}.notice", self.pair())

    def renew(self, steps: StepMaker | None = None) -> tuple[Path, bool]:
        """Make a new key and a request for its certificate; the old ones serve until the answer is accepted.

        Returns the request, and whether the old key could sign it: otherwise the organiser must ask who sent it.
        """
        certificate, rows, path = self._admitted(), self.rows(), self.directory / messages.NEXT_KEY
        if steps is not None and self.contract.rounds.placement != "peer":
            rows = self.allowed_rows("request")
            self.ledger.record(self.entry("request", rows, note="own estimate and steps"), rows, once=True)
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
        """Sign the site's own model for the organiser, if the site's rules allow it; returns the file to send.

        ``dropped`` are the names of neighbours whose edge the edge tests dropped.
        """
        signer, model, sent = self.pair(), self.directory / messages.MODEL, self.directory / messages.SENT
        if not model.is_dir():
            raise DataError(f"{self.directory} has no model yet: fedkin site run makes one")
        if (model / "baseline.json").exists():
            raise DataError(
                f"{model} has baseline hazards, whose steps are the times of single events: keep that model elsewhere, "
                "and publish the one that fedkin site run made"
            )
        if not self.settings.share_result:
            raise DataError(
                f"the rules of {self.name} keep its parameters to itself: fedkin site settings {self.directory} "
                "--share-result"
            )
        rows = self.allowed_rows("publish")
        self.ledger.record(self.entry("publish", rows, note="coefficients and number of rows"), rows)
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
    """Return the one of the site's keys to which a certificate (or request) belongs."""
    for path in (directory / messages.KEY, directory / messages.NEXT_KEY):
        if path == directory / messages.KEY or path.exists():
            key = trust.read_key(path)
            with in_file(path, SecurityError):
                if Pair(certificate, key).fits():
                    return key
    raise SecurityError(
        f"it is for another key than {directory / messages.KEY}; ask the organiser to admit the newest request"
    )


# --- rows that arrived while the site ran -----------------------------------------------------------------------------

ARRIVED_LIST = "list.json"


class Part(msgspec.Struct, frozen=True):
    """Rows that were taken in together: the file in which they are, and the revision and round from which they count.

    ``loss`` and ``error`` are the mean loss of these rows before they were used, and its standard error.
    """

    file: str
    revision: int
    round: int
    loss: float
    error: float


class Seen(msgspec.Struct, frozen=True):
    """How many rows of a file were taken in, and their digest."""

    rows: int
    digest: str


class Arrived(msgspec.Struct, frozen=True):
    """All that has arrived at a site, ``arrived/list.json``."""

    parts: tuple[Part, ...] = ()
    seen: dict[str, Seen] = {}


def read_arrived(directory: Path) -> Arrived:
    """Read the list in a site's directory; an empty one where nothing has arrived."""
    path = directory / messages.ARRIVED / ARRIVED_LIST
    if not path.exists():
        return Arrived()
    try:
        return msgspec.json.decode(path.read_bytes(), type=Arrived)
    except msgspec.DecodeError as error:
        raise DataError(f"{path} is damaged ({error}); put a copy back, or join again") from None


def rows_before(site: Site, revision: int) -> Rows:
    """Return the rows with which a run of this revision begins: those of the join, and what arrived in runs before."""
    earlier = [part for part in read_arrived(site.directory).parts if part.revision < revision]
    return Rows.stack([site.rows(), *(Rows.load(site.directory / messages.ARRIVED / part.file) for part in earlier)])
