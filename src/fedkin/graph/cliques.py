"""Graphs that are unions of cliques, without a list of their edges.

The edge between two sites of one clique weighs ``w_u w_v``. In a sorted clique of total weight W, site k counts
``W(before k) - W(after k)`` times: penalties and cuts are sums over the sorted sites, and no pair is looked at.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedkin._base import Array, Index, count, frozen
from fedkin.errors import GraphError
from fedkin.graph.shapes import all_pairs

#: More edges than this are not listed.
MOST_LISTED = 50_000_000


@dataclass(frozen=True, eq=False)
class Cliques:
    """Disjoint cliques: ``labels (V,)`` numbered from 0 by first appearance, and ``weights (V,)`` of the sites."""

    labels: Index
    weights: Array

    @classmethod
    def of(cls, labels: Iterable[Hashable], weights: Array | None = None) -> Cliques:
        """Cliques of equal labels."""
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
        return Cliques.of(labels.tolist(), weights)

    def equal_groups(self, theta: Array) -> Index:
        """Labels ``(V,)``, by first appearance, of sites of one clique with equal rows of ``theta (V, p)``."""
        rows = np.column_stack([self.labels, theta + 0.0])  # -0.0 equals 0.0
        codes = np.unique(rows, axis=0, return_inverse=True)[1]
        return Cliques.of(codes.ravel().tolist()).labels

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
