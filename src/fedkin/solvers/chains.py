"""A quicker iteration for graphs that are two sets of disjoint chains: grids, rows of pixels, time series.

Where sites agree coordinate by coordinate and every Gram matrix is a multiple of the identity (means; total-variation
denoising), the problem on one set of chains is solved exactly in one sweep. With ``d_1`` and ``d_2`` the balances of
the duals on the two sets, the dual problem is to minimise ``||b - d_1 - d_2||^2`` (in the metric of the curvatures).
Each iteration minimises over ``d_1`` and then over ``d_2``, with Nesterov's momentum and restarts (Chambolle,
Tan and Vaiter 2017). Information travels along a whole chain at once, where edges pass it on one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedkin._base import Array, available_threads
from fedkin.core import FusedObjective, QuadraticTerms
from fedkin.graph import Graph
from fedkin.solvers.backend import Crew
from fedkin.solvers.compiled import KernelIteration
from fedkin.solvers.kernels import chains as chain_kernels
from fedkin.solvers.kernels import steps as kernels
from fedkin.solvers.kernels.bundles import Edges, Sites
from fedkin.solvers.kernels.chains import Links
from fedkin.solvers.kernels.jit import frozen
from fedkin.solvers.pdhg import PrimalDual

Index = NDArray[np.int32]

#: Chains pay when they have at least this many edges on average.
WORTHWHILE = 8
#: Threads pay for chains with more sites than this, all coordinates together.
THREADING_PAYS = 20_000


@dataclass(frozen=True, eq=False)
class Chains:
    """Disjoint chains that cover all sites, some of them of length 1, as in `Links`.

    ``edges (V,)`` is -1 and ``sign (V,)`` 0 at the end of a chain.
    """

    starts: Index
    nodes: Index
    edges: Index
    sign: Array

    def links(self, radius: Array) -> Links:
        """The chains for the kernels, with bounds ``radius (E,)`` of the edges' duals."""
        bounds = np.where(self.edges >= 0, radius[self.edges], 0.0)
        return Links(*(frozen(of) for of in (self.starts, self.nodes, self.edges, self.sign, bounds)))


def two_chain_sets(graph: Graph) -> tuple[Chains, ...] | None:
    """One or two sets of chains that hold every edge once, or None where they are not found or do not pay.

    Edges between sites with consecutive numbers form the first set, the others the second: grids that are numbered
    row by row or column by column.
    """
    if graph.n_edges == 0 or int(graph.degree.max()) > 4:
        return None
    consecutive = graph.edges[:, 0] - graph.edges[:, 1] == 1
    sets = []
    for chosen in (consecutive, ~consecutive):
        if chosen.any():
            chains = _chains(graph, np.flatnonzero(chosen))
            if chains is None:
                return None
            sets.append(chains)
    return tuple(sets)


