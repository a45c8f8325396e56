"""The exact solver against cvxpy and closed forms, and its certificate against the truth."""

from __future__ import annotations

import tracemalloc
import warnings
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedkin
from cvxpy_reference import reference
from fedkin import Federation, Graph, Problem, Solution, solve
from fedkin.datasets import paper_design
from fedkin.errors import ConvergenceWarning, ParameterError, SolverError
from fedkin.losses import HuberLoss, UserLoss
from fedkin.penalties import L1
from fedkin.solvers.radius import MinimizerBall
from random_problems import LOSS_NAMES, PENALTY_NAMES, federation, log_cosh, random_graph

#: Objective values are computed with about this relative error.
ROUNDING = 1e-9


def check_against(problem: Problem, *, tol: float = 1e-10, theta_tol: float | None = 1e-4) -> Solution:
    """Solve, compare with cvxpy, and compare every gap on the way with the truth."""
    solution, other = solve(problem, tol), reference(problem)
    assert solution.status == "converged"
    size = max(abs(other.objective), 1e-9)
    assert solution.objective <= other.objective + 1e-6 * size
    assert solution.objective >= other.objective - 1e-6 * size
    if theta_tol is not None:
        np.testing.assert_allclose(solution.theta, other.theta, atol=theta_tol)
    check_gaps(solution, min(solution.objective, other.objective))
    return solution


def check_gaps(solution: Solution, optimum: float) -> None:
    """No reported gap is below the true one."""
    objective, gap = solution.trace["objective"], solution.trace["gap"]
    missing = (objective - optimum) / np.abs(objective)
    assert (gap >= missing - ROUNDING).all()
    assert solution.gap >= (solution.objective - optimum) / abs(solution.objective) - ROUNDING


def ring(n: int) -> Graph:
    return Graph.from_indices(range(n), [[u, (u + 1) % n] for u in range(n)])


# --- against cvxpy ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("penalty", PENALTY_NAMES)
@pytest.mark.parametrize("loss", LOSS_NAMES)
def test_optimum_is_that_of_cvxpy(loss: str, penalty: str) -> None:
    fed = federation(loss, (14, 18, 14, 22, 15), q=2, seed=1, groups=2)
    check_against(Problem(fed, random_graph(5, 0.7, seed=2), loss, penalty, lam=0.03))


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
    """The minimiser is not unique device by device, but gaps must hold all the same."""
    fed = federation(loss, (2, 3, 2, 3, 9), q=4, seed=6)
    # a ridge keeps pooled likelihoods from running away; it is too light to help with the certificate
    ridge = 0.0 if loss in ("linear", "huber") else 1e-3
    problem = Problem(fed, random_graph(5, 0.8, seed=1), loss, penalty, lam=0.02, ridge=ridge)
    solution = check_against(problem, tol=1e-7, theta_tol=None)
    # level sets prove a ball for quadratic losses; ridges need none
    assert (solution.radius is None) == (loss != "huber")


@pytest.mark.parametrize("penalty", PENALTY_NAMES)
def test_losses_that_differ_between_devices(penalty: str) -> None:
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


@pytest.mark.parametrize("case", ["lam=0", "no edges"])
def test_without_a_penalty_it_is_local(case: str) -> None:
    fed = federation("linear", (10, 12, 9), q=3)
    graph, lam = (Graph.complete(range(3)), 0.0) if case == "lam=0" else (Graph.empty(range(3)), 0.7)
    solution = solve(Problem(fed, graph, lam=lam))
    for u in range(3):
        own, *_ = np.linalg.lstsq(fed[u].X, fed[u].y)
        np.testing.assert_allclose(solution.theta[u], own, rtol=1e-9)
    assert solution.gap <= 1e-12


def test_local_logistic_is_that_of_scikit_learn() -> None:
    from sklearn.linear_model import LogisticRegression

    fed = federation("logistic", (40, 30), q=2)
    solution = solve(Problem(fed, Graph.empty(range(2)), "logistic"), 1e-12)
    for u in range(2):
        other = LogisticRegression(C=np.inf, fit_intercept=False, tol=1e-10).fit(fed[u].X, fed[u].y)
        np.testing.assert_allclose(solution.theta[u], other.coef_[0], atol=1e-5)


