"""Edges between sites, and what can be read off them: degrees, matrices, components."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from fedkin._base import Array, Index, count, frozen, html_card, some_of
from fedkin.data import HasSites
from fedkin.graph.cliques import Cliques, found_cliques
from fedkin.graph.matrices import component_labels, incidence_matrix, laplacian_matrix
from fedkin.graph.spectrum import smallest_nonzero_eigenvalue

if TYPE_CHECKING:
    from scipy import sparse


@dataclass(frozen=True, eq=False, repr=False, init=False)
class Edges(HasSites):
    """What is known about the edges of a `fedkin.Graph`, which makes and changes them.

    They are listed (`edges` and `weights` are set), or known as `cliques`, whose edges are listed only when asked for.
    """

    sites: tuple[Hashable, ...]

    @cached_property
    def edges(self) -> Index:
        return frozen(self._listed[0])

    @cached_property
    def weights(self) -> Array:
        return frozen(self._listed[1])

    @cached_property
    def _listed(self) -> tuple[Index, Array]:
        assert self.cliques is not None  # only they come without a list
        return self.cliques.listed()

    @property
    def _known(self) -> Cliques | None:
        """The cliques, if somebody has said or found out that there are."""
        known: Cliques | None = vars(self).get("cliques")
        return known

    @cached_property
    def cliques(self) -> Cliques | None:
        """The graph as a union of cliques, None where it is none. Of `complete` and `clusters`, edges wait for use."""
        return found_cliques(self.components(), self.edges, self.weights)

    @property
    def n_edges(self) -> int:
        """Number of edges E."""
        known = self._known
        return len(self.edges) if known is None else known.n_edges

    @cached_property
    def degree(self) -> Index:
        """Number of neighbours of each site, int64 array of shape (V,)."""
        known = self._known
        if known is not None:
            return frozen(known.sizes[known.labels] - 1)
        return frozen(np.bincount(self.edges.ravel(), minlength=self.n_sites).astype(np.int64))

    def edge_ids(self) -> Iterator[tuple[Hashable, Hashable]]:
        """The edges as pairs of ids, in the order of `edges`.

        Examples
        --------
        >>> from fedkin.graph import Graph
        >>> list(Graph(["a", "b"], [("a", "b")]).edge_ids())
        [('b', 'a')]
        """
        return ((self.sites[i], self.sites[j]) for i, j in self.edges.tolist())

    def incidence(self) -> sparse.csr_array:
        """The signed incidence matrix D, sparse of shape (E, V): +1 at i and -1 at j for the edge (i, j), i > j.

        Examples
        --------
        >>> from fedkin.graph import Graph
        >>> Graph(["a", "b"], [("a", "b")]).incidence().toarray()
        array([[-1.,  1.]])
        """
        return self._incidence

    @cached_property
    def _incidence(self) -> sparse.csr_array:
        return incidence_matrix(self.n_sites, self.edges)

    def laplacian(self, weighted: bool = True) -> sparse.csr_array:
        """The Laplacian D'WD (degrees minus adjacency), sparse of shape (V, V).

        Parameters
        ----------
        weighted : bool
            Whether W holds the edge weights; otherwise it is the identity.

        Examples
        --------
        >>> from fedkin.graph import Graph
        >>> Graph(["a", "b"], [("a", "b")]).laplacian().toarray()
        array([[ 1., -1.],
               [-1.,  1.]])
        """
        return laplacian_matrix(self.n_sites, self.edges, self.weights if weighted else np.ones(self.n_edges))

    def components(self) -> Index:
        """Number of the connected component of each site, int64 array of shape (V,), numbered by first appearance.

        Examples
        --------
        >>> from fedkin.graph import Graph
        >>> Graph(["a", "b", "c"], [("a", "c")]).components()
        array([0, 1, 0])
        """
        return self._components

    @cached_property
    def _components(self) -> Index:
        known = self._known
        return frozen(component_labels(self.n_sites, self.edges)) if known is None else known.labels

    @property
    def n_components(self) -> int:
        """Number of connected components, the paper's K(E)."""
        return int(self.components().max()) + 1

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Edges):
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
        degree = self.degree
        around = f"{degree.min():g} to {degree.max():g}, {degree.mean():.3g} on average" if self.n_sites else "none"
        facts = {
            "sites": f"{self.n_sites}: {some_of(self.sites)}",
            "edges": self.n_edges,
            "neighbours of a site": around,
            "connected components": self.n_components,
        }
        return html_card("Graph", facts)

    def equal_groups(self, theta: Array) -> Index:
        """Labels of shape (V,) of sites joined by edges along which the rows of ``theta (V, p)`` are equal.

        Examples
        --------
        >>> from fedkin.graph import Graph
        >>> Graph.complete("abc").equal_groups(np.array([[1.0], [2.0], [1.0]]))
        array([0, 1, 0])
        """
        known = self._known
        if known is not None:
            return known.equal_groups(theta)
        equal = (theta[self.edges[:, 0]] == theta[self.edges[:, 1]]).all(axis=1)
        return component_labels(self.n_sites, self.edges[equal])

    def algebraic_connectivity(self) -> float:
        """The smallest nonzero eigenvalue of D'D, the paper's gamma_G^2.

        Returns
        -------
        float
            The smallest over the components of their second eigenvalue (edge weights do not count); infinity for a
            graph without edges, which has no nonzero eigenvalue.

        Examples
        --------
        >>> from fedkin.graph import Graph
        >>> round(Graph.complete(range(5)).algebraic_connectivity(), 12)
        5.0
        """
        return smallest_nonzero_eigenvalue(self.laplacian(weighted=False), self.components())
