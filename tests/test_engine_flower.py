"""Algorithm 2 under Flower's simulation engine: the bits of `fed_admm`."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from builders import small_problem
from federations import make_sites, reference, whole_of
from fedkin.admm import Availability
from processes import PATIENCE

pytest.importorskip("flwr")
pytest.importorskip("ray")
pytestmark = pytest.mark.processes

BIN = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


def end_superlink(home: Path) -> None:
    """End the SuperLink whose files are in ``home``, and nobody else's."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if any("flower-superlink" in word for word in words) and any(str(home) in word for word in words):
                    os.kill(int(entry.name), signal.SIGTERM)


PROGRAM = """
import sys
from pathlib import Path
from flwr.simulation import run_simulation
from fedkin.federate.flower import client_app, server_app
place = Path(sys.argv[1])
run_simulation(server_app(place / "heart"), client_app(place), 3,
               backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 1}})
"""


def test_a_simulation_has_the_bits_of_fed_admm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "0")
    monkeypatch.setenv("FLWR_DISABLE_UPDATE_CHECK", "1")
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flwr"))
    monkeypatch.setenv("RAY_DEDUP_LOGS", "0")
    problem = small_problem(3)
    heart = make_sites(tmp_path / "fed", problem, rounds=10, batch_size=4, placement="central")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "fed")],
        timeout=PATIENCE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(tmp_path / "fed" / "heart" / "flower.npz") as file:
        theta, here = file["theta"], file["available"]
    assert here.all()
    availability = Availability.recorded(here.astype(int), weighting="estimated")
    expected = reference(problem, whole_of(heart, problem), availability)
    assert theta.tobytes() == expected.tobytes()


@pytest.mark.skipif(shutil.which("flwr", path=BIN) is None, reason="flwr is not next to this Python")
def test_flwr_run_starts_the_example(tmp_path: Path) -> None:
    """As in examples/flower/README.md; the local SuperLink that Flower leaves behind is ended."""
    problem = small_problem(3)
    heart = make_sites(tmp_path / "fed", problem, rounds=4, batch_size=4, placement="central")
    shutil.copytree(Path(__file__).parent.parent / "examples" / "flower", tmp_path / "app")
    environment = os.environ | {
        "PATH": BIN,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "FLWR_HOME": str(tmp_path / "flwr"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [str(shutil.which("flwr", path=BIN)), "run", str(tmp_path / "app"), "local", "--stream"]
    command += ["--run-config", f"federation='{heart.directory}' sites='{tmp_path / 'fed'}'"]
    command += ["--federation-config", "num-supernodes=3 client-resources-num-cpus=1 init-args-num-cpus=1"]
    try:
        done = subprocess.run(command, env=environment, timeout=PATIENCE, capture_output=True, text=True, check=False)
        # Flower ends with 0 also when the run has failed
        assert (tmp_path / "fed" / "heart" / "flower.npz").exists(), done.stdout[-3000:]
    finally:
        end_superlink(tmp_path / "flwr")
    with np.load(tmp_path / "fed" / "heart" / "flower.npz") as file:
        theta, here = file["theta"], file["available"]
    availability = Availability.recorded(here.astype(int), weighting="estimated")
    expected = reference(problem, whole_of(heart, problem), availability)
    assert theta.tobytes() == expected.tobytes()
