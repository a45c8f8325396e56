"""Invite, join, admit, order, renew, expel, leave: what organiser and sites write, read, and refuse."""

from __future__ import annotations

import io
import json
import shutil
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

import heart
from fedkin.cli import main
from fedkin.data import Rows
from fedkin.errors import DataError, FedkinError
from fedkin.federate import Contract, Organiser, SecurityError, Site, read_charter, read_invite, received, sharing
from fedkin.federate.messages import Notice, Request, seal
from fedkin.federate.trust import (
    Pair,
    common_name,
    fingerprint,
    issue,
    link_name,
    make_authority,
    make_key,
    make_request,
    validity,
)


@pytest.fixture(scope="module")
def four(tmp_path_factory) -> Organiser:
    """A federation whose four sites are admitted; tests do not change it."""
    made = heart.organiser(tmp_path_factory.mktemp("four"))
    for name in heart.SITES:
        heart.admitted(made, name)
    return made


def words_in(folder: Path) -> str:
    """The content of all files in a directory, decoded as far as possible."""
    return "\n".join(path.read_bytes().decode(errors="replace") for path in folder.rglob("*") if path.is_file())


def test_an_authority_of_ones_own_whose_key_is_elsewhere(tmp_path):
    own = make_authority("ministry")
    made = heart.organiser_without_invites(tmp_path, authority=own)
    assert not (made.directory / "authority.key").exists()
    with pytest.raises(SecurityError, match="--ca-key"):
        made.invite()
    key = tmp_path / "ca.key"
    key.write_bytes(own.key)
    key.chmod(0o600)
    made = Organiser.read(made.directory, key)
    made.invite()
    done = heart.joined(made, "north")
    assert fingerprint(done.authority) == fingerprint(own.certificate)
    Site.read(done.directory).accept(made.admit(done.request).path)
    key.write_bytes(make_authority("ministry").key)
    with pytest.raises(SecurityError, match="is not the key of the authority"):
        made.order(lam=1.0)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("a,127.0.0.1,0", "site 'a': the port must be a whole number"),
        ("a,0.0.0.0,7447", "0.0.0.0 is not an address to connect to"),
        ("a,1.2.3,7447", "the host '1.2.3' is neither a name nor an address"),
        ("a,x.org,7447\nb,x.org,7447", "sites 'a' and 'b' both have x.org:7447"),
        ("a,x.org,7447\na,y.org,7448", "two lines for site 'a'"),
    ],
)
def test_a_list_of_sites_with_a_mistake_is_refused(tmp_path, lines, words):
    (tmp_path / "c.toml").write_text(heart.CONTRACT)
    (tmp_path / "sites.csv").write_text(f"site,host,port\n{lines}\n")
    with pytest.raises(DataError, match=words):
        Organiser.create(tmp_path / "c.toml", tmp_path / "heart", sites=tmp_path / "sites.csv")


def test_a_contract_is_shown_before_joining(tmp_path, capsys):
    made = heart.organiser(tmp_path)
    assert main(["site", "check", str(heart.invite_of(made, "north"))]) == 0
    assert Contract.from_toml(capsys.readouterr().out) == made.contract


def test_damaged_rows_are_named(tmp_path):
    place = heart.admitted(heart.organiser(tmp_path), "north")
    Rows.load(place / "rows.npz")
    content = bytearray((place / "rows.npz").read_bytes())
    content[700] ^= 1
    (place / "rows.npz").write_bytes(content)
    with pytest.raises(DataError, match=r"rows\.npz is damaged"):
        Site.read(place).rows()


def test_the_same_authority_may_organise_two_federations_whose_files_do_not_mix(tmp_path):
    own = make_authority("ministry")
    first, second = (heart.organiser_without_invites(tmp_path / name, authority=own) for name in "ab")
    key = tmp_path / "ca.key"
    key.write_bytes(own.key)
    key.chmod(0o600)
    first, second = (Organiser.read(made.directory, key) for made in (first, second))
    first.invite()
    second.invite()
    done, other = heart.joined(first, "north"), heart.joined(second, "north")
    with pytest.raises(SecurityError, match="another federation"):
        second.admit(done.request)
    for path in (second.admit(other.request).path, second.expel("south"), second.order(lam=1.0)[0][0]):
        with pytest.raises(SecurityError, match="another federation"):
            Site.read(done.directory).accept(path)


