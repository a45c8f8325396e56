"""Network-lasso ADMM (Hallac, Leskovec and Boyd 2015) in plain numpy: two copies and two scaled duals per edge."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from fedkin.core import FusedObjective, QuadraticTerms

Array = NDArray[np.float64]
MOST = 20_000


class HallacADMM:
    """The iteration on one problem."""

    def __init__(self, objective: FusedObjective) -> None:
        assert isinstance(objective.terms, QuadraticTerms)
        self.objective, self.terms = objective, objective.terms
        self.i, self.j = objective.graph.edges.T
        n, e = objective.graph.n_sites, objective.graph.n_edges
        ones, edge = np.ones(e), np.arange(e)
        self.to_i = sparse.csr_array((ones, (self.i, edge)), shape=(n, e))
        self.to_j = sparse.csr_array((ones, (self.j, edge)), shape=(n, e))
        self.degree = objective.graph.degree[:, None].astype(float)
        self._known: dict[float, tuple[float, int]] = {}

    def iterate(self, rho: float, n_iter: int, best: float | None = None, target: float = 0.0) -> tuple[Array, int]:
        """At most ``n_iter`` iterations; with ``best``, until the objective is within ``target`` of it."""
        objective, i, j = self.objective, self.i, self.j
        e, p = self.i.size, self.terms.n_params
        copy_i, copy_j, dual_i, dual_j = (np.zeros((e, p)) for _ in range(4))
        resolve = self.terms.resolvent(np.broadcast_to(rho * self.degree, self.terms.b.shape))
        x = np.zeros_like(self.terms.b)
        for k in range(1, n_iter + 1):
            pulled = self.to_i @ (copy_i - dual_i) + self.to_j @ (copy_j - dual_j)
            x = resolve(self.terms.b + rho * pulled)
            one, other = x[i] + dual_i, x[j] + dual_j
            middle = 0.5 * (one + other)
            half = 0.5 * objective.penalty.prox(one - other, 2.0 * objective.edge_radius / rho)
            copy_i, copy_j = middle + half, middle - half
            dual_i, dual_j = one - copy_i, other - copy_j
            if best is not None and k % 5 == 0 and objective.value(x) <= best + target * abs(best):
                return x, k
        return x, n_iter

    def run_to(self, target: float, off: float) -> tuple[Array, float]:
        """Seconds to the target, with the best rho of a grid times ``off``, known by hindsight."""
        best = self._reference()
        if target not in self._known:
            scale = 4.0 * float(np.einsum("vii->", self.terms.hessians(self.terms.b))) / self.terms.b.size
            scale /= max(float(self.degree.mean()), 1e-12)
            counts = {}
            least = MOST
            for factor in (1.0, 0.5, 2.0, 0.25, 4.0, 0.125, 8.0):
                counts[scale * factor] = self.iterate(scale * factor, least, best, target)[1]
                least = min(least, 2 * counts[scale * factor])
            rho = min(counts, key=lambda one: counts[one])
            self._known[target] = rho, counts[rho]
        rho, n_iter = self._known[target]
        if off != 1.0:
            rho *= off
            n_iter = self.iterate(rho, MOST, best, target)[1]
        start = time.perf_counter()
        x, _ = self.iterate(rho, n_iter)
        return x, time.perf_counter() - start

    def _reference(self) -> float:
        from fedkin.solvers import solve_fused

        return solve_fused(self.objective, 1e-9, quiet=True).objective
