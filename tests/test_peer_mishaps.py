"""``fedkin peer`` when files are missing, damaged or of another run: one line that names the file and the cure."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from federations import free_ports, manifest_of, place, rows_of, small_problem
from fedkin.cli import main
from fedkin.engine.directory import collect, result_of, write_federation
from fedkin.engine.manifest import Manifest, Rows
from fedkin.engine.process import write_result
from fedkin.engine.security import make_authority
from fedkin.errors import DataError

pytest.importorskip("zenoh")
pytestmark = pytest.mark.timeout(120)


def federation(folder: Path, n_devices: int = 3, **changes: Any) -> Manifest:
    """A federation in ``folder / "fed"``, nothing of which runs."""
    problem = small_problem(n_devices)
    manifest = manifest_of(problem, 5, ports=free_ports(n_devices), **changes)
    write_federation(folder / "fed", manifest, rows_of(problem), make_authority("tests"), share_result=True)
    return manifest


def run(device: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """``fedkin peer run`` as systemd would call it."""
    return subprocess.run(
        [sys.executable, "-m", "fedkin.engine.process", str(device), "--give-up", "2", *options],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )


def last_line(device: Path) -> dict[str, Any]:
    """The last line of a device's log."""
    found: dict[str, Any] = json.loads((device / "log.jsonl").read_text().splitlines()[-1])
    return found


# --- results of other runs --------------------------------------------------------------------------------------------


def test_collect_takes_results_of_this_run_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = federation(tmp_path, 5)
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
    manifest = federation(tmp_path)
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
        ("device.crt", cut, "device.crt or device.key is damaged"),
        ("rows.npz", Path.unlink, "rows.npz is missing"),
        ("rows.npz", cut, "rows.npz is damaged"),
        ("ca.crt", cut, "ca.crt, cannot be read"),
        ("state.npz", lambda path: path.write_bytes(b"PK\x03\x04 and then the power went"), "state.npz"),
    ],
)
def test_a_damaged_file_is_named_and_not_tried_again(tmp_path: Path, file: str, damage: Any, words: str) -> None:
    federation(tmp_path)
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
    federation(tmp_path)
    ended = run(tmp_path / "fed")
    assert ended.returncode == 2
    assert f"give that of a device, {tmp_path / 'fed' / 'devices'}/NAME" in ended.stderr


def test_a_device_directory_that_others_may_write_is_refused(tmp_path: Path) -> None:
    federation(tmp_path)
    device = place(tmp_path / "fed", "d0")
    device.chmod(0o770)
    ended = run(device)
    assert ended.returncode == 2
    assert f"chmod go= {device}" in ended.stderr
