"""Certificates, signatures and private files: the identities of sites, and files that only their owner may read.

A site creates its key, which never leaves it, and a certificate request. The holder of the authority's key issues a
certificate for some days (`LINK_DAYS`, or `FILE_DAYS` if the site opens no connections). All keys are Ed25519. Keys,
requests and certificates are PEM text. Key files are encrypted if the environment has a passphrase:
``FEDKIN_PASSPHRASE_FILE`` names its file, or ``FEDKIN_PASSPHRASE`` holds it.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import stat
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import IO

from fedkin._base import PRIVATE_FILE, in_file, write_file
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
    _CRYPTOGRAPHY, _PEM, _PKCS8 = True, serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8

LINK_DAYS, FILE_DAYS = 14, 90  #: how long certificates last, of sites that run rounds and of those that sign files only
_AUTHORITY_DAYS = 3650
_RENEW = 1 / 3  # a certificate should be renewed in the last third of its days
_PASSPHRASE, _LONGEST_PASSPHRASE = "FEDKIN_PASSPHRASE", 1023  # cryptography takes no longer one
_SKEW = timedelta(days=1)  # clocks of sites may be behind
_OTHER_TYPE = "is not of the type Ed25519; make one with openssl genpkey -algorithm ed25519"


class SecurityError(FedkinError, RuntimeError):
    """A signature, certificate or file permission that is not valid."""


# --- files ------------------------------------------------------------------------------------------------------------


def open_private(path: Path) -> IO[bytes]:
    """Open a private file, readable only by its owner, for appending."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE_FILE)
    os.fchmod(descriptor, PRIVATE_FILE)  # also when the file was there before
    return os.fdopen(descriptor, "ab")


def check_private(path: Path) -> None:
    """Raise `SecurityError` unless only the owner may read and write a file, or write in a directory."""
    try:
        mode, folder = path.stat().st_mode & 0o777, path.is_dir()
    except FileNotFoundError:
        raise SecurityError(f"there is no file {path}: check the path") from None
    if mode & (0o022 if folder else 0o077):
        what = "write in this directory" if folder else "read or write it"
        raise SecurityError(f"{path}: others may {what} (mode {mode:o}); run: chmod go= {path}")


def read_private(path: Path) -> bytes:
    """Read a private file, after `check_private`."""
    check_private(path)
    return read_whole(path)


def read_whole(path: Path, most: int | None = None) -> bytes:
    """Read a file of at most ``most`` bytes; raise `SecurityError` that names it if that is not possible."""
    try:
        if most is not None:
            about = path.stat()
            if not stat.S_ISREG(about.st_mode):
                raise SecurityError(f"{path} is not a file")
            if about.st_size > most:
                raise SecurityError(f"{path} has {about.st_size} bytes, more than the {most} that such a file may have")
        return path.read_bytes()
    except FileNotFoundError:
        raise SecurityError(f"there is no file {path}: check the path") from None
    except OSError as error:
        raise SecurityError(f"{path} cannot be read ({error.strerror})") from None


# --- keys and certificates --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """A private key with the certificate, or certificate request, that names its owner."""

    certificate: bytes
    key: bytes = field(repr=False)

    @cached_property
    def name(self) -> str:
        """Name of the owner of the key."""
        return site_of(self.certificate)

    @cached_property
    def vouched(self) -> bytes | None:
        """The certificate, if an authority issued it to a site; files signed by the site include it."""
        own = _is_request(self.certificate) or may_sign(self.certificate)
        return None if own else self.certificate

    @cached_property
    def _private(self) -> Ed25519PrivateKey:
        return _load_key(self.key)

    def sign(self, content: bytes) -> bytes:
        """Return the signature of ``content``."""
        return self._private.sign(content)

    def fits(self) -> bool:
        """Return whether a key belongs to a certificate; raise `SecurityError` if either cannot be read."""
        return _public_key(self.certificate) == self._private.public_key()


def make_authority(name: str) -> Pair:
    """Make a certificate authority with this common name, valid for ten years."""
    text = make_key()
    key, now, own = _load_key(text), datetime.now(UTC), _subject(name)
    unused = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    more = dict.fromkeys((*unused, "encipher_only", "decipher_only"), False)
    usage = x509.KeyUsage(digital_signature=True, key_cert_sign=True, crl_sign=True, **more)
    builder = _builder(own, own, key.public_key(), now, now + timedelta(days=_AUTHORITY_DAYS))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return Pair(builder.add_extension(usage, critical=True).sign(key, None).public_bytes(_PEM), text)


def make_key() -> bytes:
    """Make a private key."""
    _need_cryptography()
    return Ed25519PrivateKey.generate().private_bytes(_PEM, _PKCS8, serialization.NoEncryption())