def test_a_request_in_the_name_of_another_site_is_refused(tmp_path):
    made = heart.organiser(tmp_path)
    south = json.loads(heart.joined(made, "south").request.read_text())["body"]
    key = make_key()
    forged = south | {"site": "north", "request": make_request("north", key).decode()}
    (tmp_path / "forged").write_bytes(seal("request", forged, Pair(make_request("north", key), key)))
    with pytest.raises(SecurityError, match=r"does not answer .*north\.invite"):
        made.admit(tmp_path / "forged")
    wrong = south | {"site": "north"}
    signer = Pair(south["request"].encode(), (tmp_path / "south/site.key").read_bytes())
    (tmp_path / "forged").write_bytes(seal("request", wrong, signer))
    with pytest.raises(SecurityError, match="south signed it"):
        made.admit(tmp_path / "forged")


def test_an_expired_certificate_counts_no_more(tmp_path):
    made = heart.organiser(tmp_path)
    done = heart.joined(made, "north")
    long_ago = datetime.now(UTC) - timedelta(days=95)
    old = made.admit(done.request, now=long_ago)
    with pytest.raises(SecurityError, match="ended on"):
        Site.read(done.directory).accept(old.path)
    (done.directory / "admit.json").write_bytes(old.path.read_bytes())
    (done.directory / "admit.json").chmod(0o600)
    with pytest.raises(SecurityError, match=r"admit\.json: the certificate of north ended on"):
        Site.read(done.directory).pair()
    with pytest.raises(SecurityError, match=r"ended on .*--again"):
        made.admit(done.request)
    Site.read(done.directory).accept(made.admit(done.request, again=True).path)
    Site.read(done.directory).pair()


def test_an_old_key_cannot_renew_any_more(tmp_path):
    made = heart.organiser(tmp_path)
    place = heart.admitted(made, "north")
    before = Site.read(place)
    request, _ = Site.read(place).renew()
    Site.read(place).accept(made.admit(request).path)
    body = json.loads(request.read_text())["body"]
    body["request"] = make_request("north", make_key()).decode()
    (tmp_path / "stolen").write_bytes(seal("request", body, before.pair()))
    with pytest.raises(SecurityError, match="with an old key"):
        made.admit(tmp_path / "stolen")


def test_a_crash_between_the_two_files_of_a_renewal_does_no_harm(tmp_path):
    made = heart.organiser(tmp_path)
    place = heart.admitted(made, "north")
    answer = made.admit(Site.read(place).renew()[0])
    (place / "admit.json").write_bytes(answer.path.read_bytes())  # and next.key was not renamed
    site = Site.read(place)
    assert site.key == (place / "next.key").read_bytes()
    Site.read(place).accept(answer.path)
    assert (place / "site.key").read_bytes() == site.key


def test_a_thief_of_a_sites_directory_learns_of_that_site_and_its_neighbours_names_only(four):
    stolen = words_in(four.directory.parent / "north")
    for name in ("south", "east", "west"):
        table = (four.directory.parent / f"{name}.csv").read_text().split()[1:]
        assert not any(cell in stolen for line in table for cell in line.split(",") if len(cell) > 4)
        place = four.directory.parent / name
        assert (place / "site.key").read_text().splitlines()[1] not in stolen
    assert (four.directory / "authority.key").read_text().splitlines()[1] not in stolen
    assert "127.0.0.1:7449" not in stolen  # east is no neighbour


