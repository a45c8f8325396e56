"""Unions of cliques without a list of edges: the graph, the prox, and solutions against cvxpy and against edges."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import LOSS_NAMES, federation
from cvxpy_reference import reference
from fedkin import Federation, Graph, Problem, cross_validate_lam, lam_max, lam_path, solve
from fedkin.core import make_penalty
from fedkin.errors import GraphError, ParameterError
from fedkin.fitting import FitOptions, fit
from fedkin.graph import Cliques
from fedkin.solvers import solve_fused
from fedkin.solvers.cliques import SortedProx
from fedkin.solvers.path import least_congestion


def listed(graph: Graph) -> Graph:
    """The same graph, known by its edges only, with weights that differ in the last bits: no cliques to find."""
    if graph.n_edges == 0:
        return graph
    weights = graph.weights.copy()
    weights[0] *= 1 + 1e-15
    return Graph.from_indices(graph.sites, graph.edges, weights)


def groups(n_sites: int, p: int, n: int, seed: int) -> Federation:
    rng = np.random.default_rng(seed)
    beta = rng.normal(size=(3, p))[rng.integers(0, 3, n_sites)]
    X = rng.normal(size=(n_sites, n, p))
    y = np.einsum("vnp,vp->vn", X, beta) + rng.normal(size=(n_sites, n))
    return Federation.from_arrays(X.reshape(-1, p), y.ravel(), np.repeat(np.arange(n_sites), n))


@pytest.mark.parametrize("labels", [[0] * 5, [0, 1, 0, 2, 1, 0], [3, 2, 1]])
def test_cliques_are_the_graph_of_their_edges(labels: list[int]) -> None:
    weights = np.linspace(0.5, 2.0, len(labels))
    graph, other = Graph.clusters(labels, weights=weights), Graph.clusters(labels, weights=weights)
    n_edges, degree, components = graph.n_edges, graph.degree, graph.components()  # before edges are listed
    plain = Graph.from_indices(range(len(labels)), other.edges, other.weights)
    assert n_edges == plain.n_edges
    np.testing.assert_array_equal(degree, plain.degree)
    np.testing.assert_array_equal(components, plain.components())
    assert graph == plain == other
    np.testing.assert_array_equal(other.weights, weights[plain.edges[:, 0]] * weights[plain.edges[:, 1]])


def test_cliques_are_found_among_edges() -> None:
    graph = Graph.clusters([0, 0, 0, 1, 1, 2])
    found = Graph.from_indices(graph.sites, graph.edges, np.full(graph.n_edges, 4.0)).cliques
    assert found is not None
    np.testing.assert_array_equal(found.labels, graph.components())
    np.testing.assert_allclose(found.weights[:5], 2.0)
    assert graph.keep([True, True, False, True]).cliques is None
    assert graph.reweighted([1.0, 2.0, 1.0, 1.0]).cliques is None
    assert Graph.empty("abc").cliques is not None


def test_a_hundred_thousand_sites_have_all_pairs_without_a_list() -> None:
    graph = Graph.complete(range(100_000))
    assert repr(graph) == "Graph(100,000 sites, 4,999,950,000 edges, 1 component)"
    assert graph.subset(range(99_999, -1, -2)).n_edges == 50_000 * 49_999 // 2
    with pytest.raises(GraphError, match="4,999,950,000 edges are too many to list"):
        _ = graph.edges


def test_sites_of_cliques_may_come_in_another_order_or_be_left_out() -> None:
    graph = Graph.clusters({"a": 0, "b": 1, "c": 0, "d": 1, "e": 0})
    moved = graph.aligned(["e", "d", "c", "b", "a"])
    assert moved == Graph.clusters({"e": 0, "d": 1, "c": 0, "b": 1, "a": 0})
    assert set(map(frozenset, moved.edge_ids())) == set(map(frozenset, graph.edge_ids()))
    assert graph.subset("cab") == Graph.clusters({"c": 0, "a": 0, "b": 1})


@given(st.integers(0, 10_000), st.integers(1, 9), st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_sums_over_sorted_sites_are_sums_over_edges(seed: int, n: int, p: int) -> None:
    rng = np.random.default_rng(seed)
    weights, labels = rng.uniform(0.5, 2.0, n), rng.integers(0, 3, n).tolist()
    graph, cliques = Graph.clusters(labels, weights=weights), Cliques.from_labels(labels, weights)
    theta = rng.integers(-3, 4, (n, p)).astype(float)
    sizes = np.abs(graph.incidence() @ theta).sum(axis=1) * graph.weights
    assert cliques.variation(theta).sum() == pytest.approx(sizes.sum(), abs=1e-10)
    if graph.n_edges:
        assert cliques.lightest == pytest.approx(graph.weights.min())
        flow = theta - np.stack([theta[cliques.labels == k].mean(axis=0) for k in cliques.labels])
        # maximum flows on the listed edges find the same level
        expected = least_congestion(listed(graph), make_penalty("l1"), flow, 1e-9)
        assert cliques.congestion(flow).max() == pytest.approx(expected, rel=1e-6, abs=1e-12)


@given(st.integers(0, 10_000), st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_the_prox_leaves_what_its_optimality_demands(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    cliques = Cliques.from_labels(rng.integers(0, 2, n).tolist(), rng.uniform(0.5, 2.0, n))
    v, tau = rng.normal(size=(n, 2)), np.array([0.05, 0.4])
    prox = SortedProx(cliques, 2)
    prox(rng.normal(size=(n, 2)), tau)  # an order to start from that is wrong
    z = prox(v, tau)
    dual = cliques.weights[:, None] * (v - z) / tau
    # the dual is feasible, sums to 0 in each clique, and is complementary to z
    assert (cliques.congestion(dual) <= 1 + 1e-9).all()
    np.testing.assert_allclose([dual[cliques.labels == k].sum(axis=0) for k in set(cliques.labels)], 0.0, atol=1e-10)
    assert cliques.variation(z).sum() == pytest.approx((dual * z).sum(), abs=1e-9)


@pytest.mark.parametrize("backend", ["numpy", "numba"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("sparsity", [0.0, 0.05])
@pytest.mark.parametrize("loss", LOSS_NAMES)
def test_solutions_are_those_of_cvxpy(loss: str, sparsity: float, weighted: bool, backend: str) -> None:
    fed = federation(loss, (15, 18, 15, 20, 16, 17), q=2, seed=3)
    weights = np.linspace(0.7, 1.4, 6) if weighted else np.ones(6)
    graph = Graph.clusters([0, 1, 0, 0, 1, 0], sites=fed.sites, weights=weights)
    for lam in (0.003, 0.03):
        one = Problem(fed, graph, loss, lam=lam, sparsity=sparsity * weights, ridge=1e-3)
        objective = replace(one.fused, cliques_from=0)
        assert objective.cliques is not None
        solution = solve_fused(objective, 1e-11, backend=backend)  # type: ignore[arg-type]
        expected = reference(one)
        assert solution.status == "converged"
        assert solution.objective / 6 == pytest.approx(expected.objective, rel=1e-6)
        assert solution.objective / 6 - expected.objective <= solution.gap * abs(expected.objective) + 1e-10
        np.testing.assert_allclose(solution.theta, expected.theta, atol=2e-4)


def test_all_pairs_are_solved_as_cliques_by_default_and_as_edges_give() -> None:
    fed = groups(120, 4, 12, seed=1)
    graph = Graph.complete(fed.sites)
    quick, slow = Problem(fed, graph), Problem(fed, listed(graph))
    assert quick.fused.cliques is not None
    assert slow.fused.cliques is None
    # maximum flows are in whole units
    assert lam_max(quick) == pytest.approx(lam_max(slow, 1e-6), rel=1e-5)
    lams = lam_max(quick) * np.array([1.0, 0.3, 0.05, 0.004])
    for (lam, mine), (_, theirs) in zip(lam_path(quick, lams), lam_path(slow, lams), strict=True):
        assert mine.gap <= 1e-6
        assert mine.objective == pytest.approx(theirs.objective, rel=2e-6)
        alone = solve(quick.with_lam(lam))
        assert mine.objective == pytest.approx(alone.objective, rel=2e-6)
    scores = [cross_validate_lam(one, lams, tol=1e-6).scores for one in (quick, slow)]
    np.testing.assert_allclose(scores[0], scores[1], rtol=1e-3)


def test_sites_with_too_few_rows_are_certified_through_the_others() -> None:
    fed = groups(110, 4, 3, seed=2)
    more = groups(20, 4, 30, seed=2)
    rows = [(fed, u) for u in range(110)] + [(more, u) for u in range(20)]
    parts = [(one[u].X, one[u].y) for one, u in rows]
    sizes = [len(y) for _, y in parts]
    all_rows = (np.concatenate([X for X, _ in parts]), np.concatenate([y for _, y in parts]))
    mixed = Federation.from_arrays(*all_rows, np.repeat(np.arange(130), sizes))
    one = Problem(mixed, Graph.complete(range(130)))
    one = one.with_lam(0.2 * lam_max(one))
    solution = solve(one)
    assert (solution.status, solution.radius) == ("converged", None)
    expected = solve(Problem(mixed, listed(one.graph), lam=one.lam), 1e-7)
    assert solution.objective - expected.objective <= 1e-6 * solution.objective


def test_uneven_sparsity_and_other_penalties_use_the_edges() -> None:
    fed = groups(110, 2, 12, seed=6)
    graph = Graph.complete(fed.sites)
    uneven = np.linspace(0.0, 0.1, 110)
    assert Problem(fed, graph, sparsity=uneven).fused.cliques is None
    assert Problem(fed, graph, penalty="l2").fused.cliques is None
    assert Problem(fed, graph, sparsity=0.1).fused.cliques is not None


def test_a_fit_without_edge_tests_takes_any_number_of_pairs() -> None:
    rng = np.random.default_rng(0)
    fed = Federation.from_arrays(rng.normal(size=(6_400, 1)), None, np.repeat(np.arange(3_200), 2))
    options = FitOptions(loss="mean", lam=1e-6, standardize=False, method="fused", select="none")
    model = fit(fed, None, options)
    assert model.status == "converged"
    assert model.graph.n_edges == 3_200 * 3_199 // 2 > 5_000_000
    with pytest.raises(ParameterError, match="too many to list"):
        fit(fed, None, replace(options, select=FitOptions().select))
