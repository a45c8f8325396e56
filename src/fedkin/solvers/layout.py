"""How a compiled iteration stores a problem: numbers of sites and edges, Gram matrices and what is made of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkin._base import Array, Index
from fedkin.core import QuadraticTerms
from fedkin.graph import Graph
from fedkin.solvers.backend import Crew
from fedkin.solvers.kernels import gaps as gap_kernels
from fedkin.solvers.kernels.jit import frozen, nothing

#: Renumbering pays when neighbours are farther apart than this share of all numbers.
SCRAMBLED_SHARE = 0.05
#: A Gram matrix with all pivots above this share of its diagonal is regular beyond doubt.
SAFE_PIVOT = 1e-6


class Numbering:
    """Internal numbers of sites and edges: the caller's, or, where ``changed``, others that keep neighbours close.

    ``sites (V,)`` and ``edges (E,)`` are the caller's numbers (the edges empty where nothing is changed), ``head``
    and ``tail (E,)`` the internal numbers of the ends of the edges.
    """

    def __init__(self, graph: Graph, scrambled_sites: int) -> None:
        i, j = graph.edges[:, 0], graph.edges[:, 1]
        self.changed = graph.n_sites >= scrambled_sites and bool(np.mean(i - j) > SCRAMBLED_SHARE * graph.n_sites)
        self.sites: Index = np.arange(graph.n_sites)
        self.edges: Index = np.empty(0, dtype=np.int64)
        if self.changed:
            self.sites = _bandwidth_order(graph)
            rank = np.empty(graph.n_sites, dtype=np.int64)
            rank[self.sites] = np.arange(graph.n_sites)
            i, j = rank[i], rank[j]
            self.edges = np.lexsort((np.minimum(i, j), np.maximum(i, j)))
            i, j = i[self.edges], j[self.edges]
        self.head, self.tail = frozen(i.astype(np.int32)), frozen(j.astype(np.int32))

    def sites_to_internal(self, values: NDArray[Any]) -> NDArray[Any]:
        return values[self.sites] if self.changed else np.ascontiguousarray(values)

    def edges_to_internal(self, values: NDArray[Any]) -> NDArray[Any]:
        return values[self.edges] if self.changed else np.ascontiguousarray(values)

    def sites_to_caller(self, values: Array) -> Array:
        return _scattered(values, self.sites) if self.changed else values

    def edges_to_caller(self, values: Array) -> Array:
        return _scattered(values, self.edges) if self.changed else values


def _scattered(values: Array, numbers: Index) -> Array:
    out = np.empty_like(values)
    out[numbers] = values
    return out


def _bandwidth_order(graph: Graph) -> Index:
    from scipy.sparse import coo_array, csr_array
    from scipy.sparse.csgraph import reverse_cuthill_mckee

    i, j = graph.edges[:, 0], graph.edges[:, 1]
    shape = (graph.n_sites, graph.n_sites)
    pattern = coo_array((np.ones(2 * i.size, dtype=np.int8), (np.r_[i, j], np.r_[j, i])), shape=shape)
    order = reverse_cuthill_mckee(csr_array(pattern), symmetric_mode=True)
    return np.ascontiguousarray(order, dtype=np.int64)


def _same(one: Array, other: Array) -> bool:
    return one.shape == other.shape and not (one != other).any()


class Grams:
    """Dense Gram matrices, and inverses made of them.

    Along a path the matrices, the degrees and the first rho are the same. What follows from them is kept with the
    terms (`QuadraticTerms.shared`), where numbers are the caller's and there is room.
    """

    def __init__(self, quadratic: QuadraticTerms, numbering: Numbering, crew: Crew, room: int) -> None:
        self.A, self._order = frozen(quadratic.A), frozen(numbering.sites)
        self._crew, self._ranges = crew, crew.split(quadratic.n_sites)
        self._fits = self.A.size <= room
        self._kept = quadratic.shared if self._fits and not numbering.changed else None

    def minimizers(self, b: Array) -> tuple[Array | None, Array]:
        """Each site's own minimiser, None when one may not be unique; and inverses, empty without room for them."""
        none = nothing(0, *self.A.shape[1:])
        if not self._fits:
            return self._solved(b), none
        known = {} if self._kept is None else self._kept
        inverse = known.get("inverse")
        if inverse is None:
            inverse = np.empty_like(self.A)
            n, p = b.shape
            if not self.invert(np.zeros(n), np.ones(p), inverse) > SAFE_PIVOT:
                return None, none
            known["inverse"] = inverse
        if "own" not in known:
            known["own"] = np.matmul(inverse, b[:, :, None])[:, :, 0]
        return known["own"], inverse

    def _solved(self, b: Array) -> Array | None:
        own = np.zeros_like(b)

        def work(_: int, lo: int, hi: int) -> float:
            return float(gap_kernels.local_minimizers(lo, hi, self._order, self.A, b, own))

        return own if min(self._crew.run(work, self._ranges)) > SAFE_PIVOT else None

    def resolvents(self, weight: Array, rho: Array) -> tuple[Array, Array]:
        """``(A_u + weight_u diag(rho))^{-1}``, and the array that may take such inverses for another rho."""
        known = {} if self._kept is None else self._kept
        if "resolvent" in known and _same(known["rho"], rho) and _same(known["weight"], weight):
            return known["resolvent"], np.empty_like(self.A)
        found = np.empty_like(self.A)
        self.invert(weight, rho, found)
        if self._kept is None:
            return found, found
        self._kept.update({"rho": rho.copy(), "weight": weight, "resolvent": found})
        return found, np.empty_like(self.A)

    def invert(self, weight: Array, rho: Array, out: Array) -> float:
        """``out[i] = (A_i + weight_i diag(rho))^{-1}``, and the worst relative pivot."""

        def work(_: int, lo: int, hi: int) -> float:
            return float(gap_kernels.invert(lo, hi, self._order, self.A, weight, rho, out))

        return float(min(self._crew.run(work, self._ranges)))