@pytest.mark.parametrize("penalty", PENALTY_NAMES)
def test_a_large_lam_is_global_with_every_device_weighted_alike(penalty: str) -> None:
    fed = federation("linear", (5, 50, 20), q=2)
    solution = solve(Problem(fed, Graph.complete(range(3)), "linear", penalty, lam=1e3), 1e-10)
    assert len(set(solution.clusters(Graph.complete(range(3))).tolist())) == 1
    weight = np.sqrt(1.0 / fed.n_samples)[fed.device_index]
    each_device, *_ = np.linalg.lstsq(fed.X * weight[:, None], fed.y * weight)
    each_row, *_ = np.linalg.lstsq(fed.X, fed.y)
    np.testing.assert_allclose(solution.theta, np.tile(each_device, (3, 1)), atol=1e-6)
    assert np.abs(each_device - each_row).max() > 0.05, "pooling the rows would be something else"


def test_global_per_component() -> None:
    fed = federation("mean", (3, 5, 4, 6), q=2)
    solution = solve(Problem(fed, Graph(range(4), [(0, 1), (2, 3)]), "mean", "l2", lam=100.0), 1e-12)
    means = np.stack([fed[u].X.mean(axis=0) for u in range(4)])
    np.testing.assert_allclose(solution.theta[:2], means[:2].mean(axis=0) * np.ones((2, 1)), atol=1e-7)
    np.testing.assert_allclose(solution.theta[2:], means[2:].mean(axis=0) * np.ones((2, 1)), atol=1e-7)


def test_two_devices_by_hand() -> None:
    """|V| F = (a^2 + (b - 2)^2) / 2 + 2 lam |a - b|: both move by 2 lam until they meet at lam = 0.5."""
    fed = Federation({"a": [[0.0]], "b": [[2.0]]})
    graph = Graph.complete(["a", "b"])
    for lam, expected in ((0.0, [0, 2]), (0.1, [0.2, 1.8]), (0.4, [0.8, 1.2]), (0.5, [1, 1]), (9.0, [1, 1])):
        for penalty in PENALTY_NAMES:
            solution = solve(Problem(fed, graph, "mean", penalty, lam=lam), 1e-12)
            np.testing.assert_allclose(solution.theta.ravel(), expected, atol=1e-5)


def test_mean_on_a_grid_is_total_variation_denoising() -> None:
    import cvxpy as cp

    rng = np.random.default_rng(0)
    picture = np.zeros((7, 6))
    picture[2:5, 1:4] = 1.0
    picture += 0.2 * rng.normal(size=picture.shape)
    grid = Graph.grid(7, 6)
    fed = Federation.from_arrays(picture.reshape(-1, 1), None, np.array([str(device) for device in grid.devices]))
    graph = Graph.from_indices(fed.devices, grid.edges)
    strength = 0.2
    solution = solve(Problem(fed, graph, "mean", lam=strength / 42), 1e-12)
    x = cp.Variable(picture.shape)
    total = 0.5 * cp.sum_squares(x - picture) + strength * (
        cp.sum(cp.abs(cp.diff(x, axis=0))) + cp.sum(cp.abs(cp.diff(x, axis=1)))
    )
    cp.Problem(cp.Minimize(total)).solve(solver=cp.CLARABEL, tol_gap_abs=1e-12, tol_gap_rel=1e-12)
    np.testing.assert_allclose(solution.theta.reshape(picture.shape), x.value, atol=1e-5)


@pytest.mark.parametrize("penalty", PENALTY_NAMES)
@pytest.mark.parametrize("loss", ["linear", "logistic"])
def test_relabelling_the_devices_changes_nothing(loss: str, penalty: str) -> None:
    fed = federation(loss, (9, 12, 10, 8, 9), q=2, seed=9)
    graph = random_graph(5, 0.7, seed=5, weighted=True)
    order = [3, 0, 4, 2, 1]
    turned = Graph(order, [(b, a) for a, b in graph.edge_ids()][::-1], graph.weights[::-1])
    one = solve(Problem(fed, graph, loss, penalty, lam=0.03), 1e-10)
    other = solve(Problem(fed.subset(order), turned, loss, penalty, lam=0.03), 1e-10)
    np.testing.assert_allclose(other.theta, one.theta[order], atol=1e-5)
    assert other.objective == pytest.approx(one.objective, rel=1e-9)


def test_one_device() -> None:
    fed = federation("logistic", (20,), q=2)
    solution = solve(Problem(fed, Graph.empty([0]), "logistic", lam=1.0))
    assert solution.status == "converged"
    assert solution.theta.shape == (1, 2)
    assert solution.alpha.shape == (0, 2)