def test_with_a_stolen_key_nothing_can_be_signed_but_for_that_site_and_nothing_after_it_is_admitted_anew(tmp_path):
    made = heart.organiser(tmp_path)
    stolen = heart.admitted(made, "north")
    thief = Site.read(stolen).pair()
    south = heart.admitted(made, "south")
    order = {"run": made.charter.run, "contract": made.contract.digest, "revision": 9, "lam": 0.0}
    (tmp_path / "forged").write_bytes(seal("order", order, thief))
    with pytest.raises(SecurityError, match="only the organiser"):
        Site.read(south).accept(tmp_path / "forged")
    first = (stolen / "north.request").read_bytes()
    fresh = heart.joined(made, "north", tmp_path / "new laptop")
    Site.read(fresh.directory).accept(made.admit(fresh.request, again=True).path)
    assert made.keys().lost == (fingerprint(Site.read(stolen).certificate),)
    for again in (False, True):
        with pytest.raises(SecurityError, match="north has lost the key of this request"):
            made.admit(Site.read(stolen).renew()[0], again=again)
        (tmp_path / "first").write_bytes(first)
        with pytest.raises(SecurityError, match="north has lost the key of this request"):
            made.admit(tmp_path / "first", again=again)
    with pytest.raises(SecurityError, match="was signed with a key that north has since lost"):
        made.admit(Site.read(stolen).leave())
    assert made.out() == frozenset()


def test_after_a_loss_no_earlier_key_of_the_site_counts(tmp_path):
    """A thief who renewed first had two keys, and only the second was lost: the first could make the site leave."""
    made = heart.organiser(tmp_path)
    north, south = heart.admitted(made, "north"), heart.admitted(made, "south")
    first = Site.read(north).pair()
    shutil.copytree(north, tmp_path / "thief")
    thief = Site.read(tmp_path / "thief")
    thief.accept(made.admit(thief.renew()[0]).path)
    fresh = heart.joined(made, "north", tmp_path / "new laptop")
    made.admit(fresh.request, again=True)
    Site.read(south).take_keys((made.directory / "keys.json").read_bytes())
    notice = Notice(run=made.charter.run, site="north", what="left").write(tmp_path / "n.notice", first)
    with pytest.raises(SecurityError, match="was signed with a key that north has since lost"):
        made.admit(notice)
    with pytest.raises(SecurityError, match="was signed with a key that north has since lost"):
        Site.read(south).accept(notice)
    assert len(made.keys().lost) == 2 and not made.out()


@pytest.mark.parametrize(
    "endpoint", ["tls/127.0.0.1:7655#enable_mtls=false", "tls/10.0.0.5:22?x", "tcp/a:1", "tls/a b:1"]
)
def test_addresses_with_options_of_the_transport_are_refused(tmp_path, endpoint):
    """They switched off the certificates of connections."""
    made = heart.organiser(tmp_path)
    given = read_invite(heart.invite_of(made, "north"))
    changed = msgspec.structs.replace(given, site=msgspec.structs.replace(given.site, endpoint=endpoint))
    with pytest.raises(SecurityError, match="endpoint"):
        read_invite(changed.write(tmp_path / "bad.invite", made.signing()))


def test_an_expelled_site_is_out_for_good(tmp_path):
    made = heart.organiser(tmp_path)
    south = heart.admitted(made, "south")
    path = made.expel("south")
    with pytest.raises(SecurityError, match="expelled permanently"):
        made.admit(Site.read(south).renew()[0])
    with pytest.raises(DataError, match="expelled permanently"):
        made.invite(["south"])
    north = heart.admitted(made, "north")  # the newest list of keys comes along
    assert Site.read(north).out == {"south"}
    Site.read(south).accept(path)
    with pytest.raises(SecurityError, match="expelled"):
        Site.read(south).pair()
    assert made.order(lam=1.0)[0][1] == ["north", "east", "west"]


def test_forged_notices_are_refused(tmp_path):
    made = heart.organiser(tmp_path)
    north, south = (heart.admitted(made, name) for name in ("north", "south"))
    signer = Site.read(south).pair()
    body = {"run": made.charter.run, "site": "west", "what": "left"}
    stranger = make_authority("heart organiser")
    key = make_key()
    posing = Pair(issue(stranger, make_request("west", key), []), key)
    for forged, by in (
        (body, signer),
        (body | {"site": "south", "what": "expelled"}, signer),
        (body, stranger),
        (body, posing),
    ):
        (tmp_path / "west.notice").write_bytes(seal("notice", forged, by))
        with pytest.raises(SecurityError, match=r"west\.notice"):
            Site.read(north).accept(tmp_path / "west.notice")
    (north / "notices" / "west.notice").write_bytes((tmp_path / "west.notice").read_bytes())
    with pytest.raises(SecurityError, match=r"notices/west\.notice"):
        Site.read(north)


