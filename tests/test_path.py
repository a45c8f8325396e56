"""Where everything is fused, and solutions along decreasing penalty levels."""

from __future__ import annotations

from dataclasses import replace

import cvxpy as cp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import LOSS_NAMES, PENALTY_NAMES, federation, log_cosh, random_graph
from fedkin import Federation, Graph, Problem, lam_max, lam_path, solve
from fedkin.core import make_penalty
from fedkin.datasets import paper_design
from fedkin.errors import ConvergenceWarning, ParameterError, SolverError
from fedkin.solvers import lam_grid
from fedkin.solvers.path import fused_gradients, fused_solution, least_congestion

DUAL_NORMS = {"l1": "inf", "l2": 2, "linf": 1}


def n_clusters(problem: Problem, lam: float, tol: float = 1e-8) -> int:
    return len(np.unique(solve(problem.with_lam(lam), tol).clusters(problem.graph)))


def by_cvxpy(graph: Graph, penalty: str, gradient: np.ndarray) -> float:
    """The least congestion as a cone program."""
    flow, level = cp.Variable((graph.n_edges, gradient.shape[1])), cp.Variable()
    limits = [
        cp.norm(flow[e], DUAL_NORMS[penalty]) <= level * weight for e, weight in enumerate(graph.weights.tolist())
    ]
    balance = graph.incidence().toarray().T @ flow == -gradient
    return float(cp.Problem(cp.Minimize(level), [balance, *limits]).solve(solver=cp.CLARABEL))


def balanced(graph: Graph, p: int, seed: int) -> np.ndarray:
    """Random gradients that sum to 0 over each component."""
    gradient, labels = np.random.default_rng(seed).normal(size=(graph.n_sites, p)), graph.components()
    for label in range(labels.max() + 1):
        gradient[labels == label] -= gradient[labels == label].mean(axis=0)
    return gradient


# --- lam_max ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("penalty", PENALTY_NAMES)
@pytest.mark.parametrize("loss", LOSS_NAMES)
def test_everything_is_fused_at_lam_max_and_not_below(loss: str, penalty: str) -> None:
    fed = federation(loss, (15, 18, 15, 20, 16), q=2, seed=2)
    problem = Problem(fed, random_graph(5, 0.7, seed=1, weighted=True), loss, penalty, lam=123.0)
    top = lam_max(problem)
    assert n_clusters(problem, top) == problem.graph.n_components
    assert n_clusters(problem, 0.98 * top) > problem.graph.n_components


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(2, 9),
    p=st.integers(1, 3),
    share=st.floats(0.2, 1.0),
    penalty=st.sampled_from(PENALTY_NAMES),
    tol=st.sampled_from([1e-1, 1e-3]),
)
def test_least_congestion(seed: int, n: int, p: int, share: float, penalty: str, tol: float) -> None:
    graph = random_graph(n, share, seed=seed, weighted=bool(seed % 2))
    if graph.n_edges == 0:
        return
    gradient = balanced(graph, p, seed)
    # the cone solver's accuracy is absolute, so it gets gradients of size 1
    size = float(np.abs(gradient).max())
    exact = size * by_cvxpy(graph, penalty, gradient / size)
    assert (
        exact * (1 - 1e-6) <= least_congestion(graph, make_penalty(penalty), gradient, tol) <= exact * (1 + 1.01 * tol)
    )


@pytest.mark.parametrize("penalty", ["l2", "linf"])
def test_a_sharp_tolerance_does_not_unbalance_the_flow(penalty: str) -> None:
    """What is left to repair is then mostly rounding, which no flow can balance."""
    graph = random_graph(7, 0.5625, seed=0)
    gradient = balanced(graph, 2, 0)
    exact = by_cvxpy(graph, penalty, gradient)
    for tol in (1e-3, 1e-5, 1e-6):
        assert exact * (1 - 1e-7) <= least_congestion(graph, make_penalty(penalty), gradient, tol)


def test_the_first_order_method_agrees_with_maximum_flows() -> None:
    graph = random_graph(40, 0.1, seed=7, weighted=True)
    gradient = balanced(graph, 2, 7)
    exact = least_congestion(graph, make_penalty("l1"), gradient, 1e-3)
    assert least_congestion(graph, make_penalty("l1"), gradient, 1e-3, flow_size=0) == pytest.approx(exact, rel=2e-3)


def test_sites_that_agree_or_have_no_neighbours_need_no_penalty() -> None:
    same = Federation({u: [[1.0, 2.0]] for u in range(3)})
    assert lam_max(Problem(same, Graph.complete(range(3)), "mean")) == 0.0
    fed = federation("linear", (8, 9))
    assert lam_max(Problem(fed, Graph.empty(range(2)))) == 0.0
    np.testing.assert_array_equal(lam_grid(Problem(fed, Graph.empty(range(2)))), [0.0])
    assert lam_max(Problem(federation("linear", (8,)), Graph.empty([0]))) == 0.0


