"""``fedkin peer`` with files that are missing, changed, of another device, or that do not fit: a line with the cure."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builders import small_problem
from federations import place, write_small_federation, write_tables
from fedkin.admm import Store, fed_admm
from fedkin.cli import main
from fedkin.data import Rows
from fedkin.federate import load_manifest, make_authority, read_result
from fedkin.federate.programs.program import exit_code
from fedkin.federate.programs.run import main as run_device
from processes import free_ports
from test_peer_mishaps import init, last_line, run

pytest.importorskip("zenoh")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]


def refused(device: Path, *words: str, code: int = 2) -> str:
    """Run a device that must not start; its one line has all ``words``."""
    ended = run(device)
    assert ended.returncode == code, ended.stderr
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert not (device / "result.npz").exists()
    for some in words:
        assert some in ended.stderr, (some, ended.stderr)
    return ended.stderr


def lonely(folder: Path, *options: str, devices: int = 2) -> Path:
    """A federation whose graph has no edges: each of its devices can run alone."""
    (folder / "lonely.csv").write_text("source,target\n")
    options = ("--graph", str(folder / "lonely.csv"), "--port", str(free_ports(devices)), *options)
    assert init(folder, *options, devices=devices) == 0
    return folder / "fed"


# --- who a device is --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("secure", [True, False])
def test_a_device_is_not_who_its_owners_file_says(tmp_path: Path, secure: bool) -> None:
    write_small_federation(tmp_path, secure=secure)
    own = place(tmp_path / "fed", "d0")
    (own / "device.json").write_text(json.dumps({"device": "d1", "share_result": True}))
    refused(own, "device.json says that this is d1, but plan.json is that of d0", "carry the directory of d1 again")
    for name in ("plan.json", "plan.sig"):
        shutil.copy(place(tmp_path / "fed", "d1") / name, own / name)
    if secure:
        refused(own, "says that this is d1, but device.crt is that of d0")


def test_nor_when_it_selects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_small_federation(tmp_path, select={"level": 0.05, "variance": "model"})
    own = place(tmp_path / "fed", "d0")
    (own / "device.json").write_text(json.dumps({"device": "d1"}))
    assert main(["peer", "select", str(own)]) == 2
    assert "says that this is d1, but plan.json is that of d0" in capsys.readouterr().err
    (own / "device.json").write_text("{}")
    assert main(["peer", "select", str(own)]) == 2
    assert "does not say which device it is" in capsys.readouterr().err


def test_the_state_of_another_device_is_refused(tmp_path: Path) -> None:
    fed = lonely(tmp_path, "--rounds", "5")
    assert run(place(fed, "d0")).returncode == 0
    kept = Store(place(fed, "d0") / "state.db", load_manifest(fed).run).load()
    assert kept is not None and kept.header["device"] == "d0"
    shutil.copy(place(fed, "d0") / "state.db", place(fed, "d1") / "state.db")
    refused(place(fed, "d1"), "state.db is the state of d0, not of d1")


def test_so_is_one_that_is_in_the_log_only(tmp_path: Path) -> None:
    """As after a kill before the first durable save."""
    fed = lonely(tmp_path, "--rounds", "5", "--checkpoint-every", "5")
    store = Store(place(fed, "d0") / "state.db", load_manifest(fed).run)
    store.save(3, {"theta": np.zeros(3)}, {"device": "d0"}, durable=False)
    for name in ("state.db", "state.db-wal"):
        shutil.copy(place(fed, "d0") / name, place(fed, "d1") / name)
    store.close()
    refused(place(fed, "d1"), "is the state of d0, not of d1")


def test_a_file_that_is_no_archive_is_not_to_be_trusted(tmp_path: Path) -> None:
    write_small_federation(tmp_path)
    own = place(tmp_path / "fed", "d0")
    (own / "rows.npz").write_text("site,x\nd0,1\n")
    assert "pickle" not in refused(own, "rows.npz is damaged, or not an NPZ file of rows")


# --- rows that were replaced ------------------------------------------------------------------------------------------


def other_rows(n: int, q: int, scale: float = 1.0) -> Rows:
    rng = np.random.default_rng(1)
    return Rows(scale * rng.normal(size=(n, q)), rng.normal(size=n))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (other_rows(12, 4), "rows.npz has 4 columns in X, but the manifest expects 3 (x0, x1, x2)"),
        (other_rows(3, 3), "rows.npz has 3 rows, but the plan asks for at least 4"),
        (other_rows(0, 3), "rows.npz has 0 rows, but the plan asks for at least 4"),
        (Rows(np.ones((12, 3))), "rows.npz has a target y that does not fit: device 'd0' has no target"),
    ],
)
@pytest.mark.parametrize("placement", ["peer", "central", "replicas"])
def test_rows_that_do_not_fit_the_manifest_are_refused(tmp_path: Path, rows: Rows, words: str, placement: str) -> None:
    fed = lonely(tmp_path, "--batch-size", "4", "--placement", placement)
    rows.save(place(fed, "d0") / "rows.npz")
    refused(place(fed, "d0"), words, "run fedkin peer init again on the new rows")
    assert words in last_line(place(fed, "d0"))["why"]


@pytest.mark.parametrize("n", [5, 30])
def test_all_rows_are_all_rows_also_of_a_file_that_was_replaced(tmp_path: Path, n: int) -> None:
    fed = lonely(tmp_path, "--rounds", "2000")
    rows = other_rows(n, 3)
    rows.save(place(fed, "d0") / "rows.npz")
    ended = run(place(fed, "d0"))
    assert ended.returncode == 0, ended.stderr
    expected = np.linalg.lstsq(rows.X, rows.y, rcond=None)[0]
    assert np.abs(read_result(place(fed, "d0")) - expected).max() < 1e-6


def test_another_number_of_rows_in_the_middle_of_a_run_is_refused(tmp_path: Path) -> None:
    """Where the state has a line for each row."""
    fed = lonely(tmp_path, "--rounds", "5", "--gradient", "saga", "--batch-size", "4")
    own = place(fed, "d0")
    assert run(own).returncode == 0
    (own / "result.npz").unlink()
    other_rows(14, 3).save(own / "rows.npz")
    refused(own, "state.db was written with another number of rows", "rows.npz", "peer init")


@pytest.mark.parametrize("placement", ["peer", "replicas"])
def test_who_diverges_is_told_what_helps(tmp_path: Path, placement: str) -> None:
    fed = lonely(tmp_path, "--rounds", "200", "--placement", placement)
    other_rows(12, 3, scale=1e6).save(place(fed, "d0") / "rows.npz")
    text = refused(place(fed, "d0"), "parameters of device 'd0' diverged", "fedkin peer init", "--batch-size")
    assert "smaller steps" not in text


# --- files that are missing or damaged --------------------------------------------------------------------------------


def garbage(path: Path) -> None:
    path.write_bytes(b"\x00\xff garbage")


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def foreign(path: Path) -> None:
    path.write_bytes(make_authority("foreign").certificate)


def changed(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"rounds": 5', b'"rounds": 6'))


def three(path: Path) -> None:
    path.write_bytes(b'{"transport": 3, "listen": 3, "access_control": {}}')


MANIFEST_CURE = "carry manifest.json, manifest.sig and ca.crt again from where peer init made them"
PLAN_CURE = "carry plan.json, plan.sig and ca.crt again from where peer init made them"
LINKS_CURE = "carry zenoh.json5 again from where peer init made it"
OWNER_CURE = 'device.json needs {"device": "NAME"}: write it, or carry it again'


@pytest.mark.parametrize(
    ("file", "damage", "words", "cure"),
    [
        ("manifest.json", changed, "manifest.json: the signature does not fit", MANIFEST_CURE),
        ("manifest.json", garbage, "manifest.json: the signature does not fit", MANIFEST_CURE),
        ("manifest.json", Path.unlink, "manifest.json is missing", MANIFEST_CURE),
        ("manifest.sig", emptied, "manifest.json: the signature does not fit", MANIFEST_CURE),
        ("manifest.sig", Path.unlink, "manifest.sig is missing", MANIFEST_CURE),
        ("ca.crt", foreign, "manifest.json: the signature does not fit", MANIFEST_CURE),
        ("ca.crt", garbage, "ca.crt, cannot be read as PEM", MANIFEST_CURE),
        ("ca.crt", Path.unlink, "ca.crt is missing", MANIFEST_CURE),
        ("plan.json", garbage, "plan.json: the signature does not fit", PLAN_CURE),
        ("plan.json", Path.unlink, "plan.json is missing", "from where peer init made it"),
        ("plan.sig", Path.unlink, "plan.sig is missing", PLAN_CURE),
        ("zenoh.json5", Path.unlink, "zenoh.json5 is missing", LINKS_CURE),
        ("zenoh.json5", garbage, "zenoh.json5 is not JSON", LINKS_CURE),
        ("zenoh.json5", three, "zenoh.json5 is not a configuration of zenoh", LINKS_CURE),
        ("device.json", Path.unlink, "device.json is missing", OWNER_CURE),
        ("device.json", garbage, "device.json is not JSON", OWNER_CURE),
    ],
)
def test_the_file_and_the_cure_are_named(
    tmp_path: Path, file: str, damage: Callable[[Path], None], words: str, cure: str
) -> None:
    write_small_federation(tmp_path)
    own = place(tmp_path / "fed", "d0")
    damage(own / file)
    text = refused(own, words, cure, str(own))
    assert "Errno" not in text and "cryptography.io" not in text


def test_a_links_file_that_zenoh_does_not_take(tmp_path: Path) -> None:
    write_small_federation(tmp_path, secure=False)
    own = place(tmp_path / "fed", "d0")
    (own / "zenoh.json5").write_text('{"listen": {"endpoints": ["nowhere"]}}')
    text = refused(own, "zenoh.json5 is not a configuration of zenoh", "carry it again")
    assert ".rs:" not in text


def test_a_manifest_of_a_federation_that_was_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_small_federation(tmp_path)
    changed(tmp_path / "fed" / "manifest.json")
    assert main(["peer", "status", str(tmp_path / "fed")]) == 2
    words = " ".join(capsys.readouterr().err.split())
    assert "put back a copy of manifest.json, manifest.sig and ca.crt (every device has one)" in words
    shutil.copy(place(tmp_path / "fed", "d1") / "manifest.json", tmp_path / "fed" / "manifest.json")
    assert main(["peer", "status", str(tmp_path / "fed")]) == 0


def test_a_notice_that_nobody_signed_is_named(tmp_path: Path) -> None:
    write_small_federation(tmp_path)
    own = place(tmp_path / "fed", "d0")
    (own / "left").mkdir()
    (own / "left" / "d1").write_text(json.dumps({"signature": "00" * 64}))
    refused(own, str(own / "left" / "d1"), "the signature does not fit", "remove it")


def own_certificate(folder: Path, *, authority: bool, usage: bool | None = None) -> list[str]:
    """Options for a certificate of one's own that is, or is not, that of an authority."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.x509.oid import NameOID

    key, now = Ed25519PrivateKey.generate(), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "own")])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now).not_valid_after(now + timedelta(days=9))
    builder = builder.add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
    if usage is not None:
        others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "crl_sign")
        flags = dict.fromkeys((*others, "encipher_only", "decipher_only"), False)
        builder = builder.add_extension(x509.KeyUsage(True, key_cert_sign=usage, **flags), critical=True)
    pem = serialization.Encoding.PEM
    (folder / "own.crt").write_bytes(builder.sign(key, None).public_bytes(pem))
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "own.key").write_bytes(key.private_bytes(pem, *form))
    return ["--ca-cert", str(folder / "own.crt"), "--ca-key", str(folder / "own.key")]