@pytest.mark.parametrize("content", [b"", b"{}", b"\x00\xff", b'{"format": "fedkin-invite-1"}'])
def test_what_is_no_file_of_fedkin_is_refused_by_everybody(four, tmp_path, content):
    path = tmp_path / "x"
    path.write_bytes(content)
    for use in (
        lambda: Site.read(four.directory.parent / "north").accept(path),
        lambda: four.admit(path),
        lambda: read_invite(path),
        lambda: read_charter(path),
    ):
        with pytest.raises(FedkinError, match=str(path)):
            use()


def test_a_lost_key_gets_no_link_and_its_notices_count_for_nothing(tmp_path):
    """After ``admit --again`` the copy of a site's directory went on listening and speaking at its neighbours."""
    text = heart.CONTRACT.replace("[features]", 'method = "fused"\n[features]') + "[rounds]\nlam = 0.1\n"
    made = heart.organiser(tmp_path, text, names=("north", "south"))
    north, south = (heart.admitted(made, name) for name in ("north", "south"))
    older = (made.directory / "keys.json").read_bytes()
    shutil.copytree(north, tmp_path / "stolen" / "north")
    thief, (request, _) = Site.read(tmp_path / "stolen" / "north"), Site.read(north).renew()
    done = made.admit(request, again=True)
    Site.read(north).accept(done.path)
    assert "valid from now on" in Site.read(south).accept(made.directory / "keys.json")
    assert "already" in Site.read(south).accept(made.directory / "keys.json")
    new = Site.read(north)
    keys, number = Site.read(south).keys, new.invite.site.number
    assert common_name(thief.certificate) != common_name(new.certificate) == link_name("north", keys.keys[number])
    assert keys.keys[number] == new.key_fingerprint and keys.lost == (thief.key_fingerprint,)
    left = thief.leave()
    with pytest.raises(SecurityError, match="was signed with a key that north has since lost"):
        Site.read(south).accept(left)
    shutil.copy(left, south / "notices" / "north.notice")
    assert Site.read(south).out == frozenset()
    # the copy itself stops once it hears of the list, and nobody but the organiser signs one
    forged, body = tmp_path / "forged.json", {"run": made.charter.run, "revision": 99, "time": "", "keys": keys.lost}
    forged.write_bytes(seal("keys", body, thief.pair()))
    with pytest.raises(SecurityError, match=r"forged\.json.*only the organiser may sign it"):
        Site.read(south).accept(forged)
    thief.accept(made.directory / "keys.json")
    with pytest.raises(SecurityError, match="its key was lost"):
        Site.read(thief.directory).pair()
    Site.read(south).take(older)  # a replay
    assert Site.read(south).keys.revision == made.keys().revision > 2
    # the new key is that of the site in everything
    shutil.copy(sharing.share(north).path, made.directory / "summaries")
    assert list(received.read_summaries(made.directory / "summaries").summaries) == ["north"]
    assert Site.read(north).renew()[1] and made.admit(Site.read(north).request).path.exists()
    assert "has left" in Site.read(south).accept(Site.read(north).leave())


