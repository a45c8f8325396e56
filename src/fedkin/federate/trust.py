"""Certificates and private files: who is who, and what only its owner may read.

A site makes its key and a certificate request where they stay; the holder of the authority's key issues a certificate
of 90 days. All keys are Ed25519. Keys, requests and certificates are PEM text.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO, cast

from fedkin._base import PRIVATE_FILE, in_file
from fedkin.errors import FedkinError, missing_dependency

try:
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError:  # the extra "peer" brings it
    _CRYPTOGRAPHY = False
else:
    _CRYPTOGRAPHY, _PEM = True, serialization.Encoding.PEM

SITE_DAYS = 90  #: how long a site's certificate lasts
RENEW_DAYS = 30  #: a certificate that lasts less than this should be renewed
_AUTHORITY_DAYS = 3650
_SKEW = timedelta(days=1)  # clocks of sites may be behind
_OTHER_TYPE = "is not of the type Ed25519; make one with openssl genpkey -algorithm ed25519"


class SecurityError(FedkinError, RuntimeError):
    """A signature, certificate or file permission that is not as it must be."""


def open_private(path: Path) -> IO[bytes]:
    """Open a file that only its owner may read, to append to it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE_FILE)
    os.fchmod(descriptor, PRIVATE_FILE)  # also when the file was there before
    return os.fdopen(descriptor, "ab")


def check_private(path: Path) -> None:
    """Raise `SecurityError` when ``path`` is missing, or anybody but the owner may read or write it."""
    if (mode := _mode(path)) & 0o077:
        raise SecurityError(f"{path}: others may read or write it (mode {mode:o}); run: chmod go= {path}")


def check_place(place: Path) -> None:
    """Raise `SecurityError` when anybody but the owner may put files into the directory ``place``, or take them."""
    if (mode := _mode(place)) & 0o022:
        raise SecurityError(f"{place}: others may write in this directory (mode {mode:o}); run: chmod go= {place}")


def read_private(path: Path) -> bytes:
    """Read a private file, after `check_private`."""
    check_private(path)
    return read_whole(path)


def read_whole(path: Path, most: int | None = None) -> bytes:
    """Read a file of at most ``most`` bytes; raises `SecurityError` that names it when that is not possible."""
    try:
        if most is not None and (size := path.stat().st_size) > most:
            raise SecurityError(f"{path} has {size} bytes, more than the {most} that such a file may have")
        return path.read_bytes()
    except FileNotFoundError:
        raise SecurityError(f"{path} is missing") from None
    except OSError as error:
        raise SecurityError(f"{path} cannot be read ({error.strerror})") from None


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode & 0o777
    except FileNotFoundError:
        raise SecurityError(f"{path} is missing") from None


@dataclass(frozen=True)
class Pair:
    """A certificate and its key. The key is not shown when it is printed."""

    certificate: bytes
    key: bytes

    def __repr__(self) -> str:
        return f"Pair({common_name(self.certificate)!r})"


def make_authority(name: str) -> Pair:
    """Make a certificate authority with this common name, good for ten years."""
    text = make_key()
    key, now, own = load_key(text), datetime.now(UTC), _subject(name)
    unused = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    more = dict.fromkeys((*unused, "encipher_only", "decipher_only"), False)
    usage = x509.KeyUsage(digital_signature=True, key_cert_sign=True, crl_sign=True, **more)
    builder = _builder(own, own, key.public_key(), now, now + timedelta(days=_AUTHORITY_DAYS))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return Pair(builder.add_extension(usage, critical=True).sign(key, None).public_bytes(_PEM), text)


def make_key() -> bytes:
    """Make a private key."""
    _need_cryptography()
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return Ed25519PrivateKey.generate().private_bytes(_PEM, form, plain)


def make_request(name: str, key: bytes) -> bytes:
    """Make a certificate request: "this is the public key of ``name``", signed with the private one."""
    signer = load_key(key)
    return x509.CertificateSigningRequestBuilder().subject_name(_subject(name)).sign(signer, None).public_bytes(_PEM)


def issue(
    authority: Pair, request: bytes, hosts: Iterable[str], *, days: float = SITE_DAYS, now: datetime | None = None
) -> bytes:
    """Issue a certificate for the key and the name of a certificate request.

    Whether the name is the right one is for the caller to check. ``hosts`` are names and addresses under which the
    owner listens. It is valid from a day before ``now``, as clocks differ, and not longer than the authority's.
    """
    asked, issuer, when = load_request(request), load_certificate(authority.certificate), now or datetime.now(UTC)
    until = min(when + timedelta(days=days), issuer.not_valid_after_utc)
    if until <= when:
        raise SecurityError(f"the authority's certificate ended on {issuer.not_valid_after_utc:%Y-%m-%d}")
    builder = _builder(asked.subject, issuer.subject, public_key(request), when, until)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    if names := [_alternative_name(host) for host in dict.fromkeys(hosts)]:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    builder = builder.add_extension(both, critical=False)
    return builder.sign(load_key(authority.key), None).public_bytes(_PEM)


def read_authority_files(certificate: Path, key: Path) -> Pair:
    """Read the user's own certificate authority; raises `SecurityError` unless the two files are that of one."""
    own = Pair(read_whole(certificate), read_private(key))
    with in_file(f"{certificate} and {key}", SecurityError):
        fit = belong_together(own.certificate, own.key)
    if not fit:
        raise SecurityError(f"{key} is not the key of {certificate}")
    if not may_sign(own.certificate):
        raise SecurityError(
            f"{certificate} is not the certificate of an authority (CA:TRUE, and certificate signing where it lists "
            "uses): sites would refuse what it signs"
        )
    return own


