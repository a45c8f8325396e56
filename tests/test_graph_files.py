"""Graph files: what is written comes back, and what others write is read."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import edge_weights
from fedkin.errors import GraphError, GraphWarning
from fedkin.graph import Graph

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


@pytest.mark.parametrize("suffix", [".csv", ".graphml", ".TXT"])
def test_ids_of_other_types_come_back_by_their_text(tmp_path, suffix):
    graph = Graph([(0, 1), 2.5, "7", True], [((0, 1), "7"), (2.5, True)])
    graph.write(tmp_path / f"graph{suffix}")
    assert Graph.read(tmp_path / f"graph{suffix}", sites=graph.sites) == graph
    assert Graph.read(tmp_path / f"graph{suffix}").sites == ("(0, 1)", "2.5", "7", "True")


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
        ("g.csv", "source,target\n1,1\n", None, r"edge \(1, 1\) is a self-loop"),
        ("g.csv", "source,target,weight\n1,2,1\n2,1,3\n", None, r"edge \(1, 2\) is given twice, with the weights"),
        ("g.csv", "source,target,weight\n1,2,x\n", None, "the column weight must be numeric, got 'x'"),
        ("g.csv", "source,target,weight\n1,2,\n", None, r"edge \(1, 2\) has the weight nan"),
        ("g.csv", "source,target\n", None, "at least one site"),
        ("g.csv", "1,2\n2,3\n", None, r"line 1 looks like the edge \(1, 2\), expected a header"),
        ("g.csv", "a,b\nb,c\nc,a\n", None, r"line 1 looks like the edge \(a, b\)"),
        ("g.csv", "a,b\nc,d\n", "abcd", r"line 1 looks like the edge \(a, b\)"),
        ("g.csv", "source,target\n1,9\n", [1, 2], r"names site '9', which is not among the 2 sites \(1, 2\)"),
        ("g.csv", "source,target\n1,2\n", [1, "1", 2], "sites 1 and '1' look the same in a file"),
        ("g.graphml", "<graphml", None, "not a whole GraphML file"),
        ("g.graphml", "", None, "not a whole GraphML file"),
        ("g.xlsx", "", None, r"suffix '\.xlsx', expected one of"),
    ],
)
def test_bad_files(tmp_path, name, content, sites, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(GraphError, match=message) as caught:
        Graph.read(tmp_path / name, sites)
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize(
    ("sites", "message"), [([1, "1"], "look the same"), (["", "a"], "empty or padded"), ([" a"], "empty or padded")]
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
