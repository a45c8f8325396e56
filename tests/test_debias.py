"""Adaptive weights and MCP remove the shrinkage between groups, and every step has its certificate."""

from __future__ import annotations

import numpy as np
import pytest

from cvxpy_reference import reference
from fedkin import Federation, Graph, Problem, lam_max
from fedkin.core import oracle_fit
from fedkin.solvers import solve_debiased

CENTRES = np.array([[0.0, 0.0, 0.0], [3.0, -3.0, 3.0], [-3.0, 3.0, 3.0]])
LABELS = np.arange(18) % 3


def well_apart(seed: int) -> Federation:
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(18, 40, 3))
    y = np.einsum("vnp,vp->vn", X, CENTRES[LABELS]) + rng.normal(size=(18, 40))
    return Federation.from_arrays(X.reshape(-1, 3), y.ravel(), np.repeat(np.arange(18), 40))


def error(theta: np.ndarray) -> float:
    return float(np.sqrt(((theta - CENTRES[LABELS]) ** 2).mean()))


@pytest.mark.parametrize("penalty", ["l1", "l2"])
@pytest.mark.parametrize("seed", [0, 1])
def test_with_groups_well_apart_mcp_has_the_error_of_the_oracle(penalty: str, seed: int) -> None:
    fed = well_apart(seed)
    problem = Problem(fed, Graph.clusters(LABELS.tolist()).corrupt(0.2, seed), penalty=penalty)
    first, *steps = solve_debiased(problem.with_lam(0.1 * lam_max(problem)))
    oracle = error(oracle_fit(fed, LABELS.tolist(), "linear"))
    assert error(first.theta) > 3.0 * oracle  # what shrinkage costs
    assert error(steps[-1].theta) <= 1.05 * oracle
    assert all(step.status == "converged" and step.gap <= 1e-6 for step in (first, *steps))


def test_each_step_solves_the_convex_problem_with_its_weights() -> None:
    fed = Federation({u: [[0.0 if u < 3 else 5.0 + 0.1 * u]] for u in range(6)})
    problem = Problem(fed, Graph.complete(range(6)), "mean", lam=0.03)
    first, second, *_ = solve_debiased(problem, gamma=8.0, tol=1e-9)
    i, j = problem.graph.edges.T
    reach = problem.strength * 5.0  # five edges of weight 1 at every site, curvature 1
    factor = np.maximum(1.0 - np.abs(first.theta[i] - first.theta[j])[:, 0] / (8.0 * reach), 0.0)
    assert ((factor > 0) & (factor < 1)).any()
    graph = problem.graph.reweighted(np.where(factor > 0, factor, 1.0)).keep(factor > 0)
    expected = reference(Problem(fed, graph, "mean", lam=0.03))
    np.testing.assert_allclose(second.theta, expected.theta, atol=1e-4)
