"""The files that travel between organiser and sites: what is in each, how it is signed, and how it is checked.

Each is a msgspec struct in an envelope of readable, versioned JSON::

    {"body": {...}, "format": "fedkin-order-1", "signature": "...", "signer": "three hospitals"}

A file that a site signed has the site's ``certificate``, too, so that the authority's certificate is enough to check
it. The signature covers everything but itself, as JSON with sorted keys and without blanks, so that mail programs may
change line ends. A changed bit anywhere gives a `SecurityError`, which names the file.
"""

from __future__ import annotations

import base64
import hashlib
import re
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from fedkin._base import in_file, replacing_directory, write_file
from fedkin.federate import trust
from fedkin.federate.contract import Contract, Count, Nonnegative, Positive, Whole
from fedkin.federate.trust import Pair, SecurityError, site_of

# --- in the organiser's directory ---
FEDERATION = "federation.json"  #: signed: name, run, contract, authority, digests of the next three
CONTRACT, GRAPH, SITES = "contract.toml", "graph.csv", "sites.csv"
AUTHORITY_KEY = "authority.key"
INVITES, ADMITTED, SUMMARIES, QUERIES, NOTICES, MODELS = "invites", "admitted", "summaries", "asks", "notices", "models"
ORDER = "order.json"

# --- in a site's directory ---
KEYS = "keys.json"  #: also in the organiser's
INVITE, ADMIT = "invite.json", "admit.json"
KEY, NEXT_KEY = "site.key", "next.key"  #: the second one waits for its certificate
ROWS, ARRIVED, SETTINGS, MODEL = "rows.npz", "arrived", "site.toml", "model"
SENT = "sent"  #: all that the site has said

CENTRE = "centre"  #: name of the central machine; its number is the number of sites
PLAIN_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,39}\Z"
Name = Annotated[str, Meta(pattern=PLAIN_NAME)]
Run = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
PlainFile = Annotated[str, Meta(pattern=r"^[a-z_]+\.(json|csv|npz)\Z")]  #: a file that a model has, in no other folder
By = Literal["either", "organiser", "site"]
_VERSION = 1
_SMALL, _LARGE = 2**26, 2**30  # bytes
_FORMAT = re.compile(r"fedkin-([a-z]+)-([0-9]{1,3})")
_NUMBERS = re.compile(rb"\[\s+(-?[0-9][^\[\]{}\"]*?)\s+\]")  # a list of numbers, one on each line


# --- the envelope -----------------------------------------------------------------------------------------------------


