"""Graphs, checked against networkx and closed forms."""

import copy
import math
import pickle
import subprocess
import sys
import time

import networkx as nx
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedkin import graph_checks, spectrum
from fedkin.errors import FedkinError, GraphError, MissingDependencyError, ParameterError
from fedkin.graph import Graph

# A busy machine must not make a test fail.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@st.composite
def random_graphs(draw, most=12, weighted=True):
    """Devices with arbitrary ids, edges in arbitrary orientation and order, positive weights."""
    names = st.one_of(st.integers(-50, 50), st.text(min_size=1, max_size=3), st.tuples(st.integers(0, 5)))
    devices = draw(st.lists(names, min_size=1, max_size=most, unique=True))
    pairs = [(i, j) for i in range(len(devices)) for j in range(i)]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    turned = [(devices[j], devices[i]) if draw(st.booleans()) else (devices[i], devices[j]) for i, j in chosen]
    weights = [draw(st.floats(0.01, 100)) for _ in turned] if weighted else None
    return devices, turned, weights


def edge_weights(graph):
    return {frozenset(pair): w for pair, w in zip(graph.edge_ids(), graph.weights.tolist(), strict=True)}


# --- construction ---------------------------------------------------------------------------------------------


@given(random_graphs())
def test_edges_are_oriented_sorted_and_carry_their_weights(given_graph):
    devices, edges, weights = given_graph
    graph = Graph(devices, edges, weights)
    assert graph.devices == tuple(devices)
    assert graph.edges.dtype == np.int64
    assert graph.edges.shape == (len(edges), 2)
    assert (graph.edges[:, 0] > graph.edges[:, 1]).all()
    assert graph.edges.tolist() == sorted(graph.edges.tolist())
    assert edge_weights(graph) == {frozenset(pair): w for pair, w in zip(edges, weights, strict=True)}
    assert [graph.index[device] for device in devices] == list(range(len(devices)))


@given(random_graphs(), st.randoms(use_true_random=False))
def test_orientation_and_order_of_the_edges_do_not_matter(given_graph, random):
    devices, edges, weights = given_graph
    shuffled = list(zip(edges, weights, strict=True))
    random.shuffle(shuffled)
    turned = Graph(devices, [pair[::-1] for pair, _ in shuffled], [w for _, w in shuffled])
    assert turned == Graph(devices, edges, weights)


@given(random_graphs(), st.randoms(use_true_random=False))
def test_relabelling_changes_nothing(given_graph, random):
    devices, edges, weights = given_graph
    graph = Graph(devices, edges, weights)
    order = random.sample(devices, len(devices))
    moved = graph.aligned(order)
    assert moved == Graph(order, edges, weights)
    assert moved.aligned(devices) == graph
    assert moved.n_components == graph.n_components
    assert moved.algebraic_connectivity() == pytest.approx(graph.algebraic_connectivity(), rel=1e-9)
    at = [graph.index[device] for device in order]
    np.testing.assert_allclose(moved.laplacian().toarray(), graph.laplacian().toarray()[np.ix_(at, at)], rtol=1e-12)
    np.testing.assert_array_equal(moved.degree, graph.degree[at])
    np.testing.assert_array_equal(Graph.from_indices(order, moved.edges, moved.weights).weights, moved.weights)


def test_from_indices_is_the_same_graph():
    rng = np.random.default_rng(0)
    pairs = np.array(list(nx.gnm_random_graph(30, 100, seed=1).edges))
    weights = rng.random(100) + 0.1
    flipped = np.where(rng.random((100, 1)) < 0.5, pairs, pairs[:, ::-1])
    devices = [f"site {k}" for k in range(30)]
    by_name = Graph(devices, [(devices[i], devices[j]) for i, j in pairs], weights)
    assert Graph.from_indices(devices, flipped, weights) == by_name
    assert Graph.from_indices(devices, flipped.astype(np.uint16), weights) == by_name


def test_numpy_ids_become_plain():
    graph = Graph(np.arange(3), np.array([[0, 1], [2, 1]]))
    assert [type(device) for device in graph.devices] == [int] * 3
    assert graph.edges.tolist() == [[1, 0], [2, 1]]
    assert Graph(pd.Series(["a", "b"]), [np.array(["a", "b"])]).devices == ("a", "b")
    assert Graph([0, 1], [(np.int64(1), np.int64(0))]).n_edges == 1


