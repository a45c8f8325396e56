"""Certificates, signed files, private files: what is believed, and what is not."""

from __future__ import annotations

import random
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from fedkin.federate.envelope import (
    Signer,
    seal,
    unseal,
    unseal_invitation,
    unseal_request,
)
from fedkin.federate.trust import (
    Pair,
    SecurityError,
    belong_together,
    check_issued,
    common_name,
    issue,
    make_authority,
    make_key,
    make_request,
    read_authority_files,
    validity,
)
from flips import flipped

AUTHORITY = make_authority("three hospitals")
BODY = {"b": [[1.5, -2.0], [3.0, 1e-300]], "a": {"z": None, "y": "Zürich \u2603", "x": True}, "empty": []}


def site(name: str = "north", authority: Pair = AUTHORITY, **options) -> Pair:
    key = make_key()
    return Pair(issue(authority, make_request(name, key), ["127.0.0.1"], **options), key)


@pytest.mark.parametrize(("fine", "when", "words"), [(89, 91, "ended on .*renew"), (-0.9, -2, "begins on .*clock")])
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
    assert repr(site()) == "Pair('north')"  # the key is not shown


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
    assert unseal(seal("order", BODY, Signer.authority(own)), "order", own.certificate, by="organiser").body == BODY
    # a site's certificate does not outlive the authority's
    assert validity(site(authority=own).certificate)[1] == validity(own.certificate)[1]
    key.chmod(0o644)
    with pytest.raises(SecurityError, match="chmod"):
        read_authority_files(certificate, key)


@pytest.mark.parametrize("by", ["authority", "site"])
def test_every_flipped_bit_of_a_sealed_file_is_detected(by):
    signer = Signer.authority(AUTHORITY) if by == "authority" else Signer.site(site())
    text = seal("order", BODY, signer)
    for bit in range(8 * len(text)):
        changed = flipped(text, bit)
        if changed.lower() == text.lower() and b"E-300" in changed:
            continue  # another way to write the same number
        with pytest.raises(SecurityError):
            unseal(changed, "order", AUTHORITY.certificate)


def test_flipped_bits_of_keys_certificates_and_requests_are_detected_or_harmless():
    key = make_key()
    request = make_request("north", key)
    certificate = issue(AUTHORITY, request, [])
    rng = random.Random(0)
    for text, use in (
        (key, lambda text: belong_together(certificate, text)),
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
    text = seal("order", BODY, Signer.authority(AUTHORITY))
    for changed, words in (
        (text, "kind 'order', expected 'admit'"),
        (text.replace(b"fedkin-order-1", b"fedkin-admit-2"), "format version 2"),
        (b"[]", "does not say which"),
        (b"{}", "does not say which"),
        (b'{"format": "fedkin-admit-1"}', "not a whole signed file"),
        (b"\xff\xfe", "damaged"),
        (b"[" * 100_000, "damaged"),
        (b"", "damaged"),
    ):
        with pytest.raises(SecurityError, match=words):
            unseal(changed, "admit", AUTHORITY.certificate)


def test_a_site_cannot_sign_for_another_site_or_for_the_organiser():
    north = site()
    forged = Signer("south", north.key, north.certificate)
    with pytest.raises(SecurityError, match="says that south signed it, but the certificate is that of north"):
        unseal(seal("summary", BODY, forged), "summary", AUTHORITY.certificate)
    with pytest.raises(SecurityError, match="only the organiser"):
        unseal(seal("order", BODY, Signer.site(north)), "order", AUTHORITY.certificate, by="organiser")
    with pytest.raises(SecurityError, match="signature does not fit"):
        as_authority = Signer(common_name(AUTHORITY.certificate), north.key)
        unseal(seal("order", BODY, as_authority), "order", AUTHORITY.certificate)
    stranger = make_authority("three hospitals")
    with pytest.raises(SecurityError, match="not issued by the authority"):
        unseal(seal("summary", BODY, Signer.site(site(authority=stranger))), "summary", AUTHORITY.certificate)


def test_what_a_site_signed_counts_only_while_its_certificate_lasts_unless_it_may_have_ended():
    old = site(now=datetime.now(UTC) - timedelta(days=100))
    text = seal("notice", BODY, Signer.site(old))
    with pytest.raises(SecurityError, match="ended on"):
        unseal(text, "notice", AUTHORITY.certificate)
    assert unseal(text, "notice", AUTHORITY.certificate, ended=True).signer == "north"
    assert unseal(text, "notice", AUTHORITY.certificate, now=datetime.now(UTC) - timedelta(days=50)).signer == "north"


def test_an_invitation_brings_its_authority_which_must_have_signed_it():
    body = {"authority": AUTHORITY.certificate.decode()}
    assert unseal_invitation(seal("invite", body, Signer.authority(AUTHORITY)), "invite") == body
    other = make_authority("three hospitals")
    with pytest.raises(SecurityError, match="signature does not fit"):
        unseal_invitation(seal("invite", body, Signer.authority(other)), "invite")
    north = site()
    posing = {"authority": north.certificate.decode()}
    with pytest.raises(SecurityError, match="not that of an authority"):
        unseal_invitation(seal("invite", posing, Signer("north", north.key)), "invite")


def test_a_request_is_signed_with_the_key_that_it_asks_for_or_by_the_site_that_renews():
    key, north = make_key(), site()
    body = {"request": make_request("north", key).decode()}
    first = unseal_request(seal("request", body, Signer("north", key)), AUTHORITY.certificate)
    assert (first.signer, first.certificate) == ("north", None)
    renewal = unseal_request(seal("request", body, Signer.site(north)), AUTHORITY.certificate)
    assert renewal.certificate == north.certificate
    for signer, words in (
        (Signer("north", make_key()), "signature does not fit"),
        (Signer("south", key), "south signed it, but it asks for a certificate for north"),
        (Signer.site(site("south")), "south signed it, but it asks for a certificate for north"),
        (Signer.site(site(authority=make_authority("x"))), "not issued by the authority"),
    ):
        with pytest.raises(SecurityError, match=words):
            unseal_request(seal("request", body, signer), AUTHORITY.certificate)
