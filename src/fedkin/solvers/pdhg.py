"""The quadratic core: over-relaxed, diagonally preconditioned primal-dual iterations (PDHG).

On edges there is one dual vector per edge. With ``s = D' y`` and ``d_i`` the degree of site i, an iteration is

    xhat_i = argmin M_i(x) + (rho d_i / 2) ||x - x_i + s_i / (rho d_i)||^2
    yhat_e = projection of y_e + (rho / 2) (2 xhat - x)_{i-j} onto the dual ball of radius r_e

followed by over-relaxation of both: network-lasso ADMM with its copies eliminated. Sparsity and the ball add one more
dual per site, as if every site had an edge to a neighbour that stays at 0. For the separable l1 penalty ``rho`` is
a number per coordinate, which makes the iteration indifferent to the units of the features; a ball has none of that.
With a ball parameters are moved into it before they are certified.

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

import numpy as np

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
#: Squared lengths ``(p,)`` of the moves of duals ``2 ||dy||^2 + ||dz||^2``, and parameters ``sum_i weight_i dx_i^2``.
Moves = tuple[Array, Array]


@dataclass(frozen=True)
class PrimalDual:
    """A primal point and duals: what an iteration starts from and what it hands out.

    ``theta, zeta (V, p)`` with zeta the duals of sparsity and ball or None, ``alpha`` the duals of the edges, the
    balance ``D' alpha + zeta``, and ``rho (p,)`` or ``(1,)``.
    """

    theta: Array
    alpha: Array
    zeta: Array | None
    balance: Array
    rho: Array


def initial_rho(objective: FusedObjective, quadratic: QuadraticTerms) -> Array:
    """Return ``4 * mean curvature / mean degree``, per coordinate for a separable penalty."""
    weight, curvature = weights_of_sites(objective), quadratic.mean_curvature
    degree = max(float(weight.sum()) / weight.size, 1e-12)
    if not objective.penalty.separable or objective.radius is not None:
        curvature = curvature.sum(keepdims=True) / curvature.size
    floor = 1e-6 * max(float(curvature.max()), _TINY)
    return np.asarray(4.0 * np.maximum(curvature, floor) / degree)


def weights_of_sites(objective: FusedObjective) -> Array:
    """Return the degree of each site (in cliques its weight), plus 1 where it has a dual of its own; ``(V,)``."""
    linked, sparse = objective.graph.degree.astype(np.float64), float(objective.box is not None)
    if not objective.strength:
        return np.full(linked.size, sparse)
    return linked + sparse if objective.cliques is None else np.where(linked > 0, objective.cliques.weights, sparse)


def starting_point(start: PrimalDual | None, own: Array, singular: Mask, alone: Mask) -> Array:
    """Return parameters ``(V, p)`` to start from, given each site's ``own`` minimiser; those ``alone`` stay there.

    A cold start is each site's own minimiser: closer than 0 for weak penalties, as good as any for strong ones.
    """
    x = np.where(singular[:, None], 0.0, own) if start is None else np.array(start.theta, dtype=np.float64)
    x[alone] = own[alone]
    return np.asarray(x)


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
    rho: Array
    #: Whether it stands at a feasible pair even after Ctrl-C.
    recovers = False

    def __init__(self, rho: Array) -> None:
        self.n_iter, self._rebalance_at = 0, FIRST_REBALANCE
        self._factor: Array | None = None
        self._set_rho(rho)

    @abstractmethod
    def _set_rho(self, rho: Array) -> None: ...

    @abstractmethod
    def _run(self, n: int, last: float, measure: bool) -> Moves | None:
        """Take ``n`` steps, over-relaxed except for the last one, whose relaxation and moves are asked for."""

    def advance(self, n: int) -> None:
        """Take ``n`` steps, the last one without over-relaxation: it leaves a feasible primal-dual pair."""
        # relaxed duals may leave their balls, and a gap computed from them would be void
        end = self.n_iter + n
        while self.n_iter < end:
            if self._factor is not None:
                self._set_rho(self.rho * self._factor)
                self._factor = None
            stop = min(self._rebalance_at, end)
            last = 1.0 if stop == end else RELAXATION
            moves = self._run(stop - self.n_iter, last, measure=stop == self._rebalance_at)
            self.n_iter = stop
            if moves is not None:
                self._rebalance_at = 2 * stop + FIRST_REBALANCE
                self._factor = rebalancing_factor(*moves, self.rho)

    @abstractmethod
    def inside(self) -> Array | None:
        """Return parameters moved into the ball, for `certificate` and `pair`; None without a ball."""

    @abstractmethod
    def certificate(self, theta: Array | None = None) -> tuple[float, float]:
        """Return value and duality gap of the pair, or of other parameters with the same duals, if `regular`."""

    @abstractmethod
    def fused(self) -> Array:
        """Return parameters of the ball in which fused sites are exactly equal, for `certificate` and `pair`."""

    def arranged(self, theta: Array) -> Array:
        """Return parameters in the caller's order as `certificate` and `pair` take them."""
        return theta

    @abstractmethod
    def pair(self, theta: Array | None = None) -> PrimalDual:
        """Return the pair, or other parameters with the same duals; it may change when the iteration goes on."""

    def close(self) -> None:  # noqa: B027  (most have no threads)
        """End its threads, if it has any."""