def test_edges_from_a_generator_and_one_device():
    assert Graph("abc", (pair for pair in [("a", "b")])).n_edges == 1
    alone = Graph(["only"], [])
    assert repr(alone) == "Graph(1 device, 0 edges, 1 component)"
    assert Graph.complete(["only"]) == Graph.empty(["only"]) == Graph.clusters({"only": 3}) == alone
    assert alone.algebraic_connectivity() == math.inf
    assert alone.corrupt(1.0, seed=0) == alone


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
        graph.devices = ("x",)


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
    ("devices", "edges", "weights", "message"),
    [
        (range(10), [(7, 12)], None, r"edge \(7, 12\) names device 12, which is not among the 10 devices"),
        (["a"], [("a", "b")], None, r"edge \('a', 'b'\) names device 'b', which is not among the 1 devices"),
        (["1", "2"], [(1, 2)], None, r"names device 1, which is not among"),
        (["a", "b"], [("a", "a")], None, r"edge \('a', 'a'\) is a self-loop"),
        ("abc", [("a", "b"), ("a", "c"), ("b", "a")], None, r"edge \('a', 'b'\) is given twice"),
        ("abc", [("a", "c"), ("a", "c")], None, r"edge \('a', 'c'\) is given twice"),
        ("ab", [("a", "b")], [0.0], r"edge \('a', 'b'\) has the weight 0\.0, expected a positive number"),
        ("ab", [("a", "b")], [-1.0], r"has the weight -1\.0"),
        ("ab", [("a", "b")], [np.nan], r"has the weight nan"),
        ("ab", [("a", "b")], [np.inf], r"has the weight inf"),
        ("ab", [("a", "b")], [1.0, 2.0], r"weights have the shape \(2,\), expected \(1,\)"),
        ("ab", [("a", "b")], 2.0, r"weights have the shape \(\), expected \(1,\)"),
        ("ab", [("a", "b")], ["heavy"], "weights must be numbers"),
        ("ab", [("a", "b", 2.0)], None, r"a pair of device ids, got \('a', 'b', 2\.0\); weights have their own"),
        ("ab", ["ab"], None, "a pair of device ids, got 'ab'"),
        ("ab", [3], None, "a pair of device ids, got 3"),
        ("ab", [("a", ["b"])], None, r"\['b'\] cannot be a device id"),
        ([], [], None, "at least one device"),
        (["a", "b", "a"], [], None, "device 'a' is given twice"),
        ([1, 1.0], [], None, "device 1 is given twice"),
        (["a", None], [], None, r"devices: a device id is missing \(None\)"),
        ([1.5, math.nan], [], None, "a device id is missing"),
        ([["a"]], [], None, "cannot be hashed"),
        (5, [], None, r"use range\(5\)"),
    ],
)
def test_bad_graphs(devices, edges, weights, message):
    with pytest.raises(GraphError, match=message):
        Graph(devices, edges, weights)


@pytest.mark.parametrize(
    ("index", "weights", "message"),
    [
        ([[0, 3]], None, r"edge number 0 names position 3, but the 3 devices of the graph have the positions 0\.\.2"),
        ([[0, 1], [-1, 0]], None, "edge number 1 names position -1"),
        ([[1, 1]], None, r"edge \('b', 'b'\) is a self-loop"),
        ([[0, 1], [1, 2], [1, 0], [2, 1]], None, r"edge \('a', 'b'\) is given twice \(and 1 more\)"),
        ([[0.0, 1.0]], None, r"int array of shape \(E, 2\), got float64"),
        ([0, 1], None, r"got int64 \(2,\)"),
        ([[0, 1, 2]], None, r"got int64 \(1, 3\)"),
        ([[2, 0], [0, 1]], [1.0, -3.0], r"edge \('a', 'b'\) has the weight -3\.0"),
    ],
)
def test_bad_indices(index, weights, message):
    with pytest.raises(GraphError, match=message):
        Graph.from_indices("abc", index, weights)


def test_every_graph_error_is_a_value_error_of_the_one_tree():
    with pytest.raises(ValueError) as caught:
        Graph("ab", [("a", "c")])
    assert isinstance(caught.value, FedkinError)


# --- named graphs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 10, 101])
def test_complete(size):
    graph = Graph.complete(range(size))
    assert nx.utils.graphs_equal(graph.to_networkx(), weighted(nx.complete_graph(size)))
    assert graph == Graph.from_indices(range(size), graph.edges)


