"""Who is who: a small certificate authority, signatures, and the access lists that zenoh enforces on every link.

Every device has a key of its own and a certificate whose common name is the device's name. Links are TLS with
certificates on both sides. Each device enforces, for every link by the common name at its other end: a neighbour may
write only its own keys and read only what this device publishes for it; anybody else may do nothing.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from fedkin._base import PRIVATE_FILE
from fedkin.errors import missing_dependency
from fedkin.federate.trust.private import SecurityError as SecurityError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes

_YEARS = 10
_AGAIN = "carry the device's directory again, whole, from where peer init made it"


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, both as PEM text."""

    certificate: bytes
    key: bytes


def make_authority(name: str) -> Pair:
    """A new certificate authority with an Ed25519 key, good for ten years.

    Parameters
    ----------
    name : str
        Its common name.

    Examples
    --------
    >>> from fedkin.federate.trust.security import issue, make_authority, sign, verify
    >>> authority = make_authority("three hospitals")
    >>> verify(authority.certificate, b"words", sign(authority, b"words"))
    >>> b"BEGIN CERTIFICATE" in issue(authority, "north", ["127.0.0.1"]).certificate
    True
    """
    _need_cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    return Pair(_certificate(name, key.public_key(), name, key, authority=True, hosts=()), _key_text(key))


def issue(authority: Pair, name: str, hosts: Iterable[str]) -> Pair:
    """A new key and a certificate for it.

    Parameters
    ----------
    authority : Pair
        Who signs. Its key may be Ed25519, elliptic-curve or RSA.
    name : str
        Common name: the device.
    hosts : iterable of str
        Host names and addresses under which it listens.
    """
    _need_cryptography()
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    issuer = x509.load_pem_x509_certificate(authority.certificate)
    signer = _load_key(authority.key)
    made = _certificate(name, key.public_key(), issuer.subject, signer, authority=False, hosts=tuple(hosts))
    return Pair(made, _key_text(key))


def belong_together(pair: Pair) -> bool:
    """Whether the key is that of the certificate; raises `SecurityError` when either cannot be read."""
    _need_cryptography()
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    try:
        certified = x509.load_pem_x509_certificate(pair.certificate).public_key()
    except ValueError:
        raise SecurityError("the certificate cannot be read as PEM") from None
    try:
        own = _load_key(pair.key).public_key()
    except (ValueError, TypeError):
        raise SecurityError("the key cannot be read as PEM without a password") from None
    form = Encoding.DER, PublicFormat.SubjectPublicKeyInfo
    return certified.public_bytes(*form) == own.public_bytes(*form)


def read_authority_files(certificate: Path, key: Path) -> Pair:
    """The user's own certificate authority.

    Raises
    ------
    SecurityError
        When a file cannot be read, they do not belong together, or the certificate is not that of an authority.
    """
    _need_cryptography()
    from cryptography import x509

    parts = []
    for path in (certificate, key):
        try:
            parts.append(path.read_bytes())
        except OSError as error:
            raise SecurityError(f"{path} cannot be read ({error.strerror})") from None
    try:
        read = x509.load_pem_x509_certificate(parts[0])
    except ValueError:
        raise SecurityError(f"--ca-cert {certificate} is not a certificate in PEM") from None
    try:
        _load_key(parts[1])
    except (ValueError, TypeError):
        raise SecurityError(f"--ca-key {key} is not a private key in PEM without a password") from None
    own = Pair(parts[0], parts[1])
    if not belong_together(own):
        raise SecurityError(f"--ca-key {key} does not belong to --ca-cert {certificate}")
    if not _may_sign(read):
        raise SecurityError(
            f"--ca-cert {certificate} is not the certificate of an authority (CA:TRUE, and certificate signing where "
            "it lists uses): devices would refuse what it signs"
        )
    return own


def _may_sign(certificate: x509.Certificate) -> bool:
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


