"""Graphs of a given shape against networkx and brute force."""

import math

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import unit_weights
from fedkin.errors import GraphError, ParameterError
from fedkin.graph import Graph
from fedkin.graph import edges as graph_checks

# --- named graphs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 10, 101])
def test_complete(size):
    graph = Graph.complete(range(size))
    assert nx.utils.graphs_equal(graph.to_networkx(), unit_weights(nx.complete_graph(size)))
    assert graph == Graph.from_indices(range(size), graph.edges)


def test_pairs_are_numbered_right_where_square_roots_are_rounded():
    for i in (2, 3, 10**3, 10**5, 10**6, 47_000_000):
        first = i * (i - 1) // 2
        numbers = np.array([first - 1, first, first + 1, first + i - 1], dtype=np.int64)
        expected = [[i - 1, i - 2], [i, 0], [i, 1], [i, i - 1]]
        assert graph_checks.pairs_of_numbers(numbers).tolist() == expected
        np.testing.assert_array_equal(graph_checks.pair_numbers(np.array(expected)), numbers)


@given(st.lists(st.sampled_from(["x", "y", "z", 1]), min_size=1, max_size=12))
def test_clusters(labels):
    graph = Graph.clusters(labels)
    pairs = {(i, j) for i in range(len(labels)) for j in range(i) if labels[i] == labels[j]}
    assert set(map(tuple, graph.edges.tolist())) == pairs
    assert graph.edges.tolist() == sorted(graph.edges.tolist())
    assert graph.n_components == len(set(labels))
    sites = [f"d{k}" for k in range(len(labels))]
    assert Graph.clusters(dict(zip(sites, labels, strict=True))) == Graph.clusters(labels, sites=sites)
    # the labels themselves, numbered by first appearance
    numbered = [list(dict.fromkeys(labels)).index(label) for label in labels]
    assert graph.components().tolist() == numbered


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0, 1], "abc"), "2 labels for 3 sites"),
        (({"a": 1}, "a"), "a mapping names them itself"),
        (([0, None],), "labels: a site id is missing"),
        (([],), "at least one site"),
    ],
)
def test_bad_clusters(arguments, message):
    with pytest.raises(GraphError, match=message):
        Graph.clusters(*arguments)


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (1, 5), (4, 1), (3, 4)])
def test_grid(rows, cols):
    graph = Graph.grid(rows, cols)
    assert nx.utils.graphs_equal(graph.to_networkx(), unit_weights(nx.grid_2d_graph(rows, cols)))
    assert graph.sites == tuple((r, c) for r in range(rows) for c in range(cols))


@pytest.mark.parametrize("k", [1, 3, 39])
def test_nearest_neighbours_by_brute_force(k):
    places = np.random.default_rng(k).random((40, 2))
    distance = np.linalg.norm(places[:, None] - places, axis=2)
    np.fill_diagonal(distance, np.inf)
    near = np.argsort(distance, axis=1)[:, :k]
    expected = {frozenset((u, int(v))) for u in range(40) for v in near[u]}
    graph = Graph.knn(places, k)
    assert {frozenset(pair) for pair in graph.edge_ids()} == expected
    assert (graph.degree >= k).all()


@pytest.mark.parametrize(
    ("coordinates", "k", "sites", "error", "message"),
    [
        ([0.0, 1.0], 2, None, ParameterError, "k must be from 1 to 1 for 2 sites, got 2"),
        ([0.0, 1.0], 0, None, ParameterError, "got 0"),
        ([[0.0, 1.0], [np.nan, 0.0]], 1, "ab", GraphError, "site 'b' has the coordinates"),
        (np.zeros((2, 2, 2)), 1, None, GraphError, r"must have the shape \(V, d\)"),
        ([0.0, 1.0], 1, "abc", GraphError, "2 coordinates for 3 sites"),
    ],
)
def test_bad_coordinates(coordinates, k, sites, error, message):
    with pytest.raises(error, match=message):
        Graph.knn(coordinates, k, sites)


# --- flipped pairs --------------------------------------------------------------------------------------------


def test_corruption_flips_each_pair_with_the_given_probability():
    truth = Graph.clusters(np.repeat(np.arange(5), 60))
    corrupted = truth.corrupt(0.2, seed=3)
    before, after = (set(map(tuple, graph.edges.tolist())) for graph in (truth, corrupted))
    pairs = 300 * 299 // 2
    for lost, of in ((len(before - after), len(before)), (len(after - before), pairs - len(before))):
        assert abs(lost - 0.2 * of) < 4 * math.sqrt(of * 0.2 * 0.8)
    assert corrupted == truth.corrupt(0.2, seed=3)
    assert corrupted != truth.corrupt(0.2, seed=4)
    assert corrupted == truth.corrupt(0.2, seed=np.random.default_rng(3))
    assert corrupted.edges.tolist() == sorted(corrupted.edges.tolist())


def test_corruption_at_its_ends_and_weights():
    graph = Graph("abcd", [("a", "b"), ("c", "d")], [0.25, 4.0])
    assert graph.corrupt(0.0, seed=1) == graph
    complement = graph.corrupt(1.0, seed=1)
    assert complement.weights.tolist() == [1.0] * 4
    expected = nx.complement(graph.to_networkx())
    assert {frozenset(pair) for pair in complement.edge_ids()} == {frozenset(pair) for pair in expected.edges}
    for varrho in (-0.1, 1.1, math.nan):
        with pytest.raises(ParameterError, match="varrho is a probability"):
            graph.corrupt(varrho, seed=0)
