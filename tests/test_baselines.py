"""Baselines on the same objective: subgradient descent (GD, SGD) and network-lasso ADMM."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from algorithm1 import PROX
from builders import design_problem
from fedkin.admm import network_lasso_admm, subgradient_descent
from fedkin.admm.baselines import penalty_subgradient
from fedkin.core import Problem
from fedkin.data import Federation
from fedkin.errors import ParameterError, SolverError
from fedkin.graph import Graph
from fedkin.solvers import solve

a_problem = partial(design_problem, V=10, groups=2)


@pytest.mark.parametrize("penalty", ["l1", "l2", "linf"])
def test_subgradients_satisfy_their_inequality(penalty):
    rng = np.random.default_rng(0)
    objective = a_problem(penalty=penalty, sparsity=0.3).fused
    theta = rng.normal(size=(10, 4))
    theta[3] = theta[4]  # a fused pair, where the norm has a kink
    _, total = penalty_subgradient(objective, theta)
    for _ in range(50):
        other = theta + rng.normal(size=theta.shape)
        bound = objective.penalty_value(theta) + float((total * (other - theta)).sum())
        assert objective.penalty_value(other) >= bound - 1e-12


@pytest.mark.parametrize("loss", ["linear", "logistic"])
def test_gd_and_sgd_approach_the_minimum(loss):
    problem = a_problem(loss)
    exact = solve(problem, 1e-10)
    gd = subgradient_descent(problem, 3000, step=1.0, reference=exact)
    assert gd.trace["distance"][-1] < 1e-3
    assert gd.objective >= exact.objective
    assert gd.objective - exact.objective <= gd.gap * abs(gd.objective) + 1e-12
    sgd = subgradient_descent(problem, 3000, 5, step=0.3, average="tail", reference=exact)
    assert gd.trace["distance"][-1] < sgd.trace["distance"][-1] < 0.1
    assert sgd.trace["rows"][-1] == 3000 * 5 * 10
    assert sgd.trace["vectors"][-1] == 3000 * 2 * problem.graph.n_edges


def test_sgd_is_gd_with_all_rows_in_every_batch():
    problem = a_problem()
    assert np.array_equal(subgradient_descent(problem, 30).theta, subgradient_descent(problem, 30, 40, seed=9).theta)


@pytest.mark.parametrize("loss", ["linear", "logistic", "mean"])
@pytest.mark.parametrize("penalty", ["l1", "l2"])
def test_network_lasso_admm_converges_to_the_exact_solution(loss, penalty):
    problem = a_problem("linear" if loss == "mean" else loss, penalty)
    if loss == "mean":
        problem = Problem(problem.federation, problem.graph, loss="mean", penalty=penalty, lam=0.002)
    exact = solve(problem, 1e-10)
    found = network_lasso_admm(problem, 3000, tol=1e-9, reference=exact)
    assert found.status == "converged" and found.gap <= 1e-9
    assert abs(found.objective - exact.objective) <= 2e-9 * abs(exact.objective)
    assert found.trace["distance"][-1] < 1e-6


def test_network_lasso_admm_is_hallacs_iteration():
    # the scaled form of the paper of 2015, with copies z and scaled duals u, for the mean loss, where everything is
    # closed form
    rng = np.random.default_rng(0)
    V, p, rho = 6, 2, 0.9
    edges = [(1, 0), (2, 1), (3, 1), (4, 3), (5, 0)]
    X = rng.normal(size=(V, p))
    graph = Graph.from_indices(range(V), edges, weights=rng.uniform(0.5, 2, 5))
    problem = Problem(Federation({k: X[k : k + 1] for k in range(V)}), graph, loss="mean", penalty="l2", lam=0.05)
    ours: list[np.ndarray] = []
    network_lasso_admm(problem, 25, rho=rho, record_every=1, callbacks=[lambda now: ours.append(now.theta)])
    x = np.zeros((V, p))
    ends = [tuple(e) for e in graph.edges.tolist()]
    weight = dict(zip(ends, graph.weights, strict=True))
    z = {(a, b): np.zeros(p) for i, j in ends for a, b in ((i, j), (j, i))}
    u = {pair: np.zeros(p) for pair in z}
    for theta in ours:
        for i in range(V):
            near = [z[i, j] - u[i, j] for (k, j) in z if k == i]
            x[i] = (X[i] + rho * sum(near)) / (1 + rho * len(near))
        for i, j in ends:
            a, b = x[i] + u[i, j], x[j] + u[j, i]
            d = PROX["l2"](a - b, 2 * problem.strength * weight[i, j] / rho)
            z[i, j], z[j, i] = (a + b + d) / 2, (a + b - d) / 2
            u[i, j] = u[i, j] + x[i] - z[i, j]
            u[j, i] = u[j, i] + x[j] - z[j, i]
        assert np.abs(theta - x).max() < 1e-12


def test_bad_input():
    problem = a_problem()
    with pytest.raises(ParameterError, match="decay must lie between 0 and 1"):
        subgradient_descent(problem, decay=2.0)
    with pytest.raises(ParameterError, match="step must be a positive number, got 0"):
        subgradient_descent(problem, step=0)
    with pytest.raises(ParameterError, match="batch_size is 41, but site 0 has only 40 rows"):
        subgradient_descent(problem, 10, 41)
    with pytest.raises(ParameterError, match="rho must be a positive number"):
        network_lasso_admm(problem, rho=-1.0)
    with pytest.raises(ParameterError, match="no sparsity"):
        network_lasso_admm(a_problem(sparsity=0.1))
    with pytest.raises(SolverError, match="ran away within"):
        subgradient_descent(problem, 5000, step=50.0, decay=0.0)


def test_callbacks_end_a_run():
    problem = a_problem()
    for solver in (subgradient_descent, network_lasso_admm):
        stopped = solver(problem, 100, callbacks=[lambda now: now.n_iter >= 7], record_every=1)
        assert stopped.status == "interrupted" and stopped.n_iter == 7