def test_isolated_devices_keep_their_own_fit() -> None:
    fed = federation("linear", (10, 12, 9, 11), q=2)
    graph = Graph(range(4), [(0, 1)])
    for lam in (0.05, 1e4):
        solution = solve(Problem(fed, graph, lam=lam))
        for u in (2, 3):
            own, *_ = np.linalg.lstsq(fed[u].X, fed[u].y)
            np.testing.assert_allclose(solution.theta[u], own, rtol=1e-9)


@pytest.mark.parametrize("backend", ["numpy", "numba"])
def test_isolated_devices_with_fewer_rows_than_parameters(backend: str) -> None:
    if backend == "numba":
        pytest.importorskip("numba")
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


@pytest.mark.parametrize("penalty", ["l1", "l2"])
@pytest.mark.parametrize("loss", ["linear", "logistic"])
def test_devices_of_a_cluster_come_out_exactly_equal(loss: str, penalty: str) -> None:
    design = paper_design(12, 60, 3, 3, loss=loss, varrho=0.0, signal=3.0)
    lam = 0.05 if loss == "linear" else 0.03
    solution = solve(Problem(design.federation, design.truth, loss, penalty, lam=lam))
    np.testing.assert_array_equal(solution.clusters(design.truth), design.labels)
    assert len(np.unique(solution.theta, axis=0)) == 3


def test_l1_fuses_coordinate_by_coordinate() -> None:
    z = np.array([[0.0, 0.0], [0.1, 5.0]])
    fed = Federation({u: z[[u]] for u in range(2)})
    solution = solve(Problem(fed, Graph.complete(range(2)), "mean", "l1", lam=0.1), 1e-13)
    assert solution.theta[0, 0] == solution.theta[1, 0]
    np.testing.assert_allclose(solution.theta[:, 1], [0.2, 4.8], atol=1e-6)


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
        solve(Problem(fed, Graph.empty(fed.devices), "logistic"))
    # neighbours hold it
    assert solve(Problem(fed, Graph.complete(fed.devices), "logistic", lam=0.05)).status == "converged"


@pytest.mark.parametrize("penalty", ["l1", "l2"])
@pytest.mark.parametrize("lam", [0.01, 10.0])
def test_devices_that_are_separable_together_have_no_minimiser(penalty: str, lam: float) -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(4, 40, 2))
    y = (X[:, :, 0] > 0).astype(float)
    fed = Federation({name: (X[u], y[u]) for u, name in enumerate("ab")})
    with pytest.raises(SolverError, match=r"'a' and of all devices it is connected to run.*; add ridge=1e-3 or so$"):
        solve(Problem(fed, Graph.complete("ab"), "logistic", penalty, lam=lam))
    # a tiny ridge holds them
    assert solve(Problem(fed, Graph.complete("ab"), "logistic", penalty, lam=lam, ridge=1e-9)).status == "converged"
    # and so they are found beside others that are not separable
    y[2:] = rng.random((2, 40)) < 0.5
    fed = Federation({name: (X[u], y[u]) for u, name in enumerate("abcd")})
    with pytest.raises(SolverError, match="'a' and of all devices it is connected to run away"):
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
        solve(Problem(fed, Graph.empty(fed.devices), "poisson"))
    check_against(Problem(fed, Graph.complete(fed.devices), "poisson", lam=0.1))


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


def test_multinomial_with_a_class_missing_on_a_device() -> None:
    rng = np.random.default_rng(0)
    data = {u: (rng.normal(size=(15, 2)), rng.integers(0, 3 if u else 2, size=15).astype(float)) for u in range(4)}
    check_against(Problem(Federation(data), ring(4), "multinomial", lam=0.02), theta_tol=1e-3)


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

    star = Graph.from_indices(range(60), [[0, u] for u in range(1, 60)])
    dense = random_graph(60, 0.2, seed=1)
    spread = dense.reweighted(10.0 ** rng.uniform(-3, 3, size=dense.n_edges))
    assert iterations(X * np.geomspace(1, 100, 4), dense, 1e-3) < 1000
    assert iterations(X, star, 1e-3) < 300
    assert iterations(X, spread, 1e-4) < 1000
    almost = np.concatenate([X, X[:, :, :1] + 1e-2 * rng.normal(size=(60, 30, 1))], axis=2)
    assert iterations(almost, dense, 1e-3) < 10_000


