"""Work on edges as arrays: checks, shapes, unions of cliques, sparse matrices and the spectrum of the Laplacian."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import sparse
from scipy.sparse.csgraph import connected_components
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh, splu
from scipy.spatial import cKDTree

from fedkin._base import Array, Index, count, frozen, html_card, listed, some_of
from fedkin.data import HasSites, site_ids
from fedkin.errors import DataError, GraphError, GraphWarning

#: More edges than this are not listed.
MOST_LISTED = 50_000_000
_ROUNDING = 1e-12  # how far, against its largest entry, a matrix may be from symmetric

# --- checks ------------------------------------------------------------------------------------------------------


def plain_ids(values: Iterable[object], what: str) -> list[Hashable]:
    if isinstance(values, int):
        raise GraphError(f"{what} must be an iterable of ids, got {values!r}: use range({values})")
    try:
        return site_ids(values)
    except DataError as error:
        raise GraphError(f"{what}: {error}") from None


def positions(sites: Iterable[object]) -> tuple[tuple[Hashable, ...], dict[Hashable, int]]:
    ids = tuple(plain_ids(sites, "sites"))
    if not ids:
        raise GraphError("a graph needs at least one site, got none")
    position = {site: number for number, site in enumerate(ids)}
    if len(position) < len(ids):
        twice = next(site for number, site in enumerate(ids) if position[site] != number)
        raise GraphError(f"site {twice!r} is given twice: every site must be named once")
    return ids, position


def ids_for(sites: Iterable[object] | None, size: int, what: str) -> tuple[Hashable, ...]:
    """Ids of sites that come with ``size`` things, one for each; 0..size-1 by default."""
    ids, _ = positions(range(size) if sites is None else sites)
    if len(ids) != size:
        raise GraphError(f"{count(size, what)} for {count(len(ids), 'site')}: give one {what} per site")
    return ids


def checked_edges(ids: tuple[Hashable, ...], index: Index, weights: npt.ArrayLike | None) -> tuple[Index, Array]:
    """Oriented and sorted edges with their weights, or the error that names the culprit."""
    loops = index[:, 0] == index[:, 1]
    if loops.any():
        site = ids[index[np.flatnonzero(loops)[0], 0]]
        raise GraphError(f"edge {(site, site)!r} is a self-loop: remove it, a site is always like itself")
    checked = None if weights is None else checked_weights(ids, index, weights)
    edges, ordered = sorted_edges(index, checked)
    again = (edges[1:] == edges[:-1]).all(axis=1)
    if not again.any():
        return edges, ordered
    for at in np.flatnonzero(again & (ordered[1:] != ordered[:-1])):
        i, j = edges[at]
        raise GraphError(
            f"edge {(ids[j], ids[i])!r} is given twice, with the weights {ordered[at]:g} and {ordered[at + 1]:g}: "
            "give every pair once"
        )
    i, j = edges[np.flatnonzero(again)[0]]
    more = f" (and {int(again.sum()) - 1} more)" if again.sum() > 1 else ""
    text = f"edge {(ids[j], ids[i])!r} is given twice{more}, maybe once in each direction: it counts once"
    warnings.warn(text, GraphWarning, stacklevel=3)
    first = np.concatenate([[True], ~again])
    return edges[first], ordered[first]


def warn_of_unnamed(sites: Sequence[Hashable]) -> None:
    """Say which sites have no edges because a graph does not name them."""
    if sites:
        have = "has" if len(sites) == 1 else "have"
        warnings.warn(f"the graph does not name {named(sites)}, which {have} no edges", GraphWarning, stacklevel=3)


def named(sites: Sequence[Hashable]) -> str:
    """``site 'a'``, or ``2 sites 'a', 'b'``."""
    return f"site {sites[0]!r}" if len(sites) == 1 else f"{len(sites)} sites {listed(sites)}"


def checked_weights(ids: tuple[Hashable, ...], index: Index, weights: npt.ArrayLike) -> Array:
    try:
        values = np.array(weights, dtype=np.float64)
    except (TypeError, ValueError):
        raise GraphError("weights must be numbers, one per edge") from None
    if values.shape != (len(index),):
        raise GraphError(f"weights have the shape {values.shape}, expected ({len(index)},), one per edge")
    bad = ~(np.isfinite(values) & (values > 0))
    if bad.any():
        at = int(np.flatnonzero(bad)[0])
        u, v = (ids[end] for end in index[at])
        raise GraphError(
            f"edge {(u, v)!r} has the weight {values[at]}, expected a positive number: "
            "leave out edges that do not count"
        )
    return values


def checked_site_weights(ids: tuple[Hashable, ...], weights: npt.ArrayLike) -> Array:
    """Positive weights ``(V,)`` of the sites of cliques."""
    try:
        values = np.array(weights, dtype=np.float64)
    except (TypeError, ValueError):
        values = np.empty(0)
    if values.shape != (len(ids),) or not (np.isfinite(values) & (values > 0)).all():
        raise GraphError(f"weights must be {count(len(ids), 'positive number')}, one per site")
    return values


def sorted_edges(index: Index, weights: Array | None) -> tuple[Index, Array]:
    """Pairs with the larger position first, in lexicographic order."""
    i, j = index.max(axis=1), index.min(axis=1)
    order = np.argsort(i * (i.max(initial=0) + 1) + j, kind="stable")
    return np.column_stack([i[order], j[order]]), np.ones(len(index)) if weights is None else weights[order]


def pair_numbers(edges: Index) -> Index:
    """Number of the pair (i, j), i > j, in the list (1, 0), (2, 0), (2, 1), (3, 0), ..."""
    i, j = edges[:, 0], edges[:, 1]
    return i * (i - 1) // 2 + j


def pairs_of_numbers(numbers: Index) -> Index:
    """The inverse of `pair_numbers`, exact below 2**50."""
    i = ((1 + np.sqrt(1 + 8 * numbers.astype(np.float64))) / 2).astype(np.int64)
    return np.column_stack([i, numbers - i * (i - 1) // 2])


# --- shapes ------------------------------------------------------------------------------------------------------


def all_pairs(size: int) -> Index:
    """All pairs ``(i, j)``, i > j, of the positions below ``size``, in lexicographic order."""
    return pairs_of_numbers(np.arange(size * (size - 1) // 2, dtype=np.int64))


def grid_pairs(rows: int, cols: int) -> Index:
    """The pairs of neighbours in a rectangle whose positions run row by row."""
    at = np.arange(rows * cols, dtype=np.int64).reshape(rows, cols)
    across = np.column_stack([at[:, :-1].ravel(), at[:, 1:].ravel()])
    down = np.column_stack([at[:-1].ravel(), at[1:].ravel()])
    return np.concatenate([across, down])


def nearest_pairs(places: Array, k: int) -> Index:
    """The pairs of places ``(V, d)`` of which one is among the ``k < V`` nearest of the other."""
    size = len(places)
    near = np.asarray(cKDTree(places).query(places, k=k + 1)[1])
    itself = near == np.arange(size)[:, None]
    # Among many sites at one place the site itself may not be found; then the last one found goes.
    itself[~itself.any(axis=1), -1] = True
    ends = np.column_stack([np.repeat(np.arange(size), k), near[~itself]]).astype(np.int64)
    return np.unique(np.sort(ends, axis=1), axis=0)


def flipped_pairs(
    size: int, edges: Index, weights: Array, varrho: float, rng: np.random.Generator
) -> tuple[Index, Array]:
    """The edges ``(E, 2)``, i > j, with their weights, after each pair was flipped with probability ``varrho``."""
    flipped, matrix = np.triu(rng.random((size, size)) < varrho, 1), np.zeros((size, size))
    matrix[edges[:, 1], edges[:, 0]] = weights
    matrix[flipped] = matrix[flipped] == 0
    pairs = np.argwhere(matrix).astype(np.int64)
    return pairs, matrix[pairs[:, 0], pairs[:, 1]]


# --- cliques -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Cliques:
    """Disjoint cliques: ``labels (V,)`` numbered from 0 by first appearance, and ``weights (V,)`` of the sites."""

    labels: Index
    weights: Array

    @classmethod
    def from_labels(cls, labels: Iterable[Hashable], weights: Array | None = None) -> Cliques:
        """Make a clique of each label."""
        number: dict[Hashable, int] = {}
        numbered = np.array([number.setdefault(label, len(number)) for label in labels], dtype=np.int64)
        return cls(frozen(numbered), frozen(np.ones(numbered.size) if weights is None else weights))

    @property
    def n_sites(self) -> int:
        return self.labels.size

    @cached_property
    def sizes(self) -> Index:
        """Sites of each clique."""
        return np.bincount(self.labels)

    @property
    def n_edges(self) -> int:
        return int((self.sizes * (self.sizes - 1) // 2).sum())

    @cached_property
    def order(self) -> Index:
        """The sites, clique by clique."""
        return np.argsort(self.labels, kind="stable")

    @cached_property
    def starts(self) -> Index:
        """Where each clique begins in `order`, and the end."""
        return np.concatenate([[0], np.cumsum(self.sizes)])

    @cached_property
    def lightest(self) -> float:
        """The smallest weight of an edge; infinite without edges."""
        by_weight = self.order[np.lexsort((self.weights[self.order], self.labels[self.order]))]
        first = self.starts[:-1][self.sizes > 1]
        return float((self.weights[by_weight[first]] * self.weights[by_weight[first + 1]]).min(initial=np.inf))

    def listed(self) -> tuple[Index, Array]:
        """Edges ``(E, 2)`` in the order of `Graph.edges`, and their weights ``(E,)``."""
        if self.n_edges > MOST_LISTED:
            raise GraphError(
                f"{count(self.n_edges, 'edge')} are too many to list: only the exact solver with the l1 penalty works "
                "on cliques as they are; give a graph with fewer edges, for example Graph.knn(coordinates, k)"
            )
        if self.sizes.size == 1:
            edges = all_pairs(self.n_sites)
        else:
            groups = np.split(self.order, self.starts[1:-1])
            edges = np.concatenate([group[all_pairs(group.size)] for group in groups])
            edges = edges[np.lexsort((edges[:, 1], edges[:, 0]))]
        return edges, self.weights[edges[:, 0]] * self.weights[edges[:, 1]]

    def moved(self, position: Index, n_sites: int) -> Cliques:
        """The cliques when site u is at ``position[u]`` of ``n_sites``; the others are alone."""
        labels, weights = np.arange(self.sizes.size, self.sizes.size + n_sites), np.ones(n_sites)
        labels[position], weights[position] = self.labels, self.weights
        return Cliques.from_labels(labels.tolist(), weights)

    def equal_groups(self, theta: Array) -> Index:
        """Labels ``(V,)``, by first appearance, of sites of one clique with equal rows of ``theta (V, p)``."""
        rows = np.column_stack([self.labels, theta + 0.0])  # -0.0 equals 0.0
        codes = np.unique(rows, axis=0, return_inverse=True)[1]
        return Cliques.from_labels(codes.ravel().tolist()).labels

    def variation(self, theta: Array) -> Array:
        """``sum_e w_e |theta_i - theta_j|_1`` of each clique."""
        total = np.zeros(self.sizes.size)
        for values in theta.T:
            order, before = self._sorted(values)
            counts = 2.0 * before - self.totals[self.labels[order]] - self.weights[order]
            total += np.bincount(self.labels[order], counts * self.weights[order] * values[order])
        return total

    def congestion(self, flow: Array) -> Array:
        """For each clique and column of ``flow (V, p)``, the largest ``|flow(S)| / w(edges that leave S)``: ``(C, p)``.

        Balances of edge duals within ``L w_e`` are those whose congestion is at most L and that sum to 0.
        """
        out = np.zeros((self.sizes.size, flow.shape[1]))
        for c, values in enumerate(flow.T):
            # the extreme sets are the first sites by flow per weight
            order, before = self._sorted(values / self.weights)
            labels = self.labels[order]
            carried = np.cumsum(values[order])
            carried -= np.concatenate([[0.0], carried])[self.starts[labels]]
            leaving = before * (self.totals[labels] - before)
            inner = np.ones(order.size, dtype=bool)
            inner[self.starts[1:] - 1] = False
            np.maximum.at(out[:, c], labels[inner], np.abs(carried[inner]) / leaving[inner])
        return out

    @cached_property
    def totals(self) -> Array:
        """Weight of all sites of each clique."""
        return np.bincount(self.labels, self.weights).astype(np.float64)

    def _sorted(self, values: Array) -> tuple[Index, Array]:
        """Sites clique by clique, ascending in ``values (V,)``, and the weight in the clique up to each of them."""
        order = np.argsort(values) if self.sizes.size == 1 else np.lexsort((values, self.labels))
        weight = np.cumsum(self.weights[order])
        return order, weight - np.concatenate([[0.0], weight])[self.starts[self.labels[order]]]


def found_cliques(labels: Index, edges: Index, weights: Array) -> Cliques | None:
    """The components ``labels (V,)`` as cliques, if they are: all pairs there, and equal weights in each."""
    sizes = np.bincount(labels)
    if len(edges) != int((sizes * (sizes - 1) // 2).sum()):
        return None
    of_edge = labels[edges[:, 0]]
    weight = np.ones(sizes.size)
    weight[of_edge] = weights
    return Cliques(labels, frozen(np.sqrt(weight)[labels])) if (weight[of_edge] == weights).all() else None


# --- matrices ----------------------------------------------------------------------------------------------------


def square_matrix(matrix: Any) -> sparse.csr_array:
    """The user's matrix as a sparse square one of numbers, or the error that says what it is instead."""
    try:
        square = sparse.csr_array(matrix)
    except (TypeError, ValueError) as error:
        raise GraphError(f"expected a matrix of shape (V, V), got {type(matrix).__name__} ({error})") from None
    if square.ndim != 2 or square.shape[0] != square.shape[1]:
        raise GraphError(f"a weight matrix must be square, got the shape {square.shape}")
    if square.dtype.kind not in "biuf":
        raise GraphError(f"a weight matrix must hold real numbers, got {square.dtype}")
    return square