@pytest.mark.parametrize(("authority", "usage"), [(False, None), (True, False)])
def test_a_certificate_that_is_not_of_an_authority_is_refused(
    tmp_path: Path, authority: bool, usage: bool | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert init(tmp_path, *own_certificate(tmp_path, authority=authority, usage=usage)) == 2
    assert "own.crt is not the certificate of an authority" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "fed").exists()


@pytest.mark.parametrize("usage", [None, True])
def test_a_certificate_of_an_authority_is_taken(tmp_path: Path, usage: bool | None) -> None:
    assert init(tmp_path, *own_certificate(tmp_path, authority=True, usage=usage)) == 0


def test_files_that_are_no_certificate_or_key_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tables(small_problem(3), tmp_path)
    right, edges = own_certificate(tmp_path, authority=True), str(tmp_path / "edges.csv")
    for certificate, key, words in (
        (edges, edges, f"--ca-cert {edges} is not a certificate in PEM"),
        (right[1], edges, f"--ca-key {edges} is not a private key in PEM without a password"),
        (str(tmp_path / "none.crt"), edges, "none.crt cannot be read (No such file or directory)"),
    ):
        assert init(tmp_path, "--ca-cert", certificate, "--ca-key", key) == 2
        told = capsys.readouterr().err.replace("\n", " ")
        assert words in told.replace("  ", " "), told
        assert "cryptography.io" not in told


