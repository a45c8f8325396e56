"""What the theorems ask of the graph."""

from __future__ import annotations

import math

from fedkin.errors import ParameterError
from fedkin.graph import Graph
from fedkin.objective import L1, Penalty, make_penalty


def gamma_squared(graph: Graph) -> float:
    """``gamma_G^2``, the smallest nonzero eigenvalue of ``D'D`` (Theorem 2); infinite without edges.

    For a connected graph it is the algebraic connectivity.

    Parameters
    ----------
    graph : Graph
        Its weights do not count.

    Examples
    --------
    >>> from fedkin import Graph
    >>> from fedkin.stats.theory import gamma_squared
    >>> round(gamma_squared(Graph.complete(range(6))), 9)
    6.0
    """
    return graph.algebraic_connectivity()


def graph_fidelity(graph: Graph, truth: Graph) -> float:
    """``GF = K(E0) / (K(E) + |E minus E0|)`` (after Theorem 2).

    Parameters
    ----------
    graph : Graph
        The graph in use, G.
    truth : Graph
        The characteristic graph G0, a clique for each group of equal devices.

    Examples
    --------
    >>> from fedkin import Graph
    >>> from fedkin.stats.theory import graph_fidelity
    >>> truth = Graph.clusters([0, 0, 1, 1])
    >>> graph_fidelity(truth, truth), graph_fidelity(Graph.empty(range(4)), truth)
    (1.0, 0.5)
    """
    return graph.fidelity(truth)


def compatibility_lower_bound(
    graph: Graph, n_false_edges: int, penalty: str | Penalty = "l1", *, n_params: int
) -> float:
    """Lower bound on the compatibility factor ``kappa_T(D)`` of a set T of edges (Definition 1 and what follows it).

    Parameters
    ----------
    graph : Graph
        G, with largest degree d.
    n_false_edges : int
        |T|; in the theorems T = S, the false edges.
    penalty : str or Penalty
        The norm phi that R sums.
    n_params : int
        p, which matters for "l1" only.

    Returns
    -------
    float
        ``1 / (2 min(sqrt(d), sqrt(|T|)))``, and 1 for an empty T.

    Notes
    -----
    The bound comes from p = 1, and carries over to p > 1 for norms that are at most the Euclidean one ("l2", "linf").
    For "l1" the factor is exactly ``p^{-1/2}`` times the one for p = 1 (take equal coordinates), so the bound is
    divided by ``sqrt(p)`` here, although the paper states it without. With edge weights R is ``sum_e w_e phi``, and the
    bound is divided by the largest weight.

    Examples
    --------
    >>> from fedkin import Graph
    >>> from fedkin.stats.theory import compatibility_lower_bound
    >>> compatibility_lower_bound(Graph.complete(range(5)), 9, n_params=1)
    0.25
    """
    if not 0 <= n_false_edges <= graph.n_edges:
        raise ParameterError(f"n_false_edges must lie between 0 and the {graph.n_edges} edges, got {n_false_edges!r}")
    if n_false_edges == 0:
        return 1.0
    bound = 1.0 / (2.0 * math.sqrt(min(int(graph.degree.max()), n_false_edges)))
    if isinstance(make_penalty(penalty), L1):
        bound /= math.sqrt(n_params)
    return bound / float(graph.weights.max())
