"""The iteration on cliques that lack few edges: a sort for most of it, and the edges of the sites that lack some.

Let a few sites, the cover, have an end of every missing edge. Without them there are cliques, whose penalty has duals
``a (V, p)`` (their sums at each site) and a prox that sorts. Edges of the cover have duals ``y``. With s = a + D'y,

    xhat = argmin M(x) + (rho d / 2) ||x - x_old + s / (rho d)||^2
    ahat = rho w (v - prox(v)), v = a / (rho w) + 2 xhat - x_old;  yhat = y + (rho g / 2) D(2 xhat - x_old), clipped

followed by over-relaxation: as in `fedkin.solvers.pdhg`, where a clique counts like one more dual of each site. An
edge of the cover counts for as little (g) as makes the cover move like the others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from fedkin._base import Array
from fedkin.core import FusedObjective, QuadraticTerms
from fedkin.graph import NearCliques
from fedkin.solvers.cliques import SortedProx
from fedkin.solvers.pdhg import COLD, INTERIOR, RELAXATION, Iteration, PrimalDual, Rebalancing, Start


class NearCliqueIteration(Iteration):
    """As `fedkin.solvers.cliques.CliqueIteration`, for objectives whose graph are `NearCliques`."""

    def __init__(
        self,
        objective: FusedObjective,
        quadratic: QuadraticTerms,
        rho: Array,
        start: Start = COLD,
        *,
        compiled: bool,
    ) -> None:
        near, shape = objective.cliques, quadratic.b.shape
        assert isinstance(near, NearCliques)
        self._objective, self._quadratic, self._near = replace(objective, terms=quadratic), quadratic, near
        self._prox = SortedProx(near.inner, quadratic.n_params, compiled=compiled)
        self.regular = not bool(quadratic.singular.any())
        self._set_weights(near)
        self._x, self._own = start.point(quadratic, self._alone)
        self._z, alpha = self._x, start.alpha
        self._y = np.zeros((len(near.outer), shape[1])) if alpha is None else self._carried(alpha)
        outer = self._transposed @ self._y
        self._a = np.zeros(shape) if alpha is None else np.where(self._held, alpha - outer, 0.0)
        self._s = self._a + outer
        self._rebalancing = Rebalancing()
        self.n_iter = 0
        self._set_rho(np.array(np.broadcast_to(rho, shape[1:])))

    def _set_weights(self, near: NearCliques) -> None:
        from scipy import sparse  # slow to load

        (first, second), inner = near.outer.T, near.inner
        n, m = near.n_sites, first.size
        on = self._objective.strength > 0
        ends, signs = np.concatenate([first, second]), np.repeat([1.0, -1.0], m)
        self._transposed: Any = sparse.csr_array((signs, (ends, np.tile(np.arange(m), 2))), shape=(n, m))
        self._incidence: Any = sparse.csr_array(self._transposed.T)
        self._radius = (self._objective.strength * near.weights[first] * near.weights[second])[:, None]
        # sites that are in cliques, and what their duals and those of edges count
        self._held = (on & (inner.sizes[inner.labels] > 1))[:, None]
        self._outside, self._share = np.flatnonzero(~self._held), near.weights[:, None]
        self._edge_share = (near.weights / near.sizes[near.labels])[first, None] * float(on)
        linked = np.where(self._held, self._share, 0.0) + abs(self._transposed) @ self._edge_share
        self._alone = linked[:, 0] == 0
        self._linked = np.where(linked > 0, linked, 1.0)

    def _carried(self, alpha: Array) -> Array:
        """Duals of the cover's edges for sums ``alpha (V, p)``: at their limits between sites that differ.

        The others share the rest of what their site of the cover has to carry.
        """
        from scipy import sparse  # slow to load

        first, apart = self._near.outer[:, 0], np.sign(self._incidence @ self._x)
        y, ties = self._radius * apart, apart == 0
        mine = sparse.csr_array((np.ones(first.size), (first, np.arange(first.size))), shape=self._transposed.shape)
        rest = (alpha - mine @ y) / np.maximum(mine @ ties.astype(np.float64), 1.0)
        return np.asarray(np.where(ties, rest[first].clip(-self._radius, self._radius), y))

    def _set_rho(self, rho: Array) -> None:
        self.rho = rho
        self._metric, self._step_of_cliques = self._linked * rho, self._share * rho
        self._step_of_edges = 0.5 * self._edge_share * rho
        self._resolve = self._quadratic.resolvent(self._metric)

    def advance(self, n: int) -> None:
        end = self.n_iter + n
        while self.n_iter < end:
            self._step(1.0 if self.n_iter + 1 == end else RELAXATION)

    def _step(self, relax: float) -> None:
        x, a, y, rho = self._x, self._a, self._y, self.rho
        xhat = self._resolve(self._quadratic.b + self._metric * x - self._s)
        xhat[self._alone] = self._own
        ahead = 2.0 * xhat - x
        v = a / self._step_of_cliques + ahead
        z = self._prox(v, self._objective.strength / rho)
        ahat = self._step_of_cliques * (v - z)
        ahat[self._outside] = 0.0
        yhat = (y + self._step_of_edges * (self._incidence @ ahead)).clip(-self._radius, self._radius)
        self._x, self._a, self._y = x + relax * (xhat - x), a + relax * (ahat - a), y + relax * (yhat - y)
        z[self._outside] = xhat[self._outside]
        self._z, self._s = z, self._a + self._transposed @ self._y
        self.n_iter += 1
        if self.n_iter == self._rebalancing.next:
            edges = np.divide((yhat - y) ** 2, self._edge_share, out=np.zeros_like(y), where=self._edge_share > 0)
            dual = ((ahat - a) ** 2 / self._share).sum(axis=0) + 2.0 * edges.sum(axis=0)
            factor = self._rebalancing.factor(dual, (self._linked * (xhat - x) ** 2).sum(axis=0), rho)
            if factor is not None:
                self._set_rho(rho * factor)

    def certificate(self, theta: Array | None = None) -> tuple[float, float]:
        x = self.fused() if theta is None else theta
        return self._objective.value(x), self._objective.gap(x, self._s, None, self._s)[0]

    def fused(self) -> Array:
        """What the prox left, equal to the bit; the cover is equal to a site whose edge to it is not at its limit."""
        out, (first, second) = self._z.copy(), self._near.outer.T
        free = np.abs(self._y) - (1.0 - INTERIOR) * self._radius
        # backwards: an edge inside the cover belongs to the site that comes first
        for site in self._near.cover[::-1].tolist():
            mine = np.flatnonzero(first == site)
            if mine.size:
                best = mine[free[mine].argmin(axis=0)]
                column = np.arange(best.size)
                out[site] = np.where(free[best, column] < 0, out[second[best], column], out[site])
        return out

    def pair(self, theta: Array | None = None) -> PrimalDual:
        x = self.fused() if theta is None else theta
        return PrimalDual(x, self._s, None, self._s, self.rho, self.n_iter)
