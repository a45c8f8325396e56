"""Edge duals for certificates on singular designs.

A dual that pulls a site in a direction that its rows do not show makes its conjugate infinite. A gap then needs
a ball that holds a minimiser, and what can be proven of such balls is often thousands of times too large. But
a neighbour with a regular design can take over the pull, and that hardly costs anything.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedkin._base import Array
from fedkin.core.linalg import sum_groups
from fedkin.core.penalties import Penalty
from fedkin.core.terms import QuadraticTerms
from fedkin.graph import Cliques, Graph


class Rerouting:
    """How pulls at singular sites go to their regular neighbours; one that has none keeps its pull."""

    def __init__(self, terms: QuadraticTerms, graph: Graph) -> None:
        from scipy import sparse  # slow to load

        bad = terms.singular
        first = bad[graph.edges[:, 0]]
        self._edges = np.flatnonzero(first != bad[graph.edges[:, 1]])
        first = first[self._edges]
        self._here = np.where(first, *graph.edges[self._edges].T)  # their singular ends
        self._sign = np.where(first, -1.0, 1.0)[:, None]
        m, self._terms = self._edges.size, terms
        self._summed: Any = sparse.csr_array((np.ones(m), (self._here, np.arange(m))), shape=(graph.n_sites, m))
        incidence: Any = graph.incidence()
        self._transposed: Any = sparse.csr_array(incidence[self._edges].T)

    @property
    def serves(self) -> bool:
        """Whether any singular site has a regular neighbour."""
        return self._edges.size > 0

    def __call__(self, penalty: Penalty, radius: Array, alpha: Array, balance: Array) -> tuple[Array, Array]:
        """Duals inside their balls of ``radius (E,)``, and their balance, without such pulls.

        First duals move as far as they have room. Then all of them shrink, to make as much room as is still needed.
        """
        limit, here, sign = radius[self._edges, None], self._here, self._sign
        pull, size = self._pull(penalty, balance)
        y = alpha[self._edges]
        used = sign * np.sign(pull[here]) * y if penalty.separable else penalty.dual_norm(y)[:, None]
        room = (limit - used).clip(0.0)
        moved = sign * pull[here] * _share(room, np.maximum(self._summed @ room, size)[here])
        balance = balance + self._transposed @ moved
        pull, size = self._pull(penalty, balance)
        total = self._summed @ limit
        rest = sign * pull[here] * _share(limit, total[here])
        shrunk = 1.0 / (1.0 + float(_share(size, total).max()))
        alpha = alpha.copy()
        alpha[self._edges] += moved + rest
        return shrunk * alpha, shrunk * np.asarray(balance + self._transposed @ rest)

    def _pull(self, penalty: Penalty, balance: Array) -> tuple[Array, Array]:
        """What pulls singular sites in directions that their rows do not show, ``(V, p)``, and how large it is."""
        pull, bad = np.zeros_like(balance), self._terms.singular
        pull[bad] = np.einsum("vpq,vq->vp", self._terms.unseen, balance[bad])
        return pull, np.abs(pull) if penalty.separable else penalty.dual_norm(pull)[:, None]


class CliqueRerouting:
    """The same on cliques: pulls at singular sites go to all regular ones of the clique, by their weights."""

    def __init__(self, terms: QuadraticTerms, cliques: Cliques) -> None:
        self._terms, self._cliques = terms, cliques
        regular = np.where(terms.singular, 0.0, cliques.weights)
        total = np.asarray(np.bincount(cliques.labels, regular)[cliques.labels], dtype=np.float64)
        self._share = _share(regular, total)[:, None]
        self._served = (terms.singular & (total > 0))[terms.singular]

    @property
    def serves(self) -> bool:
        """Whether any singular site is in a clique with a regular one."""
        return bool(self._served.any())

    def __call__(self, strength: float, alpha: Array, balance: Array) -> tuple[Array, Array]:
        """Sums ``(V, p)`` of duals within ``strength`` without such pulls, shrunk where they are too large then."""
        labels, bad = self._cliques.labels, self._terms.singular
        pull = np.zeros_like(balance)
        pull[bad] = np.einsum("vpq,vq->vp", self._terms.unseen, balance[bad]) * self._served[:, None]
        moved = self._share * sum_groups(pull, labels, self._cliques.sizes.size)[labels] - pull
        excess = self._cliques.congestion(alpha + moved) / max(strength, np.finfo(float).tiny)
        # all coordinates shrink alike: a site's unseen directions mix them
        shrunk = 1.0 / np.maximum(excess.max(axis=1), 1.0)[labels, None]
        return shrunk * (alpha + moved), shrunk * (balance + moved)


def _share(part: Array, whole: Array) -> Array:
    """``part / whole``, 0 where there is no whole."""
    part, whole = np.broadcast_arrays(part, whole)
    return np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)
