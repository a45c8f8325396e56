"""The exact solver against cvxpy and closed forms, easy and hard problems, and its certificate against the truth."""

from __future__ import annotations

import tracemalloc
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedkin
from builders import LOSS_NAMES, PENALTY_NAMES, federation, random_graph, ring, star
from cvxpy_reference import check_against, check_gaps, reference
from fedkin import Federation, Graph, Problem, solve
from fedkin.errors import ConvergenceWarning, SolverError
from fedkin.losses import HuberLoss
from fedkin.solvers import solve_fused


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


@pytest.mark.parametrize("backend", ["numpy", "numba"])
def test_isolated_sites_with_fewer_rows_than_parameters(backend: str) -> None:
    fed = federation("linear", (2, 3, 9), q=4)
    solution = solve(Problem(fed, Graph(range(3), [(1, 2)]), lam=0.05), backend=backend)
    assert solution.status == "converged"
    assert solution.radius is None
    np.testing.assert_allclose(fed[0].X @ solution.theta[0], fed[0].y, atol=1e-9)


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


def scarce(penalty: str, lam: float) -> Problem:
    """Every other site has 1 to 3 rows for 4 parameters, and neighbours with 30."""
    rng, truth = np.random.default_rng(3), np.array([1.0, -2.0, 0.5, 3.0])
    site = np.repeat(np.arange(12), [1 + u % 3 if u % 2 else 30 for u in range(12)])
    X = np.column_stack([np.ones(site.size), rng.normal(size=(site.size, 3))])
    y = 100.0 * (X @ truth + rng.normal(size=site.size) + (site % 4) * X[:, 1])
    fed = Federation.from_arrays(X, y, site)
    return Problem(fed, Graph.complete(fed.sites), penalty=penalty, lam=lam)


@pytest.mark.parametrize("penalty", PENALTY_NAMES)
@pytest.mark.parametrize("lam", [0.05, 0.5, 2.0])
@pytest.mark.parametrize("backend", ["numpy", "numba"])
def test_gaps_hold_where_regular_neighbours_take_over_the_pull(penalty: str, lam: float, backend: str) -> None:
    problem = scarce(penalty, lam)
    solution = solve(problem, 1e-6, backend=backend)
    assert solution.status == "converged" and solution.radius is None
    # sites with few rows do not delay the certificate: with nothing but a proven ball it took 978, 310 and 150
    assert penalty != "l1" or solution.n_iter <= {0.05: 500, 0.5: 250, 2.0: 100}[lam]
    check_gaps(solution, solve(problem, 1e-10).objective)


@pytest.mark.parametrize("ridge", [1e-3, 1e-6, 1e-9])
def test_separable_classes_with_a_tiny_ridge(ridge: float) -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(6, 20, 2))
    fed = Federation({u: (X[u], (X[u, :, 0] > 0).astype(float)) for u in range(6)})
    problem = Problem(fed, ring(6), "logistic", lam=1e-4, ridge=ridge)
    if ridge >= 1e-6:
        check_against(problem, tol=1e-7, theta_tol=None)
    else:
        solution = solve(problem)
        assert solution.status == "converged"
        assert solution.radius is None


@pytest.mark.parametrize("penalty", ["l1", "l2"])
@pytest.mark.parametrize("lam", [0.01, 10.0])
def test_sites_that_are_separable_together_have_no_minimiser(penalty: str, lam: float) -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(4, 40, 2))
    y = (X[:, :, 0] > 0).astype(float)
    fed = Federation({name: (X[u], y[u]) for u, name in enumerate("ab")})
    with pytest.raises(SolverError, match=r"'a' and of all sites it is connected to diverge.*; add ridge=0.001 or so$"):
        solve(Problem(fed, Graph.complete("ab"), "logistic", penalty, lam=lam))
    # a tiny ridge holds them
    assert solve(Problem(fed, Graph.complete("ab"), "logistic", penalty, lam=lam, ridge=1e-9)).status == "converged"
    # and so they are found beside others that are not separable
    y[2:] = rng.random((2, 40)) < 0.5
    fed = Federation({name: (X[u], y[u]) for u, name in enumerate("abcd")})
    with pytest.raises(SolverError, match="'a' and of all sites it is connected to diverge"):
        solve(Problem(fed, Graph("abcd", [("a", "b"), ("c", "d")]), "logistic", penalty, lam=lam))


def test_counts_that_are_all_zero_have_no_minimiser() -> None:
    fed = Federation({"a": (np.ones((5, 1)), np.zeros(5)), "b": (np.ones((5, 1)), np.arange(5.0))})
    with pytest.raises(SolverError, match="'a' diverge"):
        solve(Problem(fed, Graph.empty(fed.sites), "poisson"))
    check_against(Problem(fed, Graph.complete(fed.sites), "poisson", lam=0.1))