# --- losses of one's own ---------------------------------------------------------------------------------------------


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
    assert solve(Problem(fed, ring(3), log_cosh(), lam=0.05, radius=20.0)).radius == 20.0


@pytest.mark.parametrize("wrong", ["sign", "size"])
def test_a_gradient_that_does_not_belong_to_the_loss_is_found_out(wrong: str) -> None:
    plain = log_cosh()
    factor = -1.0 if wrong == "sign" else 100.0
    liar = replace(plain, gradient_fn=lambda *rows: factor * plain.gradient_fn(*rows))
    fed = Federation(
        {f"site {u}": (rows.X, rows.y) for u, rows in enumerate(map(federation("linear", (8, 9)).__getitem__, (0, 1)))}
    )
    problem = Problem(fed, Graph.complete(fed.devices), {"site 0": plain, "site 1": liar}, lam=0.01)
    with pytest.raises(SolverError, match=r"'site 1' does not fall as its gradient says.*check gradient_fn"):
        solve(problem)


def test_losses_that_are_not_finite_are_named() -> None:
    fed = Federation(
        {"a": (np.ones((3, 1)), np.ones(3), np.zeros(3)), "b": (np.ones((3, 1)), np.ones(3), np.full(3, 800.0))}
    )
    with pytest.raises(SolverError, match="loss at theta = 0 of device 'b' is not finite; scale"):
        solve(Problem(fed, Graph.complete(fed.devices), "poisson", lam=0.1))
    broken = replace(log_cosh(), gradient_fn=lambda *rows: np.full(1, np.nan))
    with pytest.raises(SolverError, match="gradient of device 'a' is not finite"):
        solve(Problem(fed, Graph.complete(fed.devices), {"a": broken, "b": log_cosh()}, lam=0.1))


# --- the ball that holds a minimiser ---------------------------------------------------------------------------------


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), penalty=st.sampled_from(PENALTY_NAMES), lam=st.sampled_from([1e-3, 0.03, 1.0]))
def test_proven_balls_hold_the_minimiser(seed: int, penalty: str, lam: float) -> None:
    sizes = tuple(np.random.default_rng(seed).integers(1, 4, size=5))
    fed = federation("linear", (*sizes, 12), q=3, seed=seed)
    graph = Graph.from_indices(range(6), [[5, 0], [0, 1], [1, 2], [2, 3], [3, 4], [4, 5]])
    problem = Problem(fed, graph, "linear", penalty, lam=lam)
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


def test_without_a_proof_the_solution_says_so() -> None:
    fed = federation("huber", (2, 2, 3), q=3, seed=1)
    solution = solve(Problem(fed, ring(3), "huber", lam=0.1))
    assert solution.radius == pytest.approx(10 * max(1.0, np.linalg.norm(solution.theta, axis=1).max()), rel=1e-3)
    assert solve(Problem(fed, ring(3), "huber", lam=0.1, radius=7.0)).radius == 7.0


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


def test_a_solution_tells_its_story() -> None:
    design = paper_design(10, 30, 3, 2)
    problem = Problem(design.federation, design.graph, lam=0.01)
    solution = solve(problem)
    assert solution.objective == pytest.approx(problem.objective(solution.theta), rel=1e-12)
    assert set(solution.trace) == {"n_iter", "objective", "gap"}
    steps = solution.trace["n_iter"]
    assert (np.diff(steps) > 0).all()
    assert steps[-1] == solution.n_iter
    assert solution.trace["gap"][-1] <= 1e-6
    assert solution.message.startswith("converged: relative gap")
    limit = problem.fused.edge_radius
    assert (problem.fused.penalty.dual_norm(solution.alpha) <= limit * (1 + 1e-12)).all()


def test_senseless_arguments() -> None:
    problem = Problem(federation("linear", (5, 5)), Graph.complete(range(2)), lam=0.1)
    for tol in (0.0, -1.0, np.nan):
        with pytest.raises(ParameterError, match="tol must be a positive number"):
            solve(problem, tol)
    with pytest.raises(ParameterError, match="max_iter must be a whole number of at least 1, got 0"):
        solve(problem, max_iter=0)


# --- size ------------------------------------------------------------------------------------------------------------


def test_many_devices_need_nothing_quadratic_in_their_number() -> None:
    """20,000 devices: a single V x V array of numbers would be 3.2 GB."""
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
