"""Algorithm 2 with a central machine as a process of its own: the bits of `fed_admm` with the same sites absent."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest

from builders import small_problem
from federations import make_sites, reference, whole_of
from fedkin.admm import Availability, Shard
from fedkin.core import Problem
from fedkin.federate import SitePlan, centre_plan, site_plan
from fedkin.solvers import solve
from fleet import Fleet
from processes import wait_for

pytest.importorskip("zenoh")
OPTIONS = ("--gather", "30", "--deadline", "2")


def star(folder: Path, problem: Problem, rounds: int) -> Fleet:
    return Fleet.make(folder, problem, rounds, placement="central", compare_every=0)


def presence(fleet: Fleet) -> np.ndarray:
    with np.load(fleet.place("centre") / "presence.npz") as file:
        return file["available"]


def expected(problem: Problem, view: SitePlan, here: np.ndarray) -> np.ndarray:
    return reference(problem, view, Availability.recorded(here.astype(int), weighting="estimated"))


@pytest.mark.parametrize("penalty", ["l1", "l2"])
def test_the_central_machine_steps_for_absent_sites_as_fed_admm_does(tmp_path: Path, penalty: str) -> None:
    problem = small_problem(6, penalty=penalty)
    here = np.random.default_rng(1).random((80, 6)) < 0.7
    heart = make_sites(tmp_path, problem, rounds=80, batch_size=4, placement="central")
    centre, names = Shard(centre_plan(heart)), problem.federation.sites
    workers = [Shard(site_plan(tmp_path / name)) for name in names]
    seen = np.zeros(6)
    for t in range(1, 81):
        chance, answers = (1.0 + seen) / t, {}
        theta, pull = centre.theta.copy(), centre.pull()
        for u in np.flatnonzero(here[t - 1]).tolist():
            workers[u].take_pull(theta[[u]], pull[[u]])
            workers[u].node_step(t, None, chance[[u]])
            answers[u] = workers[u].theta[0]
        centre.node_step(t, None, chance)
        centre.take(answers)
        centre.edge_step()
        seen += here[t - 1]
    assert centre.average.tobytes() == expected(problem, whole_of(heart, problem), here).tobytes()


@pytest.mark.processes
def test_sites_that_come_and_go_and_a_central_machine_that_dies(tmp_path: Path) -> None:
    problem = small_problem(4)
    with star(tmp_path / "fed", problem, 1500) as fleet:
        fleet.start(options=OPTIONS)
        fleet.wait_for_round("centre", 30)
        fleet.kill("d1")
        fleet.wait_for_round("centre", fleet.round("centre") + 5)
        fleet.kill("centre")
        fleet.start("centre", options=(*OPTIONS, "--gather", "3"))
        fleet.wait_for_round("centre", fleet.round("centre") + 5)
        fleet.kill("d3")
        # how long a process takes to start must not decide how many rounds it misses
        fleet.signal("centre", signal.SIGSTOP)
        fleet.start("d1", "d3", options=OPTIONS)
        for name in ("d1", "d3"):
            wait_for(lambda name=name: len(fleet.events(name, "started")) == 2, report=fleet.report)
        fleet.signal("centre", signal.SIGCONT)
        fleet.join()
        here = presence(fleet)
        assert here.shape == (1500, 4)
        assert 0 < (~here[:, 1]).sum() < 1500
        # S wrote down who was there; Algorithm 2 in one process, with the same sites absent, gives the same bits
        assert fleet.theta().tobytes() == expected(problem, fleet.plan, here).tobytes()
        exact = solve(problem, 1e-8).theta
        assert np.abs(fleet.theta() - exact).max() < 0.1
