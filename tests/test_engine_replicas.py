"""Algorithm 2 without a central machine: replicas of the component on each of its sites."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builders import small_problem
from federations import in_process, part_of, plan_of, reference
from fedkin.admm import Availability, DirectLink, Shard, run_rounds
from fedkin.core import Problem
from fedkin.federate import Journal, Participant, Patience, SitePlan
from fedkin.federate.attendance import ReplicatedLink, replica_vector
from fedkin.federate.inbox import HEADER_BYTES, MessageError
from fedkin.fitting import load
from fedkin.graph import Graph
from fleet import Fleet
from memory_network import Crash, Faults, MemoryNetwork, MemoryTransport, crash, crashing
from processes import PATIENCE

pytestmark = pytest.mark.exhaustive

QUICK = Patience(first_pull=0.05, last_pull=0.3, complain=0.5, give_up=PATIENCE, linger=5.0, gather=5.0, deadline=2.0)


def replica_plan(problem: Problem, rounds: int, **changes: Any) -> SitePlan:
    return plan_of(problem, rounds, **({"placement": "replicas", "compare_every": 0} | changes))


def two_components(v: int = 6) -> Problem:
    problem = small_problem(v)
    names = problem.federation.sites
    return replace(problem, graph=Graph(names, [("d1", "d0"), ("d4", "d1"), ("d3", "d2"), ("d5", "d3"), ("d5", "d2")]))


def observers(problem: Problem, plan: SitePlan, network: MemoryNetwork, folder: Path) -> Any:
    def make(u: int, tick: Any) -> tuple[Participant, MemoryTransport]:
        transport = network.join()
        options = {"checkpoint": folder / f"{u}.npz", "record": folder / f"{u}.bin", "patience": QUICK, "tick": tick}
        return Participant(part_of(plan, u), transport, Journal(str(u)), **options), transport

    return make


@pytest.mark.parametrize("faults", [None, Faults(loss=0.05, duplication=0.1, delay=0.002)])
def test_a_leader_repeats_what_happened_and_all_have_its_bits(tmp_path: Path, faults: Faults | None) -> None:
    problem = small_problem(5)
    plan = replica_plan(problem, 80, checkpoint_every=9)
    network = MemoryNetwork(faults)
    # d0 is the leader: it dies, too
    crashes = {0: [61, 27, 18], 2: [50, 12], 4: [70, 30]}
    finished = crashing(problem.n_sites, observers(problem, plan, network, tmp_path), crashes, pause=0.1)
    network.close()
    leader = finished[0].link
    assert isinstance(leader, ReplicatedLink) and leader.decides
    history = np.array(leader.attended)
    assert history.shape == (80, 5)
    assert not history.all()
    whole = in_process(problem, plan, Availability.recorded(history, weighting="estimated"))
    for u, site in finished.items():
        assert site.shard.theta.tobytes() == whole.theta.tobytes(), u
        assert site.shard.average.tobytes() == whole.average.tobytes(), u


def test_without_absence_nothing_is_weighted(tmp_path: Path) -> None:
    problem = two_components()
    plan = replica_plan(problem, 40)
    network = MemoryNetwork()
    finished = crashing(problem.n_sites, observers(problem, plan, network, tmp_path), {})
    network.close()
    whole = in_process(problem, plan, Availability.recorded(np.ones((40, 6)), weighting="estimated"))
    for u, site in finished.items():
        assert site.shard.theta.tobytes() == whole.theta[site.shard.sites].tobytes(), u
    assert [part_of(plan, u).leader for u in range(6)] == [0, 0, 2, 2, 0, 2]


def test_a_leader_that_dies_after_writing_down_a_round_decides_it_as_before(tmp_path: Path) -> None:
    """The record of a round that nobody has heard of yet counts; half a record does not."""
    problem = small_problem(3)
    plan = replica_plan(problem, 20, checkpoint_every=100)
    network, record = MemoryNetwork(), tmp_path / "record.bin"
    quick = replace(QUICK, gather=0.0)

    def leader() -> Participant:
        return Participant(part_of(plan, 0), network.join(), Journal("0"), record=record, patience=quick)

    first = leader()
    ends = first.link.end
    first.link.end = lambda t, shard: crash() if t == 7 else ends(t, shard)  # type: ignore[method-assign]
    with pytest.raises(Crash):
        first.run()
    size = HEADER_BYTES + 8 * 3 * (1 + problem.n_params)
    assert record.stat().st_size == 7 * size
    assert leader().done == 7
    record.write_bytes(record.read_bytes()[: 6 * size + 11])
    torn = leader()
    assert torn.done == 6
    torn.run()
    network.close()
    alone = np.zeros((20, 3))
    alone[:, 0] = 1
    # two sites that were never there: known shares would be 0, so compare with the shard's own steps
    local = Shard(plan)
    chance = np.stack([np.ones(20), 1.0 / np.arange(1, 21), 1.0 / np.arange(1, 21)], axis=1)
    run_rounds(local, DirectLink(20, 0, alone.astype(bool), chance))
    assert torn.shard.theta.tobytes() == local.theta.tobytes()


def test_a_replica_that_cannot_be_is_refused() -> None:
    problem = small_problem(3)
    network = MemoryNetwork()
    link = Participant(part_of(replica_plan(problem, 10), 1), network.join(), Journal("1")).link
    network.close()
    assert isinstance(link, ReplicatedLink)
    vector = replica_vector(link.shard.state(), link.seen)
    link.take_vector(vector, 4)
    assert link.done == 4
    p = problem.n_params
    far = vector.copy()
    far[15 * p] = 1e9
    with pytest.raises(MessageError, match="outside their balls"):
        link.take_vector(far, 4)
    often = vector.copy()
    often[-1] = 5
    with pytest.raises(MessageError, match="impossible counts"):
        link.take_vector(often, 4)


# --- real processes ---


def fleet_of(folder: Path, problem: Problem, rounds: int, batch_size: int, **options: Any) -> Fleet:
    return Fleet.make(folder, problem, rounds, batch_size=batch_size, placement="replicas", compare_every=0, **options)


@pytest.mark.processes
def test_a_process_that_is_killed_for_good_is_stepped_for_by_the_others(tmp_path: Path) -> None:
    pytest.importorskip("zenoh")
    problem = small_problem(5, n=30, lam=0.05)
    rounds = 1500
    with fleet_of(tmp_path / "fed", problem, rounds, 10, checkpoint_every=50) as fleet:
        fleet.start()
        fleet.wait_for_round("d0", rounds // 5)
        fleet.kill("d3")
        del fleet.children["d3"]
        # the leader dies, too, and comes back
        fleet.wait_for_round("d0", rounds // 2)
        fleet.kill("d0")
        fleet.start("d0")
        fleet.join()
        with np.load(fleet.place("d0") / "presence.npz") as file:
            history, names = file["available"], file["sites"].tolist()
        assert names == [f"d{u}" for u in range(5)]
        assert history.shape == (rounds, 5)
        there = history[:, 3]
        gone = int(np.flatnonzero(~there)[0])
        assert rounds // 5 <= gone < rounds // 2 and not there[gone:].any()
        # to the bit what one process computes with these absences
        recorded = Availability.recorded(history, weighting="estimated")
        expected = reference(problem, fleet.plan, recorded)
        living = [0, 1, 2, 4]
        theta = np.stack([load(fleet.place(f"d{u}") / "model").coef.ravel() for u in living])
        assert theta.tobytes() == expected[living].tobytes(), fleet.report()


@pytest.mark.processes
def test_without_the_leader_nobody_decides(tmp_path: Path) -> None:
    pytest.importorskip("zenoh")
    problem = small_problem(3)
    with fleet_of(tmp_path / "fed", problem, 800, 4, checkpoint_every=50) as fleet:
        fleet.start()
        fleet.wait_for_round("d1", 50)
        fleet.kill("d0")
        fleet.wait_for_event("d1", "waiting", peers=["d0"])
        assert fleet.is_stuck("d1") <= 800
        assert fleet.round("d1") < 800
        fleet.start("d0")
        fleet.join()
        with np.load(fleet.place("d0") / "presence.npz") as file:
            recorded = Availability.recorded(file["available"], weighting="estimated")
        expected = reference(problem, fleet.plan, recorded)
        assert fleet.theta().tobytes() == expected.tobytes(), fleet.report()
