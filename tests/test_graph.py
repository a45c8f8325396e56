"""Graphs: construction, shapes, matrices and the paper's numbers against networkx, scipy and closed forms; files."""

import math
import sys

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import edge_weights, random_graphs, unit_weights
from fedkin.core.theory import gamma_squared
from fedkin.errors import FedkinError, GraphError, GraphWarning, MissingDependencyError
from fedkin.graph import Graph


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
    assert gamma_squared(moved) == pytest.approx(gamma_squared(graph), rel=1e-9)
    at = [graph.index[site] for site in order]
    np.testing.assert_allclose(moved.laplacian().toarray(), graph.laplacian().toarray()[np.ix_(at, at)], rtol=1e-12)
    np.testing.assert_array_equal(moved.degree, graph.degree[at])
    np.testing.assert_array_equal(Graph.from_indices(order, moved.edges, moved.weights).weights, moved.weights)


def test_immutable():
    weights = np.array([1.0, 2.0])
    edges = np.array([[1, 0], [2, 1]])
    graph = Graph.from_indices("abc", edges, weights)
    weights[0] = edges[0, 0] = 7  # the graph has its own copies
    assert graph.weights.tolist() == [1.0, 2.0]
    for array in (graph.edges, graph.weights, graph.degree, graph.components()):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


BOTH_WAYS = [("a", "b"), ("b", "a")]


@pytest.mark.parametrize(
    ("sites", "edges", "weights", "message"),
    [
        (range(10), [(7, 12)], None, r"edge \(7, 12\) names site 12, which is not among the 10 sites"),
        (["1", "2"], [(1, 2)], None, r"names site 1, which is not among"),
        (["a", "b"], [("a", "a")], None, r"edge \('a', 'a'\) is a self-loop"),
        ("abc", BOTH_WAYS, [1.0, 2.0], r"edge \('a', 'b'\) is given twice, with the weights 1 and 2"),
        *(("ab", [("a", "b")], [bad], f"has the weight {bad}") for bad in (0.0, -1.0, np.nan, np.inf)),
        ("ab", [("a", "b")], [1.0, 2.0], r"weights have the shape \(2,\), expected \(1,\)"),
        ("ab", [("a", "b")], ["heavy"], "weights must be numbers"),
        ("ab", [("a", "b", 2.0)], None, r"a pair of site ids, got \('a', 'b', 2\.0\)"),
        ("ab", ["ab"], None, "a pair of site ids, got 'ab'"),
        ("ab", [("a", ["b"])], None, r"\['b'\] cannot be a site id"),
        ([], [], None, "at least one site"),
        ([1, 1.0], [], None, "site 1 is given twice"),
        (["a", None], [], None, "a site id is missing"),
        ([["a"]], [], None, "cannot be hashed"),
        (5, [], None, r"use range\(5\)"),
    ],
)
def test_bad_graphs(sites, edges, weights, message):
    with pytest.raises(GraphError, match=message):
        Graph(sites, edges, weights)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Graph.from_indices("abc", [[0, 3]]), "names position 3"),
        (lambda: Graph.from_indices("abc", [[0, 1], [-1, 0]]), "edge number 1 names position -1"),
        (lambda: Graph.from_indices("abc", [[0, 1], [1, 0]], [1, 2]), r"\('a', 'b'\) is given twice"),
        (lambda: Graph.from_indices("abc", [[0.0, 1.0]]), "got float64"),
        (lambda: Graph.from_indices("abc", [[0, 1, 2]]), r"got int64 \(1, 3\)"),
        (lambda: Graph.complete(range(4)).aligned(range(3)), "has site 3 beyond the 3 sites"),
        (lambda: Graph.complete(range(4)).aligned([0, 1, 1, 2]), "given twice"),
        (lambda: Graph.clusters([0, 1], "abc"), "2 labels for 3 sites"),
        (lambda: Graph.clusters({"a": 1}, "a"), "already names the sites"),
        (lambda: Graph.clusters([0, None]), "a site id is missing"),
        (lambda: Graph.clusters([0, 0, 1], weights=[1.0, -1.0, 1.0]), "3 positive numbers"),
        (lambda: Graph.knn([0.0, 1.0], 2), "k must be from 1 to 1"),
        (lambda: Graph.knn([[0.0, 1.0], [np.nan, 0.0]], 1, "ab"), "site 'b' has the coordinates"),
        (lambda: Graph.knn([0.0, 1.0], 1, "abc"), "2 coordinates for 3 sites"),
        (lambda: Graph.complete("abc").corrupt(1.1, seed=0), "varrho is a probability"),
        (lambda: Graph.from_networkx(nx.DiGraph([(0, 1)])), "directed"),
        (lambda: Graph.from_networkx([(0, 1)]), "expected a networkx graph, got list"),
    ],
)
def test_what_makes_no_graph_is_refused(make, message):
    with pytest.raises(FedkinError, match=message):
        make()


