"""``fedkin peer`` when files are missing, damaged or of another run: one line that names the file and the cure."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
from msgspec.structs import replace

from builders import small_problem
from federations import place, write_small_federation, write_tables
from fedkin.cli import main
from fedkin.data import Federation, Rows
from fedkin.errors import DataError
from fedkin.federate import collect, load_manifest, make_authority, read_departures, read_endpoints
from fedkin.federate.programs.run import write_presence, write_result
from fedkin.federate.setup.directory import result_of
from processes import capped, free_ports

pytest.importorskip("zenoh")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]


def run(device: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """``fedkin peer run`` as systemd would call it."""
    return subprocess.run(
        [sys.executable, "-m", "fedkin.federate.programs.run", str(device), "--give-up", "2", *options],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=capped,
        check=False,
    )


def last_line(device: Path) -> dict[str, Any]:
    """The last line of a device's log."""
    found: dict[str, Any] = json.loads((device / "log.jsonl").read_text().splitlines()[-1])
    return found


# --- results of other runs --------------------------------------------------------------------------------------------


def test_collect_takes_results_of_this_run_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = write_small_federation(tmp_path, 5)
    devices = [place(tmp_path / "fed", f"d{u}") for u in range(5)]
    theta = np.arange(3.0)
    write_result(devices[0], theta, theta, manifest, 0)
    write_result(devices[1], theta, theta, replace(manifest, run="0123456789abcdef"), 1)
    write_result(devices[2], theta, theta, manifest, 0)  # carried to the wrong place
    write_result(devices[3], theta, theta, replace(manifest, revision=1), 3)
    write_result(devices[4], theta, theta, manifest, 4)
    whole = (devices[4] / "result.npz").read_bytes()
    (devices[4] / "result.npz").write_bytes(whole[: len(whole) // 2])
    found, reasons = collect(tmp_path / "fed", manifest)
    assert list(found) == [0]
    assert f"is of run 0123456789abcdef, not of run {manifest.run}" in reasons[1]
    assert "is of device d0, not of device d2" in reasons[2]
    assert "is of revision 1, not of revision 0" in reasons[3]
    assert "result.npz cannot be read" in reasons[4]
    assert main(["peer", "collect", str(tmp_path / "fed"), "--out", str(tmp_path / "coef.csv")]) == 0
    with (tmp_path / "coef.csv").open() as file:
        assert [line[0] for line in csv.reader(file)] == ["device", "d0"]
    assert "is of run 0123456789abcdef" in " ".join(capsys.readouterr().err.split())


def test_a_result_without_its_run_is_not_taken(tmp_path: Path) -> None:
    manifest = write_small_federation(tmp_path)
    device = place(tmp_path / "fed", "d0")
    np.savez(device / "result.npz", theta=np.zeros(3), last=np.zeros(3))
    with pytest.raises(DataError, match="does not say of which run"):
        result_of(device, manifest, 0)


# --- files that are missing or damaged --------------------------------------------------------------------------------


def cut(path: Path) -> None:
    """Leave only the first half of a file."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize(
    ("file", "damage", "words"),
    [
        ("device.key", Path.unlink, "device.key is missing"),
        ("device.crt", Path.unlink, "device.crt is missing"),
        ("device.crt", cut, "device.crt is damaged"),
        ("device.key", cut, "device.crt or device.key is damaged"),
        ("rows.npz", Path.unlink, "rows.npz is missing"),
        ("rows.npz", cut, "rows.npz is damaged"),
        ("ca.crt", cut, "ca.crt, cannot be read"),
        ("state.db", lambda path: path.write_bytes(b"PK\x03\x04 and then the power went"), "state.db"),
    ],
)
def test_a_damaged_file_is_named_and_not_tried_again(tmp_path: Path, file: str, damage: Any, words: str) -> None:
    write_small_federation(tmp_path)
    device = place(tmp_path / "fed", "d0")
    damage(device / file)
    ended = run(device)
    assert ended.returncode == 2, ended.stderr
    assert words in ended.stderr
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    line = last_line(device)
    assert line["level"] == "error"
    assert words in line["why"]


def test_rows_that_do_not_fit_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "rows.npz"
    X = np.ones((4, 2))
    X[2, 1] = np.nan
    for rows, words in (
        (Rows(X, np.ones(4)), "X has a number that is not finite in row 3, counted from 1"),
        (Rows(np.ones((4, 2)), np.ones(3)), "y has 3 values, but X has 4 rows"),
        (Rows(np.ones(4)), "X has shape"),
    ):
        rows.save(path)
        with pytest.raises(DataError, match=words):
            Rows.load(path)


def test_the_directory_of_a_federation_is_not_that_of_a_device(tmp_path: Path) -> None:
    write_small_federation(tmp_path)
    ended = run(tmp_path / "fed")
    assert ended.returncode == 2
    assert f"give that of a device, {tmp_path / 'fed' / 'devices'}/NAME" in ended.stderr


def test_a_device_directory_that_others_may_write_is_refused(tmp_path: Path) -> None:
    write_small_federation(tmp_path)
    device = place(tmp_path / "fed", "d0")
    device.chmod(0o770)
    ended = run(device)
    assert ended.returncode == 2
    assert f"chmod go= {device}" in ended.stderr


# --- devices that have left -------------------------------------------------------------------------------------------


def own_authority(folder: Path, name: str = "own") -> Path:
    """Certificate and key of an authority, as ``NAME.crt`` and ``NAME.key``."""
    made = make_authority(name)
    (folder / f"{name}.crt").write_bytes(made.certificate)
    (folder / f"{name}.key").write_bytes(made.key)
    return folder / f"{name}.key"


def init(folder: Path, *options: str, devices: int = 3) -> int:
    """``fedkin peer init`` from tables."""
    write_tables(small_problem(devices), folder)
    command = ["peer", "init", str(folder / "fed"), "--data", str(folder / "rows.csv"), "--device", "site"]
    command += ["--target", "y", "--graph", str(folder / "edges.csv"), "--lam", "0.1", "--no-intercept"]
    return main([*command, *options])


def test_leave_with_an_authority_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = own_authority(tmp_path)
    assert init(tmp_path, "--ca-cert", str(tmp_path / "own.crt"), "--ca-key", str(key)) == 0
    leave = ["peer", "leave", str(tmp_path / "fed"), "d1"]
    capsys.readouterr()
    assert main(leave) == 2
    assert "--ca-key FILE" in capsys.readouterr().err
    assert main([*leave, "--ca-key", str(own_authority(tmp_path, "other"))]) == 2
    assert "other.key is not the key of" in capsys.readouterr().err
    assert not (tmp_path / "fed" / "left").exists()
    assert main([*leave, "--ca-key", str(key)]) == 0
    device = place(tmp_path / "fed", "d0")
    assert read_departures(device, load_manifest(device)) == {1}


def test_a_device_that_has_left_is_shown_and_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ports = str(free_ports(4))
    assert init(tmp_path, "--share-results", "--rounds", "3", "--port", ports) == 0
    directory = tmp_path / "fed"
    assert main(["peer", "leave", str(directory), "d1"]) == 0
    capsys.readouterr()
    ended = run(place(directory, "d1"))
    assert ended.returncode == 2
    assert "d1 has left this federation for good" in ended.stderr
    assert main(["peer", "up", str(directory), "--give-up", "30", "--json"]) == 0
    states = {line["name"]: line["state"] for line in json.loads(capsys.readouterr().out)["devices"]}
    assert states == {"d0": "done", "d1": "left", "d2": "done"}
    assert (place(directory, "d0") / "stderr.txt").stat().st_mode & 0o777 == 0o600
    assert main(["peer", "collect", str(directory), "--out", str(tmp_path / "coef.csv")]) == 0
    assert "d1: it has left for good" in " ".join(capsys.readouterr().err.split())


def test_who_was_there_is_private_and_written_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(0o022)
    try:
        write_presence(tmp_path, [[1, 0], [1, 1]], ["a", "b"])
        path = tmp_path / "presence.npz"
        assert path.stat().st_mode & 0o777 == 0o600
        whole = path.read_bytes()

        def full(file: IO[bytes], **arrays: object) -> None:
            file.write(b"half")
            raise OSError("no room")

        monkeypatch.setattr("numpy.savez_compressed", full)
        with pytest.raises(OSError, match="no room"):
            write_presence(tmp_path, [[1, 1]], ["a", "b"])
        assert path.read_bytes() == whole
        assert list(tmp_path.iterdir()) == [path]
    finally:
        os.umask(before)


# --- where devices listen ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["d0,10.0.0.1,7447", "d1,10.0.0.1,7447", "d2,10.0.0.2,7447"], "'d0' and 'd1' both have 10.0.0.1:7447"),
        (["d0,10.0.0.1,7447", "d1,10.0.0.2,70000", "d2,10.0.0.3,7447"], "from 1 to 65535, got 70000\n"),
        (["d0,10.0.0.1,7447", "d1,10.0.0.2,", "d2,10.0.0.3,7447"], "device 'd1': the port must be"),
        (["d0,10.0.0.1,7447", "d1,10.0.0.2,0", "d2,10.0.0.3,7447"], "device 'd1': the port must be"),
        (["d0,10.0.0.1,7447", "d1,10.0.0.2,x", "d2,10.0.0.3,7447"], "device 'd1': the port must be"),
        (["d0,10.0.0.1,7447", "d1,,7447", "d2,10.0.0.3,7447"], "device 'd1': the host ''"),
        (["d0,10.0.0.1,7447", "d1,tls/b,7447", "d2,10.0.0.3,7447"], "device 'd1': the host 'tls/b'"),
        (["d0,a,1", "d1,b,1", "d2,c,1", "d9,d,1"], "'d9', which is no device"),
        (["d0,a,1", "d1,b,1", "d1,c,1", "d2,d,1"], "two lines for device 'd1'"),
        (["d0,a,1", "d1,b,1"], "no line for device 'd2'"),
    ],
)
def test_wrong_endpoints_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: list[str], words: str
) -> None:
    path = tmp_path / "endpoints.csv"
    path.write_text("\n".join(["device,host,port", *lines]) + "\n")
    assert init(tmp_path, "--endpoints", str(path)) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "fed").exists()


def test_endpoints_of_numbered_devices_and_of_both_kinds_of_addresses(tmp_path: Path) -> None:
    path = tmp_path / "endpoints.csv"
    path.write_text("device,host,port\n1,2001:db8::1,7447\n2,north.example.org,7447\n3,192.0.2.1,7448\n")
    expected = ["[2001:db8::1]:7447", "north.example.org:7447", "192.0.2.1:7448"]
    assert read_endpoints(path, [1, 2, 3]) == expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--centre", "127.0.0.1:7000"], "--centre is for --placement central"),
        (["--placement", "central", "--centre", "127.0.0.1"], "--centre must be HOST:PORT"),
        (["--placement", "central", "--centre", "tls/127.0.0.1:7000"], "--centre: the host"),
        (["--placement", "central", "--centre", "127.0.0.1:70000"], "--centre: the port must be"),
        (["--placement", "central", "--centre", "::1:7000"], "--centre must be HOST:PORT"),
    ],
)
def test_a_wrong_centre_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert init(tmp_path, *options) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "fed").exists()


def test_a_graph_without_edges_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tables(small_problem(3), tmp_path)
    lonely = tmp_path / "lonely.csv"
    lonely.write_text("source,target\n")
    assert init(tmp_path, "--graph", str(lonely)) == 0
    assert "the graph has no edges" in " ".join(capsys.readouterr().err.split())


# --- messages ---------------------------------------------------------------------------------------------------------


def test_row_numbers_say_how_they_count(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("site,x\na,1\n\na,\n")
    with pytest.raises(DataError, match=r"row 1 .* is nan.*; rows are counted from 0 in the file, without header"):
        Federation.read(path, device="site")
    (tmp_path / "sites").mkdir()
    for name, cells in (("a", "1\n2\n"), ("b", "3\nNA\n")):
        (tmp_path / "sites" / f"{name}.csv").write_text(f"x\n{cells}")
    with pytest.raises(DataError, match=r"row 3 .* rows are counted from 0 over all files"):
        Federation.read(tmp_path / "sites")
