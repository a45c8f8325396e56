"""The quadratic core: over-relaxed, diagonally preconditioned primal-dual iterations on the edge duals.

One dual vector per edge. With ``s = D' y`` and ``d_i`` the degree of site i, an iteration is

    xhat_i = argmin M_i(x) + (rho d_i / 2) ||x - x_i + s_i / (rho d_i)||^2
    yhat_e = projection of y_e + (rho / 2) (2 xhat - x)_{i-j} onto the dual ball of radius r_e

followed by over-relaxation of both: network-lasso ADMM with its copies eliminated. Sparsity adds one more dual per
site, as if every site had an edge to a neighbour that stays at 0. For the separable l1 penalty ``rho`` is
a number per coordinate, which makes the iteration indifferent to the units of the features.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from fedkin._base import Array, Index, Mask
from fedkin.core import FusedObjective, QuadraticTerms, SiteTerms, generalized_inverse, summed_terms
from fedkin.graph import Graph

RELAXATION = 1.8
#: rho is rebalanced after this many iterations for the first time, when it is off by more than REBALANCE_AT, and by at
#: most REBALANCE_BY.
FIRST_REBALANCE = 10
REBALANCE_AT = 2.0
REBALANCE_BY = 10.0
#: A check costs about this many iterations.
LEAST_STRETCH = 3
#: A dual that stays inside its ball by this share belongs to a difference (or a coordinate) that is 0 at the optimum.
INTERIOR = 1e-3
#: Parameters that differ by this share of what sites would have on their own are clearly different.
CLEARLY = 1e-3
#: Relative changes of the objective below this are rounding.
SAME_VALUE = 1e-13
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
        """Parameters ``(V, p)`` to start from, and those of the sites ``alone (V,)``, which stay there."""
        own = quadratic.minimizers() if self.theta is None or alone.any() else self.theta
        x = np.where(quadratic.singular[:, None], 0.0, own) if self.theta is None else self.theta.copy()
        # a site without duals is on its own from the start
        x[alone] = own[alone]
        return x, own[alone]

    def sparsity_duals(self, objective: FusedObjective) -> Array | None:
        """The duals of the sparsity term, None where there is none."""
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


class Stopping(NamedTuple):
    """When a pair is good enough: relative gap to reach, what it is relative to at least, and the last iteration.

    Fused parameters are tried once the gap is within a factor ``fusing_helps`` of ``tol``.
    """

    tol: float
    floor: float
    limit: int
    fusing_helps: float


@dataclass(frozen=True)
class Checked:
    """What a stretch of iterations with checks on the way found.

    ``rows (m, 3)``: iteration, value and relative gap of each check. ``theta``: the fused parameters that the last
    check is about, for `Iteration.pair`; None for the iteration's own.
    """

    rows: Array
    theta: Array | None


def check_after(done: int, rows: Sequence[tuple[int, float, float]] = (), tol: float = 0.0) -> int:
    """Iterations until the next check: when the last two gaps say that it will pass, but not too far ahead.

    ``rows`` are (iteration, value, relative gap) of the checks so far.
    """
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

    n_iter: int
    rho: Array
    #: Whether every site has a minimiser of its own, so that `certificate` needs no radius.
    regular: bool
    #: Whether it stands at a feasible pair even after Ctrl-C.
    recovers = False

    @property
    def live(self) -> bool:
        """Whether a `pair` shares memory with the state, so that it changes when the iteration goes on."""
        return False

    @abstractmethod
    def advance(self, n: int) -> None:
        """``n`` iterations, the last one without over-relaxation: it leaves a feasible primal-dual pair.

        The relaxed duals may leave their balls, and a gap computed from them would be void.
        """

    def settle(self, stopping: Stopping) -> Checked | None:
        """Iterations and checks until one is good enough or some time has passed; None where `advance` must do."""
        return None

    @abstractmethod
    def certificate(self, theta: Array | None = None) -> tuple[float, float]:
        """Value and duality gap of the pair, or of other parameters with the same duals, on regular designs."""

    @abstractmethod
    def fused(self) -> Array:
        """Parameters in which fused sites are exactly equal, for `certificate` and `pair`."""

    def arranged(self, theta: Array) -> Array:
        """Parameters in the caller's order, for `certificate` and `pair`."""
        return np.ascontiguousarray(theta)

    @abstractmethod
    def pair(self, theta: Array | None = None) -> PrimalDual:
        """The pair it stands at, or other parameters with the same duals."""

    def close(self) -> None:  # noqa: B027  (most have no threads)
        """End its threads, if it has any."""


