"""Algorithm 2 with a central machine as a process of its own: the bits of `fed_admm` with the same devices absent."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from builders import small_problem
from federations import place
from fedkin.admm import Availability, Settings, fed_admm
from fedkin.federate import device_parts, make_authority, make_manifest, write_federation
from fedkin.federate.central import Hub, NodeWorker
from fedkin.objective import Problem
from fedkin.solvers import solve
from fleet import Fleet
from processes import free_ports

pytest.importorskip("zenoh")
pytestmark = pytest.mark.timeout(180)
OPTIONS = ("--gather", "30", "--deadline", "2")


def star(folder: Path, problem: Problem, rounds: int) -> Fleet:
    v = problem.n_devices
    first = free_ports(v + 1)
    manifest = make_manifest(
        problem,
        rounds,
        Settings(batch_size=4, seed=11),
        [f"tls/127.0.0.1:{first + u}" for u in range(v)],
        absent=True,
        placement="central",
        centre=f"tls/127.0.0.1:{first + v}",
        compare_every=0,
    )
    write_federation(folder, manifest, device_parts(problem), make_authority("test"))
    return Fleet(folder, manifest)


def presence(fleet: Fleet) -> np.ndarray:
    with np.load(place(fleet.directory, "centre") / "presence.npz") as file:
        return file["available"]


def expected(problem: Problem, here: np.ndarray) -> np.ndarray:
    availability = Availability.recorded(here.astype(int), weighting="estimated")
    return fed_admm(problem, here.shape[0], batch_size=4, seed=11, availability=availability, backend="numpy").theta


@pytest.mark.parametrize("penalty", ["l1", "l2"])
def test_questions_and_answers_have_the_bits_of_fed_admm(penalty: str) -> None:
    problem = small_problem(6, penalty=penalty)
    here = np.random.default_rng(1).random((80, 6)) < 0.7
    endpoints = [f"tls/127.0.0.1:{u + 1}" for u in range(6)]
    manifest = make_manifest(
        problem,
        80,
        Settings(batch_size=4, seed=11),
        endpoints,
        absent=True,
        placement="central",
        centre="tls/127.0.0.1:9",
    )
    hub = Hub(manifest)
    devices = [NodeWorker(manifest, u, rows) for u, rows in device_parts(problem).items()]
    for t in range(1, 81):
        questions = hub.questions()
        hub.finish({u: devices[u].answer(t, questions[u]) for u in np.flatnonzero(here[t - 1]).tolist()})
    assert hub.shard.average.tobytes() == expected(problem, here).tobytes()


@pytest.mark.processes
def test_a_quiet_star_has_the_bits_of_fed_admm(tmp_path: Path) -> None:
    problem = small_problem(4)
    with star(tmp_path / "fed", problem, 60) as fleet:
        fleet.start(options=OPTIONS)
        fleet.join()
        assert presence(fleet).all()
        assert fleet.theta().tobytes() == expected(problem, presence(fleet)).tobytes()


@pytest.mark.processes
def test_devices_that_come_and_go_and_a_central_machine_that_dies(tmp_path: Path) -> None:
    problem = small_problem(4)
    with star(tmp_path / "fed", problem, 1500) as fleet:
        fleet.start(options=OPTIONS)
        fleet.wait_for_round("centre", 30)
        fleet.kill("d1")
        fleet.wait_for_round("centre", fleet.round("centre") + 5)
        fleet.kill("centre")
        fleet.start("centre", options=(*OPTIONS, "--gather", "3"))
        fleet.wait_for_round("centre", fleet.round("centre") + 5)
        fleet.start("d1", options=OPTIONS)
        fleet.kill("d3")
        fleet.start("d3", options=OPTIONS)
        fleet.join()
        here = presence(fleet)
        assert here.shape == (1500, 4)
        assert 0 < (~here[:, 1]).sum() < 1500
        # S wrote down who was there; Algorithm 2 in one process, with the same devices absent, gives the same bits
        assert fleet.theta().tobytes() == expected(problem, here).tobytes()
        exact = solve(problem, 1e-8).theta
        assert np.abs(fleet.theta() - exact).max() < 0.1
