"""What sites know alone adds up to what is known of all: residuals and certificate of a federation, from its shares."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import fedkin
from builders import small_problem
from federations import plan_of
from fedkin.admm import Share, ShareTaker, is_shared, together
from fedkin.admm.trace import certify
from fedkin.core import Problem
from memory_network import MemoryNetwork
from test_engine_peer_memory import run_sites


def shares_of(problem: Problem, rounds: int, **changes: Any) -> tuple[dict[int, Any], list[Any]]:
    """The sites after all rounds, and their last shares."""
    network = MemoryNetwork(None, seed=1)
    try:
        sites = run_sites(problem, plan_of(problem, rounds=rounds, batch=None, growth=0.0, **changes), network)
    finally:
        network.close()
    return sites, [Share(*sites[u].status.shares[-1]) for u in sorted(sites)]


@pytest.mark.parametrize("penalty", ["l1", "l2"])
@pytest.mark.parametrize("rounds", [7, 80])
def test_shares_add_up_to_the_certificate_of_the_whole(penalty: str, rounds: int) -> None:
    problem = small_problem(4, penalty=penalty)
    sites, shares = shares_of(problem, rounds)
    assert all(share.round == rounds for share in shares)
    theta, balance = (
        np.concatenate([getattr(sites[u].shard, name) for u in sorted(sites)]) for name in ("theta", "balance")
    )
    found, fused = together(shares), problem.fused
    assert found["gap"] == pytest.approx(certify(fused, theta, [balance])[0], rel=1e-6, abs=1e-12)
    residual = fused.terms.gradients(theta) + balance
    assert found["dual_residual"] == pytest.approx(np.sqrt((residual**2).sum() / 4))
    best = fused.value(fedkin.solve(problem, tol=1e-10).theta)
    behind = (fused.value(theta) - best) / abs(fused.value(theta))
    assert -1e-9 <= behind <= found["gap"] + 1e-9, "a certificate is never below the truth"
    assert found["gap"] < (1e-3 if rounds == 80 else 1.0)


def test_one_shard_has_the_whole_certificate() -> None:
    problem = small_problem(4)
    sites, shares = shares_of(problem, 20)
    taken = ShareTaker(sites[0].shard).take(20)
    assert vars(taken) == vars(shares[0])


def test_all_sites_take_their_shares_in_the_same_rounds() -> None:
    recorded = [t for t in range(1, 100_000) if is_shared(t)]
    assert len(recorded) < 200 and recorded[:10] == list(range(1, 11))
    assert max(later / before for before, later in pairwise(recorded) if before > 9) <= 1.25
