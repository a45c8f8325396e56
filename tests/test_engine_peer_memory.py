"""Sites as threads over a network in memory that loses, doubles and reorders messages: the bits must not care."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builders import small_problem
from federations import in_process, in_threads, part_of, plan_of
from fedkin.core import Problem
from fedkin.federate import Journal, Participant, SitePlan
from memory_network import QUICK, Faults, MemoryNetwork, MemoryTransport, crashing

pytestmark = pytest.mark.exhaustive


def run_sites(problem: Problem, plan: SitePlan, network: MemoryNetwork, **options: Any) -> dict[int, Participant]:
    """All sites in threads, to the end."""
    sites: dict[int, Participant] = {}

    def one(u: int) -> None:
        site = Participant(part_of(plan, u), network.join(), Journal(plan.name(u)), patience=QUICK, **options)
        sites[u] = site
        site.run()
        site.linger()

    in_threads(one, problem.n_sites)
    return sites


def same_bits(sites: dict[int, Participant], problem: Problem, plan: SitePlan) -> None:
    whole = in_process(problem, plan)
    for u, site in sites.items():
        assert site.shard.theta[0].tobytes() == whole.theta[u].tobytes()
        assert site.shard.average[0].tobytes() == whole.average[u].tobytes()
        mine = (plan.edges == u).any(axis=1)
        assert site.shard.alpha.tobytes() == whole.alpha[mine].tobytes()


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
def test_sites_over_a_good_network_have_the_bits_of_one_process(
    network: MemoryNetwork, changes: dict[str, Any]
) -> None:
    problem = small_problem(5)
    plan = plan_of(problem, 60, **({"compare_every": 20} | changes))
    same_bits(run_sites(problem, plan, network), problem, plan)


@pytest.mark.parametrize("network", [Faults(loss=0.1, duplication=0.1, delay=0.005)], indirect=True)
def test_loss_duplication_and_reordering_do_not_change_a_bit(network: MemoryNetwork) -> None:
    problem = small_problem(5)
    plan = plan_of(problem, 60, compare_every=10)
    sites = run_sites(problem, plan, network)
    assert network.lost > 50
    same_bits(sites, problem, plan)


@pytest.mark.parametrize(("every", "gradient"), [(1, "plain"), (3, "saga"), (10, "svrg"), (50, "plain")])
def test_a_site_that_dies_in_any_round_catches_up(
    network: MemoryNetwork, tmp_path: Path, every: int, gradient: str
) -> None:
    problem = small_problem(4)
    plan = plan_of(problem, 40, checkpoint_every=every, compare_every=8, gradient=gradient)
    rng = np.random.default_rng(every)
    crashes = {u: sorted(rng.choice(np.arange(1, 40), 4, replace=False).tolist(), reverse=True) for u in (1, 2)}

    def make(u: int, tick: Any) -> tuple[Participant, MemoryTransport]:
        transport, state = network.join(), tmp_path / f"{u}.npz"
        part, journal = part_of(plan, u), Journal(str(u))
        return Participant(part, transport, journal, checkpoint=state, patience=QUICK, tick=tick), transport

    finished = crashing(4, make, crashes)
    assert len(finished) == 4
    same_bits(finished, problem, plan)


def test_a_replica_that_went_wrong_is_repaired_by_the_other_end(network: MemoryNetwork) -> None:
    problem = small_problem(4)
    plan = plan_of(problem, 60, compare_every=10, average="last", growth=0.0, batch=None)

    def tick(site: Participant) -> None:
        if site.plan.here == 3 and site.done == 33:
            site.shard.alpha[-1] *= 0.5  # as after a lost message that nobody noticed

    sites = run_sites(problem, plan, network, tick=tick)
    assert [site.status.repaired for _, site in sorted(sites.items())] == [0, 0, 0, 1]
    for u, site in sites.items():
        for edge, (i, j) in enumerate(site.shard.edges.tolist()):
            other = sites[j if u == i else i]
            there = other.shard.edges.tolist().index([i, j])
            assert site.shard.alpha[edge].tobytes() == other.shard.alpha[there].tobytes()


def test_float32_on_the_wire_changes_the_result_by_rounding_only(network: MemoryNetwork) -> None:
    problem = small_problem(4)
    changes = {"average": "last", "growth": 0.0, "batch": None, "compare_every": 5}
    narrow = plan_of(problem, 200, wire="float32", **changes)
    sites = run_sites(problem, narrow, network)
    assert not any(site.status.repaired for site in sites.values())
    wide = in_process(problem, plan_of(problem, 200, **changes)).theta
    difference = max(np.abs(site.shard.theta[0] - wide[u]).max() for u, site in sites.items())
    assert 0 < difference < 1e-5


def test_a_site_alone_needs_nobody(network: MemoryNetwork) -> None:
    problem = small_problem(1)
    plan = plan_of(problem, 20)
    same_bits(run_sites(problem, plan, network), problem, plan)
