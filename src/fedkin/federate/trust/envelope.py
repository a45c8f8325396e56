"""The one envelope of all files that travel between organiser and sites: readable, versioned, signed JSON.

::

    {"body": {...}, "format": "fedkin-order-1", "signature": "...", "signer": "three hospitals"}

A file that a site signed has the site's ``certificate``, too, so that whoever knows the authority's certificate can
check the chain. The signature covers everything but itself, as JSON with sorted keys and without blanks, so that mail
programs may change line ends. A changed bit anywhere gives one `SecurityError`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec

from fedkin.federate.trust.certificates import (
    Pair,
    check_chain,
    check_issued,
    common_name,
    load_certificate,
    load_key,
    load_request,
    may_sign,
)
from fedkin.federate.trust.private import SecurityError

_FORMAT = re.compile(r"fedkin-([a-z]+)-([0-9]{1,3})")
VERSION = 1
_PARTS = {"body", "format", "signature", "signer"}
_NUMBERS = re.compile(rb"\[\s+(-?[0-9][^\[\]{}\"]*?)\s+\]")  # a list of numbers, one on each line


class Signer:
    """Who seals: a name and a private key; for a site also its certificate, which goes into the file.

    Examples
    --------
    >>> from fedkin.federate.trust import Signer, make_authority, seal, unseal
    >>> authority = make_authority("three hospitals")
    >>> text = seal("order", {"lam": 0.1}, Signer.authority(authority))
    >>> unseal(text, "order", authority.certificate).body
    {'lam': 0.1}
    """

    def __init__(self, name: str, key: bytes, certificate: bytes | None = None) -> None:
        self.name = name
        self.certificate = certificate
        self._key = load_key(key)

    @classmethod
    def authority(cls, pair: Pair) -> Signer:
        """The authority of a federation, whose certificate everybody has."""
        return cls(common_name(pair.certificate), pair.key)

    @classmethod
    def site(cls, pair: Pair) -> Signer:
        """A site with a certificate by the authority."""
        return cls(common_name(pair.certificate), pair.key, pair.certificate)

    def sign(self, content: bytes) -> bytes:
        """The signature of ``content``."""
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa

        key = self._key
        if isinstance(key, ed25519.Ed25519PrivateKey):
            return key.sign(content)
        if isinstance(key, ec.EllipticCurvePrivateKey):
            return key.sign(content, ec.ECDSA(hashes.SHA256()))
        if isinstance(key, rsa.RSAPrivateKey):
            return key.sign(content, padding.PKCS1v15(), hashes.SHA256())
        raise SecurityError(f"a key of type {type(key).__name__} cannot sign files; use Ed25519, P-256 or RSA")


@dataclass(frozen=True)
class Sealed:
    """What was in an envelope whose signature fits.

    Attributes
    ----------
    body : dict
        Plain values.
    signer : str
        Who signed.
    certificate : bytes or None
        The site's; None when the authority signed.
    """

    body: dict[str, Any]
    signer: str
    certificate: bytes | None = None


def canonical(content: Any) -> bytes:
    """JSON with sorted keys and without blanks: what is signed and hashed."""
    return msgspec.json.encode(content, order="sorted")


def seal(kind: str, body: Mapping[str, Any], signer: Signer) -> bytes:
    """The text of a signed file.

    Parameters
    ----------
    kind : str
        What it is: invite, request, admit, order, notice, summary, ask, ...
    body : mapping
        Plain values with text as keys; parts may be `msgspec.Raw` with `canonical` JSON.
    signer : Signer
        Who signs.
    """
    content: dict[str, Any] = {"body": body, "format": f"fedkin-{kind}-{VERSION}", "signer": signer.name}
    if signer.certificate is not None:
        content["certificate"] = signer.certificate.decode()
    content["signature"] = signer.sign(canonical(content)).hex()
    text = msgspec.json.format(canonical(content), indent=1) + b"\n"
    return _NUMBERS.sub(lambda found: b"[" + b" ".join(found[1].split()) + b"]", text)


def unseal(text: bytes, kind: str, authority: bytes, *, now: datetime | None = None, ended: bool = False) -> Sealed:
    """What is in a file, after checking that the authority signed it, or a site with a certificate by the authority.

    Parameters
    ----------
    text : bytes
        The file.
    kind : str
        What it must be.
    authority : bytes
        The authority's certificate, PEM. From nowhere but this comes the trust in the file.
    now : datetime, optional
        When the site's certificate must be valid; the present by default.
    ended : bool
        Whether the site's certificate may have ended.

    Raises
    ------
    SecurityError
        In words that go on after the name of a file.
    """
    content, signed, signature = _opened(text, kind)
    own = content.get("certificate")
    if own is None:
        certificate, name = authority, common_name(authority)
    else:
        certificate = own.encode()
        name = check_chain(certificate, authority) if ended else check_issued(certificate, authority, now)
    if content["signer"] != name:
        raise SecurityError(f"it says that {content['signer']} signed it, but the certificate is that of {name}")
    verify(load_certificate(certificate).public_key(), signed, signature)
    return Sealed(content["body"], name, None if own is None else certificate)


def unseal_by_authority(text: bytes, kind: str, authority: bytes) -> dict[str, Any]:
    """The body of a file that only the authority may sign."""
    sealed = unseal(text, kind, authority)
    if sealed.certificate is not None:
        raise SecurityError(f"{sealed.signer} signed it, but only the organiser may sign it")
    return sealed.body


def unseal_invitation(text: bytes, kind: str, field: str) -> dict[str, Any]:
    """The body of a file that brings along the authority's certificate, in its ``field``, and was signed with its key.

    Whether that authority is the right one is for people to say, who compare its fingerprint.
    """
    body = _opened(text, kind)[0]["body"]
    brought = body.get(field)
    if not isinstance(brought, str):
        raise SecurityError("the authority's certificate is not in it")
    if not may_sign(load_certificate(brought.encode())):
        raise SecurityError("the certificate in it is not that of an authority")
    return unseal_by_authority(text, kind, brought.encode())


def unseal_request(text: bytes, kind: str, field: str, authority: bytes, *, now: datetime | None = None) -> Sealed:
    """What is in a file that asks, in its ``field``, for a certificate for its signer.

    A first request is signed with the key that it asks for, and proves no more than that; a renewal (``certificate`` is
    there) with the key of a certificate that is valid.
    """
    content, signed, signature = _opened(text, kind)
    asked = content["body"].get(field)
    if not isinstance(asked, str):
        raise SecurityError("the certificate request is not in it")
    request, name = load_request(asked.encode()), common_name(asked.encode())
    if content["signer"] != name:
        raise SecurityError(f"{content['signer']} signed it, but it asks for a certificate for {name}")
    if "certificate" in content:
        return unseal(text, kind, authority, now=now)
    verify(request.public_key(), signed, signature)
    return Sealed(content["body"], name)


def kind_of(text: bytes) -> str:
    """What a file says that it is, before anything is checked: ``order`` for ``fedkin-order-1``."""
    return _named_kind(_decoded(text))[0]


def verify(key: Any, content: bytes, signature: bytes) -> None:
    """Raise `SecurityError` unless ``signature`` is that of ``content`` by the owner of the public ``key``."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa

    try:
        if isinstance(key, ed25519.Ed25519PublicKey):
            key.verify(signature, content)
        elif isinstance(key, ec.EllipticCurvePublicKey):
            key.verify(signature, content, ec.ECDSA(hashes.SHA256()))
        elif isinstance(key, rsa.RSAPublicKey):
            key.verify(signature, content, padding.PKCS1v15(), hashes.SHA256())
        else:
            raise SecurityError(f"a key of type {type(key).__name__} does not sign files")
    except InvalidSignature:
        raise SecurityError(
            "the signature does not fit: the file was changed after signing, or somebody else signed it; get it again"
        ) from None