def weighted(g):
    nx.set_edge_attributes(g, 1.0, "weight")
    return g


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
    devices = [f"d{k}" for k in range(len(labels))]
    assert Graph.clusters(dict(zip(devices, labels, strict=True))) == Graph.clusters(labels, devices=devices)
    # the labels themselves, numbered by first appearance
    numbered = [list(dict.fromkeys(labels)).index(label) for label in labels]
    assert graph.components().tolist() == numbered


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0, 1], "abc"), "2 labels for 3 devices"),
        (({"a": 1}, "a"), "a mapping names them itself"),
        (([0, None],), "labels: a device id is missing"),
        (([],), "at least one device"),
    ],
)
def test_bad_clusters(arguments, message):
    with pytest.raises(GraphError, match=message):
        Graph.clusters(*arguments)


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (1, 5), (4, 1), (3, 4)])
def test_grid(rows, cols):
    graph = Graph.grid(rows, cols)
    assert nx.utils.graphs_equal(graph.to_networkx(), weighted(nx.grid_2d_graph(rows, cols)))
    assert graph.devices == tuple((r, c) for r in range(rows) for c in range(cols))


def test_bad_grid():
    with pytest.raises(ParameterError, match="0 x 3"):
        Graph.grid(0, 3)


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


def test_devices_at_one_place_are_neighbours():
    graph = Graph.knn(np.zeros((30, 2)), k=3)
    assert (graph.degree >= 3).all()
    assert (graph.edges[:, 0] != graph.edges[:, 1]).all()
    twins = Graph.knn([0.0, 0.0, 10.0, 10.0], k=1, devices="abcd")
    assert list(twins.edge_ids()) == [("b", "a"), ("d", "c")]


@pytest.mark.parametrize(
    ("coordinates", "k", "devices", "error", "message"),
    [
        ([0.0, 1.0], 2, None, ParameterError, "k must be from 1 to 1 for 2 devices, got 2"),
        ([0.0, 1.0], 0, None, ParameterError, "got 0"),
        ([[0.0, 1.0], [np.nan, 0.0]], 1, "ab", GraphError, "device 'b' has the coordinates"),
        (np.zeros((2, 2, 2)), 1, None, GraphError, r"must have the shape \(V, d\)"),
        ([0.0, 1.0], 1, "abc", GraphError, "2 coordinates for 3 devices"),
    ],
)
def test_bad_coordinates(coordinates, k, devices, error, message):
    with pytest.raises(error, match=message):
        Graph.knn(coordinates, k, devices)


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
        expected = nx.laplacian_matrix(g, nodelist=graph.devices, weight=weight).toarray()
        np.testing.assert_allclose(graph.laplacian(weighted=weight is not None).toarray(), expected, rtol=1e-12)
    assert graph.n_components == nx.number_connected_components(g)
    labels = graph.components()
    for component in nx.connected_components(g):
        assert len({int(labels[graph.index[device]]) for device in component}) == 1
    assert list(dict.fromkeys(labels.tolist())) == list(range(graph.n_components))
    assert graph.degree.tolist() == [g.degree[device] for device in graph.devices]
    oriented = [(graph.devices[j], graph.devices[i]) for i, j in graph.edges]
    incidence = nx.incidence_matrix(g, nodelist=graph.devices, edgelist=oriented, oriented=True).toarray().T
    np.testing.assert_array_equal(graph.incidence().toarray(), incidence.reshape(graph.n_edges, graph.n_devices))


@given(random_graphs())
def test_incidence_makes_the_laplacian_and_differences(given_graph):
    graph = Graph(*given_graph)
    D = graph.incidence()
    assert D.shape == (graph.n_edges, graph.n_devices)
    assert D.has_sorted_indices
    W = scipy.sparse.diags_array(graph.weights)
    np.testing.assert_allclose((D.T @ W @ D).toarray(), graph.laplacian().toarray(), rtol=1e-9, atol=1e-12)
    theta = np.arange(graph.n_devices) ** 2.0
    np.testing.assert_array_equal(D @ theta, theta[graph.edges[:, 0]] - theta[graph.edges[:, 1]])


@given(random_graphs())
def test_scipy_round_trip(given_graph):
    graph = Graph(*given_graph)
    adjacency = scipy.sparse.diags_array(graph.laplacian().diagonal()) - graph.laplacian()
    assert edge_weights(Graph.from_scipy(adjacency, graph.devices)) == edge_weights(graph)
    assert edge_weights(Graph.from_scipy(adjacency.toarray(), graph.devices)) == edge_weights(graph)


