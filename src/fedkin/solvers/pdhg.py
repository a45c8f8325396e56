"""The quadratic core: over-relaxed, diagonally preconditioned primal-dual iterations (PDHG).

On edges there is one dual vector per edge. With ``s = D' y`` and ``d_i`` the degree of site i, an iteration is

    xhat_i = argmin M_i(x) + (rho d_i / 2) ||x - x_i + s_i / (rho d_i)||^2
    yhat_e = projection of y_e + (rho / 2) (2 xhat - x)_{i-j} onto the dual ball of radius r_e

followed by over-relaxation of both: network-lasso ADMM with its copies eliminated. Sparsity adds one more dual per
site, as if every site had an edge to a neighbour that stays at 0. For the separable l1 penalty ``rho`` is
a number per coordinate, which makes the iteration indifferent to the units of the features.

On unions of cliques with a separable penalty a sort takes the place of the edges. With ``z`` a copy of the parameters
and ``y (V, p)`` the sums of the edge duals at each site,

    x_u = argmin M_u(x) + (w_u rho / 2) ||x - z_u + y_u / (w_u rho)||^2
    z = prox of the penalty at v = relaxed x + y / (w rho);  y = w rho (v - z)

The prox sorts each coordinate of a clique, subtracts from site k ``L / rho`` times the weight before it less the
weight after it, and pools neighbours that are out of order (isotonic regression).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from scipy import sparse
from scipy.optimize import isotonic_regression

from fedkin._base import Array, Mask
from fedkin.core import FusedObjective, QuadraticTerms
from fedkin.graph import Cliques
from fedkin.solvers import kernels
from fedkin.solvers.fusing import fused_parameters

RELAXATION = 1.8
#: rho is rebalanced after this many iterations for the first time, when it is off by more than REBALANCE_AT, and by at
#: most REBALANCE_BY.
FIRST_REBALANCE, REBALANCE_AT, REBALANCE_BY = 10, 2.0, 10.0
#: A check costs about this many iterations.
LEAST_STRETCH = 3
_TINY = float(np.finfo(np.float64).tiny)


@dataclass(frozen=True)
class PrimalDual:
    """A primal point and duals: what an iteration starts from and what it hands out.

    ``theta, zeta (V, p)`` with zeta the duals of the sparsity term or None, ``alpha (E, p)``, ``rho (p,)`` or ``(1,)``,
    and the balance ``D' alpha + zeta``.
    """

    theta: Array
    alpha: Array
    zeta: Array | None
    balance: Array
    rho: Array
    n_iter: int


class Start(NamedTuple):
    """Where an iteration starts; what is None is cold.

    ``theta (V, p)`` is then each site's own minimiser (0 where it has many), and the duals ``alpha`` and
    ``zeta (V, p)`` are 0.
    """

    theta: Array | None = None
    alpha: Array | None = None
    zeta: Array | None = None

    def point(self, quadratic: QuadraticTerms, alone: Mask) -> tuple[Array, Array]:
        """Return parameters ``(V, p)`` to start from, and those of the sites ``alone (V,)``, which stay there."""
        own = quadratic.minimizers() if self.theta is None or alone.any() else self.theta
        x = np.where(quadratic.singular[:, None], 0.0, own) if self.theta is None else self.theta.copy()
        # a site without duals is on its own from the start
        x[alone] = own[alone]
        return x, own[alone]

    def sparsity_duals(self, objective: FusedObjective) -> Array | None:
        """Return the duals of the sparsity term, None where there is none."""
        if objective.sparsity is None:
            return None
        return np.zeros(objective.sparsity.shape) if self.zeta is None else self.zeta


COLD = Start()


def initial_rho(objective: FusedObjective, quadratic: QuadraticTerms) -> Array:
    """``4 * mean curvature / mean degree``, per coordinate for a separable penalty."""
    weight, curvature = weights_of_sites(objective), quadratic.mean_curvature
    degree = max(float(weight.sum()) / weight.size, 1e-12)
    if not objective.penalty.separable:
        curvature = curvature.sum(keepdims=True) / curvature.size
    floor = 1e-6 * max(float(curvature.max()), _TINY)
    return np.asarray(4.0 * np.maximum(curvature, floor) / degree)


def check_after(done: int, rows: Sequence[tuple[int, float, float]] = (), tol: float = 0.0) -> int:
    """Return the iterations until the next check, which the last two ``rows`` (n_iter, value, gap) predict to pass."""
    usual = max(5, done // 10)
    if len(rows) < 2:
        return usual
    (before, _, larger), (at, _, smaller) = rows[-2:]
    if not 0 < smaller < larger < math.inf:
        return usual
    rate = math.log(larger / smaller) / (at - before)
    return min(max(math.ceil(math.log(smaller / tol) / rate), LEAST_STRETCH), 2 * usual)


class Iteration(ABC):
    """The state of an iteration: where it stands after ``n_iter`` steps, and how it goes on."""

    #: Whether every site has a minimiser of its own, so that `certificate` needs no radius.
    regular: bool
    #: Whether it stands at a feasible pair even after Ctrl-C.
    recovers = False
    #: Whether a `pair` shares memory with the state, so that it changes when the iteration goes on.
    live = False
    _weight: Array
    _quadratic: QuadraticTerms

    def __init__(self, rho: Array) -> None:
        self.n_iter, self._rebalancing = 0, Rebalancing()
        self._factor: Array | None = None
        self._set_rho(rho)

    def _set_rho(self, rho: Array) -> None:
        self.rho, self._metric = rho, self._weight * rho
        self._resolve = self._quadratic.resolvent(self._metric)

    @abstractmethod
    def _step(self, relax: float, measure: bool) -> tuple[Array, Array] | None:
        """Take one step; return squared lengths ``(p,)`` of the moves of duals and parameters to ``measure`` them."""

    def _steps(self, n: int, relax: float) -> None:
        for _ in range(n):
            self._step(relax, measure=False)

    def advance(self, n: int) -> None:
        """Take ``n`` steps, the last one without over-relaxation: it leaves a feasible primal-dual pair."""
        # relaxed duals may leave their balls, and a gap computed from them would be void
        end = self.n_iter + n
        while self.n_iter < end:
            if self._factor is not None:
                self._set_rho(self.rho * self._factor)
                self._factor = None
            look = self._rebalancing.next
            stop = min(look, end)
            self._steps(stop - self.n_iter - 1, RELAXATION)
            moves = self._step(1.0 if stop == end else RELAXATION, measure=stop == look)
            self.n_iter = stop
            if moves is not None:
                self._factor = self._rebalancing.factor(*moves, self.rho)

    @abstractmethod
    def certificate(self, theta: Array | None = None) -> tuple[float, float]:
        """Return value and duality gap of the pair, or of other parameters with the same duals, if `regular`."""

    @abstractmethod
    def fused(self) -> Array:
        """Return parameters in which fused sites are exactly equal, for `certificate` and `pair`."""

    def arranged(self, theta: Array) -> Array:
        """Return parameters in the caller's order as `certificate` and `pair` take them."""
        return np.ascontiguousarray(theta)

    @abstractmethod
    def pair(self, theta: Array | None = None) -> PrimalDual:
        """Return the pair it stands at, or other parameters with the same duals."""

    def close(self) -> None:  # noqa: B027  (most have no threads)
        """End its threads, if it has any."""


