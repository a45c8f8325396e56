"""The files that organiser and sites exchange: their content, how they are signed, and how they are checked.

Each is a msgspec struct in an envelope of readable, versioned JSON::

    {"body": {...}, "format": "fedkin-order-1", "signature": "...", "signer": "three hospitals"}

A file signed by a site also contains the site's ``certificate``, so the authority's certificate is enough to check
it. The signature covers everything but itself, as JSON with sorted keys and without blanks, so mail programs may change
line endings. Any other change raises a `SecurityError` that names the file.
"""

from __future__ import annotations

import base64
import hashlib
import re
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from fedkin._base import hidden_text, in_file, replacing_directory, write_file
from fedkin.errors import DataError
from fedkin.federate import trust
from fedkin.federate.contract import Contract, Count, Nonnegative, Positive, Whole
from fedkin.federate.settings import LINE, District
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
SENT, SUMMARY = "sent", ".summary"  #: everything that the site has sent; end of the name of a summary

CENTRE = "centre"  #: name of the central machine; its number is the number of sites
PLAIN_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,39}\Z"
Name = Annotated[str, Meta(pattern=PLAIN_NAME)]
Run = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
Id = Annotated[str, Meta(pattern=LINE + r"+\Z")]
PlainFile = Annotated[str, Meta(pattern=r"^[a-z_]+\.(json|csv|npz)\Z")]  #: name of a file in a model's directory
Endpoint = Annotated[
    str, Meta(pattern=r"^tls/(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253}):[0-9]{1,5}\Z")
]  #: no options
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
    """Encode a value as JSON with sorted keys and without blanks, to be signed and hashed."""
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
    """Return the message in a file and the certificate of the site that signed it, or None if the authority did.

    All trust in a file comes from the certificate of the ``authority``. If it is not given, it is taken from the file,
    and people must compare its fingerprint. A request without a certificate is signed with the key it asks for, and
    proves only that the sender has that key. A site's certificate must be valid ``now`` (by default the current time),
    unless it may have ``ended``. ``by`` is the required kind of signer; the default depends on the form of the message.
    """
    plain, kind, version = _decoded(text)
    if kind != form.kind:
        raise SecurityError(f"it is a file of kind {kind!r}, expected {form.kind!r}")
    if version != _VERSION:
        raise SecurityError(
            f"it has format version {version}, but this Fedkin reads {_VERSION}: use the same version everywhere"
        )
    try:
        envelope = msgspec.convert(plain, _Envelope)
    except msgspec.ValidationError as error:
        raise SecurityError(f"it is not a complete signed Fedkin file ({error}); get it again") from None
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
    """Read an unchecked file from any sender, and the kind it claims to be."""
    text = trust.read_whole(path, _LARGE)
    with in_file(path, SecurityError):
        return text, kind_of(text)


def kind_of(text: bytes) -> str:
    """Return the kind that an unchecked file claims to be."""
    return _decoded(text)[1]


def _decoded(text: bytes) -> tuple[dict[str, Any], str, int]:
    """Return the content of an unchecked file, and the kind and version that it claims."""
    try:
        plain = msgspec.json.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise SecurityError("it is damaged, or not a Fedkin file (JSON cannot be read); get it again") from None
    named = _FORMAT.fullmatch(str(plain.get("format"))) if isinstance(plain, dict) else None
    if named is None:
        raise SecurityError("it does not name its kind and format version: it is not a Fedkin file")
    return plain, named[1], int(named[2])


