"""Graphs of a given shape as pairs of positions: cliques, grids, nearest neighbours, random flips."""

from __future__ import annotations

import numpy as np

from fedkin._base import Array, Index
from fedkin.graph.checks import pairs_of_numbers


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
    from scipy.spatial import cKDTree

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
    shape = (size, size)
    flipped = np.triu(rng.random(shape) < varrho, 1)
    matrix = np.zeros(shape)
    matrix[edges[:, 1], edges[:, 0]] = weights
    matrix[flipped] = matrix[flipped] == 0
    pairs = np.argwhere(matrix).astype(np.int64)
    return pairs, matrix[pairs[:, 0], pairs[:, 1]]