def sign(authority: Pair, content: bytes) -> bytes:
    """The authority's signature of ``content``."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa

    key = _load_key(authority.key)
    if isinstance(key, ed25519.Ed25519PrivateKey):
        return key.sign(content)
    if isinstance(key, ec.EllipticCurvePrivateKey):
        return key.sign(content, ec.ECDSA(hashes.SHA256()))
    if isinstance(key, rsa.RSAPrivateKey):
        return key.sign(content, padding.PKCS1v15(), hashes.SHA256())
    raise SecurityError(f"a certificate authority with a key of type {type(key).__name__} cannot sign manifests")


def read_signed(directory: Path, name: str, signature: str) -> bytes:
    """The content of a file in ``directory``, after checking the authority's signature in another.

    Raises
    ------
    SecurityError
        When a file is missing or was changed; the text names the files and the cure.
    """
    certificate = "ca.crt"
    names = f"{name}, {signature} and {certificate}"
    cure = f"carry {names} again from where peer init made them"
    if (directory / "devices").is_dir():
        cure = f"put back a copy of {names}" + (" (every device has one)" if name == "manifest.json" else "")
    parts = []
    for path in (directory / name, directory / signature, directory / certificate):
        try:
            parts.append(path.read_bytes())
        except FileNotFoundError:
            raise SecurityError(f"{path} is missing; {cure}") from None
        except OSError as error:
            raise SecurityError(f"{path} cannot be read ({error.strerror}); {cure}") from None
    content, signed, authority = parts
    try:
        verify(authority, content, signed)
    except SecurityError as error:
        raise SecurityError(f"{directory / name}: {error}; {cure}") from None
    return content


def verify(certificate: bytes, content: bytes, signature: bytes) -> None:
    """Raise `SecurityError` unless ``signature`` is the one of ``content`` by the owner of ``certificate``."""
    _need_cryptography()
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa

    try:
        key = x509.load_pem_x509_certificate(certificate).public_key()
    except ValueError:
        raise SecurityError("the authority's certificate, ca.crt, cannot be read as PEM") from None
    try:
        if isinstance(key, ed25519.Ed25519PublicKey):
            key.verify(signature, content)
        elif isinstance(key, ec.EllipticCurvePublicKey):
            key.verify(signature, content, ec.ECDSA(hashes.SHA256()))
        elif isinstance(key, rsa.RSAPublicKey):
            key.verify(signature, content, padding.PKCS1v15(), hashes.SHA256())
        else:
            raise SecurityError(
                f"a certificate authority with a key of type {type(key).__name__} cannot sign manifests"
            )
    except InvalidSignature:
        raise SecurityError(
            "the signature does not fit: the content was changed after signing, or it was signed by another authority "
            "than that of ca.crt"
        ) from None


def open_private(path: Path) -> IO[bytes]:
    """Open a file that only its owner may read, to append to it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE_FILE)
    os.fchmod(descriptor, PRIVATE_FILE)  # also when the file was there before
    return os.fdopen(descriptor, "ab")


def check_private(path: Path) -> None:
    """Raise `SecurityError` when ``path`` is missing, or anybody but the owner may read or write it."""
    mode = _mode(path)
    if mode & 0o077:
        raise SecurityError(f"{path}: others may read or write it (mode {mode:o}); run: chmod go= {path}")


def check_place(place: Path) -> None:
    """Raise `SecurityError` when anybody but the owner may put files into the directory ``place``, or take them."""
    mode = _mode(place)
    if mode & 0o022:
        raise SecurityError(f"{place}: others may write in this directory (mode {mode:o}); run: chmod go= {place}")


def common_name(certificate: Path) -> str:
    """Whose certificate it is; raises `SecurityError` when it is missing or damaged."""
    _need_cryptography()
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    _mode(certificate)
    try:
        subject = x509.load_pem_x509_certificate(certificate.read_bytes()).subject
        return str(subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)
    except (ValueError, IndexError):
        raise SecurityError(f"{certificate} is damaged, or not a certificate in PEM; {_AGAIN}") from None


def check_pair(certificate: Path, key: Path) -> None:
    """Raise `SecurityError` unless both files are there and belong together, and the key is private."""
    check_private(key)
    _mode(certificate)
    try:
        fit = belong_together(Pair(certificate.read_bytes(), key.read_bytes()))
    except SecurityError as error:
        raise SecurityError(f"{certificate} or {key.name} is damaged: {error}; {_AGAIN}") from None
    if not fit:
        raise SecurityError(f"{key} is not the key of {certificate.name}; {_AGAIN}")


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode & 0o777
    except FileNotFoundError:
        raise SecurityError(f"{path} is missing; {_AGAIN}") from None


# --- links ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Grant:
    """What one neighbour may do on a link: keys that it writes and keys that it reads.

    Attributes
    ----------
    name : str
        Common name of the neighbour.
    writes, reads : sequence of str
        Key expressions.
    """

    name: str
    writes: Sequence[str]
    reads: Sequence[str]


