"""Graphs: construction, what they must not be, and others made from them."""

import copy
import math
import pickle
import time

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import edge_weights, random_graphs
from fedkin.errors import GraphError, GraphWarning
from fedkin.graph import Graph

# --- construction ---------------------------------------------------------------------------------------------


@given(random_graphs())
def test_edges_are_oriented_sorted_and_carry_their_weights(given_graph):
    sites, edges, weights = given_graph
    graph = Graph(sites, edges, weights)
    assert graph.sites == tuple(sites)
    assert graph.edges.dtype == np.int64
    assert graph.edges.shape == (len(edges), 2)
    assert (graph.edges[:, 0] > graph.edges[:, 1]).all()
    assert graph.edges.tolist() == sorted(graph.edges.tolist())
    assert edge_weights(graph) == {frozenset(pair): w for pair, w in zip(edges, weights, strict=True)}
    assert [graph.index[site] for site in sites] == list(range(len(sites)))


@given(random_graphs(), st.randoms(use_true_random=False))
def test_relabelling_changes_nothing(given_graph, random):
    sites, edges, weights = given_graph
    graph = Graph(sites, edges, weights)
    order = random.sample(sites, len(sites))
    moved = graph.aligned(order)
    assert moved == Graph(order, edges, weights)
    assert moved.aligned(sites) == graph
    assert moved.n_components == graph.n_components
    assert moved.algebraic_connectivity() == pytest.approx(graph.algebraic_connectivity(), rel=1e-9)
    at = [graph.index[site] for site in order]
    np.testing.assert_allclose(moved.laplacian().toarray(), graph.laplacian().toarray()[np.ix_(at, at)], rtol=1e-12)
    np.testing.assert_array_equal(moved.degree, graph.degree[at])
    np.testing.assert_array_equal(Graph.from_indices(order, moved.edges, moved.weights).weights, moved.weights)


def test_from_indices_is_the_same_graph():
    rng = np.random.default_rng(0)
    pairs = np.array(list(nx.gnm_random_graph(30, 100, seed=1).edges))
    weights = rng.random(100) + 0.1
    flipped = np.where(rng.random((100, 1)) < 0.5, pairs, pairs[:, ::-1])
    sites = [f"site {k}" for k in range(30)]
    by_name = Graph(sites, [(sites[i], sites[j]) for i, j in pairs], weights)
    assert Graph.from_indices(sites, flipped, weights) == by_name
    assert Graph.from_indices(sites, flipped.astype(np.uint16), weights) == by_name


def test_immutable():
    weights = np.array([1.0, 2.0])
    edges = np.array([[1, 0], [2, 1]])
    graph = Graph.from_indices("abc", edges, weights)
    weights[0] = edges[0, 0] = 7  # the graph has its own copies
    assert graph.weights.tolist() == [1.0, 2.0]
    for array in (graph.edges, graph.weights, graph.degree, graph.components()):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    with pytest.raises(AttributeError):
        graph.sites = ("x",)


def test_equality():
    graph = Graph("abc", [("a", "b")], [2.0])
    assert graph == Graph("abc", [("b", "a")], [2.0])
    assert graph != Graph("abc", [("a", "b")])
    assert graph != Graph("abc", [("a", "c")], [2.0])
    assert graph != Graph("acb", [("a", "b")], [2.0])
    assert graph != "graph"
    graph.incidence(), graph.components()
    assert pickle.loads(pickle.dumps(graph)) == graph == copy.deepcopy(graph)


@pytest.mark.parametrize(
    ("sites", "edges", "weights", "message"),
    [
        (range(10), [(7, 12)], None, r"edge \(7, 12\) names site 12, which is not among the 10 sites"),
        (["a"], [("a", "b")], None, r"edge \('a', 'b'\) names site 'b', which is not among the 1 site of"),
        (["1", "2"], [(1, 2)], None, r"names site 1, which is not among"),
        (["a", "b"], [("a", "a")], None, r"edge \('a', 'a'\) is a self-loop"),
        ("abc", [("a", "b"), ("b", "a")], [1.0, 2.0], r"edge \('a', 'b'\) is given twice, with the weights 1 and 2"),
        ("abc", [("a", "c"), ("a", "b"), ("a", "c")], [1, 1, 3], r"edge \('a', 'c'\) is given twice, with the weights"),
        ("ab", [("a", "b")], [0.0], r"edge \('a', 'b'\) has the weight 0\.0, expected a positive number"),
        ("ab", [("a", "b")], [-1.0], r"has the weight -1\.0"),
        ("ab", [("a", "b")], [np.nan], r"has the weight nan"),
        ("ab", [("a", "b")], [np.inf], r"has the weight inf"),
        ("ab", [("a", "b")], [1.0, 2.0], r"weights have the shape \(2,\), expected \(1,\)"),
        ("ab", [("a", "b")], 2.0, r"weights have the shape \(\), expected \(1,\)"),
        ("ab", [("a", "b")], ["heavy"], "weights must be numbers"),
        ("ab", [("a", "b", 2.0)], None, r"a pair of site ids, got \('a', 'b', 2\.0\); weights have their own"),
        ("ab", ["ab"], None, "a pair of site ids, got 'ab'"),
        ("ab", [3], None, "a pair of site ids, got 3"),
        ("ab", [("a", ["b"])], None, r"\['b'\] cannot be a site id"),
        ([], [], None, "at least one site"),
        (["a", "b", "a"], [], None, "site 'a' is given twice"),
        ([1, 1.0], [], None, "site 1 is given twice"),
        (["a", None], [], None, r"sites: a site id is missing \(None\)"),
        ([1.5, math.nan], [], None, "a site id is missing"),
        ([["a"]], [], None, "cannot be hashed"),
        (5, [], None, r"use range\(5\)"),
    ],
)
def test_bad_graphs(sites, edges, weights, message):
    with pytest.raises(GraphError, match=message):
        Graph(sites, edges, weights)


