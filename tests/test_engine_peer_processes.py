"""Real processes, real sockets, certificates on both sides."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from builders import small_problem
from fedkin.admm import Settings, fed_admm
from fedkin.federate import device_parts, make_authority, make_manifest, write_federation
from fleet import Fleet
from processes import free_ports

pytest.importorskip("zenoh")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


def test_five_devices_over_tls_have_the_bits_of_fed_admm(tmp_path: Path) -> None:
    problem = small_problem(5)
    settings = Settings(batch_size=4, seed=11)
    first = free_ports(5)
    manifest = make_manifest(problem, 50, settings, [f"tls/127.0.0.1:{first + u}" for u in range(5)])
    write_federation(tmp_path / "fed", manifest, device_parts(problem), make_authority("test"))
    with Fleet(tmp_path / "fed", manifest) as fleet:
        fleet.start()
        fleet.join()
        expected = fed_admm(problem, 50, batch_size=4, seed=11, backend="numpy")
        assert fleet.theta().tobytes() == expected.theta.tobytes()


def test_twenty_devices_with_five_killed_have_the_bits_of_fed_admm(tmp_path: Path) -> None:
    problem = small_problem(20, p=20, n=30)
    first = free_ports(20)
    manifest = make_manifest(problem, 150, Settings(batch_size=10), [f"tls/127.0.0.1:{first + u}" for u in range(20)])
    write_federation(tmp_path / "fed", manifest, device_parts(problem), make_authority("test"))
    with Fleet(tmp_path / "fed", manifest) as fleet:
        fleet.start()
        fleet.wait_for_round("d0", 20, 120)
        victims = [f"d{u}" for u in np.random.default_rng(0).choice(20, 5, replace=False)]
        for name in victims:
            fleet.kill(name)
        fleet.start(*victims)
        fleet.join(300)
        assert fleet.theta().tobytes() == fed_admm(problem, 150, batch_size=10, backend="numpy").theta.tobytes()