# --- where a device listens -------------------------------------------------------------------------------------------


def listening(folder: Path, host: str, port: int | None = None) -> Path:
    """The directory of d0, which shall listen on ``host``."""
    table = folder / "endpoints.csv"
    ports = free_ports(3)
    lines = [f"d0,{host},{port or ports}", *(f"d{u},127.0.0.1,{ports + u}" for u in (1, 2))]
    table.write_text("\n".join(["device,host,port", *lines]) + "\n")
    assert init(folder, "--endpoints", str(table)) == 0
    return place(folder / "fed", "d0")


def test_an_address_of_another_machine_is_told_as_such(tmp_path: Path) -> None:
    own = listening(tmp_path, "192.0.2.9")
    text = refused(own, "192.0.2.9, the host of this device in the endpoints, is not an address of this machine")
    assert "--endpoints" in text and "Behind NAT and in containers" in text
    assert ".rs" not in text and "ss -ltnp" not in text


def test_a_name_that_nobody_knows_is_told_as_such(tmp_path: Path) -> None:
    own = listening(tmp_path, "north.invalid")
    text = refused(own, "north.invalid, the host of this device", "is not a name that this machine knows", code=4)
    assert ".rs" not in text


def test_a_port_in_use_is_cured_where_it_was_given(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        own = listening(tmp_path, "127.0.0.1", holder.getsockname()[1])
        text = refused(own, "another process uses the port", "its line in the table of --endpoints", code=4)
    assert ".rs" not in text and "not an address" not in text


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("999.0.0.1", "'999.0.0.1' is neither a name nor an address"),
        ("10.0.0", "'10.0.0' is neither a name nor an address"),
        ("10.0.0.01", "'10.0.0.01' is neither a name nor an address"),
        ("a..b", "'a..b' is neither a name nor an address"),
        ("-a.example", "'-a.example' is neither a name nor an address"),
        ("x" * 64, "is neither a name nor an address"),
        ("0.0.0.0", "nobody can connect to 0.0.0.0"),
        ("::", "nobody can connect to ::"),
    ],
)
def test_hosts_that_cannot_be_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], host: str, words: str
) -> None:
    table = tmp_path / "endpoints.csv"
    table.write_text(f"device,host,port\nd0,{host},7447\nd1,b,7447\nd2,c,7447\n")
    assert init(tmp_path, "--endpoints", str(table)) == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "fed").exists()