class _Envelope(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    body: dict[str, Any]
    format: str
    signer: str
    certificate: str | UnsetType = UNSET
    signature: Annotated[str, Meta(pattern=r"^([0-9a-f]{2})+\Z")]


def canonical(content: Any) -> bytes:
    """Encode as JSON with sorted keys and without blanks: what is signed and hashed."""
    return msgspec.json.encode(content, order="sorted")


def seal(kind: str, body: Any, signer: Pair) -> bytes:
    """Return the text of a signed file: its kind (invite, order, ...), and a struct or mapping of plain values."""
    content = {"body": body, "format": f"fedkin-{kind}-{_VERSION}", "signer": signer.name}
    if signer.vouched is not None:
        content["certificate"] = signer.vouched.decode()
    content["signature"] = signer.sign(canonical(content)).hex()
    text = msgspec.json.format(canonical(content), indent=1) + b"\n"
    return _NUMBERS.sub(lambda found: b"[" + b" ".join(found[1].split()) + b"]", text)


def unseal(
    text: bytes,
    form: type[M],
    authority: bytes | None = None,
    *,
    by: By | None = None,
    now: datetime | None = None,
    ended: bool = False,
) -> tuple[M, bytes | None]:
    """Return the message in a file and the certificate of the site that signed it, None where the authority did.

    From nowhere but the certificate of the ``authority`` comes the trust in a file; without one, the file brings it
    along, and whether it is the right one is for people to say, who compare fingerprints. A request without a
    certificate is signed with the key that it asks for, and proves no more than that. A site's certificate must be
    valid ``now`` (the present by default), unless it may have ``ended``. ``by`` is who may have signed, by default who
    signs messages of this form.
    """
    plain, kind, version = _decoded(text)
    if kind != form.kind:
        raise SecurityError(f"it is a file of the kind {kind!r}, expected {form.kind!r}")
    if version != _VERSION:
        raise SecurityError(f"it has format version {version}, but this fedkin reads {_VERSION}: use the same fedkin")
    try:
        envelope = msgspec.convert(plain, _Envelope)
    except msgspec.ValidationError as error:
        raise SecurityError(f"it is not a whole signed file of fedkin ({error}); get it again") from None
    own = None if isinstance(envelope.certificate, UnsetType) else envelope.certificate.encode()
    brought = None if form.brings is None else str(envelope.body.get(form.brings)).encode()
    if authority is None and (authority := brought) is not None and not trust.may_sign(authority):
        raise SecurityError("the certificate in it is not that of an authority")
    assert authority is not None
    if own is not None:
        trust.check_issued(own, authority, now, ended=ended or form.outlasts)
    for owner in (own or brought or authority, brought or own or authority):
        if (name := site_of(owner)) != envelope.signer:
            raise SecurityError(f"it says that {envelope.signer} signed it, but the certificate is that of {name}")
    if (may := by or form.by) != "either" and (own is None) != (may == "organiser"):
        raise SecurityError(f"{name} signed it, but only the {'site itself' if own is None else may} may sign it")
    signed = canonical({name: part for name, part in plain.items() if name != "signature"})
    trust.check_signature(bytes.fromhex(envelope.signature), signed, own or brought or authority)
    try:
        return msgspec.convert(envelope.body, form), own
    except msgspec.ValidationError as error:
        raise SecurityError(f"it cannot be used: {error}") from None


def read_kind(path: Path) -> tuple[bytes, str]:
    """Read a file that anybody may have sent, and what it says that it is, before anything is checked."""
    text = trust.read_whole(path, _LARGE)
    with in_file(path, SecurityError):
        return text, kind_of(text)


def kind_of(text: bytes) -> str:
    """Return the kind that a file says that it is, before anything is checked."""
    return _decoded(text)[1]


def _decoded(text: bytes) -> tuple[dict[str, Any], str, int]:
    """Return what is in a file, and which kind and version it says that it is."""
    try:
        plain = msgspec.json.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise SecurityError("it is damaged, or not a file of fedkin (JSON cannot be read); get it again") from None
    named = _FORMAT.fullmatch(str(plain.get("format"))) if isinstance(plain, dict) else None
    if named is None:
        raise SecurityError("it does not say which file of fedkin it is")
    return plain, named[1], int(named[2])


# --- messages ---------------------------------------------------------------------------------------------------------


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A site as its neighbours know it."""

    id: str | int  # what the organiser's list calls it
    name: Name  # its directory, the common name of its certificate, its part of the keys of messages
    number: Whole  # its place in the list; of the two ends of an edge the larger number comes first
    endpoint: str | None = None  # ``tls/host:port`` where it listens; None when it only shares or only connects


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
    by: ClassVar[By] = "organiser"  # who signs it
    outlasts: ClassVar[bool] = False  # whether it counts after the certificate of the site that signed it has ended
    brings: ClassVar[str | None] = None  # the entry with the certificate, or request, of the key that signed it
    most_bytes: ClassVar[int] = _SMALL
    run: Run

    def write(self, path: Path, signer: Pair) -> Path:
        """Seal the message and write it to a private file; returns its path."""
        write_file(path, seal(self.kind, self, signer), private=True)
        return path

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the content: who knows it has seen the file."""
        return hashlib.sha256(canonical(self)).hexdigest()


M = TypeVar("M", bound=Message)


class _Invitation(Message, frozen=True):
    """A file that brings contract and authority along. Other files of the federation are checked against it."""

    brings = "authority"
    federation: str
    contract: dict[str, Any]
    authority: str
    n_sites: Count

    @cached_property
    def terms(self) -> Contract:
        """The contract in it."""
        return Contract.from_bytes(canonical(self.contract))

    def read(
        self, path: Path, form: type[M], *, site: str | None = None, most_bytes: int | None = None, **how: Any
    ) -> tuple[M, bytes | None]:
        """Read a file of this federation; raises `SecurityError`, which names the file.

        ``site`` is the one that it must be about; a file of more than ``most_bytes`` is not read. What a site signed
        must be about itself. ``how`` and the result are as those of `unseal`.
        """
        text = trust.read_whole(path, form.most_bytes if most_bytes is None else min(most_bytes, form.most_bytes))
        with in_file(path, SecurityError):
            return self.open(text, form, site=site, **how)

    def open(self, text: bytes, form: type[M], *, site: str | None = None, **how: Any) -> tuple[M, bytes | None]:
        """Return what is in the text of a file of this federation, as `read` does."""
        body, certificate = unseal(text, form, self.authority.encode(), **how)
        about = getattr(body, "site", None)
        if body.run != self.run:
            raise SecurityError(f"it is for another federation (run {body.run})")
        if getattr(body, "contract", self.terms.digest) != self.terms.digest:
            raise SecurityError("it is for another contract: use the files of this federation")
        if site is not None and about != site:
            raise SecurityError(f"it is for {about}, but this is {site}")
        owner = body.request.encode() if isinstance(body, Request) else certificate
        if owner is not None and (name := site_of(owner)) != about:
            raise SecurityError(f"{name} signed it, but it is about {about}")
        if certificate is not None and isinstance(body, Notice) and body.what != "left":
            raise SecurityError(f"{about} signed it, but only the organiser may expel")
        return body, certificate

    def find(self, path: Path, form: type[M], site: str | None = None) -> M | None:
        """Read a file that the organiser signed, if it is there."""
        return self.read(path, form, site=site)[0] if path.exists() else None

    def departures(self, directory: Path) -> frozenset[str]:
        """Return the names of the sites that are out, by the notices in a directory; raises when one is not valid.

        A notice that was signed with a lost key counts for nothing.
        """
        names, keys = set(), self.keys(directory)
        for path in sorted((directory / NOTICES).glob("*.notice")):
            notice, certificate = self.read(path, Notice)
            if path.name != f"{notice.site}.notice":
                raise SecurityError(f"{path} is about {notice.site}: remove it, and accept the notice again")
            if not keys.has_lost(certificate):
                names.add(notice.site)
        return frozenset(names)

    def keys(self, directory: Path) -> KeyList:
        """Return the list of keys in a directory, an empty one where there is none."""
        found = self.find(directory / KEYS, KeyList)
        if found is not None and len(found.keys) != self.n_sites:
            raise SecurityError(f"{directory / KEYS} is not of {self.n_sites} sites: get it again")
        return found or KeyList(self.run, 0, "", ("",) * self.n_sites)


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

    ``n_sites`` is the V of ``lam * V``.
    """

    kind = "invite"
    site: Member
    neighbours: tuple[Neighbour, ...]
    n_edges: Whole  # that are tested
    degree: Whole  # of the site, for its steps, also where it does not learn its neighbours (placement central)
    code: str  # random: who answers with the digest of this file has seen it
    centre: str | None = None
    component: tuple[Member, ...] | None = None  # this and the next only where the placement is replicas
    edges: tuple[tuple[int, int, float], ...] | None = None  # pairs of numbers with a weight

    def departures(self, directory: Path) -> frozenset[str]:
        """Return who is out, of the sites that this one knows, by the list of keys and the notices in a directory."""
        out, near = self.keys(directory).out, (one.member for one in self.neighbours)
        listed = {one.name for one in (self.site, *near, *(self.component or ())) if one.number in out}
        return super().departures(directory) | listed


class _OfSite(Message, frozen=True):
    """A file about one site, under one contract."""

    site: Name
    contract: str


class Request(_OfSite, frozen=True):
    """What a site answers: a certificate request for a key that it made itself, and the digest of its invite."""

    kind = "request"
    by = "either"
    brings = "request"
    invite: str
    request: str
    steps: Steps | None = None


class Admit(_OfSite, frozen=True):
    """The certificate of a site, and the text of the newest list of keys."""

    kind = "admit"
    certificate: str
    keys: str


class SummaryFile(_OfSite, frozen=True):
    """A site's summary: its first one, or the answer to a query of a later round, with the query's digest."""

    kind = "summary"
    by = "site"
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
    """A model of one site: from the organiser to the site, or from the site to the organiser."""

    kind = "model"
    most_bytes = _LARGE
    day: str
    files: dict[PlainFile, str]  # of a model directory, texts as they are and arrays (``.npz``) in base 64
    dropped: tuple[Name, ...] = ()  # neighbours whose edge the edge tests dropped

    @classmethod
    def pack(cls, run: str, site: str, contract: str, folder: Path, dropped: tuple[str, ...] = ()) -> ModelFile:
        """Pack a model directory."""
        contents = {file.name: file.read_bytes() for file in sorted(folder.iterdir())}
        files = {name: base64.b64encode(one) if name.endswith(".npz") else one for name, one in contents.items()}
        return cls(run, site, contract, today(), {name: one.decode() for name, one in files.items()}, dropped)

    def unpack(self, place: Path) -> None:
        """Write the files into a directory, which is replaced as a whole."""
        try:
            files = {
                name: base64.b64decode(text) if name.endswith(".npz") else text.encode()
                for name, text in self.files.items()
            }
        except ValueError:
            raise SecurityError(f"the model of {self.site} has arrays that are not in base 64; get it again") from None
        with replacing_directory(place) as fresh:
            for name, content in files.items():
                (fresh / name).write_bytes(content)


class KeyList(Message, frozen=True):
    """The fingerprint of the one key of each site, by its number: no other key gets a link.

    It names nobody, since sites know the names of their neighbours only. A site accepts it only with a higher
    ``revision`` than that of the list it has, and passes it on to its neighbours while it runs.
    """

    kind = "keys"
    revision: Whole
    time: str
    keys: tuple[str, ...]  # empty for a site that is not admitted, or out
    lost: tuple[str, ...] = ()  # fingerprints of keys that were replaced after a loss: what they signed counts no more
    out: tuple[Whole, ...] = ()  # numbers of sites that have left or were expelled

    def has_lost(self, certificate: bytes | None) -> bool:
        """Return whether a certificate is of a key that was lost; False for what the organiser signed."""
        return certificate is not None and trust.fingerprint(certificate) in self.lost


class Order(Message, frozen=True):
    """What the organiser sets for the rounds after the contract was agreed; None: as in the contract."""

    kind = "order"
    contract: str
    revision: Count  # grows with every order
    lam: Nonnegative | None = None
    rounds: Count | None = None
    rho: Positive | None = None
    steps: dict[str, Steps] | None = None  # only where the placement is replicas


class Notice(Message, frozen=True):
    """A site is out, for good: the organiser expelled it, or it says itself that it left."""

    kind = "notice"
    by = "either"
    outlasts = True
    site: Name
    what: Literal["left", "expelled"]
    day: str


class FitState(Message, frozen=True):
    """What the organiser remembers between a query and its answers."""

    kind = "fit"
    most_bytes = _LARGE
    contract: str
    state: dict[str, Any]


def read_charter(path: Path) -> Charter:
    """Read what an organiser fixed, from ``federation.json``."""
    return _read_invitation(path, Charter)


def read_invite(path: Path) -> Invite:
    """Read an invite, signed by the authority that it brings along."""
    return _read_invitation(path, Invite)


def _read_invitation(path: Path, form: type[M]) -> M:
    text = trust.read_whole(path, form.most_bytes)
    with in_file(path, SecurityError):
        return unseal(text, form)[0]


def today() -> str:
    """Return the day, as files have it."""
    return f"{datetime.now(UTC):%Y-%m-%d}"


def round_file(folder: Path, site: str, number: int, suffix: str) -> Path:
    """Name a file: ``north.summary`` in the first round, ``north@2.summary`` in the second; no site has an @."""
    return folder / f"{site}{'' if number == 1 else f'@{number}'}{suffix}"
