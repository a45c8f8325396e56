"""The exact solver with custom losses, the ball that holds a minimiser, and how solves end."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import PENALTY_NAMES, federation, log_cosh, ring
from cvxpy_reference import check_gaps, reference
from fedkin import Federation, Graph, Problem, solve
from fedkin.datasets import paper_design
from fedkin.errors import ConvergenceWarning, ParameterError, SolverError
from fedkin.losses import UserLoss
from fedkin.solvers import MinimizerBall


@pytest.mark.parametrize("penalty", PENALTY_NAMES)
@pytest.mark.parametrize("hessian", [True, False])
def test_a_loss_written_by_hand_gives_what_the_built_in_one_gives(hessian: bool, penalty: str) -> None:
    def value(theta, X, y, offset):
        return float(np.mean(np.logaddexp(0, X @ theta) - y * (X @ theta)))

    def gradient(theta, X, y, offset):
        return X.T @ (1 / (1 + np.exp(-X @ theta)) - y) / len(y)

    def second(theta, X, y, offset):
        mu = 1 / (1 + np.exp(-X @ theta))
        return (X.T * (mu * (1 - mu))) @ X / len(y)

    fed = federation("logistic", (15, 12, 18), q=2, seed=4)
    own = UserLoss(value, gradient, second if hessian else None)
    one = solve(Problem(fed, ring(3), own, penalty, lam=0.03), 1e-8)
    other = solve(Problem(fed, ring(3), "logistic", penalty, lam=0.03), 1e-10)
    np.testing.assert_allclose(one.theta, other.theta, atol=1e-4)
    assert one.objective == pytest.approx(other.objective, rel=1e-7)
    assert one.radius is not None, "nothing but a ball certifies a loss of which nothing is known"
    check_gaps(one, other.objective)


def test_strong_convexity_or_a_ridge_makes_the_certificate_of_a_user_loss_unconditional() -> None:
    fed = federation("linear", (8, 9, 10), q=2)
    ridged = Problem(fed, ring(3), log_cosh(), lam=0.05, ridge=0.1)
    assert solve(ridged).radius is None
    strong = replace(log_cosh(), strong_convexity=1e-3)
    assert solve(Problem(fed, ring(3), strong, lam=0.05)).radius is None
    assert solve(Problem(fed, ring(3), log_cosh(), lam=0.05, radius=20.0)).radius is None


@pytest.mark.parametrize("wrong", ["sign", "size"])
def test_a_gradient_that_does_not_belong_to_the_loss_is_found_out(wrong: str) -> None:
    plain = log_cosh()
    factor = -1.0 if wrong == "sign" else 100.0
    liar = replace(plain, gradient_fn=lambda *rows: factor * plain.gradient_fn(*rows))
    fed = Federation(
        {f"site {u}": (rows.X, rows.y) for u, rows in enumerate(map(federation("linear", (8, 9)).__getitem__, (0, 1)))}
    )
    problem = Problem(fed, Graph.complete(fed.sites), {"site 0": plain, "site 1": liar}, lam=0.01)
    with pytest.raises(SolverError, match=r"'site 1' does not decrease as its gradient predicts.*gradient_fn matches"):
        solve(problem)


def test_losses_that_are_not_finite_are_named() -> None:
    fed = Federation(
        {"a": (np.ones((3, 1)), np.ones(3), np.zeros(3)), "b": (np.ones((3, 1)), np.ones(3), np.full(3, 800.0))}
    )
    with pytest.raises(SolverError, match="loss at theta = 0 of site 'b' is not finite; scale"):
        solve(Problem(fed, Graph.complete(fed.sites), "poisson", lam=0.1))
    broken = replace(log_cosh(), gradient_fn=lambda *rows: np.full(1, np.nan))
    with pytest.raises(SolverError, match="gradient of site 'a' is not finite"):
        solve(Problem(fed, Graph.complete(fed.sites), {"a": broken, "b": log_cosh()}, lam=0.1))


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), penalty=st.sampled_from(PENALTY_NAMES), lam=st.sampled_from([1e-3, 0.03, 1.0]))
def test_proven_balls_hold_the_minimiser(seed: int, penalty: str, lam: float) -> None:
    sizes = tuple(np.random.default_rng(seed).integers(1, 4, size=5))
    fed = federation("linear", (*sizes, 12), q=3, seed=seed)
    problem = Problem(fed, ring(6), "linear", penalty, lam=lam)
    best = reference(problem)
    longest = np.linalg.norm(best.theta, axis=1).max()
    for theta in (best.theta, np.zeros_like(best.theta)):
        radius, proven = MinimizerBall(problem.fused).radius(theta, problem.fused.value(theta))
        assert proven
        assert longest <= radius * (1 + 1e-6)


def test_balls_of_sparse_problems_are_proven_for_every_loss_with_a_lower_bound() -> None:
    for loss in ("linear", "logistic", "poisson", "huber", "multinomial"):
        fed = federation(loss, (2, 3), q=4, seed=1)
        problem = Problem(fed, Graph.complete(range(2)), loss, lam=0.01, sparsity=0.05)
        best = reference(problem)
        radius, proven = MinimizerBall(problem.fused).radius(best.theta, problem.fused.value(best.theta))
        assert proven
        assert np.linalg.norm(best.theta, axis=1).max() <= radius
        assert solve(problem).radius is None


def test_the_iteration_limit_is_a_status_and_a_warning_with_advice() -> None:
    design = paper_design(10, 20, 3, 2)
    problem = Problem(design.federation, design.graph, lam=0.01)
    with pytest.warns(ConvergenceWarning, match="limit of 7 iterations.*raise max_iter") as caught:
        solution = solve(problem, 1e-12, max_iter=7)
    assert caught[0].filename == __file__, "the warning points at the caller"
    assert solution.status == "iteration_limit"
    assert solution.n_iter == 7
    assert 1e-12 < solution.gap < 10
    assert "raise max_iter" in solution.message


@pytest.mark.parametrize("calls", [1, 5, 40])
def test_interrupted_in_a_users_loss(calls: int) -> None:
    left = {"calls": 10**9}
    plain = log_cosh()

    def gradient(theta, X, y, offset):
        left["calls"] -= 1
        if left["calls"] < 0:
            raise KeyboardInterrupt
        return plain.gradient_fn(theta, X, y, offset)

    fed = federation("linear", (8, 9, 10), q=2)
    problem = Problem(fed, ring(3), replace(plain, gradient_fn=gradient), lam=0.05)
    left["calls"] = calls
    solution = solve(problem, 1e-10)
    assert solution.status == "interrupted"
    assert "warm_start" in solution.message
    assert np.isfinite(solution.objective)
    assert solution.objective == pytest.approx(problem.objective(solution.theta))
    left["calls"] = 10**9
    assert solve(problem, 1e-10, warm_start=solution).status == "converged"


def test_warm_starts() -> None:
    design = paper_design(20, 30, 4, 2)
    for loss in ("linear", "huber"):
        for sparsity in (0.0, 0.05):
            problem = Problem(design.federation, design.graph, loss, lam=0.002, sparsity=sparsity)
            cold = solve(problem, 1e-9)
            assert solve(problem, 1e-9, warm_start=cold).n_iter < cold.n_iter / 2
            near = problem.with_lam(0.0021)
            again, fresh = solve(near, 1e-10, warm_start=cold), solve(near, 1e-10)
            np.testing.assert_allclose(again.theta, fresh.theta, atol=1e-4)
            assert again.objective == pytest.approx(fresh.objective, rel=1e-9)


@pytest.mark.parametrize("options", [{"max_iter": 1.5}, {"max_iter": 0}, {"tol": "small"}, {"warm_start": 3}])
def test_wrong_options_are_named(options: dict[str, object]) -> None:
    problem = Problem(federation("linear", (5, 5)), Graph.complete(range(2)), lam=0.1)
    with pytest.raises(ParameterError, match=f"{next(iter(options))} must be"):
        solve(problem, **options)


def test_a_warm_start_of_another_shape_is_refused() -> None:
    fed = federation("linear", (8, 9, 10), q=2)
    first = solve(Problem(fed, ring(3), lam=0.1))
    with pytest.raises(ParameterError, match=r"alpha \(3, 2\).*needs \(3, 2\) and \(1, 2\).*same graph"):
        solve(Problem(fed, Graph(range(3), [(0, 1)]), lam=0.1), warm_start=first)