def test_scipy_of_other_kinds():
    dense = np.array([[0, 2, 0], [2, 0, 1], [0, 1, 0]])
    for make in (scipy.sparse.coo_array, scipy.sparse.csc_matrix, scipy.sparse.lil_array, np.asarray):
        graph = Graph.from_scipy(make(dense))
        assert graph.edges.tolist() == [[1, 0], [2, 1]]
        assert graph.weights.tolist() == [2.0, 1.0]
    assert Graph.from_scipy(dense > 0).weights.tolist() == [1.0, 1.0]
    stored_zeros = scipy.sparse.csr_array(([0.0, 0.0, 1.0, 1.0], ([0, 1, 1, 2], [1, 0, 2, 1])), shape=(3, 3))
    assert Graph.from_scipy(stored_zeros).edges.tolist() == [[2, 1]]
    rounded = np.array([[0, 0.3], [0.1 + 0.2, 0]])
    assert Graph.from_scipy(rounded).n_edges == 1


@pytest.mark.parametrize(
    ("matrix", "devices", "message"),
    [
        ([[0, 1], [2, 0]], "ab", r"not symmetric: 1\.0 from device 'a' to 'b', but 2\.0 back"),
        ([[0, 1], [0, 0]], None, "not symmetric"),
        ([[1, 0], [0, 0]], "ab", r"edge \('a', 'a'\) is a self-loop"),
        ([[0, -1], [-1, 0]], None, r"has the weight -1\.0"),
        ([[0, np.nan], [np.nan, 0]], None, "NaN or infinite"),
        (np.zeros((2, 3)), None, r"must be square, got the shape \(2, 3\)"),
        (np.zeros((2, 2), dtype=complex), None, "real numbers, got complex128"),
        (np.zeros((2, 2)), "abc", "has 2 rows, but there are 3 devices"),
        ("matrix", None, "expected a matrix"),
    ],
)
def test_bad_matrices(matrix, devices, message):
    with pytest.raises(GraphError, match=message):
        Graph.from_scipy(np.array(matrix) if isinstance(matrix, list) else matrix, devices)


def test_bad_networkx():
    with pytest.raises(GraphError, match="directed"):
        Graph.from_networkx(nx.DiGraph([(0, 1)]))
    with pytest.raises(GraphError, match="given twice"):
        Graph.from_networkx(nx.MultiGraph([(0, 1), (0, 1)]))
    with pytest.raises(GraphError, match="self-loop"):
        Graph.from_networkx(nx.Graph([(0, 0)]))
    with pytest.raises(GraphError, match="expected a networkx graph, got list"):
        Graph.from_networkx([(0, 1)])
    g = nx.Graph([(0, 1)])
    g.edges[0, 1]["weight"] = -1
    with pytest.raises(GraphError, match="weight -1"):
        Graph.from_networkx(g)


def test_without_networkx(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "networkx", None)
    with pytest.raises(MissingDependencyError, match=r"fedkin\[graph\]"):
        Graph.empty("ab").to_networkx()
    with pytest.raises(MissingDependencyError, match=r"reading GraphML needs networkx"):
        Graph.read(tmp_path / "graph.graphml")


# --- files ----------------------------------------------------------------------------------------------------

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
def test_files_keep_the_graph(tmp_path_factory, suffix, devices, data):
    pairs = [(u, v) for k, u in enumerate(devices) for v in devices[:k]]
    edges = data.draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    weights = data.draw(st.one_of(st.none(), st.just([0.1 * (k + 1) for k in range(len(edges))])))
    graph = Graph(devices, edges, weights)
    path = tmp_path_factory.mktemp("graph") / f"graph{suffix}"
    graph.write(path)
    assert Graph.read(path) == graph  # ids, isolated devices, order and weights
    assert Graph.read(path, devices=devices[::-1]) == graph.aligned(devices[::-1])


@pytest.mark.parametrize("suffix", [".csv", ".graphml", ".TXT"])
def test_ids_of_other_types_come_back_by_their_text(tmp_path, suffix):
    graph = Graph([(0, 1), 2.5, "7", True], [((0, 1), "7"), (2.5, True)])
    graph.write(tmp_path / f"graph{suffix}")
    assert Graph.read(tmp_path / f"graph{suffix}", devices=graph.devices) == graph
    assert Graph.read(tmp_path / f"graph{suffix}").devices == ("(0, 1)", "2.5", "7", "True")