@pytest.mark.parametrize(
    ("index", "weights", "message"),
    [
        ([[0, 3]], None, r"edge number 0 names position 3, but the 3 sites of the graph have the positions 0\.\.2"),
        ([[0, 1], [-1, 0]], None, "edge number 1 names position -1"),
        ([[1, 1]], None, r"edge \('b', 'b'\) is a self-loop"),
        ([[0, 1], [1, 2], [1, 0], [2, 1]], [1, 1, 2, 1], r"edge \('a', 'b'\) is given twice, with the weights 1 and 2"),
        ([[0.0, 1.0]], None, r"int array of shape \(E, 2\), got float64"),
        ([0, 1], None, r"got int64 \(2,\)"),
        ([[0, 1, 2]], None, r"got int64 \(1, 3\)"),
        ([[2, 0], [0, 1]], [1.0, -3.0], r"edge \('a', 'b'\) has the weight -3\.0"),
    ],
)
def test_bad_indices(index, weights, message):
    with pytest.raises(GraphError, match=message):
        Graph.from_indices("abc", index, weights)


# --- making another one ---------------------------------------------------------------------------------------


def test_keep_and_reweighted():
    graph = Graph("abc", [("a", "b"), ("b", "c"), ("c", "a")], [1.0, 2.0, 3.0])
    kept = graph.keep(graph.weights > 1.5)
    assert edge_weights(kept) == {frozenset("bc"): 2.0, frozenset("ca"): 3.0}
    assert kept.sites == graph.sites
    assert graph.keep([False] * 3) == Graph.empty("abc")
    assert Graph.empty("abc").keep([]) == Graph.empty("abc")
    assert graph.reweighted([1, 1, 1]) == Graph.complete("abc")
    for mask in ([True], [0, 1, 1], [True] * 4):
        with pytest.raises(GraphError, match=r"bool array of shape \(3,\), one per edge"):
            graph.keep(mask)
    with pytest.raises(GraphError, match=r"edge \('b', 'a'\) has the weight -1\.0"):
        graph.reweighted([-1.0, 1.0, 1.0])
    with pytest.raises(GraphError, match="one per edge"):
        graph.reweighted([1.0])


@pytest.mark.parametrize("weights", [None, [2.0, 3.0, 2.0]])
def test_edges_that_come_again_count_once(weights):
    once = Graph("abc", [("a", "b"), ("a", "c")], weights and weights[:2])
    with pytest.warns(GraphWarning, match=r"edge \('a', 'b'\) is given twice, maybe once in each direction"):
        assert Graph("abc", [("a", "b"), ("a", "c"), ("b", "a")], weights) == once
    with pytest.warns(GraphWarning, match=r"is given twice \(and 1 more\)"):
        assert Graph.from_indices("ab", [[0, 1], [1, 0], [0, 1]]).edges.tolist() == [[1, 0]]


def test_sites_that_a_graph_does_not_name_have_no_edges():
    graph = Graph.complete(range(4))
    with pytest.warns(GraphWarning, match="does not name site 9, which has no edges"):
        wider = graph.aligned([9, 0, 1, 2, 3])
    assert wider.sites == (9, 0, 1, 2, 3)
    assert wider.n_edges == 6 and wider.degree.tolist() == [0, 3, 3, 3, 3]
    with pytest.warns(GraphWarning, match="does not name 7 sites 4, 5, 6, 7, 8 and 2 more, which have no edges"):
        graph.aligned(range(11))


def test_aligned_names_what_does_not_match():
    graph = Graph.complete(range(4))
    with pytest.raises(GraphError, match="has site 3 beyond the 3 sites asked for"):
        graph.aligned(range(3))
    with pytest.raises(GraphError, match="given twice"):
        graph.aligned([0, 1, 1, 2])


# --- size -----------------------------------------------------------------------------------------------------


def test_large_sparse_graphs_take_seconds():
    rng = np.random.default_rng(0)
    size = 200_000
    ends = rng.integers(0, size, (5 * size, 2))
    ends = np.unique(np.sort(ends[ends[:, 0] != ends[:, 1]], axis=1), axis=0)
    started = time.process_time()
    graph = Graph.from_indices(range(size), ends)
    assert graph.n_components < size
    assert graph.incidence().nnz == 2 * graph.n_edges
    graph.aligned(range(size - 1, -1, -1))
    assert time.process_time() - started < 30  # a loop over all pairs would take hours, one per edge minutes