def rebalancing_factor(dual: Array, primal: Array, rho: Array) -> Array | None:
    """Return factors for ``rho`` that would make the moves equally long; None when they are good enough."""
    if rho.size == 1:
        dual, primal = dual.sum(keepdims=True), primal.sum(keepdims=True)
    # duals that all lie on their balls do not move: then a smaller rho lets the primal moves be longer
    known = (dual > _TINY) | (primal > _TINY)
    ratio = np.sqrt(np.where(known, dual, 1.0) / np.maximum(np.where(known, primal, 1.0), _TINY))
    ratio = np.where(known, ratio / rho, 1.0)
    off = (ratio > REBALANCE_AT) | (ratio < 1.0 / REBALANCE_AT)
    return np.where(off, np.clip(ratio, 1.0 / REBALANCE_BY, REBALANCE_BY), 1.0) if off.any() else None


class NumpyIteration(Iteration):
    """The iteration on edges in numpy, the reference; ``quadratic`` takes the place of the objective's own terms."""

    def __init__(
        self, objective: FusedObjective, quadratic: QuadraticTerms, rho: Array, start: PrimalDual | None = None
    ) -> None:
        self._objective, self._quadratic = replace(objective, terms=quadratic), quadratic
        linked, own, singular = weights_of_sites(objective), quadratic.minimizers(), quadratic.singular
        self.regular = not bool(singular.any())
        self._alone = linked == 0
        self._own, self._weight = own[self._alone], np.where(self._alone, 1.0, linked)[:, None]
        self._x = starting_point(start, own, singular, self._alone)
        self._y = np.zeros(objective.dual_shape) if start is None else start.alpha
        cold = None if objective.box is None else np.zeros_like(self._x)
        self._z = cold if start is None else start.zeta
        self._balance_duals()
        super().__init__(rho)

    def _set_rho(self, rho: Array) -> None:
        self.rho, self._metric = rho, self._weight * rho
        self._resolve = self._quadratic.resolvent(self._metric)

    def _balance_duals(self) -> None:
        s = self._objective.balance(self._y)
        self._s = s if self._z is None else s + self._z

    def _run(self, n: int, last: float, measure: bool) -> Moves | None:
        for _ in range(n - 1):
            self._step(RELAXATION)
        return self._step(last, measure)

    def _step(self, relax: float, measure: bool = False) -> Moves | None:
        x, y, z, rho, objective = self._x, self._y, self._z, self.rho, self._objective
        xhat = self._resolve(self._quadratic.b + self._metric * x - self._s)
        xhat[self._alone] = self._own
        ahead = 2.0 * xhat - x
        yhat = objective.penalty.project(y + 0.5 * rho * objective.differences(ahead), objective.edge_radius)
        self._x, self._y = x + relax * (xhat - x), y + relax * (yhat - y)
        if z is not None and (box := objective.box) is not None:
            zhat = np.clip(v := z + rho * ahead, -box, box)
            if objective.radius is not None:
                zhat = v - rho * objective.inside((v - zhat) / rho)
            self._z = z + relax * (zhat - z)
        self._balance_duals()
        if not measure:
            return None
        dual = 2.0 * ((yhat - y) ** 2).sum(axis=0)
        dual += 0.0 if z is None else ((zhat - z) ** 2).sum(axis=0)
        return dual, (self._weight * (xhat - x) ** 2).sum(axis=0)

    def inside(self) -> Array | None:
        return None if self._objective.radius is None else self._objective.inside(self._x)

    def certificate(self, theta: Array | None = None) -> tuple[float, float]:
        x = self._x if theta is None else theta
        return self._objective.value(x), self._objective.gap(x, self._y, self._z, self._s)[0]

    def fused(self) -> Array:
        return self._objective.inside(fused_parameters(self._objective, self._x, self._y, self._z))

    def pair(self, theta: Array | None = None) -> PrimalDual:
        return PrimalDual(self._x if theta is None else theta, self._y, self._z, self._s, self.rho)


class CliqueIteration(NumpyIteration):
    """The iteration on objectives whose graph is a union of `Cliques`, which a kernel sorts.

    What the prox leaves is feasible and complementary: its certificate costs nothing but the sites' own gaps, and fused
    sites are equal to the bit. Sparsity that is even in a clique only soft-thresholds the result.
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
        self._balance_duals()
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
        kernels.load_kernels()
        self._cliques = cliques
        # each column's last order: from one iteration to the next it hardly changes
        self._order = np.tile(cliques.order, (n_params, 1))

    def __call__(self, v: Array, tau: Array) -> Array:
        out = np.empty_like(v)
        kernels.pool(self._cliques.starts, self._cliques.weights, tau, v, self._order, out)
        return out
