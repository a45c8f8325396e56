"""The files that travel between organiser and sites: what is in each of them, and how each is read.

All of them are msgspec structs in an `envelope`, decoded strictly and up to a size. `Verifier` reads those of one
federation: every error names the file and what is wrong with it.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta

from fedkin._base import in_file, replacing_directory, write_file
from fedkin.federate.contract import Contract, Count, Nonnegative, Positive, Whole
from fedkin.federate.envelope import By, Sealed, Signer, canonical, seal, unseal, unseal_invitation, unseal_request
from fedkin.federate.trust import SecurityError, read_whole

# --- in the organiser's directory ---
FEDERATION = "federation.json"  #: signed: name, run, contract, authority, digests of the next three
CONTRACT, GRAPH, SITES = "contract.toml", "graph.csv", "sites.csv"
AUTHORITY_KEY = "authority.key"
INVITES, ADMITTED, SUMMARIES, QUERIES, NOTICES, MODELS = "invites", "admitted", "summaries", "asks", "notices", "models"
ORDER = "order.json"

# --- in a site's directory ---
INVITE, ADMIT = "invite.json", "admit.json"
KEY, NEXT_KEY = "site.key", "next.key"  #: the second one waits for its certificate
ROWS, SETTINGS, MODEL = "rows.npz", "site.toml", "model"
SENT = "sent"  #: all that the site has said

CENTRE = "centre"  #: name of the central machine; its number is the number of sites
PLAIN_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,39}\Z"
Name = Annotated[str, Meta(pattern=PLAIN_NAME)]
Run = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
PlainFile = Annotated[str, Meta(pattern=r"^[a-z_]+\.(json|csv|npz)\Z")]  #: a file that a model has, in no other folder
_SMALL, _LARGE = 2**26, 2**30  # bytes


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A site as its neighbours know it.

    - ``id``: what the organiser's list calls it; ``number``: its place there, counted from 0. Of the two ends of an
      edge the larger number comes first.
    - ``name``: its directory, the common name of its certificate, its part of the keys of messages.
    - ``endpoint``: ``tls/host:port`` where it listens; None when it only shares summaries or only connects.
    """

    id: str | int
    name: Name
    number: Whole
    endpoint: str | None = None