def write_key(path: Path, key: bytes) -> None:
    """Write a private key to a private file, encrypted if the environment has a passphrase."""
    if (passphrase := _passphrase()) is not None:
        key = _load_key(key).private_bytes(_PEM, _PKCS8, serialization.BestAvailableEncryption(passphrase))
    write_file(path, key, private=True)


def read_key(path: Path) -> bytes:
    """Read and decrypt a private key from a private file; raise `SecurityError` if the passphrase is wrong."""
    text = read_private(path)
    if b"ENCRYPTED PRIVATE KEY" not in text:
        return text
    _need_cryptography()
    if (passphrase := _passphrase()) is None:
        raise SecurityError(
            f"{path} is encrypted: set {_PASSPHRASE}_FILE to the file with the passphrase, or {_PASSPHRASE} to it"
        )
    try:
        key = serialization.load_pem_private_key(text, passphrase)
    except Exception:  # cryptography has no common base of errors
        raise SecurityError(f"{path} cannot be decrypted: the passphrase is wrong, or the file is damaged") from None
    return key.private_bytes(_PEM, _PKCS8, serialization.NoEncryption())


def _passphrase() -> bytes | None:
    """Return the passphrase of private keys, None if the environment has none."""
    file = os.environ.get(f"{_PASSPHRASE}_FILE")
    if file:
        found, where = read_private(Path(file)).rstrip(b"\r\n"), file
    elif _PASSPHRASE in os.environ:
        found, where = os.environ[_PASSPHRASE].encode(), _PASSPHRASE
    else:
        return None
    if not 1 <= len(found) <= _LONGEST_PASSPHRASE:
        raise SecurityError(f"{where} must hold a passphrase of 1 to {_LONGEST_PASSPHRASE} bytes, got {len(found)}")
    return found


def make_request(name: str, key: bytes) -> bytes:
    """Make a certificate request for the public key of ``name``, signed with the private key."""
    signer = _load_key(key)
    return x509.CertificateSigningRequestBuilder().subject_name(_subject(name)).sign(signer, None).public_bytes(_PEM)


def issue(
    authority: Pair,
    request: bytes,
    hosts: Iterable[str],
    *,
    name: str | None = None,
    days: int = FILE_DAYS,
    now: datetime | None = None,
) -> bytes:
    """Issue a certificate for the key of a certificate request.

    Its common ``name`` is by default the `link_name` of site and key. Connections are granted by common name, so
    another key of the same site gets none.

    The caller must check that the name is right. ``hosts`` are names and addresses on which the owner listens. The
    certificate is valid from a day before ``now``, because clocks differ, and no longer than the authority's.
    """
    asked, issuer, when = _loaded(request), _load_certificate(authority.certificate), now or datetime.now(UTC)
    if isinstance(asked, x509.Certificate):
        raise SecurityError("it has a certificate instead of a certificate request")
    until = min(when + timedelta(days=days), issuer.not_valid_after_utc)
    if until <= when:
        raise SecurityError(f"the authority's certificate ended on {issuer.not_valid_after_utc:%Y-%m-%d}")
    subject = _subject(name or link_name(common_name(request), fingerprint(request)))
    builder = _builder(subject, issuer.subject, _public_key(request), when, until)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    if names := [_alternative_name(host) for host in dict.fromkeys(hosts)]:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    builder = builder.add_extension(both, critical=False)
    return builder.sign(_load_key(authority.key), None).public_bytes(_PEM)


def read_authority_files(certificate: Path, key: Path) -> Pair:
    """Read the user's own certificate authority; raise `SecurityError` unless the two files belong together."""
    own = Pair(read_whole(certificate), read_key(key))
    with in_file(f"{certificate} and {key}", SecurityError):
        fits = own.fits()
    if not fits:
        raise SecurityError(f"{key} is not the key of {certificate}")
    if not may_sign(own.certificate):
        raise SecurityError(
            f"{certificate} is not the certificate of an authority (CA:TRUE, and certificate signing if it lists "
            "uses): sites would refuse what it signs"
        )
    return own


def check_issued(certificate: bytes, authority: bytes, now: datetime | None = None, *, ended: bool = False) -> str:
    """Return the name in a site's certificate after checking that the authority issued it and that it is valid now.

    It may have expired if ``ended`` is set. Raises `SecurityError` with a message to append to the name of a file.
    """
    try:
        _load_certificate(certificate).verify_directly_issued_by(_load_certificate(authority))
    except (ValueError, TypeError, InvalidSignature):
        raise SecurityError("the certificate was not issued by the authority of this federation") from None
    if may_sign(certificate):
        raise SecurityError("the certificate is that of an authority, not that of a site")
    name, when, (begin, end) = site_of(certificate), now or datetime.now(UTC), validity(certificate)
    if when > end and not ended:
        raise SecurityError(f"the certificate of {name} ended on {end:%Y-%m-%d}; renew it: fedkin site renew")
    if when < begin and not ended:
        raise SecurityError(f"the certificate of {name} starts on {begin:%Y-%m-%d}; check the clock of this machine")
    return name