class NumpyIteration(Iteration):
    """The iteration on edges in numpy, the reference; ``quadratic`` takes the place of the objective's own terms."""

    def __init__(self, objective: FusedObjective, quadratic: QuadraticTerms, rho: Array, start: Start = COLD) -> None:
        self._objective, self._quadratic = replace(objective, terms=quadratic), quadratic
        self._incidence = objective.graph.incidence()
        self._transposed = sparse.csr_array(self._incidence.T)
        self._linked = weights_of_sites(objective)
        self._weight = np.where(self._linked > 0, self._linked, 1.0)[:, None]
        self._alone = self._linked == 0
        self._x, self._own = start.point(quadratic, self._alone)
        edges = objective.graph.n_edges
        self._y = np.zeros((edges, quadratic.n_params)) if start.alpha is None else start.alpha
        self._z = start.sparsity_duals(objective)
        self._s = self._balance()
        self.regular = not bool(quadratic.singular.any())
        super().__init__(rho)

    def _balance(self) -> Array:
        s = np.asarray(self._transposed @ self._y)
        return s if self._z is None else s + self._z

    def _step(self, relax: float, measure: bool) -> tuple[Array, Array] | None:
        x, y, z, rho, objective = self._x, self._y, self._z, self.rho, self._objective
        xhat = self._resolve(self._quadratic.b + self._metric * x - self._s)
        xhat[self._alone] = self._own
        ahead = 2.0 * xhat - x
        yhat = objective.penalty.project(y + 0.5 * rho * np.asarray(self._incidence @ ahead), objective.edge_radius)
        self._x, self._y = x + relax * (xhat - x), y + relax * (yhat - y)
        dual = 2.0 * ((yhat - y) ** 2).sum(axis=0) if measure else np.empty(0)
        if z is not None and objective.sparsity is not None:
            zhat = np.clip(z + rho * ahead, -objective.sparsity, objective.sparsity)
            self._z = z + relax * (zhat - z)
            dual = dual + ((zhat - z) ** 2).sum(axis=0) if measure else dual
        self._s = self._balance()
        return (dual, self._linked @ (xhat - x) ** 2) if measure else None

    def certificate(self, theta: Array | None = None) -> tuple[float, float]:
        x = self._x if theta is None else theta
        gap, _ = self._objective.gap(x, self._y, self._z, self._s)
        return self._objective.value(x), gap

    def fused(self) -> Array:
        return fused_parameters(self._objective, self._x, self._y, self._z)

    def pair(self, theta: Array | None = None) -> PrimalDual:
        x = self._x if theta is None else theta
        return PrimalDual(x, self._y, self._z, self._s, self.rho, self.n_iter)