def pairs_of_matrix(square: sparse.csr_array, ids: tuple[Hashable, ...]) -> tuple[Index, Array]:
    """Pairs ``(E, 2)`` and weights ``(E,)`` of a symmetric weight matrix; a diagonal comes out as self-loops."""
    square = square.astype(np.float64)
    square.sum_duplicates()
    square.eliminate_zeros()
    if not np.isfinite(square.data).all():
        raise GraphError("the weight matrix has entries that are NaN or infinite: leave out edges that do not count")
    difference = sparse.coo_array(square - square.T)
    uneven = np.abs(difference.data) > _ROUNDING * np.abs(square.data).max(initial=0.0)
    if uneven.any():
        at = int(np.flatnonzero(uneven)[0])
        i, j = int(difference.coords[0][at]), int(difference.coords[1][at])
        raise GraphError(
            f"the matrix is not symmetric: {square[i, j]} from site {ids[i]!r} to {ids[j]!r}, but "
            f"{square[j, i]} back; use (A + A.T) / 2 if that is what you mean"
        )
    half = sparse.coo_array(sparse.tril(square))
    return np.column_stack(half.coords).astype(np.int64), half.data


def incidence_matrix(size: int, edges: Index) -> sparse.csr_array:
    """D of shape (E, V): +1 at i and -1 at j for the edge (i, j), i > j."""
    columns = edges[:, ::-1].ravel()  # ascending within a row, as csr likes it
    signs = np.tile([-1.0, 1.0], len(edges))
    starts = np.arange(0, 2 * len(edges) + 1, 2)
    return sparse.csr_array((signs, columns, starts), shape=(len(edges), size))