def test_edge_list_as_others_write_it(tmp_path):
    path = tmp_path / "graph.csv"
    path.write_text("from;to;note;Weight\na;b;x;2\nc;;;\nb;d;y;0.5\n")
    graph = Graph.read(path)
    assert graph.devices == ("a", "b", "c", "d")
    assert edge_weights(graph) == {frozenset("ab"): 2.0, frozenset("bd"): 0.5}
    path.write_text("weight,target,source\n2,b,a\n")
    assert Graph.read(path) == Graph("ab", [("a", "b")], [2.0])
    path.write_text("u,v\n01,2\n")
    assert Graph.read(path).devices == ("01", "2")


def test_pandas_makes_floats_of_ids_next_to_gaps(tmp_path):
    frame = pd.DataFrame({"source": [1, 2, 4], "target": [2, 3, None]})
    frame.to_csv(tmp_path / "graph.csv", index=False)
    assert "2.0" in (tmp_path / "graph.csv").read_text()
    graph = Graph.read(tmp_path / "graph.csv")
    assert graph == Graph([1, 2, 3, 4], [(1, 2), (2, 3)])
    assert [type(device) for device in graph.devices] == [int] * 4
    assert Graph.read(tmp_path / "graph.csv", devices=[1, 2, 3, 4]) == graph


def test_devices_may_be_read_from_a_generator_and_be_more_than_the_file_has(tmp_path):
    Graph([1, 2], [(1, 2)]).write(tmp_path / "graph.csv")
    graph = Graph.read(tmp_path / "graph.csv", devices=(k for k in (3, 2, 1)))
    assert graph.devices == (3, 2, 1)
    assert list(graph.edge_ids()) == [(1, 2)]


