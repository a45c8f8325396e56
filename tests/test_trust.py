"""Certificates, signed files, private files: what is believed, and what is not."""

from __future__ import annotations

import random
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from fedkin.federate import SecurityError
from fedkin.federate.messages import Message, seal, unseal
from fedkin.federate.trust import (
    Pair,
    check_issued,
    common_name,
    issue,
    make_authority,
    make_key,
    make_request,
    read_authority_files,
    read_key,
    validity,
    write_key,
)
from flips import flipped

AUTHORITY = make_authority("three hospitals")
RUN = "0123456789abcdef"
BODY = {"run": RUN, "b": [[1.5, -2.0], [3.0, 1e-300]], "a": {"z": None, "y": "Zürich \u2603", "x": True}, "empty": []}


class Plain(Message, frozen=True):
    """A file of any content."""

    kind = "order"
    by = "either"
    b: list
    a: dict
    empty: list


class Invitation(Message, frozen=True):
    kind = "invite"
    brings = "authority"
    authority: str


class Asking(Message, frozen=True):
    kind = "request"
    by = "either"
    brings = "request"
    request: str


def opened(text: bytes, authority: Pair = AUTHORITY, form: type[Message] = Plain, **how):
    """The message in a file and the certificate of the site that signed it."""
    return unseal(text, form, authority.certificate, **how)


def site(name: str = "north", authority: Pair = AUTHORITY, **options) -> Pair:
    key = make_key()
    return Pair(issue(authority, make_request(name, key), ["127.0.0.1"], **options), key)


@pytest.mark.parametrize(("fine", "when", "words"), [(89, 91, "ended on .*renew"), (-0.9, -2, "starts on .*clock")])
def test_a_certificate_outside_its_days_is_refused(fine, when, words):
    """It lasts 90 days and begins a day early, for clocks that are behind."""
    certificate = site().certificate
    assert check_issued(certificate, AUTHORITY.certificate, datetime.now(UTC) + timedelta(days=fine)) == "north"
    with pytest.raises(SecurityError, match=words):
        check_issued(certificate, AUTHORITY.certificate, datetime.now(UTC) + timedelta(days=when))


def test_only_the_authority_issues_and_it_is_no_site():
    with pytest.raises(SecurityError, match="not issued by the authority"):  # another one of the same name
        check_issued(site(authority=make_authority("three hospitals")).certificate, AUTHORITY.certificate)
    with pytest.raises(SecurityError, match="that of an authority"):
        check_issued(AUTHORITY.certificate, AUTHORITY.certificate)
    assert "PRIVATE" not in repr(site())