def check_signature(signature: bytes, content: bytes, by: bytes) -> None:
    """Raise `SecurityError` unless the owner of a certificate or certificate request signed the content."""
    try:
        _public_key(by).verify(signature, content)
    except InvalidSignature:
        raise SecurityError(
            "the signature does not match: the file was changed after signing, or signed with another key; get it again"
        ) from None


def validity(certificate: bytes) -> tuple[datetime, datetime]:
    """Return the start and the end of a certificate's validity."""
    read = _load_certificate(certificate)
    return read.not_valid_before_utc, read.not_valid_after_utc


def ends_soon(certificate: bytes, now: datetime | None = None) -> bool:
    """Return whether a certificate should be renewed."""
    begin, until = validity(certificate)
    return until < (now or datetime.now(UTC)) + _RENEW * (until - begin)


def fingerprint(text: bytes) -> str:
    """Return a fingerprint for people to compare: 32 hexadecimal digits of the hash of the public key."""
    key = _public_key(text).public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    digest = hashlib.sha256(key).hexdigest()
    return "-".join(digest[k : k + 4] for k in range(0, 32, 4))


def same_fingerprint(one: str, other: str) -> bool:
    """Return whether two fingerprints are the same, ignoring case and separators."""
    first, second = ("".join(sign for sign in text.lower() if sign.isalnum()) for text in (one, other))
    return first == second


def common_name(text: bytes) -> str:
    """Return the common name in a certificate or certificate request."""
    names = _loaded(text).subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if len(names) != 1:
        raise SecurityError("the certificate does not name its owner")
    return str(names[0].value)


def link_name(site: str, mark: str) -> str:
    """Return the common name of a site's certificate: its name, and 16 digits of the fingerprint of its key."""
    return f"{site}~{mark.replace('-', '')[:16]}"


def site_of(certificate: bytes) -> str:
    """Return the site to which a certificate or certificate request belongs."""
    return common_name(certificate).partition("~")[0]


def may_sign(certificate: bytes) -> bool:
    """Return whether it is the certificate of an authority."""
    extensions = {type(one.value): one.value for one in _load_certificate(certificate).extensions}
    constraints, usage = extensions.get(x509.BasicConstraints), extensions.get(x509.KeyUsage)
    authority = isinstance(constraints, x509.BasicConstraints) and constraints.ca
    return authority and (usage.key_cert_sign if isinstance(usage, x509.KeyUsage) else True)


def _load_certificate(text: bytes) -> x509.Certificate:
    read = _loaded(text)
    if not isinstance(read, x509.Certificate):
        raise SecurityError("it is a certificate request, expected a certificate")
    return read


def _public_key(text: bytes) -> Ed25519PublicKey:
    key = _loaded(text).public_key()
    assert isinstance(key, Ed25519PublicKey)
    return key


def _load_key(text: bytes) -> Ed25519PrivateKey:
    """Load a private key without a password."""
    _need_cryptography()
    try:
        key = serialization.load_pem_private_key(text, password=None)
    except Exception:  # cryptography has no common base of errors
        raise SecurityError("the private key is damaged, or not PEM without a password") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise SecurityError(f"the private key {_OTHER_TYPE}")
    return key


def _is_request(text: bytes) -> bool:
    return b"CERTIFICATE REQUEST" in text


def _loaded(text: bytes) -> x509.Certificate | x509.CertificateSigningRequest:
    """Load a certificate, or a request whose own signature fits; raises `SecurityError` when it is damaged."""
    _need_cryptography()
    read: x509.Certificate | x509.CertificateSigningRequest
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # what cryptography only warns of is damage here
            if _is_request(text):
                read = x509.load_pem_x509_csr(text)
                good = read.is_signature_valid
            else:
                read = x509.load_pem_x509_certificate(text)
                good = read.not_valid_before_utc <= read.not_valid_after_utc
            key, _, _ = read.public_key(), read.extensions, read.subject  # parsed on first use
    except Exception:  # cryptography has no common base: ValueError, InvalidVersion, UnsupportedAlgorithm, ...
        good = False
    if not good:
        raise SecurityError(f"the certificate{' request' if _is_request(text) else ''} is damaged, or not PEM")
    if not isinstance(key, Ed25519PublicKey):
        raise SecurityError(f"the key of the certificate {_OTHER_TYPE}")
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