def test_a_device_may_listen_elsewhere_than_where_others_connect(tmp_path: Path) -> None:
    """As behind NAT and in containers: the owner changes zenoh.json5, and nobody else has to know."""
    own = listening(tmp_path, "127.0.0.1")
    links = json.loads((own / "zenoh.json5").read_text())
    links["listen"]["endpoints"] = [one.replace("127.0.0.1", "0.0.0.0") for one in links["listen"]["endpoints"]]
    (own / "zenoh.json5").write_text(json.dumps(links))
    rounds = load_manifest(tmp_path / "fed").rounds
    assert main(["peer", "up", str(tmp_path / "fed"), "--give-up", "30"]) == 0
    theta = np.stack([read_result(place(tmp_path / "fed", f"d{u}")) for u in range(3)])
    problem = small_problem(3, lam=0.1)
    assert theta.tobytes() == fed_admm(problem, rounds, backend="numpy").theta.tobytes()


# --- directories that cannot be written -------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_read_only_directory_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    write_small_federation(tmp_path)
    own = place(tmp_path / "fed", "d0")
    usual = os.open

    def read_only(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(number, os.strerror(number), str(path))
        return usual(path, flags, *rest, **more)

    monkeypatch.setattr("fedkin.federate.programs.program.os.open", read_only)
    assert run_device([str(own)]) == 2
    text = capsys.readouterr().err
    assert f"{own} cannot be written ({os.strerror(number)})" in text and "make it writable" in text
    assert "Errno" not in text
    assert exit_code(OSError(number, "")) == 2
    assert exit_code(OSError(errno.ENOSPC, "")) == 4
