"""The exact solver against cvxpy and closed forms, and its certificate against the truth."""

from __future__ import annotations

import tracemalloc
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedkin
from builders import LOSS_NAMES, PENALTY_NAMES, federation, random_graph, ring
from cvxpy_reference import reference
from exact_checks import check_against, check_gaps
from fedkin import Federation, Graph, Problem, solve
from fedkin.errors import ConvergenceWarning
from fedkin.losses import HuberLoss

# --- against cvxpy ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("penalty", PENALTY_NAMES)
@pytest.mark.parametrize("loss", LOSS_NAMES)
def test_optimum_with_weights_sparsity_ridge_and_offset(loss: str, penalty: str) -> None:
    fed = federation(loss, (8, 3, 12, 8, 2), q=3, seed=3, offset=True)
    graph = random_graph(5, 0.6, seed=4, weighted=True)
    problem = Problem(fed, graph, loss, penalty, lam=0.05, sparsity=[0.1, 0.0, 0.3, 0.1, 0.02], ridge=0.1)
    check_against(problem)


@pytest.mark.parametrize("penalty", PENALTY_NAMES)
@pytest.mark.parametrize("loss", LOSS_NAMES)
def test_reported_gaps_are_never_below_the_true_ones(loss: str, penalty: str) -> None:
    fed = federation(loss, (10, 12, 10, 14), q=2, seed=5)
    problem = Problem(fed, ring(4), loss, penalty, lam=0.1, sparsity=0.02)
    optimum = min(solve(problem, 1e-11).objective, reference(problem).objective)
    for tol in (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6):
        check_gaps(solve(problem, tol), optimum)
    for limit in (1, 2, 3, 7, 12):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            check_gaps(solve(problem, 1e-14, max_iter=limit), optimum)


@pytest.mark.parametrize("penalty", PENALTY_NAMES)
@pytest.mark.parametrize("loss", ["linear", "huber", "logistic", "poisson", "multinomial"])
def test_fewer_rows_than_parameters(loss: str, penalty: str) -> None:
    """The minimiser is not unique site by site, but gaps must hold all the same."""
    fed = federation(loss, (2, 3, 2, 3, 9), q=4, seed=6)
    # a ridge keeps pooled likelihoods from running away; it is too light to help with the certificate
    ridge = 0.0 if loss in ("linear", "huber") else 1e-3
    problem = Problem(fed, random_graph(5, 0.8, seed=1), loss, penalty, lam=0.02, ridge=ridge)
    solution = check_against(problem, tol=1e-7, theta_tol=None)
    # level sets prove a ball for quadratic losses; ridges need none
    assert (solution.radius is None) == (loss != "huber")


@pytest.mark.parametrize("penalty", PENALTY_NAMES)
def test_losses_that_differ_between_sites(penalty: str) -> None:
    fed = federation("logistic", (12, 14, 12, 16, 10, 12), q=2, seed=7)
    loss = {0: "linear", 1: "logistic", 2: "poisson", 3: HuberLoss(0.3), 4: "mean", 5: "logistic"}
    check_against(Problem(fed, random_graph(6, 0.6, seed=3), loss, penalty, lam=0.02, sparsity=0.01))


@settings(max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 6),
    share=st.floats(0.0, 1.0),
    penalty=st.sampled_from(PENALTY_NAMES),
    loss=st.sampled_from(["mean", "linear", "huber"]),
    log_lam=st.floats(-4.0, 1.0),
)
def test_random_graphs(seed: int, n: int, share: float, penalty: str, loss: str, log_lam: float) -> None:
    fed = federation(loss, tuple(np.random.default_rng(seed).integers(4, 12, size=n)), q=2, seed=seed)
    graph = random_graph(n, share, seed=seed, weighted=bool(seed % 2))
    check_against(Problem(fed, graph, loss, penalty, lam=10.0**log_lam, ridge=0.05), theta_tol=1e-3)


@pytest.mark.parametrize("penalty", PENALTY_NAMES)
@pytest.mark.parametrize(
    "edges",
    {
        "path": [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)],
        "ring": [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 0)],
        "star": [(0, 1), (0, 2), (0, 3), (0, 4), (0, 5)],
        "disconnected": [(0, 1), (1, 2), (3, 4)],
    }.items(),
    ids=lambda item: item[0],
)
def test_shapes_of_graphs(edges: tuple[str, list[tuple[int, int]]], penalty: str) -> None:
    fed = federation("linear", (8, 9, 10, 8, 9, 10), q=2, seed=8)
    check_against(Problem(fed, Graph(range(6), edges[1]), "linear", penalty, lam=0.05))


# --- special cases ---------------------------------------------------------------------------------------------------