def test_keep_and_reweighted():
    graph = Graph("abc", [("a", "b"), ("b", "c"), ("c", "a")], [1.0, 2.0, 3.0])
    kept = graph.keep(graph.weights > 1.5)
    assert edge_weights(kept) == {frozenset("bc"): 2.0, frozenset("ca"): 3.0}
    assert kept.sites == graph.sites
    assert graph.keep([False] * 3) == Graph.empty("abc")
    assert Graph.empty("abc").keep([]) == Graph.empty("abc")
    assert graph.reweighted([1, 1, 1]) == Graph.complete("abc")
    for change in (lambda: graph.keep([0, 1, 1]), lambda: graph.keep([True] * 4), lambda: graph.reweighted([1.0])):
        with pytest.raises(GraphError, match="one per edge"):
            change()


@pytest.mark.parametrize("weights", [None, [2.0, 3.0, 2.0]])
def test_edges_that_come_again_count_once(weights):
    once = Graph("abc", [("a", "b"), ("a", "c")], weights and weights[:2])
    with pytest.warns(GraphWarning, match=r"edge \('a', 'b'\) is given twice, perhaps once in each direction"):
        assert Graph("abc", [("a", "b"), ("a", "c"), ("b", "a")], weights) == once
    with pytest.warns(GraphWarning, match=r"is given twice \(and 1 more\)"):
        assert Graph.from_indices("ab", [[0, 1], [1, 0], [0, 1]]).edges.tolist() == [[1, 0]]


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
    assert truth.corrupt(0.0, seed=1) == truth
    complement = nx.complement(truth.to_networkx())
    assert {frozenset(pair) for pair in truth.corrupt(1.0, seed=1).edge_ids()} == set(map(frozenset, complement.edges))


@given(random_graphs())
def test_what_networkx_says(given_graph):
    graph = Graph(*given_graph)
    g = graph.to_networkx()
    assert Graph.from_networkx(g) == graph
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
    incidence = incidence.reshape(graph.n_edges, graph.n_sites)
    np.testing.assert_array_equal(graph.incidence().toarray(), incidence)
    duals = np.arange(2.0 * graph.n_edges).reshape(-1, 2)
    np.testing.assert_allclose(graph.balance(duals), incidence.T @ duals)