# --- messages ---------------------------------------------------------------------------------------------------------


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A site as its neighbours see it."""

    id: Id | int  # what the organiser's list calls it
    name: Name  # its directory, the common name of its certificate, its part of the keys of messages
    number: Whole  # its place in the list; of the two ends of an edge the larger number comes first
    endpoint: Endpoint | None = None  # ``tls/host:port`` where it listens; None when it only shares or only connects


class Steps(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Step rule of a site, and the theta ``(p,)`` from which it starts: everything planned from its rows.

    In the placements central and replicas, machines that step for an absent site need them too.
    """

    start: Nonnegative
    growth: Nonnegative
    damping: Nonnegative
    theta: tuple[float, ...]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """Base of all files: the run of the federation to which they belong."""

    kind: ClassVar[str]
    by: ClassVar[By] = "organiser"  # signer
    outlasts: ClassVar[bool] = False  # whether it remains valid after the signing site's certificate has expired
    brings: ClassVar[str | None] = None  # the entry with the certificate, or request, of the signing key
    most_bytes: ClassVar[int] = _SMALL
    run: Run

    def write(self, path: Path, signer: Pair) -> Path:
        """Seal the message and write it to a private file; returns its path."""
        write_file(path, seal(self.kind, self, signer), private=True)
        return path

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the content, which proves that its sender has seen the file."""
        return hashlib.sha256(canonical(self)).hexdigest()


M = TypeVar("M", bound=Message)


class _Invitation(Message, frozen=True):
    """A file with the contract and the authority, against which other files of the federation are checked."""

    brings = "authority"
    federation: str
    contract: dict[str, Any]
    authority: str
    n_sites: Annotated[int, Meta(ge=1, le=1_000_000)]

    @cached_property
    def terms(self) -> Contract:
        """The contract in the message."""
        return Contract.from_bytes(canonical(self.contract))

    def read(
        self, path: Path, form: type[M], *, site: str | None = None, most_bytes: int | None = None, **how: Any
    ) -> tuple[M, bytes | None]:
        """Read a file of this federation; raise `SecurityError`, which names the file, if it is not valid.

        It must be about ``site`` and have at most ``most_bytes``. A site may sign only files about itself. ``how`` and
        the result are as in `unseal`.
        """
        text = trust.read_whole(path, form.most_bytes if most_bytes is None else min(most_bytes, form.most_bytes))
        with in_file(path, SecurityError):
            return self.open(text, form, site=site, **how)

    def open(self, text: bytes, form: type[M], *, site: str | None = None, **how: Any) -> tuple[M, bytes | None]:
        """Return the content of the text of a file of this federation, checked as in `read`."""
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
            raise SecurityError(f"{about} signed it, but only the organiser may expel a site")
        return body, certificate

    def find(self, path: Path, form: type[M], site: str | None = None) -> M | None:
        """Read a file signed by the organiser; None if there is no file."""
        return self.read(path, form, site=site)[0] if path.exists() else None

    def departures(self, directory: Path) -> frozenset[str]:
        """Return the names of expelled or departed sites from the notices in a directory; raise an error if one is not
        valid.

        A notice signed with a lost key is ignored.
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
        """Return the list of keys in a directory; an empty one if there is none."""
        found = self.find(directory / KEYS, KeyList)
        if found is not None and len(found.keys) != self.n_sites:
            raise SecurityError(f"{directory / KEYS} has {len(found.keys)} keys for {self.n_sites} sites: get it again")
        return found or KeyList(self.run, 0, "", ("",) * self.n_sites)


class Charter(_Invitation, frozen=True):
    """The organiser's own record of a federation. It holds no secrets."""

    kind = "federation"
    digests: dict[str, str]
    centre: Endpoint | None = None


