"""A baseline on the same objective: subgradient descent (GD, SGD)."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from builders import design_problem
from fedkin.admm.trace import penalty_subgradient, subgradient_descent
from fedkin.errors import ParameterError, SolverError
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


def test_bad_input():
    problem = a_problem()
    with pytest.raises(ParameterError, match="decay must lie between 0 and 1"):
        subgradient_descent(problem, decay=2.0)
    with pytest.raises(ParameterError, match="step must be a positive number, got 0"):
        subgradient_descent(problem, step=0)
    with pytest.raises(ParameterError, match="batch_size is 41, but site 0 has only 40 rows"):
        subgradient_descent(problem, 10, 41)
    with pytest.raises(SolverError, match="diverged within"):
        subgradient_descent(problem, 5000, step=50.0, decay=0.0)
