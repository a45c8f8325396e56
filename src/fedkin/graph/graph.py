"""The graph between the sites: edges as pairs of site positions."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedkin._base import Array, Index, count, frozen, in_file
from fedkin.errors import DataError, GraphError, ParameterError
from fedkin.graph.edges import (
    Cliques,
    EdgeSet,
    checked_edges,
    checked_site_weights,
    checked_weights,
    flipped_pairs,
    grid_pairs,
    ids_for,
    named,
    nearest_pairs,
    pair_numbers,
    pairs_of_matrix,
    plain_ids,
    positions,
    sorted_edges,
    square_matrix,
    warn_of_unnamed,
)
from fedkin.graph.io import networkx_graph, read_graph, write_graph


@dataclass(frozen=True, eq=False, repr=False, init=False)
class Graph(EdgeSet):
    """An undirected graph without self-loops. Immutable.

    Parameters
    ----------
    sites : iterable of V hashable ids
        The nodes, each named once.
    edges : iterable of E pairs of ids
        In either orientation. A pair that comes again with the same weight counts once, which a `GraphWarning` says.
    weights : array of shape (E,), optional
        Positive edge weights w_e; 1 by default.

    Attributes
    ----------
    sites : tuple of V ids
    edges : int64 array of shape (E, 2)
        Positions ``(i, j)`` in `sites` with ``i > j`` (the paper's e+ and e-), sorted lexicographically; read only.
    weights : float64 array of shape (E,)
        In the order of `edges`; read only.

    Raises
    ------
    GraphError
        If an edge names an unknown site, is a self-loop or comes twice with different weights, or a weight is not
        positive.

    Examples
    --------
    >>> graph = Graph(["a", "b", "c"], [("a", "b"), ("c", "b")])
    >>> graph
    Graph(3 sites, 2 edges, 1 component)
    >>> graph.edges.tolist()
    [[1, 0], [2, 1]]
    """

    def __init__(
        self, sites: Iterable[Hashable], edges: Iterable[Any], weights: npt.ArrayLike | None = None
    ) -> None:
        ids, position = positions(sites)
        pairs = edges.tolist() if isinstance(edges, np.ndarray) else list(edges)
        flat: list[int] = []
        for pair in pairs:
            if not isinstance(pair, (tuple, list, np.ndarray)) or len(pair) != 2:
                raise GraphError(f"an edge is a pair of site ids, got {pair!r}; weights have their own argument")
            for end in pair:
                try:
                    flat.append(position[end])
                except KeyError:
                    raise GraphError(
                        f"edge {tuple(pair)!r} names site {end!r}, which is not among the "
                        f"{count(len(ids), 'site')} of the graph; add the site or remove the edge"
                    ) from None
                except TypeError:
                    raise GraphError(f"edge {tuple(pair)!r}: {end!r} cannot be a site id") from None
        index = np.array(flat, dtype=np.int64).reshape(-1, 2)
        self._set(ids, *checked_edges(ids, index, weights))

    def _set(self, sites: tuple[Hashable, ...], edges: Index, weights: Array) -> None:
        for name, value in (("sites", sites), ("edges", frozen(edges)), ("weights", frozen(weights))):
            object.__setattr__(self, name, value)

    @classmethod
    def _from_edges(cls, sites: tuple[Hashable, ...], edges: Index, weights: Array | None = None) -> Graph:
        """Make a graph from parts that are known to be right."""
        made = object.__new__(cls)
        made._set(sites, edges, np.ones(len(edges)) if weights is None else weights)
        return made

    @classmethod
    def _from_cliques(cls, sites: tuple[Hashable, ...], cliques: Cliques) -> Graph:
        made = object.__new__(cls)
        object.__setattr__(made, "sites", sites)
        object.__setattr__(made, "cliques", cliques)
        return made

    # --- other ways to make one -------------------------------------------------------------------------------

    @classmethod
    def from_indices(
        cls, sites: Iterable[Hashable], index: npt.ArrayLike, weights: npt.ArrayLike | None = None
    ) -> Graph:
        """Make a graph from pairs of site positions; the quick way for millions of edges.

        Parameters
        ----------
        sites, weights
            As in the constructor.
        index : int array of shape (E, 2)
            Positions in `sites`, in either orientation, each pair once.

        Examples
        --------
        >>> Graph.from_indices("abc", [[0, 2], [1, 0]]).edges.tolist()
        [[1, 0], [2, 0]]
        """
        ids, _ = positions(sites)
        pairs = np.asarray(index)
        if pairs.size == 0:
            pairs = np.empty((0, 2), dtype=np.int64)
        if pairs.ndim != 2 or pairs.shape[1] != 2 or pairs.dtype.kind not in "iu":
            raise GraphError(f"index must be an int array of shape (E, 2), got {pairs.dtype} {pairs.shape}")
        outside = (pairs < 0) | (pairs >= len(ids))
        if outside.any():
            edge, end = np.argwhere(outside)[0]
            raise GraphError(
                f"edge number {edge} names position {pairs[edge, end]}, but the {len(ids)} sites of the graph "
                f"have the positions 0..{len(ids) - 1}"
            )
        return cls._from_edges(ids, *checked_edges(ids, pairs.astype(np.int64), weights))

    @classmethod
    def complete(cls, sites: Iterable[Hashable]) -> Graph:
        """Join all pairs of sites. Edges are listed only when asked for.

        Examples
        --------
        >>> Graph.complete(range(4)).n_edges
        6
        """
        ids, _ = positions(sites)
        return cls._from_cliques(ids, Cliques.from_labels([0] * len(ids)))

    @classmethod
    def empty(cls, sites: Iterable[Hashable]) -> Graph:
        """Make a graph without edges.

        Examples
        --------
        >>> Graph.empty(range(4))
        Graph(4 sites, 0 edges, 4 components)
        """
        ids, _ = positions(sites)
        return cls._from_edges(ids, np.empty((0, 2), dtype=np.int64))

    @classmethod
    def clusters(
        cls,
        labels: Mapping[Any, Hashable] | Iterable[Hashable],
        sites: Iterable[Hashable] | None = None,
        weights: npt.ArrayLike | None = None,
    ) -> Graph:
        """Join any two sites with the same label. Edges are listed only when asked for.

        Parameters
        ----------
        labels : mapping of site id to label, or iterable of V labels
            Group of each site.
        sites : iterable of V ids, optional
            The sites that an iterable of labels is about; 0..V-1 by default.
        weights : array of shape (V,), optional
            Positive weights of the sites; the edge between u and v weighs ``weights[u] * weights[v]``.

        Examples
        --------
        >>> list(Graph.clusters({"a": 0, "b": 1, "c": 0}).edge_ids())
        [('c', 'a')]
        >>> Graph.clusters([0, 0, 1, 1])
        Graph(4 sites, 2 edges, 2 components)
        """
        if isinstance(labels, Mapping):
            if sites is not None:
                raise GraphError("give sites= only with a sequence of labels: a mapping names them itself")
            sites, labels = list(labels), list(labels.values())
        groups = plain_ids(labels, "labels")
        ids = ids_for(sites, len(groups), "label")
        checked = None if weights is None else checked_site_weights(ids, weights)
        return cls._from_cliques(ids, Cliques.from_labels(groups, checked))

    @classmethod
    def from_networkx(cls, g: Any) -> Graph:
        """Make a graph from an undirected networkx graph; its edge attribute ``weight`` is the weight, by default 1.

        Examples
        --------
        >>> import networkx
        >>> Graph.from_networkx(networkx.path_graph(4))
        Graph(4 sites, 3 edges, 1 component)
        """
        if not (hasattr(g, "nodes") and hasattr(g, "edges") and hasattr(g, "is_directed")):
            raise GraphError(f"expected a networkx graph, got {type(g).__name__}")
        if g.is_directed():
            raise GraphError("the networkx graph is directed, but edges here have no direction: use g.to_undirected()")
        triples = list(g.edges(data="weight", default=1.0))
        return cls(g.nodes, [(u, v) for u, v, _ in triples], [weight for *_, weight in triples])

    def to_networkx(self) -> Any:
        """Return the graph as a `networkx.Graph`, with the edge attribute ``weight``.

        Examples
        --------
        >>> Graph(["a", "b"], [("a", "b")]).to_networkx().edges["a", "b"]
        {'weight': 1.0}
        """
        return networkx_graph(self.sites, self.edges, self.weights, "Graph.to_networkx")

    @classmethod
    def from_scipy(cls, matrix: Any, sites: Iterable[Hashable] | None = None) -> Graph:
        """Make a graph from a symmetric weight matrix.

        Parameters
        ----------
        matrix : scipy sparse matrix or array of shape (V, V)
            Symmetric up to rounding, with an empty diagonal; entries other than zero are edges and their weights.
        sites : iterable of V ids, optional
            By default 0..V-1.

        Examples
        --------
        >>> import scipy.sparse
        >>> Graph.from_scipy(scipy.sparse.coo_array([[0, 2.0], [2.0, 0]])).weights
        array([2.])
        """
        square = square_matrix(matrix)
        ids = ids_for(sites, square.shape[0], "matrix row")
        return cls._from_edges(ids, *checked_edges(ids, *pairs_of_matrix(square, ids)))

    @classmethod
    def knn(
        cls,
        coordinates: npt.ArrayLike | Mapping[Hashable, npt.ArrayLike],
        k: int,
        sites: Iterable[Hashable] | None = None,
    ) -> Graph:
        """Join every site to its k nearest ones.

        Parameters
        ----------
        coordinates : array of shape (V, d) or (V,), or mapping {site: place}
            Place of each site.
        k : int
            Number of neighbours, from 1 to V-1.
        sites : iterable of V ids, optional
            0..V-1 by default.

        Notes
        -----
        By Euclidean distance. An edge is there when either end is among the k nearest of the other, so degrees are at
        least k. Ties for the last place are broken by the order of the search, the same in every run.

        Examples
        --------
        >>> list(Graph.knn([0.0, 1.0, 5.0], k=1, sites="abc").edge_ids())
        [('b', 'a'), ('c', 'b')]
        """
        if isinstance(coordinates, Mapping):
            sites = tuple(coordinates) if sites is None else sites
            coordinates = [coordinates[site] for site in sites]  # type: ignore[assignment]
        places = np.asarray(coordinates, dtype=np.float64)
        places = places[:, None] if places.ndim == 1 else places
        if places.ndim != 2:
            raise GraphError(f"coordinates must have the shape (V, d), got {places.shape}")
        ids = ids_for(sites, len(places), "coordinate")
        for at in np.flatnonzero(~np.isfinite(places).all(axis=1))[:1]:
            raise GraphError(f"site {ids[at]!r} has the coordinates {places[at].tolist()}, which are not finite")
        if not 1 <= k < len(ids):
            raise ParameterError(f"k must be from 1 to {len(ids) - 1} for {len(ids)} sites, got {k!r}")
        return cls._from_edges(ids, *sorted_edges(nearest_pairs(places, k), None))

    @classmethod
    def grid(cls, rows: int, cols: int) -> Graph:
        """Join the sites ``(r, c)`` of a rectangle to the ones above, below, left and right.

        Examples
        --------
        >>> Graph.grid(2, 3)
        Graph(6 sites, 7 edges, 1 component)
        """
        if rows < 1 or cols < 1:
            raise ParameterError(f"a grid needs at least one row and one column, got {rows} x {cols}")
        ids = tuple((r, c) for r in range(rows) for c in range(cols))
        return cls._from_edges(ids, *sorted_edges(grid_pairs(rows, cols), None))

    # --- files ------------------------------------------------------------------------------------------------

    @classmethod
    def read(cls, path: str | os.PathLike[str], sites: Iterable[Hashable] | None = None) -> Graph:
        """Read a graph from a CSV edge list or a GraphML file, by the suffix.

        Parameters
        ----------
        path : path
            ``.csv``, ``.tsv``, ``.txt``: a header line, then an edge per row. The columns ``source`` and ``target``,
            or else the first two, are the ends; a column ``weight`` is the weight. A row without a second end names
            a site without adding an edge. ``.graphml``: an undirected graph.
        sites : iterable of ids, optional
            Sites of the graph, in this order. Ids of the file match by their text where the types differ ("7"
            is the site 7). Sites that the file does not name get no edges, which a `GraphWarning` says. By
            default the sites of the file in order of appearance, as ints when all of them are plain integers and
            as text otherwise.

        Examples
        --------
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "graph.csv")
        ...     _ = path.write_text("source,target\\n1,2\\n2,3\\n4,\\n")
        ...     Graph.read(path)
        Graph(4 sites, 2 edges, 2 components)
        """
        ids = None if sites is None else positions(sites)[0]
        try:
            with in_file(path, GraphError):
                return cls(*read_graph(Path(path), ids))
        except DataError as error:  # it names the file
            raise GraphError(str(error)) from None

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a CSV edge list or a GraphML file, by the suffix.

        Parameters
        ----------
        path : path
            ``.csv``, ``.tsv`` or ``.txt``, always with commas, or ``.graphml``. A file of that name is replaced.

        Notes
        -----
        Ids are written as text; `read` makes plain integers ints again, and ``read(path, sites=...)`` finds ids of
        any other kind. In CSV, sites without edges are rows with an empty target; the column ``weight`` is left out
        when all weights are 1.

        Examples
        --------
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "graph.csv")
        ...     Graph([1, 2, 3], [(1, 2)]).write(path)
        ...     path.read_text()
        'source,target\\n1,2\\n3,\\n'
        """
        write_graph(Path(path), self.sites, self.edges, self.weights)

    # --- making another one -----------------------------------------------------------------------------------

    def keep(self, mask: npt.ArrayLike) -> Graph:
        """Keep the edges where a bool array of shape (E,) is true, with their weights, and all sites.

        Examples
        --------
        >>> Graph.complete("abc").keep([True, False, False]).n_edges
        1
        """
        kept = np.asarray(mask)
        if kept.size == 0 and self.n_edges == 0:
            return self
        if kept.dtype != bool or kept.shape != (self.n_edges,):
            raise GraphError(
                f"mask must be a bool array of shape ({self.n_edges},), one per edge, got {kept.dtype} {kept.shape}"
            )
        if kept.all():
            return self
        return Graph._from_edges(self.sites, self.edges[kept], self.weights[kept])

    def reweighted(self, weights: npt.ArrayLike) -> Graph:
        """Replace the edge weights by positive ones of shape (E,), in the order of `edges`.

        Examples
        --------
        >>> Graph.complete("ab").reweighted([0.5]).weights
        array([0.5])
        """
        return Graph._from_edges(self.sites, self.edges, checked_weights(self.sites, self.edges, weights))

    def aligned(self, sites: Iterable[Hashable]) -> Graph:
        """Put all sites in another order; further ones get no edges, which a `GraphWarning` says.

        Examples
        --------
        >>> Graph(["a", "b"], [("a", "b")]).aligned(["b", "a"]).sites
        ('b', 'a')
        """
        ids, position = positions(sites)
        if ids == self.sites:
            return self
        extra = [site for site in self.sites if site not in position]
        if extra:
            raise GraphError(f"the graph has {named(extra)} beyond the {count(len(ids), 'site')} asked for")
        warn_of_unnamed([site for site in ids if site not in self.index])
        moved = np.array([position[site] for site in self.sites], dtype=np.int64)
        known = self._known
        if known is not None:
            return Graph._from_cliques(ids, known.moved(moved, len(ids)))
        return Graph._from_edges(ids, *sorted_edges(moved[self.edges], self.weights))

    def subset(self, sites: Iterable[Hashable]) -> Graph:
        """Restrict the graph to some sites, in the order given, and the edges between them.

        Parameters
        ----------
        sites : iterable of ids
            Sites of the graph.

        Examples
        --------
        >>> Graph.complete("abcd").subset("db").edges.tolist()
        [[1, 0]]
        """
        ids, _ = positions(sites)
        extra = [site for site in ids if site not in self.index]
        if extra:
            raise GraphError(f"the graph does not have {named(extra)}")
        chosen = np.array([self.index[site] for site in ids], dtype=np.int64)
        known = self._known
        if known is not None:
            return Graph._from_cliques(ids, Cliques.from_labels(known.labels[chosen].tolist(), known.weights[chosen]))
        place = np.full(self.n_sites, -1, dtype=np.int64)
        place[chosen] = np.arange(chosen.size)
        inside = (place[self.edges] >= 0).all(axis=1)
        return Graph._from_edges(ids, *sorted_edges(place[self.edges[inside]], self.weights[inside]))

    def corrupt(self, varrho: float, seed: int | np.random.Generator) -> Graph:
        """Flip the edge status of every pair of sites with probability varrho (section 5).

        Edges that stay keep their weights, new ones have weight 1. Time and memory are of order V^2. A V x V matrix
        of uniform numbers is drawn, and the pair of positions a < b is flipped when the entry (a, b) is below varrho.

        Examples
        --------
        >>> Graph.empty("abc").corrupt(1.0, seed=0) == Graph.complete("abc")
        True
        """
        if not 0 <= varrho <= 1:
            raise ParameterError(f"varrho is a probability, from 0 to 1, got {varrho!r}")
        flipped = flipped_pairs(self.n_sites, self.edges, self.weights, varrho, np.random.default_rng(seed))
        return Graph._from_edges(self.sites, *sorted_edges(*flipped))

    # --- theory -----------------------------------------------------------------------------------------------

    def fidelity(self, truth: Graph) -> float:
        """Return the graph fidelity GF = K(E0) / (K(E) + |E minus E0|), at most 1, of this graph for the true one.

        The truth has cliques of sites with the same parameter, ``Graph.clusters(labels)``.

        Examples
        --------
        >>> truth = Graph.clusters([0, 0, 1, 1])
        >>> truth.fidelity(truth), Graph.complete(range(4)).fidelity(truth)
        (1.0, 0.4)
        """
        truth = truth.aligned(self.sites)
        wrong = np.setdiff1d(pair_numbers(self.edges), pair_numbers(truth.edges), assume_unique=True)
        return truth.n_components / (self.n_components + len(wrong))
