"""Who is who: a certificate authority, keys that are made where they stay, certificates of 90 days for them.

A site makes its key and a certificate request (`make_key`, `make_request`); whoever holds the authority's key issues a
certificate for it (`issue`). Nobody but the site ever holds the site's key.
"""

from __future__ import annotations

import hashlib
import ipaddress
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedkin.errors import missing_dependency
from fedkin.federate.trust.private import SecurityError, read_private, read_whole

if TYPE_CHECKING:
    from cryptography import x509

SITE_DAYS = 90  #: how long a site's certificate lasts
RENEW_DAYS = 30  #: a certificate that lasts less than this should be renewed
_AUTHORITY_DAYS = 3650
_SKEW = timedelta(days=1)  # clocks of sites may be behind


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, both as PEM text. The key is not shown when it is printed."""

    certificate: bytes
    key: bytes

    def __repr__(self) -> str:
        return f"Pair({common_name(self.certificate)!r})"


def make_authority(name: str) -> Pair:
    """A new certificate authority with an Ed25519 key, good for ten years.

    Parameters
    ----------
    name : str
        Its common name.

    Examples
    --------
    >>> from fedkin.federate.trust.certificates import check_issued, issue, make_authority, make_key, make_request
    >>> authority = make_authority("three hospitals")
    >>> request = make_request("north", make_key())
    >>> check_issued(issue(authority, request, ["127.0.0.1"]), authority.certificate)
    'north'
    """
    need_cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    days = timedelta(days=_AUTHORITY_DAYS)
    builder = _builder(_named(name), _named(name), key.public_key(), datetime.now(UTC), days)
    return Pair(_signed(_of_authority(builder), key), _key_text(key))


def make_key() -> bytes:
    """A new private key (elliptic curve P-256), PEM."""
    need_cryptography()
    from cryptography.hazmat.primitives.asymmetric import ec

    return _key_text(ec.generate_private_key(ec.SECP256R1()))


def make_request(name: str, key: bytes) -> bytes:
    """A certificate request, PEM: "this is the public key of ``name``", signed with the private one."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization

    builder = x509.CertificateSigningRequestBuilder().subject_name(_named(name))
    return builder.sign(load_key(key), hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def issue(
    authority: Pair, request: bytes, hosts: Iterable[str], *, days: float = SITE_DAYS, now: datetime | None = None
) -> bytes:
    """A certificate, PEM, for the key and the name of a certificate request.

    Parameters
    ----------
    authority : Pair
        Who signs. Its key may be Ed25519, elliptic-curve or RSA.
    request : bytes
        From `make_request`. Whether its name is the right one is for the caller to check.
    hosts : iterable of str
        Host names and addresses under which the owner listens.
    days : float
        How long it lasts. It is valid from a day before ``now``, as clocks differ.
    now : datetime, optional
        The present by default.
    """
    asked = load_request(request)
    issuer = load_certificate(authority.certificate)
    when = now or datetime.now(UTC)
    until = min(when + timedelta(days=days), issuer.not_valid_after_utc)
    if until <= when:
        raise SecurityError(f"the authority's certificate ended on {issuer.not_valid_after_utc:%Y-%m-%d}")
    builder = _builder(asked.subject, issuer.subject, asked.public_key(), when, until - when)
    return _signed(_of_site(builder, tuple(hosts)), load_key(authority.key))


def check_issued(certificate: bytes, authority: bytes, now: datetime | None = None) -> str:
    """The name in a site's certificate, after checking that the authority issued it and that it is valid ``now``.

    Raises
    ------
    SecurityError
        In words that go on after the name of a file.
    """
    name = check_chain(certificate, authority)
    _, until = validity(certificate)
    begins, when = load_certificate(certificate).not_valid_before_utc, now or datetime.now(UTC)
    if when > until:
        raise SecurityError(f"the certificate of {name} ended on {until:%Y-%m-%d}; renew it: fedkin site renew")
    if when < begins:
        raise SecurityError(f"the certificate of {name} begins on {begins:%Y-%m-%d}; check the clock of this machine")
    return name


def check_chain(certificate: bytes, authority: bytes) -> str:
    """The name in a site's certificate, after checking that the authority issued it, at whatever time."""
    from cryptography.exceptions import InvalidSignature

    read, issuer = load_certificate(certificate), load_certificate(authority)
    try:
        read.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        raise SecurityError("the certificate was not issued by the authority of this federation") from None
    if may_sign(read):
        raise SecurityError("the certificate is that of an authority, not that of a site")
    return common_name(certificate)


def validity(certificate: bytes) -> tuple[datetime, datetime]:
    """From when, and until when, a certificate is valid."""
    read = load_certificate(certificate)
    return read.not_valid_before_utc, read.not_valid_after_utc


def belong_together(certificate: bytes, key: bytes) -> bool:
    """Whether the key is that of the certificate (or certificate request); raises `SecurityError` when unreadable."""
    return fingerprint(certificate) == _fingerprint(load_key(key).public_key())


def fingerprint(text: bytes) -> str:
    """What people compare: 32 hexadecimal digits of the hash of the public key in a certificate or request, PEM.

    A key, its certificates and its certificate request have the same fingerprint.
    """
    request = b"CERTIFICATE REQUEST" in text
    return _fingerprint((load_request(text) if request else load_certificate(text)).public_key())


def same_fingerprint(one: str, other: str) -> bool:
    """Whether two fingerprints are the same; letters may be large or small, and signs between digits do not count."""
    first, second = ("".join(sign for sign in text.lower() if sign.isalnum()) for text in (one, other))
    return first == second


def read_authority_files(certificate: Path, key: Path) -> Pair:
    """The user's own certificate authority.

    Raises
    ------
    SecurityError
        When a file cannot be read, they do not belong together, or the certificate is not that of an authority.
    """
    own = Pair(read_whole(certificate), read_private(key))
    try:
        read = load_certificate(own.certificate)
        fit = belong_together(own.certificate, own.key)
    except SecurityError as error:
        raise SecurityError(f"{certificate} and {key}: {error}") from None
    if not fit:
        raise SecurityError(f"{key} is not the key of {certificate}")
    if not may_sign(read):
        raise SecurityError(
            f"{certificate} is not the certificate of an authority (CA:TRUE, and certificate signing where it lists "
            "uses): sites would refuse what it signs"
        )
    return own


def common_name(certificate: bytes) -> str:
    """Whose certificate, or certificate request, it is."""
    from cryptography.x509.oid import NameOID

    request = b"CERTIFICATE REQUEST" in certificate
    try:
        subject = (load_request(certificate) if request else load_certificate(certificate)).subject
        names = subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    except ValueError:
        names = []
    if len(names) != 1:
        raise SecurityError("the certificate does not say whose it is")
    return str(names[0].value)


# --- PEM --------------------------------------------------------------------------------------------------------------


def load_certificate(text: bytes) -> x509.Certificate:
    """A certificate from PEM; raises `SecurityError` when it is damaged."""
    need_cryptography()
    from cryptography import x509

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # what cryptography only warns of is damage here
            read = x509.load_pem_x509_certificate(text)
        read.public_key(), read.not_valid_after_utc, read.extensions  # parsed on first use
    except Exception:
        # cryptography has no common base: ValueError, TypeError, InvalidVersion, UnsupportedAlgorithm, ...
        raise SecurityError("the certificate is damaged, or not PEM") from None
    return read


def load_request(text: bytes) -> x509.CertificateSigningRequest:
    """A certificate request from PEM, whose own signature fits."""
    need_cryptography()
    from cryptography import x509

    try:
        read = x509.load_pem_x509_csr(text)
        good = read.is_signature_valid and read.public_key() is not None
    except Exception:  # as for certificates
        good = False
    if not good:
        raise SecurityError("the certificate request is damaged, or not PEM")
    return read


def load_key(text: bytes) -> Any:
    """A private key from PEM without a password."""
    need_cryptography()
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        return load_pem_private_key(text, password=None)
    except Exception:  # as for certificates
        raise SecurityError("the private key is damaged, or not PEM without a password") from None


def may_sign(certificate: x509.Certificate) -> bool:
    """Whether it is the certificate of an authority."""
    from cryptography import x509

    try:
        if not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca:
            return False
    except x509.ExtensionNotFound:
        return False
    try:
        return certificate.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign
    except x509.ExtensionNotFound:
        return True


def need_cryptography() -> None:
    """Say what to install where the library is missing."""
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise missing_dependency("cryptography", "a federation of sites", "peer") from None


def _fingerprint(public_key: Any) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    digest = hashlib.sha256(public_key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()
    return "-".join(digest[k : k + 4] for k in range(0, 32, 4))


def _key_text(key: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization

    made: bytes = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return made


def _named(name: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    try:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    except ValueError:
        raise SecurityError(f"a name in a certificate has 1 to 64 characters, got {name!r}") from None


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: Any, now: datetime, lasts: timedelta
) -> x509.CertificateBuilder:
    from cryptography import x509

    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + lasts)
    )


def _of_authority(builder: x509.CertificateBuilder) -> x509.CertificateBuilder:
    from cryptography import x509

    used = {"key_cert_sign", "crl_sign", "digital_signature"}
    unused = {"content_commitment", "key_encipherment", "data_encipherment", "key_agreement"}
    usage = x509.KeyUsage(
        **dict.fromkeys(used, True), **dict.fromkeys(unused, False), encipher_only=False, decipher_only=False
    )
    return builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True).add_extension(
        usage, critical=True
    )


def _of_site(builder: x509.CertificateBuilder, hosts: tuple[str, ...]) -> x509.CertificateBuilder:
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    if hosts:
        names = x509.SubjectAlternativeName([_alternative_name(host) for host in dict.fromkeys(hosts)])
        builder = builder.add_extension(names, critical=False)
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    return builder.add_extension(x509.ExtendedKeyUsage(both), critical=False)


def _signed(builder: x509.CertificateBuilder, signer: Any) -> bytes:
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ed448, ed25519

    edwards = isinstance(signer, ed25519.Ed25519PrivateKey | ed448.Ed448PrivateKey)
    return builder.sign(signer, None if edwards else hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _alternative_name(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