@pytest.mark.parametrize("loss", ["linear", "logistic", "huber"])
@pytest.mark.parametrize("penalty", PENALTY_NAMES)
def test_with_sparsity_it_is_an_upper_bound(loss: str, penalty: str) -> None:
    fed = federation(loss, (15, 12, 14, 16), q=3, seed=4)
    problem = Problem(fed, random_graph(4, 0.9, seed=2), loss, penalty, sparsity=0.1)
    assert n_clusters(problem, lam_max(problem)) == 1


@pytest.mark.parametrize("loss", ["linear", "poisson"])
def test_the_fused_solution_is_global_in_each_component(loss: str) -> None:
    fed = federation(loss, (12, 9, 14, 10), q=2, seed=6)
    graph = Graph(range(4), [(0, 1), (2, 3)])
    fused = fused_solution(Problem(fed, graph, loss).fused)
    far = solve(Problem(fed, graph, loss, lam=1e3), 1e-10)
    np.testing.assert_allclose(fused, far.theta, atol=1e-4)
    np.testing.assert_array_equal(fused[0], fused[1])
    gradient = fused_gradients(Problem(fed, graph, loss).fused)
    np.testing.assert_allclose(gradient[[0, 2]] + gradient[[1, 3]], 0.0, atol=1e-12)


def test_pooled_classes_that_are_separable_are_reported_with_a_site() -> None:
    X = np.array([[-1.0], [1.0]])
    fed = Federation({name: (X, [0.0, 1.0]) for name in ("north", "south")})
    with pytest.raises(SolverError, match="'north' run away"):
        lam_max(Problem(fed, Graph.complete(fed.sites), "logistic"))


# --- lam_path ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("penalty", ["l1", "l2"])
@pytest.mark.parametrize("loss", ["linear", "logistic"])
def test_solutions_of_a_path_are_those_of_cold_starts(loss: str, penalty: str) -> None:
    design = paper_design(8, 40, 2, 2, loss=loss)
    problem = Problem(design.federation, design.graph, loss, penalty)
    path = lam_path(problem, n_lams=6, tol=1e-9)
    assert len(path) == 6
    assert (np.diff(path.lams) < 0).all()
    assert path.lams[-1] == pytest.approx(1e-3 * path.lams[0])
    for lam, solution in path:
        cold = solve(problem.with_lam(lam), 1e-9)
        assert solution.status == "converged"
        assert solution.objective == pytest.approx(cold.objective, rel=1e-8)
        assert solution.objective == pytest.approx(problem.with_lam(lam).objective(solution.theta), rel=1e-12)
        np.testing.assert_allclose(solution.theta, cold.theta, atol=2e-3)
    # from everything fused to nearly nothing
    clusters = [len(np.unique(solution.clusters(problem.graph))) for solution in path.solutions]
    assert clusters[0] == problem.graph.n_components
    assert clusters[-1] > clusters[0]


def test_levels_are_sorted_and_warm_starts_save_iterations() -> None:
    design = paper_design(20, 30, 4, 2)
    problem = Problem(design.federation, design.graph)
    path = lam_path(problem, [0.001, 0.0, 0.01, 0.003], tol=1e-8)
    np.testing.assert_array_equal(path.lams, [0.01, 0.003, 0.001, 0.0])
    np.testing.assert_allclose(path.solutions[-1].theta, solve(problem.with_lam(0.0)).theta)
    fine = lam_path(problem, np.geomspace(0.01, 0.005, 12), tol=1e-8)
    cold = [solve(problem.with_lam(lam), 1e-8).n_iter for lam in fine.lams]
    assert sum(solution.n_iter for solution in fine.solutions) < 0.8 * sum(cold)


def test_senseless_levels() -> None:
    problem = Problem(federation("linear", (8, 9)), Graph.complete(range(2)))
    for lams in ([], [0.1, -0.1], [np.nan], [[0.1, 0.2]]):
        with pytest.raises(ParameterError, match="lams must be a list"):
            lam_path(problem, lams)
    with pytest.raises(ParameterError, match="n_lams must be a whole number of at least 1, got 0"):
        lam_path(problem, n_lams=0)
    for ratio in (0.0, 1.0, -1.0):
        with pytest.raises(ParameterError, match="ratio must lie between 0 and 1"):
            lam_path(problem, ratio=ratio)


def test_a_path_warns_about_levels_that_did_not_converge() -> None:
    design = paper_design(20, 30, 4, 2)
    with pytest.warns(ConvergenceWarning) as caught:
        path = lam_path(Problem(design.federation, design.graph), [0.01, 0.003], tol=1e-12, max_iter=6)
    assert {solution.status for solution in path.solutions} == {"iteration_limit"}
    assert all(warning.filename == __file__ for warning in caught)


def test_an_interruption_ends_the_whole_path() -> None:
    left = {"calls": 300}
    plain = log_cosh()

    def value(theta, X, y, offset):
        left["calls"] -= 1
        if left["calls"] == 0:
            raise KeyboardInterrupt
        return plain.value_fn(theta, X, y, offset)

    problem = Problem(federation("linear", (8, 9, 7)), Graph.complete(range(3)), replace(plain, value_fn=value))
    with pytest.raises(KeyboardInterrupt):
        lam_path(problem, np.geomspace(1.0, 1e-3, 30))
