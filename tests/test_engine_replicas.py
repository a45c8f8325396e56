"""Algorithm 2 without a central machine: replicas of the component on each of its devices."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builders import small_problem
from federations import in_threads, manifest_of, place, rows_of, write_tables
from fedkin.admm import Availability, LocalShards, Settings, fed_admm
from fedkin.cli import main
from fedkin.federate import (
    HEADER_BYTES,
    Faults,
    Journal,
    Kind,
    Manifest,
    ManifestError,
    MemoryNetwork,
    MessageError,
    Patience,
    device_parts,
    make_authority,
    make_manifest,
    plan_of,
    read_result,
    write_federation,
)
from fedkin.federate.links.memory import MemoryTransport
from fedkin.federate.replicas import Component, Replica
from fedkin.graph import Graph
from fedkin.objective import Problem
from fleet import Fleet
from processes import free_ports, wait_for

pytestmark = pytest.mark.timeout(240)
QUICK = Patience(first_pull=0.05, last_pull=0.3, complain=0.5, give_up=30.0, linger=5.0, gather=5.0, deadline=2.0)


def replica_manifest(problem: Problem, rounds: int, **changes: Any) -> Manifest:
    return manifest_of(problem, rounds, **({"placement": "replicas", "compare_every": 0} | changes))


def together(problem: Problem, manifest: Manifest, availability: Availability) -> LocalShards:
    """The same run in one process."""
    plan = plan_of(manifest, rows_of(problem))
    v = problem.n_devices
    local = LocalShards(plan, np.zeros(v, dtype=np.int64), np.zeros((v, problem.n_params)))
    local.run(
        1, manifest.rounds, *availability.bind(problem.federation.devices, manifest.seed).rounds(1, manifest.rounds)
    )
    return local


def two_components(v: int = 6) -> Problem:
    problem = small_problem(v)
    names = problem.federation.devices
    return replace(problem, graph=Graph(names, [("d1", "d0"), ("d4", "d1"), ("d3", "d2"), ("d5", "d3"), ("d5", "d2")]))


class Crash(Exception):
    """Stands for SIGKILL: nothing is written on the way out."""


def crashing(problem: Problem, make: Any, crashes: dict[int, list[int]], pause: float = 0.0) -> dict[int, Replica]:
    """Run devices that die in given rounds and start again."""
    finished: dict[int, Replica] = {}

    def live(u: int) -> None:
        def tick(device: Replica) -> None:
            if crashes.get(u) and device.done >= crashes[u][-1]:
                crashes[u].pop()
                raise Crash

        while u not in finished:
            device, transport = make(u, tick)
            try:
                device.run()
                device.linger()
                finished[u] = device
            except Crash:
                transport.close()
                time.sleep(pause)

    in_threads(live, problem.n_devices)
    assert not any(crashes.values())
    return finished


def observers(problem: Problem, manifest: Manifest, network: MemoryNetwork, folder: Path) -> Any:
    rows = rows_of(problem)

    def make(u: int, tick: Any) -> tuple[Replica, MemoryTransport]:
        transport = network.join()
        options = {"checkpoint": folder / f"{u}.npz", "record": folder / f"{u}.bin", "patience": QUICK, "tick": tick}
        return Replica(manifest, u, rows[u], transport, Journal(str(u)), **options), transport

    return make


@pytest.mark.parametrize("faults", [None, Faults(loss=0.05, duplication=0.1, delay=0.002)])
def test_a_leader_repeats_what_happened_and_all_have_its_bits(tmp_path: Path, faults: Faults | None) -> None:
    problem = small_problem(5)
    manifest = replica_manifest(problem, 80, checkpoint_every=9)
    network = MemoryNetwork(faults)
    # d0 is the leader: it dies, too
    crashes = {0: [61, 27, 18], 2: [50, 12], 4: [70, 30]}
    finished = crashing(problem, observers(problem, manifest, network, tmp_path), crashes, pause=0.1)
    network.close()
    leader = finished[0]
    assert leader.leads
    history = np.array(leader.component.presence)
    assert history.shape == (80, 5)
    assert not history.all()
    whole = together(problem, manifest, Availability.recorded(history, weighting="estimated"))
    for u, device in finished.items():
        assert device.component.shard.theta.tobytes() == whole.gather("theta").tobytes(), u
        assert device.component.shard.average.tobytes() == whole.gather("average").tobytes(), u


def test_without_absence_nothing_is_weighted(tmp_path: Path) -> None:
    problem = two_components()
    manifest = replica_manifest(problem, 40)
    network = MemoryNetwork()
    finished = crashing(problem, observers(problem, manifest, network, tmp_path), {})
    network.close()
    whole = together(problem, manifest, Availability.recorded(np.ones((40, 6)), weighting="estimated"))
    for u, device in finished.items():
        assert device.component.shard.theta.tobytes() == whole.gather("theta")[device.component.members].tobytes(), u
    assert [manifest.leader(u) for u in range(6)] == [0, 0, 2, 2, 0, 2]


def test_a_leader_that_dies_after_writing_down_a_round_decides_it_as_before(tmp_path: Path) -> None:
    """The record of a round that nobody has heard of yet counts; half a record does not."""
    problem = small_problem(3)
    manifest = replica_manifest(problem, 20, checkpoint_every=100)
    network, rows, record = MemoryNetwork(), rows_of(problem), tmp_path / "record.bin"
    quick = replace(QUICK, gather=0.0)

    class Dying(Replica):
        def _decided(self, here: Any, thetas: Any) -> None:
            if self.done == 6:
                raise Crash
            super()._decided(here, thetas)

    first = Dying(manifest, 0, rows[0], network.join(), Journal("0"), record=record, patience=quick)
    with pytest.raises(Crash):
        first.run()
    size = HEADER_BYTES + 8 * 3 * (1 + problem.n_params)
    assert record.stat().st_size == 7 * size
    again = Replica(manifest, 0, rows[0], network.join(), Journal("0"), record=record, patience=quick)
    assert again.done == 7
    record.write_bytes(record.read_bytes()[: 6 * size + 11])
    torn = Replica(manifest, 0, rows[0], network.join(), Journal("0"), record=record, patience=quick)
    assert torn.done == 6
    torn.run()
    network.close()
    alone = np.zeros((20, 3))
    alone[:, 0] = 1
    # two devices that were never there: known shares would be 0, so compare with the shard's own steps
    plan = plan_of(manifest, rows)
    local = LocalShards(plan, np.zeros(3, dtype=np.int64), np.zeros((3, problem.n_params)))
    chance = np.stack([np.ones(20), 1.0 / np.arange(1, 21), 1.0 / np.arange(1, 21)], axis=1)
    local.run(1, 20, alone.astype(bool), chance)
    assert torn.component.shard.theta.tobytes() == local.gather("theta").tobytes()


def test_a_replica_that_cannot_be_is_refused() -> None:
    problem = small_problem(3)
    component = Component(replica_manifest(problem, 10), [0, 1, 2])
    vector = component.to_vector()
    assert vector.size == component.vector_length
    component.take_vector(vector, 4)
    assert component.done == 4
    p = problem.n_params
    far = vector.copy()
    far[15 * p] = 1e9
    with pytest.raises(MessageError, match="outside their balls"):
        component.take_vector(far, 4)
    often = vector.copy()
    often[-1] = 5
    with pytest.raises(MessageError, match="impossible counts"):
        component.take_vector(often, 4)


def test_manifests_that_do_not_fit_are_refused() -> None:
    problem = small_problem(3)
    with pytest.raises(ManifestError, match="gradient must be plain"):
        replica_manifest(problem, 5, gradient="saga").check()


def test_kinds_of_messages_fit_into_half_a_byte() -> None:
    assert max(Kind) < 16


# --- real processes ---


def fleet_of(folder: Path, problem: Problem, rounds: int, batch_size: int, **options: Any) -> Fleet:
    first = free_ports(problem.n_devices)
    places = [f"tls/127.0.0.1:{first + u}" for u in range(problem.n_devices)]
    options = {"placement": "replicas", "compare_every": 0, "absent": True} | options
    manifest = make_manifest(problem, rounds, Settings(batch_size=batch_size, seed=7), places, **options)
    write_federation(folder, manifest, device_parts(problem), make_authority("test"), share_result=True)
    return Fleet(folder, manifest)


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
        with np.load(place(fleet.directory, "d0") / "presence.npz") as file:
            history, names = file["available"], file["devices"].tolist()
        assert names == [f"d{u}" for u in range(5)]
        assert history.shape == (rounds, 5)
        there = history[:, 3]
        gone = int(np.flatnonzero(~there)[0])
        assert rounds // 5 <= gone < rounds // 2 and not there[gone:].any()
        # to the bit what one process computes with these absences
        recorded = Availability.recorded(history, weighting="estimated")
        expected = fed_admm(problem, rounds, 10, seed=7, availability=recorded, backend="numpy").theta
        living = [0, 1, 2, 4]
        theta = np.stack([read_result(place(fleet.directory, f"d{u}")) for u in living])
        assert theta.tobytes() == expected[living].tobytes(), fleet.report()
        # who never comes back counts less and less: the others move towards the minimiser without its loss
        full, without = minimiser(problem, range(5))[living], minimiser(problem, living)[living]
        assert np.linalg.norm(theta - without) < 0.8 * np.linalg.norm(full - without)


def minimiser(problem: Problem, counted: Any) -> Any:
    """The minimiser of the objective with the losses of some devices only, by another program."""
    cvxpy = pytest.importorskip("cvxpy")
    theta = cvxpy.Variable((problem.n_devices, problem.n_params))
    value = 0.0
    for u in counted:
        data = problem.federation[f"d{u}"]
        value += cvxpy.sum_squares(data.y - data.X @ theta[u]) / (2 * data.y.size)
    for i, j in problem.graph.edges.tolist():
        value += problem.strength * cvxpy.norm1(theta[i] - theta[j])
    cvxpy.Problem(cvxpy.Minimize(value)).solve(solver="CLARABEL")
    return theta.value


@pytest.mark.processes
def test_a_process_that_was_away_for_a_while_leaves_the_error_of_algorithm_2(tmp_path: Path) -> None:
    """Absence in some rounds costs accuracy, but does not change where the devices go."""
    pytest.importorskip("zenoh")
    problem = small_problem(4, n=30, lam=0.05)
    rounds = 1500
    with fleet_of(tmp_path / "fed", problem, rounds, 10) as fleet:
        fleet.start()
        fleet.wait_for_round("d0", 100)
        fleet.kill("d2")
        fleet.wait_for_round("d0", fleet.round("d0") + 50)
        # how long a process takes to start must not decide how many rounds it misses
        fleet.signal("d0", signal.SIGSTOP)
        fleet.start("d2")
        wait_for(lambda: sum(entry["event"] == "started" for entry in fleet.log("d2")) >= 2, report=fleet.report)
        fleet.signal("d0", signal.SIGCONT)
        fleet.join()
        with np.load(place(fleet.directory, "d0") / "presence.npz") as file:
            history = file["available"]
        absent = int((~history[:, 2]).sum())
        assert 10 < absent < 500
        assert any(entry["event"] == "took over the leader's replica" for entry in fleet.log("d2"))
        recorded = Availability.recorded(history, weighting="estimated")
        expected = fed_admm(problem, rounds, 10, seed=7, availability=recorded, backend="numpy").theta
        assert fleet.theta().tobytes() == expected.tobytes(), fleet.report()
        full, without = minimiser(problem, range(4)), minimiser(problem, [0, 1, 3])
        assert np.linalg.norm(expected - full) < 0.1 * np.linalg.norm(full - without), absent


@pytest.mark.processes
def test_without_the_leader_nobody_decides(tmp_path: Path) -> None:
    pytest.importorskip("zenoh")
    problem = small_problem(3)
    with fleet_of(tmp_path / "fed", problem, 800, 4, checkpoint_every=50) as fleet:
        fleet.start()
        fleet.wait_for_round("d1", 50)
        fleet.kill("d0")
        fleet.wait_for_event("d1", "waiting", lambda entry: entry["peers"] == ["d0"])
        time.sleep(1.0)  # its status is written twice a second
        stuck = fleet.round("d1")
        time.sleep(1.0)
        assert fleet.round("d1") == stuck < 800
        fleet.start("d0")
        fleet.join()
        with np.load(place(fleet.directory, "d0") / "presence.npz") as file:
            recorded = Availability.recorded(file["available"], weighting="estimated")
        expected = fed_admm(problem, 800, 4, seed=7, availability=recorded, backend="numpy").theta
        assert fleet.theta().tobytes() == expected.tobytes(), fleet.report()


def init(folder: Path, problem: Problem, *options: str) -> int:
    write_tables(problem, folder)
    command = ["peer", "init", str(folder / "fed"), "--data", str(folder / "rows.csv"), "--device", "site"]
    command += ["--target", "y", "--graph", str(folder / "edges.csv"), "--lam", "0.02", "--rounds", "40"]
    command += ["--batch-size", "4", "--seed", "5", "--no-intercept", "--port", str(free_ports(problem.n_devices + 1))]
    return main([*command, *options])


@pytest.mark.processes
def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("zenoh")
    problem = small_problem(3)
    assert init(tmp_path, problem, "--placement", "replicas") == 0
    assert main(["peer", "up", str(tmp_path / "fed"), "--give-up", "30"]) == 0
    with np.load(place(tmp_path / "fed", "d0") / "presence.npz") as file:
        availability = Availability.recorded(file["available"], weighting="estimated")
    expected = fed_admm(problem, 40, 4, seed=5, availability=availability, backend="numpy").theta
    theta = np.stack([read_result(place(tmp_path / "fed", f"d{u}")) for u in range(3)])
    assert theta.tobytes() == expected.tobytes()
    assert main(["peer", "leave", str(tmp_path / "fed"), "d1"]) == 2
    assert "nobody waits for d1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--placement", "replicas", "--gradient", "saga"], "gradient must be plain"),
        (["--placement", "replicas", "--select-level", "0.05"], "--select-level is for --placement peer"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert init(tmp_path, small_problem(3), *options) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "fed").exists()
