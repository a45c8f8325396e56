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
from fedkin.engine.manifest import Manifest
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