def test_poisson_with_huge_counts_and_exposures() -> None:
    rng = np.random.default_rng(0)
    data = {}
    for u in range(5):
        X = np.column_stack([np.ones(15), rng.normal(size=15)])
        exposure = 10.0 ** rng.uniform(1, 6, size=15)
        y = rng.poisson(exposure * np.exp(-3 + 0.2 * u + 0.3 * X[:, 1])).astype(float)
        data[u] = (X, y, np.log(exposure))
    problem = Problem(Federation(data), ring(5), "poisson", "l2", lam=10.0)
    solution = solve(problem, 1e-9)
    assert solution.n_iter < 1000
    # log-likelihoods of 10^5 leave cvxpy few digits
    other = reference(problem)
    assert solution.objective <= other.objective + 1e-7 * abs(other.objective)
    np.testing.assert_allclose(solution.theta, other.theta, atol=1e-2)


@pytest.mark.parametrize("penalty", PENALTY_NAMES)
def test_huber_with_outliers_everywhere(penalty: str) -> None:
    rng = np.random.default_rng(1)
    data = {}
    for u in range(6):
        n = 4 if u < 2 else 15
        X = rng.normal(size=(n, 2))
        y = X @ [1.0, -1.0] + np.where(rng.random(n) < 0.5, 1e3 * rng.normal(size=n), 0.1 * rng.normal(size=n))
        data[u] = (X, y if u else np.full(n, 1e4))
    solution = check_against(
        Problem(Federation(data), ring(6), HuberLoss(0.5), penalty, lam=0.02), theta_tol=None, tol=1e-8
    )
    assert solution.n_iter < 3000


def test_constant_and_duplicate_columns() -> None:
    rng = np.random.default_rng(0)
    data = {}
    for u in range(4):
        X = rng.normal(size=(12, 2))
        X = np.column_stack([X, X[:, 0], np.ones(12), np.zeros(12)])
        data[u] = (X, rng.normal(size=12))
    for penalty in PENALTY_NAMES:
        solution = check_against(
            Problem(Federation(data), ring(4), "linear", penalty, lam=0.05), theta_tol=None, tol=1e-8
        )
        assert solution.radius is None
    assert solve(Problem(Federation(data), ring(4), "huber", "l2", lam=0.05)).status == "converged"


@pytest.mark.parametrize("penalty", ["l1", "l2"])
def test_units_degrees_weights_and_near_collinearity_are_bearable(penalty: str) -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 30, 4))
    y = X.sum(axis=2) + rng.normal(size=(60, 30))

    def iterations(X: np.ndarray, graph: Graph, lam: float) -> int:
        return solve(
            Problem(Federation({u: (X[u], y[u]) for u in range(60)}), graph, "linear", penalty, lam=lam)
        ).n_iter

    dense = random_graph(60, 0.2, seed=1)
    spread = dense.reweighted(10.0 ** rng.uniform(-3, 3, size=dense.n_edges))
    assert iterations(X * np.geomspace(1, 100, 4), dense, 1e-3) < 1000
    assert iterations(X, star(60), 1e-3) < 300
    assert iterations(X, spread, 1e-4) < 1000
    almost = np.concatenate([X, X[:, :, :1] + 1e-2 * rng.normal(size=(60, 30, 1))], axis=2)
    assert iterations(almost, dense, 1e-3) < 10_000


def test_models_that_are_flat_at_every_site_do_not_hold_it_up():
    rng, v, n, p = np.random.default_rng(0), 8, 16, 24
    X = rng.normal(size=(v * n, 4)) @ rng.normal(size=(4, p)) + 0.1 * rng.normal(size=(v * n, p))
    X /= X.std(axis=0)
    y = rng.random(v * n) < 1 / (1 + np.exp(-X @ (0.2 * rng.normal(size=p))))
    fed = Federation.from_arrays(X, y.astype(float), np.repeat(np.arange(v), n))
    problem = Problem(fed, Graph.complete(range(v)), "logistic", lam=3e-4)
    solution = solve(problem, 1e-4)
    assert solution.status == "converged"
    assert solution.n_iter < 1800  # without a curb on steps where models are flat it takes 2200
    assert solution.objective == pytest.approx(reference(problem, 1e-8).objective, rel=1e-5)
    rough = solve_fused(problem.fused, 1e-4, quiet=True, certify=False)
    assert rough.n_iter <= solution.n_iter
    assert rough.objective / v == pytest.approx(solution.objective, rel=1e-3)
