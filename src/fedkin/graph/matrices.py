"""The sparse matrices of a graph: weights, incidence, Laplacian, and the components that they show."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import numpy as np

from fedkin._base import Array, Index
from fedkin.errors import GraphError

if TYPE_CHECKING:
    from scipy import sparse

_ROUNDING = 1e-12  # how far, against its largest entry, a matrix may be from symmetric


def square_matrix(matrix: Any) -> sparse.csr_array:
    """The user's matrix as a sparse square one of numbers, or the error that says what it is instead."""
    from scipy import sparse  # slow to load

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
    from scipy import sparse  # slow to load

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
    from scipy import sparse  # slow to load

    columns = edges[:, ::-1].ravel()  # ascending within a row, as csr likes it
    signs = np.tile([-1.0, 1.0], len(edges))
    starts = np.arange(0, 2 * len(edges) + 1, 2)
    return sparse.csr_array((signs, columns, starts), shape=(len(edges), size))


def laplacian_matrix(size: int, edges: Index, weights: Array) -> sparse.csr_array:
    """D'WD of shape (V, V): degrees minus adjacency."""
    from scipy import sparse  # slow to load

    i, j = edges.T
    diagonal = np.arange(size)
    degree = np.bincount(i, weights, size) + np.bincount(j, weights, size)
    entries = np.concatenate([-weights, -weights, degree])
    places = (np.concatenate([i, j, diagonal]), np.concatenate([j, i, diagonal]))
    return sparse.csr_array((entries, places), shape=(size, size))


def component_labels(size: int, edges: Index) -> Index:
    """Number of the connected component of each position (V,), numbered by first appearance."""
    from scipy import sparse  # slow to load
    from scipy.sparse.csgraph import connected_components

    i, j = edges.T
    adjacency = sparse.coo_array((np.ones(len(edges)), (i, j)), shape=(size, size))
    _, labels = connected_components(adjacency, directed=False)
    _, first, codes = np.unique(labels, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[codes].astype(np.int64)
