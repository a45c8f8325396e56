"""Random graphs for property tests, and graphs in the form that others compare them in."""

import networkx as nx
from hypothesis import strategies as st


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
    """Weight of each edge by the set of its two ends."""
    return {frozenset(pair): w for pair, w in zip(graph.edge_ids(), graph.weights.tolist(), strict=True)}


def unit_weights(g):
    """A graph of networkx with the weight 1 on every edge."""
    nx.set_edge_attributes(g, 1.0, "weight")
    return g