def test_global_per_component() -> None:
    fed = federation("mean", (3, 5, 4, 6), q=2)
    solution = solve(Problem(fed, Graph(range(4), [(0, 1), (2, 3)]), "mean", "l2", lam=100.0), 1e-12)
    means = np.stack([fed[u].X.mean(axis=0) for u in range(4)])
    np.testing.assert_allclose(solution.theta[:2], means[:2].mean(axis=0) * np.ones((2, 1)), atol=1e-7)
    np.testing.assert_allclose(solution.theta[2:], means[2:].mean(axis=0) * np.ones((2, 1)), atol=1e-7)


def test_one_site() -> None:
    fed = federation("logistic", (20,), q=2)
    solution = solve(Problem(fed, Graph.empty([0]), "logistic", lam=1.0))
    assert solution.status == "converged"
    assert solution.theta.shape == (1, 2)
    assert solution.alpha.shape == (0, 2)


@pytest.mark.parametrize("backend", ["numpy", "numba"])
def test_isolated_sites_with_fewer_rows_than_parameters(backend: str) -> None:
    fed = federation("linear", (2, 3, 9), q=4)
    solution = solve(Problem(fed, Graph(range(3), [(1, 2)]), lam=0.05), backend=backend)
    assert solution.status == "converged"
    assert solution.radius is None
    np.testing.assert_allclose(fed[0].X @ solution.theta[0], fed[0].y, atol=1e-9)


# --- sparsity --------------------------------------------------------------------------------------------------------


def test_sparsity_alone_is_the_lasso_of_scikit_learn() -> None:
    from sklearn.linear_model import Lasso

    fed = federation("linear", (30, 10, 6), q=8, seed=2)
    solution = solve(Problem(fed, Graph.empty(range(3)), sparsity={0: 0.1, 1: 0.2, 2: 0.3}), 1e-10)
    assert solution.radius is None, "sparsity bounds the parameters, also with fewer rows than columns"
    for u, alpha in ((0, 0.1), (1, 0.2), (2, 0.3)):
        other = Lasso(alpha=alpha, fit_intercept=False, tol=1e-14, max_iter=10**6).fit(fed[u].X, fed[u].y)
        np.testing.assert_allclose(solution.theta[u], other.coef_, atol=1e-5)
        np.testing.assert_array_equal(solution.theta[u] == 0, other.coef_ == 0)


@pytest.mark.parametrize("penalty", PENALTY_NAMES)
@pytest.mark.parametrize("loss", LOSS_NAMES)
def test_a_large_sparsity_is_exactly_zero(loss: str, penalty: str) -> None:
    fed = federation(loss, (12, 9, 10), q=2, seed=3)
    solution = solve(Problem(fed, ring(3), loss, penalty, lam=0.1, sparsity=50.0))
    assert not solution.theta.any()
    assert solution.gap <= 1e-6


# --- fusion ----------------------------------------------------------------------------------------------------------


def test_l1_fuses_coordinate_by_coordinate() -> None:
    z = np.array([[0.0, 0.0], [0.1, 5.0]])
    fed = Federation({u: z[[u]] for u in range(2)})
    solution = solve(Problem(fed, Graph.complete(range(2)), "mean", "l1", lam=0.1), 1e-13)
    assert solution.theta[0, 0] == solution.theta[1, 0]
    np.testing.assert_allclose(solution.theta[:, 1], [0.2, 4.8], atol=1e-6)


# --- size ------------------------------------------------------------------------------------------------------------


def test_many_sites_need_nothing_quadratic_in_their_number() -> None:
    """20,000 sites: a single V x V array of numbers would be 3.2 GB."""
    n = 20_000
    rng = np.random.default_rng(0)
    labels = np.arange(n) // 100
    z = rng.normal(size=(n // 100, 2))[labels] + 0.1 * rng.normal(size=(n, 2))
    near = np.arange(n)[:, None] // 100 * 100 + rng.integers(0, 100, size=(n, 4))
    pairs = np.column_stack([np.repeat(np.arange(n), 4), near.ravel()])
    pairs = np.unique(np.sort(pairs[pairs[:, 0] != pairs[:, 1]], axis=1), axis=0)
    tracemalloc.start()
    try:
        problem = Problem(
            Federation.from_arrays(z, None, np.arange(n)),
            Graph.from_indices(range(n), pairs),
            "mean",
            "l2",
            lam=0.1 / n,
        )
        solution = solve(problem, backend="numpy")
        top = fedkin.lam_max(problem, tol=0.1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert solution.status == "converged"
    assert peak < 300e6
    assert top > problem.lam
    # hardly anyone is left alone in a cluster of a hundred
    assert len(np.unique(solution.clusters(problem.graph))) < 1000
