"""Sites that are killed, stopped, cut off or out of disk: when all are back, the bits are those of a quiet run."""

from __future__ import annotations

import resource
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from builders import small_problem
from dropping_proxy import Proxy
from federations import in_process, make_sites, whole_of
from fedkin.core import Problem
from fleet import Fleet
from processes import capped, free_ports

pytest.importorskip("zenoh")
pytestmark = pytest.mark.processes


def assert_same_bits(fleet: Fleet, problem: Problem) -> None:
    assert fleet.theta().tobytes() == in_process(problem, fleet.plan).average.tobytes(), fleet.report()


def test_killed_sites_start_again_and_nothing_is_lost(tmp_path: Path) -> None:
    """Most of them, twice."""
    problem = small_problem(5)
    rng = np.random.default_rng(3)
    with Fleet.make(tmp_path / "fed", problem, 2000, gradient="saga", average="tail", checkpoint_every=20) as fleet:
        fleet.start()
        fleet.wait_for_round("d0", 20)
        for _ in range(2):
            time.sleep(float(rng.uniform(0.1, 0.6)))
            chosen = [f"d{u}" for u in rng.choice(5, 3, replace=False)]
            for name in chosen:
                fleet.kill(name)
            time.sleep(float(rng.uniform(0.0, 0.5)))
            fleet.start(*chosen)
        fleet.join()
        assert any(entry["round"] > 0 for name in fleet.names for entry in fleet.events(name, "started"))
        assert_same_bits(fleet, problem)


def test_a_site_that_sleeps_longer_than_the_lease(tmp_path: Path) -> None:
    problem = small_problem(3)
    with Fleet.make(tmp_path / "fed", problem, 4000) as fleet:
        fleet.start(options=("--lease", "1"))
        fleet.wait_for_round("d0", 10)
        fleet.signal("d2", signal.SIGSTOP)
        fleet.wait_for_event("d1", "neighbour down", peer="d2")
        fleet.wait_for_event("d1", "waiting", lambda entry: "d2" in entry["peers"])
        asleep = fleet.round("d2")
        fleet.signal("d2", signal.SIGCONT)
        fleet.join()
        assert asleep < 4000
        assert_same_bits(fleet, problem)


def test_a_network_that_is_cut_and_heals(tmp_path: Path) -> None:
    problem, rounds = small_problem(4), 3000
    listening = free_ports(5)
    proxies = [Proxy(listening + u) for u in range(4)]
    try:
        # sites reach each other through proxies only
        changes = {"ports": [proxy.port for proxy in proxies], "rounds": rounds, "batch_size": 4}
        heart = make_sites(tmp_path / "fed", problem, **changes)
        with Fleet(tmp_path / "fed", heart, whole_of(heart, problem)) as fleet:
            for u, name in enumerate(fleet.names):
                fleet.start(name, options=("--lease", "1", "--listen", f"127.0.0.1:{listening + u}"))
            fleet.wait_for_round("d0", 10)
            for proxy in proxies:
                proxy.cut = True
            fleet.wait_for_event("d0", "neighbour down")
            # it waits for the thetas of that round, which is not over
            assert fleet.is_stuck("d0") <= rounds
            assert fleet.round("d0") < rounds
            for proxy in proxies:
                proxy.cut = False
            fleet.join()
            assert sum(proxy.swallowed for proxy in proxies) > 0
            assert_same_bits(fleet, problem)
    finally:
        for proxy in proxies:
            proxy.close()


@pytest.mark.parametrize("power", [True, False])
def test_a_killed_site_goes_on_where_it_was_or_else_from_its_checkpoint(tmp_path: Path, power: bool) -> None:
    problem = small_problem(3)
    with Fleet.make(tmp_path / "fed", problem, 3000, checkpoint_every=200) as fleet:
        fleet.start()
        fleet.wait_for_round("d1", 20)
        fleet.kill("d1")
        reached = fleet.round("d1")  # at least, the status is written twice a second
        if not power:
            (fleet.place("d1") / "state.db-wal").unlink()
        fleet.start("d1")
        fleet.join()
        first, again = [entry["round"] for entry in fleet.events("d1", "started")]
        assert first == 0
        assert again >= reached - 1 if power else again % 200 == 0
        assert_same_bits(fleet, problem)


def test_a_full_disk_holds_the_site_until_there_is_room(tmp_path: Path) -> None:
    def tight() -> None:
        capped()
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))

    problem = small_problem(3)
    with Fleet.make(tmp_path / "fed", problem, 60, checkpoint_every=10) as fleet:
        fleet.start("d0", "d1")
        fleet.start("d2", preexec=tight)
        fleet.wait_for_event("d2", "checkpoint failed, holding")
        assert not list(fleet.place("d2").glob("*.tmp"))
        infinite = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(fleet.children["d2"].pid, resource.RLIMIT_FSIZE, infinite)
        fleet.join()
        assert_same_bits(fleet, problem)