def own_authority(folder: Path, kind: str, uses: str = "CA:TRUE") -> tuple[Path, Path]:
    key, certificate = folder / "ca.key", folder / "ca.crt"
    command = ["openssl", "req", "-x509", "-newkey", kind, "-nodes", "-days", "30", "-subj", "/CN=own"]
    command += ["-addext", f"basicConstraints=critical,{uses}"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    key.chmod(0o600)
    return certificate, key


@pytest.mark.parametrize(
    ("kind", "uses", "words"),
    [
        ("rsa:2048", "CA:TRUE", "not of the type Ed25519; make one with openssl"),
        ("ED25519", "CA:FALSE", "not the certificate of an authority"),
    ],
)
def test_other_keys_and_certificates_of_sites_are_no_authority(tmp_path, kind, uses, words):
    with pytest.raises(SecurityError, match=words):
        read_authority_files(*own_authority(tmp_path, kind, uses))


def test_an_authority_of_ones_own_signs(tmp_path):
    certificate, key = own_authority(tmp_path, "ED25519")
    own = read_authority_files(certificate, key)
    assert check_issued(site(authority=own).certificate, own.certificate) == "north"
    assert opened(seal("order", BODY, own), own, by="organiser") == (Plain(**BODY), None)
    # a site's certificate does not outlive the authority's
    assert validity(site(authority=own).certificate)[1] == validity(own.certificate)[1]
    key.chmod(0o644)
    with pytest.raises(SecurityError, match="chmod"):
        read_authority_files(certificate, key)


@pytest.mark.parametrize("by", ["authority", "site"])
def test_every_flipped_bit_of_a_sealed_file_is_detected(by):
    signer = AUTHORITY if by == "authority" else site()
    text = seal("order", BODY, signer)
    for bit in range(8 * len(text)):
        changed = flipped(text, bit)
        if changed.lower() == text.lower() and b"E-300" in changed:
            continue  # another way to write the same number
        with pytest.raises(SecurityError):
            opened(changed)


def test_flipped_bits_of_keys_certificates_and_requests_are_detected_or_harmless():
    key = make_key()
    request = make_request("north", key)
    certificate = issue(AUTHORITY, request, [])
    rng = random.Random(0)
    for text, use in (
        (key, lambda text: Pair(certificate, text).fits()),
        (certificate, lambda text: check_issued(text, AUTHORITY.certificate)),
        (request, common_name),
    ):
        expected = use(text)
        refused = 0
        for bit in rng.sample(range(8 * len(text)), 400):
            try:
                assert use(flipped(text, bit)) in (expected, False)
            except SecurityError:
                refused += 1
        assert refused > 200


def test_a_file_of_another_kind_version_or_nature_is_refused():
    text = seal("order", BODY, AUTHORITY)
    for changed, words in (
        (seal("admit", BODY, AUTHORITY), "kind 'admit', expected 'order'"),
        (text.replace(b"fedkin-order-1", b"fedkin-order-2"), "format version 2"),
        (b"[]", "does not name its kind"),
        (b"{}", "does not name its kind"),
        (b'{"format": "fedkin-order-1"}', "not a complete signed Fedkin file"),
        (b"\xff\xfe", "damaged"),
        (b"[" * 100_000, "damaged"),
        (b"", "damaged"),
        (seal("order", {"run": RUN}, AUTHORITY), "cannot be used: Object missing required field `b`"),
    ):
        with pytest.raises(SecurityError, match=words):
            opened(changed)


class Forged(Pair):
    """One that signs in another name."""

    name = "south"


def test_a_site_cannot_sign_for_another_site_or_for_the_organiser():
    north = site()
    for signer, words in (
        (Forged(north.certificate, north.key), "says that south signed it, but the certificate is that of north"),
        (Pair(AUTHORITY.certificate, north.key), "signature does not match"),
        (site(authority=make_authority("three hospitals")), "not issued by the authority"),
    ):
        with pytest.raises(SecurityError, match=words):
            opened(seal("order", BODY, signer))
    with pytest.raises(SecurityError, match="only the organiser"):
        opened(seal("order", BODY, north), by="organiser")
    with pytest.raises(SecurityError, match="only the site itself"):
        opened(seal("order", BODY, AUTHORITY), by="site")


def test_what_a_site_signed_counts_only_while_its_certificate_lasts_unless_it_may_have_ended():
    old = site(now=datetime.now(UTC) - timedelta(days=100))
    text = seal("order", BODY, old)
    with pytest.raises(SecurityError, match="ended on"):
        opened(text)
    assert opened(text, ended=True)[1] == old.certificate
    assert opened(text, now=datetime.now(UTC) - timedelta(days=50))[1] == old.certificate


def test_an_invitation_brings_its_authority_which_must_have_signed_it():
    body = {"run": RUN, "authority": AUTHORITY.certificate.decode()}
    assert unseal(seal("invite", body, AUTHORITY), Invitation) == (Invitation(**body), None)
    north = site()
    for posing, signer, words in (
        (body, make_authority("three hospitals"), "signature does not match"),
        (body, north, "says that north signed it"),
        (body | {"authority": north.certificate.decode()}, north, "not that of an authority"),
        ({"run": RUN}, AUTHORITY, "damaged"),
    ):
        with pytest.raises(SecurityError, match=words):
            unseal(seal("invite", posing, signer), Invitation)


def test_a_request_is_signed_with_the_key_that_it_asks_for_or_by_the_site_that_renews():
    key, north = make_key(), site()
    asked = make_request("north", key)
    body = {"run": RUN, "request": asked.decode()}
    assert opened(seal("request", body, Pair(asked, key)), form=Asking) == (Asking(**body), None)
    assert opened(seal("request", body, north), form=Asking) == (Asking(**body), north.certificate)
    for signer, words in (
        (Pair(asked, make_key()), "signature does not match"),
        (Pair(make_request("south", key), key), "south signed it, but the certificate is that of north"),
        (site("south"), "south signed it, but the certificate is that of north"),
        (site(authority=make_authority("x")), "not issued by the authority"),
    ):
        with pytest.raises(SecurityError, match=words):
            opened(seal("request", body, signer), form=Asking)
    with pytest.raises(SecurityError, match="instead of a certificate request"):
        issue(AUTHORITY, north.certificate, [])


# --- keys at rest -----------------------------------------------------------------------------------------------------


def test_keys_are_encrypted_with_the_passphrase_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, path, secret = make_key(), tmp_path / "site.key", tmp_path / "passphrase"
    write_key(path, key)
    assert path.read_bytes() == key == read_key(path)
    monkeypatch.setenv("FEDKIN_PASSPHRASE", "correct horse")
    assert read_key(path) == key  # one that was written before
    write_key(path, key)
    assert b"ENCRYPTED" in path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_key(path) == key
    monkeypatch.setenv("FEDKIN_PASSPHRASE", "wrong")
    with pytest.raises(SecurityError, match=r"site\.key cannot be decrypted: the passphrase is wrong"):
        read_key(path)
    monkeypatch.setenv("FEDKIN_PASSPHRASE", "")
    with pytest.raises(SecurityError, match="FEDKIN_PASSPHRASE must hold a passphrase of 1 to 1023 bytes, got 0"):
        write_key(path, key)
    monkeypatch.delenv("FEDKIN_PASSPHRASE")
    with pytest.raises(SecurityError, match=r"site\.key is encrypted: set FEDKIN_PASSPHRASE_FILE"):
        read_key(path)
    monkeypatch.setenv("FEDKIN_PASSPHRASE_FILE", str(secret))
    with pytest.raises(SecurityError, match=r"there is no file .*passphrase"):
        read_key(path)
    secret.write_text("correct horse\n")
    secret.chmod(0o644)
    with pytest.raises(SecurityError, match="others may read"):
        read_key(path)
    secret.chmod(0o600)
    assert read_key(path) == key
    path.write_bytes(flipped(path.read_bytes(), 8 * 100))
    with pytest.raises(SecurityError, match="or the file is damaged"):
        read_key(path)
