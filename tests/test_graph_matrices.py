"""The matrices of graphs, and the paper's numbers of them, against networkx, scipy and closed forms."""

import math
import sys

import networkx as nx
import numpy as np
import pytest
import scipy.sparse
from hypothesis import given

from builders import edge_weights, random_graphs
from fedkin.errors import GraphError, GraphWarning, MissingDependencyError
from fedkin.graph import Graph
from fedkin.graph.edges import smallest_nonzero_eigenvalue

# --- networkx and scipy ---------------------------------------------------------------------------------------


@given(random_graphs())
def test_networkx_round_trip(given_graph):
    graph = Graph(*given_graph)
    assert Graph.from_networkx(graph.to_networkx()) == graph


@given(random_graphs())
def test_what_networkx_says(given_graph):
    graph = Graph(*given_graph)
    g = graph.to_networkx()
    for weight in ("weight", None):
        expected = nx.laplacian_matrix(g, nodelist=graph.sites, weight=weight).toarray()
        np.testing.assert_allclose(graph.laplacian(weighted=weight is not None).toarray(), expected, rtol=1e-12)
    assert graph.n_components == nx.number_connected_components(g)
    labels = graph.components()
    for component in nx.connected_components(g):
        assert len({int(labels[graph.index[site]]) for site in component}) == 1
    assert list(dict.fromkeys(labels.tolist())) == list(range(graph.n_components))
    assert graph.degree.tolist() == [g.degree[site] for site in graph.sites]
    oriented = [(graph.sites[j], graph.sites[i]) for i, j in graph.edges]
    incidence = nx.incidence_matrix(g, nodelist=graph.sites, edgelist=oriented, oriented=True).toarray().T
    np.testing.assert_array_equal(graph.incidence().toarray(), incidence.reshape(graph.n_edges, graph.n_sites))


@given(random_graphs())
def test_incidence_makes_the_laplacian_and_differences(given_graph):
    graph = Graph(*given_graph)
    D = graph.incidence()
    assert D.shape == (graph.n_edges, graph.n_sites)
    assert D.has_sorted_indices
    W = scipy.sparse.diags_array(graph.weights)
    np.testing.assert_allclose((D.T @ W @ D).toarray(), graph.laplacian().toarray(), rtol=1e-9, atol=1e-12)
    theta = np.arange(graph.n_sites) ** 2.0
    np.testing.assert_array_equal(D @ theta, theta[graph.edges[:, 0]] - theta[graph.edges[:, 1]])


@given(random_graphs())
def test_scipy_round_trip(given_graph):
    graph = Graph(*given_graph)
    adjacency = scipy.sparse.diags_array(graph.laplacian().diagonal()) - graph.laplacian()
    assert edge_weights(Graph.from_scipy(adjacency, graph.sites)) == edge_weights(graph)
    assert edge_weights(Graph.from_scipy(adjacency.toarray(), graph.sites)) == edge_weights(graph)


@pytest.mark.parametrize(
    ("matrix", "sites", "message"),
    [
        ([[0, 1], [2, 0]], "ab", r"not symmetric: 1\.0 from site 'a' to 'b', but 2\.0 back"),
        ([[0, 1], [0, 0]], None, "not symmetric"),
        ([[1, 0], [0, 0]], "ab", r"edge \('a', 'a'\) is a self-loop"),
        ([[0, -1], [-1, 0]], None, r"has the weight -1\.0"),
        ([[0, np.nan], [np.nan, 0]], None, "NaN or infinite"),
        (np.zeros((2, 3)), None, r"must be square, got the shape \(2, 3\)"),
        (np.zeros((2, 2), dtype=complex), None, "real numbers, got complex128"),
        (np.zeros((2, 2)), "abc", "2 matrix rows for 3 sites: give one matrix row per site"),
        ("matrix", None, "expected a matrix"),
    ],
)
def test_bad_matrices(matrix, sites, message):
    with pytest.raises(GraphError, match=message):
        Graph.from_scipy(np.array(matrix) if isinstance(matrix, list) else matrix, sites)


