"""The iteration on unions of cliques with a separable penalty: no edges, a sort in their place.

With ``z`` a copy of the parameters and ``y (V, p)`` the sums of the edge duals at each site, an iteration is

    x_u = argmin M_u(x) + (w_u rho / 2) ||x - z_u + y_u / (w_u rho)||^2
    z = prox of the penalty at v = relaxed x + y / (w rho);  y = w rho (v - z)

The prox sorts each coordinate of a clique, subtracts from site k ``L / rho`` times the weight before it less the
weight after it, and pools neighbours that are out of order (isotonic regression). What it leaves is feasible and
complementary: its certificate costs nothing but the sites' own gaps, and fused sites are equal to the bit. Sparsity
that is even in a clique only soft-thresholds the result.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedkin._base import Array
from fedkin.core import FusedObjective, QuadraticTerms
from fedkin.graph import Cliques
from fedkin.solvers.pdhg import COLD, RELAXATION, Iteration, PrimalDual, Rebalancing, Start, weights_of_sites


class CliqueIteration(Iteration):
    """As `fedkin.solvers.pdhg.NumpyIteration`, for objectives whose graph are `cliques`."""

    def __init__(
        self,
        objective: FusedObjective,
        quadratic: QuadraticTerms,
        rho: Array,
        start: Start = COLD,
        *,
        compiled: bool,
    ) -> None:
        assert objective.cliques is not None
        self._objective, self._quadratic = replace(objective, terms=quadratic), quadratic
        self._prox = SortedProx(objective.cliques, quadratic.n_params, compiled=compiled)
        linked = weights_of_sites(objective)
        self._weight = np.where(linked > 0, linked, 1.0)[:, None]
        # a site in no clique is on its own from the start, unless sparsity holds it
        self._alone = (linked == 0) & (objective.sparsity is None)
        self.regular = not bool(quadratic.singular.any())
        self._z, self._own = start.point(quadratic, self._alone)
        shape = quadratic.b.shape
        self._alpha = np.zeros(shape) if start.alpha is None else start.alpha
        self._zeta = start.sparsity_duals(objective)
        self._rebalancing = Rebalancing()
        self.n_iter = 0
        self._set_rho(np.array(np.broadcast_to(rho, shape[1:])))

    def _set_rho(self, rho: Array) -> None:
        self.rho = rho
        self._metric = self._weight * rho
        self._resolve = self._quadratic.resolvent(self._metric)

    @property
    def _balance(self) -> Array:
        return self._alpha if self._zeta is None else self._alpha + self._zeta

    def advance(self, n: int) -> None:
        for _ in range(n):
            self._step()

    def _step(self) -> None:
        objective, metric, z, y = self._objective, self._metric, self._z, self._balance
        x = self._resolve(self._quadratic.b + metric * z - y)
        v = RELAXATION * x + (1.0 - RELAXATION) * z + y / metric
        new = self._prox(v, objective.strength / self.rho)
        self._alpha = metric * (v - new)
        if objective.sparsity is not None:
            thin = np.sign(new) * np.maximum(np.abs(new) - objective.sparsity / metric, 0.0)
            self._zeta, new = metric * (new - thin), thin
        new[self._alone], self._alpha[self._alone] = self._own, 0.0
        self._z = new
        self.n_iter += 1
        if self.n_iter == self._rebalancing.next:
            dual = ((self._balance - y) ** 2 / self._weight).sum(axis=0)
            factor = self._rebalancing.factor(dual, (self._weight * (new - z) ** 2).sum(axis=0), self.rho)
            if factor is not None:
                self._set_rho(self.rho * factor)

    def certificate(self, theta: Array | None = None) -> tuple[float, float]:
        if theta is not None:
            return self._objective.value(theta), self._objective.gap(theta, self._alpha, self._zeta, self._balance)[0]
        # the penalty at z is <alpha, z>, and that of sparsity <zeta, z>
        value = float(self._quadratic.values(self._z).sum()) + float((self._balance * self._z).sum())
        return value, float(self._quadratic.young_gaps(self._z, self._balance).sum())

    def fused(self) -> Array:
        return self._z

    def pair(self, theta: Array | None = None) -> PrimalDual:
        x = self._z if theta is None else theta
        return PrimalDual(x, self._alpha, self._zeta, self._balance, self.rho, self.n_iter)


class SortedProx:
    """``argmin_z sum_u w_u (z_u - v_u)^2 / 2 + tau sum_e w_e |z_i - z_j|``, column by column of ``v (V, p)``."""

    def __init__(self, cliques: Cliques, n_params: int, *, compiled: bool) -> None:
        self._cliques, self._compiled = cliques, compiled
        # each column's last order: from one iteration to the next it hardly changes
        self._order = np.tile(cliques.order, (n_params, 1)) if compiled else np.empty((0, 0), dtype=np.int64)

    def __call__(self, v: Array, tau: Array) -> Array:
        out = np.empty_like(v)
        if self._compiled:
            from fedkin.solvers.kernels.cliques import pool

            pool(self._cliques.starts, self._cliques.weights, tau, v, self._order, out)
            return out
        from scipy.optimize import isotonic_regression

        cliques, starts = self._cliques, self._cliques.starts
        for c, column in enumerate(v.T):
            order = np.lexsort((column, cliques.labels))
            for lo, hi in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
                at = order[lo:hi]
                weight = cliques.weights[at]
                upto = np.cumsum(weight)
                target = column[at] - tau[c] * (2.0 * upto - weight - upto[-1])
                out[at, c] = isotonic_regression(target, weights=weight).x
        return out