@pytest.mark.parametrize(
    ("name", "content", "devices", "message"),
    [
        ("g.csv", "", None, "is empty"),
        ("g.csv", "a\n1\n", None, "needs two columns for the ends, got 'a'"),
        ("g.csv", "source,target\n1,2,3\n", None, "line 2: 3 cells"),
        ("g.csv", "source,target\n,2\n", None, "row 0 after the header has no device in the column 'source'"),
        ("g.csv", "source,target\n1,1\n", None, r"edge \(1, 1\) is a self-loop"),
        ("g.csv", "source,target\n1,2\n2,1\n", None, r"edge \(1, 2\) is given twice"),
        ("g.csv", "source,target,weight\n1,2,x\n", None, "the column weight must be numeric, got 'x'"),
        ("g.csv", "source,target,weight\n1,2,\n", None, r"edge \(1, 2\) has the weight nan"),
        ("g.csv", "source,target\n", None, "at least one device"),
        ("g.csv", "1,2\n2,3\n", None, r"line 1 looks like the edge \(1, 2\), expected a header"),
        ("g.csv", "a,b\nb,c\nc,a\n", None, r"line 1 looks like the edge \(a, b\)"),
        ("g.csv", "a,b\nc,d\n", "abcd", r"line 1 looks like the edge \(a, b\)"),
        ("g.csv", "source,target\n1,9\n", [1, 2], r"names device '9', which is not among the 2 devices \(1, 2\)"),
        ("g.csv", "source,target\n1,2\n", [1, "1", 2], "devices 1 and '1' look the same in a file"),
        ("g.graphml", "<graphml", None, "not a whole GraphML file"),
        ("g.graphml", "", None, "not a whole GraphML file"),
        ("g.xlsx", "", None, r"suffix '\.xlsx', expected one of"),
    ],
)
def test_bad_files(tmp_path, name, content, devices, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(GraphError, match=message) as caught:
        Graph.read(tmp_path / name, devices)
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize("name", ["absent.csv", "absent.graphml"])
def test_absent_files(tmp_path, name):
    with pytest.raises(GraphError, match="there is no file"):
        Graph.read(tmp_path / name)


def test_directed_graphml(tmp_path):
    nx.write_graphml(nx.DiGraph([("a", "b")]), tmp_path / "graph.graphml")
    with pytest.raises(GraphError, match="directed"):
        Graph.read(tmp_path / "graph.graphml")


def test_graphml_of_networkx_with_text_weights(tmp_path):
    g = nx.Graph([("a", "b")])
    g.edges["a", "b"]["weight"] = "heavy"
    nx.write_graphml(g, tmp_path / "graph.graphml")
    with pytest.raises(GraphError, match="weights must be numbers"):
        Graph.read(tmp_path / "graph.graphml")


@pytest.mark.parametrize(
    ("devices", "message"), [([1, "1"], "look the same"), (["", "a"], "empty or padded"), ([" a"], "empty or padded")]
)
def test_ids_that_a_file_cannot_keep(tmp_path, devices, message):
    with pytest.raises(GraphError, match=message):
        Graph.empty(devices).write(tmp_path / "graph.csv")
    assert not list(tmp_path.iterdir())


def test_writing_nowhere(tmp_path):
    with pytest.raises(GraphError, match="there is no directory"):
        Graph.empty("ab").write(tmp_path / "absent" / "graph.csv")
    with pytest.raises(GraphError, match="cannot tell the format"):
        Graph.empty("ab").write(tmp_path / "graph.json")


# --- making another one ---------------------------------------------------------------------------------------


def test_keep_and_reweighted():
    graph = Graph("abc", [("a", "b"), ("b", "c"), ("c", "a")], [1.0, 2.0, 3.0])
    kept = graph.keep(graph.weights > 1.5)
    assert edge_weights(kept) == {frozenset("bc"): 2.0, frozenset("ca"): 3.0}
    assert kept.devices == graph.devices
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


def test_aligned_names_what_does_not_match():
    graph = Graph.complete(range(4))
    with pytest.raises(GraphError, match="does not have device 9: add"):
        graph.aligned([0, 1, 2, 9])
    with pytest.raises(GraphError, match="does not have 7 devices 4, 5, 6, 7, 8 and 2 more"):
        graph.aligned(range(11))
    with pytest.raises(GraphError, match="has device 3 beyond the 3 devices asked for"):
        graph.aligned(range(3))
    with pytest.raises(GraphError, match="given twice"):
        graph.aligned([0, 1, 1, 2])


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


def test_fidelity_matches_devices_by_their_ids():
    truth = Graph("abcd", [("a", "b"), ("c", "d")])
    guess = Graph("dcba", [("a", "b"), ("b", "c")])
    assert guess.fidelity(truth) == 2 / (2 + 1)
    with pytest.raises(GraphError, match="does not have"):
        guess.fidelity(Graph.empty("xyz"))


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
    if graph.n_devices > 1 and graph.n_components == 1:
        expected = nx.algebraic_connectivity(graph.to_networkx(), weight=None, method="tracemin_lu", tol=1e-12)
        assert graph.algebraic_connectivity() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("factor_entries", [10**7, 0], ids=["factor", "iteration"])
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
def test_algebraic_connectivity_of_large_graphs(monkeypatch, g, factor_entries):
    graph = Graph.from_networkx(g)
    exact = graph.algebraic_connectivity()
    monkeypatch.setattr(spectrum, "_DENSE_EIGENVALUES", 2)
    monkeypatch.setattr(spectrum, "_FACTOR_ENTRIES", factor_entries)
    assert graph.algebraic_connectivity() == pytest.approx(exact, rel=1e-7)


def test_algebraic_connectivity_of_a_really_large_grid():
    assert Graph.grid(20, 1000).algebraic_connectivity() == pytest.approx(2 - 2 * math.cos(math.pi / 1000), rel=1e-7)


# --- size -----------------------------------------------------------------------------------------------------


def test_large_sparse_graphs_take_seconds():
    rng = np.random.default_rng(0)
    size = 200_000
    ends = rng.integers(0, size, (5 * size, 2))
    ends = np.unique(np.sort(ends[ends[:, 0] != ends[:, 1]], axis=1), axis=0)
    started = time.perf_counter()
    graph = Graph.from_indices(range(size), ends)
    assert graph.n_components < size
    assert graph.incidence().nnz == 2 * graph.n_edges
    graph.aligned(range(size - 1, -1, -1))
    assert time.perf_counter() - started < 30  # a loop over all pairs would take hours, one per edge minutes


def test_import_stays_light():
    heavy = ["networkx", "pandas", "narwhals", "sklearn", "scipy.stats", "scipy.spatial", "pyarrow"]
    code = f"import sys, fedkin.graph, fedkin.federation; print([m for m in {heavy} if m in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert answer.stdout.strip() == "[]"
