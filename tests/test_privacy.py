"""What a curious neighbour learns from thetas: the attack on single rows, and that it fails on what contracts allow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedkin.admm import Shard
from fedkin.data import Rows
from fedkin.federate import Contract, ContractError, SitePlan, whole_plan
from fedkin.graph import Graph

CONTRACT = """
name = "heart"
method = "fused"
loss = "linear"
[features]
age = {}
weight = {}
height = {}
[target]
name = "days"
[rounds]
lam = 0.02
batch_size = 1
smallest_batch = 1
"""
ONE = np.array([1])


def site_with_a_neighbour(contract: Contract, n: int = 40) -> tuple[SitePlan, dict[int, Rows]]:
    """Site 1 is attacked by site 0, its only neighbour."""
    rows = {}
    for u in range(2):
        rng = np.random.default_rng(u)
        X = np.column_stack([np.ones(n), rng.normal(size=(n, 3))])
        rows[u] = Rows(X, X @ [3.0, 1.0, -2.0, 0.5] + rng.normal(size=n))
    return whole_plan(contract, Graph([0, 1], [(0, 1)]), rows, run="0" * 16), rows


def nearest(guess: np.ndarray, rows: Rows) -> float:
    """How far a guess of a row, whose first entry is the intercept's 1, is from the nearest true one."""
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = guess / guess[0]
    return float(np.linalg.norm(rows.X - scaled, axis=1).min())


def theta_after(shard: Shard, rounds: int) -> list[np.ndarray]:
    """What the neighbour sees: a theta per round; it sends 0 all the time."""
    seen = []
    for t in range(1, rounds + 1):
        shard.node_step(t)
        seen.append(shard.theta[0].copy())
        shard.edge_step()
    return seen


def test_from_zero_the_first_theta_was_a_row_and_from_an_own_estimate_it_is_not() -> None:
    plan, rows = site_with_a_neighbour(Contract.from_toml(CONTRACT))
    (first,) = theta_after(Shard(replace(plan, theta=np.zeros_like(plan.theta)), ONE), 1)
    assert nearest(first, rows[1]) < 1e-12  # as it was: theta(1) = step * y * x
    (first,) = theta_after(Shard(plan, ONE), 1)
    assert nearest(first, rows[1]) > 0.1


def gradient_of_the_second_round(plan: SitePlan) -> np.ndarray:
    """Worked out by a neighbour that knows the step, from two thetas and the dual that it holds itself."""
    shard = Shard(plan, ONE)
    (first,) = theta_after(shard, 1)
    pull = shard.pull()[0]
    shard.node_step(2)
    return (first - shard.theta[0]) / shard.steps.eta(2)[0] - pull


def test_single_rows_can_be_worked_out_in_any_round_so_contracts_refuse_them() -> None:
    plan, rows = site_with_a_neighbour(Contract.from_toml(CONTRACT))
    assert nearest(gradient_of_the_second_round(plan), rows[1]) < 1e-9
    with pytest.raises(ContractError, match="a theta from fewer than 10 rows can give them away"):
        Contract.from_toml(CONTRACT.replace("smallest_batch = 1\n", ""))
    allowed = CONTRACT.replace("smallest_batch = 1\n", "").replace("batch_size = 1", "batch_size = 10")
    plan, rows = site_with_a_neighbour(Contract.from_toml(allowed))
    assert nearest(gradient_of_the_second_round(plan), rows[1]) > 0.1


def test_with_all_rows_the_first_theta_is_the_sites_own_estimate() -> None:
    whole = CONTRACT.replace("smallest_batch = 1\n", "").replace("batch_size = 1\n", "")
    plan, rows = site_with_a_neighbour(Contract.from_toml(whole))
    (first,) = theta_after(Shard(plan, ONE), 1)
    np.testing.assert_allclose(first, np.linalg.lstsq(rows[1].X, rows[1].y, rcond=None)[0], atol=1e-10)