def test_a_federation_with_encrypted_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command needs the passphrase, and without it no key is on the disk in plain text."""
    monkeypatch.setenv("FEDKIN_PASSPHRASE", "correct horse")
    made = heart.organiser(tmp_path)
    place = heart.admitted(made, "north")
    Site.read(place).renew()
    keys = sorted(tmp_path.rglob("*.key"))
    assert {path.name for path in keys} == {"authority.key", "site.key", "next.key"}
    assert all(b"ENCRYPTED" in path.read_bytes() for path in keys)
    assert not any(b"BEGIN PRIVATE KEY" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert Site.read(place).pair().fits()
    monkeypatch.delenv("FEDKIN_PASSPHRASE")
    with pytest.raises(SecurityError, match=r"site\.key is encrypted"):
        Site.read(place)
    with pytest.raises(SecurityError, match=r"authority\.key is encrypted"):
        made.signing()


FUSED = heart.CONTRACT.replace("[features]", 'method = "fused"\n[features]') + "[rounds]\nlam = 0.1\n"


@pytest.mark.parametrize(("text", "days"), [(FUSED, 14), (heart.CONTRACT, 90)])
def test_certificates_that_open_links_last_days_and_the_organiser_renews_them_for_the_same_key(tmp_path, text, days):
    made = heart.organiser(tmp_path, text, names=("north", "south", "east"))
    now, places = datetime.now(UTC), {name: heart.admitted(made, name) for name in ("north", "south", "east")}
    until = validity(Site.read(places["north"]).certificate)[1]
    assert timedelta(days=days - 0.01) < until - now < timedelta(days=days + 0.01)
    assert made.renew() == []
    for name in ("north", "south"):
        request = places[name] / f"{name}.request"
        Site.read(places[name]).accept(made.admit(request, again=True, now=now - timedelta(days=0.9 * days)).path)
        assert Site.read(places[name]).renewal_due()
    made.expel("south")
    before, revision = Site.read(places["north"]), made.keys().revision
    assert made.renew() == ["north"] and made.keys().revision == revision
    Site.read(places["north"]).accept(made.directory / "admitted" / "north.admit")
    after = Site.read(places["north"])
    assert after.key == before.key and validity(after.certificate)[1] > validity(before.certificate)[1]
    assert not after.renewal_due() and made.renew() == []
    assert made.admission("north", made.keys().revision) is None


class Terminal(io.StringIO):
    """What somebody types."""

    def isatty(self) -> bool:
        return True


def test_at_a_terminal_join_and_admit_ask_for_the_fingerprint(tmp_path, monkeypatch, capsys):
    """Somebody who intercepted an invite was admitted unless the organiser thought of ``--fingerprint``."""
    made = heart.organiser(tmp_path)
    place, invite = tmp_path / "new" / "north", made.directory / "invites" / "north.invite"
    join = ["site", "join", str(invite), "--data", str(heart.write_table(tmp_path / "t.csv")), "--into", str(place)]
    admit = ["federation", "admit", str(made.directory), str(place / "north.request")]

    def run(words: list[str], typed: str) -> int:
        monkeypatch.setattr(sys, "stdin", Terminal(f"{typed}\n"))
        return main(words)

    wrong, right = "-".join(["1234"] * 8), fingerprint(made.authority)
    assert run(join, wrong) == 2 and not place.exists()
    assert run(join, f"\n{wrong}") == 2
    assert "type it, or press Ctrl-C: nothing has been created" in " ".join(capsys.readouterr().err.split())
    assert run(join, right.replace("-", " ").upper()) == 0
    assert run(admit, wrong) == 2 and not (made.directory / "admitted" / "north.admit").exists()
    assert run(admit, Site.read(place).key_fingerprint) == 0
    Site.read(place).accept(made.directory / "admitted" / "north.admit")
    path, _ = Site.read(place).renew()
    following = fingerprint(read_invite(invite).read(path, Request)[0].request.encode())
    assert run(admit, wrong) == 2  # a thief with a copy of the old key can sign this, too
    assert run(admit, following) == 0
    assert run([*admit, "--again"], wrong) == 2
    assert "nobody compared" not in capsys.readouterr().err
    assert run([*admit, "--again", "--yes"], wrong) == 0
    assert "nobody compared the fingerprint: before you send" in " ".join(capsys.readouterr().err.split())
    monkeypatch.setattr(sys, "stdin", io.StringIO())  # without a terminal nobody can be asked
    assert main([*admit, "--again"]) == main([*join[:-1], str(tmp_path / "other")]) == 2
