"""The envelope of all files that travel between organiser and sites: readable, versioned, signed JSON.

::

    {"body": {...}, "format": "fedkin-order-1", "signature": "...", "signer": "three hospitals"}

A file that a site signed has the site's ``certificate``, too, so that the authority's certificate is enough to check
it. The signature covers everything but itself, as JSON with sorted keys and without blanks, so that mail programs may
change line ends. A changed bit anywhere gives a `SecurityError`, in words that go on after the name of a file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from fedkin.federate import trust
from fedkin.federate.trust import Pair, SecurityError, common_name

T = TypeVar("T")
By = Literal["either", "organiser", "site"]
VERSION = 1
_FORMAT = re.compile(r"fedkin-([a-z]+)-([0-9]{1,3})")
_NUMBERS = re.compile(rb"\[\s+(-?[0-9][^\[\]{}\"]*?)\s+\]")  # a list of numbers, one on each line


class Signer:
    """Who seals: a name and a private key; for a site also its certificate, which goes into the file."""

    def __init__(self, name: str, key: bytes, certificate: bytes | None = None) -> None:
        self.name, self.certificate, self._key = name, certificate, trust.load_key(key)

    @classmethod
    def authority(cls, pair: Pair) -> Signer:
        """Sign as the authority of a federation, whose certificate everybody has."""
        return cls(common_name(pair.certificate), pair.key)

    @classmethod
    def site(cls, pair: Pair) -> Signer:
        """Sign as a site with a certificate by the authority."""
        return cls(common_name(pair.certificate), pair.key, pair.certificate)

    def sign(self, content: bytes) -> bytes:
        """Return the signature of ``content``."""
        return self._key.sign(content)


@dataclass(frozen=True)
class Sealed(Generic[T]):
    """What was in an envelope whose signature fits; without a certificate the authority signed it."""

    body: T
    signer: str
    certificate: bytes | None = None


class _Envelope(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    body: dict[str, Any]
    format: str
    signer: str
    certificate: str | UnsetType = UNSET
    signature: Annotated[str, Meta(pattern=r"^([0-9a-f]{2})+\Z")]

    def check_signature(self, by: bytes) -> None:
        """Raise `SecurityError` unless the owner of a certificate, or certificate request, signed this."""
        parts = msgspec.structs.asdict(self).items()
        rest = {name: part for name, part in parts if name != "signature" and part is not UNSET}
        trust.check_signature(bytes.fromhex(self.signature), canonical(rest), by)


def canonical(content: Any) -> bytes:
    """Encode as JSON with sorted keys and without blanks: what is signed and hashed."""
    return msgspec.json.encode(content, order="sorted")


def seal(kind: str, body: Any, signer: Signer) -> bytes:
    """Return the text of a signed file: its kind (invite, order, ...), and a struct or mapping of plain values."""
    content = {"body": body, "format": f"fedkin-{kind}-{VERSION}", "signer": signer.name}
    if signer.certificate is not None:
        content["certificate"] = signer.certificate.decode()
    content["signature"] = signer.sign(canonical(content)).hex()
    text = msgspec.json.format(canonical(content), indent=1) + b"\n"
    return _NUMBERS.sub(lambda found: b"[" + b" ".join(found[1].split()) + b"]", text)


def unseal(
    text: bytes, kind: str, authority: bytes, *, by: By = "either", now: datetime | None = None, ended: bool = False
) -> Sealed[dict[str, Any]]:
    """Open a file, after checking that the authority signed it, or a site with a certificate by the authority.

    From nowhere but the authority's certificate comes the trust in the file. A site's certificate must be valid ``now``
    (the present by default), unless it may have ``ended``.
    """
    content = _opened(text, kind)
    own = None if content.certificate is UNSET else str(content.certificate).encode()
    name = common_name(authority) if own is None else trust.check_issued(own, authority, now, ended=ended)
    if content.signer != name:
        raise SecurityError(f"it says that {content.signer} signed it, but the certificate is that of {name}")
    if by != "either" and (own is None) != (by == "organiser"):
        raise SecurityError(f"{name} signed it, but only the {'site itself' if own is None else by} may sign it")
    content.check_signature(own or authority)
    return Sealed(content.body, name, own)


def unseal_invitation(text: bytes, kind: str) -> dict[str, Any]:
    """Return the body of a file that was signed with the key of the ``authority`` whose certificate it has.

    Whether that authority is the right one is for people to say, who compare its fingerprint.
    """
    brought = _opened(text, kind).body.get("authority")
    if not isinstance(brought, str):
        raise SecurityError("the authority's certificate is not in it")
    if not trust.may_sign(brought.encode()):
        raise SecurityError("the certificate in it is not that of an authority")
    return unseal(text, kind, brought.encode(), by="organiser").body


def unseal_request(text: bytes, authority: bytes, *, now: datetime | None = None) -> Sealed[dict[str, Any]]:
    """Open a file that asks, as ``request``, for a certificate for its signer.

    A first request is signed with the key that it asks for, and proves no more than that; a renewal (``certificate`` is
    there) with the key of a certificate that is valid.
    """
    content = _opened(text, "request")
    asked = content.body.get("request")
    if not isinstance(asked, str):
        raise SecurityError("the certificate request is not in it")
    trust.load_request(asked.encode())
    name = common_name(asked.encode())
    if content.signer != name:
        raise SecurityError(f"{content.signer} signed it, but it asks for a certificate for {name}")
    if content.certificate is not UNSET:
        return unseal(text, "request", authority, now=now)
    content.check_signature(asked.encode())
    return Sealed(content.body, name)


def kind_of(text: bytes) -> str:
    """Return what a file says that it is, before anything is checked: ``order`` for ``fedkin-order-1``."""
    return _decoded(text)[1]


def _opened(text: bytes, kind: str) -> _Envelope:
    """Decode an envelope, whose signature is still to be checked."""
    plain, found, version = _decoded(text)
    if found != kind:
        raise SecurityError(f"it is a file of the kind {found!r}, expected {kind!r}")
    if version != VERSION:
        raise SecurityError(f"it has format version {version}, but this fedkin reads {VERSION}: use the same fedkin")
    try:
        return msgspec.convert(plain, _Envelope)
    except msgspec.ValidationError as error:
        raise SecurityError(f"it is not a whole signed file of fedkin ({error}); get it again") from None


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