def test_bad_networkx():
    with pytest.raises(GraphError, match="directed"):
        Graph.from_networkx(nx.DiGraph([(0, 1)]))
    with pytest.warns(GraphWarning, match="given twice"):
        assert Graph.from_networkx(nx.MultiGraph([(0, 1), (0, 1)])).n_edges == 1
    with pytest.raises(GraphError, match="self-loop"):
        Graph.from_networkx(nx.Graph([(0, 0)]))
    with pytest.raises(GraphError, match="expected a networkx graph, got list"):
        Graph.from_networkx([(0, 1)])
    g = nx.Graph([(0, 1)])
    g.edges[0, 1]["weight"] = -1
    with pytest.raises(GraphError, match="weight -1"):
        Graph.from_networkx(g)


# --- theory ---------------------------------------------------------------------------------------------------


def test_fidelity_at_the_values_the_paper_names():
    V, K = 12, 3
    truth = Graph.clusters(np.repeat(np.arange(K), V // K))
    assert truth.fidelity(truth) == 1.0
    assert Graph.empty(range(V)).fidelity(truth) == K / V
    smallest = 2 * K / (V**2 * (1 - 1 / K) + 2)  # gf_min of the paper
    assert Graph.complete(range(V)).fidelity(truth) == pytest.approx(smallest, rel=1e-12)
    # a spanning tree of each clique is as good as the clique
    assert Graph(range(V), [(4 * k, 4 * k + j) for k in range(K) for j in (1, 2, 3)]).fidelity(truth) == 1.0


@pytest.mark.parametrize(
    ("g", "expected"),
    [
        (nx.path_graph(7), 2 - 2 * math.cos(math.pi / 7)),
        (nx.cycle_graph(9), 2 - 2 * math.cos(2 * math.pi / 9)),
        (nx.star_graph(6), 1.0),
        (nx.complete_graph(8), 8.0),
        (nx.disjoint_union(nx.complete_graph(4), nx.path_graph(3)), 1.0),
        (nx.disjoint_union(nx.complete_graph(4), nx.empty_graph(2)), 4.0),
        (nx.empty_graph(5), math.inf),
    ],
)
def test_algebraic_connectivity_in_closed_form(g, expected):
    assert Graph.from_networkx(g).algebraic_connectivity() == pytest.approx(expected, rel=1e-12)


@given(random_graphs())
def test_algebraic_connectivity_is_the_smallest_nonzero_eigenvalue(given_graph):
    graph = Graph(*given_graph)
    D = graph.incidence().toarray()
    eigenvalues = np.linalg.eigvalsh(D.T @ D)
    nonzero = eigenvalues[eigenvalues > 1e-9]
    assert graph.algebraic_connectivity() == pytest.approx(nonzero.min() if len(nonzero) else math.inf, rel=1e-8)
    if graph.n_sites > 1 and graph.n_components == 1:
        expected = nx.algebraic_connectivity(graph.to_networkx(), weight=None, method="tracemin_lu", tol=1e-12)
        assert graph.algebraic_connectivity() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "g",
    [
        nx.path_graph(60),
        nx.grid_2d_graph(7, 9),
        nx.star_graph(50),
        nx.barbell_graph(20, 4),
        nx.random_regular_graph(4, 80, seed=0),
        nx.disjoint_union(nx.cycle_graph(40), nx.cycle_graph(30)),
    ],
    ids=["path", "grid", "star", "barbell", "regular", "two rings"],
)
def test_algebraic_connectivity_of_large_graphs(g):
    graph = Graph.from_networkx(g)
    as_if_large = smallest_nonzero_eigenvalue(graph.laplacian(weighted=False), graph.components(), 2)
    assert as_if_large == pytest.approx(graph.algebraic_connectivity(), rel=1e-7)


def test_algebraic_connectivity_of_a_really_large_grid():
    assert Graph.grid(20, 1000).algebraic_connectivity() == pytest.approx(2 - 2 * math.cos(math.pi / 1000), rel=1e-7)


def test_without_networkx(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "networkx", None)
    with pytest.raises(MissingDependencyError, match=r"fedkin\[graph\]"):
        Graph.empty("ab").to_networkx()
    with pytest.raises(MissingDependencyError, match=r"reading GraphML needs networkx"):
        Graph.read(tmp_path / "graph.graphml")