def _chains(graph: Graph, chosen: NDArray[np.int64]) -> Chains | None:
    ends = graph.edges[chosen]
    n = graph.n_sites
    degree = np.bincount(ends.ravel(), minlength=n)
    if degree.max() > 2 or chosen.size < WORTHWHILE * (np.count_nonzero(degree == 1) // 2):
        return None
    # each edge seen from both of its ends, sorted by that end
    here, there = ends.ravel(order="F"), ends[:, ::-1].ravel(order="F")
    order = np.argsort(here, kind="stable")
    second = np.r_[False, here[order][1:] == here[order][:-1]]
    neighbour = np.full((n, 2), -1, dtype=np.int32)
    edge = np.full((n, 2), -1, dtype=np.int32)
    neighbour[here[order], second.astype(int)] = there[order]
    edge[here[order], second.astype(int)] = np.r_[chosen, chosen][order]
    starts, nodes, edges = (np.empty(n + 1, dtype=np.int32) for _ in range(3))
    count = chain_kernels.walk(neighbour, edge, starts, nodes, edges)
    if count < 0:
        return None
    nodes, edges = nodes[:n], edges[:n]
    sign = np.where(graph.edges[edges, 0] == nodes, 1.0, -1.0)
    return Chains(starts[: count + 1].copy(), nodes, edges, np.where(edges >= 0, sign, 0.0))


def chains_for(objective: FusedObjective, quadratic: QuadraticTerms) -> tuple[Chains, ...] | None:
    """The chains that `ChainIteration` can work on, or None where it does not apply."""
    separable = objective.penalty.separable or quadratic.n_params == 1
    if not (separable and quadratic.isotropic and objective.sparsity is None and objective.strength > 0):
        return None
    if not (quadratic.A > 0).all():
        return None
    return two_chain_sets(objective.graph)


class ChainIteration(KernelIteration):
    """Accelerated alternation between the sets of chains of `chains_for`; the terms are isotropic and regular."""

    regular = True

    def __init__(
        self,
        objective: FusedObjective,
        quadratic: QuadraticTerms,
        chains: tuple[Chains, ...],
        alpha: Array | None,
        n_threads: int | None = None,
    ) -> None:
        n, p = quadratic.b.shape
        self._crew = Crew(n_threads or (available_threads() if n * p > THREADING_PAYS else 1))
        self._chains = chains
        self._a = np.ascontiguousarray(quadratic.A)
        # one row per coordinate
        self._b = np.ascontiguousarray(quadratic.b.T)
        self._links = tuple(one.links(objective.edge_radius) for one in chains)
        self._ranges = tuple(self._balanced(one) for one in chains)
        self._site_ranges = self._crew.split(n)
        head, tail = objective.graph.edges.astype(np.int32).T
        self._edges = Edges(frozen(head), frozen(tail), np.array(objective.edge_radius), kernels.L1)
        none, number = np.empty((0, p)), np.arange(n)
        nothing, grams = np.empty(0, dtype=bool), none[:, :, None]
        parts = (number, grams, grams, self._a, quadratic.b, quadratic.c, self._a, self._a, none, nothing, grams)
        self._sites = Sites(*(frozen(of) for of in parts))
        self._first, self._second = np.zeros((p, n)), np.zeros((p, n))
        self._alpha = np.zeros((head.size, p))
        if alpha is not None and len(chains) == 2:
            self._second[:] = self._balance_on(chains[1], alpha)
        self._pushed, self._found = self._second.copy(), np.empty((p, n))
        self._speed = np.ones(p)
        self._s = np.empty((n, p))
        self.n_iter = 0
        self.rho = np.ones(1)

    def _balance_on(self, chains: Chains, alpha: Array) -> Array:
        used = chains.edges[chains.edges >= 0]
        balance = np.zeros((self._alpha.shape[1], self._a.size))
        for c, row in enumerate(balance):
            np.add.at(row, self._edges.head[used], alpha[used, c])
            np.add.at(row, self._edges.tail[used], -alpha[used, c])
        return balance

    def _balanced(self, chains: Chains) -> list[tuple[int, int]]:
        """Ranges of chains with about the same number of sites."""
        ends = [lo for lo, _ in self._crew.split(self._a.size)] + [self._a.size]
        cuts = np.searchsorted(chains.starts, ends)
        cuts[0], cuts[-1] = 0, chains.starts.size - 1
        return list(zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True))

    # --- iterations -----------------------------------------------------------------------------------------------

    def advance(self, n: int) -> None:
        for _ in range(n):
            for c in range(self._b.shape[0]):
                self._sweep(c)
        self.n_iter += n
        self._set_duals()

    def _sweep(self, c: int) -> None:
        a, b, first, pushed = self._a, self._b[c], self._first[c], self._pushed[c]
        self._chain_step(0, b, pushed, first)
        if len(self._chains) == 1:
            return
        found, second = self._found[c], self._second[c]
        self._chain_step(1, b, first, found)
        turned = self._crew.run(
            lambda _, lo, hi: chain_kernels.turn(lo, hi, a, pushed, found, second), self._site_ranges
        )
        speed = 1.0 if sum(turned) > 0 else self._speed[c]
        self._speed[c] = 0.5 * (1.0 + np.sqrt(1.0 + 4.0 * speed**2))
        momentum = (speed - 1.0) / self._speed[c]
        self._crew.run(
            lambda _, lo, hi: chain_kernels.push(lo, hi, momentum, pushed, found, second), self._site_ranges
        )

    def _chain_step(self, k: int, b: Array, v: Array, rest: Array) -> None:
        links, a = self._links[k], self._a
        self._crew.run(lambda _, lo, hi: chain_kernels.chain_step(lo, hi, links, a, b, v, rest), self._ranges[k])

    def _set_duals(self) -> None:
        for k, balances in enumerate((self._first, self._second)[: len(self._chains)]):
            for c, balance in enumerate(balances):
                self._chain_duals(k, balance, c)
        # the balance of exactly these duals, as a certificate needs it
        self._s[:] = 0.0
        kernels.add_balance(0, len(self._alpha), self._edges, self._alpha, self._s)
        self._theta = (self._b.T - self._s) / self._a[:, None]

    def _chain_duals(self, k: int, balance: Array, c: int) -> None:
        links, alpha = self._links[k], self._alpha
        self._crew.run(lambda _, lo, hi: chain_kernels.chain_duals(lo, hi, links, balance, c, alpha), self._ranges[k])

    # --- where it stands ------------------------------------------------------------------------------------------

    def certificate(self, theta: Array | None = None) -> tuple[float, float]:
        x = self._theta if theta is None else theta
        return self._certified(x, self._alpha, self._s[None])

    def fused(self) -> Array:
        x, none = self._theta, np.empty((0, self._theta.shape[1]))
        return self._fused(x, self._alpha, none, np.empty_like(x))

    def pair(self, theta: Array | None = None) -> PrimalDual:
        x = self._theta if theta is None else theta
        return PrimalDual(x.copy(), self._alpha.copy(), None, self._s.copy(), self.rho, self.n_iter)