def laplacian_matrix(size: int, edges: Index, weights: Array) -> sparse.csr_array:
    """D'WD of shape (V, V): degrees minus adjacency."""
    i, j = edges.T
    diagonal = np.arange(size)
    degree = np.bincount(i, weights, size) + np.bincount(j, weights, size)
    entries = np.concatenate([-weights, -weights, degree])
    places = (np.concatenate([i, j, diagonal]), np.concatenate([j, i, diagonal]))
    return sparse.csr_array((entries, places), shape=(size, size))


def component_labels(size: int, edges: Index) -> Index:
    """Number of the connected component of each position (V,), numbered by first appearance."""
    i, j = edges.T
    adjacency = sparse.coo_array((np.ones(len(edges)), (i, j)), shape=(size, size))
    _, labels = connected_components(adjacency, directed=False)
    _, first, codes = np.unique(labels, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[codes].astype(np.int64)


# --- spectrum ----------------------------------------------------------------------------------------------------


def smallest_nonzero_eigenvalue(laplacian: sparse.csr_array, labels: Index, dense_size: int = 1500) -> float:
    """Return it for a Laplacian ``(V, V)`` with components ``labels (V,)``; infinity without any edge.

    Components of more than ``dense_size`` sites are left to an iterative routine, which is quicker there.
    """
    sizes = np.bincount(labels)
    smallest = math.inf
    for members in np.split(np.argsort(labels, kind="stable"), np.cumsum(sizes)[:-1]):
        if len(members) > 1:
            block = laplacian if len(sizes) == 1 else laplacian[members][:, members]
            small = len(members) <= dense_size
            second = np.linalg.eigvalsh(block.toarray())[1] if small else _second_eigenvalue(sparse.csc_array(block))
            smallest = min(smallest, float(second))
    return smallest


def _second_eigenvalue(laplacian: sparse.csc_array) -> float:
    size, bound, shift = laplacian.shape[0], 2.0 * float(laplacian.diagonal().max()), 1e-6
    start = np.random.default_rng(0).standard_normal(size)

    def largest(apply: Callable[[Array], Array], **how: Any) -> float:
        """Return the largest eigenvalue among vectors of mean zero, all but the constant eigenvector."""

        def product(vector: Array) -> Array:
            image = apply(vector - vector.mean())
            return np.asarray(image - image.mean())

        operator = LinearOperator((size, size), matvec=product, dtype=np.float64)
        return float(eigsh(operator, k=1, which="LA", v0=start, return_eigenvectors=False, **how)[0])

    try:
        return bound - largest(lambda v: bound * v - laplacian @ v, maxiter=100)  # quick on random graphs
    except ArpackNoConvergence:  # paths, grids and maps, whose sparse factors are small
        factor = splu(sparse.csc_array(laplacian + shift * sparse.eye_array(size)), permc_spec="MMD_AT_PLUS_A")
        return 1.0 / largest(factor.solve, tol=1e-10) - shift


# --- what is known about edges ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False, init=False)
class EdgeSet(HasSites):
    """The edges of a `fedkin.Graph`, which makes and changes them.

    They are listed (`edges` and `weights` are set), or known as `cliques` and listed only when asked for.
    """

    sites: tuple[Hashable, ...]

    @cached_property
    def _listed(self) -> tuple[Index, Array]:
        assert self.cliques is not None  # only they come without a list
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
        if (known := self._known) is not None:
            return frozen(known.sizes[known.labels] - 1)
        return frozen(np.bincount(self.edges.ravel(), minlength=self.n_sites).astype(np.int64))

    def edge_ids(self) -> Iterator[tuple[Hashable, Hashable]]:
        """Yield the edges as pairs of ids, in the order of `edges`.

        Examples
        --------
        >>> from fedkin.graph import Graph
        >>> list(Graph(["a", "b"], [("a", "b")]).edge_ids())
        [('b', 'a')]
        """
        return ((self.sites[i], self.sites[j]) for i, j in self.edges.tolist())

    def incidence(self) -> sparse.csr_array:
        """Return the signed incidence matrix D, sparse of shape (E, V): +1 at i and -1 at j for the edge (i, j), i > j.

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
        """Return the Laplacian D'WD (degrees minus adjacency), sparse of shape (V, V).

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
        """Return the connected component of each site, int64 array of shape (V,), numbered by first appearance.

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
        if not isinstance(other, EdgeSet):
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
        """Return labels of shape (V,) of sites joined by edges along which the rows of ``theta (V, p)`` are equal.

        Examples
        --------
        >>> from fedkin.graph import Graph
        >>> Graph.complete("abc").equal_groups(np.array([[1.0], [2.0], [1.0]]))
        array([0, 1, 0])
        """
        if self._known is not None:
            return self._known.equal_groups(theta)
        equal = (theta[self.edges[:, 0]] == theta[self.edges[:, 1]]).all(axis=1)
        return component_labels(self.n_sites, self.edges[equal])

    def algebraic_connectivity(self) -> float:
        """Return the smallest nonzero eigenvalue of D'D, the paper's gamma_G^2.

        Edge weights do not count. It is infinite for a graph without edges.

        Examples
        --------
        >>> from fedkin.graph import Graph
        >>> round(Graph.complete(range(5)).algebraic_connectivity(), 12)
        5.0
        """
        return smallest_nonzero_eigenvalue(self.laplacian(weighted=False), self.components())