def check_issued(certificate: bytes, authority: bytes, now: datetime | None = None, *, ended: bool = False) -> str:
    """Return the name in a site's certificate, after checking that the authority issued it and that it is valid now.

    It may have ended where ``ended`` says so. Raises `SecurityError`, in words that go on after the name of a file.
    """
    read, issuer = load_certificate(certificate), load_certificate(authority)
    try:
        read.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        raise SecurityError("the certificate was not issued by the authority of this federation") from None
    if may_sign(certificate):
        raise SecurityError("the certificate is that of an authority, not that of a site")
    name, when, (begin, end) = common_name(certificate), now or datetime.now(UTC), validity(certificate)
    if when > end and not ended:
        raise SecurityError(f"the certificate of {name} ended on {end:%Y-%m-%d}; renew it: fedkin site renew")
    if when < begin and not ended:
        raise SecurityError(f"the certificate of {name} begins on {begin:%Y-%m-%d}; check the clock of this machine")
    return name


def check_signature(signature: bytes, content: bytes, by: bytes) -> None:
    """Raise `SecurityError` unless the owner of a certificate, or certificate request, signed the content."""
    try:
        public_key(by).verify(signature, content)
    except InvalidSignature:
        raise SecurityError(
            "the signature does not fit: the file was changed after signing, or somebody else signed it; get it again"
        ) from None


def validity(certificate: bytes) -> tuple[datetime, datetime]:
    """Return from when, and until when, a certificate is valid."""
    read = load_certificate(certificate)
    return read.not_valid_before_utc, read.not_valid_after_utc


def belong_together(certificate: bytes, key: bytes) -> bool:
    """Return whether the key is that of the certificate or request; raises `SecurityError` when unreadable."""
    return public_key(certificate) == load_key(key).public_key()


def fingerprint(text: bytes) -> str:
    """Return what people compare: 32 hexadecimal digits of the hash of the public key in a certificate or request."""
    key = public_key(text).public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    digest = hashlib.sha256(key).hexdigest()
    return "-".join(digest[k : k + 4] for k in range(0, 32, 4))


def same_fingerprint(one: str, other: str) -> bool:
    """Return whether two fingerprints are the same; case and signs between digits do not count."""
    first, second = ("".join(sign for sign in text.lower() if sign.isalnum()) for text in (one, other))
    return first == second


def common_name(text: bytes) -> str:
    """Return whose certificate, or certificate request, it is."""
    names = _loaded(text).subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if len(names) != 1:
        raise SecurityError("the certificate does not say whose it is")
    return str(names[0].value)


def may_sign(certificate: bytes) -> bool:
    """Return whether it is the certificate of an authority."""
    extensions = {type(one.value): one.value for one in load_certificate(certificate).extensions}
    constraints, usage = extensions.get(x509.BasicConstraints), extensions.get(x509.KeyUsage)
    authority = isinstance(constraints, x509.BasicConstraints) and constraints.ca
    return authority and (usage.key_cert_sign if isinstance(usage, x509.KeyUsage) else True)


def load_certificate(text: bytes) -> x509.Certificate:
    """Load a certificate; raises `SecurityError` when it is damaged."""
    return cast("x509.Certificate", _loaded(text, "certificate"))


def load_request(text: bytes) -> x509.CertificateSigningRequest:
    """Load a certificate request whose own signature fits; raises `SecurityError` when it is damaged."""
    return cast("x509.CertificateSigningRequest", _loaded(text, "request"))


def public_key(text: bytes) -> Ed25519PublicKey:
    """Return the public key in a certificate, or in a certificate request."""
    return cast("Ed25519PublicKey", _loaded(text).public_key())


def load_key(text: bytes) -> Ed25519PrivateKey:
    """Load a private key without a password."""
    _need_cryptography()
    try:
        key = serialization.load_pem_private_key(text, password=None)
    except Exception:  # cryptography has no common base of errors
        raise SecurityError("the private key is damaged, or not PEM without a password") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise SecurityError(f"the private key {_OTHER_TYPE}")
    return key


def _loaded(text: bytes, what: str = "") -> x509.Certificate | x509.CertificateSigningRequest:
    """Load a certificate or a request whose own signature fits, by default what the text says that it is."""
    _need_cryptography()
    what = what or ("request" if b"CERTIFICATE REQUEST" in text else "certificate")
    read: x509.Certificate | x509.CertificateSigningRequest
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # what cryptography only warns of is damage here
            if what == "request":
                read = x509.load_pem_x509_csr(text)
                good = read.is_signature_valid
            else:
                read = x509.load_pem_x509_certificate(text)
                good = read.not_valid_before_utc <= read.not_valid_after_utc
            key, _, _ = read.public_key(), read.extensions, read.subject  # parsed on first use
    except Exception:  # cryptography has no common base: ValueError, InvalidVersion, UnsupportedAlgorithm, ...
        good = False
    if not good:
        raise SecurityError(f"the certificate{' request' if what == 'request' else ''} is damaged, or not PEM")
    if not isinstance(key, Ed25519PublicKey):
        raise SecurityError(f"the key of the {what} {_OTHER_TYPE}")
    return read


def _need_cryptography() -> None:
    if not _CRYPTOGRAPHY:
        raise missing_dependency("cryptography", "a federation of sites", "peer")


def _subject(name: str) -> x509.Name:
    try:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    except ValueError:
        raise SecurityError(f"a name in a certificate has 1 to 64 characters, got {name!r}") from None


def _builder(
    subject: x509.Name, issuer: x509.Name, key: Ed25519PublicKey, now: datetime, until: datetime
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    return builder.serial_number(x509.random_serial_number()).not_valid_before(now - _SKEW).not_valid_after(until)


def _alternative_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
