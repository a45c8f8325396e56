"""Where everything is fused, solutions along decreasing penalty levels, and cross-validation."""

from __future__ import annotations

import os
from dataclasses import replace

import cvxpy as cp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedkin
from builders import LOSS_NAMES, PENALTY_NAMES, federation, log_cosh, random_graph
from fedkin import Federation, Graph, Problem, lam_max, lam_path, solve
from fedkin.core import assign_folds, make_penalty
from fedkin.datasets import paper_design
from fedkin.errors import ParameterError
from fedkin.solvers import cross_validate_lam, cross_validate_ridge, lam_grid
from fedkin.solvers.path import least_congestion

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


def test_levels_are_sorted_and_warm_starts_save_iterations() -> None:
    design = paper_design(20, 30, 4, 2)
    problem = Problem(design.federation, design.graph)
    path = lam_path(problem, [0.001, 0.0, 0.01, 0.003], tol=1e-8)
    np.testing.assert_array_equal(path.lams, [0.01, 0.003, 0.001, 0.0])
    np.testing.assert_allclose(path.solutions[-1].theta, solve(problem.with_lam(0.0)).theta)
    fine = lam_path(problem, np.geomspace(0.01, 0.005, 12), tol=1e-8)
    cold = [solve(problem.with_lam(lam), 1e-8).n_iter for lam in fine.lams]
    assert sum(solution.n_iter for solution in fine.solutions) < 0.8 * sum(cold)


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


@pytest.mark.parametrize(
    "wrong", [{"lams": []}, {"lams": [0.1, -0.1]}, {"lams": [np.nan]}, {"lams": [[0.1]]}, {"n_lams": 0}, {"ratio": 1.0}]
)
def test_wrong_levels_are_named(wrong: dict[str, object]) -> None:
    problem = Problem(federation("linear", (8, 9)), Graph.complete(range(2)))
    with pytest.raises(ParameterError, match=f"{next(iter(wrong))} must"):
        lam_path(problem, **wrong)


@pytest.mark.parametrize("ridge", [0.0, [0.1, 0.0, 0.7]])
@pytest.mark.parametrize("in_time", [False, True])
@pytest.mark.parametrize("loss", ["mean", "linear", "poisson"])
def test_scores_are_losses_of_rows_that_did_not_train(loss: str, in_time: bool, ridge: float | list[float]) -> None:
    """Also for sites with one or two rows; with times, only earlier rows train."""
    rng = np.random.default_rng(0)
    site = np.repeat(np.arange(5), [1, 2, 5, 9, 14])
    X, offset = rng.normal(size=(site.size, 3)), None if loss == "mean" else 0.3 * rng.normal(size=site.size)
    y = {"mean": None, "linear": X.sum(axis=1), "poisson": rng.poisson(2.0, site.size)}[loss]
    fed = Federation.from_arrays(X, y, site, offset=offset, time=rng.permutation(site.size) if in_time else None)
    problem, lams = Problem(fed, Graph.complete(range(5)), loss, ridge=ridge), [0.3, 0.03]
    fold_of = assign_folds(fed, 3, 0)
    used = [fold for fold in range(3) if fold > 0 or not in_time]  # the earliest rows are never held out
    expected = []
    for fold in used:
        train = fed.take(fold_of < fold if in_time else fold_of != fold)
        test = fed.take(fold_of == fold, allow_empty=True)
        seen = [u for u in range(5) if test.n_samples[u]]
        held_out = Problem(test.subset(seen), Graph.empty(seen), loss).terms
        solutions = [solve(replace(problem, federation=train).with_lam(lam), 1e-10) for lam in lams]
        expected.append([held_out.values(one.theta[seen]).mean() for one in solutions])
    found = cross_validate_lam(problem, lams, folds=3, seed=0, tol=1e-10)
    np.testing.assert_allclose(found.scores, expected, rtol=1e-4)
    np.testing.assert_allclose(found.mean, found.scores.mean(axis=0))
    assert found.lam == lams[int(found.mean.argmin())]


def test_cores_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    design = paper_design(30, 40, 4, 3)
    problem = Problem(design.federation, design.graph)
    lams = 1e-3 * np.geomspace(1, 1e-2, 12)
    results = []
    for cores in (1, 3):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)), raising=False)
        path = fedkin.lam_path(problem, lams, backend="numba")
        choice = fedkin.cross_validate_lam(problem, lams, folds=3, backend="numba")
        results.append((np.stack([solution.theta for solution in path.solutions]), choice.scores))
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


def test_levels_that_are_clearly_worse_are_not_looked_at() -> None:
    """Small ones where all sites are alike, large ones where all differ; what is tried scores as it always does."""
    design = paper_design(n_sites=20, n_samples=12, n_features=6, n_clusters=1, seed=0)
    apart = Federation({u: [[float(10 * u)], [10.0 * u + 1], [10.0 * u + 2], [10.0 * u + 3]] for u in range(8)})
    problems = Problem(design.federation, design.truth), Problem(apart, Graph.complete(range(8)), "mean")
    for problem, end in zip(problems, (0, -1), strict=True):
        grid = fedkin.solvers.lam_grid(problem)
        choice, every = cross_validate_lam(problem), cross_validate_lam(problem, grid)
        assert choice.lams.size == choice.scores.shape[1] < 20 == every.lams.size
        assert choice.lams[end] == grid[end] and choice.lam == every.lam
        first = int(np.flatnonzero(grid == choice.lams[0])[0])
        tried = slice(first, first + choice.lams.size)
        np.testing.assert_array_equal(choice.lams, grid[tried])
        np.testing.assert_array_equal(choice.scores, every.scores[:, tried])


def test_a_ridge_is_chosen_together_with_lam() -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(6, 14, 10))
    beta = 0.2 * rng.normal(size=(6, 10))  # every site on its own, and weak
    y = np.einsum("vnp,vp->vn", X, beta) + rng.normal(size=(6, 14))
    fed = Federation.from_arrays(X.reshape(-1, 10), y.ravel(), np.repeat(np.arange(6), 14))
    problem = Problem(fed, Graph.complete(range(6)))
    ridges = [0.0, 0.1, 1.0, 10.0]
    chosen, choice = cross_validate_ridge(problem, ridges)
    assert chosen.ridge in ridges[1:]
    assert choice.mean.min() < cross_validate_lam(problem).mean.min()
    with pytest.raises(ParameterError, match="at least one"):
        cross_validate_ridge(problem, [])