class Steps(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The step rule of a site, and the theta ``(p,)`` from which it starts: all that is planned from its rows.

    Who steps for a site while it is away needs them, too (placements central and replicas).
    """

    start: Nonnegative
    growth: Nonnegative
    damping: Nonnegative
    theta: tuple[float, ...]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """What all files have: the run of the federation to which they belong."""

    kind: ClassVar[str]
    most_bytes: ClassVar[int] = _SMALL
    run: Run

    def write(self, path: Path, signer: Signer) -> Path:
        """Seal the message and write it to a private file; returns its path."""
        write_file(path, seal(self.kind, self, signer), private=True)
        return path

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the content: who knows it has seen the file."""
        return hashlib.sha256(canonical(self)).hexdigest()

    @classmethod
    def decode(cls: type[M], body: dict[str, Any]) -> M:
        """Return the body of an envelope as a message; raises `SecurityError` that names the entry."""
        try:
            return msgspec.convert(body, type=cls)
        except msgspec.ValidationError as error:
            raise SecurityError(f"it cannot be used: {error}") from None


M = TypeVar("M", bound=Message)


class _Invitation(Message, frozen=True):
    """A file that brings contract and authority along."""

    federation: str
    contract: dict[str, Any]
    authority: str
    n_sites: Count

    @cached_property
    def terms(self) -> Contract:
        """The contract in it."""
        return Contract.from_bytes(canonical(self.contract))

    @cached_property
    def verifier(self) -> Verifier:
        """Who is believed by those who believe this file."""
        return Verifier(self.authority.encode(), self.run, self.terms.digest)


class Charter(_Invitation, frozen=True):
    """The organiser's own record of a federation. It holds no secrets."""

    kind = "federation"
    digests: dict[str, str]
    centre: str | None = None


class Neighbour(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Another end of an edge."""

    member: Member
    weight: Positive = 1.0


class Invite(_Invitation, frozen=True):
    """What a site gets first: the contract, the authority's certificate, itself and its neighbours.

    ``n_sites`` is the V of ``lam * V``, ``n_edges`` the number of edges that are tested, ``degree`` that of the site's
    own edges, which it needs for its steps also where it does not learn its neighbours (placement central).
    ``component`` and ``edges`` (pairs of numbers with a weight) are there only where the placement is replicas.
    ``code`` is random: who answers with the digest of this file has seen it.
    """

    kind = "invite"
    site: Member
    neighbours: tuple[Neighbour, ...]
    n_edges: Whole
    degree: Whole
    code: str
    centre: str | None = None
    component: tuple[Member, ...] | None = None
    edges: tuple[tuple[int, int, float], ...] | None = None


class _OfSite(Message, frozen=True):
    """A file about one site, under one contract."""

    site: Name
    contract: str


class Request(_OfSite, frozen=True):
    """What a site answers: a certificate request for a key that it made itself, and the digest of its invite."""

    kind = "request"
    invite: str
    request: str
    steps: Steps | None = None


class Admit(_OfSite, frozen=True):
    """The certificate of a site."""

    kind = "admit"
    certificate: str


class SummaryFile(_OfSite, frozen=True):
    """A site's summary: its first one, or the answer to a query of a later round, with the query's digest."""

    kind = "summary"
    most_bytes = _LARGE
    round: Count
    day: str
    summary: dict[str, Any]
    ask: str | None = None


class QueryFile(_OfSite, frozen=True):
    """The organiser's query to a site."""

    kind = "ask"
    ask: dict[str, Any]


class ModelFile(_OfSite, frozen=True):
    """A model of one site: from the organiser to the site, or from the site to the organiser.

    ``files`` are those of a model directory, texts as they are and arrays (``.npz``) in base 64; ``dropped`` are
    neighbours whose edge the edge tests dropped.
    """

    kind = "model"
    most_bytes = _LARGE
    day: str
    files: dict[PlainFile, str]
    dropped: tuple[Name, ...] = ()

    @classmethod
    def pack(cls, run: str, site: str, contract: str, folder: Path, dropped: tuple[str, ...] = ()) -> ModelFile:
        """Pack a model directory."""
        contents = {file.name: file.read_bytes() for file in sorted(folder.iterdir())}
        files = {name: base64.b64encode(one) if name.endswith(".npz") else one for name, one in contents.items()}
        return cls(run, site, contract, today(), {name: one.decode() for name, one in files.items()}, dropped)

    def unpack(self, place: Path) -> None:
        """Write the files into a directory, which is replaced as a whole."""
        with replacing_directory(place) as fresh:
            for name, text in self.files.items():
                (fresh / name).write_bytes(base64.b64decode(text) if name.endswith(".npz") else text.encode())


class Revoked(Message, frozen=True):
    """Fingerprints of keys that a site has lost, in the organiser's directory."""

    kind = "revoked"
    site: Name
    keys: tuple[str, ...]


class Order(Message, frozen=True):
    """What the organiser sets for the rounds after the contract was agreed; None: as in the contract.

    ``revision`` grows with every order. ``steps`` is there only where the placement is replicas.
    """

    kind = "order"
    contract: str
    revision: Count
    lam: Nonnegative | None = None
    rounds: Count | None = None
    rho: Positive | None = None
    steps: dict[str, Steps] | None = None


class Notice(Message, frozen=True):
    """A site is out, for good: the organiser expelled it, or it says itself that it left."""

    kind = "notice"
    site: Name
    what: Literal["left", "expelled"]
    day: str


class FitState(Message, frozen=True):
    """What the organiser remembers between a query and its answers."""

    kind = "fit"
    most_bytes = _LARGE
    contract: str
    state: dict[str, Any]


@dataclass(frozen=True)
class Verifier:
    """What files of a federation are checked against: the authority's certificate, the run, the contract's digest."""

    authority: bytes
    run: str
    contract: str

    def read(
        self,
        path: Path,
        form: type[M],
        *,
        by: By = "organiser",
        site: str | None = None,
        now: datetime | None = None,
        ended: bool = False,
    ) -> Sealed[M]:
        """Read a file of the federation of this form; raises `SecurityError`, which names the file.

        ``by`` is who may have signed it (of sites only the one that it is about), ``site`` the one that it must be
        about; ``now`` and ``ended`` are as in `fedkin.federate.envelope.unseal`.
        """
        text = read_whole(path, form.most_bytes)
        with in_file(path, SecurityError):
            sealed = unseal(text, form.kind, self.authority, by=by, now=now, ended=ended)
            body = form.decode(sealed.body)
            about = self._check(body)
            if site is not None and about != site:
                raise SecurityError(f"it is for {about}, but this is {site}")
            if sealed.certificate is not None and sealed.signer != about:
                raise SecurityError(f"{sealed.signer} signed it, but it is about {about}")
        return Sealed(body, sealed.signer, sealed.certificate)

    def find(self, path: Path, form: type[M], site: str | None = None) -> M | None:
        """Read a file that the organiser signed, if it is there."""
        return self.read(path, form, site=site).body if path.exists() else None

    def read_request(self, path: Path, *, now: datetime | None = None) -> Sealed[Request]:
        """Read a request of this federation, signed by the site that it is about."""
        text = read_whole(path, Request.most_bytes)
        with in_file(path, SecurityError):
            sealed = unseal_request(text, self.authority, now=now)
            request = Request.decode(sealed.body)
            if self._check(request) != sealed.signer:
                raise SecurityError(f"{sealed.signer} signed it, but it asks for a certificate for {request.site}")
        return Sealed(request, sealed.signer, sealed.certificate)

    def read_notice(self, path: Path) -> Sealed[Notice]:
        """Read a notice that the authority signed, or the site that left; its certificate may have ended."""
        sealed = self.read(path, Notice, by="either", ended=True)
        if sealed.certificate is not None and sealed.body.what != "left":
            raise SecurityError(f"{path}: {sealed.signer} signed it, but only the organiser may expel")
        return sealed

    def departures(self, folder: Path) -> frozenset[str]:
        """Return the names of the sites that are out, by the notices in a folder; raises when one is not valid."""
        names = set()
        for path in sorted(folder.glob("*.notice")):
            names.add(name := self.read_notice(path).body.site)
            if path.name != f"{name}.notice":
                raise SecurityError(f"{path} is about {name}: remove it, and accept the notice again")
        return frozenset(names)

    def _check(self, body: Message) -> str | None:
        """Return the site that a message is about; raises when it is for another federation or contract."""
        if body.run != self.run:
            raise SecurityError(f"it is for another federation (run {body.run})")
        if getattr(body, "contract", self.contract) != self.contract:
            raise SecurityError("it is for another contract: use the files of this federation")
        return getattr(body, "site", None)


def read_charter(path: Path) -> Charter:
    """Read what an organiser fixed, from ``federation.json``."""
    return _invitation(path, Charter)


def read_invite(path: Path) -> Invite:
    """Read an invite, signed by the authority that it brings along."""
    return _invitation(path, Invite)


def _invitation(path: Path, form: type[M]) -> M:
    text = read_whole(path, form.most_bytes)
    with in_file(path, SecurityError):
        return form.decode(unseal_invitation(text, form.kind))


def today() -> str:
    """Return the day, as files have it."""
    return f"{datetime.now(UTC):%Y-%m-%d}"


def round_file(folder: Path, site: str, number: int, suffix: str) -> Path:
    """Name a file: ``north.summary`` in the first round, ``north@2.summary`` in the second; no site has an @."""
    return folder / f"{site}{'' if number == 1 else f'@{number}'}{suffix}"