def _opened(text: bytes, kind: str) -> tuple[dict[str, Any], bytes, bytes]:
    """The parts of an envelope, the bytes that were signed, and the signature."""
    content = _decoded(text)
    found, version = _named_kind(content)
    if found != kind:
        raise SecurityError(f"it is a file of the kind {found!r}, expected {kind!r}")
    if version != VERSION:
        raise SecurityError(f"it has format version {version}, but this fedkin reads {VERSION}: use the same fedkin")
    texts = (content.get("signer"), content.get("signature"), content.get("certificate", ""))
    whole = content.keys() - {"certificate"} == _PARTS and isinstance(content["body"], dict)
    if not whole or not all(isinstance(one, str) for one in texts):
        raise SecurityError("it is not a whole signed file of fedkin; get it again")
    rest = {name: part for name, part in content.items() if name != "signature"}
    if not re.fullmatch(r"([0-9a-f]{2})+", content["signature"]):
        raise SecurityError("its signature is damaged; get it again")
    return content, canonical(rest), bytes.fromhex(content["signature"])


def _decoded(text: bytes) -> dict[str, Any]:
    try:
        content = msgspec.json.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise SecurityError("it is damaged, or not a file of fedkin (JSON cannot be read); get it again") from None
    if not isinstance(content, dict):
        raise SecurityError("it is not a file of fedkin")
    return content


def _named_kind(content: Mapping[str, Any]) -> tuple[str, int]:
    named = _FORMAT.fullmatch(str(content.get("format")))
    if named is None:
        raise SecurityError("it does not say which file of fedkin it is")
    return named[1], int(named[2])