class Neighbour(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A site at the other end of an edge."""

    member: Member
    weight: Positive = 1.0


class Invite(_Invitation, frozen=True):
    """Invite of a site: the contract, the authority's certificate, the site itself and its neighbours.

    ``n_sites`` is the V of ``lam * V``.
    """

    kind = "invite"
    site: Member
    neighbours: tuple[Neighbour, ...]
    n_edges: Whole  # number of edges that are tested
    degree: Whole  # of the site, for its steps, also where it does not learn its neighbours (placement central)
    code: str  # random, so that only a recipient of this file can answer with its digest
    centre: Endpoint | None = None
    component: tuple[Member, ...] | None = None  # this and the next only where the placement is replicas
    edges: tuple[tuple[int, int, float], ...] | None = None  # pairs of numbers with a weight

    def departures(self, directory: Path) -> frozenset[str]:
        """Return which of the known sites have left or were expelled, from the list of keys and the notices in a
        directory."""
        out, near = self.keys(directory).out, (one.member for one in self.neighbours)
        listed = {one.name for one in (self.site, *near, *(self.component or ())) if one.number in out}
        return super().departures(directory) | listed


class _OfSite(Message, frozen=True):
    """A file about one site, under one contract."""

    site: Name
    contract: str


class Request(_OfSite, frozen=True):
    """A site's answer to its invite: a certificate request for its own new key, and the digest of the invite."""

    kind = "request"
    by = "either"
    brings = "request"
    invite: str
    request: str
    steps: Steps | None = None


class Admit(_OfSite, frozen=True):
    """Admission of a site: its certificate, and the text of the newest list of keys."""

    kind = "admit"
    certificate: str
    keys: str


class SummaryFile(_OfSite, frozen=True):
    """A site's summary: the first, or the answer to a query of a later round, with the query's digest.

    ``district`` is the district of the site, if the contract asks for one.
    """

    kind = "summary"
    by = "site"
    most_bytes = _LARGE
    round: Count
    summary: dict[str, Any]
    ask: str | None = None
    district: District = ""


class QueryFile(_OfSite, frozen=True):
    """The organiser's query to a site."""

    kind = "ask"
    ask: dict[str, Any]


class ModelFile(_OfSite, frozen=True):
    """A model of one site, from the organiser to the site or the other way round."""

    kind = "model"
    most_bytes = _LARGE
    files: dict[PlainFile, str]  # of a model directory, texts as they are and arrays (``.npz``) in base 64
    dropped: tuple[Name, ...] = ()  # neighbours whose edge the edge tests dropped

    @classmethod
    def pack(cls, run: str, site: str, contract: str, folder: Path, dropped: tuple[str, ...] = ()) -> ModelFile:
        """Pack a model directory."""
        contents = {file.name: file.read_bytes() for file in sorted(folder.iterdir())}
        files = {name: base64.b64encode(one) if name.endswith(".npz") else one for name, one in contents.items()}
        return cls(run, site, contract, {name: one.decode() for name, one in files.items()}, dropped)

    def unpack(self, place: Path) -> None:
        """Write the files into a directory, replacing it completely."""
        try:
            files = {
                name: base64.b64decode(text) if name.endswith(".npz") else text.encode()
                for name, text in self.files.items()
            }
            told = [msgspec.json.decode(text) for name, text in self.files.items() if name.endswith(".json")]
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise SecurityError(f"the model of {self.site} has files that cannot be read; get it again") from None
        if (hidden := hidden_text(told, "\n\t")) is not None:
            what = f"text that would change what a terminal shows: {hidden!r}"
            raise SecurityError(f"the model of {self.site} has {what}")
        with replacing_directory(place) as fresh:
            for name, content in files.items():
                (fresh / name).write_bytes(content)


class KeyList(Message, frozen=True):
    """List of the fingerprints of the sites' keys, by site number. Connections with any other key are refused.

    It contains no names, since sites only know those of their neighbours. A site accepts it only if its ``revision`` is
    higher than that of the list it has, and passes it on to its neighbours while it runs.
    """

    kind = "keys"
    revision: Whole
    time: str
    keys: tuple[str, ...]  # empty for a site that is not admitted, or out
    lost: tuple[str, ...] = ()  # fingerprints of keys replaced after a loss: files that they signed are no longer valid
    out: tuple[Whole, ...] = ()  # numbers of sites that have left or were expelled

    def has_lost(self, certificate: bytes | None) -> bool:
        """Return whether a certificate belongs to a lost key; False if the organiser signed the file."""
        return certificate is not None and trust.fingerprint(certificate) in self.lost

    def check_signer(self, path: Path, name: str, certificate: bytes | None, out: frozenset[str] | None) -> None:
        """Raise an error if the site that signed a file is ``out`` or has lost the key that signed it.

        None where the names of those who are out are not known: the key must be on the list, which has none of theirs.
        """
        if self.has_lost(certificate):
            raise SecurityError(f"{path} was signed with a key that {name} has since lost; let it send the file again")
        if out is not None and name in out:
            raise DataError(f"{path}: {name} has left or was expelled, so the file is not valid; remove it")
        if out is None and certificate is not None and trust.fingerprint(certificate) not in self.keys:
            raise SecurityError(
                f"{path} was signed with a key that is not in {KEYS}: {name} is out, or has a newer key. Get the "
                "newest list, or let the organiser fit"
            )


class Order(Message, frozen=True):
    """Order of the organiser: settings of the rounds that replace the contract's; None leaves the contract's."""

    kind = "order"
    contract: str
    revision: Count  # grows with every order
    lam: Nonnegative | None = None
    rounds: Count | None = None
    rho: Positive | None = None
    steps: dict[str, Steps] | None = None  # only where the placement is replicas


class Notice(Message, frozen=True):
    """Notice that a site is out permanently: the organiser expelled it, or it has left."""

    kind = "notice"
    by = "either"
    outlasts = True
    site: Name
    what: Literal["left", "expelled"]


class FitState(Message, frozen=True):
    """State that the organiser keeps between a query and its answers."""

    kind = "fit"
    most_bytes = _LARGE
    contract: str
    state: dict[str, Any]


def read_charter(path: Path) -> Charter:
    """Read an organiser's ``federation.json``."""
    return _read_invitation(path, Charter)


def read_invite(path: Path) -> Invite:
    """Read an invite, signed by the authority whose certificate it contains."""
    return _read_invitation(path, Invite)


def _read_invitation(path: Path, form: type[M]) -> M:
    text = trust.read_whole(path, form.most_bytes)
    with in_file(path, SecurityError):
        return unseal(text, form)[0]


def round_file(folder: Path, site: str, number: int, suffix: str) -> Path:
    """Name a file: ``north.summary`` in the first round, ``north@2.summary`` in the second; no site name contains @."""
    return folder / f"{site}{'' if number == 1 else f'@{number}'}{suffix}"