def test_fidelity_at_the_values_the_paper_names():
    V, K = 12, 3
    truth = Graph.clusters(np.repeat(np.arange(K), V // K))
    assert truth.fidelity(truth) == 1.0
    assert Graph.empty(range(V)).fidelity(truth) == K / V
    smallest = 2 * K / (V**2 * (1 - 1 / K) + 2)  # gf_min of the paper
    assert Graph.complete(range(V)).fidelity(truth) == pytest.approx(smallest, rel=1e-12)
    # a spanning tree of each clique is as good as the clique
    assert Graph(range(V), [(4 * k, 4 * k + j) for k in range(K) for j in (1, 2, 3)]).fidelity(truth) == 1.0


@settings(max_examples=40)
@given(random_graphs())
def test_gamma_squared_is_the_smallest_nonzero_eigenvalue(given_graph):
    graph = Graph(*given_graph)
    D = graph.incidence().toarray()
    eigenvalues = np.linalg.eigvalsh(D.T @ D)
    nonzero = eigenvalues[eigenvalues > 1e-9]
    assert gamma_squared(graph) == pytest.approx(nonzero.min() if len(nonzero) else math.inf, rel=1e-8)


def test_gamma_squared_of_large_graphs():
    assert gamma_squared(Graph.grid(20, 1000)) == pytest.approx(2 - 2 * math.cos(math.pi / 1000), rel=1e-7)
    rings = Graph.from_networkx(nx.disjoint_union(nx.cycle_graph(3000), nx.cycle_graph(2500)))
    assert gamma_squared(rings) == pytest.approx(2 - 2 * math.cos(2 * math.pi / 3000), rel=1e-7)


def test_without_networkx(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "networkx", None)
    with pytest.raises(MissingDependencyError, match=r"fedkin\[graph\]"):
        Graph.empty("ab").to_networkx()
    with pytest.raises(MissingDependencyError, match=r"reading GraphML needs networkx"):
        Graph.read(tmp_path / "graph.graphml")


TEXT_IDS = st.text(st.characters(categories=["L", "P", "S"]), min_size=1, max_size=5).filter(
    lambda name: name.strip() == name
)


@settings(max_examples=60)
@given(
    st.one_of(
        st.lists(st.integers(-(10**18), 10**18), min_size=1, max_size=8, unique=True),
        st.lists(TEXT_IDS, min_size=1, max_size=8, unique=True),
    ),
    st.data(),
)
@pytest.mark.parametrize("suffix", [".csv", ".graphml"])
def test_files_keep_the_graph(tmp_path_factory, suffix, sites, data):
    pairs = [(u, v) for k, u in enumerate(sites) for v in sites[:k]]
    edges = data.draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    weights = data.draw(st.one_of(st.none(), st.just([0.1 * (k + 1) for k in range(len(edges))])))
    graph = Graph(sites, edges, weights)
    path = tmp_path_factory.mktemp("graph") / f"graph{suffix}"
    graph.write(path)
    assert Graph.read(path) == graph  # ids, isolated sites, order and weights
    assert Graph.read(path, sites=sites[::-1]) == graph.aligned(sites[::-1])


def test_edge_list_as_others_write_it(tmp_path):
    path = tmp_path / "graph.csv"
    path.write_text("from;to;note;Weight\na;b;x;2\nc;;;\nb;d;y;0.5\n")
    graph = Graph.read(path)
    assert graph.sites == ("a", "b", "c", "d")
    assert edge_weights(graph) == {frozenset("ab"): 2.0, frozenset("bd"): 0.5}
    path.write_text("weight,target,source\n2,b,a\n")
    assert Graph.read(path) == Graph("ab", [("a", "b")], [2.0])
    path.write_text("u,v\n01,2\n")
    assert Graph.read(path).sites == ("01", "2")


@pytest.mark.parametrize(
    ("name", "content", "sites", "message"),
    [
        ("g.csv", "", None, "is empty"),
        ("g.csv", "a\n1\n", None, "needs two columns for the ends, got 'a'"),
        ("g.csv", "source,target\n1,2,3\n", None, "line 2: 3 cells"),
        ("g.csv", "source,target\n,2\n", None, "row 0 after the header has no site in the column 'source'"),
        ("g.csv", "source,target,weight\n1,2,x\n", None, "the column weight must be numeric, got 'x'"),
        ("g.csv", "source,target,weight\n1,2,\n", None, r"edge \(1, 2\) has the weight nan"),
        ("g.csv", "1,2\n2,3\n", None, r"line 1 looks like the edge \(1, 2\), expected a header"),
        ("g.csv", "a,b\nc,d\n", "abcd", r"line 1 looks like the edge \(a, b\)"),
        ("g.csv", "source,target\n1,9\n", [1, 2], r"names site '9', which is not among the 2 sites \(1, 2\)"),
        ("g.csv", "source,target\n1,2\n", [1, "1", 2], "sites 1 and '1' look the same in a file"),
        ("g.graphml", "<graphml", None, "not a complete GraphML file"),
        ("g.xlsx", "", None, r"suffix '\.xlsx', expected one of"),
    ],
)
def test_bad_files(tmp_path, name, content, sites, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(GraphError, match=message) as caught:
        Graph.read(tmp_path / name, sites)
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize(
    ("sites", "message"), [([1, "1"], "look the same"), (["", "a"], "empty or has"), ([" a"], "empty or has")]
)
def test_ids_that_a_file_cannot_keep(tmp_path, sites, message):
    with pytest.raises(GraphError, match=message):
        Graph.empty(sites).write(tmp_path / "graph.csv")
    assert not list(tmp_path.iterdir())


def test_files_with_repeated_edges_and_without_some_sites(tmp_path):
    path = tmp_path / "g.csv"
    path.write_text("source,target\n1,2\n2,1\n")
    with pytest.warns(GraphWarning, match=r"edge \(1, 2\) is given twice"):
        graph = Graph.read(path)
    assert graph == Graph([1, 2], [(1, 2)])
    path.write_text("source,target\n1,2\n4,\n")
    with pytest.warns(GraphWarning, match="does not name site 3, which has no edges"):
        read = Graph.read(path, sites=[1, 2, 3, 4])
    with pytest.warns(GraphWarning, match="does not name site 3, which has no edges"):
        aligned = Graph.read(path).aligned([1, 2, 3, 4])
    assert read == aligned == Graph([1, 2, 3, 4], [(1, 2)])  # a file and Python treat them alike
