"""Define the graph between sites, with edges as pairs of site positions."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import sparse
from scipy.spatial import cKDTree

from fedkin._base import Array, Index, count, frozen, html_card, in_file, some_of
from fedkin.data import HasSites
from fedkin.errors import DataError, GraphError, ParameterError
from fedkin.graph.edges import (
    Cliques,
    checked_edges,
    checked_weights,
    component_labels,
    distinct_sites,
    edges_of_networkx,
    ids_for,
    named,
    networkx_graph,
    plain_ids,
    positions_of,
    read_graph,
    sorted_edges,
    warn_of_unnamed,
    write_graph,
)


class Graph(HasSites):
    """Immutable undirected graph over sites, without self-loops.

    Parameters
    ----------
    sites : iterable of V hashable ids
        Nodes, each named once.
    edges : iterable of E pairs of ids
        Edges, in either orientation. A pair repeated with the same weight counts once and gives a `GraphWarning`.
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
        If an edge names an unknown site, is a self-loop or is repeated with different weights, or if a weight is not
        positive.

    Examples
    --------
    >>> graph = Graph(["a", "b", "c"], [("a", "b"), ("c", "b")])
    >>> graph
    Graph(3 sites, 2 edges, 1 component)
    >>> graph.edges.tolist()
    [[1, 0], [2, 1]]
    """

    def __init__(self, sites: Iterable[Hashable], edges: Iterable[Any], weights: npt.ArrayLike | None = None) -> None:
        self.sites = distinct_sites(sites)
        self._set_edges(*checked_edges(self.sites, positions_of(edges, self.index), weights))

    def _set_edges(self, edges: Index, weights: Array) -> None:
        self.edges, self.weights = frozen(edges), frozen(weights)

    @classmethod
    def _from_edges(cls, sites: tuple[Hashable, ...], edges: Index, weights: Array | None = None) -> Graph:
        """Make a graph from valid pairs without checks."""
        made = cls.__new__(cls)
        made.sites = sites
        made._set_edges(*sorted_edges(edges, weights))
        return made

    @classmethod
    def _from_cliques(cls, sites: tuple[Hashable, ...], cliques: Cliques) -> Graph:
        made = cls.__new__(cls)
        made.sites, made.cliques = sites, cliques
        return made

    # --- other constructors -------------------------------------------------------------------------------

    @classmethod
    def from_indices(
        cls, sites: Iterable[Hashable], index: npt.ArrayLike, weights: npt.ArrayLike | None = None
    ) -> Graph:
        """Make a graph from pairs of site positions, which is fast for millions of edges.

        ``index`` is an int array of shape (E, 2), with each pair once, in either orientation.
        """
        made = cls.__new__(cls)
        made.sites = distinct_sites(sites)
        pairs = np.asarray(index)
        if pairs.size == 0:
            pairs = np.empty((0, 2), dtype=np.int64)
        if pairs.ndim != 2 or pairs.shape[1] != 2 or pairs.dtype.kind not in "iu":
            raise GraphError(f"index must be an int array of shape (E, 2), got {pairs.dtype} {pairs.shape}")
        for edge, end in np.argwhere((pairs < 0) | (pairs >= made.n_sites))[:1]:
            raise GraphError(
                f"edge number {edge} names position {pairs[edge, end]}, but the {made.n_sites} sites of the graph "
                f"have the positions 0..{made.n_sites - 1}"
            )
        made._set_edges(*checked_edges(made.sites, pairs.astype(np.int64), weights))
        return made

    @classmethod
    def complete(cls, sites: Iterable[Hashable]) -> Graph:
        """Connect all pairs of sites. Edges are listed only on demand."""
        ids = distinct_sites(sites)
        return cls._from_cliques(ids, Cliques.from_labels([0] * len(ids)))

    @classmethod
    def empty(cls, sites: Iterable[Hashable]) -> Graph:
        """Make a graph without edges."""
        return cls._from_edges(distinct_sites(sites), np.empty((0, 2), dtype=np.int64))

    @classmethod
    def clusters(
        cls,
        labels: Mapping[Any, Hashable] | Iterable[Hashable],
        sites: Iterable[Hashable] | None = None,
        weights: npt.ArrayLike | None = None,
    ) -> Graph:
        """Connect all pairs of sites with the same label. Edges are listed only on demand.

        Parameters
        ----------
        labels : mapping of site id to label, or iterable of V labels
            Group of each site.
        sites : iterable of V ids, optional
            Sites of an iterable of labels; 0..V-1 by default.
        weights : array of shape (V,), optional
            Positive weights of the sites; the edge between u and v has weight ``weights[u] * weights[v]``.

        Examples
        --------
        >>> list(Graph.clusters({"a": 0, "b": 1, "c": 0}).edge_ids())
        [('c', 'a')]
        >>> Graph.clusters([0, 0, 1, 1])
        Graph(4 sites, 2 edges, 2 components)
        """
        if isinstance(labels, Mapping):
            if sites is not None:
                raise GraphError("sites= is only for a sequence of labels: a mapping already names the sites")
            sites, labels = list(labels), list(labels.values())
        groups = plain_ids(labels, "labels")
        ids = ids_for(sites, len(groups), "label")
        if weights is not None:
            weights = np.array(weights, dtype=np.float64)
            if weights.shape != (len(ids),) or not (np.isfinite(weights) & (weights > 0)).all():
                raise GraphError(f"weights must be {count(len(ids), 'positive number')}, one per site")
        return cls._from_cliques(ids, Cliques.from_labels(groups, weights))

    @classmethod
    def from_networkx(cls, g: Any) -> Graph:
        """Make a graph from an undirected networkx graph, with edge attribute ``weight`` (by default 1)."""
        if not (hasattr(g, "nodes") and hasattr(g, "edges") and hasattr(g, "is_directed")):
            raise GraphError(f"expected a networkx graph, got {type(g).__name__}")
        return cls(g.nodes, *edges_of_networkx(g))

    def to_networkx(self) -> Any:
        """Return the graph as a `networkx.Graph`, with the edge attribute ``weight``."""
        return networkx_graph(self.sites, self.edges, self.weights, "Graph.to_networkx")

    @classmethod
    def knn(
        cls,
        coordinates: npt.ArrayLike | Mapping[Hashable, npt.ArrayLike],
        k: int,
        sites: Iterable[Hashable] | None = None,
    ) -> Graph:
        """Connect every site to its k nearest neighbours in Euclidean distance, so degrees are at least k.

        Parameters
        ----------
        coordinates : array of shape (V, d) or (V,), or mapping {site: place}
            Coordinates of each site.
        k : int
            Number of neighbours, from 1 to V-1.
        sites : iterable of V ids, optional
            0..V-1 by default.

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
        near = np.asarray(cKDTree(places).query(places, k=k + 1)[1])
        itself = near == np.arange(len(ids))[:, None]
        # among many coinciding sites the site itself may not be found; then the last one found is dropped
        itself[~itself.any(axis=1), -1] = True
        ends = np.column_stack([np.repeat(np.arange(len(ids)), k), near[~itself]]).astype(np.int64)
        return cls._from_edges(ids, np.unique(np.sort(ends, axis=1), axis=0))

    @classmethod
    def grid(cls, rows: int, cols: int) -> Graph:
        """Connect the sites ``(r, c)`` of a rectangular grid to their neighbours above, below, left and right."""
        if rows < 1 or cols < 1:
            raise ParameterError(f"a grid needs at least one row and one column, got {rows} x {cols}")
        at = np.arange(rows * cols, dtype=np.int64).reshape(rows, cols)
        across = np.column_stack([at[:, :-1].ravel(), at[:, 1:].ravel()])
        down = np.column_stack([at[:-1].ravel(), at[1:].ravel()])
        return cls._from_edges(tuple(np.ndindex(rows, cols)), np.concatenate([across, down]))

    # --- files ------------------------------------------------------------------------------------------------

    @classmethod
    def read(cls, path: str | os.PathLike[str], sites: Iterable[Hashable] | None = None) -> Graph:
        """Read a graph from a CSV edge list or a GraphML file, depending on the suffix.

        Parameters
        ----------
        path : path
            ``.csv``, ``.tsv``, ``.txt``: a header line, then an edge per row. The columns ``source`` and ``target``,
            or else the first two, are the ends; a column ``weight`` is the weight. A row without a second end names
            a site without adding an edge. ``.graphml``: an undirected graph.
        sites : iterable of ids, optional
            Sites of the graph, in this order; names in the file are compared as text. By default, the sites of the file
            in order of appearance, as ints if all of them are plain integers and otherwise as text.

        Examples
        --------
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "graph.csv")
        ...     _ = path.write_text("source,target\\n1,2\\n2,3\\n4,\\n")
        ...     Graph.read(path)
        Graph(4 sites, 2 edges, 2 components)
        """
        ids = None if sites is None else distinct_sites(sites)
        try:
            with in_file(path, GraphError):
                return cls(*read_graph(Path(path), ids))
        except DataError as error:  # it names the file
            raise GraphError(str(error)) from None

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a CSV edge list (always with commas) or a ``.graphml`` file, with ids as text; see `read`."""
        write_graph(Path(path), self.sites, self.edges, self.weights)

    # --- properties ------------------------------------------------------------------------------

    @cached_property
    def _listed(self) -> tuple[Index, Array]:
        assert self.cliques is not None  # only these have no edge list
        edges, weights = self.cliques.listed()
        return frozen(edges), frozen(weights)

    @cached_property
    def edges(self) -> Index:
        return self._listed[0]

    @cached_property
    def weights(self) -> Array:
        return self._listed[1]

    @property
    def _known(self) -> Cliques | None:
        """Cliques of the graph, if already known."""
        known: Cliques | None = vars(self).get("cliques")
        return known

    @cached_property
    def cliques(self) -> Cliques | None:
        """Graph as a union of cliques; None if it is not one."""
        return Cliques.from_components(self.components(), self.edges, self.weights)

    @property
    def n_edges(self) -> int:
        """Number of edges E."""
        return len(self.edges) if self._known is None else self._known.n_edges

    @cached_property
    def degree(self) -> Index:
        """Number of neighbours of each site, int64 array of shape (V,)."""
        if (known := self._known) is not None:
            return frozen(known.sizes[known.labels] - 1)
        return frozen(np.bincount(self.edges.ravel(), minlength=self.n_sites).astype(np.int64))

    def edge_ids(self) -> Iterator[tuple[Hashable, Hashable]]:
        """Yield the edges as pairs of ids, in the order of `edges`."""
        return ((self.sites[i], self.sites[j]) for i, j in self.edges.tolist())

    def incidence(self) -> sparse.csr_array:
        """Return the incidence matrix D, sparse of shape (E, V): +1 at i and -1 at j for the edge (i, j), i > j."""
        return self._incidence

    @cached_property
    def _incidence(self) -> sparse.csr_array:
        columns = self.edges[:, ::-1].ravel()  # ascending within a row, as csr likes it
        signs, starts = np.tile([-1.0, 1.0], self.n_edges), np.arange(0, 2 * self.n_edges + 1, 2)
        return sparse.csr_array((signs, columns, starts), shape=(self.n_edges, self.n_sites))

    @cached_property
    def _transposed(self) -> Any:
        return self._incidence.T

    def balance(self, duals: Array) -> Array:
        """Return ``D' duals``, shape ``(V, p)``: the signed sums at each site of values ``(E, p)`` on the edges."""
        return np.asarray(self._transposed @ duals)

    def laplacian(self, weighted: bool = True) -> sparse.csr_array:
        """Return the Laplacian D'WD, sparse of shape (V, V); W holds the edge weights if ``weighted``, else ones."""
        D = self.incidence()
        scaled = sparse.csr_array(sparse.diags_array(self.weights) @ D) if weighted else D
        return sparse.csr_array(D.T @ scaled)

    def components(self) -> Index:
        """Return the connected component of each site, int64 array of shape (V,), numbered by first appearance."""
        return self._components

    @cached_property
    def _components(self) -> Index:
        return frozen(component_labels(self.n_sites, self.edges)) if self._known is None else self._known.labels

    @property
    def n_components(self) -> int:
        """Number of connected components, the paper's K(E)."""
        return int(self.components().max()) + 1

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Graph):
            return NotImplemented
        if self.sites != other.sites or self.n_edges != other.n_edges:
            return False
        one, two = self._known, other._known
        if one is not None and two is not None:
            return np.array_equal(one.labels, two.labels) and np.array_equal(one.weights, two.weights)
        return np.array_equal(self.edges, other.edges) and np.array_equal(self.weights, other.weights)

    def __repr__(self) -> str:
        counts = (count(self.n_sites, "site"), count(self.n_edges, "edge"), count(self.n_components, "component"))
        return f"Graph({', '.join(counts)})"

    def _repr_html_(self) -> str:
        facts = {
            "sites": f"{self.n_sites:,}: {some_of(self.sites)}",
            "edges": f"{self.n_edges:,}",
            "neighbours of a site": f"{self.degree.min()} to {self.degree.max()}, {self.degree.mean():.3g} on average",
            "connected components": self.n_components,
        }
        return html_card("Graph", facts)

    def equal_groups(self, theta: Array) -> Index:
        """Return labels of shape (V,) of sites joined by edges along which the rows of ``theta (V, p)`` are equal."""
        if self._known is not None:
            return self._known.equal_groups(theta)
        equal = (theta[self.edges[:, 0]] == theta[self.edges[:, 1]]).all(axis=1)
        return component_labels(self.n_sites, self.edges[equal])

    # --- derived graphs -----------------------------------------------------------------------------------

    def keep(self, mask: npt.ArrayLike) -> Graph:
        """Keep all sites and the edges selected by a bool array of shape (E,)."""
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
        """Replace the edge weights by positive ones of shape (E,), in the order of `edges`."""
        return Graph._from_edges(self.sites, self.edges, checked_weights(self.sites, self.edges, weights))

    def aligned(self, sites: Iterable[Hashable]) -> Graph:
        """Reorder the sites; additional sites get no edges and give a `GraphWarning`."""
        ids = distinct_sites(sites)
        if ids == self.sites:
            return self
        position = {site: number for number, site in enumerate(ids)}
        if extra := [site for site in self.sites if site not in position]:
            raise GraphError(f"the graph has {named(extra)} beyond the {count(len(ids), 'site')} requested")
        warn_of_unnamed([site for site in ids if site not in self.index])
        moved = np.array([position[site] for site in self.sites], dtype=np.int64)
        if self._known is not None:
            return Graph._from_cliques(ids, self._known.moved(moved, len(ids)))
        return Graph._from_edges(ids, moved[self.edges], self.weights)

    def subset(self, sites: Iterable[Hashable]) -> Graph:
        """Restrict the graph to the given sites, in that order, and the edges between them."""
        ids = distinct_sites(sites)
        if extra := [site for site in ids if site not in self.index]:
            raise GraphError(f"the graph does not have {named(extra)}")
        chosen = np.array([self.index[site] for site in ids], dtype=np.int64)
        if (known := self._known) is not None:
            return Graph._from_cliques(ids, Cliques.from_labels(known.labels[chosen].tolist(), known.weights[chosen]))
        place = np.full(self.n_sites, -1, dtype=np.int64)
        place[chosen] = np.arange(chosen.size)
        inside = (place[self.edges] >= 0).all(axis=1)
        return Graph._from_edges(ids, place[self.edges[inside]], self.weights[inside])

    def corrupt(self, varrho: float, seed: int | np.random.Generator) -> Graph:
        """Flip the edge status of every pair of sites with probability varrho (section 5).

        Kept edges retain their weights; new ones have weight 1. Time and memory are of order V^2. A V x V matrix of
        uniform numbers is drawn, and the pair of positions a < b is flipped if the entry (a, b) is below varrho.
        """
        if not 0 <= varrho <= 1:
            raise ParameterError(f"varrho is a probability, from 0 to 1, got {varrho!r}")
        shape = (self.n_sites, self.n_sites)
        flipped, matrix = np.triu(np.random.default_rng(seed).random(shape) < varrho, 1), np.zeros(shape)
        matrix[self.edges[:, 1], self.edges[:, 0]] = self.weights
        matrix[flipped] = matrix[flipped] == 0
        pairs = np.argwhere(matrix).astype(np.int64)
        return Graph._from_edges(self.sites, pairs, matrix[pairs[:, 0], pairs[:, 1]])

    # --- theory -----------------------------------------------------------------------------------------------

    def fidelity(self, truth: Graph) -> float:
        """Return the graph fidelity ``GF = K(E0) / (K(E) + |E minus E0|)``, at most 1, relative to the true graph.

        The true graph joins all sites with the same parameter, ``Graph.clusters(labels)``.
        """
        truth = truth.aligned(self.sites)
        numbers, right = (graph.edges @ [self.n_sites, 1] for graph in (self, truth))
        return truth.n_components / (self.n_components + int((~np.isin(numbers, right)).sum()))