class CliqueIteration(Iteration):
    """The iteration on objectives whose graph is a union of `Cliques`.

    What the prox leaves is feasible and complementary: its certificate costs nothing but the sites' own gaps, and fused
    sites are equal to the bit. Sparsity that is even in a clique only soft-thresholds the result.
    """

    def __init__(
        self, objective: FusedObjective, quadratic: QuadraticTerms, rho: Array, start: Start = COLD, *, compiled: bool
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
        super().__init__(np.array(np.broadcast_to(rho, shape[1:])))

    @property
    def _balance(self) -> Array:
        return self._alpha if self._zeta is None else self._alpha + self._zeta

    def _step(self, relax: float, measure: bool) -> tuple[Array, Array] | None:
        # over-relaxed also where others are not: the prox leaves feasible duals
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
        if not measure:
            return None
        dual = ((self._balance - y) ** 2 / self._weight).sum(axis=0)
        return dual, (self._weight * (new - z) ** 2).sum(axis=0)

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
        if compiled:
            kernels.load_kernels()
            # each column's last order: from one iteration to the next it hardly changes
            self._order = np.tile(cliques.order, (n_params, 1))

    def __call__(self, v: Array, tau: Array) -> Array:
        out, cliques, starts = np.empty_like(v), self._cliques, self._cliques.starts
        if self._compiled:
            kernels.pool(starts, cliques.weights, tau, v, self._order, out)
            return out
        for c, column in enumerate(v.T):
            order = np.lexsort((column, cliques.labels))
            for lo, hi in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
                at = order[lo:hi]
                weight = cliques.weights[at]
                upto = np.cumsum(weight)
                target = column[at] - tau[c] * (2.0 * upto - weight - upto[-1])
                out[at, c] = isotonic_regression(target, weights=weight).x
        return out


class Rebalancing:
    """When to look at the balance of primal and dual moves (after iteration ``next``), and what it means for rho."""

    def __init__(self) -> None:
        self.next = self.interval = FIRST_REBALANCE

    def factor(self, dual: Array, primal: Array, rho: Array) -> Array | None:
        """Return factors for ``rho`` that would make the moves equally long; None when they are good enough.

        ``dual (p,)`` is ``2 ||dy||^2 + ||dz||^2``, and ``primal (p,)`` is ``sum_i weight_i dx_i^2``.
        """
        self.interval *= 2
        self.next += self.interval
        if rho.size == 1:
            dual, primal = dual.sum(keepdims=True), primal.sum(keepdims=True)
        # duals that all lie on their balls do not move: then a smaller rho lets the primal moves be longer
        known = (dual > _TINY) | (primal > _TINY)
        ratio = np.sqrt(np.where(known, dual, 1.0) / np.maximum(np.where(known, primal, 1.0), _TINY))
        ratio = np.where(known, ratio / rho, 1.0)
        off = (ratio > REBALANCE_AT) | (ratio < 1.0 / REBALANCE_AT)
        return np.where(off, np.clip(ratio, 1.0 / REBALANCE_BY, REBALANCE_BY), 1.0) if off.any() else None


def weights_of_sites(objective: FusedObjective) -> Array:
    """Return the degree of each site (in cliques its weight), plus 1 where it has a sparsity dual; ``(V,)``."""
    weight = objective.graph.degree.astype(np.float64)
    if objective.cliques is not None:
        return np.where((weight > 0) & (objective.strength > 0), objective.cliques.weights, 0.0)
    return (weight if objective.strength else np.zeros_like(weight)) + float(objective.sparsity is not None)