class NumpyIteration(Iteration):
    """The iteration on numpy arrays, the reference; ``quadratic`` takes the place of the objective's own terms."""

    def __init__(self, objective: FusedObjective, quadratic: QuadraticTerms, rho: Array, start: Start = COLD) -> None:
        from scipy import sparse  # slow to load

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
        self._rebalancing = Rebalancing()
        self.n_iter = 0
        self._set_rho(rho)

    def _set_rho(self, rho: Array) -> None:
        self.rho, self._half, self._metric = rho, 0.5 * rho, self._weight * rho
        self._factor: Array | None = None
        self._resolve = self._quadratic.resolvent(self._metric)

    def _balance(self) -> Array:
        s = np.asarray(self._transposed @ self._y)
        return s if self._z is None else s + self._z

    def advance(self, n: int) -> None:
        end = self.n_iter + n
        while self.n_iter < end:
            self._step(1.0 if self.n_iter + 1 == end else RELAXATION)

    def _step(self, relax: float) -> None:
        if self._factor is not None:
            self._set_rho(self.rho * self._factor)
        x, y, z, rho, objective = self._x, self._y, self._z, self.rho, self._objective
        xhat = self._resolve(self._quadratic.b + self._metric * x - self._s)
        xhat[self._alone] = self._own
        ahead = 2.0 * xhat - x
        yhat = objective.penalty.project(y + self._half * np.asarray(self._incidence @ ahead), objective.edge_radius)
        self._x, self._y = x + relax * (xhat - x), y + relax * (yhat - y)
        zhat = None
        if z is not None and objective.sparsity is not None:
            zhat = np.clip(z + rho * ahead, -objective.sparsity, objective.sparsity)
            self._z = z + relax * (zhat - z)
        self._s = self._balance()
        self.n_iter += 1
        if self.n_iter == self._rebalancing.next:
            dual = 2.0 * ((yhat - y) ** 2).sum(axis=0)
            if z is not None and zhat is not None:
                dual += ((zhat - z) ** 2).sum(axis=0)
            self._factor = self._rebalancing.factor(dual, self._linked @ (xhat - x) ** 2, rho)

    def certificate(self, theta: Array | None = None) -> tuple[float, float]:
        x = self._x if theta is None else theta
        gap, _ = self._objective.gap(x, self._y, self._z, self._s)
        return self._objective.value(x), gap

    def fused(self) -> Array:
        return fused_parameters(self._objective, self._x, self._y, self._z)

    def pair(self, theta: Array | None = None) -> PrimalDual:
        x = self._x if theta is None else theta
        return PrimalDual(x, self._y, self._z, self._s, self.rho, self.n_iter)


