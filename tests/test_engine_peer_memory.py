"""Devices as threads over a network in memory that loses, doubles and reorders messages: the bits must not care."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from federations import in_process, manifest_of, rows_of, small_problem
from fedkin.engine.journal import Journal
from fedkin.engine.manifest import Manifest
from fedkin.engine.peer import Device, Patience
from fedkin.engine.transport import Faults, MemoryNetwork
from fedkin.problem import Problem

QUICK = Patience(first_pull=0.02, last_pull=0.2, complain=0.3, give_up=20.0, linger=5.0)


def run_devices(problem: Problem, manifest: Manifest, network: MemoryNetwork, **options: Any) -> dict[int, Device]:
    """All devices in threads, to the end."""
    rows, devices, failures = rows_of(problem), {}, []

    def one(u: int) -> None:
        try:
            devices[u] = device = Device(
                manifest, u, rows[u], network.join(), Journal(manifest.members[u].name), patience=QUICK, **options
            )
            device.run()
            device.linger()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=one, args=(u,)) for u in range(problem.n_devices)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures, failures
    assert not any(thread.is_alive() for thread in threads)
    return devices


def same_bits(devices: dict[int, Device], problem: Problem, manifest: Manifest) -> None:
    whole = in_process(problem, manifest)
    for u, device in devices.items():
        assert device.shard.theta[0].tobytes() == whole.gather("theta")[u].tobytes()
        assert device.shard.average[0].tobytes() == whole.gather("average")[u].tobytes()
        mine = (manifest.edge_array == u).any(axis=1)
        assert device.shard.alpha.tobytes() == whole.gather("alpha")[mine].tobytes()


@pytest.fixture
def network(request: pytest.FixtureRequest) -> Any:
    made = MemoryNetwork(getattr(request, "param", None), seed=1)
    yield made
    made.close()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gradient": "saga", "average": "last"},
        {"gradient": "svrg"},
        {"average": "paper"},
        {"compare_every": 0},
        {"penalty": "l2"},
        {"penalty": "linf"},
    ],
)
def test_devices_over_a_good_network_have_the_bits_of_one_process(
    network: MemoryNetwork, changes: dict[str, Any]
) -> None:
    problem = small_problem(5)
    manifest = manifest_of(problem, 60, **({"compare_every": 20} | changes))
    same_bits(run_devices(problem, manifest, network), problem, manifest)


@pytest.mark.parametrize("network", [Faults(loss=0.1, duplication=0.1, delay=0.005)], indirect=True)
def test_loss_duplication_and_reordering_do_not_change_a_bit(network: MemoryNetwork) -> None:
    problem = small_problem(5)
    manifest = manifest_of(problem, 60, compare_every=10)
    devices = run_devices(problem, manifest, network)
    assert network.lost > 50
    same_bits(devices, problem, manifest)