def access_list(grants: Sequence[Grant]) -> dict[str, Any]:
    """The ``access_control`` part of a zenoh configuration: what is not granted is refused.

    A neighbour's rules come in two directions. What it writes may enter, and what asks for it (subscriptions, queries)
    may leave; what it reads may leave, and what asks for that may enter.
    """
    rules: list[dict[str, Any]] = []
    for grant in grants:
        told = ["put", "reply", "declare_queryable", "liveliness_token"]
        asked = ["declare_subscriber", "query", "liveliness_query", "declare_liveliness_subscriber"]
        for label, flow, keys, messages in (
            ("writes", "ingress", grant.writes, told),
            ("asked for", "egress", grant.writes, asked),
            ("reads", "egress", grant.reads, told),
            ("asks for", "ingress", grant.reads, asked),
        ):
            if keys:
                rules.append(
                    {
                        "id": f"{grant.name} {label}",
                        "permission": "allow",
                        "flows": [flow],
                        "messages": messages,
                        "key_exprs": list(keys),
                    }
                )
    return {
        "enabled": True,
        "default_permission": "deny",
        "rules": rules,
        "subjects": [{"id": grant.name, "cert_common_names": [grant.name]} for grant in grants],
        "policies": [
            {
                "subjects": [grant.name],
                "rules": [rule["id"] for rule in rules if rule["id"].startswith(f"{grant.name} ")],
            }
            for grant in grants
            if grant.writes or grant.reads
        ],
    }


#: Bounds for who connects and says nothing: so many at a time, each for so many milliseconds, and so many links.
_LINKS = {"accept_timeout": 2000, "accept_pending": 4096, "max_sessions": 4096}
#: What a message has beside its payload, and the least that a link must take.
_AROUND, _LEAST_BYTES = 4096, 65536


def link_configuration(
    listen: Sequence[str], connect: Sequence[str], grants: Sequence[Grant] | None, most_bytes: int = 1 << 20
) -> dict[str, Any]:
    """A zenoh configuration: explicit endpoints, no scouting, TLS on both sides, and the access list.

    Parameters
    ----------
    listen, connect : sequence of str
        Endpoints, ``tls/host:port``.
    grants : sequence of Grant or None
        None for plain TCP, where nobody can be told apart: no certificates and no access list.
    most_bytes : int
        Of the largest payload. The transport drops what is longer before it is put together.
    """
    configuration: dict[str, Any] = {
        "mode": "peer",
        "listen": {"endpoints": list(listen), "exit_on_failure": True},
        "connect": {
            "endpoints": list(connect),
            "timeout_ms": -1,
            "exit_on_failure": False,
            "retry": {"period_init_ms": 100, "period_max_ms": 2000, "period_increase_factor": 1.5},
        },
        "scouting": {"multicast": {"enabled": False}, "gossip": {"enabled": False}},
        "transport": {
            "shared_memory": {"enabled": False},
            "unicast": _LINKS,
            "link": {"rx": {"max_message_size": max(most_bytes, _LEAST_BYTES) + _AROUND}},
        },
    }
    if grants is not None:
        configuration["access_control"] = access_list(grants)
        configuration["transport"]["link"] |= {
            "protocols": ["tls"],
            "tls": {
                "enable_mtls": True,
                "verify_name_on_connect": True,
                "root_ca_certificate": "ca.crt",
                "listen_certificate": "device.crt",
                "listen_private_key": "device.key",
                "connect_certificate": "device.crt",
                "connect_private_key": "device.key",
            },
        }
    return configuration


def with_absolute_paths(configuration: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """The configuration with its certificate files looked for in ``directory``, so that the directory may move."""
    transport = dict(configuration.get("transport", {}))
    link = dict(transport.get("link", {}))
    if "tls" in link:
        link["tls"] = {
            name: str((directory / value).absolute()) if isinstance(value, str) else value
            for name, value in link["tls"].items()
        }
        transport["link"] = link
    return {**configuration, "transport": transport}


# --- certificates -----------------------------------------------------------------------------------------------------


def _need_cryptography() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise missing_dependency("cryptography", "a federation of device processes", "peer") from None


def _load_key(text: bytes) -> CertificateIssuerPrivateKeyTypes:
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    return load_pem_private_key(text, password=None)  # type: ignore[return-value]


def _key_text(key: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization

    made: bytes = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return made


def _certificate(
    name: str,
    public_key: Any,
    issuer: x509.Name | str,
    signer: CertificateIssuerPrivateKeyTypes,
    *,
    authority: bool,
    hosts: Sequence[str],
) -> bytes:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ed448, ed25519
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(named(name))
        .issuer_name(named(issuer) if isinstance(issuer, str) else issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))  # clocks of devices may be behind
        .not_valid_after(now + timedelta(days=365 * _YEARS))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True)
    )
    if authority:
        usage = {"key_cert_sign": True, "crl_sign": True, "digital_signature": True}
        builder = builder.add_extension(
            x509.KeyUsage(
                **usage,
                content_commitment=False,
                key_encipherment=False,
                data_encipherment=False,
                key_agreement=False,
                encipher_only=False,
                decipher_only=False,
            ),
            critical=True,
        )
    else:
        names = [_alternative_name(host) for host in dict.fromkeys(hosts)]
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(x509.ExtendedKeyUsage(both), critical=False)
    edwards = isinstance(signer, ed25519.Ed25519PrivateKey | ed448.Ed448PrivateKey)
    return builder.sign(signer, None if edwards else hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _alternative_name(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