class Rebalancing:
    """When to look at the balance of primal and dual moves (after iteration ``next``), and what it means for rho."""

    def __init__(self) -> None:
        self.next = self.interval = FIRST_REBALANCE

    def factor(self, dual: Array, primal: Array, rho: Array) -> Array | None:
        """Factors for ``rho`` that would make the moves equally long; None when they are good enough.

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
        if not off.any():
            return None
        return np.where(off, np.clip(ratio, 1.0 / REBALANCE_BY, REBALANCE_BY), 1.0)


def weights_of_sites(objective: FusedObjective) -> Array:
    """Degree of each site (in cliques its weight), plus 1 where it has a sparsity dual; ``(V,)``."""
    weight = objective.graph.degree.astype(np.float64)
    if objective.cliques is not None:
        return np.where((weight > 0) & (objective.strength > 0), objective.cliques.weights, 0.0)
    if objective.strength == 0:
        weight = np.zeros_like(weight)
    if objective.sparsity is not None:
        weight = weight + 1.0
    return weight


def fused_parameters(objective: FusedObjective, theta: Array, alpha: Array, zeta: Array | None) -> Array:
    """Parameters ``(V, p)`` in which fused neighbours are bitwise equal and sparse coordinates 0.

    At the optimum an edge whose dual lies strictly inside its ball joins equal parameters. Each connected group of such
    edges is set to its mean, coordinate by coordinate for a separable penalty; in the same way a coordinate whose
    sparsity dual lies strictly inside its box is 0 for the whole group. The caller decides by the gap what to keep.
    """
    limit = (1.0 - INTERIOR) * objective.edge_radius
    sparse = None
    if objective.sparsity is not None and zeta is not None:
        sparse = np.abs(zeta) < (1.0 - INTERIOR) * objective.sparsity
    i, j = objective.graph.edges[:, 0], objective.graph.edges[:, 1]
    if not objective.penalty.separable:
        inside = objective.penalty.dual_norm(alpha) < limit
        return _grouped(i[inside], j[inside], theta, sparse)
    # every coordinate of every site is a node of its own
    p = theta.shape[1]
    edge, column = np.nonzero(np.abs(alpha) < limit[:, None])
    shape = (theta.size, 1)
    zero = None if sparse is None else sparse.reshape(shape)
    return _grouped(i[edge] * p + column, j[edge] * p + column, theta.reshape(shape), zero).reshape(theta.shape)


def far_from_fused(terms: QuadraticTerms, graph: Graph, theta: Array) -> bool:
    """Whether most of some edges clearly join different parameters: then `fused_components` would be in vain."""
    if graph.cliques is not None:
        # in a clique, sites that follow each other are joined as well as any
        order, labels = graph.cliques.order, graph.cliques.labels
        joined = np.flatnonzero(labels[order[1:]] == labels[order[:-1]])
        sample = np.column_stack([order[joined + 1], order[joined]])
    else:
        sample = graph.edges
    sample = sample[:: len(sample) // 200 + 1]
    ends = theta.take(sample, axis=0)
    different = (np.abs(ends[:, 0] - ends[:, 1]) > CLEARLY * terms.typical_size).any(axis=1)
    return bool(np.count_nonzero(different) > 0.5 * len(sample))


def fused_components(objective: FusedObjective, theta: Array, slack: float) -> Array:
    """``theta`` with components fused where that is better, tried where a mean costs no more than ``slack``."""
    labels = objective.graph.components()
    size = np.bincount(labels)
    means = np.stack([np.bincount(labels, column) / size for column in theta.T], axis=1)
    if not (_changes(objective, labels, theta, means[labels]) <= slack)[size > 1].any():
        return theta
    level = (_better(summed_terms(objective.terms, labels), means) if objective.sparsity is None else means)[labels]
    # a tie within rounding goes to the fused level, so that equal problems from other sums have equal solutions
    rounding = SAME_VALUE * np.bincount(labels, np.abs(objective.terms.values(level)))
    better = (_changes(objective, labels, theta, level) <= rounding) & (size > 1)
    return np.where(better[labels, None], level, theta)


def _better(pooled: SiteTerms, level: Array) -> Array:
    """What one Newton step makes of the level of each component."""
    inverse, _ = generalized_inverse(pooled.hessians(level))
    return np.asarray(level - np.matmul(inverse, pooled.gradients(level)[:, :, None])[:, :, 0])


def _changes(objective: FusedObjective, labels: Index, theta: Array, level: Array) -> Array:
    """Change of the objective of each component when its parameters go from ``theta`` to a common ``level``."""
    terms = objective.terms
    change = terms.values(level) - terms.values(theta)
    if objective.sparsity is not None:
        change += (objective.sparsity * (np.abs(level) - np.abs(theta))).sum(axis=1)
    return np.asarray(np.bincount(labels, change) - objective.penalty_by_component(theta), dtype=np.float64)


def _grouped(i: Index, j: Index, theta: Array, sparse: Mask | None) -> Array:
    """Means of ``theta (N, k)`` over groups joined by edges ``(i, j)``, 0 where any member of the group is sparse."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    n = theta.shape[0]
    joined = coo_array((np.ones(i.size, dtype=np.int8), (i, j)), shape=(n, n))
    groups, labels = connected_components(joined, directed=False)
    size = np.bincount(labels, minlength=groups)
    out = np.empty_like(theta)
    for column in range(theta.shape[1]):
        means = np.bincount(labels, weights=theta[:, column], minlength=groups) / size
        if sparse is not None:
            means[labels[sparse[:, column]]] = 0.0
        out[:, column] = means[labels]
    return out
