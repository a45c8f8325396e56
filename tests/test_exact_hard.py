"""The exact solver where designs, classes, counts and units are difficult, or have no minimiser."""

from __future__ import annotations

import numpy as np
import pytest

from builders import PENALTY_NAMES, federation, random_graph, ring, star
from cvxpy_reference import reference
from exact_checks import check_against, check_gaps
from fedkin import Federation, Graph, Problem, cross_validate_lam, solve
from fedkin.errors import ParameterError, SolverError
from fedkin.losses import HuberLoss
from fedkin.solvers import solve_fused

# --- fewer rows than parameters --------------------------------------------------------------------------------------


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
    check_gaps(solution, solve(problem, 1e-10).objective)


@pytest.mark.parametrize(("lam", "most"), [(0.05, 500), (0.5, 250), (2.0, 100)])
@pytest.mark.parametrize("backend", ["numpy", "numba"])
def test_sites_with_few_rows_do_not_delay_the_certificate(lam: float, most: int, backend: str) -> None:
    # with nothing but a proven ball it took 978, 310 and 150 iterations
    assert solve(scarce("l1", lam), 1e-6, backend=backend).n_iter <= most


def test_paths_with_few_rows_on_some_sites_are_those_of_single_solves() -> None:
    problem = scarce("l1", 0.5)
    choice = cross_validate_lam(problem, [2.0, 1.0, 0.5, 0.25], folds=3, tol=1e-8, backend="numba")
    reference = cross_validate_lam(problem, [2.0, 1.0, 0.5, 0.25], folds=3, tol=1e-8, backend="numpy")
    np.testing.assert_allclose(choice.scores, reference.scores, rtol=1e-4)


# --- hard cases ------------------------------------------------------------------------------------------------------


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


def test_separable_classes_without_a_ridge_have_no_minimiser() -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(3, 20, 2))
    y = (rng.random((3, 20)) < 0.5).astype(float)
    y[1] = X[1, :, 0] > 0
    fed = Federation({f"site {u}": (X[u], y[u]) for u in range(3)})
    with pytest.raises(SolverError, match=r"'site 1' run away.*add ridge"):
        solve(Problem(fed, Graph.empty(fed.sites), "logistic"))
    # neighbours hold it
    assert solve(Problem(fed, Graph.complete(fed.sites), "logistic", lam=0.05)).status == "converged"


@pytest.mark.parametrize("penalty", ["l1", "l2"])
@pytest.mark.parametrize("lam", [0.01, 10.0])
def test_sites_that_are_separable_together_have_no_minimiser(penalty: str, lam: float) -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(4, 40, 2))
    y = (X[:, :, 0] > 0).astype(float)
    fed = Federation({name: (X[u], y[u]) for u, name in enumerate("ab")})
    with pytest.raises(SolverError, match=r"'a' and of all sites it is connected to run.*; add ridge=0.001 or so$"):
        solve(Problem(fed, Graph.complete("ab"), "logistic", penalty, lam=lam))
    # a tiny ridge holds them
    assert solve(Problem(fed, Graph.complete("ab"), "logistic", penalty, lam=lam, ridge=1e-9)).status == "converged"
    # and so they are found beside others that are not separable
    y[2:] = rng.random((2, 40)) < 0.5
    fed = Federation({name: (X[u], y[u]) for u, name in enumerate("abcd")})
    with pytest.raises(SolverError, match="'a' and of all sites it is connected to run away"):
        solve(Problem(fed, Graph("abcd", [("a", "b"), ("c", "d")]), "logistic", penalty, lam=lam))


@pytest.mark.parametrize("backend", ["numpy", "numba"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_iter": 1.5}, "max_iter must be a whole number of at least 1, got 1.5"),
        ({"max_iter": 0}, "max_iter must be a whole number"),
        ({"tol": "small"}, "tol must be a positive number, got 'small'"),
        ({"warm_start": 3}, "warm_start must be a Solution, as solve returns it, got 3"),
    ],
)
def test_wrong_options_are_named(backend: str, options: dict[str, object], message: str) -> None:
    problem = Problem(federation("linear", (5, 5)), Graph.complete(range(2)), lam=0.1)
    with pytest.raises(ParameterError, match=message):
        solve(problem, backend=backend, **options)


def test_counts_that_are_all_zero_have_no_minimiser() -> None:
    fed = Federation({"a": (np.ones((5, 1)), np.zeros(5)), "b": (np.ones((5, 1)), np.arange(5.0))})
    with pytest.raises(SolverError, match="'a' run away"):
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


def test_an_exact_fit_has_a_small_gap_too() -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(3, 8, 2))
    fed = Federation({u: (X[u], X[u] @ [1.0, 2.0]) for u in range(3)})
    solution = solve(Problem(fed, ring(3), lam=0.1))
    assert solution.status == "converged"
    np.testing.assert_allclose(solution.theta, np.tile([1.0, 2.0], (3, 1)), atol=1e-5)


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
