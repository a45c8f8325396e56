"""The graph as the sampler reads it; light to import."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedkin._base import Array, Index


class Neighbours(NamedTuple):
    """Those of site u are ``neighbour[first[u]:first[u + 1]]``, and their edges count as ``weight`` of an edge."""

    first: Index
    neighbour: Index
    weight: Array

    @classmethod
    def of(cls, V: int, edges: Index, weights: Array | None = None) -> Neighbours:
        """From pairs of sites ``(E, 2)`` and what they weigh ``(E,)``, by default 1 each."""
        weights = np.ones(len(edges)) if weights is None else weights
        ends, others = np.concatenate([edges[:, 0], edges[:, 1]]), np.concatenate([edges[:, 1], edges[:, 0]])
        order = np.lexsort([others, ends])
        first = np.concatenate([[0], np.cumsum(np.bincount(ends, minlength=V))])
        return cls(first.astype(np.int64), others[order].astype(np.int64), np.tile(weights, 2)[order])

    @classmethod
    def none(cls, V: int) -> Neighbours:
        """No graph."""
        return cls.of(V, np.empty((0, 2), dtype=np.int64))

    def between(self, z: Index, n_groups: int) -> Array:
        """Weights of the edges from each group to each ``(K, K)``; those inside count twice."""
        pairs = np.repeat(z, np.diff(self.first)) * n_groups + z[self.neighbour]
        made = np.bincount(pairs, weights=self.weight, minlength=n_groups**2)
        return made.reshape(n_groups, n_groups).astype(np.float64)

    def inside(self, z: Index) -> float:
        """Weight of the edges inside groups."""
        return 0.5 * float(self.weight[np.repeat(z, np.diff(self.first)) == z[self.neighbour]].sum())
