"""How the exact solver ends: limits, interruptions, warm starts, wrong arguments."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from builders import federation, log_cosh, ring
from exact_checks import check_gaps
from fedkin import Federation, Graph, Problem, solve
from fedkin.core import L1
from fedkin.datasets import paper_design
from fedkin.errors import ConvergenceWarning, ParameterError

# --- how it ends -----------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("scale", "noise", "advice"),
    [(1e4, 1.0, "standardise the features, whose sizes differ by a factor of"), (1.0, 1e-5, "drop features or add a")],
)
def test_advice_at_the_limit_fits_the_problem(scale: float, noise: float, advice: str) -> None:
    rng = np.random.default_rng(0)
    data = {}
    for u in range(4):
        X = rng.normal(size=(30, 2)) @ [[1.0, 1.0], [0.0, noise]] * [1.0, scale]
        data[u] = X, X @ [1.0, -1.0] + rng.normal(size=30)
    problem = Problem(Federation(data), Graph.complete(range(4)), lam=0.1)
    with pytest.warns(ConvergenceWarning, match=f"limit of 3 iterations.*{advice}.*or raise max_iter"):
        solve(problem, 1e-13, max_iter=3)


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


class Interrupting(L1):
    """Raises Ctrl-C at its n-th projection."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def project(self, y, radius):
        self.calls -= 1
        if self.calls == 0:
            raise KeyboardInterrupt
        return super().project(y, radius)


def test_interrupted_in_the_quadratic_core() -> None:
    design = paper_design(10, 20, 3, 2)
    best = solve(Problem(design.federation, design.graph, lam=0.01), 1e-12)
    early, late = (
        solve(Problem(design.federation, design.graph, penalty=Interrupting(calls), lam=0.01), 1e-12, backend="numpy")
        for calls in (3, 28)
    )
    assert early.status == late.status == "interrupted"
    assert np.isinf(early.gap), "nothing is certified before the first check"
    assert late.gap < 1e-2
    check_gaps(late, best.objective)


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


def test_a_warm_start_of_another_shape_is_refused() -> None:
    fed = federation("linear", (8, 9, 10), q=2)
    first = solve(Problem(fed, ring(3), lam=0.1))
    with pytest.raises(ParameterError, match=r"alpha \(3, 2\).*needs \(3, 2\) and \(1, 2\).*same graph"):
        solve(Problem(fed, Graph(range(3), [(0, 1)]), lam=0.1), warm_start=first)


def test_senseless_arguments() -> None:
    problem = Problem(federation("linear", (5, 5)), Graph.complete(range(2)), lam=0.1)
    for tol in (0.0, -1.0, np.nan):
        with pytest.raises(ParameterError, match="tol must be a positive number"):
            solve(problem, tol)
    with pytest.raises(ParameterError, match="max_iter must be a whole number of at least 1, got 0"):
        solve(problem, max_iter=0)
