"""Minimise quadratics on unions of cliques by primal-dual iterations that sort sites instead of listing edges.

On unions of cliques with a separable penalty, sorting replaces the edges. With ``z`` a copy of the parameters
and ``y (V, p)`` the sums of the edge duals at each site,

    x_u = argmin M_u(x) + (w_u rho / 2) ||x - z_u + y_u / (w_u rho)||^2
    z = prox of the penalty at v = relaxed x + y / (w rho);  y = w rho (v - z)

The prox sorts each coordinate of a clique, subtracts from site k ``L / rho`` times the weight before it minus the
weight after it, and pools neighbours that are out of order (isotonic regression).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedkin._base import Array
from fedkin._compiling import kernel, load
from fedkin.core import FusedObjective, QuadraticTerms
from fedkin.graph import Cliques
from fedkin.solvers.pdhg import RELAXATION, Moves, NumpyIteration, PrimalDual

#: Moves per site above which a new sort is faster than repairing the last order.
MOVES = 8


class CliqueIteration(NumpyIteration):
    """Iteration for graphs that are unions of `Cliques`, based on sorting.

    The result of the prox is feasible and complementary, so its certificate needs only the sites' own gaps, and fused
    sites are bitwise equal. Sparsity that is constant within a clique only soft-thresholds the result.
    """

    def __init__(
        self, objective: FusedObjective, quadratic: QuadraticTerms, rho: Array, start: PrimalDual | None
    ) -> None:
        assert objective.cliques is not None
        self._prox = SortedProx(objective.cliques, quadratic.n_params)
        super().__init__(objective, quadratic, np.array(np.broadcast_to(rho, quadratic.b.shape[1:])), start)

    def _step(self, relax: float, measure: bool = False) -> Moves | None:
        # over-relaxed also where others are not: the prox leaves feasible duals
        objective, metric, x, s = self._objective, self._metric, self._x, self._s
        xhat = self._resolve(self._quadratic.b + metric * x - s)
        v = RELAXATION * xhat + (1.0 - RELAXATION) * x + s / metric
        new = self._prox(v, objective.strength / self.rho)
        self._y = metric * (v - new)
        if objective.sparsity is not None:
            thin = np.sign(new) * np.maximum(np.abs(new) - objective.sparsity / metric, 0.0)
            self._z, new = metric * (new - thin), thin
        new[self._alone], self._y[self._alone] = self._own, 0.0
        self._x = new
        self.balance_duals()
        if not measure:
            return None
        return ((self._s - s) ** 2 / self._weight).sum(axis=0), (self._weight * (new - x) ** 2).sum(axis=0)

    def certificate(self, theta: Array | None = None) -> tuple[float, float]:
        if theta is not None:
            return super().certificate(theta)
        # the penalty at x is <y, x>, and that of sparsity <z, x>
        value = float(self._quadratic.values(self._x).sum()) + float((self._s * self._x).sum())
        return value, float(self._quadratic.young_gaps(self._x, self._s).sum())

    def fused(self) -> Array:
        return self._x


class SortedProx:
    """``argmin_z sum_u w_u (z_u - v_u)^2 / 2 + tau sum_e w_e |z_i - z_j|``, column by column of ``v (V, p)``."""

    def __init__(self, cliques: Cliques, n_params: int) -> None:
        self._cliques, none = cliques, np.empty((0, n_params))
        # previous order of each column, which hardly changes between iterations
        self._order = np.tile(cliques.order, (n_params, 1))
        load(pool, cliques.starts, cliques.weights, none.ravel(), none, self._order, none)

    def __call__(self, v: Array, tau: Array) -> Array:
        out = np.empty_like(v)
        pool(self._cliques.starts, self._cliques.weights, tau, v, self._order, out)
        return out


@kernel
def _sort(keys: Any, order: Any) -> None:
    """Sort ``keys`` and ``order`` along with them: by insertion, which is quick where little has changed."""
    left = MOVES * keys.shape[0]
    for k in range(1, keys.shape[0]):
        key, site, at = keys[k], order[k], k
        while at > 0 and keys[at - 1] > key:
            keys[at], order[at] = keys[at - 1], order[at - 1]
            at -= 1
        keys[at], order[at] = key, site
        left -= k - at
        if left < 0:
            again = np.argsort(keys)
            keys[:], order[:] = keys[again], order[again]
            return


@kernel
def pool(starts: Any, weight: Any, tau: Any, v: Any, order: Any, out: Any) -> None:
    """Compute `SortedProx`; ``order (p, V)`` lists the sites by clique and is kept sorted."""
    n, p = v.shape
    keys, level, mass, end = np.empty(n), np.empty(n), np.empty(n), np.empty(n, dtype=np.int64)
    for c in range(p):
        for k in range(starts.shape[0] - 1):
            lo, hi = starts[k], starts[k + 1]
            total = 0.0
            for t in range(lo, hi):
                keys[t] = v[order[c, t], c]
                total += weight[order[c, t]]
            _sort(keys[lo:hi], order[c, lo:hi])
            blocks, before = 0, 0.0
            for t in range(lo, hi):
                own = weight[order[c, t]]
                value, size = keys[t] - tau[c] * (2.0 * before + own - total), own
                before += own
                while blocks > 0 and level[blocks - 1] >= value:
                    blocks -= 1
                    value = (level[blocks] * mass[blocks] + value * size) / (mass[blocks] + size)
                    size += mass[blocks]
                level[blocks], mass[blocks], end[blocks] = value, size, t + 1
                blocks += 1
            t = lo
            for block in range(blocks):
                while t < end[block]:
                    out[order[c, t], c] = level[block]
                    t += 1
